"""What a check of ``qarr doctor`` finds, and what the checks share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from router.deployment.layout import prepare_options
from tiers.checkpoints.prepare import finished
from tiers.errors import CheckpointError
from tiers.spec import TierName, TierSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from router.settings import Settings
    from tiers.checkpoints.checkpoint import Checkpoint


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
        check: Its name.
        found: For a person.
        then: What to do next; empty where nothing is to be done.
    """

    group: str
    check: str
    health: Health
    found: str
    then: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """What is checked.

    Attributes:
        deep: Also read every weight file.
        url: Of a running router.
        key: For it.
    """

    settings: Settings
    deep: bool
    url: str
    key: str


Check = tuple[str, str, "Callable[[Question], Iterable[Finding]]"]


def ok(group: str, check: str, found: str) -> Finding:
    """Return that all is well."""
    return Finding(group, check, Health.OK, found)


def warning(group: str, check: str, found: str, then: str) -> Finding:
    """Return what works, but not as well as it could."""
    return Finding(group, check, Health.WARNING, found, then)


def problem(group: str, check: str, found: str, then: str) -> Finding:
    """Return what does not work."""
    return Finding(group, check, Health.PROBLEM, found, then)


def local_specs(question: Question) -> tuple[TierSpec, ...]:
    """Return the tiers started here whose checkpoints are there."""
    prepared = {c.tier: c for c in _prepared(question)}
    specs = []
    for name in local_tiers(question):
        tier = getattr(question.settings.tiers, name.value)
        made = None if tier.checkpoint else prepared.get(name)
        folder = made.path if made else tier.checkpoint
        if folder is not None:
            digest = made.manifest.weights_digest if made else None
            specs.append(
                TierSpec(
                    name, tier.max_model_len, tier.max_num_seqs, tier.max_in_flight, checkpoint=folder, digest=digest
                )
            )
    return tuple(specs)


def _prepared(question: Question) -> tuple[Checkpoint, ...]:
    try:
        return finished(prepare_options(question.settings))
    except CheckpointError:  # of the calibration file: then none can be found by its recipe
        return ()


def local_tiers(question: Question) -> list[TierName]:
    """Return the tiers whose engines are started here."""
    return [name for name in TierName if not getattr(question.settings.tiers, name.value).urls]
