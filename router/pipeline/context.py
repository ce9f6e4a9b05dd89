"""What is known of a request apart from its body."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from router.auth.api_keys import ANONYMOUS, Caller


@dataclass(frozen=True, slots=True)
class RequestContext:
    """A request's ids and caller, from its first to its last byte.

    Attributes:
        request_id: The caller's own where it sent a usable one.
        trace_id: Of the trace that the request belongs to.
        caller: Whose key it carries.
        route: Its path.
        arrived: When all of it was there, by the monotonic clock, in seconds.
        limits: Headers about the key's quotas; filled once they are known, carried by errors as well.
    """

    request_id: str
    trace_id: str
    caller: Caller = ANONYMOUS
    route: str = ""
    arrived: float = field(default_factory=time.monotonic)
    limits: dict[str, str] = field(default_factory=dict)

    @property
    def ids(self) -> dict[str, str]:
        """Return the ids as bodies of errors and answers carry them."""
        return {"request_id": self.request_id, "trace_id": self.trace_id}

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that every answer carries."""
        return {"x-request-id": self.request_id, "x-qarr-trace-id": self.trace_id, **self.limits}
