"""Are budgets exact over HTTP? Requests with random keys, far over their budgets, through two routers on one ledger.

usage: python benchmarks/budget_routers.py [--requests 100000] [--ledger sqlite|redis]

Five keys have a budget of engine-seconds a day each, and share a team's of the month; there is room for a part of the
requests, which hangs on the speed that the routers learn of the stub. Exact: no budget is exceeded at any look; what the
ledger holds at the end is the sum of what each request's record says it was charged, to the millionth; as many requests
were charged as were answered with 200; and what is left of a used-up budget is less than one more request could cost. It
fails if one of these does not hold. The engine is a stub; redis needs redis-server.
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
from contextlib import ExitStack
from pathlib import Path

import httpx
from measure import free_port, process, stub, wait_for
from quota import start_redis

from router.auth.api_keys import add_key, set_team
from router.policy.charge import MICRO

KEYS, CONNECTIONS = 5, 32
TOKENS = 32  # of the stub's answer
ENGINE_S = 0.002  # less than such a request costs at the speed that is learned of the stub
MOST_S = 0.4  # more than one costs before it is known
TEAM = "bench"
BODY = json.dumps(
    {"model": "fast", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": TOKENS, "stream": True}
)


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--ledger", choices=("sqlite", "redis"), default="sqlite")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = folder / "keys.json"
        share = args.requests * ENGINE_S / KEYS * 2 / 3
        set_team(file, TEAM, engine_seconds_per_month=share * KEYS * 0.9)
        keys = [
            add_key(file, f"key {n}", team=TEAM, engine_seconds_per_day=share * (0.5 + n / 4))[0] for n in range(KEYS)
        ]
        admin = add_key(file, "operator", admin=True)[0]
        env = {**os.environ, "QARR_AUTH__KEYS_FILE": str(file), "QARR_BUDGETS__FILE": str(folder / "usage.sqlite")}
        if args.ledger == "redis":
            env["QARR_STATE__REDIS_URL"] = start_redis(stack)
        url, _ = stack.enter_context(stub())
        ports = [free_port(), free_port()]
        for core, port in enumerate(ports):
            argv = [".venv/bin/qarr", "serve", "--fast", url, "--port", str(port)]
            stack.enter_context(process(argv, core, env=env, log=folder / f"router-{core}.log"))
            wait_for(port, "/readyz")
        faults = asyncio.run(run(ports, keys, admin, args.requests, folder / "usage.sqlite"))
        if faults:
            for log in sorted(folder.glob("router-*.log")):
                print(log.read_text()[-3000:])
    for fault in faults:
        print(f"FAULT: {fault}")
    return 1 if faults else 0


async def run(ports: list[int], keys: list[str], admin: str, requests: int, usage: Path) -> list[str]:
    """Send all requests, look at the budgets meanwhile, and print what was counted; return what does not hold."""
    began, exceeded, looks = time.monotonic(), set[str](), 0
    sending = asyncio.ensure_future(send(ports, keys, requests))
    while not sending.done():
        exceeded |= {f"{each}" for each in await budgets(ports[0], admin) if each["used"] > each["limit"]}
        looks += 1
        await asyncio.wait({sending}, timeout=0.5)
    statuses, took = await sending, time.monotonic() - began
    rows = await settled(usage, statuses["200"])
    at_end = await budgets(ports[1], admin)
    print(f"{requests} requests in {took:.0f} s over two routers and {len(keys)} keys of one team")
    print("answers by status: " + ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items())))
    charged = sum(engine_us for _, engine_us in rows.values())
    whole = next(each for each in at_end if each["key"] is None)
    print(
        f"charged by the requests' records: {charged} us; in the ledger: {micro(whole)} us; budgets looked at {looks} times"
    )
    faults = [f"exceeded: {name}" for name in sorted(exceeded)]
    if (counted := sum(count for count, _ in rows.values())) != statuses["200"]:
        faults.append(f"{counted} requests are charged, and {statuses['200']} were answered")
    if charged != micro(whole):
        faults.append("the team's budget differs from the sum of charges")
    faults += [
        f"{each['name']}: {micro(each)} us in the ledger, {rows[each['key']][1]} us by the records"
        for each in at_end
        if each["key"] is not None and micro(each) != rows[each["key"]][1]
    ]
    left = {each["name"] or "team": each["limit"] - each["used"] for each in at_end}
    print("left of each budget, in engine-seconds: " + ", ".join(f"{name}: {rest:.3f}" for name, rest in left.items()))
    if min(left.values()) > MOST_S:
        faults.append("requests were refused although there was room for them")
    return faults


async def send(ports: list[int], keys: list[str], requests: int) -> Counter[str]:
    """Send requests with random keys to both routers; return how many had which status."""
    whose = iter(random.Random(5).choices(keys, k=requests))
    statuses: Counter[str] = Counter()

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for key in whose:
            writer.write(
                f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n{BODY}".encode()
            )
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
            if length:
                await reader.readexactly(int(length))
            else:
                await reader.readuntil(b"0\r\n\r\n")
            statuses[head[9:12].decode()] += 1
        writer.close()

    await asyncio.gather(*(client(ports[n % len(ports)]) for n in range(CONNECTIONS)))
    return statuses


async def budgets(port: int, admin: str) -> list[dict[str, object]]:
    """Return how far each budget is used, as a router tells operators."""
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        answer = await client.get(f"http://127.0.0.1:{port}/usage", headers={"authorization": f"Bearer {admin}"})
    found: list[dict[str, object]] = answer.raise_for_status().json()["budgets"]
    return found


async def settled(usage: Path, answered: int) -> dict[str, tuple[int, int]]:
    """Return each key's requests and their charges in microseconds, once all answered ones are written."""
    for _ in range(60):
        with sqlite3.connect(usage) as sql:
            found = sql.execute("SELECT key, SUM(requests), SUM(engine_us) FROM usage GROUP BY key").fetchall()
        if sum(count for _, count, _ in found) >= answered:
            break
        await asyncio.sleep(0.5)
    return {key: (count, engine_us) for key, count, engine_us in found}


def micro(budget: dict[str, object]) -> int:
    """Return what is used of a budget in microseconds."""
    return round(float(str(budget["used"])) * MICRO)


if __name__ == "__main__":
    sys.exit(main())
