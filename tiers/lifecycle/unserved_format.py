"""Say why an engine could not start: the hardware cannot compute the number format of its checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiers.checkpoints.schemes import CHOSEN_TIERS, scheme_table, what_can_be_served
from tiers.formats import formats_in

if TYPE_CHECKING:
    from tiers.checkpoints.schemes import Hardware
    from tiers.spec import TierName


def why_not_served(tier: TierName, precision: str, hardware: Hardware) -> str | None:
    """Return in one sentence that some hardware cannot compute a precision, and what it can.

    None: it can, or neither is known. The table does not keep anything from being tried: another release of vLLM may serve
    more.

    Args:
        tier: Whose engine did not start.
        precision: Of its checkpoint, as ``TierSpec.precision`` names it.
        hardware: What the engine ran on.
    """
    row = scheme_table().class_of(hardware)
    if row is None:
        return None
    unserved = [
        number_format.name
        for number_format in formats_in(precision)
        if not row.can_serve(number_format.name)
    ]
    if not unserved:
        return None
    remedy = f"give it another checkpoint (tiers.{tier}.checkpoint)"
    if tier in CHOSEN_TIERS:
        remedy = f"name another scheme (tiers.{tier}.scheme), or {remedy}"
    return (
        f"{hardware} cannot compute {' and '.join(unserved)}, the format of {tier}'s checkpoint; vLLM serves there "
        f"{what_can_be_served(hardware)}: {remedy}, or run the tier elsewhere"
    )
