"""``qarr plan``: what a person sees, and what a program reads."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from router.policy.profiles import Fit, FitError, LatencyProfile, latency_name
from tests.unit.cli.stub_router import qarr
from tests.unit.tiers.sizing.test_architecture import CONFIGS
from tiers.errors import PlanError
from tiers.spec import STANDARD_TIERS

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

LLAMA = str(CONFIGS / "llama-3.1-8b.json")


@pytest.fixture(autouse=True)
def _no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QARR_CACHE_DIR", str(tmp_path))


def plan(*args: str) -> str:
    done: Result = qarr("plan", *args)
    if done.exception is not None:
        raise done.exception
    return done.stdout


def read(*args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(*args, "--json"))
    return found


def test_a_table_and_its_reasons() -> None:
    """It names the model, sizes, the GPUs for the load, what they cost, and that times are computed."""
    text = plan("--model", LLAMA, "--gpus", "3xH100", "--load", "40/s")
    assert "8.03 billion parameters" in text
    assert "H100; 40 requests/s, prompts of 800 and answers of 250 tokens" in text
    for cell in ("fast", "awq-int4", "5.7 GB", "balanced", "9.1 GB", "precise", "16.1 GB", "128 KiB", "alone"):
        assert cell in text
    assert "3 x H100, 11.97 USD an hour; serves" in text
    assert "speed: computed (roofline), not measured" in text
    assert "less engine time than everything on precise" in text


def test_json_has_the_same() -> None:
    found = read("--model", LLAMA, "--gpus", "2xH100", "--load", "40/s", "--prompt", "800", "--output", "250")
    assert (found["speed"], found["hardware"], found["shared"], found["available"]) == ("roofline", "H100", True, 2)
    assert [tier["tier"] for tier in found["tiers"]] == list(STANDARD_TIERS)
    for tier in found["tiers"]:
        assert tier["weights_bytes"] > 5e9
        assert tier["kv_bytes_per_token"] == 131_072
        assert tier["max_sequences"] > 0
        assert tier["replicas"] >= 1
        assert tier["cost_per_hour"] > 0
    assert found["cost_per_hour"] == pytest.approx(sum(tier["cost_per_hour"] for tier in found["tiers"]))


def test_too_few_gpus_are_told() -> None:
    text = plan("--model", LLAMA, "--gpus", "2xH100", "--load", "400/s")
    assert "there are 2 x H100; needed for 400 requests/s are" in text
    assert not read("--model", LLAMA, "--gpus", "2xH100", "--load", "400/s")["fits"]


@pytest.mark.parametrize("name", [path.stem for path in CONFIGS.glob("*.json")])
def test_every_published_model(name: str) -> None:
    """Each gets a table; a tier that does not fit says why."""
    text = plan("--model", str(CONFIGS / f"{name}.json"), "--gpus", "H100", "--load", "10/s")
    assert "requests/s, 80% busy" in text
    assert ("precise does not fit on 16 x H100" in text) == (name == "deepseek-v3")


@pytest.mark.parametrize(("load", "rate"), [("40/s", 40), ("0.5", 0.5), ("90/min", 1.5), ("7200/h", 2)])
def test_loads(load: str, rate: float) -> None:
    assert read("--model", LLAMA, "--gpus", "H100", "--load", load)["requests_per_s"] == rate


def test_shares_prices_and_kv(tmp_path: Path) -> None:
    """Shares add up to one whatever they are given as; an FP8 KV cache takes half."""
    prices = tmp_path / "prices.json"
    prices.write_text('{"currency": "EUR", "per_gpu_hour": {"H100": 1}}')
    found = read(
        *("--model", LLAMA, "--gpus", "H100", "--load", "1/s", "--shares", "fast=3,precise=1"),
        *("--prices", str(prices), "--kv-fp8", "--context", "8192", "--max-num-seqs", "8", "--tpot", "30"),
    )
    assert [tier["share"] for tier in found["tiers"]] == [0.75, 0.0, 0.25]
    assert [tier["kv_bytes_per_token"] for tier in found["tiers"]] == [65_536] * 3
    assert [tier["batch"] for tier in found["tiers"]] == [8] * 3
    assert found["cost_per_hour"] == 3


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--gpus", "2xTPU"), "no such kind of GPU; known are"),
        (("--gpus", "H100", "--load", "many"), "a rate above 0 is needed, as 40/s"),
        (("--gpus", "H100", "--load", "0/s"), "a rate above 0 is needed"),
        (("--gpus", "H100", "--load", "1.2.3/s"), "a rate above 0 is needed"),
        (("--gpus", "H100", "--shares", "best=1"), "tiers are fast, balanced, precise"),
        (("--gpus", "H100", "--shares", "fast=-1"), "must not be negative"),
        (("--gpus", "H100", "--shares", "fast=0"), "one of them must be above 0"),
        (("--gpus", "H100", "--context", "200000"), "takes 131072 tokens at most"),
        (("--gpus", "H100", "--context", "100"), "shorter than a mean prompt and answer"),
        (("--gpus", "H100", "--prices", "/none"), "the prices cannot be read"),
        (("--gpus", "1xL4", "--context", "130000"), "fast does not fit on 1 x L4"),
        (("--gpus", "H100", "--tpot", "1"), "cannot be kept"),
    ],
)
def test_faults_are_told(args: tuple[str, ...], said: str) -> None:
    with pytest.raises(PlanError) as error:
        plan("--model", LLAMA, *args)
    assert said in str(error.value)


def test_a_model_that_is_not_here() -> None:
    """The default model has no configuration before it is made."""
    with pytest.raises(PlanError, match="the default model, is not made yet: run 'qarr model prepare'"):
        plan("--gpus", "H100")


def test_a_measured_profile_comes_before_the_roofline(tmp_path: Path) -> None:
    off = FitError(median=0.1, p95=0.2)
    fits = tuple(
        Fit(
            tier=tier, ttft_base_ms=10, prefill_ms_per_token=0.05, ttft_steps=1, step_base_ms=10 + 5 * STANDARD_TIERS.index(tier),
            step_ms_per_sequence=0.1, step_knee=0, step_ms_beyond_knee=0, contention=0, ttft_spread=0.1, tpot_spread=0.1,
            ttft_error=off, tpot_error=off, samples=9,
        )
        for tier in STANDARD_TIERS
    )  # fmt: skip
    digests = dict.fromkeys(STANDARD_TIERS, "d")
    profile = LatencyProfile(
        model="m", created="2026-01-01T00:00:00Z", checkpoints=digests, machine="x", fits=fits, samples=()
    )
    path = tmp_path / latency_name(digests, "x")
    path.write_text(profile.model_dump_json())
    found = read("--model", LLAMA, "--gpus", "H100", "--max-num-seqs", "10", "--profile", str(path))
    assert found["speed"] == f"measured: {path}"
    assert [tier["tpot_ms"] for tier in found["tiers"]] == pytest.approx(
        [10 + 5 * n + 1 + 10 * 40 / 250 for n in range(3)]
    )
