"""Reads the settings again while the router runs, and has every part take them: all of it, or nothing.

First everything is read and checked, and each part prepares what it needs of the new settings, in every process. Only when
all of them can, they take it; that step cannot fail. A setting that needs a restart refuses the whole.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from router.settings import Change, Settings, changes

Commit = Callable[[], Awaitable[None]]
Prepare = Callable[[Settings], Awaitable[Commit]]

log = logging.getLogger(f"qarr.{__name__}")


class ReloadError(Exception):
    """The settings cannot be taken over; those before stay in force. The text names the setting and what is wrong."""


class Reloads:
    """Takes over changed settings, which ``read`` reads and checks, in a thread."""

    def __init__(self, settings: Settings, read: Callable[[], Settings]) -> None:
        self.settings = settings
        self._read = read
        self._parts: list[Prepare] = []
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, prepare: Prepare) -> None:
        """Add a part: a function that prepares it for new settings, and returns what makes it take them.

        Preparing changes nothing, and raises ``ReloadError`` if the settings cannot be taken; taking them never fails.
        """
        self._parts.append(prepare)

    async def reload(self) -> tuple[Change, ...]:
        """Read the settings, have all parts take them, and return what has changed.

        ``ReloadError``: they are not valid, need a restart, or a part cannot take them: nothing has changed.
        """
        async with self._lock:
            try:
                return await self._reload()
            except ReloadError as error:
                log.error(  # noqa: TRY400
                    "settings not reloaded, those before stay in force: %s", error
                )
                raise

    def request(self) -> None:
        """Reload in the background; the log tells how it went."""
        task = asyncio.create_task(self._requested(), name="reloading settings")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _requested(self) -> None:
        try:
            await self.reload()
        except ReloadError:
            return  # the log has it

    async def _reload(self) -> tuple[Change, ...]:
        new_settings = await asyncio.to_thread(self._read)
        changed_settings = changes(self.settings, new_settings)
        check_reloads(changed_settings)
        # Parts are prepared even if no setting has changed: the files that settings name may have.
        commits = [await prepare(new_settings) for prepare in self._parts]
        for commit in commits:
            await commit()
        self.settings = new_settings
        for change in changed_settings:
            log.info("setting changed: %s", change)
        log.info("settings reloaded: %d changed", len(changed_settings))
        return changed_settings


def check_reloads(changed: tuple[Change, ...]) -> None:
    """Raise ``ReloadError`` if a change needs a restart."""
    fixed_settings = [str(change) for change in changed if not change.reloads]
    if not fixed_settings:
        return
    these = "this" if len(fixed_settings) == 1 else "these"
    raise ReloadError(
        f"{'; '.join(fixed_settings)}: a running router cannot change {these}. Restart it, or set the former value; "
        "docs/settings.md says which settings reload"
    )
