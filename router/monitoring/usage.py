"""What keys and teams use: ``GET /usage``, and metrics by key with a bounded number of labels."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.accounting.budgets import BudgetUnknownError
from router.accounting.charging import Charging
from router.accounting.database import Database
from router.accounting.usage import (
    Row,
    Use,
    day_of,
    read_usage,
    render_row,
    used_budgets,
)
from router.api.asgi import context_of
from router.api.bodies import json_response
from router.auth.access import KeyStore
from router.auth.api_keys import MICRO, Caller, KeysError, read_keys
from router.redis_link import UNAVAILABLE
from tiers.background import Faults

log = logging.getLogger(f"qarr.{__name__}")
OTHER = "other"
MOST_NAMED = 50  # keys with metrics of their own
LOOK_S = 10.0  # between looks at how far budgets are used
NO_STORE = {"cache-control": "no-store"}
KEY = ("key", "team")


class Labels:
    """Which keys have metrics of their own: the first ones of the key file, never more than so many in all; others share."""

    def __init__(self, keys: KeyStore, most: int = MOST_NAMED) -> None:
        self._keys, self._most = keys, most
        self._named: dict[str, tuple[str, str]] = {}

    def of(self, key_id: str) -> tuple[str, str]:
        if key_id not in self._named and len(self._named) < self._most:
            first = self._keys.callers[: self._most]
            self._named |= {
                caller.key_id: (caller.name, caller.team)
                for caller in first
                if caller.key_id == key_id
            }
        return self._named.get(key_id, (OTHER, OTHER))

    def callers(self) -> list[Caller]:
        return [
            caller
            for caller in self._keys.callers
            if self.of(caller.key_id)[0] != OTHER
        ]


class UsageMetrics(Collector):
    def __init__(
        self, registry: CollectorRegistry, labels: Labels, charging: Charging
    ) -> None:
        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"qarr_key_{name}", text, (*KEY, *more), registry=registry)

        self._labels, self._charging = labels, charging
        self._budgets: list[dict[str, Any]] = []
        self._requests = counter(
            "requests", "Requests of keys, by the tier that served them.", "tier"
        )
        self._tokens = counter(
            "tokens",
            "Tokens of keys: of prompts, of these from the prefix cache, of answers.",
            "kind",
        )
        self._engine = counter(
            "engine_seconds",
            "Engine time of keys, in seconds of a replica of the highest tier.",
        )
        self._money = counter(
            "money", "Cost of keys' requests, in the currency of budgets.currency."
        )
        text = (
            "Engine time that keys' tokens would have taken at the highest precision."
        )
        self._highest = counter("highest_engine_seconds", text)

    def observe(self, row: Row, use: Use) -> None:
        whose = self._labels.of(row.key)
        self._requests.labels(*whose, row.tier).inc(use.requests)
        tokens = {
            "prompt": use.prompt_tokens,
            "cached": use.cached_tokens,
            "output": use.output_tokens,
        }
        for kind, number in tokens.items():
            self._tokens.labels(*whose, kind).inc(number)
        self._engine.labels(*whose).inc(use.engine_us / MICRO)
        self._money.labels(*whose).inc(use.money_u / MICRO)
        self._highest.labels(*whose).inc(use.highest_engine_us / MICRO)

    def collect(self) -> Iterable[Metric]:
        text = "Share of a budget that is used or reserved; the key's name is empty for a team's budget."
        used = GaugeMetricFamily(
            "qarr_budget_used_ratio", text, labels=[*KEY, "budget"]
        )
        for each in self._budgets:
            used.add_metric(
                [each["name"] or "", each["team"] or "", each["budget"]],
                each["used"] / each["limit"],
            )
        yield used

    async def look(self) -> None:
        ledger = self._charging.reservations.ledger
        self._budgets = await used_budgets(ledger, self._labels.callers(), time.time())

    async def run(self) -> None:
        faults = Faults(repeats=False)
        while True:
            try:
                await self.look()
            except (*UNAVAILABLE, sqlite3.Error, KeysError) as error:
                faults.log(error, "how far budgets are used is not known")
            await asyncio.sleep(LOOK_S)


class UsageEndpoint:
    """``GET /usage``: budgets and usage of all keys for operators, of its own for any other key."""

    def __init__(self, database: Database, charging: Charging, keys: KeyStore) -> None:
        self._database, self._charging, self._keys = database, charging, keys

    def routes(self) -> list[Route]:
        return [Route("/usage", self.answer, methods=["GET"])]

    async def answer(self, request: Request) -> Response:
        caller, ledger = (
            context_of(request.scope).caller,
            self._charging.reservations.ledger,
        )
        first, last = _day(request, "from"), _day(request, "to")
        own = {
            each.key_id: each
            for each in (*self._keys.callers, caller)
            if caller.sees(each.key_id)
        }
        try:
            rows = await self._database.change(partial(read_usage, first, last))
            names = {
                key.id: key.name
                for key in await asyncio.to_thread(read_keys, self._keys.path)
            }
            budgets = await used_budgets(ledger, list(own.values()), time.time())
        except (*UNAVAILABLE, sqlite3.Error):
            place = (
                f"the file {self._database.path}"
                if self._database.fault
                else ledger.place
            )
            raise BudgetUnknownError(place) from None
        priced = self._charging.reservations.settings.replica_hour is not None
        usage = [
            render_row(row, use, names, priced=priced)
            for row, use in rows
            if caller.sees(row.key)
        ]
        body = {
            "scope": "all" if caller.sees_all else "own",
            "budgets": budgets,
            "usage": usage,
        }
        return json_response(body, headers=NO_STORE)


def _day(request: Request, name: str) -> str:
    text = request.query_params.get(name)
    try:
        return "" if text is None else day_of(text)
    except ValueError:
        raise HTTPException(400, f"{name}: a day as in 2027-01-31 is allowed") from None
