"""A stub engine that sends every token by itself, as vLLM does: one write a token, at a pace that can be set.

usage: [STUB_CONTEXT=8192] python benchmarks/token_stub.py PORT...

One process, one loop over epoll, answers prepared beforehand; every port is an engine of its own to those who ask. A stream
gets one token a turn of the loop, or one every so many microseconds (``POST /pace/5000``). It speaks what proxies ask of
vLLM, token ids and usage included, and takes traces (OTLP over HTTP), which it drops.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import sys
import time
from collections import deque
from functools import lru_cache

WORD = b" wave"  # occurs once in every token, and nowhere else
MODEL = "stub"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
BLOCKED_S = 0.001  # until a client that did not read is tried again
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_(?:completion_)?tokens": *(\d+)')


def asks(body: bytes, name: str) -> bool:
    """Tell whether a body has a field that is true."""
    return re.search(rb'"%s": *true' % name.encode(), body) is not None


def whole(body: bytes, kind: str = "application/json") -> bytes:
    """Return an answer with its length."""
    head = f"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def token(number: int) -> str:
    """Return a token's text; the first one is what a warm-up expects."""
    return ("" if number else " Paris") + WORD.decode() + chr(97 + number % 26)


def fields(*, chat: bool, part: str = "") -> dict[str, object]:
    """Return what every answer, or every part of one, begins with."""
    name, kind = (
        ("chatcmpl", f"chat.completion{part}") if chat else ("cmpl", "text_completion")
    )
    return {
        "id": f"{name}-0123456789abcdef0123456789abcdef",
        "object": kind,
        "created": 1760000000,
        "model": MODEL,
    }


def usage(tokens: int) -> dict[str, int]:
    """Return the counts of an answer."""
    return {
        "prompt_tokens": 64,
        "total_tokens": 64 + tokens,
        "completion_tokens": tokens,
    }


@lru_cache
def completion(tokens: int, *, chat: bool) -> bytes:
    """Return an answer that is not streamed."""
    text = "".join(token(number) for number in range(tokens))
    said: dict[str, object] = (
        {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    )
    choice = {
        "index": 0,
        **said,
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    return whole(
        _json({**fields(chat=chat), "choices": [choice], "usage": usage(tokens)})
    )


@lru_cache
def stream(tokens: int, *, chat: bool, ids: bool, counted: bool) -> tuple[bytes, ...]:
    """Return what is written for each token, and at last the end.

    Args:
        tokens: Of the answer.
        chat: Whether in the shape of a chat.
        ids: Whether ids of tokens are told.
        counted: Whether usage is told.
    """
    head = fields(chat=chat, part=".chunk")

    def event(
        text: str, number: int | None, reason: str | None, **more: object
    ) -> bytes:
        told = [1000 + number] if ids and number is not None else None
        said: dict[str, object] = (
            {"delta": {"content": text} | more} if chat else {"text": text}
        )
        choice = {
            "index": 0,
            **said,
            "logprobs": None,
            "finish_reason": reason,
            "token_ids": told,
        }
        first = {"prompt_token_ids": list(range(64))} if ids and number is None else {}
        return _event({**head, "choices": [choice], **first})

    pieces = [
        event(token(n), n, "length" if n == tokens - 1 else None) for n in range(tokens)
    ]
    if chat:
        pieces[0] = event("", None, None, role="assistant") + pieces[0]
    ending = _event({**head, "choices": [], "usage": usage(tokens)}) if counted else b""
    return (*pieces, ending + _framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _framed(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


def _event(value: object) -> bytes:
    return _framed(b"data: " + _json(value) + b"\n\n")


CONTEXT = int(os.environ.get("STUB_CONTEXT", "8192"))
_COUNTED = b'{"count":3,"max_model_len":%d,"tokens":[1,2,3]}' % CONTEXT
_LISTED = {
    "object": "list",
    "data": [{"id": MODEL, "object": "model", "root": MODEL, "max_model_len": CONTEXT}],
}
_LOAD = (
    b'vllm:num_requests_running{model_name="stub"} 0.0\nvllm:num_requests_waiting{model_name="stub"} 0.0\n'
    b'vllm:kv_cache_usage_perc{model_name="stub"} 0.0\n'
)
SIMPLE = {
    b"/health": whole(b""),
    b"/metrics": whole(_LOAD, "text/plain; version=0.0.4"),
    b"/v1/models": whole(_json(_LISTED)),
    b"/version": whole(b'{"version":"0.32.0"}'),
    b"/tokenize": whole(_COUNTED),
    b"/v1/traces": whole(b"", "application/x-protobuf"),
}
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


class Connection:
    """A client, and the stream that it is being sent."""

    __slots__ = ("at", "buffer", "closed", "due", "pieces", "sock", "unsent")

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.unsent, self.closed = sock, b"", False
        self.buffer = bytearray()
        self.pieces: tuple[bytes, ...] = ()
        self.at, self.due = 0, 0.0

    def request(self) -> tuple[bytes, bytes] | None:
        """Return path and body of the next request, if all of it is there."""
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return None
        head, start = bytes(self.buffer[:end]), end + 4
        if _CHUNKED.search(head):
            last = self.buffer.find(b"0\r\n\r\n", start)
            if last < 0:
                return None
            stop = last + 5
        else:
            length = _LENGTH.search(head)
            stop = start + (int(length[1]) if length else 0)
        if len(self.buffer) < stop:
            return None
        body = bytes(self.buffer[start:stop])
        del self.buffer[:stop]
        return head.split(b" ", 2)[1], body

    def send(self, data: bytes) -> None:
        """Send, or keep what the client has no room for."""
        try:
            sent = 0 if self.unsent else self.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.closed = True
            return
        if sent < len(data):
            self.unsent += data[sent:]

    def send_rest(self) -> bool:
        """Send what was kept; tell whether that was all."""
        data, self.unsent = self.unsent, b""
        self.send(data)
        return not self.unsent


class Engine:
    """All connections, and the streams in the order in which their next tokens are due."""

    def __init__(self, ports: list[int]) -> None:
        self._epoll = select.epoll()
        self._listening = {}
        for port in ports:
            sock = socket.create_server(("127.0.0.1", port), backlog=1024)
            sock.setblocking(False)
            self._listening[sock.fileno()] = sock
            self._epoll.register(sock, select.EPOLLIN)
        self._connections: dict[int, Connection] = {}
        self._streams: deque[Connection] = deque()
        self._pause_s = 0.0

    def serve(self) -> None:
        """Serve until killed."""
        while True:
            if self._streams:  # epoll itself waits whole milliseconds
                wait_s = self._streams[0].due - time.monotonic()
                if wait_s > 0:
                    select.select([self._epoll], [], [], wait_s)
            for number, _ in self._epoll.poll(0 if self._streams else -1):
                if number in self._listening:
                    self._accept(self._listening[number])
                else:
                    self._read(self._connections[number])
            self._send_due()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                sock, _ = listening.accept()
            except BlockingIOError:
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connections[sock.fileno()] = Connection(sock)
            self._epoll.register(sock, select.EPOLLIN)

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.sock.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        connection.buffer += data
        if not data:
            connection.closed = True
        elif not connection.pieces:
            self._answer(connection)
        if connection.closed:
            self._connections.pop(connection.sock.fileno(), None)
            connection.sock.close()  # which takes it out of epoll

    def _answer(self, connection: Connection) -> None:
        """Answer what has come, up to a stream: what comes after one waits for its end."""
        while not connection.pieces and (request := connection.request()) is not None:
            path, body = request
            chat = path == b"/v1/chat/completions"
            if path.startswith(b"/pace/"):
                self._pause_s = int(path[6:]) / 1e6
                connection.send(whole(b""))
            elif not chat and path != b"/v1/completions":
                connection.send(SIMPLE.get(path, NOT_FOUND))
            elif not asks(body, "stream"):
                connection.send(completion(_tokens(body), chat=chat))
            else:
                ids, counted = (
                    asks(body, "return_token_ids"),
                    asks(body, "include_usage"),
                )
                connection.send(STREAM_HEAD)
                connection.pieces, connection.at = (
                    stream(_tokens(body), chat=chat, ids=ids, counted=counted),
                    0,
                )
                connection.due = time.monotonic() + self._pause_s
                self._streams.append(connection)

    def _send_due(self) -> None:
        """Send one token of each stream whose time has come."""
        now = time.monotonic()
        for _ in range(len(self._streams)):
            if self._streams[0].due > now:
                return
            connection = self._streams.popleft()
            if connection.closed:
                continue
            if connection.unsent and not connection.send_rest():
                connection.due = now + BLOCKED_S
                self._streams.append(connection)
                continue
            connection.send(connection.pieces[connection.at])
            connection.at += 1
            if connection.at < len(connection.pieces) - 1:
                connection.due = max(connection.due + self._pause_s, now)
                self._streams.append(connection)
            else:
                connection.send(connection.pieces[-1])
                self._finish(connection, now)

    def _finish(self, connection: Connection, now: float) -> None:
        if connection.unsent:  # the end is sent once there is room
            connection.pieces, connection.at, connection.due = (
                (b"", b""),
                0,
                now + BLOCKED_S,
            )
            self._streams.append(connection)
        else:
            connection.pieces = ()
            self._answer(connection)


def _tokens(body: bytes) -> int:
    found = _TOKENS.search(body)
    return int(found[1]) if found else 16


if __name__ == "__main__":
    Engine([int(port) for port in sys.argv[1:]]).serve()
