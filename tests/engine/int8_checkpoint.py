"""Make an INT8 checkpoint (W8A8) of a BF16 one, as llm-compressor writes it. Run by an interpreter that has torch.

Usage: python int8_checkpoint.py FROM TO. Weights are rounded to 8 bits with a scale for each output channel (symmetric,
absolute maximum); activations are rounded by the engine, with a scale for each token. Only one layer is rounded: on a CPU,
vLLM takes a second for a token of 30 such layers. It is none of the first, which alone makes answers wrong.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LAYER = 15
TOKEN = {
    "dynamic": True,
    "num_bits": 8,
    "strategy": "token",
    "symmetric": True,
    "type": "int",
}
CHANNEL = {
    "dynamic": False,
    "num_bits": 8,
    "strategy": "channel",
    "symmetric": True,
    "type": "int",
}
GROUP = {"input_activations": TOKEN, "targets": ["Linear"], "weights": CHANNEL}
QUANTIZATION = {
    "config_groups": {"group_0": GROUP},
    "format": "int-quantized",
    "ignore": ["lm_head", rf"re:.*layers\.(?!{LAYER}\.).*"],
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def main(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ):
        if (source / name).exists():
            shutil.copy(source / name, target)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(
        json.dumps({**config, "quantization_config": QUANTIZATION})
    )
    tensors = {
        name: tensor
        for part in source.glob("*.safetensors")
        for name, tensor in load_file(part).items()
    }
    made = {}
    for name, tensor in tensors.items():
        if not (name.endswith("_proj.weight") and f".layers.{LAYER}." in name):
            made[name] = tensor
            continue
        scale = tensor.float().abs().amax(dim=1, keepdim=True) / 127
        made[name] = (tensor.float() / scale).round().clamp(-128, 127).to(torch.int8)
        made[f"{name}_scale"] = scale.to(torch.bfloat16)
    save_file(made, target / "model.safetensors", {"format": "pt"})


main(Path(sys.argv[1]), Path(sys.argv[2]))
