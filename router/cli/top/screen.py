"""The screen of ``qarr top``, as lines of text for a width and a height. Pure."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.text import Text

from router.cli.common import printable
from router.cli.top.state import Snapshot, ViewState
from router.telemetry.logs import shown_ms
from tiers.preparing import Preparing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

WIDE, WIDEST = 100, 130
STATES = {
    "ready": "green",
    "preparing": "yellow",
    "starting": "yellow",
    "warming": "yellow",
    "draining": "yellow",
    "unreachable": "bold red",
    "quarantined": "bold red",
    "failed": "bold red",
    "stopped": "dim",
    "waiting": "yellow",
    "absent": "dim",
}
OUTCOMES = {"ok": "green", "refused": "yellow", "error": "bold red", "client_gone": "dim"}
TIERS = {"fast": "cyan", "balanced": "blue", "precise": "magenta"}
ADDED_TIER = "yellow"  # of a tier that the settings add
PHASES = {"waiting": "yellow", "prefill": "cyan", "decode": "green"}
NEARLY_FULL, FILLING = 0.88, 0.6
OVER_BUDGET = 1.1  # times what is allowed: a price that falls between two assignments may leave it a little above
ONCE_LINES = 32
MINUTE_S, HOUR_S = 60, 3600
OWN_ONLY = "only this key's own requests are shown: a key made with --admin sees all"


@dataclass(frozen=True, slots=True)
class Column:
    """A column. If the line is too short, the columns of the highest ``rank`` are left out first.

    Attributes:
        width: In characters; 0: the rest of the line.
        right: Whether its cells are aligned to the right.
        least: Least width of a column that takes the rest of the line.
    """

    title: str
    width: int
    rank: int = 0
    right: bool = False
    least: int = 10


IN_FLIGHT = (  # after the first column, which has the number of requests as its title
    Column("TIER", 9),
    Column("REPLICA", 11, rank=3),
    Column("STATE", 8),
    Column("AGE", 7, right=True),
    Column("PROMPT", 6, rank=1, right=True),
    Column("OUT", 5, right=True),
    Column("TRACE", 8, rank=2),
    Column("REQUEST", 0, rank=4),
)
ENDED = (
    Column("ENDED", 8),
    Column("OUTCOME", 11),
    Column("CLASS", 12),
    Column("TIER", 9),
    Column("TTFT", 6, rank=1, right=True),
    Column("TPOT", 6, rank=3, right=True),
    Column("TOTAL", 6, rank=2, right=True),
    Column("TOKENS", 9, rank=5, right=True),
    Column("TRACE", 8, rank=4),
    Column("REASON", 0, least=30),
)
VERDICTS = (
    Column("VERDICTS", 11),
    Column("STATE", 11),
    Column("TTFT", 7, right=True),
    Column("TPOT", 7, right=True),
    Column("LOSS", 6, rank=1, right=True),
    Column("COST", 6, rank=2, right=True),
    Column("VERDICT", 0),
)


def screen(picture: Snapshot, view: ViewState, width: int, height: int) -> list[Text]:
    """Return the lines of the whole screen.

    Args:
        picture: What the router has sent.
        view: What the user has chosen to see.
        width: Width of the terminal, in characters.
        height: Height of the terminal, in lines.
    """
    shown = view.frozen or picture
    footer = _footer(view)
    if shown.fleet is None:
        said = f"no router answers; trying again: {picture.trouble}" if picture.trouble else "connecting ..."
        return _fitted([Text(" QARR", style="bold"), Text(), Text(f" {said}", style="yellow")], footer, width, height)
    lines = [*_head(shown, picture, view, width), Text()]
    if view.opened is not None:
        return _fitted([*lines, *_opened(view.opened, width)], footer, width, height)
    lines += [*_tiers(shown.fleet, view, width), Text()]
    return _fitted([*lines, *_requests(shown, view, width, height - len(lines) - 1)], footer, width, height)


def snapshot(picture: Snapshot, width: int, *, unicode: bool) -> list[Text]:
    """Return the lines that ``--once`` prints: the whole fleet and the last requests."""
    assert picture.fleet is not None
    view = ViewState(unicode=unicode)
    lines = [*_head(picture, picture, view, width), Text(), *_tiers(picture.fleet, view, width), Text()]
    return _cut([*lines, *_requests(picture, view, width, ONCE_LINES)], width)


def _fitted(lines: list[Text], footer: Text, width: int, height: int) -> list[Text]:
    """Return exactly ``height`` lines, none wider than ``width``."""
    body = lines[: max(height - 1, 0)]
    return _cut([*body, *(Text() for _ in range(height - 1 - len(body))), footer], width)


def _cut(lines: list[Text], width: int) -> list[Text]:
    for line in lines:
        line.truncate(width)
    return lines


def _head(shown: Snapshot, picture: Snapshot, view: ViewState, width: int) -> list[Text]:
    fleet = shown.fleet
    assert fleet is not None
    left = Text.assemble(
        (" QARR ", "bold"),
        (f"{fleet['version']}  ", "dim"),
        (str(fleet["model"]), "bold"),
        (f" on {fleet['machine']}", "dim"),
    )
    clock = time.strftime("%H:%M:%S", time.localtime(fleet["at"]))
    right = Text.assemble(("PAUSED ", "bold yellow") if view.frozen else "", (clock + " ", "dim"))
    left.truncate(max(width - len(right) - 1, 0), overflow="ellipsis" if view.unicode else "crop")
    first = Text.assemble(left, " " * max(width - len(left) - len(right), 0), right)
    own = [Text(f" {OWN_ONLY}", style="yellow")] if fleet.get("scope") == "own" else []
    return [first, _summary(fleet, width, view), *own, *_trouble(picture)]


def _summary(fleet: Mapping[str, Any], width: int, view: ViewState) -> Text:
    tiers = fleet["tiers"]
    ready = sum(tier["state"] == "ready" for tier in tiers)
    asked, met = (sum(tier["sla"][name] for tier in tiers) for name in ("asked", "met"))
    errors, totals = sum(tier["errors"] for tier in tiers), fleet["totals"]
    minute = MINUTE_S / fleet["window_s"]
    parts = [
        Text(f"{ready}/{len(tiers)} tiers ready", style="green" if ready == len(tiers) else "bold red"),
        Text(f"{fleet['in_flight_total']} in flight"),
        Text(f"{fleet['waiting']} waiting", style="yellow" if fleet["waiting"] else ""),
        Text(f"{sum(t['requests'] for t in tiers) * minute:.0f} req/min"),
        Text(f"{sum(t['tokens_per_s'] for t in tiers):.0f} tok/s"),
        Text(f"{errors} errors", style="bold red" if errors else ""),
        Text(f"SLA {met}/{asked}" if asked else "no SLAs", style=_sla_style(met, asked)),
        *_budget(fleet.get("loss_budget") or {}),
        Text(f"total {totals['requests']}, {totals['refused']} refused, {totals['errors']} errors", style="dim"),
    ]
    events = f"{totals['retries']} retries, {totals['continuations']} continued"
    parts.append(Text(events, style="dim"))
    between = " \u00b7 " if view.unicode else " | "
    line = Text(" ")
    for part in parts:
        gap = between if len(line) > 1 else ""
        if len(line) + len(gap) + len(part) > width:
            break
        line.append(gap, style="dim").append_text(part)
    return line


def _budget(budget: Mapping[str, Any]) -> list[Text]:
    """Return the parts on the loss budget: the running mean beside what is allowed, and the price of loss."""
    mean, allowed, price = (budget.get(name) for name in ("mean", "budget", "price"))
    parts = []
    if mean is not None and allowed is not None:
        style = "yellow" if mean > OVER_BUDGET * allowed else ""
        parts.append(Text(f"loss {mean:.1%} of {allowed:.1%} allowed", style=style))
    if price is not None:
        parts.append(Text(f"a lost token is worth {shown_ms(price * 1000)} of engine time", style="dim"))
    return parts


def _trouble(picture: Snapshot) -> list[Text]:
    if not picture.trouble:
        return []
    silent = shown_age((time.monotonic() - picture.silent_since) * 1000)
    return [Text(f" No answer for {silent}; trying again: {picture.trouble}", style="bold white on red")]


def _tiers(fleet: Mapping[str, Any], view: ViewState, width: int) -> list[Text]:
    bar, kv_bar = (14, 10) if width >= WIDEST else (8, 5) if width >= WIDE else (5, 0)
    columns = (
        Column("TIER", 11 if width >= WIDE else 9),
        Column("STATE", 11),
        Column("IN FLIGHT", bar + 8),
        Column("KV", kv_bar + 5, rank=1, right=not kv_bar),
        Column("TOK/S", 6, rank=3, right=True),
        Column("TTFT 50/95", 13 if width >= WIDE else 11, rank=2, right=True),
        Column("TPOT 50/95", 13 if width >= WIDE else 11, rank=5, right=True),
        Column("SLA", 5, rank=4, right=True),
        Column("ERR", 4, right=True),
        Column("REQ", 5, rank=6, right=True),
    )
    lines = [_header(columns, width)]
    for tier in fleet["tiers"]:
        replicas = tier["replicas"]
        lines.append(_line(columns, _tier_cells(tier, bar, kv_bar, view), width))
        if len(replicas) > 1:
            lines += [_line(columns, _replica_cells(replica, tier, bar, kv_bar, view), width) for replica in replicas]
        lines += [*_preparing(tier), *(note for replica in replicas for note in _notes(replica))]
    return lines


def _tier_cells(tier: Mapping[str, Any], bar: int, kv_bar: int, view: ViewState) -> list[Text]:
    replicas = tier["replicas"]
    ready = sum(r["state"] == "ready" for r in replicas)
    state = Text(tier["state"], style=STATES.get(tier["state"], ""))
    if len(replicas) > 1:
        state.append(f" {ready}/{len(replicas)}")
    usage = [r["kv_cache_usage"] for r in replicas if r["kv_cache_usage"] is not None]
    asked, met = tier["sla"]["asked"], tier["sla"]["met"]
    return [
        Text(tier["tier"], style=f"bold {TIERS.get(tier['tier'], ADDED_TIER)}"),
        state,
        _load(sum(map(_taken, replicas)), sum(_limit(r, tier) for r in replicas), bar, view),
        _usage(max(usage, default=None), kv_bar, view),
        Text(f"{tier['tokens_per_s']:.0f}"),
        Text(_pair(tier["ttft_ms"])),
        Text(_pair(tier["tpot_ms"])),
        Text(f"{met / asked:.0%}" if asked else "-", style=_sla_style(met, asked)),
        Text(str(tier["errors"]), style="bold red" if tier["errors"] else "dim"),
        Text(str(tier["requests"])),
    ]


def _replica_cells(
    replica: Mapping[str, Any], tier: Mapping[str, Any], bar: int, kv_bar: int, view: ViewState
) -> list[Text]:
    return [
        Text(f" {replica['id']}", style="dim"),
        Text(replica["state"], style=STATES.get(replica["state"], "")),
        _load(_taken(replica), _limit(replica, tier), bar, view),
        _usage(replica["kv_cache_usage"], kv_bar, view),
        Text(f"{replica.get('tokens_per_s') or 0:.0f}", style="dim"),
        *(Text() for _ in range(5)),
    ]


def _preparing(tier: Mapping[str, Any]) -> list[Text]:
    """Return the line that says what a tier needs before it serves for the first time, if anything."""
    if not tier.get("preparing"):
        return []
    said = tier["detail"] or Preparing(**tier["preparing"]).text
    return [Text(f"   {tier['tier']}: {printable(said.splitlines()[0])}", style=STATES.get(tier["state"], ""))]


def _notes(replica: Mapping[str, Any]) -> list[Text]:
    """Return lines on what is wrong with a replica."""
    notes = []
    if replica["detail"]:
        notes.append((replica["detail"].splitlines()[0], STATES.get(replica["state"], "")))
    if replica.get("breaker", "closed") != "closed":
        notes.append((f"breaker {replica['breaker']}: it failed too often, and gets few requests or none", "yellow"))
    if replica.get("kv_pressure"):
        notes.append(("its KV cache is nearly full: no more long prompts for now", "yellow"))
    return [Text(f"   {replica['id']}: {printable(text)}", style=style) for text, style in notes]


def _requests(picture: Snapshot, view: ViewState, width: int, height: int) -> list[Text]:
    """Return the two lists: requests in flight get at most half of the lines, unless the ended ones need fewer."""
    in_flight, records, selected = view.in_flight(picture), picture.records, view.selected
    assert picture.fleet is not None
    lines = max(height - 3, 2)
    upper = max(min(len(in_flight), lines // 2), min(len(in_flight), lines - len(records)))
    columns = (Column(f"IN FLIGHT {picture.fleet['in_flight_total']}", 13), *IN_FLIGHT)
    shown = _window(columns, in_flight, _open_cells, selected, upper, width)
    if not in_flight:
        shown.append(Text(" none", style="dim"))
    selected = None if selected is None else selected - len(in_flight)
    return [*shown, Text(), *_window(ENDED, records, _record_cells, selected, height - len(shown) - 2, width)]


def _window(
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, Any]],
    cells: Callable[[Mapping[str, Any]], list[Text]],
    selected: int | None,
    count: int,
    width: int,
) -> list[Text]:
    """Return a header and at most ``count`` rows, with the selected one if it is in this list."""
    first = 0 if selected is None else max(min(selected, len(rows) - 1) - count + 1, 0)
    shown = enumerate(rows[first : first + max(count, 0)], first)
    styled = (_line(columns, cells(row), width, "reverse" if number == selected else "") for number, row in shown)
    return [_header(columns, width), *styled]


def _open_cells(request: Mapping[str, Any]) -> list[Text]:
    tier = request["tier"] or request.get("overflow") or "-"
    return [
        Text(request["class"]),
        Text(tier, style=TIERS.get(tier, ADDED_TIER)),
        Text(request["replica"] or "-", style="dim"),
        Text(request["state"], style=PHASES.get(request["state"], "")),
        Text(shown_age(request["age_ms"])),
        Text(str(request["prompt_tokens"])),
        Text(str(request["output_tokens"])),
        Text(request["trace_id"][:8], style="dim"),
        Text(request["request_id"], style="dim"),
    ]


def _record_cells(record: Mapping[str, Any]) -> list[Text]:
    outcome, tier = record["outcome"], record["served_by"] or record.get("overflow") or record["tier"] or "-"
    late = outcome == "ok" and record["sla_met"] is False
    ended = time.localtime(record["at"] + record["duration_ms"] / 1000)
    reason = record["reason"]
    if record["error"]:
        reason = f"{record['error']}: {reason}"
    elif record["continued_on"]:
        reason = f"continued on {', '.join(record['continued_on'])}; {reason}"
    return [
        Text(time.strftime("%H:%M:%S", ended), style="dim"),
        Text("ok, late", style="yellow") if late else Text(outcome.replace("_", " "), style=OUTCOMES.get(outcome, "")),
        Text(record["class"]),
        Text(tier, style=TIERS.get(tier, ADDED_TIER)),
        Text(shown_ms(record["ttft_ms"])),
        Text(shown_ms(record["tpot_ms"])),
        Text(shown_ms(record["duration_ms"])),
        Text(f"{record['prompt_tokens']}+{record['output_tokens']}"),
        Text(record["trace_id"][:8], style="dim"),
        Text(printable(reason)),
    ]


def _opened(request: Mapping[str, Any], width: int) -> list[Text]:
    """Return all that is known of one request."""
    if "outcome" not in request:
        lines = [Text(" A request in flight: its verdicts are shown when it has ended", style="bold")]
        return [*lines, *(Text(f"   {name:14} {value}") for name, value in request.items())]
    lines = [
        Text.assemble(
            (f" {request['route']} ", "bold"),
            (request["outcome"].replace("_", " "), OUTCOMES.get(request["outcome"], "")),
        )
    ]
    facts = {
        "trace": f"{request['trace_id']}  (qarr logs --trace {request['trace_id'][:8]})",
        "request": request["request_id"],
        "class": f"{request['class']} (confidence {request['confidence']:.2f}), priority {request['priority']}",
        "decided": f"{request['tier'] or 'refused'}, by {request['basis']}",
        "reason": printable(request["reason"]),
        "error": request["error"],
        "served by": " ".join(
            request[name] for name in ("served_by", "replica", "precision", "checkpoint") if request[name]
        ),
        "overflow": request.get("overflow") or request.get("overflow_failure"),
        "times": f"queue {shown_ms(request['queue_ms'])}, first token {shown_ms(request['ttft_ms'])} "
        f"(predicted {shown_ms(request['predicted_ttft_ms'])}), a token {shown_ms(request['tpot_ms'])} "
        f"(predicted {shown_ms(request['predicted_tpot_ms'])}), all {shown_ms(request['duration_ms'])}",
        "tokens": f"{request['prompt_tokens']} in, {request['output_tokens']} out",
        "SLA": _sla_text(request),
        "not assured": ", ".join(request["degraded"]),
        "continued on": ", ".join(request["continued_on"]),
    }
    lines.extend(Text(f"   {name:13} {value}") for name, value in facts.items() if value)
    verdicts = (_line(VERDICTS, _verdict_cells(verdict), width) for verdict in request["tiers"])
    return [*lines, Text(), _header(VERDICTS, width), *verdicts]


def _verdict_cells(verdict: Mapping[str, Any]) -> list[Text]:
    loss, cost = verdict["expected_loss"], verdict["cost"]
    return [
        Text(verdict["tier"], style=TIERS.get(verdict["tier"], ADDED_TIER)),
        Text(verdict["state"], style=STATES.get(verdict["state"], "")),
        Text(shown_ms(verdict["predicted_ttft_ms"])),
        Text(shown_ms(verdict["predicted_tpot_ms"])),
        Text("-" if loss is None else f"{loss:.1%}"),
        Text("-" if cost is None else f"{cost:.2f}"),
        Text(printable(verdict["verdict"])),
    ]


def _sla_text(request: Mapping[str, Any]) -> str:
    asked = ", ".join(f"{name} {value:g}" for name, value in request["sla"].items() if value is not None)
    if not asked:
        return ""
    return f"{asked}: {'-' if request['sla_met'] is None else 'met' if request['sla_met'] else 'missed'}"


def _footer(view: ViewState) -> Text:
    up_down = "\u2191\u2193" if view.unicode else "j/k"
    keys = [("q", "quit"), ("p", "go on" if view.frozen else "pause"), ("s", f"sort: {view.sort}"), (up_down, "select")]
    keys.append(("Enter", "back" if view.opened is not None else "verdicts"))
    line = Text(" ")
    for key, meaning in keys:
        line.append(key, style="bold").append(f" {meaning}   ", style="dim")
    return line


def _header(columns: Sequence[Column], width: int) -> Text:
    return _line(columns, [Text(column.title) for column in columns], width, "bold reverse")


def _line(columns: Sequence[Column], cells: Sequence[Text], width: int, style: str = "") -> Text:
    """Return a line of exactly ``width`` characters; columns that do not fit are left out."""
    kept = set(columns)
    for rank in sorted({c.rank for c in columns}, reverse=True):
        if 1 + sum((c.width or c.least) + 1 for c in columns if c in kept) <= width:
            break
        if rank:
            kept -= {c for c in columns if c.rank == rank}
    rest = width - 1 - sum(c.width + 1 for c in columns if c in kept)
    line = Text(" ")
    for column, cell in zip(columns, cells, strict=True):
        if column not in kept:
            continue
        part = cell.copy()
        part.align("right" if column.right else "left", column.width or max(rest, 0))
        line.append_text(part).append(" ")
    line.align("left", width)
    line.stylize(style)
    return line


def _load(used: int, limit: int, bar: int, view: ViewState) -> Text:
    share = used / limit if limit else 0.0
    return _bar(share, bar, view).append(f" {used}/{limit}")


def _usage(share: float | None, bar: int, view: ViewState) -> Text:
    if share is None:
        return Text("-")
    line = _bar(share, bar, view) if bar else Text()
    return line.append(f"{share:4.0%}", style=_fullness(share))


def _bar(share: float, width: int, view: ViewState) -> Text:
    full, empty = ("\u2588", "\u2591") if view.unicode else ("#", ".")
    filled = min(max(round(share * width), 1), width) if share else 0
    return Text.assemble((full * filled, _fullness(share)), (empty * (width - filled), "dim"))


def _fullness(share: float) -> str:
    return "red" if share >= NEARLY_FULL else "yellow" if share >= FILLING else "green"


def _taken(replica: Mapping[str, Any]) -> int:
    """Return the slots taken; a request takes one for each of its choices."""
    return int(replica.get("places_taken", replica["in_flight"]))


def _limit(replica: Mapping[str, Any], tier: Mapping[str, Any]) -> int:
    return int(replica["limit"] if replica["limit"] is not None else tier["max_in_flight"])


def _pair(values: Mapping[str, float] | None) -> str:
    return "-" if values is None else f"{_short(values['p50'])}/{_short(values['p95'])}"


def _short(milliseconds: float) -> str:
    if milliseconds >= 1000:  # noqa: PLR2004
        return f"{milliseconds / 1000:.1f}s"
    return f"{milliseconds:.0f}ms" if milliseconds >= 10 else f"{milliseconds:.1f}ms"  # noqa: PLR2004


def _sla_style(met: int, asked: int) -> str:
    if not asked:
        return "dim"
    return "green" if met / asked >= 0.95 else "yellow" if met / asked >= 0.8 else "bold red"  # noqa: PLR2004


def shown_age(milliseconds: float) -> str:
    """Return an age as ``59.9s``, ``1m01s`` or ``1h01m``."""
    seconds = milliseconds / 1000
    if seconds < MINUTE_S:
        return f"{seconds:.1f}s"
    if seconds < HOUR_S:
        return f"{int(seconds // MINUTE_S)}m{int(seconds % MINUTE_S):02}s"
    return f"{int(seconds // HOUR_S)}h{int(seconds % HOUR_S // MINUTE_S):02}m"
