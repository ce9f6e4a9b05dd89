"""A stub engine that costs next to nothing, so that what stands in front of it can be measured.

One asyncio protocol, answers prepared beforehand, no parsing beyond the request line and Content-Length. Speaks as much of
vLLM as the router's warm-up asks for. usage: python benchmarks/stub_engine.py PORT [DELAY_MS]
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import cast

import uvloop

TOKENS = 32


def event(fields: dict[str, object]) -> bytes:
    """Return one server-sent event of a completion."""
    return (
        b"data: "
        + json.dumps(
            {"id": "x", "object": "chunk", "created": 0, "model": "stub", **fields}
        ).encode()
        + b"\n\n"
    )


def chunk(text: str, reason: str | None = None) -> bytes:
    """Return a piece in the shape of both chat and text completions."""
    return event(
        {
            "choices": [
                {
                    "index": 0,
                    "delta": {"content": text},
                    "text": text,
                    "finish_reason": reason,
                }
            ]
        }
    )


USAGE = {"prompt_tokens": 12, "completion_tokens": TOKENS, "total_tokens": 12 + TOKENS}
PIECES = [chunk(" Paris is a city")] + [chunk(f" word{n}") for n in range(TOKENS - 1)]
ENDING = (
    chunk("", "stop") + event({"choices": [], "usage": USAGE}) + b"data: [DONE]\n\n"
)


def framed(body: bytes) -> bytes:
    """Return a body as one HTTP chunk."""
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


def plain(body: bytes, kind: str = "application/json") -> bytes:
    """Return a whole answer."""
    return (
        f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM = [framed(piece) for piece in PIECES]
STREAM_END = framed(ENDING) + b"0\r\n\r\n"
MODELS = plain(json.dumps({"data": [{"id": "stub", "max_model_len": 8192}]}).encode())
METRICS = plain(
    b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\nvllm:kv_cache_usage_perc 0.0\n",
    "text/plain",
)
SAID = {
    "index": 0,
    "text": " Paris",
    "message": {"content": " Paris"},
    "finish_reason": "length",
}
WHOLE = plain(
    json.dumps(
        {"id": "x", "created": 0, "model": "stub", "choices": [SAID], "usage": USAGE}
    ).encode()
)
SIMPLE = {
    b"/health": plain(b""),
    b"/metrics": METRICS,
    b"/v1/models": MODELS,
    b"/tokenize": plain(b'{"tokens": [1, 2, 3]}'),
}


class Stub(asyncio.Protocol):
    """One connection."""

    delay_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport, self.buffer = cast("asyncio.Transport", transport), b""
        self.task: asyncio.Future[None] | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop what is being sent."""
        del exc
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        """Answer every complete request in the buffer."""
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < end + 4 + length:
                return
            path, body = (
                self.buffer.split(b" ", 2)[1],
                self.buffer[end + 4 : end + 4 + length],
            )
            self.buffer = self.buffer[end + 4 + length :]
            self.answer(path, body)

    def answer(self, path: bytes, body: bytes) -> None:
        """Answer one request: at once, or paced; ``/pace/N`` changes the pause from then on to N milliseconds."""
        if path in SIMPLE:
            self.transport.write(SIMPLE[path])
        elif path.startswith(b"/pace/"):
            Stub.delay_s = int(path[6:]) / 1000
            self.transport.write(plain(b""))
        elif b'"stream"' not in body:
            self.transport.write(WHOLE)
        elif self.delay_s:
            self.task = asyncio.ensure_future(self.paced())
        else:
            self.transport.write(STREAM_HEAD + b"".join(STREAM) + STREAM_END)

    async def paced(self) -> None:
        """Stream with a pause before each piece."""
        self.transport.write(STREAM_HEAD)
        for piece in STREAM:
            await asyncio.sleep(self.delay_s)
            self.transport.write(piece)
        self.transport.write(STREAM_END)


async def main() -> None:
    """Serve until killed."""
    Stub.delay_s = float(sys.argv[2]) / 1000 if len(sys.argv) > 2 else 0.0
    server = await asyncio.get_running_loop().create_server(
        Stub, "127.0.0.1", int(sys.argv[1])
    )
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
