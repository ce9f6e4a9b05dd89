"""``POST /generate`` and ``POST /route``."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from starlette.responses import Response

from classifier import extract
from router.answers import Answer, ChatRequest
from router.context import RequestContext, body_message, context_of, read_body, start_message, while_connected
from router.continuation import continued_on
from router.problems import describe
from router.services import (
    Services,
    answer_headers,
    check_hint,
    choose,
    default_priority,
    engine_request_id,
    priority_of,
    served,
)
from router.upstream import UpstreamError
from router.wire import GenerateBody, make_query, parse_generate, render_decision

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from classifier import PromptFeatures
    from router.decision import Decision, Query
    from tiers.fleet import FleetSnapshot

log = logging.getLogger("qarr.router")
EVENT_STREAM = "text/event-stream; charset=utf-8"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class Generate:
    """The endpoint ``POST /generate``, as an ASGI application."""

    services: Services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Work stops when the client goes away."""
        services, context = self.services, context_of(scope)
        services.telemetry.name_server_span(scope, "/generate")
        body = parse_generate(await read_body(scope, receive, services.max_body_bytes), services.limits)
        decision = decision_for(body, context, services, request_id=context.request_id)
        judged = body.stream and services.escalation.watches(decision)
        request = chat_request(body, decision, context, services.limits.default_temperature, judged=judged)
        await while_connected(context, partial(self._serve, body, decision, request, context), receive, send)

    async def _serve(
        self, body: GenerateBody, decision: Decision, request: ChatRequest, context: RequestContext, send: Send
    ) -> None:
        tokens = decision.query.prompt_tokens + decision.query.max_tokens
        async with served(self.services, context, decision, request, Answer, tokens=tokens) as (answer, admitted):
            headers = answer_headers(context, admitted, answer, self.services)
            if body.stream:
                await stream_answer(answer, headers, context, send)
            else:
                await send_answer(answer, headers, context, send)


@dataclass(frozen=True, slots=True)
class Route:
    """The endpoint ``POST /route``: the decision, without generating."""

    services: Services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. A refusal is a decision too: 200, with ``tier`` null."""
        services, context = self.services, context_of(scope)
        services.telemetry.name_server_span(scope, "/route")
        body = parse_generate(await read_body(scope, receive, services.max_body_bytes), services.limits)
        rendered = render_decision(decision_for(body, context, services))
        response = Response(to_json(rendered), media_type="application/json", headers=context.headers)
        await response(scope, receive, send)


def decision_for(
    body: GenerateBody, context: RequestContext, services: Services, *, request_id: str | None = None
) -> Decision:
    """Classify the prompt and decide; with a request id, log it."""
    check_hint(context.caller, body.hint, "tier")

    def ask(features: PromptFeatures, fleet: FleetSnapshot) -> Query:
        tokens = features.tokens + fleet.template.alone
        if body.system_prompt is not None:
            tokens = features.tokens + fleet.template.with_system + services.counter.count(body.system_prompt)
        max_tokens = body.max_tokens or services.limits.default_max_tokens
        return make_query(body, features, tokens, max_tokens, context.caller.tiers)

    return choose(services, body.prompt, lambda: extract(body.prompt, services.counter), ask, request_id)


def chat_request(
    body: GenerateBody, decision: Decision, context: RequestContext, default_temperature: float, *, judged: bool
) -> ChatRequest:
    """Return what the engine is asked: the prompt goes through the model's own chat template there."""
    system = ({"role": "system", "content": body.system_prompt},) if body.system_prompt is not None else ()
    return ChatRequest(
        messages=(*system, {"role": "user", "content": body.prompt}),
        max_tokens=decision.query.max_tokens,
        temperature=default_temperature if body.temperature is None else body.temperature,
        priority=_priority(body, context),
        request_id=engine_request_id(context),
        judged=judged,
    )


def _priority(body: GenerateBody, context: RequestContext) -> int:
    if "priority" in body.model_fields_set:
        return priority_of(context.caller, body.priority, "priority")
    return default_priority(context.caller)


async def stream_answer(answer: Answer, headers: dict[str, str], context: RequestContext, send: Send) -> None:
    """Relay an answer as server-sent events: text events, then exactly one ``done`` or ``error`` event."""
    await send(start_message(headers, EVENT_STREAM, STREAM_HEADERS))
    try:
        async for delta in answer.deltas():
            if delta.text:
                await send(body_message(b"data: " + to_json({"text": delta.text}) + b"\n\n", more=True))
        last = b"event: done\ndata: " + to_json(closing(answer)) + b"\n\n"
    except UpstreamError as error:
        answer.error = error
        log.warning("request %s: %s on %s", context.request_id, error, answer.replica_id)
        last = b"event: error\ndata: " + to_json(describe(error).body(context.ids)) + b"\n\n"
    await send(body_message(last, more=False))


async def send_answer(answer: Answer, headers: dict[str, str], context: RequestContext, send: Send) -> None:
    """Collect an answer and send it as one JSON object."""
    text = "".join([delta.text async for delta in answer.deltas()])
    rendered = {"text": text, **closing(answer), **context.ids}
    await send(start_message(headers, "application/json", {}))
    await send(body_message(to_json(rendered), more=False))


def closing(answer: Answer) -> dict[str, Any]:
    """Return what a complete answer ends with."""
    tpot_ms = answer.tpot_ms
    return {
        "usage": answer.usage,
        "finish_reason": answer.finish_reason,
        "tier": answer.tier,
        "continued_on": continued_on(answer),
        "ttft_ms": round(answer.ttft_ms or 0.0, 1),
        "tpot_ms": round(tpot_ms, 2) if tpot_ms is not None else None,
    }
