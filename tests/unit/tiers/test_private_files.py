"""Files and folders that only their owner may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tiers.private_files import ends_within_line, make_private_folder, open_private


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_new_files_and_folders_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private_folder(tmp_path / "a" / "b")
        with open(tmp_path / "a" / "b" / "log", "w", opener=open_private) as file:
            file.write("x")
    finally:
        os.umask(before)
    assert mode(tmp_path / "a" / "b") == 0o700
    assert mode(tmp_path / "a" / "b" / "log") == 0o600


def test_a_file_that_all_could_read_becomes_private(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("old ")
    path.chmod(0o644)
    with open(path, "a", opener=open_private) as file:
        file.write("new")
    assert mode(path) == 0o600
    assert path.read_text() == "old new"


def test_a_folder_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    """A person may have opened it to a group on purpose."""
    folder = tmp_path / "logs"
    folder.mkdir()
    folder.chmod(0o750)
    make_private_folder(folder)
    assert mode(folder) == 0o750


def test_devices_are_left_alone() -> None:
    before = mode(Path("/dev/null"))
    with open("/dev/null", "w", opener=open_private):
        pass
    assert mode(Path("/dev/null")) == before


def test_what_cannot_be_opened_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_private(str(tmp_path / "no" / "file"), os.O_WRONLY)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        make_private_folder(tmp_path / "file")


@pytest.mark.parametrize(
    ("text", "cut_off"),
    [("", False), ("whole\n", False), ("whole\ncut", True), ("\n", False)],
)
def test_a_file_that_ends_within_a_line_is_known(
    tmp_path: Path, text: str, *, cut_off: bool
) -> None:
    """Also where it is open for writing alone."""
    path = tmp_path / "log"
    path.write_text(text)
    with path.open("a") as file:
        assert ends_within_line(file.fileno()) is cut_off


def test_devices_and_pipes_do_not_end_within_a_line() -> None:
    reading, writing = os.pipe()
    with (
        Path("/dev/full").open("w") as device,
        os.fdopen(reading),
        os.fdopen(writing, "w") as pipe,
    ):
        assert not ends_within_line(device.fileno())
        assert not ends_within_line(pipe.fileno())
