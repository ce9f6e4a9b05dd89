"""Fixtures for all tests."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests.ports import reserved_ports
from tests.stacks import (  # noqa: F401  pytest finds them here
    pytest_configure_node,
    pytest_terminal_summary,
    pytest_timeout_cancel_timer,
    pytest_timeout_set_timer,
    pytest_unconfigure,
)
from tests.unit.made_configs import made_hub
from tests.waiting import wait_until

# Real engines serve this twin of the model (tests/engine/twins.py). The variable is removed: qarr refuses unknown settings.
CHOSEN_TWIN = os.environ.pop("QARR_TEST_TWIN", "")

settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
# All clients without TLS settings trust the same certificates: these are read once.
pytest.MonkeyPatch().setattr(
    "httpx._transports.default.create_ssl_context", cache(httpx.create_ssl_context)
)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Hugging Face cache of all tests, with the models that fakes may say they serve: ``made/fast`` ..."""
    return made_hub(tmp_path_factory.mktemp("hub"))


@pytest.fixture(autouse=True)
def _clean_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, hub: Path
) -> None:
    clean_environment(monkeypatch, tmp_path_factory, hub)


def clean_environment(
    patch: pytest.MonkeyPatch, folders: pytest.TempPathFactory, hub: Path
) -> None:
    """Keep the developer's own settings and exporters out of the tests.

    A fixture of a module or of the session begins before the fixtures of a test: it calls this itself.
    """
    for name in list(os.environ):
        if name.startswith(("QARR_", "OTEL_")):
            patch.delenv(name)
    patch.setenv("QARR_POLICY__PROFILES", str(folders.mktemp("profiles")))
    patch.setenv("QARR_ENGINE__LOG_DIR", str(folders.mktemp("logs")))
    patch.setenv("QARR_BUDGETS__FILE", str(folders.mktemp("usage") / "usage.sqlite"))
    patch.setenv("QARR_PROFILE__AUTO", "false")
    patch.setenv("HF_HUB_CACHE", str(hub))
    patch.setenv("XDG_CONFIG_HOME", str(folders.mktemp("config")))


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the developer's own keys and usage out of whatever lives longer than a test, such as the session's engines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


class RedisServer:
    """A real Redis that only tests use."""

    def __init__(self, *options: str) -> None:
        program = shutil.which("redis-server")
        assert program, (
            "redis-server is not installed: scripts/setup services, or apt-get install redis-server"
        )
        (self.port,) = reserved_ports()
        self._argv = [program, "--port", str(self.port), "--bind", "127.0.0.1"]
        self._argv += ["--save", "", "--appendonly", "no"]
        # As a replica it writes no file either, which later servers would read.
        self._argv += ["--repl-diskless-load", "swapdb", *options]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._argv, stdout=subprocess.DEVNULL)
        wait_until(self._answers_or_has_ended, "Redis to answer")
        assert self.process.poll() is None

    def _answers_or_has_ended(self) -> bool:
        return self._answers() or self.process.poll() is not None

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def stop(self) -> None:
        self.resume()
        self.process.terminate()
        self.process.wait(10)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def restart_empty(self) -> None:
        self.stop()
        self.start()

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
