"""What stands behind ``fast`` and ``balanced`` here: chosen by this machine's hardware, or named by the settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from router.cli.serve import _say_schemes
from router.deployment.layout import (
    engine_args,
    make_deployment,
    prepare_options,
    scheme_choices,
    tier_spec,
)
from router.section import SettingsError
from tests.unit.deployment.made_fleet import made, settings
from tests.unit.made_configs import model_folder
from tiers.checkpoints.precision import checkpoint_precision
from tiers.plan import model_config
from tiers.spec import STANDARD_TIERS

FAST, BALANCED, PRECISE = STANDARD_TIERS
ONLINE = {"balanced": {"scheme": "online-fp8"}}


def answers_with(capability: str) -> str:
    """Return a script in the place of ``nvidia-smi``: a machine with one large GPU."""
    return (
        f"#!/bin/sh\ncase \"$1\" in *compute_cap*) echo '0, {capability}';; "
        "*) echo '0, a GPU, 183000, 182000';; esac\n"
    )


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the script that stands for ``nvidia-smi`` on this machine."""
    script = tmp_path / "nvidia-smi"
    script.write_text(answers_with("10.0"))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return script


def test_schemes_follow_the_gpu(gpu: Path) -> None:
    """Only what is not the usual one is asked of the maker, and only for tiers that start from made checkpoints."""
    assert prepare_options(settings()).schemes == {FAST: "nvfp4"}
    gpu.write_text(answers_with("8.0"))
    assert prepare_options(settings()).schemes == {BALANCED: "int8-w8a8"}
    elsewhere = {"urls": ("http://10.0.0.5:8000",)}
    assert prepare_options(settings(tiers={"balanced": elsewhere})).schemes == {}
    named = {"fast": {"scheme": "int4"}, "balanced": {"scheme": "fp8"}}
    assert prepare_options(settings(tiers=named)).schemes == {FAST: "int4"}


def test_without_a_gpu_they_are_the_usual_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert prepare_options(settings()).schemes == {}


def test_the_choice_is_said_in_one_line(
    gpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _say_schemes(settings(tiers=ONLINE))
    said = " ".join(capsys.readouterr().err.split())
    assert said == (
        "fast: nvfp4, because this GPU (compute capability 10.0) computes it natively; balanced: fp8, quantized while it "
        "loads, as tiers.balanced.scheme says"
    )
    none_here = {"fast": {"replicas": 0}, "balanced": {"replicas": 0}}
    _say_schemes(settings(tiers=none_here))
    assert capsys.readouterr().err == ""
    assert scheme_choices(settings(tiers=none_here)) == {}


def test_an_unmade_checkpoint_is_expected_in_its_format(
    gpu: Path, tmp_path: Path
) -> None:
    """So that the machine is shared by its size, before it is made."""
    prepared = made(tmp_path)
    deployment = make_deployment(settings(), (prepared[PRECISE],))
    expected = {spec.name: spec.expected_precision for spec in deployment.specs}
    assert expected == {FAST: "nvfp4", BALANCED: "fp8", PRECISE: ""}
    assert set(deployment.missing) == {FAST, BALANCED}


def test_an_online_tier_starts_from_the_16_bit_folder(tmp_path: Path) -> None:
    """Its precision is what vLLM makes of it, and its weights are told from those of precise and of other schemes."""
    base = made(tmp_path)[PRECISE]
    model_folder(base.path, {**model_config(base.path), "dtype": "bfloat16"})
    for weights in base.path.glob("*.safetensors"):
        weights.unlink()  # They are no numbers of any format.
    given = settings(tiers=ONLINE)
    args = engine_args(given, BALANCED)
    assert args == ("--quantization", "fp8_per_channel")
    assert engine_args(given, FAST) == ()
    online = {BALANCED: replace(base, tier=BALANCED), PRECISE: base}
    spec = tier_spec(BALANCED, given.tiers.balanced, online, args=args, store=tmp_path)
    precise = tier_spec(PRECISE, given.tiers.precise, online, store=tmp_path)
    assert (spec.checkpoint, spec.precision) == (base.path, "fp8")
    assert checkpoint_precision(base.path) == "bf16"
    assert precise.digest == base.manifest.weights_digest
    by_block = tier_spec(
        BALANCED,
        given.tiers.balanced,
        online,
        store=tmp_path,
        args=("--quantization", "mxfp8"),
    )
    assert len({spec.digest, precise.digest, by_block.digest}) == 3


def test_a_persons_arguments_come_after_the_schemes() -> None:
    """The last one counts."""
    balanced = {"scheme": "online-fp8", "engine_args": ("--quantization", "mxfp8")}
    given = settings(tiers={"balanced": balanced})
    assert engine_args(given, BALANCED)[-2:] == ("--quantization", "mxfp8")


@pytest.mark.parametrize(
    ("tiers", "fault"),
    [
        ({"fast": {"scheme": "int3"}}, "tiers.fast.scheme is 'int3': auto, awq-int4"),
        ({"precise": {"scheme": "fp8"}}, "only fast and balanced have a scheme"),
        (
            {"int8": {"scheme": "int8-w8a8", "urls": ("http://10.0.0.5:8000",)}},
            "tiers.int8.scheme: only fast and balanced have a scheme",
        ),
        (
            {"fast": {"scheme": "int4", "checkpoint": "/models/x"}},
            "tiers.fast.scheme and tiers.fast.checkpoint both say what stands behind",
        ),
    ],
)
def test_a_wrong_scheme_is_refused(tiers: dict[str, object], fault: str) -> None:
    with pytest.raises(SettingsError, match=fault):
        settings(tiers=tiers)
