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
    ("form", "paths"),
    [
        (
            ErrorForm.OPENAI,
            [
                CHAT,
                COMPLETIONS,
                EMBEDDINGS,
                "/v1/models",
                "/v1/nowhere",
                "/v1/messagesx",
                "/tokenize",
                "/detokenize",
            ],
        ),
        (ErrorForm.ANTHROPIC, [MESSAGES, COUNT_TOKENS, "/v1/messages/batches"]),
        (
            ErrorForm.RESPONSES,
            [RESPONSES, "/v1/responses/resp_1", "/v1/responses/resp_1/cancel"],
        ),
        (
            ErrorForm.PROBLEM,
            [PAGE, "/generate", "/v1", "/v10/models", "/tokenize/", "/admin/v1/", ""],
        ),
    ],
)
def test_each_api_has_its_own_errors(form: ErrorForm, paths: list[str]) -> None:
    """Also where nothing is: an SDK reads the 404."""
    assert {path: error_form(path) for path in paths} == dict.fromkeys(paths, form)
