"""The check of the overflow: that it answers, takes its key, and has its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx

from router.cli.doctor.findings import Finding, ok, problem, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from router.cli.doctor.findings import CheckContext

TIMEOUT_S = 5.0
REFUSED = {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}


def overflow(context: CheckContext) -> Iterator[Finding]:
    """Ask the overflow for its models. What it says of an error is not shown."""
    options = context.settings.overflow
    if not options.url:
        yield ok("none: requests that all tiers are too full for are refused")
        return
    key, name = options.api_key.get_secret_value(), options.shown_name
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{options.url}/models", headers=headers, timeout=TIMEOUT_S, trust_env=False)
    except httpx.HTTPError as error:
        yield problem(f"{name} does not answer ({type(error).__name__})", "correct overflow.url, or leave it empty")
        return
    yield judge(name, options.model, answer)


def judge(name: str, model: str, answer: httpx.Response) -> Finding:
    """Return what the answer to ``GET /models`` tells of the overflow."""
    if answer.status_code in REFUSED:
        return problem(f"{name} refuses the key (HTTP {answer.status_code})", "correct overflow.api_key")
    if not answer.is_success:
        return warning(f"{name} answers GET /models with HTTP {answer.status_code}", "check overflow.url by a request")
    try:
        models = {card["id"] for card in answer.json()["data"]}
    except (ValueError, LookupError, TypeError):
        return warning(f"{name} answers GET /models with no list of models", "check overflow.url by a request")
    if model not in models:
        return warning(f"{name} lists no model {model}", "correct overflow.model, or check it by a request")
    return ok(f"{name} answers, takes the key and has {model}")
