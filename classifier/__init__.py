"""Prompts in, features out. Knows nothing of HTTP, of tiers, or of telemetry."""

from classifier.errors import ClassifierError, TokenizerError, WeightsError
from classifier.explanation import explain
from classifier.features import EstimatingCounter, PromptFeatures, TokenCounter, extract
from classifier.kinds import Complexity, PromptClass, ToolUse
from classifier.remembering import RememberingCounter
from classifier.second_look import SecondLook, load_second_look
from classifier.tokens import ModelTokenCounter

__all__ = [
    "ClassifierError",
    "Complexity",
    "EstimatingCounter",
    "ModelTokenCounter",
    "PromptClass",
    "PromptFeatures",
    "RememberingCounter",
    "SecondLook",
    "TokenCounter",
    "TokenizerError",
    "ToolUse",
    "WeightsError",
    "explain",
    "extract",
    "load_second_look",
]
