"""A router and fake engines as processes of their own, and an HTTP client that takes whatever bytes it is given."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from measure import free_port  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PATIENCE_S = (
    # an answer that takes longer is a hang: every timeout of the router is a second; the machine may be busy
    60.0
)
# The fakes' answers: pieces, bytes of each, seconds between them. The last tier has one too large for any buffer.
ENGINES = {
    "fast": (7, 6, 0.0),
    "balanced": (60, 20, 0.02),
    "precise": (500, 20_000, 0.0),
}
SETTINGS = """
[server]
keep_alive_s = 3
header_timeout_s = 1
body_timeout_s = 1
write_timeout_s = 1
resume_s = 1
resume_streams = 16
max_body_bytes = 262144
max_connections = 400
[limits]
default_max_tokens = 8
[engine]
check_tolerance = 0
[tiers.fast]
max_in_flight = 256
[tiers.balanced]
max_in_flight = 256
[tiers.precise]
max_in_flight = 256
[policy]
max_slowdown = 1e9
"""


@dataclass(frozen=True, slots=True)
class Running:
    """The router that is attacked, on loopback.

    Attributes:
        engines: Ports of its engines, by tier.
    """

    port: int
    process: psutil.Process
    log: Path
    engines: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Seen:
    """An answer; status 0: the connection was closed without one."""

    status: int
    body: bytes = b""


@contextmanager
def running(
    folder: Path,
    settings: str = SETTINGS,
    shapes: Mapping[str, tuple[int, int, float]] = ENGINES,
    router_environment: Mapping[str, str] | None = None,
    turned: str = "",
) -> Iterator[Running]:
    """Run three fake engines and a router in front of them; stop them at the end.

    Args:
        folder: For their files.
        settings: The router's, as TOML.
        shapes: Of the engines' answers, as ``ENGINES``.
        router_environment: Further variables of the router alone.
        turned: Python that the router's process runs first, to turn constants that are no settings.
    """
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("QARR_", "OTEL_"))
    }
    environment |= {
        "XDG_CONFIG_HOME": str(folder),
        "QARR_CACHE_DIR": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    config, log = folder / "chaos.toml", folder / "router.log"
    config.write_text(settings)
    argv = [
        sys.executable,
        "-c",
        f"{turned}\nfrom router.cli.main import main; main()",
        "serve",
        "--config",
        str(config),
    ]
    ports: dict[str, int] = {}
    with ExitStack() as stack:
        for tier, shape in shapes.items():
            port = ports[tier] = free_port()
            pieces, size, delay_s = shape
            answer = [chr(97 + n % 26) * (size - 1) + " " for n in range(pieces)]
            behaviour = folder / f"{tier}.json"
            behaviour.write_text(json.dumps({"answer": answer, "delay_s": delay_s}))
            engine = [sys.executable, "-m", "tests.fakes.engine", str(port)]
            shaped = {**environment, "FAKE_BEHAVIOUR": str(behaviour)}
            stack.enter_context(process(engine, shaped, subprocess.DEVNULL))
            argv += [f"--{tier}", f"http://127.0.0.1:{port}"]
        port = free_port()
        output = stack.enter_context(log.open("wb"))
        own = {**environment, **(router_environment or {})}
        router = stack.enter_context(process([*argv, "--port", str(port)], own, output))
        _wait_until_ready(port, router, log)
        yield Running(port, psutil.Process(router.pid), log, ports)


@contextmanager
def process(
    argv: list[str], environment: dict[str, str], output: object
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process, and end it."""
    started = subprocess.Popen(
        argv, cwd=ROOT, env=environment, stdout=output, stderr=output
    )  # type: ignore[call-overload]
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def _wait_until_ready(port: int, router: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert router.poll() is None, log.read_text()[-2000:]
        try:
            with socket.create_connection(("127.0.0.1", port), 1) as sock:
                sock.sendall(
                    b"GET /readyz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
                )
                answer = b""
                while part := sock.recv(65536):
                    answer += part
            if b" 200 " in answer[:16] and answer.count(b'"ready"') == 4:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise TimeoutError(log.read_text()[-2000:])


@dataclass(slots=True)
class Wire:
    """One connection to the router."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def open(cls, port: int, *, small: bool = False) -> Wire:
        """Connect; with a small receive buffer, for clients that are not going to read."""
        sock = socket.socket()
        if small:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        return cls(*await asyncio.open_connection(sock=sock))

    async def send(self, data: bytes) -> None:
        """Send bytes; a closed connection is no error: what it answered before is what counts."""
        try:
            self.writer.write(data)
            await self.writer.drain()
        except OSError:
            pass

    async def answer(self, *, head_only: bool = False) -> Seen:
        """Read one answer; of one that is cut off in its middle, what came.

        Args:
            head_only: It has no body, whatever its headers say.

        Raises:
            TimeoutError: It hangs.
        """
        body = b""
        status = 0
        try:
            async with asyncio.timeout(PATIENCE_S):
                head = await self.reader.readuntil(b"\r\n\r\n")
                while head.startswith(b"HTTP/1.1 100 "):
                    head = await self.reader.readuntil(b"\r\n\r\n")
                status = int(head.split(b" ", 2)[1])
                lowered = head.lower()
                if head_only:
                    return Seen(status)
                if b"transfer-encoding: chunked" in lowered:
                    while size := int(await self.reader.readuntil(b"\r\n"), 16):
                        body += (await self.reader.readexactly(size + 2))[:-2]
                    await self.reader.readexactly(2)
                elif b"content-length: " in lowered and status != 204:
                    length = lowered.partition(b"content-length: ")[2].partition(
                        b"\r\n"
                    )[0]
                    body = await self.reader.readexactly(int(length))
        except (asyncio.IncompleteReadError, OSError):
            pass
        return Seen(status, body)

    async def rest(self) -> bytes:
        """Read until the router closes.

        Raises:
            TimeoutError: It does not.
        """
        found = b""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while part := await self.reader.read(1 << 16):
                    found += part
        except OSError:
            pass
        return found

    def drop(self) -> None:
        """End the connection by a reset."""
        self.writer.transport.abort()


def generation(**body: object) -> bytes:
    """Return a request for /generate as bytes."""
    return post("/generate", {"prompt": "hi", **body})


def post(path: str, body: object, *headers: str) -> bytes:
    """Return a request as bytes."""
    raw = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        f"content-length: {len(raw)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


async def fetch(port: int, request: bytes) -> Seen:
    """Send one request on a connection of its own."""
    wire = await Wire.open(port)
    try:
        await wire.send(request)
        return await wire.answer()
    finally:
        wire.drop()
