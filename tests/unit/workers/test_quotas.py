"""Quotas in shared memory: the same as in one process, over several."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from router.auth.api_keys import Quota
from router.auth.quota import LocalLedger, Refund, Usage
from router.workers import quotas
from router.workers.quotas import SharedLedger

pytestmark = pytest.mark.anyio


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def ledgers(clock: Clock) -> tuple[SharedLedger, SharedLedger]:
    """Return the ledgers of two workers."""
    first = SharedLedger.make(2, clock)
    return SharedLedger(first.fd, 2, 1, clock), SharedLedger(first.fd, 2, 2, clock)


async def test_it_counts_as_one_process_would() -> None:
    """Whatever is taken and given back, by either worker, both ledgers answer as one in memory does."""
    import random

    chance, clock = random.Random(7), Clock()
    shared, local = ledgers(clock), LocalLedger(clock)
    quota, held = Quota(30, 2000, 6), []
    for step in range(3000):
        clock.now += chance.choice((0.0, 0.1, 0.4, 0.4, 30.0 if step % 50 == 0 else 0.0))
        key = chance.choice(("one", "two", "three"))
        if held and chance.random() < 0.5:
            worker, unused = held.pop(chance.randrange(len(held)))
            await shared[worker].give_back(unused)
            await local.give_back(unused)
            continue
        worker, tokens, slot = chance.randrange(2), chance.randrange(300), str(step)
        found, expected = (
            await shared[worker].take(key, quota, tokens, slot),
            await local.take(key, quota, tokens, slot),
        )
        assert found == expected
        if found.denied is None:
            unused = Refund(key, found.second, chance.choice((0, 1)), chance.randrange(-50, tokens + 1), slot)
            held.append((worker, unused))


async def test_a_worker_that_ends_frees_its_requests_at_once() -> None:
    """Its slots are free; what it has taken in the window stays taken."""
    clock = Clock()
    one, two = ledgers(clock)
    quota = Quota(10, None, 2)
    assert (await one.take("key", quota, 1, "a")).denied is None
    assert (await two.take("key", quota, 1, "b")).denied is None
    assert (await two.take("key", quota, 1, "c")).denied == "concurrent"
    SharedLedger(one.fd, 2, 0, clock).clear(1)
    usage: Usage = await two.take("key", quota, 1, "d")
    assert (usage.denied, usage.concurrent, usage.requests) == (None, 2, 3)


async def test_places_go_to_other_keys_when_they_are_all_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a key that was not used for a while is used again; without any, the request is an error."""
    monkeypatch.setattr(quotas, "KEYS", 3)
    clock = Clock()
    one, two = ledgers(clock)
    quota = Quota(5)
    for name in ("a", "b", "c"):
        await one.take(name, quota, 1, "")
    with pytest.raises(RuntimeError, match="more than 3 keys"):
        await two.take("d", quota, 1, "")
    await one.give_back(Refund("b", 1000, 1, 1, ""))
    clock.now += 100
    assert (await two.take("d", quota, 1, "")).requests == 1
    assert (await one.take("a", quota, 1, "")).concurrent == 2
    assert (await one.take("d", quota, 1, "")).requests == 2
    with pytest.raises(RuntimeError, match="more than 3 keys"):
        await one.take("b", quota, 1, "")


TAKE = """
import asyncio, sys
from router.auth.api_keys import Quota
from router.auth.quota import Refund
from router.workers.quotas import SharedLedger
row, fd, count = map(int, sys.argv[1:])
ledger = SharedLedger(fd, 2, row)
async def main():
    quota, admitted = Quota(requests_per_minute=30_000, tokens_per_minute=None, concurrent_requests=None), 0
    for number in range(count):
        usage = await ledger.take("key", quota, 3, "")
        if usage.denied is None:
            admitted += 1
            await ledger.give_back(Refund("key", usage.second, 0, 1, ""))
    print(admitted)
asyncio.run(main())
"""


async def test_100_000_requests_over_two_processes_are_counted_exactly() -> None:
    """As many are admitted as the quota allows: not one more, not one less."""
    first = SharedLedger.make(2)
    running = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", TAKE, str(row), str(first.fd), "50000", pass_fds=(first.fd,), stdout=subprocess.PIPE
        )
        for row in (1, 2)
    ]
    outputs = await asyncio.gather(*(process.communicate() for process in running))
    admitted = [int(out) for out, _ in outputs]
    usage = await first.take("key", Quota(requests_per_minute=30_000), 0, "")
    assert sum(admitted) == 30_000
    assert (usage.denied, usage.requests, usage.tokens) == ("requests", 30_000, 60_000)
    assert usage.concurrent == 0
