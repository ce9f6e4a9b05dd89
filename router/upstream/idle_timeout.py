"""A bound on each of many waits, such as those for a stream's next token."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType


class IdleTimeout:
    """Bounds waits that follow one another, each by the same time, as ``asyncio.timeout`` bounds one.

    One timer serves them all and is set anew only when it fires: one for each wait would cost more than the rest of what
    is done for a token. Use it as a context manager around each wait, and close it after the last.

    Attributes:
        limit_s: How long one wait may take.
    """

    __slots__ = ("_cancelling", "_late", "_since", "_task", "_timer", "limit_s")

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._since = 0.0
        self._cancelling = 0
        self._late = False

    def __enter__(self) -> None:
        """Begin a wait of the task that runs."""
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling, self._since = task, task.cancelling(), time.monotonic()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.limit_s, self._look)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End a wait.

        Raises:
            TimeoutError: It took too long.
        """
        task, self._task = self._task, None
        if self._late:
            self._late = False
            assert task is not None
            # A cancellation that others asked for in the meantime goes on, as in asyncio.timeout.
            if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
                raise TimeoutError from error

    def close(self) -> None:
        """Let the timer go."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Interrupt a wait that takes too long; otherwise look again when it would."""
        self._timer = None
        if self._task is None:
            return  # the next wait sets it
        left_s = self._since + self.limit_s - time.monotonic()
        if left_s > 0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._look)
        else:
            self._late = True
            self._task.cancel()
