"""One page that shows a verification: self-contained, to read, to print, and to send to a colleague."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined

from router.verification.findings import SpeedFinding
from router.verification.wording import (
    count_words,
    duration_words,
    interval_words,
    loss_words,
    next_step,
    of_100,
    stage_sentence,
    tasks_compared,
    verdict_sentence,
)
from tiers.verification.findings import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from jinja2 import Template

    from router.verification.findings import (
        AnswerComparison,
        AnswersFinding,
        Verification,
    )
    from router.verification.wording import StageFinding
    from tiers.verification.findings import Gap, LikelihoodFinding

PLOT_WIDTH = 420  # of a plot's axis, in pixels of the drawing
ROW_HEIGHT = 26
MAX_TICKS = 8
# The axis of losses reaches at least so far to both sides, as a share.
MIN_LOSS_SHOWN = 0.05
MIN_GAP_SHOWN = 0.1  # nats a token
MARKS = {Verdict.SAME: "✓", Verdict.WORSE: "✗", Verdict.CANNOT_TELL: "?"}
CSS_CLASSES = {
    Verdict.SAME: "same",
    Verdict.WORSE: "worse",
    Verdict.CANNOT_TELL: "open",
}


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled place on an axis."""

    x: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis from ``low`` to ``high``, drawn ``PLOT_WIDTH`` wide."""

    low: float
    high: float

    def x(self, value: float) -> float:
        """Return where a value lies, in pixels from the axis' left end; values beyond an end lie on it."""
        share = (value - self.low) / (self.high - self.low)
        return round(PLOT_WIDTH * min(max(share, 0.0), 1.0), 1)

    def ticks(self, *, unit: float) -> tuple[Tick, ...]:
        """Return ticks at round numbers; ``unit`` is the value that is written as 1."""
        step = _round_step((self.high - self.low) / unit) * unit
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return tuple(
            Tick(self.x(number * step), f"{number * step / unit:g}")
            for number in range(first, last + 1)
        )


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage of the verification, as the overview shows it."""

    name: str
    verdict: Verdict | None
    sentence: str
    took: str


@dataclass(frozen=True, slots=True)
class LossBar:
    """The interval of one class's loss. Places are in pixels."""

    label: str
    verdict: Verdict
    low_x: float
    high_x: float
    loss_x: float | None
    tasks: str
    words: str


@dataclass(frozen=True, slots=True)
class LossPlot:
    """Intervals of losses by class, and the tolerated loss."""

    bars: tuple[LossBar, ...]
    ticks: tuple[Tick, ...]
    zero_x: float
    tolerated_x: float
    tolerated: str


@dataclass(frozen=True, slots=True)
class GapBar:
    """A gap in one part of the texts. Its width is in pixels."""

    part: str
    width: float
    gap: str
    changed: str
    tokens: str


@dataclass(frozen=True, slots=True)
class GapPlot:
    """Gaps of one writer's texts, such as those by position."""

    title: str
    bars: tuple[GapBar, ...]


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """Times at one load, in milliseconds, and the candidate's as a multiple of the reference's."""

    streams: int
    reference_ttft: str
    candidate_ttft: str
    ttft_ratio: str
    reference_tpot: str
    candidate_tpot: str
    tpot_ratio: str


def write_report(verification: Verification) -> str:
    """Return the page as HTML. It loads nothing: style and plots are in it."""
    answers = verification.answers
    likelihood = verification.likelihood
    return _template().render(
        verification=verification,
        sentence=verdict_sentence(verification),
        next_step=next_step(verification),
        css_class=CSS_CLASSES[verification.verdict],
        stages=_stage_rows(verification),
        gap_plots=_gap_plots(likelihood) if likelihood is not None else (),
        loss_plot=_loss_plot(answers) if answers is not None else None,
        speed=_speed_rows(verification.speed) if verification.speed is not None else (),
        took=duration_words(verification.took_s),
        plot_width=PLOT_WIDTH,
        row_height=ROW_HEIGHT,
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("router.verification", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["css_class_of"] = CSS_CLASSES.__getitem__
    environment.globals["mark_of"] = MARKS.__getitem__
    return environment.get_template("report.html")


def _stage_rows(verification: Verification) -> tuple[StageRow, ...]:
    """Return the stages that were reached, in order."""
    stages = (
        ("Same model", verification.same_model),
        ("Likelihood", verification.likelihood),
        ("Answers", verification.answers),
        ("Speed", verification.speed),
    )
    return tuple(
        _stage_row(name, finding) for name, finding in stages if finding is not None
    )


def _stage_row(name: str, finding: StageFinding) -> StageRow:
    """Return a stage's row; speed has no verdict of its own."""
    verdict = None
    if not isinstance(finding, SpeedFinding):
        verdict = finding.verdict
    return StageRow(
        name, verdict, stage_sentence(finding), took=duration_words(finding.took_s)
    )


def _loss_plot(finding: AnswersFinding) -> LossPlot:
    comparisons = (finding.overall, *finding.by_class)
    shown = [comparison for comparison in comparisons if comparison.decisive]
    axis = _loss_axis(shown, finding.tolerated)
    return LossPlot(
        bars=tuple(_loss_bar(comparison, axis) for comparison in comparisons),
        ticks=axis.ticks(unit=0.01),
        zero_x=axis.x(0.0),
        tolerated_x=axis.x(finding.tolerated),
        tolerated=f"{100 * finding.tolerated:g}",
    )


def _loss_axis(comparisons: Iterable[AnswerComparison], tolerated: float) -> Axis:
    """Return an axis that holds the intervals of all comparisons, and the tolerated loss."""
    low = -MIN_LOSS_SHOWN
    high = max(MIN_LOSS_SHOWN, 2 * tolerated)
    for comparison in comparisons:
        low = min(low, comparison.low)
        high = max(high, comparison.high)
    return Axis(low, high)


def _loss_bar(comparison: AnswerComparison, axis: Axis) -> LossBar:
    label = "all"
    if comparison.prompt_class is not None:
        label = comparison.prompt_class.value.replace("_", " ")
    loss_x = None
    words = "no task tells anything"
    if comparison.loss is not None:
        loss_x = axis.x(comparison.loss)
        interval = interval_words(comparison.low, comparison.high)
        words = f"{loss_words(comparison)} ({interval})"
    return LossBar(
        label=label,
        verdict=comparison.verdict,
        low_x=axis.x(comparison.low),
        high_x=axis.x(comparison.high),
        loss_x=loss_x,
        tasks=count_words(tasks_compared(comparison), "task"),
        words=words,
    )


def _gap_plots(finding: LikelihoodFinding) -> tuple[GapPlot, ...]:
    """Return a plot for each direction and division of the texts that was measured."""
    everything = (*finding.by_position, *finding.by_kind, *finding.own)
    longest = max((gap.gap for gap in everything), default=0.0)
    axis = Axis(0.0, max(longest, MIN_GAP_SHOWN))
    plots = []
    for title, gaps in _divisions(finding):
        if gaps:
            plots.append(GapPlot(title, tuple(_gap_bar(gap, axis) for gap in gaps)))
    return tuple(plots)


def _divisions(finding: LikelihoodFinding) -> list[tuple[str, list[Gap]]]:
    """Return each group of gaps that is shown together, with its title."""
    divisions = []
    for what, gaps in (("position", finding.by_position), ("kind", finding.by_kind)):
        by_reference = [gap for gap in gaps if gap.writer == "reference"]
        by_candidate = [gap for gap in gaps if gap.writer == "candidate"]
        divisions += [
            (f"The candidate reads the reference's texts, by {what}", by_reference),
            (f"The reference reads the candidate's texts, by {what}", by_candidate),
        ]
    own = [gap.model_copy(update={"part": f"{gap.writer}"}) for gap in finding.own]
    return [*divisions, ("Each engine reads its own texts", own)]


def _gap_bar(gap: Gap, axis: Axis) -> GapBar:
    return GapBar(
        part=gap.part,
        width=axis.x(gap.gap),
        gap=f"{gap.gap:.3f}",
        changed=of_100(gap.changed),
        tokens=f"{gap.tokens:,}",
    )


def _speed_rows(finding: SpeedFinding) -> Sequence[SpeedRow]:
    return [
        SpeedRow(
            streams=load.streams,
            reference_ttft=f"{load.reference_ttft_ms:,.0f}",
            candidate_ttft=f"{load.candidate_ttft_ms:,.0f}",
            ttft_ratio=_ratio(load.candidate_ttft_ms, load.reference_ttft_ms),
            reference_tpot=f"{load.reference_tpot_ms:,.1f}",
            candidate_tpot=f"{load.candidate_tpot_ms:,.1f}",
            tpot_ratio=_ratio(load.candidate_tpot_ms, load.reference_tpot_ms),
        )
        for load in finding.loads
    ]


def _ratio(value: float, reference: float) -> str:
    """Return how many times the reference's time the candidate takes; "-": the reference's was not measurable."""
    if reference <= 0:
        return "-"
    return f"{value / reference:.2f} times"


def _round_step(span: float) -> float:
    """Return a step of 1, 2 or 5 times a power of ten, of which at most ``MAX_TICKS`` lie in a span above 0."""
    power = 10.0 ** math.floor(math.log10(span / MAX_TICKS))
    for factor in (1, 2, 5):
        if factor * power * MAX_TICKS >= span:
            return factor * power
    return 10 * power
