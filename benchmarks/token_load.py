"""Load for the side-by-side benchmark: answers over kept-alive connections, each judged when it ends."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from measure import cpu_s, tree
from token_stub import WORD

if TYPE_CHECKING:
    import psutil

LAST_CHUNK = b"\r\n0\r\n\r\n"
GRACE_S = 20.0  # for the answers that are open when the time is over
SETTLE_S = 0.5  # from which on the connections before a burst keep the proxy busy
BETWEEN_BURSTS_S = 0.2
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNK = re.compile(rb"([0-9a-fA-F]+)[^\r\n]*\r\n")


@dataclass(frozen=True, slots=True)
class Question:
    """A request, and what a good answer to it has.

    Attributes:
        path: Of the endpoint.
        body: Sent as JSON.
        tokens: That the answer must have.
        ending: Bytes that it must have besides.
        headers: Sent besides the usual ones: some gateways take their configuration there.
    """

    path: str
    body: dict[str, object]
    tokens: int
    ending: bytes
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def raw(self) -> bytes:
        """Return the request's bytes."""
        body = json.dumps(self.body).encode()
        more = "".join(f"{name}: {value}\r\n" for name, value in self.headers)
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"accept: */*\r\n{more}content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def is_answered(self, answer: bytes) -> bool:
        """Tell whether an answer is 200, has all tokens, and ends as it must."""
        if not answer.startswith(b"HTTP/1.1 200 "):
            return False
        if answer.count(WORD) != self.tokens or self.ending not in answer:
            answer = unframed(answer)  # a proxy may cut anywhere
        return answer.count(WORD) == self.tokens and self.ending in answer


def unframed(answer: bytes) -> bytes:
    """Return a body without the frames of its chunks."""
    _, _, rest = answer.partition(b"\r\n\r\n")
    parts, at = [], 0
    while (size := _CHUNK.match(rest, at)) is not None and (length := int(size[1], 16)):
        parts.append(rest[size.end() : size.end() + length])
        at = size.end() + length + 2
    return b"".join(parts)


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one load. Times in milliseconds, CPU in microseconds an answer, memory in MB.

    Attributes:
        answers: Good ones.
        errors: Answers that are not 200, have too few tokens or lack their end, and connections that broke.
        per_second: Good answers a second.
        cpu_us: CPU time of the proxy's process tree for each good answer.
        first_p50: From the request to the first event, or to the whole answer where it is not streamed: the median.
        first_p99: The same for 99 of 100.
        rss_mb: Resident memory of the process tree at the end.
        error: The first one's beginning.
    """

    answers: int
    errors: int
    per_second: float
    cpu_us: float
    first_p50: float
    first_p99: float
    rss_mb: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class BurstSample:
    """Bursts of new connections on a busy proxy. Times in milliseconds, from connecting to the end of the first answer.

    Attributes:
        answers: Good ones, of the new connections.
        errors: Wrong ones and broken connections, those that keep the proxy busy included.
        p50, p99, most: Of the new connections' times.
        error: The first one's beginning.
    """

    answers: int
    errors: int
    p50: float
    p99: float
    most: float
    error: str = ""


@dataclass(slots=True)
class Tally:
    """What has been seen so far."""

    stop: float
    first_s: list[float] = field(default_factory=list)
    errors: int = 0
    error: str = ""
    open: int = 0

    def failed(self, why: bytes) -> None:
        """Count an error."""
        self.errors += 1
        self.error = self.error or why[:300].decode("utf-8", "replace")


class Client(asyncio.Protocol):
    """One connection: the next request goes out when an answer has ended."""

    def __init__(
        self, question: Question, tally: Tally, began: float | None = None
    ) -> None:
        """Ask a question again and again; the first answer's time counts from ``began``, by default from connecting."""
        self._question, self._raw, self._tally, self._began = (
            question,
            question.raw,
            tally,
            began,
        )
        self._parts: list[bytes] = []
        # bytes of an answer whose length is known; None: its head is not complete
        self._left: int | None = None
        self._tail = b""
        self._busy = False
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for the first time, however late it is."""
        self._transport = cast("asyncio.Transport", transport)
        self._ask(time.perf_counter() if self._began is None else self._began)

    def _ask(self, now: float) -> None:
        self._parts, self._left, self._tail, self._first_s, self._asked = (
            [],
            None,
            b"",
            0.0,
            now,
        )
        self._busy = True
        self._transport.write(self._raw)

    def data_received(self, data: bytes) -> None:
        """Take a part of the answer, and ask anew when that was the last one."""
        self._parts.append(data)
        self._tail = (self._tail + data[-len(LAST_CHUNK) :])[-len(LAST_CHUNK) :]
        if not self._first_s and b"data:" in data:
            self._first_s = time.perf_counter() - self._asked
        if self._left is None:
            self._begin(b"".join(self._parts))
        else:
            self._left -= len(data)
        if self._left == 0 or (
            self._left is not None and self._left < 0 and self._tail == LAST_CHUNK
        ):
            self._end()

    def _begin(self, answer: bytes) -> None:
        """Read an answer's length; it is below zero where the answer comes in chunks."""
        head = answer.find(b"\r\n\r\n")
        if head >= 0:
            found = _LENGTH.search(answer[: head + 2])
            self._left = head + 4 + int(found[1]) - len(answer) if found else -1

    def _end(self) -> None:
        answer, self._busy = b"".join(self._parts), False
        if self._question.is_answered(answer):
            self._tally.first_s.append(
                self._first_s or time.perf_counter() - self._asked
            )
        else:
            self._tally.failed(answer)
        now = time.perf_counter()
        if now >= self._tally.stop:
            self._transport.close()
        else:
            self._ask(now)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count an answer that is not complete."""
        if self._busy:
            self._tally.failed(
                b"the connection closed: "
                + repr(exc).encode()
                + b" after "
                + b"".join(self._parts)
            )
        if not self.ended.done():  # nobody waits for an answer that took too long
            self.ended.set_result(None)


async def _connection(port: int, question: Question, tally: Tally) -> None:
    """Ask over one connection after the other until the time is over; over the first one at least once."""
    connected = False
    while not connected or time.perf_counter() < tally.stop:
        connected = True
        try:
            _, client = await asyncio.get_running_loop().create_connection(
                lambda: Client(question, tally), "127.0.0.1", port
            )
        except OSError as error:
            tally.failed(str(error).encode())
            await asyncio.sleep(0.05)
        else:
            await client.ended


async def load(
    port: int,
    question: Question,
    watched: psutil.Process,
    *,
    connections: int,
    seconds: float,
    stagger_ms: float = 0,
) -> Sample:
    """Ask over so many connections for so long.

    Args:
        port: Of the proxy.
        question: What is asked.
        watched: The proxy's first process.
        connections: Each has one request open.
        seconds: Until no request is sent any more; those that are open are waited for.
        stagger_ms: Between the starts of two connections.
    """
    tally = Tally(time.perf_counter() + seconds)
    before, began = cpu_s(watched), time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        asking = []
        for _ in range(connections):
            asking.append(tasks.create_task(_connection(port, question, tally)))
            await asyncio.sleep(stagger_ms / 1000)
        _, late = await asyncio.wait(
            asking, timeout=max(tally.stop - time.perf_counter(), 0) + GRACE_S
        )
        for task in late:
            task.cancel()
            tally.failed(b"no end of an answer")
    took, cpu = time.perf_counter() - began, cpu_s(watched) - before
    ordered = sorted(tally.first_s) or [float("nan")]
    return Sample(
        answers=len(tally.first_s),
        errors=tally.errors,
        per_second=len(tally.first_s) / took,
        cpu_us=cpu / max(len(tally.first_s), 1) * 1e6,
        first_p50=ordered[len(ordered) // 2] * 1000,
        first_p99=ordered[int(len(ordered) * 0.99)] * 1000,
        rss_mb=sum(process.memory_info().rss for process in tree(watched)) / 2**20,
        error=tally.error,
    )


async def burst(
    port: int, question: Question, *, connections: int, busy: int, seconds: float
) -> BurstSample:
    """Open connections at once, each for one question, again and again while others keep the proxy busy.

    Args:
        port: Of the proxy.
        question: What is asked.
        connections: Of each burst.
        busy: Connections that have one request open all the time, one at least.
        seconds: After which no burst begins any more; there is at least one.
    """
    others, first = Tally(stop=math.inf), Tally(stop=0.0)
    async with asyncio.TaskGroup() as tasks:
        asking = [
            tasks.create_task(_connection(port, question, others)) for _ in range(busy)
        ]
        await asyncio.sleep(SETTLE_S)
        stop = time.perf_counter() + seconds
        while not first.first_s or time.perf_counter() < stop:
            new = [
                asyncio.create_task(_first_answer(port, question, first))
                for _ in range(connections)
            ]
            _, late = await asyncio.wait(new, timeout=GRACE_S)
            for task in late:
                task.cancel()
                first.failed(b"no end of an answer")
            if first.errors:
                break
            await asyncio.sleep(BETWEEN_BURSTS_S)
        others.stop = 0.0
        _, late = await asyncio.wait(asking, timeout=GRACE_S)
        for task in late:
            task.cancel()
            others.failed(b"no end of an answer")
    ordered = sorted(first.first_s) or [float("nan")]
    return BurstSample(
        answers=len(first.first_s),
        errors=first.errors + others.errors,
        p50=ordered[len(ordered) // 2] * 1000,
        p99=ordered[int(len(ordered) * 0.99)] * 1000,
        most=ordered[-1] * 1000,
        error=first.error or others.error,
    )


async def _first_answer(port: int, question: Question, tally: Tally) -> None:
    """Ask once over a new connection; the time counts from connecting."""
    began = time.perf_counter()
    try:
        _, client = await asyncio.get_running_loop().create_connection(
            lambda: Client(question, tally, began), "127.0.0.1", port
        )
    except OSError as error:
        tally.failed(str(error).encode())
    else:
        await client.ended
