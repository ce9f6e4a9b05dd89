"""Write the prompts that models are calibrated on where there is a GPU: tiers/checkpoints/calibration_gpu.jsonl.

    .venv/bin/python scripts/calibration_set.py

These are the 160 prompts of calibration.jsonl and the longest of each class in classifier/data. The same data give the same
file.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHORT_SET = ROOT / "tiers/checkpoints/calibration.jsonl"
DATA = ROOT / "classifier/data"
OUTPUT = ROOT / "tiers/checkpoints/calibration_gpu.jsonl"
PROMPTS = 512
# The classes of classifier/data, and how many prompts of each are added.
SHARES = {
    "code": 112,
    "chat": 70,
    "writing": 60,
    "extraction": 50,
    "multilingual": 40,
    "math": 20,
}


def main() -> None:
    """Choose the prompts and write the file."""
    lines = SHORT_SET.read_text("utf-8").splitlines()
    known_texts = {json.loads(line)["text"] for line in lines}
    added = longest_prompts(known_texts)
    lines += added
    if len(lines) != PROMPTS:
        sys.exit(f"{len(lines)} prompts instead of {PROMPTS}: correct SHARES")
    OUTPUT.write_text("\n".join(lines) + "\n", "utf-8")
    sys.stderr.write(f"{len(lines)} prompts in {OUTPUT}\n")


def longest_prompts(known_texts: set[str]) -> list[str]:
    """Return the longest prompts of each class that are not there yet, as lines of the file."""
    texts_by_class: dict[str, set[str]] = defaultdict(set)
    for path in sorted(DATA.glob("*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            prompt = json.loads(line)
            if prompt["text"] not in known_texts:
                texts_by_class[prompt["class"]].add(prompt["text"])
    lines = []
    for prompt_class, count in SHARES.items():
        texts = sorted(
            texts_by_class[prompt_class], key=lambda text: (-len(text), text)
        )
        lines += [
            json.dumps({"category": prompt_class, "text": text}, ensure_ascii=False)
            for text in texts[:count]
        ]
    return lines


if __name__ == "__main__":
    main()
