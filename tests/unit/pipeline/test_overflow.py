"""The overflow: a server outside of the fleet, asked when every tier is full, and only then."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.auth.api_keys import add_key
from router.monitoring.live import render_open
from router.policy.decide import UNKNOWN_RETRY_S
from router.policy.decision_log import OverflowRecord, read_log
from tests.fakes.engine import Behaviour, FakeEngine, serving
from tests.unit.router_stack import Stack, events, router_stack
from tests.waiting import until
from tiers.breaker import BreakerOptions
from tiers.fleet import Lease
from tiers.spec import STANDARD_TIERS

pytestmark = pytest.mark.anyio
KEY = "sk-outside"
MODEL = "foreign"
NAME = "outside.example"
TEXT = "The capital of France is Paris."
CHAT = {"model": "auto", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "auto", "prompt": "hi"}
PATHS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/generate": {"prompt": "hi"},
}
CRLF = (
    b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
    b'{"role":"assistant","content":"Paris"},"finish_reason":null}]}\r\n\r\n'
    b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{},'
    b'"finish_reason":"stop"}]}\r\n\r\ndata: [DONE]\r\n\r\n'
)
WHOLE = {
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Paris"},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


@dataclass(slots=True)
class Full:
    """A router whose tiers have no free slot, and the server behind it."""

    router: Stack
    outside: Behaviour
    leases: list[Lease]

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> Any:
        return await self.router.client.post(
            f"{self.router.url}{path}", json=body, headers=headers
        )

    async def metric(self, outcome: str) -> float:
        text = (await self.router.client.get(f"{self.router.url}/metrics")).text
        start = f'qarr_overflow_requests_total{{outcome="{outcome}"}} '
        return float(
            next(
                line.removeprefix(start)
                for line in text.splitlines()
                if line.startswith(start)
            )
        )

    async def record(self) -> dict[str, Any]:
        listed = await self.router.client.get(f"{self.router.url}/requests?limit=1")
        found: dict[str, Any] = listed.json()["requests"][0]
        return found

    async def ended(self) -> None:
        await until(lambda: not self.router.pipeline.registry.open, poll_s=0.01)

    def free(self) -> None:
        while self.leases:
            self.leases.pop().release()

    @property
    def taken(self) -> int:
        return self.router.pipeline.overflow.client.in_flight


@asynccontextmanager
async def full(
    tmp_path: Path,
    outside: Behaviour | None = None,
    settings: dict[str, Any] | None = None,
    tracing: TracerProvider | None = None,
    **options: Any,
) -> AsyncIterator[Full]:
    """Run a router whose slots are all taken, in front of a fake that serves as the overflow."""
    behaviour = outside or Behaviour()
    async with serving(FakeEngine(behaviour, MODEL).app) as url:
        overflow = {
            "url": f"{url}/v1",
            "api_key": KEY,
            "model": MODEL,
            "name": NAME,
            **options,
        }
        tiers = {name: {"max_in_flight": 1} for name in STANDARD_TIERS}
        given = {
            "tiers": tiers,
            "overflow": overflow,
            "admission": {"max_waiting": 0},
            **(settings or {}),
        }
        async with router_stack(tmp_path, given, tracing) as stack:
            leases = [
                stack.fleet.lease(name, prompt_tokens=1, max_tokens=1)
                for name in STANDARD_TIERS
            ]
            held = Full(
                stack, behaviour, [lease for lease in leases if lease is not None]
            )
            assert len(held.leases) == len(STANDARD_TIERS)
            yield held
            assert held.taken == 0
            held.free()
            assert stack.leases() == 0


def written(path: str, text: str, *, streamed: bool) -> str:
    if path == "/generate":
        return (
            "".join(data.get("text", "") for _, data in events(text))
            if streamed
            else json.loads(text)["text"]
        )
    blocks = (
        [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        if streamed
        else [text]
    )
    choices = [
        choice for block in blocks for choice in json.loads(block).get("choices", ())
    ]
    parts = (
        c.get("text") or (c.get("delta") or c.get("message") or {}).get("content") or ""
        for c in choices
    )
    return "".join(parts)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("path", PATHS)
async def test_it_answers_when_every_tier_is_full(
    tmp_path: Path, path: str, *, streamed: bool
) -> None:
    """The answer, its headers, the record, the metric and the decision log say who answered, and that no tier did."""
    async with full(
        tmp_path, settings={"telemetry": {"decision_log": str(tmp_path / "log")}}
    ) as at:
        answer = await at.post(
            path, {**PATHS[path], "stream": streamed, "seed": 7, "max_tokens": 50}
        )
        assert answer.status_code == 200
        assert written(path, answer.text, streamed=streamed) == TEXT
        headers = answer.headers
        assert headers["x-qarr-overflow"] == NAME
        assert {
            "x-qarr-tier",
            "x-qarr-precision",
            "x-qarr-checkpoint",
            "x-qarr-queue-ms",
        }.isdisjoint(headers)
        assert headers["x-qarr-reason"].startswith(
            "every tier that may serve this is full ("
        )
        assert headers["x-qarr-reason"].endswith(f", so the overflow {NAME} answers")
        assert headers["x-qarr-degraded"] == "unmeasured"
        await at.ended()
        record = await at.record()
        assert record["overflow"] == NAME
        assert record["overflow_failure"] is None
        assert record["served_by"] is None
        assert record["outcome"] == "ok"
        assert record["tier"] is None
        assert record["replica"] is None
        assert record["precision"] is None
        assert record["prompt_tokens"] == 10
        assert record["output_tokens"] == 7
        assert await at.metric("ok") == 1
        (asked,) = at.outside.requests
        limit_name = (
            "max_tokens" if path == "/v1/completions" else "max_completion_tokens"
        )
        assert asked["model"] == MODEL
        assert asked["seed"] == 7
        assert asked[limit_name] == 50
        assert all(not engine.requests for engine in at.router.engines.values())
    logged = [
        each for each in read_log(tmp_path / "log") if isinstance(each, OverflowRecord)
    ]
    assert [
        (each.overflow, each.failure, each.output_tokens, each.error) for each in logged
    ] == [(NAME, None, 7, None)]


async def test_the_stock_client_gets_its_answers(tmp_path: Path) -> None:
    """OpenAI's own client reads both forms on both endpoints, with the token counts that it asked for."""
    async with (
        full(tmp_path) as at,
        AsyncOpenAI(
            base_url=f"{at.router.url}/v1", api_key="none", max_retries=0
        ) as sdk,
    ):
        chat = await sdk.chat.completions.create(
            model="auto", messages=[{"role": "user", "content": "hi"}]
        )
        assert chat.choices[0].message.content == TEXT
        assert (chat.usage and chat.usage.completion_tokens) == 7
        completion = await sdk.completions.create(
            model="auto", prompt="hi", max_tokens=20
        )
        assert completion.choices[0].text == TEXT
        counted = {"include_usage": True}
        stream = await sdk.chat.completions.create(
            **CHAT, stream=True, stream_options=counted
        )  # type: ignore[call-overload]
        chunks = [chunk async for chunk in stream]
        assert (
            "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            == TEXT
        )
        assert chunks[-1].usage.completion_tokens == 7
        texts = [
            chunk
            async for chunk in await sdk.completions.create(
                model="auto", prompt="hi", stream=True
            )
        ]
        assert "".join(c.choices[0].text for c in texts) == TEXT
        assert all(chunk.usage is None for chunk in texts)


async def test_nothing_of_the_callers_headers_goes_there(tmp_path: Path) -> None:
    """It gets its own key, and no key, cookie, id or trace of the caller; its key goes to no engine and no answer."""
    key = add_key(tmp_path / "keys.json", "ci", overflow=True)[0]
    sent = {
        "authorization": f"Bearer {key}",
        "cookie": "secret=1",
        "x-request-id": "mine",
        "x-own": "1",
    }
    async with full(
        tmp_path, settings={"auth": {"keys_file": str(tmp_path / "keys.json")}}
    ) as at:
        user = {
            "user": "ann",
            "metadata": {"team": "x"},
            "store": True,
            "service_tier": "priority",
        }
        answer = await at.post("/v1/chat/completions", {**CHAT, **user}, **sent)
        (headers,) = at.outside.headers
        assert headers["authorization"] == f"Bearer {KEY}"
        assert set(headers) == {
            "host", "content-type", "content-length", "accept", "accept-encoding", "user-agent", "authorization",
        }  # fmt: skip
        (asked,) = at.outside.requests
        assert set(asked) == {"model", "messages"}
        assert KEY not in answer.text + str(answer.headers)
        at.free()
        await at.post("/v1/chat/completions", CHAT, **sent)
        headed = [
            headers
            for engine in at.router.engines.values()
            for headers in engine.headers
        ]
        assert headed
        assert KEY not in str(headed)


KEPT_HERE: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"qarr": {"overflow": "never"}}, {}),
    ({}, {"x-qarr-overflow": "never"}),
    ({"model": "fast"}, {}),
    ({"provider": {"order": ["fast"], "allow_fallbacks": False}}, {}),
    ({"provider": {"only": ["fast"]}}, {}),
    ({"provider": {"ignore": ["fast"]}}, {}),
    ({"provider": {"quantizations": ["fp8"]}}, {}),
]


async def test_what_it_cannot_keep_stays_refused(tmp_path: Path) -> None:
    """A request that pins tiers or precisions, or says never, gets 503 as without an overflow, which is not asked."""
    tiers = {name: {"max_in_flight": 1, "precision": "fp8"} for name in STANDARD_TIERS}
    async with full(tmp_path, settings={"tiers": tiers}) as at:
        for body, headers in KEPT_HERE:
            answer = await at.post("/v1/chat/completions", {**CHAT, **body}, **headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (
                503,
                "at_capacity",
            ), (body, headers)
            assert answer.headers["retry-after"]
            assert "x-qarr-overflow" not in answer.headers
            record = await at.record()
            assert (record["request_id"], record["overflow_failure"]) == (
                answer.headers["x-request-id"],
                None,
            ), body
        assert at.outside.requests == []


async def test_preferences_do_not_keep_it_away(tmp_path: Path) -> None:
    """A preferred tier, bounds that are preferences, and a list of precisions with unknown in it may all end there."""
    async with full(tmp_path) as at:
        preferred = {
            "tier": "precise",
            "sla": {"max_quality_loss": 0.01},
            "overflow": "allow",
        }
        for more in (
            {"qarr": preferred},
            {"provider": {"quantizations": ["fp8", "unknown"]}},
        ):
            assert (await at.post("/v1/chat/completions", {**CHAT, **more})).headers[
                "x-qarr-overflow"
            ] == NAME


async def test_other_refusals_stay(tmp_path: Path) -> None:
    """A prompt that fits no tier is refused as it is without an overflow."""
    async with full(tmp_path) as at:
        answer = await at.post(
            "/v1/completions", {**COMPLETION, "prompt": "word " * 20_000}
        )
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert at.outside.requests == []


async def test_other_endpoints_are_refused(tmp_path: Path) -> None:
    """Messages and responses have forms of their own, which the overflow is not asked for."""
    message = {"model": "auto", "max_tokens": 5, "messages": CHAT["messages"]}
    async with full(tmp_path) as at:
        for path, body in (
            ("/v1/messages", message),
            ("/v1/responses", {"model": "auto", "input": "hi"}),
        ):
            assert (await at.post(path, body)).status_code == 503
            assert (await at.record())["overflow_failure"] == "unsupported"
        assert at.outside.requests == []


async def test_a_key_has_to_allow_it(tmp_path: Path) -> None:
    """Keys do not allow it unless they say so, and one restricted to some tiers never gets there."""
    file = tmp_path / "keys.json"
    keys = {
        "plain": add_key(file, "plain")[0],
        "tier": add_key(file, "tier", overflow=True, tiers=("fast",))[0],
        "open": add_key(file, "open", overflow=True)[0],
    }
    async with full(tmp_path, settings={"auth": {"keys_file": str(file)}}) as at:
        found = {
            name: (
                await at.post(
                    "/generate", {"prompt": "hi"}, authorization=f"Bearer {key}"
                )
            ).status_code
            for name, key in keys.items()
        }
        assert found == {"plain": 503, "tier": 503, "open": 200}
        assert len(at.outside.requests) == 1


async def test_its_use_is_counted_and_not_charged(tmp_path: Path) -> None:
    """The key's usage has its tokens in a row of its own, without engine time; quotas count them as any others."""
    file = tmp_path / "keys.json"
    key = add_key(
        file, "ci", overflow=True, tokens_per_minute=1000, engine_seconds_per_day=50
    )[0]
    options = {
        "auth": {"keys_file": str(file)},
        "budgets": {"file": str(tmp_path / "usage.sqlite")},
    }
    async with full(tmp_path, settings=options) as at:
        bearer = {"authorization": f"Bearer {key}"}
        answer = await at.post(
            "/generate", {"prompt": "hi", "stream": False, "max_tokens": 50}, **bearer
        )
        assert answer.headers["x-qarr-overflow"] == NAME
        used: dict[str, Any] = {"usage": []}
        async with asyncio.timeout(20):
            while not used["usage"]:
                used = (
                    await at.router.client.get(f"{at.router.url}/usage", headers=bearer)
                ).json()
        (row,) = used["usage"]
        assert row["tier"] == "overflow"
        assert row["requests"] == 1
        assert row["prompt_tokens"] == 10
        assert row["output_tokens"] == 7
        assert row["engine_seconds"] == 0
        assert row["highest_engine_seconds"] == 0
        assert used["budgets"][0]["used"] == 0
        again = await at.post(
            "/generate", {"prompt": "hi", "stream": False, "max_tokens": 990}, **bearer
        )
        assert again.status_code == 429


@pytest.mark.parametrize("status", [400, 401, 429, 500])
async def test_if_it_fails_the_refusal_stands(
    tmp_path: Path, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """503 with Retry-After and the tiers' verdicts; what the overflow says is in no answer, record or log."""
    async with full(
        tmp_path, Behaviour(status=status, error="prompt is 'hi', key sk-outside")
    ) as at:
        for count, path in enumerate(PATHS, 1):
            caplog.clear()
            answer = await at.post(path, PATHS[path])
            assert (answer.status_code, "retry-after" in answer.headers) == (
                503,
                True,
            ), path
            assert "sk-outside" not in answer.text + caplog.text
            assert f"overflow {NAME}: HTTP {status}" in caplog.text
            if path == "/generate":
                assert answer.json()["type"] == "urn:qarr:problem:at-capacity"
                assert [each["tier"] for each in answer.json()["tiers"]] == list(
                    STANDARD_TIERS
                )
            record = await at.record()
            assert record["request_id"] == answer.headers["x-request-id"]
            assert record["route"] == path
            assert record["outcome"] == "refused"
            assert record["error"] == "at_capacity"
            assert record["overflow"] is None
            assert record["overflow_failure"] == "failed"
            assert await at.metric("failed") == count
            assert len(at.outside.requests) == count


def _refusal(param: str, code: str = "unsupported_parameter") -> str:
    error = {
        "message": f"'{param}' is wrong in 'hi'",
        "type": "invalid_request_error",
        "param": param,
        "code": code,
    }
    return json.dumps({"error": error})


@dataclass(slots=True)
class Choosy:
    """A server that refuses some members of a body, as OpenAI's newer models and some others do; the rest it is asked."""

    refuses: dict[str, str]  # a member, and the error's parameter
    bodies: list[dict[str, Any]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = await request.json()
        self.bodies.append(body)
        wrong = next((name for name in body if name in self.refuses), None)
        if wrong is not None:
            await Response(
                _refusal(self.refuses[wrong]), 400, media_type="application/json"
            )(scope, receive, send)
            return
        chunk = CRLF.decode() if body.get("stream") else json.dumps(WHOLE)
        kind = "text/event-stream" if body.get("stream") else "application/json"
        await Response(chunk, media_type=kind)(scope, receive, send)


@asynccontextmanager
async def choosy(tmp_path: Path, **refuses: str) -> AsyncIterator[tuple[Full, Choosy]]:
    server = Choosy(refuses, [])
    async with serving(server) as url, full(tmp_path, url=f"{url}/v1") as at:
        yield at, server


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
async def test_newer_models_of_openais_are_asked_as_they_want_it(
    tmp_path: Path, path: str
) -> None:
    """Neither the limit's older name nor a temperature that nobody asked for."""
    async with choosy(tmp_path, max_tokens="max_tokens", temperature="temperature") as (
        at,
        server,
    ):
        answer = await at.post(path, {**PATHS[path], "max_tokens": 9})
        assert answer.status_code == 200
        assert answer.headers["x-qarr-overflow"] == NAME
        assert [body["max_completion_tokens"] for body in server.bodies] == [9]


async def test_a_server_that_knows_the_older_name_alone_is_asked_again(
    tmp_path: Path,
) -> None:
    """And from then on by that name at once."""
    async with choosy(tmp_path, max_completion_tokens="max_completion_tokens") as (
        at,
        server,
    ):
        for _ in range(2):
            answer = await at.post("/generate", {"prompt": "hi", "max_tokens": 9})
            assert answer.headers["x-qarr-overflow"] == NAME
        assert [("max_tokens" in body) for body in server.bodies] == [False, True, True]


async def test_a_refusal_there_is_told_without_its_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller learns that it must change the request, and what of it; a limit that is too high stays one."""
    async with choosy(tmp_path, temperature="temperature") as (at, server):
        answer = await at.post("/generate", {"prompt": "hi", "temperature": 0.3})
        assert answer.status_code == 503
        told = f"the overflow {NAME} refuses it as well: HTTP 400 (unsupported_parameter, temperature)"
        assert told in answer.json()["detail"]
        assert "is wrong in" not in answer.text + caplog.text
        server.refuses = {
            "max_completion_tokens": "max_completion_tokens",
            "max_tokens": "max_tokens",
        }
        answer = await at.post("/v1/chat/completions", {**CHAT, "max_tokens": 9})
        assert (
            "(unsupported_parameter, max_completion_tokens)"
            in answer.json()["error"]["message"]
        )
        assert at.taken == 0


@pytest.mark.parametrize(
    "nonsense",
    [
        b"<html>sign in</html>",
        b"{}",
        b'{"choices":[]}',
        b'{"choices":[{"text":"Paris"}],"usage":{"prompt_tokens":-5}}',
        b'{"choices":[{"text":"Paris"}],"usage":{"completion_tokens":"7"}}',
        b'data: {"error":{"message":"x"}}\n\n',
    ],
)
async def test_what_is_no_answer_counts_as_a_failure(
    tmp_path: Path, nonsense: bytes
) -> None:
    """A page, or another object, with status 200 is not passed on."""
    async with full(tmp_path, Behaviour(nonsense=nonsense)) as at:
        for count, streamed in enumerate((True, False), 1):
            answer = await at.post("/v1/chat/completions", {**CHAT, "stream": streamed})
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "at_capacity"
            assert len(at.outside.requests) == count


async def test_an_address_that_nobody_has(tmp_path: Path) -> None:
    async with full(tmp_path, url="http://127.0.0.1:9/v1") as at:
        assert (await at.post("/generate", {"prompt": "hi"})).status_code == 503
        assert await at.metric("failed") == 1


@pytest.mark.parametrize("streamed", [True, False])
async def test_one_that_is_silent(tmp_path: Path, *, streamed: bool) -> None:
    """If no first token comes in time, or no whole answer, the refusal stands and the request there ends."""
    settings = {"upstream": {"answer_timeout_s": 0.2}}
    async with full(
        tmp_path, Behaviour(stall_after=0), settings, first_token_timeout_s=0.2
    ) as at:
        answer = await at.post("/v1/chat/completions", {**CHAT, "stream": streamed})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "at_capacity"
        await _idle(at.outside)


@pytest.mark.parametrize("path", PATHS)
async def test_one_that_breaks_off(tmp_path: Path, path: str) -> None:
    """After the first token there is an error event, and no end of the stream; the record says so."""
    async with full(tmp_path, Behaviour(break_after=2)) as at:
        answer = await at.post(path, {**PATHS[path], "stream": True})
        assert answer.status_code == 200
        assert answer.headers["x-qarr-overflow"] == NAME
        assert written(path, answer.text, streamed=True) == "The capital"
        assert "stream-broken" in answer.text or "stream_broken" in answer.text
        assert "[DONE]" not in answer.text
        assert "event: done" not in answer.text
        await at.ended()
        record = await at.record()
        assert record["outcome"] == "error"
        assert record["error"] == "EngineBroke"
        assert record["overflow"] == NAME
        assert await at.metric("error") == 1
        assert await at.metric("ok") == 0


@pytest.mark.parametrize("begun", [True, False])
async def test_a_client_that_leaves(tmp_path: Path, *, begun: bool) -> None:
    """The request ends at the overflow when its caller goes away, before the first token and after it."""
    async with full(tmp_path, Behaviour(stall_after=2 if begun else 0)) as at:
        post = asyncio.create_task(
            at.post("/v1/chat/completions", {**CHAT, "stream": True})
        )
        await until(lambda: at.outside.running)
        if begun:
            await until(
                lambda: any(
                    request.answer for request in at.router.pipeline.registry.open
                )
            )
        (shown,) = at.router.pipeline.registry.open
        rendered = render_open(shown, 0.0)
        assert rendered["overflow"] == NAME
        assert rendered["tier"] is None
        assert rendered["replica"] is None
        assert rendered["state"] == ("decode" if begun else "prefill")
        post.cancel()
        await _idle(at.outside)
        await at.ended()
        record = await at.record()
        assert record["outcome"] == "client_gone"
        assert record["overflow"] == (NAME if begun else None)
        assert record["overflow_failure"] == (None if begun else "cancelled")
        assert await at.metric("client_gone") == begun
        assert await at.metric("cancelled") == (not begun)


async def _idle(behaviour: Behaviour) -> None:
    await until(lambda: not behaviour.running, within_s=20)


async def test_it_has_a_bound(tmp_path: Path) -> None:
    """With as many requests as it may have, the next one is refused as without it."""
    async with full(tmp_path, Behaviour(stall_after=1), max_in_flight=1) as at:
        first = asyncio.create_task(at.post("/generate", {"prompt": "hi"}))
        await until(lambda: at.outside.running, poll_s=0.01)
        assert (await at.post("/generate", {"prompt": "hi"})).status_code == 503
        assert (await at.record())["overflow_failure"] == "full"
        first.cancel()
        await _idle(at.outside)
        await at.ended()


async def test_after_failures_it_rests(tmp_path: Path) -> None:
    """Three failures in a row keep requests from it, until a probe succeeds; what it says of one request counts for none."""
    slow = {"upstream": {"breaker": BreakerOptions(pause_s=3600, longest_pause_s=3600)}}
    async with full(tmp_path, Behaviour(status=422), slow) as at:
        for status, count in ((422, 9), (503, 3)):
            at.outside.status = status
            for _ in range(count):
                await at.post("/generate", {"prompt": "hi"})
        at.outside.status = 200
        assert (await at.post("/generate", {"prompt": "hi"})).status_code == 503
        assert (await at.record())["overflow_failure"] == "paused"
        assert len(at.outside.requests) == 12


async def test_requests_that_wait_go_there_later(tmp_path: Path) -> None:
    """One that finds the queue full goes there at once; one that waited to the end of its time then, and tells its wait."""
    wait_s = 2 * UNKNOWN_RETRY_S  # at less, it would be refused at once
    waits = {"admission": {"max_waiting": 1, "max_wait_s": {"standard": wait_s}}}
    async with full(tmp_path, settings=waits) as at:
        first = asyncio.create_task(at.post("/generate", {"prompt": "hi"}))
        await until(lambda: at.router.pipeline.admission.waiting, poll_s=0.01)
        second = await at.post("/generate", {"prompt": "hi"})
        assert "(1 requests are waiting already; " in second.headers["x-qarr-reason"]
        assert not first.done()
        waited = await first
        assert "(no slot became free within " in waited.headers["x-qarr-reason"]
        # a timer of libuv counts from when its loop last read the clock
        least_ms = wait_s * 1000 - 10
        assert int(waited.headers["x-qarr-queue-ms"]) >= least_ms
        await at.ended()
        assert (await at.record())["queue_ms"] >= least_ms


async def test_none_that_is_ready(tmp_path: Path) -> None:
    """While no tier is ready, it answers as well, and the reason says so."""
    tiers = {
        "fast": {"replicas": 0},
        "balanced": {"replicas": 0},
        "precise": {"max_in_flight": 1},
    }
    async with serving(FakeEngine(Behaviour(), MODEL).app) as url:
        overflow = {"url": f"{url}/v1", "model": MODEL}
        async with router_stack(
            tmp_path, {"tiers": tiers, "overflow": overflow}
        ) as stack:
            (replica,) = stack.fleet.replicas
            await stack.client.post(f"{stack.url}/admin/replicas/{replica.id}/drain")
            await until(
                lambda: not stack.fleet.is_ready(replica.spec.name), poll_s=0.01
            )
            answer = await stack.generate()
            assert answer.headers["x-qarr-overflow"] == "127.0.0.1"
            assert answer.headers["x-qarr-reason"].startswith(
                "no tier that may serve this is ready ("
            )


async def test_parameters_of_the_fleet_alone(tmp_path: Path) -> None:
    """One that changes the answer keeps a request here; one without effect is left out."""
    async with full(tmp_path) as at:
        refused = await at.post("/v1/chat/completions", {**CHAT, "guided_regex": "a+"})
        assert refused.status_code == 503
        assert (await at.record())["overflow_failure"] == "unsupported"
        answer = await at.post(
            "/v1/chat/completions", {**CHAT, "top_k": -1, "priority": 1}
        )
        assert answer.headers["x-qarr-overflow"] == NAME
        assert set(at.outside.requests[0]) == {"model", "messages"}


async def test_another_servers_way_of_writing(tmp_path: Path) -> None:
    """Events that end with a carriage return as well, and a server that tells no token counts, are read all the same."""
    async with full(tmp_path, Behaviour(nonsense=CRLF)) as at:
        generated = await at.post("/generate", {"prompt": "hi"})
        (name, last) = events(generated.text)[-1]
        assert name == "done"
        assert last["usage"] is None
        assert last["tier"] is None
        assert last["overflow"] == NAME
        relayed = await at.post("/v1/chat/completions", {**CHAT, "stream": True})
        assert written("", relayed.text, streamed=True) == "Paris"
        assert "\r" not in relayed.text
        whole = {
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": "Paris it is"}}
            ]
        }
        at.outside.nonsense = json.dumps(whole).encode()
        assert (await at.post("/v1/chat/completions", CHAT)).json() == whole
        assert (await at.record())["output_tokens"] == 3


async def test_its_spans(tmp_path: Path) -> None:
    """The server span names the overflow, and the span of the request there has its model and no tier."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with full(tmp_path, tracing=provider) as at:
        await at.post("/generate", {"prompt": "hi"})
        await at.ended()
    spans = {
        span.name: dict(span.attributes or {}) for span in exporter.get_finished_spans()
    }
    assert spans["POST /generate"]["qarr.overflow"] == NAME
    assert "qarr.served.tier" not in spans["POST /generate"]
    there = spans[f"chat {MODEL}"]
    assert there["qarr.overflow"] == NAME
    assert there["gen_ai.usage.output_tokens"] == 7
    assert ("qarr.tier" in there) is False
    assert there["gen_ai.provider.name"] == "openai"
    assert not any("traceparent" in headers for headers in at.outside.headers)


async def test_without_an_overflow(tmp_path: Path) -> None:
    """By default there is none: the stock client gets the refusal."""
    async with full(tmp_path, url="", model="") as at:
        async with AsyncOpenAI(
            base_url=f"{at.router.url}/v1", api_key="none", max_retries=0
        ) as sdk:
            with pytest.raises(APIStatusError) as refused:
                await sdk.completions.create(model="auto", prompt="hi")
        assert refused.value.status_code == 503
        assert (await at.record())["overflow_failure"] is None
