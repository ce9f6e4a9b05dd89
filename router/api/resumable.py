"""Streams that outlive their connection: which events are kept, who may resume a stream, and when it ends.

A task makes a stream's events; a connection reads them from a bounded buffer. When it is full, the oldest events that a
connection has taken are dropped; if none is left, the task waits, and with it the engine's socket.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from starlette.types import Send

from router.api.asgi import body_message
from router.server.settings import ServerSettings

log = logging.getLogger(f"qarr.{__name__}")
REMEMBERED = 1000  # ids of ended streams, to tell them from unknown ids
BATCH_EVENTS = 256  # replayed in one message
# A key gets another stream while it has fewer than SHARE times the free ones. So it always leaves some to others, and a
# single key gets four in five (dynamic thresholds: Choudhury and Hahne, 1998, doi 10.1109/90.664262).
SHARE = 4


class UnknownStreamError(Exception):
    """An event id that is none of the caller's."""


class StreamGoneError(Exception):
    """A stream, or the part of it that the caller needs, that is no longer kept."""


class ResumedElsewhereError(Exception):
    """A stream that another connection now reads."""


class ResumableStream:
    """One stream and its kept events. Events are numbered from 1."""

    __slots__ = (
        "_ending", "_events", "_expiry", "_fault", "_max_bytes", "_room", "_size", "_taken",
        "_waiting", "headers", "id", "news", "oldest", "over", "owner", "reader", "task",
    )  # fmt: skip

    def __init__(self, owner: str, max_bytes: int) -> None:
        self.id = secrets.token_urlsafe(12)  # secret: only the caller knows it
        self.owner = owner  # id of the caller's key
        self.headers: Mapping[str, str] | None = None  # of the answer; None until it begins
        self.over = False  # whether the last event has been made
        self.task: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._max_bytes = max_bytes
        self._events: list[bytes] = []  # an empty deque takes 760 bytes
        self._waiting: list[bytes] = []  # for room
        self._ending = False
        self._size = self._taken = 0
        self.oldest = 1  # number of the oldest kept event
        self.reader: object | None = None
        self._fault: Exception | None = None
        self.news, self._room = asyncio.Event(), asyncio.Event()

    @property
    def newest(self) -> int:
        return self.oldest + len(self._events) - 1

    def begin(self, headers: Mapping[str, str]) -> None:
        self.headers = headers
        self.news.set()

    def feed(self, events: Sequence[bytes]) -> bool:
        self._waiting += events
        return self._keep()

    async def drain(self) -> None:
        """Wait while keeping what is here would drop an event that no connection has taken."""
        while not self._keep():
            self._room.clear()
            await self._room.wait()

    async def end(self, events: Sequence[bytes]) -> None:
        self._ending = True
        self._waiting += events
        await self.drain()

    def _keep(self) -> bool:
        while self._waiting:
            event = f"id: {self.id}.{self.newest + 1}\n".encode() + self._waiting[0]
            while self._events and self._size + len(event) > self._max_bytes:
                if self.oldest > self._taken:
                    return False
                self._size -= len(self._events.pop(0))
                self.oldest += 1
            del self._waiting[0]
            self._events.append(event)
            self._size += len(event)
            self.over = self._ending and not self._waiting
            self.news.set()
        return True

    def failed(self, error: Exception) -> None:
        self._fault = self._fault or error
        self.news.set()

    def wait_for_reader(self, expiry: asyncio.TimerHandle | None) -> None:
        """Replace the timer that drops the stream unless a connection reads it; None: stop the timer."""
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = expiry

    async def begun(self) -> Mapping[str, str]:
        """Wait for the answer to begin, and return its headers; raise the error that kept it from beginning."""
        while self.headers is None:
            if self._fault is not None:
                raise self._fault
            self.news.clear()
            await self.news.wait()
        return self.headers

    async def relay(self, reader: object, after: int, send: Send) -> None:
        """Send the events after number ``after``, and further ones as they come, up to the last.

        Raises:
            ResumedElsewhereError: Another connection has taken over.
            StreamGoneError: Events after ``after`` are no longer kept.
            Exception: The error that ended the stream.
        """
        self._taken = min(self._taken, after)  # events that an earlier connection took may be lost with it
        while True:
            if self.reader is not reader:
                raise ResumedElsewhereError("the stream was resumed on another connection, which has the rest")
            start = after + 1 - self.oldest
            if start < 0:
                raise StreamGoneError(f"events before {self.oldest} are no longer kept: ask again")
            batch = self._events[start : start + BATCH_EVENTS]
            if batch:
                after += len(batch)
                last = self.over and after == self.newest
                await send(body_message(b"".join(batch), more=not last))
                if self.reader is reader:
                    self._taken = max(self._taken, after)
                self._room.set()
                if last:
                    return
            elif self._fault is not None:
                raise self._fault
            else:
                self.news.clear()
                await self.news.wait()


class ResumableStreams:
    """Every resumable stream: being read, waiting for a reader, or over."""

    def __init__(self, bounds: ServerSettings) -> None:
        self.bounds = bounds
        self._streams: dict[str, ResumableStream] = {}
        self._ended: dict[str, str] = {}  # owners by id
        self._ending: set[asyncio.Task[None]] = set()

    def open(
        self, owner: str, work: Callable[[ResumableStream], Coroutine[Any, Any, None]], request_id: str
    ) -> ResumableStream | None:
        """Start a stream that only its owner's key may resume; None if the key, or nobody, may have another."""
        own = [stream for stream in self._streams.values() if stream.owner == owner]
        free = self.bounds.resume_streams - len(self._streams)
        full = owner and len(own) >= SHARE * max(free, 1)
        if (full or free <= 0) and not self._drop_unread(own if full else self._streams.values()):
            return None
        stream = ResumableStream(owner, self.bounds.resume_bytes)
        self._streams[stream.id] = stream
        stream.task = asyncio.create_task(_made(stream, work, request_id))
        self._wait_for_reader(stream)  # its request may end before it reads
        return stream

    def find(self, event_id: str, owner: str) -> tuple[ResumableStream, int]:
        """Return the stream and the number of an event.

        Raises:
            UnknownStreamError: The id is not of the caller's streams.
            StreamGoneError: The stream, or what came after the event, is no longer kept.
        """
        name, _, digits = event_id.rpartition(".")
        number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None  # noqa: PLR2004
        stream = self._streams.get(name)
        if number is not None and self._ended.get(name) == owner:
            raise StreamGoneError(f"the stream ended, or was not resumed within {self.bounds.resume_s:g} s: ask again")
        if number is None or stream is None or stream.owner != owner or number > stream.newest:
            raise UnknownStreamError(
                "Last-Event-ID names no event of a stream that this key may resume here: only streams asked for with "
                '"resumable": true are kept; ask again without the header'
            )
        if number < stream.oldest - 1:
            raise StreamGoneError(f"events before {stream.oldest} are no longer kept: ask again")
        return stream, number

    async def read(
        self,
        stream: ResumableStream,
        after: int,
        start: Callable[[Mapping[str, str]], Coroutine[Any, Any, None]],
        send: Send,
    ) -> None:
        """Send a stream's events after number ``after``; if this ends before the last one, the stream waits to be resumed.

        Raises:
            ResumedElsewhereError: Another connection has taken over.
            Exception: The error that ended the stream, or kept it from beginning.
        """
        stream.reader = reader = object()  # the previous one stops
        stream.news.set()
        stream.wait_for_reader(None)
        try:
            await start(await stream.begun())
            await stream.relay(reader, after, send)
        finally:
            if stream.reader is reader:
                stream.reader = None
            if stream.reader is None:
                if stream.headers is None:
                    self.drop(stream)  # its caller does not know its id
                else:
                    self._wait_for_reader(stream)

    def _wait_for_reader(self, stream: ResumableStream) -> None:
        stream.wait_for_reader(asyncio.get_running_loop().call_later(self.bounds.resume_s, self.drop, stream))

    def drop(self, stream: ResumableStream) -> None:
        if self._streams.pop(stream.id, None) is None:
            return
        stream.wait_for_reader(None)
        stream.failed(StreamGoneError(f"the stream was not resumed within {self.bounds.resume_s:g} s: ask again"))
        if stream.task is not None and not stream.task.done():
            self._ending.add(stream.task)
            stream.task.add_done_callback(self._ending.discard)
            stream.task.cancel()
        if stream.headers is not None:
            self._ended[stream.id] = stream.owner
        while len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]

    async def aclose(self) -> None:
        for stream in list(self._streams.values()):
            self.drop(stream)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _drop_unread(self, streams: Iterable[ResumableStream]) -> bool:
        unread = next((stream for stream in streams if stream.over and stream.reader is None), None)
        if unread is not None:
            self.drop(unread)
        return unread is not None


async def _made(
    stream: ResumableStream, work: Callable[[ResumableStream], Coroutine[Any, Any, None]], request_id: str
) -> None:
    try:
        await work(stream)
    except Exception as error:
        if stream.reader is None:
            log.error("request %s: its stream failed", request_id, exc_info=error)  # noqa: TRY400  otherwise nobody is told
        stream.failed(error)
