"""Paths of endpoints that several modules name."""

from __future__ import annotations

from enum import Enum

PAGE = "/"
MAX_LISTED = 1000  # entries of a list in one answer
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
MESSAGES = "/v1/messages"
COUNT_TOKENS = "/v1/messages/count_tokens"
RESPONSES = "/v1/responses"
_VLLMS_OWN = {"/tokenize", "/detokenize"}  # endpoints whose errors have OpenAI's form


class ErrorForm(Enum):
    PROBLEM = "RFC 9457"
    OPENAI = "OpenAI's error object"
    RESPONSES = "OpenAI's error object, and in streams an event with a name"
    ANTHROPIC = "Anthropic's error object"


def error_form(path: str) -> ErrorForm:
    """Return the form of errors that callers of a path expect."""
    if path == MESSAGES or path.startswith(f"{MESSAGES}/"):
        return ErrorForm.ANTHROPIC
    if path == RESPONSES or path.startswith(f"{RESPONSES}/"):
        return ErrorForm.RESPONSES
    if path.startswith("/v1/") or path in _VLLMS_OWN:
        return ErrorForm.OPENAI
    return ErrorForm.PROBLEM
