"""One request is one trace, from the router to inside vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.engine.conftest import Up

SPANS = 5


def test_one_trace_with_the_right_parents(up: Up) -> None:
    """The collector gets the server span, classify, route, the attempt, and vLLM's llm_request below the attempt."""
    answer = up.generate(tier="fast", prompt="What is the capital of France? Be secretive.")
    trace = up.collector.trace(answer.headers["x-qarr-trace-id"], until=SPANS)
    by_name = {span.name: span for span in trace}
    assert len(trace) == SPANS, sorted(by_name)
    server, attempt, engine = by_name["POST /generate"], by_name["chat smollm2-135m-instruct"], by_name["llm_request"]
    assert server.parent == ""
    assert {by_name[n].parent for n in ("classify", "route")} == {server.span_id}
    assert attempt.parent == server.span_id
    assert engine.parent == attempt.span_id
    assert (server.service, engine.service) == ("qarr-router", "vllm-fast")
    assert server.attributes["http.route"] == "/generate"
    assert server.attributes["qarr.tier"] == attempt.attributes["qarr.tier"] == "fast"
    assert attempt.attributes["gen_ai.operation.name"] == "chat"
    assert attempt.attributes["gen_ai.usage.output_tokens"] > 0
    assert not [s for s in trace if "secretive" in repr(s)], "a prompt is on a span though that is not switched on"


def test_the_callers_trace_is_continued(up: Up) -> None:
    """A traceparent of the caller is the parent of the server span, and the answer names its trace id."""
    import httpx

    trace_id, span_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    body = {"prompt": "hi", "max_tokens": 2}
    headers = {"traceparent": f"00-{trace_id}-{span_id}-01"}
    answer = httpx.post(f"{up.url}/generate", json=body, headers=headers, timeout=60, trust_env=False)
    assert answer.headers["x-qarr-trace-id"] == trace_id
    trace = up.collector.trace(trace_id, until=SPANS)
    assert next(s for s in trace if s.name == "POST /generate").parent == span_id


def test_openais_endpoint_is_traced_alike(up: Up) -> None:
    """The same five spans; a refused request leaves neither its prompt nor the engine's words about it on any span."""
    import httpx

    chat = {"model": "fast", "messages": [{"role": "user", "content": "Be secretive."}], "max_tokens": 2}
    key = {"authorization": "Bearer qarr-not-for-traces"}
    answer = httpx.post(f"{up.url}/v1/chat/completions", json=chat, headers=key, timeout=60, trust_env=False)
    trace = up.collector.trace(answer.headers["x-qarr-trace-id"], until=SPANS)
    by_name = {span.name: span for span in trace}
    attempt = by_name["chat smollm2-135m-instruct"]
    assert attempt.parent == by_name["POST /v1/chat/completions"].span_id
    assert by_name["llm_request"].parent == attempt.span_id
    assert attempt.attributes["gen_ai.request.max_tokens"] == 2
    assert attempt.attributes["gen_ai.usage.output_tokens"] == 2
    wrong = {**chat, "max_tokens": "secretive"}
    refused = httpx.post(f"{up.url}/v1/chat/completions", json=wrong, timeout=60, trust_env=False)
    assert refused.status_code == 400
    assert "secretive" in refused.text  # the engine quotes what it was sent
    more = up.collector.trace(refused.headers["x-qarr-trace-id"], until=4)
    assert "EngineRefused" in repr(more)
    assert "secretive" not in repr([*trace, *more])
    assert "not-for-traces" not in repr([*trace, *more])
