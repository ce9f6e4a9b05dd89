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
    process = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        timeout=100,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    result = json.loads(process.stdout)
    assert result["charged_engine_us"] == result["ledger_engine_us"] > 0
    assert result["served"] + result["refused"] == 4000
    assert min(result["served"], result["refused"], result["looks_during_the_run"]) > 0


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_the_committed_run_of_100_000_was_exact(kind: str) -> None:
    result = json.loads((RESULTS / f"budgets_{kind}.json").read_text("utf-8"))
    assert result["requests"] == 100_000
    assert result["budgets_exceeded"] == []
    assert result["sums_differ"] == []
    assert result["charged_engine_us"] == result["ledger_engine_us"] > 0
