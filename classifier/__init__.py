"""Prompts in, features out. Knows nothing of HTTP, of tiers, or of telemetry."""

from classifier.classes import PromptClass
from classifier.errors import ClassifierError, TokenizerError
from classifier.features import PromptFeatures, extract
from classifier.tokens import EstimatingCounter, ModelTokenCounter, TokenCounter

__all__ = [
    "ClassifierError",
    "EstimatingCounter",
    "ModelTokenCounter",
    "PromptClass",
    "PromptFeatures",
    "TokenCounter",
    "TokenizerError",
    "extract",
]
