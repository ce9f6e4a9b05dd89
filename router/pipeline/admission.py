"""Gives free slots to requests: a bounded queue in front of the replicas.

A request that fits a tier is admitted at once, unless a waiting request could use the same capacity. Others wait,
ordered by priority class, then by the slots that their key holds (so that keys share the fleet, however many requests
each sends), then by the deadline of their first token. When a slot becomes free, the policy decides again for the first
ones. A request that would be late is refused at once, with the predicted wait as Retry-After; a full queue refuses the
least urgent one. Every nth slot goes to the request that has waited longest, so that none starves.

Requests for the same slots form one line (``queue_lines``), and only the first of each line is examined: no request
blocks one that waits for other slots, and the work does not grow with the queue. If the first one needs more than is
free, the replica that lacks least is reserved for it; otherwise those behind it would take each slot that becomes free.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

from router.pipeline.queue_lines import Entry, Lines
from router.pipeline.request import class_of
from router.policy.decide import UNKNOWN_RETRY_S, decide
from router.policy.decision import PRIORITIES, Basis, Refusal, Refused
from router.telemetry.record import FREE, JOURNEY
from router.upstream.client import lease_for
from tiers.fleet import Demand

if TYPE_CHECKING:
    from collections.abc import Collection

    from router.accounting.reservations import Reservation
    from router.auth.quota import QuotaGrant
    from router.pipeline.settings import AdmissionSettings
    from router.policy.decision import Decision, Query
    from router.policy.table import PolicyStore
    from router.telemetry.record import Cost
    from tiers.fleet import Fleet, Lease
    from tiers.spec import TierName, TierSpec

OLDEST_EVERY = 8  # one slot in so many goes to the request that has waited longest
TICK_S = 0.1  # slots free by time as well: engines get ready, breakers half-open


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request with a slot.

    Attributes:
        decision: The one that admitted it.
        lease: Its slot.
        waited_ms: Its time in the queue.
    """

    decision: Decision
    lease: Lease
    waited_ms: float = 0.0


@dataclass(slots=True, eq=False)
class Grant:
    """Quota, budget, slot and lease of one request. Release it exactly once, however the request ends.

    Attributes:
        quota: Taken in advance; None: not yet, or the caller has no limits.
        slot: None: not yet.
        used: Prompt and output tokens; None: the request was not served, and does not count.
        budget: Reserved; None: not yet, or the caller has none.
        cost: What is charged instead.
    """

    _admission: Admission
    _key_id: str
    quota: QuotaGrant | None = None
    slot: Admitted | None = None
    used: int | None = None
    budget: Reservation | None = None
    cost: Cost = FREE

    async def release(self) -> None:
        """Give back all of it; of quota and budget, what was not used."""
        if self.slot is not None:
            self._admission.leave(self._key_id, self.slot)
        try:
            if self.quota is not None:
                await self.quota.settle(self.used)
        finally:  # also when this is cancelled
            if self.budget is not None:
                await self.budget.settle(self.cost)


@dataclass(slots=True, eq=False)
class _Waiting(Entry):
    """One request in the queue."""

    decision: Decision
    demand: Demand
    until: float  # when it gives up, in seconds by the monotonic clock
    turn: asyncio.Future[Admitted]  # done when it is admitted or refused
    waits: bool = False  # it was not admitted at once


class Admission:
    """Admits requests. One event loop owns it."""

    def __init__(
        self,
        fleet: Fleet,
        policy: PolicyStore,
        options: AdmissionSettings,
    ) -> None:
        self._fleet, self._policy, self._options = fleet, policy, options
        self._held: Counter[str] = Counter()  # slots, by key
        self._lines: Lines[_Waiting] = Lines(self._held)
        self._granted: Counter[TierName] = Counter()
        self._scheduled = False
        fleet.on_capacity = self._schedule

    def take(self, options: AdmissionSettings) -> None:
        """Take new settings; requests that wait keep their deadlines."""
        self._options = options
        self._schedule()

    @property
    def most_waiting(self) -> int:
        return self._options.max_waiting

    @property
    def waiting(self) -> int:
        return self._lines.count

    def waiting_for(self, tier: TierName) -> int:
        """Return the number of waiting requests that a tier could serve."""
        return self._lines.waiting_for(tier)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._dispatch()

    async def enter(self, decision: Decision, key_id: str, priority: int) -> Admitted:
        """Return a slot, at once or after a wait; give it back by ``leave``. ``priority`` is in vLLM's numbers, lower first.

        Raises:
            Refused: No tier serves the request, or none in time.
        """
        if decision.tier is None and (decision.refusal is not Refusal.AT_CAPACITY or not self._options.max_waiting):
            raise Refused(decision)
        if not self._lines.count:
            admitted = self._take_slot(decision, key_id, 0.0)
            if admitted is not None:
                return admitted
        entry = self._entry(decision, key_id, priority)
        self._lines.add(entry)
        self._dispatch()  # in the queue's order: those before it come first
        if entry.turn.done():
            return entry.turn.result()
        entry.waits = True
        try:
            self._check(entry)
            began = time.monotonic()
            try:
                return await self._wait(entry)
            finally:
                if (journey := JOURNEY.get()) is not None:
                    journey.waits.append((began, time.monotonic()))
        finally:
            self._lines.remove(entry)

    def leave(self, key_id: str, admitted: Admitted) -> None:
        """Give back an admitted request's slot, unless an attempt has released the lease already."""
        admitted.lease.release()
        self._held[key_id] -= admitted.lease.sequences
        if self._held[key_id] <= 0:
            del self._held[key_id]

    def _entry(self, decision: Decision, key_id: str, priority: int) -> _Waiting:
        now, query, name = time.monotonic(), decision.query, class_of(priority)
        longest: float = getattr(self._options.max_wait_s, name)
        known = [each.times.ttft_ms for each in decision.choice.estimates if each.times is not None]
        bound, quickest = query.sla.ttft_ms, min(known, default=0.0) / 1000
        specs = self._specs(query)
        return _Waiting(
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

    def _check(self, entry: _Waiting) -> None:
        """Refuse a request that would be late; if the queue is full, the least urgent one. Raise if it is this one."""
        wait_s = self._expected_wait_s(entry)
        if entry.since + wait_s > entry.until:
            raise _refused(entry, f"its turn is expected in {wait_s:.1f} s, too late", wait_s)
        if self._lines.count > self._options.max_waiting:
            last = self._lines.last()
            why = f"{self._options.max_waiting} requests are waiting already"
            refused = _refused(last, why, self._expected_wait_s(last))
            if last is entry:
                raise refused
            self._lines.remove(last)
            last.turn.set_exception(refused)

    async def _wait(self, entry: _Waiting) -> Admitted:
        """Wait for a request's turn; raise ``Refused`` if it is refused meanwhile, or its turn does not come in time."""
        turn = entry.turn
        try:
            await asyncio.wait({turn}, timeout=max(entry.until - time.monotonic(), 0))
        except asyncio.CancelledError:
            if turn.done() and turn.exception() is None:  # admitted just before it was cancelled
                self.leave(entry.key_id, turn.result())
            raise
        if turn.done():
            return turn.result()
        why = f"no slot became free within {time.monotonic() - entry.since:.1f} s"
        raise _refused(entry, why, self._expected_wait_s(entry))

    def _expected_wait_s(self, entry: _Waiting) -> float:
        """Predict a request's wait: slots wanted up to and with it, over slots that become free per second.

        Those are counted over each set of its tiers, since others wait for some of them only; the shortest wait counts.
        """
        rates = {tier: rate for tier in entry.tiers if (rate := self._fleet.freed_per_s(tier)) > 0}
        subsets = (some for count in range(1, len(rates) + 1) for some in combinations(rates, count))
        waits = [self._lines.slots_before(entry, tiers) / sum(rates[tier] for tier in tiers) for tiers in subsets]
        return min(waits, default=entry.decision.retry_after_s or UNKNOWN_RETRY_S)

    def _schedule(self) -> None:
        """Examine the queue soon: several slots may become free together."""
        if self._lines.count and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._scheduled = False
        reserved, passed_over = set[str](), set[_Waiting]()
        while (entry := self._next(passed_over)) is not None:
            ready = any(self._fleet.is_ready(tier) for tier in entry.tiers)
            if not ready or self._fleet.has_capacity(entry.tiers, entry.demand, reserved):
                policy = self._policy
                query = entry.decision.query
                snapshot = self._fleet.snapshot(reserved, query.prefix)
                decision = decide(query, snapshot, policy.table)
                if self._settle(entry, decision, reserved):
                    continue
            passed_over.add(entry)
            nearest = self._fleet.nearest(entry.tiers, entry.demand, reserved)
            if nearest is not None:
                reserved.add(nearest)

    def _next(self, passed_over: Collection[_Waiting]) -> _Waiting | None:
        """Return the request to examine next: the oldest of a tier whose next slot is for the oldest, else the first."""
        for tier in filter(self._for_the_oldest, [spec.name for spec in self._fleet.specs]):
            oldest = self._lines.oldest(tier)
            if oldest is not None and oldest not in passed_over:
                return oldest
        return self._lines.first(passed_over)

    def _for_the_oldest(self, tier: TierName) -> bool:
        """Tell whether a tier's next slot goes to the request that has waited longest; true until that takes it."""
        return self._granted[tier] % OLDEST_EVERY == OLDEST_EVERY - 1

    def _settle(self, entry: _Waiting, decision: Decision, reserved: Collection[str]) -> bool:
        """Admit or refuse a request as decided; return False if it has to go on waiting."""
        if decision.tier is None and decision.refusal is not Refusal.AT_CAPACITY:
            self._lines.remove(entry)
            entry.turn.set_exception(Refused(decision))
            return True
        waited_ms = 0.0 if not entry.waits else (time.monotonic() - entry.since) * 1000
        admitted = self._take_slot(decision, entry.key_id, waited_ms, reserved)
        if admitted is None:
            return False
        tier = admitted.lease.replica.spec.name
        if not self._for_the_oldest(tier) or self._lines.oldest(tier) is entry:
            self._granted[tier] += 1
        self._lines.remove(entry)
        entry.turn.set_result(admitted)
        return True

    def _take_slot(
        self, decision: Decision, key_id: str, waited_ms: float, reserved: Collection[str] = ()
    ) -> Admitted | None:
        """Lease a slot on the decision's tier, apart from reserved replicas; None: there is none."""
        if decision.tier is None:
            return None
        lease = lease_for(self._fleet, decision.tier, decision.query, reserved)
        if lease is None:
            return None
        self._held[key_id] += lease.sequences
        return Admitted(decision, lease, waited_ms)


def _refused(entry: _Waiting, why: str, wait_s: float) -> Refused:
    decision = entry.decision
    reason = why if decision.tier is not None else f"{why}; {decision.reason}"
    return Refused(
        replace(
            decision,
            tier=None,
            reason=reason,
            basis=Basis.REFUSED,
            refusal=decision.refusal or Refusal.AT_CAPACITY,
            retry_after_s=wait_s,
        )
    )
