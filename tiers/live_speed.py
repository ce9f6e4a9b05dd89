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
from typing import TYPE_CHECKING, NamedTuple

from tiers.least_squares import least_squares
from tiers.spec import ReplicaStatus
from tiers.speed import IDLE, AnswerSample, SpeedModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiers.fleet import Fleet
    from tiers.replica import Replica

LEARN_POLL_S = 2.0
# Between two replicas it rests for this multiple of the time that learning took: in a large fleet many are due at once.
REST_FACTOR = 9.0
MIN_ANSWERS = 32  # answers before anything is learned
# learn again at this multiple of the answers of the last time; trends follow later changes
RELEARN_FACTOR = 1.5
CONTENTIONS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
ACCEPTED_ERROR_SHARE = (
    0.9  # more contention must lower the error to this share to be accepted
)
OUTLIER_FACTOR = (
    3.0  # an outlier deviates by more than this multiple of the median deviation
)
MIN_OUTLIER_DEVIATION = (
    0.1  # smaller deviations of log(seen / predicted) are never outliers
)
FIT_ROUNDS = 3
MIN_SPREAD = 0.05
MAX_SPREAD = 1.0
# prompts for which an idle replica's TTFT is added to the answers
IDLE_PROMPT_TOKENS = (16, 256)

Row = tuple[float, ...]


def learn(
    seen: Sequence[AnswerSample], max_num_seqs: int, idle: SpeedModel | None = None
) -> SpeedModel | None:
    """Fit a replica's speed to its answers; return None if they are too few.

    Args:
        seen: Its last answers.
        max_num_seqs: Sequences that it decodes at once. With more, a TTFT includes a wait for a slot.
        idle: The replica's speed measured while nothing else computed.
    """
    # An engine that answers from a cache of its own may take no time that the clock shows; relative errors need one.
    begun = [
        answer
        for answer in seen
        if answer.sequences < max_num_seqs and answer.ttft_ms > 0
    ]
    decoded = [answer for answer in seen if answer.tpot_ms]
    if len(begun) < MIN_ANSWERS or len(decoded) < MIN_ANSWERS:
        return None
    if idle is not None:
        begun += _idle_beginnings(idle, max_num_seqs)
        if idle.step_ms(1) > 0:
            decoded.append(_idle_decoding(idle))
    return _best_fit(begun, decoded)


def _idle_beginnings(idle: SpeedModel, max_num_seqs: int) -> list[AnswerSample]:
    """Return the first tokens of some prompts on the idle replica, without those that take no time."""
    beginnings = [
        _idle_beginning(idle, prompt_tokens, max_num_seqs)
        for prompt_tokens in IDLE_PROMPT_TOKENS
    ]
    return [answer for answer in beginnings if answer.ttft_ms > 0]


def _best_fit(
    begun: Sequence[AnswerSample], decoded: Sequence[AnswerSample]
) -> SpeedModel:
    """Fit a model with each contention of the grid; more contention counts only where it lowers the error well."""
    best, lowest_deviation = _fit(begun, decoded, 0.0)
    for contention in CONTENTIONS:
        model, deviation = _fit(begun, decoded, contention)
        if deviation < ACCEPTED_ERROR_SHARE * lowest_deviation:
            best = model
            lowest_deviation = deviation
    return best


def _idle_beginning(
    idle: SpeedModel, prompt_tokens: int, max_num_seqs: int
) -> AnswerSample:
    """Return the first token's time of a prompt on the idle replica, as if it had been seen."""
    ttft_ms = idle.times(prompt_tokens, IDLE, max_num_seqs, output_share=1.0).ttft_ms
    return AnswerSample(
        prompt_tokens, sequences=0, waiting_tokens=0, neighbours=0.0, ttft_ms=ttft_ms
    )


def _idle_decoding(idle: SpeedModel) -> AnswerSample:
    """Return the decode step of a lone sequence on the idle replica, as if it had been seen."""
    return AnswerSample(
        prompt_tokens=0,
        sequences=0,
        waiting_tokens=0,
        neighbours=0.0,
        ttft_ms=0.0,
        batch=1.0,
        tpot_ms=idle.step_ms(1),
    )


def _fit(
    begun: Sequence[AnswerSample], decoded: Sequence[AnswerSample], contention: float
) -> tuple[SpeedModel, float]:
    """Fit all parameters but the contention; return the model and its median deviation.

    Args:
        begun: Answers whose TTFT counts.
        decoded: Answers whose TPOT counts.
        contention: Added share of time when all other replicas compute.
    """
    tpot = _robust(
        [(1.0, answer.batch, answer.prefilled) for answer in decoded],
        [_alone_ms(answer.tpot_ms or 0.0, answer, contention) for answer in decoded],
    )
    step_base_ms, step_ms_per_sequence, _ = tpot.coefficients
    steps = SpeedModel(
        0.0, 0.0, step_base_ms, step_ms_per_sequence=step_ms_per_sequence
    )
    ttft = _robust(
        [_ttft_row(answer, steps) for answer in begun],
        [_alone_ms(answer.ttft_ms, answer, contention) for answer in begun],
    )
    ttft_base_ms, prefill_ms_per_token, ttft_steps = ttft.coefficients
    model = SpeedModel(
        ttft_base_ms=ttft_base_ms,
        prefill_ms_per_token=prefill_ms_per_token,
        step_base_ms=step_base_ms,
        step_ms_per_sequence=step_ms_per_sequence,
        ttft_steps=ttft_steps,
        contention=contention,
        ttft_spread=ttft.spread,
        tpot_spread=tpot.spread,
        learned=True,
    )
    return model, tpot.median_deviation + ttft.median_deviation


def _alone_ms(seen_ms: float, answer: AnswerSample, contention: float) -> float:
    """Return the time that an answer would have taken without its replica's neighbours."""
    return seen_ms / (1 + contention * answer.neighbours)


def _ttft_row(answer: AnswerSample, steps: SpeedModel) -> Row:
    """Return what the three parameters of TTFT are multiplied by; ``steps`` has only the time of a decode step."""
    wait_ms = 0.0
    if answer.sequences:
        wait_ms = steps.step_ms(answer.sequences)
    return 1.0, answer.prompt_tokens + answer.waiting_tokens, wait_ms


class _RobustFit(NamedTuple):
    """A linear model of times, fitted without outliers.

    Attributes:
        coefficients: One for each column of the rows.
        spread: Root mean square of log(seen / predicted) without outliers.
        median_deviation: Median size of log(seen / predicted) over all rows.
    """

    coefficients: list[float]
    spread: float
    median_deviation: float


def _robust(rows: Sequence[Row], times: Sequence[float]) -> _RobustFit:
    """Fit coefficients to times above zero, repeatedly without outliers."""
    kept = list(range(len(rows)))
    coefficients = [0.0] * len(rows[0])
    deviations = [0.0] * len(rows)
    for _ in range(FIT_ROUNDS):
        coefficients = least_squares([rows[n] for n in kept], [times[n] for n in kept])
        deviations = [
            _deviation(row, time_ms, coefficients)
            for row, time_ms in zip(rows, times, strict=True)
        ]
        bound = max(
            OUTLIER_FACTOR * median(map(abs, deviations)), MIN_OUTLIER_DEVIATION
        )
        kept = [n for n, deviation in enumerate(deviations) if abs(deviation) <= bound]
    kept_deviations = [deviations[n] for n in kept]
    spread = math.hypot(pstdev(kept_deviations), fmean(kept_deviations))
    return _RobustFit(
        coefficients=coefficients,
        spread=min(max(spread, MIN_SPREAD), MAX_SPREAD),
        median_deviation=median(map(abs, deviations)),
    )


def _deviation(row: Row, seen_ms: float, coefficients: Sequence[float]) -> float:
    """Return log(seen / predicted) of one row."""
    predicted_ms = sum(
        coefficient * x for coefficient, x in zip(coefficients, row, strict=True)
    )
    return math.log(seen_ms / max(predicted_ms, 1e-3))


class LiveSpeed:
    """Sets the speed of replicas without a profile from their answers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._idle: dict[str, SpeedModel] = {}
        # by replica: number of answers when its speed was last learned
        self._answers: dict[str, int] = {}

    async def run(self) -> None:
        """Learn periodically, until cancelled."""
        while True:
            await asyncio.sleep(LEARN_POLL_S)
            replicas = list(self._fleet.replicas)
            for replica in replicas:
                began = time.monotonic()
                if await self.look(replica):
                    await asyncio.sleep(REST_FACTOR * (time.monotonic() - began))
            self._forget_others({replica.id for replica in replicas})

    def _forget_others(self, known: set[str]) -> None:
        """Forget replicas that the fleet no longer has."""
        for replica_id in (self._idle.keys() | self._answers.keys()) - known:
            self._forget(replica_id)

    def _forget(self, replica_id: str) -> None:
        self._idle.pop(replica_id, None)
        self._answers.pop(replica_id, None)

    async def look(self, replica: Replica) -> bool:
        """Learn one replica's speed, in a thread, if there are enough answers since the last time; return whether."""
        if replica.state.status is not ReplicaStatus.READY or not replica.learns:
            self._forget(replica.id)
            return False
        speed = replica.state.speed
        if speed is not None and not speed.learned:
            self._idle[replica.id] = speed
        enough_answers = max(
            MIN_ANSWERS, RELEARN_FACTOR * self._answers.get(replica.id, 0)
        )
        if replica.answers.noted < enough_answers:
            return False
        self._answers[replica.id] = replica.answers.noted
        idle = self._idle.get(replica.id)
        answers = tuple(replica.answers.last)
        learned = await asyncio.to_thread(
            learn, answers, replica.spec.max_num_seqs, idle
        )
        # The engine may have stopped, or have been measured, while the thread was computing.
        if (
            learned is not None
            and replica.state.status is ReplicaStatus.READY
            and replica.learns
        ):
            replica.measured(learned)
        return True
