"""``qarr top``: the running fleet and its requests, live."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import termios
import time
import tty
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import typer
from rich.console import Console, Group
from rich.live import Live

from router.aio import end_tasks
from router.cli.client import KEY_NEEDED, URL, KeyOption, UrlOption, authorization, no_answer, trusted
from router.cli.common import output
from router.cli.top.screen import screen, snapshot
from router.cli.top.state import Snapshot, ViewState
from tiers.errors import OperationError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

SILENT_S = 5.0  # the router sends its fleet every second
AGAIN_S = 1.0
PIPED_WIDTH = 160
KEYS = {"\r": "enter", "\n": "enter", "\x1b": "escape", "k": "up", "j": "down"}
SEQUENCES = {"\x1b[A": "up", "\x1b[B": "down", "\x1bOA": "up", "\x1bOB": "down"}
KEYS_AT_ONCE = 1024
QUIT = {"q", "Q", "\x03", "\x04"}


def top(
    url: UrlOption = URL,
    key: KeyOption = "",
    once: Annotated[bool, typer.Option("--once", help="Print how it is now, as text, and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=60, help="Seconds between two pictures.")] = 1.0,
) -> None:
    """Show live tiers and requests. q quits, p pauses, s sorts, arrows select, Enter shows a request's verdicts."""
    source = _Source(url, key)
    if once or not sys.stdout.isatty():
        asyncio.run(_once(source))
        return
    asyncio.run(_Top(source, interval).run())


class _Source:
    """The events of ``GET /live``."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        self._headers = authorization(key)

    async def events(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield the name and data of each event until the stream ends.

        Raises:
            OperationError: The router refuses the stream; trying again does not help.
            httpx.HTTPError: The router does not answer; trying again may help.
        """
        async with (
            httpx.AsyncClient(timeout=SILENT_S, trust_env=False, verify=trusted(self.url)) as client,
            client.stream("GET", f"{self.url}/live", headers=self._headers) as response,
        ):
            if response.status_code == httpx.codes.UNAUTHORIZED:
                raise OperationError(KEY_NEEDED)
            if response.status_code == httpx.codes.NOT_FOUND:
                raise OperationError(f"{self.url} has no /live: is this a router, and as new as this command?")
            response.raise_for_status()
            event = ""
            async for line in response.aiter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    event = value
                elif name == "data":
                    yield event, json.loads(value)


async def _once(source: _Source) -> None:
    """Print one picture.

    Raises:
        OperationError: The router sends none.
    """
    picture = Snapshot()
    try:
        async with asyncio.timeout(2 * SILENT_S):
            async for event, data in source.events():
                second = picture.fleet is not None and event == "fleet"
                picture = picture.apply(event, data)
                if second:  # the first one has no tokens per second yet
                    break
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        raise OperationError(no_answer(source.url, error)) from error
    if picture.fleet is None:
        raise OperationError(f"{source.url} is shutting down")
    console = output(PIPED_WIDTH)
    for line in snapshot(picture, console.width, unicode=_unicode(console)):
        line.rstrip()
        console.print(line, soft_wrap=True)


class _Top:
    """The full screen. Owns the terminal while it runs."""

    def __init__(self, source: _Source, interval_s: float) -> None:
        self._source, self._interval_s = source, interval_s
        self._console = Console(highlight=False, markup=False)
        self._picture, self._view = Snapshot(), ViewState(unicode=_unicode(self._console))
        self._news, self._ended = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Show the screen until the user quits or a signal comes; then restore the terminal, after errors too.

        Raises:
            OperationError: The router needs a key, or the URL is not a router's.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._ended.set)
        loop.add_signal_handler(signal.SIGWINCH, self._news.set)
        keyboard = _Keyboard(self._typed)
        with Live(console=self._console, screen=True, auto_refresh=False) as live:
            loop.add_signal_handler(signal.SIGTSTP, self._suspend, live, keyboard)
            keyboard.take()
            work: tuple[Coroutine[Any, Any, Any], ...] = (self._read(), self._draw(live), self._ended.wait())
            tasks = [asyncio.create_task(each) for each in work]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                keyboard.give_back()
                await end_tasks(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()

    async def _read(self) -> None:
        """Apply the router's events; while it does not answer, show that and try again."""
        while True:
            try:
                async for event, data in self._source.events():
                    self._picture = self._picture.apply(event, data)
                trouble = f"{self._source.url} ended the connection"
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                trouble = f"{self._source.url} ({type(error).__name__})"
            since = self._picture.silent_since if self._picture.trouble else time.monotonic()
            self._picture = replace(self._picture, trouble=trouble, silent_since=since)
            self._news.set()
            await asyncio.sleep(AGAIN_S)

    async def _draw(self, live: Live) -> None:
        while True:
            size = self._console.size
            live.update(Group(*screen(self._picture, self._view, size.width, size.height)), refresh=True)
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):  # not wait_for: it may swallow a cancellation
                    await self._news.wait()

    def _typed(self, text: str) -> None:
        """Act on typed keys; several may come at once."""
        while text:
            found = next((s for s in SEQUENCES if text.startswith(s)), None)
            key, text = (SEQUENCES[found], text[len(found) :]) if found else (KEYS.get(text[0], text[0]), text[1:])
            if key in QUIT:
                self._ended.set()
            self._view = self._view.key(key, self._picture)
        self._news.set()

    def _suspend(self, live: Live, keyboard: _Keyboard) -> None:
        """Restore the terminal while the process is stopped (Ctrl-Z), and take it again afterwards."""
        live.stop()
        keyboard.give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        keyboard.take()
        live.start()
        self._news.set()


class _Keyboard:
    """Keys as they are typed, from ``take`` to ``give_back``; none if standard input is not a terminal."""

    def __init__(self, typed: Callable[[str], None]) -> None:
        self._typed, self._loop = typed, asyncio.get_running_loop()
        self._number = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._before = termios.tcgetattr(self._number) if self._number is not None else None

    def take(self) -> None:
        """Read keys without echoing them."""
        if self._number is not None:
            tty.setcbreak(self._number, termios.TCSANOW)
            self._loop.add_reader(self._number, self._read)

    def give_back(self) -> None:
        """Restore the terminal's mode."""
        if self._number is not None and self._before is not None:
            self._loop.remove_reader(self._number)
            termios.tcsetattr(self._number, termios.TCSADRAIN, self._before)

    def _read(self) -> None:
        assert self._number is not None
        data = os.read(self._number, KEYS_AT_ONCE)
        if not data:
            self._loop.remove_reader(self._number)
        self._typed(data.decode("utf-8", "replace"))


def _unicode(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")
