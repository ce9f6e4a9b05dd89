"""Errors of the classifier.

ClassifierError
├── TokenizerError    a tokenizer file is missing or is not one
└── WeightsError      the class weights do not fit the code
"""


class ClassifierError(Exception):
    """Is the base of every error that this package raises."""


class TokenizerError(ClassifierError):
    """Tells that a tokenizer file cannot be read or is not a tokenizer definition."""


class WeightsError(ClassifierError):
    """Tells that a file of class weights cannot be read or does not fit this code."""
