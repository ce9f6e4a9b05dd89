"""``POST /generate`` and ``POST /route``.

Every event of a stream has an id. One that was asked for as resumable is made by a task of its own and kept for a while, so
that its caller may lose the connection and go on with the header ``Last-Event-ID``.
"""

from __future__ import annotations

from asyncio import sleep
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from starlette.responses import Response

from router.api.asgi import apart, body_message, cancel_on_disconnect, context_of, read_body, start_message, tracker_of
from router.api.bodies import FieldProblem, InvalidBody, Rules
from router.api.generate_body import messages_of, parse_generate, read_messages
from router.api.models import adapter_names
from router.api.paths import ErrorForm
from router.api.problems import describe
from router.api.provider import with_provider
from router.api.resumable import ResumableStream, ResumableStreams, ResumedElsewhere, StreamGone
from router.api.serving import EVENT_STREAM, STREAM_HEADERS, answer_headers, await_first, send_whole, serve_stream
from router.api.truncation import cutter_for
from router.pipeline.pipeline import engine_request_id
from router.pipeline.request import ParsedRequest, class_priority, session_of
from router.policy.render import render_decision
from router.upstream.engine_request import ChatRequest
from router.upstream.engine_stream import EngineStream, continued_on

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from starlette.types import Receive, Scope, Send

    from router.api.generate_body import GenerateBody
    from router.api.serving import Encoder, Sink
    from router.api.settings import LimitSettings
    from router.api.truncation import Cutter
    from router.lifecycle import ResponseTracker
    from router.pipeline.pipeline import Pipeline
    from router.pipeline.registry import ActiveRequest
    from router.pipeline.request import RequestContext
    from router.policy.decision import Decision
    from router.settings import Settings
    from router.upstream.sse import Chunk

STREAM_ID = "x-qarr-stream-id"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest(ParsedRequest):
    """A request for ``/generate``, read."""

    sampling: Mapping[str, Any]
    messages: tuple[Mapping[str, str], ...]

    def engine_request(self, decision: Decision) -> ChatRequest:
        """Return what the engine is asked: the prompt goes through the model's own chat template there."""
        return ChatRequest(
            messages=self.messages,
            max_tokens=decision.query.max_tokens,
            sampling=self.sampling,
            priority=self.options.priority,
            request_id=engine_request_id(self.context),
            adapter=self.adapter,
        )


async def read_request(
    content: bytes, rules: Rules, context: RequestContext, pipeline: Pipeline
) -> tuple[GenerateBody, GenerateRequest]:
    """Return a request's body, checked, and what it asks for, cut where its caller has asked for it and it is too long.

    Raises:
        BeyondKey: The priority is beyond the caller's key.
        InvalidBody: No tier offers its adapter, or a precision that it allows.
    """
    size, fleet, counter = len(content), pipeline.fleet, pipeline.counter
    body = await apart(size, parse_generate, content, rules)
    del content  # not to be held for as long as the answer takes
    if body.adapter is not None and body.adapter not in (offered := adapter_names(fleet)):
        known = f"one of {', '.join(offered)}" if offered else "none: no tier offers an adapter"
        raise InvalidBody((FieldProblem("adapter", f"{body.adapter[:100]!r} is offered by no tier", known),))
    messages = messages_of(body)
    asked = body.priority if "priority" in body.model_fields_set else None
    request = GenerateRequest(
        context=context,
        prompt=await apart(size, read_messages, messages, counter),
        options=with_provider(
            body.options(class_priority(context.caller, asked, "priority"), "tier"), body.provider, fleet
        ),
        max_tokens=body.max_tokens or rules.limits.default_max_tokens,
        limited=body.max_tokens is not None,
        sampling=_sampling(body, rules.limits),
        messages=tuple(messages),
        adapter=body.adapter,
        session=session_of(context),
    )
    cutter = await cutter_for(request, pipeline, size)
    if cutter is None:
        return body, request
    return body, await apart(size, partial(_cut, chat=body.messages is not None), request, cutter)


def _cut(request: GenerateRequest, cutter: Cutter, *, chat: bool) -> GenerateRequest:
    made = cutter.chat([dict(m) for m in request.messages], 0) if chat else cutter.prompt(request.messages)
    if made is None:
        return request
    prompt = read_messages(made, cutter.counter)
    told = cutter.disclosed(prompt, len(request.messages) - len(made))
    return replace(request, messages=tuple(made), prompt=prompt, truncated=told)


def _sampling(body: GenerateBody, limits: LimitSettings) -> dict[str, Any]:
    temperature = limits.default_temperature if body.temperature is None else body.temperature
    given = {name: getattr(body, name) for name in ("top_p", "repetition_penalty", "seed", "stop")}
    return {"temperature": temperature, **{name: value for name, value in given.items() if value is not None}}


@dataclass(frozen=True, slots=True)
class Generate:
    """The endpoint ``POST /generate``, as an ASGI application."""

    pipeline: Pipeline
    settings: Settings
    streams: ResumableStreams
    rules: Rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Work stops when the client goes away, unless the stream is resumable."""
        pipeline, settings = self.pipeline, self.settings
        content = await read_body(scope, receive, settings.server.max_body_bytes)
        context = context_of(scope)
        cancel_on_disconnect(scope)
        if last_event_id := context.header(b"last-event-id"):
            await self._resume(last_event_id, context, scope, receive, send)
            return
        body, request = await read_request(content, self.rules, context, pipeline)
        del content  # not to be held for as long as the answer takes
        decision = pipeline.decide(request)
        if body.stream:
            await_first(context, tracker_of(scope), settings.server.silence_s)
        if body.resumable:
            make = partial(self._make, request, decision)
            stream = self.streams.open(context.caller.key_id, make, context.request_id)
            if stream is not None:
                await self._read(stream, 0, context, send)
                return
        if body.stream:
            begin = partial(self._begin, send, tracker_of(scope))
            await serve_stream(pipeline, request, decision, begin)
        else:
            await pipeline.serve(request, decision, partial(self._send_whole, send))

    async def _begin(
        self, send: Send, tracker: ResponseTracker, active: ActiveRequest, answer: EngineStream
    ) -> tuple[Encoder, Sink]:
        headers = answer_headers(active, self.settings.telemetry)
        await send(start_message(headers, EVENT_STREAM, STREAM_HEADERS, hold=True))
        return TextEvents(answer, active.context, numbered=True), tracker

    async def _send_whole(self, send: Send, active: ActiveRequest) -> None:
        headers, answer = answer_headers(active, self.settings.telemetry), active.answer
        assert isinstance(answer, EngineStream)
        await send_whole(await _collect(answer, active.context), "application/json", headers, send)

    async def _make(self, request: GenerateRequest, decision: Decision, stream: ResumableStream) -> None:
        async def begin(active: ActiveRequest, answer: EngineStream) -> tuple[Encoder, Sink]:
            context = request.context
            headers = answer_headers(active, self.settings.telemetry)
            own = {name: value for name, value in headers.items() if name not in context.headers}  # not the request's
            stream.begin({**own, STREAM_ID: stream.id})
            return TextEvents(answer, context), stream

        await serve_stream(self.pipeline, request, decision, begin)

    async def _read(self, stream: ResumableStream, after: int, context: RequestContext, send: Send) -> None:
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
        await self._read(stream, after, context, send)


@dataclass(frozen=True, slots=True)
class Route:
    """The endpoint ``POST /route``: the decision, without generating."""

    pipeline: Pipeline
    settings: Settings
    rules: Rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, which counts as one of no tokens. A refusal is a decision too: 200, with ``tier`` null."""
        pipeline, context = self.pipeline, context_of(scope)
        content = await read_body(scope, receive, self.settings.server.max_body_bytes)
        _, request = await read_request(content, self.rules, context, pipeline)
        grant = await pipeline.quotas.enter(context.caller, 0, context.limits)
        counted: int | None = None
        try:
            rendered = render_decision(pipeline.decide(request, serve=False))
            counted = 0
        finally:
            if grant is not None:
                await grant.settle(counted)
        response = Response(to_json(rendered), media_type="application/json", headers=context.headers)
        await response(scope, receive, send)


class TextEvents:
    """Writes an answer as text events, then one ``done`` or one ``error`` event; ``numbered``: their ids are numbers."""

    __slots__ = ("_answer", "_context", "_number")

    def __init__(self, answer: EngineStream, context: RequestContext, *, numbered: bool = False) -> None:
        self._answer, self._context = answer, context
        self._number = 0 if numbered else None

    def events(self, chunks: Sequence[Chunk]) -> list[bytes]:
        events, number = [], self._number
        for chunk in chunks:
            if chunk.text:
                event = b"data: " + to_json({"text": chunk.text}) + b"\n\n"
                if number is not None:
                    number += 1
                    event = b"id: %d\n" % number + event
                events.append(event)
        self._number = number
        return events

    def end(self) -> list[bytes]:
        return self._last(b"event: done\ndata: " + to_json(closing(self._answer)) + b"\n\n")

    def failure(self, error: Exception) -> list[bytes]:
        """Return the last event of an answer that could not be completed."""
        return self._last(error_event(error, self._context))

    def _last(self, event: bytes) -> list[bytes]:
        return [event if self._number is None else b"id: %d\n" % (self._number + 1) + event]


def error_event(error: Exception, context: RequestContext) -> bytes:
    """Return the event that ends a stream which could not be finished, or not here."""
    return describe(error).event(ErrorForm.PROBLEM, context.ids) + b"\n\n"


async def _collect(answer: EngineStream, context: RequestContext) -> bytes:
    parts: list[str] = []

    def take(chunks: Sequence[Chunk]) -> bool:
        parts.extend(chunk.text for chunk in chunks)
        return True

    await answer.relay(take, partial(sleep, 0))
    return to_json({"text": "".join(parts), **closing(answer), **context.ids})


def closing(answer: EngineStream) -> dict[str, Any]:
    tpot_ms, outside = answer.tpot_ms, answer.overflow is not None
    return {
        "usage": None if outside and not answer.usage else answer.usage,
        "finish_reason": answer.finish_reason,
        "tier": None if outside else answer.tier,
        **({"overflow": answer.overflow} if outside else {}),
        "continued_on": continued_on(answer),
        "ttft_ms": round(answer.ttft_ms or 0.0, 1),
        "tpot_ms": round(tpot_ms, 2) if tpot_ms is not None else None,
    }
