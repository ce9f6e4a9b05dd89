"""Renders a quality profile as one page: a plot and a table, with intervals. No scripts, no further requests."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from tiers.spec import PRECISIONS, TierName

if TYPE_CHECKING:
    from router.policy.profiles import Interval, Loss, QualityProfile

_ROW, _LEFT, _WIDTH, _TOP = 22, 190, 560, 34
_COLOURS = {TierName.FAST: "#c2571a", TierName.BALANCED: "#2f6fb0", TierName.PRECISE: "#4d7d3a"}
_ADDED = "#7a5a9c"  # of a tier that the settings add
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2125; --soft: #6a737d; --line: #d0d7de; --ground: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ea; --soft: #9aa4ad; --line: #3a424a; --ground: #14181c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--ground); margin: 2rem auto;
  max-width: 74rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } p, li { max-width: 46rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; } td small { color: var(--soft); }
svg text { fill: var(--ink); font-size: 12px; } svg .soft { fill: var(--soft); } svg line.grid { stroke: var(--line); }
"""


def render(profile: QualityProfile) -> str:
    """Return the page."""
    digests = ", ".join(f"{t} {d[:12] if d else 'unknown'}" for t, d in profile.checkpoints.items())
    served = profile.model if profile.adapter is None else f"{profile.model} with {profile.adapter}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Quality of {escape(served)}</title><style>{_STYLE}</style></head><body>
<h1>What each precision of {escape(served)} costs in quality</h1>
<p>Each tier answered every prompt greedily, with at most {profile.answer_tokens} tokens; <b>precise</b> judged the
answers. Its own rows are the noise floor: the same weights, judged by themselves.
Measured {profile.created:%Y-%m-%d %H:%M} UTC on checkpoints {escape(digests)}.</p>
<h2>Tokens that are not the reference's first choice</h2>
{_plot(profile.losses)}
<h2>All figures</h2>
<div class="wide"><table><thead><tr><th>class</th><th>tier</th><th>prompts</th><th>tokens</th>
<th>not first choice, %</th><th>KL, mean</th><th>KL, 95th percentile</th><th>perplexity ratio</th>
<th>leaves the reference after</th><th>never leaves</th></tr></thead>
<tbody>{"".join(map(_row, profile.losses))}</tbody></table></div>
<p><small>Beside each estimate its 95&nbsp;% bootstrap interval over prompts. KL in nats per token, of the
{profile.top_k} likeliest tokens of each side and one rest: a lower bound.</small></p>
</body></html>
"""


def _plot(losses: tuple[Loss, ...]) -> str:
    most = max([loss.top1_disagreement.high for loss in losses], default=0.0) or 1.0
    top = next(step for step in (0.05, 0.1, 0.2, 0.3, 0.5, 1.0) if step >= most)
    marks = [top * part / 5 for part in range(6)]
    height = _TOP + _ROW * len(losses) + 10
    parts = [
        f'<svg viewBox="0 0 {_LEFT + _WIDTH + 30} {height}" role="img" aria-label="Disagreement by class and tier">'
    ]
    for mark in marks:
        x = _LEFT + _WIDTH * mark / top
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{height - 6}"/>')
        parts.append(f'<text class="soft" x="{x:.1f}" y="{_TOP - 14}" text-anchor="middle">{mark:.0%}</text>')
    for number, loss in enumerate(losses):
        y = _TOP + _ROW * number + 10
        found = loss.top1_disagreement
        low, mid, high = (_LEFT + _WIDTH * share / top for share in (found.low, found.mean, found.high))
        colour = _COLOURS.get(loss.tier, _ADDED)
        first = not number or losses[number - 1].prompt_class is not loss.prompt_class
        name = loss.prompt_class.value if first else ""
        parts.append(f'<text x="0" y="{y + 4}">{escape(name)}</text>')
        parts.append(f'<text class="soft" x="{_LEFT - 12}" y="{y + 4}" text-anchor="end">{loss.tier}</text>')
        parts.append(f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<circle cx="{mid:.1f}" cy="{y}" r="4" fill="{colour}"><title>{found.mean:.1%}</title></circle>')
    return "".join([*parts, "</svg>"])


def _row(loss: Loss) -> str:
    cells = [
        loss.prompt_class.value,
        f"{loss.tier} <small>{PRECISIONS.get(loss.tier, '')}</small>",
        str(loss.prompts),
        str(loss.tokens),
        _shown(loss, loss.top1_disagreement, 100),
        _shown(loss, loss.kl_mean),
        _shown(loss, loss.kl_p95),
        _shown(loss, loss.perplexity_ratio),
        f"{loss.first_divergence:.0f} tokens",
        f"{loss.never_diverged:.0%}",
    ]
    return _cells(cells)


def _cells(cells: list[str]) -> str:
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _shown(loss: Loss, value: Interval, factor: float = 1) -> str:
    digits = 1 if factor > 1 else 3
    if not loss.certain:
        return f"{value.mean * factor:.{digits}f} <small>few prompts</small>"
    low, high = (f"{x * factor:.{digits}f}" for x in (value.low, value.high))
    return f"{value.mean * factor:.{digits}f} <small>{low} to {high}</small>"
