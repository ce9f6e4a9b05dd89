"""Real servers for these tests: started on free ports, waited for, stopped."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from tests.waiting import within

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
TOOLS = ROOT / ".venv-deploy/bin"


def program(name: str) -> str:
    """Return the path of a program that ``scripts/setup services`` or ``scripts/setup deploy`` installs."""
    path = TOOLS / name if (TOOLS / name).is_file() else shutil.which(name)
    assert path, (
        f"{name} is not installed: scripts/setup services && scripts/setup deploy"
    )
    return str(path)


@asynccontextmanager
async def running(
    argv: list[str], ready: str, cwd: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a server until the context ends.

    Args:
        argv: The server's command.
        ready: The URL that answers 200 when the server is ready.
        cwd: The folder that it runs in, and writes its output to.
    """
    log = cwd / f"{Path(argv[0]).name}.out"
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *argv, cwd=cwd, stdout=out, stderr=out
        )
    try:
        async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(30):
            while not await _answers(client, ready):
                assert process.returncode is None, log.read_text("utf-8")
                await asyncio.sleep(0.05)
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await within(process.wait(), "the process to end")


async def _answers(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(url)).status_code == 200
    except httpx.TransportError:
        return False
