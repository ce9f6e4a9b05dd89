"""Streams that outlive their connection for a while: what is kept of them, who may read on, and when they end.

A task of its own makes the stream's events; a connection reads them from a bounded buffer. An event that was never passed to
a connection is not dropped: the task waits instead, and with it the engine's socket. Those that were are dropped oldest
first, when the buffer is full.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING

from router.aio import Signal
from router.api.asgi import body_message

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence
    from typing import Any

    from starlette.types import Send

    from router.settings import ServerSettings

log = logging.getLogger(f"qarr.{__name__}")
REMEMBERED = 1000  # ids of ended streams, to tell them from ids that never were
BATCH_EVENTS = 256  # replayed in one piece
# A key gets one more stream as long as it has fewer than so many times what is free. So it leaves others some, however
# many it asks for, and one alone gets four in five (dynamic thresholds: Choudhury and Hahne, 1998,
# doi 10.1109/90.664262).
SHARE = 4


class UnknownStream(Exception):
    """An event id that is none of the caller's."""


class StreamGone(Exception):
    """A stream that is no longer kept, or no longer from where the caller wants it."""


class ResumedElsewhere(Exception):
    """Another connection reads the stream now."""


class ResumableStream:
    """One stream: its events from the oldest that is kept, numbered from 1.

    Attributes:
        id: Known to nobody but the caller.
        owner: Id of the caller's key.
        headers: Of the answer; None until it has begun.
        over: Whether the last event is there.
    """

    __slots__ = (
        "_events", "_expiry", "_fault", "_max_bytes", "_news", "_oldest", "_reader", "_room", "_size", "_taken",
        "headers", "id", "over", "owner", "task",
    )  # fmt: skip

    def __init__(self, owner: str, max_bytes: int) -> None:
        self.id = secrets.token_urlsafe(12)
        self.owner = owner
        self.headers: Mapping[str, str] | None = None
        self.over = False
        self.task: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._max_bytes = max_bytes
        self._events: list[bytes] = []  # an empty deque takes 760 bytes
        self._size = self._taken = 0
        self._oldest = 1
        self._reader: object | None = None
        self._fault: Exception | None = None
        self._news, self._room = Signal(), Signal()

    @property
    def newest(self) -> int:
        """Return the number of the newest event; 0 before the first."""
        return self._oldest + len(self._events) - 1

    @property
    def oldest(self) -> int:
        """Return the number of the oldest event that is kept."""
        return self._oldest

    @property
    def read(self) -> bool:
        """Tell whether a connection reads the stream."""
        return self._reader is not None

    def begin(self, headers: Mapping[str, str]) -> None:
        """Note that the answer has begun."""
        self.headers = headers
        self._news.set()

    async def put(self, events: Sequence[bytes], *, last: bool) -> None:
        """Keep some events; wait where that would drop one that no connection has taken.

        Args:
            events: Without their ids.
            last: Whether no more come.
        """
        for number, event in enumerate(events, 1):
            await self._keep(event, last=last and number == len(events))

    async def _keep(self, event: bytes, *, last: bool) -> None:
        event = f"id: {self.id}.{self.newest + 1}\n".encode() + event
        while self._events and self._size + len(event) > self._max_bytes:
            if self._oldest > self._taken:
                self._room.clear()
                await self._room.wait()
            else:
                self._size -= len(self._events.pop(0))
                self._oldest += 1
        self._events.append(event)
        self._size += len(event)
        self.over = last
        self._news.set()

    def failed(self, error: Exception) -> None:
        """Note that no more events come, and why; what was said first holds."""
        self._fault = self._fault or error
        self._news.set()

    def wait_for_reader(self, expiry: asyncio.TimerHandle | None) -> None:
        """Set the timer that ends the stream if nobody comes to read it; None: somebody does, or it is over."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = expiry

    def attach(self) -> object:
        """Become the one that reads; who did before stops."""
        self._reader = object()
        self._news.set()
        return self._reader

    def detach(self, reader: object) -> bool:
        """Stop reading; return whether nobody reads now."""
        if self._reader is reader:
            self._reader = None
        return self._reader is None

    async def begun(self) -> Mapping[str, str]:
        """Wait for the answer to begin, and return its headers.

        Raises:
            Exception: Whatever kept it from beginning.
        """
        while self.headers is None:
            if self._fault is not None:
                raise self._fault
            self._news.clear()
            await self._news.wait()
        return self.headers

    async def relay(self, reader: object, after: int, send: Send) -> None:
        """Send every event after one, and go on as they come, to the last.

        Raises:
            ResumedElsewhere: Another connection reads on.
            Exception: Whatever kept the stream from ending as it should.
        """
        self._taken = min(self._taken, after)  # what an earlier connection had taken may have been lost with it
        while True:
            if self._reader is not reader:
                raise ResumedElsewhere("the stream was resumed on another connection, which has the rest")
            start = after + 1 - self._oldest
            if start < 0:
                raise StreamGone(f"events before {self._oldest} are no longer kept (server.resume_bytes): ask again")
            batch = self._events[start : start + BATCH_EVENTS]
            if batch:
                after += len(batch)
                last = self.over and after == self.newest
                await send(body_message(b"".join(batch), more=not last))
                if self._reader is reader:
                    self._taken = max(self._taken, after)
                self._room.set()
                if last:
                    return
            elif self._fault is not None:
                raise self._fault
            else:
                self._news.clear()
                await self._news.wait()


class ResumableStreams:
    """Every resumable stream: those that are read, those that wait for their reader, those that are over."""

    def __init__(self, bounds: ServerSettings) -> None:
        self._bounds = bounds
        self._streams: dict[str, ResumableStream] = {}
        self._ended: dict[str, str] = {}  # owners by id
        self._ending: set[asyncio.Task[None]] = set()

    def open(
        self, owner: str, work: Callable[[ResumableStream], Coroutine[Any, Any, None]], request_id: str
    ) -> ResumableStream | None:
        """Start a stream, or return None where as many are kept as may be, or as the key may have.

        Args:
            owner: Id of the caller's key; who resumes it must show the same.
            work: Makes the stream.
            request_id: For the log.
        """
        if not self._has_room(owner):
            return None
        stream = ResumableStream(owner, self._bounds.resume_bytes)
        self._streams[stream.id] = stream
        stream.task = asyncio.create_task(_made(stream, work, request_id))
        self._wait_for_reader(stream)  # its request may end before it reads
        return stream

    def find(self, event_id: str, owner: str) -> tuple[ResumableStream, int]:
        """Return the stream of an event, and the event's number.

        Raises:
            UnknownStream: It is none of the caller's.
            StreamGone: It, or what came after the event, is no longer kept.
        """
        name, _, digits = event_id.rpartition(".")
        number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None  # noqa: PLR2004
        stream = self._streams.get(name)
        if number is not None and self._ended.get(name) == owner:
            raise StreamGone(f"the stream ended, or was not resumed within {self._bounds.resume_s:g} s: ask again")
        if number is None or stream is None or stream.owner != owner or number > stream.newest:
            raise UnknownStream(
                "Last-Event-ID names no event of a stream that this key may resume here: only streams asked for with "
                '"resumable": true are kept; ask again without the header'
            )
        if number < stream.oldest - 1:
            raise StreamGone(f"events before {stream.oldest} are no longer kept (server.resume_bytes): ask again")
        return stream, number

    async def read(
        self,
        stream: ResumableStream,
        after: int,
        start: Callable[[Mapping[str, str]], Coroutine[Any, Any, None]],
        send: Send,
    ) -> None:
        """Send a stream's events after one. When this ends before the stream's last event, the stream waits to be resumed.

        Args:
            stream: Which.
            after: Number of the last event that the caller has.
            start: Sends the answer's head, given its headers.
            send: To the client.

        Raises:
            ResumedElsewhere: Another connection reads on.
            Exception: Whatever kept the stream from beginning, or from ending as it should.
        """
        reader = stream.attach()
        stream.wait_for_reader(None)
        try:
            await start(await stream.begun())
            await stream.relay(reader, after, send)
        finally:
            if stream.detach(reader):
                if stream.headers is None:
                    self.drop(stream)  # its caller does not know its id
                else:
                    self._wait_for_reader(stream)

    def _wait_for_reader(self, stream: ResumableStream) -> None:
        """Drop a stream unless somebody comes to read it in time."""
        stream.wait_for_reader(asyncio.get_running_loop().call_later(self._bounds.resume_s, self.drop, stream))

    def drop(self, stream: ResumableStream) -> None:
        """Forget a stream, and abort what is still to be made of it."""
        if self._streams.pop(stream.id, None) is None:
            return
        stream.wait_for_reader(None)
        stream.failed(StreamGone(f"the stream was not resumed within {self._bounds.resume_s:g} s: ask again"))
        if stream.task is not None and not stream.task.done():
            self._ending.add(stream.task)
            stream.task.add_done_callback(self._ending.discard)
            stream.task.cancel()
        if stream.headers is not None:
            self._ended[stream.id] = stream.owner
        while len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]

    async def aclose(self) -> None:
        """End every stream."""
        for stream in list(self._streams.values()):
            self.drop(stream)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _has_room(self, owner: str) -> bool:
        """Tell whether a key gets one more stream; where it needs another one's place, that one is dropped."""
        own = [stream for stream in self._streams.values() if stream.owner == owner]
        free = self._bounds.resume_streams - len(self._streams)
        if owner and len(own) >= SHARE * max(free, 1):
            return self._make_room(own)
        return free > 0 or self._make_room(list(self._streams.values()))

    def _make_room(self, streams: Sequence[ResumableStream]) -> bool:
        """Drop the oldest of some streams that is over and that nobody reads."""
        for stream in streams:
            if stream.over and not stream.read:
                self.drop(stream)
                return True
        return False


async def _made(
    stream: ResumableStream, work: Callable[[ResumableStream], Coroutine[Any, Any, None]], request_id: str
) -> None:
    """Make a stream; its fault is told to who reads it."""
    try:
        await work(stream)
    except Exception as error:
        if not stream.read:
            log.error("request %s: its stream failed", request_id, exc_info=error)  # noqa: TRY400  nobody is told else
        stream.failed(error)
