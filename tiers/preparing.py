"""What tiers need before they serve for the first time, and about how long that takes.

Missing checkpoints are made one after another, while ready tiers serve; then the tier's engine is started. One event loop
owns a ``Preparations``; nothing here awaits.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# The first two take seconds, the last one minutes.
MAKING_ORDER = (TierName.PRECISE, TierName.BALANCED, TierName.FAST)
# Estimates for the default model on two idle cores: from process start to a ready engine (three started together took 50 to
# 60 s on an AMD EPYC), and the rest of AWQ after its last layer.
ENGINE_START_S = 45.0
WRITING_S = 5.0
# Seconds to make a checkpoint: for the libraries' start, and per GiB of BF16 weights. Estimates for two idle cores.
TYPICAL = {
    TierName.PRECISE: (10.0, 16.0),
    TierName.BALANCED: (12.0, 12.0),
    TierName.FAST: (20.0, 540.0),
}
GIB = 1 << 30
IN_SECONDS = 120  # up to here times are shown in seconds


@dataclass(frozen=True, slots=True)
class Preparing:
    """What one tier still needs, at one moment.

    Attributes:
        what: The current step, or what the tier waits for.
        done: Finished parts of the step.
        total: Parts of the step; 0: they cannot be counted.
        remaining_s: Rough time until the tier is ready, in seconds; None: unknown.
        failed: Why its checkpoint could not be made; None: it is being made, or its engine starts.
    """

    what: str
    done: int = 0
    total: int = 0
    remaining_s: float | None = None
    failed: str | None = None

    @property
    def text(self) -> str:
        """Return the step and the time left, for people."""
        parts = f" ({self.done} of {self.total})" if self.total else ""
        left = (
            f", ready in {about(self.remaining_s)}"
            if self.remaining_s is not None
            else ""
        )
        return f"{self.what}{parts}{left}"


def about(seconds: float) -> str:
    """Return a time for people, rounded up to five seconds, or above two minutes to half minutes."""
    if seconds <= IN_SECONDS:
        return f"about {max(5 * math.ceil(seconds / 5), 5)} s"
    return f"about {math.ceil(seconds / 30) / 2:g} min"


@dataclass(slots=True)
class _PreparationStep:
    """A step with counted parts, whose pace is that of the parts so far."""

    message: str
    total: int
    first: int
    first_at: float
    done: int
    done_at: float

    def left_s(self, now: float) -> float | None:
        """Return the time left; None before the second part."""
        if self.done == self.first:
            return None
        pace_s = (self.done_at - self.first_at) / (self.done - self.first)
        return (
            max(pace_s * (self.total - self.done) - (now - self.done_at), 0.0)
            + WRITING_S
        )


@dataclass(slots=True)
class Preparations:
    """All tiers that are not yet ready for their first request.

    Attributes:
        clock: Monotonic seconds.
        lacking: Those that ``of`` tells something of.
    """

    clock: Callable[[], float] = time.monotonic
    lacking: set[TierName] = field(init=False, default_factory=set)
    # the first one is being made
    _to_make: list[TierName] = field(default_factory=list)
    _weights: int | None = None
    _began: float = 0.0
    _message: str = ""
    _step: _PreparationStep | None = None
    # their engines are not started yet
    _made: list[TierName] = field(default_factory=list)
    # when the tier's engine is ready, if known
    _starting: dict[TierName, float | None] = field(default_factory=dict)
    _failed: dict[TierName, str] = field(default_factory=dict)

    @property
    def making(self) -> bool:
        """Tell whether a checkpoint is being made, so that the machine is not idle."""
        return bool(self._to_make)

    @property
    def coming(self) -> tuple[TierName, ...]:
        """Return the tiers that will become ready, the next one first."""
        return (*self._starting, *self._made, *self._to_make)

    @property
    def to_make(self) -> tuple[TierName, ...]:
        """Return the tiers whose checkpoints are missing, in the order in which they are made."""
        return tuple(self._to_make)

    def expect(self, tiers: Iterable[TierName], weights: int | None) -> None:
        """Note the tiers whose checkpoints are made from now on, and the size of the BF16 weights in bytes, if known."""
        self._to_make = sorted(set(tiers), key=MAKING_ORDER.index)
        self._weights = weights
        self._began = self.clock()
        self._note_lacking()

    def sized(self, weights: int) -> None:
        """Note the size of the BF16 weights, in bytes."""
        self._weights = weights

    def step(self, message: str, done: int, total: int) -> None:
        """Note the progress of the present checkpoint; ``total`` is 0 if parts cannot be counted."""
        now = self.clock()
        self._message = message
        if not total:
            return
        if self._step is None or self._step.message != message:
            self._step = _PreparationStep(
                message, total, first=done, first_at=now, done=done, done_at=now
            )
        elif done != self._step.done:
            self._step.done = done
            self._step.done_at = now

    def made(self, tier: TierName) -> None:
        """Note a finished checkpoint; the next one begins."""
        if tier in self._to_make:
            self._to_make.remove(tier)
            self._made.append(tier)
        self._began = self.clock()
        self._message = ""
        self._step = None

    def leave_out(self, tiers: Iterable[TierName]) -> None:
        """Forget tiers that are not started."""
        self._to_make = [tier for tier in self._to_make if tier not in tiers]
        self._made = [tier for tier in self._made if tier not in tiers]
        self._note_lacking()

    def starting(self, tier: TierName, takes_s: float | None = ENGINE_START_S) -> None:
        """Note that a tier's engine starts, and how long that takes, if known."""
        if tier in self._made:
            self._made.remove(tier)
        ready_at = None
        if takes_s is not None:
            ready_at = self.clock() + takes_s
        self._starting[tier] = ready_at
        self._note_lacking()

    def settled(self, tier: TierName) -> None:
        """Note that a tier's engine is ready or has failed."""
        self._starting.pop(tier, None)
        self._note_lacking()

    def _note_lacking(self) -> None:
        self.lacking = {*self._to_make, *self._made, *self._starting, *self._failed}

    def fail(self, why: str) -> tuple[TierName, ...]:
        """Note that no further checkpoint is made; return the tiers that have no engine yet."""
        lacking = (*self._made, *self._to_make)
        self._failed.update(dict.fromkeys(lacking, why))
        self._made.clear()
        self._to_make.clear()
        return lacking

    def of(self, tier: TierName) -> Preparing | None:
        """Return what a tier still needs; None: nothing that is known here."""
        now = self.clock()
        if tier in self._failed:
            return Preparing(
                "its checkpoint could not be made", failed=self._failed[tier]
            )
        if tier in self._to_make:
            return self._of_making(tier, now)
        if tier in self._made:
            return Preparing(
                "waits for the other checkpoints",
                remaining_s=self._ready_in_s(self._to_make, now),
            )
        if tier not in self._starting:
            return None
        remaining_s = None
        ready_at = self._starting[tier]
        if ready_at is not None:
            remaining_s = _left(ready_at - now)
        return Preparing("its engine starts", remaining_s=remaining_s)

    def _of_making(self, tier: TierName, now: float) -> Preparing:
        position = self._to_make.index(tier)
        remaining_s = self._ready_in_s(self._to_make[: position + 1], now)
        if position:
            return Preparing(
                f"waits for the checkpoint of {self._to_make[position - 1]}",
                remaining_s=remaining_s,
            )
        step = self._step
        message = self._message or "making its checkpoint"
        if step is None or step.message != self._message:
            return Preparing(message, remaining_s=remaining_s)
        return Preparing(message, step.done, step.total, remaining_s=remaining_s)

    def _ready_in_s(self, missing_first: list[TierName], now: float) -> float | None:
        """Return the time until an engine is ready that starts after these checkpoints are made; None: unknown."""
        making_times_s = [self._making_s(tier, now) for tier in missing_first]
        known_times_s = [time_s for time_s in making_times_s if time_s is not None]
        if len(known_times_s) < len(making_times_s):
            return None
        return sum(known_times_s) + ENGINE_START_S

    def _making_s(self, tier: TierName, now: float) -> float | None:
        """Return how long a checkpoint still takes, by the pace of its parts or typically; None: unknown."""
        is_being_made = tier is self._to_make[0]
        if is_being_made and self._step is not None:
            if self._step.message != self._message:  # the parts are done
                return WRITING_S
            paced_s = self._step.left_s(now)
            if paced_s is not None:
                return paced_s
        if self._weights is None:
            return None
        start_s, s_per_gib = TYPICAL[tier]
        typical_s = start_s + s_per_gib * self._weights / GIB
        if is_being_made:
            return _left(typical_s - (now - self._began))
        return typical_s


def _left(seconds: float) -> float | None:
    """Return the rest of a typical time; None once it has passed, because the rest is unknown then."""
    if seconds <= 0:
        return None
    return seconds
