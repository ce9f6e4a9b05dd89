"""The price of loss: no other assignment is cheaper for what it loses, and the mean loss of live answers meets the budget."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import deque
from typing import TYPE_CHECKING

import pytest

from router.policy.budget import STEP, Answer, BudgetState, best, middle_price, turning_prices
from router.policy.decision import Priced
from tiers.spec import STANDARD_TIERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FAST, BALANCED, PRECISE = STANDARD_TIERS
HALF_LIFE_S = 100.0
LOSSES = {"chat": (0.2, 0.06), "code": (0.08, 0.03), "math": (0.12, 0.05)}  # fast, balanced


def options(fast: tuple[float, float], balanced: tuple[float, float], precise: float) -> tuple[Priced, ...]:
    return Priced(FAST, *fast), Priced(BALANCED, *balanced), Priced(PRECISE, precise, 0.0)


def drawn(rng: random.Random) -> tuple[Priced, ...]:
    """Any costs and losses, a dear tier that loses more among them."""
    return options((rng.random(), rng.random()), (rng.random(), rng.random()), rng.random())


@pytest.mark.parametrize("seed", range(30))
def test_no_assignment_is_cheaper_that_loses_no_more(seed: int) -> None:
    """By enumeration: 5 requests of different lengths, 3 tiers, 243 assignments, any price."""
    rng = random.Random(seed)
    requests = [(rng.randint(1, 9), drawn(rng)) for _ in range(5)]
    price = 0.5 * seed
    chosen = [best(priced, price) for _, priced in requests]
    cost = sum(n * option.cost for (n, _), option in zip(requests, chosen, strict=True))
    lost = sum(n * option.loss for (n, _), option in zip(requests, chosen, strict=True))
    for other in itertools.product(*(priced for _, priced in requests)):
        if sum(n * option.loss for (n, _), option in zip(requests, other, strict=True)) <= lost:
            assert sum(n * option.cost for (n, _), option in zip(requests, other, strict=True)) >= cost - 1e-12


@pytest.mark.parametrize("seed", range(20))
def test_between_two_turning_prices_a_request_keeps_its_tier(seed: int) -> None:
    """And it changes at each: to less loss as the price rises."""
    priced = drawn(random.Random(seed))
    turns = turning_prices(priced)
    assert turns == sorted(turns)
    bounds = [0.0, *turns, 2 * turns[-1] if turns else 1.0]
    taken = []
    for low, high in itertools.pairwise(bounds):
        found = {best(priced, low + share * (high - low)) for share in (0.01, 0.5, 0.99)}
        assert len(found) == 1
        taken += found
    assert len(set(taken)) == len(bounds) - 1
    assert [option.loss for option in taken] == sorted((option.loss for option in taken), reverse=True)
    assert min(turns, default=0.0) <= middle_price(priced) <= max(turns, default=0.0)


def test_equal_tiers_and_a_budget_of_nothing() -> None:
    """Of equals the lower precision is taken; without any loss, the tier that loses least, then the cheapest."""
    same = (Priced(FAST, 1.0, 0.0), Priced(BALANCED, 1.0, 0.0))
    assert best(same, 5.0).tier is FAST
    assert turning_prices(same) == []
    assert best(options((0.1, 0.2), (0.5, 0.01), 9.0), None, lossless=True).tier is PRECISE
    assert best((*same, Priced(PRECISE, 0.5, 0.0)), None, lossless=True).tier is PRECISE


def served(
    seed: int,
    mix: Callable[[float], dict[str, float]],
    *,
    rate: float,
    budget: float | None = None,
    hours: float = 8,
    open_: int = 0,
) -> Iterator[tuple[float, BudgetState, int, Priced, tuple[Priced, ...]]]:
    """Serve random traffic by the price as it moves, so many requests open at once.

    Yields half-lives passed, state, tokens, choice and options.
    """
    rng, state, now = random.Random(seed), BudgetState(), 0.0
    running: deque[Answer] = deque()
    while now < hours * HALF_LIFE_S:
        now += rng.expovariate(rate)
        shares = mix(now / HALF_LIFE_S)
        fast, balanced = LOSSES[rng.choices(list(shares), list(shares.values()))[0]]
        tokens = max(1, int(rng.expovariate(1 / 120)))
        read = rng.choice((30, 200, 1500)) / tokens  # prompt tokens for each output token
        priced = options(
            (0.004 + 0.0002 * read, fast * rng.uniform(0.5, 1.5)),
            (0.0065 + 0.00018 * read, balanced),
            0.01 + 0.0002 * read,
        )
        taken = best(priced, state.price)
        running.append(Answer(tokens, taken.loss, balanced if budget is None else budget, priced))
        if len(running) > open_:
            state = state.after(running.popleft(), now, HALF_LIFE_S)
        yield now / HALF_LIFE_S, state, tokens, taken, priced


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("budget", [None, 0.01, 0.1])
def test_the_mean_meets_the_budget(seed: int, budget: float | None) -> None:
    """Like FP8 everywhere, or a number: within 10 % after a half-life, and cheaper than FP8 where it loses as much."""
    found = [x for x in served(seed, lambda _: {"chat": 5, "code": 3, "math": 2}, rate=10, budget=budget) if x[0] > 1]
    tokens = sum(n for _, _, n, _, _ in found)
    lost = sum(n * taken.loss for _, _, n, taken, _ in found) / tokens
    cost = sum(n * taken.cost for _, _, n, taken, _ in found) / tokens
    allowed = sum(n * priced[1].loss for _, _, n, _, priced in found) / tokens if budget is None else budget
    assert lost == pytest.approx(allowed, rel=0.05)
    assert all(state.mean == pytest.approx(state.budget, rel=0.15) for _, state, *_ in found)
    if budget is None:
        assert cost < sum(n * priced[1].cost for _, _, n, _, priced in found) / tokens


@pytest.mark.parametrize("after", ["code", "chat"])
def test_the_mean_comes_back_after_a_step_in_the_traffic(after: str) -> None:
    """Half chat, then one class alone: a half-life later the mean is at the budget again."""
    found = list(served(4, lambda t: {"chat": 5, "code": 5} if t < 4 else {after: 1}, rate=20))
    then = next(state for at, state, *_ in found if at > 5)
    assert then.mean == pytest.approx(then.budget, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_the_first_answers_do_not_throw_the_price_about(seed: int) -> None:
    """The mean of a few answers says little: the price of the first hundred stays near that of the next thousand."""
    mix = {"chat": 5.0, "code": 3.0, "math": 2.0}
    states = [state for _, state, *_ in served(seed, lambda _: mix, rate=10, hours=2, open_=15)]
    found = [state.price for state in states if state.price is not None]
    usual = statistics.median(found[100:1100])
    assert usual / 4 < min(found[:100])
    assert max(found[:100]) < 3 * usual


def test_answers_that_take_as_long_as_the_mean_remembers() -> None:
    """They count as soon as their tier is chosen: the price stands still, and no more is spent than by ``balanced``."""
    rng, state, now = random.Random(3), BudgetState(), 0.0
    running: list[tuple[float, float, Answer, Answer]] = []
    found: list[tuple[float, Answer, float, float]] = []
    while now < 40 * HALF_LIFE_S:
        now += rng.expovariate(2)
        while running and running[0][0] <= now:
            ended, began, expected, answer = running.pop(0)
            state = state.corrected(expected, began, answer, ended, HALF_LIFE_S)
        fast, balanced = LOSSES[rng.choice(list(LOSSES))]
        priced = options((0.004, fast * rng.uniform(0.5, 1.5)), (0.006, balanced), 0.01)
        taken, tokens = best(priced, state.price), max(1, int(rng.expovariate(1 / 120)))
        expected, answer = (Answer(n, taken.loss, balanced, priced) for n in (120, tokens))
        state = state.after(expected, now, HALF_LIFE_S)
        running.append((now + HALF_LIFE_S * tokens / 120, now, expected, answer))
        running.sort(key=lambda one: one[0])
        if now > 5 * HALF_LIFE_S and state.price is not None:
            found.append((state.price, answer, taken.cost, priced[1].cost))
    prices = statistics.quantiles((price for price, *_ in found), n=20)
    assert prices[-1] < 3 * prices[0]
    lost, allowed = sum(a.tokens * a.loss for _, a, *_ in found), sum(a.tokens * a.allowed for _, a, *_ in found)
    assert lost == pytest.approx(allowed, rel=0.05)
    assert sum(a.tokens * cost for _, a, cost, _ in found) <= 1.01 * sum(a.tokens * cost for _, a, _, cost in found)


def test_what_was_expected_gives_way_to_what_came() -> None:
    """In the sums as if it had been known from the start; an answer that never came leaves nothing."""
    priced = options((1.0, 0.3), (2.0, 0.1), 4.0)
    base = BudgetState().after(Answer(100, 0.1, 0.1, priced), 1.0, HALF_LIFE_S)
    expected, came = Answer(50, 0.3, 0.1, priced), Answer(80, 0.1, 0.1, priced)
    known = base.after(came, 2.0, HALF_LIFE_S).faded(9.0, HALF_LIFE_S)
    put_right = base.after(expected, 2.0, HALF_LIFE_S).corrected(expected, 2.0, came, 9.0, HALF_LIFE_S)
    failed = expected._replace(tokens=0)
    never = base.after(expected, 2.0, HALF_LIFE_S).corrected(expected, 2.0, failed, 9.0, HALF_LIFE_S)
    for name in ("at", "answers", "tokens", "lost", "allowed", "reach"):
        assert getattr(put_right, name) == pytest.approx(getattr(known, name))
        assert getattr(never, name) == pytest.approx(getattr(base.faded(9.0, HALF_LIFE_S), name))
    assert base.log_price is not None
    assert never.log_price == pytest.approx(base.log_price, abs=STEP)
    right = base.after(came, 2.0, HALF_LIFE_S).corrected(came, 2.0, came, 9.0, HALF_LIFE_S)
    assert right.log_price == pytest.approx(base.after(came, 2.0, HALF_LIFE_S).log_price)


def test_a_budget_out_of_reach_does_not_run_the_price_away() -> None:
    """Too wide or too narrow to matter: the price stops where every request takes one tier, and comes back at once."""
    for budget, tier in ((0.9, FAST), (0.0, PRECISE)):
        *_, (_, state, _, taken, priced) = served(5, lambda _: {"chat": 1}, rate=10, budget=budget)
        assert taken.tier is tier
        assert state.log_price is not None
        turns = turning_prices(priced)
        assert abs(state.log_price - math.log(turns[0])) < 6 * STEP + 3
        assert state.lowest - 1 < state.log_price < state.highest + 1


def test_one_answer_moves_the_price_by_a_bounded_step() -> None:
    """However long it was, and however few came before."""
    priced = options((1.0, 0.3), (2.0, 0.1), 4.0)
    first = BudgetState().after(Answer(10, 0.1, 0.1, priced), 1.0, HALF_LIFE_S)
    assert first.price == pytest.approx(middle_price(priced))
    assert first.log_price is not None
    later = first.after(Answer(1_000_000, 0.3, 0.0, priced), 2.0, HALF_LIFE_S)
    assert later.log_price == pytest.approx(first.log_price + STEP)
    assert first.after(Answer(0, 0.3, 0.0, priced), 2.0, HALF_LIFE_S).log_price == first.log_price


def test_answers_without_a_choice_count_and_move_no_price() -> None:
    """While one tier serves alone nothing can be chosen: its loss is in the mean all the same."""
    alone = (Priced(FAST, 1.0, 0.2),)
    state = BudgetState().after(Answer(10, 0.2, 0.05, alone), 1.0, HALF_LIFE_S)
    assert (state.price, state.mean, state.budget) == (None, 0.2, 0.05)
    assert BudgetState().mean is None
    assert BudgetState().budget is None


def test_sums_halve_and_the_price_stays() -> None:
    """Nothing is known of the traffic meanwhile; a clock that is set back changes nothing."""
    state = BudgetState(at=10.0, log_price=1.0, tokens=8.0, lost=4.0, allowed=2.0, reach=6.0)
    later = state.faded(10.0 + 2 * HALF_LIFE_S, HALF_LIFE_S)
    assert (later.tokens, later.lost, later.allowed, later.reach, later.log_price) == (2.0, 1.0, 0.5, 1.5, 1.0)
    assert state.faded(5.0, HALF_LIFE_S) is state


def test_what_several_have_added_is_joined() -> None:
    """Two that went on from one state: sums and steps of both count once, whoever is joined first."""
    priced = options((1.0, 0.3), (2.0, 0.1), 4.0)
    base = BudgetState().after(Answer(100, 0.1, 0.1, priced), 1.0, HALF_LIFE_S)
    one = base.after(Answer(50, 0.3, 0.1, priced), 2.0, HALF_LIFE_S)
    two = base.after(Answer(70, 0.0, 0.1, priced), 3.0, HALF_LIFE_S)
    joined = two.joined(base, HALF_LIFE_S, one.joined(base, HALF_LIFE_S, base))
    other = one.joined(base, HALF_LIFE_S, two.joined(base, HALF_LIFE_S, base))
    for name in ("log_price", "answers", "tokens", "lost", "allowed", "reach"):
        assert getattr(joined, name) == pytest.approx(getattr(other, name))
    assert joined.tokens == pytest.approx(base.faded(3.0, HALF_LIFE_S).tokens + 50 * 0.5**0.01 + 70)
    assert base.log_price is not None
    assert one.log_price is not None
    assert two.log_price is not None
    assert joined.log_price == pytest.approx(one.log_price + two.log_price - base.log_price)
    assert base.joined(base, HALF_LIFE_S, one) is one  # nothing was added


def test_a_first_price_gives_way_to_the_others() -> None:
    """A router that starts finds a price of its own at its first request; the shared one counts."""
    priced = options((1.0, 0.3), (2.0, 0.1), 4.0)
    shared = BudgetState(
        at=1.0, log_price=-7.0, tokens=10.0, lost=1.0, allowed=1.0, reach=3.0, lowest=-8.0, highest=-6.0
    )
    empty = BudgetState(at=1.0)
    fresh = empty.after(Answer(10, 0.1, 0.1, priced), 2.0, HALF_LIFE_S)
    joined = fresh.joined(empty, HALF_LIFE_S, shared)
    assert joined.log_price == -7.0
    assert joined.tokens == pytest.approx(10 * 0.5**0.01 + 10)
