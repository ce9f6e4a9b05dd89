"""OpenAI's API: what vLLM serves under ``/v1``, routed. Bodies pass through as they are, both ways."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError
from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.responses import Response

from router.api.asgi import body_message, context_of, read_body, start_message, while_connected
from router.api.bodies import Amount, FieldProblem, InvalidBody, Wishes, make_query
from router.api.generate import STREAM_HEADERS
from router.api.openai_prompt import Reading, classify, read_chat, read_completion
from router.api.problems import NoEmbeddings, UnknownModel, describe
from router.pipeline.pipeline import (
    Services,
    answer_headers,
    check_hint,
    choose,
    default_priority,
    engine_request_id,
    lowered_priority,
    priority_of,
    reason_of,
    served,
)
from router.upstream.errors import (
    EngineFailed,
    EngineRefused,
    EngineUnreachable,
    NoEngineAnswered,
    NoPlace,
    UpstreamError,
)
from router.upstream.exchange import continued_on
from router.upstream.json_object import JsonObject, NotJson, as_boolean, as_integer
from router.upstream.openai_stream import EventRelay, RelayRequest, WholeRelay, resumption_of
from router.upstream.sse import DONE, SEPARATOR
from tiers.spec import ReplicaState, TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from starlette.types import Receive, Scope, Send

    from classifier import PromptFeatures
    from router.pipeline.context import RequestContext
    from router.policy.decision import Decision, Query
    from router.upstream.client import Pool, Upstream
    from router.upstream.exchange import Exchange
    from tiers.fleet import FleetSnapshot

log = logging.getLogger("qarr.router")
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
ModelChoice = Literal["auto", "fast", "balanced", "precise"]
MODELS: dict[str, ModelChoice] = {
    "auto": "auto",
    "qarr": "auto",
    "fast": "fast",
    "balanced": "balanced",
    "precise": "precise",
}
# Header → member of ``Wishes``; numbers are written as such.
HEADERS: dict[str, tuple[str, ...]] = {
    "x-qarr-tier": ("tier",),
    "x-qarr-tier-policy": ("tier_policy",),
    "x-qarr-priority": ("priority",),
    "x-qarr-sla-ttft-ms": ("sla", "ttft_ms"),
    "x-qarr-sla-tpot-ms": ("sla", "tpot_ms"),
    "x-qarr-sla-max-quality-loss": ("sla", "max_quality_loss"),
    "x-qarr-sla-confidence": ("sla", "confidence"),
}
ALLOWED = {
    "tier": "auto, fast, balanced or precise",
    "tier_policy": "prefer or require",
    "priority": "interactive, standard or batch",
    "sla": "an object with any of ttft_ms, tpot_ms, max_quality_loss, confidence",
    "sla.ttft_ms": "a number of milliseconds above 0",
    "sla.tpot_ms": "a number of milliseconds above 0",
    "sla.max_quality_loss": "a number from 0 to 1",
    "sla.confidence": "a number from 0.5 to below 1",
    "report": "true or false",
    "": "an object with any of tier, tier_policy, sla, priority, report",
}
OWN_SHAPE = {"/tokenize", "/detokenize"}
MAX_COUNT = 1 << 40  # of tokens that are counted: far above any context or quota, and safe in every counter


def speaks_openai(path: str) -> bool:
    """Tell whether errors at a path are to be in OpenAI's form."""
    return path.startswith("/v1/") or path in OWN_SHAPE


class OpenAIWishes(Wishes):
    """The ``qarr`` object of a body (``extra_body`` in the SDKs)."""

    report: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A request for a completion, read."""

    document: JsonObject
    reading: Reading
    wishes: OpenAIWishes
    hint_field: str
    streamed: bool
    max_tokens: int
    choices: int


@dataclass(frozen=True, slots=True)
class Completions:
    """The endpoints ``POST /v1/chat/completions`` and ``POST /v1/completions``, as ASGI applications."""

    services: Services
    path: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Work stops when the client goes away."""
        services = self.services
        services.telemetry.name_server_span(scope, self.path)
        document = read_document(await read_body(scope, receive, services.max_body_bytes))
        context = context_of(scope)
        call = read_call(document, Headers(scope=scope), services, chat=self.path == CHAT)
        decision = decision_for(call, context, services)
        plain = self.path == CHAT and call.choices == 1 and not as_boolean(document.get("logprobs"))
        priority = _priority(call, context)
        resumption = resumption_of(document, priority or 0, choices=call.choices, chat=self.path == CHAT)
        request = RelayRequest(
            document=document,
            path=self.path,
            operation="chat" if self.path == CHAT else "text_completion",
            request_id=engine_request_id(context),
            streamed=call.streamed,
            priority=priority,
            report_usage=_wants_usage(document),
            resumption=resumption if call.streamed else None,
            judged=call.streamed and plain and services.escalation.watches(decision),
        )
        await while_connected(context, partial(self._serve, call, decision, request, context), receive, send)

    async def _serve(
        self, call: Call, decision: Decision, request: RelayRequest, context: RequestContext, send: Send
    ) -> None:
        services = self.services
        tokens = min(decision.query.tokens_in_all, MAX_COUNT)
        relay = partial(
            EventRelay,
            report_usage=request.report_usage,
            judged=request.judged,
            resumption=request.resumption,
        )
        kind = relay if call.streamed else WholeRelay
        try:
            async with served(services, context, decision, request, kind, tokens=tokens) as (answer, admitted):
                headers = answer_headers(context, admitted, answer, services)
                report = report_on(admitted.decision, answer, services) if call.wishes.report else None
                if isinstance(answer, EventRelay):
                    await relay_events(
                        answer, headers, partial(_report_event, report, answer, self.path), context, send
                    )
                elif isinstance(answer, WholeRelay):
                    content = with_member(answer.content, "qarr", report) if report else answer.content
                    length = {"content-length": str(len(content))}
                    await send(start_message(headers, answer.media_type, length))
                    await send(body_message(content, more=False))
        except EngineRefused as error:
            if not error.body:
                raise
            # The engine's own words, in OpenAI's form already.
            response = Response(error.body, error.status, context.headers, "application/json")
            await response({"type": "http"}, _nothing, send)


@dataclass(frozen=True, slots=True)
class Models:
    """The endpoints ``GET /v1/models`` and ``GET /v1/models/{id}``."""

    services: Services
    created: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the list, or one model of it."""
        services, context = self.services, context_of(scope)
        wanted = scope["path_params"].get("id")
        services.telemetry.name_server_span(scope, "/v1/models/{id}" if wanted else "/v1/models")
        names = model_names(services)
        if wanted is not None and wanted not in names:
            raise UnknownModel(wanted, tuple(names))
        cards = [self._card(name, choice) for name, choice in names.items() if wanted in {None, name}]
        body = cards[0] if wanted is not None else {"object": "list", "data": cards}
        response = Response(to_json(body), media_type="application/json", headers=context.headers)
        await response(scope, receive, send)

    def _card(self, name: str, choice: ModelChoice) -> dict[str, Any]:
        specs = self.services.fleet.specs
        tier = None if choice == "auto" else TierName(choice)
        lengths = [spec.max_model_len for spec in specs if tier in {None, spec.name}]
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "qarr",
            "root": self.services.model,
            "parent": None if name == choice else choice,
            "max_model_len": max(lengths, default=0),
        }


@dataclass(frozen=True, slots=True)
class Tokens:
    """The endpoints ``POST /tokenize`` and ``POST /detokenize``: any ready engine answers, they share a tokenizer."""

    services: Services
    path: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on. Work stops when the client goes away."""
        services, context = self.services, context_of(scope)
        services.telemetry.name_server_span(scope, self.path)
        document = read_document(await read_body(scope, receive, services.max_body_bytes))
        resolve(document, services)
        small = SmallRequest(self.path, "tokens", tuple(self._engines(document, context.caller.tiers)), tokens=0)
        await while_connected(context, partial(pass_on, services, context, small), receive, send)

    def _engines(self, document: JsonObject, allowed: frozenset[TierName]) -> Iterator[AskedEngine]:
        """Yield whom to ask: ready engines, without a place on them, for tokenizing takes nothing from generation."""
        now = time.monotonic()
        ready = [r for r in self.services.fleet.replicas if r.state is ReplicaState.READY and r.spec.name in allowed]
        for replica in sorted(ready, key=lambda r: (not r.breaker.admits(now), r.spec.name.rank, r.in_flight)):
            yield AskedEngine(replica.url, replica.api_key, document.edited({"model": replica.model}))


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The endpoint ``POST /v1/embeddings``: passed on to the engines that the settings name for it."""

    services: Services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on. Work stops when the client goes away."""
        services, context = self.services, context_of(scope)
        services.telemetry.name_server_span(scope, EMBEDDINGS)
        body = await read_body(scope, receive, services.max_body_bytes)
        document = read_document(body)
        if not services.openai.embeddings_urls:
            raise NoEmbeddings(
                "no engine here serves embeddings: the tiers generate text; set openai.embeddings_urls to one that does"
            )
        engines = tuple(AskedEngine(url, services.engine_key, body) for url in services.openai.embeddings_urls)
        small = SmallRequest(EMBEDDINGS, "embeddings", engines, tokens=count_input(document.get("input")))
        await while_connected(context, partial(pass_on, services, context, small), receive, send)


@dataclass(frozen=True, slots=True)
class AskedEngine:
    """An engine that may answer a small request, and the request's body for it."""

    url: str
    api_key: str
    body: bytes


@dataclass(frozen=True, slots=True)
class SmallRequest:
    """A request that is passed on without a lease.

    Attributes:
        pool: Whose it waits for, where an engine has many of them.
        engines: That may answer, in order.
        tokens: For the quota.
    """

    path: str
    pool: Pool
    engines: tuple[AskedEngine, ...]
    tokens: int


async def pass_on(services: Services, context: RequestContext, small: SmallRequest, send: Send) -> None:
    """Take the quota, pass a small request on, and send the answer as it is.

    Raises:
        OverQuota: The caller's quota is used up.
        NoEngineAnswered: Those that were asked failed.
        NoPlace: None could be asked.
    """
    grant = await services.quotas.enter(context.caller, small.tokens, context.limits)
    used: int | None = None
    try:
        status, media_type, content = await _first_answer(services.upstream, small)
        used = small.tokens
    except asyncio.CancelledError:
        used = small.tokens  # an engine may have worked for it
        raise
    finally:
        if grant is not None:
            await grant.settle(used)
    await Response(content, status, context.headers, media_type)({"type": "http"}, _nothing, send)


async def _first_answer(upstream: Upstream, small: SmallRequest) -> tuple[int, str, bytes]:
    """Ask one engine after another, those that need no wait first."""
    causes: list[str] = []
    for engine in sorted(small.engines, key=lambda e: not upstream.passes_at_once(e.url, small.pool)):
        try:
            return await upstream.pass_on(engine.url, engine.api_key, small.path, engine.body, small.pool)
        except (EngineUnreachable, EngineFailed) as error:
            causes.append(str(error))
    if causes:
        raise NoEngineAnswered("; ".join(causes))
    raise NoPlace("no tier that could answer this is ready")


def read_document(body: bytes) -> JsonObject:
    """Read a request's body.

    Raises:
        InvalidBody: It is not a JSON object.
    """
    try:
        return JsonObject.parse(body)
    except NotJson as error:
        raise InvalidBody((FieldProblem("body", str(error), "a JSON object in UTF-8"),)) from None


def model_names(services: Services) -> dict[str, ModelChoice]:
    """Return every model name that is answered to."""
    return {**MODELS, **services.openai.aliases}


def resolve(document: JsonObject, services: Services) -> ModelChoice:
    """Return what a body's model name stands for; ``auto`` where it has none, as vLLM does.

    Raises:
        UnknownModel: It stands for nothing.
    """
    name = document.get("model")
    if name is None:
        return "auto"
    names = model_names(services)
    if not isinstance(name, str) or name not in names:
        raise UnknownModel(str(name), tuple(names))
    return names[name]


def read_call(document: JsonObject, headers: Headers, services: Services, *, chat: bool) -> Call:
    """Read what routing needs of a request for a completion.

    Raises:
        InvalidBody: Its wishes are not valid.
        UnknownModel: Its model is none of ours.
    """
    model = resolve(document, services)
    by_header, by_body = _from_headers(headers), _from_body(document)
    given = {**by_header, **by_body}
    if "sla" in given:
        given["sla"] = {**by_header.get("sla", {}), **by_body.get("sla", {})}
    hint_field = (
        "qarr.tier" if "tier" in (document.get("qarr") or {}) else "x-qarr-tier" if "tier" in given else "model"
    )
    wishes = OpenAIWishes.model_validate({"tier": model, **given})
    reading = (read_chat if chat else read_completion)(document, services.counter)
    limit = as_integer(document.get("max_completion_tokens")) if chat else None
    limit = limit or as_integer(document.get("max_tokens")) or services.limits.default_max_tokens
    return Call(
        document=document,
        reading=reading,
        wishes=wishes,
        hint_field=hint_field,
        streamed=as_boolean(document.get("stream")),
        max_tokens=min(max(limit, 1), MAX_COUNT),
        choices=_choices(document, reading, services.limits.max_sequences, chat=chat),
    )


def _choices(document: JsonObject, reading: Reading, most: int, *, chat: bool) -> int:
    """Return the answers that a request asks for: its prompts times the choices for each.

    Raises:
        InvalidBody: They are too many.
    """
    field, each = "n", as_integer(document.get("n")) or 1
    if not chat and (best_of := as_integer(document.get("best_of")) or 1) > each:  # what older engines compute
        field, each = "best_of", best_of
    choices = max(each, 1) * reading.prompts
    if choices <= most:
        return choices
    if reading.prompts > most:
        problem = FieldProblem("prompt", f"has {reading.prompts} prompts", f"at most {most} prompts in one request")
    else:
        prompts = f" for each of {reading.prompts} prompts" if reading.prompts > 1 else ""
        asked = f"asks for {str(each)[:20]} answers{prompts}"
        problem = FieldProblem(field, asked, f"an integer from 1 to {most // reading.prompts}")
    raise InvalidBody((problem,))


def decision_for(call: Call, context: RequestContext, services: Services) -> Decision:
    """Classify the request and decide."""
    check_hint(context.caller, call.wishes.hint, call.hint_field)

    def ask(features: PromptFeatures, fleet: FleetSnapshot) -> Query:
        tokens = call.reading.with_template(fleet.template)
        amount = Amount(tokens, call.max_tokens, call.choices, min(call.reading.all_tokens, MAX_COUNT))
        return make_query(call.wishes, features, amount, context.caller.tiers)

    return choose(
        services, call.reading.text, lambda: classify(call.reading, services.counter), ask, context.request_id
    )


async def relay_events(
    answer: EventRelay,
    headers: Mapping[str, str],
    report_event: Callable[[], bytes],
    context: RequestContext,
    send: Send,
) -> None:
    """Relay a stream as the engine sends it. One that breaks ends with an error event, and without ``[DONE]``."""
    await send(start_message(headers, answer.media_type, STREAM_HEADERS))
    end = DONE + SEPARATOR
    try:
        async for data in answer.chunks():
            if data.endswith(end):
                await send(body_message(data[: -len(end)] + report_event() + end, more=True))
            else:
                await send(body_message(data, more=True))
        last = b""
    except UpstreamError as error:
        answer.error = error
        log.warning("request %s: %s on %s", context.request_id, error, answer.replica_id)
        last = b"data: " + to_json(describe(error).openai_body()) + SEPARATOR
    await send(body_message(last, more=False))


def report_on(decision: Decision, answer: Exchange, services: Services) -> dict[str, Any]:
    """Return who serves an answer and why, for bodies whose caller asked for it."""
    spec = services.fleet.spec(answer.tier)
    return {
        "tier": answer.tier.value,
        "precision": spec.precision.value,
        "checkpoint": spec.checkpoint_id,
        "reason": reason_of(decision, answer),
        "class": decision.query.features.prompt_class.value,
    }


def with_member(content: bytes, name: str, value: object) -> bytes:
    """Return a JSON object with one more member at its end."""
    whole = content.rstrip()
    return whole[:-1] + b"," + to_json(name) + b":" + to_json(value) + b"}"


def _report_event(report: Mapping[str, Any] | None, answer: Exchange, path: str) -> bytes:
    """Return the event that tells who served the answer; nothing where the caller did not ask for it."""
    if report is None:
        return b""
    kind = "chat.completion.chunk" if path == CHAT else "text_completion"
    continued = {"continued_on": continued_on(answer)} if answer.parts else {}
    chunk = {"id": "", "object": kind, "created": 0, "model": "", "choices": [], "qarr": {**report, **continued}}
    return b"data: " + to_json(chunk) + SEPARATOR


def _from_headers(headers: Headers) -> dict[str, Any]:
    """Return the wishes in a request's headers, each checked by itself, so that errors name the header.

    Raises:
        InvalidBody: One is not valid.
    """
    given: dict[str, Any] = {}
    problems = []
    for name, path in HEADERS.items():
        text = headers.get(name)
        if text is None:
            continue
        try:
            value: Any = float(text) if path[0] == "sla" else text
            one = {path[-1]: value} if len(path) == 1 else {path[0]: {path[1]: value}}
            OpenAIWishes.model_validate(one)
        except ValueError:  # pydantic's is one as well
            problems.append(FieldProblem(name, f"is {text[:40]!r}", ALLOWED[".".join(path)]))
            continue
        if len(path) == 1:
            given[path[0]] = value
        else:
            given.setdefault("sla", {})[path[1]] = value
    if problems:
        raise InvalidBody(tuple(problems))
    return given


def _from_body(document: JsonObject) -> dict[str, Any]:
    """Return the wishes in a body's ``qarr`` object.

    Raises:
        InvalidBody: They are not valid.
    """
    given = document.get("qarr")
    if given is None:
        return {}
    try:
        wishes = OpenAIWishes.model_validate(given)
    except ValidationError as error:
        problems = []
        for e in error.errors(include_url=False, include_input=False):
            field = ".".join(map(str, e["loc"]))
            problems.append(
                FieldProblem(f"qarr.{field}".rstrip("."), e["msg"].lower(), ALLOWED.get(field, ALLOWED[""]))
            )
        raise InvalidBody(tuple(problems)) from None
    return wishes.model_dump(exclude_unset=True)


def _priority(call: Call, context: RequestContext) -> int | None:
    """Return the priority to send; None leaves the body's own."""
    if "priority" in call.wishes.model_fields_set:
        return priority_of(context.caller, call.wishes.priority, "qarr.priority")
    own = call.document.get("priority")
    if own is None:
        return default_priority(context.caller) or None
    value = as_integer(own)
    return None if value is None else lowered_priority(context.caller, value, "priority", str(value))


def _wants_usage(document: JsonObject) -> bool:
    options = document.get("stream_options")
    return isinstance(options, dict) and as_boolean(options.get("include_usage"))


def count_input(value: Any) -> int:
    """Return about how many tokens an embedding's input has: ids exactly, text by its length.

    What is no input counts as one token: the engine says best what is wrong with it.
    """
    inputs = value if isinstance(value, list) else [value]
    return sum(len(one) if isinstance(one, list) else _count_one(one) for one in inputs)


def _count_one(value: Any) -> int:
    return max(len(value) // 3, 1) if isinstance(value, str) else 1


async def _nothing() -> Any:
    """Stand for a body that is read already."""
    return {"type": "http.request", "body": b"", "more_body": False}
