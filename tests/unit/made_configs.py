"""Model folders whose configuration states their precision, as Hugging Face and llm-compressor write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiers.spec import STANDARD_TIERS, TierName

AWQ_RECIPE = (
    "default_stage:\n  default_modifiers:\n    AWQModifier:\n      duo_scaling: true\n"
)


def compressed(kind: str, bits: int, packing: str = "pack-quantized") -> dict[str, Any]:
    """Return the configuration of a checkpoint that llm-compressor wrote."""
    weights = {"num_bits": bits, "type": kind}
    # Integers of these checkpoints are unpacked for 16-bit activations; floats are multiplied with floats of their kind.
    is_weight_only = kind == "int" or packing.startswith("mxfp4")
    group = {
        "format": packing,
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None if is_weight_only else weights,
    }
    quantization = {
        "config_groups": {"group_0": group},
        "format": packing,
        "quant_method": "compressed-tensors",
    }
    return {"dtype": "bfloat16", "quantization_config": quantization}


CONFIGS = {
    TierName.FAST: compressed("int", 4),
    TierName.BALANCED: compressed("float", 8, "float-quantized"),
    TierName.PRECISE: {"dtype": "bfloat16"},
}


def model_folder(path: Path, config: object, recipe: str = "") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(
        config if isinstance(config, str) else json.dumps(config)
    )
    if recipe:
        (path / "recipe.yaml").write_text(recipe)
    return path


def made_hub(path: Path) -> Path:
    """Make a cache of the Hugging Face hub with the models ``made/fast``, ``made/balanced`` and ``made/precise``."""
    for tier in STANDARD_TIERS:
        tier_folder(path / f"models--made--{tier}" / "snapshots" / "0", tier)
    return path


def tier_folder(path: Path, tier: TierName) -> Path:
    return model_folder(
        path, CONFIGS[tier], AWQ_RECIPE if tier is TierName.FAST else ""
    )
