"""Routers and engines for benchmarks of whole fleets: simulated ones, their speeds, and each process's CPU."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import aiohttp
import httpx
import psutil
from measure import ROOT, cpu_s, free_port, wait_for

from router.deployment.layout import make_deployment, prepare_options
from router.policy.profiles import LatencyProfile, latency_name, load_latency
from router.settings import load_settings
from tiers.checkpoints.prepare import finished
from tiers.lifecycle.command import engine_argv, engine_environment
from tiers.plan import machine_name
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from recording import Summary

QARR = ROOT / ".venv/bin/qarr"
NOTHING: dict[str, dict[str, Any]] = {}


def toml(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """Return settings as TOML; a section's name may have dots."""
    lines = []
    for name, values in sections.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {_toml_value(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{key} = {_toml_value(one)}" for key, one in value.items())
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return json.dumps(value)


def merged(*parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return sections with later parts' values over earlier ones'."""
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        for section, values in part.items():
            found.setdefault(section, {}).update(values)
    return found


@dataclass(frozen=True, slots=True)
class Simulation:
    """How engines are simulated.

    Attributes:
        slower: How many times slower than the GPU; 1 is real time.
        max_num_seqs: Sequences of one engine, and requests that the router admits to it.
        stream_interval: Tokens of an event after the first.
        max_model_len: Longest context of an engine, in tokens.
        chars_a_token: Characters that the engine counts as a token.
        prefix_cache: Whether the engines keep what prompts begin with.
    """

    slower: float = 1.0
    max_num_seqs: int = 128
    stream_interval: int = 32
    max_model_len: int = 8192
    chars_a_token: int = 4
    prefix_cache: bool = False

    @property
    def arguments(self) -> list[str]:
        """Return the engine's arguments."""
        figures = {
            "slower": self.slower,
            "max-num-seqs": self.max_num_seqs,
            "stream-interval": self.stream_interval,
            "max-model-len": self.max_model_len,
            "chars-a-token": self.chars_a_token,
        }
        arguments = []
        for name, figure in figures.items():
            arguments += [f"--{name}", str(figure)]
        if self.prefix_cache:
            arguments.append("--prefix-cache")
        return arguments


@contextlib.contextmanager
def running(
    argv: Sequence[str], env: Mapping[str, str] | None = None, log: Path | None = None
) -> Iterator[psutil.Process]:
    """Run a process until the end, with SIGINT."""
    with contextlib.ExitStack() as files:
        output: Any = (
            files.enter_context(log.open("ab"))
            if log is not None
            else subprocess.DEVNULL
        )
        process = subprocess.Popen(
            argv, cwd=ROOT, env=env, stderr=output, stdout=output
        )
        try:
            yield psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(90)


@dataclass(slots=True)
class Engines:
    """Running engines of one fleet.

    Attributes:
        urls: By tier.
        processes: By name.
        tiers: Settings of each tier besides its addresses.
        serve: More arguments of ``qarr serve``.
        api_key: Of real engines; empty: they are simulated.
        digests: Of the real checkpoints, by tier.
    """

    urls: dict[TierName, list[str]] = field(default_factory=dict)
    processes: dict[str, psutil.Process] = field(default_factory=dict)
    tiers: dict[TierName, dict[str, Any]] = field(default_factory=dict)
    serve: list[str] = field(default_factory=list)
    api_key: str = ""
    digests: dict[TierName, str | None] = field(default_factory=dict)

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return a router's settings for them."""
        tiers = {
            f"tiers.{tier}": {**self.tiers[tier], "urls": urls}
            for tier, urls in self.urls.items()
        }
        return {
            **tiers,
            "engine": {"api_key": self.api_key}
            if self.api_key
            else {"check_tolerance": 0},
        }

    def work(self) -> dict[str, dict[str, float]]:
        """Return what each engine has done since its start: ``busy_s`` is time of a simulated GPU, or CPU time."""
        if self.api_key:
            return {
                name: {"busy_s": cpu_s(process), "lost_s": 0.0}
                for name, process in self.processes.items()
            }
        with httpx.Client(trust_env=False, timeout=10) as client:
            return {
                f"{tier}-{number}": client.get(f"{url}/simulation").json()
                for tier, urls in self.urls.items()
                for number, url in enumerate(urls)
            }


@contextlib.contextmanager
def simulated_engines(
    tiers: Sequence[TierName], simulation: Simulation
) -> Iterator[Engines]:
    """Run simulated engines, one for each tier named; a tier that is named several times has as many replicas."""
    seqs = simulation.max_num_seqs
    with contextlib.ExitStack() as started:
        engines = Engines()
        for tier in tiers:
            port = free_port()
            argv = [sys.executable, "-m", "tiers.simulated.engine", str(port), tier]
            argv += simulation.arguments
            urls = engines.urls.setdefault(tier, [])
            engines.tiers[tier] = {
                "max_model_len": simulation.max_model_len,
                "max_num_seqs": seqs,
                "max_in_flight": seqs,
            }
            engines.processes[f"{tier}-{len(urls)}"] = started.enter_context(
                running(argv)
            )
            wait_for(port)
            urls.append(f"http://127.0.0.1:{port}")
        yield engines


@contextlib.contextmanager
def real_engines(max_num_seqs: int = 16) -> Iterator[Engines]:
    """Run vLLM with each checkpoint of the default model, as ``qarr up`` does, and outlasting the routers before it."""
    settings = load_settings()
    deployment = make_deployment(settings, finished(prepare_options(settings)))
    assert not deployment.missing, (
        "there are no checkpoints: run 'qarr model prepare' first"
    )
    key = secrets.token_urlsafe(16)
    engines = Engines(api_key=key, serve=["--tokenizer", str(deployment.tokenizer)])
    with contextlib.ExitStack() as started:
        ports = {}
        for launch in deployment.launches:
            tier = launch.tier
            spec = replace(tier, max_num_seqs=max_num_seqs)
            launch = replace(launch, tier=spec, port=free_port(), api_key=key)  # noqa: PLW2901
            cores = launch.placement.cores
            pinned = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
            argv, env = (
                [*pinned, *engine_argv(launch)],
                engine_environment(launch, os.environ),
            )
            engines.processes[f"{tier.name}-0"] = started.enter_context(
                running(argv, env)
            )
            engines.urls[tier.name], ports[tier.name] = [launch.url], launch.port
            engines.tiers[tier.name] = {
                "max_model_len": tier.max_model_len, "max_num_seqs": max_num_seqs, "max_in_flight": 2 * max_num_seqs,
            }  # fmt: skip
            engines.digests[tier.name] = tier.digest
        for port in ports.values():
            wait_for(port, "/health", 600)
        yield engines


def kept_speeds(folder: Path, engines: Engines) -> LatencyProfile | None:
    """Return the latency profile of real engines' checkpoints from a folder; None: there is none."""
    speeds = folder / latency_name(engines.digests, machine_name())
    return load_latency(speeds) if speeds.exists() else None


@dataclass(slots=True)
class Router:
    """A running router. ``profiles`` is its folder of profiles, ``decisions`` its decision log, ``qarr`` its command."""

    url: str
    process: psutil.Process
    profiles: Path
    decisions: Path
    qarr: Path = QARR

    def run(self, *arguments: str) -> str:
        """Run a command against it and return what that prints."""
        config = [
            "--url",
            self.url,
            "--config",
            str(self.profiles.parent / "qarr.toml"),
        ]
        env = {**os.environ, "COLUMNS": "160"}
        argv = [str(self.qarr), *arguments, *config]
        done = subprocess.run(
            argv, text=True, capture_output=True, check=False, env=env
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.rstrip()


def base_settings(port: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Return the settings that every benchmarked router has: nothing is measured or learned while it is compared."""
    return {
        "server": {"port": port},
        "policy": {"profiles": str(folder / "profiles")},
        "telemetry": {"decision_log": str(folder / "decisions.jsonl")},
        "profile": {"auto": False},
    }


@contextlib.contextmanager
def router(
    folder: Path,
    engines: Engines,
    settings: Mapping[str, Mapping[str, Any]] = NOTHING,
    qarr: Path = QARR,
) -> Iterator[Router]:
    """Run a router; yield it once every engine is ready and its idle speed known.

    Args:
        folder: For its settings, profiles and logs.
        engines: Behind it.
        settings: More settings, by section.
        qarr: The command, of this release or of another.
    """
    port = free_port()
    (folder / "profiles").mkdir(parents=True)
    own = merged(base_settings(port, folder), engines.settings(), settings)
    (folder / "qarr.toml").write_text(toml(own), "utf-8")
    env = {**os.environ, "QARR_CONFIG": str(folder / "qarr.toml")}
    with running(
        [str(qarr), "serve", *engines.serve], env, folder / "router.log"
    ) as process:
        try:
            wait_for(port, "/readyz", 600)
        except TimeoutError:
            sys.stderr.write((folder / "router.log").read_text("utf-8")[-3000:])
            raise
        url = f"http://127.0.0.1:{port}"
        asyncio.run(until_measured(url))
        yield Router(
            url, process, folder / "profiles", folder / "decisions.jsonl", qarr
        )


async def until_measured(url: str) -> None:
    """Wait until every replica is ready and its idle speed known."""
    async with aiohttp.ClientSession(trust_env=False) as session:
        while True:
            replicas = [
                r
                for t in (await tiers_of(session, url))["tiers"]
                for r in t["replicas"]
            ]
            if replicas and all(
                r["state"] == "ready" and r["tpot_ms"] is not None for r in replicas
            ):
                return
            await asyncio.sleep(0.3)


async def tiers_of(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return the fleet as the router shows it."""
    async with session.get(f"{url}/tiers") as response:
        found: dict[str, Any] = await response.json()
        return found


async def idle(url: str) -> None:
    """Wait until nothing is in flight."""
    async with aiohttp.ClientSession(trust_env=False) as session:
        while any(  # noqa: ASYNC110
            r["in_flight"]
            for t in (await tiers_of(session, url))["tiers"]
            for r in t["replicas"]
        ):
            await asyncio.sleep(0.3)


def measure_speed(router: Router, step_s: float) -> LatencyProfile:
    """Run ``qarr profile latency`` and return what it found; it is in the router's folder afterwards."""
    print(router.run("profile", "latency", "--step", str(step_s)), flush=True)
    return load_latency(next(router.profiles.glob("latency-*.json")))


def give_speeds(router: Router, latency: LatencyProfile) -> None:
    """Give a router a latency profile as that of what it serves, and wait until it has noticed."""
    with httpx.Client(trust_env=False, timeout=10) as client:
        found = client.get(f"{router.url}/tiers").json()
        identities = {TierName(t["tier"]): t["identity"] for t in found["tiers"]}
        served = {TierName(t["tier"]) for t in found["tiers"] if t["replicas"]}
        fits = tuple(fit for fit in latency.fits if fit.tier in served)
        update = {"checkpoints": identities, "machine": found["machine"], "fits": fits}
        name = latency_name(identities, found["machine"])
        (router.profiles / name).write_text(
            latency.model_copy(update=update).model_dump_json(), "utf-8"
        )
        while True:
            tiers = client.get(f"{router.url}/tiers").json()["tiers"]
            if all(
                r["speed_profiled"] and r["tpot_ms"] is not None
                for t in tiers
                for r in t["replicas"]
            ):
                return
            time.sleep(0.3)


@dataclass(slots=True)
class Cpu:
    """CPU time of processes since its making, as shares of one core."""

    processes: dict[str, psutil.Process]
    _before: dict[str, float] = field(init=False)
    _began: float = field(init=False)
    _own: float = field(init=False)

    def __post_init__(self) -> None:
        self._own, self._began = time.process_time(), time.monotonic()
        self._before = {
            name: cpu_s(process) for name, process in self.processes.items()
        }

    def seconds(self) -> dict[str, float]:
        """Return the CPU seconds so far of each process and all that it has started, and of this one, the load, alone."""
        spent = {
            name: cpu_s(process) - self._before[name]
            for name, process in self.processes.items()
        }
        return {**spent, "load": time.process_time() - self._own}

    def shares(self) -> dict[str, float]:
        """Return the share of one core of each."""
        took = time.monotonic() - self._began
        return {name: spent / took for name, spent in self.seconds().items()}


def beside(seen: Summary, simulated: Summary) -> str:
    """Return what was seen beside what a simulation of the same arrivals says."""

    def pair(name: str, one: float | None, other: float | None, digits: int) -> str:
        return f"{name} {one or 0:.{digits}f}/{other or 0:.{digits}f}"

    return ", ".join(
        (
            pair("TTFT p50", seen.ttft_p50, simulated.ttft_p50, 0),
            pair("p95", seen.ttft_p95, simulated.ttft_p95, 0),
            pair("TPOT p50", seen.tpot_p50, simulated.tpot_p50, 1),
            pair("p95", seen.tpot_p95, simulated.tpot_p95, 1),
            pair("not served", seen.refused, simulated.refused, 0),
            pair("in time", seen.met, simulated.met, 3),
        )
    )


def shares_of(tiers: Iterable[TierName | None]) -> str:
    """Return the percentage of answers that each tier gave, as ``fast/balanced/precise``."""
    given = [tier for tier in tiers if tier is not None]
    return "/".join(
        f"{100 * given.count(tier) / max(len(given), 1):.0f}" for tier in STANDARD_TIERS
    )
