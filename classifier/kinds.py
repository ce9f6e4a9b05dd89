"""The classes of prompts."""

from __future__ import annotations

from enum import StrEnum


class PromptClass(StrEnum):
    """The classes that quality is measured and promised for."""

    CHAT = "chat"
    CODE = "code"
    MATH = "math"
    EXTRACTION = "extraction"
    WRITING = "writing"
    MULTILINGUAL = "multilingual"
    LONG_CONTEXT = "long_context"
    UNKNOWN = "unknown"
