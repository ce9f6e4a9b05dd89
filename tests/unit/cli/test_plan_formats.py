"""Which formats tiers are planned in: named, usual, or below those of a model that is published in few bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.cli.plan_formats import choose_formats, named_schemes, published_format
from router.settings import load_settings
from tests.unit.tiers.sizing.builders import BALANCED, FAST, PRECISE
from tests.unit.tiers.sizing.test_kernels import AMD, AMPERE, BLACKWELL, HOPPER
from tiers.checkpoints.contents import contents_of
from tiers.errors import PlanError
from tiers.formats import FORMATS
from tiers.sizing.architecture import architecture
from tiers.sizing.capacity import ServingDemand, engines_on_gpus
from tiers.sizing.hardware import GpuKind
from tiers.sizing.tier_format import TierFormat, parse_format
from tiers.spec import TierName

CHECKPOINTS = Path(__file__).parents[2] / "data/checkpoints_published"
DEMAND = ServingDemand(prompt_tokens=800, output_tokens=250, context=1050)
FP8_BLOCK = parse_format("fp8-block", "a test")
MXFP4 = parse_format("bf16+mxfp4", "a test")


def formats(
    named: str | None = None,
    *gpus: GpuKind,
    published: TierFormat | None = None,
    kv_cache: str = "auto",
    has_experts: bool = False,
) -> dict[TierName, str]:
    chosen = choose_formats(
        named, kv_cache, gpus or [HOPPER], published, has_experts=has_experts
    )
    return {tier: each.precision for tier, each in chosen.by_tier.items()}


def fault(
    named: str | None = None,
    *gpus: GpuKind,
    published: TierFormat | None = None,
    kv_cache: str = "auto",
) -> str:
    with pytest.raises(PlanError) as error:
        formats(named, *gpus, published=published, kv_cache=kv_cache)
    return str(error.value)


@pytest.mark.parametrize(
    ("named", "planned"),
    [
        ("bf16,fp8,nvfp4", {FAST: "nvfp4", BALANCED: "fp8", PRECISE: "bf16"}),
        ("nvfp4,int8-w8a8", {FAST: "nvfp4", BALANCED: "int8-w8a8"}),
        ("int4,int4-w4a8,bf16", {FAST: "int4-w4a8", BALANCED: "int4", PRECISE: "bf16"}),
        ("fp8,bf16", {BALANCED: "fp8", PRECISE: "bf16"}),
        ("nvfp4", {FAST: "nvfp4"}),
        ("fp16", {PRECISE: "fp16"}),
        (
            "fp8+kv-fp8,fp8,bf16",
            {FAST: "fp8+kv-fp8", BALANCED: "fp8", PRECISE: "bf16"},
        ),
        ("bf16+kv-fp8,bf16", {BALANCED: "bf16+kv-fp8", PRECISE: "bf16"}),
    ],
)
def test_named_formats_fill_the_tiers_in_order(
    named: str, planned: dict[TierName, str]
) -> None:
    """From the fewest bits; ``precise`` is the model's own format, and nothing else is."""
    assert formats(named) == planned
    assert list(formats(named)) == list(planned)


def test_a_kv_cache_for_all_tiers() -> None:
    assert formats(kv_cache="fp8") == {
        FAST: "awq-int4+kv-fp8",
        BALANCED: "fp8+kv-fp8",
        PRECISE: "bf16+kv-fp8",
    }


def test_a_model_published_in_few_bits_has_them_as_its_highest() -> None:
    """What has fewer bits is below it; nothing has more."""
    own = {FAST: "nvfp4", PRECISE: "fp8-block"}
    assert formats(None, BLACKWELL, published=FP8_BLOCK) == own
    assert formats("nvfp4,fp8-block", HOPPER, published=FP8_BLOCK) == own
    assert formats(None, BLACKWELL, published=MXFP4) == {PRECISE: "mxfp4"}
    chosen = choose_formats(None, "auto", [HOPPER], MXFP4, has_experts=True)
    assert chosen.reference == MXFP4
    named = choose_formats("mxfp4", "auto", [HOPPER], MXFP4, has_experts=True)
    assert named.by_tier == {PRECISE: MXFP4}
    said = fault("fp8,fp8-block", published=FP8_BLOCK)
    assert "fp8: the model is published in fp8-block, and none of its tiers" in said
    assert "allowed are fp8-block and mxfp4-w4a4, nvfp4" in said
    assert "bf16: the model is published in mxfp4" in fault("bf16", published=MXFP4)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("fp8,fp4", "--formats fp8,fp4: fp4 is no format that is planned"),
        ("fp8,fp8", "fp8 is named twice; once is allowed"),
        ("nvfp4,int4,fp8,bf16", "at most two are allowed, for fast and balanced"),
        ("nvfp4,int4,fp8", "fp8, int4, nvfp4 are 3 formats below bf16"),
        ("fp8+nvfp4,bf16", "that of routed experts, and the model has none"),
    ],
)
def test_named_formats_that_cannot_be_planned(named: str, said: str) -> None:
    assert said in fault(named)


def test_a_dense_model_may_be_published_in_two_formats() -> None:
    published = parse_format("fp8+nvfp4", "a test")
    for named in ("nvfp4", "fp8+nvfp4"):
        assert formats(named, published=published) == {PRECISE: "fp8+nvfp4"}


def test_experts_may_have_a_format_of_their_own() -> None:
    planned = formats("fp8+nvfp4,bf16", BLACKWELL, has_experts=True)
    assert planned == {FAST: "fp8+nvfp4", PRECISE: "bf16"}


def test_what_else_is_not_allowed() -> None:
    said = fault(kv_cache="int8")
    assert said == "--kv-cache int8: auto and fp8 are allowed"
    with pytest.raises(PlanError, match="--formats needs --gpus"):
        choose_formats("fp8", "auto", [], None, has_experts=False)


def test_several_kinds_of_gpu_have_one_format_a_tier_and_it_is_said() -> None:
    chosen = choose_formats(None, "auto", [HOPPER, BLACKWELL], None, has_experts=False)
    different, unpacked = chosen.notes
    assert "(Hopper awq-int4, fp8, bf16; Blackwell nvfp4, fp8, bf16)" in different
    assert "fast is nvfp4, balanced is fp8, precise is bf16; --formats" in different
    assert unpacked.startswith("Hopper computes nvfp4 in 16 bits")
    assert choose_formats(None, "auto", [HOPPER], None, has_experts=False).notes == []
    alike = choose_formats(None, "auto", [HOPPER, AMD], None, has_experts=False)
    assert alike.notes == []
    named = choose_formats("fp8", "auto", [HOPPER, AMPERE], None, has_experts=False)
    assert named.notes == [
        "Ampere computes fp8 in 16 bits: it has no units for it that vLLM uses"
    ]


def test_schemes_of_the_settings_count_where_no_formats_are_named() -> None:
    schemes = {FAST: "int4", BALANCED: "online-fp8-block"}
    chosen = choose_formats(
        None, "auto", [HOPPER, BLACKWELL], None, has_experts=False, schemes=schemes
    )
    names = {tier: each.precision for tier, each in chosen.by_tier.items()}
    assert names == {FAST: "int4", BALANCED: "fp8-block", PRECISE: "bf16"}
    assert chosen.notes == []
    settings = load_settings(None, {"tiers": {"fast": {"scheme": "int4"}}})
    assert named_schemes(settings) == {FAST: "int4"}
    named = choose_formats(
        "fp8", "auto", [HOPPER], None, has_experts=False, schemes=schemes
    )
    assert set(named.by_tier) == {BALANCED}


# The precision, and the formats below it on Blackwell.
OF_PUBLISHED = {
    "deepseek-v3.1-nvfp4": ("nvfp4+kv-fp8", {}),
    "deepseek-v3.2": ("fp8-block", {FAST: "nvfp4"}),
    "gemma-3-12b-it-text-only": ("bf16", {FAST: "nvfp4", BALANCED: "fp8"}),
    "gemma-4-26b-a4b": ("bf16", {FAST: "nvfp4", BALANCED: "fp8"}),
    "gemma-4-26b-a4b-nvfp4": ("nvfp4+kv-fp8", {}),
    "glm-5.2-nvfp4-fp8": ("fp8-block+nvfp4", {}),
    "gpt-oss-120b": ("mxfp4", {}),
    "gpt-oss-20b": ("mxfp4", {}),
    "kat-dev-gptq-int8": ("gptq-int8", {FAST: "nvfp4"}),
    "kimi-k2-thinking": ("int4", {}),
    "kimi-k2.5": ("int4", {}),
    "llama-3.1-70b-instruct-fp8": ("fp8+kv-fp8", {FAST: "nvfp4"}),
    "llama-3.3-70b-instruct-fp4": ("nvfp4", {}),
    "meta-llama-3-8b-instruct-nvfp4-fp8-dynamic": ("fp8+nvfp4", {}),
    "qwen3-235b-a22b-nvfp4": ("nvfp4+kv-fp8", {}),
    "qwen3-30b-a3b": ("bf16", {FAST: "nvfp4", BALANCED: "fp8"}),
    "qwen3-30b-a3b-fp8": ("fp8-block", {FAST: "nvfp4"}),
    "qwen3-32b-fp8-static-pertensor": ("fp8+kv-fp8", {FAST: "nvfp4"}),
    "qwen3-8b": ("bf16", {FAST: "nvfp4", BALANCED: "fp8"}),
    "qwen3.6-35b-a3b-nvfp4": ("fp8+nvfp4-w4a16", {}),
    "qwq-32b-preview-awq": ("awq-int4", {}),
}
# Their makers left everything but the experts in 16 bits.
EXPERTS_ALONE = {
    "gemma-4-26b-a4b-nvfp4",
    "gpt-oss-120b",
    "gpt-oss-20b",
    "kimi-k2-thinking",
    "kimi-k2.5",
}


@pytest.mark.parametrize(
    "path", sorted(CHECKPOINTS.glob("*.json")), ids=lambda path: path.stem
)
def test_what_a_published_checkpoint_is_planned_in(path: Path) -> None:
    """As it is published, of the size that its files have, and with engines on 8 GPUs; lower formats are below it."""
    checkpoint = json.loads(path.read_bytes())
    recipe = checkpoint.get("recipe") or ""
    contents = contents_of(checkpoint["config"], checkpoint.get("hf_quant"), recipe)
    model = architecture(checkpoint["config"])
    published = published_format(contents, model)
    chosen = choose_formats(
        None, "auto", [BLACKWELL], published, has_experts=model.has_experts
    )
    precision, lower = OF_PUBLISHED[path.stem]
    names = {tier: each.precision for tier, each in chosen.by_tier.items()}
    assert names == {**lower, PRECISE: precision}
    own_format = chosen.by_tier[PRECISE]
    assert own_format.weight_bytes(model) == pytest.approx(
        contents.weight_bytes, rel=0.001
    )
    has_16_bits_beside = own_format.dense_format == FORMATS["bf16"]
    assert has_16_bits_beside == (path.stem in EXPERTS_ALONE)
    plans, obstacles = engines_on_gpus(
        model, BLACKWELL, 8, DEMAND, formats=chosen.by_tier
    )
    assert not obstacles
    assert {plan.tier for plan in plans} == set(names)
    bytes_per_value = 1 if published is not None and published.is_kv_fp8 else 2
    for plan in plans:
        if plan.tier is PRECISE:
            assert plan.precision == precision
            per_token = model.kv_bytes_per_token(bytes_per_value)
            assert plan.kv_bytes_per_token == per_token


def test_all_published_checkpoints_are_named_above() -> None:
    assert {path.stem for path in CHECKPOINTS.glob("*.json")} == set(OF_PUBLISHED)
