"""Which replica takes a request: what its cache saves against what its load costs."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tiers.choice import HOME_SHARE, Ask, Candidate, preferred
from tiers.speed import IDLE, Load, SpeedModel

SPEED = SpeedModel(20.0, 1.0, 10.0, 1.0, profiled=True)
ASK = Ask(1000, 100, 1, long=False, max_num_seqs=16)


def one(
    position: int, tokens: int = 0, sequences: int = 0, *, cached: int = 0, home: bool = False, **more: Any
) -> Candidate:
    """Return a replica with a load, of unknown speed if none is given."""
    load, trends = more.get("load", IDLE), more.get("trends", (0.0, 0.0))
    return Candidate(position, tokens, sequences, cached, home, more.get("speed"), load, trends)


def test_without_a_known_speed_a_cache_outweighs_as_many_tokens_as_it_saves() -> None:
    """One more, and the request goes to the replica that is free."""
    for waiting, found in ((639, 0), (640, 1), (641, 1)):
        assert preferred([one(0, waiting, 1, cached=640), one(1)], ASK) == found


def test_a_replica_that_is_slower_than_predicted_loses_its_chats() -> None:
    """So a speed that is wrong about load sends no more to a replica than it can do."""
    for trends, found in (((0.0, 0.0), 0), ((0.0, 1.0), 1), ((2.0, 0.0), 1)):
        warm = one(0, 0, 1, cached=640, speed=SPEED, load=Load(1), trends=trends)
        assert preferred([warm, one(1, speed=SPEED)], ASK) == found


def test_one_speed_that_is_not_known_under_load_makes_all_count_tokens() -> None:
    """Times of one kind are not compared with tokens of another."""
    idle = SpeedModel(20.0, 1.0, 10.0)
    for speed in (None, idle):
        assert preferred([one(0, 700, 1, cached=640, speed=SPEED), one(1, speed=speed)], ASK) == 1


def test_a_session_counts_only_where_caches_tell_nothing() -> None:
    """Its own replica is taken for one that holds half of the rest; a replica that is known to hold more is preferred."""
    share = int(HOME_SHARE * ASK.prompt_tokens)
    for waiting, found in ((share - 1, 1), (share + 1, 0)):
        assert preferred([one(0), one(1, waiting, 1, home=True)], ASK) == found
    assert preferred([one(0, cached=128), one(1, cached=128, home=True)], ASK) == 1
    assert preferred([one(0, cached=128), one(1, home=True)], ASK) == 0


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 9), st.integers(0, 1000)), min_size=1, max_size=5),
    st.booleans(),
)
def test_no_replica_is_better_in_every_respect(replicas: list[tuple[int, int, int]], known: bool) -> None:  # noqa: FBT001
    """Whatever the loads: none of the others has less of a load and more of the prompt than the one that is taken."""
    speed = SPEED if known else None
    candidates = [
        one(n, tokens, sequences, cached=cached, speed=speed, load=Load(sequences, output_tokens=tokens))
        for n, (tokens, sequences, cached) in enumerate(replicas)
    ]
    taken = candidates[preferred(candidates, ASK)]
    for other in candidates:
        better = other.tokens < taken.tokens and other.sequences < taken.sequences and other.cached > taken.cached
        assert not better


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 1000))
def test_affinity_beats_a_free_replica_by_no_more_than_it_saves(busy: int, free: int, cached: int) -> None:
    """In tokens: the load that is taken on is at most the prefill that is saved."""
    taken = preferred([one(0, busy, 1, cached=cached), one(1, free, 1)], ASK)
    assert taken == 1 or busy - free <= cached
