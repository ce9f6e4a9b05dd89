"""Requests to engines over real sockets: which failure is tried elsewhere, how often, and what is left of it."""

from __future__ import annotations

import asyncio
import json

import pytest

from router.api.problems import describe
from router.upstream.engine_request import EngineRequest
from router.upstream.engine_stream import BufferedAnswer, EngineStream
from router.upstream.errors import (
    EngineFailedError,
    EngineRefusedError,
    EngineTooSlowError,
    EngineUnreachableError,
    NoEngineAnsweredError,
    NoSlotError,
)
from router.upstream.json_object import JsonObject
from router.upstream.upstream import (
    LARGE_BYTES,
    PASSED_AT_ONCE,
    RetryBudget,
    no_answer,
    status_error,
)
from tests.fakes.engine import Behaviour
from tests.ports import reserved_ports
from tests.unit.router_stack import SOUND_S
from tests.unit.upstream_stack import HI, LIMIT, text_of, until, upstream_stack
from tiers.spec import STANDARD_TIERS

pytestmark = pytest.mark.anyio
FAST, BALANCED, PRECISE = STANDARD_TIERS
ANSWER = "The capital of France is Paris."
CHATS = "/v1/chat/completions"
TOKENIZE = "/tokenize"
WHOLE = EngineRequest(
    document=JsonObject.parse(
        b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":9}'
    ),
    request_id="w1",
    is_streamed=False,
)


def test_the_retry_budget_starts_full_and_is_never_fuller() -> None:
    """However many requests come, no more than the reserve can be taken at once."""
    budget = RetryBudget(share=0.5, reserve=2)
    for _ in range(10):
        budget.requests += 1
    assert [budget.spend() for _ in range(3)] == [True, True, False]


def test_requests_earn_their_share_of_a_retry() -> None:
    budget = RetryBudget(share=0.5, reserve=1)
    assert [budget.spend(), budget.spend()] == [True, False]
    budget.requests += 1
    assert not budget.spend(), "half of a retry is none"
    budget.requests += 1
    assert budget.spend()


@pytest.mark.parametrize("status", [401, 403, 408, 425, 429, 500, 502, 503])
async def test_what_blames_the_engine_is_tried_elsewhere(status: int) -> None:
    """The failure counts against the replica, and the retry for the tier that it went to."""
    async with upstream_stack(fast=Behaviour(status=status)) as stack:
        answer = await stack.upstream.open(stack.decision(FAST), HI)
        assert answer.tier == BALANCED
        assert answer.attempt.hop.number == 1
        assert isinstance(answer, EngineStream)
        assert await text_of(answer) == ANSWER
        await answer.aclose()
        assert stack.replica(FAST).state.failed == 1
        assert stack.asked() == [1, 1, 0]
        assert stack.held() == 0
        assert stack.upstream.retries[BALANCED] == 1


@pytest.mark.parametrize("status", [400, 404, 413, 422, 501])
async def test_what_blames_the_request_is_not_tried_elsewhere(status: int) -> None:
    """The engine's own words and status reach the caller; the replica is not held to have failed."""
    async with upstream_stack(fast=Behaviour(status=status, error="x" * 400)) as stack:
        with pytest.raises(EngineRefusedError) as refused:
            await stack.upstream.open(stack.decision(FAST), HI)
        assert refused.value.status == status
        assert refused.value.detail == "x" * 300
        assert json.loads(refused.value.body)["error"]["message"] == "x" * 400
        assert stack.replica(FAST).state.failed == 0
        assert stack.asked() == [1, 0, 0]
        assert stack.held() == 0


@pytest.mark.parametrize(
    ("status", "body", "blames"),
    [
        (404, b"<html>404 page not found</html>", "engine"),
        (405, b'{"detail":"Method Not Allowed"}', "engine"),
        (410, b"", "engine"),
        (400, b"[]", "engine"),
        (302, b"", "engine"),
        (
            404,
            b'{"error":{"message":"The model `x` does not exist.","param":"model","code":404}}',
            "engine",
        ),
        (404, b'{"error":{"message":"no such thing","code":404}}', "request"),
        (400, b'{"object":"error","message":"older vLLM"}', "request"),
        (422, b'{"detail":[{"loc":["body"],"msg":"wrong"}]}', "request"),
    ],
)
def test_an_answer_that_is_not_vllms_is_the_engines_fault(
    status: int, body: bytes, blames: str
) -> None:
    """A proxy in front of it, or a model that it no longer has: another may answer."""
    failure = status_error(status, body)
    assert type(failure) is (
        EngineFailedError if blames == "engine" else EngineRefusedError
    )


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("30", 30.0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("soon", None),
        ("-1", None),
        ("", None),
    ],
)
async def test_when_an_engine_wants_to_be_asked_again_is_passed_on(
    given: str, seconds: float | None
) -> None:
    """The soonest, if all say; the caller gets it as Retry-After."""
    failures = [status_error(429, b"", given), EngineFailedError("x", 40.0)]
    assert getattr(failures[0], "retry_after_s", None) == seconds
    after = describe(no_answer(failures, "a", "b")).retry_after_s
    assert after == (30 if seconds == 30.0 else 1)


async def test_when_all_fail_every_cause_is_told() -> None:
    broken = {
        "fast": Behaviour(status=500),
        "balanced": Behaviour(break_after=0),
        "precise": Behaviour(status=503),
    }
    async with upstream_stack(**broken) as stack:
        with pytest.raises(NoEngineAnsweredError) as error:
            await stack.upstream.open(stack.decision(FAST), HI)
        assert "fast-0: HTTP 500" in str(error.value)
        assert "balanced-0: " in str(error.value)
        assert "precise-0: HTTP 503" in str(error.value)
        assert stack.asked() == [1, 1, 1]
        assert stack.held() == 0


async def test_attempts_are_bounded() -> None:
    failing = {name: Behaviour(status=500) for name in STANDARD_TIERS}
    async with upstream_stack({"attempts": 2}, **failing) as stack:
        with pytest.raises(NoEngineAnsweredError):
            await stack.upstream.open(stack.decision(FAST), HI)
        assert stack.asked() == [1, 1, 0]


async def test_a_spent_budget_ends_the_attempts() -> None:
    """The second replica's slot, taken for nothing, is given back."""
    async with upstream_stack(
        {"retry_reserve": 0}, fast=Behaviour(status=500)
    ) as stack:
        with pytest.raises(
            NoEngineAnsweredError,
            match=r"fast-0: HTTP 500; no retry, because too many requests fail",
        ):
            await stack.upstream.open(stack.decision(FAST), HI)
        assert stack.asked() == [1, 0, 0]
        assert stack.held() == 0


async def test_no_other_tier_is_tried_where_none_may() -> None:
    async with upstream_stack(fast=Behaviour(status=500)) as stack:
        with pytest.raises(NoEngineAnsweredError):
            await stack.upstream.open(stack.decision(FAST), HI, elsewhere=False)
        with pytest.raises(NoEngineAnsweredError):
            await stack.upstream.open(stack.decision(FAST, require=True), HI)
        assert stack.asked() == [2, 0, 0]


async def test_a_full_tier_has_no_slot_but_for_what_was_admitted_before() -> None:
    async with upstream_stack() as stack:
        decision = stack.decision(FAST)
        leases = [
            stack.fleet.lease(FAST, prompt_tokens=1, max_tokens=1) for _ in range(LIMIT)
        ]
        with pytest.raises(NoSlotError, match="every slot on fast is taken"):
            await stack.upstream.open(decision, HI, elsewhere=False)
        answer = await stack.upstream.open(
            decision, HI, elsewhere=False, is_continuation=True
        )
        assert stack.replica(FAST).state.slots == LIMIT + 1
        await answer.aclose()
        for lease in leases:
            assert lease is not None
            lease.release()
        assert stack.held() == 0


async def test_excluded_replicas_are_not_asked() -> None:
    async with upstream_stack() as stack:
        answer = await stack.upstream.open(
            stack.decision(FAST), HI, exclude={"fast-0", "balanced-0"}
        )
        assert answer.tier == PRECISE
        assert answer.attempt.hop.number == 0
        await answer.aclose()
        with pytest.raises(NoSlotError):
            await stack.upstream.open(
                stack.decision(FAST), HI, exclude={r.id for r in stack.fleet.replicas}
            )


async def test_a_first_token_that_is_late_is_asked_for_elsewhere() -> None:
    """The engine that is late is told to stop."""
    async with upstream_stack(
        {"first_token_timeout_s": SOUND_S}, fast=Behaviour(stall_after=0)
    ) as stack:
        answer = await stack.upstream.open(stack.decision(FAST), HI)
        assert answer.tier is BALANCED
        await answer.aclose()
        assert stack.replica(FAST).state.failed == 1
        await until(lambda: not stack.engines[FAST].running)


async def test_a_whole_answer_that_is_late_is_not_asked_for_elsewhere() -> None:
    """It was computed for long already; another engine would need as long."""
    async with upstream_stack(
        {"answer_timeout_s": 0.1}, fast=Behaviour(stall_after=2)
    ) as stack:
        with pytest.raises(EngineTooSlowError, match=r"no whole answer within 0\.1 s"):
            await stack.upstream.open(stack.decision(FAST), WHOLE)
        assert stack.asked() == [1, 0, 0]
        assert stack.held() == 0
        assert stack.replica(FAST).state.failed == 1
        await until(lambda: not stack.engines[FAST].running)


async def test_a_whole_answer_is_passed_on_byte_by_byte() -> None:
    async with upstream_stack() as stack:
        answer = await stack.upstream.open(stack.decision(FAST), WHOLE)
        assert isinstance(answer, BufferedAnswer)
        assert answer.content == stack.engines[FAST].sent[-1]
        await answer.aclose()


async def test_a_request_that_is_cancelled_holds_nothing() -> None:
    async with upstream_stack(fast=Behaviour(hung=(CHATS,))) as stack:
        request = asyncio.create_task(stack.upstream.open(stack.decision(FAST), HI))
        await until(lambda: stack.engines[FAST].held == 1)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert stack.held() == 0
        assert stack.replica(FAST).state.failed == 0
        await until(lambda: not stack.engines[FAST].held)
        assert stack.asked() == [0, 0, 0]


async def test_every_attempt_has_its_own_id_and_the_replicas_key() -> None:
    """Callers repeat their ids, engines mix up requests of one id."""
    async with upstream_stack() as stack:
        stack.replica(FAST).api_key = "s3cret"
        for tier in (FAST, FAST, PRECISE):
            await (await stack.stream(tier)).aclose()
        first, second = stack.engines[FAST].headers
        (other,) = stack.engines[PRECISE].headers
        ids = {each["x-request-id"] for each in (first, second, other)}
        assert len(ids) == 3
        assert all(one.startswith("r1-") for one in ids)
        assert first["authorization"] == "Bearer s3cret"
        assert other.get("authorization") is None


async def test_a_small_request_is_passed_on() -> None:
    """Status and body come back as they are, a refusal's as well."""
    async with upstream_stack() as stack:
        url = stack.replica(FAST).url
        status, media_type, body = await stack.upstream.pass_on(
            url, "", TOKENIZE, b'{"prompt":"a bc"}'
        )
        assert status == 200
        assert media_type == "application/json"
        assert json.loads(body)["tokens"] == [1, 2]
        status, _, body = await stack.upstream.pass_on(
            url, "", TOKENIZE, b'{"prompt":5}'
        )
        assert status == 400
        assert b"error" in body


@pytest.mark.parametrize(
    "instead", ["[1]", '"text"', "null", "<html>", "", "[" * (LARGE_BYTES + 1)]
)
async def test_a_small_answer_that_is_no_object_is_a_failure(instead: str) -> None:
    async with upstream_stack(fast=Behaviour(instead={TOKENIZE: instead})) as stack:
        with pytest.raises(EngineFailedError, match="no JSON object"):
            await stack.upstream.pass_on(stack.replica(FAST).url, "", TOKENIZE, b"{}")


async def test_a_large_answer_is_looked_at_from_outside_only() -> None:
    """To read it takes milliseconds, in which no other request would be served."""
    large = " {" + "x" * LARGE_BYTES + "}\n"
    async with upstream_stack(fast=Behaviour(instead={TOKENIZE: large})) as stack:
        _, _, body = await stack.upstream.pass_on(
            stack.replica(FAST).url, "", TOKENIZE, b"{}"
        )
        assert body == large.encode()


async def test_a_small_request_to_a_failing_or_lost_engine_is_a_failure() -> None:
    async with upstream_stack(fast=Behaviour(detokenizes=False)) as stack:
        with pytest.raises(EngineFailedError, match="HTTP 500"):
            await stack.upstream.pass_on(
                stack.replica(FAST).url, "", "/detokenize", b'{"tokens":[]}'
            )
        (port,) = reserved_ports()
        with pytest.raises(EngineUnreachableError):
            await stack.upstream.pass_on(
                f"http://127.0.0.1:{port}", "", TOKENIZE, b"{}"
            )


async def test_small_requests_of_one_pool_are_bounded() -> None:
    """One that finds the pool full waits, and is not sent when none ends in time; another pool is not concerned."""
    async with upstream_stack(fast=Behaviour(hung=(TOKENIZE,))) as stack:
        url = stack.replica(FAST).url
        upstream = stack.upstream
        assert upstream.passes_at_once(url, "tokens")
        hung = [
            asyncio.create_task(upstream.pass_on(url, "", TOKENIZE, b"{}", "tokens"))
            for _ in range(PASSED_AT_ONCE)
        ]
        await until(lambda: stack.engines[FAST].held == PASSED_AT_ONCE)
        assert not upstream.passes_at_once(url, "tokens")
        assert upstream.passes_at_once(url, "own")
        waiting = asyncio.create_task(
            upstream.pass_on(url, "", "/detokenize", b'{"tokens":[]}', "tokens")
        )
        status, _, _ = await upstream.pass_on(url, "", "/detokenize", b'{"tokens":[]}')
        assert status == 200
        assert waiting.done() is False
        hung[0].cancel()
        assert (await waiting)[0] == 200, "the slot of one that was cancelled is free"
        for request in hung:
            request.cancel()
        await asyncio.gather(*hung, return_exceptions=True)
        assert upstream.passes_at_once(url, "tokens")


async def test_a_small_request_that_gets_no_slot_in_time_was_not_sent() -> None:
    async with upstream_stack(fast=Behaviour(hung=(TOKENIZE,))) as stack:
        upstream = stack.upstream
        asked = (stack.replica(FAST).url, "", TOKENIZE, b"{}")
        hung = [
            asyncio.create_task(upstream.pass_on(*asked)) for _ in range(PASSED_AT_ONCE)
        ]
        await until(lambda: not upstream.passes_at_once(asked[0], "own"))
        upstream.use(
            stack.settings.upstream.model_copy(update={"first_token_timeout_s": 0.1})
        )
        with pytest.raises(NoSlotError):
            await upstream.pass_on(*asked)
        for task in hung:
            task.cancel()
        await asyncio.wait(hung)
        assert upstream.passes_at_once(asked[0], "own")
        with pytest.raises(EngineUnreachableError):
            await upstream.pass_on(*asked)
