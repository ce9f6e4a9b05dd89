"""Opening an answer: the interface of all strategies, and the two innermost ones, direct and hedged.

If a first token is late, hedging asks a second tier and takes the answer that begins first. As in Dean and Barroso, The
Tail at Scale (CACM 2013), the second request is sent only when the first is later than 95 % of requests; here by the
predicted TTFT and its spread. It is taken from the retry budget, so it cannot double the load.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from router.upstream.errors import UpstreamError

if TYPE_CHECKING:
    from router.pipeline.admission import Admitted
    from router.policy.decision import Decision
    from router.telemetry.tracing import Telemetry
    from router.upstream.client import Upstream
    from router.upstream.engine_stream import EngineAnswer, EngineRequest
    from tiers.fleet import Lease

LATE = 1.645  # standard deviations: 95 % of a normal distribution are below


class Opener(Protocol):
    """Opens answers."""

    async def open(self, admitted: Admitted, request: EngineRequest, sent_at: float) -> EngineAnswer:
        """Return an answer that has begun.

        Args:
            admitted: The decision and its slot.
            request: The request to an engine.
            sent_at: When the request was first sent, by the monotonic clock.

        Raises:
            UpstreamError: As ``Upstream.open``.
        """


@dataclass(frozen=True, slots=True)
class Direct:
    """Opens answers on the slot, and elsewhere only if that attempt fails before the first token."""

    upstream: Upstream

    async def open(self, admitted: Admitted, request: EngineRequest, sent_at: float) -> EngineAnswer:
        """Open an answer, as ``Opener.open``."""
        return await self.upstream.open(admitted.decision, request, sent_at, lease=admitted.lease)


@dataclass(frozen=True, slots=True)
class Hedging:
    """Opens answers, and asks a second tier for those that are late."""

    upstream: Upstream
    telemetry: Telemetry

    async def open(self, admitted: Admitted, request: EngineRequest, sent_at: float) -> EngineAnswer:
        """Open an answer, as ``Opener.open``."""
        decision, lease = admitted.decision, admitted.lease
        wait_s = self._wait_s(decision, lease)
        if wait_s is None or not request.streamed:
            return await self.upstream.open(decision, request, sent_at, lease=lease)
        taken = {lease.replica.id}  # shared, so that the two attempts ask different replicas
        first = asyncio.create_task(self.upstream.open(decision, request, sent_at, lease=lease, taken=taken))
        attempts = {first}
        try:
            await asyncio.wait({first}, timeout=wait_s)
            other = next((tier for tier in decision.fallbacks if decision.verdict(tier).meets), None)
            if not first.done() and other is not None and self.upstream.take_retry():
                there = replace(decision, tier=other)
                again = self.upstream.open(there, request, sent_at, taken=taken, elsewhere=False)
                attempts.add(asyncio.create_task(again))
            return await self._quickest(attempts, first, decision)
        except BaseException:
            await _end(attempts)
            raise

    async def _quickest(
        self, attempts: set[asyncio.Task[EngineAnswer]], first: asyncio.Task[EngineAnswer], decision: Decision
    ) -> EngineAnswer:
        """Return the answer that begins first, and end the other attempt."""
        left = set(attempts)
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for attempt in done:
                if attempt.exception() is None:
                    await _end(attempts - {attempt})
                    answer = attempt.result()
                    if attempt is not first:
                        answer.hedge = f"{decision.tier} was late with its first token, so {answer.tier} was asked too"
                        self.telemetry.record_hedge(decision.tier, answer.tier)
                    return answer
        return first.result()  # raises its error

    @staticmethod
    def _wait_s(decision: Decision, lease: Lease) -> float | None:
        """Return the seconds after which a first token is late; None without a bound on TTFT or a prediction."""
        if decision.query.sla.ttft_ms is None or lease.predicted is None:
            return None
        trend = lease.replica.ttft_trend
        return lease.predicted.ttft_ms / 1000 * math.exp(trend.mean + LATE * math.sqrt(trend.variance))


async def _end(attempts: set[asyncio.Task[EngineAnswer]]) -> None:
    """End attempts, and close the answers that they have begun."""
    for attempt in attempts:
        attempt.cancel()
    for ended in await asyncio.gather(*attempts, return_exceptions=True):
        if not isinstance(ended, BaseException):
            await ended.aclose()
        elif not isinstance(ended, UpstreamError | asyncio.CancelledError):
            raise ended
