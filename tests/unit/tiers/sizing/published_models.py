"""Configurations of published models, with their sizes as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiers.sizing.architecture import Architecture, architecture

CONFIGS = Path(__file__).with_name("configs")
# Parameters as the models' pages on the hub count their checkpoints' tensors; of DeepSeek-V3 without its module for predicting
# further tokens. KV cache: 2 x layers x KV heads x head dimension x 2 bytes; of DeepSeek-V3 as its authors give it (arXiv
# 2505.09343, table 1: 70.272 KB).
PUBLISHED = {
    "llama-3.1-8b": (8_030_261_248, 131_072),
    "llama-3.3-70b": (70_553_706_496, 327_680),
    "qwen3-30b-a3b": (30_532_122_624, 98_304),
    "gemma-3-27b": (27_432_406_640, 507_904),
    "deepseek-v3": (671_026_419_200, 70_272),
}


def read_config(name: str) -> dict[str, Any]:
    """Return a published model's ``config.json``."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_bytes())
    return config


def published_model(name: str) -> Architecture:
    """Return what a published model's configuration describes."""
    return architecture(read_config(name))
