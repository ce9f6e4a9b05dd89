"""A test whose time is over is reported with the stacks of its tasks."""

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
    """The run's output has the line that each task waits at, also when pytest-xdist runs the test."""
    (tmp_path / "conftest.py").write_text("from tests.stacks import *\n")
    (tmp_path / "test_hanging.py").write_text(HANGING)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null"]
    command += ["--rootdir", str(tmp_path), "--timeout", "3"]
    command += ["--timeout-method", "thread"]
    for plugin in ("cacheprovider", "langsmith_plugin", "schemathesis", "locust"):
        command += ["-p", f"no:{plugin}"]
    process = subprocess.run(
        [*command, *workers, str(tmp_path)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    output = process.stdout + process.stderr
    assert process.returncode != 0, output
    assert "test_hanging.py::test_that_hangs[asyncio] did not end within 3 s" in output
    assert "--- task the waiting one" in output
    assert "await asyncio.Event().wait()  # the innermost line of the task" in output
    assert "in test_that_hangs" in output
