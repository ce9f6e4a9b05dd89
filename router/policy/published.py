"""Published losses of a precision, for a model of a given size: what is known before anything is measured.

``published_losses.toml`` has the losses of models with 7 billion parameters and more. Smaller models lose more, for two
reasons:

* Quantization raises the cross-entropy by an amount that falls with the size N as N^-0.2261, at the same number of training
  tokens (Ouyang et al. 2024, "Low-Bit Quantization Favors Undertrained LLMs", arXiv 2411.17691, fitted on 160 million to 12
  billion parameters). Today's small models are trained on as many tokens as large ones.
* An answer flips where the model is undecided (Dutta et al. 2024, "Accuracy is Not All You Need", arXiv 2407.09141). A small
  model is undecided about tasks that are easy for a large one, so for each factor of ten in size a task counts as one step
  more complex, up to one step. That is our own reading; nothing is published by complexity.

Less is known of a smaller model: for each factor of ten below 7 billion parameters the expected loss is once more as
large. A loss cannot be below 0, so less knowledge of it means a larger mean: as far as is published, a model's loss is
exponentially distributed, with that mean. A model whose size is not known counts as one of 7 billion.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from classifier import PromptClass
from classifier.kinds import Complexity
from tiers.formats import quantizations_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    Kind = tuple[PromptClass, Complexity]

# size of the smallest models whose losses are published by task
PUBLISHED_PARAMETERS = 7e9
SIZE_EXPONENT = 0.2261
MAX_STEPS = 1.0  # a task counts as at most so many steps more complex
LARGEST_MEAN = 0.5  # share of answers: no precision that is served loses more than half


def _by_class(losses: Mapping[str, list[float]]) -> dict[PromptClass, list[float]]:
    return {PromptClass(name): by_complexity for name, by_complexity in losses.items()}


_FILE = tomllib.loads(
    Path(__file__).with_name("published_losses.toml").read_text("utf-8")
)
_LOSSES = {row: _by_class(losses) for row, losses in _FILE["losses"].items()}
_LIKE = {
    name: (str(like["row"]), float(like["factor"]))
    for name, like in _FILE["like"].items()
}
CLASSES = tuple(_LOSSES["int4"])


def published_loss(precision: str, kind: Kind, parameters: float | None) -> float:
    """Return the share of answers, 0..1, that is expected to get worse, as far as is published.

    Args:
        precision: As in ``TierSpec``; of several, the largest loss counts.
        kind: Class and complexity.
        parameters: Of the model; None: not known, so it counts as one of 7 billion.
    """
    means = []
    for quantization in quantizations_of(precision):
        row, factor = _LIKE[quantization]
        means.append(_mean(row, kind, parameters) * factor)
    mean = max(means)
    if parameters is not None:
        mean *= 1 + _decades_below(parameters)
    return min(mean, LARGEST_MEAN)


def is_published(parameters: float | None) -> bool:
    """Return whether losses are published for models of this size."""
    return parameters is not None and parameters >= PUBLISHED_PARAMETERS


def _mean(row: str, kind: Kind, parameters: float | None) -> float:
    prompt_class, complexity = kind
    by_complexity = _LOSSES[row][prompt_class]
    position = tuple(Complexity).index(complexity)
    own_loss = by_complexity[position]
    if parameters is None or parameters >= PUBLISHED_PARAMETERS:
        return own_loss
    harder_loss = by_complexity[min(position + 1, len(by_complexity) - 1)]
    step = min(_decades_below(parameters), MAX_STEPS)
    growth: float = (PUBLISHED_PARAMETERS / parameters) ** SIZE_EXPONENT
    return _between(own_loss, harder_loss, step) * growth


def _between(first: float, second: float, share: float) -> float:
    """Return the geometric mean of two losses, weighted by a share, 0..1, of the second."""
    if first == 0 or second == 0:
        return first
    return math.exp((1 - share) * math.log(first) + share * math.log(second))


def _decades_below(parameters: float) -> float:
    return max(math.log10(PUBLISHED_PARAMETERS / parameters), 0.0)
