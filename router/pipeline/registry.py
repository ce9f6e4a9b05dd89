"""The open requests, and one record of each that has ended, from which metrics, logs and pages are made.

A record is made once, from decision, admission and answer, and passed to every observer. It has no text of prompt or
answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from contextvars import Context
from typing import Literal, NamedTuple

from msgspec import Struct

from router.accounting.budgets import OverBudgetError
from router.accounting.reservations import Reservation
from router.auth.quota import OverQuotaError, QuotaGrant
from router.lifecycle import ServerState
from router.pipeline.admission import Grant
from router.pipeline.request import RequestContext, class_of
from router.policy.decision import Decision, Priority, Refusal, RequestRefusedError, Sla
from router.telemetry.logs import log_request
from router.telemetry.record import (
    Cost,
    KeptFor,
    Outcome,
    RequestRecord,
    Served,
    TierUsage,
    Times,
    Tokens,
    error_name,
)
from router.upstream.engine_stream import EngineAnswer
from router.upstream.errors import EngineRefusedError, NoSlotError, UpstreamError
from tiers.spec import TierName

log = logging.getLogger(f"qarr.{__name__}")
OVER_QUOTA = "over_quota"
OVER_BUDGET = "over_budget"
ENGINE_REFUSED = "engine_refused"
WINDOW_S = 60.0
WINDOW_RECORDS = 20_000
# the longest time until observers know of a request that has ended
OBSERVED_AFTER_S = 0.05
State = Literal["waiting", "prefill", "decode"]


class Diverted(NamedTuple):
    """What became of a request that no tier had a slot for."""

    name: str  # the overflow's name
    # the request's time in the queue before it was sent to the overflow
    waited_ms: float
    at: float  # when it was sent, in seconds by the monotonic clock
    # Why the overflow does not answer. It was not asked: ``full``, ``paused`` after failures, ``unsupported``. It was
    # asked, and ended before its first token: ``failed``, ``cancelled``. None: it answers, or has not begun to.
    failure: str | None = None


class _Ending(NamedTuple):
    """How a request ended."""

    outcome: Outcome
    error: str | None = None  # code of a refusal, or the kind of error
    why_not: str = ""  # the cause, for operators; empty: unknown
    is_callers_mistake: bool = False  # the caller was promised nothing


_COMPLETE = _Ending(Outcome.OK)


class ActiveRequest(Struct, eq=False):
    context: RequestContext
    decision: Decision
    priority: Priority
    grant: Grant | None = None  # None while it waits
    sent: float = 0.0  # when it was admitted, in seconds by the monotonic clock
    answer: EngineAnswer | None = None  # None until it has begun
    # taken in advance; None: not yet, or its caller has no limits
    quota: QuotaGrant | None = None
    # reserved in advance; None: not yet, or its caller has none
    budget: Reservation | None = None
    # prompt and output tokens; None: it was not served, and does not count
    used: int | None = None
    # what tiers have computed of it, once that is known; only of callers with a key
    usage: tuple[TierUsage, ...] = ()
    cost: Cost | None = None  # charged to its caller's budgets; None: it has none
    # what became of it at the overflow; None: it was not sent there
    diverted: Diverted | None = None

    @property
    def state(self) -> State:
        if self.answer is not None:
            return "decode"
        if self.grant is None and self.diverted is None:
            return "waiting"
        return "prefill"

    @property
    def now_on(self) -> EngineAnswer | None:
        """Return the part of its answer that is computed now; None before the first has begun."""
        if self.answer is not None and self.answer.parts:
            return self.answer.parts[-1]
        return self.answer

    @property
    def answer_error(self) -> UpstreamError | None:
        """Return the error that ended its answer, which the caller has got as an event of the stream."""
        return None if self.answer is None else self.answer.error


class RequestRegistry:
    """Holds the open requests and the last records. One event loop owns it.

    The functions in ``at_once`` get a record when its request ends; ``observers`` get the records of
    ``OBSERVED_AFTER_S`` together.
    """

    def __init__(self, server_state: ServerState, kept: int) -> None:
        self._server_state = server_state
        self._open: dict[int, ActiveRequest] = {}
        # each with the time of its request's end
        self._unobserved: list[tuple[float, RequestRecord]] = []
        self.recent: deque[RequestRecord] = deque(maxlen=kept)
        # Records of failed and slow requests are kept apart, so that those of good requests do not displace them.
        self._went_badly: deque[RequestRecord] = deque(maxlen=kept)
        self.window: deque[
            tuple[float, TierName | None, Outcome, Times, bool | None]
        ] = deque(maxlen=WINDOW_RECORDS)
        self.at_once: list[Callable[[RequestRecord], None]] = [log_request]
        self.observers: list[Callable[[RequestRecord], None]] = []
        self.totals: Counter[str] = Counter()

    @property
    def open(self) -> list[ActiveRequest]:
        return list(self._open.values())

    def kept(self) -> list[RequestRecord]:
        """Return the last records, and before them the last of those that went badly, in the order of their ends."""
        self.tell()
        recent_ids = set(map(id, self.recent))
        older = [record for record in self._went_badly if id(record) not in recent_ids]
        return [*older, *self.recent]

    def begin(
        self, context: RequestContext, decision: Decision, priority: int
    ) -> ActiveRequest:
        request = ActiveRequest(
            context=context, decision=decision, priority=class_of(priority)
        )
        self._open[id(request)] = request
        return request

    def end(self, request: ActiveRequest, error: BaseException | None) -> None:
        del self._open[id(request)]
        now = time.monotonic()
        record = self._record(request, error, now)
        self._unobserved.append((now, record))
        self.totals["requests"] += 1
        request.context.is_recorded = True
        for observe in self.at_once:
            _notify(observe, record)
        if len(self._unobserved) == 1:
            # Use an empty context: what observers do is no part of this request.
            asyncio.get_running_loop().call_later(
                OBSERVED_AFTER_S, self.tell, context=Context()
            )

    def tell(self) -> None:
        """Count the requests that have ended, and let the observers have their records."""
        unobserved = self._unobserved
        self._unobserved = []
        for ended_at, record in unobserved:
            self._count(record, ended_at)
            for observe in self.observers:
                _notify(observe, record)

    def _count(self, record: RequestRecord, ended_at: float) -> None:
        """Add a record to the last records, the totals, and the window."""
        served = record.served
        self.recent.append(record)
        if record.kept_for is not KeptFor.RECENT:
            self._went_badly.append(record)
        self.totals[record.outcome] += 1
        self.totals["retries"] += served.attempts_failed
        self.totals["continuations"] += len(served.continued_on)
        tier = served.tier or record.decision.tier
        window = self.window
        window.append((ended_at, tier, record.outcome, record.times, record.sla_met))
        while window[0][0] < ended_at - WINDOW_S:
            window.popleft()

    def _record(
        self, request: ActiveRequest, error: BaseException | None, now: float
    ) -> RequestRecord:
        context = request.context
        decision = request.decision
        if isinstance(error, RequestRefusedError):
            decision = error.decision
        ending = self._ending(error or request.answer_error)
        times = _times_of(request, now)
        sla_met = _meets_sla(decision.query.sla, ending, times)
        return RequestRecord(
            at=time.time() - (now - context.arrived_at),
            request_id=context.request_id,
            trace_id=context.trace_id,
            route=context.route,
            journey=context.journey,
            key_id=context.caller.key_id,
            team=context.caller.team,
            priority=request.priority,
            decision=decision,
            outcome=ending.outcome,
            error=ending.error,
            why_not=ending.why_not,
            served=_served_by(request),
            tokens=_tokens_of(request.answer, decision),
            times=times,
            sla_met=sla_met,
            kept_for=_kept_for(ending.outcome, sla_met),
            usage=request.usage,
            cost=request.cost,
        )

    def _ending(self, failure: BaseException | None) -> _Ending:
        """Say how a request ended, from what made it fail; None: it did not."""
        if failure is None:
            return _COMPLETE
        refusal = _refusal_of(failure)
        if refusal is not None:
            return refusal
        if (
            isinstance(failure, asyncio.CancelledError | OSError)
            and not self._server_state.deadline_passed
        ):
            return _Ending(Outcome.CLIENT_GONE)
        return _failed(failure)


def _refusal_of(failure: BaseException) -> _Ending | None:
    """Return how a refused request ended; None: it failed otherwise.

    What the caller has to change is a refusal, whoever refused it. An error is the fault of the router or an engine.
    """
    if isinstance(failure, RequestRefusedError):
        decision = failure.decision
        return _refused(
            decision.refusal_code, is_callers_mistake=decision.is_callers_mistake
        )
    if isinstance(failure, OverQuotaError):
        return _refused(OVER_QUOTA, str(failure), is_callers_mistake=True)
    if isinstance(failure, OverBudgetError):
        return _refused(OVER_BUDGET, str(failure), is_callers_mistake=True)
    if isinstance(failure, EngineRefusedError):
        return _refused(ENGINE_REFUSED, failure.without_words, is_callers_mistake=True)
    if isinstance(failure, NoSlotError):
        return _refused(
            Refusal.AT_CAPACITY.value, str(failure), is_callers_mistake=False
        )
    return None


def _refused(
    code: str | None, why_not: str = "", *, is_callers_mistake: bool
) -> _Ending:
    return _Ending(
        Outcome.REFUSED, code, why_not, is_callers_mistake=is_callers_mistake
    )


def _failed(failure: BaseException) -> _Ending:
    kind = error_name(failure)
    why_not = f"it ended with {kind}"
    if isinstance(failure, UpstreamError):
        why_not = str(failure)
    elif isinstance(failure, asyncio.CancelledError):
        kind = "Draining"
        why_not = (
            "the router has stopped, and the request was still open at its deadline"
        )
    return _Ending(Outcome.ERROR, kind, why_not)


def _times_of(request: ActiveRequest, now: float) -> Times:
    """Return the times of a request that ends ``now``, by the monotonic clock."""
    arrived = request.context.arrived_at
    queue_ms = 0.0
    sent_at = None
    if request.grant is not None:
        queue_ms = request.grant.waited_ms
        sent_at = request.sent
    elif request.diverted is not None:
        queue_ms = request.diverted.waited_ms
        sent_at = request.diverted.at
    overhead_ms = None
    if sent_at is not None:
        overhead_ms = max((sent_at - arrived) * 1000 - queue_ms, 0.0)
    ttft_ms = None
    ttfa_ms = None
    tpot_ms = None
    answer = request.answer
    if answer is not None:
        tpot_ms = answer.tpot_ms
        # The answer counts from when the request was sent, a record from its arrival.
        earlier_ms = (answer.sent_at - arrived) * 1000
        if answer.ttft_ms is not None:
            ttft_ms = answer.ttft_ms + earlier_ms
        if answer.ttfa_ms is not None:
            ttfa_ms = answer.ttfa_ms + earlier_ms
    duration_ms = (now - arrived) * 1000
    return Times(
        queue_ms=queue_ms,
        overhead_ms=overhead_ms,
        ttft_ms=ttft_ms,
        tpot_ms=tpot_ms,
        duration_ms=duration_ms,
        ttfa_ms=ttfa_ms,
    )


def _tokens_of(answer: EngineAnswer | None, decision: Decision) -> Tokens:
    """Return a request's token counts: the engine's, where it has reported them, else the predicted ones."""
    predicted_prompt_tokens = decision.query.tokens_to_read
    if answer is None:
        return Tokens(predicted_prompt_tokens)
    return Tokens(
        prompt=answer.usage["prompt_tokens"]
        if answer.usage
        else predicted_prompt_tokens,
        output=answer.output_tokens,
        cached=answer.cached_tokens,
        predicted_cached=answer.predicted_cached_tokens,
        cache_written=answer.token_details.cache_written,
        reasoning=answer.reasoning_tokens,
        tool=answer.token_details.tool,
    )


def _served_by(request: ActiveRequest) -> Served:
    """Say who answered a request: a replica and those that continued its answer, the overflow, or nobody."""
    answer = request.answer
    if answer is not None and answer.overflow is None:
        hop = answer.attempt.hop
        return Served(
            tier=answer.tier,
            replica=hop.replica,
            precision=hop.precision,
            checkpoint=hop.checkpoint or None,
            attempts_failed=hop.number,
            continued_on=tuple([part.tier for part in answer.parts]),
        )
    overflow = None
    overflow_failure = None
    if answer is not None:
        overflow = answer.overflow
    if request.grant is None and request.diverted is not None:
        overflow_failure = request.diverted.failure
    return Served(overflow=overflow, overflow_failure=overflow_failure)


def _meets_sla(sla: Sla, ending: _Ending, times: Times) -> bool | None:
    """Tell whether a request met its own bounds on times. One that failed, or got no slot, met none.

    None: it had no such bounds, nothing was promised to it, or its caller left before a bound was missed.
    """
    has_bounds = sla.ttft_ms is not None or sla.tpot_ms is not None
    if not has_bounds or ending.is_callers_mistake:
        return None
    is_late = _exceeds(times.ttft_ms, sla.ttft_ms) or _exceeds(
        times.tpot_ms, sla.tpot_ms
    )
    if ending.outcome is Outcome.CLIENT_GONE and not is_late:
        return None
    return ending.outcome is Outcome.OK and not is_late


def _exceeds(measured_ms: float | None, bound_ms: float | None) -> bool:
    return measured_ms is not None and bound_ms is not None and measured_ms > bound_ms


def _kept_for(outcome: Outcome, sla_met: bool | None) -> KeptFor:  # noqa: FBT001  as ``RequestRecord`` has it
    if outcome is Outcome.ERROR or outcome is Outcome.REFUSED:
        return KeptFor.ERROR
    if sla_met is False:
        return KeptFor.SLA_MISS
    return KeptFor.RECENT


def _notify(observe: Callable[[RequestRecord], None], record: RequestRecord) -> None:
    try:
        observe(record)
    except Exception:  # an observer must not break a request
        log.exception("a record was not taken by %r", observe)
