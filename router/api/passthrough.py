"""Small requests that are passed on as they are, without a slot: tokens and their counts, and embeddings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.api.asgi import cancel_on_disconnect, context_of, read_body
from router.api.models import read_document, resolve
from router.api.paths import ErrorForm, error_form
from router.api.problems import NoEmbeddingsError
from router.auth.quota import Quotas
from router.settings import Settings
from router.upstream.client import Pool, Upstream, no_answer, refusal
from router.upstream.errors import EngineFailedError, EngineUnreachableError, NoSlotError, UpstreamError
from tiers.fleet import Fleet
from tiers.spec import ReplicaStatus

Engine = tuple[str, str, bytes]  # its address and key, and the request's body for it


@dataclass(frozen=True, slots=True)
class Passthrough:
    upstream: Upstream
    quotas: Quotas
    fleet: Fleet
    settings: Settings

    async def tokens(self, request: Request) -> Response:
        """Let any ready engine tokenize, detokenize or count, since they share a tokenizer.

        It has no slot for that, which takes nothing from generation.
        """
        document, allowed = read_document(await self._body(request)), context_of(request.scope).caller.tiers
        resolve(document, self.settings.openai, self.fleet)
        fleet, now = self.fleet, time.monotonic()
        replicas = [r for r in fleet.replicas if r.state.status is ReplicaStatus.READY]
        ready = [r for r in replicas if allowed is None or r.spec.name in allowed]
        ready.sort(key=lambda r: (not r.breaker.admits(now), fleet.rank(r.spec.name), r.state.in_flight))
        engines = [(r.url, r.api_key, document.edited({"model": r.model})) for r in ready]
        return await self._pass_on(request, "tokens", engines, tokens=0)

    async def embeddings(self, request: Request) -> Response:
        body, urls = await self._body(request), self.settings.openai.embeddings_urls
        document = read_document(body)
        if not urls:
            raise NoEmbeddingsError(
                "no engine here serves embeddings: the tiers generate text; set openai.embeddings_urls to one that does"
            )
        engines = [(url, self.settings.engine.api_key, body) for url in urls]
        return await self._pass_on(request, "embeddings", engines, count_input(document.get("input")))

    async def _body(self, request: Request) -> bytes:
        return await read_body(request.scope, request.receive, self.settings.server.max_body_bytes)

    async def _pass_on(self, request: Request, pool: Pool, engines: Iterable[Engine], tokens: int) -> Response:
        context, path = context_of(request.scope), request.scope["path"]
        cancel_on_disconnect(request.scope)
        grant = await self.quotas.enter(context.caller, tokens, context.limits)
        used: int | None = None
        try:
            status, media_type, content = await self._first_answer(path, pool, engines, context.request_id)
            used = tokens
        except asyncio.CancelledError:
            used = tokens  # an engine may have worked for it
            raise
        finally:
            if grant is not None:
                await grant.settle(used)
        if error_form(path) is ErrorForm.ANTHROPIC and status != HTTPStatus.OK:
            raise refusal(status, content)  # vLLM has OpenAI's form for some of them
        return Response(content, status, context.headers, media_type)

    async def _first_answer(
        self, path: str, pool: Pool, engines: Iterable[Engine], request_id: str
    ) -> tuple[int, str, bytes]:
        causes, upstream = list[UpstreamError](), self.upstream
        for url, key, body in sorted(engines, key=lambda engine: not upstream.passes_at_once(engine[0], pool)):
            try:
                return await upstream.pass_on(url, key, path, body, pool, request_id=request_id)
            except (EngineUnreachableError, EngineFailedError) as error:
                causes.append(error)
        if causes:
            raise no_answer(causes, *map(str, causes))
        raise NoSlotError("no tier that could answer this is ready")


def count_input(value: Any) -> int:
    """Return about how many tokens an embedding's input has: ids exactly, text by its length.

    What is no input counts as one token: the engine says best what is wrong with it.
    """
    total = 0
    for one in value if isinstance(value, list) else [value]:
        total += len(one) if isinstance(one, list) else max(len(one) // 3, 1) if isinstance(one, str) else 1
    return total
