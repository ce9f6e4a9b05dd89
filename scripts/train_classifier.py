"""Train the classifier's weights from labelled prompts and write the file that comes with the package.

    python scripts/train_classifier.py --data DIR [--output classifier/weights.json]

The folder is described in ``classifier/corpus.py``. Only Python is needed. The same data gives the same bytes on
one version of Python; another may round the last digit of a weight otherwise.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from classifier.corpus import read_corpus
from classifier.training import TrainingSettings, train
from classifier.weights import WEIGHTS_FILE


def main() -> None:
    """Read, train, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of calibration.jsonl and routing.jsonl")
    parser.add_argument("--output", type=Path, default=WEIGHTS_FILE, help="weights file (default: the package's)")
    options = parser.parse_args()
    corpus = read_corpus(options.data)
    weights = train(corpus.examples, TrainingSettings(), {"data_sha256": corpus.digest})
    options.output.write_text(weights.dump(), "utf-8")
    print(f"{len(corpus.examples)} prompts, temperature {weights.temperature}; wrote {options.output.name}")


if __name__ == "__main__":
    main()
