"""What is kept of open requests, and what a record says of one that has ended."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from router.auth.quota import OverQuotaError
from router.lifecycle import ServerState
from router.pipeline.admission import Grant
from router.pipeline.registry import OVER_QUOTA
from router.policy.decide import decide
from router.policy.decision import Decision, Refusal, RequestRefusedError, Sla
from router.telemetry.log_format import request_line
from router.telemetry.record import (
    Outcome,
    RequestRecord,
    Served,
    Tokens,
    render_summary,
)
from router.upstream.errors import EngineBrokeError, EngineRefusedError
from router.upstream.upstream import refusal
from tests.fakes.engine import Behaviour
from tests.unit.pipeline.registries import context, ended, entry, registry_of
from tests.unit.upstream_stack import QUERY, UpstreamStack, text_of, upstream_stack
from tiers.spec import STANDARD_TIERS

pytestmark = pytest.mark.anyio
FAST, BALANCED, PRECISE = STANDARD_TIERS


def too_long(stack: UpstreamStack) -> Decision:
    return decide(
        structs.replace(QUERY, prompt_tokens=10**6),
        stack.fleet.snapshot(),
        stack.policy.table,
    )


async def test_a_record_tells_what_was_decided_and_who_served() -> None:
    async with upstream_stack(balanced=Behaviour(prompt_tokens=33)) as stack:
        registry = registry_of()
        decision = stack.decision(BALANCED)
        with entry(registry, context(arrived_at=0.0), decision, priority=0) as request:
            assert registry.open == [request]
            answer = await stack.stream(BALANCED)
            request.grant = Grant(decision, answer.attempt.lease, waited_ms=5.0)
            request.sent = answer.sent_at
            request.answer = answer
            await text_of(answer)
            await answer.aclose()
        (record,) = registry.recent
        assert registry.open == []
        assert record.request_id == "r1"
        assert record.trace_id == "t1"
        assert record.route == "/generate"
        assert record.key_id == "k1"
        assert record.outcome == Outcome.OK
        assert record.error is None
        assert record.decision == decision
        assert record.served == Served(BALANCED, "balanced-0", "fp8")
        assert record.tokens.prompt == 33
        assert record.tokens.output == 7
        assert record.times.queue_ms == 5.0
        assert record.times.overhead_ms == pytest.approx(request.sent * 1000 - 5)
        assert record.times.tpot_ms == answer.tpot_ms


async def test_a_record_has_the_precision_of_the_replica_that_served() -> None:
    async with upstream_stack() as stack:
        stack.fleet.configure(
            replace(stack.fleet.spec(FAST), precision="awq-int4, unknown")
        )
        registry = registry_of()
        decision = stack.decision(FAST)
        assert decision.precision == "awq-int4, unknown"
        with entry(registry, context(), decision, priority=0) as request:
            request.answer = await stack.stream(FAST)
            await request.answer.aclose()
        assert registry.recent[-1].served.precision == "awq-int4"


async def test_a_time_to_the_first_token_is_counted_from_the_arrival() -> None:
    """The engine's counts from when the request was sent; the caller has waited for longer."""
    async with upstream_stack() as stack:
        registry = registry_of()
        for own, found in ((30.0, 2030.0), (None, None)):
            with entry(
                registry, context(arrived_at=10.0), stack.decision(), priority=0
            ) as request:
                request.answer = answer = await stack.stream()
                answer.ttft_ms = own
                answer.sent_at = 12.0
                await answer.aclose()
            assert registry.recent[-1].times.ttft_ms == found


async def test_a_request_waits_then_computes_its_prompt_then_its_output() -> None:
    async with upstream_stack() as stack:
        registry = registry_of()
        first = stack.decision(FAST)
        later = stack.decision(BALANCED)
        with entry(registry, context(), first, priority=0) as request:
            assert request.state == "waiting"
            assert request.now_on is None
            assert request.grant is None
            answer = await stack.stream(BALANCED)
            request.grant = Grant(later, answer.attempt.lease)
            request.decision = later
            assert request.state == "prefill"
            assert request.decision == later
            request.answer = answer
            assert request.state == "decode"
            assert request.now_on == answer
            part = await stack.stream(PRECISE)
            answer.parts.append(part)
            assert request.now_on is part
            await answer.aclose()
        record = registry.recent[-1]
        assert record.served.tier == BALANCED
        assert record.served.continued_on == (PRECISE,)
        assert registry.totals["continuations"] == 1
        assert registry.totals["requests"] == 1


async def test_refusals_are_told_by_their_code() -> None:
    async with upstream_stack() as stack:
        registry = registry_of()
        decision = stack.decision()
        refused = too_long(stack)
        record = ended(registry, decision, RequestRefusedError(refused))
        assert record.outcome == Outcome.REFUSED
        assert record.error == Refusal.TOO_LONG.value
        assert record.decision == refused  # fmt: skip
        assert record.served == Served()
        assert record.times.overhead_ms is None
        assert record.times.ttft_ms is None
        assert record.tokens == Tokens(refused.query.tokens_to_read)
        record = ended(
            registry,
            decision,
            OverQuotaError("tokens", 5, requested_tokens=9, retry_after_s=None),
        )
        assert record.outcome == Outcome.REFUSED
        assert record.error == OVER_QUOTA
        assert "why: " + str(
            OverQuotaError("tokens", 5, requested_tokens=9, retry_after_s=None)
        ) in request_line(render_summary(record))
        assert registry.totals["refused"] == registry.totals["requests"] == 2


@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), ConnectionResetError(), BrokenPipeError()]
)
async def test_a_client_that_goes_away_is_no_error(error: BaseException) -> None:
    """But once the router has run out of time to leave, it is the router that ends requests."""
    async with upstream_stack() as stack:
        state = ServerState()
        registry = registry_of(state=state)
        record = ended(registry, stack.decision(), error)
        assert record.outcome == Outcome.CLIENT_GONE
        assert record.error is None
        state.end_all()
        record = ended(registry, stack.decision(), error)
        name = (
            "Draining"
            if isinstance(error, asyncio.CancelledError)
            else type(error).__name__
        )
        assert record.outcome == Outcome.ERROR
        assert record.error == name
        assert "CancelledError" not in record.why_not


async def test_an_answer_that_broke_is_an_error_though_nothing_was_raised() -> None:
    """Its endpoint has told the caller in the stream, and ended well itself."""
    async with upstream_stack() as stack:
        registry = registry_of()
        with entry(registry, context(), stack.decision(), priority=0) as request:
            request.answer = await stack.stream()
            request.answer.error = EngineBrokeError("gone")
            await request.answer.aclose()
        assert registry.recent[-1].outcome == Outcome.ERROR
        assert registry.recent[-1].error == "EngineBroke"
        assert request_line(render_summary(registry.recent[-1])).endswith(" why: gone")
        record = ended(registry, stack.decision(), ValueError("the prompt"))
        assert record.error == "ValueError"
        assert record.why_not == "it ended with ValueError"
        assert registry.totals["error"] == 2


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ({"type": "BadRequestError", "param": "messages"}, "HTTP 400, BadRequestError of messages"),
        ({"type": "BadRequestError", "param": None}, "HTTP 400, BadRequestError"),
        ({"type": "my PIN is 4711", "param": "messages"}, "HTTP 400, messages"),
        ({"type": ["BadRequestError"], "param": "a" * 61}, "HTTP 400"),
        ({}, "HTTP 400"),
    ],
)  # fmt: skip
async def test_why_an_engine_refused_is_told_without_its_words(
    error: dict[str, Any], shown: str
) -> None:
    """They may quote the prompt, as vLLM's do of a field with a wrong type."""
    words = "Input should be a valid list, 'input': 'my PIN is 4711'"
    body = json.dumps({"error": {"message": words, **error}}).encode()
    async with upstream_stack() as stack:
        record = ended(registry_of(), stack.decision(), refusal(400, body))
    shown = f"the engine refused it: {shown}"
    assert record.outcome == Outcome.REFUSED
    assert render_summary(record)["reason"] == shown
    assert request_line(render_summary(record)).endswith(f" why: {shown}")


@pytest.mark.parametrize(
    ("priority", "name"),
    [
        (-1000, "interactive"),
        (-1, "interactive"),
        (0, "standard"),
        (1, "batch"),
        (77, "batch"),
    ],
)
async def test_any_number_of_vllms_has_a_class(priority: int, name: str) -> None:
    async with upstream_stack() as stack:
        with entry(
            registry_of(), context(), stack.decision(), priority=priority
        ) as request:
            assert request.priority == name


async def test_nothing_was_promised_to_a_callers_mistake() -> None:
    """So it misses no bound; a request that found no place does."""
    async with upstream_stack() as stack:
        registry = registry_of()
        decision = stack.decision()
        query = structs.replace(decision.query, sla=LOOSE)
        asked = structs.replace(decision, query=query)
        refused = structs.replace(asked, tier=None, refusal=Refusal.TOO_LONG)
        impossible = structs.replace(
            refused, refusal=Refusal.SLA_UNMET, retry_after_s=None
        )
        mistakes = [
            EngineRefusedError("temperature"),
            OverQuotaError("tokens", 5, requested_tokens=9, retry_after_s=None),
        ]
        for error in (
            *mistakes,
            RequestRefusedError(refused),
            RequestRefusedError(impossible),
        ):
            assert ended(registry, asked, error).sla_met is None
        assert registry.recent[-1].error == "sla_impossible"
        full = structs.replace(refused, refusal=Refusal.AT_CAPACITY)
        later = structs.replace(impossible, retry_after_s=1.0)
        for error in (RequestRefusedError(full), RequestRefusedError(later)):
            assert ended(registry, asked, error).sla_met is False
        assert registry.totals["refused"] == registry.totals["requests"]


LOOSE = Sla(ttft_ms=1e9, tpot_ms=1e9)
TIGHT = Sla(ttft_ms=1e-9)
SLOW_TOKENS = Sla(ttft_ms=1e9, tpot_ms=1e-9)


@pytest.mark.parametrize(
    ("sla", "error", "met"),
    [
        (Sla(), None, None),
        (Sla(max_quality_loss=0.1), None, None),
        (LOOSE, None, True),
        (TIGHT, None, False),
        (SLOW_TOKENS, None, False),
        (LOOSE, EngineBrokeError("x"), False),
        (LOOSE, asyncio.CancelledError(), None),
        (TIGHT, asyncio.CancelledError(), False),
    ],
)
async def test_bounds_on_times_are_met_or_not_or_nobody_knows(
    sla: Sla, error: BaseException | None, *, met: bool | None
) -> None:
    """An answer that failed met none; of one that its caller left in time nobody knows."""
    async with upstream_stack() as stack:
        registry = registry_of()
        decision = stack.decision()
        decision = structs.replace(
            decision, query=structs.replace(decision.query, sla=sla)
        )
        with (
            suppress(EngineBrokeError, asyncio.CancelledError),
            entry(registry, context(arrived_at=0.0), decision, priority=0) as request,
        ):
            request.answer = await stack.stream()
            await text_of(request.answer)
            await request.answer.aclose()
            if error is not None:
                raise error
        assert registry.recent[-1].sla_met is met


async def test_an_observer_that_fails_keeps_nothing_from_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with upstream_stack() as stack:
        registry = registry_of()
        seen = list[RequestRecord]()

        def fail(_record: RequestRecord) -> None:
            raise RuntimeError("full disk")

        registry.observers += [fail, seen.append]
        with entry(registry, context(), stack.decision(), priority=0):
            pass
        assert seen == [registry.recent[-1]]
        assert "full disk" in caplog.text


async def test_only_the_last_records_are_kept() -> None:
    async with upstream_stack() as stack:
        for kept in (0, 2):
            registry = registry_of(kept)
            for number in range(3):
                with entry(
                    registry,
                    context(request_id=str(number)),
                    stack.decision(),
                    priority=0,
                ):
                    pass
            assert [record.request_id for record in registry.recent] == ["1", "2"][
                :kept
            ]
            assert registry.totals["requests"] == 3
            assert registry.totals["ok"] == 3
