"""Quantize tiny models of each architecture by each recipe, and show which module is in which format.

    .venv-quantizer/bin/python -P benchmarks/checkpoint_formats.py [--architecture NAME ...] [--scheme NAME ...]

The models have random weights and the module names of the real ones; they are made by transformers' classes. What is shown
is read from the files that were written: the type of each tensor, and the tensors beside it. Layers and experts of the same
formats share a line: ``*`` stands for their numbers. ``results/checkpoint_formats.txt`` holds the output for all.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
# Libraries write where they like; the table is all that this program prints.
TABLE = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import torch  # noqa: E402  what it writes goes to standard error
import transformers  # noqa: E402
from safetensors import safe_open  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

from tiers.checkpoints.quantize import Reporter, quantize  # noqa: E402
from tiers.checkpoints.recipes import Recipe, recipe_for, scheme_names  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LARGEST_GROUP = 128
TEXT: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 256,
}
VISION: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
ROTATION = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
# The class of the model, the class of its configuration, and its sizes.
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", TEXT),
    "Qwen3ForCausalLM": ("Qwen3Config", TEXT),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**TEXT, **EXPERTS}),
    "Qwen3VLForConditionalGeneration": (
        "Qwen3VLConfig",
        {
            "text_config": {**TEXT, "rope_parameters": ROTATION},
            "vision_config": {
                **VISION,
                "depth": 1,
                "num_heads": 4,
                "out_hidden_size": 256,
                "deepstack_visual_indexes": [0],
                "num_position_embeddings": 64,
            },
        },
    ),
    "Gemma3ForConditionalGeneration": (
        "Gemma3Config",
        {
            "text_config": {**TEXT, "sliding_window": 32},
            "vision_config": {
                **VISION,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "image_size": 56,
                "patch_size": 14,
            },
            "mm_tokens_per_image": 4,
        },
    ),
    "GptOssForCausalLM": (
        "GptOssConfig",
        {
            **TEXT,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "sliding_window": 32,
        },
    ),
    "DeepseekV3ForCausalLM": (
        "DeepseekV3Config",
        {
            **TEXT,
            "num_hidden_layers": 2,
            "moe_intermediate_size": 256,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 256,
            "kv_lora_rank": 256,
            "qk_rope_head_dim": 32,
            "head_dim": 32,  # the part that is rotated
            "qk_nope_head_dim": 64,
            "v_head_dim": 64,
        },
    ),
}
PROMPTS = ("The sea is wide.", "def f(x): return x", "2 + 2 = 4", "Guten Tag!")
MAX_TOKENS = 16


class Tensor(NamedTuple):
    """What a file says of a tensor."""

    dtype: str
    shape: Sequence[int]


def main() -> None:
    """Make the checkpoints that the command line asks for, and print their modules."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", action="append", choices=sorted(TINY))
    parser.add_argument("--scheme", action="append", choices=scheme_names())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for architecture in options.architecture or TINY:
            base = make_base(architecture, Path(folder, architecture))
            for scheme in options.scheme or scheme_names():
                target = Path(folder, f"{architecture}-{scheme}")
                began_at = time.monotonic()
                for line in rows(architecture, scheme, base, target):
                    TABLE.write(line + "\n")
                TABLE.flush()
                sys.stderr.write(
                    f"{architecture} {scheme}: {time.monotonic() - began_at:.1f} s\n"
                )


def make_base(architecture: str, folder: Path) -> Path:
    """Write a tiny model of random weights in BF16, with a tokenizer whose tokens are bytes."""
    torch.manual_seed(0)
    config_class, sizes = TINY[architecture]
    config = getattr(transformers, config_class)(**sizes)
    model = getattr(transformers, architecture)(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: token for token, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    lines = (json.dumps({"text": prompt}) + "\n" for prompt in PROMPTS)
    (folder / "prompts.jsonl").write_text("".join(lines))
    return folder


def rows(architecture: str, scheme: str, base: Path, target: Path) -> Iterator[str]:
    """Quantize a model; yield its modules by their formats, or the reason why it cannot be."""
    recipe = recipe_for(scheme, {"architectures": [architecture]})
    yield f"{architecture}, {scheme}"
    try:
        make(recipe, base, target)
    except Exception as error:  # noqa: BLE001  whatever the libraries raise is the row
        words = " ".join(str(error).split())
        yield f"  fails: {type(error).__name__}: {words[:300]}"
        return
    for module_format, modules in by_format(collapse(formats_in(target))).items():
        yield f"  {module_format}"
        for parent, leaves in modules.items():
            yield f"    {parent}: {' '.join(leaves)}"


def make(recipe: Recipe, base: Path, target: Path) -> None:
    """Quantize a model as ``qarr model prepare`` does."""
    arguments = argparse.Namespace(
        source=str(base),
        target=str(target),
        recipe=recipe.model_dump_json(),
        calibration=str(base / "prompts.jsonl"),
        samples=0,
        max_tokens=MAX_TOKENS,
        kept=None,
        group_size=0,
        prefer_small_groups=False,
    )
    with contextlib.redirect_stdout(sys.stderr):
        quantize(arguments, Reporter(io.StringIO()))


def formats_in(folder: Path) -> dict[str, str]:
    """Return the format of each module that has a matrix, as its tensors show it."""
    tensors: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118  it is no mapping
                view = file.get_slice(key)
                module, _, name = key.rpartition(".")
                tensors[module][name] = Tensor(view.get_dtype(), view.get_shape())
    config = json.loads((folder / "config.json").read_text())
    activations = _activations(config["quantization_config"])
    return {
        module: _format_of(parts, activations)
        for module, parts in tensors.items()
        if "weight_packed" in parts
        or ("weight" in parts and len(parts["weight"].shape) > 1)
    }


def _activations(quantization: Mapping[str, Any]) -> str:
    """Return what the activations of quantized modules are rounded to, as the configuration says."""
    (group,) = quantization["config_groups"].values()
    activations = group["input_activations"]
    if activations is None:
        return "activations as they are"
    words = f"activations {activations['type']}{activations['num_bits']}"
    if activations["group_size"]:
        words = f"{words} in groups of {activations['group_size']}"
    return words


def _format_of(parts: Mapping[str, Tensor], activations: str) -> str:
    """Return a module's format for people."""
    if "weight_scale" not in parts:
        return parts["weight"].dtype
    scales = parts["weight_scale"]
    weights = parts.get("weight_packed") or parts["weight"]
    outputs, inputs = weights.shape
    words = weights.dtype
    if "weight_packed" in parts:
        weights_a_number = {"I32": 8, "U8": 2}[weights.dtype]
        inputs *= weights_a_number
        words = f"4 bits in {weights.dtype}"
    words = f"{words}, {scales.dtype} scale {_reach(scales.shape, outputs, inputs)}"
    for name, meaning in (
        ("weight_zero_point", "zero points"),
        ("weight_global_scale", "global scale"),
        ("input_global_scale", "input scale"),
    ):
        if name in parts:
            words = f"{words}, {meaning}"
    return f"{words}; {activations}"


def _reach(scales: Sequence[int], outputs: int, inputs: int) -> str:
    """Return which weights share a scale."""
    if len(scales) == 1 or scales[0] < outputs:
        return "a block of 128 x 128" if len(scales) > 1 else "a tensor"
    if scales[1] == 1 and inputs > LARGEST_GROUP:
        return "a row"
    return f"a row's {inputs // scales[1]}"


def by_format(formats: Mapping[str, str]) -> dict[str, dict[str, list[str]]]:
    """Return the modules of each format: the last parts of their names by the rest."""
    modules: dict[str, dict[str, list[str]]] = {}
    for module, module_format in formats.items():
        parent, _, leaf = module.rpartition(".")
        leaves = modules.setdefault(module_format, {})
        leaves.setdefault(parent or "(the model)", []).append(leaf)
    return modules


def collapse(formats: Mapping[str, str]) -> dict[str, str]:
    """Join the modules whose names differ in numbers only and whose formats are the same."""
    by_pattern: dict[str, set[str]] = defaultdict(set)
    for module, module_format in formats.items():
        by_pattern[re.sub(r"\.\d+\b", ".*", module)].add(module_format)
    collapsed = {}
    for module in sorted(formats):
        pattern = re.sub(r"\.\d+\b", ".*", module)
        name = pattern if len(by_pattern[pattern]) == 1 else module
        collapsed[name] = formats[module]
    return dict(sorted(collapsed.items()))


if __name__ == "__main__":
    main()
