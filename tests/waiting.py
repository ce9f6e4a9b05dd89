"""Bounded waits of tests: when the time is over, the error says what was waited for and what was seen last."""

from __future__ import annotations

import asyncio
import inspect
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")
# This is half of a test's timeout, after which no error could be reported; it is no expectation of speed.
WAIT_S = 60.0
POLL_S = 0.02
LONGEST_VALUE = 2_000  # So many characters of the value that was seen last are shown.


async def until(
    look: Callable[[], Any],
    what: str = "",
    *,
    within_s: float = WAIT_S,
    poll_s: float = POLL_S,
) -> Any:
    """Return the first true value that ``look`` returns, or that an awaitable from it returns.

    Args:
        look: The function that is called again and again.
        what: The event that is waited for, as in "the engine to answer"; by default the source of ``look``.
        within_s: After so many seconds ``AssertionError`` is raised.
        poll_s: The pause between two looks.
    """
    seen: Any = "nothing: the first look did not end"
    try:
        async with asyncio.timeout(within_s) as bound:
            while True:
                value = look()
                seen = await value if inspect.isawaitable(value) else value
                if seen:
                    return seen
                await asyncio.sleep(poll_s)
    except TimeoutError:
        if not bound.expired():
            raise
    raise AssertionError(_too_long(what or source_of(look), within_s, seen))


async def until_still(
    look: Callable[[], T], what: str, *, still_s: float, within_s: float = WAIT_S
) -> T:
    """Return what ``look`` returns once that has stayed the same for so many seconds."""
    last: list[T] = []

    async def is_still() -> bool:
        seen = look()
        is_same = last == [seen]
        last[:] = [seen]
        return is_same

    await until(is_still, what, within_s=within_s, poll_s=still_s)
    return last[0]


def wait_until(
    look: Callable[[], T],
    what: str = "",
    *,
    within_s: float = WAIT_S,
    poll_s: float = POLL_S,
) -> T:
    """Return the first true value that ``look`` returns, in a test without an event loop; see ``until``."""
    deadline = time.monotonic() + within_s
    while True:
        seen = look()
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise AssertionError(_too_long(what or source_of(look), within_s, seen))
        time.sleep(poll_s)


async def within(awaited: Awaitable[T], what: str, *, within_s: float = WAIT_S) -> T:
    """Return what ``awaited`` returns; after so many seconds ``AssertionError`` says what did not happen."""
    try:
        async with asyncio.timeout(within_s) as bound:
            return await awaited
    except TimeoutError:
        if not bound.expired():
            raise
    raise AssertionError(f"waited {within_s:g} s for {what}")


def call_within(call: Callable[[], T], what: str, *, within_s: float = WAIT_S) -> T:
    """Return what a call returns that may block, in a test without an event loop; see ``within``."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001  The caller gets it.
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    done, _ = wait([result], within_s)
    if not done:
        raise AssertionError(f"waited {within_s:g} s for {what}")
    return result.result()


def _too_long(what: str, within_s: float, seen: object) -> str:
    value = textwrap.shorten(repr(seen), LONGEST_VALUE)
    return f"waited {within_s:g} s for {what}; seen last: {value}"


def source_of(look: Callable[[], Any]) -> str:
    """Return the name of a function, or the statement that a lambda stands in."""
    name = getattr(look, "__name__", repr(look))
    if name != "<lambda>":
        return name
    try:
        return textwrap.shorten(inspect.getsource(look), LONGEST_VALUE)
    # A lambda of an interactive session has no source.
    except OSError:
        return name
