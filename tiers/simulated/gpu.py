"""A GPU's timing with vLLM on it: continuous batching, step times from a roofline.

A simulation, not a measurement. ``Scheduler`` batches as vLLM 0.32 does (``v1/core/sched/scheduler.py``): each step computes
one token of every running sequence and prompt chunks of the rest, up to 8,192 tokens in all; running sequences come
first, then waiting ones in order. KV cache is given out in blocks; where none is free, the youngest sequence is preempted
and computed again later. Blocks of prompts stay in the cache, known by a hash of all text up to their end, until their room
is needed (``v1/core/block_pool.py``); those of answers do not. Jobs without hashes share nothing. Times are those of the
plan's roofline (``tiers.sizing.roofline``).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiers.plan import GIB, GPU_OVERHEAD_GIB, GPU_RESERVE
from tiers.sizing.architecture import Architecture, architecture
from tiers.sizing.named_gpus import parse_gpus
from tiers.sizing.roofline import PREFILL_CHUNK_TOKENS, Roofline
from tiers.sizing.tier_format import STANDARD_FORMATS, TierFormat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiers.sizing.hardware import GpuKind
    from tiers.spec import TierName

BLOCK = 16  # tokens
LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one engine runs on: its speed, and the tokens that its KV cache holds, in whole blocks."""

    speed: Roofline
    kv_tokens: int


def hardware(
    tier: TierName,
    model: Architecture,
    gpu: GpuKind,
    gpus: int = 1,
    formats: Mapping[TierName, TierFormat] = STANDARD_FORMATS,
) -> Hardware:
    """Return what an engine of a tier runs on."""
    tier_format = formats[tier]
    weight_bytes = tier_format.weight_bytes(model)
    usable_bytes = gpu.memory_bytes * (1 - GPU_RESERVE) - GPU_OVERHEAD_GIB * GIB
    kv_cache_bytes = gpus * usable_bytes - weight_bytes
    kv_bytes_per_value = tier_format.kv_bytes_per_value
    block_bytes = model.kv_bytes_per_token(kv_bytes_per_value) * BLOCK
    kv_tokens = int(kv_cache_bytes // block_bytes) * BLOCK
    speed = Roofline(
        model=model,
        gpu=gpu,
        number_format=tier_format.number_format,
        gpus=gpus,
        kv_bytes_per_value=kv_bytes_per_value,
        dense_format=tier_format.dense_format,
    )
    return Hardware(speed, kv_tokens)


HARDWARE = {
    tier: hardware(tier, architecture(LLAMA_8B), parse_gpus("H100")[0])
    for tier in STANDARD_FORMATS
}


@dataclass(slots=True, eq=False)
class Job:
    """One request.

    Attributes:
        prompt_tokens: At least one.
        tokens: Of the answer, at least one.
        produced: Tokens so far.
        computed: Tokens in the KV cache.
        blocks: Blocks of the KV cache that it holds.
        preempted: How often it was preempted.
        ready: Set when there is something to send.
        gone: The client has left.
        hashes: Of each whole block of the prompt, with all text before it.
        shared: Its first blocks that are in the prefix cache.
        cached: Tokens of the prompt that were in the prefix cache when it was begun first; None: it was not begun yet.
    """

    prompt_tokens: int
    tokens: int
    produced: int = 0
    computed: int = 0
    blocks: int = 0
    preempted: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    gone: bool = False
    hashes: tuple[int, ...] = ()
    shared: int = 0
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class GpuStep:
    """One step: each job with the tokens that are computed for it, and its time on the GPU."""

    parts: tuple[tuple[Job, int], ...]
    duration_s: float


class Scheduler:
    """vLLM's scheduling of one engine; it knows no clock."""

    def __init__(
        self, hardware: Hardware, max_num_seqs: int = 256, kv_tokens: int | None = None
    ) -> None:
        if kv_tokens is None:
            kv_tokens = hardware.kv_tokens
        self._hardware = hardware
        self._max_num_seqs = max_num_seqs
        self.blocks = kv_tokens // BLOCK
        self.free = self.blocks
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.preemptions = 0
        # How many jobs use each block of the prefix cache. Those that none uses count as free, and come first in the order
        # in which they are evicted.
        self._users: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()
        self.cache_queries = 0
        self.cache_hits = 0

    def next_step(self) -> GpuStep | None:
        """Take blocks for the next step, and return it; None: there is nothing to compute."""
        self._drop_ended()
        preemptions_before = self.preemptions
        parts = self._continue_running()
        # After a preemption vLLM takes up no waiting sequence in the same step.
        if self.preemptions == preemptions_before:
            self._take_up_waiting(parts)
        if not parts:
            return None
        sampled = sum(
            job.computed + tokens == job.prompt_tokens + job.produced
            for job, tokens in parts
        )
        context = sum(job.computed for job, _ in parts)
        duration_ms = self._hardware.speed.mixed_ms(_tokens_of(parts), sampled, context)
        return GpuStep(tuple(parts), duration_ms / 1000)

    def _continue_running(self) -> list[tuple[Job, int]]:
        """Return the running jobs with the tokens that the next step computes for each."""
        parts: list[tuple[Job, int]] = []
        budget = PREFILL_CHUNK_TOKENS
        position = 0
        while position < len(self.running) and budget > 0:
            job = self.running[position]
            tokens = min(job.prompt_tokens + job.produced - job.computed, budget)
            # Without free blocks the youngest jobs give up theirs, at last this one itself.
            while position < len(self.running) and not self._holds(job, tokens):
                self._preempt(self.running[-1])
            if position < len(self.running):
                parts.append((job, tokens))
                budget -= tokens
            position += 1
        return parts

    def _take_up_waiting(self, parts: list[tuple[Job, int]]) -> None:
        """Add waiting jobs to a step, in order, while there are tokens, sequences and blocks left."""
        budget = PREFILL_CHUNK_TOKENS - _tokens_of(parts)
        while self.waiting and len(self.running) < self._max_num_seqs and budget > 0:
            job = self.waiting[0]
            self._take_cached(job)
            tokens = min(job.prompt_tokens + job.produced - job.computed, budget)
            if not self._holds(job, tokens):
                self._free(job)
                job.computed = 0
                return
            self._note_begun(job)
            self.running.append(self.waiting.popleft())
            parts.append((job, tokens))
            budget -= tokens

    def finish(self, step: GpuStep) -> None:
        """Note what a step has computed; sequences that are complete leave."""
        for job, tokens in step.parts:
            job.computed += tokens
            self._share_computed(job)
            if job.computed == job.prompt_tokens + job.produced:
                job.produced += 1
        self._drop_ended()

    def _drop_ended(self) -> None:
        """Free the blocks of complete answers, and of clients that have left."""
        running = self.running
        ended = [job for job in running if job.gone or job.produced >= job.tokens]
        if ended:
            self.running = [
                job for job in running if not job.gone and job.produced < job.tokens
            ]
            for job in ended:
                self._free(job)
        while self.waiting and self.waiting[0].gone:
            self.waiting.popleft()

    def _holds(self, job: Job, tokens: int) -> bool:
        """Take the blocks that a job needs for more tokens, if there are so many."""
        blocks = -(-(job.computed + tokens) // BLOCK)  # rounded up
        more_blocks = blocks - job.blocks
        if more_blocks > self.free:
            return False
        job.blocks += more_blocks
        self.free -= more_blocks
        while len(self._unused) > self.free:
            evicted, _ = self._unused.popitem(last=False)
            del self._users[evicted]
        return True

    def _take_cached(self, job: Job) -> None:
        """Give a job the first blocks of its prompt that are in the prefix cache; its last token is always computed."""
        most_blocks = (job.prompt_tokens - 1) // BLOCK
        for block in job.hashes[:most_blocks]:
            if block not in self._users:
                break
            if not self._users[block]:
                del self._unused[block]
                self.free -= 1
            self._users[block] += 1
            job.shared += 1
        job.blocks = job.shared
        job.computed = job.shared * BLOCK

    def _note_begun(self, job: Job) -> None:
        """Count what the prefix cache had of a prompt that is begun for the first time."""
        if job.cached is None:
            job.cached = job.computed
            self.cache_queries += job.prompt_tokens
            self.cache_hits += job.cached

    def _share_computed(self, job: Job) -> None:
        """Add the blocks of a prompt that are computed by now to the prefix cache.

        They end where another job has computed the same block meanwhile: vLLM keeps both, but finds one.
        """
        computed_blocks = job.computed // BLOCK
        for block in job.hashes[job.shared : computed_blocks]:
            if block in self._users:
                return
            self._users[block] = 1
            job.shared += 1

    def _preempt(self, job: Job) -> None:
        """Take a job's blocks from it, and have it computed again as soon as there is room."""
        self.running.remove(job)
        self._free(job)
        job.computed = 0
        job.preempted += 1
        self.preemptions += 1
        self.waiting.appendleft(job)

    def _free(self, job: Job) -> None:
        """Free a job's blocks. Those of the prefix cache stay until their room is needed, the last ones first to go."""
        self.free += job.blocks - job.shared
        for block in reversed(job.hashes[: job.shared]):
            self._users[block] -= 1
            if not self._users[block]:
                self._unused[block] = None
                self.free += 1
        job.blocks = 0
        job.shared = 0


def _tokens_of(parts: list[tuple[Job, int]]) -> int:
    return sum(tokens for _, tokens in parts)


def offline(
    hardware: Hardware,
    prompt_tokens: int,
    tokens: int,
    requests: int = 4000,
    max_num_seqs: int = 1024,
) -> float:
    """Return the output tokens a second of an engine that is given all requests at once."""
    scheduler = Scheduler(hardware, max_num_seqs)
    scheduler.waiting.extend(Job(prompt_tokens, tokens) for _ in range(requests))
    duration_s = 0.0
    while step := scheduler.next_step():
        duration_s += step.duration_s
        scheduler.finish(step)
    return requests * tokens / duration_s
