"""Budgets on real requests: what is reserved, charged and refused, and what callers are told."""

from __future__ import annotations

import asyncio
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from router.accounting.budgets import Hold, periods
from router.accounting.ledgers import SqliteLedger
from router.auth.api_keys import MICRO, Account
from router.telemetry.record import Cost, Outcome
from tests.conftest import RedisServer
from tests.unit.accounting.budgeted_routers import PLENTY, ended, shop
from tests.unit.router_stack import events
from tiers.spec import TierName

pytestmark = pytest.mark.anyio


async def test_a_request_is_charged_for_what_it_used(tmp_path: Path) -> None:
    """Key and team are charged alike, a longer answer costs more, and nothing stays reserved."""
    rights = {"ann": {"engine_seconds_per_day": PLENTY, "team": "blue"}}
    async with shop(tmp_path, rights) as at:
        short = await at.ask("ann", max_tokens=1)
        short_cost = await at.spent(at.account("ann"))
        longer = await at.ask("ann", max_tokens=20)
        both = await at.spent(at.account("ann"))
        assert short.status_code == 200
        assert longer.status_code == 200
        assert 0 < short_cost.engine_us < both.engine_us - short_cost.engine_us
        assert 0 < short_cost.money_u <= short_cost.engine_us
        assert await at.spent("team:blue") == both
        records = at.stacks[0].pipeline.registry.kept()
        recorded = sum(
            record.cost.engine_us for record in records if record.cost is not None
        )
        assert recorded == both.engine_us


async def test_over_budget_is_a_clear_429(tmp_path: Path) -> None:
    """All three forms name budget, use and renewal and carry Retry-After, and the request reaches no engine."""
    async with shop(tmp_path, {"ann": {"engine_seconds_per_day": 1.0}}) as at:
        while (answer := await at.ask("ann", max_tokens=20)).status_code == 200:
            charged = await at.spent(at.account("ann"))
            missing = MICRO - charged.engine_us
            # Other requests seem to have used nearly all of the budget.
            filler = SqliteLedger(at.database)
            await _spend(filler, at.account("ann"), missing - 1)
        problem = answer.json()
        assert answer.status_code == 429
        assert problem["type"] == "urn:qarr:problem:over-budget"
        now = datetime.now(UTC)
        midnight = (now + timedelta(days=1)).replace(
            hour=0, minute=0, second=0, microsecond=0
        )
        assert 0 < int(answer.headers["retry-after"]) <= 86_400
        assert problem["budget"] == {
            "of": "this key",
            "name": "engine_seconds_per_day",
            "limit": 1.0,
            "used": 0.999999,
            "renews": f"{midnight:%Y-%m-%dT%H:%M:%SZ}",
        }
        assert problem["title"] == "A budget has too little left"
        assert (
            "1 engine-seconds a day, has 0.000001 left, and this request may need 0."
            in problem["detail"]
        )
        before = len(at.stacks[0].engines[TierName.FAST].requests)
        chat = {
            "model": "auto",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 20,
        }
        openai = await at.ask("ann", path="/v1/chat/completions", **chat)
        assert openai.status_code == 429
        assert openai.json()["error"]["code"] == "insufficient_quota"
        assert openai.json()["error"]["type"] == "rate_limit_error"
        anthropic = await at.ask("ann", path="/v1/messages", **chat)
        assert anthropic.status_code == 429
        assert anthropic.json()["error"]["type"] == "rate_limit_error"
        assert "renews at" in anthropic.json()["error"]["message"]
        assert len(at.stacks[0].engines[TierName.FAST].requests) == before
        assert (await at.spent(at.account("ann"))).engine_us == MICRO - 1
        last = at.stacks[0].pipeline.registry.kept()[-1]
        assert last.outcome == Outcome.REFUSED
        assert last.error == "over_budget"
        assert last.cost is None


async def _spend(ledger: SqliteLedger, account: str, engine_us: int) -> None:
    hold = Hold(
        secrets.token_hex(4),
        (Account(account, "", ()),),
        periods=periods(datetime.now(UTC).timestamp()),
        reserved=Cost(),
    )
    await ledger.settle(hold, Cost(engine_us, 0))


async def test_a_request_larger_than_the_budget_never_waits(tmp_path: Path) -> None:
    """The answer is a 400 that names max_tokens, because waiting would not help."""
    async with shop(tmp_path, {"ann": {"engine_seconds_per_day": 0.000001}}) as at:
        answer = await at.ask("ann")
        assert answer.status_code == 400
        assert answer.json()["type"] == "urn:qarr:problem:larger-than-budget"
        assert answer.json()["errors"][0]["field"] == "max_tokens"
        assert "retry-after" not in answer.headers


async def test_over_budget_the_cheapest_tier_serves_if_the_key_says_so(
    tmp_path: Path,
) -> None:
    """Header and reason disclose the tier, a hint is not followed, and at twice the budget requests are refused."""
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
        assert required.status_code == 429
        assert required.json()["budget"]["used"] > 1
        await _spend(ledger, own, MICRO - 1000)
        assert (await at.ask("ann")).status_code == 429


async def test_streams_and_failures_are_charged_once(tmp_path: Path) -> None:
    """A stream is charged, an answer that no engine began is not, and nothing stays reserved."""
    rights = {"ann": {"engine_seconds_per_day": PLENTY}}
    async with shop(tmp_path, rights) as at:
        own = at.account("ann")
        stack = at.stacks[0]
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
        plain = await at.spent(at.account("ann"))
        continued = await at.spent(at.account("ben"))
        assert continued.engine_us > plain.engine_us


@pytest.mark.parametrize("breaks", [False, True])
async def test_what_was_cached_is_not_charged_after_a_break(
    tmp_path: Path, *, breaks: bool
) -> None:
    """An engine that breaks cannot tell what it had cached; then what it was expected to hold counts as cached."""
    first_turn = [{"role": "user", "content": "What flows through Paris? " * 40}]
    turns = [
        *first_turn,
        {"role": "assistant", "content": "The Seine. " * 40},
        {"role": "user", "content": "And through Rome?"},
    ]
    async with shop(tmp_path, {"ann": {"engine_seconds_per_day": PLENTY}}) as at:
        (stack,) = at.stacks
        fast = stack.engines[TierName.FAST]
        for messages in (first_turn, turns):
            fast.break_after = 2 if breaks and messages is turns else None
            headers = {"authorization": f"Bearer {at.names['ann']}"}
            body = {"messages": messages, "stream": True, "qarr": {"tier": "fast"}}
            answer = await stack.client.post(
                f"{stack.url}/v1/chat/completions", json=body, headers=headers
            )
            assert answer.text.endswith("[DONE]\n\n")
            await ended(at.stacks)
        record = stack.pipeline.registry.kept()[-1]
        assert record.tokens.predicted_cached
        assert bool(record.served.continued_on) is breaks
        assert record.tokens.cached is None
        expected = record.tokens.predicted_cached if breaks else 0
        assert record.usage[0].cached == expected


async def test_tokens_after_a_stop_string_over_a_break_are_charged_to_no_tier(
    tmp_path: Path,
) -> None:
    """The second engine computes many of them before its text shows the stop string, of which it added one token."""
    answer = (*"ab" * 20, "E", "ND", "x", *"tuv" * 30)
    async with shop(tmp_path, {"ann": {"engine_seconds_per_day": PLENTY}}) as at:
        (stack,) = at.stacks
        for behaviour in stack.engines.values():
            behaviour.answer = answer
        stack.engines[TierName.FAST].break_after = 42
        stop = {"stop": ["ENDx", "Q" * 40], "max_tokens": 120}
        whole = await at.ask("ann", stream=True, tier="fast", **stop)
        found = events(whole.text)
        assert found[-1][1]["usage"]["completion_tokens"] == 43
        await ended(at.stacks)
        record = stack.pipeline.registry.kept()[-1]
        first, second = record.usage
        assert (first.tier, first.output) == (TierName.FAST, 42)
        assert second.output == 1
        assert second.prompt == first.prompt + 42


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_two_routers_never_exceed_a_budget(
    kind: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    """With many requests at once through two routers, the charges are the sum of the answers' costs and within the budget."""
    rights = {"ann": {"engine_seconds_per_day": 5.0, "money_per_month": 1.0}}
    redis = redis_server.url if kind == "redis" else ""
    async with shop(tmp_path, rights, count=2, redis=redis) as at:
        answers = await asyncio.gather(
            *(at.ask("ann", number % 2, max_tokens=40) for number in range(120))
        )
        statuses = {answer.status_code for answer in answers}
        # With the speed learned here one request may need the whole budget, which is a 400.
        assert statuses <= {200, 400, 429, 503}
        assert 200 in statuses
        await ended(at.stacks)
        ledgers = [stack.pipeline.charging.reservations.ledger for stack in at.stacks]
        now = periods(datetime.now(UTC).timestamp())
        used = [await ledger.used([at.account("ann")], now) for ledger in ledgers]
        records = [
            record for stack in at.stacks for record in stack.pipeline.registry.kept()
        ]
        charged = sum(
            record.cost.engine_us for record in records if record.cost is not None
        )
        assert used[0] == used[1]
        assert {cost.engine_us for cost in used[0].values()} == {charged}
        assert 0 < charged <= 5 * MICRO


async def test_an_expired_key_is_a_401_that_says_so(tmp_path: Path) -> None:
    async with shop(
        tmp_path, {"old": {"expires": datetime.now(UTC) - timedelta(hours=1)}}
    ) as at:
        answer = await at.ask("old")
        assert answer.status_code == 401
        assert answer.json()["type"] == "urn:qarr:problem:unauthorized"
        assert "expired at" in answer.json()["detail"]


async def test_callers_without_budgets_do_not_touch_the_ledger(tmp_path: Path) -> None:
    async with shop(tmp_path, {"ann": {}}) as at:
        assert (await at.ask("ann")).status_code == 200
        assert at.stacks[0].pipeline.charging.reservations._keeper is None
