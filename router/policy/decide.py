"""Choose a tier. Pure: facts about the request and a fleet snapshot in, a decision with reasons out.

Precedence: what is possible (context, readiness, free slots), then ``require``, then the SLA's bounds, then the hint, then
the prompt's class and complexity: of the tiers whose expected loss on such prompts is allowed, the one with the least engine
time serves. If the objective is the cheapest tier, the loss budget is allowed. If it is the best, that rises with the load,
from a negligible loss up to the loss budget: it is the value of engine time, which is nothing while engines idle.
"""

from __future__ import annotations

import math
from operator import attrgetter
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from router.policy.decision import Basis, Choice, Decision, Estimate, Refusal
from router.policy.explain import obstacle_text, reason
from router.policy.losses import Z95
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
    tokens, output = query.tokens_to_read, fleet.output_share * query.max_tokens * query.sequences
    request = Request(tokens, output, query.sequences, tokens > fleet.long_prompt_tokens, fleet.output_share)
    choice, possible, within = _undecided(query, fleet, table, request), [], []
    only = query.hint if query.require else None
    for estimate in choice.estimates:
        if estimate.obstacle is None and (only is None or estimate.tier is only):
            possible.append(estimate)
            if estimate.meets:
                within.append(estimate)
    if not possible or (query.require and not within):
        return _refused(choice, fleet, request, possible=bool(possible))
    degraded: tuple[Degraded, ...] = ()
    if within:
        chosen, basis = _choose(query, table, within)
        choice = replace(choice, chosen=chosen, basis=basis)
        if basis is Basis.DEGRADED_QUALITY:
            degraded = ("quality",)
    else:
        chosen, degraded = _nearest(query, possible, table)
        basis = next(basis for what, basis in _DEGRADED if what in degraded)
        choice = replace(choice, chosen=chosen, basis=basis, given_up=degraded)
    return Decision(chosen.tier, reason(choice, 0), query, choice, basis, degraded)


def _undecided(query: Query, fleet: FleetSnapshot, table: PolicyParameters, request: Request) -> Choice:
    found, highest, there, tokens = [], None, query.sequences, query.prompt_tokens + query.max_tokens
    free = (query.allowed, query.precisions, query.only, query.adapter, query.undraftable) == _ANY_TIER
    for tier in fleet.tiers:
        best, obstacle = candidate(tier, request, fleet.load), None
        if not free or tokens > tier.spec.max_model_len:
            obstacle = _obstacle(tier.spec, query, ready=best.replica is not None)
        if obstacle is None and best.replica is not None:
            highest = tier
        found.append((tier, best, obstacle))
        there += sum(map(SLOTS, tier.replicas))
    confidence = query.sla.confidence
    z = _NORMAL.inv_cdf(table.sla_confidence if confidence is None else confidence)
    scarcity = scarcity_at(table.objective, _taken(highest))
    asked = query.sla.max_quality_loss
    bound = table.max_loss.get(query.features.prompt_class) if asked is None else asked
    context = _Context(query, table, request, z, scarcity, bound, there)
    below, estimates = query.hint is not None, []
    for tier, best, obstacle in found:
        if tier.spec.name is query.hint:
            below = False
        estimates.append(_estimate(tier, best, obstacle, context, below=below))
    return Choice(query, table, z, scarcity, tuple(estimates), bound=bound)


def _refused(choice: Choice, fleet: FleetSnapshot, request: Request, *, possible: bool) -> Decision:
    tiers = {tier.spec.name: tier for tier in fleet.tiers}
    there = [o for o in choice.asked if not tiers[o.tier].spec.absent]
    causes = {o.obstacle for o in there} or {Refusal.NOT_READY}
    refusal = Refusal.SLA_UNMET if possible else next(c for c in LIKELIEST_TO_PASS if c in causes)
    waits = [_possible_in_s(tiers[o.tier], o, choice, request, fleet) for o in choice.asked]
    lengths = [tiers[o.tier].spec.max_model_len for o in choice.asked if o.obstacle is Refusal.TOO_LONG]
    alone = all(o.obstacle in LIKELIEST_TO_PASS[2:] for o in there)
    longest = max(lengths, default=0) if alone else 0
    return Decision(
        None,
        reason(choice, longest),
        choice.query,
        choice,
        Basis.REFUSED,
        refusal=refusal,
        retry_after_s=min([wait for wait in waits if wait is not None], default=None),
        longest=longest,
    )


class _Context(NamedTuple):
    """What is the same for all tiers of a decision.

    Attributes:
        bound: See ``Choice``.
        there: Sequences in the fleet, the request's own included.
    """

    query: Query
    table: PolicyParameters
    request: Request
    z: float
    scarcity: float
    bound: float | None
    there: int


def _estimate(
    tier: TierSnapshot, found: Candidate, obstacle: Refusal | None, context: _Context, *, below: bool
) -> Estimate:
    """Return what can be expected of one tier; ``obstacle``: whatever its load; ``below``: it is below the hint."""
    query, table, request, z, scarcity, bound, there = context
    spec, (free, replica, times, cached, *_) = tier.spec, found
    if obstacle is None and not free:
        obstacle = Refusal.NOT_READY if replica is None else Refusal.AT_CAPACITY
    speed, cost, batch = None, None, min(spec.max_num_seqs, there)
    if replica is not None and replica.speed is not None:
        speed, to_read = replica.speed, max(request.prompt_tokens - (cached or 0), 0)
        engine_ms = speed.engine_ms(to_read, max(1.0, request.output_tokens), batch)
        cost = engine_ms * (times.drift if times is not None else 1.0) / 1000 * table.prices.get(spec.name, 1.0)
    loss, budget = table.loss(spec.name, query.features), table.other_budget
    if spec.name is table.loss_budget:
        budget = table.named_budget
    spare = max(budget - table.negligible_loss, 0.0)
    worst = loss.mean + (loss.high - loss.mean) * z / Z95
    worst, sla, slow, excess = min(worst, 1.0), query.sla, False, 0.0
    if sla.ttft_ms is not None or sla.tpot_ms is not None:
        slow, excess = _slow(sla, times, z)
    lossy = sla.max_quality_loss is not None and worst > sla.max_quality_loss
    return Estimate(
        spec.name,
        spec.precision,
        READY if obstacle is None else tier.status,
        speed,
        batch,
        times,
        loss,
        worst,
        table.negligible_loss + scarcity * spare,
        cost,
        excess,
        obstacle,
        "" if obstacle is None else obstacle_text(obstacle, tier, query),
        slow,
        lossy,
        below or loss.mean > table.negligible_loss + spare or (bound is not None and worst > bound),
        cached,
        obstacle is None and not slow and not lossy,
        found,
    )


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
    if times is None:
        return True, math.inf
    if sla.tpot_ms is not None:
        safe = times.tpot_ms * math.exp(z * times.tpot_spread)
        slow, excess = safe > sla.tpot_ms, safe / sla.tpot_ms
    if sla.ttft_ms is not None:
        safe = times.ttft_ms * math.exp(z * times.ttft_spread)
        slow, excess = slow or safe > sla.ttft_ms, max(excess, safe / sla.ttft_ms)
    return slow, excess


def _taken(highest: TierSnapshot | None) -> float:
    """Return the share of slots that is taken of the highest precision that may serve and is ready.

    It is the tier that would answer if loss alone counted, so its next free slot is what a lossier tier can save.
    """
    filled, room = 0, 0
    if highest is not None:
        most = highest.spec.max_num_seqs
        for replica in highest.replicas:
            if replica.status is READY:
                room += min(most, replica.limit)
                filled += replica.slots
    return filled / max(room, 1)


def scarcity_at(objective: Objective, taken: float) -> float:
    """Return how scarce engine time is, 0..1: the share of the loss budget that is allowed."""
    return 1.0 if objective == "cheapest" else min(max((taken - PLENTY) / (1 - PLENTY), 0.0), 1.0)


def _choose(query: Query, table: PolicyParameters, within: Sequence[Estimate]) -> tuple[Estimate, Basis]:
    """Choose among the tiers that meet the SLA. ``within`` is not empty, and sorted by rising precision."""
    if query.hint is not None:
        for estimate in within:
            if estimate.tier is query.hint:
                return estimate, Basis.HINT
    fit = [o for o in within if not o.unfit]
    if not fit:
        return within[-1], Basis.DEGRADED_QUALITY
    if query.sort is not None:
        sort = query.sort
        return min(fit, key=lambda estimate: estimate.order(sort)), Basis.SORT
    taken = [o for o in fit if o.loss.mean <= o.allowed]
    if not taken:  # the tiers that lose nothing do not serve now
        least = min(o.loss.mean for o in fit)
        taken = [o for o in fit if o.loss.mean == least]
    known = all(o.under_load for o in taken)
    chosen = min(taken, key=Estimate.order) if known else _lowest(taken, table.max_slowdown)
    if chosen.loss.mean > table.negligible_loss:
        return chosen, Basis.BUDGET if len(fit) > 1 else Basis.LEAST_LOSS
    lossless = all(o is chosen or o.loss.mean > table.negligible_loss for o in within)
    return chosen, Basis.LEAST_LOSS if lossless else Basis.NEGLIGIBLE


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
    sla = query.sla
    ttft_ms, tpot_ms = (sla.ttft_ms, sla.tpot_ms) if query.require else (None, None)
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
        to_read = max(request.prompt_tokens - (tier.cached[position] if tier.cached else 0), 0)
        idle = speed.times(to_read, IDLE, spec.max_num_seqs, output_share, query.sequences)
        surely = math.exp(z * speed.tpot_spread)
        if (ttft_ms is not None and idle.ttft_ms * math.exp(z * speed.ttft_spread) > ttft_ms) or (
            tpot_ms is not None and idle.tpot_ms * surely > tpot_ms
        ):
            continue
        load, limit = load_of(replica, tier.output_tokens[position], fleet.load), min(spec.max_in_flight, replica.limit)
        ending = max(replica.slots + min(query.sequences, limit) - limit, 1)
        if tpot_ms is not None:
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
