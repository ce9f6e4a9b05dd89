"""Classify 10,000 labelled prompts with a classifier that was trained without them, for benchmarks of what its errors cost.

    .venv-classifier/bin/python benchmarks/held_out_prompts.py --data classifier/data --data MORE

Whole batches of prompts that people wrote and labelled are left out of the training (``scripts/train_classifier.py``, whose
help says what MORE is), until there are ``PROMPTS`` of them. Writes ``held_out_prompts.jsonl.gz`` beside this file: for each
prompt the class and complexity that people gave, what the classifier found, and the number of tokens; no text.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import train_classifier as training  # noqa: E402  it is found by the line above

from classifier import features  # noqa: E402
from classifier.features import EstimatingCounter, extract  # noqa: E402
from classifier.model import Model, model_of, shipped_model  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

OUTPUT = Path(__file__).with_name("held_out_prompts.jsonl.gz")
PROMPTS = 10_000


def main() -> None:
    """Train without some prompts, classify those, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data",
        type=Path,
        action="append",
        required=True,
        help="folder or file of JSON lines",
    )
    options = parser.parse_args()
    prompts, _ = training.read_prompts(options.data)
    prompts = training.choose(prompts, random.Random(0))
    left_out = choose_batches(prompts)
    labels = training.label(prompts)
    kept = [row for row in range(len(prompts)) if row not in left_out]
    model = training.fit([prompts[row] for row in kept], [labels[row] for row in kept])
    lines = classify(
        calibrated_as_shipped(model), [prompts[row] for row in sorted(left_out)]
    )
    random.Random(0).shuffle(lines)
    with gzip.GzipFile(OUTPUT, "wb", mtime=0) as file:
        file.write("".join(lines).encode())
    sys.stderr.write(f"{len(lines)} prompts in {OUTPUT}\n")


def choose_batches(prompts: Sequence[dict[str, Any]]) -> set[int]:
    """Return the rows of the prompts that are left out: whole batches, in random order, until there are enough."""
    rows_by_batch = defaultdict(list)
    for row, prompt in enumerate(prompts):
        if training.written(prompt) and prompt.get("complexity"):
            rows_by_batch[prompt["source"]].append(row)
    batches = sorted(rows_by_batch)
    random.Random(1).shuffle(batches)
    chosen: set[int] = set()
    for batch in batches:
        if len(chosen) < PROMPTS:
            chosen.update(rows_by_batch[batch])
    return chosen


def calibrated_as_shipped(model: Any) -> Model:
    """Return a trained model with the calibration of the one that comes with the package."""
    shipped = shipped_model()
    return model_of(model, list(shipped.slope), list(shipped.shift), {})


def classify(model: Model, prompts: Sequence[dict[str, Any]]) -> list[str]:
    """Return a JSON line for each prompt."""
    features.shipped_model = lambda: model  # type: ignore[assignment]
    lines = []
    for prompt in prompts:
        found = extract(prompt["text"], EstimatingCounter())
        fields = {
            "class": "code"
            if prompt["contains_code"] or prompt["asks_for_code"]
            else prompt["class"],
            "complexity": prompt["complexity"],
            "found_class": found.prompt_class.value,
            "found_complexity": found.complexity.value
            if found.complexity is not None
            else None,
            "confidence": round(found.confidence, 3),
            "has_code": found.has_code,
            "tokens": found.tokens,
        }
        lines.append(json.dumps(fields) + "\n")
    return lines


if __name__ == "__main__":
    main()
