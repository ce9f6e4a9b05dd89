"""Score the classifier against labelled prompts.

usage: python benchmarks/classifier_quality.py LABELLED.jsonl [--errors]

Each line is an object with ``text``, ``contains_code``, ``asks_for_code``, ``language``, and optionally ``kind`` and
``borderline`` (left out of the scores).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter as Tally
from pathlib import Path
from typing import Any

from classifier import EstimatingCounter, PromptFeatures, extract


def main() -> None:
    """Print precision, recall and F1 for each label, and where the errors are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--errors", action="store_true", help="list what was misjudged")
    args = parser.parse_args()
    counter = EstimatingCounter()
    cases = [json.loads(line) for line in args.file.read_text("utf-8").splitlines()]
    results = [(case, extract(case["text"], counter)) for case in cases if not case.get("borderline")]
    print(f"{len(results)} prompts, {len(cases) - len(results)} borderline ones left out")
    for label in ("has_code", "contains_code", "asks_for_code"):
        _scores(label, [(_label(case, label), _found(f, label)) for case, f in results])
    _false_positives("hard negatives", [r for r in results if r[0].get("kind", "").startswith("hard_negative")])
    _false_positives("programming topics", [r for r in results if r[0].get("kind") == "programming_topic"])
    named = [(case["language"], f.language) for case, f in results if case.get("language")]
    print(f"language: {sum(a == b for a, b in named)} of {len(named)} right")
    print("classes:", dict(Tally(f.prompt_class.value for _, f in results).most_common()))
    unsure = sum(f.confidence < 0.6 for _, f in results)
    print(f"confidence below 0.6: {unsure} of {len(results)}")
    if args.errors:
        _list_errors(results)


def _label(case: dict[str, Any], label: str) -> bool:
    return bool(case["contains_code"] or case["asks_for_code"]) if label == "has_code" else bool(case[label])


def _found(features: PromptFeatures, label: str) -> bool:
    if label == "has_code":
        return features.contains_code or features.asks_for_code
    return bool(getattr(features, label))


def _scores(label: str, pairs: list[tuple[bool, bool]]) -> None:
    tally = Tally(pairs)
    hit, missed, false = tally[True, True], tally[True, False], tally[False, True]
    precision, recall = hit / max(hit + false, 1), hit / max(hit + missed, 1)
    f1 = 2 * hit / max(2 * hit + missed + false, 1)
    print(f"{label:14} F1 {f1:.3f}  precision {precision:.3f}  recall {recall:.3f}  missed {missed}  false {false}")


def _false_positives(name: str, results: list[tuple[dict[str, Any], PromptFeatures]]) -> None:
    false = [case.get("id", "?") for case, f in results if _found(f, "has_code")]
    print(f"false positives on {name}: {len(false)} of {len(results)} {' '.join(false)}")


def _list_errors(results: list[tuple[dict[str, Any], PromptFeatures]]) -> None:
    for case, f in results:
        wrong = [x for x in ("contains_code", "asks_for_code") if _label(case, x) != _found(f, x)]
        if case.get("language") and case["language"] != f.language and _found(f, "has_code"):
            wrong.append(f"language {case['language']} taken for {f.language}")
        if wrong:
            print(f"\n{case.get('id')} {', '.join(wrong)}; {', '.join(f.signals)}\n    {case['text'][:160]!r}")


if __name__ == "__main__":
    main()
