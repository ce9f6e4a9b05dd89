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

from router.cli.client import (
    KeyOption,
    RouterApiClient,
    UrlOption,
    why_no_router,
    why_unauthorized,
)
from router.cli.common import ConfigOption, output, printable
from router.policy.losses import of_100
from tiers.errors import OperationError
from tiers.preparing import Preparing

SILENT_S = 5.0  # the router sends its fleet every second
RECONNECT_S = 1.0
PIPED_WIDTH = 160
PIPED_HEIGHT = 30
KEPT_RECORDS = 100
OPEN_SHOWN = 10  # at most so many open requests are shown
# Lines of the screen besides the rows of its tables: heads, the summary, and empty lines.
FIXED_LINES = 7
# States that are not listed are yellow.
STATE_STYLES = {
    "failed": "bold red",
    "quarantined": "bold red",
    "unreachable": "bold red",
    "ready": "green",
    "absent": "",
    "stopped": "",
}
OUTCOME_STYLES = {"ok": "green", "refused": "yellow", "error": "bold red"}
NEARLY_FULL = 0.88  # share of the KV cache
CONNECTING = "connecting ..."
Records = deque[dict[str, Any]]
OnceOption = Annotated[
    bool, typer.Option("--once", help="Print how it is now, as text, and end.")
]


def top(
    once: OnceOption = False,
    url: UrlOption = "",
    key: KeyOption = "",
    config: ConfigOption = None,
) -> None:
    """Show live tiers and requests until Ctrl-C."""
    router = RouterApiClient(url, key, config)
    records: Records = deque(maxlen=KEPT_RECORDS)
    if once or not sys.stdout.isatty():
        _print_once(router, records)
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        _show_live(router, records)


def _print_once(router: RouterApiClient, records: Records) -> None:
    """Print the fleet and the last requests as text."""
    try:
        fleets = (fleet for fleet in _fleets(router, records) if fleet is not None)
        # The first fleet has no tokens per second yet.
        next(fleets, None)
        fleet = next(fleets, None)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise router.no_answer(error) from error
    if fleet is None:
        raise OperationError(f"{router.url} is shutting down")
    output(PIPED_WIDTH).print(screen(fleet, records, PIPED_HEIGHT))


def _show_live(router: RouterApiClient, records: Records) -> None:
    """Show the fleet in the terminal for ever. If the connection ends, the last fleet stays, and it is tried again."""
    console = Console(highlight=False, markup=False)
    last_fleet: dict[str, Any] | None = None
    with suppress(httpx.InvalidURL):
        # It prints which router it is, which cannot be seen once the screen is taken.
        router.http  # noqa: B018
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                for fleet in _fleets(router, records):
                    last_fleet = fleet or last_fleet
                    live.update(
                        screen(last_fleet, records, console.height), refresh=True
                    )
                trouble = f"{router.url} ended the connection; trying again"
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                trouble = f"no answer from {router.url} ({type(error).__name__}); trying again"
            live.update(
                screen(last_fleet, records, console.height, trouble=trouble),
                refresh=True,
            )
            time.sleep(RECONNECT_S)


def _fleets(
    router: RouterApiClient, records: Records
) -> Iterator[dict[str, Any] | None]:
    """Yield the fleet with each event of ``GET /live``, None with each ended request, which is added to the records."""
    with router.http.stream("GET", "/live", timeout=SILENT_S) as response:
        _check_answer(router, response)
        # After a reconnection the router sends its last records again.
        known_ids = {record["request_id"] for record in records}
        for event, data in _events(response.iter_lines()):
            value = json.loads(data)
            if event == "fleet":
                yield value
            elif value["request_id"] not in known_ids:
                records.appendleft(value)
                yield None


def _check_answer(router: RouterApiClient, response: httpx.Response) -> None:
    """Raise an error if what answers gives no live events."""
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise OperationError(why_unauthorized(response))
    if response.status_code == httpx.codes.NOT_FOUND:
        no_live = (
            f"{router.url} has no /live: is this a router, and as new as this command?"
        )
        raise OperationError(
            why_no_router(router.url, router.http.get, unless_engine=no_live)
        )
    response.raise_for_status()


def _events(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the data of each server-sent event."""
    event = ""
    for line in lines:
        name, _, value = line.partition(": ")
        if name == "event":
            event = value
        elif name == "data":
            yield event, value


def screen(
    fleet: Mapping[str, Any] | None,
    records: Iterable[Mapping[str, Any]],
    height: int,
    *,
    trouble: str = "",
) -> RenderableType:
    """Return what is shown: a summary, tiers with their replicas, open requests, the last ended ones."""
    trouble_lines: list[RenderableType] = []
    if trouble:
        trouble_lines.append(Text(trouble, style="bold white on red"))
    if fleet is None:
        return Group(*(trouble_lines or [Text(CONNECTING, style="yellow")]))
    tiers, notes = _tiers(fleet["tiers"])
    used_lines = (
        FIXED_LINES
        + len(trouble_lines)
        + len(notes)
        + tiers.row_count
        + min(len(fleet["in_flight"]), OPEN_SHOWN)
    )
    ended_shown = max(height - used_lines, 1)
    return Group(
        _summary(fleet),
        *trouble_lines,
        Text(),
        tiers,
        *notes,
        Text(),
        _open_requests(fleet["in_flight"]),
        Text(),
        _ended_requests(list(records)[:ended_shown]),
    )


def _summary(fleet: Mapping[str, Any]) -> Text:
    """Return the first line of the screen."""
    tiers = fleet["tiers"]
    totals = fleet["totals"]
    ready_count = sum(tier["state"] == "ready" for tier in tiers)
    ready_style = "green" if ready_count == len(tiers) else "bold red"
    waiting_style = "yellow" if fleet["waiting"] else ""
    requests_per_minute = sum(tier["requests"] for tier in tiers) * (
        60 / fleet["window_s"]
    )
    parts = [
        Text(f"QARR {fleet['version']} ", style="bold"),
        Text(f"{fleet['model']} on {fleet['machine']}"),
        Text(f"{ready_count}/{len(tiers)} tiers ready", style=ready_style),
        Text(f"{fleet['in_flight_total']} in flight"),
        Text(f"{fleet['waiting']} waiting", style=waiting_style),
        Text(f"{requests_per_minute:.0f} requests/min"),
        Text(
            f"in all {totals['requests']}, {totals['errors']} failed, {totals['refused']} refused"
        ),
    ]
    parts += _loss_budget_parts(fleet.get("loss_budget") or {})
    if fleet.get("scope") == "own":
        scope = (
            "only this key's own requests are shown: a key made with --admin sees all"
        )
        parts.append(Text(scope, style="yellow"))
    return Text(" · ").join(parts)


def _loss_budget_parts(budget: Mapping[str, Any]) -> Iterator[Text]:
    """Yield what the loss budget saves, and how far it is used."""
    if budget.get("saved") is not None:
        yield Text(f"{budget['saved']:.0%} engine time saved")
    expected_loss = budget.get("mean")
    allowed_loss = budget.get("budget")
    if expected_loss is None or allowed_loss is None:
        return
    style = "yellow" if expected_loss > allowed_loss else ""
    yield Text(
        f"{of_100(expected_loss)} answers expected worse, {of_100(allowed_loss)} allowed",
        style=style,
    )


def _tiers(tiers: Iterable[Mapping[str, Any]]) -> tuple[Table, list[Text]]:
    """Return a table of tiers with their replicas, and lines about what is wrong with them."""
    table = _table(
        "TIER",
        "STATE",
        "IN FLIGHT",
        "KV CACHE",
        "TOKENS/S",
        "TTFT p50/p95, ms",
        "TTFA p50/p95, ms",
        "TPOT p50/p95, ms",
        "SLA MET",
        "FAILED",
    )
    notes: list[Text] = []
    for tier in tiers:
        _add_tier_row(table, tier)
        notes += _note(tier["tier"], _tier_detail(tier))
        for replica in tier["replicas"]:
            _add_replica_row(table, replica, max_in_flight=tier["max_in_flight"])
            notes += _note(replica["id"], _replica_detail(replica))
    return table, notes


def _add_tier_row(table: Table, tier: Mapping[str, Any]) -> None:
    asked = tier["sla"]["asked"]
    met_share = f"{tier['sla']['met'] / asked:.0%}" if asked else "-"
    failed_style = "red" if tier["errors"] else ""
    table.add_row(
        Text(tier["tier"], "bold"),
        _state(tier["state"]),
        "",
        "",
        f"{tier['tokens_per_s']:.0f}",
        _percentiles(tier["ttft_ms"], 0),
        _percentiles(tier.get("ttfa_ms"), 0),
        _percentiles(tier["tpot_ms"], 1),
        met_share,
        Text(str(tier["errors"]), failed_style),
    )


def _add_replica_row(
    table: Table, replica: Mapping[str, Any], *, max_in_flight: int
) -> None:
    limit = replica["limit"] or max_in_flight
    table.add_row(
        f"  {replica['id']}",
        _state(replica["state"]),
        f"{replica['in_flight']}/{limit}",
        _kv_cache(replica["kv_cache_usage"]),
        f"{replica.get('tokens_per_s') or 0:.0f}",
        "",
        "",
        "",
        "",
        str(replica["failed"]),
    )


def _kv_cache(usage: float | None) -> Text:
    if usage is None:
        return Text("-")
    style = "red" if usage >= NEARLY_FULL else ""
    return Text(f"{usage:.0%}", style=style)


def _note(name: str, detail: str) -> Iterator[Text]:
    """Yield a line with what is to be said of a tier or replica, if anything is."""
    if detail:
        yield Text(f"{name}: {printable(detail.splitlines()[0])}", style="yellow")


def _tier_detail(tier: Mapping[str, Any]) -> str:
    """Return what is wrong with a tier, or what it needs before it serves for the first time."""
    if tier["detail"]:
        return str(tier["detail"])
    if tier["preparing"]:
        return Preparing(**tier["preparing"]).text
    return ""


def _replica_detail(replica: Mapping[str, Any]) -> str:
    """Return what is wrong with a replica."""
    if replica["detail"]:
        return str(replica["detail"])
    if replica.get("breaker", "closed") != "closed":
        return "failed too often: few requests or none"
    return ""


def _open_requests(requests: Iterable[Mapping[str, Any]]) -> Table:
    """Return a table of the oldest open requests."""
    table = _table("OPEN", "TIER", "REPLICA", "STATE", "AGE, s", "TOKENS", "REQUEST")
    oldest_first = sorted(requests, key=lambda request: -request["age_ms"])
    for request in oldest_first[:OPEN_SHOWN]:
        table.add_row(
            request["class"].replace("_", " "),
            request["tier"] or request.get("overflow") or "-",
            request["replica"] or "-",
            "thinking" if request.get("is_thinking") else request["state"],
            _number(request["age_ms"] / 1000),
            _tokens(request),
            request["request_id"],
        )
    return table


def _ended_requests(records: Iterable[Mapping[str, Any]]) -> Table:
    table = _table(
        "ENDED",
        "OUTCOME",
        "TIER",
        "TTFT, ms",
        "TTFA, ms",
        "TPOT, ms",
        "TOTAL, s",
        "TOKENS",
        "REQUEST",
    )
    table.add_column("REASON", ratio=1, no_wrap=True)
    for record in records:
        outcome = record["outcome"]
        duration_s = record["duration_ms"] / 1000
        ended_at = time.localtime(record["at"] + duration_s)
        table.add_row(
            time.strftime("%H:%M:%S", ended_at),
            Text(outcome.replace("_", " "), style=OUTCOME_STYLES.get(outcome, "")),
            record["served_by"] or record.get("overflow") or record["tier"] or "-",
            _number(record["ttft_ms"], 0),
            _number(record.get("ttfa_ms"), 0),
            _number(record["tpot_ms"]),
            _number(duration_s, 2),
            _tokens(record),
            record["request_id"][:8],
            _reason(record),
        )
    return table


def _reason(record: Mapping[str, Any]) -> str:
    """Return why a request failed, or else why its tier was chosen."""
    if not record["error"]:
        return printable(record["reason"])
    problem = record["error"].replace("_", " ")
    return printable(f"{problem}: {record['reason']}")


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, header_style="underline", expand=True)


def _state(state: str) -> Text:
    return Text(state, style=STATE_STYLES.get(state, "yellow"))


def _tokens(request: Mapping[str, Any]) -> str:
    """Return the tokens of prompt and output, and how many of the output are reasoning, if any."""
    tokens = f"{request['prompt_tokens']}+{request['output_tokens']}"
    reasoning_tokens = request.get("reasoning_tokens")
    if reasoning_tokens:
        tokens += f" ({reasoning_tokens} thought)"
    return tokens


def _number(value: float | None, digits: int = 1) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}"


def _percentiles(values: Mapping[str, float] | None, digits: int) -> str:
    """Return a median and a 95th percentile."""
    if values is None:
        return "-"
    return f"{_number(values['p50'], digits)} / {_number(values['p95'], digits)}"
