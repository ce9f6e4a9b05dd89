"""The policy's present parameters: from the settings, and the profiles of what is served.

The router loads a profile that is made while it runs within seconds.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from classifier.kinds import Complexity
from router.policy.decide import successors
from router.policy.decision import BY_CALLER, PolicyParameters
from router.policy.losses import MIN_ANSWERS, losses, of_100
from router.policy.model_size import parameters_of
from router.policy.not_measured import unmeasured_kinds
from router.policy.profiles import (
    REFERENCE,
    ProfileError,
    QualityProfile,
    latency_name,
    load_latency,
    load_profile,
    profile_name,
)
from router.policy.settings import LikeTier
from router.policy.verdicts import TierVerdict, judge_tiers
from tiers.kv_precision import weights_of
from tiers.lifecycle.gate import GateMode
from tiers.spec import PRECISIONS, UNKNOWN, TierName, in_order
from tiers.verification.findings import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from classifier import PromptClass
    from router.policy.decision import Decision, RoutingQuery
    from router.policy.losses import ExpectedLoss, Kind, Losses
    from router.policy.not_measured import UnmeasuredKinds
    from router.policy.profiles import AnswerCount
    from router.policy.settings import PolicySettings
    from tiers.fleet import Fleet
    from tiers.spec import EngineBuild, TierSpec
    from tiers.speed import SpeedModel

log = logging.getLogger(f"qarr.{__name__}")
PROFILE_POLL_S = 2.0
# A kind is too hard for the model, and is measured no further, if of this many tasks a precision gets fewer than one right.
HOPELESS = 10
# Share of answers. A larger bound is likely to be meant as a share of tokens, which earlier releases counted.
MAX_MEANT = 0.05
POINTLESS_BATCH = 4  # speeds are compared for a lone sequence, and for so many at once
WHERE_IT_PAYS = (
    "That is usual for small models on a CPU; on a GPU reading the weights takes most of the time, so fewer bits are "
    "usually faster. The router works all the same and knows which tier is faster."
)

MEASURE_QUALITY = "'qarr profile quality' measures it, if this router does not."


@dataclass(slots=True)
class LossTally:
    """Answers since the start whose tier the policy chose."""

    answers: int = 0
    lost: float = 0.0  # number expected to be worse than the highest precision's
    allowed: float = 0.0  # number that the loss budget would have allowed to be worse
    # predicted engine time of the answers whose cost at the highest precision was known too
    spent: float = 0.0
    # predicted engine time of the same answers at the highest precision
    highest: float = 0.0


class PolicyStore:
    """Holds the parameters that decisions are made by; they are a value, and replaced as a whole."""

    def __init__(
        self,
        settings: PolicySettings,
        fleet: Fleet,
        model: str,
        *,
        gate: GateMode = GateMode.WARN,
    ) -> None:
        self._settings = settings
        self._gate = gate
        self._fleet = fleet
        self._model = model
        self.tally = LossTally()
        self._requests_by_kind: Counter[Kind] = Counter()
        self._loaded_state: list[object] = []
        self.quality: QualityProfile | None = None
        self.verdicts: Mapping[TierName, TierVerdict] = {}
        self._logged_pointless: frozenset[TierName] = frozenset()
        self.table = policy_table(settings, fleet.specs, self._parameters)
        self._load()

    def use(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._load()

    @property
    def _parameters(self) -> float | None:
        """Return the number of the model's parameters; None: not known."""
        return parameters_of(
            self._fleet.specs, self._model, self._settings.model_parameters
        )

    @property
    def _identities(self) -> dict[TierName, str | None]:
        """Return the digests of the tiers' weights; a checkpoint may be made while the router serves."""
        return {spec.name: spec.identity for spec in self._fleet.specs}

    @property
    def _builds(self) -> dict[TierName, tuple[EngineBuild, ...]]:
        """Return what each tier's engines compute with, as far as they were asked."""
        return {spec.name: self._fleet.builds(spec.name) for spec in self._fleet.specs}

    @property
    def _quality_file(self) -> Path:
        return self._settings.profiles / profile_name(self._identities)

    @property
    def _latency_file(self) -> Path:
        return self._settings.profiles / latency_name(
            self._identities, self._fleet.machine
        )

    @property
    def _adapter_files(self) -> dict[str, Path]:
        adapters: set[str] = set()
        for spec in self._fleet.specs:
            adapters.update(spec.adapters)
        identities = self._identities
        folder = self._settings.profiles
        return {
            adapter: folder / profile_name(identities, adapter)
            for adapter in sorted(adapters)
        }

    def successors(self, tier: TierName, query: RoutingQuery) -> tuple[TierName, ...]:
        return successors(tier, query, self._fleet.snapshot(), self.table)

    def served(self, decision: Decision, tier: TierName | None) -> None:
        """Count the expected loss of a request's answer, unless its caller chose the ``tier`` (None: nobody served it)."""
        features = decision.query.features
        self._requests_by_kind[
            features.prompt_class, features.complexity or Complexity.MODERATE
        ] += 1
        if tier is None or (decision.basis in BY_CALLER and tier is decision.tier):
            return
        table = self.table.with_adapter(decision.query.adapter)
        tally = self.tally
        tally.answers += 1
        tally.lost += table.loss(tier, features).mean
        tally.allowed += max(table.budget(tier), table.negligible_loss)
        chosen = decision.comparison.chosen
        cost_at_highest = decision.comparison.estimates[-1].cost
        if (
            chosen is not None
            and chosen.tier is tier
            and chosen.cost is not None
            and cost_at_highest is not None
        ):
            tally.spent += chosen.cost
            tally.highest += cost_at_highest

    def worth(self, tier: TierName, kind: Kind) -> float:
        """Return what one more measured answer of a kind tells: width of the interval * share of traffic.

        0: decisions no longer depend on it, because its interval lies on one side of every bound on loss.
        """
        prompt_class, complexity = kind
        loss = self.table.losses[tier][prompt_class][complexity]
        share = (self._requests_by_kind[kind] + 1) / (
            self._requests_by_kind.total() + 1
        )
        if loss.answers < MIN_ANSWERS:
            return self._worth_of_few(tier, kind, loss.answers, share=share)
        negligible_loss = self.table.negligible_loss
        bounds = (
            negligible_loss,
            self.table.budget(tier),
            self.table.max_loss.get(prompt_class, negligible_loss),
        )
        if any(loss.low <= bound <= loss.high for bound in bounds):
            return (loss.high - loss.low) * share
        return 0.0

    def _worth_of_few(
        self, tier: TierName, kind: Kind, answers: int, *, share: float
    ) -> float:
        """Return what one more answer tells of a kind with too few answers to state an interval by."""
        tasks = 0
        for count in self._counts(tier):
            if (count.prompt_class, count.complexity) == kind:
                tasks += count.asked + count.cut
        is_hopeless = tasks >= MIN_ANSWERS and answers * HOPELESS < tasks
        if is_hopeless:
            return 0.0
        return (1 + MIN_ANSWERS - answers) * share / (1 + tasks)

    def _counts(self, tier: TierName) -> tuple[AnswerCount, ...]:
        return () if self.quality is None else self.quality.of(tier)

    @property
    def pointless(self) -> dict[TierName, str]:
        """Return the tiers that may not pay, because a higher precision is faster and loses less, with words for people."""
        speeds = self._fleet.speeds
        specs = [spec for spec in self._fleet.specs if spec.name in speeds]
        texts: dict[TierName, str] = {}
        for position, lower in enumerate(specs):
            for higher in specs[position + 1 :]:
                if self._is_pointless_beside(lower, higher):
                    texts[lower.name] = _pointless_text(
                        lower.name,
                        higher.name,
                        lower_speed=speeds[lower.name],
                        higher_speed=speeds[higher.name],
                    )
        return texts

    def _log_pointless_tiers(self) -> None:
        """Log once of each tier that it may not pay: every measurement loads the profiles anew."""
        texts = self.pointless
        for tier, text in texts.items():
            if tier not in self._logged_pointless:
                log.info("%s", text)
        self._logged_pointless = frozenset(texts)

    def _is_pointless_beside(self, lower: TierSpec, higher: TierSpec) -> bool:
        """Tell whether a higher precision is faster than a lower one, and loses no more."""
        losses_by_tier = self.table.losses
        if _mean(losses_by_tier.get(lower.name, {})) < _mean(
            losses_by_tier.get(higher.name, {})
        ):
            return False
        lower_speed = self._fleet.speeds[lower.name]
        higher_speed = self._fleet.speeds[higher.name]
        batches = (1, min(POINTLESS_BATCH, lower.max_num_seqs))
        return all(
            lower_speed.step_ms(batch) > higher_speed.step_ms(batch)
            for batch in batches
        )

    @property
    def not_measured(self) -> dict[TierName, UnmeasuredKinds]:
        """Return the kinds of prompts whose loss could not be measured, by tier."""
        return {} if self.quality is None else unmeasured_kinds(self.quality)

    @property
    def measured(self) -> frozenset[TierName]:
        """Return the tiers whose quality needs no more measuring."""
        if self.quality is None or not self.quality.whole:
            return frozenset()
        return frozenset({count.tier for count in self.quality.counts} | {REFERENCE})

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(PROFILE_POLL_S)
            self.reload()

    def reload(self) -> None:
        """Load the profiles again if one was made, changed or removed, or a tier serves or computes with something else."""
        if self._state() != self._loaded_state:
            self._load()
            log.info("profiles loaded from %s", self._settings.profiles)

    def _state(self) -> list[object]:
        """Return what the parameters depend on besides the settings: when files were changed, and what is served."""
        paths = (self._quality_file, self._latency_file, *self._adapter_files.values())
        changes = [_changed(path) for path in paths]
        precisions = [spec.precision for spec in self._fleet.specs]
        return [*changes, *precisions, self._builds]

    def _load(self) -> None:
        """Load the profiles that are there; one that cannot be used counts as not measured, and the router serves on."""
        quality_file = self._quality_file
        latency_file = self._latency_file
        self._loaded_state = self._state()
        self.quality = self._profile(quality_file)
        speeds = self._measured_speeds(latency_file)
        adapters = {
            adapter: self._profile(path)
            for adapter, path in self._adapter_files.items()
        }
        self.table = policy_table(
            self._settings,
            self._fleet.specs,
            parameters=self._parameters,
            profile=self.quality,
            adapters=adapters,
        )
        self._rank_by_loss()
        self._set_speeds(speeds)
        self._judge()
        self._log_pointless_tiers()

    @property
    def worse(self) -> dict[TierName, str]:
        """Return the tiers that are known to lose more than the loss budget allows, with a sentence for people."""
        return {
            tier: verdict.sentence
            for tier, verdict in self.verdicts.items()
            if verdict.verdict is Verdict.WORSE
        }

    @property
    def held(self) -> frozenset[TierName]:
        """Return the tiers that get no requests before it is known that they lose little enough, if so configured.

        Nothing can be measured without the reference, so none is held for the lack of it.
        """
        return frozenset(
            tier for tier, verdict in self.verdicts.items() if verdict.is_held
        )

    @property
    def awaited(self) -> frozenset[TierName]:
        """Return the tiers that are held because their loss is not known."""
        return frozenset(
            tier for tier in self.held if self.verdicts[tier].verdict is None
        )

    def _judge(self) -> None:
        """Judge the tiers' losses, log which are too large or not known yet, and hold tiers if so configured."""
        present = {spec.name for spec in self._fleet.specs if not spec.absent}
        holds = self._gate is GateMode.HOLD and REFERENCE in present
        verdicts = judge_tiers(self.table, self.measured, holds=holds)
        for tier, verdict in verdicts.items():
            is_news = verdict != self.verdicts.get(tier)
            if not is_news or tier not in present:
                continue
            if verdict.verdict is Verdict.WORSE:
                log.warning("%s", verdict.sentence)
            elif verdict.is_held:
                log.warning("%s %s", verdict.sentence, MEASURE_QUALITY)
        self.verdicts = verdicts
        self._fleet.hold_tiers(self.held)

    def _measured_speeds(self, path: Path) -> dict[TierName, SpeedModel]:
        try:
            if path.exists():
                latency = load_latency(path).check(
                    self._identities, self._fleet.machine, path
                )
                self._tell_changed(latency.changed_tiers(self._builds), path)
                covered = latency.covering(self._builds)
                return {fit.tier: fit.model for fit in covered.fits}
        except ProfileError as error:
            log.warning("%s; speed counts as not measured under load", error)
        return {}

    def _rank_by_loss(self) -> None:
        """Give the fleet the measured losses: they tell which tier stands above which."""
        counts = () if self.quality is None else self.quality.counts
        measured_tiers = {count.tier for count in counts}
        losses_by_tier = self.table.losses
        self._fleet.rank_by_loss(
            {
                tier: _mean(losses_by_tier[tier])
                for tier in measured_tiers
                if tier in losses_by_tier
            }
        )

    def _profile(self, path: Path) -> QualityProfile | None:
        try:
            if path.exists():
                profile = load_profile(path).check(self._identities, path)
                self._tell_changed(profile.changed_tiers(self._builds), path)
                return profile.covering(self._builds)
        except ProfileError as error:
            log.warning("%s; published losses count", error)
        return None

    def _tell_changed(self, tiers: frozenset[TierName], path: Path) -> None:
        """Log which of a profile's tiers no longer count."""
        for tier in in_order(tiers):
            builds = "; ".join(map(str, self._fleet.builds(tier)))
            log.warning(
                "what %s says of tier %s no longer counts, because its engine has changed since then: %s",
                path,
                tier,
                builds,
            )

    def _set_speeds(self, speeds: dict[TierName, SpeedModel]) -> None:
        """Give the fleet the measured speeds. The supervisor passes them to replicas, and measures idle ones without."""
        if speeds != self._fleet.speeds:
            self._fleet.speeds = speeds
            for replica in self._fleet.replicas:
                replica.update(speed=None)


def policy_table(
    policy: PolicySettings,
    specs: Iterable[TierSpec],
    parameters: float | None,
    profile: QualityProfile | None = None,
    adapters: Mapping[str, QualityProfile | None] | None = None,
) -> PolicyParameters:
    """Return the policy's parameters; without a profile of the checkpoints, or of an adapter, published losses count.

    Args:
        policy: The settings.
        specs: All tiers.
        parameters: Of the model; None: not known.
        profile: What was measured of the tiers.
        adapters: What was measured of LoRA adapters, by name.
    """
    specs = tuple(specs)
    loss_budget = (
        policy.loss_budget.like
        if isinstance(policy.loss_budget, LikeTier)
        else policy.loss_budget
    )
    if not isinstance(loss_budget, TierName):
        _warn_of_large_bound("policy.loss_budget", loss_budget)
    for prompt_class, bound in policy.max_loss.items():
        _warn_of_large_bound(f"policy.max_loss.{prompt_class.value}", bound)
    losses_by_adapter: dict[str, dict[TierName, Losses]] = {}
    if adapters:
        for adapter, adapter_profile in adapters.items():
            losses_by_adapter[adapter] = _losses(specs, adapter_profile, parameters)
        losses_by_adapter[""] = _losses(specs, None, parameters)
    return PolicyParameters(
        losses=_losses(specs, profile, parameters),
        max_loss=policy.max_loss,
        objective=policy.objective,
        loss_budget=loss_budget,
        negligible_loss=policy.negligible_loss,
        sla_confidence=policy.sla_confidence,
        give_up=policy.give_up,
        max_slowdown=policy.max_slowdown,
        prices=policy.prices,
        adapters=losses_by_adapter,
    )


def _warn_of_large_bound(name: str, bound: float) -> None:
    if bound > MAX_MEANT:
        log.warning(
            "%s = %g lets %s answers get worse: it counts answers, not tokens",
            name,
            bound,
            of_100(bound),
        )


def _pointless_text(
    lower: TierName,
    higher: TierName,
    *,
    lower_speed: SpeedModel,
    higher_speed: SpeedModel,
) -> str:
    times = f"a token takes {lower_speed.step_ms(1):.0f} ms there and {higher_speed.step_ms(1):.0f} ms on {higher}"
    return (
        f"{lower} may not pay with this model on this machine: {times}, which also loses fewer answers. {WHERE_IT_PAYS} "
        f"To leave {lower} out: tiers.{lower}.replicas = 0."
    )


def _losses(
    specs: Iterable[TierSpec], profile: QualityProfile | None, parameters: float | None
) -> dict[TierName, Losses]:
    expected = {}
    for spec in specs:
        if spec.name is not REFERENCE:
            counts = () if profile is None else profile.of(spec.name)
            expected[spec.name] = losses(_precision(spec), counts, parameters)
    return expected


def _precision(spec: TierSpec) -> str:
    if weights_of(spec.precision) == UNKNOWN:
        return spec.expected_precision or PRECISIONS.get(spec.name, UNKNOWN)
    return spec.precision


def _mean(
    losses_by_class: Mapping[PromptClass, Mapping[Complexity, ExpectedLoss]],
) -> float:
    means: list[float] = []
    for losses_by_complexity in losses_by_class.values():
        means += [loss.mean for loss in losses_by_complexity.values()]
    return fmean(means) if means else 0.0


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
