"""What a request went through, and the record of one that has ended: metrics, logs, spans and pages are made from it."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from enum import StrEnum
from typing import Any, NamedTuple

from msgspec import Struct, field
from opentelemetry.trace import Span

from router.policy.decision import Decision, Priority
from router.policy.decision_log import DecisionLog, OutcomeRecord
from router.policy.render import render_estimates
from tiers.spec import TierName


class Outcome(StrEnum):
    OK = "ok"
    REFUSED = "refused"
    ERROR = "error"
    CLIENT_GONE = "client_gone"


class KeptFor(StrEnum):
    """Why a request's record and trace are kept: among the last ones, or besides, since it went badly."""

    RECENT = "recent"
    ERROR = "error"
    SLA_MISS = "sla_miss"


class Hop(Struct, eq=False):
    """A request to an engine or to the overflow. Times are in seconds by the monotonic clock."""

    operation: str  # the GenAI conventions' name of it
    model: str  # as the engine calls it
    url: str
    began: float
    tier: TierName | None = None  # None: the overflow is asked
    replica: str = ""
    precision: str = ""
    checkpoint: str = ""
    number: int = 0  # attempts that failed before this one
    overflow: str = ""
    streamed: bool = True
    first_token_at: float | None = None  # None: there was none yet
    ended: float | None = None  # None: it has not ended yet
    result: dict[str, Any] = field(default_factory=dict)  # span attributes at its end; None: not known
    message: str = ""  # what its exception says; empty: there was none
    span: Span | None = None  # until it ends, where the request is traced
    headers: Sequence[tuple[bytes, bytes]] = ()  # that tell the engine of its trace


class Event(NamedTuple):
    """An event of the server span; ``at`` is in seconds by the monotonic clock."""

    name: str
    at: float
    attributes: dict[str, Any]


class Journey(Struct, eq=False):
    """One request's way through the router. Times are in seconds by the monotonic clock."""

    arrived: float  # when the whole request was there
    began: float  # when classification began
    classified: float  # when its prompt was read and classified
    decided: float  # when its tier was chosen
    prompt: str = ""  # until the spans are made, where prompts are to be on them
    # begin and end of its time in the queue, if it was there
    waits: list[tuple[float, float]] = field(default_factory=list)
    hops: list[Hop] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


def error_name(error: BaseException) -> str:
    """Return an error's name in metrics, spans and records: its class's, of our own without the last word."""
    kind = type(error)
    return kind.__name__.removesuffix("Error") if kind.__module__.startswith("router.") else kind.__name__


JOURNEY: ContextVar[Journey | None] = ContextVar("qarr_journey", default=None)  # the present request's


class Served(NamedTuple):
    tier: TierName | None = None  # that began its answer; None: none did
    replica: str | None = None
    precision: str | None = None  # of that tier
    checkpoint: str | None = None  # first digits of the digest of that tier's weights
    attempts_failed: int = 0
    continued_on: tuple[TierName, ...] = ()  # tiers that continued its answer after failures, in order
    overflow: str | None = None  # name of the server outside of the fleet that answered; None: none did
    # why that server did not answer: ``full``, ``paused`` or ``unsupported``, so that it was not asked; ``failed`` or
    # ``cancelled``; None: it did, or there was no need
    overflow_failure: str | None = None


class Tokens(NamedTuple):
    prompt: int
    output: int = 0
    # of its prompt, found in the engine's prefix cache, as the engine reports it; None: it does not
    cached: int | None = None
    predicted_cached: int | None = None  # the same, as expected when the request was sent


class Times(NamedTuple):
    """Times of a request; None: not measured."""

    queue_ms: float  # wait for a slot
    overhead_ms: float | None  # from its arrival until it was sent to an engine, without the queue
    ttft_ms: float | None  # from its arrival to its first token, queue included
    tpot_ms: float | None  # mean time between tokens
    duration_ms: float  # from its arrival to its last byte


class TierUsage(NamedTuple):
    tier: TierName
    prompt: int
    cached: int  # of the prompt's, those in its prefix cache
    output: int


class Cost(NamedTuple):
    """Millionths of an engine-second of the highest tier, and of the currency: sums of integers are exact in any order."""

    engine_us: int = 0
    money_u: int = 0

    def plus(self, other: Cost) -> Cost:
        return Cost(self.engine_us + other.engine_us, self.money_u + other.money_u)

    def at_most(self, other: Cost) -> Cost:
        return Cost(min(self.engine_us, other.engine_us), min(self.money_u, other.money_u))


FREE = Cost()


class RequestRecord(Struct, frozen=True):
    at: float  # when it arrived, in seconds since 1970
    request_id: str
    trace_id: str
    route: str  # the endpoint's path
    key_id: str  # of the caller's key; empty without keys
    team: str  # of that key; empty: none
    priority: Priority
    decision: Decision  # the one that admitted or refused it
    outcome: Outcome
    error: str | None  # code of a refusal, or the kind of error
    served: Served
    tokens: Tokens
    times: Times
    # whether its own bounds on times were met; None: it had none, or its caller left before
    sla_met: bool | None = None
    kept_for: KeptFor = KeptFor.RECENT
    # why it failed or was refused after the decision, for operators; empty: it was not, or nothing tells
    why_not: str = ""
    usage: tuple[TierUsage, ...] = ()  # what tiers computed of it; only of callers with a key
    cost: Cost | None = None  # charged to its caller's budgets; None: it has none
    journey: Journey | None = None  # what it went through, for its trace; None: not known


def render_record(record: RequestRecord) -> dict[str, Any]:
    return {**render_summary(record), "tiers": render_estimates(record.decision)}


def render_summary(record: RequestRecord) -> dict[str, Any]:
    """Return a record as JSON values, without the reports on tiers. Predictions do not include the queue."""
    decision, served, tokens, times = record.decision, record.served, record.tokens, record.times
    features, sla, chosen = decision.query.features, decision.query.sla, decision.chosen
    return {  # of plain values: encoding an enumeration's takes four times as long
        "at": int(record.at * 1000 + 0.5) / 1000,  # round() takes four times as long
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "route": record.route,
        "key": record.key_id,
        "priority": record.priority,
        "class": features.prompt_class._value_,
        "confidence": int(features.confidence * 1000 + 0.5) / 1000,
        "tier": decision.tier,
        "served_by": served.tier,
        "overflow": served.overflow,
        "overflow_failure": served.overflow_failure,
        "replica": served.replica,
        "precision": served.precision,
        "checkpoint": served.checkpoint,
        "reason": record.why_not or decision.reason,
        "basis": decision.basis._value_,
        "degraded": list(decision.degraded),
        "truncated": decision.query.truncated or None,
        "outcome": record.outcome._value_,
        "error": record.error,
        "prompt_tokens": tokens.prompt,
        "cached_prompt_tokens": tokens.cached,
        "predicted_cached_tokens": tokens.predicted_cached,
        "output_tokens": tokens.output,
        **{name: ms and int(ms * 100 + 0.5) / 100 for name, ms in zip(Times._fields, times, strict=True)},
        "predicted_ttft_ms": chosen.predicted_ttft_ms if chosen else None,
        "predicted_tpot_ms": chosen.predicted_tpot_ms if chosen else None,
        "sla": {"ttft_ms": sla.ttft_ms, "tpot_ms": sla.tpot_ms, "max_quality_loss": sla.max_quality_loss},
        "sla_met": record.sla_met,
        "attempts_failed": served.attempts_failed,
        "continued_on": list(served.continued_on),
        "cost": _rounded(chosen.cost, 4) if chosen else None,
    }


def _rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)


def log_outcome(decisions: DecisionLog, record: RequestRecord) -> None:
    """Write to the decision log how a request ended, if an engine began to answer it."""
    if record.served.tier is None:
        return
    gone = "CancelledError" if record.outcome is Outcome.CLIENT_GONE else None
    decisions.ended(
        OutcomeRecord(
            request_id=record.request_id,
            tier=record.served.tier,
            prompt_tokens=record.tokens.prompt,
            output_tokens=record.tokens.output,
            ttft_ms=_rounded(record.times.ttft_ms),
            tpot_ms=_rounded(record.times.tpot_ms, 3),
            error=record.error or gone,
        )
    )
