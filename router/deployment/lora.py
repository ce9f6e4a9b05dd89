"""LoRA adapters of the settings: which tiers' engines load them, and that their folders hold adapters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from router.deployment.settings import LoraSettings
from tiers.errors import PlanError
from tiers.spec import Adapter, Adapters, TierName, TierSpec

ADAPTER_CONFIG = "adapter_config.json"
# The ranks that vLLM 0.32 reserves memory for.
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def named_adapters(tier: TierName, lora: LoraSettings) -> tuple[str, ...]:
    """Return the names of the adapters that a tier's engines load."""
    names = [
        name
        for name, adapter in lora.adapters.items()
        if not adapter.tiers or tier in adapter.tiers
    ]
    return tuple(sorted(names))


def with_adapters(
    specs: Sequence[TierSpec], lora: LoraSettings
) -> tuple[TierSpec, ...]:
    """Return the tiers with the adapters that their engines here load."""
    specs_with_adapters = []
    for spec in specs:
        names = named_adapters(spec.name, lora) if spec.replicas else spec.adapters
        specs_with_adapters.append(replace(spec, adapters=names))
    return tuple(specs_with_adapters)


def adapters_of(spec: TierSpec, lora: LoraSettings) -> Adapters:
    """Return what a tier's engines are started with for LoRA.

    Raises:
        PlanError: A folder holds no adapter.
    """
    loaded = []
    highest_rank: int = lora.max_rank if lora.at_run_time else 1
    for name in named_adapters(spec.name, lora):
        folder = lora.adapters[name].path
        loaded.append(Adapter(name, str(folder.absolute())))
        highest_rank = max(highest_rank, _rank(name, folder))
    return Adapters(
        loaded=tuple(loaded),
        max_rank=next(rank for rank in RANKS if rank >= highest_rank),
        at_run_time=lora.at_run_time,
    )


def check_adapters(local_specs: Sequence[TierSpec], lora: LoraSettings) -> None:
    """Check that adapters can be loaded.

    Raises:
        PlanError: A folder holds no adapter, or one is named for a tier that has no engines here.
    """
    local_tiers = {spec.name for spec in local_specs}
    for name, adapter in lora.adapters.items():
        for tier in adapter.tiers:
            if tier not in local_tiers:
                raise PlanError(
                    f"lora.adapters.{name}.tiers names {tier}, which has no engines here: engines given by URL load "
                    f"adapters where they run, and the router finds them"
                )
    for spec in local_specs:
        adapters_of(spec, lora)


def _rank(name: str, folder: Path) -> int:
    """Return the rank of the adapter in a folder."""
    setting = f"lora.adapters.{name}.path is {folder}"
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        kind = config["peft_type"]
        rank = config["r"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"{setting}: {error}: a folder of PEFT with an {ADAPTER_CONFIG} is needed"
        ) from error
    if kind != "LORA" or not isinstance(rank, int) or not 1 <= rank <= RANKS[-1]:
        raise PlanError(
            f"{setting}: it is of kind {kind} and rank {rank}; LORA of rank 1 to {RANKS[-1]} is allowed"
        )
    return rank
