"""Which replica takes a request: what its cache saves against what its load costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from tiers.choice import HOME_SHARE, Demand, choose_replica
from tiers.snapshot import ReplicaState, TierSnapshot, Trends
from tiers.spec import ReplicaStatus, TierName, TierSpec
from tiers.speed import ReplicaLoad, SpeedModel, Trend

SPEED = SpeedModel(
    20.0, 1.0, step_base_ms=10.0, step_ms_per_sequence=1.0, profiled=True
)
REQUEST = Demand(1000, 100)


class Replica(NamedTuple):
    """A replica with a load, of unknown speed if none is given; ``trends`` are means, of TTFT and TPOT."""

    tokens: int = 0
    sequences: int = 0
    cached: int = 0
    home: bool = False
    speed: SpeedModel | None = None
    trends: tuple[float, float] = (0.0, 0.0)


def preferred(replicas: Sequence[Replica], conversation_tokens: int = 0) -> int:
    """Return the position of the one that takes the request."""
    states = [
        ReplicaState(
            "", "", status=ReplicaStatus.READY, load=ReplicaLoad(each.sequences, output_tokens=each.tokens), speed=each.speed,
            trends=Trends(*(Trend(mean, 0.0, 0.0) for mean in each.trends)),
        )
        for each in replicas
    ]  # fmt: skip
    cached = tuple(r.cached for r in replicas)
    home = next((n for n, r in enumerate(replicas) if r.home), -1)
    outputs = tuple(r.tokens for r in replicas)
    tier = TierSnapshot(
        TierSpec(TierName.FAST, 9999, max_num_seqs=16, max_in_flight=32),
        tuple(states),
        outstanding_tokens=outputs,
        preparing=None,
        cached=cached,
        home=home,
        conversation_tokens=conversation_tokens,
    )
    return choose_replica(tier, REQUEST, None)


def test_without_a_known_speed_a_cache_outweighs_as_many_tokens_as_it_saves() -> None:
    """One more, and the request goes to the replica that is free."""
    for waiting, found in ((639, 0), (640, 1), (641, 1)):
        assert preferred([Replica(waiting, 1, 640), Replica()]) == found


def test_a_replica_that_is_slower_than_predicted_loses_its_chats() -> None:
    """So a speed that is wrong about load sends no more to a replica than it can do."""
    for trends, found in (((0.0, 0.0), 0), ((0.0, 1.0), 1), ((2.0, 0.0), 1)):
        warm = Replica(0, 1, 640, speed=SPEED, trends=trends)
        assert preferred([warm, Replica(speed=SPEED)]) == found


def test_one_speed_that_is_not_known_under_load_makes_all_count_tokens() -> None:
    """Times of one kind are not compared with tokens of another."""
    idle = SpeedModel(20.0, 1.0, 10.0)
    for speed in (None, idle):
        assert preferred([Replica(700, 1, 640, speed=SPEED), Replica(speed=speed)]) == 1


def test_a_sessions_own_replica_counts_as_one_that_holds_half_of_the_rest() -> None:
    """A replica that is known to hold more than that is preferred."""
    share = int(HOME_SHARE * REQUEST.prompt_tokens)
    for waiting, found in ((share - 1, 1), (share + 1, 0)):
        assert preferred([Replica(), Replica(waiting, 1, home=True)]) == found
    assert preferred([Replica(cached=128), Replica(cached=128, home=True)]) == 1
    assert preferred([Replica(cached=128), Replica(home=True)]) == 1
    assert preferred([Replica(cached=share + 1), Replica(home=True)]) == 0


def test_a_conversation_leaves_only_if_that_saves_more_than_it_costs() -> None:
    """To compute it again delays others too, and counts twice. A prefix that is no conversation counts once, as ever."""
    free = Replica()
    for waiting, found in ((1279, 0), (1281, 1)):
        assert preferred([Replica(waiting, 1, 640), free], 600) == found
    assert preferred([Replica(641, 1, 640), free], 641) == 1
    # In times: each sequence more delays the 100 tokens of the answer by 100 ms.
    idle = Replica(speed=SPEED)
    for sequences, once, twice in ((6, 0, 0), (7, 1, 0), (12, 1, 0), (13, 1, 1)):
        busy = Replica(0, sequences, 640, speed=SPEED)
        assert preferred([busy, idle]) == once
        assert preferred([busy, idle], 600) == twice


@given(
    st.lists(
        st.tuples(st.integers(0, 3000), st.integers(0, 9), st.integers(0, 1000)),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
)
def test_no_replica_is_better_in_every_respect(
    replicas: list[tuple[int, int, int]],
    known: bool,  # noqa: FBT001
) -> None:
    """Whatever the loads: none of the others has less of a load and more of the prompt than the one that is taken."""
    speed = SPEED if known else None
    candidates = [Replica(*each, speed=speed) for each in replicas]
    taken = candidates[preferred(candidates)]
    for other in candidates:
        better = (
            other.tokens < taken.tokens
            and other.sequences < taken.sequences
            and other.cached > taken.cached
        )
        assert not better


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 1000))
def test_affinity_beats_a_free_replica_by_no_more_than_it_saves(
    busy: int, free: int, cached: int
) -> None:
    """In tokens: the load that is taken on is at most the prefill that is saved."""
    taken = preferred([Replica(busy, 1, cached), Replica(free, 1)])
    assert taken == 1 or busy - free <= cached
