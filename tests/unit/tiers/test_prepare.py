"""Making the three checkpoints: a base in each of its forms, a quantizer that fails, one that is stopped."""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import quantizer as fake
from tests.unit.made_checkpoints import model
from tiers.checkpoints.checkpoint import MANIFEST, Checkpoint
from tiers.checkpoints.prepare import (
    DEFAULT_GGUF,
    DEFAULT_GGUF_SHA256,
    DEFAULT_MODEL,
    PrepareOptions,
    find,
    finished,
    locate,
    prepare,
    servable,
)
from tiers.errors import CheckpointError
from tiers.spec import STANDARD_TIERS

FAST, BALANCED, PRECISE = STANDARD_TIERS


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the fake quantizer's orders: each command finishes at once."""
    folder = tmp_path / "orders"
    folder.mkdir()
    for command in ("bf16", "fp8", "awq", "import-gguf", "fetch-hub"):
        (folder / command).write_text("done")
    monkeypatch.setenv("FAKE_QUANTIZER", str(folder))
    return folder


@pytest.fixture
def options(tmp_path: Path) -> PrepareOptions:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(fake.__file__)} "$@"\n'
    )
    python.chmod(0o755)
    return PrepareOptions(str(model(tmp_path / "My Model")), tmp_path / "store", python)


def nothing(*_: object) -> None:
    """Tell nobody."""


def test_all_three_are_made_once(options: PrepareOptions, orders: Path) -> None:
    """Handed over in the order in which they are made, returned fast first; afterwards nothing is left to do."""
    made: list[Checkpoint] = []
    checkpoints = prepare(options, nothing, made.append)
    assert [c.tier for c in made] == [PRECISE, BALANCED, FAST]
    assert checkpoints == tuple(reversed(made)) == find(options) == finished(options)
    for command in ("fp8", "awq"):
        assert (
            (orders / f"{command}.argv").read_text().startswith(f"{made[0].path} ")
        ), "from the BF16 checkpoint"
    fast = checkpoints[0].manifest
    assert fast.model == "my-model"
    assert fast.group_size == 64
    assert fast.calibration_samples == 32
    assert fast.versions == {"fake": "1"}
    assert fast.calibration_max_tokens == options.calibration_tokens
    assert fast.calibration_tokens == 4096
    assert len({c.manifest.tokenizer_digest for c in checkpoints}) == 1
    assert (
        prepare(replace(options, quantizer_python=options.store / "none"), nothing)
        == checkpoints
    )
    assert not list(options.store.glob("*/*.partial"))


def test_only_what_is_wanted_is_made(options: PrepareOptions, orders: Path) -> None:
    """With the base in BF16, which it is made of."""
    checkpoints = prepare(options, nothing, wanted={FAST})
    assert [checkpoint.tier for checkpoint in checkpoints] == [FAST, PRECISE]
    assert not (orders / "fp8.argv").exists()


def test_each_checkpoint_is_scored(options: PrepareOptions, orders: Path) -> None:
    """One that an older release made is scored afterwards, and is not made again."""
    for command, logprob in (("bf16", "-1"), ("fp8", "-1"), ("awq", "-1.5")):
        (orders / f"{command}.logprob").write_text(logprob)
    fast, balanced, precise = prepare(options, nothing)
    references = [
        checkpoint.manifest.reference for checkpoint in (fast, balanced, precise)
    ]
    assert [r.texts[0].logprobs if r else None for r in references] == [
        (-1.5, -1.5),
        (-1.0, -1.0),
        (-1.0, -1.0),
    ]
    manifest = json.loads((precise.path / MANIFEST).read_text())
    del manifest["reference"]
    (precise.path / MANIFEST).write_text(json.dumps(manifest))
    assert [checkpoint.tier for checkpoint in finished(options)] == [
        FAST,
        BALANCED,
        PRECISE,
    ]
    assert [checkpoint.tier for checkpoint in servable(options)] == [FAST, BALANCED]
    assert find(options) is None
    made_before = (precise.path / "model.safetensors").lstat().st_mtime_ns
    assert prepare(options, nothing) == find(options) == (fast, balanced, precise)
    assert (precise.path / "model.safetensors").lstat().st_mtime_ns == made_before


def test_a_quantized_checkpoint_that_says_something_else_is_refused(
    options: PrepareOptions, orders: Path
) -> None:
    """By more than quantization explains: nothing of it is left, and the others serve."""
    for command, logprob in (("bf16", "-1"), ("fp8", "-1"), ("awq", "-2.5")):
        (orders / f"{command}.logprob").write_text(logprob)
    with pytest.raises(
        CheckpointError,
        match=r"1\.50 nats a token from the base model's, at most 1\.00 is allowed",
    ):
        prepare(options, nothing)
    assert [checkpoint.tier for checkpoint in finished(options)] == [BALANCED, PRECISE]


@pytest.mark.usefixtures("orders")
def test_a_bf16_model_is_taken_as_published(options: PrepareOptions) -> None:
    """By links to its files, hidden ones left out: no weights are copied, and no quantizer is needed."""
    (options.store.parent / "My Model" / ".cache").write_text("")
    precise = prepare(options, nothing)[-1]
    assert precise.manifest.method == "BF16, as published"
    assert (precise.path / "model.safetensors").is_symlink()
    assert not (precise.path / ".cache").exists()


@pytest.mark.usefixtures("orders")
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_model_of_another_type_is_cast(options: PrepareOptions, key: str) -> None:
    folder = options.store.parent / "My Model"
    (folder / "config.json").write_text(json.dumps({key: "float16"}))
    (folder / "tokenizer.json").write_text('{"b":  1, "a": 2}')
    precise = prepare(options, nothing)[-1]
    assert precise.manifest.method == "BF16, cast from the base model"
    assert (precise.path / "tokenizer.json").read_text() == '{"b":  1, "a": 2}'


def test_a_quantized_model_is_refused(options: PrepareOptions) -> None:
    """Its loss would be counted as nobody's; nothing is left in the store."""
    (options.store.parent / "My Model" / "config.json").write_text(
        '{"quantization_config": {"quant_method": "gptq"}}'
    )
    with pytest.raises(
        CheckpointError, match="is quantized already: give the unquantized base model"
    ):
        prepare(options, nothing)
    assert finished(options) == ()


def test_a_failure_has_the_end_of_the_log(
    options: PrepareOptions, orders: Path
) -> None:
    """What the quantizer said last, and where the rest is; what was made before stays."""
    (orders / "fp8").write_text("fail")
    with pytest.raises(CheckpointError, match=r"'fp8' failed with status 1") as caught:
        prepare(options, nothing)
    assert "No space left on device" in str(caught.value)
    assert str(options.store / "prepare.log") in str(caught.value)
    assert [c.tier for c in finished(options)] == [PRECISE]
    assert find(options) is None


def test_layers_are_told_as_they_are_done(
    options: PrepareOptions, orders: Path
) -> None:
    """With the parts that there are; a step without parts has none."""
    told: list[tuple[str, int, int]] = []

    def progress(message: str, done: int, total: int) -> None:
        told.append((message, done, total))
        if done == 2:
            (orders / "awq").write_text("done")

    (orders / "awq").write_text("2")
    prepare(options, progress)
    assert told[0] == ("loading the base model", 0, 0)
    assert [part for part in told if part[2]] == [
        ("quantizing to AWQ int4, groups of 64", n, 31) for n in (1, 2)
    ]


def test_a_fault_of_those_who_are_told_ends_the_quantizer(
    options: PrepareOptions, orders: Path
) -> None:
    (orders / "awq").write_text("1")

    def progress(_message: str, done: int, _total: int) -> None:
        if done:
            raise RuntimeError("the terminal is gone")

    with pytest.raises(RuntimeError, match="the terminal is gone"):
        prepare(options, progress)
    process = options.quantizer._process
    assert process is not None
    assert process.returncode == -15


def test_stopping_ends_what_runs_and_what_starts_later(
    options: PrepareOptions, orders: Path
) -> None:
    """From another thread, at any time: prepare fails in its own."""
    (orders / "awq").write_text("1")
    waiting = threading.Event()
    failures: list[CheckpointError] = []

    def run() -> None:
        try:
            prepare(
                options, lambda _message, done, _total: waiting.set() if done else None
            )
        except CheckpointError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert waiting.wait(20)
    options.quantizer.stop()
    thread.join(20)
    assert "'awq' failed with status -15" in str(failures[0])
    with pytest.raises(CheckpointError, match="'awq' failed with status -15"):
        prepare(options, nothing)
    assert [c.tier for c in finished(options)] == [BALANCED, PRECISE]


def test_the_quantizer_yields_as_it_is_told(
    options: PrepareOptions, orders: Path
) -> None:
    """Processes that start from now on, so that engines beside them keep their speed."""
    options.quantizer.niceness = 7
    prepare(options, nothing)
    # beside its own
    assert (orders / "awq.pid").read_text().split()[1] == str(min(os.nice(0) + 7, 19))


def test_code_in_the_calibration_asks_for_small_groups(
    options: PrepareOptions, orders: Path, tmp_path: Path
) -> None:
    """Unless a group size is given; more than half of the prompts must have code."""

    def awq(text: str, **more: Any) -> str:
        calibration = tmp_path / "calibration.jsonl"
        calibration.write_text((json.dumps({"text": text}) + "\n") * 128)
        prepare(replace(options, calibration=calibration, **more), nothing)
        return (orders / "awq.argv").read_text()

    code = "Fix this:\n```python\ndef f(x):\n    return x + 1\n```"
    assert "--prefer-small-groups" in awq(code)
    assert "--prefer-small-groups" not in awq("Tell me about the sea.")
    assert "--prefer-small-groups" not in awq(code, group_size=128)


@pytest.mark.usefixtures("orders")
def test_a_model_of_the_hub_is_fetched_once(options: PrepareOptions) -> None:
    """Into the store, under its id; a folder that is there is not fetched again."""
    hub = replace(options, model="owner/Model-1.5")
    target = options.store / "hub" / "owner--Model-1.5"
    with pytest.raises(
        CheckpointError,
        match=r"model.name: owner/Model-1.5 cannot be fetched .*check the id",
    ):
        locate(hub, nothing)
    assert not target.exists()
    model(target)
    base = locate(replace(hub, quantizer_python=options.store / "none"), nothing)
    assert base.name == "model-1.5"
    assert base.source == target.resolve()


def test_the_default_model_is_known_by_its_file(options: PrepareOptions) -> None:
    gguf = options.store / "gguf" / DEFAULT_GGUF.rpartition("/")[2]
    gguf.parent.mkdir(parents=True)
    gguf.touch()
    base = locate(replace(options, model=DEFAULT_MODEL), nothing)
    assert base.name == DEFAULT_MODEL
    assert base.digest == DEFAULT_GGUF_SHA256
    assert base.source == gguf


def test_for_a_tier_that_is_quantized_while_loading_nothing_is_made(
    options: PrepareOptions, orders: Path
) -> None:
    """Its checkpoint is the BF16 one, which comes to it as soon as that is there."""
    online = replace(options, schemes={BALANCED: "online-fp8"})
    handed_over: list[Checkpoint] = []
    made = prepare(online, nothing, handed_over.append)
    assert [checkpoint.tier for checkpoint in made] == [FAST, BALANCED, PRECISE]
    assert made[1].path == made[2].path
    assert made[1].manifest == made[2].manifest
    assert [checkpoint.tier for checkpoint in handed_over] == [PRECISE, BALANCED, FAST]
    assert find(online) == made
    assert [checkpoint.tier for checkpoint in finished(online)] == list(STANDARD_TIERS)
    assert find(options) is None
    assert not list(options.store.rglob("fp8-*"))
