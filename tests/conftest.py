"""Fixtures for all tests."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests.ports import reserved_ports
from tests.unit.made_configs import made_hub

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
# All clients without TLS settings trust the same certificates: these are read once.
pytest.MonkeyPatch().setattr("httpx._transports.default.create_ssl_context", cache(httpx.create_ssl_context))


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
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
    monkeypatch.setenv("QARR_BUDGETS__FILE", str(tmp_path_factory.mktemp("usage") / "usage.sqlite"))
    monkeypatch.setenv("QARR_PROFILE__AUTO", "false")
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))


class RedisServer:
    """A real Redis, for tests alone."""

    def __init__(self) -> None:
        program = shutil.which("redis-server")
        assert program, "redis-server is not installed: scripts/setup services, or apt-get install redis-server"
        (self._port,) = reserved_ports()
        self._argv = [program, "--port", str(self._port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self.url = f"redis://127.0.0.1:{self._port}/0"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._argv, stdout=subprocess.DEVNULL)
        while not self._answers():
            assert self.process.poll() is None
            time.sleep(0.02)

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
            return True
        return False

    def stop(self) -> None:
        self.resume()
        self.process.terminate()
        self.process.wait(10)

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    redis = RedisServer()
    yield redis
    redis.stop()


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    redis = RedisServer()
    yield redis
    redis.stop()
