"""A router that measures itself: when it begins, gives way, goes on and stops, and that nobody's figures show it."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from router.policy.decision import PRIORITIES
from router.policy.profiles import (
    ProfileError,
    latency_name,
    load_latency,
    load_profile,
    profile_name,
)
from router.profiling.auto_profile import ELSEWHERE
from router.profiling.profile_files import only_one
from tests.fakes.model_engine import ThinkingModel
from tests.unit.measuring_router import QUICK, TASKS, engines, measuring_router
from tests.unit.own_router import QARR
from tests.waiting import until
from tiers.spec import STANDARD_TIERS, ReplicaStatus


@pytest.mark.anyio
async def test_it_begins_when_all_tiers_are_ready_and_measures_once(
    tmp_path: Path,
) -> None:
    """Nothing before the last tier is ready; then speed and loss; a router started again finds both and asks nothing."""
    async with measuring_router(tmp_path, engines(), ready=False) as own:
        first, *others = own.fleet.replicas
        for replica in others:
            replica.mark(ReplicaStatus.READY)
        progress = await own.comes_to(
            state="waiting", what=None, detail="tiers are starting"
        )
        assert progress["measured"] == {"latency": [], "quality": []}
        assert not any(engine.requests for engine in own.engines)
        first.mark(ReplicaStatus.READY)
        await own.comes_to(what="latency")
        progress = await own.comes_to(state="done")
        assert progress["measured"] == {
            "latency": list(STANDARD_TIERS),
            "quality": list(STANDARD_TIERS),
        }
        assert all(replica.state.in_flight == 0 for replica in own.fleet.replicas)
        identities = {spec.name: spec.identity for spec in own.fleet.specs}
        assert [
            fit.tier
            for fit in load_latency(tmp_path / latency_name(identities, "m")).fits
        ] == list(STANDARD_TIERS)
        loss = load_profile(tmp_path / profile_name(identities))
        assert loss.whole is True
        assert {count.tier for count in loss.counts} == set(STANDARD_TIERS[:2])
        # What it asked was no request of anybody's.
        assert (await own.client.get(f"{own.url}/requests")).json()["requests"] == []
        assert (
            "qarr_requests_total{"
            not in (await own.client.get(f"{own.url}/metrics")).text
        )
        requests = [body for engine in own.engines for body in engine.requests]
        assert {body["priority"] for body in requests} == {PRIORITIES["batch"]}
    async with measuring_router(tmp_path, engines()) as again:
        await again.comes_to(state="done")
        assert not any(engine.requests for engine in again.engines)


@pytest.mark.anyio
async def test_it_gives_way_at_once_and_goes_on(tmp_path: Path) -> None:
    """A request finds the engines free; while it is served nothing is measured; then the rest is, nothing twice."""
    async with measuring_router(tmp_path, engines(0.01)) as own:
        for what in ("latency", "quality"):
            await own.comes_to(what=what, state="running")
            await until(lambda: own.computing)
            own.engines[0].delay_s = 0.15
            body = {"prompt": "hi", "tier": "fast", "tier_policy": "require"}
            async with own.client.stream(
                "POST", f"{own.url}/generate", json=body
            ) as answer:
                # its own
                assert (
                    sum(replica.state.in_flight for replica in own.fleet.replicas) == 1
                )
                assert (await own.profiling())["state"] == "waiting"
                await until(lambda: own.computing == 1)
                requests_before = sum(len(engine.requests) for engine in own.engines)
                async for _ in answer.aiter_raw():
                    assert own.computing <= 1
                assert (
                    sum(len(engine.requests) for engine in own.engines)
                    == requests_before
                )
            own.engines[0].delay_s = 0.01
        await own.comes_to(state="done")
        assert (
            len(own.journal)
            == len(set(own.journal))
            == len(TASKS) * len(STANDARD_TIERS)
        )
        assert all(replica.state.in_flight == 0 for replica in own.fleet.replicas)


@pytest.mark.anyio
async def test_it_goes_on_after_a_restart(tmp_path: Path) -> None:
    """What was judged before the router ended is not asked again."""
    async with measuring_router(tmp_path, engines(0.01)) as own:
        await until(lambda: len(own.journal) > len(TASKS) // 2)
    before = len(own.journal)
    assert before < len(TASKS) * len(STANDARD_TIERS)
    async with measuring_router(tmp_path, engines()) as again:
        assert (await again.comes_to(what="quality"))["measured"]["latency"] == list(
            STANDARD_TIERS
        )
        await again.comes_to(state="done")
        assert (
            len(again.journal)
            == len(set(again.journal))
            == len(TASKS) * len(STANDARD_TIERS)
        )
        judged = sum(
            bool(body.get("prompt_logprobs"))
            for engine in again.engines
            for body in engine.requests
        )
        assert judged <= len(TASKS) * len(STANDARD_TIERS) - before


@pytest.mark.anyio
async def test_answers_that_were_cut_while_thinking_are_told_and_asked_for_again(
    tmp_path: Path,
) -> None:
    """Once the limit is higher, and only those."""
    model = ThinkingModel(thought="I go on. " * 40, reasoning_field="reasoning")
    low = {"think_tokens": 50}
    async with measuring_router(
        tmp_path, engines(0.0), profile=low, model=model
    ) as own:
        progress = await own.comes_to(state="done")
    unmeasured = progress["not_measured"]
    assert unmeasured.keys() == {"fast", "balanced"}
    assert unmeasured["fast"]["cut"] == len(TASKS)
    assert unmeasured["fast"]["text"].startswith("not measured: cut while thinking")
    assert "profile.think_tokens" in unmeasured["fast"]["remedy"]
    high = {"think_tokens": 500}
    async with measuring_router(
        tmp_path, engines(0.0), profile=high, model=model
    ) as again:
        await again.comes_to(not_measured={}, state="done")
        identities = {spec.name: spec.identity for spec in again.fleet.specs}
    profile = load_profile(tmp_path / profile_name(identities))
    assert profile.think_tokens == 500
    assert sum(count.cut for count in profile.counts) == 0
    assert sum(count.answered for count in profile.counts) == 2 * len(TASKS)


@pytest.mark.anyio
async def test_it_waits_while_an_engine_elsewhere_is_in_the_fleet(
    tmp_path: Path,
) -> None:
    """One that was added while the router runs; others may use it, and its weights are not known."""
    async with measuring_router(tmp_path, engines(), ready=False) as own:
        own.fleet.replicas[0].source = "command"
        for replica in own.fleet.replicas:
            replica.mark(ReplicaStatus.READY)
        await own.comes_to(state="waiting", what=None, detail=ELSEWHERE)
        assert not any(engine.requests for engine in own.engines)
        own.fleet.replicas[0].source = None
        await own.comes_to(state="done")


@pytest.mark.anyio
async def test_settings_switch_it_off(tmp_path: Path) -> None:
    async with measuring_router(tmp_path, engines(), profile={"auto": False}) as own:
        progress = await own.profiling()
        assert progress["state"] == "off"
        assert progress["detail"] == "profile.auto is false"
        await asyncio.sleep(3 * QUICK["idle_s"])
        assert not any(engine.requests for engine in own.engines)


@pytest.mark.anyio
async def test_one_measures_at_a_time(tmp_path: Path) -> None:
    """While a person measures into the folder the router waits; while the router measures, the command is refused."""
    async with AsyncExitStack() as byhand:
        byhand.enter_context(only_one(tmp_path))
        async with measuring_router(tmp_path, engines(0.1)) as own:
            progress = await own.comes_to(state="waiting", what=None)
            while "another measurement" not in progress["detail"]:
                progress = await own.profiling()
            assert not any(engine.requests for engine in own.engines)
            await byhand.aclose()
            await own.comes_to(state="running")
            with (
                pytest.raises(ProfileError, match="another measurement writes into"),
                only_one(tmp_path),
            ):
                pass
            # into another folder: the router says that it measures
            for kind in ("latency", "quality"):
                done = await asyncio.to_thread(
                    subprocess.run,
                    [QARR, "profile", kind, "--url", own.url],
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=100,
                )
                assert done.returncode == 2
                assert "itself: wait until it is done" in done.stderr
