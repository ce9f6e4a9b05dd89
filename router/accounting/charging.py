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
from router.policy.decision import Decision, Query, Rate, Refusal
from router.policy.table import PolicyStore
from router.settings import Settings
from router.telemetry.record import Cost, TierUsage
from router.upstream.engine_stream import EngineAnswer
from tiers.fleet import Fleet
from tiers.spec import TierName, TierSpec

HOUR_S = 3600
HARD_STOP = 2  # times the budget, that the cheapest tier may go up to
FALLBACK = Rate(100.0, 10_000.0)  # of a tier whose speed is not known yet
OVER_BUDGET_HEADER = "x-qarr-over-budget"


@dataclass(frozen=True, slots=True)
class Pricing:
    """What tiers cost beside one another."""

    weights: Mapping[TierName, float]  # a second of a tier's replica, in seconds of a replica of the highest tier
    highest: TierName  # the highest tier that has engines
    replica_hour: float = 0.0  # price of an hour of one replica of that tier; 0: none is known

    def cost(self, decision: Decision, usage: Iterable[TierUsage]) -> Cost:
        engine_us = 0
        for tier, prompt, cached, output in usage:
            rate = decision.rate(tier) or FALLBACK
            us = max(prompt - cached, 0) * rate.prompt_us + output * rate.output_us
            engine_us += math.ceil(us * self.weights.get(tier, 1.0))
        return Cost(engine_us, math.ceil(engine_us * self.replica_hour / HOUR_S) if self.replica_hour else 0)

    def most(self, decision: Decision, tier: TierName) -> Cost:
        """Return what a request may cost at most: no prompt token is cached, and every answer has its full length."""
        query = decision.query
        return self.cost(decision, (TierUsage(tier, query.tokens_to_read, 0, query.max_tokens * query.sequences),))


def pricing_of(specs: Sequence[TierSpec], prices: Mapping[TierName, float], replica_hour: float | None) -> Pricing:
    """Return the pricing of a fleet, whose tiers come by rising precision.

    ``prices`` are weights of an engine-second (``policy.prices``); without any, replicas are weighed by their GPUs.
    ``replica_hour`` is the price of an hour of one replica of the highest tier; None: none is known.
    """
    highest = next((spec for spec in reversed(specs) if not spec.absent), specs[-1])
    raw = {spec.name: prices.get(spec.name, 1.0) if prices else float(spec.world_size) for spec in specs}
    weights = {name: value / raw[highest.name] for name, value in raw.items()}
    return Pricing(weights, highest.name, replica_hour or 0.0)


@dataclass(slots=True)
class Charging:
    """Reserves what requests may cost."""

    reservations: Reservations
    fleet: Fleet
    policy: PolicyStore
    prices: Mapping[TierName, float]  # weights of an engine-second (``policy.prices``)
    _made: tuple[tuple[object, ...], Pricing] | None = field(default=None, init=False)

    def use(self, settings: Settings) -> None:
        self.prices, self.reservations.settings = settings.policy.prices, settings.budgets

    @property
    def pricing(self) -> Pricing:
        given = self.fleet.specs, self.prices, self.reservations.settings.replica_hour
        if self._made is None or self._made[0] != given:
            self._made = given, pricing_of(*given)
        return self._made[1]

    async def reserve(
        self, caller: Caller, decision: Decision, headers: dict[str, str]
    ) -> tuple[Reservation, Decision]:
        """Reserve the most that a request may cost at any tier that may serve it.

        Over budget, a key that says so gets the cheapest tier, up to ``HARD_STOP`` times its budgets: the request then has
        another decision, and ``headers`` get one that says so. ``OverBudgetError``: a budget does not allow it now.
        """
        pricing, accounts = self.pricing, caller.accounts
        try:
            most = max(pricing.most(decision, tier) for tier in self._tiers(decision.query))
            return await self.reservations.enter(accounts, most), decision
        except OverBudgetError as over:
            if caller.over_budget != "cheapest":
                raise
            tiers = self._tiers(replace(decision.query, require=False))
            cheapest = min(tiers, key=lambda tier: pricing.most(decision, tier))
            query = replace(decision.query, allowed=frozenset({cheapest}), over_budget=True)
            cheaper = decide(query, self.fleet.snapshot(prefix=query.prefix), self.policy.table)
            if cheaper.tier is None and cheaper.refusal is not Refusal.AT_CAPACITY:
                raise
            reservation = await self.reservations.enter(accounts, pricing.most(cheaper, cheapest), HARD_STOP)
            headers[OVER_BUDGET_HEADER] = (
                f"too little left of {over.account.title}'s {over.text}: only {cheapest} may serve"
            )
            return reservation, cheaper

    def _tiers(self, query: Query) -> list[TierName]:
        only = query.hint if query.require else None
        length = query.prompt_tokens + query.max_tokens
        found = [
            spec.name
            for spec in self.fleet.specs
            if query.allows(spec.name)
            and only in {None, spec.name}
            and not spec.absent
            and length <= spec.max_model_len
        ]
        return found or [self.pricing.highest]


def usage_of(decision: Decision, answer: EngineAnswer) -> tuple[TierUsage, ...]:
    prompt = answer.usage.get("prompt_tokens", decision.query.tokens_to_read)
    parts = answer.parts
    done = max(answer.output_tokens - sum(part.output_tokens for part in parts), 0)
    found = [TierUsage(answer.tier, prompt, answer.cached_tokens or 0, done)]
    for part in parts:
        read = part.usage.get("prompt_tokens", prompt + done)
        found.append(TierUsage(part.tier, read, part.cached_tokens or 0, part.output_tokens))
        done += part.output_tokens
    return tuple(found)
