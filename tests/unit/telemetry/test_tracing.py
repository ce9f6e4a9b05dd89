"""Spans of a request and where they go: what the environment says, and what an unsampled request does not cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import opentelemetry.environment_variables
import pytest
from opentelemetry import trace
from opentelemetry.sdk import environment_variables
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.trace import Span

from router.policy.decide import decide
from router.policy.decision import Sla
from router.telemetry.otel_environment import engine_target, resource_of
from router.telemetry.record import Hop, Journey, Outcome, RequestRecord
from router.telemetry.settings import TelemetrySettings
from router.telemetry.tracing import (
    ANSWERED,
    Telemetry,
    end_span,
    make_telemetry,
    server_span,
)
from tests.unit.policy.fleets import MEASURED, SCARCE, TABLE, fleet, query
from tests.unit.records import record
from tiers.spec import STANDARD_TIERS, OtlpTarget, ReplicaStatus

FAST, BALANCED, PRECISE = STANDARD_TIERS
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
TRACES_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
EXPORTER = "OTEL_TRACES_EXPORTER"
DISABLED = "OTEL_SDK_DISABLED"
ATTRIBUTES = "OTEL_RESOURCE_ATTRIBUTES"


class Untouchable:
    """Any use of it fails: what is passed to a request that is not traced must not be looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was computed for a span that records nothing")


def asked() -> Mapping[str, float]:
    return {"gen_ai.request.temperature": 0.5}


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        ENDPOINT,
        PROTOCOL,
        TRACES_ENDPOINT,
        TRACES_PROTOCOL,
        EXPORTER,
        DISABLED,
        ATTRIBUTES,
        "OTEL_SERVICE_NAME",
    ):
        monkeypatch.delenv(name, raising=False)


def telemetry(
    *, sampled: bool = True, prompts: bool = False
) -> tuple[Telemetry, InMemorySpanExporter, TracerProvider]:
    exporter = InMemorySpanExporter()
    root_sampler = ALWAYS_ON if sampled else ALWAYS_OFF
    provider = TracerProvider(sampler=ParentBased(root_sampler))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Telemetry(provider, record_prompts=prompts), exporter, provider


@contextmanager
def request_span(provider: TracerProvider) -> Iterator[Span]:
    with provider.get_tracer("server").start_as_current_span("POST") as span:
        yield span


def attributes(exporter: InMemorySpanExporter, name: str) -> dict[str, Any]:
    return dict(span_named(exporter, name).attributes or {})


def span_named(exporter: InMemorySpanExporter, name: str) -> ReadableSpan:
    (found,) = [span for span in exporter.get_finished_spans() if span.name == name]
    return found


@pytest.mark.parametrize(
    ("variables", "target"),
    [
        ({}, None),
        ({EXPORTER: "console"}, None),
        ({EXPORTER: "none", ENDPOINT: "http://c:1"}, None),
        ({ENDPOINT: "http://c:1", DISABLED: " TRUE "}, None),
        ({EXPORTER: "otlp"}, "http://localhost:4318/v1/traces"),
        ({EXPORTER: "otlp", PROTOCOL: "grpc"}, "http://localhost:4317"),
        ({ENDPOINT: "http://c:1/"}, "http://c:1/v1/traces"),
        ({ENDPOINT: "https://c"}, "https://c/v1/traces"),
        ({ENDPOINT: "http://c:1", TRACES_ENDPOINT: "http://d/own"}, "http://d/own"),
        ({ENDPOINT: "c:1", TRACES_PROTOCOL: "grpc", PROTOCOL: "http/protobuf"}, "c:1"),
        ({ENDPOINT: "http://[::1]:5", PROTOCOL: "grpc"}, "http://[::1]:5"),
    ],
)
def test_the_standard_variables_say_where_spans_go(
    variables: dict[str, str], target: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the router and its engines alike; a variable for traces goes before the general one."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = engine_target()
    assert (found and found.endpoint) == target
    if found is not None:
        expected = (
            variables.get(TRACES_PROTOCOL) or variables.get(PROTOCOL) or "http/protobuf"
        )
        assert found == OtlpTarget(found.endpoint, expected)


@pytest.mark.parametrize(
    ("variables", "service", "version"),
    [
        ({}, "qarr-router", "1.2"),
        ({"OTEL_SERVICE_NAME": "qarr-prod"}, "qarr-prod", "1.2"),
        ({ATTRIBUTES: "service.name=qarr-prod,service.version=7"}, "qarr-prod", "7"),
        (
            {ATTRIBUTES: "service.name=other", "OTEL_SERVICE_NAME": "qarr-prod"},
            "qarr-prod",
            "1.2",
        ),
        (
            {ATTRIBUTES: "service.name=,deployment.environment.name=prod"},
            "qarr-router",
            "1.2",
        ),
    ],
)
def test_the_environment_names_the_service(
    variables: dict[str, str],
    service: str,
    version: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By either variable, as the OpenTelemetry operator and charts do; its own goes before the general one."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    described = resource_of("1.2").attributes
    assert described["service.name"] == service
    assert described["service.version"] == version
    is_prod = "environment.name=prod" in variables.get(ATTRIBUTES, "")
    environment = "prod" if is_prod else None
    assert described.get("deployment.environment.name") == environment


def test_no_variable_of_opentelemetry_that_is_empty_stands_in_the_way() -> None:
    """Its specification equates empty with not set; its libraries fail at several."""
    names = {
        *vars(environment_variables),
        *vars(opentelemetry.environment_variables),
    }
    empty = {name: "" for name in names if name.startswith("OTEL_")}
    code = "from router.telemetry.tracing import make_telemetry as m; from router.telemetry.settings import *; "
    code += "print(m('0', TelemetrySettings()).exports)"
    env = {**os.environ, **empty, ENDPOINT: "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "True\n", done.stderr
    assert not done.stderr


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            {EXPORTER: "zipkin"},
            "OTEL_TRACES_EXPORTER is 'zipkin': allowed are otlp, console and none",
        ),
        (
            {PROTOCOL: "http/json"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json': allowed are",
        ),
        (
            {"OTEL_EXPORTER_OTLP_TIMEOUT": "soon", PROTOCOL: "grpc"},
            "(OTEL_EXPORTER_OTLP_TIMEOUT)",
        ),
        (
            {"OTEL_EXPORTER_OTLP_COMPRESSION": "Brotli", PROTOCOL: "grpc"},
            "(OTEL_EXPORTER_OTLP_COMPRESSION)",
        ),
        (
            {"OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "-7"},
            "(OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT)",
        ),
        ({"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "99999"}, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(
    variables: dict[str, str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in {ENDPOINT: "http://c", **variables}.items():
        monkeypatch.setenv(name, value)
    made = make_telemetry("0", TelemetrySettings())
    engine_target()
    (said,) = [
        entry
        for entry in caplog.records
        if entry.name == "qarr.router.telemetry.tracing"
    ]
    assert says in said.getMessage()
    assert said.exc_info is None
    assert not made.exports
    made.shutdown()


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ("a", True), ("A-b_9", True), ("x" * 128, True), ("x" * 129, False), ("", False), ("-_", False),
        ("with space", False), ("line\nbreak", False), ("\u00e9", False),
    ],
)  # fmt: skip
def test_a_callers_request_id_is_kept_where_it_is_harmless(
    asked: str, *, kept: bool
) -> None:
    """Else it gets a new one: ids are written to logs, headers and Redis."""
    own, _ = Telemetry(None).request_ids({b"x-request-id": asked.encode()})
    assert (own == asked) is kept
    assert own


@pytest.mark.parametrize(
    ("parent", "kept"),
    [
        (f"00-{'a' * 32}-{'b' * 16}-01", True),
        (f"00-{'0' * 32}-{'b' * 16}-01", False),
        (f"00-{'A' * 32}-{'b' * 16}-01", False),
        (f"00-{'a' * 31}-{'b' * 16}-01", False),
        (f"00-{'a' * 32}-01", False),
        ("", False),
    ],
)
def test_a_callers_trace_is_continued_where_it_is_one(
    parent: str, *, kept: bool
) -> None:
    """By W3C's rules; else a new trace id is given, which is never all zeros."""
    _, trace_id = Telemetry(None).request_ids({b"traceparent": parent.encode()})
    assert (trace_id == "a" * 32) is kept
    assert len(trace_id) == 32
    assert trace_id != "0" * 32


def test_the_servers_trace_goes_before_the_headers() -> None:
    made, _, provider = telemetry()
    with request_span(provider) as span:
        _, trace_id = made.request_ids(
            {b"traceparent": f"00-{'a' * 32}-{'b' * 16}-01".encode()}
        )
    assert trace_id == f"{span.get_span_context().trace_id:032x}"


@pytest.mark.parametrize("made_of", ["nothing", "a sampler that says no"])
def test_no_attribute_is_computed_for_a_request_that_is_not_traced(
    made_of: str,
) -> None:
    """Neither without tracing nor where the sampler said no."""
    made, exporter, provider = telemetry(sampled=False)
    if made_of == "nothing":
        made = Telemetry(None)
        provider = TracerProvider(sampler=ALWAYS_OFF)
    never: Any = Untouchable()
    with request_span(provider) as root:
        assert not root.is_recording()
        assert server_span() is None
        made.record_outcome(record(decision=never))
        hop = attempt(1)
        made.start(hop, never)
        assert hop.span is None
    assert exporter.get_finished_spans() == ()


def test_engines_are_told_of_a_trace_that_is_not_sampled() -> None:
    """By the server span's own context, marked as not sampled, so that they keep to the sampler's choice."""
    made, _, provider = telemetry(sampled=False)
    with request_span(provider) as root:
        hop = attempt(1)
        made.start(hop, asked)
        headers = dict(hop.headers)
    context = root.get_span_context()
    assert not context.trace_flags.sampled
    flags = f"{context.trace_flags:02x}"
    assert (
        headers[b"traceparent"].decode()
        == f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags}"
    )


def post_scope(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, Any]:
    """Return the ASGI scope of a request to /generate."""
    return {
        "type": "http",
        "method": "POST",
        "path": "/generate",
        "query_string": b"",
        "scheme": "http",
        "http_version": "1.1",
        "headers": list(headers),
        "server": ("127.0.0.1", 80),
    }


@pytest.mark.anyio
@pytest.mark.parametrize("parent", ["", f"00-{'a' * 32}-{'b' * 16}-01"])
@pytest.mark.parametrize("sampler", [ALWAYS_ON, ALWAYS_OFF])
async def test_the_sampler_decides_once_for_router_and_engines(
    sampler: Any, parent: str
) -> None:
    """A request that it drops has no span, and engines are told so, whatever the caller's own choice was.

    One that it takes has its route, status and key on its span.
    """
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    made = Telemetry(provider)
    passed: list[tuple[str, str]] = []

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        (_, trace_id) = made.request_ids({})
        ((name, value),) = made.context_headers(trace.get_current_span())
        assert name == b"traceparent"
        passed.append((trace_id, value.decode()))
        # bodies pass no middleware
        await send({"type": "http.response.start", "status": 503, "headers": []})
        scope[ANSWERED] = "/generate", 503, "k1"

    async def nothing(*_: Any) -> None: ...

    headers = [(b"traceparent", parent.encode())] if parent else []
    scope = {**post_scope(headers), "endpoint": app}
    await made.instrument(app)(scope, nothing, nothing)
    ((trace_id, header),) = passed
    assert header.split("-")[1] == trace_id
    assert not parent or trace_id == "a" * 32
    is_chosen = sampler is ALWAYS_ON
    flags = int(header[-2:], 16)
    assert bool(flags & trace.TraceFlags.SAMPLED) is is_chosen
    spans = exporter.get_finished_spans()
    trace_ids = [f"{span.context.trace_id:032x}" for span in spans if span.context]
    assert trace_ids == [trace_id] * is_chosen
    for span in spans:
        found = span.attributes or {}
        assert span.name == "POST /generate"
        assert span.status.status_code is trace.StatusCode.ERROR
        assert found["http.route"] == "/generate"
        assert found["http.response.status_code"] == 503
        assert found["qarr.key.id"] == "k1"


@pytest.mark.anyio
@pytest.mark.parametrize("sampler", [ALWAYS_ON, ALWAYS_OFF, None])
@pytest.mark.parametrize("parents", [0, 1, 2])
async def test_lines_of_baggage_and_trace_state_are_joined(
    sampler: Any, parents: int
) -> None:
    """In the order sent, sampled or not; two lines of ``traceparent`` are none, and then no trace state counts either."""
    provider = TracerProvider(sampler=sampler) if sampler else None
    made = Telemetry(provider)
    passed: list[dict[bytes, bytes]] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        headers = made.context_headers(trace.get_current_span())
        assert len(headers) == len(dict(headers))
        passed.append(dict(headers))
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def nothing(*_: Any) -> None: ...

    parent = f"00-{'a' * 32}-{'b' * 16}-01".encode()
    sent = [
        (b"baggage", b"user=ann"), *[(b"traceparent", parent)] * parents, (b"tracestate", b"a=1"),
        (b"x-request-id", b"r"), (b"baggage", b"tenant=acme,region=eu"), (b"tracestate", b"b=2"),
    ]  # fmt: skip
    scope = post_scope(sent)
    await made.instrument(app)(scope, nothing, nothing)
    (headers,) = passed
    is_continued = parents == 1
    trace_id = headers[b"traceparent"].split(b"-")[1]
    assert headers[b"baggage"] == b"user=ann,tenant=acme,region=eu"
    assert headers.get(b"tracestate") == (b"a=1,b=2" if is_continued else None)
    assert (trace_id == b"a" * 32) is is_continued
    assert (b"x-request-id", b"r") in scope["headers"]


def attempt(number: int) -> Hop:
    return Hop(
        "chat",
        "m",
        url="https://engine.example",
        began=0.0,
        tier=FAST,
        replica="fast-0",
        number=number,
    )


def test_an_attempt_has_its_own_span_and_engines_continue_it() -> None:
    """Under GenAI's names, with the default port of its address."""
    made, exporter, provider = telemetry()
    with request_span(provider):
        hop = attempt(2)
        made.start(hop, asked)
        span = hop.span
        headers = dict(hop.headers)
        assert span is not None
        end_span(hop, span, None)
        assert hop.span is None
    found = attributes(exporter, "chat m")
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.temperature"] == 0.5
    assert found["server.address"] == "engine.example"
    assert found["qarr.tier"] == "fast"
    assert found["qarr.attempt"] == 2
    assert found["gen_ai.provider.name"] == "vllm"
    assert found["gen_ai.request.stream"] is True
    context = span.get_span_context()
    assert context.trace_flags.sampled
    flags = f"{context.trace_flags:02x}"
    assert (
        headers[b"traceparent"].decode()
        == f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags}"
    )


def test_an_attempt_after_the_server_span_has_ended_is_still_traced() -> None:
    """A resumable stream goes on without its caller, and another engine may continue it then."""
    made, exporter, provider = telemetry()
    with request_span(provider) as root:
        root.end()
        hop = attempt(1)
        made.start(hop, asked)
        assert hop.span is not None
        end_span(hop, hop.span, None)
    assert exporter.get_finished_spans()[0].name == "POST"
    assert len(exporter.get_finished_spans()) == 2


def ended(prompt: str = "", **fields: Any) -> RequestRecord:
    journey = Journey(1.0, 1.0, classified=1.001, decided=1.002, prompt=prompt)
    return record(**fields, journey=journey)


def test_prompts_are_on_spans_only_where_that_is_switched_on() -> None:
    """As a message in the conventions' form, where a lone surrogate, which OTLP cannot hold, is replaced.

    The record that is kept has it no more.
    """
    message = {"role": "user", "parts": [{"type": "text", "content": "a?b \u20ac"}]}
    for prompts, expected in ((False, None), (True, [message])):
        made, exporter, provider = telemetry(prompts=prompts)
        with request_span(provider):
            assert made.record_prompts is prompts
            kept = ended("a\udc80b \u20ac" if prompts else "")
            made.record_outcome(kept)
        found = attributes(exporter, "classify")
        assert json.loads(found.get("gen_ai.input.messages", "null")) == expected
        assert found["qarr.class"] == "chat"
        assert found["qarr.prompt.tokens"] == 1
        assert "qarr.language" not in found
        assert kept.journey is not None
        assert not kept.journey.prompt


def test_a_decision_is_told_with_its_bounds_and_every_tiers_report() -> None:
    """What is not known is left out: a span has no null."""
    made, exporter, provider = telemetry()
    decision = decide(query(hint=FAST, sla=Sla(tpot_ms=1000)), fleet(), TABLE)
    with request_span(provider):
        made.record_outcome(ended(decision=decision))
    found = attributes(exporter, "POST")
    assert found["qarr.tier"] == "fast"
    assert found["qarr.hint"] == "fast"
    assert found["qarr.sla.tpot_ms"] == 1000
    assert found["qarr.fallbacks"] == ("balanced", "precise")
    assert {"qarr.sla.ttft_ms", "qarr.refusal"}.isdisjoint(found)
    found = attributes(exporter, "route")
    assert found["qarr.fast.verdict"] == "chosen"
    assert {f"qarr.{tier}.state" for tier in STANDARD_TIERS} < found.keys()


def test_a_decision_is_told_with_what_it_expects() -> None:
    """Loss and cost are those of the chosen tier."""
    made, exporter, provider = telemetry()
    decision = decide(query(), fleet(speeds=MEASURED), SCARCE)
    with request_span(provider):
        made.record_outcome(ended(decision=decision))
    found = attributes(exporter, "POST")
    assert found["qarr.loss.expected"] == 0.08
    assert found["qarr.cost"] == decision.estimate(FAST).rounded_cost


def test_a_refusal_has_no_tier() -> None:
    made, exporter, provider = telemetry()
    with request_span(provider):
        refused = decide(
            query(), fleet(dict.fromkeys(STANDARD_TIERS, ReplicaStatus.FAILED)), TABLE
        )
        made.record_outcome(ended(decision=refused, outcome=Outcome.REFUSED))
    found = attributes(exporter, "POST")
    assert found["qarr.refusal"] == "not_ready"
    assert {"qarr.tier", "qarr.precision", "qarr.hint"}.isdisjoint(found)


def test_shutting_down_exports_what_is_left() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    made = Telemetry(provider)
    with request_span(provider):
        pass
    made.shutdown()
    assert [span.name for span in exporter.get_finished_spans()] == ["POST"]
    Telemetry(None).shutdown()
