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
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import combinations

from msgspec import Struct
from msgspec.structs import replace

from router.pipeline.request import class_of
from router.pipeline.request_queue import RequestQueue, Waiter
from router.pipeline.settings import AdmissionSettings
from router.policy.decide import UNKNOWN_RETRY_S, decide
from router.policy.decision import (
    PRIORITIES,
    Basis,
    Decision,
    Refusal,
    RequestRefusedError,
    RoutingQuery,
)
from router.policy.table import PolicyStore
from router.telemetry.record import JOURNEY
from router.upstream.upstream import lease_for
from tiers.choice import Demand
from tiers.fleet import Fleet, Lease
from tiers.spec import TierName, TierSpec

OLDEST_EVERY = 8  # one slot in so many goes to the request that has waited longest
# slots also become free by time alone: engines get ready, breakers half-open
DISPATCH_EVERY_S = 0.1


class Grant(Struct, frozen=True):
    """What admission gives a request. A lease belongs to the fleet, which knows neither decisions nor the queue."""

    decision: Decision  # the one that admitted it
    lease: Lease
    waited_ms: float = 0.0  # the request's time in the queue


@dataclass(slots=True, eq=False)
class _QueuedRequest(Waiter):
    decision: Decision
    gives_up_at: float  # in seconds by the monotonic clock
    turn: asyncio.Future[Grant]  # done when it is admitted or refused
    has_waited: bool = False  # it was not admitted at once


class Admission:
    """Admits requests. One event loop owns it."""

    def __init__(
        self, fleet: Fleet, policy: PolicyStore, options: AdmissionSettings
    ) -> None:
        self._fleet = fleet
        self._policy = policy
        self._options = options
        self._held: Counter[str] = Counter()  # slots, by key
        self._queue: RequestQueue[_QueuedRequest] = RequestQueue(self._held)
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
            await asyncio.sleep(DISPATCH_EVERY_S)
            if self._queue.count:
                self._dispatch()

    async def enter(self, decision: Decision, key_id: str, priority: int) -> Grant:
        """Return a slot, at once or after a wait; give it back by ``leave``. ``priority`` is in vLLM's numbers, lower first.

        ``RequestRefusedError``: no tier serves the request, or none in time.
        """
        may_wait = (
            decision.refusal is Refusal.AT_CAPACITY and self._options.max_waiting > 0
        )
        if decision.tier is None and not may_wait:
            raise RequestRefusedError(decision)
        if not self._queue.count:
            grant = self._take_slots(decision, key_id, waited_ms=0.0)
            if grant is not None:
                return grant
        queued = self._queued(decision, key_id, priority)
        self._queue.add(queued)
        try:
            # in the queue's order: requests that wait already come first
            self._dispatch()
            if queued.turn.done():
                return queued.turn.result()
            queued.has_waited = True
            self._check(queued)
            return await self._wait(queued)
        finally:
            self._queue.remove(queued)

    def leave(self, key_id: str, grant: Grant) -> None:
        """Give back an admitted request's slot, unless an attempt has released the lease already."""
        grant.lease.release()
        self._held[key_id] -= grant.lease.sequences
        if self._held[key_id] <= 0:
            del self._held[key_id]

    def _queued(self, decision: Decision, key_id: str, priority: int) -> _QueuedRequest:
        now = time.monotonic()
        query = decision.query
        priority_class = class_of(priority)
        max_wait_s: float = getattr(self._options.max_wait_s, priority_class)
        first_token_within_s = max_wait_s
        gives_up_after_s = max_wait_s
        if query.sla.ttft_ms is not None:
            first_token_within_s = query.sla.ttft_ms / 1000
            gives_up_after_s = min(
                first_token_within_s - _shortest_ttft_s(decision), max_wait_s
            )
        specs = self._specs(query)
        most_slots = max([spec.max_in_flight for spec in specs], default=1)
        return _QueuedRequest(
            key_id=key_id,
            rank=PRIORITIES[priority_class],
            since=now,
            deadline=now + first_token_within_s,
            tiers=frozenset([spec.name for spec in specs]),
            slots=min(query.sequences, most_slots),
            long=query.tokens_to_read > self._fleet.options.long_prompt_tokens,
            decision=decision,
            gives_up_at=now + gives_up_after_s,
            turn=asyncio.get_running_loop().create_future(),
        )

    def _specs(self, query: RoutingQuery) -> list[TierSpec]:
        """Return the tiers that a request may wait for."""
        # ``router.accounting.charging`` chooses tiers in much the same way, but an unsuitable tier does other harm there. It
        # reserves the highest price of its tiers, so one that the request itself excludes (``takes``) only makes the
        # reservation larger, and one without engines (``absent``) would set a price for what does not exist. Here an
        # excluded tier would let the request wait for slots that it cannot take. A tier without engines does no harm: it
        # never has a free slot.
        required_tier = query.hint if query.require else None
        return [
            spec
            for spec in self._fleet.specs
            if query.allows(spec.name)
            and query.takes(spec)
            and required_tier in {None, spec.name}
            and query.prompt_tokens + query.max_tokens <= spec.max_model_len
        ]

    def _check(self, queued: _QueuedRequest) -> None:
        """Refuse a request that would be late; if the queue is full, the least urgent one. Raise if it is this one."""
        wait_s = self._expected_wait_s(queued)
        if queued.since + wait_s > queued.gives_up_at:
            raise _refused(
                queued, f"its turn is expected in {wait_s:.1f} s, too late", wait_s
            )
        if self._queue.count > self._options.max_waiting:
            last = self._queue.last()
            why = f"{self._options.max_waiting} requests are waiting already"
            refused = _refused(last, why, self._expected_wait_s(last))
            if last is queued:
                raise refused
            self._queue.remove(last)
            last.turn.set_exception(refused)

    async def _wait(self, queued: _QueuedRequest) -> Grant:
        """Wait for a request's turn, and note the wait in its journey.

        ``RequestRefusedError``: it is refused meanwhile, or waits for too long.
        """
        began = time.monotonic()
        try:
            return await self._await_turn(queued)
        finally:
            journey = JOURNEY.get()
            if journey is not None:
                journey.waits.append((began, time.monotonic()))

    async def _await_turn(self, queued: _QueuedRequest) -> Grant:
        """Wait until a request is admitted or refused, or gives up."""
        turn = queued.turn
        try:
            await asyncio.wait(
                {turn}, timeout=max(queued.gives_up_at - time.monotonic(), 0)
            )
        except asyncio.CancelledError:
            # A slot may have been granted before the cancellation, or after it but before this task ran again. Either way
            # ``turn`` holds it by now. Nothing is granted later: the request leaves the queue before this task waits again.
            if turn.done() and turn.exception() is None:
                self.leave(queued.key_id, turn.result())
            raise
        if turn.done():
            return turn.result()
        why = f"no slot became free within {time.monotonic() - queued.since:.1f} s"
        raise _refused(queued, why, self._expected_wait_s(queued))

    def _expected_wait_s(self, queued: _QueuedRequest) -> float:
        """Predict a request's wait: slots wanted up to and with it, over slots that become free per second.

        Both are counted for each set of its tiers, since others wait for some of them only. The shortest wait counts.
        """
        freed_per_s = self._slots_freed_per_s(queued.tiers)
        waits_s = []
        for tiers in _nonempty_subsets(freed_per_s):
            slots_wanted = self._queue.slots_before(queued, tiers)
            waits_s.append(slots_wanted / sum([freed_per_s[tier] for tier in tiers]))
        return min(waits_s, default=queued.decision.retry_after_s or UNKNOWN_RETRY_S)

    def _slots_freed_per_s(self, tiers: Collection[TierName]) -> dict[TierName, float]:
        """Return how many slots become free per second, by tier, without tiers where none do."""
        rates = {tier: self._fleet.freed_per_s(tier) for tier in tiers}
        return {tier: rate for tier, rate in rates.items() if rate > 0}

    def _schedule(self) -> None:
        if self._queue.count and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Admit or refuse waiting requests, in the queue's order, for as long as a new decision can change anything."""
        self._scheduled = False
        reserved_replica_ids = set[str]()
        passed_over = set[_QueuedRequest]()
        while (queued := self._next(passed_over)) is not None:
            demand = self._demand_of(queued)
            if self._can_be_settled(
                queued, demand, reserved_replica_ids
            ) and self._settle(queued, reserved_replica_ids):
                continue
            passed_over.add(queued)
            nearest_replica_id = self._fleet.nearest(
                queued.tiers, demand, reserved_replica_ids
            )
            if nearest_replica_id is not None:
                reserved_replica_ids.add(nearest_replica_id)

    def _next(self, passed_over: Collection[_QueuedRequest]) -> _QueuedRequest | None:
        """Return the request to examine next: the oldest of a tier whose next slot is for the oldest, else the first."""
        for spec in self._fleet.specs:
            if not self._is_for_the_oldest(spec.name):
                continue
            oldest = self._queue.oldest(spec.name)
            if oldest is not None and oldest not in passed_over:
                return oldest
        return self._queue.first(passed_over)

    def _is_for_the_oldest(self, tier: TierName) -> bool:
        """Tell whether a tier's next slot goes to the request that has waited longest; true until that takes it."""
        return self._granted[tier] % OLDEST_EVERY == OLDEST_EVERY - 1

    def _demand_of(self, queued: _QueuedRequest) -> Demand:
        """Return what a waiting request needs, with the output that is expected by now."""
        query = queued.decision.query
        return self._fleet.demand(
            query.tokens_to_read, query.max_tokens, query.sequences
        )

    def _can_be_settled(
        self,
        queued: _QueuedRequest,
        demand: Demand,
        reserved_replica_ids: Collection[str],
    ) -> bool:
        """Tell whether a new decision may end a request's wait: there is room for it, or no tier of it is ready."""
        is_any_ready = any(self._fleet.is_ready(tier) for tier in queued.tiers)
        return not is_any_ready or self._fleet.has_capacity(
            queued.tiers, demand, reserved_replica_ids
        )

    def _settle(
        self, queued: _QueuedRequest, reserved_replica_ids: Collection[str]
    ) -> bool:
        """Decide again for a waiting request, and admit or refuse it; return False if it has to wait on."""
        query = queued.decision.query
        snapshot = self._fleet.snapshot(reserved_replica_ids, query.prefix)
        decision = decide(query, snapshot, self._policy.table)
        if decision.tier is None and decision.refusal is not Refusal.AT_CAPACITY:
            self._queue.remove(queued)
            queued.turn.set_exception(RequestRefusedError(decision))
            return True
        waited_ms = 0.0
        if queued.has_waited:
            waited_ms = (time.monotonic() - queued.since) * 1000
        grant = self._take_slots(
            decision,
            queued.key_id,
            waited_ms,
            reserved_replica_ids=reserved_replica_ids,
        )
        if grant is None:
            return False
        self._count_granted(grant.lease.replica.spec.name, queued)
        self._queue.remove(queued)
        queued.turn.set_result(grant)
        return True

    def _count_granted(self, tier: TierName, queued: _QueuedRequest) -> None:
        """Count a tier's slot, unless it was the oldest request's turn and another one has got the slot."""
        if not self._is_for_the_oldest(tier) or self._queue.oldest(tier) is queued:
            self._granted[tier] += 1

    def _take_slots(
        self,
        decision: Decision,
        key_id: str,
        waited_ms: float,
        reserved_replica_ids: Collection[str] = (),
    ) -> Grant | None:
        """Lease a slot on the decision's tier, apart from reserved replicas; None: there is none."""
        if decision.tier is None:
            return None
        candidate = None
        chosen = decision.comparison.chosen
        if chosen is not None and chosen.tier is decision.tier:
            candidate = chosen.candidate
        lease = lease_for(
            self._fleet,
            decision.tier,
            decision.query,
            exclude=reserved_replica_ids,
            candidate=candidate,
        )
        if lease is None:
            return None
        self._held[key_id] += lease.sequences
        return Grant(decision, lease, waited_ms)


def _shortest_ttft_s(decision: Decision) -> float:
    """Return the shortest predicted time to a first token; 0 if no tier's is known."""
    ttfts_ms = [
        estimate.times.ttft_ms
        for estimate in decision.comparison.estimates
        if estimate.times is not None
    ]
    return min(ttfts_ms, default=0.0) / 1000


def _nonempty_subsets(tiers: Collection[TierName]) -> Iterator[tuple[TierName, ...]]:
    for size in range(1, len(tiers) + 1):
        yield from combinations(tiers, size)


def _refused(queued: _QueuedRequest, why: str, wait_s: float) -> RequestRefusedError:
    decision = queued.decision
    reason = why
    if decision.tier is None:
        reason = f"{why}; {decision.reason}"
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
