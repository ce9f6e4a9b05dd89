"""An engine with a GPU's timing, simulated: as much of vLLM's API as the router and its page use; the text is filler.

    python -m tiers.simulated.engine PORT PRECISION [--slower 1] [--max-num-seqs 256] [--stream-interval 16]

``--slower`` makes everything so many times slower than the GPU; 1 is real time. ``--stream-interval`` is vLLM's: the first
token is sent at once, later ones in events of so many. ``GET /simulation`` tells what the GPU did.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.responses import (
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from tiers.simulated.gpu import BLOCK, HARDWARE, Hardware, Job, Scheduler
from tiers.simulated.surface import Surface

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

MODEL = "simulated"
TEXT = (
    "This is simulated text: no model wrote it. The engine only takes the time that a GPU would take for an answer of this "
    "length, so that the router has engines to choose from and the page has something to show. With real engines, the "
    "answer to your prompt stands here."
)
PIECES = (
    *(f" {word}" if number else word for number, word in enumerate(TEXT.split())),
    "\n\n",
)
PIECE = 1000  # id of the first piece
TEMPLATE_TOKENS = 6
# of answers that end by themselves: median, sigma of its logarithm
USUAL_TOKENS, SPREAD, MOST_TOKENS = 110, 0.6, 400
# by which the simulated clock may lag before the time is given up, and told as lost
BEHIND_S = 0.05


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


class SimulatedEngine(Surface):
    """The application of one engine, ``app``."""

    def __init__(
        self,
        hardware: Hardware,
        slower: float = 1.0,
        max_num_seqs: int = 256,
        stream_interval: int = 16,
    ) -> None:
        super().__init__(MODEL)
        self._slower, self._interval = slower, stream_interval
        self._scheduler = Scheduler(hardware, max_num_seqs)
        self._loop: asyncio.Task[None] | None = None
        self._delta = lru_cache(4096)(self._make_delta)
        self.work = Work()
        self.app = Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/simulation", self._simulation),
                Route("/v1/models", self._models),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/v1/completions", self._generate, methods=["POST"]),
                Route("/v1/chat/completions", self._generate, methods=["POST"]),
            ]
        )

    async def _health(self, _request: Request) -> Response:
        return Response()

    async def _simulation(self, _request: Request) -> Response:
        scheduler = self._scheduler
        return JSONResponse(
            asdict(self.work)
            | {"running": len(scheduler.running), "waiting": len(scheduler.waiting)}
        )

    async def _metrics(self, _request: Request) -> Response:
        scheduler, label = self._scheduler, f'{{engine="0",model_name="{MODEL}"}}'
        figures = {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "kv_cache_usage_perc": 1 - scheduler.free / scheduler.blocks,
            "prompt_tokens_total": self.work.prompt_tokens,
            "generation_tokens_total": self.work.output_tokens,
        }
        page = "".join(
            f"vllm:{name}{label} {float(figure)}\n" for name, figure in figures.items()
        )
        size = f'vllm:cache_config_info{{kv_cache_size_tokens="{scheduler.blocks * BLOCK}"}} 1.0\n'
        return PlainTextResponse(page + size)

    async def _models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(MODEL, 8192)]})

    async def _tokenize(self, request: Request) -> Response:
        tokens = list(range(_prompt_tokens(await request.json())))
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": 8192,
                "tokens": tokens,
                "token_strs": None,
            }
        )

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        chat = request.url.path.endswith("/chat/completions")
        tokens, usual = (
            int(body.get("max_tokens") or (MOST_TOKENS if chat else 16)),
            _usual_tokens(body),
        )
        reason = "length" if body.get("ignore_eos") or tokens <= usual else "stop"
        job = Job(max(_prompt_tokens(body), 1), tokens if reason == "length" else usual)
        self._scheduler.waiting.append(job)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run_steps())
        if body.get("stream"):
            events = self._tokens(
                job, reason, chat=chat, ids=bool(body.get("return_token_ids"))
            )
            return StreamingResponse(
                events, media_type="text/event-stream; charset=utf-8"
            )
        return await self._unless_disconnected(
            request, self._answer(job, reason, chat=chat)
        )

    async def _answer(self, job: Job, reason: str, *, chat: bool) -> Response:
        try:
            while job.produced < job.tokens:
                await job.ready.wait()
                job.ready.clear()
        finally:
            job.gone = True
        text = _text(0, job.tokens)
        part = (
            {"message": {"role": "assistant", "content": text}}
            if chat
            else {"text": text}
        )
        choice = {"index": 0, **part, "finish_reason": reason}
        kind = "chat.completion" if chat else "text_completion"
        return JSONResponse(
            self._fields({"choices": [choice], "usage": _counts(job)}, kind)
        )

    async def _tokens(
        self, job: Job, reason: str, *, chat: bool, ids: bool
    ) -> AsyncIterator[bytes]:
        sent = 0
        try:
            while sent < job.tokens:
                await job.ready.wait()
                job.ready.clear()
                if (made := job.produced) > sent:
                    opening = self._chunk(
                        {"role": "assistant", "content": ""}, None, chat=True
                    )
                    first = opening if chat and not sent else b""
                    yield first + self._delta(
                        sent % len(PIECES), made - sent, chat, ids
                    )
                    sent = made
            ending = self._chunk({"content": ""}, reason, chat=chat)
            yield (
                ending
                + self._event({"choices": [], "usage": _counts(job)}, chat=chat)
                + b"data: [DONE]\n\n"
            )
        finally:
            job.gone = True

    def _make_delta(self, start: int, tokens: int, chat: bool, ids: bool) -> bytes:  # noqa: FBT001  the cache's key
        told = [PIECE + number % len(PIECES) for number in range(start, start + tokens)]
        return self._chunk(
            {"content": _text(start, tokens)},
            None,
            chat=chat,
            ids=told if ids else None,
        )

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
                    if (
                        job.produced == 1
                        or job.produced % self._interval == 0
                        or job.produced >= job.tokens
                    ):
                        job.ready.set()
            work.busy_s += step.duration_s
            work.steps += 1
            work.prompt_tokens += sum(tokens for _, tokens in step.parts)
            work.preempted = scheduler.preemptions


def _prompt_tokens(body: dict[str, Any]) -> int:
    """Estimate the tokens of a prompt, of a chat, or count those given as ids."""
    if isinstance(prompt := body.get("prompt"), list):
        return len(prompt)
    if "messages" not in body:
        return len(prompt or "") // 4
    return (
        len(" ".join(str(message["content"]) for message in body["messages"])) // 4
        + TEMPLATE_TOKENS
    )


def _usual_tokens(body: dict[str, Any]) -> int:
    """Return the length of an answer that ends by itself: as varied as answers are, the same for the same prompt."""
    chance = random.Random(str(body.get("messages", body.get("prompt"))))  # noqa: S311  no secret
    return min(int(chance.lognormvariate(0, SPREAD) * USUAL_TOKENS) + 1, MOST_TOKENS)


def _text(start: int, tokens: int) -> str:
    return "".join(
        PIECES[number % len(PIECES)] for number in range(start, start + tokens)
    )


def _counts(job: Job) -> dict[str, int]:
    total = job.prompt_tokens + job.produced
    return {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": job.produced,
        "total_tokens": total,
    }


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("port", type=int)
    parser.add_argument("precision", choices=HARDWARE)
    parser.add_argument("--slower", type=float, default=1.0)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--stream-interval", type=int, default=16)
    options = parser.parse_args()
    engine = SimulatedEngine(
        HARDWARE[options.precision],
        options.slower,
        options.max_num_seqs,
        options.stream_interval,
    )
    uvicorn.run(
        engine.app,
        port=options.port,
        log_config=None,
        loop="uvloop",
        timeout_graceful_shutdown=1,
    )


if __name__ == "__main__":
    main()
