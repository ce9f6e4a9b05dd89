"""The link to the Redis that routers share: how it is opened, what counts as an outage, and Redis' own clock.

A busy Redis may run a command long after its caller has given up. A command that must not run late therefore carries a
deadline by Redis' own clock, after which it does nothing. After a failure the next command gets a new connection, and one
that was refused is repeated on it: behind one address another Redis may serve by then, while the old one keeps its
connections and refuses to write.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    ClusterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)
from redis.exceptions import (
    TimeoutError as RedisTimeoutError,
)

log = logging.getLogger(f"qarr.{__name__}")
REDIS_TIMEOUT_S = 2.0  # It is longer than a busy event loop keeps an answer waiting.
# Error replies too: a Redis that is READONLY after a failover, OUT OF MEMORY or LOADING does not serve meanwhile.
UNAVAILABLE = (RedisError, RedisClusterException, OSError, TimeoutError)
# Codes of error replies that say why Redis does not serve.
CODES = (
    "READONLY",
    "LOADING",
    "MASTERDOWN",
    "NOREPLICAS",
    "CLUSTERDOWN",
    "OOM",
    "MISCONF",
    "BUSY",
    "NOPERM",
    "NOAUTH",
    "WRONGPASS",
)
# With these a Redis says that it is no master, or not yet; another one may be it by now.
NO_MASTER = {"READONLY", "LOADING", "MASTERDOWN", "NOREPLICAS", "CLUSTERDOWN"}
NO_SCRIPTS = "NOSCRIPTS"
TIMEOUT = "TIMEOUT"
UNREACHABLE = "UNREACHABLE"
OTHER = "OTHER"
CAUSES = (*CODES, NO_SCRIPTS, TIMEOUT, UNREACHABLE, OTHER)
# Redis 6 quotes the code in the middle of an error of a script: "ERR Error running script ... -READONLY You can't write".
_CODE = re.compile(rf"(?:^|[\s-])({'|'.join(CODES)})\b")
# Redis has no code of its own for it
_FORBIDDEN_IN_SCRIPT = "The user executing the script can't"
_NO_SUCH_DATABASE = (
    "DB index is out of range",
    "SELECT is not allowed in cluster mode",
)


class RedisUse(StrEnum):
    """What routers share over Redis."""

    QUOTAS = "quotas"
    BUDGETS = "budgets"
    LOAD = "load"


MEANWHILE = {
    RedisUse.QUOTAS: "this router counts them alone",
    RedisUse.BUDGETS: "this router counts them alone",
    RedisUse.LOAD: "this router goes by its own view",
}


class NoScriptsError(RedisError):
    """Redis runs no scripts: neither EVAL, nor SCRIPT LOAD and EVALSHA."""


class RedisSetupError(Exception):
    """Redis can never serve routers as it is set up."""


class RedisState:
    """Whether Redis serves one use, and why not."""

    def __init__(self, use: RedisUse) -> None:
        self.use = use
        # One of ``CAUSES``; None if Redis serves, or was not asked yet.
        self.cause: str | None = None
        self.failures: Counter[str] = Counter()  # How many there were of each cause.

    @property
    def serves(self) -> bool:
        return self.cause is None

    @property
    def notes(self) -> list[str]:
        if self.cause is None:
            return []
        return [
            f"Redis (state.redis_url) does not serve {self.use} ({self.cause}): {MEANWHILE[self.use]}"
        ]

    def fail(self, error: BaseException) -> None:
        self.cause = cause_of(error)
        self.failures[self.cause] += 1

    def recover(self) -> None:
        self.cause = None


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script, and the name by which Redis knows it."""

    text: str
    sha: str

    @classmethod
    def of(cls, text: str) -> Script:
        return cls(text, hashlib.sha1(text.encode()).hexdigest())  # noqa: S324  Redis' own choice

    @classmethod
    def read(cls, module: str, *names: str) -> Script:
        """Read a script from files beside a module, one after another."""
        return cls.of(
            "".join(
                Path(module).with_name(file_name).read_text("utf-8")
                for file_name in names
            )
        )


# Returns a key's value, which it makes if there is none, and the present second. It writes each time, as the next one does.
_NAME = Script.of(
    "local second = redis.call('TIME')[1] "
    "local name = redis.call('GET', KEYS[1]) or ARGV[1] .. ' ' .. second "
    "redis.call('SET', KEYS[1], name) "
    "return {name, second}"
)
# Returns the time. It writes, since a Redis may answer and yet refuse to write.
_PROBE = Script.of(
    "redis.call('SET', KEYS[1], '', 'PX', 1000) return redis.call('TIME')"
)


class RedisLink:
    """The connections of one use. A Redis Cluster is recognised; every wait ends after ``REDIS_TIMEOUT_S``."""

    def __init__(self, url: str, use: RedisUse, connections: int) -> None:
        self.state = RedisState(use)
        self._url = url
        self._connections = connections
        self._client: Any = None
        self._is_cluster = False
        self._opening = asyncio.Lock()
        # A client of a cluster refuses commands for which it has no free connection: they wait for one here.
        self._free_connections = asyncio.Semaphore(connections)
        self._clocks: defaultdict[str, RedisClock] = defaultdict(RedisClock)
        self._knows_evalsha = True

    async def run(
        self, script: Script, keys: Sequence[str], args: Sequence[Any]
    ) -> Any:
        """Run a script, which Redis does at once or not at all. All its keys have one hash slot."""
        return await self._serve(
            lambda client: self._run(client, script, (len(keys), *keys, *args))
        )

    async def execute(self, *command: Any) -> Any:
        """Execute a command that names a key."""
        return await self._serve(lambda client: client.execute_command(*command))

    async def name_of(self, key: str) -> tuple[str, float]:
        """Return a name that Redis keeps until it loses what it has, and for how many seconds it has kept it.

        It writes: a Redis may answer and yet refuse to write.
        """
        name, now = await self.run(_NAME, [key], [secrets.token_hex(6)])
        return name, float(now) - float(name.split()[1])

    async def time_at(self, moment: float, key: str) -> float:
        """Return the time, in Unix seconds at a moment of the monotonic clock, of the Redis that has a key."""
        redis_time = self._clock_of(key).at(moment)
        if redis_time is None:
            seconds, microseconds = await self._serve(
                lambda client: client.time(**self._target(key))
            )
            self.learn_time(seconds + microseconds / 1e6, key)
            redis_time = self._clock_of(key).at(moment)
            assert redis_time is not None
        return redis_time

    def learn_time(self, redis_time: float, key: str) -> None:
        """Take over the time that the Redis which has a key has just shown."""
        self._clock_of(key).learn(redis_time)

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _serve(self, command: Callable[[Any], Awaitable[Any]]) -> Any:
        """Execute a command with the client, within ``REDIS_TIMEOUT_S``; after a failure connect anew the next time."""
        try:
            async with asyncio.timeout(REDIS_TIMEOUT_S), self._free_connections:
                return await self._execute_anywhere(command)
        except UNAVAILABLE:
            await self._drop_connections()
            raise

    async def _execute_anywhere(self, command: Callable[[Any], Awaitable[Any]]) -> Any:
        """Execute a command; if one Redis refuses it and another may serve it, execute it there."""
        try:
            return await command(await self._opened())
        except UNAVAILABLE as error:
            if not await self._turn_elsewhere(error):
                raise
            cause = cause_of(error)
        # A command that was redirected or refused was not executed, so it may be repeated.
        answer = await command(await self._opened())
        if cause in NO_MASTER:
            self.state.failures[cause] += 1
            log.info(
                "Redis refused to serve %s (%s), and another one behind its address serves",
                self.state.use,
                cause,
            )
        return answer

    async def _turn_elsewhere(self, error: BaseException) -> bool:
        """Turn away from a Redis that refused a command; return whether another one may serve it."""
        if isinstance(error, MovedError) and not self._is_cluster:
            self._is_cluster = True
            await self.aclose()
            return True
        if cause_of(error) not in NO_MASTER:
            return False
        await self._drop_connections()
        return True

    async def _opened(self) -> Any:
        if self._client is None:
            async with self._opening:
                if self._client is None:
                    self._client = await self._open()
        return self._client

    async def _open(self) -> Any:
        """Connect to the Redis of the address, or to the cluster that it belongs to."""
        if not self._is_cluster:
            client = connect(self._url, self._connections)
            try:
                self._is_cluster = await _belongs_to_cluster(client)
            except BaseException:
                await client.aclose()
                raise
            if not self._is_cluster:
                return client
            await client.aclose()
        return await self._open_cluster()

    async def _open_cluster(self) -> Any:
        cluster = connect_cluster(self._url)
        try:
            return await cluster.initialize()
        except IndexError:  # The client raises it for a cluster that is being made.
            await cluster.aclose()
            raise ClusterDownError(
                "no node has hash slots", status_code="CLUSTERDOWN"
            ) from None
        except BaseException:
            await cluster.aclose()
            raise

    async def _drop_connections(self) -> None:
        """Connect anew for the next command. The client of a cluster does that by itself."""
        self._clocks.clear()
        if self._client is not None and not self._is_cluster:
            pool = self._client.connection_pool
            await pool.update_active_connections_for_reconnect()
            await pool.disconnect(inuse_connections=False)

    async def _run(self, client: Any, script: Script, operands: tuple[Any, ...]) -> Any:
        """Run a script by its name, or as a text where Redis does not know it yet or knows no names."""
        if self._knows_evalsha:
            try:
                return await client.execute_command("EVALSHA", script.sha, *operands)
            except NoScriptError:
                pass
            except ResponseError as error:
                if not _is_refused(error, "evalsha"):
                    raise
                self._knows_evalsha = False
        try:
            return await client.execute_command("EVAL", script.text, *operands)
        except ResponseError as error:
            if not _is_refused(error, "eval"):
                raise
            if not self._knows_evalsha:
                raise NoScriptsError(str(error)) from None
        try:
            await client.script_load(script.text)
        except ResponseError as error:
            raise NoScriptsError(str(error)) from None
        return await client.execute_command("EVALSHA", script.sha, *operands)

    def _clock_of(self, key: str) -> RedisClock:
        """Return the clock of the node that has a key: clocks of nodes differ."""
        target = self._target(key)
        node_name = target["target_nodes"].name if target else ""
        return self._clocks[node_name]

    def _target(self, key: str) -> dict[str, Any]:
        """Return the arguments that send a command to the node of a cluster that has a key."""
        if not self._is_cluster or self._client is None:
            return {}
        node_of_key = self._client.get_node_from_key(key)
        if node_of_key is None:
            return {}
        return {"target_nodes": node_of_key}


def connect(url: str, connections: int) -> Any:
    """Return a client without retries whose every wait ends after ``REDIS_TIMEOUT_S``."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=REDIS_TIMEOUT_S,
        socket_timeout=REDIS_TIMEOUT_S,
        socket_connect_timeout=REDIS_TIMEOUT_S,
        decode_responses=True,
        retry=Retry(NoBackoff(), 0),
    )
    return Redis.from_pool(pool)


def connect_cluster(url: str) -> Any:
    """Return a client of a Redis Cluster; it repeats only commands that were redirected, and so not executed."""
    return RedisCluster.from_url(
        url,
        require_full_coverage=False,
        socket_timeout=REDIS_TIMEOUT_S,
        socket_connect_timeout=REDIS_TIMEOUT_S,
        decode_responses=True,
        retry=Retry(NoBackoff(), 0),
    )


async def _belongs_to_cluster(client: Any) -> bool:
    try:
        answer = await client.execute_command("HELLO")
    except ResponseError:
        # It is an old Redis, or a proxy. If it belongs to a cluster, it redirects a command sooner or later.
        return False
    if not isinstance(answer, Mapping):
        names = answer[::2]
        values = answer[1::2]
        answer = dict(zip(names, values, strict=False))
    return bool(answer.get("mode") == "cluster")


def _is_refused(error: ResponseError, command: str) -> bool:
    """Tell whether Redis does not know a command, or forbids it to this user."""
    error_text = str(error).lower()
    return "unknown command" in error_text or (
        isinstance(error, NoPermissionError) and f"'{command}" in error_text
    )


async def check_redis(url: str) -> str | None:
    """Raise ``RedisSetupError`` if Redis can never serve; return a warning if it may lose what it has.

    One that only does not serve now is fine: each router counts alone until it does.
    """
    link = RedisLink(url, RedisUse.QUOTAS, 1)
    try:
        await link.run(_PROBE, ["qarr:tried"], [])
        return await _warning_of(link)
    except UNAVAILABLE as error:
        remedy = _remedy_for(error)
        if remedy is None:
            return None
        # The arguments would repeat the script.
        error_message = str(error).partition(", with args")[0]
        raise RedisSetupError(
            f"state.redis_url: this Redis cannot count for routers ({error_message}): {remedy}"
        ) from None
    finally:
        await link.aclose()


def _remedy_for(error: BaseException) -> str | None:
    """Return what to do about a Redis that can never serve; None if it may serve later."""
    if cause_of(error) == NO_SCRIPTS:
        return "allow its user EVAL, or EVALSHA and SCRIPT LOAD"
    if any(text in str(error) for text in _NO_SUCH_DATABASE):
        return "name a database that it has (a Redis Cluster has database 0 alone)"
    return None


async def _warning_of(link: RedisLink) -> str | None:
    try:
        memory_info = await link.execute("INFO", "memory")
    except UNAVAILABLE:  # This user may not ask for it.
        return None
    eviction_policy = memory_info.get("maxmemory_policy", "noeviction")
    if eviction_policy == "noeviction" or not memory_info.get("maxmemory"):
        return None
    return f"Redis evicts data when it is full (maxmemory-policy {eviction_policy}): quotas then count anew; set noeviction"


def cause_of(error: BaseException) -> str:
    """Return why Redis does not serve, as one of ``CAUSES``; without addresses."""
    if isinstance(error, NoScriptsError):
        return NO_SCRIPTS
    if code := _code_of(error):
        return code
    if isinstance(error, (TimeoutError, RedisTimeoutError)):
        return TIMEOUT
    if isinstance(error, (OSError, RedisConnectionError, RedisClusterException)):
        return UNREACHABLE
    return OTHER


def _code_of(error: BaseException) -> str | None:
    """Return the code of an error reply, if it says why Redis does not serve."""
    status_code = getattr(error, "status_code", None)
    if status_code in CODES:
        return str(status_code)
    if not isinstance(error, ResponseError):
        return None
    error_text = str(error)
    if _FORBIDDEN_IN_SCRIPT in error_text:
        return "NOPERM"
    code_match = _CODE.search(error_text)
    return None if code_match is None else code_match[1]


def outage(error: BaseException) -> str:
    """Return an outage's cause for the log: the error's type, and its message if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class RedisClock:
    """An estimate of Redis' clock that is never ahead of it, unless that clock is set back."""

    def __init__(self) -> None:
        self._ahead_s: float | None = None

    def learn(self, redis_time: float) -> None:
        self._ahead_s = redis_time - time.monotonic()

    def at(self, moment: float) -> float | None:
        """Return Redis' time, in Unix seconds, at a moment of the monotonic clock; None: it has shown none yet."""
        if self._ahead_s is None:
            return None
        return moment + self._ahead_s
