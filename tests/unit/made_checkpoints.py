"""Model folders with weights and a tokenizer, as small as they can be."""

from __future__ import annotations

import json
import struct
from pathlib import Path

LLAMA_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "vocab_size": 128256,
}


def model(
    folder: Path, vocabulary: int = 1, template: str = "t", size: int = 10
) -> Path:
    """Make a model folder in BF16 with the sizes of Llama 3.1 8B; its weight file has ``size`` bytes and no tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    definition = {"model": {"vocab": vocabulary}, "version": "1"}
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "config.json").write_text(json.dumps({**LLAMA_8B, "dtype": "bfloat16"}))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 2) + b"{}")
        file.truncate(size)
    return folder
