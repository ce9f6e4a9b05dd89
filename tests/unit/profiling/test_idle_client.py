"""A client that measures from within: it works while nobody is served, and frees the engines at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from router.policy.decision import PRIORITIES
from router.policy.profiles import ProfileError
from router.profiling import measuring_client
from router.profiling.idle_client import IdleClient, RequestCounts
from router.profiling.measuring_client import MeasuredTier
from tests.fakes.engine import ANSWER, Behaviour, FakeEngine, serving_all
from tests.waiting import until
from tiers.fleet import Fleet
from tiers.replica import Replica
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierName, TierSpec

pytestmark = pytest.mark.anyio
FAST = TierName.FAST
BALANCED = TierName.BALANCED
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
PATH = "/v1/chat/completions"


def nothing() -> None:
    """Do nothing."""


@dataclass(slots=True)
class Idle:
    """One fast engine, and whether somebody else is served."""

    client: IdleClient
    fleet: Fleet
    engine: Behaviour
    served: int = 0
    requests: int = 0

    @property
    def in_flight(self) -> int:
        return sum(replica.state.in_flight for replica in self.fleet.replicas)


def made_spec(name: TierName) -> TierSpec:
    return TierSpec(
        name,
        max_model_len=2048,
        max_num_seqs=8,
        max_in_flight=16,
        digest=f"digest of {name}",
    )


@asynccontextmanager
async def idle(*, priorities: bool = True) -> AsyncIterator[Idle]:
    """Serve an engine that has a key, with a client that may ask it at once."""
    engine = Behaviour()
    async with serving_all(FakeEngine(engine).app) as (url,):
        fleet = Fleet(tuple(made_spec(name) for name in STANDARD_TIERS), machine="m")
        replica = Replica(
            "fast-0",
            fleet.spec(FAST),
            url=url,
            api_key="secret",
            model="fake",
            takes_priority=priorities,
        )
        fleet.add(replica).mark(ReplicaStatus.READY)
        client = IdleClient(
            fleet, "model", idle_s=0.0, request_counts=lambda: RequestCounts(0, 0)
        )
        rig = Idle(client, fleet, engine)
        client._request_counts = lambda: RequestCounts(rig.requests, rig.served)
        yield rig
        await rig.client.aclose()
        assert rig.in_flight == 0
        assert not rig.client.is_asking


async def test_it_asks_the_engine_itself() -> None:
    """With the engine's key and model, beneath everybody's priority; its tokens do not count as expected output."""
    async with idle() as rig:
        answer = await rig.client.ask(PATH, FAST, CHAT)
        assert answer["choices"][0]["message"]["content"] == "".join(ANSWER)
        (request,) = rig.engine.requests
        assert request["model"] == "fake"
        assert request["temperature"] == 0
        assert request["priority"] == PRIORITIES["batch"]
        (headers,) = rig.engine.headers
        assert headers["authorization"] == "Bearer secret"
        assert rig.fleet.output_share == 1.0
    async with idle(priorities=False) as rig:
        await rig.client.ask(PATH, FAST, CHAT)
        assert "priority" not in rig.engine.requests[0]


async def test_the_fleet_has_what_is_ready() -> None:
    async with idle() as rig:
        fleet = await rig.client.fleet()
        assert set(fleet.checkpoints) == set(STANDARD_TIERS)
        fast = MeasuredTier(
            identity="digest of fast", replicas=1, max_num_seqs=8, max_model_len=2048
        )
        assert fleet.tiers == {FAST: fast}
        assert fleet.model == "model"
        assert fleet.machine == "m"


async def test_what_tiers_wait_for_is_asked_beside_requests() -> None:
    """An urgent measurement waits for no caller, and no caller's request cancels it."""
    async with idle() as rig:
        rig.client._is_urgent = lambda: True
        rig.client._request_counts = lambda: RequestCounts(total=1, open=1)
        rig.client._idle_s = 3600.0
        rig.client._quiet_s = 3600.0
        asking = asyncio.create_task(rig.client.ask(PATH, FAST, CHAT))
        await until(lambda: bool(rig.engine.requests))
        assert rig.fleet.preempt is None
        assert (await asking)["choices"]


async def test_a_request_finds_the_engine_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is broken off is asked again, once; the slot is free before the cancellation has run."""
    monkeypatch.setattr(measuring_client, "LONGEST_CHECK_S", 0.01)
    async with idle() as rig:
        assert rig.fleet.preempt is None
        rig.engine.delay_s = 60
        asking = asyncio.create_task(rig.client.ask(PATH, FAST, CHAT))
        await until(lambda: rig.engine.running)
        assert rig.client.is_asking
        rig.engine.delay_s = 0  # for the second try
        assert rig.fleet.preempt is not None
        rig.fleet.preempt()
        assert rig.in_flight == 0
        assert (await asking)["choices"]
        assert len(rig.engine.requests) == 2


async def test_it_waits_while_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests that are open, leases that are not its own, and engines that start: all of them go first."""
    monkeypatch.setattr(measuring_client, "LONGEST_CHECK_S", 0.01)
    async with idle() as rig:
        lease = rig.fleet.lease(FAST, prompt_tokens=1, max_tokens=1)
        assert lease is not None
        starting = rig.fleet.add(
            Replica(
                "balanced-0",
                rig.fleet.spec(BALANCED),
                url="http://nowhere",
                api_key="",
                model="fake",
            )
        )
        rig.served = 1
        waits: list[int] = []
        asking = asyncio.create_task(
            rig.client.ask(PATH, FAST, CHAT, report_waiting=lambda: waits.append(1))
        )
        ends = (
            lambda: setattr(rig, "served", 0),
            lease.release,
            lambda: starting.mark(ReplicaStatus.READY),
        )
        for end in ends:
            before = len(waits)
            await until(lambda before=before: len(waits) > before + 1)
            assert not rig.engine.requests
            end()
        assert (await asking)["choices"]


async def test_a_step_that_is_disturbed_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a request that comes while it runs, whether that has ended by then or not."""
    monkeypatch.setattr(measuring_client, "LONGEST_CHECK_S", 0.01)
    async with idle() as rig:

        async def timed() -> None:
            await rig.client.time(FAST, [1, 2], 3, report_first_token=nothing)

        async def comes_and_goes() -> None:
            rig.requests += 1

        async def preempted() -> None:
            rig.engine.delay_s = 60
            async with asyncio.TaskGroup() as group:
                group.create_task(timed())
                await until(lambda: rig.engine.running)
                rig.client.preempt()

        async def stays() -> None:
            rig.served = 1

        assert await rig.client.undisturbed(timed, nothing)
        for step in (comes_and_goes, preempted, stays):
            assert not await rig.client.undisturbed(step, nothing)


async def test_to_be_cancelled_is_not_to_give_way() -> None:
    """A router that ends cancels its measurements: they do not go on."""
    async with idle() as rig:
        rig.engine.delay_s = 60
        asking = asyncio.create_task(rig.client.ask(PATH, FAST, CHAT))
        await until(lambda: rig.engine.running)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: not rig.engine.running)


async def test_an_answer_is_timed() -> None:
    async with idle() as rig:
        begun: list[bool] = []
        timed = await rig.client.time(
            FAST,
            [5, 6, 7],
            4,
            report_first_token=lambda: begun.append(rig.client.is_asking),
        )
        assert begun == [True]
        assert timed.prompt_tokens == 3
        assert rig.engine.requests[0]["prompt"] == [5, 6, 7]
        assert 0 < timed.ttft_ms / 1000 <= timed.ended - timed.started


async def test_refusals_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that may pass is waited out, but not for ever; a tier without a replica has no slot."""
    monkeypatch.setattr(measuring_client, "BUSY_RETRY_S", 0.001)
    async with idle() as rig:
        rig.engine.status = 400
        for asking in (
            rig.client.ask(PATH, FAST, CHAT),
            rig.client.time(FAST, [1], 4, report_first_token=nothing),
        ):
            with pytest.raises(ProfileError, match=r"fast answered HTTP 400: .*broken"):
                await asking
        rig.engine.status = 503
        passing = asyncio.create_task(rig.client.ask(PATH, FAST, CHAT))
        await until(lambda: len(rig.engine.requests) > 4)
        rig.engine.status = 200
        assert (await passing)["choices"]
        monkeypatch.setattr(measuring_client, "MAX_WAIT_S", 0.0)
        for asking in (
            rig.client.ask(PATH, BALANCED, CHAT),
            rig.client.time(BALANCED, [1], 4, report_first_token=nothing),
        ):
            with pytest.raises(
                ProfileError,
                match="balanced answered HTTP 503: none of its replicas is ready",
            ):
                await asking


async def test_an_engine_that_is_gone_is_named() -> None:
    async with idle() as rig:
        rig.fleet.replicas[0].url = "http://127.0.0.1:1"
        for asking in (
            rig.client.ask(PATH, FAST, CHAT),
            rig.client.time(FAST, [1], 4, report_first_token=nothing),
        ):
            with pytest.raises(
                ProfileError, match=r"fast does not answer \(ConnectError\)"
            ):
                await asking
