"""How checkpoints of each scheme are made: the table, which modules stay in 16 bits, and what was made before."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.made_checkpoints import model
from tiers.checkpoints.prepare import (
    CALIBRATION_SAMPLES,
    CALIBRATION_TOKENS,
    DEFAULT_CALIBRATION,
    DEFAULT_MODEL,
    GPU_CALIBRATION,
    GPU_CALIBRATION_SAMPLES,
    GPU_CALIBRATION_TOKENS,
    PrepareOptions,
    _jobs,
    _known_base,
    check_calibration,
    check_schemes,
    usual_calibration,
)
from tiers.checkpoints.recipes import (
    Algorithm,
    check_is_served,
    known_architectures,
    made_scheme,
    read_table,
    recipe_for,
    scheme_names,
)
from tiers.errors import CheckpointError
from tiers.formats import FORMATS
from tiers.spec import TierName

MIXTURE = {"architectures": ["Qwen3MoeForCausalLM"]}
DENSE = {"architectures": ["LlamaForCausalLM"]}
# Folders of the default model's checkpoints as releases before schemes made them.
FOLDERS_MADE_BEFORE = {"bf16-538cd899", "fp8-ab8fdbdd", "awq-b996b204"}


def folders_of(options: PrepareOptions) -> set[str]:
    """Return the names of the folders that a model's checkpoints are made in."""
    base = _known_base(options)
    assert base is not None
    jobs = _jobs(options, base, check_calibration(options.calibration))
    return {job.target.name for job in jobs}


def test_each_scheme_is_a_number_format() -> None:
    """Its name is one of those that precisions are made of; what has few bits and no prompts says so."""
    assert set(scheme_names()) <= set(FORMATS)
    assert made_scheme("nvfp4").needs_calibration
    assert not made_scheme("nvfp4-w4a16").needs_calibration
    with pytest.raises(CheckpointError, match=r"'fp9' can be made: awq-int4, .*nvfp4"):
        made_scheme("fp9")


@pytest.mark.parametrize("architecture", known_architectures())
@pytest.mark.parametrize("scheme", scheme_names())
def test_the_output_head_stays(architecture: str, scheme: str) -> None:
    """In each model, and each pattern that is a regular expression is one."""
    recipe = recipe_for(scheme, {"architectures": [architecture]})
    assert {"lm_head", "re:.*lm_head"} & set(recipe.keep)
    for pattern in recipe.keep:
        re.compile(pattern.removeprefix("re:"))


@pytest.mark.parametrize(
    ("architecture", "module"),
    [
        ("Qwen3MoeForCausalLM", "model.layers.3.mlp.gate"),
        ("DeepseekV3ForCausalLM", "model.layers.3.mlp.gate"),
        ("Qwen3VLForConditionalGeneration", "model.visual.blocks.0.attn.qkv"),
        ("Gemma3ForConditionalGeneration", "model.multi_modal_projector.mm"),
        ("Qwen3NextForCausalLM", "model.layers.0.linear_attn.in_proj_ba"),
        ("SomethingNewForCausalLM", "model.layers.0.mlp.router"),
        ("SomethingNewForCausalLM", "model.visual.blocks.0.attn.qkv"),
    ],
)
def test_what_chooses_and_what_sees_stays(architecture: str, module: str) -> None:
    """Routers, vision towers and linear attention: of models that the table does not know as well."""
    keep = recipe_for("fp8", {"architectures": [architecture]}).keep
    patterns = [name.removeprefix("re:") for name in keep if name.startswith("re:")]
    assert any(re.match(pattern, module) for pattern in patterns)
    for quantized in ("self_attn.q_proj", "mlp.experts.3.gate_proj", "mlp.gate_proj"):
        name = f"model.layers.3.{quantized}"
        assert not any(re.match(pattern, name) for pattern in patterns)


def test_activations_are_smoothed_where_they_are_rounded() -> None:
    """Only before INT8 W8A8, and only in models that llm-compressor's example is for."""
    assert recipe_for("int8-w8a8", DENSE).smooths
    assert not recipe_for("gptq-int4", DENSE).smooths
    assert not recipe_for("int8-w8a8", MIXTURE).smooths
    assert recipe_for("int8-w8a8", MIXTURE).algorithm is Algorithm.GPTQ


def test_a_model_whose_quantized_form_cannot_be_served_is_refused() -> None:
    """With the words that say what to take instead."""
    gpt_oss = recipe_for("fp8", {"architectures": ["GptOssForCausalLM"]})
    with pytest.raises(
        CheckpointError,
        match=r"no fp8 checkpoint of a GptOssForCausalLM is made: .*published .*tiers\.NAME\.checkpoint",
    ):
        check_is_served(gpt_oss)
    check_is_served(recipe_for("fp8", MIXTURE))


def test_a_table_with_a_scheme_that_does_not_exist_is_refused() -> None:
    text = 'architectures = []\nunknown = {{ keep = [], source = "s" }}\n[schemes.{}]\npreset = "A"\nalgorithm = "rtn"\nfolder = "f"\n'
    text += 'method = "m"\ndivisor = 1\nsource = "s"\n'
    assert read_table(text.format("fp8")).schemes["fp8"].folder == "f"
    with pytest.raises(ValueError, match=r"schemes\.fp9: no number format"):
        read_table(text.format("fp9"))


def test_what_was_made_before_stays(tmp_path: Path) -> None:
    """The default model's folders, and those of any dense model, have the names that earlier releases gave them."""
    options = PrepareOptions(
        str(model(tmp_path / "base")), tmp_path / "store", tmp_path / "python"
    )
    assert folders_of(options) == FOLDERS_MADE_BEFORE
    config = tmp_path / "base/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **DENSE}))
    assert folders_of(options) == FOLDERS_MADE_BEFORE
    config.write_text(json.dumps({**json.loads(config.read_text()), **MIXTURE}))
    assert folders_of(options) & FOLDERS_MADE_BEFORE == {"bf16-538cd899"}


def test_another_scheme_is_another_folder(tmp_path: Path) -> None:
    options = PrepareOptions(
        str(model(tmp_path / "base")),
        tmp_path / "store",
        tmp_path / "python",
        schemes={TierName.FAST: "nvfp4", TierName.BALANCED: "int8-w8a8"},
    )
    names = {name.rpartition("-")[0] for name in folders_of(options)}
    assert names == {"bf16", "nvfp4", "int8-w8a8"}
    fewer = replace(options, calibration_samples=8)
    assert len(folders_of(options) & folders_of(fewer)) == 1, "the base only"


def test_schemes_are_checked_by_tier() -> None:
    check_schemes({TierName.FAST: "mxfp4"})
    with pytest.raises(
        CheckpointError, match="precise has no scheme: balanced and fast"
    ):
        check_schemes({TierName.PRECISE: "fp8"})
    with pytest.raises(
        CheckpointError, match=r"tier fast: .*'fp5' can be made: awq.*, online-fp8"
    ):
        check_schemes({TierName.FAST: "fp5"})


def test_more_is_calibrated_on_a_gpu() -> None:
    """Of all models but the small default one, whose checkpoints are the same everywhere."""
    few = (DEFAULT_CALIBRATION, CALIBRATION_SAMPLES, CALIBRATION_TOKENS)
    many = (GPU_CALIBRATION, GPU_CALIBRATION_SAMPLES, GPU_CALIBRATION_TOKENS)
    assert usual_calibration(DEFAULT_MODEL, has_gpu=True) == few
    assert usual_calibration("owner/model", has_gpu=False) == few
    assert usual_calibration("owner/model", has_gpu=True) == many
    calibration = check_calibration(GPU_CALIBRATION)
    assert calibration.prompts >= GPU_CALIBRATION_SAMPLES >= 256
    assert 0.1 < calibration.code_share < 0.5


def test_a_checkpoint_that_was_calibrated_less_is_kept(tmp_path: Path) -> None:
    """Where an earlier release would have made it is looked at too, unless the prompts are a person's own."""
    source = model(tmp_path / "base")
    options = PrepareOptions(str(source), tmp_path / "store", tmp_path / "python")
    on_gpu = replace(
        options,
        calibration=GPU_CALIBRATION,
        calibration_samples=GPU_CALIBRATION_SAMPLES,
        calibration_tokens=GPU_CALIBRATION_TOKENS,
    )
    base = _known_base(options)
    assert base is not None
    fast = _jobs(on_gpu, base, check_calibration(GPU_CALIBRATION))[-1]
    assert fast.target.name not in FOLDERS_MADE_BEFORE
    assert fast.earlier is not None
    assert fast.earlier.name in FOLDERS_MADE_BEFORE
    own = replace(on_gpu, calibration=DEFAULT_CALIBRATION)
    assert _jobs(own, base, check_calibration(DEFAULT_CALIBRATION))[-1].earlier is None
