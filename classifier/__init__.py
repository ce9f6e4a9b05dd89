"""Prompts in, features out. Knows nothing of HTTP, of tiers, or of telemetry."""

from classifier.errors import ClassifierError, TokenizerError, WeightsError
from classifier.features import PromptFeatures, extract
from classifier.kinds import PromptClass
from classifier.tokens import EstimatingCounter, ModelTokenCounter, TokenCounter

__all__ = [
    "ClassifierError",
    "EstimatingCounter",
    "ModelTokenCounter",
    "PromptClass",
    "PromptFeatures",
    "TokenCounter",
    "TokenizerError",
    "WeightsError",
    "extract",
]
