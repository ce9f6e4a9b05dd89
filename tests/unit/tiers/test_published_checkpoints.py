"""What published checkpoints are, by their small files as they are published: format, rank, filter, loss, memory, plan.

The files of ``tests/data/checkpoints_published`` say where they are from, and which of them are rebuilt from what is told
of a checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from classifier import PromptClass
from classifier.kinds import Complexity
from router.cli.main import make_app
from router.policy.published import published_loss
from tests.imports import ROOT
from tiers.checkpoints.contents import CheckpointContents, contents_of
from tiers.checkpoints.precision import checkpoint_precision
from tiers.formats import quantizations_of, rank_bits
from tiers.sizing.architecture import architecture, kv_bytes_per_token
from tiers.sizing.find_config import find_config

FOLDER = ROOT / "tests" / "data" / "checkpoints_published"
MATH = (PromptClass.MATH, Complexity.COMPLEX)
GIGABYTE = 1e9


@dataclass(frozen=True)
class Published:
    """What is expected of a checkpoint.

    Attributes:
        precision: As it is shown.
        quantization: OpenRouter's name, which filters go by.
        bits: By which tiers are ordered.
        billions: Of parameters.
        gigabytes: Of weights.
        kv_bytes: Of a token's KV cache in BF16, in all layers.
    """

    precision: str
    quantization: str
    bits: int
    billions: float
    gigabytes: float
    kv_bytes: int


# The KV cache of a token is layers x 2 x KV heads x head dimension x 2 bytes, or with MLA layers x (latent + rotated) x 2.
# Sizes that are published: gpt-oss 12.8 GiB and 60.8 GiB, 20.9 and 116.8 billion parameters (arXiv 2508.10925, table 1).
CHECKPOINTS = {
    "gpt-oss-20b": Published("mxfp4", "fp4", 4, 20.9, 12.8 * 1.0737, 24 * 2 * 8 * 64 * 2),
    "gpt-oss-120b": Published("mxfp4", "fp4", 4, 116.8, 60.8 * 1.0737, 36 * 2 * 8 * 64 * 2),
    "deepseek-v3.2": Published("fp8-block", "fp8", 8, 671, 673, 61 * (512 + 64) * 2),
    "deepseek-v3.1-nvfp4": Published("nvfp4+kv-fp8", "fp4", 4, 671, 386, 61 * (512 + 64) * 2),
    "kimi-k2-thinking": Published("int4", "int4", 4, 1026, 594, 61 * (512 + 64) * 2),
    "kimi-k2.5": Published("int4", "int4", 4, 1026, 594, 61 * (512 + 64) * 2),
    "qwen3-8b": Published("bf16", "bf16", 16, 8.19, 16.4, 36 * 2 * 8 * 128 * 2),
    "qwen3-30b-a3b": Published("bf16", "bf16", 16, 30.5, 61.1, 48 * 2 * 4 * 128 * 2),
    "qwen3-30b-a3b-fp8": Published("fp8-block", "fp8", 8, 30.5, 31.2, 48 * 2 * 4 * 128 * 2),
    "qwen3-32b-fp8-static-pertensor": Published("fp8+kv-fp8", "fp8", 8, 32.8, 34.3, 64 * 2 * 8 * 128 * 2),
    "qwen3-235b-a22b-nvfp4": Published("nvfp4+kv-fp8", "fp4", 4, 235, 134, 94 * 2 * 4 * 128 * 2),
    # Attention only in every fourth layer; the others are recurrent.
    "qwen3.6-35b-a3b-nvfp4": Published("fp8+nvfp4-w4a16", "fp4", 4, 35.1, 21.7, 10 * 2 * 2 * 256 * 2),
    "kat-dev-gptq-int8": Published("gptq-int8", "int8", 8, 32.8, 34.8, 64 * 2 * 8 * 128 * 2),
    "qwq-32b-preview-awq": Published("awq-int4", "int4", 4, 32.8, 19.3, 64 * 2 * 8 * 128 * 2),
    "llama-3.1-70b-instruct-fp8": Published("fp8+kv-fp8", "fp8", 8, 70.6, 72.7, 80 * 2 * 8 * 128 * 2),
    "llama-3.3-70b-instruct-fp4": Published("nvfp4", "fp4", 4, 70.6, 42.7, 80 * 2 * 8 * 128 * 2),
    "meta-llama-3-8b-instruct-nvfp4-fp8-dynamic": Published("fp8+nvfp4", "fp4", 4, 8.03, 6.8, 32 * 2 * 8 * 128 * 2),
    "glm-5.2-nvfp4-fp8": Published("fp8-block+nvfp4", "fp4", 4, 743, 427, 78 * (512 + 64) * 2),
    "gemma-3-12b-it-text-only": Published("bf16", "bf16", 16, 11.8, 23.5, 48 * 2 * 8 * 256 * 2),
    # Every sixth layer attends to all tokens, with two heads of 512; the others to a window, with eight of 256.
    "gemma-4-26b-a4b": Published("bf16", "bf16", 16, 25.7, 51.3, (25 * 8 * 256 + 5 * 2 * 512) * 2 * 2),
    "gemma-4-26b-a4b-nvfp4": Published("nvfp4+kv-fp8", "fp4", 4, 25.7, 18.5, (25 * 8 * 256 + 5 * 2 * 512) * 2 * 2),
}  # fmt: skip


def published_files(name: str) -> dict[str, Any]:
    files: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_bytes())
    return files


def contents(name: str) -> CheckpointContents:
    files = published_files(name)
    return contents_of(files["config"], files.get("hf_quant"))


def checkpoint(folder: Path, name: str) -> Path:
    """Write the small files of a checkpoint; return its folder."""
    files = published_files(name)
    (folder / "config.json").write_text(json.dumps(files["config"]))
    if "hf_quant" in files:
        (folder / "hf_quant_config.json").write_text(json.dumps(files["hf_quant"]))
    return folder


def test_every_file_is_in_the_table_and_has_a_source() -> None:
    assert sorted(file.stem for file in FOLDER.glob("*.json")) == sorted(CHECKPOINTS)
    for name in CHECKPOINTS:
        assert published_files(name)["source"].startswith(
            ("config.json of ", "https://", "Rebuilt, ", "quantization: https://")
        )


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_format_filter_and_rank(tmp_path: Path, name: str) -> None:
    """The lowest format decides who is served and where a tier stands, however few of the parameters the others leave it."""
    expected = CHECKPOINTS[name]
    precision = checkpoint_precision(checkpoint(tmp_path, name))
    assert precision == expected.precision
    assert quantizations_of(precision) == {expected.quantization}
    assert rank_bits(precision) == expected.bits


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_shares_add_up_to_the_whole_and_weights_have_their_size(name: str) -> None:
    expected = CHECKPOINTS[name]
    found = contents(name)
    assert sum(found.formats.values()) == pytest.approx(1)
    assert found.is_exact is False
    assert found.parameters is not None
    assert found.weight_bytes is not None
    assert found.parameters == architecture(published_files(name)["config"]).parameters
    assert found.parameters / 1e9 == pytest.approx(expected.billions, rel=0.01)
    assert found.weight_bytes / GIGABYTE == pytest.approx(expected.gigabytes, rel=0.01)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_kv_cache_of_a_token(name: str) -> None:
    """Eight GPUs share the heads; a latent vector is on all of them."""
    config = published_files(name)["config"]
    assert kv_bytes_per_token(config) == CHECKPOINTS[name].kv_bytes
    assert architecture(config).kv_bytes_per_token() == CHECKPOINTS[name].kv_bytes
    of_eight = architecture(config).kv_bytes_per_token(gpus=8)
    if "kv_lora_rank" in config.get("text_config", config):
        assert of_eight == CHECKPOINTS[name].kv_bytes
    else:
        assert CHECKPOINTS[name].kv_bytes / 8 <= of_eight
        assert of_eight < CHECKPOINTS[name].kv_bytes


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_what_is_published_prices_them_by_their_lowest_format(name: str) -> None:
    expected = CHECKPOINTS[name]
    loss = published_loss(expected.precision, MATH, 70e9)
    if expected.bits == 16:
        assert loss == 0
    else:
        assert 0 < loss < 0.5
    if expected.bits == 4:
        assert loss > published_loss("fp8", MATH, 70e9)


@pytest.mark.parametrize(
    ("name", "quantized_by", "kept"),
    [
        ("gpt-oss-20b", None, "model.layers.*.self_attn"),
        ("kimi-k2-thinking", None, "re:.*shared_experts.*"),
        ("qwen3-30b-a3b-fp8", None, "model.layers.*.mlp.gate"),
        ("qwen3-235b-a22b-nvfp4", "modelopt 0.33.0", "lm_head"),
        ("kat-dev-gptq-int8", "gptqmodel 4.2.5", None),
        ("gemma-4-26b-a4b-nvfp4", "modelopt 0.43.0rc2.dev91+gc79ebc014", "model.language_model.layers.*.self_attn*"),
        ("qwen3-8b", None, None),
    ],
)  # fmt: skip
def test_who_quantized_it_and_what_stayed(
    name: str, quantized_by: str | None, kept: str | None
) -> None:
    """Of patterns for each layer, one is told."""
    found = contents(name)
    assert found.quantized_by == quantized_by
    assert (kept in found.kept_in_16_bits) == (kept is not None)
    assert len(found.kept_in_16_bits) < 10


def test_formats_by_their_share() -> None:
    """Experts are most of a model, so attention in FP8 is a small share beside them."""
    shares = contents("qwen3.6-35b-a3b-nvfp4").formats
    assert shares["nvfp4-w4a16"] > 0.9
    assert 0.03 < shares["fp8"] < 0.05
    assert contents("glm-5.2-nvfp4-fp8").formats["fp8-block"] < 0.02
    # 19.1 of 20.9 billion parameters are of experts (arXiv 2508.10925, table 1).
    assert contents("gpt-oss-20b").formats["mxfp4"] == pytest.approx(
        19.1 / 20.9, abs=0.002
    )


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_plan_reads_them(tmp_path: Path, name: str) -> None:
    config = find_config(str(checkpoint(tmp_path, name) / "config.json"))
    model = architecture(config)
    assert model.active_parameters <= model.quantizable_parameters
    assert model.context >= 8192


@pytest.mark.parametrize("name", ["gpt-oss-20b", "glm-5.2-nvfp4-fp8"])
def test_a_plan_is_made_of_them(tmp_path: Path, name: str) -> None:
    path = checkpoint(tmp_path, name) / "config.json"
    options = ["plan", "--model", str(path), "--gpus", "16xH200", "--load", "1/s"]
    result = CliRunner().invoke(make_app(["plan"]), options)
    assert result.exit_code == 0, result.output
    assert "H200" in result.output
