"""On which of today's GPUs does a fleet of several precisions pay? Nine loads and two loss budgets for each model and GPU.

    python benchmarks/mix_pays.py [--only TEXT]

Each plan is ``qarr plan``'s own: the cheapest fleet within the loss budget, with as many GPUs as are needed, speeds from the
roofline, losses as published, formats as they are usual on the GPU (``--formats`` names others). It is compared with the
cheapest fleet of one precision within the same budget. A mix *pays* if it costs less, or costs as much and loses fewer
answers, by at least 0.02 of 100.

The loads are few (the peak takes 0.6, 1.2 and 1.8 engines of the highest precision), some (2.7, 3.9 and 5.4) and many
(8, 12 and 18). A day has four parts of equal length, the load of the last one is 2.5 times the mean.
results/mix_pays.json has every plan.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from statistics import fmean
from typing import TYPE_CHECKING, Any

from measure import ROOT

from router.cli.plan import make_report
from router.cli.plan_inputs import PlanOptions
from router.cli.plan_report import as_json
from router.settings import load_settings
from tiers.errors import PlanError
from tiers.sizing.tier_format import format_words
from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from router.settings import Settings

RESULTS = ROOT / "benchmarks/results/mix_pays.json"
CONFIGS = "tests/unit/tiers/sizing/configs"
DAY = "0.4,0.6,0.5,2.5"
BUDGETS = (0.3, 1.0)  # answers of 100 that may be lost
# The peak, in engines of the highest precision.
LOADS = {"few": (0.6, 1.2, 1.8), "some": (2.7, 3.9, 5.4), "many": (8.0, 12.0, 18.0)}
LESS_LOST = 2e-4  # of all answers
SAME_PRICE = 0.005  # relative
DENSE_GPUS = (
    "B200",
    "B300",
    "RTX-PRO-6000-Server",
    "RTX-5090",
    "H200",
    "H100",
    "L40S",
    "L4",
    "A100",
    "A10",
)
MODELS = {
    "llama-3.1-8b": DENSE_GPUS,
    "llama-3.3-70b": (
        "B200",
        "B300",
        "RTX-PRO-6000-Server",
        "H200",
        "H100",
        "L40S",
        "A100",
    ),
    "qwen3-30b-a3b": ("B200", "RTX-PRO-6000-Server", "H100", "L40S"),
    "gpt-oss-120b": ("H100", "L40S"),
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """A fleet as it is planned. Price an hour; answers lost as a share."""

    engines: str
    tiers: int
    price: float
    lost: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A planned fleet beside the cheapest one of one precision.

    Attributes:
        size: ``few``, ``some`` or ``many`` engines.
        arguments: Of ``qarr plan``.
        single: None: no precision alone keeps the budget.
        saved: The share of the single precision's price that the planned fleet saves; None: there is no single one.
    """

    size: str
    arguments: str
    planned: Fleet
    single: Fleet | None
    saved: float | None

    @property
    def is_cheaper(self) -> bool:
        """Tell whether a mix costs less than any one precision."""
        return self.planned.tiers > 1 and (
            self.saved is None or self.saved > SAME_PRICE
        )

    @property
    def is_better(self) -> bool:
        """Tell whether a mix costs as much as the cheapest one precision, and loses fewer answers."""
        if self.planned.tiers == 1 or self.is_cheaper or self.single is None:
            return False
        return self.single.lost - self.planned.lost >= LESS_LOST


def main() -> None:
    """Plan all, print the table, and write every plan."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="models and GPUs with this; nothing is written then"
    )
    options = parser.parse_args()
    command = f"python benchmarks/mix_pays.py {' '.join(sys.argv[1:])}".rstrip()
    date = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    print(f"$ {command}\n{date}")
    settings = load_settings(None)
    cases = [
        _case(settings, model_name, gpu_name)
        for model_name, gpu_names in MODELS.items()
        for gpu_name in gpu_names
        if options.only in f"{model_name} {gpu_name}"
    ]
    _show(cases)
    if not options.only:
        record = {"command": command, "date": date, "day": DAY, "cases": cases}
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def _case(settings: Settings, model_name: str, gpu_name: str) -> dict[str, Any]:
    """Return the comparisons of a model on a kind of GPU."""
    case: dict[str, Any] = {"model": model_name, "gpu": gpu_name, "obstacle": ""}
    options = PlanOptions(model=f"{CONFIGS}/{model_name}.json", gpus=gpu_name, day=DAY)
    try:
        first = as_json(make_report(settings, _at(options, "1/s", BUDGETS[-1])))
    except PlanError as error:
        return case | {"obstacle": str(error), "formats": {}, "budgets": {}}
    case |= {"formats": first["formats"], "losses": first["losses"]}
    engine_per_s = _precise_per_s(first["engines"])
    if engine_per_s is None or len(first["formats"]) == 1:
        obstacle = "one precision alone is planned"
        return case | {"obstacle": obstacle, "budgets": {}}
    peak_factor = first["peak_per_s"] / first["requests_per_s"]
    budgets = {}
    for budget in BUDGETS:
        comparisons = []
        for size, peaks in LOADS.items():
            for peak in peaks:
                load = f"{peak * engine_per_s / peak_factor:.3g}/s"
                planned = as_json(make_report(settings, _at(options, load, budget)))
                arguments = f"--model {options.model} --gpus {gpu_name} --day {DAY} --loss {budget:g} --load {load}"
                comparisons.append(_comparison(size, arguments, planned))
        budgets[f"{budget:g}"] = [
            asdict(each) | {"is_cheaper": each.is_cheaper, "is_better": each.is_better}
            for each in comparisons
        ]
    return case | {"budgets": budgets}


def _at(options: PlanOptions, load: str, budget: float) -> PlanOptions:
    return PlanOptions(
        model=options.model,
        gpus=options.gpus,
        day=options.day,
        load=load,
        lost_of_100=budget,
    )


def _precise_per_s(engines: Sequence[Mapping[str, Any]]) -> float | None:
    """Return what the engine of the highest precision serves that serves most for each GPU; None: none fits."""
    precise = [each for each in engines if each["tier"] == TierName.PRECISE]
    best = max(
        precise,
        key=lambda engine: engine["requests_per_s"] / engine["gpus_per_replica"],
        default=None,
    )
    return None if best is None else float(best["requests_per_s"])


def _comparison(size: str, arguments: str, planned: Mapping[str, Any]) -> Comparison:
    fleet = _fleet(planned["plan"])
    within = [
        _fleet(alone)
        for alone in planned["alone"].values()
        if alone is not None and alone["answers_lost"] <= planned["budget"] + 1e-9
    ]
    single = min(within, key=lambda each: (each.price, each.lost), default=None)
    saved = None if single is None else 1 - fleet.price / single.price
    return Comparison(size, arguments, planned=fleet, single=single, saved=saved)


def _fleet(planned: Mapping[str, Any]) -> Fleet:
    words = [
        f"{each['replicas']} x {format_words(each['precision'])}"
        + (f" on {each['gpus_per_replica']}" if each["gpus_per_replica"] > 1 else "")
        for each in planned["engines"]
    ]
    return Fleet(
        engines=" + ".join(words),
        tiers=len({each["tier"] for each in planned["engines"]}),
        price=planned["cost_per_hour"],
        lost=planned["answers_lost"],
    )


def _show(cases: Sequence[Mapping[str, Any]]) -> None:
    """Print a table for each budget."""
    for budget in BUDGETS:
        print(
            f"\nAt most {budget:g} answers of 100 lost. Of three loads each: how many times a mix is cheaper, and by how "
            "much in the mean (most)"
        )
        head = "".join(f"{size + ' engines':>21}" for size in LOADS)
        print(
            f"{'model':14} {'GPU':20} {'formats':20}{head}  cheapest single precision"
        )
        for case in cases:
            print(_line(case, f"{budget:g}"))
    shares = [comparison["is_cheaper"] for comparison in _all_comparisons(cases)]
    if shares:
        print(
            f"\nA mix is cheaper than any one precision at {fmean(shares):.0%} of {len(shares)} loads and budgets."
        )


def _all_comparisons(cases: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for case in cases:
        for comparisons in case["budgets"].values():
            yield from comparisons


def _line(case: Mapping[str, Any], budget: str) -> str:
    formats = "/".join(format_words(each) for each in case["formats"].values())
    name = f"{case['model']:14} {case['gpu']:20} {formats:20}"
    comparisons = case["budgets"].get(budget)
    if comparisons is None:
        return f"{name} no mix: {case['obstacle']}"
    cells = ""
    for size in LOADS:
        of_size = [each for each in comparisons if each["size"] == size]
        cells += f"{_cell(of_size):>21}"
    singles = dict.fromkeys(
        each["single"]["engines"].split(" x ")[-1].split(" on ")[0]
        for each in comparisons
        if each["single"] is not None
    )
    return f"{name}{cells}  {' or '.join(singles)}"


def _cell(comparisons: Sequence[Mapping[str, Any]]) -> str:
    """Return how often a mix is cheaper, by how much; else how often it loses fewer answers at the same price."""
    savings = [each["saved"] or 0.0 for each in comparisons if each["is_cheaper"]]
    better = sum(each["is_better"] for each in comparisons)
    if savings:
        mean = fmean([*savings, *[0.0] * (len(comparisons) - len(savings))])
        return f"{len(savings)}: {mean:.0%} ({max(savings):.0%})"
    if better:
        return f"0, loses less: {better}"
    return "0"


if __name__ == "__main__":
    main()
