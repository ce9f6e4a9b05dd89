"""What the engine plugin's kernels bring: each tier's engine alone, with vLLM's own kernels and with the plugin's.

    .venv/bin/python benchmarks/kernels.py [--rounds 3]

Milliseconds a token at batches of 1, 4, 8 and 16, and of prefill for 256 and 1,024 tokens: medians over rounds in which the
engines take turns, one engine at work at a time, on one core. Ratios are to ``precise`` with the same kernels, whose
BF16 layers the plugin leaves alone.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import httpx
from measure import ROOT, free_port, wait_for

sys.path.insert(0, str(ROOT))
from router.serve import prepare_options
from router.settings import load_settings
from tiers.command import engine_argv, engine_environment
from tiers.prepare import find
from tiers.spec import EngineLaunch, Placement, TierName, TierSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCHES, PREFILLS = (1, 4, 8, 16), (256, 1024)
SHORT, LONG = 4, 36  # output tokens; the difference in time is that of the tokens between
WORDS = 40_000  # token ids to draw prompts from: no two share a prefix


class Engine(NamedTuple):
    """One running engine."""

    tier: TierName
    plugin: bool
    url: str
    client: httpx.Client

    def seconds(self, prompts: int, prompt_tokens: int, output: int) -> float:
        """Return how long one batch takes."""
        ids = [[random.randrange(100, WORDS) for _ in range(prompt_tokens)] for _ in range(prompts)]
        body = {"model": "m", "prompt": ids, "max_tokens": output, "ignore_eos": True, "temperature": 0}
        started = time.perf_counter()
        self.client.post(f"{self.url}/v1/completions", json=body).raise_for_status()
        return time.perf_counter() - started

    def decode_ms(self, batch: int) -> float:
        """Return milliseconds a step: so long each sequence waits for its next token."""
        return (self.seconds(batch, 16, LONG) - self.seconds(batch, 16, SHORT)) * 1000 / (LONG - SHORT)

    def prefill_ms(self, tokens: int) -> float:
        """Return milliseconds until the first token of a prompt."""
        return self.seconds(1, tokens, 1) * 1000


@contextmanager
def engine(spec: TierSpec, python: Path, logs: Path, *, plugin: bool) -> Iterator[Engine]:
    """Run one tier's engine on one core, as three of them share two."""
    port = free_port()
    place = Placement(threads=1, kv_cache_gib=1)
    launch = EngineLaunch(
        tier=spec, placement=place, python=python, served_model="m", host="127.0.0.1", port=port, api_key=""
    )
    env = {**engine_environment(launch, os.environ), **({} if plugin else {"VLLM_PLUGINS": "none"})}
    with (logs / f"{spec.name}-{plugin}.log").open("w") as log:
        process = Popen(engine_argv(launch), env=env, stdin=DEVNULL, stdout=log, stderr=STDOUT, start_new_session=True)
    try:
        wait_for(port, "/health", 300, process=process)
        with httpx.Client(timeout=600, trust_env=False) as client:
            running = Engine(spec.name, plugin, f"http://127.0.0.1:{port}", client)
            for batch in BATCHES:  # the first requests of an engine take seconds
                running.seconds(batch, 16, 2)
            yield running
    finally:
        process.terminate()
        process.wait(30)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    settings = load_settings(None, {})
    checkpoints = find(prepare_options(settings))
    if checkpoints is None:
        raise SystemExit("the checkpoints are not made yet: run 'make checkpoints'")
    seen: dict[tuple[TierName, bool, str], list[float]] = {}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory()))
        engines = [
            stack.enter_context(engine(_spec(c.tier, c.path), settings.engine.python, logs, plugin=plugin))
            for c in checkpoints
            for plugin in ((False, True) if c.tier is not TierName.PRECISE else (True,))
        ]
        for number in range(rounds):
            for running in engines:
                print(f"round {number + 1} of {rounds}: {running.tier}", file=sys.stderr, flush=True)
                for batch in BATCHES:
                    seen.setdefault((*running[:2], f"batch {batch}"), []).append(running.decode_ms(batch))
                for tokens in PREFILLS:
                    seen.setdefault((*running[:2], f"prefill {tokens}"), []).append(running.prefill_ms(tokens))
    report({key: statistics.median(values) for key, values in seen.items()})


def _spec(tier: TierName, path: Path) -> TierSpec:
    return TierSpec(name=tier, max_model_len=2048, max_num_seqs=16, max_in_flight=16, checkpoint=path)


def report(found: dict[tuple[TierName, bool, str], float]) -> None:
    """Print the table: milliseconds, and in parentheses the ratio to BF16."""
    columns = [*(f"batch {b}" for b in BATCHES), *(f"prefill {t}" for t in PREFILLS)]
    print("ms a token by batch, ms of prefill by prompt tokens; in parentheses the ratio to precise")
    print(f"{'':22}" + "".join(f"{name:>18}" for name in columns))
    for tier in (TierName.PRECISE, TierName.BALANCED, TierName.FAST):
        for plugin in (False, True):
            if (tier, plugin, columns[0]) not in found:
                continue
            cells = []
            for name in columns:
                value = found[tier, plugin, name]
                cells.append(f"{value:>9.1f} ({value / found[TierName.PRECISE, True, name]:>5.2f})")
            label = "" if tier is TierName.PRECISE else ", plugin" if plugin else ", vLLM's own"
            print(f"{tier + label:22}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
