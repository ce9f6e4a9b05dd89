"""Background work that runs as long as the process does, whatever goes wrong in it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

log = logging.getLogger(f"qarr.{__name__}")
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0  # work that ran for this long starts at the first pause again


async def lasting(work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
    """Run work until it returns or is cancelled. After an exception: log it, pause, start the work again.

    The pause doubles up to a minute. A repeated exception is logged with its traceback only the first time.

    Args:
        work: Makes the coroutine to run.
        name: Of the work, for the log.
    """
    faults = Faults()
    pause_s = FIRST_PAUSE_S
    while True:
        began = time.monotonic()
        try:
            await work()
        except (Exception, asyncio.CancelledError) as error:
            if _is_cancelled():
                raise
            if time.monotonic() - began >= LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            faults.log(error, f"{name} failed and starts again in {pause_s:g} s")
        else:
            return
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _is_cancelled() -> bool:
    """Tell whether the running task itself was cancelled, and not something that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class Faults:
    """Logs unexpected exceptions: a new one with its traceback, a repeated one without it, or not at all."""

    def __init__(self, *, repeats: bool = True) -> None:
        self._logs_repeats = repeats
        self._last_text = ""

    def log(self, error: BaseException, what: str) -> None:
        """Log an exception."""
        text = f"{type(error).__name__}: {error}"
        is_new = text != self._last_text
        self._last_text = text
        if is_new:
            log.error("%s: %s", what, text, exc_info=error)
        elif self._logs_repeats:
            log.error("%s: %s", what, text)
