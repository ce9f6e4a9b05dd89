"""How an engine that did not fit into memory is started with less: a smaller KV cache first, then a shorter context."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiers.spec import EngineLaunch

GIB = 1 << 30
ATTEMPTS = 4  # starts with less, one after another
SHORTEST_CONTEXT = 512  # tokens that are still of use
CONTEXT_STEP = 64  # contexts are multiples of so many tokens
# A KV cache takes at most this share of the memory that vLLM found free: other engines may be starting too.
FREE_SHARE = 0.5
# An engine takes so much of its last share of a GPU, after an allocation beside the KV cache failed.
NEXT_SHARE = 0.85
SMALLEST_CACHE_GIB = 0.25
FREE_GPU_SHARE = 0.99  # taken of the memory that was free
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
# vLLM 0.32's words, with room for other releases'. KV caches too small for one request:
_TOO_LONG = re.compile(
    r"KV\s+cache is needed, which is larger than the available KV\s+cache\s+memory \(([\d.]+) GiB\)"
)
_ESTIMATED = re.compile(r"estimated maximum model length is (\d+)")
# More asked for than is free, on a CPU and on a GPU:
_CPU_FREE = re.compile(
    r"Available memory on node \d+\s+\(([\d.]+)/[\d.]+ GiB\) on kv cache"
)
_GPU_FREE = re.compile(
    r"Free memory on device \S+ \(([\d.]+)/([\d.]+) GiB\) on startup is less than desired"
)
# An allocation failed, or the kernel ended the engine (signal 9):
_EXHAUSTED = re.compile(
    r"OutOfMemoryError|CUDA out of memory|can't allocate memory|Cannot allocate memory|\bMemoryError\b"
    r"|Failed core proc\(s\): \{[^}]*-9\b"
)


@dataclass(frozen=True, slots=True)
class Smaller:
    """An engine to start in the place of one that did not fit.

    Attributes:
        why: What happened, and what is less now, for people.
    """

    launch: EngineLaunch
    why: str


def with_less(
    launch: EngineLaunch, log: str, kv_bytes_per_token: Callable[[], int]
) -> Smaller | None:
    """Return what to start after an engine ended before it was ever ready; None: it did not end for want of memory.

    None too if there is nothing left that could be less.

    Args:
        launch: What was started.
        log: The end of its log.
        kv_bytes_per_token: Returns the KV cache of a token; called only where it counts, on a CPU.
    """
    if _TOO_LONG.search(log):
        estimate = _ESTIMATED.search(log)
        longest = launch.tier.max_model_len // 2
        if estimate:
            longest = int(estimate[1])
        return _shorter(launch, longest, "its KV cache does not hold one request")
    if launch.placement.gpus:
        return _on_gpu(launch, log)
    return _on_cpu(launch, log, kv_bytes_per_token)


def _on_cpu(
    launch: EngineLaunch, log: str, kv_bytes_per_token: Callable[[], int]
) -> Smaller | None:
    """Halve the KV cache, or fit it to what was free; if it would not hold one request, shorten the context instead."""
    free = _CPU_FREE.search(log)
    if free is None and not _EXHAUSTED.search(log):
        return None
    cache_gib = float(launch.env.get(KV_SPACE, launch.placement.kv_cache_gib))
    smaller_gib = cache_gib / 2
    why = "it ran out of memory"
    if free is not None:
        free_gib = float(free[1])
        smaller_gib = min(FREE_SHARE * free_gib, smaller_gib)
        why = f"{free_gib:.1f} GiB were free"
    # The plan places KV caches in quarters of a GiB.
    smaller_gib = int(smaller_gib * 4) / 4
    one_request_gib = launch.tier.max_model_len * kv_bytes_per_token() / GIB
    if smaller_gib < max(one_request_gib, SMALLEST_CACHE_GIB):
        return _shorter(launch, launch.tier.max_model_len // 2, why)
    placement = replace(launch.placement, kv_cache_gib=smaller_gib)
    env = {name: value for name, value in launch.env.items() if name != KV_SPACE}
    return Smaller(
        replace(launch, placement=placement, env=env),
        f"KV cache {smaller_gib:g} instead of {cache_gib:g} GiB: {why}",
    )


def _on_gpu(launch: EngineLaunch, log: str) -> Smaller | None:
    """Take less of the GPU's memory: what was free, or some less than before."""
    fraction = launch.placement.gpu_memory_fraction
    free = _GPU_FREE.search(log)
    if free is not None:
        free_gib = float(free[1])
        total_gib = float(free[2])
        smaller = _thousandths(FREE_GPU_SHARE * free_gib / total_gib)
        why = f"{free_gib:.1f} of {total_gib:.1f} GiB were free"
    elif _EXHAUSTED.search(log):
        smaller = _thousandths(fraction * NEXT_SHARE)
        why = "it ran out of memory"
    else:
        return None
    if not 0 < smaller < fraction:
        return None
    placement = replace(launch.placement, gpu_memory_fraction=smaller)
    return Smaller(
        replace(launch, placement=placement),
        f"{smaller:.1%} of the GPU instead of {fraction:.1%}: {why}",
    )


def _thousandths(share: float) -> float:
    """Round a share down to thousandths."""
    return int(share * 1000) / 1000


def _shorter(launch: EngineLaunch, longest: int, why: str) -> Smaller | None:
    length_before = launch.tier.max_model_len
    length = min(longest, length_before - 1) // CONTEXT_STEP * CONTEXT_STEP
    if length < SHORTEST_CONTEXT:
        return None
    tier = replace(launch.tier, max_model_len=length)
    return Smaller(
        replace(launch, tier=tier),
        f"context {length} instead of {length_before} tokens: {why}",
    )
