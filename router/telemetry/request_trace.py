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
from router.policy.decision import Decision, Estimate
from router.policy.explain import verdict
from router.telemetry.record import Hop, Journey, KeptFor, Outcome, RequestRecord

KEY_ID = "qarr.key.id"  # of the caller's key, which is no secret
PROVIDER, OVERFLOW_PROVIDER = "vllm", "openai"  # whose API is spoken, as the GenAI conventions mean it
INSIDE = {"server.address", "server.port"}  # where engines are: for operators


def features_attributes(features: PromptFeatures) -> dict[str, Any]:
    found = {
        "qarr.class": features.prompt_class.value,
        "qarr.confidence": features.confidence,
        "qarr.contains_code": features.contains_code,
        "qarr.asks_for_code": features.asks_for_code,
        "qarr.prompt.tokens": features.tokens,
        "qarr.signals": list(features.signals),
        "qarr.language": features.language or None,
    }
    return known(found)


def decision_attributes(decision: Decision) -> dict[str, Any]:
    query, chosen = decision.query, decision.chosen
    loss = chosen.loss if chosen is not None else None
    decided = decision.tier is not None and decision.precision is not None
    return known(
        {
            "qarr.reason": decision.reason,
            "qarr.basis": decision.basis.value,
            "qarr.degraded": list(decision.degraded),
            "qarr.class": query.features.prompt_class.value,
            "qarr.confidence": query.features.confidence,
            "qarr.prompt_tokens": query.prompt_tokens,
            "qarr.max_tokens": query.max_tokens,
            "qarr.fallbacks": list(fallbacks(decision)),
            "qarr.tier": decision.tier if decided else None,
            "qarr.precision": decision.precision if decided else None,
            "qarr.refusal": decision.refusal_code,
            "qarr.hint": query.hint,
            "qarr.sla.ttft_ms": query.sla.ttft_ms,
            "qarr.sla.tpot_ms": query.sla.tpot_ms,
            "qarr.sla.max_quality_loss": query.sla.max_quality_loss,
            "qarr.truncated": query.truncated or None,
            "qarr.loss.expected": loss.mean if loss is not None else None,
            "qarr.cost": round(chosen.cost, 4) if chosen is not None and chosen.cost is not None else None,
        }
    )


def estimate_attributes(estimate: Estimate, verdict: str) -> dict[str, Any]:
    found = {
        "verdict": verdict,
        "state": estimate.state.value,
        "predicted_ttft_ms": estimate.predicted_ttft_ms,
        "predicted_tpot_ms": estimate.predicted_tpot_ms,
        "expected_loss": estimate.loss.mean,
        "expected_loss_high": estimate.loss.high,
        "cost": estimate.rounded_cost,
        "cached_prompt_tokens": estimate.cached,
    }
    return {f"qarr.{estimate.tier}.{name}": value for name, value in known(found).items()}


def outcome_attributes(record: RequestRecord) -> dict[str, Any]:
    served, tokens, times = record.served, record.tokens, record.times
    return known(
        {
            "qarr.outcome": record.outcome.value,
            "qarr.sla.met": record.sla_met,
            "error.type": record.error,
            "qarr.ttft_ms": times.ttft_ms,
            "qarr.tpot_ms": times.tpot_ms,
            "qarr.queue_ms": times.queue_ms,
            "qarr.overhead_ms": times.overhead_ms,
            "qarr.served.tier": served.tier,
            "qarr.served.replica": served.replica,
            "qarr.attempts.failed": None if served.tier is None else served.attempts_failed,
            "qarr.served.precision": served.precision,
            "qarr.served.checkpoint": served.checkpoint,
            "qarr.overflow": served.overflow,
            "qarr.overflow.failure": served.overflow_failure,
            "qarr.prompt_tokens": tokens.prompt,
            "qarr.cached_prompt_tokens": tokens.predicted_cached,
            "qarr.reported_cached_tokens": tokens.cached,
            "qarr.output_tokens": tokens.output,  # not gen_ai.usage: viewers would add them to the attempts'
        }
    )


def hop_attributes(hop: Hop) -> dict[str, Any]:
    where = urlsplit(hop.url)
    attributes = {
        "gen_ai.operation.name": hop.operation,
        "gen_ai.request.model": hop.model,
        "gen_ai.output.type": "text",
        "gen_ai.provider.name": OVERFLOW_PROVIDER if hop.tier is None else PROVIDER,
        "server.address": where.hostname or "",
        "server.port": where.port or (443 if where.scheme == "https" else 80),
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


def known(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if value is not None}


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
    first, ids = min(records, key=lambda record: record.at), count(1)
    spans: list[dict[str, Any]] = []
    for record in records:
        later_ms, server = (record.at - first.at) * 1000, ""
        for span in spans_of(record):
            span["span_id"], span["parent_id"] = f"{next(ids):016x}", server or None
            server = server or span["span_id"]
            span["start_ms"] = round(span["start_ms"] + later_ms, 3)
            for event in span["events"]:
                event["at_ms"] = round(event["at_ms"] + later_ms, 3)
            spans.append(span)
    for span in spans if not inside else ():
        span["attributes"] = {name: value for name, value in span["attributes"].items() if name not in INSIDE}
    spans.sort(key=lambda span: span["start_ms"])
    return {
        "trace_id": first.trace_id,
        "at": round(first.at, 3),
        "duration_ms": round(
            max(record.at * 1000 + record.times.duration_ms for record in records) - first.at * 1000, 3
        ),
        "spans": spans,
    }


def spans_of(record: RequestRecord) -> Iterator[dict[str, Any]]:
    """Yield a request's spans, the server span first; times in milliseconds from its arrival."""
    decision, journey = record.decision, record.journey
    server: dict[str, Any] = {"http.request.method": "POST", "http.route": record.route}
    if record.key_id:
        server[KEY_ID] = record.key_id
    server |= decision_attributes(decision) | outcome_attributes(record)
    events = [_event(e.name, (e.at - journey.arrived) * 1000, e.attributes) for e in journey.events] if journey else []
    if record.outcome is Outcome.CLIENT_GONE:
        events.append(_event("qarr.client_gone", record.times.duration_ms, {}))
    yield _span(f"POST {record.route}", "server", 0.0, record.times.duration_ms, server, events, record.error)
    if journey is not None:
        yield from _steps(record, journey)


def _steps(record: RequestRecord, journey: Journey) -> Iterator[dict[str, Any]]:
    def step(name: str, began: float, ended: float, attributes: dict[str, Any]) -> dict[str, Any]:
        return _span(name, "internal", (began - journey.arrived) * 1000, (ended - began) * 1000, attributes, [], None)

    decision = record.decision
    of_tiers: dict[str, Any] = {}
    for each in decision.choice.estimates:
        of_tiers |= estimate_attributes(each, verdict(decision.choice, each))
    yield step("classify", journey.began, journey.classified, features_attributes(decision.query.features))
    yield step("route", journey.classified, journey.decided, decision_attributes(decision) | of_tiers)
    for began, ended in journey.waits:
        yield step("admission wait", began, ended, {"qarr.waited_ms": round((ended - began) * 1000, 3)})
    for hop in journey.hops:
        yield _hop_span(hop, journey.arrived, record.times.duration_ms)


def _hop_span(hop: Hop, arrived: float, duration_ms: float) -> dict[str, Any]:
    began_ms = (hop.began - arrived) * 1000
    ended_ms = duration_ms if hop.ended is None else (hop.ended - arrived) * 1000
    error = hop.result.get("error.type")
    events = []
    if hop.first_token_at is not None:
        events.append(_event("qarr.first_token", (hop.first_token_at - arrived) * 1000, {}))
    if hop.message:
        said = {"exception.type": error, "exception.message": hop.message}
        events.append(_event("exception", ended_ms, said))
    name, attributes = f"{hop.operation} {hop.model}", hop_attributes(hop) | known(hop.result)
    return _span(name, "client", began_ms, ended_ms - began_ms, attributes, events, error)


def _span(
    name: str, kind: str, start_ms: float, duration_ms: float, attributes: dict[str, Any], events: list[dict[str, Any]],
    error: str | None,
) -> dict[str, Any]:  # fmt: skip
    return {
        "span_id": "", "parent_id": None, "name": name, "kind": kind, "start_ms": start_ms,
        "duration_ms": round(duration_ms, 3), "attributes": attributes, "events": events, "error": error,
    }  # fmt: skip


def _event(name: str, at_ms: float, attributes: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "at_ms": at_ms, "attributes": attributes}
