"""Attacks that need a socket of their own: each is bounded, and says what may come of it."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from running import PATIENCE_S, Wire, generation, post

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST /route HTTP/1.1\r\nhost: localhost\r\n"
BODY = b'{"prompt": "hi"}'
REFUSED, CLOSED = frozenset({400, 408, 413, 431}), frozenset({0})
LONG = {"tier": "precise", "max_tokens": 500}
PACED = {"tier": "balanced", "max_tokens": 60}


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack.

    Attributes:
        run: Given the router's port, does it, and returns every status that came back; 0: closed without one.
        allowed: Statuses that may come.
    """

    name: str
    run: Callable[[int], Awaitable[list[int]]]
    allowed: frozenset[int]


def statuses(answers: bytes) -> list[int]:
    """Return the status of each answer in what a connection sent."""
    # Without interim answers: a client that sends nothing more gets one, so that it shows whether it is still there.
    found = [int(status) for status in re.findall(rb"HTTP/1\.1 ([2-5]\d\d) ", answers)]
    return found or [0]


def sends(*parts: bytes, pause_s: float = 0.0) -> Callable[[int], Awaitable[list[int]]]:
    """Return an attack that sends bytes, then reads until the router closes."""

    async def run(port: int) -> list[int]:
        wire = await Wire.open(port)
        try:
            reading = asyncio.create_task(wire.rest())
            for part in parts:
                if reading.done():
                    break
                await wire.send(part)
                if pause_s:
                    await asyncio.sleep(pause_s)
            return statuses(await reading)
        finally:
            wire.drop()

    return run


def leaves(
    sent: bytes, until: bytes = b"", *, how: str = "reset"
) -> Callable[[int], Awaitable[list[int]]]:
    """Return an attack that sends bytes, perhaps reads up to some, and goes away: by a reset, a close, or half of one."""

    async def run(port: int) -> list[int]:
        wire = await Wire.open(port)
        try:
            await wire.send(sent)
            if until:
                async with asyncio.timeout(PATIENCE_S):
                    await wire.reader.readuntil(until)
            if how == "half":
                wire.writer.write_eof()
                return statuses(await wire.rest())
            if how == "reset":
                sock: socket.socket = wire.writer.get_extra_info("socket")
                sock.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )
            wire.writer.close()
            return [0]
        finally:
            wire.drop()

    return run


def does_not_read(sent: bytes) -> Callable[[int], Awaitable[list[int]]]:
    """Return an attack that asks for much and reads nothing, until the router has cut it."""

    async def run(port: int) -> list[int]:
        wire = await Wire.open(port, small=True)
        try:
            await wire.send(sent)
            wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(3)  # the router's patience is one second
            wire.writer.transport.resume_reading()  # type: ignore[attr-defined]
            answers = await wire.rest()
            assert not answers.endswith(b"0\r\n\r\n"), "the whole answer came"
            return statuses(answers)[:1]
        finally:
            wire.drop()

    return run


def many(
    count: int, one: Callable[[int], Awaitable[list[int]]]
) -> Callable[[int], Awaitable[list[int]]]:
    """Return an attack that makes another one many times at once."""

    async def run(port: int) -> list[int]:
        found = await asyncio.gather(*(one(port) for _ in range(count)))
        return [status for answers in found for status in answers]

    return run


def framed(*headers: bytes, body: bytes = BODY, close: bool = True) -> bytes:
    """Return a request for /route with framing of one's own; the last of its connection, if it is taken for a request."""
    end = b"connection: close\r\n" if close else b""
    return (
        POST + b"".join(header + b"\r\n" for header in headers) + end + b"\r\n" + body
    )


CHUNKED = b"10\r\n" + BODY + b"\r\n0\r\n\r\n"
TE = b"transfer-encoding: chunked"
LENGTH = b"content-length: %d" % len(BODY)


def framings() -> list[Attack]:
    """Return requests whose length could be read in two ways, or in none. None may be taken for two requests."""
    hidden = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
    bad: dict[str, bytes] = {
        "content-length twice, alike": framed(LENGTH, LENGTH),
        "content-length twice, unlike": framed(LENGTH, b"content-length: 3"),
        "content-length as a list": framed(b"content-length: 16, 16"),
        "content-length negative": framed(b"content-length: -1"),
        "content-length with a sign": framed(b"content-length: +16"),
        "content-length hexadecimal": framed(b"content-length: 0x10"),
        "content-length empty": framed(b"content-length:"),
        "content-length beyond 64 bits": framed(
            b"content-length: 99999999999999999999999"
        ),
        "content-length with a space in it": framed(b"content-length: 1 6"),
        "both lengths": framed(LENGTH, TE, body=CHUNKED),
        "both lengths, the other way round": framed(
            TE, b"content-length: 4", body=CHUNKED + hidden
        ),
        "transfer-encoding unknown": framed(
            b"transfer-encoding: xchunked", body=CHUNKED
        ),
        "transfer-encoding not chunked at last": framed(
            b"transfer-encoding: chunked, gzip", body=CHUNKED
        ),
        "transfer-encoding identity": framed(b"transfer-encoding: identity", body=b""),
        "space before the colon": framed(b"content-length : 16"),
        "header without a colon": framed(LENGTH, b"nonsense"),
        "header without a name": framed(LENGTH, b": x"),
        "obs-fold in a length": framed(b"content-length: 1\r\n 6"),
        "NUL in a value": framed(LENGTH, b"x: a\0b"),
        "NUL in a name": framed(LENGTH, b"x\0y: a"),
        "CR in a value": framed(LENGTH, b"x: a\rb: c"),
        "bare LF ends lines": framed(LENGTH).replace(b"\r\n", b"\n"),
        "chunk size negative": framed(TE, body=b"-1\r\n" + BODY + b"\r\n0\r\n\r\n"),
        "chunk size with 0x": framed(TE, body=b"0x10\r\n" + BODY + b"\r\n0\r\n\r\n"),
        "chunk size beyond 64 bits": framed(
            TE, body=b"f" * 17 + b"\r\n" + BODY + b"\r\n0\r\n\r\n"
        ),
        "chunk size no number": framed(TE, body=b"zz\r\n" + BODY + b"\r\n0\r\n\r\n"),
        "chunk size empty": framed(TE, body=b"\r\n" + BODY + b"\r\n0\r\n\r\n"),
        "chunk longer than its size": framed(
            TE, body=b"3\r\n" + BODY + b"\r\n0\r\n\r\n"
        ),
        "chunk without its end": framed(TE, body=b"10\r\n" + BODY + b"0\r\n\r\n"),
        "no host": b"GET /healthz HTTP/1.1\r\nconnection: close\r\n\r\n",
        "host twice": GET + b"host: y\r\nconnection: close\r\n\r\n",
        "no version": b"GET /healthz\r\n\r\n",
        "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "TLS hello": bytes.fromhex("16030100c8010000c40303") + b"\x5a" * 190,
        "version of its own": GET.replace(b"1.1", b"9.9") + b"\r\n",
        "CONNECT": b"CONNECT x:443 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        "noise": bytes(range(256)) * 8,
    }
    attacks = [
        Attack(name, sends(data), REFUSED | CLOSED) for name, data in bad.items()
    ]
    either: dict[str, bytes] = {
        "transfer-encoding chunked twice": framed(TE, TE, body=CHUNKED),
        "transfer-encoding in capitals": framed(
            b"TRANSFER-ENCODING: CHUNKED", body=CHUNKED
        ),
        "content-length with zeros": framed(b"content-length: 0016"),
        "obs-fold in a value": framed(LENGTH, b"x: a\r\n b"),
        "chunk size with zeros": framed(TE, body=b"0" * 50 + CHUNKED),
        "chunk extension": framed(TE, body=b"10;a=b;c\r\n" + BODY + b"\r\n0\r\n\r\n"),
        "trailers": framed(
            TE, body=b"10\r\n" + BODY + b"\r\n0\r\nauthorization: x\r\nx: y\r\n\r\n"
        ),
        "HTTP/1.0": b"GET /healthz HTTP/1.0\r\n\r\n",
        "blank lines first": b"\r\n\r\n" + GET + b"connection: close\r\n\r\n",
        "upgrade": GET + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n",
        "websocket": GET
        + b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: eA==\r\n\r\n",
        "a request within a body": framed(
            b"content-length: %d" % len(hidden), body=hidden
        ),
    }
    return attacks + [
        Attack(name, sends(data), REFUSED | {200}) for name, data in either.items()
    ]


def slow_ones() -> list[Attack]:
    """Return clients that send without an end, or too slowly, or do not take what they asked for."""
    long_body = b"content-length: 100000\r\n\r\n"
    return [
        Attack("nothing at all", many(50, sends()), CLOSED),
        Attack(
            "slow head",
            many(
                50,
                sends(
                    *[b"GET /healthz HTTP/1.1\r\n", *[b"x: y\r\n"] * 20], pause_s=0.2
                ),
            ),
            REFUSED,
        ),
        Attack("slow request line", sends(*[b"G", b"E", b"T"], pause_s=0.5), REFUSED),
        Attack(
            "slow body",
            many(50, sends(POST + long_body, *[b"x"] * 20, pause_s=0.2)),
            REFUSED,
        ),
        Attack(
            "slow chunks",
            sends(POST + TE + b"\r\n\r\n", *[b"1\r\nx\r\n"] * 20, pause_s=0.2),
            REFUSED,
        ),
        Attack(
            "body that is announced and never sent",
            many(20, sends(POST + long_body)),
            REFUSED,
        ),
        Attack(
            "body expected to be asked for",
            sends(POST + b"expect: 100-continue\r\n" + long_body),
            frozenset({100, 408}),
        ),
        Attack("blank lines", sends(*[b"\r\n"] * 30, pause_s=0.1), REFUSED | CLOSED),
        Attack(
            "header without an end",
            sends(b"GET / HTTP/1.1\r\nx: ", *[b"y" * 10_000] * 100),
            REFUSED,
        ),
        Attack(
            "headers without an end",
            sends(b"GET / HTTP/1.1\r\n", *[b"x: y\r\n" * 1000] * 100),
            REFUSED,
        ),
        Attack("path without an end", sends(b"GET /", *[b"y" * 10_000] * 100), REFUSED),
        Attack(
            "large header", sends(GET + b"x: " + b"y" * 100_000 + b"\r\n\r\n"), REFUSED
        ),
        Attack("many headers", sends(GET + b"x: y\r\n" * 500 + b"\r\n"), REFUSED),
        Attack(
            "large body, announced",
            sends(POST + b"content-length: 3000000\r\n\r\n", *[b"x" * 100_000] * 30),
            REFUSED,
        ),
        Attack(
            "large body, in chunks",
            sends(
                POST + TE + b"\r\n\r\n", *[b"186a0\r\n" + b"x" * 100_000 + b"\r\n"] * 30
            ),
            REFUSED,
        ),
        Attack(
            "chunk extension without an end",
            sends(POST + TE + b"\r\n\r\n1;", *[b"e" * 100_000] * 40),
            REFUSED,
        ),
        Attack(
            "trailers without an end",
            sends(POST + TE + b"\r\n\r\n0\r\n", *[b"t: y\r\n" * 10_000] * 60),
            REFUSED,
        ),
        Attack(
            "stream that is not read",
            many(5, does_not_read(generation(**LONG))),
            frozenset({200}),
        ),
        Attack(
            "resumable stream not read",
            does_not_read(generation(**LONG, resumable=True)),
            frozenset({200}),
        ),
        Attack(
            "whole answer that is not read",
            does_not_read(generation(**LONG, stream=False)),
            frozenset({200}),
        ),
        Attack(
            "relayed stream that is not read",
            does_not_read(CHAT_STREAM),
            frozenset({200}),
        ),
    ]


CHAT_STREAM = post(
    "/v1/chat/completions",
    {
        "model": "precise",
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "max_tokens": 500,
    },
)


def lines() -> list[Attack]:
    """Return requests that are sent before earlier ones are answered."""
    ten = (GET + b"\r\n") * 9 + GET + b"connection: close\r\n\r\n"
    return [
        Attack("ten in line", sends(ten), frozenset({200})),
        Attack(
            "five thousand in line",
            sends((GET + b"\r\n") * 5000),
            frozenset({200, 400, 0}),
        ),
        Attack(
            "garbage behind a stream",
            sends(generation(**PACED), b"garbage\r\n\r\n", pause_s=0.2),
            frozenset({200, 400}),
        ),
        Attack(
            "a stream behind a stream, then gone",
            leaves(generation(**PACED) * 2, b"data: "),
            CLOSED,
        ),
        Attack(
            "half a request behind one",
            sends(GET + b"\r\n" + POST, pause_s=0.1),
            frozenset({200, 408}),
        ),
    ]


def early_ends() -> list[Attack]:
    """Return clients that go away, at every stage and in every way."""
    whole = generation(**PACED)
    kept = generation(**PACED, resumable=True)
    stages = {
        "before anything": (b"", b""),
        "in the request line": (b"POST /gen", b""),
        "in the headers": (whole[:60], b""),
        "after the headers": (whole[: whole.index(b"\r\n\r\n") + 4], b""),
        "in the body": (whole[:-5], b""),
        "after the request": (whole, b""),
        "after the answer's head": (whole, b"\r\n\r\n"),
        "after the first event": (whole, b"data: "),
        "after the first event, resumable": (kept, b"data: "),
        "after the request, resumable": (kept, b""),
        "in a whole answer": (generation(**LONG, stream=False), b"\r\n\r\n"),
        "after the last event": (whole, b"event: done"),
    }
    return [
        Attack(
            f"{how} {stage}",
            many(3, leaves(sent, until, how=how)),
            CLOSED | REFUSED | {200},
        )
        for stage, (sent, until) in stages.items()
        for how in ("reset", "close", "half")
    ]


def every_attack() -> list[Attack]:
    """Return all of them."""
    crowd = Attack(
        "more connections than allowed",
        many(480, sends(GET + b"\r\n")),
        frozenset({0, 200, 503}),
    )
    return [*framings(), *slow_ones(), *lines(), *early_ends(), crowd]
