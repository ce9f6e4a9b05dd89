"""Choose a tier. Pure: facts about the request and a fleet snapshot in, a decision with reasons out.

Precedence: what is possible (context, readiness, room), then ``require``, then the SLA's bounds, then the hint, then the
prompt's class. What loses is named in the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from tiers.spec import Precision, ReplicaState, TierName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from classifier import PromptClass, PromptFeatures
    from tiers.fleet import FleetSnapshot, TierSnapshot


@dataclass(frozen=True, slots=True)
class PolicyTable:
    """The policy's parameters; see the settings of the same names."""

    class_floor: Mapping[PromptClass, TierName]
    min_confidence: float
    max_slowdown: float
    losses: Mapping[TierName, Mapping[PromptClass, ExpectedLoss]] = field(default_factory=dict)

    def loss(self, tier: TierName, features: PromptFeatures) -> ExpectedLoss | None:
        """Return what a tier is measured to lose on a prompt; of a class in doubt, the worst of all classes."""
        if tier is TierName.PRECISE:
            return NO_LOSS
        measured = self.losses.get(tier, {})
        if features.confidence >= self.min_confidence:
            return measured.get(features.prompt_class)
        return max(measured.values(), key=lambda loss: loss.high, default=None)


@dataclass(frozen=True, slots=True)
class ExpectedLoss:
    """Share of tokens, 0..1, that are not the highest precision's first choice: estimate and interval."""

    mean: float
    low: float
    high: float


NO_LOSS = ExpectedLoss(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Sla:
    """What the caller asks for; None: no bound. Times in milliseconds, loss 0..1."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    max_quality_loss: float | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """One request as the policy sees it.

    Attributes:
        features: Of the prompt.
        prompt_tokens: With system prompt and chat template.
        max_tokens: Output tokens at most.
        hint: The tier asked for; None: any.
        require: Hint and SLA are conditions, not preferences.
        sla: Bounds.
        allowed: The tiers that the caller's key may use.
    """

    features: PromptFeatures
    prompt_tokens: int
    max_tokens: int
    hint: TierName | None = None
    require: bool = False
    sla: Sla = Sla()
    allowed: frozenset[TierName] = frozenset(TierName)


class Refusal(Enum):
    """Why no tier serves a request."""

    TOO_LONG = "too_long"
    NOT_READY = "not_ready"
    AT_CAPACITY = "at_capacity"
    SLA_UNMET = "sla_unmet"
    NOT_ALLOWED = "not_allowed"


CHOSEN = "chosen"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the policy knows and thinks of one tier. None: not known yet."""

    tier: TierName
    state: ReplicaState
    predicted_ttft_ms: float | None
    predicted_tpot_ms: float | None
    expected_loss: float | None
    cost: float | None
    verdict: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes and why. Made once, then only reported.

    Attributes:
        tier: The tier to serve it; None: refused.
        reason: For a person; without any of the prompt's text.
        fallbacks: Tiers to try, in order, if this one fails before the first byte.
        verdicts: One a tier, by rising precision.
        refusal: Why there is no tier; None where there is one.
    """

    tier: TierName | None
    precision: Precision | None
    reason: str
    query: Query
    fallbacks: tuple[TierName, ...]
    verdicts: tuple[Verdict, ...]
    refusal: Refusal | None = None


def decide(query: Query, fleet: FleetSnapshot, table: PolicyTable) -> Decision:
    """Choose the lowest precision that serves the request, or refuse it."""
    doubts = {tier.spec.name: _impossible(tier, query) for tier in fleet.tiers}
    possible = [tier for tier in fleet.tiers if doubts[tier.spec.name] is None]
    if query.require and query.hint is not None:
        possible = [tier for tier in possible if tier.spec.name is query.hint]
    if not possible:
        return _refuse(query, fleet, table, doubts)
    within = [tier for tier in possible if _outside_sla(tier, query, table) is None]
    if query.require and not within:
        return _refuse(query, fleet, table, doubts, Refusal.SLA_UNMET)
    chosen, reason = _choose(query, within or possible, table)
    notes = [] if within else ["no tier is expected to meet the SLA, so it was set aside"]
    if query.hint is not None and chosen is not query.hint:
        notes.append(f"hint {query.hint} not taken: {_why_not(query, fleet, table, doubts)}")
    if query.sla.max_quality_loss is not None and within and not table.losses:
        notes.append("loss is not measured yet, so only the reference precision is sure to keep max_quality_loss")
    order = [] if query.require else [tier.spec.name for tier in possible if tier.spec.name is not chosen]
    return Decision(
        tier=chosen,
        precision=fleet.tier(chosen).spec.precision,
        reason="; ".join([reason, *notes]),
        query=query,
        fallbacks=_fallback_order(chosen, order),
        verdicts=_verdicts(query, fleet, table, doubts, chosen, reason),
    )


def _impossible(tier: TierSnapshot, query: Query) -> tuple[Refusal, str] | None:
    """Return why a tier cannot serve the request now, or None."""
    spec = tier.spec
    if spec.name not in query.allowed:
        return Refusal.NOT_ALLOWED, "is not allowed for this key"
    if query.prompt_tokens + query.max_tokens > spec.max_model_len:
        return Refusal.TOO_LONG, (
            f"{query.prompt_tokens} prompt + {query.max_tokens} output tokens exceed its context of {spec.max_model_len}"
        )
    if not tier.ready:
        return Refusal.NOT_READY, f"is {tier.state.value}"
    if not tier.has_room:
        return Refusal.AT_CAPACITY, f"has all of its {spec.max_in_flight} places taken"
    return None


def _outside_sla(tier: TierSnapshot, query: Query, table: PolicyTable) -> str | None:
    """Return the bound that a tier is expected to break, or None. An unknown latency does not break a bound."""
    sla, speed = query.sla, tier.speed
    if sla.max_quality_loss is not None:
        loss = table.loss(tier.spec.name, query.features)
        if loss is None:
            return f"its loss is not measured, max_quality_loss is {sla.max_quality_loss:g}"
        if loss.high > sla.max_quality_loss:
            return f"its loss may be {loss.high:.3f} (measured {loss.mean:.3f}), {sla.max_quality_loss:g} asked"
    if speed is None:
        return None
    ttft_ms = speed.ttft_ms(query.prompt_tokens)
    if sla.ttft_ms is not None and ttft_ms > sla.ttft_ms:
        return f"TTFT of {ttft_ms:.0f} ms expected, {sla.ttft_ms:g} asked"
    if sla.tpot_ms is not None and speed.tpot_ms > sla.tpot_ms:
        return f"TPOT of {speed.tpot_ms:.0f} ms expected, {sla.tpot_ms:g} asked"
    return None


def _choose(query: Query, candidates: Sequence[TierSnapshot], table: PolicyTable) -> tuple[TierName, str]:
    """Choose among tiers that can serve, and say why. ``candidates`` is not empty and rises in precision."""
    names = [tier.spec.name for tier in candidates]
    if query.hint in names:
        assert query.hint is not None
        return query.hint, f"hint {query.hint}"
    floor, why = _floor(query, table)
    allowed = [tier for tier in candidates if tier.spec.name.rank >= floor.rank]
    if not allowed:
        best = names[-1]
        barred = query.allowed.isdisjoint(name for name in TierName if name.rank >= floor.rank)
        cause = "none of which this key allows" if barred else "none of which can serve now"
        return best, f"degraded to {best}: {why} wants {floor} or higher, {cause}"
    chosen = allowed[0]
    for higher in allowed[1:]:
        if _dominated(chosen, higher, table.max_slowdown):
            chosen = higher
    if chosen is allowed[0]:
        return chosen.spec.name, f"{why}: lowest precision that serves is {chosen.spec.name}"
    return chosen.spec.name, (
        f"{why}: {allowed[0].spec.name} would do, but {chosen.spec.name} was measured over "
        f"{table.max_slowdown:g} times faster here at a higher precision"
    )


def _floor(query: Query, table: PolicyTable) -> tuple[TierName, str]:
    """Return the lowest tier to take: what the prompt's class allows, or a higher hint that could not be taken itself.

    An unsure class asks for one tier more.
    """
    features = query.features
    floor = table.class_floor[features.prompt_class]
    if query.hint is not None and query.hint.rank > floor.rank:
        return query.hint, f"hint {query.hint}"
    if features.confidence >= table.min_confidence or floor is TierName.PRECISE:
        return floor, f"class {features.prompt_class.value}"
    raised = list(TierName)[floor.rank + 1]
    return raised, f"class {features.prompt_class.value} at a confidence of only {features.confidence:.2f}"


def _dominated(lower: TierSnapshot, higher: TierSnapshot, max_slowdown: float) -> bool:
    """Tell whether a higher precision is so much faster that the lower one has nothing to offer."""
    if lower.idle_speed is None or higher.idle_speed is None:
        return False
    return lower.idle_speed.tpot_ms > max_slowdown * higher.idle_speed.tpot_ms


def _fallback_order(chosen: TierName, others: Sequence[TierName]) -> tuple[TierName, ...]:
    """Order other tiers for a retry: higher precisions first, then lower ones from the top."""
    higher = [name for name in others if name.rank > chosen.rank]
    lower = [name for name in others if name.rank < chosen.rank]
    return (*higher, *reversed(lower))


def _refuse(
    query: Query,
    fleet: FleetSnapshot,
    table: PolicyTable,
    doubts: Mapping[TierName, tuple[Refusal, str] | None],
    refusal: Refusal | None = None,
) -> Decision:
    """Refuse: by the kindest cause among the tiers asked for, since that is the one that may pass."""
    asked = [query.hint] if query.require and query.hint is not None else [t.spec.name for t in fleet.tiers]
    causes = [doubt[0] for name, doubt in doubts.items() if doubt is not None and name in asked]
    kindest = (Refusal.AT_CAPACITY, Refusal.NOT_READY, Refusal.TOO_LONG, Refusal.NOT_ALLOWED)
    cause = refusal or next(c for c in kindest if c in causes)
    verdicts = _verdicts(query, fleet, table, doubts, None, "")
    reason = "; ".join(f"{v.tier} {v.verdict}" for v in verdicts if v.tier in asked)
    return Decision(None, None, reason, query, (), verdicts, cause)


def _why_not(
    query: Query, fleet: FleetSnapshot, table: PolicyTable, doubts: Mapping[TierName, tuple[Refusal, str] | None]
) -> str:
    assert query.hint is not None
    doubt = doubts[query.hint]
    return doubt[1] if doubt else _outside_sla(fleet.tier(query.hint), query, table) or "not chosen"


def _verdicts(  # noqa: PLR0917  called here alone
    query: Query,
    fleet: FleetSnapshot,
    table: PolicyTable,
    doubts: Mapping[TierName, tuple[Refusal, str] | None],
    chosen: TierName | None,
    reason: str,
) -> tuple[Verdict, ...]:
    verdicts = []
    for tier in fleet.tiers:
        name, speed = tier.spec.name, tier.speed
        doubt = doubts[name]
        text = doubt[1] if doubt else _outside_sla(tier, query, table)
        loss = table.loss(name, query.features)
        if name is chosen:
            text = CHOSEN
        elif text is None:
            text = f"not needed: {reason}" if chosen is not None else "not asked for"
        verdicts.append(
            Verdict(
                tier=name,
                state=tier.state,
                predicted_ttft_ms=round(speed.ttft_ms(query.prompt_tokens), 1) if speed else None,
                predicted_tpot_ms=round(speed.tpot_ms, 2) if speed else None,
                expected_loss=loss.mean if loss else None,
                cost=None,
                verdict=text,
            )
        )
    return tuple(verdicts)
