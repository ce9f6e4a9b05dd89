"""``qarr top``: the running fleet and its requests, live, by Rich."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from router.cli.client import RouterApiClient, why_no_router, why_unauthorized
from router.cli.common import output, printable, with_options
from router.policy.losses import of_100
from tiers.errors import OperationError
from tiers.preparing import Preparing

SILENT_S = 5.0  # the router sends its fleet every second
AGAIN_S = 1.0
PIPED_WIDTH = 160
KEPT_RECORDS = 100
# The style of a state; any other is yellow.
STATES = dict.fromkeys(("failed", "quarantined", "unreachable"), "bold red")
STATES |= {"ready": "green", "absent": "", "stopped": ""}
OUTCOMES = {"ok": "green", "refused": "yellow", "error": "bold red"}
NEARLY_FULL = 0.88  # of the KV cache


@with_options
def top(
    once: Annotated[
        bool, typer.Option("--once", help="Print how it is now, as text, and end.")
    ] = False,
    *,
    router: RouterApiClient,
) -> None:
    """Show live tiers and requests until Ctrl-C."""
    records: deque[dict[str, Any]] = deque(maxlen=KEPT_RECORDS)
    if once or not sys.stdout.isatty():
        try:
            fleets = (fleet for fleet in _fleets(router, records) if fleet is not None)
            next(fleets, None)
            fleet = next(fleets, None)  # the first one has no tokens per second yet
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise router.no_answer(error) from error
        if fleet is None:
            raise OperationError(f"{router.url} is shutting down")
        output(PIPED_WIDTH).print(screen(fleet, records, 30))
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    console, trouble, seen = (
        Console(highlight=False, markup=False),
        "connecting ...",
        None,
    )
    try:
        with suppress(httpx.InvalidURL):
            router.http  # noqa: B018  it says which router, which the screen would hide
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                try:
                    for fleet in _fleets(router, records):
                        seen = fleet or seen
                        live.update(screen(seen, records, console.height), refresh=True)
                    trouble = f"{router.url} ended the connection; trying again"
                except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                    trouble = f"no answer from {router.url} ({type(error).__name__}); trying again"
                live.update(
                    screen(seen, records, console.height, trouble), refresh=True
                )
                time.sleep(AGAIN_S)
    except KeyboardInterrupt:
        return


def _fleets(
    router: RouterApiClient, records: deque[dict[str, Any]]
) -> Iterator[dict[str, Any] | None]:
    """Yield the fleet with each event of ``GET /live``, None with each ended request, which is added to the records."""
    event = ""
    with router.http.stream("GET", "/live", timeout=SILENT_S) as response:
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise OperationError(why_unauthorized(response))
        if response.status_code == httpx.codes.NOT_FOUND:
            said = f"{router.url} has no /live: is this a router, and as new as this command?"
            raise OperationError(why_no_router(router.url, router.http.get, said))
        response.raise_for_status()
        # the last ones are sent again after a reconnection
        known = {record["request_id"] for record in records}
        for line in response.iter_lines():
            name, _, value = line.partition(": ")
            if name == "event":
                event = value
            elif name == "data" and event == "fleet":
                yield json.loads(value)
            elif (
                name == "data"
                and (record := json.loads(value))["request_id"] not in known
            ):
                records.appendleft(record)
                yield None


def screen(
    fleet: Mapping[str, Any] | None,
    records: Iterable[Mapping[str, Any]],
    height: int,
    trouble: str = "",
) -> RenderableType:
    """Return what is shown: a summary, tiers with their replicas, open requests, the last ended ones."""
    said: list[RenderableType] = (
        [Text(trouble, style="bold white on red")] if trouble else []
    )
    if fleet is None:
        return Group(*(said or [Text("connecting ...", style="yellow")]))
    tiers, notes = _tiers(fleet["tiers"])
    shown = [
        _summary(fleet),
        *said,
        Text(),
        tiers,
        *notes,
        Text(),
        _open(fleet),
        Text(),
    ]
    left = (
        height
        - 7
        - len(said)
        - len(notes)
        - tiers.row_count
        - min(len(fleet["in_flight"]), 10)
    )
    return Group(*shown, _ended(list(records)[: max(left, 1)]))


def _summary(fleet: Mapping[str, Any]) -> Text:
    tiers, totals, budget = (
        fleet["tiers"],
        fleet["totals"],
        fleet.get("loss_budget") or {},
    )
    ready, per_minute = (
        sum(tier["state"] == "ready" for tier in tiers),
        60 / fleet["window_s"],
    )
    parts = [
        (f"QARR {fleet['version']} ", "bold"),
        (f"{fleet['model']} on {fleet['machine']}", ""),
        (
            f"{ready}/{len(tiers)} tiers ready",
            "green" if ready == len(tiers) else "bold red",
        ),
        (f"{fleet['in_flight_total']} in flight", ""),
        (f"{fleet['waiting']} waiting", "yellow" if fleet["waiting"] else ""),
        (
            f"{sum(tier['requests'] for tier in tiers) * per_minute:.0f} requests/min",
            "",
        ),
        (
            f"in all {totals['requests']}, {totals['errors']} failed, {totals['refused']} refused",
            "",
        ),
    ]
    if budget.get("saved") is not None:
        parts.append((f"{budget['saved']:.0%} engine time saved", ""))
    if budget.get("mean") is not None and budget.get("budget") is not None:
        expected, allowed = budget["mean"], budget["budget"]
        is_over = expected > allowed
        text = f"{of_100(expected)} answers expected worse, {of_100(allowed)} allowed"
        parts.append((text, "yellow" if is_over else ""))
    if fleet.get("scope") == "own":
        parts.append(
            (
                "only this key's own requests are shown: a key made with --admin sees all",
                "yellow",
            )
        )
    return Text(" · ").join(Text(text, style=style) for text, style in parts)


def _tiers(tiers: Iterable[Mapping[str, Any]]) -> tuple[Table, list[Text]]:
    loads, times = (
        ("IN FLIGHT", "KV CACHE", "TOKENS/S"),
        ("TTFT p50/p95, ms", "TPOT p50/p95, ms"),
    )
    table = _table("TIER", "STATE", *loads, *times, "SLA MET", "FAILED")
    notes = []
    for tier in tiers:
        asked, met = tier["sla"]["asked"], tier["sla"]["met"]
        name, failed = (
            Text(tier["tier"], "bold"),
            Text(str(tier["errors"]), "red" if tier["errors"] else ""),
        )
        latency, speed = (
            (_pair(tier["ttft_ms"], 0), _pair(tier["tpot_ms"], 1)),
            f"{tier['tokens_per_s']:.0f}",
        )
        kept = f"{met / asked:.0%}" if asked else "-"
        said = [
            (
                tier["tier"],
                tier["detail"]
                or (Preparing(**tier["preparing"]).text if tier["preparing"] else ""),
            )
        ]
        table.add_row(
            name, _state(tier["state"]), "", "", speed, *latency, kept, failed
        )
        for replica in tier["replicas"]:
            usage, limit = (
                replica["kv_cache_usage"],
                replica["limit"] or tier["max_in_flight"],
            )
            paused = (
                ""
                if replica.get("breaker", "closed") == "closed"
                else "failed too often: few requests or none"
            )
            full = (usage or 0) >= NEARLY_FULL
            kv_cache = Text(
                "-" if usage is None else f"{usage:.0%}", style="red" if full else ""
            )
            speed = f"{replica.get('tokens_per_s') or 0:.0f}"
            said.append((replica["id"], replica["detail"] or paused))
            load = f"{replica['in_flight']}/{limit}", kv_cache, speed
            table.add_row(
                f"  {replica['id']}",
                _state(replica["state"]),
                *load,
                "",
                "",
                "",
                str(replica["failed"]),
            )
        notes += [
            Text(f"{who}: {printable(text.splitlines()[0])}", style="yellow")
            for who, text in said
            if text
        ]
    return table, notes


def _open(fleet: Mapping[str, Any]) -> Table:
    table = _table("OPEN", "TIER", "REPLICA", "STATE", "AGE, s", "TOKENS", "REQUEST")
    for request in sorted(fleet["in_flight"], key=lambda one: -one["age_ms"])[:10]:
        tier, tokens = (
            request["tier"] or request.get("overflow") or "-",
            _tokens(request),
        )
        where = (
            tier,
            request["replica"] or "-",
            request["state"],
            _number(request["age_ms"] / 1000),
        )
        table.add_row(
            request["class"].replace("_", " "), *where, tokens, request["request_id"]
        )
    return table


def _ended(records: Iterable[Mapping[str, Any]]) -> Table:
    table = _table(
        "ENDED",
        "OUTCOME",
        "TIER",
        "TTFT, ms",
        "TPOT, ms",
        "TOTAL, s",
        "TOKENS",
        "REQUEST",
    )
    table.add_column("REASON", ratio=1, no_wrap=True)
    for record in records:
        code = (record["error"] or "").replace("_", " ")
        table.add_row(
            time.strftime(
                "%H:%M:%S", time.localtime(record["at"] + record["duration_ms"] / 1000)
            ),
            Text(
                record["outcome"].replace("_", " "),
                style=OUTCOMES.get(record["outcome"], ""),
            ),
            record["served_by"] or record.get("overflow") or record["tier"] or "-",
            *(
                _number(record["ttft_ms"], 0),
                _number(record["tpot_ms"]),
                _number(record["duration_ms"] / 1000, 2),
            ),
            _tokens(record),
            record["request_id"][:8],
            printable(f"{code}: {record['reason']}" if code else record["reason"]),
        )
    return table


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, header_style="underline", expand=True)


def _state(state: str) -> Text:
    return Text(state, style=STATES.get(state, "yellow"))


def _tokens(request: Mapping[str, Any]) -> str:
    return f"{request['prompt_tokens']}+{request['output_tokens']}"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _pair(percentiles: Mapping[str, float] | None, digits: int) -> str:
    return (
        "-"
        if percentiles is None
        else " / ".join(_number(percentiles[name], digits) for name in ("p50", "p95"))
    )
