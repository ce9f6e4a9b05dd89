"""Write the figures of README and the documents from the result files in benchmarks/results.

usage: .venv/bin/python scripts/figures.py

A figure stands between two markers. Nothing between them is written by hand:

    <!-- figures: NAME -->
    ...
    <!-- /figures -->

At the beginning of a line, the first marker opens a block of tables and paragraphs. After text, for example in a list item,
it opens sentences of that text. NAME is one of ``FIGURES``, and any document may use any of them. Every table states its
command and its load, which come from its result file. If a line of a result file cannot be read, the error names the line:
correct the reader here when a benchmark prints something new.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from interpreters import ratio_to_first
from measure import ROOT
from proxies import BASE, OURS, OURS_GENERATE, PROXIES
from side_by_side import BUSY, DIRECT, GATEWAY_LOADS, LOADS
from turn_cost import RELAY

from tiers.sizing.tier_format import format_words
from tiers.spec import PRECISIONS, TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

RESULTS = ROOT / "benchmarks/results"
DOCUMENTS = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in ("classifier", "limits", "planning", "routing", "verify")
    ),
)
WIDTH = 115
BLOCK = re.compile(
    r"^(?P<lead>.*?)<!-- figures: (?P<name>[a-z-]+) -->\n(?P<old>(?:.*\n)*?.*?)<!-- /figures -->$",
    re.MULTILINE,
)
END = "<!-- /figures -->"
UNBROKEN = "\0"  # stands for a space at which no line may end
SHORT_CODE = re.compile(r"`[^`]{1,85}`")
OURS_WORDS = {OURS: "chat completions", OURS_GENERATE: "`/generate`"}


class FigureError(Exception):
    """A figure cannot be written; says which line or name does not fit, and what to do."""


@dataclass(frozen=True, slots=True)
class TextResult:
    """A result file of lines.

    Attributes:
        path: The file.
        lines: Without their ends.
    """

    path: Path
    lines: tuple[str, ...]

    @classmethod
    def read(cls, name: str) -> TextResult:
        """Read a file of benchmarks/results."""
        path = RESULTS / name
        try:
            return cls(path, tuple(path.read_text("utf-8").splitlines()))
        except OSError as error:
            raise FigureError(
                f"{path}: {error.strerror}: write the output of its benchmark there"
            ) from error

    @property
    def command(self) -> str:
        """Return the command that the file begins with."""
        return self.match(
            0, r"\$ (?P<command>.+)", "a command, '$ python benchmarks/...'"
        )["command"]

    def match(self, number: int, pattern: str, expected: str) -> re.Match[str]:
        """Match a whole line, by its index.

        Raises:
            FigureError: The line is not as expected.
        """
        line = self.lines[number] if number < len(self.lines) else ""
        found = re.fullmatch(pattern, line)
        if found is None:
            raise FigureError(
                f"{self.path}, line {number + 1}: {line!r} is not {expected}: "
                "has the benchmark's output changed? Correct scripts/figures.py"
            )
        return found

    def rows(self, first: int) -> range:
        """Return the indexes of the lines from one on, up to an empty line."""
        end = first
        while end < len(self.lines) and self.lines[end].strip():
            end += 1
        return range(first, end)


def read_json(name: str) -> Any:
    """Read a JSON file of benchmarks/results."""
    return json.loads((RESULTS / name).read_text("utf-8"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def fill(text: str, indent: str = "") -> str:
    """Return text in lines that are not too long, none of which ends within a short piece of code."""
    whole = SHORT_CODE.sub(lambda code: code[0].replace(" ", UNBROKEN), text)
    filled = textwrap.fill(
        whole,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return filled.replace(UNBROKEN, " ")


def paragraph(text: str) -> str:
    """Return a paragraph."""
    return fill(text) + "\n"


def listed(words: Sequence[str]) -> str:
    """Return words as a list in a sentence."""
    return (
        ", ".join(words[:-1]) + " and " + words[-1]
        if len(words) > 1
        else "".join(words)
    )


# Side by side: the router's cost.


@dataclass(frozen=True, slots=True)
class SideBySide:
    """The run of benchmarks/side_by_side.py that all documents cite.

    Attributes:
        record: As it wrote it.
        link: To the printed table, from a document.
    """

    record: dict[str, Any]
    link: str

    @classmethod
    def read(cls, to_results: str) -> SideBySide:
        """Read the run, for a document with this way to the results."""
        return cls(read_json("side_by_side.json"), f"{to_results}/side_by_side.txt")

    @property
    def source(self) -> str:
        """Return the command, the commit, the machine, and how it was measured."""
        command, commit, _, passes, *rest = self.record["head"]
        estimated = (
            " QARR estimated prompt tokens instead of counting them."
            if "tokens estimated" in " ".join(rest)
            else ""
        )
        return f"`{command.removeprefix('$ ')}` ([all results]({self.link})): {commit}. {passes}{estimated}"

    def rows(self, load: str) -> dict[str, dict[str, Any]]:
        """Return the rows of a load, by proxy."""
        rows: dict[str, dict[str, Any]] = self.record["rows"][load]
        return rows

    def own_times(self, load: str, proxy: str) -> tuple[float, float]:
        """Return the medians of p50 and p99 of a proxy's answers, in milliseconds."""
        samples = self.record["samples"][load][proxy]
        return median(each["first_p50"] for each in samples), median(
            each["first_p99"] for each in samples
        )

    def most_rss_mb(self, proxy: str) -> float:
        """Return the largest memory after any load."""
        return max(
            each["rss_mb"]
            for rows in self.record["samples"].values()
            for each in rows[proxy]
        )

    def errors(self, proxy: str) -> int:
        """Return the wrong answers under all loads."""
        return sum(rows[proxy]["errors"] for rows in self.record["rows"].values())

    def first_answers(self, proxy: str) -> list[dict[str, Any]]:
        """Return a proxy's rows of bursts of new connections, the smaller ones first; a run may have none."""
        bursts = self.record.get("bursts", {})
        return [rows[proxy] for rows in bursts.values()]

    def full_at(self, proxy: str) -> list[str]:
        """Return the answers a second at which a core is full, by CPU time, under the loads of README."""
        return [
            f"{1e6 / self.rows(load)[proxy]['cpu_us']:,.0f}"
            for load in ("non-streaming", "saturated", "paced")
        ]

    def ratios(self, proxy: str, base: str) -> str:
        """Return the least and the largest ratio of two proxies' CPU times over the loads of README.

        The ratio under a load is the median of the passes' ratios, as in the printed table.
        """
        ratios = []
        for load in ("non-streaming", "saturated", "paced"):
            samples = self.record["samples"][load]
            pairs = zip(samples[proxy], samples[base], strict=True)
            ratios.append(
                median(own["cpu_us"] / other["cpu_us"] for own, other in pairs)
            )
        return f"{min(ratios):.1f} to {max(ratios):.1f}"


def router_cost(to_results: str) -> str:
    """Return what the router costs, in a sentence of README."""
    run = SideBySide.read(to_results)
    chat, generate = run.full_at(OURS), run.full_at(OURS_GENERATE)
    return (
        f"Per second, one core serves {chat[0]} whole answers, or {chat[1]} streams of 64 tokens that arrive at once, or "
        f"{chat[2]} streams with a token every 5 ms ([side by side]({run.link}); `/generate`: {listed(generate)}). Per "
        f"answer, QARR uses {run.ratios(OURS, BASE)} times the CPU time of vllm-router (`/generate`: "
        f"{run.ratios(OURS_GENERATE, BASE)}) and {run.ratios(OURS, 'smg cache_aware')} times that of smg (`/generate`: "
        f"{run.ratios(OURS_GENERATE, 'smg cache_aware')}); neither of them classifies prompts or predicts latency. LiteLLM "
        f"uses {run.ratios('LiteLLM', OURS)} times the CPU time of QARR, and Portkey's gateway "
        f"{run.ratios('Portkey', OURS)} times."
    )


def router_load(to_results: str) -> str:
    """Return what one core carries, by load and endpoint."""
    run = SideBySide.read(to_results)
    rows = []
    for load in run.record["rows"]:
        for proxy, endpoint in OURS_WORDS.items():
            row = run.rows(load)[proxy]
            rows.append(
                [
                    LOADS[load].title,
                    endpoint,
                    f"{row['cpu_us'] / 1000:.2f} ms",
                    f"{1e6 / row['cpu_us']:,.0f}",
                    f"{row['per_second']:,.0f}",
                    f"{row['added_p50']:.1f} / {row['added_p99']:.1f} ms",
                    f"{row['rss_mb']:.0f} MB",
                    str(row["errors"]),
                ]
            )
    head = [
        "load",
        "endpoint",
        "CPU time per answer",
        "a core is full at, answers/s",
        "measured, answers/s",
    ]
    head += ["added latency, p50 / p99", "memory", "errors"]
    words = (
        "Added latency is measured to the whole answer, or to the first event of a stream. With many connections, most "
        "of it is the wait for the core. The rate at which a core is full is one second divided by the CPU time per answer. "
    )
    return table(head, rows) + "\n" + paragraph(words + run.source)


def turn_costs(to_results: str) -> str:
    """Return what a turn of a long conversation costs, beside vllm-router."""
    run = read_json("turn_cost.json")
    rows = []
    for name, length in run["lengths"].items():
        fresh = run["rows"][name]["fresh"]
        growing = run["rows"][name]["growing"]
        rows.append(
            [
                length["title"],
                f"{growing[OURS]['ratio']:.1f}",
                f"{fresh[OURS]['ratio']:.1f}",
                f"{growing[OURS]['cpu_ms']:.1f} ms",
                f"{fresh[OURS]['cpu_ms']:.1f} ms",
                f"{growing[BASE]['cpu_ms']:.1f} ms",
                f"{growing[RELAY]['cpu_ms']:.1f} ms",
            ]
        )
    head = [
        "conversation",
        "later turn, times vllm-router",
        "first turn, times vllm-router",
        "QARR, later turn",
        "QARR, first turn",
        "vllm-router, later turn",
        "a relay of bytes",
    ]
    command, commit, _, passes, *_ = run["head"]
    words = (
        "CPU time of one turn of a coding agent's conversation, with tools and their results, at four characters a token; "
        "each later turn has 500 tokens more. vllm-router routes by prefix (cache_aware). "
        f"`{command.removeprefix('$ ')}` ([all results]({to_results}/turn_cost.txt)): {commit}. {passes} QARR "
        "counted prompt tokens with the model's tokenizer."
    )
    return table(head, rows) + "\n" + paragraph(words)


def interpreters(to_results: str) -> str:
    """Return what the router costs on one Python and another."""
    run = read_json("interpreters.json")
    loads = run["cpu_us"]
    names = list(next(iter(loads.values())))
    rows = [
        [name, *(f"{ratio_to_first(costs, name):.2f}" for costs in loads.values())]
        for name in names
    ]
    command, source, _ = run["head"]
    words = (
        "CPU time an answer, as a ratio to the first line in the same pass. "
        f"`{command.removeprefix('$ ')}` ([results]({to_results}/interpreters.txt)): {source}."
    )
    head = ["Python", *(LOADS[load].title for load in loads)]
    return table(head, rows) + "\n" + paragraph(words)


def gateways(to_results: str) -> str:
    """Return what every proxy adds, and what it reads of a prompt for that."""
    run = SideBySide.read(to_results)
    loads = [name for name in GATEWAY_LOADS if name in run.record["rows"]]
    bursts = run.record.get("bursts", {})
    rows = []
    for proxy, version in run.record["versions"].items():
        if proxy not in PROXIES:
            continue  # another commit of this project
        of_load = [run.rows(name)[proxy] for name in loads]
        if proxy == DIRECT:
            times = [
                "{:.2f} / {:.2f}".format(*run.own_times(name, proxy)) for name in loads
            ]
        else:
            times = [
                f"{row['added_p50']:.2f} / {row['added_p99']:.2f}" for row in of_load
            ]
        first = [
            f"{row['p50']:.0f} / {row['p99']:.0f} / {row['most']:.0f}"
            for row in run.first_answers(proxy)
        ]
        cpu = run.rows("non-streaming")[proxy]["cpu_us"]
        reads = (
            ""
            if proxy == DIRECT
            else run.record.get("reads", {}).get(proxy) or PROXIES[proxy].reads
        )
        label = (
            "none (direct to the engine)" if proxy == DIRECT else f"{proxy}, {version}"
        )
        if proxy in OURS_WORDS:
            label = f"**QARR, {OURS_WORDS[proxy]}**"
        rows.append(
            [
                label,
                reads,
                f"{cpu:,.0f}",
                *times,
                *first,
                f"{run.most_rss_mb(proxy):.0f}",
                str(run.errors(proxy)),
            ]
        )
    connections = [LOADS[name].connections for name in loads]
    at_16 = LOADS["non-streaming"].connections
    head = [
        "proxy",
        "what it reads of a prompt",
        f"CPU µs per answer at concurrency {at_16}",
    ]
    head += [f"added ms at concurrency {count}, p50 / p99" for count in connections]
    head += [
        f"first answer to {size} new connections, ms, p50 / p99 / max"
        for size in bursts
    ]
    lacks = [
        str(LOADS[name].connections) for name in GATEWAY_LOADS if name not in loads
    ]
    missing = [name for name in PROXIES if name not in run.record["versions"]]
    words = f"Whole answers ({LOADS['non-streaming'].title.rpartition(',')[0]}) over "
    words += f"{listed([str(count) for count in connections])} connections; the engine answers at once. "
    words += "Added ms is the latency through the proxy minus the latency without it, p50 and p99 of the same pass. "
    words += "The first row shows the latency without a proxy. "
    if bursts:
        words += f"New connections arrive at once while {BUSY.connections} others keep the proxy busy. "
    if lacks or missing:
        unseen = ([f"{listed(lacks)} connections"] if lacks else []) + missing
        words += f"This run did not include {listed(unseen)}. "
    return (
        table([*head, "memory, MB", "errors"], rows)
        + "\n"
        + paragraph(words + run.source)
    )


# Plans: where several precisions pay.


def engine_words(engines: str, formats: dict[str, str]) -> str:
    """Return a fleet's engines, such as ``1 fast on 1 x A10, 1 precise on 2 x A10``, with their precisions.

    Args:
        engines: As plans.json has them.
        formats: By tier.
    """
    words = []
    for engine in engines.split(", "):
        found = re.fullmatch(
            r"(\d+) (fast|balanced|precise)(?: on (\d+) x (\S+))?", engine
        )
        if found is None:
            raise FigureError(
                f"plans.json: {engine!r} is not 'COUNT TIER on COUNT x GPU': correct scripts/figures.py"
            )
        count, tier, gpus, gpu = found.groups()
        times = "" if count == "1" and gpu else f"{count} x "
        on = f" on {gpus} {gpu}" + (" each" if count != "1" else "") if gpu else ""
        words.append(f"{times}{format_words(formats[tier])}{on}")
    return " + ".join(words)


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """One load of a setting: the planned fleet's row, and that of the cheapest fleet of one precision.

    Attributes:
        load: With its unit.
        formats: By tier.
        planned: None: no fleet carries the load.
        single: None: none of one precision carries it within the budget.
        over_budget: The cheapest fleet of one precision, whatever it loses; None: none carries it.
    """

    load: str
    formats: dict[str, str]
    planned: dict[str, Any] | None
    single: dict[str, Any] | None
    over_budget: dict[str, Any] | None

    @property
    def single_words(self) -> str:
        """Return the fleet of one precision, or why there is none and what the cheapest would lose."""
        if self.single is not None:
            return engine_words(self.single["engines"], self.formats)
        if self.over_budget is None:
            return "no single precision can carry it"
        row = self.over_budget
        return (
            f"no single precision stays within the allowed loss ({engine_words(row['engines'], self.formats)} costs "
            f"{row['price']:.2f} and loses {100 * row['lost']:.2g})"
        )

    @property
    def planned_words(self) -> str:
        """Return the planned fleet."""
        assert self.planned is not None
        return engine_words(self.planned["engines"], self.formats)

    @property
    def is_one_precision(self) -> bool:
        """Tell whether the planned fleet has one precision."""
        return self.planned is not None and len(tiers_of(self.planned)) == 1


def tiers_of(row: dict[str, Any]) -> set[str]:
    """Return the tiers of a fleet's engines."""
    return set(re.findall(r"\d (fast|balanced|precise)", row["engines"]))


def planned_loads(setting: dict[str, Any]) -> list[PlannedLoad]:
    """Return the loads of a setting."""
    found = []
    for each in setting["loads"]:
        rows = {row["name"]: row for row in each["rows"]}
        alone = [row for name, row in rows.items() if name.endswith(" alone")]
        cheapest = min(alone, key=lambda row: (row["price"], row["lost"]), default=None)
        single = rows.get(f"{each['single']} alone")
        found.append(
            PlannedLoad(
                f"{each['load']:g}/{setting['unit']}",
                setting["formats"],
                rows.get("planned"),
                single,
                cheapest,
            )
        )
    return found


PLAN_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "price per hour": lambda row: f"{row['price']:.2f}",
    "per 1M tokens": lambda row: (
        "-" if row["per_million"] is None else f"{row['per_million']:.2f}"
    ),
    "lost per 100": lambda row: f"{100 * row['lost']:.2g}",
    "refused": lambda row: f"{100 * row['refused']:.1f} %",
    "TTFT p50 / p95, ms": lambda row: (
        f"{row['ttft_p50']:,.0f} / {row['ttft_p95']:,.0f}"
    ),
    "TPOT p50 / p95, ms": lambda row: f"{row['tpot_p50']:.0f} / {row['tpot_p95']:.0f}",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of README's table.

    Attributes:
        key: Of a fleet's row.
        pattern: How a value is shown.
        factor: The value is multiplied by this.
    """

    key: str
    pattern: str
    factor: float = 1.0

    def shown(self, row: dict[str, Any] | None) -> str:
        """Return a fleet's value."""
        return "-" if row is None else self.pattern.format(self.factor * row[self.key])

    def spread(self, rows: Sequence[dict[str, Any]]) -> str:
        """Return the least and the largest value of several fleets."""
        ordered = sorted(rows, key=lambda row: float(row[self.key]))
        least, most = self.shown(ordered[0]), self.shown(ordered[-1])
        return least if least == most else f"{least} to {most}"


README_COLUMNS = {
    "price per hour": Column("price", "{:.2f}"),
    "answers lost per 100": Column("lost", "{:.2g}", 100),
    "time to first token (TTFT), p95, ms": Column("ttft_p95", "{:,.0f}"),
    "time per output token (TPOT), p95, ms": Column("tpot_p95", "{:.0f}"),
}


def speed_words(setting: dict[str, Any]) -> str:
    """Return where a setting's speeds are from."""
    speed = str(setting["loads"][0]["speed"])
    return "computed" if speed == "roofline" else "measured"


def plans(_: str) -> str:
    """Return a table for each setting: at each load the best of one precision, and the planned fleet."""
    record = read_json("plans.json")
    parts = []
    for setting in record["settings"]:
        rows = [plan_cells(each) for each in planned_loads(setting)]
        first = setting["loads"][0]
        unit = first["currency"] or "machines"
        command = f"`qarr plan {setting['arguments']} --load LOAD/{setting['unit']}`"
        sources = (
            f"Speeds: {first['speed']}. Losses: {first['losses']}. Prices: {unit}."
        )
        caption = paragraph(f"**{setting['name']}.** {command}. {sources}")
        parts += [caption, table(["load", "fleet", *PLAN_COLUMNS], rows)]
    return "\n".join(parts)


def plan_cells(each: PlannedLoad) -> list[str]:
    """Return the cells of one load: ``one precision → planned`` where they differ."""
    if each.planned is None:
        return [each.load, "no fleet can carry it", *([""] * len(PLAN_COLUMNS))]
    if each.is_one_precision:
        return [
            each.load,
            each.planned_words,
            *(cell(each.planned) for cell in PLAN_COLUMNS.values()),
        ]
    if each.single is None:
        fleet = f"{each.single_words} → {each.planned_words}"
        return [
            f"**{each.load}**",
            fleet,
            *(f"- → {cell(each.planned)}" for cell in PLAN_COLUMNS.values()),
        ]
    pairs = [
        f"{cell(each.single)} → {cell(each.planned)}" for cell in PLAN_COLUMNS.values()
    ]
    fleet = f"{each.single_words} → {each.planned_words}"
    return [f"**{each.load}**", fleet, *pairs]


def pays(to_results: str) -> str:
    """Return README's table: a row for each load at which several precisions pay, one for all others of a setting."""
    record = read_json("plans.json")
    rows = []
    shown = [setting for setting in record["settings"] if setting["in_readme"]]
    for setting in shown:
        currency = setting["loads"][0]["currency"] or "machines"
        name = f"{setting['name']} ({speed_words(setting)} speeds; {currency})"
        loads = planned_loads(setting)
        for kind, group in groupby(sorted(loads, key=order_of), key=order_of):
            for cells in pays_rows(kind, list(group)):
                rows.append([name, *cells])
                name = ""
    root = to_results.removesuffix("benchmarks/results")
    words = (
        "The arrow leads from the cheapest fleet of one precision to the planned fleet; where there is no arrow, one "
        f"precision is best. Each simulated day has {record['requests']:,} requests or more, and its last quarter has 2.5 "
        f"times the mean load: `{record['command']}`, {record['date']} ([every load]({to_results}/plans.txt)). Computed "
        f"speeds come from the plan's roofline model; measured ones from [an H200]({to_results}/gpu_speed.jsonl). Losses "
        f"are published ones ([sources]({root}router/policy/published_results.csv)). At most 0.3 answers per 100 may be "
        "lost (`--loss 0.3`), on average over the day, or as many as the name says. A simulated day may end slightly "
        "above that. "
        f"{mix_pays(to_results)}"
    )
    return (
        table(["", "load, mean", "fleet", *README_COLUMNS], rows)
        + "\n"
        + paragraph(words)
    )


def mix_pays(to_results: str) -> str:
    """Return how often a mix is cheaper than any one precision, on GPUs that compute different formats."""
    loads_by_format: dict[str, list[dict[str, Any]]] = {
        "nvfp4": [],
        "fp8": [],
        "int8-w8a8": [],
    }
    cases = [case for case in read_json("mix_pays.json")["cases"] if case["budgets"]]
    for case in cases:
        formats = case["formats"].values()
        usual = next(name for name in loads_by_format if name in formats)
        for loads in case["budgets"].values():
            loads_by_format[usual] += [
                load for load in loads if load["saved"] is not None
            ]
    where = {
        "nvfp4": "with FP4 units",
        "fp8": "with FP8 units and none for FP4",
        "int8-w8a8": "with INT8 units alone",
    }
    parts = []
    for name, loads in loads_by_format.items():
        saved = [load["saved"] if load["is_cheaper"] else 0.0 for load in loads]
        share = fmean(each > 0 for each in saved)
        parts.append(
            f"{share:.0%} on GPUs {where[name]} (it saves {fmean(saved):.0%} in the mean over all loads)"
        )
    models, gpus = (len({case[what] for case in cases}) for what in ("model", "gpu"))
    return (
        f"For {models} models on {gpus} kinds of GPU, as many as needed, with 9 loads and 2 budgets each, the share of "
        f"loads at which a mix is cheaper than any one precision is {listed(parts)} "
        f"([all of them]({to_results}/mix_pays.txt))."
    )


def order_of(each: PlannedLoad) -> int:
    """Return where a load stands in README's table: those at which several precisions pay first."""
    if each.planned is None:
        return 2
    return 1 if each.is_one_precision else 0


def pays_rows(kind: int, loads: Sequence[PlannedLoad]) -> Iterator[list[str]]:
    """Return the rows of loads of one kind, as ``order_of`` has them."""
    names = ", ".join(each.load for each in loads)
    if kind == 2:  # noqa: PLR2004
        yield [names, "no fleet can carry it", *([""] * len(README_COLUMNS))]
    elif kind == 1:
        fleets = [each.planned for each in loads if each.planned is not None]
        found = set[str]().union(*(tiers_of(row) for row in fleets))
        ordered = [
            format_words(precision)
            for tier, precision in loads[0].formats.items()
            if tier in found
        ]
        cells = [column.spread(fleets) for column in README_COLUMNS.values()]
        yield [names, f"one precision is best: {' or '.join(ordered)}", *cells]
    else:
        for each in loads:
            assert each.planned is not None
            pairs = [
                f"{column.shown(each.single)} → {column.shown(each.planned)}"
                for column in README_COLUMNS.values()
            ]
            yield [
                f"**{each.load}**",
                f"{each.single_words} → {each.planned_words}",
                *pairs,
            ]


def plan_accuracy(to_results: str) -> str:
    """Return how far a simulated engine with vLLM's scheduling is from the plan."""
    pairs = [engine["pairs"] for engine in read_json("plans.json")["engines"]]
    reached = [100 * seen / planned for (planned, seen), *_ in pairs]
    off = max(abs(seen / planned - 1) for _, *times in pairs for planned, seen in times)
    return (
        f"In a simulation of vLLM's scheduling, throughput is {min(reached):.0f} to {max(reached):.0f} % of what the plan "
        f"computes, and latencies are within {100 * off:.0f} % of it ([plans]({to_results}/plans.txt))."
    )


# Predictions.

PREDICTION = (
    r"(?P<who>[a-z][\w ]*?) +(?P<requests>\d+) +(?P<ttft>\d+) ms +(?P<ttft_p50>\d+)% +(?P<ttft_p95>\d+)% +[\d.]+"
    r" +(?P<tpot>\d+) ms +(?P<tpot_p50>\d+)% +(?P<tpot_p95>\d+)% +[\d.]+"
)


def prediction_runs() -> list[tuple[str, list[str], dict[str, re.Match[str]]]]:
    """Return each run: its command, its lines from the head of the table on, and the rows by their first word."""
    result = TextResult.read("predictions.txt")
    runs = []
    for start in (
        number for number, line in enumerate(result.lines) if line.startswith("$ ")
    ):
        command = result.match(start, r"\$ (.+)", "a command")[1]
        after = range(start, len(result.lines))
        head = (
            next(
                (
                    number
                    for number in after
                    if result.lines[number].startswith("round 1: ")
                ),
                len(result.lines),
            )
            + 1
        )
        result.match(
            head,
            r" +requests +TTFT: seen +error p50 +p95 +bias +TPOT: seen +error p50 +p95 +bias",
            "the head",
        )
        rows = result.rows(head + 1)
        found = {}
        for number in rows:
            row = result.match(number, PREDICTION, "a row of predictions")
            found[row["who"]] = row
        runs.append((command, list(result.lines[head : rows.stop]), found))
    return runs


def predictions(_: str) -> str:
    """Return the errors of predictions as they were printed, all rows of all runs."""
    blocks = [
        f"```text\n$ {command}\n" + "\n".join(lines) + "\n```\n"
        for command, lines, _ in prediction_runs()
    ]
    words = (
        "The load consists of phases: a few requests, none, more, a burst of 12, none, as many as the machine can carry, "
        "none, some. Prompts are of every class and length. Without `--auto`, each tier is requested for a third of the "
        "prompts; with `--auto`, the router chooses."
    )
    return "\n".join([*blocks, paragraph(words)])


def prediction_errors(_: str) -> str:
    """Return the errors of predictions in a sentence, of each run."""
    parts = []
    for command, _lines, rows in prediction_runs():
        row = rows["all"]
        chosen = (
            "when the router chose the tier"
            if "--auto" in command
            else "when each tier was requested for a third of the prompts"
        )
        parts.append(
            f"the median error was {row['ttft_p50']} % (TTFT) and {row['tpot_p50']} % (TPOT), and the 95th percentile "
            f"{row['ttft_p95']} % and {row['tpot_p95']} %, {chosen}"
        )
    return (
        f"Under the [hardest load tried](routing.md#predictions), {'; '.join(parts)}."
    )


# The classifier.


def classifier_quality(to_results: str) -> str:
    """Return how good the classifier is on labelled prompts, with all rows that were printed."""
    result = TextResult.read("classifier_quality.txt")
    command = result.command
    weight = result.match(
        1,
        r"the second look: (\d+) MB of memory, ([\d.]+) s to load",
        "what the second look takes in memory, and to load",
    )
    number = 3
    columns: list[tuple[str, dict[str, tuple[str, str]]]] = []
    again = []
    while number < len(result.lines):
        head = result.match(
            number,
            r"(\S+), (\d+) prompts +first look +with second look",
            "'FILE, N prompts  first look  with second look'",
        )
        rows: dict[str, tuple[str, str]] = {}
        *inner, last = result.rows(number + 1)
        for line in inner:
            row = result.match(
                line,
                r"  (\S.*?) +(nan|\d\.\d{3}) +(nan|\d\.\d{3})",
                "a figure and its two values",
            )
            rows[row[1]] = row[2], row[3]
        looked = result.match(
            last,
            r"  looked at again: ([\d.]+)%, ([\d.]+) ms each \(median\), ([\d.]+) ms a prompt",
            "'looked at again: ...'",
        )
        again.append(
            f"{looked[1]} % of `{head[1]}` ({looked[2]} ms each, median; {looked[3]} ms averaged over all prompts)"
        )
        columns.append((f"`{head[1]}`, {head[2]} prompts", rows))
        number = last + 2
    cells = [
        [
            name,
            *(cell.replace("nan", "-") for _, rows in columns for cell in rows[name]),
        ]
        for name in columns[0][1]
    ]
    head_cells = [
        "",
        *(cell for name, _ in columns for cell in (name, "with second look")),
    ]
    words = (
        f"`{command}` ([as printed]({to_results}/classifier_quality.txt)). "
        f"The second look reads {listed(again)}. "
        f"It takes {weight[1]} MB of memory and {weight[2]} s to load."
    )
    return table(head_cells, cells) + "\n" + paragraph(words)


def classifier_cost(to_results: str) -> str:
    """Return what classifying costs, with all columns that were printed."""
    result = TextResult.read("classifier_cost.txt")
    unit = result.match(
        1,
        r"counting with (\w+); microseconds a prompt: median / 95th percentile",
        "what is counted with, and the unit",
    )
    result.match(
        2,
        r" *chars +classify, with count +count alone +tokenizers alone +ratio",
        "the table's head",
    )
    rows = []
    numbers = result.rows(3)
    for number in numbers[:-1]:
        row = result.match(
            number,
            r" *(\d+) +(\d+ / \d+) +(\d+ / \d+) +(\d+ / \d+) +([\d.]+)",
            "a row of the table",
        )
        rows.append([f"{int(row[1]):,}", row[2], row[3], row[4], row[5]])
    ratio = result.match(numbers[-1], r"ratio: (.+)", "what the ratio is")[1]
    head = [
        "characters",
        "classifier and count",
        "the count alone",
        "tokenizers alone",
        "ratio",
    ]
    words = (
        f"Microseconds per prompt, median / 95th percentile, on one thread; tokens are counted with {unit[1]}: "
        f"`{result.command}` ([as printed]({to_results}/classifier_cost.txt)). Ratio: {ratio}."
    )
    return table(head, rows) + "\n" + paragraph(words)


# Limits.


def big_fleet(to_results: str) -> str:
    """Return what a hundred replicas cost beside three."""
    result = TextResult.read("big_fleet.txt")
    columns = result.match(
        2, r"replicas +(\d+) +(\d+) +ratio", "the numbers of replicas"
    )
    rows = {}
    for number in result.rows(3):
        row = result.match(
            number,
            r"([a-z/].*?)  +([\d.]+) +([\d.]+) +(x[\d.]+|-)",
            "a row of the table",
        )
        rows[row[1]] = row
    served, memory, idle = (
        rows[name]
        for name in ("/generate a second", "resident set, MB", "idle: share of a core")
    )
    return (
        f"With {columns[2]} replicas instead of {columns[1]}, one router serves {float(served[3]):,.0f} instead of "
        f"{float(served[2]):,.0f} requests per second, needs {float(memory[3]):.0f} instead of {float(memory[2]):.0f} MB, "
        f"and uses {float(idle[3]):.2f} instead of {float(idle[2]):.2f} of a core while idle "
        f"(`{result.command}`, [big fleet]({to_results}/big_fleet.txt)). These figures are from another run: do not compare "
        "them with those above."
    )


def engine_checks(to_results: str) -> str:
    """Return how many broken engines the check refused, and which it let pass."""
    result = TextResult.read("engine_check.txt")
    head = next(
        number for number, line in enumerate(result.lines) if line.startswith("tier ")
    )
    counts = {
        ("sound", "passes"): 0,
        ("sound", "refused"): 0,
        ("broken", "passes"): 0,
        ("broken", "refused"): 0,
    }
    passed: dict[str, list[str]] = {}
    for number in result.rows(head + 1):
        row = result.match(
            number,
            r"(fast|balanced|precise) +(sound|broken) +(\S.*?) +(?:-?[\d.]+ +){5}(passes|refused) +\w+",
            "a row of the table",
        )
        counts[row[2], row[4]] += 1
        if (row[2], row[4]) == ("broken", "passes"):
            passed.setdefault(row[3], []).append(
                format_words(PRECISIONS[TierName(row[1])])
            )
    sound = counts["sound", "passes"] + counts["sound", "refused"]
    broken = counts["broken", "passes"] + counts["broken", "refused"]
    missed = (
        "; ".join(f"{what} in {' or '.join(tiers)}" for what, tiers in passed.items())
        or "none"
    )
    return (
        f"The check refused {counts['sound', 'refused']} of {sound} sound engines and {counts['broken', 'refused']} of "
        f"{broken} broken ones ([figures]({to_results}/engine_check.txt)). The faults it missed: {missed}."
    )


@dataclass(frozen=True, slots=True)
class WayOfChoosing:
    """What a way to choose tiers did at one load: answers lost of 100, and times to the first token."""

    lost: float
    ttft_p50_ms: float
    ttft_p95_ms: float


def ways_of_choosing(
    result: TextResult, title: int
) -> tuple[dict[str, WayOfChoosing], str]:
    """Return the ways of a table, by name, and the line below it that says what the choice saves."""
    ways = {}
    for number in result.rows(title + 2):
        line = result.lines[number]
        if line.startswith("#"):
            return ways, line
        row = result.match(
            number,
            r"(\S.*?)  +([\d.]+) \(.*?\) +[\d.]+ +([\d.]+) +([\d.]+) .*",
            "a row of the table, or what is saved",
        )
        ways[row[1]] = WayOfChoosing(
            lost=float(row[2]), ttft_p50_ms=float(row[3]), ttft_p95_ms=float(row[4])
        )
    raise FigureError(
        f"{result.path}: no line says what is saved; run its benchmark again"
    )


def choice_worth(to_results: str) -> str:
    """Return what the choice of a tier is worth at the first load of the simulated fleets, and the budget at the second."""
    result = TextResult.read("choices.txt")
    titles = [
        number for number, line in enumerate(result.lines) if "of saturation" in line
    ]
    first, second = (
        result.match(
            number,
            r"(?P<gpu>\S+), one for each tier, (?P<load>[\d.]+) of saturation \(.*\)",
            "a fleet's title",
        )
        for number in titles[:2]
    )
    ways, saving = ways_of_choosing(result, titles[0])
    saved = re.fullmatch(
        r"# QARR loses (-?[\d.]+) \((-?[\d.]+) to (-?[\d.]+)\) answers of 100 fewer .*, with ([\d.]+) times its engine time",
        saving,
    )
    if saved is None:
        raise FigureError(
            f"{result.path}: '{saving}' does not say what is saved at the first load"
        )
    before_ms = ways["QARR before: least engine time"].ttft_p95_ms
    now_ms = ways["QARR"].ttft_p95_ms
    loaded, _ = ways_of_choosing(result, titles[1])
    default = loaded["QARR"]
    larger = loaded["QARR, loss budget 1 of 100"]
    return (
        f"In a simulation, three {first['gpu']}s serve Llama 3.1 8B at one precision each. At {float(first['load']):.0%} of "
        f"the load that saturates them, QARR loses {saved[1]} ({saved[2]} to {saved[3]}) fewer answers per 100 than a "
        f"random mix with QARR's share of requests per tier, at about the same engine time (x{saved[4]}). TTFT is "
        f"{now_ms:,.0f} ms at p95; it would be {before_ms:,.0f} ms if the tier with the least engine time were always "
        f"chosen. At {float(second['load']):.0%} of the saturating load, prompts queue for the tiers that lose little "
        f"enough, and TTFT is {default.ttft_p50_ms:,.0f} ms at p50. With `policy.loss_budget = 0.01` (up to 1 answer in 100 "
        f"may get worse) it is {larger.ttft_p50_ms:,.0f} ms, and {larger.lost:g} answers per 100 are lost instead of "
        f"{default.lost:g} (`{result.command}`, [all loads]({to_results}/choices.txt))."
    )


def new_clients(to_results: str) -> str:
    """Return how soon new clients of a busy router have their first answers."""
    result = TextResult.read("new_connections.txt")
    head = next(
        number
        for number, line in enumerate(result.lines)
        if line.startswith("ms to the first answer")
    )
    p99_ms = {}
    for number in result.rows(head + 1):
        row = result.match(
            number,
            r"(?:theirs|ours  |      ) (\S.*?)  +[\d.]+ / ([\d.]+) / [\d.]+ +[\d.]+ / ([\d.]+) / [\d.]+ +\d+",
            "times of a proxy's new clients",
        )
        p99_ms[row[1]] = (float(row[2]), float(row[3]))
    ours = p99_ms["QARR /v1/chat/completions"]
    peer = p99_ms["vllm-router cache_aware"]
    return (
        f"While 64 connections keep a core busy, 64 new clients that connect at once get their first answers within "
        f"{ours[0]:,.0f} ms at p99, and 500 new clients within {ours[1]:,.0f} ms. Through vllm-router (cache_aware), which "
        f"needs less CPU time per answer, it takes {peer[0]:,.0f} and {peer[1]:,.0f} ms ([bursts, with the "
        f"command]({to_results}/new_connections.txt))."
    )


def verification_errors(to_results: str) -> str:
    """Return how often verdicts about answers were wrong in simulations, and how many tasks they took."""
    name = "sequential_errors.json"
    result = read_json(name)
    rows = []
    for row in result["rows"]:
        if row["both_wrong"] or row["max_tasks"] != min(
            each["max_tasks"] for each in result["rows"]
        ):
            continue
        rows.append(
            [
                f"{100 * row['loss']:g}",
                f"{100 * row['better']:g}",
                f"{100 * row['same']:.1f}",
                f"{100 * row['worse']:.1f}",
                f"{100 * row['cannot_tell']:.1f}",
                f"{row['mean_tasks']:,.0f}",
            ]
        )
    head = [
        "true loss of 100",
        "also better, of 100",
        "same %",
        "worse %",
        "cannot tell %",
        "tasks, mean",
    ]
    most_tasks = min(row["max_tasks"] for row in result["rows"])
    words = (
        f"`{result['command']}`, {result['date']}: {result['runs']:,} verifications for each row, "
        f"at most {most_tasks} tasks, "
        f"{100 * result['tolerated']:g} of 100 tolerated, confidence {100 * result['confidence']:g} % "
        f"([all rows]({to_results}/{name}))."
    )
    return f"{table(head, rows)}\n{paragraph(words)}"


def verification_faults(to_results: str) -> str:
    """Return which faults in real engines a verification found, and how many sound pairs raised an alarm."""
    name = "verify_faults.json"
    cases = read_json(name)
    faults = [case for case in cases if not case["is_sound"]]
    sound = [case for case in cases if case["is_sound"]]
    rows = [
        [
            case["case"],
            case["stage"] or "not found",
            f"{case['seconds']:.0f}",
        ]
        for case in faults
    ]
    found = sum(bool(case["stage"]) for case in faults)
    alarms = sum(bool(case["stage"]) for case in sound)
    words = (
        f"`python benchmarks/verify_faults.py --quick`: {found} of {len(faults)} faults were found; {len(sound)} pairs "
        f"without a fault raised {alarms} alarms ([all cases]({to_results}/verify_faults.txt))."
    )
    return (
        f"{table(['candidate', 'found in stage', 'seconds'], rows)}\n{paragraph(words)}"
    )


# The recorded session of an agent.

AGENT_ROW = (
    r"(?P<setting>[a-z, ]+?) +(?P<turns>\d+) +(?P<failed>\d+) +(?P<tier>\d+) +(?P<in_loop>\d+) +(?P<replica>\d+)"
    r" +(?P<cached>\d+%) +(?P<p50>\d+) ms +(?P<p95>\d+) ms"
)
AGENT_HEAD = (
    r"setting +turns +failed +precision +in loop +replica +cached +TTFT p50 +p95"
)
AGENT_TABLES = "switches and times "


def agent_session(to_results: str) -> str:
    """Return switches, cached tokens and TTFT of the recorded session and of all agents, by setting."""
    result = TextResult.read("agent_session.txt")
    rows = []
    for start, line in enumerate(result.lines):
        if not line.startswith(AGENT_TABLES):
            continue
        result.match(start + 1, AGENT_HEAD, "the head of a table")
        number = start + 2
        while number < len(result.lines) and re.fullmatch(
            AGENT_ROW, result.lines[number]
        ):
            row = result.match(number, AGENT_ROW, "a row of a setting")
            rows.append(
                [
                    f"{line.removeprefix(AGENT_TABLES + 'of ')}: {row['setting']}",
                    row["turns"],
                    f"{row['tier']} ({row['in_loop']})",
                    row["replica"],
                    row["cached"].replace("%", " %"),
                    f"{row['p50']} ms",
                    f"{row['p95']} ms",
                ]
            )
            number += 1
    head = [
        "",
        "turns",
        "switches of precision (in a tool loop)",
        "switches of replica",
        "prompt tokens cached",
        "TTFT, median",
        "95th percentile",
    ]
    source = paragraph(
        f"`{result.command}` ([every turn with its reason]({to_results}/agent_session.txt)). TTFT is of all turns but the "
        'first, by the simulated GPU\'s clock. "Before" is the router of the commit before these rules.'
    )
    return f"{table(head, rows)}\n{source}"


FIGURES: dict[str, Callable[[str], str]] = {
    "agent-session": agent_session,
    "verification-errors": verification_errors,
    "verification-faults": verification_faults,
    "big-fleet": big_fleet,
    "choice-worth": choice_worth,
    "classifier-cost": classifier_cost,
    "classifier-quality": classifier_quality,
    "engine-checks": engine_checks,
    "gateways": gateways,
    "new-clients": new_clients,
    "pays": pays,
    "plan-accuracy": plan_accuracy,
    "plans": plans,
    "prediction-errors": prediction_errors,
    "predictions": predictions,
    "router-cost": router_cost,
    "router-load": router_load,
    "turn-costs": turn_costs,
    "interpreters": interpreters,
}


def render(text: str, to_results: str) -> str:
    """Return a document's text with its figures as the result files have them.

    Args:
        text: Of the document.
        to_results: The way from its folder to benchmarks/results, for links.

    Raises:
        FigureError: There is no figure of a name, a marker has no end, or a result file does not fit.
    """

    def write(found: re.Match[str]) -> str:
        lead, name = found["lead"], found["name"]
        if name not in FIGURES:
            raise FigureError(
                f"there is no figure {name!r}; there are: {', '.join(FIGURES)}"
            )
        figure = FIGURES[name](to_results)
        opening = f"{lead}<!-- figures: {name} -->\n"
        if not lead:
            block = figure if figure.endswith("\n") else paragraph(figure)
            return f"{opening}\n{block}\n{END}"
        # of an item's further lines
        indent = "  " if lead.startswith(("- ", "  ")) else ""
        return opening + fill(figure + END.replace(" ", UNBROKEN), indent)

    starts, blocks = (
        len(re.findall(r"<!-- figures: [a-z-]+ -->", text)),
        len(BLOCK.findall(text)),
    )
    if starts != blocks or starts != text.count(END):
        raise FigureError(
            f"{starts} markers '<!-- figures: NAME -->' and {text.count(END)} '{END}' make {blocks} figures"
        )
    return BLOCK.sub(write, text)


def document(name: str) -> str:
    """Return a document as it should be."""
    path = ROOT / name
    to_results = (
        "../benchmarks/results" if path.parent.name == "docs" else "benchmarks/results"
    )
    try:
        return render(path.read_text("utf-8"), to_results)
    except FigureError as error:
        raise FigureError(f"{name}: {error}") from error


def main() -> None:
    """Write all documents."""
    try:
        texts = {name: document(name) for name in DOCUMENTS}
    except FigureError as error:
        sys.exit(f"error: {error}")
    for name, text in texts.items():
        (ROOT / name).write_text(text, "utf-8")
        print(f"{name}: {len(BLOCK.findall(text))} figures")


if __name__ == "__main__":
    main()
