"""The path of every served request: decide, take quota, budget and slot, open an answer, give them back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from classifier import PromptClass, PromptFeatures, SecondLook, TokenCounter
from router.accounting.charging import Charging, usage_of
from router.auth.api_keys import BeyondKeyError
from router.auth.quota import Quotas
from router.pipeline.admission import Admission
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
from router.upstream.engine_stream import EngineStream
from router.upstream.errors import EngineTooSlowError
from tiers.fleet import Fleet
from tiers.spec import TierName, in_order


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Decides and serves. Wired once, in ``router.app.App``."""

    fleet: Fleet
    counter: TokenCounter
    second_look: SecondLook | None  # at prompts that may have code; None: it is not installed
    policy: PolicyStore
    quotas: Quotas
    charging: Charging
    admission: Admission
    failover: Failover  # continues answers whose engine fails
    overflow: Overflow  # answers requests that no tier has a slot for, where it may
    registry: RequestRegistry
    decisions: DecisionLog | None  # the decision log; None: none is written
    telemetry: Telemetry
    prompt_observer: Callable[[str, PromptFeatures], None] | None  # is shown every prompt of a served request
    # is shown every complete answer: its decision, the tier that served it, and the messages it answers, if known
    answer_observer: Callable[[Decision, TierName, Sequence[Any] | None], None] | None

    async def decide(self, call: Call, *, serve: bool = True) -> Decision:
        """Classify a request and decide; unless it is to be served (``serve``), it leaves no record.

        ``BeyondKeyError``: the caller's key refuses the hinted tier; where it does not refuse, the policy lowers the hint.
        """
        caller, hint = call.context.caller, call.options.hint
        if caller.over == "refuse" and hint is not None and caller.tiers is not None and hint not in caller.tiers:
            raise BeyondKeyError(call.options.hint_field, hint, ", ".join(in_order(caller.tiers)))
        if self.fleet.preempt is not None:
            self.fleet.preempt()
        began = time.monotonic()
        features = call.prompt.classify(self.counter)
        if features.doubtful and self.second_look is not None:
            features = await self._look_again(call, features, self.second_look)
        classified = time.monotonic()
        query = call.query(features, self.fleet.template, affinity=self.fleet.options.affinity)
        fleet, table = self.fleet.snapshot(prefix=query.prefix), self.policy.table
        if not call.limited:
            query = within_context(query, fleet)
        decision = decide(query, fleet, table)
        if serve:
            prompt = call.prompt.text if self.telemetry.record_prompts and server_span() is not None else ""
            journey = Journey(call.context.arrived, began, classified, time.monotonic(), prompt)
            call.context.journey = journey
            JOURNEY.set(journey)
        if serve and self.prompt_observer is not None:
            self.prompt_observer(call.prompt.text, features)
        if serve and self.decisions is not None:
            self.decisions.decided(call.context.request_id, decision, fleet, table, priority=call.options.priority)
        return decision

    async def _look_again(self, call: Call, features: PromptFeatures, second: SecondLook) -> PromptFeatures:
        """Return the features after a second look, where the tier hangs on whether the prompt has code."""
        fleet, table = self.fleet.snapshot(), self.policy.table
        other = PromptClass.CHAT if features.has_code else features.prompt_class
        known = [replace(features, prompt_class=kind, confidence=1.0) for kind in (PromptClass.CODE, other)]
        code, prose = (decide(call.query(each, self.fleet.template), fleet, table).tier for each in known)
        if code is prose:
            return features
        odds = await asyncio.to_thread(second.read, call.prompt.text)
        return call.prompt.classify(self.counter, odds)

    @asynccontextmanager
    async def serve(self, call: Call, decision: Decision) -> AsyncIterator[ActiveRequest]:
        """Open an answer, and give back what it took however the request ends.

        Raises:
            OverQuotaError: The caller's quota is used up.
            OverBudgetError: A budget of the caller is used up.
            RequestRefusedError: No tier serves the request, or no slot was free in time.
            UpstreamError: No engine began an answer.
        """
        asked = call.asked if call.limited else call.asked.at_most(decision.query.max_tokens)
        active = self.registry.begin(call.context, decision, call.options.priority)
        error: BaseException | None = None
        try:
            sent_at = time.monotonic()
            if call.context.caller.quota is not None or call.context.caller.accounts:
                await self._reserve(active, call)
            await self._admit(active, asked, call, sent_at)
            if active.slot is not None:
                upstream, lease = self.failover.upstream, active.slot.lease
                active.answer = answer = await upstream.open(active.decision, asked, sent_at, lease=lease)
                if isinstance(answer, EngineStream) and asked.continuable is not None:
                    rest = Continuation(self.failover, active.decision, asked, asked.continuable, answer.progress)
                    answer.continuation = rest.relay
            yield active
        except BaseException as caught:
            error = caught
            raise
        finally:
            try:
                await self._close(active, asked, error)
            finally:
                self.registry.end(active, error)
                error = None  # its trace leads here

    async def _reserve(self, active: ActiveRequest, call: Call) -> None:
        """Take quota and budget of the caller, unless nobody serves the request."""
        decision, caller, limits = active.decision, call.context.caller, call.context.limits
        final = decision.tier is None and decision.refusal is not Refusal.AT_CAPACITY
        if final and not self.overflow.takes(decision, call):
            raise RequestRefusedError(decision)
        if caller.quota is not None:
            active.quota = await self.quotas.enter(caller, min(decision.query.tokens_in_all, MAX_COUNT), limits)
        if caller.accounts:
            active.budget, active.decision = await self.charging.reserve(caller, decision, limits)

    async def _admit(self, active: ActiveRequest, asked: EngineRequest, call: Call, sent_at: float) -> None:
        """Take a slot; if there is none, open the overflow's answer, where that may answer."""
        try:
            slot = await self.admission.enter(active.decision, active.context.caller.key_id, call.options.priority)
        except RequestRefusedError as refused:
            if not self.overflow.takes(refused.decision, call):
                raise
            active.answer = await self.overflow.open(active, refused.decision, asked, sent_at)
            if active.answer is None:
                raise
            return
        active.slot, active.decision, active.sent = slot, slot.decision, time.monotonic()

    async def _close(self, active: ActiveRequest, asked: EngineRequest, error: BaseException | None) -> None:
        answer = active.answer
        try:
            if answer is not None:
                ours = answer.overflow is None
                if active.context.caller.key_id and ours:
                    active.usage = usage_of(active.decision, answer)
                read = answer.usage["prompt_tokens"] if answer.usage else active.decision.query.tokens_to_read
                active.used = read + answer.output_tokens
                if answer.complete and ours and self.answer_observer is not None:
                    self.answer_observer(active.decision, answer.tier, asked.chat)
                await answer.aclose(error or answer.error)
            elif isinstance(error, asyncio.CancelledError | EngineTooSlowError):
                _count_unanswered(active)
        finally:
            try:
                if active.diverted is not None:
                    self.overflow.ended(active, error)
                if active.budget is not None:
                    cost = self.charging.pricing.cost(active.decision, active.usage)
                    active.cost = cost.at_most(active.budget.hold.reserved)
            finally:  # give back slot, quota and budget, exactly once; of the latter two, what was not used
                if active.slot is not None:
                    self.admission.leave(active.context.caller.key_id, active.slot)
                try:
                    if active.quota is not None:
                        await active.quota.settle(active.used)
                finally:  # also when this is cancelled
                    if active.budget is not None:
                        await active.budget.settle(active.cost or FREE)


def _count_unanswered(active: ActiveRequest) -> None:
    """Count a prompt that an engine may have computed, though it has not begun to answer."""
    if active.slot is not None or active.diverted is not None:
        active.used = active.decision.query.tokens_to_read
    if active.slot is not None and active.decision.tier is not None and active.context.caller.key_id:
        active.usage = (TierUsage(active.decision.tier, active.decision.query.tokens_to_read, 0, 0),)
