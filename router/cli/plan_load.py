"""The load of ``qarr plan``: which prompts are asked, how many, and how long they are."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from classifier import Complexity, PromptClass
from router.cli.plan_inputs import PlanOptions
from router.cli.plan_result import PlanTarget, PromptKind
from router.policy.decision_log import DecisionRecord, read_log
from router.policy.losses import losses
from router.settings import Settings
from tiers.errors import PlanError
from tiers.sizing.capacity import ServingDemand
from tiers.sizing.fleet import DailyLoad, parse_course
from tiers.spec import TierName

USUAL_SEQUENCES = 256  # decoded at once by an engine on GPUs


class AssumedMix(NamedTuple):
    """What is asked, as shares of all requests.

    Attributes:
        degrees: The share of each ``Complexity``, which is the same in all classes.
    """

    classes: Mapping[PromptClass, float]
    degrees: Sequence[float]


def _read_mixes() -> dict[str, AssumedMix]:
    text = Path(__file__).with_name("mixes.toml").read_text("utf-8")
    mixes: dict[str, AssumedMix] = {}
    for name, mix in tomllib.loads(text).items():
        classes = {
            PromptClass(class_name): share
            for class_name, share in mix["classes"].items()
        }
        mixes[name] = AssumedMix(classes, mix["complexities"])
    return mixes


MIXES = _read_mixes()


def load_of(
    options: PlanOptions, target: PlanTarget, requests_per_s: float
) -> DailyLoad:
    """Return the load of so many requests a second, with how many of their answers may be lost."""
    mix = mix_of(options.mix)
    total_share = sum(mix.values())
    loss_by_tier: dict[TierName, dict[Hashable, float]] = {}
    for tier in target.formats:
        loss_by_tier[tier] = _losses_of_kinds(tier, target, mix)
    rate_by_kind: dict[Hashable, float] = {
        kind: requests_per_s * share / total_share for kind, share in mix.items()
    }
    load = DailyLoad(rate_by_kind, loss_by_tier, course=parse_course(options.day))
    if options.lost_of_100 is None:
        return replace(load, budget=load.lost_by(budget_tier(target)))
    return replace(load, budget=options.lost_of_100 / 100)


def _losses_of_kinds(
    tier: TierName, target: PlanTarget, kinds: Mapping[PromptKind, float]
) -> dict[Hashable, float]:
    """Return the share of answers that a tier is expected to lose of each kind."""
    tier_format = target.formats[tier]
    answers = target.answers.get(tier, ())
    parameters = target.model.parameters
    expected = losses(tier_format.precision, answers, parameters)
    # A model that is published in few bits loses nothing by them: they are what others are compared with.
    of_reference = losses(target.reference.precision, (), parameters)
    lost: dict[Hashable, float] = {}
    for prompt_class, complexity in kinds:
        loss = expected[prompt_class][complexity].mean
        if not answers:
            loss -= of_reference[prompt_class][complexity].mean
        lost[prompt_class, complexity] = max(loss, 0.0)
    return lost


def budget_tier(target: PlanTarget) -> TierName:
    """Return the tier whose loss is allowed if nobody says what is: ``balanced``, or the next that is planned."""
    return next(
        tier
        for tier in (TierName.BALANCED, TierName.FAST, TierName.PRECISE)
        if tier in target.formats
    )


def mix_of(name_or_path: str) -> dict[PromptKind, float]:
    """Return how much is asked of each kind, by a built-in mix or by a decision log."""
    if name_or_path in MIXES:
        return _kinds_of(MIXES[name_or_path])
    log_path = Path(name_or_path)
    if not log_path.is_file():
        raise PlanError(
            f"--mix {name_or_path}: neither {', '.join(MIXES)} nor a decision log (telemetry.decision_log)"
        )
    kind_counts: Counter[PromptKind] = Counter()
    for record in read_log(log_path):
        if isinstance(record, DecisionRecord):
            features = record.query.features
            complexity = features.complexity or Complexity.MODERATE
            kind_counts[features.prompt_class, complexity] += 1
    if not kind_counts:
        raise PlanError(f"--mix {name_or_path}: the decision log has no decisions")
    return dict(kind_counts)


def _kinds_of(mix: AssumedMix) -> dict[PromptKind, float]:
    shares: dict[PromptKind, float] = {}
    for prompt_class, class_share in mix.classes.items():
        for complexity, degree_share in zip(Complexity, mix.degrees, strict=True):
            shares[prompt_class, complexity] = class_share * degree_share
    return shares


def demand_of(
    settings: Settings, options: PlanOptions, target: PlanTarget
) -> ServingDemand:
    """Return how long requests are and which times bound them; raise ``PlanError`` if the lengths do not fit."""
    mean_tokens = options.prompt_tokens + options.output_tokens
    context = options.context or mean_tokens
    if context > target.model.context:
        what = "--context is"
        if options.context is None:
            what = "--prompt and --output make"
        raise PlanError(
            f"{what} {context}: {target.name} takes {target.model.context} tokens at most"
        )
    if context < mean_tokens:
        raise PlanError(
            f"--context {context} is shorter than a mean prompt and answer, {mean_tokens} tokens"
        )
    usual_sequences = settings.tiers.precise.max_num_seqs
    if target.gpus:
        usual_sequences = USUAL_SEQUENCES
    return ServingDemand(
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        context=context,
        max_num_seqs=options.max_num_seqs or usual_sequences,
        ttft_ms=options.ttft_ms,
        tpot_ms=options.tpot_ms,
    )
