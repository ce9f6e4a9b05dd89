"""``POST /generate`` and ``POST /route``."""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.responses import Response

from classifier import TokenCounter, extract
from router.policy import Decision, PolicyTable, decide
from router.problems import BodyTooLarge, Refused, describe
from router.upstream import Answer, ChatRequest, Upstream, UpstreamError
from router.wire import GenerateBody, make_query, parse_generate, render_decision

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.types import Message, Receive, Scope, Send

    from router.settings import LimitSettings
    from router.telemetry import Telemetry
    from tiers.fleet import Fleet

log = logging.getLogger("qarr.router")
# vLLM's priority scheduling: lower values first.
PRIORITIES = {"interactive": -1, "standard": 0, "batch": 1}
EVENT_STREAM = b"text/event-stream; charset=utf-8"


class ClientGone(Exception):
    """The client closed the connection."""


@dataclass(frozen=True, slots=True)
class Services:
    """What the handlers work with; wired once, in ``create_app``."""

    fleet: Fleet
    upstream: Upstream
    counter: TokenCounter
    table: PolicyTable
    limits: LimitSettings
    max_body_bytes: int
    telemetry: Telemetry
    model: str


@dataclass(frozen=True, slots=True)
class Generate:
    """The endpoint ``POST /generate``, as an ASGI application."""

    services: Services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Work stops when the client goes away."""
        self.services.telemetry.name_server_span(scope, "/generate")
        ids = take_ids(scope, self.services)
        try:
            await self._answer(scope, receive, send, ids)
        except ClientGone:
            log.info("request %s: the client went away", ids["request_id"])

    async def _answer(self, scope: Scope, receive: Receive, send: Send, ids: dict[str, str]) -> None:
        body = parse_generate(await read_body(scope, receive, self.services.max_body_bytes), self.services.limits)
        decision = choose(body, self.services)
        if decision.tier is None:
            raise Refused(decision)
        request = chat_request(body, decision, ids, self.services.limits.default_temperature)
        await while_connected(self._serve(body, decision, request, ids, send), receive)

    async def _serve(
        self, body: GenerateBody, decision: Decision, request: ChatRequest, ids: dict[str, str], send: Send
    ) -> None:
        answer = await self.services.upstream.open(decision, request)
        self.services.telemetry.record_served(answer.tier, answer.replica_id, answer.failed_attempts)
        headers = answer_headers(decision, answer, self.services, ids)
        error: BaseException | None = None
        try:
            if body.stream:
                await stream_answer(answer, headers, ids, send)
            else:
                await send_answer(answer, headers, ids, send)
        except BaseException as caught:
            error = caught
            raise
        finally:
            await answer.aclose(error or answer.error)


@dataclass(frozen=True, slots=True)
class Route:
    """The endpoint ``POST /route``: the decision, without generating."""

    services: Services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. A refusal is a decision too: 200, with ``tier`` null."""
        self.services.telemetry.name_server_span(scope, "/route")
        ids = take_ids(scope, self.services)
        body = parse_generate(await read_body(scope, receive, self.services.max_body_bytes), self.services.limits)
        rendered = render_decision(choose(body, self.services))
        response = Response(to_json(rendered), media_type="application/json", headers=id_headers(ids))
        await response(scope, receive, send)


def take_ids(scope: Scope, services: Services) -> dict[str, str]:
    """Return the request's ids, and keep them where the error handlers find them."""
    ids: dict[str, str] = services.telemetry.request_ids(Headers(scope=scope))
    scope["qarr.ids"] = ids
    return ids


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Read a request's body, up to ``limit`` bytes.

    Raises:
        BodyTooLarge: It is announced or found to be larger; the rest is left unread.
        ClientGone: The client went away before it was complete.
    """
    announced = Headers(scope=scope).get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise BodyTooLarge(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise BodyTooLarge(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def choose(body: GenerateBody, services: Services) -> Decision:
    """Classify the prompt and decide."""
    telemetry = services.telemetry
    with telemetry.classify() as span:
        features = extract(body.prompt, services.counter)
        telemetry.record_features(span, features, body.prompt)
    with telemetry.route():
        fleet = services.fleet.snapshot()
        prompt_tokens = features.tokens + fleet.template_tokens
        if body.system_prompt is not None:
            prompt_tokens = features.tokens + fleet.system_template_tokens + services.counter.count(body.system_prompt)
        max_tokens = body.max_tokens or services.limits.default_max_tokens
        decision = decide(make_query(body, features, prompt_tokens, max_tokens), fleet, services.table)
        telemetry.record_decision(decision)
    telemetry.record_decision(decision)  # on the server span too: the one that dashboards list
    return decision


def chat_request(
    body: GenerateBody, decision: Decision, ids: dict[str, str], default_temperature: float
) -> ChatRequest:
    """Return what the engine is asked: the prompt goes through the model's own chat template there."""
    system = ({"role": "system", "content": body.system_prompt},) if body.system_prompt is not None else ()
    return ChatRequest(
        messages=(*system, {"role": "user", "content": body.prompt}),
        max_tokens=decision.query.max_tokens,
        temperature=default_temperature if body.temperature is None else body.temperature,
        priority=PRIORITIES[body.priority],
        # Unique, even where callers repeat an id: an engine mixes up requests of one id.
        request_id=f"{ids['request_id']}-{secrets.token_hex(4)}",
    )


async def while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run ``work`` to its end, unless the client disconnects first: then cancel it.

    Raises:
        ClientGone: The client disconnected.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return
        raise ClientGone
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.wait({working, watching})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def id_headers(ids: dict[str, str]) -> dict[str, str]:
    """Return the headers that every answer of ours carries."""
    return {"x-request-id": ids["request_id"], "x-qarr-trace-id": ids["trace_id"]}


def answer_headers(decision: Decision, answer: Answer, services: Services, ids: dict[str, str]) -> dict[str, str]:
    """Return the headers that disclose who serves the answer and why."""
    spec = services.fleet.spec(answer.tier)
    reason = decision.reason
    if answer.tier is not decision.tier:
        reason = f"{reason}; {decision.tier} failed before the first token, so {answer.tier} took over"
    headers = {
        **id_headers(ids),
        "x-qarr-tier": answer.tier.value,
        "x-qarr-precision": spec.precision.value,
        "x-qarr-reason": reason,
    }
    if spec.digest:
        headers["x-qarr-checkpoint"] = spec.digest[:16]
    return headers


async def stream_answer(answer: Answer, headers: dict[str, str], ids: dict[str, str], send: Send) -> None:
    """Relay an answer as server-sent events: text events, then exactly one ``done`` or ``error`` event."""
    await send(_start(headers, EVENT_STREAM, {"cache-control": "no-cache", "x-accel-buffering": "no"}))
    try:
        async for delta in answer.deltas():
            if delta.text:
                await send(_body(b"data: " + to_json({"text": delta.text}) + b"\n\n", more=True))
        last = b"event: done\ndata: " + to_json(closing(answer)) + b"\n\n"
    except UpstreamError as error:
        answer.error = error
        log.warning("request %s: %s on %s", ids["request_id"], error, answer.replica_id)
        last = b"event: error\ndata: " + to_json(describe(error).body(ids)) + b"\n\n"
    await send(_body(last, more=False))


async def send_answer(answer: Answer, headers: dict[str, str], ids: dict[str, str], send: Send) -> None:
    """Collect an answer and send it as one JSON object."""
    text = "".join([delta.text async for delta in answer.deltas()])
    rendered = {"text": text, **closing(answer), **ids}
    await send(_start(headers, b"application/json", {}))
    await send(_body(to_json(rendered), more=False))


def closing(answer: Answer) -> dict[str, Any]:
    """Return what a complete answer ends with."""
    tpot_ms = answer.tpot_ms
    return {
        "usage": answer.usage,
        "finish_reason": answer.finish_reason,
        "tier": answer.tier,
        "continued_on": [],
        "ttft_ms": round(answer.ttft_ms, 1),
        "tpot_ms": round(tpot_ms, 2) if tpot_ms is not None else None,
    }


def _start(headers: dict[str, str], media_type: bytes, more: dict[str, str]) -> Message:
    pairs = [(name.encode(), value.encode("latin-1", "replace")) for name, value in {**headers, **more}.items()]
    return {"type": "http.response.start", "status": 200, "headers": [(b"content-type", media_type), *pairs]}


def _body(data: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}
