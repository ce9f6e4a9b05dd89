"""What speculative decoding brings to ``precise``: without a draft, with n-grams, and with the ``fast`` checkpoint as draft.

    .venv/bin/python benchmarks/drafts.py [--rounds 3] [--tokens 4]

Greedy answers to chats, and to requests to write given code again with a change, at one and at four requests at a time:
milliseconds a token, the share of drafted tokens that were accepted, and how much of each answer is the same as without a
draft, up to the first other token. One engine is at work at a time, on one core; medians over rounds in which the engines
take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
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
from tiers.probe import EngineProbe
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
    answers: list[list[int]]


async def ask(running: Engine, prompts: Sequence[str], at_once: int) -> Round:
    """Answer prompts, some at a time."""
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        probe = EngineProbe(client, running.url, "")
        before, _ = await probe.readings()
        limit, answers = asyncio.Semaphore(at_once), []

        async def one(prompt: str) -> tuple[list[int], float]:
            body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "temperature": 0}
            body |= {"max_tokens": ANSWER, "return_token_ids": True}
            async with limit:
                began = time.perf_counter()
                await client.post(f"{running.url}/v1/chat/completions", json={**body, "max_tokens": 1})
                first = time.perf_counter()
                answer = await client.post(f"{running.url}/v1/chat/completions", json=body)
                ids: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
                # The second one's prompt is in the prefix cache: what it takes longer than one token is decoding.
                return ids, (time.perf_counter() - first - min(first - began, 0.02)) * 1000 / max(len(ids) - 1, 1)

        found = await asyncio.gather(*map(one, prompts))
        answers = [ids for ids, _ in found]
        after, _ = await probe.readings()
        return Round(
            statistics.fmean(ms for _, ms in found),
            after.drafted - before.drafted,
            after.accepted - before.accepted,
            answers,
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
            print(f"starting precise, draft: {name or 'none'}", file=sys.stderr, flush=True)
            spec = TierSpec(TierName.PRECISE, 2048, 16, 16, checkpoint=folders[TierName.PRECISE], draft=draft)
            running = stack.enter_context(engine(spec, settings.engine.python, logs, plugin=True))
            engines.append(Engine(name, running.url))
        for number in range(options.rounds):
            for running in engines:
                print(f"round {number + 1} of {options.rounds}: {running.draft or 'none'}", file=sys.stderr, flush=True)
                for kind, prompts in PROMPTS.items():
                    for at_once in AT_ONCE:
                        found = asyncio.run(ask(running, prompts, at_once))
                        seen.setdefault((running.draft, kind, at_once), []).append(found)
    report(seen, options.tokens)


def report(seen: dict[tuple[str, str, int], list[Round]], tokens: int) -> None:
    """Print the table."""
    commit = check_output(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True).strip()
    print(f"commit {commit}; {machine_name()}; precise, one engine at work at a time, on one core")
    print(f"{tokens} tokens drafted at a time; in parentheses the ratio to no draft")
    print(f"{'prompts':10}{'at once':>8}{'draft':>8}{'ms a token':>18}{'accepted %':>12}{'same text %':>12}")
    for kind in PROMPTS:
        for at_once in AT_ONCE:
            plain = seen["", kind, at_once]
            for draft in ("", NGRAM, "fast"):
                rounds = seen[draft, kind, at_once]
                ms, base = (statistics.median(r.ms_a_token for r in found) for found in (rounds, plain))
                drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
                share = f"{100 * accepted / drafted:.0f}" if drafted else "-"
                same = 100 * statistics.fmean(
                    alike(one, other)
                    for a, b in zip(rounds, plain, strict=True)
                    for one, other in zip(a.answers, b.answers, strict=True)
                )
                times = f"{ms:.1f} ({ms / base:.2f})"
                print(f"{kind:10}{at_once:>8}{draft or 'none':>8}{times:>18}{share:>12}{same:>12.0f}")


def alike(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the share of an answer before the first token that differs from another's."""
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    return same / max(len(other), 1)


if __name__ == "__main__":
    main()
