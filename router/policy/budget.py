"""The loss budget: one price of loss for the whole router, moved so that the mean loss of live answers meets the budget.

Let request i get n_i output tokens, and let tier t answer it in c_it engine-seconds a token and with a share l_it of tokens
that differ from the highest precision's. The cheapest assignment within a budget of a_i is

    min  sum n_i c_it   so that   sum n_i l_it <= sum n_i a_i,

and its Lagrangian is the sum of n_i (c_it + price * (l_it - a_i)): for a given price each request takes the tier with the
least c_it + price * l_it, whatever the others do. What such a price assigns is the cheapest assignment of all that lose no
more (Everett 1963, "Generalized Lagrange multiplier method"), if costs and losses are as expected and do not depend on what
other requests are assigned. A request more or less than the budget allows is the error of a price that falls between two
assignments.

The price is found by dual ascent: with each answer its logarithm moves by what the answer loses beyond its budget, and by
what the running mean is beyond the budget, over what choosing could have changed. So it needs no knowledge of the traffic,
follows when that changes, and does not depend on the unit of cost. A mean that is off comes back within about a half-life.
An answer counts with what is expected of it as soon as its tier is chosen, and is put right when it ends: if it counted at
its end, the price would swing to and fro where answers take as long as the mean's memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.policy.decision import Priced

GAIN = 20.0  # of log(price) over about a half-life, if every answer is as far from the budget as choosing could take it
RECALL = 3.0  # weight of the running mean's distance; 3 half-lives of the mean's memory pass in one of the clock's
STEP = 0.25  # most of log(price) for one answer
LEAST = 1e-6  # tokens: less is what halving and rounding leave
FEW = 60.0  # answers, of which the mean and the steps count by half: the first ones would throw the price to and fro
MARGIN = math.log(2.0)  # of log(price) beyond every price at which a recent request would have changed its tier


class Answer(NamedTuple):
    """One answer, expected or served.

    Attributes:
        tokens: Output tokens.
        loss: Share of them, 0..1, that differ from the highest precision's: measured, else expected.
        allowed: The share that the budget allows for it.
        priced: The tiers that its decision chose from by price.
    """

    tokens: int
    loss: float
    allowed: float
    priced: Sequence[Priced] = ()


@dataclass(
    slots=True, unsafe_hash=True
)  # two are made for each request: a frozen one takes three times as long to make
class BudgetState:
    """What is known of recent answers: sums of tokens that halve each half-life, and the price. Never changed once returned.

    Attributes:
        at: Seconds since 1970 at which the sums were as given.
        log_price: Logarithm of the price in engine-seconds a differing token; None: no request had a choice yet.
        answers: Their number.
        tokens: Output tokens.
        lost: Of these, those that differ from the highest precision's, as measured or expected.
        allowed: Of these, those that the budget allows to differ.
        reach: By how many of these the choice of tiers could have changed ``lost``.
        lowest: Logarithm of the lowest price at which a recent request would have changed its tier; ``highest`` likewise.
    """

    at: float = 0.0
    log_price: float | None = None
    answers: float = 0.0
    tokens: float = 0.0
    lost: float = 0.0
    allowed: float = 0.0
    reach: float = 0.0
    lowest: float = 0.0
    highest: float = 0.0

    @property
    def price(self) -> float | None:
        """Return the price of loss in engine-seconds a differing token; None: not known yet."""
        return None if self.log_price is None else math.exp(self.log_price)

    @property
    def mean(self) -> float | None:
        """Return the running mean loss, 0..1; None: nothing was answered lately."""
        return self.lost / self.tokens if self.tokens > LEAST else None

    @property
    def budget(self) -> float | None:
        """Return the share, 0..1, that the budget allowed of the same answers."""
        return self.allowed / self.tokens if self.tokens > LEAST else None

    def faded(self, now: float, half_life_s: float) -> BudgetState:
        """Return the state at a later time."""
        return self if now <= self.at else self._at(now, half_life_s)

    def after(self, answer: Answer, now: float, half_life_s: float) -> BudgetState:
        """Return the state after one more answer."""
        state = self._at(now, half_life_s)
        if answer.tokens <= 0:
            return state
        _count(state, answer, 1.0)
        turns = turning_prices(answer.priced)
        if turns:
            _take_in(state, math.log(turns[0]), math.log(turns[-1]), answer.tokens / state.tokens)
        _move(state, answer.tokens, answer.tokens * (answer.loss - answer.allowed))
        return state

    def corrected(
        self, expected: Answer, expected_at: float, answer: Answer, now: float, half_life_s: float
    ) -> BudgetState:
        """Return the state as if it had been known at ``expected_at`` what an answer became."""
        state = self._at(now, half_life_s)
        left = 0.5 ** (max(now - expected_at, 0.0) / half_life_s)
        _count(state, expected, -left)
        _count(state, answer, left)
        beyond = answer.tokens * (answer.loss - answer.allowed) - expected.tokens * (expected.loss - expected.allowed)
        _move(state, answer.tokens - expected.tokens, beyond)
        return state

    def _at(self, now: float, half_life_s: float) -> BudgetState:
        """Return a state of one's own, at a later time: sums fade, the price stays."""
        left = 0.5 ** ((now - self.at) / half_life_s) if now > self.at else 1.0
        return BudgetState(
            max(now, self.at),
            self.log_price,
            self.answers * left,
            self.tokens * left,
            self.lost * left,
            self.allowed * left,
            self.reach * left,
            self.lowest,
            self.highest,
        )

    def joined(self, earlier: BudgetState, half_life_s: float, base: BudgetState) -> BudgetState:
        """Return another state with what this one has gained since an earlier state of itself."""
        if self is earlier:
            return base
        now = max(self.at, base.at)
        own, before, base = (each.faded(now, half_life_s) for each in (self, earlier, base))
        moved = own
        if base.log_price is not None:  # a first price of one's own gives way to the others'
            step = 0.0 if own.log_price is None or before.log_price is None else own.log_price - before.log_price
            moved = replace(own if own.log_price is not None else base, log_price=base.log_price + step)
        return replace(
            moved,
            answers=max(base.answers + own.answers - before.answers, 0.0),
            tokens=max(base.tokens + own.tokens - before.tokens, 0.0),
            lost=max(base.lost + own.lost - before.lost, 0.0),
            allowed=max(base.allowed + own.allowed - before.allowed, 0.0),
            reach=max(base.reach + own.reach - before.reach, 0.0),
        )


def _count(state: BudgetState, answer: Answer, weight: float) -> None:
    """Add an answer's tokens to the sums; none falls below zero."""
    losses = [option.loss for option in answer.priced]
    tokens = weight * answer.tokens
    state.answers = max(state.answers + weight * (answer.tokens > 0), 0.0)
    state.tokens = max(state.tokens + tokens, 0.0)
    state.lost = max(state.lost + tokens * answer.loss, 0.0)
    state.allowed = max(state.allowed + tokens * answer.allowed, 0.0)
    if losses:
        state.reach = max(state.reach + tokens * (max(losses) - min(losses)), 0.0)


def _take_in(state: BudgetState, low: float, high: float, weight: float) -> None:
    """Take in the prices at which a request would have changed its tier: at once outwards, slowly inwards."""
    if state.log_price is None:
        state.log_price, state.lowest, state.highest = (low + high) / 2, low, high
    else:
        state.lowest = min(low, state.lowest + weight * (low - state.lowest))
        state.highest = max(high, state.highest + weight * (high - state.highest))


def _move(state: BudgetState, tokens: float, beyond: float) -> None:
    """Move the price by what an answer, and the running mean, are off the budget.

    Args:
        state: One's own.
        tokens: Of the answer; below zero where fewer came than were expected.
        beyond: How many more of them differ from the highest precision's than are allowed.
    """
    if state.log_price is None or state.reach <= 0 or state.tokens <= LEAST:
        return
    known = state.answers / (state.answers + FEW)
    off = beyond + known * tokens * RECALL * (state.lost - state.allowed) / state.tokens
    step = known * GAIN * off / state.reach
    price = state.log_price + max(-STEP, min(STEP, step))
    state.log_price = max(state.lowest - MARGIN, min(state.highest + MARGIN, price))


def turning_prices(priced: Sequence[Priced]) -> list[float]:
    """Return the prices, by size, at which a request would change its tier, in engine-seconds a differing token.

    They are the slopes of the lower convex hull of cost over loss: tiers above it are never the best.
    """
    hull: list[Priced] = []
    turns: list[float] = []
    for option in sorted(priced, key=lambda one: (one.cost, one.loss)):
        if hull and option.loss >= hull[-1].loss:
            continue
        turn = 0.0
        while hull:
            turn = (option.cost - hull[-1].cost) / (hull[-1].loss - option.loss)
            if turn > (turns[-1] if turns else 0.0):
                break
            hull.pop()
            del turns[-1:]
        if hull:
            turns.append(turn)
        hull.append(option)
    return turns


def middle_price(priced: Sequence[Priced]) -> float:
    """Return a price to begin with: between the lowest and the highest at which this request would change its tier."""
    turns = turning_prices(priced)
    return math.sqrt(turns[0] * turns[-1]) if turns else 0.0


def best(priced: Sequence[Priced], price: float | None, *, lossless: bool = False) -> Priced:
    """Return the tier with the least cost + price * loss; of equals the first, that is, of the lowest precision.

    Args:
        priced: At least one.
        price: In engine-seconds a differing token; None: not known yet.
        lossless: Whatever it costs, the tier that loses least.
    """
    if lossless:
        return min(priced, key=lambda option: (option.loss, option.cost))
    if price is None:
        price = middle_price(priced)
    return min(priced, key=lambda option: option.cost + price * option.loss)
