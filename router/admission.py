"""Who gets the next free place: a bounded queue in front of the replicas.

A request for which a tier has room goes on at once. Others wait, ordered by priority class, then by their key's requests in
flight (so that keys share what there is, however many requests each sends), then by the deadline of their first token. When
a place frees, the policy decides anew for those in front. What is not going to be in time is refused at once, with the
prediction as Retry-After; where the queue is full, the least urgent goes. Now and then a place goes to whoever has waited
longest, so none starves, and the urgent ones still get most of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from router.decision import Basis, Refusal
from router.keys import PRIORITIES
from router.policy import UNKNOWN_RETRY_S, decide
from router.problems import Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.decision import Decision
    from router.live_policy import LivePolicy
    from router.settings import AdmissionSettings
    from router.telemetry import Telemetry
    from tiers.fleet import Fleet, Lease

LOOKED_AT = 16  # in front of the queue when places free: those behind may fit as well, but looking must not cost much
TICK_S = 0.1  # places free by time as well: engines get ready, breakers half-open
MEMORY = 0.8  # weight of the past in the time between two places that freed
FORGET_S = 30.0  # what was learned of that time, after so long without a queue


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that may go on.

    Attributes:
        decision: As things stood when it was let in.
        lease: Its place.
        waited_ms: In the queue.
    """

    decision: Decision
    lease: Lease
    waited_ms: float = 0.0


@dataclass(slots=True, eq=False)
class _Waiting:
    """One request in the queue. Times are seconds by the monotonic clock."""

    decision: Decision
    key_id: str
    rank: int
    since: float
    deadline: float
    until: float
    turn: asyncio.Future[Admitted]


class Admission:
    """Lets requests in. One event loop owns it."""

    def __init__(self, fleet: Fleet, policy: LivePolicy, options: AdmissionSettings, telemetry: Telemetry) -> None:
        self._fleet, self._policy, self._options, self._telemetry = fleet, policy, options, telemetry
        self._waiting: list[_Waiting] = []
        self._in_flight: Counter[str] = Counter()
        self._scheduled = False
        self._granted = 0
        self._interval_s: float | None = None
        self._last_at = self._busy_since = 0.0
        fleet.on_room = self._schedule

    @property
    def most_waiting(self) -> int:
        """Return the requests that may be in the queue."""
        return self._options.max_waiting

    @property
    def waiting(self) -> int:
        """Return the requests in the queue."""
        return len(self._waiting)

    async def run(self) -> None:
        """Look at the queue now and then, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self._dispatch()

    async def enter(self, decision: Decision, key_id: str, priority: int) -> Admitted:
        """Return a place, at once or after a wait. Give it back by ``leave`` as well as by its lease.

        Args:
            decision: What the policy says now.
            key_id: Whose request it is.
            priority: In vLLM's numbers, lower first.

        Raises:
            Refused: No tier serves it, or none in time.
        """
        if decision.tier is None and (decision.refusal is not Refusal.AT_CAPACITY or not self._options.max_waiting):
            raise Refused(decision)
        self._dispatch()  # those who wait come first; what they leave is free
        admitted = self._place(decision, key_id, 0.0)
        if admitted is None and decision.tier is not None:  # others were quicker
            decision = decide(decision.query, self._fleet.snapshot(), self._policy.table)
            admitted = self._place(decision, key_id, 0.0)
        if admitted is not None:
            return admitted
        if decision.tier is None and decision.refusal is not Refusal.AT_CAPACITY:
            raise Refused(decision)
        with self._telemetry.admission() as span:
            admitted = await self._wait(self._enqueue(decision, key_id, priority))
            span.set_attribute("qarr.waited_ms", admitted.waited_ms)
            return admitted

    def leave(self, key_id: str) -> None:
        """Note that a request that was let in has ended."""
        self._in_flight[key_id] -= 1
        if self._in_flight[key_id] <= 0:
            del self._in_flight[key_id]

    def _enqueue(self, decision: Decision, key_id: str, priority: int) -> _Waiting:
        """Put a request into the queue.

        Raises:
            Refused: It would not be in time, or the queue is full of what is more urgent.
        """
        now, options = time.monotonic(), self._options
        rank = 0 if priority <= PRIORITIES["interactive"] else 1 if priority <= PRIORITIES["standard"] else 2
        longest = (options.max_wait_s.interactive, options.max_wait_s.standard, options.max_wait_s.batch)[rank]
        bound, quickest = decision.query.sla.ttft_ms, _quickest_s(decision)
        in_time = longest if bound is None else min(bound / 1000 - quickest, longest)
        deadline = now + (longest if bound is None else bound / 1000)
        entry = _Waiting(
            decision, key_id, rank, now, deadline, now + in_time, asyncio.get_running_loop().create_future()
        )
        order = sorted([*self._waiting, entry], key=self._order)
        wait_s = self._expected_wait_s(decision, order.index(entry))
        if wait_s > in_time:
            raise Refused(self._refusal(decision, f"its turn is expected in {wait_s:.1f} s, too late", wait_s))
        if len(order) > options.max_waiting:
            last = order[-1]
            refusal = self._refusal(last.decision, f"{options.max_waiting} requests are waiting already", wait_s)
            if last is entry:
                raise Refused(refusal)
            self._waiting.remove(last)
            last.turn.set_exception(Refused(refusal))
        if not self._waiting:
            self._busy_since = now
            if now - self._last_at > FORGET_S:
                self._interval_s = None
        self._waiting.append(entry)
        self._dispatch()
        return entry

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
                turn.result().lease.release()
                self.leave(entry.key_id)
            raise
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
        if turn.done():
            return turn.result()
        waited_s = time.monotonic() - entry.since
        wait_s = self._expected_wait_s(entry.decision, len(self._waiting))
        raise Refused(self._refusal(entry.decision, f"no place came free within {waited_s:.1f} s", wait_s))

    def _order(self, entry: _Waiting) -> tuple[int, int, float]:
        """Return a request's place in the order: class, its key's requests in flight, deadline."""
        return entry.rank, self._in_flight[entry.key_id], entry.deadline

    def _expected_wait_s(self, decision: Decision, ahead: int) -> float:
        """Predict the wait of a request with so many before it: by how places freed lately, else by what runs."""
        each = self._interval_s
        if each is None:
            each = decision.retry_after_s or UNKNOWN_RETRY_S
        return each * (ahead + 1)

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
        """Look at the queue soon: several places may free in one go."""
        if self._waiting and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Let in whom there is room for, in order."""
        self._scheduled = False
        now, passed_over = time.monotonic(), set[_Waiting]()
        while self._waiting and len(passed_over) < LOOKED_AT and self._fleet.has_room:
            oldest = self._granted % self._options.oldest_every == self._options.oldest_every - 1
            order: Callable[[_Waiting], Any] = _age if oldest else self._order
            entry = min((e for e in self._waiting if e not in passed_over), key=order, default=None)
            if entry is None:
                break
            decision = decide(entry.decision.query, self._fleet.snapshot(), self._policy.table)
            if decision.tier is None and decision.refusal is not Refusal.AT_CAPACITY:
                self._waiting.remove(entry)
                entry.turn.set_exception(Refused(decision))
                continue
            admitted = self._place(decision, entry.key_id, (now - entry.since) * 1000)
            if admitted is None:
                passed_over.add(entry)
                continue
            self._waiting.remove(entry)
            self._granted += 1
            self._note_place(now)
            entry.turn.set_result(admitted)

    def _note_place(self, now: float) -> None:
        gap = now - max(self._last_at, self._busy_since)
        self._last_at = now
        self._interval_s = gap if self._interval_s is None else MEMORY * self._interval_s + (1 - MEMORY) * gap

    def _place(self, decision: Decision, key_id: str, waited_ms: float) -> Admitted | None:
        if decision.tier is None:
            return None
        query = decision.query
        lease = self._fleet.lease(decision.tier, prompt_tokens=query.prompt_tokens, max_tokens=query.max_tokens)
        if lease is None:
            return None
        self._in_flight[key_id] += 1
        return Admitted(decision, lease, waited_ms)


def _age(entry: _Waiting) -> float:
    return entry.since


def _quickest_s(decision: Decision) -> float:
    """Return the shortest predicted time to the first token, in seconds; 0 where none is known."""
    known = [v.predicted_ttft_ms for v in decision.verdicts if v.predicted_ttft_ms is not None]
    return min(known, default=0.0) / 1000
