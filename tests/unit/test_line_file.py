"""Files of lines: rotated, private, written beside the event loop, and what a full or stopped disk costs."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from router.line_file import LineWriter, PrivateFile, made_record
from router.policy.decision_log import read_log
from router.telemetry.logs import StderrHandler
from router.telemetry.settings import TelemetrySettings
from tests.unit.router_stack import router_stack
from tests.waiting import call_within, until

FULL = "/dev/full"


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def written(file: logging.Handler, text: str) -> None:
    file.handle(made_record("", logging.INFO, text))


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    """The file, also one that others could read before, its old ones, and a folder made for it are private."""
    path = tmp_path / "made/log"
    file = PrivateFile(path, 100, kept=2, what="the test's log")
    path.chmod(0o644)
    file.close()
    for _ in range(40):
        written(file, "x" * 20)
    file.close()
    assert sorted(names_in(path.parent)) == ["log", "log.1", "log.2"]
    for name in names_in(path.parent):
        assert mode(path.parent / name) == 0o600, name
    assert mode(path.parent) == 0o700


def test_what_is_no_file_keeps_its_mode(tmp_path: Path) -> None:
    """A device is written to without a change of its mode, and never renamed."""
    before = mode(tmp_path.__class__("/dev/null"))
    link = tmp_path / "log"
    link.symlink_to("/dev/null")
    file = PrivateFile(link, 10, kept=1, what="the test's log")
    for _ in range(5):
        written(file, "x" * 20)
    file.close()
    assert mode(link) == before
    assert names_in(tmp_path) == ["log"]


def test_each_file_begins_with_the_head(tmp_path: Path) -> None:
    """The head is written into each new file, also after another process has moved one away, and whenever it changes."""
    writer = LineWriter(tmp_path / "log", "the test's log", max_bytes=30, kept=9)
    for number in range(10):
        writer.put(b"line %d" % number, b"head")
    writer.close()
    (tmp_path / "log").rename(tmp_path / "away")
    again = LineWriter(tmp_path / "log", "the test's log", max_bytes=60, kept=9)
    again.put(b"line", b"head")
    again.put(b"last", b"other")
    again.close()
    assert all(lines(path)[0] == "head" for path in tmp_path.iterdir())
    assert lines(tmp_path / "log") == ["head", "line", "other", "last"]


def test_a_file_that_is_moved_or_removed_is_begun_anew(tmp_path: Path) -> None:
    """Another router or a person may move the file or remove it, even with its folder: it is begun anew."""
    path = tmp_path / "made/log"
    file = PrivateFile(path, 0, kept=0, what="the test's log")
    written(file, "one")
    path.rename(tmp_path / "away")
    written(file, "two")
    assert lines(tmp_path / "away") == ["one"]
    assert lines(path) == ["two"]
    shutil.rmtree(path.parent)
    written(file, "three")
    file.close()
    assert lines(path) == ["three"]


def test_lines_that_come_together_are_written_at_once(tmp_path: Path) -> None:
    file = PrivateFile(tmp_path / "log", 0, kept=0, what="the test's log")
    file.setLevel(logging.INFO)
    file.write(
        [
            made_record("", level, str(level))
            for level in (logging.INFO, logging.DEBUG, logging.ERROR)
        ]
    )
    file.close()
    assert lines(tmp_path / "log") == ["20", "40"]


def test_a_full_disk_is_told_when_it_begins_and_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many lines are lost, the log has two lines about them, and later lines are written."""
    monkeypatch.setattr("router.line_file.CALM_S", 0.0)
    path = tmp_path / "log"
    path.symlink_to(FULL)
    file = PrivateFile(path, 1000, kept=1, what="the test's log")
    for _ in range(5):
        file.write([made_record("", logging.INFO, "lost")] * 10)
    path.unlink()
    for _ in range(50):
        written(file, "kept")
    file.close()
    assert lines(path) == ["kept"] * 50
    assert caplog.messages == [
        f"the test's log {path} cannot be written (No space left on device): lines are lost until the log says how many",
        f"the test's log {path} is written again; up to 50 lines are lost",
    ]


@contextmanager
def full_disk(path: Path, free: int) -> Iterator[None]:
    """Let this process write only so many bytes more to a file: a write that does not fit is cut off, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("together", [1, 3])
def test_after_a_full_disk_the_next_line_begins_on_a_line_of_its_own(
    tmp_path: Path, together: int
) -> None:
    """Part of the line that did not fit is in the file; the next line is complete."""
    path = tmp_path / "log"
    file = PrivateFile(path, 0, kept=0, what="the test's log")
    written(file, "first")
    with full_disk(path, free=4):
        file.write([made_record("", logging.INFO, "does not fit")] * together)
    written(file, "next")
    written(file, "last")
    file.close()
    assert lines(path) == ["first", "does", "next", "last"]


def test_a_file_whose_last_line_was_cut_off_goes_on_with_a_line_of_its_own(
    tmp_path: Path,
) -> None:
    """After a router was killed on a full disk, the next one begins a new line, with the head."""
    path = tmp_path / "log"
    path.write_text("head\nwhole\ncut o")
    writer = LineWriter(path, "the test's log")
    for line in (b"next", b"last"):
        writer.put(line, b"head")
    writer.close()
    assert lines(path) == ["head", "whole", "cut o", "head", "next", "last"]


def test_standard_error_in_a_file_goes_on_with_a_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a part of a line was written before the disk was full, the next line is complete."""
    path = tmp_path / "stderr"
    with path.open("a", buffering=1) as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        stream = StderrHandler(TelemetrySettings(log_format="json"))
        stream.setFormatter(logging.Formatter("%(msg)s"))
        written(stream, "first")
        for free in (4, 0):
            with full_disk(path, free):
                # Python does not keep so much to write it later.
                written(stream, "x" * (1 << 16))
        written(stream, "next")
        written(stream, "last")
    first, *cut_off, next_line, last = lines(path)
    assert first == "first"
    assert next_line == "next"
    assert last == "last"
    assert set("".join(cut_off)) == {"x"}


def test_a_disk_that_does_not_answer_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lines that do not fit into the queue are left out and counted, and the end waits for a bounded time only."""
    monkeypatch.setattr("router.line_file.LAST_LINES_S", 0.1)
    monkeypatch.setattr("router.line_file.QUEUED_LINES", 10)
    # To open a pipe waits for its reader.
    os.mkfifo(tmp_path / "log")
    writer = LineWriter(tmp_path / "log", "the test's log")
    for number in range(100):
        writer.put(b"line %d" % number)
    thread = writer._writer._thread
    writer.close()
    with (tmp_path / "log").open("rb") as reader:
        lines = call_within(lambda: [reader.readline() for _ in range(10)], "ten lines")
        assert lines == [b"line %d\n" % number for number in range(10)]
    thread.join(10)
    writer._file.close()
    assert (
        "lines are left out here: they came faster than they could be written"
        in caplog.text
    )


@pytest.mark.anyio
async def test_a_full_disk_costs_no_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Requests are answered as usual, nothing is written to standard error, and the log reports it once."""
    async with router_stack(tmp_path, {"telemetry": {"decision_log": FULL}}) as stack:
        for _ in range(20):
            assert (await stack.generate(stream=False)).status_code == 200
        await until(lambda: "decision log" in caplog.text)
    assert [message for message in caplog.messages if "decision log" in message] == [
        f"the decision log {FULL} cannot be written (No space left on device): lines are lost until the log says how many"
    ]
    assert capsys.readouterr().err == ""


@pytest.mark.anyio
async def test_decisions_are_written_by_a_thread(tmp_path: Path) -> None:
    """When the router has ended, all decisions and outcomes are in the file, each kind in order."""
    path = tmp_path / "log/decisions"
    async with router_stack(
        tmp_path, {"telemetry": {"decision_log": str(path)}}
    ) as stack:
        ids = [
            (await stack.generate(stream=False)).headers["x-request-id"]
            for _ in range(5)
        ]
    rows = [json.loads(line) for line in lines(path)]
    for kind in ("decision", "outcome"):
        assert [row["request_id"] for row in rows if row["kind"] == kind] == ids
    assert len(list(read_log(path))) == 11
    assert mode(path) == 0o600
