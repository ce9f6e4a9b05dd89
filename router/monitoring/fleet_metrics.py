"""Metrics of the router's load, of its tiers as autoscalers see them, and of the replicas, read at each scrape."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from router.monitoring.families import Sample, counter, gauge, single_gauge
from router.pipeline.pipeline import Pipeline
from tiers.breaker import BreakerState
from tiers.choice import Demand, best_candidate
from tiers.replica import Replica
from tiers.snapshot import FleetSnapshot, Gauges, TierSnapshot
from tiers.spec import ReplicaStatus, TierName

TIER = ("tier",)
REPLICA = ("tier", "replica")
# The request whose first token is predicted.
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128
ReplicaLabels: TypeAlias = "tuple[str, str]"


class FleetMetrics(Collector):
    """The router's load, the state of its engines, and each tier as one more request would find it, for autoscalers."""

    def __init__(
        self,
        pipeline: Pipeline,
        retries: Mapping[TierName, int],
        about: Mapping[str, str],
    ) -> None:
        self._pipeline = pipeline
        self._retries = retries
        self._about = about

    def collect(self) -> Iterable[Metric]:
        yield from self._router_families()
        snapshot = self._pipeline.fleet.snapshot()
        yield from self._attempt_families()
        # A tier that is configured without replicas has no series: to an alert, its 0 ready replicas would look like a tier
        # that has failed.
        present_tiers = [tier for tier in snapshot.tiers if not tier.spec.absent]
        yield from self._tier_families(present_tiers)
        yield _predicted_ttft(present_tiers, snapshot)
        self._pipeline.fleet.refresh(time.monotonic())
        replicas = self._pipeline.fleet.replicas
        yield from _replica_families(replicas)
        yield from _breaker_families(replicas)
        yield from _engine_families(replicas)

    def _router_families(self) -> Iterable[Metric]:
        version_and_model = (self._about["version"], self._about["model"])
        yield gauge(
            "build_info",
            "1; labels: version and model.",
            labels=("version", "model"),
            samples=[(version_and_model, 1)],
        )
        admission = self._pipeline.admission
        yield single_gauge(
            "waiting_requests", "Requests that wait for a slot.", admission.waiting
        )
        yield single_gauge(
            "waiting_requests_limit", "Requests that may wait.", admission.most_waiting
        )
        yield single_gauge(
            "open_requests",
            "Requests that are being served.",
            len(self._pipeline.registry.open),
        )
        yield single_gauge(
            "tasks", "Tasks of the router's event loop.", len(asyncio.all_tasks())
        )
        yield single_gauge(
            "memory_blocks",
            "Blocks of memory that Python's objects take.",
            sys.getallocatedblocks(),
        )

    def _attempt_families(self) -> Iterable[Metric]:
        """Yield what went wrong with engines, by tier."""
        fleet = self._pipeline.fleet
        tiers = [spec.name for spec in fleet.specs]
        yield counter(
            "upstream_failures",
            "Attempts that an engine failed.",
            labels=("tier", "error"),
            samples=list(fleet.failures.items()),
        )
        yield counter(
            "retries",
            "Further attempts before the first byte.",
            labels=TIER,
            samples=[((tier,), self._retries[tier]) for tier in tiers],
        )
        yield counter(
            "engine_restarts",
            "Automatic restarts of engines.",
            labels=TIER,
            samples=[((tier,), fleet.restarts[tier]) for tier in tiers],
        )

    def _tier_families(self, present_tiers: Sequence[TierSnapshot]) -> Iterable[Metric]:
        names = [tier.spec.name for tier in present_tiers]
        ready_tiers = [
            replica.spec.name
            for replica in self._pipeline.fleet.replicas
            if replica.state.status is ReplicaStatus.READY
        ]
        yield gauge(
            "tier_ready_replicas",
            "Replicas that get traffic.",
            labels=TIER,
            samples=[((name,), ready_tiers.count(name)) for name in names],
        )
        admission = self._pipeline.admission
        yield gauge(
            "tier_waiting_requests",
            "Waiting requests that a tier could serve; one that several could serve counts for each.",
            labels=TIER,
            samples=[((name,), admission.waiting_for(name)) for name in names],
        )


def _predicted_ttft(
    present_tiers: Sequence[TierSnapshot], snapshot: FleetSnapshot
) -> Metric:
    demand = Demand(PROMPT_TOKENS, OUTPUT_TOKENS, output_share=snapshot.output_share)
    samples: list[Sample] = []
    for tier in present_tiers:
        expected = best_candidate(tier, demand, snapshot.load).times
        if expected is not None:
            samples.append(((tier.spec.name,), expected.ttft_ms / 1000))
    return gauge(
        "predicted_ttft_seconds",
        f"Predicted time to the first token of {PROMPT_TOKENS} prompt tokens sent to a tier now.",
        labels=TIER,
        samples=samples,
    )


def _labels_of(replica: Replica) -> ReplicaLabels:
    return replica.spec.name, replica.id


def _replica_families(replicas: Sequence[Replica]) -> Iterable[Metric]:
    states: list[Sample] = []
    verifications: list[Sample] = []
    served: list[Sample] = []
    for replica in replicas:
        spec = replica.spec
        states.append(((*_labels_of(replica), replica.state.status.value), 1))
        if replica.state.verification is not None:
            verification = replica.state.verification.value
            verifications.append(((*_labels_of(replica), verification), 1))
        checkpoint = spec.checkpoint_id or ""
        served.append(((*_labels_of(replica), spec.precision, checkpoint), 1))
    yield gauge(
        "replica_state",
        "1 for a replica's present state.",
        labels=(*REPLICA, "state"),
        samples=states,
    )
    yield gauge(
        "replica_verification",
        "1 for what is known of what a replica's engine computes.",
        labels=(*REPLICA, "verification"),
        samples=verifications,
    )
    yield gauge(
        "replica_info",
        "1; labels: what a replica serves.",
        labels=(*REPLICA, "precision", "checkpoint"),
        samples=served,
    )
    yield gauge(
        "requests_in_flight",
        "Requests on a replica.",
        labels=REPLICA,
        samples=[
            (_labels_of(replica), replica.state.in_flight) for replica in replicas
        ],
    )
    yield gauge(
        "places_taken",
        "Slots taken: one for each answer of a request.",
        labels=REPLICA,
        samples=[(_labels_of(replica), replica.state.slots) for replica in replicas],
    )
    yield gauge(
        "requests_limit",
        "Slots of a replica.",
        labels=REPLICA,
        samples=[(_labels_of(replica), replica.state.limit) for replica in replicas],
    )


def _breaker_families(replicas: Sequence[Replica]) -> Iterable[Metric]:
    openings: list[Sample] = []
    open_now: list[Sample] = []
    for replica in replicas:
        is_open = replica.state.breaker.state is not BreakerState.CLOSED
        openings.append((_labels_of(replica), replica.breaker.opened))
        open_now.append((_labels_of(replica), is_open))
    yield counter(
        "breaker_opened",
        "Times that a replica's breaker has opened.",
        labels=REPLICA,
        samples=openings,
    )
    yield gauge(
        "breaker_open",
        "1 while a replica's breaker keeps requests from it.",
        labels=REPLICA,
        samples=open_now,
    )


def _engine_families(replicas: Sequence[Replica]) -> Iterable[Metric]:
    """Yield what the engines themselves report; an engine that reports nothing has no series."""
    reports: list[tuple[ReplicaLabels, Gauges]] = []
    for replica in replicas:
        gauges = replica.state.gauges
        if gauges is not None:
            reports.append((_labels_of(replica), gauges))
    yield gauge(
        "kv_cache_usage_ratio",
        "Share of a replica's KV cache in use.",
        labels=REPLICA,
        samples=[(labels, gauges.kv_cache_usage) for labels, gauges in reports],
    )
    yield from _draft_families(reports)
    yield counter(
        "prefix_cache_queries",
        "Prompt tokens that a replica's engine looked up in its prefix cache since it was started.",
        labels=REPLICA,
        samples=[(labels, gauges.cache_queries) for labels, gauges in reports],
    )
    yield counter(
        "prefix_cache_hits",
        "Prompt tokens found cached.",
        labels=REPLICA,
        samples=[(labels, gauges.cache_hits) for labels, gauges in reports],
    )


def _draft_families(
    reports: Sequence[tuple[ReplicaLabels, Gauges]],
) -> Iterable[Metric]:
    """Yield the figures of speculative decoding, of engines whose draft has proposed tokens."""
    drafting = [(labels, gauges) for labels, gauges in reports if gauges.drafted]
    yield counter(
        "draft_tokens",
        "Tokens that a replica's draft has proposed since the engine was started (speculative decoding).",
        labels=REPLICA,
        samples=[(labels, gauges.drafted) for labels, gauges in drafting],
    )
    yield counter(
        "draft_tokens_accepted",
        "Draft tokens that the engine has accepted since it was started.",
        labels=REPLICA,
        samples=[(labels, gauges.accepted) for labels, gauges in drafting],
    )
