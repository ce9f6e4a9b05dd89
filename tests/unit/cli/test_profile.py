"""``qarr profile``: what is refused before anything is measured, and how results are shown."""

from __future__ import annotations

import fcntl
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from router.cli.profile import _Log, _show, _show_latency
from router.policy.profiles import Fit, FitError, Interval, LatencyProfile, Loss, ProfileError, QualityProfile
from tests.unit.cli.stub_router import qarr
from tiers.spec import TierName

if TYPE_CHECKING:
    from pathlib import Path

from classifier import PromptClass

NOW = datetime(2026, 5, 1, tzinfo=UTC)


def loss(prompts: int, **more: Any) -> Loss:
    rough = Interval(mean=0.1234, low=0.1, high=0.25)
    plain = {"top1_disagreement": rough, "kl_mean": rough, "kl_p95": rough, "perplexity_ratio": rough}
    return Loss(
        prompt_class=PromptClass.CHAT,
        tier=TierName.FAST,
        prompts=prompts,
        tokens=640,
        first_divergence=1,
        never_diverged=0,
        **plain,
        **more,
    )


def quality(*losses: Loss) -> QualityProfile:
    return QualityProfile(created=NOW, model="m", checkpoints={}, answer_tokens=64, top_k=5, prompts="p", losses=losses)


def fit(**more: Any) -> Fit:
    plain: dict[str, Any] = {
        "tier": TierName.FAST, "ttft_base_ms": 30.0, "prefill_ms_per_token": 2.0, "ttft_steps": 1.5, "step_base_ms": 25.0,
        "step_ms_per_sequence": 6.0, "step_knee": 8, "step_ms_beyond_knee": 0.0, "contention": 0.4, "ttft_spread": 0.1,
        "tpot_spread": 0.1, "ttft_error": FitError(median=0.05, p95=0.2), "tpot_error": FitError(median=0.01, p95=0.04), "samples": 9,
    }  # fmt: skip
    return Fit(**plain | more)


def test_losses_are_shown_with_their_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    """The share of tokens in percent; an interval of too few prompts is not shown as one."""
    _show(quality(loss(40), loss(1)))
    head, sure, unsure = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["class", "tier", "tokens"]
    assert sure.split()[:6] == ["chat", "fast", "640", "12.3", "(10.0", "to"]
    assert "0.123 (0.100 to 0.250)" in sure
    assert unsure.count("(too few prompts)") == 4


def test_fits_are_shown_as_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    """In milliseconds; the slower part beyond the knee only where there is one."""
    for knee, shown in ((0.0, False), (3.0, True)):
        fits = (fit(step_ms_beyond_knee=knee),)
        _show_latency(LatencyProfile(created=NOW, model="m", machine="a CPU", checkpoints={}, fits=fits, samples=()))
        about, *rows = capsys.readouterr().out.splitlines()
        assert about == "m on a CPU; 0 requests. Times in milliseconds."
        text = "\n".join(rows)
        for part in ("30.0 + 2 x prompt", "25.0 + 6 x batch", "5 (p95 20)", "1 (p95 4)", "x 1.4"):
            assert part in text
        assert ("(batch - 8)" in text) is shown


def test_progress_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard error, whatever brackets it has."""
    log = _Log()
    for line in ("step [1]", "step [1]", "step [2]", "step [1]"):
        log(line)
    captured = capsys.readouterr()
    assert [line.partition(" s ")[2] for line in captured.err.splitlines()] == ["step [1]", "step [2]", "step [1]"]
    assert captured.out == ""


@pytest.mark.parametrize("kind", ["quality", "latency"])
def test_without_a_router_nothing_is_written(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the address; no profile appears."""
    monkeypatch.setenv("QARR_POLICY__PROFILES", str(tmp_path))
    done = qarr("profile", kind, "--url", "http://127.0.0.1:9/")
    assert isinstance(done.exception, ProfileError)
    assert "http://127.0.0.1:9" in str(done.exception)
    assert not list(tmp_path.glob("*.json"))


def test_two_measurements_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one ends before it asks anything."""
    monkeypatch.setenv("QARR_POLICY__PROFILES", str(tmp_path))
    qarr("profile", "latency", "--url", "http://127.0.0.1:9")
    (lock,) = tmp_path.iterdir()
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = qarr("profile", "latency", "--url", "http://127.0.0.1:9")
    assert isinstance(done.exception, ProfileError)
    assert "127.0.0.1:9" not in str(done.exception)


@pytest.mark.parametrize(
    ("args", "said"), [(("quality", "--tokens", "0"), "--tokens"), (("latency", "--step", "0.1"), "--step"), (("latency", "--tier", "9"), "--tier")]
)  # fmt: skip
def test_options_have_bounds(args: tuple[str, ...], said: str) -> None:
    done = qarr("profile", *args)
    assert (done.exit_code, said in done.stderr) == (2, True)


def test_prompts_are_read_before_the_router_is_asked(tmp_path: Path) -> None:
    """A line of another form is named with its file."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hi"}\n')
    done = qarr("profile", "quality", "--prompts", str(tmp_path / "prompts.jsonl"), "--url", "http://127.0.0.1:9")
    assert isinstance(done.exception, ProfileError)
    assert "prompts.jsonl" in str(done.exception)
