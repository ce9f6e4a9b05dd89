"""Leases and counters: what goes out comes back, however it ends."""

from __future__ import annotations

import pytest

from tiers.fleet import Fleet, Replica, Speed
from tiers.spec import ReplicaState, TierName, TierSpec

FAST = TierName.FAST


def make_fleet(replicas: int = 2, places: int = 2) -> Fleet:
    spec = TierSpec(FAST, 2048, 16, places)
    fleet = Fleet((spec,))
    for number in range(replicas):
        fleet.add(Replica(f"fast-{number}", spec, "u", "", "m", state=ReplicaState.READY))
    return fleet


def test_least_loaded_replica_is_leased() -> None:
    """Load is outstanding tokens: one long request weighs more than two short ones."""
    fleet = make_fleet(places=9)
    long = fleet.lease(FAST, prompt_tokens=1000, max_tokens=100)
    assert long is not None
    others = [fleet.lease(FAST, prompt_tokens=10, max_tokens=10) for _ in range(3)]
    assert {lease.replica.id for lease in others if lease} == {"fast-1"}


def test_places_are_bounded_and_come_back() -> None:
    """A replica never has more than its places out; a released place is free again, and only once."""
    fleet = make_fleet(replicas=1, places=2)
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
    fleet = make_fleet(replicas=1, places=5)
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


def test_speed_follows_what_is_seen() -> None:
    """Each answer moves TTFT by its ratio and TPOT towards what was seen, a fifth of the way."""
    speed = Speed(100, 1, 10).after(prompt_tokens=100, ttft_ms=400, tpot_ms=20)
    assert speed.ttft_ms(100) == pytest.approx(240)
    assert speed.tpot_ms == pytest.approx(12)
    assert speed.after(100, 240, None).tpot_ms == pytest.approx(12)
