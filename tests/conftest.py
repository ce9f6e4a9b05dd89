"""Fixtures for all tests."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """Run asynchronous tests on asyncio, as the router does."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the developer's own settings and exporters out of the tests."""
    for name in list(os.environ):
        if name.startswith(("QARR_", "OTEL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
