"""Prompts in, features out. Knows nothing of HTTP, of tiers, or of telemetry."""

from classifier.classes import PromptClass
from classifier.features import PromptFeatures, extract
from classifier.errors import ClassifierError, TokenizerError
from classifier.tokens import EstimatingCounter, TokenCounter

__all__ = [
    "ClassifierError",
    "EstimatingCounter",
    "PromptClass",
    "PromptFeatures",
    "TokenCounter",
    "TokenizerError",
    "extract",
]
