"""Print how well the classifier finds code in labelled prompts.

    python benchmarks/classifier_quality.py FILE.jsonl [--errors]

Each line has ``id``, ``text``, ``contains_code``, ``asks_for_code``, ``has_code``, ``language``, ``kind``, ``borderline``
and ``programming_topic``. Borderline prompts are left out of all scores. Tokens are estimated: of the classes only
``long_context`` depends on them.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from classifier import EstimatingCounter, PromptFeatures, extract

Pair: TypeAlias = tuple[dict[str, Any], PromptFeatures]
LABELS = ("contains_code", "asks_for_code", "has_code")


def main() -> None:
    """Read the file, classify and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="labelled prompts, one JSON object a line")
    parser.add_argument(
        "--errors", action="store_true", help="list the prompts that are judged otherwise than labelled"
    )
    options = parser.parse_args()
    counter = EstimatingCounter()
    rows = [json.loads(line) for line in options.file.read_text("utf-8").splitlines() if line]
    strict = [(row, extract(row["text"], counter)) for row in rows if not row["borderline"]]
    print(f"{len(strict)} prompts; {len(rows) - len(strict)} borderline ones left out")
    for label in LABELS:
        print(f"{label:<14} {score(strict, label)}")
    print_false_positives(strict)
    print_language(strict)
    print_classes(strict)
    if options.errors:
        print_errors(strict)


def score(pairs: list[Pair], label: str) -> str:
    """Return precision, recall and F1 of a label as text."""
    counts = Counter((bool(row[label]), bool(getattr(features, label))) for row, features in pairs)
    right, missed, wrong = counts[True, True], counts[True, False], counts[False, True]
    precision, recall = right / max(right + wrong, 1), right / max(right + missed, 1)
    f1 = 2 * right / max(2 * right + wrong + missed, 1)
    return f"precision {precision:.3f}  recall {recall:.3f}  F1 {f1:.3f}  ({wrong} wrongly found, {missed} missed)"


def print_false_positives(pairs: list[Pair]) -> None:
    """Print how many prompts without code, that look or sound like it, are taken for code."""
    hard = [features for row, features in pairs if row["kind"].startswith("hard_negative")]
    topic = [features for row, features in pairs if row["programming_topic"] and not row["has_code"]]
    for name, group in (("hard negatives", hard), ("programming topic, no code", topic)):
        print(f"{name}: {sum(features.has_code for features in group)} of {len(group)} taken for code")


def print_language(pairs: list[Pair]) -> None:
    """Print how often the labelled language is found."""
    labelled = [(row["language"], features.language) for row, features in pairs if row["language"]]
    print(f"language: {sum(a == b for a, b in labelled)} of {len(labelled)} right")


def print_classes(pairs: list[Pair]) -> None:
    """Print how many prompts are of each class, and the confidence in it."""
    groups: dict[str, list[float]] = {}
    for _, features in pairs:
        groups.setdefault(features.prompt_class, []).append(features.confidence)
    for name, values in sorted(groups.items(), key=lambda item: -len(item[1])):
        unsure = sum(value < 0.6 for value in values)  # where the router's default doubts a class
        print(f"class {name:<13} {len(values):>4}  confidence: median {median(values):.2f}, {unsure} below 0.6")


def print_errors(pairs: list[Pair]) -> None:
    """List the prompts that are judged otherwise than labelled."""
    for row, features in pairs:
        wrong = [label for label in LABELS if bool(row[label]) != bool(getattr(features, label))]
        if wrong:
            print(f"{row['id']} {row['kind']}: {', '.join(wrong)} wrong; {list(features.signals)}")
        elif row["language"] and row["language"] != features.language:
            print(f"{row['id']} {row['kind']}: language {features.language} instead of {row['language']}")


if __name__ == "__main__":
    main()
