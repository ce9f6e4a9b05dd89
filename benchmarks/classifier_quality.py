"""Print how good the classifier is on labelled prompts, with the first look alone and with the second where it is in doubt.

    python benchmarks/classifier_quality.py FILE [FILE ...]

A file has JSON lines with ``text``, ``contains_code`` and ``asks_for_code``, and where they are known ``class``,
``complexity``, ``language`` and ``nl``; those marked ``borderline`` are left out. Figures mean something only on prompts
that the weights were not trained on.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import psutil

from classifier import (
    EstimatingCounter,
    PromptFeatures,
    SecondLook,
    extract,
    load_second_look,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Case = tuple[dict[str, Any], PromptFeatures]


def main() -> None:
    """Read, classify, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    options = parser.parse_args()
    counter = EstimatingCounter()
    second = load_and_weigh_second_look()
    for file in options.files:
        prompts = [
            json.loads(line) for line in file.read_text("utf-8").split("\n") if line
        ]
        prompts = [prompt for prompt in prompts if not prompt.get("borderline")]
        first = [(prompt, extract(prompt["text"], counter)) for prompt in prompts]
        columns, took = {"first look": figures(first)}, []
        if second is not None:
            both = []
            for prompt, features in first:
                if features.doubtful:
                    began = time.perf_counter()
                    features = extract(  # noqa: PLW2901
                        prompt["text"], counter, second=second.read(prompt["text"])
                    )
                    took.append((time.perf_counter() - began) * 1000)
                both.append((prompt, features))
            columns["with second look"] = figures(both)
        print(
            f"{file.name}, {len(prompts)} prompts"
            + "".join(f"{name:>18}" for name in columns)
        )
        for name in columns["first look"]:
            print(
                f"  {name:34}"
                + "".join(f"{column[name]:18.3f}" for column in columns.values())
            )
        if took:
            share, each = len(took) / len(prompts), median(took)
            print(
                f"  looked at again: {share:.1%}, {each:.1f} ms each (median), {sum(took) / len(prompts):.2f} ms a prompt\n"
            )


def load_and_weigh_second_look() -> SecondLook | None:
    """Load the second look, and print what it takes in memory once it has read a prompt, and to load."""
    extract("warm up the first look", EstimatingCounter())
    process = psutil.Process()
    bytes_before = process.memory_info().rss
    began = time.perf_counter()
    second = load_second_look()
    load_s = time.perf_counter() - began
    if second is None:
        return None
    second.read("def f(x):\n    return x" * 100)
    megabytes = (process.memory_info().rss - bytes_before) / 1e6
    print(f"the second look: {megabytes:.0f} MB of memory, {load_s:.1f} s to load\n")
    return second


def figures(cases: list[Case]) -> dict[str, float]:
    """Return F1 and shares, 0..1."""

    def f1(
        found: Callable[[Case], bool], right: Callable[[Case], bool], among: list[Case]
    ) -> float:
        both = sum(found(case) and right(case) for case in among)
        return 2 * both / max(sum(found(case) + right(case) for case in among), 1)

    def has(case: Case) -> bool:
        return bool(case[0]["contains_code"] or case[0]["asks_for_code"])

    def share(found: Callable[[Case], bool], among: list[Case]) -> float:
        return fmean(map(found, among)) if among else float("nan")

    prose = [case for case in cases if not has(case)]
    with_code = [case for case in cases if has(case) and case[0].get("language")]
    degrees = {
        kind: [case for case in cases if case[0].get("complexity") == kind]
        for kind in ("trivial", "complex")
    }
    classes = {case[0].get("class") for case in prose} - {None, "code"}
    each = [
        f1(
            lambda c, k=k: c[1].prompt_class == k,
            lambda c, k=k: c[0].get("class") == k,
            prose,
        )
        for k in classes
    ]
    foreign = [
        case
        for case in cases
        if (case[0].get("nl") or case[0].get("natural_language") or "en") != "en"
    ]
    return {
        "F1 has code": f1(lambda case: case[1].has_code, has, cases),
        "F1 asks for code": f1(
            lambda c: c[1].asks_for_code, lambda c: bool(c[0]["asks_for_code"]), cases
        ),
        "F1 has code, other languages": f1(lambda case: case[1].has_code, has, foreign),
        "prose called code": share(lambda case: case[1].has_code, prose),
        "programming language right": share(
            lambda case: case[1].language == case[0]["language"], with_code
        ),
        "F1 of classes, mean": fmean(each) if each else float("nan"),
        **{
            f"{k} found": share(lambda case, k=k: case[1].complexity == k, among)
            for k, among in degrees.items()
        },
    }


if __name__ == "__main__":
    main()
