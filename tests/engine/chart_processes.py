"""Containers of the chart as processes of this machine: started, waited for, stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx

from router.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

PYTHON = load_settings().engine.python
STARTS_S = 300


@contextmanager
def running(
    argv: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command whose output goes to a file, and kill all its processes afterwards."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, env=dict(environment), stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def until_ok(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until an address answers 200, while its process runs."""
    deadline = time.monotonic() + STARTS_S
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
