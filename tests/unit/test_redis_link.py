"""The link to Redis: its clock, outages and their causes, failover, scripts, and a cluster."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from router.redis_link import (
    CAUSES,
    UNAVAILABLE,
    RedisClock,
    RedisLink,
    RedisSetupError,
    RedisState,
    RedisUse,
    Script,
    cause_of,
    check_redis,
    connect,
    outage,
)
from tests.conftest import RedisServer
from tests.ports import reserved_ports
from tests.redis_processes import redis_cluster, redis_with, relay_to
from tests.waiting import until

pytestmark = pytest.mark.anyio
URL = "redis://127.0.0.1:{}/0"
KEY = "qarr:{tests}:count"
COUNT = Script.of("return redis.call('INCR', KEYS[1])")


@asynccontextmanager
async def link_to(url: str, connections: int = 4) -> AsyncIterator[RedisLink]:
    link = RedisLink(url, RedisUse.QUOTAS, connections)
    try:
        yield link
    finally:
        await link.aclose()


async def count(link: RedisLink) -> int:
    return int(await link.run(COUNT, [KEY], []))


async def operate(server: RedisServer, *commands: tuple[str, ...]) -> list[Any]:
    async with Redis.from_url(server.url, decode_responses=True) as redis:
        return [await redis.execute_command(*command) for command in commands]


async def test_a_redis_that_is_not_there_is_an_outage() -> None:
    (port,) = reserved_ports()
    with pytest.raises(UNAVAILABLE) as error:
        async with connect(URL.format(port), 1) as redis:
            await redis.ping()
    assert str(port) in outage(error.value)
    assert cause_of(error.value) == "UNREACHABLE"


async def test_a_redis_that_does_not_answer_is_an_outage_and_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A retry would send a command twice, which an acquisition of a slot must not."""
    monkeypatch.setattr("router.redis_link.REDIS_TIMEOUT_S", 0.1)
    received = []

    async def silent(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(1000):
            received.append(data)
        writer.close()

    server = await asyncio.start_server(
        silent, sock=socket.create_server(("127.0.0.1", 0))
    )
    async with server:
        with pytest.raises(UNAVAILABLE) as error:
            async with link_to(URL.format(server.sockets[0].getsockname()[1])) as link:
                await count(link)
    assert len(received) == 1
    assert cause_of(error.value) == "TIMEOUT"


async def test_the_clock_is_asked_for_once(redis_server: RedisServer) -> None:
    """Later times are computed from the monotonic clock, without another question to Redis."""
    now = time.monotonic()
    async with link_to(redis_server.url) as link:
        shown = await link.time_at(now, KEY)
        await operate(redis_server, ("CONFIG", "RESETSTAT"))
        assert await link.time_at(now + 100, KEY) == shown + 100
        (stats,) = await operate(redis_server, ("INFO", "commandstats"))
    assert "cmdstat_time" not in stats, "Redis was asked again"


async def test_the_clock_is_never_ahead_of_redis(redis_server: RedisServer) -> None:
    async with link_to(redis_server.url) as link:
        await link.time_at(0.0, KEY)
        seen = await link.time_at(time.monotonic(), KEY)
        ((seconds, microseconds),) = await operate(redis_server, ("TIME",))
    assert seen <= seconds + microseconds / 1e6


async def test_what_redis_told_meanwhile_counts() -> None:
    """Redis's clock may be set, so the last time that it told counts, without a question."""
    clock = RedisClock()
    assert clock.at(time.monotonic()) is None
    clock.learn(5000.0)
    clock.learn(1000.0)
    assert 1000.0 <= (clock.at(time.monotonic()) or 0.0) < 2000.0


REPLICA_OF_NOBODY = ("REPLICAOF", "127.0.0.1", "1")
# The commands that make a Redis refuse to write, by the cause that is reported.
REFUSALS: dict[str, tuple[tuple[str, ...], ...]] = {
    "READONLY": (REPLICA_OF_NOBODY,),
    "MASTERDOWN": (
        ("CONFIG", "SET", "replica-serve-stale-data", "no"),
        REPLICA_OF_NOBODY,
    ),
    "NOREPLICAS": (("CONFIG", "SET", "min-replicas-to-write", "1"),),
    "OOM": (("CONFIG", "SET", "maxmemory", "1"),),
    "NOPERM": (("ACL", "SETUSER", "default", "-incr"),),
}


async def test_a_command_that_an_old_master_refuses_is_repeated_on_the_new_one(
    own_redis: RedisServer, other_redis: RedisServer
) -> None:
    """The request that notices the failover is served like all others."""
    async with relay_to(own_redis) as relay, link_to(relay.url) as link:
        assert len(await asyncio.gather(*(count(link) for _ in range(20)))) == 20
        await operate(own_redis, REPLICA_OF_NOBODY)
        relay.target = other_redis
        counts = await asyncio.gather(*(count(link) for _ in range(20)))
        assert sorted(counts) == list(range(1, 21))


@pytest.fixture
def other_redis() -> Iterator[RedisServer]:
    with redis_with() as server:
        yield server


@pytest.mark.parametrize("cause", REFUSALS)
async def test_after_a_refusal_another_redis_behind_the_address_is_found(
    cause: str, own_redis: RedisServer, other_redis: RedisServer
) -> None:
    """All connections to the Redis that refuses are given up at once, not one by one with a failure each."""
    async with relay_to(own_redis) as relay, link_to(relay.url) as link:
        assert len(set(await asyncio.gather(*(count(link) for _ in range(20))))) == 20
        assert len(relay.opened) > 1
        await operate(own_redis, *REFUSALS[cause])
        with pytest.raises(UNAVAILABLE) as error:
            await count(link)
        assert cause_of(error.value) == cause
        relay.target = other_redis
        counts = await asyncio.gather(*(count(link) for _ in range(20)))
        assert sorted(counts) == list(range(1, 21))


async def test_a_redis_that_loads_its_data_is_left(
    tmp_path: Path, other_redis: RedisServer
) -> None:
    """After a failover to a Redis that still loads, the address may soon lead to another one."""
    fill = "for n = 1, 200 do redis.call('SET', n, string.rep('x', 4000)) end"
    in_folder = ("--dir", str(tmp_path))
    with redis_with(*in_folder, "--rdbcompression", "no") as full:
        await operate(full, ("EVAL", fill, "0"), ("SAVE",))
    slow = (
        "--key-load-delay",
        "100000",
        "--loading-process-events-interval-bytes",
        "1024",
    )
    with redis_with(*in_folder, *slow) as loading:
        async with relay_to(loading) as relay, link_to(relay.url) as link:
            with pytest.raises(UNAVAILABLE) as error:
                await count(link)
            assert cause_of(error.value) == "LOADING"
            relay.target = other_redis
            assert await count(link) == 1


async def test_a_cluster_that_is_down_has_its_cause(tmp_path: Path) -> None:
    """A node has no slots while its cluster is made."""
    (bus,) = reserved_ports()
    options = (
        "--cluster-enabled",
        "yes",
        "--cluster-port",
        str(bus),
        "--dir",
        str(tmp_path),
    )
    with redis_with(*options) as lonely:
        async with link_to(lonely.url) as link:
            with pytest.raises(UNAVAILABLE) as error:
                await count(link)
    assert cause_of(error.value) == "CLUSTERDOWN"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "Error running script (call to f_1): @user_script:1: -READONLY You can't write against a replica.",
            "READONLY",
        ),
        ("NOREPLICAS Not enough good replicas to write.", "NOREPLICAS"),
        ("MISCONF Redis is configured to save RDB snapshots", "MISCONF"),
        ("BUSY Redis is busy running a script.", "BUSY"),
        ("Something else about LOADINGS", "OTHER"),
    ],
)
def test_causes_are_found_in_texts(text: str, cause: str) -> None:
    """Redis 6 quotes the code of a script's error in its text, and the client does not know all codes."""
    assert cause_of(ResponseError(text)) == cause
    assert cause in CAUSES


def test_a_state_says_what_it_means_and_counts() -> None:
    """Notes and metrics have the cause, and no address."""
    state = RedisState(RedisUse.BUDGETS)
    assert state.notes == []
    for _ in range(2):
        state.fail(ConnectionRefusedError("10.0.0.1:6379"))
    assert state.notes == [
        "Redis (state.redis_url) does not serve budgets (UNREACHABLE): this router counts them alone"
    ]
    assert state.failures == {"UNREACHABLE": 2}
    state.recover()
    assert state.serves


# Changes of a user's permissions, and whether scripts can be run with them.
PERMISSIONS = {
    "everything": ((), True),
    "no EVALSHA": (("-evalsha",), True),
    "no SCRIPT": (("-script",), True),
    "no EVAL": (("-eval",), True),
    "EVALSHA alone": (("-eval", "-script"), False),
    "no scripts": (("-@scripting",), False),
}


@pytest.mark.parametrize("permissions", PERMISSIONS)
async def test_scripts_run_in_whatever_way_redis_allows(
    permissions: str, own_redis: RedisServer
) -> None:
    """Scripts need EVAL, or EVALSHA and SCRIPT LOAD; a Redis that allows neither is refused at the start."""
    rules, runs = PERMISSIONS[permissions]
    await operate(own_redis, ("ACL", "SETUSER", "default", *rules))
    async with link_to(own_redis.url) as link:
        if runs:
            assert [await count(link), await count(link)] == [1, 2]
            await check_redis(own_redis.url)
            return
        with pytest.raises(UNAVAILABLE) as error:
            await count(link)
    assert cause_of(error.value) == "NOSCRIPTS"
    with pytest.raises(
        RedisSetupError,
        match=r"^state\.redis_url: [^\n]*allow its user EVAL, or EVALSHA and SCRIPT LOAD$",
    ):
        await check_redis(own_redis.url)


async def test_a_redis_without_the_commands_is_refused() -> None:
    """The commands may have been renamed, or the server may have only a part of Redis."""
    without = ("--rename-command", "EVAL", "", "--rename-command", "EVALSHA", "")
    with (
        redis_with(*without) as server,
        pytest.raises(RedisSetupError, match="unknown command 'EVAL'"),
    ):
        await check_redis(server.url)


async def test_a_database_that_redis_does_not_have_is_refused(
    own_redis: RedisServer,
) -> None:
    with pytest.raises(RedisSetupError, match="name a database that it has"):
        await check_redis(own_redis.url.removesuffix("0") + "99")


async def test_a_redis_that_evicts_is_told_of(own_redis: RedisServer) -> None:
    assert await check_redis(own_redis.url) is None
    await operate(own_redis, ("CONFIG", "SET", "maxmemory-policy", "volatile-lru"))
    assert await check_redis(own_redis.url) is None, "it has no limit"
    await operate(own_redis, ("CONFIG", "SET", "maxmemory", "64mb"))
    warning = await check_redis(own_redis.url)
    assert warning is not None
    assert "maxmemory-policy volatile-lru" in warning


async def test_a_redis_that_only_fails_now_keeps_no_router_from_starting(
    own_redis: RedisServer,
) -> None:
    """Redis may serve soon; until then each router counts alone, and says so."""
    await operate(own_redis, REPLICA_OF_NOBODY)
    await check_redis(own_redis.url)
    (port,) = reserved_ports()
    await check_redis(URL.format(port))


async def test_a_cluster_is_recognised(tmp_path: Path) -> None:
    """The keys of all nodes are reached through the address of one node, with the clock of each."""
    keys = [f"qarr:{{k{number}}}:count" for number in range(40)]
    with redis_cluster(tmp_path) as nodes:
        await check_redis(nodes[0].url)
        async with link_to(nodes[0].url) as link:
            for key in keys:
                assert await link.run(COUNT, [key], []) == 1
                assert abs(await link.time_at(time.monotonic(), key) - time.time()) < 60
        sizes = [(await operate(node, ("DBSIZE",)))[0] for node in nodes]
        assert min(sizes) > 0
        with pytest.raises(
            RedisSetupError, match="a Redis Cluster has database 0 alone"
        ):
            await check_redis(nodes[0].url.removesuffix("0") + "1")


async def test_a_node_of_a_cluster_that_restarts_is_an_outage_of_its_keys_alone(
    tmp_path: Path,
) -> None:
    keys = [f"qarr:{{k{number}}}:count" for number in range(40)]
    with redis_cluster(tmp_path) as nodes:
        for node in nodes:
            await operate(
                node, ("CONFIG", "SET", "cluster-require-full-coverage", "no")
            )
        async with link_to(nodes[0].url) as link:
            for key in keys:
                await link.run(COUNT, [key], [])
            nodes[1].stop()
            reached = [key for key in keys if await _counts(link, key)]
            assert 0 < len(reached) < len(keys)
            nodes[1].start()
            await until(lambda: _all_count(link, keys), "all keys to be counted again")


async def _counts(link: RedisLink, key: str) -> bool:
    try:
        await link.run(COUNT, [key], [])
    except UNAVAILABLE:
        return False
    return True


async def _all_count(link: RedisLink, keys: list[str]) -> bool:
    return all([await _counts(link, key) for key in keys])
