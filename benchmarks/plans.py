"""What the planned fleet saves, and where it does not: four settings, and a day with a peak.

    python benchmarks/plans.py [--seconds 240] [--seed 1]

Each setting is planned by ``qarr plan`` (``--json``). The planned fleet and each fleet of one precision then serve the same
Poisson arrivals, simulated (``policy_simulation.py``, with the router's own decisions and queue; speeds and losses as the
plan has them): each part of the day lasts ``--seconds``. Answers and prompts are log-normal about their mean. ``loads`` has
what the plan costs at other loads, and the cheapest fleet of one precision that keeps the budget. In the days with a peak
all fleets have eight GPUs, and the load is 2.5 times the mean at the peak; the policy's loss budget is 5 answers of 100.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
from collections import deque
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from measure import ROOT
from policy_simulation import Options, simulate
from recording import Recording

from classifier import Complexity, PromptFeatures
from router.cli.plan import MIXES
from router.policy.decision import PolicyParameters, Query
from router.policy.decision_log import DecisionRecord, OutcomeRecord
from router.policy.losses import losses
from router.policy.profiles import load_latency, percentile
from tiers.simulated.gpu import Hardware, Job, Scheduler, hardware
from tiers.sizing.architecture import architecture
from tiers.sizing.capacity import Demand, engines_on_gpus
from tiers.sizing.find_config import find_config
from tiers.sizing.fleet import EngineType, Fleet, Load
from tiers.sizing.hardware import parse_gpus
from tiers.sizing.operation import in_operation
from tiers.sizing.roofline import Roofline
from tiers.snapshot import FleetSnapshot, ReplicaState, TierSnapshot
from tiers.spec import PRECISIONS, ReplicaStatus, TemplateTokens, TierName, TierSpec
from tiers.speed import SpeedModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recording import Result

    from router.policy.decision import Objective

RESULTS = ROOT / "benchmarks/results/plans.json"
CONFIGS = "tests/unit/tiers/sizing/configs"
PROFILE = "benchmarks/results/latency_smollm2-135m.json"
PROMPT, OUTPUT = 800, 250  # tokens in the mean, the plan's defaults
SIGMA = 0.6  # of the logarithm of an answer's length
USUAL = 0.7  # of what an engine serves at most: the load at which latencies are compared
DAY = "0.4,0.6,0.5,2.5"
SETTINGS = {
    "Llama 3.1 8B on one H100": f"--model {CONFIGS}/llama-3.1-8b.json --gpus 1xH100 --load 8/s --loss 0.3 --day {DAY}",
    "Llama 3.1 8B on four A10": f"--model {CONFIGS}/llama-3.1-8b.json --gpus 4xA10 --load 3/s --loss 0.3 --day {DAY}",
    "Llama 3.3 70B on two A100 and four L40S": f"--model {CONFIGS}/llama-3.3-70b.json --gpus 2xA100,4xL40S --load 1.5/s "
    f"--mix coding --loss 0.3 --day {DAY}",
    "SmolLM2 135M on this CPU": f"--load 20/min --prompt 200 --output 60 --profile {PROFILE} --day {DAY}",
}


@dataclass(frozen=True, slots=True)
class Engine:
    """So many engines of one kind."""

    tier: TierName
    gpu: str | None
    gpus: int
    replicas: int
    batch: int
    speed: SpeedModel


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one fleet's requests. Shares 0..1, times in milliseconds."""

    name: str
    engines: str
    price: float | None  # of an hour
    per_million: float | None  # tokens of output
    lost: float
    refused: float
    ttft_mean: float
    tpot_mean: float
    ttft_p50: float
    ttft_p95: float
    tpot_p95: float
    shares: Mapping[str, float]


def main() -> None:
    """Run all, print tables, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0, help="of each part of the day")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"$ python benchmarks/plans.py {' '.join(sys.argv[1:])}".rstrip())
    print(
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC. Speeds: the plan's roofline, on this CPU measured. Losses: published."
    )
    found: dict[str, Any] = {}
    for name, arguments in SETTINGS.items():
        print(f"\n{name}\n$ qarr plan {arguments}")
        found[name] = setting(arguments, options)
    for gpu, rate, others in (("H100", 12.0, "balanced"), ("A100", 2.0, "fast")):
        print(f"\nA day with a peak: Llama 3.3 70B on eight {gpu}, {rate:g} requests/s in the mean, coding")
        found[f"day on {gpu}"] = peak(gpu, rate, TierName(others), options)
    found["engines"] = checked(options)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def plan(arguments: str) -> dict[str, Any]:
    """Return what ``qarr plan`` finds."""
    command = [str(Path(sys.executable).with_name("qarr")), "plan", *arguments.split(), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if not done.stdout:
        raise SystemExit(done.stderr)
    read: dict[str, Any] = json.loads(done.stdout)
    return read


def setting(arguments: str, options: argparse.Namespace) -> dict[str, Any]:
    """Plan, simulate the planned fleet and those of one precision, and show them."""
    planned, words = plan(arguments), arguments.split()
    print(planned["verdict"])
    value = dict(zip(words[::2], words[1::2], strict=True))
    fleets = {"planned": planned["plan"]} | {f"{tier} alone": fleet for tier, fleet in planned["alone"].items()}
    fleets = {name: fleet for name, fleet in fleets.items() if fleet is not None}
    rates = [planned["requests_per_s"] * factor / mean_of(DAY) for factor in factors(DAY)]
    arrivals = requests(rates, value.get("--mix", "chat"), planned, options)
    rows = []
    for name, fleet in fleets.items():
        engines = [engine(each, value) for each in fleet["engines"]]
        results = serve(engines, arrivals, fleet["loss_budget"], "best")
        rows.append(row(name, engines, fleet["cost_per_hour"], results, planned, arrivals))
    show(rows, planned)
    print("the plan's / simulated:")
    for (name, fleet), each in zip(fleets.items(), rows, strict=True):
        lost = f"lost of 100 {100 * fleet['answers_lost']:.3f} / {100 * each.lost:.3f}"
        ttft = f"TTFT mean {fleet['ttft_ms']:,.0f} / {each.ttft_mean:,.0f} ms"
        print(f"  {name:15} {lost}, {ttft}, {fleet['tpot_ms']:.1f} / {each.tpot_mean:.1f} ms a token")
    single = cheapest_single(planned)
    rate = float(value["--load"].removesuffix("/s")) if value["--load"].endswith("/s") else None
    return {
        "command": f"qarr plan {arguments}",
        "verdict": planned["verdict"],
        "currency": planned["currency"],
        "planned": as_json(rows[0]),
        "single": next((as_json(each) for each in rows if each.name == f"{single} alone"), None),
        "loads": sweep(arguments, rate) if rate else [],
        "rows": [as_json(each) for each in rows],
    }


def engine(each: Mapping[str, Any], value: Mapping[str, str]) -> Engine:
    """Return an engine of a plan with its speed."""
    tier = TierName(each["tier"])
    if each["gpu"] is None:
        fit = next(fit for fit in load_latency(ROOT / value["--profile"]).fits if fit.tier is tier)
        return Engine(
            tier, None, 0, each["replicas"], each["batch"], replace(fit.model, contention=0.0)
        )  # a machine each
    model = architecture(find_config(str(ROOT / value["--model"])))
    pace = Roofline(model, parse_gpus(each["gpu"])[0], PRECISIONS[tier], each["gpus_per_replica"], PROMPT + OUTPUT // 2)
    return Engine(tier, each["gpu"], each["gpus_per_replica"], each["replicas"], each["batch"], as_model(pace))


def as_model(pace: Roofline) -> SpeedModel:
    """Return the speed model with the roofline's times: reading up to a batch, computing beyond."""
    least = pace.mixed_ms(PROMPT, 1, PROMPT) - pace.prefill_ms_per_token * PROMPT  # that is not the prompt's
    each = pace.step_ms(2) - pace.step_ms(1)
    base, far = pace.step_ms(1) - each, 100_000
    beyond = pace.step_ms(far) - pace.step_ms(far - 1) - each
    knee = round(far - (pace.step_ms(far) - base - each * far) / beyond) if beyond > 0 else 0
    return SpeedModel(
        ttft_base_ms=max(least, 0.0),
        prefill_ms_per_token=pace.prefill_ms_per_token,
        step_base_ms=base,
        step_ms_per_sequence=each,
        step_knee=knee,
        step_ms_beyond_knee=max(beyond, 0.0),
        ttft_steps=1.5,
        ttft_spread=0.1,
        tpot_spread=0.1,
        profiled=True,
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    at_s: float
    query: Query
    tokens: int


def requests(rates: Sequence[float], mix: str, planned: Mapping[str, Any], options: argparse.Namespace) -> list[Asked]:
    """Return Poisson arrivals of a day's parts, of the mix's kinds."""
    source = random.Random(options.seed)
    classes, degrees = MIXES[mix]
    found, at = [], 0.0
    for part, rate in enumerate(rates):
        at = part * options.seconds
        while (at := at + source.expovariate(rate)) < (part + 1) * options.seconds:
            kind = source.choices(list(classes), list(classes.values()))[0]
            degree = source.choices(list(Complexity), degrees)[0]
            prompt = max(round(lengths(source, planned["prompt_tokens"])), 8)
            tokens = min(max(round(lengths(source, planned["output_tokens"])), 1), 4 * planned["output_tokens"])
            features = PromptFeatures(0, 0, prompt, True, False, False, None, kind, 1.0, (), degree)
            found.append(Asked(at, Query(features, prompt, 4 * planned["output_tokens"]), tokens))
    return found


def lengths(source: random.Random, mean: float) -> float:
    """Return a log-normal length, in tokens."""
    return source.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)


def serve(
    engines: Sequence[Engine], asked: Sequence[Asked], budget: float, objective: Objective
) -> list[tuple[Asked, Result]]:
    """Return how each request ended on a fleet."""
    tiers = []
    for tier, precision in PRECISIONS.items():
        mine = [each for each in engines if each.tier is tier]
        most = max((each.batch for each in mine), default=1)
        spec = TierSpec(tier, max_model_len=1 << 20, max_num_seqs=most, max_in_flight=most, precision=precision)
        states = tuple(
            ReplicaState(f"{tier}-{at}-{n}", "", precision, ReplicaStatus.READY, limit=each.batch, speed=each.speed)
            for at, each in enumerate(mine)
            for n in range(each.replicas)
        )
        tiers.append(TierSnapshot(spec, states, (0,) * len(states)))
    fleet = FleetSnapshot(tuple(tiers), TemplateTokens(0, 0, 0), output_share=0.25)
    table = PolicyParameters(
        {tier: losses(PRECISIONS[tier], ()) for tier in tuple(PRECISIONS)[:2]},
        objective=objective,
        loss_budget=budget,
    )
    records = tuple(
        DecisionRecord(each.at_s, str(n), "", each.query, fleet, None, None, "", None, None)
        for n, each in enumerate(asked)
    )
    outcomes = {
        str(n): OutcomeRecord(str(n), TierName.PRECISE, each.query.prompt_tokens, each.tokens, None, None)
        for n, each in enumerate(asked)
    }
    results = simulate(Recording({"": table}, records, outcomes), options=Options())
    return list(zip(asked, results, strict=True))


def row(
    name: str,
    engines: Sequence[Engine],
    price: float | None,
    results: Sequence[tuple[Asked, Result]],
    planned: Mapping[str, Any],
    asked: Sequence[Asked],
) -> Row:
    """Return what a fleet's results come to."""
    served = [(each, result) for each, result in results if result.tier is not None]
    ttfts = [result.ttft_ms for _, result in served if result.ttft_ms is not None]
    tpots = [result.tpot_ms for _, result in served if result.tpot_ms is not None]
    known = planned.get("currency") is not None and price is not None
    tokens = planned["requests_per_s"] * planned["output_tokens"] * 3600 * len(served) / len(asked)
    return Row(
        name,
        ", ".join(
            f"{e.replicas} {e.tier} on {e.gpus} x {e.gpu}" if e.gpu else f"{e.replicas} {e.tier}" for e in engines
        ),
        price,
        price / tokens * 1e6 if known and price is not None else None,
        sum(result.loss or 0.0 for _, result in served) / max(len(served), 1),
        1 - len(served) / len(results),
        fmean(ttfts),
        fmean(tpots),
        percentile(ttfts, 0.5),
        percentile(ttfts, 0.95),
        percentile(tpots, 0.95),
        {tier: sum(result.tier is tier for _, result in served) / max(len(served), 1) for tier in PRECISIONS},
    )


def show(rows: Sequence[Row], planned: Mapping[str, Any]) -> None:
    """Print a table."""
    price = planned.get("currency") or ("GPUs" if rows[0].engines and " x " in rows[0].engines else "machines")
    print(f"{'fleet':15} {'engines':52} {price + '/h':>10} {'1M tokens':>9} {'lost of 100':>11} {'refused':>8}", end="")
    print(f" {'TTFT p50':>8} {'p95':>6} {'ms/token p95':>12}  f/b/p %")
    for each in rows:
        money = "-" if each.per_million is None else f"{each.per_million:.3f}"
        cost = "-" if each.price is None else f"{each.price:.2f}"
        shares = "/".join(f"{share:.0%}".removesuffix("%") for share in each.shares.values())
        print(
            f"{each.name:15} {each.engines:52} {cost:>10} {money:>9} {100 * each.lost:>11.2f} {each.refused:>8.1%}",
            end="",
        )
        print(f" {each.ttft_p50:>8.0f} {each.ttft_p95:>6.0f} {each.tpot_p95:>12.1f}  {shares}")


def as_json(each: Row) -> dict[str, Any]:
    """Return a row for the file."""
    return {name: getattr(each, name) for name in Row.__slots__}


def peak(gpu: str, rate: float, lower: TierName, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Serve a day with a peak by fleets of the same GPUs: of one precision each, and of both with each objective."""
    model, kind = architecture(find_config(str(ROOT / CONFIGS / "llama-3.3-70b.json"))), parse_gpus(gpu)[0]

    def engines(tier: TierName, gpus: int, count: int) -> Engine:
        pace = Roofline(model, kind, PRECISIONS[tier], gpus, PROMPT + OUTPUT // 2)
        return Engine(tier, gpu, gpus, count, 128, as_model(pace))

    planned = {"prompt_tokens": PROMPT, "output_tokens": OUTPUT, "requests_per_s": rate}
    asked = requests([rate * factor / mean_of(DAY) for factor in factors(DAY)], "coding", planned, options)
    high, both = [engines(TierName.PRECISE, 4, 2)], [engines(lower, 2, 2), engines(TierName.PRECISE, 4, 1)]
    fleets: dict[str, tuple[list[Engine], Objective]] = {
        "precise alone": (high, "best"),
        f"{lower} alone": ([engines(lower, 2, 4)], "best"),
        "both, best": (both, "best"),
        "both, cheapest": (both, "cheapest"),
    }
    rows = [
        row(name, mine, None, serve(mine, asked, 0.05, objective), planned, asked)
        for name, (mine, objective) in fleets.items()
    ]
    show(rows, planned)
    return [as_json(each) for each in rows]


def factors(day: str) -> list[float]:
    """Return the loads of a day's parts."""
    return [float(factor) for factor in day.split(",")]


def mean_of(day: str) -> float:
    """Return the mean of a day's parts."""
    return sum(factors(day)) / len(factors(day))


def sweep(arguments: str, load: float) -> list[tuple[float, float | None, float | None]]:
    """Return what the plan costs at shares of a load, and the cheapest fleet of one precision within the budget."""
    found = []
    for share in (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0):
        planned = plan(arguments.replace(f"--load {load:g}/s", f"--load {load * share:g}/s"))
        single = cheapest_single(planned)
        price = planned["plan"] and planned["plan"]["cost_per_hour"]
        found.append((load * share, price, single and planned["alone"][single]["cost_per_hour"]))
    each = (f"{rate:g}/s {money(price)} / {money(single)}" for rate, price, single in found)
    print("loads (an hour, planned / single): " + "; ".join(each))
    return found


def money(price: float | None) -> str:
    """Return a price; a dash where no fleet carries it."""
    return "-" if price is None else f"{price:.2f}"


def cheapest_single(planned: Mapping[str, Any]) -> str | None:
    """Return the tier that alone costs least within the budget."""
    most = planned["budget"] + 1e-9
    alone = {tier: fleet for tier, fleet in planned["alone"].items() if fleet is not None}
    within = {t: (f["cost_per_hour"], f["answers_lost"]) for t, f in alone.items() if f["answers_lost"] <= most}
    return min(within, key=lambda tier: within[tier], default=None)


def checked(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print the plan's figures of one engine beside those of a simulated engine with vLLM's scheduling."""
    print("\nOne engine: the plan's figures / those of a simulated engine with vLLM's scheduling")
    print("model          GPUs    tier       tokens/s, never idle    requests/s  TTFT ms, mean       ms/token, mean")
    found = []
    demand = Demand(PROMPT, OUTPUT, PROMPT + OUTPUT)
    for name, gpus in (("llama-3.1-8b", "1xH100"), ("llama-3.1-8b", "1xA10"), ("llama-3.3-70b", "4xH100")):
        (kind, count), model = parse_gpus(gpus), architecture(find_config(str(ROOT / CONFIGS / f"{name}.json")))
        for each in engines_on_gpus(model, kind, count, demand)[0]:
            if each.gpus_per_replica != count or each.requests_per_s is None or each.tokens_per_s is None:
                continue
            rate, on = USUAL * each.requests_per_s, hardware(each.tier, model, kind, count)
            load = Load({"": rate}, {each.tier: {"": 0.0}})
            fleet = in_operation(
                Fleet(((EngineType(gpus, each, 1.0), 1),), 1, 0, {("", each.tier): 1.0}),
                load,
                demand,
                lambda _budget, _taken: 1.0,
            )
            there = throughput(on, each.batch), *latency(on, each.batch, rate, options)
            pairs = list(zip((each.tokens_per_s, fleet.ttft_ms or 0.0, fleet.tpot_ms or 0.0), there, strict=True))
            found.append({"model": name, "gpus": gpus, "tier": each.tier, "requests_per_s": rate, "pairs": pairs})
            said = [f"{a:6,.{d}f} / {b:6,.{d}f} x {a / b:.2f}" for (a, b), d in zip(pairs, (0, 0, 1), strict=True)]
            print(f"{name:14} {gpus:7} {each.tier:9} {said[0]}  {rate:8.2f}  {said[1]}  {said[2]}")
    return found


def throughput(on: Hardware, batch: int) -> float:
    """Return the output tokens a second of an engine that always has more to do."""
    source, scheduler, took = random.Random(1), Scheduler(on, batch), 0.0
    jobs = [Job(round(lengths(source, PROMPT)), max(round(lengths(source, OUTPUT)), 1)) for _ in range(8 * batch)]
    scheduler.waiting.extend(jobs)
    while scheduler.waiting and (step := scheduler.next_step()):
        took += step.duration_s
        scheduler.finish(step)
    return sum(job.produced for job in jobs) / took


def latency(on: Hardware, batch: int, rate: float, options: argparse.Namespace) -> tuple[float, float]:
    """Return the mean TTFT and TPOT, in milliseconds, of an engine to which requests come at random."""
    source, scheduler, now, at = random.Random(options.seed), Scheduler(on, batch), 0.0, 0.0
    coming, began, first, ended = deque[tuple[float, Job]](), dict[Job, float](), dict[Job, float](), dict[Job, float]()
    for _ in range(max(8 * batch, 2000)):
        at += source.expovariate(rate)
        coming.append((at, Job(max(round(lengths(source, PROMPT)), 1), max(round(lengths(source, OUTPUT)), 2))))
    while coming or scheduler.waiting or scheduler.running:
        while coming and coming[0][0] <= now:
            at, job = coming.popleft()
            began[job] = at
            scheduler.waiting.append(job)
        step = scheduler.next_step()
        if step is None:
            now = coming[0][0]
            continue
        now += step.duration_s
        scheduler.finish(step)
        for job, _ in step.parts:
            if job.produced:
                first.setdefault(job, now)
            if job.produced >= job.tokens:
                ended[job] = now
    warm = list(began)[len(began) // 4 :]
    ttft = fmean(first[job] - began[job] for job in warm)
    return 1000 * ttft, 1000 * fmean((ended[job] - first[job]) / (job.tokens - 1) for job in warm)


if __name__ == "__main__":
    main()
