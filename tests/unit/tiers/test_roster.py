"""Which engines that run elsewhere are in the fleet, whoever names them, and how they come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.engine import Behaviour, FakeEngine, serving_all
from tests.unit.tiers.rosters import FAST, PRECISE, READY, ids, watched
from tests.waiting import until
from tiers.address import normalised
from tiers.errors import NotPossibleError
from tiers.lifecycle.canary import Canary, read_canary
from tiers.lifecycle.operations import Operation, OperationOptions
from tiers.lifecycle.roster import Source, all_wanted
from tiers.lifecycle.supervisor import Supervisor
from tiers.replica import Replica
from tiers.spec import ReplicaStatus, TierName

pytestmark = pytest.mark.anyio
DRAINING = ReplicaStatus.DRAINING


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.lifecycle.watching.POLL_S", 0.02)
    monkeypatch.setattr("tiers.lifecycle.operations.POLL_S", 0.02)
    monkeypatch.setattr("tiers.lifecycle.roster.RETRY_S", 0.02)


def add(supervisor: Supervisor, url: str, tier: TierName = FAST) -> Replica:
    return supervisor.operations.roster.add(tier, url)


async def removed(
    supervisor: Supervisor, replica: str, *, now: bool = False
) -> Operation:
    """Remove a replica, and wait until it is."""
    operation = supervisor.operations.begin("remove", replica, now=now)
    await until(lambda: operation.state != "running")
    return operation


def test_what_several_sources_name_is_one_engine() -> None:
    """It has all of them as its source, the strongest first; if they differ in the tier, the strongest one's counts."""
    found = all_wanted({
        (Source.DNS, FAST): {FAST: ("http://10.0.0.5:8000",)},
        (Source.FILE, ""): {PRECISE: ("http://10.0.0.5:8000/", "http://10.0.0.7:8000"), FAST: ("http://10.0.0.6:8000",)},
        (Source.SETTINGS, ""): {FAST: ("http://10.0.0.6:8000/", "http://10.0.0.5:8000")},
    })  # fmt: skip
    assert [(each.tier, each.url, each.source) for each in found.values()] == [
        (FAST, "http://10.0.0.6:8000", "settings, file"),
        (FAST, "http://10.0.0.5:8000", "settings, dns"),
        (PRECISE, "http://10.0.0.7:8000", "file"),
    ]
    same = [
        ("http://localhost:80/", "http://127.0.0.1"),
        ("https://A.example", "https://a.example:443/"),
    ]
    assert [
        {normalised(url) for url in urls} == {normalised(urls[0])} for urls in same
    ] == [True, True]
    assert (
        len(
            {
                normalised(f"http://{host}:8000")
                for host in ("127.0.0.1", "127.0.0.2", "[::1]", "h", "[fd00::1]")
            }
        )
        == 5
    )


async def test_an_added_engine_is_warmed_and_compared_before_it_serves(
    tmp_path: Path,
) -> None:
    """As one of the settings: its scores are recorded, and it is no tier's before it is ready."""
    canary = Canary(tmp_path / "canary.json")
    canary.accept(FAST)
    behaviour = Behaviour(alive=False, root="made/fast")
    async with (
        serving_all(FakeEngine(behaviour).app) as (url,),
        watched(tmp_path, canary=canary) as supervisor,
    ):
        fleet = supervisor.fleet
        assert fleet.snapshot().tier(FAST).status is ReplicaStatus.ABSENT
        replica = add(supervisor, f"{url}/")
        assert replica.url == url
        assert replica.source == "command"
        assert fleet.spec(FAST).absent is False
        await until(lambda: replica.state.status is ReplicaStatus.UNREACHABLE)
        assert fleet.lease(FAST, prompt_tokens=1, max_tokens=1) is None
        behaviour.alive = True
        await until(lambda: replica.state.status is READY)
        assert [record.identity for record in read_canary(canary.path).records] == [url]
        assert fleet.spec(FAST).precision == "awq-int4"
        with pytest.raises(
            NotPossibleError, match="is in tier fast already, named by command"
        ):
            add(supervisor, url, PRECISE)


async def test_a_removed_engine_drains_and_is_forgotten(tmp_path: Path) -> None:
    """It gets no more requests, its open one goes on; then neither replica, engine nor recorded scores are left."""
    canary = Canary(tmp_path / "canary.json")
    canary.accept(FAST)
    async with (
        serving_all(FakeEngine().app) as (url,),
        watched(tmp_path, (url,), canary=canary) as supervisor,
    ):
        fleet = supervisor.fleet
        await until(lambda: ids(supervisor) == ["fast-0"])
        lease = fleet.lease(FAST, prompt_tokens=1, max_tokens=1)
        assert lease is not None
        operation = supervisor.operations.begin("remove", "fast-0")
        await until(
            lambda: (
                fleet.replicas[0].state.status is DRAINING
                and "1 open request" in operation.detail
            )
        )
        assert fleet.lease(FAST, prompt_tokens=1, max_tokens=1) is None
        with pytest.raises(NotPossibleError, match="fast-0 is busy: remove"):
            supervisor.operations.begin("resume", "fast-0")
        lease.release()
        await until(lambda: operation.state == "done")
        assert operation.detail == "removed"
        assert fleet.replicas == []
        assert supervisor.engines == ()
        assert read_canary(canary.path).records == ()
        assert fleet.snapshot().tier(FAST).status is ReplicaStatus.STOPPED


async def test_a_removal_at_once_waits_for_nobody(tmp_path: Path) -> None:
    """Also after one that waits; the open request ends as it may, and its counters with it."""
    async with (
        serving_all(FakeEngine().app) as (url,),
        watched(tmp_path, (url,)) as supervisor,
    ):
        await until(lambda: ids(supervisor) == ["fast-0"])
        lease = supervisor.fleet.lease(FAST, prompt_tokens=1, max_tokens=1)
        assert lease is not None
        patient = supervisor.operations.begin("remove", "fast-0")
        await until(lambda: "waits" in patient.detail)
        operation = await removed(supervisor, "fast-0", now=True)
        assert patient.state == "failed"
        assert operation.state == "done"
        assert operation.detail == "removed; the engine has 1 open request to finish"
        lease.release()
        assert lease.replica.state.in_flight == 0


async def test_an_engine_that_is_added_again_while_it_drains_stays(
    tmp_path: Path,
) -> None:
    """Its removal is broken off, and it gets requests again, under the same name."""
    async with (
        serving_all(FakeEngine().app) as (url,),
        watched(tmp_path, (url,)) as supervisor,
    ):
        await until(lambda: ids(supervisor) == ["fast-0"])
        lease = supervisor.fleet.lease(FAST, prompt_tokens=1, max_tokens=1)
        assert lease is not None
        operation = supervisor.operations.begin("remove", "fast-0")
        await until(lambda: "waits" in operation.detail)
        with pytest.raises(NotPossibleError, match="still being removed as fast-0"):
            add(supervisor, url, PRECISE)
        assert add(supervisor, url) is supervisor.fleet.replicas[0]
        assert operation.state == "failed"
        assert ids(supervisor) == ["fast-0"]
        assert lease.replica.source == "command"
        lease.release()
        assert (await removed(supervisor, "fast-0")).state == "done"


async def test_what_was_removed_can_be_added_anew(tmp_path: Path) -> None:
    """With a name of its own; what a tier shows is that of the engines that it has."""
    roots = ("made/fast", "made/precise")
    async with (
        serving_all(*(FakeEngine(Behaviour(root=root)).app for root in roots)) as urls,
        watched(tmp_path, tuple(urls)) as supervisor,
    ):
        await until(lambda: len(ids(supervisor)) == 2)
        assert supervisor.fleet.spec(FAST).precision == "awq-int4, bf16"
        await removed(supervisor, "fast-1")
        assert supervisor.fleet.spec(FAST).precision == "awq-int4"
        assert add(supervisor, urls[1]).id == "fast-2"
        await until(lambda: ids(supervisor) == ["fast-0", "fast-2"])


async def test_an_engine_that_changes_its_tier_leaves_the_old_one_first(
    tmp_path: Path,
) -> None:
    """It is never in two tiers: its load would be counted twice."""
    async with serving_all(FakeEngine().app) as (url,), watched(tmp_path) as supervisor:
        roster = supervisor.operations.roster
        roster.name(Source.FILE, {FAST: (url,)})
        await until(lambda: ids(supervisor) == ["fast-0"])
        lease = supervisor.fleet.lease(FAST, prompt_tokens=1, max_tokens=1)
        assert lease is not None
        roster.name(Source.FILE, {PRECISE: (url,)})
        await until(lambda: supervisor.fleet.replicas[0].state.status is DRAINING)
        assert ids(supervisor, None) == ["fast-0"]
        lease.release()
        await until(lambda: ids(supervisor) == ["precise-0"])


async def test_a_drain_gives_way_to_a_removal(tmp_path: Path) -> None:
    """An operator's drain waits for requests as well: the removal takes its place."""
    async with (
        serving_all(FakeEngine().app) as (url,),
        watched(tmp_path, (url,)) as supervisor,
    ):
        await until(lambda: ids(supervisor) == ["fast-0"])
        lease = supervisor.fleet.lease(FAST, prompt_tokens=1, max_tokens=1)
        assert lease is not None
        drain = supervisor.operations.begin("drain", "fast-0")
        await until(lambda: "waits" in drain.detail)
        operation = supervisor.operations.begin("remove", "fast-0")
        assert drain.state == "failed"
        lease.release()
        await until(lambda: operation.state == "done")


async def test_an_engine_that_never_ends_its_requests_is_removed_after_drain_s(
    tmp_path: Path,
) -> None:
    """The time is that of every drain; the request is left to the engine."""
    options = OperationOptions(drain_s=0.1)
    async with (
        serving_all(FakeEngine().app) as (url,),
        watched(tmp_path, (url,), operations=options) as supervisor,
    ):
        await until(lambda: ids(supervisor) == ["fast-0"])
        with supervisor.fleet.lease(FAST, prompt_tokens=1, max_tokens=1) or pytest.fail(
            "no slot"
        ):
            operation = await removed(supervisor, "fast-0")
        assert operation.detail == "removed; the engine has 1 open request to finish"


async def test_engines_come_and_go_many_times_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    """After fifty replicas, no task, engine, record or count of a former one remains."""
    async with serving_all(FakeEngine().app) as (url,), watched(tmp_path) as supervisor:
        tasks: Callable[[], int] = lambda: len(asyncio.all_tasks())  # noqa: E731
        roster = supervisor.operations.roster
        before = tasks()
        for _ in range(50):
            roster.name(Source.FILE, {FAST: (url,)})
            roster.name(Source.FILE, {FAST: ()})
            await until(lambda: not supervisor.engines)
        assert supervisor.fleet.replicas == []
        assert supervisor.operations._running == {}
        await until(lambda: tasks() == before)
