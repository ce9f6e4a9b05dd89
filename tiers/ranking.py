"""The order of tiers by precision: by measured loss where it is known, else by the bits of a weight."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tiers.formats import rank_bits
from tiers.spec import PRECISIONS, TierName, TierSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def rising(
    specs: Iterable[TierSpec], losses: Mapping[TierName, float]
) -> tuple[TierSpec, ...]:
    """Return tiers by rising precision. ``precise`` comes last: loss is measured against it.

    Args:
        specs: The tiers, in any order.
        losses: Mean loss of the measured tiers, 0..1. They count only if every tier that has engines is measured.
    """
    specs = tuple(specs)
    has_losses = all(
        spec.name in losses
        for spec in specs
        if spec.name is not TierName.PRECISE and not spec.absent
    )

    def order(spec: TierSpec) -> tuple[bool, float, float, bool]:
        is_precise = spec.name is TierName.PRECISE
        negated_loss = 0.0
        if has_losses:
            negated_loss = -losses.get(spec.name, 1.0)
        is_custom = spec.name not in PRECISIONS
        return is_precise, negated_loss, _bits_of_tier(spec), is_custom

    return tuple(sorted(specs, key=order))


def _bits_of_tier(spec: TierSpec) -> float:
    """Return the bits of a weight of a tier, by the precision that it shows, else by its name; infinity: not known."""
    bits = rank_bits(spec.precision)
    usual_precision = PRECISIONS.get(spec.name)
    if not bits and usual_precision:
        bits = rank_bits(usual_precision)
    return bits or math.inf
