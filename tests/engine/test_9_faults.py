"""Engines and supervisor killed. Runs last: the stack does not survive it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from tests.engine.conftest import Up


def test_killed_engine_is_seen_and_the_others_serve(up: Up) -> None:
    """After kill -9 of an idle engine its tier shows as failed with the engine's last words, and requests succeed."""
    pid = up.replica("balanced")["pid"]
    below = psutil.Process(pid).children(recursive=True)
    os.kill(pid, signal.SIGKILL)
    _until(lambda: up.tiers()["balanced"]["state"] == "failed")
    assert "exited with status" in up.replica("balanced")["detail"]
    assert not [p for p in below if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    answer = up.generate(tier="balanced")
    assert answer.status_code == 200
    assert answer.headers["x-qarr-tier"] == "precise"
    assert "hint balanced not taken: is failed" in answer.headers["x-qarr-reason"]
    assert up.generate(prompt="hi").headers["x-qarr-tier"] == "fast"


def test_killed_supervisor_leaves_no_engine(up: Up) -> None:
    """After kill -9 of ``qarr up`` every process that it started, at any depth, is gone within seconds."""
    everything = psutil.Process(up.process.pid if up.process else None).children(recursive=True)
    assert len(everything) >= 6  # guards and engines, and below them the engines' own processes
    logs = {Path(p.cwd()) for p in everything if p.is_running()}
    assert logs
    assert up.process is not None
    up.process.kill()
    up.process.wait()
    _until(lambda: not [p for p in everything if p.is_running() and p.status() != psutil.STATUS_ZOMBIE])


def _until(condition: object, limit_s: float = 20) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
