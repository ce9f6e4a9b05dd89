"""What is kept of open requests, and what a record says of one that has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from msgspec import structs

from router.auth.api_keys import Caller
from router.auth.quota import OverQuotaError
from router.lifecycle import ServerState
from router.pipeline.admission import Slot
from router.pipeline.registry import OVER_QUOTA, ActiveRequest, RequestRegistry
from router.pipeline.request import RequestContext
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
from tests.fakes.engine import Behaviour
from tests.unit.upstream_stack import QUERY, UpstreamStack, text_of, upstream_stack
from tiers.spec import STANDARD_TIERS

pytestmark = pytest.mark.anyio
FAST, BALANCED, PRECISE = STANDARD_TIERS


def registry_of(kept: int = 8, state: ServerState | None = None) -> RequestRegistry:
    return RequestRegistry(state or ServerState(), kept)


def context(**fields: object) -> RequestContext:
    return structs.replace(
        RequestContext("r1", "t1", Caller("k1", "one"), "/generate"), **fields
    )  # type: ignore[arg-type]


def too_long(stack: UpstreamStack) -> Decision:
    return decide(
        structs.replace(QUERY, prompt_tokens=10**6),
        stack.fleet.snapshot(),
        stack.policy.table,
    )


@contextmanager
def entry(
    registry: RequestRegistry,
    context: RequestContext,
    decision: Decision,
    priority: int,
) -> Iterator[ActiveRequest]:
    """Keep a request among the open ones for as long as the block takes, and end it as the block ends."""
    request, error = registry.begin(context, decision, priority), None
    try:
        yield request
    except BaseException as caught:
        error = caught
        raise
    finally:
        registry.end(request, error)
        registry.tell()


def ended(
    registry: RequestRegistry, decision: Decision, error: BaseException
) -> RequestRecord:
    """Let a request end by an error before it was admitted, and return its record."""
    with pytest.raises(type(error)), entry(registry, context(), decision, 0):
        raise error
    return registry.recent[-1]


async def test_a_record_tells_what_was_decided_and_who_served() -> None:
    async with upstream_stack(balanced=Behaviour(prompt_tokens=33)) as stack:
        registry, decision = registry_of(), stack.decision(BALANCED)
        with entry(registry, context(arrived=0.0), decision, 0) as request:
            assert registry.open == [request]
            answer = await stack.stream(BALANCED)
            request.slot, request.sent = (
                Slot(decision, answer.attempt.lease, waited_ms=5.0),
                answer.sent_at,
            )
            request.answer = answer
            await text_of(answer)
            await answer.aclose()
        (record,) = registry.recent
        assert registry.open == []
        assert (record.request_id, record.trace_id, record.route, record.key_id) == (
            "r1",
            "t1",
            "/generate",
            "k1",
        )
        assert (record.outcome, record.error, record.decision) == (
            Outcome.OK,
            None,
            decision,
        )
        assert record.served == Served(BALANCED, "balanced-0", "fp8")
        assert (record.tokens.prompt, record.tokens.output, record.times.queue_ms) == (
            33,
            7,
            5.0,
        )
        assert record.times.overhead_ms == pytest.approx(request.sent * 1000 - 5)
        assert record.times.tpot_ms == answer.tpot_ms


async def test_a_record_has_the_precision_of_the_replica_that_served() -> None:
    async with upstream_stack() as stack:
        stack.fleet.configure(
            replace(stack.fleet.spec(FAST), precision="awq-int4, unknown")
        )
        registry, decision = registry_of(), stack.decision(FAST)
        assert decision.precision == "awq-int4, unknown"
        with entry(registry, context(), decision, 0) as request:
            request.answer = await stack.stream(FAST)
            await request.answer.aclose()
        assert registry.recent[-1].served.precision == "awq-int4"


async def test_a_time_to_the_first_token_is_counted_from_the_arrival() -> None:
    """The engine's counts from when the request was sent; the caller has waited for longer."""
    async with upstream_stack() as stack:
        registry = registry_of()
        for own, found in ((30.0, 2030.0), (None, None)):
            with entry(registry, context(arrived=10.0), stack.decision(), 0) as request:
                request.answer = answer = await stack.stream()
                answer.ttft_ms, answer.sent_at = own, 12.0
                await answer.aclose()
            assert registry.recent[-1].times.ttft_ms == found


async def test_a_request_waits_then_computes_its_prompt_then_its_output() -> None:
    async with upstream_stack() as stack:
        registry, first, later = (
            registry_of(),
            stack.decision(FAST),
            stack.decision(BALANCED),
        )
        with entry(registry, context(), first, 0) as request:
            assert (request.state, request.now_on, request.slot) == (
                "waiting",
                None,
                None,
            )
            answer = await stack.stream(BALANCED)
            request.slot, request.decision = Slot(later, answer.attempt.lease), later
            assert (request.state, request.decision) == ("prefill", later)
            request.answer = answer
            assert (request.state, request.now_on) == ("decode", answer)
            part = await stack.stream(PRECISE)
            answer.parts.append(part)
            assert request.now_on is part
            await answer.aclose()
        record = registry.recent[-1]
        assert (record.served.tier, record.served.continued_on) == (
            BALANCED,
            (PRECISE,),
        )
        assert (registry.totals["continuations"], registry.totals["requests"]) == (1, 1)


async def test_refusals_are_told_by_their_code() -> None:
    async with upstream_stack() as stack:
        registry, decision, refused = registry_of(), stack.decision(), too_long(stack)
        record = ended(registry, decision, RequestRefusedError(refused))
        assert (record.outcome, record.error, record.decision) == (
            Outcome.REFUSED, Refusal.TOO_LONG.value, refused,
        )  # fmt: skip
        assert (record.served, record.times.overhead_ms, record.times.ttft_ms) == (
            Served(),
            None,
            None,
        )
        assert record.tokens == Tokens(refused.query.tokens_to_read)
        record = ended(registry, decision, OverQuotaError("tokens", 5, 9, None))
        assert (record.outcome, record.error) == (Outcome.REFUSED, OVER_QUOTA)
        assert "why: " + str(OverQuotaError("tokens", 5, 9, None)) in request_line(
            render_summary(record)
        )
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
        assert (record.outcome, record.error) == (Outcome.CLIENT_GONE, None)
        state.end_all()
        record = ended(registry, stack.decision(), error)
        name = (
            "Draining"
            if isinstance(error, asyncio.CancelledError)
            else type(error).__name__
        )
        assert (record.outcome, record.error) == (Outcome.ERROR, name)


async def test_an_answer_that_broke_is_an_error_though_nothing_was_raised() -> None:
    """Its endpoint has told the caller in the stream, and ended well itself."""
    async with upstream_stack() as stack:
        registry = registry_of()
        with entry(registry, context(), stack.decision(), 0) as request:
            request.answer = await stack.stream()
            request.answer.error = EngineBrokeError("gone")
            await request.answer.aclose()
        assert (registry.recent[-1].outcome, registry.recent[-1].error) == (
            Outcome.ERROR,
            "EngineBroke",
        )
        assert request_line(render_summary(registry.recent[-1])).endswith(" why: gone")
        record = ended(registry, stack.decision(), ValueError("the prompt"))
        assert (record.error, record.why_not) == (
            "ValueError",
            "it ended with ValueError",
        )
        assert registry.totals["error"] == 2


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("min_tokens must be at most max_tokens=7, got 9.", "min_tokens must be at most max_tokens=7, got 9."),
        ("This model's context is 9 tokens, you've got 10", "This model's context is 9 tokens, you've got 10"),
        ("Unexpected \"role\" in 'Dear diary, today I told \"nobody\" that'", "Unexpected \"role\" in '...'"),
        ("input_value='Dear diary, today I told nobody th", "input_value='...'"),
    ],
)  # fmt: skip
async def test_an_engines_words_are_told_without_the_prompt(
    words: str, shown: str
) -> None:
    """Why it refused a request; what it quotes at length may be of the prompt."""
    async with upstream_stack() as stack:
        record = ended(
            registry_of(), stack.decision(), EngineRefusedError(words, 400, b"")
        )
    assert (record.outcome, render_summary(record)["reason"]) == (
        Outcome.REFUSED,
        shown,
    )
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
        with entry(registry_of(), context(), stack.decision(), priority) as request:
            assert request.priority == name


async def test_nothing_was_promised_to_a_callers_mistake() -> None:
    """So it misses no bound; a request that found no place does."""
    async with upstream_stack() as stack:
        registry, decision = registry_of(), stack.decision()
        query = structs.replace(decision.query, sla=LOOSE)
        asked = structs.replace(decision, query=query)
        refused = structs.replace(asked, tier=None, refusal=Refusal.TOO_LONG)
        impossible = structs.replace(
            refused, refusal=Refusal.SLA_UNMET, retry_after_s=None
        )
        mistakes = [
            EngineRefusedError("temperature"),
            OverQuotaError("tokens", 5, 9, None),
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


LOOSE, TIGHT = Sla(ttft_ms=1e9, tpot_ms=1e9), Sla(ttft_ms=1e-9)
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
        registry, decision = registry_of(), stack.decision()
        decision = structs.replace(
            decision, query=structs.replace(decision.query, sla=sla)
        )
        with (
            suppress(EngineBrokeError, asyncio.CancelledError),
            entry(registry, context(arrived=0.0), decision, 0) as request,
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
        registry, seen = registry_of(), list[RequestRecord]()

        def fail(_record: RequestRecord) -> None:
            raise RuntimeError("full disk")

        registry.observers += [fail, seen.append]
        with entry(registry, context(), stack.decision(), 0):
            pass
        assert seen == [registry.recent[-1]]
        assert "full disk" in caplog.text


async def test_only_the_last_records_are_kept() -> None:
    async with upstream_stack() as stack:
        for kept in (0, 2):
            registry = registry_of(kept)
            for number in range(3):
                with entry(
                    registry, context(request_id=str(number)), stack.decision(), 0
                ):
                    pass
            assert [record.request_id for record in registry.recent] == ["1", "2"][
                :kept
            ]
            assert (registry.totals["requests"], registry.totals["ok"]) == (3, 3)
