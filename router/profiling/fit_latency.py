"""Fits the speed model to samples of requests under known load.

The model and its terms are in ``tiers.speed``. The fit is least squares on relative errors, without negative parameters (one
is set to zero, the rest fitted again). Contention is the mean over tiers of the median slowdown of single requests that were
decoded while other tiers were computing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median, pstdev
from typing import NamedTuple

from router.policy.profiles import Fit, FitError, ProfileError, SpeedSample, percentile
from tiers.least_squares import least_squares
from tiers.spec import TierName
from tiers.speed import ReplicaLoad, SpeedModel

# An answer whose tokens took less than this share of the smallest batch's median time came in one piece.
BUNCHED = 0.1
KNEE_PAYS = 0.7  # a knee must reduce the line's squared error to less than this share
MIN_VALUES = 2  # batches, and prompt lengths, that a fit needs


class TimePrediction(NamedTuple):
    """What a speed model predicts of a time, and what was seen."""

    predicted_ms: float
    seen_ms: float


def fit_tiers(
    samples: Sequence[SpeedSample], max_num_seqs: Mapping[TierName, int]
) -> tuple[Fit, ...]:
    """Fit the speed models of several tiers; ``contention`` is one for all, since they share one machine.

    It is the geometric mean of the tiers' slowdowns: a few samples of each do not show a difference. Where tiers share the
    machine fairly, none is slowed more than by their number; what was measured beyond that had other causes.
    """
    highest_contention = len(max_num_seqs) - 1
    log_slowdowns = []
    for tier, tier_max_num_seqs in max_num_seqs.items():
        tier_fit = fit_tier(tier, samples, tier_max_num_seqs)
        slowdown = 1 + min(tier_fit.contention, highest_contention)
        log_slowdowns.append(math.log(slowdown))
    shared_contention = math.exp(fmean(log_slowdowns)) - 1
    return tuple(
        fit_tier(tier, samples, tier_max_num_seqs, contention=shared_contention)
        for tier, tier_max_num_seqs in max_num_seqs.items()
    )


def fit_tier(
    tier: TierName,
    samples: Sequence[SpeedSample],
    max_num_seqs: int,
    contention: float | None = None,
) -> Fit:
    """Fit one tier's speed model to the samples of all; ``contention`` None: fit it too. ``ProfileError``: too few."""
    own_samples = _without_bunched_paces(
        [sample for sample in samples if sample.tier is tier]
    )
    alone = _fit_alone(tier, own_samples, max_num_seqs)
    if contention is None:
        contention = _contention(own_samples, alone, max_num_seqs)
    ttfts = _ttft_predictions(own_samples, alone, max_num_seqs, contention=contention)
    tpots = _tpot_predictions(own_samples, alone, contention)
    return Fit(
        tier=tier,
        ttft_base_ms=round(alone.ttft_base_ms, 4),
        prefill_ms_per_token=round(alone.prefill_ms_per_token, 6),
        ttft_steps=round(alone.ttft_steps, 4),
        step_base_ms=round(alone.step_base_ms, 4),
        step_ms_per_sequence=round(alone.step_ms_per_sequence, 6),
        step_knee=alone.step_knee,
        step_ms_beyond_knee=round(alone.step_ms_beyond_knee, 6),
        contention=round(contention, 4),
        ttft_spread=_spread(ttfts),
        tpot_spread=_spread(tpots),
        ttft_error=_error(ttfts),
        tpot_error=_error(tpots),
        samples=len(own_samples),
    )


def _without_bunched_paces(own_samples: list[SpeedSample]) -> list[SpeedSample]:
    """Return samples without the pace of answers that came in one piece, because this process or the router had to wait."""
    bunched_ms = _bunched_ms(own_samples)
    paced: list[SpeedSample] = []
    for sample in own_samples:
        if sample.tpot_ms is not None and sample.tpot_ms <= bunched_ms:
            paced.append(sample.model_copy(update={"tpot_ms": None, "batch": 0}))
        else:
            paced.append(sample)
    return paced


def _bunched_ms(own_samples: Sequence[SpeedSample]) -> float:
    """Return the largest TPOT of answers that came in one piece: no batch is decoded so fast."""
    decoded_samples = _decoded_alone(own_samples)
    if not decoded_samples:
        return 0.0
    smallest_batch = min(sample.batch for sample in decoded_samples)
    paces_ms = [
        sample.tpot_ms
        for sample in decoded_samples
        if sample.tpot_ms is not None and sample.batch == smallest_batch
    ]
    return BUNCHED * median(paces_ms)


def _decoded_alone(own_samples: Sequence[SpeedSample]) -> list[SpeedSample]:
    """Return the samples with a pace that no other tier slowed."""
    return [
        sample
        for sample in own_samples
        if sample.tpot_ms is not None and not sample.neighbours
    ]


def _fit_alone(
    tier: TierName, own_samples: Sequence[SpeedSample], max_num_seqs: int
) -> SpeedModel:
    """Fit the speed of a tier while no other computes; ``ProfileError``: there are too few samples."""
    decoded_samples = _decoded_alone(own_samples)
    prefilled_samples = [
        sample
        for sample in own_samples
        if sample.ttft_ms is not None
        and not sample.neighbours
        and sample.sequences < max_num_seqs
    ]
    batches = {sample.batch for sample in decoded_samples}
    lengths = {sample.prompt_tokens for sample in prefilled_samples}
    if len(batches) < MIN_VALUES or len(lengths) < MIN_VALUES:
        raise ProfileError(
            f"too few samples of {tier}: no two batches, or no two prompt lengths"
        )
    return _fit_ttft(prefilled_samples, _fit_steps(decoded_samples))


def _fit_steps(decoded_samples: Sequence[SpeedSample]) -> SpeedModel:
    """Fit the time of a decode step to the batch size: a line, or two lines that meet at a measured batch size."""
    batches = sorted({sample.batch for sample in decoded_samples})
    line = _fit_line(decoded_samples)
    line_error = _squared_error(line, decoded_samples)
    best = line
    smallest_error = line_error
    for knee in batches[1:-1]:
        bent_line = _fit_bent_line(decoded_samples, knee)
        error = _squared_error(bent_line, decoded_samples)
        if error < smallest_error:
            best = bent_line
            smallest_error = error
    return best if smallest_error < KNEE_PAYS * line_error else line


def _fit_line(decoded_samples: Sequence[SpeedSample]) -> SpeedModel:
    return _fit_rows(
        decoded_samples,
        [(1.0, float(sample.batch), 0.0) for sample in decoded_samples],
        knee=0,
    )


def _fit_bent_line(decoded_samples: Sequence[SpeedSample], knee: int) -> SpeedModel:
    rows = [
        (1.0, float(sample.batch), float(max(sample.batch - knee, 0)))
        for sample in decoded_samples
    ]
    return _fit_rows(decoded_samples, rows, knee)


def _fit_rows(
    decoded_samples: Sequence[SpeedSample], rows: Sequence[tuple[float, ...]], knee: int
) -> SpeedModel:
    seen_ms = [
        sample.tpot_ms for sample in decoded_samples if sample.tpot_ms is not None
    ]
    base_ms, ms_per_sequence, ms_beyond_knee = least_squares(rows, seen_ms)
    return SpeedModel(
        ttft_base_ms=0.0,
        prefill_ms_per_token=0.0,
        step_base_ms=base_ms,
        step_ms_per_sequence=ms_per_sequence,
        step_knee=knee,
        step_ms_beyond_knee=ms_beyond_knee,
    )


def _squared_error(model: SpeedModel, decoded_samples: Sequence[SpeedSample]) -> float:
    """Return the sum of the squared relative errors of a model's decode steps."""
    return sum(
        (model.step_ms(sample.batch) / sample.tpot_ms - 1) ** 2
        for sample in decoded_samples
        if sample.tpot_ms is not None
    )


def _fit_ttft(
    prefilled_samples: Sequence[SpeedSample], steps: SpeedModel
) -> SpeedModel:
    """Fit the time to the first token, and add it to a model of decode steps."""
    rows: list[tuple[float, ...]] = []
    for sample in prefilled_samples:
        step_ms = steps.step_ms(sample.sequences) if sample.sequences else 0.0
        tokens_to_read = sample.prompt_tokens + sample.waiting_tokens
        rows.append((1.0, float(tokens_to_read), step_ms))
    seen_ms = [
        sample.ttft_ms for sample in prefilled_samples if sample.ttft_ms is not None
    ]
    base_ms, prefill_ms_per_token, ttft_steps = least_squares(rows, seen_ms)
    return replace(
        steps,
        ttft_base_ms=base_ms,
        prefill_ms_per_token=prefill_ms_per_token,
        ttft_steps=ttft_steps,
    )


def _contention(
    own_samples: Sequence[SpeedSample], alone: SpeedModel, max_num_seqs: int
) -> float:
    """Return the median slowdown by neighbours, of TPOT and TTFT at batch 1; 0: none, or nothing was measured."""
    slowdowns: list[float] = []
    for sample in own_samples:
        if not sample.neighbours or sample.batch != 1:
            continue
        predicted_ttft_ms = _predicted_ttft_ms(alone, sample, max_num_seqs)
        if sample.tpot_ms is not None and alone.step_ms(1) > 0:
            slowdown = sample.tpot_ms / alone.step_ms(1) - 1
            slowdowns.append(slowdown / sample.neighbours)
        if sample.ttft_ms is not None and predicted_ttft_ms > 0:
            slowdown = sample.ttft_ms / predicted_ttft_ms - 1
            slowdowns.append(slowdown / sample.neighbours)
    if not slowdowns:
        return 0.0
    return max(median(slowdowns), 0.0)


def _ttft_predictions(
    own_samples: Sequence[SpeedSample],
    alone: SpeedModel,
    max_num_seqs: int,
    contention: float,
) -> list[TimePrediction]:
    predictions: list[TimePrediction] = []
    for sample in own_samples:
        if sample.ttft_ms is not None:
            alone_ms = _predicted_ttft_ms(alone, sample, max_num_seqs)
            slowdown = 1 + contention * sample.neighbours
            predictions.append(TimePrediction(alone_ms * slowdown, sample.ttft_ms))
    return predictions


def _tpot_predictions(
    own_samples: Sequence[SpeedSample], alone: SpeedModel, contention: float
) -> list[TimePrediction]:
    predictions: list[TimePrediction] = []
    for sample in own_samples:
        if sample.tpot_ms is not None:
            slowdown = 1 + contention * sample.neighbours
            predicted_ms = alone.step_ms(sample.batch) * slowdown
            predictions.append(TimePrediction(predicted_ms, sample.tpot_ms))
    return predictions


def _predicted_ttft_ms(
    model: SpeedModel, sample: SpeedSample, max_num_seqs: int
) -> float:
    load = ReplicaLoad(sequences=sample.sequences, prompt_tokens=sample.waiting_tokens)
    times = model.times(sample.prompt_tokens, load, max_num_seqs, output_share=1.0)
    return times.ttft_ms


def _error(predictions: Sequence[TimePrediction]) -> FitError:
    errors = [
        abs(predicted_ms - seen_ms) / seen_ms for predicted_ms, seen_ms in predictions
    ]
    return FitError(
        median=round(percentile(errors, 0.5), 4), p95=round(percentile(errors, 0.95), 4)
    )


def _spread(predictions: Sequence[TimePrediction]) -> float:
    """Return the standard deviation of log(seen / predicted) around 0."""
    logs = [
        math.log(seen_ms / max(predicted_ms, 1e-3))
        for predicted_ms, seen_ms in predictions
    ]
    if not logs:
        return 0.0
    return round(math.hypot(pstdev(logs), fmean(logs)), 4)
