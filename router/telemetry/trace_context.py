"""W3C trace context and baggage: the headers that callers send, and those that engines get where a request has no spans."""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random
from typing import TypeAlias

from msgspec import Struct
from starlette.types import Scope

Headers: TypeAlias = "tuple[tuple[bytes, bytes], ...]"
TRACEPARENT = b"traceparent"
TRACESTATE = b"tracestate"
BAGGAGE = b"baggage"
CARRIERS = (TRACEPARENT, TRACESTATE, BAGGAGE)
# Version, trace id, span id and flags (https://www.w3.org/TR/trace-context/): version ff and ids of zeros are not valid.
_TRACEPARENT_FORMAT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_RANDOM = Random()  # noqa: S311  as OpenTelemetry's own ids: no secrets


def random_hex(digits: int) -> str:
    """Return an even number of random hexadecimal digits."""
    return _RANDOM.getrandbits(4 * digits).to_bytes(digits // 2).hex()


def trace_id_of(traceparent: str) -> str | None:
    """Return the trace id of a ``traceparent`` header; None: the header is not valid."""
    match = _TRACEPARENT_FORMAT.fullmatch(traceparent)
    return None if match is None else match[1]


class CallersTrace(Struct, frozen=True):
    """The trace that a request belongs to.

    Attributes:
        carried: The caller's headers of trace context and baggage, by name.
        parent: The caller's ``traceparent``; None: there is none that is valid.
        trace_id: The caller's, or a new one.
    """

    carried: Mapping[bytes, bytes]
    parent: str | None
    trace_id: str

    @classmethod
    def of(cls, scope: Scope) -> CallersTrace:
        carried = _carried_headers(scope)
        parent = carried.get(TRACEPARENT, b"").decode("latin-1")
        trace_id = trace_id_of(parent) if parent else None
        if trace_id is None:
            return cls(carried, None, random_hex(32))
        return cls(carried, parent, trace_id)

    def headers_to_engines(self, *, is_dropped: bool) -> Headers:
        """Return the headers that a request without spans passes on to engines, ``traceparent`` first.

        ``is_dropped``: the sampler dropped the request, and engines that trace are to keep to its choice.
        """
        if self.parent is None:
            parent = f"00-{self.trace_id}-{random_hex(16)}-00"
            other_names: tuple[bytes, ...] = (BAGGAGE,)
        else:
            parent = f"{self.parent[:-2]}00" if is_dropped else self.parent
            other_names = (TRACESTATE, BAGGAGE)
        other_headers = [
            (name, self.carried[name]) for name in other_names if name in self.carried
        ]
        return ((TRACEPARENT, parent.encode("latin-1")), *other_headers)


def _carried_headers(scope: Scope) -> dict[bytes, bytes]:
    """Return the headers of a request's trace context and baggage, by name.

    A client may write a list in several lines, which are one (RFC 9110, 5.3): they are joined, also in the scope, since
    OpenTelemetry reads the first line alone. Two lines of ``traceparent``, which is no list, are no valid trace context.
    """
    lines = [header for header in scope["headers"] if header[0] in CARRIERS]
    carried: dict[bytes, bytes] = {}
    for name, value in lines:
        earlier_value = carried.get(name)
        carried[name] = value if earlier_value is None else earlier_value + b"," + value
    if len(carried) < len(lines):
        other_headers = [
            header for header in scope["headers"] if header[0] not in CARRIERS
        ]
        scope["headers"] = [*other_headers, *carried.items()]
    return carried
