"""Which kernel computes a tier on which processor: the engine plugin's choice, and what is said beforehand."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest

from router.cli.logs import ENGINE
from tiers.kernels import (
    InstructionSet,
    Kernel,
    added_bytes,
    choose_kernel,
    describe_kernel,
    instruction_set,
)
from tiers.plan import cpu_flags

PLUGIN = (
    Path(__file__).resolve().parents[3] / "tiers/engine_plugin/qarr_vllm_kernels.py"
)
AVX2, AVX512, AMX = InstructionSet
# Processors as Linux tells their flags, shortened.
ZEN_3 = "fpu sse4_2 fma avx avx2 bmi2 vaes"
SKYLAKE = f"{ZEN_3} avx512f avx512dq avx512cd avx512bw avx512vl"
ZEN_4 = f"{SKYLAKE} avx512_bf16 avx512_vnni"
SAPPHIRE_RAPIDS = f"{ZEN_4} amx_bf16 avx512_fp16 amx_tile amx_int8"
KNIGHTS_LANDING = f"{ZEN_3} avx512f avx512cd avx512er avx512pf"
PROCESSORS = {
    ZEN_3: AVX2, KNIGHTS_LANDING: AVX2, SKYLAKE: AVX512, ZEN_4: AVX512, SAPPHIRE_RAPIDS: AMX, "fpu sse4_2 avx": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    """Return the plugin as the engine loads it; outside of its functions it needs neither torch nor vLLM."""
    spec = importlib.util.spec_from_file_location("qarr_vllm_kernels_here", PLUGIN)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        # dataclasses look their module up
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("flags", "instructions"), PROCESSORS.items(), ids=range(len(PROCESSORS))
)
def test_linux_says_what_a_processor_has(
    flags: str, instructions: InstructionSet | None, tmp_path: Path
) -> None:
    """AVX-512 counts where all four parts are there that torch asks for; flags of virtual machines are others."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        f"processor\t: 0\nmodel name\t: A CPU\nflags\t\t: {flags}\nvmx flags\t: avx2 amx_tile\n"
    )
    assert instruction_set(cpu_flags(cpuinfo)) is instructions
    assert cpu_flags(tmp_path / "none") == set()


@pytest.mark.parametrize(
    ("instructions", "int4", "fp8", "bf16"),
    [
        (
            AVX2,
            "4 bits by QARR's kernel (vLLM has none for AVX2)",
            "FP8 by QARR's kernel",
            "BF16 by QARR's kernel, in float32 (oneDNN has none for AVX2)",
        ),
        (
            AVX512,
            "4 bits by QARR's kernel (no AMX)",
            "FP8 by QARR's kernel",
            "BF16 by vLLM's (oneDNN)",
        ),
        (
            AMX,
            "4 bits by vLLM's kernel (AMX)",
            "FP8 by QARR's kernel",
            "BF16 by vLLM's (oneDNN, small layers by AMX)",
        ),
    ],
)
def test_a_tiers_kernel_is_said_in_words(
    instructions: InstructionSet, int4: str, fp8: str, bf16: str
) -> None:
    for precision in ("awq-int4", "gptq-int4", "int4"):
        assert describe_kernel(precision, instructions) == int4
    assert describe_kernel("fp8", instructions) == fp8
    assert describe_kernel("bf16", instructions) == bf16
    assert describe_kernel("int8", instructions) == "vLLM chooses (format int8)"
    assert choose_kernel("fp8+int4", instructions) is Kernel.VLLM_OTHER


def test_what_a_kernel_holds_beside_a_checkpoints_weights() -> None:
    """QARR's hold quantized weights twice; vLLM's 4-bit kernel for AMX holds 6.5 bytes more a group, as its conversion does.

    The conversion of 960 x 576 weights in groups of 64 gave 311,040, 34,560 and 8,640 bytes for 276,480, 17,280 and 4,320.
    """
    assert added_bytes(Kernel.QARR_INT4, 276_480, 64, instructions=AVX512) == 276_480
    assert added_bytes(Kernel.QARR_FP8, 552_960, 64, instructions=AVX512) == 552_960
    assert added_bytes(Kernel.QARR_FP8, 552_960, 64, instructions=AVX2) == 3 * 552_960
    converted = 311_040 + 34_560 + 8_640
    packed = 276_480 + 17_280 + 4_320
    assert (
        added_bytes(Kernel.VLLM_INT4, 276_480, 64, instructions=AMX)
        == converted - packed
    )


NO_AMX = {
    "has_amx": False,
    "has_amx_fp8": False,
    "has_vllm_int4": True,
    "has_onednn_bf16": True,
}
AVX2_BUILD = {**NO_AMX, "has_vllm_int4": False, "has_onednn_bf16": False}
WITH_AMX = {**NO_AMX, "has_amx": True}
WITH_AMX_FP8 = {**WITH_AMX, "has_amx_fp8": True}
FP8_REPLACED = {"ChannelWiseTorchFP8ScaledMMLinearKernel"}
BOTH_REPLACED = FP8_REPLACED | {"CPUWNA16LinearKernel"}


@pytest.mark.parametrize(
    ("machine", "replaced", "explanation"),
    [
        (NO_AMX, BOTH_REPLACED, "4-bit layers by QARR's kernel (this CPU has no AMX)"),
        (
            AVX2_BUILD,
            BOTH_REPLACED,
            "4-bit layers by QARR's kernel (this build of vLLM has none)",
        ),
        (WITH_AMX, FP8_REPLACED, "4-bit layers by vLLM's kernel (this CPU has AMX)"),
        (
            {**AVX2_BUILD, "has_amx": True},
            BOTH_REPLACED,
            "4-bit layers by QARR's kernel (this build of vLLM has none)",
        ),
        (
            WITH_AMX_FP8,
            FP8_REPLACED,
            "by vLLM's kernel (this CPU has AMX for FP8), or QARR's",
        ),
    ],
)
def test_the_plugin_takes_what_vllm_computes_slowly_or_not_at_all(
    plugin: ModuleType, machine: dict[str, bool], replaced: set[str], explanation: str
) -> None:
    """FP8 by channel always; 4 bits unless vLLM's kernel has AMX, and then that must not be disabled."""
    choice = plugin.choose_kernels(**machine)
    assert choice.replaced == replaced
    assert choice.takes_int4 is (replaced == BOTH_REPLACED)
    assert choice.takes_bf16 is not machine["has_onednn_bf16"]
    assert explanation in choice.explanation


@pytest.mark.parametrize("instructions", InstructionSet)
def test_what_is_said_beforehand_is_what_the_plugin_chooses(
    plugin: ModuleType, instructions: InstructionSet
) -> None:
    choice = plugin.choose_kernels(
        has_amx=instructions is AMX,
        has_amx_fp8=False,
        has_vllm_int4=instructions is not AVX2,
        has_onednn_bf16=instructions is not AVX2,
    )
    assert choice.takes_int4 is choose_kernel("awq-int4", instructions).is_of_qarr
    assert choose_kernel("fp8", instructions).is_of_qarr
    assert choice.takes_bf16 is choose_kernel("bf16", instructions).is_of_qarr


def test_kernels_that_are_disabled_already_stay_so(
    plugin: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "VLLM_DISABLED_KERNELS", "MarlinLinearKernel,CPUWNA16LinearKernel"
    )
    plugin.disable_kernels({"CPUWNA16LinearKernel", "Another"})
    plugin.disable_kernels({"Another"})
    assert (
        plugin.os.environ["VLLM_DISABLED_KERNELS"]
        == "Another,CPUWNA16LinearKernel,MarlinLinearKernel"
    )


def test_the_choice_stands_in_the_engines_log(
    plugin: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By vLLM's logger, or where that is not set up yet, as a line that ``qarr logs`` reads like vLLM's own."""
    logger = logging.getLogger("a logger of the test")
    logger.propagate = False
    monkeypatch.setattr(plugin, "log", logger)
    plugin.write_to_engine_log("early")
    line = capsys.readouterr().err.strip()
    assert (match := ENGINE.fullmatch(line)) is not None
    assert match["level"] == "INFO"
    assert match["text"] == "[qarr_vllm_kernels] early"
    logger.addHandler(handler := logging.StreamHandler())
    logger.setLevel(logging.INFO)
    plugin.write_to_engine_log("late")
    logger.removeHandler(handler)
    assert capsys.readouterr().err == "late\n"
