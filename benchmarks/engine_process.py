"""What it saves that a CPU engine computes in its own process: the same engine as `qarr up` starts it, and as vLLM would.

usage: .venv/bin/python benchmarks/engine_process.py [--rounds 3]

By vLLM's default a CPU engine's model runs in a further process. Both ways start in turn, one engine at a time: seconds to
readiness, memory of all its processes (each shared page is divided among those that share it), and milliseconds a token of
a greedy answer, at one and at four requests at once. Medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from subprocess import check_output
from tempfile import TemporaryDirectory
from typing import NamedTuple

import psutil
from kernels import engine, spec_of
from measure import ROOT

sys.path.insert(0, str(ROOT))
from router.deployment.layout import prepare_options
from router.settings import load_settings
from tiers.checkpoints.prepare import find
from tiers.plan import machine_name
from tiers.spec import TierName, TierSpec

AT_ONCE = (1, 4)
VLLMS_OWN = ("--distributed-executor-backend", "mp")


class Seen(NamedTuple):
    """Of one start: seconds, GiB, and milliseconds a token by requests at once."""

    ready_s: float
    memory_gib: float
    token_ms: tuple[float, ...]


def measure(spec: TierSpec, python: Path, extra: tuple[str, ...]) -> Seen:
    """Start an engine, use it, and stop it."""
    began = time.monotonic()
    with (
        TemporaryDirectory() as logs,
        engine(spec, python, Path(logs), plugin=True, extra=extra) as running,
    ):
        token_ms = tuple(running.decode_ms(batch) for batch in AT_ONCE)
        tree = [
            each
            for each in psutil.Process().children(recursive=True)
            if each.is_running()
        ]
        memory = sum(each.memory_full_info().pss for each in tree) / 2**30
        return Seen(running.ready_at - began, memory, token_ms)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    settings = load_settings(None, {})
    checkpoints = find(prepare_options(settings))
    if checkpoints is None:
        raise SystemExit("the checkpoints are not made yet: run 'make checkpoints'")
    spec = next(spec_of(c.tier, c.path) for c in checkpoints if c.tier is TierName.FAST)
    seen: dict[str, list[Seen]] = {"further process": [], "own process": []}
    for number in range(rounds):
        for way, extra in zip(seen, (VLLMS_OWN, ()), strict=True):
            print(f"round {number + 1} of {rounds}: {way}", file=sys.stderr, flush=True)
            seen[way].append(measure(spec, settings.engine.python, extra))
    commit = check_output(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True
    ).strip()
    print(
        f"commit {commit}; {machine_name()}; {spec.name}, one thread; medians of {rounds}"
    )
    heads = [f"{batch} at once, ms/token" for batch in AT_ONCE]
    print(
        f"{'':16}{'ready s':>10}{'GiB':>8}" + "".join(f"{head:>24}" for head in heads)
    )
    for way, found in seen.items():
        ready, memory = (
            statistics.median(getattr(each, name) for each in found)
            for name in ("ready_s", "memory_gib")
        )
        tokens = [
            statistics.median(each.token_ms[n] for each in found)
            for n in range(len(AT_ONCE))
        ]
        print(
            f"{way:16}{ready:10.1f}{memory:8.2f}"
            + "".join(f"{ms:24.1f}" for ms in tokens)
        )


if __name__ == "__main__":
    main()
