"""Requests as they are served, and one record of each that has ended. Metrics, logs and pages are all made from those.

A record is made once, of what the decision, the admission and the answer say, and handed to everyone who observes. It has
no text of any prompt or answer.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from router.auth.quota import OverQuota
from router.policy.decision import PRIORITIES, Priority, Refused
from router.telemetry.record import Outcome, RequestRecord
from router.upstream.engine_stream import continued_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from router.lifecycle import ServerState
    from router.pipeline.admission import Admitted
    from router.pipeline.request import RequestContext
    from router.policy.decision import Decision, Sla
    from router.upstream.engine_stream import EngineAnswer
    from tiers.fleet import Fleet

log = logging.getLogger(f"qarr.{__name__}")
OVER_QUOTA = "over_quota"


State = Literal["waiting", "prefill", "decode"]


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that is being served. Times by the monotonic clock, in seconds.

    Attributes:
        admitted: Its slot; None while it waits.
        sent: When it was let in.
        answer: Once that has begun.
    """

    context: RequestContext
    decision: Decision
    priority: Priority
    admitted: Admitted | None = None
    sent: float = 0.0
    answer: EngineAnswer | None = None

    @property
    def state(self) -> State:
        """Return how far it is."""
        if self.answer is not None:
            return "decode"
        return "waiting" if self.admitted is None else "prefill"

    @property
    def now_on(self) -> EngineAnswer | None:
        """Return the part of its answer that is computed now; None before the first one has begun."""
        return self.answer.parts[-1] if self.answer is not None and self.answer.parts else self.answer

    def let_in(self, admitted: Admitted) -> None:
        """Note its slot."""
        self.admitted, self.decision, self.sent = admitted, admitted.decision, time.monotonic()


class RequestRegistry:
    """Holds the requests that are open, and the last records. One event loop owns it.

    Attributes:
        observers: Called with each record, in order.
        totals: Records by outcome, and what happened to requests, since the start.
    """

    def __init__(self, fleet: Fleet, server_state: ServerState, kept: int) -> None:
        self._fleet, self._server_state = fleet, server_state
        self._open: dict[int, ActiveRequest] = {}
        self.recent: deque[RequestRecord] = deque(maxlen=kept)
        self.observers: list[Callable[[RequestRecord], None]] = []
        self.totals: Counter[str] = Counter()

    @property
    def open(self) -> list[ActiveRequest]:
        """Return the requests that are being served, the oldest first."""
        return list(self._open.values())

    @contextmanager
    def entry(self, context: RequestContext, decision: Decision, priority: int) -> Iterator[ActiveRequest]:
        """Keep a request open, and record how it ends."""
        request = ActiveRequest(context, decision, _class_of(priority))
        self._open[id(request)] = request
        error: BaseException | None = None
        try:
            yield request
        except BaseException as caught:
            error = caught
            raise
        finally:
            del self._open[id(request)]
            self._ended(self._record(request, error))

    def _ended(self, record: RequestRecord) -> None:
        self.recent.append(record)
        self.totals["requests"] += 1
        self.totals[record.outcome.value] += 1
        self.totals["retries"] += record.attempts_failed
        self.totals["continuations"] += len(record.continued_on)
        self.totals["escalations"] += record.escalated
        for observe in self.observers:
            try:
                observe(record)
            except Exception:  # who only watches must not break what is watched
                log.exception("a record was not taken by %r", observe)

    def _record(self, request: ActiveRequest, error: BaseException | None) -> RequestRecord:
        now, context, admitted, answer = time.monotonic(), request.context, request.admitted, request.answer
        decision = error.decision if isinstance(error, Refused) else request.decision
        outcome, cause = self._outcome(answer, error)
        queue_ms = admitted.waited_ms if admitted is not None else 0.0
        spec = self._fleet.spec(answer.tier) if answer is not None else None
        prompt_tokens, sent = decision.query.tokens_to_read, request.sent - context.arrived
        ttft_ms = ttft_from_arrival(context, answer) if answer is not None else None
        tpot_ms = answer.tpot_ms if answer is not None else None
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
            served_by=answer.tier if answer is not None else None,
            replica=answer.replica_id if answer is not None else None,
            precision=spec.precision.value if spec is not None else None,
            checkpoint=spec.checkpoint_id if spec is not None else None,
            prompt_tokens=answer.usage.get("prompt_tokens", prompt_tokens) if answer is not None else prompt_tokens,
            output_tokens=answer.output_tokens if answer is not None else 0,
            queue_ms=queue_ms,
            overhead_ms=max(sent * 1000 - queue_ms, 0.0) if admitted is not None else None,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            duration_ms=(now - context.arrived) * 1000,
            sla_met=_kept(decision.query.sla, outcome, ttft_ms, tpot_ms),
            attempts_failed=answer.failed_attempts if answer is not None else 0,
            escalated=answer is not None and answer.escalation is not None,
            hedged=answer is not None and answer.hedge is not None,
            continued_on=tuple(continued_on(answer)) if answer is not None else (),
        )

    def _outcome(self, answer: EngineAnswer | None, error: BaseException | None) -> tuple[Outcome, str | None]:
        failure = error or (answer.error if answer is not None else None)
        if failure is None:
            return Outcome.OK, None
        if isinstance(failure, Refused):
            refusal = failure.decision.refusal
            return Outcome.REFUSED, refusal.value if refusal is not None else None
        if isinstance(failure, OverQuota):
            return Outcome.REFUSED, OVER_QUOTA
        if isinstance(failure, asyncio.CancelledError | OSError) and not self._server_state.deadline_passed:
            return Outcome.CLIENT_GONE, None
        return Outcome.ERROR, "Draining" if isinstance(failure, asyncio.CancelledError) else type(failure).__name__


def ttft_from_arrival(context: RequestContext, answer: EngineAnswer) -> float | None:
    """Return the time from a request's arrival to its first token, in milliseconds; the queue is in it.

    A tier counts it from when the request was first sent.
    """
    return answer.ttft_ms + (answer.sent_at - context.arrived) * 1000 if answer.ttft_ms is not None else None


def _class_of(priority: int) -> Priority:
    """Return the class of a priority in vLLM's numbers, which callers of OpenAI's endpoints may choose freely."""
    if priority <= PRIORITIES["interactive"]:
        return "interactive"
    return "standard" if priority <= PRIORITIES["standard"] else "batch"


def _kept(sla: Sla, outcome: Outcome, ttft_ms: float | None, tpot_ms: float | None) -> bool | None:
    """Tell whether the bounds on times were kept; what was refused or failed kept none."""
    if sla.ttft_ms is None and sla.tpot_ms is None:
        return None
    late = (sla.ttft_ms is not None and ttft_ms is not None and ttft_ms > sla.ttft_ms) or (
        sla.tpot_ms is not None and tpot_ms is not None and tpot_ms > sla.tpot_ms
    )
    if outcome is Outcome.CLIENT_GONE:
        return False if late else None
    return outcome is Outcome.OK and not late
