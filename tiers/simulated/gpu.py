"""A GPU's timing with vLLM on it: continuous batching, step times from a roofline.

A simulation, not a measurement. ``Scheduler`` batches as vLLM 0.32 does (``v1/core/sched/scheduler.py``): each step computes
one token of every running sequence and prompt chunks of the rest, up to ``CHUNK`` tokens in all; running sequences come
first, then waiting ones in order. KV cache is given out in blocks; where none is free, the youngest sequence is preempted
and computed again later. There is no prefix cache. A step takes the longer of the time to read (weights once, KV cache of
every sequence) and the time to compute, and an overhead. Attention's own FLOPs are left out (3 % at 1,000 tokens).

Published figures:

- Llama 3.1 8B (its config.json): 8.03e9 parameters, 128,256 x 4,096 of them in the embedding, which no step reads as a
  whole, and as many in the output layer, which stays in BF16 and computes sampled tokens only; 32 layers with 8 KV heads of
  128: 131,072 bytes of KV cache a token. So weights take 16.1 GB in BF16, 9.1 GB in FP8 and, at 0.52 bytes a parameter, 5.7
  GB in AWQ int4, as the published checkpoints do.
- H100 SXM (NVIDIA's data sheet): 80 GB, 3.35e12 B/s, 989e12 FLOP/s dense in BF16, 1979e12 in FP8.
- vLLM on 80 GB: 0.92 of the memory, 8,192 tokens a step (its defaults).
- AWQ's kernels unpack to BF16 and multiply in BF16, so prompts are no faster than with BF16 weights. MARLIN (arXiv
  2408.11743) is near the ideal speed-up up to batches of 16 to 32.

Assumptions: 80 % of the bandwidth is reached, and of the compute 60 % in BF16, 45 % in FP8, 45 % of BF16's with 4-bit
weights; 1 ms a step for scheduling, sampling and the kernels' gaps; 2.5 GiB for activations and CUDA graphs. What they
come to, ``offline`` below tells: FP8, fed with 800-token prompts and 128-token answers, does 7,100 tokens a second; Red
Hat's MLPerf 5.1 result for vLLM with FP8 Llama 3.1 8B on one H100, summaries of news of up to 128 tokens, is 5,777. So
times are on the fast side.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

HEAD = 128_256 * 4096
INNER = 8.03e9 - 2 * HEAD
KV_BYTES = 131_072
BLOCK = 16
MEMORY = 80e9 * 0.92 - 2.5 * 2**30
BANDWIDTH = 3.35e12 * 0.8
BF16_FLOPS = 989e12 * 0.6
OVERHEAD_S = 1e-3
CHUNK = 8192


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU with weights of one precision.

    Attributes:
        inner_bytes: Of the weights but embedding and output layer.
        flops: FLOP/s reached with them.
    """

    inner_bytes: float
    flops: float

    @property
    def kv_tokens(self) -> int:
        """Return the tokens that the KV cache holds, in whole blocks."""
        free = MEMORY - self.inner_bytes - 2 * 2 * HEAD
        return int(free // (KV_BYTES * BLOCK)) * BLOCK

    def step_s(self, tokens: int, sampled: int, context_tokens: int) -> float:
        """Return the time of a step on the GPU, in seconds.

        Args:
            tokens: Computed: one for each decoded sequence, and prompt tokens.
            sampled: Sequences that get a token.
            context_tokens: In the KV cache of the step's sequences.
        """
        read = (self.inner_bytes + 2 * HEAD + KV_BYTES * context_tokens) / BANDWIDTH
        compute = 2 * INNER * tokens / self.flops + 2 * HEAD * sampled / BF16_FLOPS
        return max(read, compute) + OVERHEAD_S


HARDWARE = {
    "fast": Hardware(0.52 * INNER, 0.45 * 989e12),
    "balanced": Hardware(INNER, 0.45 * 1979e12),
    "precise": Hardware(2 * INNER, BF16_FLOPS),
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

    def __init__(self, hardware: Hardware, max_num_seqs: int = 256, kv_tokens: int | None = None) -> None:
        self._hardware, self._max_num_seqs = hardware, max_num_seqs
        self.blocks = (hardware.kv_tokens if kv_tokens is None else kv_tokens) // BLOCK
        self.free = self.blocks
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.preemptions = 0

    def next_step(self) -> Step | None:
        """Take blocks for the next step, and return it; None: there is nothing to compute."""
        self._drop()
        parts, budget, preempted, at = [], CHUNK, self.preemptions, 0
        while at < len(self.running) and budget > 0:
            job = self.running[at]
            tokens = min(job.prompt_tokens + job.produced - job.computed, budget)
            while at < len(self.running) and not self._holds(job, tokens):
                self._preempt(self.running[-1])
            if at < len(self.running):
                parts.append((job, tokens))
                budget -= tokens
            at += 1
        while self.waiting and len(self.running) < self._max_num_seqs and budget > 0 and preempted == self.preemptions:
            job = self.waiting[0]
            tokens = min(job.prompt_tokens + job.produced, budget)
            if not self._holds(job, tokens):
                break
            self.running.append(self.waiting.popleft())
            parts.append((job, tokens))
            budget -= tokens
        if not parts:
            return None
        sampled = sum(job.computed + tokens == job.prompt_tokens + job.produced for job, tokens in parts)
        context = sum(job.computed for job, _ in parts)
        return Step(tuple(parts), self._hardware.step_s(CHUNK - budget, sampled, context))

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
            self.running = [job for job in self.running if not job.gone and job.produced < job.tokens]
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
    hardware: Hardware, prompt_tokens: int, tokens: int, requests: int = 4000, max_num_seqs: int = 1024
) -> float:
    """Return the output tokens a second of an engine that is given all requests at once."""
    scheduler, took = Scheduler(hardware, max_num_seqs), 0.0
    scheduler.waiting.extend(Job(prompt_tokens, tokens) for _ in range(requests))
    while step := scheduler.next_step():
        took += step.duration_s
        scheduler.finish(step)
    return requests * tokens / took
