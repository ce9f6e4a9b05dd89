"""The path of every served request: decide, take quota, budget and slot, open an answer, give them back."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType

from msgspec.structs import replace

from classifier import PromptClass, PromptFeatures, SecondLook, TokenCounter
from router.accounting.charging import Charging, usage_of
from router.auth.api_keys import BeyondKeyError
from router.auth.quota import Quotas
from router.pipeline.admission import Admission, Grant
from router.pipeline.failover import Continuation, Failover
from router.pipeline.overflow import Overflow
from router.pipeline.registry import ActiveRequest, RequestRegistry
from router.pipeline.request import MAX_COUNT, Call
from router.policy.decide import decide, within_context
from router.policy.decision import Decision, Refusal, RequestRefusedError
from router.policy.decision_log import DecisionLog
from router.policy.table import PolicyStore
from router.telemetry.record import FREE, JOURNEY, Journey, TierUsage
from router.telemetry.tracing import Telemetry, server_span
from router.upstream.engine_request import EngineRequest
from router.upstream.engine_stream import EngineAnswer, EngineStream
from router.upstream.errors import EngineTooSlowError
from tiers.fleet import Fleet
from tiers.spec import TierName, in_order


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Decides and serves. Wired once, in ``router.app.App``."""

    fleet: Fleet
    counter: TokenCounter
    # the one at prompts that may have code; None: it is not installed
    second_look: SecondLook | None
    policy: PolicyStore
    quotas: Quotas
    charging: Charging
    admission: Admission
    failover: Failover  # continues answers whose engine fails
    overflow: Overflow  # answers requests that no tier has a slot for, where it may
    registry: RequestRegistry
    decisions: DecisionLog | None  # the decision log; None: none is written
    telemetry: Telemetry

    async def decide(self, call: Call, *, serve: bool = True) -> Decision:
        """Classify a request and decide; unless it is to be served (``serve``), it leaves no record.

        ``BeyondKeyError``: the caller's key refuses the hinted tier; where it does not refuse, the policy lowers the hint.
        """
        _check_hint(call)
        if self.fleet.preempt is not None:
            self.fleet.preempt()
        began = time.monotonic()
        features = call.prompt.classify(self.counter)
        if features.doubtful and self.second_look is not None:
            features = await self._look_again(call, features, self.second_look)
        classified = time.monotonic()
        query = call.query(
            features, self.fleet.template, affinity=self.fleet.options.affinity
        )
        fleet = self.fleet.snapshot(prefix=query.prefix)
        table = self.policy.table
        if not call.is_limited:
            query = within_context(query, fleet)
        decision = decide(query, fleet, table)
        if serve:
            self._begin_journey(call, began, classified)
            if self.decisions is not None:
                self.decisions.decided(
                    call.context.request_id,
                    decision,
                    fleet=fleet,
                    table=table,
                    priority=call.options.priority,
                )
        return decision

    async def _look_again(
        self, call: Call, features: PromptFeatures, second_look: SecondLook
    ) -> PromptFeatures:
        """Return the features after a second look, where the tier hangs on whether the prompt has code."""
        fleet = self.fleet.snapshot()
        table = self.policy.table

        def tier_for(prompt_class: PromptClass) -> TierName | None:
            certain = replace(features, prompt_class=prompt_class, confidence=1.0)
            return decide(call.query(certain, self.fleet.template), fleet, table).tier

        class_without_code = (
            PromptClass.CHAT if features.has_code else features.prompt_class
        )
        if tier_for(PromptClass.CODE) is tier_for(class_without_code):
            return features
        second_opinion = await asyncio.to_thread(second_look.read, call.prompt.text)
        return call.prompt.classify(self.counter, second_opinion)

    def _begin_journey(self, call: Call, began: float, classified: float) -> None:
        """Begin to note what a request goes through, now that it is decided on."""
        prompt = ""
        if self.telemetry.record_prompts and server_span() is not None:
            prompt = call.prompt.text
        journey = Journey(
            arrived=call.context.arrived_at,
            began=began,
            classified=classified,
            decided=time.monotonic(),
            prompt=prompt,
        )
        call.context.journey = journey
        JOURNEY.set(journey)

    def serve(self, call: Call, decision: Decision) -> ServedRequest:
        """Return a request to be entered: that opens an answer; leaving it gives back what the request took."""
        return ServedRequest(self, call, decision)

    async def open(self, active: ActiveRequest, call: Call) -> None:
        """Take what a request needs, and open its answer; see ``ServedRequest``."""
        engine_request = call.engine_request
        if not call.is_limited:
            max_tokens = active.decision.query.max_tokens
            engine_request = engine_request.at_most(max_tokens)
        sent_at = time.monotonic()
        if call.context.caller.quota is not None or call.context.caller.accounts:
            await self._reserve(active, call)
        await self._admit(active, engine_request, call, sent_at=sent_at)
        if active.grant is not None:
            await self._open_answer(
                active, active.grant, engine_request, sent_at=sent_at
            )

    async def end(self, active: ActiveRequest, error: BaseException | None) -> None:
        """Close the answer, give back what the request took, and record the request; ``error``: what it ended with."""
        try:
            await self._close(active, error)
        finally:
            self.registry.end(active, error)

    async def _reserve(self, active: ActiveRequest, call: Call) -> None:
        """Take quota and budget of the caller, unless nobody serves the request."""
        decision = active.decision
        caller = call.context.caller
        headers = call.context.quota_headers
        is_final = decision.tier is None and decision.refusal is not Refusal.AT_CAPACITY
        if is_final and not self.overflow.takes(decision, call):
            raise RequestRefusedError(decision)
        if caller.quota is not None:
            tokens = min(decision.query.tokens_in_all, MAX_COUNT)
            active.quota = await self.quotas.enter(caller, tokens, headers)
        if caller.accounts:
            active.budget, active.decision = await self.charging.reserve(
                caller, decision, headers
            )

    async def _admit(
        self,
        active: ActiveRequest,
        engine_request: EngineRequest,
        call: Call,
        *,
        sent_at: float,
    ) -> None:
        """Take a slot; if there is none, open the overflow's answer, where that may answer."""
        key_id = active.context.caller.key_id
        try:
            grant = await self.admission.enter(
                active.decision, key_id, call.options.priority
            )
        except RequestRefusedError as refused:
            if not self.overflow.takes(refused.decision, call):
                raise
            active.answer = await self.overflow.open(
                active, refused.decision, engine_request, sent_at=sent_at
            )
            if active.answer is None:
                raise
            return
        active.grant = grant
        active.decision = grant.decision
        active.sent = time.monotonic()

    async def _open_answer(
        self,
        active: ActiveRequest,
        grant: Grant,
        engine_request: EngineRequest,
        *,
        sent_at: float,
    ) -> None:
        """Open an engine's answer, and let another engine continue it if its own one fails."""
        answer = await self.failover.upstream.open(
            active.decision, engine_request, sent_at, lease=grant.lease
        )
        active.answer = answer
        if isinstance(answer, EngineStream) and answer.may_be_continued:
            continuation = Continuation(
                failover=self.failover,
                decision=active.decision,
                request=engine_request,
                terms=engine_request.continuation_terms,
                progress=answer.progress,
            )
            answer.continuation = continuation.relay

    async def _close(self, active: ActiveRequest, error: BaseException | None) -> None:
        """Close the answer and give back what the request took. Every step is taken, even if an earlier one fails."""
        try:
            if active.answer is not None:
                await self._close_answer(active, active.answer, error)
            elif isinstance(error, asyncio.CancelledError | EngineTooSlowError):
                _count_unanswered(active)
        finally:
            try:
                self._conclude(active, error)
            finally:
                await self._give_back(active)

    async def _close_answer(
        self,
        active: ActiveRequest,
        answer: EngineAnswer,
        error: BaseException | None,
    ) -> None:
        """Count what an answer has used, and close it."""
        try:
            is_from_fleet = answer.overflow is None
            if is_from_fleet and active.context.caller.key_id:
                active.usage = usage_of(active.decision, answer)
            prompt_tokens = active.decision.query.tokens_to_read
            if answer.usage:
                prompt_tokens = answer.usage["prompt_tokens"]
            active.used = prompt_tokens + answer.output_tokens
        finally:
            await answer.aclose(error or answer.error)

    def _conclude(self, active: ActiveRequest, error: BaseException | None) -> None:
        """Log how a request ended at the overflow, and find what it costs of its budget: never more than was reserved."""
        if active.diverted is not None:
            self.overflow.ended(active, error)
        if active.budget is not None:
            cost = self.charging.pricing.cost(active.decision, active.usage)
            active.cost = cost.at_most(active.budget.hold.reserved)

    async def _give_back(self, active: ActiveRequest) -> None:
        """Give back slot, quota and budget, each exactly once; of quota and budget, what was not used."""
        try:
            if active.grant is not None:
                self.admission.leave(active.context.caller.key_id, active.grant)
            if active.quota is not None:
                await active.quota.settle(active.used)
        finally:  # the budget goes back even if this task is cancelled while the quota does
            if active.budget is not None:
                await active.budget.settle(active.cost or FREE)


class ServedRequest:
    """A request while it is served. Entering opens its answer; leaving gives back what it took, however it ends.

    It is a class of its own, and no generator with ``asynccontextmanager``: the event loop keeps track of every
    asynchronous generator, which costs each request as much as its lease.

    Raises, when it is entered:
        OverQuotaError: The caller's quota is used up.
        OverBudgetError: A budget of the caller is used up.
        RequestRefusedError: No tier serves the request, or no slot was free in time.
        UpstreamError: No engine began an answer.
    """

    __slots__ = ("_active", "_call", "_decision", "_pipeline")
    _active: ActiveRequest  # It is made when the request is entered.

    def __init__(self, pipeline: Pipeline, call: Call, decision: Decision) -> None:
        self._pipeline = pipeline
        self._call = call
        self._decision = decision

    async def __aenter__(self) -> ActiveRequest:
        call = self._call
        active = self._pipeline.registry.begin(
            call.context, self._decision, call.options.priority
        )
        self._active = active
        try:
            await self._pipeline.open(active, call)
        except BaseException as error:
            await self._pipeline.end(active, error)
            raise
        return active

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._pipeline.end(self._active, error)


def _check_hint(call: Call) -> None:
    """Raise ``BeyondKeyError`` if the caller's key refuses the hinted tier."""
    caller = call.context.caller
    hint = call.options.hint
    if caller.over != "refuse" or caller.tiers is None or hint is None:
        return
    if hint not in caller.tiers:
        raise BeyondKeyError(
            call.options.hint_field, hint, ", ".join(in_order(caller.tiers))
        )


def _count_unanswered(active: ActiveRequest) -> None:
    """Count a prompt that an engine may have computed, though it has not begun to answer."""
    prompt_tokens = active.decision.query.tokens_to_read
    if active.grant is not None or active.diverted is not None:
        active.used = prompt_tokens
    tier = active.decision.tier
    if active.grant is not None and tier is not None and active.context.caller.key_id:
        active.usage = (TierUsage(tier, prompt=prompt_tokens, cached=0, output=0),)
