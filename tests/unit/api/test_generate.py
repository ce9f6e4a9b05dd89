"""POST /generate over real sockets, in front of fake engines."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import ANSWER, Behaviour
from tests.unit.router_stack import SOUND_S, events, router_stack
from tests.waiting import until
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierName

pytestmark = pytest.mark.anyio
FULL = "".join(ANSWER)


async def test_streams_text_then_one_done_event(tmp_path: Path) -> None:
    """A stream is text events, then exactly one done event with usage, and carries the decision in its headers."""
    async with router_stack(tmp_path) as stack:
        answer = await stack.generate(tier="precise")
        seen = events(answer.text)
        assert "".join(data["text"] for name, data in seen if name == "message") == FULL
        assert [name for name, _ in seen if name != "message"] == ["done"]
        done = seen[-1][1]
        assert done["usage"]["completion_tokens"] == len(ANSWER)
        assert done["finish_reason"] == "stop"
        assert done["tier"] == "precise"
        assert done["continued_on"] == []
        assert answer.headers["x-qarr-tier"] == "precise"
        assert answer.headers["x-qarr-precision"] == "bf16"
        assert "hint precise" in answer.headers["x-qarr-reason"]
        assert len(answer.headers["x-qarr-trace-id"]) == 32
        assert answer.headers["x-request-id"]
        assert stack.leases() == 0


async def test_an_engine_that_cannot_say_its_precision_is_unknown(
    tmp_path: Path,
) -> None:
    """In headers, in ``/route``, in ``/tiers``, in the record and in the metrics; the tier's name tells nothing."""
    async with router_stack(
        tmp_path, precise=Behaviour(root="org/Model-BF16")
    ) as stack:
        answer = await stack.generate(tier="precise", stream=False)
        assert answer.headers["x-qarr-precision"] == "unknown"
        body = {"prompt": "hi", "tier": "precise"}
        assert (await stack.client.post(f"{stack.url}/route", json=body)).json()[
            "precision"
        ] == "unknown"
        tiers = (await stack.client.get(f"{stack.url}/tiers")).json()["tiers"]
        assert [tier["precision"] for tier in tiers] == ["awq-int4", "fp8", "unknown"]
        assert [
            replica["precision"] for tier in tiers for replica in tier["replicas"]
        ] == [
            "awq-int4",
            "fp8",
            "unknown",
        ]
        (record,) = (await stack.client.get(f"{stack.url}/requests")).json()["requests"]
        assert record["precision"] == "unknown"
        metrics = (await stack.client.get(f"{stack.url}/metrics")).text
        assert (
            'qarr_replica_info{checkpoint="",precision="unknown",replica="precise-0",tier="precise"} 1.0'
            in metrics
        )


async def test_answers_json_when_asked(tmp_path: Path) -> None:
    """With stream false the same answer comes as one JSON object, which says how long it is: so a client has all of it."""
    async with router_stack(tmp_path) as stack:
        whole = await stack.generate(stream=False)
        answer = whole.json()
        assert answer["text"] == FULL
        assert answer["finish_reason"] == "stop"
        assert answer["tier"] == "fast"
        assert whole.headers["content-length"] == str(len(whole.content))
        assert "transfer-encoding" not in whole.headers


async def test_passes_the_request_on(tmp_path: Path) -> None:
    """System prompt, sampling, priority and our id reach the engine; its key does, the caller's headers do not."""
    async with router_stack(tmp_path) as stack:
        await stack.client.post(
            f"{stack.url}/generate",
            json={
                "prompt": "hi", "system_prompt": "be brief", "max_tokens": 3, "temperature": 0, "priority": "batch",
                "tier": "fast",
            },
            headers={"x-request-id": "mine-1", "authorization": "Bearer client-secret", "cookie": "a=b"},
        )  # fmt: skip
        engine = stack.engines[TierName.FAST]
        sent = engine.requests[0]
        assert sent["messages"] == [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hi"},
        ]
        assert sent["max_tokens"] == 3
        assert sent["temperature"] == 0
        assert sent["priority"] == 1
        assert engine.headers[0]["x-request-id"].startswith("mine-1-")
        assert "authorization" not in engine.headers[0]
        assert "cookie" not in engine.headers[0]


async def test_engine_without_priority_scheduling_gets_none(tmp_path: Path) -> None:
    """An engine that refuses priorities is found out in its warm-up, and serves every priority."""
    async with router_stack(tmp_path, fast=Behaviour(priorities=False)) as stack:
        answer = await stack.generate(tier="fast", priority="batch")
        assert answer.status_code == 200
        assert answer.headers["x-qarr-tier"] == "fast"
        assert "priority" not in stack.engines[TierName.FAST].requests[-1]


async def test_measurements_of_speed_are_not_taken_for_requests(tmp_path: Path) -> None:
    """Fakes keep what callers ask, so that a test may take its time: engines that nobody asks are measured meanwhile."""
    async with router_stack(tmp_path) as stack:
        await until(
            lambda: all(
                replica.state.speed is not None for replica in stack.fleet.replicas
            )
        )
        assert not any(
            engine.requests or engine.headers for engine in stack.engines.values()
        )


@pytest.mark.parametrize(
    "fault",
    [
        Behaviour(status=500),
        Behaviour(break_after=0),
        Behaviour(error_after=0),
        Behaviour(stall_after=0),
    ],
)
async def test_retries_elsewhere_before_the_first_byte(
    tmp_path: Path, fault: Behaviour
) -> None:
    """A tier that fails before its first token is replaced, and the answer says by whom."""
    options = {"upstream": {"first_token_timeout_s": SOUND_S}}
    async with router_stack(tmp_path, options) as stack:
        broken = stack.engines[TierName.FAST]
        broken.status = fault.status
        broken.break_after = fault.break_after
        broken.error_after = fault.error_after
        broken.stall_after = fault.stall_after
        answer = await stack.generate()
        assert answer.status_code == 200
        assert answer.headers["x-qarr-tier"] == "balanced"
        assert "fast failed before the first token" in answer.headers["x-qarr-reason"]
        assert events(answer.text)[-1][0] == "done"
        assert stack.leases() == 0


async def test_required_tier_is_not_replaced(tmp_path: Path) -> None:
    """With tier_policy require a failing tier is an error, not another tier."""
    async with router_stack(tmp_path) as stack:
        stack.engines[TierName.FAST].status = 500
        answer = await stack.generate(tier="fast", tier_policy="require")
        assert answer.status_code == 503
        assert answer.json()["type"] == "urn:qarr:problem:no-engine-answered"
        assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("fault", ["break_after", "stall_after", "error_after"])
async def test_failure_after_the_first_byte_is_an_error_event(
    tmp_path: Path, fault: str
) -> None:
    """A stream that cannot be finished ends with an explicit error event, never with a clean end."""
    async with router_stack(
        tmp_path, {"upstream": {"token_timeout_s": SOUND_S}}
    ) as stack:
        setattr(stack.engines[TierName.FAST], fault, 3)
        seen = events((await stack.generate(tier="fast", tier_policy="require")).text)
        assert (
            "".join(d["text"] for name, d in seen if name == "message")
            == "The capital of"
        )
        name, problem = seen[-1]
        assert name == "error"
        assert problem["status"] == 502
        assert problem["request_id"]
        assert [n for n, _ in seen].count("done") == 0
        assert stack.leases() == 0


async def test_failure_in_a_json_answer_is_a_502(tmp_path: Path) -> None:
    """Without a stream, an answer that broke off is an error and not a shorter answer."""
    async with router_stack(tmp_path) as stack:
        stack.engines[TierName.FAST].break_after = 3
        answer = await stack.generate(tier="fast", tier_policy="require", stream=False)
        assert answer.status_code == 502
        assert answer.headers["content-type"] == "application/problem+json"
        assert stack.leases() == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_aborts_the_engines_request(
    tmp_path: Path,
    stream: bool,  # noqa: FBT001
) -> None:
    """When the client goes away its request ends in the engine, and every lease comes back."""
    async with router_stack(tmp_path) as stack:
        engine = stack.engines[TierName.FAST]
        engine.delay_s = 0.05
        engine.answer = ("x",) * 400
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(stack.url.rsplit(":", 1)[1])
        )
        body = json.dumps(
            {"prompt": "hi", "tier": "fast", "stream": stream, "max_tokens": 400}
        ).encode()
        head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        writer.write(head + body)
        await writer.drain()
        await until(lambda: engine.running != 0, poll_s=0.01)
        if stream:
            await reader.readuntil(b"data: ")
        writer.close()
        await until(lambda: not (engine.running or stack.leases()), within_s=10)


async def test_full_tier_sends_elsewhere_and_full_fleet_refuses(tmp_path: Path) -> None:
    """Places are bounded: a full tier's requests go to another one; a full fleet, with no queue, answers 503."""
    one = {"max_in_flight": 1}
    none = {"max_waiting": 0}
    async with router_stack(
        tmp_path, {"tiers": dict.fromkeys(STANDARD_TIERS, one), "admission": none}
    ) as stack:
        for engine in stack.engines.values():
            engine.delay_s = 0.1
        answers = await asyncio.gather(*(stack.generate() for _ in range(4)))
        assert sorted(a.status_code for a in answers) == [200, 200, 200, 503]
        assert {
            a.headers.get("x-qarr-tier") for a in answers if a.status_code == 200
        } == {
            "fast",
            "balanced",
            "precise",
        }
        refused = next(a for a in answers if a.status_code == 503)
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["type"] == "urn:qarr:problem:at-capacity"
        assert stack.leases() == 0


async def test_dead_engine_is_seen_and_avoided(tmp_path: Path) -> None:
    """A replica that stops answering probes leaves the rotation, and requests go on elsewhere."""
    async with router_stack(tmp_path) as stack:
        stack.fleet.replicas[0].mark(ReplicaStatus.FAILED, "killed")
        answer = await stack.generate(tier="fast")
        assert answer.headers["x-qarr-tier"] == "balanced"
        assert "hint fast not taken: is failed" in answer.headers["x-qarr-reason"]
        ready = await stack.client.get(f"{stack.url}/readyz")
        assert ready.json() == {
            "ready": True,
            "tiers": {"fast": "failed", "balanced": "ready", "precise": "ready"},
            "reasons": ["tier fast is failed", "fast-0 is failed"],
            "preparing": [],
        }
        health = await stack.client.get(f"{stack.url}/health")
        assert health.status_code == 200
        assert health.json() == {
            "status": "degraded",
            "reasons": ["tier fast is failed", "fast-0 is failed"],
            "keys": {"required": False, "version": None},
        }


async def test_health_tells_what_is_wrong(tmp_path: Path) -> None:
    """Nothing; an engine that serves with a remark; a tier that is left out, which is not wrong."""
    async with router_stack(tmp_path) as stack:

        async def health() -> dict[str, Any]:
            found: dict[str, Any] = (
                await stack.client.get(f"{stack.url}/health")
            ).json()
            assert found.pop("keys") == {"required": False, "version": None}
            return found

        assert await health() == {"status": "healthy", "reasons": []}
        fast, balanced, _ = stack.fleet.replicas
        fast.mark(ReplicaStatus.READY, "slower: GPU 0 is throttled: it is hot")
        assert await health() == {
            "status": "degraded",
            "reasons": ["fast-0: slower: GPU 0 is throttled: it is hot"],
        }
        fast.mark(ReplicaStatus.READY)
        stack.fleet.remove(balanced)
        assert (await health())["reasons"] == ["tier balanced is stopped"]
        stack.fleet.configure(
            replace(stack.fleet.spec(balanced.spec.name), urls=(), replicas=0)
        )
        assert (await health())["status"] == "healthy"
        # waiting would not help
        refused = await stack.generate(tier="balanced", tier_policy="require")
        assert refused.status_code == 422
        assert refused.json()["errors"][0]["field"] == "tier"


async def test_nothing_ready_is_503(tmp_path: Path) -> None:
    """With no tier ready, /readyz and /generate answer 503 and /healthz still 200."""
    async with router_stack(tmp_path) as stack:
        for replica in stack.fleet.replicas:
            replica.mark(ReplicaStatus.FAILED)
        assert (await stack.client.get(f"{stack.url}/readyz")).status_code == 503
        health = await stack.client.get(f"{stack.url}/health")
        assert health.status_code == 503
        assert health.json()["status"] == "unhealthy"
        refused = await stack.generate()
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "10"
        assert (await stack.client.get(f"{stack.url}/healthz")).status_code == 200


async def test_engine_refusal_is_a_422_and_not_retried(tmp_path: Path) -> None:
    """A request that the engine calls wrong is the caller's to mend: no other tier is tried."""
    async with router_stack(tmp_path) as stack:
        engine = stack.engines[TierName.FAST]
        engine.status = 400
        engine.error = "maximum context length is 2048 tokens"
        answer = await stack.generate(tier="fast")
        assert answer.status_code == 422
        assert "2048" in answer.json()["detail"]
        assert not stack.engines[TierName.BALANCED].requests


async def test_route_and_tiers_report_without_generating(tmp_path: Path) -> None:
    """/route gives the decision that /generate would take, /tiers the whole fleet; no engine is asked."""
    async with router_stack(tmp_path) as stack:
        body = {"prompt": "Write a Python function that reverses a list"}
        decision = (await stack.client.post(f"{stack.url}/route", json=body)).json()
        assert decision["class"] == "code"
        assert decision["tier"] != "fast"
        assert [t["tier"] for t in decision["tiers"]] == ["fast", "balanced", "precise"]
        fleet = (await stack.client.get(f"{stack.url}/tiers")).json()
        replica = fleet["tiers"][0]["replicas"][0]
        assert replica["state"] == "ready"
        assert replica["pid"] is None
        assert replica["in_flight"] == 0
        assert not any(e.requests for e in stack.engines.values())


async def test_no_one_is_sent_elsewhere(tmp_path: Path) -> None:
    """A path with a slash too many is a 404: a redirect would go to whatever the Host header names."""
    paths = (
        "/generate/",
        "/v1/chat/completions/",
        "/tiers/",
        "/admin/operations/",
        "//tiers",
    )
    async with router_stack(
        tmp_path, {"server": {"allowed_hosts": ("gateway.example",)}}
    ) as stack:
        for path, method in product(paths, ("GET", "POST")):
            answer = await stack.client.request(
                method, stack.url + path, headers={"host": "gateway.example"}
            )
            assert answer.status_code == 404, (method, path)
            assert "location" not in answer.headers
            assert "gateway" not in answer.text


async def test_a_chat_in_the_place_of_a_prompt(tmp_path: Path) -> None:
    """The engine gets the messages as they are; routing reads the last turn, and counts all of them."""
    said = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Write a haiku about autumn leaves."},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "Again, please."},
    ]
    async with router_stack(tmp_path) as stack:
        answer = await stack.client.post(
            f"{stack.url}/generate",
            json={"messages": said, "stream": False, "tier": "fast"},
        )
        assert answer.status_code == 200
        assert answer.json()["text"] == FULL
        assert stack.engines[TierName.FAST].requests[-1]["messages"] == said
        counted = []
        for messages in (said, said[-1:]):
            route = await stack.client.post(
                f"{stack.url}/route", json={"messages": messages}
            )
            counted.append(route.json()["prompt_tokens"])
        assert counted[0] > counted[1]
        alone = await stack.client.post(
            f"{stack.url}/route", json={"prompt": said[-1]["content"]}
        )
        assert alone.json()["prompt_tokens"] == counted[1]
        assert "Again" not in answer.headers["x-qarr-reason"]
