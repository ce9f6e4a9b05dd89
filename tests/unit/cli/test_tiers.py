"""``qarr tiers``: the table, and how an operation is followed; operations on real engines are tested with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.cli.stub_router import StubRouter, qarr, stub_router
from tiers.errors import OperationError

if TYPE_CHECKING:
    from pathlib import Path

REPLICA: dict[str, Any] = {
    "id": "fast-0", "state": "ready", "precision": "fp8", "in_flight": 2, "served": 40, "failed": 1, "kv_cache_usage": 0.256, "tpot_ms": 31.26,
    "pid": 4711, "url": "http://127.0.0.1:9101", "detail": None,
}  # fmt: skip
BARE = {**REPLICA, "id": "fast-1", "state": "failed", "kv_cache_usage": None, "tpot_ms": None, "pid": None, "url": None}
PREPARING = {"what": "quantizing", "done": 3, "total": 31, "remaining_s": None, "failed": None}


def fleet(*replicas: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return what ``GET /tiers`` gives of a fast tier with some replicas, and a precise one that has none."""
    tiers = [
        {"tier": "fast", "state": "ready", "replicas": list(replicas), "preparing": None},
        {"tier": "precise", "state": "preparing", "replicas": [], "preparing": PREPARING, "detail": None},
    ]
    return {"model": "m", "machine": "a CPU", "tiers": tiers, **more}


def listed(answer: dict[str, Any]) -> list[str]:
    """Return the lines of the list."""
    with stub_router(**{"GET /tiers": (200, answer)}) as router:
        return qarr("tiers", "--url", router.url).stdout.splitlines()


def test_the_list_has_every_replica_and_tiers_without_one() -> None:
    """What is not known is a dash; a tier that is being prepared says how far it is."""
    head, _, first, second, bare = listed(fleet(REPLICA, BARE))
    assert head == "m on a CPU"
    assert first.split() == [
        "fast",
        "fast-0",
        "ready",
        "fp8",
        "2",
        "40",
        "1",
        "26%",
        "31.3",
        "4711",
        "http://127.0.0.1:9101",
    ]
    assert second.split() == ["fast", "fast-1", "failed", "fp8", "2", "40", "1", "-", "-", "-", "-"]
    assert bare.split()[:3] == ["precise", "-", "preparing"]
    assert "quantizing (3 of 31)" in bare


def test_details_are_one_line_and_short() -> None:
    """Of a traceback the first line; brackets are not markup; an empty detail is none."""
    lines = listed(fleet({**REPLICA, "detail": "[red] exited\nTraceback"}, {**REPLICA, "detail": "x" * 500}))
    assert lines[2].rstrip().endswith("[red] exited")
    assert 80 < lines[3].count("x") <= 100
    assert listed(fleet({**REPLICA, "detail": ""}))[2].split()[-1] == REPLICA["url"]


def test_a_key_that_sees_less_is_told() -> None:
    assert "only operators' keys see" in listed(fleet(REPLICA, scope="own"))[1]
    assert "only operators' keys see" not in "".join(listed(fleet(REPLICA, scope="all")))


def operation(state: str, detail: str, successor: str | None = None) -> dict[str, Any]:
    return {"id": "7", "state": state, "detail": detail, "successor": successor}


def operate(kind: str, target: str, answers: dict[str, tuple[int, Any]]) -> tuple[Any, StubRouter]:
    with stub_router(**answers) as router:
        return qarr("tiers", kind, target, "--url", router.url, "--key", "k"), router


def test_an_operation_is_followed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is told once on standard error, with the state of the replica; the result is on standard output."""
    monkeypatch.setattr("router.cli.tiers.POLL_S", 0)
    steps = [operation("running", "drains"), operation("running", "drains"), operation("done", "2 requests finished")]
    done, router = operate("drain", "fast-0", {
        "GET /tiers": (200, fleet({**REPLICA, "state": "draining"})),
        "POST /admin/replicas/fast-0/drain": (202, operation("running", "begins")),
        "GET /admin/operations/7": (200, steps),
    })  # fmt: skip
    assert (done.exit_code, done.stdout) == (0, "fast-0: drain done, 2 requests finished\n")
    assert [line.partition(" s ")[2] for line in done.stderr.splitlines()] == [
        f"fast-0: {detail} (is draining, 2 in flight)" for detail in ("begins", "drains", "2 requests finished")
    ]
    assert set(router.keys) == {"Bearer k"}


def test_a_successors_state_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """While an engine is replaced the new one counts; one that the fleet has not yet, or no more, is gone."""
    monkeypatch.setattr("router.cli.tiers.POLL_S", 0)
    done, _ = operate("recycle", "fast-0", {
        "GET /tiers": (200, [fleet(REPLICA), fleet(REPLICA), fleet(REPLICA, {**REPLICA, "id": "fast-2", "state": "warming"})]),
        "POST /admin/replicas/fast-0/recycle": (202, operation("running", "starts", "fast-2")),
        "GET /admin/operations/7": (200, operation("done", "replaced", "fast-2")),
    })  # fmt: skip
    assert [line.partition(" s ")[2] for line in done.stderr.splitlines()] == [
        "fast-0: starts (gone)", "fast-0: replaced (warming, 2 in flight)",
    ]  # fmt: skip


def test_a_tier_means_its_replicas_one_after_another() -> None:
    """A failure ends it: the next replica is left as it is."""
    answers = {"GET /tiers": (200, fleet(REPLICA, BARE))}
    answers |= {f"POST /admin/replicas/fast-{n}/resume": (202, operation("done", "ready")) for n in (0, 1)}
    done, router = operate("resume", "fast", answers)
    assert done.stdout == "fast-0: resume done, ready\nfast-1: resume done, ready\n"
    answers["POST /admin/replicas/fast-0/resume"] = (202, operation("failed", "it was never drained"))
    done, router = operate("resume", "fast", answers)
    assert isinstance(done.exception, OperationError)
    assert str(done.exception) == "resume of fast-0 failed: it was never drained"
    assert not [asked for asked in router.asked if "fast-1" in asked]


@pytest.mark.parametrize("target", ["fast-9", "huge", "precise", ""])
def test_unknown_targets_are_named_with_what_there_is(target: str) -> None:
    """A tier without replicas is no target; nothing is asked of any replica."""
    done, router = operate("drain", target, {"GET /tiers": (200, fleet(REPLICA))})
    assert str(done.exception) == f"there is no tier or replica {target!r}: fast, precise, fast-0"
    assert router.asked == ["GET /tiers"]


def test_recorded_answers_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any there is nothing to delete, and no file is made; other names are no tiers."""
    monkeypatch.setenv("QARR_POLICY__PROFILES", str(tmp_path / "profiles"))
    assert "0 records of fast" in qarr("tiers", "record", "fast").stdout
    assert not (tmp_path / "profiles").exists()
    assert qarr("tiers", "record", "fast-0").exit_code == 2
