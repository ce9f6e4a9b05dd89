"""What autoscalers of engines need, by tier: the queue, and the first token's predicted time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tiers.choice import Request, candidate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.metrics_core import Metric

    from router.pipeline.pipeline import Pipeline

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128  # of the request whose first token is predicted


class Scaling(Collector):
    """The load of tiers, as one more request would find it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def collect(self) -> Iterable[Metric]:
        """Return the waiting requests of each tier, and the predicted TTFT of those whose speed is known."""
        text = "Waiting requests that a tier could serve; one that several could serve counts for each."
        waiting = GaugeMetricFamily("qarr_tier_waiting_requests", text, labels=["tier"])
        text = f"Predicted time to the first token of {PROMPT_TOKENS} prompt tokens sent to a tier now."
        ttft = GaugeMetricFamily("qarr_predicted_ttft_seconds", text, labels=["tier"])
        fleet = self._pipeline.fleet.snapshot()
        request = Request(PROMPT_TOKENS, OUTPUT_TOKENS, output_share=fleet.output_share)
        for tier in fleet.tiers:
            if tier.spec.absent:
                continue
            waiting.add_metric([tier.spec.name], self._pipeline.admission.waiting_for(tier.spec.name))
            times = candidate(tier, request, fleet).times
            if times is not None:
                ttft.add_metric([tier.spec.name], times.ttft_ms / 1000)
        return waiting, ttft
