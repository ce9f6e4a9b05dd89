"""The values of a routing decision: the request, the policy's parameters, and what was decided."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003  pydantic reads it for the decision log
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol, Self

from pydantic import Field

from classifier import PromptClass, PromptFeatures
from classifier.kinds import Complexity
from router.policy.losses import CLASSES, NO_LOSS, ExpectedLoss, mixed
from tiers.prefix_memory import Prefix  # noqa: TC001
from tiers.quantization import quantizations_of
from tiers.spec import ReplicaState, TierName

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tiers.replica import Replica
    from tiers.spec import TierSpec

Bound = Literal["quality", "latency"]
Sort = Literal["price", "throughput", "latency"]
Degraded = Literal["quality", "latency", "unmeasured"]  # the last: nobody knows whether a bound is kept
CHOSEN = "chosen"
ALL_LOST = ExpectedLoss(1.0, 1.0, 1.0)  # of a tier that nothing is known of
SURE = 0.6  # confidence in a class from which a prompt counts as of that class alone


@dataclass(frozen=True, slots=True)
class PolicyParameters:
    """The policy's parameters: settings of the same names, and what is known of losses.

    Attributes:
        losses: By tier, class and complexity: published, and measured.
        max_loss: By class; a class without one has no bound of its own.
        loss_budget: Share of answers, 0..1, that may get worse, or the tier that may not be lost more than.
        adapters: By LoRA adapter, what ``losses`` is for the model itself; of any other adapter, under the empty name.
    """

    losses: Mapping[TierName, Mapping[PromptClass, Mapping[Complexity, ExpectedLoss]]] = field(default_factory=dict)
    max_loss: Mapping[PromptClass, float] = field(default_factory=dict)
    loss_budget: float | TierName = TierName.BALANCED
    negligible_loss: float = 0.005
    sla_confidence: float = 0.9
    give_up: Bound = "latency"
    max_slowdown: float = 4.0
    prices: Mapping[TierName, float] = field(default_factory=dict)
    adapters: Mapping[str, Mapping[TierName, Mapping[PromptClass, Mapping[Complexity, ExpectedLoss]]]] = field(
        default_factory=dict
    )
    like_mean: float = field(init=False)
    like_most: float = field(init=False)

    def __post_init__(self) -> None:
        """Look up what the tier that the budget names loses."""
        like = self.losses.get(self.loss_budget, {}) if isinstance(self.loss_budget, TierName) else {}
        means = [loss.mean for kind, each in like.items() if kind in CLASSES for loss in each.values()]
        object.__setattr__(self, "like_mean", fmean(means) if means else 0.0)
        object.__setattr__(self, "like_most", max(means, default=0.0))

    def with_adapter(self, adapter: str | None) -> PolicyParameters:
        """Return the parameters for an adapter's requests: what was measured of the model itself does not count."""
        if adapter is None:
            return self
        return replace(self, losses=self.adapters.get(adapter) or self.adapters.get("", self.losses))

    def loss(self, tier: TierName, features: PromptFeatures) -> ExpectedLoss:
        """Return the expected loss of a tier on a prompt; where the class is not sure, of all kinds that it may be."""
        of_tier = self.losses.get(tier)
        if of_tier is None:
            return NO_LOSS if tier is TierName.PRECISE else ALL_LOST
        complexity = features.complexity or Complexity.MODERATE
        loss = of_tier[features.prompt_class][complexity]
        if features.confidence >= SURE or features.prompt_class is PromptClass.UNKNOWN:
            return loss
        return mixed(loss, of_tier[PromptClass.UNKNOWN][complexity], features.confidence)

    def budget(self, tier: TierName) -> float:
        """Return the share of answers, 0..1, that may get worse on a tier where engine time is as scarce as can be.

        By comparison, the tier named may answer whatever it loses, and others what it loses on average.
        """
        if not isinstance(self.loss_budget, TierName):
            return self.loss_budget
        return self.like_most if tier is self.loss_budget else self.like_mean


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
        allowed: The tiers that the caller's key may use; None: all.
        sequences: Answers computed at the same time: prompts times choices.
        all_prompt_tokens: Of all prompts together; 0: there is one prompt.
        undraftable: Parameters that engines with a draft refuse, for people; empty: it has none.
        adapter: The LoRA adapter that it names; None: none.
        precisions: That may serve it, by OpenRouter's names; None: any.
        only: The tiers that may serve it, as the request says; None: all.
        sort: What the choice is to be made by, among tiers within the loss budget; None: by the policy's rule.
        truncated: What was cut of its prompt, for people; empty: nothing.
        over_budget: The key's budget is used up, so that only ``allowed`` is left of its tiers.
        prefix: Of its prompt, for prefix caches; None: not known. No part of what is decided from, nor of the log: what
            replicas hold of it is in the snapshot.
    """

    features: PromptFeatures
    prompt_tokens: int
    max_tokens: int
    hint: TierName | None = None
    require: bool = False
    sla: Sla = Sla()
    allowed: frozenset[TierName] | None = None
    sequences: int = 1
    all_prompt_tokens: int = 0
    undraftable: str = ""
    adapter: str | None = None
    precisions: frozenset[str] | None = None
    only: frozenset[TierName] | None = None
    sort: Sort | None = None
    truncated: str = ""
    over_budget: bool = False
    prefix: Annotated[Prefix | None, Field(exclude=True)] = field(default=None, compare=False, repr=False)

    def allows(self, tier: TierName) -> bool:
        """Tell whether the caller's key may use a tier."""
        return self.allowed is None or tier in self.allowed

    def takes(self, spec: TierSpec) -> bool:
        """Tell whether the request itself allows a tier, or a replica, by its precision and its name."""
        known = self.precisions is None or quantizations_of(spec.precision) <= self.precisions
        return known and (self.only is None or spec.name in self.only)

    def barred(self, replicas: Iterable[Replica]) -> list[str]:
        """Return the replicas that have a precision which the request does not allow, whatever their tier has."""
        return [] if self.precisions is None else [r.id for r in replicas if not self.takes(r.spec)]

    @property
    def tokens_to_read(self) -> int:
        return max(self.prompt_tokens, self.all_prompt_tokens)

    @property
    def tokens_in_all(self) -> int:
        """Return the tokens of all prompts, and of all answers at their longest."""
        return self.tokens_to_read + self.max_tokens * self.sequences


class Basis(StrEnum):
    """What a decision rests on, in one word; the reason has it in full."""

    HINT = "hint"
    SORT = "sort"
    LEAST_LOSS = "least_loss"
    NEGLIGIBLE = "negligible"
    BUDGET = "budget"
    DEGRADED_QUALITY = "degraded_quality"
    DEGRADED_LATENCY = "degraded_latency"
    DEGRADED_UNMEASURED = "degraded_unmeasured"
    REFUSED = "refused"


BY_CALLER = {Basis.HINT, Basis.SORT}  # the caller chose, not the policy


class Refusal(Enum):
    """Why no tier serves a request."""

    TOO_LONG = "too_long"
    NOT_READY = "not_ready"
    AT_CAPACITY = "at_capacity"
    SLA_UNMET = "sla_unmet"
    NOT_ALLOWED = "not_allowed"
    UNSUPPORTED = "unsupported"
    NO_ADAPTER = "no_adapter"
    EXCLUDED = "excluded"


@dataclass(frozen=True, slots=True)
class TierReport:
    """What the policy predicts of one tier for this request at the present load. None: not known yet.

    Attributes:
        cost: Engine-seconds, times the tier's price.
        verdict: ``chosen``, or why not.
        cached_prompt_tokens: Tokens of the prompt that the replica that would serve it is likely to have in its cache.
    """

    tier: TierName
    state: ReplicaState
    predicted_ttft_ms: float | None
    predicted_tpot_ms: float | None
    expected_loss: ExpectedLoss | None
    cost: float | None
    verdict: str
    cached_prompt_tokens: int | None = None


class Rate(NamedTuple):
    """Microseconds that one token takes of an engine: of a prompt, and of an answer."""

    prompt_us: float
    output_us: float


class Explanation(Protocol):
    """What a decision was made from: gives those of its attributes that are made when somebody reads them."""

    def precision(self) -> str | None:
        """Return ``Decision.precision``."""

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

    def rate(self, tier: TierName) -> Rate | None:
        """Return ``Decision.rate``."""


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
        precision: What that tier serves; see ``TierSpec``.
        reason: For a person; without any of the prompt's text.
        fallbacks: Tiers that could take over when the decision was made, in order; after a failure they are chosen anew.
        verdicts: One for each tier, by rising precision.
        degraded: What the request asks for or its class needs, and is not expected, or not known, to get.
        refusal: Why there is no tier; None where there is one.
        retry_after_s: Of a refusal: predicted seconds until it could be served; None: never, as far as is known.
    """

    tier: TierName | None
    precision: str | None
    reason: str
    query: Query
    fallbacks: tuple[TierName, ...]
    verdicts: tuple[TierReport, ...]
    basis: Basis
    degraded: tuple[Degraded, ...] = ()
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
        degraded: tuple[Degraded, ...] = (),
        refusal: Refusal | None = None,
    ) -> Self:
        """Return a decision whose other attributes an explanation gives when they are read."""
        made, fill = object.__new__(cls), object.__setattr__
        fill(made, "_explanation", explanation)
        fill(made, "query", query)
        fill(made, "basis", basis)
        fill(made, "tier", tier)
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

    def rate(self, tier: TierName) -> Rate | None:
        """Return the engine time that a token takes on a tier, as it was priced; None: not known."""
        return None if self._explanation is None else self._explanation.rate(tier)

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
