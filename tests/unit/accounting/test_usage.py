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
from router.accounting.usage import Row, UsageLog, Use, read_usage
from router.auth.access import KeyStore
from router.auth.api_keys import add_key
from router.auth.quota import Quotas
from router.monitoring.usage import Labels
from router.pipeline.registry import ActiveRequest, RequestRegistry
from tests.unit.accounting.test_budgets import PLENTY, Shop, shop
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


async def asked(at: Shop) -> None:
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
        await asked(at)
        shown = (await usage(at, "boss"))["usage"]
        found = {
            (row["name"], row["team"], row["tier"]): row["requests"] for row in shown
        }
        assert found == {
            ("ann", "blue", "fast"): 2, ("ann", "blue", "precise"): 1, ("ben", "", "fast"): 1, ("cal", "", "balanced"): 1,
        }  # fmt: skip
        charged = await at.spent(at.account("ann"))
        own = [row for row in shown if row["name"] == "ann"]
        assert (
            round(sum(row["engine_seconds"] for row in own) * 1e6) == charged.engine_us
        )
        assert round(sum(row["money"] for row in own) * 1e6) == charged.money_u
        (highest,) = [row for row in own if row["tier"] == "precise"]
        assert highest["engine_seconds"] == highest["highest_engine_seconds"] > 0
        assert min(row["prompt_tokens"] * row["output_tokens"] for row in shown) > 0


async def test_a_key_sees_its_own_usage(tmp_path: Path) -> None:
    """And its team's budgets; an operator sees all; days that are none are refused."""
    async with shop(tmp_path, RIGHTS) as at:
        await asked(at)
        ann, cal, boss = [await usage(at, name) for name in ("ann", "cal", "boss")]
        assert (ann["scope"], boss["scope"]) == ("own", "all")
        assert {row["name"] for row in ann["usage"]} == {"ann"}
        assert [each["budget"] for each in ann["budgets"]] == [
            "engine_seconds_per_day",
            "engine_seconds_per_month",
        ]
        assert [(each["key"] is None, each["team"]) for each in ann["budgets"]] == [
            (False, "blue"),
            (True, "blue"),
        ]
        assert ann["budgets"][0]["used"] == ann["budgets"][1]["used"] > 0
        assert (cal["budgets"], len(cal["usage"])) == ([], 1)
        assert len(boss["budgets"]) == 3
        assert (await usage(at, "boss", "?from=2999-01-01"))["usage"] == []
        stack, headers = at.stacks[0], {"authorization": f"Bearer {at.names['boss']}"}
        for day in (
            "yesterday",
            "",
            "2026-1-3",
            "20260103",
            "2026-W01-1",
            "2026-02-30",
        ):
            assert (
                await stack.client.get(f"{stack.url}/usage?to={day}", headers=headers)
            ).status_code == 400, day


async def test_metrics_have_keys_and_teams(tmp_path: Path) -> None:
    """Requests, tokens, engine time, money and the highest tier's; and how far budgets are used."""
    async with shop(tmp_path, RIGHTS) as at:
        await asked(at)
        stack, headers = at.stacks[0], {"authorization": f"Bearer {at.names['boss']}"}

        async def told() -> bool:
            nonlocal text
            text = (
                await stack.client.get(f"{stack.url}/metrics", headers=headers)
            ).text
            used = 'qarr_budget_used_ratio{budget="engine_seconds_per_day",key="ann",team="blue"}'
            return any(
                line.startswith(used) and float(line.split()[-1]) > 0
                for line in text.splitlines()
            )

        text = ""
        await until(told)
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
    """The first of the file have; all others, and unknown ones, share one."""
    path = tmp_path / "keys.json"
    ids = [add_key(path, f"key {n}")[1].id for n in range(5)]
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
    """Once a day, what is older than the days that are kept; the rest outlives the process."""
    database, row = (
        Database(tmp_path / "usage.sqlite"),
        Row("2026-01-01", "k", "", "fast"),
    )
    log = UsageLog(database, None, now=lambda: 1_767_225_600.0 + 400 * 86_400)  # type: ignore[arg-type]
    for day in ("2025-12-31", "2026-01-01", "2026-01-01"):
        log._unwritten[row._replace(day=day)] = Use(1, 2, 3, 4, 5, 6, 7, 8)
        await log.write()
    await database.aclose()
    again = Database(tmp_path / "usage.sqlite")
    rows = await again.change(partial(read_usage, "", ""))
    assert rows == [(row, Use(2, 4, 6, 8, 10, 12, 14, 16))]
    await again.aclose()


async def test_usage_that_cannot_be_written_is_kept(tmp_path: Path) -> None:
    folder, row = tmp_path / "usage", Row("2026-01-01", "k", "", "fast")
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
    """The file is in use by another process when the router is told to stop, and stays so until the write gives up."""
    database, row = (
        Database(tmp_path / "usage.sqlite"),
        Row("2026-01-01", "k", "", "fast"),
    )
    await database.change(partial(read_usage, "", ""))
    log = UsageLog(database, None, now=lambda: 1_767_225_600.0)  # type: ignore[arg-type]
    log._unwritten[row] = Use(1)
    begun, may_fail = threading.Event(), threading.Event()

    def locked(*_: object) -> None:
        begun.set()
        may_fail.wait(30)
        raise sqlite3.OperationalError("database is locked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.accounting.usage._add", locked)
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
    end, close_quotas = RequestRegistry.end, Quotas.aclose

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
    assert (row.tier, use.requests) == ("fast", 1)
    await database.aclose()


async def test_the_command_shows_what_routers_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a table, JSON and CSV, while no router runs."""
    async with shop(tmp_path, RIGHTS) as at:
        await asked(at)
        shown = await usage(at, "boss")
    monkeypatch.setenv("QARR_AUTH__KEYS_FILE", str(at.keys))
    monkeypatch.setenv("QARR_BUDGETS__FILE", str(at.database.path))
    monkeypatch.setenv("QARR_BUDGETS__REPLICA_HOUR", "3.6")

    def check() -> None:
        told = json.loads(qarr("keys", "usage", "--json").stdout)
        assert told == {name: shown[name] for name in ("budgets", "usage")}
        table = qarr("keys", "usage").stdout
        assert "engine_seconds_per_day" in table
        assert "cal" in table
        rows = list(csv.DictReader(io.StringIO(qarr("keys", "usage", "--csv").stdout)))
        assert [row["name"] for row in rows] == [row["name"] for row in shown["usage"]]
        assert [float(row["highest_money"]) for row in rows] == [
            row["highest_money"] for row in shown["usage"]
        ]
        assert (
            list(
                csv.DictReader(
                    io.StringIO(
                        qarr("keys", "usage", "--csv", "--to", "2020-01-01").stdout
                    )
                )
            )
            == []
        )
        assert qarr("keys", "usage", "--from", "today").exit_code != 0

    await asyncio.to_thread(check)
