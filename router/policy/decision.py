"""The values of a routing decision: the request, the policy's parameters, and what was decided."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003  pydantic reads it for the decision log
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from classifier import PromptClass, PromptFeatures  # noqa: TC001  pydantic reads these for the decision log
from tiers.spec import PRECISIONS, Precision, ReplicaState, TierName

Bound = Literal["quality", "latency"]
CHOSEN = "chosen"
_INTERVAL_Z = NormalDist().inv_cdf(0.975)  # half the width of a 95 % interval, in standard deviations


@dataclass(frozen=True, slots=True)
class ExpectedLoss:
    """Share of tokens, 0..1, that are not the highest precision's first choice: estimate and 95 % interval."""

    mean: float
    low: float
    high: float

    def at(self, z: float) -> float:
        """Return the upper bound of the loss at a one-sided confidence, given as a quantile of the normal distribution."""
        return min(self.mean + (self.high - self.mean) * z / _INTERVAL_Z, 1.0)


NO_LOSS = ExpectedLoss(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class PolicyParameters:
    """The policy's parameters: settings of the same names, and what was measured.

    Attributes:
        losses: By tier and class, from the quality profile; empty: not measured.
        promoted: Classes that lose more than they may in live answers, with the lowest tier that they get until they do not.
    """

    class_floor: Mapping[PromptClass, TierName]
    max_loss: Mapping[PromptClass, float]
    min_confidence: float = 0.6
    sla_confidence: float = 0.9
    give_up: Bound = "latency"
    max_slowdown: float = 4.0
    prices: Mapping[TierName, float] = field(default_factory=dict)
    losses: Mapping[TierName, Mapping[PromptClass, ExpectedLoss]] = field(default_factory=dict)
    promoted: Mapping[PromptClass, TierName] = field(default_factory=dict)

    def loss(self, tier: TierName, features: PromptFeatures) -> ExpectedLoss | None:
        """Return the measured loss of a tier on a prompt; of an uncertain class, the worst class's. None: not measured."""
        if tier is TierName.PRECISE:
            return NO_LOSS
        measured = self.losses.get(tier)
        if not measured:
            return None
        if features.confidence >= self.min_confidence:
            return measured.get(features.prompt_class)
        return max(measured.values(), key=lambda loss: loss.high)


@dataclass(frozen=True, slots=True)
class Sla:
    """The caller's bounds; None: no bound. Times in milliseconds, loss and confidence 0..1.

    Attributes:
        confidence: Probability with which the bounds are to be met; None: as the settings say.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    max_quality_loss: float | None = None
    confidence: float | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """One request as the policy sees it.

    Attributes:
        prompt_tokens: Of the longest prompt, with system prompt and chat template.
        max_tokens: Output tokens of each answer at most.
        hint: The tier asked for; None: any.
        require: Hint and SLA are conditions, not preferences.
        allowed: The tiers that the caller's key may use.
        sequences: Answers computed at the same time: prompts times choices.
        all_prompt_tokens: Of all prompts together; 0: there is one prompt.
    """

    features: PromptFeatures
    prompt_tokens: int
    max_tokens: int
    hint: TierName | None = None
    require: bool = False
    sla: Sla = Sla()
    allowed: frozenset[TierName] = frozenset(TierName)
    sequences: int = 1
    all_prompt_tokens: int = 0

    @property
    def tokens_to_read(self) -> int:
        """Return the tokens of all prompts together."""
        return max(self.prompt_tokens, self.all_prompt_tokens)

    @property
    def tokens_in_all(self) -> int:
        """Return the tokens of all prompts, and of all answers at their longest."""
        return self.tokens_to_read + self.max_tokens * self.sequences


class Basis(StrEnum):
    """What a decision rests on, in one word; the reason has it in full."""

    HINT = "hint"
    MEASURED = "measured"
    TABLE = "table"
    DEGRADED_QUALITY = "degraded_quality"
    DEGRADED_LATENCY = "degraded_latency"
    REFUSED = "refused"


class Refusal(Enum):
    """Why no tier serves a request."""

    TOO_LONG = "too_long"
    NOT_READY = "not_ready"
    AT_CAPACITY = "at_capacity"
    SLA_UNMET = "sla_unmet"
    NOT_ALLOWED = "not_allowed"


@dataclass(frozen=True, slots=True)
class TierReport:
    """What the policy predicts of one tier for this request at the present load. None: not known yet.

    Attributes:
        cost: Engine-seconds, times the tier's price.
        verdict: ``chosen``, or why not.
        meets: It can serve the request within the bounds asked for.
    """

    tier: TierName
    state: ReplicaState
    predicted_ttft_ms: float | None
    predicted_tpot_ms: float | None
    expected_loss: ExpectedLoss | None
    cost: float | None
    verdict: str
    meets: bool = False


class Explanation(Protocol):
    """What a decision was made from: gives those of its attributes that are made when somebody reads them."""

    def reason(self) -> str:
        """Return ``Decision.reason``."""

    def fallbacks(self) -> tuple[TierName, ...]:
        """Return ``Decision.fallbacks``."""

    def verdicts(self) -> tuple[TierReport, ...]:
        """Return ``Decision.verdicts``."""

    def retry_after_s(self) -> float | None:
        """Return ``Decision.retry_after_s``."""

    def verdict(self, tier: TierName) -> TierReport:
        """Return the report on one tier.

        Raises:
            KeyError: The fleet has no such tier.
        """


class _Explained:
    """A value with attributes that are made, once, when they are first read: a request needs few of them."""

    __slots__ = ("_explanation",)
    _explanation: Explanation | None

    if not TYPE_CHECKING:  # a type checker would allow any name

        def __getattr__(self, name: str) -> Any:  # of slots that are not filled
            if name == "_explanation":
                return None
            if self._explanation is None or name not in self.__slots__:
                raise AttributeError(name)
            made = getattr(self._explanation, name)()
            object.__setattr__(self, name, made)
            return made


@dataclass(frozen=True, slots=True)
class Decision(_Explained):
    """Where a request goes and why. Made once, then only reported.

    Attributes:
        tier: The tier that is to serve it; None: refused.
        reason: For a person; without any of the prompt's text.
        fallbacks: Tiers that could take over when the decision was made, in order; after a failure they are chosen anew.
        verdicts: One for each tier, by rising precision.
        degraded: What the request asks for or its class needs, and is not expected to get.
        refusal: Why there is no tier; None where there is one.
        retry_after_s: Of a refusal: predicted seconds until it could be served; None: never, as far as is known.
    """

    tier: TierName | None
    precision: Precision | None
    reason: str
    query: Query
    fallbacks: tuple[TierName, ...]
    verdicts: tuple[TierReport, ...]
    basis: Basis
    degraded: tuple[Bound, ...] = ()
    refusal: Refusal | None = None
    retry_after_s: float | None = None

    @classmethod
    def explained(
        cls,
        explanation: Explanation,
        query: Query,
        basis: Basis,
        tier: TierName | None,
        *,
        degraded: tuple[Bound, ...] = (),
        refusal: Refusal | None = None,
    ) -> Self:
        """Return a decision whose other attributes an explanation gives when they are read."""
        made, fill = object.__new__(cls), object.__setattr__
        fill(made, "_explanation", explanation)
        fill(made, "query", query)
        fill(made, "basis", basis)
        fill(made, "tier", tier)
        fill(made, "precision", None if tier is None else PRECISIONS[tier])
        fill(made, "degraded", degraded)
        fill(made, "refusal", refusal)
        if refusal is None:
            fill(made, "retry_after_s", None)
        return made

    def verdict(self, tier: TierName) -> TierReport:
        """Return the report on one tier.

        Raises:
            KeyError: The fleet has no such tier.
        """
        if self._explanation is not None:
            return self._explanation.verdict(tier)
        for verdict in self.verdicts:
            if verdict.tier is tier:
                return verdict
        raise KeyError(tier)

    @property
    def chosen(self) -> TierReport | None:
        """Return the report on the tier that is to serve the request, or None."""
        return None if self.tier is None else self.verdict(self.tier)


class Refused(Exception):
    """The policy found no tier."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(decision.reason)
        self.decision = decision


Priority = Literal["interactive", "standard", "batch"]

# Highest first; the values are vLLM's priorities: lower ones are scheduled first.
PRIORITIES: dict[Priority, int] = {"interactive": -1, "standard": 0, "batch": 1}
