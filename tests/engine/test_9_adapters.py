"""LoRA on real engines: an adapter of the settings, one loaded at run time, and a tier that has none."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from openai import NotFoundError, OpenAI

from router.policy.profiles import load_profile
from tests.engine.collector import Collector
from tests.engine.conftest import QARR, key_of, started

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.conftest import Up

RANK = 4
QUESTION = "What is the capital of France?"
CHAT = "/v1/chat/completions"
TOP = 20  # An engine tells so many of the likeliest first tokens.


@pytest.fixture(scope="module")
def folders(up: Up, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    config = json.loads((_folder(up) / "config.json").read_text())
    made = {name: tmp_path_factory.mktemp(name) for name in ("support", "pirate")}
    for seed, folder in enumerate(made.values()):
        _write_adapter(folder, config, seed)
    return made


@pytest.fixture(scope="module")
def lora(
    up: Up,
    engine_keys: dict[str, str],
    folders: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Up]:
    """Start ``fast`` with an adapter and ``precise`` without one, beside the first fleet's ``balanced``."""
    own = {
        "QARR_TIERS__BALANCED__URLS": f'["{up.replica("balanced")["url"]}"]',
        "QARR_ENGINE__API_KEY": engine_keys["balanced"],
        "QARR_LORA__ADAPTERS": json.dumps(
            {"support": {"path": str(folders["support"]), "tiers": ["fast"]}}
        ),
        "QARR_LORA__AT_RUN_TIME": "true",
    }
    with started(own, tmp_path_factory, Collector()) as running:
        yield running


def test_an_adapter_is_listed_as_a_model_and_answers(lora: Up) -> None:
    """An OpenAI client finds it, and gets what the engine's adapter says, not what the model says."""
    client = OpenAI(base_url=f"{lora.url}/v1", api_key="none")
    card = client.models.retrieve("support")
    assert card.id == "support"
    assert card.model_extra is not None
    assert card.model_extra["tiers"] == ["fast"]
    assert "support" in {model.id for model in client.models.list()}
    assert lora.tiers()["fast"]["adapters"] == ["support"]
    assert lora.tiers()["precise"]["adapters"] == []
    with_adapter = _asked(lora, "support")
    plain = _asked(lora, "fast")
    assert not _alike(with_adapter, plain)
    assert _alike(with_adapter, _engines_own(lora, "support"))
    streamed = client.chat.completions.create(
        model="support",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=4,
        logprobs=True,
        top_logprobs=TOP,
        stream=True,
    )
    first = next(
        chunk.choices[0].logprobs.content[0]
        for chunk in streamed
        if chunk.choices and chunk.choices[0].logprobs
    )
    assert _alike({candidate.token for candidate in first.top_logprobs}, with_adapter)


def test_requests_for_it_are_kept_to_the_tiers_that_have_it(lora: Up) -> None:
    """A hint at another tier is not taken, and says why; where the tier is required, the request is refused."""
    body = {
        "prompt": QUESTION,
        "adapter": "support",
        "tier": "precise",
        "max_tokens": 8,
        "stream": False,
    }
    answer = httpx.post(f"{lora.url}/generate", json=body, timeout=120, trust_env=False)
    assert answer.headers["x-qarr-tier"] == "fast"
    assert answer.headers["x-qarr-reason"].startswith(
        "hint precise not taken: does not offer the adapter support"
    )
    refused = httpx.post(
        f"{lora.url}/generate", json={**body, "tier_policy": "require"}, trust_env=False
    )
    assert refused.status_code == 422
    assert refused.json()["type"] == "urn:qarr:problem:no-adapter"
    unknown = httpx.post(
        f"{lora.url}/generate", json={**body, "adapter": "nobody"}, trust_env=False
    )
    assert unknown.status_code == 400
    assert unknown.json()["errors"][0]["allowed"] == "one of support"
    with pytest.raises(NotFoundError):
        OpenAI(base_url=f"{lora.url}/v1", api_key="none").chat.completions.create(
            model="nobody", messages=[]
        )


def test_more_are_loaded_at_run_time_and_survive_a_restart(
    lora: Up, folders: dict[str, Path]
) -> None:
    """``qarr adapters load`` and ``unload`` act on running engines; an engine that is started again gets them again."""
    loaded = _load(lora, "pirate", folders["pirate"], tier="fast")
    assert loaded.returncode == 0
    assert loaded.stdout == "fast-0: loaded\n"
    assert lora.tiers()["fast"]["adapters"] == ["pirate", "support"]
    before = _asked(lora, "pirate")
    assert _alike(before, _engines_own(lora, "pirate"))
    assert not _alike(before, _asked(lora, "support"))
    shown = _qarr(lora, "adapters").stdout.split()
    assert shown == ["adapter", "tiers", "pirate", "fast", "support", "fast"]

    assert _qarr(lora, *["tiers", "restart", "fast-0"]).returncode == 0
    assert lora.tiers()["fast"]["adapters"] == ["pirate", "support"]
    assert _alike(_asked(lora, "pirate"), before)

    elsewhere = _load(lora, "third", folders["pirate"], tier="balanced")
    assert elsewhere.returncode == 2
    assert "balanced-0" in elsewhere.stderr
    wrong = _load(lora, "fourth", Path("/nowhere"), tier="fast")
    assert wrong.returncode == 2
    assert "/nowhere" in wrong.stderr

    unloaded = _qarr(lora, *["adapters", "unload", "pirate"])
    assert unloaded.stdout == "fast-0: unloaded\n"
    assert lora.tiers()["fast"]["adapters"] == ["support"]
    with pytest.raises(NotFoundError):
        OpenAI(base_url=f"{lora.url}/v1", api_key="none").models.retrieve("pirate")


def test_its_loss_is_measured_and_decides(
    lora: Up, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The adapter's loss is measured on the tiers that have it, against itself at the highest precision."""
    loaded = _load(lora, "support", folders["support"], tier="precise")
    assert loaded.returncode == 0
    assert lora.tiers()["fast"]["adapters"] == ["support"]
    assert lora.tiers()["balanced"]["adapters"] == []
    assert lora.tiers()["precise"]["adapters"] == ["support"]
    row = {
        "prompt": QUESTION,
        "class": "chat",
        "complexity": "trivial",
        "max_tokens": 8,
    }
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps(row | {"check": {"type": "regex", "pattern": "."}}))
    command = ["profile", "quality", "--adapter", "support", "--tasks", str(tasks)]
    profiled = _qarr(lora, *command)
    assert profiled.returncode == 0, profiled.stderr
    assert "not first choice" in profiled.stdout
    profiles = [load_profile(path) for path in lora.profiles.glob("quality-*.json")]
    (measured,) = [profile for profile in profiles if profile.adapter == "support"]
    assert {count.tier for count in measured.counts} == {"fast"}


def _qarr(running: Up, *argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "QARR_POLICY__PROFILES": str(running.profiles)}
    command = [QARR, *argv, "--url", running.url]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=900
    )


def _load(
    running: Up, name: str, folder: Path, *, tier: str
) -> subprocess.CompletedProcess[str]:
    """Load an adapter into a tier's engines."""
    command = ["adapters", "load", name, str(folder), "--tier", tier]
    return _qarr(running, *command)


def _alike(first: set[str], second: set[str]) -> bool:
    """Tell whether the likeliest first tokens of two answers are the same, but for a few that rounding may turn.

    The text is no measure: random weights make near-ties, and one that turns changes all that follows.
    """
    return len(first & second) > TOP // 2


def _asked(running: Up, model: str) -> set[str]:
    return _first_tokens(
        httpx.post(
            f"{running.url}{CHAT}", json=_chat(model), timeout=120, trust_env=False
        )
    )


def _engines_own(running: Up, model: str) -> set[str]:
    replica = running.replica("fast")
    headers = {"authorization": f"Bearer {key_of(replica['pid'])}"}
    url = f"{replica['url']}{CHAT}"
    return _first_tokens(
        httpx.post(
            url, json=_chat(model), headers=headers, timeout=120, trust_env=False
        )
    )


def _first_tokens(answer: httpx.Response) -> set[str]:
    (choice,) = answer.raise_for_status().json()["choices"]
    return {
        candidate["token"]
        for candidate in choice["logprobs"]["content"][0]["top_logprobs"]
    }


def _chat(model: str) -> dict[str, object]:
    messages = [{"role": "user", "content": QUESTION}]
    return {
        "model": model,
        "messages": messages,
        "max_tokens": 4,
        "logprobs": True,
        "top_logprobs": TOP,
    }


def _folder(running: Up) -> Path:
    return Path(running.tiers()["precise"]["checkpoint"])


def _write_adapter(folder: Path, config: dict[str, int], seed: int) -> None:
    """Write an adapter of all query and value projections in the form of PEFT: random numbers, large enough to matter."""
    chance = random.Random(seed)
    hidden = config["hidden_size"]
    keys_and_values = (
        hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    )
    header: dict[str, object] = {}
    data = bytearray()
    for layer in range(config["num_hidden_layers"]):
        for name, outputs in (("q_proj", hidden), ("v_proj", keys_and_values)):
            for part, shape in (
                ("lora_A", (RANK, hidden)),
                ("lora_B", (outputs, RANK)),
            ):
                values = array(
                    "f", (chance.gauss(0, 0.15) for _ in range(shape[0] * shape[1]))
                )
                key = f"base_model.model.model.layers.{layer}.self_attn.{name}.{part}.weight"
                span = [len(data), len(data) + 4 * len(values)]
                header[key] = {"dtype": "F32", "shape": shape, "data_offsets": span}
                data += values.tobytes()
    head = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(
        struct.pack("<Q", len(head)) + head + bytes(data)
    )
    about = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(
        json.dumps({**about, "bias": "none", "task_type": "CAUSAL_LM"})
    )
