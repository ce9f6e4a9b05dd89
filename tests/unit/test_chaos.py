"""Short runs of benchmarks/chaos, on router processes of their own."""

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
async def test_routers_share_and_none_is_wedged_while_redis_fails() -> None:
    """Two routers keep to every engine's limit, get equal parts of it, and share again after each fault of Redis."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "benchmarks/chaos/routers.py", "--minutes", "0.5", "--routers", "2",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=PROJECT,
    )  # fmt: skip
    output, _ = await process.communicate()
    shown = output.decode()
    assert process.returncode == 0, shown
    assert "wedged routers: 0" in shown
    for fault in ("paused", "read-only", "full", "emptied", "restarted"):
        assert fault in shown
