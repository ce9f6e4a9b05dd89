"""Goodput, loss and engine time of five ways to choose a tier: same requests at the same moments, one run.

    python benchmarks/goodput.py simulated [--loads 0.5 0.8 1.0 1.3] [--seconds 12] [--rounds 1] [--json FILE]
    python benchmarks/goodput.py simulated --sweep [--plots DIR]     engine time against loss
    python benchmarks/goodput.py simulated --step [--plots DIR]      half chat, then all code
    python benchmarks/goodput.py real [--profiles ~/.cache/qarr/profiles] [--seconds 60] [--rounds 2]

(a) everything to ``precise``; (b) everything to ``balanced``; (c) round robin; (d) the table, with nothing measured but idle
speeds; (e) the policy with measured loss and speed, and its loss budget. ``--set`` adds a setting to (e), as
``--set 'policy.loss_budget = 0.02'``. Every row has a router of its own, so none learns from another.

Goodput is the rate of requests that met both their TTFT and their TPOT bound; all rows are judged by the same bounds, which
(d) and (e) are told. Loss is the profile's for the class and the tier that answered, a share of tokens. A request's
engine-seconds are what the policy counts, from the measured speeds, at one batch for all rows of a load. Beside them stands
what was used: time of the simulated GPUs, at their own speed, or CPU time of the real engines. That is less where fewer
engines compute larger batches: a GPU's step takes about as long for one sequence as for thirty. Errors are requests that
were refused, cut off or beyond the client's time limit. Intervals are 95 %, from a bootstrap over blocks of time that all
rows share. Requests of the first seconds (``--warm``) are not counted.

A load of 1 is saturation: the sum of what each tier completes of this mix if it is always full; by the roofline for
simulated engines, for real ones measured first. ``simulated`` engines have an H100's timing (``simulated_engine.py``), in
scaled time (``--slower``), and assumed losses (``fleets.py``); bounds and times printed are those of the scaled clock.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleets import (
    LEVELS,
    LOSS_SOURCE,
    NOTHING,
    SHAPE,
    Cpu,
    Engines,
    Simulation,
    assumed_losses,
    beside,
    give_profiles,
    given_settings,
    half_life,
    idle,
    kept_profiles,
    measure_speed,
    merged,
    real_engines,
    router,
    simulated_engines,
)
from open_loop import (
    Answer,
    Arrival,
    Blocks,
    Workload,
    arrivals,
    as_row,
    blocks_of,
    by_class,
    closed_loop,
    interval,
    mean_loss_of,
    mean_open,
    read_prompts,
    resampled,
    send,
    token_loss,
    uniform,
    with_engine_time,
    with_loss,
    write_lines,
)
from plots import Point, Series, chart
from policy_simulation import simulate
from recording import differing, read_recording, seen, summarise
from simulated_engine import HARDWARE, offline

from router.policy.profiles import percentile
from router.settings import cache_dir
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import psutil
    from recording import Result as Replayed

    from router.policy.profiles import Interval, LatencyProfile, QualityProfile

ROWS = {
    "a": "all precise",
    "b": "all balanced",
    "c": "round robin",
    "d": "table, nothing measured",
    "e": "loss budget",
}
MEASURED = "e"
REAL_KINDS = ("chat", "writing", "multilingual", "code", "math", "extraction")
MOST_LOST_S, MOST_LATE_MS = 0.3, 50.0  # beyond which this machine was measured, not the rows
WINDOW_S = 10.0  # of the moving mean after a step
MIXES = ({"chat": 1.0, "code": 1.0}, {"code": 1.0})  # before and after it


@dataclass(frozen=True, slots=True)
class Bench:
    """What is compared, and on what.

    Attributes:
        saturation: Requests a second.
        block_s: Length of a bootstrap's block.
    """

    engines: Engines
    workload: Workload
    quality: QualityProfile
    speeds: LatencyProfile
    ttft_ms: float
    tpot_ms: float
    saturation: float
    seconds: float
    rounds: int
    limit_s: float
    block_s: float
    folder: Path
    given: Mapping[str, Mapping[str, Any]]
    json: Path | None
    half_life_s: float = 10.0  # of the running mean that (e) holds to its budget
    warm_s: float = 0.0  # at the beginning of each row, not counted
    bounded: bool = True  # whether requests have bounds on time


@dataclass(slots=True)
class Result:
    """What one row did at one load, in all rounds.

    Attributes:
        rounds: Its answers, by round.
        used_s: Time of simulated GPUs, or CPU time of real engines, for ``served`` requests, those not counted included.
        cpu: Share of one core of each process, of the last round.
        lost_s: By which simulated engines fell behind their clock.
        replayed: Decisions that come out again from the log alone, and all.
        seen: What became of the requests, by the decision logs; ``simulated``: the same by a simulation of their arrivals.
        errors: Of predicted TTFT and TPOT, as |predicted - seen| / seen.
    """

    rounds: list[list[Answer]] = field(default_factory=list)
    used_s: float = 0.0
    served: int = 0
    cpu: dict[str, float] = field(default_factory=dict)
    lost_s: float = 0.0
    replayed: Counter[str] = field(default_factory=Counter)
    seen: list[Replayed] = field(default_factory=list)
    simulated: list[Replayed] = field(default_factory=list)
    errors: dict[str, list[float]] = field(default_factory=lambda: {"TTFT": [], "TPOT": []})

    @property
    def used_each_s(self) -> float:
        """Return what a request used."""
        return self.used_s / max(self.served, 1)

    @property
    def answers(self) -> list[Answer]:
        """Return those of all rounds."""
        return [answer for answers in self.rounds for answer in answers]


def main() -> None:
    """Run as the arguments say."""
    options = parsed()
    if options.warm is None:
        options.warm = 15.0 if options.sweep else 0.0 if options.step else 5.0
    if options.seconds is None and options.sweep:
        options.seconds = 15.0
    print(f"$ python benchmarks/goodput.py {' '.join(a for a in sys.argv[1:] if not a.startswith('/'))}")
    if options.json is not None:
        options.json.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder, benched(options, Path(folder)) as bench:
        if options.sweep:
            sweep(bench, options)
        elif options.step:
            step(bench, options)
        else:
            compare(bench, options)


def parsed() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", choices=("real", "simulated"))
    parser.add_argument(
        "--loads", type=float, nargs="+", help="shares of saturation; by default 0.3 with --sweep, 0.35 with --step"
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument(
        "--seconds", type=float, help="of each row, load and round; 12, with --sweep 15, with --step 120"
    )
    parser.add_argument("--warm", type=float, help="seconds before, not counted; by default 5, 15 with --sweep")
    parser.add_argument("--rounds", type=int, default=1, help="with other arrivals, and the rows in turned order")
    parser.add_argument("--saturation", type=float, help="requests a second, instead of what is found")
    parser.add_argument("--profiles", type=Path, default=cache_dir() / "profiles", help="real: folder of profiles")
    parser.add_argument("--slower", type=float, default=4, help="simulated: how many times slower than the GPU")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="simulated: of each engine")
    parser.add_argument("--ttft", type=float, help="bound in milliseconds; simulated: of the GPU's clock")
    parser.add_argument("--tpot", type=float, help="bound in milliseconds; simulated: of the GPU's clock")
    parser.add_argument("--half-life", type=float, default=5.0, help="of (e)'s running mean, in seconds")
    parser.add_argument("--set", action="append", default=[], metavar="TOML", help="a setting of (e)")
    parser.add_argument("--sweep", action="store_true", help="engine time against loss, over budgets")
    parser.add_argument("--budgets", type=float, nargs="+", help="of the sweep: mean losses")
    parser.add_argument("--step", action="store_true", help="half chat, then all code")
    parser.add_argument("--plots", type=Path, help="folder for charts")
    parser.add_argument("--json", type=Path, help="file that every answer is written to")
    return parser.parse_args()


def note(text: str) -> None:
    """Show progress on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def benched(options: argparse.Namespace, folder: Path) -> Iterator[Bench]:
    """Start the engines, and measure them."""
    if options.engines == "real":
        with real_engines() as engines:
            yield real_bench(options, folder, engines)
    else:
        simulation = Simulation(options.slower, options.max_num_seqs, 16)
        with simulated_engines(list(STANDARD_TIERS), simulation) as engines:
            yield simulated_bench(options, folder, engines)


def real_bench(options: argparse.Namespace, folder: Path, engines: Engines) -> Bench:
    """Return what is compared on real engines."""
    workload = Workload(read_prompts(REAL_KINDS), uniform(8, 32))
    quality, speeds = kept_profiles(options.profiles, engines)
    with router(folder / "first", engines) as running:
        if speeds is None:
            note("measuring the speed of the engines")
            speeds = measure_speed(running, 6)
        saturation = options.saturation
        if saturation is None:
            note("measuring saturation")
            bodies = [required(tier) for tier in STANDARD_TIERS]
            saturation = asyncio.run(closed_loop(running.url, workload, bodies, 16, seconds=60, warm_s=20))
    print(f"# {quality.model} on {speeds.machine}; losses measured; saturation {saturation:.2f} requests/s")
    return Bench(
        engines=engines,
        workload=workload,
        quality=quality,
        speeds=speeds,
        ttft_ms=options.ttft or 4000,
        tpot_ms=options.tpot or 400,
        saturation=saturation,
        seconds=options.seconds or 60,
        rounds=options.rounds,
        limit_s=120.0,
        block_s=10.0,
        folder=folder,
        given=given_settings(options.set),
        json=options.json,
        half_life_s=options.half_life,
        warm_s=options.warm,
    )


def simulated_bench(options: argparse.Namespace, folder: Path, engines: Engines) -> Bench:
    """Return what is compared on simulated engines."""
    prompts, seqs, slower = read_prompts(tuple(set(SHAPE) - {"long_context"})), options.max_num_seqs, options.slower
    workload = Workload(
        prompts, by_class(0.5, 256), (lambda at: MIXES[at > options.seconds / 2]) if options.step else None
    )
    if options.step:
        options.seconds = options.seconds or 120.0
    capacity = capacities(workload, seqs, slower)
    saturation = options.saturation or sum(capacity.values())
    with router(folder / "first", engines) as running:
        note("measuring the speed of the engines")
        speeds = measure_speed(running, 3)
    print(f"# simulated: H100, Llama 3.1 8B, {slower:g} times slower, batches of at most {seqs}; {LOSS_SOURCE}")
    print(
        f"# saturation {saturation:.1f} requests/s; no more loss than all balanced up to {feasible(capacity):.2f} of it"
    )
    return Bench(
        engines=engines,
        workload=workload,
        quality=assumed_losses({}),
        speeds=speeds,
        ttft_ms=(options.ttft or 250) * slower,
        tpot_ms=(options.tpot or 12) * slower,
        saturation=saturation,
        seconds=options.seconds or 12,
        rounds=options.rounds,
        limit_s=60.0,
        block_s=2.5,
        folder=folder,
        given=given_settings(options.set),
        json=options.json,
        half_life_s=options.half_life,
        warm_s=options.warm,
    )


def capacities(workload: Workload, max_num_seqs: int, slower: float) -> dict[TierName, float]:
    """Return the requests a second that each tier completes by the roofline if it is always full."""
    source = random.Random(1)
    kinds = [kind for kind, _ in workload.prompts if workload.mix is None or kind in MIXES[0]]
    tokens = statistics.fmean(workload.tokens(source, kind) for _ in range(100) for kind in kinds)
    prompt = round(statistics.fmean(len(text) // 4 + 6 for _, text in workload.prompts))
    return {
        tier: offline(HARDWARE[tier], prompt, round(tokens), 20 * max_num_seqs, max_num_seqs) / tokens / slower
        for tier in STANDARD_TIERS
    }


def feasible(capacity: Mapping[TierName, float]) -> float:
    """Return the load, as a share of saturation, up to which no more need be lost than everything on ``balanced`` loses.

    Beyond it the tiers of higher precision are full, and what is left for ``fast`` loses more than ``precise`` makes good.
    """
    fast, balanced, _ = LEVELS.values()
    whole = sum(capacity.values())
    return (capacity[TierName.BALANCED] + capacity[TierName.PRECISE] * fast / (fast - balanced)) / whole


def required(tier: TierName) -> dict[str, Any]:
    """Return the members of a request that only one tier may answer."""
    return {"model": tier, "qarr": {"tier_policy": "require"}}


def body_of(bench: Bench, row: str) -> Callable[[int, Arrival], dict[str, Any]]:
    """Return what makes a row's requests."""

    def body(index: int, _arrival: Arrival) -> dict[str, Any]:
        if row in "abc":
            tier = {"a": TierName.PRECISE, "b": TierName.BALANCED}.get(row, list(STANDARD_TIERS)[index % 3])
            return required(tier)
        sla: dict[str, float] = {"ttft_ms": bench.ttft_ms, "tpot_ms": bench.tpot_ms} if bench.bounded else {}
        return {"model": "auto", "qarr": {"sla": sla} if sla else {}}

    return body


def measure(
    bench: Bench, row: str, load: float, number: int, result: Result, more: Mapping[str, Mapping[str, Any]] = NOTHING
) -> None:
    """Run one round of a row at a load, on a router of its own, and add it to the result."""
    plan = arrivals(bench.workload, load * bench.saturation, bench.warm_s + bench.seconds, seed=number)
    label = f"{row}-{load:g}-{number}-{len(list(bench.folder.iterdir()))}".replace(".", "_")
    note(f"({row}) {ROWS[row]} at {load:g} of saturation, round {number + 1}: {len(plan)} requests")
    settings = merged(half_life(bench.half_life_s), bench.given, more) if row == MEASURED else NOTHING
    with router(bench.folder / label, bench.engines, settings) as running:
        if row == MEASURED:
            give_profiles(running, bench.quality, bench.speeds)
        processes: dict[str, psutil.Process] = {"router": running.process, **bench.engines.processes}
        before, cpu = bench.engines.work(), Cpu(processes)

        def progress(at_s: float, sent: int, ended: int) -> None:
            note(f"  {at_s:3.0f} s: {sent} sent, {sent - ended} open")

        answers = asyncio.run(send(running.url, plan, body_of(bench, row), label, bench.limit_s, progress))
        result.cpu = cpu.shares()
        asyncio.run(idle(running.url))
        for engine, work in bench.engines.work().items():
            result.used_s += work["busy_s"] - before[engine]["busy_s"]
            result.lost_s += work["lost_s"] - before[engine]["lost_s"]
    if running.decisions.exists():
        judge(running.decisions, result)
    result.served += sum(a.error is None for a in answers)
    counted = [replace(a, at_s=a.at_s - bench.warm_s, ended_s=a.ended_s - bench.warm_s) for a in answers]
    result.rounds.append(with_loss([a for a in counted if a.at_s >= 0], bench.quality))
    if bench.json is not None:
        write_lines(bench.json, [{"load": load, "row": row, "round": number, **as_row(a)} for a in result.rounds[-1]])


def judge(decisions: Path, result: Result) -> None:
    """Make the decisions of a log again, and note how far their predictions were off."""
    recording = read_recording(decisions)
    result.replayed["all"] += len(recording.decisions)
    result.replayed["same"] += len(recording.decisions) - len(differing(recording))
    result.seen += seen(recording)
    result.simulated += simulate(recording)
    for record in recording.decisions:
        outcome = recording.outcomes.get(record.request_id)
        if outcome is None or outcome.tier is not record.tier:
            continue
        for name, predicted, true in (
            ("TTFT", record.predicted_ttft_ms, outcome.ttft_ms),
            ("TPOT", record.predicted_tpot_ms, outcome.tpot_ms),
        ):
            if predicted is not None and true:
                result.errors[name].append(abs(predicted - true) / true)


def compare(bench: Bench, options: argparse.Namespace) -> None:
    """Run every row at every load, and print."""
    print(f"# bounds: TTFT {bench.ttft_ms:g} ms, TPOT {bench.tpot_ms:g} ms; a client leaves after {bench.limit_s:g} s")
    for load in options.loads or (0.5, 0.8, 1.0, 1.3):
        results = {row: Result() for row in options.rows}
        for number in range(bench.rounds):
            for row in options.rows if number % 2 == 0 else reversed(options.rows):
                measure(bench, row, load, number, results[row])
        show(bench, load, results)


def count_engine_time(bench: Bench, results: Sequence[Result]) -> int:
    """Give the answers of rows that are compared their engine time, at the batch that all of them had in the mean."""
    most: int = max(settings["max_num_seqs"] for settings in bench.engines.tiers.values())
    batch = max(1, min(most, round(mean_open([answers for r in results for answers in r.rounds], bench.seconds))))
    for result in results:
        result.rounds = [with_engine_time(answers, bench.speeds, batch) for answers in result.rounds]
    return batch


@dataclass(frozen=True, slots=True)
class Sums:
    """One row's sums over blocks of time."""

    goodput: Blocks
    loss: Blocks
    engine: Blocks


def sums(bench: Bench, rounds: Sequence[Sequence[Answer]]) -> Sums:
    """Return a row's sums."""

    def one(top: Callable[[Answer], float | None], bottom: Callable[[Answer], float] | None) -> Blocks:
        return blocks_of(rounds, bench.block_s, bench.seconds, top, bottom)

    return Sums(
        goodput=one(lambda a: float(a.meets(bench.ttft_ms, bench.tpot_ms)), None),
        loss=one(token_loss, lambda a: a.tokens),
        engine=one(lambda a: a.engine_s if a.error is None else None, lambda _: 1.0),
    )


def show(bench: Bench, load: float, results: Mapping[str, Result]) -> None:
    """Print one load's table."""
    batch = count_engine_time(bench, list(results.values()))
    made = {row: sums(bench, result.rounds) for row, result in results.items()}
    samples = resampled(len(next(iter(made.values())).goodput.top))
    requests = len(next(iter(results.values())).answers)
    print(
        f"\n{load:g} of saturation: {load * bench.saturation:.2f} requests/s, {bench.rounds} x {bench.seconds:g} s, "
        f"{requests} requests; engine-seconds at a batch of {batch}"
    )
    print(
        f"{'row':28} {'goodput/s':>24} {'in time %':>9} {'errors %':>8} {'TTFT p50/p95':>14} {'TPOT p50/p95':>14} "
        f"{'mean loss':>24} {'engine-seconds':>24} {'used':>7} {'fast/bal./prec. %':>17}"
    )
    for row, result in results.items():
        answers, one = result.answers, made[row]
        ttft = [a.ttft_ms for a in answers if a.error is None and a.ttft_ms is not None]
        tpot = [a.tpot_ms for a in answers if a.error is None and a.tpot_ms is not None]
        served = sum(a.error is None for a in answers)
        in_time = sum(a.meets(bench.ttft_ms, bench.tpot_ms) for a in answers)
        shares = "/".join(f"{sum(a.tier is t for a in answers) / len(answers) * 100:.0f}" for t in STANDARD_TIERS)
        print(
            f"({row}) {ROWS[row]:24} {told(interval(one.goodput, samples), 2):>24} {in_time / len(answers) * 100:9.1f}"
            f" {(1 - served / len(answers)) * 100:8.1f} {percentile(ttft, 0.5):6.0f}/{percentile(ttft, 0.95):<7.0f}"
            f" {percentile(tpot, 0.5):6.1f}/{percentile(tpot, 0.95):<7.1f} {told(interval(one.loss, samples), 4):>24}"
            f" {told(interval(one.engine, samples), 3):>24} {result.used_each_s:7.3f} {shares:>17}"
        )
    show_pairs(made, samples)
    show_run(results)


def show_pairs(made: Mapping[str, Sums], samples: Sequence[Sequence[int]]) -> None:
    """Print what the measured row changes against each other one, in the same blocks."""
    mine = made.get(MEASURED)
    for row, other in made.items() if mine is not None else ():
        if row != MEASURED and mine is not None:
            print(
                f"({MEASURED}) - ({row}): goodput/s {told(interval(mine.goodput, samples, other.goodput), 2, plus=True)}, "
                f"loss {told(interval(mine.loss, samples, other.loss), 4, plus=True)}, "
                f"engine-seconds {told(interval(mine.engine, samples, other.engine), 3, plus=True)}"
            )


def show_run(results: Mapping[str, Result]) -> None:
    """Print what tells whether the run can be trusted."""
    for row, result in results.items():
        used = ", ".join(f"{name} {share * 100:.0f}" for name, share in result.cpu.items())
        late = percentile([a.late_ms for a in result.answers], 0.95)
        behind = f"; engines fell {result.lost_s * 1000:.0f} ms behind" if result.lost_s else ""
        behind += " - THIS MACHINE WAS TOO BUSY FOR IT" if result.lost_s > MOST_LOST_S or late > MOST_LATE_MS else ""
        predicted = ", ".join(
            f"{name} {percentile(errors, 0.5):.2f} (p95 {percentile(errors, 0.95):.2f})"
            for name, errors in result.errors.items()
            if errors
        )
        print(
            f"  ({row}) % of one core: {used}; 95 % sent at most {late:.0f} ms late{behind}; prediction off by {predicted}; "
            f"{result.replayed['same']} of {result.replayed['all']} decisions replay"
        )
        if result.seen:
            print(
                f"      seen and simulated from the log: {beside(summarise(result.seen), summarise(result.simulated))}"
            )


def told(value: Interval, digits: int, *, plus: bool = False) -> str:
    """Return an estimate with its interval."""
    sign = "+" if plus else ""
    return f"{value.mean:{sign}.{digits}f} ({value.low:{sign}.{digits}f} to {value.high:{sign}.{digits}f})"


def as_if(bench: Bench, answers: Sequence[Answer], tier: TierName) -> list[Answer]:
    """Return answers with the loss that they would have if one tier had given them all."""
    return with_loss([replace(answer, tier=tier) for answer in answers], bench.quality)


def sweep(bench: Bench, options: argparse.Namespace) -> None:
    """Print and plot engine time against loss, over budgets, beside everything on one tier and round robin.

    Requests have no bounds on time, and by default the load is one that each tier could serve nearly alone, so that loss and
    engine time alone decide.
    """
    load = (options.loads or [0.3])[0]
    bench = replace(bench, bounded=False)
    results: dict[str, Result] = {}
    for row in ("a", "b", "c", "d"):
        results[f"({row}) {ROWS[row]}"] = result = Result()
        for number in range(bench.rounds):
            measure(bench, row, load, number, result)
    asked = results[f"(b) {ROWS['b']}"].answers
    least, most = (mean_loss_of(as_if(bench, asked, tier)) for tier in (TierName.BALANCED, TierName.FAST))
    shares = [least * n / 4 for n in range(5)] + [most * n / 4 for n in (2, 3, 4)]
    budgets = options.budgets or shares
    for budget in budgets:
        results[f"{budget:.4f}"] = result = Result()
        for number in range(bench.rounds):
            measure(bench, MEASURED, load, number, result, {"policy": {"loss_budget": budget}})
    count_engine_time(bench, list(results.values()))
    print(f"\n{load:g} of saturation; rows by number: (e) with that policy.loss_budget")
    print(f"{'row':28} {'mean loss':>24} {'engine-seconds':>24} {'used':>7} {'goodput/s':>24}")
    points: dict[str, list[Point]] = {"e": [], "fixed": []}
    for name, result in results.items():
        one = sums(bench, result.rounds)
        samples = resampled(len(one.goodput.top))
        loss, engine, good = (interval(part, samples) for part in (one.loss, one.engine, one.goodput))
        print(f"{name:28} {told(loss, 4):>24} {told(engine, 3):>24} {result.used_each_s:7.3f} {told(good, 2):>24}")
        fixed = name.startswith("(")
        point = Point(loss.mean, engine.mean, engine.low, engine.high, name[1] if fixed else "")
        points["fixed" if fixed else "e"].append(point)
    show_run({"e": results[f"{budgets[-1]:.4f}"]})
    if options.plots is not None:
        front = tuple(sorted(points["e"], key=lambda p: p.x))
        chart(
            options.plots / "loss-against-engine-time.svg", f"What a loss budget buys, at {load:g} of saturation",
            "mean loss", "engine-seconds a request",
            [Series(ROWS["e"], front, line=True), Series("(a) to (d)", tuple(points["fixed"]))],
        )  # fmt: skip


def step(bench: Bench, options: argparse.Namespace) -> None:
    """Print and plot mean loss over time while the mix goes from half chat, half code to all code."""
    load = (options.loads or [0.35])[0]  # beyond 0.4, all code cannot be served at the budget
    result = Result()
    measure(bench, MEASURED, load, 0, result)
    answers = sorted((a for a in result.answers if a.loss is not None), key=lambda a: a.at_s)
    half = bench.seconds / 2
    print(f"\n{load:g} of saturation; half chat, half code until {half:g} s, then all code")
    titles = f"{'seconds':>14} {'requests':>9} {'mean loss':>10} {'all balanced':>13} {'since start':>12}"
    print(f"{titles} {'fast/bal./prec. %':>18}")
    marks = [WINDOW_S * n for n in range(1, int(bench.seconds // WINDOW_S) + 1)]
    windows, running_mean, level = [], [], []
    for end in marks:
        own = [a for a in answers if end - WINDOW_S <= a.at_s < end]
        until = [a for a in answers if a.at_s < end]
        if not own:
            continue
        windows.append(Point(end - WINDOW_S / 2, mean_loss_of(own)))
        level.append(Point(end - WINDOW_S / 2, mean_loss_of(as_if(bench, own, TierName.BALANCED))))
        running_mean.append(Point(end, mean_loss_of(until)))
        shares = "/".join(f"{sum(a.tier is t for a in own) / len(own) * 100:.0f}" for t in STANDARD_TIERS)
        print(
            f"{end - WINDOW_S:6.0f} to {end:4.0f} {len(own):9} {windows[-1].y:10.4f} {level[-1].y:13.4f}"
            f" {running_mean[-1].y:12.4f} {shares:>18}"
        )
    show_run({MEASURED: result})
    if options.plots is not None:
        chart(
            options.plots / "loss-after-a-step.svg", "Half chat, half code, then all code", "seconds", "mean loss",
            [
                Series(f"each {WINDOW_S:g} s", tuple(windows), line=True),
                Series("since the start", tuple(running_mean), line=True, marks=False),
                Series("all balanced", tuple(level), line=True, marks=False),
            ],
        )  # fmt: skip


if __name__ == "__main__":
    main()
