"""Server-sent events of an engine, read as they come.

What reads them is asked for more rather than being an asynchronous generator: a generator for each of the layers between
the engine's socket and the client's would take most of a kilobyte for every open stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from router.jsontext import read_json
from router.upstream import NO_ANSWER, EngineBroke, parts_of, without_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx

SEPARATOR, DONE = b"\n\n", b"data: [DONE]"
T = TypeVar("T")


class EventStream(Generic[T]):
    """An engine's stream, up to ``[DONE]`` and with it. Close it, unless it is read to its end.

    Args:
        response: Its body has not been read.
        parse: Makes of an event what is wanted, or None to leave it out; raises ``EngineBroke`` for one that must not be.
    """

    __slots__ = ("_buffer", "_fault", "_over", "_parse", "_parts")

    def __init__(self, response: httpx.Response, parse: Callable[[bytes], T | None]) -> None:
        self._parts = parts_of(response)
        self._parse = parse
        self._buffer = b""
        self._over = False
        self._fault: EngineBroke | None = None

    async def next(self) -> list[T] | None:
        """Return what came together, in order and at least one; None after the last.

        Raises:
            EngineBroke: The stream ended before its end, or an event was refused. What came before was returned.
        """
        found: list[T] = []
        while not found and not self._over:
            try:
                for event in await self._events():
                    if (item := self._parse(event)) is not None:
                        found.append(item)  # noqa: PERF401  what came before a fault stays
            except EngineBroke as error:
                self._over, self._fault = True, without_trace(error)
        if self._over:
            await self._parts.aclose()
        if not found:
            self.check()
        return found or None

    def check(self) -> None:
        """Look for a fault that follows what was returned, where it has come already.

        Raises:
            EngineBroke: There is one. It is raised once.
        """
        fault, self._fault = self._fault, None
        try:
            if fault is not None:
                raise fault
        finally:
            del fault  # its trace leads here

    async def aclose(self) -> None:
        """Read no more."""
        await self._parts.aclose()

    async def _events(self) -> list[bytes]:
        """Return the next whole events."""
        try:
            async for data in self._parts:
                *events, self._buffer = (self._buffer + data).split(SEPARATOR)
                if DONE in events:
                    self._over = True
                    return events[: events.index(DONE) + 1]
                if events:
                    return events
        except NO_ANSWER as error:
            raise EngineBroke(f"the engine's stream broke off ({type(error).__name__})") from error
        raise EngineBroke("the engine's stream ended early")


def chunk_in(event: bytes) -> dict[str, Any] | None:
    """Return the chunk of an answer that an event holds; None for comments and the end.

    Raises:
        EngineBroke: It holds something else, or an error that the engine reports.
    """
    return chunk_of(event) if event.startswith(b"data:") and event != DONE else None


def chunk_of(event: bytes) -> dict[str, Any]:
    """Return the chunk of an answer that an event holds.

    Raises:
        EngineBroke: It is none, or an error that the engine reports in its stream.
    """
    chunk = parse_event(event)
    if "error" in chunk:
        raise EngineBroke("the engine reported an error in its stream")
    return chunk


def parse_event(event: bytes) -> dict[str, Any]:
    """Return what an event holds.

    Raises:
        EngineBroke: It is no JSON object.
    """
    try:
        chunk = read_json(event.removeprefix(b"data:"))
    except ValueError as error:
        raise EngineBroke("the engine's stream holds something that is not a chunk") from error
    if not isinstance(chunk, dict):
        raise EngineBroke("the engine's stream holds something that is not a chunk")
    return chunk
