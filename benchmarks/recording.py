"""Make recorded decisions again, and run recorded arrivals through another policy.

Decisions are made again from the log alone; a difference means that the log or the code has changed. Another policy changes
the load that later decisions see, so its effects are simulated (``policy_simulation.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from router.policy.decide import decide
from router.policy.decision_log import (
    DecisionRecord,
    OutcomeRecord,
    PolicyRecord,
    read_log,
)
from router.policy.profiles import ProfileError, percentile
from tiers.spec import STANDARD_TIERS, TierName, in_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from router.policy.decision import PolicyParameters, RoutingQuery


@dataclass(frozen=True, slots=True)
class Recording:
    """A decision log: parameters by digest, decisions in the order in which they were made, outcomes by request id."""

    tables: Mapping[str, PolicyParameters]
    decisions: tuple[DecisionRecord, ...]
    outcomes: Mapping[str, OutcomeRecord]


@dataclass(frozen=True, slots=True)
class Result:
    """How one request ended. Times in milliseconds; None: it was refused, or it is not known.

    Attributes:
        loss: Probability that the answer is worse than the highest precision's, as expected.
        engine_ms: Engine time that it took, by the speed model.
        met: Whether it met its bounds on TTFT and TPOT.
    """

    tier: TierName | None
    ttft_ms: float | None
    tpot_ms: float | None
    loss: float | None
    engine_ms: float | None
    met: bool


NOT_SERVED = Result(None, None, None, None, None, met=False)


@dataclass(frozen=True, slots=True)
class Summary:
    """How all requests ended. Shares and ``met`` 0..1; times in milliseconds, ``engine_s`` in seconds; None: not known."""

    requests: int
    refused: int
    shares: Mapping[TierName, float]
    met: float
    mean_loss: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    tpot_p50: float | None
    tpot_p95: float | None
    engine_s: float | None


def read_recording(path: Path) -> Recording:
    """Read a decision log.

    Raises:
        ProfileError: It cannot be read, or holds no decisions.
    """
    tables: dict[str, PolicyParameters] = {}
    decisions: list[DecisionRecord] = []
    outcomes: dict[str, OutcomeRecord] = {}
    for record in read_log(path):
        match record:
            case PolicyRecord():
                tables[record.id] = record.table
            case DecisionRecord():
                decisions.append(record)
            case OutcomeRecord():
                outcomes[record.request_id] = record
    if not decisions:
        raise ProfileError(f"{path} holds no decisions")
    return Recording(tables, tuple(decisions), outcomes)


def differing(recording: Recording) -> list[DecisionRecord]:
    """Make every decision again from the log, and return those that differ.

    Raises:
        ProfileError: A decision's policy is not in the log.
    """
    found = []
    for record in recording.decisions:
        table = recording.tables.get(record.policy)
        if table is None:
            raise ProfileError(
                f"the policy {record.policy} of request {record.request_id} is not in the log"
            )
        again = decide(record.query, record.fleet, table)
        if (again.tier, again.refusal) != (record.tier, record.refusal):
            found.append(record)
    return found


def seen(recording: Recording) -> list[Result]:
    """Return how the recorded requests ended, as far as the log tells."""
    results = []
    for record in recording.decisions:
        outcome = recording.outcomes.get(record.request_id)
        # a decision without a tier may be of a request that waited
        if outcome is None or outcome.error is not None:
            results.append(NOT_SERVED)
            continue
        loss = mean_loss(recording.tables[record.policy], outcome.tier, record.query)
        ttft_ms, tpot_ms = outcome.ttft_ms, outcome.tpot_ms
        results.append(
            Result(
                outcome.tier,
                ttft_ms,
                tpot_ms,
                loss,
                None,
                met=is_met(record.query, ttft_ms, tpot_ms),
            )
        )
    return results


def mean_loss(table: PolicyParameters, tier: TierName, query: RoutingQuery) -> float:
    """Return the expected loss of a request on a tier."""
    return table.with_adapter(query.adapter).loss(tier, query.features).mean


def summarise(results: Sequence[Result]) -> Summary:
    """Return shares, means and percentiles of all requests."""
    served = [r for r in results if r.tier is not None]
    ttfts = [r.ttft_ms for r in served if r.ttft_ms is not None]
    tpots = [r.tpot_ms for r in served if r.tpot_ms is not None]
    losses = [r.loss for r in served if r.loss is not None]
    tiers = in_order({*STANDARD_TIERS, *(r.tier for r in served if r.tier)})
    engine = [r.engine_ms for r in served if r.engine_ms is not None]
    return Summary(
        requests=len(results),
        refused=len(results) - len(served),
        shares={
            tier: sum(r.tier is tier for r in served) / max(len(served), 1)
            for tier in tiers
        },
        met=sum(r.met for r in results) / max(len(results), 1),
        mean_loss=fmean(losses) if losses else None,
        ttft_p50=percentile(ttfts, 0.5) if ttfts else None,
        ttft_p95=percentile(ttfts, 0.95) if ttfts else None,
        tpot_p50=percentile(tpots, 0.5) if tpots else None,
        tpot_p95=percentile(tpots, 0.95) if tpots else None,
        engine_s=sum(engine) / 1000 if engine else None,
    )


def is_met(query: RoutingQuery, ttft_ms: float | None, tpot_ms: float | None) -> bool:
    """Tell whether a request's bounds on times were met."""
    sla = query.sla
    late = sla.ttft_ms is not None and ttft_ms is not None and ttft_ms > sla.ttft_ms
    slow = sla.tpot_ms is not None and tpot_ms is not None and tpot_ms > sla.tpot_ms
    return not late and not slow
