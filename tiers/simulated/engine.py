"""An engine with a GPU's timing, simulated: as much of vLLM's API as the router and its page use; the text is filler.

    python -m tiers.simulated.engine PORT PRECISION [--slower 1] [--max-num-seqs 256] [--stream-interval 16]
        [--max-model-len 8192] [--chars-a-token 4] [--prefix-cache]

``--slower`` makes everything so many times slower than the GPU; 1 is real time. ``--stream-interval`` is vLLM's: the first
token is sent at once, later ones in events of so many. With ``--prefix-cache``, what prompts begin with alike is computed
once, and answers tell their cached tokens, as vLLM's do with ``--enable-prompt-tokens-details``. ``GET /simulation`` tells
what the GPU did.
"""

from __future__ import annotations

import argparse
import asyncio
import json
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

from tiers.simulated.gpu import BLOCK, HARDWARE, GpuStep, Hardware, Job, Scheduler
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
WORDS = TEXT.split()
# The text's tokens; after the last one it begins again.
PIECES = (WORDS[0], *(f" {word}" for word in WORDS[1:]), "\n\n")
FIRST_PIECE_ID = 1000
TEMPLATE_TOKENS = 6
CHARS_A_TOKEN = 4
MAX_MODEL_LEN = 8192
COMPLETION_TOKENS = 16  # where a request names no limit, as in vLLM
# The lengths of answers that end by themselves are log-normally distributed.
MEDIAN_TOKENS = 110
SPREAD = 0.6  # standard deviation of the logarithm
MAX_TOKENS = 400
CACHED_EVENTS = 4096
# If the simulated clock lags by more, the time is given up, and told as lost.
BEHIND_S = 0.05


@dataclass(slots=True)
class GpuWork:
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
        max_model_len: int = MAX_MODEL_LEN,
        chars_a_token: int = CHARS_A_TOKEN,
        *,
        prefix_cache: bool = False,
    ) -> None:
        super().__init__(MODEL)
        self._max_model_len = max_model_len
        self._chars_a_token = chars_a_token
        self._prefix_cache = prefix_cache
        self._slower = slower
        self._stream_interval = stream_interval
        self._scheduler = Scheduler(hardware, max_num_seqs)
        self._loop: asyncio.Task[None] | None = None
        self._delta = lru_cache(CACHED_EVENTS)(self._make_delta)
        self.work = GpuWork()
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
        queue = {"running": len(scheduler.running), "waiting": len(scheduler.waiting)}
        return JSONResponse(asdict(self.work) | queue)

    async def _metrics(self, _request: Request) -> Response:
        scheduler = self._scheduler
        labels = f'{{engine="0",model_name="{MODEL}"}}'
        figures = {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "kv_cache_usage_perc": 1 - scheduler.free / scheduler.blocks,
            "prompt_tokens_total": self.work.prompt_tokens,
            "generation_tokens_total": self.work.output_tokens,
            "prefix_cache_queries_total": scheduler.cache_queries,
            "prefix_cache_hits_total": scheduler.cache_hits,
        }
        lines = [
            f"vllm:{name}{labels} {float(figure)}\n" for name, figure in figures.items()
        ]
        kv_tokens = scheduler.blocks * BLOCK
        lines.append(
            f'vllm:cache_config_info{{block_size="{BLOCK}",kv_cache_size_tokens="{kv_tokens}"}} 1.0\n'
        )
        return PlainTextResponse("".join(lines))

    async def _models(self, _request: Request) -> Response:
        return JSONResponse(
            {"object": "list", "data": [self._card(MODEL, self._max_model_len)]}
        )

    async def _tokenize(self, request: Request) -> Response:
        tokens = list(range(self._prompt_tokens(await request.json())))
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": self._max_model_len,
                "tokens": tokens,
                "token_strs": None,
            }
        )

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        chat = request.url.path.endswith("/chat/completions")
        usual_limit = MAX_TOKENS if chat else COMPLETION_TOKENS
        max_tokens = int(body.get("max_tokens") or usual_limit)
        usual_tokens = _usual_tokens(body)
        is_cut_off = bool(body.get("ignore_eos")) or max_tokens <= usual_tokens
        job = Job(
            prompt_tokens=max(self._prompt_tokens(body), 1),
            tokens=max_tokens if is_cut_off else usual_tokens,
            hashes=self._block_hashes(body),
        )
        finish_reason = "length" if is_cut_off else "stop"
        self._compute(job)
        if body.get("stream"):
            with_ids = bool(body.get("return_token_ids"))
            events = self._tokens(job, finish_reason, chat=chat, with_ids=with_ids)
            return StreamingResponse(
                events, media_type="text/event-stream; charset=utf-8"
            )
        return await self._unless_disconnected(
            request, self._answer(job, finish_reason, chat=chat)
        )

    def _prompt_tokens(self, body: dict[str, Any]) -> int:
        """Estimate the tokens of a prompt, of a chat, or count those given as ids."""
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return len(prompt)
        tokens = len(_prompt_text(body)) // self._chars_a_token
        if "messages" in body:
            tokens += TEMPLATE_TOKENS
        return tokens

    def _block_hashes(self, body: dict[str, Any]) -> tuple[int, ...]:
        """Return a hash of each whole block of a prompt with all text before it; none without a prefix cache."""
        if not self._prefix_cache or isinstance(body.get("prompt"), list):
            return ()
        text = _prompt_text(body)
        block_chars = BLOCK * self._chars_a_token
        hashes = []
        block_hash = 0
        for end in range(block_chars, len(text) + 1, block_chars):
            block_hash = hash((block_hash, text[end - block_chars : end]))
            hashes.append(block_hash)
        return tuple(hashes)

    async def _answer(self, job: Job, finish_reason: str, *, chat: bool) -> Response:
        """Return the whole answer of a job once it is computed."""
        try:
            while job.produced < job.tokens:
                await job.ready.wait()
                job.ready.clear()
        finally:
            job.gone = True
        text = _text(0, job.tokens)
        choice: dict[str, Any] = {"index": 0}
        if chat:
            kind = "chat.completion"
            choice["message"] = {"role": "assistant", "content": text}
        else:
            kind = "text_completion"
            choice["text"] = text
        choice["finish_reason"] = finish_reason
        return JSONResponse(
            self._fields({"choices": [choice], "usage": _counts(job)}, kind)
        )

    async def _tokens(
        self, job: Job, finish_reason: str, *, chat: bool, with_ids: bool
    ) -> AsyncIterator[bytes]:
        """Yield the events of a job's answer as its tokens are computed."""
        sent = 0
        try:
            while sent < job.tokens:
                await job.ready.wait()
                job.ready.clear()
                produced = job.produced
                if produced == sent:
                    continue
                events = self._delta(
                    sent % len(PIECES), produced - sent, chat=chat, with_ids=with_ids
                )
                if chat and not sent:
                    opening = {"role": "assistant", "content": ""}
                    events = self._chunk(opening, None, chat=True) + events
                yield events
                sent = produced
            ending = self._chunk({"content": ""}, finish_reason, chat=chat)
            usage = self._event({"choices": [], "usage": _counts(job)}, chat=chat)
            yield ending + usage + b"data: [DONE]\n\n"
        finally:
            job.gone = True

    def _make_delta(
        self, start: int, tokens: int, *, chat: bool, with_ids: bool
    ) -> bytes:
        """Return the event of some tokens, the first of which is a given piece."""
        ids = None
        if with_ids:
            places = range(start, start + tokens)
            ids = [FIRST_PIECE_ID + place % len(PIECES) for place in places]
        content = {"content": _text(start, tokens)}
        return self._chunk(content, None, chat=chat, ids=ids)

    def _compute(self, job: Job) -> None:
        """Queue a job, and have the GPU work if it does not."""
        self._scheduler.waiting.append(job)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run_steps())

    async def _run_steps(self) -> None:
        """Compute step after step at the GPU's pace, until there is nothing to compute."""
        step_ends_at = time.monotonic()
        while step := self._scheduler.next_step():
            lag_s = time.monotonic() - step_ends_at - BEHIND_S
            if lag_s > 0:
                step_ends_at += lag_s
                self.work.lost_s += lag_s
            step_ends_at += step.duration_s * self._slower
            await asyncio.sleep(max(step_ends_at - time.monotonic(), 0))
            self._finish(step)

    def _finish(self, step: GpuStep) -> None:
        """Count what a step has computed, and wake the answers that have an event to send."""
        work = self.work
        produced_before = [job.produced for job, _ in step.parts]
        self._scheduler.finish(step)
        for (job, _), before in zip(step.parts, produced_before, strict=True):
            if job.produced > before:
                work.output_tokens += 1
                if self._has_event(job):
                    job.ready.set()
        work.busy_s += step.duration_s
        work.steps += 1
        work.prompt_tokens += sum(tokens for _, tokens in step.parts)
        work.preempted = self._scheduler.preemptions

    def _has_event(self, job: Job) -> bool:
        """Tell whether a job's last token ends an event: it is the first, the last, or completes an interval."""
        return (
            job.produced == 1
            or job.produced % self._stream_interval == 0
            or job.produced >= job.tokens
        )


def _prompt_text(body: dict[str, Any]) -> str:
    """Return what the model reads of a body: a prompt, or tools and messages with their calls of tools."""
    if "messages" not in body:
        return str(body.get("prompt") or "")
    texts = []
    if body.get("tools"):
        texts.append(json.dumps(body["tools"]))
    for message in body["messages"]:
        texts.append(str(message.get("content") or ""))
        if message.get("tool_calls"):
            texts.append(json.dumps(message["tool_calls"]))
    return " ".join(texts)


def _usual_tokens(body: dict[str, Any]) -> int:
    """Return the length of an answer that ends by itself: as varied as answers are, the same for the same prompt."""
    chance = random.Random(str(body.get("messages", body.get("prompt"))))  # noqa: S311  no secret
    tokens = int(chance.lognormvariate(0, SPREAD) * MEDIAN_TOKENS) + 1
    return min(tokens, MAX_TOKENS)


def _text(start: int, tokens: int) -> str:
    """Return the text of some tokens, the first of which is a given piece."""
    places = range(start, start + tokens)
    return "".join(PIECES[place % len(PIECES)] for place in places)


def _counts(job: Job) -> dict[str, Any]:
    counts: dict[str, Any] = {
        "prompt_tokens": job.prompt_tokens,
        "completion_tokens": job.produced,
        "total_tokens": job.prompt_tokens + job.produced,
    }
    if job.hashes:
        counts["prompt_tokens_details"] = {"cached_tokens": job.cached or 0}
    return counts


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
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN)
    parser.add_argument("--chars-a-token", type=int, default=CHARS_A_TOKEN)
    parser.add_argument("--prefix-cache", action="store_true")
    options = parser.parse_args()
    engine = SimulatedEngine(
        HARDWARE[options.precision],
        slower=options.slower,
        max_num_seqs=options.max_num_seqs,
        stream_interval=options.stream_interval,
        max_model_len=options.max_model_len,
        chars_a_token=options.chars_a_token,
        prefix_cache=options.prefix_cache,
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
