"""Several routers in front of one fleet while their Redis fails: is a limit exceeded, does one starve, is one wedged?

    python benchmarks/chaos/routers.py [--minutes 10] [--routers 2 4] [--clients 12]

Two routers, then four, each a process of its own, with one Redis and three fake engines that count what they have at once.
Every router has as many clients, which ask again as soon as they are answered, for more than the engines may have; their
key has a quota, so that Redis counts every request too. Meanwhile Redis is paused, made read-only, without memory, emptied,
and killed and started empty, with as much time between as each lasts. Prints by phase what was served, refused and failed,
what each router served, and the most that each engine had. Ends with status 1 where an engine had more than its limit and
one request a router, where a router served less than four fifths of what another one did, where a request failed for any
other reason than that every place was taken, or where at the end a router does not serve, does not share, or has left a
place of the key behind. Needs redis-server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from redis.asyncio import Redis

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from measure import free_port, wait_for  # noqa: E402

from router.auth.api_keys import add_key  # noqa: E402
from tests.fakes.engine import Behaviour, Exchange, FakeEngine, serving_all  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator

    from starlette.responses import Response

QARR = Path(sys.executable).with_name("qarr")
# four routers share none of them evenly but one
LIMITS = {"fast": 6, "balanced": 5, "precise": 4}
TOKEN_S = 0.05
CYCLE_S = 120.0  # in which every fault comes once; shorter where there is less time
LAST_S = 8.0  # without a fault, at the end, for what must be well again


class CountingEngine(FakeEngine):
    """A fake engine that knows the most that it had at once."""

    def __init__(self) -> None:
        super().__init__(Behaviour(delay_s=TOKEN_S))
        self.now = self.most = 0

    @contextlib.contextmanager
    def _one(self) -> Iterator[Callable[[], None]]:
        """Count a request until it is done, which it is before its caller can know."""
        self.now += 1
        self.most = max(self.most, self.now)
        open_ = [1]

        def done() -> None:
            self.now -= open_.pop() if open_ else 0

        try:
            yield done
        finally:
            done()

    async def _whole(self, body: dict[str, Any], *, chat: bool) -> Response:
        with self._one():
            return await super()._whole(body, chat=chat)

    async def _stream(
        self, answer: AsyncGenerator[bytes, None], exchange: Exchange
    ) -> AsyncIterator[bytes]:
        with self._one() as done:
            async for event in super()._stream(answer, exchange):
                if b"[DONE]" in event:
                    done()
                yield event


@dataclass(slots=True)
class RedisProcess:
    """The Redis that the routers share."""

    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, empty."""
        program = shutil.which("redis-server")
        assert program, "redis-server is not installed"
        argv = [
            program,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        self.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        wait_for(self.port)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it, so that it forgets everything."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    async def say(self, *command: str) -> Any:
        """Send it a command."""
        client = Redis(port=self.port, decode_responses=True)
        try:
            return await client.execute_command(*command)
        finally:
            await client.aclose()

    async def fail(self, how: str, seconds: float) -> None:
        """Break it in one way for so long."""
        if how == "paused":
            self.send(signal.SIGSTOP)
            await asyncio.sleep(seconds)
            self.send(signal.SIGCONT)
        elif how == "read-only":
            await self.say("REPLICAOF", "127.0.0.1", str(free_port()))
            await asyncio.sleep(seconds)
            await self.say("REPLICAOF", "NO", "ONE")
        elif how == "full":
            await self.say("CONFIG", "SET", "maxmemory", "1")
            await asyncio.sleep(seconds)
            await self.say("CONFIG", "SET", "maxmemory", "0")
        elif how == "emptied":
            await self.say("FLUSHALL")
            await asyncio.sleep(seconds)
        else:
            self.kill()
            await asyncio.sleep(seconds)
            self.start()


FAULTS = ("paused", "read-only", "full", "emptied", "restarted")


@dataclass(slots=True)
class Seen:
    """What came of the requests: by phase and outcome, and by router in all and in the last phase."""

    phase: str = "well"
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    served: Counter[int] = field(default_factory=Counter)
    at_last: Counter[int] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)


async def client(
    http: httpx.AsyncClient, url: str, tier: str, router: int, seen: Seen
) -> None:
    """Ask one router again and again."""
    body = {
        "prompt": "hi",
        "max_tokens": 6,
        "tier": tier,
        "tier_policy": "require",
        "stream": False,
    }
    while True:
        try:
            answer = await http.post(f"{url}/generate", json=body)
            outcome = {200: "served", 503: "refused"}.get(answer.status_code, "failed")
            why = answer.text
        except httpx.HTTPError as error:
            outcome, why = "failed", repr(error)
        seen.outcomes[seen.phase, outcome] += 1
        if outcome == "served":
            seen.served[router] += 1
            seen.at_last[router] += seen.phase == "at last"
        else:
            seen.problems[f"{seen.phase}: {why[:300]}"] += outcome == "failed"
            await asyncio.sleep(0.2)


async def break_redis(redis: RedisProcess, seconds: float, seen: Seen) -> None:
    """Break Redis in every way in turn, with as much time between."""
    cycles = max(round(seconds / CYCLE_S), 1)
    each_s = (seconds - LAST_S) / (cycles * 2 * len(FAULTS))
    for fault in cycles * FAULTS:
        for phase in ("well", fault):
            seen.phase, began = phase, time.monotonic()
            await (
                asyncio.sleep(each_s) if phase == "well" else redis.fail(fault, each_s)
            )
            seen.seconds[phase] += time.monotonic() - began
    seen.phase = "at last"
    await asyncio.sleep(LAST_S)
    seen.seconds["at last"] += LAST_S


@contextlib.contextmanager
def routers(
    count: int, engines: list[str], environment: dict[str, str]
) -> Iterator[list[str]]:
    """Run routers; yield their URLs."""
    with contextlib.ExitStack() as stack:
        ports = [free_port() for _ in range(count)]
        urls = [
            part
            for tier, url in zip(LIMITS, engines, strict=True)
            for part in (f"--{tier}", url)
        ]
        for port in ports:
            argv = [str(QARR), "serve", "--port", str(port), *urls]
            running = subprocess.Popen(argv, env=environment, stderr=subprocess.DEVNULL)
            stack.callback(running.wait, 30)
            stack.callback(running.terminate)
        yield [f"http://127.0.0.1:{port}" for port in ports]


def variables(folder: Path, redis: RedisProcess) -> dict[str, str]:
    """Return the routers' environment."""
    found = {
        k: v for k, v in os.environ.items() if not k.startswith(("QARR_", "OTEL_"))
    }
    found |= {
        "XDG_CONFIG_HOME": str(folder),
        "XDG_RUNTIME_DIR": str(folder),
        "QARR_CACHE_DIR": str(folder),
        "QARR_AUTH__KEYS_FILE": str(folder / "keys.json"),
        "QARR_STATE__REDIS_URL": f"redis://127.0.0.1:{redis.port}/0",
        "QARR_POLICY__MAX_SLOWDOWN": "1e9",
        "QARR_ENGINE__CHECK_TOLERANCE": "0",
        "QARR_ADMISSION__MAX_WAIT_S__STANDARD": "60",
    }
    for tier, limit in LIMITS.items():
        found[f"QARR_TIERS__{tier.upper()}__MAX_IN_FLIGHT"] = found[
            f"QARR_TIERS__{tier.upper()}__MAX_NUM_SEQS"
        ] = str(limit)
    return found


async def limits(http: httpx.AsyncClient, urls: list[str]) -> dict[str, list[int]]:
    """Return each router's share of each engine, by tier; of an engine that is not ready 0."""
    found: dict[str, list[int]] = {tier: [] for tier in LIMITS}
    for url in urls:
        try:
            tiers = (await http.get(f"{url}/tiers")).json()["tiers"]
        except httpx.HTTPError:
            tiers = [{"tier": tier, "replicas": []} for tier in LIMITS]
        for tier in tiers:
            ready = [
                replica for replica in tier["replicas"] if replica["state"] == "ready"
            ]
            found[tier["tier"]].append(ready[0]["limit"] if ready else 0)
    return found


async def until_ready(http: httpx.AsyncClient, urls: list[str]) -> None:
    """Wait until every router has every engine, and until they know of one another."""
    async with asyncio.timeout(120):
        while True:
            found = await limits(http, urls)
            if all(
                all(shares) and sum(shares) >= LIMITS[tier]
                for tier, shares in found.items()
            ):
                return
            await asyncio.sleep(0.5)


async def run(count: int, options: argparse.Namespace) -> bool:
    """Run so many routers, print what was seen, and tell whether all was as it should be."""
    redis, seen = RedisProcess(), Seen()
    redis.start()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(redis.kill)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clients = count * options.clients
        key, record = add_key(
            folder / "keys.json", "clients", concurrent_requests=2 * clients
        )
        engines = [CountingEngine() for _ in LIMITS]
        served_at = await stack.enter_async_context(
            serving_all(*(engine.app for engine in engines))
        )
        urls = stack.enter_context(routers(count, served_at, variables(folder, redis)))
        headers, pool = (
            {"authorization": f"Bearer {key}"},
            httpx.Limits(max_connections=None),
        )
        http = httpx.AsyncClient(
            timeout=120, trust_env=False, headers=headers, limits=pool
        )
        await stack.enter_async_context(http)
        await until_ready(http, urls)
        for engine in engines:
            engine.most = engine.now
        asking = [
            asyncio.create_task(
                client(http, url, list(LIMITS)[n % len(LIMITS)], number, seen)
            )
            for number, url in enumerate(urls)
            for n in range(options.clients)
        ]
        await break_redis(redis, options.minutes * 60, seen)
        shares = await limits(http, urls)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        await asyncio.sleep(3)
        left = await redis.say("ZCARD", f"qarr:{{{record.id}}}:places")
    return report(count, seen, engines, shares, left)


def report(
    count: int,
    seen: Seen,
    engines: list[CountingEngine],
    shares: dict[str, list[int]],
    left: int,
) -> bool:
    """Print what was seen; tell whether every bound held."""
    print(
        f"\n{count} routers\n{'Redis':12}{'seconds':>9}{'served/s':>10}{'refused':>9}{'failed':>8}"
    )
    for phase, seconds in seen.seconds.items():
        served, refused, failed = (
            seen.outcomes[phase, outcome] for outcome in ("served", "refused", "failed")
        )
        print(
            f"{phase:12}{seconds:>9.1f}{served / seconds:>10.1f}{refused:>9}{failed:>8}"
        )
    for problem, times in seen.problems.most_common(5):
        if times:
            print(f"{times} x {problem}")
    total, fewest, most = (
        seen.served.total(),
        *(pick(seen.served[n] for n in range(count)) for pick in (min, max)),
    )
    parts = ", ".join(
        f"{seen.served[n]} ({seen.served[n] / max(total, 1):.1%})" for n in range(count)
    )
    even = most > 0 and fewest >= 0.8 * most
    print(f"served by each router: {parts}{_unless(even, 'more than 20 % apart')}")
    kept = True
    for (tier, limit), engine in zip(LIMITS.items(), engines, strict=True):
        within = engine.most <= limit + count
        kept = kept and within
        print(
            f"{tier:9} limit {limit}, most at once {engine.most}{_unless(within, 'over the limit')}; at last {shares[tier]}"
        )
    sharing = [
        bool(seen.at_last[n])
        and all(
            0 < shares[tier][n] <= -(-limit // count) + 1
            for tier, limit in LIMITS.items()
        )
        for n in range(count)
    ]
    wedged = count - sum(sharing)
    print(f"wedged routers: {wedged}; places of the key that were left behind: {left}")
    failed = sum(
        times for (_, outcome), times in seen.outcomes.items() if outcome == "failed"
    )
    return even and kept and not wedged and not left and not failed


def _unless(good: bool, what: str) -> str:  # noqa: FBT001  reads as one line
    return "" if good else f" - {what.upper()}"


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=10, help="For each number of routers."
    )
    parser.add_argument("--routers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--clients", type=int, default=12, help="Of each router.")
    options = parser.parse_args()
    numbers = " ".join(map(str, options.routers))
    print(
        f"$ python benchmarks/chaos/routers.py --minutes {options.minutes:g} --routers {numbers} --clients {options.clients}"
    )
    good = [asyncio.run(run(count, options)) for count in options.routers]
    print("\nall bounds held" if all(good) else "\nA BOUND WAS BROKEN")
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
