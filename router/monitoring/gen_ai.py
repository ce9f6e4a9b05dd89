"""Metrics under the names of OpenTelemetry's GenAI conventions, for viewers and dashboards that are made for these.

The router is a server to its callers (``gen_ai.server.*``), and a client of engines and of the overflow
(``gen_ai.client.*``, each attempt by itself). Names and bounds are those of semantic-conventions-genai v0.1.0. Most
dashboards still read those of semantic-conventions v1.41.0, the last release before the GenAI conventions had a repository
of their own: they are told as well, unless the standard variable ``OTEL_SEMCONV_STABILITY_OPT_IN`` has
``gen_ai_latest_experimental``.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from router.api.paths import COMPLETIONS
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
Values: TypeAlias = "tuple[str, ...]"


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
        """Return its name for Prometheus, by OpenTelemetry's rules; of a counter without ``_total``."""
        return self.name.replace(".", "_") + ("_seconds" if self.unit == SECOND else "")

    @property
    def labels(self) -> list[str]:
        return [label_of(attribute) for attribute in self.attributes]


def label_of(attribute: str) -> str:
    """Return an attribute's name as a label of Prometheus."""
    return attribute.replace(".", "_")


CLIENT_DURATION = Instrument(
    "gen_ai.client.inference.duration",
    SECOND,
    "Time of a request to an engine or to the overflow.",
    ENDED_CALL,
)
CLIENT_FIRST_CHUNK = Instrument(
    "gen_ai.client.inference.time_to_first_chunk",
    SECOND,
    "From a request to an engine to its first chunk, if streamed.",
)
CLIENT_INPUT = Instrument(
    "gen_ai.client.inference.operation.input_tokens",
    TOKEN,
    "Input tokens of a request.",
)
CLIENT_OUTPUT = Instrument(
    "gen_ai.client.inference.operation.output_tokens",
    TOKEN,
    "Output tokens of a request.",
)
USED_INPUT = Instrument(
    "gen_ai.client.inference.usage.input_tokens",
    TOKEN,
    "Input tokens, cached ones included.",
    (*CALL, MODALITY),
)
USED_OUTPUT = Instrument(
    "gen_ai.client.inference.usage.output_tokens",
    TOKEN,
    "Output tokens.",
    (*CALL, MODALITY),
)
USED_CACHED = Instrument(
    "gen_ai.client.inference.usage.cache_read.input_tokens", TOKEN, "Input tokens that the engine had cached.",
    (*CALL, MODALITY),
)  # fmt: skip
SERVER_DURATION = Instrument(
    "gen_ai.server.request.duration",
    SECOND,
    "From a request's arrival to its last byte.",
    ENDED_CALL,
)
SERVER_FIRST_TOKEN = Instrument(
    "gen_ai.server.time_to_first_token",
    SECOND,
    "From a request's arrival to its first token, of successful requests.",
)
SERVER_OUTPUT_TOKEN = Instrument(
    "gen_ai.server.time_per_output_token",
    SECOND,
    "Mean time of a token after the first, of successful requests.",
)
# Those of v1.41.0.
CLIENT_OPERATION = Instrument(
    "gen_ai.client.operation.duration",
    SECOND,
    "Time of a request to an engine or to the overflow.",
    ENDED_CALL,
)
CLIENT_OPERATION_CHUNK = Instrument(
    "gen_ai.client.operation.time_to_first_chunk",
    SECOND,
    "From a request to an engine to its first chunk, if streamed.",
)
CLIENT_USAGE = Instrument(
    "gen_ai.client.token.usage",
    TOKEN,
    "Input and output tokens of a request.",
    (*CALL, TOKEN_TYPE),
)
INSTRUMENTS = (
    CLIENT_DURATION, CLIENT_FIRST_CHUNK, CLIENT_INPUT, CLIENT_OUTPUT, USED_INPUT, USED_OUTPUT, USED_CACHED,
    SERVER_DURATION, SERVER_FIRST_TOKEN, SERVER_OUTPUT_TOKEN,
    CLIENT_OPERATION, CLIENT_OPERATION_CHUNK, CLIENT_USAGE,
)  # fmt: skip


@dataclass(slots=True)
class _Series:
    counts: list[int]  # by bucket, the last one without a bound
    total: float = 0.0


@dataclass(slots=True)
class _Distribution:
    """Numbers by attributes. A histogram of the library takes five times as long, and each request adds to eight."""

    bounds: tuple[float, ...]
    series: dict[Values, _Series] = field(default_factory=dict)

    def add(self, values: Values, number: float) -> None:
        series = self.series.get(values)
        if series is None:
            series = self.series[values] = _Series([0] * (len(self.bounds) + 1))
        series.counts[bisect_left(self.bounds, number)] += 1
        series.total += number

    def samples(self) -> Iterator[tuple[Values, list[tuple[str, float]], float]]:
        """Yield attributes, cumulative buckets and the sum of each series."""
        bounds = [*map(floatToGoString, self.bounds), "+Inf"]
        for values, series in self.series.items():
            yield (
                values,
                list(zip(bounds, map(float, accumulate(series.counts)), strict=True)),
                series.total,
            )


class GenAiMetrics(Collector):
    def __init__(self, model: str) -> None:
        self._model = model
        self._latest_alone = LATEST_ALONE in os.environ.get(OPT_IN, "").split(",")
        self._durations = _Distribution(DURATION_S)
        self._first_chunks = _Distribution(DURATION_S)
        self._input = _Distribution(TOKENS)
        self._output = _Distribution(TOKENS)
        self._cached: dict[Values, int] = {}
        self._server_durations = _Distribution(DURATION_S)
        self._first_tokens = _Distribution(FIRST_TOKEN_S)
        self._output_tokens = _Distribution(OUTPUT_TOKEN_S)

    def observe(self, record: RequestRecord) -> None:
        hops = record.journey.hops if record.journey is not None else []
        for hop in hops:
            if hop.ended is not None:
                self._attempt(hop, hop.ended)
        self._request(record, hops)

    def _attempt(self, hop: Hop, ended: float) -> None:
        result = hop.result
        values = _call_of(hop)
        self._durations.add(
            (*values, result.get("error.type") or ""), ended - hop.began
        )
        if hop.streamed and hop.first_token_at is not None:
            self._first_chunks.add(values, hop.first_token_at - hop.began)
        input_tokens = result.get("gen_ai.usage.input_tokens")
        output_tokens = result.get("gen_ai.usage.output_tokens")
        cached = result.get("gen_ai.usage.cache_read.input_tokens")
        if input_tokens is not None:
            self._input.add(values, input_tokens)
        if output_tokens is not None:
            self._output.add(values, output_tokens)
        if cached:
            self._cached[values] = self._cached.get(values, 0) + cached

    def _request(self, record: RequestRecord, hops: list[Hop]) -> None:
        values = self._served_by(record, hops)
        error = record.error
        if record.outcome is Outcome.CLIENT_GONE:
            error = record.outcome.value
        self._server_durations.add(
            (*values, error or ""), record.times.duration_ms / 1000
        )
        if record.outcome is not Outcome.OK:
            return
        if record.times.ttft_ms is not None:
            self._first_tokens.add(values, record.times.ttft_ms / 1000)
        if record.times.tpot_ms is not None:
            self._output_tokens.add(values, record.times.tpot_ms / 1000)

    def _served_by(self, record: RequestRecord, hops: list[Hop]) -> Values:
        """Return a request's attributes: those of its last attempt, or without one the model that the router serves."""
        if hops:
            return _call_of(hops[-1])
        operation = "text_completion" if record.route == COMPLETIONS else "chat"
        return operation, PROVIDER, self._model, self._model, NO_TIER

    def collect(self) -> Iterable[Metric]:
        yield _histogram(CLIENT_DURATION, self._durations)
        yield _histogram(CLIENT_FIRST_CHUNK, self._first_chunks)
        yield _histogram(CLIENT_INPUT, self._input)
        yield _histogram(CLIENT_OUTPUT, self._output)
        # Engines do not tell what the tokens of a prompt are: it may have images. Answers are text.
        used = {values: series.total for values, series in self._input.series.items()}
        yield _counter(USED_INPUT, used, UNKNOWN)
        used = {values: series.total for values, series in self._output.series.items()}
        yield _counter(USED_OUTPUT, used, TEXT)
        yield _counter(USED_CACHED, self._cached, UNKNOWN)
        yield _histogram(SERVER_DURATION, self._server_durations)
        yield _histogram(SERVER_FIRST_TOKEN, self._first_tokens)
        yield _histogram(SERVER_OUTPUT_TOKEN, self._output_tokens)
        if not self._latest_alone:
            yield _histogram(CLIENT_OPERATION, self._durations)
            yield _histogram(CLIENT_OPERATION_CHUNK, self._first_chunks)
            yield self._token_usage()

    def _token_usage(self) -> Metric:
        made = HistogramMetricFamily(
            CLIENT_USAGE.family, CLIENT_USAGE.text, labels=CLIENT_USAGE.labels
        )
        for kind, distribution in (("input", self._input), ("output", self._output)):
            for values, buckets, total in distribution.samples():
                made.add_metric([*values, kind], buckets, total)
        return made


def _call_of(hop: Hop) -> Values:
    if hop.tier is None:
        return hop.operation, OVERFLOW_PROVIDER, hop.model, hop.model, "overflow"
    return hop.operation, PROVIDER, hop.model, hop.model, hop.tier


def _histogram(instrument: Instrument, distribution: _Distribution) -> Metric:
    made = HistogramMetricFamily(
        instrument.family, instrument.text, labels=instrument.labels
    )
    for values, buckets, total in distribution.samples():
        made.add_metric(values, buckets, total)
    return made


def _counter(
    instrument: Instrument,
    numbers: dict[Values, float] | dict[Values, int],
    modality: str,
) -> Metric:
    made = CounterMetricFamily(
        instrument.family, instrument.text, labels=instrument.labels
    )
    for values, number in numbers.items():
        made.add_metric([*values, modality], number)
    return made
