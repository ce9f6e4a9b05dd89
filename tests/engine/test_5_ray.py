"""Engines on a Ray cluster of two nodes: a node is killed under load, and its replica comes back on the other one."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from tests.engine.collector import Collector
from tests.engine.conftest import QARR, started
from tests.ports import reserved_ports
from tests.waiting import call_within
from tiers.cluster.job import (
    KEY_VARIABLE,
    PlacementJob,
    PlacementState,
    WantedReplica,
    read_status,
)
from tiers.cluster.runner import PLACEMENT_MAIN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.conftest import Up

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-ray/bin/python"
STREAMS = 4
TOKENS = 300  # An answer has more tokens than are computed before the node is killed.


@dataclass(slots=True)
class Nodes:
    """The cluster, as a program of its own; ``env`` is what its clients need."""

    process: subprocess.Popen[str]
    address: str
    env: dict[str, str]

    def do(self, command: str) -> None:
        """Add or kill a node, and wait until that is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        done = call_within(
            self.process.stdout.readline, f"the cluster to {command}", within_s=300
        )
        assert done.split() == command.split()[:2]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Start a cluster whose head holds no engine, and two nodes for two engines each."""
    subprocess.run([ROOT / "scripts/setup", "ray"], check=True, timeout=1500)
    # The path is short because Ray's sockets are below it.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    own = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    env = {**os.environ, "RAY_TMPDIR": folder, **own}
    process = subprocess.Popen(
        [PYTHON, Path(__file__).with_name("ray_cluster.py")],
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        address = call_within(
            process.stdout.readline, "the cluster's address", within_s=300
        ).strip()
        cluster = Nodes(process, address, own)
        cluster.do("add one 2")
        cluster.do("add two 2")
        yield cluster
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def on_ray(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Start ``qarr up --on ray`` with two replicas of one tier; stop it, and see that it leaves no engine behind."""
    own = {
        **nodes.env,
        "QARR_ENGINE__EXTRA_ARGS": "[]",
        "QARR_TIERS__FAST__REPLICAS": "0",
        "QARR_TIERS__BALANCED__REPLICAS": "0",
        "QARR_TIERS__PRECISE__REPLICAS": "2",
        "QARR_TIERS__PRECISE__MAX_MODEL_LEN": "2048",
    }
    arguments = ("--on", "ray", "--ray-address", nodes.address)
    with started(own, tmp_path_factory, Collector(), arguments=arguments) as running:
        yield running
        engines: list[psutil.Process] = []
        for url in _ready(running):
            engines += _all_processes_of(url)
    assert len(engines) > 1
    _until(lambda: not _running(engines))


@dataclass(slots=True)
class Stream:
    """A streamed answer while it is read."""

    pieces: int = 0
    last: str = ""
    finish_reason: str | None = None

    def read(self, url: str) -> None:
        messages = [{"role": "user", "content": "Tell me a long story about the sea."}]
        body = {
            "messages": messages,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        with httpx.stream(
            "POST",
            f"{url}/v1/chat/completions",
            json=body,
            timeout=300,
            trust_env=False,
        ) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: "):
                    continue
                self.last = line.removeprefix("data: ")
                if self.last != "[DONE]":
                    choice = json.loads(self.last)["choices"][0]
                    self.pieces += bool(choice["delta"].get("content"))
                    self.finish_reason = choice["finish_reason"]


@pytest.mark.usefixtures("model_store")
def test_a_cluster_that_is_not_there_is_named() -> None:
    """The command ends at once, with what to do; Ray alone would wait for minutes."""
    (port,) = reserved_ports()
    command = [QARR, "up", "--port", "0", "--on", "ray"]
    command += ["--ray-address", f"127.0.0.1:{port}"]
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100
    )
    assert process.returncode == 2
    error = process.stderr.splitlines()[-1]
    assert error.startswith(
        f"error: no Ray cluster can be used at 127.0.0.1:{port} (Connection refused): start one with"
    )


def test_what_cannot_be_placed_is_told(nodes: Nodes, tmp_path: Path) -> None:
    """A node without the checkpoint, and a replica that no node can hold, are states with what to do."""
    wanted = [
        WantedReplica(
            "absent",
            "fast",
            checkpoint=str(tmp_path / "nowhere"),
            args=(),
            env={},
            resources={"CPU": 1},
        ),
        WantedReplica(
            "large",
            "fast",
            checkpoint=str(tmp_path),
            args=(),
            env={},
            resources={"CPU": 99, "GPU": 1},
        ),
    ]
    status = tmp_path / "status.json"
    job = PlacementJob(
        nodes.address,
        tuple(wanted),
        engines_file=str(tmp_path / "engines.json"),
        status_file=str(status),
        log_dir=str(tmp_path / "logs"),
    )
    job.write(tmp_path / "job.json")
    env = {**os.environ, **nodes.env, KEY_VARIABLE: "key"}
    with subprocess.Popen(
        [PYTHON, PLACEMENT_MAIN, tmp_path / "job.json"],
        env=env,
        stderr=subprocess.DEVNULL,
    ) as placing:
        _until(
            lambda: (
                [
                    "nowhere" in replica.detail or "99" in replica.detail
                    for replica in read_status(status)
                ]
                == [True] * 2
            )
        )
        absent, large = read_status(status)
        placing.terminate()
    assert absent.state is PlacementState.FAILED
    assert absent.detail == (
        f"the checkpoint folder {tmp_path / 'nowhere'} is not on node 127.0.0.1: copy it there, or share it, under the "
        f"same path"
    )
    assert large.state is PlacementState.PLACING
    assert (
        "it needs CPU 99 and GPU 1 on one node. Free are 127.0.0.1: CPU" in large.detail
    )
    assert "No node has as much: add one ('ray start')" in large.detail
    assert json.loads((tmp_path / "engines.json").read_text()) == {"fast": []}


def test_streams_outlive_a_node_and_its_replica_comes_back(
    nodes: Nodes, on_ray: Up
) -> None:
    """With a node of two killed under load, every stream is finished, and two replicas on the other node are ready."""
    before = _ready(on_ray)
    streams = [Stream() for _ in range(STREAMS)]
    reading = [
        threading.Thread(target=stream.read, args=(on_ray.url,)) for stream in streams
    ]
    for thread in reading:
        thread.start()
    _until(lambda: all(stream.pieces for stream in streams))
    replicas = on_ray.tiers()["precise"]["replicas"]
    assert all(replica["in_flight"] for replica in replicas)
    assert not any(stream.finish_reason for stream in streams)
    engines = {url: _all_processes_of(url) for url in before}
    nodes.do("kill one")
    for thread in reading:
        thread.join(300)
    for stream in streams:
        assert stream.finish_reason == "length"
        assert stream.last == "[DONE]"
    _until(lambda: len(_ready(on_ray)) == 2 and _ready(on_ray) != before, 600)
    (lost,) = before - _ready(on_ray)
    _until(lambda: not _running(engines[lost]))
    assert any(
        "lost: its actor on node 127.0.0.1 is gone" in line for line in on_ray.output
    )
    assert on_ray.generate().status_code == 200


def test_engines_on_nodes_need_the_key(on_ray: Up) -> None:
    """An engine refuses requests without its key, which is not on its command line."""
    for url in _ready(on_ray):
        assert httpx.get(f"{url}/v1/models", trust_env=False).status_code == 401
        environment = _process_of(url).environ()
        assert environment["VLLM_API_KEY"] not in " ".join(_process_of(url).cmdline())
        assert not [name for name in environment if name.startswith(("QARR_", "RAY_"))]


def _ready(up: Up) -> set[str]:
    return {
        replica["url"]
        for replica in up.tiers()["precise"]["replicas"]
        if replica["state"] == "ready"
    }


def _process_of(url: str) -> psutil.Process:
    port = httpx.URL(url).port
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
            return psutil.Process(connection.pid)
    raise LookupError(url)


def _all_processes_of(url: str) -> list[psutil.Process]:
    server = _process_of(url)
    return [server, *server.children(recursive=True)]


def _running(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [
        process
        for process in processes
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


def _until(condition: Any, limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
