"""Quality measured on real engines, through the router, by the command that people run."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

from router.quality import load_profile
from tests.engine.conftest import QARR

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.conftest import Up

ASKED = ("Say hello.", "Why is the sky blue?", "Name a fruit.", "What is tea?", "Who are you?")


def test_quality_is_measured_and_taken_up_again(up: Up, tmp_path: Path) -> None:
    """Every tier is judged; the reference's own figures are the floor; a second run has nothing left to measure."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": text, "class": "chat"}) + "\n" for text in ASKED))
    command = [str(QARR), "profile", "quality", "--url", up.url, "--prompts", str(prompts), "--tokens", "6"]
    env = {**os.environ, "QARR_POLICY__PROFILES": str(tmp_path)}
    first, second = (
        subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False) for _ in range(2)
    )
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "15 of 15" in first.stderr
    assert "of 15" not in second.stderr
    profile = load_profile(next(tmp_path.glob("quality-*.json")))
    assert {t["tier"]: t["checkpoint_digest"] for t in up.tiers().values()} == profile.checkpoints
    fast, balanced, precise = profile.losses
    assert [loss.tier for loss in profile.losses] == ["fast", "balanced", "precise"]
    assert all(loss.prompts == len(ASKED) for loss in profile.losses)
    assert 0 <= precise.kl_mean.mean < min(fast.kl_mean.mean, balanced.kl_mean.mean) / 4
    assert precise.perplexity_ratio.mean == 1
    assert fast.kl_mean.low <= fast.kl_mean.mean <= fast.kl_mean.high
    page = next(tmp_path.glob("quality-*.html")).read_text("utf-8")
    assert "awq-int4" in page


def test_errors_say_what_to_do(up: Up, tmp_path: Path) -> None:
    """No router, or prompts that are none: one sentence and status 2."""
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"prompt": "x"}\n')
    for options, says in (
        (["--url", "http://127.0.0.1:9"], "'make up' starts one"),
        (["--url", up.url, "--prompts", str(wrong)], "line 1"),
    ):
        done = subprocess.run(
            [str(QARR), "profile", "quality", *options], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2
        assert says in done.stderr
        assert "Traceback" not in done.stderr
