"""Engines given by URL: what they serve is asked of them, and one that is not to be trusted gets no traffic."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import Behaviour, FakeEngine, serving_all
from tests.waiting import until
from tiers.fleet import Fleet
from tiers.lifecycle.canary import Canary, read_canary
from tiers.lifecycle.operations import Kind, Operation
from tiers.lifecycle.options import SupervisorOptions
from tiers.lifecycle.supervisor import Supervisor
from tiers.lifecycle.watchdog import WatchdogOptions, Wear
from tiers.replica import Replica
from tiers.snapshot import Trends
from tiers.spec import EngineBuild, ReplicaStatus, TierName, TierSpec
from tiers.speed import SpeedModel

pytestmark = pytest.mark.anyio
FAST = TierName.FAST
QUARANTINED = ReplicaStatus.QUARANTINED


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.lifecycle.watching.POLL_S", 0.02)
    monkeypatch.setattr("tiers.lifecycle.elsewhere_engine.RETRY_PAUSE_S", 0.02)
    monkeypatch.setattr("tiers.lifecycle.operations.POLL_S", 0.02)


@asynccontextmanager
async def elsewhere(
    tmp_path: Path,
    *behaviours: Behaviour,
    stated: str | None = None,
    ready: int | None = None,
    **options: Any,
) -> AsyncIterator[Supervisor]:
    """Watch engines of one tier, given by URL, and wait until they are ready, or so many of them."""
    async with serving_all(
        *(FakeEngine(behaviour).app for behaviour in behaviours)
    ) as urls:
        fleet = Fleet(
            (
                TierSpec(
                    FAST,
                    max_model_len=2048,
                    max_num_seqs=16,
                    max_in_flight=32,
                    urls=tuple(urls),
                    stated_precision=stated,
                ),
            )
        )
        supervisor = Supervisor(fleet, SupervisorOptions(tmp_path, **options))
        supervisor.start([], fleet.specs)
        try:
            wanted = len(behaviours) if ready is None else ready
            await until(
                lambda: (
                    sum(r.state.status is ReplicaStatus.READY for r in fleet.replicas)
                    >= wanted
                )
            )
            yield supervisor
        finally:
            await supervisor.stop()


async def test_an_engines_precision_is_that_of_the_checkpoint_it_names(
    tmp_path: Path,
) -> None:
    """Of the tier as well as of its replica, whatever the tier is called."""
    async with elsewhere(tmp_path, Behaviour(root="made/balanced")) as watched:
        assert (
            watched.fleet.spec(FAST).precision
            == watched.fleet.replicas[0].spec.precision
            == "fp8"
        )
        assert watched.fleet.snapshot().tier(FAST).replicas[0].precision == "fp8"


async def test_a_quantized_kv_cache_is_a_part_of_the_precision(
    tmp_path: Path,
) -> None:
    """What the engine is, as its version and its metrics tell, is known of the replica and of the tier."""
    behaviour = Behaviour(root="made/balanced", version="0.9", kv_cache_dtype="fp8")
    async with elsewhere(tmp_path, behaviour) as watched:
        replica = watched.fleet.replicas[0]
        build = EngineBuild(version="0.9", kv_cache_dtype="fp8")
        assert watched.fleet.spec(FAST).precision == "fp8+kv-fp8"
        assert replica.state.precision == "fp8+kv-fp8"
        assert replica.state.build == build
        assert watched.fleet.builds(FAST) == (build,)


async def test_replicas_that_differ_in_precision_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tier has all that it serves, and the log a warning; each replica has its own."""
    caplog.set_level(logging.WARNING, "qarr.tiers")
    roots = ("made/fast", "/a folder/of its own machine")
    async with elsewhere(
        tmp_path, *(Behaviour(root=root) for root in roots)
    ) as watched:
        fleet = watched.fleet
        assert [r.spec.precision for r in fleet.replicas] == ["awq-int4", "unknown"]
        assert fleet.spec(FAST).precision == "awq-int4, unknown"
        assert (
            "the replicas of tier fast differ in precision: awq-int4, unknown"
            in caplog.text
        )


async def test_an_engine_that_cannot_say_differs_from_one_that_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "qarr.tiers")
    late = Behaviour(alive=False)
    async with elsewhere(
        tmp_path, Behaviour(root="made/fast"), late, ready=1
    ) as watched:
        assert watched.fleet.spec(FAST).precision == "awq-int4"
        assert "differ" not in caplog.text
        late.alive = True
        await until(
            lambda: watched.fleet.replicas[1].state.status is ReplicaStatus.READY
        )
        assert (
            "the replicas of tier fast differ in precision: awq-int4, unknown"
            in caplog.text
        )


async def test_a_stated_precision_is_shown_as_stated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And a checkpoint that contradicts it is shown as well, and logged."""
    caplog.set_level(logging.WARNING, "qarr.tiers")
    async with elsewhere(tmp_path, Behaviour(), stated="fp8") as watched:
        assert watched.fleet.spec(FAST).precision == "fp8 (stated)"
        assert not caplog.records
    async with elsewhere(
        tmp_path, Behaviour(root="made/precise"), stated="fp8"
    ) as watched:
        assert (
            watched.fleet.spec(FAST).precision == "fp8 (stated; its checkpoint is bf16)"
        )
        assert (
            "tiers.fast.precision is fp8, but the checkpoint made/precise is bf16"
            in caplog.text
        )


async def test_an_engine_that_was_replaced_is_asked_again(tmp_path: Path) -> None:
    behaviour = Behaviour(root="made/fast")
    async with elsewhere(tmp_path, behaviour) as watched:
        (replica,) = watched.fleet.replicas
        behaviour.alive = False
        await until(lambda: replica.state.status is ReplicaStatus.UNREACHABLE)
        behaviour.root = "made/precise"
        behaviour.alive = True
        await until(lambda: replica.state.status is ReplicaStatus.READY)
        assert watched.fleet.spec(FAST).precision == replica.spec.precision == "bf16"


async def test_an_engine_that_serves_something_else_is_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a rolling update behind one address: it never looks away, and its list has another model."""
    monkeypatch.setattr("tiers.lifecycle.watching.MODEL_CHECK_S", 0.0)
    behaviour = Behaviour(root="made/fast")
    async with elsewhere(tmp_path, behaviour) as watched:
        (replica,) = watched.fleet.replicas
        behaviour.root = "made/precise"
        await until(
            lambda: (
                replica.spec.precision == "bf16"
                and replica.state.status is ReplicaStatus.READY
            )
        )


def canary_of(tmp_path: Path) -> Canary:
    """Return a canary of a tier whose first starts an operator vouches for: nothing else is there to compare them with."""
    canary = Canary(tmp_path / "canary.json")
    canary.accept(FAST)
    return canary


async def replaced(watched: Supervisor, behaviour: Behaviour, **fields: Any) -> Replica:
    """Stop an engine where it runs, and start it again so that it behaves differently; return its replica."""
    replica = watched.fleet.replicas[0]
    behaviour.alive = False
    await until(lambda: replica.state.status is ReplicaStatus.UNREACHABLE)
    for name, value in fields.items():
        setattr(behaviour, name, value)
    behaviour.alive = True
    return replica


async def operated(
    watched: Supervisor, kind: Kind, replica: str = "fast-0"
) -> Operation:
    operation = watched.operations.begin(kind, replica)
    await until(lambda: operation.state != "running")
    return operation


async def test_what_an_engine_computes_belongs_to_its_url(tmp_path: Path) -> None:
    """Not to what the engine says about itself: another URL has a record of its own."""
    canary = canary_of(tmp_path)
    async with elsewhere(
        tmp_path, Behaviour(first_id=1), Behaviour(first_id=9), canary=canary
    ) as watched:
        records = {
            record.identity: record for record in read_canary(canary.path).records
        }
        assert records.keys() == {replica.url for replica in watched.fleet.replicas}
        assert {record.tier for record in records.values()} == {FAST}
        logprobs = [
            records[replica.url].texts[0].logprobs[0]
            for replica in watched.fleet.replicas
        ]
        assert logprobs == pytest.approx([-0.2, -1.0])


async def test_an_engine_that_answers_otherwise_is_quarantined(tmp_path: Path) -> None:
    """It gets no traffic, says why and what to do, and is asked nothing more by itself."""
    behaviour = Behaviour()
    async with elsewhere(tmp_path, behaviour, canary=canary_of(tmp_path)) as watched:
        replica = await replaced(watched, behaviour, first_id=5)
        await until(lambda: replica.state.status is QUARANTINED)
        detail = replica.state.detail or ""
        assert (
            "its log-probabilities of fixed texts are 0.50 nats a token from those of"
            in detail
        )
        assert (
            "If it is meant to be so: qarr tiers record fast, then resume it. "
            in detail
        )
        assert (
            "'qarr tiers resume fast-0' checks it again, and so does a restart where it runs"
            in detail
        )
        assert watched.fleet.lease(FAST, prompt_tokens=1, max_tokens=1) is None
        assert watched.fleet.snapshot().tier(FAST).status is QUARANTINED
        asked = len(behaviour.requests)
        for _ in range(5):
            await asyncio.sleep(0.02)
        assert replica.state.status == QUARANTINED
        assert len(behaviour.requests) == asked


async def test_a_quarantined_engine_that_is_mended_and_started_again_serves(
    tmp_path: Path,
) -> None:
    """Nobody need tell the router: it was away, so it is compared as at any start."""
    behaviour = Behaviour()
    async with elsewhere(tmp_path, behaviour, canary=canary_of(tmp_path)) as watched:
        replica = await replaced(watched, behaviour, first_id=5)
        await until(lambda: replica.state.status is QUARANTINED)
        await replaced(watched, behaviour, first_id=0)
        await until(lambda: replica.state.status is ReplicaStatus.READY)
        assert replica.state.detail is None


async def test_resume_compares_a_quarantined_engine_first(tmp_path: Path) -> None:
    """One that still answers otherwise stays where it is, with the reason; one that does not is served from at once."""
    behaviour = Behaviour()
    async with elsewhere(tmp_path, behaviour, canary=canary_of(tmp_path)) as watched:
        replica = await replaced(watched, behaviour, first_id=5)
        await until(lambda: replica.state.status is QUARANTINED)
        refused = await operated(watched, "resume")
        assert refused.state == "failed"
        assert replica.state.status == QUARANTINED
        assert (
            "fast-0 did not become ready: its log-probabilities of fixed texts are 0.50 nats"
            in refused.detail
        )
        behaviour.first_id = 0
        done = await operated(watched, "resume")
        assert done.state == "done"
        assert done.detail == "is ready"
        assert replica.state.status == ReplicaStatus.READY


async def test_weights_that_were_changed_on_purpose_are_recorded_anew(
    tmp_path: Path,
) -> None:
    """`qarr tiers record` and `qarr tiers resume`; what it computes is the measure from then on."""
    behaviour = Behaviour()
    canary = canary_of(tmp_path)
    async with elsewhere(tmp_path, behaviour, canary=canary) as watched:
        replica = await replaced(watched, behaviour, first_id=5)
        await until(lambda: replica.state.status is QUARANTINED)
        assert canary.accept(FAST) == 1
        assert (await operated(watched, "resume")).state == "done"
        assert [record.is_accepted for record in read_canary(canary.path).records] == [
            True
        ]
        await replaced(watched, behaviour, first_id=0)
        await until(lambda: replica.state.status is QUARANTINED)


async def test_a_drained_engine_is_compared_too_and_stays_drained(
    tmp_path: Path,
) -> None:
    """What an operator drained gets nothing when it is sound again; one resume ends both."""
    behaviour = Behaviour()
    async with elsewhere(tmp_path, behaviour, canary=canary_of(tmp_path)) as watched:
        await operated(watched, "drain")
        replica = await replaced(watched, behaviour, first_id=5)
        await until(lambda: replica.state.status is QUARANTINED)
        await replaced(watched, behaviour, first_id=0)
        await until(lambda: replica.state.status is ReplicaStatus.DRAINING)
        await replaced(watched, behaviour, first_id=5)
        await until(lambda: replica.state.status is QUARANTINED)
        behaviour.first_id = 0
        assert (await operated(watched, "resume")).detail == "is ready"


async def test_an_engine_that_gives_no_log_probabilities_serves_without_being_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As older releases of vLLM; the log says so."""
    caplog.set_level(logging.WARNING, "qarr.tiers")
    canary = canary_of(tmp_path)
    async with elsewhere(
        tmp_path, Behaviour(tells_ids=False), canary=canary
    ) as watched:
        assert watched.fleet.replicas[0].state.status is ReplicaStatus.READY
        assert "fast-0 serves without a check of what it computes" in caplog.text
        assert read_canary(canary.path).records == ()


async def test_an_engine_that_fails_while_it_is_compared_is_not_served(
    tmp_path: Path,
) -> None:
    """What it computes is not known; once it answers, it is compared and ready."""
    behaviour = Behaviour(scores=False)
    async with elsewhere(
        tmp_path, behaviour, canary=canary_of(tmp_path), ready=0
    ) as watched:
        (replica,) = watched.fleet.replicas
        await until(lambda: replica.state.status is ReplicaStatus.FAILED)
        behaviour.scores = True
        await until(lambda: replica.state.status is ReplicaStatus.READY)


async def test_an_engine_elsewhere_that_hangs_is_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no process to kill: it gets nothing more, and comes back when it answers an operator's check."""
    monkeypatch.setattr("tiers.lifecycle.watchdog.HANG_PROOF_S", 0.2)
    behaviour = Behaviour()
    async with elsewhere(
        tmp_path, behaviour, watchdog=WatchdogOptions(hang_s=0.2)
    ) as watched:
        (replica,) = watched.fleet.replicas
        behaviour.stall_after = 0
        lease = watched.fleet.lease(FAST, prompt_tokens=5, max_tokens=5)
        assert lease is not None
        await until(lambda: replica.state.status is QUARANTINED)
        lease.release()
        assert "hung: 1 requests, no token for 0.2 s. 'qarr tiers resume fast-0'" in (
            replica.state.detail or ""
        )
        behaviour.stall_after = None
        assert (await operated(watched, "resume")).detail == "is ready"


async def test_an_engine_that_computes_for_others_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our request waits in its queue behind theirs; its counters show that it works."""
    asked: list[str] = []

    async def hangs(_probe: object, replica: Replica) -> bool:
        asked.append(replica.id)
        return True

    monkeypatch.setattr("tiers.lifecycle.watching.hangs", hangs)
    behaviour = Behaviour()
    async with elsewhere(
        tmp_path, behaviour, watchdog=WatchdogOptions(hang_s=1.0)
    ) as watched:
        (replica,) = watched.fleet.replicas
        lease = watched.fleet.lease(FAST, prompt_tokens=5, max_tokens=5)
        assert lease is not None
        for _ in range(75):
            behaviour.tokens += 1
            await asyncio.sleep(0.02)
        assert asked == []
        assert replica.state.status == ReplicaStatus.READY
        await until(lambda: replica.state.status is QUARANTINED)
        lease.release()


def slow_down(replica: Replica) -> None:
    """Let a replica's answers take eight times what is predicted."""
    for _ in range(10):
        trends = replica.state.trends
        replica.update(
            trends=Trends(
                trends.ttft, trends.tpot.after(10, 80, now=time.monotonic(), spread=0.3)
            )
        )


SLOW = WatchdogOptions(slow_factor=3, slow_s=0.2)


async def test_a_slow_engine_elsewhere_is_quarantined_if_its_tier_has_another(
    tmp_path: Path,
) -> None:
    async with elsewhere(tmp_path, Behaviour(), Behaviour(), watchdog=SLOW) as watched:
        slow, other = watched.fleet.replicas
        await until(
            lambda: slow.state.speed is not None and other.state.speed is not None
        )
        slow_down(slow)
        await until(lambda: slow.state.status is QUARANTINED)
        assert "too slow: answers take " in (slow.state.detail or "")
        assert other.state.status is ReplicaStatus.READY


async def test_the_last_engine_of_a_tier_serves_on_however_slow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Slow answers are better than none. The log says it once."""
    caplog.set_level(logging.WARNING, "qarr.tiers")
    async with elsewhere(tmp_path, Behaviour(), watchdog=SLOW) as watched:
        (only,) = watched.fleet.replicas
        await until(lambda: only.state.speed is not None)
        slow_down(only)
        await until(
            lambda: "fast-0 serves on, as the last ready one of its tier" in caplog.text
        )
        for _ in range(10):
            await asyncio.sleep(0.02)
        assert only.state.status is ReplicaStatus.READY
        assert caplog.text.count("serves on") == 1


async def test_a_wait_behind_others_is_no_wear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's own times to a first token count only while nobody else has requests on it."""
    seen: list[int] = []
    monkeypatch.setattr(
        Wear, "note", lambda *_args, sequences, **_more: seen.append(sequences)
    )
    behaviour = Behaviour()
    async with elsewhere(tmp_path, behaviour):
        await until(lambda: 0 in seen)
        behaviour.running = 7
        await until(lambda: 7 in seen)


@pytest.mark.parametrize("used", ["now", "meanwhile"])
async def test_the_speed_of_an_engine_that_others_use_is_not_measured(
    tmp_path: Path, used: str
) -> None:
    """Nor compared: others' requests would make it look slow, and the measurement would slow them."""
    behaviour = Behaviour()
    async with elsewhere(tmp_path, behaviour) as watched:
        (replica,) = watched.fleet.replicas
        await until(lambda: replica.state.speed is not None)
        assert await watched._idle_speed.measure(replica) is not None
        before = behaviour.measurements
        if used == "now":
            behaviour.running = 1
            assert await watched._idle_speed.measure(replica) is None
            assert behaviour.measurements == before
        else:
            behaviour.delay_s = 0.02
            measuring = asyncio.create_task(watched._idle_speed.measure(replica))
            await until(lambda: behaviour.measurements > before)
            behaviour.tokens += 1
            assert await measuring is None


async def test_an_engine_elsewhere_that_is_much_slower_than_its_profile_is_quarantined(
    tmp_path: Path,
) -> None:
    """Alone on it, as one that is started here is refused."""
    behaviour = Behaviour(delay_s=0.01)
    canary = Canary(tmp_path / "canary.json", max_slowdown=4.0)
    async with elsewhere(tmp_path, behaviour, canary=canary) as watched:
        watched.fleet.speeds = {FAST: SpeedModel(10.0, 0.1, 10.0, profiled=True)}
        replica = await replaced(watched, behaviour, delay_s=0.1)
        await until(lambda: replica.state.status is QUARANTINED)
        assert "times the profile's 10.0 ms" in (replica.state.detail or "")
