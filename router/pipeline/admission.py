"""Gives free slots to requests: a bounded queue in front of the replicas.

A request that fits a tier is admitted at once, unless a waiting request could use the same capacity. Others wait, ordered by
priority class, then by the slots that their key holds, then by the deadline of their first token. When a slot becomes free,
the policy decides again for the first ones. A request that would be late is refused at once, with the predicted wait as
Retry-After; a full queue refuses the least urgent one. Every nth slot goes to the request that has waited longest.

Requests for the same slots form one queue (``request_queue``), of which only the first is examined: none blocks one that
waits for other slots. If it needs more than is free, the replica that lacks least is reserved for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from itertools import combinations

from msgspec import Struct
from msgspec.structs import replace

from router.pipeline.request import class_of
from router.pipeline.request_queue import RequestQueue, Waiter
from router.pipeline.settings import AdmissionSettings
from router.policy.decide import UNKNOWN_RETRY_S, decide
from router.policy.decision import PRIORITIES, Basis, Decision, Query, Refusal, RequestRefusedError
from router.policy.table import PolicyStore
from router.telemetry.record import JOURNEY
from router.upstream.client import lease_for
from tiers.fleet import Demand, Fleet, Lease
from tiers.spec import TierName, TierSpec

OLDEST_EVERY = 8  # one slot in so many goes to the request that has waited longest
TICK_S = 0.1  # slots free by time as well: engines get ready, breakers half-open


class Slot(Struct, frozen=True):
    decision: Decision  # the one that admitted it
    lease: Lease
    waited_ms: float = 0.0  # the request's time in the queue


@dataclass(slots=True, eq=False)
class _Queued(Waiter):
    decision: Decision
    demand: Demand
    until: float  # when it gives up, in seconds by the monotonic clock
    turn: asyncio.Future[Slot]  # done when it is admitted or refused
    waits: bool = False  # it was not admitted at once


class Admission:
    """Admits requests. One event loop owns it."""

    def __init__(self, fleet: Fleet, policy: PolicyStore, options: AdmissionSettings) -> None:
        self._fleet, self._policy, self._options = fleet, policy, options
        self._held: Counter[str] = Counter()  # slots, by key
        self._queue: RequestQueue[_Queued] = RequestQueue(self._held)
        self._granted: Counter[TierName] = Counter()
        self._scheduled = False
        fleet.on_capacity = self._schedule

    def use(self, options: AdmissionSettings) -> None:
        self._options = options
        self._schedule()

    @property
    def most_waiting(self) -> int:
        return self._options.max_waiting

    @property
    def waiting(self) -> int:
        return self._queue.count

    def waiting_for(self, tier: TierName) -> int:
        return self._queue.waiting_for(tier)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._dispatch()

    async def enter(self, decision: Decision, key_id: str, priority: int) -> Slot:
        """Return a slot, at once or after a wait; give it back by ``leave``. ``priority`` is in vLLM's numbers, lower first.

        ``RequestRefusedError``: no tier serves the request, or none in time.
        """
        if decision.tier is None and (decision.refusal is not Refusal.AT_CAPACITY or not self._options.max_waiting):
            raise RequestRefusedError(decision)
        if not self._queue.count:
            admitted = self._take_slot(decision, key_id, 0.0)
            if admitted is not None:
                return admitted
        queued = self._queued(decision, key_id, priority)
        self._queue.add(queued)
        self._dispatch()  # in the queue's order: those before it come first
        if queued.turn.done():
            return queued.turn.result()
        queued.waits = True
        try:
            self._check(queued)
            began = time.monotonic()
            try:
                return await self._wait(queued)
            finally:
                if (journey := JOURNEY.get()) is not None:
                    journey.waits.append((began, time.monotonic()))
        finally:
            self._queue.remove(queued)

    def leave(self, key_id: str, slot: Slot) -> None:
        """Give back an admitted request's slot, unless an attempt has released the lease already."""
        slot.lease.release()
        self._held[key_id] -= slot.lease.sequences
        if self._held[key_id] <= 0:
            del self._held[key_id]

    def _queued(self, decision: Decision, key_id: str, priority: int) -> _Queued:
        now, query, name = time.monotonic(), decision.query, class_of(priority)
        longest: float = getattr(self._options.max_wait_s, name)
        known = [each.times.ttft_ms for each in decision.choice.estimates if each.times is not None]
        bound, quickest = query.sla.ttft_ms, min(known, default=0.0) / 1000
        specs = self._specs(query)
        return _Queued(
            key_id=key_id,
            rank=PRIORITIES[name],
            since=now,
            deadline=now + (longest if bound is None else bound / 1000),
            tiers=frozenset(spec.name for spec in specs),
            slots=min(query.sequences, max((spec.max_in_flight for spec in specs), default=1)),
            long=query.tokens_to_read > self._fleet.options.long_prompt_tokens,
            decision=decision,
            demand=Demand(query.tokens_to_read, query.max_tokens, query.sequences),
            until=now + (longest if bound is None else min(bound / 1000 - quickest, longest)),
            turn=asyncio.get_running_loop().create_future(),
        )

    def _specs(self, query: Query) -> list[TierSpec]:
        only = query.hint if query.require else None
        return [
            spec
            for spec in self._fleet.specs
            if query.allows(spec.name)
            and query.takes(spec)
            and only in {None, spec.name}
            and query.prompt_tokens + query.max_tokens <= spec.max_model_len
        ]

    def _check(self, queued: _Queued) -> None:
        """Refuse a request that would be late; if the queue is full, the least urgent one. Raise if it is this one."""
        wait_s = self._expected_wait_s(queued)
        if queued.since + wait_s > queued.until:
            raise _refused(queued, f"its turn is expected in {wait_s:.1f} s, too late", wait_s)
        if self._queue.count > self._options.max_waiting:
            last = self._queue.last()
            why = f"{self._options.max_waiting} requests are waiting already"
            refused = _refused(last, why, self._expected_wait_s(last))
            if last is queued:
                raise refused
            self._queue.remove(last)
            last.turn.set_exception(refused)

    async def _wait(self, queued: _Queued) -> Slot:
        """Wait for a request's turn; ``RequestRefusedError``: it is refused meanwhile, or waits for too long."""
        turn = queued.turn
        try:
            await asyncio.wait({turn}, timeout=max(queued.until - time.monotonic(), 0))
        except asyncio.CancelledError:
            if turn.done() and turn.exception() is None:  # admitted just before it was cancelled
                self.leave(queued.key_id, turn.result())
            raise
        if turn.done():
            return turn.result()
        why = f"no slot became free within {time.monotonic() - queued.since:.1f} s"
        raise _refused(queued, why, self._expected_wait_s(queued))

    def _expected_wait_s(self, queued: _Queued) -> float:
        """Predict a request's wait: slots wanted up to and with it, over slots that become free per second.

        Those are counted over each set of its tiers, since others wait for some of them only; the shortest wait counts.
        """
        rates = {tier: rate for tier in queued.tiers if (rate := self._fleet.freed_per_s(tier)) > 0}
        subsets = (some for count in range(1, len(rates) + 1) for some in combinations(rates, count))
        waits = [self._queue.slots_before(queued, tiers) / sum(rates[tier] for tier in tiers) for tiers in subsets]
        return min(waits, default=queued.decision.retry_after_s or UNKNOWN_RETRY_S)

    def _schedule(self) -> None:
        if self._queue.count and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        reserved, passed_over = set[str](), set[_Queued]()
        while (queued := self._next(passed_over)) is not None:
            ready = any(self._fleet.is_ready(tier) for tier in queued.tiers)
            if not ready or self._fleet.has_capacity(queued.tiers, queued.demand, reserved):
                policy = self._policy
                query = queued.decision.query
                snapshot = self._fleet.snapshot(reserved, query.prefix)
                decision = decide(query, snapshot, policy.table)
                if self._settle(queued, decision, reserved):
                    continue
            passed_over.add(queued)
            nearest = self._fleet.nearest(queued.tiers, queued.demand, reserved)
            if nearest is not None:
                reserved.add(nearest)

    def _next(self, passed_over: Collection[_Queued]) -> _Queued | None:
        """Return the request to examine next: the oldest of a tier whose next slot is for the oldest, else the first."""
        for tier in filter(self._for_the_oldest, [spec.name for spec in self._fleet.specs]):
            oldest = self._queue.oldest(tier)
            if oldest is not None and oldest not in passed_over:
                return oldest
        return self._queue.first(passed_over)

    def _for_the_oldest(self, tier: TierName) -> bool:
        """Tell whether a tier's next slot goes to the request that has waited longest; true until that takes it."""
        return self._granted[tier] % OLDEST_EVERY == OLDEST_EVERY - 1

    def _settle(self, queued: _Queued, decision: Decision, reserved: Collection[str]) -> bool:
        if decision.tier is None and decision.refusal is not Refusal.AT_CAPACITY:
            self._queue.remove(queued)
            queued.turn.set_exception(RequestRefusedError(decision))
            return True
        waited_ms = 0.0 if not queued.waits else (time.monotonic() - queued.since) * 1000
        admitted = self._take_slot(decision, queued.key_id, waited_ms, reserved)
        if admitted is None:
            return False
        tier = admitted.lease.replica.spec.name
        if not self._for_the_oldest(tier) or self._queue.oldest(tier) is queued:
            self._granted[tier] += 1
        self._queue.remove(queued)
        queued.turn.set_result(admitted)
        return True

    def _take_slot(
        self, decision: Decision, key_id: str, waited_ms: float, reserved: Collection[str] = ()
    ) -> Slot | None:
        """Lease a slot on the decision's tier, apart from reserved replicas; None: there is none."""
        if decision.tier is None:
            return None
        chosen = decision.choice.chosen
        found = None if chosen is None or chosen.tier is not decision.tier else chosen.found
        lease = lease_for(self._fleet, decision.tier, decision.query, reserved, found=found)
        if lease is None:
            return None
        self._held[key_id] += lease.sequences
        return Slot(decision, lease, waited_ms)


def _refused(queued: _Queued, why: str, wait_s: float) -> RequestRefusedError:
    decision = queued.decision
    reason = why if decision.tier is not None else f"{why}; {decision.reason}"
    return RequestRefusedError(
        replace(
            decision,
            tier=None,
            reason=reason,
            basis=Basis.REFUSED,
            refusal=decision.refusal or Refusal.AT_CAPACITY,
            retry_after_s=wait_s,
        )
    )
