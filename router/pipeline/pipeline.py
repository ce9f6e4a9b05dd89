"""What the handlers work with, and the steps that every served request goes through."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from router.auth.api_keys import BeyondKey
from router.pipeline.registry import ttft_from_arrival
from router.policy.decide import decide
from router.policy.decision import PRIORITIES, Refusal, Refused
from router.policy.decision_log import OutcomeRecord
from router.settings import TRACE_ID
from router.upstream.errors import EngineTooSlow
from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from classifier import PromptFeatures, TokenCounter
    from router.auth.api_keys import Caller
    from router.auth.quota import Quotas
    from router.pipeline.admission import Admission, Admitted
    from router.pipeline.cascade import Escalation
    from router.pipeline.context import RequestContext
    from router.pipeline.failover import Continuation
    from router.pipeline.hedging import Hedging
    from router.pipeline.registry import Journal, OpenRequest
    from router.pipeline.shared_load import SharedState
    from router.policy.decision import Decision, Priority, Query
    from router.policy.decision_log import DecisionLog
    from router.policy.table import LivePolicy
    from router.settings import LimitSettings, OpenAISettings
    from router.telemetry.tracing import Telemetry
    from router.upstream.client import Upstream
    from router.upstream.exchange import Attempt, E, EngineRequest, Exchange
    from tiers.fleet import Fleet, FleetSnapshot


class PromptObserver(Protocol):
    """Sees every prompt that is decided on."""

    def offer(self, text: str, features: PromptFeatures) -> None:
        """See one."""


class AnswerObserver(Protocol):
    """Sees every answer that is complete."""

    def offer(self, decision: Decision, tier: TierName, messages: Sequence[Any] | None) -> None:
        """See what was decided, who served it, and the messages that it answers; None where they are not known."""


class Background(Protocol):
    """Asks the engines while no request does."""

    def give_way(self) -> None:
        """Free the engines at once: a request has come."""


@dataclass(frozen=True, slots=True)
class Services:
    """What the handlers work with; wired once, in ``create_app``."""

    fleet: Fleet
    upstream: Upstream
    quotas: Quotas
    admission: Admission
    shared: SharedState
    counter: TokenCounter
    policy: LivePolicy
    journal: Journal
    decisions: DecisionLog
    escalation: Escalation
    continuation: Continuation
    hedging: Hedging
    answer_observer: AnswerObserver
    background: Background
    prompt_observer: PromptObserver
    limits: LimitSettings
    openai: OpenAISettings
    engine_key: str
    max_body_bytes: int
    telemetry: Telemetry
    model: str
    trace_url: str

    def trace_address(self, trace_id: str) -> str | None:
        """Return where a trace viewer shows a trace; None: no viewer is known."""
        return self.trace_url.replace(TRACE_ID, trace_id) or None


def choose(
    services: Services,
    text: str,
    read: Callable[[], PromptFeatures],
    ask: Callable[[PromptFeatures, FleetSnapshot], Query],
    request_id: str | None = None,
) -> Decision:
    """Classify and decide, each under its span.

    Args:
        services: For telemetry, fleet and policy.
        text: What is classified; put on the span only when that is switched on.
        read: Classifies.
        ask: Makes the policy's question from features and fleet.
        request_id: For the decision log; None for a decision that nothing follows from.
    """
    telemetry = services.telemetry
    if request_id is not None:
        services.background.give_way()
    with telemetry.classify() as span:
        features = read()
        telemetry.record_features(span, features, text)
    with telemetry.route():
        fleet, table = services.fleet.snapshot(), services.policy.table
        decision = decide(ask(features, fleet), fleet, table)
        telemetry.record_decision(decision)
        telemetry.record_verdicts(decision)
    if request_id is not None:
        services.prompt_observer.offer(text, features)
        services.decisions.decided(request_id, decision, fleet, table)
    telemetry.record_decision(decision)  # on the server span too: the one that dashboards list
    return decision


def check_hint(caller: Caller, hint: TierName | None, field: str) -> None:
    """Refuse a hint beyond the caller's key, where the key says so; otherwise the policy takes it down and says so.

    Raises:
        BeyondKey: It is refused.
    """
    if caller.over == "refuse" and hint is not None and hint not in caller.tiers:
        raise BeyondKey(field, hint.value, ", ".join(tier for tier in TierName if tier in caller.tiers))


def priority_of(caller: Caller, asked: Priority, field: str) -> int:
    """Return vLLM's priority, lowered to what the caller's key allows.

    Raises:
        BeyondKey: It is higher, and the key refuses what is.
    """
    return lowered_priority(caller, PRIORITIES[asked], field, asked)


def default_priority(caller: Caller) -> int:
    """Return the priority of a request that asks for none: standard, or the most that the key allows."""
    return max(PRIORITIES["standard"], PRIORITIES[caller.max_priority])


def lowered_priority(caller: Caller, value: int, field: str, asked: str) -> int:
    """Return a priority in vLLM's numbers (lower is sooner), lowered to what the caller's key allows.

    No number is higher than the highest class that it may have.

    Raises:
        BeyondKey: It is higher, and the key refuses what is.
    """
    highest = PRIORITIES[caller.max_priority]
    if value < highest and caller.over == "refuse":
        raise BeyondKey(field, asked, f"{caller.max_priority} or lower")
    return max(value, highest)


def engine_request_id(context: RequestContext) -> str:
    """Return an id that is unique even where callers repeat theirs: an engine mixes up requests of one id."""
    return f"{context.request_id}-{secrets.token_hex(4)}"


@asynccontextmanager
async def served(
    services: Services,
    context: RequestContext,
    decision: Decision,
    request: EngineRequest,
    kind: Callable[[Attempt], E],
    *,
    tokens: int,
) -> AsyncIterator[tuple[E, Admitted]]:
    """Take the quota and a place, open an answer, and give back all of it however the request ends.

    Args:
        services: For quotas and engines.
        context: Whose quota; gets the headers about it.
        decision: Where to.
        request: What to ask.
        kind: Makes the answer, which says how it is read.
        tokens: Prompt and highest output tokens, for the quota.

    Raises:
        OverQuota: The caller's quota is used up.
        Refused: The policy found no tier, or there was no place in time.
        UpstreamError: No engine began an answer.
    """
    with services.journal.entry(context, decision, request.priority or 0) as entry:
        if decision.tier is None and decision.refusal is not Refusal.AT_CAPACITY:
            raise Refused(decision)
        async with _served(services, entry, request, kind, tokens) as answer:
            assert entry.admitted is not None
            yield answer, entry.admitted


@asynccontextmanager
async def _served(
    services: Services, entry: OpenRequest, request: EngineRequest, kind: Callable[[Attempt], E], tokens: int
) -> AsyncIterator[E]:
    """Serve a request that is kept in the journal."""
    context, decision = entry.context, entry.decision
    opened, key_id = time.monotonic(), context.caller.key_id
    grant = await services.quotas.enter(context.caller, tokens, context.limits)
    used: int | None = None
    try:
        try:
            entry.let_in(await services.admission.enter(decision, key_id, request.priority or 0))
            answer = entry.answer = await _opened(services, entry, request, kind, opened)
        except (asyncio.CancelledError, EngineTooSlow):
            used = decision.query.tokens_to_read  # the engine has worked for it
            raise
        error: BaseException | None = None
        try:
            services.telemetry.record_served(answer.tier, answer.replica_id, answer.failed_attempts)
            yield answer
        except BaseException as caught:
            error = caught
            raise
        finally:
            used = _tokens_used(answer, decision)
            services.decisions.ended(_outcome(context, decision, answer, error or answer.error))
            if answer.complete:
                services.answer_observer.offer(decision, answer.tier, request.chat)
            await answer.aclose(error or answer.error)
    finally:
        if entry.admitted is not None:
            services.admission.leave(key_id, entry.admitted)
        if grant is not None:
            await grant.settle(used)


async def _opened(
    services: Services, entry: OpenRequest, request: EngineRequest, kind: Callable[[Attempt], E], opened: float
) -> E:
    """Return an answer that has begun, checked where that is asked for, and that goes on elsewhere if its engine fails."""
    decision, admitted = entry.decision, entry.admitted
    assert admitted is not None
    answer = await services.hedging.open(admitted, request, kind, opened)
    if request.judged:
        answer = await services.escalation.checked(decision, request, kind, answer, opened)
    answer.resume = services.continuation.resume(decision, request)
    return answer


def _outcome(
    context: RequestContext, decision: Decision, answer: Exchange, error: BaseException | None
) -> OutcomeRecord:
    ttft_ms, tpot_ms = ttft_from_arrival(context, answer), answer.tpot_ms
    return OutcomeRecord(
        request_id=context.request_id,
        tier=answer.tier,
        prompt_tokens=answer.usage.get("prompt_tokens", decision.query.tokens_to_read),
        output_tokens=answer.output_tokens,
        ttft_ms=round(ttft_ms, 2) if ttft_ms is not None else None,
        tpot_ms=round(tpot_ms, 3) if tpot_ms is not None else None,
        error=type(error).__name__ if error is not None else None,
    )


def _tokens_used(answer: Exchange, decision: Decision) -> int:
    return answer.usage.get("prompt_tokens", decision.query.tokens_to_read) + answer.output_tokens


def answer_headers(context: RequestContext, admitted: Admitted, answer: Exchange, services: Services) -> dict[str, str]:
    """Return the headers that disclose who serves the answer and why."""
    decision = admitted.decision
    spec = services.fleet.spec(answer.tier)
    headers = {
        **context.headers,
        "x-qarr-tier": answer.tier.value,
        "x-qarr-precision": spec.precision.value,
        "x-qarr-reason": reason_of(decision, answer),
    }
    if admitted.waited_ms:
        headers["x-qarr-queue-ms"] = f"{admitted.waited_ms:.0f}"
    if decision.degraded:
        headers["x-qarr-degraded"] = ", ".join(decision.degraded)
    if address := services.trace_address(context.trace_id):
        headers["x-qarr-trace-url"] = address
    if spec.checkpoint_id:
        headers["x-qarr-checkpoint"] = spec.checkpoint_id
    return headers


def reason_of(decision: Decision, answer: Exchange) -> str:
    """Return why a tier serves an answer, for a person."""
    instead = answer.escalation or answer.hedge
    if instead is not None:
        return f"{decision.reason}; {instead}"
    if answer.tier is decision.tier:
        return decision.reason
    return f"{decision.reason}; {decision.tier} failed before the first token, so {answer.tier} took over"
