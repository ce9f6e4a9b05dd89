"""Real engines for the tests: ``qarr up`` as a person starts it, once for the session."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil
import pytest

from tests.engine import twins
from tests.engine.collector import Collector
from tests.engine.scoring import Scorer
from tests.ports import reserved_range

if TYPE_CHECKING:
    from collections.abc import Iterator

QARR = Path(sys.executable).with_name("qarr")
# The engine's metrics tell the block size of its KV cache.
BALANCED_ARGS = ["--block-size", "64"]
CAPITAL = "What is the capital of France?"
# An engine then has 30 s for one token, which is longer than the longest prompt takes on two cores.
HANG_S = "10"
# So much memory must be free: some tests start a fleet beside the session's, some need neither.
NEEDED_GIB = 15.0
ALONE_GIB = 6.0
START_LIMIT_S = 1500  # Checkpoints are made first if the cache has none.


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything below this folder, and give it time: a CPU engine's token can take a second."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("engine")
            item.add_marker(pytest.mark.timeout(START_LIMIT_S + 300))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Say what the tests need before the first; without it, stop with one line."""
    free = psutil.virtual_memory().available / 2**30
    needs_fleet = any(
        "up" in vars(item).get("fixturenames", ()) for item in session.items
    )
    needed = NEEDED_GIB if needs_fleet else ALONE_GIB
    needs = (
        f"tests on real engines need {needed:g} GiB of free memory; {free:.1f} are free"
    )
    if free < needed:
        pytest.exit(f"{needs}: end other programs, or run them on another machine", 1)
    session.config.get_terminal_writer().line(
        f"\n{needs}. Ports are chosen among the free ones."
    )
    session.config.get_terminal_writer().line(twins.describe())


@pytest.fixture
def model_store(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let settings that the test reads, and commands that it runs, find the checkpoints that the engines serve."""
    store = twins.model_store()
    monkeypatch.setenv(twins.STORE_VARIABLE, str(store))
    return store


@dataclass(slots=True)
class Up:
    process: subprocess.Popen[str]
    url: str
    collector: Collector
    output: list[str] = field(default_factory=list)
    profiles: Path = Path()
    settings: Path = Path()

    def tiers(self) -> dict[str, dict[str, Any]]:
        answer = httpx.get(f"{self.url}/tiers", trust_env=False)
        return {tier["tier"]: tier for tier in answer.json()["tiers"]}

    def replica(self, tier: str) -> dict[str, Any]:
        first: dict[str, Any] = self.tiers()[tier]["replicas"][0]
        return first

    def scorer(self, tier: str) -> Scorer:
        """Return a scorer that asks a tier's first engine how likely a text is."""
        replica = self.replica(tier)
        return Scorer.of(replica["url"], key_of(replica["pid"]))

    def finished_long(self, tier: str) -> float:
        """Return how many requests with a limit of over 1,000 tokens a tier's first engine has finished.

        The router's own measurements of speed, which it makes while nobody asks, have far lower limits.
        """
        metrics = httpx.get(
            f"{self.replica(tier)['url']}/metrics", trust_env=False
        ).text
        counts = dict(
            re.findall(
                r'^vllm:request_params_max_tokens_bucket\{.*le="([^"]+)".*\} (\S+)$',
                metrics,
                re.MULTILINE,
            )
        )
        return float(counts["+Inf"]) - float(counts["1000.0"])

    def operate(self, *args: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "QARR_POLICY__PROFILES": str(self.profiles)}
        url = () if args[0] == "record" else ("--url", self.url)
        command = [QARR, "tiers", *args, *url]
        return subprocess.run(
            command,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=START_LIMIT_S,
        )

    def generate(self, **body: Any) -> httpx.Response:
        """Post to /generate, with an answer of a few tokens at temperature 0 unless said otherwise."""
        body = {"prompt": CAPITAL, "max_tokens": 16, "temperature": 0, **body}
        return httpx.post(
            f"{self.url}/generate", json=body, timeout=300, trust_env=False
        )


@pytest.fixture(scope="session")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Start three engines and the router with tracing on; stop them after the session."""
    collector = Collector()
    endpoint = collector.start()
    own = {
        "QARR_TIERS__BALANCED__ENGINE_ARGS": json.dumps(BALANCED_ARGS),
        "QARR_ENGINE__HANG_S": HANG_S,
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "500",
    }
    with started(own, tmp_path_factory, collector) as running:
        yield running


@contextmanager
def started(
    own: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
    collector: Collector,
    arguments: tuple[str, ...] = (),
) -> Iterator[Up]:
    """Run ``qarr up`` with variables and arguments of its own until all tiers are ready; stop it afterwards."""
    base = reserved_range(4)
    profiles = tmp_path_factory.mktemp("profiles")
    settings = tmp_path_factory.mktemp("settings") / "qarr.toml"
    settings.touch()
    env = {
        **os.environ,
        "QARR_CONFIG": str(settings),
        "QARR_ENGINE__BASE_PORT": str(base),
        # No profiles, and no tier counts as slow: decisions hardly depend on the machine.
        "QARR_POLICY__PROFILES": str(profiles),
        "QARR_POLICY__MAX_SLOWDOWN": "1e9",
        "QARR_PROFILE__AUTO": "false",
        "QARR_ENGINE__LOG_DIR": str(tmp_path_factory.mktemp("logs")),
        twins.STORE_VARIABLE: str(twins.model_store()),
        **own,
    }
    process = subprocess.Popen(
        [str(QARR), "up", "--port", str(base + 3), *arguments],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    running = Up(
        process,
        f"http://127.0.0.1:{base + 3}",
        collector,
        profiles=profiles,
        settings=settings,
    )
    reading = threading.Thread(
        target=_collect, args=(process, running.output), daemon=True
    )
    reading.start()
    try:
        _wait_until_up(running)
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)
        reading.join(10)
        assert process.stderr is not None
        process.stderr.close()
        collector.close()


def _collect(process: subprocess.Popen[str], lines: list[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        lines.append(line)
        print(line, end="")  # noqa: T201  shown with the test's output when it fails


def _wait_until_up(running: Up) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not any("all tiers ready" in line for line in running.output):
        assert running.process.poll() is None, "".join(running.output)
        assert time.monotonic() < deadline, "".join(running.output)
        time.sleep(0.2)


@pytest.fixture(scope="session")
def engine_keys(up: Up) -> dict[str, str]:
    return {
        name: key_of(tier["replicas"][0]["pid"])
        for name, tier in up.tiers().items()
        if tier["replicas"]
    }


def key_of(pid: int) -> str:
    environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return next(
        variable.removeprefix("VLLM_API_KEY=")
        for variable in environment
        if variable.startswith("VLLM_API_KEY=")
    )
