"""Are quotas exact? Requests with random keys, far over their quotas, through two routers that share a Redis.

usage: python benchmarks/quota.py [--requests 100000] [--keys 40]

Every key offers more than it may use. Exact: within the first minute each key is served as many requests as its quota
allows, not one more or fewer; and no 60 seconds, wherever they start, hold more. A request is within 60 seconds if it was
sent and answered within them. It needs redis-server; the engine is a stub.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path

from measure import free_port, process, stub, wait_for

from router.auth.api_keys import add_key

WINDOW_S = 60
CONNECTIONS = 32


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--keys", type=int, default=40)
    args = parser.parse_args()
    source = random.Random(5)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        quotas = {f"key {n}": source.randint(20, 400) for n in range(args.keys)}
        file = folder / "keys.json"
        keys = {
            name: add_key(file, name, requests_per_minute=quota)[0]
            for name, quota in quotas.items()
        }
        os.environ["QARR_AUTH__KEYS_FILE"] = str(file)
        os.environ["QARR_STATE__REDIS_URL"] = start_redis(stack)
        url, _ = stack.enter_context(stub())
        ports = [free_port() for _ in range(2)]
        for core, port in enumerate(ports):
            stack.enter_context(
                process(
                    [".venv/bin/qarr", "serve", "--fast", url, "--port", str(port)],
                    core,
                )
            )
            wait_for(port, "/readyz")
        started = time.monotonic()
        answers = asyncio.run(send(ports, keys, args.requests, source))
    report(answers, quotas, started, "two routers")


def start_redis(stack: ExitStack) -> str:
    """Start a Redis, and return its URL."""
    program = shutil.which("redis-server")
    assert program, "redis-server is not installed"
    port = free_port()
    stack.enter_context(
        process(
            [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""], None
        )
    )
    wait_for(port)
    return f"redis://127.0.0.1:{port}/0"


async def send(
    ports: list[int], keys: dict[str, str], requests: int, source: random.Random
) -> dict[str, list[tuple[int, float, float]]]:
    """Send requests with random keys; return (status, sent, answered) by key."""
    names = iter(source.choices(list(keys), k=requests))
    answers: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    body = json.dumps(
        {
            "model": "fast",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 8,
            "stream": True,
        }
    )

    async def client(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for name in names:
            sent = time.monotonic()
            writer.write(
                f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {keys[name]}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
            )
            head = await reader.readuntil(b"\r\n\r\n")
            assert head[9:12] in {b"200", b"429"}, head
            length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
            if length:
                await reader.readexactly(int(length))
            else:
                await reader.readuntil(b"0\r\n\r\n")
            answers[name].append((int(head[9:12]), sent, time.monotonic()))
        writer.close()

    await asyncio.gather(*(client(ports[n % len(ports)]) for n in range(CONNECTIONS)))
    return answers


def report(
    answers: dict[str, list[tuple[int, float, float]]],
    quotas: dict[str, int],
    started: float,
    through: str,
) -> None:
    """Print what was counted."""
    statuses = Counter(
        status for answered in answers.values() for status, _, _ in answered
    )
    took = max(at for answered in answers.values() for _, _, at in answered) - started
    exact = over = 0
    for name, answered in answers.items():
        served = sorted((sent, at) for status, sent, at in answered if status == 200)
        first_minute = sum(at < started + WINDOW_S for _, at in served)
        offered = sum(at < started + WINDOW_S for _, _, at in answered)
        exact += first_minute == min(quotas[name], offered)
        most = max(
            sum(at <= start + WINDOW_S for sent, at in served if sent >= start)
            for start, _ in served
        )
        over += most > quotas[name]
    print(
        f"{sum(statuses.values())} requests in {took:.0f} s over {through} and {len(quotas)} keys"
    )
    print(
        "answers by status: "
        + ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
    )
    print(
        f"served in the first minute exactly what the quota allows: {exact} of {len(quotas)} keys"
    )
    print(f"keys with any 60 s above their quota: {over}")


if __name__ == "__main__":
    main()
