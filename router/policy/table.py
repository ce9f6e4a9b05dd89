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
from router.policy.losses import ENOUGH, losses, of_100
from router.policy.model_size import parameters_of
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
from tiers.spec import PRECISIONS, UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from classifier import PromptClass
    from router.policy.decision import Decision, Query
    from router.policy.losses import ExpectedLoss, Kind, Losses
    from router.policy.profiles import AnswerCount
    from router.policy.settings import PolicySettings
    from tiers.fleet import Fleet
    from tiers.spec import TierName, TierSpec
    from tiers.speed import SpeedModel

log = logging.getLogger(f"qarr.{__name__}")
LOOK_S = 2.0
HOPELESS = 10  # tasks of a kind, of which less than one that a precision gets right: it is too hard for the model
MOST_MEANT = 0.05  # share of answers: a larger bound is likely to be one of tokens, as earlier releases had it
POINTLESS_BATCH = 4  # sequences, at which speeds are compared too
WHERE_IT_PAYS = (
    "That is usual for small models on a CPU; on a GPU reading the weights takes most of the time, so fewer bits are "
    "usually faster. The router works all the same and knows which tier is faster."
)


@dataclass(slots=True)
class LossTally:
    """Answers since the start whose tier the policy chose."""

    answers: int = 0  # their number
    lost: float = 0.0  # of them, expected to be worse than the highest precision's
    allowed: float = 0.0  # of them, those that the loss budget would have allowed to be worse
    spent: float = 0.0  # predicted engine time of those whose cost at the highest precision was known too
    highest: float = 0.0  # what these would have taken there


class PolicyStore:
    """Holds the parameters that decisions are made by; they are a value, and replaced as a whole."""

    def __init__(self, settings: PolicySettings, fleet: Fleet, model: str) -> None:
        self._settings = settings
        self._fleet = fleet
        self._model = model
        self.tally = LossTally()
        self._asked: Counter[Kind] = Counter()
        self._seen: list[object] = []
        self.quality: QualityProfile | None = None
        self.table = policy_table(settings, fleet.specs, self._parameters)
        self._load()

    def use(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._load()

    @property
    def _parameters(self) -> float | None:
        """Return the number of the model's parameters; None: not known."""
        return parameters_of(self._fleet.specs, self._model, self._settings.model_parameters)

    @property
    def _identities(self) -> dict[TierName, str | None]:
        """Return the digests of the tiers' weights; a checkpoint may be made while the router serves."""
        return {spec.name: spec.identity for spec in self._fleet.specs}

    @property
    def _files(self) -> tuple[Path, Path]:
        identities, folder = self._identities, self._settings.profiles
        return folder / profile_name(identities), folder / latency_name(identities, self._fleet.machine)

    @property
    def _adapter_files(self) -> dict[str, Path]:
        names = {name for spec in self._fleet.specs for name in spec.adapters}
        identities, folder = self._identities, self._settings.profiles
        return {name: folder / profile_name(identities, name) for name in sorted(names)}

    def successors(self, tier: TierName, query: Query) -> tuple[TierName, ...]:
        return successors(tier, query, self._fleet.snapshot(), self.table)

    def served(self, decision: Decision, tier: TierName | None) -> None:
        """Count the expected loss of a request's answer, unless its caller chose the ``tier`` (None: nobody served it)."""
        features = decision.query.features
        self._asked[features.prompt_class, features.complexity or Complexity.MODERATE] += 1
        if tier is None or (decision.basis in BY_CALLER and tier is decision.tier):
            return
        table, tally = self.table.with_adapter(decision.query.adapter), self.tally
        tally.answers += 1
        tally.lost += table.loss(tier, features).mean
        tally.allowed += max(table.budget(tier), table.negligible_loss)
        chosen, highest = decision.choice.chosen, decision.choice.estimates[-1].cost
        if chosen is not None and chosen.tier is tier and chosen.cost is not None and highest is not None:
            tally.spent += chosen.cost
            tally.highest += highest

    def worth(self, tier: TierName, kind: Kind) -> float:
        """Return what one more measured answer of a kind tells: width of the interval * share of traffic.

        0: decisions no longer depend on it, because its interval lies on one side of every bound on loss.
        """
        table, loss = self.table, self.table.losses[tier][kind[0]][kind[1]]
        share = (self._asked[kind] + 1) / (self._asked.total() + 1)
        if loss.answers < ENOUGH:
            asked = sum(c.asked for c in self._counts(tier) if (c.prompt_class, c.complexity) == kind)
            hopeless = asked >= ENOUGH and loss.answers * HOPELESS < asked
            return 0.0 if hopeless else (1 + ENOUGH - loss.answers) * share / (1 + asked)
        bounds = table.negligible_loss, table.budget(tier), table.max_loss.get(kind[0], table.negligible_loss)
        return (loss.high - loss.low) * share if any(loss.low <= bound <= loss.high for bound in bounds) else 0.0

    def _counts(self, tier: TierName) -> tuple[AnswerCount, ...]:
        return self.quality.of(tier) if self.quality is not None else ()

    @property
    def pointless(self) -> dict[TierName, str]:
        """Return the tiers that may not pay, because a higher precision is faster and loses less, with words for people."""
        speeds, found = self._fleet.speeds, {}
        specs = [spec for spec in self._fleet.specs if spec.name in speeds]
        means = {spec.name: _mean(self.table.losses.get(spec.name, {})) for spec in specs}
        for n, lower in enumerate(specs):
            for higher in specs[n + 1 :]:
                slow, fast = speeds[lower.name], speeds[higher.name]
                batches = (1, min(POINTLESS_BATCH, lower.max_num_seqs))
                if means[lower.name] >= means[higher.name] and all(slow.step_ms(b) > fast.step_ms(b) for b in batches):
                    times = (
                        f"a token takes {slow.step_ms(1):.0f} ms there and {fast.step_ms(1):.0f} ms on {higher.name}"
                    )
                    found[lower.name] = (
                        f"{lower.name} may not pay with this model on this machine: {times}, which also loses fewer "
                        f"answers. {WHERE_IT_PAYS} To leave {lower.name} out: tiers.{lower.name}.replicas = 0."
                    )
        return found

    @property
    def measured(self) -> frozenset[TierName]:
        quality = self.quality
        return frozenset({c.tier for c in quality.counts} | {REFERENCE}) if quality and quality.whole else frozenset()

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.reload()

    def reload(self) -> None:
        """Load the profiles again if one was made, changed or removed, or a tier serves another precision."""
        if self._state() != self._seen:
            self._load()
            log.info("profiles loaded from %s", self._settings.profiles)

    def _state(self) -> list[object]:
        files = [_changed(path) for path in (*self._files, *self._adapter_files.values())]
        return [*files, *(spec.precision for spec in self._fleet.specs)]

    def _load(self) -> None:
        """Load the profiles that are there; one that cannot be used counts as not measured, and the router serves on."""
        quality_file, latency_file = self._files
        self._seen = self._state()
        self.quality = self._profile(quality_file)
        latency = None
        try:
            if latency_file.exists():
                latency = load_latency(latency_file).check(self._identities, self._fleet.machine, latency_file)
        except ProfileError as error:
            log.warning("%s; speed counts as not measured under load", error)
        adapters = {name: self._profile(path) for name, path in self._adapter_files.items()}
        self.table = policy_table(self._settings, self._fleet.specs, self._parameters, self.quality, adapters)
        measured = {count.tier for count in self.quality.counts} if self.quality is not None else ()
        self._fleet.rank_by_loss(
            {tier: _mean(self.table.losses[tier]) for tier in measured if tier in self.table.losses}
        )
        self._set_speeds({fit.tier: fit.model for fit in latency.fits} if latency is not None else {})
        for why in self.pointless.values():
            log.info("%s", why)

    def _profile(self, path: Path) -> QualityProfile | None:
        try:
            return load_profile(path).check(self._identities, path) if path.exists() else None
        except ProfileError as error:
            log.warning("%s; published losses count", error)
            return None

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
    bounds = {f"policy.max_loss.{kind.value}": most for kind, most in policy.max_loss.items()}
    for name, most in ({"policy.loss_budget": policy.loss_budget} | bounds).items():
        if not isinstance(most, LikeTier) and most > MOST_MEANT:
            log.warning("%s = %g lets %s answers get worse: it counts answers, not tokens", name, most, of_100(most))
    of_adapters: dict[str, dict[TierName, Losses]] = {}
    if adapters:
        of_adapters = {name: _losses(specs, found, parameters) for name, found in adapters.items()}
        of_adapters[""] = _losses(specs, None, parameters)
    return PolicyParameters(
        losses=_losses(specs, profile, parameters),
        max_loss=policy.max_loss,
        objective=policy.objective,
        loss_budget=policy.loss_budget.like if isinstance(policy.loss_budget, LikeTier) else policy.loss_budget,
        negligible_loss=policy.negligible_loss,
        sla_confidence=policy.sla_confidence,
        give_up=policy.give_up,
        max_slowdown=policy.max_slowdown,
        prices=policy.prices,
        adapters=of_adapters,
    )


def _losses(
    specs: Iterable[TierSpec], profile: QualityProfile | None, parameters: float | None
) -> dict[TierName, Losses]:
    expected = {}
    for spec in specs:
        if spec.name is not REFERENCE:
            counts = profile.of(spec.name) if profile is not None else ()
            expected[spec.name] = losses(_precision(spec), counts, parameters)
    return expected


def _precision(spec: TierSpec) -> str:
    return PRECISIONS.get(spec.name, UNKNOWN) if spec.precision == UNKNOWN else spec.precision


def _mean(of_tier: Mapping[PromptClass, Mapping[Complexity, ExpectedLoss]]) -> float:
    means = [loss.mean for each in of_tier.values() for loss in each.values()]
    return fmean(means) if means else 0.0


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
