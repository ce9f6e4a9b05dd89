"""An engine with a GPU's timing, simulated: continuous batching with chunked prefill, and step times from a roofline.

    python benchmarks/simulated_engine.py PORT PRECISION SLOWER

A simulation, not a measurement. One step computes one token of every running sequence and up to CHUNK prompt tokens; it
takes the larger of the time to read weights and KV cache and the time to compute, and a fixed overhead. Figures:

- Llama 3.1 8B: 8.03e9 parameters, of which 1.05e9 in the embedding and the output layer, which stay in BF16; 32 layers, 8 KV
  heads of 128 (its config.json): 131,072 bytes of KV cache a token in BF16.
- H100 SXM: 3.35e12 B/s, 989e12 FLOP/s dense in BF16, 1979e12 in FP8 (NVIDIA's data sheet).
- Of those, 80 % of the bandwidth, 60 % of the BF16 and 50 % of the FP8 compute are taken to be reached (assumptions).
- 4-bit weights are computed with in BF16 after being unpacked. MARLIN (arXiv 2408.11743) keeps close to the ideal speed-up
  up to batches of 16 to 32 and loses it beyond: 45 % of the BF16 compute is taken to be reached (assumption).
- 0.3 ms a step for scheduling and launching (assumption).

Everything is made SLOWER times slower, so that the router and the load, which share a small machine, are not what is
measured.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.responses import JSONResponse, Response, StreamingResponse

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.fakes.engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

PARAMETERS, UNQUANTIZED = 8.03e9, 1.05e9
KV_BYTES = 131_072
BANDWIDTH = 3.35e12 * 0.8
OVERHEAD_S = 0.3e-3
CHUNK = 2048
MAX_NUM_SEQS = 256
INNER = PARAMETERS - UNQUANTIZED


@dataclass(frozen=True, slots=True)
class Hardware:
    """What one precision reads and computes: bytes of weights, FLOP/s reached."""

    weight_bytes: float
    flops: float

    def step_s(self, sequences: int, prompt_tokens: int, context_tokens: int) -> float:
        """Return the time of a step."""
        memory = (self.weight_bytes + KV_BYTES * context_tokens) / BANDWIDTH
        compute = 2 * PARAMETERS * (sequences + prompt_tokens) / self.flops
        return max(memory, compute) + OVERHEAD_S


HARDWARE = {
    "fast": Hardware(2 * UNQUANTIZED + 0.52 * INNER, 0.45 * 989e12),
    "balanced": Hardware(2 * UNQUANTIZED + INNER, 0.50 * 1979e12),
    "precise": Hardware(2 * PARAMETERS, 0.60 * 989e12),
}


@dataclass(slots=True, eq=False)
class Job:
    """One request."""

    prompt_tokens: int
    tokens: int
    prefill_left: int
    produced: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    gone: bool = False


class SimulatedEngine(FakeEngine):
    """The fake engine of the tests, with the timing of a GPU."""

    def __init__(self, hardware: Hardware, slower: float) -> None:
        super().__init__(model="simulated")
        self._hardware, self._slower = hardware, slower
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._loop: asyncio.Task[None] | None = None

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        chat = request.url.path.endswith("/chat/completions")
        prompt = " ".join(str(m["content"]) for m in body["messages"]) if chat else body["prompt"]
        length = len(prompt) if isinstance(prompt, list) else len(prompt) // 4 + 6
        tokens = int(body.get("max_tokens") or 16)
        if not body.get("ignore_eos"):
            tokens = min(tokens, len(self.behaviour.answer))
        job = Job(length, tokens, length)
        self._waiting.append(job)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._compute())
        if body.get("stream"):
            return StreamingResponse(self._tokens(job, chat=chat), media_type="text/event-stream; charset=utf-8")
        async for _ in self._tokens(job, chat=chat):
            pass
        part = {"message": {"role": "assistant", "content": "x"}} if chat else {"text": "x"}
        return JSONResponse(
            self._fields({"choices": [{"index": 0, **part, "finish_reason": "length"}], "usage": self._counts(job)})
        )

    async def _tokens(self, job: Job, *, chat: bool) -> AsyncIterator[bytes]:
        words = self.behaviour.answer
        chunks = [self._chunk({"content": word}, None, chat=chat) for word in words]
        sent = 0
        try:
            while sent < job.tokens:
                await job.ready.wait()
                job.ready.clear()
                while sent < job.produced:
                    yield chunks[sent % len(words)]
                    sent += 1
            yield self._chunk({"content": ""}, "length", chat=chat)
            yield self._event({"choices": [], "usage": self._counts(job)})
            yield b"data: [DONE]\n\n"
        finally:
            job.gone = True

    def _counts(self, job: Job) -> dict[str, int]:
        return {
            "prompt_tokens": job.prompt_tokens,
            "completion_tokens": job.produced,
            "total_tokens": job.prompt_tokens + job.produced,
        }

    async def _compute(self) -> None:
        """Run steps for as long as there are requests."""
        now = time.monotonic()
        while self._waiting or self._running:
            while self._waiting and len(self._running) < MAX_NUM_SEQS:
                self._running.append(self._waiting.popleft())
            decoding = [job for job in self._running if not job.prefill_left]
            budget, chunks = CHUNK - len(decoding), []
            for job in self._running:
                if job.prefill_left and budget > 0:
                    part = min(job.prefill_left, budget)
                    budget -= part
                    chunks.append((job, part))
            prompt = sum(part for _, part in chunks)
            context = sum(job.prompt_tokens + job.produced for job in decoding) + prompt
            now = max(now, time.monotonic() - 0.05)  # do not run after what the machine could not keep up with
            now += self._hardware.step_s(len(decoding), prompt, context) * self._slower
            await asyncio.sleep(max(now - time.monotonic(), 0))
            for job, part in chunks:
                job.prefill_left -= part
            for job in [*decoding, *(job for job, _ in chunks if not job.prefill_left)]:
                job.produced += 1
                job.ready.set()
            self._running = [job for job in self._running if job.produced < job.tokens and not job.gone]
            self.behaviour.running = len(self._running)


def main() -> None:
    """Serve."""
    port, precision, slower = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    engine = SimulatedEngine(HARDWARE[precision], slower)
    uvicorn.run(engine.app, port=port, log_config=None, loop="uvloop", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    main()
