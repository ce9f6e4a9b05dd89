"""Hours of ordinary and hostile use: does memory stay flat, does everything that was taken come back?

    python benchmarks/soak/soak.py [--minutes 30] [--seed 1]

One router in front of three fake engines that now and then break a stream or fail, and one of which is killed and
started again every minute. Callers stream, wait for whole answers, leave midway, send garbage. Every five seconds the
router's memory, open files (of all of its processes), tasks, and what its replicas hold are noted; at the end, after
ten quiet seconds, once more.
Memory is judged by the slope of a least-squares line through the second half: of the resident set, and of the blocks that
Python's objects take. Each sample is much like the one before, which makes slopes where there is no trend, so the usual
standard error would say too little. What chance alone may do is found by making many series without a trend that depend on
themselves as this one does (a parametric bootstrap, AR(1)): 95 % of their slopes are within what is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import uvicorn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from measure import free_port, wait_for  # noqa: E402

from tests.fakes.engine import Behaviour, FakeEngine  # noqa: E402

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

QARR = Path(sys.executable).with_name("qarr")
WORDS = [
    "Paris",
    "lies",
    "on",
    "the",
    "river",
    "Seine",
    "and",
    "has",
    "been",
    "the",
    "capital",
    "of",
    "France",
    "for",
    "many",
    "hundred",
    "years",
    "or",
    "so",
]
CALLERS = 6
KILL_EVERY_S = 60
BOOTSTRAPS = 2000


class MoodyEngine(FakeEngine):
    """A fake engine of which some requests go wrong, by chance."""

    def __init__(self, seed: int) -> None:
        super().__init__(
            Behaviour(answer=tuple(f" {word}" for word in WORDS), delay_s=0.02)
        )
        self._dice = random.Random(seed)

    async def _generate(self, request: Request) -> Response:
        mood = self._dice.random()
        b = self.behaviour
        b.break_after = self._dice.randrange(len(WORDS)) if mood < 0.03 else None
        b.error_after = (
            self._dice.randrange(len(WORDS)) if 0.03 <= mood < 0.04 else None
        )
        b.status = 500 if 0.04 <= mood < 0.05 else 200
        # kept for tests, not for hours
        for seen in (b.requests, b.raw, b.headers, b.sent):
            seen.clear()
        return await super()._generate(request)


@dataclass(frozen=True, slots=True)
class Sample:
    """The router at one moment."""

    minute: float
    rss_mb: float
    blocks: int
    files: int
    tasks: int
    held: int


async def caller(
    url: str, dice: random.Random, until: float, seen: Counter[str]
) -> None:
    """Use the router in every way, until the time is over."""
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        while time.monotonic() < until:
            kind = dice.choices(
                ("stream", "openai", "whole", "leave", "garbage", "route"),
                (40, 25, 10, 15, 5, 5),
            )[0]
            try:
                seen[f"{kind} {await use(client, kind, dice)}"] += 1
            except httpx.HTTPError as error:
                seen[f"{kind} {type(error).__name__} CUT"] += 1


async def use(client: httpx.AsyncClient, kind: str, dice: random.Random) -> str:
    """Send one request; return how it ended."""
    prompt = " ".join(dice.choices(WORDS, k=dice.randrange(1, 60)))
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": 32,
        "tier": dice.choice(("auto", "fast", "balanced", "precise")),
    }
    if kind == "garbage":
        answer = await client.post(
            "/generate", content=dice.randbytes(dice.randrange(200))
        )
        return str(answer.status_code)
    if kind == "route":
        return str((await client.post("/route", json=body)).status_code)
    if kind == "whole":
        return str(
            (await client.post("/generate", json={**body, "stream": False})).status_code
        )
    path = "/generate"
    if kind == "openai":
        path = "/v1/chat/completions"
        body = {
            "model": "auto",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": 32,
            "stream": True,
        }
    last, lines, leave = "", 0, dice.randrange(1, 12)
    async with client.stream("POST", path, json=body) as answer:
        async for line in answer.aiter_lines():
            lines += 1
            last = line or last
            if kind == "leave" and lines > leave:
                return "left"
        if answer.status_code != httpx.codes.OK:
            return str(answer.status_code)
    ended = last == "data: [DONE]" if kind == "openai" else '"finish_reason"' in last
    return (
        "whole"
        if ended
        else "error event"
        if '"title"' in last or '"error"' in last
        else "CUT"
    )


async def watch(
    url: str, router: psutil.Process, began: float, until: float, samples: list[Sample]
) -> None:
    """Note how the router is doing, until the time is over."""
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        while time.monotonic() < until:
            await asyncio.sleep(5)
            samples.append(await sample(client, router, began))
            if len(samples) % 12 == 0:
                print(f"  {samples[-1]}", file=sys.stderr)


async def sample(
    client: httpx.AsyncClient, router: psutil.Process, began: float
) -> Sample:
    """Return the router as it is now."""
    tiers = (await client.get("/tiers")).json()["tiers"]
    page = (await client.get("/metrics")).text
    tasks, blocks = (
        int(float(_value(page, name))) for name in ("qarr_tasks", "qarr_memory_blocks")
    )
    held = sum(
        r["in_flight"]
        + r["prompt_tokens_outstanding"]
        + r["output_tokens_outstanding"]
        + r["kv_cache_tokens_held"]
        for t in tiers
        for r in t["replicas"]
    )
    processes = [router, *router.children()]
    rss = sum(process.memory_info().rss for process in processes) / 2**20
    minute = round((time.monotonic() - began) / 60, 2)
    return Sample(
        minute,
        round(rss, 2),
        blocks,
        sum(process.num_fds() for process in processes),
        tasks,
        held,
    )


def _value(page: str, name: str) -> str:
    found = re.search(rf"^{name} (\S+)$", page, re.MULTILINE)
    assert found is not None
    return found[1]


async def kill(
    engines: list[subprocess.Popen[bytes]], ports: list[int], until: float
) -> int:
    """Kill an engine every minute and start it again ten seconds later; return how often."""
    kills = 0
    while time.monotonic() + KILL_EVERY_S < until:
        await asyncio.sleep(KILL_EVERY_S)
        number = kills % len(ports)
        engines[number].kill()
        engines[number].wait()
        await asyncio.sleep(10)
        engines[number] = start(ports[number], kills)
        kills += 1
    return kills


def start(port: int, seed: int) -> subprocess.Popen[bytes]:
    """Start an engine."""
    argv = [sys.executable, __file__, "--engine", str(port), "--seed", str(seed)]
    # it says much about streams that it breaks on purpose
    return subprocess.Popen(argv, stderr=subprocess.DEVNULL)


def slope(xs: list[float], ys: list[float]) -> float:
    """Return the slope of the least-squares line."""
    mx = fmean(xs)
    return sum((x - mx) * y for x, y in zip(xs, ys, strict=True)) / sum(
        (x - mx) ** 2 for x in xs
    )


def chance(xs: list[float], ys: list[float], dice: random.Random) -> float:
    """Return the slope that 95 % of series without a trend stay below, which depend on themselves as this one does."""
    mx, my, b, n = fmean(xs), fmean(ys), slope(xs, ys), len(xs)
    rest = [y - my - b * (x - mx) for x, y in zip(xs, ys, strict=True)]
    power = sum(e * e for e in rest)
    if not power:
        return 0.0
    rho = sum(e * f for e, f in zip(rest[1:], rest, strict=False)) / power
    # what a line through the series hides of it: Shaman and Stine, JASA 1988
    rho = min(rho + (2 + 4 * rho) / n, 0.995)
    step = (
        fmean((e - rho * f) ** 2 for e, f in zip(rest[1:], rest, strict=False))
    ) ** 0.5
    slopes = []
    for _ in range(BOOTSTRAPS):
        made = [dice.gauss(0, step / (1 - rho * rho) ** 0.5)]
        while len(made) < n:
            made.append(rho * made[-1] + dice.gauss(0, step))
        slopes.append(abs(slope(xs, made)))
    return sorted(slopes)[int(0.95 * BOOTSTRAPS)]


async def soak(
    url: str,
    router: psutil.Process,
    engines: list[Any],
    ports: list[int],
    options: argparse.Namespace,
) -> bool:
    """Run it; tell whether all was as it should be."""
    began = time.monotonic()
    until = began + options.minutes * 60
    seen: Counter[str] = Counter()
    samples: list[Sample] = []
    dice = [random.Random(f"{options.seed} {number}") for number in range(CALLERS)]
    _, _, kills = await asyncio.gather(
        asyncio.gather(*(caller(url, d, until, seen) for d in dice)),
        watch(url, router, began, until, samples),
        kill(engines, ports, until),
    )
    await asyncio.sleep(10)
    async with httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client:
        last = await sample(client, router, began)
    half = samples[len(samples) // 2 :]
    minutes = [s.minute for s in half]
    resident, taken = [s.rss_mb for s in half], [float(s.blocks) for s in half]
    dice = random.Random(options.seed)
    print(
        f"$ python benchmarks/soak/soak.py --minutes {options.minutes:g} --seed {options.seed}"
    )
    print(f"requests {sum(seen.values())}, engines killed {kills} times")
    print("; ".join(f"{name}: {count}" for name, count in sorted(seen.items())))
    print(
        f"resident set: {samples[0].rss_mb:.1f} MiB after 5 s, {resident[0]:.2f} halfway, {resident[-1]:.2f} at the end\n"
        f"              second half {slope(minutes, resident):+.4f} MiB a minute; chance gives up to "
        f"{chance(minutes, resident, dice):.4f}"
    )
    print(
        f"objects: {fmean(taken):,.0f} blocks in the second half, from {min(taken):,.0f} to {max(taken):,.0f}\n"
        f"         {slope(minutes, taken):+,.0f} a minute; chance gives up to {chance(minutes, taken, dice):,.0f}"
    )
    print(
        f"left after 10 quiet seconds: {last.held} places and tokens, {last.tasks} tasks, {last.files} open files"
    )
    print(
        f"at most under load: {max(s.tasks for s in samples)} tasks, {max(s.files for s in samples)} open files"
    )
    return not last.held and not any(name.endswith("CUT") for name in seen)


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        uvicorn.run(
            MoodyEngine(options.seed).app,
            port=options.engine,
            log_config=None,
            loop="uvloop",
        )
        return
    with contextlib.ExitStack() as stack:
        *ports, listening = (free_port() for _ in range(4))
        env = {**os.environ, "QARR_SERVER__PORT": str(listening)}
        env["QARR_POLICY__PROFILES"] = stack.enter_context(
            tempfile.TemporaryDirectory()
        )
        env["QARR_UPSTREAM__TOKEN_TIMEOUT_S"] = "5"  # noqa: S105  no password
        engines = [start(port, number) for number, port in enumerate(ports)]
        stack.callback(lambda: [engine.kill() for engine in engines])
        for port in ports:
            wait_for(port)
        urls = [
            part
            for tier, port in zip(("fast", "balanced", "precise"), ports, strict=True)
            for part in (f"--{tier}", f"http://127.0.0.1:{port}")
        ]
        router = subprocess.Popen(
            [str(QARR), "serve", *urls], env=env, stderr=subprocess.DEVNULL
        )
        stack.callback(router.wait, 20)
        stack.callback(router.terminate)
        wait_for(listening, "/readyz")
        good = asyncio.run(
            soak(
                f"http://127.0.0.1:{listening}",
                psutil.Process(router.pid),
                engines,
                ports,
                options,
            )
        )
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
