"""Learn the speed of replicas without a profile from live requests, because a router may never be idle.

Each answer is noted with its replica's load: sequences and prompt tokens when it was sent, the mean batch while it was
decoded, and the prompt tokens that arrived meanwhile. The model of ``tiers.speed`` is fitted to the last few hundred:

    TPOT = step_base + step_per_sequence * batch + prefill_per_token * prompt tokens that arrived per token
    TTFT = ttft_base + prefill_per_token * (own + waiting prompt tokens) + steps * step(sequences)

each times ``1 + contention * neighbours``, where contention is the value of a grid with the smallest error. The fit
minimises the squares of relative errors, and is repeated without outliers: an answer followed at once by other prompts,
or from the prefix cache, says nothing about the rest. An earlier measurement of the idle replica is added: under an even
load nothing else separates the two parts of a step.
"""

from __future__ import annotations

import asyncio
import math
import time
from statistics import fmean, median, pstdev
from typing import TYPE_CHECKING

from tiers.least_squares import least_squares
from tiers.spec import ReplicaStatus
from tiers.speed import IDLE, AnswerSample, SpeedModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiers.fleet import Fleet
    from tiers.replica import Replica

LOOK_S = 2.0
REST = (
    9.0  # times as long as learning took, nothing is learned: in a large fleet many replicas are due at the same time
)
ENOUGH = 32  # answers before anything is learned
AGAIN = 1.5  # learn again at this multiple of the answers of the last time; trends follow later changes
CONTENTIONS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
PAYS = 0.9  # more contention must lower the error to this share to be accepted
FAR = 3.0  # an outlier deviates by more than this multiple of the median deviation
CLOSE = 0.1  # of log(seen / predicted): smaller deviations are never outliers
ROUNDS = 3
LEAST_SPREAD, MOST_SPREAD = 0.05, 1.0

Row = tuple[float, ...]


def learn(seen: Sequence[AnswerSample], max_num_seqs: int, idle: SpeedModel | None = None) -> SpeedModel | None:
    """Fit a replica's speed to its answers; return None if they are too few.

    Args:
        seen: Its last answers.
        max_num_seqs: Sequences that it decodes at once. With more, a TTFT includes a wait for a slot.
        idle: The replica's speed measured while nothing else computed.
    """
    begun = [s for s in seen if s.sequences < max_num_seqs]
    decoded = [s for s in seen if s.tpot_ms is not None]
    if len(begun) < ENOUGH or len(decoded) < ENOUGH:
        return None
    if idle is not None:
        begun += [AnswerSample(n, 0, 0, 0.0, idle.times(n, IDLE, max_num_seqs, 1.0).ttft_ms) for n in (16, 256)]
        decoded.append(AnswerSample(0, 0, 0, 0.0, 0.0, 1.0, 0.0, idle.step_ms(1)))
    best, least = _fit(begun, decoded, 0.0)
    for contention in CONTENTIONS:
        model, deviation = _fit(begun, decoded, contention)
        if deviation < PAYS * least:
            best, least = model, deviation
    return best


def _fit(begun: Sequence[AnswerSample], decoded: Sequence[AnswerSample], contention: float) -> tuple[SpeedModel, float]:
    """Fit all parameters but the contention; return the model and its median deviation."""
    (base, slope, _), tpot_spread, tpot_typical = _robust(
        [(1.0, s.batch, s.prefilled) for s in decoded],
        [(s.tpot_ms or 0.0) / (1 + contention * s.neighbours) for s in decoded],
    )
    steps = SpeedModel(0.0, 0.0, base, slope)
    waits = [steps.step_ms(s.sequences) if s.sequences else 0.0 for s in begun]
    (first, prefill, waited), ttft_spread, ttft_typical = _robust(
        [(1.0, s.prompt_tokens + s.waiting_tokens, wait) for s, wait in zip(begun, waits, strict=True)],
        [s.ttft_ms / (1 + contention * s.neighbours) for s in begun],
    )
    model = SpeedModel(
        ttft_base_ms=first,
        prefill_ms_per_token=prefill,
        step_base_ms=base,
        step_ms_per_sequence=slope,
        ttft_steps=waited,
        contention=contention,
        ttft_spread=ttft_spread,
        tpot_spread=tpot_spread,
        learned=True,
    )
    return model, tpot_typical + ttft_typical


def _robust(rows: Sequence[Row], times: Sequence[float]) -> tuple[list[float], float, float]:
    """Fit coefficients to times above zero, repeatedly without outliers.

    Returns:
        The coefficients; the root mean square of log(seen / predicted) without outliers; its median size over all rows.
    """
    kept = list(range(len(rows)))
    found, logs = [0.0] * len(rows[0]), [0.0] * len(rows)
    for _ in range(ROUNDS):
        found = least_squares([rows[n] for n in kept], [times[n] for n in kept])
        predicted = [sum(c * x for c, x in zip(found, row, strict=True)) for row in rows]
        logs = [math.log(y / max(p, 1e-3)) for p, y in zip(predicted, times, strict=True)]
        bound = max(FAR * median(map(abs, logs)), CLOSE)
        kept = [n for n, off in enumerate(logs) if abs(off) <= bound]
    left = [logs[n] for n in kept]
    spread = math.hypot(pstdev(left), fmean(left))
    return found, min(max(spread, LEAST_SPREAD), MOST_SPREAD), median(map(abs, logs))


class LiveSpeed:
    """Sets the speed of replicas without a profile from their answers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._idle: dict[str, SpeedModel] = {}
        self._answers: dict[str, int] = {}  # by replica: number of answers when its speed was last learned

    async def run(self) -> None:
        """Learn periodically, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            replicas = list(self._fleet.replicas)
            for replica in replicas:
                began = time.monotonic()
                if await self.look(replica):
                    await asyncio.sleep(REST * (time.monotonic() - began))
            self._forget_others({replica.id for replica in replicas})

    def _forget_others(self, known: set[str]) -> None:
        for name in (self._idle.keys() | self._answers.keys()) - known:
            self._idle.pop(name, None)
            self._answers.pop(name, None)

    async def look(self, replica: Replica) -> bool:
        """Learn one replica's speed, in a thread, if there are enough answers since the last time; return whether."""
        if replica.state.status is not ReplicaStatus.READY or not replica.learns:
            self._idle.pop(replica.id, None)
            self._answers.pop(replica.id, None)
            return False
        if replica.state.speed is not None and not replica.state.speed.learned:
            self._idle[replica.id] = replica.state.speed
        if replica.answers.noted < max(ENOUGH, AGAIN * self._answers.get(replica.id, 0)):
            return False
        self._answers[replica.id] = replica.answers.noted
        idle = self._idle.get(replica.id)
        learned = await asyncio.to_thread(learn, tuple(replica.answers.last), replica.spec.max_num_seqs, idle)
        if learned is not None and replica.state.status is ReplicaStatus.READY and replica.learns:
            replica.measured(learned)
        return True
