"""Who gets the next place, who waits, who is refused: over a real router and engines that take as long as they are told."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.auth.api_keys import add_key
from tests.unit.router_stack import Stack, router_stack
from tests.waiting import until
from tiers.breaker import BreakerOptions, BreakerState
from tiers.choice import Demand, best_candidate
from tiers.fleet import Fleet
from tiers.replica import FleetOptions, Replica
from tiers.snapshot import Gauges
from tiers.spec import ReplicaStatus, TierName, TierSpec

pytestmark = pytest.mark.anyio
FAST = TierName.FAST


def narrow(**admission: Any) -> dict[str, Any]:
    """Return settings with one place in all: the other tiers are too small for any prompt."""
    one = {"max_in_flight": 1}
    none = {"max_model_len": 16, "max_in_flight": 1}
    return {
        "tiers": {"fast": one, "balanced": none, "precise": none},
        "admission": admission,
    }


async def busy(stack: Stack) -> asyncio.Task[httpx.Response]:
    stack.engines[FAST].delay_s = 0.05
    task = asyncio.create_task(stack.generate(stream=False))
    await until(lambda: stack.fleet.replicas[0].state.in_flight, poll_s=0.005)
    return task


async def queued(stack: Stack, count: int) -> None:
    async def are_queued() -> bool:
        return (
            f"qarr_waiting_requests {count}.0"
            in (await stack.client.get(f"{stack.url}/metrics")).text
        )

    await until(are_queued, f"{count} requests in the queue")


async def test_a_request_waits_for_a_place(tmp_path: Path) -> None:
    """It is served as soon as one frees, and told how long it has waited."""
    async with router_stack(tmp_path, narrow()) as stack:
        first = await busy(stack)
        second = await stack.generate(stream=False)
        assert second.status_code == 200
        assert int(second.headers["x-qarr-queue-ms"]) > 0
        assert "x-qarr-queue-ms" not in (await first).headers
        assert stack.leases() == 0


async def test_places_go_by_priority_then_deadline(tmp_path: Path) -> None:
    """The order of arrival does not matter, the class and the deadline do."""
    async with router_stack(tmp_path, narrow(max_wait_s={"batch": 60})) as stack:
        first = await busy(stack)
        stack.engines[FAST].delay_s = 0.5  # until all are there
        order: list[str] = []

        async def ask(name: str, **body: Any) -> None:
            answer = await stack.generate(stream=False, **body)
            assert answer.status_code == 200, answer.text
            order.append(name)

        asked = []
        for name, body in {
            "batch": {"priority": "batch"},
            "late": {"sla": {"ttft_ms": 25_000}},
            "soon": {"sla": {"ttft_ms": 20_000}},
            "interactive": {"priority": "interactive"},
        }.items():
            asked.append(asyncio.create_task(ask(name, **body)))
            await queued(stack, len(asked))
        stack.engines[FAST].delay_s = 0.01
        await asyncio.gather(first, *asked)
        assert order == ["interactive", "soon", "late", "batch"]


async def test_those_who_wait_for_one_tier_do_not_keep_another_empty(
    tmp_path: Path,
) -> None:
    """A full queue for ``fast`` is no reason to refuse, or to let wait, what another tier has room for."""
    one = {"max_in_flight": 1}
    none = {"max_model_len": 16, "max_in_flight": 1}
    overrides = {
        "tiers": {"fast": one, "balanced": none, "precise": one},
        "admission": {"max_waiting": 1},
    }
    async with router_stack(tmp_path, overrides) as stack:
        first = await busy(stack)
        wanted = {"stream": False, "tier_policy": "require"}
        waiting = asyncio.create_task(stack.generate(tier="fast", **wanted))
        await queued(stack, 1)
        other = await stack.generate(tier="precise", **wanted)
        assert other.status_code == 200
        assert other.headers["x-qarr-tier"] == "precise"
        assert "x-qarr-queue-ms" not in other.headers
        assert [(await task).status_code for task in (first, waiting)] == [200, 200]


async def test_one_key_does_not_crowd_out_another(tmp_path: Path) -> None:
    """A key with many requests waits behind one with few, whoever came first."""
    places = {"max_in_flight": 2}
    none = {"max_model_len": 16, "max_in_flight": 1}
    overrides = {
        "tiers": {"fast": places, "balanced": none, "precise": none},
        "auth": {"keys_file": str(tmp_path / "keys.json")},
    }
    many, few = (add_key(tmp_path / "keys.json", name)[0] for name in ("many", "few"))
    async with router_stack(tmp_path, overrides) as stack:
        stack.engines[FAST].delay_s = 0.5  # until all are there
        order: list[str] = []

        async def ask(name: str, secret: str) -> None:
            body = {"prompt": "hi", "stream": False}
            headers = {"authorization": f"Bearer {secret}"}
            answer = await stack.client.post(
                f"{stack.url}/generate", json=body, headers=headers
            )
            assert answer.status_code == 200, answer.text
            order.append(name)

        async def waiting(count: int) -> None:
            headers = {"authorization": f"Bearer {few}"}

            async def are_queued() -> bool:
                page = (
                    await stack.client.get(f"{stack.url}/metrics", headers=headers)
                ).text
                return f"qarr_waiting_requests {count}.0" in page

            await until(are_queued, f"{count} requests in the queue")

        asked = [asyncio.create_task(ask("many", many)) for _ in range(6)]
        await waiting(4)
        asked.append(asyncio.create_task(ask("few", few)))
        await waiting(5)
        stack.engines[FAST].delay_s = 0.01
        await asyncio.gather(*asked)
        assert order.index("few") < 5


async def test_what_cannot_be_in_time_is_refused_at_once(tmp_path: Path) -> None:
    """A deadline before the first place can free: no wait, a reason, and when to come again."""
    async with router_stack(tmp_path, narrow()) as stack:
        first = await busy(stack)
        refused = await stack.generate(sla={"ttft_ms": 1})
        assert refused.status_code == 503
        assert "too late" in refused.json()["detail"]
        assert int(refused.headers["retry-after"]) >= 1
        assert (await first).status_code == 200


async def test_a_wait_has_an_end(tmp_path: Path) -> None:
    """A place that never frees: refused when the longest wait is over."""
    async with router_stack(tmp_path, narrow(max_wait_s={"standard": 1.2})) as stack:
        stack.engines[FAST].delay_s = 3600
        first = asyncio.create_task(stack.generate(stream=False))
        await until(lambda: stack.fleet.replicas[0].state.in_flight, poll_s=0.005)
        refused = await stack.generate()
        assert refused.status_code == 503
        assert (
            "no slot became free" in refused.json()["detail"]
            or "too late" in refused.json()["detail"]
        )
        assert "retry-after" in refused.headers
        first.cancel()


async def test_slow_moments_do_not_close_the_queue_for_good(tmp_path: Path) -> None:
    """After answers that took long, who would have waited too long is refused; once they are quick again, it is not."""
    async with router_stack(
        tmp_path, narrow(max_wait_s={"interactive": 1.0, "standard": 60})
    ) as stack:
        stack.engines[FAST].delay_s = 0.3
        for _ in range(2):  # 2 s each
            slow = [asyncio.create_task(stack.generate(stream=False)) for _ in range(2)]
            assert {answer.status_code for answer in await asyncio.gather(*slow)} == {
                200
            }
        stack.engines[FAST].delay_s = 0.01
        for _ in range(60):
            pair = [
                stack.generate(stream=False, priority="interactive") for _ in range(2)
            ]
            statuses = {answer.status_code for answer in await asyncio.gather(*pair)}
            if statuses == {200}:
                break
            assert statuses <= {200, 503}
        assert statuses == {200}


async def test_a_full_queue_sheds_the_least_urgent(tmp_path: Path) -> None:
    """With one place in the queue, an interactive request takes it from a batch one, and not the other way round."""
    async with router_stack(
        tmp_path, narrow(max_waiting=1, max_wait_s={"batch": 60})
    ) as stack:
        first = await busy(stack)
        stack.engines[FAST].delay_s = 0.5  # until all are there
        batch = asyncio.create_task(stack.generate(stream=False, priority="batch"))
        await queued(stack, 1)
        urgent = asyncio.create_task(
            stack.generate(stream=False, priority="interactive")
        )
        assert (await batch).status_code == 503  # it made room
        last = await stack.generate(stream=False, priority="batch")
        stack.engines[FAST].delay_s = 0.01
        assert (await batch).status_code == last.status_code == 503
        assert "retry-after" in (await batch).headers
        assert "are waiting already" in last.json()["detail"]
        assert (await urgent).status_code == (await first).status_code == 200


async def test_a_client_that_leaves_the_queue_leaves_nothing(tmp_path: Path) -> None:
    async with router_stack(tmp_path, narrow()) as stack:
        first = await busy(stack)
        stack.engines[FAST].delay_s = 0.5  # until the other one is there
        gone = asyncio.create_task(stack.generate(stream=False))
        await queued(stack, 1)
        gone.cancel()
        await queued(stack, 0)
        stack.engines[FAST].delay_s = 0.01
        assert (await stack.generate(stream=False)).status_code == 200
        await first
        assert stack.leases() == 0


async def test_a_replica_that_fails_is_left_alone_and_tried_again(
    tmp_path: Path,
) -> None:
    """Failures in a row open its breaker: requests go elsewhere without an attempt; one probe closes it again."""
    overrides = {"upstream": {"breaker": BreakerOptions(pause_s=0.4)}}
    async with router_stack(tmp_path, overrides) as stack:
        engine = stack.engines[FAST]
        engine.status = 500
        for _ in range(3):
            assert (await stack.generate(tier="fast")).headers[
                "x-qarr-tier"
            ] == "balanced"
        tiers = (await stack.client.get(f"{stack.url}/tiers")).json()["tiers"]
        assert tiers[0]["replicas"][0]["breaker"] == "open"
        attempts = len(engine.requests)
        answer = await stack.generate(tier="fast")
        assert "failed too often lately" in answer.headers["x-qarr-reason"]
        assert len(engine.requests) == attempts
        engine.status = 200
        while tiers[0]["replicas"][0]["breaker"] == "open":  # until it may be tried
            tiers = (await stack.client.get(f"{stack.url}/tiers")).json()["tiers"]
        assert (await stack.generate(tier="fast")).headers["x-qarr-tier"] == "fast"
        tiers = (await stack.client.get(f"{stack.url}/tiers")).json()["tiers"]
        assert tiers[0]["replicas"][0]["breaker"] == "closed"


async def test_a_probe_that_takes_long_does_not_keep_a_replica_idle(
    tmp_path: Path,
) -> None:
    """The probe is not streamed, so its first token is not seen: after a bounded time other requests go as well."""
    overrides = narrow(max_wait_s={"standard": 60}) | {
        "upstream": {"breaker": BreakerOptions(pause_s=0.2)}
    }
    overrides["tiers"]["fast"] = {"max_in_flight": 8}
    async with router_stack(tmp_path, overrides) as stack:
        engine = stack.engines[FAST]
        breaker = stack.fleet.replicas[0].breaker
        engine.status = 503
        for _ in range(3):
            await stack.generate(stream=False)
        assert breaker.state(time.monotonic()) is BreakerState.OPEN
        engine.status = 200
        engine.delay_s = 3600
        chat = {"model": "fast", "messages": [{"role": "user", "content": "hi"}]}
        probe = asyncio.create_task(
            stack.client.post(f"{stack.url}/v1/chat/completions", json=chat)
        )
        await until(lambda: engine.running, poll_s=0.005)
        engine.delay_s = 0
        assert (await stack.generate(stream=False)).status_code == 200
        assert breaker.state(time.monotonic()) is BreakerState.CLOSED
        assert not probe.done()
        probe.cancel()


async def test_retries_are_bounded(tmp_path: Path) -> None:
    """When every engine fails, attempts do not multiply beyond the budget."""
    overrides = {
        "upstream": {
            "retry_reserve": 4,
            "retry_share": 0,
            "breaker": BreakerOptions(1000, 1.0),
        }
    }
    async with router_stack(tmp_path, overrides) as stack:
        for engine in stack.engines.values():
            engine.status = 500
        answers = [await stack.generate() for _ in range(6)]
        assert {a.status_code for a in answers} == {503}
        assert sum(len(e.requests) for e in stack.engines.values()) == 6 + 4


def test_long_prompts_wait_while_the_cache_is_full() -> None:
    """From 88 % on they do, and until it is below 79.2 %; short ones do not."""
    spec = TierSpec(FAST, 2048, max_num_seqs=16, max_in_flight=32)
    fleet = Fleet((spec,), options=FleetOptions(long_prompt_tokens=100))
    replica = fleet.add(
        Replica("fast-0", spec, "u", "", "m", status=ReplicaStatus.READY)
    )
    for usage, open_to_long in (
        (0.87, True),
        (0.88, False),
        (0.80, False),
        (0.79, True),
        (0.87, True),
    ):
        replica.note_gauges(Gauges(1, 0, usage))
        lease = fleet.lease(FAST, prompt_tokens=101, max_tokens=1)
        assert (lease is not None) is open_to_long
        snapshot = fleet.snapshot()
        assert (
            best_candidate(
                snapshot.tiers[0], Demand(101, 1, is_long=True), snapshot.load
            ).is_free
            is open_to_long
        )
        if lease is not None:
            lease.release()
        short = fleet.lease(FAST, prompt_tokens=100, max_tokens=1)
        assert short is not None
        short.release()


def test_tokens_are_limited_as_well_as_requests() -> None:
    """What requests hold of the KV cache is counted when they come, and a lone request is never turned away."""
    spec = TierSpec(FAST, 2048, max_num_seqs=16, max_in_flight=32)
    fleet = Fleet((spec,))
    replica = fleet.add(
        Replica("fast-0", spec, "u", "", "m", status=ReplicaStatus.READY)
    )
    replica.note_gauges(Gauges(0, 0, kv_cache_usage=0.0, kv_cache_tokens=1000))
    first = fleet.lease(FAST, prompt_tokens=1500, max_tokens=100)
    assert first is not None
    assert fleet.lease(FAST, prompt_tokens=10, max_tokens=10) is None
    assert (
        fleet.lease(FAST, prompt_tokens=10, max_tokens=10, over_limit=True) is not None
    )
    first.release()
    assert fleet.lease(FAST, prompt_tokens=10, max_tokens=10) is not None
    assert replica.state.kv.held == 40


async def test_no_wait_where_nothing_can_come(tmp_path: Path) -> None:
    """A prompt that fits no tier is refused at once, whatever else waits."""
    async with router_stack(tmp_path, narrow()) as stack:
        stack.engines[FAST].stall_after = 1
        first = asyncio.create_task(stack.generate())
        await until(lambda: stack.fleet.replicas[0].state.in_flight, poll_s=0.005)
        answer = await stack.generate(prompt="word " * 3000)
        assert answer.status_code == 422
        assert not first.done()
        first.cancel()
