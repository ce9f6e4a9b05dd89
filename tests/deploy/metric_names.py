"""Names of metrics in queries and on a page of metrics."""

from __future__ import annotations

import re

# In a query: names of recording rules, of the routers' metrics, and of vLLM's.
NAME = re.compile(r"\b(?:[a-z_]+:)?(?:qarr|vllm)[_:]\w+(?::\w+)*")


def metrics_on(page: str) -> set[str]:
    """Return the names of the series on a page; a histogram has several."""
    names = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", page, re.MULTILINE):
        names.add(name)
        if kind == "histogram":
            names |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
    return names
