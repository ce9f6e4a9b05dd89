"""The last traces, in memory; and tail sampling of those that the sampler left out.

Every span is recorded. Spans that the sampler chose are exported as they end. Of the rest, a trace is exported as a whole
once its server span has ended and the request failed or missed its SLA. It has no spans of engines: they were told that the
trace is not sampled.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import (
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    format_span_id,
    format_trace_id,
    get_current_span,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import Span
    from opentelemetry.trace import Link, TraceState
    from opentelemetry.util.types import Attributes, AttributeValue

MOST_OPEN = 20_000  # traces whose server span has not ended; beyond this the oldest is forgotten
MOST_SPANS = 64  # of one trace
KEY_ID = "qarr.key.id"  # on a server span: the caller's key
# Engines' addresses and the router's file names are for operators.
INSIDE = {"server.address", "server.port", "exception.stacktrace"}


class UnknownTrace(Exception):
    """No such trace is kept."""


class KeptFor(StrEnum):
    """Why a trace is worth looking at."""

    RECENT = "recent"
    ERROR = "error"
    SLA_MISS = "sla_miss"


@dataclass(slots=True)
class Trace:
    """The spans of one trace, in the order of their ends. Only spans that outlive the server span come after it."""

    spans: list[ReadableSpan] = field(default_factory=list)
    kept_for: KeptFor = KeptFor.RECENT

    @property
    def root(self) -> ReadableSpan:
        """Return the span that all others are below."""
        return next((span for span in self.spans if _is_root(span)), self.spans[0])

    def seen_by(self, key_id: str) -> Trace | None:
        """Return what a key may see of the trace: its own requests' spans. None: it has no request in it.

        Callers choose trace ids, so requests of several keys may share a trace.
        """
        below: dict[int, list[ReadableSpan]] = {}
        for span in self.spans:
            if span.parent is not None and not _is_root(span):
                below.setdefault(span.parent.span_id, []).append(span)
        seen = [span for span in self.spans if _is_root(span) and (span.attributes or {}).get(KEY_ID) == key_id]
        for span in seen:  # grows as it is walked
            seen.extend(below.get(span.context.span_id, ()) if span.context is not None else ())
        return Trace([span for span in self.spans if span in seen], self.kept_for) if seen else None


class TokenBucket:
    """A rate limit: ``per_s`` a second, ``burst`` at once."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s, self._burst = per_s, burst
        self._left, self._at = float(burst), time.monotonic()

    def take(self) -> bool:
        """Take one; return False if none is left for now."""
        now = time.monotonic()
        self._left = min(self._left + (now - self._at) * self._per_s, float(self._burst))
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class RecordAll(Sampler):
    """Records what another sampler drops, so that it can be kept in memory, and exported if it ends badly.

    Args:
        root: The other sampler; it still chooses what is exported.
        allowance: Bounds the traces recorded of those that it drops; None: all of them are.
    """

    def __init__(self, root: Sampler, allowance: TokenBucket | None = None) -> None:
        self._root, self._allowance = root, allowance

    def should_sample(  # noqa: PLR0917  the library's signature
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Ask the other sampler. The SDK's own ``AlwaysRecordSampler`` loses the attributes of dropped spans."""
        found = self._root.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)
        if found.decision is not Decision.DROP:
            return found
        parent = get_current_span(parent_context)
        context = parent.get_span_context()
        inside = context.is_valid and not context.is_remote
        if not (parent.is_recording() if inside else self._allowance is None or self._allowance.take()):
            return found
        return SamplingResult(Decision.RECORD_ONLY, attributes, found.trace_state)

    def get_description(self) -> str:
        """Return both samplers' names."""
        return f"RecordAll{{{self._root.get_description()}}}"


DECIDED: ContextVar[tuple[int, SamplingResult] | None] = ContextVar("qarr_decided", default=None)


class Decided(Sampler):
    """Returns what was decided for the next span, with its trace id; of other spans another sampler decides."""

    def __init__(self, other: Sampler) -> None:
        self._other = other

    def should_sample(  # noqa: PLR0917  the library's signature
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Return the decision, with the span's attributes."""
        decided = DECIDED.get()
        if decided is None or decided[0] != trace_id:
            return self._other.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)
        DECIDED.set(None)
        return SamplingResult(decided[1].decision, attributes, decided[1].trace_state)

    def get_description(self) -> str:
        """Return the other sampler's description."""
        return self._other.get_description()


class DecidedIds(RandomIdGenerator):
    """Gives the next trace the id for which was decided."""

    def generate_trace_id(self) -> int:
        """Return an id."""
        decided = DECIDED.get()
        return super().generate_trace_id() if decided is None else decided[0]


class TraceStore(SpanProcessor):
    """Keeps the last traces in memory, and passes spans to an exporter.

    Args:
        kept: Number of traces kept; at most half of them, rounded up, are kept as failures.
        exporting: Gets the spans to export; None: none are.
        tail: Export failures and missed SLAs that the sampler left out.
    """

    def __init__(self, kept: int, exporting: SpanProcessor | None = None, *, tail: bool = True) -> None:
        self._kept, self._exporting, self._tail = kept, exporting, tail
        self._open: OrderedDict[int, Trace] = OrderedDict()
        self._recent: OrderedDict[int, Trace] = OrderedDict()
        self._failed: OrderedDict[int, Trace] = OrderedDict()

    @property
    def open(self) -> int:
        """Return the number of traces whose server span has not ended."""
        return len(self._open)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Open a trace with its root."""
        if self._exporting is not None:
            self._exporting.on_start(span, parent_context)
        if _is_root(span):
            self._open[span.context.trace_id] = Trace()
            if len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)

    def on_end(self, span: ReadableSpan) -> None:
        """Keep a span that has ended, and export it if the sampler chose it or its trace ended badly."""
        context = span.context
        assert context is not None
        if self._exporting is not None and context.trace_flags.sampled:
            self._exporting.on_end(span)
        if _is_root(span):
            trace = self._open.pop(context.trace_id, None) or Trace()
            trace.spans.append(span)
            if span.status.status_code is StatusCode.ERROR:
                trace.kept_for = KeptFor.ERROR
            self._keep(context.trace_id, trace)
            return
        found = self._open.get(context.trace_id) or self._find(context.trace_id)
        if found is not None and len(found.spans) < MOST_SPANS:
            found.spans.append(span)
            if context.trace_id not in self._open and found.kept_for is not KeptFor.RECENT:
                self._export_tail([span])

    def judge(self, trace_id: int, worth: KeptFor) -> None:
        """Note why a trace is worth keeping, also after its server span has ended."""
        if (trace := self._open.get(trace_id)) is not None:
            trace.kept_for = worth
        elif (trace := self._recent.pop(trace_id, None)) is not None:
            trace.kept_for = worth
            self._keep(trace_id, trace)

    def shutdown(self) -> None:
        """Export what is left."""
        if self._exporting is not None:
            self._exporting.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Export what is waiting."""
        return self._exporting is None or self._exporting.force_flush(timeout_millis)

    def recent(self) -> list[Trace]:
        """Return the kept traces, newest first."""
        both = {**self._failed, **self._recent}
        return sorted(both.values(), key=lambda trace: trace.root.start_time or 0, reverse=True)

    def find(self, trace_id: str) -> Trace | None:
        """Return a trace by its id in hexadecimal; None: it is not kept."""
        try:
            return self._find(int(trace_id, 16))
        except ValueError:
            return None

    def _find(self, trace_id: int) -> Trace | None:
        return self._recent.get(trace_id) or self._failed.get(trace_id)

    def _keep(self, trace_id: int, trace: Trace) -> None:
        """Keep a trace that has ended: failures apart, so that many good ones do not displace them."""
        if trace.kept_for is KeptFor.RECENT:
            kept, most = self._recent, self._kept - len(self._failed)
        else:
            self._export_tail(trace.spans)
            kept, most = self._failed, (self._kept + 1) // 2
        kept[trace_id] = trace
        while len(kept) > most:
            kept.popitem(last=False)

    def _export_tail(self, spans: list[ReadableSpan]) -> None:
        if self._exporting is None or not self._tail:
            return
        for span in spans:
            if span.context is not None and not span.context.trace_flags.sampled:
                self._exporting.on_end(_as_sampled(span, span.context))


def _is_root(span: ReadableSpan) -> bool:
    return span.parent is None or span.parent.is_remote


def _as_sampled(span: ReadableSpan, context: SpanContext) -> ReadableSpan:
    """Return a copy that is marked as sampled: exporters drop others."""
    flags = TraceFlags(context.trace_flags | TraceFlags.SAMPLED)
    return ReadableSpan(
        name=span.name,
        context=SpanContext(context.trace_id, context.span_id, context.is_remote, flags, context.trace_state),
        parent=span.parent,
        resource=span.resource,
        attributes=span.attributes,
        events=span.events,
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )


def render_listed(trace: Trace) -> dict[str, Any]:
    """Return a trace as one line of a list, as JSON values."""
    root = trace.root
    assert root.context is not None
    return {
        "trace_id": format_trace_id(root.context.trace_id),
        "name": root.name,
        "at": _ms(root.start_time) / 1000,
        "duration_ms": _ms(root.end_time) - _ms(root.start_time),
        "spans": len(trace.spans),
        "error": trace.kept_for is KeptFor.ERROR,
        "kept_for": trace.kept_for,
    }


def render_trace(trace: Trace, *, inside: bool) -> dict[str, Any]:
    """Return a trace with its spans in the order of their starts, as JSON values; times in milliseconds from its start.

    Args:
        trace: The trace.
        inside: With the attributes that are for operators alone.
    """
    root = trace.root
    assert root.context is not None
    start = root.start_time or 0
    spans = sorted(trace.spans, key=lambda span: (span.start_time or 0, span is not root))
    return {
        "trace_id": format_trace_id(root.context.trace_id),
        "at": _ms(root.start_time) / 1000,
        "duration_ms": _ms(root.end_time) - _ms(root.start_time),
        "spans": [_render_span(span, start, set() if inside else INSIDE) for span in spans],
    }


def _render_span(span: ReadableSpan, start: int, hidden: Collection[str]) -> dict[str, Any]:
    assert span.context is not None
    failed = span.status.status_code is StatusCode.ERROR
    cause = (span.attributes or {}).get("error.type")
    return {
        "span_id": format_span_id(span.context.span_id),
        "parent_id": format_span_id(span.parent.span_id) if span.parent is not None else None,
        "name": span.name,
        "kind": _KINDS.get(span.kind, "internal"),
        "start_ms": _ms((span.start_time or start) - start),
        "duration_ms": _ms((span.end_time or start) - (span.start_time or start)),
        "attributes": _render_attributes(span.attributes, hidden),
        "events": [
            {
                "name": event.name,
                "at_ms": _ms(event.timestamp - start),
                "attributes": _render_attributes(event.attributes, hidden),
            }
            for event in span.events
        ],
        "error": span.status.description or str(cause or "error") if failed or cause else None,
    }


def _render_attributes(attributes: Attributes, hidden: Collection[str]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in (attributes or {}).items() if name not in hidden}


_KINDS = {SpanKind.SERVER: "server", SpanKind.CLIENT: "client"}


def _ms(nanoseconds: int | None) -> float:
    return round((nanoseconds or 0) / 1e6, 3)


def _plain(value: AttributeValue) -> Any:
    return list(value) if isinstance(value, tuple) else value
