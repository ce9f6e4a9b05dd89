"""Routers in processes of their own, on one port, in front of fake engines."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.fakes.engine import Behaviour, FakeEngine, serving_all
from tests.ports import reserved_ports
from tests.waiting import within

QARR = Path(sys.executable).with_name("qarr")
NAMES = ("fast", "balanced", "precise")


@dataclass(slots=True)
class Routers:
    """Routers in processes of their own, on one port, in front of the same fake engines."""

    port: int
    runtime: Path
    behaviours: dict[str, Behaviour]
    arguments: list[str]
    environment: dict[str, str]
    started: list[asyncio.subprocess.Process] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, *more: str, **settings: str) -> asyncio.subprocess.Process:
        """Start a router, and wait until it is up."""
        process = await self.begin(*more, **settings)
        await self.is_up(process)
        return process

    async def begin(self, *more: str, **settings: str) -> asyncio.subprocess.Process:
        """Start a router with more arguments and environment variables."""
        process = await asyncio.create_subprocess_exec(
            *(str(QARR), "serve", *self.arguments, *more),
            env={**self.environment, **settings},
            stderr=asyncio.subprocess.PIPE,
        )
        self.started.append(process)
        return process

    async def is_up(self, process: asyncio.subprocess.Process) -> str:
        """Wait until a router says that it is up; return what it has said."""
        assert process.stderr is not None
        seen = b""
        async with asyncio.timeout(90):
            while b"all tiers ready" not in seen:
                line = await process.stderr.readline()
                assert line, seen.decode()
                seen += line
        return seen.decode()


@asynccontextmanager
async def running_routers(tmp_path: Path) -> AsyncIterator[Routers]:
    """Serve three fake engines, and stop whatever routers are started in front of them."""
    behaviours = {name: Behaviour() for name in NAMES}
    engines = [FakeEngine(behaviour).app for behaviour in behaviours.values()]
    (port,) = reserved_ports()
    async with serving_all(*engines) as urls:
        arguments = []
        for name, url in zip(NAMES, urls, strict=True):
            arguments += [f"--{name}", url]
        arguments += ["--port", str(port)]
        environment = {
            **os.environ,
            "QARR_SERVER__RUNTIME_DIR": str(tmp_path / "run"),
            "QARR_POLICY__MAX_SLOWDOWN": "1e9",
            "QARR_ENGINE__LOG_DIR": str(tmp_path / "logs"),
            # A line for each request would fill the pipe, which nobody reads any more.
            "QARR_TELEMETRY__LOG_LEVEL": "warning",
        }
        routers = Routers(
            port,
            tmp_path / "run",
            behaviours=behaviours,
            arguments=arguments,
            environment=environment,
        )
        try:
            yield routers
        finally:
            for process in routers.started:
                if process.returncode is None:
                    process.kill()
                await within(process.communicate(), "the process to end")
