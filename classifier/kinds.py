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
    TOOLS = "tools"
    UNKNOWN = "unknown"


# Classes told apart where a prompt neither holds nor asks for code, is not long, is no small talk and has nothing to do with
# tools; unknown is text that says nothing.
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


class ToolUse(StrEnum):
    """What in a request's structure makes it one of the class ``TOOLS``, whatever its words."""

    OFFERED = "tools offered"
    RESULT = "a tool's result"  # the last message
