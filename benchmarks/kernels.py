"""What the engine plugin's kernels bring: each tier's engine alone, with vLLM's own kernels and with the plugin's.

    .venv/bin/python benchmarks/kernels.py [--rounds 3]

Milliseconds a token at batches of 1, 4, 8 and 16, and of prefill for 256 and 1,024 tokens: medians over rounds in which the
engines take turns, one engine at work at a time, on one core. Ratios are to ``precise`` with the same kernels, whose
BF16 layers the plugin leaves alone.

Then, of greedy answers with vLLM's kernels and with the plugin's: how many tokens are equal until the first other one, and
how many tokens of an answer an engine chooses as well after the same words, in one prefill: vLLM's of the plugin's answers,
the plugin's of vLLM's, each of its own (what is missing there is rounding in another order), and the plugin's of those of
``precise`` (what the precision changes).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, check_output
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
from measure import ROOT, free_port, wait_for

sys.path.insert(0, str(ROOT))
from router.deployment.layout import prepare_options
from router.settings import load_settings
from tiers.checkpoints.prepare import find
from tiers.lifecycle.command import engine_argv, engine_environment
from tiers.plan import machine_name
from tiers.spec import EngineLaunch, EnginePlacement, TierName, TierSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

BATCHES, PREFILLS = (1, 4, 8, 16), (256, 1024)
# output tokens; the difference in time is that of the tokens between
SHORT, LONG = 4, 36
LONG_BEFORE = 12  # the same of vLLM's own kernels, which take up to a second a token
ANSWER = 32  # tokens of an answer that is compared
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils when",
    "Dear Sir or Madam, I am writing to",
    "The three most important things to know about gardening are",
    "If a train travels 60 miles in 2 hours, its speed is",
    "Once upon a time, in a village by the sea,",
    "The difference between a virus and a bacterium is that",
)
WORDS = 40_000  # token ids to draw prompts from: no two share a prefix


class Engine(NamedTuple):
    """One running engine.

    Attributes:
        ready_at: When it was healthy, by the monotonic clock.
    """

    tier: TierName
    plugin: bool
    url: str
    client: httpx.Client
    ready_at: float

    def seconds(self, prompts: int, prompt_tokens: int, output: int) -> float:
        """Return how long one batch takes."""
        ids = [
            [random.randrange(100, WORDS) for _ in range(prompt_tokens)]
            for _ in range(prompts)
        ]
        body = {
            "model": "m",
            "prompt": ids,
            "max_tokens": output,
            "ignore_eos": True,
            "temperature": 0,
        }
        started = time.perf_counter()
        self.client.post(f"{self.url}/v1/completions", json=body).raise_for_status()
        return time.perf_counter() - started

    def decode_ms(self, batch: int) -> float:
        """Return milliseconds a step: so long each sequence waits for its next token."""
        tokens = LONG if self.plugin else LONG_BEFORE
        return (
            (self.seconds(batch, 16, tokens) - self.seconds(batch, 16, SHORT))
            * 1000
            / (tokens - SHORT)
        )

    def prefill_ms(self, tokens: int) -> float:
        """Return milliseconds until the first token of a prompt."""
        return self.seconds(1, tokens, 1) * 1000

    def answers(self) -> list[tuple[list[int], list[int]]]:
        """Return the token ids of each prompt and of its greedy answer."""
        choices = self._complete(
            {"prompt": PROMPTS, "max_tokens": ANSWER, "return_token_ids": True}
        )
        return [(choice["prompt_token_ids"], choice["token_ids"]) for choice in choices]

    def chooses(self, answers: list[tuple[list[int], list[int]]]) -> float:
        """Return the share of tokens in others' answers that are this engine's first choice at their place."""
        asked = [prompt + answer for prompt, answer in answers]
        choices = self._complete(
            {"prompt": asked, "max_tokens": 1, "prompt_logprobs": 1}
        )
        chosen = [
            place[str(token)]["rank"] == 1
            for choice, (_, answer) in zip(choices, answers, strict=True)
            for place, token in zip(
                choice["prompt_logprobs"][-len(answer) :], answer, strict=True
            )
        ]
        return statistics.fmean(chosen)

    def _complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        answer = self.client.post(
            f"{self.url}/v1/completions", json={"model": "m", "temperature": 0, **body}
        )
        choices: list[dict[str, Any]] = answer.raise_for_status().json()["choices"]
        return sorted(choices, key=lambda choice: choice["index"])


@contextmanager
def engine(
    spec: TierSpec,
    python: Path,
    logs: Path,
    *,
    plugin: bool,
    extra: tuple[str, ...] = (),
) -> Iterator[Engine]:
    """Run one tier's engine on one core, as three of them share two. It ends with this program, also by SIGTERM."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    port = free_port()
    place = EnginePlacement(threads=1, kv_cache_gib=1)
    launch = EngineLaunch(
        tier=spec,
        placement=place,
        python=python,
        served_model="m",
        host="127.0.0.1",
        port=port,
        api_key="",
        extra_args=extra,
    )
    env = {
        **engine_environment(launch, os.environ),
        **({} if plugin else {"VLLM_PLUGINS": "none"}),
    }
    with (logs / f"{spec.name}-{plugin}.log").open("w") as log:
        process = Popen(
            engine_argv(launch),
            env=env,
            stdin=DEVNULL,
            stdout=log,
            stderr=STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(port, "/health", 300, process=process)
        ready_at = time.monotonic()
        with httpx.Client(timeout=600, trust_env=False) as client:
            running = Engine(
                spec.name, plugin, f"http://127.0.0.1:{port}", client, ready_at
            )
            for batch in BATCHES:  # the first requests of an engine take seconds
                running.seconds(batch, 16, 2)
            yield running
    finally:
        process.terminate()
        process.wait(30)


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
    seen: dict[tuple[TierName, bool, str], list[float]] = {}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory()))
        engines = [
            stack.enter_context(
                engine(
                    spec_of(c.tier, c.path), settings.engine.python, logs, plugin=plugin
                )
            )
            for c in checkpoints
            for plugin in ((False, True) if c.tier is not TierName.PRECISE else (True,))
        ]
        for number in range(rounds):
            for running in engines:
                print(
                    f"round {number + 1} of {rounds}: {running.tier}",
                    file=sys.stderr,
                    flush=True,
                )
                for batch in BATCHES:
                    seen.setdefault((*running[:2], f"batch {batch}"), []).append(
                        running.decode_ms(batch)
                    )
                for tokens in PREFILLS:
                    seen.setdefault((*running[:2], f"prefill {tokens}"), []).append(
                        running.prefill_ms(tokens)
                    )
        report({key: statistics.median(values) for key, values in seen.items()})
        compare({(running.tier, running.plugin): running for running in engines})


def spec_of(tier: TierName, path: Path) -> TierSpec:
    """Return a tier of a checkpoint."""
    return TierSpec(
        name=tier,
        max_model_len=2048,
        max_num_seqs=16,
        max_in_flight=16,
        checkpoint=path,
    )


def report(found: dict[tuple[TierName, bool, str], float]) -> None:
    """Print the table: milliseconds, and in parentheses the ratio to BF16."""
    commit = check_output(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True
    ).strip()
    print(
        f"commit {commit}; {machine_name()}; one engine at work at a time, on one core"
    )
    columns = [*(f"batch {b}" for b in BATCHES), *(f"prefill {t}" for t in PREFILLS)]
    print(
        "ms a token by batch, ms of prefill by prompt tokens; in parentheses the ratio to precise"
    )
    print(f"{'':22}" + "".join(f"{name:>18}" for name in columns))
    for tier in (TierName.PRECISE, TierName.BALANCED, TierName.FAST):
        for plugin in (False, True):
            if (tier, plugin, columns[0]) not in found:
                continue
            cells = []
            for name in columns:
                value = found[tier, plugin, name]
                cells.append(
                    f"{value:>9.1f} ({value / found[TierName.PRECISE, True, name]:>5.2f})"
                )
            label = (
                ""
                if tier is TierName.PRECISE
                else ", plugin"
                if plugin
                else ", vLLM's own"
            )
            print(f"{tier + label:22}" + "".join(f"{cell:>18}" for cell in cells))


def compare(engines: dict[tuple[TierName, bool], Engine]) -> None:
    """Print how alike answers are with vLLM's kernels and with the plugin's."""
    print(
        f"\ngreedy answers to {len(PROMPTS)} prompts, {ANSWER} tokens each; shares of tokens in %"
    )
    others = (
        "vLLM of plugin's",
        "plugin of vLLM's",
        "vLLM of its own",
        "plugin of its own",
        "plugin of precise's",
    )
    columns = ("equal until first other", *others)
    print(f"{'':10}" + "".join(f"{name:>25}" for name in columns))
    precise = engines[TierName.PRECISE, True].answers()
    for tier in (TierName.BALANCED, TierName.FAST):
        before, after = engines[tier, False], engines[tier, True]
        said, says = before.answers(), after.answers()
        pairs = [(old, new) for (_, old), (_, new) in zip(said, says, strict=True)]
        same = sum(
            len(
                list(
                    takewhile(lambda both: both[0] == both[1], zip(*pair, strict=False))
                )
            )
            for pair in pairs
        )
        shares = [
            same / sum(len(old) for old, _ in pairs),
            before.chooses(says),
            after.chooses(said),
        ]
        shares += [before.chooses(said), after.chooses(says), after.chooses(precise)]
        print(f"{tier:10}" + "".join(f"{share * 100:>25.1f}" for share in shares))


if __name__ == "__main__":
    main()
