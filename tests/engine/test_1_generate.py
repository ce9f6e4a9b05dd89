"""The main job on real vLLM: one model, three precisions, one router."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from classifier import ModelTokenCounter
from tests.engine.conftest import CAPITAL
from tests.engine.scoring import OTHER_REGRET
from tests.unit.router_stack import events
from tiers.checkpoints.checkpoint import read_checkpoint, weights_digest
from tiers.checkpoints.prepare import CALIBRATION_SAMPLES
from tiers.probe import EngineProbe
from tiers.spec import PRECISIONS, STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from tests.engine.conftest import Up
    from tiers.snapshot import Gauges


LONG = "Tell me a story about a fox."


@pytest.mark.parametrize("tier", list(STANDARD_TIERS))
def test_each_tier_streams_its_engines_answer(up: Up, tier: TierName) -> None:
    """By hint, every precision streams the likeliest answer of its own engine, and discloses itself.

    The highest precision finds that answer likely too: it is the model's, and not just any text.
    """
    answer = up.generate(tier=tier)
    assert answer.status_code == 200
    assert answer.headers["x-qarr-tier"] == tier
    assert answer.headers["x-qarr-precision"] == PRECISIONS[tier]
    for name in ("x-qarr-reason", "x-qarr-trace-id", "x-request-id"):
        assert answer.headers[name]
    seen = events(answer.text)
    text = "".join(data["text"] for name, data in seen if name == "message")
    up.scorer(tier).check_answer(CAPITAL, text)
    up.scorer(TierName.PRECISE).check_answer(CAPITAL, text, max_regret=OTHER_REGRET)
    assert seen[-1][0] == "done"
    usage = seen[-1][1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_greeting_goes_to_fast_and_code_does_not(up: Up) -> None:
    assert up.generate(prompt="hi").headers["x-qarr-tier"] == "fast"
    code = up.generate(
        prompt="Write a Python function that reverses a linked list.", max_tokens=4
    )
    assert code.headers["x-qarr-tier"] in {"balanced", "precise"}


def test_system_prompt_goes_through_the_models_template(up: Up) -> None:
    """The engine counts the system prompt's tokens, rendered by its own chat template, as the router predicted."""
    body = {
        "prompt": "Who are you?",
        "system_prompt": "You are a ship's cook named Ada.",
        "tier": "fast",
    }
    decision = httpx.post(f"{up.url}/route", json=body, trust_env=False).json()
    answer = up.generate(**body, stream=False, max_tokens=8).json()
    assert answer["usage"]["prompt_tokens"] == decision["prompt_tokens"]


def test_prompt_tokens_are_exact(up: Up) -> None:
    """The router's own count, without asking an engine, is the engine's: digits, code, scripts, white space."""
    prompts = [
        "In 1984, 3.50 + 12345",
        "def f(x):\n\treturn x ** 2\n",
        "你好世界 étude",
        "a \n\n b  ",
    ]
    for prompt in prompts:
        decision = httpx.post(
            f"{up.url}/route", json={"prompt": prompt}, trust_env=False
        ).json()
        assert decision["features"]["tokens_exact"] is True
        served = up.generate(
            prompt=prompt, tier="fast", stream=False, max_tokens=1
        ).json()
        assert served["usage"]["prompt_tokens"] == decision["prompt_tokens"], prompt


def test_every_text_has_the_models_own_tokens(up: Up) -> None:
    """The served model's tokenizer, rebuilt for speed, gives the ids of its own library, whatever the text."""
    path = Path(up.tiers()["fast"]["checkpoint"], "tokenizer.json")
    counter = ModelTokenCounter.from_file(path)
    library = Tokenizer.from_file(str(path))
    assert counter.backend == "tiktoken"

    @settings(max_examples=300)
    @given(
        st.text(max_size=60)
        | st.text(
            "aes'tTlLvV 019\n\r\t.,<|im_end>\u00e9\u0301\u0663\u3000", max_size=60
        )
    )
    def check(text: str) -> None:
        clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        expected = library.encode(clean, add_special_tokens=False)
        assert counter.encode(text) == expected.ids

    check()


def test_checkpoints_are_real(up: Up) -> None:
    """Each tier names the digest of its checkpoint, whose manifest says how it was made."""
    tiers = up.tiers()
    manifests = {}
    for name in STANDARD_TIERS:
        path = Path(tiers[name]["checkpoint"])
        checkpoint = read_checkpoint(name, path)
        assert checkpoint is not None, f"{path} is not a finished checkpoint"
        manifests[name] = checkpoint.manifest
        digest = weights_digest(path)
        assert tiers[name]["checkpoint_digest"] == digest
        assert checkpoint.manifest.weights_digest == digest
        config = json.loads((path / "config.json").read_text())
        is_quantized = config.get("quantization_config") is not None
        assert is_quantized == (name is not TierName.PRECISE)
    assert len({manifest.weights_digest for manifest in manifests.values()}) == 3
    assert len({manifest.tokenizer_digest for manifest in manifests.values()}) == 1
    assert manifests[TierName.FAST].group_size == 64
    assert manifests[TierName.FAST].calibration_samples == CALIBRATION_SAMPLES
    counter = ModelTokenCounter.from_file(
        Path(tiers["fast"]["checkpoint"], "tokenizer.json")
    )
    # Numbers are split into digits, as in the model's training.
    assert len(counter.encode("12345")) == 5


def test_prompt_that_fits_no_tier_is_a_422(up: Up) -> None:
    """A request beyond the required tier's context is refused with the numbers; if the tier is a hint, it goes higher."""
    body = {"prompt": "word " * 3000, "max_tokens": 1, "tier": "fast"}
    refused = up.generate(**body, tier_policy="require")
    assert refused.status_code == 422
    assert "exceed its context of 2048" in refused.json()["detail"]
    moved = httpx.post(f"{up.url}/route", json=body, trust_env=False).json()
    assert moved["tier"] in {"balanced", "precise"}
    assert "hint fast not taken" in moved["reason"]


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_frees_the_engine(up: Up, stream: bool) -> None:  # noqa: FBT001
    """vLLM's own count of running requests falls to zero once the client has closed its connection, in mid-answer."""
    body = json.dumps(
        {
            "prompt": LONG,
            "tier": "precise",
            "max_tokens": 2000,
            "temperature": 0,
            "stream": stream,
        }
    ).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    finished = up.finished_long("precise")
    with socket.create_connection(
        ("127.0.0.1", int(up.url.rsplit(":", 1)[1]))
    ) as client:
        client.settimeout(60)
        client.sendall(head + body)
        _until(
            lambda: (
                up.replica("precise")["in_flight"] == 1 and _engine(up).running == 1
            ),
            20,
        )
        if stream:
            assert b"200 OK" in client.recv(4096)
    _until(
        lambda: up.replica("precise")["in_flight"] == 0 and _engine(up).running == 0, 20
    )
    assert up.finished_long("precise") == finished, (
        "the engine went on for a client that is gone"
    )


def _engine(up: Up) -> Gauges:
    async def read() -> Gauges:
        async with httpx.AsyncClient(trust_env=False, timeout=10) as client:
            gauges, _ = await EngineProbe(
                client, up.replica("precise")["url"], ""
            ).readings()
            return gauges

    return asyncio.run(read())


def _until(condition: object, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
