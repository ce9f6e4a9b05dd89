"""The policy's present parameters: from the settings, the profiles of what is served, and shadow evaluation.

The router loads a profile that is made while it runs within seconds.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING

from router.policy.budget import Answer
from router.policy.budget_store import FileState, LossBudget, RedisState
from router.policy.decide import successors
from router.policy.decision import BY_CALLER, ExpectedLoss, PolicyParameters
from router.policy.profiles import (
    ProfileError,
    QualityProfile,
    budget_name,
    latency_name,
    load_latency,
    load_profile,
    profile_name,
)
from router.redis_link import connect
from router.settings import CLASS_FLOOR, LikeTier

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from classifier import PromptClass
    from router.policy.budget_store import Expectation, SharedState
    from router.policy.decision import Decision, Query
    from router.settings import PolicySettings
    from tiers.fleet import Fleet
    from tiers.spec import TierName
    from tiers.speed import SpeedModel

    Losses = dict[TierName, dict[PromptClass, ExpectedLoss]]

log = logging.getLogger(f"qarr.{__name__}")
LOOK_S = 2.0


class PolicyStore:
    """Holds the parameters that decisions are made by; they are a value, and replaced as a whole."""

    def __init__(self, settings: PolicySettings, fleet: Fleet, redis_url: str = "") -> None:
        """Read the profiles of what the fleet serves."""
        self._settings, self._fleet = settings, fleet
        self._redis = connect(redis_url, 1) if redis_url else None
        self.budget = LossBudget(settings.budget_half_life_s)
        self._seen: list[float | None] = []
        self._promoted: Mapping[PromptClass, TierName] = {}
        self._live: dict[tuple[TierName, PromptClass], ExpectedLoss] = {}  # of live answers: in the profile's place
        self.quality: QualityProfile | None = None
        self.table = policy_table(settings)
        self._load()

    def take(self, settings: PolicySettings) -> None:
        """Take new settings; requests that are being served keep their decisions."""
        self._settings = settings
        self._load()

    @property
    def _identities(self) -> dict[TierName, str | None]:
        """Return the digests of the tiers' weights; a checkpoint may be made while the router serves."""
        return {spec.name: spec.identity for spec in self._fleet.specs}

    @property
    def _files(self) -> tuple[Path, Path]:
        """Return where the profiles of what is served are: quality, latency."""
        identities, folder = self._identities, self._settings.profiles
        return folder / profile_name(identities), folder / latency_name(identities, self._fleet.machine)

    @property
    def _adapter_files(self) -> dict[str, Path]:
        """Return where the quality profiles of the adapters are that tiers offer, by adapter."""
        names = {name for spec in self._fleet.specs for name in spec.adapters}
        identities, folder = self._identities, self._settings.profiles
        return {name: folder / profile_name(identities, name) for name in sorted(names)}

    def successors(self, tier: TierName, query: Query) -> tuple[TierName, ...]:
        """Return the tiers that may take over now from one that failed, in order."""
        return successors(tier, query, self._fleet.snapshot(), self.table)

    @property
    def price(self) -> float | None:
        """Return the price of loss in engine-seconds a differing token; None: not known yet."""
        return self.budget.price

    def admitted(self, decision: Decision) -> Expectation | None:
        """Count what is expected of a request's answer against the loss budget; None: nothing is.

        Args:
            decision: That admitted the request.
        """
        tier, query = decision.tier, decision.query
        if tier is None or decision.basis in BY_CALLER:
            return None
        tokens = max(round(self._fleet.output_share * query.max_tokens * query.sequences), 1)
        answer = self._answer(decision, tier, tokens)
        return None if answer is None else self.budget.expect(answer)

    def served(self, decision: Decision, tier: TierName | None, tokens: int, expected: Expectation | None) -> None:
        """Count an answer's loss against the budget, unless the caller chose its tier.

        Args:
            decision: That admitted the request.
            tier: That served it; None: none did.
            tokens: Of the answer.
            expected: What ``admitted`` returned.
        """
        chosen_by_caller = decision.basis in BY_CALLER and tier is decision.tier
        answer = None if tier is None or chosen_by_caller else self._answer(decision, tier, tokens)
        if answer is not None:
            self.budget.add(answer, expected)
        elif expected is not None:
            self.budget.add(expected.answer._replace(tokens=0), expected)

    def _answer(self, decision: Decision, tier: TierName, tokens: int) -> Answer | None:
        """Return an answer as the budget counts it; None: it is not known what it loses."""
        table, features = self.table.with_adapter(decision.query.adapter), decision.query.features
        loss, allowed = table.loss(tier, features), table.allowed(features)
        return None if loss is None or allowed is None else Answer(tokens, loss.mean, allowed, decision.priced)

    async def keep_budget(self) -> None:
        """Share and keep the state of the loss budget, until cancelled."""
        await self.budget.keep(self._shared_budget)

    def _shared_budget(self) -> SharedState:
        name = budget_name(self._identities)
        if self._redis is not None:
            return RedisState(self._redis, f"qarr:{{fleet}}:{name}")
        return FileState(self._settings.profiles / f"{name}.json")

    async def aclose(self) -> None:
        """Close the link to Redis."""
        if self._redis is not None:
            await self._redis.aclose()

    def observe(self, tier: TierName, kind: PromptClass, loss: ExpectedLoss) -> None:
        """Take what live answers of a class lost on a tier in the place of the profile's loss."""
        self._live[tier, kind] = loss
        self.table = replace(self.table, losses=_with_live(self.table.losses, self._live))

    def promote(self, promoted: Mapping[PromptClass, TierName]) -> None:
        """Set the lowest tier of classes that lose too much in live answers; classes left out have none."""
        self._promoted = promoted
        self.table = replace(self.table, promoted=promoted)

    @property
    def measured(self) -> frozenset[TierName]:
        """Return the tiers whose loss is measured."""
        return frozenset(loss.tier for loss in self.quality.losses) if self.quality is not None else frozenset()

    async def watch(self) -> None:
        """Load profiles that are made or changed, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.take_up()

    def take_up(self) -> None:
        """Load the profiles again if one was made, changed or removed."""
        if [_changed(path) for path in (*self._files, *self._adapter_files.values())] != self._seen:
            self._load()
            log.info("profiles loaded from %s", self._settings.profiles)

    def _load(self) -> None:
        """Load the profiles that are there; one that cannot be used counts as not measured, and the router serves on."""
        quality_file, latency_file = self._files
        adapter_files = self._adapter_files
        self._seen = [_changed(path) for path in (quality_file, latency_file, *adapter_files.values())]
        quality, latency = None, None
        try:
            if self._seen[0] is not None:
                quality = load_profile(quality_file).check(self._identities, quality_file)
        except ProfileError as error:
            log.warning("%s; loss counts as not measured", error)
        try:
            if self._seen[1] is not None:
                latency = load_latency(latency_file).check(self._identities, self._fleet.machine, latency_file)
        except ProfileError as error:
            log.warning("%s; speed counts as not measured under load", error)
        if quality is None or self.quality is None or quality.checkpoints != self.quality.checkpoints:
            self._live = {}
        self.quality = quality
        self._fleet.rank_by_loss(_mean_losses(quality) if quality is not None else {})
        table = replace(policy_table(self._settings, quality), adapters=self._adapter_losses(adapter_files))
        self.table = replace(table, promoted=self._promoted, losses=_with_live(table.losses, self._live))
        self._set_speeds({fit.tier: fit.model for fit in latency.fits} if latency is not None else {})

    def _adapter_losses(self, files: Mapping[str, Path]) -> dict[str, Losses]:
        """Return the measured losses of the adapters that have a profile."""
        found = {}
        for name, path in files.items():
            try:
                if path.exists():
                    found[name] = _losses(load_profile(path).check(self._identities, path))
            except ProfileError as error:
                log.warning("%s; loss with adapter %s counts as not measured", error, name)
        return found

    def _set_speeds(self, speeds: dict[TierName, SpeedModel]) -> None:
        """Give the fleet the measured speeds. The supervisor passes them to replicas, and measures idle ones without."""
        if speeds != self._fleet.speeds:
            self._fleet.speeds = speeds
            for replica in self._fleet.replicas:
                replica.speed = None


def policy_table(policy: PolicySettings, profile: QualityProfile | None = None) -> PolicyParameters:
    """Return the policy's parameters; classes that the settings leave out keep their defaults.

    Args:
        policy: The settings.
        profile: Of the checkpoints served; None: their loss is not measured.
    """
    return PolicyParameters(
        class_floor={**CLASS_FLOOR, **policy.class_floor},
        max_loss=policy.max_loss,
        loss_budget=policy.loss_budget.like if isinstance(policy.loss_budget, LikeTier) else policy.loss_budget,
        min_confidence=policy.min_confidence,
        sla_confidence=policy.sla_confidence,
        give_up=policy.give_up,
        max_slowdown=policy.max_slowdown,
        prices=policy.prices,
        losses=_losses(profile) if profile is not None else {},
    )


def _mean_losses(profile: QualityProfile) -> dict[TierName, float]:
    """Return the mean loss of each tier over the classes that enough prompts were measured for."""
    return {tier: fmean(loss.mean for loss in found.values()) for tier, found in _losses(profile).items()}


def _losses(profile: QualityProfile) -> Losses:
    """Return the losses of a profile that enough prompts were measured for."""
    found: Losses = {}
    for loss in profile.losses:
        if loss.certain:
            share = loss.top1_disagreement
            found.setdefault(loss.tier, {})[loss.prompt_class] = ExpectedLoss(share.mean, share.low, share.high)
    return found


def _with_live(
    losses: Mapping[TierName, Mapping[PromptClass, ExpectedLoss]],
    live: Mapping[tuple[TierName, PromptClass], ExpectedLoss],
) -> dict[TierName, dict[PromptClass, ExpectedLoss]]:
    """Return losses with those of live answers in their place."""
    found = {tier: dict(of_tier) for tier, of_tier in losses.items()}
    for (tier, kind), loss in live.items():
        found.setdefault(tier, {})[kind] = loss
    return found


def _changed(path: Path) -> float | None:
    """Return when a file was last changed; None: there is no file."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
