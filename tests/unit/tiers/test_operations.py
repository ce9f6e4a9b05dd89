"""What operators do to replicas: drain, resume, restart, recycle, by the supervisor and over the endpoints."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from classifier import EstimatingCounter
from router.api.problems import refusal
from router.app import App
from router.auth.access import KeyStore
from router.server.http_protocol import protocol_for
from router.settings import load_settings
from router.telemetry.tracing import Telemetry
from tests.fakes.engine import serving
from tests.unit.own_engines import Own, own_engines
from tests.unit.router_stack import router_stack
from tests.waiting import until
from tiers.errors import NotPossibleError, UnknownReplicaError
from tiers.fleet import Fleet
from tiers.lifecycle.engine import Engine
from tiers.lifecycle.operations import (
    MAX_RECORDS,
    Kind,
    Operation,
    OperationOptions,
    Operations,
)
from tiers.lifecycle.watchdog import WatchdogOptions
from tiers.replica import Replica
from tiers.spec import ReplicaStatus, TierName, TierSpec

pytestmark = pytest.mark.anyio
READY = ReplicaStatus.READY
DRAINING = ReplicaStatus.DRAINING
STARTING = ReplicaStatus.STARTING
QARR = Path(sys.executable).with_name("qarr")


async def finished(own: Own, kind: Kind, replica: str) -> Operation:
    operation = own.supervisor.operations.begin(kind, replica)
    await until(lambda: operation.state != "running")
    return operation


async def test_a_drain_does_not_wait_for_the_routers_own_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests give way, as to a caller's."""
    async with own_engines(tmp_path, monkeypatch) as own:
        lease = own.fleet.lease(TierName.FAST, prompt_tokens=0, max_tokens=0)
        assert lease is not None
        own.fleet.preempt = lease.release
        operation = own.supervisor.operations.begin("drain", "fast-0")
        await until(lambda: operation.state == "done")
        assert operation.detail == "drained"


async def test_drain_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drained, a replica gets nothing new while its request goes on, as the same process; resumed, it does again."""
    async with own_engines(tmp_path, monkeypatch) as own:
        pid = own.first.state.pid
        lease = own.fleet.lease(TierName.FAST, prompt_tokens=1, max_tokens=1)
        assert lease is not None
        operation = own.supervisor.operations.begin("drain", "fast-0")
        await until(lambda: operation.detail == "waits for 1 open request")
        assert own.first.state.status is DRAINING
        assert own.fleet.snapshot().tiers[0].status is DRAINING
        assert own.fleet.lease(TierName.FAST, prompt_tokens=1, max_tokens=1) is None
        lease.release()
        await until(lambda: operation.state == "done")
        assert operation.detail == "drained"
        assert "'qarr tiers resume fast-0'" in (own.first.state.detail or "")
        await finished(own, "resume", "fast-0")
        assert own.first.state.status == READY
        assert own.first.state.detail is None
        assert own.first.state.pid == pid


async def test_a_drained_engine_stays_drained_when_it_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart, asked for or not, gives no requests to an engine that a person has drained."""
    async with own_engines(tmp_path, monkeypatch) as own:
        await finished(own, "drain", "fast-0")
        operation = await finished(own, "restart", "fast-0")
        assert operation.state == "done"
        assert own.first.state.status == DRAINING


async def test_resume_breaks_a_drain_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a drain waits, only resume is possible; other operations say that the replica is busy."""
    async with own_engines(tmp_path, monkeypatch) as own:
        lease = own.fleet.lease(TierName.FAST, prompt_tokens=1, max_tokens=1)
        assert lease is not None
        drain = own.supervisor.operations.begin("drain", "fast-0")
        with pytest.raises(NotPossibleError, match=r"fast-0 is busy: drain"):
            own.supervisor.operations.begin("restart", "fast-0")
        await finished(own, "resume", "fast-0")
        assert drain.state == "failed"
        assert drain.detail == "broken off"
        assert own.first.state.status == READY
        lease.release()


async def test_restart_drains_stops_and_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart waits for the open request, and counts as none of the watchdog's."""
    async with own_engines(tmp_path, monkeypatch) as own:
        pid = own.first.state.pid
        lease = own.fleet.lease(TierName.FAST, prompt_tokens=1, max_tokens=1)
        assert lease is not None
        operation = own.supervisor.operations.begin("restart", "fast-0")
        await until(lambda: operation.detail == "waits for 1 open request")
        assert own.first.state.pid == pid
        lease.release()
        await until(lambda: operation.state == "done")
        assert own.first.state.pid != pid
        assert [s for _, s, _ in own.seen][-4:] == [
            DRAINING,
            STARTING,
            ReplicaStatus.WARMING,
            READY,
        ]
        assert not [detail for detail in own.details(STARTING) if "after:" in detail]


async def test_drain_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is still open after engine.drain_s is broken off by a restart, and told."""
    async with own_engines(
        tmp_path, monkeypatch, operations=OperationOptions(drain_s=0.3)
    ) as own:
        lease = own.fleet.lease(TierName.FAST, prompt_tokens=1, max_tokens=1)
        operation = await finished(own, "drain", "fast-0")
        assert operation.detail == "1 open request left; it gets no new ones"
        pid = own.first.state.pid
        assert (await finished(own, "restart", "fast-0")).state == "done"
        assert own.first.state.pid != pid
        assert lease is not None
        lease.release()


async def test_recycling_never_lowers_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new engine is ready before the old one drains; a request on the old one ends there; ids stay unique."""
    async with own_engines(tmp_path, monkeypatch) as own:
        lease = own.fleet.lease(TierName.FAST, prompt_tokens=1, max_tokens=1)
        assert lease is not None
        operation = own.supervisor.operations.begin("recycle", "fast-0")
        least = 9

        def has_ended() -> bool:
            nonlocal least
            least = min(least, sum(r.state.status is READY for r in own.fleet.replicas))
            if operation.detail == "waits for 1 open request":
                assert lease.replica.state.status is DRAINING
                lease.release()
            return operation.state != "running"

        await until(has_ended, "the engine to be recycled", poll_s=0.01)
        assert operation.state == "done"
        assert operation.successor == "fast-1"
        assert least == 1
        assert [(r.id, r.state.status) for r in own.fleet.replicas] == [
            ("fast-1", READY)
        ]
        assert (await finished(own, "recycle", "fast-1")).successor == "fast-2"
        assert len({r.url for r in own.fleet.replicas}) == 1
        with pytest.raises(UnknownReplicaError, match=r"'fast-0': fast-2"):
            own.supervisor.operations.begin("drain", "fast-0")


async def test_a_new_engine_that_fails_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recycling with an engine that does not start ends with the reason, and nothing has changed."""
    async with own_engines(tmp_path, monkeypatch) as own:
        # otherwise it might be ready for a moment, and would be started again
        own.next_starts(exit_after_s=0.1, alive=False)
        pid = own.first.state.pid
        operation = await finished(own, "recycle", "fast-0")
        assert operation.state == "failed"
        assert "fast-1 did not become ready: exited with status 7" in operation.detail
        assert [(r.id, r.state.status, r.state.pid) for r in own.fleet.replicas] == [
            ("fast-0", READY, pid)
        ]


async def test_in_place_needs_another_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory for two, an engine goes only while another one is ready; then the same replica comes back as a new process."""
    async with own_engines(
        tmp_path, monkeypatch, TierName.FAST, TierName.PRECISE, gib=1e9
    ) as own:
        await finished(own, "drain", "precise-0")
        assert (
            "nothing would serve meanwhile"
            in (await finished(own, "recycle", "fast-0")).detail
        )
        await finished(own, "resume", "precise-0")
        pid = own.first.state.pid
        operation = await finished(own, "recycle", "fast-0")
        assert operation.state == "done"
        assert operation.successor is None
        assert own.first.id == "fast-0"
        assert own.first.state.status == READY
        assert own.first.state.pid != pid


async def test_recycling_by_schedule_is_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every engine is recycled in time, and never two of them at once."""
    every = OperationOptions(recycle_every_s=3)
    async with own_engines(
        tmp_path, monkeypatch, TierName.FAST, TierName.PRECISE, operations=every
    ) as own:
        most = 0
        async with asyncio.timeout(40):
            while own.replica("fast-0") or own.replica("precise-0"):
                running = [
                    o for o in own.supervisor.operations.records if o.state == "running"
                ]
                most = max(most, len(running))
                await asyncio.sleep(0.02)
        assert most == 1


async def test_an_engine_by_url_is_drained_but_not_restarted(tmp_path: Path) -> None:
    """What runs elsewhere can be left out of traffic; restarting it is for where it runs, and said so."""
    async with router_stack(tmp_path) as stack:
        operate = f"{stack.url}/admin/replicas/fast-0"
        begun = await stack.client.post(f"{operate}/drain")
        assert begun.status_code == 202
        assert begun.json()["operation"] == "drain"
        answer = await stack.generate(tier="fast")
        assert answer.headers["x-qarr-tier"] == "balanced"
        assert "hint fast not taken: is draining" in answer.headers["x-qarr-reason"]
        shown = (
            await stack.client.get(f"{stack.url}/admin/operations/{begun.json()['id']}")
        ).json()
        assert shown["replica"] == "fast-0"
        refused = await stack.client.post(f"{operate}/restart")
        assert refused.status_code == 409
        assert refused.json()["type"] == "urn:qarr:problem:not-possible"
        assert "restart it where it runs" in refused.json()["detail"]
        await stack.client.post(f"{operate}/resume")
        assert (await stack.generate(tier="fast")).headers["x-qarr-tier"] == "fast"
        listed = (await stack.client.get(f"{stack.url}/admin/operations")).json()[
            "operations"
        ]
        assert [o["operation"] for o in listed] == ["drain", "resume"]


async def test_the_command_operates_on_a_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`qarr tiers` lists; drain, resume, restart and recycle show their progress; a tier's name means its replicas."""
    async with own_engines(
        tmp_path, monkeypatch, TierName.FAST, TierName.PRECISE
    ) as own:
        settings = load_settings()
        app = App(
            settings, own.fleet, EstimatingCounter(), telemetry=Telemetry(None), model="fake", keys=KeyStore(settings.auth.keys_file),
            operations=own.supervisor.operations,
        ).asgi  # fmt: skip
        async with serving(app, http=protocol_for(settings.server, refusal)) as url:

            async def tiers(*args: str) -> subprocess.CompletedProcess[str]:
                return await asyncio.to_thread(
                    subprocess.run,
                    [QARR, "tiers", *args, "--url", url],
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=100,
                )

            drained = await tiers("drain", "fast")
            assert drained.returncode == 0
            assert drained.stdout == "fast-0: drain done, drained\n"
            listed = (await tiers()).stdout
            assert all(
                part in listed for part in ("fast-0", "precise-0", "draining")
            ), listed
            assert (
                await tiers("resume", "fast-0")
            ).stdout == "fast-0: resume done, is ready\n"
            restarted = await tiers("restart", "precise")
            assert restarted.stdout == "precise-0: restart done, is ready\n"
            assert "starting" in restarted.stderr
            # the new engine warms up slowly, so that the command sees it start
            own.next_starts(first_delay_s=0.5)
            recycled = await tiers("recycle", "fast")
            assert recycled.stdout == "fast-0: recycle done, fast-1 serves\n"
            assert "fast-1 starts beside it" in recycled.stderr
            unknown = await tiers("drain", "nobody")
            assert unknown.returncode == 2
            assert (
                "no tier or replica 'nobody': fast, precise, fast-1, precise-0"
                in unknown.stderr
            )


async def test_requests_are_served_while_an_engine_is_recycled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A steady stream of requests to one tier alone sees no error while its only engine is replaced, twice."""
    async with own_engines(tmp_path, monkeypatch, behaviour={"delay_s": 0.02}) as own:
        settings = load_settings()
        app = App(
            settings,
            own.fleet,
            EstimatingCounter(),
            telemetry=Telemetry(None),
            model="fake",
            keys=KeyStore(settings.auth.keys_file),
        ).asgi
        answers: list[tuple[int, bool]] = []
        served = serving(app, http=protocol_for(settings.server, refusal))
        async with (
            served as url,
            httpx.AsyncClient(timeout=20, trust_env=False) as client,
        ):
            stop = False

            async def ask() -> None:
                body: dict[str, Any] = {
                    "prompt": "hi",
                    "tier": "fast",
                    "tier_policy": "require",
                }
                while not stop:
                    answer = await client.post(f"{url}/generate", json=body)
                    answers.append((answer.status_code, "event: done" in answer.text))

            asking = [asyncio.create_task(ask()) for _ in range(8)]
            assert (await finished(own, "recycle", "fast-0")).state == "done"
            assert (await finished(own, "recycle", "fast-1")).state == "done"
            stop = True
            await asyncio.gather(*asking)
        assert len(answers) > 20
        assert set(answers) == {(200, True)}
        assert own.fleet.replicas[0].state.served > 0


class Control:
    """Engines that are there, as far as operations that start none need them."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.engines = tuple(
            Engine(replica, None, WatchdogOptions()) for replica in fleet.replicas
        )

    def engine(self, replica_id: str) -> Engine:
        for engine in self.engines:
            if engine.replica.id == replica_id:
                return engine
        raise UnknownReplicaError(replica_id)

    def hold(self, engine: Engine, why: str) -> None:
        engine.replica.mark(DRAINING, why)

    def resume(self, engine: Engine) -> None:
        engine.replica.mark(READY)

    def start_beside(self, engine: Engine) -> Engine:
        raise AssertionError(engine)

    async def retire(self, engine: Engine) -> None:
        raise AssertionError(engine)


def operations(options: OperationOptions | None = None) -> tuple[Fleet, Operations]:
    spec = TierSpec(
        TierName.FAST, max_model_len=2048, max_num_seqs=16, max_in_flight=32
    )
    fleet = Fleet((spec,))
    fleet.add(Replica("fast-0", spec, url="u", api_key="", model="m", status=READY))
    return fleet, Operations(Control(fleet), options or OperationOptions())


async def test_the_last_operations_are_remembered() -> None:
    """By numbers that go on; older ones are unknown, and the error says how many there are."""
    _, ours = operations()
    for _ in range(MAX_RECORDS + 1):
        begun = ours.begin("resume", "fast-0")
        assert begun.task is not None
        await begun.task
    assert [len(ours.records), ours.records[0].id, ours.records[-1].id] == [
        MAX_RECORDS,
        "2",
        str(MAX_RECORDS + 1),
    ]
    assert ours.record("2") is ours.records[0]
    with pytest.raises(
        UnknownReplicaError, match=r"no operation '1': the last 100 are remembered"
    ):
        ours.record("1")


async def test_an_operation_tells_when_it_ended_and_how() -> None:
    fleet, ours = operations()
    lease = fleet.lease(TierName.FAST, prompt_tokens=1, max_tokens=1)
    assert lease is not None
    drain = ours.begin("drain", "fast-0")
    assert drain.state == "running"
    assert drain.detail == "begun"
    assert drain.ended is None
    lease.release()
    await until(lambda: drain.ended is not None)
    assert drain.state == "done"
    assert drain.detail == "drained"
    assert drain.ended is not None
    assert drain.ended >= drain.began


async def test_stopping_breaks_operations_off() -> None:
    """None is left that waits for requests of a router that ends."""
    fleet, ours = operations()
    lease = fleet.lease(TierName.FAST, prompt_tokens=1, max_tokens=1)
    assert lease is not None
    drain = ours.begin("drain", "fast-0")
    await until(lambda: drain.detail == "waits for 1 open request")
    await ours.stop()
    assert drain.state == "failed"
    assert drain.detail == "broken off"
    lease.release()
