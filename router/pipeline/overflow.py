"""The last resort: a request that every tier is too full for goes to a server outside of the fleet.

Only where the operator has named one, the caller's key allows it, and the request asks for nothing that it cannot keep:
its weights, and so its precision and loss, are unknown. If it fails before its first token, the refusal stands; if it
refuses the request as well, the refusal says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from msgspec.structs import replace

from router.pipeline.registry import ActiveRequest, Diverted
from router.pipeline.request import Call
from router.policy.decision import Decision, Refusal, RequestRefusedError
from router.policy.decision_log import DecisionLog, OverflowRecord
from router.telemetry.record import error_name
from router.telemetry.tracing import Telemetry
from router.upstream.engine_request import EngineRequest
from router.upstream.engine_stream import EngineAnswer
from router.upstream.errors import NoSlotError, UpstreamError
from router.upstream.overflow import (
    OverflowClient,
    PausedError,
    RefusedThereError,
    UnsupportedError,
)
from tiers.spec import UNKNOWN

log = logging.getLogger(f"qarr.{__name__}")
FULL = {
    Refusal.AT_CAPACITY: "every tier that may serve this is full",
    Refusal.NOT_READY: "no tier that may serve this is ready",
}
FAILURES: dict[type[UpstreamError], str] = {
    UnsupportedError: "unsupported",
    NoSlotError: "full",
    PausedError: "paused",
}


@dataclass(frozen=True, slots=True)
class Overflow:
    """Decides which refused requests the overflow is asked to answer, and opens those answers."""

    client: OverflowClient
    decisions: DecisionLog | None
    telemetry: Telemetry

    def takes(self, decision: Decision, call: Call) -> bool:
        """Tell whether a refused request may go to the overflow.

        The overflow has no lease that would check the precisions, so they are checked here.
        """
        options = call.options
        caller = call.context.caller
        return (
            bool(self.client.name)
            and decision.refusal in FULL
            and caller.overflow
            and caller.tiers is None
            and options.overflow
            and not options.require
            and options.only is None
            and (options.precisions is None or UNKNOWN in options.precisions)
            and call.engine_request.adapter is None
            and not decision.query.over_budget
        )

    async def open(
        self,
        active: ActiveRequest,
        decision: Decision,
        engine_request: EngineRequest,
        sent_at: float,
    ) -> EngineAnswer | None:
        """Return the overflow's answer to a request, once it has begun; None: the refusal stands.

        ``sent_at`` is when the request was first sent, by the monotonic clock.

        ``RequestRefusedError``: the overflow refuses the request as well.
        """
        assert decision.refusal is not None
        diverted = Diverted(
            self.client.name, waited_ms=_waited_s(active) * 1000, at=time.monotonic()
        )
        active.diverted = diverted
        try:
            answer = await self.client.open(
                engine_request, decision.query.sequences, sent_at
            )
        except UpstreamError as error:
            active.diverted = diverted._replace(
                failure=FAILURES.get(type(error), "failed")
            )
            self._report_failure(active, error)
            if isinstance(error, RefusedThereError):
                reason = f"{decision.reason}; the overflow {self.client.name} refuses it as well: {error}"
                raise RequestRefusedError(replace(decision, reason=reason)) from None
            return None
        except asyncio.CancelledError:
            active.diverted = diverted._replace(failure="cancelled")
            raise
        reason = f"{FULL[decision.refusal]} ({decision.reason}), so the overflow {answer.overflow} answers"
        active.decision = replace(decision, reason=reason, degraded=("unmeasured",))
        return answer

    def _report_failure(self, active: ActiveRequest, error: UpstreamError) -> None:
        """Write to log and trace that the overflow gave no answer. The error's text quotes nothing of what it has said."""
        log.warning(
            "request %s: overflow %s: %s",
            active.context.request_id,
            self.client.name,
            error,
        )
        self.telemetry.record_failed_attempt(f"overflow {self.client.name}", error)

    def ended(self, active: ActiveRequest, error: BaseException | None) -> None:
        """Write to the decision log what became of a request that no tier had a slot for."""
        diverted = active.diverted
        if diverted is None or self.decisions is None:
            return
        failure = error or active.answer_error
        output_tokens = 0
        if active.answer is not None:
            output_tokens = active.answer.output_tokens
        self.decisions.ended(
            OverflowRecord(
                request_id=active.context.request_id,
                overflow=diverted.name,
                failure=diverted.failure,
                output_tokens=output_tokens,
                error=error_name(failure) if failure is not None else None,
            )
        )


def _waited_s(active: ActiveRequest) -> float:
    """Return how long a request has waited in the queue."""
    journey = active.context.journey
    if journey is None:
        return 0.0
    return sum([ended - began for began, ended in journey.waits])
