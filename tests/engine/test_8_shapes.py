"""A fleet of another shape beside the first one: tiers here and elsewhere, added, left out; drafts, too little memory."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

import httpx
import pytest

from router.deployment.settings import EngineSettings
from tests.engine.collector import Collector
from tests.engine.conftest import QARR, key_of, started
from tests.engine.scoring import OTHER_REGRET

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.conftest import Up

# A block of the KV cache has so many tokens, and only whole blocks are shared.
CPU_BLOCK = 128
EVENT = "data: {"
PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Repeat this three times: the quick brown fox jumps over the lazy dog.",
    "Why is the sky blue?",
)


@pytest.fixture(scope="module")
def int8(up: Up, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8") / "checkpoint"
    script = Path(__file__).with_name("int8_checkpoint.py")
    python = EngineSettings().python
    subprocess.run(
        [python, script, up.tiers()["precise"]["checkpoint"], folder],
        check=True,
        timeout=120,
    )
    return folder


@pytest.fixture(scope="module")
def other_fleet(
    up: Up,
    int8: Path,
    engine_keys: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Up]:
    """Start ``int8`` with n-grams, and ``precise`` with a draft model beside the first fleet's, which has none.

    There are no other tiers.
    """
    own = {
        "QARR_TIERS__INT8__CHECKPOINT": str(int8),
        "QARR_TIERS__INT8__DRAFT": "ngram",
        "QARR_TIERS__FAST__REPLICAS": "0",
        "QARR_TIERS__BALANCED__REPLICAS": "0",
        "QARR_TIERS__PRECISE__URLS": f'["{up.replica("precise")["url"]}"]',
        "QARR_ENGINE__API_KEY": engine_keys["precise"],
        "QARR_TIERS__PRECISE__REPLICAS": "1",
        "QARR_TIERS__PRECISE__DRAFT": up.tiers()["fast"]["checkpoint"],
        "QARR_TIERS__PRECISE__ENGINE_ARGS": '["--max-num-batched-tokens", "1024"]',
        # No test machine has so many GiB.
        "QARR_TIERS__PRECISE__ENV": '{"VLLM_CPU_KVCACHE_SPACE": "999"}',
    }
    with started(own, tmp_path_factory, Collector()) as running:
        yield running


def test_a_tier_runs_here_and_elsewhere_and_one_is_left_out(
    up: Up, other_fleet: Up
) -> None:
    """Both replicas serve the same checkpoint; requests for the tier that is left out go up."""
    tiers = other_fleet.tiers()
    local, remote = tiers["precise"]["replicas"]
    assert local["state"] == "ready"
    assert remote["state"] == "ready"
    assert local["pid"] is not None
    assert remote["pid"] is None
    assert remote["url"] == up.replica("precise")["url"]
    assert local["precision"] == "bf16"
    assert remote["precision"] == "bf16"
    assert tiers["precise"]["precision"] == "bf16"
    assert tiers["balanced"]["state"] == "absent"
    assert tiers["balanced"]["replicas"] == []
    page = httpx.get(f"{other_fleet.url}/metrics", trust_env=False).text
    assert 'qarr_tier_ready_replicas{tier="precise"} 2.0' in page
    assert 'qarr_tier_ready_replicas{tier="balanced"}' not in page
    served = [
        other_fleet.generate(tier="balanced", prompt="hi").headers["x-qarr-tier"]
        for _ in range(2)
    ]
    # This is the next higher precision, which is good enough for small talk.
    assert served == ["int8", "int8"]
    assert any(
        re.search(r"precise +bf16 +weights", line) for line in other_fleet.output
    )
    assert not any(
        "balanced" in line and "weights" in line for line in other_fleet.output
    )


def test_a_tier_of_another_precision_is_added(up: Up, other_fleet: Up) -> None:
    """Its precision is read from its checkpoint and puts it into its place; its engine answers, by both APIs.

    The highest precision finds its answer likely as well: one layer of it is rounded, and rightly.
    """
    assert [
        (name, tier["precision"]) for name, tier in other_fleet.tiers().items()
    ] == [
        ("fast", "unknown"),
        ("balanced", "unknown"),
        ("int8", "int8-w8a8"),
        ("precise", "bf16"),
    ]
    answer = other_fleet.generate(
        tier="int8", prompt=PROMPTS[0], temperature=0, stream=False
    )
    assert answer.headers["x-qarr-tier"] == "int8"
    assert answer.headers["x-qarr-precision"] == "int8-w8a8"
    other_fleet.scorer("int8").check_answer(PROMPTS[0], answer.json()["text"])
    up.scorer("precise").check_answer(
        PROMPTS[0], answer.json()["text"], max_regret=OTHER_REGRET
    )
    chat = {
        "model": "int8",
        "messages": [{"role": "user", "content": PROMPTS[0]}],
        "max_tokens": 16,
        "temperature": 0,
    }
    chat_answer = httpx.post(
        f"{other_fleet.url}/v1/chat/completions", json=chat, timeout=60, trust_env=False
    )
    assert chat_answer.headers["x-qarr-tier"] == "int8"
    other_fleet.scorer("int8").check_answer(
        PROMPTS[0], chat_answer.json()["choices"][0]["message"]["content"]
    )
    models = httpx.get(f"{other_fleet.url}/v1/models", trust_env=False).json()["data"]
    assert "int8" in {model["id"] for model in models}
    page = httpx.get(f"{other_fleet.url}/metrics", trust_env=False).text
    assert 'qarr_tier_ready_replicas{tier="int8"} 1.0' in page
    shown = subprocess.run(
        [QARR, "tiers", "--url", other_fleet.url],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "int8-0" in shown.stdout
    log = httpx.get(f"{other_fleet.url}/requests", trust_env=False).json()["requests"]
    assert [record["served_by"] for record in log[:2]] == ["int8", "int8"]


def test_an_engine_that_does_not_fit_is_started_with_less(other_fleet: Up) -> None:
    """vLLM refuses the KV cache that was asked for, and tells what is free; the second start serves, and says why."""
    reason = re.compile(
        r"started with less: KV cache [\d.]+ instead of 999 GiB: [\d.]+ GiB were free"
    )
    replica = other_fleet.replica("precise")
    assert reason.fullmatch(replica["detail"])
    assert replica["state"] == "ready"
    assert any(
        "precise-0" in line and "starting" in line and reason.search(line)
        for line in other_fleet.output
    )
    assert other_fleet.generate(tier="precise").headers["x-qarr-tier"] == "precise"


@pytest.mark.parametrize("tier", ["int8", "precise"])
def test_drafts_change_no_greedy_answer(up: Up, other_fleet: Up, tier: str) -> None:
    """Answers with a draft are those that the same weights find likeliest without; metrics tell what was accepted.

    ``precise`` is judged by the first fleet's engine, which has no draft; ``int8`` by its own, which reads without one.
    """
    drafting = other_fleet.replica(tier)
    judge = up.scorer(tier) if tier == "precise" else other_fleet.scorer(tier)
    for prompt in PROMPTS:
        judge.check_tokens(
            judge.prompt_ids(prompt),
            _answer(drafting["url"], key_of(drafting["pid"]), prompt),
        )
    page = httpx.get(f"{drafting['url']}/metrics", trust_env=False).text
    proposed = _drafted_tokens(page, "draft")
    accepted = _drafted_tokens(page, "accepted")
    assert proposed >= accepted > 0
    labels = f'{{replica="{drafting["id"]}",tier="{tier}"}}'
    assert _read_until(other_fleet, f"qarr_draft_tokens_total{labels}", proposed)
    assert _read_until(
        other_fleet, f"qarr_draft_tokens_accepted_total{labels}", accepted
    )
    assert other_fleet.replica(tier)["draft_acceptance"] == round(
        accepted / proposed, 3
    )
    shown = subprocess.run(
        [QARR, "tiers", "--url", other_fleet.url],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "of drafted tokens accepted" in " ".join(shown.stdout.split())


def _drafted_tokens(page: str, kind: str) -> float:
    """Return vLLM's count of drafted tokens of a kind, from its page of metrics."""
    name = f"vllm:spec_decode_num_{kind}_tokens_total"
    counts = re.findall(rf"^{name}{{.*}} (\S+)$", page, re.MULTILINE)
    return float(counts[0])


def test_what_vllm_refuses_with_a_draft_is_said(other_fleet: Up) -> None:
    """Both tiers here have a draft: the router refuses the request that the engine would, and names its parameter."""
    body = {
        "model": "auto",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 4,
        "min_p": 0.1,
    }
    refused = httpx.post(
        f"{other_fleet.url}/v1/chat/completions", json=body, timeout=60, trust_env=False
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "unsupported_parameter"
    drafting = other_fleet.replica("precise")
    headers = {"authorization": f"Bearer {key_of(drafting['pid'])}"}
    listed = httpx.get(
        f"{drafting['url']}/v1/models", headers=headers, trust_env=False
    ).json()
    body["model"] = listed["data"][0]["id"]
    engines = httpx.post(
        f"{drafting['url']}/v1/chat/completions",
        json=body,
        headers=headers,
        timeout=60,
        trust_env=False,
    )
    assert engines.status_code == 400
    assert "min_p and logit_bias" in engines.text


def test_a_chat_stays_where_its_prefix_is_cached(
    other_fleet: Up, engine_keys: dict[str, str]
) -> None:
    """A chat's turns go to one of two replicas, which has most of each cached; the other has nothing cached."""
    notes = f"{token_hex(8)}. " + " ".join(
        f"Note {number}: the harbour opens at dawn." for number in range(50)
    )
    messages = [{"role": "system", "content": notes}]
    records = []
    for question in ("When does it open?", "Who told you?", "Repeat the first note."):
        messages.append({"role": "user", "content": question})
        body = {
            "model": "precise",
            "messages": messages,
            "max_tokens": 8,
            "temperature": 0,
        }
        answer = httpx.post(
            f"{other_fleet.url}/v1/chat/completions",
            json=body,
            timeout=300,
            trust_env=False,
        )
        text = answer.raise_for_status().json()["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": text})
        records.append(
            httpx.get(f"{other_fleet.url}/requests", trust_env=False).json()[
                "requests"
            ][0]
        )
    assert len({record["replica"] for record in records}) == 1
    first, *later = records
    assert first["predicted_cached_tokens"] == 0
    assert first["cached_prompt_tokens"] == 0
    for record in later:
        assert record["cached_prompt_tokens"] > record["prompt_tokens"] / 2
        cached = record["cached_prompt_tokens"]
        assert abs(cached - record["predicted_cached_tokens"]) <= CPU_BLOCK
    local, remote = other_fleet.tiers()["precise"]["replicas"]
    cold = remote if first["replica"] == local["id"] else local
    key = key_of(cold["pid"]) if cold["pid"] is not None else engine_keys["precise"]
    headers = {"authorization": f"Bearer {key}"}
    body["model"] = httpx.get(
        f"{cold['url']}/v1/models", headers=headers, trust_env=False
    ).json()["data"][0]["id"]
    answer = httpx.post(
        f"{cold['url']}/v1/chat/completions",
        json=body,
        headers=headers,
        timeout=300,
        trust_env=False,
    )
    usage = answer.raise_for_status().json()["usage"]
    assert not usage["prompt_tokens_details"]["cached_tokens"]


def _answer(url: str, key: str, prompt: str) -> list[int]:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": 32,
        "return_token_ids": True,
        "cache_salt": token_hex(8),
    }
    headers = {"authorization": f"Bearer {key}"}
    model = httpx.get(f"{url}/v1/models", headers=headers, trust_env=False).json()[
        "data"
    ][0]["id"]
    answer = httpx.post(
        f"{url}/v1/chat/completions",
        json={"model": model, **body},
        headers=headers,
        timeout=300,
        trust_env=False,
    )
    ids: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
    return ids


def _read_until(running: Up, name: str, wanted: float) -> bool:
    """Read the router's metrics until one has a value: it reads its engines' twice a second."""
    for _ in range(100):
        page = httpx.get(f"{running.url}/metrics", trust_env=False).text
        if f"{name} {wanted}" in page:
            return True
        time.sleep(0.1)
    return False


def test_an_engine_joins_and_leaves_a_running_router(up: Up, other_fleet: Up) -> None:
    """Removed by its address, then added anew, it is warmed up and compared, and answers for its tier alone.

    Meanwhile the engine with a draft is alone.
    """

    def operate(*args: str) -> str:
        done = other_fleet.operate(*args)
        assert done.returncode == 0, done.stderr
        return done.stdout

    url = up.replica("precise")["url"]
    local_id = other_fleet.replica("precise")["id"]
    assert operate("remove", url).endswith("remove done, removed\n")
    (local,) = other_fleet.tiers()["precise"]["replicas"]
    assert local["id"] == local_id
    _several_tokens_a_step(other_fleet)
    added, _, message = operate("add", "precise", url).partition(": ")
    assert message == "added, is ready\n"
    operate("drain", local_id)
    assert other_fleet.generate(tier="precise").headers["x-qarr-tier"] == "precise"
    _, joined = other_fleet.tiers()["precise"]["replicas"]
    assert joined["id"] == added
    assert joined["source"] == "command"
    assert joined["served"] == 1
    assert joined["precision"] == "bf16"
    operate("resume", local_id)
    assert operate("remove", added) == f"{added}: remove done, removed\n"
    page = httpx.get(f"{other_fleet.url}/metrics", trust_env=False).text
    assert f'replica="{added}"' not in page


def _several_tokens_a_step(other_fleet: Up) -> None:
    """Check that through the router too, an answer of a tier with a draft arrives whole, several tokens an event."""
    body = {
        "model": "precise",
        "messages": [{"role": "user", "content": PROMPTS[2]}],
        "max_tokens": 40,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    answer = httpx.post(
        f"{other_fleet.url}/v1/chat/completions",
        json=body,
        timeout=300,
        trust_env=False,
    )
    assert answer.headers["x-qarr-tier"] == "precise"
    events = [
        json.loads(line.removeprefix("data: "))
        for line in answer.text.splitlines()
        if line.startswith(EVENT)
    ]
    pieces: list[str] = []
    tokens: list[int] = []
    for event in events:
        for choice in event["choices"]:
            pieces.append(choice["delta"].get("content") or "")
            tokens += choice.get("token_ids") or ()
    engine = other_fleet.scorer("precise")
    engine.check_tokens(engine.prompt_ids(PROMPTS[2]), tokens)
    assert engine.text_of(tokens) == "".join(pieces)
    assert events[-1]["usage"]["completion_tokens"] == len(tokens)
    assert sum(map(bool, pieces)) < len(tokens)
    record = httpx.get(f"{other_fleet.url}/requests", trust_env=False).json()[
        "requests"
    ][0]
    assert record["served_by"] == "precise"
    assert record["output_tokens"] == len(tokens)
