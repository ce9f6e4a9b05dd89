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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from router.accounting.budgets import OverBudget
from router.auth.quota import OverQuota
from router.pipeline.request import class_of
from router.policy.decision import Refused
from router.telemetry.record import KeptFor, Outcome, RequestRecord
from router.upstream.engine_stream import continued_on
from router.upstream.errors import EngineRefused, UpstreamError

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.lifecycle import ServerState
    from router.pipeline.admission import Admitted
    from router.pipeline.request import RequestContext
    from router.policy.decision import Decision, Priority, Sla
    from router.telemetry.record import Cost, TierUsage
    from router.upstream.engine_stream import EngineAnswer

log = logging.getLogger(f"qarr.{__name__}")
OVER_QUOTA = "over_quota"
OVER_BUDGET = "over_budget"
_QUOTED = re.compile(r"(?<!\w)(['\"])(?:(?!\1).){24,}(?:\1|$)", re.DOTALL)
State = Literal["waiting", "prefill", "decode"]


class Diverted(NamedTuple):
    """What became of a request that no tier had a slot for.

    Attributes:
        name: Of the overflow.
        waited_ms: Its time in the queue before.
        at: When it was sent, in seconds by the monotonic clock.
        failure: Why the overflow does not answer: ``full``, ``paused`` after failures, ``unsupported``: it was not asked;
            ``failed``, ``cancelled`` before its first token: it was. None: it does, or has not begun.
    """

    name: str
    waited_ms: float
    at: float
    failure: str | None = None


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that is being served.

    Attributes:
        admitted: Its slot; None while it waits.
        sent: When it was admitted, in seconds by the monotonic clock.
        answer: None until it has begun.
        usage: What tiers have computed of it, once that is known; only of callers with a key.
        cost: Charged to its caller's budgets; None: it has none.
        diverted: What became of it at the overflow; None: it was not sent there.
    """

    context: RequestContext
    decision: Decision
    priority: Priority
    admitted: Admitted | None = None
    sent: float = 0.0
    answer: EngineAnswer | None = None
    usage: tuple[TierUsage, ...] = ()
    cost: Cost | None = None
    diverted: Diverted | None = None

    @property
    def state(self) -> State:
        if self.answer is not None:
            return "decode"
        return "waiting" if self.admitted is None and self.diverted is None else "prefill"

    @property
    def now_on(self) -> EngineAnswer | None:
        """Return the part of its answer that is computed now; None before the first has begun."""
        return self.answer.parts[-1] if self.answer is not None and self.answer.parts else self.answer

    def let_in(self, admitted: Admitted) -> None:
        """Note its slot, and the decision that admitted it."""
        self.admitted, self.decision, self.sent = admitted, admitted.decision, time.monotonic()


class RequestRegistry:
    """Holds the open requests and the last records. One event loop owns it.

    Attributes:
        recent: The last records, at most ``kept``.
        observers: Called with each record, in order.
        totals: Since the start: records by outcome, requests, retries and continuations.
    """

    def __init__(self, server_state: ServerState, kept: int) -> None:
        self._server_state = server_state
        self._open: dict[int, ActiveRequest] = {}
        self.recent: deque[RequestRecord] = deque(maxlen=kept)
        self._failed: deque[RequestRecord] = deque(maxlen=kept)  # or slow: good ones do not displace them
        self.observers: list[Callable[[RequestRecord], None]] = []
        self.totals: Counter[str] = Counter()

    @property
    def open(self) -> list[ActiveRequest]:
        return list(self._open.values())

    def kept(self) -> list[RequestRecord]:
        """Return the last records, and before them the last of those that went badly, in the order of their ends."""
        recent = set(map(id, self.recent))
        return [*(record for record in self._failed if id(record) not in recent), *self.recent]

    def begin(self, context: RequestContext, decision: Decision, priority: int) -> ActiveRequest:
        request = ActiveRequest(context, decision, class_of(priority))
        self._open[id(request)] = request
        return request

    def end(self, request: ActiveRequest, error: BaseException | None) -> None:
        del self._open[id(request)]
        self._ended(self._record(request, error))

    def _ended(self, record: RequestRecord) -> None:
        self.recent.append(record)
        if record.kept_for is not KeptFor.RECENT:
            self._failed.append(record)
        totals = self.totals
        totals["requests"] += 1
        totals[record.outcome] += 1
        totals["retries"] += record.attempts_failed
        totals["continuations"] += len(record.continued_on)
        for observe in self.observers:
            try:
                observe(record)
            except Exception:  # an observer must not break a request
                log.exception("a record was not taken by %r", observe)

    def _record(self, request: ActiveRequest, error: BaseException | None) -> RequestRecord:
        now, context, answer, diverted = time.monotonic(), request.context, request.answer, request.diverted
        decision = error.decision if isinstance(error, Refused) else request.decision
        failure = error or (answer.error if answer is not None else None)
        outcome, cause = self._outcome(failure)
        (queue_ms, overhead_ms), prompt_tokens = _before(request), decision.query.tokens_to_read
        spec = ttft_ms = tpot_ms = None
        within = answer if answer is not None and answer.overflow is None else None  # the fleet
        if within is not None:
            spec = within.spec
        if answer is not None:
            prompt_tokens = answer.usage.get("prompt_tokens", prompt_tokens)
            ttft_ms, tpot_ms = ttft_from_arrival(context, answer), answer.tpot_ms
        return RequestRecord(
            at=time.time() - (now - context.arrived),
            request_id=context.request_id,
            trace_id=context.trace_id,
            route=context.route,
            key_id=context.caller.key_id,
            priority=request.priority,
            decision=decision,
            outcome=outcome,
            error=cause,
            served_by=within.tier if within is not None else None,
            replica=within.replica_id if within is not None else None,
            precision=spec.precision if spec is not None else None,
            checkpoint=spec.checkpoint_id if spec is not None else None,
            prompt_tokens=prompt_tokens,
            output_tokens=answer.output_tokens if answer is not None else 0,
            queue_ms=queue_ms,
            overhead_ms=overhead_ms,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            duration_ms=(now - context.arrived) * 1000,
            sla_met=_kept(decision.query.sla, outcome, ttft_ms, tpot_ms),
            attempts_failed=answer.failed_attempts if answer is not None else 0,
            continued_on=tuple(continued_on(answer)) if answer is not None and answer.parts else (),
            cached_prompt_tokens=answer.cached_tokens if answer is not None else None,
            predicted_cached_tokens=answer.predicted_cached_tokens if answer is not None else None,
            team=context.caller.team,
            usage=request.usage,
            cost=request.cost,
            overflow=answer.overflow if answer is not None else None,
            overflow_failure=diverted.failure if diverted is not None else None,
            journey=context.journey,
            why_not="" if outcome is Outcome.CLIENT_GONE else _why_not(failure),
        )

    def _outcome(self, failure: BaseException | None) -> tuple[Outcome, str | None]:
        if failure is None:
            return Outcome.OK, None
        if isinstance(failure, Refused):
            refusal = failure.decision.refusal
            return Outcome.REFUSED, refusal.value if refusal is not None else None
        if isinstance(failure, OverQuota):
            return Outcome.REFUSED, OVER_QUOTA
        if isinstance(failure, OverBudget):
            return Outcome.REFUSED, OVER_BUDGET
        if isinstance(failure, asyncio.CancelledError | OSError) and not self._server_state.deadline_passed:
            return Outcome.CLIENT_GONE, None
        return Outcome.ERROR, "Draining" if isinstance(failure, asyncio.CancelledError) else type(failure).__name__


def _why_not(failure: BaseException | None) -> str:
    """Return why a request failed; of an engine's own words not what is long and quoted: it may be of the prompt."""
    if isinstance(failure, EngineRefused):
        return _QUOTED.sub("'...'", failure.detail)
    if isinstance(failure, OverQuota | OverBudget | UpstreamError):
        return str(failure)
    return "" if failure is None or isinstance(failure, Refused) else f"it ended with {type(failure).__name__}"


def _before(request: ActiveRequest) -> tuple[float, float | None]:
    """Return a request's milliseconds in the queue, and the others from its arrival until it was sent; None: never."""
    admitted, diverted, arrived = request.admitted, request.diverted, request.context.arrived
    if admitted is not None:
        queue_ms, sent = admitted.waited_ms, request.sent
    elif diverted is not None:
        queue_ms, sent = diverted.waited_ms, diverted.at
    else:
        return 0.0, None
    return queue_ms, max((sent - arrived) * 1000 - queue_ms, 0.0)


def ttft_from_arrival(context: RequestContext, answer: EngineAnswer) -> float | None:
    """Return the milliseconds from a request's arrival to its first token, queue included; the answer's own are not."""
    return answer.ttft_ms + (answer.sent_at - context.arrived) * 1000 if answer.ttft_ms is not None else None


def _kept(sla: Sla, outcome: Outcome, ttft_ms: float | None, tpot_ms: float | None) -> bool | None:
    """Tell whether the bounds on times were met; refused and failed requests met none. None: none given, or unknown."""
    if sla.ttft_ms is None and sla.tpot_ms is None:
        return None
    times = (sla.ttft_ms, ttft_ms), (sla.tpot_ms, tpot_ms)
    late = any(bound is not None and took is not None and took > bound for bound, took in times)
    if outcome is Outcome.CLIENT_GONE:
        return False if late else None
    return outcome is Outcome.OK and not late
