"""Charge many requests to budgets through two routers' ledgers, in two processes: are budgets kept, and are sums exact?

usage: .venv/bin/python benchmarks/budgets.py [--requests 100000] [--redis URL] [--out FILE]

Without ``--redis`` both processes share a SQLite file, as two routers of one machine may. Each sends its half of the
requests, 50 at a time, from five keys that have a budget each and share a team's; there is room for about two thirds of
them. A third process reads the ledger meanwhile. It fails if a budget was ever exceeded, or if the ledger differs from the
sum of charges.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from router.accounting.budgets import OverBudgetError, periods
from router.accounting.database import Database
from router.accounting.ledgers import BudgetLedger, SqliteLedger
from router.accounting.redis_ledger import RedisLedger
from router.accounting.reservations import Reservations
from router.accounting.settings import BudgetSettings
from router.auth.api_keys import Account, Budget, Caller
from router.telemetry.record import Cost

ROOT = str(Path(__file__).resolve().parents[1])
KEYS, AT_ONCE, PROCESSES = 5, 50, 2
MAX_US = 1_000_000  # of one request: a second


def callers(run: str, requests: int) -> list[Caller]:
    """Return the keys of a run. Requests use a quarter of a second on average; there is two thirds of what they want."""
    share = requests / 4 / KEYS * 2 / 3
    team = Account(
        f"team:{run}",
        "team",
        Budget(engine_seconds_per_month=share * KEYS * 0.9).limits(),
    )
    own = [
        Budget(
            engine_seconds_per_day=share * (0.5 + n / 4), money_per_day=share
        ).limits()
        for n in range(KEYS)
    ]
    return [
        Caller(
            f"{run}-{n}",
            str(n),
            accounts=(Account(f"key:{run}-{n}", "key", own[n]), team),
        )
        for n in range(KEYS)
    ]


def ledger_of(where: str) -> BudgetLedger:
    """Return the shared ledger: in Redis, or in a file."""
    return (
        RedisLedger(where)
        if where.startswith("redis")
        else SqliteLedger(Database(Path(where)))
    )


async def send(where: str, run: str, requests: int, number: int) -> None:
    """Send one process' part, and print what it was charged by account."""
    at = float(run.partition("@")[2])
    reservations = Reservations(
        ledger_of(where), BudgetSettings(replica_hour=1), lambda: at
    )
    source, who, left = (
        random.Random(number),
        callers(run, requests),
        requests // PROCESSES,
    )
    charged: Counter[str] = Counter()
    counts: Counter[str] = Counter()

    async def client() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            caller, most = source.choice(who), source.randint(1, MAX_US)
            try:
                grant = await reservations.enter(caller.accounts, Cost(most, most // 3))
            except OverBudgetError:
                counts["refused"] += 1
                continue
            await asyncio.sleep(0)
            # a few use more than was reserved, as after a failover
            used = source.randint(0, most + most // 50)
            cost = await grant.settle(Cost(used, used // 3))
            counts["served"] += 1
            for account in caller.accounts:
                charged[f"{account.id} engine_us"] += cost.engine_us
                charged[f"{account.id} money_u"] += cost.money_u

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    await reservations.aclose()
    print(
        json.dumps({"charged": charged, "counts": counts, "cpu_s": time.process_time()})
    )


def over(
    run: str, requests: int, used: dict[tuple[str, str], Cost], at: float
) -> list[str]:
    """Return the budgets that are exceeded."""
    limits = {
        (a.id, limit)
        for c in callers(run, requests)
        for a in c.accounts
        for limit in a.limits
    }
    now, found = periods(at), []
    for account, limit in limits:
        there = used[account, now.day if limit.span == "day" else now.month]
        if getattr(there, limit.unit) > limit.amount:
            found.append(f"{account}: {limit.name}")
    return found


async def measure(where: str, requests: int) -> dict[str, object]:
    """Run it, and return what was found."""
    at = float(int(time.time()))
    run = f"{secrets.token_hex(4)}@{at}"
    accounts = sorted(
        {account.id for caller in callers(run, requests) for account in caller.accounts}
    )
    ledger, began, looks, exceeded = ledger_of(where), time.monotonic(), 0, list[str]()
    command = [
        sys.executable,
        __file__,
        "--requests",
        str(requests),
        "--where",
        where,
        "--run",
        run,
        "--number",
    ]
    env = {**os.environ, "PYTHONPATH": ROOT}
    parts = [
        await asyncio.create_subprocess_exec(
            *command, str(n), stdout=asyncio.subprocess.PIPE, env=env
        )
        for n in range(PROCESSES)
    ]
    ended = asyncio.gather(*(part.communicate() for part in parts))
    while not ended.done():
        exceeded += over(run, requests, await ledger.used(accounts, periods(at)), at)
        looks += 1
        await asyncio.wait({ended}, timeout=0.1)
    told = [json.loads(out) for out, _ in await ended]
    used = await ledger.used(accounts, periods(at))
    exceeded += over(run, requests, used, at)
    charged = sum((Counter(each["charged"]) for each in told), Counter[str]())
    counted = {
        f"{a} {unit}": getattr(used[a, periods(at).day], unit)
        for a in accounts
        for unit in Cost._fields
    }
    counts = sum((Counter(each["counts"]) for each in told), Counter[str]())
    return {
        "ledger": "redis" if where.startswith("redis") else "sqlite",
        "requests": requests,
        **counts,
        "looks_during_the_run": looks,
        "budgets_exceeded": sorted(set(exceeded)),
        "charged_engine_us": sum(
            charged[f"key:{c.key_id} engine_us"] for c in callers(run, requests)
        ),
        "ledger_engine_us": sum(
            counted[f"key:{c.key_id} engine_us"] for c in callers(run, requests)
        ),
        "sums_differ": sorted(
            name for name in counted if counted[name] != charged[name]
        ),
        "cpu_us_a_request": round(sum(each["cpu_s"] for each in told) * 1e6 / requests),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    """Run the benchmark, or one of its processes."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--redis", default="", help="address; by default a SQLite file")
    parser.add_argument("--out", type=Path)
    for own in ("--where", "--run", "--number"):
        parser.add_argument(own, default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.where:
        asyncio.run(send(given.where, given.run, given.requests, int(given.number)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(
            measure(given.redis or f"{folder}/usage.sqlite", given.requests)
        )
    text = json.dumps(found, indent=2)
    print(text)
    if given.out:
        given.out.write_text(f"{text}\n")
    return 1 if found["budgets_exceeded"] or found["sums_differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
