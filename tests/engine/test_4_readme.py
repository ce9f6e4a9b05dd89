"""The commands of the README, docs/routing.md and docs/classifier.md, run as they stand there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engine.examples import blocks, check_output
from tests.unit.policy.test_replay import write

if TYPE_CHECKING:
    from tests.engine.conftest import Up

ROOT = Path(__file__).resolve().parents[2]


def _command(start: str, document: str = "README.md") -> str:
    text = (ROOT / document).read_text("utf-8")
    found = re.findall(
        rf"^```bash\n({re.escape(start)}.*?)\n```", text, re.MULTILINE | re.DOTALL
    )
    assert len(found) == 1, f"{start!r} stands {len(found)} times in {document}"
    return str(found[0])


def _run(command: str) -> str:
    done = subprocess.run(  # noqa: S602
        command,
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


def test_curl_streams_an_answer(up: Up) -> None:
    """The README's curl command streams text events and ends with done."""
    command = _command("curl -N").replace(
        "localhost:8080", up.url.removeprefix("http://")
    )
    answer = _run(command)
    assert answer.startswith('id: 1\ndata: {"text":')
    assert "event: done" in answer


def test_tiers_lists_the_fleet(up: Up) -> None:
    """The README's look at the replicas shows each one with its state."""
    shown = _run(f"{_command('.venv/bin/qarr tiers')} --url {up.url}")
    assert all(f"{tier}-0" in shown for tier in ("fast", "balanced", "precise"))
    assert shown.count(" ready ") == 3


@pytest.mark.usefixtures("model_store")
def test_classify_explains_a_prompt() -> None:
    """The classify command of docs/classifier.md, with ``--json``, prints the features for programs."""
    found = json.loads(
        _run(_command(".venv/bin/qarr classify", "docs/classifier.md") + " --json")
    )
    assert (found["class"], found["asks_for_code"], found["language"]) == (
        "code",
        True,
        "sql",
    )
    assert found["tokens_exact"] is True


def test_replay_compares_policies(tmp_path: Path) -> None:
    """The replay command of docs/routing.md makes the recorded decisions again and simulates another policy."""
    write(tmp_path / "decisions.jsonl", 20, gap_s=0.5)
    (tmp_path / "other.toml").write_text("[policy]\ngive_up = 'quality'\n")
    command = _command(
        ".venv/bin/python benchmarks/replay.py", "docs/routing.md"
    ).replace("decisions.jsonl", f"{tmp_path}/decisions.jsonl")
    shown = _run(command.replace("other.toml", f"{tmp_path}/other.toml"))
    assert "20 of 20 decisions come out as recorded" in shown
    assert "other, simulated" in shown


def test_make_targets_exist() -> None:
    """Every make target that the documents name is there."""
    targets = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    )
    for document in (
        "README.md",
        "CONTRIBUTING.md",
        "ARCHITECTURE.md",
        "docs/install.md",
    ):
        named = re.findall(
            r"(?:^|`)make ([a-z-]+)", (ROOT / document).read_text(), re.MULTILINE
        )
        assert set(named) <= targets, document


def test_the_sdk_example_answers(up: Up) -> None:
    """It prints what the engine that served it finds likeliest."""
    (example,) = blocks("python", "README.md")
    code = example.replace("http://localhost:8080", up.url)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    check_output(up, code, done.stdout)
