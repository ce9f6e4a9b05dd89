"""A request that ends at any of its awaits, in any way, leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.conftest import RedisServer
from tests.unit.cancelling import WAYS, CutRouter, Scenario, cut_router, scenarios

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]
AWAITS = 100  # more than any request has


async def cut_everywhere(router: CutRouter, scenario: Scenario, first: int) -> int:
    """Cut a request off at its first await, another one at its second, and so on; return how many awaits it has."""
    for at in range(1, AWAITS):
        way = WAYS[(first + at) % len(WAYS)]
        had_as_many, wrong = await router.cut_off(scenario, way, at)
        assert not wrong, (
            f"{scenario.name}, cut off at await {at} ({way}): {', '.join(wrong)}"
        )
        if not had_as_many:
            return at - 1
    raise AssertionError(f"{scenario.name}: more than {AWAITS} awaits")


async def test_a_request_that_ends_at_any_await_leaves_nothing(tmp_path: Path) -> None:
    """Of every kind of request, in every trouble, no place, connection, task, span or anything else is held afterwards."""
    async with cut_router(tmp_path) as router:
        for number, scenario in enumerate(scenarios()):
            assert await cut_everywhere(router, scenario, number) >= 2, scenario.name
        answer = await router.stack.client.post(
            f"{router.stack.url}/generate",
            json={"prompt": "hi"},
            headers={"authorization": f"Bearer {router.key}"},
        )
        assert answer.status_code == 200


async def test_a_request_that_ends_at_any_await_leaves_nothing_in_redis(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """Its place is given back there too, whether it ends before the place is taken, meanwhile or after."""
    redis = Redis.from_url(redis_server.url, decode_responses=True)
    await redis.flushdb()  # other tests keep places in it
    async with redis, cut_router(tmp_path, redis_server.url) as router:
        for scenario in (
            s
            for s in scenarios()
            if s.name in {"chat, whole", "tokenize", "generate, streamed, queued"}
        ):
            for number in range(len(WAYS)):
                await cut_everywhere(router, scenario, number)
        names = [name async for name in redis.scan_iter("qarr:*:places")]
        assert [await redis.zcard(name) for name in names] == [0] * len(names)
