"""Which form errors have at which path."""

from __future__ import annotations

import pytest

from router.api.paths import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    EMBEDDINGS,
    MESSAGES,
    PAGE,
    RESPONSES,
    ErrorForm,
    error_form,
)


@pytest.mark.parametrize(
    "path",
    [CHAT, COMPLETIONS, EMBEDDINGS, "/v1/models", "/v1/nowhere", "/v1/messagesx", "/tokenize", "/detokenize"],
)
def test_openais_and_vllms_paths(path: str) -> None:
    """Those that are not there as well: an SDK reads the 404."""
    assert error_form(path) is ErrorForm.OPENAI


@pytest.mark.parametrize("path", [MESSAGES, COUNT_TOKENS, "/v1/messages/batches"])
def test_anthropics_paths(path: str) -> None:
    assert error_form(path) is ErrorForm.ANTHROPIC


@pytest.mark.parametrize("path", [RESPONSES, "/v1/responses/resp_1", "/v1/responses/resp_1/cancel"])
def test_paths_of_responses(path: str) -> None:
    assert error_form(path) is ErrorForm.RESPONSES


@pytest.mark.parametrize("path", [PAGE, "/generate", "/v1", "/v10/models", "/tokenize/", "/admin/v1/", ""])
def test_our_own_paths(path: str) -> None:
    assert error_form(path) is ErrorForm.PROBLEM
