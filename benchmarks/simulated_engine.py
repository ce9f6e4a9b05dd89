"""An engine with an H100's timing, simulated: vLLM's continuous batching, step times from a roofline.

    python benchmarks/simulated_engine.py PORT PRECISION [--slower 1] [--max-num-seqs 256] [--stream-interval 16]

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

``--slower`` makes everything so many times slower than the GPU; 1 is real time. ``--stream-interval`` is vLLM's: the first
token is sent at once, later ones in events of so many. ``GET /simulation`` tells what the GPU did.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fakes.engine import PIECE, FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.applications import Starlette
    from starlette.requests import Request

HEAD = 128_256 * 4096
INNER = 8.03e9 - 2 * HEAD
KV_BYTES = 131_072
BLOCK = 16
MEMORY = 80e9 * 0.92 - 2.5 * 2**30
BANDWIDTH = 3.35e12 * 0.8
BF16_FLOPS = 989e12 * 0.6
OVERHEAD_S = 1e-3
CHUNK = 8192
BEHIND_S = 0.05  # by which the simulated clock may lag before the time is given up, and told as lost


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


@dataclass(slots=True)
class Work:
    """What the GPU did since the start. Times in seconds of the GPU's own clock.

    Attributes:
        lost_s: Wall-clock time in which this process fell behind the simulated clock.
    """

    busy_s: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    preempted: int = 0
    lost_s: float = 0.0


class SimulatedEngine(FakeEngine):
    """The fake engine of the tests, with the timing of a GPU."""

    def __init__(
        self, hardware: Hardware, slower: float = 1.0, max_num_seqs: int = 256, stream_interval: int = 16
    ) -> None:
        super().__init__(model="simulated")
        self._slower, self._interval = slower, stream_interval
        self._scheduler = Scheduler(hardware, max_num_seqs)
        self._loop: asyncio.Task[None] | None = None
        self._delta = lru_cache(4096)(self._make_delta)
        self.work = Work()

    def _routes(self) -> Starlette:
        app = super()._routes()
        app.router.routes.append(Route("/simulation", self._simulation))
        return app

    async def _simulation(self, _request: Request) -> Response:
        work = self.work
        told = {name: getattr(work, name) for name in Work.__dataclass_fields__}
        return JSONResponse(told | {"running": len(self._scheduler.running), "waiting": len(self._scheduler.waiting)})

    async def _metrics(self, request: Request) -> Response:
        scheduler = self._scheduler
        self.behaviour.running = len(scheduler.running)
        self.behaviour.kv_cache_usage = 1 - scheduler.free / scheduler.blocks
        page = bytes((await super()._metrics(request)).body).decode()
        waiting = f'num_requests_waiting{{engine="0",model_name="{self._model}"}} '
        size = f'vllm:cache_config_info{{kv_cache_size_tokens="{scheduler.blocks * BLOCK}"}} 1.0\n'
        return PlainTextResponse(page.replace(f"{waiting}0.0", f"{waiting}{float(len(scheduler.waiting))}") + size)

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        chat = request.url.path.endswith("/chat/completions")
        prompt = " ".join(str(m["content"]) for m in body["messages"]) if chat else body["prompt"]
        length = len(prompt) if isinstance(prompt, list) else len(prompt) // 4 + 6
        tokens = int(body.get("max_tokens") or 16)
        if not body.get("ignore_eos"):
            tokens = min(tokens, len(self.behaviour.answer))
        job = Job(max(length, 1), tokens)
        self._scheduler.waiting.append(job)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run_steps())
        if body.get("stream"):
            events = self._tokens(job, chat=chat, ids=bool(body.get("return_token_ids")))
            return StreamingResponse(events, media_type="text/event-stream; charset=utf-8")
        return await self._unless_disconnected(request, self._answer(job, body, chat=chat))

    async def _answer(self, job: Job, body: dict[str, Any], *, chat: bool) -> Response:
        try:
            while job.produced < job.tokens:
                await job.ready.wait()
                job.ready.clear()
        finally:
            job.gone = True
        text = self._text(0, job.tokens)
        part = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choice = {"index": 0, **part, "finish_reason": "length", **self._scores(body, job.tokens)}
        kind = "chat.completion" if chat else "text_completion"
        return JSONResponse(self._fields({"choices": [choice], "usage": self._counts(job)}, kind))

    async def _tokens(self, job: Job, *, chat: bool, ids: bool) -> AsyncIterator[bytes]:
        sent = 0
        try:
            while sent < job.tokens:
                await job.ready.wait()
                job.ready.clear()
                if (made := job.produced) > sent:
                    opening = self._chunk({"role": "assistant", "content": ""}, None, chat=True)
                    first = opening if chat and not sent else b""
                    yield first + self._delta(sent % len(self.behaviour.answer), made - sent, chat, ids)
                    sent = made
            ending = self._chunk({"content": ""}, "length", chat=chat)
            yield ending + self._event({"choices": [], "usage": self._counts(job)}, chat=chat) + b"data: [DONE]\n\n"
        finally:
            job.gone = True

    def _text(self, start: int, tokens: int) -> str:
        words = self.behaviour.answer
        return "".join(str(words[number % len(words)]) for number in range(start, start + tokens))

    def _make_delta(self, start: int, tokens: int, chat: bool, ids: bool) -> bytes:  # noqa: FBT001  the cache's key
        told = [PIECE + number % len(self.behaviour.answer) for number in range(start, start + tokens)]
        return self._chunk({"content": self._text(start, tokens)}, None, chat=chat, ids=told if ids else None)

    def _counts(self, job: Job) -> dict[str, int]:
        total = job.prompt_tokens + job.produced
        return {"prompt_tokens": job.prompt_tokens, "completion_tokens": job.produced, "total_tokens": total}

    async def _run_steps(self) -> None:
        scheduler, work, now = self._scheduler, self.work, time.monotonic()
        while step := scheduler.next_step():
            late = time.monotonic() - now - BEHIND_S
            if late > 0:
                now += late
                work.lost_s += late
            now += step.duration_s * self._slower
            await asyncio.sleep(max(now - time.monotonic(), 0))
            before = [job.produced for job, _ in step.parts]
            scheduler.finish(step)
            for (job, _), produced in zip(step.parts, before, strict=True):
                if job.produced > produced:
                    work.output_tokens += 1
                    if job.produced == 1 or job.produced % self._interval == 0 or job.produced >= job.tokens:
                        job.ready.set()
            work.busy_s += step.duration_s
            work.steps += 1
            work.prompt_tokens += sum(tokens for _, tokens in step.parts)
            work.preempted = scheduler.preemptions


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("precision", choices=HARDWARE)
    parser.add_argument("--slower", type=float, default=1.0)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--stream-interval", type=int, default=16)
    options = parser.parse_args()
    engine = SimulatedEngine(HARDWARE[options.precision], options.slower, options.max_num_seqs, options.stream_interval)
    uvicorn.run(engine.app, port=options.port, log_config=None, loop="uvloop", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
