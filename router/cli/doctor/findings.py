"""What a check of ``qarr doctor`` finds, and what the checks share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from router.deployment.layout import prepare_options, tier_spec, with_drafts
from tiers.checkpoints.prepare import finished
from tiers.errors import CheckpointError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from router.settings import Settings
    from tiers.checkpoints.checkpoint import Checkpoint
    from tiers.spec import TierName, TierSpec


class Health(StrEnum):
    """How a check ends."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        group: ``settings``, ``machine``, ``files``, ``network`` or ``running``.
        check: Name of the check. A check leaves both empty unless it has several findings; its entry in ``CHECKS``
            supplies them.
        found: For a person.
        then: What to do next; empty if nothing is to be done.
    """

    group: str
    check: str
    health: Health
    found: str
    then: str = ""


@dataclass(frozen=True, slots=True)
class CheckContext:
    """What is checked.

    Attributes:
        url: URL of a running router; empty: that of the settings.
        key: Key for that router.
    """

    settings: Settings
    url: str
    key: str


Check = tuple[str, str, "Callable[[CheckContext], Iterable[Finding]]"]


def ok(found: str, check: str = "") -> Finding:
    return Finding("", check, Health.OK, found)


def warning(found: str, then: str, check: str = "") -> Finding:
    """Return a finding of something that works, but not as well as it could."""
    return Finding("", check, Health.WARNING, found, then)


def problem(found: str, then: str, check: str = "") -> Finding:
    """Return a finding of something that does not work."""
    return Finding("", check, Health.PROBLEM, found, then)


def local_tiers(context: CheckContext) -> list[TierName]:
    tiers = context.settings.tiers
    return [name for name in tiers.names if tiers.of(name).replicas_here]


def local_engines(context: CheckContext) -> int:
    """Return the number of engines that are started here."""
    tiers = context.settings.tiers
    return sum(tiers.of(name).replicas_here for name in tiers.names)


def local_specs(context: CheckContext) -> tuple[TierSpec, ...]:
    """Return the tiers started here that have a checkpoint."""
    made, settings = prepared(context), context.settings
    specs = tuple(tier_spec(name, settings.tiers.of(name), made) for name in settings.tiers.names)
    try:
        specs = with_drafts(specs, settings, made)
    except PlanError:  # a draft's checkpoint is missing: 'qarr up' says so
        specs = tuple(replace(spec, draft=None) for spec in specs)
    return tuple(spec for spec in specs if spec.replicas and spec.startable)


def prepared(context: CheckContext) -> dict[TierName, Checkpoint]:
    try:
        return {checkpoint.tier: checkpoint for checkpoint in finished(prepare_options(context.settings))}
    except CheckpointError:  # the calibration file cannot be read: without it no checkpoint can be told by its recipe
        return {}
