"""The confidence check: hold a cheap tier's first tokens; if it was unsure of them, start again at a higher precision.

Nothing has been sent by then, so the caller only sees that the higher tier answered, and why.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from router.policy.profiles import CHECK_TOKENS
from router.upstream.engine_stream import EngineStream
from router.upstream.errors import EngineBroke, NoSlot, UpstreamError
from tiers.spec import TierName

if TYPE_CHECKING:
    from router.pipeline.admission import Admitted
    from router.pipeline.opening import Opener
    from router.policy.decision import Decision
    from router.policy.table import PolicyStore
    from router.telemetry.tracing import Telemetry
    from router.upstream.client import Upstream
    from router.upstream.engine_stream import EngineAnswer, EngineRequest

log = logging.getLogger(f"qarr.{__name__}")


@dataclass(frozen=True, slots=True)
class Cascade:
    """Decides whether an answer that has begun is sent, or begun again at a higher precision."""

    opener: Opener
    policy: PolicyStore
    upstream: Upstream
    telemetry: Telemetry

    def watches(self, decision: Decision) -> bool:
        """Tell whether a decision's answer is checked: the policy chose its tier, and a higher one could serve it."""
        return (
            self.policy.check_enabled
            and decision.tier is not None
            and decision.tier is not decision.query.hint
            and not decision.query.require
            and self._threshold(decision.tier) is not None
            and _higher(decision) is not None
        )

    async def open(self, admitted: Admitted, request: EngineRequest, sent_at: float) -> EngineAnswer:
        """Open an answer, as ``Opener.open``; one at a higher precision if its tier is unsure of the first tokens."""
        answer = await self.opener.open(admitted, request, sent_at)
        if not request.wants_logprobs or not isinstance(answer, EngineStream):
            return answer
        decision = admitted.decision
        try:
            return await self._checked(decision, request, answer, sent_at)
        except EngineBroke as error:  # while it was held: nothing of it has been sent
            await answer.aclose(error)
            taken = {answer.replica_id}
            try:
                return await self.upstream.open(decision, request, sent_at, taken=taken, over_limit=True)
            except NoSlot:
                raise error from None
        except BaseException as error:
            await answer.aclose(error)
            raise

    async def _checked(
        self, decision: Decision, request: EngineRequest, answer: EngineStream, sent_at: float
    ) -> EngineAnswer:
        """Return the answer, of which nothing was sent, or a better one; close the other."""
        higher, threshold = _higher(decision), self._threshold(answer.tier)
        if higher is None or threshold is None or answer.tier is not decision.tier:
            return answer
        deadline = sent_at + self._slack_s(decision, higher)
        if time.monotonic() >= deadline:
            return answer
        sure = await answer.look_ahead(CHECK_TOKENS, deadline)
        if sure is None or sure >= threshold or time.monotonic() >= deadline:
            return answer
        try:
            async with asyncio.timeout(self._longest_wait_s(decision, sent_at)):
                there = replace(decision, tier=higher)
                better = await self.upstream.open(there, request, sent_at, elsewhere=False)
        except (UpstreamError, TimeoutError) as error:
            log.info("request %s: not escalated to %s: %s", request.request_id, higher, type(error).__name__)
            answer.release_held()
            return answer
        better.escalation = (
            f"escalated from {answer.tier}, which was unsure of its first tokens (mean log-probability {sure:.2f}, "
            f"{threshold:.2f} asked)"
        )
        try:
            self.telemetry.record_escalation(answer.tier, higher, sure, threshold)
            await answer.aclose()
        except BaseException as error:
            await better.aclose(error)
            raise
        return better

    def _threshold(self, tier: TierName) -> float | None:
        return None if tier is TierName.PRECISE else self.policy.check_threshold(tier)

    def _slack_s(self, decision: Decision, higher: TierName) -> float:
        """Return the seconds for which the first token may be held: the higher tier must still meet the bound on TTFT."""
        bound = decision.query.sla.ttft_ms
        if bound is None:
            return self.policy.check_wait_s
        predicted = decision.verdict(higher).predicted_ttft_ms or 0.0
        return min((bound - predicted) / 1000, self.policy.check_wait_s)

    def _longest_wait_s(self, decision: Decision, sent_at: float) -> float:
        """Return the seconds that the higher tier's first token may take before the held answer is sent instead."""
        bound = decision.query.sla.ttft_ms
        if bound is None:
            return 2 * self.policy.check_wait_s
        return max(sent_at + bound / 1000 - time.monotonic(), 0.0)


def _higher(decision: Decision) -> TierName | None:
    """Return the cheapest tier of a higher precision that meets the request's bounds; None: there is none."""
    assert decision.tier is not None
    rising = [report.tier for report in decision.verdicts]
    higher = set(rising[rising.index(decision.tier) + 1 :])
    found = [tier for tier in decision.fallbacks if tier in higher and decision.verdict(tier).meets]
    costs = {tier: decision.verdict(tier).cost for tier in found}
    return min(found, key=lambda tier: (costs[tier] is None, costs[tier] or 0.0, rising.index(tier)), default=None)
