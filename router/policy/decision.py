"""The values of a routing decision: the request, the policy's parameters, and what was decided."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003  pydantic reads it for the decision log
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol, Self

from pydantic import Field

from classifier import PromptClass, PromptFeatures  # noqa: TC001  pydantic reads these for the decision log
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


class Priced(NamedTuple):
    """A tier that a request may take, as the price of loss weighs it.

    Attributes:
        cost: Engine-seconds an output token, times the tier's price.
        loss: Expected share of tokens, 0..1, that differ from the highest precision's.
    """

    tier: TierName
    cost: float
    loss: float


@dataclass(frozen=True, slots=True)
class PolicyParameters:
    """The policy's parameters: settings of the same names, and what was measured.

    Attributes:
        max_loss: By class; a class without one has no bound of its own.
        loss_budget: Mean loss, 0..1, or the tier that may not be lost more than.
        losses: By tier and class, from the quality profile; empty: not measured.
        promoted: Classes that lose more than they may in live answers, with the lowest tier that they get until they do not.
        adapters: By LoRA adapter, what ``losses`` is for the model itself.
    """

    class_floor: Mapping[PromptClass, TierName]
    max_loss: Mapping[PromptClass, float] = field(default_factory=dict)
    loss_budget: float | TierName = TierName.BALANCED
    min_confidence: float = 0.6
    sla_confidence: float = 0.9
    give_up: Bound = "latency"
    max_slowdown: float = 4.0
    prices: Mapping[TierName, float] = field(default_factory=dict)
    losses: Mapping[TierName, Mapping[PromptClass, ExpectedLoss]] = field(default_factory=dict)
    promoted: Mapping[PromptClass, TierName] = field(default_factory=dict)
    adapters: Mapping[str, Mapping[TierName, Mapping[PromptClass, ExpectedLoss]]] = field(default_factory=dict)

    def with_adapter(self, adapter: str | None) -> PolicyParameters:
        """Return the parameters for an adapter's requests: nothing that was measured of the model itself counts."""
        if adapter is None:
            return self
        return replace(self, losses=self.adapters.get(adapter, {}), promoted={})

    def loss(self, tier: TierName, features: PromptFeatures) -> ExpectedLoss | None:
        """Return the expected loss of a tier on a prompt; of an uncertain or unmeasured class, the worst class's.

        None: not measured.
        """
        if tier is TierName.PRECISE:
            return NO_LOSS
        measured = self.losses.get(tier)
        if not measured:
            return None
        if features.confidence >= self.min_confidence and (mean := measured.get(features.prompt_class)) is not None:
            return mean
        return max(measured.values(), key=lambda loss: loss.high)

    def allowed(self, features: PromptFeatures) -> float | None:
        """Return the share of a prompt's tokens, 0..1, that the budget allows to differ; None: not measured."""
        budget = self.loss_budget
        if not isinstance(budget, TierName):
            return budget
        loss = self.loss(budget, features)
        return None if loss is None else loss.mean


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
        sort: What the choice is to be made by, among tiers that meet the class's needs; None: by the price of loss.
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
        """Return the tokens of all prompts together."""
        return max(self.prompt_tokens, self.all_prompt_tokens)

    @property
    def tokens_in_all(self) -> int:
        """Return the tokens of all prompts, and of all answers at their longest."""
        return self.tokens_to_read + self.max_tokens * self.sequences


class Basis(StrEnum):
    """What a decision rests on, in one word; the reason has it in full."""

    HINT = "hint"
    SORT = "sort"
    BUDGET = "budget"
    MEASURED = "measured"
    TABLE = "table"
    DEGRADED_QUALITY = "degraded_quality"
    DEGRADED_LATENCY = "degraded_latency"
    DEGRADED_UNMEASURED = "degraded_unmeasured"
    REFUSED = "refused"


BY_CALLER = {Basis.HINT, Basis.SORT}  # the caller chose, not the loss budget


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
        priced: The tiers that the price of loss chose from; empty: it did not choose.
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
    priced: tuple[Priced, ...] = ()

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
        priced: tuple[Priced, ...] = (),
    ) -> Self:
        """Return a decision whose other attributes an explanation gives when they are read."""
        made, fill = object.__new__(cls), object.__setattr__
        fill(made, "_explanation", explanation)
        fill(made, "query", query)
        fill(made, "basis", basis)
        fill(made, "tier", tier)
        fill(made, "degraded", degraded)
        fill(made, "refusal", refusal)
        fill(made, "priced", priced)
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
