"""Who gets the next free slot: a bounded queue in front of the replicas.

A request for which a tier has room goes on at once, unless somebody who waits could use that room. Others wait, ordered
by priority class, then by their key's slots (so that keys share what there is, however many requests each sends), then
by the deadline of their first token. When a slot frees, the policy decides anew for those in front. What is not going
to be in time is refused at once, with the prediction as Retry-After; where the queue is full, the least urgent goes.
Now and then a slot goes to whoever has waited longest, so none starves, and the urgent ones still get most of them.

Those who wait for the same slots stand in one line (``queue_lines``), and only the first of each is looked at: nobody
is hidden by others who wait for something else, and the work does not grow with how many wait. Who is first and needs
more than is free gets the replica that lacks least of it reserved: those behind would otherwise take each slot as it
frees.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

from router.pipeline.queue_lines import Entry, Lines
from router.policy.decide import UNKNOWN_RETRY_S, decide
from router.policy.decision import PRIORITIES, Basis, Refusal, Refused
from tiers.fleet import Demand
from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from router.auth.quota import Grant as QuotaGrant
    from router.policy.decision import Decision, Query
    from router.policy.table import PolicyStore
    from router.settings import AdmissionSettings
    from router.telemetry.tracing import Telemetry
    from tiers.fleet import Fleet, Lease
    from tiers.spec import TierSpec

TICK_S = 0.1  # slots free by time as well: engines get ready, breakers half-open


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may go on.

    Attributes:
        decision: As things stood when it was let in.
        lease: Its slot.
        waited_ms: In the queue.
    """

    decision: Decision
    lease: Lease
    waited_ms: float = 0.0


@dataclass(slots=True, eq=False)
class Grant:
    """Quota, slot and lease of one request. Release it exactly once, however the request ends.

    Attributes:
        quota: Taken in advance from the caller's; None: not yet, or the caller has no limits.
        slot: With the lease on a replica; None: not yet.
        used: Prompt and output tokens; None: the request was not served, and does not count.
    """

    _admission: Admission
    _key_id: str
    quota: QuotaGrant | None = None
    slot: Admitted | None = None
    used: int | None = None

    async def release(self) -> None:
        """Give all of it back; of the quota, what was not used."""
        if self.slot is not None:
            self.slot.lease.release()  # where no attempt has done so
            self._admission.leave(self._key_id, self.slot)
        if self.quota is not None:
            await self.quota.settle(self.used)


@dataclass(slots=True, eq=False)
class _Waiting(Entry):
    """One request in the queue.

    Attributes:
        until: When it gives up, in seconds by the monotonic clock.
        waits: Whether it was not let in at once.
    """

    decision: Decision
    demand: Demand
    until: float
    turn: asyncio.Future[Admitted]
    waits: bool = False


class Admission:
    """Lets requests in. One event loop owns it."""

    def __init__(self, fleet: Fleet, policy: PolicyStore, options: AdmissionSettings, telemetry: Telemetry) -> None:
        self._fleet, self._policy, self._options, self._telemetry = fleet, policy, options, telemetry
        self._held: Counter[str] = Counter()  # slots, by key
        self._lines: Lines[_Waiting] = Lines(self._held)
        self._granted: Counter[TierName] = Counter()
        self._scheduled = False
        fleet.on_capacity = self._schedule

    @property
    def most_waiting(self) -> int:
        """Return the requests that may be in the queue."""
        return self._options.max_waiting

    @property
    def waiting(self) -> int:
        """Return the requests in the queue."""
        return len(self._lines)

    def waiting_for(self, tier: TierName) -> int:
        """Return the requests in the queue that a tier could serve."""
        return self._lines.waiting_for(tier)

    async def run(self) -> None:
        """Look at the queue now and then, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self._dispatch()

    async def enter(self, decision: Decision, key_id: str, priority: int) -> Admitted:
        """Return a slot, at once or after a wait. Give it back by ``leave`` as well as by its lease.

        Args:
            decision: What the policy says now.
            key_id: Whose request it is.
            priority: In vLLM's numbers, lower first.

        Raises:
            Refused: No tier serves it, or none in time.
        """
        if decision.tier is None and (decision.refusal is not Refusal.AT_CAPACITY or not self._options.max_waiting):
            raise Refused(decision)
        if not self._lines:
            admitted = self._take_slot(decision, key_id, 0.0)
            if admitted is not None:
                return admitted
        entry = self._entry(decision, key_id, priority)
        self._lines.add(entry)
        self._dispatch()  # in its order: those before it come first, and what they leave is free
        if entry.turn.done():
            return entry.turn.result()
        entry.waits = True
        try:
            self._check(entry)
            with self._telemetry.admission() as span:
                admitted = await self._wait(entry)
                span.set_attribute("qarr.waited_ms", admitted.waited_ms)
                return admitted
        finally:
            self._lines.remove(entry)

    def leave(self, key_id: str, admitted: Admitted) -> None:
        """Note that a request that was let in has ended."""
        self._held[key_id] -= admitted.lease.sequences
        if self._held[key_id] <= 0:
            del self._held[key_id]

    def _entry(self, decision: Decision, key_id: str, priority: int) -> _Waiting:
        now, options, query = time.monotonic(), self._options, decision.query
        rank = 0 if priority <= PRIORITIES["interactive"] else 1 if priority <= PRIORITIES["standard"] else 2
        longest = (options.max_wait_s.interactive, options.max_wait_s.standard, options.max_wait_s.batch)[rank]
        bound, quickest = query.sla.ttft_ms, _quickest_s(decision)
        specs = self._specs(query)
        return _Waiting(
            key_id=key_id,
            rank=rank,
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
        """Return the tiers that could ever serve a request."""
        only = query.hint if query.require else None
        return [
            spec
            for spec in self._fleet.specs
            if spec.name in query.allowed
            and only in {None, spec.name}
            and query.prompt_tokens + query.max_tokens <= spec.max_model_len
        ]

    def _check(self, entry: _Waiting) -> None:
        """Refuse a request that would not be in time; where too many wait, the least urgent one.

        Raises:
            Refused: It is this one.
        """
        wait_s = self._expected_wait_s(entry)
        if entry.since + wait_s > entry.until:
            why = f"its turn is expected in {wait_s:.1f} s, too late"
            raise Refused(self._refusal(entry.decision, why, wait_s))
        if len(self._lines) > self._options.max_waiting:
            last = self._lines.last()
            why = f"{self._options.max_waiting} requests are waiting already"
            refused = Refused(self._refusal(last.decision, why, self._expected_wait_s(last)))
            if last is entry:
                raise refused
            self._lines.remove(last)
            last.turn.set_exception(refused)

    async def _wait(self, entry: _Waiting) -> Admitted:
        """Wait for a request's turn.

        Raises:
            Refused: It did not come in time.
        """
        turn = entry.turn
        try:
            await asyncio.wait({turn}, timeout=max(entry.until - time.monotonic(), 0))
        except asyncio.CancelledError:
            if turn.done() and turn.exception() is None:  # let in just as it gave up
                admitted = turn.result()
                self.leave(entry.key_id, admitted)
                admitted.lease.release()
            raise
        if turn.done():
            return turn.result()
        waited_s = time.monotonic() - entry.since
        why = f"no slot became free within {waited_s:.1f} s"
        raise Refused(self._refusal(entry.decision, why, self._expected_wait_s(entry)))

    def _expected_wait_s(self, entry: _Waiting) -> float:
        """Predict the wait of a request by the slots that come free, and by those that are wanted before it.

        On whichever of its tiers, together, it comes soonest: who waits for one of them as well is before it there.
        """
        rates = {tier: rate for tier in entry.tiers if (rate := self._fleet.freed_per_s(tier)) > 0}
        waits = [
            self._lines.slots_before(entry, tiers) / sum(rates[tier] for tier in tiers) for tiers in _subsets(rates)
        ]
        return min(waits, default=entry.decision.retry_after_s or UNKNOWN_RETRY_S)

    @staticmethod
    def _refusal(decision: Decision, why: str, wait_s: float) -> Decision:
        """Return a decision to refuse what the policy would have served, had there been room."""
        reason = why if decision.tier is not None else f"{why}; {decision.reason}"
        return replace(
            decision,
            tier=None,
            precision=None,
            fallbacks=(),
            reason=reason,
            basis=Basis.REFUSED,
            refusal=decision.refusal or Refusal.AT_CAPACITY,
            retry_after_s=wait_s,
        )

    def _schedule(self) -> None:
        """Look at the queue soon: several slots may free in one go."""
        if self._lines and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Let in whom there is room for, in order."""
        self._scheduled = False
        reserved, passed_over = set[str](), set[_Waiting]()
        while (entry := self._next(passed_over)) is not None:
            ready = any(self._fleet.is_ready(tier) for tier in entry.tiers)
            if not ready or self._fleet.has_capacity(entry.tiers, entry.demand, reserved):
                decision = decide(entry.decision.query, self._fleet.snapshot(reserved), self._policy.table)
                if self._settle(entry, decision, reserved):
                    continue
            passed_over.add(entry)
            nearest = self._fleet.nearest(entry.tiers, entry.demand, reserved)
            if nearest is not None:
                reserved.add(nearest)

    def _next(self, passed_over: Collection[_Waiting]) -> _Waiting | None:
        """Return who is to be looked at next: where it is a tier's turn to serve the oldest, that one first."""
        for tier in TierName:
            if self._for_the_oldest(tier):
                oldest = self._lines.oldest(tier)
                if oldest is not None and oldest not in passed_over:
                    return oldest
        return self._lines.first(passed_over)

    def _for_the_oldest(self, tier: TierName) -> bool:
        """Tell whether a tier's next slot goes to whoever has waited longest for it; until it is taken, it stays so."""
        return self._granted[tier] % self._options.oldest_every == self._options.oldest_every - 1

    def _settle(self, entry: _Waiting, decision: Decision, reserved: Collection[str]) -> bool:
        """Let a request in or refuse it, as was decided; False: it has to wait on."""
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
        if decision.tier is None:
            return None
        query = decision.query
        lease = self._fleet.lease(
            decision.tier,
            prompt_tokens=query.tokens_to_read,
            max_tokens=query.max_tokens,
            sequences=query.sequences,
            exclude=reserved,
        )
        if lease is None:
            return None
        self._held[key_id] += lease.sequences
        return Admitted(decision, lease, waited_ms)


def _subsets(tiers: Collection[TierName]) -> Iterator[tuple[TierName, ...]]:
    """Yield every choice of some of the tiers."""
    return (some for count in range(1, len(tiers) + 1) for some in combinations(tiers, count))


def _quickest_s(decision: Decision) -> float:
    """Return the shortest predicted time to the first token, in seconds; 0 where none is known."""
    known = [v.predicted_ttft_ms for v in decision.verdicts if v.predicted_ttft_ms is not None]
    return min(known, default=0.0) / 1000
