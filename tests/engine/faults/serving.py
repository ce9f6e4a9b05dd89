"""Run one real engine, sound or with a fault, until it is healthy."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.ports import reserved_ports
from tiers.checkpoints.parsers import parser_args
from tiers.lifecycle.command import engine_argv, engine_environment
from tiers.spec import EngineLaunch, EnginePlacement, TierName, TierSpec

FAULTY_ENGINE = Path(__file__).with_name("faulty_engine.py")
DROPPING_PARSER = (
    "--enable-auto-tool-choice",
    "--tool-parser-plugin",
    str(Path(__file__).with_name("dropping_parser.py")),
    "--tool-call-parser",
    "hermes_dropping",
)
MODEL = "model"
STOP_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecipe:
    """How an engine is started.

    Attributes:
        tier: Whose kernels and plugins it has.
        folder: What it serves.
        fault: What ``faulty_engine.py`` breaks; empty: nothing.
        arguments: More arguments of vLLM.
        environment: Variables besides the usual ones.
        context: Tokens of a prompt and its answer together.
    """

    tier: TierName
    folder: Path
    fault: str = ""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    context: int = 2048


@contextmanager
def serving(
    recipe: EngineRecipe, python: Path, log: Path, *, limit_s: float = 200.0
) -> Iterator[str]:
    """Run an engine until the block ends; yield its URL once it is healthy.

    Args:
        recipe: What is started.
        python: Of the engine's environment.
        log: Where its output goes.
        limit_s: So long it may take to start.

    Raises:
        ChildProcessError: It ends.
        TimeoutError: It is not healthy in time.
    """
    (port,) = reserved_ports()
    launch = _launch(recipe, python, port)
    argv = engine_argv(launch)
    environment = {
        **engine_environment(launch, os.environ),
        **(recipe.environment or {}),
    }
    if recipe.fault:
        argv[1] = str(FAULTY_ENGINE)
        environment["ENGINE_FAULT"] = recipe.fault
    with log.open("w") as output:
        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_healthy(process, launch.url, limit_s)
        yield launch.url
    finally:
        _stop(process)


def _launch(recipe: EngineRecipe, python: Path, port: int) -> EngineLaunch:
    parsers = parser_args(recipe.folder, recipe.arguments)
    return EngineLaunch(
        tier=TierSpec(
            name=recipe.tier,
            max_model_len=recipe.context,
            max_num_seqs=16,
            max_in_flight=32,
            checkpoint=recipe.folder,
        ),
        placement=EnginePlacement(threads=1, kv_cache_gib=1),
        python=python,
        served_model=MODEL,
        host="127.0.0.1",
        port=port,
        api_key="",
        extra_args=(*parsers, *recipe.arguments),
    )


def _wait_until_healthy(
    process: subprocess.Popen[bytes], url: str, limit_s: float
) -> None:
    deadline = time.monotonic() + limit_s
    while not _is_healthy(url):
        if process.poll() is not None:
            raise ChildProcessError(f"the engine ended with {process.returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the engine is not healthy after {limit_s:.0f} s")
        time.sleep(0.2)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End an engine, and the process that computes for it if that is left."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_S)
