"""An answer whose engine fails midway goes on elsewhere: no character lost, none repeated, and the caller is told."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from router.pipeline.failover import StopStringJoiner, _readings
from tests.fakes.engine import PIECE, Behaviour
from tests.unit.router_stack import Stack, events, router_stack
from tests.waiting import until
from tiers.breaker import BreakerState
from tiers.spec import STANDARD_TIERS, TierName

pytestmark = pytest.mark.anyio
WORDS = (
    "The",
    " capital",
    " of",
    " France",
    " is",
    " Paris",
    ",",
    " on",
    " the",
    " Seine",
    ".",
)
TEXT = "".join(WORDS)
HINT = {"x-qarr-tier": "fast"}
SOON = {"upstream": {"token_timeout_s": 0.3}}
# Two characters of which each takes two tokens.
CUT = (b"Paris", b" caf", b"\xc3", b"\xa9", b" ", b"\xf0\x9f", b"\x97\xbc", b" end")


@asynccontextmanager
async def faulty_stack(
    tmp_path: Path,
    faults: dict[str, dict[str, Any]],
    answer: tuple[str | bytes, ...] = WORDS,
    overrides: dict[str, Any] | None = None,
    tracing: TracerProvider | None = None,
) -> AsyncIterator[Stack]:
    """Run a router over three engines with one answer, which fail as told once they are ready."""
    behaviours = {name: Behaviour(answer=answer) for name in STANDARD_TIERS}
    async with router_stack(tmp_path, overrides, tracing, **behaviours) as stack:
        for name, fault in faults.items():
            for key, value in fault.items():
                setattr(behaviours[name], key, value)
        yield stack


def chunks(text: str) -> list[dict[str, Any]]:
    return [
        json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")
    ]


def content(text: str) -> str:
    return "".join(
        c["choices"][0]["delta"].get("content") or ""
        for c in chunks(text)
        if c["choices"]
    )


async def chat(stack: Stack, **more: Any) -> str:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **more}
    return (
        await stack.client.post(
            f"{stack.url}/v1/chat/completions", json=body, headers=HINT
        )
    ).text


async def test_a_request_that_every_engine_fails_speaks_against_none(
    tmp_path: Path,
) -> None:
    """One caller's request, sent again and again, must not take the engines away from others."""
    failing = {"status": 500}
    faults = dict.fromkeys(STANDARD_TIERS, failing)
    async with faulty_stack(tmp_path, faults) as stack:
        for _ in range(8):
            answer = await stack.generate(tier="fast", stream=False)
            assert answer.status_code == 503
        states = [replica.breaker.state(0.0) for replica in stack.fleet.replicas]
        assert states == [BreakerState.CLOSED] * 3
        assert stack.fleet.replicas[0].state.failed == 8
        for engine in stack.engines.values():
            engine.status = 200
        assert (await stack.generate(tier="fast")).headers["x-qarr-tier"] == "fast"


async def test_an_engine_that_fails_what_others_answer_rests(tmp_path: Path) -> None:
    async with faulty_stack(tmp_path, {"fast": {"status": 500}}) as stack:
        for _ in range(3):
            answer = await stack.generate(tier="fast", stream=False)
            assert answer.headers["x-qarr-tier"] == "balanced"
        assert stack.fleet.replicas[0].breaker.state(0.0) is BreakerState.OPEN
        assert stack.leases() == 0


@pytest.mark.parametrize("pieces", [1, 4])
async def test_what_came_with_nonsense_is_not_lost(tmp_path: Path, pieces: int) -> None:
    """An event that is no chunk, in the same bytes as a good one, also as the first: that one is sent, and the next follows."""
    async with faulty_stack(tmp_path, {"fast": {"nonsense_with": pieces}}) as stack:
        whole = await stack.generate(tier="fast", max_tokens=64, stream=False)
        assert whole.json()["text"] == TEXT
        assert whole.json()["continued_on"] == ["balanced"]
        assert content(await chat(stack)) == TEXT


async def test_comments_in_a_stream_are_no_faults(tmp_path: Path) -> None:
    """Proxies in front of an engine send them, so that connections stay open; the caller gets them as well."""
    async with faulty_stack(tmp_path, {"fast": {"pings": True}}) as stack:
        text = await chat(stack)
        assert content(text) == TEXT
        assert text.count(": ping") == len(WORDS)
        assert "continued" not in text
        whole = await stack.generate(tier="fast", max_tokens=64, stream=False)
        assert whole.json()["text"] == TEXT
        assert whole.json()["continued_on"] == []


EVENT = 'data: {"choices":[{"index":0,%s}]}\n\ndata: [DONE]\n\n'
NO_CHUNKS = {
    "no events": "<html>It works</html>",
    "no choices": 'data: {"id":"x"}\n\n',
    "choices null": 'data: {"choices":null}\n\n',
    "choices of another type": 'data: {"choices":{"a":1}}\n\n',
    "choice of another type": 'data: {"choices":[1]}\n\n',
    "an array": "data: [1]\n\n",
    "not UTF-8": EVENT % '"delta":{"content":"\ud800"}',
    "delta null": EVENT % '"delta":null',
    "delta of another type": EVENT % '"delta":"x"',
    "content of another type": EVENT % '"delta":{"content":5}',
    "reasoning of another type": EVENT % '"delta":{"reasoning":["x"]}',
    "finish reason of another type": EVENT
    % '"delta":{"content":"x"},"finish_reason":5',
    "ids of another type": EVENT % '"delta":{"content":"x"},"token_ids":5',
    "ids of another kind": EVENT % '"delta":{"content":"x"},"token_ids":["a"]',
    "prompt ids of another type": 'data: {"choices":[],"prompt_token_ids":"x"}\n\n',
    "usage of another type": 'data: {"choices":[],"usage":[1]}\n\n',
    "counts of another type": 'data: {"choices":[],"usage":{"prompt_tokens":"many"}}\n\n',
    "counts below nothing": 'data: {"choices":[],"usage":{"prompt_tokens":-1}}\n\n',
}


@pytest.mark.parametrize("instead", NO_CHUNKS.values(), ids=NO_CHUNKS.keys())
async def test_what_is_no_chunk_is_the_engines_fault(
    tmp_path: Path, instead: str
) -> None:
    """Whatever an engine sends with a 200 instead of chunks, another one is asked, and the failure counts."""
    async with faulty_stack(
        tmp_path, {"fast": {"nonsense": instead.encode("utf-8", "surrogatepass")}}
    ) as stack:
        generated = await stack.generate(tier="fast", max_tokens=64, stream=False)
        assert generated.status_code == 200
        assert generated.json()["text"] == TEXT
        assert generated.json()["tier"] == "balanced"
        for more in ({}, {"tools": [{"type": "function", "function": {"name": "f"}}]}):
            text = await chat(stack, **more)
            assert content(text) == TEXT
            assert text.count("[DONE]") == 1
        assert stack.fleet.replicas[0].state.failed == 3
        assert stack.leases() == 0


MESSAGE = '{"choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}],"usage":%s}'
NO_COMPLETIONS = {
    "no JSON": "<html>It works</html>",
    "an array": "[]",
    "no usage": '{"choices":[{"index":0,"message":{"content":"x"},"finish_reason":"stop"}]}',
    "usage of another type": MESSAGE % "7",
    "counts of another type": MESSAGE % '{"prompt_tokens":"many"}',
    "no choice": '{"choices":[],"usage":{"prompt_tokens":1}}',
    "choices of another type": '{"choices":{"0":{}},"usage":{"prompt_tokens":1}}',
    "choice of another type": '{"choices":["x"],"usage":{"prompt_tokens":1}}',
    "no message": '{"choices":[{"index":0,"finish_reason":"stop"}],"usage":{"prompt_tokens":1}}',
    "an error": '{"error":{"message":"no"}}',
}


@pytest.mark.parametrize("instead", NO_COMPLETIONS.values(), ids=NO_COMPLETIONS.keys())
async def test_what_is_no_completion_is_the_engines_fault(
    tmp_path: Path, instead: str
) -> None:
    """The same for an answer that is not streamed."""
    async with faulty_stack(
        tmp_path, {"fast": {"nonsense": instead.encode()}}
    ) as stack:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}
        answer = await stack.client.post(
            f"{stack.url}/v1/chat/completions", json=body, headers=HINT
        )
        assert answer.status_code == 200
        assert answer.headers["x-qarr-tier"] == "balanced"
        assert answer.json()["choices"][0]["message"]["content"] == TEXT
        assert stack.fleet.failures[TierName.FAST, "EngineFailed"] == 1


async def test_nonsense_is_not_relayed(tmp_path: Path) -> None:
    """What is no chunk ends an answer that cannot be gone on with by an error event, and never reaches the caller."""
    async with faulty_stack(tmp_path, {"fast": {"nonsense_with": 4}}) as stack:
        text = await chat(
            stack, tools=[{"type": "function", "function": {"name": "f"}}]
        )
        assert chunks(text)[-1]["error"]["code"] == "stream_broken"
        assert '{"cut' not in text
        assert "[DONE]" not in text


async def test_reasoning_is_no_silence(tmp_path: Path) -> None:
    """A model that thinks for longer than a first token may take is not given up; its thoughts count as tokens."""
    overrides = {"upstream": {"first_token_timeout_s": 1.5, "token_timeout_s": 1.5}}
    async with faulty_stack(
        tmp_path, {"fast": {"reasoning": 10, "delay_s": 0.25}}, overrides=overrides
    ) as stack:
        found = events((await stack.generate(tier="fast", max_tokens=64)).text)
        assert [data.get("text") for _, data in found[:-1]] == [WORDS[10]]
        assert found[-1][1]["usage"]["completion_tokens"] == len(WORDS)
        assert stack.fleet.replicas[0].state.failed == 0
        assert found[-1][1]["tier"] == "fast"
        assert found[-1][1]["ttft_ms"] < 1500  # the first token is the first thought
        stack.engines[TierName.FAST].break_after = 5
        broken = events((await stack.generate(tier="fast", max_tokens=64)).text)
        # nobody could go on with thoughts
        assert [name for name, _ in broken] == ["error"]


async def test_an_answer_that_is_no_http_is_a_failure(tmp_path: Path) -> None:
    """A head that cannot be read is the engine's fault: another one is asked, and the failure counts."""
    async with faulty_stack(tmp_path, {"fast": {"header": "x" * 100_000}}) as stack:
        answer = await stack.generate(tier="fast", max_tokens=64, stream=False)
        assert answer.status_code == 200
        assert answer.json()["text"] == TEXT
        assert answer.json()["tier"] == "balanced"
        assert stack.fleet.failures[TierName.FAST, "EngineUnreachable"] == 1
        assert stack.leases() == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "fault",
    [{"break_after": 3}, {"error_after": 3}, {"stall_after": 3}],
    ids=lambda f: next(iter(f)),
)
async def test_another_tier_goes_on(
    tmp_path: Path, fault: dict[str, Any], *, stream: bool
) -> None:
    """A death, an error and a stall midway: the answer is whole, and its end says who went on."""
    async with faulty_stack(tmp_path, {"fast": fault}, overrides=SOON) as stack:
        answer = await stack.generate(
            tier="fast", max_tokens=64, stream=stream, temperature=0.5
        )
        if stream:
            found = events(answer.text)
            assert [name for name, _ in found] == ["message"] * len(WORDS) + ["done"]
            last = found[-1][1]
            assert (
                "".join(data["text"] for name, data in found if name == "message")
                == TEXT
            )
        else:
            last = answer.json()
            assert last["text"] == TEXT
        assert last["tier"] == "fast"
        assert last["continued_on"] == ["balanced"]
        assert last["finish_reason"] == "stop"
        assert last["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": len(WORDS),
            "total_tokens": 3 + len(WORDS),
        }
        asked = stack.engines[TierName.BALANCED].requests[-1]
        assert asked["prompt"] == [1, 2, 3, PIECE, PIECE + 1, PIECE + 2]
        assert asked["max_tokens"] == 61
        assert asked["temperature"] == 0.5
        assert stack.leases() == 0


async def test_openai_streams_go_on_as_one_stream(tmp_path: Path) -> None:
    """All chunks look as if one engine had sent them; token counts come once; a comment tells of the switch."""
    async with faulty_stack(tmp_path, {"fast": {"break_after": 4}}) as stack:
        text = await chat(
            stack,
            max_tokens=64,
            seed=7,
            stop=["\n\n"],
            stream_options={"include_usage": True},
        )
        found = chunks(text)
        assert content(text) == TEXT
        assert (
            len({(c["id"], c["created"], c["model"], c["object"]) for c in found}) == 1
        )
        assert not [
            c
            for c in found
            for choice in c["choices"]
            if choice.get("token_ids") is not None
        ]
        assert found[0]["prompt_token_ids"] is None
        assert found[-1]["usage"]["completion_tokens"] == len(WORDS)
        assert [c["choices"][0]["finish_reason"] for c in found if c["choices"]][
            -1
        ] == "stop"
        assert text.count("data: [DONE]") == 1
        assert "\n: continued on balanced\n" in text
        asked = stack.engines[TierName.BALANCED].requests[-1]
        assert asked["seed"] == 7
        assert asked["stop"] == ["\n\n"]
        text = await chat(stack, qarr={"report": True})
        assert next(c["qarr"] for c in chunks(text) if "qarr" in c)["continued_on"] == [
            "balanced"
        ]
        assert stack.leases() == 0


async def test_completions_go_on(tmp_path: Path) -> None:
    """The same for a completion of plain text, whose own default of 16 tokens holds for all of it."""
    async with faulty_stack(tmp_path, {"fast": {"break_after": 4}}) as stack:
        body = {"prompt": "The", "stream": True}
        text = (
            await stack.client.post(
                f"{stack.url}/v1/completions", json=body, headers=HINT
            )
        ).text
        assert "".join(c["choices"][0]["text"] for c in chunks(text)) == TEXT
        assert stack.engines[TierName.BALANCED].requests[-1]["max_tokens"] == 12


@pytest.mark.parametrize("after", range(1, len(CUT) + 1))
async def test_a_character_that_was_cut_in_two_comes_whole(
    tmp_path: Path, after: int
) -> None:
    """Wherever the engine dies: a token without text yet is computed again, and counted once."""
    async with faulty_stack(tmp_path, {"fast": {"break_after": after}}, CUT) as stack:
        found = events((await stack.generate(tier="fast", max_tokens=64)).text)
        assert (
            "".join(data["text"] for name, data in found if name == "message")
            == b"".join(CUT).decode()
        )
        assert found[-1][1]["usage"]["completion_tokens"] == len(CUT)


async def test_the_next_engine_may_fail_as_well(tmp_path: Path) -> None:
    """Each goes on from where the last one stopped; the trace tells of every switch."""
    exporter = InMemorySpanExporter()
    tracing = TracerProvider()
    tracing.add_span_processor(SimpleSpanProcessor(exporter))
    faults = {"fast": {"break_after": 3}, "balanced": {"break_after": 6}}
    async with faulty_stack(tmp_path, faults, tracing=tracing) as stack:
        found = events((await stack.generate(tier="fast", max_tokens=64)).text)
        assert (
            "".join(data["text"] for name, data in found if name == "message") == TEXT
        )
        assert found[-1][1]["continued_on"] == ["balanced", "precise"]
        assert stack.engines[TierName.PRECISE].requests[-1]["prompt"][-1] == PIECE + 5
        assert stack.leases() == 0
    switches = [
        e.attributes
        for s in exporter.get_finished_spans()
        for e in s.events
        if e.name == "qarr.continuation"
    ]
    assert [
        (s["qarr.replica"], s["qarr.continued_on"], s["qarr.continued_tokens"])
        for s in switches
        if s
    ] == [
        ("fast-0", "balanced-0", 3),
        ("balanced-0", "precise-0", 6),
    ]


async def test_an_end_that_got_lost_is_added(tmp_path: Path) -> None:
    """All tokens that were asked for had come: nothing is left to compute."""
    async with faulty_stack(tmp_path, {"fast": {"break_after": 4}}) as stack:
        found = events((await stack.generate(tier="fast", max_tokens=4)).text)
        assert (
            "".join(data["text"] for name, data in found if name == "message")
            == "The capital of France"
        )
        assert found[-1][1]["finish_reason"] == "length"
        assert not stack.engines[TierName.BALANCED].requests


async def test_nobody_left_to_go_on_is_an_error(tmp_path: Path) -> None:
    """The stream ends with the error, never as if it were whole."""
    faults = {
        "fast": {"stall_after": 3},
        "balanced": {"status": 500},
        "precise": {"status": 500},
    }
    async with faulty_stack(tmp_path, faults, overrides=SOON) as stack:
        found = events((await stack.generate(tier="fast")).text)
        assert found[-1][0] == "error"
        assert found[-1][1]["type"].endswith("stream-broken")
        assert "[DONE]" not in await chat(stack)
        assert stack.leases() == 0


async def test_only_tiers_that_read_prompts_alike_go_on(tmp_path: Path) -> None:
    """Where tiers may differ in tokenizer and template, the ids of one mean nothing to another."""
    async with faulty_stack(tmp_path, {"fast": {"break_after": 3}}) as stack:
        for tier, prompt_identity in zip(
            STANDARD_TIERS, ("one", "another", "one"), strict=True
        ):
            spec = stack.fleet.spec(tier)
            stack.fleet.configure(replace(spec, prompt_identity=prompt_identity))
        found = events((await stack.generate(tier="fast", max_tokens=64)).text)
        assert (
            "".join(data["text"] for name, data in found if name == "message") == TEXT
        )
        assert found[-1][1]["continued_on"] == ["precise"]
        assert not stack.engines[TierName.BALANCED].requests
        spec = stack.fleet.spec(TierName.PRECISE)
        stack.fleet.configure(replace(spec, prompt_identity="a third"))
        found = events((await stack.generate(tier="fast", max_tokens=64)).text)
        assert found[-1][0] == "error"
        assert len(stack.engines[TierName.PRECISE].requests) == 1


async def test_a_required_tier_is_not_left(tmp_path: Path) -> None:
    """``require`` holds for the rest of the answer as well, which the very same engine may be asked for."""
    async with faulty_stack(
        tmp_path, {"fast": {"break_after": 3, "once": True}}
    ) as stack:
        found = events(
            (
                await stack.generate(tier="fast", tier_policy="require", max_tokens=64)
            ).text
        )
        assert (
            "".join(data["text"] for name, data in found if name == "message") == TEXT
        )
        assert found[-1][1]["continued_on"] == ["fast"]
        assert not stack.engines[TierName.BALANCED].requests
    async with faulty_stack(
        tmp_path, {"fast": {"stall_after": 3}}, overrides=SOON
    ) as stack:
        found = events((await stack.generate(tier="fast", tier_policy="require")).text)
        assert found[-1][0] == "error"
        # it would only stall again
        assert len(stack.engines[TierName.FAST].requests) == 1
        assert not stack.engines[TierName.BALANCED].requests


async def test_no_engine_is_asked_twice_about_one_break(tmp_path: Path) -> None:
    """The others first, the one that broke off last."""
    faults = {
        "fast": {"break_after": 3, "once": True},
        "balanced": {"status": 500},
        "precise": {"status": 500},
    }
    async with faulty_stack(tmp_path, faults) as stack:
        found = events((await stack.generate(tier="fast", max_tokens=64)).text)
        assert found[-1][1]["continued_on"] == ["fast"]
        assert [len(stack.engines[tier].requests) for tier in STANDARD_TIERS] == [
            2,
            1,
            1,
        ]
        assert stack.leases() == 0


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"response_format": {"type": "json_object"}},
        {"logprobs": True},
        {"n": 2},
    ],
    ids=lambda m: next(iter(m)),
)
async def test_what_has_a_structure_is_not_continued(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    """Half a tool call or half an object is no start for another engine: the error says that it broke."""
    async with faulty_stack(tmp_path, {"fast": {"break_after": 3}}) as stack:
        text = await chat(stack, **more)
        assert chunks(text)[-1]["error"]["code"] == "stream_broken"
        assert "[DONE]" not in text
        assert not stack.engines[TierName.BALANCED].requests
        assert '_ids":[' not in text


async def test_a_client_that_leaves_a_continued_answer_frees_both_engines(
    tmp_path: Path,
) -> None:
    """The lease and the connection of the engine that went on are given back."""
    faults = {"fast": {"break_after": 2}, "balanced": {"delay_s": 0.2}}
    async with faulty_stack(tmp_path, faults) as stack:
        body = {"prompt": "hi", "tier": "fast", "max_tokens": 64}
        async with stack.client.stream(
            "POST", f"{stack.url}/generate", json=body
        ) as response:
            async for line in response.aiter_lines():
                if "France" in line:
                    break
        await until(
            lambda: (
                not (stack.leases() or any(b.running for b in stack.engines.values()))
            ),
            within_s=10,
        )


STOP = {"stop": ["<|end_of_answer|>"], "stream_options": {"include_usage": True}}


def usage(text: str) -> list[dict[str, int]]:
    """Return the token counts in one of OpenAI's streams, each time that they were sent."""
    return [c["usage"] for c in chunks(text) if c.get("usage")]


@pytest.mark.parametrize("group", [1, 3])
async def test_text_that_was_held_back_for_a_stop_string_is_not_lost(
    tmp_path: Path, group: int
) -> None:
    """Also where no other engine can tell what it was: the one that broke off is asked, as its connection alone may have."""
    others = {"status": 500, "detokenizes": False}
    faults = {
        "fast": {"break_after": 9, "once": True, "group": group},
        "balanced": others,
        "precise": others,
    }
    async with faulty_stack(tmp_path, faults) as stack:
        text = await chat(stack, **STOP)
        assert content(text) == TEXT
        assert text.count("[DONE]") == 1
        assert ("continued on fast" in text) is True
        assert usage(text) == [
            {
                "prompt_tokens": 3,
                "completion_tokens": len(WORDS),
                "total_tokens": 3 + len(WORDS),
            }
        ]
        assert stack.leases() == 0


def test_a_space_may_be_dropped_where_a_text_begins_and_nowhere_else() -> None:
    assert _readings("a", None) == ("a", " a")
    assert _readings("a", "") == ("a",)
    assert _readings("xa", "x") == ("a",)


@pytest.mark.parametrize(
    "detokenizing",
    [
        {"detokenizes": False},
        {"told": {}},
        {"told": {"prompt": 5}},
        {"told": []},
        {"told": {"prompt": TEXT}},
    ],
    ids=str,
)
async def test_text_that_nobody_knows_is_an_error(
    tmp_path: Path, detokenizing: dict[str, Any]
) -> None:
    """Where no engine tells what the tokens say, the stream ends with an error: never as whole, never with other words."""
    faults = dict.fromkeys(STANDARD_TIERS, detokenizing)
    faults["fast"] = {**detokenizing, "break_after": 9}
    async with faulty_stack(tmp_path, faults) as stack:
        text = await chat(stack, **STOP)
        assert chunks(text)[-1]["error"]["code"] == "stream_broken"
        assert "[DONE]" not in text
        assert TEXT.startswith(
            "".join(
                c["choices"][0]["delta"].get("content") or "" for c in chunks(text)[:-1]
            )
        )
        assert not stack.engines[TierName.BALANCED].requests
        assert stack.leases() == 0


@pytest.mark.parametrize(
    "more", [{}, {**STOP, "include_stop_str_in_output": True}, {"stop": "x"}], ids=str
)
@pytest.mark.parametrize("after", [2, 3, 7])
async def test_where_nothing_is_held_back_nobody_need_be_asked(
    tmp_path: Path, more: dict[str, Any], after: int
) -> None:
    """Without stop strings, and with those that hold nothing back, the tokens of the last text are known by themselves."""
    faults = {tier: {"detokenizes": False} for tier in STANDARD_TIERS}
    async with faulty_stack(
        tmp_path, {**faults, "fast": {"break_after": after, "detokenizes": False}}, CUT
    ) as stack:
        text = await chat(stack, **more)
        assert content(text) == b"".join(CUT).decode()
        assert text.count("[DONE]") == 1


@pytest.mark.parametrize("after", [2, 3, 7])
async def test_text_that_a_parser_held_is_not_lost(tmp_path: Path, after: int) -> None:
    """A part of a token's text that would have come with the next one is sent before another engine goes on."""
    async with faulty_stack(
        tmp_path, {"fast": {"break_after": after, "late": 1}}
    ) as stack:
        text = await chat(stack)
        assert content(text) == TEXT
        assert text.count("[DONE]") == 1


@pytest.mark.parametrize("special", [(3,), (6,), (8,), (2, 3, 7)], ids=str)
async def test_special_tokens_are_not_shown(
    tmp_path: Path, special: tuple[int, ...]
) -> None:
    """An answer leaves them out, /detokenize does not: what it says is not sent as it is."""
    faults = {"fast": {"break_after": 9}}
    async with faulty_stack(tmp_path, faults) as stack:
        for behaviour in stack.engines.values():
            behaviour.special = special
        text = await chat(stack, stop="123456")
        assert content(text) == "".join(
            word for number, word in enumerate(WORDS) if number not in special
        )
        assert text.count("[DONE]") == 1


async def test_a_stop_string_over_two_breaks_is_seen(tmp_path: Path) -> None:
    """It begins at one engine, is completed at the next, which breaks before it says so, and ends the answer at the third."""
    answer = {"answer": ("baa", " ", "a", "b", "a", " aa", "c ", "bba", "  ", "aa")}
    faults = {
        "fast": {**answer, "break_after": 6},
        "balanced": {**answer, "break_after": 8},
        "precise": answer,
    }
    async with faulty_stack(tmp_path, faults) as stack:
        text = await chat(stack, stop=" aac ")
        assert content(text) == "baa aba"
        assert text.count("[DONE]") == 1
        assert [c["choices"][0].get("stop_reason") for c in chunks(text)][-1] == " aac "
        assert [len(engine.requests) for engine in stack.engines.values()] == [1, 1, 1]


# The longest stop string makes engines hold back 39 characters, so the token that completes the other one comes without text.
SPANNING = (*"ab" * 20, "E", "ND", "x", *"tuv" * 30)
SPANNING_STOPS = ["ENDx", "Q" * 40]
TOKENS_TO_STOP = 43


async def count_tokens(stack: Stack, path: str, **body: Any) -> int:
    """Return the output tokens that a streamed answer's usage tells, whose text and finish reason are checked."""
    body = {"prompt": "hi", "stop": SPANNING_STOPS, "max_tokens": 120, **body}
    if path == "/generate":
        found = events((await stack.generate(tier="fast", **body)).text)
        assert "".join(data.get("text", "") for _, data in found) == "ab" * 20
        assert found[-1][1]["finish_reason"] == "stop"
        return int(found[-1][1]["usage"]["completion_tokens"])
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    if path == "/v1/chat/completions":
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "hi"}]
    url = f"{stack.url}{path}"
    text = (await stack.client.post(url, json=body, headers=HINT)).text
    choices = [choice for chunk in chunks(text) for choice in chunk["choices"]]
    texts = [
        choice.get("text") or choice.get("delta", {}).get("content") or ""
        for choice in choices
    ]
    assert "".join(texts) == "ab" * 20
    assert choices[-1]["finish_reason"] == "stop"
    (counts,) = usage(text)
    return counts["completion_tokens"]


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/generate"]
)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("resumes", [False, True])
async def test_usage_ends_with_the_token_that_completes_a_stop_string(
    tmp_path: Path, path: str, group: int, *, resumes: bool
) -> None:
    """Tokens that the next engine computes before its text shows that the answer has ended are not counted."""
    faults = {tier: {"group": group, "resumes": resumes} for tier in STANDARD_TIERS}
    faults["fast"]["break_after"] = 42
    async with faulty_stack(tmp_path, faults, SPANNING) as stack:
        assert await count_tokens(stack, path) == TOKENS_TO_STOP
        assert stack.engines[TierName.BALANCED].requests
        assert stack.leases() == 0


@pytest.mark.parametrize("after", [41, 42])
async def test_usage_counts_all_tokens_of_a_stop_strings_last_character(
    tmp_path: Path, after: int
) -> None:
    """A token that ends within a character does not complete the stop string."""
    answer = [*SPANNING[:40], b"E", b"\xc3", b"\xa9", b"x", *SPANNING[43:]]
    stops = ["E\N{LATIN SMALL LETTER E WITH ACUTE}", *SPANNING_STOPS]
    faults = {"fast": {"break_after": after}}
    async with faulty_stack(tmp_path, faults, tuple(answer)) as stack:
        tokens = await count_tokens(stack, "/v1/completions", stop=stops)
        assert tokens == TOKENS_TO_STOP


async def test_usage_does_not_count_what_came_after_a_stop_string_that_was_not_told(
    tmp_path: Path,
) -> None:
    """The second engine completes it and breaks before its text shows that."""
    faults = {"fast": {"break_after": 41}, "balanced": {"break_after": 60}}
    async with faulty_stack(tmp_path, faults, SPANNING) as stack:
        assert await count_tokens(stack, "/v1/completions") == TOKENS_TO_STOP
        assert stack.engines[TierName.PRECISE].requests


async def test_usage_counts_no_token_that_may_not_have_been_needed(
    tmp_path: Path,
) -> None:
    """A special token confuses the engines' text: as few tokens are counted as the stop string can have taken."""
    answer = (*SPANNING[:42], "<special>", *SPANNING[42:])
    faults: dict[str, dict[str, Any]] = {"fast": {"break_after": 42}}
    async with faulty_stack(tmp_path, faults, answer) as stack:
        for behaviour in stack.engines.values():
            behaviour.special = (42,)
        assert await count_tokens(stack, "/v1/completions") == TOKENS_TO_STOP


async def test_generate_keeps_its_parameters_and_its_stop_strings_when_it_is_continued(
    tmp_path: Path,
) -> None:
    """A stop string that begins at one engine and ends at the next ends the answer; seed and the like go along."""
    answer = {"answer": ("baa", " ", "a", "b", "a", " aa", "c ", "bba", "  ", "aa")}
    async with faulty_stack(
        tmp_path, {"fast": {**answer, "break_after": 6}, "balanced": answer}
    ) as stack:
        kept = {
            "stop": " aac ",
            "seed": 7,
            "top_p": 0.5,
            "repetition_penalty": 1.1,
            "temperature": 0.2,
        }
        found = events((await stack.generate(**kept)).text)
        assert "".join(data.get("text", "") for _, data in found) == "baa aba"
        assert found[-1][0] == "done"
        assert found[-1][1]["finish_reason"] == "stop"
        assert found[-1][1]["continued_on"] == ["balanced"]
        first, then = (
            stack.engines[TierName(name)].requests[-1] for name in ("fast", "balanced")
        )
        for asked in (first, then):
            assert {name: asked[name] for name in kept} == {**kept, "stop": [" aac "]}


async def test_tokens_that_may_not_stop_yet_are_not_continued(tmp_path: Path) -> None:
    """Which of the next engine's characters may complete a stop string is not known before ``min_tokens``."""
    async with faulty_stack(tmp_path, {"fast": {"break_after": 3}}) as stack:
        assert "[DONE]" not in await chat(stack, stop="x", min_tokens=8)
        assert content(await chat(stack, stop="x", min_tokens=3)) == TEXT


@pytest.mark.parametrize("events_sent", [12, 13], ids=["before", "after"])
async def test_counts_are_sent_once(tmp_path: Path, events_sent: int) -> None:
    """A break after the last text, before and after the counts: they come once, and are the same as without it."""
    async with faulty_stack(tmp_path, {}) as stack:
        fast = stack.engines[TierName.FAST]
        fast.prompt_tokens = 3
        whole = await chat(stack, **STOP)
        assert len(chunks(whole)) == 13
        fast.break_at = events_sent
        broken = await chat(stack, **STOP)
        assert content(broken) == TEXT
        assert usage(broken) == usage(whole)
        assert broken.count("[DONE]") == 1
        assert len(usage(whole)) == 1


async def test_counts_that_nobody_knows_are_not_made_up(tmp_path: Path) -> None:
    """An engine that tells no tokens and breaks before its counts: who asked for them gets an error, who did not the end."""
    async with faulty_stack(
        tmp_path, {"fast": {"tells_ids": False, "break_after": len(WORDS)}}
    ) as stack:
        fast = stack.engines[TierName.FAST]
        fast.break_after = None
        fast.break_at = len(WORDS) + 2
        asked = await chat(stack, stream_options={"include_usage": True})
        assert chunks(asked)[-1]["error"]["code"] == "stream_broken"
        assert content(await chat(stack)) == TEXT
        assert ("[DONE]" in asked) is False
        assert "event: error" in (await stack.generate(tier="fast", max_tokens=64)).text


async def test_tiers_that_were_full_at_the_start_go_on(tmp_path: Path) -> None:
    """Where an answer goes on is decided when it breaks, not when it was let in."""
    overrides = {
        "tiers": {"balanced": {"max_in_flight": 1}, "precise": {"max_in_flight": 1}}
    }
    async with faulty_stack(tmp_path, {}, overrides=overrides) as stack:
        leases = [
            stack.fleet.lease(tier, prompt_tokens=1, max_tokens=1)
            for tier in list(STANDARD_TIERS)[1:]
        ]
        stack.engines[TierName.FAST].break_after = 3
        body = {"prompt": "hi", "tier": "fast", "max_tokens": 64}
        stack.engines[TierName.FAST].delay_s = 0.1
        async with stack.client.stream(
            "POST", f"{stack.url}/generate", json=body
        ) as response:
            for lease in leases:
                assert lease is not None
                lease.release()
            text = (await response.aread()).decode()
        assert events(text)[-1][1]["continued_on"] == ["balanced"]


async def test_the_next_tier_before_the_first_token_is_taken_as_things_stand(
    tmp_path: Path,
) -> None:
    """A tier that had no place when the request was let in takes it over when the first one fails."""
    overrides = {
        "tiers": {"balanced": {"max_in_flight": 1}, "precise": {"max_in_flight": 1}}
    }
    async with faulty_stack(
        tmp_path, {"fast": {"status": 500}}, overrides=overrides
    ) as stack:
        leases = [
            stack.fleet.lease(tier, prompt_tokens=1, max_tokens=1)
            for tier in list(STANDARD_TIERS)[1:]
        ]
        answer = await stack.generate(tier="fast", max_tokens=64, stream=False)
        assert answer.status_code == 200
        assert answer.json().get("tier") == "balanced"
        for lease in leases:
            assert lease is not None
            lease.release()


async def test_every_attempt_has_an_id_of_its_own(tmp_path: Path) -> None:
    """An engine that is asked again about one request is never given an id that it may still hold."""
    others = {"status": 500}
    faults = {
        "fast": {"break_after": 3, "once": True},
        "balanced": others,
        "precise": others,
    }
    async with faulty_stack(tmp_path, faults) as stack:
        await stack.generate(tier="fast", max_tokens=64)
        ids = [
            headers["x-request-id"]
            for engine in stack.engines.values()
            for headers in engine.headers
        ]
        assert len(ids) == len(set(ids)) == 4


def reference(text: str, stops: list[str], *, include: bool) -> tuple[str, str]:
    """Return what one engine would have answered: up to the stop string that is complete first; and that string."""
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    if not ends:
        return text, ""
    first = min(end for end, _, _ in ends)
    _, start, stop = next(e for e in ends if e[0] == first)
    return text[: start + (len(stop) if include else 0)], stop


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=2),
    st.data(),
)
def test_a_stop_string_across_the_seam_is_seen(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    """Whatever the texts and wherever the cut: one engine and two give the same answer."""
    include = data.draw(st.booleans())
    cut = data.draw(st.integers(0, len(text)))
    hold = 0 if include else max(map(len, stops), default=1) - 1
    before = text[:cut]
    after = text[cut:]
    if any(stop in before for stop in stops):
        return  # the first engine ended it
    sent = before[: max(len(before) - hold, 0)]
    seam = StopStringJoiner(sent, before[len(sent) :], stops, include=include)
    # the second engine sees only its own text
    out = sent
    (left, stop) = reference(after, stops, include=include)
    for character in left:
        out += seam.pass_on(character, last=False)
        if seam.stopped is not None:
            break
    else:
        out += seam.pass_on("", last=True, ended_by="" if include else stop)
    expected, _ = reference(text, stops, include=include)
    assert out == expected


async def test_an_engine_that_failed_before_may_go_on_again(tmp_path: Path) -> None:
    """With two engines left of three, one that broke a part is asked again once the other has failed as well."""
    faults = {
        "fast": {"break_after": 3},
        "balanced": {"break_after": 6},
        "precise": {"status": 500},
    }
    async with faulty_stack(tmp_path, faults) as stack:
        found = events((await stack.generate(tier="fast", max_tokens=64)).text)
        assert (
            "".join(data["text"] for name, data in found if name == "message") == TEXT
        )
        assert found[-1][1]["continued_on"] == ["balanced", "fast"]
        assert stack.leases() == 0
