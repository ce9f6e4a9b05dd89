"""The lines of ``qarr top``: what is shown of each state, and what is left out where there is no room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from router.cli.top.screen import OWN_ONLY, screen, shown_age, snapshot
from router.cli.top.state import Snapshot, ViewState
from tests.unit.cli.test_top import DOWN, FLEET, RECORD, REPLICA, TIER, full


def lines(picture: Snapshot, view: ViewState | None = None, width: int = 160, height: int = 50) -> list[str]:
    return [line.plain.rstrip() for line in screen(picture, view or ViewState(), width, height)]


def fleet(*tiers: dict[str, Any], **more: Any) -> Snapshot:
    return Snapshot().apply("fleet", {**FLEET, "tiers": list(tiers), "in_flight": [], "in_flight_total": 0, **more})


def row(shown: list[str], begins: str) -> str:
    return next(line for line in shown if line.strip().startswith(begins))


def test_before_the_first_picture_it_says_what_it_does() -> None:
    """It connects; or it has been told why it cannot."""
    assert " connecting ..." in lines(Snapshot())
    assert " no router answers; trying again: h (ConnectError)" in lines(Snapshot(trouble="h (ConnectError)"))


def test_the_summary_adds_the_tiers_up() -> None:
    """Requests of the window become requests a minute; SLAs that were met of those asked for."""
    shown = lines(fleet(TIER, {**TIER, "tier": "balanced", "errors": 2}, window_s=30))
    assert "2/2 tiers ready" in shown[1]
    assert "160 req/min" in shown[1]
    assert "62 tok/s" in shown[1]
    assert "2 errors" in shown[1]
    assert "SLA 18/20" in shown[1]
    assert "no SLAs" in lines(fleet({**TIER, "sla": {"asked": 0, "met": 0}}))[1]


@pytest.mark.parametrize(
    ("mean", "price", "style"), [(0.0214, 0.2134, ""), (0.0361, 0.00021, ""), (0.06, 25, "yellow")]
)
def test_the_loss_budget_is_in_the_summary(mean: float, price: float, style: str) -> None:
    """The running mean beside what is allowed, and the price of loss; it stands out only when it is clearly over."""
    shown = screen(fleet(TIER, loss_budget={"mean": mean, "budget": 0.035, "price": price}), ViewState(), 200, 30)[1]
    said = f"loss {mean:.1%} of 3.5% allowed"
    assert said in shown.plain
    begin = shown.plain.index(said)
    assert [span.style for span in shown.spans if (span.start, span.end) == (begin, begin + len(said))] == [style][
        : bool(style)
    ]
    worth = {0.2134: "213ms", 0.00021: "0.2ms", 25: "25.0s"}[price]
    assert f"a lost token is worth {worth} of engine time" in shown.plain


@pytest.mark.parametrize("budget", [{}, {"mean": None, "budget": None, "price": None}])
def test_a_loss_budget_that_is_not_known_yet_takes_no_room(budget: dict[str, Any]) -> None:
    """Nor does that of a router of an earlier release."""
    assert "loss" not in lines(fleet(TIER, loss_budget=budget), width=400)[1]
    assert "lost" not in lines(fleet(TIER), width=400)[1]


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_the_summary_ends_with_a_whole_part(width: int) -> None:
    """What does not fit is left out, not cut."""
    parts = lines(fleet(TIER), width=width)[1].strip().split(" \u00b7 ")
    every = lines(fleet(TIER), width=400)[1].strip().split(" \u00b7 ")
    assert parts == every[: len(parts)]


def test_columns_of_the_highest_rank_go_first() -> None:
    """REQ and TPOT make room before TTFT; tier, state, load and errors stay."""
    wide, narrow, least = (row(lines(fleet(TIER), width=w), "TIER").split() for w in (160, 70, 45))
    assert "REQ" in wide
    assert "REQ" not in narrow
    assert "TTFT" in narrow
    assert [title for title in least if title != "FLIGHT"] == ["TIER", "STATE", "IN", "ERR"]


@pytest.mark.parametrize(
    ("used", "limit", "bar"), [(0, 8, "\u2591" * 14), (1, 1000, "\u2588" + "\u2591" * 13), (4, 8, "\u2588" * 7 + "\u2591" * 7), (16, 8, "\u2588" * 14)]
)  # fmt: skip
def test_bars(used: int, limit: int, bar: str) -> None:
    """Empty at nothing, never empty at something, never longer than full."""
    replica = {**REPLICA, "in_flight": used, "limit": limit}
    assert f"{bar} {used}/{limit}" in row(lines(fleet({**TIER, "replicas": [replica]})), "fast")


def test_slots_count_where_the_router_tells_them() -> None:
    """A request with several choices takes several; a replica without a limit of its own has its tier's."""
    replica = {**REPLICA, "in_flight": 1, "places_taken": 5, "limit": None}
    assert "5/32" in row(lines(fleet({**TIER, "replicas": [replica]})), "fast")


def test_a_tier_of_several_replicas_has_a_row_for_each() -> None:
    """How many are ready, the sum of their load, and the fullest KV cache."""
    second = {**REPLICA, "id": "fast-1", "state": "starting", "kv_cache_usage": 0.9}
    shown = lines(fleet({**TIER, "replicas": [REPLICA, second]}))
    assert "ready 1/2" in row(shown, "fast ")
    assert "6/16" in row(shown, "fast ")
    assert "90%" in row(shown, "fast ")
    assert "25%" in row(shown, "fast-0")
    assert "starting" in row(shown, "fast-1")


def test_notes_say_what_is_wrong() -> None:
    """The first line of a detail, an open breaker, a full cache, and what a tier without an engine waits for."""
    replica = {**REPLICA, "detail": "slow\nmore", "breaker": "half_open", "kv_pressure": True}
    preparing = {"what": "quantizing", "done": 3, "total": 31, "remaining_s": 61.0, "failed": None}
    empty = {**TIER, "tier": "precise", "state": "preparing", "replicas": [], "preparing": preparing, "detail": None}
    shown = lines(fleet({**TIER, "replicas": [replica]}, empty))
    assert [line.strip() for line in shown if "fast-0: " in line] == [
        "fast-0: slow",
        "fast-0: breaker half_open: it failed too often, and gets few requests or none",
        "fast-0: its KV cache is nearly full: no more long prompts for now",
    ]
    assert "precise: quantizing (3 of 31), ready in about 65 s" in row(shown, "precise: ")


def test_what_is_not_known_is_a_dash() -> None:
    """Times, cache and SLAs of a tier that has not served."""
    tier = {**TIER, "replicas": [DOWN], "ttft_ms": None, "tpot_ms": None, "sla": {"asked": 0, "met": 0}}
    assert row(lines(fleet(tier)), "fast ").split().count("-") == 4


def test_times_have_three_digits() -> None:
    tier = {**TIER, "ttft_ms": {"p50": 9.94, "p95": 999.4}, "tpot_ms": {"p50": 10.0, "p95": 1500.0}}
    assert "9.9ms/999ms" in (shown := row(lines(fleet(tier)), "fast "))
    assert "10ms/1.5s" in shown


def records(*changes: dict[str, Any]) -> Snapshot:
    picture = fleet(TIER)
    for number, change in enumerate(changes):
        picture = picture.apply("request", {**RECORD, "request_id": str(number), **change})
    return picture


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sla_met": True}, " ok "),
        ({"sla_met": False}, " ok, late "),
        ({"outcome": "client_gone"}, " client gone "),
        ({"outcome": "error", "error": "EngineFailed"}, "EngineFailed: class chat"),
        ({"continued_on": ["precise-0", "fast-1"]}, "continued on precise-0, fast-1; class chat"),
        ({"served_by": None, "tier": "precise"}, " precise "),
        ({"served_by": None, "tier": None}, " - "),
    ],
)
def test_an_ended_request_is_one_line(change: dict[str, Any], said: str) -> None:
    """Its outcome, who served it, and why; control characters do not come through."""
    line = next(line for line in lines(records(change)) if "31+12" in line)
    assert said in line
    assert "\x1b" not in line


def test_the_selected_line_is_always_shown() -> None:
    """In the list of ended requests, too, however long the lists are."""
    picture = full(60)
    for selected in range(62):
        marked = [
            line
            for line in screen(picture, ViewState(selected=selected), 100, 24)
            if line.spans and line.spans[-1].style == "reverse"
        ]
        assert len(marked) == 1
        assert ("decode" in marked[0].plain or "waiting" in marked[0].plain) is (selected < 2)


def test_lists_share_the_lines() -> None:
    """Requests in flight get half, and all of what the ended ones do not need."""
    flying = [{**FLEET["in_flight"][0], "request_id": f"r{n}", "age_ms": float(n)} for n in range(40)]

    def count(ended: int) -> tuple[int, int]:
        picture = Snapshot().apply("fleet", {**FLEET, "tiers": [TIER], "in_flight": flying, "in_flight_total": 40})
        for number in range(ended):
            picture = picture.apply("request", {**RECORD, "request_id": f"e{number}"})
        shown = lines(picture, height=32)
        return sum("decode" in line for line in shown), sum("31+12" in line for line in shown)

    half, rest = count(40)
    assert abs(half - rest) <= 1
    many, few = count(2)
    assert few == 2
    assert many == half + rest - 2


def test_an_opened_request_has_its_facts() -> None:
    """Only those that it has: no error, no SLA and no failover where there was none."""
    shown = "\n".join(lines(full(1), ViewState(opened=RECORD)))
    assert "chat (confidence 0.93), priority standard" in shown
    assert "SLA           ttft_ms 100: missed" in shown
    assert "continued on" not in shown
    assert "error " not in shown.partition("VERDICTS")[0].partition("/generate")[2]
    refused = {**RECORD, "tier": None, "served_by": None, "sla": {"ttft_ms": None}, "degraded": ["ttft_ms", "tier"]}
    shown = "\n".join(lines(full(1), ViewState(opened=refused)))
    assert "refused, by table" in shown
    assert "SLA  " not in shown
    assert "not assured   ttft_ms, tier" in shown


def test_an_sla_is_met_missed_or_not_judged() -> None:
    for met, said in ((True, "met"), (False, "missed"), (None, "-")):
        assert f"ttft_ms 100: {said}" in "\n".join(lines(full(1), ViewState(opened={**RECORD, "sla_met": met})))


def test_silence_is_told_while_the_last_picture_stays() -> None:
    """With what was known, and also above a paused screen."""
    silent = replace(fleet(TIER), trouble="http://h ended the connection")
    assert "trying again: http://h ended the connection" in lines(silent)[2]
    assert "trying again" in lines(silent, ViewState(frozen=fleet(TIER)))[2]


def test_the_footer_says_what_keys_do_now() -> None:
    assert lines(fleet(TIER))[-1].split("   ") == [
        " q quit",
        "p pause",
        "s sort: age",
        "\u2191\u2193 select",
        "Enter verdicts",
    ]
    paused = ViewState(frozen=fleet(TIER), opened=RECORD, sort="tier", unicode=False)
    assert lines(fleet(TIER), paused)[-1].split("   ") == [
        " q quit",
        "p go on",
        "s sort: tier",
        "j/k select",
        "Enter back",
    ]


def test_a_snapshot_of_one_router_has_no_footer() -> None:
    """``--once`` shows the fleet and the last requests, and whose they are."""
    shown = [line.plain for line in snapshot(fleet(TIER, scope="own"), 100, unicode=True)]
    assert not any("quit" in line for line in shown)
    assert sum(OWN_ONLY in line for line in shown) == 1


@pytest.mark.parametrize(
    ("milliseconds", "text"), [(59_949, "59.9s"), (60_000, "1m00s"), (3_599_999, "59m59s"), (3_600_000, "1h00m"), (90_000_000, "25h00m")]
)  # fmt: skip
def test_ages_change_their_unit(milliseconds: float, text: str) -> None:
    assert shown_age(milliseconds) == text
