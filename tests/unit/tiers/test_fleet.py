"""Leases and counters: what goes out comes back, however it ends."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from tiers.breaker import BreakerState
from tiers.choice import CorrectedTimes, Demand, best_candidate, takes
from tiers.choice import candidate_at as expected_of
from tiers.fleet import Fleet, Lease
from tiers.replica import FOREIGN_POLLS, PeerLoad, Replica, SlotShare
from tiers.snapshot import FleetLoad, Gauges, KvCache, ReplicaState, load_of
from tiers.spec import ReplicaStatus, TemplateTokens, TierName, TierSpec
from tiers.speed import (
    ALWAYS_MS,
    HALF_LIFE_S,
    PREFILL_MEMORY_MS,
    AnswerSample,
    ReplicaLoad,
    SpeedModel,
    Trend,
)

FAST = TierName.FAST


def make_fleet(replicas: int = 2, slots: int = 2) -> Fleet:
    spec = TierSpec(FAST, 2048, max_num_seqs=16, max_in_flight=slots)
    fleet = Fleet((spec,))
    for number in range(replicas):
        fleet.add(
            Replica(f"fast-{number}", spec, "u", "", "m", status=ReplicaStatus.READY)
        )
    return fleet


def test_least_loaded_replica_is_leased() -> None:
    """Load is outstanding tokens: one long request weighs more than two short ones."""
    fleet = make_fleet(slots=9)
    long = fleet.lease(FAST, prompt_tokens=1000, max_tokens=100)
    assert long is not None
    others = [fleet.lease(FAST, prompt_tokens=10, max_tokens=10) for _ in range(3)]
    assert {lease.replica.id for lease in others if lease} == {"fast-1"}


def test_places_are_bounded_and_come_back() -> None:
    """A replica never has more than its places out; a released place is free again, and only once."""
    fleet = make_fleet(replicas=1, slots=2)
    leases = [fleet.lease(FAST, prompt_tokens=5, max_tokens=7) for _ in range(3)]
    assert leases[2] is None
    first = leases[0]
    assert first is not None
    first.release()
    first.release()
    assert fleet.replicas[0].state.in_flight == 1
    assert fleet.lease(FAST, prompt_tokens=5, max_tokens=7) is not None


def test_counters_return_to_zero_on_every_path() -> None:
    """Tokens counted down on the way and the rest at the end add up to what was leased."""
    fleet = make_fleet(replicas=1, slots=5)
    for produced in (0, 3, 50):
        lease = fleet.lease(FAST, prompt_tokens=20, max_tokens=10)
        assert lease is not None
        with lease, pytest.raises(RuntimeError):
            lease.first_token()
            lease.produced(produced)
            raise RuntimeError
    replica = fleet.replicas[0]
    assert replica.state.in_flight == 0
    assert replica.state.prompt_tokens == 0
    assert replica.output_tokens == 0


@pytest.mark.parametrize(
    "state", [s for s in ReplicaStatus if s is not ReplicaStatus.READY]
)
def test_only_ready_replicas_are_leased(state: ReplicaStatus) -> None:
    fleet = make_fleet(replicas=1)
    fleet.replicas[0].mark(state)
    assert fleet.lease(FAST, prompt_tokens=1, max_tokens=1) is None
    assert fleet.snapshot().tier(FAST).status is state


def test_tried_replicas_are_left_out() -> None:
    """A retry does not go back to a replica that just failed."""
    fleet = make_fleet()
    lease = fleet.lease(FAST, prompt_tokens=1, max_tokens=1, exclude={"fast-0"})
    assert lease is not None
    assert lease.replica.id == "fast-1"


def test_snapshots_do_not_change() -> None:
    """A snapshot is a copy: later leases are not in it."""
    fleet = make_fleet()
    before = fleet.snapshot()
    fleet.lease(FAST, prompt_tokens=1, max_tokens=1)
    assert before.tiers[0].replicas[0].in_flight == 0
    assert fleet.snapshot().tiers[0].replicas[0].in_flight == 1


def loads(fleet: Fleet) -> list[ReplicaLoad]:
    snapshot = fleet.snapshot()
    tier = snapshot.tiers[0]
    return [
        load_of(r, left, snapshot.load)
        for r, left in zip(tier.replicas, tier.output_tokens, strict=True)
    ]


def candidate_at(
    fleet: Fleet, position: int, prompt_tokens: int, output_tokens: int = 0
) -> CorrectedTimes:
    snapshot = fleet.snapshot()
    found = expected_of(
        snapshot.tiers[0],
        position,
        Demand(prompt_tokens, output_tokens),
        snapshot.load,
    ).times
    assert found is not None
    return found


def test_a_decisions_replica_is_taken_while_it_is_as_it_was() -> None:
    """Not once it has changed, the decision is old, or it was tried already: then the best one is looked for."""
    fleet = make_fleet(replicas=3)
    request = Demand(5, 7.0)
    snapshot = fleet.snapshot()
    second = expected_of(snapshot.tiers[0], 1, request, snapshot.load)
    offers = (
        (second, ()),
        (second, ()),
        (structs.replace(second, snapshot_at=0.0), ()),
        (second, {"fast-1"}),
    )
    taken = [
        fleet.lease(
            FAST, prompt_tokens=5, max_tokens=7, exclude=exclude, candidate=found
        )
        for found, exclude in offers
    ]
    assert [lease and lease.replica.id for lease in taken] == [
        "fast-1",
        "fast-0",
        "fast-2",
        "fast-0",
    ]


def _profiled(step: float = 10.0) -> SpeedModel:
    return SpeedModel(
        100,
        1,
        step_base_ms=step,
        step_ms_per_sequence=1,
        profiled=True,
        ttft_spread=0.1,
        tpot_spread=0.1,
    )


def test_predictions_follow_what_is_seen() -> None:
    """Answers that take twice as long as predicted move the prediction that way, and make it less sure of itself."""
    fleet = make_fleet(replicas=1)
    replica = fleet.replicas[0]
    replica.measured(_profiled())
    before = candidate_at(fleet, 0, 100)
    for _ in range(3):
        lease = fleet.lease(FAST, prompt_tokens=100, max_tokens=10)
        assert lease is not None
        assert lease.predicted is not None
        lease.first_token(2 * lease.predicted.ttft_ms)
        lease.finished(2 * lease.predicted.tpot_ms, 5)
        lease.release()
    after = candidate_at(fleet, 0, 100)
    assert before is not None
    assert after is not None
    assert before.ttft_ms * 1.3 < after.ttft_ms < before.ttft_ms * 2
    assert before.tpot_ms * 1.3 < after.tpot_ms < before.tpot_ms * 2
    assert after.ttft_spread > before.ttft_spread


def test_what_was_seen_is_forgotten() -> None:
    """A tier that is passed over gets its measured speed back: by half each half-life, spread and all."""
    trend = Trend(1.0, 1.0, at=0.0)
    half = trend.faded(HALF_LIFE_S, spread=0.1)
    assert half.mean == pytest.approx(0.5)
    assert half.variance == pytest.approx((1 + 0.01) / 2)
    assert trend.faded(100 * HALF_LIFE_S, spread=0.1).mean == pytest.approx(0)


def test_share_of_output_is_learned() -> None:
    """Answers that end long before max_tokens lower what later requests are expected to produce."""
    fleet = make_fleet(replicas=1)
    for _ in range(100):
        lease = fleet.lease(FAST, prompt_tokens=1, max_tokens=100)
        assert lease is not None
        lease.finished(10, 25)
        lease.release()
    assert fleet.snapshot().output_share == pytest.approx(0.25, abs=0.01)


def test_requests_of_others_count_once_the_gauges_insist() -> None:
    """An engine that runs more than the router sent it is loaded by somebody else; gauges that merely lag are not believed."""
    fleet = make_fleet(replicas=1)
    replica = fleet.replicas[0]
    for reading in range(FOREIGN_POLLS):
        assert replica.state.load.sequences == 0
        replica.note_gauges(
            Gauges(running=3 if reading else 9, waiting=1, kv_cache_usage=0.1)
        )
    assert loads(fleet)[0].sequences == 4
    replica.note_gauges(Gauges(0, 0, 0.0))
    assert replica.state.load.sequences == 0


def test_neighbours_are_the_other_busy_replicas() -> None:
    """Each replica's load tells what share of the others has requests."""
    fleet = make_fleet(replicas=3)
    fleet.lease(FAST, prompt_tokens=9, max_tokens=9)
    assert [load.neighbours for load in loads(fleet)] == [0.0, 0.5, 0.5]


def test_a_prompt_counts_less_the_longer_it_has_been_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At 1 ms a token; what waits behind it is begun when it has its first token."""
    now = 1000.0
    for module in ("tiers.fleet", "tiers.replica"):
        monkeypatch.setattr(f"{module}.monotonic", lambda: now)
    fleet = make_fleet(replicas=1, slots=9)
    fleet.replicas[0].measured(_profiled())

    def to_compute() -> int:
        return loads(fleet)[0].prompt_tokens

    first = fleet.lease(FAST, prompt_tokens=300, max_tokens=9)
    now += 0.1
    assert to_compute() == pytest.approx(200, abs=1)
    assert fleet.lease(FAST, prompt_tokens=50, max_tokens=9) is not None
    assert to_compute() == pytest.approx(250, abs=1)
    now += 9
    assert to_compute() == 0
    assert first is not None
    first.first_token()
    assert to_compute() == 50
    now += 0.02
    assert to_compute() == pytest.approx(30, abs=1)


def test_neighbours_have_a_time_left_where_replicas_share_a_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the mean of the busy ones; where none slows another, it is not looked for."""
    for module in ("tiers.fleet", "tiers.replica"):
        monkeypatch.setattr(f"{module}.monotonic", lambda: 1000.0)
    fleet = make_fleet(replicas=3)
    for replica in fleet.replicas:
        replica.measured(_profiled())
    assert fleet.lease(FAST, prompt_tokens=100, max_tokens=10) is not None
    apart = [load.neighbours_left_ms for load in loads(fleet)]
    assert apart == [ALWAYS_MS] * 3
    for replica in fleet.replicas:
        replica.measured(replace(_profiled(), contention=1.0))
    busy, *idle = loads(fleet)
    assert busy.neighbours_left_ms == ALWAYS_MS
    left_ms = 100 + 10 * _profiled().step_ms(1)
    assert [load.neighbours_left_ms for load in idle] == pytest.approx([left_ms] * 2)
    assert candidate_at(fleet, 0, 100, output_tokens=10) != candidate_at(
        fleet, 1, 100, output_tokens=10
    )


def test_several_sequences_take_their_places_and_tokens() -> None:
    """A request of several answers counts as that many: places, output and cache; its prompt once; it is one request."""
    fleet = make_fleet(replicas=1, slots=8)
    lease = fleet.lease(FAST, prompt_tokens=50, max_tokens=100, sequences=6)
    assert lease is not None
    replica = fleet.replicas[0]
    assert replica.state.in_flight == 1
    assert replica.state.slots == 6
    assert replica.state.prompt_tokens == 50
    assert replica.output_tokens == 600
    assert replica.state.kv.held == 650
    assert fleet.lease(FAST, prompt_tokens=1, max_tokens=1, sequences=3) is None
    assert taker(fleet, 1, 3, sequences=3) is None
    assert taker(fleet, 1, 2, sequences=2) is not None
    assert fleet.lease(FAST, prompt_tokens=1, max_tokens=1, sequences=2) is not None
    lease.release()
    assert replica.state.in_flight == 1
    assert replica.state.slots == 2
    assert replica.output_tokens == 2
    assert replica.state.kv.held == 3


def test_more_sequences_than_places_need_an_idle_replica() -> None:
    """They are let in alone, and nobody beside them."""
    fleet = make_fleet(replicas=1, slots=4)
    one = fleet.lease(FAST, prompt_tokens=1, max_tokens=1)
    assert one is not None
    assert fleet.lease(FAST, prompt_tokens=1, max_tokens=1, sequences=64) is None
    one.release()
    many = fleet.lease(FAST, prompt_tokens=1, max_tokens=1, sequences=64)
    assert many is not None
    assert fleet.lease(FAST, prompt_tokens=1, max_tokens=1) is None
    many.release()
    assert fleet.replicas[0].state.slots == 0


def test_an_engine_that_computes_several_answers_has_no_strangers() -> None:
    """Engines count each answer: what a request of several asks for is not taken for somebody else's requests."""
    fleet = make_fleet(replicas=1, slots=8)
    assert fleet.lease(FAST, prompt_tokens=1, max_tokens=1, sequences=5) is not None
    for _ in range(FOREIGN_POLLS):
        fleet.replicas[0].note_gauges(Gauges(running=5, waiting=0, kv_cache_usage=0.1))
    assert fleet.replicas[0].state.load.sequences == 5


def test_several_sequences_are_predicted_and_teach_nothing() -> None:
    """They slow one another down as that many requests would; times of theirs are not held against the model."""
    fleet = make_fleet(replicas=1, slots=16)
    replica = fleet.replicas[0]
    replica.measured(_profiled())
    one = fleet.lease(FAST, prompt_tokens=100, max_tokens=10)
    assert one is not None
    one.release()
    lease = fleet.lease(FAST, prompt_tokens=100, max_tokens=10, sequences=8)
    assert lease is not None
    assert lease.predicted is not None
    assert one.predicted is not None
    assert lease.predicted.tpot_ms == pytest.approx(one.predicted.tpot_ms + 7, rel=0.02)
    lease.first_token(10 * lease.predicted.ttft_ms)
    lease.finished(10 * lease.predicted.tpot_ms, 80)
    lease.release()
    assert replica.state.trends.ttft.mean == 0
    assert replica.state.trends.tpot.mean == 0
    assert replica.state.limit == 16


def test_a_reserved_replica_has_no_place_for_others() -> None:
    """In a snapshot made for them, and by the lease; the one that lacks least of what is wanted is the one to reserve."""
    fleet = make_fleet(replicas=3, slots=4)
    for number, taken in enumerate((3, 2, 4)):
        rest = {f"fast-{n}" for n in range(3) if n != number}
        for _ in range(taken):
            fleet.lease(FAST, prompt_tokens=1, max_tokens=1, exclude=rest)
    wanted = Demand(1, 1, sequences=3)
    assert not fleet.has_capacity({FAST}, wanted)
    assert fleet.nearest({FAST}, wanted) == "fast-1"
    assert fleet.nearest({FAST}, wanted, {"fast-1"}) == "fast-0"
    assert fleet.nearest({FAST}, wanted, {"fast-1", "fast-0"}) is None
    free = taker(fleet, 1, 1, reserved={"fast-1"})
    assert free is not None
    assert free.id == "fast-0"
    assert taker(fleet, 1, 1, reserved={"fast-1", "fast-0"}) is None


def ready(fleet: Fleet) -> Replica:
    (replica,) = fleet.replicas
    return replica


def taker(
    fleet: Fleet,
    prompt_tokens: int,
    output_tokens: int,
    sequences: int = 1,
    reserved: Collection[str] = (),
) -> ReplicaState | None:
    snapshot = fleet.snapshot(reserved)
    long = prompt_tokens > snapshot.long_prompt_tokens
    found = best_candidate(
        snapshot.tiers[0],
        Demand(prompt_tokens, output_tokens, sequences=sequences, is_long=long),
        snapshot.load,
    )
    return found.replica if found.is_free else None


def leased(
    fleet: Fleet, prompt_tokens: int = 1, max_tokens: int = 1, **more: Any
) -> Lease:
    lease = fleet.lease(
        FAST, prompt_tokens=prompt_tokens, max_tokens=max_tokens, **more
    )
    assert lease is not None
    return lease


@pytest.mark.parametrize(
    ("sequences", "taken", "limit", "free"),
    [
        (1, 3, 4, True),
        (1, 4, 4, False),
        (2, 3, 4, False),
        (9, 0, 4, True),
        (9, 1, 4, False),
        (1, 0, 0, False),
    ],
)
def test_slots(sequences: int, taken: int, limit: int, *, free: bool) -> None:
    """More sequences than slots need all of them; a limit of none lets nobody in."""
    replica = ReplicaState("", "", status=ReplicaStatus.READY, slots=taken, limit=limit)
    assert takes(replica, Demand(1, 1, sequences), 99) is free


@pytest.mark.parametrize(
    ("tokens", "held", "size", "fit"),
    [
        (10, 90, 100, True),
        (10, 91, 100, False),
        (500, 0, 100, True),
        (500, 500, 0, True),
    ],
    ids=["exactly", "one too many", "alone", "unknown size"],
)
def test_the_kv_cache(tokens: int, held: int, size: int, *, fit: bool) -> None:
    replica = ReplicaState("", "", status=ReplicaStatus.READY, kv=KvCache(size, held))
    assert takes(replica, Demand(tokens, 0), 99) is fit


def test_a_full_kv_cache_takes_no_further_request() -> None:
    """By the tokens that are held here and by other routers; the snapshot says the same as the lease."""
    fleet = make_fleet(replicas=1, slots=9)
    replica = ready(fleet)
    replica.note_gauges(Gauges(0, 0, 0.0, kv_cache_tokens=1000))
    first = leased(fleet, 500, 100)
    assert fleet.lease(FAST, prompt_tokens=300, max_tokens=101) is None
    assert taker(fleet, 300, 101) is None
    assert taker(fleet, 300, 100) is not None
    replica.note_peers(PeerLoad(1, 0, 0, kv_tokens=100), until=math.inf)
    assert fleet.lease(FAST, prompt_tokens=300, max_tokens=100) is None
    first.release()
    assert leased(fleet, 300, 100)


def test_kv_pressure_holds_long_prompts_back_until_it_has_fallen_well() -> None:
    """Between the two bounds it stays as it is; short prompts go on."""
    fleet = make_fleet(replicas=1, slots=99)
    options = fleet.options
    taken = []
    for usage in (0.85, options.kv_open, 0.85, options.kv_close - 0.001, 0.85):
        ready(fleet).note_gauges(Gauges(0, 0, usage))
        taken.append(
            fleet.has_capacity({FAST}, fleet.demand(options.long_prompt_tokens + 1, 1))
        )
        assert fleet.has_capacity({FAST}, fleet.demand(options.long_prompt_tokens, 1))
        found = taker(fleet, options.long_prompt_tokens + 1, 1)
        assert (found is not None) == taken[-1]
    assert taken == [True, False, False, True, True]


def test_a_share_bounds_the_slots_and_leaves_one_when_it_is_over() -> None:
    """Not even nothing, and never more than the replica has."""
    replica = ready(make_fleet(replicas=1, slots=8))
    assert replica.state.limit == 8
    for share, limit in (
        (SlotShare(3, math.inf), 3),
        (SlotShare(0, math.inf), 1),
        (SlotShare(99, math.inf), 8),
        (SlotShare(3, 0.0), 1),
    ):
        replica.note_share(share)
        assert replica.state.limit == limit
        assert replica.whole_limit == 8


def test_a_new_replica_has_the_share_that_new_ones_get() -> None:
    fleet = make_fleet(replicas=0)
    fleet.first_share = SlotShare(0, math.inf)
    replica = fleet.add(
        Replica("fast-0", fleet.specs[0], "u", "", "m", status=ReplicaStatus.READY)
    )
    assert replica.state.limit == 1


def test_other_routers_count_until_their_report_is_old() -> None:
    """In the load that predictions are made from, and when slots are counted against the adaptive limit."""
    fleet = make_fleet(replicas=1)
    replica = ready(fleet)
    replica.note_peers(PeerLoad(3, 40, output_tokens=50, kv_tokens=60), until=math.inf)
    load = loads(fleet)[0]
    assert load.sequences == 3
    assert load.prompt_tokens == 40
    assert load.output_tokens == 50
    assert sum(r.slots for r in fleet.snapshot().tiers[0].replicas) == 0, (
        "they are not this router's"
    )
    replica.note_peers(PeerLoad(3, 40, output_tokens=50, kv_tokens=60), until=0.0)
    assert loads(fleet)[0].sequences == 0


def test_a_limit_adapts_only_by_a_profile() -> None:
    """TTFT far beyond the expected one lowers it once the expectation is worth believing."""
    fleet = make_fleet(replicas=1, slots=16)
    replica = ready(fleet)
    replica.measured(SpeedModel(100, 1, step_base_ms=10, step_ms_per_sequence=1))
    leases = [leased(fleet) for _ in range(16)]
    for lease in leases[-4:]:
        lease.first_token(60_000)
    assert replica.state.limit == 16
    replica.measured(_profiled())
    assert replica.state.limit == 10, "a tenth less for each of the four"
    fleet.options = replace(fleet.options, adaptive_limit=False)
    replica.adopt(fleet.options)
    assert replica.state.limit == 16


def test_what_belongs_to_a_process_goes_with_it() -> None:
    """Its gauges, speed, foreign requests, answers and pauses; what was served and what is open stay."""
    fleet = make_fleet(replicas=1, slots=9)
    replica = ready(fleet)
    replica.measured(_profiled())
    lease = leased(fleet, 100, 10)
    for _ in range(FOREIGN_POLLS):
        replica.note_gauges(Gauges(5, 0, kv_cache_usage=0.99, kv_cache_tokens=1000))
    replica.answers.last.append(
        AnswerSample(1, 1, waiting_tokens=1, neighbours=0.0, ttft_ms=1.0)
    )
    for _ in range(3):
        replica.breaker.failed(0.0, probe=0)
    replica.mark(ReplicaStatus.STARTING, "restart 1")
    assert replica.state.gauges is None
    assert replica.state.speed is None
    assert replica.state.kv.pressure is False
    assert len(replica.answers.last) == 0
    assert replica.state.load.sequences == replica.state.slots == 1
    assert replica.breaker.admits(0.0)
    assert replica.state.detail == "restart 1"
    lease.release()
    assert replica.state.slots == 0
    assert replica.state.prompt_tokens == 0


def test_draining_keeps_what_is_known() -> None:
    replica = ready(make_fleet(replicas=1))
    replica.measured(_profiled())
    replica.mark(ReplicaStatus.DRAINING)
    assert replica.state.speed is not None


def test_a_failure_counts_by_its_kind_and_opens_the_breaker() -> None:
    fleet = make_fleet(replicas=1, slots=9)
    for _ in range(fleet.options.breaker.failures):
        with leased(fleet) as lease:
            lease.failed("timeout")
    replica = ready(fleet)
    assert replica.state.failed == 3
    assert fleet.failures[FAST, "timeout"] == 3
    assert replica.state.slots == 0
    shown = fleet.snapshot().tiers[0].replicas[0]
    assert shown.breaker.state == BreakerState.OPEN
    assert shown.breaker.admits is False
    assert 0 < shown.breaker.admits_in_s <= fleet.options.breaker.pause_s
    assert fleet.lease(FAST, prompt_tokens=1, max_tokens=1, over_limit=True) is None


def test_a_failure_after_an_answer_is_none_of_the_breakers_successes() -> None:
    """The first token closes nothing that a failure of the same request opened."""
    fleet = make_fleet(replicas=1, slots=9)
    lease = leased(fleet)
    lease.failed("broken")
    lease.first_token()
    assert ready(fleet).breaker._failures == 1


def test_over_the_limit_a_slot_is_taken_all_the_same() -> None:
    """For a request that was admitted elsewhere; not on a replica that is not ready."""
    fleet = make_fleet(replicas=1, slots=1)
    leased(fleet)
    assert fleet.lease(FAST, prompt_tokens=1, max_tokens=1) is None
    assert leased(fleet, over_limit=True).replica.state.slots == 2
    ready(fleet).mark(ReplicaStatus.DRAINING)
    assert fleet.lease(FAST, prompt_tokens=1, max_tokens=1, over_limit=True) is None


def test_a_release_is_told_once() -> None:
    """Those who wait for slots look again at each release."""
    fleet = make_fleet(replicas=1)
    told = []
    fleet.on_capacity = lambda: told.append(ready(fleet).state.slots)
    lease = leased(fleet)
    lease.release()
    lease.release()
    assert told == [0]


def test_a_late_token_of_a_released_lease_changes_nothing() -> None:
    fleet = make_fleet(replicas=1)
    lease = leased(fleet, 5, 10)
    lease.release()
    lease.produced(3)
    assert ready(fleet).output_tokens == 0
    assert ready(fleet).work.generated == 0


def test_tokens_are_counted_once_whether_streamed_or_not() -> None:
    """What was streamed is not counted again at the end; an answer that was not streamed is counted there."""
    fleet = make_fleet(replicas=1, slots=9)
    streamed = leased(fleet, 1, 10)
    whole = leased(fleet, 1, 10)
    streamed.produced(4)
    streamed.finished(10.0, 6)
    whole.finished(None, 5)
    assert ready(fleet).work.generated == 11
    assert ready(fleet).state.served == 2


def test_a_full_replica_expects_what_it_would_take_at_once() -> None:
    """TTFT of a request that the engine queues is not held against the limit as if it were expected."""
    spec = TierSpec(FAST, 2048, max_num_seqs=2, max_in_flight=64)
    fleet = Fleet((spec,))
    replica = fleet.add(
        Replica("fast-0", spec, "u", "", "m", status=ReplicaStatus.READY)
    )
    replica.measured(_profiled())
    for _ in range(2):
        leased(fleet, 10, 1000)
    queued = leased(fleet, 10, 1000, over_limit=True)
    assert queued.predicted is not None
    assert queued._unqueued_ms is not None
    assert queued._unqueued_ms < queued.predicted.ttft_ms / 2


def test_answers_are_noted_with_the_load_that_they_met() -> None:
    """While a speed is to be learned: sequences and prompts before it, and what came while it was decoded."""
    fleet = make_fleet(replicas=1, slots=9)
    replica = ready(fleet)
    other = leased(fleet, 100, 10)
    lease = leased(fleet, 20, 10)
    lease.first_token(50.0)
    leased(fleet, 300, 10)
    lease.finished(5.0, 4)
    (seen,) = replica.answers.last
    assert seen.prompt_tokens == 20
    assert seen.sequences == 1
    assert seen.waiting_tokens == 100
    assert seen.ttft_ms == 50.0
    assert seen.tpot_ms == 5.0
    assert seen.prefilled == 300 / 3
    assert seen.batch >= 2
    other.first_token(50.0)
    other.finished(None, 1)
    assert replica.answers.last[-1].tpot_ms is None, (
        "one token has no time between tokens"
    )
    replica.measured(_profiled())
    profiled = leased(fleet)
    profiled.first_token(1.0)
    profiled.finished(1.0, 2)
    assert replica.answers.noted == 2


def test_the_rate_of_prompts_fades() -> None:
    replica = ready(make_fleet(replicas=1))
    replica.begin(2000, 0, 2000, 1, 100.0)
    rate = load_of(replica.state, 0, FleetLoad(100.0, 1, 1)).prefill_rate
    assert rate == pytest.approx(2000 / PREFILL_MEMORY_MS)
    faded = load_of(
        replica.state, 0, FleetLoad(100.0 + PREFILL_MEMORY_MS / 1000, 1, 1)
    ).prefill_rate
    assert faded == pytest.approx(2000 / PREFILL_MEMORY_MS / math.e)


def test_slots_free_up_as_fast_as_the_model_says_until_ends_are_seen() -> None:
    """Each of 4 requests has 100 tokens left at 14 ms a step; none comes free where nothing takes requests."""
    fleet = make_fleet(replicas=1, slots=9)
    replica = ready(fleet)
    assert fleet.freed_per_s(FAST) == pytest.approx(1.0), "unknown: one a second"
    replica.measured(
        SpeedModel(0, 0, step_base_ms=10, step_ms_per_sequence=1, profiled=True)
    )
    for _ in range(4):
        leased(fleet, 0, 100)
    assert fleet.freed_per_s(FAST) == pytest.approx(1 / (100 * 2 / 5 * 0.014), rel=0.01)
    replica.mark(ReplicaStatus.DRAINING)
    assert fleet.freed_per_s(FAST) == 0


@pytest.mark.parametrize(
    ("states", "preparing", "state"),
    [
        (["FAILED", "WARMING", "STOPPED"], False, "WARMING"),
        (["UNREACHABLE", "DRAINING"], False, "DRAINING"),
        (["STOPPED", "READY"], True, "READY"),
        ([], True, "PREPARING"),
        ([], False, "STOPPED"),
    ],
)
def test_a_tier_is_as_good_as_its_best_replica(
    states: list[str], state: str, *, preparing: bool
) -> None:
    fleet = make_fleet(replicas=len(states))
    for replica, name in zip(fleet.replicas, states, strict=True):
        replica.mark(ReplicaStatus[name])
    if preparing:
        fleet.preparations.expect([FAST], None)
    assert fleet.snapshot().tier(FAST).status is ReplicaStatus[state]
    assert fleet.is_ready(FAST) is ("READY" in states)


def test_a_tier_whose_checkpoint_could_not_be_made_has_failed() -> None:
    fleet = make_fleet(replicas=0)
    fleet.preparations.expect([FAST], None)
    fleet.preparations.fail("disk full")
    assert fleet.snapshot().tier(FAST).status is ReplicaStatus.FAILED


def test_tiers_that_there_are_not() -> None:
    """KeyError for both lookups; a removed replica is in no snapshot, and its leases still end."""
    fleet = make_fleet(replicas=1)
    for look in (fleet.spec, fleet.snapshot().tier):
        with pytest.raises(KeyError):
            look(TierName.PRECISE)
    lease = leased(fleet)
    fleet.remove(lease.replica)
    assert fleet.snapshot().tiers[0].replicas == ()
    lease.release()
    assert lease.replica.state.slots == 0


def test_a_tier_is_configured_anew_once_it_has_a_checkpoint() -> None:
    fleet = make_fleet(replicas=0)
    fleet.configure(replace(fleet.specs[0], digest="d"))
    assert [spec.digest for spec in fleet.specs] == ["d"]


@pytest.mark.parametrize(
    ("messages", "tokens", "with_system"),
    [(1, 5, 20), (2, 8, 20), (3, 10, 23), (4, 13, 25), (0, 5, 20)],
)
def test_templates_add_tokens_for_each_message(
    messages: int, tokens: int, with_system: int
) -> None:
    """Each two messages after the first ones add five; one of them adds half, rounded up."""
    template = TemplateTokens(alone=5, with_system=20, further_pair=5)
    assert template.conversation(messages, system=False) == tokens
    assert template.conversation(messages, system=True) == with_system


def test_of_two_templates_the_larger_figures_count() -> None:
    fleet = make_fleet(replicas=0)
    fleet.note_template(TemplateTokens(5, 20, 1))
    fleet.note_template(TemplateTokens(6, 10, 1))
    assert fleet.template == TemplateTokens(6, 20, 1)


STEPS = ["lease", "first token", "token", "failed", "finished", "release"]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9)), max_size=60))
def test_whatever_happens_to_leases_all_counters_return_to_zero(
    steps: list[tuple[str, int]],
) -> None:
    """In any order, some of it late or twice: no counter is ever negative, and nothing is left."""

    def counters(replica: Replica) -> tuple[int, ...]:
        return (
            replica.state.in_flight,
            replica.state.slots,
            replica.state.prompt_tokens,
            replica.output_tokens,
            replica.state.kv.held,
        )

    fleet = make_fleet(replicas=2, slots=4)
    leases: list[Lease] = []
    for step, number in steps:
        if step == "lease":
            lease = fleet.lease(
                FAST, prompt_tokens=number, max_tokens=number, sequences=1 + number % 3
            )
            leases += [lease] if lease is not None else []
        elif leases:
            lease = leases[number % len(leases)]
            does = {
                "first token": partial(lease.first_token, 5.0),
                "token": lease.produced,
                "failed": partial(lease.failed, "x"),
                "finished": partial(lease.finished, 9.0, number),
                "release": lease.release,
            }
            does[step]()
        assert all(min(counters(r)) >= 0 for r in fleet.replicas)
    for lease in leases:
        lease.release()
    assert [counters(r) for r in fleet.replicas] == [(0, 0, 0, 0, 0)] * 2
