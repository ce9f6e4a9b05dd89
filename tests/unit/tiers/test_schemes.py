"""The table of schemes: what it chooses on which hardware, and what is wrong with a broken one."""

from __future__ import annotations

import pytest

from tiers.checkpoints import recipes
from tiers.checkpoints.schemes import (
    CHOSEN_TIERS,
    TABLE,
    AmdHardware,
    CpuHardware,
    GpuHardware,
    Hardware,
    Method,
    choose_schemes,
    parse_capability,
    read_table,
    scheme_named,
    scheme_names,
    scheme_table,
    schemes_for,
    what_can_be_served,
)
from tiers.errors import SchemeError
from tiers.formats import FORMATS
from tiers.lifecycle.unserved_format import why_not_served
from tiers.spec import TierName

FAST, BALANCED, PRECISE = TierName.FAST, TierName.BALANCED, TierName.PRECISE
AVX2 = CpuHardware(frozenset({"sse4_2", "avx2"}))
AVX512 = CpuHardware(AVX2.flags | {"avx512f", "avx512bw", "avx512dq", "avx512vl"})
AMX = CpuHardware(AVX512.flags | {"amx_tile", "amx_int8", "amx_bf16"})
OLD_CPU = CpuHardware(frozenset({"sse4_2"}))
H100 = GpuHardware((9, 0))


@pytest.mark.parametrize(
    ("hardware", "fast", "balanced"),
    [
        (GpuHardware((12, 0)), "nvfp4", "fp8"),
        (GpuHardware((12, 1)), "nvfp4", "fp8"),
        (GpuHardware((10, 3)), "nvfp4", "fp8"),
        (GpuHardware((10, 0)), "nvfp4", "fp8"),
        (H100, "awq-int4", "fp8"),
        (GpuHardware((8, 9)), "awq-int4", "fp8"),
        (GpuHardware((8, 6)), "awq-int4", "int8-w8a8"),
        (GpuHardware((8, 0)), "awq-int4", "int8-w8a8"),
        (GpuHardware((7, 5)), "awq-int4", "int8-w8a8"),
        (AmdHardware("gfx942"), "awq-int4", "fp8"),
        (AmdHardware("gfx950"), "mxfp4-w4a4", "fp8"),
        (AMX, "awq-int4", "fp8"),
        (AVX512, "awq-int4", "fp8"),
        (AVX2, "awq-int4", "fp8"),
    ],
    ids=str,
)
def test_each_kind_of_hardware_has_its_schemes(
    hardware: Hardware, fast: str, balanced: str
) -> None:
    schemes = schemes_for(hardware)
    assert {tier: scheme.name for tier, scheme in schemes.items()} == {
        FAST: fast,
        BALANCED: balanced,
    }


@pytest.mark.parametrize(
    ("capability", "as_that_of"),
    [((11, 0), (10, 3)), ((12, 7), (12, 1)), ((14, 0), (12, 1)), ((8, 8), (8, 7))],
)
def test_a_gpu_that_no_row_names_counts_as_the_next_lower_one(
    capability: tuple[int, int], as_that_of: tuple[int, int]
) -> None:
    table = scheme_table()
    row = table.class_of(GpuHardware(capability))
    assert row is not None
    assert row is table.class_of(GpuHardware(as_that_of))


@pytest.mark.parametrize(
    "hardware",
    [GpuHardware((7, 0)), GpuHardware(None), AmdHardware("gfx90a"), OLD_CPU],
    ids=str,
)
def test_hardware_without_a_row_gets_what_was_usual(hardware: Hardware) -> None:
    """The words say so, and nothing is said of what it can compute."""
    choices = choose_schemes(hardware, {})
    assert [choice.scheme.name for choice in choices.values()] == ["awq-int4", "fp8"]
    assert str(choices[FAST]).endswith(
        f"because the table of schemes has no row for {hardware}"
    )
    assert what_can_be_served(hardware) == ""
    assert why_not_served(FAST, "nvfp4", hardware) is None


def test_a_choice_says_what_it_is_and_why() -> None:
    choices = choose_schemes(GpuHardware((10, 0)), {BALANCED: "online-fp8"})
    assert str(choices[FAST]) == (
        "fast: nvfp4, because this GPU (compute capability 10.0) computes it natively"
    )
    assert str(choices[BALANCED]) == (
        "balanced: fp8, quantized while it loads, as tiers.balanced.scheme says"
    )
    assert not choices[FAST].is_usual
    assert choices[BALANCED].scheme.engine_args == ("--quantization", "fp8_per_channel")
    assert choose_schemes(H100, {FAST: "auto"})[FAST].is_usual


def test_a_scheme_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(SchemeError, match=r"tiers.fast.scheme is 'int3': auto, awq-"):
        scheme_named("int3", FAST)
    with pytest.raises(SchemeError, match="online-fp8"):
        choose_schemes(H100, {FAST: "fp9"})
    with pytest.raises(SchemeError, match=r"tiers.fast.scheme is 'bf16'"):
        scheme_named("bf16", FAST)
    assert {"awq-int4", "fp8", "fp8-block", "int8-w8a8", "nvfp4"} <= set(scheme_names())


def test_every_row_can_serve_all_that_it_chooses_and_more() -> None:
    """Each format is named once a row; each row has its sources, and 16 bits for precise."""
    for row in scheme_table().hardware:
        assert set(row.schemes) == set(row.reasons) == set(CHOSEN_TIERS)
        everything = (*row.native, *row.served)
        assert len(everything) == len(set(everything)), row.name
        assert row.can_serve("bf16") or row.can_serve("fp16"), row.name
        assert row.sources, row.name
        for reason in row.reasons.values():
            assert "{hardware}" in reason, row.name
        for scheme in row.schemes.values():
            assert scheme.number_format in FORMATS
            assert scheme.method is Method.LLM_COMPRESSOR, row.name


def test_every_scheme_of_a_checkpoint_can_be_made() -> None:
    """The recipes know each scheme that is no online one, and no other."""
    made_names = {name for name in scheme_names() if not name.startswith("online-")}
    assert made_names == set(recipes.scheme_names())


def test_sources_are_explained_in_the_tables_head() -> None:
    head = TABLE.read_text("utf-8").partition("\n[[scheme]]")[0]
    for row in scheme_table().hardware:
        for source in row.sources:
            assert f"#   {source}:" in head, source


def test_what_hardware_cannot_compute_is_said_in_one_sentence() -> None:
    sentence = why_not_served(FAST, "fp8+nvfp4", GpuHardware((7, 5)))
    assert sentence is None
    sentence = why_not_served(FAST, "mxfp4+kv-fp8", GpuHardware((7, 5)))
    assert sentence == (
        "this GPU (compute capability 7.5) cannot compute mxfp4, the format of fast's checkpoint; vLLM serves there "
        "int8-w8a8, fp16 natively; awq-int4, gptq-int4, int4, nvfp4, nvfp4-w4a16, fp8, fp8-w8a16, int8 otherwise: name "
        "another scheme (tiers.fast.scheme), or give it another checkpoint (tiers.fast.checkpoint), or run the tier "
        "elsewhere"
    )
    of_precise = why_not_served(PRECISE, "bf16", GpuHardware((7, 5)))
    assert of_precise is not None
    assert "tiers.precise.scheme" not in of_precise
    assert "tiers.precise.checkpoint" in of_precise
    assert why_not_served(PRECISE, "unknown", H100) is None


def test_compute_capabilities_are_read_from_text() -> None:
    assert parse_capability(" 12.0 ") == (12, 0)
    assert parse_capability("9.0a") is None
    assert parse_capability("[N/A]") is None
    assert parse_capability("") is None


SCHEME = """
[[scheme]]
name = "fp8"
number_format = "fp8"
method = "llm-compressor"
"""
HARDWARE = """
[[hardware]]
name = "Hopper"
compute_capabilities = ["9.0"]
fast = "fp8"
fast_because = "{hardware} computes it"
balanced = "fp8"
balanced_because = "{hardware} computes it"
native = ["fp8"]
served = []
sources = ["vllm-fp8"]
"""


def test_a_small_table_is_read() -> None:
    table = read_table(SCHEME + HARDWARE, "t.toml")
    assert table.hardware[0].schemes[FAST] is table.schemes["fp8"]
    assert table.class_of(CpuHardware(frozenset({"avx2"}))) is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[[scheme", "t.toml is no TOML"),
        ("[schemes]", r"t.toml: schemes: only \[\[scheme\]\] and \[\[hardware\]\]"),
        (SCHEME * 2, r"scheme 2 \(fp8\): name: it is there already"),
        (
            SCHEME.replace('number_format = "fp8"', 'number_format = "fp9"'),
            r"scheme 1 \(fp8\): number_format: 'fp9' is no number format; fp32, bf16",
        ),
        (SCHEME.replace('"llm-compressor"', '"magic"'), "scheme 1: method: Input"),
        (
            SCHEME.replace('"llm-compressor"', '"online"'),
            r"scheme 1 \(fp8\): vllm_quantization: a scheme with method online",
        ),
        (
            SCHEME.replace('name = "fp8"', 'name = "eight"'),
            "name: that of a checkpoint",
        ),
        (SCHEME + "colour = 1", "scheme 1: colour: Extra inputs are not permitted"),
        (
            SCHEME + HARDWARE.replace('fast = "fp8"', 'fast = "int3"'),
            r"hardware 1 \(Hopper\): fast: there is no scheme 'int3'; fp8 are allowed",
        ),
        (
            SCHEME + HARDWARE.replace('fast = "fp8"\n', ""),
            "hardware 1: fast: Field required",
        ),
        (
            SCHEME + HARDWARE.replace('native = ["fp8"]', "native = []"),
            "fast: fp8 is neither in native nor in served",
        ),
        (
            SCHEME + HARDWARE.replace('["9.0"]', '["nine"]'),
            "compute_capabilities: 'nine': a text like 9.0 is allowed",
        ),
        (
            SCHEME + HARDWARE.replace('compute_capabilities = ["9.0"]', ""),
            "compute_capabilities, amd_architectures, cpu_flags: a row has one of them",
        ),
        (SCHEME + HARDWARE.replace("vllm-fp8", "hearsay"), "sources: 'hearsay' is not"),
        (SCHEME + HARDWARE * 2, r"Hopper: \(9, 0\) is in the row Hopper already"),
    ],
)
def test_a_broken_table_says_row_field_and_what_is_allowed(
    text: str, fault: str
) -> None:
    with pytest.raises(SchemeError, match=fault):
        read_table(text, "t.toml")
