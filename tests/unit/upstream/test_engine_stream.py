"""One answer of an engine over a real socket: what is read of it, what is known of it, how it ends."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from time import monotonic
from typing import Any

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic_core import to_json

from router.telemetry.tracing import Telemetry
from router.upstream.chat_splicer import ChatSplicer
from router.upstream.engine_request import EngineRequest, ResumePoint
from router.upstream.engine_stream import (
    BufferedAnswer,
    Drain,
    EngineStream,
    ReceiveChunks,
)
from router.upstream.errors import (
    EngineBrokeError,
    EngineRefusedError,
    EngineStalledError,
    NoEngineAnsweredError,
)
from router.upstream.json_object import JsonObject
from router.upstream.sse import Chunk
from tests.fakes.engine import FINGERPRINT, PIECE, Behaviour
from tests.unit.upstream_stack import HI, UpstreamStack, text_of, until, upstream_stack
from tiers.spec import STANDARD_TIERS

pytestmark = pytest.mark.anyio
FAST, BALANCED, PRECISE = STANDARD_TIERS
ANSWER = "The capital of France is Paris."
PLAIN = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'


def relay(*, streamed: bool = False) -> EngineRequest:
    document = JsonObject.parse(
        to_json({"messages": [], "max_tokens": 9, "stream": streamed})
    )
    return EngineRequest(document=document, request_id="w1", is_streamed=streamed)


async def relayed(stack: UpstreamStack) -> EngineStream:
    """Open a streamed answer that no other engine may continue."""
    answer = await stack.upstream.open(
        stack.decision(FAST), relay(streamed=True), elsewhere=False
    )
    assert isinstance(answer, EngineStream)
    return answer


async def test_an_answer_is_known_once_it_is_complete() -> None:
    async with upstream_stack(fast=Behaviour(prompt_tokens=12)) as stack:
        answer = await stack.stream()
        assert answer.ttft_ms is not None
        assert answer.complete is False
        assert answer.usage == {}
        assert answer.tpot_ms is None
        assert answer.finish_reason is None
        assert await text_of(answer) == ANSWER
        assert answer.complete
        assert answer.usage == {
            "prompt_tokens": 12,
            "completion_tokens": 7,
            "total_tokens": 19,
        }
        assert answer.output_tokens == 7
        assert answer.finish_reason == "stop"
        assert answer.failed_over is False
        assert answer.tpot_ms is not None
        assert (answer.media_type or "").startswith("text/event-stream")
        await answer.aclose()
        assert stack.replica(FAST).state.served == 1
        assert stack.held() == 0


async def test_an_answer_is_closed_once() -> None:
    async with upstream_stack() as stack:
        first = await stack.stream()
        second = await stack.stream()
        for _ in range(3):
            await first.aclose()
        assert stack.replica(FAST).state.in_flight == 1, (
            "the other one's slot is its own"
        )
        await second.aclose()
        assert stack.held() == 0


async def test_tokens_are_counted_before_the_engine_gives_its_counts() -> None:
    """By the ids of a chunk, of which one may hold several."""
    async with upstream_stack(fast=Behaviour(group=3, break_after=6)) as stack:
        answer = await stack.stream()
        with pytest.raises(EngineBrokeError):
            await text_of(answer)
        assert answer.usage == {}
        assert answer.output_tokens == 6
        await answer.aclose()


async def test_an_answer_that_is_left_ends_at_the_engine() -> None:
    """An engine computes nothing for nobody, and is not held to have failed."""
    async with upstream_stack(fast=Behaviour(stall_after=2)) as stack:
        answer = await stack.stream()
        reading = asyncio.create_task(text_of(answer))
        await until(lambda: answer.output_tokens == 2)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await answer.aclose()
        assert stack.held() == 0
        assert stack.replica(FAST).state.failed == 0
        assert stack.replica(FAST).state.served == 0
        await until(lambda: not stack.engines[FAST].running)


@pytest.mark.parametrize(
    "fault",
    [{"break_after": 3}, {"error_after": 3}, {"error_with": 3}, {"nonsense_with": 3}],
)
async def test_what_came_before_a_fault_is_read_before_it(
    fault: dict[str, Any],
) -> None:
    """Without anybody to go on with it, the fault is the caller's to tell."""
    async with upstream_stack(fast=Behaviour(**fault)) as stack:
        answer = await stack.stream()
        found = list[str]()
        with pytest.raises(EngineBrokeError) as broken:
            await text_of(answer, found=found)
        assert "".join(found) == "The capital of"
        assert not answer.complete
        await answer.aclose(broken.value)
        assert stack.replica(FAST).state.failed == 1
        assert stack.replica(FAST).state.served == 0
        assert stack.held() == 0


@pytest.mark.parametrize(
    ("end", "why"),
    [(b"", "ended early"), (b"data: [DONE]\n\n", "without a finish reason")],
)
async def test_a_stream_without_an_end_is_broken(end: bytes, why: str) -> None:
    async with upstream_stack(fast=Behaviour(nonsense=PLAIN + end)) as stack:
        answer = await relayed(stack)
        with pytest.raises(EngineBrokeError, match=why):
            await text_of(answer)
        await answer.aclose()


async def test_a_silent_engine_has_stalled() -> None:
    async with upstream_stack(
        {"token_timeout_s": 0.1}, fast=Behaviour(stall_after=2)
    ) as stack:
        answer = await stack.stream()
        with pytest.raises(EngineStalledError, match=r"no token for 0\.1 s"):
            await text_of(answer)
        assert stack.replica(FAST).silence_s(monotonic()) >= 0.1, (
            "the watchdog counts on"
        )
        await answer.aclose()


async def rest(
    answer: EngineStream,
    _broken: EngineBrokeError,
    receive: ReceiveChunks,
    _drain: Drain,
) -> None:
    for chunk in (
        Chunk(text=" new", token_ids=[1]),
        Chunk(text=" end", token_ids=[2], finish_reason="stop"),
    ):
        answer.progress.note((chunk,))
        receive([chunk])


async def test_a_broken_answer_goes_on_with_what_others_compute() -> None:
    async with upstream_stack(fast=Behaviour(break_after=3)) as stack:
        answer = await stack.stream()
        answer.continuation = rest
        assert await text_of(answer) == "The capital of new end"
        assert answer.failed_over is True
        assert answer.complete is True
        assert answer.finish_reason == "stop"
        assert answer.output_tokens == 5
        assert answer.parts == []
        await answer.aclose()
        assert stack.held() == 0


async def test_an_answer_that_may_not_go_on_elsewhere_does_not() -> None:
    """A relayed request without what a continuation needs has no progress, though somebody offers to go on."""
    async with upstream_stack(fast=Behaviour(break_after=3)) as stack:
        answer = await relayed(stack)
        answer.continuation = rest
        assert not answer.may_be_continued
        with pytest.raises(EngineBrokeError):
            await text_of(answer)
        await answer.aclose()


async def test_who_fails_to_take_an_answer_does_not_blame_its_engine() -> None:
    async with upstream_stack() as stack:
        answer = await stack.stream()
        taken = [True]
        with pytest.raises(IndexError):
            await answer.relay(lambda _: taken.pop(), partial(asyncio.sleep, 0))
        await answer.aclose()
        assert stack.replica(FAST).state.failed == 0
        assert stack.held() == 0


async def test_progress_knows_the_tokens_that_came() -> None:
    async with upstream_stack(fast=Behaviour(break_after=3)) as stack:
        answer = await stack.stream()
        with pytest.raises(EngineBrokeError):
            await text_of(answer)
        assert list(answer.progress.prompt_ids) == [1, 2, 3]
        assert list(answer.progress.output_ids) == [PIECE, PIECE + 1, PIECE + 2]
        assert answer.progress.text == "The capital of"
        await answer.aclose()


async def test_a_whole_answer_is_read_before_it_is_passed_on() -> None:
    async with upstream_stack(fast=Behaviour(prompt_tokens=5)) as stack:
        answer = await stack.upstream.open(stack.decision(FAST), relay())
        assert isinstance(answer, BufferedAnswer)
        assert answer.complete is True
        assert answer.finish_reason == "stop"
        assert answer.output_tokens == 7
        assert answer.usage["prompt_tokens"] == 5
        assert (answer.ttft_ms, answer.tpot_ms) == (None, None), (
            "no token was seen to come"
        )
        assert answer.media_type == "application/json"
        assert FINGERPRINT.encode() in answer.content
        await answer.aclose()
        assert stack.held() == 0


CHOICE = (
    b'{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}'
)
USAGE = b'{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}'
NO_COMPLETIONS = {
    "no JSON": b"x",
    "no object": b"[]",
    "no choices": b'{"usage":' + USAGE + b"}",
    "empty choices": b'{"choices":[],"usage":' + USAGE + b"}",
    "a choice without text": b'{"choices":[{"index":0}],"usage":' + USAGE + b"}",
    "an odd finish reason": b'{"choices":[{"text":"x","finish_reason":5}],"usage":'
    + USAGE
    + b"}",
    "no usage": b'{"choices":[' + CHOICE + b"]}",
    "odd usage": b'{"choices":[' + CHOICE + b'],"usage":{"prompt_tokens":-1}}',
}


@pytest.mark.parametrize("body", NO_COMPLETIONS.values(), ids=NO_COMPLETIONS.keys())
async def test_a_whole_answer_that_is_no_completion_is_a_failure(body: bytes) -> None:
    async with upstream_stack(fast=Behaviour(nonsense=body)) as stack:
        with pytest.raises(NoEngineAnsweredError, match="not a completion"):
            await stack.upstream.open(stack.decision(FAST), relay(), elsewhere=False)
        assert stack.replica(FAST).state.failed == 1
        assert stack.held() == 0


async def test_a_span_tells_how_an_answer_went() -> None:
    """Times, counts and the reason of its end are on the attempt's span; the prompt is not."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with upstream_stack(telemetry=Telemetry(provider)) as stack:
        began_at = time.monotonic()
        with provider.get_tracer("test").start_as_current_span("request"):
            answer = await stack.stream()
        await text_of(answer)
        await answer.aclose()
        took_s = time.monotonic() - began_at
    (span,) = (
        each for each in exporter.get_finished_spans() if each.name.startswith("chat")
    )
    found = dict(span.attributes or {})
    assert found["gen_ai.response.finish_reasons"] == ("stop",)
    assert found["gen_ai.usage.input_tokens"] == 10
    assert found["gen_ai.usage.output_tokens"] == 7
    assert found["qarr.ttft_ms"] == answer.ttft_ms
    (first_token,) = span.events
    assert first_token.timestamp is not None
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time <= first_token.timestamp <= span.end_time
    # spans have another clock
    assert 0 < found["gen_ai.response.time_to_first_chunk"] <= took_s
    assert found["qarr.tpot_ms"] == answer.tpot_ms
    assert [event.name for event in span.events] == ["qarr.first_token"]


async def test_a_refusals_words_are_not_on_the_span() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with upstream_stack(
        telemetry=Telemetry(provider), fast=Behaviour(status=400, error="SECRET")
    ) as stack:
        with (
            provider.get_tracer("test").start_as_current_span("request"),
            pytest.raises(EngineRefusedError),
        ):
            await stack.upstream.open(
                stack.decision(FAST), replace(HI, request_id="r2")
            )
    (span,) = (
        each for each in exporter.get_finished_spans() if each.name.startswith("chat")
    )
    assert dict(span.attributes or {})["http.response.status_code"] == 400
    assert "SECRET" not in span.to_json()


async def test_a_resumed_answer_counts_its_own_tokens() -> None:
    """The tokens that another engine computed were read by this one: its speed and its costs are those of the others."""
    behaviour = Behaviour(prompt_tokens=12, resumes=True)
    async with upstream_stack(fast=behaviour) as stack:
        for replica in stack.fleet.replicas:
            replica.update(resumes=True)
        origin = replace(HI, splicer=ChatSplicer)
        point = ResumePoint(token_ids=(PIECE, PIECE + 1, PIECE + 2))
        request = origin.resumed_at(point, number=1)
        answer = await stack.upstream.open(
            stack.decision(FAST), request, is_continuation=True, elsewhere=False
        )
        assert isinstance(answer, EngineStream)
        assert await text_of(answer) == ANSWER
        assert answer.output_tokens == 4
        assert answer.usage["prompt_tokens"] == 15
        assert answer.usage["completion_tokens"] == 4
        assert answer.answer_usage["prompt_tokens"] == 12
        assert answer.answer_usage["completion_tokens"] == 7
        await answer.aclose()
        (headers,) = behaviour.headers
        assert headers["x-qarr-resume"] == "1"
        (body,) = behaviour.requests
        assert body["qarr_resume"]["token_ids"] == [PIECE, PIECE + 1, PIECE + 2]
        assert body["priority"] == -1


async def test_only_engines_that_tell_tokens_in_comments_are_asked_to() -> None:
    """The others are asked for a chat's ids in its events, as before."""
    behaviour = Behaviour(resumes=True)
    async with upstream_stack(fast=behaviour) as stack:
        document = {**HI.document, "include_reasoning": False}
        for resumes in (False, True):
            stack.replica(FAST).update(resumes=resumes)
            answer = await stack.stream(
                document=document, splicer=ChatSplicer, asks_token_ids=True
            )
            assert await text_of(answer) == ANSWER
            assert len(answer.progress.output_ids) == 7
            assert answer.output_tokens == 7
            await answer.aclose()
        before, after = behaviour.headers
        assert ("x-qarr-tokens" in before, "x-qarr-tokens" in after) == (False, True)
