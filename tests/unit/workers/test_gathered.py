"""Metrics of several processes, added up."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.workers.gathered import added


def registry(requests: int, seconds: float, open_: int, ready: int) -> CollectorRegistry:
    """Return what a process has counted."""
    found = CollectorRegistry()
    counter = Counter("qarr_requests", "Requests.", ["tier"], registry=found)
    for _ in range(requests):
        counter.labels("fast").inc()
    counter.labels(f"of {requests}").inc()
    Histogram("qarr_queue_wait_seconds", "Waits.", buckets=(1, 2), registry=found).observe(seconds, {"trace_id": "t"})
    Gauge("qarr_open_requests", "Open.", registry=found).set(open_)
    Gauge("qarr_tier_ready_replicas", "Ready.", registry=found).set(ready)
    Counter("qarr_breaker_opened", "Opened.", registry=found).inc(7)
    return found


def test_parts_are_added_and_wholes_are_not() -> None:
    """Counters, histograms and a process' own gauges are summed by their labels; what is common stays as it is."""
    families = added([list(registry(2, 0.5, 1, 3).collect()), [], list(registry(3, 1.5, 4, 9).collect())])
    samples = {(s.name, *s.labels.values()): s for family in families for s in family.samples}
    values = {key: sample.value for key, sample in samples.items() if not key[0].endswith("_created")}
    assert values == {
        ("qarr_requests_total", "fast"): 5,
        ("qarr_requests_total", "of 2"): 1,
        ("qarr_requests_total", "of 3"): 1,
        ("qarr_queue_wait_seconds_bucket", "1.0"): 1,
        ("qarr_queue_wait_seconds_bucket", "2.0"): 2,
        ("qarr_queue_wait_seconds_bucket", "+Inf"): 2,
        ("qarr_queue_wait_seconds_count",): 2,
        ("qarr_queue_wait_seconds_sum",): 2.0,
        ("qarr_open_requests",): 5,
        ("qarr_tier_ready_replicas",): 3,
        ("qarr_breaker_opened_total",): 7,
    }
    assert samples["qarr_queue_wait_seconds_bucket", "2.0"].exemplar is not None


def test_what_was_added_can_be_added_again() -> None:
    """The parts stay as they were: a worker's last figures are added at every scrape."""
    part = list(registry(1, 0.5, 1, 1).collect())
    before = [list(family.samples) for family in part]
    once = added([part, part])
    assert [list(family.samples) for family in part] == before
    twice = added([once, part])
    total = next(s for f in twice for s in f.samples if s.name == "qarr_requests_total" and s.labels["tier"] == "fast")
    assert total.value == 3
