"""Requests that are passed on without a place: embeddings, tokenize, detokenize. None of them may stop generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider

from router.upstream.upstream import PASSED_AT_ONCE
from tests.fakes.engine import Behaviour, FakeEngine, serving
from tests.unit.router_stack import Stack, router_stack
from tests.waiting import until
from tiers.spec import STANDARD_TIERS, TierName

pytestmark = pytest.mark.anyio
EMBEDDINGS = "/v1/embeddings"
FEW_PLACES = {
    "tiers": {tier: {"max_in_flight": 2} for tier in STANDARD_TIERS},
    "admission": {"max_waiting": 0},
}


@asynccontextmanager
async def with_embeddings(
    tmp_path: Path, overrides: dict[str, Any] | None = None
) -> AsyncIterator[tuple[Stack, Behaviour]]:
    engine = Behaviour()
    async with serving(FakeEngine(engine).app) as url:
        settings = {**(overrides or {}), "openai": {"embeddings_urls": [url]}}
        async with router_stack(tmp_path, settings) as stack:
            yield stack, engine


async def post(stack: Stack, path: str, **body: Any) -> httpx.Response:
    return await stack.client.post(f"{stack.url}{path}", json=body)


@pytest.mark.parametrize("exported", [False, True])
async def test_engines_get_trace_baggage_and_id_with_every_request(
    tmp_path: Path, *, exported: bool
) -> None:
    """Also with those that take no slot, and whether the router makes spans of its own or not."""
    engine = Behaviour()
    hi = [{"role": "user", "content": "hi"}]
    trace = f"00-{'1' * 32}-{'2' * 16}-01"
    given = {
        "traceparent": trace,
        "tracestate": "a=b",
        "baggage": "user=7",
        "x-request-id": "mine",
    }
    bodies: dict[str, dict[str, Any]] = {
        **{
            path: {"messages": hi, "max_tokens": 9}
            for path in ("/v1/chat/completions", "/v1/messages")
        },
        "/v1/responses": {"input": "hi"},
        "/v1/completions": {"prompt": "hi"},
        "/tokenize": {"prompt": "hi"},
        EMBEDDINGS: {"input": "hi"},
        "/v1/messages/count_tokens": {"messages": hi},
        "/detokenize": {"tokens": [1]},
    }
    async with serving(FakeEngine(engine).app) as url:
        settings = {"openai": {"embeddings_urls": [url]}}
        tracing = TracerProvider() if exported else None
        async with router_stack(tmp_path, settings, tracing) as stack:
            for path, body in bodies.items():
                asked = await stack.client.post(
                    f"{stack.url}{path}", json={"model": "fast", **body}, headers=given
                )
                assert (asked.status_code, asked.headers["x-qarr-trace-id"]) == (
                    200,
                    "1" * 32,
                ), asked.text
                told = (
                    engine if path == EMBEDDINGS else stack.engines[TierName.FAST]
                ).heads[path]
                assert told["tracestate"] == "a=b"
                assert told["baggage"] == "user=7"
                assert told["traceparent"][:35] == trace[:35]
                assert (told["traceparent"] == trace) is not exported
                assert told["x-request-id"].startswith("mine")
                await stack.client.post(
                    f"{stack.url}{path}",
                    json=body | {"model": "fast"},
                    headers={"tracestate": "a=b"},
                )
                told = (
                    engine if path == EMBEDDINGS else stack.engines[TierName.FAST]
                ).heads[path]
                assert "tracestate" not in told, "it means nothing alone"


async def leave(*asked: asyncio.Task[httpx.Response]) -> None:
    """Close the connections of requests that are not answered."""
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_hung_embeddings_stop_nothing_else(tmp_path: Path) -> None:
    """With every place of an embeddings engine taken by what it never answers, tokenizing and generating go on."""
    async with with_embeddings(tmp_path, FEW_PLACES) as (stack, engine):
        well = await post(stack, EMBEDDINGS, model="e", input=["a", "b"])
        assert well.status_code == 200
        assert len(well.json()["data"]) == 2
        engine.hung = {EMBEDDINGS}
        asked = [
            asyncio.create_task(post(stack, EMBEDDINGS, model="e", input="x"))
            for _ in range(PASSED_AT_ONCE + 8)
        ]
        await until(lambda: engine.held == PASSED_AT_ONCE)
        assert (await post(stack, "/tokenize", prompt="a bc")).json()["tokens"] == [
            1,
            2,
        ]
        assert (await post(stack, "/detokenize", tokens=[1, 2])).json() == {
            "prompt": "x xx"
        }
        assert (await stack.generate(stream=False)).status_code == 200
        assert stack.leases() == 0
        await leave(*asked[:PASSED_AT_ONCE])
        # those that waited have the places of those that left
        await until(lambda: engine.held == 8)
        await leave(*asked)
        await until(lambda: engine.held == 0)
        engine.hung = ()
        assert (await post(stack, EMBEDDINGS, model="e", input="x")).status_code == 200


async def test_a_hung_tokenizer_takes_no_places_and_is_passed_over(
    tmp_path: Path,
) -> None:
    """Requests that an engine does not tokenize take no place for generation; further ones go to another engine at once."""
    async with router_stack(tmp_path, FEW_PLACES) as stack:
        fast = stack.engines[TierName.FAST]
        fast.hung = {"/tokenize"}
        asked = [
            asyncio.create_task(post(stack, "/tokenize", prompt="a"))
            for _ in range(PASSED_AT_ONCE)
        ]
        await until(lambda: fast.held == PASSED_AT_ONCE)
        assert stack.leases() == 0
        assert (
            await stack.generate(stream=False, tier="fast", tier_policy="require")
        ).status_code == 200
        assert (await post(stack, "/tokenize", prompt="a bc")).json()["tokens"] == [
            1,
            2,
        ]
        assert (await post(stack, "/detokenize", tokens=[1, 2])).json() == {
            "prompt": "x xx"
        }
        await leave(*asked)
        await until(lambda: fast.held == 0)


async def test_tokens_are_counted_while_every_place_is_taken(tmp_path: Path) -> None:
    """Tokenizing needs an engine that is ready, not a place on one."""
    async with router_stack(tmp_path, FEW_PLACES) as stack:
        for engine in stack.engines.values():
            engine.stall_after = 1
        busy = [asyncio.create_task(stack.generate()) for _ in range(6)]
        await until(
            lambda: all(
                replica.state.in_flight == 2 for replica in stack.fleet.replicas
            )
        )
        assert (await stack.generate()).status_code == 503
        assert (await post(stack, "/tokenize", prompt="a bc")).json()["tokens"] == [
            1,
            2,
        ]
        await leave(*busy)
        await until(lambda: stack.leases() == 0)


async def test_a_wait_for_a_hung_engine_ends(tmp_path: Path) -> None:
    """Those that are not answered, and those that wait for them, get a 503 with Retry-After when the time is up."""
    async with with_embeddings(
        tmp_path, {"upstream": {"first_token_timeout_s": 0.5}}
    ) as (stack, engine):
        engine.hung = {EMBEDDINGS}
        answers = await asyncio.gather(
            *(
                post(stack, EMBEDDINGS, model="e", input="x")
                for _ in range(3 * PASSED_AT_ONCE)
            )
        )
        assert {answer.status_code for answer in answers} == {503}
        assert {answer.headers["retry-after"] for answer in answers} == {"1"}
        assert {answer.json()["error"]["code"] for answer in answers} <= {
            "at_capacity",
            "no_engine_answered",
        }
        await until(lambda: engine.held == 0)


async def test_the_next_engine_answers(tmp_path: Path) -> None:
    """An embeddings engine that has no places left is passed over, and so is one that fails."""
    hung = Behaviour(hung={EMBEDDINGS})
    async with (
        serving(FakeEngine(hung).app) as first,
        serving(FakeEngine().app) as second,
        router_stack(
            tmp_path,
            {"openai": {"embeddings_urls": [first, "http://127.0.0.1:9", second]}},
        ) as stack,
    ):
        asked = [
            asyncio.create_task(post(stack, EMBEDDINGS, model="e", input="x"))
            for _ in range(PASSED_AT_ONCE)
        ]
        await until(lambda: hung.held == PASSED_AT_ONCE)
        answer = await post(stack, EMBEDDINGS, model="e", input="x")
        assert answer.status_code == 200
        assert len(answer.json()["data"]) == 1
        await leave(*asked)


@pytest.mark.parametrize(
    "nonsense",
    ["", "nonsense", "[1]", "null", '{"tokens": [1', "{" + " " * (1 << 18) + "]"],
)
async def test_what_is_no_answer_is_passed_over(tmp_path: Path, nonsense: str) -> None:
    """An engine that answers 200 with what is no JSON object has failed: the next one is asked, or the caller is told."""
    async with with_embeddings(tmp_path) as (stack, engine):
        stack.engines[TierName.FAST].instead = {"/tokenize": nonsense}
        assert (await post(stack, "/tokenize", prompt="a bc")).json()["tokens"] == [
            1,
            2,
        ]
        engine.instead = {EMBEDDINGS: nonsense}
        answer = await post(stack, EMBEDDINGS, model="e", input="x")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_engine_answered"


def deep_bodies(depth: int) -> tuple[tuple[str, str], ...]:
    """Return bodies with something nested so deep, and the paths that get them."""
    lists = "[" * depth + "1" + "]" * depth
    objects = '{"a":' * depth + "1" + "}" * depth
    return (
        (EMBEDDINGS, f'{{"model":"e","input":{lists}}}'),
        (EMBEDDINGS, f'{{"model":"e","input":"x","other":{objects}}}'),
        ("/tokenize", f'{{"prompt":{lists}}}'),
        ("/detokenize", f'{{"model":{lists}}}'),
        ("/v1/completions", f'{{"prompt":{lists}}}'),
        (
            "/v1/chat/completions",
            f'{{"messages":[{{"role":"user","content":"hi","tool_calls":{lists}}}]}}',
        ),
        (
            "/v1/chat/completions",
            f'{{"messages":[],"stream":true,"stream_options":{objects}}}',
        ),
        ("/generate", f'{{"prompt":"hi","sla":{lists}}}'),
        ("/route", f'{{"prompt":{objects}}}'),
    )


async def test_deep_bodies_are_refused(tmp_path: Path) -> None:
    """A body with lists or objects nested beyond what parsers take gets a 400 that says so, at every endpoint."""
    async with with_embeddings(tmp_path) as (stack, _):
        for path, body in chain(*map(deep_bodies, (250, 600, 985, 5000))):
            answer = await stack.client.post(f"{stack.url}{path}", content=body)
            assert answer.status_code == 400, (path, answer.text)
            assert "nested" in answer.text or "recursion" in answer.text, (
                path,
                answer.text,
            )


async def test_bodies_of_any_type_are_answered(tmp_path: Path) -> None:
    """What makes no sense is the engine's to refuse: its answer comes back, and nothing fails in the router."""
    async with with_embeddings(tmp_path) as (stack, _):
        for value in (
            None,
            True,
            -1,
            1.5,
            {},
            {"a": [1]},
            [],
            [[]],
            [None],
            [{}],
            [[[1]]],
            ["a", 1],
            [[1, 2], "a"],
        ):
            for path, name in (
                (EMBEDDINGS, "input"),
                ("/tokenize", "prompt"),
                ("/detokenize", "tokens"),
            ):
                answer = await post(stack, path, **{name: value})
                assert answer.status_code in {200, 400}, (path, value, answer.text)
        for path in (EMBEDDINGS, "/tokenize", "/detokenize"):
            for raw in (
                b"",
                b"[]",
                b"null",
                b"{",
                b"\xff",
                b'{"model":[1]}',
                b'{"input":NaN}',
                b'"x"',
            ):
                answer = await stack.client.post(f"{stack.url}{path}", content=raw)
                assert answer.status_code in {400, 404}, (path, raw, answer.text)
