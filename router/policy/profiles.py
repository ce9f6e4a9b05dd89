"""Profiles: what was measured of each tier, as values and files."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from classifier import PromptClass  # noqa: TC001  pydantic reads it
from tiers.spec import TierName
from tiers.speed import SpeedModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class ProfileError(Exception):
    """A profile cannot be made or used; says why and what to do."""


REFERENCE = TierName.PRECISE

TOP_K = 10  # vLLM gives 20 at most, unless told otherwise

MIN_SPREAD = 0.05  # of log(seen / predicted): what live requests scatter by even where the fit is perfect
MIN_CERTAINTIES = 20  # answers that a threshold is taken from
MIN_PROMPTS = 5  # of a class; resampling fewer says nothing of those that were not asked
CHECK_TOKENS = 8  # of an answer's beginning, that tell how sure a tier is of it


class Frozen(BaseModel):
    """A value."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Interval(Frozen):
    """An estimate and its interval at ``CONFIDENCE``."""

    mean: float
    low: float
    high: float


class Loss(Frozen):
    """What one tier loses on one class of prompts."""

    prompt_class: PromptClass
    tier: TierName
    prompts: int
    tokens: int
    top1_disagreement: Interval
    kl_mean: Interval
    kl_p95: Interval
    perplexity_ratio: Interval
    first_divergence: float
    never_diverged: float

    @property
    def certain(self) -> bool:
        """Tell whether there were prompts enough for the intervals to mean anything."""
        return self.prompts >= MIN_PROMPTS


class Certainty(Frozen):
    """How sure a tier was of one answer's beginning, and what the answer lost.

    Attributes:
        logprob: Mean log-probability of its first choice over the first ``CHECK_TOKENS`` places.
        disagreement: Share of the answer's tokens that are not the reference's first choice.
    """

    tier: TierName
    logprob: float
    disagreement: float


class QualityProfile(Frozen):
    """The measured loss of every class and tier.

    Attributes:
        checkpoints: Digest of each tier's weights; None for engines given by URL, whose checkpoint is not known.
        answer_tokens: Longest answer.
        prompts: Digest of the prompts.
    """

    version: Literal[1] = 1
    created: AwareDatetime
    model: str
    checkpoints: dict[TierName, str | None]
    answer_tokens: int
    top_k: int
    prompts: str
    losses: tuple[Loss, ...]
    certainties: tuple[Certainty, ...] = ()

    def threshold(self, tier: TierName, share: float) -> float | None:
        """Return the certainty that so large a share of a tier's answers stays under; None where it is not known."""
        found = [c.logprob for c in self.certainties if c.tier is tier]
        return percentile(found, share) if len(found) >= MIN_CERTAINTIES else None

    def loss(self, prompt_class: PromptClass, tier: TierName) -> Loss | None:
        """Return what was measured for a class and tier."""
        return next((x for x in self.losses if x.prompt_class is prompt_class and x.tier is tier), None)

    def check(self, checkpoints: Mapping[TierName, str | None], path: Path) -> None:
        """Check that the profile is of these checkpoints.

        Raises:
            ProfileError: It is of others.
        """
        check_identities(
            self.checkpoints, checkpoints, f"the quality profile {path}", "run 'qarr profile quality' again"
        )


def check_identities(
    measured: Mapping[TierName, str | None], served: Mapping[TierName, str | None], what: str, again: str
) -> None:
    """Check that what was measured is what is served.

    Args:
        measured: What tells each tier's weights from others', when it was measured.
        served: The same, now.
        what: Names the profile in the error.
        again: Says what to do, in the error.

    Raises:
        ProfileError: A tier serves something else.
    """
    for tier, identity in served.items():
        if measured.get(tier) != identity:
            raise ProfileError(
                f"{what} was measured on another checkpoint of {tier}: {_short(measured.get(tier))}, here is "
                f"{_short(identity)}; {again}"
            )


def profile_name(checkpoints: Mapping[TierName, str | None]) -> str:
    """Return the file name of the profile of these checkpoints."""
    digests = [checkpoints.get(tier) for tier in TierName]
    return f"quality-{hashlib.sha256(repr(digests).encode()).hexdigest()[:16]}.json"


def _short(digest: Any) -> str:
    return "unknown" if digest is None else str(digest)[:16]


def load_profile(path: Path) -> QualityProfile:
    """Read a profile.

    Raises:
        ProfileError: There is none, or it is not one.
    """
    try:
        return QualityProfile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ProfileError(f"the quality profile {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ProfileError(
            f"{path} is no quality profile of this release: {where}: {first['msg']}; run 'qarr profile quality' again"
        ) from None


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile by linear interpolation; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


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
