# ruff: noqa: PLC0415  modules are those of the checkout that is measured
"""What a request that has ended costs in CPU time: its record, metrics, the live window and its line in the log.

usage: python benchmarks/record_cost.py [--passes 9] [--against FOLDER]

The threads' share is in it: requests come in bursts of those of a twentieth of a second at 3,000 a second, and between
bursts the writer of the log gets what it waits for. With ``--against`` another checkout is measured in turns with this one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

PROJECT = Path(__file__).resolve().parents[1]
BURST, BURSTS, PAUSE_S = 150, 20, 0.06
STEPS = ("everything", "record and totals", "traces", "log line", "metrics", "live window", "answers counted")

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    """Measure each checkout in a process of its own, in turns, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=9)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(asyncio.run(measured())))
        return
    folders = [PROJECT] if options.against is None else [options.against.resolve(), PROJECT]
    found = [[once(folder) for folder in folders] for _ in range(options.passes)]
    print(f"$ python benchmarks/record_cost.py --passes {options.passes}{' --against BEFORE' * (len(folders) - 1)}")
    print("CPU-us/request, medians (least to most)" + "; before, then now" * (len(folders) - 1))
    for step in STEPS:
        for number, _ in enumerate(folders):
            values = [figures[number][step] for figures in found]
            shown = f"{statistics.median(values):6.1f}  ({min(values):.1f} to {max(values):.1f})"
            print(f"{step if not number else '':20}{shown}")


def once(folder: Path) -> dict[str, float]:
    """Return the figures of one pass over a checkout."""
    env = {**os.environ, "PYTHONPATH": str(folder)}
    with tempfile.TemporaryFile() as errors:
        argv = [sys.executable, __file__, "--once"]
        done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, stderr=errors, check=True, cwd=folder)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


async def measured() -> dict[str, float]:
    """Return CPU microseconds a request, by step."""
    from router.monitoring.live import Live
    from router.monitoring.metrics import Metrics
    from router.pipeline.registry import RequestRegistry
    from router.server.memory import set_aside
    from router.settings import TelemetrySettings
    from router.telemetry.logs import Logging, log_request
    from router.telemetry.tracing import _PARENT, make_telemetry
    from tests.unit.upstream_stack import text_of, upstream_stack

    settings = TelemetrySettings()
    _PARENT.set("00-1-1-00")  # of a request without spans, as most are
    telemetry = make_telemetry("0", settings)
    async with upstream_stack() as stack:
        answer = await stack.stream()
        await text_of(answer)
        await answer.aclose()
        registry = RequestRegistry(SimpleNamespace(deadline_passed=False), 500)  # type: ignore[arg-type]
        pipeline: Any = SimpleNamespace(registry=registry, fleet=stack.fleet, policy=stack.policy)
        observers = {"traces": telemetry.record_outcome, "log line": log_request}
        registry.observers.extend(observers.values())
        empty: Any = None
        metrics = Metrics(pipeline, empty, {}, {})
        observers["metrics"] = registry.observers[-1]
        Live(pipeline, empty, empty, empty, {})
        observers["live window"] = registry.observers[-1]
        serve = served(registry, stack.decision(), answer)
        with tempfile.TemporaryDirectory() as folder:
            logging = Logging(settings)
            logging.also_to_file(Path(folder), 8080)
            steps: dict[str, Callable[[], object]] = {"everything": serve}
            serve()
            record = registry.recent[-1]
            for name, observe in observers.items():
                steps[name] = lambda observe=observe: observe(record)  # type: ignore[misc]
            steps["answers counted"] = lambda: metrics.answered("/generate", "POST", 200)
            set_aside()  # as the router does: what is there from the start is not the collector's
            found = {name: cost(step) for name, step in steps.items()}
            registry.observers.clear()
            found["record and totals"] = cost(serve)
            assert logging.stop()
            assert len((Path(folder) / "router-8080.log").read_bytes()) > 100 * BURST * BURSTS
        return found


def served(registry: Any, decision: Any, answer: Any) -> Callable[[], None]:
    """Return what lets one request pass through the registry."""
    from router.pipeline.admission import Admitted
    from router.pipeline.request import RequestContext

    admitted = Admitted(decision, answer._attempt.lease, waited_ms=5.0)  # noqa: SLF001
    context = RequestContext("4f" * 16, "7e" * 16, route="/generate", arrived=time.monotonic() - 0.5)

    def serve() -> None:
        with registry.entry(context, decision, 0) as request:
            request.let_in(admitted)
            request.answer = answer

    return serve


def cost(step: Callable[[], object]) -> float:
    """Return the CPU microseconds of a step, with what it leaves to threads."""
    used = -BURSTS * idle()
    for _ in range(BURSTS):
        before = time.process_time()
        for _ in range(BURST):
            step()
        time.sleep(PAUSE_S)
        used += time.process_time() - before
    return used / BURST / BURSTS * 1e6


def idle() -> float:
    """Return the CPU seconds of a pause."""
    before = time.process_time()
    for _ in range(5):
        time.sleep(PAUSE_S)
    return (time.process_time() - before) / 5


if __name__ == "__main__":
    main()
