"""What the supervisor knows of one replica's engine, beside what the fleet shows of the replica."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiers.lifecycle.watchdog import Restarts, Wear

if TYPE_CHECKING:
    from tiers.fleet import Replica
    from tiers.lifecycle.process import EngineProcess
    from tiers.lifecycle.watchdog import WatchdogOptions
    from tiers.spec import EngineLaunch


@dataclass(slots=True, eq=False)
class Engine:
    """One engine from its first start to its retirement, over all its restarts.

    Attributes:
        replica: What the fleet shows of it.
        launch: What it is started with; None for an engine that runs elsewhere.
        process: While it runs here.
        task: Takes it through its life.
        note: Why it is being started again, for a person.
        held: Why it gets no new requests although it could; None where it does.
        was_ready: Whether it ever was.
        ready_at: Since when it is, by the monotonic clock; None while it is not.
        started_at: When it was last started, by the monotonic clock.
        again: Set to start it again, whatever it does.
        recycle: Why it is to be recycled; None where it is not.
        worn_at: When that was last found, by the monotonic clock.
    """

    replica: Replica
    launch: EngineLaunch | None
    options: WatchdogOptions
    restarts: Restarts = field(init=False)
    wear: Wear = field(init=False)
    process: EngineProcess | None = None
    task: asyncio.Task[None] | None = None
    note: str | None = None
    held: str | None = None
    was_ready: bool = False
    ready_at: float | None = None
    started_at: float = field(default_factory=time.monotonic)
    again: asyncio.Event = field(default_factory=asyncio.Event)
    recycle: str | None = None
    worn_at: float = 0.0

    def __post_init__(self) -> None:
        self.restarts = Restarts(self.options)
        self.begun()

    def begun(self) -> None:
        """Note that the engine is started, for the first time or again."""
        self.wear = Wear(self.options)
        self.started_at = time.monotonic()
        self.ready_at = self.recycle = None
        self.again.clear()

    def ended(self) -> float:
        """Note that the engine's process is gone; return for how many seconds it was ready."""
        ready_s = 0.0 if self.ready_at is None else time.monotonic() - self.ready_at
        self.process = self.replica.pid = self.ready_at = None
        return ready_s


def brief(error: BaseException) -> str:
    """Return an error's first sentence, for a state's detail."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.partition(". Last lines of")[0][:200]
