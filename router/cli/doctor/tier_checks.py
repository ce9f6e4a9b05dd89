"""The check of the tiers in the settings, and which of them have engines on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from router.cli.doctor.findings import CheckContext, Finding, ok, problem
from router.deployment.layout import (
    engine_args,
    prepare_options,
    scheme_choices,
    tier_spec,
    with_expected_precisions,
)
from tiers.checkpoints.checkpoint import Checkpoint
from tiers.checkpoints.prepare import finished
from tiers.errors import CheckpointError
from tiers.spec import TierName, TierSpec


def check_tiers(context: CheckContext) -> Iterator[Finding]:
    """Check that a tier has engines, here or elsewhere."""
    served_tiers = [
        name for name in context.settings.tiers.names if _is_served(context, name)
    ]
    if served_tiers:
        yield judge_choice(served_tiers)
    else:
        yield problem("no tier has engines", "set tiers.<name>.replicas or urls")


def _is_served(context: CheckContext, name: TierName) -> bool:
    """Tell whether the settings give a tier engines; a discovery file may name engines of any tier."""
    if context.settings.discovery.file is not None:
        return True
    tier = context.settings.tiers.of(name)
    return bool(tier.replicas_here or tier.urls or tier.dns)


def judge_choice(tiers: Sequence[str]) -> Finding:
    """Say between which tiers a router can choose."""
    text = ", ".join(tiers)
    if len(tiers) == 1:
        text += ": nothing to choose; queue, quotas, failover and measurement work as with several"
    return ok(text, "tiers")


def local_tiers(context: CheckContext) -> list[TierName]:
    """Return the tiers that have engines on this machine."""
    tiers = context.settings.tiers
    return [name for name in tiers.names if tiers.of(name).replicas_here]


def local_checkpoints(
    context: CheckContext,
) -> tuple[list[TierSpec], dict[TierName, Checkpoint]]:
    """Return the tiers that have engines here, with their checkpoints, and the checkpoints that were made here."""
    settings = context.settings
    made: dict[TierName, Checkpoint] = {}
    try:
        for checkpoint in finished(prepare_options(settings)):
            made[checkpoint.tier] = checkpoint
    except CheckpointError:
        # Without the calibration file no checkpoint can be told by its recipe.
        made = {}
    specs: list[TierSpec] = []
    for name in local_tiers(context):
        arguments = engine_args(settings, name)
        specs.append(
            tier_spec(
                name,
                settings.tiers.of(name),
                made,
                store=settings.model.store,
                args=arguments,
            )
        )
    return list(with_expected_precisions(specs, scheme_choices(settings))), made
