"""``qarr classify``, in this process, and the idle fleet that it decides for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from router.cli.classify import idle_fleet
from router.settings import load_settings
from tests.unit.cli.stub_router import qarr, stub_router
from tiers.spec import STANDARD_TIERS, ReplicaStatus


@pytest.fixture(autouse=True)
def _no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QARR_CACHE_DIR", str(tmp_path))
    # where no router runs, whatever else this machine does
    monkeypatch.setenv("QARR_SERVER__PORT", "9")


def test_the_prompt_is_an_argument_or_standard_input() -> None:
    """Both give the same; without a tokenizer that is said."""
    by_argument = qarr("classify", "2 * 3?")
    by_stdin = qarr("classify", stdin="2 * 3?")
    assert by_argument.stdout == by_stdin.stdout
    assert "(estimated)" in by_argument.stdout
    assert "are estimated" in by_argument.stderr


def test_the_running_router_is_asked() -> None:
    """What it would do is told; without one, that none answers, and what an idle fleet would do."""
    routed = {"tier": "precise", "reason": "class math: measured"}
    with stub_router(
        **{"GET /tiers": (200, {}), "POST /route": (200, routed)}
    ) as router:
        features_json = json.loads(
            qarr(
                "classify",
                "--json",
                "What is 17 * 23?",
                "--url",
                router.url,
                "--key",
                "k",
            ).stdout
        )
        assert features_json["tier"] == "precise"
        assert features_json["reason"] == "class math: measured"
        assert set(router.keys) == {"Bearer k"}
        router.answers["POST /route"] = (400, {"detail": "too long"})
        features_json = json.loads(
            qarr("classify", "--json", "What is 17 * 23?", "--url", router.url).stdout
        )
        assert features_json["tier"] is None
        assert features_json["reason"] == "too long"
        assert features_json["class"] == "math"
    result = qarr("classify", "What is 17 * 23?", "--url", router.url)
    assert "no router answers at" in result.stderr
    assert "an idle fleet without measurements: math" in result.stdout


def test_what_weighed_most_is_told() -> None:
    """Each reason names an output, a piece of the prompt and its log-odds, for programs and for people."""
    prompt = "Write a Python function that merges two sorted lists."
    assert "write a" in dict(
        json.loads(qarr("classify", "--json", prompt).stdout)["why"]["asks"]
    )
    lines = dict(
        re.split(r" {2,}", line, maxsplit=1)
        for line in qarr("classify", prompt).stdout.splitlines()
        if line
    )
    assert lines["code"] == "asks for python"
    assert "'write a' +" in lines["asks"]


def test_an_empty_prompt_is_one() -> None:
    """An empty argument is the prompt, not a reason to read standard input."""
    assert (
        json.loads(
            qarr("classify", "--json", "", stdin="Write a Python function").stdout
        )["class"]
        != "code"
    )


def test_the_tier_follows_the_settings() -> None:
    """The same prompt moves with the policy and the model's size; one that fits no tier has none, and the reason says so."""
    code = "Write a Python function that merges two sorted lists."
    for parameters, loss, tier in (
        ("8e9", "0.1", "balanced"),
        ("8e9", "0", "precise"),
        ("1e8", "0.1", "precise"),
    ):
        settings = {
            "QARR_POLICY__MODEL_PARAMETERS": parameters,
            "QARR_POLICY__MAX_LOSS__CODE": loss,
        }
        assert (
            json.loads(qarr("classify", "--json", code, **settings).stdout)["tier"]
            == tier
        )
    features_json = json.loads(qarr("classify", "--json", "word " * 20_000).stdout)
    assert features_json["tier"] is None
    assert features_json["reason"]


def test_lines_keep_their_order_and_language() -> None:
    """One compact object for each line, blank ones left out; text that JSON escapes is read."""
    result = qarr(
        "classify",
        "--jsonl",
        stdin='{"text": "hi"}\n\n{"text": "\\u00fcben", "more": 1}\n',
    )
    assert [json.loads(line)["tokens"] > 0 for line in result.stdout.splitlines()] == [
        True,
        True,
    ]


@pytest.mark.parametrize("line", ["nonsense", '{"prompt": "hi"}', '{"text": 7}', "[]"])
def test_the_bad_line_is_named(line: str) -> None:
    """A line of another form ends with its number and what is expected."""
    result = qarr("classify", "--jsonl", stdin='{"text": "ok"}\n' + line)
    assert result.exit_code == 2
    assert "line 2" in result.stderr


def test_the_idle_fleet_has_a_ready_replica_in_each_tier() -> None:
    """With the limits of the settings and nothing in flight."""
    fleet = idle_fleet(
        load_settings(
            None, {"tiers": {"fast": {"max_model_len": 100, "max_in_flight": 3}}}
        )
    )
    assert [tier.spec.name for tier in fleet.tiers] == list(STANDARD_TIERS)
    assert [tier.spec.max_model_len for tier in fleet.tiers] == [100, 4096, 8192]
    assert fleet.tiers[0].spec.max_in_flight == 3
    assert {r.status for tier in fleet.tiers for r in tier.replicas} == {
        ReplicaStatus.READY
    }
    assert {r.in_flight for tier in fleet.tiers for r in tier.replicas} == {0}


def test_a_prompt_of_which_nothing_weighed_has_no_heading_for_it() -> None:
    result = qarr("classify", "What is 17*23?")
    assert result.stdout.startswith("class")
    assert "weighed most" not in result.stdout
