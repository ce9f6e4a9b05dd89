"""Choose a tier. Pure: facts about the request and a fleet snapshot in, a decision with reasons out.

Precedence: what is possible (context, readiness, free slots), then ``require``, then the SLA's bounds, then the hint, then
the prompt's class and complexity: of the tiers whose expected loss on such prompts is negligible, the one with the least
engine time serves. As load rises, so does the loss that a tier may have, from negligible up to the loss budget: it is the
value of engine time, which is nothing while engines idle. The reason names what was given up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import TYPE_CHECKING

from classifier import PromptClass
from classifier.kinds import Complexity
from router.policy.decision import CHOSEN, SURE, Basis, Decision, Rate, Refusal, TierReport
from router.policy.losses import one_in
from tiers.choice import uncached
from tiers.preparing import about
from tiers.snapshot import has_slots
from tiers.spec import UNKNOWN, ReplicaState, TierName
from tiers.speed import HALF_LIFE_S, IDLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from classifier import PromptFeatures
    from router.policy.decision import Degraded, PolicyParameters, Query, Sort
    from router.policy.losses import ExpectedLoss
    from tiers.snapshot import Expectation, FleetSnapshot, TierSnapshot
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
_NORMAL = NormalDist()
_DEGRADED: tuple[tuple[Degraded, Basis], ...] = (
    ("quality", Basis.DEGRADED_QUALITY),
    ("latency", Basis.DEGRADED_LATENCY),
    ("unmeasured", Basis.DEGRADED_UNMEASURED),
)

# The classes below are never changed once a decision is made; freezing them would cost a third of it.


@dataclass(slots=True)
class _Need:
    """What a prompt of its kind needs.

    Attributes:
        table: The policy's parameters.
        max_loss: Share of answers, 0..1: the request's own bound, else the class's; None: no bound.
        at_least: Lowest tier, from a hint; None: any tier.
    """

    features: PromptFeatures
    table: PolicyParameters
    max_loss: float | None
    at_least: TierName | None
    ranks: Mapping[TierName, int]

    def asks_more(self, tier: TierName) -> bool:
        """Tell whether a tier is below the hinted one."""
        return self.at_least is not None and self.ranks[tier] < self.ranks[self.at_least]

    def allowed(self, tier: TierName, scarcity: float) -> float:
        """Return the share of answers, 0..1, that may get worse on a tier.

        Args:
            tier: The tier.
            scarcity: Of engine time, 0..1.
        """
        negligible = self.table.negligible_loss
        return negligible + scarcity * max(self.table.budget(tier) - negligible, 0.0)

    @property
    def who(self) -> str:
        features = self.features
        sure = features.confidence >= SURE or features.prompt_class is PromptClass.UNKNOWN
        kind = features.prompt_class.value.replace("_", " ") if sure else f"probably {features.prompt_class.value}"
        return f"{kind}, {(features.complexity or Complexity.MODERATE).value}"


@dataclass(slots=True, eq=False)
class _TierEstimate:
    """What can be expected of one tier. None: not known.

    Attributes:
        speed: Of the replica that would serve the request, or of the first ready one.
        worst: Upper bound of the loss at the confidence asked for.
        cost: Engine-seconds, times the tier's price.
        excess: Largest ratio of a predicted time to its bound; infinite where a time is not known.
        obstacle: Why the tier cannot serve now; None: it can.
        slow: It breaks a bound on time, or may, for its times are not known; likewise ``lossy`` on loss.
        unfit: It loses more than the budget or the class's bound allows, or is below the hint.
        meets: It can serve the request within the bounds asked for.
        cached: Prompt tokens that need no prefill on the replica that would serve it.
    """

    tier: TierSnapshot
    spec: TierSpec
    name: TierName
    speed: SpeedModel | None
    times: Expectation | None
    loss: ExpectedLoss
    worst: float
    cost: float | None
    excess: float
    obstacle: Refusal | None
    slow: bool
    lossy: bool
    unfit: bool
    meets: bool
    cached: int | None

    @property
    def under_load(self) -> bool:
        return self.speed is not None and self.speed.under_load


def decide(query: Query, fleet: FleetSnapshot, table: PolicyParameters) -> Decision:
    """Choose a tier that serves the request as asked, or refuse it."""
    table = table.with_adapter(query.adapter)
    z = _NORMAL.inv_cdf(table.sla_confidence if query.sla.confidence is None else query.sla.confidence)
    case = _Case(query, fleet, table, z, _need(query, table, fleet.ranks))
    hint, estimates = query.hint, case.estimates
    asked = estimates if hint is None or not query.require else [o for o in estimates if o.name is hint]
    possible = [o for o in asked if o.obstacle is None]
    within = [o for o in possible if o.meets]
    case.asked, case.possible, case.within = asked, possible, within
    if not possible or (query.require and not within):
        causes = {o.obstacle for o in asked if not o.spec.absent} or {Refusal.NOT_READY}
        refusal = Refusal.SLA_UNMET if possible else next(c for c in LIKELIEST_TO_PASS if c in causes)
        return Decision.explained(case, query, Basis.REFUSED, None, refusal=refusal)
    degraded: tuple[Degraded, ...] = ()
    if within:
        case.chosen, case.basis = chosen, basis = _choose(query, within, case)
        if basis is Basis.DEGRADED_QUALITY:
            degraded = ("quality",)
    else:
        chosen, degraded = _nearest(query, possible, table)
        basis = next(basis for what, basis in _DEGRADED if what in degraded)
        case.chosen, case.basis, case.given_up = chosen, basis, degraded
    return Decision.explained(case, query, basis, chosen.name, degraded=degraded)


def _need(query: Query, table: PolicyParameters, ranks: Mapping[TierName, int]) -> _Need:
    """Return what the prompt needs; a hint that cannot be taken is the lowest tier."""
    asked = query.sla.max_quality_loss
    max_loss = table.max_loss.get(query.features.prompt_class) if asked is None else asked
    return _Need(query.features, table, max_loss, query.hint, ranks)


@dataclass(slots=True, eq=False)
class _Case:
    """One decision: what it is made from, and afterwards what it is explained from.

    Attributes:
        z: The confidence asked for, as a quantile of the normal distribution.
        output: Expected output tokens of all sequences.
        scarcity: Of engine time, 0..1.
        estimates: One for each tier, by rising precision.
        asked: Those of the tiers asked for; of these, ``possible`` can serve now, and ``within`` meet the bounds as well.
        fit: Of these, those within the loss budget and the class's bound, and not below the hint.
        chosen: None: the request is refused.
        given_up: Bounds that no tier meets.
    """

    query: Query
    fleet: FleetSnapshot
    table: PolicyParameters
    z: float
    need: _Need
    scarcity: float = field(init=False)
    output: float = field(init=False)
    estimates: list[_TierEstimate] = field(init=False)
    asked: Sequence[_TierEstimate] = ()
    possible: Sequence[_TierEstimate] = ()
    within: Sequence[_TierEstimate] = ()
    fit: Sequence[_TierEstimate] = ()
    chosen: _TierEstimate | None = None
    basis: Basis = Basis.REFUSED
    given_up: tuple[Degraded, ...] = ()
    _reports: dict[TierName, TierReport] = field(default_factory=dict)

    def __post_init__(self) -> None:
        query, fleet = self.query, self.fleet
        prompt_tokens, sequences = query.tokens_to_read, query.sequences
        output, there = fleet.output_share * query.max_tokens * sequences, fleet.sequences + sequences
        self.output = max(1.0, output)
        self.scarcity = _scarcity(query, fleet, self.table)
        self.estimates = [self._estimate(tier, prompt_tokens, output, there) for tier in fleet.tiers]

    def _estimate(self, tier: TierSnapshot, prompt_tokens: int, output: float, there: int) -> _TierEstimate:
        """Return what can be expected of one tier."""
        query, table, z, spec, need = self.query, self.table, self.z, tier.spec, self.need
        name = spec.name
        free, speed, times, cached = tier.offer(prompt_tokens, output, query.sequences, self.fleet)
        cost, loss = None, table.loss(name, query.features)
        if speed is not None:
            batch = min(spec.max_num_seqs, there)
            to_read = uncached(prompt_tokens, cached)
            engine_ms = speed.engine_ms(to_read, self.output, batch) * (times.drift if times else 1.0)
            cost = engine_ms / 1000 * table.prices.get(name, 1.0)
        worst = loss.at(z)
        obstacle, bound = _obstacle(tier, query, free=free), query.sla.max_quality_loss
        slow, excess = _slow(query, times, z)
        lossy = bound is not None and worst > bound
        return _TierEstimate(
            tier,
            spec,
            name,
            speed,
            times,
            loss,
            worst,
            cost,
            excess,
            obstacle,
            slow,
            lossy,
            unfit=_is_unfit(name, loss, worst, need),
            meets=obstacle is None and not lossy and not slow,
            cached=cached,
        )

    def rate(self, tier: TierName) -> Rate | None:
        """Return the engine time that a token takes on a tier, as ``_TierEstimate.cost`` has it, without its price."""
        estimate = next((o for o in self.estimates if o.name is tier), None)
        if estimate is None or estimate.speed is None:
            return None
        speed, drift = estimate.speed, estimate.times.drift if estimate.times else 1.0
        batch = min(estimate.spec.max_num_seqs, self.fleet.sequences + self.query.sequences)
        return Rate(speed.engine_ms(1, 0, batch) * 1000 * drift, speed.engine_ms(0, 1, batch) * 1000 * drift)

    def precision(self) -> str | None:
        return None if self.chosen is None else self.chosen.spec.precision

    def reason(self) -> str:
        """Return why, for a person. What was asked for and is not given comes first."""
        chosen, query = self.chosen, self.query
        if chosen is None:
            reason = "; ".join([f"{o.name} {self.verdict(o.name).verdict}" for o in self.asked])
            lengths = [o.spec.max_model_len for o in self.asked if o.obstacle is Refusal.TOO_LONG]
            if not lengths or any(o.obstacle not in LIKELIEST_TO_PASS[2:] for o in self.asked if not o.spec.absent):
                return reason
            return (
                f"This model's maximum context length is {max(lengths)} tokens: {reason}"  # libraries know these words
            )
        reason = self._why(chosen)
        if query.hint is not None and chosen.name is not query.hint:
            hinted = next(o for o in self.estimates if o.name is query.hint)
            against = "not chosen" if hinted.meets else self._against(hinted)
            reason = f"hint {query.hint} not taken: {against}; {reason}"
        if query.precisions is not None:
            reason += f"; the request allows {', '.join(sorted(query.precisions))} only"
        return f"over budget, so only {chosen.name} may serve; {reason}" if query.over_budget else reason

    def _why(self, chosen: _TierEstimate) -> str:
        query_sort = self.query.sort
        if not self.within:
            given_up = " and ".join([what for what in self.given_up if what != "unmeasured"])
            known = f"expected to meet the SLA: {given_up} given up" if given_up else "known to meet the SLA"
            return f"no tier is {known}, {chosen.name} taken"
        if self.basis is Basis.HINT:
            return f"hint {chosen.name}"
        if self.basis is Basis.DEGRADED_QUALITY:
            return f"degraded to {chosen.name}: {self._unfit(chosen)}, {_no_better(self.asked)}"
        if self.basis is Basis.SORT and query_sort is not None:
            return f"{self.need.who}: {_sorted_text(chosen, query_sort)}"
        return f"{self.need.who}: {self._chosen_text(chosen)}"

    def _chosen_text(self, chosen: _TierEstimate) -> str:
        highest, loss, name = self.fleet.tiers[-1].spec.name, chosen.loss, chosen.name
        if self.basis is Basis.BUDGET:
            wrong = f"{name} would get {one_in(loss.mean)} answers wrong that {highest} gets right ({loss.basis})"
            return f"{wrong}, within the loss budget while engine time is scarce, and {self._cheap_text(chosen)}"
        worse = [o for o in self.within if o.loss.mean > max(loss.mean, self.table.negligible_loss)]
        parts = [_wrong_text(worse, highest)] if worse else []
        if self.basis is Basis.NEGLIGIBLE:
            good = "loses nothing" if loss.mean == 0 else f"is as good ({one_in(loss.mean)} gets worse, {loss.basis})"
            parts.append(f"{name} {good}, and {self._cheap_text(chosen)}")
        alone = f"no tier but {name} serves now" if len(self.within) == 1 else f"no tier loses less than {name}"
        return "; ".join(parts) or alone

    def _cheap_text(self, chosen: _TierEstimate) -> str:
        """Return what speaks for a tier among those that lose little enough."""
        others = ", ".join([f"{o.name} {_cost(o):.2g}" for o in self.fit if o is not chosen and o.cost is not None])
        if chosen.under_load and others:
            return f"takes {_cost(chosen):.2g} engine-seconds ({others})"
        lower = [o for o in self.fit if self.need.ranks[o.name] < self.need.ranks[chosen.name]]
        return "is much faster here than lower precisions" if lower else "is the lowest precision"

    def fallbacks(self) -> tuple[TierName, ...]:
        """Return the tiers that could take over, in order."""
        chosen = self.chosen
        if chosen is None or self.query.require:
            return ()
        spare = [(o.name, o.speed) for o in self.possible if o is not chosen]
        return _fallback_order(chosen.name, spare, self.need.ranks, self.table.max_slowdown)

    def retry_after_s(self) -> float | None:
        """Return the predicted seconds until a refused request could be served; None: never, as far as is known."""
        waits = [_possible_in_s(o, self.query, self.fleet.output_share, self.z) for o in self.asked]
        return min([wait for wait in waits if wait is not None], default=None)

    def verdicts(self) -> tuple[TierReport, ...]:
        return tuple([self.verdict(o.name) for o in self.estimates])

    def verdict(self, tier: TierName) -> TierReport:
        made = self._reports.get(tier)
        if made is None:
            estimate = next((o for o in self.estimates if o.name is tier), None)
            if estimate is None:
                raise KeyError(tier)
            made = self._reports[tier] = self._report(estimate)
        return made

    def _report(self, estimate: _TierEstimate) -> TierReport:
        times, cost = estimate.times, estimate.cost
        return TierReport(
            tier=estimate.name,
            state=ReplicaState.READY if estimate.obstacle is None else estimate.tier.state,
            predicted_ttft_ms=round(times.ttft_ms, 1) if times else None,
            predicted_tpot_ms=round(times.tpot_ms, 2) if times else None,
            expected_loss=estimate.loss,
            cost=round(cost, 4) if cost is not None else None,
            verdict=self._verdict(estimate),
            cached_prompt_tokens=estimate.cached,
        )

    def _verdict(self, estimate: _TierEstimate) -> str:
        chosen = self.chosen
        if estimate is chosen:
            return CHOSEN
        if not estimate.meets or estimate.unfit:
            return self._against(estimate)
        if chosen is None:
            return "not asked for"
        if estimate.loss.mean > self.need.allowed(estimate.name, self.scarcity) and self.scarcity < 1:
            return f"would get {one_in(estimate.loss.mean)} answers wrong; engines are not scarce enough for that"
        if chosen.cost is not None and estimate.cost is not None and estimate.under_load:
            return f"would do, at {estimate.cost:.2g} engine-seconds instead of {chosen.cost:.2g}"
        return f"would do; {chosen.name} was taken"

    def _against(self, estimate: _TierEstimate) -> str:
        if estimate.obstacle is not None:
            return _obstacle_text(estimate, self.query)
        if estimate.lossy:
            return _lossy_text(estimate, self.query)
        if estimate.slow:
            return _slow_text(estimate, self.query, self.z)
        return self._unfit(estimate)

    def _unfit(self, estimate: _TierEstimate) -> str:
        need, name = self.need, estimate.name
        if need.asks_more(name):
            return f"hint {need.at_least} wants {need.at_least} or higher"
        bound = need.max_loss
        if bound is not None and estimate.worst > bound:
            return f"{need.who}: {name} may get {estimate.worst:.3f} of answers wrong, {bound:g} is allowed"
        wrong = one_in(estimate.loss.mean)
        return f"{need.who}: {name} would get {wrong} answers wrong, more than policy.loss_budget allows"


def _obstacle(tier: TierSnapshot, query: Query, *, free: bool) -> Refusal | None:
    spec = tier.spec
    if not query.allows(spec.name):
        return Refusal.NOT_ALLOWED
    if (unable := _unable(spec, query)) is not None:
        return Refusal.NOT_READY if unable is Refusal.EXCLUDED and _may_turn_out(tier, query) else unable
    if free:
        return None
    return Refusal.AT_CAPACITY if tier.is_ready else Refusal.NOT_READY


def _may_turn_out(tier: TierSnapshot, query: Query) -> bool:
    """Tell whether a tier's precision, not known before it is ready, may turn out to be one that the request allows."""
    known = tier.is_ready or tier.spec.precision != UNKNOWN
    return not known and (query.only is None or tier.spec.name in query.only)


def _unable(spec: TierSpec, query: Query) -> Refusal | None:
    if not query.takes(spec):
        return Refusal.EXCLUDED
    if query.adapter is not None and query.adapter not in spec.adapters:
        return Refusal.NO_ADAPTER
    if query.undraftable and spec.draft is not None:
        return Refusal.UNSUPPORTED
    if query.prompt_tokens + query.max_tokens > spec.max_model_len:
        return Refusal.TOO_LONG
    return None


def _obstacle_text(estimate: _TierEstimate, query: Query) -> str:
    if estimate.obstacle is Refusal.NOT_ALLOWED:
        return "is not allowed for this key" + (" over its budget" if query.over_budget else "")
    if estimate.obstacle is Refusal.EXCLUDED:
        return _excluded_text(estimate.spec, query)
    if estimate.obstacle is Refusal.NO_ADAPTER:
        return f"does not offer the adapter {query.adapter}"
    if estimate.obstacle is Refusal.UNSUPPORTED:
        return f"has a draft, with which vLLM takes no {query.undraftable}"
    if estimate.obstacle is Refusal.TOO_LONG:
        tokens = f"{query.prompt_tokens} prompt + {query.max_tokens} output tokens"
        return f"{tokens} exceed its context of {estimate.spec.max_model_len}"
    not_ready = estimate.obstacle is Refusal.NOT_READY
    return _not_ready(estimate.tier) if not_ready else _full(estimate.tier, query.sequences)


def longest_context(query: Query, fleet: FleetSnapshot) -> int:
    """Return the longest context of the tiers that may serve a request of any length; of those that are ready, if any is.

    Neither load nor bounds count. 0: no tier may.
    """
    short = replace(query, prompt_tokens=0, max_tokens=0)
    only = query.hint if query.require else None
    able = [
        tier
        for tier in fleet.tiers
        if query.allows(tier.spec.name)
        and only in {None, tier.spec.name}
        and not tier.spec.absent
        and _unable(tier.spec, short) is None
    ]
    ready = [tier for tier in able if tier.is_ready]
    return max((tier.spec.max_model_len for tier in ready or able), default=0)


def within_context(query: Query, fleet: FleetSnapshot) -> Query:
    """Return a query whose caller named no limit with as many output tokens as the longest context leaves, at least one."""
    if query.prompt_tokens + query.max_tokens <= max([tier.spec.max_model_len for tier in fleet.tiers]):
        return query
    left = longest_context(query, fleet) - query.prompt_tokens
    return replace(query, max_tokens=max(min(query.max_tokens, left), 1))


def _excluded_text(spec: TierSpec, query: Query) -> str:
    if query.only is not None and spec.name not in query.only:
        return "is not among the tiers that the request allows"
    return f"serves {spec.precision}, and the request allows {', '.join(sorted(query.precisions or ()))} only"


def _not_ready(tier: TierSnapshot) -> str:
    preparing = tier.preparing
    if preparing is None:
        return f"is {tier.state.value}"
    if preparing.failed is not None:
        return "has no checkpoint: it could not be made"
    state = "being prepared" if tier.state is ReplicaState.PREPARING else tier.state.value
    return f"is {state}" + ("" if preparing.remaining_s is None else f", ready in {about(preparing.remaining_s)}")


def _full(tier: TierSnapshot, sequences: int) -> str:
    ready = tier.views
    admitting = [r for r in ready if r.admits]
    if not admitting:
        wait_s = min(r.admits_in_s for r in ready)
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


def _slow(query: Query, times: Expectation | None, z: float) -> tuple[bool, float]:
    """Tell whether a tier's times break a bound with the confidence asked for; return the largest ratio of time to bound.

    An unknown time meets no bound. Times are log-normally distributed about the prediction; ``z`` is the confidence as a
    quantile of the normal distribution.
    """
    sla, slow, excess = query.sla, False, 0.0
    if times is None:
        return (True, math.inf) if sla.ttft_ms is not None or sla.tpot_ms is not None else (slow, excess)
    if sla.tpot_ms is not None:
        safe = times.tpot_ms * math.exp(z * times.tpot_spread)
        slow, excess = safe > sla.tpot_ms, safe / sla.tpot_ms
    if sla.ttft_ms is not None:
        safe = times.ttft_ms * math.exp(z * times.ttft_spread)
        slow, excess = slow or safe > sla.ttft_ms, max(excess, safe / sla.ttft_ms)
    return slow, excess


def _slow_text(estimate: _TierEstimate, query: Query, z: float) -> str:
    """Return which bound a tier's times break with the confidence asked for: of both, that on TTFT."""
    times, sla, found = estimate.times, query.sla, "its speed is not measured yet, and latency is bound"
    for name, expected, spread, bound in (
        (
            ("TPOT", times.tpot_ms, times.tpot_spread, sla.tpot_ms),
            ("TTFT", times.ttft_ms, times.ttft_spread, sla.ttft_ms),
        )
        if times is not None
        else ()
    ):
        if bound is None:
            continue
        safe = expected * math.exp(z * spread)
        if safe > bound:
            unsure = "" if expected > bound else f", up to {safe:.0f} at the confidence asked for"
            found = f"{name} of {expected:.0f} ms expected{unsure}, {bound:g} asked"
    return found


def _lossy_text(estimate: _TierEstimate, query: Query) -> str:
    loss, bound = estimate.loss, query.sla.max_quality_loss
    return f"it may get {estimate.worst:.3f} of answers wrong (expected {loss.mean:.3f}, {loss.basis}), {bound:g} asked"


def _is_unfit(tier: TierName, loss: ExpectedLoss, worst: float, need: _Need) -> bool:
    """Tell whether a tier is below what the prompt needs, however scarce engine time is."""
    if need.asks_more(tier) or loss.mean > need.allowed(tier, 1.0):
        return True
    return need.max_loss is not None and worst > need.max_loss


def _scarcity(query: Query, fleet: FleetSnapshot, table: PolicyParameters) -> float:
    """Return how scarce engine time is, 0..1: always where it has a price, else by how full the highest precision is.

    It is the tier that would answer if loss alone counted, so its next free slot is what a lossier tier can save.
    """
    if table.prices:
        return 1.0
    able = [t for t in fleet.tiers if t.is_ready and _obstacle(t, query, free=True) is None]
    if not able:
        return 0.0
    views = able[-1].views
    room = sum(min(able[-1].spec.max_num_seqs, view.limit) for view in views)
    filled = sum(view.taken for view in views) / max(room, 1)
    return min(max((filled - PLENTY) / (1 - PLENTY), 0.0), 1.0)


def _choose(query: Query, within: Sequence[_TierEstimate], case: _Case) -> tuple[_TierEstimate, Basis]:
    """Choose among the tiers that meet the SLA. ``within`` is not empty, and sorted by rising precision."""
    if query.hint is not None:
        for estimate in within:
            if estimate.name is query.hint:
                return estimate, Basis.HINT
    case.fit = fit = [o for o in within if not o.unfit]
    if not fit:
        return within[-1], Basis.DEGRADED_QUALITY
    if query.sort is not None:
        sort = query.sort
        return min(fit, key=lambda estimate: _sorted_by(estimate, sort)), Basis.SORT
    taken = [o for o in fit if o.loss.mean <= case.need.allowed(o.name, case.scarcity)]
    if not taken:  # the tiers that lose nothing do not serve now
        least = min(o.loss.mean for o in fit)
        taken = [o for o in fit if o.loss.mean == least]
    chosen = min(taken, key=_cost) if all(o.under_load for o in taken) else _lowest(taken, case.table.max_slowdown)
    if chosen.loss.mean > case.table.negligible_loss:
        return chosen, Basis.BUDGET if len(fit) > 1 else Basis.LEAST_LOSS
    lossless = all(o is chosen or o.loss.mean > case.table.negligible_loss for o in within)
    return chosen, Basis.LEAST_LOSS if lossless else Basis.NEGLIGIBLE


def _no_better(asked: Sequence[_TierEstimate]) -> str:
    """Return why no tier that meets the class's needs was taken."""
    better = [o for o in asked if not o.unfit]
    if all(o.obstacle is Refusal.NOT_ALLOWED for o in better):
        return "none of which this key allows"
    if all(o.obstacle in {Refusal.NOT_ALLOWED, Refusal.EXCLUDED} for o in better):
        return "none of which the request allows"
    if any(o.obstacle is None for o in better):
        return "none of which is expected to meet the SLA"
    return "none of which can serve now"


def _sorted_by(estimate: _TierEstimate, sort: Sort) -> float:
    """Return what a request that says by what tiers are chosen orders them by, least first; not known: last."""
    if sort == "price":
        return _cost(estimate)
    if estimate.times is None:
        return math.inf
    return estimate.times.ttft_ms if sort == "latency" else estimate.times.tpot_ms


def _sorted_text(chosen: _TierEstimate, sort: Sort) -> str:
    """Return what the choice by a request's own order rests on."""
    value = _sorted_by(chosen, sort)
    if value == math.inf:
        return f"sort {sort}: speed is not measured, so lowest precision that serves is {chosen.name}"
    what = {"price": "engine-seconds", "latency": "ms to the first token", "throughput": "ms a token"}[sort]
    return f"sort {sort}: {chosen.name} has the least, {value:.2g} {what} expected"


def _cost(estimate: _TierEstimate) -> float:
    return math.inf if estimate.cost is None else estimate.cost


def _wrong_text(lower: Sequence[_TierEstimate], highest: TierName) -> str:
    first, *others = lower
    wrong = f"{one_in(first.loss.mean)} answers wrong that {highest} gets right ({first.loss.basis})"
    return "; ".join([f"{first.name} would get about {wrong}", *(f"{o.name} {one_in(o.loss.mean)}" for o in others)])


def _lowest(fit: Sequence[_TierEstimate], max_slowdown: float) -> _TierEstimate:
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
    query: Query, possible: Sequence[_TierEstimate], table: PolicyParameters
) -> tuple[_TierEstimate, tuple[Degraded, ...]]:
    """Choose where no tier meets every bound, and say what is given up: what ``give_up`` names, if a tier keeps the rest.

    A hinted tier that keeps it is taken. Else of those that keep the loss, that of the class too if one does, the least
    late: so load beyond what the tiers can do spreads over all of them. Of those that keep the latency, the one that
    loses least.
    """
    lossless = [o for o in possible if not o.lossy]
    prompt = [o for o in possible if not o.slow]
    keeping = lossless if table.give_up == "latency" else prompt
    hinted = [o for o in keeping if o.name is query.hint]
    if hinted:
        chosen = hinted[0]
    elif lossless and (table.give_up == "latency" or not prompt):
        fit = [o for o in lossless if not o.unfit] or lossless
        chosen = min(fit, key=lambda o: (o.excess, _cost(o)))
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
        (other.spec.name, other.views[0].speed)
        for other in fleet.tiers
        if other.spec.name is not tier and _obstacle(other, query, free=False) is Refusal.AT_CAPACITY
    ]
    return _fallback_order(tier, spare, fleet.ranks, table.max_slowdown)


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


def _possible_in_s(estimate: _TierEstimate, query: Query, output_share: float, z: float) -> float | None:
    """Predict in how many seconds a tier could serve the request as asked; None: never, as far as is known.

    Enough of its requests must end to leave free slots, and to meet the bounds where they are required. Where only recent
    observations keep a replica from meeting them, they fade with their half-life.
    """
    if estimate.obstacle not in {None, Refusal.AT_CAPACITY}:
        return _ready_in_s(estimate.tier) if estimate.obstacle is Refusal.NOT_READY else None
    spec, sla = estimate.spec, query.sla
    ttft_ms, tpot_ms = (sla.ttft_ms, sla.tpot_ms) if query.require else (None, None)
    if query.require and estimate.lossy:
        return None
    waits = []
    for replica in estimate.tier.ready:
        speed = replica.speed
        if speed is None:
            waits.append(UNKNOWN_RETRY_S)
            continue
        to_read = uncached(query.tokens_to_read, replica.cached_tokens)
        idle = speed.times(to_read, IDLE, spec.max_num_seqs, output_share, query.sequences)
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
    if tier.preparing is None or tier.preparing.remaining_s is None:
        return STARTING_RETRY_S if tier.preparing is None or tier.preparing.failed is None else None
    return tier.preparing.remaining_s
