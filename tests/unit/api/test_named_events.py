"""Anthropic's Messages API and OpenAI's Responses API over real sockets, in front of fake engines."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from router.auth.api_keys import add_key
from tests.fakes.engine import ANSWER, Behaviour
from tests.unit.router_stack import SOUND_S, Stack, events, router_stack
from tests.waiting import until
from tiers.spec import ReplicaStatus, TierName

pytestmark = pytest.mark.anyio
FULL = "".join(ANSWER)
HI: list[Any] = [{"role": "user", "content": "hi"}]
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
COUNT = "/v1/messages/count_tokens"
BODIES: dict[str, dict[str, Any]] = {
    MESSAGES: {"messages": HI, "max_tokens": 64},
    RESPONSES: {"input": HI, "max_output_tokens": 64},
}
QUOTA = 60
LAST = {MESSAGES: "message_stop", RESPONSES: "response.completed"}
both = pytest.mark.parametrize("path", BODIES)


async def ask(
    stack: Stack, path: str, headers: dict[str, str] | None = None, **body: Any
) -> httpx.Response:
    body = {"model": "auto", **BODIES[path], **body}
    return await stack.client.post(stack.url + path, json=body, headers=headers)


def asked(behaviour: Behaviour, path: str) -> list[dict[str, Any]]:
    """Return the callers' requests that an engine got; a supervisor measures its speed with others."""
    return [body for body in behaviour.requests if next(iter(BODIES[path])) in body]


def text_of(stream: str) -> str:
    found = [
        data.get("delta")
        for name, data in events(stream)
        if name.endswith(("_delta", "text.delta"))
    ]
    return "".join(
        delta if isinstance(delta, str) else delta.get("text", "") for delta in found
    )


def message_of(answer: httpx.Response) -> str:
    """Return an error's message, after checking that it has the form of its API."""
    body = answer.json()
    if MESSAGES in str(answer.url):
        assert set(body) == {"type", "error", "request_id"}, body
        assert body["type"] == "error"
        assert set(body["error"]) == {"type", "message"}
    else:
        assert set(body["error"]) == {"type", "message", "param", "code"}, body
    return str(body["error"]["message"])


@both
async def test_the_body_passes_as_it_is(tmp_path: Path, path: str) -> None:
    """The engine gets the caller's bytes for every field but the model; ``qarr`` stays here."""
    text, limit = BODIES[path]
    raw = (
        b'{ "%b":[{"role":"user","content":"caf\\u00e9"}], "temperature": 1.0e-1, "model":"fast","%b":9,"stop":["\xc3\xa9"],'
        b'"unknown":123456789012345678901%b}'
    )
    async with router_stack(tmp_path) as stack:
        engine = stack.engines[TierName.FAST]
        sent = raw % (
            text.encode(),
            limit.encode(),
            b',"qarr":{"tier_policy":"require"}',
        )
        answer = await stack.client.post(stack.url + path, content=sent)
        assert answer.status_code == 200
        assert answer.headers["x-qarr-tier"] == "fast"
        passed = raw.replace(b'"fast"', b'"fake"') % (
            text.encode(),
            limit.encode(),
            b"",
        )
        assert json.loads(engine.raw[-1]) == json.loads(passed)
        for part in (
            b'"content":"caf\\u00e9"',
            b"1.0e-1",
            b'["\xc3\xa9"]',
            b"123456789012345678901",
        ):
            assert part in engine.raw[-1]


@pytest.mark.parametrize("stream", [True, False])
async def test_thinking_of_a_model_that_does_not_think_is_left_out_and_said(
    tmp_path: Path, *, stream: bool
) -> None:
    """Clients of Anthropic's API ask every model for it; a model that does think is asked, and nothing is said."""
    thinking = {"type": "enabled", "budget_tokens": 1024}
    async with router_stack(tmp_path, balanced=Behaviour(thinks=True)) as stack:
        answer = await ask(
            stack, MESSAGES, model="fast", thinking=thinking, stream=stream
        )
        assert answer.status_code == 200
        assert answer.headers["x-qarr-ignored"] == "thinking"
        assert "thinking" not in asked(stack.engines[TierName.FAST], MESSAGES)[-1]
        answer = await ask(
            stack, MESSAGES, model="balanced", thinking=thinking, stream=stream
        )
        assert answer.status_code == 200
        assert ("x-qarr-ignored" in answer.headers) is False
        assert (
            asked(stack.engines[TierName.BALANCED], MESSAGES)[-1]["thinking"]
            == thinking
        )


@both
async def test_answers_pass_as_they_are(tmp_path: Path, path: str) -> None:
    """Whole and streamed, they are the engine's own bytes, with our headers; the record has their token counts."""
    async with router_stack(tmp_path) as stack:
        engine_url = stack.fleet.replicas[0].url
        for stream in (False, True):
            direct = await stack.client.post(
                engine_url + path,
                json={"model": "fake", "stream": stream, **BODIES[path]},
            )
            routed = await ask(stack, path, stream=stream)
            assert routed.status_code == 200
            assert routed.content == direct.content
            assert routed.headers["content-type"] == direct.headers["content-type"]
            assert routed.headers["x-qarr-tier"] == "fast"
            assert routed.headers["x-qarr-precision"] == "awq-int4"
        assert text_of(routed.text) == FULL
        records = (await stack.client.get(f"{stack.url}/requests")).json()["requests"]
        assert [
            (r["route"], r["outcome"], r["prompt_tokens"], r["output_tokens"])
            for r in records
        ] == [(path, "ok", 10, len(ANSWER))] * 2
        assert stack.leases() == 0


HINTS: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({}, {"model": "balanced"}, "balanced"),
    ({}, {"model": "claude-haiku"}, "fast"),
    ({"x-qarr-tier": "precise"}, {}, "precise"),
    ({"x-qarr-tier": "precise"}, {"qarr": {"tier": "balanced"}}, "balanced"),
    (
        {},
        {"qarr": {"sla": {"max_quality_loss": 0}}, "text": "Why is the sky blue?"},
        "precise",
    ),
    # a greeting loses nothing
    ({}, {"qarr": {"sla": {"max_quality_loss": 0}}}, "fast"),
    ({}, {"text": "Why do cats purr, and how?"}, "balanced"),
    ({}, {"text": [{"type": "image", "source": {}}]}, "precise"),
]


@both
async def test_hints_come_by_model_header_and_body(tmp_path: Path, path: str) -> None:
    """As for chat completions; and the last turn decides."""
    options = {"openai": {"aliases": {"claude-haiku": "auto"}}}
    async with router_stack(tmp_path, options) as stack:
        for headers, body, tier in HINTS:
            given = {name: value for name, value in body.items() if name != "text"}
            if "text" in body:
                given[next(iter(BODIES[path]))] = [
                    {"role": "user", "content": body["text"]}
                ]
            answer = await ask(stack, path, headers, **given)
            assert (answer.status_code, answer.headers["x-qarr-tier"]) == (200, tier), (
                headers,
                body,
            )
            assert "qarr" not in asked(stack.engines[TierName(tier)], path)[-1]


@both
async def test_a_priority_reaches_the_engine(tmp_path: Path, path: str) -> None:
    """In the body; and since vLLM's messages have none there, in vLLM's header for it."""
    async with router_stack(tmp_path) as stack:
        engine = stack.engines[TierName.FAST]
        for body in ({"qarr": {"priority": "interactive"}}, {"priority": 7}, {}):
            await ask(stack, path, **body)
        assert [body.get("priority") for body in asked(engine, path)] == [-1, 7, None]
        sent = [headers.get("x-vllm-priority") for headers in engine.headers]
        assert sent == (["-1", "7", None] if path == MESSAGES else [None] * 3)


@both
async def test_the_report_is_added_when_asked_for(tmp_path: Path, path: str) -> None:
    """To the answer as a whole, or to a stream's last event."""
    async with router_stack(tmp_path) as stack:
        whole = (await ask(stack, path, qarr={"report": True})).json()
        name, last = events(
            (await ask(stack, path, stream=True, qarr={"report": True})).text
        )[-1]
        assert name == LAST[path]
        assert whole["qarr"] == last["qarr"]
        assert last["qarr"]["tier"] == "fast"


@both
@pytest.mark.parametrize(
    ("fault", "stream"),
    [
        (Behaviour(status=500), True),
        (Behaviour(status=500), False),
        (Behaviour(break_after=0), True),
        (Behaviour(break_after=0), False),
        (Behaviour(error_after=0), True),
        (Behaviour(stall_after=0), True),
        (Behaviour(nonsense=b"event: x\ndata: 1\n\n"), True),
        (Behaviour(nonsense=b"{}"), False),
    ],
)
async def test_retries_elsewhere_before_the_first_byte(
    tmp_path: Path,
    path: str,
    fault: Behaviour,
    stream: bool,  # noqa: FBT001
) -> None:
    """A tier that fails before its first token is replaced, and the headers say so."""
    async with router_stack(
        tmp_path, {"upstream": {"first_token_timeout_s": SOUND_S}}
    ) as stack:
        broken = stack.engines[TierName.FAST]
        for name in ("status", "break_after", "error_after", "stall_after", "nonsense"):
            setattr(broken, name, getattr(fault, name))
        answer = await ask(stack, path, stream=stream)
        assert answer.status_code == 200
        assert answer.headers["x-qarr-tier"] == "balanced"
        assert "fast failed before the first token" in answer.headers["x-qarr-reason"]
        assert stack.leases() == 0


FAULTS = ("break_after", "stall_after", "error_after", "before the end")


# The last event of a message says nothing: the router writes it. That of a response has all of it.
@pytest.mark.parametrize(
    ("path", "fault"),
    [*product((MESSAGES, RESPONSES), FAULTS), (RESPONSES, "at the end")],
)
async def test_a_broken_stream_ends_with_an_error_and_without_an_end(
    tmp_path: Path, path: str, fault: str
) -> None:
    """A stream that broke never looks finished: an error event comes last, in the form of its API."""
    async with router_stack(
        tmp_path, {"upstream": {"token_timeout_s": SOUND_S}}
    ) as stack:
        engine = stack.engines[TierName.FAST]
        whole = events((await ask(stack, path, model="fast", stream=True)).text)
        if fault in {"before the end", "at the end"}:
            engine.break_at = len(whole) - (2 if fault == "before the end" else 1)
        else:
            setattr(engine, fault, 3)
        answer = await ask(stack, path, model="fast", stream=True)
        *before, (name, last) = events(answer.text)
        assert name == "error"
        assert last["type"] == "error"
        assert LAST[path] not in answer.text
        assert before == whole[: len(before)]
        assert text_of(answer.text) == (FULL if "end" in fault else "The capital of")
        if path == MESSAGES:
            assert last["error"]["type"] == "api_error"
            assert ("request_id" in last) is True
        else:
            assert last["code"] == "stream_broken"
            assert last["sequence_number"] == len(before)
            assert last["error"]["code"] == "stream_broken"
        records = (await stack.client.get(f"{stack.url}/requests")).json()["requests"]
        assert records[0]["outcome"] != "ok"
        assert records[0]["output_tokens"] >= 3
        assert stack.leases() == 0


async def test_sdks_raise_their_own_errors_for_a_broken_stream(tmp_path: Path) -> None:
    """So a program cannot take half an answer for a whole one."""
    async with router_stack(tmp_path) as stack:
        stack.engines[TierName.FAST].break_after = 3
        async with anthropic.AsyncAnthropic(
            base_url=stack.url, api_key="unused", max_retries=0
        ) as client:
            said = []
            with pytest.raises(
                anthropic.APIStatusError, match="the engine's connection broke off"
            ):
                async with client.messages.stream(
                    model="fast", messages=HI, max_tokens=64
                ) as stream:
                    async for piece in stream.text_stream:
                        said.append(piece)  # noqa: PERF401  it is cut short by an error
            assert "".join(said) == "The capital of"
        async with openai.AsyncOpenAI(
            base_url=f"{stack.url}/v1", api_key="unused", max_retries=0
        ) as other:
            with pytest.raises(
                openai.APIError, match="the engine's connection broke off"
            ):
                async for _ in await other.responses.create(
                    model="fast", input="hi", stream=True
                ):
                    pass


@both
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine(
    tmp_path: Path,
    path: str,
    stream: bool,  # noqa: FBT001
) -> None:
    """When the client goes away its request ends in the engine, streamed or not."""
    async with router_stack(tmp_path) as stack:
        engine = stack.engines[TierName.FAST]
        engine.delay_s = 0.05
        engine.answer = ("x",) * 64
        request = asyncio.create_task(ask(stack, path, model="fast", stream=stream))
        await until(lambda: engine.running != 0, poll_s=0.01)
        request.cancel()
        await until(lambda: not (engine.running or stack.leases()), within_s=10)


@both
async def test_errors_have_the_form_of_their_api(tmp_path: Path, path: str) -> None:
    """Not JSON, unknown model, wrong option, too long, too large, refused by the engine, full, down, unknown path, method."""
    full = {"max_in_flight": 1}
    tiers = dict.fromkeys(("fast", "balanced", "precise"), full)
    text = next(iter(BODIES[path]))
    async with router_stack(
        tmp_path, {"tiers": tiers, "admission": {"max_waiting": 0}}
    ) as stack:

        def long(words: int) -> dict[str, Any]:
            return {text: [{"role": "user", "content": "word " * words}]}

        answers = [
            (
                await stack.client.post(stack.url + path, content=b"[]"),
                400,
                "invalid_request_error",
                "body",
            ),
            (
                await ask(stack, path, model="claude"),
                404,
                "not_found_error",
                "no model 'claude'",
            ),
            (
                await ask(stack, path, {"x-qarr-tier": "turbo"}),
                400,
                "invalid_request_error",
                "x-qarr-tier",
            ),
            (
                await ask(stack, path, **long(9000)),
                400,
                "invalid_request_error",
                "exceed its context",
            ),
            (
                await ask(stack, path, **long(300_000)),
                413,
                "request_too_large",
                "at most",
            ),
            (
                await ask(stack, path, **{list(BODIES[path])[1]: -1}),
                400,
                "invalid_request_error",
                "below 1",
            ),
            (
                await stack.client.get(f"{stack.url}{path}"),
                405,
                "invalid_request_error",
                "POST",
            ),
            (
                await stack.client.post(f"{stack.url}{path}/x/y/z"),
                404,
                "not_found_error",
                "nothing is served at this path",
            ),
        ]
        for engine in stack.engines.values():
            engine.delay_s = 0.1
        several = await asyncio.gather(*(ask(stack, path) for _ in range(4)))
        answers.append(
            (
                next(a for a in several if a.status_code != 200),
                503,
                "overloaded_error",
                "slots taken",
            )
        )
        assert answers[-1][0].headers["retry-after"] == "1"
        for replica in stack.fleet.replicas:
            replica.mark(ReplicaStatus.FAILED)
        answers.append((await ask(stack, path), 503, "overloaded_error", "failed"))
        for answer, status, kind, words in answers:
            assert (answer.status_code, words in message_of(answer)) == (
                status,
                True,
            ), answer.text
            assert kind == answer.json()["error"]["type"] or path == RESPONSES
        assert stack.leases() == 0


async def test_nothing_is_stored(tmp_path: Path) -> None:
    """What would need a stored response is refused by the field's name, before an engine sees it; ids lead nowhere."""
    async with router_stack(tmp_path) as stack:
        for field, value in (
            ("previous_response_id", "resp_1"),
            ("conversation", {"id": "c"}),
            ("background", True),
        ):
            answer = await ask(stack, RESPONSES, **{field: value})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == field
            assert "are stored here" in message_of(answer)
        assert not any(asked(engine, RESPONSES) for engine in stack.engines.values())
        answer = await ask(
            stack, RESPONSES, previous_response_id=None, background=False, store=True
        )
        assert answer.status_code == 200
        url = f"{stack.url}{RESPONSES}/resp_x"
        for method, at in (("GET", url), ("DELETE", url), ("POST", f"{url}/cancel")):
            lost = await stack.client.request(method, at)
            assert lost.status_code == 404
            assert lost.json()["error"]["code"] == "response_not_stored"


@pytest.fixture
def key(tmp_path: Path) -> str:
    return add_key(tmp_path / "keys.json", "ci")[0]


async def test_a_key_that_is_not_valid_is_told_in_the_apis_own_form(
    tmp_path: Path, key: str
) -> None:
    async with router_stack(
        tmp_path, {"auth": {"keys_file": str(tmp_path / "keys.json")}}
    ) as stack:
        for headers in (
            {},
            {"x-api-key": "wrong"},
            {"authorization": "Bearer wrong", "x-api-key": key},
        ):
            answer = await ask(stack, MESSAGES, headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"
            assert key not in answer.text
        async with anthropic.AsyncAnthropic(
            base_url=stack.url, api_key=key, max_retries=0
        ) as client:
            answer = await client.messages.create(
                model="auto", messages=HI, max_tokens=64
            )
            assert answer.usage.output_tokens == len(ANSWER)


@both
@pytest.mark.parametrize("stream", [True, False])
async def test_quotas_count_the_tokens_that_were_used(
    tmp_path: Path,
    path: str,
    stream: bool,  # noqa: FBT001
) -> None:
    """What is taken in advance comes back but for prompt and output; what the quota cannot hold is refused."""
    key = add_key(tmp_path / "keys.json", "ci", tokens_per_minute=QUOTA)[0]
    limit = list(BODIES[path])[1]
    headers = {"authorization": f"Bearer {key}"}
    options = {"auth": {"keys_file": str(tmp_path / "keys.json")}}
    async with router_stack(
        tmp_path, options, fast=Behaviour(prompt_tokens=20)
    ) as stack:
        assert (
            await ask(stack, path, headers, stream=stream, **{limit: 50})
        ).status_code == 200
        following = await ask(stack, path, headers, **{limit: 16})
        used = 20 + len(ANSWER)
        taken = 7 + 16
        assert following.status_code == 200
        # The quota fills up by a token a second.
        assert (
            QUOTA - used - taken
            <= int(following.headers["x-ratelimit-remaining-tokens"])
            < QUOTA - taken
        )
        over = await ask(stack, path, headers, **{limit: QUOTA})
        assert over.status_code == 400
        assert (f"at most {QUOTA} tokens" in message_of(over)) is True


async def test_tokens_are_counted_by_an_engine(tmp_path: Path) -> None:
    """By any that is ready, in vLLM's words; its refusal has Anthropic's form."""
    async with router_stack(tmp_path) as stack:
        stack.fleet.replicas[0].mark(ReplicaStatus.FAILED)
        async with anthropic.AsyncAnthropic(
            base_url=stack.url, api_key="unused", max_retries=0
        ) as client:
            counted = await client.messages.count_tokens(model="auto", messages=HI)
            assert counted.input_tokens == 7
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.messages.count_tokens(model="auto", messages=7)  # type: ignore[arg-type]
            assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.count_tokens(model="claude", messages=HI)
        for replica in stack.fleet.replicas:
            replica.mark(ReplicaStatus.FAILED)
        none = await stack.client.post(stack.url + COUNT, json={"messages": HI})
        assert none.status_code == 503
        assert none.json()["error"]["type"] == "overloaded_error"
        assert stack.leases() == 0


@both
async def test_an_adapter_is_asked_where_it_is(tmp_path: Path, path: str) -> None:
    """A name of an adapter goes to a tier that has it, and to the engine under that name."""
    async with router_stack(
        tmp_path, fast=Behaviour(adapters={"tone": "/adapters/tone"})
    ) as stack:
        answer = await ask(stack, path, model="tone")
        assert answer.status_code == 200
        assert answer.headers["x-qarr-tier"] == "fast"
        assert asked(stack.engines[TierName.FAST], path)[-1]["model"] == "tone"
