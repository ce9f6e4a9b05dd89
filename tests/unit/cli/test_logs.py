"""``qarr logs``: its options and how lines are shown; the reading itself is tested with the logs."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from tests.unit.cli.stub_router import qarr
from tiers.errors import OperationError

if TYPE_CHECKING:
    from pathlib import Path

TRACE, REQUEST = "ab" * 16, "cd" * 16


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A router's log with lines of two days, now and two hours ago."""
    monkeypatch.setenv("QARR_ENGINE__LOG_DIR", str(tmp_path))
    now = time.time()
    lines = [
        {"at": now - 200_000, "level": "info", "message": "long ago"},
        {"at": now - 7200, "level": "warning", "message": "two hours"},
        {"at": now - 60, "level": "error", "message": "now \x1b[2J", "trace_id": TRACE, "request_id": REQUEST},
    ]
    (tmp_path / "router-8080.log").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def shown(*args: str) -> list[str]:
    """Return the lines that the command prints."""
    done = qarr("logs", *args, NO_COLOR="1")
    assert done.exit_code == 0, done.exception
    return done.stdout.splitlines()


def test_lines_have_time_source_level_text_and_trace(folder: Path) -> None:
    """Only lines of another day have a date; control characters are written out, not sent to the terminal."""
    old, hours, now = shown()
    assert len(old.split()[0]) == len("05-01")
    assert old.endswith("router-8080 INFO     long ago")
    assert hours.split()[1:3] == ["router-8080", "WARNING"]
    assert now.endswith(f"ERROR    now \\x1b[2J  trace={TRACE}")


def test_lines_of_one_trace_do_not_repeat_its_id(folder: Path) -> None:
    assert [line.rpartition("ERROR ")[2].strip() for line in shown("--trace", TRACE[:6].upper())] == ["now \\x1b[2J"]
    assert "trace=" not in shown("--request", REQUEST)[0]


@pytest.mark.parametrize(
    ("since", "count"),
    [("90s", 1), ("1.5m", 1), ("3h", 2), ("1d", 2), ("4d", 3), ("2020-01-01", 3), ("2020-01-01T10:00", 3)],
)
def test_since_an_age_or_a_date(folder: Path, since: str, count: int) -> None:
    assert len(shown("--since", since)) == count


def test_since_a_time_of_day_is_the_last_such_time(folder: Path) -> None:
    """A time that has not come today is yesterday's; the hour may have one digit, and seconds are optional."""
    later = time.strftime("%H:%M:%S", time.localtime(time.time() + 60))
    ago = time.strftime("%H:%M:%S", time.localtime(time.time() - 120)).removeprefix("0")
    assert len(shown("--since", later)) == 2
    assert len(shown("--since", ago)) == 1
    assert shown("--since", "0:00") == shown("--since", "00:00:00")


@pytest.mark.parametrize("since", ["soon", "10", "10w", "25:00", "12:61", "2026-13-01", "m"])
def test_other_times_are_errors(folder: Path, since: str) -> None:
    """The text has the forms that are allowed."""
    done = qarr("logs", "--since", since)
    assert isinstance(done.exception, OperationError)
    assert "give an age" in str(done.exception)


def test_the_number_of_lines(folder: Path) -> None:
    """By default the last hundred; with --since all of them, unless a number is given too."""
    with (folder / "router-8080.log").open("a") as file:
        file.writelines(json.dumps({"at": time.time(), "level": "info", "message": str(n)}) + "\n" for n in range(150))
    assert [line.split()[-1] for line in shown()][:2] == ["50", "51"]
    assert len(shown("--since", "30d")) == 153
    assert [line.split()[-1] for line in shown("--since", "30d", "-n", "2")] == ["148", "149"]
    assert shown("-n", "0") == []


def test_the_level_is_the_lowest_shown(folder: Path) -> None:
    assert [len(shown("--level", level)) for level in ("debug", "warning", "error", "critical")] == [3, 2, 1, 0]


def test_targets_that_are_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logs that there are are named; without any, who writes them. Following all waits instead."""
    assert str(qarr("logs", "fast").exception).endswith(": router-8080")
    monkeypatch.setenv("QARR_ENGINE__LOG_DIR", str(folder / "none"))
    assert "engines and routers started here write them" in str(qarr("logs").exception)
    assert isinstance(qarr("logs", "router", "--follow").exception, OperationError)


@pytest.mark.parametrize("option", ["--trace", "--request"])
def test_ids_are_long_enough_to_mean_one(folder: Path, option: str) -> None:
    assert "at least the first 6 characters" in str(qarr("logs", option, "abcde").exception)
