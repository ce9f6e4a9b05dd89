"""Short runs of benchmarks/chaos, on routers of their own."""

from __future__ import annotations

import asyncio
import sys

import pytest

from router.section import PROJECT
from tests.waiting import within

pytestmark = pytest.mark.anyio


async def shown_by(script: str, options: str) -> str:
    """Run a script of benchmarks/chaos, which must end with status 0; return what it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        f"benchmarks/chaos/{script}",
        *options.split(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=PROJECT,
    )
    output, _ = await within(process.communicate(), "the process to end", within_s=250)
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.mark.timeout(300)
async def test_malformed_requests_and_attacks_leave_no_trace() -> None:
    """No 5xx, no hang, no traceback, good requests served throughout, and nothing held at the end."""
    shown = await shown_by("fuzz.py", "--requests 500 --seed 3")
    assert "faults         0" in shown
    for status in ("200:", "400:", "408:", "413:", "431:", "503:"):
        assert status in shown


@pytest.mark.timeout(300)
async def test_routers_share_and_none_is_wedged_while_redis_fails() -> None:
    """Two routers keep to every engine's limit, get equal parts of it, and share again after each fault of Redis."""
    shown = await shown_by("routers.py", "--minutes 0.5 --routers 2")
    assert "wedged routers: 0" in shown
    for fault in ("paused", "read-only", "full", "emptied", "restarted"):
        assert fault in shown


@pytest.mark.timeout(300)
async def test_requests_that_are_cut_off_leave_nothing() -> None:
    """Requests are cut off at random awaits, and by clients that leave at random moments while engines fail."""
    shown = await shown_by("cancellations.py", "--rounds 60 --clients 60 --seed 3")
    assert "left over             nothing" in shown
    assert "'left'" in shown


@pytest.mark.timeout(300)
async def test_faults_of_engines_cost_no_chats() -> None:
    """While an engine hangs, while one answers nonsense and when the clock is set, every request is answered well."""
    faults = ("hung-tokenize", "malformed-generation", "clock-forward")
    shown = await shown_by("faults.py", f"--seconds 2 --faults {' '.join(faults)}")
    for fault in faults:
        (row,) = (line.split() for line in shown.splitlines() if line.startswith(fault))
        requests, ok, *others = map(int, row[1:7])
        assert ok == requests, shown
        assert others == [0] * 4, shown
        assert requests > 0


@pytest.mark.timeout(300)
async def test_answers_that_break_anywhere_are_right_or_end_with_an_error() -> None:
    """Of a few hundred made-up answers, broken off at any place, no text is wrong, whatever /detokenize says."""
    shown = await shown_by("continuations.py", "--seeds 1-2 --rounds 120")
    assert shown.count("faults: 0") == 3
    assert "error event" in shown
