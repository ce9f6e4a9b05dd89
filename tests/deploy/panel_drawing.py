"""Draw dashboards as HTML, near enough to Grafana's look to judge sizes, places, names, units and thresholds.

What does not fit is cut, as in Grafana. Elements whose content may be cut have the class ``fits``, those without data the
class ``empty``, and both have their panel's title in ``data-panel``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING

from tests.deploy.panels import table_of, unit_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.deploy.panels import Panel, Place, Series

WIDTH = 1600
COLUMNS = 24
ROW_HEIGHT = 30
GAP = 8
MARGIN = 16
TOP = 64
HEADER = 36
PADDING = 8
BORDER = 1
LEGEND_LINE = 22
LEGEND_SHARE = 0.35
CHARACTER = 6.8
AXIS_GAP = 20
AXIS_HEIGHT = 22
TICK_SPACE = 38
TITLE_ABOVE = 40  # A bar that is higher has its name above it.
PALETTE = (
    *("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9"),
    *("#705da0", "#37872d", "#fade2a", "#447ebc", "#c15c17", "#890f02", "#0a437c"),
    *("#6d1f62", "#584477"),
)
ENDING_ZEROS = re.compile(r"\.(\d*?)0+(?!\d)")
TIME_STEPS = (1, 1.5, 3, 6, 10)
CLOCK_WIDTH = 60
COLOURS = {"green": "#73bf69", "red": "#f2495c", "text": "#ccccdc"}
STYLE = """
body { background: #111217; color: #ccccdc; font: 14px Inter, Helvetica, Arial, sans-serif; margin: 0; position: relative }
h1 { font-size: 18px; font-weight: 500; margin: 0; position: absolute; left: 16px; top: 20px }
.variables { position: absolute; right: 16px; top: 22px; font-size: 12px }
.variables b { background: #22252b; padding: 5px 8px; margin-left: 8px; font-weight: 400 }
section { position: absolute; background: #181b1f; border: 1px solid #25272e; box-sizing: border-box; overflow: hidden }
section.row { background: none; border: 0; font-size: 16px; line-height: 30px; font-weight: 500 }
header { height: 36px; line-height: 36px; padding: 0 8px; display: flex; font-weight: 500 }
header span { overflow: hidden; white-space: nowrap; text-overflow: ellipsis; flex: 0 1 auto }
header a { color: #6e9fff; font-size: 11px; margin-left: 8px; flex: none; font-weight: 400 }
.body { position: absolute; left: 8px; right: 8px; bottom: 8px; top: 36px; overflow: hidden }
.empty { text-align: center; padding-top: 20px; color: #8e8ea0 }
.legend { overflow: hidden; font-size: 12px; line-height: 22px }
.legend span { margin-right: 12px; white-space: nowrap; display: inline-block }
.legend i { display: inline-block; width: 14px; height: 4px; border-radius: 2px; margin-right: 6px; vertical-align: middle }
.numbers { display: flex; height: 100% }
.numbers div { flex: 1; text-align: center; overflow: hidden; white-space: nowrap; align-self: center }
.bar { display: flex; overflow: hidden } .bar.vertical { flex-direction: column-reverse; float: left }
u { text-decoration: none; display: block; overflow: hidden; white-space: nowrap; text-overflow: ellipsis; flex: none }
table { border-collapse: collapse; width: 100%; font-size: 14px }
th { text-align: left; color: #6e9fff; font-weight: 500 }
td, th { border: 1px solid #25272e; height: 36px; padding: 0 6px; box-sizing: border-box; white-space: nowrap }
svg { display: block } svg text { fill: #ccccdc; font: 12px Inter, Helvetica, Arial, sans-serif }
"""


@dataclass(frozen=True, slots=True)
class Window:
    """The time that plots show, in seconds, and the time between two of their points."""

    start: float
    end: float
    step: float


@dataclass(frozen=True, slots=True)
class Drawn:
    """A panel with its series, and their exemplars (time, value)."""

    panel: Panel
    series: list[Series]
    exemplars: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """The places of times and values in a plot of some size."""

    window: Window
    low: float
    high: float
    width: float
    height: float
    left: float

    def x(self, at: float) -> float:
        share = (at - self.window.start) / (self.window.end - self.window.start)
        return self.left + share * (self.width - self.left)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.height - AXIS_HEIGHT - share * self.plot_height

    @property
    def plot_height(self) -> float:
        return self.height - AXIS_HEIGHT - 6


def draw_dashboard(title: str, panels: list[Drawn], window: Window) -> str:
    """Return a page that shows a dashboard."""
    bottom = max(drawn.panel.place.y + drawn.panel.place.h for drawn in panels)
    height = TOP + bottom * (ROW_HEIGHT + GAP) + GAP
    shown = f"{clock(window.start)} to {clock(window.end)} UTC"
    variables = f"Prometheus<b>Prometheus</b> Fleet<b>All</b> <b>{shown}</b>"
    head = f'<h1>{escape(title)}</h1><div class="variables">{variables}</div>'
    body = "".join(draw_panel(drawn, window) for drawn in panels)
    style = f"<style>{STYLE} body {{ width: {WIDTH}px; height: {height}px }}</style>"
    return f'<!doctype html><meta charset="utf-8">{style}<body>{head}{body}'


def draw_panel(drawn: Drawn, window: Window) -> str:
    """Return a panel, or the head of a row, at its place."""
    panel = drawn.panel
    left, top, width, height = pixels(panel.place)
    place = (
        f"left:{left:.1f}px;top:{top:.1f}px;width:{width:.1f}px;height:{height:.1f}px"
    )
    if panel.kind == "row":
        return f'<section class="row" style="{place}">⌄ {escape(panel.title)}</section>'
    body = _body(
        drawn,
        width=width - 2 * (PADDING + BORDER),
        height=height - HEADER - PADDING - 2 * BORDER,
        window=window,
    )
    title = f"<span {_fits(panel, 'title')}>{escape(panel.title)}</span>"
    links = f"<a>↗{len(panel.links)}</a>" if panel.links else ""
    return f'<section style="{place}"><header>{title}{links}</header><div class="body">{body}</div></section>'


def pixels(place: Place) -> tuple[float, float, float, float]:
    """Return left, top, width and height of a place in the grid."""
    column = (WIDTH - 2 * MARGIN + GAP) / COLUMNS
    row = ROW_HEIGHT + GAP
    return (
        MARGIN + place.x * column,
        TOP + place.y * row,
        place.w * column - GAP,
        place.h * row - GAP,
    )


def _body(drawn: Drawn, *, width: float, height: float, window: Window) -> str:
    panel = drawn.panel
    if not drawn.series:
        return f'<div class="empty" data-panel="{escape(panel.title)}">No data</div>'
    match panel.kind:
        case "timeseries":
            return _plot(drawn, width, height, window=window)
        case "stat":
            return _numbers(panel, drawn.series, width, height=height)
        case "bargauge":
            return _bars(panel, drawn.series, width, height=height)
        case "table":
            return _table(panel, drawn.series, height)
    raise AssertionError(panel.kind)


def _fits(panel: Panel, part: str) -> str:
    return f'class="fits {part}" data-panel="{escape(panel.title)}"'


def clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")


# Plots over time.


def _plot(drawn: Drawn, width: float, height: float, window: Window) -> str:
    panel = drawn.panel
    series = drawn.series
    legend_height = _legend_height(series, width, height)
    is_stacked = panel.custom.get("stacking", {}).get("mode") == "normal"
    lines = [dict(shown.points) for shown in series]
    tops = _stacked(lines) if is_stacked else lines
    scale = _scale(panel, tops, window, width=width, height=height - legend_height)
    opacity = panel.custom.get("fillOpacity", 0) / 100
    parts = list(_threshold_lines(panel, scale))
    for number, top in reversed(list(enumerate(tops))):
        base = tops[number - 1] if is_stacked and number else {}
        parts += _line(
            top, base, scale, colour=PALETTE[number % len(PALETTE)], opacity=opacity
        )
    parts += [
        _diamond(scale.x(at), scale.y(value))
        for at, value in _thinned(drawn.exemplars, scale)
    ]
    bottom = scale.height - AXIS_HEIGHT
    clipped = f'<svg width="{width:.0f}" height="{bottom:.0f}">{"".join(parts)}</svg>'
    size = f'width="{width:.0f}" height="{scale.height:.0f}"'
    return f"<svg {size}>{''.join(_axes(panel, scale))}{clipped}</svg>{_legend(panel, series, legend_height)}"


def _legend_height(series: list[Series], width: float, height: float) -> float:
    lines = 1
    used = 0.0
    for shown in series:
        needed = len(shown.name) * CHARACTER + 34
        if used + needed > width and used:
            lines += 1
            used = 0.0
        used += needed
    return min(lines * LEGEND_LINE, LEGEND_SHARE * height)


def _legend(panel: Panel, series: list[Series], height: float) -> str:
    names = "".join(
        f'<span><i style="background:{PALETTE[number % len(PALETTE)]}"></i>{escape(shown.name)}</span>'
        for number, shown in enumerate(series)
    )
    return f'<div {_fits(panel, "legend")} style="height:{height:.0f}px">{names}</div>'


def _stacked(lines: list[dict[float, float]]) -> list[dict[float, float]]:
    sums: dict[float, float] = {}
    tops = []
    for line in lines:
        sums = sums | {at: sums.get(at, 0.0) + value for at, value in line.items()}
        tops.append(dict(sums))
    return tops


def _scale(
    panel: Panel,
    lines: list[dict[float, float]],
    window: Window,
    *,
    width: float,
    height: float,
) -> Scale:
    """Return a scale that ends at the panel's own bounds, or without them a tenth beyond the data."""
    low = min(min(line.values()) for line in lines)
    high = max(max(line.values()) for line in lines)
    margin = (high - min(low, 0.0)) * 0.1
    if panel.minimum is not None:
        low = panel.minimum
    elif low < 0:
        low -= margin
    if panel.maximum is not None:
        high = panel.maximum
    else:
        high += margin
    if high <= low:
        high = low + 1
    scale = Scale(window, low=low, high=high, width=width, height=height, left=0)
    longest = max(len(_tick_text(panel, value)) for value in _value_ticks(scale))
    return replace(scale, left=longest * CHARACTER + AXIS_GAP)


def _value_ticks(scale: Scale) -> list[float]:
    return _ticks(scale.low, scale.high, scale.plot_height / TICK_SPACE)


def _axes(panel: Panel, scale: Scale) -> Iterator[str]:
    for value in _value_ticks(scale):
        y = scale.y(value)
        yield f'<line x1="{scale.left:.1f}" x2="{scale.width:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#25272e"/>'
        yield f'<text x="{scale.left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(_tick_text(panel, value))}</text>'
    clocks = (scale.width - scale.left) / 90
    for at in _ticks(scale.window.start, scale.window.end, clocks, sizes=TIME_STEPS):
        x = scale.x(at)
        if x > scale.width - CLOCK_WIDTH / 2:
            continue
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="6" y2="{scale.height - AXIS_HEIGHT:.1f}" stroke="#25272e"/>'
        yield f'<text x="{x:.1f}" y="{scale.height - 6:.1f}" text-anchor="middle">{clock(at)}</text>'


def _tick_text(panel: Panel, value: float) -> str:
    """Write a round value without the zeros behind its point."""
    return ENDING_ZEROS.sub(
        lambda match: match[1] and f".{match[1]}", unit_text(panel.unit, value)
    )


def _ticks(
    low: float, high: float, count: float, sizes: tuple[float, ...] = (1, 2, 2.5, 5, 10)
) -> list[float]:
    """Return at most so many round values between two bounds; their distance is a power of ten times a size."""
    rough = (high - low) / max(count, 1)
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * size for size in sizes if power * size >= rough)
    first = math.ceil(low / step)
    return [
        round(number * step, 12) for number in range(first, math.floor(high / step) + 1)
    ]


def _threshold_lines(panel: Panel, scale: Scale) -> Iterator[str]:
    if panel.custom.get("thresholdsStyle", {}).get("mode", "off") == "off":
        return
    for value, colour in panel.steps:
        if scale.low <= value <= scale.high:
            y = scale.y(value)
            stroke = COLOURS[colour]
            ends = f'x1="{scale.left:.1f}" x2="{scale.width:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
            yield f'<line {ends} stroke="{stroke}" stroke-dasharray="10 10"/>'


def _line(
    top: dict[float, float],
    base: dict[float, float],
    scale: Scale,
    *,
    colour: str,
    opacity: float,
) -> Iterator[str]:
    for run in _runs(top, scale.window.step):
        above = [f"{scale.x(at):.1f},{scale.y(top[at]):.1f}" for at in run]
        floor = max(scale.low, 0.0)
        below = [
            f"{scale.x(at):.1f},{scale.y(base.get(at, floor)):.1f}"
            for at in reversed(run)
        ]
        yield f'<polygon points="{" ".join(above + below)}" fill="{colour}" fill-opacity="{opacity}"/>'
        yield f'<polyline points="{" ".join(above)}" fill="none" stroke="{colour}" stroke-width="1.3"/>'
        if len(run) == 1:
            x, y = above[0].split(",")
            yield f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>'


def _runs(line: Iterable[float], step: float) -> list[list[float]]:
    """Return the times of a line, split where points are missing."""
    runs: list[list[float]] = []
    for at in sorted(line):
        if not runs or at - runs[-1][-1] > 1.5 * step:
            runs.append([])
        runs[-1].append(at)
    return runs


def _thinned(
    exemplars: tuple[tuple[float, float], ...], scale: Scale
) -> list[tuple[float, float]]:
    """Return the highest exemplar of each stretch as wide as a diamond."""
    highest = {
        round(scale.x(at) / GAP): (at, value)
        for at, value in sorted(exemplars, key=lambda exemplar: exemplar[1])
    }
    return list(highest.values())


def _diamond(x: float, y: float) -> str:
    place = f"translate({x:.1f} {y:.1f}) rotate(45)"
    return (
        f'<rect x="-3" y="-3" width="6" height="6" fill="#5794f2" transform="{place}"/>'
    )


# Numbers, bars and tables.


def _colour(panel: Panel, value: float) -> str:
    if not panel.has_threshold_colours:
        return COLOURS["text"]
    reached = [colour for start, colour in panel.steps if value >= start]
    return COLOURS[reached[-1]]


def _numbers(panel: Panel, series: list[Series], width: float, height: float) -> str:
    share = width / len(series)
    cells = []
    for shown in series:
        text = unit_text(panel.unit, shown.last, panel.decimals)
        size = min(height * 0.75, share / (len(text) * 0.78))
        name = f"<br>{escape(shown.name)}" if len(series) > 1 else ""
        style = f"font-size:{size:.0f}px;color:{_colour(panel, shown.last)}"
        cells.append(
            f'<div {_fits(panel, "number")} style="{style}">{escape(text)}{name}</div>'
        )
    return f'<div class="numbers">{"".join(cells)}</div>'


def _bars(panel: Panel, series: list[Series], width: float, height: float) -> str:
    """Draw bars side by side or one above the other; without a minimum the scale starts at the smallest value."""
    values = [shown.last for shown in series]
    low = min(values) if panel.minimum is None else panel.minimum
    high = max(values) if panel.maximum is None else panel.maximum
    orientation = panel.options.get("orientation", "auto")
    is_vertical = orientation == "vertical" or (
        orientation == "auto" and width > height
    )
    bars = []
    draw = _vertical_bar if is_vertical else _horizontal_bar
    for shown in series:
        share = min(max((shown.last - low) / (high - low or 1), 0.0), 1.0)
        bars.append(draw(panel, shown, share, size=(width, height), count=len(series)))
    # The last bar has a gap below it too.
    style = f"height:{height + GAP:.0f}px;overflow:hidden"
    return f'<div {_fits(panel, "bars")} style="{style}">{"".join(bars)}</div>'


def _vertical_bar(
    panel: Panel, series: Series, share: float, *, size: tuple[float, float], count: int
) -> str:
    width = max((size[0] - GAP * (count - 1)) / count, 8)
    height = size[1]
    colour = _colour(panel, series.last)
    filled = max(share * (height - 21 - 24), 1)
    name = f'<u {_fits(panel, "name")} style="width:{width:.0f}px;text-align:center">{escape(series.name)}</u>'
    bar = f'<div style="height:{filled:.0f}px;width:{width:.0f}px;background:{colour}"></div>'
    text = escape(unit_text(panel.unit, series.last, panel.decimals))
    value = f'<u style="color:{colour};text-align:center">{text}</u>'
    style = f"width:{width:.0f}px;height:{height:.0f}px;margin-right:{GAP}px"
    return f'<div class="bar vertical" style="{style}">{name}{bar}{value}</div>'


def _horizontal_bar(
    panel: Panel, series: Series, share: float, *, size: tuple[float, float], count: int
) -> str:
    """Draw a bar with its name above it, or to the left of it where there is little height."""
    width = size[0]
    height = (size[1] - GAP * (count - 1)) / count
    height = min(max(height, panel.options.get("minVizHeight", 16)), 300)
    is_name_above = height > TITLE_ABOVE
    if is_name_above:
        name_width = width
        name_height = min(max(height * 0.35, 17), 50)
        height -= name_height
    else:
        name_width = min(max(width * 0.2, 50), 200)
        name_height = max(height * 0.6, 18)
        width -= name_width
    font = f"font-size:{name_height / 1.5:.0f}px;line-height:{name_height:.1f}px"
    style = f"{font};width:{name_width - 10:.0f}px;padding-right:10px;align-self:center"
    name = f'<u {_fits(panel, "name")} style="{style}">{escape(series.name)}</u>'
    bar = _bar_and_value(panel, series, share, width=width, height=height)
    if is_name_above:
        return f'{name}<div class="bar" style="margin-bottom:{GAP}px">{bar}</div>'
    return f'<div class="bar" style="margin-bottom:{GAP}px">{name}{bar}</div>'


def _bar_and_value(
    panel: Panel, series: Series, share: float, *, width: float, height: float
) -> str:
    colour = _colour(panel, series.last)
    room = width - min(max(width * 0.2, 50), 150)
    filled = f'<div style="width:{max(share * room, 1):.0f}px;height:{height:.0f}px;background:{colour}"></div>'
    track = f'<div style="width:{room:.0f}px;height:{height:.0f}px;background:#22252b">{filled}</div>'
    value = escape(unit_text(panel.unit, series.last, panel.decimals))
    return f'{track}<u style="color:{colour};padding-left:10px;align-self:center">{value}</u>'


def _table(panel: Panel, series: list[Series], height: float) -> str:
    head, rows = table_of(panel, series)
    lines = [_table_row("th", head), *(_table_row("td", row) for row in rows)]
    style = f"height:{height:.0f}px;overflow:hidden"
    return f'<div {_fits(panel, "table")} style="{style}"><table>{"".join(lines)}</table></div>'


def _table_row(kind: str, cells: list[str]) -> str:
    row = "".join(f"<{kind}>{escape(cell)}</{kind}>" for cell in cells)
    return f"<tr>{row}</tr>"
