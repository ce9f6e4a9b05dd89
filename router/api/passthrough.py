"""Small requests that are passed on as they are, without a slot: tokens and their counts, and embeddings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.asgi import cancel_on_disconnect, context_of, no_body, read_body
from router.api.models import read_document, resolve
from router.api.paths import EMBEDDINGS, ErrorForm, error_form
from router.api.problems import NoEmbeddingsError
from router.auth.quota import Quotas
from router.pipeline.request import RequestContext
from router.settings import Settings
from router.upstream.client import Pool, Upstream, no_answer, refusal
from router.upstream.errors import EngineFailedError, EngineUnreachableError, NoSlotError, UpstreamError
from router.upstream.json_object import JsonObject
from tiers.fleet import Fleet
from tiers.spec import ReplicaStatus, TierName


@dataclass(frozen=True, slots=True)
class Passthrough:
    """What passes small requests on."""

    upstream: Upstream
    quotas: Quotas
    fleet: Fleet
    settings: Settings


@dataclass(frozen=True, slots=True)
class Tokens:
    """``/tokenize``, ``/detokenize``, ``/v1/messages/count_tokens``: any ready engine answers; they share a tokenizer."""

    deps: Passthrough
    path: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deps, context = self.deps, context_of(scope)
        document = read_document(await read_body(scope, receive, deps.settings.server.max_body_bytes))
        resolve(document, deps.settings.openai, deps.fleet)
        small = SmallRequest(self.path, "tokens", tuple(self._engines(document, context.caller.tiers)), tokens=0)
        cancel_on_disconnect(scope)
        await pass_on(deps, context, small, send)

    def _engines(self, document: JsonObject, allowed: frozenset[TierName] | None) -> Iterator[AskedEngine]:
        """Yield whom to ask: ready engines, without a slot on them, for tokenizing takes nothing from generation."""
        fleet, now = self.deps.fleet, time.monotonic()
        replicas = [r for r in fleet.replicas if r.state.status is ReplicaStatus.READY]
        ready = [r for r in replicas if allowed is None or r.spec.name in allowed]
        for replica in sorted(
            ready, key=lambda r: (not r.breaker.admits(now), fleet.rank(r.spec.name), r.state.in_flight)
        ):
            yield AskedEngine(replica.url, replica.api_key, document.edited({"model": replica.model}))


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The endpoint ``POST /v1/embeddings``: passed on to the engines that the settings name for it."""

    deps: Passthrough

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        deps, context = self.deps, context_of(scope)
        body = await read_body(scope, receive, deps.settings.server.max_body_bytes)
        document = read_document(body)
        if not deps.settings.openai.embeddings_urls:
            raise NoEmbeddingsError(
                "no engine here serves embeddings: the tiers generate text; set openai.embeddings_urls to one that does"
            )
        engines = tuple(
            AskedEngine(url, deps.settings.engine.api_key, body) for url in deps.settings.openai.embeddings_urls
        )
        small = SmallRequest(EMBEDDINGS, "embeddings", engines, tokens=count_input(document.get("input")))
        cancel_on_disconnect(scope)
        await pass_on(deps, context, small, send)


@dataclass(frozen=True, slots=True)
class AskedEngine:
    """An engine that may answer a small request, and the request's body for it."""

    url: str
    api_key: str
    body: bytes


@dataclass(frozen=True, slots=True)
class SmallRequest:
    """A request that is passed on without a lease."""

    path: str
    pool: Pool  # whose it waits for, where an engine has many of them
    engines: tuple[AskedEngine, ...]  # that may answer, in order
    tokens: int  # for the quota


async def pass_on(deps: Passthrough, context: RequestContext, small: SmallRequest, send: Send) -> None:
    """Take the quota, pass a small request on, and send the answer as it is.

    Raises:
        OverQuotaError: The caller's quota is used up.
        NoEngineAnsweredError: Those that were asked failed.
        NoSlotError: None could be asked.
        EngineRefusedError: An engine says that the request is wrong, where that is to have another form than the engine's.
    """
    grant = await deps.quotas.enter(context.caller, small.tokens, context.limits)
    used: int | None = None
    try:
        status, media_type, content = await _first_answer(deps.upstream, small, context.request_id)
        used = small.tokens
    except asyncio.CancelledError:
        used = small.tokens  # an engine may have worked for it
        raise
    finally:
        if grant is not None:
            await grant.settle(used)
    if error_form(small.path) is ErrorForm.ANTHROPIC and status != HTTPStatus.OK:
        raise refusal(status, content)  # vLLM has OpenAI's form for some of them
    await Response(content, status, context.headers, media_type)({"type": "http"}, no_body, send)


async def _first_answer(upstream: Upstream, small: SmallRequest, request_id: str) -> tuple[int, str, bytes]:
    causes: list[UpstreamError] = []
    for engine in sorted(small.engines, key=lambda e: not upstream.passes_at_once(e.url, small.pool)):
        try:
            ask = upstream.pass_on(
                engine.url, engine.api_key, small.path, engine.body, small.pool, request_id=request_id
            )
            return await ask
        except (EngineUnreachableError, EngineFailedError) as error:
            causes.append(error)
    if causes:
        raise no_answer(causes, *map(str, causes))
    raise NoSlotError("no tier that could answer this is ready")


def count_input(value: Any) -> int:
    """Return about how many tokens an embedding's input has: ids exactly, text by its length.

    What is no input counts as one token: the engine says best what is wrong with it.
    """
    inputs = value if isinstance(value, list) else [value]
    return sum(len(one) if isinstance(one, list) else _count_one(one) for one in inputs)


def _count_one(value: Any) -> int:
    return max(len(value) // 3, 1) if isinstance(value, str) else 1
