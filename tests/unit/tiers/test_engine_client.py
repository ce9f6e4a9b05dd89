"""The client that asks engines sends what httpx's own would send, and leaves out what no engine needs."""

from __future__ import annotations

import httpx
import pytest

from tiers.engine_client import EngineClient
from tiers.errors import ProbeError
from tiers.probe import CHAT, EngineProbe

pytestmark = pytest.mark.anyio
URL = "http://engine:8000"
TIMEOUT_S = 7.0
SSE = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'


class Recorder(httpx.AsyncBaseTransport):
    """A transport that answers each path with the given body, and keeps what was sent and closed."""

    def __init__(self, answers: dict[str, tuple[int, dict[str, str], bytes]]) -> None:
        self._answers = answers
        self.sent: list[tuple[str, list[tuple[bytes, bytes]], bytes, object]] = []
        self.answered: list[httpx.Response] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.sent.append(
            (
                f"{request.method} {request.url}",
                request.headers.raw,
                request.read(),
                request.extensions["timeout"],
            )
        )
        status, headers, content = self._answers[request.url.path]
        stream = httpx.ByteStream(content)
        response = httpx.Response(status, headers=headers, stream=stream)
        self.answered.append(response)
        return response


ANSWERS = {
    "/health": (200, {"set-cookie": "engine=1"}, b""),
    "/v1/models": (200, {}, b'{"data": [{"id": "m", "max_model_len": 9}]}'),
    "/tokenize": (200, {}, b'{"tokens": [1]}'),
    CHAT: (200, {}, SSE),
}


async def ask_everything(client: httpx.AsyncClient) -> None:
    probe = EngineProbe(client, URL, "secret")
    assert (await probe.model()).name == "m"
    assert (await probe.model()).name == "m"
    assert await probe.text_tokens("m", "x") == [1]
    assert (await probe.generate(CHAT, {"model": "m"}, 5)).text == "a"
    assert await probe.alive()


async def test_the_same_requests_are_sent_as_by_httpx() -> None:
    """Method, address, headers in their order, body and timeouts, also of a request that is sent again."""
    recorders = Recorder(ANSWERS), Recorder(ANSWERS)
    async with EngineClient(TIMEOUT_S, recorders[0]) as client:
        await ask_everything(client)
    async with httpx.AsyncClient(timeout=TIMEOUT_S, transport=recorders[1]) as client:
        await ask_everything(client)
    assert recorders[0].sent == recorders[1].sent
    first, second, *_ = recorders[0].sent
    assert first == second
    assert (b"authorization", b"Bearer secret") in first[1]
    assert all(response.is_closed for response in recorders[0].answered)


async def test_cookies_are_not_kept() -> None:
    recorder = Recorder(ANSWERS)
    async with EngineClient(TIMEOUT_S, recorder) as client:
        for key in ("first", "second"):
            assert await EngineProbe(client, URL, key).alive()
    names = [name.lower() for _, headers, _, _ in recorder.sent for name, _ in headers]
    assert b"cookie" not in names


async def test_redirects_are_not_followed() -> None:
    recorder = Recorder({"/v1/models": (307, {"location": "/elsewhere"}, b"moved")})
    async with EngineClient(TIMEOUT_S, recorder) as client:
        with pytest.raises(ProbeError, match="HTTP 307: moved"):
            await EngineProbe(client, URL, "").model()
    assert len(recorder.sent) == 1


async def test_an_answer_that_is_not_streamed_is_read() -> None:
    async with EngineClient(TIMEOUT_S, Recorder(ANSWERS)) as client:
        response = await client.get(f"{URL}/tokenize")
    assert response.json() == {"tokens": [1]}
