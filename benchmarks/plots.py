"""Charts as SVG: points with intervals, lines, and steps. No library is needed for so little."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 680, 380, 70, 44, 160, 52
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#57534e")
STYLE = "text{font:12px system-ui,sans-serif;fill:#1c1917}.soft{fill:#57534e}.grid{stroke:#e7e5e4}"


@dataclass(frozen=True, slots=True)
class Point:
    """One point; ``low`` and ``high`` are its interval in y, ``label`` stands beside it."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one kind; ``line`` joins them, and ``marks`` draws each of them."""

    name: str
    points: tuple[Point, ...]
    line: bool = False
    marks: bool = True


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round values from at most ``low`` to at least ``high``."""
    high = high if high > low else low + 1
    span = high - low
    size = 10 ** math.floor(math.log10(span / count))
    step = next(
        size * factor for factor in (1, 2, 5, 10) if span / (size * factor) <= count
    )
    first = math.floor(low / step + 1e-9)
    return [number * step for number in range(first, math.ceil(high / step - 1e-9) + 1)]


def chart(
    path: Path, title: str, x_label: str, y_label: str, series: Sequence[Series]
) -> None:
    """Write a chart; its y axis begins at 0."""
    points = [point for one in series for point in one.points]
    xs = ticks(min(p.x for p in points), max(p.x for p in points))
    ys = ticks(0.0, max(p.y if p.high is None else p.high for p in points))
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + across * (x - xs[0]) / (xs[-1] - xs[0]),
            TOP + down * (1 - (y - ys[0]) / (ys[-1] - ys[0])),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-weight="600">{escape(title)}</text>',
    ]
    for x in xs:
        left = at(x, 0)[0]
        parts.append(
            f'<text class="soft" x="{left:.1f}" y="{HEIGHT - 32}" text-anchor="middle">{x:g}</text>'
        )
    for y in ys:
        up = at(xs[0], y)[1]
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up:.1f}" y2="{up:.1f}"/>'
        )
        parts.append(
            f'<text class="soft" x="{LEFT - 8}" y="{up + 4:.1f}" text-anchor="end">{y:.4g}</text>'
        )
    parts.append(
        f'<text x="{LEFT + across / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>'
    )
    parts.append(
        f'<text x="{LEFT}" y="{TOP - 8}" class="soft">{escape(y_label)}</text>'
    )
    for number, one in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        placed = [(*at(p.x, p.y), p) for p in one.points]
        if one.line:
            joined = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in placed)
            parts.append(
                f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
        for x, y, p in placed if one.marks else ():
            if p.low is not None and p.high is not None:
                low, high = at(p.x, p.low)[1], at(p.x, p.high)[1]
                parts.append(
                    f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}"/>'
                )
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
            if p.label:
                parts.append(
                    f'<text class="soft" x="{x + 7:.1f}" y="{y - 5:.1f}">{escape(p.label)}</text>'
                )
        named, beside = TOP + 14 + 20 * number, WIDTH - RIGHT + 14
        parts.append(
            f'<rect x="{beside}" y="{named - 9}" width="10" height="10" fill="{colour}"/>'
        )
        parts.append(f'<text x="{beside + 16}" y="{named}">{escape(one.name)}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", "utf-8")
