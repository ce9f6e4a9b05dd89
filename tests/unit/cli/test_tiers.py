"""``qarr tiers``: the table, and how an operation is followed; operations on real engines are tested with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.stub_router import StubRouter, qarr, stub_router
from tiers.errors import OperationError
from tiers.lifecycle.canary import read_canary

REPLICA: dict[str, Any] = {
    "id": "fast-0",
    "state": "ready",
    "precision": "fp8",
    "in_flight": 2,
    "served": 40,
    "failed": 1,
    "kv_cache_usage": 0.256,
    "tpot_ms": 31.26,
    "pid": 4711,
    "url": "http://127.0.0.1:9101",
    "detail": None,
}
BARE = {
    **REPLICA,
    "id": "fast-1",
    "state": "failed",
    "kv_cache_usage": None,
    "tpot_ms": None,
    "pid": None,
    "url": None,
}
PREPARING = {
    "what": "quantizing",
    "done": 3,
    "total": 31,
    "remaining_s": None,
    "failed": None,
}


def fleet(*replicas: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return what ``GET /tiers`` gives of a fast tier with some replicas, and a precise one that has none."""
    tiers = [
        {
            "tier": "fast",
            "state": "ready",
            "replicas": list(replicas),
            "preparing": None,
        },
        {
            "tier": "precise",
            "state": "preparing",
            "replicas": [],
            "preparing": PREPARING,
            "detail": None,
        },
    ]
    return {"model": "m", "machine": "a CPU", "tiers": tiers, **more}


def listed(answer: dict[str, Any]) -> list[str]:
    with stub_router(**{"GET /tiers": (200, answer)}) as router:
        return qarr("tiers", "--url", router.url).stdout.splitlines()


def test_the_list_has_every_replica_and_tiers_without_one() -> None:
    """What is not known is a dash; a tier that is being prepared says how far it is."""
    head, _, first, second, bare, detail = listed(fleet(REPLICA, BARE))
    assert head == "m on a CPU"
    assert (
        " ".join(first.split())
        == "fast fast-0 ready fp8 2 40 1 26% 31.3 4711 http://127.0.0.1:9101"
    )
    assert second.split() == [
        "fast",
        "fast-1",
        "failed",
        "fp8",
        "2",
        "40",
        "1",
        "-",
        "-",
        "-",
        "-",
    ]
    assert bare.split()[:3] == ["precise", "-", "preparing"]
    assert detail == "detail of precise: quantizing (3 of 31)"


def test_details_are_whole_on_lines_of_their_own() -> None:
    """Of a traceback the first line; brackets are not markup; an empty detail is none."""
    lines = listed(
        fleet(
            {**REPLICA, "detail": "[red] exited\nTraceback"},
            {**BARE, "detail": "x" * 500},
        )
    )
    assert lines[5:7] == [
        "detail of fast-0: [red] exited",
        f"detail of fast-1: {'x' * 500}",
    ]
    assert "detail of fast-0" not in "".join(listed(fleet({**REPLICA, "detail": ""})))


def test_a_key_that_sees_less_is_told() -> None:
    assert "only operators' keys see" in listed(fleet(REPLICA, scope="own"))[1]
    assert "only operators' keys see" not in "".join(
        listed(fleet(REPLICA, scope="all"))
    )


def operation(state: str, detail: str, successor: str | None = None) -> dict[str, Any]:
    return {"id": "7", "state": state, "detail": detail, "successor": successor}


def operate(
    kind: str, target: str, answers: dict[str, tuple[int, Any]], *more: str
) -> tuple[Any, StubRouter]:
    with stub_router(**answers) as router:
        return qarr(
            "tiers", kind, target, *more, "--url", router.url, "--key", "k"
        ), router


def test_an_operation_is_followed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is told once on standard error, with the state of the replica; the result is on standard output."""
    monkeypatch.setattr("router.cli.tiers.POLL_S", 0)
    steps = [
        operation("running", "drains"),
        operation("running", "drains"),
        operation("done", "2 requests finished"),
    ]
    result, router = operate("drain", "fast-0", {
        "GET /tiers": (200, fleet({**REPLICA, "state": "draining"})),
        "POST /admin/replicas/fast-0/drain": (202, operation("running", "begins")),
        "GET /admin/operations/7": (200, steps),
    })  # fmt: skip
    assert result.exit_code == 0
    assert result.stdout == "fast-0: drain done, 2 requests finished\n"
    assert [line.partition(" s ")[2] for line in result.stderr.splitlines()[1:]] == [
        f"fast-0: {detail} (is draining, 2 in flight)"
        for detail in ("begins", "drains", "2 requests finished")
    ]
    assert set(router.keys) == {"Bearer k"}


def test_a_successors_state_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """While an engine is replaced the new one counts; one that the fleet has not yet, or no more, is gone."""
    monkeypatch.setattr("router.cli.tiers.POLL_S", 0)
    result, _ = operate("recycle", "fast-0", {
        "GET /tiers": (200, [fleet(REPLICA), fleet(REPLICA), fleet(REPLICA, {**REPLICA, "id": "fast-2", "state": "warming"})]),
        "POST /admin/replicas/fast-0/recycle": (202, operation("running", "starts", "fast-2")),
        "GET /admin/operations/7": (200, operation("done", "replaced", "fast-2")),
    })  # fmt: skip
    assert [line.partition(" s ")[2] for line in result.stderr.splitlines()[1:]] == [
        "fast-0: starts (gone)", "fast-0: replaced (warming, 2 in flight)",
    ]  # fmt: skip


def test_a_tier_means_its_replicas_one_after_another() -> None:
    """A failure ends it: the next replica is left as it is."""
    answers = {"GET /tiers": (200, fleet(REPLICA, BARE))}
    answers |= {
        f"POST /admin/replicas/fast-{n}/resume": (202, operation("done", "ready"))
        for n in (0, 1)
    }
    result, router = operate("resume", "fast", answers)
    assert result.stdout == "fast-0: resume done, ready\nfast-1: resume done, ready\n"
    answers["POST /admin/replicas/fast-0/resume"] = (
        202,
        operation("failed", "it was never drained"),
    )
    result, router = operate("resume", "fast", answers)
    assert isinstance(result.exception, OperationError)
    assert str(result.exception) == "resume of fast-0 failed: it was never drained"
    assert not [asked for asked in router.asked if "fast-1" in asked]


def fast_and_precise(fast: str, precise: str) -> dict[str, Any]:
    tiers = [
        {
            "tier": "fast",
            "state": fast,
            "replicas": [{**REPLICA, "state": fast}, {**BARE, "state": fast}],
            "preparing": None,
        },
        {
            "tier": "precise",
            "state": precise,
            "replicas": [{**REPLICA, "id": "precise-0", "state": precise}],
        },
    ]
    return {"model": "m", "machine": "a CPU", "tiers": tiers}


@pytest.mark.parametrize(
    ("kind", "target", "states"),
    [
        ("drain", "fast", ("ready", "failed")),
        ("drain", "precise-0", ("draining", "ready")),
        ("restart", "precise", ("failed", "ready")),
        ("remove", "precise-0", ("warming", "ready")),
    ],
)
def test_whether_nobody_is_to_be_served_is_asked(
    kind: str, target: str, states: tuple[str, str]
) -> None:
    """Nothing is begun without a yes or --force."""
    answers: dict[str, tuple[int, Any]] = {
        "GET /tiers": (200, fast_and_precise(*states))
    }
    for replica in ("fast-0", "fast-1", "precise-0"):
        answers[f"POST /admin/replicas/{replica}/{kind}"] = (
            202,
            operation("done", "over"),
        )
    result, router = operate(kind, target, answers)
    assert isinstance(result.exception, OperationError)
    assert "--force" in str(result.exception)
    assert "every request gets 503" in result.stderr
    assert router.asked == ["GET /tiers"]
    result, router = operate(kind, target, answers, "--force")
    assert result.exit_code == 0
    with stub_router(**answers) as router:
        assert (
            qarr("tiers", kind, target, "--url", router.url, stdin="y\n").exit_code == 0
        )


@pytest.mark.parametrize(
    ("kind", "target", "states"),
    [
        ("drain", "fast", ("ready", "ready")),
        ("drain", "fast-0", ("ready", "failed")),
        ("drain", "fast", ("failed", "ready")),
        ("drain", "fast", ("failed", "failed")),
        ("restart", "fast", ("ready", "failed")),
        ("recycle", "precise", ("failed", "ready")),
        ("resume", "precise", ("failed", "ready")),
    ],
)
def test_where_others_serve_or_nobody_did_nothing_is_asked(
    kind: str, target: str, states: tuple[str, str]
) -> None:
    """A tier's replicas are restarted one after another, and a recycled engine has a successor first."""
    answers: dict[str, tuple[int, Any]] = {
        "GET /tiers": (200, fast_and_precise(*states))
    }
    for replica in ("fast-0", "fast-1", "precise-0"):
        answers[f"POST /admin/replicas/{replica}/{kind}"] = (
            202,
            operation("done", "over"),
        )
    assert operate(kind, target, answers)[0].exit_code == 0


@pytest.mark.parametrize("target", ["fast-9", "huge", "precise", ""])
def test_unknown_targets_are_named_with_what_there_is(target: str) -> None:
    """A tier without replicas is no target; nothing is asked of any replica."""
    result, router = operate("drain", target, {"GET /tiers": (200, fleet(REPLICA))})
    assert (
        str(result.exception)
        == f"there is no tier or replica {target!r}: fast, precise, fast-0"
    )
    assert router.asked == ["GET /tiers"]


def test_what_a_tiers_engines_compute_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the next hour, also where nothing was recorded yet; other names are no tiers."""
    monkeypatch.setenv("QARR_POLICY__PROFILES", str(tmp_path / "profiles"))
    output = qarr("tiers", "record", "fast").stdout
    assert (
        output
        == "fast: starts and resumes of the next hour are accepted and recorded\n"
    )
    (acceptance,) = read_canary(tmp_path / "profiles/canary.json").acceptances
    assert acceptance.tier == "fast"
    assert qarr("tiers", "record", "fast-0").exit_code == 2


def test_an_added_engine_is_followed_until_it_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each state is told once; one that does not become ready is an error that says what to do."""
    monkeypatch.setattr("router.cli.tiers.POLL_S", 0)
    engine = "http://127.0.0.1:9101"

    def states(*names: str, detail: str | None = None) -> list[Any]:
        return [fleet({**REPLICA, "state": name, "detail": detail}) for name in names]

    answers = {
        "POST /admin/replicas": (201, {"id": "fast-0"}),
        "GET /tiers": (200, states("starting", "warming", "warming", "ready")),
    }
    result, _ = operate("add", "fast", answers, engine)
    assert result.exit_code == 0
    assert result.stdout == "fast-0: added, is ready\n"
    assert [line.partition(" s ")[2] for line in result.stderr.splitlines()[1:]] == [
        "fast-0: is starting", "fast-0: is warming",
    ]  # fmt: skip
    answers["GET /tiers"] = (
        200,
        states("starting", "unreachable", detail="no answer\nTraceback"),
    )
    result, _ = operate("add", "fast", answers, engine)
    assert str(result.exception) == (
        "fast-0 is added, but is unreachable: no answer; it gets requests when it is ready, 'qarr tiers remove fast-0' takes "
        "it out"
    )


@pytest.mark.parametrize(
    "named", ["fast-0", "http://127.0.0.1:9101", "HTTP://127.0.0.1:9101/"]
)
def test_a_replica_is_removed_by_its_id_or_its_address(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.cli.tiers.POLL_S", 0)
    answers = {
        "GET /tiers": (200, [fleet(REPLICA), fleet(REPLICA), fleet()]),
        "POST /admin/replicas/fast-0/remove": (
            202,
            operation("running", "waits for 2 open requests"),
        ),
        "GET /admin/operations/7": (200, operation("done", "removed")),
    }
    result, _ = operate("remove", named, answers, "--force")
    assert result.exit_code == 0
    assert result.stdout == "fast-0: remove done, removed\n"
    assert result.stderr.splitlines()[-1].endswith("fast-0: removed (is gone)")


def test_a_replica_that_is_not_there_is_not_removed() -> None:
    result, router = operate(
        "remove", "http://10.0.0.9:8000", {"GET /tiers": (200, fleet(REPLICA, BARE))}
    )
    assert (
        str(result.exception)
        == "there is no replica 'http://10.0.0.9:8000': fast-0, fast-1"
    )
    assert router.asked == ["GET /tiers"]
