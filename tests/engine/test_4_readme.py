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
from tests.unit.policy.written_logs import write

if TYPE_CHECKING:
    from tests.engine.conftest import Up

ROOT = Path(__file__).resolve().parents[2]


def _command(start: str, document: str = "README.md") -> str:
    text = (ROOT / document).read_text("utf-8")
    commands = re.findall(
        rf"^```bash\n({re.escape(start)}.*?)\n```", text, re.MULTILINE | re.DOTALL
    )
    assert len(commands) == 1, f"{start!r} stands {len(commands)} times in {document}"
    return str(commands[0])


def _run(command: str) -> str:
    process = subprocess.run(  # noqa: S602
        command,
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return process.stdout


def test_curl_streams_an_answer(up: Up) -> None:
    """The README's curl command streams text events and ends with done."""
    command = _command("curl -N").replace(
        "localhost:8080", up.url.removeprefix("http://")
    )
    answer = _run(command)
    assert answer.startswith('id: 1\ndata: {"text":')
    assert "event: done" in answer


def test_tiers_lists_the_fleet(up: Up) -> None:
    """The README's command lists each replica with its state."""
    shown = _run(f"{_command('.venv/bin/qarr tiers')} --url {up.url}")
    assert all(f"{tier}-0" in shown for tier in ("fast", "balanced", "precise"))
    assert shown.count(" ready ") == 3


@pytest.mark.usefixtures("model_store")
def test_classify_explains_a_prompt() -> None:
    """The classify command of docs/classifier.md, with ``--json``, prints the features for programs."""
    command = _command(".venv/bin/qarr classify", "docs/classifier.md")
    features = json.loads(_run(f"{command} --json"))
    assert features["class"] == "code"
    assert features["asks_for_code"] is True
    assert features["language"] == "sql"
    assert features["tokens_exact"] is True


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
    """Every make target that the documents name exists."""
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
    """The example prints the likeliest answer of the engine that served it."""
    (example,) = blocks("python", "README.md")
    code = example.replace("http://localhost:8080", up.url)
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    check_output(up, code, process.stdout)
