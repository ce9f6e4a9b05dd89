"""What the first process asks of workers, and what it makes of it: figures, records and traces of the whole router."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client.core import Metric

from router.monitoring.live import MOST_SHOWN, render_open
from router.pipeline.registry import OpenElsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

    from prometheus_client.samples import Sample

    from router.app import Router
    from router.auth.api_keys import Caller
    from router.monitoring.live import WindowEntry
    from router.telemetry.record import RequestRecord
    from router.workers.channel import Channel

ANSWER_S = 3.0  # for which a worker's answer is waited for; what is known of it counts otherwise
# Each process has its own part of these gauges. All other gauges are the same in every process.
ADDED = {
    "qarr_open_requests", "qarr_tasks", "qarr_memory_blocks", "process_resident_memory_bytes",
    "process_virtual_memory_bytes", "process_open_fds",
}  # fmt: skip
# These counters are the same in every process, or only the first one counts.
WHOLE = {"qarr_breaker_opened", "qarr_engine_restarts", "qarr_live_checked_answers"}


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker has.

    Attributes:
        ended: Requests that have ended since the last time, and when, by the monotonic clock.
        seen: Records so far.
        records: The last of those since the last time.
        totals: Of the registry.
        open: Open requests, as many as are shown, and their number.
        metrics: Families of metrics that are added up; none unless asked for.
    """

    seen: int
    records: tuple[RequestRecord, ...]
    ended: tuple[WindowEntry, ...]
    totals: Counter[str]
    open: tuple[OpenElsewhere, ...]
    open_count: int
    metrics: tuple[Metric, ...] = ()


def part_of(router: Router, seen: int, ended_at: float, *, live: bool, metrics: bool) -> Part:
    """Return what this worker has.

    Args:
        router: This worker's.
        seen: Records that the first process has seen.
        ended_at: Time of the last ended request that it has seen.
        live: With what has ended, and what is open.
        metrics: With metrics.
    """
    registry, now = router.pipeline.registry, time.monotonic()
    count = registry.totals["requests"]
    fresh = min(count - seen, len(registry.recent))
    records = tuple(registry.recent)[len(registry.recent) - fresh :] if live and fresh > 0 else ()
    open_ = registry.open
    shown = open_[:MOST_SHOWN] if live else []
    return Part(
        count,
        records,
        tuple(router.live.ended_since(ended_at)) if live else (),
        Counter(registry.totals),
        tuple(OpenElsewhere(r.context.caller.key_id, render_open(r, now)) for r in shown),
        len(open_),
        tuple(m for m in router.metrics.source.collect() if _is_added(m)) if metrics else (),
    )


@dataclass(slots=True)
class _Worker:
    """A worker as the first process knows it."""

    channel: Channel
    seen: int = 0
    ended_at: float = 0.0
    totals: Counter[str] = field(default_factory=Counter)
    open: tuple[OpenElsewhere, ...] = ()
    open_count: int = 0
    metrics: tuple[Metric, ...] = ()


class Gathered:
    """The whole of the router, as the first process knows it.

    Args:
        router: Of the first process.
    """

    def __init__(self, router: Router) -> None:
        self._router = router
        self._own = router.metrics.source
        self._workers: dict[int, _Worker] = {}
        self._past: Counter[str] = Counter()
        self._past_metrics: tuple[Metric, ...] = ()
        self._gathering: asyncio.Task[None] | None = None
        router.metrics.source = self

    def enter(self, row: int, channel: Channel) -> None:
        """Note a worker that serves."""
        self._workers[row] = _Worker(channel)

    def leave(self, row: int) -> None:
        """Keep the figures of a worker that has ended."""
        worker = self._workers.pop(row, None)
        if worker is None:
            return
        self._past += worker.totals
        counted = [metric for metric in worker.metrics if metric.type != "gauge"]
        self._past_metrics = tuple(added([self._past_metrics, counted]))
        self._show()

    async def gather(self, *, live: bool = False, metrics: bool = False) -> None:
        """Ask all workers."""
        asked = list(self._workers.values())
        await asyncio.gather(*(self._ask(worker, live=live, metrics=metrics) for worker in asked))
        self._show()

    async def listed(self, caller: Caller, limit: int) -> list[dict[str, Any]]:
        """See ``TracesElsewhere``."""
        found = await self._all(lambda channel: channel.ask("traces", caller, limit))
        return [trace for traces in found for trace in traces]

    async def found(self, trace_id: str, caller: Caller) -> dict[str, Any] | None:
        """See ``TracesElsewhere``; of a trace in several workers, the part with the most spans."""
        found = await self._all(lambda channel: channel.ask("trace", trace_id, caller))
        return max((t for t in found if t is not None), key=lambda trace: len(trace["spans"]), default=None)

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of all processes, as last gathered."""
        parts = [worker.metrics for worker in self._workers.values()]
        return added([list(self._own.collect()), self._past_metrics, *parts])

    async def _all(self, ask: Callable[[Channel], Coroutine[Any, Any, Any]]) -> list[Any]:
        asked = [asyncio.wait_for(ask(worker.channel), ANSWER_S) for worker in self._workers.values()]
        found = await asyncio.gather(*asked, return_exceptions=True)
        return [each for each in found if not isinstance(each, BaseException)]

    async def _ask(self, worker: _Worker, *, live: bool, metrics: bool) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                part: Part = await worker.channel.ask("part", worker.seen, worker.ended_at, live, metrics)
        except (ConnectionError, TimeoutError):
            return
        if part.seen < worker.seen:  # another answer was faster
            return
        worker.totals, worker.open_count = part.totals, part.open_count
        if metrics:
            worker.metrics = part.metrics
        if not live:
            return
        ended = [each for each in part.ended if each[0] > worker.ended_at]
        fresh = part.seen - worker.seen
        worker.seen, worker.open = part.seen, part.open
        worker.ended_at = max((each[0] for each in ended), default=worker.ended_at)
        records = part.records[-fresh:] if fresh else ()
        self._router.pipeline.registry.recent.extend(records)
        self._router.live.take(records, ended)

    def _show(self) -> None:
        registry, workers = self._router.pipeline.registry, self._workers.values()
        totals = sum((worker.totals for worker in workers), Counter(self._past))
        ended = sorted(registry.recent, key=lambda record: record.at + record.duration_ms / 1000)
        registry.recent.clear()
        registry.recent.extend(ended)
        registry.totals.clear()
        registry.totals.update(totals)
        registry.open_elsewhere = sum(worker.open_count for worker in workers)
        registry.elsewhere = [request for worker in workers for request in worker.open]


def _is_added(metric: Metric) -> bool:
    if metric.type == "gauge":
        return metric.name in ADDED
    return metric.name not in WHOLE


def added(parts: Sequence[Iterable[Metric]]) -> list[Metric]:
    """Return families of metrics whose samples are the sums of those in several parts.

    Of two exemplars the later one stays. Families that are not added up are those of the first part.
    """
    families: dict[str, Metric] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], Sample]] = {}
    for part in parts:
        for metric in part:
            name = metric.name
            if name not in families:
                families[name], sums[name] = metric, {(s.name, _labels(s)): s for s in metric.samples}
            elif _is_added(metric):
                samples = sums[name]
                for sample in metric.samples:
                    key = sample.name, _labels(sample)
                    samples[key] = _sum(samples[key], sample) if key in samples else sample
    for name, metric in families.items():
        whole = Metric(metric.name, metric.documentation, metric.type, metric.unit)
        whole.samples = list(sums[name].values())
        families[name] = whole
    return list(families.values())


def _labels(sample: Sample) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(value)) for name, value in sample.labels.items())


def _sum(one: Sample, other: Sample) -> Sample:
    exemplars = [each.exemplar for each in (one, other) if each.exemplar is not None]
    exemplar = max(exemplars, key=lambda each: each.timestamp or 0.0, default=None)
    return one._replace(value=one.value + other.value, exemplar=exemplar)
