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
from router.accounting.usage_log import (
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
MAX_NAMED_KEYS = 50  # With metrics of their own.
BUDGETS_POLL_S = 10.0
NO_STORE = {"cache-control": "no-store"}
KEY = ("key", "team")


class Labels:
    """Labels of keys, a name and a team.

    The first keys of the key file have labels of their own, never more than ``most_named`` in all; others share theirs.
    """

    def __init__(self, keys: KeyStore, most_named: int = MAX_NAMED_KEYS) -> None:
        self._keys = keys
        self._most_named = most_named
        self._labels_by_key: dict[str, tuple[str, str]] = {}

    def of(self, key_id: str) -> tuple[str, str]:
        labels = self._labels_by_key.get(key_id)
        if labels is not None:
            return labels
        if len(self._labels_by_key) < self._most_named:
            for caller in self._keys.callers[: self._most_named]:
                if caller.key_id == key_id:
                    self._labels_by_key[key_id] = (caller.name, caller.team)
        return self._labels_by_key.get(key_id, (OTHER, OTHER))

    def callers(self) -> list[Caller]:
        """Return the keys that have labels of their own."""
        return [
            caller
            for caller in self._keys.callers
            if self.of(caller.key_id)[0] != OTHER
        ]


class UsageMetrics(Collector):
    """What keys have used, and how far their budgets are used."""

    def __init__(
        self, registry: CollectorRegistry, labels: Labels, charging: Charging
    ) -> None:
        self._labels = labels
        self._charging = charging
        self._budgets: list[dict[str, Any]] = []
        self._requests = Counter(
            "qarr_key_requests",
            "Requests of keys, by the tier that served them.",
            labelnames=(*KEY, "tier"),
            registry=registry,
        )
        self._tokens = Counter(
            "qarr_key_tokens",
            "Tokens of keys: of prompts, of these from the prefix cache, of answers.",
            labelnames=(*KEY, "kind"),
            registry=registry,
        )
        self._engine_s = Counter(
            "qarr_key_engine_seconds",
            "Engine time of keys, in seconds of a replica of the highest tier.",
            labelnames=KEY,
            registry=registry,
        )
        self._money = Counter(
            "qarr_key_money",
            "Cost of keys' requests, in the currency of budgets.currency.",
            labelnames=KEY,
            registry=registry,
        )
        self._highest_engine_s = Counter(
            "qarr_key_highest_engine_seconds",
            "Engine time that keys' tokens would have taken at the highest precision.",
            labelnames=KEY,
            registry=registry,
        )

    def observe(self, row: Row, use: Use) -> None:
        labels = self._labels.of(row.key)
        self._requests.labels(*labels, row.tier).inc(use.requests)
        self._tokens.labels(*labels, "prompt").inc(use.prompt_tokens)
        self._tokens.labels(*labels, "cached").inc(use.cached_tokens)
        self._tokens.labels(*labels, "output").inc(use.output_tokens)
        self._engine_s.labels(*labels).inc(use.engine_us / MICRO)
        self._money.labels(*labels).inc(use.money_u / MICRO)
        self._highest_engine_s.labels(*labels).inc(use.highest_engine_us / MICRO)

    def collect(self) -> Iterable[Metric]:
        used_ratio = GaugeMetricFamily(
            "qarr_budget_used_ratio",
            "Share of a budget that is used or reserved; the key's name is empty for a team's budget.",
            labels=[*KEY, "budget"],
        )
        for budget in self._budgets:
            labels = [budget["name"] or "", budget["team"] or "", budget["budget"]]
            used_ratio.add_metric(labels, budget["used"] / budget["limit"])
        yield used_ratio

    async def look(self) -> None:
        """Read how far the budgets of the keys with labels of their own are used."""
        ledger = self._charging.reservations.ledger
        self._budgets = await used_budgets(ledger, self._labels.callers(), time.time())

    async def run(self) -> None:
        faults = Faults(repeats=False)
        while True:
            try:
                await self.look()
            except (*UNAVAILABLE, sqlite3.Error, KeysError) as error:
                faults.log(error, "how far budgets are used is not known")
            await asyncio.sleep(BUDGETS_POLL_S)


class UsageEndpoint:
    """``GET /usage``: budgets and usage of all keys for operators, of its own for any other key."""

    def __init__(self, database: Database, charging: Charging, keys: KeyStore) -> None:
        self._database = database
        self._charging = charging
        self._keys = keys

    def routes(self) -> list[Route]:
        return [Route("/usage", self.answer, methods=["GET"])]

    async def answer(self, request: Request) -> Response:
        caller = context_of(request.scope).caller
        ledger = self._charging.reservations.ledger
        first_day = _day(request, "from")
        last_day = _day(request, "to")
        visible_callers = {
            known_caller.key_id: known_caller
            for known_caller in (*self._keys.callers, caller)
            if caller.sees(known_caller.key_id)
        }
        try:
            usage = await self._usage(caller, first_day, last_day)
            budgets = await used_budgets(
                ledger, list(visible_callers.values()), time.time()
            )
        except (*UNAVAILABLE, sqlite3.Error):
            place = ledger.place
            if self._database.fault:
                place = f"the file {self._database.path}"
            raise BudgetUnknownError(place) from None
        scope = "all" if caller.sees_all else "own"
        body = {"scope": scope, "budgets": budgets, "usage": usage}
        return json_response(body, headers=NO_STORE)

    async def _usage(
        self, caller: Caller, first_day: str, last_day: str
    ) -> list[dict[str, Any]]:
        """Return what keys have used that the caller may see, as JSON values; an empty day is no bound."""
        read = partial(read_usage, first_day, last_day)
        rows = await self._database.change(read)
        keys = await asyncio.to_thread(read_keys, self._keys.path)
        names = {key.id: key.name for key in keys}
        priced = self._charging.reservations.settings.replica_hour is not None
        return [
            render_row(row, use, names, priced=priced)
            for row, use in rows
            if caller.sees(row.key)
        ]


def _day(request: Request, name: str) -> str:
    """Return a day of the query as it is in the database; empty where none is given."""
    text = request.query_params.get(name)
    if text is None:
        return ""
    try:
        return day_of(text)
    except ValueError:
        raise HTTPException(400, f"{name}: a day as in 2027-01-31 is allowed") from None
