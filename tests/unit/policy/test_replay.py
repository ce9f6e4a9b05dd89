"""Decisions are reproducible from their log alone, by ``benchmarks/replay.py``, which also simulates another policy."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from router.policy.decide import decide
from router.policy.decision_log import (
    DecisionLog,
    DecisionRecord,
    digest_of,
    read_log,
)
from router.policy.profiles import ProfileError
from router.section import PROJECT
from tests.fakes.engine import Behaviour
from tests.unit.policy.fleets import FAST, MEASURED, PROFILED, fleet, query
from tests.unit.router_stack import router_stack
from tiers.spec import STANDARD_TIERS
from tiers.speed import ReplicaLoad

if TYPE_CHECKING:
    from pathlib import Path

from tests.unit.policy.written_logs import write

REQUESTS = 1000
PROMPTS = (
    "Hello, how are you?",
    "Write a Python function that reverses a list.",
    "What is 17 * 23? Think step by step.",
    "Schreib mir bitte eine Liste von Städten in Deutschland.",
    "zxcv qwer",
)


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(PROJECT / "benchmarks")
    return importlib.import_module("recording")


def replay(*arguments: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "benchmarks/replay.py", *map(str, arguments)]
    return subprocess.run(
        argv, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.anyio
async def test_a_thousand_decisions_come_out_again(tmp_path: Path, logs: Any) -> None:
    """Requests of all kinds through a router under changing load: made again from the file, every tier is the same."""
    path = tmp_path / "decisions.jsonl"
    source = random.Random(4)
    overrides = {
        "telemetry": {"decision_log": str(path)},
        "policy": {"max_slowdown": 1.01},
        "tiers": {name: {"max_in_flight": 3} for name in STANDARD_TIERS},
    }
    slow = {
        name: Behaviour(delay_s=0.002 * (3 - STANDARD_TIERS.index(name)))
        for name in STANDARD_TIERS
    }
    async with router_stack(tmp_path, overrides, **slow) as stack:
        limit = asyncio.Semaphore(12)

        async def one() -> int:
            body = {
                "prompt": source.choice(PROMPTS) * source.choice((1, 1, 40)),
                "tier": source.choice(("auto", "auto", "fast", "balanced", "precise")),
                "tier_policy": source.choice(("prefer", "prefer", "require")),
                "max_tokens": source.choice((5, 50, 1500)),
                "sla": source.choice(
                    (
                        {},
                        {},
                        {"ttft_ms": 10},
                        {"tpot_ms": 3},
                        {"max_quality_loss": 0.01},
                    )
                ),
                "stream": source.random() < 0.5,
            }
            async with limit:
                return (
                    await stack.client.post(f"{stack.url}/generate", json=body)
                ).status_code

        statuses = await asyncio.gather(*(one() for _ in range(REQUESTS)))
    assert set(statuses) <= {200, 422, 503}
    recording = logs.read_recording(path)
    assert len(recording.decisions) == REQUESTS
    assert {r.tier for r in recording.decisions} == {*STANDARD_TIERS, None}
    assert logs.differing(recording) == []
    assert len(recording.outcomes) == statuses.count(200)
    assert not any(prompt[:12] in path.read_text("utf-8") for prompt in PROMPTS)
    shown = replay(path)
    assert shown.returncode == 0
    assert shown.stdout == f"{REQUESTS} of {REQUESTS} decisions come out as recorded\n"


def test_a_decision_that_was_tampered_with_is_found(tmp_path: Path, logs: Any) -> None:
    """A record whose tier does not follow from it is named, and the command fails."""
    path = tmp_path / "log.jsonl"
    write(path, 3)
    lines = path.read_text().splitlines()
    record = json.loads(lines[3])  # policy, decision, outcome, decision
    record["tier"] = "balanced"
    path.write_text("\n".join([*lines[:3], json.dumps(record), *lines[4:]]) + "\n")
    assert [r.request_id for r in logs.differing(logs.read_recording(path))] == ["1"]
    shown = replay(path)
    assert shown.returncode == 1
    assert "otherwise: 1, recorded balanced" in shown.stdout


def test_the_command_compares_policies(tmp_path: Path) -> None:
    """One chat after another: what was seen, and by the speed model; without any loss allowed, all go to precise.

    TTFT is 20 ms and 1 ms for each of 20 tokens, TPOT 25 ms; an answer has 40 tokens: 5 x (20 + 39 x 25) ms of engine time.
    """
    write(tmp_path / "log", 5, gap_s=10)
    (tmp_path / "other.toml").write_text("[policy.max_loss]\nchat = 0.0\n")
    shown = replay(tmp_path / "log", "--policy", tmp_path / "other.toml")
    assert shown.returncode == 0, shown.stderr
    rows = {
        name.strip(): rest.split()
        for name, _, rest in (
            line.partition("  ") for line in shown.stdout.splitlines()
        )
    }
    # shares of three tiers, SLA met, refused, loss, TTFT p50 and p95, TPOT p50 and p95, engine seconds
    assert rows["recorded, as seen"] == [
        "100%",
        "0%",
        "0%",
        "100.0%",
        "0",
        "0.080",
        "45",
        "45",
        "26.0",
        "26.0",
    ]
    assert rows["recorded, simulated"] == [
        "100%",
        "0%",
        "0%",
        "100.0%",
        "0",
        "0.080",
        "40",
        "40",
        "25.0",
        "25.0",
        "5.0",
    ]
    assert rows["other, simulated"][:6] == ["0%", "0%", "100%", "100.0%", "0", "0.000"]


def test_files_are_rotated_with_their_policy(tmp_path: Path, logs: Any) -> None:
    """Every file of a rotated log can be read by itself; only so many are kept."""
    log = DecisionLog(tmp_path / "log", 20_000)
    snapshot = fleet(speeds=MEASURED, loads={FAST: ReplicaLoad(1)})
    for number in range(40):
        log.decided(
            str(number), decide(query(), snapshot, PROFILED), snapshot, PROFILED
        )
    log.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 4
    for file in files:
        first = next(iter(read_log(file)))
        assert getattr(first, "id", None) == digest_of(PROFILED)
        assert logs.differing(logs.read_recording(file)) == []


def test_what_is_no_log_is_an_error(tmp_path: Path, logs: Any) -> None:
    """The error names the line; a last line that was cut off by a crash is no error."""
    path = tmp_path / "log"
    write(path, 2)
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[1][:40])
    assert len(logs.read_recording(path).decisions) == 2
    path.write_text('{"kind": "decision"}\n' + whole)
    with pytest.raises(ProfileError, match="line 1 is no record of decisions"):
        logs.read_recording(path)
    with pytest.raises(ProfileError, match="cannot be read"):
        logs.read_recording(tmp_path / "none")
    decisions = tuple(
        r for r in read_log_of(whole, tmp_path) if isinstance(r, DecisionRecord)
    )
    with pytest.raises(ProfileError, match="is not in the log"):
        logs.differing(logs.Recording({}, decisions, {}))


def read_log_of(text: str, folder: Path) -> list[object]:
    path = folder / "text"
    path.write_text(text)
    return list(read_log(path))
