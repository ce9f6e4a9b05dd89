"""Streams that outlive their connection: which events are kept, who may resume a stream, and when it ends.

A task makes a stream's events; a connection reads them from a bounded buffer. When it is full, the oldest events that a
connection has read are dropped; if none is left, the task waits, and with it the engine's socket.
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
BATCH_EVENTS = 256  # the most events that are sent in one message
MAX_DIGITS = 9  # no stream has a number with more
# A key gets another stream while it has fewer than SHARE times the free ones. So it always leaves some to others, and a
# single key gets four in five (dynamic thresholds: Choudhury and Hahne, 1998, doi 10.1109/90.664262).
SHARE = 4


class UnknownStreamError(Exception):
    """An event id names no event of the caller's streams."""


class StreamGoneError(Exception):
    """A stream, or the part of it that the caller needs, is no longer kept."""


class ResumedElsewhereError(Exception):
    """Another connection now reads the stream."""


class ResumableStream:
    """One stream and its kept events. Events are numbered from 1."""

    __slots__ = (
        "_expiry",
        "_fault",
        "_has_room",
        "_is_ending",
        "_kept_bytes",
        "_kept_events",
        "_last_read",
        "_max_bytes",
        "_waiting_events",
        "headers",
        "id",
        "news",
        "oldest",
        "over",
        "owner",
        "reader",
        "task",
    )

    def __init__(self, owner: str, max_bytes: int) -> None:
        self.id = secrets.token_urlsafe(12)  # secret: only the caller knows it
        self.owner = owner  # id of the caller's key
        # the answer's, or None until it begins
        self.headers: Mapping[str, str] | None = None
        self.over = False  # whether the last event is kept
        self.task: asyncio.Task[None] | None = None
        self.reader: object | None = None  # stands for the connection that reads it
        self.oldest = 1  # number of the oldest kept event
        self._max_bytes = max_bytes
        self._kept_events: list[bytes] = []  # an empty deque takes 760 bytes
        self._kept_bytes = 0
        self._waiting_events: list[bytes] = []  # not kept yet, for want of room
        self._last_read = 0  # number of the last event that a connection has read
        self._is_ending = False  # whether the last event is among those that wait
        self._expiry: asyncio.TimerHandle | None = None
        self._fault: Exception | None = None
        # for the reader: the stream has begun, has another event, or has failed
        self.news = asyncio.Event()
        self._has_room = asyncio.Event()

    @property
    def newest(self) -> int:
        return self.oldest + len(self._kept_events) - 1

    def begin(self, headers: Mapping[str, str]) -> None:
        self.headers = headers
        self.news.set()

    def write(self, events: Sequence[bytes]) -> bool:
        """Add events to the stream; tell whether it takes more now."""
        self._waiting_events += events
        return self._keep()

    async def drain(self) -> None:
        """Wait while keeping the events that wait would drop one that no connection has read."""
        while not self._keep():
            self._has_room.clear()
            await self._has_room.wait()

    async def end(self, events: Sequence[bytes]) -> None:
        """Add the stream's last events, and wait until they are kept."""
        self._is_ending = True
        self._waiting_events += events
        await self.drain()

    def _keep(self) -> bool:
        """Keep the events that wait, in the place of the oldest that were read; tell whether there was room for all."""
        while self._waiting_events:
            event = (
                f"id: {self.id}.{self.newest + 1}\n".encode() + self._waiting_events[0]
            )
            while self._kept_events and self._kept_bytes + len(event) > self._max_bytes:
                if self.oldest > self._last_read:
                    return False
                self._kept_bytes -= len(self._kept_events.pop(0))
                self.oldest += 1
            del self._waiting_events[0]
            self._kept_events.append(event)
            self._kept_bytes += len(event)
            self.over = self._is_ending and not self._waiting_events
            self.news.set()
        return True

    def failed(self, error: Exception) -> None:
        """Let the reader know of an error, once it has read what is kept; the first error counts."""
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
        # events that an earlier connection took may be lost with it
        self._last_read = min(self._last_read, after)
        while True:
            if self.reader is not reader:
                raise ResumedElsewhereError(
                    "the stream was resumed on another connection, which has the rest"
                )
            start = after + 1 - self.oldest
            if start < 0:
                raise StreamGoneError(
                    f"events before {self.oldest} are no longer kept: ask again"
                )
            events = self._kept_events[start : start + BATCH_EVENTS]
            if not events:
                if self._fault is not None:
                    raise self._fault
                self.news.clear()
                await self.news.wait()
                continue
            after += len(events)
            is_last = self.over and after == self.newest
            await send(body_message(b"".join(events), more=not is_last))
            if self.reader is reader:
                self._last_read = max(self._last_read, after)
            self._has_room.set()
            if is_last:
                return


Work = Callable[[ResumableStream], Coroutine[Any, Any, None]]  # makes a stream's events


class ResumableStreams:
    """Every resumable stream: being read, waiting for a reader, or over."""

    def __init__(self, bounds: ServerSettings) -> None:
        self.bounds = bounds
        self._streams: dict[str, ResumableStream] = {}
        self._owners_of_ended: dict[str, str] = {}  # keyed by the stream's id
        # tasks of dropped streams that have not ended yet
        self._cancelled_tasks: set[asyncio.Task[None]] = set()

    def open(self, owner: str, work: Work, request_id: str) -> ResumableStream | None:
        """Start a stream that only its owner's key may resume; None if the key, or nobody, may have another."""
        if not self._has_place(owner):
            return None
        stream = ResumableStream(owner, self.bounds.resume_bytes)
        self._streams[stream.id] = stream
        stream.task = asyncio.create_task(_run(stream, work, request_id))
        # The request that opened the stream may end before it reads any of it, so the timer that drops unread streams
        # starts now.
        self._wait_for_reader(stream)
        return stream

    def _has_place(self, owner: str) -> bool:
        """Tell whether a key may have another stream, if need be in the place of one that is over and not being read."""
        own_streams = [
            stream for stream in self._streams.values() if stream.owner == owner
        ]
        free = self.bounds.resume_streams - len(self._streams)
        if owner and len(own_streams) >= SHARE * max(free, 1):
            return self._drop_unread(own_streams)
        if free <= 0:
            return self._drop_unread(self._streams.values())
        return True

    def find(self, event_id: str, owner: str) -> tuple[ResumableStream, int]:
        """Return the stream and the number of an event.

        Raises:
            UnknownStreamError: The id is not of the caller's streams.
            StreamGoneError: The stream, or what came after the event, is no longer kept.
        """
        stream_id, _, digits = event_id.rpartition(".")
        number = None
        if digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS:
            number = int(digits)
        if number is not None and self._owners_of_ended.get(stream_id) == owner:
            raise StreamGoneError(
                f"the stream ended, or was not resumed within {self.bounds.resume_s:g} s: ask again"
            )
        stream = self._streams.get(stream_id)
        if (
            number is None
            or stream is None
            or stream.owner != owner
            or number > stream.newest
        ):
            raise UnknownStreamError(
                "Last-Event-ID names no event of a stream that this key may resume here: only streams asked for with "
                '"resumable": true are kept; ask again without the header'
            )
        if number < stream.oldest - 1:
            raise StreamGoneError(
                f"events before {stream.oldest} are no longer kept: ask again"
            )
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
        reader = object()
        stream.reader = reader
        stream.news.set()  # an earlier reader stops
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
        """Drop a stream after a while, unless a connection reads it by then."""
        stream.wait_for_reader(
            asyncio.get_running_loop().call_later(
                self.bounds.resume_s, self.drop, stream
            )
        )

    def drop(self, stream: ResumableStream) -> None:
        """Forget a stream, but for its id if its caller knows that, and stop what makes it."""
        if self._streams.pop(stream.id, None) is None:
            return
        stream.wait_for_reader(None)
        stream.failed(
            StreamGoneError(
                f"the stream was not resumed within {self.bounds.resume_s:g} s: ask again"
            )
        )
        if stream.task is not None and not stream.task.done():
            self._cancelled_tasks.add(stream.task)
            stream.task.add_done_callback(self._cancelled_tasks.discard)
            stream.task.cancel()
        if stream.headers is not None:
            self._owners_of_ended[stream.id] = stream.owner
        while len(self._owners_of_ended) > REMEMBERED:
            longest_ended = next(iter(self._owners_of_ended))
            del self._owners_of_ended[longest_ended]

    async def aclose(self) -> None:
        for stream in list(self._streams.values()):
            self.drop(stream)
        await asyncio.gather(*self._cancelled_tasks, return_exceptions=True)

    def _drop_unread(self, streams: Iterable[ResumableStream]) -> bool:
        """Drop the first of some streams that is over and read by no connection; tell whether there was one."""
        for stream in streams:
            if stream.over and stream.reader is None:
                self.drop(stream)
                return True
        return False


async def _run(stream: ResumableStream, work: Work, request_id: str) -> None:
    """Make a stream's events. An error is its reader's to tell, or is logged if there is none."""
    try:
        await work(stream)
    except Exception as error:
        if stream.reader is None:
            log.error("request %s: its stream failed", request_id, exc_info=error)  # noqa: TRY400  otherwise nobody is told
        stream.failed(error)
