"""A tier's formats as people write and read them, and which ones kinds of GPU have for themselves."""

from __future__ import annotations

import pytest

from tests.unit.tiers.sizing.builders import BALANCED, FAST, PRECISE
from tests.unit.tiers.sizing.published_models import published_model
from tests.unit.tiers.sizing.test_kernels import AMD, AMPERE, BLACKWELL, HOPPER
from tiers.errors import PlanError
from tiers.formats import FORMATS
from tiers.sizing.capacity import ServingDemand, engines_on_gpus
from tiers.sizing.formats_for import common_formats, formats_for
from tiers.sizing.hardware import GpuKind
from tiers.sizing.kernels import PLANNED_FORMATS
from tiers.sizing.tier_format import STANDARD_FORMATS, format_words, parse_format
from tiers.spec import PRECISIONS, TierName

HERE = "--formats"


@pytest.mark.parametrize("kv_cache", ["", "+kv-fp8"])
@pytest.mark.parametrize("name", PLANNED_FORMATS)
def test_what_is_written_is_shown(name: str, kv_cache: str) -> None:
    tier_format = parse_format(f" {name.upper()}{kv_cache}", HERE)
    assert tier_format.precision == f"{name}{kv_cache}"
    assert tier_format.is_kv_fp8 == bool(kv_cache)
    assert tier_format.kv_bytes_per_value == (1 if kv_cache else 2)


def test_two_formats_are_of_experts_and_of_the_other_layers() -> None:
    tier_format = parse_format("nvfp4+fp8+kv-fp8", HERE)
    assert tier_format.number_format == FORMATS["nvfp4"]
    assert tier_format.dense_format == FORMATS["fp8"]
    assert tier_format.precision == "fp8+nvfp4+kv-fp8"
    assert parse_format("bf16+mxfp4", HERE).precision == "mxfp4"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fp3", "--formats: fp3 is no format that is planned; allowed are mxfp4-w4a4"),
        ("", "--formats: an empty name is no format"),
        ("fp32", "fp32 is no format that is planned"),
        ("fp8+kv-int4", "allowed are fp8 and fp8+kv-fp8"),
        ("fp8+nvfp4+bf16", "at most two formats are allowed"),
    ],
)
def test_what_cannot_be_read_says_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(PlanError) as error:
        parse_format(text, HERE)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        ("nvfp4", "NVFP4"),
        ("awq-int4", "4 bits"),
        ("fp8+nvfp4", "FP8+NVFP4"),
        ("bf16+kv-fp8", "BF16 with FP8 KV"),
        ("int8-w8a8", "INT8"),
    ],
)
def test_formats_in_words(precision: str, words: str) -> None:
    assert format_words(precision) == words


def test_standard_formats_are_those_that_are_made() -> None:
    names = {tier: each.precision for tier, each in STANDARD_FORMATS.items()}
    assert names == PRECISIONS


@pytest.mark.parametrize(
    ("gpus", "fast", "balanced"),
    [
        ([BLACKWELL], "nvfp4", "fp8"),
        ([HOPPER], "awq-int4", "fp8"),
        ([AMPERE], "awq-int4", "int8-w8a8"),
        ([AMD], "awq-int4", "fp8"),
        # Hopper unpacks NVFP4; INT8 is not computed on Blackwell.
        ([HOPPER, BLACKWELL], "nvfp4", "fp8"),
        ([AMPERE, BLACKWELL], "nvfp4", "fp8"),
        ([BLACKWELL, AMD], "awq-int4", "fp8"),
        # Both have units for INT8.
        ([HOPPER, AMPERE], "awq-int4", "int8-w8a8"),
    ],
)
def test_formats_that_gpus_compute_well(
    gpus: list[GpuKind], fast: str, balanced: str
) -> None:
    common = common_formats(gpus)
    names = {tier: number_format.name for tier, number_format in common.items()}
    assert names == {FAST: fast, BALANCED: balanced, PRECISE: "bf16"}
    if len(gpus) == 1:
        assert common == formats_for(gpus[0])


def test_an_fp8_kv_cache_holds_twice_the_context() -> None:
    """Or twice the sequences; only the tiers that have it."""
    model = published_model("llama-3.1-8b")
    formats = {
        FAST: parse_format("nvfp4+kv-fp8", HERE),
        PRECISE: parse_format("bf16", HERE),
    }

    def max_sequences(context: int) -> dict[TierName, int]:
        demand = ServingDemand(prompt_tokens=100, output_tokens=100, context=context)
        plans, obstacles = engines_on_gpus(
            model, BLACKWELL, available=1, demand=demand, formats=formats
        )
        assert not obstacles
        return {plan.tier: plan.max_sequences for plan in plans}

    short = max_sequences(4096)
    long = max_sequences(8192)
    assert set(short) == {FAST, PRECISE}
    assert long[FAST] == short[FAST] // 2
    assert short[FAST] > 2 * short[PRECISE]


def test_a_format_that_is_not_computed_is_no_engine_and_says_why() -> None:
    model = published_model("llama-3.1-8b")
    demand = ServingDemand(prompt_tokens=100, output_tokens=100, context=200)
    formats = {
        FAST: parse_format("awq-int4", HERE),
        BALANCED: parse_format("int8-w8a8", HERE),
    }
    plans, obstacles = engines_on_gpus(
        model, BLACKWELL, None, demand=demand, formats=formats
    )
    assert {plan.tier for plan in plans} == {FAST}
    assert list(obstacles) == [BALANCED]
    assert obstacles[BALANCED].startswith(
        "balanced (INT8) is not planned on Blackwell: Blackwell does not compute int8-w8a8"
    )
