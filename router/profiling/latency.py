"""What a precision takes in time, measured: samples of requests under known load, and the speed model fitted to them.

The model and its terms are in ``tiers.speed``. Its parameters are fitted by least squares on relative errors, so that short
and long times weigh alike, with no parameter below zero (a negative one is set to zero, the rest fitted again). Contention
is the median slowdown of single requests that were decoded while other tiers were computing as well.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from statistics import fmean, median, pstdev
from typing import TYPE_CHECKING, Literal

from pydantic import AwareDatetime, Field, ValidationError

from router.profiling.client import ProfileError
from router.profiling.quality import Frozen, check_identities, percentile
from tiers.least_squares import least_squares
from tiers.spec import TierName
from tiers.speed import Load, SpeedModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

KNEE_PAYS = 0.7  # a knee must leave less than this share of the line's squared error
MIN_SPREAD = 0.05  # of log(seen / predicted): what live requests scatter by even where the fit is perfect


class Sample(Frozen):
    """One timed request, and what its tier had to do when it was sent. Times in milliseconds.

    Attributes:
        prompt_tokens: Of its prompt.
        sequences: Requests that its tier had already.
        waiting_tokens: Prompt tokens of those that were not computed yet.
        batch: Sequences decoded together with it, itself included; 0 where it was not decoded.
        neighbours: Share of the other tiers that were computing as well, 0..1.
    """

    tier: TierName
    prompt_tokens: int
    sequences: int
    waiting_tokens: int
    batch: int
    neighbours: float = Field(ge=0, le=1)
    ttft_ms: float | None
    tpot_ms: float | None


class FitError(Frozen):
    """|predicted - seen| / seen over the samples that a model was fitted to: median and 95th percentile."""

    median: float
    p95: float


class Fit(Frozen):
    """One tier's speed model, as in ``tiers.speed.SpeedModel``, and how well it fits."""

    tier: TierName
    ttft_base_ms: float = Field(ge=0)
    prefill_ms_per_token: float = Field(ge=0)
    ttft_steps: float = Field(ge=0)
    step_base_ms: float = Field(ge=0)
    step_ms_per_sequence: float = Field(ge=0)
    step_knee: int = Field(ge=0)
    step_ms_beyond_knee: float = Field(ge=0)
    contention: float = Field(ge=0)
    ttft_spread: float = Field(ge=0)
    tpot_spread: float = Field(ge=0)
    ttft_error: FitError
    tpot_error: FitError
    samples: int

    @property
    def model(self) -> SpeedModel:
        """Return it as the fleet uses it."""
        return SpeedModel(
            ttft_base_ms=self.ttft_base_ms,
            prefill_ms_per_token=self.prefill_ms_per_token,
            step_base_ms=self.step_base_ms,
            step_ms_per_sequence=self.step_ms_per_sequence,
            step_knee=self.step_knee,
            step_ms_beyond_knee=self.step_ms_beyond_knee,
            ttft_steps=self.ttft_steps,
            contention=self.contention,
            ttft_spread=max(self.ttft_spread, MIN_SPREAD),
            tpot_spread=max(self.tpot_spread, MIN_SPREAD),
            profiled=True,
        )


class LatencyProfile(Frozen):
    """The measured speed of every tier on one machine.

    Attributes:
        machine: What it was measured on.
        checkpoints: What tells each tier's weights from others'.
    """

    version: Literal[1] = 1
    created: AwareDatetime
    model: str
    machine: str
    checkpoints: dict[TierName, str | None]
    fits: tuple[Fit, ...]
    samples: tuple[Sample, ...]

    def with_others(self, earlier: LatencyProfile) -> LatencyProfile:
        """Return it with what was measured earlier of the tiers that it leaves out."""
        own = {fit.tier for fit in self.fits}
        fits = (*self.fits, *(fit for fit in earlier.fits if fit.tier not in own))
        samples = (*self.samples, *(sample for sample in earlier.samples if sample.tier not in own))
        return self.model_copy(update={"fits": fits, "samples": samples})

    def check(self, checkpoints: Mapping[TierName, str | None], machine: str, path: Path) -> None:
        """Check that the profile is of these checkpoints on this machine.

        Raises:
            ProfileError: It is of others.
        """
        again = "run 'qarr profile latency' again"
        check_identities(self.checkpoints, checkpoints, f"the latency profile {path}", again)
        if self.machine != machine:
            raise ProfileError(f"the latency profile {path} was measured on {self.machine}, this is {machine}; {again}")


def latency_name(checkpoints: Mapping[TierName, str | None], machine: str) -> str:
    """Return the file name of the profile of these checkpoints on this machine."""
    parts = [checkpoints.get(tier) for tier in TierName], machine
    return f"latency-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.json"


def load_latency(path: Path) -> LatencyProfile:
    """Read a profile.

    Raises:
        ProfileError: There is none, or it is not one.
    """
    try:
        return LatencyProfile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ProfileError(f"the latency profile {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ProfileError(
            f"{path} is no latency profile of this release: {where}: {first['msg']}; run 'qarr profile latency' again"
        ) from None


def fit(tier: TierName, samples: Sequence[Sample], max_num_seqs: int) -> Fit:
    """Fit one tier's speed model to its samples.

    Raises:
        ProfileError: There are too few.
    """
    own = [s for s in samples if s.tier is tier]
    decoded = [s for s in own if s.tpot_ms is not None and not s.neighbours]
    begun = [s for s in own if s.ttft_ms is not None and not s.neighbours and s.sequences < max_num_seqs]
    if len({s.batch for s in decoded}) < 2 or len({s.prompt_tokens for s in begun}) < 2:  # noqa: PLR2004
        raise ProfileError(f"too few samples of {tier}: no two batches, or no two prompt lengths")
    steps_alone = _fit_steps(decoded)
    steps = [steps_alone.step_ms(s.sequences) if s.sequences else 0.0 for s in begun]
    ttft = least_squares(
        [(1.0, float(s.prompt_tokens + s.waiting_tokens), step) for s, step in zip(begun, steps, strict=True)],
        [_ttft(s) for s in begun],
    )
    alone = replace(steps_alone, ttft_base_ms=ttft[0], prefill_ms_per_token=ttft[1], ttft_steps=ttft[2])
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
    contention = max(median(slowed), 0.0) if slowed else 0.0

    def predict(s: Sample) -> tuple[float, float]:
        factor = 1 + contention * s.neighbours
        return _predicted_ttft(alone, s, max_num_seqs) * factor, alone.step_ms(s.batch) * factor

    ttft_pairs = [(predict(s)[0], s.ttft_ms) for s in own if s.ttft_ms is not None]
    tpot_pairs = [(predict(s)[1], s.tpot_ms) for s in own if s.tpot_ms is not None]
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


def _fit_steps(decoded: Sequence[Sample]) -> SpeedModel:
    """Fit the time of a decode step to the batch: a line, or two that meet at a measured batch, whichever errs less."""
    seen = [_tpot(s) for s in decoded]
    batches = sorted({s.batch for s in decoded})
    found: list[tuple[float, SpeedModel]] = []
    for knee in (0, *batches[1:-1]):
        rows = [(1.0, float(s.batch), float(max(s.batch - knee, 0)) if knee else 0.0) for s in decoded]
        base, slope, beyond = least_squares(rows, seen)
        model = SpeedModel(0.0, 0.0, base, slope, step_knee=knee, step_ms_beyond_knee=beyond)
        error = sum((model.step_ms(s.batch) / y - 1) ** 2 for s, y in zip(decoded, seen, strict=True))
        found.append((error, model))
    line, best = found[0], min(found, key=lambda pair: pair[0])
    return best[1] if best[0] < KNEE_PAYS * line[0] else line[1]


def _predicted_ttft(model: SpeedModel, sample: Sample, max_num_seqs: int) -> float:
    load = Load(sample.sequences, sample.waiting_tokens, 0, 0.0)
    return model.times(sample.prompt_tokens, load, max_num_seqs, 1.0).ttft_ms


def _ttft(sample: Sample) -> float:
    assert sample.ttft_ms is not None
    return sample.ttft_ms


def _tpot(sample: Sample) -> float:
    assert sample.tpot_ms is not None
    return sample.tpot_ms


def _error(pairs: Sequence[tuple[float, float]]) -> FitError:
    errors = [abs(predicted - seen) / seen for predicted, seen in pairs]
    return FitError(median=round(percentile(errors, 0.5), 4), p95=round(percentile(errors, 0.95), 4))


def _spread(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the root mean square of log(seen / predicted)."""
    logs = [math.log(seen / max(predicted, 1e-3)) for predicted, seen in pairs]
    return round(math.hypot(pstdev(logs), fmean(logs)), 4) if logs else 0.0
