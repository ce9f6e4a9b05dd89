"""The benchmark of budgets, with fewer requests: two processes share a ledger, and neither money nor time is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from router.section import PROJECT
from tests.conftest import RedisServer

RESULTS = PROJECT / "benchmarks/results"


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_two_processes_keep_budgets_to_the_millionth(
    kind: str, redis_server: RedisServer
) -> None:
    """No budget is ever exceeded, and the ledger is the sum of all charges."""
    redis = ["--redis", redis_server.url] if kind == "redis" else []
    command = [
        sys.executable,
        str(PROJECT / "benchmarks/budgets.py"),
        "--requests",
        "4000",
        *redis,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["charged_engine_us"] == found["ledger_engine_us"] > 0
    assert found["served"] + found["refused"] == 4000
    assert min(found["served"], found["refused"], found["looks_during_the_run"]) > 0


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_the_committed_run_of_100_000_was_exact(kind: str) -> None:
    found = json.loads((RESULTS / f"budgets_{kind}.json").read_text("utf-8"))
    assert (found["requests"], found["budgets_exceeded"], found["sums_differ"]) == (
        100_000,
        [],
        [],
    )
    assert found["charged_engine_us"] == found["ledger_engine_us"] > 0
