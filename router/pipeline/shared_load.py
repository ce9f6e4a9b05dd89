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

from pydantic_core import to_json

from router.redis_link import REDIS_TIMEOUT_S, UNAVAILABLE, RedisLink, RedisState, RedisUse, Script, outage
from router.upstream.json_object import read_json
from tiers.background import Faults
from tiers.fleet import Fleet
from tiers.replica import PeerLoad, Replica, Share
from tiers.spec import ReplicaStatus, TierName

log = logging.getLogger(f"qarr.{__name__}")
EVERY_S = 0.5
LOOK_S = 0.1  # between two checks for requests that have begun to wait
LIFE_S = 3  # for which a report counts
RISE_S = 1.0  # without Redis, between two rises by a slot
TURN_S = 5  # after which the slots of an uneven rest rotate
ROUTERS = "qarr:{fleet}:routers:2"  # the number changes with what is in it


class SharedLoad:
    """One router's side. ``run`` until cancelled, then ``aclose``. Without ``redis_url`` it shares with none."""

    def __init__(self, redis_url: str, fleet: Fleet, waiting_for: Callable[[TierName], int] = lambda _tier: 0) -> None:
        self._fleet, self._waiting_for = fleet, waiting_for
        self._id = secrets.token_hex(8)
        self._link = RedisLink(redis_url, RedisUse.LOAD, 1) if redis_url else None
        self._faults = Faults(repeats=False)
        self._routers: dict[str, int] = {}  # by replica, this one among them
        self._content: set[str] = set()  # replicas whose share met the need in the last report
        self._known = False  # whether an exchange has ever succeeded
        self._rise_at = 0.0
        if self._link is not None:
            self._exchange = Script.read(__file__, "exchange_load.lua")
            self._give_all(Share(0, math.inf))

    @property
    def redis(self) -> RedisState | None:
        """Return whether Redis shares load; None: there is none."""
        return None if self._link is None else self._link.state

    @property
    def _lost(self) -> bool:
        return self._link is not None and not self._link.state.serves

    async def run(self) -> None:
        while self._link is not None:
            try:
                if await self.exchange():
                    await self.exchange()  # another router may wait for what this one gives up
            except UNAVAILABLE as error:
                self._lose(error)
            except Exception as error:  # noqa: BLE001  no error may end the sharing for good
                self._faults.log(error, "the load could not be reported to Redis; trying again")
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
        own = self._own(began)
        async with asyncio.timeout(REDIS_TIMEOUT_S):
            for _ in range(2):  # if Redis' clock was set ahead, the second attempt knows
                until = await self._link.time_at(began + REDIS_TIMEOUT_S, ROUTERS)
                args = [self._id, until, LIFE_S, TURN_S, to_json(own)]
                shown, told = await self._link.run(self._exchange, [ROUTERS], args)
                self._link.learn_time(float(shown), ROUTERS)
                if told:
                    break
            else:
                raise TimeoutError
        settled, replicas = read_json(told.encode())
        self._known = True
        if self._lost:
            self._link.state.recover()
            log.info("redis serves again: the load of other routers counts again")
        return self._take(own, replicas, began + LIFE_S, settled=settled)

    def _own(self, now: float) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for replica in self._fleet.replicas:
            state, share, limit = replica.state, replica.others.share, replica.whole_limit
            kv_tokens = state.kv.held - replica.others.counted.kv_tokens
            held = [state.slots, state.prompt_tokens, replica.output_tokens, kv_tokens]
            wanted = state.slots + self._waiting(replica, now)
            shares = [limit if share is None else share.holds(now), limit]
            found[replica.url] = [*held, replica.breaker.own_wait_s(now), wanted, *shares]
        return found

    def _waiting(self, replica: Replica, now: float) -> int:
        able = replica.state.status is ReplicaStatus.READY and replica.breaker.admits(now)
        return self._waiting_for(replica.spec.name) if able else 0

    def _take(
        self, own: dict[str, list[float]], replicas: dict[str, list[float]], until: float, *, settled: bool
    ) -> bool:
        """Apply the script's answer to an own report, valid until a monotonic time; return whether a share has fallen."""
        now, fallen, risen = time.monotonic(), False, False
        self._content.clear()
        for replica in self._fleet.replicas:
            if replica.url not in replicas:  # it was added meanwhile
                continue
            share, routers, *others, spared_s = replicas[replica.url]
            *_, wanted, had, _limit = own[replica.url]
            replica.note_share(Share(int(share), until))
            replica.note_peers(PeerLoad(*map(int, others)), until)
            if spared_s > 0:
                replica.breaker.adopt(now, spared_s)
            self._routers[replica.url] = int(routers if settled else max(routers, self._routers.get(replica.url, 1)))
            if wanted <= share:
                self._content.add(replica.url)
            fallen, risen = fallen or share < had, risen or share > had
        self._fleet.first_share = Share(0, math.inf)
        self._routers = {url: count for url, count in self._routers.items() if url in replicas}
        if risen:
            self._fleet.on_capacity()
        return fallen

    def _lose(self, error: BaseException) -> None:
        assert self._link is not None
        now, served = time.monotonic(), self._link.state.serves
        self._link.state.fail(error)
        if served:
            self._rise_at = now + LIFE_S
            log.warning("redis does not serve (%s): each router goes by its own view", outage(error))
        if not self._known:  # no router is known here
            self._give_all(None)
            return
        rises = now >= self._rise_at
        if rises:
            self._rise_at = now + RISE_S
        most = max(self._routers.values(), default=1)
        for replica in self._fleet.replicas:
            if (share := replica.others.share) is None:
                continue
            routers, gauges = self._routers.get(replica.url, most), replica.state.gauges
            part = max(replica.whole_limit // routers, 1)
            free = gauges is None or gauges.running + gauges.waiting < replica.whole_limit
            slots = share.slots + (rises and free)
            replica.note_share(Share(part if routers == 1 else min(slots, part), now + LIFE_S))

    def _give_all(self, share: Share | None) -> None:
        self._fleet.first_share = share
        for replica in self._fleet.replicas:
            replica.note_share(share)

    async def _pause(self) -> None:
        """Wait until the next report is due: soon if requests have begun to wait for slots that others may have."""
        until = time.monotonic() + EVERY_S
        while time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
            self._fleet.refresh(time.monotonic())
            if not self._lost and any(map(self._needs_more, self._fleet.replicas)):
                return

    def _needs_more(self, replica: Replica) -> bool:
        beyond = replica.url in self._content and replica.state.limit <= replica.state.slots < replica.whole_limit
        return beyond and self._waiting(replica, time.monotonic()) > 0
