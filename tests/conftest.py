"""Fixtures for all tests."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.ports import reserved_ports
from tests.unit.made_configs import made_hub

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Run asynchronous tests on uvloop, as the router does."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Hugging Face cache of all tests, with the models that fakes may say they serve: ``made/fast`` ..."""
    return made_hub(tmp_path_factory.mktemp("hub"))


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, hub: Path) -> None:
    """Keep the developer's own settings and exporters out of the tests."""
    for name in list(os.environ):
        if name.startswith(("QARR_", "OTEL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("QARR_POLICY__PROFILES", str(tmp_path_factory.mktemp("profiles")))
    monkeypatch.setenv("QARR_ENGINE__LOG_DIR", str(tmp_path_factory.mktemp("logs")))
    monkeypatch.setenv("QARR_PROFILE__AUTO", "false")
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))


@dataclass(slots=True)
class RedisServer:
    """A real Redis, for this session of tests alone."""

    url: str
    process: subprocess.Popen[bytes]

    def pause(self) -> None:
        """Stop it from answering."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it answer again."""
        self.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """Start Redis on a free port."""
    program = shutil.which("redis-server")
    assert program, "redis-server is not installed: scripts/setup services, or apt-get install redis-server"
    (port,) = reserved_ports()
    process = subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
        stdout=subprocess.DEVNULL,
    )
    try:
        while True:
            assert process.poll() is None
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.02)
        yield RedisServer(f"redis://127.0.0.1:{port}/0", process)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(10)
