"""The life of engines that were started here: they come back when they exit, hang or answer no more, until they crash in a loop."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.engine import Behaviour, FakeEngine, serving
from tests.unit.own_engines import own_engines
from tests.waiting import until
from tiers.fleet import Fleet
from tiers.lifecycle.watchdog import (
    STEADY_S,
    Restarts,
    WatchdogOptions,
    Wear,
    hangs,
    off_by,
)
from tiers.probe import Counters, EngineProbe
from tiers.replica import Replica
from tiers.snapshot import Trends
from tiers.spec import ReplicaStatus, TierName, TierSpec
from tiers.speed import SpeedModel, Trend

READY = ReplicaStatus.READY
STARTING = ReplicaStatus.STARTING
FAILED = ReplicaStatus.FAILED
SPEC = TierSpec(TierName.FAST, max_model_len=2048, max_num_seqs=16, max_in_flight=8)


def test_backoff_doubles_up_to_a_minute_and_begins_anew() -> None:
    """One second after the first exit, twice as long after each further one; minutes of being ready forget it."""
    restarts = Restarts(WatchdogOptions(max_restarts=99, restart_window_s=1e9))
    assert [restarts.exited(float(n), 0) for n in range(8)] == [
        1,
        2,
        4,
        8,
        16,
        32,
        60,
        60,
    ]
    assert restarts.exited(9.0, STEADY_S) == 1


def test_a_crash_loop_stops() -> None:
    """More exits than allowed within the window end it; older ones do not count, and a person may begin anew."""
    restarts = Restarts(WatchdogOptions(max_restarts=2, restart_window_s=100))
    assert restarts.exited(0.0, 0) is not None
    assert restarts.exited(60.0, 0) is not None
    assert restarts.exited(99.0, 0) is None
    assert restarts.exited(101.0, 0) is not None
    assert restarts.exited(102.0, 0) is None
    restarts.forget()
    assert restarts.exited(103.0, 0) == 1
    assert Restarts(WatchdogOptions(max_restarts=0)).exited(0.0, 0) is None


def test_silence_counts_only_while_there_are_requests() -> None:
    """Time without requests is no silence; progress ends it, going away without an answer does not."""
    replica = Replica("fast-0", SPEC, url="u", api_key="", model="m", status=READY)
    replica.begin(prompt_tokens=1, output_tokens=1, kv_tokens=2, sequences=1, now=100.0)
    assert replica.silence_s(130.0) == 30
    replica.end(prompt_tokens=1, output_tokens=1, kv_tokens=2, sequences=1, now=130.0)
    assert replica.silence_s(500.0) == 30
    replica.begin(
        prompt_tokens=1, output_tokens=1, kv_tokens=2, sequences=1, now=1000.0
    )
    replica.begin(
        prompt_tokens=1, output_tokens=1, kv_tokens=2, sequences=1, now=1005.0
    )
    assert replica.silence_s(1010.0) == 40
    replica.progressed(1010.0)
    assert replica.silence_s(1011.0) == 1


def test_leases_note_progress() -> None:
    """A first token, each further one and the end of an answer are progress."""
    fleet = Fleet((SPEC,))
    replica = fleet.add(
        Replica("fast-0", SPEC, url="u", api_key="", model="m", status=READY)
    )
    lease = fleet.lease(TierName.FAST, prompt_tokens=5, max_tokens=5)
    assert lease is not None
    for progress in (lease.first_token, lease.produced, lambda: lease.finished(None)):
        replica.work.silence_s = 50.0
        progress()
        assert replica.silence_s(time.monotonic()) < 50


WEAR = WatchdogOptions(slow_factor=3, slow_s=10)


def test_an_engine_that_is_slow_for_long_is_worn() -> None:
    """Slower than predicted by more than the factor, for the whole time; a moment's recovery begins anew."""
    wear = Wear(WEAR)
    assert wear.note(0, 5.0, Counters(), sequences=9) is None
    assert wear.note(9, 5.0, Counters(), sequences=9) is None
    assert "5.0 times what is predicted" in (
        wear.note(10, 5.0, Counters(), sequences=9) or ""
    )
    assert wear.note(11, 1.0, Counters(), sequences=9) is None
    assert wear.note(12, 5.0, Counters(), sequences=9) is None
    assert wear.note(21, 5.0, Counters(), sequences=9) is None
    assert wear.note(22, 5.0, Counters(), sequences=9) is not None


def _later(counters: Counters, answers: int, ttft_s: float) -> Counters:
    new = 136.0 * answers
    return Counters(
        prompt_tokens=counters.prompt_tokens + new,
        ttft_s=counters.ttft_s + ttft_s * answers,
        first_tokens=counters.first_tokens + answers,
    )


def test_an_engines_own_first_tokens_tell_of_wear() -> None:
    """Its mean TTFT against its best, while it has little load; under load a TTFT is that of the queue."""
    options = WatchdogOptions(slow_factor=3, slow_s=0)
    wear = Wear(options)
    counters = Counters()
    wear.note(0, 1.0, counters, sequences=1)
    for ttft_s in (0.1, 0.12, 0.25):
        counters = _later(counters, 10, ttft_s)
        assert wear.note(1, 1.0, counters, sequences=1) is None
    counters = _later(counters, 10, 2.0)
    assert wear.note(2, 1.0, counters, sequences=12) is None
    counters = _later(counters, 10, 0.5)
    assert "its own time to first token is 5.0 times its best" in (
        wear.note(3, 1.0, counters, sequences=1) or ""
    )


def test_off_by_is_the_worse_of_both_times() -> None:
    """Seen over predicted, faded to now; 1 where no speed is known."""
    replica = Replica("fast-0", SPEC, url="u", api_key="", model="m", status=READY)
    assert off_by(replica, 0.0) == 1
    replica.measured(SpeedModel(10, 1, 10))
    replica.update(
        trends=Trends(Trend(0.0, 0.1, 0.0), Trend(1.0986122886681098, 0.1, 0.0))
    )
    assert off_by(replica, 0.0) == pytest.approx(3)
    assert off_by(replica, 1e6) == pytest.approx(1)


@pytest.mark.anyio
async def test_a_killed_engine_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After kill -9 it is starting with the reason, then ready again as another process; its last log is kept."""
    async with own_engines(tmp_path, monkeypatch) as own:
        before = own.first.state.pid
        assert before is not None
        os.kill(before, signal.SIGKILL)
        await until(lambda: own.first.state.status is STARTING)
        assert (own.first.state.detail or "").startswith(
            "restart 1 after: exited with status 137"
        )
        await until(lambda: own.first.state.status is READY)
        assert own.first.state.pid not in {None, before}
        assert own.first.state.detail is None
        assert own.supervisor.log_path(own.first).with_suffix(".log.1").exists()
        assert len(own.fleet.replicas) == 1


@pytest.mark.anyio
async def test_a_crash_loop_ends_failed_until_a_person_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one restart allowed, the next exit leaves it failed; the detail has the command, and that brings it back."""
    options = WatchdogOptions(max_restarts=1)
    async with own_engines(tmp_path, monkeypatch, watchdog=options) as own:
        own.next_starts(exit_after_s=0.1)
        assert own.first.state.pid is not None
        os.kill(own.first.state.pid, signal.SIGKILL)
        await until(lambda: own.first.state.status is FAILED)
        assert "'qarr tiers restart fast-0'" in (own.first.state.detail or "")
        assert "exited with status 7" in (own.first.state.detail or "")
        own.next_starts()
        operation = own.supervisor.operations.begin("restart", "fast-0")
        await until(lambda: operation.state == "done")
        assert own.first.state.status is READY


@pytest.mark.anyio
@pytest.mark.parametrize(
    "behaviour",
    [{"exit_after_s": 0}, {"exit_after_s": 1.5, "hung": ["/metrics"]}],
    ids=["before it listens", "in its warm-up"],
)
async def test_a_first_start_that_fails_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: dict[str, Any]
) -> None:
    """An engine that never was ready stays down, with its last words, also where it exits in the midst of a request."""
    async with own_engines(
        tmp_path, monkeypatch, ready=False, behaviour=behaviour
    ) as own:
        assert "exited with status 7" in (own.first.state.detail or "")
        assert [state for _, state, _ in own.seen].count(STARTING) <= 1


@pytest.mark.anyio
async def test_a_hung_engine_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests without a token, and not even one token for the watchdog: killed, with the reason."""
    monkeypatch.setattr("tiers.lifecycle.watchdog.HANG_PROOF_S", 0.5)
    async with own_engines(
        tmp_path, monkeypatch, watchdog=WatchdogOptions(hang_s=4)
    ) as own:
        before = own.first.state.pid
        await own.behave(own.first, stall_after=0)
        lease = own.fleet.lease(TierName.FAST, prompt_tokens=5, max_tokens=5)
        assert lease is not None
        await until(lambda: own.first.state.status is STARTING)
        lease.release()
        await until(lambda: own.first.state.status is READY)
        assert own.first.state.pid != before
        # seen before
        assert any(
            "no token has come for 1 s" in detail for detail in own.details(READY)
        )
        assert any(
            "restart 1 after: hung: 1 requests" in detail
            for detail in own.details(STARTING)
        )


@pytest.mark.anyio
async def test_a_slow_request_is_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that answers the watchdog's own request lives on, however long another one takes."""
    async with own_engines(
        tmp_path, monkeypatch, watchdog=WatchdogOptions(hang_s=0.3)
    ) as own:
        before = own.first.state.pid
        lease = own.fleet.lease(TierName.FAST, prompt_tokens=5, max_tokens=5)
        assert lease is not None
        # the watchdog finds it silent, asks, and begins to count anew
        for _ in range(3):
            await until(lambda: own.first.silence_s(time.monotonic()) > 0.3)
            await until(lambda: own.first.silence_s(time.monotonic()) < 0.3)
        assert own.first.state.status == READY
        assert own.first.state.pid == before
        lease.release()


@pytest.mark.anyio
async def test_an_engine_without_health_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that lives but answers nothing for long enough is killed; before, it is told, and then unreachable."""
    async with own_engines(
        tmp_path, monkeypatch, watchdog=WatchdogOptions(unreachable_s=0.5)
    ) as own:
        own.supervisor._client.timeout = 0.2
        before = own.first.state.pid or 0
        os.kill(before, signal.SIGSTOP)
        await until(lambda: own.first.state.status is STARTING)
        own.supervisor._client.timeout = 10
        await until(lambda: own.first.state.status is READY)
        assert own.first.state.pid != before
        assert ReplicaStatus.UNREACHABLE in {state for _, state, _ in own.seen}
        assert any(
            detail.startswith("it does not answer health checks")
            for detail in own.details(READY)
        )
        assert any(
            "after: no answer to health checks for 0.5 s" in detail
            for detail in own.details(STARTING)
        )


@pytest.mark.anyio
async def test_a_worn_engine_is_recycled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times slower than predicted for long enough: a new one takes its place."""
    async with own_engines(
        tmp_path, monkeypatch, watchdog=WatchdogOptions(slow_factor=3, slow_s=0.5)
    ) as own:
        await until(lambda: own.first.state.speed is not None)
        slow = own.first
        for _ in range(10):
            trends = slow.state.trends
            slow.update(
                trends=Trends(
                    trends.ttft,
                    trends.tpot.after(10, 80, now=time.monotonic(), spread=0.3),
                )
            )
        await until(lambda: own.replica("fast-0") is None)
        assert [(r.id, r.state.status) for r in own.fleet.replicas] == [
            ("fast-1", READY)
        ]


@pytest.mark.anyio
@pytest.mark.parametrize(("status", "hung"), [(200, False), (500, True)])
@pytest.mark.parametrize("takes_priority", [True, False])
async def test_an_engine_that_answers_the_watchdog_does_not_hang(
    status: int, *, hung: bool, takes_priority: bool
) -> None:
    """Its request goes before all others, where the engine takes priorities, and has one token."""
    behaviour = Behaviour(status=status, priorities=takes_priority)
    replica = Replica(
        "fast-0", SPEC, url="u", api_key="", model="m", takes_priority=takes_priority
    )
    async with (
        serving(FakeEngine(behaviour).app) as url,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        assert await hangs(EngineProbe(client, url, ""), replica) is hung
    (asked,) = behaviour.requests
    assert asked["max_tokens"] == 1
    assert asked.get("priority", 0) == (-(1 << 20) if takes_priority else 0)


def test_nothing_is_looked_at_where_it_is_switched_off() -> None:
    wear = Wear(WatchdogOptions(slow_factor=0, slow_s=0))
    counters = Counters()
    for now in range(30):
        counters = _later(counters, 20, float(now))
        assert wear.note(now, 1000.0, counters, sequences=1) is None
