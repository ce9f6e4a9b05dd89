"""What a request costs: the engine time that its tokens take, in seconds of a replica of the highest tier, and money.

A tier's rates come from the speed model that decisions are priced with, at the moment of the decision. They hold for the
whole request, so that a charge never exceeds what was predicted for as many tokens. Charges are integers: millionths of an
engine-second and of the currency, so that sums are exact in whatever order they are added.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from router.policy.decision import Rate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from router.policy.decision import Decision
    from tiers.spec import TierName, TierSpec

MICRO = 1_000_000
HOUR_S = 3600


FALLBACK = Rate(100.0, 10_000.0)  # of a tier whose speed is not known yet


class Visit(NamedTuple):
    """What one tier computed of a request.

    Attributes:
        cached: Tokens of the prompt that were in its prefix cache.
    """

    tier: TierName
    prompt: int
    cached: int
    output: int


class Charge(NamedTuple):
    """Millionths of an engine-second of the highest tier, and of the currency."""

    engine_us: int = 0
    money_u: int = 0

    def plus(self, other: Charge) -> Charge:
        return Charge(self.engine_us + other.engine_us, self.money_u + other.money_u)

    def at_most(self, other: Charge) -> Charge:
        return Charge(min(self.engine_us, other.engine_us), min(self.money_u, other.money_u))


FREE = Charge()


@dataclass(frozen=True, slots=True)
class Tariff:
    """What tiers cost beside one another.

    Attributes:
        weights: A second of a tier's replica, in seconds of a replica of the highest tier.
        highest: The highest tier that has engines.
        replica_hour: Price of an hour of one replica of that tier; 0: none is known.
    """

    weights: Mapping[TierName, float]
    highest: TierName
    replica_hour: float = 0.0

    def charge(self, decision: Decision, visits: Iterable[Visit]) -> Charge:
        """Return what a request costs, at the rates of its decision."""
        return self._priced(sum(self._engine_us(decision, visit) for visit in visits))

    def at_highest(self, decision: Decision, visits: Iterable[Visit]) -> Charge:
        """Return what the same tokens would have cost at the highest tier."""
        highest = self.highest
        return self._priced(sum(self._engine_us(decision, visit._replace(tier=highest)) for visit in visits))

    def most(self, decision: Decision, tiers: Iterable[TierName]) -> Charge:
        """Return what a request may cost at most: no prompt token is cached, and every answer has its full length.

        Args:
            decision: Of the request.
            tiers: That may serve it.
        """
        query, most = decision.query, FREE
        for tier in tiers:
            whole = Visit(tier, query.tokens_to_read, 0, query.max_tokens * query.sequences)
            most = max(most, self.charge(decision, (whole,)))
        return most

    def cheapest(self, decision: Decision, tiers: Sequence[TierName]) -> TierName:
        """Return the tier at which a request costs least; of equals, the first."""
        return min(tiers, key=lambda tier: self.most(decision, (tier,)))

    def _engine_us(self, decision: Decision, visit: Visit) -> int:
        rate = decision.rate(visit.tier) or FALLBACK
        us = max(visit.prompt - visit.cached, 0) * rate.prompt_us + visit.output * rate.output_us
        return math.ceil(us * self.weights.get(visit.tier, 1.0))

    def _priced(self, engine_us: int) -> Charge:
        return Charge(engine_us, math.ceil(engine_us * self.replica_hour / HOUR_S) if self.replica_hour else 0)


def tariff(specs: Sequence[TierSpec], prices: Mapping[TierName, float], replica_hour: float | None) -> Tariff:
    """Return the tariff of a fleet.

    Args:
        specs: Of its tiers, by rising precision.
        prices: Weights of an engine-second (``policy.prices``); without any, replicas are weighed by their GPUs.
        replica_hour: Price of an hour of one replica of the highest tier; None: none is known.
    """
    highest = next((spec for spec in reversed(specs) if not spec.absent), specs[-1])
    raw = {spec.name: prices.get(spec.name, 1.0) if prices else float(spec.world_size) for spec in specs}
    weights = {name: value / raw[highest.name] for name, value in raw.items()}
    return Tariff(weights, highest.name, replica_hour or 0.0)
