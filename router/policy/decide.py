"""Choose a tier. Pure: facts about the request and a fleet snapshot in, a decision with reasons out.

Precedence: what is possible (context, readiness, free slots), then ``require``, then the SLA's bounds, then the hint, then
the needs of the prompt's class. Of the tiers that remain, the cheapest by measured engine time serves. The reason names
what was given up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

from router.policy.decision import CHOSEN, Basis, Decision, Refusal, TierReport
from tiers.preparing import about
from tiers.snapshot import has_slots
from tiers.spec import ReplicaState, TierName
from tiers.speed import HALF_LIFE_S, IDLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.policy.decision import Bound, ExpectedLoss, PolicyParameters, Query
    from tiers.snapshot import Expectation, FleetSnapshot, ReplicaSnapshot, TierSnapshot
    from tiers.speed import SpeedModel

STARTING_RETRY_S = 10.0  # engines start and warm in tens of seconds
UNKNOWN_RETRY_S = 1.0  # a slot frees up with the next finished request
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class _Need:
    """What the prompt's class needs.

    Attributes:
        who: Subject of the sentences about it.
        floor: Lowest tier where loss is not measured.
        max_loss: Share of tokens, 0..1, where loss is measured: the request's own bound, else the class's.
        at_least: Lowest tier whatever is measured, and the subject that wants it; None: any tier.
    """

    who: str
    floor: TierName
    max_loss: float
    at_least: tuple[TierName, str] | None = None


@dataclass(slots=True)  # never changed; freezing would cost a tenth of a decision
class _TierEstimate:
    """What can be expected of one tier. None: not known.

    Attributes:
        cost: Engine-seconds, times the tier's price.
        excess: Largest ratio of a predicted time to its bound.
        obstacle: Why the tier cannot serve now; None: it can. ``slow``, ``lossy`` and ``unfit`` likewise say why it
            breaks a bound on time, breaks the bound on loss, or is below what the class needs.
    """

    tier: TierSnapshot
    replica: ReplicaSnapshot | None
    obstacle: tuple[Refusal, str] | None
    times: Expectation | None
    loss: ExpectedLoss | None
    cost: float | None
    slow: str | None
    excess: float
    lossy: str | None
    unfit: str | None

    @property
    def name(self) -> TierName:
        return self.tier.spec.name

    @property
    def speed(self) -> SpeedModel | None:
        return None if self.replica is None else self.replica.speed

    @property
    def under_load(self) -> bool:
        return self.speed is not None and self.speed.under_load

    @property
    def breaks(self) -> str | None:
        """Return why the tier cannot serve the request within its bounds, or None."""
        return self.obstacle[1] if self.obstacle is not None else self.lossy or self.slow


def decide(query: Query, fleet: FleetSnapshot, table: PolicyParameters) -> Decision:
    """Choose the cheapest tier that serves the request as asked, or refuse it."""
    z = _NORMAL.inv_cdf(table.sla_confidence if query.sla.confidence is None else query.sla.confidence)
    need, in_flight = _need(query, table), fleet.sequences
    estimates = [_estimate(tier, query, fleet, in_flight, table, z, need) for tier in fleet.tiers]
    asked = [o for o in estimates if not (query.require and query.hint) or o.name is query.hint]
    possible = [o for o in asked if o.obstacle is None]
    within = [o for o in possible if o.breaks is None]
    if not possible or (query.require and not within):
        return _refuse(query, fleet, estimates, asked, Refusal.SLA_UNMET if possible else None, z)
    degraded: tuple[Bound, ...]
    if within:
        chosen, reason, basis = _choose(query, within, asked, table, need)
        degraded = ("quality",) if basis is Basis.DEGRADED_QUALITY else ()
    else:
        chosen, degraded = _nearest(query, possible, table)
        basis = Basis.DEGRADED_QUALITY if "quality" in degraded else Basis.DEGRADED_LATENCY
        reason = f"no tier is expected to meet the SLA: {' and '.join(degraded)} given up, {chosen.name} taken"
    if query.hint is not None and chosen.name is not query.hint:  # first: what was asked for and is not given
        hinted = next(o for o in estimates if o.name is query.hint)
        reason = f"hint {query.hint} not taken: {hinted.breaks or 'not chosen'}; {reason}"
    if query.sla.max_quality_loss is not None and within and not table.losses:
        reason += "; loss is not measured yet, so only the reference precision is sure to keep max_quality_loss"
    spare = [] if query.require else [o for o in possible if o is not chosen]
    return Decision(
        tier=chosen.name,
        precision=chosen.tier.spec.precision,
        reason=reason,
        query=query,
        fallbacks=_fallback_order(chosen.name, [(o.name, o.speed) for o in spare], table.max_slowdown),
        verdicts=tuple(_verdict(o, chosen) for o in estimates),
        basis=basis,
        degraded=degraded,
    )


def _need(query: Query, table: PolicyParameters) -> _Need:
    """Return what the class needs. An uncertain class gets a floor one tier higher; a hint that fails is a floor itself."""
    features = query.features
    kind = features.prompt_class
    floor, asked = table.class_floor[kind], query.sla.max_quality_loss
    max_loss = table.max_loss[kind] if asked is None else asked
    who = f"class {kind.value}"
    at_least: tuple[TierName, str] | None = None
    promoted = table.promoted.get(kind)
    if promoted is not None:
        at_least = promoted, f"{who}, which loses too much in live answers,"
    if query.hint is not None and query.hint.rank > max(floor.rank, promoted.rank if promoted else 0):
        at_least = query.hint, f"hint {query.hint}"
    if features.confidence < table.min_confidence and floor is not TierName.PRECISE:
        who = f"{who} at a confidence of only {features.confidence:.2f}"
        floor = list(TierName)[floor.rank + 1]
    return _Need(who, floor, max_loss, at_least)


def _estimate(  # noqa: PLR0917  called here alone
    tier: TierSnapshot,
    query: Query,
    fleet: FleetSnapshot,
    in_flight: int,
    table: PolicyParameters,
    z: float,
    need: _Need,
) -> _TierEstimate:
    """Return what can be expected of one tier."""
    spec, share, prompt_tokens = tier.spec, fleet.output_share, query.tokens_to_read
    output = share * query.max_tokens * query.sequences
    free = tier.next(prompt_tokens, output, fleet.long_prompt_tokens, query.sequences)
    replica = free or next(iter(tier.ready), None)
    times = cost = None
    if replica is not None and replica.speed is not None:
        times = replica.expect(prompt_tokens, spec.max_num_seqs, share, query.sequences)
        batch = min(in_flight + query.sequences, spec.max_num_seqs)
        engine_ms = replica.speed.engine_ms(prompt_tokens, max(output, 1.0), batch)
        cost = engine_ms / 1000 * table.prices.get(spec.name, 1.0)
    loss = table.loss(spec.name, query.features)
    certain = query.features.confidence >= table.min_confidence
    worst = None if loss is None else loss.at(z) if certain else loss.high
    slow, excess = _slow(query, times, z)
    return _TierEstimate(
        tier=tier,
        replica=replica,
        obstacle=_obstacle(tier, query, full=free is None),
        times=times,
        loss=loss,
        cost=cost,
        slow=slow,
        excess=excess,
        lossy=_lossy(query, loss, worst),
        unfit=_unfit(spec.name, worst, need),
    )


def _obstacle(tier: TierSnapshot, query: Query, *, full: bool) -> tuple[Refusal, str] | None:
    """Return why a tier cannot serve the request now, or None."""
    spec = tier.spec
    if spec.name not in query.allowed:
        return Refusal.NOT_ALLOWED, "is not allowed for this key"
    if query.prompt_tokens + query.max_tokens > spec.max_model_len:
        return Refusal.TOO_LONG, (
            f"{query.prompt_tokens} prompt + {query.max_tokens} output tokens exceed its context of {spec.max_model_len}"
        )
    if tier.state is not ReplicaState.READY:
        return Refusal.NOT_READY, _not_ready(tier)
    return (Refusal.AT_CAPACITY, _full(tier, query.sequences)) if full else None


def _not_ready(tier: TierSnapshot) -> str:
    """Return the state of a tier that is not ready, and about when it will be ready."""
    preparing = tier.preparing
    if preparing is None:
        return f"is {tier.state.value}"
    if preparing.failed is not None:
        return "has no checkpoint: it could not be made"
    state = "being prepared" if tier.state is ReplicaState.PREPARING else tier.state.value
    return f"is {state}" + ("" if preparing.remaining_s is None else f", ready in {about(preparing.remaining_s)}")


def _full(tier: TierSnapshot, sequences: int) -> str:
    """Return why no ready replica of a tier takes the request now."""
    admitting = [r for r in tier.ready if r.admits]
    if not admitting:
        wait_s = min(r.admits_in_s for r in tier.ready)
        return f"failed too often lately; the next try is in {wait_s:.1f} s"
    limits = [min(r.limit, tier.spec.max_in_flight) for r in admitting]
    free = [r for r, limit in zip(admitting, limits, strict=True) if r.taken < limit]
    if not free:
        return f"has all of its {sum(limits)} slots taken"
    if not any(has_slots(sequences, r.taken, limit) for r, limit in zip(admitting, limits, strict=True)):
        return f"has too few of its {sum(limits)} slots free for {sequences} answers at the same time"
    if all(r.kv_pressure for r in free):
        usage = max(r.gauges.kv_cache_usage if r.gauges else 0.0 for r in free)
        return f"has {usage:.0%} of its KV cache in use, too much for a long prompt"
    return "has too few tokens left in its KV cache"


def _slow(query: Query, times: Expectation | None, z: float) -> tuple[str | None, float]:
    """Return which bound a tier's times break with the confidence asked for, and the largest ratio of time to bound.

    An unknown time breaks no bound. Times are log-normally distributed about the prediction; ``z`` is the confidence as a
    quantile of the normal distribution.
    """
    if times is None:
        return None, 0.0
    found, excess = None, 0.0
    for name, expected, spread, bound in (
        ("TPOT", times.tpot_ms, times.tpot_spread, query.sla.tpot_ms),
        ("TTFT", times.ttft_ms, times.ttft_spread, query.sla.ttft_ms),
    ):
        if bound is None:
            continue
        safe = expected * math.exp(z * spread)
        excess = max(excess, safe / bound)
        if safe > bound:
            unsure = "" if expected > bound else f", up to {safe:.0f} at the confidence asked for"
            found = f"{name} of {expected:.0f} ms expected{unsure}, {bound:g} asked"
    return found, excess


def _lossy(query: Query, loss: ExpectedLoss | None, worst: float | None) -> str | None:
    """Return how a tier breaks the bound on loss with the confidence asked for, or None."""
    bound = query.sla.max_quality_loss
    if bound is None:
        return None
    if loss is None or worst is None:
        return f"its loss is not measured, max_quality_loss is {bound:g}"
    if worst > bound:
        return f"its loss may be {worst:.3f} (measured {loss.mean:.3f}), {bound:g} asked"
    return None


def _unfit(tier: TierName, worst: float | None, need: _Need) -> str | None:
    """Return why a tier is below what the class needs, or None."""
    if need.at_least is not None and tier.rank < need.at_least[0].rank:
        return f"{need.at_least[1]} wants {need.at_least[0]} or higher"
    if worst is None and tier.rank < need.floor.rank:
        return f"{need.who} wants {need.floor} or higher"
    if worst is not None and worst > need.max_loss:
        return f"{need.who} may lose {need.max_loss:g}, and this tier may lose {worst:.3f}"
    return None


def _choose(
    query: Query, within: Sequence[_TierEstimate], asked: Sequence[_TierEstimate], table: PolicyParameters, need: _Need
) -> tuple[_TierEstimate, str, Basis]:
    """Choose among the tiers that meet the SLA, and say why. ``within`` is not empty, and sorted by rising precision."""
    for estimate in within:
        if estimate.name is query.hint:
            return estimate, f"hint {query.hint}", Basis.HINT
    fit = [o for o in within if o.unfit is None]
    if not fit:
        best = within[-1]
        better = [o for o in asked if o.unfit is None]
        if all(o.obstacle is not None and o.obstacle[0] is Refusal.NOT_ALLOWED for o in better):
            cause = "none of which this key allows"
        elif any(o.obstacle is None for o in better):
            cause = "none of which is expected to meet the SLA"
        else:
            cause = "none of which can serve now"
        return best, f"degraded to {best.name}: {best.unfit}, {cause}", Basis.DEGRADED_QUALITY
    if all(o.under_load for o in fit):
        return *_cheapest(fit, need), Basis.MEASURED
    return *_lowest(fit, table, need), Basis.TABLE


def _cheapest(fit: Sequence[_TierEstimate], need: _Need) -> tuple[_TierEstimate, str]:
    """Choose by measured engine time; of equals, the lowest precision."""
    chosen = min(fit, key=_cost)
    others = ", ".join(f"{o.name} {_cost(o):.2g}" for o in fit if o is not chosen)
    compared = f"{_cost(chosen):.2g} engine-seconds, {others}" if others else "no other does"
    learned = "; speed learned from live requests" if any(o.speed is not None and o.speed.learned for o in fit) else ""
    return chosen, f"{need.who}: cheapest tier that meets its needs is {chosen.name} ({compared}{learned})"


def _cost(estimate: _TierEstimate) -> float:
    return math.inf if estimate.cost is None else estimate.cost


def _lowest(fit: Sequence[_TierEstimate], table: PolicyParameters, need: _Need) -> tuple[_TierEstimate, str]:
    """Choose the lowest precision while no speed is measured under load, unless a higher one is far faster even so."""
    lowest = chosen = fit[0]
    for higher in fit[1:]:
        if _dominated(chosen.speed, higher.speed, table.max_slowdown):
            chosen = higher
    if chosen is lowest:
        missing = "speed is" if table.losses else "loss and speed are"
        reason = f"lowest precision that serves is {chosen.name} (default table: {missing} not profiled yet)"
    else:
        faster = f"was measured over {table.max_slowdown:g} times faster here at a higher precision"
        reason = f"{lowest.name} would do, but {chosen.name} {faster}"
    return chosen, f"{need.who}: {reason}"


def _dominated(lower: SpeedModel | None, higher: SpeedModel | None, max_slowdown: float) -> bool:
    """Tell whether a lower precision is so much slower than a higher one that it has nothing to offer."""
    return lower is not None and higher is not None and lower.step_ms(1) > max_slowdown * higher.step_ms(1)


def _nearest(
    query: Query, possible: Sequence[_TierEstimate], table: PolicyParameters
) -> tuple[_TierEstimate, tuple[Bound, ...]]:
    """Choose where no tier meets every bound, and say what is given up: what ``give_up`` names, if a tier keeps the rest.

    A hinted tier that keeps it is taken. Else the cheapest of those that keep the loss: a request that is late anyway
    should not hold up others. Of those that keep the latency, the one that loses least.
    """
    lossless = [o for o in possible if o.lossy is None]
    prompt = [o for o in possible if o.slow is None]
    keeping = lossless if table.give_up == "latency" else prompt
    hinted = [o for o in keeping if o.name is query.hint]
    if hinted:
        chosen = hinted[0]
    elif lossless and (table.give_up == "latency" or not prompt):
        fit = [o for o in lossless if o.unfit is None] or lossless
        chosen = min(fit, key=lambda o: (_cost(o), o.excess))
    else:  # what is not measured counts as the worst, and is ordered by precision
        chosen = min(prompt or possible, key=lambda o: (1.0 if o.loss is None else o.loss.high, -o.name.rank))
    quality: tuple[Bound, ...] = ("quality",) if chosen.lossy or chosen.unfit else ()
    latency: tuple[Bound, ...] = ("latency",) if chosen.slow else ()
    return chosen, quality + latency


def successors(tier: TierName, query: Query, fleet: FleetSnapshot, table: PolicyParameters) -> tuple[TierName, ...]:
    """Return the tiers that may take over now from one that failed, in the order of a decision's fallbacks.

    Full tiers are among them: an admitted request may take a slot beyond a replica's limit.
    """
    if query.require:
        return ()
    spare = [
        (other.spec.name, next((replica.speed for replica in other.ready), None))
        for other in fleet.tiers
        if other.spec.name is not tier and _obstacle(other, query, full=False) is None
    ]
    return _fallback_order(tier, spare, table.max_slowdown)


def _fallback_order(
    chosen: TierName, spare: Sequence[tuple[TierName, SpeedModel | None]], max_slowdown: float
) -> tuple[TierName, ...]:
    """Order other tiers for a retry: higher precisions first, then lower ones from the top.

    The lowest comes last where the highest is far faster than it.
    """
    higher = [name for name, _ in spare if name.rank > chosen.rank]
    lower = [name for name, _ in spare if name.rank < chosen.rank]
    order = [*higher, *reversed(lower)]
    if len(order) > 1 and _dominated(spare[0][1], spare[-1][1], max_slowdown):
        order.remove(spare[0][0])
        order.append(spare[0][0])
    return tuple(order)


def _refuse(  # noqa: PLR0917  called here alone
    query: Query,
    fleet: FleetSnapshot,
    estimates: Sequence[_TierEstimate],
    asked: Sequence[_TierEstimate],
    refusal: Refusal | None,
    z: float,
) -> Decision:
    """Refuse, by the cause among the tiers asked for that is likeliest to pass."""
    causes = [o.obstacle[0] for o in asked if o.obstacle is not None]
    likeliest_to_pass = (Refusal.AT_CAPACITY, Refusal.NOT_READY, Refusal.TOO_LONG, Refusal.NOT_ALLOWED)
    cause = refusal or next(c for c in likeliest_to_pass if c in causes)
    waits = [wait for o in asked if (wait := _possible_in_s(o, query, fleet.output_share, z)) is not None]
    verdicts = tuple(_verdict(o, None) for o in estimates)
    names = {o.name for o in asked}
    reason = "; ".join(f"{v.tier} {v.verdict}" for v in verdicts if v.tier in names)
    wait_s = min(waits, default=None)
    return Decision(None, None, reason, query, (), verdicts, Basis.REFUSED, refusal=cause, retry_after_s=wait_s)


def _possible_in_s(estimate: _TierEstimate, query: Query, output_share: float, z: float) -> float | None:
    """Predict in how many seconds a tier could serve the request as asked; None: never, as far as is known.

    Enough of its requests must end to leave free slots, and to meet the bounds where they are required. Where only recent
    observations keep a replica from meeting them, they fade with their half-life.
    """
    if estimate.obstacle is not None and estimate.obstacle[0] is not Refusal.AT_CAPACITY:
        return _ready_in_s(estimate.tier) if estimate.obstacle[0] is Refusal.NOT_READY else None
    spec, sla = estimate.tier.spec, query.sla
    ttft_ms, tpot_ms = (sla.ttft_ms, sla.tpot_ms) if query.require else (None, None)
    if query.require and estimate.lossy is not None:
        return None
    waits = []
    for replica in estimate.tier.ready:
        speed = replica.speed
        if speed is None:
            waits.append(UNKNOWN_RETRY_S)
            continue
        idle = speed.times(query.tokens_to_read, IDLE, spec.max_num_seqs, output_share, query.sequences)
        surely = math.exp(z * speed.tpot_spread)
        if (ttft_ms is not None and idle.ttft_ms * math.exp(z * speed.ttft_spread) > ttft_ms) or (
            tpot_ms is not None and idle.tpot_ms * surely > tpot_ms
        ):
            continue
        limit = min(spec.max_in_flight, replica.limit)
        ending = max(replica.taken + min(query.sequences, limit) - limit, 1)
        if tpot_ms is not None:
            fitting = max(n for n in range(1, spec.max_num_seqs + 1) if speed.step_ms(n) * surely <= tpot_ms)
            ending = max(ending, replica.load.sequences + query.sequences - fitting)
        wait_s = ending * speed.relief_ms(replica.load, spec.max_num_seqs, output_share) / 1000
        waits.append(max(wait_s, replica.admits_in_s) or HALF_LIFE_S)
    return min(waits, default=None)


def _ready_in_s(tier: TierSnapshot) -> float | None:
    """Return about when a tier is ready; None: not by itself."""
    if tier.preparing is None or tier.preparing.remaining_s is None:
        return STARTING_RETRY_S if tier.preparing is None or tier.preparing.failed is None else None
    return tier.preparing.remaining_s


def _verdict(estimate: _TierEstimate, chosen: _TierEstimate | None) -> TierReport:
    """Return what a decision reports of one tier."""
    if estimate is chosen:
        text = CHOSEN
    elif against := estimate.breaks or estimate.unfit:
        text = against
    elif chosen is None:
        text = "not asked for"
    elif chosen.cost is not None and estimate.cost is not None and estimate.under_load:
        text = f"would do, at {estimate.cost:.2g} engine-seconds instead of {chosen.cost:.2g}"
    else:
        text = f"would do; {chosen.name} was taken"
    times, loss, cost = estimate.times, estimate.loss, estimate.cost
    return TierReport(
        tier=estimate.name,
        state=estimate.tier.state,
        predicted_ttft_ms=round(times.ttft_ms, 1) if times else None,
        predicted_tpot_ms=round(times.tpot_ms, 2) if times else None,
        expected_loss=loss,
        cost=round(cost, 4) if cost is not None else None,
        verdict=text,
        meets=estimate.breaks is None,
    )
