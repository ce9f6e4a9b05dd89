"""Metrics under the names of OpenTelemetry's GenAI conventions, for viewers and dashboards that are made for these.

The router is a server to its callers (``gen_ai.server.*``), and a client of engines and of the overflow
(``gen_ai.client.*``, each attempt by itself). Names and bounds are those of semantic-conventions-genai v0.1.0. Most
dashboards still read those of semantic-conventions v1.41.0, the last release before the GenAI conventions had a repository
of their own: they are shown as well, unless the standard variable ``OTEL_SEMCONV_STABILITY_OPT_IN`` has
``gen_ai_latest_experimental``.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.api.paths import COMPLETIONS
from router.monitoring.distribution import Distribution, Values
from router.telemetry.record import Hop, Outcome, RequestRecord
from router.telemetry.request_trace import OVERFLOW_PROVIDER, PROVIDER

DURATION_S = (
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.28,
    2.56,
    5.12,
    10.24,
    20.48,
    40.96,
    81.92,
)
FIRST_TOKEN_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)
OUTPUT_TOKEN_S = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
)
TOKENS = tuple(float(4**power) for power in range(14))
SECOND = "s"
TOKEN = "{token}"  # noqa: S105  a unit
CALL = (
    "gen_ai.operation.name",
    "gen_ai.provider.name",
    "gen_ai.request.model",
    "gen_ai.response.model",
    "qarr.tier",
)
ENDED_CALL = (*CALL, "error.type")
MODALITY = "gen_ai.token.modality"
TOKEN_TYPE = "gen_ai.token.type"  # noqa: S105  an attribute
TEXT = "text"
UNKNOWN = "unknown"
OPT_IN = "OTEL_SEMCONV_STABILITY_OPT_IN"
LATEST_ALONE = "gen_ai_latest_experimental"
NO_TIER = "none"


@dataclass(frozen=True, slots=True)
class Instrument:
    """A metric of the conventions.

    Attributes:
        unit: In UCUM.
        attributes: Names of the attributes of its series.
    """

    name: str
    unit: str
    text: str
    attributes: tuple[str, ...] = CALL

    @property
    def family(self) -> str:
        """Return its name for Prometheus, by OpenTelemetry's rules; a counter's lacks the ``_total``."""
        name = self.name.replace(".", "_")
        return f"{name}_seconds" if self.unit == SECOND else name

    @property
    def labels(self) -> list[str]:
        return [label_of(attribute) for attribute in self.attributes]


def label_of(attribute: str) -> str:
    """Return an attribute's name as a label of Prometheus."""
    return attribute.replace(".", "_")


CLIENT_DURATION = Instrument(
    "gen_ai.client.inference.duration",
    SECOND,
    text="Time of a request to an engine or to the overflow.",
    attributes=ENDED_CALL,
)
CLIENT_FIRST_CHUNK = Instrument(
    "gen_ai.client.inference.time_to_first_chunk",
    SECOND,
    text="From a request to an engine to its first chunk, if streamed.",
)
CLIENT_INPUT = Instrument(
    "gen_ai.client.inference.operation.input_tokens",
    TOKEN,
    text="Input tokens of a request.",
)
CLIENT_OUTPUT = Instrument(
    "gen_ai.client.inference.operation.output_tokens",
    TOKEN,
    text="Output tokens of a request.",
)
USED_INPUT = Instrument(
    "gen_ai.client.inference.usage.input_tokens",
    TOKEN,
    text="Input tokens, cached ones included.",
    attributes=(*CALL, MODALITY),
)
USED_OUTPUT = Instrument(
    "gen_ai.client.inference.usage.output_tokens",
    TOKEN,
    text="Output tokens.",
    attributes=(*CALL, MODALITY),
)
USED_CACHED = Instrument(
    "gen_ai.client.inference.usage.cache_read.input_tokens",
    TOKEN,
    text="Input tokens that the engine had cached.",
    attributes=(*CALL, MODALITY),
)
USED_REASONING = Instrument(
    "gen_ai.client.inference.usage.reasoning.output_tokens",
    TOKEN,
    text="Output tokens that are the model's reasoning.",
    attributes=(*CALL, MODALITY),
)
SERVER_DURATION = Instrument(
    "gen_ai.server.request.duration",
    SECOND,
    text="From a request's arrival to its last byte.",
    attributes=ENDED_CALL,
)
SERVER_FIRST_TOKEN = Instrument(
    "gen_ai.server.time_to_first_token",
    SECOND,
    text="From a request's arrival to its first token, of successful requests.",
)
SERVER_OUTPUT_TOKEN = Instrument(
    "gen_ai.server.time_per_output_token",
    SECOND,
    text="Mean time of a token after the first, of successful requests.",
)
# Instruments of v1.41.0.
CLIENT_OPERATION = Instrument(
    "gen_ai.client.operation.duration",
    SECOND,
    text="Time of a request to an engine or to the overflow.",
    attributes=ENDED_CALL,
)
CLIENT_OPERATION_CHUNK = Instrument(
    "gen_ai.client.operation.time_to_first_chunk",
    SECOND,
    text="From a request to an engine to its first chunk, if streamed.",
)
CLIENT_USAGE = Instrument(
    "gen_ai.client.token.usage",
    TOKEN,
    text="Input and output tokens of a request.",
    attributes=(*CALL, TOKEN_TYPE),
)
INSTRUMENTS = (
    CLIENT_DURATION,
    CLIENT_FIRST_CHUNK,
    CLIENT_INPUT,
    CLIENT_OUTPUT,
    USED_INPUT,
    USED_OUTPUT,
    USED_CACHED,
    USED_REASONING,
    SERVER_DURATION,
    SERVER_FIRST_TOKEN,
    SERVER_OUTPUT_TOKEN,
    CLIENT_OPERATION,
    CLIENT_OPERATION_CHUNK,
    CLIENT_USAGE,
)


class GenAiMetrics(Collector):
    """Durations and tokens of requests, and of their attempts."""

    def __init__(self, model: str) -> None:
        self._model = model
        opted_in = os.environ.get(OPT_IN, "").split(",")
        self._is_latest_alone = LATEST_ALONE in opted_in
        self._attempt_durations = Distribution(DURATION_S)
        self._first_chunks = Distribution(DURATION_S)
        self._input_tokens = Distribution(TOKENS)
        self._output_tokens = Distribution(TOKENS)
        self._cached_tokens: defaultdict[Values, int] = defaultdict(int)
        self._reasoning_tokens: defaultdict[Values, int] = defaultdict(int)
        self._request_durations = Distribution(DURATION_S)
        self._first_tokens = Distribution(FIRST_TOKEN_S)
        self._times_per_token = Distribution(OUTPUT_TOKEN_S)

    def observe(self, record: RequestRecord) -> None:
        hops = [] if record.journey is None else record.journey.hops
        for hop in hops:
            if hop.ended is not None:
                self._observe_attempt(hop, hop.ended)
        self._observe_request(record, hops)

    def _observe_attempt(self, hop: Hop, ended: float) -> None:
        result = hop.result
        attribute_values = _call_of(hop)
        error = result.get("error.type") or ""
        self._attempt_durations.add((*attribute_values, error), ended - hop.began)
        if hop.streamed and hop.first_token_at is not None:
            self._first_chunks.add(attribute_values, hop.first_token_at - hop.began)
        input_tokens = result.get("gen_ai.usage.input_tokens")
        if input_tokens is not None:
            self._input_tokens.add(attribute_values, input_tokens)
        output_tokens = result.get("gen_ai.usage.output_tokens")
        if output_tokens is not None:
            self._output_tokens.add(attribute_values, output_tokens)
        cached_tokens = result.get("gen_ai.usage.cache_read.input_tokens")
        if cached_tokens:
            self._cached_tokens[attribute_values] += cached_tokens
        reasoning_tokens = result.get("gen_ai.usage.reasoning.output_tokens")
        if reasoning_tokens:
            self._reasoning_tokens[attribute_values] += reasoning_tokens

    def _observe_request(self, record: RequestRecord, hops: list[Hop]) -> None:
        attribute_values = self._served_by(record, hops)
        times = record.times
        error = record.error
        if record.outcome is Outcome.CLIENT_GONE:
            error = record.outcome.value
        self._request_durations.add(
            (*attribute_values, error or ""), times.duration_ms / 1000
        )
        if record.outcome is not Outcome.OK:
            return
        if times.ttft_ms is not None:
            self._first_tokens.add(attribute_values, times.ttft_ms / 1000)
        if times.tpot_ms is not None:
            self._times_per_token.add(attribute_values, times.tpot_ms / 1000)

    def _served_by(self, record: RequestRecord, hops: list[Hop]) -> Values:
        """Return a request's attributes: those of its last attempt, or without one the model that the router serves."""
        if hops:
            return _call_of(hops[-1])
        operation = "text_completion" if record.route == COMPLETIONS else "chat"
        return operation, PROVIDER, self._model, self._model, NO_TIER

    def collect(self) -> Iterable[Metric]:
        yield _histogram(CLIENT_DURATION, self._attempt_durations)
        yield _histogram(CLIENT_FIRST_CHUNK, self._first_chunks)
        yield _histogram(CLIENT_INPUT, self._input_tokens)
        yield _histogram(CLIENT_OUTPUT, self._output_tokens)
        # Engines do not tell what the tokens of a prompt are: it may have images. Answers are text.
        yield _counter(USED_INPUT, self._input_tokens.totals(), UNKNOWN)
        yield _counter(USED_OUTPUT, self._output_tokens.totals(), TEXT)
        yield _counter(USED_CACHED, self._cached_tokens, UNKNOWN)
        yield _counter(USED_REASONING, self._reasoning_tokens, TEXT)
        yield _histogram(SERVER_DURATION, self._request_durations)
        yield _histogram(SERVER_FIRST_TOKEN, self._first_tokens)
        yield _histogram(SERVER_OUTPUT_TOKEN, self._times_per_token)
        if not self._is_latest_alone:
            yield _histogram(CLIENT_OPERATION, self._attempt_durations)
            yield _histogram(CLIENT_OPERATION_CHUNK, self._first_chunks)
            yield self._token_usage()

    def _token_usage(self) -> Metric:
        """Return input and output tokens as one histogram, as v1.41.0 has them."""
        family = HistogramMetricFamily(
            CLIENT_USAGE.family, CLIENT_USAGE.text, labels=CLIENT_USAGE.labels
        )
        for attribute_values, buckets, total in self._input_tokens.samples():
            family.add_metric([*attribute_values, "input"], buckets, total)
        for attribute_values, buckets, total in self._output_tokens.samples():
            family.add_metric([*attribute_values, "output"], buckets, total)
        return family


def _call_of(hop: Hop) -> Values:
    if hop.tier is None:
        return hop.operation, OVERFLOW_PROVIDER, hop.model, hop.model, "overflow"
    return hop.operation, PROVIDER, hop.model, hop.model, hop.tier


def _histogram(instrument: Instrument, distribution: Distribution) -> Metric:
    family = HistogramMetricFamily(
        instrument.family, instrument.text, labels=instrument.labels
    )
    for attribute_values, buckets, total in distribution.samples():
        family.add_metric(attribute_values, buckets, total)
    return family


def _counter(
    instrument: Instrument, numbers: Mapping[Values, float], modality: str
) -> Metric:
    family = CounterMetricFamily(
        instrument.family, instrument.text, labels=instrument.labels
    )
    for attribute_values, number in numbers.items():
        family.add_metric([*attribute_values, modality], number)
    return family
