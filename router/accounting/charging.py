"""What a request costs: the engine time that its tokens take, in seconds of a replica of the highest tier, and money.

A tier's rates come from the speed model that decisions are priced with, at the moment of the decision. They hold for the
whole request, so that it never costs more than was predicted for as many tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from router.accounting.budgets import OverBudgetError
from router.accounting.reservations import Reservation, Reservations
from router.auth.api_keys import Caller
from router.policy.decide import decide
from router.policy.decision import Decision, Rate, Refusal, RoutingQuery
from router.policy.table import PolicyStore
from router.settings import Settings
from router.telemetry.record import Cost, TierUsage
from router.upstream.engine_stream import EngineAnswer
from tiers.fleet import Fleet
from tiers.spec import TierName, TierSpec

HOUR_S = 3600
HARD_STOP = 2  # The cheapest tier may go up to this many times a budget.
FALLBACK = Rate(100.0, 10_000.0)  # The rates of a tier whose speed is not known yet.
OVER_BUDGET_HEADER = "x-qarr-over-budget"


@dataclass(frozen=True, slots=True)
class Pricing:
    """What tiers cost beside one another.

    Attributes:
        weights: What a second of each tier's replica costs, in seconds of a replica of the highest tier.
        highest: The highest tier that has engines.
        replica_hour: The price of an hour of one replica of that tier; 0 if none is known.
    """

    weights: Mapping[TierName, float]
    highest: TierName
    replica_hour: float = 0.0

    def cost(self, decision: Decision, usage: Iterable[TierUsage]) -> Cost:
        engine_us = 0
        for tier, prompt_tokens, cached_tokens, output_tokens in usage:
            rate = decision.rate(tier) or FALLBACK
            computed_tokens = max(prompt_tokens - cached_tokens, 0)
            tier_us = computed_tokens * rate.prompt_us + output_tokens * rate.output_us
            engine_us += math.ceil(tier_us * self.weights.get(tier, 1.0))
        if not self.replica_hour:
            return Cost(engine_us, 0)
        return Cost(engine_us, math.ceil(engine_us * self.replica_hour / HOUR_S))

    def most(self, decision: Decision, tier: TierName) -> Cost:
        """Return what a request may cost at most: no prompt token is cached, and every answer has its full length."""
        query = decision.query
        output_tokens = query.max_tokens * query.sequences
        usage = TierUsage(
            tier, prompt=query.tokens_to_read, cached=0, output=output_tokens
        )
        return self.cost(decision, (usage,))


def pricing_of(
    specs: Sequence[TierSpec],
    prices: Mapping[TierName, float],
    replica_hour: float | None,
) -> Pricing:
    """Return the pricing of a fleet, whose tiers come by rising precision.

    ``prices`` are weights of an engine-second (``policy.prices``); without any, replicas are weighed by their GPUs.
    ``replica_hour`` is the price of an hour of one replica of the highest tier; None: none is known.
    """
    highest = next((spec for spec in reversed(specs) if not spec.absent), specs[-1])
    if prices:
        replica_prices = {spec.name: prices.get(spec.name, 1.0) for spec in specs}
    else:
        replica_prices = {spec.name: float(spec.world_size) for spec in specs}
    weights = {
        name: price / replica_prices[highest.name]
        for name, price in replica_prices.items()
    }
    return Pricing(weights, highest.name, replica_hour or 0.0)


# The arguments of ``pricing_of``.
PricingInputs = tuple[Sequence[TierSpec], Mapping[TierName, float], float | None]


@dataclass(slots=True)
class Charging:
    """Reserves what requests may cost; ``prices`` are weights of an engine-second (``policy.prices``)."""

    reservations: Reservations
    fleet: Fleet
    policy: PolicyStore
    prices: Mapping[TierName, float]
    _last_pricing: tuple[PricingInputs, Pricing] | None = field(
        default=None, init=False
    )

    def use(self, settings: Settings) -> None:
        self.prices = settings.policy.prices
        self.reservations.settings = settings.budgets

    @property
    def pricing(self) -> Pricing:
        """Return the pricing of the present fleet and settings, which is made again only when one of them has changed."""
        inputs = (
            self.fleet.specs,
            self.prices,
            self.reservations.settings.replica_hour,
        )
        if self._last_pricing is None or self._last_pricing[0] != inputs:
            self._last_pricing = (inputs, pricing_of(*inputs))
        return self._last_pricing[1]

    async def reserve(
        self, caller: Caller, decision: Decision, headers: dict[str, str]
    ) -> tuple[Reservation, Decision]:
        """Reserve the most that a request may cost at any tier that may serve it.

        Over budget, a key that says so gets the cheapest tier, up to ``HARD_STOP`` times its budgets: the request then has
        another decision, and ``headers`` get one that says so.

        Raises:
            OverBudgetError: A budget does not allow the request now.
        """
        pricing = self.pricing
        costs = [pricing.most(decision, tier) for tier in self._tiers(decision.query)]
        try:
            reservation = await self.reservations.enter(caller.accounts, max(costs))
        except OverBudgetError as over_budget:
            if caller.over_budget != "cheapest":
                raise
            cheapest_tier = self._cheapest_tier(decision, pricing)
            cheaper_decision = self._decide_for(cheapest_tier, decision.query)
            if _is_final(cheaper_decision):
                raise
            cheapest_cost = pricing.most(cheaper_decision, cheapest_tier)
            reservation = await self.reservations.enter(
                caller.accounts, cheapest_cost, HARD_STOP
            )
            headers[OVER_BUDGET_HEADER] = (
                f"too little left of {over_budget.account.title}'s {over_budget.text}: only {cheapest_tier} may serve"
            )
            return reservation, cheaper_decision
        return reservation, decision

    def _cheapest_tier(self, decision: Decision, pricing: Pricing) -> TierName:
        """Return the tier at which the request may cost least, even if it requires another one."""
        tiers = self._tiers(replace(decision.query, require=False))
        return min(tiers, key=lambda tier: pricing.most(decision, tier))

    def _decide_for(self, tier: TierName, query: RoutingQuery) -> Decision:
        """Decide a request that is over budget again, with one tier alone."""
        cheaper_query = replace(query, allowed=frozenset({tier}), over_budget=True)
        return decide(
            cheaper_query,
            self.fleet.snapshot(prefix=cheaper_query.prefix),
            self.policy.table,
        )

    def _tiers(self, query: RoutingQuery) -> list[TierName]:
        """Return the tiers that may compute any of a request: its reservation covers the dearest of them.

        ``Admission._specs`` looks alike, but answers for which tiers a request may wait, and differs in three conditions:

        - A tier without engines is left out here, where its price would raise the reservation. In a queue it does no harm,
          since no slot of it ever becomes free.
        - What the request itself allows (``RoutingQuery.takes``) is left out of account here: then a reservation may be too
          large, which its settlement corrects, but never too small.
        - At least one tier is returned here, since every reservation needs a price.
        """
        required_tier = query.hint if query.require else None
        needed_length = query.prompt_tokens + query.max_tokens
        tiers = [
            spec.name
            for spec in self.fleet.specs
            if query.allows(spec.name)
            and required_tier in {None, spec.name}
            and not spec.absent
            and needed_length <= spec.max_model_len
        ]
        return tiers or [self.pricing.highest]


def _is_final(decision: Decision) -> bool:
    """Tell whether a decision refuses a request for another reason than that every tier is full."""
    return decision.tier is None and decision.refusal is not Refusal.AT_CAPACITY


def usage_of(decision: Decision, answer: EngineAnswer) -> tuple[TierUsage, ...]:
    """Return what each engine read and computed of an answer: the first one, then those that continued it.

    One that continued an answer is taken to have read the prompt and what came before, unless it reports something else.
    """
    prompt_tokens = answer.usage.get("prompt_tokens", decision.query.tokens_to_read)
    parts = answer.parts
    continued_tokens = sum(part.output_tokens for part in parts)
    output_before = max(answer.output_tokens - continued_tokens, 0)
    usage = [
        TierUsage(
            answer.tier,
            prompt=prompt_tokens,
            cached=_cached_tokens_of(answer),
            output=output_before,
        ),
    ]
    for part in parts:
        read_tokens = part.usage.get("prompt_tokens", prompt_tokens + output_before)
        usage.append(
            TierUsage(
                part.tier,
                prompt=read_tokens,
                cached=_cached_tokens_of(part),
                output=part.output_tokens,
            )
        )
        output_before += part.output_tokens
    return tuple(usage)


def _cached_tokens_of(answer: EngineAnswer) -> int:
    """Return the prompt tokens that an engine had cached, by its own word.

    An engine tells that at the end. Where it did not come so far, those count that the replica was expected to hold.
    """
    has_ended_here = answer.complete and not answer.parts
    if answer.cached_tokens is None and not has_ended_here:
        return answer.predicted_cached_tokens or 0
    return answer.cached_tokens or 0
