"""The state of ``qarr top``: events, keys and the order of requests."""

from __future__ import annotations

from typing import Any

import pytest

from router.cli.top.state import KEPT_RECORDS, SORTS, Snapshot, ViewState


def request(name: str, **more: Any) -> dict[str, Any]:
    plain = {"age_ms": 10.0, "prompt_tokens": 5, "output_tokens": 1, "tier": "fast", "class": "chat"}
    return {"request_id": name, **plain, **more}


def picture(*in_flight: dict[str, Any], records: int = 0) -> Snapshot:
    """Return a snapshot with requests in flight and ended ones, the newest first."""
    shown = Snapshot().apply("fleet", {"in_flight": list(in_flight), "in_flight_total": len(in_flight)})
    for number in range(records):
        shown = shown.apply("request", {"request_id": f"ended-{number}", "at": float(number)})
    return shown


def pressed(view: ViewState, shown: Snapshot, *keys: str) -> ViewState:
    for key in keys:
        view = view.key(key, shown)
    return view


def test_a_picture_ends_the_trouble() -> None:
    """Other events do not; unknown ones change nothing."""
    silent = Snapshot(trouble="gone", silent_since=3.0)
    assert silent.apply("fleet", {"in_flight": []}).trouble == ""
    assert silent.apply("request", {"request_id": "a", "at": 1.0}).trouble == "gone"
    assert silent.apply("news", {}) is silent


def test_an_ended_request_leaves_those_in_flight() -> None:
    """The count goes with it; a request that the picture does not have changes nothing there."""
    shown = picture(request("a"), request("b"))
    after = shown.apply("request", {"request_id": "a", "at": 1.0})
    assert after.fleet is not None
    assert ([r["request_id"] for r in after.fleet["in_flight"]], after.fleet["in_flight_total"]) == (["b"], 1)
    assert after.apply("request", {"request_id": "z", "at": 1.0}).fleet is after.fleet
    assert Snapshot().apply("request", {"request_id": "a", "at": 1.0}).fleet is None


def test_the_newest_records_are_kept() -> None:
    """An id that comes again later is another request."""
    shown = picture(records=KEPT_RECORDS + 5)
    assert len(shown.records) == KEPT_RECORDS
    assert shown.records[0]["request_id"] == f"ended-{KEPT_RECORDS + 4}"
    assert shown.apply("request", dict(shown.records[10])) is shown
    assert shown.apply("request", {**shown.records[10], "at": -1.0}).records[0]["at"] == -1.0


@pytest.mark.parametrize(
    ("sort", "order"), [("age", ["old", "code", "new"]), ("tokens", ["new", "old", "code"]), ("tier", ["old", "new", "code"]), ("class", ["old", "new", "code"])]
)  # fmt: skip
def test_orders(sort: Any, order: list[str]) -> None:
    """By age the oldest first, by tokens the most; a request without a tier can be sorted too."""
    shown = picture(
        request("new", age_ms=1.0, output_tokens=90, tier="balanced"),
        request("old", age_ms=900.0, output_tokens=3, tier="balanced"),
        request("code", age_ms=20.0, tier=None if sort == "age" else "fast", **{"class": "code"}),
    )
    assert [r["request_id"] for r in ViewState(sort=sort).in_flight(shown)] == order


def test_s_goes_through_all_orders_and_begins_again() -> None:
    view, seen = ViewState(), []
    for _ in SORTS:
        seen.append(view.sort)
        view = view.key("s", Snapshot())
    assert (seen, view.sort) == (list(SORTS), "age")


def test_arrows_stop_at_the_ends() -> None:
    """Of both lists together; the first press in either direction selects the first line."""
    shown = picture(request("a"), records=2)
    assert pressed(ViewState(), shown, "up").selected == 0
    assert pressed(ViewState(), shown, *["down"] * 9).selected == 2
    assert pressed(ViewState(), shown, "down", "down", "up", "up", "up").selected == 0


def test_enter_opens_what_is_selected_and_closes_it() -> None:
    """While it is open, arrows move nothing; Escape closes first and then ends the selection."""
    shown = picture(request("a"), records=2)
    view = pressed(ViewState(), shown, "down", "down", "enter")
    assert view.opened == shown.records[0]
    assert pressed(view, shown, "down") is view
    closed = pressed(view, shown, "escape")
    assert (closed.opened, closed.selected) == (None, 1)
    assert pressed(closed, shown, "escape").selected is None
    assert pressed(view, shown, "enter").opened is None


def test_a_selection_beyond_a_shorter_list_opens_its_last_line() -> None:
    """Requests end between two keys; an empty list opens nothing."""
    view = ViewState(selected=7)
    assert view.key("enter", picture(request("a"))).opened == request("a")
    assert view.key("enter", Snapshot()).opened is None


def test_a_paused_screen_is_the_one_that_is_acted_on() -> None:
    """Rows are those of the frozen picture, however the fleet goes on; p again shows the present."""
    before = picture(request("a"), records=1)
    paused = ViewState().key("p", before)
    assert paused.frozen is before
    later = picture()
    assert pressed(paused, later, "down", "down", "enter").opened == before.records[0]
    assert paused.key("p", later).frozen is None


@pytest.mark.parametrize("key", ["x", "", "P", "F1"])
def test_other_keys_do_nothing(key: str) -> None:
    view = ViewState(selected=1)
    assert view.key(key, picture()) is view
