"""Leases by prefix: who gets a prompt, what is remembered of it, and what is learned from it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tiers.choice import Demand, best_candidate
from tiers.fleet import Fleet, Lease
from tiers.prefix_memory import BLOCK_BYTES, Part, Prefix
from tiers.replica import Replica
from tiers.snapshot import Gauges, ReplicaState
from tiers.spec import ReplicaStatus, TierName, TierSpec
from tiers.speed import SpeedModel

FAST = TierName.FAST
SPEED = SpeedModel(
    20.0, 1.0, step_base_ms=10.0, step_ms_per_sequence=1.0, profiled=True
)


def make_fleet(replicas: int = 2, speed: SpeedModel | None = None) -> Fleet:
    spec = TierSpec(FAST, 8192, max_num_seqs=16, max_in_flight=9)
    fleet = Fleet((spec,))
    for number in range(replicas):
        replica = Replica(
            f"fast-{number}", spec, "u", "", "m", status=ReplicaStatus.READY
        )
        if speed is not None:
            replica.measured(speed)
        fleet.add(replica)
    return fleet


def chat(turns: int, name: str = "a", session: str = "") -> Prefix:
    """Return a chat after some turns, each of two blocks of 64 tokens, and what follows them: 20 tokens."""
    parts = [
        Part(f"{name}{turn}".ljust(2 * BLOCK_BYTES, "."), 128) for turn in range(turns)
    ]
    made = Prefix.of([*parts, Part("?", 20)], session=session)
    assert made is not None
    return made


def sent(
    fleet: Fleet,
    prefix: Prefix | None,
    prompt_tokens: int = 0,
    max_tokens: int = 10,
    **more: Any,
) -> Lease:
    """Take a lease, which must be there, for a prompt of as many tokens as its prefix has."""
    tokens = prompt_tokens or (int(prefix.ends[-1][1]) if prefix is not None else 20)
    lease = fleet.lease(
        FAST, prompt_tokens=tokens, max_tokens=max_tokens, prefix=prefix, **more
    )
    assert lease is not None
    return lease


def held(fleet: Fleet, prefix: Prefix | None) -> list[int]:
    return list(fleet.snapshot(prefix=prefix).tiers[0].cached or ())


def next_for(fleet: Fleet, prefix: Prefix) -> ReplicaState | None:
    snapshot = fleet.snapshot(prefix=prefix)
    found = best_candidate(
        snapshot.tiers[0], Demand(int(prefix.ends[-1][1]), 10), snapshot.load
    )
    return found.replica if found.is_free else None


@pytest.mark.parametrize("speed", [None, SPEED], ids=["tokens", "times"])
def test_a_busy_replica_loses_its_chats(speed: SpeedModel | None) -> None:
    """Once its load costs more than its cache saves; the other one then holds the chat as well."""
    fleet = make_fleet(speed=speed)
    sent(fleet, chat(4), max_tokens=10).release()
    for _ in range(4):
        sent(fleet, None, 300, max_tokens=2000, exclude={"fast-1"})
    assert sent(fleet, chat(4)).replica is fleet.replicas[1]
    assert held(fleet, chat(4)) == [512, 512]


def test_only_what_is_left_to_compute_counts() -> None:
    """In the prediction, in the load that others meet, and in the snapshot; the KV cache holds all of it."""
    fleet = make_fleet(1, SPEED)
    replica = fleet.replicas[0]
    first = sent(fleet, chat(4))
    assert first.predicted is not None
    assert first.predicted.ttft_ms == pytest.approx(20 + 532)
    first.first_token()
    first.release()
    second = sent(fleet, chat(4))
    assert second.predicted is not None
    assert second.predicted.ttft_ms == pytest.approx(20 + 20)
    assert replica.state.prompt_tokens == 20
    assert replica.state.kv.held == 532 + 10
    second.first_token()
    assert replica.state.prompt_tokens == 0
    second.release()
    assert replica.state.prompt_tokens == 0
    assert replica.output_tokens == 0
    assert replica.state.kv.held == 0


def test_whole_blocks_of_the_engine_count_and_never_the_whole_prompt() -> None:
    """As the engine tells their size; vLLM computes at least the last token."""
    fleet = make_fleet(1)
    whole = Prefix.of([Part("x" * 8 * BLOCK_BYTES, 512)])
    assert whole is not None
    for size, cached, more in ((None, 496, 336), (16, 496, 336), (128, 384, 256)):
        fleet.replicas[0].note_gauges(
            Gauges(
                0, 0, kv_cache_usage=0.0, kv_cache_tokens=100_000, kv_block_tokens=size
            )
        )
        sent(fleet, whole).release()
        assert held(fleet, whole) == [cached], "512 tokens are all of it"
        longer = Prefix.of([Part("x" * 8 * BLOCK_BYTES, 340), Part("y" * 9, 100)])
        assert held(fleet, longer) == [more]


@pytest.mark.parametrize(
    "state", [ReplicaStatus.STARTING, ReplicaStatus.FAILED, ReplicaStatus.UNREACHABLE]
)
def test_a_replica_that_restarts_holds_nothing(state: ReplicaStatus) -> None:
    fleet = make_fleet(1)
    replica = fleet.replicas[0]
    sent(fleet, chat(4)).release()
    replica.mark(ReplicaStatus.DRAINING)
    replica.mark(ReplicaStatus.READY)
    assert held(fleet, chat(5)) == [512]
    replica.mark(state)
    replica.mark(ReplicaStatus.READY)
    assert held(fleet, chat(5)) == [0]


def test_an_engine_elsewhere_that_restarts_between_two_readings_holds_nothing() -> None:
    fleet = make_fleet(1)
    replica = fleet.replicas[0]
    read, again, anew = (
        Gauges(0, 0, 0.0, cache_queries=count) for count in (900, 900, 50)
    )
    replica.note_gauges(read)
    sent(fleet, chat(4)).release()
    replica.note_gauges(again)
    assert held(fleet, chat(5)) == [512]
    replica.note_gauges(anew)
    assert held(fleet, chat(5)) == [0]


def test_a_prompt_that_an_engine_failed_is_not_remembered() -> None:
    fleet = make_fleet(1)
    sent(fleet, chat(2)).release()
    with sent(fleet, chat(4)) as lease:
        lease.failed("x")
    assert held(fleet, chat(4)) == [256]


def test_an_engine_that_finds_less_has_evicted_what_is_older() -> None:
    """The memory keeps the prompt itself, which was computed again; one that finds enough changes nothing."""
    fleet = make_fleet(1)
    for name in ("old", "chat", "young"):
        sent(fleet, chat(4, name)).release()
    for reported, old in ((300, 512), (None, 512), (200, 0)):
        with sent(fleet, chat(4, "chat")) as lease:
            assert lease.sent is not None
            assert lease.sent.cached == 512
            sent(fleet, chat(4, "young")).release()
            lease.finished(None, 5, reported)
        assert held(fleet, chat(5, "old")) == [old]
        assert [held(fleet, chat(5, name)) for name in ("chat", "young")] == [
            [512],
            [512],
        ]
        if old:
            sent(fleet, chat(4, "old")).release()
            sent(fleet, chat(4, "chat")).release()


def test_a_cached_prompt_does_not_teach_that_prefill_is_fast() -> None:
    """Learned from is what was left to compute: as reported, else as predicted; also where nothing was predicted."""
    fleet = make_fleet(1)
    sent(fleet, chat(4)).release()
    for prefix, reported, learned in (
        (chat(5), None, 148),
        (chat(5), 384, 276),
        (None, 384, 276),
        (None, None, 660),
    ):
        with sent(fleet, prefix, 660) as lease:
            lease.first_token(50.0)
            lease.finished(5.0, 4, reported)
        fleet.replicas[0].prefixes.forget(chat(5).blocks[8:])
        assert fleet.replicas[0].answers.last[-1].prompt_tokens == learned


def test_a_session_without_a_memory_finds_its_replica_again() -> None:
    """After a restart of the router, or in another process: the same replica, wherever the load is the same."""
    fleets = [make_fleet(3) for _ in range(2)]
    for number in range(12):
        prefix = chat(4, f"chat {number}", session=f"session {number}")
        found = {
            next_one.id
            for fleet in fleets
            if (next_one := next_for(fleet, prefix)) is not None
        }
        with sent(fleets[0], prefix) as lease:
            assert {lease.replica.id} == found
    assert len(fleets[0].replicas[0].prefixes) > 0


def test_a_session_gives_way_to_load_and_to_a_replica_that_is_not_open() -> None:
    """Half of what is left of the prompt is all that it weighs."""
    fleet = make_fleet(2)
    prefix = chat(4, session="x")
    home = next_for(fleet, prefix)
    assert home is not None
    other = next(r for r in fleet.replicas if r.id != home.id)
    busy = sent(fleet, None, 600, max_tokens=10, exclude={other.id})
    found = next_for(fleet, prefix)
    assert found is not None
    assert found.id == other.id
    busy.release()
    next(r for r in fleet.replicas if r.id == home.id).mark(ReplicaStatus.DRAINING)
    assert sent(fleet, prefix).replica is other


def agents_turn(name: str, turns: int) -> Prefix:
    """Return a turn of an agent: a long system prompt that all agents share, a task of its own, and calls with results."""
    parts = [
        Part("You are an agent. ".ljust(16 * BLOCK_BYTES, "."), 1024, "system"),
        Part(f"task {name}".ljust(4 * BLOCK_BYTES, "."), 256, "user"),
    ]
    for turn in range(turns - 1):
        call = f"{name} calls {turn}".ljust(BLOCK_BYTES, ".")
        result = f"{name} gets {turn}".ljust(16 * BLOCK_BYTES, ".")
        parts += [Part(call, 64, "assistant"), Part(result, 1024, "tool")]
    made = Prefix.of(parts, session=name)
    assert made is not None
    return made


def test_agents_that_share_a_system_prompt_do_not_share_one_replica() -> None:
    """They do while its cache holds them all. Those that it has evicted go to their sessions' replicas, and stay there."""
    fleet = make_fleet(2, SPEED)
    for replica in fleet.replicas:
        replica.note_gauges(
            Gauges(0, 0, kv_cache_usage=0.0, kv_cache_tokens=20_000, kv_block_tokens=16)
        )
    names = [f"agent {number}" for number in range(6)]
    places: dict[str, list[str]] = {name: [] for name in names}
    cached: dict[str, int] = {}
    for turns in range(1, 8):
        for name in names:
            with sent(fleet, agents_turn(name, turns)) as lease:
                assert lease.sent is not None
                cached[name] = lease.sent.cached
                places[name].append(lease.replica.id)
    first = places[names[0]][0]
    assert all(place == first for each in places.values() for place in each[:4])
    moved = [name for name in names if places[name][-1] != first]
    assert 2 <= len(moved) <= 4
    for name in moved:
        moves = sum(before != after for before, after in pairwise(places[name]))
        assert moves == 1
        assert cached[name] >= 1024 + 256 + 5 * (64 + 1024)


def test_a_conversation_stays_though_its_session_has_another_home() -> None:
    """What a replica holds of it counts, and not where the session would have gone first."""
    fleet = make_fleet(2, SPEED)
    home = next_for(fleet, agents_turn("a", 1))
    assert home is not None
    with sent(fleet, agents_turn("a", 1), exclude={home.id}) as lease:
        assert lease.replica.id != home.id
    for turns in (2, 3):
        with sent(fleet, agents_turn("a", turns)) as lease:
            assert lease.replica.id != home.id


def test_an_answer_is_expected_to_be_no_longer_than_recent_ones() -> None:
    """Whatever a request allows: an agent allows thousands of tokens, and its answers are as short as others."""
    fleet = make_fleet(1)
    assert fleet.demand(100, 4000).output_tokens == 4000
    assert fleet.snapshot().answer_tokens is None
    for answer_tokens, sequences in ((50, 1), (100, 2)):
        with sent(fleet, None, 100, max_tokens=200, sequences=sequences) as lease:
            lease.first_token()
            lease.finished(None, answer_tokens)
    assert fleet.demand(100, 4000).output_tokens == pytest.approx(50)
    assert fleet.demand(100, 4000, 3).output_tokens == pytest.approx(150)
    assert fleet.snapshot().answer_tokens == pytest.approx(50)
    share = fleet.output_share
    assert fleet.demand(100, 20).output_tokens == pytest.approx(share * 20)
    with sent(fleet, None, 100, max_tokens=200) as lease:
        lease.first_token()
        lease.finished(None, 150)
    assert fleet.demand(100, 4000).output_tokens == pytest.approx(55)
