"""Predicted TTFT and TPOT against what was seen, on real engines under mixed load.

    python benchmarks/predictions.py [--profiles ~/.cache/qarr/profiles] [--rounds 1] [--auto] [--plots DIR] [--json FILE]

The load changes: a few requests, none, more, a burst, none, as many as the machine carries, none, some. Prompts are the
committed ones of every class and length, a quarter of them two to six at once; answers have 12, 24, 48 or 64 tokens. Every
tier gets a third of each, so that every precision is judged. The engines run side by side on the same cores.

A prediction is that of the decision, before the request is sent. An error is abs(predicted - seen) / seen. Requests that
failed, waited for a slot or were served by another tier than decided on do not count. The first minute is not counted: the
router has just been started then. At last the arrivals in the decision log are simulated (``replay.py``), beside what was
seen of the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from fleets import (
    Engines,
    Router,
    beside,
    give_speeds,
    kept_speeds,
    measure_speed,
    real_engines,
    router,
)
from open_loop import Arrival, Workload, arrivals, read_prompts, send, write_lines
from plots import Point, Series, chart
from policy_simulation import simulate
from recording import read_recording, seen, summarise

from router.policy.profiles import percentile
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from recording import Result

    from router.policy.decision_log import DecisionRecord, OutcomeRecord

LENGTHS = (12, 24, 48, 64)
LONG = 0.25  # share of requests that are several prompts at once
MAX_CHARS = 4000
WARM_S = 60.0
PHASES = (  # requests a second, seconds
    ("start", 0.5, WARM_S),
    ("few", 0.35, 50.0),
    ("", 0.0, 8.0),
    ("more", 0.7, 70.0),
    ("burst of 12", None, 12.0),
    ("", 0.0, 25.0),
    ("most", 1.0, 60.0),
    ("", 0.0, 20.0),
    ("some", 0.5, 60.0),
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A request's predicted and seen times in milliseconds, as (predicted, seen); None: one of them is not known."""

    phase: str
    tier: TierName
    prompt_tokens: int
    output_tokens: int
    in_flight: int
    ttft: tuple[float, float] | None
    tpot: tuple[float, float] | None


def main() -> None:
    """Run the load and print errors by tier and by phase."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--profiles", type=Path, default=Path("~/.cache/qarr/profiles").expanduser()
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="with other arrivals, on the same engines"
    )
    parser.add_argument(
        "--step",
        type=float,
        default=2.0,
        help="of the profile of speed, if there is none, in seconds",
    )
    parser.add_argument("--plots", type=Path, help="folder for charts")
    parser.add_argument("--json", type=Path, help="file that every pair is written to")
    parser.add_argument(
        "--auto", action="store_true", help="the router chooses the tiers"
    )
    parser.add_argument(
        "--logs", type=Path, help="folder that the decision logs are kept in"
    )
    args = parser.parse_args()
    print(
        f"$ python benchmarks/predictions.py --rounds {args.rounds}{' --auto' * args.auto}\n",
        flush=True,
    )
    pairs: list[Pair] = []
    happened: list[Result] = []
    simulated: list[Result] = []
    with tempfile.TemporaryDirectory() as folder, real_engines() as engines:
        latency = kept_speeds(args.profiles, engines)
        for number in range(args.rounds):
            with router(Path(folder) / str(number), engines) as running:
                latency = latency or measure_speed(running, args.step)
                give_speeds(running, latency)
                pairs += _round(running, engines, number, auto=args.auto)
                recording = read_recording(running.decisions)
                happened += seen(recording)
                simulated += simulate(recording)
                if args.logs is not None:
                    args.logs.mkdir(parents=True, exist_ok=True)
                    shutil.copy(
                        running.decisions, args.logs / f"decisions-{number + 1}.jsonl"
                    )
    print(_table(pairs))
    print(
        f"Seen and simulated from the log: {beside(summarise(happened), summarise(simulated))}"
    )
    if args.json is not None:
        write_lines(args.json, [_row(pair) for pair in pairs])
    if args.plots is not None:
        _plot(args.plots, pairs)


def _round(running: Router, engines: Engines, seed: int, *, auto: bool) -> list[Pair]:
    """Send one round's requests, and return their pairs."""
    plan, phases = _plan(seed)
    tiers = random.Random(seed)
    asked = ["auto" if auto else tiers.choice(list(engines.urls)) for _ in plan]
    answers = asyncio.run(
        send(
            running.url,
            plan,
            lambda index, _: {"model": asked[index]},
            "p",
            progress=_progress,
        )
    )
    failed = [answer.error for answer in answers if answer.error]
    print(f"round {seed + 1}: {len(plan)} requests, {len(failed)} failed", flush=True)
    recording = read_recording(running.decisions)
    found: list[Pair] = []
    for decision in recording.decisions:
        outcome = recording.outcomes.get(decision.request_id)
        prefix, _, index = decision.request_id.partition("-")
        if (
            prefix == "p"
            and outcome is not None
            and outcome.error is None
            and outcome.tier is decision.tier
        ):
            phase = phases[int(index)]
            if phase != "start":
                found.append(_pair(phase, decision, outcome))
    return found


def _progress(now: float, sent: int, ended: int) -> None:
    if round(now) % 60 < 5:
        print(f"  {now:.0f} s: {sent} sent, {ended} ended", flush=True)


def _plan(seed: int) -> tuple[list[Arrival], list[str]]:
    """Return the requests, and each one's phase."""
    source, prompts = random.Random(seed), read_prompts()
    workload = Workload(prompts, lambda chance, _: chance.choice(LENGTHS))
    plan: list[Arrival] = []
    names: list[str] = []
    began = 0.0
    for number, (name, rate, seconds) in enumerate(PHASES):
        if rate is None:
            phase = [
                replace(a, at_s=0.0) for a in arrivals(workload, 12.0, 60.0, seed)[:12]
            ]
        else:
            phase = (
                arrivals(workload, rate, seconds, 100 * seed + number) if rate else []
            )
        for arrival in phase:
            text = arrival.text
            if source.random() < LONG:
                text = "\n".join(
                    [
                        text,
                        *(
                            source.choice(prompts)[1]
                            for _ in range(source.randint(1, 5))
                        ),
                    ]
                )
            plan.append(
                replace(arrival, at_s=began + arrival.at_s, text=text[:MAX_CHARS])
            )
            names.append(name)
        began += seconds
    return plan, names


def _pair(phase: str, decision: DecisionRecord, outcome: OutcomeRecord) -> Pair:
    def both(predicted: float | None, seen: float | None) -> tuple[float, float] | None:
        return None if predicted is None or not seen else (predicted, seen)

    return Pair(
        phase,
        outcome.tier,
        outcome.prompt_tokens,
        outcome.output_tokens,
        sum(
            replica.in_flight
            for tier in decision.fleet.tiers
            for replica in tier.replicas
        ),
        both(decision.predicted_ttft_ms, outcome.ttft_ms),
        both(decision.predicted_tpot_ms, outcome.tpot_ms),
    )


def _table(pairs: Sequence[Pair]) -> str:
    groups: list[tuple[str, Callable[[Pair], bool]]] = [("all", lambda _: True)]
    groups += [
        (tier, lambda pair, tier=tier: pair.tier is tier) for tier in STANDARD_TIERS
    ]  # type: ignore[misc]
    groups += [
        (name, lambda pair, name=name: pair.phase == name)  # type: ignore[misc]
        for name, rate, _ in PHASES
        if rate != 0.0 and name != "start"
    ]
    lines = [
        (
            f"{'':13}{'requests':>9}{'TTFT: seen':>13}{'error p50':>11}{'p95':>7}{'bias':>7}"
            f"{'TPOT: seen':>14}{'error p50':>11}{'p95':>7}{'bias':>7}"
        )
    ]
    for name, belongs in groups:
        own = [pair for pair in pairs if belongs(pair)]
        if not own:
            continue
        cells = ""
        for width, kind in ((13, "ttft"), (14, "tpot")):
            known: list[tuple[float, float]] = [
                p for pair in own if (p := getattr(pair, kind)) is not None
            ]
            errors = [abs(predicted - seen) / seen for predicted, seen in known]
            ratio = median(predicted / seen for predicted, seen in known)
            cells += (
                f"{median(seen for _, seen in known):{width - 3}.0f} ms{percentile(errors, 0.5):11.0%}"
                f"{percentile(errors, 0.95):7.0%}{ratio:7.2f}"
            )
        lines.append(f"{name:13}{len(own):9}{cells}")
    lines.append(
        f"\n{os.cpu_count()} cores. In flight when decided: mean {fmean(pair.in_flight for pair in pairs):.1f}, most "
        f"{max(pair.in_flight for pair in pairs)}. bias: median of predicted / seen."
    )
    return "\n".join(lines)


def _row(pair: Pair) -> dict[str, Any]:
    return {
        "phase": pair.phase, "tier": pair.tier, "prompt_tokens": pair.prompt_tokens,
        "output_tokens": pair.output_tokens, "in_flight": pair.in_flight, "ttft_ms": pair.ttft, "tpot_ms": pair.tpot,
    }  # fmt: skip


def _plot(folder: Path, pairs: Sequence[Pair]) -> None:
    """Draw predicted against seen, up to the 98th percentile, which leaves out a few that would shrink the rest."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, name in (("ttft", "TTFT"), ("tpot", "TPOT")):
        known = [
            (pair.tier, p) for pair in pairs if (p := getattr(pair, kind)) is not None
        ]
        most = percentile([max(p) for _, p in known], 0.98)
        series = [
            Series(
                tier,
                tuple(
                    Point(p[1], p[0]) for t, p in known if t is tier and max(p) <= most
                ),
            )
            for tier in STANDARD_TIERS
        ]
        line = Series(
            "predicted = seen", (Point(0, 0), Point(most, most)), line=True, marks=False
        )
        chart(
            folder / f"predicted-{kind}.svg",
            f"Predicted and seen {name} on real engines",
            f"seen {name} in ms",
            f"predicted {name} in ms",
            [*(one for one in series if one.points), line],
        )


if __name__ == "__main__":
    main()
