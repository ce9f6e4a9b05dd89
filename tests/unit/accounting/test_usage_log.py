"""Usage by day, key, team and tier: written, read, shown to whom it concerns, and counted as metrics."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import sqlite3
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from router.accounting.database import Database
from router.accounting.usage_log import Row, UsageLog, Use, read_usage
from router.auth.access import KeyStore
from router.auth.api_keys import add_key
from router.auth.quota import Quotas
from router.monitoring.usage_metrics import Labels
from router.pipeline.registry import ActiveRequest, RequestRegistry
from tests.unit.accounting.budgeted_routers import PLENTY, Shop, shop
from tests.unit.cli.stub_router import qarr
from tests.waiting import until

pytestmark = pytest.mark.anyio
RIGHTS: dict[str, dict[str, Any]] = {
    "ann": {"engine_seconds_per_day": PLENTY, "team": "blue"},
    "ben": {"money_per_month": PLENTY},
    "cal": {},
    "boss": {"admin": True},
}


async def usage(at: Shop, name: str, query: str = "") -> dict[str, Any]:
    stack = at.stacks[0]
    answer = await stack.client.get(
        f"{stack.url}/usage{query}",
        headers={"authorization": f"Bearer {at.names[name]}"},
    )
    assert answer.status_code == 200, answer.text
    shown: dict[str, Any] = answer.json()
    return shown


async def ask_five_times(at: Shop) -> None:
    """Send requests of three callers and wait until their usage is written."""
    for name, tier in (
        ("ann", "fast"),
        ("ann", "precise"),
        ("ann", "fast"),
        ("ben", "fast"),
        ("cal", "balanced"),
    ):
        assert (await at.ask(name, tier=tier)).status_code == 200

    async def written() -> bool:
        return sum(row["requests"] for row in (await usage(at, "boss"))["usage"]) == 5

    await until(written)


async def test_usage_is_the_sum_of_charges(tmp_path: Path) -> None:
    """Rows are by key, team and tier; with a budget their engine time is what its account was charged, to the millionth."""
    async with shop(tmp_path, RIGHTS) as at:
        await ask_five_times(at)
        shown = (await usage(at, "boss"))["usage"]
        requests = {
            (row["name"], row["team"], row["tier"]): row["requests"] for row in shown
        }
        assert requests == {
            ("ann", "blue", "fast"): 2,
            ("ann", "blue", "precise"): 1,
            ("ben", "", "fast"): 1,
            ("cal", "", "balanced"): 1,
        }
        charged = await at.spent(at.account("ann"))
        own = [row for row in shown if row["name"] == "ann"]
        engine_s = sum(row["engine_seconds"] for row in own)
        assert round(engine_s * 1e6) == charged.engine_us
        assert round(sum(row["money"] for row in own) * 1e6) == charged.money_u
        (highest,) = [row for row in own if row["tier"] == "precise"]
        assert highest["engine_seconds"] == highest["highest_engine_seconds"] > 0
        assert min(row["prompt_tokens"] * row["output_tokens"] for row in shown) > 0


async def test_a_key_sees_its_own_usage(tmp_path: Path) -> None:
    """A key sees its own usage and its team's budgets, an operator sees all; texts that are no days are refused."""
    async with shop(tmp_path, RIGHTS) as at:
        await ask_five_times(at)
        ann = await usage(at, "ann")
        cal = await usage(at, "cal")
        boss = await usage(at, "boss")
        assert ann["scope"] == "own"
        assert boss["scope"] == "all"
        assert {row["name"] for row in ann["usage"]} == {"ann"}
        key_budget, team_budget = ann["budgets"]
        assert key_budget["budget"] == "engine_seconds_per_day"
        assert key_budget["key"] is not None
        assert key_budget["team"] == "blue"
        assert team_budget["budget"] == "engine_seconds_per_month"
        assert team_budget["key"] is None
        assert team_budget["team"] == "blue"
        assert key_budget["used"] == team_budget["used"] > 0
        assert cal["budgets"] == []
        assert len(cal["usage"]) == 1
        assert len(boss["budgets"]) == 3
        assert (await usage(at, "boss", "?from=2999-01-01"))["usage"] == []
        stack = at.stacks[0]
        headers = {"authorization": f"Bearer {at.names['boss']}"}
        for day in (
            "yesterday",
            "",
            "2026-1-3",
            "20260103",
            "2026-W01-1",
            "2026-02-30",
        ):
            answer = await stack.client.get(
                f"{stack.url}/usage?to={day}", headers=headers
            )
            assert answer.status_code == 400, day


async def test_metrics_have_keys_and_teams(tmp_path: Path) -> None:
    """Metrics count requests, tokens, engine time and money, and tell how far budgets are used."""
    async with shop(tmp_path, RIGHTS) as at:
        await ask_five_times(at)
        stack = at.stacks[0]
        headers = {"authorization": f"Bearer {at.names['boss']}"}

        async def has_used_a_budget() -> bool:
            nonlocal text
            answer = await stack.client.get(f"{stack.url}/metrics", headers=headers)
            text = answer.text
            used = 'qarr_budget_used_ratio{budget="engine_seconds_per_day",key="ann",team="blue"}'
            return any(
                line.startswith(used) and float(line.split()[-1]) > 0
                for line in text.splitlines()
            )

        text = ""
        await until(has_used_a_budget)
        assert 'qarr_key_requests_total{key="ann",team="blue",tier="fast"} 2.0' in text
        assert (
            'qarr_budget_used_ratio{budget="engine_seconds_per_month",key="",team="blue"}'
            in text
        )
        for name in ("engine_seconds", "highest_engine_seconds", "money"):
            assert f'qarr_key_{name}_total{{key="ben",team=""}}' in text
        for kind in ("prompt", "cached", "output"):
            assert f'qarr_key_tokens_total{{key="cal",kind="{kind}",team=""}}' in text


def test_few_keys_have_labels(tmp_path: Path) -> None:
    """The first keys of the file have labels of their own; all other keys, and unknown ones, share one."""
    path = tmp_path / "keys.json"
    ids = [add_key(path, f"key {number}")[1].id for number in range(5)]
    labels = Labels(KeyStore(path), 3)
    assert [labels.of(key)[0] for key in (*ids, "none")] == [
        "key 0",
        "key 1",
        "key 2",
        "other",
        "other",
        "other",
    ]
    assert Labels(KeyStore(path), 0).of(ids[0]) == ("other", "other")


async def test_old_days_are_removed(tmp_path: Path) -> None:
    """Days older than those that are kept are removed once a day; the others outlive the process."""
    database = Database(tmp_path / "usage.sqlite")
    row = Row("2026-01-01", "k", team="", tier="fast")
    log = UsageLog(database, None, now=lambda: 1_767_225_600.0 + 400 * 86_400)  # type: ignore[arg-type]
    for day in ("2025-12-31", "2026-01-01", "2026-01-01"):
        log._unwritten[row._replace(day=day)] = Use(
            1,
            prompt_tokens=2,
            cached_tokens=3,
            output_tokens=4,
            engine_us=5,
            money_u=6,
            highest_engine_us=7,
            highest_money_u=8,
        )
        await log.write()
    await database.aclose()
    again = Database(tmp_path / "usage.sqlite")
    rows = await again.change(partial(read_usage, "", ""))
    assert rows == [
        (
            row,
            Use(
                2,
                prompt_tokens=4,
                cached_tokens=6,
                output_tokens=8,
                engine_us=10,
                money_u=12,
                highest_engine_us=14,
                highest_money_u=16,
            ),
        )
    ]
    await again.aclose()


async def test_usage_that_cannot_be_written_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "usage"
    row = Row("2026-01-01", "k", team="", tier="fast")
    folder.write_text("in the way")
    database = Database(folder / "usage.sqlite")
    log = UsageLog(database, None, now=lambda: 1_767_225_600.0)  # type: ignore[arg-type]
    log._unwritten[row] = Use(1)
    with pytest.raises(OSError, match="exists"):
        await log.write()
    folder.unlink()
    await log.write()
    assert await database.change(partial(read_usage, "", "")) == [(row, Use(1))]
    await database.aclose()


async def test_a_write_that_is_cancelled_and_then_fails_is_kept(tmp_path: Path) -> None:
    """Another process uses the file when the router is stopped, and does so until the write gives up."""
    database = Database(tmp_path / "usage.sqlite")
    row = Row("2026-01-01", "k", team="", tier="fast")
    await database.change(partial(read_usage, "", ""))
    log = UsageLog(database, None, now=lambda: 1_767_225_600.0)  # type: ignore[arg-type]
    log._unwritten[row] = Use(1)
    begun = threading.Event()
    may_fail = threading.Event()

    def locked(*_: object) -> None:
        begun.set()
        may_fail.wait(30)
        raise sqlite3.OperationalError("database is locked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.accounting.usage_log._add", locked)
        writing = asyncio.create_task(log.write())
        await asyncio.to_thread(begun.wait, 30)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        closing = asyncio.create_task(log.aclose())
        await asyncio.sleep(0)
    may_fail.set()
    await closing
    assert await database.change(partial(read_usage, "", "")) == [(row, Use(1))]
    await database.aclose()


async def test_a_request_that_ends_while_the_router_shuts_down_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its budget may be settled only after background work has ended; then its usage is written as well."""
    late: list[tuple[RequestRegistry, ActiveRequest]] = []
    end = RequestRegistry.end
    close_quotas = Quotas.aclose

    async def end_late_requests(quotas: Quotas) -> None:
        for registry, request in late:
            end(registry, request, None)
        await close_quotas(quotas)

    monkeypatch.setattr(
        RequestRegistry,
        "end",
        lambda registry, request, _: late.append((registry, request)),
    )
    monkeypatch.setattr(Quotas, "aclose", end_late_requests)
    async with shop(tmp_path, RIGHTS) as at:
        assert (await at.ask("cal", tier="fast")).status_code == 200
        await until(lambda: late)
    database = Database(tmp_path / "usage.sqlite")
    ((row, use),) = await database.change(partial(read_usage, "", ""))
    assert row.tier == "fast"
    assert use.requests == 1
    await database.aclose()


async def test_the_command_shows_what_routers_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a table, JSON and CSV, while no router runs."""
    async with shop(tmp_path, RIGHTS) as at:
        await ask_five_times(at)
        shown = await usage(at, "boss")
    monkeypatch.setenv("QARR_AUTH__KEYS_FILE", str(at.keys))
    monkeypatch.setenv("QARR_BUDGETS__FILE", str(at.database.path))
    monkeypatch.setenv("QARR_BUDGETS__REPLICA_HOUR", "3.6")

    def csv_rows(*options: str) -> list[dict[str, str]]:
        output = qarr("keys", "usage", "--csv", *options).stdout
        return list(csv.DictReader(io.StringIO(output)))

    def check() -> None:
        output = json.loads(qarr("keys", "usage", "--json").stdout)
        assert output == {"budgets": shown["budgets"], "usage": shown["usage"]}
        table = qarr("keys", "usage").stdout
        assert "engine_seconds_per_day" in table
        assert "cal" in table
        rows = csv_rows()
        assert [row["name"] for row in rows] == [row["name"] for row in shown["usage"]]
        assert [float(row["highest_money"]) for row in rows] == [
            row["highest_money"] for row in shown["usage"]
        ]
        assert csv_rows("--to=2020-01-01") == []
        assert qarr(*["keys", "usage", "--from", "today"]).exit_code != 0

    await asyncio.to_thread(check)
