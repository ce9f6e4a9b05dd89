"""Leases and counters: what goes out comes back, however it ends."""

from __future__ import annotations

import pytest

from tiers.fleet import FOREIGN_POLLS, Demand, Fleet, Gauges, Replica
from tiers.spec import ReplicaState, TierName, TierSpec
from tiers.speed import HALF_LIFE_S, SpeedModel, Trend

FAST = TierName.FAST


def make_fleet(replicas: int = 2, slots: int = 2) -> Fleet:
    spec = TierSpec(FAST, 2048, 16, slots)
    fleet = Fleet((spec,))
    for number in range(replicas):
        fleet.add(Replica(f"fast-{number}", spec, "u", "", "m", state=ReplicaState.READY))
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
    assert fleet.replicas[0].in_flight == 1
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
    assert (replica.in_flight, replica.prompt_tokens, replica.output_tokens) == (0, 0, 0)


@pytest.mark.parametrize("state", [s for s in ReplicaState if s is not ReplicaState.READY])
def test_only_ready_replicas_are_leased(state: ReplicaState) -> None:
    """Every other state gets no traffic."""
    fleet = make_fleet(replicas=1)
    fleet.replicas[0].mark(state)
    assert fleet.lease(FAST, prompt_tokens=1, max_tokens=1) is None
    assert fleet.snapshot().tier(FAST).state is state


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


def _profiled(step: float = 10.0) -> SpeedModel:
    return SpeedModel(100, 1, step, 1, profiled=True, ttft_spread=0.1, tpot_spread=0.1)


def test_predictions_follow_what_is_seen() -> None:
    """Answers that take twice as long as predicted move the prediction that way, and make it less sure of itself."""
    fleet = make_fleet(replicas=1)
    replica = fleet.replicas[0]
    replica.measured(_profiled())
    before = fleet.snapshot().tiers[0].replicas[0].expect(100, 16, 1.0)
    for _ in range(3):
        lease = fleet.lease(FAST, prompt_tokens=100, max_tokens=10)
        assert lease is not None
        assert lease.predicted is not None
        lease.first_token(2 * lease.predicted.ttft_ms)
        lease.finished(2 * lease.predicted.tpot_ms, 5)
        lease.release()
    after = fleet.snapshot().tiers[0].replicas[0].expect(100, 16, 1.0)
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
        assert replica.sequences == 0
        replica.note_gauges(Gauges(running=3 if reading else 9, waiting=1, kv_cache_usage=0.1))
    assert fleet.snapshot().tiers[0].replicas[0].load.sequences == 4
    replica.note_gauges(Gauges(0, 0, 0.0))
    assert replica.sequences == 0


def test_neighbours_are_the_other_busy_replicas() -> None:
    """Each replica's load tells what share of the others has requests."""
    fleet = make_fleet(replicas=3)
    fleet.lease(FAST, prompt_tokens=9, max_tokens=9)
    assert [r.load.neighbours for r in fleet.snapshot().tiers[0].replicas] == [0.0, 0.5, 0.5]


def test_several_sequences_take_their_places_and_tokens() -> None:
    """A request of several answers counts as that many: places, output and cache; its prompt once; it is one request."""
    fleet = make_fleet(replicas=1, slots=8)
    lease = fleet.lease(FAST, prompt_tokens=50, max_tokens=100, sequences=6)
    assert lease is not None
    replica = fleet.replicas[0]
    assert (replica.in_flight, replica.slots, replica.prompt_tokens) == (1, 6, 50)
    assert (replica.output_tokens, replica.kv_tokens_held) == (600, 650)
    assert fleet.lease(FAST, prompt_tokens=1, max_tokens=1, sequences=3) is None
    assert fleet.snapshot().tiers[0].next(1, 3, 512, 3) is None
    assert fleet.snapshot().tiers[0].next(1, 2, 512, 2) is not None
    assert fleet.lease(FAST, prompt_tokens=1, max_tokens=1, sequences=2) is not None
    lease.release()
    assert (replica.in_flight, replica.slots, replica.output_tokens, replica.kv_tokens_held) == (1, 2, 2, 3)


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
    assert fleet.replicas[0].slots == 0


def test_an_engine_that_computes_several_answers_has_no_strangers() -> None:
    """Engines count each answer: what a request of several asks for is not taken for somebody else's requests."""
    fleet = make_fleet(replicas=1, slots=8)
    assert fleet.lease(FAST, prompt_tokens=1, max_tokens=1, sequences=5) is not None
    for _ in range(FOREIGN_POLLS):
        fleet.replicas[0].note_gauges(Gauges(running=5, waiting=0, kv_cache_usage=0.1))
    assert fleet.replicas[0].sequences == 5


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
    assert (replica.ttft_trend.mean, replica.tpot_trend.mean) == (0, 0)
    assert replica.limit == 16


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
    free = fleet.snapshot({"fast-1"}).tiers[0].next(1, 1, 512)
    assert free is not None
    assert free.id == "fast-0"
    assert fleet.snapshot({"fast-1", "fast-0"}).tiers[0].next(1, 1, 512) is None
