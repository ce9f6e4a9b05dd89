"""Choose a tier. Pure: facts about the request and a fleet snapshot in, a decision with reasons out.

Precedence: what is possible (context, readiness, free slots), then ``require``, then the SLA's bounds, then the hint, then
the loss that is expected on prompts of this kind. Of the tiers whose loss is allowed, the one serves that should finish
soonest for the caller; engine time decides between those whose finish differs by less than a person notices. Small talk goes
to the lowest precision.

If the objective is the best answer, the allowed loss rises with the load, from a negligible loss up to the loss budget: it
is the value of engine time, which is nothing while engines idle. If it is the cheapest tier, the loss budget is allowed at
any load, and the least engine time serves, however late it finishes within the request's bounds.
"""

from __future__ import annotations

import math
from operator import attrgetter
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from classifier import PromptClass
from router.policy.decision import CALLERS_OWN, Basis, Choice, Decision, Estimate, Refusal, is_noticeably_later
from router.policy.explain import obstacle_text, reason
from router.policy.losses import Z90
from tiers.choice import READY, Request, candidate
from tiers.snapshot import load_of
from tiers.spec import UNKNOWN, TierName
from tiers.speed import HALF_LIFE_S, IDLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.policy.decision import Degraded, Objective, PolicyParameters, Query, Sla
    from tiers.choice import Candidate, Expectation
    from tiers.snapshot import FleetSnapshot, TierSnapshot
    from tiers.spec import TierSpec
    from tiers.speed import SpeedModel

STARTING_RETRY_S = 10.0  # engines start and warm in tens of seconds
PLENTY = 0.5  # share of the highest precision's slots up to which engine time is worth nothing
# Later first token that small talk may have to keep higher precisions free: up to a second nobody's thought is interrupted
# (Nielsen 1993).
SMALL_TALK_WAIT_MS = 1000.0
UNKNOWN_RETRY_S = 1.0  # a slot frees up with the next finished request
LIKELIEST_TO_PASS = (
    Refusal.AT_CAPACITY,
    Refusal.NOT_READY,
    Refusal.TOO_LONG,
    Refusal.UNSUPPORTED,
    Refusal.NO_ADAPTER,
    Refusal.NOT_ALLOWED,
    Refusal.EXCLUDED,
)
SLOTS = attrgetter("slots")
_ANY_TIER = (None, None, None, None, "")  # of what a query says of tiers
_NORMAL = NormalDist()
_DEGRADED: tuple[tuple[Degraded, Basis], ...] = (
    ("quality", Basis.DEGRADED_QUALITY),
    ("latency", Basis.DEGRADED_LATENCY),
    ("unmeasured", Basis.DEGRADED_UNMEASURED),
)


def decide(query: Query, fleet: FleetSnapshot, table: PolicyParameters) -> Decision:
    """Choose a tier that serves the request as asked, or refuse it."""
    if query.adapter is not None:
        table = table.with_adapter(query.adapter)
    request = _request(query, fleet)
    choice = _compare_tiers(query, fleet, table, request)
    possible = [estimate for estimate in choice.asked if estimate.obstacle is None]
    within_bounds = [estimate for estimate in possible if estimate.meets]
    if not possible or (query.require and not within_bounds):
        return _refuse(choice, fleet, request, is_possible=bool(possible))
    if not within_bounds:
        return _degrade(choice, possible, fleet, request)
    chosen, basis = _choose(query, table, within_bounds)
    choice = replace(choice, chosen=chosen, basis=basis)
    degraded: tuple[Degraded, ...] = ("quality",) if basis is Basis.DEGRADED_QUALITY else ()
    return Decision(chosen.tier, reason(choice, 0), query, choice, basis, degraded)


def _request(query: Query, fleet: FleetSnapshot) -> Request:
    """Return what the request is expected to need of a replica."""
    return Request(
        prompt_tokens=query.tokens_to_read,
        output_tokens=fleet.output_share * query.max_tokens * query.sequences,
        sequences=query.sequences,
        long=query.tokens_to_read > fleet.long_prompt_tokens,
        output_share=fleet.output_share,
    )


class _Offer(NamedTuple):
    """What a tier has for a request: the replica that would serve it, and why the tier may not serve it at any load."""

    tier: TierSnapshot
    candidate: Candidate
    obstacle: Refusal | None


class _Market(NamedTuple):
    """What is the same for all tiers of a decision.

    Attributes:
        z: The confidence asked for, as a quantile of the normal distribution.
        scarcity: Of engine time, 0..1.
        bound: See ``Choice``.
        sequences: In the fleet, the request's own included.
    """

    z: float
    scarcity: float
    bound: float | None
    sequences: int


def _compare_tiers(query: Query, fleet: FleetSnapshot, table: PolicyParameters, request: Request) -> Choice:
    """Estimate what each tier would do with the request; nothing is chosen yet."""
    offers = [_offer(tier, query, request, fleet) for tier in fleet.tiers]
    market = _market(query, table, offers)
    is_below_hint = query.hint is not None
    estimates = []
    for offer in offers:
        if offer.tier.spec.name is query.hint:
            is_below_hint = False
        estimates.append(_estimate(offer, query, table, request, market, is_below_hint=is_below_hint))
    return Choice(query, table, market.z, market.scarcity, tuple(estimates), bound=market.bound)


def _offer(tier: TierSnapshot, query: Query, request: Request, fleet: FleetSnapshot) -> _Offer:
    best = candidate(tier, request, fleet.load)
    # The obstacles below are rare, and asking for each of them takes a tenth of a decision.
    names_tiers = (query.allowed, query.precisions, query.only, query.adapter, query.undraftable) != _ANY_TIER
    if names_tiers or query.prompt_tokens + query.max_tokens > tier.spec.max_model_len:
        return _Offer(tier, best, _obstacle(tier.spec, query, ready=best.replica is not None))
    return _Offer(tier, best, None)


def _market(query: Query, table: PolicyParameters, offers: Sequence[_Offer]) -> _Market:
    highest: TierSnapshot | None = None
    sequences = query.sequences
    for offer in offers:
        if offer.obstacle is None and offer.candidate.replica is not None:
            highest = offer.tier
        sequences += sum(map(SLOTS, offer.tier.replicas))
    confidence = table.sla_confidence if query.sla.confidence is None else query.sla.confidence
    bound = query.sla.max_quality_loss
    if bound is None:
        bound = table.max_loss.get(query.features.prompt_class)
    return _Market(
        z=_NORMAL.inv_cdf(confidence),
        scarcity=scarcity_at(table.objective, _taken_share(highest)),
        bound=bound,
        sequences=sequences,
    )


def _estimate(
    offer: _Offer,
    query: Query,
    table: PolicyParameters,
    request: Request,
    market: _Market,
    *,
    is_below_hint: bool,
) -> Estimate:
    """Return what can be expected of one tier."""
    spec = offer.tier.spec
    best = offer.candidate
    obstacle = offer.obstacle
    if obstacle is None and not best.free:
        obstacle = Refusal.NOT_READY if best.replica is None else Refusal.AT_CAPACITY
    batch = min(spec.max_num_seqs, market.sequences)
    loss = table.loss(spec.name, query.features)
    worst = min(loss.mean + (loss.high - loss.mean) * market.z / Z90, 1.0)
    loss_bound = query.sla.max_quality_loss
    is_lossy = loss_bound is not None and worst > loss_bound
    is_slow, excess = _slow(query.sla, best.times, market.z)
    spare = max(table.budget(spec.name) - table.negligible_loss, 0.0)
    exceeds_budget = loss.mean > table.negligible_loss + spare
    exceeds_class = market.bound is not None and worst > market.bound
    return Estimate(
        tier=spec.name,
        precision=spec.precision,
        state=READY if obstacle is None else offer.tier.status,
        speed=best.replica.speed if best.replica is not None else None,
        batch=batch,
        times=best.times,
        loss=loss,
        worst=worst,
        allowed=table.negligible_loss + market.scarcity * spare,
        cost=_cost(best, request, batch, table.prices.get(spec.name, 1.0)),
        excess=excess,
        obstacle=obstacle,
        obstacle_text="" if obstacle is None else obstacle_text(obstacle, offer.tier, query),
        slow=is_slow,
        lossy=is_lossy,
        unfit=is_below_hint or exceeds_budget or exceeds_class,
        cached=best.cached,
        meets=obstacle is None and not is_slow and not is_lossy,
        found=best,
        finish_ms=_finish_ms(best.times, request),
    )


def _cost(best: Candidate, request: Request, batch: int, price: float) -> float | None:
    """Return the engine-seconds that the request takes, times the tier's price; None: its speed is not known."""
    if best.replica is None or best.replica.speed is None:
        return None
    to_read = max(request.prompt_tokens - (best.cached or 0), 0)
    engine_ms = best.replica.speed.engine_ms(to_read, max(1.0, request.output_tokens), batch)
    drift = best.times.drift if best.times is not None else 1.0
    return engine_ms * drift / 1000 * price


def _finish_ms(times: Expectation | None, request: Request) -> float | None:
    """Return when the caller should have the whole answer: its queue and prefill, then each further token."""
    if times is None:
        return None
    tokens_after_first = max(request.output_tokens / request.sequences - 1, 0.0)
    return times.ttft_ms + tokens_after_first * times.tpot_ms


def _refuse(choice: Choice, fleet: FleetSnapshot, request: Request, *, is_possible: bool) -> Decision:
    tiers = {tier.spec.name: tier for tier in fleet.tiers}
    configured = [estimate for estimate in choice.asked if not tiers[estimate.tier].spec.absent]
    obstacles = {estimate.obstacle for estimate in configured} or {Refusal.NOT_READY}
    refusal = Refusal.SLA_UNMET
    if not is_possible:
        refusal = next(obstacle for obstacle in LIKELIEST_TO_PASS if obstacle in obstacles)
    waits_s = []
    for estimate in choice.asked:
        wait_s = _possible_in_s(tiers[estimate.tier], estimate, choice, request, fleet)
        if wait_s is not None:
            waits_s.append(wait_s)
    longest = 0
    is_request_in_the_way = all(estimate.obstacle in LIKELIEST_TO_PASS[2:] for estimate in configured)
    if is_request_in_the_way:
        too_short = [estimate for estimate in choice.asked if estimate.obstacle is Refusal.TOO_LONG]
        longest = max((tiers[estimate.tier].spec.max_model_len for estimate in too_short), default=0)
    return Decision(
        None,
        reason(choice, longest),
        choice.query,
        choice,
        Basis.REFUSED,
        refusal=refusal,
        retry_after_s=min(waits_s, default=None),
        longest=longest,
    )


def _degrade(choice: Choice, possible: Sequence[Estimate], fleet: FleetSnapshot, request: Request) -> Decision:
    """Serve a request although no tier meets every bound, and say what is given up."""
    chosen, degraded = _nearest(choice.query, possible, choice.table)
    basis = next(basis for what, basis in _DEGRADED if what in degraded)
    choice = replace(choice, chosen=chosen, basis=basis, given_up=degraded)
    are_times_impossible = "latency" in degraded and not any(
        _could_meet_times(tier, estimate, choice, request)
        for tier, estimate in zip(fleet.tiers, choice.estimates, strict=True)
    )
    return Decision(
        chosen.tier,
        reason(choice, 0),
        choice.query,
        choice,
        basis,
        degraded,
        are_times_impossible=are_times_impossible,
    )


def _could_meet_times(tier: TierSnapshot, estimate: Estimate, choice: Choice, request: Request) -> bool:
    """Tell whether a tier might meet the bounds on times at some load; one whose speed is not known might."""
    if estimate.obstacle in CALLERS_OWN or tier.spec.absent:
        return False
    ready = [replica for replica in tier.replicas if replica.status is READY]
    if not ready:
        return True
    return any(_meets_times_idle(replica.speed, tier.spec, choice, request, cached=0) for replica in ready)


def _meets_times_idle(
    speed: SpeedModel | None, spec: TierSpec, choice: Choice, request: Request, *, cached: int
) -> bool:
    """Tell whether an idle replica would meet the bounds on times with the confidence asked for; True: not known."""
    if speed is None:
        return True
    query, sla = choice.query, choice.query.sla
    to_read = max(request.prompt_tokens - cached, 0)
    idle = speed.times(to_read, IDLE, spec.max_num_seqs, request.output_share, query.sequences)
    ttft_ms = idle.ttft_ms * math.exp(choice.z * speed.ttft_spread)
    tpot_ms = idle.tpot_ms * math.exp(choice.z * speed.tpot_spread)
    is_first_late = sla.ttft_ms is not None and ttft_ms > sla.ttft_ms
    are_others_late = sla.tpot_ms is not None and tpot_ms > sla.tpot_ms
    return not is_first_late and not are_others_late


def _obstacle(spec: TierSpec, query: Query, *, ready: bool) -> Refusal | None:
    """Return why a tier does not serve a request, whatever its load; None: it does.

    Its precision, if it is not known before the tier is ready, may turn out to be one that the request allows.
    """
    if query.allowed is not None and spec.name not in query.allowed:
        return Refusal.NOT_ALLOWED
    if (query.precisions is not None or query.only is not None) and not query.takes(spec):
        unknown = not ready and spec.precision == UNKNOWN
        return Refusal.NOT_READY if unknown and (query.only is None or spec.name in query.only) else Refusal.EXCLUDED
    if query.adapter is not None and query.adapter not in spec.adapters:
        return Refusal.NO_ADAPTER
    if query.undraftable and spec.draft is not None:
        return Refusal.UNSUPPORTED
    if query.prompt_tokens + query.max_tokens > spec.max_model_len:
        return Refusal.TOO_LONG
    return None


def longest_context(query: Query, fleet: FleetSnapshot) -> int:
    """Return the longest context of the tiers that may serve a request of any length; of those that are ready, if any is.

    Neither load nor bounds count. 0: no tier may.
    """
    short = replace(query, prompt_tokens=0, max_tokens=0)
    only = query.hint if query.require else None
    able = [
        tier
        for tier in fleet.tiers
        if only in {None, tier.spec.name} and not tier.spec.absent and _obstacle(tier.spec, short, ready=True) is None
    ]
    ready = [tier for tier in able if tier.ready]
    return max((tier.spec.max_model_len for tier in ready or able), default=0)


def within_context(query: Query, fleet: FleetSnapshot) -> Query:
    """Return a query whose caller named no limit with as many output tokens as the longest context leaves, at least one."""
    if query.prompt_tokens + query.max_tokens <= max([tier.spec.max_model_len for tier in fleet.tiers]):
        return query
    left = longest_context(query, fleet) - query.prompt_tokens
    return replace(query, max_tokens=max(min(query.max_tokens, left), 1))


def _slow(sla: Sla, times: Expectation | None, z: float) -> tuple[bool, float]:
    """Tell whether a tier's times break a bound with the confidence asked for; return the largest ratio of time to bound.

    An unknown time meets no bound. Times are log-normally distributed about the prediction; ``z`` is the confidence as a
    quantile of the normal distribution.
    """
    slow, excess = False, 0.0
    if sla.ttft_ms is None and sla.tpot_ms is None:
        return slow, excess
    if times is None:
        return True, math.inf
    if sla.tpot_ms is not None:
        safe = times.tpot_ms * math.exp(z * times.tpot_spread)
        slow, excess = safe > sla.tpot_ms, safe / sla.tpot_ms
    if sla.ttft_ms is not None:
        safe = times.ttft_ms * math.exp(z * times.ttft_spread)
        slow, excess = slow or safe > sla.ttft_ms, max(excess, safe / sla.ttft_ms)
    return slow, excess


def _taken_share(highest: TierSnapshot | None) -> float:
    """Return the share of slots that is taken of the highest precision that may serve and is ready.

    It is the tier that would answer if loss alone counted, so its next free slot is what a lossier tier can save.
    """
    if highest is None:
        return 0.0
    filled, room = 0, 0
    for replica in highest.replicas:
        if replica.status is READY:
            filled += replica.slots
            room += min(highest.spec.max_num_seqs, replica.limit)
    return filled / max(room, 1)


def scarcity_at(objective: Objective, taken: float) -> float:
    """Return how scarce engine time is, 0..1: the share of the loss budget that is allowed."""
    return 1.0 if objective == "cheapest" else min(max((taken - PLENTY) / (1 - PLENTY), 0.0), 1.0)


def _choose(query: Query, table: PolicyParameters, within_bounds: Sequence[Estimate]) -> tuple[Estimate, Basis]:
    """Choose among the tiers that meet the SLA. ``within_bounds`` is not empty, and sorted by rising precision."""
    if query.hint is not None:
        for estimate in within_bounds:
            if estimate.tier is query.hint:
                return estimate, Basis.HINT
    fit = [estimate for estimate in within_bounds if not estimate.unfit]
    if not fit:
        return within_bounds[-1], Basis.DEGRADED_QUALITY
    if query.sort is not None:
        sort = query.sort
        return min(fit, key=lambda estimate: estimate.order(sort)), Basis.SORT
    if query.features.prompt_class is PromptClass.SMALL_TALK:
        return _lowest_in_time(fit), Basis.SMALL_TALK
    allowed = _within_loss(fit)
    if all(estimate.under_load for estimate in allowed):
        chosen = _fastest_or_cheapest(allowed, table.objective)
    else:
        chosen = _lowest(allowed, table.max_slowdown)
    return chosen, _basis(chosen, fit, within_bounds, table.negligible_loss)


def _within_loss(fit: Sequence[Estimate]) -> list[Estimate]:
    """Return the tiers that lose no more than is allowed now; if the tiers that lose so little cannot serve, the best."""
    allowed = [estimate for estimate in fit if estimate.loss.mean <= estimate.allowed]
    if allowed:
        return allowed
    least = min(estimate.loss.mean for estimate in fit)
    return [estimate for estimate in fit if estimate.loss.mean == least]


def _fastest_or_cheapest(allowed: Sequence[Estimate], objective: Objective) -> Estimate:
    """Choose the tier that should finish soonest, or the cheapest of those whose finish a person cannot tell apart."""
    if objective == "best":
        soonest_ms = min(estimate.finishes_in_ms for estimate in allowed)
        allowed = [each for each in allowed if not is_noticeably_later(each.finishes_in_ms, soonest_ms)]
    return min(allowed, key=Estimate.order)


def _lowest_in_time(fit: Sequence[Estimate]) -> Estimate:
    """Choose the lowest precision whose first token does not come long after another tier's."""
    known = [estimate.times.ttft_ms for estimate in fit if estimate.times is not None]
    if not known:
        return fit[0]
    latest_ms = min(known) + SMALL_TALK_WAIT_MS
    in_time = (estimate for estimate in fit if estimate.times is None or estimate.times.ttft_ms <= latest_ms)
    return next(in_time)


def _basis(
    chosen: Estimate, fit: Sequence[Estimate], within_bounds: Sequence[Estimate], negligible_loss: float
) -> Basis:
    """Return what the choice of a tier by its loss rests on."""
    if chosen.loss.mean > negligible_loss:
        return Basis.BUDGET if len(fit) > 1 else Basis.LEAST_LOSS
    others = [estimate for estimate in within_bounds if estimate is not chosen]
    if all(estimate.loss.mean > negligible_loss for estimate in others):
        return Basis.LEAST_LOSS
    return Basis.NEGLIGIBLE


def _lowest(fit: Sequence[Estimate], max_slowdown: float) -> Estimate:
    """Choose the lowest precision while no speed is measured under load, unless a higher one is far faster even so."""
    chosen = fit[0]
    for higher in fit[1:]:
        if _dominated(chosen.speed, higher.speed, max_slowdown):
            chosen = higher
    return chosen


def _dominated(lower: SpeedModel | None, higher: SpeedModel | None, max_slowdown: float) -> bool:
    """Tell whether a lower precision is so much slower than a higher one that it has nothing to offer."""
    return lower is not None and higher is not None and lower.step_ms(1) > max_slowdown * higher.step_ms(1)


def _nearest(
    query: Query, possible: Sequence[Estimate], table: PolicyParameters
) -> tuple[Estimate, tuple[Degraded, ...]]:
    """Choose where no tier meets every bound, and say what is given up: what ``give_up`` names, if a tier keeps the rest.

    A hinted tier that keeps it is taken. Else of those that keep the loss, that of the class too if one does, the least
    late: so load beyond what the tiers can do spreads over all of them. Of those that keep the latency, the one that
    loses least.
    """
    lossless = [o for o in possible if not o.lossy]
    prompt = [o for o in possible if not o.slow]
    keeping = lossless if table.give_up == "latency" else prompt
    hinted = [o for o in keeping if o.tier is query.hint]
    if hinted:
        chosen = hinted[0]
    elif lossless and (table.give_up == "latency" or not prompt):
        fit = [o for o in lossless if not o.unfit] or lossless
        chosen = min(fit, key=lambda o: (o.excess, o.order()))
    else:  # of equals, the highest precision
        chosen = min(reversed(prompt or possible), key=lambda o: o.loss.mean)
    found: list[Degraded] = []
    if chosen.lossy or chosen.unfit:
        found.append("quality")
    if chosen.slow:
        found.append("latency" if chosen.times is not None else "unmeasured")
    return chosen, tuple(dict.fromkeys(found))


def successors(tier: TierName, query: Query, fleet: FleetSnapshot, table: PolicyParameters) -> tuple[TierName, ...]:
    """Return the tiers that may take over now from one that failed, in the order of a decision's fallbacks.

    Full tiers are among them: an admitted request may take a slot beyond a replica's limit.
    """
    if query.require:
        return ()
    spare = [
        (other.spec.name, ready[0].speed)
        for other in fleet.tiers
        if other.spec.name is not tier and (ready := other.ready) and _obstacle(other.spec, query, ready=True) is None
    ]
    ranks = {other.spec.name: rank for rank, other in enumerate(fleet.tiers)}
    return _fallback_order(tier, spare, ranks, table.max_slowdown)


def fallbacks(decision: Decision) -> tuple[TierName, ...]:
    """Return the tiers that could take over when a decision was made, in order; after a failure they are chosen anew."""
    choice, tier = decision.choice, decision.tier
    if tier is None or choice.query.require:
        return ()
    spare = [(o.tier, o.speed) for o in choice.asked if o.obstacle is None and o is not choice.chosen]
    ranks = {o.tier: rank for rank, o in enumerate(choice.estimates)}
    chosen = tier if choice.chosen is None else choice.chosen.tier
    return _fallback_order(chosen, spare, ranks, choice.table.max_slowdown)


def _fallback_order(
    chosen: TierName,
    spare: Sequence[tuple[TierName, SpeedModel | None]],
    ranks: Mapping[TierName, int],
    max_slowdown: float,
) -> tuple[TierName, ...]:
    """Order other tiers for a retry: higher precisions first, then lower ones from the top.

    The lowest comes last where the highest is far faster than it.
    """
    higher = [name for name, _ in spare if ranks[name] > ranks[chosen]]
    lower = [name for name, _ in spare if ranks[name] < ranks[chosen]]
    order = [*higher, *reversed(lower)]
    if len(order) > 1 and _dominated(spare[0][1], spare[-1][1], max_slowdown):
        order.remove(spare[0][0])
        order.append(spare[0][0])
    return tuple(order)


def _possible_in_s(
    tier: TierSnapshot, estimate: Estimate, choice: Choice, request: Request, fleet: FleetSnapshot
) -> float | None:
    """Predict in how many seconds a tier could serve the request as asked; None: never, as far as is known.

    Enough of its requests must end to leave free slots, and to meet the bounds where they are required. Where only recent
    observations keep a replica from meeting them, they fade with their half-life.
    """
    if estimate.obstacle not in {None, Refusal.AT_CAPACITY}:
        return _ready_in_s(tier) if estimate.obstacle is Refusal.NOT_READY else None
    query, z, spec = choice.query, choice.z, tier.spec
    tpot_ms = query.sla.tpot_ms if query.require else None
    if query.require and estimate.lossy:
        return None
    waits = []
    for position, replica in enumerate(tier.replicas):
        speed, output_share = replica.speed, request.output_share
        if replica.status is not READY:
            continue
        if speed is None:
            waits.append(UNKNOWN_RETRY_S)
            continue
        cached = tier.cached[position] if tier.cached else 0
        if query.require and not _meets_times_idle(speed, spec, choice, request, cached=cached):
            continue
        load, limit = load_of(replica, tier.output_tokens[position], fleet.load), min(spec.max_in_flight, replica.limit)
        ending = max(replica.slots + min(query.sequences, limit) - limit, 1)
        if tpot_ms is not None:
            surely = math.exp(z * speed.tpot_spread)
            fitting = max(n for n in range(1, spec.max_num_seqs + 1) if speed.step_ms(n) * surely <= tpot_ms)
            ending = max(ending, load.sequences + query.sequences - fitting)
        wait_s = ending * speed.relief_ms(load, spec.max_num_seqs, output_share) / 1000
        waits.append(max(wait_s, replica.breaker.admits_in_s) or HALF_LIFE_S)
    return min(waits, default=None)


def _ready_in_s(tier: TierSnapshot) -> float | None:
    if tier.spec.absent:
        return None
    if tier.preparing is None or tier.preparing.remaining_s is None:
        return STARTING_RETRY_S if tier.preparing is None or tier.preparing.failed is None else None
    return tier.preparing.remaining_s
