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

from router.policy.profiles import Fit, FitError, ProfileError, SpeedSample, percentile
from tiers.least_squares import least_squares
from tiers.spec import TierName
from tiers.speed import ReplicaLoad, SpeedModel

# of the smallest batch's median time a token: no batch is decoded in less
BUNCHED = 0.1
KNEE_PAYS = 0.7  # a knee must reduce the line's squared error to less than this share


def fit_all(
    samples: Sequence[SpeedSample], max_num_seqs: Mapping[TierName, int]
) -> tuple[Fit, ...]:
    """Fit the speed models of several tiers; ``contention`` is one for all, since they share one machine.

    It is the geometric mean of the tiers' slowdowns: a few samples of each do not show a difference. Where tiers share the
    machine fairly, none is slowed more than by their number; what was measured beyond that had other causes.
    """
    own = [fit(tier, samples, most) for tier, most in max_num_seqs.items()]
    slowdowns = [1 + min(found.contention, len(own) - 1) for found in own]
    shared = math.exp(fmean(map(math.log, slowdowns))) - 1
    return tuple(
        fit(tier, samples, most, shared) for tier, most in max_num_seqs.items()
    )


def fit(
    tier: TierName,
    samples: Sequence[SpeedSample],
    max_num_seqs: int,
    contention: float | None = None,
) -> Fit:
    """Fit one tier's speed model to the samples of all; ``contention`` None: fit it too. ``ProfileError``: too few."""
    own = _paced([s for s in samples if s.tier is tier])
    decoded = [s for s in own if s.tpot_ms is not None and not s.neighbours]
    begun = [
        s
        for s in own
        if s.ttft_ms is not None and not s.neighbours and s.sequences < max_num_seqs
    ]
    if len({s.batch for s in decoded}) < 2 or len({s.prompt_tokens for s in begun}) < 2:  # noqa: PLR2004
        raise ProfileError(
            f"too few samples of {tier}: no two batches, or no two prompt lengths"
        )
    steps_alone = _fit_steps(decoded)
    steps = [steps_alone.step_ms(s.sequences) if s.sequences else 0.0 for s in begun]
    ttft = least_squares(
        [
            (1.0, float(s.prompt_tokens + s.waiting_tokens), step)
            for s, step in zip(begun, steps, strict=True)
        ],
        [s.ttft_ms for s in begun if s.ttft_ms is not None],
    )
    alone = replace(
        steps_alone,
        ttft_base_ms=ttft[0],
        prefill_ms_per_token=ttft[1],
        ttft_steps=ttft[2],
    )
    if contention is None:
        contention = _contention(own, alone, max_num_seqs)
    shared = contention

    def factor(s: SpeedSample) -> float:
        return 1 + shared * s.neighbours

    ttft_pairs = [
        (_predicted_ttft(alone, s, max_num_seqs) * factor(s), s.ttft_ms)
        for s in own
        if s.ttft_ms is not None
    ]
    tpot_pairs = [
        (alone.step_ms(s.batch) * factor(s), s.tpot_ms)
        for s in own
        if s.tpot_ms is not None
    ]
    return Fit(
        tier=tier,
        ttft_base_ms=round(ttft[0], 4),
        prefill_ms_per_token=round(ttft[1], 6),
        ttft_steps=round(ttft[2], 4),
        step_base_ms=round(alone.step_base_ms, 4),
        step_ms_per_sequence=round(alone.step_ms_per_sequence, 6),
        step_knee=alone.step_knee,
        step_ms_beyond_knee=round(alone.step_ms_beyond_knee, 6),
        contention=round(contention, 4),
        ttft_spread=_spread(ttft_pairs),
        tpot_spread=_spread(tpot_pairs),
        ttft_error=_error(ttft_pairs),
        tpot_error=_error(tpot_pairs),
        samples=len(own),
    )


def _contention(
    own: Sequence[SpeedSample], alone: SpeedModel, max_num_seqs: int
) -> float:
    """Return the median slowdown by neighbours, of TPOT and TTFT at batch 1; 0: none, or nothing was measured."""
    slowed = [
        (seen / predicted - 1) / s.neighbours
        for s in own
        if s.neighbours and s.batch == 1
        for seen, predicted in (
            (s.tpot_ms, alone.step_ms(s.batch)),
            (s.ttft_ms, _predicted_ttft(alone, s, max_num_seqs)),
        )
        if seen is not None and predicted > 0
    ]
    return max(median(slowed), 0.0) if slowed else 0.0


def _paced(own: list[SpeedSample]) -> list[SpeedSample]:
    """Return samples without the pace of answers that came in one piece, because this process or the router had to wait."""
    paces = [
        (s.batch, s.tpot_ms) for s in own if s.tpot_ms is not None and not s.neighbours
    ]
    smallest = min((batch for batch, _ in paces), default=0)
    least = (
        BUNCHED * median(pace for batch, pace in paces if batch == smallest)
        if paces
        else 0.0
    )
    return [
        s.model_copy(update={"tpot_ms": None, "batch": 0})
        if s.tpot_ms is not None and s.tpot_ms <= least
        else s
        for s in own
    ]


def _fit_steps(decoded: Sequence[SpeedSample]) -> SpeedModel:
    """Fit the time of a decode step to the batch size: a line, or two lines that meet at a measured batch size."""
    seen = [s.tpot_ms for s in decoded if s.tpot_ms is not None]
    batches = sorted({s.batch for s in decoded})
    found: list[tuple[float, SpeedModel]] = []
    for knee in (0, *batches[1:-1]):
        rows = [
            (1.0, float(s.batch), float(max(s.batch - knee, 0)) if knee else 0.0)
            for s in decoded
        ]
        base, slope, beyond = least_squares(rows, seen)
        model = SpeedModel(
            0.0, 0.0, base, slope, step_knee=knee, step_ms_beyond_knee=beyond
        )
        error = sum(
            (model.step_ms(s.batch) / y - 1) ** 2
            for s, y in zip(decoded, seen, strict=True)
        )
        found.append((error, model))
    line, best = found[0], min(found, key=lambda pair: pair[0])
    return best[1] if best[0] < KNEE_PAYS * line[0] else line[1]


def _predicted_ttft(model: SpeedModel, sample: SpeedSample, max_num_seqs: int) -> float:
    load = ReplicaLoad(sample.sequences, sample.waiting_tokens, 0, 0.0)
    return model.times(sample.prompt_tokens, load, max_num_seqs, 1.0).ttft_ms


def _error(pairs: Sequence[tuple[float, float]]) -> FitError:
    errors = [abs(predicted - seen) / seen for predicted, seen in pairs]
    return FitError(
        median=round(percentile(errors, 0.5), 4), p95=round(percentile(errors, 0.95), 4)
    )


def _spread(pairs: Sequence[tuple[float, float]]) -> float:
    logs = [math.log(seen / max(predicted, 1e-3)) for predicted, seen in pairs]
    return round(math.hypot(pstdev(logs), fmean(logs)), 4) if logs else 0.0
