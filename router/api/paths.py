"""Paths of endpoints that several modules name."""

from __future__ import annotations

PAGE = "/"
MOST_LISTED = 1000  # entries of a list in one answer
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
_OWN_SHAPE = {"/tokenize", "/detokenize"}  # vLLM's own endpoints, whose errors have OpenAI's form


def speaks_openai(path: str) -> bool:
    """Tell whether errors at a path have OpenAI's form."""
    return path.startswith("/v1/") or path in _OWN_SHAPE
