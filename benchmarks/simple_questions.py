"""Whether what the router says of a tier's losses holds: simple questions with keys, asked of a running router.

    .venv/bin/qarr up                                            # or make up
    .venv/bin/python benchmarks/simple_questions.py [--url http://localhost:8080]

Of each question of ``simple_questions.jsonl``, ``POST /route`` tells which tier is chosen, and the largest loss that is
stated for each tier. Then every tier answers it, greedily, and its answers are checked against the key. Printed by tier:
how often it is chosen; how many of its answers are worse and better than those of ``precise``, to all questions and to
those that it is chosen for, with the net of 100 and its 95 % interval; and beside that the stated loss, as a mean. A
statement holds if the interval does not lie above it. Last come greetings, proofs, code and long calculations
(``greetings_and_hard_prompts.jsonl``), of which only the tier is looked at.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import httpx
from measure import ROOT, note

sys.path.insert(0, str(ROOT))

from router.profiling.model_answer import ModelAnswer
from router.profiling.tasks import Task, read_tasks

if TYPE_CHECKING:
    from collections.abc import Sequence

FOLDER = Path(__file__).parent
QUESTIONS = FOLDER / "simple_questions.jsonl"
OTHERS = FOLDER / "greetings_and_hard_prompts.jsonl"
REFERENCE = "precise"
Z95 = 1.96
# questions: fewer than fill half of a tier's slots, so no more loss is allowed than at idle
AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """One tier's answer to one question.

    Attributes:
        is_right: By the question's key.
        was_right: Whether the reference's answer is.
        is_chosen: Whether the router chooses the tier for the question.
        stated: Upper end of the tier's expected loss, as the router states it.
        source: What that rests on.
    """

    tier: str
    is_right: bool
    was_right: bool
    is_chosen: bool
    stated: float
    source: str

    @property
    def is_worse(self) -> bool:
        """Return whether it is wrong where the reference is right."""
        return self.was_right and not self.is_right

    @property
    def is_better(self) -> bool:
        """Return whether it is right where the reference is wrong."""
        return self.is_right and not self.was_right


def main() -> None:
    """Ask all questions and print what came of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    options = parser.parse_args()
    questions = read_tasks(QUESTIONS)
    print(f"$ python benchmarks/simple_questions.py   # {len(questions)} questions")
    answers: list[Answer] = []
    with httpx.Client(base_url=options.url, timeout=300, trust_env=False) as client:
        with ThreadPoolExecutor(AT_ONCE) as asking:
            asked = [asking.submit(ask, client, question) for question in questions]
            for number, each in enumerate(asked, 1):
                answers += each.result()
                if number % 25 == 0:
                    note(f"{number} of {len(questions)}")
        print_answers(answers)
        print_tiers(client)


def ask(client: httpx.Client, question: Task) -> list[Answer]:
    """Ask every tier one question, and the router which of them it would choose."""
    decision = client.post(
        "/route", json={"prompt": question.prompt, "max_tokens": question.max_tokens}
    ).json()
    is_right = {}
    for verdict in decision["tiers"]:
        is_right[verdict["tier"]] = question.check.passes(
            ModelAnswer(text=answer(client, question, verdict["tier"]))
        )
    return [
        Answer(
            tier=verdict["tier"],
            is_right=is_right[verdict["tier"]],
            was_right=is_right[REFERENCE],
            is_chosen=verdict["tier"] == decision["tier"],
            stated=verdict["expected_loss_interval"][1],
            source=verdict["loss_source"],
        )
        for verdict in decision["tiers"]
    ]


def answer(client: httpx.Client, question: Task, model: str) -> str:
    """Return a tier's greedy answer."""
    body = {
        "model": model,
        "messages": question.messages,
        "max_tokens": question.max_tokens,
        "temperature": 0,
    }
    response = client.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    return response.json()["choices"][0]["message"]["content"] or ""


def print_answers(answers: Sequence[Answer]) -> None:
    """Print two rows for each tier: its answers to all questions, and to those that it is chosen for."""
    heads = f"{'tier':10}{'questions':>16}{'right':>7}{'worse':>7}{'better':>8}{'net lost of 100':>24}{'stated, up to':>15}"
    print(f"{heads}  rests on")
    for tier in dict.fromkeys(each.tier for each in answers):
        own = [each for each in answers if each.tier == tier]
        chosen = [each for each in own if each.is_chosen]
        print(row(tier, f"all {len(own)}", own))
        print(
            row(tier, f"chosen for {len(chosen)}", chosen)
            if chosen
            else f"{tier:10}{'chosen for 0':>16}"
        )


def row(tier: str, name: str, answers: Sequence[Answer]) -> str:
    """Return what came of some of a tier's answers, and whether what is stated holds."""
    worse = sum(each.is_worse for each in answers)
    better = sum(each.is_better for each in answers)
    net = (worse - better) / len(answers)
    spread = (
        Z95
        * math.sqrt(max(worse + better - (worse - better) * net, 0.0))
        / len(answers)
    )
    low, high = 100 * (net - spread), 100 * (net + spread)
    stated = 100 * fmean(each.stated for each in answers)
    verdict = "holds" if low <= stated else "DOES NOT HOLD"
    sources = Counter(each.source for each in answers)
    right = sum(each.is_right for each in answers)
    return (
        f"{tier:10}{name:>16}{right:7}{worse:7}{better:8}{f'{100 * net:.1f} ({low:.1f} to {high:.1f})':>24}{stated:15.1f}  "
        f"{', '.join(f'{source} {times}' for source, times in sources.most_common())}: {verdict}"
    )


def print_tiers(client: httpx.Client) -> None:
    """Print which tiers greetings and hard prompts go to."""
    tiers_by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for line in OTHERS.read_text("utf-8").splitlines():
        prompt: dict[str, Any] = json.loads(line)
        decision = client.post("/route", json={"prompt": prompt["prompt"]}).json()
        tiers_by_kind[prompt["kind"]][decision["tier"]] += 1
    for kind, tiers in tiers_by_kind.items():
        print(
            f"{kind:12}"
            + ", ".join(f"{tier} {times}" for tier, times in tiers.most_common())
        )


if __name__ == "__main__":
    main()
