"""Which paths' errors have OpenAI's form."""

from __future__ import annotations

import pytest

from router.api.paths import CHAT, COMPLETIONS, EMBEDDINGS, PAGE, speaks_openai


@pytest.mark.parametrize(
    "path", [CHAT, COMPLETIONS, EMBEDDINGS, "/v1/models", "/v1/nowhere", "/tokenize", "/detokenize"]
)
def test_openais_and_vllms_paths(path: str) -> None:
    """Those that are not there as well: an SDK reads the 404."""
    assert speaks_openai(path)


@pytest.mark.parametrize("path", [PAGE, "/generate", "/v1", "/v10/models", "/tokenize/", "/admin/v1/", ""])
def test_our_own_paths(path: str) -> None:
    assert not speaks_openai(path)
