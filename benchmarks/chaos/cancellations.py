"""Requests that end at every moment they can end at: is anything left of them in the router?

    python benchmarks/chaos/cancellations.py [--rounds 2000] [--clients 500] [--seed 1]

A router over fake engines in this process, with quotas, a queue and continuation.
First, requests of every kind and in every trouble are cut off at an await, one after another: the work is cancelled while
it waits, or when what it waits for is just there, or the client disconnects, or the server stops. Then clients come over
sockets, many at once, and leave at random moments while engines fail at random. Prints what was cut off, and what was
left. Status 1 when anything is: leases, places of keys and quotas, open requests, tasks, connections, kept streams,
spans, work at engines.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import uvloop

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.unit.cancelling import REQUESTS, WAYS, CutRouter, cut_router, scenarios  # noqa: E402

MAX_AWAITS = 40
AT_ONCE = 24


async def cut_off(router: CutRouter, rounds: int, dice: random.Random) -> list[str]:
    """Cut requests off, each at another await; return what was wrong."""
    cut, complete, wrong = Counter[str](), 0, list[str]()
    every = scenarios()
    known = dict.fromkeys((scenario.name for scenario in every), MAX_AWAITS)
    for _ in range(rounds):
        scenario, way = dice.choice(every), dice.choice(WAYS)
        at = dice.randint(1, known[scenario.name])
        fired, found = await router.cut_off(scenario, way, at)
        if fired:
            cut[way] += 1
        else:  # it ended before: look no further than this
            complete += 1
            known[scenario.name] = max(at - 1, 1)
        wrong += [
            f"{scenario.name}, cut off at await {at} ({way}): {what}" for what in found
        ]
    print(
        f"cut off at an await   {cut.total()} of {rounds} requests, {complete} ended before; {dict(cut)}"
    )
    return wrong


async def client(router: CutRouter, dice: random.Random) -> str:
    """Send a request over a connection of its own, and perhaps leave; return how it ended."""
    path, body = dice.choice(list(REQUESTS.values()))
    wishes = (
        {"sla": {"ttft_ms": dice.choice((5, 50, 500, 5000))}}
        if dice.random() < 0.5
        else {}
    )
    if path == "/generate":
        body = {**body, **wishes}
    elif path.startswith("/v1/chat"):
        body = {**body, "qarr": wishes}
    headers = {"authorization": f"Bearer {router.key}"}
    limit_s = dice.random() ** 2 / 2 if dice.random() < 0.6 else 60.0
    try:
        async with (
            asyncio.timeout(limit_s),
            httpx.AsyncClient(timeout=60, trust_env=False) as http,
        ):
            answer = await http.post(
                router.stack.url + path, json=body, headers=headers
            )
    except TimeoutError:
        return "left" if limit_s < 1 else "NO END"
    except httpx.HTTPError as error:
        return type(error).__name__
    return str(answer.status_code)


async def crowd(router: CutRouter, clients: int, dice: random.Random) -> list[str]:
    """Let clients come and leave while engines fail; return what was wrong."""
    asked: set[asyncio.Task[str]] = set()
    ended: Counter[str] = Counter()
    for _ in range(clients):
        _disturb(dice.choice(list(router.engines.values())), dice)
        asked.add(asyncio.create_task(client(router, dice)))
        if len(asked) >= AT_ONCE:
            done, asked = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            ended.update(task.result() for task in done)
        await asyncio.sleep(dice.random() * 0.02)
    ended.update(await asyncio.gather(*asked))
    router.well()
    print(
        f"clients over sockets  {clients}, {AT_ONCE} at once at most; {dict(ended.most_common())}"
    )
    held = await router.left()
    wrong = [
        f"after all clients have left: {count} {what}" for what, count in held.items()
    ]
    return [
        *wrong,
        *(f"{ended[end]} requests: {end}" for end in ended if end in {"NO END", "500"}),
    ]


def _disturb(engine: Any, dice: random.Random) -> None:
    engine.first_delay_s = dice.choice((0, 0, 0.05, 0.2))
    engine.delay_s = dice.choice((0, 0.01, 0.03))
    engine.break_after = dice.choice((None, None, None, 0, 2, 5))
    engine.status = dice.choice((200,) * 9 + (500,))


async def run(folder: Path, options: argparse.Namespace) -> list[str]:
    """Run it all; return what was wrong."""
    dice = random.Random(options.seed)
    async with cut_router(folder) as router:
        wrong = await cut_off(router, options.rounds, dice)
        return wrong + await crowd(router, options.clients, dice)


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for name in list(os.environ):
        if name.startswith(("QARR_", "OTEL_")):
            del os.environ[name]
    logging.disable(logging.CRITICAL)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"XDG_CONFIG_HOME": folder, "QARR_CACHE_DIR": folder}
        print(
            f"$ python benchmarks/chaos/cancellations.py --rounds {options.rounds} --clients {options.clients} "
            f"--seed {options.seed}"
        )
        wrong = uvloop.run(run(Path(folder), options))
    print(
        f"left over             {len(wrong) or 'nothing'}, after {time.monotonic() - began:.0f} s"
    )
    for what in wrong[:40]:
        print(f"FAULT {what}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
