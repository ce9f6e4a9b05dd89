"""The policy's table as it is now: from the settings, the profiles of what is served, and what live answers showed.

A profile that is made while the router runs is taken up within seconds.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from router.policy.decide import successors
from router.policy.decision import ExpectedLoss, PolicyParameters
from router.policy.profiles import (
    LatencyProfile,
    ProfileError,
    QualityProfile,
    latency_name,
    load_latency,
    load_profile,
    profile_name,
)
from router.settings import CLASS_FLOOR, CLASS_MAX_LOSS
from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from classifier import PromptClass
    from router.policy.decision import Query
    from router.settings import PolicySettings
    from tiers.fleet import Fleet

log = logging.getLogger(f"qarr.{__name__}")
LOOK_S = 2.0


class PolicyStore:
    """Holds the table that decisions are made by; each table is a value, and replaced as a whole."""

    def __init__(self, settings: PolicySettings, fleet: Fleet) -> None:
        """Read the profiles of what the fleet serves."""
        self._settings, self._fleet = settings, fleet
        self._seen: list[float | None] = []
        self._promoted: Mapping[PromptClass, TierName] = {}
        self.quality: QualityProfile | None = None
        self._thresholds: dict[TierName, float] = {}
        self.table = policy_table(settings)
        self._load()

    @property
    def _identities(self) -> dict[TierName, str | None]:
        """Return what tells the tiers' weights from others'; a checkpoint may be made while the router serves."""
        return {spec.name: spec.identity for spec in self._fleet.specs}

    @property
    def _files(self) -> tuple[Path, Path]:
        """Return where the profiles of what is served are: quality, latency."""
        identities, folder = self._identities, self._settings.profiles
        return folder / profile_name(identities), folder / latency_name(identities, self._fleet.machine)

    @property
    def check_enabled(self) -> bool:
        """Tell whether answers' first tokens are checked."""
        return self._settings.check_share > 0

    @property
    def check_wait_s(self) -> float:
        """Return the longest time that a first token is held for the check, in seconds."""
        return self._settings.check_wait_s

    def check_threshold(self, tier: TierName) -> float | None:
        """Return the certainty under which a tier's answer is begun again; None where it was not measured."""
        return self._thresholds.get(tier)

    def successors(self, tier: TierName, query: Query) -> tuple[TierName, ...]:
        """Return the tiers that may take over now what a tier has failed, in order."""
        return successors(tier, query, self._fleet.snapshot(), self.table)

    def promote(self, promoted: Mapping[PromptClass, TierName]) -> None:
        """Raise the lowest tier of some classes, as live answers demand."""
        self._promoted = promoted
        self.table = replace(self.table, promoted=promoted)

    @property
    def measured(self) -> frozenset[TierName]:
        """Return the tiers whose loss is measured."""
        return frozenset(loss.tier for loss in self.quality.losses) if self.quality is not None else frozenset()

    async def watch(self) -> None:
        """Take up profiles that are made or changed, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.take_up()

    def take_up(self) -> None:
        """Take up profiles that were made or changed."""
        if [_changed(path) for path in self._files] != self._seen:
            self._load()
            log.info("profiles taken up from %s", self._settings.profiles)

    def _load(self) -> None:
        """Take up the profiles that are there; one that cannot be used counts as not measured, and the router serves on."""
        self._seen = [_changed(path) for path in self._files]
        quality, latency = None, None
        try:
            quality = self._read_quality()
        except ProfileError as error:
            log.warning("%s; loss counts as not measured", error)
        try:
            latency = self._read_latency()
        except ProfileError as error:
            log.warning("%s; speed counts as not measured under load", error)
        self.quality = quality
        share = self._settings.check_share
        found = {tier: quality.threshold(tier, share) for tier in TierName} if quality and share else {}
        self._thresholds = {tier: value for tier, value in found.items() if value is not None}
        if share and not self._thresholds:
            log.warning(
                "policy.check_share is set, but no quality profile says how sure the tiers are: nothing is checked"
            )
        self.table = replace(policy_table(self._settings, quality), promoted=self._promoted)
        self._take_speeds(latency)

    def _read_quality(self) -> QualityProfile | None:
        path = self._files[0]
        if self._seen[0] is None:
            return None
        profile = load_profile(path)
        profile.check(self._identities, path)
        return profile

    def _read_latency(self) -> LatencyProfile | None:
        path = self._files[1]
        if self._seen[1] is None:
            return None
        profile = load_latency(path)
        profile.check(self._identities, self._fleet.machine, path)
        return profile

    def _take_speeds(self, latency: LatencyProfile | None) -> None:
        """Give the fleet the measured speeds; the supervisor hands them on, or measures idle replicas without."""
        speeds = {fit.tier: fit.model for fit in latency.fits} if latency is not None else {}
        if speeds != self._fleet.speeds:
            self._fleet.speeds = speeds
            for replica in self._fleet.replicas:
                replica.speed = None


def policy_table(policy: PolicySettings, profile: QualityProfile | None = None) -> PolicyParameters:
    """Return the policy's parameters; classes that the settings leave out keep their defaults.

    Args:
        policy: The settings.
        profile: What was measured of the checkpoints served; None: nothing yet.
    """
    losses: dict[TierName, dict[PromptClass, ExpectedLoss]] = {}
    for loss in (loss for loss in (profile.losses if profile else ()) if loss.certain):
        share = loss.top1_disagreement
        losses.setdefault(loss.tier, {})[loss.prompt_class] = ExpectedLoss(share.mean, share.low, share.high)
    return PolicyParameters(
        class_floor={**CLASS_FLOOR, **policy.class_floor},
        max_loss={**CLASS_MAX_LOSS, **policy.max_loss},
        min_confidence=policy.min_confidence,
        sla_confidence=policy.sla_confidence,
        give_up=policy.give_up,
        max_slowdown=policy.max_slowdown,
        prices=policy.prices,
        losses=losses,
    )


def _changed(path: Path) -> float | None:
    """Return when a file was last changed; None where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
