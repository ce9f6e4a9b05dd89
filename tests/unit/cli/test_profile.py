"""``qarr profile``: what is refused before anything is measured, and how results are shown."""

from __future__ import annotations

import fcntl
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from classifier import PromptClass
from router.cli.profile import _print_latency, _print_quality
from router.policy.profiles import (
    Diagnosis,
    Fit,
    FitError,
    LatencyProfile,
    ModeCounts,
    ProfileError,
)
from tests.unit.cli.stub_router import qarr
from tests.unit.policy.made_profiles import counted, cut_counted, quality
from tiers.spec import TierName
from tiers.verification.thinking import ThinkingMode

FAST = TierName.FAST
NOW = datetime(2026, 5, 1, tzinfo=UTC)


def fit(**more: Any) -> Fit:
    usual: dict[str, Any] = {
        "tier": TierName.FAST,
        "ttft_base_ms": 30.0,
        "prefill_ms_per_token": 2.0,
        "ttft_steps": 1.5,
        "step_base_ms": 25.0,
        "step_ms_per_sequence": 6.0,
        "step_knee": 8,
        "step_ms_beyond_knee": 0.0,
        "contention": 0.4,
        "ttft_spread": 0.1,
        "tpot_spread": 0.1,
        "ttft_error": FitError(median=0.05, p95=0.2),
        "tpot_error": FitError(median=0.01, p95=0.04),
        "samples": 9,
    }
    return Fit(**usual | more)


def test_losses_are_shown_as_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Both flips beside the net; a kind of which no answer counts has none. Diagnoses follow, where there are any."""
    scored = Diagnosis(tokens=640, disagreement=0.1234, kl=0.05, regret=0.2)
    counts = (
        counted(FAST, 5, 1),
        counted(FAST, 0, of=0, kind=PromptClass.MATH).model_copy(
            update={"diagnosis": scored}
        ),
    )
    _print_quality(quality(*counts))
    head, _, chat, math, _, about, _, diagnosed = capsys.readouterr().out.splitlines()
    assert head == (
        "m, measured with made. Of the answers that precise or the tier gets right: worse, better, net."
    )
    assert chat.split() == [
        "chat",
        "moderate",
        "fast",
        "39",
        "of",
        "50",
        "40",
        "5",
        "1",
        "10.0",
    ]
    assert math.split()[-4:] == ["0", "0", "0", "-"]
    assert "not whether answers get worse" in about
    assert diagnosed.split() == [
        "math,",
        "moderate",
        "fast",
        "640",
        "12.3",
        "0.050",
        "0.200",
    ]


def test_cut_answers_have_a_column_and_a_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They say how many there were, and what to raise; the other mode has a table of its own."""
    other = ModeCounts(
        mode=ThinkingMode.OFF, think_tokens=0, counts=(counted(FAST, 9),)
    )
    partly_cut = counted(FAST, 5, 1).model_copy(update={"cut": 12})
    _print_quality(
        quality(
            partly_cut,
            cut_counted(FAST, 3, PromptClass.MATH),
            mode=ThinkingMode.ON,
            think_tokens=2048,
            other_mode=other,
        )
    )
    lines = capsys.readouterr().out.splitlines()
    _, mode, head, chat, math, sentence, _, other_mode, other_head, other_chat = lines
    assert mode == (
        "Thinking on, as this model does by default, with up to 2,048 tokens for thoughts:"
    )
    assert "cut" in head.split()
    assert chat.split()[-5:] == ["40", "12", "5", "1", "10.0"]
    assert math.split()[-6:] == ["0", "3", "0", "0", "not", "measured"]
    assert "15 of 65 (fast)" in sentence
    assert "--think-tokens 4096" in sentence
    assert other_mode.startswith("Thinking off, if a request asks for that")
    assert "cut" not in other_head.split()
    assert other_chat.split()[-4:] == ["40", "9", "0", "22.5"]


def test_fits_are_shown_as_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    """In milliseconds; the slower part beyond the knee only where there is one."""
    for knee, shown in ((0.0, False), (3.0, True)):
        fits = (fit(step_ms_beyond_knee=knee),)
        _print_latency(
            LatencyProfile(
                created=NOW,
                model="m",
                machine="a CPU",
                checkpoints={},
                fits=fits,
                samples=(),
            )
        )
        about, *rows = capsys.readouterr().out.splitlines()
        assert about == "m on a CPU; 0 requests. Times in milliseconds."
        text = "\n".join(rows)
        for part in (
            "30.0 + 2 x prompt",
            "25.0 + 6 x batch",
            "5 (p95 20)",
            "1 (p95 4)",
            "x 1.4",
        ):
            assert part in text
        assert ("(batch - 8)" in text) is shown


@pytest.mark.parametrize("kind", ["quality", "latency"])
def test_without_a_router_nothing_is_written(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QARR_POLICY__PROFILES", str(tmp_path))
    result = qarr("profile", kind, "--url", "http://127.0.0.1:9/")
    assert isinstance(result.exception, ProfileError)
    assert "http://127.0.0.1:9" in str(result.exception)
    assert not list(tmp_path.glob("*.json"))


def test_two_measurements_do_not_share_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QARR_POLICY__PROFILES", str(tmp_path))
    qarr("profile", "latency", "--url", "http://127.0.0.1:9")
    (lock,) = tmp_path.iterdir()
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        result = qarr("profile", "latency", "--url", "http://127.0.0.1:9")
    assert isinstance(result.exception, ProfileError)
    assert "127.0.0.1:9" not in str(result.exception)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("quality", "--parallel", "0"), "--parallel"),
        (("quality", "--think-tokens", "-1"), "--think-tokens"),
        (("latency", "--step", "0.1"), "--step"),
        (("latency", "--tier", "9"), "--tier"),
    ],
)
def test_options_have_bounds(args: tuple[str, ...], said: str) -> None:
    result = qarr("profile", *args)
    assert result.exit_code == 2
    assert said in result.stderr


def test_tasks_are_read_before_the_router_is_asked(tmp_path: Path) -> None:
    """A line of another form is named with its file."""
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "hi"}\n')
    result = qarr(
        "profile",
        "quality",
        "--tasks",
        str(tmp_path / "tasks.jsonl"),
        "--url",
        "http://127.0.0.1:9",
    )
    assert isinstance(result.exception, ProfileError)
    assert "tasks.jsonl" in str(result.exception)
