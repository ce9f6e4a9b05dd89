"""How ``qarr verify`` shows its work and its findings on a terminal, and as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TextColumn,
)
from rich.table import Table
from rich.text import Text

from router.verification.findings import (
    AnswerComparison,
    AnswersFinding,
    SpeedFinding,
    Verification,
)
from router.verification.wording import (
    Stage,
    StageFinding,
    about,
    count_words,
    duration_words,
    mean_gap,
    next_step,
    of_100,
    stage_sentence,
    verdict_sentence,
)
from tiers.verification.findings import (
    EngineIdentity,
    Gap,
    LikelihoodFinding,
    Role,
    SameModelFinding,
    Verdict,
)

PIPED_WIDTH = 140
STYLES = {
    Verdict.SAME: "green",
    Verdict.WORSE: "bold red",
    Verdict.CANNOT_TELL: "yellow",
}
# Without a terminal, a line of progress is printed at most so often.
LINE_EVERY_S = 15.0
# After fewer steps nobody knows the pace: the first ones wait for engines to warm up.
STEPS_FOR_PACE = 5
WRITERS: tuple[Role, ...] = ("reference", "candidate")
SHOWN_FAULTS = 4  # so many faults of likelihood are shown
DIGITS = 2  # of gaps in nats


class ProgressView(Protocol):
    """Shows how far a stage is, on standard error."""

    def begin(self, stage: Stage, detail: str) -> None:
        """Show that a stage begins."""

    def advance(
        self, done: int, total: int | None, detail: str, remaining_s: float | None
    ) -> None:
        """Show how far it is.

        Args:
            done: Steps that are done.
            total: All steps; None: nobody knows how many there are.
            detail: What is done.
            remaining_s: About how long the rest takes, in seconds; None: as long for each step as the steps so far.
        """

    def end(self) -> None:
        """Take the stage's progress away."""


class BarProgress:
    """A bar with the remaining time, for a terminal. It is gone once the stage is done."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24, pulse_style="dim"),
            TextColumn("{task.fields[detail]}", markup=False),
            TextColumn("{task.fields[time]}", style="dim", markup=False),
            console=console,
            transient=True,
            refresh_per_second=2,
        )
        self._task: TaskID | None = None
        self._began_at = 0.0

    def begin(self, stage: Stage, detail: str) -> None:
        self._began_at = time.monotonic()
        self._task = self._progress.add_task(
            stage.value, total=None, detail=detail, time=""
        )
        self._progress.start()

    def advance(
        self,
        done: int,
        total: int | None,
        detail: str,
        remaining_s: float | None = None,
    ) -> None:
        assert self._task is not None
        spent_s = time.monotonic() - self._began_at
        self._progress.update(
            self._task,
            completed=done,
            total=total,
            detail=detail,
            time=remaining_words(spent_s, done, total, remaining_s),
        )

    def end(self) -> None:
        if self._task is None:
            return
        self._progress.stop()
        self._progress.remove_task(self._task)
        self._task = None


class LineProgress:
    """Plain lines now and then, for a file or a log."""

    def __init__(self, console: Console, every_s: float = LINE_EVERY_S) -> None:
        self._console = console
        self._every_s = every_s
        self._stage = Stage.SAME_MODEL
        self._began_at = 0.0
        self._next_line_at = 0.0

    def begin(self, stage: Stage, detail: str) -> None:
        self._stage = stage
        self._began_at = time.monotonic()
        self._next_line_at = self._began_at + self._every_s
        self._print(f"{stage.value}: {detail}")

    def advance(
        self,
        done: int,
        total: int | None,
        detail: str,
        remaining_s: float | None = None,
    ) -> None:
        now = time.monotonic()
        if now < self._next_line_at:
            return
        self._next_line_at = now + self._every_s
        spent_s = now - self._began_at
        facts = [
            detail,
            duration_words(spent_s),
            remaining_words(spent_s, done, total, remaining_s),
        ]
        self._print(f"{self._stage.value}: {', '.join(filter(None, facts))}")

    def end(self) -> None:
        """Print nothing: the stage's own line follows."""

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False)


def remaining_words(
    spent_s: float, done: int, total: int | None, remaining_s: float | None = None
) -> str:
    """Return about how long a stage still takes, as it was estimated or at its pace so far.

    It is empty while nobody knows, and once the stage is done.
    """
    if not total or done < STEPS_FOR_PACE or done >= total:
        return ""
    if remaining_s is None:
        remaining_s = spent_s * (total - done) / done
    return f"about {duration_words(remaining_s)} more"


def progress_for(console: Console) -> ProgressView:
    """Return a bar for a terminal, and plain lines for everything else."""
    if console.is_terminal:
        return BarProgress(console)
    return LineProgress(console)


def findings_console(*, as_json: bool) -> Console:
    """Return where findings are printed for people: standard error if standard output is for JSON."""
    stream_is_terminal = sys.stderr.isatty() if as_json else sys.stdout.isatty()
    width = None if stream_is_terminal else PIPED_WIDTH
    return Console(highlight=False, markup=False, width=width, stderr=as_json)


def engine_line(role: Role, identity: EngineIdentity) -> Text:
    """Return one line on who takes part."""
    facts = [
        identity.model,
        f"{identity.max_model_len:,} tokens of context",
    ]
    if identity.version is not None:
        facts.append(f"vLLM {identity.version}")
    if identity.kv_cache_dtype is not None:
        facts.append(f"KV cache {identity.kv_cache_dtype}")
    line = Text(f"{role:<10} ")
    line.append(identity.name, style="bold")
    line.append(f"  {', '.join(facts)}", style="dim")
    return line


def stage_line(stage: Stage, finding: StageFinding) -> RenderableType:
    """Return a stage's verdict, time and finding, as one line that wraps under its own text."""
    line = Table.grid(padding=(0, 2))
    line.add_column(width=10)
    line.add_column(width=11)
    line.add_column(width=12)
    line.add_column()
    verdict = Text("-", style="dim")
    if not isinstance(finding, SpeedFinding):
        verdict = verdict_text(finding.verdict)
    line.add_row(
        stage.value,
        verdict,
        Text(duration_words(finding.took_s), style="dim"),
        stage_sentence(finding),
    )
    return line


def verdict_text(verdict: Verdict) -> Text:
    return Text(verdict.value, style=STYLES[verdict])


def report(verification: Verification) -> Iterator[RenderableType]:
    """Yield the details of a verification: differences, tables, and what could not be checked."""
    yield from _differences(verification.same_model)
    if verification.likelihood is not None:
        yield from _likelihood(verification.likelihood)
    if verification.answers is not None:
        yield from _answers(verification.answers)
    if verification.speed is not None:
        yield from _titled("Speed, medians in ms", _speed(verification.speed))
    notes = list(_notes(verification))
    if notes:
        yield _title("Not checked or not measured")
        yield from map(_bullet, notes)


def last_line(verification: Verification) -> Text:
    """Return the verdict with its numbers, and what to do next."""
    line = Text(verdict_sentence(verification), style=STYLES[verification.verdict])
    line.append(". ")
    line.append(next_step(verification), style="not bold default")
    return line


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _bullet(text: str, style: str = "") -> RenderableType:
    """Return a text that hangs under a dash."""
    item = Table.grid(padding=(0, 1, 0, 0))
    item.add_row("-", Text(text, style=style))
    return item


def _titled(title: str, table: Table | None) -> Iterator[RenderableType]:
    """Yield a table under its title; nothing if there is no table."""
    if table is None:
        return
    yield _title(title)
    yield table


def _table(*columns: str) -> Table:
    """Return a table whose first column holds words and whose other columns hold numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _differences(finding: SameModelFinding) -> Iterator[RenderableType]:
    """Yield a block for each difference: who has what, and what it means."""
    if finding.differences:
        yield _title("What differs")
    for difference in finding.differences:
        style = STYLES[Verdict.WORSE] if difference.is_fault else "yellow"
        yield Text(difference.subject, style=style)
        sides = Table.grid(padding=(0, 2, 0, 0))
        sides.add_row(Text("  reference", style="dim"), Text(difference.reference))
        sides.add_row(Text("  candidate", style="dim"), Text(difference.candidate))
        yield sides
        yield Padding(Text(difference.explanation), (0, 0, 0, 2))


def _likelihood(finding: LikelihoodFinding) -> Iterator[RenderableType]:
    # the stage's own line has said the first
    further_faults = finding.faults[1:SHOWN_FAULTS]
    if further_faults:
        yield _title("Further faults of likelihood")
    for fault in further_faults:
        yield _bullet(fault, STYLES[Verdict.WORSE])
    hidden = len(finding.faults[SHOWN_FAULTS:])
    if hidden:
        yield _bullet(f"and {hidden} more of this kind")
    if not finding.by_position and not finding.by_kind:
        return
    yield _title("Likelihood of the words that the other engine has chosen")
    yield Text(
        "How much less likely the one that reads them finds them, in nats a token; and how many of 100 are not its first "
        "choice.",
        style="dim",
    )
    yield from _titled("By position in the answer", _gaps(finding.by_position))
    yield from _titled("By kind of text", _gaps(finding.by_kind, has_total=True))
    yield from _titled(
        "Each engine's own words, read again by itself", _gaps(finding.own)
    )


def _gaps(gaps: Sequence[Gap], *, has_total: bool = False) -> Table | None:
    """Return gaps by part, with a pair of columns for each writer whose words were scored."""
    if not gaps:
        return None
    writers = [
        writer for writer in WRITERS if any(gap.writer == writer for gap in gaps)
    ]
    columns = ["", "tokens"]
    for writer in writers:
        columns += [f"{writer}'s\nwords", "changed\nof 100"]
    table = _table(*columns)
    shown_gaps = list(gaps)
    if has_total:
        shown_gaps += _totals(gaps, writers)
    by_part: dict[str, dict[str, Gap]] = {}
    for gap in shown_gaps:
        by_part.setdefault(gap.part, {})[gap.writer] = gap
    for part, by_writer in by_part.items():
        cells: list[str] = []
        for writer in writers:
            cells += _gap_cells(by_writer.get(writer))
        tokens = sum(gap.tokens for gap in by_writer.values())
        table.add_row(part, f"{tokens:,}", *cells)
    return table


def _totals(gaps: Sequence[Gap], writers: Sequence[str]) -> list[Gap]:
    """Return the mean over all parts for each writer."""
    return [
        mean_gap([gap for gap in gaps if gap.writer == writer]) for writer in writers
    ]


def _gap_cells(gap: Gap | None) -> list[str]:
    if gap is None or not gap.tokens:
        return ["-", "-"]
    return [f"{gap.gap:.{DIGITS}f}", of_100(gap.changed)]


def _answers(finding: AnswersFinding) -> Iterator[RenderableType]:
    yield _title("Answers")
    yield Text(
        f"Lost, of 100 that at least one engine gets right (below 0: gained). The ranges hold at "
        f"{100 * finding.confidence:g} % confidence. {100 * finding.tolerated:g} lost answers are tolerated.",
        style="dim",
    )
    table = _table(
        "",
        "both\nright",
        "\nworse",
        "\nbetter",
        "both\nwrong",
        "lost\nof 100",
        "\nverdict",
        "more tasks\nneeded",
    )
    for comparison in finding.by_class:
        table.add_row(*_comparison_cells(comparison))
    if len(finding.by_class) != 1:
        table.add_row(*_comparison_cells(finding.overall))
    yield table


def _comparison_cells(comparison: AnswerComparison) -> list[str | Text]:
    name = "all"
    if comparison.prompt_class is not None:
        name = comparison.prompt_class.value
    tasks_needed = "-"
    if comparison.tasks_needed is not None:
        tasks_needed = f"{about(comparison.tasks_needed):,}"
    return [
        name,
        f"{comparison.both_right:,}",
        f"{comparison.worse:,}",
        f"{comparison.better:,}",
        f"{comparison.both_wrong:,}",
        _loss_cell(comparison),
        verdict_text(comparison.verdict),
        tasks_needed,
    ]


def _loss_cell(comparison: AnswerComparison) -> str:
    """Return the range of the loss, and the loss itself where it decides: before that it says too much."""
    if comparison.loss is None:
        return "-"
    interval = f"{100 * comparison.low:.1f} to {100 * comparison.high:.1f}"
    if comparison.verdict is Verdict.CANNOT_TELL:
        return interval
    return f"{100 * comparison.loss:.1f} ({interval})"


def _speed(finding: SpeedFinding) -> Table | None:
    if not finding.loads:
        return None
    table = _table(
        "",
        "first token:\nreference",
        "\ncandidate",
        "further tokens:\nreference",
        "\ncandidate",
    )
    for load in finding.loads:
        table.add_row(
            count_words(load.streams, "stream"),
            f"{load.reference_ttft_ms:,.0f}",
            f"{load.candidate_ttft_ms:,.0f}",
            f"{load.reference_tpot_ms:,.1f}",
            f"{load.candidate_tpot_ms:,.1f}",
        )
    return table


def _notes(verification: Verification) -> Iterable[str]:
    """Yield what could not be checked or measured."""
    yield from verification.same_model.not_checked
    if verification.likelihood is not None:
        yield from verification.likelihood.not_measured
    if verification.answers is not None:
        yield from verification.answers.not_measured
    if verification.speed is not None:
        yield from verification.speed.not_measured


def as_json(verification: Verification) -> dict[str, Any]:
    """Return a verification for programs: all that was found, the verdicts, and the sentences that people read."""
    facts = verification.model_dump(mode="json")
    for name in ("same_model", "likelihood", "answers"):
        finding = getattr(verification, name)
        if finding is not None:
            facts[name]["verdict"] = finding.verdict.value
            facts[name]["sentence"] = stage_sentence(finding)
    if verification.answers is not None:
        facts["answers"] |= _comparisons_json(verification.answers)
    facts["verdict"] = verification.verdict.value
    facts["sentence"] = verdict_sentence(verification)
    facts["next_step"] = next_step(verification)
    return facts


def _comparisons_json(finding: AnswersFinding) -> dict[str, Any]:
    """Return the comparisons of answers, each with its loss."""
    return {
        "overall": _comparison_json(finding.overall),
        "by_class": [_comparison_json(comparison) for comparison in finding.by_class],
    }


def _comparison_json(comparison: AnswerComparison) -> dict[str, Any]:
    return {**comparison.model_dump(mode="json"), "loss": comparison.loss}
