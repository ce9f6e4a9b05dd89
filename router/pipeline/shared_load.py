"""Routers in front of the same engines share their load and the engines' limits over Redis.

Twice a second each router reports its load on every replica (known by its URL) and its waiting requests, and gets the
others' load, the replicas that their circuit breakers spare, and its share of each replica's limit. One Redis script does
that, so that no two routers get the same slot. Shares are max-min fair, and the slots of an uneven rest rotate. A share
falls at once, and rises only by what the others have given up. Each router may always have one request on a replica.
Requests do not wait for Redis.

A router that dies is forgotten after three seconds. While Redis does not know every router (it is new, was emptied, or was
not reached), no share rises until every router has had time to report. While Redis does not serve, each router keeps at most
an equal part of each limit, and rises to it slot by slot as far as the engines' gauges show capacity. Times are Redis'.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from pydantic_core import to_json

from router.redis_link import (
    REDIS_TIMEOUT_S,
    UNAVAILABLE,
    RedisLink,
    RedisState,
    RedisUse,
    Script,
    outage,
)
from router.upstream.json_object import read_json
from tiers.background import Faults
from tiers.fleet import Fleet
from tiers.replica import PeerLoad, Replica, SlotShare
from tiers.spec import ReplicaStatus, TierName

log = logging.getLogger(f"qarr.{__name__}")
REPORT_INTERVAL_S = 0.5  # between two reports
WAITING_POLL_S = 0.1  # between two checks for requests that have begun to wait
REPORT_LIFETIME_S = 3  # a report counts for so long
RISE_INTERVAL_S = 1.0  # without Redis, between two rises by a slot
ROTATION_INTERVAL_S = 5  # between two rotations of the slots of an uneven rest
ROUTERS = "qarr:{fleet}:routers:2"  # the number changes with what is in it


class _Report(NamedTuple):
    """This router's load on a replica and its need, in the order in which the script reads them."""

    slots: int
    prompt_tokens: int
    output_tokens: int
    kv_tokens: int
    spared_s: float  # its circuit breaker spares the replica for so long
    wanted_slots: int  # slots taken, and those that waiting requests could use
    share: int  # this router's present share of the limit
    limit: int  # the replica's whole limit


class _Answer(NamedTuple):
    """The script's answer about a replica, in its order."""

    share: float
    routers: float  # how many have the replica, this one among them
    peer_slots: float
    peer_prompt_tokens: float
    peer_output_tokens: float
    peer_kv_tokens: float
    spared_s: float  # the other routers' circuit breakers spare the replica for so long


class SharedLoad:
    """One router's side. ``run`` until cancelled, then ``aclose``. Without ``redis_url`` nothing is shared."""

    def __init__(
        self,
        redis_url: str,
        fleet: Fleet,
        waiting_for: Callable[[TierName], int] = lambda _tier: 0,
    ) -> None:
        self._fleet = fleet
        self._waiting_for = waiting_for
        self._id = secrets.token_hex(8)
        self._link = RedisLink(redis_url, RedisUse.LOAD, 1) if redis_url else None
        self._faults = Faults(repeats=False)
        # how many routers have a replica, by its URL, this one among them
        self._routers: dict[str, int] = {}
        # URLs of the replicas of which Redis gave this router, in answer to its last report, at least as many slots as the
        # report asked for.
        self._sufficient_urls: set[str] = set()
        self._has_exchanged = False  # whether an exchange has ever succeeded
        self._rise_at = 0.0
        if self._link is not None:
            self._exchange = Script.read(__file__, "exchange_load.lua")
            self._give_all(SlotShare(0, math.inf))

    @property
    def redis(self) -> RedisState | None:
        """Return whether Redis shares load; None: there is none."""
        return None if self._link is None else self._link.state

    @property
    def _is_cut_off(self) -> bool:
        return self._link is not None and not self._link.state.serves

    async def run(self) -> None:
        while self._link is not None:
            try:
                if await self.exchange():
                    # another router may wait for what this one gives up
                    await self.exchange()
            except UNAVAILABLE as error:
                self._lose(error)
            except Exception as error:  # noqa: BLE001  no error may end the sharing for good
                self._faults.log(
                    error, "the load could not be reported to Redis; trying again"
                )
                self._lose(error)
            await self._pause()

    async def aclose(self) -> None:
        if self._link is None:
            return
        try:
            await self._link.execute("HDEL", ROUTERS, self._id)
        except UNAVAILABLE:
            log.info("redis does not answer: this router's entry expires by itself")
        await self._link.aclose()

    async def exchange(self) -> bool:
        """Report this router's load, and apply the answer; return whether a share has fallen. See ``UNAVAILABLE``."""
        assert self._link is not None
        began = time.monotonic()
        reports = self._reports(began)
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            # if Redis' clock was set ahead, the first attempt is in vain, but learns its time
            for _ in range(2):
                until = await self._link.time_at(began + REDIS_TIMEOUT_S, ROUTERS)
                args = [
                    self._id,
                    until,
                    REPORT_LIFETIME_S,
                    ROTATION_INTERVAL_S,
                    to_json(reports),
                ]
                redis_time, content = await self._link.run(
                    self._exchange, [ROUTERS], args
                )
                self._link.learn_time(float(redis_time), ROUTERS)
                if content:
                    break
            else:
                raise TimeoutError
        are_all_known, answers = read_json(content.encode())
        self._has_exchanged = True
        if self._is_cut_off:
            self._link.state.recover()
            log.info("redis serves again: the load of other routers counts again")
        return self._take(
            reports, answers, began + REPORT_LIFETIME_S, are_all_known=are_all_known
        )

    def _reports(self, now: float) -> dict[str, _Report]:
        """Return this router's load on each replica, by the replica's URL."""
        return {
            replica.url: self._report(replica, now) for replica in self._fleet.replicas
        }

    def _report(self, replica: Replica, now: float) -> _Report:
        state = replica.state
        share = replica.whole_limit
        if replica.others.share is not None:
            share = replica.others.share.holds(now)
        return _Report(
            slots=state.slots,
            prompt_tokens=state.prompt_tokens,
            output_tokens=replica.output_tokens,
            kv_tokens=state.kv.held - replica.others.counted.kv_tokens,
            spared_s=replica.breaker.own_wait_s(now),
            wanted_slots=state.slots + self._waiting(replica, now),
            share=share,
            limit=replica.whole_limit,
        )

    def _waiting(self, replica: Replica, now: float) -> int:
        """Return how many waiting requests a replica could serve."""
        takes_requests = (
            replica.state.status is ReplicaStatus.READY and replica.breaker.admits(now)
        )
        return self._waiting_for(replica.spec.name) if takes_requests else 0

    def _take(
        self,
        reports: dict[str, _Report],
        answers: dict[str, list[float]],
        until: float,
        *,
        are_all_known: bool,
    ) -> bool:
        """Apply the script's answers to reports, valid until a monotonic time; return whether a share has fallen.

        ``are_all_known``: Redis knows every router, so that the number of routers may fall.
        """
        has_fallen = False
        has_risen = False
        self._sufficient_urls.clear()
        for replica in self._fleet.replicas:
            if replica.url not in answers:  # it was added meanwhile
                continue
            answer = _Answer(*answers[replica.url])
            report = reports[replica.url]
            self._note(replica, answer, until)
            routers = answer.routers
            if not are_all_known:
                routers = max(routers, self._routers.get(replica.url, 1))
            self._routers[replica.url] = int(routers)
            if report.wanted_slots <= answer.share:
                self._sufficient_urls.add(replica.url)
            has_fallen = has_fallen or answer.share < report.share
            has_risen = has_risen or answer.share > report.share
        self._fleet.first_share = SlotShare(0, math.inf)
        self._routers = {
            url: count for url, count in self._routers.items() if url in answers
        }
        if has_risen:
            self._fleet.on_capacity()
        return has_fallen

    def _note(self, replica: Replica, answer: _Answer, until: float) -> None:
        """Let a replica know this router's share of it, and what the other routers do there."""
        peers = PeerLoad(
            slots=int(answer.peer_slots),
            prompt_tokens=int(answer.peer_prompt_tokens),
            output_tokens=int(answer.peer_output_tokens),
            kv_tokens=int(answer.peer_kv_tokens),
        )
        replica.note_share(SlotShare(int(answer.share), until))
        replica.note_peers(peers, until)
        if answer.spared_s > 0:
            replica.breaker.adopt(time.monotonic(), answer.spared_s)

    def _lose(self, error: BaseException) -> None:
        """Go on without Redis: take what is surely this router's part of each limit, and rise from there."""
        assert self._link is not None
        now = time.monotonic()
        has_served = self._link.state.serves
        self._link.state.fail(error)
        if has_served:
            self._rise_at = now + REPORT_LIFETIME_S
            log.warning(
                "redis does not serve (%s): each router goes by its own view",
                outage(error),
            )
        if not self._has_exchanged:  # no other router is known here
            self._give_all(None)
            return
        may_rise = now >= self._rise_at
        if may_rise:
            self._rise_at = now + RISE_INTERVAL_S
        for replica in self._fleet.replicas:
            if replica.others.share is not None:
                slots = self._slots_without_redis(
                    replica, replica.others.share, may_rise=may_rise
                )
                replica.note_share(SlotShare(slots, now + REPORT_LIFETIME_S))

    def _slots_without_redis(
        self, replica: Replica, share: SlotShare, *, may_rise: bool
    ) -> int:
        """Return this router's slots on a replica: an equal part of its limit, reached slot by slot from the last share."""
        # A replica that is not known from an exchange may have as many routers as any other.
        most_routers = max(self._routers.values(), default=1)
        routers = self._routers.get(replica.url, most_routers)
        equal_part = max(replica.whole_limit // routers, 1)
        if routers == 1:
            return equal_part
        gauges = replica.state.gauges
        has_capacity = (
            gauges is None or gauges.running + gauges.waiting < replica.whole_limit
        )
        slots = share.slots
        if may_rise and has_capacity:
            slots += 1
        return min(slots, equal_part)

    def _give_all(self, share: SlotShare | None) -> None:
        self._fleet.first_share = share
        for replica in self._fleet.replicas:
            replica.note_share(share)

    async def _pause(self) -> None:
        """Wait until the next report is due: soon if requests have begun to wait for slots that others may have."""
        until = time.monotonic() + REPORT_INTERVAL_S
        while time.monotonic() < until:
            await asyncio.sleep(WAITING_POLL_S)
            self._fleet.refresh(time.monotonic())
            if not self._is_cut_off and any(
                map(self._needs_more, self._fleet.replicas)
            ):
                return

    def _needs_more(self, replica: Replica) -> bool:
        """Tell whether requests wait for a replica whose share was sufficient at the last report, and is used up."""
        was_sufficient = replica.url in self._sufficient_urls
        is_used_up = replica.state.limit <= replica.state.slots < replica.whole_limit
        return (
            was_sufficient
            and is_used_up
            and self._waiting(replica, time.monotonic()) > 0
        )
