"""One fault after another while people chat: which requests does it cost, does the router come back, is anything left?

    python benchmarks/chaos/faults.py [--faults NAME...] [--seconds 8]

Each fault has a router and three fake engines of its own, as processes. Chats and generations, streamed and whole, and
requests to tokenize run all the time: before the fault, while it lasts, and after it. Prints a row for each fault: requests
that ended well, were refused with a Retry-After, failed with an error, were cut off without one, or had no end (wedged); and
what the router holds when all is over. Status 1 when a fault costs more than it may, or when not every engine serves again
afterwards. Steps of the clock are made in the router's process alone: ``time.time`` is replaced there before it starts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "benchmarks"),
    str(Path(__file__).resolve().parent),
]

from measure import free_port  # noqa: E402
from running import PATIENCE_S, Running, process, running  # noqa: E402

from router.auth.api_keys import add_key  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

WORKERS, PESTERERS = 6, 24
PAUSE_S = 0.05  # between a worker's requests
QUOTA_WINDOW_S = 61
SHAPES = {"fast": (7, 6, 0.01), "balanced": (7, 6, 0.01), "precise": (7, 6, 0.01)}
# What the router's interpreter runs first: wall clock times are off by what a file says. Monotonic ones are not.
SITE = """
import mmap, os, struct, time
with open(os.environ["CHAOS_CLOCK"], "rb") as file:
    off = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
real, real_ns = time.time, time.time_ns
time.time = lambda: real() + struct.unpack("q", off)[0]
time.time_ns = lambda: real_ns() + struct.unpack("q", off)[0] * 10**9
"""
KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/generate", {"prompt": "Hello, how are you?", "max_tokens": 7}),
    ("/generate", {"prompt": "Hello, how are you?", "max_tokens": 7, "stream": False}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 7,
            "stream": True,
        },
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 7},
    ),
    ("/tokenize", {"prompt": "Hello, how are you?"}),
)
ENDS = ("ok", "refused", "failed", "cut", "wedged")
GENERATIONS = ("/v1/chat/completions", "/v1/completions")
NONSENSE = '{"data": [], "error": null, "choices": [{"nonsense": NaN'


@dataclass(slots=True)
class Scene:
    """A router with its engines, and how the requests to it ended."""

    router: Running
    client: httpx.AsyncClient
    key: str
    spent_key: str
    embeddings: int
    clock: Path
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    async def engine(self, *tiers: str, **fields: Any) -> None:
        """Change how engines behave."""
        ports = {**self.router.engines, "embeddings": self.embeddings}
        for tier in tiers or tuple(self.router.engines):
            await self.client.post(f"http://127.0.0.1:{ports[tier]}/fake", json=fields)

    async def ask(
        self, path: str, body: dict[str, Any], key: str | None = None
    ) -> httpx.Response:
        """Send a request to the router."""
        headers = {"authorization": f"Bearer {key or self.key}"}
        return await self.client.post(
            f"http://127.0.0.1:{self.router.port}{path}", json=body, headers=headers
        )

    async def get(self, path: str) -> httpx.Response:
        """Read from the router."""
        headers = {"authorization": f"Bearer {self.key}"}
        return await self.client.get(
            f"http://127.0.0.1:{self.router.port}{path}", headers=headers
        )


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault.

    Attributes:
        during: Makes it, and ends it.
        allowed: Ends, other than ``ok``, that requests may have.
        embeddings: Whether embeddings are asked for meanwhile, by many.
    """

    name: str
    during: Callable[[Scene], AbstractAsyncContextManager[None]]
    allowed: frozenset[str] = frozenset()


def behaving(
    *tiers: str, **fields: Any
) -> Callable[[Scene], AbstractAsyncContextManager[None]]:
    """Return a fault in which engines behave otherwise; no tiers: all of them."""
    well = {
        "hung": (),
        "instead": {},
        "break_after": None,
        "stall_after": None,
        "alive": True,
        "status": 200,
    }

    @asynccontextmanager
    async def during(scene: Scene) -> AsyncIterator[None]:
        await scene.engine(*tiers, **fields)
        try:
            yield
        finally:
            await scene.engine(*tiers, **{name: well[name] for name in fields})

    return during


def breaking(
    fault: Callable[[Scene], AbstractAsyncContextManager[None]],
) -> Callable[[Scene], AbstractAsyncContextManager[None]]:
    """Return a fault during which the streams of fast break midway."""
    other = behaving("fast", break_after=3)

    @asynccontextmanager
    async def during(scene: Scene) -> AsyncIterator[None]:
        async with fault(scene), other(scene):
            yield

    return during


def pestered(
    path: str,
    body: dict[str, Any],
    fault: Callable[[Scene], AbstractAsyncContextManager[None]],
) -> Callable[[Scene], AbstractAsyncContextManager[None]]:
    """Return a fault in which many ask, all the time, for what is not answered; half of them leave soon."""

    @asynccontextmanager
    async def during(scene: Scene) -> AsyncIterator[None]:
        async def pester(patience_s: float) -> None:
            while True:
                try:
                    async with asyncio.timeout(patience_s):
                        answer = await scene.ask(path, body)
                except TimeoutError:
                    if patience_s >= PATIENCE_S:
                        scene.faults.append(f"{path}: no end")
                    continue
                if (
                    answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR
                    and "retry-after" not in answer.headers
                ):
                    scene.faults.append(
                        f"{path}: {answer.status_code} without Retry-After"
                    )
                await asyncio.sleep(PAUSE_S)

        async with fault(scene):
            asking = [
                asyncio.create_task(pester(PATIENCE_S if n % 2 else 0.5))
                for n in range(PESTERERS)
            ]
            try:
                yield
            finally:
                for task in asking:
                    task.cancel()
                await asyncio.gather(*asking, return_exceptions=True)

    return during


def stepped(seconds: int) -> Callable[[Scene], AbstractAsyncContextManager[None]]:
    """Return a fault in which the router's wall clock is wrong by so much, after a key has used up its quota."""

    @asynccontextmanager
    async def during(scene: Scene) -> AsyncIterator[None]:
        while (
            await scene.ask(*KINDS[1], scene.spent_key)
        ).status_code == httpx.codes.OK:
            pass
        _set_clock(scene.clock, seconds)
        try:
            yield
            spent = await scene.ask(*KINDS[1], scene.spent_key)
            wait_s = int(spent.headers.get("retry-after", 0))
            if (
                spent.status_code != httpx.codes.TOO_MANY_REQUESTS
                or not 0 < wait_s <= QUOTA_WINDOW_S
            ):
                scene.faults.append(
                    f"a key without quota left: {spent.status_code}, Retry-After {wait_s}"
                )
        finally:
            _set_clock(scene.clock, 0)

    return during


def _set_clock(clock: Path, seconds: int) -> None:
    with clock.open("r+b" if clock.exists() else "wb") as file:
        file.write(struct.pack("q", seconds))


FAULTS = (
    Fault("nothing", behaving()),
    Fault("clock-forward", stepped(3600)),
    Fault("clock-back", stepped(-3600)),
    Fault(
        "hung-embeddings",
        pestered(
            "/v1/embeddings",
            {"model": "e", "input": "x"},
            behaving("embeddings", hung=["/v1/embeddings"]),
        ),
    ),
    Fault(
        "hung-tokenize",
        pestered("/tokenize", {"prompt": "x"}, behaving("fast", hung=["/tokenize"])),
    ),
    Fault("hung-detokenize", breaking(behaving(hung=["/detokenize"]))),
    # An answer that is not streamed and never comes is not asked for elsewhere: 504.
    Fault("hung-generation", behaving("fast", hung=GENERATIONS), frozenset({"failed"})),
    Fault(
        "hung-health",
        behaving(hung=["/health", "/metrics", "/v1/models"]),
        frozenset({"refused"}),
    ),
    Fault(
        "malformed-generation",
        behaving("fast", instead=dict.fromkeys(GENERATIONS, NONSENSE)),
    ),
    Fault(
        "malformed-tokenize",
        behaving("fast", instead=dict.fromkeys(("/tokenize", "/detokenize"), NONSENSE)),
    ),
    Fault(
        "malformed-health",
        behaving(
            instead={
                "/health": NONSENSE,
                "/metrics": "vllm:num_requests_running NaN\n{",
                "/v1/models": NONSENSE,
            }
        ),
        frozenset({"refused"}),
    ),
)


async def ended(scene: Scene, path: str, body: dict[str, Any]) -> str:
    """Send one request and tell how it ended."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            answer = await scene.ask(path, body)
    except TimeoutError:
        return "wedged"
    except httpx.HTTPError:
        return "cut"
    text = answer.text
    if answer.status_code != httpx.codes.OK:
        refused = answer.status_code in {
            httpx.codes.SERVICE_UNAVAILABLE,
            httpx.codes.TOO_MANY_REQUESTS,
        }
        return "refused" if refused and "retry-after" in answer.headers else "failed"
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return "ok" if _whole(text) else "failed"
    if "event: done" in text or text.endswith("data: [DONE]\n\n"):
        return "ok"
    return "failed" if '"error":' in text or "event: error" in text else "cut"


def _whole(text: str) -> bool:
    """Tell whether a whole answer holds what was asked for."""
    try:
        answer = json.loads(text)
    except ValueError:
        return False
    return isinstance(answer, dict) and any(
        answer.get(name) for name in ("text", "choices", "tokens")
    )


async def worker(scene: Scene, number: int, over: asyncio.Event) -> None:
    """Send one kind of request after another until it is over."""
    while not over.is_set():
        number += 1
        end = await ended(scene, *KINDS[number % len(KINDS)])
        scene.ends[end] += 1
        if end != "ok":
            path, body = KINDS[number % len(KINDS)]
            scene.ends[
                f"{end}: {path}{', streamed' if body.get('stream') else ''}"
            ] += 1
        await asyncio.sleep(PAUSE_S)


async def held(scene: Scene) -> dict[str, int]:
    """Return what the router holds now."""
    fleet = (await scene.get("/tiers")).json()
    replicas = [replica for tier in fleet["tiers"] for replica in tier["replicas"]]
    metrics = (await scene.get("/metrics")).text
    tasks = re.search(r"^qarr_tasks (\S+)$", metrics, re.MULTILINE)
    kinds = ("in_flight", "prompt_tokens_outstanding", "output_tokens_outstanding")
    return {
        "leases": sum(replica[kind] for replica in replicas for kind in kinds),
        "tasks": int(float(tasks[1])) if tasks else 0,
        "not ready": sum(replica["state"] != "ready" for replica in replicas),
    }


async def comes_back(scene: Scene, before: dict[str, int]) -> dict[str, int]:
    """Wait until every engine serves again and nothing is held; return what is still wrong after a while."""
    deadline = time.monotonic() + 2 * PATIENCE_S
    while True:
        now = await held(scene)
        wrong = {
            "leases": now["leases"],
            "tasks": max(now["tasks"] - before["tasks"], 0),
            "not ready": now["not ready"],
        }
        wrong["do not serve"] = 0
        for tier in scene.router.engines:
            answer = await scene.ask(
                "/generate", {**KINDS[1][1], "tier": tier, "tier_policy": "require"}
            )
            wrong["do not serve"] += answer.status_code != httpx.codes.OK
        if not any(wrong.values()) or time.monotonic() > deadline:
            return {what: count for what, count in wrong.items() if count}
        await asyncio.sleep(0.2)


async def run(fault: Fault, scene: Scene, seconds: float) -> list[str]:
    """Run a fault and print its row; return what was wrong."""
    await comes_back(scene, await held(scene))  # warm
    before, over = await held(scene), asyncio.Event()
    asking = [
        asyncio.create_task(worker(scene, number, over)) for number in range(WORKERS)
    ]
    await asyncio.sleep(seconds / 4)
    async with fault.during(scene):
        await asyncio.sleep(seconds / 2)
    await asyncio.sleep(seconds / 4)
    over.set()
    await asyncio.gather(*asking)
    left = await comes_back(scene, before)
    counts = [scene.ends[end] for end in ENDS]
    print(
        f"{fault.name:22}{sum(counts):>9}"
        + "".join(f"{count:>9}" for count in counts)
        + f"  {left or 'nothing'}"
    )
    sys.stdout.flush()
    wrong = [
        f"{scene.ends[end]} {end}"
        for end in ENDS[1:]
        if scene.ends[end] and end not in fault.allowed
    ]
    if wrong:
        wrong += [f"{count} {end}" for end, count in scene.ends.items() if ":" in end]
    wrong += [f"left: {count} {what}" for what, count in left.items()] + sorted(
        set(scene.faults)
    )
    if not scene.ends["ok"]:
        wrong.append("no request ended well")
    return [f"{fault.name}: {what}" for what in wrong]


TURNED = """
from router.upstream.settings import UpstreamSettings
from tiers.breaker import BreakerOptions
UpstreamSettings.breaker, UpstreamSettings.retry_share = BreakerOptions(longest_pause_s=2), 1.0
"""


def settings(folder: Path, embeddings: int) -> str:
    """Return the router's settings: every limit of time is short."""
    return f"""
[auth]
keys_file = "{folder}/keys.json"
[engine]
check_tolerance = 0
[openai]
embeddings_urls = ["http://127.0.0.1:{embeddings}"]
[policy]
max_slowdown = 1e9
[upstream]
first_token_timeout_s = 2
token_timeout_s = 2
answer_timeout_s = 4
"""


async def in_scene(
    fault: Fault,
    router: Running,
    keys: tuple[str, str],
    embeddings: int,
    seconds: float,
) -> list[str]:
    """Run a fault against a router that runs."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        timeout=2 * PATIENCE_S, trust_env=False, limits=limits
    ) as client:
        scene = Scene(router, client, *keys, embeddings, router.log.with_name("clock"))
        return await run(fault, scene, seconds)


def staged(fault: Fault, seconds: float) -> list[str]:
    """Start what a fault needs, and run it."""
    with tempfile.TemporaryDirectory() as name:
        folder, embeddings = Path(name), free_port()
        _set_clock(folder / "clock", 0)
        keys = (
            add_key(folder / "keys.json", "chat")[0],
            add_key(folder / "keys.json", "spent", requests_per_minute=3)[0],
        )
        (folder / "site").mkdir()
        (folder / "site/sitecustomize.py").write_text(SITE)
        clocked = {
            "CHAOS_CLOCK": str(folder / "clock"),
            "PYTHONPATH": f"{folder}/site{os.pathsep}{ROOT}",
        }
        engine = [sys.executable, "-m", "tests.fakes.engine", str(embeddings)]
        with (
            process(
                engine, {**os.environ, "PYTHONPATH": str(ROOT)}, subprocess.DEVNULL
            ),
            running(
                folder, settings(folder, embeddings), SHAPES, clocked, TURNED
            ) as router,
        ):
            wrong = asyncio.run(in_scene(fault, router, keys, embeddings, seconds))
            log = router.log.read_text("utf-8", "replace")
    if "Traceback" in log:
        wrong.append(
            f"{fault.name}: the router wrote a traceback:\n"
            + log[log.index("Traceback") :][:2000]
        )
    return wrong


def main() -> None:
    """Run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [fault.name for fault in FAULTS]
    parser.add_argument(
        "--faults",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help=", ".join(names),
    )
    parser.add_argument("--seconds", type=float, default=8)
    options = parser.parse_args()
    print(f"$ python benchmarks/chaos/faults.py --seconds {options.seconds:g}")
    print(
        f"{'fault':22}{'requests':>9}"
        + "".join(f"{end:>9}" for end in ENDS)
        + "  held afterwards",
        flush=True,
    )
    wrong = [
        what
        for fault in FAULTS
        if fault.name in options.faults
        for what in staged(fault, options.seconds)
    ]
    for what in wrong:
        print(f"FAULT {what}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
