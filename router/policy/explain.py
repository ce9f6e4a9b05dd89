"""Decisions in words: why a tier was chosen, and what speaks against each of the others."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, assert_never

from classifier import PromptClass
from classifier.kinds import Complexity
from router.policy.decision import (
    BY_CALLER,
    CALLERS_OWN,
    SURE_CONFIDENCE,
    Basis,
    Refusal,
    Unfitness,
    are_all_known_under_load,
    is_noticeably_later,
)
from router.policy.losses import of_100
from tiers.preparing import about
from tiers.spec import ReplicaStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from router.policy.decision import (
        Obstacle,
        RoutingQuery,
        Sort,
        TierComparison,
        TierEstimate,
    )
    from tiers.snapshot import ReplicaState, TierSnapshot
    from tiers.spec import TierName

CHOSEN = "chosen"
SORTED_BY: dict[Sort, str] = {
    "price": "s of engine time",
    "latency": "ms to the first token",
    "throughput": "ms a token",
}


def verdict(comparison: TierComparison, estimate: TierEstimate) -> str:
    """Return what was decided of a tier, and why."""
    chosen = comparison.chosen
    if chosen is not None and estimate.tier is chosen.tier:
        return CHOSEN
    if not estimate.meets_bounds or estimate.is_unfit:
        return _against(comparison, estimate)
    if chosen is None:
        return "not asked for"
    sort = comparison.query.sort
    if comparison.basis is Basis.SORT and sort is not None:
        return f"would do, {_sort_comparison(estimate, chosen, sort)}"
    if not estimate.quality.is_allowed and comparison.scarcity < 1:
        wrong_share = of_100(estimate.quality.loss.stated_high)
        return f"may get up to {wrong_share} answers wrong, and engine time is not scarce enough for that"
    return f"would do, {_comparison(estimate, chosen)}"


def _sort_comparison(estimate: TierEstimate, chosen: TierEstimate, sort: Sort) -> str:
    """Return why a tier was not taken by the order that the request asks for, to follow "would do"."""
    value = estimate.order(sort)
    if value < math.inf:
        chosen_value = chosen.order(sort)
        unit = SORTED_BY[sort]
        return (
            f"but {value:.2g} {unit} are expected, of {chosen.tier} {chosen_value:.2g}"
        )
    if chosen.order(sort) < math.inf:
        return "but its speed is not measured"
    return f"but {chosen.tier} was taken: neither's speed is measured"


def _comparison(estimate: TierEstimate, chosen: TierEstimate) -> str:
    """Return why a tier that would do as well was not chosen, to follow "would do"."""
    finish_ms = estimate.timing.finish_ms
    chosen_finish_ms = chosen.timing.finish_ms
    if finish_ms is None or chosen_finish_ms is None:
        return f"but {chosen.tier} was taken"
    own_finish = _seconds(finish_ms)
    chosen_finish = _seconds(chosen_finish_ms)
    finish_text = f"finished in {own_finish} instead of {chosen_finish}"
    if chosen.cost is None or estimate.cost is None or estimate.cost <= chosen.cost:
        return finish_text
    engine_time_text = (
        f"with {estimate.cost:.2g} s of engine time instead of {chosen.cost:.2g}"
    )
    if finish_ms <= chosen_finish_ms:
        return engine_time_text
    return f"{finish_text}, {engine_time_text}"


def reason(comparison: TierComparison, chosen: TierEstimate) -> str:
    """Return why a tier was chosen, for a person. What was asked for and is not given comes first."""
    query = comparison.query
    text = _why(comparison, chosen)
    if query.hint is not None and chosen.tier is not query.hint:
        hinted = next(
            estimate for estimate in comparison.estimates if estimate.tier is query.hint
        )
        against = "not chosen"
        if not hinted.meets_bounds:
            against = _against(comparison, hinted)
        text = f"hint {query.hint} not taken: {against}; {text}"
    leaving_text = _leaving_text(comparison, chosen)
    if leaving_text is not None:
        text += f"; {leaving_text}"
    if query.precisions is not None:
        precisions = ", ".join(sorted(query.precisions))
        text += f"; the request allows {precisions} only"
    if query.over_budget:
        return f"over budget, so only {chosen.tier} may serve; {text}"
    return text


def _leaving_text(comparison: TierComparison, chosen: TierEstimate) -> str | None:
    """Return why a conversation leaves the tier that holds it; None: it does not, or its caller says where it goes."""
    own = comparison.conversation_tier
    if own is None or own.tier is chosen.tier or comparison.basis in BY_CALLER:
        return None
    text = f"the conversation leaves {own.tier}, which holds {own.held_tokens} tokens of it: "
    if own.obstacle is not None or not own.meets_bounds or own.is_unfit:
        return f"{text}{own.tier} {_against(comparison, own)}"
    recompute_ms = chosen.recompute_ms(own)
    recompute_text = ""
    if recompute_ms:
        recompute_text = f", although it computes {_seconds(recompute_ms)} of it again"
    own_loss = own.quality.loss
    if own_loss.mean > max(own.quality.allowed_loss, chosen.quality.loss.mean):
        wrong_share = of_100(own_loss.stated_high)
        return f"{text}{own.tier} may get up to {wrong_share} answers wrong, too many for the time that it saves"
    if is_noticeably_later(own.finishes_in_ms, chosen.finishes_in_ms):
        saved_ms = own.finishes_in_ms - chosen.finishes_in_ms
        sooner_text = "sooner"
        if math.isfinite(saved_ms):
            sooner_text = f"{_seconds(saved_ms)} sooner"
        return f"{text}{chosen.tier} finishes {sooner_text}{recompute_text}"
    return f"{text}{chosen.tier} takes less engine time{recompute_text}"


def refusal_reason(comparison: TierComparison, exceeded_context: int | None) -> str:
    """Return why no tier serves a request, for a person.

    Args:
        comparison: The tiers as they were compared.
        exceeded_context: Of the tiers for which the request alone is too long, in tokens; None: there are others, or none.
    """
    verdicts = [
        f"{estimate.tier} {verdict(comparison, estimate)}"
        for estimate in comparison.considered
    ]
    text = "; ".join(verdicts)
    suitable_tiers = [
        estimate.tier for estimate in comparison.estimates if estimate.meets_bounds
    ]
    if comparison.query.require and suitable_tiers:
        suitable = " and ".join(suitable_tiers)
        text += f"; {suitable} can, and tier_policy 'prefer' lets another tier serve"
    if exceeded_context is None:
        return text
    # Libraries know these words.
    return f"This model's maximum context length is {exceeded_context} tokens: {text}"


def _why(comparison: TierComparison, chosen: TierEstimate) -> str:
    """Return what a choice rests on."""
    if comparison.given_up:
        return _given_up_text(comparison, chosen)
    text_of_choice = _TEXT_BY_BASIS.get(comparison.basis)
    if text_of_choice is not None:
        acceptable = [
            estimate for estimate in comparison.considered if estimate.meets_bounds
        ]
        choice_text = text_of_choice(comparison, chosen, acceptable)
        return f"{_kind(comparison)}: {choice_text}"
    if comparison.basis is Basis.HINT:
        return _hint_text(comparison, chosen)
    if comparison.basis is Basis.DEGRADED_QUALITY:
        unfit_text = _unfit(comparison, chosen)
        no_better_text = _no_better(comparison.considered)
        return f"degraded to {chosen.tier}: {unfit_text}, {no_better_text}"
    if comparison.basis is Basis.SORT and comparison.query.sort is not None:
        sorted_text = _sorted_text(chosen, comparison.query.sort)
        return f"{_kind(comparison)}: {sorted_text}"
    if comparison.basis is Basis.CONVERSATION:
        held_text = (
            f"{chosen.tier} holds {chosen.held_tokens} tokens of the conversation"
        )
        return f"{_kind(comparison)}: {held_text}, which leaves it only if that pays"
    raise AssertionError(f"there are no words for basis {comparison.basis}")


def _hint_text(comparison: TierComparison, chosen: TierEstimate) -> str:
    if comparison.query.require:
        return f"{chosen.tier} is required"
    return f"hint {chosen.tier}"


def _given_up_text(comparison: TierComparison, chosen: TierEstimate) -> str:
    known_bounds = [bound for bound in comparison.given_up if bound != "unmeasured"]
    if known_bounds:
        given_up = " and ".join(known_bounds)
        return f"no tier is expected to meet the SLA: {given_up} given up, {chosen.tier} taken"
    return f"no tier is known to meet the SLA, {chosen.tier} taken"


def _kind(comparison: TierComparison) -> str:
    """Return of what kind a prompt is."""
    features = comparison.query.features
    prompt_class = features.prompt_class
    complexity = features.complexity or Complexity.MODERATE
    if features.confidence >= SURE_CONFIDENCE or prompt_class is PromptClass.UNKNOWN:
        class_name = prompt_class.replace("_", " ")
        return f"{class_name}, {complexity}"
    return f"probably {prompt_class}, {complexity}"


def _sorted_text(chosen: TierEstimate, sort: Sort) -> str:
    value = chosen.order(sort)
    if value == math.inf:
        return f"sort {sort}: speed is not measured, so {chosen.tier}, the lowest precision that may serve, was taken"
    return f"sort {sort}: {chosen.tier} has the least, {value:.2g} {SORTED_BY[sort]} expected"


def _small_talk_text(
    comparison: TierComparison, chosen: TierEstimate, acceptable: Sequence[TierEstimate]
) -> str:
    """Return why a tier answers what cannot be right or wrong."""
    no_loss_text = "no precision loses anything"
    lower_tiers = _fit_below(comparison, chosen, acceptable)
    if not lower_tiers or lower_tiers[-1].times is None or chosen.times is None:
        return f"{no_loss_text}, and {chosen.tier} is the lowest that can serve"
    passed_over = lower_tiers[-1].tier
    ttft_there = _seconds(lower_tiers[-1].times.ttft_ms)
    ttft_here = _seconds(chosen.times.ttft_ms)
    return f"{no_loss_text}, and {passed_over} would take {ttft_there} to its first token, {chosen.tier} {ttft_here}"


def _budget_text(
    comparison: TierComparison, chosen: TierEstimate, acceptable: Sequence[TierEstimate]
) -> str:
    """Return why a tier was chosen that loses more than a negligible share of answers."""
    highest_tier = comparison.estimates[-1].tier
    loss = chosen.quality.loss
    wrong_share = of_100(loss.stated_high)
    wrong_text = f"{chosen.tier} gets up to {wrong_share} answers wrong that {highest_tier} gets right"
    scarcity_text = ""
    if comparison.table.objective == "best":
        scarcity_text = " while engine time is scarce"
    advantage_text = _advantage(comparison, chosen, acceptable)
    return f"{wrong_text} ({loss.basis}), within the loss budget{scarcity_text}, and {advantage_text}"


def _little_loss_text(
    comparison: TierComparison, chosen: TierEstimate, acceptable: Sequence[TierEstimate]
) -> str:
    """Return why a tier was chosen that loses next to nothing, or less than all others."""
    highest = comparison.estimates[-1].tier
    tolerated = max(chosen.quality.loss.mean, comparison.table.negligible_loss)
    worse = [
        estimate for estimate in acceptable if estimate.quality.loss.mean > tolerated
    ]
    parts = []
    if worse:
        parts.append(_wrong_text(worse, highest))
    if comparison.basis is Basis.NEGLIGIBLE:
        good_text = _good_text(chosen, highest)
        advantage_text = _advantage(comparison, chosen, acceptable)
        parts.append(f"{chosen.tier} {good_text}, and {advantage_text}")
    if not parts:
        return _alone_text(comparison, chosen, acceptable)
    parts += _better_out_of_service(comparison, chosen)
    return "; ".join(parts)


def _better_out_of_service(
    comparison: TierComparison, chosen: TierEstimate
) -> list[str]:
    """Return which tiers would lose less than the chosen one, and why they cannot serve now."""
    return [
        f"{estimate.tier} {estimate.obstacle_text}"
        for estimate in comparison.considered
        if estimate.obstacle is not None
        and estimate.obstacle not in CALLERS_OWN
        and estimate.state is not ReplicaStatus.ABSENT
        and estimate.quality.loss.mean < chosen.quality.loss.mean
    ]


# How each choice among the acceptable tiers is worded.
_TEXT_BY_BASIS: dict[
    Basis, Callable[[TierComparison, TierEstimate, Sequence[TierEstimate]], str]
] = {
    Basis.MIN_LOSS: _little_loss_text,
    Basis.NEGLIGIBLE: _little_loss_text,
    Basis.BUDGET: _budget_text,
    Basis.SMALL_TALK: _small_talk_text,
}


def _wrong_text(worse: Sequence[TierEstimate], highest: TierName) -> str:
    """Return how many answers the tiers get wrong that were not chosen for it."""
    lowest = worse[0]
    loss = lowest.quality.loss
    wrong_share = of_100(loss.stated_high)
    text = f"{lowest.tier} may get up to {wrong_share} answers wrong that {highest} gets right ({loss.basis})"
    for estimate in worse[1:]:
        wrong_share = of_100(estimate.quality.loss.stated_high)
        text += f"; {estimate.tier} up to {wrong_share}"
    return text


def _good_text(chosen: TierEstimate, highest: TierName) -> str:
    loss = chosen.quality.loss
    if loss.mean == 0:
        return "loses nothing"
    worse_share = of_100(loss.stated_high)
    return (
        f"is as good as {highest} (up to {worse_share} answers get worse, {loss.basis})"
    )


def _alone_text(
    comparison: TierComparison, chosen: TierEstimate, acceptable: Sequence[TierEstimate]
) -> str:
    """Return why a tier was chosen where nothing is known that another tier does worse."""
    if len(acceptable) > 1:
        return f"no tier loses less than {chosen.tier}"
    obstacle_texts = []
    for estimate in comparison.considered:
        if estimate.obstacle is not None:
            obstacle_texts.append(f"{estimate.tier} {estimate.obstacle_text}")
        elif not estimate.meets_bounds:
            return "no other tier meets the request's bounds"
    obstacles = "; ".join(obstacle_texts)
    return f"only {chosen.tier} can serve: {obstacles}"


def _advantage(
    comparison: TierComparison, chosen: TierEstimate, acceptable: Sequence[TierEstimate]
) -> str:
    """Return what decided between the tiers whose loss is allowed."""
    rivals = [
        estimate
        for estimate in acceptable
        if estimate is not chosen
        and not estimate.is_unfit
        and estimate.quality.is_allowed
    ]
    if rivals and are_all_known_under_load([chosen, *rivals]):
        return _faster_text(comparison, chosen, rivals)
    if _fit_below(comparison, chosen, acceptable):
        return "is much faster here than lower precisions"
    if comparison.rank(chosen.tier) > 0:
        return "is the lowest precision that can serve"
    return "is the lowest precision"


def _fit_below(
    comparison: TierComparison, chosen: TierEstimate, acceptable: Sequence[TierEstimate]
) -> list[TierEstimate]:
    """Return the fit tiers of lower precision than the chosen one, which were passed over."""
    rank = comparison.rank(chosen.tier)
    return [
        estimate
        for estimate in acceptable
        if not estimate.is_unfit and comparison.rank(estimate.tier) < rank
    ]


def _faster_text(
    comparison: TierComparison, chosen: TierEstimate, rivals: Sequence[TierEstimate]
) -> str:
    """Return by how much a tier should finish sooner than its rivals, or how much engine time it saves if that decided."""
    latest = max(rivals, key=lambda estimate: estimate.finishes_in_ms)
    is_later = is_noticeably_later(latest.finishes_in_ms, chosen.finishes_in_ms)
    if comparison.table.objective == "best" and is_later:
        finish_text = _finish_text(chosen, latest)
        return f"should finish soonest: {finish_text}"
    costs = ", ".join([f"{rival.tier} {rival.order():.2g}" for rival in rivals])
    return f"should take {chosen.order():.2g} s of engine time ({costs})"


def _finish_text(chosen: TierEstimate, rival: TierEstimate) -> str:
    """Return when a tier and a rival should finish, or have their first token if that makes the difference."""
    times = chosen.times
    rival_times = rival.times
    if rival_times is None or times is None:
        return f"{chosen.tier} finishes sooner"
    later_ms = rival.finishes_in_ms - chosen.finishes_in_ms
    later_ttft_ms = rival_times.ttft_ms - times.ttft_ms
    if later_ms > 0 and later_ttft_ms > later_ms / 2:
        rival_ttft = _seconds(rival_times.ttft_ms)
        chosen_ttft = _seconds(times.ttft_ms)
        return f"{rival.tier} would take {rival_ttft} to its first token, {chosen.tier} {chosen_ttft}"
    rival_finish = _seconds(rival.finishes_in_ms)
    chosen_finish = _seconds(chosen.finishes_in_ms)
    return f"{rival.tier} would take {rival_finish} to the end of its answer, {chosen.tier} {chosen_finish}"


def _seconds(milliseconds: float) -> str:
    """Return a time for people, in seconds of two significant digits."""
    seconds = milliseconds / 1000
    if seconds >= 10:  # noqa: PLR2004
        return f"{seconds:.0f} s"
    return f"{seconds:.2g} s"


def _against(comparison: TierComparison, estimate: TierEstimate) -> str:
    """Return what speaks against a tier that has an obstacle, breaks a bound or is unfit."""
    if estimate.obstacle is not None:
        return estimate.obstacle_text
    quality = estimate.quality
    if quality.is_lossy:
        wrong_share = of_100(quality.worst_loss)
        allowed_share = of_100(comparison.query.sla.max_quality_loss or 0.0)
        return f"may get up to {wrong_share} answers wrong ({quality.loss.basis}), {allowed_share} allowed"
    if estimate.timing.is_slow:
        return _slow_text(estimate, comparison.query, comparison.confidence_z)
    return _unfit(comparison, estimate)


def _unfit(comparison: TierComparison, estimate: TierEstimate) -> str:
    """Return why a tier is unfit."""
    hint = comparison.query.hint
    tier = estimate.tier
    quality = estimate.quality
    if quality.unfitness is Unfitness.BELOW_HINT:
        return f"hint {hint} wants {hint} or higher"
    if quality.unfitness is Unfitness.OVER_BOUND:
        wrong_share = of_100(quality.worst_loss)
        allowed_share = of_100(comparison.bound or 0.0)
        return f"{_kind(comparison)}: {tier} may get up to {wrong_share} answers wrong, {allowed_share} allowed"
    wrong_share = of_100(quality.loss.mean)
    table = comparison.table
    allowed_share = of_100(max(table.budget(tier), table.negligible_loss))
    return (
        f"{_kind(comparison)}: {tier} is expected to get {wrong_share} answers wrong, while "
        f"policy.loss_budget allows {allowed_share}"
    )


def _slow_text(estimate: TierEstimate, query: RoutingQuery, confidence_z: float) -> str:
    """Return which bound a tier's times break with the confidence asked for; of both, the bound on TTFT."""
    times = estimate.times
    if times is None:
        return "has no measured speed yet, and the request limits latency"
    safe_ttft_ms = times.ttft_ms * math.exp(confidence_z * times.ttft_spread)
    late_first_token = _late_text(
        "TTFT", times.ttft_ms, safe_ms=safe_ttft_ms, bound_ms=query.sla.ttft_ms
    )
    if late_first_token is not None:
        return late_first_token
    safe_tpot_ms = times.tpot_ms * math.exp(confidence_z * times.tpot_spread)
    return (
        _late_text(
            "TPOT", times.tpot_ms, safe_ms=safe_tpot_ms, bound_ms=query.sla.tpot_ms
        )
        or ""
    )


def _late_text(
    bound_name: str, expected_ms: float, *, safe_ms: float, bound_ms: float | None
) -> str | None:
    """Return how an expected time breaks its bound; None: it does not, or there is no bound."""
    if bound_ms is None:
        return None
    if expected_ms > bound_ms:
        return (
            f"cannot meet {bound_name} {bound_ms:g} ms ({expected_ms:.0f} ms expected)"
        )
    if safe_ms > bound_ms:
        safe_text = f"up to {safe_ms:.0f} ms at the requested confidence"
        return f"may not meet {bound_name} {bound_ms:g} ms ({expected_ms:.0f} ms expected, {safe_text})"
    return None


def _no_better(considered: Sequence[TierEstimate]) -> str:
    """Return why none of the fit tiers serves, to follow why the chosen one is unfit."""
    obstacles = {estimate.obstacle for estimate in considered if not estimate.is_unfit}
    if obstacles <= {Refusal.NOT_ALLOWED}:
        return "and this key allows no better tier"
    if obstacles <= {Refusal.NOT_ALLOWED, Refusal.EXCLUDED}:
        return "and the request allows no better tier"
    if None in obstacles:
        return "and no better tier is expected to meet the SLA"
    return "and no better tier can serve now"


def obstacle_text(obstacle: Obstacle, tier: TierSnapshot, query: RoutingQuery) -> str:
    """Return why a tier cannot serve a request now, to follow its name."""
    match obstacle:
        case Refusal.NOT_ALLOWED:
            over_budget = " over its budget" if query.over_budget else ""
            text = f"is not allowed for this key{over_budget}"
        case Refusal.EXCLUDED:
            text = _excluded(tier, query)
        case Refusal.NO_ADAPTER:
            text = f"does not offer the adapter {query.adapter}"
        case Refusal.UNSUPPORTED:
            text = f"has a draft, and with a draft vLLM does not support {query.undraftable}"
        case Refusal.TOO_LONG:
            tokens = f"{query.prompt_tokens} prompt + {query.max_tokens} output tokens"
            text = f"{tokens} exceed its context of {tier.spec.max_model_len}"
        case Refusal.NOT_READY:
            text = _not_ready(tier)
        case Refusal.AT_CAPACITY:
            text = _full(tier, query.sequences)
        case _:
            # A type checker finds the obstacle that has no text.
            assert_never(obstacle)
    return text


def _excluded(tier: TierSnapshot, query: RoutingQuery) -> str:
    spec = tier.spec
    if query.only is not None and spec.name not in query.only:
        return "is not among the tiers that the request allows"
    return f"serves {spec.precision}, and the request allows {', '.join(sorted(query.precisions or ()))} only"


def _not_ready(tier: TierSnapshot) -> str:
    preparing = tier.preparing
    if tier.spec.held and tier.ready:
        return "is held until its loss is known to be within the loss budget (quality.gate = hold)"
    if preparing is None:
        return f"is {tier.status.value}"
    if preparing.failed is not None:
        return "has no checkpoint: it could not be made"
    state = tier.status.value
    if tier.status is ReplicaStatus.PREPARING:
        state = "being prepared"
    if preparing.remaining_s is None:
        return f"is {state}"
    return f"is {state}, ready in {about(preparing.remaining_s)}"


def _full(tier: TierSnapshot, sequences: int) -> str:
    """Return what a ready tier has too little of."""
    ready = tier.ready
    admitting_replicas = [replica for replica in ready if replica.breaker.admits]
    if not admitting_replicas:
        wait_s = min(replica.breaker.admits_in_s for replica in ready)
        return f"failed too often lately and gets requests again in {wait_s:.1f} s"
    with_free_slots: list[ReplicaState] = []
    has_room_for_all = False
    slot_count = 0
    for replica in admitting_replicas:
        limit = min(replica.limit, tier.spec.max_in_flight)
        slot_count += limit
        if replica.slots < limit:
            with_free_slots.append(replica)
        if replica.slots + min(sequences, limit) <= limit:
            has_room_for_all = True
    if not with_free_slots:
        return f"has all of its {slot_count} slots taken"
    if not has_room_for_all:
        return f"has too few of its {slot_count} slots free for {sequences} answers at the same time"
    return _kv_cache_full(with_free_slots)


def _kv_cache_full(replicas: Sequence[ReplicaState]) -> str:
    """Return why replicas that have free slots do not take a request."""
    if not all(replica.kv.pressure for replica in replicas):
        return "has too few tokens left in its KV cache"
    usages = [
        replica.gauges.kv_cache_usage
        for replica in replicas
        if replica.gauges is not None
    ]
    return f"has {max(usages, default=0.0):.0%} of its KV cache in use, too much for a long prompt"
