"""Far more requests than the engines can serve: does goodput stay at its peak, and are the urgent ones still in time?

    python benchmarks/chaos/overload.py [--seconds 20] [--seed 1]

Three fake engines that run a few sequences at once and let the rest wait, as vLLM does: a known capacity. Arrivals at
random (exponential gaps, seeded) at multiples of it: half interactive with an SLA on TTFT, half batch. Goodput is what
completes a second, interactive ones only if they met their SLA. Prints for each load goodput, refusals and TTFT, and whether
every refusal had a Retry-After.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from measure import free_port, wait_for  # noqa: E402

from tests.fakes.engine import Exchange, FakeEngine  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from starlette.requests import Request
    from starlette.responses import Response

QARR = Path(sys.executable).with_name("qarr")
SLOTS, TOKENS, TOKEN_S = 8, 16, 0.1
CAPACITY = 3 * SLOTS / (TOKENS * TOKEN_S)  # requests a second of three engines
SLA_TTFT_S = 2.0
WARM_S = 3.0  # until the first answers are complete
WORDS = "Paris lies on the river Seine and has been the capital of France for many hundred years"
ANSWER = tuple(f" {word}" for word in WORDS.split()[:TOKENS])


class SlottedEngine(FakeEngine):
    """A fake engine that computes a few sequences at once; further ones wait."""

    def __init__(self) -> None:
        super().__init__()
        self.behaviour.answer, self.behaviour.delay_s = ANSWER, TOKEN_S
        self._slots = asyncio.Semaphore(SLOTS)

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        if not body.get("stream"):
            async with self._slots:
                return await super()._generate(request)
        return await super()._generate(request)

    async def _stream(
        self, answer: AsyncGenerator[bytes, None], exchange: Exchange
    ) -> AsyncIterator[bytes]:
        async with self._slots:
            async for event in super()._stream(answer, exchange):
                yield event


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request. Times in seconds."""

    interactive: bool
    status: int
    ttft_s: float | None
    complete: bool
    retry_after: bool
    ended: float

    @property
    def good(self) -> bool:
        """Tell whether it counts for goodput."""
        return self.complete and (
            not self.interactive or (self.ttft_s or 0) <= SLA_TTFT_S
        )


async def ask(client: httpx.AsyncClient, url: str, *, interactive: bool) -> Outcome:
    """Send one request and read its answer."""
    body: dict[str, Any] = {"prompt": "hi", "max_tokens": TOKENS, "priority": "batch"}
    if interactive:
        body |= {"priority": "interactive", "sla": {"ttft_ms": SLA_TTFT_S * 1000}}
    began, first, complete = time.monotonic(), None, False
    try:
        async with client.stream("POST", f"{url}/generate", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and first is None:
                    first = time.monotonic() - began
                complete = complete or line == "event: done"
            status, retry = answer.status_code, "retry-after" in answer.headers
    except httpx.HTTPError:
        status, retry, complete = 0, False, False
    return Outcome(interactive, status, first, complete, retry, time.monotonic())


async def offer(
    url: str, rate: float, seconds: float, dice: random.Random
) -> tuple[float, list[Outcome]]:
    """Send requests at a rate, whether or not earlier ones were answered; return when that began, and how they ended."""
    async with httpx.AsyncClient(
        timeout=120, trust_env=False, limits=httpx.Limits(max_connections=None)
    ) as client:
        asked, at, began = [], 0.0, time.monotonic()
        while at < seconds:
            await asyncio.sleep(max(began + at - time.monotonic(), 0))
            asked.append(
                asyncio.create_task(ask(client, url, interactive=dice.random() < 0.5))
            )
            at += dice.expovariate(rate)
        return began, list(await asyncio.gather(*asked))


def percentile(values: list[float], share: float) -> float:
    """Return a percentile; not a number for none."""
    return sorted(values)[int((len(values) - 1) * share)] if values else float("nan")


def line(
    times: float, began: float, found: list[Outcome], seconds: float
) -> tuple[float, str]:
    """Return goodput while the load lasted, without its first seconds, and what is printed of it."""
    counted = [o for o in found if began + WARM_S <= o.ended <= began + seconds]
    goodput = sum(o.good for o in counted) / (seconds - WARM_S)
    refused = [o for o in found if o.status == httpx.codes.SERVICE_UNAVAILABLE]
    served = [
        o
        for o in found
        if o.interactive and o.ttft_s is not None and o.status == httpx.codes.OK
    ]
    ttft = percentile([o.ttft_s or 0.0 for o in served], 0.95)
    other = sum(
        not o.complete and o.status != httpx.codes.SERVICE_UNAVAILABLE for o in found
    )
    batch = sum(o.complete and not o.interactive for o in counted) / (seconds - WARM_S)
    return goodput, (
        f"{times:>5g} x {len(found):>9} {goodput:>8.1f}/s {batch:>11.1f}/s {len(refused):>8} "
        f"{'yes' if all(o.retry_after for o in refused) else 'NO':>12} {other:>7} {ttft:>14.2f} s"
    )


def serve(port: int) -> None:
    """Serve one engine; for a process of its own."""
    uvicorn.run(SlottedEngine().app, port=port, log_config=None, loop="uvloop")


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        serve(options.engine)
        return
    with contextlib.ExitStack() as stack:
        ports = [free_port() for _ in range(4)]
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        env = {
            **os.environ,
            "QARR_POLICY__PROFILES": folder,
            "QARR_SERVER__PORT": str(ports[3]),
        }
        for tier in ("FAST", "BALANCED", "PRECISE"):
            env[f"QARR_TIERS__{tier}__MAX_NUM_SEQS"] = env[
                f"QARR_TIERS__{tier}__MAX_IN_FLIGHT"
            ] = str(SLOTS)
        for port in ports[:3]:
            argv = [sys.executable, __file__, "--engine", str(port)]
            stack.callback(_stop, subprocess.Popen(argv))
            wait_for(port)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        argv = [
            str(QARR),
            "serve",
            "--fast",
            urls[0],
            "--balanced",
            urls[1],
            "--precise",
            urls[2],
        ]
        stack.callback(
            _stop, subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL)
        )
        wait_for(ports[3], "/readyz")
        time.sleep(15)  # until its warm-ups are over
        sys.exit(0 if compare(urls[3], options) else 1)


def compare(url: str, options: argparse.Namespace) -> bool:
    """Offer rising loads and print each; tell whether the most kept up with the best."""
    print(
        f"$ python benchmarks/chaos/overload.py --seconds {options.seconds:g} --seed {options.seed}"
    )
    print(
        f"capacity {CAPACITY:g} requests/s; interactive ones (half) want a first token within {SLA_TTFT_S:g} s"
    )
    print(
        f"{'load':>7} {'requests':>9} {'goodput':>10} {'batch alone':>13} {'refused':>8} {'Retry-After':>12} {'failed':>7}",
        end="",
    )
    print(f" {'TTFT p95, inter.':>16}")
    peak = last = 0.0
    for times in (0.5, 0.9, 1.2, 2, 5):
        dice = random.Random(options.seed)
        began, found = asyncio.run(offer(url, CAPACITY * times, options.seconds, dice))
        last, text = line(times, began, found, options.seconds)
        peak = max(peak, last)
        print(text, flush=True)
        time.sleep(3)
    print(f"goodput at the highest load: {last / peak:.0%} of its peak")
    return last >= 0.9 * peak


def _stop(running: subprocess.Popen[bytes]) -> None:
    running.terminate()
    running.wait(20)


if __name__ == "__main__":
    main()
