"""Where a planned fleet of several precisions pays, and where not: models on GPUs and on this CPU, each over several loads.

    python benchmarks/plans.py [--requests 1000] [--seed 1] [--only TEXT]

At each load ``qarr plan`` (``--json``) finds the cheapest fleet within the loss budget. That fleet and each fleet of one
precision then serve the same Poisson arrivals, simulated (``policy_simulation.py``, with the router's own decisions and
queue; speeds and losses as the plan has them). Where there are as many GPUs as are needed, only two fleets of one precision
do: the cheapest, and the cheapest within the budget. A day has four parts of equal length, the load of the last one is 2.5
times the mean. ``--requests`` is how many a day has, or more, so that each part lasts as long as three answers; answers and
prompts are log-normal about their mean. ``single`` is the cheapest fleet of one precision that keeps the budget. Each
setting says where its speeds are from: computed (roofline), or measured, on an H200 by ``gpu_speed.py`` (``gpu_profile.py``
fits them) and on this CPU by ``qarr profile latency``. Formats are those that ``qarr plan`` takes on the GPUs if none are
named. ``mix_pays.py`` has more GPUs and loads, planned and not simulated.

scripts/figures.py writes the documents' tables from results/plans.json.
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

from gpu_profile import PROFILE
from measure import ROOT
from policy_simulation import Options, simulate
from recording import Recording

from classifier import Complexity, PromptFeatures
from router.cli.plan_load import MIXES
from router.policy.decision import PolicyParameters, RoutingQuery
from router.policy.decision_log import DecisionRecord, OutcomeRecord
from router.policy.losses import losses
from router.policy.profiles import load_latency, percentile
from tiers.simulated.gpu import Hardware, Job, Scheduler, hardware
from tiers.sizing.architecture import architecture
from tiers.sizing.capacity import ServingDemand, engines_on_gpus
from tiers.sizing.find_config import find_config
from tiers.sizing.fleet import DailyLoad, EngineType, PlannedFleet
from tiers.sizing.named_gpus import parse_gpus
from tiers.sizing.operation import Policy, in_operation
from tiers.sizing.roofline import Roofline
from tiers.sizing.tier_format import parse_format
from tiers.snapshot import FleetSnapshot, ReplicaState, TierSnapshot
from tiers.spec import (
    PRECISIONS,
    STANDARD_TIERS,
    ReplicaStatus,
    TemplateTokens,
    TierName,
    TierSpec,
)
from tiers.speed import SpeedModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from recording import Result

RESULTS = ROOT / "benchmarks/results/plans.json"
CONFIGS = "tests/unit/tiers/sizing/configs"
CPU_PROFILE = "benchmarks/results/latency_smollm2-135m.json"
PROMPT, OUTPUT = 800, 250  # tokens in the mean, the plan's defaults
SIGMA = 0.6  # of the logarithm of an answer's length
# of what an engine serves at most: the load at which latencies are compared
USUAL = 0.7
DAY = "0.4,0.6,0.5,2.5"
MIN_PART_ANSWERS = 3  # a part lasts at least as long as so many answers
PLANNED = "planned"  # the name of the fleet that the plan found
LLAMA_8B, LLAMA_70B, QWEN_30B = (
    f"--model {CONFIGS}/{name}.json"
    for name in ("llama-3.1-8b", "llama-3.3-70b", "qwen3-30b-a3b")
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on GPUs, or on this CPU, and the loads that are tried.

    Attributes:
        name: For people.
        arguments: Of ``qarr plan``, without the load.
        loads: Requests in the mean, of each ``unit``.
        unit: ``s`` or ``min``.
    """

    name: str
    arguments: str
    loads: tuple[float, ...]
    unit: str = "s"

    def at(self, load: float) -> str:
        """Return the plan's arguments at a load."""
        return f"{self.arguments} --load {load:g}/{self.unit}"

    @property
    def values(self) -> dict[str, str]:
        """Return the arguments by option."""
        words = self.arguments.split()
        return dict(zip(words[::2], words[1::2], strict=True))


# README shows these.
IN_README = (
    "Llama 3.3 70B on B200, at most 1 lost",
    "Llama 3.3 70B on RTX PRO 6000, at most 0.3 lost",
    "Llama 3.1 8B on four H200",
    "Qwen3 30B-A3B on L40S, at most 1 lost",
)


def with_budgets(name: str, arguments: str, loads: tuple[float, ...]) -> list[Setting]:
    """Return a setting for each loss budget: few answers may be lost, or more."""
    return [
        Setting(
            f"{name}, at most {budget} lost",
            f"{arguments} --loss {budget} --day {DAY}",
            loads,
        )
        for budget in ("0.3", "1")
    ]


SETTINGS = (
    *with_budgets("Llama 3.1 8B on B200", f"{LLAMA_8B} --gpus B200", (15, 30, 45)),
    *with_budgets(
        "Llama 3.1 8B on RTX PRO 6000",
        f"{LLAMA_8B} --gpus RTX-PRO-6000-Server",
        (4, 8, 14),
    ),
    *with_budgets("Llama 3.3 70B on B200", f"{LLAMA_70B} --gpus B200", (5, 8, 16)),
    *with_budgets(
        "Llama 3.3 70B on RTX PRO 6000",
        f"{LLAMA_70B} --gpus RTX-PRO-6000-Server",
        (2, 4, 8),
    ),
    *with_budgets("Qwen3 30B-A3B on H100", f"{QWEN_30B} --gpus H100", (15, 30, 45)),
    *with_budgets("Qwen3 30B-A3B on L40S", f"{QWEN_30B} --gpus L40S", (6, 10, 20)),
    Setting(
        "Llama 3.1 8B on one H100",
        f"{LLAMA_8B} --gpus 1xH100 --loss 0.3 --day {DAY}",
        (2, 4, 6, 8, 10, 12),
    ),
    Setting(
        "Llama 3.1 8B on four H200",
        f"{LLAMA_8B} --gpus 4xH200 --loss 0.3 --day {DAY} --profile {PROFILE.relative_to(ROOT)} --max-num-seqs 128",
        (8, 16, 24, 32, 40, 48, 64),
    ),
    Setting(
        "Llama 3.1 8B on four A10",
        f"{LLAMA_8B} --gpus 4xA10 --loss 0.3 --day {DAY}",
        (0.75, 1.5, 2.25, 3, 3.75, 4.5, 6),
    ),
    Setting(
        "Llama 3.3 70B on eight H100, coding",
        f"{LLAMA_70B} --gpus 8xH100 --mix coding --loss 0.3 --day {DAY}",
        (2, 4, 6, 8, 10, 12, 16),
    ),
    Setting(
        "Llama 3.3 70B on two A100 and four L40S, coding",
        f"{LLAMA_70B} --gpus 2xA100,4xL40S --mix coding --loss 0.3 --day {DAY}",
        (0.375, 0.75, 1.125, 1.5, 1.875, 2.25, 3),
    ),
    Setting(
        "SmolLM2 135M on this CPU",
        f"--prompt 200 --output 60 --profile {CPU_PROFILE} --day {DAY}",
        (5, 10, 20, 40),
        "min",
    ),
)


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
    tpot_p50: float
    tpot_p95: float
    shares: Mapping[str, float]


def main() -> None:
    """Run all, print tables, and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests", type=int, default=1000, help="of each simulated day"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only",
        default="",
        help="settings whose name has this; nothing is written then",
    )
    options = parser.parse_args()
    command = f"python benchmarks/plans.py {' '.join(sys.argv[1:])}".rstrip()
    date = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    print(
        f"$ {command}\n{date}. Days of {options.requests:,} requests or more; load of their parts: {DAY} of the mean."
    )
    found = [
        sweep(setting, options) for setting in SETTINGS if options.only in setting.name
    ]
    if options.only:
        return
    record = {
        "command": command,
        "date": date,
        "requests": options.requests,
        "day": DAY,
        "settings": found,
        "engines": checked(options),
    }
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def plan(arguments: str) -> dict[str, Any]:
    """Return what ``qarr plan`` finds."""
    command = [
        str(Path(sys.executable).with_name("qarr")),
        "plan",
        *arguments.split(),
        "--json",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=300
    )
    if not done.stdout:
        raise SystemExit(done.stderr)
    read: dict[str, Any] = json.loads(done.stdout)
    return read


def sweep(setting: Setting, options: argparse.Namespace) -> dict[str, Any]:
    """Plan and simulate a setting at each of its loads, and show them."""
    print(f"\n{setting.name}")
    loads = [at_load(setting, load, options) for load in setting.loads]
    return {
        "name": setting.name,
        "arguments": setting.arguments,
        "in_readme": setting.name in IN_README,
        "unit": setting.unit,
        "formats": loads[0]["formats"],
        "loads": loads,
    }


def at_load(
    setting: Setting, load: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Plan at one load, simulate the planned fleet and those of one precision, and show them."""
    arguments = setting.at(load)
    planned = plan(arguments)
    print(
        f"\n$ qarr plan {arguments}\nspeed: {planned['speed']}; losses: {planned['losses']}\n{planned['verdict']}"
    )
    fleets = {PLANNED: planned["plan"]} | {
        f"{tier} alone": fleet for tier, fleet in planned["alone"].items()
    }
    fleets = {name: fleet for name, fleet in fleets.items() if fleet is not None}
    if any(gpu["count"] is None for gpu in planned["gpus"]):
        fleets = compared(fleets, planned)
    rows = simulated(fleets, setting, planned, options)
    if rows:
        show(rows, planned)
        show_plan(fleets, rows)
    return {
        "load": load,
        "command": f"qarr plan {arguments}",
        "verdict": planned["verdict"],
        "formats": planned["formats"],
        "speed": planned["speed"],
        "losses": planned["losses"],
        "currency": planned["currency"],
        "single": cheapest_single(planned),
        "rows": [as_json(each) for each in rows],
    }


def compared(fleets: Mapping[str, Any], planned: Mapping[str, Any]) -> dict[str, Any]:
    """Return the planned fleet, the cheapest of one precision within the budget, and the cheapest whatever it loses."""
    alone = {name: fleet for name, fleet in fleets.items() if name != PLANNED}
    cheapest = min(
        alone,
        key=lambda name: (alone[name]["cost_per_hour"], alone[name]["answers_lost"]),
        default=None,
    )
    names = {PLANNED, f"{cheapest_single(planned)} alone", cheapest}
    return {name: fleet for name, fleet in fleets.items() if name in names}


def simulated(
    fleets: Mapping[str, Mapping[str, Any]],
    setting: Setting,
    planned: Mapping[str, Any],
    options: argparse.Namespace,
) -> list[Row]:
    """Return what becomes of the same requests on each fleet."""
    shares = factors(DAY)
    rates = [planned["requests_per_s"] * share / mean_of(DAY) for share in shares]
    answers_s = [
        (fleet["ttft_ms"] + fleet["tpot_ms"] * planned["output_tokens"]) / 1000
        for fleet in fleets.values()
    ]
    part_s = max(
        options.requests / planned["requests_per_s"] / len(shares),
        MIN_PART_ANSWERS * max(answers_s, default=0.0),
    )
    arrivals = requests(
        rates, part_s, setting.values.get("--mix", "chat"), planned, options.seed
    )
    rows: dict[str, Row] = {}
    for name, fleet in fleets.items():
        if name != PLANNED and fleet == fleets.get(PLANNED):
            rows[name] = replace(rows[PLANNED], name=name)
            continue
        engines = [engine(each, setting.values) for each in fleet["engines"]]
        results = serve(engines, arrivals, fleet["loss_budget"], planned)
        rows[name] = row(
            name, engines, fleet["cost_per_hour"], results, planned, arrivals
        )
    return list(rows.values())


def show_plan(fleets: Mapping[str, Mapping[str, Any]], rows: Sequence[Row]) -> None:
    """Print the plan's figures beside those of the simulation."""
    print("the plan's / simulated:")
    for (name, fleet), each in zip(fleets.items(), rows, strict=True):
        lost = f"lost of 100 {100 * fleet['answers_lost']:.3f} / {100 * each.lost:.3f}"
        ttft = f"TTFT mean {fleet['ttft_ms']:,.0f} / {each.ttft_mean:,.0f} ms"
        print(
            f"  {name:15} {lost}, {ttft}, {fleet['tpot_ms']:.1f} / {each.tpot_mean:.1f} ms a token"
        )


def engine(each: Mapping[str, Any], value: Mapping[str, str]) -> Engine:
    """Return an engine of a plan with its speed: a measured one, without contention, where there is a profile."""
    tier = TierName(each["tier"])
    if "--profile" in value:
        fit = next(
            fit
            for fit in load_latency(ROOT / value["--profile"]).fits
            if fit.tier is tier
        )
        speed = replace(fit.model, contention=0.0)  # each has its own GPU, or machine
        return Engine(
            tier,
            each["gpu"],
            each["gpus_per_replica"],
            each["replicas"],
            each["batch"],
            speed,
        )
    model = architecture(find_config(str(ROOT / value["--model"])))
    tier_format = parse_format(each["precision"], where="the plan")
    pace = Roofline(
        model,
        parse_gpus(each["gpu"])[0],
        tier_format.number_format,
        each["gpus_per_replica"],
        PROMPT + OUTPUT // 2,
        kv_bytes_per_value=tier_format.kv_bytes_per_value,
        dense_format=tier_format.dense_format,
    )
    return Engine(
        tier,
        each["gpu"],
        each["gpus_per_replica"],
        each["replicas"],
        each["batch"],
        as_model(pace, each["batch"] if model.has_experts else 2),
    )


def as_model(pace: Roofline, most: int = 2) -> SpeedModel:
    """Return the speed model with the roofline's times: reading up to a batch, computing beyond.

    Args:
        pace: The roofline of an engine.
        most: The line of the times up to the batch passes through those of this batch and of an eighth of it: more than 2
            with experts, of which the first sequences of a batch read more than further ones.
    """
    # that is not the prompt's
    least = pace.mixed_ms(PROMPT, 1, PROMPT) - pace.prefill_ms_per_token * PROMPT
    near = max(most // 8, 1)
    each = (pace.step_ms(most) - pace.step_ms(near)) / max(most - near, 1)
    base, far = pace.step_ms(near) - each * near, 100_000
    beyond = pace.step_ms(far) - pace.step_ms(far - 1) - each
    knee = (
        round(far - (pace.step_ms(far) - base - each * far) / beyond)
        if beyond > 0
        else 0
    )
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
    query: RoutingQuery
    tokens: int


def requests(
    rates: Sequence[float],
    part_s: float,
    mix: str,
    planned: Mapping[str, Any],
    seed: int,
) -> list[Asked]:
    """Return Poisson arrivals of a day's parts, of the mix's kinds."""
    source = random.Random(seed)
    classes, degrees = MIXES[mix]
    found, at = [], 0.0
    for part, rate in enumerate(rates):
        at = part * part_s
        while (at := at + source.expovariate(rate)) < (part + 1) * part_s:
            kind = source.choices(list(classes), list(classes.values()))[0]
            degree = source.choices(list(Complexity), degrees)[0]
            prompt = max(round(lengths(source, planned["prompt_tokens"])), 8)
            tokens = min(
                max(round(lengths(source, planned["output_tokens"])), 1),
                4 * planned["output_tokens"],
            )
            features = PromptFeatures(
                0, 0, prompt, True, False, False, None, kind, 1.0, (), degree
            )
            found.append(
                Asked(
                    at,
                    RoutingQuery(features, prompt, 4 * planned["output_tokens"]),
                    tokens,
                )
            )
    return found


def lengths(source: random.Random, mean: float) -> float:
    """Return a log-normal length, in tokens."""
    return source.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)


def serve(
    engines: Sequence[Engine],
    asked: Sequence[Asked],
    budget: float,
    planned: Mapping[str, Any],
) -> list[tuple[Asked, Result]]:
    """Return how each request ended on a fleet."""
    tiers = []
    for tier in STANDARD_TIERS:
        precision = planned["formats"].get(tier, PRECISIONS[tier])
        mine = [each for each in engines if each.tier is tier]
        most = max((each.batch for each in mine), default=1)
        spec = TierSpec(
            tier,
            max_model_len=1 << 20,
            max_num_seqs=most,
            max_in_flight=most,
            precision=precision,
        )
        states = tuple(
            ReplicaState(
                f"{tier}-{at}-{n}",
                "",
                precision,
                ReplicaStatus.READY,
                limit=each.batch,
                speed=each.speed,
            )
            for at, each in enumerate(mine)
            for n in range(each.replicas)
        )
        tiers.append(TierSnapshot(spec, states, (0,) * len(states)))
    fleet = FleetSnapshot(tuple(tiers), TemplateTokens(0, 0, 0), output_share=0.25)
    lower_formats = {
        TierName(tier): precision
        for tier, precision in planned["formats"].items()
        if tier != TierName.PRECISE
    }
    table = PolicyParameters(
        {
            tier: losses(precision, (), planned["parameters"])
            for tier, precision in lower_formats.items()
        },
        loss_budget=budget,
    )
    records = tuple(
        DecisionRecord(
            each.at_s, str(n), "", each.query, fleet, None, None, "", None, None
        )
        for n, each in enumerate(asked)
    )
    outcomes = {
        str(n): OutcomeRecord(
            str(n), TierName.PRECISE, each.query.prompt_tokens, each.tokens, None, None
        )
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
    tokens = (
        planned["requests_per_s"]
        * planned["output_tokens"]
        * 3600
        * len(served)
        / len(asked)
    )
    return Row(
        name,
        ", ".join(
            f"{e.replicas} {e.tier} on {e.gpus} x {e.gpu}"
            if e.gpu
            else f"{e.replicas} {e.tier}"
            for e in engines
        ),
        price,
        price / tokens * 1e6 if known and price is not None else None,
        sum(result.loss or 0.0 for _, result in served) / max(len(served), 1),
        1 - len(served) / len(results),
        fmean(ttfts),
        fmean(tpots),
        percentile(ttfts, 0.5),
        percentile(ttfts, 0.95),
        percentile(tpots, 0.5),
        percentile(tpots, 0.95),
        {
            tier: sum(result.tier is tier for _, result in served) / max(len(served), 1)
            for tier in STANDARD_TIERS
        },
    )


def show(rows: Sequence[Row], planned: Mapping[str, Any]) -> None:
    """Print a table."""
    price = planned.get("currency") or (
        "GPUs" if rows[0].engines and " x " in rows[0].engines else "machines"
    )
    print(
        f"{'fleet':15} {'engines':52} {price + '/h':>10} {'1M tokens':>9} {'lost of 100':>11} {'refused':>8}",
        end="",
    )
    print(f" {'TTFT p50':>8} {'p95':>6} {'ms/token p50':>12} {'p95':>6}  f/b/p %")
    for each in rows:
        money = "-" if each.per_million is None else f"{each.per_million:.3f}"
        cost = "-" if each.price is None else f"{each.price:.2f}"
        shares = "/".join(
            f"{share:.0%}".removesuffix("%") for share in each.shares.values()
        )
        print(
            f"{each.name:15} {each.engines:52} {cost:>10} {money:>9} {100 * each.lost:>11.2f} {each.refused:>8.1%}",
            end="",
        )
        times = f"{each.ttft_p50:>8.0f} {each.ttft_p95:>6.0f} {each.tpot_p50:>12.1f} {each.tpot_p95:>6.1f}"
        print(f" {times}  {shares}")


def as_json(each: Row) -> dict[str, Any]:
    """Return a row for the file."""
    return {name: getattr(each, name) for name in Row.__slots__}


def factors(day: str) -> list[float]:
    """Return the loads of a day's parts."""
    return [float(factor) for factor in day.split(",")]


def mean_of(day: str) -> float:
    """Return the mean of a day's parts."""
    return sum(factors(day)) / len(factors(day))


def cheapest_single(planned: Mapping[str, Any]) -> str | None:
    """Return the tier that alone costs least within the budget."""
    most = planned["budget"] + 1e-9
    alone = {
        tier: fleet for tier, fleet in planned["alone"].items() if fleet is not None
    }
    within = {
        t: (f["cost_per_hour"], f["answers_lost"])
        for t, f in alone.items()
        if f["answers_lost"] <= most
    }
    return min(within, key=lambda tier: within[tier], default=None)


def checked(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print the plan's figures of one engine beside those of a simulated engine with vLLM's scheduling."""
    print(
        "\nOne engine: the plan's figures / those of a simulated engine with vLLM's scheduling"
    )
    print(
        "model          GPUs    tier       tokens/s, never idle    requests/s  TTFT ms, mean       ms/token, mean"
    )
    found = []
    demand = ServingDemand(PROMPT, OUTPUT, PROMPT + OUTPUT)
    for name, gpus in (
        ("llama-3.1-8b", "1xH100"),
        ("llama-3.1-8b", "1xA10"),
        ("llama-3.3-70b", "4xH100"),
    ):
        (kind, count), model = (
            parse_gpus(gpus),
            architecture(find_config(str(ROOT / CONFIGS / f"{name}.json"))),
        )
        for each in engines_on_gpus(model, kind, count, demand)[0]:
            if (
                each.gpus_per_replica != count
                or each.requests_per_s is None
                or each.tokens_per_s is None
            ):
                continue
            rate, on = (
                USUAL * each.requests_per_s,
                hardware(each.tier, model, kind, count),
            )
            load = DailyLoad({"": rate}, {each.tier: {"": 0.0}})
            fleet = in_operation(
                PlannedFleet(
                    ((EngineType(gpus, each, 1.0), 1),), 1, 0, {("", each.tier): 1.0}
                ),
                load,
                demand,
                Policy(lambda _budget, _taken: 1.0, latest_unnoticed_ms=None),
            )
            there = throughput(on, each.batch), *latency(on, each.batch, rate, options)
            pairs = list(
                zip(
                    (each.tokens_per_s, fleet.ttft_ms or 0.0, fleet.tpot_ms or 0.0),
                    there,
                    strict=True,
                )
            )
            found.append(
                {
                    "model": name,
                    "gpus": gpus,
                    "tier": each.tier,
                    "requests_per_s": rate,
                    "pairs": pairs,
                }
            )
            said = [
                f"{a:6,.{d}f} / {b:6,.{d}f} x {a / b:.2f}"
                for (a, b), d in zip(pairs, (0, 0, 1), strict=True)
            ]
            print(
                f"{name:14} {gpus:7} {each.tier:9} {said[0]}  {rate:8.2f}  {said[1]}  {said[2]}"
            )
    return found


def throughput(on: Hardware, batch: int) -> float:
    """Return the output tokens a second of an engine that always has more to do."""
    source, scheduler, took = random.Random(1), Scheduler(on, batch), 0.0
    jobs = [
        Job(round(lengths(source, PROMPT)), max(round(lengths(source, OUTPUT)), 1))
        for _ in range(8 * batch)
    ]
    scheduler.waiting.extend(jobs)
    while scheduler.waiting and (step := scheduler.next_step()):
        took += step.duration_s
        scheduler.finish(step)
    return sum(job.produced for job in jobs) / took


def latency(
    on: Hardware, batch: int, rate: float, options: argparse.Namespace
) -> tuple[float, float]:
    """Return the mean TTFT and TPOT, in milliseconds, of an engine to which requests come at random."""
    source, scheduler, now, at = (
        random.Random(options.seed),
        Scheduler(on, batch),
        0.0,
        0.0,
    )
    coming, began, first, ended = (
        deque[tuple[float, Job]](),
        dict[Job, float](),
        dict[Job, float](),
        dict[Job, float](),
    )
    for _ in range(max(8 * batch, 2000)):
        at += source.expovariate(rate)
        coming.append(
            (
                at,
                Job(
                    max(round(lengths(source, PROMPT)), 1),
                    max(round(lengths(source, OUTPUT)), 2),
                ),
            )
        )
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
    return 1000 * ttft, 1000 * fmean(
        (ended[job] - first[job]) / (job.tokens - 1) for job in warm
    )


if __name__ == "__main__":
    main()
