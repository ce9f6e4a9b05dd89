"""The weights of the class evidence, read once from ``weights.json``, which ``scripts/train_classifier.py`` writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from classifier.errors import WeightsError
from classifier.evidence import FEATURES
from classifier.kinds import PromptClass

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FORMAT = 1
WEIGHTS_FILE = Path(__file__).with_name("weights.json")
# Classes told apart by weights. Code is among them for prompts about programs that neither hold nor ask for code: it is
# never named by weights, but takes its share of the probability.
JUDGED = (
    PromptClass.CHAT,
    PromptClass.CODE,
    PromptClass.EXTRACTION,
    PromptClass.MATH,
    PromptClass.MULTILINGUAL,
    PromptClass.WRITING,
)


@dataclass(frozen=True, slots=True)
class ClassWeights:
    """What training learned.

    Attributes:
        bias: Score of each class in ``JUDGED`` without any evidence, log-odds.
        weights: By name of the evidence, what it adds to the score of each class in ``JUDGED``, log-odds.
        temperature: By which scores are divided before they become probabilities; above 0.
        code_intercept: Log-odds that code is right where the log-odds of holding or asking for code are 0.
        code_slope: What each more of these adds; 0 or more.
        long_confidence: Share of the prompts over the limit of tokens that are of the class long_context, 0..1.
        provenance: Format, digest of the data, prompts by class, settings of the training.
    """

    bias: tuple[float, ...]
    weights: Mapping[str, tuple[float, ...]]
    temperature: float
    code_intercept: float
    code_slope: float
    long_confidence: float
    provenance: Mapping[str, Any]

    def dump(self) -> str:
        """Return the text of a weights file, one piece of evidence a line."""
        names = [prompt_class.value for prompt_class in JUDGED]
        table = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in self.weights.items())
        calibration = {
            "temperature": self.temperature,
            "code_intercept": self.code_intercept,
            "code_slope": self.code_slope,
            "long_confidence": self.long_confidence,
        }
        provenance = ",\n".join(
            f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in self.provenance.items()
        )
        return (
            f'{{\n  "provenance": {{\n{provenance}\n  }},\n  "classes": {json.dumps(names)},\n'
            f'  "calibration": {json.dumps(calibration)},\n  "bias": {json.dumps(self.bias)},\n'
            f'  "weights": {{\n{table}\n  }}\n}}\n'
        )


@cache
def shipped_weights() -> ClassWeights:
    """Return the weights that come with the package, read once, at the first call.

    Raises:
        WeightsError: The file is missing or does not fit this code.
    """
    try:
        return parse_weights(WEIGHTS_FILE.read_text("utf-8"))
    except OSError as error:
        raise WeightsError(f"cannot read the class weights {WEIGHTS_FILE}: {error}") from error


def parse_weights(text: str) -> ClassWeights:
    """Return the weights of a file's text.

    Raises:
        WeightsError: The text is no weights file, or its classes or evidence are not those of this code.
    """
    try:
        content = json.loads(text)
        if content["provenance"]["format"] != FORMAT:
            raise WeightsError(f"weights are of format {content['provenance']['format']}, not {FORMAT}")
        calibration = content["calibration"]
        read = ClassWeights(
            bias=tuple(map(float, content["bias"])),
            weights={name: tuple(map(float, row)) for name, row in content["weights"].items()},
            temperature=float(calibration["temperature"]),
            code_intercept=float(calibration["code_intercept"]),
            code_slope=float(calibration["code_slope"]),
            long_confidence=float(calibration["long_confidence"]),
            provenance=content["provenance"],
        )
        classes = content["classes"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"not a weights file: {error!r}") from error
    _check(read, classes)
    return read


def _check(read: ClassWeights, classes: object) -> None:
    names = [prompt_class.value for prompt_class in JUDGED]
    if classes != names:
        raise WeightsError(f"weights are for the classes {classes}, not {names}")
    missing = [name for name in FEATURES if name not in read.weights]
    extra = [name for name in read.weights if name not in FEATURES]
    if missing or extra:
        raise WeightsError(
            f"weights do not fit the evidence: none for {missing}, unknown {extra}; run scripts/train_classifier.py"
        )
    if any(len(row) != len(JUDGED) for row in (read.bias, *read.weights.values())):
        raise WeightsError(f"every row of weights has {len(JUDGED)} numbers, one for each class")
    if read.temperature <= 0 or not 0 <= read.long_confidence <= 1:
        raise WeightsError("the temperature is above 0 and the confidence in long prompts 0..1")


def class_scores(
    evidence: Mapping[str, float], bias: Sequence[float], weights: Mapping[str, Sequence[float]]
) -> list[float]:
    """Return the score, log-odds, of each class in ``JUDGED`` for a prompt's evidence."""
    scores = list(bias)
    for name, degree in evidence.items():
        for number, weight in enumerate(weights[name]):
            scores[number] += degree * weight
    return scores
