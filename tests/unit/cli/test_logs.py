"""``qarr logs``: its options and how lines are shown; the reading itself is tested with the logs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.unit.cli.stub_router import qarr
from tests.unit.own_router import QARR
from tests.waiting import until
from tiers.errors import OperationError

TRACE = "ab" * 16
REQUEST = "cd" * 16


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A router's log with lines of two days, now and two hours ago."""
    monkeypatch.setenv("QARR_ENGINE__LOG_DIR", str(tmp_path))
    now = time.time()
    lines = [
        {"at": now - 200_000, "level": "info", "message": "long ago"},
        {"at": now - 7200, "level": "warning", "message": "two hours"},
        {
            "at": now - 60,
            "level": "error",
            "message": "now \x1b[2J",
            "trace_id": TRACE,
            "request_id": REQUEST,
        },
    ]
    (tmp_path / "router-8080.log").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    return tmp_path


def index_of(part: str, lines: list[str]) -> int:
    return next(index for index, line in enumerate(lines) if part in line)


def shown(*args: str) -> list[str]:
    result = qarr("logs", *args, NO_COLOR="1")
    assert result.exit_code == 0, result.exception
    return result.stdout.splitlines()


def test_lines_have_time_source_level_text_and_trace(folder: Path) -> None:
    """Only lines of another day have a date; control characters are written out, not sent to the terminal."""
    old, hours, now = shown()
    assert len(old.split()[0]) == len("05-01")
    assert old.endswith("router-8080 INFO     long ago")
    assert hours.split()[1:3] == ["router-8080", "WARNING"]
    assert now.endswith(f"ERROR    now \\x1b[2J  trace={TRACE}")


def test_lines_of_one_trace_or_request(folder: Path) -> None:
    (line,) = shown("--trace", TRACE[:6].upper())
    assert "now \\x1b[2J" in line
    assert shown("--request", REQUEST[:8]) == [line]


def test_a_trace_and_a_request_are_not_asked_for_together(folder: Path) -> None:
    result = qarr("logs", "--trace", TRACE[:6], "--request", REQUEST[:8])
    assert "give one of them" in str(result.exception)


@pytest.mark.parametrize(
    ("since", "count"),
    [
        ("90s", 1),
        ("1.5m", 1),
        ("3h", 2),
        ("1d", 2),
        ("4d", 3),
        ("2020-01-01", 3),
        ("2020-01-01T10:00", 3),
    ],
)
def test_since_an_age_or_a_date(folder: Path, since: str, count: int) -> None:
    assert len(shown("--since", since)) == count


@pytest.mark.parametrize("since", ["soon", "10", "10w", "25:00", "2026-13-01", "m"])
def test_other_times_are_errors(folder: Path, since: str) -> None:
    result = qarr("logs", "--since", since)
    assert isinstance(result.exception, OperationError)
    assert "give an age" in str(result.exception)


def test_the_number_of_lines(folder: Path) -> None:
    """By default the last hundred; with --since all of them, unless a number is given too."""
    with (folder / "router-8080.log").open("a") as file:
        file.writelines(
            json.dumps({"at": time.time(), "level": "info", "message": str(n)}) + "\n"
            for n in range(150)
        )
    assert [line.split()[-1] for line in shown()][:2] == ["50", "51"]
    assert len(shown("--since", "30d")) == 153
    assert [line.split()[-1] for line in shown("--since", "30d", "-n", "2")] == [
        "148",
        "149",
    ]
    assert shown("-n", "0") == []


def test_the_level_is_the_lowest_shown(folder: Path) -> None:
    assert [
        len(shown("--level", level))
        for level in ("debug", "warning", "error", "critical")
    ] == [3, 2, 1, 0]


def test_targets_that_are_not_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert str(qarr("logs", "fast").exception).endswith("known: router-8080")
    monkeypatch.setenv("QARR_ENGINE__LOG_DIR", str(folder / "none"))
    assert "there is no log of anything" in str(qarr("logs").exception)
    assert "engine.log_dir" in str(qarr("logs").exception)


@pytest.mark.parametrize("option", ["--trace", "--request"])
def test_ids_are_long_enough_to_mean_one(folder: Path, option: str) -> None:
    assert "at least the first 6 characters" in str(
        qarr("logs", option, "abcde").exception
    )


VLLM = """\
Triton is installed, but doesn't include CPU backend.
(APIServer pid=11) INFO 11-21 14:14:05 [api_utils.py:347] vLLM starts
(EngineCore pid=12) ERROR 11-21 14:14:09 [core.py:99] it broke
Traceback (most recent call last):
ValueError: broken
(EngineCore pid=12) INFO 11-21 14:14:10 [core.py:99] request chat-cdcdcd ended
"""


def test_engines_and_routers_are_merged_by_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines without a time stay with the line above; an older file comes first; a trace finds its request's engine lines."""
    monkeypatch.setenv("QARR_ENGINE__LOG_DIR", str(tmp_path))
    year = time.localtime().tm_year - (time.strftime("%m-%d") < "11-21")
    at = time.mktime((year, 11, 21, 14, 14, 7, 0, 0, -1))
    (tmp_path / "fast-0.log").write_text(VLLM)
    (tmp_path / "fast-0.log.1").write_text(
        "INFO 11-21 13:59:58 [a.py:1] the start before\n"
    )
    line = {
        "at": at,
        "level": "info",
        "message": "between",
        "request_id": "cdcdcd",
        "trace_id": TRACE,
    }
    (tmp_path / "router-8080.log").write_text(json.dumps(line) + "\n")
    shown_texts = [text.split(maxsplit=4)[-1] for text in shown()]
    order = (
        "the start before",
        "vLLM starts",
        "between",
        "it broke",
        "Traceback",
        "ValueError",
        "ended",
    )
    part_indexes = [index_of(part, shown_texts) for part in order]
    assert part_indexes == sorted(part_indexes)
    between, ended = shown("--trace", TRACE[:8])
    assert "between" in between
    assert "ended" in ended
    broke, traceback, value_error = shown("--level", "error")
    assert "it broke" in broke
    assert "Traceback" in traceback
    assert "ValueError" in value_error
    assert len(shown("fast")) == 7


@pytest.mark.anyio
async def test_the_command_follows(tmp_path: Path) -> None:
    """It shows what is added, also to a file that is begun anew, until it is interrupted, and ends without a fuss."""
    log = tmp_path / "fast-0.log"
    out = tmp_path / "out"
    log.write_text("INFO 11-21 14:14:05 [a.py:1] first\n")
    env = {**os.environ, "QARR_ENGINE__LOG_DIR": str(tmp_path)}
    with out.open("wb") as output:
        process = subprocess.Popen(
            [QARR, "logs", "fast", "-f"], stdout=output, stderr=output, env=env
        )
    try:
        await until(lambda: "first" in out.read_text())
        for number in range(400):  # until the command has begun to follow
            with log.open("a") as file:
                file.write(f"INFO 11-21 14:14:06 [a.py:1] line {number}\n")
            if "line" in out.read_text():
                break
            await asyncio.sleep(0.05)
        with log.open("a") as file:
            file.write("INFO 11-21 14:14:06 [a.py:1] half of ")
            file.flush()
            await asyncio.sleep(1)
            file.write("a line\nINFO 11-21 14:14:06 [a.py:1] the last\n")
        log.rename(tmp_path / "fast-0.log.1")
        log.write_text("INFO 11-21 14:14:07 [a.py:1] begun anew\n")
        await until(lambda: "begun anew" in out.read_text())
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 10) == 0
    finally:
        process.kill()
        process.wait(60)
    shown = out.read_text()
    assert "half of a line" in shown
    assert "the last" in shown
    assert "Traceback" not in shown
