"""What a foreign server is asked, and which requests it cannot be asked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from router.upstream.engine_request import EngineRequest
from router.upstream.json_object import JsonObject
from router.upstream.named_events import MESSAGE_FORMAT
from router.upstream.overflow import LIMIT, OLDER_LIMIT, body_for

MESSAGES = [{"role": "user", "content": "hi"}]


def relayed(
    path: str = "chat/completions",
    *,
    streamed: bool = False,
    adapter: str | None = None,
    **body: Any,
) -> Any:
    """Return what a foreign server is asked for a body, as JSON values; None: it is not asked."""
    operation = "chat" if path.startswith("chat") else "text_completion"
    document = JsonObject.parse(json.dumps({"model": "auto", **body}).encode())
    request = EngineRequest(
        document=document,
        path=f"/v1/{path}",
        operation=operation,
        request_id="r",
        is_streamed=streamed,
        adapter=adapter,
    )
    made = body_for(request, "foreign")
    return None if made is None else json.loads(made)


@pytest.mark.parametrize(
    "given",
    [
        {
            "temperature": 0.5,
            "top_p": 0.9,
            "n": 2,
            "seed": 1,
            "stop": ["a"],
            "max_completion_tokens": 9,
        },
        {
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "auto",
        },
        {
            "response_format": {"type": "json_object"},
            "logprobs": True,
            "top_logprobs": 3,
        },
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    ],
)
def test_parameters_of_openais_are_passed_on(given: dict[str, Any]) -> None:
    given = {"messages": MESSAGES, **given}
    assert relayed(**given) == {**given, "model": "foreign"}


@pytest.mark.parametrize(
    "given",
    [
        {
            "qarr": {"tier": "fast"},
            "provider": {"sort": "price"},
            "priority": 3,
            "cache_salt": "s",
            "request_id": "r",
        },
        {
            "user": "ann",
            "metadata": {},
            "store": True,
            "service_tier": "priority",
            "prompt_cache_key": "k",
        },
        {
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": False,
            "skip_special_tokens": True,
        },
        {"guided_json": None, "logit_bias": {}, "stop_token_ids": [], "min_tokens": 0},
    ],
)
def test_what_changes_no_answer_is_left_out(given: dict[str, Any]) -> None:
    """The router's own members, those about the caller, and parameters of vLLM with neutral values."""
    assert relayed(messages=MESSAGES, **given) == {
        "model": "foreign",
        "messages": MESSAGES,
    }


@pytest.mark.parametrize(
    "given",
    [
        {"top_k": 5},
        {"repetition_penalty": 1.1},
        {"guided_regex": "a+"},
        {"structured_outputs": {"regex": "a"}},
        {"logit_bias": {"5": 1}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"prompt_logprobs": 1},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"anything": 1},
        {"adapter": "support"},
    ],
)
def test_others_are_not_asked_elsewhere(given: dict[str, Any]) -> None:
    """A server might refuse them, or leave them out without a word; ids are of the fleet's own tokenizer."""
    assert relayed(messages=MESSAGES, **given) is None


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [("hi", True), (["a", "b"], True), ([1, 2], False), ([[1], [2]], False)],
)
def test_completions_of_text(prompt: Any, *, asked: bool) -> None:
    found = relayed("completions", prompt=prompt, echo=True, suffix="x")
    assert found == (
        {"model": "foreign", "prompt": prompt, "echo": True, "suffix": "x"}
        if asked
        else None
    )


def test_streams_tell_their_counts() -> None:
    """Token counts are asked for, also where the caller does not want them."""
    expected = {
        "model": "foreign",
        "messages": MESSAGES,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for options in (
        {},
        {"stream_options": {"include_usage": False}},
        {"stream_options": None},
    ):
        assert (
            relayed(messages=MESSAGES, stream=True, streamed=True, **options)
            == expected
        )


def test_generate_and_others() -> None:
    """A prompt of /generate is asked as a chat; a penalty that only vLLM knows, and other APIs, are not."""
    members = {
        "messages": MESSAGES,
        "max_tokens": 9,
        "temperature": 0.7,
        "repetition_penalty": 1.0,
    }
    chat = EngineRequest(document=members, request_id="r", priority=1)
    assert json.loads(body_for(chat, "foreign") or b"") == {
        "model": "foreign", "messages": MESSAGES, LIMIT: 9, "temperature": 0.7, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert (
        body_for(
            replace(chat, document={**members, "repetition_penalty": 1.2}), "foreign"
        )
        is None
    )
    document = JsonObject.parse(b'{"model":"auto"}')
    passed = EngineRequest(
        document=document,
        path="/v1/messages",
        request_id="r",
        answers=MESSAGE_FORMAT,
        is_streamed=False,
        counts=False,
    )
    assert body_for(passed, "foreign") is None


def own(
    *, limit_name: str = LIMIT, implied: tuple[str, ...] = (), **members: Any
) -> Any:
    """Return what a foreign server is asked for a document of the router's own."""
    document = {"messages": MESSAGES, "max_tokens": 9, "temperature": 0.7, **members}
    made = body_for(
        EngineRequest(document=document, request_id="r", implied=implied),
        "foreign",
        limit_name,
    )
    assert made is not None
    return json.loads(made)


def test_what_nobody_asked_for_is_not_asked_for_there() -> None:
    """Some of OpenAI's models refuse every temperature but their own."""
    assert "temperature" not in own(implied=("temperature",))
    assert own()["temperature"] == 0.7


@pytest.mark.parametrize("limit_name", [LIMIT, OLDER_LIMIT])
def test_a_chats_limit_has_the_servers_name_for_it(limit_name: str) -> None:
    """OpenAI's newer models refuse the older name, some other servers do not know the newer one."""
    document = own(limit_name=limit_name)
    assert {name: document.get(name) for name in (LIMIT, OLDER_LIMIT)} == {
        LIMIT: None,
        OLDER_LIMIT: None,
        limit_name: 9,
    }
    for given in ({LIMIT: 9}, {OLDER_LIMIT: 9}, {LIMIT: 9, OLDER_LIMIT: 5}):
        request = EngineRequest(
            document=JsonObject.parse(json.dumps({"messages": [], **given}).encode()),
            request_id="r",
        )
        asked = json.loads(body_for(request, "foreign", limit_name) or b"{}")
        assert {
            name: asked[name] for name in (LIMIT, OLDER_LIMIT) if name in asked
        } == {limit_name: 9}


def test_a_completions_limit_keeps_its_name() -> None:
    assert relayed("completions", prompt="x", max_tokens=9)[OLDER_LIMIT] == 9
