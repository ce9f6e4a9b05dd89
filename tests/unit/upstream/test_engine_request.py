"""What engines are asked: the caller's bytes with as little change as routing needs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from router.upstream.engine_request import (
    EngineRequest,
    continuation_terms_of,
    may_be_resumed,
    may_response_be_resumed,
)
from router.upstream.json_object import JsonObject
from router.upstream.progress import ContinuationTerms
from tiers.replica import Replica
from tiers.spec import TierName, TierSpec

CHAT = {"model": "auto", "messages": [{"role": "user", "content": "hi"}]}


def replica(tier: TierName = TierName.FAST, **values: Any) -> Replica:
    """Return a replica that serves the model under a name of its own."""
    return Replica(
        "r-0",
        TierSpec(tier, 2048, max_num_seqs=16, max_in_flight=16),
        "http://127.0.0.1:1",
        "",
        "engines-own-name",
        **values,
    )


def relay(body: bytes | dict[str, Any], **values: Any) -> EngineRequest:
    document = JsonObject.parse(
        body if isinstance(body, bytes) else json.dumps(body).encode()
    )
    return EngineRequest(
        document=document, request_id="r", **{"is_streamed": False, **values}
    )


@pytest.mark.parametrize("kind", ["enabled", "adaptive", "disabled"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_thinking_is_not_asked_of_a_model_that_does_not_think(
    kind: str, path: str
) -> None:
    """Only what vLLM would refuse is left out, and only where Anthropic's clients ask it of every model."""
    asked = relay(
        {**CHAT, "thinking": {"type": kind, "budget_tokens": 1024}}, path=path
    )
    assert "thinking" in json.loads(asked.body(replica(takes_thinking=True)))
    is_left_out = (kind, path) == ("enabled", "/v1/messages")
    unthinking = replica(takes_thinking=False)
    assert ("thinking" not in json.loads(asked.body(unthinking))) is is_left_out
    assert asked.ignored_by(unthinking) == (("thinking",) if is_left_out else ())


@pytest.mark.parametrize(
    ("budget", "max_tokens", "sent"),
    [
        (1024, 1025, {"type": "enabled", "budget_tokens": 1024}),
        (32_000, 32_000, {"type": "adaptive"}),
        (2048, 1000, {"type": "adaptive"}),
        ("most", 1000, {"type": "enabled", "budget_tokens": "most"}),
        (2048, 0, {"type": "enabled", "budget_tokens": 2048}),
    ],
)
def test_a_budget_of_thoughts_that_cannot_be_reached_is_none(
    budget: Any, max_tokens: int, sent: dict[str, Any]
) -> None:
    """vLLM would refuse it; it says best what is wrong with what is no number. A model that does not think is not asked."""
    thinking = {"type": "enabled", "budget_tokens": budget}
    body = {**CHAT, "max_tokens": max_tokens, "thinking": thinking}
    asked = relay(body, path="/v1/messages")
    assert json.loads(asked.body(replica(takes_thinking=True)))["thinking"] == sent
    assert "thinking" not in json.loads(asked.body(replica(takes_thinking=False)))


@pytest.mark.parametrize(
    ("more", "may_be"),
    [
        ({}, True),
        ({"logprobs": None, "prompt_logprobs": None}, True),
        ({"logprobs": False, "top_logprobs": 0}, True),
        ({"logprobs": 0}, False),
        ({"logprobs": 2}, False),
        ({"prompt_logprobs": 0}, False),
    ],
)
def test_an_answer_with_log_probabilities_is_not_resumed(
    more: dict[str, Any], *, may_be: bool
) -> None:
    """In a completion, 0 asks for those of the answer's own tokens."""
    document = JsonObject.parse(json.dumps({"prompt": "hi", **more}).encode())
    assert may_be_resumed(document) is may_be


@pytest.mark.parametrize(
    ("tools", "may_be"),
    [
        ([{"type": "function"}, {"type": "namespace"}, {"type": "custom"}], True),
        ([{"type": "web_search"}], True),
        ([{"type": "function"}, {"type": "web_search_preview"}], False),
        ([{"type": "code_interpreter"}], False),
        ([{"type": "mcp"}], False),
        ([{"type": ["mcp"]}, {"type": {}}, 5], True),
    ],
)
def test_a_response_in_which_the_engine_calls_tools_is_not_resumed(
    tools: list[dict[str, Any]], *, may_be: bool
) -> None:
    """It has several turns of the model. A type that is no text is the engine's to refuse."""
    document = JsonObject.parse(json.dumps({"input": "hi", "tools": tools}).encode())
    assert may_response_be_resumed(document) is may_be


@pytest.mark.parametrize(
    ("include", "may_be"),
    [
        (["message.output_text.logprobs"], False),
        (["reasoning.encrypted_content"], True),
        (5, True),
        ("all", True),
    ],
)
def test_a_response_with_log_probabilities_is_not_resumed(
    include: object, *, may_be: bool
) -> None:
    """A value that is no list is the engine's to refuse."""
    content = json.dumps({"input": "hi", "include": include}).encode()
    assert may_response_be_resumed(JsonObject.parse(content)) is may_be


def test_all_but_the_model_are_the_callers_own_bytes() -> None:
    """Digits of numbers, escapes and unknown members are as they came; the router's own object goes to no engine."""
    body = b'{"temperature": 1.10, "seed":12345678901234567890, "model":"auto", "x":"\\u00e9", "qarr":{"tier":"fast"}}'
    sent = relay(body).body(replica())
    assert (
        sent
        == b'{"temperature":1.10,"seed":12345678901234567890,"x":"\\u00e9","model":"engines-own-name"}'
    )


@pytest.mark.parametrize(
    ("own", "priority", "takes_priority", "sent"),
    [
        (5, None, True, 5),
        (5, 0, True, 0),
        (None, -1, True, -1),
        (5, None, False, None),
        (5, -1, False, None),
    ],
)
def test_priority(
    own: int | None, priority: int | None, *, takes_priority: bool, sent: int | None
) -> None:
    """None leaves the caller's own; an engine without priorities is sent none, for it would refuse the request."""
    body = CHAT if own is None else {**CHAT, "priority": own}
    found = json.loads(
        relay(body, priority=priority).body(replica(takes_priority=takes_priority))
    )
    assert found.get("priority") == sent


@pytest.mark.parametrize(
    ("given", "wants_usage", "sent"),
    [
        (None, False, {"include_usage": True}),
        ({"include_usage": False}, False, {"include_usage": True}),
        (
            {"continuous_usage_stats": True},
            False,
            {"include_usage": True, "continuous_usage_stats": False},
        ),
        (
            {"include_usage": True, "continuous_usage_stats": True},
            True,
            {"include_usage": True, "continuous_usage_stats": True},
        ),
        ("nonsense", False, "nonsense"),
    ],
)
def test_every_stream_is_asked_for_its_token_counts(
    given: Any, *, wants_usage: bool, sent: Any
) -> None:
    """Options that are none are left to the engine, which says best what is wrong with them."""
    body = {**CHAT, "stream": True, "stream_options": given}
    asked = relay(body, is_streamed=True, wants_usage=wants_usage)
    assert json.loads(asked.body(replica()))["stream_options"] == sent


def test_token_ids_are_asked_for() -> None:
    """Failover needs them, and they show that an engine computes."""
    assert "return_token_ids" not in json.loads(relay(CHAT).body(replica()))
    asked = replace(relay(CHAT), asks_token_ids=True)
    assert json.loads(asked.body(replica()))["return_token_ids"] is True


def test_what_traces_are_told_are_numbers() -> None:
    """Never text, and nothing that a span attribute cannot hold."""
    asked = relay(
        {**CHAT, "max_tokens": 9, "temperature": "hot", "n": 2, "seed": 1 << 70}
    )
    assert asked.parameters() == {
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.choice.count": 2,
    }


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_schema"}},
        {"logprobs": True},
        {"logprobs": 0},
        {"stream_options": {"continuous_usage_stats": True}},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "x"}}],
                }
            ]
        },
        {"return_token_ids": True},
    ],
)
def test_what_cannot_be_taken_over_halfway_is_not_continued(
    more: dict[str, Any],
) -> None:
    document = JsonObject.parse(json.dumps({**CHAT, **more}).encode())
    assert continuation_terms_of(document, 0, choices=1, chat=True) is None


def test_what_continues_an_answer_is_how_its_tokens_were_chosen() -> None:
    body = {
        **CHAT,
        "max_tokens": 7,
        "max_completion_tokens": 5,
        "top_p": 0.5,
        "stop": ["END"],
        "user": "me",
    }
    document = JsonObject.parse(json.dumps(body).encode())
    assert continuation_terms_of(
        document, -1, choices=1, chat=True
    ) == ContinuationTerms(5, {"stop": ["END"], "top_p": 0.5}, -1)
    assert continuation_terms_of(document, -1, choices=2, chat=True) is None
    plain = JsonObject.parse(b'{"prompt": "a", "response_format": {"type": "text"}}')
    assert continuation_terms_of(plain, 0, choices=1, chat=False) == ContinuationTerms(
        16, {}, 0
    ), "OpenAI's and vLLM's default"


def test_a_prompt_is_always_streamed_from_its_engine() -> None:
    """So a stalled engine is noticed, and the answer can go on elsewhere."""
    document = {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "temperature": 0.5,
    }
    asked = EngineRequest(
        document=document,
        request_id="r",
        priority=-1,
        continuation_terms=ContinuationTerms(9, {}, -1),
    )
    sent = json.loads(asked.body(replica(takes_priority=False)))
    assert sent["stream"] is True
    assert sent["return_token_ids"] is True
    assert sent["stream_options"] == {"include_usage": True}
    assert "priority" not in sent, "an engine without priorities would refuse it"
    assert json.loads(asked.body(replica()))["priority"] == -1
    fewer = asked.at_most(5)
    assert json.loads(fewer.body(replica()))["max_tokens"] == 5
    assert fewer.continuation_terms == ContinuationTerms(5, {}, -1)
    assert relay(CHAT).at_most(5) == relay(CHAT), (
        "a caller's body says itself what it wants"
    )
