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
SHORTEST = 512  # tokens of context that are still of use
BLOCK = 64  # tokens that contexts are multiples of
FREE_SHARE = 0.5  # of the memory that vLLM found free: other engines may be starting too
SMALLER = 0.85  # of the share of a GPU, after an allocation beside the KV cache failed
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
# vLLM 0.32's words, with room for other releases'. KV caches too small for one request:
_TOO_LONG = re.compile(r"KV\s+cache is needed, which is larger than the available KV\s+cache\s+memory \(([\d.]+) GiB\)")
_ESTIMATED = re.compile(r"estimated maximum model length is (\d+)")
# More asked for than is free, on a CPU and on a GPU:
_CPU_FREE = re.compile(r"Available memory on node \d+\s+\(([\d.]+)/[\d.]+ GiB\) on kv cache")
_GPU_FREE = re.compile(r"Free memory on device \S+ \(([\d.]+)/([\d.]+) GiB\) on startup is less than desired")
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


def with_less(launch: EngineLaunch, log: str, kv_bytes_per_token: Callable[[], int]) -> Smaller | None:
    """Return what to start after an engine ended before it was ever ready; None: it did not end for want of memory.

    None too if there is nothing left that could be less.

    Args:
        launch: What was started.
        log: The end of its log.
        kv_bytes_per_token: Returns the KV cache of a token; called only where it counts, on a CPU.
    """
    if _TOO_LONG.search(log):
        found = _ESTIMATED.search(log)
        longest = int(found[1]) if found else launch.tier.max_model_len // 2
        return _shorter(launch, longest, "its KV cache does not hold one request")
    if launch.placement.gpus:
        return _on_gpu(launch, log)
    free = _CPU_FREE.search(log)
    if free is None and not _EXHAUSTED.search(log):
        return None
    why = "it ran out of memory" if free is None else f"{float(free[1]):.1f} GiB were free"
    had = float(launch.env.get(KV_SPACE, launch.placement.kv_cache_gib))
    space = had / 2 if free is None else min(FREE_SHARE * float(free[1]), had / 2)
    space = int(space * 4) / 4  # quarters of a GiB
    one_request = launch.tier.max_model_len * kv_bytes_per_token() / GIB
    if space >= max(one_request, 0.25):
        placement = replace(launch.placement, kv_cache_gib=space)
        env = {name: value for name, value in launch.env.items() if name != KV_SPACE}
        return Smaller(
            replace(launch, placement=placement, env=env), f"KV cache {space:g} instead of {had:g} GiB: {why}"
        )
    return _shorter(launch, launch.tier.max_model_len // 2, why)


def _on_gpu(launch: EngineLaunch, log: str) -> Smaller | None:
    fraction, why = launch.placement.gpu_memory_fraction, "it ran out of memory"
    free = _GPU_FREE.search(log)
    if free is not None:
        found, total = float(free[1]), float(free[2])
        less, why = int(0.99 * found / total * 1000) / 1000, f"{found:.1f} of {total:.1f} GiB were free"
    elif _EXHAUSTED.search(log):
        less = int(fraction * SMALLER * 1000) / 1000
    else:
        return None
    if not 0 < less < fraction:
        return None
    placement = replace(launch.placement, gpu_memory_fraction=less)
    return Smaller(replace(launch, placement=placement), f"{less:.1%} of the GPU instead of {fraction:.1%}: {why}")


def _shorter(launch: EngineLaunch, longest: int, why: str) -> Smaller | None:
    had = launch.tier.max_model_len
    length = min(longest, had - 1) // BLOCK * BLOCK
    if length < SHORTEST:
        return None
    tier = replace(launch.tier, max_model_len=length)
    return Smaller(replace(launch, tier=tier), f"context {length} instead of {had} tokens: {why}")
