"""Decisions in words: why a tier was chosen, and what speaks against each of the others."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from classifier import PromptClass
from classifier.kinds import Complexity
from router.policy.decision import SURE, Basis, Refusal, is_noticeably_later
from router.policy.losses import of_100
from tiers.preparing import about
from tiers.spec import ReplicaStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.policy.decision import Choice, Estimate, Query, Sort
    from tiers.snapshot import TierSnapshot
    from tiers.spec import TierName

CHOSEN = "chosen"


def verdict(choice: Choice, estimate: Estimate) -> str:
    chosen = choice.chosen
    if chosen is not None and estimate.tier is chosen.tier:
        return CHOSEN
    if not estimate.meets or estimate.unfit:
        return _against(choice, estimate)
    if chosen is None:
        return "not asked for"
    if estimate.loss.mean > estimate.allowed and choice.scarcity < 1:
        wrong = f"may get up to {of_100(estimate.loss.stated_high)} answers wrong"
        return f"{wrong}, and engine time is not scarce enough for that"
    return f"would do, {_comparison(estimate, chosen)}"


def _comparison(estimate: Estimate, chosen: Estimate) -> str:
    """Return why a tier that would do as well was not chosen, to follow "would do"."""
    if estimate.finish_ms is None or chosen.finish_ms is None:
        return f"but {chosen.tier} was taken"
    if chosen.cost is not None and estimate.cost is not None and estimate.cost > chosen.cost:
        engine_time = f"{estimate.cost:.2g} s of engine time instead of {chosen.cost:.2g}"
        if estimate.finish_ms <= chosen.finish_ms:
            return f"with {engine_time}"
        return f"finished in {_seconds(estimate.finish_ms)} instead of {_seconds(chosen.finish_ms)}, with {engine_time}"
    return f"finished in {_seconds(estimate.finish_ms)} instead of {_seconds(chosen.finish_ms)}"


def reason(choice: Choice, longest: int) -> str:
    """Return why, for a person. What was asked for and is not given comes first.

    ``longest``: context of the tiers for which the request alone is too long, in tokens; 0: there are others, or none.
    """
    chosen, query = choice.chosen, choice.query
    if chosen is None:
        found = "; ".join([f"{each.tier} {verdict(choice, each)}" for each in choice.asked])
        others = [each.tier for each in choice.estimates if each.meets]
        if query.require and others:
            found += f"; {' and '.join(others)} can, and tier_policy 'prefer' lets another tier serve"
        # Libraries know these words.
        return f"This model's maximum context length is {longest} tokens: {found}" if longest else found
    found = _why(choice, chosen)
    if query.hint is not None and chosen.tier is not query.hint:
        hinted = next(each for each in choice.estimates if each.tier is query.hint)
        against = "not chosen" if hinted.meets else _against(choice, hinted)
        found = f"hint {query.hint} not taken: {against}; {found}"
    if query.precisions is not None:
        found += f"; the request allows {', '.join(sorted(query.precisions))} only"
    return f"over budget, so only {chosen.tier} may serve; {found}" if query.over_budget else found


def _why(choice: Choice, chosen: Estimate) -> str:
    basis, sort = choice.basis, choice.query.sort
    if choice.given_up:
        given_up = " and ".join([what for what in choice.given_up if what != "unmeasured"])
        known = f"expected to meet the SLA: {given_up} given up" if given_up else "known to meet the SLA"
        return f"no tier is {known}, {chosen.tier} taken"
    if basis is Basis.HINT:
        return f"{chosen.tier} is required" if choice.query.require else f"hint {chosen.tier}"
    if basis is Basis.DEGRADED_QUALITY:
        return f"degraded to {chosen.tier}: {_unfit(choice, chosen)}, {_no_better(choice.asked)}"
    if basis is Basis.SORT and sort is not None:
        return f"{_kind(choice)}: {_sorted_text(chosen, sort)}"
    return f"{_kind(choice)}: {_chosen_text(choice, chosen)}"


def _kind(choice: Choice) -> str:
    features = choice.query.features
    sure = features.confidence >= SURE or features.prompt_class is PromptClass.UNKNOWN
    kind = features.prompt_class.value.replace("_", " ") if sure else f"probably {features.prompt_class.value}"
    return f"{kind}, {(features.complexity or Complexity.MODERATE).value}"


def _chosen_text(choice: Choice, chosen: Estimate) -> str:
    name = chosen.tier
    highest = choice.estimates[-1].tier
    within = [estimate for estimate in choice.asked if estimate.meets]
    if choice.basis is Basis.SMALL_TALK:
        return _small_talk_text(choice, chosen, within)
    if choice.basis is Basis.BUDGET:
        wrong = f"{name} gets up to {of_100(chosen.loss.stated_high)} answers wrong that {highest} gets right"
        when = " while engine time is scarce" if choice.table.objective == "best" else ""
        return f"{wrong} ({chosen.loss.basis}), within the loss budget{when}, and {_advantage(choice, chosen, within)}"
    parts = []
    least = max(chosen.loss.mean, choice.table.negligible_loss)
    worse = [estimate for estimate in within if estimate.loss.mean > least]
    if worse:
        parts.append(_wrong_text(worse, highest))
    if choice.basis is Basis.NEGLIGIBLE:
        parts.append(f"{name} {_good_text(chosen, highest)}, and {_advantage(choice, chosen, within)}")
    if parts:
        return "; ".join(parts)
    return _alone_text(choice, chosen, within)


def _good_text(chosen: Estimate, highest: TierName) -> str:
    if chosen.loss.mean == 0:
        return "loses nothing"
    return f"is as good as {highest} (up to {of_100(chosen.loss.stated_high)} answers get worse, {chosen.loss.basis})"


def _small_talk_text(choice: Choice, chosen: Estimate, within: Sequence[Estimate]) -> str:
    """Return why a tier answers what cannot be right or wrong."""
    rank = choice.rank(chosen.tier)
    lower = [estimate for estimate in within if not estimate.unfit and choice.rank(estimate.tier) < rank]
    if lower and lower[-1].times is not None and chosen.times is not None:
        passed_over = f"{lower[-1].tier} would take {_seconds(lower[-1].times.ttft_ms)} to its first token"
        return f"no precision loses anything, and {passed_over}, {chosen.tier} {_seconds(chosen.times.ttft_ms)}"
    return f"no precision loses anything, and {chosen.tier} is the lowest that can serve"


def _alone_text(choice: Choice, chosen: Estimate, within: Sequence[Estimate]) -> str:
    if len(within) > 1:
        return f"no tier loses less than {chosen.tier}"
    if any(estimate.obstacle is None and not estimate.meets for estimate in choice.asked):
        return "no other tier meets the request's bounds"
    obstacles = [f"{each.tier} {each.obstacle_text}" for each in choice.asked if each.obstacle is not None]
    return f"only {chosen.tier} can serve: {'; '.join(obstacles)}"


def _advantage(choice: Choice, chosen: Estimate, within: Sequence[Estimate]) -> str:
    """Return what decided between the tiers whose loss is allowed."""
    rank = choice.rank(chosen.tier)
    fit = [estimate for estimate in within if not estimate.unfit]
    rivals = [estimate for estimate in fit if estimate is not chosen and estimate.loss.mean <= estimate.allowed]
    if chosen.under_load and rivals and all(rival.under_load for rival in rivals):
        return _faster_text(choice, chosen, rivals)
    if any(choice.rank(estimate.tier) < rank for estimate in fit):
        return "is much faster here than lower precisions"
    return "is the lowest precision that can serve" if rank else "is the lowest precision"


def _faster_text(choice: Choice, chosen: Estimate, rivals: Sequence[Estimate]) -> str:
    """Return by how much a tier should finish sooner than its rivals, or how much engine time it saves if that decided."""
    finishes_later = any(is_noticeably_later(rival.finishes_in_ms, chosen.finishes_in_ms) for rival in rivals)
    if choice.table.objective == "best" and finishes_later:
        return f"should finish soonest: {_finish_text(chosen, rivals)}"
    costs = ", ".join([f"{rival.tier} {rival.order():.2g}" for rival in rivals])
    return f"should take {chosen.order():.2g} s of engine time ({costs})"


def _finish_text(chosen: Estimate, rivals: Sequence[Estimate]) -> str:
    """Return when a tier and its rivals should finish, or have their first token if that makes the difference."""
    rival = max(rivals, key=lambda estimate: estimate.finishes_in_ms)
    if rival.times is None or chosen.times is None:
        return f"{chosen.tier} finishes sooner"
    later_ms = rival.finishes_in_ms - chosen.finishes_in_ms
    if later_ms > 0 and rival.times.ttft_ms - chosen.times.ttft_ms > later_ms / 2:
        ttft = _seconds(rival.times.ttft_ms)
        return f"{rival.tier} would take {ttft} to its first token, {chosen.tier} {_seconds(chosen.times.ttft_ms)}"
    finish = _seconds(rival.finishes_in_ms)
    return f"{rival.tier} would take {finish} to the end of its answer, {chosen.tier} {_seconds(chosen.finishes_in_ms)}"


def _seconds(milliseconds: float) -> str:
    """Return a time for people, in seconds of two significant digits."""
    seconds = milliseconds / 1000
    return f"{seconds:.0f} s" if seconds >= 10 else f"{float(f'{seconds:.2g}'):g} s"  # noqa: PLR2004


def _against(choice: Choice, estimate: Estimate) -> str:
    if estimate.obstacle is not None:
        return estimate.obstacle_text
    if estimate.lossy:
        wrong = f"may get up to {of_100(estimate.worst)} answers wrong ({estimate.loss.basis})"
        return f"{wrong}, {of_100(choice.query.sla.max_quality_loss or 0.0)} allowed"
    if estimate.slow:
        return _slow_text(estimate, choice.query, choice.z)
    return _unfit(choice, estimate)


def _unfit(choice: Choice, estimate: Estimate) -> str:
    query, name = choice.query, estimate.tier
    if choice.rank(name) < choice.rank(query.hint):
        return f"hint {query.hint} wants {query.hint} or higher"
    if choice.bound is not None and estimate.worst > choice.bound:
        allowed = of_100(choice.bound)
        return f"{_kind(choice)}: {name} may get up to {of_100(estimate.worst)} answers wrong, {allowed} allowed"
    wrong = of_100(estimate.loss.mean)
    return f"{_kind(choice)}: {name} is expected to get {wrong} answers wrong, more than policy.loss_budget allows"


def _slow_text(estimate: Estimate, query: Query, z: float) -> str:
    """Return which bound a tier's times break with the confidence asked for: of both, that on TTFT."""
    times, sla, found = estimate.times, query.sla, ""
    if times is None:
        return "has no measured speed yet, and the request limits latency"
    for name, expected, spread, bound in (
        ("TPOT", times.tpot_ms, times.tpot_spread, sla.tpot_ms),
        ("TTFT", times.ttft_ms, times.ttft_spread, sla.ttft_ms),
    ):
        if bound is None:
            continue
        safe = expected * math.exp(z * spread)
        if expected > bound:
            found = f"cannot meet {name} {bound:g} ms ({expected:.0f} ms expected)"
        elif safe > bound:
            sure = f"up to {safe:.0f} ms at the requested confidence"
            found = f"may not meet {name} {bound:g} ms ({expected:.0f} ms expected, {sure})"
    return found


def _no_better(asked: Sequence[Estimate]) -> str:
    better = [o for o in asked if not o.unfit]
    if all(o.obstacle is Refusal.NOT_ALLOWED for o in better):
        return "none of which this key allows"
    if all(o.obstacle in {Refusal.NOT_ALLOWED, Refusal.EXCLUDED} for o in better):
        return "none of which the request allows"
    if any(o.obstacle is None for o in better):
        return "none of which is expected to meet the SLA"
    return "none of which can serve now"


def _sorted_text(chosen: Estimate, sort: Sort) -> str:
    value = chosen.order(sort)
    if value == math.inf:
        return f"sort {sort}: speed is not measured, so {chosen.tier}, the lowest precision that may serve, was taken"
    what = {"price": "s of engine time", "latency": "ms to the first token", "throughput": "ms a token"}[sort]
    return f"sort {sort}: {chosen.tier} has the least, {value:.2g} {what} expected"


def _wrong_text(worse: Sequence[Estimate], highest: TierName) -> str:
    first, *others = worse
    wrong = f"up to {of_100(first.loss.stated_high)} answers wrong that {highest} gets right ({first.loss.basis})"
    others_text = [f"{estimate.tier} up to {of_100(estimate.loss.stated_high)}" for estimate in others]
    return "; ".join([f"{first.tier} may get {wrong}", *others_text])


def obstacle_text(obstacle: Refusal, tier: TierSnapshot, query: Query) -> str:
    """Return why a tier cannot serve a request now, to follow its name."""
    spec = tier.spec
    if obstacle is Refusal.NOT_ALLOWED:
        return "is not allowed for this key" + (" over its budget" if query.over_budget else "")
    if obstacle is Refusal.EXCLUDED:
        allowed = f"serves {spec.precision}, and the request allows {', '.join(sorted(query.precisions or ()))} only"
        named = query.only is None or spec.name in query.only
        return allowed if named else "is not among the tiers that the request allows"
    if obstacle is Refusal.NO_ADAPTER:
        return f"does not offer the adapter {query.adapter}"
    if obstacle is Refusal.UNSUPPORTED:
        return f"has a draft, and with a draft vLLM does not support {query.undraftable}"
    if obstacle is Refusal.TOO_LONG:
        tokens = f"{query.prompt_tokens} prompt + {query.max_tokens} output tokens"
        return f"{tokens} exceed its context of {spec.max_model_len}"
    return _not_ready(tier) if obstacle is Refusal.NOT_READY else _full(tier, query.sequences)


def _not_ready(tier: TierSnapshot) -> str:
    preparing = tier.preparing
    if preparing is None:
        return f"is {tier.status.value}"
    if preparing.failed is not None:
        return "has no checkpoint: it could not be made"
    state = "being prepared" if tier.status is ReplicaStatus.PREPARING else tier.status.value
    return f"is {state}" + ("" if preparing.remaining_s is None else f", ready in {about(preparing.remaining_s)}")


def _full(tier: TierSnapshot, sequences: int) -> str:
    ready = tier.ready
    admitting = [r for r in ready if r.breaker.admits]
    if not admitting:
        wait_s = min(r.breaker.admits_in_s for r in ready)
        return f"failed too often lately and gets requests again in {wait_s:.1f} s"
    limits = [min(r.limit, tier.spec.max_in_flight) for r in admitting]
    free = [r for r, limit in zip(admitting, limits, strict=True) if r.slots < limit]
    if not free:
        return f"has all of its {sum(limits)} slots taken"
    if all(r.slots + min(sequences, limit) > limit for r, limit in zip(admitting, limits, strict=True)):
        return f"has too few of its {sum(limits)} slots free for {sequences} answers at the same time"
    if all(r.kv.pressure for r in free):
        usage = max(r.gauges.kv_cache_usage if r.gauges else 0.0 for r in free)
        return f"has {usage:.0%} of its KV cache in use, too much for a long prompt"
    return "has too few tokens left in its KV cache"
