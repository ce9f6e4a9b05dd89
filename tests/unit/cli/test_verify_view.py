"""How a verification looks on a terminal of 80 columns, and how its progress looks in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from classifier import PromptClass
from router.cli.verify_view import (
    BarProgress,
    LineProgress,
    engine_line,
    last_line,
    progress_for,
    remaining_words,
    report,
    stage_line,
)
from router.verification.findings import Verification
from router.verification.wording import Stage
from tests.unit.verification.made_findings import (
    answers,
    comparison,
    difference,
    gap,
    identity,
    likelihood,
    same_model,
    speed,
    verification,
)
from tiers.verification.findings import Verdict

WIDTH = 80


def console_of(*, is_terminal: bool = False) -> Console:
    return Console(
        file=io.StringIO(),
        width=WIDTH,
        force_terminal=is_terminal,
        color_system="standard" if is_terminal else None,
        highlight=False,
    )


def text_on(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def shown(found: Verification) -> str:
    """Return a verification as a terminal without colour shows it."""
    console = console_of()
    for part in report(found):
        console.print(part)
    console.print(last_line(found))
    return text_on(console)


def test_nothing_is_wider_than_the_terminal() -> None:
    kinds = (
        gap(part="JSON and tool calls", gap=-0.123, tokens=12_345),
        gap(part="JSON and tool calls", writer="candidate", changed=1.0),
    )
    found = verification(
        same_model=same_model(difference(is_fault=False)),
        likelihood=likelihood(*kinds, by_position=kinds, own=kinds),
        speed=speed(),
    )
    lines = shown(found).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert not [line for line in lines if "…" in line]


def test_a_table_has_each_class_and_all_together() -> None:
    classes = (
        comparison(prompt_class=PromptClass.MATH),
        comparison(
            prompt_class=PromptClass.CODE,
            worse=1,
            better=1,
            low=-0.071,
            high=0.082,
            verdict=Verdict.CANNOT_TELL,
            tasks_needed=1269,
        ),
    )
    text = shown(verification(answers=answers(by_class=classes)))
    (math,) = [line for line in text.splitlines() if line.startswith("math")]
    # the table of likelihood, which comes first, has these rows too
    code = [line for line in text.splitlines() if line.startswith("code")][-1]
    total = [line for line in text.splitlines() if line.startswith("all")][-1]
    assert math.split() == [
        *("math", "180", "15", "3", "16"),
        *("6.1", "(3.2", "to", "9.8)", "worse", "-"),
    ]
    assert total.split()[1:] == math.split()[1:]
    assert code.split()[-6:] == ["-7.1", "to", "8.2", "cannot", "tell", "1,300"]


def test_a_range_that_decides_nothing_has_no_middle() -> None:
    """No "0.0 ± 5.2": it reads as if the engines were equal."""
    unknown = comparison(
        worse=0, better=0, low=-0.052, high=0.052, verdict=Verdict.CANNOT_TELL
    )
    text = shown(verification(answers=answers(unknown)))
    assert "-5.2 to 5.2" in text
    assert "0.0 (" not in text


def test_all_faults_are_there_and_the_last_line_says_what_to_do() -> None:
    found = verification(
        same_model=same_model(difference("tokenizer"), difference("chat template")),
        likelihood=None,
        answers=None,
    )
    text = shown(found)
    assert text.index("tokenizer\n") < text.index("chat template\n")
    assert "reference  one" in text
    assert "candidate  another" in text
    last_paragraph = " ".join(text[text.index("worse: ") :].split())
    assert last_paragraph.startswith("worse: not the same model: tokenizer and chat")
    assert last_paragraph.endswith("Serve both with the same tokenizer.")


def test_what_was_not_measured_is_listed() -> None:
    found = verification(
        answers=answers(not_measured=("Cut while thinking: 12 tasks.",)),
        likelihood=likelihood(not_measured=("The reference is saved.",)),
    )
    text = shown(found)
    assert "- Cut while thinking: 12 tasks." in text
    assert "- The reference is saved." in text


def test_a_stage_has_one_line() -> None:
    console = console_of()
    console.print(stage_line(Stage.SAME_MODEL, same_model()))
    assert text_on(console).split("  ")[0] == "same model"
    assert "1.0 s" in text_on(console)
    assert text_on(console).count("\n") == 1


def test_an_engine_is_introduced_with_what_it_tells() -> None:
    known = identity(version="0.32.0", kv_cache_dtype="fp8")
    assert str(engine_line("reference", known)) == (
        "reference  http://reference:8000  m, 8,192 tokens of context, vLLM 0.32.0, KV cache fp8"
    )
    assert str(engine_line("candidate", identity("fast"))) == (
        "candidate  fast  m, 8,192 tokens of context"
    )


def test_a_log_gets_plain_lines_now_and_then() -> None:
    console = console_of()
    progress = LineProgress(console, every_s=0.0)
    progress.begin(Stage.ANSWERS, "both engines answer tasks")
    progress.advance(10, 40, "10 tasks: 1 worse, 0 better")
    progress.end()
    first, second = text_on(console).splitlines()
    assert first == "answers: both engines answer tasks"
    assert second.startswith("answers: 10 tasks: 1 worse, 0 better, ")
    assert second.endswith(" more")
    assert "\x1b" not in text_on(console)


def test_a_log_is_not_flooded() -> None:
    console = console_of()
    progress = LineProgress(console, every_s=3600.0)
    progress.begin(Stage.ANSWERS, "both engines answer tasks")
    for done in range(100):
        progress.advance(done, 100, f"{done} tasks")
    assert text_on(console).count("\n") == 1


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    console = console_of(is_terminal=True)
    progress = progress_for(console)
    assert isinstance(progress, BarProgress)
    for stage in (Stage.LIKELIHOOD, Stage.ANSWERS):
        progress.begin(stage, "work")
        progress.advance(1, 2, "1 of 2")
        progress.end()
    progress.end()
    assert "1 of 2" in text_on(console)
    # the last thing written erases the bar's line
    assert text_on(console).endswith("\x1b[2K")


@pytest.mark.parametrize(
    ("done", "total", "said"),
    [
        (0, 10, ""),
        (5, None, ""),
        (4, 8, ""),  # too few to know the pace
        (5, 10, "about 20 s more"),
        (10, 10, ""),
        (12, 10, ""),
    ],
)
def test_remaining_time_is_that_of_the_pace_so_far(
    done: int, total: int | None, said: str
) -> None:
    assert remaining_words(20.0, done, total) == said


def test_an_estimate_of_the_remaining_time_counts_more_than_the_pace() -> None:
    """The tasks that are left may be longer than those before them."""
    console = console_of()
    progress = LineProgress(console, every_s=0.0)
    progress.begin(Stage.ANSWERS, "both engines answer tasks")
    progress.advance(10, 20, "10 tasks", 100.0)
    assert text_on(console).splitlines()[1].endswith("about 1 min 40 s more")
