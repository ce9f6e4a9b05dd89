"""Server-sent events of an engine, read as they come.

What reads them is asked for more rather than being an asynchronous generator: a generator for each of the layers between
the engine's socket and the client's would take most of a kilobyte for every open stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from router.upstream.errors import NO_ANSWER, EngineBroke, without_trace
from router.upstream.exchange import USAGE
from router.upstream.http import parts_of
from router.upstream.json_object import read_json

if TYPE_CHECKING:
    from collections.abc import Callable

    import httpx

SEPARATOR, DONE = b"\n\n", b"data: [DONE]"
MAX_EVENT_BYTES = 1 << 24  # of one event: enough for the ids of a prompt of two million tokens
# Members of a choice, or of its delta, that hold text.
_TEXTS = ("content", "text", "reasoning", "reasoning_content")
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
        self._buffer = bytearray()
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
        """Return the next whole events.

        Raises:
            EngineBroke: The stream ended, or an event has no end.
        """
        try:
            async for data in self._parts:
                whole = SEPARATOR in self._buffer[-1:] + data
                self._buffer += data
                if whole:
                    *events, rest = bytes(self._buffer).split(SEPARATOR)
                    self._buffer = bytearray(rest)
                    if DONE in events:
                        self._over = True
                        return events[: events.index(DONE) + 1]
                    return events
                if len(self._buffer) > MAX_EVENT_BYTES:
                    raise EngineBroke(f"the engine's stream holds an event of over {MAX_EVENT_BYTES} bytes")
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
    try:
        chunk = read_json(event.removeprefix(b"data:"))
    except ValueError as error:
        raise EngineBroke("the engine's stream holds something that is not a chunk") from error
    if isinstance(chunk, dict) and chunk.get("error") is not None:
        raise EngineBroke("the engine reported an error in its stream")
    if not isinstance(chunk, dict) or not _is_chunk(chunk):
        raise EngineBroke("the engine's stream holds something that is not a chunk")
    return chunk


def _is_chunk(chunk: dict[str, Any]) -> bool:
    """Tell whether every member of a chunk that the router reads has the type that it should have."""
    choices, usage = chunk.get("choices"), chunk.get("usage")
    return (
        isinstance(choices, list)
        and all(map(_is_choice, choices))
        and _is_ids(chunk.get("prompt_token_ids"))
        and (usage is None or is_usage(usage))
    )


def _is_choice(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return False
    said = choice.get("delta", choice)  # a completion has its text in the choice itself
    return (
        isinstance(said, dict)
        and all(isinstance(said.get(name), str | None) for name in _TEXTS)
        and isinstance(choice.get("finish_reason"), str | None)
        and _is_ids(choice.get("token_ids"))
        and _is_ids(choice.get("prompt_token_ids"))
    )


def _is_ids(ids: Any) -> bool:
    return ids is None or (isinstance(ids, list) and all(type(token) is int for token in ids))


def is_usage(usage: Any) -> bool:
    """Tell whether a value holds token counts."""
    return isinstance(usage, dict) and all(_is_count(usage.get(name)) for name in USAGE)


def _is_count(count: Any) -> bool:
    return count is None or (type(count) is int and count >= 0)
