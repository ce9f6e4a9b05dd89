"""A request's trace, made from its record when somebody opens it, and the attributes of its spans, exported or not.

Names are those of OpenTelemetry's semantic conventions where it has one, else ``qarr.*``. What is not known is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from classifier import PromptFeatures
from router.policy.decide import fallbacks
from router.policy.decision import Decision, TierEstimate
from router.policy.explain import verdict
from router.telemetry.record import (
    Hop,
    Journey,
    KeptFor,
    Outcome,
    RequestRecord,
    first_answer_token_at,
)
from tiers.formats import shown_quantization

KEY_ID = "qarr.key.id"  # A key's id is no secret.
# The GenAI conventions mean the one whose API is spoken.
PROVIDER = "vllm"
OVERFLOW_PROVIDER = "openai"
# Only operators may know where engines are.
FOR_OPERATORS = {"server.address", "server.port"}


def features_attributes(features: PromptFeatures) -> dict[str, Any]:
    attributes = {
        "qarr.class": features.prompt_class.value,
        "qarr.confidence": features.confidence,
        "qarr.contains_code": features.contains_code,
        "qarr.asks_for_code": features.asks_for_code,
        "qarr.prompt.tokens": features.tokens,
        "qarr.signals": list(features.signals),
        "qarr.language": features.language or None,
    }
    return without_unknown(attributes)


def decision_attributes(decision: Decision) -> dict[str, Any]:
    query = decision.query
    attributes: dict[str, Any] = {
        "qarr.reason": decision.reason,
        "qarr.basis": decision.basis.value,
        "qarr.degraded": list(decision.degraded),
        "qarr.class": query.features.prompt_class.value,
        "qarr.confidence": query.features.confidence,
        "qarr.prompt_tokens": query.prompt_tokens,
        "qarr.max_tokens": query.max_tokens,
        "qarr.fallbacks": list(fallbacks(decision)),
    }
    if decision.tier is not None and decision.precision is not None:
        attributes["qarr.tier"] = decision.tier
        attributes["qarr.precision"] = decision.precision
        attributes["qarr.quantization"] = shown_quantization(decision.precision)
    attributes |= {
        "qarr.refusal": decision.refusal_code,
        "qarr.hint": query.hint,
        "qarr.sla.ttft_ms": query.sla.ttft_ms,
        "qarr.sla.tpot_ms": query.sla.tpot_ms,
        "qarr.sla.max_quality_loss": query.sla.max_quality_loss,
        "qarr.truncated": query.truncated or None,
    }
    chosen = decision.chosen
    if chosen is not None:
        attributes["qarr.loss.expected"] = chosen.quality.loss.mean
        attributes["qarr.cost"] = chosen.rounded_cost
    return without_unknown(attributes)


def estimate_attributes(estimate: TierEstimate, verdict: str) -> dict[str, Any]:
    attributes = {
        "verdict": verdict,
        "state": estimate.state.value,
        "predicted_ttft_ms": estimate.predicted_ttft_ms,
        "predicted_tpot_ms": estimate.predicted_tpot_ms,
        "expected_loss": estimate.quality.loss.mean,
        "expected_loss_high": estimate.quality.loss.high,
        "cost": estimate.rounded_cost,
        "cached_prompt_tokens": estimate.cached_tokens,
    }
    return {
        f"qarr.{estimate.tier}.{name}": value
        for name, value in without_unknown(attributes).items()
    }


def outcome_attributes(record: RequestRecord) -> dict[str, Any]:
    served = record.served
    tokens = record.tokens
    times = record.times
    attempts_failed = None if served.tier is None else served.attempts_failed
    return without_unknown(
        {
            "qarr.outcome": record.outcome.value,
            "qarr.sla.met": record.sla_met,
            "error.type": record.error,
            "qarr.ttft_ms": times.ttft_ms,
            "qarr.ttfa_ms": times.ttfa_ms,
            "qarr.tpot_ms": times.tpot_ms,
            "qarr.queue_ms": times.queue_ms,
            "qarr.overhead_ms": times.overhead_ms,
            "qarr.served.tier": served.tier,
            "qarr.served.replica": served.replica,
            "qarr.attempts.failed": attempts_failed,
            "qarr.served.precision": served.precision,
            "qarr.served.quantization": _quantization(served.precision),
            "qarr.served.checkpoint": served.checkpoint,
            "qarr.overflow": served.overflow,
            "qarr.overflow.failure": served.overflow_failure,
            "qarr.prompt_tokens": tokens.prompt,
            "qarr.cached_prompt_tokens": tokens.predicted_cached,
            "qarr.reported_cached_tokens": tokens.cached,
            # Under the name gen_ai.usage, viewers would add these to the attempts' tokens.
            "qarr.output_tokens": tokens.output,
            "qarr.reasoning_tokens": tokens.reasoning,
            "qarr.tool_tokens": tokens.tool,
        }
    )


def _quantization(precision: str | None) -> str | None:
    return None if precision is None else shown_quantization(precision)


def hop_attributes(hop: Hop) -> dict[str, Any]:
    address = urlsplit(hop.url)
    default_port = 443 if address.scheme == "https" else 80
    provider = OVERFLOW_PROVIDER if hop.tier is None else PROVIDER
    attributes = {
        "gen_ai.operation.name": hop.operation,
        "gen_ai.request.model": hop.model,
        "gen_ai.output.type": "text",
        "gen_ai.provider.name": provider,
        "server.address": address.hostname or "",
        "server.port": address.port or default_port,
    }
    if hop.streamed:
        attributes["gen_ai.request.stream"] = True
    if hop.tier is None:
        return {**attributes, "qarr.overflow": hop.overflow}
    return {
        **attributes,
        "qarr.tier": hop.tier,
        "qarr.precision": hop.precision,
        "qarr.checkpoint": hop.checkpoint,
        "qarr.replica": hop.replica,
        "qarr.attempt": hop.number,
    }


def without_unknown(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


class UnknownTraceError(Exception):
    """No such trace is kept."""


def render_listed(record: RequestRecord) -> dict[str, Any]:
    return {
        "trace_id": record.trace_id,
        "name": f"POST {record.route}",
        "at": round(record.at, 3),
        "duration_ms": round(record.times.duration_ms, 3),
        "spans": len(list(spans_of(record))),
        "error": record.kept_for is KeptFor.ERROR,
        "kept_for": record.kept_for,
    }


def render_trace(records: Sequence[RequestRecord], *, inside: bool) -> dict[str, Any]:
    """Return a trace with its spans in the order of their starts, as JSON values; times in milliseconds from its start.

    Several requests may share a trace id, which callers choose. ``inside``: with attributes that are for operators alone.
    """
    first = min(records, key=lambda record: record.at)
    numbers = count(1)
    spans: list[dict[str, Any]] = []
    for record in records:
        spans += _numbered(
            list(spans_of(record)), numbers, later_ms=(record.at - first.at) * 1000
        )
    if not inside:
        for span in spans:
            _hide_engines(span)
    spans.sort(key=lambda span: span["start_ms"])
    ends_ms = [record.at * 1000 + record.times.duration_ms for record in records]
    return {
        "trace_id": first.trace_id,
        "at": round(first.at, 3),
        "duration_ms": round(max(ends_ms) - first.at * 1000, 3),
        "spans": spans,
    }


def _numbered(
    spans: list[dict[str, Any]], numbers: Iterator[int], *, later_ms: float
) -> list[dict[str, Any]]:
    """Give a request's spans their ids, the first one as the parent of the others, and shift them in time."""
    server_id = None
    for span in spans:
        span["span_id"] = f"{next(numbers):016x}"
        span["parent_id"] = server_id
        server_id = server_id or span["span_id"]
        span["start_ms"] = round(span["start_ms"] + later_ms, 3)
        for event in span["events"]:
            event["at_ms"] = round(event["at_ms"] + later_ms, 3)
    return spans


def _hide_engines(span: dict[str, Any]) -> None:
    span["attributes"] = {
        name: value
        for name, value in span["attributes"].items()
        if name not in FOR_OPERATORS
    }


def spans_of(record: RequestRecord) -> Iterator[dict[str, Any]]:
    """Yield a request's spans, the server span first; times in milliseconds from its arrival."""
    journey = record.journey
    attributes: dict[str, Any] = {
        "http.request.method": "POST",
        "http.route": record.route,
    }
    if record.key_id:
        attributes[KEY_ID] = record.key_id
    attributes |= decision_attributes(record.decision) | outcome_attributes(record)
    events = []
    if journey is not None:
        events = [
            _event(event.name, (event.at - journey.arrived) * 1000, event.attributes)
            for event in journey.events
        ]
    if record.outcome is Outcome.CLIENT_GONE:
        events.append(_event("qarr.client_gone", record.times.duration_ms, {}))
    yield _span(
        f"POST {record.route}",
        kind="server",
        start_ms=0.0,
        duration_ms=record.times.duration_ms,
        attributes=attributes,
        events=events,
        error=record.error,
    )
    if journey is not None:
        yield from _steps(record, journey)


def _steps(record: RequestRecord, journey: Journey) -> Iterator[dict[str, Any]]:
    """Yield the spans below the server span: classification, decision, waits in the queue, then the attempts."""

    def step(
        name: str, began: float, ended: float, *, attributes: dict[str, Any]
    ) -> dict[str, Any]:
        return _span(
            name,
            kind="internal",
            start_ms=(began - journey.arrived) * 1000,
            duration_ms=(ended - began) * 1000,
            attributes=attributes,
        )

    decision = record.decision
    route_attributes = decision_attributes(decision)
    for estimate in decision.comparison.estimates:
        route_attributes |= estimate_attributes(
            estimate, verdict(decision.comparison, estimate)
        )
    yield step(
        "classify",
        journey.began,
        journey.classified,
        attributes=features_attributes(decision.query.features),
    )
    yield step(
        "route", journey.classified, journey.decided, attributes=route_attributes
    )
    for began, ended in journey.waits:
        waited_ms = round((ended - began) * 1000, 3)
        yield step(
            "admission wait", began, ended, attributes={"qarr.waited_ms": waited_ms}
        )
    for hop in journey.hops:
        yield _hop_span(hop, journey.arrived, record.times.duration_ms)


def _hop_span(hop: Hop, arrived: float, duration_ms: float) -> dict[str, Any]:
    began_ms = (hop.began - arrived) * 1000
    ended_ms = duration_ms
    if hop.ended is not None:
        ended_ms = (hop.ended - arrived) * 1000
    error = hop.result.get("error.type")
    events = []
    if hop.first_token_at is not None:
        events.append(
            _event("qarr.first_token", (hop.first_token_at - arrived) * 1000, {})
        )
    answer_began_at = first_answer_token_at(hop)
    if answer_began_at is not None:
        events.append(
            _event("qarr.first_answer_token", (answer_began_at - arrived) * 1000, {})
        )
    if hop.message:
        exception = {"exception.type": error, "exception.message": hop.message}
        events.append(_event("exception", ended_ms, exception))
    return _span(
        f"{hop.operation} {hop.model}",
        kind="client",
        start_ms=began_ms,
        duration_ms=ended_ms - began_ms,
        attributes=hop_attributes(hop) | without_unknown(hop.result),
        events=events,
        error=error,
    )


def _span(
    name: str,
    *,
    kind: str,
    start_ms: float,
    duration_ms: float,
    attributes: dict[str, Any],
    events: Sequence[dict[str, Any]] = (),
    error: str | None = None,
) -> dict[str, Any]:
    return {
        "span_id": "",
        "parent_id": None,
        "name": name,
        "kind": kind,
        "start_ms": start_ms,
        "duration_ms": round(duration_ms, 3),
        "attributes": attributes,
        "events": list(events),
        "error": error,
    }


def _event(name: str, at_ms: float, attributes: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "at_ms": at_ms, "attributes": attributes}
