"""A proxy between a router and an engine, which keeps requests and answers, and breaks streams off on demand."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
from starlette.applications import Starlette
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.types import ASGIApp

EVENT = "data: {"


@dataclass(slots=True)
class Exchange:
    """A request to an engine and its answer.

    Attributes:
        path: The path that it was sent to.
        body: The request's body.
        prompt_ids: The prompt's tokens, as a streamed answer names them.
        token_ids: The tokens of a streamed answer that were passed on.
        text: The text of these tokens.
    """

    path: str
    body: dict[str, Any]
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""

    def take(self, event: dict[str, Any]) -> None:
        """Note an event of a streamed answer."""
        self.prompt_ids = event.get("prompt_token_ids") or self.prompt_ids
        for choice in event["choices"]:
            self.prompt_ids = choice.get("prompt_token_ids") or self.prompt_ids
            self.token_ids += choice.get("token_ids") or ()
            piece = (
                choice["delta"].get("content") if "delta" in choice else choice["text"]
            )
            self.text += piece or ""


@dataclass(slots=True)
class Between:
    """A proxy before an engine.

    Attributes:
        url: The engine's address.
        key: The engine's key.
        events: After so many events a stream breaks off, or with None never.
        exchanges: The requests and their answers, in order.
    """

    url: str
    key: str
    events: int | None = None
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def app(self) -> ASGIApp:
        return Starlette(routes=[Route("/{path:path}", self._pass, methods=["POST"])])

    async def _pass(self, request: Request) -> Response:
        client = httpx.AsyncClient(trust_env=False, timeout=120)
        headers = {
            "authorization": f"Bearer {self.key}",
            "content-type": "application/json",
        }
        content = await request.body()
        sent = client.build_request(
            "POST", self.url + request.url.path, content=content, headers=headers
        )
        answer = await client.send(sent, stream=True)
        exchange = Exchange(request.url.path, json.loads(content))
        self.exchanges.append(exchange)
        if exchange.body.get("stream"):
            lines = self._relay(answer, client, exchange)
            return StreamingResponse(
                lines, answer.status_code, media_type="text/event-stream"
            )
        whole = await answer.aread()
        await client.aclose()
        return Response(whole, answer.status_code, media_type="application/json")

    async def _relay(
        self, answer: httpx.Response, client: httpx.AsyncClient, exchange: Exchange
    ) -> AsyncIterator[bytes]:
        seen = 0
        try:
            async for line in answer.aiter_lines():
                if not line:
                    continue
                yield line.encode() + b"\n\n"
                seen += 1
                if line.startswith(EVENT):
                    exchange.take(json.loads(line.removeprefix("data: ")))
                if seen == self.events:
                    raise ConnectionResetError
        finally:
            await answer.aclose()
            await client.aclose()
