"""Choose a tier. Pure: facts about the request and a fleet snapshot in, a decision with reasons out.

Precedence: what is possible (context, readiness, free slots), then ``require``, then the SLA's bounds, then the hint, then
the loss that is expected on prompts of this kind. Of the tiers whose loss is allowed, the one serves that should finish
soonest for the caller; engine time decides between those whose finish differs by less than a person notices. Small talk goes
to the lowest precision. A conversation stays on the tier that holds it, unless leaving saves more than it costs to
compute the conversation again.

If the objective is the best answer, the allowed loss rises with the load, from a negligible loss up to the loss budget: it
is the value of engine time, which is nothing while engines idle. If it is the cheapest tier, the loss budget is allowed at
any load, and the least engine time serves, however late it finishes within the request's bounds.
"""

from __future__ import annotations

import math
from operator import attrgetter
from statistics import NormalDist
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from classifier import PromptClass
from router.policy.decision import (
    CALLERS_OWN,
    Basis,
    Decision,
    ExpectedQuality,
    ExpectedTiming,
    Refusal,
    TierComparison,
    TierEstimate,
    Unfitness,
    are_all_known_under_load,
    is_noticeably_later,
    latest_unnoticed_ms,
)
from router.policy.explain import obstacle_text, reason, refusal_reason
from router.policy.losses import Z90
from tiers.choice import READY, Demand, best_candidate, expected_demand
from tiers.spec import UNKNOWN, TierName
from tiers.speed import HALF_LIFE_S, IDLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from router.policy.decision import (
        Degraded,
        Objective,
        Obstacle,
        PolicyParameters,
        RoutingQuery,
        Sla,
    )
    from tiers.choice import Candidate, CorrectedTimes
    from tiers.snapshot import FleetSnapshot, TierSnapshot
    from tiers.spec import TierSpec
    from tiers.speed import SpeedModel

    ObstacleCheck = Callable[[TierSpec, RoutingQuery], Obstacle | None]

STARTING_RETRY_S = 10.0  # engines start and warm in tens of seconds
# share of the highest precision's slots up to which engine time is worth nothing
PLENTIFUL_SHARE = 0.5
# Later first token that small talk may have to keep higher precisions free: up to a second nobody's thought is interrupted
# (Nielsen 1993).
SMALL_TALK_WAIT_MS = 1000.0
UNKNOWN_RETRY_S = 1.0  # a slot frees up with the next finished request
# A refusal names the obstacle that is likeliest to pass: a caller who can wait should hear of that one.
LIKELIEST_TO_PASS: tuple[Obstacle, ...] = (
    Refusal.AT_CAPACITY,
    Refusal.NOT_READY,
    Refusal.TOO_LONG,
    Refusal.UNSUPPORTED,
    Refusal.NO_ADAPTER,
    Refusal.NOT_ALLOWED,
    Refusal.EXCLUDED,
)
_slots_of = attrgetter("slots")
_NORMAL = NormalDist()
_BASIS_OF_DEGRADED: dict[Degraded, Basis] = {
    "quality": Basis.DEGRADED_QUALITY,
    "latency": Basis.DEGRADED_LATENCY,
    "unmeasured": Basis.DEGRADED_UNMEASURED,
}


def decide(
    query: RoutingQuery, fleet: FleetSnapshot, table: PolicyParameters
) -> Decision:
    """Choose the tier that serves a request, or refuse it.

    Tiers are compared by what is possible on them, how fast they would answer and how good the answer would be. What is
    left is which of them serves.
    """
    if query.adapter is not None:
        table = table.with_adapter(query.adapter)
    demand = _demand(query, fleet)
    comparison = _compare_tiers(query, fleet, table, demand)
    acceptable = [
        estimate for estimate in comparison.considered if estimate.meets_bounds
    ]
    if acceptable:
        return _serve(comparison, acceptable)
    possible = [
        estimate for estimate in comparison.considered if estimate.obstacle is None
    ]
    if not possible or query.require:
        return _refuse(comparison, fleet, demand, is_possible=bool(possible))
    return _degrade(comparison, possible, fleet, demand)


def _demand(query: RoutingQuery, fleet: FleetSnapshot) -> Demand:
    """Return what the request is expected to need of a replica."""
    return expected_demand(
        query.tokens_to_read,
        query.max_tokens,
        query.sequences,
        output_share=fleet.output_share,
        long_prompt_tokens=fleet.long_prompt_tokens,
        answer_tokens=fleet.answer_tokens,
    )


class _Offer(Struct, frozen=True):
    """What a tier has for a request: the replica that would serve it, and an obstacle that does not depend on the load."""

    tier: TierSnapshot
    candidate: Candidate
    obstacle: Obstacle | None
    held_tokens: int


class _Market(Struct, frozen=True):
    """What is the same for all tiers of a decision.

    Attributes:
        confidence_z: The confidence asked for, as a quantile of the normal distribution.
        scarcity: Of engine time, 0..1.
        bound: See ``TierComparison``.
        sequences: In the fleet, the request's own included.
        tokens_after_first: Expected output tokens of each answer after its first.
        output_tokens: Expected output tokens of all answers, at least one.
    """

    confidence_z: float
    scarcity: float
    bound: float | None
    sequences: int
    tokens_after_first: float
    output_tokens: float


def _compare_tiers(
    query: RoutingQuery, fleet: FleetSnapshot, table: PolicyParameters, demand: Demand
) -> TierComparison:
    """Estimate what each tier would do with the request; nothing is chosen yet."""
    checks = _obstacle_checks(query)
    offers = []
    for tier in fleet.tiers:
        best = best_candidate(tier, demand, fleet.load)
        obstacle = _lasting_obstacle(
            checks, tier.spec, query, is_ready=best.replica is not None
        )
        held_tokens = 0
        if query.conversation_tokens:
            held_tokens = _held_tokens(tier, query.conversation_tokens)
        offers.append(_Offer(tier, best, obstacle, held_tokens))
    market = _market(query, table, offers, demand=demand)
    is_below_hint = query.hint is not None
    estimates = []
    for offer in offers:
        if offer.tier.spec.name is query.hint:
            is_below_hint = False
        estimates.append(
            _estimate(
                offer,
                query,
                table,
                market=market,
                is_below_hint=is_below_hint,
            )
        )
    return TierComparison(
        query,
        table,
        confidence_z=market.confidence_z,
        scarcity=market.scarcity,
        estimates=tuple(estimates),
        bound=market.bound,
    )


def _held_tokens(tier: TierSnapshot, conversation_tokens: int) -> int:
    """Return the most tokens of a conversation that a replica of a tier holds; 0: none has computed its turn before."""
    if tier.cached is None:
        return 0
    most_tokens = max(tier.cached, default=0)
    return most_tokens if most_tokens >= conversation_tokens else 0


def _market(
    query: RoutingQuery,
    table: PolicyParameters,
    offers: Sequence[_Offer],
    demand: Demand,
) -> _Market:
    highest: TierSnapshot | None = None
    sequences = query.sequences
    for offer in offers:
        if offer.obstacle is None and offer.candidate.replica is not None:
            highest = offer.tier
        # A ``map`` in C takes half the time of a loop, and a tier may have hundreds of replicas.
        sequences += sum(map(_slots_of, offer.tier.replicas))
    confidence = query.sla.confidence
    if confidence is None:
        confidence = table.sla_confidence
    bound = query.sla.max_quality_loss
    if bound is None:
        bound = table.max_loss.get(query.features.prompt_class)
    return _Market(
        confidence_z=_NORMAL.inv_cdf(confidence),
        scarcity=scarcity_at(table.objective, _taken_share(highest)),
        bound=bound,
        sequences=sequences,
        tokens_after_first=max(demand.output_tokens / demand.sequences - 1, 0.0),
        output_tokens=max(1.0, demand.output_tokens),
    )


def _taken_share(highest: TierSnapshot | None) -> float:
    """Return the share of slots that is taken of the highest precision that may serve and is ready.

    It is the tier that would answer if loss alone counted, so its next free slot is what a lossier tier can save. Slots are
    the sequences that its engines compute at once, and not those that may wait there besides.
    """
    if highest is None:
        return 0.0
    max_num_seqs = highest.spec.max_num_seqs
    taken_slots = 0
    slots = 0
    for replica in highest.replicas:
        if replica.status is READY:
            taken_slots += replica.slots
            limit = replica.limit
            slots += limit if limit < max_num_seqs else max_num_seqs  # noqa: FURB136  ``min`` takes most of the loop's time
    return taken_slots / (slots or 1)


def scarcity_at(objective: Objective, taken_share: float) -> float:
    """Return how scarce engine time is, 0..1: the share of the loss budget that is allowed."""
    if objective == "cheapest":
        return 1.0
    return min(max((taken_share - PLENTIFUL_SHARE) / (1 - PLENTIFUL_SHARE), 0.0), 1.0)


def _estimate(
    offer: _Offer,
    query: RoutingQuery,
    table: PolicyParameters,
    market: _Market,
    *,
    is_below_hint: bool,
) -> TierEstimate:
    """Predict what one tier would do with a request: whether it can, how fast, and how good its answer would be."""
    spec = offer.tier.spec
    candidate = offer.candidate
    batch_size = min(spec.max_num_seqs, market.sequences)
    obstacle = _obstacle_now(offer)
    state = READY
    text = ""
    if obstacle is not None:
        state = offer.tier.status
        text = obstacle_text(obstacle, offer.tier, query)
    timing = _timing(candidate.times, query.sla, market)
    quality = _quality(
        spec.name, query, table, market=market, is_below_hint=is_below_hint
    )
    price = table.prices.get(spec.name, 1.0)
    cost = _cost(candidate, market, batch_size=batch_size, price=price)
    is_within_bounds = not timing.is_slow and not quality.is_lossy
    return TierEstimate(
        spec.name,
        spec.precision,
        state=state,
        candidate=candidate,
        batch_size=batch_size,
        timing=timing,
        quality=quality,
        cost=cost,
        obstacle=obstacle,
        obstacle_text=text,
        meets_bounds=obstacle is None and is_within_bounds,
        held_tokens=offer.held_tokens,
    )


# Whether a tier can serve the request at all.


def _obstacle_checks(query: RoutingQuery) -> list[ObstacleCheck]:
    """Return the checks that can keep a tier from serving a request, whatever its load, in the order in which they count.

    Every such check is listed here, with the requests that it concerns. Most requests need the last one only: not to make
    the others for each tier saves a tenth of a decision.
    """
    checks: list[ObstacleCheck] = []
    if query.allowed is not None:
        checks.append(_check_key)
    if query.precisions is not None or query.only is not None:
        checks.append(_check_callers_choice)
    if query.adapter is not None:
        checks.append(_check_adapter)
    if query.undraftable:
        checks.append(_check_draft)
    checks.append(_check_context)
    return checks


def _lasting_obstacle(
    checks: Sequence[ObstacleCheck],
    spec: TierSpec,
    query: RoutingQuery,
    *,
    is_ready: bool,
) -> Obstacle | None:
    """Return why a tier does not serve a request, whatever its load; None: it does."""
    if spec.held and not (query.require and query.hint is spec.name):
        return Refusal.NOT_READY
    for check in checks:
        obstacle = check(spec, query)
        if obstacle is None:
            continue
        if (
            obstacle is Refusal.EXCLUDED
            and not is_ready
            and _may_turn_out_allowed(spec, query)
        ):
            return Refusal.NOT_READY
        return obstacle
    return None


def _obstacle_now(offer: _Offer) -> Obstacle | None:
    """Return why a tier does not serve a request now: for its lasting obstacle, or because none of its replicas takes it."""
    if offer.obstacle is not None or offer.candidate.is_free:
        return offer.obstacle
    if offer.candidate.replica is None:
        return Refusal.NOT_READY
    return Refusal.AT_CAPACITY


def _check_key(spec: TierSpec, query: RoutingQuery) -> Obstacle | None:
    if query.allows(spec.name):
        return None
    return Refusal.NOT_ALLOWED


def _check_callers_choice(spec: TierSpec, query: RoutingQuery) -> Obstacle | None:
    if query.takes(spec):
        return None
    return Refusal.EXCLUDED


def _may_turn_out_allowed(spec: TierSpec, query: RoutingQuery) -> bool:
    """Tell whether a tier's precision, not known before it is ready, may be one that the request allows."""
    return spec.precision == UNKNOWN and (query.only is None or spec.name in query.only)


def _check_adapter(spec: TierSpec, query: RoutingQuery) -> Obstacle | None:
    if query.adapter in spec.adapters:
        return None
    return Refusal.NO_ADAPTER


def _check_draft(spec: TierSpec, _query: RoutingQuery) -> Obstacle | None:
    if spec.draft is None:
        return None
    return Refusal.UNSUPPORTED


def _check_context(spec: TierSpec, query: RoutingQuery) -> Obstacle | None:
    if query.prompt_tokens + query.max_tokens <= spec.max_model_len:
        return None
    return Refusal.TOO_LONG


def longest_context_for(query: RoutingQuery, fleet: FleetSnapshot) -> int:
    """Return the longest context of the tiers that may serve a request of any length; of those that are ready, if any is.

    Neither load nor bounds count. 0: no tier may.
    """
    required_tier = query.hint if query.require else None
    query_without_tokens = replace(query, prompt_tokens=0, max_tokens=0)
    checks = _obstacle_checks(query_without_tokens)
    able_tiers = []
    for tier in fleet.tiers:
        may_be_used = not tier.spec.absent and required_tier in {None, tier.spec.name}
        if (
            may_be_used
            and _lasting_obstacle(
                checks, tier.spec, query_without_tokens, is_ready=True
            )
            is None
        ):
            able_tiers.append(tier)
    ready_tiers = [tier for tier in able_tiers if tier.ready]
    return max(
        (tier.spec.max_model_len for tier in ready_tiers or able_tiers), default=0
    )


def within_context(query: RoutingQuery, fleet: FleetSnapshot) -> RoutingQuery:
    """Return a query whose caller named no limit with as many output tokens as the longest context leaves, at least one."""
    if query.prompt_tokens + query.max_tokens <= max(
        [tier.spec.max_model_len for tier in fleet.tiers]
    ):
        return query
    tokens_left = longest_context_for(query, fleet) - query.prompt_tokens
    return replace(query, max_tokens=max(min(query.max_tokens, tokens_left), 1))


# The times that are expected of each tier.


def _timing(times: CorrectedTimes | None, sla: Sla, market: _Market) -> ExpectedTiming:
    """Hold a tier's times against the bounds on time, with the confidence asked for.

    An unknown time meets no bound. Times are log-normally distributed about the prediction.
    """
    is_slow = False
    bound_ratio = 0.0
    if times is None:
        if sla.ttft_ms is not None or sla.tpot_ms is not None:
            is_slow = True
            bound_ratio = math.inf
        return ExpectedTiming(is_slow, bound_ratio, finish_ms=None)
    if sla.tpot_ms is not None:
        safe_tpot_ms = times.tpot_ms * math.exp(market.confidence_z * times.tpot_spread)
        is_slow = safe_tpot_ms > sla.tpot_ms
        bound_ratio = safe_tpot_ms / sla.tpot_ms
    if sla.ttft_ms is not None:
        safe_ttft_ms = times.ttft_ms * math.exp(market.confidence_z * times.ttft_spread)
        is_slow = is_slow or safe_ttft_ms > sla.ttft_ms
        bound_ratio = max(bound_ratio, safe_ttft_ms / sla.ttft_ms)
    # The whole answer takes its queue and prefill, then each further token.
    finish_ms = times.ttft_ms + market.tokens_after_first * times.tpot_ms
    return ExpectedTiming(is_slow, bound_ratio, finish_ms=finish_ms)


def _cost(
    candidate: Candidate, market: _Market, *, batch_size: int, price: float
) -> float | None:
    """Return the engine-seconds that the request takes, times the tier's price; None: its speed is not known."""
    if candidate.replica is None or candidate.replica.speed is None:
        return None
    engine_ms = candidate.replica.speed.engine_ms(
        candidate.uncached_tokens, market.output_tokens, batch_size
    )
    drift = 1.0 if candidate.times is None else candidate.times.drift
    return engine_ms * drift / 1000 * price


# The quality that is expected of each tier's answer.


def _quality(
    tier: TierName,
    query: RoutingQuery,
    table: PolicyParameters,
    market: _Market,
    *,
    is_below_hint: bool,
) -> ExpectedQuality:
    """Hold the loss that is expected of a tier against what the request, its class and the loss budget allow."""
    loss = table.loss(tier, query.features)
    worst_loss = min(
        loss.mean + (loss.high - loss.mean) * market.confidence_z / Z90, 1.0
    )
    loss_bound = query.sla.max_quality_loss
    spare_budget = max(table.budget(tier) - table.negligible_loss, 0.0)
    unfitness = None
    if is_below_hint:
        unfitness = Unfitness.BELOW_HINT
    elif market.bound is not None and worst_loss > market.bound:
        unfitness = Unfitness.OVER_BOUND
    elif loss.mean > table.negligible_loss + spare_budget:
        unfitness = Unfitness.OVER_BUDGET
    return ExpectedQuality(
        loss,
        worst_loss,
        allowed_loss=table.negligible_loss + market.scarcity * spare_budget,
        is_lossy=loss_bound is not None and worst_loss > loss_bound,
        unfitness=unfitness,
    )


# The choice of the tier that serves.


def _serve(comparison: TierComparison, acceptable: Sequence[TierEstimate]) -> Decision:
    """Serve a request on one of the tiers that meet its bounds."""
    chosen, basis = _choose(comparison, acceptable)
    comparison = replace(comparison, chosen=chosen, basis=basis)
    degraded: tuple[Degraded, ...] = ()
    if basis is Basis.DEGRADED_QUALITY:
        degraded = ("quality",)
    return Decision(
        chosen.tier,
        reason(comparison, chosen),
        query=comparison.query,
        comparison=comparison,
        basis=basis,
        degraded=degraded,
    )


def _choose(
    comparison: TierComparison, acceptable: Sequence[TierEstimate]
) -> tuple[TierEstimate, Basis]:
    """Choose among the tiers that meet the request's bounds: at least one, by rising precision."""
    query = comparison.query
    table = comparison.table
    if query.hint is not None:
        for estimate in acceptable:
            if estimate.tier is query.hint:
                return estimate, Basis.HINT
    fit = [estimate for estimate in acceptable if not estimate.is_unfit]
    if not fit:
        return acceptable[-1], Basis.DEGRADED_QUALITY
    if query.sort is not None:
        sort = query.sort
        return min(fit, key=lambda estimate: estimate.order(sort)), Basis.SORT
    if query.features.prompt_class is PromptClass.SMALL_TALK:
        return _lowest_in_time(fit), Basis.SMALL_TALK
    allowed = _within_loss(fit)
    if are_all_known_under_load(allowed):
        chosen = _fastest_or_cheapest(allowed, table.objective)
    else:
        chosen = _lowest(allowed, table.max_slowdown)
    own = comparison.conversation_tier
    if (
        own is not None
        and own is not chosen
        and own in fit
        and _stays(comparison, own, chosen, allowed)
    ):
        return own, Basis.CONVERSATION
    return chosen, _basis(
        chosen, fit, acceptable=acceptable, negligible_loss=table.negligible_loss
    )


def _stays(
    comparison: TierComparison,
    own: TierEstimate,
    chosen: TierEstimate,
    allowed: Sequence[TierEstimate],
) -> bool:
    """Tell whether a conversation stays on its own tier, although another one would be chosen for the prompt alone.

    Both are within the request's bounds and the loss budget. It stays unless leaving saves more than it costs, and
    within a tool loop even if its own tier loses more than engine time is worth now: the model has begun something there.
    """
    table = comparison.table
    recompute_ms = chosen.recompute_ms(own)
    if _saves_time(own, chosen, recompute_ms):
        return False
    if own in allowed:
        counts_engine_time = (
            table.objective == "cheapest" or not comparison.query.in_tool_loop
        )
        price = table.prices.get(chosen.tier, 1.0)
        return not counts_engine_time or not _saves_engine_time(
            own, chosen, recompute_ms, price=price
        )
    if comparison.query.in_tool_loop:
        return True
    return own.quality.loss.mean <= _allowed_to_stay(
        comparison, own, chosen, recompute_ms
    )


def _saves_time(own: TierEstimate, chosen: TierEstimate, recompute_ms: float) -> bool:
    """Tell whether leaving a conversation's own tier saves its caller more time than computing the conversation again takes.

    That computing is in the predicted finish already, since it delays the caller. It delays the engine's other requests as
    much, and so counts once more.
    """
    if not (own.is_known_under_load and chosen.is_known_under_load):
        return False
    saved_ms = own.finishes_in_ms - chosen.finishes_in_ms
    is_noticed = is_noticeably_later(own.finishes_in_ms, chosen.finishes_in_ms)
    return is_noticed and saved_ms > recompute_ms


def _saves_engine_time(
    own: TierEstimate, chosen: TierEstimate, recompute_ms: float, price: float
) -> bool:
    """Tell whether leaving saves more engine time than computing the conversation again takes, counted twice."""
    if not (own.is_known_under_load and chosen.is_known_under_load):
        return False
    return own.order() - chosen.order() > recompute_ms / 1000 * price


def _allowed_to_stay(
    comparison: TierComparison,
    own: TierEstimate,
    chosen: TierEstimate,
    recompute_ms: float,
) -> float:
    """Return the loss up to which a conversation stays on its own tier, 0..1.

    The loss budget is what engine time is worth when all of it is wanted. Of a turn on another tier, the share that would go
    into computing the conversation again is wasted, and worth that share of the budget even while engines idle.
    """
    table = comparison.table
    wasted_share = 0.0
    if chosen.timing.finish_ms:
        wasted_share = min(recompute_ms / chosen.timing.finish_ms, 1.0)
    spare_budget = max(table.budget(own.tier) - table.negligible_loss, 0.0)
    return table.negligible_loss + max(comparison.scarcity, wasted_share) * spare_budget


def _lowest_in_time(fit: Sequence[TierEstimate]) -> TierEstimate:
    """Choose the lowest precision whose first token does not come long after another tier's."""
    known_ttft_ms = [
        estimate.times.ttft_ms for estimate in fit if estimate.times is not None
    ]
    if not known_ttft_ms:
        return fit[0]
    latest_ms = min(known_ttft_ms) + SMALL_TALK_WAIT_MS
    in_time = (
        estimate
        for estimate in fit
        if estimate.times is None or estimate.times.ttft_ms <= latest_ms
    )
    return next(in_time)


def _within_loss(fit: Sequence[TierEstimate]) -> list[TierEstimate]:
    """Return the tiers that lose no more than is allowed now; if the tiers that lose so little cannot serve, the best."""
    allowed = [estimate for estimate in fit if estimate.quality.is_allowed]
    if allowed:
        return allowed
    smallest_loss = min(estimate.quality.loss.mean for estimate in fit)
    return [estimate for estimate in fit if estimate.quality.loss.mean == smallest_loss]


def _fastest_or_cheapest(
    allowed: Sequence[TierEstimate], objective: Objective
) -> TierEstimate:
    """Choose the tier that should finish soonest, or the cheapest of those whose finish a person cannot tell apart."""
    if objective == "best":
        soonest_ms = min([estimate.finishes_in_ms for estimate in allowed])
        latest_ms = latest_unnoticed_ms(soonest_ms)
        allowed = [
            estimate for estimate in allowed if estimate.finishes_in_ms <= latest_ms
        ]
    return min(allowed, key=TierEstimate.order)


def _lowest(allowed: Sequence[TierEstimate], max_slowdown: float) -> TierEstimate:
    """Choose the lowest precision while no speed is measured under load, unless a higher one is far faster even so."""
    chosen = allowed[0]
    for higher in allowed[1:]:
        if _dominated(chosen.speed, higher.speed, max_slowdown):
            chosen = higher
    return chosen


def _dominated(
    lower: SpeedModel | None, higher: SpeedModel | None, max_slowdown: float
) -> bool:
    """Tell whether a lower precision is so much slower than a higher one that it has nothing to offer."""
    return (
        lower is not None
        and higher is not None
        and lower.step_ms(1) > max_slowdown * higher.step_ms(1)
    )


def _basis(
    chosen: TierEstimate,
    fit: Sequence[TierEstimate],
    acceptable: Sequence[TierEstimate],
    negligible_loss: float,
) -> Basis:
    """Return what the choice of a tier by its loss rests on.

    A tier that loses next to nothing was chosen for its loss only if it is alone in that. So it is compared with all
    acceptable tiers, not only with the fit ones: one that loses as little but is below the hint, or may lose more than the
    class allows, was passed over, but not because it is expected to lose more.
    """
    if chosen.quality.loss.mean > negligible_loss:
        if len(fit) > 1:
            return Basis.BUDGET
        return Basis.MIN_LOSS
    for rival in acceptable:
        if rival is not chosen and rival.quality.loss.mean <= negligible_loss:
            return Basis.NEGLIGIBLE
    return Basis.MIN_LOSS


def _degrade(
    comparison: TierComparison,
    possible: Sequence[TierEstimate],
    fleet: FleetSnapshot,
    demand: Demand,
) -> Decision:
    """Serve a request although no tier meets every bound, and say what is given up."""
    chosen = _nearest(comparison.query, possible, comparison.table)
    degraded = _given_up(chosen)
    basis = _BASIS_OF_DEGRADED[degraded[0]]
    comparison = replace(comparison, chosen=chosen, basis=basis, given_up=degraded)
    are_times_impossible = "latency" in degraded and not _could_any_meet_times(
        fleet, comparison, demand
    )
    return Decision(
        tier=chosen.tier,
        reason=reason(comparison, chosen),
        query=comparison.query,
        comparison=comparison,
        basis=basis,
        degraded=degraded,
        are_times_impossible=are_times_impossible,
    )


def _nearest(
    query: RoutingQuery, possible: Sequence[TierEstimate], table: PolicyParameters
) -> TierEstimate:
    """Choose where no tier meets every bound: give up what ``give_up`` names, if a tier keeps the other bound.

    A hinted tier that keeps it is taken. Else of those that keep the loss, that of the class too if one does, the least
    late: so load beyond what the tiers can do spreads over all of them. Of those that keep the latency, the one that
    loses least.
    """
    lossless = [estimate for estimate in possible if not estimate.quality.is_lossy]
    timely = [estimate for estimate in possible if not estimate.timing.is_slow]
    gives_up_latency = table.give_up == "latency"
    keeping = lossless if gives_up_latency else timely
    for estimate in keeping:
        if estimate.tier is query.hint:
            return estimate
    if lossless and (gives_up_latency or not timely):
        return _least_late(lossless)
    return _least_lossy(timely or possible)


def _least_late(lossless: Sequence[TierEstimate]) -> TierEstimate:
    """Choose the tier that misses its bounds on times by least, a fit one if there is any; of equals, the cheapest."""
    fit = [estimate for estimate in lossless if not estimate.is_unfit]
    return min(
        fit or lossless,
        key=lambda estimate: (estimate.timing.bound_ratio, estimate.order()),
    )


def _least_lossy(estimates: Sequence[TierEstimate]) -> TierEstimate:
    """Choose the tier that loses least; of equals, the highest precision."""
    return min(reversed(estimates), key=lambda estimate: estimate.quality.loss.mean)


def _given_up(chosen: TierEstimate) -> tuple[Degraded, ...]:
    """Return what a request does not get on a tier that does not meet its bounds; quality comes first."""
    given_up: list[Degraded] = []
    if chosen.quality.is_lossy or chosen.is_unfit:
        given_up.append("quality")
    if chosen.timing.is_slow and chosen.times is None:
        given_up.append("unmeasured")
    elif chosen.timing.is_slow:
        given_up.append("latency")
    return tuple(given_up)


def _could_any_meet_times(
    fleet: FleetSnapshot, comparison: TierComparison, demand: Demand
) -> bool:
    for tier, estimate in zip(fleet.tiers, comparison.estimates, strict=True):
        if _could_meet_times(tier, estimate, comparison, demand):
            return True
    return False


def _could_meet_times(
    tier: TierSnapshot,
    estimate: TierEstimate,
    comparison: TierComparison,
    demand: Demand,
) -> bool:
    """Tell whether a tier might meet the bounds on times at some load; one whose speed is not known might."""
    if estimate.obstacle in CALLERS_OWN or tier.spec.absent:
        return False
    is_any_ready = False
    for position, replica in enumerate(tier.replicas):
        if replica.status is not READY:
            continue
        is_any_ready = True
        if _meets_times_idle(
            replica.speed,
            tier.spec,
            comparison,
            demand,
            cached_tokens=tier.cached[position] if tier.cached else 0,
        ):
            return True
    return not is_any_ready


def _meets_times_idle(
    speed: SpeedModel | None,
    spec: TierSpec,
    comparison: TierComparison,
    demand: Demand,
    *,
    cached_tokens: int,
) -> bool:
    """Tell whether an idle replica would meet the bounds on times with the confidence asked for; True: not known."""
    if speed is None:
        return True
    sla = comparison.query.sla
    idle = speed.times(
        max(demand.prompt_tokens - cached_tokens, 0),
        IDLE,
        spec.max_num_seqs,
        output_share=demand.output_share,
        sequences=comparison.query.sequences,
    )
    safe_ttft_ms = idle.ttft_ms * math.exp(comparison.confidence_z * speed.ttft_spread)
    safe_tpot_ms = idle.tpot_ms * math.exp(comparison.confidence_z * speed.tpot_spread)
    is_first_late = sla.ttft_ms is not None and safe_ttft_ms > sla.ttft_ms
    are_others_late = sla.tpot_ms is not None and safe_tpot_ms > sla.tpot_ms
    return not is_first_late and not are_others_late


def _refuse(
    comparison: TierComparison,
    fleet: FleetSnapshot,
    demand: Demand,
    *,
    is_possible: bool,
) -> Decision:
    """Refuse a request, and say when it could be served.

    Args:
        comparison: The tiers as they were compared.
        fleet: The snapshot that they were compared in.
        demand: What the request needs of a replica.
        is_possible: Whether a tier could serve it, outside of its bounds.
    """
    tiers = {tier.spec.name: tier for tier in fleet.tiers}
    configured = [
        estimate
        for estimate in comparison.considered
        if not tiers[estimate.tier].spec.absent
    ]
    waits_s = []
    for estimate in comparison.considered:
        wait_s = _possible_in_s(
            tiers[estimate.tier],
            estimate,
            comparison=comparison,
            demand=demand,
            fleet=fleet,
        )
        if wait_s is not None:
            waits_s.append(wait_s)
    refusal = Refusal.SLA_UNMET
    if not is_possible:
        refusal = _likeliest_to_pass(configured)
    exceeded_context = None
    # Contexts are worth naming if no tier could serve the request as it is, whatever the load.
    if all(estimate.obstacle in CALLERS_OWN for estimate in configured):
        exceeded_context = _longest_exceeded(comparison.considered, tiers)
    return Decision(
        tier=None,
        reason=refusal_reason(comparison, exceeded_context),
        query=comparison.query,
        comparison=comparison,
        basis=Basis.REFUSED,
        refusal=refusal,
        retry_after_s=min(waits_s, default=None),
        exceeded_context=exceeded_context,
    )


def _likeliest_to_pass(configured: Sequence[TierEstimate]) -> Refusal:
    """Return the obstacle, of any tier that this router serves, that is likeliest to pass. No tier: none is ready."""
    obstacles = {estimate.obstacle for estimate in configured} or {Refusal.NOT_READY}
    return next(obstacle for obstacle in LIKELIEST_TO_PASS if obstacle in obstacles)


def _longest_exceeded(
    considered: Sequence[TierEstimate], tiers: Mapping[TierName, TierSnapshot]
) -> int | None:
    """Return the longest context, in tokens, of the tiers that the request is too long for; None: there are none."""
    too_short = [
        estimate.tier
        for estimate in considered
        if estimate.obstacle is Refusal.TOO_LONG
    ]
    return max((tiers[tier].spec.max_model_len for tier in too_short), default=None)


def _possible_in_s(
    tier: TierSnapshot,
    estimate: TierEstimate,
    comparison: TierComparison,
    demand: Demand,
    fleet: FleetSnapshot,
) -> float | None:
    """Predict in how many seconds a tier could serve the request as asked; None: never, as far as is known."""
    if estimate.obstacle is Refusal.NOT_READY:
        return _ready_in_s(tier)
    if estimate.obstacle in CALLERS_OWN:
        return None
    if comparison.query.require and estimate.quality.is_lossy:
        return None  # Waiting does not make its answers better.
    waits_s = []
    for position, replica in enumerate(tier.replicas):
        if replica.status is READY:
            wait_s = _relieved_in_s(
                tier, position, comparison=comparison, demand=demand, fleet=fleet
            )
            if wait_s is not None:
                waits_s.append(wait_s)
    return min(waits_s, default=None)


def _ready_in_s(tier: TierSnapshot) -> float | None:
    if tier.spec.absent:
        return None
    preparing = tier.preparing
    if preparing is None:
        return STARTING_RETRY_S
    if preparing.remaining_s is not None:
        return preparing.remaining_s
    if preparing.failed is not None:
        return None
    return STARTING_RETRY_S


def _relieved_in_s(
    tier: TierSnapshot,
    position: int,
    comparison: TierComparison,
    demand: Demand,
    fleet: FleetSnapshot,
) -> float | None:
    """Predict in how many seconds the replica at a position has room for the request; None: it is too slow even when idle.

    Enough of its requests must end to leave free slots, and to meet the bounds where they are required. Where only recent
    observations keep a replica from meeting them, they fade with their half-life.
    """
    replica = tier.replicas[position]
    speed = replica.speed
    spec = tier.spec
    query = comparison.query
    if speed is None:
        return UNKNOWN_RETRY_S
    cached_tokens = tier.cached[position] if tier.cached else 0
    if query.require and not _meets_times_idle(
        speed, spec, comparison, demand, cached_tokens=cached_tokens
    ):
        return None
    load = tier.load_at(position, fleet.load)
    limit = min(spec.max_in_flight, replica.limit)
    to_end = max(replica.slots + min(query.sequences, limit) - limit, 1)
    if query.require and query.sla.tpot_ms is not None:
        largest_batch = _largest_batch(
            speed, spec, query.sla.tpot_ms, comparison.confidence_z
        )
        to_end = max(to_end, load.sequences + query.sequences - largest_batch)
    wait_s = (
        to_end * speed.relief_ms(load, spec.max_num_seqs, demand.output_share) / 1000
    )
    return max(wait_s, replica.breaker.admits_in_s) or HALF_LIFE_S


def _largest_batch(
    speed: SpeedModel, spec: TierSpec, tpot_ms: float, confidence_z: float
) -> int:
    """Return how many sequences an engine can compute at once within a bound on TPOT, which it meets with a few."""
    safety = math.exp(confidence_z * speed.tpot_spread)
    return max(
        n
        for n in range(1, spec.max_num_seqs + 1)
        if speed.step_ms(n) * safety <= tpot_ms
    )


# The tiers that take over after a failure.


def successors(
    tier: TierName, query: RoutingQuery, fleet: FleetSnapshot, table: PolicyParameters
) -> tuple[TierName, ...]:
    """Return the tiers that may take over now from one that failed, in the order of a decision's fallbacks.

    Full tiers are among them: an admitted request may take a slot beyond a replica's limit.
    """
    if query.require:
        return ()
    checks = _obstacle_checks(query)
    spare: dict[TierName, SpeedModel | None] = {}
    for successor in fleet.tiers:
        if successor.spec.name is tier:
            continue
        ready = successor.ready
        if (
            ready
            and _lasting_obstacle(checks, successor.spec, query, is_ready=True) is None
        ):
            spare[successor.spec.name] = ready[0].speed
    ranks = {snapshot.spec.name: rank for rank, snapshot in enumerate(fleet.tiers)}
    return _fallback_order(tier, spare, ranks=ranks, max_slowdown=table.max_slowdown)


def fallbacks(decision: Decision) -> tuple[TierName, ...]:
    """Return the tiers that could take over when a decision was made, in order; after a failure they are chosen anew."""
    comparison = decision.comparison
    if decision.tier is None or comparison.query.require:
        return ()
    spare: dict[TierName, SpeedModel | None] = {}
    for estimate in comparison.considered:
        if estimate.obstacle is None and estimate is not comparison.chosen:
            spare[estimate.tier] = estimate.speed
    ranks = {estimate.tier: rank for rank, estimate in enumerate(comparison.estimates)}
    chosen_tier = decision.tier
    if comparison.chosen is not None:
        chosen_tier = comparison.chosen.tier
    return _fallback_order(
        chosen_tier, spare, ranks=ranks, max_slowdown=comparison.table.max_slowdown
    )


def _fallback_order(
    chosen: TierName,
    spare: Mapping[TierName, SpeedModel | None],
    ranks: Mapping[TierName, int],
    max_slowdown: float,
) -> tuple[TierName, ...]:
    """Order other tiers for a retry: higher precisions first, then lower ones from the top.

    The lowest comes last where the highest is far faster than it.

    Args:
        chosen: The tier that they would take over from.
        spare: Their speeds, by rising precision.
        ranks: Of all tiers.
        max_slowdown: By how much a tier may be slower per token than a higher precision.
    """
    spare_tiers = list(spare)
    higher_tiers = [tier for tier in spare_tiers if ranks[tier] > ranks[chosen]]
    lower_tiers = [tier for tier in spare_tiers if ranks[tier] < ranks[chosen]]
    tier_order = [*higher_tiers, *reversed(lower_tiers)]
    if len(tier_order) > 1:
        lowest = spare_tiers[0]
        highest = spare_tiers[-1]
        if _dominated(spare[lowest], spare[highest], max_slowdown):
            tier_order.remove(lowest)
            tier_order.append(lowest)
    return tuple(tier_order)
