"""The simulation of error rates uses the test's own arithmetic, and its committed result is of the test as it is now."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from router.verification.sequential import BETS, Claim, log_capital

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("sequential_errors")


@pytest.mark.parametrize("claim", list(Claim))
def test_the_simulated_capital_is_that_of_the_test(
    simulation: Any, claim: Claim
) -> None:
    outcomes = simulation.Outcomes(
        worse=np.array([[0.0, 3.0]]),
        both_right=np.array([[10.0, 40.0]]),
        better=np.array([[0.0, 2.0]]),
    )
    capital = np.log(outcomes.capital(claim, 0.02))[0]
    first = log_capital(claim, 0.02, worse=0, both_right=10, better=0)
    second = log_capital(claim, 0.02, worse=3, both_right=40, better=2)
    assert capital[0] == pytest.approx(first)
    assert capital[1] == pytest.approx(second)


def test_simulated_runs_have_the_true_shares(simulation: Any) -> None:
    truth = simulation.Truth(loss=0.1, better=0.2, both_wrong=0.25)
    is_active = np.full(200, fill_value=True)
    last = None
    for _, outcomes in simulation.blocks(truth, is_active, np.random.default_rng(1)):
        last = outcomes
    assert last is not None
    worse = last.worse[:, -1].mean()
    better = last.better[:, -1].mean()
    both_right = last.both_right[:, -1].mean()
    decisive = worse + better + both_right
    assert decisive / simulation.MAX_TASKS == pytest.approx(0.75, abs=0.01)
    assert worse / decisive == pytest.approx(0.3, abs=0.01)
    assert better / decisive == pytest.approx(0.2, abs=0.01)


def test_the_committed_result_is_within_what_is_promised(simulation: Any) -> None:
    result = json.loads(simulation.RESULT.read_text("utf-8"))
    allowed = 1 - result["confidence"]
    assert result["bets"] == list(BETS)
    assert result["runs"] >= 10_000
    assert {row["loss"] for row in result["rows"]} == set(simulation.LOSSES)
    assert max(row["wrong"] for row in result["rows"]) < allowed
    assert max(row["excluded"] for row in result["intervals"]) < allowed
