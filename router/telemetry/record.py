"""What a request went through, and the record of one that has ended: metrics, logs, spans and pages are made from it."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from enum import StrEnum
from typing import Any, NamedTuple

from msgspec import Struct, field
from msgspec.structs import asdict
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
    """A request to an engine or to the overflow. Times are in seconds by the monotonic clock.

    Attributes:
        operation: Its name by the GenAI conventions.
        model: The engine's name of the model.
        tier: The tier that is asked; None: the overflow is.
        number: Number of attempts that failed before this one.
        first_token_at: When the first token came; None: none has come yet.
        ended: When it ended; None: it has not ended yet.
        result: Span attributes that are known at its end.
        message: The text of its exception; empty: there was none.
        span: Its span until it ends; None: the request is not traced.
        headers: Headers by which the engine joins its spans to the trace.
    """

    operation: str
    model: str
    url: str
    began: float
    tier: TierName | None = None
    replica: str = ""
    precision: str = ""
    checkpoint: str = ""
    number: int = 0
    overflow: str = ""
    streamed: bool = True
    first_token_at: float | None = None
    ended: float | None = None
    result: dict[str, Any] = field(default_factory=dict)
    message: str = ""
    span: Span | None = None
    headers: Sequence[tuple[bytes, bytes]] = ()


class Event(NamedTuple):
    """An event of the server span; ``at`` is in seconds by the monotonic clock."""

    name: str
    at: float
    attributes: dict[str, Any]


class Journey(Struct, eq=False):
    """One request's way through the router. Times are in seconds by the monotonic clock.

    Attributes:
        arrived: When the request was complete.
        began: When classification began.
        classified: When the prompt was classified.
        decided: When the tier was chosen.
        prompt: The prompt until the spans are made; empty: prompts are not to be on them.
        waits: Begin and end of each time in the queue.
        hops: Its requests to engines and to the overflow.
        events: Further events of its server span.
    """

    arrived: float
    began: float
    classified: float
    decided: float
    prompt: str = ""
    waits: list[tuple[float, float]] = field(default_factory=list)
    hops: list[Hop] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


def first_answer_token_at(hop: Hop) -> float | None:
    """Return when the answer itself began after the model's reasoning; None: it did not, or there was no reasoning."""
    ttft_ms = hop.result.get("qarr.ttft_ms")
    ttfa_ms = hop.result.get("qarr.ttfa_ms")
    if hop.first_token_at is None or ttft_ms is None or ttfa_ms is None:
        return None
    if ttfa_ms <= ttft_ms:
        return None
    thought_ms: float = ttfa_ms - ttft_ms
    return hop.first_token_at + thought_ms / 1000


def error_name(error: BaseException) -> str:
    """Return an error's name in metrics, spans and records: its class's name, for our own classes without "Error"."""
    kind = type(error)
    if kind.__module__.startswith("router."):
        return kind.__name__.removesuffix("Error")
    return kind.__name__


# The way of the request that the present task serves; None: it serves none.
JOURNEY: ContextVar[Journey | None] = ContextVar("qarr_journey", default=None)


class Served(Struct, frozen=True):
    """Who answered a request.

    Attributes:
        tier: The tier that began the answer; None: no tier did.
        replica: The replica that began it.
        precision: The precision of that tier.
        checkpoint: The first digits of the digest of that tier's weights.
        attempts_failed: Number of attempts that failed before.
        continued_on: The tiers that continued the answer after failures, in order.
        overflow: The name of the server outside of the fleet that answered; None: none did.
        overflow_failure: Why that server did not answer: ``full``, ``paused`` or ``unsupported`` if it was not asked, else
            ``failed`` or ``cancelled``; None: it answered, or there was no need.
    """

    tier: TierName | None = None
    replica: str | None = None
    precision: str | None = None
    checkpoint: str | None = None
    attempts_failed: int = 0
    continued_on: tuple[TierName, ...] = ()
    overflow: str | None = None
    overflow_failure: str | None = None


class Tokens(Struct, frozen=True):
    """Tokens of a request.

    Attributes:
        prompt: Tokens of its prompt.
        output: Tokens of its answers, reasoning included.
        cached: Prompt tokens that the engine found in its prefix cache; None: the engine does not report them.
        predicted_cached: Prompt tokens that were expected there when the request was sent; None: nothing was expected.
        cache_written: Prompt tokens that the engine wrote to its prefix cache; None: the engine does not report them.
        reasoning: Tokens of its answers that are the model's reasoning; None: nobody knows.
        tool: Tokens that the engine's own tools returned to the model; None: the engine does not report them.
    """

    prompt: int
    output: int = 0
    cached: int | None = None
    predicted_cached: int | None = None
    cache_written: int | None = None
    reasoning: int | None = None
    tool: int | None = None


class Times(Struct, frozen=True):
    """Times of a request; None: not measured.

    Attributes:
        queue_ms: Its wait for a slot.
        overhead_ms: From its arrival until it was sent to an engine, without the queue.
        ttft_ms: From its arrival to its first token, with the queue.
        tpot_ms: Mean time between tokens.
        duration_ms: From its arrival to its last byte.
        ttfa_ms: From its arrival to the first token of the answer itself, which is text or a tool call, not reasoning.
    """

    queue_ms: float
    overhead_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    duration_ms: float
    ttfa_ms: float | None = None


class TierUsage(NamedTuple):
    """Tokens that a tier has computed of a request; ``cached`` are those of the prompt that its prefix cache held."""

    tier: TierName
    prompt: int
    cached: int
    output: int


class Cost(NamedTuple):
    """Millionths of an engine-second of the highest tier, and of the currency: sums of integers are exact in any order."""

    engine_us: int = 0
    money_u: int = 0

    def plus(self, other: Cost) -> Cost:
        return Cost(self.engine_us + other.engine_us, self.money_u + other.money_u)

    def at_most(self, other: Cost) -> Cost:
        return Cost(
            min(self.engine_us, other.engine_us), min(self.money_u, other.money_u)
        )


FREE = Cost()


class RequestRecord(Struct, frozen=True):
    """A request that has ended.

    Attributes:
        at: When it arrived, in seconds since 1970.
        route: The endpoint's path.
        key_id: The id of the caller's key; empty: the router has no keys.
        team: The team of that key; empty: it has none.
        decision: The decision that admitted or refused it.
        error: The code of a refusal, or the kind of error; None: there was none.
        sla_met: Whether its own bounds on times were met; None: it had none, or its caller left before.
        kept_for: Why the record is kept.
        why_not: Why it failed or was refused after the decision, for operators; empty: it did not, or nothing tells.
        usage: What tiers computed of it; empty for callers without a key.
        cost: What its caller's budgets were charged; None: the caller has none.
        journey: Its way through the router, for its trace; None: not known.
    """

    at: float
    request_id: str
    trace_id: str
    route: str
    key_id: str
    team: str
    priority: Priority
    decision: Decision
    outcome: Outcome
    error: str | None
    served: Served
    tokens: Tokens
    times: Times
    sla_met: bool | None = None
    kept_for: KeptFor = KeptFor.RECENT
    why_not: str = ""
    usage: tuple[TierUsage, ...] = ()
    cost: Cost | None = None
    journey: Journey | None = None


def render_record(record: RequestRecord) -> dict[str, Any]:
    return {**render_summary(record), "tiers": render_estimates(record.decision)}


def render_summary(record: RequestRecord) -> dict[str, Any]:
    """Return a record as JSON values, without the reports on tiers. Predictions do not include the queue.

    This runs for every request: plain values are encoded four times as fast as enumerations and tiers' names, and
    ``int(x + 0.5)`` rounds four times as fast as ``round``.
    """
    decision = record.decision
    served = record.served
    tokens = record.tokens
    features = decision.query.features
    sla = decision.query.sla
    chosen = decision.chosen
    predicted_ttft_ms = None
    predicted_tpot_ms = None
    cost = None
    if chosen is not None:
        predicted_ttft_ms = chosen.predicted_ttft_ms
        predicted_tpot_ms = chosen.predicted_tpot_ms
        cost = _rounded(chosen.cost, 4)
    return {
        "at": int(record.at * 1000 + 0.5) / 1000,
        "request_id": record.request_id,
        "trace_id": record.trace_id,
        "route": record.route,
        "key": record.key_id,
        "priority": record.priority,
        "class": features.prompt_class._value_,
        "confidence": int(features.confidence * 1000 + 0.5) / 1000,
        "tier": _plain(decision.tier),
        "served_by": _plain(served.tier),
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
        "cache_written_tokens": tokens.cache_written,
        "output_tokens": tokens.output,
        "reasoning_tokens": tokens.reasoning,
        "tool_tokens": tokens.tool,
        **{
            name: ms and int(ms * 100 + 0.5) / 100
            for name, ms in asdict(record.times).items()
        },
        "predicted_ttft_ms": predicted_ttft_ms,
        "predicted_tpot_ms": predicted_tpot_ms,
        "sla": {
            "ttft_ms": sla.ttft_ms,
            "tpot_ms": sla.tpot_ms,
            "max_quality_loss": sla.max_quality_loss,
        },
        "sla_met": record.sla_met,
        "attempts_failed": served.attempts_failed,
        "continued_on": list(served.continued_on),
        "cost": cost,
    }


def _plain(tier: TierName | None) -> str | None:
    return None if tier is None else str(tier)


def _rounded(value: float | None, digits: int = 2) -> float | None:
    return None if value is None else round(value, digits)


def log_outcome(decisions: DecisionLog, record: RequestRecord) -> None:
    """Write to the decision log how a request ended, if an engine began to answer it."""
    if record.served.tier is None:
        return
    error = record.error
    if not error and record.outcome is Outcome.CLIENT_GONE:
        error = "CancelledError"
    decisions.ended(
        OutcomeRecord(
            request_id=record.request_id,
            tier=record.served.tier,
            prompt_tokens=record.tokens.prompt,
            output_tokens=record.tokens.output,
            ttft_ms=_rounded(record.times.ttft_ms),
            tpot_ms=_rounded(record.times.tpot_ms, 3),
            cached_tokens=record.tokens.cached,
            reasoning_tokens=record.tokens.reasoning,
            ttfa_ms=_rounded(record.times.ttfa_ms),
            error=error,
        )
    )
