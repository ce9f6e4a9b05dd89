"""Published losses of a precision, for a model of a given size: what is known before anything is measured.

``published_results.csv`` has the scores of models in 16 bits and quantized, each with its source. A loss is the share of
right answers that get worse: 1 - score / baseline. ``benchmarks/loss_prior.py`` fits them and writes ``loss_prior.toml``;
``benchmarks/results/loss_prior.txt`` shows how well studies are predicted that the fit has not seen. The mean loss is

    m = exp(c + v / 2) 10^(a log10(N / 8e9)) (f / 0.3)^b

where c and v belong to the format and the class of the prompt, N is the number of parameters, and f is the share of such
tasks that the model fails at in 16 bits. That share stands for complexity (``FAILED``, for 8 billion parameters; that is our
own reading): answers flip where the model is undecided (Dutta et al. 2024, "Accuracy is Not All You Need", arXiv
2407.09141). Its odds grow as the model gets smaller, as they do within the published benchmarks. Half the variance v of the
logarithm is added, so less knowledge means a larger mean. A model's loss is exponentially distributed around that mean: nine
in ten of the results that the fit has not seen lie in the 90 % interval of that distribution, noise included.

Below half a billion parameters hardly anything is published. Less is known of such a model, so for each factor of ten below
that size the mean is once more as large.

The format with the fewest bits decides. A KV cache of fewer bits has a loss of its own, which is added. What is not
published of a format is taken from its family. A model whose size is not known counts as one of 7 billion.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from classifier import PromptClass
from classifier.kinds import Complexity
from tiers.formats import NumberFormat, lowest_format
from tiers.kv_precision import kv_cache_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    Kind = tuple[PromptClass, Complexity]

USUAL_PARAMETERS = 8e9
PARAMETERS_WHERE_NOT_KNOWN = 7e9
SMALLEST_PUBLISHED = 5e8
USUAL_FAILED = 0.3
# Share of tasks that a model of 8 billion parameters fails at in 16 bits.
FAILED = {
    Complexity.TRIVIAL: 0.01,
    Complexity.MODERATE: 0.2,
    Complexity.COMPLEX: 0.5,
}
MOST_FAILED = 0.9
LARGEST_MEAN = 0.5  # share of answers: no precision that is served loses more than half
TAIL_PROBABILITY = 0.05  # probability beyond each end of the 90 % interval
# A result tells of models that are at most so many times as large or as small.
LIKE_SIZE = 2.5
CLASSES = (
    PromptClass.CHAT,
    PromptClass.WRITING,
    PromptClass.EXTRACTION,
    PromptClass.MULTILINGUAL,
    PromptClass.CODE,
    PromptClass.MATH,
    PromptClass.LONG_CONTEXT,
    PromptClass.TOOLS,
    PromptClass.SMALL_TALK,
)
BILLION = 1e9
WHOLE_BILLIONS = 10  # fewer are named with a decimal place
FOUR_BITS = 4
EIGHT_BITS = 8
SIXTEEN_BITS = 16
# Of fewer than 4 bits no results were collected; they lose no less than this format.
MOST_LOSSY = "mxfp4-w4a4"
# Formats whose results count as another's.
_FITTED_AS = {
    "awq-int4-w4a8": "int4-w4a8",
    "nvfp4-w4a8": "nvfp4",
    "nvfp4-w4a16": "nvfp4",
    "mxfp4-w4a8": "mxfp4",
    "fp8-w8a16": "fp8",
    "gptq-int8": "int8",
    "awq-int8": "int8",
}
_FILE = tomllib.loads(Path(__file__).with_name("loss_prior.toml").read_text("utf-8"))
_FORMATS: Mapping[str, Mapping[str, tuple[float, float]]] = _FILE["formats"]
_CACHES: Mapping[str, Mapping[str, tuple[float, float]]] = _FILE["caches"]
_RESULTS: Mapping[str, Mapping[str, list[tuple[float, int]]]] = _FILE["results"]
_SIZE: float = _FILE["size"]
_SIZE_VARIANCE: float = _FILE["size_variance"]
_FAILED_EXPONENT: float = _FILE["failed"]
_FAILED_BY_SIZE: float = _FILE["failed_by_size"]


@dataclass(frozen=True, slots=True)
class PublishedEstimate:
    """The share of answers, 0..1, that is expected to get worse as far as is published, with its 90 % interval.

    Attributes:
        mean: The estimate.
        low: Lower end of the interval.
        high: Upper end of the interval.
        results: Published results of this format and class, of models of about this size.
        said: What it rests on, in words.
    """

    mean: float
    low: float
    high: float
    results: int
    said: str


@lru_cache(1024)
def published_estimate(
    precision: str, kind: Kind, parameters: float | None
) -> PublishedEstimate:
    """Return what is expected of a precision, as far as is published.

    Args:
        precision: As in ``TierSpec``; of several replicas, the largest loss counts.
        kind: Class and complexity.
        parameters: Of the model; None: not known, so it counts as one of 7 billion.
    """
    replicas = [
        (_mean_of_replica(replica, kind, parameters), replica)
        for replica in precision.split(", ")
    ]
    mean, replica = max(replicas)
    number_format = lowest_format(replica)
    results = _count_results(number_format, kind[0], parameters)
    return PublishedEstimate(
        mean=mean,
        low=-mean * math.log(1 - TAIL_PROBABILITY),
        high=min(-mean * math.log(TAIL_PROBABILITY), 1.0),
        results=results,
        said=_said(number_format, parameters, results),
    )


def published_loss(precision: str, kind: Kind, parameters: float | None) -> float:
    """Return the share of answers, 0..1, that is expected to get worse, as far as is published."""
    return published_estimate(precision, kind, parameters).mean


def _mean_of_replica(precision: str, kind: Kind, parameters: float | None) -> float:
    prompt_class, complexity = kind
    if prompt_class is PromptClass.SMALL_TALK:
        return 0.0  # no answer to it can be wrong
    coefficients = []
    fitted_as = _fitted_as(lowest_format(precision))
    if fitted_as is not None:
        coefficients.append(_coefficients(_FORMATS, fitted_as, prompt_class))
    cache = _cache_fitted_as(kv_cache_of(precision))
    if cache is not None:
        coefficients.append(_coefficients(_CACHES, cache, prompt_class))
    mean = 0.0
    for log_mean, variance in coefficients:
        mean += _mean(log_mean, variance, complexity, parameters)
    size = parameters or PARAMETERS_WHERE_NOT_KNOWN
    mean *= 1 + max(math.log10(SMALLEST_PUBLISHED / size), 0.0)
    return min(mean, LARGEST_MEAN)


def _coefficients(
    table: Mapping[str, Mapping[str, tuple[float, float]]],
    names: tuple[str, ...],
    prompt_class: PromptClass,
) -> tuple[float, float]:
    """Return the mean over several rows of the fit: between two families lies what nothing is published of."""
    rows = [table[name][prompt_class.value] for name in names]
    log_mean = sum(row[0] for row in rows) / len(rows)
    variance = max(row[1] for row in rows)
    return log_mean, variance


def _mean(
    log_mean: float, variance: float, complexity: Complexity, parameters: float | None
) -> float:
    size = parameters or PARAMETERS_WHERE_NOT_KNOWN
    decades = math.log10(size / USUAL_PARAMETERS)
    failed = _failed(complexity, decades)
    log_mean += _SIZE * decades + _FAILED_EXPONENT * math.log(failed / USUAL_FAILED)
    return math.exp(log_mean + (variance + _SIZE_VARIANCE * decades**2) / 2)


def _failed(complexity: Complexity, decades: float) -> float:
    """Return the share of tasks that a model fails at in 16 bits, by its size in factors of ten above 8 billion."""
    usual = FAILED[complexity]
    log_odds = math.log(usual / (1 - usual)) - _FAILED_BY_SIZE * decades
    return min(1 / (1 + math.exp(-log_odds)), MOST_FAILED)


def _fitted_as(number_format: NumberFormat | None) -> tuple[str, ...] | None:
    """Return the rows of the fit that a format counts as; None: it loses nothing."""
    if number_format is None:
        return ("4-bit",)
    name = _FITTED_AS.get(number_format.name, number_format.name)
    if name in _FORMATS:
        return (name,)
    return _family(number_format.weight_bits)


def _family(weight_bits: int) -> tuple[str, ...] | None:
    """Return the rows of the fit for a format of which nothing is published; None: it loses nothing."""
    if weight_bits >= SIXTEEN_BITS:
        return None
    if weight_bits >= EIGHT_BITS:
        return ("8-bit",)
    if weight_bits > FOUR_BITS:
        return ("4-bit", "8-bit")
    if weight_bits == FOUR_BITS:
        return ("4-bit",)
    return (MOST_LOSSY,)


def _cache_fitted_as(kv_cache: str | None) -> tuple[str, ...] | None:
    if kv_cache is None:
        return None
    bits = "4" if "4" in kv_cache.replace("e4m3", "") else "8"
    if "fp" in kv_cache:
        return (f"fp{bits}",)
    return (f"{bits}-bit",)


def _count_results(
    number_format: NumberFormat | None,
    prompt_class: PromptClass,
    parameters: float | None,
) -> int:
    """Count the published results of a format and class, of models of about this size."""
    if number_format is None or parameters is None:
        return 0
    name = _FITTED_AS.get(number_format.name, number_format.name)
    by_size = _RESULTS.get(name, {}).get(prompt_class.value, [])
    billions = parameters / BILLION
    return sum(
        count
        for size, count in by_size
        if billions / LIKE_SIZE <= size <= billions * LIKE_SIZE
    )


def _said(
    number_format: NumberFormat | None, parameters: float | None, results: int
) -> str:
    if number_format is None or parameters is None or results == 0:
        return "estimated from what is published for other models"
    noun = "result" if results == 1 else "results"
    return f"published for {_size_name(parameters)}, {number_format.name.upper()}: {results} {noun}"


def _size_name(parameters: float) -> str:
    """Return a number of parameters as people write it: ``8B``, ``1.5B``, ``135M``."""
    billions = parameters / BILLION
    if billions < 1:
        return f"{billions * 1000:.0f}M"
    return f"{billions:.2g}B" if billions < WHOLE_BILLIONS else f"{billions:.0f}B"
