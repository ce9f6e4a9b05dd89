"""Those who watch engines go on, whatever an engine answers and whatever fails here; operations always end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import Behaviour, FakeEngine, serving, serving_all
from tests.unit.own_engines import own_engines
from tests.unit.tiers.metrics_pages import GAUGES
from tests.waiting import until
from tiers.fleet import Fleet
from tiers.lifecycle.canary import Canary
from tiers.lifecycle.options import SupervisorOptions
from tiers.lifecycle.supervisor import Supervisor
from tiers.lifecycle.watchdog import WatchdogOptions
from tiers.replica import Replica
from tiers.spec import ReplicaStatus, TierName, TierSpec, VerificationState

pytestmark = pytest.mark.anyio
READY = ReplicaStatus.READY
FAILED = ReplicaStatus.FAILED
UNREACHABLE = ReplicaStatus.UNREACHABLE
STARTING = ReplicaStatus.STARTING
NO_NUMBER = GAUGES.format("NaN", 0)


@asynccontextmanager
async def watched(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    behaviour: Behaviour,
    fleet_type: type[Fleet] = Fleet,
) -> AsyncIterator[tuple[Replica, Supervisor]]:
    monkeypatch.setattr("tiers.lifecycle.watching.POLL_S", 0.02)
    monkeypatch.setattr("tiers.lifecycle.elsewhere_engine.RETRY_PAUSE_S", 0.02)
    async with serving(FakeEngine(behaviour).app) as url:
        fleet = fleet_type(
            (
                TierSpec(
                    TierName.FAST,
                    max_model_len=2048,
                    max_num_seqs=16,
                    max_in_flight=32,
                    urls=(url,),
                ),
            )
        )
        supervisor = Supervisor(fleet, SupervisorOptions(tmp_path))
        supervisor.start([], fleet.specs)
        try:
            yield fleet.replicas[0], supervisor
        finally:
            await supervisor.stop()


@asynccontextmanager
async def compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: Behaviour, precise: Behaviour
) -> AsyncIterator[dict[str, Replica]]:
    """Watch an engine of each of two tiers, which are compared with each other."""
    monkeypatch.setattr("tiers.lifecycle.watching.POLL_S", 0.02)
    async with serving_all(FakeEngine(fast).app, FakeEngine(precise).app) as urls:
        specs = [
            TierSpec(
                name,
                max_model_len=2048,
                max_num_seqs=16,
                max_in_flight=32,
                urls=(url,),
                precision="bf16",
            )
            for name, url in zip((TierName.FAST, TierName.PRECISE), urls, strict=True)
        ]
        fleet = Fleet(specs)
        options = SupervisorOptions(tmp_path, canary=Canary(tmp_path / "canary.json"))
        supervisor = Supervisor(fleet, options)
        supervisor.start([], fleet.specs)
        try:
            yield {replica.id: replica for replica in fleet.replicas}
        finally:
            await supervisor.stop()


def comparisons() -> list[str]:
    return [
        task.get_name()
        for task in asyncio.all_tasks()
        if task.get_name().startswith("comparing")
    ]


async def test_an_engine_is_watched_while_it_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison waits for a reference that does not answer. The engine goes away meanwhile, and that ends both."""
    fast = Behaviour()
    precise = Behaviour(alive=False)
    async with compared(tmp_path, monkeypatch, fast, precise) as replicas:
        replica = replicas["fast-0"]
        await until(lambda: replica.state.verification is VerificationState.PENDING)
        await until(lambda: replica.state.status is READY)
        precise.hung = ("/detokenize",)
        precise.alive = True
        await until(lambda: replicas["precise-0"].state.status is READY)
        await until(lambda: "/detokenize" in precise.heads)
        fast.alive = False
        await until(lambda: replica.state.status is UNREACHABLE)
        assert replica.state.verification is VerificationState.PENDING
        await until(lambda: "comparing fast-0" not in comparisons())


async def test_an_engine_without_priority_scheduling_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would refuse a request with a priority, which is known before it is compared."""
    fast = Behaviour(priorities=False)
    async with compared(tmp_path, monkeypatch, fast, Behaviour()) as replicas:
        replica = replicas["fast-0"]
        await until(lambda: replica.state.verification is VerificationState.VERIFIED)
        assert not replica.takes_priority


async def test_what_a_comparison_finds_ends_the_watching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model, which was ready before its reference, gets no requests any more."""
    precise = Behaviour(alive=False)
    other = Behaviour(first_id=90)
    async with compared(tmp_path, monkeypatch, other, precise) as replicas:
        replica = replicas["fast-0"]
        await until(lambda: replica.state.status is READY)
        precise.alive = True
        await until(lambda: replica.state.status is ReplicaStatus.QUARANTINED)
        assert "nats a token" in (replica.state.detail or "")


@pytest.mark.parametrize(
    ("path", "content", "said"),
    [
        (
            "/v1/models",
            '{"object": "list", "data": []}',
            "/v1/models does not answer as vLLM does: data",
        ),
        (
            "/v1/models",
            '{"error": {"message": "loading"}}',
            "/v1/models answers with an error: loading",
        ),
        ("/v1/models", '{"data": [{"id": "m"}]}', "max_model_len: Field required"),
        (
            "/tokenize",
            '{"error": "loading"}',
            "/tokenize answers with an error: loading",
        ),
        (
            "/v1/chat/completions",
            'data: {"choi\n\n',
            "/v1/chat/completions does not answer JSON",
        ),
        ("/metrics", NO_NUMBER, "vllm:num_requests_running is NaN"),
    ],
)
async def test_a_warm_up_with_odd_answers_is_tried_again(
    path: str, content: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica has failed, for a reason that a person understands, and is ready once the engine is well again."""
    behaviour = Behaviour(instead={path: content})
    async with watched(tmp_path, monkeypatch, behaviour) as (replica, _):
        await until(lambda: replica.state.status is FAILED)
        assert said in (replica.state.detail or "")
        behaviour.instead.clear()
        await until(lambda: replica.state.status is READY)
        assert replica.state.detail is None


async def test_gauges_that_are_no_numbers_make_it_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ready replica of which nothing can be read gets no requests, with the reason, and is still watched."""
    behaviour = Behaviour()
    async with watched(tmp_path, monkeypatch, behaviour) as (replica, supervisor):
        seen: list[tuple[ReplicaStatus, str | None]] = []
        supervisor.changes.on_change = lambda r: seen.append(
            (r.state.status, r.state.detail)
        )
        await until(lambda: replica.state.status is READY)
        behaviour.instead["/metrics"] = NO_NUMBER
        await until(lambda: replica.state.status is FAILED)
        assert any(
            state is UNREACHABLE and "is NaN" in (why or "") for state, why in seen
        )
        behaviour.alive = False
        await until(lambda: replica.state.status is UNREACHABLE)
        behaviour.instead.clear()
        behaviour.alive = True
        await until(lambda: replica.state.status is READY)


class FaultyFleet(Fleet):
    """A fleet that fails in a way that nobody has foreseen, for a while."""

    faults = 3

    def note_template(self, template: Any) -> None:
        if self.faults:
            self.faults -= 1
            raise ZeroDivisionError("not foreseen")
        super().note_template(template)


async def test_what_nobody_expected_is_logged_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The detail names the exception, the log has its trace a single time, and the replica is ready in the end."""
    caplog.set_level(logging.INFO, "qarr.tiers")
    async with watched(tmp_path, monkeypatch, Behaviour(), fleet_type=FaultyFleet) as (
        replica,
        _,
    ):
        await until(lambda: replica.state.status is READY)
    told = [
        r
        for r in caplog.records
        if "fast-0 is failed: ZeroDivisionError: not foreseen" in r.getMessage()
    ]
    assert len(told) == 3
    assert len([r for r in caplog.records if r.exc_info]) == 1


async def test_an_engine_that_cannot_be_started_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log cannot be made: the reason is told and counted as an end; it starts once that is mended."""
    async with own_engines(tmp_path, monkeypatch) as own:
        logs = tmp_path / "logs"
        logs.rename(tmp_path / "away")
        logs.write_text("in the way")
        assert own.first.state.pid is not None
        os.kill(own.first.state.pid, signal.SIGKILL)
        await until(
            lambda: (
                "restart 2 after: could not be started"
                in (own.first.state.detail or "")
            )
        )
        assert str(logs) in (own.first.state.detail or "")
        assert own.first.state.status is STARTING
        logs.unlink()
        await until(lambda: own.first.state.status is READY)


async def test_a_restart_ends_where_the_engine_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails with the reason instead of going on for ever, and the next one, after the cause is mended, is done."""
    options = WatchdogOptions(max_restarts=1)
    async with own_engines(tmp_path, monkeypatch, watchdog=options) as own:
        logs = tmp_path / "logs"
        logs.rename(tmp_path / "away")
        logs.write_text("in the way")
        operation = own.supervisor.operations.begin("restart", "fast-0")
        await until(lambda: operation.state == "failed")
        assert "fast-0 did not become ready: not started again" in operation.detail
        assert "could not be started" in operation.detail
        logs.unlink()
        operation = own.supervisor.operations.begin("restart", "fast-0")
        await until(lambda: operation.state == "done")
        assert own.first.state.status is READY
