"""What an engine that ran out of memory is started with next, by what vLLM 0.32 says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tiers.lifecycle.less_memory import GIB, SHORTEST_CONTEXT, with_less
from tiers.spec import EngineLaunch, EnginePlacement, TierName, TierSpec

SPEC = TierSpec(
    TierName.PRECISE,
    max_model_len=8192,
    max_num_seqs=16,
    max_in_flight=32,
    checkpoint=Path("/models/x"),
)
CPU = EngineLaunch(
    SPEC,
    EnginePlacement(kv_cache_gib=8),
    python=Path("p"),
    served_model="m",
    host="127.0.0.1",
    port=9101,
    api_key="key",
)
GPU = replace(CPU, placement=EnginePlacement(gpus=(0,), gpu_memory_fraction=0.5))
TOO_LONG = (
    "ValueError: To serve at least one request with the model's max seq len (8192), (1.0 GiB KV cache is needed, which is "
    "larger than the available KV cache memory (0.4 GiB). Based on the available memory, the estimated maximum model length "
    "is 3290. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine."
)
LITTLE_FREE = (
    "ValueError: Available memory on node 0 (5.1/23.5 GiB) on kv cache allocation is less than requested memory for kv "
    "(8.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other processes."
)
GPU_TAKEN = (
    "ValueError: Free memory on device cuda:0 (31.5/79.2 GiB) on startup is less than desired GPU memory utilization "
    "(0.5, 39.6 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
)
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.2 GiB"
ALLOCATOR = "RuntimeError: [enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: can't allocate memory: you tried"
KILLED = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': -9}"


def per_token() -> int:
    """Return the KV cache of a token of which 8192 take one GiB."""
    return GIB // 8192


@pytest.mark.parametrize("log", [ALLOCATOR, KILLED, "MemoryError\n"])
def test_the_kv_cache_is_halved_first_and_then_the_context(log: str) -> None:
    """Down to one request's; then the context, as far as it is of use; then nothing is left to try."""
    launch = CPU
    seen = []
    while (
        smaller := with_less(launch, f"INFO started\n{log}\nINFO more", per_token)
    ) is not None:
        launch = smaller.launch
        seen.append((launch.placement.kv_cache_gib, launch.tier.max_model_len))
    assert seen[:4] == [(4, 8192), (2, 8192), (1, 8192), (1, 4096)]
    assert seen[-1][1] == SHORTEST_CONTEXT


def test_what_vllm_finds_free_is_believed() -> None:
    """It tells how much memory there is: one more start is enough. A person's own variable does not stand against it."""
    smaller = with_less(CPU, LITTLE_FREE, per_token)
    assert smaller is not None
    assert smaller.launch.placement.kv_cache_gib == 2.5
    assert smaller.why == "KV cache 2.5 instead of 8 GiB: 5.1 GiB were free"
    asked = replace(CPU, env={"VLLM_CPU_KVCACHE_SPACE": "64", "A": "b"})
    smaller = with_less(asked, LITTLE_FREE, per_token)
    assert smaller is not None
    assert smaller.launch.placement.kv_cache_gib == 2.5
    assert smaller.launch.env == {"A": "b"}
    assert smaller.why == "KV cache 2.5 instead of 64 GiB: 5.1 GiB were free"


def test_a_variable_that_is_no_number_hides_no_other_cause() -> None:
    """vLLM takes an empty one for none. An engine that ended for another reason is not started with less."""
    empty = replace(CPU, env={"VLLM_CPU_KVCACHE_SPACE": ""})
    assert with_less(empty, "ValueError: unknown architecture", per_token) is None


@pytest.mark.parametrize("launch", [CPU, GPU])
def test_a_kv_cache_too_small_for_one_request_shortens_the_context(
    launch: EngineLaunch,
) -> None:
    """To what vLLM says fits, in whole blocks; half of it where it does not say."""
    smaller = with_less(launch, TOO_LONG, per_token)
    assert smaller is not None
    assert smaller.launch == replace(launch, tier=replace(SPEC, max_model_len=3264))
    assert (
        smaller.why
        == "context 3264 instead of 8192 tokens: its KV cache does not hold one request"
    )
    smaller = with_less(launch, TOO_LONG.replace("estimated", "guessed"), per_token)
    assert smaller is not None
    assert smaller.launch.tier.max_model_len == 4096


def test_a_gpu_engine_gets_a_smaller_share() -> None:
    """What is free, if vLLM says it; else less for the KV cache, so that more is left for the rest."""
    taken = with_less(GPU, GPU_TAKEN, per_token)
    failed = with_less(GPU, CUDA, per_token)
    assert taken is not None
    assert failed is not None
    assert taken.launch.placement.gpu_memory_fraction == 0.393
    assert taken.why == "39.3% of the GPU instead of 50.0%: 31.5 of 79.2 GiB were free"
    assert failed.launch.placement.gpu_memory_fraction == 0.425
    assert (
        with_less(
            replace(GPU, placement=EnginePlacement(gpus=(0,), gpu_memory_fraction=0.2)),
            GPU_TAKEN,
            per_token,
        )
        is None
    )


@pytest.mark.parametrize("launch", [CPU, GPU])
def test_other_ends_are_not_taken_for_it(launch: EngineLaunch) -> None:
    for log in (
        "",
        "ValueError: unknown architecture",
        "INFO Available KV cache memory: 8.0 GiB",
        "port in use: -9",
    ):
        assert with_less(launch, log, per_token) is None
