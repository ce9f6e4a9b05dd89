"""A recorded agent session through the router, among other agents and other traffic: affinity on and off, same seed.

    python benchmarks/agent_session.py [--seed 1] [--agents 6] [--replicas 2] [--before FOLDER]

The session (``tests/data/agent_session.jsonl``) has thirty turns of a coding agent, of 300 to 60,000 tokens. Other agents
have its system prompt and tools, but other tasks and files. No agent names its conversation. Each sends its next turn when
the last one is answered and its tool has run; the answers that it goes on with are the recorded ones. Beside them come
requests of every kind (those of ``qarr demo``), a few and many in turns. Engines have an H100's timing with Llama 3.1 8B, a
prefix cache by blocks, and new caches for each setting. Told are switches of precision and replica, prompt tokens that
engines found in their caches, and times to the first token
by the GPU's clock. ``--before`` is a checkout of an earlier commit, whose router
gets the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from subprocess import check_output
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
from agent_texts import AgentSession
from fleets import Simulation, give_speeds, router, simulated_engines
from measure import ROOT, note

sys.path.insert(0, str(ROOT))
from router.policy.profiles import Fit, FitError, LatencyProfile
from tiers.simulated.demo import roofline_speed, some_request
from tiers.simulated.gpu import HARDWARE
from tiers.spec import STANDARD_TIERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleets import Engines

AFFINITY = "from router.settings import AdmissionSettings as A; A.affinity"
CONTEXT = 131_072
CHARS_A_TOKEN = 3  # as the router estimates where it has no tokenizer
PARAMETERS = 8e9
TOOL_RUNS_S = (0.3, 1.2)
BETWEEN_AGENTS_S = 2.0
QUIET_S, BUSY_S = 12.0, 8.0
EXACT = FitError(median=0.0, p95=0.0)  # the speeds are computed
LIMIT_S = 300.0
FIRST_TABLE = "of the session"


class Turn(NamedTuple):
    """One turn as it was answered.

    Attributes:
        agent: 0 is the recorded session, others are the agents beside it.
        number: Of the turn, from 1.
        continues: A tool's result is its last message.
        status: HTTP's; others than 200 were not answered.
        cached: Prompt tokens that the engine found in its cache.
    """

    agent: int
    number: int
    continues: bool
    status: int
    prompt: int
    cached: int
    ttft_ms: float
    tier: str
    replica: str
    reason: str


async def ask(
    client: aiohttp.ClientSession,
    body: dict[str, Any],
    agent: int,
    number: int,
    *,
    slower: float,
) -> Turn:
    """Send one turn, read its answer, and look up its record."""
    request_id = f"agent-{agent}-turn-{number}-{time.monotonic_ns()}"
    sent_at = time.perf_counter()
    ttft_ms = 0.0
    async with client.post(
        "/v1/chat/completions", json=body, headers={"x-request-id": request_id}
    ) as response:
        reason = response.headers.get("x-qarr-reason", "")
        async for line in response.content:
            if not ttft_ms and line.startswith(b"data: ") and b'"content":"' in line:
                delta = json.loads(line[6:])["choices"][0]["delta"]
                if delta.get("content"):
                    ttft_ms = (time.perf_counter() - sent_at) * 1000
        status = response.status
    record = await recorded(client, request_id)
    return Turn(
        agent=agent,
        number=number,
        continues=body["messages"][-1]["role"] == "tool",
        status=status,
        prompt=record["prompt_tokens"] or 0,
        cached=record["cached_prompt_tokens"] or 0,
        ttft_ms=ttft_ms / slower,
        tier=record["served_by"] or "",
        replica=record["replica"] or "",
        reason=reason or record["reason"],
    )


async def recorded(client: aiohttp.ClientSession, request_id: str) -> dict[str, Any]:
    """Return the router's record of a request that has ended."""
    for _ in range(200):
        async with client.get("/requests") as response:
            records = (await response.json())["requests"]
        for record in records:
            if record["request_id"] == request_id:
                found: dict[str, Any] = record
                return found
        await asyncio.sleep(0.02)
    raise TimeoutError(f"the router has no record of {request_id}")


async def run_agent(
    client: aiohttp.ClientSession,
    session: AgentSession,
    agent: int,
    options: argparse.Namespace,
) -> list[Turn]:
    """Send a session's turns, one after the other."""
    slower = options.slower
    chance = random.Random(f"{options.seed}/{agent}")
    await asyncio.sleep(agent * BETWEEN_AGENTS_S * slower)
    turns = []
    for number, body in enumerate(session.bodies(agent), 1):
        if number > options.turns:
            break
        turns.append(await ask(client, body, agent, number, slower=slower))
        await asyncio.sleep(chance.uniform(*TOOL_RUNS_S) * slower)
    return turns


async def send_others(
    client: aiohttp.ClientSession, options: argparse.Namespace
) -> None:
    """Send other requests until cancelled: few a second for a while, then many, in turns."""
    chance = random.Random(options.seed)
    slower = options.slower
    under_way: set[asyncio.Task[None]] = set()
    began = time.monotonic()
    while True:
        passed_s = (time.monotonic() - began) / slower
        is_quiet = passed_s % (QUIET_S + BUSY_S) < QUIET_S
        rate = options.quiet if is_quiet else options.busy
        await asyncio.sleep(chance.expovariate(rate) * slower)
        body = some_request(chance)
        body.pop("tier", None)
        task = asyncio.create_task(_send_other(client, body))
        under_way.add(task)
        task.add_done_callback(under_way.discard)


async def _send_other(client: aiohttp.ClientSession, body: dict[str, Any]) -> None:
    # The connection is closed at the end, and there may be more requests than an engine takes.
    with contextlib.suppress(aiohttp.ClientError):
        async with client.post("/generate", json=body) as response:
            await response.read()


async def replay(
    url: str, session: AgentSession, options: argparse.Namespace
) -> list[Turn]:
    """Run all agents and the other traffic; return the turns of all agents once the recorded session has ended."""
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        url, trust_env=False, timeout=timeout, connector=connector
    ) as client:
        others = asyncio.create_task(send_others(client, options))
        try:
            # until the router knows how long answers are
            await asyncio.sleep(QUIET_S * options.slower)
            agents = [
                run_agent(client, session, agent, options)
                for agent in range(options.agents)
            ]
            turns = await asyncio.gather(*agents)
        finally:
            others.cancel()
            await asyncio.gather(others, return_exceptions=True)
    return [turn for of_agent in turns for turn in of_agent]


def speeds(slower: float) -> LatencyProfile:
    """Return the speeds of the engines, as if they had been measured."""
    fits = []
    for tier in STANDARD_TIERS:
        figures = asdict(roofline_speed(HARDWARE[tier]))
        del figures["profiled"], figures["learned"]
        for name in figures:
            if name.endswith("_ms") or "_ms_" in name:
                figures[name] *= slower
        fits.append(
            Fit(tier=tier, ttft_error=EXACT, tpot_error=EXACT, samples=0, **figures)
        )
    return LatencyProfile(
        created=datetime.now(UTC), model="Llama 3.1 8B", machine="", checkpoints={}, fits=tuple(fits), samples=(),
    )  # fmt: skip


def command(folder: Path, code: Path, *, affinity: bool) -> Path:
    """Write a program that is ``qarr`` of a checkout, with affinity on or off, and return its path."""
    main = f"{AFFINITY} = {affinity}; from router.cli.main import main; main()"
    path = folder / "qarr"
    path.write_text(
        f"#!/bin/sh\nPYTHONPATH='{code}' exec '{sys.executable}' -P -c '{main}' \"$@\"\n"
    )
    path.chmod(0o755)
    return path


def run_setting(
    session: AgentSession, options: argparse.Namespace, code: Path, *, affinity: bool
) -> tuple[list[Turn], float]:
    """Run one setting on engines of its own; return the turns, and by how much an engine fell behind its clock at most."""
    simulation = Simulation(
        slower=options.slower,
        max_num_seqs=options.max_num_seqs,
        stream_interval=16,
        max_model_len=CONTEXT,
        chars_a_token=CHARS_A_TOKEN,
        prefix_cache=True,
    )
    tiers = list(STANDARD_TIERS) * options.replicas
    settings = {"policy": {"model_parameters": PARAMETERS}}
    with (
        tempfile.TemporaryDirectory() as folder,
        simulated_engines(tiers, simulation) as engines,
        router(
            Path(folder) / "router",
            engines,
            settings,
            command(Path(folder), code, affinity=affinity),
        ) as running,
    ):
        give_speeds(running, speeds(options.slower))
        turns = asyncio.run(replay(running.url, session, options))
        behind_s = lost_s(engines)
    return turns, behind_s


def lost_s(engines: Engines) -> float:
    """Return the most time by which an engine fell behind its own clock, in seconds."""
    return max(work["lost_s"] for work in engines.work().values())


def switches(turns: Sequence[Turn], field: str) -> int:
    """Return how often one agent's turns went to another tier or replica than the turn before."""
    values = [getattr(turn, field) for turn in turns]
    return sum(before != after for before, after in pairwise(values))


def loop_switches(turns: Sequence[Turn]) -> int:
    """Return the switches of precision at a turn that goes on with a tool's result."""
    return sum(
        before.tier != after.tier and after.continues
        for before, after in pairwise(turns)
    )


def by_agent(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Return the turns of each agent."""
    agents = sorted({turn.agent for turn in turns})
    return [[turn for turn in turns if turn.agent == agent] for agent in agents]


def summary(name: str, turns: Sequence[Turn]) -> str:
    """Return a row of the table."""
    agents = by_agent(turns)
    ttfts = sorted(turn.ttft_ms for turn in turns if turn.number > 1)
    cached = sum(turn.cached for turn in turns) / max(
        sum(turn.prompt for turn in turns), 1
    )
    failed = sum(turn.status != 200 for turn in turns)
    return (
        f"{name:<14}{len(turns):>6}{failed:>8}{sum(switches(each, 'tier') for each in agents):>11}"
        f"{sum(map(loop_switches, agents)):>9}{sum(switches(each, 'replica') for each in agents):>9}{cached:>8.0%}"
        f"{statistics.median(ttfts):>10.0f} ms{ttfts[int(len(ttfts) * 0.95)]:>8.0f} ms"
    )


def report(results: dict[str, list[Turn]], options: argparse.Namespace) -> None:
    """Print the tables."""
    head = (
        f"{'setting':<14}{'turns':>6}{'failed':>8}{'precision':>11}{'in loop':>9}{'replica':>9}{'cached':>8}"
        f"{'TTFT p50':>13}{'p95':>11}"
    )
    groups = {
        FIRST_TABLE: [0],
        f"of all {options.agents} agents": list(range(options.agents)),
    }
    for title, agents in groups.items():
        print(f"switches and times {title}")
        print(head)
        for name, turns in results.items():
            print(summary(name, [turn for turn in turns if turn.agent in agents]))
    print("turns of all agents by replica")
    for name, turns in results.items():
        replicas = sorted({turn.replica for turn in turns})
        counts = [
            f"{each} {sum(turn.replica == each for turn in turns)}" for each in replicas
        ]
        print(f"{name:<14}{', '.join(counts)}")
    for name, turns in results.items():
        print(f"the session, {name}")
        print(
            f"{'turn':>4}{'prompt':>8}{'cached':>8}{'TTFT':>10}  {'replica':<12}reason"
        )
        for turn in by_agent(turns)[0]:
            mark = "*" if turn.continues else " "
            figures = f"{turn.number:>3}{mark}{turn.prompt:>8}{turn.cached:>8}{turn.ttft_ms:>7.0f} ms"
            print(f"{figures}  {turn.replica:<12}{turn.reason}")


def settings_of(options: argparse.Namespace) -> list[tuple[str, bool, Path]]:
    """Return the settings: a name, whether affinity is on, and the checkout whose router it is."""
    settings = [("affinity on", True, ROOT), ("affinity off", False, ROOT)]
    if options.before is not None:
        settings.append(("on, before", True, options.before))
    return settings


def commit_of(checkout: Path) -> str:
    """Return the commit that a checkout has."""
    argv = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return check_output(argv, cwd=checkout, text=True).strip()


def main() -> None:
    """Run as the arguments say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--agents", type=int, default=6, help="the session among them")
    parser.add_argument("--replicas", type=int, default=2, help="of each tier")
    parser.add_argument("--slower", type=float, default=2.0, help="than the GPU")
    parser.add_argument("--max-num-seqs", type=int, default=8, help="of each engine")
    parser.add_argument(
        "--quiet", type=float, default=1.0, help="other requests a second"
    )
    parser.add_argument(
        "--busy", type=float, default=8.0, help="the same, in busy times"
    )
    parser.add_argument("--turns", type=int, default=30, help="of each agent at most")
    parser.add_argument("--before", type=Path, help="checkout of an earlier commit")
    options = parser.parse_args()
    arguments = ["FOLDER" if each.startswith("/") else each for each in sys.argv[1:]]
    print(f"$ python benchmarks/agent_session.py {' '.join(arguments)}".rstrip())
    commit = commit_of(ROOT)
    if options.before is not None:
        commit += f", before {commit_of(options.before)}"
    print(
        f"commit {commit}; H100, Llama 3.1 8B, simulated {options.slower:g} times slower; {options.replicas}"
        f" replicas of each tier, {options.max_num_seqs} sequences each; {options.agents} agents, other requests"
        f" {options.quiet:g}/s and {options.busy:g}/s in turns; * goes on with a tool's result"
    )
    session = AgentSession.read()
    results = {}
    behind = []
    for name, affinity, code in settings_of(options):
        note(name)
        results[name], behind_s = run_setting(session, options, code, affinity=affinity)
        behind.append(f"{name} {behind_s:.1f} s")
    print(f"engines fell behind their clocks by at most: {', '.join(behind)}")
    report(results, options)


if __name__ == "__main__":
    main()
