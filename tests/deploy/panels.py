"""Grafana's panels, as far as the dashboards use them: what a panel asks Prometheus, and how it names and writes the answer.

Grafana itself is not among the tests' programs, so its rules are written down here. ``panel_drawing`` draws with them.
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
UNNAMED = "Value"  # Grafana's name of a series whose legend is empty


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
        steps: The thresholds: each value from which a colour holds.
        custom: What ``timeseries`` alone has: fill, stacking, how thresholds are shown.
        columns: A table's columns: what is left out, their order and their names; or the labels that span a matrix.
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
        dashboard: Its JSON.
        rate_interval: Over what rates are taken, as in ``1m``.
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
        has_threshold_colours=field.get("color", {}).get("mode", default_colour)
        == "thresholds",
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
    unknown = {each["id"] for each in transformations} - {
        "organize",
        "groupingToMatrix",
    }
    assert not unknown, unknown
    return {
        key: value for each in transformations for key, value in each["options"].items()
    }


def substituted(text: str, variables: Mapping[str, str]) -> str:
    """Replace variables by their values; one that the dashboard does not have is a ``KeyError``."""
    return VARIABLE.sub(lambda match: variables[match[1] or match[2]], text)


def legend_name(legend: str, labels: Mapping[str, str]) -> str:
    """Return the name of a series: a label that it does not have is written as nothing."""
    name = PLACEHOLDER.sub(lambda match: labels.get(match[1], ""), legend).strip()
    if not legend and labels:
        pairs = ", ".join(
            f'{label}="{value}"' for label, value in sorted(labels.items())
        )
        return f"{{{pairs}}}"
    return name or UNNAMED


def series_of(query: Query, result: list[dict[str, Any]]) -> list[Series]:
    """Return the series that Prometheus found for a query; values that are no numbers are gaps."""
    found = []
    for each in result:
        values = each.get("values") or [each["value"]]
        points = tuple(
            (float(at), float(value))
            for at, value in values
            if math.isfinite(float(value))
        )
        if points:
            found.append(
                Series(
                    legend_name(query.legend, each["metric"]), each["metric"], points
                )
            )
    return found


def number_text(value: float, decimals: int | None = None) -> str:
    """Write a number with so many decimals, or else three significant digits; a whole one as it is."""
    if decimals is None:
        if value == int(value):
            return str(int(value))
        decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


@dataclass(frozen=True, slots=True)
class Unit:
    """How values are written: each in the largest step that is not above it.

    Attributes:
        steps: Size and name of each, the largest first.
        zero: The name of the step that zero is written in; by default the last one's.
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
    (86400.0, " day"), (3600.0, " hour"), (60.0, " min"), (1.0, " s"), (1e-3, " ms"), (1e-6, " µs"), (1e-9, " ns"),
)  # fmt: skip
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
    labels = sorted({label for row in rows for label in row.labels})
    names = ["Time", *labels, UNNAMED]
    shown = [
        name for name in names if not panel.columns.get("excludeByName", {}).get(name)
    ]
    order = panel.columns.get("indexByName", {})
    shown.sort(key=lambda name: order.get(name, len(order)))
    renamed = panel.columns.get("renameByName", {})
    head = [renamed.get(name, name) for name in shown]
    return head, [[_cell(panel, row, name) for name in shown] for row in rows]


def _matrix_of(panel: Panel, rows: list[Series]) -> tuple[list[str], list[list[str]]]:
    across, down, shown = (
        panel.columns[f"{part}Field"] for part in ("column", "row", "value")
    )
    values = {
        (row.labels[down], row.labels[across]): _cell(panel, row, shown) for row in rows
    }
    columns = list(dict.fromkeys(row.labels[across] for row in rows))
    names = list(dict.fromkeys(row.labels[down] for row in rows))
    cells = [
        [name, *(values.get((name, column), "") for column in columns)]
        for name in names
    ]
    return [f"{down}\\{across}", *columns], cells


def _cell(panel: Panel, row: Series, column: str) -> str:
    if column == "Time":
        return datetime.fromtimestamp(row.points[-1][0], UTC).strftime(
            "%Y-%m-%d %H:%M:%S"
        )
    if column == UNNAMED:
        return unit_text(panel.unit, row.last, panel.decimals)
    return row.labels.get(column, "")
