"""A test of paired answers that may stop at any time: it bets on the loss, and knows it once it has won enough.

Two engines answer the same tasks. A task that both get wrong tells nothing. Each other task has an outcome x: +1, the
candidate is worse; 0, both are right; -1, the candidate is better. The loss is the mean of x, -1..1, over all tasks like
these: the tasks that were asked count as a sample of them, in random order. In another fixed order, it is the mean over the
tasks asked so far (``task_order`` has the proof).

Against the claim "the loss is at most m" a player who owns 1 bets on worse answers. With the bet f, 0 < f < 1, each task
multiplies the capital by

    1 + g (x - m)        g = f / (1 + m)

which is never negative. If the claim is true, the capital does not grow on average, so by Ville's inequality it reaches c at
any time at all with probability 1/c at most. Against "the loss is at least m" the player bets on better answers, with
g = -f / (1 - m). Nobody knows the best bet beforehand, so the capital is divided equally among the bets of ``BETS``. The
claim is refuted when the mean of their capitals reaches c = 2 / (1 - confidence): the 2 is for the two claims, each of
which is refuted wrongly with probability (1 - confidence) / 2 at most. This holds however often one looks and whatever one
stops for. The bets are fixed, so capital, verdict and interval follow from the counts alone.

The interval is of all losses m that neither claim's capital refutes. It holds the true loss at all times together with the
probability ``confidence``, and always holds the observed loss. With few tasks it is wide: without any it is -1..1.

Sources: Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting" (JRSS B 86:1; the hedged
capital process); Ville 1939, "Étude critique de la notion de collectif". Measured error rates and numbers of tasks:
``benchmarks/sequential_errors.py``.

Several classes: whoever reads a verdict for each of k classes looks for the worst one, and would find one by chance. So the
classes' verdicts and intervals are corrected (Bonferroni): each is at ``1 - (1 - confidence) / k``, and all of them together
hold with the probability ``confidence``. The verdict over all classes is the one that was asked for; it is not corrected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from tiers.verification.findings import Verdict

# Large bets find out soonest where few answers change; small ones where many change in both directions.
BETS = (0.98, 0.5, 0.25, 0.12)
# The ends of an interval are found to 2 / 2**BISECTIONS.
BISECTIONS = 40
# A verdict that would take more tasks than this is out of reach.
MOST_TASKS_NEEDED = 100_000


class PairOutcome(StrEnum):
    """What a task tells about two engines."""

    BOTH_RIGHT = "both right"
    WORSE = "worse"
    BETTER = "better"
    BOTH_WRONG = "both wrong"
    NOT_MEASURED = "not measured"


class Claim(StrEnum):
    """A claim about the loss that a player bets against."""

    AT_MOST = "the loss is at most"
    AT_LEAST = "the loss is at least"


@dataclass(frozen=True, slots=True)
class PairCounts:
    """How many tasks had which outcome.

    Attributes:
        both_right: Tasks that both engines get right.
        worse: Tasks that the reference alone gets right.
        better: Tasks that the candidate alone gets right.
        both_wrong: Tasks that neither gets right.
        not_measured: Tasks without two complete answers.
    """

    both_right: int = 0
    worse: int = 0
    better: int = 0
    both_wrong: int = 0
    not_measured: int = 0

    @property
    def tasks(self) -> int:
        """Return the number of all tasks."""
        return self.decisive + self.both_wrong + self.not_measured

    @property
    def decisive(self) -> int:
        """Return the number of tasks that tell something."""
        return self.both_right + self.worse + self.better

    def after(self, outcome: PairOutcome) -> PairCounts:
        """Return the counts with one more task."""
        match outcome:
            case PairOutcome.BOTH_RIGHT:
                return replace(self, both_right=self.both_right + 1)
            case PairOutcome.WORSE:
                return replace(self, worse=self.worse + 1)
            case PairOutcome.BETTER:
                return replace(self, better=self.better + 1)
            case PairOutcome.BOTH_WRONG:
                return replace(self, both_wrong=self.both_wrong + 1)
            case PairOutcome.NOT_MEASURED:
                return replace(self, not_measured=self.not_measured + 1)


@dataclass(frozen=True, slots=True)
class LossInterval:
    """The losses that the answers do not refute, -1..1."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class BetFactors:
    """Logarithms of the factors by which outcomes multiply the capital of one bet."""

    worse: float
    both_right: float
    better: float


def bet_factors(claim: Claim, loss: float, bet: float) -> BetFactors:
    """Return what each outcome does to a bet against a claim; see the head of this module.

    Args:
        claim: The claim that is bet against.
        loss: The loss m that the claim names, above -1 and below 1.
        bet: The share f of the capital that is at stake, above 0 and below 1.
    """
    gain = bet / (1 + loss) if claim is Claim.AT_MOST else -bet / (1 - loss)
    return BetFactors(
        worse=math.log1p(gain * (1 - loss)),
        both_right=math.log1p(-gain * loss),
        better=math.log1p(-gain * (1 + loss)),
    )


def log_capital(
    claim: Claim, loss: float, *, worse: float, both_right: float, better: float
) -> float:
    """Return the natural logarithm of the capital won against a claim, all bets together.

    Args:
        claim: The claim that is bet against.
        loss: The loss m that the claim names, above -1 and below 1.
        worse: Number of tasks that got worse; extrapolated numbers need not be whole.
        both_right: Number of tasks that stayed right.
        better: Number of tasks that got better.
    """
    capitals: list[float] = []
    for bet in BETS:
        factors = bet_factors(claim, loss, bet)
        capitals.append(
            worse * factors.worse
            + both_right * factors.both_right
            + better * factors.better
        )
    highest = max(capitals)
    relative = sum(math.exp(capital - highest) for capital in capitals)
    return highest + math.log(relative / len(capitals))


@dataclass(frozen=True, slots=True)
class SequentialTest:
    """Whether the loss is known to be above a tolerated one, or not above it.

    Attributes:
        tolerated: The loss that is accepted, 0 or more and below 1.
        confidence: Of verdict and interval, above 0 and below 1.
        counts: The outcomes so far.
    """

    tolerated: float
    confidence: float
    counts: PairCounts = PairCounts()

    def __post_init__(self) -> None:
        if not 0 <= self.tolerated < 1:
            raise ValueError(
                f"tolerated is {self.tolerated:g}; it must be a share from 0 to below 1, such as 0.02 for 2 of 100"
            )
        if not 0 < self.confidence < 1:
            raise ValueError(
                f"confidence is {self.confidence:g}; it must be above 0 and below 1, such as 0.95"
            )

    def after(self, outcome: PairOutcome) -> SequentialTest:
        """Return the test with one more task."""
        return replace(self, counts=self.counts.after(outcome))

    @property
    def verdict(self) -> Verdict:
        """Return "worse" or "same" once the other one is refuted."""
        if self._is_refuted(Claim.AT_MOST, self.tolerated):
            return Verdict.WORSE
        if self._is_refuted(Claim.AT_LEAST, self.tolerated):
            return Verdict.SAME
        return Verdict.CANNOT_TELL

    @property
    def interval(self) -> LossInterval:
        """Return the losses that are not refuted; ends are rounded outwards."""
        return LossInterval(low=self._low(), high=self._high())

    @property
    def tasks_needed(self) -> int | None:
        """Return about how many more tasks a verdict takes if they turn out as those so far.

        None: there is a verdict already, nothing is known yet, or more than ``MOST_TASKS_NEEDED`` would be needed.
        """
        if self.verdict is not Verdict.CANNOT_TELL or not self.counts.decisive:
            return None
        if not self._would_know(MOST_TASKS_NEEDED):
            return None
        too_few = 0
        enough = MOST_TASKS_NEEDED
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            if self._would_know(middle):
                enough = middle
            else:
                too_few = middle
        return enough

    def for_class(self, classes: int, counts: PairCounts) -> SequentialTest:
        """Return the test of one of several classes, whose verdicts hold all together.

        Args:
            classes: Number of classes that are tested, 1 or more.
            counts: The outcomes of this class.
        """
        corrected = 1 - (1 - self.confidence) / classes
        return replace(self, confidence=corrected, counts=counts)

    @property
    def _log_threshold(self) -> float:
        return math.log(2 / (1 - self.confidence))

    def _is_refuted(self, claim: Claim, loss: float, growth: float = 1.0) -> bool:
        """Tell whether a claim is refuted, by the counts times ``growth``."""
        capital = log_capital(
            claim,
            loss,
            worse=self.counts.worse * growth,
            both_right=self.counts.both_right * growth,
            better=self.counts.better * growth,
        )
        return capital >= self._log_threshold

    def _would_know(self, more_tasks: int) -> bool:
        growth = 1 + more_tasks / self.counts.tasks
        return any(
            self._is_refuted(claim, self.tolerated, growth=growth) for claim in Claim
        )

    def _low(self) -> float:
        """Return the highest m of which "the loss is at most m" is refuted: the capital falls as m grows."""
        refuted = -1.0
        possible = 1.0
        for _ in range(BISECTIONS):
            middle = (refuted + possible) / 2
            if self._is_refuted(Claim.AT_MOST, middle):
                refuted = middle
            else:
                possible = middle
        return refuted

    def _high(self) -> float:
        """Return the lowest m of which "the loss is at least m" is refuted: the capital grows with m."""
        possible = -1.0
        refuted = 1.0
        for _ in range(BISECTIONS):
            middle = (refuted + possible) / 2
            if self._is_refuted(Claim.AT_LEAST, middle):
                refuted = middle
            else:
                possible = middle
        return refuted
