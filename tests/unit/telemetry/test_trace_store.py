"""Traces in memory: which are kept, which are exported after the fact, and what of them a key may see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from router.telemetry import trace_store
from router.telemetry.trace_store import (
    KEY_ID,
    MOST_SPANS,
    KeptFor,
    RecordAll,
    TokenBucket,
    Trace,
    TraceStore,
    render_listed,
    render_trace,
)

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.sampling import Sampler
    from opentelemetry.trace import Span, Tracer


class Traced:
    """A store with a tracer that fills it, and what is exported."""

    def __init__(self, kept: int = 10, sampler: Sampler = ALWAYS_OFF, *, tail: bool = True) -> None:
        self.exporter = InMemorySpanExporter()
        self.store = TraceStore(kept, SimpleSpanProcessor(self.exporter), tail=tail)
        provider = TracerProvider(sampler=RecordAll(ParentBased(sampler)))
        provider.add_span_processor(self.store)
        self.tracer: Tracer = provider.get_tracer("test")

    def request(self, name: str = "POST /generate", worth: KeptFor = KeptFor.RECENT, *below: str) -> str:
        """Trace a request with some spans below its server span, and return its trace's id."""
        with self.tracer.start_as_current_span(name, kind=SpanKind.SERVER) as root:
            for each in below:
                self.tracer.start_span(each).end()
            if worth is not KeptFor.RECENT:
                self.store.judge(root.get_span_context().trace_id, worth)
        return id_of(root)

    @property
    def exported(self) -> list[str]:
        return [span.name for span in self.exporter.get_finished_spans()]


def id_of(span: Span) -> str:
    return f"{span.get_span_context().trace_id:032x}"


def parent(trace_id: int, *, sampled: bool) -> Context:
    """Return the context of a request whose caller traces it."""
    flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
    return trace.set_span_in_context(NonRecordingSpan(SpanContext(trace_id, 7, is_remote=True, trace_flags=flags)))


def test_what_the_sampler_chose_is_exported_as_it_ends_and_the_rest_when_it_ended_badly() -> None:
    """Once each, and a bad trace as a whole: its good parts too."""
    left_out = Traced()
    left_out.request("good", KeptFor.RECENT, "a")
    assert left_out.exported == []
    left_out.request("bad", KeptFor.ERROR, "b", "c")
    left_out.request("late", KeptFor.SLA_MISS)
    assert left_out.exported == ["b", "c", "bad", "late"]
    assert all(s.context and s.context.trace_flags.sampled for s in left_out.exporter.get_finished_spans())
    chosen = Traced(sampler=ALWAYS_ON)
    chosen.request("good", KeptFor.RECENT, "a")
    chosen.request("bad", KeptFor.ERROR, "b")
    assert chosen.exported == ["a", "good", "b", "bad"]


def test_without_the_switch_only_the_sampler_chooses() -> None:
    """Failures stay in memory, and are not exported."""
    traced = Traced(tail=False)
    failed = traced.request("bad", KeptFor.ERROR)
    found = traced.store.find(failed)
    assert found is not None
    assert (found.kept_for, traced.exported) == (KeptFor.ERROR, [])


def test_a_store_without_an_exporter_only_keeps() -> None:
    """It can be flushed and shut down all the same."""
    store = TraceStore(3)
    provider = TracerProvider(sampler=RecordAll(ALWAYS_OFF))
    provider.add_span_processor(store)
    with provider.get_tracer("test").start_as_current_span("root") as root:
        root.set_status(Status(StatusCode.ERROR, "broken"))
    assert [kept.kept_for for kept in store.recent()] == [KeptFor.ERROR]
    assert store.force_flush()
    store.shutdown()


def test_the_last_traces_are_kept_newest_first() -> None:
    """Neither the oldest good ones, nor more failures than half, are there in the end."""
    traced = Traced(kept=3)
    ids = [traced.request() for _ in range(5)]
    assert [id_of_kept(kept) for kept in traced.store.recent()] == ids[:1:-1]
    failed = [traced.request(worth=KeptFor.ERROR) for _ in range(3)]
    good = [traced.request() for _ in range(3)]
    assert [id_of_kept(kept) for kept in traced.store.recent()] == [good[2], failed[2], failed[1]]
    assert traced.store.find(failed[0]) is None


def test_nothing_is_kept_where_nothing_is_to_be_kept() -> None:
    """Failures are still exported: a router may have no page, and a viewer."""
    traced = Traced(kept=0)
    traced.request()
    traced.request("bad", KeptFor.ERROR)
    assert traced.store.recent() == []
    assert traced.exported == ["bad"]


def id_of_kept(kept: Trace) -> str:
    assert kept.root.context is not None
    return f"{kept.root.context.trace_id:032x}"


def test_a_request_that_fails_after_its_server_span_is_moved_to_the_failures() -> None:
    """As a resumable stream does; spans that end still later are exported as well."""
    traced = Traced()
    with traced.tracer.start_as_current_span("root") as root:
        late = traced.tracer.start_span("late")
        latest = traced.tracer.start_span("latest")
    late.end()
    assert traced.exported == []
    traced.store.judge(root.get_span_context().trace_id, KeptFor.ERROR)
    assert traced.exported == ["root", "late"]
    latest.end()
    assert traced.exported == ["root", "late", "latest"]
    found = traced.store.find(id_of(root))
    assert found is not None
    assert (found.root.name, len(found.spans), found.kept_for) == ("root", 3, KeptFor.ERROR)


def test_a_trace_that_is_not_kept_cannot_be_judged() -> None:
    """An id that nobody knows changes nothing."""
    traced = Traced()
    traced.store.judge(42, KeptFor.ERROR)
    assert traced.store.recent() == []


@pytest.mark.parametrize("trace_id", ["", "0", "not hexadecimal", "f" * 32, "f" * 400])
def test_ids_that_are_not_known_find_nothing(trace_id: str) -> None:
    """Whatever a caller asks for."""
    assert Traced().store.find(trace_id) is None


def test_a_trace_has_a_bounded_number_of_spans() -> None:
    """And its server span is among them."""
    traced = Traced()
    traced.request("root", KeptFor.RECENT, *(f"part {n}" for n in range(MOST_SPANS + 20)))
    (kept,) = traced.store.recent()
    assert (len(kept.spans), kept.root.name) == (MOST_SPANS + 1, "root")


def test_requests_that_never_end_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten while open, and still kept when it ends after all."""
    monkeypatch.setattr(trace_store, "MOST_OPEN", 2)
    traced = Traced()
    open_spans = [traced.tracer.start_span(f"open {n}") for n in range(3)]
    assert traced.store.open == 2
    for span in open_spans:
        span.end()
    assert traced.store.open == 0
    assert [kept.root.name for kept in traced.store.recent()] == ["open 2", "open 1", "open 0"]


def test_the_sampler_keeps_the_others_choice_and_records_the_rest() -> None:
    """A caller's choice too: a sampled parent is exported, one that is not is recorded with its attributes."""
    traced = Traced()
    for trace_id, sampled in ((1, True), (2, False)):
        span = traced.tracer.start_span("root", parent(trace_id, sampled=sampled), attributes={"a": 1})
        assert span.is_recording()
        assert span.get_span_context().trace_flags.sampled is sampled
        span.end()
    assert [dict(kept.root.attributes or {}) for kept in traced.store.recent()] == [{"a": 1}] * 2
    assert traced.exported == ["root"]


def test_the_allowance_is_of_traces_not_of_spans() -> None:
    """What is below a recorded span is recorded; what is below one that is not is neither recorded nor counted."""
    provider = TracerProvider(sampler=RecordAll(ALWAYS_OFF, TokenBucket(0, 1)))
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("first") as first:
        below = [tracer.start_span("below") for _ in range(3)]
    with tracer.start_as_current_span("second") as second:
        beside = tracer.start_span("beside")
    assert [span.is_recording() for span in (*below, second, beside)] == [True, True, True, False, False]
    assert id_of(first) != id_of(second)
    assert RecordAll(ALWAYS_OFF).get_description() == "RecordAll{AlwaysOffSampler}"


def test_tokens_come_back_with_time_up_to_the_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one more than allowed in any second, however long nothing was taken before."""
    now = 100.0
    monkeypatch.setattr("router.telemetry.trace_store.time.monotonic", lambda: now)
    bucket = TokenBucket(2, 3)
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]
    now += 0.49
    assert not bucket.take()
    now += 0.01
    assert [bucket.take(), bucket.take()] == [True, False]
    now += 1000
    assert [bucket.take() for _ in range(4)] == [True, True, True, False]


def test_a_key_sees_its_own_request_in_a_shared_trace() -> None:
    """With all that is below its own server span, and nothing of other keys' in the same trace."""
    traced = Traced()
    spans: list[ReadableSpan] = []
    for key in ("mine", "theirs"):
        with traced.tracer.start_as_current_span(f"POST of {key}", parent(5, sampled=False)) as root:
            root.set_attribute(KEY_ID, key)
            with traced.tracer.start_as_current_span(f"step of {key}"):
                traced.tracer.start_span(f"deeper of {key}").end()
        spans += traced.store.recent()[0].spans
    both = Trace(spans, KeptFor.ERROR)
    mine = both.seen_by("mine")
    assert mine is not None
    assert [span.name for span in mine.spans] == ["deeper of mine", "step of mine", "POST of mine"]
    assert mine.kept_for is KeptFor.ERROR
    assert both.seen_by("another") is None


def test_a_trace_without_a_key_is_of_no_key() -> None:
    """Requests without keys are for operators alone where keys exist, and the empty name opens none."""
    traced = Traced()
    traced.request()
    assert traced.store.recent()[0].seen_by("") is None


def test_a_trace_is_shown_by_the_order_of_starts() -> None:
    """Times from its start, kinds in words, the cause of an error; addresses for operators only."""
    traced = Traced()
    begin = 5_000_000_000
    root = traced.tracer.start_span("POST /generate", kind=SpanKind.SERVER, start_time=begin)
    context = trace.set_span_in_context(root)
    attributes = {"server.address": "10.0.0.5", "qarr.tier": "fast", "qarr.signals": ["a", "b"]}
    attempt = traced.tracer.start_span("chat m", context, SpanKind.CLIENT, attributes, start_time=begin + 2_000_000)
    attempt.add_event("first token", {"server.port": 80, "n": 1}, timestamp=begin + 3_500_000)
    attempt.set_attribute("error.type", "EngineFailed")
    attempt.end(begin + 9_000_000)
    root.end(begin + 10_000_000)
    (kept,) = traced.store.recent()
    listed = render_listed(kept)
    assert (listed["name"], listed["at"], listed["duration_ms"], listed["spans"]) == ("POST /generate", 5.0, 10.0, 2)
    assert (listed["error"], listed["kept_for"], listed["trace_id"]) == (False, "recent", id_of(root))
    first, second = render_trace(kept, inside=False)["spans"]
    assert (first["name"], first["kind"], first["parent_id"], first["error"]) == (
        "POST /generate",
        "server",
        None,
        None,
    )
    assert (second["start_ms"], second["duration_ms"], second["kind"]) == (2, 7, "client")
    assert second["parent_id"] == first["span_id"]
    assert second["error"] == "EngineFailed"
    assert second["attributes"] == {"qarr.tier": "fast", "qarr.signals": ["a", "b"], "error.type": "EngineFailed"}
    assert second["events"] == [{"name": "first token", "at_ms": 3.5, "attributes": {"n": 1}}]
    seen = render_trace(kept, inside=True)["spans"][1]
    assert seen["attributes"]["server.address"] == "10.0.0.5"
    assert seen["events"][0]["attributes"] == {"server.port": 80, "n": 1}
