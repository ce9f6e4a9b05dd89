"""One request is one trace, from the router to inside vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import TYPE_CHECKING, Any

import httpx

from router.section import PROJECT
from tests.ports import reserved_ports
from tests.waiting import call_within

if TYPE_CHECKING:
    from tests.engine.conftest import Up

SPANS = 5


def test_one_trace_with_the_right_parents(up: Up) -> None:
    """The collector gets the server span, classify, route, the attempt, and vLLM's llm_request below the attempt."""
    answer = up.generate(
        tier="fast", prompt="What is the capital of France? Be secretive."
    )
    trace = up.collector.trace(answer.headers["x-qarr-trace-id"], until=SPANS)
    by_name = {span.name: span for span in trace}
    assert len(trace) == SPANS, sorted(by_name)
    server = by_name["POST /generate"]
    attempt = by_name["chat smollm2-135m-instruct"]
    engine = by_name["llm_request"]
    assert server.parent == ""
    assert by_name["classify"].parent == server.span_id
    assert by_name["route"].parent == server.span_id
    assert attempt.parent == server.span_id
    assert engine.parent == attempt.span_id
    assert server.service == "qarr-router"
    assert engine.service == "vllm-fast"
    assert server.attributes["http.route"] == "/generate"
    assert server.attributes["qarr.tier"] == attempt.attributes["qarr.tier"] == "fast"
    assert attempt.attributes["gen_ai.operation.name"] == "chat"
    assert attempt.attributes["gen_ai.usage.output_tokens"] > 0
    assert not [span for span in trace if "secretive" in repr(span)], (
        "a prompt is on a span though that is not switched on"
    )


def test_the_callers_trace_is_continued(up: Up) -> None:
    """A traceparent of the caller is the parent of the server span, and the answer names its trace id."""
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    span_id = "00f067aa0ba902b7"
    body = {"prompt": "hi", "max_tokens": 2}
    headers = {"traceparent": f"00-{trace_id}-{span_id}-01"}
    answer = httpx.post(
        f"{up.url}/generate", json=body, headers=headers, timeout=60, trust_env=False
    )
    assert answer.headers["x-qarr-trace-id"] == trace_id
    trace = up.collector.trace(trace_id, until=SPANS)
    (server,) = [span for span in trace if span.name == "POST /generate"]
    assert server.parent == span_id


def test_openais_endpoint_is_traced_alike(up: Up) -> None:
    """There are the same five spans; a refused request leaves neither its prompt nor the engine's words on any span."""
    messages = [{"role": "user", "content": "Be secretive."}]
    chat = {"model": "fast", "messages": messages, "max_tokens": 2, "min_tokens": 2}
    key = {"authorization": "Bearer qarr-not-for-traces"}
    answer = httpx.post(
        f"{up.url}/v1/chat/completions",
        json=chat,
        headers=key,
        timeout=60,
        trust_env=False,
    )
    trace = up.collector.trace(answer.headers["x-qarr-trace-id"], until=SPANS)
    by_name = {span.name: span for span in trace}
    attempt = by_name["chat smollm2-135m-instruct"]
    assert attempt.parent == by_name["POST /v1/chat/completions"].span_id
    assert by_name["llm_request"].parent == attempt.span_id
    assert attempt.attributes["gen_ai.request.max_tokens"] == 2
    assert attempt.attributes["gen_ai.usage.output_tokens"] == 2
    wrong = {**chat, "max_tokens": "secretive"}
    refused = httpx.post(
        f"{up.url}/v1/chat/completions", json=wrong, timeout=60, trust_env=False
    )
    assert refused.status_code == 400
    # The engine quotes what it was sent.
    assert "secretive" in refused.text
    more = up.collector.trace(refused.headers["x-qarr-trace-id"], until=4)
    assert "EngineRefused" in repr(more)
    assert "secretive" not in repr([*trace, *more])
    assert "not-for-traces" not in repr([*trace, *more])


def test_the_viewer_shows_the_whole_trace(up: Up) -> None:
    """The viewer of ``make up TRACES=1`` takes the router's and the engine's spans and returns them as one tree."""
    (port,) = reserved_ports()
    # The command that the script runs beside the viewer ends when its standard input does.
    argv = ["scripts/traces", "sh", "-c", 'echo "$QARR_TELEMETRY__TRACE_URL"; cat']
    env = {**os.environ, "TRACES_PORT": str(port)}
    viewer = subprocess.Popen(
        argv,
        cwd=PROJECT,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert viewer.stdin is not None
    assert viewer.stdout is not None
    try:
        link = call_within(viewer.stdout.readline, "the viewer's address").strip()
        assert link == f"http://127.0.0.1:{port}/?trace={{trace_id}}"
        up.collector.viewer = f"http://127.0.0.1:{port}"
        answer = up.generate(
            tier="fast", prompt="What is the capital of France? Be secretive."
        )
        trace_id = answer.headers["x-qarr-trace-id"]
        up.collector.trace(trace_id, until=SPANS)
        shown = _viewed(f"http://127.0.0.1:{port}/api/traces/{trace_id}", SPANS)
        page = httpx.get(link.replace("{trace_id}", trace_id), trust_env=False)
        assert page.status_code == 200
    finally:
        up.collector.viewer = None
        viewer.stdin.close()
        viewer.wait(30)
        viewer.stdout.close()
    parents = {event["span_id"]: event["parent_span_id"] for event in shown["events"]}
    assert len(parents) == SPANS
    (root,) = (span for span, parent in parents.items() if parent is None)
    attempt = next(parent for parent in parents.values() if parent not in {None, root})
    # vLLM's own span lies below the attempt.
    assert parents[attempt] == root
    assert "secretive" not in json.dumps(shown)


def _viewed(url: str, spans: int) -> dict[str, Any]:
    """Return a trace from the viewer's API, once it has so many spans."""
    deadline = time.monotonic() + 30
    while True:
        answer = httpx.get(url, trust_env=False)
        shown: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
        if len({event["span_id"] for event in shown.get("events", ())}) >= spans:
            return shown
        assert time.monotonic() < deadline, shown
        time.sleep(0.2)
