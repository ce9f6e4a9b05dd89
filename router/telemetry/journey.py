"""What each request went through. Traces on the page are made from it, so that requests need no spans for them."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tiers.spec import TierName


@dataclass(slots=True, eq=False)
class Hop:
    """A request to an engine or to the overflow. Times are in seconds by the monotonic clock.

    Attributes:
        operation: GenAI's name of it.
        model: As the engine calls it.
        tier: None: the overflow is asked.
        number: Attempts that failed before this one.
        first_token_at: None: there was none yet.
        ended: None: it has not ended yet.
        result: Span attributes that are known at its end.
        message: What its exception says; empty: there was none.
    """

    operation: str
    model: str
    url: str
    began: float
    tier: TierName | None = None
    replica: str = ""
    precision: str = ""
    checkpoint: str = ""
    number: int = 0
    overflow: str = ""
    first_token_at: float | None = None
    ended: float | None = None
    result: dict[str, Any] = field(default_factory=dict)
    message: str = ""

    @property
    def name(self) -> str:
        return f"{self.operation} {self.model}"


class Event(NamedTuple):
    """An event of the server span; ``at`` is in seconds by the monotonic clock."""

    name: str
    at: float
    attributes: dict[str, Any]


@dataclass(slots=True, eq=False)
class Journey:
    """One request's way through the router. Times are in seconds by the monotonic clock.

    Attributes:
        arrived: When the whole request was there.
        classified: When its prompt was read and classified.
        decided: When its tier was chosen.
        began: When classification began.
        prompt: Until the spans are made, where prompts are to be on them.
        waits: Begin and end of its time in the queue, if it was there.
    """

    arrived: float
    began: float
    classified: float
    decided: float
    prompt: str = ""
    waits: list[tuple[float, float]] = field(default_factory=list)
    hops: list[Hop] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)


JOURNEY: ContextVar[Journey | None] = ContextVar("qarr_journey", default=None)  # the present request's
