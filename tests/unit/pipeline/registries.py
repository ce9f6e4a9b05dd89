"""Registries of running requests, and requests that end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from msgspec import structs

from router.auth.api_keys import Caller
from router.lifecycle import ServerState
from router.pipeline.registry import ActiveRequest, RequestRegistry
from router.pipeline.request import RequestContext
from router.policy.decision import Decision
from router.telemetry.record import (
    RequestRecord,
)


def registry_of(kept: int = 8, state: ServerState | None = None) -> RequestRegistry:
    return RequestRegistry(state or ServerState(), kept)


def context(**fields: object) -> RequestContext:
    return structs.replace(
        RequestContext("r1", "t1", caller=Caller("k1", "one"), route="/generate"),
        **fields,
    )  # type: ignore[arg-type]


@contextmanager
def entry(
    registry: RequestRegistry,
    context: RequestContext,
    decision: Decision,
    priority: int,
) -> Iterator[ActiveRequest]:
    """Keep a request among the open ones for as long as the block takes, and end it as the block ends."""
    request = registry.begin(context, decision, priority)
    error = None
    try:
        yield request
    except BaseException as caught:
        error = caught
        raise
    finally:
        registry.end(request, error)
        registry.tell()


def ended(
    registry: RequestRegistry, decision: Decision, error: BaseException
) -> RequestRecord:
    """Let a request end by an error before it was admitted, and return its record."""
    with pytest.raises(type(error)), entry(registry, context(), decision, priority=0):
        raise error
    return registry.recent[-1]
