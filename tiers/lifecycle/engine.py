"""The supervisor's record of one engine, in addition to the fleet's record of its replica."""

from __future__ import annotations

import asyncio
import time
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from tiers.lifecycle.watchdog import Restarts, Wear
from tiers.verification.model_facts import Extent

if TYPE_CHECKING:
    from tiers.lifecycle.canary import EngineKey
    from tiers.lifecycle.likelihood import EngineScores
    from tiers.lifecycle.process import EngineProcess
    from tiers.lifecycle.watchdog import WatchdogOptions
    from tiers.replica import Replica
    from tiers.spec import Adapter, EngineLaunch
    from tiers.verification.likelihood import LikelihoodRecord
    from tiers.verification.model_facts import ModelFacts


# Throttling comes and goes: it is mentioned for this long after it was last seen.
THROTTLED_S = 60.0


class Symptom(Enum):
    """What is wrong with an engine that still serves, and may go by itself."""

    MISSED_HEALTH_CHECKS = auto()
    SILENT = auto()


@dataclass(slots=True)
class Observation:
    """What an engine told and wrote since its last start; each part is asked for when it is first needed.

    Attributes:
        facts: What it tells of its model.
        extent: How much the model has written for the facts.
        record: What it wrote, and how likely it finds that.
        asking: Held while the engine is asked: several comparisons with it wait for the same answers.
    """

    facts: ModelFacts | None = None
    extent: Extent = Extent.NOTHING
    record: LikelihoodRecord | None = None
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True, eq=False)
class Engine:
    """One engine from its first start to its retirement, over all restarts. Times are monotonic seconds.

    Attributes:
        replica: The fleet's record.
        launch: What it is started with; None: it runs elsewhere.
        process: While it runs here.
        task: Runs and watches it.
        note: Why it is being restarted, for people.
        symptom: What its replica's detail is about; None: something that does not go by itself, or there is none.
        held: Why it gets no new requests although it could; None: it gets them.
        gate_hold: Why the gate keeps requests from it; None: it does not, or an operator has resumed it.
        less: What it has less of than configured, and why; None: nothing.
        lessened: Times that it was started with less.
        throttled: What slows its processors down, or did within ``THROTTLED_S``; None: nothing that is known.
        throttled_at: When that was last seen.
        scores: What it computed for the fixed texts when it was last warmed; None: not compared.
        compared_with: The scores of tier precise that its speed was compared with; None: with none yet.
        key: What it was verified as, or is to be; None: its weights have no name.
        observation: What it told when it was compared, or others were compared with it.
        difference: That it treats requests otherwise than its reference, and how; None: it does not, as far as is known.
        slow: That it takes much longer for a token than tier precise, and why; None: it does not.
        was_ready: Whether it was ever ready.
        ready_at: Since when it is ready; None: it is not.
        started_at: When it was last started.
        again: Set to restart it, whatever it does; one that runs elsewhere is checked again if it is quarantined.
        recycle: Why it is to be recycled; None: it is not, as one that runs elsewhere never is.
        leaving: Whether it is being removed, and can no longer be kept.
        served: What it said that it serves when it was warmed: name, context length and checkpoint; None: not yet warmed.
        adapters: LoRA adapters that were loaded while it ran, by name; loaded again whenever it starts.
    """

    replica: Replica
    launch: EngineLaunch | None
    options: InitVar[WatchdogOptions]
    restarts: Restarts = field(init=False)
    wear: Wear = field(init=False)
    process: EngineProcess | None = None
    task: asyncio.Task[None] | None = None
    note: str | None = None
    symptom: Symptom | None = None
    held: str | None = None
    gate_hold: str | None = None
    less: str | None = None
    lessened: int = 0
    throttled: str | None = None
    throttled_at: float = 0.0
    scores: EngineScores | None = None
    compared_with: EngineScores | None = None
    key: EngineKey | None = None
    observation: Observation = field(default_factory=Observation)
    difference: str | None = None
    slow: str | None = None
    was_ready: bool = False
    ready_at: float | None = None
    started_at: float = field(default_factory=time.monotonic)
    again: asyncio.Event = field(default_factory=asyncio.Event)
    recycle: str | None = None
    leaving: bool = False
    served: tuple[str, int, str | None] | None = None
    adapters: dict[str, Adapter] = field(default_factory=dict)

    def __post_init__(self, options: WatchdogOptions) -> None:
        self.restarts = Restarts(options)
        self.begun()

    @property
    def remark(self) -> str | None:
        """Return what is to be said of it although it serves; None: nothing."""
        possible = (self.less, self.slow, self.difference)
        remarks = [remark for remark in possible if remark]
        if self.throttled:
            remarks.append(f"slower: {self.throttled}")
        return "; ".join(remarks) or None

    def note_throttled(self, slowdown: str | None, now: float) -> None:
        """Note what slows its processors down; None: nothing does now."""
        if slowdown is not None:
            self.throttled = slowdown
            self.throttled_at = now
        elif now - self.throttled_at > THROTTLED_S:
            self.throttled = None

    def begun(self) -> None:
        """Note that the engine is being started."""
        self.wear = Wear(self.restarts.options)
        self.started_at = time.monotonic()
        self.ready_at = None
        self.recycle = None
        self.again.clear()

    def ended(self) -> float:
        """Note that the engine's process has ended; return for how many seconds it was ready."""
        ready_s = 0.0 if self.ready_at is None else time.monotonic() - self.ready_at
        self.process = None
        self.ready_at = None
        self.replica.update(pid=None)
        return ready_s


def brief(error: BaseException) -> str:
    """Return the first line of an error, for a state's detail."""
    text = str(error)
    first_line = text.splitlines()[0] if text else type(error).__name__
    return first_line.partition(". Last lines of")[0][:200]
