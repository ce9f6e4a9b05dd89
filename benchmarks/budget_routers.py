"""Are budgets exact over HTTP? Requests with random keys through two routers on one ledger.

usage: python benchmarks/budget_routers.py [--requests 100000] [--ledger sqlite|redis]

Five keys have a budget of engine-seconds a day each, and share a team's of the month. What requests cost follows the speed
that the routers learn of the stub, so budgets are of all sizes: some are used up soon, others late or not. Exact: no budget
is exceeded at any look; what the ledger holds at the end is the sum of what each request's record says it was charged, to
the millionth; as many requests were charged as were answered with 200; and of a key that was refused, what is left of its
own budget or of the team's is less than one more request could cost. It fails if one of these does not hold. The engine is
a stub; redis needs redis-server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
from measure import free_port, process, stub, wait_for
from quota import start_redis

from router.auth.api_keys import MICRO, add_key, set_team

KEYS, CONNECTIONS = 5, 32
TOKENS = 32  # of the stub's answer, of which as many are charged as the request allows
MAX_S = 0.4  # more than one request costs at any speed that is learned
WARM = 20  # times as many requests as before
TEAM = "bench"
BODIES = [
    json.dumps(
        {
            "model": "fast",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": n,
            "stream": True,
        }
    )
    for n in range(1, TOKENS + 1)
]


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--ledger", choices=("sqlite", "redis"), default="sqlite")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = folder / "keys.json"
        admin = add_key(file, "operator", admin=True, engine_seconds_per_day=1e9)[0]
        env = {
            **os.environ,
            "QARR_AUTH__KEYS_FILE": str(file),
            "QARR_BUDGETS__FILE": str(folder / "usage.sqlite"),
        }
        if args.ledger == "redis":
            env["QARR_STATE__REDIS_URL"] = start_redis(stack)
        url, _ = stack.enter_context(stub())
        ports = [free_port(), free_port()]
        for core, port in enumerate(ports):
            argv = [".venv/bin/qarr", "serve", "--fast", url, "--port", str(port)]
            stack.enter_context(
                process(argv, core, env=env, log=folder / f"router-{core}.log")
            )
            wait_for(port, "/readyz")
        faults = asyncio.run(
            run(ports, file, admin, args.requests, folder / "usage.sqlite")
        )
        if faults:
            for log in sorted(folder.glob("router-*.log")):
                print(log.read_text()[-3000:])
    for fault in faults:
        print(f"FAULT: {fault}")
    return 1 if faults else 0


async def run(
    ports: list[int], file: Path, admin: str, requests: int, usage: Path
) -> list[str]:
    """Send all requests, look at the budgets meanwhile, and print what was counted; return what does not hold."""
    await send(ports, [admin], requests // WARM)
    (cost,) = {
        float(str(each["used"])) * WARM / requests
        for each in await budgets(ports[0], admin)
    }
    keys = await budgeted(ports, file, requests * cost / KEYS)
    began, exceeded, looks = time.monotonic(), set[str](), 0
    sending = asyncio.ensure_future(send(ports, keys, requests))
    while not sending.done():
        exceeded |= {
            f"{each}"
            for each in await budgets(ports[0], admin)
            if each["used"] > each["limit"]
        }
        looks += 1
        await asyncio.wait({sending}, timeout=0.5)
    statuses, took = await sending, time.monotonic() - began
    answered = sum(count for name, count in statuses.items() if name.startswith("200"))
    at_end = [
        each for each in await budgets(ports[1], admin) if each["name"] != "operator"
    ]
    rows = await settled(usage, [str(each["key"]) for each in at_end], answered)
    print(
        f"{requests} requests in {took:.0f} s over two routers and {len(keys)} keys of one team"
    )
    print(
        "answers by status and key: "
        + ", ".join(f"{name}: {count}" for name, count in sorted(statuses.items()))
    )
    charged = sum(engine_us for _, engine_us in rows.values())
    whole = next(each for each in at_end if each["key"] is None)
    print(
        f"charged by the requests' records: {charged} us; in the ledger: {micro(whole)} us; budgets looked at {looks} times"
    )
    faults = [f"exceeded: {name}" for name in sorted(exceeded)]
    if (counted := sum(count for count, _ in rows.values())) != answered:
        faults.append(f"{counted} requests are charged, and {answered} were answered")
    if charged != micro(whole):
        faults.append("the team's budget differs from the sum of charges")
    faults += [
        f"{each['name']}: {micro(each)} us in the ledger, {rows[each['key']][1]} us by the records"
        for each in at_end
        if each["key"] is not None and micro(each) != rows[each["key"]][1]
    ]
    left = {each["name"] or "team": each["limit"] - each["used"] for each in at_end}
    print(
        "left of each budget, in engine-seconds: "
        + ", ".join(f"{name}: {rest:.3f}" for name, rest in left.items())
    )
    for number in range(KEYS):
        if (
            statuses[f"429 key {number}"]
            and min(left[f"key {number}"], left["team"]) > MAX_S
        ):
            faults.append(
                f"requests of key {number} were refused although there was room for them"
            )
    return faults


async def budgeted(ports: list[int], file: Path, share: float) -> list[str]:
    """Make the keys, the first with so many engine-seconds, and return them once both routers know them."""
    set_team(file, TEAM, engine_seconds_per_month=share)
    keys = [
        add_key(file, f"key {n}", team=TEAM, engine_seconds_per_day=share / 4**n)[0]
        for n in range(KEYS)
    ]
    for port in ports:
        while True:
            with suppress(httpx.HTTPStatusError):
                await budgets(port, keys[-1])
                break
            await asyncio.sleep(0.1)
    return keys


async def send(ports: list[int], keys: list[str], requests: int) -> Counter[str]:
    """Send requests with random keys to both routers; return how many of each key had which status."""
    source = random.Random(5)
    whose = iter(source.choices(keys, k=requests))
    statuses: Counter[str] = Counter()

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for key in whose:
            body = source.choice(BODIES)
            writer.write(
                f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
            )
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
            if length:
                await reader.readexactly(int(length))
            else:
                await reader.readuntil(b"0\r\n\r\n")
            statuses[f"{head[9:12].decode()} key {keys.index(key)}"] += 1
        writer.close()

    await asyncio.gather(*(client(ports[n % len(ports)]) for n in range(CONNECTIONS)))
    return statuses


async def budgets(port: int, admin: str) -> list[dict[str, object]]:
    """Return how far each budget is used, as a router tells operators."""
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        answer = await client.get(
            f"http://127.0.0.1:{port}/usage",
            headers={"authorization": f"Bearer {admin}"},
        )
    found: list[dict[str, object]] = answer.raise_for_status().json()["budgets"]
    return found


async def settled(
    usage: Path, keys: list[str], answered: int
) -> dict[str, tuple[int, int]]:
    """Return each key's requests and their charges in microseconds, once all answered ones are written."""
    for _ in range(60):
        with sqlite3.connect(usage) as sql:
            found = sql.execute(
                "SELECT key, SUM(requests), SUM(engine_us) FROM usage GROUP BY key"
            ).fetchall()
        found = [row for row in found if row[0] in keys]
        if sum(count for _, count, _ in found) >= answered:
            break
        await asyncio.sleep(0.5)
    return {key: (count, engine_us) for key, count, engine_us in found}


def micro(budget: dict[str, object]) -> int:
    """Return what is used of a budget in microseconds."""
    return round(float(str(budget["used"])) * MICRO)


if __name__ == "__main__":
    sys.exit(main())
