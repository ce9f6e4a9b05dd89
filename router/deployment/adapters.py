"""The LoRA adapters of the settings: which engines load them, and whether they can."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from tiers.errors import PlanError
from tiers.spec import Adapter, Adapters

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from router.settings import LoraSettings
    from tiers.spec import TierName, TierSpec

CONFIG = "adapter_config.json"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM 0.32 reserves memory for


def named_for(tier: TierName, lora: LoraSettings) -> tuple[str, ...]:
    """Return the names of the adapters that a tier's engines here load, sorted."""
    return tuple(sorted(name for name, own in lora.adapters.items() if not own.tiers or tier in own.tiers))


def with_adapters(specs: Sequence[TierSpec], lora: LoraSettings) -> tuple[TierSpec, ...]:
    """Return the tiers with the adapters that their engines here load at their start."""
    return tuple(replace(spec, adapters=named_for(spec.name, lora)) if spec.replicas else spec for spec in specs)


def adapters_of(spec: TierSpec, lora: LoraSettings) -> Adapters:
    """Return what a tier's engines are started with for LoRA.

    Raises:
        PlanError: A folder holds no adapter.
    """
    named = named_for(spec.name, lora)
    loaded = tuple(Adapter(name, str(lora.adapters[name].path.absolute())) for name in named)
    ranks = [_rank(name, lora.adapters[name].path) for name in named]
    highest = max([*ranks, lora.max_rank if lora.at_run_time else 1])
    return Adapters(loaded, next(rank for rank in RANKS if rank >= highest), lora.at_run_time)


def check_adapters(local: Sequence[TierSpec], lora: LoraSettings) -> None:
    """Check the adapters of the settings before anything starts.

    Raises:
        PlanError: A folder holds no adapter, or one is named for a tier that has no engines here.
    """
    here = {spec.name for spec in local}
    for name, own in lora.adapters.items():
        missing = [tier for tier in own.tiers if tier not in here]
        if missing:
            raise PlanError(
                f"lora.adapters.{name}.tiers names {missing[0]}, which has no engines here: engines given by URL load "
                f"adapters where they run, and the router finds them"
            )
    for spec in local:
        adapters_of(spec, lora)


def _rank(name: str, folder: Path) -> int:
    where = f"lora.adapters.{name}.path is {folder}"
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind, rank = config["peft_type"], config["r"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{where}: {error}: a folder of PEFT with an {CONFIG} is needed") from error
    if kind != "LORA" or not isinstance(rank, int) or not 1 <= rank <= RANKS[-1]:
        raise PlanError(f"{where}: it is of kind {kind} and rank {rank}; LORA of rank 1 to {RANKS[-1]} is allowed")
    return rank
