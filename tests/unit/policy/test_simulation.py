"""The simulation beside what really happened: a run on real engines, from its decision log.

``recorded.jsonl.gz`` is the log of ``benchmarks/predictions.py --auto``: SmolLM2-135M at three precisions on two shared CPU
cores, six minutes, a few requests a second at most, a burst of twelve, the router's own choice of tiers.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from router.policy.replay import Recording, differing, read_recording, seen, summarise
from router.policy.simulation import simulate

RECORDED = Path(__file__).with_name("recorded.jsonl.gz")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Read the log."""
    path = tmp_path_factory.mktemp("recorded") / "decisions.jsonl"
    path.write_bytes(gzip.decompress(RECORDED.read_bytes()))
    return read_recording(path)


def test_every_recorded_decision_comes_out_again(recording: Recording) -> None:
    """From the log alone, as the router made it then."""
    assert len(recording.decisions) > 150
    assert differing(recording) == []


def test_times_are_about_those_that_were_seen(recording: Recording) -> None:
    """Of all requests together, by the policy that was in force; medians within a fifth, none is refused."""
    real, simulated = summarise(seen(recording)), summarise(simulate(recording))
    assert (real.refused, simulated.refused) == (0, 0)
    assert simulated.ttft_p50 == pytest.approx(real.ttft_p50, rel=0.2)
    assert simulated.tpot_p50 == pytest.approx(real.tpot_p50, rel=0.2)
    assert simulated.ttft_p95 == pytest.approx(real.ttft_p95, rel=0.4)


def test_tiers_are_about_those_that_were_chosen(recording: Recording) -> None:
    """With the simulated fleet's own loads, decisions go as they went in most cases, and the mean loss is the same."""
    real, simulated = seen(recording), simulate(recording)
    same = sum(one.tier is other.tier for one, other in zip(real, simulated, strict=True))
    assert same / len(real) > 0.8
    assert summarise(simulated).mean_loss == pytest.approx(summarise(real).mean_loss, rel=0.15)
