"""What Redis is doing stands in ``/health`` and ``/metrics``, whatever the cause, for all that routers share over it."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis

from router.auth.api_keys import add_key
from router.redis_link import CAUSES, RedisUse
from tests.conftest import RedisServer
from tests.unit.monitoring.scrapes import samples_of
from tests.unit.router_stack import Stack, router_stack
from tests.waiting import until

pytestmark = pytest.mark.anyio
# Ways in which Redis does not serve, by the cause that is told: how it begins, and how it ends.
OUTAGES = {
    "READONLY": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
    "OOM": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
    "NOREPLICAS": (
        ("CONFIG", "SET", "min-replicas-to-write", "1"),
        ("CONFIG", "SET", "min-replicas-to-write", "0"),
    ),
    "NOPERM": (
        ("ACL", "SETUSER", "default", "-@write"),
        ("ACL", "SETUSER", "default", "+@all"),
    ),
}


async def reasons(stack: Stack) -> list[str]:
    return list((await stack.client.get(f"{stack.url}/health")).json()["reasons"])


async def metrics(stack: Stack, key: str) -> dict[tuple[str, ...], float]:
    """Return the values of metrics of Redis, by name, use and cause."""
    page = await stack.client.get(
        f"{stack.url}/metrics", headers={"authorization": f"Bearer {key}"}
    )
    values = {}
    for sample in samples_of(page.text):
        if sample.name.startswith("qarr_redis_"):
            labels = [
                sample.labels[label]
                for label in ("use", "cause")
                if label in sample.labels
            ]
            values[sample.name, *labels] = sample.value
    return values


async def ask(stack: Stack, key: str) -> int:
    body = {"prompt": "hi", "max_tokens": 2}
    answer = await stack.client.post(
        f"{stack.url}/generate", json=body, headers={"authorization": f"Bearer {key}"}
    )
    return answer.status_code


@pytest.mark.parametrize("cause", OUTAGES)
async def test_health_and_metrics_say_what_redis_does(
    cause: str, tmp_path: Path, own_redis: RedisServer
) -> None:
    """Each use by its name, with the cause, while requests are served; and it goes when Redis serves again."""
    keys = tmp_path / "keys.json"
    limits = {"requests_per_minute": 1000, "engine_seconds_per_day": 1000.0}
    key, _ = add_key(keys, "limited", admin=True, **limits)
    overrides = {
        "auth": {"keys_file": str(keys)},
        "state": {"redis_url": own_redis.url},
    }
    begin, end = OUTAGES[cause]
    async with (
        router_stack(tmp_path, overrides) as stack,
        Redis.from_url(own_redis.url) as operator,
    ):
        assert await ask(stack, key) == 200

        async def serves() -> bool:
            return await reasons(stack) == []

        await until(serves)
        before = await metrics(stack, key)
        assert all(before["qarr_redis_serves", use] == 1 for use in RedisUse)
        assert all(
            before["qarr_redis_failures_total", use, cause] == 0 for use in RedisUse
        )
        causes = {labels[1] for _, *labels in before if len(labels) == 2}
        assert causes == set(CAUSES)
        await operator.execute_command(*begin)
        expected = {
            f"Redis (state.redis_url) does not serve {use} ({cause})"
            for use in RedisUse
        }

        async def are_all_told() -> bool:
            return {
                reason.partition(":")[0] for reason in await reasons(stack)
            } == expected

        await until(are_all_told, f"all of {expected}")
        during = await metrics(stack, key)
        assert all(during["qarr_redis_serves", use] == 0 for use in RedisUse)
        assert all(
            during["qarr_redis_failures_total", use, cause] >= 1 for use in RedisUse
        )
        assert await ask(stack, key) == 200
        await operator.execute_command(*end)
        await until(serves)
        after = await metrics(stack, key)
        assert all(after["qarr_redis_serves", use] == 1 for use in RedisUse)


async def test_a_router_without_redis_says_nothing_of_it(tmp_path: Path) -> None:
    async with router_stack(tmp_path) as stack:
        page = (await stack.client.get(f"{stack.url}/metrics")).text
    assert "qarr_redis_" not in page
