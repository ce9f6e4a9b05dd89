"""The attacks of benchmarks/chaos, and a few hundred of its requests, on a router process of their own."""

from __future__ import annotations

import asyncio
import sys

import pytest

from router.settings import PROJECT

pytestmark = pytest.mark.anyio


@pytest.mark.timeout(300)
async def test_malformed_requests_and_attacks_leave_no_trace() -> None:
    """No 5xx, no hang, no traceback, good requests served throughout, and nothing held at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "benchmarks/chaos/fuzz.py", "--requests", "500", "--seed", "3",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=PROJECT,
    )  # fmt: skip
    output, _ = await process.communicate()
    shown = output.decode()
    assert process.returncode == 0, shown
    assert "faults         0" in shown
    for status in ("200:", "400:", "408:", "413:", "431:", "503:"):
        assert status in shown


@pytest.mark.timeout(300)
async def test_answers_that_break_anywhere_are_right_or_end_with_an_error() -> None:
    """A few hundred made-up answers, broken off at all places: no text is wrong, whatever /detokenize says."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "benchmarks/chaos/continuations.py", "--seeds", "1-2", "--rounds", "120",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=PROJECT,
    )  # fmt: skip
    output, _ = await process.communicate()
    shown = output.decode()
    assert process.returncode == 0, shown
    assert shown.count("faults: 0") == 3
    assert "error event" in shown
