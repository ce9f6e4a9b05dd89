"""What speculative decoding brings to ``precise``: without a draft, with n-grams, and with the ``fast`` checkpoint as draft.

    .venv/bin/python benchmarks/drafts.py [--rounds 3] [--tokens 4]

Greedy answers to chats, and to requests to write given code again with a change, at one and at four requests at a time:
milliseconds a token, the drafted tokens that were accepted, and how much of each answer is the same as without a draft, up
to the first other character. One engine is at work at a time, on one core; medians over rounds in which the engines take
turns. How much answers differ by the size of the batch alone, without a draft, is told as well.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from subprocess import check_output
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import httpx
from kernels import engine
from measure import ROOT

sys.path.insert(0, str(ROOT))
from router.deployment.layout import prepare_options
from router.settings import load_settings
from tiers.checkpoints.prepare import find
from tiers.plan import machine_name
from tiers.probe import CHAT, EngineProbe
from tiers.spec import NGRAM, Draft, TierName, TierSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

ANSWER = 64  # tokens of each answer
AT_ONCE = (1, 4)
CODE = """def total(prices, rate):
    result = 0
    for price in prices:
        if price < 0:
            raise ValueError("a price must not be negative")
        result += price * (1 + rate)
    return round(result, 2)
"""
PROMPTS = {
    "chat": (
        "What is the capital of France, and what is it known for?",
        "Explain how rain forms.",
        "Give me three tips for learning a language.",
        "Why do people dream?",
    ),
    "code": tuple(
        f"{ask} Answer with the whole function only.\n\n{CODE}"
        for ask in (
            "Rename the function to sum_prices.",
            "Rename the variable result to amount.",
            "Add a docstring.",
            "Write this function again.",
        )
    ),
}


class Engine(NamedTuple):
    """One running engine: ``draft`` is what it drafts with; empty: nothing."""

    draft: str
    url: str


class Round(NamedTuple):
    """One round of one kind of prompts on one engine."""

    ms_a_token: float
    drafted: int
    accepted: int
    answers: list[str]


async def ask(running: Engine, prompts: Sequence[str], at_once: int) -> Round:
    """Answer prompts, some at a time."""
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        probe, limit = EngineProbe(client, running.url, ""), asyncio.Semaphore(at_once)

        async def one(prompt: str) -> tuple[str, float]:
            body = {
                "model": "m",
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": ANSWER,
            }
            async with limit:
                answer = await probe.generate(CHAT, body, 600)
            assert answer.tpot_ms is not None
            return answer.text, answer.tpot_ms

        before, _ = await probe.readings()
        found = await asyncio.gather(*map(one, prompts))
        # the engine counts a step after it has sent the step's tokens
        await asyncio.sleep(1)
        after, _ = await probe.readings()
        return Round(
            statistics.fmean(ms for _, ms in found),
            after.drafted - before.drafted,
            after.accepted - before.accepted,
            [text for text, _ in found],
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4, help="drafted at a time")
    options = parser.parse_args()
    settings = load_settings(None, {})
    checkpoints = find(prepare_options(settings))
    if checkpoints is None:
        raise SystemExit("the checkpoints are not made yet: run 'make checkpoints'")
    folders = {checkpoint.tier: checkpoint.path for checkpoint in checkpoints}
    drafts = {
        "": None,
        NGRAM: Draft(NGRAM, options.tokens),
        "fast": Draft("fast", options.tokens, folders[TierName.FAST]),
    }
    seen: dict[tuple[str, str, int], list[Round]] = {}
    with ExitStack() as stack:
        logs, engines = Path(stack.enter_context(TemporaryDirectory())), []
        for name, draft in drafts.items():
            print(
                f"starting precise, draft: {name or 'none'}",
                file=sys.stderr,
                flush=True,
            )
            spec = TierSpec(
                TierName.PRECISE,
                2048,
                16,
                16,
                checkpoint=folders[TierName.PRECISE],
                draft=draft,
            )
            running = stack.enter_context(
                engine(spec, settings.engine.python, logs, plugin=True)
            )
            engines.append(Engine(name, running.url))
        for number in range(options.rounds):
            for running in engines:
                print(
                    f"round {number + 1} of {options.rounds}: {running.draft or 'none'}",
                    file=sys.stderr,
                    flush=True,
                )
                for kind, prompts in PROMPTS.items():
                    for at_once in AT_ONCE:
                        found = asyncio.run(ask(running, prompts, at_once))
                        seen.setdefault((running.draft, kind, at_once), []).append(
                            found
                        )
    report(seen, options.tokens)


def report(seen: dict[tuple[str, str, int], list[Round]], tokens: int) -> None:
    """Print the table."""
    commit = check_output(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True
    ).strip()
    print(
        f"commit {commit}; {machine_name()}; precise, one engine at work at a time, on one core"
    )
    print(f"{tokens} tokens drafted at a time; in parentheses the ratio to no draft")
    print(
        f"{'prompts':10}{'at once':>8}{'draft':>8}{'ms a token':>18}{'accepted':>16}{'same text %':>12}"
    )
    for kind in PROMPTS:
        for at_once in AT_ONCE:
            plain = seen["", kind, at_once]
            for draft in ("", NGRAM, "fast"):
                rounds = seen[draft, kind, at_once]
                ms, base = (
                    statistics.median(r.ms_a_token for r in found)
                    for found in (rounds, plain)
                )
                drafted, accepted = (
                    sum(r.drafted for r in rounds),
                    sum(r.accepted for r in rounds),
                )
                share = f"{accepted} of {drafted}" if drafted else "-"
                same = 100 * statistics.fmean(
                    alike(one, other)
                    for a, b in zip(rounds, plain, strict=True)
                    for one, other in zip(a.answers, b.answers, strict=True)
                )
                times = f"{ms:.1f} ({ms / base:.2f})"
                print(
                    f"{kind:10}{at_once:>8}{draft or 'none':>8}{times:>18}{share:>16}{same:>12.0f}"
                )

    small, large = (seen["", "chat", at_once][0].answers for at_once in AT_ONCE)
    same = 100 * statistics.fmean(map(alike, large, small))
    print(
        f"without a draft, of chats at {AT_ONCE[1]} at once against {AT_ONCE[0]} at a time: {same:.0f} % the same text"
    )


def alike(one: str, other: str) -> float:
    """Return the share of an answer before the first character that differs from another's."""
    same = sum(
        1
        for _ in takewhile(
            lambda pair: pair[0] == pair[1], zip(one, other, strict=False)
        )
    )
    return same / max(len(other), 1)


if __name__ == "__main__":
    main()
