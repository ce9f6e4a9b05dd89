"""Opening an answer: what every strategy of the pipeline does, each around the one below it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from router.pipeline.admission import Admitted
    from router.upstream.client import Upstream
    from router.upstream.engine_stream import EngineAnswer, EngineRequest


class Opener(Protocol):
    """Opens answers."""

    async def open(self, admitted: Admitted, request: EngineRequest, sent_at: float) -> EngineAnswer:
        """Return an answer that has begun.

        Args:
            admitted: What was decided, and the slot that was taken for it.
            request: What to ask.
            sent_at: When the request was first sent, by the monotonic clock.

        Raises:
            UpstreamError: As ``Upstream.open``.
        """


@dataclass(frozen=True, slots=True)
class Direct:
    """Opens answers on the slot that was taken, and elsewhere only if that fails before the first token."""

    upstream: Upstream

    async def open(self, admitted: Admitted, request: EngineRequest, sent_at: float) -> EngineAnswer:
        """Open an answer.

        Raises:
            UpstreamError: As ``Upstream.open``.
        """
        return await self.upstream.open(admitted.decision, request, sent_at, lease=admitted.lease)
