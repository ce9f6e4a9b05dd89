"""A GPU's timing with vLLM on it: continuous batching, step times from a roofline.

A simulation, not a measurement. ``Scheduler`` batches as vLLM 0.32 does (``v1/core/sched/scheduler.py``): each step computes
one token of every running sequence and prompt chunks of the rest, up to 8,192 tokens in all; running sequences come
first, then waiting ones in order. KV cache is given out in blocks; where none is free, the youngest sequence is preempted
and computed again later. There is no prefix cache. Times are those of the plan's roofline (``tiers.sizing.roofline``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiers.plan import GIB, GPU_OVERHEAD_GIB, GPU_RESERVE
from tiers.sizing.architecture import Architecture, architecture
from tiers.sizing.named_gpus import parse_gpus
from tiers.sizing.roofline import BYTES_PER_WEIGHT, PREFILL_CHUNK_TOKENS, Roofline
from tiers.spec import PRECISIONS, TierName

if TYPE_CHECKING:
    from tiers.sizing.hardware import GpuKind

BLOCK = 16
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
    tier: TierName, model: Architecture, gpu: GpuKind, gpus: int = 1
) -> Hardware:
    """Return what an engine of a tier runs on."""
    weights = model.weight_bytes(BYTES_PER_WEIGHT[PRECISIONS[tier]])
    free = (
        gpus * (gpu.memory_bytes * (1 - GPU_RESERVE) - GPU_OVERHEAD_GIB * GIB) - weights
    )
    kv_tokens = int(free // (model.kv_bytes_per_token() * BLOCK)) * BLOCK
    return Hardware(Roofline(model, gpu, PRECISIONS[tier], gpus), kv_tokens)


HARDWARE = {
    tier: hardware(tier, architecture(LLAMA_8B), parse_gpus("H100")[0])
    for tier in PRECISIONS
}


@dataclass(slots=True, eq=False)
class Job:
    """One request.

    Attributes:
        prompt_tokens: At least one.
        tokens: Of the answer, at least one.
        produced: Tokens so far.
        computed: Tokens in the KV cache.
        blocks: Of it.
        ready: Set when there is something to send.
        gone: The client has left.
    """

    prompt_tokens: int
    tokens: int
    produced: int = 0
    computed: int = 0
    blocks: int = 0
    preempted: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One step: each job with the tokens that are computed for it, and its time on the GPU."""

    parts: tuple[tuple[Job, int], ...]
    duration_s: float


class Scheduler:
    """vLLM's scheduling of one engine; it knows no clock."""

    def __init__(
        self, hardware: Hardware, max_num_seqs: int = 256, kv_tokens: int | None = None
    ) -> None:
        self._hardware, self._max_num_seqs = hardware, max_num_seqs
        self.blocks = (hardware.kv_tokens if kv_tokens is None else kv_tokens) // BLOCK
        self.free = self.blocks
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.preemptions = 0

    def next_step(self) -> Step | None:
        """Take blocks for the next step, and return it; None: there is nothing to compute."""
        self._drop()
        parts, budget, preempted, at = [], PREFILL_CHUNK_TOKENS, self.preemptions, 0
        while at < len(self.running) and budget > 0:
            job = self.running[at]
            tokens = min(job.prompt_tokens + job.produced - job.computed, budget)
            while at < len(self.running) and not self._holds(job, tokens):
                self._preempt(self.running[-1])
            if at < len(self.running):
                parts.append((job, tokens))
                budget -= tokens
            at += 1
        while (
            self.waiting
            and len(self.running) < self._max_num_seqs
            and budget > 0
            and preempted == self.preemptions
        ):
            job = self.waiting[0]
            tokens = min(job.prompt_tokens + job.produced, budget)
            if not self._holds(job, tokens):
                break
            self.running.append(self.waiting.popleft())
            parts.append((job, tokens))
            budget -= tokens
        if not parts:
            return None
        sampled = sum(
            job.computed + tokens == job.prompt_tokens + job.produced
            for job, tokens in parts
        )
        context = sum(job.computed for job, _ in parts)
        return Step(
            tuple(parts),
            self._hardware.speed.mixed_ms(
                PREFILL_CHUNK_TOKENS - budget, sampled, context
            )
            / 1000,
        )

    def finish(self, step: Step) -> None:
        """Note what a step has computed; sequences that are complete leave."""
        for job, tokens in step.parts:
            job.computed += tokens
            if job.computed == job.prompt_tokens + job.produced:
                job.produced += 1
        self._drop()

    def _drop(self) -> None:
        """Free the blocks of complete answers, and of clients that have left."""
        left = [job for job in self.running if job.gone or job.produced >= job.tokens]
        if left:
            self.running = [
                job
                for job in self.running
                if not job.gone and job.produced < job.tokens
            ]
            for job in left:
                self._free(job)
        while self.waiting and self.waiting[0].gone:
            self.waiting.popleft()

    def _holds(self, job: Job, tokens: int) -> bool:
        """Take the blocks that a job needs for more tokens, if there are so many."""
        needed = -(-(job.computed + tokens) // BLOCK) - job.blocks
        if needed > self.free:
            return False
        job.blocks += needed
        self.free -= needed
        return True

    def _preempt(self, job: Job) -> None:
        self.running.remove(job)
        self._free(job)
        job.computed = 0
        job.preempted += 1
        self.preemptions += 1
        self.waiting.appendleft(job)

    def _free(self, job: Job) -> None:
        self.free += job.blocks
        job.blocks = 0


def offline(
    hardware: Hardware,
    prompt_tokens: int,
    tokens: int,
    requests: int = 4000,
    max_num_seqs: int = 1024,
) -> float:
    """Return the output tokens a second of an engine that is given all requests at once."""
    scheduler, took = Scheduler(hardware, max_num_seqs), 0.0
    scheduler.waiting.extend(Job(prompt_tokens, tokens) for _ in range(requests))
    while step := scheduler.next_step():
        took += step.duration_s
        scheduler.finish(step)
    return requests * tokens / took
