"""When few files may be open, clients' connections leave some for connections to engines."""

from __future__ import annotations

import subprocess
import sys

import pytest

from router.server.connection_limit import (
    FILES_BESIDES,
    SPARE_CONNECTIONS,
    ConnectionLimit,
)


@pytest.mark.parametrize(
    ("files", "served", "spare"),
    [
        (2 * 4096 + FILES_BESIDES, 4096, SPARE_CONNECTIONS),
        (1 << 20, 4096, SPARE_CONNECTIONS),
        (1024, 384, SPARE_CONNECTIONS),
        (100, 37, 12),
        (1, 1, 0),
    ],
)
def test_each_connection_has_a_file_for_one_to_an_engine(
    files: int, served: int, spare: int
) -> None:
    """With as many files as the settings need, all their connections are served; with fewer files, fewer."""
    assert ConnectionLimit.of(4096, files) == ConnectionLimit(served, spare)


def test_the_log_says_how_many_connections_there_are_files_for() -> None:
    """A limit that cannot be raised is named with what it allows."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300));"
        "from router.server.connection_limit import allow_files; allow_files(4096)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "may open 300 files" in process.stderr
    assert "takes 112 connections" in process.stderr
