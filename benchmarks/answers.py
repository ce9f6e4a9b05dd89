"""Right answers, engine time and goodput of ways to route, on real engines.

    python benchmarks/answers.py [--before DIR] [--limit N] [--loads 0.5 0.8 1 1.2] [--rounds 1]

Half of the built-in tasks, chosen by their digests, makes the profile of this release's router; the other half is asked:
of each precision, of all in turn (round robin), and of ``model = "auto"`` at ``policy.loss_budget.like = "balanced"``.
``--before`` is a checkout with a ``.venv``, such as of 687d1f71, whose rule was the least engine time of the tiers whose
loss is allowed: its router has the same profiles and is asked the same.

First each precision answers every held-out task, one at a time; tasks that none gets right are left out from there on.
Then each way answers the rest, one at a time, and at each load: Poisson arrivals at that share of what eight callers
without pauses get from all precisions in turn. Engine-seconds are CPU time of the engines; no answer uses another's cached
prefix. An answer is lost if it is wrong or missing and ``precise`` is right on that task at that load, and won in the
reverse; ± is the 95 % interval of their difference, paired by task. A random mix with the router's shares of tiers is not
asked: its loss is the mean of the tiers' alone, weighted by the shares. Goodput is the rate of right answers within a
TTFT and a TPOT bound.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from fleets import Engines, idle, merged, real_engines, router, shares_of
from measure import note

from classifier import PromptClass
from router.policy.losses import losses
from router.policy.profiles import percentile
from router.profiling.checks import RunsCheck
from router.profiling.measure_quality import (
    CHARS_PER_TOKEN,
    QualityPlan,
    measure_quality,
)
from router.profiling.model_answer import ModelAnswer
from router.profiling.profile_files import JOURNAL, keep_quality
from router.profiling.router_client import RouterClient
from router.profiling.tasks import SUITE, TASKS, Task, read_tasks
from tiers.spec import PRECISIONS, STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fleets import Router

    from router.policy.profiles import QualityProfile

LIKE: dict[str, dict[str, Any]] = {"policy": {"loss_budget": {"like": "balanced"}}}
FIXED = {f"all {tier}": tier for tier in reversed(STANDARD_TIERS)}
ROUND_ROBIN = "round robin"
BEFORE = "auto, before"
AUTO = "auto"
CALLERS = 8
SATURATING_S = 25.0
PARAMETERS = 135e6  # of the served model
Z95 = statistics.NormalDist().inv_cdf(0.975)
TTFT_MS, TPOT_MS, LIMIT_S = 2000.0, 100.0, 120.0
SALTS = itertools.count()


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer; ``tier`` is None if there was none. Times in milliseconds, ``engine_s`` only of requests sent alone."""

    task: str
    tier: TierName | None
    right: bool
    ttft_ms: float = math.inf
    tpot_ms: float = 0.0
    engine_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Way:
    """One way of routing: whom to ask, and the model of the n-th request."""

    name: str
    url: str
    models: Sequence[str]


@dataclass(frozen=True, slots=True)
class Seen:
    """What one way did with the tasks, at one load; ``took_s`` is 0 where they were asked one at a time."""

    answers: dict[str, list[Answer]]
    engine_s: float
    took_s: float

    def right(self, task: str) -> float:
        """Return the share of answers to a task that are right."""
        return statistics.fmean(answer.right for answer in self.answers[task])


def main() -> None:
    """Run as the arguments say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--before", type=Path, help="another checkout of QARR with a .venv, as a row"
    )
    parser.add_argument(
        "--limit", type=int, help="most tasks of each half; default: all"
    )
    parser.add_argument(
        "--loads",
        type=float,
        nargs="+",
        default=[0.5, 0.8, 1.0, 1.2],
        help="shares of saturation",
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="how often each task is asked at the load"
    )
    options = parser.parse_args()
    shown = [argument for argument in sys.argv[1:] if not argument.startswith("/")]
    print(f"$ python benchmarks/answers.py {' '.join(shown)}".rstrip(), flush=True)
    with (
        tempfile.TemporaryDirectory() as name,
        real_engines() as engines,
        ExitStack() as routers,
    ):
        folder = Path(name)
        measured, held_out = halves(engines, options.limit)
        with router(folder / "measuring", engines) as running:
            note(running.run("profile", "latency"))
            profile = asyncio.run(profiled(running, measured))
        settings = merged(
            LIKE, {"policy": {"profiles": str(folder / "measuring/profiles")}}
        )
        ours = routers.enter_context(router(folder / "ours", engines, settings))
        ways = [Way(way, ours.url, [tier]) for way, tier in FIXED.items()]
        ways += [Way(ROUND_ROBIN, ours.url, STANDARD_TIERS)]
        if options.before is not None:
            command = options.before / ".venv/bin/qarr"
            settings = merged(
                LIKE, {"policy": {"profiles": str(copied_profiles(folder))}}
            )
            theirs = routers.enter_context(
                router(folder / "theirs", engines, settings, command)
            )
            ways.append(Way(BEFORE, theirs.url, ["auto"]))
        ways.append(Way(AUTO, ours.url, ["auto"]))
        asyncio.run(
            compare(engines, ways, held_out, profile, options.loads, options.rounds)
        )


def copied_profiles(folder: Path) -> Path:
    """Return a folder with the measured profiles for another release, which records its own answers of engines."""
    copy = folder / "copied profiles"
    recorded_answers = shutil.ignore_patterns("canary*.json")
    shutil.copytree(folder / "measuring/profiles", copy, ignore=recorded_answers)
    return copy


def halves(engines: Engines, limit: int | None) -> tuple[list[Task], list[Task]]:
    """Return the tasks that make the profile, and those held out, shuffled.

    What is too long, runs code or calls tools is left out.
    """
    longest = CHARS_PER_TOKEN * min(
        settings["max_model_len"] for settings in engines.tiers.values()
    )
    tasks = [
        t
        for t in read_tasks(TASKS)
        # Answers are read as streams of text, without calls of tools.
        if not isinstance(t.check, RunsCheck)
        and not t.tools
        and len(t.prompt) < longest
    ]
    random.Random(1).shuffle(tasks)
    of = [
        [task for task in tasks if int(task.digest, 16) % 2 == half][:limit]
        for half in (0, 1)
    ]
    return of[0], of[1]


async def profiled(running: Router, tasks: Sequence[Task]) -> QualityProfile:
    """Measure and keep the profile, every answer scored as well."""
    plan = QualityPlan(
        tasks=tuple(tasks),
        name=SUITE,
        journal=running.profiles / JOURNAL,
        scored=len(tasks),
    )
    async with RouterClient(running.url, "") as client:
        found = await measure_quality(
            client, plan, lambda step, done, total: note(f"{done} of {total}: {step}")
        )
    keep_quality(running.profiles, found)
    return found


async def compare(
    engines: Engines,
    ways: Sequence[Way],
    tasks: Sequence[Task],
    profile: QualityProfile,
    loads: Sequence[float],
    rounds: int,
) -> None:
    """Ask every way alone and at each load, and print what became of it."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=LIMIT_S),
        trust_env=False,
    ) as session:
        fixed = {
            way.name: await one_by_one(session, engines, way, tasks)
            for way in ways
            if way.name in FIXED
        }
        known = [
            task
            for task in tasks
            if any(seen.right(task.digest) for seen in fixed.values())
        ]
        kinds = [count for count in profile.of(TierName.FAST) if count.answered]
        print(
            f"# {len(kinds)} kinds measured on {sum(count.asked for count in kinds)} tasks; "
            f"{len(tasks)} held out, {len(known)} of them answered right by a precision when asked alone"
        )
        correlations(fixed, tasks, profile)
        alone = {}
        for way in ways:
            seen = fixed.get(way.name)
            alone[way.name] = (
                only(seen, known)
                if seen
                else await one_by_one(session, engines, way, known)
            )
        table("one at a time", alone, known)
        full = await saturation(
            session, next(way for way in ways if way.name == ROUND_ROBIN), known
        )
        for load in loads:
            loaded = {}
            for way in ways:
                loaded[way.name] = await at_rate(
                    session, engines, way, known * rounds, load * full
                )
            table(
                f"{load:g} of saturation ({load * full:.2f} requests/s)", loaded, known
            )


async def one_by_one(
    session: aiohttp.ClientSession, engines: Engines, way: Way, tasks: Sequence[Task]
) -> Seen:
    """Ask tasks one after another, and attribute the engines' CPU time to each."""
    note(f"{way.name}: {len(tasks)} tasks, one at a time")
    answers: dict[str, list[Answer]] = {}
    spent = busy_s(engines)
    for number, task in enumerate(tasks):
        before = busy_s(engines)
        answer = await ask(session, way, number, task)
        took = busy_s(engines) - before
        answers[task.digest] = [replace(answer, engine_s=took)]
    return Seen(answers, busy_s(engines) - spent, 0.0)


def only(seen: Seen, tasks: Sequence[Task]) -> Seen:
    """Return what was seen of some of the tasks that were asked one at a time."""
    answers = {task.digest: seen.answers[task.digest] for task in tasks}
    return Seen(
        answers,
        sum(answer.engine_s for each in answers.values() for answer in each),
        0.0,
    )


async def saturation(
    session: aiohttp.ClientSession, way: Way, tasks: Sequence[Task]
) -> float:
    """Return the requests a second that callers without pauses get."""
    note("saturating")
    numbers, done = itertools.count(), 0
    began = time.monotonic()

    async def caller() -> None:
        nonlocal done
        while time.monotonic() < began + SATURATING_S:
            number = next(numbers)
            await ask(session, way, number, tasks[number % len(tasks)])
            done += 1

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return done / (time.monotonic() - began)


async def at_rate(
    session: aiohttp.ClientSession,
    engines: Engines,
    way: Way,
    tasks: Sequence[Task],
    rate: float,
) -> Seen:
    """Ask tasks at random moments, the same for every way."""
    note(f"{way.name}: {len(tasks)} tasks, {rate:.2f} a second")
    source = random.Random(2)
    due = list(itertools.accumulate(source.expovariate(rate) for _ in tasks))
    began, before = time.monotonic(), busy_s(engines)

    async def one(number: int, task: Task) -> Answer:
        await asyncio.sleep(began + due[number] - time.monotonic())
        return await ask(session, way, number, task)

    answers: dict[str, list[Answer]] = {}
    for answer in await asyncio.gather(
        *(one(number, task) for number, task in enumerate(tasks))
    ):
        answers.setdefault(answer.task, []).append(answer)
    took = time.monotonic() - began
    await idle(way.url)
    return Seen(answers, busy_s(engines) - before, took)


def busy_s(engines: Engines) -> float:
    """Return the CPU time of all engines."""
    return sum(work["busy_s"] for work in engines.work().values())


async def ask(
    session: aiohttp.ClientSession, way: Way, number: int, task: Task
) -> Answer:
    """Send a task, time its answer and judge it."""
    body = {
        "model": way.models[number % len(way.models)], "messages": task.messages, "max_tokens": task.max_tokens,
        "temperature": 0, "stream": True, "stream_options": {"include_usage": True}, "cache_salt": f"answers-{next(SALTS)}",
    }  # fmt: skip
    sent = time.monotonic()
    first = last = 0.0
    text, tokens, ended, tier = "", 0, False, None
    try:
        async with session.post(
            f"{way.url}/v1/chat/completions", json=body
        ) as response:
            if response.status == 200:
                tier = TierName(response.headers["x-qarr-tier"])
                async for line in response.content:
                    if not line.startswith(b"data:"):
                        continue
                    if line.strip() == b"data: [DONE]":
                        ended = True
                        break
                    event = json.loads(line[5:])
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                    for choice in event.get("choices", ()):
                        if piece := choice.get("delta", {}).get("content"):
                            last = time.monotonic()
                            first, text = first or last, text + piece
    except (aiohttp.ClientError, TimeoutError):
        pass
    if not ended:
        return Answer(task.digest, None, right=False)
    right = await asyncio.to_thread(task.check.passes, ModelAnswer(text=text))
    tpot_ms = (last - first) * 1000 / (tokens - 1) if tokens > 1 else 0.0
    return Answer(
        task.digest, tier, right, (first - sent) * 1000 if first else math.inf, tpot_ms
    )


def correlations(
    fixed: Mapping[str, Seen], tasks: Sequence[Task], profile: QualityProfile
) -> None:
    """Print how well each measure ranks classes and tiers by the answers that they lose of the held-out tasks."""
    rows = []
    precise = fixed[f"all {TierName.PRECISE}"]
    for tier, kind in itertools.product(STANDARD_TIERS[:2], PromptClass):
        own = fixed[f"all {tier}"]
        asked = [
            t
            for t in tasks
            if t.prompt_class is kind and own.right(t.digest) + precise.right(t.digest)
        ]
        counts = [
            count
            for count in profile.of(tier)
            if count.prompt_class is kind and count.diagnosis is not None
        ]
        if not asked or not counts:
            continue
        expected = losses(PRECISIONS[tier], profile.of(tier), PARAMETERS)[kind]
        prior = losses(PRECISIONS[tier], (), PARAMETERS)[kind]
        diagnoses = [count.diagnosis for count in counts if count.diagnosis is not None]
        tokens = sum(one.tokens for one in diagnoses)
        rows.append(
            (
                f"{kind.value} {tier}",
                statistics.fmean(
                    precise.right(t.digest) - own.right(t.digest) for t in asked
                ),
                statistics.fmean(expected[t.complexity].mean for t in asked),
                statistics.fmean(prior[t.complexity].mean for t in asked),
                *(
                    sum(getattr(d, name) * d.tokens for d in diagnoses) / tokens
                    for name in ("disagreement", "kl", "regret")
                ),
                len(asked),
            )
        )
    names = (
        "held out",
        "expected loss",
        "published",
        "tokens that differ",
        "KL",
        "regret",
    )
    print(
        f"\n{'class and tier':24}"
        + "".join(f"{name:>20}" for name in names)
        + f"{'answers':>10}"
    )
    for name, *values, answers in rows:
        print(
            f"{name:24}"
            + "".join(f"{value:20.4f}" for value in values)
            + f"{answers:10}"
        )
    lost = ranks_of([row[1] for row in rows])
    ranks = [
        statistics.correlation(lost, ranks_of([row[at] for row in rows]))
        for at in range(2, 7)
    ]
    print(
        f"{'rank correlation':24}{'':20}" + "".join(f"{rank:20.2f}" for rank in ranks),
        flush=True,
    )


def ranks_of(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share their mean rank."""
    return [
        sum(other < value for other in values) + (values.count(value) + 1) / 2
        for value in values
    ]


def table(title: str, seen: Mapping[str, Seen], tasks: Sequence[Task]) -> None:
    """Print what every way did at one load, beside ``precise`` at the same load."""
    precise = seen[f"all {TierName.PRECISE}"]
    print(f"\n{title}: {len(tasks)} tasks")
    heads = (
        "right %",
        "lost %",
        "won %",
        "lost less won %",
        "engine-s",
        "TTFT p50",
        "p95",
        "goodput/s",
        "none",
    )
    widths = (9, 8, 8, 18, 10, 10, 8, 11, 6)
    print(
        f"{'way':24}"
        + "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
        + "  f/b/p %"
    )
    for name, own in seen.items():
        answers = [answer for each in own.answers.values() for answer in each]
        gaps = [precise.right(task.digest) - own.right(task.digest) for task in tasks]
        good = sum(
            a.right and a.ttft_ms <= TTFT_MS and a.tpot_ms <= TPOT_MS for a in answers
        )
        shares = shares_of(answer.tier for answer in answers)
        values = (
            f"{100 * statistics.fmean(own.right(task.digest) for task in tasks):.1f}",
            f"{100 * sum(gap for gap in gaps if gap > 0) / len(gaps):.1f}",
            f"{-100 * sum(gap for gap in gaps if gap < 0) / len(gaps):.1f}",
            told(gaps),
            f"{own.engine_s / len(answers):.3f}",
            f"{percentile([answer.ttft_ms for answer in answers], 0.5):.0f}",
            f"{percentile([answer.ttft_ms for answer in answers], 0.95):.0f}",
            f"{good / own.took_s:.2f}" if own.took_s else "-",
            f"{sum(answer.tier is None for answer in answers)}",
        )
        print(
            f"{name:24}"
            + "".join(f"{v:>{width}}" for v, width in zip(values, widths, strict=True))
            + f"  {shares}"
        )
    ours = seen[AUTO]
    for name, own in seen.items():
        if name != AUTO:
            gaps = [own.right(task.digest) - ours.right(task.digest) for task in tasks]
            print(f"# {AUTO} loses {told(gaps)} of 100 answers against {name}")
    print(f"# {against_random_mix(seen, tasks)}")
    sys.stdout.flush()


def against_random_mix(seen: Mapping[str, Seen], tasks: Sequence[Task]) -> str:
    """Return what the router's choice is worth against a random mix with the same shares of tiers.

    What such a mix does with a task is the mean of what the tiers alone did with it, weighted by their shares.
    """
    ours = seen[AUTO]
    tiers = [answer.tier for answers in ours.answers.values() for answer in answers]
    shares = {f"all {tier}": tiers.count(tier) / len(tiers) for tier in STANDARD_TIERS}
    gaps = []
    for task in tasks:
        right_by_chance = sum(
            share * seen[name].right(task.digest) for name, share in shares.items()
        )
        gaps.append(right_by_chance - ours.right(task.digest))
    engine_s_by_chance = sum(
        share * seen[name].engine_s for name, share in shares.items()
    )
    return (
        f"{AUTO} loses {told(gaps)} of 100 answers against a random mix with its shares of tiers, "
        f"with {ours.engine_s / engine_s_by_chance:.2f} times its engine time"
    )


def told(gaps: Iterable[float]) -> str:
    """Return a mean in percent with its 95 % interval."""
    each = list(gaps)
    spread = Z95 * statistics.stdev(each) / math.sqrt(len(each))
    return f"{100 * statistics.fmean(each):.1f} ± {100 * spread:.1f}"


if __name__ == "__main__":
    main()
