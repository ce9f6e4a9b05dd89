"""What a checkpoint holds, by each way in which it may say so."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.unit.made_configs import AWQ_RECIPE, compressed, model_folder
from tiers.checkpoints.contents import contents_of, read_contents
from tiers.checkpoints.module_names import NamePatterns
from tiers.checkpoints.precision import checkpoint_precision

# Two layers: each has attention of 4 x 64 x 64 parameters and a feed-forward part of 3 x 64 x 128; the embedding has 1000 x 64.
MODEL = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
ATTENTION = 2 * 4 * 64 * 64
FEED_FORWARD = 2 * 3 * 64 * 128
NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16}
FP8 = {"num_bits": 8, "type": "float"}
INT8 = {"num_bits": 8, "type": "int"}
INT4 = {"num_bits": 4, "type": "int", "group_size": 32}


def quantized(**quantization: Any) -> dict[str, Any]:
    return {**MODEL, "quantization_config": quantization}


def grouped(*groups: dict[str, Any], **fields: Any) -> dict[str, Any]:
    by_name = {f"group_{number}": group for number, group in enumerate(groups)}
    return quantized(quant_method="compressed-tensors", config_groups=by_name, **fields)


def group(
    weights: dict[str, Any],
    activations: dict[str, Any] | None,
    packing: str,
    *targets: str,
) -> dict[str, Any]:
    return {
        "format": packing,
        "targets": list(targets) or ["Linear"],
        "weights": weights,
        "input_activations": activations,
    }


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        (grouped(group(NVFP4, NVFP4, "nvfp4-pack-quantized")), "nvfp4"),
        (grouped(group(NVFP4, None, "nvfp4-pack-quantized")), "nvfp4-w4a16"),
        (grouped(group(NVFP4, FP8, "nvfp4-pack-quantized")), "nvfp4-w4a8"),
        (grouped(group(NVFP4, None, "mxfp4-pack-quantized")), "mxfp4"),
        (grouped(group(NVFP4, NVFP4, "mxfp4-pack-quantized")), "mxfp4-w4a4"),
        (grouped(group({**FP8, "group_size": 32}, FP8, "mxfp8-quantized")), "mxfp8"),
        (grouped(group({**FP8, "strategy": "block"}, FP8, "float-quantized")), "fp8-block"),
        (grouped(group(FP8, FP8, "float-quantized")), "fp8"),
        (grouped(group(FP8, None, "float-quantized")), "fp8-w8a16"),
        (grouped(group(INT8, INT8, "int-quantized")), "int8-w8a8"),
        (grouped(group(INT8, None, "pack-quantized")), "int8"),
        (grouped(group(INT4, FP8, "pack-quantized")), "int4-w4a8"),
        (grouped(), "unknown"),
        (quantized(quant_method="fp8", weight_block_size=[128, 128]), "fp8-block"),
        (quantized(quant_method="fp8", weight_block_size=[1, 32]), "mxfp8"),
        (quantized(quant_method="modelopt", quant_algo="W4A8_AWQ"), "awq-int4-w4a8"),
        (quantized(quant_method="modelopt", quant_algo="fp8_pb_wo"), "fp8-block"),
        (quantized(quant_method="modelopt", quant_algo="W4A16_NVFP4"), "nvfp4-w4a16"),
        (quantized(quant_method="modelopt", quant_algo="NVFP4", kv_cache_quant_algo="NVFP4"), "nvfp4+kv-nvfp4"),
        (quantized(quant_method="modelopt", quant_algo="FP8", kv_cache_scheme=FP8), "fp8+kv-fp8"),
        (quantized(quant_method="modelopt", quant_algo="MIXED_PRECISION"), "unknown"),
        (quantized(quant_method="auto-round", bits=4, data_type="int", sym=True), "int4"),
        (quantized(quant_method="quark", global_quant_config={
            "weight": {"dtype": "fp4", "group_size": 32}, "input_tensors": {"dtype": "fp4"}}), "mxfp4-w4a4"),
        (quantized(quant_method="quark", global_quant_config={
            "weight": {"dtype": "fp8_e4m3"}, "input_tensors": {"dtype": "fp8_e4m3"}}), "fp8"),
        (quantized(quant_method="gptq", bits=8, dynamic={r"+:.*\.mlp\..*": {"bits": 4}}), "gptq-int4+gptq-int8"),
        ({**MODEL, "expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "fp8-block+mxfp4-w4a8"),
    ],
)  # fmt: skip
def test_formats_of_weights_and_activations(
    config: dict[str, Any], precision: str
) -> None:
    assert contents_of(config).precision == precision


def test_each_group_has_its_share() -> None:
    """What no group names stays in 16 bits, and is not a part of the name."""
    config = grouped(
        group(NVFP4, NVFP4, "nvfp4-pack-quantized", "re:.*mlp.*"),
        group(FP8, FP8, "float-quantized", "re:.*self_attn.(q|k|v)_proj$"),
        ignore=["lm_head"],
    )
    contents = contents_of(config)
    assert contents.parameters is not None
    assert contents.formats["nvfp4"] * contents.parameters == FEED_FORWARD
    assert contents.formats["fp8"] * contents.parameters == ATTENTION * 3 / 4
    assert contents.precision == "fp8+nvfp4"
    assert contents.is_exact is False


def test_modelopts_layers_have_the_formats_that_it_lists() -> None:
    """A layer that is not listed stays as it was: in FP8 where that was quantized further."""
    layers = {
        f"model.layers.{number}.mlp": {"quant_algo": "NVFP4"} for number in range(2)
    }
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    contents = contents_of(quantized(quant_method="modelopt", **mixed))
    assert contents.precision == "nvfp4"
    assert contents.formats["nvfp4"] == FEED_FORWARD / (contents.parameters or 0)
    over_fp8 = contents_of(
        quantized(quant_method="fp8", weight_block_size=[128, 128], **mixed)
    )
    assert over_fp8.precision == "fp8-block+nvfp4"
    assert over_fp8.formats["fp8-block"] == ATTENTION / (over_fp8.parameters or 0)


def test_a_low_format_is_named_however_small_its_share() -> None:
    """Who allows FP8 only is not served with it; a small share of a higher format is not worth naming."""
    by_projection = [
        group(FP8, FP8, "float-quantized", "re:.*(mlp|self_attn.(q|v|o)).*"),
        group(NVFP4, NVFP4, "nvfp4-pack-quantized", "re:.*layers.0.self_attn.k_proj"),
    ]
    wide = {"vocab_size": 10_000_000}
    assert contents_of({**grouped(*by_projection), **wide}).precision == "nvfp4"
    assert contents_of(grouped(*by_projection)).precision == "fp8+nvfp4"


def test_a_size_that_is_not_known_leaves_the_formats() -> None:
    config = compressed("float", 8, "float-quantized")
    contents = contents_of(config)
    assert dict(contents.formats) == {"fp8": 1.0}
    assert contents.parameters is None
    assert contents.weight_bytes is None
    assert contents_of({}).formats == {}


@pytest.mark.parametrize(
    ("patterns", "name", "is_named"),
    [
        (["lm_head"], "lm_head", True),
        (["model.layers.0.mlp"], "model.language_model.layers.0.mlp.up_proj", True),
        (["model.layers.1.mlp"], "model.layers.10.mlp.up_proj", False),
        (["model.layers.*.self_attn"], "model.layers.7.self_attn.q_proj", True),
        (["language_model.model.layers.0*"], "model.layers.0.mlp.gate_proj", True),
        (["*.attn.*"], "model.layers.0.self_attn.q_proj", True),
        (["mlp.gate"], "model.layers.0.mlp.gate", True),
        (["mlp.gate"], "model.layers.0.mlp.gate_proj", False),
        (["re:.*mlp.gate$"], "model.layers.0.mlp.gate", True),
        (["re:.*mlp.gate$"], "model.layers.0.mlp.gate_proj", False),
        (["re:model.language_model.*"], "model.layers.0.mlp.up_proj", True),
        (["re:("], "model.layers.0.mlp.up_proj", False),
        (["layers.0.ffn.experts"], "model.layers.0.mlp.experts.0.up_proj", True),
        (["layers.0.block_sparse_moe.experts.5.w1"], "model.layers.0.mlp.experts.0.gate_proj", True),
        ([], "lm_head", False),
    ],
)  # fmt: skip
def test_modules_are_named_in_many_ways(
    patterns: list[str], name: str, *, is_named: bool
) -> None:
    assert NamePatterns(patterns).matches(name) is is_named


Tensors = dict[str, tuple[str, list[int]]]


def write_weights(path: Path, tensors: Tensors) -> None:
    """Write a safetensors file of zeros."""
    sizes = {"BF16": 2, "F32": 4, "I32": 4, "F8_E4M3": 1, "U8": 1, "I8": 1}
    header = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin = end
        end += math.prod(shape) * sizes[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


UP = "model.layers.0.mlp.up_proj"
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("config", "tensors", "precision", "parameters"),
    [
        (MODEL, {f"{UP}.weight": ("BF16", [128, 64])}, "bf16", 128 * 64),
        (
            grouped(group(NVFP4, None, "nvfp4-pack-quantized")),
            {f"{UP}.weight_packed": ("U8", [128, 32]), f"{UP}.weight_scale": ("F8_E4M3", [128, 4])},
            "nvfp4-w4a16", 128 * 64,
        ),
        (
            quantized(quant_method="modelopt", quant_algo="NVFP4"),
            {f"{UP}.weight": ("U8", [128, 32]), f"{UP}.weight_scale": ("F8_E4M3", [128, 4])},
            "nvfp4", 128 * 64,
        ),
        (
            quantized(quant_method="mxfp4"),
            {f"{EXPERTS}_blocks": ("U8", [4, 128, 2, 16]), f"{EXPERTS}_scales": ("U8", [4, 128, 2])},
            "mxfp4", 4 * 128 * 2 * 32,
        ),
        (
            quantized(quant_method="awq", bits=4),
            {f"{UP}.qweight": ("I32", [64, 16]), f"{UP}.qzeros": ("I32", [1, 16]), f"{UP}.scales": ("F16", [1, 128])},
            "awq-int4", 64 * 128,
        ),
        (
            quantized(quant_method="gptq", bits=8),
            {f"{UP}.qweight": ("I32", [16, 128]), f"{UP}.g_idx": ("I32", [64])},
            "gptq-int8", 64 * 128,
        ),
        (
            quantized(quant_method="fp8", weight_block_size=[128, 128]),
            {f"{UP}.weight": ("F8_E4M3", [128, 64]), f"{UP}.weight_scale_inv": ("F32", [1, 1])},
            "fp8-block", 128 * 64,
        ),
        (
            grouped(group(INT8, INT8, "int-quantized")),
            {f"{UP}.weight": ("I8", [128, 64]), f"{UP}.weight_scale": ("BF16", [128, 1])},
            "int8-w8a8", 128 * 64,
        ),
        (
            quantized(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4"),
            {f"{UP}.weight": ("U8", [4096, 1]), f"{UP}.weight.absmax": ("U8", [128]), f"{UP}.weight.quant_map": ("F32", [16])},
            "nf4", 128 * 64,
        ),
    ],
)  # fmt: skip
def test_weights_that_are_there_are_counted(
    tmp_path: Path,
    config: dict[str, Any],
    tensors: Tensors,
    precision: str,
    parameters: int,
) -> None:
    """Scales and zero points are no parameters."""
    folder = model_folder(tmp_path, config)
    embedding: Tensors = {"model.embed_tokens.weight": ("BF16", [100, 64])}
    sizes = {"F16": "BF16"}
    written = {
        name: (sizes.get(dtype, dtype), shape)
        for name, (dtype, shape) in tensors.items()
    }
    write_weights(folder / "model.safetensors", {**embedding, **written})
    contents = read_contents(folder)
    assert contents.is_exact is True
    assert contents.parameters == parameters + 6400
    assert contents.precision == checkpoint_precision(folder) == precision


def test_weights_say_more_than_the_configuration(tmp_path: Path) -> None:
    """A layer that the configuration calls quantized may have been left as it was."""
    folder = model_folder(tmp_path, quantized(quant_method="fp8"))
    write_weights(
        folder / "model.safetensors",
        {
            "model.layers.0.mlp.up_proj.weight": ("F8_E4M3", [128, 64]),
            "model.layers.1.mlp.up_proj.weight": ("BF16", [128, 64]),
        },
    )
    assert read_contents(folder).formats == {"bf16": 0.5, "fp8": 0.5}


NOT_PACKED = b'{"blob": {"dtype": "U8", "shape": [8]}}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 4) + b"[[[[",
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", len(NOT_PACKED)) + NOT_PACKED,
    ],
)
def test_files_that_are_no_weights_are_not_counted(
    tmp_path: Path, content: bytes
) -> None:
    folder = model_folder(tmp_path, compressed("int", 4), AWQ_RECIPE)
    (folder / "model.safetensors").write_bytes(content)
    contents = read_contents(folder)
    assert contents.is_exact is False
    assert contents.precision == "awq-int4"


def test_weights_are_counted_only_if_all_are_there(tmp_path: Path) -> None:
    """While a checkpoint is downloaded, what is there tells too little."""
    folder = model_folder(tmp_path, MODEL)
    names = {"a.weight": "one.safetensors", "b.weight": "two.safetensors"}
    index = json.dumps({"weight_map": names})
    (folder / "model.safetensors.index.json").write_text(index)
    write_weights(folder / "one.safetensors", {"a.weight": ("BF16", [8])})
    assert read_contents(folder).is_exact is False
    write_weights(folder / "two.safetensors", {"b.weight": ("BF16", [8])})
    assert read_contents(folder).is_exact is True
    assert read_contents(folder).parameters == 16


@pytest.mark.parametrize(
    ("args", "precision"),
    [
        ((), "fp8+kv-fp8"),
        (("--kv-cache-dtype", "auto"), "fp8+kv-fp8"),
        (("--kv-cache-dtype=bfloat16",), "fp8"),
        (("--kv-cache-dtype", "fp8_e5m2"), "fp8+kv-fp8_e5m2"),
    ],
)
def test_the_engines_argument_replaces_the_kv_cache_that_a_checkpoint_demands(
    tmp_path: Path, args: tuple[str, ...], precision: str
) -> None:
    config = quantized(quant_method="modelopt", quant_algo="FP8", kv_cache_scheme=FP8)
    assert checkpoint_precision(model_folder(tmp_path, config), args) == precision
