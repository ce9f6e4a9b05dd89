"""What a scrape of /metrics says, parsed."""

from __future__ import annotations

from itertools import chain

from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.samples import Sample

from tests.unit.router_stack import Stack


def families_of(page: str) -> list[Metric]:
    """Return the families of a page in either format: names, types, help and samples, with exemplars if it has any."""
    if page.endswith("# EOF\n"):
        return list(parse_openmetrics(page))
    return list(parse_text(page))


def samples_of(page: str) -> list[Sample]:
    """Return the samples of a page in Prometheus' own format."""
    return list(chain.from_iterable(family.samples for family in parse_text(page)))


async def scrape(stack: Stack) -> dict[tuple[str, ...], float]:
    """Return a router's samples by their name and the values of their labels, in the order of the labels' names."""
    page = (await stack.client.get(f"{stack.url}/metrics")).text
    values = {}
    for sample in samples_of(page):
        label_values = [value for _, value in sorted(sample.labels.items())]
        values[sample.name, *label_values] = sample.value
    return values
