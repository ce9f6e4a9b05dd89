"""The path of a request: who is told of it, what it takes, and that all of it comes back however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from classifier import EstimatingCounter, PromptClass, PromptFeatures, load_second_look
from router.accounting.charging import Charging
from router.accounting.ledgers import MemoryLedger
from router.accounting.reservations import Reservations
from router.auth.api_keys import Caller, Quota
from router.auth.quota import OverQuotaError, Quotas
from router.lifecycle import ServerState
from router.pipeline.admission import Admission
from router.pipeline.failover import Failover
from router.pipeline.overflow import Overflow
from router.pipeline.pipeline import Pipeline
from router.pipeline.registry import ActiveRequest, RequestRegistry
from router.pipeline.request import (
    MAX_COUNT,
    Call,
    PromptText,
    RequestContext,
    RoutingOptions,
)
from router.policy.decision import Decision, Refusal, RequestRefusedError
from router.policy.decision_log import DecisionLog, read_log
from router.telemetry.record import Outcome
from router.upstream.engine_request import EngineRequest
from router.upstream.engine_stream import EngineStream
from router.upstream.errors import EngineTooSlowError
from router.upstream.json_object import JsonObject
from router.upstream.overflow import OverflowClient
from router.upstream.transport import EngineTransport
from tests.fakes.engine import Behaviour
from tests.unit.classifier.cases import ASKS, CONTAINS, NEITHER
from tests.unit.router_stack import router_stack
from tests.unit.upstream_stack import HI, UpstreamStack, text_of, until, upstream_stack
from tiers.spec import STANDARD_TIERS, TierName

pytestmark = pytest.mark.anyio
FAST, BALANCED, PRECISE = STANDARD_TIERS
TOKENS = 10_000  # a minute, of the key with a quota
LIMITED = Caller(
    "k1", "one", quota=Quota(tokens_per_minute=TOKENS, concurrent_requests=2)
)
READ = 4  # tokens of the prompt, by the estimate
WHOLE = EngineRequest(
    document=JsonObject.parse(b'{"messages":[]}'), request_id="w", is_streamed=False
)


def asked(caller: Caller = LIMITED, **fields: Any) -> Call:
    """Return a request for 100 tokens, as an endpoint would have parsed it."""
    values = {
        "options": RoutingOptions(FAST, "tier"),
        "prompt": PromptText("hi", READ),
        "engine_request": HI,
        "max_tokens": 100,
    }
    return Call(
        context=RequestContext("r1", "t1", caller=caller, route="/generate"),
        **{**values, **fields},
    )


@dataclass
class Noted:
    """What observers were shown."""

    prompts: list[str] = field(default_factory=list)
    answers: list[tuple[TierName, Any]] = field(default_factory=list)
    requests: int = 0

    def request(self) -> None:
        self.requests += 1

    def prompt(self, text: str, _features: PromptFeatures) -> None:
        self.prompts.append(text)

    def answer(self, _decision: Decision, tier: TierName, messages: Any) -> None:
        self.answers.append((tier, messages))


@dataclass
class Line:
    """A pipeline, and what it is made of."""

    pipeline: Pipeline
    stack: UpstreamStack
    noted: Noted

    @asynccontextmanager
    async def serving(self, request: Call) -> AsyncIterator[ActiveRequest]:
        """Decide on a request, and serve it."""
        async with self.pipeline.serve(
            request, await self.pipeline.decide(request)
        ) as active:
            yield active

    async def served(self, request: Call) -> str:
        async with self.serving(request) as active:
            assert isinstance(active.answer, EngineStream)
            return await text_of(active.answer)

    async def tokens_left(self) -> int:
        """Return what is left of the quota, this question's own prompt and answer not counted."""
        headers: dict[str, str] = {}
        grant = await self.pipeline.quotas.enter(LIMITED, 1, headers)
        assert grant is not None
        await grant.settle(None)
        return int(headers["x-ratelimit-remaining-tokens"]) + 1

    def held(self) -> int:
        """Return what requests hold of replicas, of the queue and of the registry."""
        pipeline = self.pipeline
        return (
            self.stack.held() + pipeline.admission.waiting + len(pipeline.registry.open)
        )

    @property
    def outcome(self) -> tuple[Outcome, str | None]:
        record = self.pipeline.registry.kept()[-1]
        return record.outcome, record.error


@asynccontextmanager
async def line(
    log: Path | None = None,
    options: dict[str, Any] | None = None,
    **behaviours: Behaviour,
) -> AsyncIterator[Line]:
    async with upstream_stack(options, **behaviours) as stack:
        noted = Noted()
        settings = stack.settings
        parts = (stack.fleet, stack.policy, stack.upstream, stack.telemetry)
        decisions = DecisionLog(log) if log is not None else None
        pipeline = Pipeline(
            fleet=stack.fleet,
            counter=EstimatingCounter(),
            second_look=load_second_look(),
            policy=stack.policy,
            quotas=Quotas(),
            charging=Charging(
                Reservations(MemoryLedger(), settings.budgets),
                stack.fleet,
                policy=stack.policy,
                prices={},
            ),
            admission=Admission(stack.fleet, stack.policy, settings.admission),
            failover=Failover(*parts, settings.upstream.attempts, 256),
            overflow=Overflow(
                OverflowClient(
                    settings.overflow,
                    settings.upstream,
                    telemetry=stack.telemetry,
                    transport=EngineTransport(),
                ),
                decisions,
                stack.telemetry,
            ),
            registry=RequestRegistry(ServerState(), 9),
            decisions=decisions,
            telemetry=stack.telemetry,
            prompt_observer=noted.prompt,
            answer_observer=noted.answer,
        )
        yield Line(pipeline, stack, noted)
        if decisions is not None:
            await asyncio.to_thread(decisions.close)


async def test_a_decision_that_is_served_is_told_to_observers(tmp_path: Path) -> None:
    """One that is only asked for leaves no log and no sample; of both, what measures is told first."""
    async with line(tmp_path / "log") as at:
        at.stack.fleet.preempt = at.noted.request
        await at.pipeline.decide(asked(), serve=False)
        assert at.noted == Noted(requests=1)
        decision = await at.pipeline.decide(asked())
        assert decision.tier == FAST
        assert at.noted.prompts == ["hi"]
        assert at.noted.requests == 2
    (record,) = (
        each for each in read_log(tmp_path / "log") if hasattr(each, "request_id")
    )
    assert record.request_id == "r1"


async def test_a_second_look_is_taken_only_where_the_tier_hangs_on_it() -> None:
    """A prompt that may have code is looked at again, unless one tier would serve it either way."""
    texts = (text for _, text in (*ASKS, *CONTAINS, *NEITHER))
    prompt = next(
        PromptText(text)
        for text in texts
        if PromptText(text).classify(EstimatingCounter()).doubtful
    )
    async with line() as at:
        table = at.stack.policy.table
        at.stack.policy.table = replace(table, max_loss={PromptClass.CODE: 0.0})
        hanging = await at.pipeline.decide(
            asked(prompt=prompt, options=RoutingOptions())
        )
        alone = await at.pipeline.decide(
            asked(prompt=prompt, options=RoutingOptions(only=frozenset({PRECISE})))
        )
    assert "second look" in hanging.query.features.signals
    assert not hanging.query.features.doubtful
    assert alone.query.features.doubtful


async def test_the_second_look_is_on_by_default_and_a_setting_turns_it_off(
    tmp_path: Path,
) -> None:
    """Without it no transformer is loaded, and the first look decides alone."""
    async with router_stack(tmp_path, {"policy": {"second_look": False}}) as without:
        assert without.pipeline.second_look is None
    async with router_stack(tmp_path) as by_default:
        assert by_default.pipeline.second_look is not None


async def test_what_the_policy_refuses_costs_no_quota() -> None:
    async with line() as at:
        request = asked(prompt=PromptText("hi", 5000))
        with pytest.raises(RequestRefusedError):
            await at.served(request)
        assert at.outcome == (Outcome.REFUSED, Refusal.TOO_LONG.value)
        assert request.context.quota_headers == {}
        assert await at.tokens_left() == TOKENS
        assert at.held() == 0


async def test_no_quota_is_asked_for_more_tokens_than_any_counter_holds() -> None:
    async with line() as at:
        for replica in at.stack.fleet.replicas:
            replica.spec = replace(replica.spec, max_model_len=1 << 70)
        at.stack.fleet.specs = tuple(
            replace(spec, max_model_len=1 << 70) for spec in at.stack.fleet.specs
        )
        with pytest.raises(OverQuotaError, match=f"needs {MAX_COUNT}"):
            await at.served(asked(max_tokens=1 << 60))
        assert at.held() == 0


async def test_an_answer_that_took_too_long_costs_its_prompt() -> None:
    """An engine has computed it, for as long as the caller was ready to wait."""
    async with line(
        options={"answer_timeout_s": 0.1}, fast=Behaviour(stall_after=1)
    ) as at:
        with pytest.raises(EngineTooSlowError):
            await at.served(asked(engine_request=WHOLE))
        assert await at.tokens_left() == TOKENS - READ
        assert at.held() == 0


async def test_a_request_that_is_cancelled_before_its_answer_costs_its_prompt() -> None:
    async with line(fast=Behaviour(stall_after=0)) as at:
        request = asyncio.create_task(at.served(asked()))
        await until(lambda: at.stack.engines[FAST].running == 1)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert at.outcome == (Outcome.CLIENT_GONE, None)
        assert await at.tokens_left() == TOKENS - READ
        assert at.held() == 0
        await until(lambda: not at.stack.engines[FAST].running)


async def test_a_request_that_is_cancelled_in_the_queue_costs_nothing() -> None:
    async with line() as at:
        for tier in STANDARD_TIERS:
            while at.stack.fleet.lease(tier, prompt_tokens=1, max_tokens=1) is not None:
                pass
        request = asyncio.create_task(at.served(asked()))
        await until(lambda: at.pipeline.admission.waiting == 1)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert await at.tokens_left() == TOKENS


@pytest.mark.parametrize(
    "error", [ConnectionResetError(), asyncio.CancelledError(), RuntimeError("encoder")]
)
async def test_an_endpoint_that_fails_midway_ends_the_engines_work(
    error: BaseException,
) -> None:
    """What came until then counts; no answer is shown to the observer that is not whole."""
    async with line(fast=Behaviour(stall_after=2)) as at:
        with pytest.raises(type(error)):
            async with at.serving(asked()) as active:
                assert isinstance(active.answer, EngineStream)
                while active.answer.output_tokens < 2:
                    await active.answer.flow(lambda _: False)
                raise error
        assert at.held() == 0
        assert await at.tokens_left() == TOKENS - READ - 2
        assert at.noted.answers == []
        assert at.outcome[0] is (
            Outcome.ERROR if isinstance(error, RuntimeError) else Outcome.CLIENT_GONE
        )
        await until(lambda: not at.stack.engines[FAST].running)
