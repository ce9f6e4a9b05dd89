"""``qarr trace``: which trace an id means, and the lines of a list and of a waterfall."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.cli.top.screen import OWN_ONLY
from router.cli.trace import listed, waterfall
from tests.unit.cli.stub_router import qarr, stub_router
from tiers.errors import OperationError

ONE, TWO = "ab" * 16, "abcdef" + "0" * 26


def span(name: str, start_ms: float, duration_ms: float, parent: str | None = None, **more: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {"kind": "internal", "attributes": {}, "events": [], "error": None}
    return {
        "name": name,
        "span_id": name,
        "parent_id": parent,
        "start_ms": start_ms,
        "duration_ms": duration_ms,
        **plain,
        **more,
    }


def trace(*spans: dict[str, Any], trace_id: str = ONE, duration_ms: float = 100.0) -> dict[str, Any]:
    return {"trace_id": trace_id, "at": 0.0, "duration_ms": duration_ms, "spans": list(spans), "trace_url": None}


def record(trace_id: str, request_id: str) -> dict[str, Any]:
    return {
        "trace_id": trace_id, "request_id": request_id, "outcome": "ok", "served_by": "fast", "duration_ms": 12.0, "reason": "chat",
    }  # fmt: skip


ROOT = span("POST /generate", 0.0, 100.0, kind="server")
ANSWERS: dict[str, tuple[int, Any]] = {
    "GET /traces": (200, {"scope": "all", "traces": [{"trace_id": ONE}]}),
    "GET /requests?limit=1000": (200, {"requests": [record(ONE, "r-111111"), record(TWO, "r-222222")]}),
    f"GET /traces/{ONE}": (200, trace(ROOT)),
}


def found(given: str, answers: dict[str, tuple[int, Any]] = ANSWERS) -> Any:
    """Run the command on an id; return its JSON, or the error that it ends with."""
    with stub_router(**answers) as router:
        done = qarr("trace", given, "--json", "--url", router.url)
    return json.loads(done.stdout) if done.exit_code == 0 else done.exception


@pytest.mark.parametrize("given", [ONE, ONE[:31], ONE[:6], "r-111111", "r-1111"])
def test_ids_and_beginnings_of_ids(given: str) -> None:
    """Of a trace, kept or not, or of its request."""
    assert found(given)["trace_id"] == ONE


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("abc", "at least the first 6 characters"),
        ("ffffff", "no trace or request 'ffffff' is kept any more"),
        ("f" * 32, "is kept any more"),
        ("abcdef", f"the trace {TWO} is not kept any more, only the record of its request: ok on fast in 12.0ms; chat"),
        ("r-2222", f"the trace {TWO} is not kept any more"),
    ],
)
def test_ids_without_a_trace_say_what_is_known(given: str, said: str) -> None:
    error = found(given)
    assert isinstance(error, OperationError)
    assert said in str(error)
    assert OWN_ONLY not in str(error)


def test_beginnings_of_several_ids_are_not_guessed() -> None:
    records = [record(ONE, "same-id-1"), record(TWO, "same-id-2")]
    answers = {**ANSWERS, "GET /requests?limit=1000": (200, {"requests": records})}
    assert str(found("same-id", answers)) == "2 ids begin with 'same-id': give more of it"
    assert found("same-id-1", answers)["trace_id"] == ONE


def test_a_trace_dropped_meanwhile_is_not_a_crash() -> None:
    """One that was listed a moment ago and is asked for in vain, with no record of its request."""
    answers = {**ANSWERS, "GET /requests?limit=1000": (200, {"requests": []})}
    del answers[f"GET /traces/{ONE}"]
    assert "there is no /traces" in str(found(ONE[:8], answers))


def test_a_key_that_sees_its_own_requests_is_told_why_nothing_is_found() -> None:
    answers = {**ANSWERS, "GET /traces": (200, {"scope": "own", "traces": []})}
    assert OWN_ONLY in str(found("ffffff", answers))


def test_the_list_is_short_unless_all_are_wanted() -> None:
    """Thirty, and how many more there are."""
    one = {
        "trace_id": ONE,
        "at": 0.0,
        "duration_ms": 12_345.0,
        "spans": 9,
        "kept_for": "error",
        "name": "POST /generate",
    }
    short, full = ([line.plain for line in listed({"traces": [one] * 33}, everything=all_)] for all_ in (False, True))
    assert (len(short), len(full)) == (32, 34)
    assert short[-1] == "... and 3 more (--all)"
    assert full[-1].split()[1:] == ["12.3s", "9", "error", ONE, "POST", "/generate"]
    assert len(list(listed({"traces": []}, everything=False))) == 1


def lines(shown: dict[str, Any], width: int = 120, *, everything: bool = False) -> list[str]:
    return [line.plain for line in waterfall(shown, width, everything=everything)]


def test_spans_are_drawn_where_they_are_in_time() -> None:
    """The bar of the second half begins in the middle; a span of no length still has a mark."""
    shown = lines(trace(ROOT, span("late", 50.0, 50.0, "POST /generate"), span("instant", 0.0, 0.0, "POST /generate")))
    bars = {
        line.split()[0].strip("\u2514\u251c ") or line.split()[1]: line
        for line in shown
        if "\u2588" in line or "\u258f" in line
    }
    whole, late, instant = bars["POST"], bars["late"], bars["instant"]
    assert whole.count("\u2588") == pytest.approx(2 * late.count("\u2588"), abs=1)
    assert late.index("\u2588") - whole.index("\u2588") == pytest.approx(whole.count("\u2588") / 2, abs=1)
    assert instant.count("\u258f") == 1


def test_children_stand_below_their_parents_by_start() -> None:
    """The last one closes the branch; children of a child are set further in."""
    shown = lines(
        trace(
            ROOT,
            span("b", 20.0, 1.0, "POST /generate"),
            span("a", 10.0, 5.0, "POST /generate"),
            span("c", 11.0, 1.0, "a"),
        )
    )
    names = [line[:12].rstrip() for line in shown if line.rstrip().endswith("ms")]
    assert names == ["POST /genera", "\u251c a", "\u2502 \u2514 c", "\u2514 b"]


def test_the_summary_has_what_is_known() -> None:
    """Decision, reason and figures of the whole request; zeros and what is missing are left out."""
    attributes = {
        "qarr.class": "chat", "qarr.confidence": 0.934, "qarr.tier": "fast", "qarr.basis": "table", "qarr.reason": "lowest\x1b[2J",
        "qarr.queue_ms": 0, "qarr.ttft_ms": 210.4, "gen_ai.usage.input_tokens": 31, "qarr.outcome": "client_gone",
    }  # fmt: skip
    shown = lines(trace({**ROOT, "attributes": attributes}))
    assert shown[0].endswith("client gone")
    assert shown[1] == "  chat (confidence 0.93) -> fast, by table"
    assert shown[2] == "  lowest [2J"
    assert shown[3] == "  first token 210ms, tokens in 31"
    assert lines(trace({**ROOT, "error": "Broken"}))[0].endswith("error")


def test_attributes_are_shown_where_all_are_wanted() -> None:
    """And a stack trace never among an event's facts."""
    event = {"name": "exception", "at_ms": 5.0, "attributes": {"exception.type": "E", "exception.stacktrace": "long"}}
    shown = trace({**ROOT, "attributes": {"http.route": "/generate"}, "events": [event]})
    assert "    http.route = /generate" in "\n".join(lines(shown, everything=True))
    assert "http.route" not in "\n".join(lines(shown))
    assert any(line.endswith("exception at 5.0ms  exception.type=E") for line in lines(shown))


def test_every_tiers_verdict_is_a_row() -> None:
    """Only of tiers that the decision knew; what was not predicted is a dash."""
    attributes = {
        "qarr.fast.verdict": "chosen", "qarr.fast.state": "ready", "qarr.fast.predicted_ttft_ms": 210.0, "qarr.fast.cost": 1.5,
        "qarr.fast.expected_loss": 0.123, "qarr.precise.verdict": "not ready", "qarr.precise.state": "failed",
    }  # fmt: skip
    head, fast, precise = lines(trace(ROOT, span("decide", 1.0, 1.0, "POST /generate", attributes=attributes)))[-3:]
    assert head.split() == ["TIER", "STATE", "TTFT", "TPOT", "LOSS", "COST", "VERDICT"]
    assert fast.split() == ["fast", "ready", "210ms", "-", "12.3%", "1.500", "chosen"]
    assert precise.split() == ["precise", "failed", "-", "-", "-", "-", "not", "ready"]
