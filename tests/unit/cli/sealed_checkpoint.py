"""A small checkpoint that is complete, for tests that need no weights of a model."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from tiers.checkpoints.checkpoint import seal
from tiers.spec import TierName

WEIGHT_BYTES = 1000


def make_checkpoint(folder: Path, tier: TierName = TierName.FAST) -> Path:
    """Write a checkpoint with its manifest, and return its folder."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(_safetensors())
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    config = {
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_key_value_heads": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    seal(
        folder,
        tier,
        model="m",
        base_digest="b",
        made={"method": "made up", "versions": {}},
    )
    return folder


def _safetensors() -> bytes:
    """Return a file of weights: the length of its header, the header, and the weights."""
    tensor = {
        "dtype": "U8",
        "shape": [WEIGHT_BYTES],
        "data_offsets": [0, WEIGHT_BYTES],
    }
    header = json.dumps({"w": tensor}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(WEIGHT_BYTES)
