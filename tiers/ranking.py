"""The order of tiers by precision: by measured loss where it is known, else by the bits of a weight."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from tiers.spec import PRECISIONS, TierName, TierSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_BITS = re.compile(r"(?:int|fp|bf|nf)(\d+)")


def bits_of(precision: str) -> int | None:
    """Return the bits of a weight in a number format as ``TierSpec.precision`` names it; of several, the fewest.

    None: the name tells none.
    """
    return min(map(int, _BITS.findall(precision)), default=None)


def rising(specs: Iterable[TierSpec], losses: Mapping[TierName, float]) -> tuple[TierSpec, ...]:
    """Return tiers by rising precision. ``precise`` comes last: loss is measured against it.

    Args:
        specs: The tiers, in any order.
        losses: Mean loss of the measured tiers, 0..1. They count only if every tier that has engines is measured.
    """
    specs = tuple(specs)
    lower = [spec for spec in specs if spec.name is not TierName.PRECISE]
    measured = all(spec.name in losses for spec in lower if not spec.absent)

    def order(spec: TierSpec) -> tuple[bool, float, float, bool]:
        made = PRECISIONS.get(spec.name)
        bits = bits_of(spec.precision) or (bits_of(made) if made else None) or math.inf
        loss = -losses.get(spec.name, 1.0) if measured else 0.0
        return spec.name is TierName.PRECISE, loss, bits, made is None

    return tuple(sorted(specs, key=order))
