"""The open requests, and one record of each that has ended, from which metrics, logs and pages are made.

A record is made once, from decision, admission and answer, and passed to every observer. It has no text of prompt or
answer.
"""

from __future__ import annotations

import asyncio
import logging
import re
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
from router.pipeline.admission import Slot
from router.pipeline.request import RequestContext, class_of
from router.policy.decision import Decision, Priority, Refusal, RequestRefusedError, Sla
from router.telemetry.logs import log_request
from router.telemetry.record import Cost, KeptFor, Outcome, RequestRecord, Served, TierUsage, Times, Tokens, error_name
from router.upstream.engine_stream import EngineAnswer
from router.upstream.errors import EngineRefusedError, NoSlotError, UpstreamError
from tiers.spec import TierName

log = logging.getLogger(f"qarr.{__name__}")
OVER_QUOTA = "over_quota"
OVER_BUDGET = "over_budget"
ENGINE_REFUSED = "engine_refused"
_QUOTED = re.compile(r"(?<!\w)(['\"])(?:(?!\1).){24,}(?:\1|$)", re.DOTALL)
WINDOW_S = 60.0
TOLD_AFTER_S = 0.05  # the longest time until observers know of a request that has ended
WINDOW_RECORDS = 20_000
State = Literal["waiting", "prefill", "decode"]


class Diverted(NamedTuple):
    """What became of a request that no tier had a slot for."""

    name: str  # of the overflow
    waited_ms: float  # its time in the queue before
    at: float  # when it was sent, in seconds by the monotonic clock
    # why the overflow does not answer: ``full``, ``paused`` after failures, ``unsupported``: it was not asked;
    # ``failed``, ``cancelled`` before its first token: it was. None: it does, or has not begun
    failure: str | None = None


class _Ending(NamedTuple):
    """How a request ended."""

    outcome: Outcome
    error: str | None = None  # code of a refusal, or the kind of error
    why_not: str = ""  # for operators; empty: nothing tells
    is_callers_mistake: bool = False  # so that nothing was promised to it


_COMPLETE = _Ending(Outcome.OK)


class ActiveRequest(Struct, eq=False):
    context: RequestContext
    decision: Decision
    priority: Priority
    slot: Slot | None = None  # None while it waits
    sent: float = 0.0  # when it was admitted, in seconds by the monotonic clock
    answer: EngineAnswer | None = None  # None until it has begun
    quota: QuotaGrant | None = None  # taken in advance; None: not yet, or its caller has no limits
    budget: Reservation | None = None  # reserved; None: not yet, or its caller has none
    used: int | None = None  # prompt and output tokens; None: it was not served, and does not count
    usage: tuple[TierUsage, ...] = ()  # what tiers have computed of it, once that is known; only of callers with a key
    cost: Cost | None = None  # charged to its caller's budgets; None: it has none
    diverted: Diverted | None = None  # what became of it at the overflow; None: it was not sent there

    @property
    def state(self) -> State:
        if self.answer is not None:
            return "decode"
        return "waiting" if self.slot is None and self.diverted is None else "prefill"

    @property
    def now_on(self) -> EngineAnswer | None:
        """Return the part of its answer that is computed now; None before the first has begun."""
        return self.answer.parts[-1] if self.answer is not None and self.answer.parts else self.answer


class RequestRegistry:
    """Holds the open requests and the last records. One event loop owns it.

    ``at_once`` hear of each record as its request ends, ``observers`` of those of ``TOLD_AFTER_S`` together.
    """

    def __init__(self, server_state: ServerState, kept: int) -> None:
        self._server_state = server_state
        self._open: dict[int, ActiveRequest] = {}
        self._untold: list[tuple[float, RequestRecord]] = []
        self.recent: deque[RequestRecord] = deque(maxlen=kept)
        self._failed: deque[RequestRecord] = deque(maxlen=kept)  # or slow: good ones do not displace them
        self.window: deque[tuple[float, TierName | None, Outcome, Times, bool | None]] = deque(maxlen=WINDOW_RECORDS)
        self.at_once: list[Callable[[RequestRecord], None]] = [log_request]
        self.observers: list[Callable[[RequestRecord], None]] = []
        self.totals: Counter[str] = Counter()

    @property
    def open(self) -> list[ActiveRequest]:
        return list(self._open.values())

    def kept(self) -> list[RequestRecord]:
        """Return the last records, and before them the last of those that went badly, in the order of their ends."""
        self.tell()
        recent = set(map(id, self.recent))
        return [*(record for record in self._failed if id(record) not in recent), *self.recent]

    def begin(self, context: RequestContext, decision: Decision, priority: int) -> ActiveRequest:
        request = ActiveRequest(context, decision, class_of(priority))
        self._open[id(request)] = request
        return request

    def end(self, request: ActiveRequest, error: BaseException | None) -> None:
        del self._open[id(request)]
        now = time.monotonic()
        record = self._record(request, error, now)
        self._untold.append((now, record))
        self.totals["requests"] += 1
        request.context.recorded = True
        for observe in self.at_once:
            _observed(observe, record)
        if len(self._untold) == 1:  # in no request's context
            asyncio.get_running_loop().call_later(TOLD_AFTER_S, self.tell, context=Context())

    def tell(self) -> None:
        """Count the requests that have ended, and let the observers have their records."""
        untold, self._untold = self._untold, []
        totals, window = self.totals, self.window
        for now, record in untold:
            outcome, served = record.outcome, record.served
            self.recent.append(record)
            if record.kept_for is not KeptFor.RECENT:
                self._failed.append(record)
            totals[outcome] += 1
            totals["retries"] += served.attempts_failed
            totals["continuations"] += len(served.continued_on)
            window.append((now, served.tier or record.decision.tier, outcome, record.times, record.sla_met))
            while window[0][0] < now - WINDOW_S:
                window.popleft()
            for observe in self.observers:
                _observed(observe, record)

    def _record(self, request: ActiveRequest, error: BaseException | None, now: float) -> RequestRecord:
        context, answer, diverted, arrived = request.context, request.answer, request.diverted, request.context.arrived
        decision = error.decision if isinstance(error, RequestRefusedError) else request.decision
        sla, served = decision.query.sla, Served()
        failure = error or (answer.error if answer is not None else None)
        ending = _COMPLETE if failure is None else self._failure(failure)
        outcome = ending.outcome
        queue_ms, overhead_ms, ttft_ms, tpot_ms, sent = 0.0, None, None, None, None
        if request.slot is not None:
            queue_ms, sent = request.slot.waited_ms, request.sent
        elif diverted is not None:
            queue_ms, sent = diverted.waited_ms, diverted.at
            served = Served(overflow_failure=diverted.failure)
        if sent is not None:
            overhead_ms = max((sent - arrived) * 1000 - queue_ms, 0.0)
        read = answer.usage["prompt_tokens"] if answer is not None and answer.usage else decision.query.tokens_to_read
        tokens = Tokens(read)
        if answer is not None:
            tokens = Tokens(read, answer.output_tokens, answer.cached_tokens, answer.predicted_cached_tokens)
            if answer.ttft_ms is not None:  # which it counts from when the request was sent
                ttft_ms = answer.ttft_ms + (answer.sent_at - arrived) * 1000
            tpot_ms = answer.tpot_ms
            if answer.overflow is not None:
                served = served._replace(overflow=answer.overflow)
            else:
                parts, hop = tuple([part.tier for part in answer.parts]), answer.attempt.hop
                served = Served(answer.tier, hop.replica, hop.precision, hop.checkpoint or None, hop.number, parts)
        promises_times = (sla.ttft_ms is not None or sla.tpot_ms is not None) and not ending.is_callers_mistake
        sla_met = _met(sla, outcome, ttft_ms, tpot_ms) if promises_times else None
        wrong = outcome is Outcome.ERROR or outcome is Outcome.REFUSED
        kept_for = KeptFor.ERROR if wrong else KeptFor.SLA_MISS if sla_met is False else KeptFor.RECENT
        return RequestRecord(
            at=time.time() - (now - arrived),
            request_id=context.request_id, trace_id=context.trace_id, route=context.route, journey=context.journey,
            key_id=context.caller.key_id, team=context.caller.team, usage=request.usage, cost=request.cost,
            priority=request.priority, decision=decision, served=served, tokens=tokens,
            outcome=outcome, error=ending.error, why_not=ending.why_not, sla_met=sla_met, kept_for=kept_for,
            times=Times(queue_ms, overhead_ms, ttft_ms, tpot_ms, (now - arrived) * 1000),
        )  # fmt: skip

    def _failure(self, failure: BaseException) -> _Ending:
        """Return how a request ended that failed.

        What the caller has to change is a refusal, whoever refused it: an error is the fault of the router or an engine.
        """
        if isinstance(failure, RequestRefusedError):
            decision = failure.decision
            return _Ending(Outcome.REFUSED, decision.refusal_code, is_callers_mistake=decision.is_callers_mistake)
        if isinstance(failure, OverQuotaError | OverBudgetError):
            code = OVER_QUOTA if isinstance(failure, OverQuotaError) else OVER_BUDGET
            return _Ending(Outcome.REFUSED, code, str(failure), is_callers_mistake=True)
        if isinstance(failure, EngineRefusedError):
            # What the engine quotes at length may be of the prompt.
            said = _QUOTED.sub("'...'", failure.detail)
            return _Ending(Outcome.REFUSED, ENGINE_REFUSED, said, is_callers_mistake=True)
        if isinstance(failure, NoSlotError):
            return _Ending(Outcome.REFUSED, Refusal.AT_CAPACITY.value, str(failure))
        if isinstance(failure, asyncio.CancelledError | OSError) and not self._server_state.deadline_passed:
            return _Ending(Outcome.CLIENT_GONE)
        kind = error_name(failure)
        why = str(failure) if isinstance(failure, UpstreamError) else f"it ended with {kind}"
        return _Ending(Outcome.ERROR, "Draining" if isinstance(failure, asyncio.CancelledError) else kind, why)


def _observed(observe: Callable[[RequestRecord], None], record: RequestRecord) -> None:
    try:
        observe(record)
    except Exception:  # an observer must not break a request
        log.exception("a record was not taken by %r", observe)


def _met(sla: Sla, outcome: Outcome, ttft_ms: float | None, tpot_ms: float | None) -> bool | None:
    """Tell whether the bounds on times were met; those that failed, or had no place, met none. None: nobody knows."""
    times = (sla.ttft_ms, ttft_ms), (sla.tpot_ms, tpot_ms)
    late = any(bound is not None and took is not None and took > bound for bound, took in times)
    if outcome is Outcome.CLIENT_GONE:
        return False if late else None
    return outcome is Outcome.OK and not late
