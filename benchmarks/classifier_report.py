"""Print how well the classifier tells the classes of labelled prompts apart, and how honest its confidence is.

    python benchmarks/classifier_report.py --data DIR [--against REVISION] [--also FILE.jsonl]

The folder is described in ``classifier/corpus.py``. Every prompt is scored by weights that were trained, and calibrated,
without its fold; prompts from one template, and translations of one another, are in one fold. ``--against`` runs the
classifier of another revision on the same prompts. ``--also`` scores prompts of another source (``text``, ``class``) with
weights trained on the whole folder, which does not hold them. The patterns were written, and the settings of the training
chosen, with both in view; only the weights and the calibration were not.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from classifier import PromptClass
from classifier.corpus import CALIBRATION, ROUTING, Corpus, make_example, read_corpus
from classifier.training import Example, TrainingSettings, fold_of, judge_example, train

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from classifier.classes import Judgement

ROOT = Path(__file__).resolve().parents[1]
FOLDS = 10
BINS = (0.0, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
DOUBT = 0.6  # the router's default, below which it takes one tier more
# Prompts that have these are of one class to the data's labels and of another to the hand-set weights: a second comparison
# leaves them out.
DISPUTED = frozenset({"role-play", "supposition", "yes-or-no question"})
_OLD = """
import json, sys
sys.path.insert(0, sys.argv[1])
from classifier import EstimatingCounter, extract
for line in sys.stdin:
    features = extract(json.loads(line), EstimatingCounter())
    print(features.prompt_class, features.confidence)
"""


@dataclass(frozen=True, slots=True)
class Scored:
    """A prompt's label, what was predicted, and the confidence in it, 0..1."""

    label: PromptClass
    predicted: PromptClass
    confidence: float

    @property
    def right(self) -> bool:
        """Tell whether the prediction is the label."""
        return self.predicted is self.label


def main() -> None:
    """Read, train by folds, score and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of calibration.jsonl and routing.jsonl")
    parser.add_argument("--against", metavar="REVISION", help="git revision whose classifier is scored as well")
    parser.add_argument("--also", type=Path, help="prompts of another source, one JSON object a line")
    options = parser.parse_args()
    corpus = read_corpus(options.data)
    groups = len({example.group for example in corpus.examples})
    print(f"{len(corpus.examples)} prompts in {groups} groups; data {corpus.digest[:16]}; {FOLDS} folds")
    held_out = cross_validate(corpus.examples)
    print_confusion(held_out)
    print_classes(held_out)
    summaries = [("learned, held out", held_out)]
    if options.against:
        texts = [prompt.text for prompt in corpus.prompts]
        summaries.append((f"revision {options.against}", run_revision(options.against, texts, corpus.examples)))
        kept = [index for index, example in enumerate(corpus.examples) if DISPUTED.isdisjoint(example.evidence)]
        summaries += [
            (f"{name}, without {' and '.join(sorted(DISPUTED))}", [scored[index] for index in kept])
            for name, scored in summaries[:2]
        ]
    summaries.append((f"learned on {CALIBRATION} alone, scored on {ROUTING}", transfer(corpus)))
    if options.also:
        summaries += other_source(options.also, corpus, options.against)
    for name, scored in summaries:
        print(f"\n{name}")
        print_summary(scored)
    for name, scored in summaries[:2]:
        print(f"\nconfidence, {name}")
        print_reliability(scored)


def cross_validate(examples: Sequence[Example]) -> list[Scored]:
    """Return every prompt scored by weights trained without its fold, in the order of the prompts."""
    scored: dict[int, Scored] = {}
    for number in range(FOLDS):
        trained_on = [example for example in examples if fold_of(example.group, FOLDS) != number]
        held_out = {index: example for index, example in enumerate(examples) if fold_of(example.group, FOLDS) == number}
        scored.update(zip(held_out, score(trained_on, held_out.values()), strict=True))
    return [scored[index] for index in range(len(examples))]


def score(trained_on: Sequence[Example], held_out: Iterable[Example]) -> list[Scored]:
    """Return examples scored by weights trained on others."""
    weights = train(trained_on, TrainingSettings(), {})
    return [_scored(example, judge_example(example, weights)) for example in held_out]


def transfer(corpus: Corpus) -> list[Scored]:
    """Return the prompts of one file scored by weights trained on the other alone; groups that both have are left out."""
    pairs = list(zip(corpus.prompts, corpus.examples, strict=True))
    held_out = [example for prompt, example in pairs if prompt.file == ROUTING]
    seen = {example.group for example in held_out}
    trained_on = [e for prompt, e in pairs if prompt.file == CALIBRATION and e.group not in seen]
    return score(trained_on, held_out)


def other_source(file: Path, corpus: Corpus, revision: str | None) -> list[tuple[str, list[Scored]]]:
    """Return a file of labelled prompts scored by weights trained on the whole folder, and by another revision."""
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line]
    examples = [make_example(row["text"], PromptClass(row["class"]), number) for number, row in enumerate(rows)]
    summaries = [(f"learned, scored on {file.name}", score(corpus.examples, examples))]
    if revision:
        texts = [row["text"] for row in rows]
        summaries.append((f"revision {revision}, scored on {file.name}", run_revision(revision, texts, examples)))
    return summaries


def run_revision(revision: str, texts: Sequence[str], examples: Sequence[Example]) -> list[Scored]:
    """Return prompts scored by the classifier of another revision of this repository."""
    archive = subprocess.run(
        ["git", "archive", "--format=tar", revision, "classifier"], cwd=ROOT, check=True, capture_output=True
    ).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        done = subprocess.run(
            [sys.executable, "-c", _OLD, folder],
            input="".join(json.dumps(text) + "\n" for text in texts),
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
        )
    judgements = [line.split() for line in done.stdout.splitlines()]
    return [
        Scored(example.label, PromptClass(name), float(confidence))
        for example, (name, confidence) in zip(examples, judgements, strict=True)
    ]


def print_confusion(scored: Sequence[Scored]) -> None:
    """Print how many prompts of each class (row) were taken for each class (column)."""
    print("\nclass x predicted")
    print(f"{'':<13}" + "".join(f"{name.value[:8]:>9}" for name in PromptClass))
    for label in PromptClass:
        row = [sum(s.label is label and s.predicted is other for s in scored) for other in PromptClass]
        if any(row):
            print(f"{label.value:<13}" + "".join(f"{count:>9}" for count in row))


def print_classes(scored: Sequence[Scored]) -> None:
    """Print precision, recall and F1 of each class."""
    print(f"\n{'class':<13}{'prompts':>9}{'precision':>11}{'recall':>9}{'F1':>7}")
    for label in PromptClass:
        right = sum(s.right and s.label is label for s in scored)
        named, labelled = (sum(s.predicted is label for s in scored), sum(s.label is label for s in scored))
        if labelled:
            values = right / max(named, 1), right / labelled, 2 * right / (named + labelled)
            print(f"{label.value:<13}{labelled:>9}{values[0]:>11.3f}{values[1]:>9.3f}{values[2]:>7.3f}")


def print_summary(scored: Sequence[Scored]) -> None:
    """Print accuracy and the error of the confidence; ``unknown`` is wrong, and has no part in the latter."""
    share = sum(s.right for s in scored) / len(scored)
    named = _named(scored)
    sure = [s for s in named if s.confidence >= DOUBT]
    trusted = sum(s.right for s in sure) / max(len(sure), 1)
    brier = sum((s.confidence - s.right) ** 2 for s in named) / max(len(named), 1)
    print(f"  accuracy {share:.3f} of {len(scored)}; F1 averaged over classes {macro_f1(scored):.3f}")
    print(f"  expected calibration error {calibration_error(scored):.3f}; Brier score {brier:.3f}")
    weighed = [s for s in scored if s.predicted not in {PromptClass.CODE, PromptClass.LONG_CONTEXT}]
    print(
        f"  of those taken for neither code nor long_context: accuracy {sum(s.right for s in weighed) / len(weighed):.3f}"
        f" of {len(weighed)}, calibration error {calibration_error(weighed):.3f}"
    )
    print(f"  named at {DOUBT} or more: {len(sure) / len(scored):.3f} of the prompts, {trusted:.3f} of them right")


def print_reliability(scored: Sequence[Scored]) -> None:
    """Print how often prompts of each range of confidence are right."""
    print(f"{'from':>6}{'to':>6}{'prompts':>9}{'mean confidence':>17}{'share right':>13}")
    for low, high, group in _bins(scored):
        mean, share = sum(s.confidence for s in group) / len(group), sum(s.right for s in group) / len(group)
        print(f"{low:>6.2f}{high:>6.2f}{len(group):>9}{mean:>17.3f}{share:>13.3f}")
    print(f"unknown: {len(scored) - len(_named(scored))}, in no row; counted as wrong in the accuracy")


def macro_f1(scored: Sequence[Scored]) -> float:
    """Return F1 averaged over the labelled classes, 0..1."""
    values = []
    for label in dict.fromkeys(s.label for s in scored):
        right = sum(s.right and s.label is label for s in scored)
        values.append(2 * right / (sum(s.predicted is label for s in scored) + sum(s.label is label for s in scored)))
    return sum(values) / len(values)


def calibration_error(scored: Sequence[Scored]) -> float:
    """Return the expected calibration error, 0..1: the mean of |mean confidence - share right| over bins, by prompts.

    Source: Naeini, Cooper and Hauskrecht, Obtaining Well Calibrated Probabilities Using Bayesian Binning, 2015.
    """
    gaps = [abs(sum(s.confidence - s.right for s in group)) for _, _, group in _bins(scored)]
    return sum(gaps) / max(len(_named(scored)), 1)


def _bins(scored: Sequence[Scored]) -> list[tuple[float, float, list[Scored]]]:
    edges = zip(BINS[:-1], (*BINS[1:-1], 1.01), strict=True)
    groups = [(low, min(high, 1.0), [s for s in _named(scored) if low <= s.confidence < high]) for low, high in edges]
    return [(low, high, group) for low, high, group in groups if group]


def _named(scored: Sequence[Scored]) -> list[Scored]:
    return [s for s in scored if s.predicted is not PromptClass.UNKNOWN]


def _scored(example: Example, judgement: Judgement) -> Scored:
    return Scored(example.label, judgement.prompt_class, judgement.confidence)


if __name__ == "__main__":
    main()
