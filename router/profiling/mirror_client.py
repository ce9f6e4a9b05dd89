"""Asks the second fleet for an answer, as a stream, over its OpenAI API."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import httpx
from pydantic_core import to_json

from router.profiling.mirror_comparison import AnswerText
from router.upstream.engine_request import MIRROR_HEADER, ChatRequest, RelayRequest, resumption_of
from router.upstream.errors import EngineBroke
from router.upstream.http import body_of
from router.upstream.json_object import read_json
from router.upstream.sse import EventSource

if TYPE_CHECKING:
    from router.settings import MirrorSettings
    from router.upstream.engine_stream import EngineRequest
    from router.upstream.transport import EngineTransport
    from tiers.spec import TierName

MAX_MODELS_BYTES = 1 << 20
MAX_CHARACTERS = 1 << 22  # of an answer
TIER = "x-qarr-tier"  # of a request: the hint; of an answer: the tier that serves it
GREEDY = 1e-5  # temperatures below are greedy (vLLM's _SAMPLING_EPS)
# Members of a body that are for this router or its engines, or say who the caller is.
_LEFT_OUT = (
    "cache_salt", "metadata", "priority", "prompt_cache_key", "provider", "qarr", "request_id", "safety_identifier",
    "service_tier", "store", "stream_options", "user",
)  # fmt: skip


class MirrorError(Exception):
    """The second fleet gave no whole answer. The text has nothing of prompt or answer, and few forms."""


class MirrorClient:
    """A client of the second fleet.

    Args:
        settings: Where it is, and what is asked of it.
        transport: The connections.
    """

    def __init__(self, settings: MirrorSettings, transport: EngineTransport) -> None:
        self.settings, self._transport = settings, transport
        self._model = settings.model

    async def ask(self, request: ChatRequest | RelayRequest, request_id: str, hint: TierName | None) -> AnswerText:
        """Return its answer to a request.

        Args:
            request: As the engine here was asked.
            request_id: Of the request here, by which both routers' records can be told to belong together.
            hint: The tier that the caller asked for; a QARR router gets it too, unless the settings name a model.

        Raises:
            MirrorError: There is none, or not in time.
        """
        timeout_s = self.settings.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                self._model = self._model or await self._first_model()
                headers = {"content-type": "application/json", "x-request-id": request_id}
                if hint is not None and not self.settings.model:
                    headers[TIER] = hint
                path, content = request.path.removeprefix("/v1"), body_for(request, self._model)
                return await self._answer(self._http("POST", path, headers, content))
        except TimeoutError:
            raise MirrorError(f"no whole answer within {timeout_s:g} s") from None
        except (httpx.HTTPError, EngineBroke) as error:
            raise MirrorError(f"no whole answer ({type(error).__name__})") from None
        except MirrorError:
            self._model = self.settings.model  # it may serve another one by now
            raise

    async def _first_model(self) -> str:
        response = await self._transport.handle_async_request(self._http("GET", "/models"))
        try:
            _check(response)
            content = await body_of(response, MAX_MODELS_BYTES)
        finally:
            await response.aclose()
        try:
            return str(read_json(content)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise MirrorError("its list of models holds none: name one in mirror.model") from None

    async def _answer(self, request: httpx.Request) -> AnswerText:
        began, first_at, parts, length = time.monotonic(), None, list[str](), 0
        finish_reason: str | None = None
        response = await self._transport.handle_async_request(request)
        source: EventSource | None = None
        try:
            _check(response)
            source = EventSource(response)
            while (chunks := await source.next()) is not None:
                if first_at is None and any(chunk.visible for chunk in chunks):
                    first_at = time.monotonic()
                for chunk in chunks:
                    parts.append(chunk.text)
                    length += len(chunk.text)
                    finish_reason = chunk.finish_reason or finish_reason
                if length > MAX_CHARACTERS:
                    raise MirrorError(f"its answer has over {MAX_CHARACTERS} characters")
        finally:
            if source is not None:
                await source.aclose()
            await response.aclose()
        if finish_reason is None:
            raise MirrorError("its answer has no finish reason")
        ttft_s = first_at - began if first_at is not None else None
        took_s = time.monotonic() - began
        return AnswerText("".join(parts), finish_reason, ttft_s, took_s, response.headers.get(TIER))

    def _http(
        self, method: str, path: str, headers: dict[str, str] | None = None, content: bytes = b""
    ) -> httpx.Request:
        key = self.settings.api_key.get_secret_value()
        sent = {MIRROR_HEADER.decode(): "1", **(headers or {})}
        if key:
            sent["authorization"] = f"Bearer {key}"
        return httpx.Request(method, self.settings.url + path, headers=sent, content=content)


def comparable(request: EngineRequest, sequences: int) -> ChatRequest | RelayRequest | None:
    """Return a request whose answer can be compared: one plain text, of the model itself. None for all others.

    That is the text which failover could continue, streamed or not.
    """
    if request.adapter is not None or sequences != 1:
        return None
    if isinstance(request, ChatRequest):
        return request
    if not isinstance(request, RelayRequest):
        return None
    plain = resumption_of(request.document, 0, choices=sequences, chat=request.operation == "chat")
    return request if plain is not None else None


def is_greedy(request: ChatRequest | RelayRequest) -> bool:
    """Tell whether the likeliest token is always taken, by the request's own temperature."""
    given: Any = (request.sampling if isinstance(request, ChatRequest) else request.document).get("temperature")
    return type(given) in {int, float} and given < GREEDY


def body_for(request: ChatRequest | RelayRequest, model: str) -> bytes:
    """Return the request's body for the second fleet, which streams its answer."""
    if isinstance(request, ChatRequest):
        limit = {"max_tokens": request.max_tokens, **request.sampling}
        return to_json({"model": model, "messages": request.messages, **limit, "stream": True})
    return request.document.edited({**dict.fromkeys(_LEFT_OUT), "model": model, "stream": True})


def _check(response: httpx.Response) -> None:
    if response.status_code != httpx.codes.OK:
        raise MirrorError(f"HTTP {response.status_code}")
