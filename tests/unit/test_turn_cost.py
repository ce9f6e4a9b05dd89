"""benchmarks/turn_cost.py: the conversations that it sends, and what it says of the times."""

import json
import sys
from importlib import import_module
from typing import Any

import pytest

from router.section import PROJECT


@pytest.fixture
def turn_cost(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(PROJECT / "benchmarks"))
    before = set(sys.modules)
    yield import_module("turn_cost")
    for name in set(sys.modules) - before:
        del sys.modules[name]


def body_of(request: bytes) -> dict[str, Any]:
    head, _, body = request.partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head
    document: dict[str, Any] = json.loads(body)
    return document


@pytest.mark.parametrize("name", ["1k", "10k", "image"])
def test_a_conversation_grows_at_its_end(turn_cost: Any, name: str) -> None:
    """It has its length, further turns leave what was sent before alone, and a seed makes it again."""
    length = turn_cost.LENGTHS[name]
    conversation = turn_cost.Conversation.begin(length, "seed")
    request = conversation.request("auto")
    again = turn_cost.Conversation.begin(length, "seed")
    assert again.request("auto") == request
    text_bytes = len(request) - length.image_bytes
    wanted_bytes = length.tokens * turn_cost.CHARS_PER_TOKEN
    assert wanted_bytes < text_bytes < 1.5 * wanted_bytes
    sent = body_of(request)
    for _ in range(turn_cost.TURNS):
        conversation.add()
        grown = body_of(conversation.request("auto"))
        assert grown["messages"][: len(sent["messages"])] == sent["messages"]
        assert grown["messages"][-1]["role"] == "tool"
        sent = grown


def test_conversations_share_their_beginning_alone(turn_cost: Any) -> None:
    length = turn_cost.LENGTHS["10k"]
    first, second = [
        body_of(turn_cost.Conversation.begin(length, seed).request("auto"))
        for seed in ("one", "two")
    ]
    assert first["messages"][0] == second["messages"][0]
    texts = {message["content"] for message in first["messages"][1:]}
    shared = texts & {message["content"] for message in second["messages"][1:]}
    assert shared == {"I read the next part of the file."}


def test_ratios_are_those_of_passes(turn_cost: Any) -> None:
    """A ratio is the median of the passes' ratios; a row's CPU time is the median of the passes."""

    def samples(*cpu_ms: float) -> list[Any]:
        return [
            turn_cost.Sample(cpu_ms=time, wall_ms=9.0, turns=4, kilobytes=5.0)
            for time in cpu_ms
        ]

    before = "QARR before /v1"
    measured = {
        turn_cost.RELAY: samples(1.0, 1.0, 1.0),
        turn_cost.BASE: samples(2.0, 4.0, 8.0),
        before: samples(10.0, 10.0, 40.0),
        turn_cost.OURS: samples(3.0, 2.0, 8.0),
    }
    run = turn_cost.Run(["head"], versions={turn_cost.OURS: "v"})
    run.memory_mb = {turn_cost.OURS: 90.0}
    run.samples = {"1k": dict.fromkeys(turn_cost.KINDS, measured)}
    row = run.rows("1k", "fresh")[turn_cost.OURS]
    assert row["ratio"] == 1.0
    assert row["cpu_ms"] == 3.0
    assert (row["least_ms"], row["most_ms"]) == (2.0, 8.0)
    text = run.text()
    assert f"-> {turn_cost.OURS}: x0.20 of {before}" in text
    assert "1,000 tokens, growing: 5 kB a request" in text
    assert json.loads(json.dumps(run.record()))["rows"]["1k"]["fresh"]
