"""``qarr plan``: what a person sees, and what a program reads."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from classifier import Complexity, PromptClass, PromptFeatures
from router.cli.plan import tiers_for_gpus
from router.cli.plan_load import mix_of
from router.policy.decide import decide
from router.policy.decision import PolicyParameters, RoutingQuery
from router.policy.decision_log import DecisionLog
from router.policy.profiles import Fit, FitError, LatencyProfile, latency_name
from router.settings import load_settings
from tests.unit.cli.stub_router import qarr
from tests.unit.own_router import QARR
from tests.unit.tiers.sizing.published_models import CONFIGS
from tiers.errors import PlanError
from tiers.snapshot import FleetSnapshot
from tiers.spec import STANDARD_TIERS, TemplateTokens

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

LLAMA = str(CONFIGS / "llama-3.1-8b.json")
LLAMA_70B = str(CONFIGS / "llama-3.3-70b.json")
DEEPSEEK = str(CONFIGS / "deepseek-v3.json")


@pytest.fixture(autouse=True)
def _no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QARR_CACHE_DIR", str(tmp_path))


def plan(*args: str) -> str:
    result: Result = qarr("plan", *args)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def read(*args: str) -> dict[str, Any]:
    plan_json: dict[str, Any] = json.loads(plan(*args, "--json"))
    return plan_json


def test_a_plan_and_what_it_is_compared_with() -> None:
    """It names the model, the engines, the fleets, where figures are from, and says in a sentence what pays."""
    text = plan("--model", LLAMA, "--gpus", "3xH100", "--load", "40/s")
    assert "8.03 billion parameters" in text
    assert "3 x H100; 40 requests/s, prompts of 800 and answers of 250 tokens" in text
    cells = "losses: published|awq-int4|5.7 GB|9.1 GB|16.1 GB|128 KiB|planned|fast (4 bits) alone|precise (BF16) alone"
    assert not [cell for cell in cells.split("|") if cell not in text]
    assert "speed: computed (roofline), not measured" in text
    assert "BF16 alone is best here: it costs 7.98 USD an hour and loses none" in text


def test_several_precisions_pay_where_traffic_has_a_peak() -> None:
    """70B in BF16 with 4 bits for the peak costs less than BF16 alone, and keeps a budget that FP8 alone does not."""
    options = "--gpus H100 --load 6/s --mix coding --loss 0.2 --day 0.3,0.5,1,2.2"
    text = plan("--model", LLAMA_70B, *options.split())
    flat = " ".join(text.split())
    assert "1 x 4 bits and 1 x BF16 cost 19.95 USD an hour and lose none" in flat
    assert (
        "FP8 alone costs 15.96 USD an hour and loses 0.24 answers of 100, over the budget"
        in flat
    )
    assert "6 requests/s in the mean and 13.2 at the peak" in flat
    assert "planned 1 fast on 1 x H100, 1 precise on 4 x H100" in flat


def test_two_kinds_of_gpus_and_settings(tmp_path: Path) -> None:
    """GPUs of both kinds are used; the tiers are written as settings that the router takes."""
    prices = tmp_path / "prices.json"
    file = tmp_path / "settings.toml"
    prices.write_text('{"currency": "EUR", "per_gpu_hour": {"A100": 2, "L4": 0.5}}')
    options = [
        "--gpus",
        "2xA100,8xL4",
        "--load",
        "24/s",
        "--mix",
        "coding",
        "--loss",
        "0.2",
    ]
    files = ("--prices", str(prices), "--write", str(file))
    plan_json = read("--model", LLAMA, *options, *files)
    planned = plan_json["plan"]
    assert set(planned["gpus"]) == {"A100", "L4"}
    assert planned["answers_lost"] <= 0.002
    assert planned["cost_per_hour"] == pytest.approx(
        planned["gpus"]["A100"] * 2 + planned["gpus"]["L4"] * 0.5
    )
    settings = load_settings(file)
    replicas = {tier: settings.tiers.of(tier).replicas for tier in STANDARD_TIERS}
    planned_replicas = dict.fromkeys(STANDARD_TIERS, 0)
    for engine in planned["engines"]:
        planned_replicas[engine["tier"]] += engine["replicas"]
    assert replicas == planned_replicas


def test_engines_of_a_tier_have_one_size() -> None:
    """Its settings hold one. The cheapest fleet of any sizes had BF16 on two GPUs and on four."""
    options = "--gpus 8xL4 --load 16/s --mix coding --loss 0.2"
    planned = read("--model", LLAMA, *options.split())["plan"]
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
    gpus: tuple[int, str],
    model: str,
    planned: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of what these GPUs carry, 80 % at least loss; where the settings name tiers, or there are no GPUs, nothing."""
    settings = load_settings(None, {"model": {"name": str(CONFIGS / f"{model}.json")}})
    assert tiers_for_gpus(settings) is None
    script = "\n".join(f"echo '{n}, {gpus[1]}, 81559, 81000'" for n in range(gpus[0]))
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    plan_json = tiers_for_gpus(settings) or ({}, "")
    assert plan_json[1] == planned
    used = load_settings(None, {"tiers": plan_json[0]}).tiers
    assert (
        sum(
            used.of(tier).replicas_here * used.of(tier).tensor_parallel
            for tier in STANDARD_TIERS
        )
        == gpus[0]
    )
    assert (
        tiers_for_gpus(load_settings(None, {"tiers": {"fast": {"replicas": 0}}}))
        is None
    )


def test_gpus_without_a_price_are_counted() -> None:
    plan_json = read("--model", LLAMA, "--gpus", "MI300X", "--load", "4/s")
    assert plan_json["currency"] is None
    assert plan_json["plan"]["cost_per_million_tokens"] is None
    assert plan_json["prices"] is None
    assert "costs 1 GPU" in plan_json["verdict"]
    assert any("no price of these GPUs is known" in note for note in plan_json["notes"])


def test_json_has_the_same() -> None:
    plan_json = read("--model", LLAMA, "--gpus", "2xH100", "--load", "40/s")
    assert plan_json["speed"] == "roofline"
    assert plan_json["hardware"] == "H100"
    assert plan_json["losses"] == "published"
    assert {each["tier"] for each in plan_json["engines"]} == set(STANDARD_TIERS)
    for each in plan_json["engines"]:
        assert each["weights_bytes"] > 5e9
        assert each["kv_bytes_per_token"] == 131_072
    assert set(plan_json["alone"]) == set(STANDARD_TIERS)
    assert sum(plan_json["plan"]["shares"].values()) == pytest.approx(1)
    assert plan_json["as_set"] is None  # the settings name no tiers


def test_standard_output_has_the_plan_alone() -> None:
    """What the solver's library may print would break a program that reads it."""
    options = "--gpus 2xH100 --load 40/s --json"
    args = [QARR, "plan", "--model", LLAMA, *options.split()]
    result = subprocess.run(
        args, capture_output=True, text=True, check=True, timeout=100
    )
    assert json.loads(result.stdout)["plan"] is not None


def test_what_is_missing_is_told() -> None:
    too_much = ("--model", LLAMA, "--gpus", "2xH100", "--load", "400/s")
    assert qarr("plan", *too_much).exit_code == 1
    few = read(*too_much)
    assert few["plan"] is None
    assert few["verdict"] == (
        "400 requests a second at the peak are too many for 2 x H100: the cheapest that would do is 16 x H100. "
        "These GPUs carry at most 51.2 a second at the peak within the loss budget."
    )
    options = "--gpus 1xA100 --load 0.1/s --loss 0"
    lossy = read("--model", LLAMA_70B, *options.split())
    assert lossy["plan"] is None
    assert (
        lossy["verdict"]
        == "Nothing keeps the budget of none: at least 0.15 answers of 100 would be lost."
    )


LARGEST = ("--model", LLAMA, "--gpus", "4xL4", "--mix", "coding", "--loss", "0.2")


def test_without_a_load_the_largest_ones() -> None:
    """Each fleet's largest load; the fleets for a share of the planned one's are those of that load when it is given."""
    args = (*LARGEST, "--day", "0.5,1.5")
    plan_json = read(*args)
    largest = {
        name: each["requests_per_s"]
        for name, each in plan_json["largest_loads"].items()
    }
    assert list(largest) == ["planned", "fast alone", "balanced alone", "precise alone"]
    assert 0.79 < plan_json["requests_per_s"] / largest["planned"] <= 0.8
    assert plan_json["share_of_largest_load"] == 0.8
    again = read(*args, "--load", f"{plan_json['requests_per_s']:g}/s")
    assert again["plan"] == plan_json["plan"]
    assert again["alone"] == plan_json["alone"]
    assert "largest_loads" not in again


def test_the_largest_loads_are_carried_and_no_larger_ones() -> None:
    largest = read(*LARGEST)["largest_loads"]
    planned_rate = largest["planned"]["requests_per_s"]
    precise_rate = largest["precise alone"]["requests_per_s"]
    for factor, is_carried in ((0.999, True), (1.01, False)):
        at_planned = read(*LARGEST, "--load", f"{planned_rate * factor}/s")
        assert (at_planned["plan"] is not None) == is_carried, factor
        at_precise = read(*LARGEST, "--load", f"{precise_rate * factor}/s")
        assert (at_precise["alone"]["precise"] is not None) == is_carried, factor


def test_the_planned_fleet_carries_what_one_precision_within_the_budget_does() -> None:
    """A mix that carries more by its optimum loses too much in operation here; BF16 alone is there all the same."""
    options = "--gpus 8xH100 --mix coding --loss 0.1 --day 0.4,0.6,0.5,2.5 --ttft 2000"
    plan_json = read("--model", LLAMA_70B, *options.split())
    largest = {
        name: each["requests_per_s"]
        for name, each in plan_json["largest_loads"].items()
    }
    assert largest["precise alone"] <= largest["planned"] < largest["balanced alone"]
    assert (
        "--ttft and --tpot bound an engine's times without waiting; those of fleets have it in them"
        in plan_json["notes"]
    )


def test_the_share_is_said() -> None:
    """In the text as in JSON: what was not given, the share, the load, and that no number of GPUs was given."""
    flat = " ".join(plan("--model", LLAMA, "--gpus", "H100", "--share", "50").split())
    assert "3 x H100; prompts of 800" in flat
    assert (
        "no number of H100 is given: planned for 3, which hold an engine of each precision that fits"
        in flat
    )
    assert (
        "No --load is given, so the fleets below are planned for 50% (--share) of the planned one's largest load"
        in flat
    )
    assert "--load 38.4/s on 3 x H100 plans the same" in flat
    assert (
        "assumed: prompts of the mix chat (--mix), an even load (--day), requests of at most 1,050 tokens"
        in flat
    )
    assert "prices: dated list prices, built in" in flat


def test_a_budget_that_nothing_keeps_has_no_largest_load() -> None:
    args = ("--model", LLAMA_70B, "--gpus", "1xA100", "--loss", "0")
    assert qarr("plan", *args).exit_code == 1
    plan_json = read(*args)
    assert plan_json["largest_loads"]["planned"] is None
    assert plan_json["largest_loads"]["fast alone"]["requests_per_s"] > 0
    assert plan_json["largest_loads"]["precise alone"] is None
    assert plan_json["verdict"].startswith("Nothing keeps the budget of none")
    assert "none keeps the loss budget" in plan(*args)


def test_a_processor_whose_speed_is_unknown() -> None:
    """There is no fleet, and what was asked for besides is said to be left out; with --load it is a failure."""
    plan_json = read("--model", LLAMA, "--ttft", "500", "--loss", "1")
    assert "plan" not in plan_json
    assert plan_json["verdict"].startswith(
        "No fleet is planned: how fast this machine's processor computes the model is not"
    )
    assert any(
        note.startswith("not in the plan: --loss, --ttft: without a known speed")
        for note in plan_json["notes"]
    )
    assert qarr("plan", "--model", LLAMA).exit_code == 0
    assert qarr("plan", "--model", LLAMA, "--load", "1/s").exit_code == 1


def test_gpus_by_their_figures(tmp_path: Path) -> None:
    """A GPU that is not known is planned as a known one with the same figures; what is assumed of it is said."""
    known = read("--model", LLAMA, "--gpus", "2xL40S", "--load", "8/s")
    figures = (
        "2xMine:48GB,864GB/s,362TF,fp8=733TF,int8=733TOPS,capability=8.9,price=1.33"
    )
    mine = read("--model", LLAMA, "--gpus", figures, "--load", "8/s")
    assert mine["plan"]["cost_per_hour"] == pytest.approx(
        known["plan"]["cost_per_hour"]
    )
    assert mine["plan"]["ttft_ms"] == known["plan"]["ttft_ms"]
    assert mine["gpus"][0] | {"name": "L40S", "as_built_in": True} == known["gpus"][0]
    file = tmp_path / "gpus.toml"
    file.write_text(
        '[Mine]\ncount = 2\nmemory = "48GB"\nbandwidth = 864\nbf16 = "362TF"\nfp8 = 733\nint8 = 733\ncapability = 8.9\n'
        "price = 1.33\n"
    )
    assert read("--model", LLAMA, "--gpus", str(file), "--load", "8/s") == mine | {
        "notes": [note.replace(figures, str(file)) for note in mine["notes"]]
    }
    without_fp8 = "--gpus Mine:48GB,864GB/s,362TF,int8=733TOPS --load 8/s"
    text = " ".join(plan("--model", LLAMA, *without_fp8.split()).split())
    assert (
        "Mine as given: 48 GB, 864 GB/s, 362 TFLOP/s in BF16, 733 TOP/s in INT8; no throughput in FP8, so FP8 weights are "
        "computed" in text
    )
    assert (
        "no price of these GPUs is known: they are counted; add price=1.9 in --gpus"
        in text
    )


def test_what_does_not_enter_is_said(tmp_path: Path) -> None:
    """Settings, prices and a model that is published in few bits already."""
    config = tmp_path / "qarr.toml"
    prices = tmp_path / "prices.json"
    config.write_text(
        '[tiers.nvfp4]\ncheckpoint = "/m"\n[tiers.fast]\ndraft = "ngram"\nmax_num_seqs = 64\n[server]\nport = 8081\n'
        '[policy]\nmax_loss = {code = 0.1}\n[engine]\nextra_args = ["--enforce-eager"]\n'
    )
    prices.write_text('{"currency": "EUR", "per_gpu_hour": {"H200": 2, "H20O": 3}}')
    args = ("--gpus", "16xH200", "--config", str(config), "--prices", str(prices))
    plan_json = read("--model", DEEPSEEK, *args)
    ignored = {each["setting"]: each["why"] for each in plan_json["ignored_settings"]}
    assert set(ignored) == {
        "tiers.nvfp4",
        "tiers.fast.draft",
        "tiers.fast.max_num_seqs",
        "policy.max_loss",
        "engine.extra_args",
    }
    assert ignored["tiers.nvfp4"].startswith(
        "only fast, balanced and precise are planned, in the formats that --formats names"
    )
    assert any(f"the price of H20O in {prices}" in note for note in plan_json["notes"])
    assert any(
        note.startswith("the model is published in fp8-block, so precise is that")
        for note in plan_json["notes"]
    )
    text = " ".join(plan("--model", DEEPSEEK, *args).split())
    assert "settings that the planned fleets leave out: tiers.nvfp4: only fast" in text
    assert "tiers.fast.draft: what speculative decoding changes" in text


def test_as_set_is_what_was_written(tmp_path: Path) -> None:
    """A plan that is written and read again is the fleet as set, of the same engines; its context and KV cache are there."""
    file = tmp_path / "fleet.toml"
    args = ("--model", LLAMA, "--gpus", "4xL4", "--load", "8/s", "--context", "4000")
    planned = read(*args, "--write", str(file))["plan"]
    assert load_settings(file).tiers.precise.max_model_len == 4000
    again = read(*args, "--config", str(file))
    assert again["as_set"]["gpus"] == planned["gpus"]
    assert again["as_set"]["ttft_ms"] == pytest.approx(planned["ttft_ms"], rel=0.2)
    fp8 = tmp_path / "fp8.toml"
    (tmp_path / "config.json").write_text(
        (CONFIGS / "llama-3.1-8b.json").read_text("utf-8")
    )
    args_of_fp8 = ("--kv-cache", "fp8", "--write", str(fp8))
    plan("--model", str(tmp_path), "--gpus", "4xL4", *args_of_fp8)
    settings = load_settings(fp8)
    assert settings.engine.extra_args == ("--kv-cache-dtype", "fp8")
    assert settings.model.name == str(tmp_path)


@pytest.mark.parametrize(
    ("tiers", "obstacle"),
    [
        (
            "fast = {replicas = 0}\nbalanced = {replicas = 0}\nprecise = {replicas = 0}",
            "start no engines here",
        ),
        (
            "precise = {pipeline_parallel = 2}",
            "tiers.precise.pipeline_parallel is not planned",
        ),
        (
            "balanced = {tensor_parallel = 3}",
            "balanced does not fit, or is not planned, on 3 GPUs",
        ),
        ("fast = {max_num_seqs = 1}", "does not carry it"),
    ],
)
def test_why_the_engines_as_set_are_not_planned(
    tiers: str, obstacle: str, tmp_path: Path
) -> None:
    config = tmp_path / "qarr.toml"
    config.write_text(f"[tiers]\n{tiers}\n")
    plan_json = read(
        "--model", LLAMA, "--gpus", "3xH100", "--load", "50/s", "--config", str(config)
    )
    assert plan_json["as_set"] is None
    assert obstacle in plan_json["as_set_obstacle"]


@pytest.mark.parametrize("name", [path.stem for path in CONFIGS.glob("*.json")])
def test_every_published_model(name: str) -> None:
    """Each gets a plan in which its own format is the highest."""
    text = plan(
        "--model", str(CONFIGS / f"{name}.json"), "--gpus", "H100", "--load", "10/s"
    )
    assert "80% busy" in text
    assert "does not fit" not in text
    precise_row = next(line for line in text.splitlines() if "precise " in line)
    published_formats = {
        "deepseek-v3": "fp8-block",
        "gpt-oss-20b": "mxfp4",
        "gpt-oss-120b": "mxfp4",
    }
    own_format = published_formats.get(name, "bf16")
    assert own_format in precise_row


def test_the_mix_of_a_decision_log(tmp_path: Path) -> None:
    """Classes and complexities are counted; a file without decisions is an error."""
    log = DecisionLog(tmp_path / "log")
    table = PolicyParameters({})
    fleet = FleetSnapshot((), TemplateTokens())
    for kind in (PromptClass.MATH, PromptClass.CHAT):
        features = PromptFeatures(
            chars=2,
            words=1,
            tokens=1,
            tokens_exact=True,
            contains_code=False,
            asks_for_code=False,
            language=None,
            prompt_class=kind,
            confidence=0.9,
            signals=(),
            complexity=Complexity.TRIVIAL,
        )
        query = RoutingQuery(features, 20, max_tokens=100)
        decision = decide(query, fleet, table)
        log.decided("r", decision, fleet, table=table, priority=0)
    log.close()
    assert mix_of(str(tmp_path / "log")) == {
        (PromptClass.MATH, "trivial"): 1,
        (PromptClass.CHAT, "trivial"): 1,
    }
    (tmp_path / "empty").write_text("")
    with pytest.raises(PlanError, match="the decision log has no decisions"):
        mix_of(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("load", "rate"),
    [
        ("40/s", 40),
        ("0.5", 0.5),
        ("90/min", 1.5),
        ("7200/h", 2),
        ("30 rps", 30),
        ("4 req/s", 4),
        ("86400/day", 1),
    ],
)
def test_loads(load: str, rate: float) -> None:
    assert read("--model", LLAMA, "--gpus", "H100", "--load", load)[
        "requests_per_s"
    ] == pytest.approx(rate)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--gpus", "2xTPU"), "TPU is no GPU that is known here."),
        (("--gpus", "2xTPU"), "--gpus '2xTPU:96GB,1792GB/s,500TF'"),
        (
            ("--gpus", "H100", "--load", "1/s", "--share", "50"),
            "--share is of the largest load, for plans without --load",
        ),
        (("--gpus", "H100", "--load", "many"), "a rate above 0 is needed, as 40/s"),
        (("--gpus", "H100", "--load", "0/s"), "a rate above 0 is needed"),
        (("--gpus", "H100", "--load", "1.2.3/s"), "a rate above 0 is needed"),
        (("--gpus", "H100", "--context", "200000"), "takes 131072 tokens at most"),
        (
            ("--gpus", "H100", "--context", "100"),
            "shorter than a mean prompt and answer",
        ),
        (("--gpus", "H100", "--prices", "/none"), "the prices cannot be read"),
        (
            ("--gpus", "1xL4", "--context", "130000"),
            "fast (4 bits) does not fit on 1 x L4",
        ),
        (("--gpus", "H100", "--tpot", "0.5"), "cannot keep the bounds"),
        (("--gpus", "H100,2xH100"), "H100 is named twice"),
        (
            ("--gpus", "H100,MI300X", "--load", "1/s"),
            "no price of MI300X is known, and one of the others is",
        ),
        (
            ("--gpus", "H100", "--load", "1/s", "--day", "1,-1"),
            "numbers from 0 with commas between",
        ),
        (
            ("--gpus", "H100", "--load", "1/s", "--mix", "poetry"),
            "neither chat, coding, agents, rag nor a decision log",
        ),
        (
            ("--gpus", "1xH100", "--load", "900/s", "--write", "/none/x.toml"),
            "no fleet is planned: 900 requests a second",
        ),
        (
            ("--gpus", "1xH100", "--write", "/none/x.toml"),
            "it cannot be written: No such file",
        ),
        (
            ("--gpus", "H100", "--write", LLAMA),
            "it is there already, and is left as it is",
        ),
        (("--gpus", "H100", "--prompt", "200000"), "--prompt and --output make 200250"),
    ],
)
def test_faults_are_told(args: tuple[str, ...], said: str) -> None:
    with pytest.raises(PlanError) as error:
        plan("--model", LLAMA, *args)
    assert said in str(error.value)


def test_a_model_that_is_not_here() -> None:
    """The default model has no configuration before it is made."""
    with pytest.raises(
        PlanError, match="the default model, is not made yet: run 'qarr model prepare'"
    ):
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
        model="m",
        created="2026-01-01T00:00:00Z",
        checkpoints=digests,
        machine="x",
        fits=fits,
        samples=(),
    )
    path = tmp_path / latency_name(digests, "x")
    path.write_text(profile.model_dump_json())
    options = ("--max-num-seqs", "10", "--profile", str(path))
    plan_json = read("--model", LLAMA, "--gpus", "1xH100", *options)
    assert plan_json["speed"] == f"measured: {path}"
    assert [each["tpot_ms"] for each in plan_json["engines"]] == pytest.approx(
        [10 + 5 * n + 1 + 10 * 40 / 250 for n in range(3)]
    )
    partly = tmp_path / "partly.json"
    partly.write_text(profile.model_copy(update={"fits": fits[:2]}).model_dump_json())
    notes = read("--model", LLAMA, "--gpus", "2xH100", "--profile", str(partly))[
        "notes"
    ]
    assert f"{partly} has no speed of precise: the roofline counts there" in notes
    assert any(
        f"the speeds in {partly} are of m on x: they count here for every kind of GPU"
        in note
        for note in notes
    )
    prices = tmp_path / "prices.json"
    prices.write_text('{"per_gpu_hour": {"H100": 2}}')
    machine = read("--model", LLAMA, "--profile", str(partly), "--prices", str(prices))
    assert f"{partly} has no speed of precise: no fleet has it" in machine["notes"]
    assert any(
        note.startswith(f"not in the plan: --prices {prices}")
        for note in machine["notes"]
    )
    rates = {
        name: each and each["requests_per_s"]
        for name, each in machine["largest_loads"].items()
    }
    assert rates["precise alone"] is None
    assert rates["as set"] == rates["fast alone"] > machine["requests_per_s"] > 0
    here = read("--model", LLAMA, "--load", "0.1/s", *options)
    assert [(each["tier"], each["replicas"]) for each in here["plan"]["engines"]] == [
        ("precise", 1)
    ]
    assert here["verdict"].startswith(
        "BF16 alone is best here: it costs 1 machine and loses none"
    )
