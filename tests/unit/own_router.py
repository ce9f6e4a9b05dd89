"""The command as operators run it: ``qarr serve`` in a process of its own, in front of fakes, and commands beside it."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.fakes.engine import Behaviour, FakeEngine, serving_all
from tests.ports import reserved_ports
from tests.unit.certificates import Files
from tests.waiting import until
from tiers.spec import STANDARD_TIERS

QARR = str(Path(sys.executable).with_name("qarr"))


@asynccontextmanager
async def connection(**headers: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        trust_env=False, timeout=30, headers=headers
    ) as client:
        yield client


@dataclass(slots=True)
class OwnRouter:
    """A router in a process of its own.

    Attributes:
        log_dir: The folder of its logs.
        errors: The file of its standard error.
        engines: The URLs of the fake engines, fast first.
        behaviours: The behaviours of the fake engines.
    """

    url: str
    port: int
    log_dir: Path
    errors: Path
    engines: list[str]
    behaviours: list[Behaviour]
    env: dict[str, str]
    client: httpx.AsyncClient
    process: subprocess.Popen[bytes]

    async def generate(self, **body: Any) -> httpx.Response:
        return await self.client.post(
            f"{self.url}/generate", json={"prompt": "hi", **body}
        )

    async def qarr(self, *args: str) -> subprocess.CompletedProcess[str]:
        return await asyncio.to_thread(
            subprocess.run,
            [QARR, *args],
            capture_output=True,
            text=True,
            check=False,
            env=self.env,
            timeout=60,
        )

    def kill(self) -> None:
        """Kill the router, so that it can inform nobody."""
        self.process.kill()
        self.process.wait(60)

    async def start(self) -> None:
        """Start the router, or start it again, and wait until it is ready."""
        command = [QARR, "serve"]
        for name, url in zip(STANDARD_TIERS, self.engines, strict=True):
            command += [f"--{name}", url]
        with self.errors.open("ab") as errors:
            self.process = subprocess.Popen(command, stderr=errors, env=self.env)
        await self.until_ready()
        await until(lambda: "up: listening" in self.errors.read_text("utf-8"))

    async def until_ready(self) -> None:
        async def is_ready() -> bool:
            assert self.process.poll() is None, self.errors.read_text()
            return await self.status() == httpx.codes.OK

        await until(is_ready, "/readyz to answer 200")

    async def stop(self) -> int:
        self.process.terminate()
        return await asyncio.to_thread(self.process.wait, 30)

    async def status(self) -> int:
        try:
            return (await self.client.get(f"{self.url}/readyz")).status_code
        except httpx.HTTPError:
            return 0


@asynccontextmanager
async def own_router(
    tmp_path: Path,
    behaviours: Sequence[Behaviour] = (),
    *,
    ca: Path | ssl.SSLContext | None = None,
    shown_by_engines: Files | None = None,
    **settings: str,
) -> AsyncIterator[OwnRouter]:
    """Run a router in front of one fake engine a tier.

    Args:
        tmp_path: The folder of its files.
        behaviours: The behaviours of the fake engines, fast first.
        ca: The authority that its certificate is trusted by; with None it serves plain HTTP.
        shown_by_engines: The certificate of the fake engines; with None they serve plain HTTP.
        settings: Further variables, as in ``QARR_TELEMETRY__LOG_FORMAT="json"``.
    """
    async with AsyncExitStack() as cleanup:
        trust = ssl.create_default_context(cafile=ca) if isinstance(ca, Path) else ca
        fakes = list(behaviours) or [Behaviour() for _ in STANDARD_TIERS]
        tls = {} if shown_by_engines is None else shown_by_engines.served
        engines = await cleanup.enter_async_context(
            serving_all(*(FakeEngine(fake).app for fake in fakes), **tls)
        )
        client = await cleanup.enter_async_context(
            httpx.AsyncClient(timeout=20, trust_env=False, verify=trust or True)
        )
        (port,) = reserved_ports()
        env = {
            **os.environ,
            "QARR_SERVER__PORT": str(port),
            "QARR_ENGINE__LOG_DIR": str(tmp_path / "logs"),
            "QARR_SERVER__RUNTIME_DIR": str(tmp_path / "run"),
            "QARR_POLICY__MAX_SLOWDOWN": "1e9",
            **settings,
        }
        process: Any = None
        scheme = "http" if ca is None else "https"
        router = OwnRouter(
            f"{scheme}://127.0.0.1:{port}",
            port=port,
            log_dir=tmp_path / "logs",
            errors=tmp_path / "stderr",
            engines=engines,
            behaviours=fakes,
            env=env,
            client=client,
            process=process,
        )
        try:
            await router.start()
            yield router
        finally:
            if router.process is not None and router.process.poll() is None:
                router.kill()
