"""Fleets of several processes over one table: what one does, the others count. Two of them here share one process."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from router.workers.fleet import SharedFleet
from router.workers.state import Teller, follow
from router.workers.table import Table
from tiers.breaker import WINDOW, BreakerOptions, BreakerState
from tiers.errors import NotPossible
from tiers.replica import FleetOptions, Replica
from tiers.spec import ReplicaState, TierName, TierSpec
from tiers.speed import Seen, SpeedModel

if TYPE_CHECKING:
    from tiers.fleet import Lease

SPEC = TierSpec(TierName.FAST, 2048, 16, 4, urls=("http://engine",))
OPTIONS = FleetOptions(breaker=BreakerOptions(failures=3, pause_s=100.0, longest_pause_s=200.0))
SPEED = SpeedModel(20.0, 1.0, 10.0, 0.5, ttft_spread=0.3, tpot_spread=0.2)


class Router:
    """The fleets of a first process and its workers."""

    def __init__(self, workers: int = 2) -> None:
        self.table = Table.make(workers, 8)
        self.first = SharedFleet((SPEC,), "machine", OPTIONS, self.table)
        self.teller = Teller(self.first)
        self.replica = self.first.add(Replica("fast-0", SPEC, "http://engine", "", "model"))
        self.mark(ReplicaState.READY)
        self.workers = [self.worker(row) for row in range(1, workers + 1)]
        self.teller.news()

    def worker(self, row: int) -> SharedFleet:
        """Start a worker."""
        table = Table(self.table.fd, self.table.shape, row, self.table.bells)
        fleet = SharedFleet((), "machine", OPTIONS, table)
        follow(self.teller.all(), fleet)
        return fleet

    def mark(self, state: ReplicaState) -> None:
        """Change the replica's state."""
        self.replica.mark(state)
        self.first.changed(self.replica)

    def tell(self) -> None:
        """Tell the workers what has changed."""
        news = self.teller.news()
        if news is not None:
            for fleet in self.workers:
                follow(news, fleet)


def lease(fleet: SharedFleet, sequences: int = 1) -> Lease | None:
    """Take slots."""
    return fleet.lease(TierName.FAST, prompt_tokens=10, max_tokens=20, sequences=sequences)


def taken(fleet: SharedFleet) -> tuple[int, ...]:
    """Return what a fleet counts on its replica."""
    fleet.sync()
    return fleet.replicas[0].counts[:5]


def test_what_a_replica_serves_is_known_in_every_worker() -> None:
    """The first process asks the engine; headers and ``/tiers`` are made in any of them."""
    router = Router()
    router.first.note_precision(router.replica, "fp8")
    router.tell()
    for fleet in router.workers:
        assert fleet.spec(TierName.FAST).precision == fleet.replicas[0].spec.precision == "fp8"
        assert fleet.snapshot().tiers[0].replicas[0].precision == "fp8"


def test_a_limit_is_one_for_all_processes() -> None:
    """Slots that one worker has taken are taken for the other; freed ones are free for it."""
    router = Router()
    one, two = router.workers
    leases = [lease(one), lease(two), lease(one), lease(two)]
    assert all(leases)
    assert lease(one) is None
    assert lease(two) is None
    assert {taken(fleet)[:2] for fleet in (one, two, router.first)} == {(4, 4)}
    assert leases[0] is not None
    leases[0].release()
    assert lease(two, sequences=2) is None
    assert lease(two) is not None
    assert lease(one) is None


def test_a_request_that_wants_every_slot_waits_for_those_of_other_processes() -> None:
    """More sequences than there are slots need all of them free, wherever they are taken."""
    one, two = Router().workers
    held = lease(one)
    assert held is not None
    assert lease(two, sequences=9) is None
    held.release()
    assert lease(two, sequences=9) is not None


def test_all_counts_are_those_of_all_processes() -> None:
    """Load, tokens, answers and failures of both workers are in every process's snapshot, and end at nothing."""
    router = Router()
    one, two = router.workers
    first, second = lease(one), lease(two)
    assert first is not None
    assert second is not None
    first.first_token(30.0)
    first.produced(5)
    second.failed("EngineDied")
    first.finished(10.0, 7)
    first.release()
    second.release()
    one.flush()
    for fleet in (one, two, router.first):
        assert taken(fleet) == (0, 0, 0, 0, 0)
        replica = fleet.snapshot().tiers[0].replicas[0]
        assert (replica.served, replica.failed, fleet.replicas[0].generated) == (1, 1, 7)
        assert fleet.replicas[0].turnover._freed == pytest.approx(
            1.8, rel=0.01
        )  # each end fades the ones before by a fifth
    assert router.first.output_share == pytest.approx(one.output_share)


def test_progress_in_one_process_is_progress_in_all() -> None:
    """The process that watches an engine sees a token that a worker has got."""
    router = Router()
    held = lease(router.workers[0])
    assert held is not None
    router.first.sync()
    now = time.monotonic()
    assert router.replica.silence_s(now + 60) > 50
    held.produced()
    router.workers[0].flush()
    router.first.sync()
    assert router.replica.silence_s(time.monotonic()) < 10


def test_an_answer_in_one_process_is_progress_in_all() -> None:
    """Also the last one of a worker, while another worker's request hangs."""
    router = Router()
    one, two = router.workers
    hung, short = lease(one), lease(two)
    assert hung is not None
    assert short is not None
    before = time.monotonic()
    short.finished(1.0, 2)
    short.release()
    router.first.sync()
    now = time.monotonic()
    assert router.replica.silence_s(now) <= now - before
    assert router.replica.in_flight == 1


def test_a_drained_replica_gets_nothing_from_any_process() -> None:
    """From the moment at which the first process has marked it, before the workers are told why."""
    router = Router()
    router.mark(ReplicaState.DRAINING)
    assert [lease(fleet) for fleet in router.workers] == [None, None]
    router.mark(ReplicaState.READY)
    router.tell()
    assert all(lease(fleet) for fleet in router.workers)


def test_what_is_open_is_known_when_a_replica_is_drained() -> None:
    """The first process waits for a request that a worker has sent just before."""
    router = Router()
    held = lease(router.workers[1])
    assert held is not None
    router.mark(ReplicaState.DRAINING)
    assert router.replica.in_flight == 1
    held.release()
    router.first.sync()
    assert router.replica.in_flight == 0


def test_a_worker_that_ends_gives_its_slots_back() -> None:
    """Its present load is gone, what it has served stays, and its successor begins with the whole."""
    router = Router()
    one, two = router.workers
    done = lease(one)
    assert done is not None
    done.finished(10.0, 7)
    done.release()
    assert lease(one, sequences=3) is not None
    assert lease(two) is not None
    assert lease(two) is None
    router.table.clear(1)
    assert taken(two)[:2] == (1, 1)
    again = router.worker(1)
    assert taken(again)[:2] == taken(router.first)[:2] == (1, 1)
    assert [f.snapshot().tiers[0].replicas[0].served for f in (two, again, router.first)] == [1, 1, 1]
    assert lease(again, sequences=3) is not None
    assert lease(two) is None


def test_totals_of_a_worker_that_ends_are_no_news() -> None:
    """The prompts that it has sent in its life are not taken for prompts sent now, nor its ended requests."""
    router = Router()
    one, two = router.workers
    for _ in range(50):
        done = lease(one)
        assert done is not None
        done.finished(10.0, 7)
        done.release()
    left = one.lease(TierName.FAST, prompt_tokens=0, max_tokens=1)
    assert left is not None
    left.release()
    two.sync()
    replica = two.replicas[0]
    replica._prefill_rate, freed = 0.0, replica.turnover._freed
    router.table.clear(1)
    two.sync()
    assert replica._prefill_rate == 0
    assert replica.turnover._freed == pytest.approx(freed, rel=0.01)
    assert replica.served == 50


def test_a_breaker_is_one_for_all_processes() -> None:
    """Failures in a row count wherever they are seen; one probe goes out; its answer closes the breaker for all."""
    router = Router()
    one, two = router.workers
    for fleet in (one, two, one):
        failed = lease(fleet)
        assert failed is not None
        failed.failed("EngineDied")
        failed.release()
    breakers = [fleet.replicas[0].breaker for fleet in (one, two, router.first)]

    def sync() -> None:
        for fleet in (one, two, router.first):
            fleet.sync()

    sync()
    now = time.monotonic()
    assert {breaker.state(now) for breaker in breakers} == {BreakerState.OPEN}
    assert {breaker.opened for breaker in breakers} == {1}
    assert router.worker(1).replicas[0].breaker.state(now) is BreakerState.OPEN
    later = now + 150
    probe = breakers[0].begin(later)
    assert probe
    sync()
    assert not breakers[1].admits(later)
    breakers[0].succeeded(probe=probe)
    sync()
    assert all(breaker.admits(later) for breaker in breakers)
    for number in range(WINDOW + 1):
        breakers[number % 2].succeeded(probe=0)
    sync()
    assert len(breakers[1]._last) == WINDOW
    assert all(breakers[1]._last)


def test_speed_and_trends_are_common() -> None:
    """A measured speed reaches the workers, and an answer in one of them corrects the predictions of all."""
    router = Router()
    one, two = router.workers
    router.replica.measured(SPEED)
    router.tell()
    assert one.replicas[0].speed == two.replicas[0].speed == SPEED
    held = lease(one)
    assert held is not None
    held.first_token(300.0)
    held.release()
    one.flush()
    two.sync()
    router.first.sync()
    trend = one.replicas[0].ttft_trend
    assert trend.mean > 0
    assert two.replicas[0].ttft_trend == router.replica.ttft_trend == trend
    assert router.worker(2).replicas[0].ttft_trend == trend


def test_replicas_come_and_go() -> None:
    """A worker has the replicas that the first process has, in its order; places are used again."""
    router = Router()
    (one, _) = router.workers
    for number in range(1, 20):
        added = router.first.add(Replica(f"fast-{number}", SPEC, f"http://engine-{number}", "", "model"))
        added.mark(ReplicaState.READY)
        router.first.changed(added)
        router.tell()
        assert [r.id for r in one.replicas] == ["fast-0", f"fast-{number}"]
        held = one.lease(TierName.FAST, prompt_tokens=0, max_tokens=0, exclude=["fast-0"])
        assert held is not None
        router.first.remove(added)
        router.tell()
        assert [r.id for r in one.replicas] == ["fast-0"]
        held.release()
    assert taken(router.first) == (0, 0, 0, 0, 0)


def test_a_table_without_space_takes_no_more_replicas() -> None:
    """The error says how many there may be; one that leaves makes space."""
    router = Router()
    for number in range(1, 8):
        router.first.add(Replica(f"fast-{number}", SPEC, f"http://engine-{number}", "", "model"))
    with pytest.raises(NotPossible, match="several workers share at most 8 replicas"):
        router.first.add(Replica("fast-8", SPEC, "http://engine-8", "", "model"))
    assert len(router.first.replicas) == 8
    router.first.remove(router.first.replicas[3])
    router.first.add(Replica("fast-8", SPEC, "http://engine-8", "", "model"))
    router.tell()
    assert [r.id for r in router.workers[0].replicas] == [r.id for r in router.first.replicas]


def test_learned_answers_do_not_change_in_passing() -> None:
    """What a worker has noted of an answer is its own until it is told."""
    router = Router()
    router.workers[0].replicas[0].note_answer(Seen(1, 0, 0, 0.0, 5.0))
    assert router.workers[0].replicas[0].noted == 1
    assert router.replica.noted == 0


HAMMER = """
import pickle, random, sys, time
from router.workers.fleet import SharedFleet
from router.workers.state import follow
from router.workers.table import Table
from tiers.replica import FleetOptions
from tiers.spec import TierName
row, fd, until, shape, bells, news = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *pickle.loads(sys.stdin.buffer.read())
table = Table(fd, shape, row, bells)
fleet = SharedFleet((), "machine", FleetOptions(), table)
follow(news, fleet)
held, took, refused, most, until = [], 0, 0, 0, time.monotonic() + until
while time.monotonic() < until:
    lease = fleet.lease(TierName.FAST, prompt_tokens=1, max_tokens=1, sequences=random.choice((1, 1, 2)))
    if lease is None:
        refused += 1
    else:
        took, most = took + 1, max(most, fleet.replicas[0].slots)
        held.append(lease)
    while len(held) > 3 or (held and lease is None):
        held.pop(random.randrange(len(held))).release()
for lease in held:
    lease.release()
print(took, refused, most)
"""


async def _hammer(router: Router, killed: int = 0) -> list[list[int]]:
    """Let two processes compete; return what each has printed. One of them may be killed meanwhile."""
    table, given = router.table, pickle.dumps((router.table.shape, router.table.bells, router.teller.all()))
    running = {
        row: await asyncio.create_subprocess_exec(
            sys.executable, "-c", HAMMER, str(row), str(table.fd), "inf" if row == killed else "2",
            pass_fds=table.inherited, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for row in (1, 2)
    }  # fmt: skip
    outputs = asyncio.gather(*(process.communicate(given) for process in running.values()))
    if killed:
        async with asyncio.timeout(30):
            while min(table.changes()[1:3]) < 500:
                await asyncio.sleep(0.001)
        running[killed].kill()
        await running.pop(killed).wait()
        table.clear(killed)
    printed = [out.split() for out, _ in await outputs]
    assert {process.returncode for process in running.values()} == {0}
    return [[int(word) for word in words] for words in printed if words]


@pytest.mark.anyio
async def test_no_slot_is_taken_twice_by_processes_that_compete() -> None:
    """Two processes take and free slots as fast as they can; at no time are there more than the limit."""
    router = Router()
    for took, refused, most in await _hammer(router):
        assert took > 100
        assert refused > 100
        assert most == SPEC.max_in_flight
    assert taken(router.first) == (0, 0, 0, 0, 0)


@pytest.mark.anyio
@pytest.mark.parametrize("killed", [1, 2])
async def test_a_process_that_is_killed_meanwhile_leaves_no_slot_and_no_lock(killed: int) -> None:
    """The other one goes on, within the limit, and in the end every slot is free."""
    router = Router()
    ((took, _, most),) = await _hammer(router, killed)
    assert took > 100
    assert most == SPEC.max_in_flight
    assert taken(router.first) == (0, 0, 0, 0, 0)
    one = router.worker(killed)
    assert taken(one) == (0, 0, 0, 0, 0)
    assert lease(one, sequences=9) is not None
