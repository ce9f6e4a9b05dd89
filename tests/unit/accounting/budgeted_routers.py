"""Routers in this process that share keys with budgets and a ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from router.accounting.budgets import periods
from router.accounting.database import Database
from router.accounting.ledgers import SqliteLedger
from router.auth.api_keys import add_key, read_keys, set_team
from router.telemetry.record import Cost
from tests.fakes.engine import Behaviour
from tests.unit.router_stack import Stack, router_stack
from tests.waiting import until

PLENTY = 1e6


@dataclass(frozen=True, slots=True)
class Shop:
    """Routers that share keys and a ledger, and their callers."""

    stacks: list[Stack]
    keys: Path
    database: Database
    names: dict[str, str]

    async def ask(
        self, name: str, stack: int = 0, path: str = "/generate", **body: Any
    ) -> httpx.Response:
        """Send a request to one of the routers with a caller's key."""
        router = self.stacks[stack]
        request = {
            "prompt": "Hello, how are you?",
            "max_tokens": 20,
            "stream": False,
            **body,
        }
        headers = {"authorization": f"Bearer {self.names[name]}"}
        return await router.client.post(
            router.url + path, json=request, headers=headers
        )

    async def spent(self, account: str) -> Cost:
        """Return what the file counts for an account this month, once every request has ended."""
        await ended(self.stacks)
        now = periods(datetime.now(UTC).timestamp())
        used = await SqliteLedger(self.database).used([account], now)
        return used[account, now.month]

    def account(self, name: str) -> str:
        """Return the account of a caller's key."""
        return next(f"key:{key.id}" for key in read_keys(self.keys) if key.name == name)


async def ended(stacks: list[Stack]) -> None:
    """Wait until no request is open: one is settled after its caller has the answer."""
    await until(lambda: not any(stack.pipeline.registry.open for stack in stacks))


@asynccontextmanager
async def shop(
    tmp_path: Path,
    rights: dict[str, dict[str, Any]],
    count: int = 1,
    redis: str = "",
    **behaviours: Behaviour,
) -> AsyncIterator[Shop]:
    """Run routers with keys, and the price of 3.6 an hour: 0.001 an engine-second."""
    keys = tmp_path / "keys.json"
    file = tmp_path / "usage.sqlite"
    add_key(keys, "first")
    set_team(keys, "blue", engine_seconds_per_month=PLENTY)
    names = {name: add_key(keys, name, **more)[0] for name, more in rights.items()}
    overrides = {
        "auth": {"keys_file": str(keys)},
        "budgets": {"file": str(file), "replica_hour": 3.6},
        "state": {"redis_url": redis},
    }
    database = Database(file)
    async with AsyncExitStack() as cleanup:
        stacks = [
            await cleanup.enter_async_context(
                router_stack(tmp_path, overrides, **behaviours)
            )
            for _ in range(count)
        ]
        yield Shop(stacks, keys, database=database, names=names)
    await database.aclose()
