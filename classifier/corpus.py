"""Labelled prompts from a data folder, for training and for measuring. Not used at run time.

The folder holds two files of one JSON object a line:

- ``calibration.jsonl``: ``text``, ``category``, ``source``
- ``routing.jsonl``: ``text``, ``has_code``, ``borderline``, ``natural_language``, ``source``

No prompt's class is guessed: the first states a category for each, the second only where the published collection that a
prompt comes from states one. What is left out, and why:

- ``long`` prompts of at most ``LONG_TOKENS`` tokens: they are long for a person, not by the definition of the class, and
  what they ask for (summaries, questions, rewriting) is not labelled. A ``long`` prompt with a fenced block is a source
  file to review, and counts as code.
- multilingual prompts of more tokens than that, and prompts in two languages: two classes are right.
- borderline prompts, on which careful raters could differ.
- of the second file, collections that state no class: role descriptions, instructions with constraints on form,
  multiple-choice questions on anything but mathematics, and handwritten ones, unless they have code or are not English.

``reasoning`` is of the class math, which stands for several dependent steps of thought. Role-play is of the class chat,
as the data has it, unless a text is to be written.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from classifier.classes import LONG_TOKENS
from classifier.features import read_prompt
from classifier.kinds import PromptClass
from classifier.tokens import EstimatingCounter
from classifier.training import Example, groups_of

if TYPE_CHECKING:
    from pathlib import Path

CALIBRATION, ROUTING = "calibration.jsonl", "routing.jsonl"
_CATEGORIES = {
    "chat": PromptClass.CHAT,
    "code": PromptClass.CODE,
    "extraction": PromptClass.EXTRACTION,
    "math": PromptClass.MATH,
    "multilingual": PromptClass.MULTILINGUAL,
    "reasoning": PromptClass.MATH,
    "writing": PromptClass.WRITING,
}
# Parts of the names of collections, and the class of their prompts in English without code.
_SOURCES = (
    (re.compile(r"mt_bench \(\d+, (?:writing)\)"), PromptClass.WRITING),
    (re.compile(r"mt_bench \(\d+, (?:math|reasoning)\)"), PromptClass.MATH),
    (re.compile(r"mt_bench \(\d+, (?:extraction)\)"), PromptClass.EXTRACTION),
    (re.compile(r"mt_bench \(\d+, (?:roleplay|humanities|stem)\)"), PromptClass.CHAT),
    (re.compile(r"grade-school-math|MMLU \((?:college_mathematics|abstract_algebra)"), PromptClass.MATH),
    (re.compile(r"oos-eval"), PromptClass.CHAT),
)
_TRANSLATED = re.compile(r"MGSM\D+? \w\w \((\d+)\)")  # one problem in several languages


@dataclass(frozen=True, slots=True)
class LabelledPrompt:
    """A prompt with its class.

    Attributes:
        text: The prompt.
        label: Its class.
        file: The file that it comes from.
        family: Of prompts that are translations of one another; empty for none.
    """

    text: str
    label: PromptClass
    file: str
    family: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Labelled prompts and what training makes of them, in the order of the files.

    Attributes:
        prompts: With their classes.
        examples: The same, read.
        digest: SHA-256 of both files, hexadecimal.
    """

    prompts: tuple[LabelledPrompt, ...]
    examples: tuple[Example, ...]
    digest: str


def read_corpus(folder: Path) -> Corpus:
    """Return the labelled prompts of a folder. Tokens are estimated, as without a model's tokenizer.

    Raises:
        OSError: A file cannot be read.
        ValueError: A line is not a JSON object with the fields above.
    """
    digest = hashlib.sha256()
    prompts: list[LabelledPrompt] = []
    for name, label_of in ((CALIBRATION, _label_calibration), (ROUTING, _label_routing)):
        content = (folder / name).read_bytes()
        digest.update(content)
        for number, line in enumerate(content.decode("utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                label = label_of(row)
                text, source = str(row["text"]), str(row["source"])
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{name} line {number}: {error!r}") from error
            if label is not None:
                translated = _TRANSLATED.search(source)
                prompts.append(LabelledPrompt(text, label, name, translated[1] if translated else ""))
    groups = groups_of([prompt.text for prompt in prompts], [prompt.family for prompt in prompts])
    examples = tuple(make_example(p.text, p.label, group) for p, group in zip(prompts, groups, strict=True))
    return Corpus(tuple(prompts), examples, digest.hexdigest())


def make_example(text: str, label: PromptClass, group: int) -> Example:
    """Return a labelled prompt as training reads it."""
    read = read_prompt(text)
    return Example(label, read.evidence(), read.code_log_odds, _is_long(text), group)


def _is_long(text: str) -> bool:
    return EstimatingCounter().count(text) > LONG_TOKENS


def _label_calibration(row: dict[str, Any]) -> PromptClass | None:
    long = _is_long(row["text"])
    if row["category"] == "long":
        if "```" in row["text"]:
            return PromptClass.CODE
        return PromptClass.LONG_CONTEXT if long else None
    label = _CATEGORIES[row["category"]]
    return None if long and label is not PromptClass.CODE else label


def _label_routing(row: dict[str, Any]) -> PromptClass | None:
    language = row["natural_language"]
    if row["borderline"]:
        return None
    if row["has_code"]:
        return PromptClass.CODE
    if _is_long(row["text"]):
        return PromptClass.LONG_CONTEXT if language == "en" else None
    if language != "en":
        return None if "+" in language else PromptClass.MULTILINGUAL
    return next((label for pattern, label in _SOURCES if pattern.search(row["source"])), None)
