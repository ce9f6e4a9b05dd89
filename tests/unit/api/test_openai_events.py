"""OpenAI's streams: the engine's bytes, but for what only the router had asked for."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from router.api.openai_events import RelayedEvents, with_member
from router.upstream.errors import EngineBroke
from router.upstream.sse import Chunk, parse_event
from tiers.spec import TierName

if TYPE_CHECKING:
    from router.upstream.engine_stream import EngineStream

IDS = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 7, "model": "m"}


def event(*choices: dict[str, Any], **more: Any) -> bytes:
    """Return an engine's event as vLLM writes it."""
    return b"data: " + json.dumps({**IDS, "choices": list(choices), **more}, separators=(",", ":")).encode()


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"index": 0, "delta": {"content": content}, "logprobs": None, "finish_reason": None, **more}


def relayed(*, wants_usage: bool = False, report: dict[str, Any] | None = None, **answer: Any) -> RelayedEvents:
    """Return the encoder for an answer with some properties of ``EngineStream``."""
    usual = {
        "progress": None,
        "parts": [],
        "failed_over": False,
        "usage": {},
        "fingerprint": "vllm-1",
    }
    stream = cast("EngineStream", SimpleNamespace(**usual | answer))
    return RelayedEvents(stream, report, chat=True, wants_usage=wants_usage)


def sent(encoder: RelayedEvents, *raw: bytes) -> list[bytes]:
    return encoder.events([parse_event(each) for each in raw])


def test_events_are_the_engines_bytes() -> None:
    """Spaces, escapes and unknown members stay as they are."""
    odd = b'data: {"choices": [{"index":0, "delta" :{"content":"\\u00e9"}}], "of vLLM": 1.0}'
    assert sent(relayed(), odd, b": a comment") == [odd + b"\n\n", b": a comment\n\n"]
    assert relayed().end() == [b"data: [DONE]\n\n"]


@pytest.mark.parametrize("wants_usage", [True, False])
def test_token_counts_go_to_who_asked_for_them(*, wants_usage: bool) -> None:
    """Without them, vLLM puts its fingerprint on the last chunk."""
    last, counts = event(text("", finish_reason="stop")), event(usage={"prompt_tokens": 1, "completion_tokens": 2})
    events = sent(relayed(wants_usage=wants_usage), last, counts)
    if wants_usage:
        assert events == [last + b"\n\n", counts + b"\n\n"]
    else:
        assert events == [last[:-1] + b',"system_fingerprint":"vllm-1"}\n\n']


def test_a_fingerprint_is_not_put_in_twice_nor_invented() -> None:
    last = event(text("", finish_reason="stop"), system_fingerprint="own")
    assert sent(relayed(), last) == [last + b"\n\n"]
    bare = event(text("", finish_reason="stop"))
    assert sent(relayed(fingerprint=None), bare) == [bare + b"\n\n"]


def test_token_ids_that_the_router_asked_for_are_taken_out() -> None:
    said = 'not "token_ids":[1]'
    (seen,) = sent(relayed(progress=object()), event(text(said, token_ids=[5, 6]), prompt_token_ids=[1, 2]))
    found = json.loads(seen.removeprefix(b"data: "))
    assert found["choices"][0]["token_ids"] is None
    assert found["prompt_token_ids"] is None
    assert found["choices"][0]["delta"]["content"] == said, "what looks the same in the text stays"


def test_a_token_without_text_is_told_only_because_of_its_ids() -> None:
    silent = {"index": 0, "delta": {}, "finish_reason": None, "token_ids": [5]}
    assert sent(relayed(progress=object()), event(silent)) == []
    assert len(sent(relayed(progress=object()), event({**silent, "finish_reason": "stop"}))) == 1


def test_what_another_engine_computed_looks_like_the_first_ones() -> None:
    part = SimpleNamespace(tier=TierName.PRECISE)
    encoder = relayed(
        progress=object(), parts=[part], failed_over=True, usage={"completion_tokens": 3}, wants_usage=True
    )
    sent(encoder, event(text("a", token_ids=[1])))
    (seen,) = encoder.events([Chunk(text=" b", token_ids=[2], finish_reason="stop", stop_reason=None)])
    choice = text(" b", finish_reason="stop", stop_reason=None, token_ids=None)
    assert json.loads(seen.removeprefix(b"data: ")) == {**IDS, "choices": [choice]}
    comment, usage, done = encoder.end()
    assert comment == b": continued on precise\n\n"
    assert json.loads(usage.removeprefix(b"data: ")) == {**IDS, "choices": [], "usage": {"completion_tokens": 3}}
    assert done == b"data: [DONE]\n\n"


def test_a_report_that_was_asked_for_comes_before_the_end() -> None:
    told, done = relayed(report={"tier": "fast"}).end()
    assert json.loads(told.removeprefix(b"data: "))["qarr"] == {"tier": "fast"}
    assert done == b"data: [DONE]\n\n"


def test_a_failure_is_an_error_event_and_no_end() -> None:
    (seen,) = relayed().failure(EngineBroke("the engine's stream ended early"))
    assert b"[DONE]" not in seen
    assert "error" in json.loads(seen.removeprefix(b"data: "))


@pytest.mark.parametrize("content", [b'{"a":1}', b'{"a":1}\n', b'{"a":[{}]} '])
def test_a_member_is_added_at_the_end(content: bytes) -> None:
    assert json.loads(with_member(content, "qarr", {"tier": "fast"})) == {
        **json.loads(content),
        "qarr": {"tier": "fast"},
    }
