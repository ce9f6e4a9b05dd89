"""Requests as the endpoints hand them to the pipeline."""

from __future__ import annotations

from typing import Any

from router.auth.api_keys import ANONYMOUS, Caller
from router.pipeline.request import (
    Call,
    PromptText,
    RequestContext,
    RoutingOptions,
)
from router.upstream.engine_request import EngineRequest


def asked_for(
    prompt: PromptText,
    caller: Caller = ANONYMOUS,
    adapter: str | None = None,
    **values: Any,
) -> Call:
    """Return a call for at most 100 tokens, if it says no other number."""
    document = {"messages": [], "max_tokens": 100}
    engine = EngineRequest(document=document, request_id="r", adapter=adapter)
    given = {"options": RoutingOptions(), "max_tokens": 100, **values}
    return Call(
        context=RequestContext("r", "t", caller),
        prompt=prompt,
        engine_request=engine,
        **given,
    )
