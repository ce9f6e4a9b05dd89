"""The policy's present parameters: from the settings, the profiles of what is served, and shadow evaluation.

The router loads a profile that is made while it runs within seconds.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from router.policy.decide import successors
from router.policy.decision import ExpectedLoss, PolicyParameters
from router.policy.profiles import (
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
    from tiers.speed import SpeedModel

log = logging.getLogger(f"qarr.{__name__}")
LOOK_S = 2.0


class PolicyStore:
    """Holds the parameters that decisions are made by; they are a value, and replaced as a whole."""

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
        """Return the digests of the tiers' weights; a checkpoint may be made while the router serves."""
        return {spec.name: spec.identity for spec in self._fleet.specs}

    @property
    def _files(self) -> tuple[Path, Path]:
        """Return where the profiles of what is served are: quality, latency."""
        identities, folder = self._identities, self._settings.profiles
        return folder / profile_name(identities), folder / latency_name(identities, self._fleet.machine)

    @property
    def check_enabled(self) -> bool:
        """Tell whether the cascade checks answers' first tokens."""
        return self._settings.check_share > 0

    @property
    def check_wait_s(self) -> float:
        """Return the longest time that first tokens are held for the check, in seconds."""
        return self._settings.check_wait_s

    def check_threshold(self, tier: TierName) -> float | None:
        """Return the certainty under which a higher tier begins the answer again; None: not measured."""
        return self._thresholds.get(tier)

    def successors(self, tier: TierName, query: Query) -> tuple[TierName, ...]:
        """Return the tiers that may take over now from one that failed, in order."""
        return successors(tier, query, self._fleet.snapshot(), self.table)

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
        if [_changed(path) for path in self._files] != self._seen:
            self._load()
            log.info("profiles loaded from %s", self._settings.profiles)

    def _load(self) -> None:
        """Load the profiles that are there; one that cannot be used counts as not measured, and the router serves on."""
        quality_file, latency_file = self._files
        self._seen = [_changed(quality_file), _changed(latency_file)]
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
        self.quality = quality
        share = self._settings.check_share
        found = {tier: quality.threshold(tier, share) for tier in TierName} if quality and share else {}
        self._thresholds = {tier: value for tier, value in found.items() if value is not None}
        if share and not self._thresholds:
            log.warning(
                "policy.check_share is set, but no quality profile has the tiers' certainty: nothing is checked"
            )
        self.table = replace(policy_table(self._settings, quality), promoted=self._promoted)
        self._set_speeds({fit.tier: fit.model for fit in latency.fits} if latency is not None else {})

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
    losses: dict[TierName, dict[PromptClass, ExpectedLoss]] = {}
    for loss in profile.losses if profile else ():
        if loss.certain:
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
    """Return when a file was last changed; None: there is no file."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
