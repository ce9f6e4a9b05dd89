"""OpenAI's API over real sockets, in front of fake engines: what routing adds, and what faults look like."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.engine import ANSWER, FINGERPRINT, Behaviour
from tests.unit.router_stack import SOUND_S, Stack, router_stack
from tests.waiting import until
from tiers.spec import STANDARD_TIERS, Draft, ReplicaStatus, TierName

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
FULL = "".join(ANSWER)
HI = [{"role": "user", "content": "hi"}]


async def chat(
    stack: Stack, headers: dict[str, str] | None = None, **body: Any
) -> httpx.Response:
    body = {"model": "auto", "messages": HI, **body}
    return await stack.client.post(stack.url + CHAT, json=body, headers=headers)


def chunks(text: str) -> list[dict[str, Any]]:
    *events, done, empty = text.split("\n\n")
    assert done == "data: [DONE]"
    assert empty == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_the_body_passes_as_it_is(tmp_path: Path) -> None:
    """The engine gets the caller's bytes for every field but the model; unknown fields and odd spellings survive."""
    raw = (
        b'{ "messages":[{"role":"user","content":"caf\\u00e9 \\ud83d\\ude00"}], "temperature": 1.0e-1, "model":"fast",'
        b'"logit_bias":{"42":-1.50}, "vllm_xargs":{"a":[1,2]}, "unknown":"\xc3\xa9", "seed":123456789012345678901}'
    )
    async with router_stack(tmp_path) as stack:
        engine = stack.engines[TierName.FAST]
        answer = await stack.client.post(
            stack.url + CHAT, content=raw, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 200
        sent = engine.raw[-1]
        for part in (
            b'"messages":[{"role":"user","content":"caf\\u00e9 \\ud83d\\ude00"}]', b'"temperature":1.0e-1',
            b'"logit_bias":{"42":-1.50}', b'"vllm_xargs":{"a":[1,2]}', b'"unknown":"\xc3\xa9"',
            b'"seed":123456789012345678901', b'"model":"fake"',
        ):  # fmt: skip
            assert part in sent
        assert set(json.loads(sent)) == set(json.loads(raw))


async def test_the_answer_passes_as_it_is(tmp_path: Path) -> None:
    """An answer that is not streamed is the engine's own bytes, with our headers."""
    async with router_stack(tmp_path) as stack:
        answer = await chat(stack, model="precise")
        assert answer.content == stack.engines[TierName.PRECISE].sent[-1]
        assert answer.headers["x-qarr-tier"] == "precise"
        assert answer.headers["content-length"] == str(len(answer.content))
        assert stack.leases() == 0


@pytest.mark.parametrize("counted", [True, False])
async def test_a_stream_passes_as_the_engine_would_have_sent_it(
    tmp_path: Path,
    counted: bool,  # noqa: FBT001
) -> None:
    """The router asks for token counts; a caller that did not never sees that."""
    async with router_stack(tmp_path) as stack:
        engine_url = stack.fleet.replicas[0].url
        options = {"stream_options": {"include_usage": True}} if counted else {}
        body = {"messages": HI, "stream": True, **options}
        direct = chunks(
            (
                await stack.client.post(
                    engine_url + CHAT, json={"model": "fake", **body}
                )
            ).text
        )
        routed = await stack.client.post(
            stack.url + CHAT, json={"model": "fast", **body}
        )
        assert [{**c, "created": 0} for c in chunks(routed.text)] == [
            {**c, "created": 0} for c in direct
        ]
        assert routed.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert any(c.get("usage") for c in chunks(routed.text)) is counted
        assert FINGERPRINT in routed.text
        assert stack.engines[TierName.FAST].requests[-1]["stream_options"] == {
            "include_usage": True
        }


QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]
HINTS: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({}, {"model": "balanced"}, "balanced"),
    ({}, {"model": "qarr"}, "fast"),
    ({}, {"model": "gpt-4o"}, "fast"),
    ({}, {"model": "gpt-4-turbo"}, "precise"),
    ({"x-qarr-tier": "precise"}, {}, "precise"),
    ({"x-qarr-tier": "precise"}, {"qarr": {"tier": "balanced"}}, "balanced"),
    ({"x-qarr-sla-max-quality-loss": "0"}, {"messages": QUESTION}, "precise"),
    ({}, {"messages": QUESTION, "qarr": {"sla": {"max_quality_loss": 0}}}, "precise"),
    # a greeting loses nothing
    ({}, {"qarr": {"sla": {"max_quality_loss": 0}}}, "fast"),
    (
        {},
        {"messages": [{"role": "user", "content": "Why do cats purr, and how?"}]},
        "balanced",
    ),
    (
        {},
        {
            "messages": [
                *HI,
                {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            ]
        },
        "precise",
    ),
]


async def test_hints_come_by_model_header_and_body(tmp_path: Path) -> None:
    """The body's qarr object goes before headers, headers before the model's name; aliases stand for any of them."""
    options = {"openai": {"aliases": {"gpt-4o": "auto", "gpt-4-turbo": "precise"}}}
    async with router_stack(tmp_path, options) as stack:
        for headers, body, tier in HINTS:
            answer = await chat(stack, headers, **body)
            assert (answer.status_code, answer.headers["x-qarr-tier"]) == (200, tier), (
                headers,
                body,
            )
            assert "qarr" not in stack.engines[TierName(tier)].requests[-1]


async def test_follow_ups_are_read_with_the_turn_before(tmp_path: Path) -> None:
    """A short last turn is classified together with what it follows."""
    talk = [
        {
            "role": "user",
            "content": "Write a Python function that reverses a linked list in place",
        },
        {"role": "assistant", "content": "def reverse(head): ..."},
        {"role": "user", "content": "and now with types"},
    ]
    async with router_stack(tmp_path) as stack:
        answer = await chat(stack, messages=talk)
        assert "code" in answer.headers["x-qarr-reason"]


WRONG_WISHES: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({"x-qarr-tier": "turbo"}, {}, "x-qarr-tier"),
    ({"x-qarr-sla-ttft-ms": "soon"}, {}, "x-qarr-sla-ttft-ms"),
    ({"x-qarr-sla-tpot-ms": "nan"}, {}, "x-qarr-sla-tpot-ms"),
    ({}, {"qarr": {"tier": 3}}, "qarr.tier"),
    ({}, {"qarr": {"sla": {"ttft_ms": -1}}}, "qarr.sla.ttft_ms"),
    ({}, {"qarr": {"colour": "red"}}, "qarr.colour"),
    ({}, {"qarr": []}, "qarr"),
]


async def test_wishes_that_are_not_valid_are_named(tmp_path: Path) -> None:
    """A wrong wish is a 400 in OpenAI's form that names the field or header and what is allowed."""
    async with router_stack(tmp_path) as stack:
        for headers, body, param in WRONG_WISHES:
            answer = await chat(stack, headers, **body)
            error = answer.json()["error"]
            assert answer.status_code == 400
            assert error["type"] == "invalid_request_error"
            assert error["param"] == param
            assert "allowed" in error["message"]


async def test_bodies_that_are_not_json_objects(tmp_path: Path) -> None:
    """What is not a JSON object is a 400, in OpenAI's form."""
    deep = b'{"a":' + b"[" * 100_000
    async with router_stack(tmp_path) as stack:
        for body in (
            b"",
            b"[]",
            b'{"model"',
            b"\xff",
            b'{"a":NaN}',
            deep,
            b'{"a":1}x',
            b"{1:2}",
            b'{"a":1,}',
        ):
            answer = await stack.client.post(stack.url + CHAT, content=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (
                400,
                "body",
            ), body[:20]


async def test_unknown_model(tmp_path: Path) -> None:
    """A name that stands for nothing is OpenAI's model_not_found, and lists those that do."""
    async with router_stack(tmp_path) as stack:
        answer = await chat(stack, model="gpt-4o")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert "precise" in answer.json()["error"]["message"]
        one = await stack.client.get(f"{stack.url}/v1/models/nope")
        assert one.status_code == 404
        assert one.json()["error"]["code"] == "model_not_found"


async def test_the_engines_refusal_is_the_callers_answer(tmp_path: Path) -> None:
    """What the engine says of a wrong request is passed on as it is, and nobody else is asked."""
    async with router_stack(tmp_path) as stack:
        engine = stack.engines[TierName.FAST]
        engine.status = 400
        engine.error = "max_tokens must be at least 1, got 0."
        answer = await chat(stack, max_tokens=0)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == engine.error
        # others measure its speed
        assert not [
            r for r in stack.engines[TierName.BALANCED].requests if "messages" in r
        ]
        assert stack.leases() == 0


@pytest.mark.parametrize(
    ("fault", "stream"),
    [
        (Behaviour(status=500), True),
        (Behaviour(status=500), False),
        (Behaviour(break_after=0), True),
        (Behaviour(break_after=0), False),
        (Behaviour(error_after=0), True),
        (Behaviour(stall_after=0), True),
    ],
)
async def test_retries_elsewhere_before_the_first_byte(
    tmp_path: Path,
    fault: Behaviour,
    stream: bool,  # noqa: FBT001
) -> None:
    """A tier that fails before its first token is replaced, and the headers say so."""
    async with router_stack(
        tmp_path, {"upstream": {"first_token_timeout_s": SOUND_S}}
    ) as stack:
        broken = stack.engines[TierName.FAST]
        broken.status = fault.status
        broken.break_after = fault.break_after
        broken.error_after = fault.error_after
        broken.stall_after = fault.stall_after
        answer = await chat(stack, stream=stream)
        assert answer.status_code == 200
        assert answer.headers["x-qarr-tier"] == "balanced"
        assert "fast failed before the first token" in answer.headers["x-qarr-reason"]
        assert stack.leases() == 0


@pytest.mark.parametrize(
    "fault", ["break_after", "stall_after", "error_after", "error_with"]
)
async def test_a_broken_stream_ends_with_an_error_and_without_done(
    tmp_path: Path, fault: str
) -> None:
    """A stream that broke never looks finished: OpenAI's error object comes last, and no [DONE]."""
    async with router_stack(
        tmp_path, {"upstream": {"token_timeout_s": SOUND_S}}
    ) as stack:
        setattr(stack.engines[TierName.FAST], fault, 3)
        # with those none goes on
        answer = await chat(stack, model="fast", stream=True, logprobs=True)
        *events, last, _ = answer.text.split("\n\n")
        assert "[DONE]" not in answer.text
        assert (
            json.loads(last.removeprefix("data: "))["error"]["code"] == "stream_broken"
        )
        text = "".join(
            json.loads(e[6:])["choices"][0]["delta"]["content"] for e in events
        )
        assert text == "The capital of"
        assert stack.leases() == 0


async def test_a_whole_answer_that_never_comes_is_a_504(tmp_path: Path) -> None:
    """An answer that is not streamed has its own limit, and its request is not run again elsewhere."""
    async with router_stack(tmp_path, {"upstream": {"answer_timeout_s": 0.3}}) as stack:
        stack.engines[TierName.FAST].stall_after = 3
        answer = await chat(stack)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "engine_too_slow"
        # others measure its speed
        assert not [
            r for r in stack.engines[TierName.BALANCED].requests if "messages" in r
        ]
        assert stack.leases() == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine(
    tmp_path: Path,
    stream: bool,  # noqa: FBT001
) -> None:
    """When the client goes away its request ends in the engine, streamed or not."""
    async with router_stack(tmp_path) as stack:
        engine = stack.engines[TierName.FAST]
        engine.delay_s = 0.05
        engine.answer = ("x",) * 400
        _, writer = await asyncio.open_connection(
            "127.0.0.1", int(stack.url.rsplit(":", 1)[1])
        )
        body = json.dumps(
            {"model": "fast", "messages": HI, "stream": stream, "max_tokens": 400}
        ).encode()
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await writer.drain()
        await until(lambda: engine.running != 0, poll_s=0.01)
        writer.close()
        await until(lambda: not (engine.running or stack.leases()), within_s=10)


async def test_the_report_is_added_when_asked_for(tmp_path: Path) -> None:
    """With qarr.report the body itself tells who served it; without, it is the engine's alone."""
    async with router_stack(tmp_path) as stack:
        whole = (await chat(stack, qarr={"report": True})).json()
        assert whole["qarr"] == {
            "tier": "fast", "precision": "awq-int4", "quantization": "int4", "checkpoint": None,
            "class": "small_talk",
            "reason": "small talk, trivial: no precision loses anything, and fast is the lowest that can serve",
        }  # fmt: skip
        streamed = chunks((await chat(stack, stream=True, qarr={"report": True})).text)
        assert streamed[-1]["qarr"]["tier"] == "fast"
        assert "qarr" not in (await chat(stack)).json()


async def test_a_greeting_with_tools_is_no_small_talk(tmp_path: Path) -> None:
    """A request's structure tells that it is about tools, on which a precision may lose something."""
    function = {"name": "get_weather", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    async with router_stack(tmp_path) as stack:
        answer = await chat(stack, tools=tools, qarr={"report": True})
        report = answer.json()["qarr"]
        assert report["class"] == "tools"
        assert report["reason"].startswith("tools, trivial: ")
        without = await chat(
            stack, tools=tools, tool_choice="none", qarr={"report": True}
        )
        assert without.json()["qarr"]["class"] == "small_talk"


async def test_completions_take_texts_and_token_ids(tmp_path: Path) -> None:
    """The older endpoint is routed as well, by its text; token ids cannot be read and go to the highest precision."""
    async with router_stack(tmp_path) as stack:
        for prompt, tier in (
            ("hi there", "fast"),
            (["hello", "good morning"], "fast"),
            ([1, 2, 3], "precise"),
        ):
            answer = await stack.client.post(
                f"{stack.url}/v1/completions", json={"model": "auto", "prompt": prompt}
            )
            assert (answer.status_code, answer.headers["x-qarr-tier"]) == (200, tier), (
                prompt
            )
            assert answer.json()["choices"][0]["text"] == FULL


async def test_tokens_are_passed_on(tmp_path: Path) -> None:
    """Any ready engine tokenizes, under our names for the model; a failed tier is passed over."""
    async with router_stack(tmp_path) as stack:
        for name in (TierName.FAST, TierName.BALANCED):
            stack.fleet.replicas[STANDARD_TIERS.index(name)].mark(ReplicaStatus.FAILED)
        answer = await stack.client.post(
            f"{stack.url}/tokenize", json={"model": "auto", "prompt": "a bc"}
        )
        assert answer.json()["tokens"] == [1, 2]
        back = await stack.client.post(
            f"{stack.url}/detokenize", json={"tokens": [1, 2]}
        )
        assert back.json() == {"prompt": "x xx"}
        stack.fleet.replicas[2].mark(ReplicaStatus.FAILED)
        none = await stack.client.post(f"{stack.url}/tokenize", json={"prompt": "a"})
        assert none.status_code == 503
        assert none.json()["error"]["code"] == "at_capacity"
        assert stack.leases() == 0


async def test_a_tier_that_is_named_tokenizes_itself(tmp_path: Path) -> None:
    """A tier with another tokenizer shows its own tokens; without its engine another tier answers."""
    async with router_stack(tmp_path) as stack:
        stack.engines[TierName.PRECISE].vocabulary = 100
        body = {"model": "precise", "prompt": "a bc"}
        own = await stack.client.post(f"{stack.url}/tokenize", json=body)
        assert own.json()["tokens"] == [101, 102]
        precise = STANDARD_TIERS.index(TierName.PRECISE)
        stack.fleet.replicas[precise].mark(ReplicaStatus.FAILED)
        other = await stack.client.post(f"{stack.url}/tokenize", json=body)
        assert other.json()["tokens"] == [1, 2]


async def test_embeddings_need_an_engine_that_serves_them(tmp_path: Path) -> None:
    """Without one there is a 404 that says what to set."""
    async with router_stack(tmp_path) as stack:
        answer = await stack.client.post(
            f"{stack.url}/v1/embeddings", json={"model": "e", "input": "x"}
        )
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "embeddings_not_served"
        assert "openai.embeddings_urls" in answer.json()["error"]["message"]


async def test_errors_of_our_own_have_openais_form(tmp_path: Path) -> None:
    """Too long, too large, full, not ready, unknown path and wrong method: each has OpenAI's object."""
    full = {"max_in_flight": 1}
    tiers = dict.fromkeys(STANDARD_TIERS, full)
    settings = {
        "tiers": tiers,
        "admission": {"max_waiting": 0},
        "server": {"max_body_bytes": 1 << 20},
    }
    async with router_stack(tmp_path, settings) as stack:
        long = await chat(stack, messages=[{"role": "user", "content": "word " * 9000}])
        assert long.status_code == 400
        assert long.json()["error"]["code"] == "context_length_exceeded"
        large = await chat(
            stack, messages=[{"role": "user", "content": "x" * (1 << 20)}]
        )
        assert large.status_code == 413
        assert large.json()["error"]["code"] == "body_too_large"
        for engine in stack.engines.values():
            engine.delay_s = 0.1
        several = await asyncio.gather(*(chat(stack) for _ in range(4)))
        refused = next(a for a in several if a.status_code != 200)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "at_capacity"
        assert refused.headers["retry-after"] == "1"
        for replica in stack.fleet.replicas:
            replica.mark(ReplicaStatus.FAILED)
        down = await chat(stack)
        assert down.status_code == 503
        assert down.json()["error"]["type"] == "server_error"
        lost = await stack.client.get(f"{stack.url}/v1/nothing")
        assert lost.status_code == 404
        assert lost.json()["error"]["code"] == "not_found"
        wrong = await stack.client.get(stack.url + CHAT)
        assert wrong.status_code == 405
        assert wrong.json()["error"]["code"] == "method_not_allowed"
        assert stack.leases() == 0


async def test_parameters_that_a_draft_forbids_are_routed_around_it(
    tmp_path: Path,
) -> None:
    """vLLM refuses them with speculative decoding; without any other tier the router says which one it is."""
    async with router_stack(tmp_path) as stack:
        stack.fleet.configure(
            replace(stack.fleet.spec(TierName.FAST), draft=Draft("ngram", 4))
        )
        assert (await chat(stack)).headers["x-qarr-tier"] == "fast"
        assert (await chat(stack, min_p=0)).headers["x-qarr-tier"] == "fast"
        for given in ({"min_p": 0.1}, {"logit_bias": {"5": 1}}):
            assert (await chat(stack, **given)).headers["x-qarr-tier"] != "fast"
        required = await chat(stack, min_p=0.1, model="fast")
        assert required.status_code == 400
        assert required.json()["error"]["code"] == "unsupported_parameter"
        assert (
            "fast has a draft, and with a draft vLLM does not support min_p"
            in required.json()["error"]["message"]
        )


async def test_vllms_own_priority_is_kept(tmp_path: Path) -> None:
    """A body may give vLLM's numeric priority; qarr.priority goes before it."""
    async with router_stack(tmp_path) as stack:
        engine = stack.engines[TierName.FAST]
        await chat(stack, priority=7)
        await chat(stack, priority=7, qarr={"priority": "interactive"})
        await chat(stack)
        # speeds are measured by others
        asked = [body for body in engine.requests if "messages" in body]
        assert [body.get("priority") for body in asked] == [7, -1, None]


async def test_the_sdk_tries_again_when_it_is_told_to(tmp_path: Path) -> None:
    """More requests than places: those refused with 503 and Retry-After are sent again by OpenAI's SDK, and all succeed."""
    full = {"max_in_flight": 1}
    tiers = dict.fromkeys(STANDARD_TIERS, full)
    async with router_stack(
        tmp_path, {"tiers": tiers, "admission": {"max_waiting": 0}}
    ) as stack:
        for engine in stack.engines.values():
            engine.delay_s = 0.03
        async with openai.AsyncOpenAI(
            base_url=f"{stack.url}/v1", api_key="unused", max_retries=3
        ) as client:
            messages: Any = HI
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(model="auto", messages=messages)
                    for _ in range(4)
                )
            )
            assert [a.choices[0].message.content for a in answers] == [FULL] * 4
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="nope", messages=messages)
        assert (
            sum("messages" in r for e in stack.engines.values() for r in e.requests)
            == 4
        )
        assert stack.leases() == 0


ODD_BODIES: list[dict[str, Any]] = [
    {"messages": [{"role": [], "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "\ud800 odd"}]}]},
    {"stream": True, "stream_options": {"x": "\ud800"}},
    {"stream": "true"},
    {
        "stream": 1,
        "stream_options": {"include_usage": 1, "continuous_usage_stats": True},
    },
    {"n": "2", "seed": 10**30, "max_tokens": "7"},
]


async def test_odd_bodies_are_read_as_vllm_reads_them(tmp_path: Path) -> None:
    """Lax spellings, lone surrogates and huge numbers neither break the router nor are misread by it."""
    async with router_stack(tmp_path) as stack:
        for body in ODD_BODIES:
            request = json.dumps({"model": "fast", "messages": HI, **body})
            answer = await stack.client.post(stack.url + CHAT, content=request)
            assert answer.status_code == 200, (body, answer.text)
            assert answer.headers["content-type"].startswith(
                "text/event-stream"
            ) is bool(body.get("stream")), body
        assert stack.leases() == 0


@pytest.mark.parametrize(
    ("path", "body", "places", "prompt_tokens", "output_tokens"),
    [
        (CHAT, {"messages": HI, "n": 3}, 3, None, 300),
        ("/v1/completions", {"prompt": ["hello there"] * 5}, 5, 5 * 4, 500),
        ("/v1/completions", {"prompt": ["hello there"] * 2, "n": 2}, 4, 2 * 4, 400),
        ("/v1/completions", {"prompt": [[1, 2, 3], [4, 5]]}, 2, 5, 200),
        ("/v1/completions", {"prompt": "hello there", "best_of": 4}, 4, 4, 400),
        ("/v1/completions", {"prompt": [1, 2, 3]}, 1, 3, 100),
    ],
)
async def test_a_request_counts_by_its_answers(
    tmp_path: Path,
    path: str,
    body: dict[str, Any],
    places: int,
    prompt_tokens: int | None,
    output_tokens: int,
) -> None:
    """Choices and prompts take a place each, and their tokens; shown as one request; all of it comes back."""
    async with router_stack(tmp_path) as stack:
        stack.engines[TierName.FAST].delay_s = 3600
        asked = {"model": "fast", "max_tokens": 100, **body}
        request = asyncio.create_task(stack.client.post(stack.url + path, json=asked))
        replica = stack.fleet.replicas[0]
        await until(lambda: replica.state.in_flight, poll_s=0.005)
        assert replica.state.in_flight == 1
        assert replica.state.slots == places
        assert replica.output_tokens == output_tokens
        assert replica.state.prompt_tokens == prompt_tokens or prompt_tokens is None
        shown = (await stack.client.get(f"{stack.url}/tiers")).json()["tiers"][0][
            "replicas"
        ][0]
        assert shown["in_flight"] == 1
        assert shown["places_taken"] == places
        page = (await stack.client.get(f"{stack.url}/metrics")).text
        assert (
            f'qarr_requests_in_flight{{replica="{replica.id}",tier="fast"}} 1.0' in page
        )
        assert (
            f'qarr_places_taken{{replica="{replica.id}",tier="fast"}} {places}.0'
            in page
        )
        request.cancel()
        await until(lambda: not replica.state.in_flight, poll_s=0.01)
        assert replica.state.slots == 0
        assert stack.leases() == 0
        assert replica.state.kv.held == 0


TOO_MANY: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"messages": HI, "n": 10**30}, "n", "an integer from 1 to 10"),
    (CHAT, {"messages": HI, "n": 11}, "n", "asks for 11 answers"),
    (
        "/v1/completions",
        {"prompt": "hi", "best_of": 11},
        "best_of",
        "asks for 11 answers",
    ),
    (
        "/v1/completions",
        {"prompt": ["hi"] * 4, "n": 3},
        "n",
        "for each of 4 prompts (allowed: an integer from 1 to 2)",
    ),
    (
        "/v1/completions",
        {"prompt": ["hi"] * 11},
        "prompt",
        "at most 10 prompts in one request",
    ),
]


async def test_too_many_answers_are_refused_by_the_fields_name(tmp_path: Path) -> None:
    """What no replica is to be kept idle for is refused at once, and the error says which field, and what it may be."""
    async with router_stack(tmp_path, {"limits": {"max_sequences": 10}}) as stack:
        for path, body, param, words in TOO_MANY:
            answer = await stack.client.post(
                stack.url + path, json={"model": "fast", **body}
            )
            error = answer.json()["error"]
            assert answer.status_code == 400
            assert error["param"] == param
            assert words in error["message"]
            text = next(iter(body.keys() & {"messages", "prompt"}))
            assert body[text] not in [
                request.get(text) for request in stack.engines[TierName.FAST].requests
            ]
