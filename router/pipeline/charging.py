"""Charging requests to their callers' budgets: what is reserved before, and what was computed afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from router.auth.budgets import OverBudget
from router.auth.spending import HARD_STOP
from router.policy.charge import Visit, tariff
from router.policy.decide import decide
from router.policy.decision import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.auth.spending import BudgetGrant, Spending
    from router.pipeline.registry import ActiveRequest
    from router.policy.charge import Tariff
    from router.policy.decision import Decision, Query
    from router.policy.table import PolicyStore
    from router.settings import BudgetSettings
    from router.upstream.engine_stream import EngineAnswer
    from tiers.fleet import Fleet
    from tiers.spec import TierName, TierSpec

OVER_BUDGET_HEADER = "x-qarr-over-budget"


@dataclass(slots=True)
class Charging:
    """Reserves what requests may cost.

    Attributes:
        prices: Weights of an engine-second (``policy.prices``).
        replica_hour: Price of an hour of one replica of the highest tier; None: none is known.
    """

    spending: Spending
    fleet: Fleet
    policy: PolicyStore
    prices: Mapping[TierName, float]
    replica_hour: float | None
    _made: tuple[tuple[TierSpec, ...], Tariff] | None = field(default=None, init=False)

    def take(self, prices: Mapping[TierName, float], budgets: BudgetSettings) -> None:
        """Take other prices; they hold from the next request on."""
        self.prices, self.replica_hour, self._made = prices, budgets.replica_hour, None
        priced, serve_unknown = budgets.replica_hour is not None, budgets.while_unknown == "serve"
        self.spending.take(currency=budgets.currency, priced=priced, serve_unknown=serve_unknown)

    @property
    def tariff(self) -> Tariff:
        specs = self.fleet.specs
        if self._made is None or self._made[0] is not specs:
            self._made = specs, tariff(specs, self.prices, self.replica_hour)
        return self._made[1]

    async def reserve(self, active: ActiveRequest) -> BudgetGrant:
        """Reserve the most that a request may cost at any tier that may serve it.

        Over budget, a key that says so gets the cheapest tier, up to ``HARD_STOP`` times its budgets: the request then has
        another decision, and a header.

        Raises:
            OverBudget: A budget does not allow it now.
        """
        decision, caller = active.decision, active.context.caller
        costs, tiers = self.tariff, self._tiers(decision.query)
        try:
            return await self.spending.enter(caller, costs.most(decision, tiers))
        except OverBudget as over:
            if caller.over_budget != "cheapest":
                raise
            cheapest = costs.cheapest(decision, self._tiers(replace(decision.query, require=False)))
            cheaper = self._only(cheapest, decision.query)
            if cheaper.tier is None and cheaper.refusal is not Refusal.AT_CAPACITY:
                raise
            grant = await self.spending.enter(caller, costs.most(cheaper, (cheapest,)), HARD_STOP)
            active.decision = cheaper
            text = f"{over.limit.text(over.currency)} used up by {over.account.title}: only {cheapest}"
            active.context.limits[OVER_BUDGET_HEADER] = text
            return grant

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
        return found or [self.tariff.highest]

    def _only(self, tier: TierName, query: Query) -> Decision:
        query = replace(query, allowed=frozenset({tier}), over_budget=True)
        return decide(query, self.fleet.snapshot(prefix=query.prefix), self.policy.table)


def visits_of(decision: Decision, answer: EngineAnswer) -> tuple[Visit, ...]:
    """Return what each tier computed of an answer and its continuations."""
    prompt = answer.usage.get("prompt_tokens", decision.query.tokens_to_read)
    parts, found, done = answer.parts, [], answer.output_tokens
    if parts:
        done = max(done - sum(part.output_tokens for part in parts), 0)
    found.append(Visit(answer.tier, prompt, answer.cached_tokens or 0, done))
    for part in parts:
        read = part.usage.get("prompt_tokens", prompt + done)
        found.append(Visit(part.tier, read, part.cached_tokens or 0, part.output_tokens))
        done += part.output_tokens
    return tuple(found)
