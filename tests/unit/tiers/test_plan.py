"""How engines share one machine."""

from __future__ import annotations

import json
import os
import struct
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.unit.made_checkpoints import LLAMA_8B, model
from tiers.errors import CheckpointError, PlanError
from tiers.kernels import InstructionSet
from tiers.plan import (
    CPU_OVERHEAD_GIB,
    GIB,
    Gpu,
    Machine,
    expected_bytes,
    group_room,
    held_bytes,
    kv_bytes_per_token,
    lacking_for_one_more,
    machine_name,
    make_plan,
    model_config,
    read_machine,
    usual_kv_cache_gib,
    weight_bytes,
)
from tiers.spec import (
    STANDARD_TIERS,
    Draft,
    EnginePlacement,
    Precision,
    TierName,
    TierSpec,
)

if TYPE_CHECKING:
    from pathlib import Path

FAST, BALANCED, PRECISE = STANDARD_TIERS
AVX2, AVX512, AMX = InstructionSet


def specs(tmp_path: Path, gib: dict[TierName, float]) -> list[TierSpec]:
    return [
        TierSpec(
            name,
            length,
            max_num_seqs=16,
            max_in_flight=32,
            checkpoint=model(tmp_path / name, size=int(gib[name] * GIB)),
        )
        for name, length in zip(STANDARD_TIERS, (2048, 4096, 8192), strict=True)
    ]


SIZES_8B = {FAST: 5.4, BALANCED: 8.5, PRECISE: 15.0}


def test_kv_cache_per_token() -> None:
    """An 8B Llama holds 2 x 32 layers x 8 heads x 128 x 2 bytes = 128 KiB a token."""
    assert kv_bytes_per_token(LLAMA_8B) == 131072
    with pytest.raises(PlanError, match="num_hidden_layers"):
        kv_bytes_per_token({"num_attention_heads": 1, "hidden_size": 64})


def test_a_plan_knows_the_weights_that_are_still_to_be_made(tmp_path: Path) -> None:
    """From the BF16 checkpoint alone: embeddings stay, and the rest is half, or a little over a quarter."""
    # and 163 and 114 MB, of the default model
    base = model(tmp_path / "base", size=269_060_552)
    config = {
        **LLAMA_8B,
        "vocab_size": 49152,
        "hidden_size": 576,
        "tie_word_embeddings": True,
    }
    (base / "config.json").write_text(json.dumps(config))
    assert expected_bytes(base, Precision.BF16, AVX512) == (269_060_552, 269_060_552)
    on_disk, held = expected_bytes(base, Precision.FP8, AMX)
    assert on_disk == pytest.approx(163_227_736, rel=0.01)
    assert held == pytest.approx(269_060_552, rel=0.01)
    packed, held = expected_bytes(base, Precision.AWQ_INT4, AVX2)
    assert 114_029_456 < packed < 1.05 * 114_029_456
    weights = (269_060_552 - 49152 * 576 * 2) / 2
    assert held == pytest.approx(packed + weights / 2, rel=1e-6)
    held_on_amx = expected_bytes(base, Precision.AWQ_INT4, AMX)[1]
    # in the smallest groups
    assert held_on_amx == pytest.approx(packed + weights / 32 * 6.5, rel=1e-6)
    tiers = [
        TierSpec(
            name,
            2048,
            max_num_seqs=16,
            max_in_flight=32,
            checkpoint=base if name is PRECISE else None,
        )
        for name in STANDARD_TIERS
    ]
    plan = make_plan(Machine((0, 1), 24 * GIB, (), AVX512), tiers, base=base)
    assert [(share.on_disk, share.weights) for share in plan.shares] == [
        expected_bytes(base, precision, AVX512)
        for precision in (Precision.AWQ_INT4, Precision.FP8, Precision.BF16)
    ]


def test_formats_that_are_expected_have_their_sizes(tmp_path: Path) -> None:
    """Of a scheme that the hardware asks for, and of weights that vLLM quantizes while it loads the 16-bit folder."""
    base = model(tmp_path / "base", size=4_000_000_000)
    kept = 2 * 2 * 128256 * 4096
    weights = (4_000_000_000 - kept) / 2
    on_disk, _ = expected_bytes(base, "nvfp4", None)
    assert on_disk == pytest.approx(kept + weights * (0.5 + 1 / 16), rel=1e-6)
    tier = TierSpec(FAST, 2048, max_num_seqs=16, max_in_flight=32)
    machine = Machine(
        (0,), 64 * GIB, (Gpu(0, "B200", total=180 * GIB, free=178 * GIB),)
    )
    expecting = replace(tier, expected_precision="nvfp4")
    online = replace(tier, name=BALANCED, checkpoint=base, precision="fp8")
    plan = make_plan(machine, [expecting, online], base=base)
    assert [share.weights for share in plan.shares] == [
        on_disk,
        expected_bytes(base, "fp8", None)[0],
    ]
    as_it_is = make_plan(machine, [replace(online, precision="bf16")], base=base)
    assert as_it_is.shares[0].weights == 4_000_000_000


def test_three_engines_share_one_gpu(tmp_path: Path) -> None:
    """The shares add up to less than the card, and each holds its weights and at least one full context."""
    machine = Machine(
        (0, 1), 64 * GIB, (Gpu(0, "H200", total=141 * GIB, free=140 * GIB),)
    )
    plan = make_plan(machine, specs(tmp_path, SIZES_8B))
    fractions = [share.placement.gpu_memory_fraction for share in plan.shares]
    assert sum(fractions) < 0.95
    for share, length in zip(plan.shares, (2048, 4096, 8192), strict=True):
        assert (
            share.placement.gpu_memory_fraction * 141 * GIB
            > share.weights + share.kv_cache
        )
        assert share.kv_tokens >= length


def test_gpu_that_is_too_small_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    """Three 8B engines do not fit a 32 GiB card: the error has the numbers and what can be done."""
    machine = Machine((0,), 64 * GIB, (Gpu(0, "small", total=32 * GIB, free=31 * GIB),))
    with pytest.raises(
        PlanError, match=r"31\.0 GiB free.*28\.9 GiB.*Take a smaller model"
    ):
        make_plan(machine, specs(tmp_path, SIZES_8B))


def test_cpu_plan_shares_cores_and_checks_memory(tmp_path: Path) -> None:
    """Few cores are shared, many are divided with one left for the router; too little memory is refused."""
    small = dict.fromkeys(STANDARD_TIERS, 0.2)
    few = make_plan(
        Machine((0, 1), 24 * GIB, ()), specs(tmp_path, small), kv_cache_gib=1
    )
    assert [s.placement.cores for s in few.shares] == [(), (), ()]
    many = make_plan(
        Machine(tuple(range(8)), 24 * GIB, ()), specs(tmp_path, small), kv_cache_gib=1
    )
    assert [s.placement.cores for s in many.shares] == [(1, 2), (3, 4), (5, 6)]
    with pytest.raises(PlanError, match="GiB of memory"):
        make_plan(Machine((0, 1), 4 * GIB, ()), specs(tmp_path, small), kv_cache_gib=1)


def test_where_not_all_fit_some_are_left_out(tmp_path: Path) -> None:
    """Balanced first, then fast; precise only where it does not fit alone; never one that is asked for, nor the last."""
    machines = [Machine((0, 1), int(gib * GIB), ()) for gib in (40, 30, 21, 11, 3)]
    tiers = specs(tmp_path, {FAST: 2, BALANCED: 4, PRECISE: 8})
    plans = [
        make_plan(machine, tiers, kv_cache_gib=1, optional=STANDARD_TIERS)
        for machine in machines[:4]
    ]
    assert [plan.left_out for plan in plans] == [
        (),
        (BALANCED,),
        (BALANCED, FAST),
        (BALANCED, PRECISE),
    ]
    started = [tuple(share.tier for share in plan.shares) for plan in plans]
    assert started == [STANDARD_TIERS, (FAST, PRECISE), (PRECISE,), (FAST,)]
    assert ("3 CPU engines need about" in plans[1].lacking) is True
    assert plans[0].lacking == ""
    with pytest.raises(PlanError, match="1 CPU engine needs about"):
        make_plan(machines[4], tiers, kv_cache_gib=1, optional=STANDARD_TIERS)
    with pytest.raises(PlanError, match="2 CPU engines need about"):
        make_plan(machines[2], tiers, kv_cache_gib=1, optional=(FAST,))


@pytest.mark.parametrize(
    ("line", "limit", "used", "cached"),
    [("0::/a/b", "a/memory.max", "a/memory.current", "inactive_file"),
     ("4:memory:/a/b", "memory/a/memory.limit_in_bytes", "memory/a/memory.usage_in_bytes", "total_inactive_file")],
)  # fmt: skip
def test_a_control_groups_limit_counts(
    tmp_path: Path, line: str, limit: str, used: str, cached: str
) -> None:
    """Of either version, that of a group above included; files that it keeps in memory give way."""
    assert group_room(tmp_path, tmp_path / "own") == sys.maxsize
    (tmp_path / "own").write_text(f"3:cpu:/\n{line}\n")
    (tmp_path / limit).parent.mkdir(parents=True)
    (tmp_path / limit).with_name("memory.stat").write_text(f"rss 9\n{cached} 100\n")
    (tmp_path / used).write_text("600\n")
    for most, room in (("max", sys.maxsize), ("1000", 500), ("100", 0)):
        (tmp_path / limit).write_text(f"{most}\n")
        assert group_room(tmp_path, tmp_path / "own") == room


MIB = 1 << 20
TENSORS = {
    FAST: {"embed.weight": ("BF16", 50 * MIB), "q.weight_packed": ("I32", 40 * MIB), "q.weight_scale": ("BF16", MIB)},
    BALANCED: {"embed.weight": ("BF16", 50 * MIB), "q.weight": ("F8_E4M3", 80 * MIB), "q.weight_scale": ("BF16", MIB)},
    PRECISE: {"embed.weight": ("BF16", 50 * MIB), "q.weight": ("BF16", 160 * MIB)},
}  # fmt: skip
QUANTIZED = {
    FAST: {"type": "int", "num_bits": 4, "group_size": 128},
    BALANCED: {"type": "float", "num_bits": 8, "group_size": None},
}


def quantized_model(folder: Path, tier: TierName) -> Path:
    """Make a checkpoint whose tensors have sizes, but no values."""
    model(folder)
    if tier in QUANTIZED:
        weights = QUANTIZED[tier]
        group = {"weights": weights}
        if tier is BALANCED:
            group["input_activations"] = weights
        quantization = {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": group},
        }
        (folder / "config.json").write_text(
            json.dumps({**LLAMA_8B, "quantization_config": quantization})
        )
    header = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, size) in TENSORS[tier].items():
        header[name] = {
            "dtype": dtype,
            "shape": [size],
            "data_offsets": [end, end + size],
        }
        end += size
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)
    return folder


@pytest.mark.parametrize(
    ("instructions", "held"),
    [(AVX2, (131, 371, 420)), (AVX512, (131, 211, 210)), (AMX, (95, 211, 210))],
)
def test_weights_take_what_their_kernels_hold(
    instructions: InstructionSet, held: tuple[int, ...], tmp_path: Path
) -> None:
    """FP8 is held as BF16; 4 bits in two layouts, or with AMX as vLLM's kernel has them, 40 MiB in groups of 128.

    With AVX2 alone FP8 and BF16 layers are held in float32. Embeddings and scales stay as they are.
    """
    tiers = [
        TierSpec(
            n,
            2048,
            max_num_seqs=16,
            max_in_flight=32,
            checkpoint=quantized_model(tmp_path / n, n),
        )
        for n in STANDARD_TIERS
    ]
    plan = make_plan(Machine((0, 1), 24 * GIB, (), instructions), tiers, kv_cache_gib=1)
    assert tuple(share.weights // MIB for share in plan.shares) == held
    assert tuple(share.on_disk // MIB for share in plan.shares) == (91, 131, 210)


def test_weights_are_counted_on_disk_and_as_held(tmp_path: Path) -> None:
    """Where the machine has room for what AMX needs, two layouts of 4-bit weights may not fit."""
    tiers = [
        TierSpec(
            n,
            2048,
            max_num_seqs=16,
            max_in_flight=32,
            checkpoint=quantized_model(tmp_path / n, n),
        )
        for n in STANDARD_TIERS
    ]
    room = (
        int(3 * (1 + CPU_OVERHEAD_GIB) * GIB) + (91 + 131 + 210 + 96 + 211 + 210) * MIB
    )
    assert make_plan(Machine((0, 1), room, (), AMX), tiers, kv_cache_gib=1)
    with pytest.raises(PlanError, match="GiB of memory"):
        make_plan(Machine((0, 1), room, (), AVX512), tiers, kv_cache_gib=1)
    (tmp_path / FAST / "model.safetensors").write_bytes(b"")
    with pytest.raises(PlanError, match="cannot be read"):
        make_plan(Machine((0, 1), room, ()), tiers)


def test_groups_of_unknown_size_count_as_the_smallest(tmp_path: Path) -> None:
    """An AWQ checkpoint of another tool may not say it where vLLM's kernel for AMX needs it."""
    folder = quantized_model(tmp_path / "fast", FAST)
    quantization = {"quant_method": "awq", "bits": 4}
    (folder / "config.json").write_text(
        json.dumps({**LLAMA_8B, "quantization_config": quantization})
    )
    assert held_bytes(folder, AMX) == weight_bytes(folder) + 40 * MIB * 2 / 32 * 6.5


def test_memory_for_one_more_is_reckoned(tmp_path: Path) -> None:
    """On a CPU by what is available, on a GPU by what is free of it; what is missing is told."""
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}" + bytes(990))
    tier = TierSpec(
        TierName.FAST, 2048, max_num_seqs=16, max_in_flight=32, checkpoint=tmp_path
    )
    on_cpu = EnginePlacement(kv_cache_gib=1)
    on_gpu = EnginePlacement(gpus=(0,), gpu_memory_fraction=0.5)
    assert lacking_for_one_more(Machine((0,), 4 * GIB, ()), tier, on_cpu) is None
    assert lacking_for_one_more(Machine((0,), 2 * GIB, ()), tier, on_cpu) == (
        "one more engine needs 2.3 GiB, 2.0 GiB are free"
    )
    assert (
        lacking_for_one_more(
            Machine((0,), 0, (Gpu(0, "g", total=80 * GIB, free=41 * GIB),)),
            tier,
            on_gpu,
        )
        is None
    )
    assert "40.0 GiB, 39.0 GiB" in (
        lacking_for_one_more(
            Machine((0,), 0, (Gpu(0, "g", total=80 * GIB, free=39 * GIB),)),
            tier,
            on_gpu,
        )
        or ""
    )


def test_a_gpu_that_is_gone_is_told(tmp_path: Path) -> None:
    """One more engine cannot be started where the first one's GPU is not found any more."""
    tier = TierSpec(FAST, 1, max_num_seqs=1, max_in_flight=1, checkpoint=tmp_path)
    placement = EnginePlacement(gpus=(1,), gpu_memory_fraction=0.1)
    machine = Machine((0,), GIB, (Gpu(0, "g", total=GIB, free=GIB),))
    assert lacking_for_one_more(machine, tier, placement) == "GPU 1 is not found"


def test_a_model_may_name_its_head_dimension() -> None:
    """Where it is not the width by the heads; and all heads are KV heads where nothing else is said."""
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    assert kv_bytes_per_token(config) == 2 * 2 * 4 * 16 * 2
    assert (
        kv_bytes_per_token({**config, "head_dim": 32, "num_key_value_heads": 1})
        == 2 * 2 * 1 * 32 * 2
    )


def test_the_text_part_of_a_multimodal_model_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 1, "text_config": {"num_hidden_layers": 9}})
    )
    assert model_config(tmp_path) == {"num_hidden_layers": 9}


def test_a_config_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="a JSON object is expected"):
        model_config(tmp_path)


def test_without_tiers_there_is_nothing_to_share() -> None:
    assert make_plan(Machine((0,), 0, ()), []).shares == ()


def test_the_gpu_with_most_free_memory_is_taken(tmp_path: Path) -> None:
    gpus = (
        Gpu(0, "busy", total=80 * GIB, free=10 * GIB),
        Gpu(1, "free", total=80 * GIB, free=79 * GIB),
    )
    plan = make_plan(
        Machine((0,), 0, gpus), specs(tmp_path, dict.fromkeys(STANDARD_TIERS, 1.0))
    )
    assert plan.device == "GPU 1 (free)"
    assert {plan.placement(tier).gpus for tier in STANDARD_TIERS} == {(1,)}


EIGHT = tuple(Gpu(n, "H100", total=80 * GIB, free=79 * GIB) for n in range(8))
SIZES_70B = {FAST: 38.0, BALANCED: 68.0, PRECISE: 132.0}


def test_several_gpus_hold_several_engines(tmp_path: Path) -> None:
    """The largest weights choose first; each engine has GPUs of its own while there are any."""
    fast, balanced, precise = specs(tmp_path, SIZES_70B)
    tiers = [
        replace(fast, replicas=2),
        replace(balanced, tensor_parallel=2),
        replace(precise, tensor_parallel=2, pipeline_parallel=2),
    ]
    plan = make_plan(Machine((0,), 0, EIGHT), tiers)
    found = [(share.tier, share.number, share.placement.gpus) for share in plan.shares]
    assert found == [
        (FAST, 0, (6,)),
        (FAST, 1, (7,)),
        (BALANCED, 0, (4, 5)),
        (PRECISE, 0, (0, 1, 2, 3)),
    ]
    assert plan.placement(FAST, 1).gpus == (7,)
    assert plan.device == "GPUs 0, 1, 2, 3, 4, 5, 6, 7 (H100)"
    precise_share = plan.shares[-1]
    # 80 GiB less the reserve, the overhead of 2 GiB and a quarter of the weights, four times.
    assert precise_share.kv_cache / GIB == pytest.approx(
        4 * (79 - 0.06 * 80 - 2 - 33), abs=0.1
    )
    # Two of eight heads, in half of the layers: an eighth of the 128 KiB on each GPU.
    assert precise_share.kv_tokens == pytest.approx(
        precise_share.kv_cache / 4 / (131072 / 4), rel=1e-6
    )


def test_engines_that_share_a_gpu_get_its_smallest_share(tmp_path: Path) -> None:
    """One fraction holds for all GPUs of an engine: that of the GPU which it shares with another one."""
    fast, _, precise = specs(tmp_path, SIZES_8B)
    tiers = [replace(fast, gpus=(1,)), replace(precise, gpus=(0, 1), tensor_parallel=2)]
    plan = make_plan(Machine((0,), 0, EIGHT), tiers)
    low = plan.placement(FAST)
    high = plan.placement(PRECISE)
    assert low.gpus == (1,)
    assert high.gpus == (0, 1)
    assert low.gpu_memory_fraction + high.gpu_memory_fraction < 0.95


def test_gpus_of_a_tier_are_taken_in_turn(tmp_path: Path) -> None:
    fast, *_ = specs(tmp_path, SIZES_8B)
    plan = make_plan(
        Machine((0,), 0, EIGHT),
        [replace(fast, replicas=3, gpus=(5, 2, 3, 6), tensor_parallel=2)],
    )
    assert [share.placement.gpus for share in plan.shares] == [(2, 5), (3, 6), (2, 5)]


def test_gpus_that_are_not_there_are_refused(tmp_path: Path) -> None:
    """By the setting's name: a wrong index, too few of them, or none at all."""
    *_, precise = specs(tmp_path, SIZES_8B)
    two = Machine((0,), 64 * GIB, EIGHT[:2])
    with pytest.raises(
        PlanError, match=r"tiers\.precise\.gpus names GPU 7: there are 0, 1"
    ):
        make_plan(two, [replace(precise, gpus=(7,))])
    with pytest.raises(
        PlanError,
        match=r"takes 4 GPUs, 2 can be used: lower tiers\.precise\.tensor_parallel",
    ):
        make_plan(two, [replace(precise, tensor_parallel=4)])
    with pytest.raises(
        PlanError,
        match=r"precise is to have 2 GPUs for each engine, and this machine has none",
    ):
        make_plan(Machine((0,), 64 * GIB, ()), [replace(precise, tensor_parallel=2)])


def test_a_draft_model_takes_memory_too(tmp_path: Path) -> None:
    """Its weights and a KV cache of its own; n-grams take none."""
    fast, _, precise = specs(tmp_path, SIZES_8B)
    machine = Machine((0,), 64 * GIB, EIGHT[:1])
    drafting = replace(precise, draft=Draft("fast", 4, fast.checkpoint))
    alone, with_draft = (
        make_plan(machine, [tier]).shares[0] for tier in (precise, drafting)
    )
    assert with_draft.on_disk == alone.on_disk + int(5.4 * GIB)
    assert with_draft.kv_tokens == pytest.approx(
        (alone.kv_cache - 5.4 * GIB) / (2 * 131072), rel=1e-3
    )
    assert (
        make_plan(machine, [replace(precise, draft=Draft("ngram", 4))]).shares[0]
        == alone
    )
    to_make = replace(precise, checkpoint=None, draft=Draft("fast", 4))
    assert (
        make_plan(machine, [to_make], base=precise.checkpoint).shares[0].kv_tokens
        < alone.kv_tokens / 2
    )


def test_replicas_on_a_cpu_share_its_cores_and_memory(tmp_path: Path) -> None:
    fast, *_ = specs(tmp_path, dict.fromkeys(STANDARD_TIERS, 0.2))
    plan = make_plan(
        Machine(tuple(range(5)), 24 * GIB, ()), [replace(fast, replicas=2)]
    )
    assert [(s.number, s.placement.cores) for s in plan.shares] == [
        (0, (1, 2)),
        (1, (3, 4)),
    ]
    with pytest.raises(PlanError, match=r"8 CPU engines need about 2\d\.\d GiB"):
        make_plan(Machine((0,), 20 * GIB, ()), [replace(fast, replicas=8)])


def test_a_kv_cache_for_less_than_one_request_is_refused(tmp_path: Path) -> None:
    """The setting to raise, or the context to lower, is named: 8192 tokens of an 8B model need 1 GiB."""
    tier = TierSpec(
        PRECISE, 8193, max_num_seqs=1, max_in_flight=1, checkpoint=model(tmp_path / "m")
    )
    with pytest.raises(
        PlanError,
        match=r"precise needs 1\.00 GiB .* 8193 tokens, engine\.cpu_kv_cache_gib is 1: raise it",
    ):
        make_plan(Machine((0,), 64 * GIB, ()), [tier], kv_cache_gib=1)
    assert (
        make_plan(Machine((0,), 64 * GIB, ()), [tier], kv_cache_gib=2)
        .shares[0]
        .kv_tokens
        == 2 * 8192
    )


@pytest.mark.parametrize(
    ("per_token", "context", "sequences", "gib"),
    [(23_040, 8192, 16, 0.5), (23_040, 2048, 16, 0.25), (23_040, 2048, 64, 0.75), (131_072, 2048, 16, 1), (131_072, 16_384, 1, 2)],
)  # fmt: skip
def test_kv_cache_where_nothing_is_said(
    per_token: int, context: int, sequences: int, gib: float
) -> None:
    """Two of the longest requests, or all sequences of 512 tokens; of a large model one request, at least 1 GiB."""
    assert usual_kv_cache_gib(per_token, context, sequences) == gib


@pytest.mark.parametrize(
    ("script", "gpus"),
    [
        (
            "echo '0, NVIDIA H100 80GB, 81559, 81000'; echo '1, NVIDIA H100 80GB, 81559, 5'",
            [(0, 81000), (1, 5)],
        ),
        ("echo 'driver not loaded' >&2; exit 9", []),
    ],
    ids=["two", "no driver"],
)
def test_gpus_are_read_from_nvidia_smi(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    gpus: list[tuple[int, int]],
) -> None:
    """Its figures are MiB. Where it fails, there is no GPU to use."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = read_machine()
    assert [(gpu.index, gpu.free >> 20) for gpu in machine.gpus] == gpus
    assert machine.cores == tuple(sorted(os.sched_getaffinity(0)))
    assert machine.memory_available > 0
    assert ("NVIDIA H100 80GB" in machine_name()) == bool(gpus)
    assert f"({len(machine.cores)} cores)" in machine_name()


def test_a_machine_without_nvidia_smi_has_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_machine().gpus == ()
