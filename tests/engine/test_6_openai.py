"""OpenAI's API in front of real engines: vLLM answers through the router as it answers directly.

An engine is compared with itself, so the words are the same on any processor. Only between two tokens that are nearly as
likely does rounding decide, and it differs when the engine computes something else at the same time, or has part of the
prompt cached. So answers that differ are asked for again (``until_alike``).
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.engine.conftest import Up

T = TypeVar("T")
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
TIER = "fast"
TRIES = 4
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# Each of these may be sent besides a question, and is sent directly and through the router.
FEATURES: dict[str, dict[str, Any]] = {
    "plain chat": {},
    "system prompt": {
        "messages": [{"role": "system", "content": "Answer in one word."}, *QUESTION]
    },
    "several turns": {
        "messages": [
            *QUESTION,
            {"role": "assistant", "content": "Paris."},
            {"role": "user", "content": "And of Spain?"},
        ]
    },
    "content parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Say hello"}]}
        ]
    },
    "max_completion_tokens": {"max_completion_tokens": 5},
    "stop": {"stop": ["Paris", "."]},
    "seed and sampling": {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.2},
    "logit_bias": {"logit_bias": {"42": -50}},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    # Only the likeliest token is sampled: rounding depends on which sequences an engine computes together.
    "n": {"n": 2, "temperature": 0.5, "seed": 3, "top_k": 1},
    "response_format json_object": {"response_format": {"type": "json_object"}},
    "response_format json_schema": {
        "max_tokens": 40,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "place", "schema": PLACE},
        },
    },
    "structured_outputs (vLLM)": {"structured_outputs": {"choice": ["red", "green"]}},
    "tools, auto": {"tools": [WEATHER], "tool_choice": "auto"},
    "tools, required": {
        "tools": [WEATHER],
        "tool_choice": "required",
        "max_tokens": 40,
    },
    "tools, none": {"tools": [WEATHER], "tool_choice": "none"},
    "tool results": {
        "tools": [WEATHER],
        "messages": [
            {"role": "user", "content": "Weather in Paris?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {
                            "name": "weather",
                            "arguments": '{"city":"Paris"}',
                        },
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ],
    },
    "return_token_ids (vLLM)": {"return_token_ids": True},
    "min_tokens, ignore_eos (vLLM)": {"min_tokens": 8, "ignore_eos": True},
    "prompt_logprobs (vLLM)": {"prompt_logprobs": 1, "max_tokens": 2},
    "chat_template_kwargs (vLLM)": {"chat_template_kwargs": {"anything": True}},
    "priority (vLLM)": {"priority": 3},
    "unknown fields": {"made_up": {"a": [1, 2.50, None]}},
}
REFUSED: dict[str, dict[str, Any]] = {
    "no messages": {"messages": []},
    "max_tokens of 0": {"max_tokens": 0},
    "wrong type": {"max_tokens": "many"},
    "temperature out of range": {"temperature": -1},
    "image for a text model": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "image_url",
                        "image_url": {"url": "data:image/png;base64,AA"},
                    }
                ],
            }
        ]
    },
}
STRICT = {"name": "weather", "strict": True, "description": "The weather of a city"}
SCHEMA = {**PLACE, "additionalProperties": False}
TALK = [
    *QUESTION,
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Spain?"},
]
MESSAGE = {"max_tokens": 12, "temperature": 0}
RESPONSE = {"max_output_tokens": 12, "temperature": 0}
# A question in Anthropic's form, and in that of OpenAI's Responses API.
NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "message": (MESSAGES, {"messages": QUESTION, **MESSAGE}),
    "message, turns and system": (
        MESSAGES,
        {"messages": TALK, "system": "Answer in one word.", **MESSAGE},
    ),
    "message, stop sequence": (
        MESSAGES,
        {"messages": QUESTION, "stop_sequences": ["Paris"], **MESSAGE},
    ),
    "message, tool": (
        MESSAGES,
        {
            "messages": [{"role": "user", "content": "Weather in Paris?"}],
            "tools": [{**STRICT, "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
            **MESSAGE,
            "max_tokens": 100,
        },
    ),
    "response": (RESPONSES, {"input": "What is the capital of France?", **RESPONSE}),
    "response, turns and instructions": (
        RESPONSES,
        {"input": TALK, "instructions": "Answer in one word.", **RESPONSE},
    ),
    "response, cut": (
        RESPONSES,
        {"input": QUESTION, **RESPONSE, "max_output_tokens": 3},
    ),
    "response, tool": (
        RESPONSES,
        {
            "input": "Weather in Paris?",
            "tools": [{"type": "function", **STRICT, "parameters": SCHEMA}],
            "tool_choice": "required",
            **RESPONSE,
            "max_output_tokens": 100,
        },
    ),
}
TOPICS = ("rain", "Ünïcödé", "北京", "a 🦊")
VARIED: list[dict[str, Any]] = [
    *FEATURES.values(),
    *(
        {"messages": [{"role": "user", "content": f"Tell me about {topic}."}]}
        for topic in TOPICS
    ),
    *(
        {
            "messages": [
                {"role": "user", "content": f"What is {number} times {number + 3}?"}
            ],
            "max_tokens": 3 + number,
        }
        for number in (0, 7)
    ),
    *(
        {
            "messages": [
                {"role": "system", "content": "You are a pirate."},
                {"role": "user", "content": f"{topic}?"},
            ]
        }
        for topic in TOPICS[:2]
    ),
    {"messages": [{"role": "user", "content": "word " * 600}], "max_tokens": 4},
    {
        "messages": [{"role": "user", "content": "Write a Python function that adds."}],
        "max_tokens": 24,
    },
]


@dataclass(frozen=True, slots=True)
class Side:
    """A client of the tier's own engine, or of the router, and its name for the model."""

    client: httpx.Client
    model: str

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json={"model": self.model, **body})


@pytest.fixture(scope="module")
def engine(up: Up, engine_keys: dict[str, str]) -> Iterator[Side]:
    headers = {"authorization": f"Bearer {engine_keys[TIER]}"}
    with httpx.Client(
        base_url=up.replica(TIER)["url"], headers=headers, timeout=120, trust_env=False
    ) as client:
        yield Side(client, client.get("/v1/models").json()["data"][0]["id"])


@pytest.fixture(scope="module")
def router(up: Up) -> Iterator[Side]:
    with httpx.Client(base_url=up.url, timeout=120, trust_env=False) as client:
        yield Side(client, TIER)


def ask(side: Side, path: str = CHAT, **body: Any) -> httpx.Response:
    prompt: dict[str, Any] = {"messages": QUESTION}
    if path == COMPLETIONS:
        prompt = {"prompt": "The capital of France is"}
    return side.post(path, **{"max_tokens": 8, "temperature": 0, **prompt, **body})


def comparable(answer: Any) -> Any:
    """Return an answer without its ids and times."""
    if isinstance(answer, dict):
        return {
            name: comparable(value)
            for name, value in answer.items()
            if name not in {"id", "created"}
        }
    if isinstance(answer, list):
        return [comparable(item) for item in answer]
    return answer


def chunks(answer: httpx.Response) -> list[Any]:
    *events, done, empty = answer.text.split("\n\n")
    assert done == "data: [DONE]"
    assert empty == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


def until_alike(engine: Side, router: Side, read: Callable[[Side], T]) -> tuple[T, T]:
    """Read from the engine and the router until both give the same, at most four times; return what they gave."""
    for _ in range(TRIES):
        direct = read(engine)
        routed = read(router)
        if routed == direct:
            break
    return direct, routed


def whole_answer(side: Side, path: str = CHAT, **body: Any) -> dict[str, Any]:
    """Return a whole answer but for its ids and times."""
    answer = ask(side, path, **body)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = comparable(answer.json())
    return content


def streamed_chunks(side: Side, **body: Any) -> list[Any]:
    return chunks(ask(side, stream=True, **body))


def whole_or_streamed(
    router: Side, side: Side, path: str = CHAT, **body: Any
) -> dict[int, str]:
    """Return an answer's texts: the router's from a stream, the engine's from a whole answer."""
    if side is router:
        return text_of(streamed_chunks(router, path=path, **body))
    choices = whole_answer(side, path, **body)["choices"]
    return {
        choice["index"]: choice["text"]
        if path == COMPLETIONS
        else choice["message"]["content"]
        for choice in choices
    }


def joined(stream: list[Any]) -> list[Any]:
    """Return a comparable stream whose text is in one chunk: it is chance how many tokens an engine puts into one."""
    joined_chunks: list[Any] = []
    for chunk in comparable(stream):
        choices = chunk["choices"]
        if (
            joined_chunks
            and len(choices) == 1
            and set(choices[0].get("delta", {})) == {"content"}
        ):
            (choice,) = choices
            (before,) = joined_chunks[-1]["choices"]
            text = before["delta"].get("content", "") + choice["delta"]["content"]
            choice["delta"] = before["delta"] | {"content": text}
            if choice.get("token_ids"):
                choice["token_ids"] = (before.get("token_ids") or []) + choice[
                    "token_ids"
                ]
            if choice.get("logprobs"):
                so_far = (before["logprobs"] or {}).get("content", [])
                choice["logprobs"]["content"] = so_far + choice["logprobs"]["content"]
            joined_chunks[-1] |= chunk
        else:
            joined_chunks.append(chunk)
    return joined_chunks


def text_of(stream: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in choices_of(stream):
        index = choice["index"]
        texts[index] = texts.get(index, "") + piece_of(choice)
    return texts


def piece_of(choice: dict[str, Any]) -> str:
    """Return the text in a choice of a chunk, of either endpoint."""
    if "text" in choice:
        return str(choice["text"])
    return choice["delta"].get("content") or ""


def choices_of(stream: list[Any]) -> list[Any]:
    """Return the choices of all chunks, in order."""
    choices: list[Any] = []
    for chunk in stream:
        choices += chunk["choices"]
    return choices


def arguments_of(stream: list[Any]) -> str:
    arguments = ""
    for choice in choices_of(stream):
        for call in choice["delta"].get("tool_calls") or ():
            arguments += call["function"].get("arguments") or ""
    return arguments


def gist(stream: list[Any]) -> tuple[dict[int, str], str, str]:
    return (
        text_of(stream),
        arguments_of(stream),
        stream[-1]["choices"][0]["finish_reason"],
    )


def test_varied_chats_are_answered_alike(engine: Side, router: Side) -> None:
    """Whole answers are equal but for ids and times, and streams of plain chats have the same text."""
    for body in VARIED:
        direct, routed = until_alike(engine, router, partial(whole_answer, **body))
        assert routed == direct, body
        assert list(routed) == list(direct)
        if body not in FEATURES.values():
            whole_text, streamed_text = until_alike(
                engine, router, partial(whole_or_streamed, router, **body)
            )
            assert streamed_text == whole_text, body


@pytest.mark.parametrize(
    "feature", sorted(FEATURES.keys() - {"prompt_logprobs (vLLM)"})
)
def test_streams_are_the_engines_own(engine: Side, router: Side, feature: str) -> None:
    """Chunk for chunk, a stream is what the engine would have sent: deltas, tool calls, logprobs, finish reasons."""
    # Choices interleave, and calls get random ids.
    by_chance = feature in {"n", "tools, auto", "tools, required"}
    shown = gist if by_chance else joined
    direct, routed = until_alike(
        engine, router, lambda side: shown(streamed_chunks(side, **FEATURES[feature]))
    )
    assert routed == direct


@pytest.mark.parametrize("counted", [True, False])
def test_usage_comes_when_asked_for(engine: Side, router: Side, counted: bool) -> None:  # noqa: FBT001
    """The final chunk with token counts is there exactly when the caller wants it."""
    options = {"stream_options": {"include_usage": counted}}
    direct, routed = until_alike(
        engine, router, lambda side: joined(streamed_chunks(side, **options))
    )
    assert routed == direct
    assert any(chunk.get("usage") for chunk in routed) is counted


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": ["The sea is", "One, two,"]},
        {"prompt": [504, 3575, 282]},
        {"echo": True},
        {"logprobs": 2},
        {"n": 2, "temperature": 0.5, "seed": 3, "top_k": 1},
    ],
)
def test_completions_are_answered_alike(
    engine: Side, router: Side, body: dict[str, Any]
) -> None:
    """The older endpoint: texts, several texts, token ids, echo, logprobs."""
    direct, routed = until_alike(
        engine, router, partial(whole_answer, path=COMPLETIONS, **body)
    )
    assert routed == direct
    whole_text, streamed_text = until_alike(
        engine, router, partial(whole_or_streamed, router, path=COMPLETIONS, **body)
    )
    assert streamed_text == whole_text


@pytest.mark.parametrize("mistake", REFUSED)
def test_mistakes_are_answered_alike(engine: Side, router: Side, mistake: str) -> None:
    """A request that the engine refuses gets the engine's own status and words."""
    direct = ask(engine, **REFUSED[mistake])
    routed = ask(router, **REFUSED[mistake])
    assert direct.status_code == 400
    assert routed.status_code == 400
    assert routed.json() == direct.json()


@pytest.mark.parametrize("feature", NAMED)
def test_messages_and_responses_are_answered_alike(
    engine: Side, router: Side, feature: str
) -> None:
    """Anthropic's API and OpenAI's newer one: whole answers are equal but for ids and times, and streams' text and ends."""
    path, body = NAMED[feature]
    direct, routed = until_alike(
        engine, router, lambda side: without_ids(side.post(path, **body).text)
    )
    assert routed == direct

    def stream_of(side: Side) -> list[str]:
        return named_stream(
            without_ids(side.post(path, stream=True, **body).text).split("\n\n")
        )

    (direct_text, *direct_others), (routed_text, *routed_others) = until_alike(
        engine, router, stream_of
    )
    assert direct_text
    assert routed_text == direct_text
    assert routed_others == direct_others


def without_ids(answer: str) -> str:
    """Return an answer of these APIs without ids and times, which differ between any two."""
    answer = re.sub(r'"(?:chatcmpl|resp|msg|fc|rs|call)[-_][\w-]+"', '"id"', answer)
    return re.sub(r'"(?:created_at|sequence_number)":\d+', '"number"', answer)


def named_stream(events: list[str]) -> list[str]:
    """Return the text and arguments of a stream, and its events without deltas, because a busy engine joins some."""
    deltas = [
        json.loads(event.partition("data: ")[2].replace('"number",', ""))
        for event in events
        if "delta\n" in event
    ]
    text = ""
    for delta in (event["delta"] for event in deltas):
        if isinstance(delta, str):
            text += delta
        else:
            text += delta.get("text") or delta.get("partial_json") or ""
    text_deltas = ("event: content_block_delta", "event: response.output_text.delta")
    others = [event for event in events if not event.startswith(text_deltas)]
    return [text, *(event for event in others if "arguments.delta" not in event)]


def test_tokenize_and_detokenize(engine: Side, router: Side) -> None:
    for body in ({"prompt": "Grüße, 世界!"}, {"messages": QUESTION}):
        direct = engine.post("/tokenize", **body)
        routed = router.post("/tokenize", **body)
        assert routed.json()["tokens"] == direct.json()["tokens"]
        tokens = routed.json()["tokens"]
        routed_text = router.post("/detokenize", tokens=tokens).json()
        assert routed_text == engine.post("/detokenize", tokens=tokens).json()


@pytest.mark.parametrize("messages", [1, 2, 3, 4])
def test_prompt_tokens_are_counted_as_the_engine_counts(
    router: Side, messages: int
) -> None:
    """The router's count of a conversation, by which it chooses a tier that holds it, is the engine's own."""
    roles = (
        ["system", "user", "assistant", "user"]
        if messages % 2 == 0
        else ["user", "assistant", "user"]
    )
    talk = [
        {"role": role, "content": f"{role} says hello, number {number}"}
        for number, role in enumerate(roles[:messages])
    ]
    used = ask(router, messages=talk, max_tokens=1).json()["usage"]["prompt_tokens"]
    fits = ask(
        router,
        messages=talk,
        max_tokens=2048 - used,
        qarr={"tier_policy": "require"},
        stop=["e", "a", "o", "i"],
    )
    assert fits.status_code == 200, fits.text
    over = ask(
        router,
        messages=talk,
        max_tokens=2048 - used + 1,
        qarr={"tier_policy": "require"},
    )
    assert over.status_code == 400
    assert over.json()["error"]["code"] == "context_length_exceeded"
    assert f"{used} prompt" in over.json()["error"]["message"]


def generate(router: Side, **body: Any) -> httpx.Response:
    fixed = {"tier": TIER, "tier_policy": "require", "max_tokens": 24, "stream": False}
    return router.client.post("/generate", json={**fixed, **body})


def test_generates_parameters_on_real_engines(router: Side) -> None:
    """The same seed gives the same text, a stop string ends the answer, and a penalty reaches the sampler."""
    sampled = {
        "prompt": "Tell me a story.",
        "temperature": 1.0,
        "top_p": 0.95,
        "seed": 11,
    }
    first, again = until_alike(
        router, router, lambda side: generate(side, **sampled).json()["text"]
    )
    assert first == again != ""
    # Whatever the answer is, it repeats the separator between two numbers.
    greedy = {
        "prompt": "Count from one to twenty in words.",
        "temperature": 0,
        "repetition_penalty": 1.0,
    }
    for _ in range(TRIES):
        text = generate(router, **greedy).json()["text"]
        words = text.split()
        stop = words[len(words) // 2]
        ended = generate(router, **greedy, stop=[stop, "never"]).json()
        if ended["text"] == text[: text.index(stop)]:
            break
    assert ended["text"] == text[: text.index(stop)]
    assert ended["finish_reason"] == "stop"
    penalized = generate(router, **{**greedy, "repetition_penalty": 2.0}).json()
    assert penalized["text"] != text


def dropped_tokens(answer: httpx.Response) -> int:
    """Return how many tokens of the prompt were dropped, as the answer's header has it."""
    header = answer.headers["x-qarr-truncated"]
    return int(re.findall(r"dropped_tokens=(\d+)", header)[0])


def test_precisions_and_truncation_on_real_engines(engine: Side, router: Side) -> None:
    """Checkpoints' own precisions decide; tokens that are left and tokens that were dropped add up to vLLM's count."""
    served = ask(router, provider={"quantizations": ["bf16"]}, model="auto")
    assert served.headers["x-qarr-precision"] == "bf16"
    refused = ask(router, provider={"quantizations": ["int8"]}, model="auto")
    assert "int4" in refused.json()["error"]["message"]
    turns = []
    for n in range(3):
        for role in ("user", "assistant"):
            content = f"{role} {n} says: " + f"word number {n}, " * 30
            turns.append({"role": role, "content": content})
    talk = [
        {"role": "system", "content": "Be short."},
        *turns,
        {"role": "user", "content": "What is the capital of France?"},
    ]
    whole = engine.post("/tokenize", messages=talk).json()["count"]
    # These leave 548 tokens for the prompt, and end the answer at once.
    room: dict[str, Any] = {"max_tokens": 1500, "stop": [" ", "e", "a", "\n"]}
    for body in (
        {"messages": talk},
        {"prompt": "What is the capital of France? " * 150},
    ):
        for how in ("oldest", "middle") if "prompt" in body else ("oldest",):
            assert generate(router, **body, **room).status_code == 422
            cut = generate(router, **body, **room, truncate=how)
            dropped = dropped_tokens(cut)
            used = cut.json()["usage"]["prompt_tokens"]
            messages = talk
            if "prompt" in body:
                messages = [{"role": "user", "content": body["prompt"]}]
            counted = engine.post("/tokenize", messages=messages).json()["count"]
            assert used + dropped == counted
            assert used <= 2048 - 1500
            assert "prompt" not in body or used > 2048 - 1500 - 8
    request = {
        "messages": talk,
        **room,
        "qarr": {"truncate": "oldest", "tier_policy": "require"},
    }
    chat = router.client.post(CHAT, json={"model": TIER, **request})
    used = chat.json()["usage"]["prompt_tokens"]
    assert used + dropped_tokens(chat) == whole
    # Turns of two messages are dropped together.
    assert int(chat.headers["x-qarr-truncated"].rpartition("=")[2]) % 2 == 0
    longer = router.client.post(
        CHAT,
        json={"model": "auto", "messages": talk, **room},
        headers={"x-qarr-truncate": "oldest"},
    )
    assert "x-qarr-truncated" not in longer.headers
    assert longer.headers["x-qarr-tier"] != TIER


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine(up: Up, stream: bool) -> None:  # noqa: FBT001
    """The engine stops a request whose client has disconnected, streamed or not, before the end of its answer."""
    finished = up.finished_long(TIER)
    body = {"max_tokens": 1500, "ignore_eos": True, "stream": stream}
    with httpx.Client(base_url=up.url, timeout=1.5, trust_env=False) as client:
        if stream:
            with client.stream(
                "POST", CHAT, json={"model": TIER, "messages": QUESTION, **body}
            ) as answer:
                assert answer.status_code == 200, answer.headers
                assert answer.headers["x-qarr-tier"] == TIER, answer.headers
                # httpx closes the connection of an iterator that is dropped, so this one is kept.
                pieces = answer.iter_raw()
                assert next(pieces).startswith(b"data: {")
                until(lambda: running(up), 1, limit_s=20)
        else:
            with pytest.raises(httpx.ReadTimeout):
                ask(Side(client, TIER), **body)
    until(lambda: running(up), 0, limit_s=20)
    until(lambda: int(up.replica(TIER)["in_flight"]), 0, limit_s=20)
    assert up.finished_long(TIER) == finished, (
        "the engine went on for a client that is gone"
    )


def until(read: Callable[[], int], wanted: int, *, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while (now := read()) != wanted:
        assert time.monotonic() < deadline, (
            f"after {limit_s} s it is {now}, not {wanted}"
        )
        time.sleep(0.02)


def running(up: Up) -> int:
    metrics = httpx.get(f"{up.replica(TIER)['url']}/metrics", trust_env=False).text
    line = next(
        line
        for line in metrics.splitlines()
        if line.startswith("vllm:num_requests_running{")
    )
    return int(float(line.rsplit(" ", 1)[1]))
