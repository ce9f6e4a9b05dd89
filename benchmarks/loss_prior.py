"""Fit what is published of losses, and show how well the fit predicts a study that it has not seen.

    .venv/bin/python benchmarks/loss_prior.py            # fits, and leaves out each study: under a minute
    .venv/bin/python benchmarks/loss_prior.py --write    # also writes the router's coefficients

It reads ``router/policy/published_results.csv``: scores of models in 16 bits and quantized, with their sources. A result's
loss is 1 - score / baseline: of the answers that were right, the share that gets worse less that which gets better instead.
The router's measure is the same, of the answers that either precision gets right, so it is slightly smaller. Left out of the
file: results whose model's size is not public, checkpoints that their publishers call broken, and of the reference scores of
TensorRT-LLM's tests those that equal the baseline to the last digit or lie far above it: they look copied.

Model. A loss is exponentially distributed, as ``router/policy/losses.py`` has it, with the mean

    m = exp(format + class + a log10(N / 8e9) + b log(f / 0.3) + study + model)

N is the number of parameters and f the share of the tasks that the model fails at in 16 bits: so much for how complex they
are. A KV cache of fewer bits adds a mean of the same form. What is published adds the noise of a finite benchmark, with the
variance phi / (n s) for n tasks and a baseline of s. All coefficients are normally distributed before the fit, those of
formats around their family's (4 or 8 bits), so that what little is published of a format is drawn to the others; the
variances of studies and models are estimated (empirical Bayes). The fit is the mode, its uncertainty the inverse Hessian
there. A prediction for a new study and model is the mean over their effects and over the uncertainty of the coefficients.
Noise on losses that cannot be below 0 makes small means too large and large ones too small, so the means of 8 and of 4 bits
are each multiplied by the factor that makes predictions of studies that were left out right on average. For a study that is
predicted, the factor comes from the others.
"""

from __future__ import annotations

import os

# Matrices of a hundred rows are faster on one core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import csv
import math
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean
from typing import TYPE_CHECKING

import numpy as np
from measure import ROOT

sys.path.insert(0, str(ROOT))

from classifier import PromptClass

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

RESULTS = ROOT / "router/policy/published_results.csv"
COEFFICIENTS = ROOT / "router/policy/loss_prior.toml"
REPORT = ROOT / "benchmarks/results/loss_prior.txt"

USUAL_PARAMETERS = 8e9
USUAL_FAILED = 0.3
FEWEST_FAILED = 0.01
MOST_FAILED = 0.9
# What the router takes for the share of moderate tasks that 8 billion parameters fail at, and how its log odds fall with
# ten times as many.
MODERATE_FAILED = 0.2
FAILED_BY_SIZE = 0.83
# Where a source names neither its benchmark's size nor its tasks.
USUAL_QUESTIONS = 500
FAILED_WHERE_NOT_KNOWN = 0.4
CLASSES = (
    "chat",
    "math",
    "code",
    "writing",
    "extraction",
    "multilingual",
    "long_context",
    "tools",
)
# The class of prompts that a benchmark's tasks are like.
BENCHMARKS = {
    "math": "GSM8K|GSM8K strict|GSM8K-Platinum|numeric fidelity|math (not named)|AIME 2024|AIME 2025",
    "code": "HumanEval|HumanEval+|MBPP|LiveCodeBench",
    "chat": "MMLU|MMLU STEM|MMLU humanities|MMLU (5 % of it)|MMLU-Redux|MMLU-Pro|GPQA Diamond|GPQA|BBH|MuSR|HellaSwag|"
    "ARC-Easy|ARC-Challenge|BoolQ|TriviaQA|SimpleQA|Open LLM Leaderboard v1|19 benchmarks|270 tasks of several kinds",
    "writing": "IFEval|IFBench|CS4|FActScore",
    "extraction": "RACE-middle|RACE-high|DocVQA|ChartQA",
    "multilingual": "C-Eval|CMMLU",
    "long_context": "OneRuler|RULER|NoCha|MRCR|multi-needle",
    "tools": "BFCL|BFCL v4|tool calling",
}
CLASS_OF = {
    benchmark: name
    for name, benchmarks in BENCHMARKS.items()
    for benchmark in benchmarks.split("|")
}
# Formats that are published as one: the way the weights were rounded is no format.
PUBLISHED_AS = {
    "int4": "int4",
    "awq-int4": "awq-int4",
    "gptq-int4": "gptq-int4",
    "int4-w4a8": "int4-w4a8",
    "awq-int4-w4a8": "int4-w4a8",
    "nf4": "nf4",
    "mxfp4": "mxfp4",
    "mxfp4-w4a4": "mxfp4-w4a4",
    "nvfp4": "nvfp4",
    "fp8": "fp8",
    "fp8-block": "fp8-block",
    "mxfp8": "mxfp8",
    "int8": "int8",
    "gptq-int8": "int8",
    "int8-w8a8": "int8-w8a8",
}
FORMATS = tuple(dict.fromkeys(PUBLISHED_AS.values()))
FOUR_BITS = frozenset(
    {
        "int4",
        "awq-int4",
        "gptq-int4",
        "int4-w4a8",
        "nf4",
        "mxfp4",
        "mxfp4-w4a4",
        "nvfp4",
    }
)
UNQUANTIZED = frozenset({"bf16", "fp16"})
# Mean and standard deviation of coefficients before the fit; of formats and of classes the deviation alone.
BEFORE = {
    "four bits": (-3.5, 1.0),
    "eight bits": (-5.0, 1.0),
    "size": (-0.5, 0.5),
    "failed": (0.0, 0.5),
    "cache of eight bits": (-6.0, 1.0),
    "cache of four bits": (-4.5, 1.0),
    "cache of floats": (0.0, 0.4),
    "trained": (0.0, 0.4),
    "rounded": (0.0, 0.4),
}
FORMAT_DEVIATION = 0.4
CLASS_DEVIATION = 0.5
# Recipes: weights trained after they were quantized, and weights rounded to the nearest without anything else.
TRAINED = ("QAT", "distilled")
ROUNDED = "RTN"
NAMES = (
    *BEFORE,
    *(f"format {name}" for name in FORMATS),
    *(f"class {name}" for name in CLASSES),
)
INDEX = {name: number for number, name in enumerate(NAMES)}
LOWEST_CURVATURE = 0.05
SMALLEST_VARIANCE = 0.01
LOG_LIMIT = -14.0
STEPS = 12
ROUNDS = 6
ROUNDS_FROM_A_FIT = 2
TAIL = 0.05


@dataclass(frozen=True, slots=True)
class Result:
    """One published result: a model's score in a format, as a loss of what it gets right in 16 bits."""

    study: str
    model: str
    parameters: float
    number_format: str
    recipe: str
    kv_cache: str
    prompt_class: str
    right: float
    questions: float
    loss: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients by ``NAMES``, their covariance, the effects of studies and models, and the scatter."""

    coefficients: Array
    covariance: Array
    effects: dict[str, float]
    study_deviation: float
    model_deviation: float
    noise: float
    noise_floor: float


def read_results() -> list[Result]:
    """Read the published results."""
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return [_result(row) for row in csv.DictReader(file)]


def _result(row: dict[str, str]) -> Result:
    if row["lost_percent"]:
        loss = float(row["lost_percent"]) / 100
        right = 1 - FAILED_WHERE_NOT_KNOWN
    else:
        loss = 1 - float(row["score"]) / float(row["baseline"])
        right = float(row["baseline"]) / 100
    benchmark = row["benchmark"]
    return Result(
        study=row["study"],
        model=row["model"],
        parameters=float(row["parameters_b"]) * 1e9,
        number_format=row["format"],
        recipe=row["recipe"],
        kv_cache=row["kv_cache"],
        prompt_class=CLASS_OF.get(benchmark) or CLASS_OF[benchmark.split(",")[0]],
        right=right,
        questions=float(row["questions"] or USUAL_QUESTIONS),
        loss=loss,
    )


class Design:
    """The rows of the model: what each result's mean is made of."""

    def __init__(self, results: Sequence[Result]) -> None:
        """Build the rows of weights and of KV caches."""
        self.weights = np.zeros((len(results), len(NAMES)))
        self.cache = np.zeros_like(self.weights)
        self.has_weights = np.array(
            [r.number_format not in UNQUANTIZED for r in results]
        )
        self.has_cache = np.array([bool(r.kv_cache) for r in results])
        for number, result in enumerate(results):
            shared = _shared(result)
            self.weights[number] = shared
            self.cache[number] = shared
            if self.has_weights[number]:
                _set_format(self.weights[number], result)
            if result.kv_cache:
                _set_cache(self.cache[number], result.kv_cache)

    def means(self, coefficients: Array, effects: Array) -> tuple[Array, Array]:
        """Return each result's mean, and how its logarithm depends on the coefficients."""
        of_weights = np.where(
            self.has_weights, _exp(self.weights @ coefficients + effects), 0.0
        )
        of_cache = np.where(
            self.has_cache, _exp(self.cache @ coefficients + effects), 0.0
        )
        mean = of_weights + of_cache
        slopes = (of_weights / mean)[:, None] * self.weights
        return mean, slopes + (of_cache / mean)[:, None] * self.cache


def _shared(result: Result) -> Array:
    row = np.zeros(len(NAMES))
    failed = min(max(1 - result.right, FEWEST_FAILED), MOST_FAILED)
    row[INDEX["size"]] = math.log10(result.parameters / USUAL_PARAMETERS)
    row[INDEX["failed"]] = math.log(failed / USUAL_FAILED)
    row[INDEX[f"class {result.prompt_class}"]] = 1
    return row


def _set_format(row: Array, result: Result) -> None:
    name = PUBLISHED_AS[result.number_format]
    row[INDEX["four bits" if name in FOUR_BITS else "eight bits"]] = 1
    row[INDEX[f"format {name}"]] = 1
    row[INDEX["trained"]] = float(any(word in result.recipe for word in TRAINED))
    row[INDEX["rounded"]] = float(result.recipe == ROUNDED)


def _set_cache(row: Array, kv_cache: str) -> None:
    row[INDEX["cache of four bits" if "4" in kv_cache else "cache of eight bits"]] = 1
    row[INDEX["cache of floats"]] = float("fp" in kv_cache)


def _exp(values: Array) -> Array:
    return np.exp(np.clip(values, LOG_LIMIT, 0.0))


def _log_normal_cdf(values: Array) -> Array:
    """Return the logarithm of the normal distribution function (Press et al., "Numerical Recipes", erfcc)."""
    size = np.abs(values) / math.sqrt(2)
    t = 1 / (1 + 0.5 * size)
    sum_ = np.zeros_like(size)
    for factor in (0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806, 0.09678418, 0.37409196,
                   1.00002368, -1.26551223):  # fmt: skip
        sum_ = sum_ * t + factor
    tail = np.log(t) - size * size + sum_ + math.log(0.5)
    return np.where(
        values < 0, tail, np.log1p(-np.exp(np.minimum(tail, math.log(0.5))))
    )


def log_density(losses: Array, mean: Array, variance: Array) -> tuple[Array, Array]:
    """Return the log density of an exponential loss with normal noise, and its derivative by the log of the mean."""
    deviation = np.sqrt(variance)
    z = losses / deviation - deviation / mean
    log_cdf = _log_normal_cdf(z)
    hazard = np.exp(-z * z / 2 - 0.5 * math.log(2 * math.pi) - log_cdf)
    density = -np.log(mean) + variance / (2 * mean**2) - losses / mean + log_cdf
    slope = -1 - variance / mean**2 + losses / mean + hazard * deviation / mean
    return density, slope


def share_below(losses: Array, mean: Array, variance: Array) -> Array:
    """Return the distribution function of an exponential loss with normal noise."""
    deviation = np.sqrt(variance)
    z = losses / deviation
    normal = np.array([NormalDist().cdf(value) for value in z])
    log_cdf = _log_normal_cdf(z - deviation / mean)
    return normal - np.exp(-losses / mean + variance / (2 * mean**2) + log_cdf)


class Fitting:
    """A fit in progress: Newton's method for the coefficients, then the scatter, in turns."""

    def __init__(self, results: Sequence[Result], start: Fit | None) -> None:
        """Start from a fit of more results; None: from what is assumed before."""
        self.design = Design(results)
        self.losses = np.array([result.loss for result in results])
        self.tasks_right = np.array([r.questions * r.right for r in results])
        self.studies = sorted({result.study for result in results})
        self.models = sorted({result.model for result in results})
        groups = self.studies + self.models
        self.members = np.zeros((len(results), len(groups)))
        for number, result in enumerate(results):
            self.members[number, groups.index(result.study)] = 1
            self.members[number, groups.index(result.model)] = 1
        self.centre = np.zeros(len(NAMES) + len(groups))
        self.deviation = np.full(len(self.centre), CLASS_DEVIATION)
        for name, number in INDEX.items():
            if name in BEFORE:
                self.centre[number], self.deviation[number] = BEFORE[name]
            elif name.startswith("format"):
                self.deviation[number] = FORMAT_DEVIATION
        self.values = self.centre.copy()
        self.study_deviation = 0.4
        self.model_deviation = 0.4
        self.noise = 0.12
        self.noise_floor = 1e-5
        if start is not None:
            effects = [start.effects[group] for group in groups]
            self.values = np.concatenate([start.coefficients, effects])
            self.study_deviation = start.study_deviation
            self.model_deviation = start.model_deviation
            self.noise = start.noise
            self.noise_floor = start.noise_floor

    @property
    def variance(self) -> Array:
        """Return the variance of each result's noise."""
        return self.noise / self.tasks_right + self.noise_floor

    def mean(self, values: Array) -> tuple[Array, Array]:
        """Return each result's mean, and how its logarithm depends on all values."""
        effects = self.members @ values[len(NAMES) :]
        mean, slopes = self.design.means(values[: len(NAMES)], effects)
        return mean, np.hstack([slopes, self.members])

    def _target(self, values: Array) -> float:
        density, _ = log_density(self.losses, self.mean(values)[0], self.variance)
        distance = (values - self.centre) / self.deviation
        return float(density.sum() - 0.5 * (distance**2).sum())

    def newton_step(self) -> tuple[Array, float]:
        """Take one step uphill; return the Hessian and the step's size."""
        mean, rows = self.mean(self.values)
        variance = self.variance
        _, slope = log_density(self.losses, mean, variance)
        small = 1e-3
        _, above = log_density(self.losses, mean * math.exp(small), variance)
        _, below = log_density(self.losses, mean * math.exp(-small), variance)
        curvature = np.maximum(-(above - below) / (2 * small), LOWEST_CURVATURE)
        hessian = (rows * curvature[:, None]).T @ rows + np.diag(self.deviation**-2.0)
        gradient = rows.T @ slope - (self.values - self.centre) / self.deviation**2
        step = np.linalg.solve(hessian, gradient)
        before = self._target(self.values)
        share = 1.0
        while share > small and self._target(self.values + share * step) < before:
            share /= 2
        self.values = self.values + share * step
        return hessian, float(np.abs(share * step).max())

    def fit_scatter(self, covariance: Array) -> None:
        """Estimate the deviations of studies and models, and the noise."""
        variances = self.values[len(NAMES) :] ** 2 + np.diag(covariance)[len(NAMES) :]
        of_studies = variances[: len(self.studies)].mean()
        of_models = variances[len(self.studies) :].mean()
        self.study_deviation = math.sqrt(max(of_studies, SMALLEST_VARIANCE))
        self.model_deviation = math.sqrt(max(of_models, SMALLEST_VARIANCE))
        mean, _ = self.mean(self.values)
        best = (-math.inf, self.noise, self.noise_floor)
        for noise in self.noise * np.array([0.7, 0.85, 1, 1.2, 1.45]):
            for floor in self.noise_floor * np.array([0.5, 0.8, 1, 1.25, 2.0]):
                variance = noise / self.tasks_right + floor
                density, _ = log_density(self.losses, mean, variance)
                best = max(best, (float(density.sum()), float(noise), float(floor)))
        self.noise = best[1]
        self.noise_floor = max(best[2], 1e-7)


def fit(results: Sequence[Result], start: Fit | None = None) -> Fit:
    """Fit the model to published results."""
    fitting = Fitting(results, start)
    first_study = len(NAMES)
    first_model = first_study + len(fitting.studies)
    covariance = np.zeros((0, 0))
    for _ in range(ROUNDS if start is None else ROUNDS_FROM_A_FIT):
        fitting.deviation[first_study:first_model] = fitting.study_deviation
        fitting.deviation[first_model:] = fitting.model_deviation
        hessian = np.eye(1)
        for _ in range(STEPS):
            hessian, size = fitting.newton_step()
            if size < 1e-4:
                break
        covariance = np.linalg.inv(hessian)
        fitting.fit_scatter(covariance)
    groups = fitting.studies + fitting.models
    effects = dict(zip(groups, map(float, fitting.values[first_study:]), strict=True))
    return Fit(
        coefficients=fitting.values[:first_study],
        covariance=covariance[:first_study, :first_study],
        effects=effects,
        study_deviation=fitting.study_deviation,
        model_deviation=fitting.model_deviation,
        noise=fitting.noise,
        noise_floor=fitting.noise_floor,
    )


def spread(fitted: Fit, rows: Array) -> Array:
    """Return the variance of the log means of a new study and model."""
    of_rows = np.einsum("ij,jk,ik->i", rows, fitted.covariance, rows)
    return of_rows + fitted.study_deviation**2 + fitted.model_deviation**2


def predict(fitted: Fit, results: Sequence[Result]) -> Array:
    """Return the expected losses of results of a new study and new models."""
    design = Design(results)
    total = np.zeros(len(results))
    for rows, has in (
        (design.weights, design.has_weights),
        (design.cache, design.has_cache),
    ):
        log_mean = rows @ fitted.coefficients + spread(fitted, rows) / 2
        total += np.where(has, np.exp(log_mean), 0.0)
    return total


@dataclass(frozen=True, slots=True)
class Predicted:
    """Results of a study that the fit has not seen, and what it expected."""

    results: list[Result]
    expected: Array
    # as the router expects it: it does not know which share of the tasks the model fails at, and takes them for moderate
    expected_as_moderate: Array
    variance: Array

    @property
    def errors(self) -> Array:
        """Return the absolute errors."""
        losses = np.array([result.loss for result in self.results])
        return np.abs(losses - self.expected)

    @property
    def shares_below(self) -> Array:
        """Return where each loss lies in its distribution, 0..1."""
        losses = np.array([result.loss for result in self.results])
        return share_below(losses, np.maximum(self.expected, 1e-6), self.variance)

    @property
    def covered(self) -> Array:
        """Return which losses lie in their 90 % interval."""
        below = self.shares_below
        return (below > TAIL) & (below < 1 - TAIL)


def leave_each_out(results: Sequence[Result], fitted: Fit) -> dict[str, Predicted]:
    """Return, by study, what a fit of all the others expects of it."""
    predicted: dict[str, Predicted] = {}
    for study in sorted({result.study for result in results}, key=str.lower):
        others = [result for result in results if result.study != study]
        own = [result for result in results if result.study == study]
        without = fit(others, fitted)
        right = np.array([result.questions * result.right for result in own])
        variance = without.noise / right + without.noise_floor
        predicted[study] = Predicted(
            results=own,
            expected=predict(without, own),
            expected_as_moderate=predict(without, [_as_moderate(each) for each in own]),
            variance=variance,
        )
    return predicted


def _as_moderate(result: Result) -> Result:
    """Return a result with the share of right answers that the router takes for that of moderate tasks."""
    decades = math.log10(result.parameters / USUAL_PARAMETERS)
    odds = MODERATE_FAILED / (1 - MODERATE_FAILED) * math.exp(-FAILED_BY_SIZE * decades)
    return replace(result, right=1 / (1 + odds))


def is_four_bits(result: Result) -> bool:
    """Tell whether a result is of weights of 4 bits."""
    return PUBLISHED_AS.get(result.number_format) in FOUR_BITS


def factors(predicted: Iterable[Predicted]) -> dict[bool, float]:
    """Return, for 4 bits and not, by what predictions are multiplied to be right on average, weighted by their precision."""
    products = {True: 0.0, False: 0.0}
    squares = {True: 0.0, False: 0.0}
    for of_study in predicted:
        for result, expected, variance in zip(
            of_study.results, of_study.expected, of_study.variance, strict=True
        ):
            if result.number_format in UNQUANTIZED:
                continue
            is_four = is_four_bits(result)
            weight = expected / (expected**2 + variance)
            products[is_four] += weight * result.loss
            squares[is_four] += weight * expected
    return {is_four: products[is_four] / squares[is_four] for is_four in products}


def corrected(predicted: dict[str, Predicted]) -> dict[str, Predicted]:
    """Return each study's predictions, multiplied by the factors that the other studies ask for."""
    better: dict[str, Predicted] = {}
    for study, of_study in predicted.items():
        others = [other for name, other in predicted.items() if name != study]
        by_family = factors(others)
        multiplied = [
            1.0
            if result.number_format in UNQUANTIZED
            else by_family[is_four_bits(result)]
            for result in of_study.results
        ]
        better[study] = replace(
            of_study, expected=of_study.expected * np.array(multiplied)
        )
    return better


def failed_by_size(results: Iterable[Result]) -> float:
    """Return by how much the log odds of failing a task fall for ten times as many parameters, within benchmarks."""
    by_benchmark = defaultdict(set)
    with RESULTS.open(encoding="utf-8", newline="") as file:
        for row, result in zip(csv.DictReader(file), results, strict=True):
            if row["baseline"]:
                failed = 1 - result.right
                odds = math.log(failed / result.right)
                size = math.log10(result.parameters)
                by_benchmark[row["benchmark"], row["study"]].add((size, odds))
    products = 0.0
    squares = 0.0
    for points in by_benchmark.values():
        middle_size = fmean(size for size, _ in points)
        middle_odds = fmean(odds for _, odds in points)
        for size, odds in points:
            products += (size - middle_size) * (odds - middle_odds)
            squares += (size - middle_size) ** 2
    return -products / squares


def expected_today(results: Iterable[Result]) -> Array:
    """Return what the table that this fit replaced expected: by class and two families of formats, and nothing of caches.

    Its figures are those of November 2026 for tasks of moderate complexity, with its rule for smaller models.
    """
    four_bits = {
        "chat": 0.01,
        "writing": 0.01,
        "extraction": 0.015,
        "multilingual": 0.03,
        "code": 0.04,
        "math": 0.06,
        "long_context": 0.04,
        "tools": 0.034,
    }
    complex_four_bits = {
        "chat": 0.03,
        "writing": 0.03,
        "extraction": 0.04,
        "multilingual": 0.06,
        "code": 0.08,
        "math": 0.11,
        "long_context": 0.08,
        "tools": 0.058,
    }
    eight_bits = {
        "chat": 0.002,
        "writing": 0.002,
        "extraction": 0.003,
        "multilingual": 0.004,
        "code": 0.004,
        "math": 0.006,
        "long_context": 0.006,
        "tools": 0.0034,
    }
    complex_eight_bits = {
        "chat": 0.004,
        "writing": 0.004,
        "extraction": 0.005,
        "multilingual": 0.006,
        "code": 0.008,
        "math": 0.01,
        "long_context": 0.01,
        "tools": 0.0058,
    }
    expected = []
    for result in results:
        if result.number_format in UNQUANTIZED:
            expected.append(0.0)
            continue
        is_four = PUBLISHED_AS[result.number_format] in FOUR_BITS
        usual = (four_bits if is_four else eight_bits)[result.prompt_class]
        harder = (complex_four_bits if is_four else complex_eight_bits)[
            result.prompt_class
        ]
        decades = max(math.log10(7e9 / result.parameters), 0.0)
        step = min(decades, 1.0)
        mean = math.exp((1 - step) * math.log(usual) + step * math.log(harder))
        mean *= 10 ** (0.2261 * decades) * (1 + decades)
        if "int8" in result.number_format:
            mean *= 4
        expected.append(min(mean, 0.5))
    return np.array(expected)


def report(
    results: Sequence[Result],
    fitted: Fit,
    uncorrected: dict[str, Predicted],
) -> list[str]:
    """Return the lines of the report."""
    predicted = corrected(uncorrected)
    lines = [
        "$ python benchmarks/loss_prior.py --write",
        f"# {len(results)} results of {len(predicted)} studies and {len({r.model for r in results})} models",
        "# each study is predicted by a fit of all the others",
        "# errors are of the loss in points: right answers lost of 100. Before: the table of November 2026. None: no loss",
        "# within: share of the losses within their 90 % interval, which has the benchmark's own noise in it",
        "# as moderate tasks: expected without the benchmark's baseline, as the router does it before anything is measured",
        "",
        f"{'study':<22}{'results':>8}{'lost':>8}{'expected':>10}{'error':>8}{'before':>8}{'none':>8}{'within':>8}{'before':>8}",
    ]
    everything: dict[str, list[Array]] = defaultdict(list)
    for study, of_study in predicted.items():
        columns = _columns(of_study)
        for name, values in columns.items():
            everything[name].append(values)
        lines.append(_row(study, columns))
    together = {name: np.concatenate(values) for name, values in everything.items()}
    lines.append(_row("all results", together))
    lines.append(_row("all, as moderate tasks", _columns_as_moderate(uncorrected)))
    by_study = {
        name: np.array([values.mean() for values in of_studies])
        for name, of_studies in everything.items()
    }
    lines.append(_row("mean over studies", by_study))
    lines += [
        "",
        *_by("format", predicted),
        "",
        *_by("class", predicted),
        "",
    ]
    by_family = factors(uncorrected.values())
    return [
        *lines,
        *_coefficient_lines(results, fitted),
        f"{'factor of 4 bits':<24}{by_family[True]:>8.2f}",
        f"{'factor of 8 bits':<24}{by_family[False]:>8.2f}",
    ]


def _columns(of_study: Predicted) -> dict[str, Array]:
    losses = np.array([result.loss for result in of_study.results])
    before = expected_today(of_study.results)
    below = share_below(losses, np.maximum(before, 1e-4), of_study.variance)
    return {
        "lost": losses,
        "expected": of_study.expected,
        "error": of_study.errors,
        "before": np.abs(losses - before),
        "none": np.abs(losses),
        "within": of_study.covered.astype(float),
        "within before": ((below > TAIL) & (below < 1 - TAIL)).astype(float),
    }


def _columns_as_moderate(uncorrected: dict[str, Predicted]) -> dict[str, Array]:
    as_moderate = {
        study: replace(of_study, expected=of_study.expected_as_moderate)
        for study, of_study in uncorrected.items()
    }
    columns = [_columns(of_study) for of_study in corrected(as_moderate).values()]
    return {
        name: np.concatenate([of_study[name] for of_study in columns])
        for name in columns[0]
    }


def _row(name: str, columns: dict[str, Array]) -> str:
    means = {column: 100 * float(values.mean()) for column, values in columns.items()}
    return (
        f"{name:<22}{len(columns['lost']):>8}{means['lost']:>8.2f}{means['expected']:>10.2f}{means['error']:>8.2f}"
        f"{means['before']:>8.2f}{means['none']:>8.2f}{means['within']:>7.0f}%{means['within before']:>7.0f}%"
    )


def _by(what: str, predicted: dict[str, Predicted]) -> list[str]:
    """Return a line for each format or class: what is lost on average, and how well that was predicted."""
    groups: dict[str, list[dict[str, Array]]] = defaultdict(list)
    for of_study in predicted.values():
        columns = _columns(of_study)
        for number, result in enumerate(of_study.results):
            name = result.prompt_class
            if what == "format":
                cache = f"+kv-{result.kv_cache}" if result.kv_cache else ""
                name = result.number_format + cache
            one = {key: values[number : number + 1] for key, values in columns.items()}
            groups[name].append(one)
    lines = [f"by {what}"]
    for name, columns_of_results in sorted(groups.items()):
        joined = {
            key: np.concatenate([columns[key] for columns in columns_of_results])
            for key in columns_of_results[0]
        }
        lines.append(_row(name, joined))
    return lines


def _coefficient_lines(results: Sequence[Result], fitted: Fit) -> list[str]:
    lines = [
        "coefficients of the logarithm of the mean loss, with their standard errors"
    ]
    for name, number in INDEX.items():
        error = math.sqrt(fitted.covariance[number, number])
        lines.append(f"{name:<24}{fitted.coefficients[number]:>8.2f} ± {error:.2f}")
    lines += [
        f"{'studies differ by':<24}{fitted.study_deviation:>8.2f}",
        f"{'models differ by':<24}{fitted.model_deviation:>8.2f}",
        f"{'noise: phi':<24}{fitted.noise:>8.2f}",
        f"{'noise: least':<24}{math.sqrt(fitted.noise_floor):>8.4f}",
        f"{'failed by size':<24}{failed_by_size(results):>8.2f}  log odds for ten times fewer parameters",
    ]
    return lines


def coefficients_file(
    results: Sequence[Result], fitted: Fit, by_family: dict[bool, float]
) -> str:
    """Return the router's coefficients as TOML."""
    size_variance = fitted.covariance[INDEX["size"], INDEX["size"]]
    lines = [
        "# Written by benchmarks/loss_prior.py --write from published_results.csv; see the head of that script.",
        "#",
        "# Of a format and a class: the logarithm of the median loss of a model with 8 billion parameters at tasks of which",
        "# it fails 30 % in 16 bits, and the variance of that logarithm over studies, models and what is not known.",
        f"size = {fitted.coefficients[INDEX['size']]:.4f}  # for ten times as many parameters",
        f"size_variance = {size_variance:.4f}",
        f"failed = {fitted.coefficients[INDEX['failed']]:.4f}  # exponent of the share of tasks that fail in 16 bits",
        f"failed_by_size = {failed_by_size(results):.4f}  # log odds of failing, for ten times fewer parameters",
    ]
    families = {"4-bit": ("four bits",), "8-bit": ("eight bits",)}
    for name in FORMATS:
        family = "four bits" if name in FOUR_BITS else "eight bits"
        families[name] = (family, f"format {name}")
    for name, parts in families.items():
        factor = by_family["four bits" in parts]
        lines += ["", f"[formats.{name}]", *_class_lines(fitted, parts, factor)]
    caches = {
        "fp8": ("cache of eight bits", "cache of floats"),
        "8-bit": ("cache of eight bits",),
        "fp4": ("cache of four bits", "cache of floats"),
        "4-bit": ("cache of four bits",),
    }
    for name, parts in caches.items():
        lines += ["", f"[caches.{name}]", *_class_lines(fitted, parts, factor=1.0)]
    counts: dict[str, dict[str, Counter[float]]] = defaultdict(
        lambda: defaultdict(Counter)
    )
    for result in results:
        if result.number_format not in UNQUANTIZED:
            published_as = PUBLISHED_AS[result.number_format]
            counts[published_as][result.prompt_class][result.parameters / 1e9] += 1
    for name, by_class in counts.items():
        lines += [
            "",
            f"[results.{name}]  # sizes in billions of parameters, and how many results",
        ]
        for prompt_class, by_size in by_class.items():
            pairs = ", ".join(f"[{size:g}, {n}]" for size, n in sorted(by_size.items()))
            lines.append(f"{prompt_class} = [{pairs}]")
    return "\n".join(lines) + "\n"


def _class_lines(fitted: Fit, parts: tuple[str, ...], factor: float) -> list[str]:
    lines = []
    for name in CLASSES:
        row = np.zeros((1, len(NAMES)))
        for part in (*parts, f"class {name}"):
            row[0, INDEX[part]] = 1
        log_mean = float((row @ fitted.coefficients)[0]) + math.log(factor)
        lines.append(f"{name} = [{log_mean:.3f}, {float(spread(fitted, row)[0]):.3f}]")
    return lines


def main() -> None:
    """Fit, predict each study from the others, and print how well that works."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write coefficients and report"
    )
    options = parser.parse_args()
    results = read_results()
    assert {result.prompt_class for result in results} <= set(PromptClass)
    fitted = fit(results)
    predicted = leave_each_out(results, fitted)
    lines = report(results, fitted, predicted)
    print("\n".join(lines))
    if options.write:
        by_family = factors(predicted.values())
        COEFFICIENTS.write_text(coefficients_file(results, fitted, by_family), "utf-8")
        REPORT.write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
