"""``qarr plan``: what a person sees, and what a program reads."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from classifier import Complexity, PromptClass, PromptFeatures
from router.cli.plan import _mix, tiers_for_gpus
from router.policy.decide import decide
from router.policy.decision import PolicyParameters, Query
from router.policy.decision_log import DecisionLog
from router.policy.profiles import Fit, FitError, LatencyProfile, latency_name
from router.settings import load_settings
from tests.unit.cli.stub_router import qarr
from tests.unit.own_router import QARR
from tests.unit.tiers.sizing.test_architecture import CONFIGS
from tiers.errors import PlanError
from tiers.snapshot import FleetSnapshot
from tiers.spec import STANDARD_TIERS, TemplateTokens

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

LLAMA = str(CONFIGS / "llama-3.1-8b.json")


@pytest.fixture(autouse=True)
def _no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QARR_CACHE_DIR", str(tmp_path))


def plan(*args: str) -> str:
    done: Result = qarr("plan", *args)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout


def read(*args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(*args, "--json"))
    return found


def test_a_plan_and_what_it_is_compared_with() -> None:
    """It names the model, the engines, the fleets, where figures are from, and says in a sentence what pays."""
    text = plan("--model", LLAMA, "--gpus", "3xH100", "--load", "40/s")
    assert "8.03 billion parameters" in text
    assert "3 x H100; 40 requests/s, prompts of 800 and answers of 250 tokens" in text
    cells = "losses: published|awq-int4|5.7 GB|9.1 GB|16.1 GB|128 KiB|planned|fast alone|precise alone|as set"
    assert not [cell for cell in cells.split("|") if cell not in text]
    assert "speed: computed (roofline), not measured" in text
    assert "BF16 alone is best here: it costs 7.98 USD an hour and loses none" in text


def test_several_precisions_pay_where_traffic_has_a_peak() -> None:
    """70B in BF16 with 4 bits for the peak costs less than BF16 alone, and keeps a budget that FP8 alone does not."""
    text = plan(
        *("--model", str(CONFIGS / "llama-3.3-70b.json"), "--gpus", "H100", "--load", "6/s"),
        *("--mix", "coding", "--loss", "0.3", "--day", "0.3,0.5,1,2.2"),
    )
    flat = " ".join(text.split())
    assert "1 x 4 bits and 1 x BF16 cost 19.95 USD an hour and lose none" in flat
    assert "FP8 alone costs 15.96 USD an hour and loses 0.45 answers of 100, over the budget" in flat
    assert "6 requests/s in the mean and 13.2 at the peak" in flat
    assert "planned 1 fast on 1 x H100, 1 precise on 4 x H100" in flat


def test_two_kinds_of_gpus_and_settings(tmp_path: Path) -> None:
    """GPUs of both kinds are used; the tiers are written as settings that the router takes."""
    prices, file = tmp_path / "prices.json", tmp_path / "settings.toml"
    prices.write_text('{"currency": "EUR", "per_gpu_hour": {"A100": 2, "L4": 0.5}}')
    found = read(
        *("--model", LLAMA, "--gpus", "2xA100,8xL4", "--load", "24/s", "--mix", "coding", "--loss", "0.2"),
        *("--prices", str(prices), "--write", str(file)),
    )
    planned = found["plan"]
    assert set(planned["gpus"]) == {"A100", "L4"}
    assert planned["answers_lost"] <= 0.002
    assert planned["cost_per_hour"] == pytest.approx(planned["gpus"]["A100"] * 2 + planned["gpus"]["L4"] * 0.5)
    settings = load_settings(file)
    replicas = {tier: settings.tiers.of(tier).replicas for tier in STANDARD_TIERS}
    assert replicas == {
        tier: sum(each["replicas"] for each in planned["engines"] if each["tier"] == tier) for tier in STANDARD_TIERS
    }


def test_engines_of_a_tier_have_one_size() -> None:
    """Its settings hold one. The cheapest fleet of any sizes had BF16 on two GPUs and on four."""
    planned = read("--model", LLAMA, "--gpus", "8xL4", "--load", "16/s", "--mix", "coding", "--loss", "0.2")["plan"]
    sizes = {(each["tier"], each["gpus_per_replica"]) for each in planned["engines"]}
    assert len(sizes) == len({tier for tier, _ in sizes}) > 1


@pytest.mark.parametrize(
    ("gpus", "model", "planned"),
    [
        ((1, "NVIDIA H100 80GB HBM3"), "llama-3.1-8b", "1 x BF16"),
        ((8, "NVIDIA H100 80GB HBM3"), "llama-3.3-70b", "2 x FP8 and 1 x BF16"),
        ((1, "NVIDIA H100 80GB HBM3"), "llama-3.3-70b", "1 x 4 bits"),
    ],
)
def test_what_up_starts_on_gpus(
    gpus: tuple[int, str], model: str, planned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what these GPUs carry, 80 % at least loss; where the settings name tiers, or there are no GPUs, nothing."""
    settings = load_settings(None, {"model": {"name": str(CONFIGS / f"{model}.json")}})
    assert tiers_for_gpus(settings) is None
    script = "\n".join(f"echo '{n}, {gpus[1]}, 81559, 81000'" for n in range(gpus[0]))
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = tiers_for_gpus(settings) or ({}, "")
    assert found[1] == planned
    used = load_settings(None, {"tiers": found[0]}).tiers
    assert sum(used.of(tier).replicas_here * used.of(tier).tensor_parallel for tier in STANDARD_TIERS) == gpus[0]
    assert tiers_for_gpus(load_settings(None, {"tiers": {"fast": {"replicas": 0}}})) is None


def test_gpus_without_a_price_are_counted() -> None:
    found = read("--model", LLAMA, "--gpus", "MI300X", "--load", "4/s")
    assert (found["currency"], found["plan"]["cost_per_million_tokens"]) == (None, None)
    assert ("costs 1 GPU" in found["verdict"], "no price of these GPUs" in found["notes"][0]) == (True, True)


def test_json_has_the_same() -> None:
    found = read("--model", LLAMA, "--gpus", "2xH100", "--load", "40/s")
    assert (found["speed"], found["hardware"], found["losses"]) == ("roofline", "H100", "published")
    assert {each["tier"] for each in found["engines"]} == set(STANDARD_TIERS)
    for each in found["engines"]:
        assert each["weights_bytes"] > 5e9
        assert each["kv_bytes_per_token"] == 131_072
    assert set(found["alone"]) == set(STANDARD_TIERS)
    assert sum(found["plan"]["shares"].values()) == pytest.approx(1)
    assert found["as_set"]["gpus"] == {"H100": 3}  # one engine a tier, as the settings have it by default
    assert "plan" not in read("--model", LLAMA, "--gpus", "2xH100")


def test_standard_output_has_the_plan_alone() -> None:
    """What the solver's library may print would break a program that reads it."""
    args = [QARR, "plan", "--model", LLAMA, "--gpus", "2xH100", "--load", "40/s", "--json"]
    done = subprocess.run(args, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["plan"] is not None


def test_what_is_missing_is_told() -> None:
    assert qarr("plan", "--model", LLAMA, "--gpus", "2xH100", "--load", "400/s").exit_code == 1
    few = read("--model", LLAMA, "--gpus", "2xH100", "--load", "400/s")
    assert few["plan"] is None
    assert few["verdict"] == (
        "400 requests a second at the peak are too many for 2 x H100: the cheapest that would do is 16 x H100."
    )
    lossy = read("--model", str(CONFIGS / "llama-3.3-70b.json"), "--gpus", "1xA100", "--load", "0.1/s", "--loss", "0")
    assert lossy["plan"] is None
    assert lossy["verdict"] == "Nothing keeps the budget of none: at least 0.23 answers of 100 would be lost."


@pytest.mark.parametrize("name", [path.stem for path in CONFIGS.glob("*.json")])
def test_every_published_model(name: str) -> None:
    """Each gets a plan; a tier that does not fit says why."""
    text = plan("--model", str(CONFIGS / f"{name}.json"), "--gpus", "H100", "--load", "10/s")
    assert "80% busy" in text
    assert ("precise does not fit on 16 x H100" in text) == (name == "deepseek-v3")


def test_the_mix_of_a_decision_log(tmp_path: Path) -> None:
    """Classes and complexities are counted; a file without decisions is an error."""
    log = DecisionLog(tmp_path / "log")
    table, fleet = PolicyParameters({}), FleetSnapshot((), TemplateTokens())
    for kind in (PromptClass.MATH, PromptClass.CHAT):
        features = PromptFeatures(2, 1, 1, True, False, False, None, kind, 0.9, (), Complexity.TRIVIAL)
        log.decided("r", decide(Query(features, 20, 100), fleet, table), fleet, table, priority=0)
    log.close()
    assert _mix(str(tmp_path / "log")) == {(PromptClass.MATH, "trivial"): 1, (PromptClass.CHAT, "trivial"): 1}
    (tmp_path / "empty").write_text("")
    with pytest.raises(PlanError, match="the decision log has no decisions"):
        _mix(str(tmp_path / "empty"))


@pytest.mark.parametrize(("load", "rate"), [("40/s", 40), ("0.5", 0.5), ("90/min", 1.5), ("7200/h", 2)])
def test_loads(load: str, rate: float) -> None:
    assert read("--model", LLAMA, "--gpus", "H100", "--load", load)["requests_per_s"] == pytest.approx(rate)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--gpus", "2xTPU"), "no such kind of GPU; known are"),
        (("--gpus", "H100", "--load", "many"), "a rate above 0 is needed, as 40/s"),
        (("--gpus", "H100", "--load", "0/s"), "a rate above 0 is needed"),
        (("--gpus", "H100", "--load", "1.2.3/s"), "a rate above 0 is needed"),
        (("--gpus", "H100", "--context", "200000"), "takes 131072 tokens at most"),
        (("--gpus", "H100", "--context", "100"), "shorter than a mean prompt and answer"),
        (("--gpus", "H100", "--prices", "/none"), "the prices cannot be read"),
        (("--gpus", "1xL4", "--context", "130000"), "fast does not fit on 1 x L4"),
        (("--gpus", "H100", "--tpot", "0.5"), "cannot keep the bounds"),
        (("--gpus", "H100,2xH100"), "H100 is named twice"),
        (("--gpus", "H100,MI300X", "--load", "1/s"), "no price of MI300X is known, and one of the others is"),
        (("--gpus", "H100", "--load", "1/s", "--day", "1,-1"), "numbers from 0 with commas between"),
        (("--gpus", "H100", "--load", "1/s", "--mix", "poetry"), "neither chat, coding, rag nor a decision log"),
        (("--gpus", "H100", "--write", "none.toml"), "is not written: no --load is given"),
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
    found = read("--model", LLAMA, "--gpus", "1xH100", "--max-num-seqs", "10", "--profile", str(path))
    assert found["speed"] == f"measured: {path}"
    assert [each["tpot_ms"] for each in found["engines"]] == pytest.approx(
        [10 + 5 * n + 1 + 10 * 40 / 250 for n in range(3)]
    )
    here = read("--model", LLAMA, "--load", "0.1/s", "--max-num-seqs", "10", "--profile", str(path))
    assert [(each["tier"], each["replicas"]) for each in here["plan"]["engines"]] == [("precise", 1)]
    assert here["verdict"].startswith("BF16 alone is best here: it costs 1 machine and loses none")
