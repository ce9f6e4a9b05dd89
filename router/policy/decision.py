"""The values of a routing decision: the request, the policy's parameters, and what was decided."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

from msgspec import Struct

from classifier import PromptClass, PromptFeatures
from classifier.kinds import Complexity
from router.policy.losses import NO_LOSS, ExpectedLoss, mixed
from router.policy.published import CLASSES
from tiers.prefix_memory import Prefix
from tiers.quantization import quantizations_of
from tiers.spec import ReplicaStatus, TierName

if TYPE_CHECKING:
    from tiers.choice import Candidate, Expectation
    from tiers.spec import TierSpec
    from tiers.speed import SpeedModel

Bound = Literal["quality", "latency"]
Sort = Literal["price", "throughput", "latency"]
Objective = Literal["best", "cheapest"]
Degraded = Literal["quality", "latency", "unmeasured"]  # the last: nobody knows whether a bound is kept
ALL_LOST = ExpectedLoss(1.0, 1.0, 1.0)  # of a tier that nothing is known of
# A finish this much later than another is not noticed: a tenth, as people tell durations apart to about a tenth (Weber's
# law), and 50 ms, half of what is felt to be at once (Nielsen 1993, "Usability Engineering", chapter 5).
NOTICEABLE_SHARE = 0.1
NOTICEABLE_MS = 50.0
SURE = 0.6  # confidence in a class from which a prompt counts as of that class alone


@dataclass(frozen=True, slots=True)
class PolicyParameters:
    """The policy's parameters: settings of the same names, and what is known of losses."""

    # by tier, class and complexity: published, and measured
    losses: Mapping[TierName, Mapping[PromptClass, Mapping[Complexity, ExpectedLoss]]] = field(default_factory=dict)
    # by class; a class without one has no bound of its own
    max_loss: Mapping[PromptClass, float] = field(default_factory=dict)
    objective: Objective = "best"
    # share of answers, 0..1, that may get worse, or the tier that may not be lost more than
    loss_budget: float | TierName = TierName.BALANCED
    negligible_loss: float = 0.005
    sla_confidence: float = 0.9
    give_up: Bound = "latency"
    max_slowdown: float = 4.0
    prices: Mapping[TierName, float] = field(default_factory=dict)
    # by LoRA adapter, what ``losses`` is for the model itself; of any other adapter, under the empty name
    adapters: Mapping[str, Mapping[TierName, Mapping[PromptClass, Mapping[Complexity, ExpectedLoss]]]] = field(
        default_factory=dict
    )
    # of answers, 0..1, that may get worse where engine time is scarce: on the tier named in ``loss_budget``, and on others
    named_budget: float = field(init=False)
    other_budget: float = field(init=False)

    def __post_init__(self) -> None:
        """Look up what the tier that the budget names loses: it may lose its most, and others what it loses on average."""
        like = self.losses.get(self.loss_budget, {}) if isinstance(self.loss_budget, TierName) else {}
        # Small talk has nothing to lose: it must not dilute the mean of what can be lost.
        kinds = [kind for kind in CLASSES if kind is not PromptClass.SMALL_TALK]
        means = [loss.mean for kind in kinds if kind in like for loss in like[kind].values()]
        budget = (max(means, default=0.0), fmean(means) if means else 0.0)
        named, other = budget if isinstance(self.loss_budget, TierName) else (self.loss_budget, self.loss_budget)
        object.__setattr__(self, "named_budget", named)
        object.__setattr__(self, "other_budget", other)

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
        """Return the share of answers, 0..1, that may get worse on a tier where engine time is as scarce as can be."""
        return self.named_budget if tier is self.loss_budget else self.other_budget


class Sla(Struct, frozen=True):
    """The caller's bounds; None: no bound. Times in milliseconds, loss and confidence 0..1."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    max_quality_loss: float | None = None
    confidence: float | None = None  # probability with which the bounds are to be met; None: as the settings say


class Query(Struct, frozen=True):
    """One request as the policy sees it."""

    features: PromptFeatures
    prompt_tokens: int  # of the longest prompt, with system prompt and chat template
    max_tokens: int  # output tokens of each answer at most
    hint: TierName | None = None  # the tier asked for; None: any
    require: bool = False  # hint and SLA are conditions, not preferences
    sla: Sla = Sla()
    allowed: frozenset[TierName] | None = None  # the tiers that the caller's key may use; None: all
    sequences: int = 1  # answers computed at the same time: prompts times choices
    all_prompt_tokens: int = 0  # of all prompts together; 0: there is one prompt
    undraftable: str = ""  # parameters that engines with a draft refuse, for people; empty: it has none
    adapter: str | None = None  # the LoRA adapter that it names; None: none
    precisions: frozenset[str] | None = None  # that may serve it, by OpenRouter's names; None: any
    only: frozenset[TierName] | None = None  # the tiers that may serve it, as the request says; None: all
    # what the choice is to be made by, among tiers within the loss budget; None: by the policy's rule
    sort: Sort | None = None
    truncated: str = ""  # what was cut of its prompt, for people; empty: nothing
    over_budget: bool = False  # the key's budget is used up, so that only ``allowed`` is left of its tiers
    # of its prompt, for prefix caches; None: not known. No part of what is decided from, nor of the log: what
    # replicas hold of it is in the snapshot
    prefix: Prefix | None = None

    def allows(self, tier: TierName) -> bool:
        return self.allowed is None or tier in self.allowed

    def takes(self, spec: TierSpec) -> bool:
        """Tell whether the request itself allows a tier, or a replica, by its precision and its name."""
        known = self.precisions is None or quantizations_of(spec.precision) <= self.precisions
        return known and (self.only is None or spec.name in self.only)

    @property
    def tokens_to_read(self) -> int:
        return max(self.prompt_tokens, self.all_prompt_tokens)

    @property
    def tokens_in_all(self) -> int:
        return self.tokens_to_read + self.max_tokens * self.sequences


class Basis(StrEnum):
    """What a decision rests on, in one word; the reason has it in full."""

    HINT = "hint"
    SORT = "sort"
    LEAST_LOSS = "least_loss"
    NEGLIGIBLE = "negligible"
    BUDGET = "budget"
    SMALL_TALK = "small_talk"
    DEGRADED_QUALITY = "degraded_quality"
    DEGRADED_LATENCY = "degraded_latency"
    DEGRADED_UNMEASURED = "degraded_unmeasured"
    REFUSED = "refused"


BY_CALLER = {Basis.HINT, Basis.SORT}  # the caller chose, not the policy


class Refusal(Enum):
    TOO_LONG = "too_long"
    NOT_READY = "not_ready"
    AT_CAPACITY = "at_capacity"
    SLA_UNMET = "sla_unmet"
    NOT_ALLOWED = "not_allowed"
    UNSUPPORTED = "unsupported"
    NO_ADAPTER = "no_adapter"
    EXCLUDED = "excluded"


# Refusals that no load and no engine causes: the request, or its key, would have to be another.
CALLERS_OWN = {Refusal.TOO_LONG, Refusal.NOT_ALLOWED, Refusal.UNSUPPORTED, Refusal.NO_ADAPTER, Refusal.EXCLUDED}
TIER_ABSENT = "tier_absent"
SLA_IMPOSSIBLE = "sla_impossible"


class Rate(NamedTuple):
    """Microseconds that one token takes of an engine: of a prompt, and of an answer."""

    prompt_us: float
    output_us: float


class Estimate(Struct, frozen=True):
    """What the policy expects of one tier for a request at the present load. None: not known."""

    tier: TierName
    precision: str  # what the tier serves; see ``TierSpec``
    state: ReplicaStatus
    speed: SpeedModel | None  # of the replica that would serve the request, or of the first ready one
    batch: int  # sequences that this replica is expected to compute at once
    times: Expectation | None
    loss: ExpectedLoss
    worst: float  # upper bound of the loss at the confidence asked for
    allowed: float  # share of answers, 0..1, that may get worse on it now
    cost: float | None  # engine-seconds, times the tier's price
    excess: float  # largest ratio of a predicted time to its bound; infinite where a time is not known
    obstacle: Refusal | None  # why the tier cannot serve now; None: it can
    obstacle_text: str  # the same, for a person
    slow: bool  # it breaks a bound on time, or may, for its times are not known; likewise ``lossy`` on loss
    lossy: bool
    unfit: bool  # it loses more than the budget or the class's bound allows, or is below the hint
    cached: int | None  # prompt tokens that need no prefill on the replica that would serve it
    meets: bool  # it can serve the request within the bounds asked for
    found: Candidate | None = None  # the replica that would serve it, or the first ready one; None: not known
    finish_ms: float | None = None  # when the caller should have the whole answer; None: the speed is not known

    @property
    def under_load(self) -> bool:
        return self.speed is not None and self.speed.under_load

    @property
    def finishes_in_ms(self) -> float:
        """Return when the whole answer should be there; infinite where the speed is not known."""
        return math.inf if self.finish_ms is None else self.finish_ms

    @property
    def predicted_ttft_ms(self) -> float | None:
        return None if self.times is None else round(self.times.ttft_ms, 1)

    @property
    def predicted_tpot_ms(self) -> float | None:
        return None if self.times is None else round(self.times.tpot_ms, 2)

    @property
    def rounded_cost(self) -> float | None:
        return None if self.cost is None else round(self.cost, 4)

    def order(self, sort: Sort = "price") -> float:
        """Return what tiers are ordered by, least first; infinite where it is not known."""
        if sort == "price":
            return math.inf if self.cost is None else self.cost
        if self.times is None:
            return math.inf
        return self.times.ttft_ms if sort == "latency" else self.times.tpot_ms

    @property
    def rate(self) -> Rate | None:
        """Return the engine time that a token takes, as ``cost`` has it, without its price."""
        if self.speed is None:
            return None
        drift = 1000 * (1.0 if self.times is None else self.times.drift)
        return Rate(self.speed.engine_ms(1, 0, self.batch) * drift, self.speed.engine_ms(0, 1, self.batch) * drift)


def is_noticeably_later(finish_ms: float, soonest_ms: float) -> bool:
    """Return whether a person would notice that an answer finishes later than another."""
    return finish_ms > latest_unnoticed_ms(soonest_ms)


def latest_unnoticed_ms(soonest_ms: float) -> float:
    """Return the latest finish that a person does not tell from the soonest."""
    return soonest_ms + max(soonest_ms * NOTICEABLE_SHARE, NOTICEABLE_MS)


class Choice(Struct, frozen=True):
    """A choice between tiers, and all that it was made from."""

    query: Query
    table: PolicyParameters
    z: float  # the confidence asked for, as a quantile of the normal distribution
    scarcity: float  # of engine time, 0..1
    estimates: tuple[Estimate, ...]  # one for each tier, by rising precision
    chosen: Estimate | None = None  # None: the request is refused
    basis: Basis = Basis.REFUSED
    given_up: tuple[Degraded, ...] = ()  # bounds that no tier meets
    # share of answers, 0..1, that the request lets get worse, else its class; None: there is no bound
    bound: float | None = None

    @property
    def asked(self) -> list[Estimate]:
        if self.query.hint is None or not self.query.require:
            return list(self.estimates)
        return [each for each in self.estimates if each.tier is self.query.hint]

    def rank(self, tier: TierName | None) -> int:
        return next((place for place, each in enumerate(self.estimates) if each.tier is tier), -1)


class Decision(Struct, frozen=True):
    """Where a request goes and why. Plain data: ``router.policy.explain`` has further words for it."""

    tier: TierName | None  # the tier that is to serve it; None: refused
    reason: str  # for a person; without any of the prompt's text
    query: Query
    choice: Choice  # what it was made from
    basis: Basis
    # what the request asks for or its class needs, and is not expected, or not known, to get
    degraded: tuple[Degraded, ...] = ()
    refusal: Refusal | None = None  # why there is no tier; None where there is one
    # of a refusal: predicted seconds until it could be served; None: never, as far as is known
    retry_after_s: float | None = None
    longest: int = 0  # of a request too long for every tier that it asks for: tokens that the longest of them takes
    are_times_impossible: bool = False  # whether it is served though no tier meets its bounds on times at any load

    def estimate(self, tier: TierName) -> Estimate:
        """Return what was expected of one tier; ``KeyError``: the fleet had no such tier."""
        for each in self.choice.estimates:
            if each.tier is tier:
                return each
        raise KeyError(tier)

    def rate(self, tier: TierName) -> Rate | None:
        """Return the engine time that a token takes on a tier, as it was priced; None: not known."""
        return next((each.rate for each in self.choice.estimates if each.tier is tier), None)

    @property
    def requires_absent_tier(self) -> bool:
        """Tell whether the request was refused because it requires a tier that this router does not serve."""
        is_named = self.query.require and self.query.hint is not None
        absent = [each.state is ReplicaStatus.ABSENT for each in self.choice.asked]
        return self.refusal is Refusal.NOT_READY and is_named and all(absent)

    @property
    def requires_impossible_bounds(self) -> bool:
        """Tell whether the request was refused because it requires bounds that no tier meets at any load."""
        return self.refusal is Refusal.SLA_UNMET and self.retry_after_s is None

    @property
    def refusal_code(self) -> str | None:
        """Return why there is no tier, as metrics and records name it; None where there is one."""
        if self.refusal is None:
            return None
        if self.requires_absent_tier:
            return TIER_ABSENT
        return SLA_IMPOSSIBLE if self.requires_impossible_bounds else self.refusal.value

    @property
    def is_callers_mistake(self) -> bool:
        """Tell whether the request was refused for what it is, so that asking again does not help."""
        return self.refusal in CALLERS_OWN or self.requires_absent_tier or self.requires_impossible_bounds

    @property
    def chosen(self) -> Estimate | None:
        return next((each for each in self.choice.estimates if each.tier is self.tier), None)

    @property
    def precision(self) -> str | None:
        return self.chosen.precision if self.chosen is not None else None


class RequestRefusedError(Exception):
    def __init__(self, decision: Decision) -> None:
        super().__init__(decision.reason)
        self.decision = decision


Priority = Literal["interactive", "standard", "batch"]

# Highest first; the values are vLLM's priorities: lower ones are scheduled first.
PRIORITIES: dict[Priority, int] = {"interactive": -1, "standard": 0, "batch": 1}
