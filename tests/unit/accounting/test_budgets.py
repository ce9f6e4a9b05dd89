"""Budgets on real requests: what is reserved, charged and refused, and what callers are told."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.accounting.budgets import Hold, periods
from router.accounting.database import Database
from router.accounting.ledgers import SqliteLedger
from router.auth.api_keys import MICRO, Account, add_key, read_keys, set_team
from router.telemetry.record import Cost, Outcome
from tests.conftest import RedisServer
from tests.fakes.engine import Behaviour
from tests.unit.router_stack import Stack, events, router_stack
from tests.waiting import until
from tiers.spec import TierName

pytestmark = pytest.mark.anyio
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
        at, asked = (
            self.stacks[stack],
            {
                "prompt": "Hello, how are you?",
                "max_tokens": 20,
                "stream": False,
                **body,
            },
        )
        headers = {"authorization": f"Bearer {self.names[name]}"}
        return await at.client.post(at.url + path, json=asked, headers=headers)

    async def spent(self, account: str) -> Cost:
        """Return what an account has spent and reserved this month, in the file, once every request has ended."""
        await ended(self.stacks)
        now = periods(datetime.now(UTC).timestamp())
        return (await SqliteLedger(self.database).used([account], now))[
            account, now.month
        ]

    def account(self, name: str) -> str:
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
    keys, file = tmp_path / "keys.json", tmp_path / "usage.sqlite"
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
        yield Shop(stacks, keys, database, names)
    await database.aclose()


async def test_a_request_is_charged_for_what_it_used(tmp_path: Path) -> None:
    """Key and team are charged alike, a longer answer costs more, and nothing stays reserved."""
    rights = {"ann": {"engine_seconds_per_day": PLENTY, "team": "blue"}}
    async with shop(tmp_path, rights) as at:
        short = await at.ask("ann", max_tokens=1)
        one = await at.spent(at.account("ann"))
        whole = await at.ask("ann", max_tokens=20)
        both = await at.spent(at.account("ann"))
        assert (short.status_code, whole.status_code) == (200, 200)
        assert 0 < one.engine_us < both.engine_us - one.engine_us
        assert 0 < one.money_u <= one.engine_us
        assert await at.spent("team:blue") == both
        records = at.stacks[0].pipeline.registry.kept()
        assert (
            sum(record.cost.engine_us for record in records if record.cost is not None)
            == both.engine_us
        )


async def test_over_budget_is_a_clear_429(tmp_path: Path) -> None:
    """It names budget, use and renewal in all three forms, comes with Retry-After, and no engine is asked."""
    async with shop(tmp_path, {"ann": {"engine_seconds_per_day": 1.0}}) as at:
        asked = {"max_tokens": 20}
        while (answer := await at.ask("ann", **asked)).status_code == 200:
            charged = await at.spent(at.account("ann"))
            missing = MICRO - charged.engine_us
            # as if other requests had used nearly all of it
            filler = SqliteLedger(at.database)
            await _spend(filler, at.account("ann"), missing - 1)
        told = answer.json()
        assert (answer.status_code, told["type"]) == (
            429,
            "urn:qarr:problem:over-budget",
        )
        now = datetime.now(UTC)
        midnight = (now + timedelta(days=1)).replace(
            hour=0, minute=0, second=0, microsecond=0
        )
        assert 0 < int(answer.headers["retry-after"]) <= 86_400
        assert told["budget"] == {
            "of": "this key", "name": "engine_seconds_per_day", "limit": 1.0, "used": 0.999999,
            "renews": f"{midnight:%Y-%m-%dT%H:%M:%SZ}",
        }  # fmt: skip
        assert told["title"] == "A budget has too little left"
        assert (
            "1 engine-seconds a day, has 0.000001 left, and this request may need 0."
            in told["detail"]
        )
        before = len(at.stacks[0].engines[TierName.FAST].requests)
        chat = {
            "model": "auto",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 20,
        }
        openai = await at.ask("ann", path="/v1/chat/completions", **chat)
        assert (openai.status_code, openai.json()["error"]["code"]) == (
            429,
            "insufficient_quota",
        )
        assert openai.json()["error"]["type"] == "rate_limit_error"
        anthropic = await at.ask("ann", path="/v1/messages", **chat)
        assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (
            429,
            "rate_limit_error",
        )
        assert "renews at" in anthropic.json()["error"]["message"]
        assert len(at.stacks[0].engines[TierName.FAST].requests) == before
        assert (await at.spent(at.account("ann"))).engine_us == MICRO - 1
        last = at.stacks[0].pipeline.registry.kept()[-1]
        assert (last.outcome, last.error, last.cost) == (
            Outcome.REFUSED,
            "over_budget",
            None,
        )


async def _spend(ledger: SqliteLedger, account: str, engine_us: int) -> None:
    hold = Hold(
        secrets.token_hex(4),
        (Account(account, "", ()),),
        periods(datetime.now(UTC).timestamp()),
        Cost(),
    )
    await ledger.settle(hold, Cost(engine_us, 0))


async def test_a_request_larger_than_the_budget_never_waits(tmp_path: Path) -> None:
    """It is a 400 that names max_tokens, for no waiting helps."""
    async with shop(tmp_path, {"ann": {"engine_seconds_per_day": 0.000001}}) as at:
        answer = await at.ask("ann")
        assert (answer.status_code, answer.json()["type"]) == (
            400,
            "urn:qarr:problem:larger-than-budget",
        )
        assert answer.json()["errors"][0]["field"] == "max_tokens"
        assert "retry-after" not in answer.headers


async def test_over_budget_the_cheapest_tier_serves_if_the_key_says_so(
    tmp_path: Path,
) -> None:
    """The tier is disclosed by header and reason, a hint is not taken, and twice the budget is the end."""
    rights = {"ann": {"engine_seconds_per_day": 1.0, "over_budget": "cheapest"}}
    async with shop(tmp_path, rights) as at:
        own = at.account("ann")
        within = await at.ask("ann", tier="precise")
        assert within.headers["x-qarr-tier"] == "precise"
        assert "x-qarr-over-budget" not in within.headers
        ledger = SqliteLedger(at.database)
        await _spend(ledger, own, MICRO)
        over = await at.ask("ann", tier="precise")
        tier = over.headers["x-qarr-tier"]
        assert over.status_code == 200
        assert tier in over.headers["x-qarr-over-budget"]
        assert over.headers["x-qarr-reason"].startswith(
            f"over budget, so only {tier} may serve; "
        )
        other = next(name for name in ("fast", "balanced") if name != tier)
        required = await at.ask("ann", tier=other, tier_policy="require")
        assert (required.status_code, required.json()["budget"]["used"] > 1) == (
            429,
            True,
        )
        await _spend(ledger, own, MICRO - 1000)
        assert (await at.ask("ann")).status_code == 429


async def test_streams_and_failures_are_charged_once(tmp_path: Path) -> None:
    """A stream is charged, a client that leaves too, an answer that no engine began is not; nothing stays reserved."""
    rights = {"ann": {"engine_seconds_per_day": PLENTY}}
    async with shop(tmp_path, rights) as at:
        own, stack = at.account("ann"), at.stacks[0]
        streamed = await at.ask("ann", stream=True)
        assert events(streamed.text)[-1][0] == "done"
        first = await at.spent(own)
        assert first.engine_us > 0
        for behaviour in stack.engines.values():
            behaviour.status = 500
        assert (await at.ask("ann")).status_code == 503
        assert await at.spent(own) == first


async def test_failover_is_charged_at_most_what_was_reserved(tmp_path: Path) -> None:
    rights = {
        "ann": {"engine_seconds_per_day": PLENTY},
        "ben": {"engine_seconds_per_day": PLENTY},
    }
    async with shop(tmp_path, rights) as at:
        await at.ask("ann", stream=True, tier="fast")
        at.stacks[0].engines[TierName.FAST].break_after = 2
        answer = await at.ask("ben", stream=True, tier="fast")
        assert events(answer.text)[-1][1]["continued_on"]
        plain, continued = [await at.spent(at.account(name)) for name in ("ann", "ben")]
        assert continued.engine_us > plain.engine_us


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_two_routers_never_exceed_a_budget(
    kind: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    """Requests at once through two routers: what was charged is the sum of what answers cost, and within the budget."""
    rights = {"ann": {"engine_seconds_per_day": 5.0, "money_per_month": 1.0}}
    redis = redis_server.url if kind == "redis" else ""
    async with shop(tmp_path, rights, 2, redis) as at:
        answers = await asyncio.gather(
            *(at.ask("ann", n % 2, max_tokens=40) for n in range(120))
        )
        statuses = {answer.status_code for answer in answers}
        # 400: by the speed learned here, one request may take it all
        assert statuses <= {200, 400, 429, 503}
        assert 200 in statuses
        await ended(at.stacks)
        ledgers = [stack.pipeline.charging.reservations.ledger for stack in at.stacks]
        now = periods(datetime.now(UTC).timestamp())
        used = [await each.used([at.account("ann")], now) for each in ledgers]
        records = [
            record for stack in at.stacks for record in stack.pipeline.registry.kept()
        ]
        charged = sum(
            record.cost.engine_us for record in records if record.cost is not None
        )
        assert used[0] == used[1]
        assert {there.engine_us for there in used[0].values()} == {charged}
        assert 0 < charged <= 5 * MICRO


async def test_an_expired_key_is_a_401_that_says_so(tmp_path: Path) -> None:
    async with shop(
        tmp_path, {"old": {"expires": datetime.now(UTC) - timedelta(hours=1)}}
    ) as at:
        answer = await at.ask("old")
        assert (answer.status_code, answer.json()["type"]) == (
            401,
            "urn:qarr:problem:unauthorized",
        )
        assert "expired at" in answer.json()["detail"]


async def test_callers_without_budgets_do_not_touch_the_ledger(tmp_path: Path) -> None:
    async with shop(tmp_path, {"ann": {}}) as at:
        assert (await at.ask("ann")).status_code == 200
        assert at.stacks[0].pipeline.charging.reservations._keeper is None
