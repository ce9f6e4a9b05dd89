"""Streams on real engines while every engine is killed in turn: none may fail, none may end before its time.

    python benchmarks/chaos/kills.py [--streams 1000] [--undisturbed 150] [--at-once 24] [--kills 6] [--seed 1] [--url URL]

Starts ``qarr up`` unless a URL is given (of one on this machine: its engines are killed). Every stream asks for a fixed
number of tokens at temperature 0, so one that was cut shows. Every prompt is first answered alone on every tier, and
streams that were not continued are compared with that. Before the kills, some streams are sent in the same mix and as many
at once: what the kills add to times is the difference. With the kills, so many streams are sent, and more until the last
engine is back. Prints what was sent, failed, cut and continued, what it cost in time, and what is left over at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPTS = (
    "What is the capital of France?",
    "Name three fruits.",
    "Write a Python function that adds two numbers.",
    "Why is the sky blue?",
    "What is 17 times 23?",
    "Translate to Spanish: good morning, my friend.",
)
TIERS = ("fast", "balanced", "precise")
QARR = Path(sys.executable).with_name("qarr")


@dataclass(slots=True)
class Stream:
    """One stream, as its caller saw it. Times in seconds by the monotonic clock; ``silence``: the longest between pieces."""

    prompt: str
    asked: str
    began: float
    ended: float = 0.0
    first: float | None = None
    newest: float | None = None
    silence: float = 0.0
    text: str = ""
    last: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None

    def add(self, text: str) -> None:
        """Note a piece of the answer."""
        now = time.monotonic()
        self.first = self.first or now
        self.silence = max(self.silence, now - (self.newest or now))
        self.newest = now
        self.text += text


@dataclass(frozen=True, slots=True)
class Held:
    """What the router has at one moment."""

    places: int
    tasks: int
    files: int
    rss_mb: float


@contextlib.contextmanager
def fleet(url: str | None) -> Iterator[str]:
    """Yield the URL of a running router, started here unless one is given."""
    if url is not None:
        yield url
        return
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        (Path(folder) / "qarr.log").open("w") as log,
    ):
        env = {
            **os.environ,
            "QARR_SERVER__PORT": str(port),
            "QARR_ENGINE__BASE_PORT": "9501",
            "QARR_PROFILE__AUTO": "false",
        }
        running = subprocess.Popen([str(QARR), "up"], env=env, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 1500
            while "all tiers ready" not in Path(log.name).read_text("utf-8"):
                if running.poll() is not None or time.monotonic() > deadline:
                    sys.exit(Path(log.name).read_text("utf-8"))
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            running.send_signal(signal.SIGINT)
            running.wait(60)


async def stream(
    client: httpx.AsyncClient, url: str, prompt: str, tier: str, tokens: int
) -> Stream:
    """Ask for an answer and read it to its end."""
    found = Stream(prompt, tier, time.monotonic())
    body = {"prompt": prompt, "tier": tier, "max_tokens": tokens, "temperature": 0}
    try:
        async with client.stream("POST", f"{url}/generate", json=body) as response:
            if response.status_code != httpx.codes.OK:
                found.problem = f"HTTP {response.status_code}: {(await response.aread()).decode()[:300]}"
            name = "message"
            async for line in response.aiter_lines():
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    data = json.loads(line[6:])
                    if name == "message":
                        found.add(data["text"])
                    elif name == "error":
                        found.problem = str(data.get("detail"))
                    else:
                        found.last = data
                elif not line:
                    name = "message"
    except httpx.HTTPError as error:
        found.problem = f"{type(error).__name__}: {error}"
    if not found.last and found.problem is None:
        found.problem = "ended without a last event"
    found.ended = time.monotonic()
    return found


async def killer(
    client: httpx.AsyncClient, url: str, kills: int, dice: random.Random
) -> list[tuple[str, float]]:
    """Kill every engine in turn, each once all are ready again; return whom, and how long it took to come back."""
    done = []
    for number in range(kills):
        await asyncio.sleep(dice.uniform(2, 6))
        tier = TIERS[number % len(TIERS)]
        replica = (await replicas(client, url))[tier]
        os.kill(replica["pid"], signal.SIGKILL)
        at = time.monotonic()
        print(
            f"  killed {replica['id']} with {replica['in_flight']} requests in flight",
            file=sys.stderr,
        )
        while (now := (await replicas(client, url))[tier])["state"] != "ready" or now[  # noqa: ASYNC110
            "pid"
        ] == replica["pid"]:
            await asyncio.sleep(1)
        done.append((tier, time.monotonic() - at))
    return done


async def replicas(client: httpx.AsyncClient, url: str) -> dict[str, dict[str, Any]]:
    """Return each tier's replica."""
    tiers = (await client.get(f"{url}/tiers")).json()["tiers"]
    return {t["tier"]: t["replicas"][0] for t in tiers if t["replicas"]}


async def held(client: httpx.AsyncClient, url: str) -> Held:
    """Return what the router has once it has been left alone for a while."""
    await asyncio.sleep(5)
    places = sum(
        r["in_flight"] + r["prompt_tokens_outstanding"]
        for r in (await replicas(client, url)).values()
    )
    page = (await client.get(f"{url}/metrics")).text
    names = ("qarr_tasks", "process_open_fds", "process_resident_memory_bytes")
    tasks, files, resident = (
        float(re.findall(rf"^{name} (\S+)$", page, re.MULTILINE)[0]) for name in names
    )
    return Held(places, int(tasks), int(files), round(resident / 2**20, 1))


async def mixed(
    client: httpx.AsyncClient,
    url: str,
    dice: random.Random,
    options: argparse.Namespace,
    *,
    least: int,
    meanwhile: asyncio.Task[Any] | None = None,
) -> list[Stream]:
    """Send streams to all tiers, so many at once: at least as many as wanted, and until something else is done."""
    found: list[Stream] = []
    numbers = itertools.count()

    async def worker() -> None:
        while (number := next(numbers)) < least or (
            meanwhile is not None and not meanwhile.done()
        ):
            # FP8 takes a second a token on a processor: a tenth of the streams, so that it is killed at work as well.
            tier = (
                "balanced"
                if number % 10 == 0
                else dice.choice(("fast", "precise", "auto"))
            )
            found.append(
                await stream(client, url, dice.choice(PROMPTS), tier, options.tokens)
            )
            if len(found) % 50 == 0:
                print(f"  {len(found)} streams", file=sys.stderr)

    await asyncio.gather(*(worker() for _ in range(options.at_once)))
    return found


async def run(url: str, options: argparse.Namespace) -> bool:
    """Run the streams and the kills; tell whether all was as it should be."""
    dice = random.Random(options.seed)
    async with httpx.AsyncClient(
        timeout=600, trust_env=False, limits=httpx.Limits(max_connections=None)
    ) as client:
        alone = {
            p: {
                (await stream(client, url, p, tier, options.tokens)).text
                for tier in TIERS
            }
            for p in PROMPTS
        }
        undisturbed = await mixed(client, url, dice, options, least=options.undisturbed)
        before = await held(client, url)
        killing = asyncio.create_task(killer(client, url, options.kills, dice))
        found = await mixed(
            client, url, dice, options, least=options.streams, meanwhile=killing
        )
        came_back = await killing
        after = await held(client, url)
    chosen = " ".join(
        f"--{name.replace('_', '-')} {getattr(options, name)}"
        for name in ("kills", "streams", "undisturbed", "at_once", "seed")
    )
    print(f"$ python benchmarks/chaos/kills.py {chosen}")
    for tier, took in came_back:
        print(f"killed {tier}: ready again after {took:.0f} s")
    good = report(found, alone, options.tokens)
    report_times(undisturbed, found)
    print(
        f"held by the router before the kills: {before}\n                         at the end: {after}"
    )
    for problem, count in Counter(
        s.problem for s in undisturbed if s.problem
    ).most_common(5):
        print(f"before the kills: {count} x {problem}")
    return good and not after.places and not any(s.problem for s in undisturbed)


def report(found: list[Stream], known: dict[str, set[str]], tokens: int) -> bool:
    """Print what became of the streams; tell whether all was as it should be."""
    failed = [s for s in found if s.problem is not None]
    whole = [s for s in found if s.problem is None]
    cut = [
        s
        for s in whole
        if s.last["finish_reason"] == "length"
        and s.last["usage"]["completion_tokens"] != tokens
    ]
    cut += [s for s in whole if s.last["finish_reason"] not in {"length", "stop"}]
    continued = [s for s in whole if s.last["continued_on"]]
    alone = [s for s in whole if not s.last["continued_on"]]
    same = sum(s.text in known[s.prompt] for s in alone)
    broken = [s for s in whole if "\ufffd" in s.text]
    print(
        f"streams {len(found)}, failed {len(failed)}, cut short without saying so {len(cut)}, continued {len(continued)}"
    )
    print(
        f"continued on: {dict(Counter(tier for s in continued for tier in s.last['continued_on']))}"
    )
    print(
        f"not continued: {same} of {len(alone)} are an undisturbed answer of a tier (others: another batch, other rounding)"
    )
    print(f"characters broken: {len(broken)}")
    for problem, count in Counter(s.problem for s in failed).most_common(5):
        print(f"  {count} x {problem}")
    return not failed and not cut and not broken


def report_times(undisturbed: list[Stream], found: list[Stream]) -> None:
    """Print the times before the kills and with them, and what the kills add."""
    continued = [s for s in found if s.last.get("continued_on")]
    print(
        f"{'seconds, median and p99':28}{'undisturbed':>16}{'with kills':>16}{'added at p99':>14}{'continued':>16}"
    )
    for name, time_of in (
        ("first token", lambda s: (s.first or s.ended) - s.began),
        ("longest silence between", lambda s: s.silence),
        ("whole answer", lambda s: s.ended - s.began),
    ):
        usual, seen, gone_on = (
            summary(list(map(time_of, streams)))
            for streams in (undisturbed, found, continued)
        )
        columns = "".join(
            f"{f'{each[0]:.2f} {each[1]:.2f}':>16}" for each in (usual, seen)
        )
        print(
            f"{name:28}{columns}{seen[1] - usual[1]:>+14.2f}{f'{gone_on[0]:.2f} {gone_on[1]:.2f}':>16}"
        )


def summary(times: list[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile, nearest rank; 0 of none."""
    times = sorted(times) or [0.0]
    return times[len(times) // 2], times[math.ceil(len(times) * 0.99) - 1]


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--undisturbed", type=int, default=150)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url")
    options = parser.parse_args()
    with fleet(options.url) as url:
        good = asyncio.run(run(url, options))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
