"""The lines of requests in the router's log: where they go, what they say, and what happens where they cannot be written."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.telemetry.log_format import request_line
from router.telemetry.logs import Logging, log_request
from router.telemetry.record import KeptFor, Outcome, RequestRecord, render_summary
from router.telemetry.settings import TelemetrySettings
from tests.unit.own_router import own_router
from tests.unit.records import decision, record

GOOD = record(
    request_id="good-1",
    trace_id="7e" * 16,
    sla_met=True,
    checkpoint="c0ffee",
    key_id="k1",
)
BAD = record(
    request_id="bad-1",
    decision=decision(None),
    outcome=Outcome.REFUSED,
    error="too_long",
    tier=None,
    kept_for=KeptFor.ERROR,
)


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """Let a test take over the log of this process, and give it back."""
    root = logging.getLogger()
    ours = logging.getLogger("qarr")
    handlers = root.handlers[:]
    root_level = root.level
    our_level = ours.level
    root.handlers = []
    yield
    assert Logging.current is None
    root.handlers = handlers
    root.setLevel(root_level)
    ours.setLevel(our_level)


class Log:
    """A log in a folder, of the records that are given to it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.file = folder / "router-1.log"
        self.logging = Logging(TelemetrySettings(**settings))
        self.place_of_requests = self.logging.also_to_file(folder, 1)

    def end(self) -> list[dict[str, Any]]:
        """End the log, and return the file's lines."""
        assert self.logging.stop()
        if not self.file.exists():
            return []
        lines = self.file.read_text("utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def hold(self) -> threading.Event:
        """Let the thread wait as on a stopped terminal, until the event is set."""
        holding = threading.Event()
        released = threading.Event()

        def wait() -> None:
            holding.set()
            released.wait(10)

        self.logging.say(wait)
        assert holding.wait(10)
        return released


@pytest.mark.parametrize(
    ("settings", "in_file", "shown"),
    [
        ({}, 1, 0),
        ({"request_lines": "file"}, 1, 0),
        ({"request_lines": "stderr"}, 0, 1),
        ({"request_lines": "both"}, 1, 1),
        ({"request_lines": "both", "log_level": "warning"}, 1, 0),
        ({"log_format": "json"}, 1, 1),
        ({"log_format": "json", "request_lines": "file"}, 1, 0),
        ({"log_format": "json", "log_level": "warning"}, 1, 0),
        ({"log_file_mb": 0}, 0, 1),
        ({"log_file_mb": 0, "request_lines": "file"}, 0, 0),
    ],
    ids=str,
)
def test_a_request_has_its_line_where_the_settings_say(
    settings: dict[str, Any],
    in_file: int,
    shown: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By default in one place, the file; what went wrong is in both, and nothing is in one of them twice."""
    log = Log(tmp_path, **settings)
    log_request(GOOD)
    log_request(BAD)
    has_file = settings.get("log_file_mb") != 0
    kept = [line["request_id"] for line in log.end()]
    written = capsys.readouterr().err.splitlines()
    seen = re.findall("good-1|bad-1", "\n".join(written))
    assert kept == ["good-1"] * in_file + ["bad-1"] * has_file
    assert seen == ["good-1"] * shown + ["bad-1"]
    if settings.get("log_format") == "json":
        for line in written:
            assert isinstance(json.loads(line), dict)
    is_in_file_alone = in_file and not shown
    assert log.place_of_requests == (log.file if is_in_file_alone else None)


def test_what_is_printed_is_json_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Log(tmp_path, log_format="json")
    sys.stderr.write("error: no room\n")
    sys.excepthook(ValueError, ValueError("odd"), None)
    assert [line["level"] for line in log.end()] == ["error", "critical"]
    assert all(
        json.loads(line)["logger"] == "qarr.command"
        for line in capsys.readouterr().err.splitlines()
    )


@pytest.mark.parametrize(
    ("ended", "level", "beginning"),
    [
        pytest.param(GOOD, "info", "ok class=chat tier=", id="good"),
        pytest.param(BAD, "warning", "refused (too_long) ", id="bad"),
    ],
)
def test_a_line_has_the_whole_record(
    ended: RequestRecord,
    level: str,
    beginning: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every field in the file; for a person the text on standard error is made of the same fields."""
    log = Log(tmp_path, request_lines="both")
    log_request(ended)
    (line,) = log.end()
    fields = json.loads(json.dumps(render_summary(ended)))
    assert fields.pop("at") == 1e9
    assert line["arrived_at"] == 1e9
    assert {name: line[name] for name in fields} == fields
    assert line["event"] == "request"
    assert line["logger"] == "qarr.request"
    assert line["level"] == level
    assert line["at"] > line["arrived_at"]
    (shown,) = capsys.readouterr().err.splitlines()
    text = request_line(line)
    ids = f"trace={ended.trace_id} request={ended.request_id}"
    assert shown.partition(" ")[2] == f"{level.upper()} {text} {ids}"
    assert text.startswith(f"POST /generate {beginning}")
    assert ("why: the cheapest" in text) is (ended is BAD)


def test_a_thought_stands_in_the_line_apart_from_the_answer() -> None:
    """Where nothing was thought, the line is as short as before."""
    thoughtful = render_summary(record(ttfa_ms=1500.0, reasoning=5))
    assert " ttft=235ms ttfa=1500ms tpot=" in request_line(thoughtful)
    assert " tokens=20+7 reasoning=5 total=" in request_line(thoughtful)
    plain = request_line(render_summary(record(ttfa_ms=235.0, reasoning=0)))
    assert "ttfa" not in plain
    assert "reasoning" not in plain


@pytest.mark.parametrize(
    "took",
    [0.0, 0.004, 0.016, 1.0, 2.345678, 235.12345, 99.994, 99.996, 640_000.987, 1e12],
)
def test_times_are_shown_in_hundredths(took: float) -> None:
    """As ``round`` shows them; those that were not measured as null."""
    names = ("queue_ms", "overhead_ms", "ttft_ms", "tpot_ms", "duration_ms")
    shown = render_summary(record(**dict.fromkeys(names, took)))
    assert [shown[name] for name in names] == [round(took, 2)] * 5
    assert render_summary(record(ttft_ms=None))["ttft_ms"] is None


def test_lines_that_do_not_fit_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While nothing can be written nobody waits; afterwards the log says how many are left out, and goes on."""
    monkeypatch.setattr("router.line_file.QUEUED_LINES", 10)
    log = Log(tmp_path)
    released = log.hold()
    for number in range(25):
        log_request(record(request_id=f"r{number}"))
    released.set()
    while not log.file.read_text().count("r9"):
        pass
    log_request(GOOD)
    lines = log.end()
    told = "15 lines are left out here: they came faster than they could be written"
    assert [line.get("request_id", line["message"]) for line in lines] == [
        *(f"r{n}" for n in range(10)),
        told,
        "good-1",
    ]
    assert told in capsys.readouterr().err


def test_a_closed_standard_error_costs_no_line_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads standard error any longer: the file has every line, and says once that the others are lost."""
    read, written = os.pipe()
    os.close(read)
    with os.fdopen(written, "w") as broken:
        monkeypatch.setattr("sys.stderr", broken)
        log = Log(tmp_path, request_lines="both")
        for number in range(30):
            log_request(record(request_id=f"r{number}"))
        while "standard error" not in log.file.read_text():
            pass
        lines = log.end()
        monkeypatch.undo()
        # what it could not write is still in its buffer
        os.dup2(os.open(os.devnull, os.O_WRONLY), written)
        assert [line["request_id"] for line in lines if "request_id" in line] == [
            f"r{n}" for n in range(30)
        ]
        assert [
            line["message"] for line in lines if "standard error" in line["message"]
        ] == [
            "standard error cannot be written (Broken pipe): lines are lost until the log says how many"
        ]


@pytest.mark.anyio
async def test_the_start_says_where_the_lines_are(tmp_path: Path) -> None:
    """On standard error is the place, and no line of a good request; `qarr logs` shows it."""
    async with own_router(tmp_path) as router:
        answer = await router.generate()
        await router.stop()
        shown = router.errors.read_text("utf-8")
        file = router.log_dir / f"router-{router.port}.log"
        assert f"each request has a line in {file}: 'qarr logs -f' shows them" in shown
        assert answer.headers["x-request-id"] not in shown
        found = (
            await router.qarr("logs", "--request", answer.headers["x-request-id"])
        ).stdout
        assert "POST /generate ok class=small_talk tier=fast" in found
        assert found.count("\n") == 1
