"""Small requests that are passed on as they are, without a slot: tokens and their counts, and embeddings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from router.api.asgi import cancel_on_disconnect, context_of, read_body
from router.api.models import read_document, resolve
from router.api.paths import ErrorForm, error_form
from router.api.problems import NoEmbeddingsError
from router.auth.quota import Quotas
from router.settings import Settings
from router.upstream.errors import (
    EngineFailedError,
    EngineUnreachableError,
    NoSlotError,
    UpstreamError,
)
from router.upstream.upstream import Pool, Upstream, no_answer, refusal
from tiers.fleet import Fleet
from tiers.replica import Replica
from tiers.spec import ReplicaStatus, TierName


class PassthroughTarget(NamedTuple):
    """A server that may answer, and the request's body for it."""

    url: str
    api_key: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Passthrough:
    upstream: Upstream
    quotas: Quotas
    fleet: Fleet
    settings: Settings

    async def tokens(self, request: Request) -> Response:
        """Let a ready engine tokenize, detokenize or count: one of the tier that is named, else any.

        Such a request needs no slot: it takes nothing from generation. All engines should share a tokenizer; naming a tier
        lets ``qarr verify`` find one that does not.
        """
        document = read_document(await self._body(request))
        named_tier = resolve(document, self.settings.openai, self.fleet).tier
        replicas = self._ready_replicas(context_of(request.scope).caller.tiers)
        replicas.sort(key=lambda replica: replica.spec.name != named_tier)
        targets = []
        for replica in replicas:
            body = document.edited({"model": replica.model})
            targets.append(PassthroughTarget(replica.url, replica.api_key, body))
        return await self._pass_on(request, "tokens", targets, quota_tokens=0)

    def _ready_replicas(
        self, allowed_tiers: frozenset[TierName] | None
    ) -> list[Replica]:
        """Return the ready replicas of the tiers that a caller may use (None: all).

        Those come first whose circuit breaker lets requests pass, then the lowest precision, then the least load.
        """
        fleet = self.fleet
        now = time.monotonic()
        ready = [
            replica
            for replica in fleet.replicas
            if replica.state.status is ReplicaStatus.READY
        ]
        if allowed_tiers is not None:
            ready = [replica for replica in ready if replica.spec.name in allowed_tiers]

        def preference(replica: Replica) -> tuple[bool, int, int]:
            return (
                not replica.breaker.admits(now),
                fleet.rank(replica.spec.name),
                replica.state.in_flight,
            )

        return sorted(ready, key=preference)

    async def embeddings(self, request: Request) -> Response:
        """Let the first server that answers make embeddings."""
        body = await self._body(request)
        document = read_document(body)
        urls = self.settings.openai.embeddings_urls
        if not urls:
            raise NoEmbeddingsError(
                "no engine here serves embeddings: the tiers generate text; set openai.embeddings_urls to one that does"
            )
        targets = [
            PassthroughTarget(url, self.settings.engine.api_key, body) for url in urls
        ]
        return await self._pass_on(
            request,
            "embeddings",
            targets,
            quota_tokens=count_input(document.get("input")),
        )

    async def _body(self, request: Request) -> bytes:
        server = self.settings.server
        return await read_body(
            request.scope,
            request.receive,
            server.max_body_bytes,
            text_limit=server.max_text_bytes,
        )

    async def _pass_on(
        self,
        request: Request,
        pool: Pool,
        targets: Iterable[PassthroughTarget],
        *,
        quota_tokens: int,
    ) -> Response:
        """Answer as one of some engines does; the request counts against the quota unless no engine had it."""
        context = context_of(request.scope)
        path = request.scope["path"]
        cancel_on_disconnect(request.scope)
        grant = await self.quotas.enter(
            context.caller, quota_tokens, context.quota_headers
        )
        used_tokens: int | None = None
        try:
            status, media_type, content = await self._first_answer(
                path, pool, targets, request_id=context.request_id
            )
            used_tokens = quota_tokens
        except asyncio.CancelledError:
            used_tokens = quota_tokens  # an engine may have worked for it
            raise
        finally:
            if grant is not None:
                await grant.settle(used_tokens)
        if error_form(path) is ErrorForm.ANTHROPIC and status != HTTPStatus.OK:
            raise refusal(status, content)  # vLLM words some of these as OpenAI does
        return Response(
            content, status, headers=context.response_headers, media_type=media_type
        )

    async def _first_answer(
        self,
        path: str,
        pool: Pool,
        targets: Iterable[PassthroughTarget],
        *,
        request_id: str,
    ) -> tuple[int, str, bytes]:
        """Return status, media type and body of the first answer; engines that would let it wait are asked last."""
        upstream = self.upstream
        failures: list[UpstreamError] = []
        for target in sorted(
            targets, key=lambda target: not upstream.passes_at_once(target.url, pool)
        ):
            try:
                return await upstream.pass_on(
                    target.url,
                    target.api_key,
                    path,
                    target.body,
                    pool,
                    request_id=request_id,
                )
            except (EngineUnreachableError, EngineFailedError) as error:
                failures.append(error)
        if failures:
            raise no_answer(failures, *map(str, failures))
        raise NoSlotError("no tier that could answer this is ready")


def count_input(value: Any) -> int:
    """Return about how many tokens an embedding's input has: ids exactly, text by its length.

    What is no input counts as one token: the engine says best what is wrong with it.
    """
    items = value if isinstance(value, list) else [value]
    return sum(_count_item(item) for item in items)


def _count_item(item: Any) -> int:
    if isinstance(item, list):
        return len(item)
    if isinstance(item, str):
        return max(len(item) // 3, 1)
    return 1
