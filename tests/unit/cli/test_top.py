"""``qarr top``, in a terminal of its own and as text."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from tests.fakes.engine import Behaviour
from tests.unit.own_router import QARR, own_router
from tests.waiting import until

pytestmark = pytest.mark.anyio


async def test_top_in_a_terminal(tmp_path: Path) -> None:
    """Live tiers and requests; a killed router is told of and found again; it leaves the other screen at the end."""
    shown = tmp_path / "shown"
    size = {"COLUMNS": "170", "LINES": "40", "TERM": "xterm-256color"}

    def after(mark: int = 0) -> str:
        return shown.read_bytes()[mark:].decode("utf-8", "replace")

    async with own_router(
        tmp_path, [Behaviour(delay_s=0.3) for _ in range(3)]
    ) as router:
        command = shlex.join([QARR, "top"])
        argv = ["script", "-qfec", f"exec {command}", str(shown)]
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env={**router.env, **size},
        )
        try:
            await until(lambda: shown.exists() and "3/3 tiers ready" in after())
            asking = asyncio.create_task(router.generate())
            await until(lambda: "decode" in after())
            assert (await asking).status_code == 200
            await until(lambda: "small talk, trivial: no precision" in after())
            router.kill()
            await until(lambda: "trying again" in after())
            await router.start()
            mark = shown.stat().st_size
            await until(
                lambda: (
                    "3/3 tiers ready" in after(mark)
                    and "trying again" not in after(mark)[-3000:]
                )
            )
            child = await asyncio.to_thread(
                Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text
            )
            os.kill(int(child), signal.SIGINT)
            assert await asyncio.to_thread(process.wait, 20) == 0
        finally:
            process.kill()
            process.communicate(timeout=60)
        assert "\x1b[?1049l" in after()
        assert "Traceback" not in after()


async def test_once_is_text(tmp_path: Path) -> None:
    """Tiers with what is wrong, and the last requests with their reasons; nothing acts on the terminal."""
    thinking = [Behaviour(reasoning=3) for _ in range(3)]
    async with own_router(tmp_path, thinking) as router:
        assert (await router.generate(stream=False)).status_code == 200
        once = await router.qarr("top", "--once")
        assert once.returncode == 0
        assert "\x1b" not in once.stdout
        parts = ("3/3 tiers ready", "fast-0", "0/", "ENDED", "small talk, trivial")
        for part in (*parts, "TTFA", "10+7 (3 thought)"):
            assert part in once.stdout


async def test_without_a_router() -> None:
    """Status 2, where it looked, and what to do."""
    argv = [QARR, "top", "--url", "http://127.0.0.1:9"]
    result = await asyncio.to_thread(
        subprocess.run, argv, capture_output=True, text=True, check=False, timeout=100
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert "no router answers at http://127.0.0.1:9" in result.stderr
