"""Grafana's panels, as far as the dashboards use them: their queries, and how they name and write the answers.

Grafana itself is not among the tests' programs, so its rules are repeated here. ``panel_drawing`` draws with them.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tests.deploy.services import DEPLOY

if TYPE_CHECKING:
    from collections.abc import Mapping

DASHBOARDS = {
    path.stem: json.loads(path.read_bytes())
    for path in sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
}
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
PLACEHOLDER = re.compile(r"\{\{\s*(\w+)\s*\}\}")
UNNAMED = "Value"  # Grafana gives this name to a series whose legend is empty.


@dataclass(frozen=True, slots=True)
class Series:
    """One line, bar, number or row of a panel: its name, its labels, and its points (time in seconds, value)."""

    name: str
    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]

    @property
    def last(self) -> float:
        return self.points[-1][1]


@dataclass(frozen=True, slots=True)
class Query:
    """One of a panel's queries, its variables replaced."""

    expr: str
    legend: str
    instant: bool
    exemplars: bool


@dataclass(frozen=True, slots=True)
class Place:
    """Where a panel stands in the grid of 24 columns."""

    x: int
    y: int
    w: int
    h: int


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel or the head of a row, with Grafana's defaults filled in.

    Attributes:
        kind: Grafana's name: ``row``, ``timeseries``, ``stat``, ``bargauge``, ``table``.
        steps: The thresholds: from each value on a colour holds.
        custom: The options of ``timeseries`` alone: fill, stacking, how thresholds are shown.
        columns: The columns of a table, with their order and names, or the labels that span a matrix.
    """

    kind: str
    title: str
    place: Place
    queries: tuple[Query, ...]
    links: tuple[str, ...]
    unit: str
    decimals: int | None
    minimum: float | None
    maximum: float | None
    steps: tuple[tuple[float, str], ...]
    has_threshold_colours: bool
    custom: dict[str, Any]
    options: dict[str, Any]
    columns: dict[str, Any]


def panels_of(
    dashboard: dict[str, Any], *, rate_interval: str, shown: str
) -> list[Panel]:
    """Return the panels of a dashboard for all fleets, in their order.

    Args:
        dashboard: The dashboard's JSON.
        rate_interval: The interval of rates, as in ``1m``.
        shown: The time that the dashboard shows, as in ``1h``.
    """
    variables = {"__rate_interval": rate_interval, "__range": shown}
    for variable in dashboard["templating"]["list"]:
        variables[variable["name"]] = variable.get("allValue") or variable["query"]
    return [_panel(raw, variables) for raw in dashboard["panels"]]


def _panel(raw: dict[str, Any], variables: Mapping[str, str]) -> Panel:
    field = raw.get("fieldConfig", {}).get("defaults", {})
    thresholds = field.get("thresholds", {}).get("steps", [])
    default_colour = "palette-classic" if raw["type"] == "timeseries" else "thresholds"
    colour_mode = field.get("color", {}).get("mode", default_colour)
    return Panel(
        kind=raw["type"],
        title=raw["title"],
        place=Place(**raw["gridPos"]),
        queries=tuple(_query(target, variables) for target in raw.get("targets", [])),
        links=tuple(
            substituted(link["url"], variables) for link in raw.get("links", [])
        ),
        unit=field.get("unit", "none"),
        decimals=field.get("decimals"),
        minimum=field.get("min"),
        maximum=field.get("max"),
        steps=tuple(
            (-math.inf if step["value"] is None else step["value"], step["color"])
            for step in thresholds
        ),
        has_threshold_colours=colour_mode == "thresholds",
        custom=field.get("custom", {}),
        options=raw.get("options", {}),
        columns=_columns(raw.get("transformations", [])),
    )


def _query(target: dict[str, Any], variables: Mapping[str, str]) -> Query:
    return Query(
        expr=substituted(target["expr"], variables),
        legend=target["legendFormat"],
        instant=target.get("instant", False),
        exemplars=target.get("exemplar", False),
    )


def _columns(transformations: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the options of the one or two transformations that are known here."""
    options: dict[str, Any] = {}
    for transformation in transformations:
        assert transformation["id"] in {"organize", "groupingToMatrix"}, transformation
        options |= transformation["options"]
    return options


def substituted(text: str, variables: Mapping[str, str]) -> str:
    """Replace variables by their values, and raise ``KeyError`` for a variable that the dashboard does not have."""
    return VARIABLE.sub(lambda match: variables[match[1] or match[2]], text)


def legend_name(legend: str, labels: Mapping[str, str]) -> str:
    """Return the name of a series; a label that it does not have is left out."""
    name = PLACEHOLDER.sub(lambda match: labels.get(match[1], ""), legend).strip()
    if not legend and labels:
        pairs = ", ".join(
            f'{label}="{value}"' for label, value in sorted(labels.items())
        )
        return f"{{{pairs}}}"
    return name or UNNAMED


def series_of(query: Query, result: list[dict[str, Any]]) -> list[Series]:
    """Return the series of Prometheus' answer to a query; infinities and NaN are gaps."""
    all_series = []
    for found_series in result:
        labels = found_series["metric"]
        values = found_series.get("values") or [found_series["value"]]
        points = tuple(
            (float(at), float(value))
            for at, value in values
            if math.isfinite(float(value))
        )
        if points:
            name = legend_name(query.legend, labels)
            all_series.append(Series(name, labels, points))
    return all_series


def number_text(value: float, decimals: int | None = None) -> str:
    """Write a number with so many decimals; by default as an integer, or with three significant digits."""
    if decimals is None:
        if value == int(value):
            return str(int(value))
        decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit, in which each value is written in the largest step that is not above it.

    Attributes:
        steps: The sizes and names of the steps, the largest first.
        zero: The name of the step that zero is written in; by default the last one.
    """

    steps: tuple[tuple[float, str], ...]
    suffix: str = ""
    zero: str | None = None

    def text(self, value: float, decimals: int | None = None) -> str:
        size, name = next(
            (step for step in self.steps if abs(value) >= step[0]), self.steps[-1]
        )
        if value == 0 and self.zero is not None:
            name = self.zero
        return f"{number_text(value / size, decimals)}{name}{self.suffix}"


NONE = ((1.0, ""),)
SHORT = ((1e9, " Bil"), (1e6, " Mil"), (1e3, " K"), (1.0, ""))
COUNTS = ((1e9, "B"), (1e6, "M"), (1e3, "K"), (1.0, ""))
SECONDS = (
    (86400.0, " day"),
    (3600.0, " hour"),
    (60.0, " min"),
    (1.0, " s"),
    (1e-3, " ms"),
    (1e-6, " µs"),
    (1e-9, " ns"),
)
UNITS = {
    "none": Unit(NONE),
    "short": Unit(SHORT),
    "percentunit": Unit(((0.01, "%"),)),
    "s": Unit(SECONDS, zero=" s"),
    "reqps": Unit(COUNTS, suffix=" req/s"),
}


def unit_text(unit: str, value: float, decimals: int | None = None) -> str:
    """Write a value in one of Grafana's units, or in a dashboard's own: ``count:NAME``."""
    kind, _, name = unit.partition(":")
    if kind == "count":
        return Unit(COUNTS, suffix=f" {name}").text(value, decimals)
    return UNITS[unit].text(value, decimals)


def table_of(panel: Panel, rows: list[Series]) -> tuple[list[str], list[list[str]]]:
    """Return a table's head and its cells, arranged as the panel says."""
    if "columnField" in panel.columns:
        return _matrix_of(panel, rows)
    labels: set[str] = set()
    for row in rows:
        labels |= row.labels.keys()
    names = ["Time", *sorted(labels), UNNAMED]
    shown = [
        name for name in names if not panel.columns.get("excludeByName", {}).get(name)
    ]
    order = panel.columns.get("indexByName", {})
    shown.sort(key=lambda name: order.get(name, len(order)))
    renamed = panel.columns.get("renameByName", {})
    head = [renamed.get(name, name) for name in shown]
    return head, [_cells(panel, row, shown) for row in rows]


def _cells(panel: Panel, row: Series, columns: list[str]) -> list[str]:
    return [_cell(panel, row, column) for column in columns]


def _matrix_of(panel: Panel, rows: list[Series]) -> tuple[list[str], list[list[str]]]:
    across = panel.columns["columnField"]
    down = panel.columns["rowField"]
    shown = panel.columns["valueField"]
    values = {
        (row.labels[down], row.labels[across]): _cell(panel, row, shown) for row in rows
    }
    columns = list(dict.fromkeys(row.labels[across] for row in rows))
    names = list(dict.fromkeys(row.labels[down] for row in rows))
    cells = []
    for name in names:
        cells.append([name])
        cells[-1] += [values.get((name, column), "") for column in columns]
    return [f"{down}\\{across}", *columns], cells


def _cell(panel: Panel, row: Series, column: str) -> str:
    if column == "Time":
        time = datetime.fromtimestamp(row.points[-1][0], UTC)
        return time.strftime("%Y-%m-%d %H:%M:%S")
    if column == UNNAMED:
        return unit_text(panel.unit, row.last, panel.decimals)
    return row.labels.get(column, "")
