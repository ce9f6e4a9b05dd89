"""``qarr trace``: one request's trace as a waterfall, or the list of the router's recent traces."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from router.cli.client import URL, KeyOption, NotFound, RouterApiClient, UrlOption
from router.cli.common import SHORTEST_ID, output, printable
from router.cli.top.screen import ADDED_TIER, OUTCOMES, OWN_ONLY, TIERS
from router.telemetry.logs import shown_ms
from tiers.errors import OperationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PIPED_WIDTH = 120
LISTED = 30
TRACE_DIGITS = 32
MOST_REQUESTS = 1000
NAME_WIDTH = 34
TIME_WIDTH = 10
SHADES = {"server": "green", "client": "cyan", "internal": "blue"}
WORTH = {"error": "bold red", "sla_miss": "yellow", "recent": "dim"}
# Attributes of the server span about the whole request, in the order shown.
WHOLE = {
    "qarr.served.replica": "served by",
    "qarr.queue_ms": "queue",
    "qarr.overhead_ms": "overhead",
    "qarr.ttft_ms": "first token",
    "qarr.tpot_ms": "a token",
    "gen_ai.usage.input_tokens": "tokens in",
    "gen_ai.usage.output_tokens": "tokens out",
    "qarr.attempts.failed": "failed attempts",
    "http.response.status_code": "HTTP",
    "error.type": "error",
}


def trace(
    trace_id: Annotated[
        str,
        typer.Argument(
            metavar="[ID]",
            help="A trace or request id, or its beginning; by default the last traces are listed.",
            show_default=False,
        ),
    ] = "",
    url: UrlOption = URL,
    key: KeyOption = "",
    everything: Annotated[bool, typer.Option("--all", "-a", help="All attributes of every span; all traces.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the router's JSON.")] = False,
) -> None:
    """Show where a request's time went, and how its tier was chosen; without an id, list the last traces."""
    router = RouterApiClient(url, key)
    found = _find(router, trace_id) if trace_id else router.ask("/traces")
    if as_json:
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
        return
    console = output(PIPED_WIDTH)
    lines = waterfall(found, console.width, everything=everything) if trace_id else listed(found, everything=everything)
    for line in lines:
        line.rstrip()
        console.print(line, soft_wrap=True)


def _find(router: RouterApiClient, given: str) -> dict[str, Any]:
    """Return the trace of a trace or request id, or of the beginning of one.

    Raises:
        OperationError: There is none, or more than one.
    """
    if len(given) == TRACE_DIGITS:
        with suppress(NotFound):  # a request's id may look the same
            return router.ask(f"/traces/{given}")
    if len(given) < SHORTEST_ID:
        raise OperationError(f"{given!r}: give at least the first {SHORTEST_ID} characters of the id")
    answered = router.ask("/traces")
    kept = [t["trace_id"] for t in answered["traces"]]
    records = router.ask(f"/requests?limit={MOST_REQUESTS}")["requests"]
    meant = {t for t in kept if t.startswith(given)}
    meant |= {r["trace_id"] for r in records if any(r[id_].startswith(given) for id_ in ("request_id", "trace_id"))}
    if len(meant) > 1:
        raise OperationError(f"{len(meant)} ids begin with {given!r}: give more of it")
    if not meant:
        raise OperationError(
            f"no trace or request {given!r} is kept any more (telemetry.recent_traces); 'qarr trace' lists those that are"
            + (f"; {OWN_ONLY}" if answered.get("scope") == "own" else "")
        )
    (one,) = meant
    try:
        return router.ask(f"/traces/{one}")
    except NotFound as error:
        record = next((r for r in records if r["trace_id"] == one), None)
        if record is None:
            raise
        raise OperationError(
            f"the trace {one} is not kept any more, only the record of its request: {record['outcome']} on "
            f"{record['served_by'] or 'no tier'} in {shown_ms(record['duration_ms'])}; {record['reason']}"
        ) from error


def listed(found: Mapping[str, Any], *, everything: bool) -> Iterator[Text]:
    """Yield the lines of a list of traces.

    Args:
        found: As ``GET /traces`` gives it.
        everything: List all of them.
    """
    traces = found["traces"]
    if found.get("scope") == "own":
        yield Text(OWN_ONLY, style="yellow")
    yield Text(f"{'AT':8} {'TOOK':>8} {'SPANS':>5} {'KEPT FOR':9} {'TRACE':32} NAME", style="bold")
    for one in traces if everything else traces[:LISTED]:
        clock = time.strftime("%H:%M:%S", time.localtime(one["at"]))
        yield Text.assemble(
            (f"{clock} ", "dim"),
            f"{shown_ms(one['duration_ms']):>8} {one['spans']:5} ",
            (f"{one['kept_for']:9} ", WORTH.get(one["kept_for"], "")),
            f"{one['trace_id']} {one['name']}",
        )
    if len(traces) > LISTED and not everything:
        yield Text(f"... and {len(traces) - LISTED} more (--all)", style="dim")


def waterfall(found: Mapping[str, Any], width: int, *, everything: bool = False) -> Iterator[Text]:
    """Yield a trace's lines.

    Args:
        found: As ``GET /traces/{id}`` gives it.
        width: Width of the terminal, in characters.
        everything: With all attributes of every span.
    """
    spans = found["spans"]
    root = next((s for s in spans if s["kind"] == "server"), spans[0])
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["at"]))
    outcome = str(root["attributes"].get("qarr.outcome", "error" if root["error"] else ""))
    yield Text.assemble(
        ("trace ", "dim"),
        (found["trace_id"], "bold"),
        f"  {clock}  ",
        (outcome.replace("_", " "), OUTCOMES.get(outcome, "")),
    )
    if found.get("trace_url"):
        yield Text(f"  {found['trace_url']}", style="dim")
    yield from _summary(root)
    yield Text()
    whole_ms = max([found["duration_ms"], *(s["start_ms"] + s["duration_ms"] for s in spans)], default=1) or 1
    for span, lead, below in _tree(spans):
        yield from _span_lines(span, lead, below, whole_ms, width, everything=everything)
    decided = next((s for s in spans if _decided_tiers(s["attributes"])), None)
    if decided is not None:
        yield Text()
        yield from _verdicts(decided["attributes"], width)


def _summary(root: Mapping[str, Any]) -> Iterator[Text]:
    attributes = root["attributes"]
    if "qarr.class" in attributes:
        tier, basis = str(attributes.get("qarr.tier", "refused")), str(attributes.get("qarr.basis", ""))
        yield Text.assemble(
            f"  {attributes['qarr.class']} (confidence {attributes['qarr.confidence']:.2f}) -> ",
            (tier, f"bold {TIERS.get(tier, 'red')}"),
            f", by {basis}" if basis not in {"", tier} else "",
        )
        yield Text(f"  {printable(attributes['qarr.reason'])}")
    known = ((name, shown, attributes.get(name)) for name, shown in WHOLE.items())
    parts = [f"{shown} {shown_ms(v) if name.endswith('_ms') else v}" for name, shown, v in known if v]
    if parts:
        yield Text("  " + ", ".join(parts), style="dim")


def _tree(spans: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], str, str]]:
    """Return each span below its parent, with the lines drawn before its name and before the lines below it."""
    known = {s["span_id"] for s in spans}
    below: dict[str | None, list[Mapping[str, Any]]] = {}
    for span in sorted(spans, key=lambda s: s["start_ms"]):
        parent = span["parent_id"] if span["parent_id"] in known else None
        below.setdefault(parent, []).append(span)
    found: list[tuple[Mapping[str, Any], str, str]] = []

    def add(span: Mapping[str, Any], lead: str, indent: str) -> None:
        children = below.get(span["span_id"], [])
        found.append((span, lead, indent + ("\u2502 " if children else "  ")))
        for number, child in enumerate(children, 1):
            last = number == len(children)
            add(child, indent + ("\u2514 " if last else "\u251c "), indent + ("  " if last else "\u2502 "))

    for span in below.get(None, []):
        add(span, "", "")
    return found


def _span_lines(
    span: Mapping[str, Any], lead: str, below: str, whole_ms: float, width: int, *, everything: bool
) -> Iterator[Text]:
    cells = max(width - NAME_WIDTH - TIME_WIDTH - 3, 10)
    name = Text.assemble((lead, "dim"), (printable(span["name"]), "bold" if span["kind"] != "internal" else ""))
    if replica := span["attributes"].get("qarr.replica"):
        name.append(f" {replica}", style=TIERS.get(str(replica).rpartition("-")[0], ""))
    name.truncate(NAME_WIDTH, overflow="ellipsis", pad=True)
    begin = min(int(span["start_ms"] / whole_ms * cells), cells - 1)
    end = min(max(round((span["start_ms"] + span["duration_ms"]) / whole_ms * cells), begin + 1), cells)
    shade = "red" if span["error"] else SHADES.get(span["kind"], "blue")
    bar = " " * begin + ("\u2588" if end - begin > 1 else "\u258f") * (end - begin) + " " * (cells - end)
    marks = {min(int(e["at_ms"] / whole_ms * cells), cells - 1) for e in span["events"]}
    drawn = Text()
    for index, block in enumerate(bar):
        drawn.append("\u25c6" if index in marks else block, style="bold yellow" if index in marks else shade)
    yield Text.assemble(name, " ", drawn, f" {shown_ms(span['duration_ms']):>{TIME_WIDTH}}")
    if span["error"]:
        yield Text.assemble((below, "dim"), (f"  error: {printable(str(span['error']))}", "bold red"))
    for event in span["events"]:
        facts = ", ".join(
            f"{k.removeprefix('qarr.')}={v}" for k, v in event["attributes"].items() if k != "exception.stacktrace"
        )
        text = f"  \u25c6 {event['name'].removeprefix('qarr.').replace('_', ' ')} at {shown_ms(event['at_ms'])}"
        yield Text.assemble((below, "dim"), (text, "yellow"), (f"  {printable(facts)}" if facts else "", "dim"))
    if everything:
        for key, value in span["attributes"].items():
            yield Text.assemble((below, "dim"), (f"    {key} = {printable(str(value))}", "dim"))


def _decided_tiers(attributes: Mapping[str, Any]) -> list[str]:
    """Return the tiers that a span has verdicts about, by rising precision."""
    return [key.split(".")[1] for key in attributes if key.startswith("qarr.") and key.endswith(".verdict")]


def _verdicts(attributes: Mapping[str, Any], width: int) -> Iterator[Text]:
    yield Text(f"  {'TIER':9} {'STATE':11} {'TTFT':>8} {'TPOT':>8} {'LOSS':>6} {'COST':>7}  VERDICT", style="bold")
    for tier in _decided_tiers(attributes):
        of = {k.removeprefix(f"qarr.{tier}."): v for k, v in attributes.items() if k.startswith(f"qarr.{tier}.")}
        loss, cost = of.get("expected_loss"), of.get("cost")
        line = Text.assemble(
            (f"  {tier:9} ", TIERS.get(tier, ADDED_TIER)),
            f"{of.get('state', '-'):11} {shown_ms(of.get('predicted_ttft_ms')):>8} ",
            f"{shown_ms(of.get('predicted_tpot_ms')):>8} ",
            f"{'-' if loss is None else f'{loss:.1%}':>6} {'-' if cost is None else f'{cost:.3f}':>7}  ",
            (printable(str(of.get("verdict", ""))), "bold" if of.get("verdict") == "chosen" else ""),
        )
        line.truncate(max(width, 60), overflow="ellipsis")
        yield line
