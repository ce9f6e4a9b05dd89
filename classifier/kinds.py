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
    SMALL_TALK = "small_talk"
    UNKNOWN = "unknown"


# Classes told apart where a prompt neither holds nor asks for code, is not long and is no small talk; unknown is text that
# says nothing.
JUDGED = (
    PromptClass.CHAT,
    PromptClass.EXTRACTION,
    PromptClass.MATH,
    PromptClass.MULTILINGUAL,
    PromptClass.WRITING,
    PromptClass.UNKNOWN,
)


class Complexity(StrEnum):
    """How much work a prompt asks for, from one fact or line to a design of several parts."""

    TRIVIAL = "trivial"
    MODERATE = "moderate"
    COMPLEX = "complex"
