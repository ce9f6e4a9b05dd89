"""Profiles: what was measured of each tier, as values and files."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from classifier import PromptClass
from classifier.kinds import Complexity
from tiers.spec import STANDARD_TIERS, TierName, in_order
from tiers.speed import SpeedModel
from tiers.verification.thinking import ThinkingMode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Self


class ProfileError(Exception):
    """A profile or decision log cannot be made or used; says why and what to do."""


REFERENCE = TierName.PRECISE

TOP_K = 10  # logprobs a token; vLLM's own maximum is 20 by default

# Live requests scatter by this much in log(seen / predicted), even where the fit is perfect.
MIN_SPREAD = 0.05


class Frozen(BaseModel):
    """An immutable value that accepts no unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Diagnosis(Frozen):
    """How far a tier's tokens are from the reference's: tells how much changes, not whether answers get worse.

    Attributes:
        tokens: Number of scored tokens.
        disagreement: Share of the tokens, 0..1, that are not the reference's first choice.
        kl: Mean divergence of the next-token distributions, in nats.
        regret: Mean log-probability, in nats a token, that the reference gives up against its own first choice.
    """

    tokens: int
    disagreement: float
    kl: float
    regret: float


class Flips(NamedTuple):
    """Answers to the same tasks: those that at least one precision gets right, and of these those worse and better."""

    answers: int
    worse: int
    better: int


class AnswerCount(Frozen):
    """How many answers to tasks of one kind are right, of the reference and of a tier to the same tasks.

    Attributes:
        asked: Tasks that the reference answered.
        right: Tasks of these that the reference got right.
        answered: Tasks that both answered.
        worse: Tasks of these that the reference got right and the tier wrong.
        better: Tasks of these that the tier got right and the reference wrong.
        both: Tasks of these that both got right.
        diagnosis: None: the answers were not scored.
        cut: Tasks in which the tier's or the reference's answer was cut while the model was thinking. They are neither right
            nor wrong, and none of the other numbers counts them.
    """

    prompt_class: PromptClass
    complexity: Complexity
    tier: TierName
    asked: int = Field(ge=0)
    right: int = Field(ge=0)
    answered: int = Field(ge=0)
    worse: int = Field(ge=0)
    better: int = Field(ge=0)
    both: int = Field(ge=0)
    diagnosis: Diagnosis | None = None
    cut: int = Field(default=0, ge=0)

    @property
    def is_unmeasured(self) -> bool:
        """Tell whether cut answers have kept the kind from being measured at all."""
        return self.cut > 0 and self.answered == 0

    @property
    def flips(self) -> Flips:
        """Return the answers that count: tasks that neither gets right tell nothing."""
        return Flips(self.both + self.worse + self.better, self.worse, self.better)


class _Profile(Frozen):
    """What was measured of one model's tiers."""

    kind: ClassVar[str]
    version: int
    created: AwareDatetime
    model: str
    # The digest of each tier's weights. It is None for engines given by URL, whose checkpoint is not known.
    checkpoints: dict[TierName, str | None]

    def _check_checkpoints(
        self, served: Mapping[TierName, str | None], path: Path
    ) -> None:
        for tier, digest in served.items():
            measured_digest = self.checkpoints.get(tier)
            if measured_digest != digest:
                raise ProfileError(
                    f"the {self.kind} profile {path} was measured on another checkpoint of {tier}: "
                    f"{_short(measured_digest)}, here is {_short(digest)}; run 'qarr profile {self.kind}' again"
                )


def _short(digest: str | None) -> str:
    return "unknown" if digest is None else digest[:16]


class ModeCounts(Frozen):
    """How many answers of each kind get worse on each tier in one mode of thinking.

    Attributes:
        mode: Whether requests asked the model to think.
        think_tokens: Tokens that thoughts could have, if the context had room for them.
        counts: As in ``QualityProfile``.
    """

    mode: ThinkingMode
    think_tokens: int
    counts: tuple[AnswerCount, ...]


class QualityProfile(_Profile):
    """How many answers of each kind get worse on each tier."""

    kind = "quality"
    version: Literal[3] = 3
    tasks: str  # what they were measured with, for people
    # nothing is left to measure; else the router goes on when it is idle
    whole: bool = True
    counts: tuple[AnswerCount, ...]
    # the LoRA adapter that answered on every tier; None: the model itself
    adapter: str | None = None
    # Whether the model thought before these answers, as it does unless a request says otherwise. None: it cannot think.
    mode: ThinkingMode | None = None
    # tokens that thoughts could have, if the context had room for them
    think_tokens: int = 0
    # The same of the mode that requests have to ask for, if they can switch thinking. Decisions go by ``counts``, because
    # they do not know the mode of a request. None: there is no such mode, or it was not measured.
    other_mode: ModeCounts | None = None

    def of(self, tier: TierName) -> tuple[AnswerCount, ...]:
        return tuple(count for count in self.counts if count.tier is tier)

    def check(self, checkpoints: Mapping[TierName, str | None], path: Path) -> Self:
        """Return the profile if it is of these checkpoints; ``ProfileError``: it is of others."""
        self._check_checkpoints(checkpoints, path)
        return self


def profile_name(
    checkpoints: Mapping[TierName, str | None], adapter: str | None = None
) -> str:
    digests = _digests(checkpoints)
    if adapter is not None:
        digests.append(f"adapter {adapter}")
    return f"quality-{hashlib.sha256(repr(digests).encode()).hexdigest()[:16]}.json"


def _digests(checkpoints: Mapping[TierName, str | None]) -> list[str | None]:
    """Return the digests of what is served, in a fixed order; those of added tiers with their names."""
    standard_digests = [checkpoints.get(tier) for tier in STANDARD_TIERS]
    added_digests = [
        f"{tier} {checkpoints[tier]}"
        for tier in in_order(checkpoints)
        if tier not in STANDARD_TIERS
    ]
    return [*standard_digests, *added_digests]


_P = TypeVar("_P", bound=_Profile)


def load_profile(path: Path) -> QualityProfile:
    """Read a quality profile; ``ProfileError``: the file cannot be read, or is no quality profile."""
    return _load(QualityProfile, path)


def _load(profile: type[_P], path: Path) -> _P:
    kind = profile.kind
    try:
        return profile.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ProfileError(
            f"the {kind} profile {path} cannot be read: {error.strerror}"
        ) from error
    except ValidationError as error:
        raise ProfileError(
            f"{path} is no {kind} profile of this release: {first_fault(error)}; run 'qarr profile {kind}' again"
        ) from None


def first_fault(error: ValidationError) -> str:
    """Return the first fault that pydantic found, with the field that has it."""
    fault = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(map(str, fault["loc"]))
    message = str(fault["msg"])
    return f"{field}: {message}" if field else message


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile (``share`` 0..1) by linear interpolation; 0 of no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


class SpeedSample(Frozen):
    """One timed request, and its tier's load when it was sent. Times in milliseconds."""

    tier: TierName
    prompt_tokens: int
    sequences: int  # requests that the tier already had
    waiting_tokens: int  # their prompt tokens that were not computed yet
    # sequences decoded together with it, itself included; 0: it was not decoded
    batch: int
    # share of the other tiers that were computing too, 0..1
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
        figures = self.model_dump(
            exclude={"tier", "ttft_error", "tpot_error", "samples"}
        )
        figures["ttft_spread"] = max(self.ttft_spread, MIN_SPREAD)
        figures["tpot_spread"] = max(self.tpot_spread, MIN_SPREAD)
        return SpeedModel(**figures, profiled=True)


class LatencyProfile(_Profile):
    """The measured speed of every tier on one machine, and the samples that it was fitted to."""

    kind = "latency"
    version: Literal[1] = 1
    machine: str
    fits: tuple[Fit, ...]
    samples: tuple[SpeedSample, ...]

    def with_others(self, earlier: LatencyProfile) -> LatencyProfile:
        """Return the profile with an earlier one's measurements of the tiers that it leaves out."""
        own_tiers = {fit.tier for fit in self.fits}
        earlier_fits = [fit for fit in earlier.fits if fit.tier not in own_tiers]
        earlier_samples = [
            sample for sample in earlier.samples if sample.tier not in own_tiers
        ]
        return self.model_copy(
            update={
                "fits": (*self.fits, *earlier_fits),
                "samples": (*self.samples, *earlier_samples),
            }
        )

    def check(
        self, checkpoints: Mapping[TierName, str | None], machine: str, path: Path
    ) -> Self:
        """Return the profile if it is of these checkpoints on this machine; ``ProfileError``: it is of others."""
        self._check_checkpoints(checkpoints, path)
        if self.machine != machine:
            raise ProfileError(
                f"the latency profile {path} was measured on {self.machine}, this is {machine}; "
                "run 'qarr profile latency' again"
            )
        return self


def latency_name(checkpoints: Mapping[TierName, str | None], machine: str) -> str:
    parts = (_digests(checkpoints), machine)
    return f"latency-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}.json"


def load_latency(path: Path) -> LatencyProfile:
    """Read a latency profile; ``ProfileError``: the file cannot be read, or is no latency profile."""
    return _load(LatencyProfile, path)
