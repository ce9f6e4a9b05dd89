"""Which ``traceparent`` headers are valid, by https://www.w3.org/TR/trace-context/."""

from __future__ import annotations

import pytest

from router.telemetry.tracing import Telemetry

TRACE = "a" * 32
SPAN = "b" * 16


def trace_id_of(traceparent: str) -> str:
    _, trace_id = Telemetry(None).request_ids({b"traceparent": traceparent.encode()})
    return trace_id


@pytest.mark.parametrize("version", ["00", "01", "fe"])
def test_the_trace_of_a_valid_header_is_kept(version: str) -> None:
    """A later version may not change what the first four fields mean."""
    assert trace_id_of(f"{version}-{TRACE}-{SPAN}-01") == TRACE


@pytest.mark.parametrize(
    "traceparent",
    [
        f"ff-{TRACE}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"00-{TRACE}a-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}b-01",
        f"00-{TRACE}-{SPAN[1:]}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN.upper()}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-0x",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_a_header_that_is_not_valid_is_ignored(traceparent: str) -> None:
    """The request gets a trace of its own."""
    trace_id = trace_id_of(traceparent)
    assert trace_id != TRACE
    assert len(trace_id) == 32
