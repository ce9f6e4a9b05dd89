"""The values of a routing decision: the request, the policy's parameters, and what was decided."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple, assert_never

from msgspec import Struct

from classifier import PromptClass, PromptFeatures
from classifier.kinds import Complexity
from router.policy.losses import NO_LOSS, ExpectedLoss, mixed
from router.policy.published import CLASSES
from tiers.formats import quantizations_of
from tiers.prefix_memory import Prefix
from tiers.spec import ReplicaStatus, TierName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiers.choice import Candidate, CorrectedTimes
    from tiers.spec import TierSpec
    from tiers.speed import SpeedModel

Bound = Literal["quality", "latency"]
Sort = Literal["price", "throughput", "latency"]
Objective = Literal["best", "cheapest"]
# the last: nobody knows whether a bound is kept
Degraded = Literal["quality", "latency", "unmeasured"]
ALL_LOST = ExpectedLoss(1.0, 1.0, 1.0)  # nothing is known of the tier
# A finish this much later than another is not noticed: a tenth, as people tell durations apart to about a tenth (Weber's
# law), and 50 ms, half of what is felt to be at once (Nielsen 1993, "Usability Engineering", chapter 5).
NOTICEABLE_SHARE = 0.1
NOTICEABLE_MS = 50.0
SURE_CONFIDENCE = (
    0.6  # confidence in a class from which a prompt counts as of that class alone
)


@dataclass(frozen=True, slots=True)
class PolicyParameters:
    """The policy's parameters: settings of the same names, and what is known of losses.

    Attributes:
        losses: By tier, class and complexity: published, and measured.
        max_loss: By class; a class without one has no bound of its own.
        loss_budget: Share of answers, 0..1, that may get worse, or the tier that no tier may lose more than.
        adapters: By LoRA adapter, what ``losses`` is for the model itself. The empty name is for any other adapter.
        named_budget: Share of answers, 0..1, that may get worse where engine time is scarce, on the tier named in
            ``loss_budget``.
        other_budget: The same share on other tiers.
    """

    losses: Mapping[
        TierName, Mapping[PromptClass, Mapping[Complexity, ExpectedLoss]]
    ] = field(default_factory=dict)
    max_loss: Mapping[PromptClass, float] = field(default_factory=dict)
    objective: Objective = "best"
    loss_budget: float | TierName = TierName.BALANCED
    negligible_loss: float = 0.005
    sla_confidence: float = 0.9
    give_up: Bound = "latency"
    max_slowdown: float = 4.0
    prices: Mapping[TierName, float] = field(default_factory=dict)
    adapters: Mapping[
        str, Mapping[TierName, Mapping[PromptClass, Mapping[Complexity, ExpectedLoss]]]
    ] = field(default_factory=dict)
    named_budget: float = field(init=False)
    other_budget: float = field(init=False)

    def __post_init__(self) -> None:
        """Look up what the tier that the budget names loses: it may lose its most, and others what it loses on average."""
        if isinstance(self.loss_budget, TierName):
            means = self._mean_losses(self.loss_budget)
            named_budget = max(means, default=0.0)
            other_budget = fmean(means) if means else 0.0
        else:
            named_budget = self.loss_budget
            other_budget = self.loss_budget
        object.__setattr__(self, "named_budget", named_budget)
        object.__setattr__(self, "other_budget", other_budget)

    def _mean_losses(self, tier: TierName) -> list[float]:
        """Return what a tier is expected to lose on each kind of prompt on which something can be lost."""
        losses_by_class = self.losses.get(tier, {})
        means: list[float] = []
        for prompt_class in CLASSES:
            # Small talk has nothing to lose: it must not dilute the mean of what can be lost.
            if (
                prompt_class is not PromptClass.SMALL_TALK
                and prompt_class in losses_by_class
            ):
                means += [loss.mean for loss in losses_by_class[prompt_class].values()]
        return means

    def with_adapter(self, adapter: str | None) -> PolicyParameters:
        """Return the parameters for an adapter's requests: what was measured of the model itself does not count."""
        if adapter is None:
            return self
        return replace(
            self,
            losses=self.adapters.get(adapter) or self.adapters.get("", self.losses),
        )

    def loss(self, tier: TierName, features: PromptFeatures) -> ExpectedLoss:
        """Return the expected loss of a tier on a prompt; where the class is not sure, of all kinds that it may be."""
        losses_by_class = self.losses.get(tier)
        if losses_by_class is None:
            return NO_LOSS if tier is TierName.PRECISE else ALL_LOST
        complexity = features.complexity or Complexity.MODERATE
        loss = losses_by_class[features.prompt_class][complexity]
        if (
            features.confidence >= SURE_CONFIDENCE
            or features.prompt_class is PromptClass.UNKNOWN
        ):
            return loss
        return mixed(
            loss,
            losses_by_class[PromptClass.UNKNOWN][complexity],
            share=features.confidence,
        )

    def budget(self, tier: TierName) -> float:
        """Return the share of answers, 0..1, that may get worse on a tier where engine time is as scarce as can be."""
        return self.named_budget if tier is self.loss_budget else self.other_budget


class Sla(Struct, frozen=True):
    """The caller's bounds; None: no bound. Times in milliseconds, loss and confidence 0..1."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    max_quality_loss: float | None = None
    # probability with which the bounds are to be met; None: as the settings say
    confidence: float | None = None


class RoutingQuery(Struct, frozen=True):
    """One request as the policy sees it.

    Attributes:
        prompt_tokens: Of the longest prompt, with system prompt and chat template.
        max_tokens: Largest number of output tokens of each answer.
        hint: The tier asked for; None: any.
        require: Hint and SLA are conditions, not preferences.
        allowed: The tiers that the caller's key may use; None: all.
        sequences: Answers computed at the same time: prompts times choices.
        all_prompt_tokens: Of all prompts together; 0: there is one prompt.
        undraftable: Parameters that engines with a draft refuse, for people; empty: it has none.
        adapter: The LoRA adapter that it names; None: it names none.
        precisions: The precisions that may serve it, by OpenRouter's names; None: any.
        only: The tiers that may serve it, as the request says; None: all.
        sort: What the choice is made by, among tiers within the loss budget; None: the policy's rule.
        truncated: What was cut off its prompt, for people; empty: nothing.
        over_budget: The key's budget is used up, so that of its tiers only those in ``allowed`` are left.
        prefix: Of its prompt, for prefix caches; None: not known. Nothing is decided from it, and it is not logged: what
            replicas hold of it is in the snapshot.
        conversation_tokens: Cached tokens from which on a replica holds the conversation that the prompt belongs to; 0: the
            conversation begins with it, or that is not known.
        in_tool_loop: A tool's result is new in it, so that the model goes on with what it has begun.
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
    prefix: Prefix | None = None
    conversation_tokens: int = 0
    in_tool_loop: bool = False

    def allows(self, tier: TierName) -> bool:
        return self.allowed is None or tier in self.allowed

    def takes(self, spec: TierSpec) -> bool:
        """Tell whether the request itself allows a tier, or a replica, by its precision and its name."""
        has_allowed_precision = (
            self.precisions is None
            or quantizations_of(spec.precision) <= self.precisions
        )
        return has_allowed_precision and (self.only is None or spec.name in self.only)

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
    MIN_LOSS = "least_loss"
    NEGLIGIBLE = "negligible"
    BUDGET = "budget"
    SMALL_TALK = "small_talk"
    CONVERSATION = "conversation"
    DEGRADED_QUALITY = "degraded_quality"
    DEGRADED_LATENCY = "degraded_latency"
    DEGRADED_UNMEASURED = "degraded_unmeasured"
    REFUSED = "refused"


BY_CALLER = {Basis.HINT, Basis.SORT}  # the caller chose, not the policy


class Refusal(Enum):
    """Why a request is refused. All but ``SLA_UNMET`` are obstacles: of one tier, they keep it from serving the request."""

    TOO_LONG = "too_long"
    NOT_READY = "not_ready"
    AT_CAPACITY = "at_capacity"
    SLA_UNMET = "sla_unmet"
    NOT_ALLOWED = "not_allowed"
    UNSUPPORTED = "unsupported"
    NO_ADAPTER = "no_adapter"
    EXCLUDED = "excluded"


Obstacle = Literal[
    Refusal.TOO_LONG,
    Refusal.NOT_READY,
    Refusal.AT_CAPACITY,
    Refusal.NOT_ALLOWED,
    Refusal.UNSUPPORTED,
    Refusal.NO_ADAPTER,
    Refusal.EXCLUDED,
]
# Refusals that neither load nor an engine's state causes: only another request, or another key, would be served.
CALLERS_OWN = {
    Refusal.TOO_LONG,
    Refusal.NOT_ALLOWED,
    Refusal.UNSUPPORTED,
    Refusal.NO_ADAPTER,
    Refusal.EXCLUDED,
}
TIER_ABSENT = "tier_absent"
SLA_IMPOSSIBLE = "sla_impossible"


class Unfitness(Enum):
    """Why a tier serves a request only if no better one can, although it may be within the request's bounds."""

    BELOW_HINT = "below_hint"
    OVER_BOUND = "over_bound"  # it may lose more than ``TierComparison.bound``
    OVER_BUDGET = "over_budget"  # it is expected to lose more than the loss budget


class Rate(NamedTuple):
    """Microseconds that one token takes of an engine: of a prompt, and of an answer."""

    prompt_us: float
    output_us: float


class ExpectedQuality(Struct, frozen=True):
    """The loss that is expected of a tier's answer, and whether it is allowed.

    Attributes:
        worst_loss: Upper bound of the loss at the confidence asked for.
        allowed_loss: Share of answers, 0..1, that may get worse on the tier now.
        is_lossy: The tier breaks the bound on loss with the confidence asked for.
        unfitness: Of several reasons, the first in the order of ``Unfitness``; None: the tier is fit.
    """

    loss: ExpectedLoss
    worst_loss: float
    allowed_loss: float
    is_lossy: bool
    unfitness: Unfitness | None

    @property
    def is_allowed(self) -> bool:
        """Tell whether the loss is no more than is allowed now."""
        return self.loss.mean <= self.allowed_loss


class ExpectedTiming(Struct, frozen=True):
    """When a tier is expected to answer.

    Attributes:
        is_slow: The tier breaks a bound on time with the confidence asked for, or its times are not known.
        bound_ratio: Largest ratio of a predicted time to its bound; infinite where a time is not known.
        finish_ms: When the caller should have the whole answer; None: not known.
    """

    is_slow: bool
    bound_ratio: float
    finish_ms: float | None


class TierEstimate(Struct, frozen=True):
    """What the policy expects of one tier for a request at the present load. None: not known.

    Attributes:
        precision: What the tier serves; see ``TierSpec``.
        candidate: The replica that would serve the request, or the first ready one.
        batch_size: Sequences that this replica is expected to compute at once.
        cost: Engine-seconds, times the tier's price.
        obstacle: Why the tier cannot serve now; None: it can.
        obstacle_text: The obstacle in words, for a person.
        meets_bounds: The tier can serve the request within the bounds asked for.
        held_tokens: The most tokens of the request's conversation that a replica of the tier holds, whichever replica would
            serve it; 0: none holds the conversation.
    """

    tier: TierName
    precision: str
    state: ReplicaStatus
    candidate: Candidate
    batch_size: int
    timing: ExpectedTiming
    quality: ExpectedQuality
    cost: float | None
    obstacle: Obstacle | None
    obstacle_text: str
    meets_bounds: bool
    held_tokens: int = 0

    @property
    def speed(self) -> SpeedModel | None:
        """Return the speed of the candidate."""
        replica = self.candidate.replica
        if replica is None:
            return None
        return replica.speed

    @property
    def times(self) -> CorrectedTimes | None:
        """Return the times that are expected of the candidate."""
        return self.candidate.times

    @property
    def cached_tokens(self) -> int | None:
        """Return the prompt tokens that need no prefill on the candidate."""
        return self.candidate.cached_tokens

    @property
    def is_unfit(self) -> bool:
        """Tell whether the tier serves the request only if no better one can."""
        return self.quality.unfitness is not None

    @property
    def is_known_under_load(self) -> bool:
        """Tell whether the tier's speed was measured with other requests at the same time."""
        replica = self.candidate.replica
        return (
            replica is not None
            and replica.speed is not None
            and replica.speed.under_load
        )

    @property
    def finishes_in_ms(self) -> float:
        """Return when the whole answer should be there; infinite where the speed is not known."""
        finish_ms = self.timing.finish_ms
        return math.inf if finish_ms is None else finish_ms

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
        match sort:
            case "latency":
                return self.times.ttft_ms
            case "throughput":
                return self.times.tpot_ms
            case _:
                assert_never(sort)

    def recompute_ms(self, own: TierEstimate) -> float:
        """Return the time that this tier takes to compute what only a conversation's own tier holds of it; 0: not known."""
        if self.speed is None:
            return 0.0
        missing_tokens = (own.cached_tokens or 0) - (self.cached_tokens or 0)
        return self.speed.prefill_ms_per_token * max(missing_tokens, 0)

    @property
    def rate(self) -> Rate | None:
        """Return the engine time that a token takes, as ``cost`` has it, without its price."""
        if self.speed is None:
            return None
        drift = 1.0 if self.times is None else self.times.drift
        us_per_ms = 1000 * drift
        return Rate(
            prompt_us=self.speed.engine_ms(1, 0, self.batch_size) * us_per_ms,
            output_us=self.speed.engine_ms(0, 1, self.batch_size) * us_per_ms,
        )


def are_all_known_under_load(estimates: Sequence[TierEstimate]) -> bool:
    """Tell whether every tier's speed was measured with other requests at the same time."""
    return all(estimate.is_known_under_load for estimate in estimates)


def is_noticeably_later(finish_ms: float, soonest_ms: float) -> bool:
    """Return whether a person would notice that an answer finishes later than another."""
    return finish_ms > latest_unnoticed_ms(soonest_ms)


def latest_unnoticed_ms(soonest_ms: float) -> float:
    """Return the latest finish that a person does not tell from the soonest."""
    return soonest_ms + max(soonest_ms * NOTICEABLE_SHARE, NOTICEABLE_MS)


class TierComparison(Struct, frozen=True):
    """What all tiers would do with a request, and which of them came out best.

    It is apart from the decision because the decision's reason is worded from it, and because a decision may change
    afterwards: a request that has waited for too long is refused, and a continuation goes to another tier.

    Attributes:
        confidence_z: The confidence asked for, as a quantile of the normal distribution.
        scarcity: Of engine time, 0..1.
        estimates: One for each tier, by rising precision.
        chosen: The tier that came out best; None: the request is refused.
        given_up: Bounds that no tier meets.
        bound: Share of answers, 0..1, that may get worse, as the request says, or else its class; None: there is no bound.
    """

    query: RoutingQuery
    table: PolicyParameters
    confidence_z: float
    scarcity: float
    estimates: tuple[TierEstimate, ...]
    chosen: TierEstimate | None = None
    basis: Basis = Basis.REFUSED
    given_up: tuple[Degraded, ...] = ()
    bound: float | None = None

    @property
    def considered(self) -> Sequence[TierEstimate]:
        """Return the tiers that may be chosen: all, or only the one that the request requires."""
        if self.query.hint is None or not self.query.require:
            return self.estimates
        return [
            estimate for estimate in self.estimates if estimate.tier is self.query.hint
        ]

    @property
    def conversation_tier(self) -> TierEstimate | None:
        """Return the tier that served the request's conversation last, as far as it holds it: the one that holds most of it.

        None: the conversation begins with this request, no tier holds it any more, or several hold as much of it.
        """
        if not self.query.conversation_tokens:
            return None
        most_tokens = max(
            [estimate.held_tokens for estimate in self.estimates], default=0
        )
        if not most_tokens:
            return None
        holders = [
            estimate
            for estimate in self.estimates
            if estimate.held_tokens == most_tokens
        ]
        return holders[0] if len(holders) == 1 else None

    def rank(self, tier: TierName) -> int:
        """Return a tier's place by rising precision, from 0."""
        return next(
            rank
            for rank, estimate in enumerate(self.estimates)
            if estimate.tier is tier
        )


class Decision(Struct, frozen=True):
    """Where a request goes and why. Plain data: ``router.policy.explain`` has further words for it.

    Attributes:
        tier: The tier that is to serve it; None: it is refused.
        reason: Why, for a person; without any of the prompt's text.
        comparison: What the decision was made from.
        degraded: What the request asks for or its class needs, and is not expected, or not known, to get.
        refusal: Why there is no tier; None where there is one.
        retry_after_s: Of a refusal: predicted seconds until it could be served; None: never, as far as is known.
        exceeded_context: The longest context of the tiers that the request is too long for, in tokens; None: it is not
            refused for that alone.
        are_times_impossible: It is served though no tier meets its bounds on times at any load.
    """

    tier: TierName | None
    reason: str
    query: RoutingQuery
    comparison: TierComparison
    basis: Basis
    degraded: tuple[Degraded, ...] = ()
    refusal: Refusal | None = None
    retry_after_s: float | None = None
    exceeded_context: int | None = None
    are_times_impossible: bool = False

    def estimate(self, tier: TierName) -> TierEstimate:
        """Return what was expected of one tier; ``KeyError``: the fleet had no such tier."""
        for estimate in self.comparison.estimates:
            if estimate.tier is tier:
                return estimate
        raise KeyError(tier)

    def rate(self, tier: TierName) -> Rate | None:
        """Return the engine time that a token takes on a tier, as it was priced; None: not known."""
        return next(
            (
                estimate.rate
                for estimate in self.comparison.estimates
                if estimate.tier is tier
            ),
            None,
        )

    @property
    def requires_absent_tier(self) -> bool:
        """Tell whether the request was refused because it requires a tier that this router does not serve."""
        is_tier_required = self.query.require and self.query.hint is not None
        if self.refusal is not Refusal.NOT_READY or not is_tier_required:
            return False
        return all(
            estimate.state is ReplicaStatus.ABSENT
            for estimate in self.comparison.considered
        )

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
        if self.requires_impossible_bounds:
            return SLA_IMPOSSIBLE
        return self.refusal.value

    @property
    def is_callers_mistake(self) -> bool:
        """Tell whether the request was refused for what it is, so that asking again does not help."""
        return (
            self.refusal in CALLERS_OWN
            or self.requires_absent_tier
            or self.requires_impossible_bounds
        )

    @property
    def chosen(self) -> TierEstimate | None:
        return next(
            (
                estimate
                for estimate in self.comparison.estimates
                if estimate.tier is self.tier
            ),
            None,
        )

    @property
    def precision(self) -> str | None:
        chosen = self.chosen
        return None if chosen is None else chosen.precision


class RequestRefusedError(Exception):
    def __init__(self, decision: Decision) -> None:
        super().__init__(decision.reason)
        self.decision = decision


Priority = Literal["interactive", "standard", "batch"]

# Highest first; the values are vLLM's priorities: lower ones are scheduled first.
PRIORITIES: dict[Priority, int] = {"interactive": -1, "standard": 0, "batch": 1}
