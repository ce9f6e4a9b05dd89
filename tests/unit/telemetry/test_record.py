"""What can be seen of requests: records, metrics, traces, and the live stream. All of it says the same, and no prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import (
    gen_ai_attributes,
    http_attributes,
    server_attributes,
)
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from router.telemetry.tracing import Telemetry, make_telemetry
from tests.unit.router_stack import Stack, router_stack
from tests.waiting import until
from tiers.spec import TierName

pytestmark = pytest.mark.anyio
SECRET = "Hello, how are you today, my treasure?"


async def get(stack: Stack, path: str) -> Any:
    answer = await stack.client.get(stack.url + path)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def record_of(stack: Stack, answer: httpx.Response) -> dict[str, Any]:
    request_id = answer.headers["x-request-id"]

    async def look() -> dict[str, Any] | None:
        records: list[dict[str, Any]] = (await get(stack, "/requests"))["requests"]
        return next(
            (record for record in records if record["request_id"] == request_id), None
        )

    record: dict[str, Any] = await until(look, f"the record of request {request_id}")
    return record


async def traces_with(stack: Stack, last: httpx.Response) -> list[dict[str, Any]]:
    """Return the traces that are kept, as soon as an answer's is among them: it ends just after the answer."""
    trace_id = last.headers["x-qarr-trace-id"]

    async def look() -> list[dict[str, Any]] | None:
        kept: list[dict[str, Any]] = (await get(stack, "/traces"))["traces"]
        if trace_id not in [trace["trace_id"] for trace in kept]:
            return None
        return kept

    traces: list[dict[str, Any]] = await until(look, f"the trace {trace_id}")
    return traces


async def trace_of(stack: Stack, answer: httpx.Response) -> dict[str, Any]:
    await traces_with(stack, answer)
    found: dict[str, Any] = await get(
        stack, f"/traces/{answer.headers['x-qarr-trace-id']}"
    )
    return found


async def samples(stack: Stack, name: str) -> dict[tuple[str, ...], float]:
    """Return a metric's samples but those at 0, by the values of their labels in the order of the labels' names."""
    page = (await stack.client.get(f"{stack.url}/metrics")).text
    values = {}
    for family in parse_text(page):
        for sample in family.samples:
            if sample.name == name and sample.value:
                label_values = [value for _, value in sorted(sample.labels.items())]
                values[tuple(label_values)] = sample.value
    return values


def traced() -> tuple[Telemetry, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Telemetry(provider), exporter


async def test_one_answer_is_told_alike_everywhere(tmp_path: Path) -> None:
    """Headers, record, metrics and trace agree on tier, tokens, times and ids; none has the prompt."""
    async with router_stack(tmp_path) as stack:
        answer = await stack.generate(
            prompt=SECRET, sla={"ttft_ms": 60_000}, priority="interactive"
        )
        record = await record_of(stack, answer)
        assert record["outcome"] == "ok"
        assert record["tier"] == "fast"
        assert record["served_by"] == "fast"
        assert answer.headers["x-qarr-tier"] == "fast"
        assert record["trace_id"] == answer.headers["x-qarr-trace-id"]
        assert record["reason"] == answer.headers["x-qarr-reason"]
        assert record["route"] == "/generate"
        assert record["priority"] == "interactive"
        assert record["basis"] == "degraded_unmeasured"
        assert record["prompt_tokens"] == 10
        assert record["output_tokens"] == 7
        assert 0 < record["overhead_ms"] <= record["ttft_ms"] <= record["duration_ms"]
        assert record["sla_met"] is True
        assert next(tier["verdict"] for tier in record["tiers"]) == "chosen"
        kind = record["class"]
        assert await samples(stack, "qarr_requests_total") == {(kind, "ok", "fast"): 1}
        assert await samples(stack, "qarr_output_tokens_total") == {(kind, "fast"): 7}
        assert await samples(stack, "qarr_sla_requests_total") == {
            (kind, "met", "fast"): 1
        }
        assert await samples(stack, "qarr_queue_wait_seconds_count") == {
            ("interactive",): 1
        }
        ttft_s = (await samples(stack, "qarr_time_to_first_token_seconds_sum"))[
            kind, "fast"
        ]
        assert ttft_s * 1000 == pytest.approx(record["ttft_ms"], abs=0.01)
        trace = await trace_of(stack, answer)
        spans = {span["name"]: span for span in trace["spans"]}
        assert [s["name"] for s in trace["spans"]] == [
            "POST /generate",
            "classify",
            "route",
            "chat fake",
        ]
        server = spans["POST /generate"]
        assert server["parent_id"] is None
        assert {s["parent_id"] for s in trace["spans"]} == {None, server["span_id"]}
        seen = server["attributes"]
        assert seen["qarr.outcome"] == "ok"
        assert seen["qarr.served.tier"] == "fast"
        assert seen["qarr.sla.met"] is True
        assert seen["qarr.ttft_ms"] == pytest.approx(record["ttft_ms"], abs=0.01)
        assert spans["route"]["attributes"]["qarr.fast.verdict"] == "chosen"
        assert [event["name"] for event in spans["chat fake"]["events"]] == [
            "qarr.first_token"
        ]
        for span in spans.values():
            end_ms = span["start_ms"] + span["duration_ms"]
            assert span["start_ms"] >= 0
            assert end_ms <= server["duration_ms"] + 1
        metrics = (await stack.client.get(f"{stack.url}/metrics")).text
        for text in (json.dumps(record), json.dumps(trace), metrics):
            assert "treasure" not in text
            assert "Paris" not in text


async def test_every_way_to_end_is_recorded(tmp_path: Path) -> None:
    """Refusals, failures, clients that go away, missed bounds: each has one record, one outcome, one count."""
    async with router_stack(tmp_path, {"admission": {"max_waiting": 0}}) as stack:
        refused = await stack.generate(
            max_tokens=4096, prompt="hi", tier="fast", tier_policy="require"
        )
        assert (await record_of(stack, refused))["error"] == "too_long"
        late = await stack.generate(sla={"ttft_ms": 0.001})
        assert (await record_of(stack, late))["sla_met"] is False
        for behaviour in stack.engines.values():
            behaviour.break_after = 2
        broken = await stack.generate(stream=True)
        record = await record_of(stack, broken)
        assert record["outcome"] == "error"
        assert record["error"] == "EngineBroke"
        for behaviour in stack.engines.values():
            behaviour.break_after = None
            behaviour.delay_s = 0.2
        async with stack.client.stream(
            "POST", f"{stack.url}/generate", json={"prompt": "hi"}
        ) as going:
            await anext(going.aiter_bytes())
        assert (await record_of(stack, going))["outcome"] == "client_gone"
        assert "qarr.client_gone" in await server_events(stack, going)
        requests = await samples(stack, "qarr_requests_total")
        assert sorted(outcome for _, outcome, _ in requests) == [
            "client_gone",
            "error",
            "ok",
            "refused",
        ]
        assert await samples(stack, "qarr_refusals_total") == {("too_long",): 1}
        assert sum((await samples(stack, "qarr_sla_requests_total")).values()) == 1
        totals = json.loads((await first_events(stack, "fleet"))[0])["totals"]
        assert totals["requests"] == 4
        for ending in ("ok", "refused", "errors", "client_gone"):
            assert totals[ending] == 1
        assert stack.leases() == 0


async def test_retries_and_continuations_are_counted_and_traced(tmp_path: Path) -> None:
    """An attempt that fails and an answer that another tier goes on with show as counts, as a chain, and as span events."""
    async with router_stack(tmp_path) as stack:
        stack.engines[next(iter(stack.engines))].status = 500
        answer = await stack.generate()
        record = await record_of(stack, answer)
        assert record["tier"] == "fast"
        assert record["served_by"] == "balanced"
        assert record["attempts_failed"] == 1
        assert await samples(stack, "qarr_upstream_failures_total") == {
            ("EngineFailed", "fast"): 1
        }
        assert (await samples(stack, "qarr_retries_total"))["balanced",] == 1
        assert "qarr.attempt_failed" in await server_events(stack, answer)
        fast = next(iter(stack.engines.values()))
        fast.status = 200
        fast.break_after = 3
        answer = await stack.generate(tier="fast")
        record = await record_of(stack, answer)
        assert record["outcome"] == "ok"
        (next_tier,) = record["continued_on"]  # whichever was measured to be cheaper
        assert await samples(stack, "qarr_continuations_total") == {
            ("fast", next_tier): 1
        }
        assert "qarr.continuation" in await server_events(stack, answer)
        # disturbed answers say nothing of it
        assert await samples(stack, "qarr_prediction_error_ratio_count") == {}


async def server_events(stack: Stack, answer: httpx.Response) -> list[str]:
    trace = await trace_of(stack, answer)
    return [event["name"] for event in trace["spans"][0]["events"]]


async def test_the_metrics_page_is_openmetrics_with_exemplars(tmp_path: Path) -> None:
    """Both formats parse; exemplars name a trace that is kept; names end as Prometheus wants them to."""
    async with router_stack(tmp_path) as stack:
        answer = await stack.generate()
        await record_of(stack, answer)
        assert (
            answer.headers["x-qarr-trace-id"]
            not in (await stack.client.get(f"{stack.url}/metrics")).text
        )
        accept = {
            "accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
        }
        page = await stack.client.get(f"{stack.url}/metrics", headers=accept)
        assert page.headers["content-type"].startswith("application/openmetrics-text")
        families = list(parse_openmetrics(page.text))
        exemplar_ids = set()
        for family in families:
            for sample in family.samples:
                if sample.exemplar:
                    exemplar_ids.add(sample.exemplar.labels["trace_id"])
        assert exemplar_ids == {answer.headers["x-qarr-trace-id"]}
        assert all(family.documentation for family in families)
        units = ("_seconds", "_ratio", "_tokens", "gen_ai_client_token_usage")
        for family in families:
            assert family.name.startswith(("qarr_", "process_", "gen_ai_"))
            assert family.type != "histogram" or family.name.endswith(units), (
                family.name
            )


async def test_labels_are_bounded(tmp_path: Path) -> None:
    """Whatever paths and methods clients invent, there are few series."""
    async with router_stack(tmp_path) as stack:
        for path in (
            "/no/such/a",
            "/no/such/b",
            "/traces/0123",
            "/traces/e",
            "/traces/traces",
            "/v1/models/auto",
            "/v1/models/fast",
        ):
            await stack.client.get(stack.url + path)
        for method in ("BREW", "PROPFIND", "GET"):
            await stack.client.request(method, f"{stack.url}/generate")
        series = await samples(stack, "qarr_http_requests_total")
        routes_and_codes = {(route, code) for code, _, route in series}
        assert routes_and_codes == {
            ("unknown", "404"),
            ("/traces/{trace_id}", "404"),
            ("/v1/models/{id}", "200"),
            ("/generate", "405"),
        }
        assert {method for _, method, _ in series} == {"GET", "other"}


async def events_of(live: httpx.Response) -> AsyncIterator[tuple[str, str]]:
    """Yield the events of the live stream, by kind and data."""
    kind = ""
    async for line in live.aiter_lines():
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, line.removeprefix("data: ")


async def first_events(stack: Stack, wanted_kind: str, count: int = 1) -> list[str]:
    """Return the data of the first events of a kind in the live stream."""
    first: list[str] = []
    async with stack.client.stream("GET", f"{stack.url}/live") as live:
        async for kind, data in events_of(live):
            if kind == wanted_kind:
                first.append(data)
                if len(first) == count:
                    break
    return first


async def test_the_live_stream_shows_requests_as_they_run_and_end(
    tmp_path: Path,
) -> None:
    """The fleet's picture has a request while it is open, with its tokens; its record follows; then the window has it."""
    async with router_stack(tmp_path) as stack:
        for behaviour in stack.engines.values():
            behaviour.delay_s = 0.4
        running = asyncio.create_task(stack.generate())
        open_now: list[dict[str, Any]] = []
        ended: dict[str, Any] | None = None
        async with stack.client.stream("GET", f"{stack.url}/live") as live:
            async for kind, text in events_of(live):
                data = json.loads(text)
                if kind == "request":
                    ended = data
                    continue
                open_now += data["in_flight"]
                tier = data["tiers"][0]
                if ended is not None and tier["requests"] == 1:
                    break
        answer = await running
        assert ended is not None
        assert ended["request_id"] == answer.headers["x-request-id"]
        open_ids = {request["request_id"] for request in open_now}
        assert open_ids == {ended["request_id"]}
        assert open_now[-1]["state"] == "decode"
        assert 0 < open_now[-1]["output_tokens"] <= 7
        expected_ms = pytest.approx(ended["ttft_ms"], abs=0.01)
        assert tier["ttft_ms"]["p50"] == expected_ms
        assert tier["ttft_ms"]["p95"] == expected_ms
        assert tier["replicas"][0]["tokens_per_s"] >= 0


async def test_an_answer_that_another_tier_goes_on_with_is_shown_there(
    tmp_path: Path,
) -> None:
    """The picture moves with it; the record names both tiers."""
    async with router_stack(tmp_path) as stack:
        stack.engines[TierName.FAST].break_after = 2
        stack.engines[TierName.BALANCED].delay_s = 0.5
        running = asyncio.create_task(stack.generate(tier="fast", max_tokens=64))
        await until(
            lambda: any(
                request.now_on is not request.answer
                for request in stack.pipeline.registry.open
            )
        )
        (shown,) = json.loads((await first_events(stack, "fleet", 2))[-1])["in_flight"]
        assert shown["tier"] == "balanced"
        assert shown["replica"] == "balanced-0"
        assert shown["state"] == "decode"
        record = await record_of(stack, await running)
        assert record["served_by"] == "fast"
        assert record["continued_on"] == ["balanced"]


async def test_questions_about_the_past_have_clear_answers(tmp_path: Path) -> None:
    """Unknown traces are problems that say what to set; lists are newest first."""
    async with router_stack(tmp_path, {"telemetry": {"recent_requests": 2}}) as stack:
        answers = [await stack.generate() for _ in range(3)]
        await record_of(stack, answers[-1])
        newest, second, _ = reversed(answers)
        requests = (await get(stack, "/requests"))["requests"]
        assert [request["request_id"] for request in requests] == [
            newest.headers["x-request-id"],
            second.headers["x-request-id"],
        ]
        traces = await traces_with(stack, second)
        assert [trace["trace_id"] for trace in traces] == [
            newest.headers["x-qarr-trace-id"],
            second.headers["x-qarr-trace-id"],
        ]
        gone = await stack.client.get(f"{stack.url}/traces/{'0' * 31}1")
        assert gone.status_code == 404
        assert "its own last requests" in gone.json()["detail"]
        # unless the settings say otherwise
        assert (await get(stack, "/policy"))["max_loss"] == {}


async def test_good_requests_do_not_displace_those_that_went_badly(
    tmp_path: Path,
) -> None:
    """As many of them are kept besides, the last ones, and each of them has its trace."""
    async with router_stack(tmp_path, {"telemetry": {"recent_requests": 2}}) as stack:
        late = [await stack.generate(sla={"ttft_ms": 0.001}) for _ in range(3)]
        refused = await stack.generate(
            max_tokens=4096, prompt="hi", tier="fast", tier_policy="require"
        )
        good = [await stack.generate() for _ in range(3)]
        await record_of(stack, good[-1])
        kept = (good[2], good[1], refused, late[2])
        kept_ids = [answer.headers["x-qarr-trace-id"] for answer in kept]
        listed = (await get(stack, "/traces"))["traces"]
        assert [trace["trace_id"] for trace in listed] == kept_ids
        reasons = [trace["kept_for"] for trace in listed]
        assert reasons == ["recent", "recent", "error", "sla_miss"]
        requests = (await get(stack, "/requests"))["requests"]
        assert [request["trace_id"] for request in requests] == kept_ids
        (server, *steps) = (await trace_of(stack, refused))["spans"]
        assert server["error"] == "too_long"
        assert server["attributes"]["qarr.refusal"] == "too_long"
        assert [step["name"] for step in steps] == ["classify", "route"]
        assert "exceed its context" in steps[1]["attributes"]["qarr.fast.verdict"]


async def test_a_decision_that_nothing_follows_from_is_not_traced(
    tmp_path: Path,
) -> None:
    """The page asks for one with every pause in somebody's typing; it would push out what was served."""
    async with router_stack(tmp_path) as stack:
        for _ in range(3):
            asked = await stack.client.post(f"{stack.url}/route", json={"prompt": "hi"})
            assert len(asked.headers["x-qarr-trace-id"]) == 32
        answer = await stack.generate()
        traces = await traces_with(stack, answer)
        assert [t["name"] for t in traces] == ["POST /generate"]


def spoil_engines(stack: Stack, fault: str) -> None:
    """Let the engines fail: the fast one at once (``status``) or midway (``break``), or all of them (``everything``)."""
    fast = stack.engines[TierName.FAST]
    if fault == "status":
        fast.status = 500
    elif fault == "break":
        fast.break_after = 3
    elif fault == "everything":
        for behaviour in stack.engines.values():
            behaviour.status = 500


def assert_is_same_span(shown: dict[str, Any], exported: ReadableSpan) -> None:
    """Assert that a span on the page says nothing but what its exported one says."""
    exported_attributes = json.loads(json.dumps(dict(exported.attributes or {})))
    for name, value in shown["attributes"].items():
        assert exported_attributes.get(name) == value
    assert shown["name"] == exported.name
    assert shown["kind"] == exported.kind.name.lower()
    assert shown["error"] == exported_attributes.get("error.type")
    shown_events = {event["name"] for event in shown["events"]}
    assert shown_events <= {event.name for event in exported.events}
    assert bool(shown["parent_id"]) is bool(exported.parent)


@pytest.mark.parametrize("fault", ["none", "status", "break", "everything"])
async def test_the_page_shows_the_spans_that_are_exported(
    tmp_path: Path, fault: str
) -> None:
    """The same tree: names, kinds, errors and events, and no attribute's name or value that is not exported as well."""
    telemetry, exporter = traced()
    async with router_stack(tmp_path, tracing=telemetry) as stack:
        spoil_engines(stack, fault)
        answer = await stack.generate(tier="fast")
        shown = (await trace_of(stack, answer))["spans"]
        await until(
            lambda: any(
                span.name == "POST /generate" for span in exporter.get_finished_spans()
            )
        )
    exported = sorted(
        exporter.get_finished_spans(), key=lambda span: span.start_time or 0
    )
    assert [span["name"] for span in shown] == [span.name for span in exported]
    for shown_span, exported_span in zip(shown, exported, strict=True):
        assert_is_same_span(shown_span, exported_span)
    failures = {"none": 0, "status": 1, "break": 1, "everything": len(stack.engines)}
    attempts = [span for span in shown if span["kind"] == "client"]
    failed_attempts = [span for span in attempts if span["error"]]
    assert len(failed_attempts) == failures[fault]


async def test_a_wait_in_the_queue_is_on_the_trace(tmp_path: Path) -> None:
    """Between the decision and the engine, as long as the record says."""
    names = ("fast", "balanced", "precise")
    async with router_stack(
        tmp_path, {"tiers": {name: {"max_in_flight": 1} for name in names}}
    ) as stack:
        for behaviour in stack.engines.values():
            behaviour.delay_s = 0.1
        held = [asyncio.create_task(stack.generate(tier=name)) for name in names]
        await until(
            lambda: all(behaviour.running for behaviour in stack.engines.values())
        )
        waited = await stack.generate()
        record = await record_of(stack, waited)
        spans = (await trace_of(stack, waited))["spans"]
        await asyncio.gather(*held)
    assert [span["name"] for span in spans] == [
        "POST /generate",
        "classify",
        "route",
        "admission wait",
        "chat fake",
    ]
    assert record["queue_ms"] > 0
    # The record counts until the slot is granted, the span until the request goes on: later on a busy machine.
    assert spans[3]["duration_ms"] == pytest.approx(record["queue_ms"], rel=0.5)
    assert spans[3]["start_ms"] + spans[3]["duration_ms"] <= spans[4]["start_ms"]


async def test_requests_that_share_a_trace_are_shown_together(tmp_path: Path) -> None:
    """Callers choose trace ids. The second request's spans come after the first one's, below their own server span."""
    async with router_stack(tmp_path) as stack:
        given = {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}
        for _ in range(2):
            answer = await stack.client.post(
                f"{stack.url}/generate", json={"prompt": "hi"}, headers=given
            )
            await record_of(stack, answer)
        trace = await trace_of(stack, answer)
    first, second = (span for span in trace["spans"] if span["kind"] == "server")
    assert first["start_ms"] == 0 < second["start_ms"] < trace["duration_ms"]
    below = [span["parent_id"] for span in trace["spans"] if span["parent_id"]]
    assert below == [first["span_id"]] * 3 + [second["span_id"]] * 3


async def test_a_resumable_stream_that_fails_late_is_kept_too(tmp_path: Path) -> None:
    """Its engine may break after its connection, and with it the server span, has ended."""
    async with router_stack(tmp_path) as stack:
        for behaviour in stack.engines.values():
            behaviour.break_after = 5
            behaviour.delay_s = 0.1
        async with stack.client.stream(
            "POST", f"{stack.url}/generate", json={"prompt": "hi", "resumable": True}
        ) as left:
            await anext(left.aiter_bytes())
        record = await record_of(stack, left)
        assert record["outcome"] == "error"
        assert (await traces_with(stack, left))[0]["kept_for"] == "error"


async def test_an_answer_names_its_trace_at_the_viewer(tmp_path: Path) -> None:
    url = "http://viewer.example/t/{trace_id}"
    async with router_stack(tmp_path, {"telemetry": {"trace_url": url}}) as stack:
        answer = await stack.generate()
        there = url.replace("{trace_id}", answer.headers["x-qarr-trace-id"])
        assert answer.headers["x-qarr-trace-url"] == there
        await record_of(stack, answer)
        assert (await trace_of(stack, answer))["trace_url"] == there


def test_names_are_those_of_the_conventions() -> None:
    """Every gen_ai, http and server attribute that the telemetry module writes is in the installed conventions."""
    import inspect
    import re

    from router.telemetry import request_trace, tracing
    from router.upstream import engine_stream, upstream

    constants: dict[str, Any] = {}
    for module in (gen_ai_attributes, http_attributes, server_attributes):
        constants |= vars(module)
    known = {value for name, value in constants.items() if name.isupper()}
    source = "".join(
        map(inspect.getsource, (request_trace, tracing, upstream, engine_stream))
    )
    used = set(re.findall(r'"((?:gen_ai|http|server)\.[a-z_.]+)"', source))
    assert len(used) > 10
    assert used <= known


async def test_engines_get_the_callers_trace_or_a_new_one(tmp_path: Path) -> None:
    """Without an exporter too: engines may export by themselves, where the caller has its trace sampled."""
    async with router_stack(tmp_path) as stack:
        answer = await stack.generate(tier="fast")
        told = stack.engines[TierName.FAST].headers[-1]["traceparent"].split("-")
        assert told[1] == answer.headers["x-qarr-trace-id"]
        assert told[3] == "00"
        given = f"00-{'1' * 32}-{'2' * 16}-01"
        body = {"prompt": "hi", "tier": "fast", "stream": False}
        own = await stack.client.post(
            f"{stack.url}/generate", json=body, headers={"traceparent": given}
        )
        assert own.headers["x-qarr-trace-id"] == "1" * 32
        assert stack.engines[TierName.FAST].headers[-1]["traceparent"] == given


async def test_the_documented_metrics_are_those_of_the_page(tmp_path: Path) -> None:
    """Each family on the page is in the table, and the other way round."""
    import re

    from router.section import PROJECT

    table = (PROJECT / "docs/observing.md").read_text().partition("## Metrics")[2]
    documented = set(
        re.findall(
            r"`((?:qarr|process)_[a-z_]+|gen_ai_(?:client|server)_[a-z_]+)`", table
        )
    )
    documented -= {"qarr_tier"}  # a label
    async with router_stack(tmp_path) as stack:
        page = (await stack.client.get(f"{stack.url}/metrics")).text
    served = {
        line.split()[2] for line in page.splitlines() if line.startswith("# TYPE ")
    }
    only_with_tls = "qarr_tls_expires_timestamp_seconds"  # test_tls.py looks for it
    only_with_redis = {
        f"qarr_redis_{name}"
        for name in ("serves", "failures_total", "budgets_restored_total")
    }
    assert served | {only_with_tls} | only_with_redis == documented


async def test_the_standard_variables_choose_what_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampler that takes nothing but what its caller has sampled, set by the environment: over OTLP comes all of that."""
    from router.telemetry.settings import TelemetrySettings
    from tests.engine.collector import Collector

    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.start())
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    telemetry = make_telemetry("0", TelemetrySettings())
    try:
        async with router_stack(tmp_path, tracing=telemetry) as stack:
            await stack.generate()
            body = {"prompt": "hi", "stream": False}
            given = f"00-{'1' * 32}-{'2' * 16}-01"
            sampled = await stack.client.post(
                f"{stack.url}/generate", json=body, headers={"traceparent": given}
            )
            assert sampled.status_code == 200
            assert sampled.headers["x-qarr-trace-id"] == "1" * 32
        await asyncio.to_thread(telemetry.shutdown)
    finally:
        collector.close()
    assert {span.trace_id for span in collector.spans} == {"1" * 32}
    (server,) = (span for span in collector.spans if span.name == "POST /generate")
    assert server.attributes["http.response.status_code"] == 200
    assert sorted(span.name for span in collector.spans) == [
        "POST /generate",
        "chat fake",
        "classify",
        "route",
    ]
    assert {span.service for span in collector.spans} == {"qarr-router"}
