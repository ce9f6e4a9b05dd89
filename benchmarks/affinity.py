"""What affinity brings: chats of several turns on two replicas of ``precise``, with affinity on and off.

    .venv/bin/python benchmarks/affinity.py [--rounds 4] [--chats 8] [--turns 4] [--at-once 4]

Two real engines, one core each; in front of them two routers that differ in the setting, used in turns. Each chat has a
system prompt of its own; a few chats are open at once, and each sends its next turn when the last is answered. Told are the
share of prompt tokens that the engines found in their prefix caches, by their own counters, beside the share that the router
predicted and the one that answers reported; the time to the first token of later turns, as a ratio; and the least and the
most requests of a replica. Speed is not profiled: the routers learn it from the answers, as they would at first use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import check_output
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import httpx
from kernels import engine
from measure import ROOT, free_port, process, wait_for

sys.path.insert(0, str(ROOT))
from router.deployment.layout import prepare_options
from router.settings import load_settings
from tiers.checkpoints.prepare import find
from tiers.plan import machine_name
from tiers.spec import TierName, TierSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CONTEXT = 4096
TURNED = "from router.settings import AdmissionSettings as A; A.affinity"
ANSWER = 24  # tokens of each answer
TEXT = (
    "river window paper garden engine morning letter stone winter market silver bridge forest captain number island"
    " kitchen thunder pencil mountain village history needle harbor"
)
WORDS = TEXT.split()
SYSTEM_WORDS, TURN_WORDS = 320, 40


class Counts(NamedTuple):
    """What engines and router have counted, or the difference of two readings.

    Attributes:
        prompt: Prompt tokens of requests, by the router.
        predicted: Of them, cached as predicted.
        reported: Of them, cached as answers reported.
        queries: Prompt tokens looked up by the engines; ``hits``: found.
        served: Requests of each replica.
    """

    prompt: float
    predicted: float
    reported: float
    queries: float
    hits: float
    served: tuple[int, ...]


class Round(NamedTuple):
    """One round of chats through one router: times to first tokens after the first turn, in milliseconds, and counts."""

    ttft_ms: list[float]
    counts: Counts


@contextmanager
def router(
    urls: Sequence[str], tokenizer: Path, folder: Path, *, affinity: bool
) -> Iterator[str]:
    """Run a router in front of engines; yield its URL when all are ready."""
    port, config = free_port(), folder / "qarr.toml"
    config.write_text(
        f"[tiers.precise]\nurls = {json.dumps(list(urls))}\nmax_model_len = {CONTEXT}\n"
        f"[policy]\nprofiles = {json.dumps(str(folder))}\n"
        "[profile]\nauto = false\n"
    )
    main = f"{TURNED} = {affinity}; from router.cli.main import main; main()"
    argv = [
        sys.executable,
        "-c",
        main,
        "serve",
        "--config",
        str(config),
        "--tokenizer",
        str(tokenizer),
    ]
    with process([*argv, "--port", str(port)], None, log=folder / "router.log"):
        wait_for(port, "/healthz")
        deadline = time.monotonic() + 300
        while any(r["state"] != "ready" for r in replicas(f"http://127.0.0.1:{port}")):
            if time.monotonic() > deadline:
                raise TimeoutError((folder / "router.log").read_text()[-2000:])
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"


def replicas(url: str) -> list[dict[str, object]]:
    """Return the replicas of ``precise``."""
    tiers = httpx.get(f"{url}/tiers", trust_env=False, timeout=30).json()["tiers"]
    found: list[dict[str, object]] = next(
        t["replicas"] for t in tiers if t["tier"] == "precise"
    )
    return found


def read(url: str, engines: Sequence[str]) -> Counts:
    """Read the counters of a router and of the engines."""
    page = httpx.get(f"{url}/metrics", trust_env=False, timeout=30).text
    theirs = "\n".join(
        httpx.get(f"{one}/metrics", trust_env=False, timeout=30).text for one in engines
    )

    def total(text: str, name: str, label: str = "") -> float:
        return sum(
            map(
                float,
                re.findall(
                    rf"^{name}{{[^}}]*{label}[^}}]*}} (\S+)$", text, re.MULTILINE
                ),
            )
        )

    return Counts(
        total(page, "qarr_prompt_tokens_total"),
        total(page, "qarr_cached_prompt_tokens_total", 'source="predicted"'),
        total(page, "qarr_cached_prompt_tokens_total", 'source="reported"'),
        total(theirs, "vllm:prefix_cache_queries_total"),
        total(theirs, "vllm:prefix_cache_hits_total"),
        tuple(int(str(r["served"])) for r in replicas(url)),
    )


async def chat(
    client: httpx.AsyncClient, url: str, seed: random.Random, turns: int
) -> list[float]:
    """Have a chat, and return the time to the first token of each turn, in milliseconds."""
    messages = [
        {"role": "system", "content": " ".join(seed.choices(WORDS, k=SYSTEM_WORDS))}
    ]
    times = []
    for _ in range(turns):
        messages.append(
            {"role": "user", "content": " ".join(seed.choices(WORDS, k=TURN_WORDS))}
        )
        body = {
            "model": "precise",
            "messages": messages,
            "max_tokens": ANSWER,
            "temperature": 0,
            "stream": True,
        }
        started, first, parts = time.perf_counter(), 0.0, []
        async with client.stream(
            "POST", f"{url}/v1/chat/completions", json=body
        ) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    if text := choice["delta"].get("content"):
                        first = first or time.perf_counter()
                        parts.append(text)
        times.append((first - started) * 1000)
        messages.append({"role": "assistant", "content": "".join(parts)})
    return times


async def chats(
    url: str, seed: random.Random, options: argparse.Namespace
) -> list[float]:
    """Have chats, some at once; return the times to the first tokens of all turns but the first."""
    limit = asyncio.Semaphore(options.at_once)
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:

        async def one(own: random.Random) -> list[float]:
            async with limit:
                return (await chat(client, url, own, options.turns))[1:]

        seeds = [random.Random(seed.random()) for _ in range(options.chats)]
        return [ms for times in await asyncio.gather(*map(one, seeds)) for ms in times]


def measure(
    url: str, engines: Sequence[str], seed: random.Random, options: argparse.Namespace
) -> Round:
    """Run one round."""
    before = read(url, engines)
    times = asyncio.run(chats(url, seed, options))
    time.sleep(1)  # the engine counts a step after it has sent the step's tokens
    after = read(url, engines)
    served = tuple(
        new - old for new, old in zip(after.served, before.served, strict=True)
    )
    return Round(
        times,
        Counts(*(a - b for a, b in zip(after[:5], before[:5], strict=True)), served),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=4,
        help="of each setting, the first of which is not counted",
    )
    parser.add_argument("--chats", type=int, default=8, help="of one round")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument(
        "--engines",
        nargs="+",
        help="URLs of engines that run already, instead of two that are started",
    )
    parser.add_argument("--at-once", type=int, default=4, help="chats that are open")
    options = parser.parse_args()
    settings = load_settings(None, {})
    checkpoints = find(prepare_options(settings))
    if checkpoints is None:
        raise SystemExit("the checkpoints are not made yet: run 'make checkpoints'")
    folder = next(c.path for c in checkpoints if c.tier is TierName.PRECISE)
    seen: dict[bool, list[Round]] = {True: [], False: []}
    with ExitStack() as stack:
        engines, routers = list(options.engines or ()), dict[bool, str]()
        for _ in range(0 if engines else 2):
            logs = Path(stack.enter_context(TemporaryDirectory()))
            spec = TierSpec(TierName.PRECISE, CONTEXT, 16, 16, checkpoint=folder)
            engines.append(
                stack.enter_context(
                    engine(spec, settings.engine.python, logs, plugin=True)
                ).url
            )
        for affinity in seen:
            logs = Path(stack.enter_context(TemporaryDirectory()))
            routers[affinity] = stack.enter_context(
                router(engines, folder, logs, affinity=affinity)
            )
        for number in range(options.rounds):
            for affinity in sorted(seen, reverse=number % 2 == 0):
                print(
                    f"round {number + 1} of {options.rounds}: {_name(affinity)}",
                    file=sys.stderr,
                    flush=True,
                )
                found = measure(
                    routers[affinity],
                    engines,
                    random.Random(f"{number} {affinity}"),
                    options,
                )
                if number:  # in the first one the routers learn the speed
                    seen[affinity].append(found)
    report(seen, options)


def report(seen: dict[bool, list[Round]], options: argparse.Namespace) -> None:
    """Print the table."""
    commit = check_output(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True
    ).strip()
    print(f"commit {commit}; {machine_name()}; engines of precise, one core each")
    print(
        f"{options.rounds - 1} rounds of {options.chats} chats, {options.at_once} at once, of {options.turns} turns;"
        f" answers of {ANSWER} tokens; the machine was busy with other work: ratios only"
    )
    print(
        f"{'affinity':10}{'found by engines':>18}{'predicted':>11}{'reported':>10}{'TTFT later turns':>18}{'requests':>12}"
    )
    base = statistics.median(ms for found in seen[False] for ms in found.ttft_ms)
    for affinity, rounds in seen.items():
        all_of = [sum(found.counts[n] for found in rounds) for n in range(5)]  # type: ignore[misc]
        prompt, predicted, reported, queries, hits = all_of
        served = [
            sum(each)
            for each in zip(*(found.counts.served for found in rounds), strict=True)
        ]
        ratio = statistics.median(ms for found in rounds for ms in found.ttft_ms) / base
        shown = f"{predicted / prompt:.0%}" if affinity else "-"
        print(
            f"{_name(affinity):10}{hits / queries:>18.0%}{shown:>11}{reported / prompt:>10.0%}{ratio:>18.2f}"
            f"{min(served):>6} : {max(served)}"
        )


def _name(affinity: bool) -> str:  # noqa: FBT001
    return "on" if affinity else "off"


if __name__ == "__main__":
    main()
