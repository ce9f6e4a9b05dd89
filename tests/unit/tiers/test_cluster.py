"""Engines on a Ray cluster, apart from Ray: the job and its files, what a node gives an engine, and who runs the placement."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ports import reserved_range
from tests.waiting import call_within, source_of, until, wait_until
from tiers.cluster.actor import DETACHED, hold_port, is_healthy, node_environment
from tiers.cluster.job import PlacementJob, WantedReplica, write_json
from tiers.cluster.runner import RayEngines, RayOptions
from tiers.errors import EngineError

ROOT = Path(__file__).resolve().parents[3]
IDS = ("ray-fast-0", "ray-precise-0")


def job(folder: Path) -> PlacementJob:
    replicas = tuple(
        WantedReplica(
            name,
            name.split("-")[1],
            checkpoint="/models/m",
            args=("--model", "/models/m"),
            env={"A": "1"},
            resources={"CPU": 2.0},
        )
        for name in IDS
    )
    return PlacementJob(
        "auto",
        replicas,
        engines_file=str(folder / "engines.json"),
        status_file=str(folder / "own/status.json"),
        log_dir=str(folder),
        stop_grace_s=0,
    )


def test_a_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    """Who has it open reads the old one to its end, and nothing else is left in the folder."""
    write_json(tmp_path / "x.json", [1])
    with (tmp_path / "x.json").open() as old:
        write_json(tmp_path / "x.json", [2])
        assert json.load(old) == [1]
    assert json.loads((tmp_path / "x.json").read_text()) == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_node_gives_engines_neither_rays_variables_nor_ours() -> None:
    """Secrets of other programs stay out, what a person gave for the tier wins, and the node's GPUs stay its own."""
    node = {
        "PATH": "/bin",
        "RAY_JOB_ID": "1",
        "QARR_STATE__REDIS_URL": "x",
        "HF_TOKEN": "x",
        "CUDA_VISIBLE_DEVICES": "3",
    }
    node |= {"PYTHONBREAKPOINT": "ray", "OTEL_EXPORTER_OTLP_HEADERS": "key"}
    own = {"VLLM_API_KEY": "k", "PATH": "/usr/bin"}
    expected = {"PATH": "/usr/bin", "CUDA_VISIBLE_DEVICES": "3", "VLLM_API_KEY": "k"}
    assert node_environment(node, own, traced=False) == expected
    assert node_environment(node, own, traced=True) == {
        **expected,
        "OTEL_EXPORTER_OTLP_HEADERS": "key",
    }


def test_two_engines_of_a_node_get_different_ports() -> None:
    """Before either listens; and a server that binds its port by number gets it, as vLLM does."""
    first = reserved_range(1)
    with hold_port("127.0.0.1", first) as one, hold_port("127.0.0.1", first) as other:
        ports = {one.getsockname()[1], other.getsockname()[1]}
        assert len(ports) == 2
        # The first one is taken.
        assert min(ports) > first
        for port in ports:
            with socket.create_server(("127.0.0.1", port)):
                assert not is_healthy("127.0.0.1", first)


class Running:
    """A runner whose placement does what the test orders."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.orders = folder / "orders"
        self.job = job(folder)
        program = folder / "python"
        program.write_text(
            f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m tests.fakes.placement "$2"\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("FAKE_PLACEMENT", str(self.orders))
        self.order([])
        self.options = RayOptions(program, folder / "own", job=self.job, api_key="key")
        self.lines: list[str] = []
        self.engines = RayEngines(self.options, self.lines.append)
        self.task = asyncio.create_task(self.engines.run())

    def order(self, told: Any) -> None:
        part = self.orders.with_suffix(".part")
        part.write_text(json.dumps(told))
        part.replace(self.orders)

    def named(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = json.loads(
            Path(self.job.engines_file).read_text()
        )
        return found

    async def until(self, true: Callable[[], bool]) -> None:
        def is_true() -> bool:
            assert not self.task.done(), self.task.exception()
            return true()

        await until(is_true, source_of(true))

    async def stop(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task


@pytest.mark.anyio
async def test_the_runner_tells_what_the_placement_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is settled when all were ready once, starts the placement again when that ends, and at its end nothing is left."""
    running = Running(tmp_path, monkeypatch)
    running.order([[IDS[0], "ready"], [IDS[1], "starting"]])
    await running.until(lambda: len(running.lines) >= 2)
    assert not running.engines.settled
    assert "ray-fast-0       ready: http://10.0.0.5:9101 answers: why" in running.lines
    assert "ray-precise-0    starting on 10.0.0.5: why" in running.lines
    running.order([[name, "ready"] for name in IDS])
    await running.until(lambda: running.engines.settled)
    assert running.named() == {
        "fast": ["http://10.0.0.5:9101"],
        "precise": ["http://10.0.0.5:9102"],
    }
    running.order([[IDS[0], "ready"], [IDS[1], "failed"]])
    await running.until(lambda: "failed" in running.lines[-1])
    running.order({"exit": 2, "error": "no cluster"})
    await running.until(
        lambda: (
            "the placement ended, and starts again in 2 s: no cluster"
            in running.lines[-1]
        )
    )
    assert running.named() == {"fast": [], "precise": []}
    running.order([[name, "ready"] for name in IDS])
    await running.until(lambda: len(running.named()["fast"]) == 1)
    await running.stop()
    assert running.named() == {"fast": [], "precise": []}
    assert not running.options.folder.exists()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("order", "said"),
    [
        (
            {"exit": 2, "error": "no Ray cluster can be used"},
            "no Ray cluster can be used",
        ),
        ([[IDS[0], "failed"]], "ray-fast-0 did not start: why"),
    ],
)
async def test_what_cannot_start_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: Any, said: str
) -> None:
    """Before all replicas were ready, a cluster that cannot be used, or a replica that failed, ends the runner."""
    running = Running(tmp_path, monkeypatch)
    running.order(order)
    with pytest.raises(EngineError) as caught:
        await running.task
    assert str(caught.value) == said


def test_a_detached_guard_outlives_who_started_it_and_ends_all_below(
    tmp_path: Path,
) -> None:
    """It is no child of its starter, which Ray would kill; when the pipe from there closes, no process is left."""
    guard = (ROOT / "tiers/lifecycle/guard.py").read_text("utf-8")
    program = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        DETACHED.format(program=guard),
        str(tmp_path / "log"),
    ]
    with subprocess.Popen(
        [*program, "sh", "-c", "sleep 300 & sleep 300 & wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as starter:
        assert starter.stdout is not None
        assert starter.stdin is not None
        read_line = starter.stdout.readline
        found, engine = (
            psutil.Process(int(call_within(read_line, "a process id")))
            for _ in range(2)
        )
        starter.wait(60)
        assert found.ppid() != os.getpid()
        wait_until(lambda: len(engine.children()) == 2)
        below = engine.children()
        ended = os.pidfd_open(found.pid)
        starter.stdin.close()
        assert select.select([ended], [], [], 60)[0], (
            "the guard did not end within 60 s"
        )
        os.close(ended)
    assert not [
        each
        for each in (engine, *below)
        if each.is_running() and each.status() != psutil.STATUS_ZOMBIE
    ]
