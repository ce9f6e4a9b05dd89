"""Metrics under the names of OpenTelemetry's GenAI conventions, of real requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router.monitoring.gen_ai import INSTRUMENTS, GenAiMetrics
from router.telemetry.record import Hop, Journey, Outcome
from tests.unit.monitoring.scrapes import samples_of
from tests.unit.records import record
from tests.unit.router_stack import Stack, router_stack
from tiers.spec import STANDARD_TIERS

FAST, BALANCED, PRECISE = STANDARD_TIERS
CHAT = {
    "gen_ai_operation_name": "chat",
    "gen_ai_provider_name": "vllm",
    "gen_ai_request_model": "fake",
    "gen_ai_response_model": "fake",
}
OF_THIS_RELEASE = {
    "gen_ai_client_inference_duration_seconds",
    "gen_ai_client_inference_time_to_first_chunk_seconds",
    "gen_ai_client_inference_operation_input_tokens",
    "gen_ai_client_inference_operation_output_tokens",
    "gen_ai_client_inference_usage_input_tokens",
    "gen_ai_client_inference_usage_output_tokens",
    "gen_ai_client_inference_usage_cache_read_input_tokens",
    "gen_ai_client_inference_usage_reasoning_output_tokens",
    "gen_ai_server_request_duration_seconds",
    "gen_ai_server_time_to_first_token_seconds",
    "gen_ai_server_time_per_output_token_seconds",
}
OF_THE_RELEASE_BEFORE = {
    "gen_ai_client_operation_duration_seconds",
    "gen_ai_client_operation_time_to_first_chunk_seconds",
    "gen_ai_client_token_usage",
}


async def shown(stack: Stack) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the router's samples of the conventions, by name and labels."""
    page = (await stack.client.get(f"{stack.url}/metrics")).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for sample in samples_of(page)
        if sample.name.startswith("gen_ai_")
    }


def total(
    samples: dict[tuple[str, frozenset[tuple[str, str]]], float],
    name: str,
    **labels: str,
) -> float:
    """Add up the samples of a name that have these labels."""
    wanted = set(labels.items())
    return sum(
        value
        for (sample_name, sample_labels), value in samples.items()
        if sample_name == name and wanted <= sample_labels
    )


@pytest.mark.anyio
async def test_a_request_is_measured_as_a_server_and_as_a_client(
    tmp_path: Path,
) -> None:
    """Tokens are those that the engine counted, times are in seconds, and only what is streamed has a first chunk."""
    async with router_stack(tmp_path) as stack:
        asked = [await stack.generate(tier="precise", stream=False) for _ in range(3)]
        usage = [answer.json()["usage"] for answer in asked]
        body = {
            "model": "precise",
            "messages": [{"role": "user", "content": "hi"}],
            "n": 2,
        }
        whole = await stack.client.post(f"{stack.url}/v1/chat/completions", json=body)
        usage.append(whole.json()["usage"])
        samples = await shown(stack)
    labels = {**CHAT, "qarr_tier": "precise"}
    for name in (
        "gen_ai_client_inference_duration_seconds_count",
        "gen_ai_server_request_duration_seconds_count",
    ):
        assert total(samples, name, **labels, error_type="") == 4
    prompt_tokens = sum(counts["prompt_tokens"] for counts in usage)
    output_tokens = sum(counts["completion_tokens"] for counts in usage)
    input_name = "gen_ai_client_inference_usage_input_tokens_total"
    output_name = "gen_ai_client_inference_usage_output_tokens_total"
    of_unknown = {**labels, "gen_ai_token_modality": "unknown"}
    of_text = {**labels, "gen_ai_token_modality": "text"}
    assert total(samples, input_name, **of_unknown) == prompt_tokens
    assert total(samples, output_name, **of_text) == output_tokens
    token_usage = "gen_ai_client_token_usage"
    of_input = {**labels, "gen_ai_token_type": "input"}
    of_output = {**labels, "gen_ai_token_type": "output"}
    assert total(samples, f"{token_usage}_sum", **of_input) == prompt_tokens
    assert total(samples, f"{token_usage}_sum", **of_output) == output_tokens
    assert total(samples, f"{token_usage}_bucket", **of_output, le="+Inf") == 4
    first_chunks = "gen_ai_client_inference_time_to_first_chunk_seconds_count"
    first_tokens = "gen_ai_server_time_to_first_token_seconds_count"
    streamed = total(samples, first_chunks, **labels)
    assert streamed == total(samples, first_tokens, **labels)
    durations = "gen_ai_server_request_duration_seconds_sum"
    assert 0 < total(samples, durations, **labels) < 60


@pytest.mark.anyio
async def test_each_attempt_is_a_clients_request(tmp_path: Path) -> None:
    """One that fails has its error; the server's request has none, since another engine answered."""
    async with router_stack(tmp_path) as stack:
        stack.engines[FAST].status = 500
        assert (await stack.generate(tier="fast")).status_code == 200
        samples = await shown(stack)
    client = "gen_ai_client_inference_duration_seconds_count"
    server = "gen_ai_server_request_duration_seconds_count"
    assert total(samples, client, qarr_tier="fast", error_type="EngineFailed") == 1
    assert total(samples, client, error_type="") == 1
    assert total(samples, server, error_type="") == 1
    assert total(samples, server) == 1
    assert total(samples, "gen_ai_client_operation_duration_seconds_count") == 2


@pytest.mark.anyio
async def test_a_refused_request_has_its_reason(tmp_path: Path) -> None:
    """It reached no tier, and no engine was asked."""
    async with router_stack(tmp_path) as stack:
        refused = await stack.generate(
            prompt="word " * 3000, max_tokens=4096, tier="fast", tier_policy="require"
        )
        assert refused.json()["type"].endswith("too-long"), refused.text
        samples = await shown(stack)
    labels = {**CHAT, "qarr_tier": "none", "error_type": "too_long"}
    assert total(samples, "gen_ai_server_request_duration_seconds_count", **labels) == 1
    assert total(samples, "gen_ai_client_inference_duration_seconds_count") == 0
    assert total(samples, "gen_ai_server_time_to_first_token_seconds_count") == 0


def hop(**fields: Any) -> Hop:
    values = {"tier": FAST, "first_token_at": 1.3, "ended": 2.0, **fields}
    attempt = Hop("chat", "m", url="http://e", began=1.0, **values)
    attempt.result = {"gen_ai.usage.input_tokens": 20, "gen_ai.usage.output_tokens": 7}
    return attempt


def collected(
    metrics: GenAiMetrics,
) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    samples = {}
    for family in metrics.collect():
        for sample in family.samples:
            samples[sample.name, frozenset(sample.labels.items())] = sample.value
    return samples


def test_the_overflow_is_another_provider_and_cached_tokens_are_counted() -> None:
    """A hop that has not ended yet is not counted; a client that left is told as what it is."""
    metrics = GenAiMetrics("m")
    cached = hop(tier=None, overflow="api")
    cached.result = {**cached.result, "gen_ai.usage.cache_read.input_tokens": 16}
    journey = Journey(1.0, 1.0, classified=1.0, decided=1.0)
    journey.hops = [hop(ended=None), cached]
    metrics.observe(record(journey=journey, outcome=Outcome.CLIENT_GONE))
    samples = collected(metrics)
    of_overflow = {"gen_ai_provider_name": "openai", "qarr_tier": "overflow"}
    assert total(samples, "gen_ai_client_inference_duration_seconds_count") == 1
    durations = "gen_ai_client_inference_duration_seconds_sum"
    assert total(samples, durations, **of_overflow) == pytest.approx(1.0)
    first = "gen_ai_client_inference_time_to_first_chunk_seconds_bucket"
    assert total(samples, first, **of_overflow, le="0.16") == 0
    assert total(samples, first, **of_overflow, le="0.32") == 1
    cached_tokens = "gen_ai_client_inference_usage_cache_read_input_tokens_total"
    assert total(samples, cached_tokens, **of_overflow) == 16
    left = {**of_overflow, "error_type": "client_gone"}
    assert total(samples, "gen_ai_server_request_duration_seconds_count", **left) == 1


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        ("", OF_THIS_RELEASE | OF_THE_RELEASE_BEFORE),
        ("http,gen_ai_latest_experimental", OF_THIS_RELEASE),
        ("http", OF_THIS_RELEASE | OF_THE_RELEASE_BEFORE),
    ],
)
def test_the_standard_variable_leaves_out_the_release_before(
    variable: str, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SEMCONV_STABILITY_OPT_IN", variable)
    assert {family.name for family in GenAiMetrics("m").collect()} == names
    instrument_names = {instrument.family for instrument in INSTRUMENTS}
    assert instrument_names == OF_THIS_RELEASE | OF_THE_RELEASE_BEFORE
