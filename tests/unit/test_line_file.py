"""Files of lines: rotated, private, and written beside the event loop; what a full or stopped disk costs."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from router.line_file import LineFile, LineWriter, LostLines
from router.policy.decision_log import read_log
from router.profiling.prompt_samples import MAX_PROMPTS
from tests.unit.own_engines import until
from tests.unit.router_stack import router_stack

if TYPE_CHECKING:
    from pathlib import Path

FULL = "/dev/full"


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    """The file, its old ones, also one that others could read, and a folder that is made for it."""
    path = tmp_path / "made/log"
    file = LineFile(path, 100, 2)
    file.open()
    path.chmod(0o644)
    file.close()
    for _ in range(40):
        file.write(b"x" * 20)
    file.close()
    assert sorted(p.name for p in path.parent.iterdir()) == ["log", "log.1", "log.2"]
    assert {mode(p) for p in path.parent.iterdir()} == {0o600}
    assert mode(path.parent) == 0o700


def test_what_is_no_file_keeps_its_mode(tmp_path: Path) -> None:
    """A device is written to as it is, and never renamed."""
    before = mode(tmp_path.__class__("/dev/null"))
    link = tmp_path / "log"
    link.symlink_to("/dev/null")
    file = LineFile(link, 10, 1)
    for _ in range(5):
        file.write(b"x" * 20)
    file.close()
    assert mode(link) == before
    assert [p.name for p in tmp_path.iterdir()] == ["log"]


def test_each_file_begins_with_the_head(tmp_path: Path) -> None:
    """Also one that another process has renamed meanwhile, and it comes again before the next line when it changes."""
    file = LineFile(tmp_path / "log", 30, 9)
    file.head = b"head"
    for number in range(10):
        file.write(b"line %d" % number)
    os.rename(tmp_path / "log", tmp_path / "away")  # noqa: PTH104
    file.write(b"line")
    file.head = b"other"
    file.write(b"last")
    file.close()
    assert all(lines(path)[0] == "head" for path in tmp_path.iterdir())
    assert lines(tmp_path / "log") == ["head", "line", "other", "last"]


def test_a_cut_line_takes_no_other_with_it(tmp_path: Path) -> None:
    """Where only a part of a line could be written, the next one begins a line of its own, after the head once more."""
    file = LineFile(tmp_path / "log", 0, 1)
    file.head = b"head"
    file.write(b"one")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, hard))
    try:
        with pytest.raises(OSError, match="6 of 11 bytes were written"):
            file.write(b"0123456789")
        with pytest.raises(OSError, match="File too large"):
            file.write(b"lost")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.write(b"two")
    file.close()
    assert lines(tmp_path / "log") == ["head", "one", "012345", "head", "two"]


def test_of_lines_written_together_the_whole_ones_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that fills up takes some of them: those, and no more, count as lost."""
    monkeypatch.setattr("router.line_file.CALM_S", 0.0)
    file, losses = LineFile(tmp_path / "log", 0, 1), LostLines("the test's log")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        losses.write(file, [b"0123456"] * 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    losses.write(file, [b"after", b"wards"])
    file.close()
    assert lines(tmp_path / "log") == ["0123456", "0123456", "0123", "after", "wards"]
    assert [r.getMessage() for r in caplog.records][-1] == "the test's log is written again; 8 lines are lost"


WRITES = """
import sys
from pathlib import Path
from router.line_file import LineFile
file = LineFile(Path(sys.argv[1]), 400, 200)
for number in range(0, 1500, 5):
    lines = [b"%s %d" % (sys.argv[2].encode(), n) for n in range(number, number + 5)]
    while lines:
        lines = lines[file.write(*lines):]
"""


def test_lines_written_together_fill_one_file_after_another(tmp_path: Path) -> None:
    """As if they had been written one by one."""
    file, losses = LineFile(tmp_path / "log", 20, 9), LostLines("the test's log")
    losses.write(file, [b"0123456"] * 7)
    file.close()
    assert [lines(path) for path in sorted(tmp_path.iterdir())] == [["0123456"], ["0123456"] * 3, ["0123456"] * 3]


def test_processes_that_write_one_file_lose_nothing(tmp_path: Path) -> None:
    """Each renames the full file, none of them another's: every line is there once, and each one's are in order."""
    argv = [sys.executable, "-c", WRITES, str(tmp_path / "log")]
    writers = [subprocess.Popen([*argv, name]) for name in ("a", "b", "c")]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    ages = sorted((int(path.suffix[1:] or 0), path) for path in tmp_path.iterdir())
    found = [line.split() for _, path in reversed(ages) for line in lines(path)]
    for name in ("a", "b", "c"):
        assert sorted(int(number) for writer, number in found if writer == name) == list(range(1500))


def test_a_full_disk_is_told_when_it_begins_and_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many lines are lost: two lines in the log, with their number; what comes after is written."""
    monkeypatch.setattr("router.line_file.CALM_S", 0.0)
    path = tmp_path / "log"
    path.symlink_to(FULL)
    writer = LineWriter(LineFile(path, 1000, 1), "the test's log")
    for _ in range(50):
        writer.put(b"lost", b"head")
    writer.close()
    path.unlink()
    for _ in range(50):
        writer.put(b"kept", b"head")
    writer.close()
    assert lines(path) == ["head", *["kept"] * 50]
    assert [r.getMessage() for r in caplog.records] == [
        f"the test's log {path} cannot be written (No space left on device): lines are lost until the log says how many",
        f"the test's log {path} is written again; 50 lines are lost",
    ]


def test_a_disk_that_does_not_answer_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lines that do not fit into the queue are lost, and the end waits for a bounded time only."""
    monkeypatch.setattr("router.line_file.LAST_LINES_S", 0.1)
    monkeypatch.setattr("router.line_file.QUEUED_LINES", 10)
    os.mkfifo(tmp_path / "log")  # opening it waits for a reader
    writer = LineWriter(LineFile(tmp_path / "log", 0, 1), "the test's log")
    for _ in range(100):
        writer.put(b"line")
    writer.close()
    assert len(caplog.records) == 1
    assert "cannot be written as fast as lines come" in caplog.text
    with (tmp_path / "log").open("rb") as reader:  # let the thread end
        assert reader.readline() == b"line\n"


@pytest.mark.anyio
async def test_a_full_disk_costs_no_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Requests are answered as ever, nothing is written to standard error, and the log says it once."""
    async with router_stack(tmp_path, {"telemetry": {"decision_log": FULL}}) as stack:
        for _ in range(20):
            assert (await stack.generate(stream=False)).status_code == 200
        await until(lambda: "decision log" in caplog.text)
    assert [r.getMessage() for r in caplog.records if "decision log" in r.getMessage()] == [
        f"the decision log {FULL} cannot be written (No space left on device): lines are lost until the log says how many"
    ]
    assert capsys.readouterr().err == ""


@pytest.mark.anyio
async def test_sampled_prompts_are_written_by_a_thread(tmp_path: Path) -> None:
    """Beside what the file has already, up to so many, and readable by its owner only."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("{}\n" * (MAX_PROMPTS - 2))
    settings = {"telemetry": {"sampled_prompts": str(path), "prompt_share": 1.0}}
    async with router_stack(tmp_path, settings) as stack:
        for number in range(4):
            await stack.generate(prompt=f"prompt {number} \u20ac", stream=False)
    assert [json.loads(line)["text"] for line in lines(path)[-2:]] == ["prompt 0 \u20ac", "prompt 1 \u20ac"]
    assert len(lines(path)) == MAX_PROMPTS
    assert mode(path) == 0o600


@pytest.mark.anyio
async def test_decisions_are_written_by_a_thread(tmp_path: Path) -> None:
    """All of them are there when the router has ended, in order, and the thread is gone."""
    path = tmp_path / "log/decisions"
    async with router_stack(tmp_path, {"telemetry": {"decision_log": str(path)}}) as stack:
        ids = [(await stack.generate(stream=False)).headers["x-request-id"] for _ in range(5)]
    assert [json.loads(line).get("request_id") for line in lines(path)] == [None, *(i for i in ids for _ in range(2))]
    assert len(list(read_log(path))) == 11
    assert mode(path) == 0o600
    assert not [t for t in threading.enumerate() if t.name == "writes decisions"]
