"""Engine time against answers lost, on simulated engines: loss budgets, beside fleets of one precision and round robin.

    python benchmarks/goodput.py [--loads 0.3 0.8] [--seconds 15] [--budgets 0 0.005 0.02] [--plots DIR]

Every row gets the same requests at the same moments, on a router of its own. Engines have an H100's timing with Llama 3.1
8B (``tiers/simulated``), in scaled time (``--slower``). An answer's loss is what is published for its tier and kind of
prompt (``router/policy/losses.py``): the probability that it is worse than the highest precision's. A request's
engine-seconds are what the policy counts, from the measured speeds, at one batch for all rows of a load; ``used`` is the
time of the simulated GPUs, at their own speed: less, where fewer engines compute larger batches. Goodput is the rate of
requests that met a TTFT and a TPOT bound, which no row is told. Intervals are 95 %, from a bootstrap over blocks of time
that all rows share. Requests of the first seconds (``--warm``) are not counted. A load of 1 is what all tiers complete of
this mix by the roofline if they are always full.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleets import (
    NOTHING,
    Engines,
    Simulation,
    give_speeds,
    idle,
    measure_speed,
    router,
    shares_of,
    simulated_engines,
)
from measure import note
from open_loop import (
    Answer,
    Arrival,
    Workload,
    arrivals,
    blocks_of,
    by_class,
    interval,
    mean_open,
    read_prompts,
    resampled,
    send,
    with_engine_time,
)
from plots import Point, Series, chart

from classifier import EstimatingCounter, extract
from router.policy.decision import PolicyParameters
from router.policy.losses import losses
from tiers.simulated.gpu import HARDWARE, offline
from tiers.spec import PRECISIONS, STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from open_loop import Interval

    from router.policy.profiles import LatencyProfile

FIXED = {
    "all fast": TierName.FAST,
    "all balanced": TierName.BALANCED,
    "all precise": TierName.PRECISE,
}
ROUND_ROBIN = "round robin"
PUBLISHED = PolicyParameters(
    {tier: losses(PRECISIONS[tier], (), 8e9) for tier in STANDARD_TIERS[:2]}
)
KINDS = ("chat", "writing", "extraction", "code", "math", "multilingual")
TTFT_MS, TPOT_MS = 250.0, 12.0  # of the GPU's clock
BLOCK_S, LIMIT_S = 2.5, 60.0


@dataclass(frozen=True, slots=True)
class Bench:
    """What all rows share."""

    engines: Engines
    workload: Workload
    speeds: LatencyProfile
    saturation: float
    options: argparse.Namespace
    folder: Path


@dataclass(slots=True)
class Result:
    """What one row did: answers with loss and engine time, and the GPU seconds that its requests used."""

    answers: list[Answer] = field(default_factory=list)
    used_s: float = 0.0
    served: int = 0


def main() -> None:
    """Run as the arguments say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--loads",
        type=float,
        nargs="+",
        default=[0.3, 0.8],
        help="shares of saturation",
    )
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="of each row and load"
    )
    parser.add_argument(
        "--warm", type=float, default=10.0, help="seconds before, not counted"
    )
    parser.add_argument(
        "--slower", type=float, default=4.0, help="how many times slower than the GPU"
    )
    parser.add_argument("--max-num-seqs", type=int, default=64, help="of each engine")
    parser.add_argument(
        "--budgets", type=float, nargs="*", default=[0.0, 0.01, 0.03, 0.06, 0.12]
    )
    parser.add_argument("--plots", type=Path, help="folder for charts")
    options = parser.parse_args()
    print(
        f"$ python benchmarks/goodput.py {' '.join(a for a in sys.argv[1:] if not a.startswith('/'))}".rstrip()
    )
    simulation = Simulation(options.slower, options.max_num_seqs, 16)
    with (
        tempfile.TemporaryDirectory() as folder,
        simulated_engines(list(STANDARD_TIERS), simulation) as engines,
    ):
        workload = Workload(read_prompts(KINDS), by_class(0.5, 256))
        with router(Path(folder) / "first", engines) as running:
            note("measuring the speed of the engines")
            speeds = measure_speed(running, 3)
        capacity = sum(
            capacities(workload, options.max_num_seqs, options.slower).values()
        )
        bench = Bench(engines, workload, speeds, capacity, options, Path(folder))
        print(
            f"# H100, Llama 3.1 8B, {options.slower:g} times slower; saturation {capacity:.1f} requests/s"
        )
        for load in options.loads:
            compare(bench, load)


def capacities(
    workload: Workload, max_num_seqs: int, slower: float
) -> dict[TierName, float]:
    """Return the requests a second that each tier completes by the roofline if it is always full."""
    source = random.Random(1)
    tokens = statistics.fmean(
        workload.tokens(source, kind) for _ in range(20) for kind, _ in workload.prompts
    )
    prompt = round(statistics.fmean(len(text) // 4 + 6 for _, text in workload.prompts))
    return {
        tier: offline(
            HARDWARE[tier], prompt, round(tokens), 20 * max_num_seqs, max_num_seqs
        )
        / tokens
        / slower
        for tier in STANDARD_TIERS
    }


def compare(bench: Bench, load: float) -> None:
    """Run every row at a load, and print and plot them."""
    rows: dict[str, Mapping[str, Mapping[str, Any]]] = dict.fromkeys(
        [*FIXED, ROUND_ROBIN], NOTHING
    )
    rows["like balanced"] = {"policy": {"loss_budget": {"like": "balanced"}}}
    rows |= {
        f"budget {budget:g}": {"policy": {"loss_budget": budget}}
        for budget in bench.options.budgets
    }
    results = {
        name: measure(bench, name, load, settings) for name, settings in rows.items()
    }
    most: int = max(
        settings["max_num_seqs"] for settings in bench.engines.tiers.values()
    )
    opened = mean_open(
        [result.answers for result in results.values()], bench.options.seconds
    )
    batch = max(1, min(most, round(opened)))
    for result in results.values():
        result.answers = with_engine_time(result.answers, bench.speeds, batch)
    print(f"\n{load:g} of saturation; engine-seconds at batches of {batch}")
    print(
        f"{'row':16} {'answers lost of 100':>22} {'engine-seconds':>24} {'used':>7} {'goodput/s':>22} {'f/b/p %':>10}"
    )
    points: dict[bool, list[Point]] = {True: [], False: []}
    for name, result in results.items():
        lost, engine, good = figures(bench, result.answers)
        shares = shares_of(answer.tier for answer in result.answers)
        used = result.used_s / max(result.served, 1)
        print(
            f"{name:16} {told(lost, 2, 100):>22} {told(engine, 3):>24} {used:7.3f} {told(good, 1):>22} {shares:>10}",
            flush=True,
        )
        fixed = name in FIXED or name == ROUND_ROBIN
        points[fixed].append(
            Point(
                lost.mean * 100,
                engine.mean,
                engine.low,
                engine.high,
                name if fixed else "",
            )
        )
    if bench.options.plots is not None:
        curve = Series(
            "loss budgets", tuple(sorted(points[False], key=lambda p: p.x)), line=True
        )
        chart(
            bench.options.plots / f"answers-against-engine-time-{load:g}.svg", f"At {load:g} of saturation",
            "answers lost of 100", "engine-seconds a request", [curve, Series("fixed", tuple(points[True]))],
        )  # fmt: skip


def measure(
    bench: Bench, name: str, load: float, settings: Mapping[str, Mapping[str, Any]]
) -> Result:
    """Run one row at a load, on a router of its own."""
    options = bench.options
    plan = arrivals(
        bench.workload, load * bench.saturation, options.warm + options.seconds, seed=1
    )
    label = f"{name}-{load:g}".replace(" ", "-").replace(".", "_")
    note(f"{name} at {load:g} of saturation: {len(plan)} requests")
    with router(bench.folder / label, bench.engines, settings) as running:
        give_speeds(running, bench.speeds)
        before = bench.engines.work()
        answers = asyncio.run(
            send(running.url, plan, body_of(name), label, LIMIT_S, lambda *_: None)
        )
        asyncio.run(idle(running.url))
        used = sum(
            work["busy_s"] - before[engine]["busy_s"]
            for engine, work in bench.engines.work().items()
        )
    counted = [
        replace(
            a,
            at_s=a.at_s - options.warm,
            ended_s=a.ended_s - options.warm,
            loss=loss_of(a, plan[a.index]),
        )
        for a in answers
        if a.at_s >= options.warm
    ]
    return Result(counted, used, sum(a.error is None for a in answers))


def body_of(name: str) -> Callable[[int, Arrival], dict[str, Any]]:
    """Return what makes a row's requests."""

    def body(index: int, _arrival: Arrival) -> dict[str, Any]:
        if name == ROUND_ROBIN:
            return {"model": STANDARD_TIERS[index % 3]}
        return {"model": FIXED.get(name, "auto")}

    return body


def loss_of(answer: Answer, asked: Arrival) -> float | None:
    """Return the published loss of an answer; None: there was none."""
    if answer.tier is None or answer.error is not None:
        return None
    return PUBLISHED.loss(answer.tier, extract(asked.text, EstimatingCounter())).mean


def figures(
    bench: Bench, answers: Sequence[Answer]
) -> tuple[Interval, Interval, Interval]:
    """Return loss, engine-seconds and goodput with their intervals."""
    slower, seconds = bench.options.slower, bench.options.seconds

    def one(
        top: Callable[[Answer], float | None], bottom: Callable[[Answer], float] | None
    ) -> Interval:
        blocks = blocks_of([answers], BLOCK_S, seconds, top, bottom)
        return interval(blocks, resampled(len(blocks.top)))

    return (
        one(lambda a: a.loss, lambda _: 1.0),
        one(lambda a: a.engine_s if a.error is None else None, lambda _: 1.0),
        one(lambda a: float(a.meets(TTFT_MS * slower, TPOT_MS * slower)), None),
    )


def told(value: Interval, digits: int, factor: float = 1.0) -> str:
    """Return an estimate with its interval."""
    mean, low, high = (f"{part * factor:.{digits}f}" for part in value)
    return f"{mean} ({low} to {high})"


if __name__ == "__main__":
    main()
