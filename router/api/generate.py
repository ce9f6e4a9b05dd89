"""``POST /generate`` and ``POST /route``.

Every event of a stream has an id. One that was asked for as resumable is made by a task of its own and kept for a while, so
that its caller may lose the connection and go on with the header ``Last-Event-ID``.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.responses import Response

from classifier import extract
from router.api.asgi import body_message, context_of, read_body, start_message, while_connected
from router.api.bodies import Amount, GenerateBody, make_query, parse_generate
from router.api.problems import describe
from router.api.resumable import KeptStream, KeptStreams, ResumedElsewhere, StreamGone
from router.pipeline.pipeline import (
    Services,
    answer_headers,
    check_hint,
    choose,
    default_priority,
    engine_request_id,
    priority_of,
    served,
)
from router.policy.render import render_decision
from router.upstream.errors import UpstreamError
from router.upstream.exchange import continued_on
from router.upstream.text_stream import Answer, ChatRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.types import Receive, Scope, Send

    from classifier import PromptFeatures
    from router.pipeline.context import RequestContext
    from router.policy.decision import Decision, Query
    from tiers.fleet import FleetSnapshot

log = logging.getLogger("qarr.router")
EVENT_STREAM = "text/event-stream; charset=utf-8"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
STREAM_ID = "x-qarr-stream-id"


class Put(Protocol):
    """Takes a stream's events."""

    async def __call__(self, events: Sequence[bytes], *, last: bool) -> None:
        """Take some events, without their ids.

        Args:
            events: In order.
            last: Whether no more come.
        """


@dataclass(frozen=True, slots=True)
class Generate:
    """The endpoint ``POST /generate``, as an ASGI application."""

    services: Services
    streams: KeptStreams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Work stops when the client goes away, unless the stream is resumable."""
        services = self.services
        services.telemetry.name_server_span(scope, "/generate")
        content = await read_body(scope, receive, services.max_body_bytes)
        context = context_of(scope)
        if last_event_id := Headers(scope=scope).get("last-event-id"):
            await self._resume(last_event_id, context, scope, receive, send)
            return
        body = parse_generate(content, services.limits)
        del content  # not to be held for as long as the answer takes
        decision = decision_for(body, context, services, request_id=context.request_id)
        judged = body.stream and services.escalation.watches(decision)
        request = chat_request(body, decision, context, services.limits.default_temperature, judged=judged)
        if body.resumable:
            make = partial(self._make, decision, request, context)
            stream = self.streams.open(context.caller.key_id, make, context.request_id)
            if stream is not None:
                await while_connected(context, partial(self._read, stream, 0, context), receive, send)
                return
        await while_connected(context, partial(self._serve, body, decision, request, context), receive, send)

    async def _serve(
        self, body: GenerateBody, decision: Decision, request: ChatRequest, context: RequestContext, send: Send
    ) -> None:
        tokens = decision.query.prompt_tokens + decision.query.max_tokens
        async with served(self.services, context, decision, request, Answer, tokens=tokens) as (answer, admitted):
            headers = answer_headers(context, admitted, answer, self.services)
            if body.stream:
                await send(start_message(headers, EVENT_STREAM, STREAM_HEADERS))
                await stream_answer(answer, context, Numbered(send))
            else:
                await send_answer(answer, headers, context, send)

    async def _make(
        self, decision: Decision, request: ChatRequest, context: RequestContext, stream: KeptStream
    ) -> None:
        """Make a resumable stream's events."""
        tokens = decision.query.prompt_tokens + decision.query.max_tokens
        async with served(self.services, context, decision, request, Answer, tokens=tokens) as (answer, admitted):
            headers = answer_headers(context, admitted, answer, self.services)
            own = {name: value for name, value in headers.items() if name not in context.headers}  # not the request's
            stream.begin({**own, STREAM_ID: stream.id})
            await stream_answer(answer, context, stream.put)

    async def _read(self, stream: KeptStream, after: int, context: RequestContext, send: Send) -> None:
        """Send a resumable stream from some event on."""
        started = False

        async def start(headers: Mapping[str, str]) -> None:
            nonlocal started
            started = True
            await send(start_message({**headers, **context.headers}, EVENT_STREAM, STREAM_HEADERS))

        try:
            await self.streams.read(stream, after, start, send)
        except (ResumedElsewhere, StreamGone) as error:
            if not started:
                raise
            await send(body_message(error_event(error, context), more=False))

    async def _resume(
        self, last_event_id: str, context: RequestContext, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Go on with a stream; the request's body, which clients send again as it was, is not looked at."""
        stream, after = self.streams.find(last_event_id, context.caller.key_id)
        if stream.over and after == stream.newest:
            self.streams.drop(stream)
            await Response(status_code=204, headers=context.headers)(scope, receive, send)
            return
        await while_connected(context, partial(self._read, stream, after, context), receive, send)


@dataclass(frozen=True, slots=True)
class Route:
    """The endpoint ``POST /route``: the decision, without generating."""

    services: Services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, which counts as one of no tokens. A refusal is a decision too: 200, with ``tier`` null."""
        services, context = self.services, context_of(scope)
        services.telemetry.name_server_span(scope, "/route")
        body = parse_generate(await read_body(scope, receive, services.max_body_bytes), services.limits)
        grant = await services.quotas.enter(context.caller, 0, context.limits)
        counted: int | None = None
        try:
            rendered = render_decision(decision_for(body, context, services))
            counted = 0
        finally:
            if grant is not None:
                await grant.settle(counted)
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
        return make_query(body, features, Amount(tokens, max_tokens), context.caller.tiers)

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


class Numbered:
    """Sends events to one connection, with their numbers as ids."""

    __slots__ = ("_number", "_send")

    def __init__(self, send: Send) -> None:
        self._send, self._number = send, 0

    async def __call__(self, events: Sequence[bytes], *, last: bool) -> None:
        """Send some events."""
        numbered = [b"id: %d\n" % number + event for number, event in enumerate(events, self._number + 1)]
        self._number += len(events)
        await self._send(body_message(b"".join(numbered), more=not last))


async def stream_answer(answer: Answer, context: RequestContext, put: Put) -> None:
    """Relay an answer as server-sent events: text events, then exactly one ``done`` or ``error`` event."""
    try:
        async for deltas in answer.batches():
            events = [b"data: " + to_json({"text": delta.text}) + b"\n\n" for delta in deltas if delta.text]
            if events:
                await put(events, last=False)
        last = b"event: done\ndata: " + to_json(closing(answer)) + b"\n\n"
    except UpstreamError as error:
        answer.error = error
        log.warning("request %s: %s on %s", context.request_id, error, answer.replica_id)
        last = error_event(error, context)
    await put([last], last=True)


def error_event(error: Exception, context: RequestContext) -> bytes:
    """Return the event that ends a stream which could not be finished, or not here."""
    return b"event: error\ndata: " + to_json(describe(error).body(context.ids)) + b"\n\n"


async def send_answer(answer: Answer, headers: dict[str, str], context: RequestContext, send: Send) -> None:
    """Collect an answer and send it as one JSON object."""
    text = "".join([delta.text async for deltas in answer.batches() for delta in deltas])
    rendered = {"text": text, **closing(answer), **context.ids}
    content = to_json(rendered)
    await send(start_message(headers, "application/json", {"content-length": str(len(content))}))
    await send(body_message(content, more=False))


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
