"""Bad input over a real socket: a 4xx problem that names the field, never a 5xx, and nothing is leaked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.api.bodies import (
    STANDARD_RULES,
    InvalidBodyError,
    Rules,
    parsed,
    render_fleet,
)
from router.api.generate import GenerateBody, allowed_values
from router.api.settings import LimitSettings
from router.pipeline.request import RoutingOptions
from router.policy.decision import Sla
from tests.unit.router_stack import router_stack
from tiers.fleet import Fleet
from tiers.replica import Replica
from tiers.spec import ReplicaStatus, TierName, TierSpec

pytestmark = pytest.mark.anyio
SECRET = "hunter2-secret"
CASES = [
    (b'{"prompt": ""}', 400, "prompt"),
    (json.dumps({"prompt": "a" * 16001}).encode(), 400, "prompt"),
    (json.dumps({"prompt": "a " * 5001}).encode(), 400, "prompt"),
    (
        json.dumps({"prompt": "hi", "system_prompt": "a" * 16001}).encode(),
        400,
        "system_prompt",
    ),
    (b'{"prompt": 7}', 400, "prompt"),
    (b'{"prompt": null}', 400, "prompt"),
    (b'{"prompt": ["hi"]}', 400, "prompt"),
    (b"{}", 400, "prompt"),
    (
        b'{"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}',
        400,
        "prompt",
    ),
    (b'{"messages": []}', 400, "messages"),
    (b'{"messages": "hi"}', 400, "messages"),
    (b'{"messages": [{"role": "user", "content": ""}]}', 400, "messages"),
    (b'{"messages": [{"role": "assistant", "content": "hi"}]}', 400, "messages"),
    (b'{"messages": [{"role": "tool", "content": "hi"}]}', 400, "messages.0.role"),
    (b'{"messages": [{"role": "user", "content": ["hi"]}]}', 400, "messages.0.content"),
    (b'{"messages": [{"role": "user"}]}', 400, "messages.0.content"),
    (
        b'{"messages": [{"role": "user", "content": "hi", "name": "x"}]}',
        400,
        "messages.0.name",
    ),
    (
        json.dumps({"messages": [{"role": "user", "content": "a" * 16001}]}).encode(),
        400,
        "messages.0.content",
    ),
    (
        json.dumps({"messages": [{"role": "user", "content": "a"}] * 1001}).encode(),
        400,
        "messages",
    ),
    (
        json.dumps(
            {
                "messages": [
                    {"role": r, "content": "a"} for r in ("user", "system", "user")
                ]
            }
        ).encode(),
        400,
        "messages",
    ),
    (
        b'{"messages": [{"role": "user", "content": "hi"}], "system_prompt": "s"}',
        400,
        "system_prompt",
    ),
    (b'{"prompt": "hi", "top_p": 0}', 400, "top_p"),
    (b'{"prompt": "hi", "top_p": 1.1}', 400, "top_p"),
    (b'{"prompt": "hi", "repetition_penalty": 0}', 400, "repetition_penalty"),
    (b'{"prompt": "hi", "repetition_penalty": 2.1}', 400, "repetition_penalty"),
    (b'{"prompt": "hi", "seed": -1}', 400, "seed"),
    (b'{"prompt": "hi", "seed": 9223372036854775808}', 400, "seed"),
    (b'{"prompt": "hi", "seed": 1.5}', 400, "seed"),
    (b'{"prompt": "hi", "stop": ""}', 400, "stop.0"),
    (b'{"prompt": "hi", "stop": [7]}', 400, "stop.0"),
    (b'{"prompt": "hi", "stop": 7}', 400, "stop"),
    (json.dumps({"prompt": "hi", "stop": ["a"] * 17}).encode(), 400, "stop"),
    (json.dumps({"prompt": "hi", "stop": "a" * 201}).encode(), 400, "stop.0"),
    (b"[]", 400, "body"),
    (b"null", 400, "body"),
    (b'"hi"', 400, "body"),
    (b"", 400, "body"),
    (b'{"prompt": "hunter2-secret"', 400, "body"),
    (b'{"prompt": "hi", "temprature": 1}', 400, "temprature"),
    (b'{"prompt": "hi", "temperature": NaN}', 400, "temperature"),
    (b'{"prompt": "hi", "temperature": Infinity}', 400, "temperature"),
    (b'{"prompt": "hi", "temperature": -0.1}', 400, "temperature"),
    (b'{"prompt": "hi", "temperature": 2.1}', 400, "temperature"),
    (b'{"prompt": "hi", "temperature": "1"}', 400, "temperature"),
    (b'{"prompt": "hi", "max_tokens": 0}', 400, "max_tokens"),
    (b'{"prompt": "hi", "max_tokens": 4097}', 400, "max_tokens"),
    (b'{"prompt": "hi", "max_tokens": 1.5}', 400, "max_tokens"),
    (b'{"prompt": "hi", "max_tokens": true}', 400, "max_tokens"),
    (b'{"prompt": "hi", "max_tokens": 1e400}', 400, "max_tokens"),
    (b'{"prompt": "hi", "stream": "yes"}', 400, "stream"),
    (b'{"prompt": "hi", "tier": "cheap"}', 400, "tier"),
    (b'{"prompt": "hi", "tier_policy": "must"}', 400, "tier_policy"),
    (b'{"prompt": "hi", "priority": 1}', 400, "priority"),
    (b'{"prompt": "hi", "sla": {"ttft_ms": 0}}', 400, "sla.ttft_ms"),
    (b'{"prompt": "hi", "sla": {"tpot_ms": NaN}}', 400, "sla.tpot_ms"),
    (b'{"prompt": "hi", "sla": {"max_quality_loss": 2}}', 400, "sla.max_quality_loss"),
    (b'{"prompt": "hi", "sla": {"cost": 1}}', 400, "sla.cost"),
    (b'{"prompt": "\xff\xfe"}', 400, "body"),
    (b'{"prompt": "\\ud800"}', 400, "body"),
    (b'{"prompt": "hi"} trailing', 400, "body"),
    (b"[" * 100_000, 400, "body"),
    (b"{" + b'"a":' * 5000, 400, "body"),
    (
        json.dumps(
            {
                "prompt": "x " * 4999,
                "max_tokens": 4096,
                "tier": "fast",
                "tier_policy": "require",
            }
        ).encode(),
        422,
        "prompt",
    ),
]


async def test_each_bad_body_is_a_4xx_that_names_the_field(tmp_path: Path) -> None:
    """Every case is a problem+json with field, problem and what is allowed; the router then still serves."""
    async with router_stack(tmp_path) as stack:
        for body, status, field in CASES:
            for path in ("/generate", "/route"):
                if status == 422 and path == "/route":
                    continue  # a decision that refuses is an answer of /route
                answer = await stack.client.post(f"{stack.url}{path}", content=body)
                shown = body[:60]
                assert answer.status_code == status, (path, shown, answer.text)
                assert answer.headers["content-type"] == "application/problem+json", (
                    shown
                )
                problem = answer.json()
                assert problem["status"] == status
                assert problem["title"]
                assert field in {e["field"] for e in problem["errors"]}, (
                    shown,
                    problem,
                )
                assert all(e["problem"] and e["allowed"] for e in problem["errors"]), (
                    shown,
                    problem,
                )
                assert answer.headers["x-request-id"] == problem["request_id"]
                assert SECRET not in answer.text
                assert "Traceback" not in answer.text
        assert (await stack.generate()).status_code == 200
        assert stack.leases() == 0


async def test_every_wrong_field_is_listed(tmp_path: Path) -> None:
    """Two mistakes are two entries: nobody should have to mend them one by one."""
    async with router_stack(tmp_path) as stack:
        answer = await stack.client.post(
            f"{stack.url}/generate", json={"prompt": "", "tier": "x", "wat": 1}
        )
        assert {e["field"] for e in answer.json()["errors"]} == {
            "prompt",
            "tier",
            "wat",
        }


async def test_limits_are_inclusive(tmp_path: Path) -> None:
    async with router_stack(tmp_path) as stack:
        for prompt in ("a" * 16_000, "a " * 5_000):
            answer = await stack.client.post(
                f"{stack.url}/route", json={"prompt": prompt, "max_tokens": 1}
            )
            assert answer.status_code == 200


async def test_unannounced_huge_body_is_refused(tmp_path: Path) -> None:
    """A chunked body is cut off at the limit."""
    async with router_stack(tmp_path, {"server": {"max_body_bytes": 2048}}) as stack:

        async def chunks() -> object:
            for _ in range(3):
                yield b"x" * 1000

        answer = await stack.client.post(f"{stack.url}/generate", content=chunks())
        assert answer.status_code == 413
        assert answer.json()["errors"][0]["allowed"] == "at most 2048 bytes"


async def test_unknown_paths_and_methods_are_problems(tmp_path: Path) -> None:
    """Elsewhere there is a 404 that lists what there is, and a wrong method names the right one."""
    async with router_stack(tmp_path) as stack:
        lost = await stack.client.get(f"{stack.url}/nowhere")
        assert lost.status_code == 404
        assert lost.json()["type"] == "urn:qarr:problem:not-found"
        assert "POST /generate" in lost.json()["detail"]
        wrong = await stack.client.get(f"{stack.url}/generate")
        assert wrong.status_code == 405


def test_options_are_what_the_body_says() -> None:
    """Every bound in its place; where nothing is said there is no hint and no bound."""
    body = {
        "prompt": "hi",
        "tier": "balanced",
        "tier_policy": "require",
        "sla": {"ttft_ms": 1, "tpot_ms": 2.5, "max_quality_loss": 0, "confidence": 0.5},
    }
    options = parsed(
        GenerateBody, json.dumps(body).encode(), allowed_values, rules=STANDARD_RULES
    ).options(-1, "tier")
    assert options == RoutingOptions(
        TierName.BALANCED,
        "tier",
        require=True,
        sla=Sla(1, 2.5, max_quality_loss=0, confidence=0.5),
        priority=-1,
    )
    plain = parsed(
        GenerateBody, b'{"prompt": "hi"}', allowed_values, rules=STANDARD_RULES
    ).options(0, "tier")
    assert plain == RoutingOptions(None, "tier", require=False, sla=Sla(), priority=0)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("a b", True),
        ("a b c", False),
        ("a  b\n", True),
        ("abcdefgh", True),
        ("abcdefghi", False),
        ("a\u2003b\tc", False),
    ],
)
def test_words_and_characters_are_bounded(text: str, right: bool) -> None:  # noqa: FBT001
    """Of at most 2 words and 8 characters, in prompt and system prompt alike; words lie between any white space."""
    rules = Rules(LimitSettings(max_prompt_words=2, max_prompt_chars=8))
    for field in ("prompt", "system_prompt"):
        body = json.dumps({"prompt": "hi", field: text}).encode()
        if right:
            parsed(GenerateBody, body, allowed_values, rules=rules)
            continue
        with pytest.raises(InvalidBodyError) as error:
            parsed(GenerateBody, body, allowed_values, rules=rules)
        assert [problem.field for problem in error.value.problems] == [field]


@pytest.mark.parametrize(("stream", "right"), [("true", True), ("false", False)])
def test_only_streams_can_be_resumed(stream: str, right: bool) -> None:  # noqa: FBT001
    body = f'{{"prompt": "hi", "stream": {stream}, "resumable": true}}'.encode()
    if right:
        assert parsed(
            GenerateBody, body, allowed_values, rules=STANDARD_RULES
        ).resumable
    else:
        with pytest.raises(
            InvalidBodyError, match="resumable: is true, and stream is false"
        ):
            parsed(GenerateBody, body, allowed_values, rules=STANDARD_RULES)


def test_a_field_that_is_not_known_is_told_its_neighbours() -> None:
    with pytest.raises(InvalidBodyError) as error:
        parsed(
            GenerateBody,
            b'{"prompt": "hi", "sla": {"ttft": 1}, "temprature": 1}',
            allowed_values,
            rules=STANDARD_RULES,
        )
    allowed = {problem.field: problem.allowed for problem in error.value.problems}
    assert allowed["sla.ttft"] == "ttft_ms, tpot_ms, max_quality_loss, confidence"
    assert "temperature" in allowed["temprature"]
    assert "ttft_ms" not in allowed["temprature"]


def test_a_fleet_shows_where_engines_are_to_operators_only() -> None:
    """Addresses, processes, paths, and details that quote them; figures are for all."""
    spec = TierSpec(
        TierName.FAST,
        2048,
        max_num_seqs=8,
        max_in_flight=16,
        urls=("http://10.0.0.5:8000",),
    )
    fleet = Fleet((spec,))
    replica = fleet.add(Replica("fast-0", spec, "http://10.0.0.5:8000", "", "fake"))
    replica.update(pid=4711)
    replica.mark(ReplicaStatus.FAILED, "http://10.0.0.5:8000 does not answer")
    shown = {
        inside: render_fleet(
            fleet.snapshot(), "m", "machine", sources=fleet.sources, inside=inside
        )
        for inside in (True, False)
    }
    assert "10.0.0.5" not in str(shown[False])
    assert "4711" not in str(shown[False])
    (inner,), (outer,) = (
        shown[inside]["tiers"][0]["replicas"] for inside in (True, False)
    )
    assert inner["url"] == "http://10.0.0.5:8000"
    assert inner["pid"] == 4711
    assert inner["detail"] == "http://10.0.0.5:8000 does not answer"
    assert outer["url"] is None
    assert outer["pid"] is None
    assert outer["detail"] == ""
    assert inner.keys() == outer.keys()
    assert shown[True]["scope"] == "all"
    assert shown[False]["scope"] == "own"
    assert outer["state"] == "failed"
    assert outer["limit"] == 16
    assert outer["tpot_ms"] is None
    assert outer["kv_cache_usage"] is None
