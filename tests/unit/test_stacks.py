"""What is told of a test whose time was over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from router.section import PROJECT

HANGING = """
import asyncio
from contextlib import asynccontextmanager

import pytest


@asynccontextmanager
async def never_open():
    await asyncio.Event().wait()  # the innermost line of the task
    yield


async def wait_in_a_task():
    async with never_open():
        pass


@pytest.mark.anyio
async def test_that_hangs():
    await asyncio.create_task(wait_in_a_task(), name="the waiting one")


def test_that_passes():
    pass
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "with workers"])
def test_a_test_whose_time_is_over_says_where_it_stood(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    """In the output of the run, with the line that each task waits at, also where pytest-xdist runs the test."""
    (tmp_path / "conftest.py").write_text("from tests.stacks import *\n")
    (tmp_path / "test_hanging.py").write_text(HANGING)
    options = [
        "-c",
        "/dev/null",
        "--rootdir",
        tmp_path,
        "-p",
        "no:cacheprovider",
        "--timeout",
        "3",
    ]
    options += [
        part
        for name in ("langsmith_plugin", "schemathesis", "locust")
        for part in ("-p", f"no:{name}")
    ]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *options,
            "--timeout-method",
            "thread",
            *workers,
            tmp_path,
        ],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    assert "test_hanging.py::test_that_hangs[asyncio] did not end within 3 s" in said
    assert "--- task the waiting one" in said
    assert "await asyncio.Event().wait()  # the innermost line of the task" in said
    assert "in test_that_hangs" in said
