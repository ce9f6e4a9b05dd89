"""The path of a request: who is told of it, what it takes, and that all of it comes back however it ends."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from classifier import EstimatingCounter
from router.auth.api_keys import BeyondKey, Caller, Quota
from router.auth.budget_ledger import MemoryLedger
from router.auth.quota import OverQuota, Quotas
from router.auth.spending import Spending
from router.lifecycle import ServerState
from router.pipeline.admission import Admission
from router.pipeline.charging import Charging
from router.pipeline.failover import Failover
from router.pipeline.overflow import Overflow
from router.pipeline.pipeline import Pipeline, engine_request_id
from router.pipeline.registry import RequestRegistry
from router.pipeline.request import MAX_COUNT, PromptText, RequestContext, RoutingOptions
from router.policy.decision import Refusal, Refused
from router.policy.decision_log import DecisionLog, read_log
from router.telemetry.record import Outcome
from router.upstream.engine_request import RelayRequest
from router.upstream.engine_stream import EngineStream
from router.upstream.errors import EngineBroke, EngineRefused, EngineTooSlow
from router.upstream.json_object import JsonObject
from router.upstream.overflow import OverflowClient
from tests.fakes.engine import Behaviour
from tests.unit.upstream_stack import HI, LIMIT, text_of, until, upstream_stack
from tiers.spec import STANDARD_TIERS, ReplicaState, TierName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from classifier import PromptFeatures
    from router.pipeline.registry import ActiveRequest
    from router.policy.decision import Decision
    from router.upstream.engine_stream import EngineRequest
    from tests.unit.upstream_stack import UpstreamStack

pytestmark = pytest.mark.anyio
FAST, BALANCED, PRECISE = STANDARD_TIERS
PATH = "/v1/chat/completions"
TOKENS = 10_000  # a minute, of the key with a quota
LIMITED = Caller("k1", "one", quota=Quota(tokens_per_minute=TOKENS, concurrent_requests=2))
READ = 4  # tokens of the prompt, by the estimate
WHOLE = RelayRequest(JsonObject.parse(b'{"messages":[]}'), PATH, "chat", "w", False, None, wants_usage=False)


@dataclass(frozen=True)
class Asked:
    """A request for 100 tokens, as an endpoint would have parsed it."""

    context: RequestContext
    options: RoutingOptions = field(default_factory=lambda: RoutingOptions(FAST, "tier"))
    prompt: PromptText = field(default_factory=lambda: PromptText("hi", READ))
    max_tokens: int = 100
    sequences: int = 1
    undraftable: str = ""
    truncated: str = ""
    adapter: str | None = None
    session: str = ""
    asked: EngineRequest = HI

    def engine_request(self, _decision: Decision) -> EngineRequest:
        return self.asked


def asked(caller: Caller = LIMITED, **fields: Any) -> Asked:
    return Asked(RequestContext("r1", "t1", caller, "/generate"), **fields)


@dataclass
class Noted:
    """What observers were shown."""

    prompts: list[str] = field(default_factory=list)
    answers: list[tuple[TierName, Any]] = field(default_factory=list)
    requests: int = 0

    def request(self) -> None:
        self.requests += 1


@dataclass
class Prompts:
    noted: Noted

    def offer(self, text: str, _features: PromptFeatures) -> None:
        self.noted.prompts.append(text)


@dataclass
class Answers:
    noted: Noted

    def offer(self, _decision: Decision, tier: TierName, messages: Any) -> None:
        self.noted.answers.append((tier, messages))


@dataclass
class Line:
    """A pipeline, and what it is made of."""

    pipeline: Pipeline
    stack: UpstreamStack
    noted: Noted

    @asynccontextmanager
    async def serving(self, request: Asked) -> AsyncIterator[ActiveRequest]:
        """Decide on a request, and serve it."""
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[ActiveRequest] = loop.create_future()
        consumed: asyncio.Future[None] = loop.create_future()

        async def consume(active: ActiveRequest) -> None:
            opened.set_result(active)
            await consumed

        decision = self.pipeline.decide(request)
        task = asyncio.create_task(self.pipeline.serve(request, decision, consume))
        try:
            await asyncio.wait({task, opened}, return_when=asyncio.FIRST_COMPLETED)
            yield opened.result() if opened.done() else await task  # type: ignore[misc]
            consumed.set_result(None)
        except BaseException as error:
            if opened.done() and not consumed.done():
                consumed.set_exception(error)
            else:
                task.cancel()
            await asyncio.wait({task})
            raise
        await task

    async def served(self, request: Asked) -> str:
        """Return a request's answer."""
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
        return self.stack.held() + pipeline.admission.waiting + len(pipeline.registry.open)

    @property
    def outcome(self) -> tuple[Outcome, str | None]:
        """Return how the last request ended."""
        record = self.pipeline.registry.recent[-1]
        return record.outcome, record.error


@asynccontextmanager
async def line(
    log: Path | None = None, options: dict[str, Any] | None = None, **behaviours: Behaviour
) -> AsyncIterator[Line]:
    """Wire a pipeline as ``wire_router`` does."""
    async with upstream_stack(options, **behaviours) as stack:
        noted, settings = Noted(), stack.settings
        parts = (stack.fleet, stack.policy, stack.upstream, stack.telemetry)
        decisions = DecisionLog(log) if log is not None else None
        pipeline = Pipeline(
            fleet=stack.fleet,
            counter=EstimatingCounter(),
            policy=stack.policy,
            quotas=Quotas(),
            charging=Charging(
                Spending(MemoryLedger(), currency="USD", priced=False), stack.fleet, stack.policy, {}, None
            ),
            admission=Admission(stack.fleet, stack.policy, settings.admission),
            failover=Failover(*parts, settings.upstream.attempts, 256),
            overflow=Overflow(
                OverflowClient(settings.overflow, settings.upstream, stack.telemetry), decisions, stack.telemetry
            ),
            registry=RequestRegistry(ServerState(), 9),
            decisions=decisions,
            telemetry=stack.telemetry,
            prompt_observer=Prompts(noted),
            answer_observer=Answers(noted),
            on_request=noted.request,
        )
        yield Line(pipeline, stack, noted)
        if decisions is not None:
            await asyncio.to_thread(decisions.close)


async def test_a_decision_that_is_served_is_told_to_observers(tmp_path: Path) -> None:
    """One that is only asked for leaves nothing: no log, no sample, no notice."""
    async with line(tmp_path / "log") as at:
        at.pipeline.decide(asked(), serve=False)
        assert at.noted == Noted()
        decision = at.pipeline.decide(asked())
        assert (decision.tier, at.noted.prompts, at.noted.requests) == (FAST, ["hi"], 1)
    (record,) = (each for each in read_log(tmp_path / "log") if hasattr(each, "request_id"))
    assert record.request_id == "r1"


async def test_a_hint_beyond_the_key_is_refused_or_lowered_as_the_key_says() -> None:
    allowed = frozenset({FAST, BALANCED})
    async with line() as at:
        options = RoutingOptions(PRECISE, "qarr.tier")
        with pytest.raises(BeyondKey) as refused:
            at.pipeline.decide(asked(replace(LIMITED, tiers=allowed, over="refuse"), options=options))
        assert (refused.value.field, refused.value.asked) == ("qarr.tier", "precise")
        assert "fast, balanced" in refused.value.allowed
        assert at.noted.requests == 0, "nothing was decided"
        lowered = at.pipeline.decide(asked(replace(LIMITED, tiers=allowed), options=options))
        assert lowered.tier in allowed
        assert "hint precise not taken" in lowered.reason


async def test_an_answer_counts_what_it_used_and_gives_back_the_rest() -> None:
    async with line(fast=Behaviour(prompt_tokens=12)) as at:
        async with at.serving(asked()) as active:
            assert at.pipeline.registry.open == [active]
            assert active.admitted is not None
            assert await at.tokens_left() == TOKENS - READ - 100, "all that it may use is taken in advance"
            assert isinstance(active.answer, EngineStream)
            assert await text_of(active.answer) == "The capital of France is Paris."
        assert (at.outcome, at.held()) == ((Outcome.OK, None), 0)
        assert await at.tokens_left() == TOKENS - 12 - 7
        assert at.noted.answers == [(FAST, HI.chat)]


async def test_what_the_policy_refuses_costs_no_quota() -> None:
    async with line() as at:
        request = asked(prompt=PromptText("hi", 5000))
        with pytest.raises(Refused):
            await at.served(request)
        assert at.outcome == (Outcome.REFUSED, Refusal.TOO_LONG.value)
        assert (request.context.limits, await at.tokens_left(), at.held()) == ({}, TOKENS, 0)


async def test_a_fleet_that_is_not_ready_refuses() -> None:
    async with line() as at:
        for replica in at.stack.fleet.replicas:
            replica.mark(ReplicaState.FAILED)
        with pytest.raises(Refused):
            await at.served(asked())
        assert at.outcome == (Outcome.REFUSED, Refusal.NOT_READY.value)


async def test_a_used_up_quota_takes_no_slot() -> None:
    """The error's headers tell how much there is."""
    async with line() as at, at.serving(asked()), at.serving(asked()):
        third = asked()
        with pytest.raises(OverQuota):
            await at.served(third)
        assert at.outcome == (Outcome.REFUSED, "over_quota")
        assert third.context.limits["x-ratelimit-limit-tokens"] == str(TOKENS)
        assert at.stack.replica(FAST).slots == 2
        assert at.stack.asked() == [2, 0, 0]


async def test_no_quota_is_asked_for_more_tokens_than_any_counter_holds() -> None:
    async with line() as at:
        for replica in at.stack.fleet.replicas:
            replica.spec = replace(replica.spec, max_model_len=1 << 70)
        at.stack.fleet.specs = tuple(replace(spec, max_model_len=1 << 70) for spec in at.stack.fleet.specs)
        with pytest.raises(OverQuota, match=f"needs {MAX_COUNT}"):
            await at.served(asked(max_tokens=1 << 60))
        assert at.held() == 0


async def test_a_refusal_by_an_engine_is_free() -> None:
    async with line(fast=Behaviour(status=400)) as at:
        with pytest.raises(EngineRefused):
            await at.served(asked())
        assert at.outcome == (Outcome.ERROR, "EngineRefused")
        assert (await at.tokens_left(), at.held()) == (TOKENS, 0)


async def test_an_answer_that_took_too_long_costs_its_prompt() -> None:
    """An engine has computed it, for as long as the caller was ready to wait."""
    async with line(options={"answer_timeout_s": 0.1}, fast=Behaviour(stall_after=1)) as at:
        with pytest.raises(EngineTooSlow):
            await at.served(asked(asked=WHOLE))
        assert (await at.tokens_left(), at.held()) == (TOKENS - READ, 0)


async def test_a_request_that_is_cancelled_before_its_answer_costs_its_prompt() -> None:
    async with line(fast=Behaviour(stall_after=0)) as at:
        request = asyncio.create_task(at.served(asked()))
        await until(lambda: at.stack.engines[FAST].running == 1)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert at.outcome == (Outcome.CLIENT_GONE, None)
        assert (await at.tokens_left(), at.held()) == (TOKENS - READ, 0)
        await until(lambda: not at.stack.engines[FAST].running)


async def test_a_request_that_is_cancelled_in_the_queue_leaves_it() -> None:
    async with line() as at:
        leases = [
            at.stack.fleet.lease(tier, prompt_tokens=1, max_tokens=1) for tier in STANDARD_TIERS for _ in range(LIMIT)
        ]
        request = asyncio.create_task(at.served(asked()))
        await until(lambda: at.pipeline.admission.waiting == 1)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        for lease in leases:
            assert lease is not None
            lease.release()
        assert (at.outcome, at.held(), at.stack.asked()) == ((Outcome.CLIENT_GONE, None), 0, [0, 0, 0])


@pytest.mark.parametrize("error", [ConnectionResetError(), asyncio.CancelledError(), RuntimeError("encoder")])
async def test_an_endpoint_that_fails_midway_ends_the_engines_work(error: BaseException) -> None:
    """What came until then counts; no answer is shown to the observer that is not whole."""
    async with line(fast=Behaviour(stall_after=2)) as at:
        with pytest.raises(type(error)):
            async with at.serving(asked()) as active:
                assert isinstance(active.answer, EngineStream)
                while active.answer.output_tokens < 2:
                    await active.answer.read()
                raise error
        assert at.held() == 0
        assert await at.tokens_left() == TOKENS - READ - 2
        assert at.noted.answers == []
        assert at.outcome[0] is (Outcome.ERROR if isinstance(error, RuntimeError) else Outcome.CLIENT_GONE)
        await until(lambda: not at.stack.engines[FAST].running)


async def test_an_answer_that_breaks_goes_on_elsewhere() -> None:
    """The whole path: both engines' tokens count once, and the record names both tiers."""
    async with line(fast=Behaviour(break_after=3)) as at:
        assert await at.served(asked()) == "The capital of France is Paris."
        record = at.pipeline.registry.recent[-1]
        assert (record.served_by, record.continued_on, record.outcome) == (FAST, (BALANCED,), Outcome.OK)
        assert (record.output_tokens, at.held()) == (7, 0)


async def test_an_answer_that_nobody_can_finish_is_an_error() -> None:
    broken = {name: Behaviour(break_after=3) for name in STANDARD_TIERS}
    async with line(**broken) as at:
        with pytest.raises(EngineBroke):
            await at.served(asked())
        assert (at.outcome, at.held(), at.noted.answers) == ((Outcome.ERROR, "EngineBroke"), 0, [])


def test_engines_get_ids_that_do_not_repeat() -> None:
    context = RequestContext("mine", "t1")
    found = {engine_request_id(context) for _ in range(100)}
    assert len(found) == 100
    assert all(one.startswith("mine-") for one in found)
