"""Mirroring: a share of answered requests is asked again of a second fleet, and both answers are compared.

It is sent after the caller has its whole answer, by a task of its own, so that nothing of the second fleet can delay or
fail an answer here. So many are in flight at most; what comes meanwhile is dropped and counted, never queued.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextvars import Context
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.aio import end_tasks
from router.profiling.mirror_client import MirrorClient, MirrorError, comparable, is_greedy
from router.profiling.mirror_comparison import AnswerText, MirrorOutcome, MirrorResult, compare
from router.upstream.engine_stream import BufferedAnswer, EngineStream
from router.upstream.json_object import read_json
from router.upstream.transport import EngineTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from classifier import PromptClass
    from router.policy.decision import Decision
    from router.settings import MirrorSettings
    from router.upstream.engine_request import ChatRequest, RelayRequest
    from router.upstream.engine_stream import EngineAnswer, EngineRequest
    from router.upstream.progress import Progress
    from tiers.spec import TierName

log = logging.getLogger(f"qarr.{__name__}")
SILENT_S = 60.0  # after a line on failures, before the next one


@dataclass(frozen=True, slots=True)
class Served:
    """An answered request, until it was mirrored.

    Attributes:
        hint: The tier that its caller asked for.
        source: Of the answer's text: what came of a stream, or a whole body.
    """

    kind: PromptClass
    tier: TierName
    request: ChatRequest | RelayRequest
    request_id: str
    hint: TierName | None
    source: Progress | bytes
    finish_reason: str | None
    ttft_s: float | None
    duration_s: float

    def answer(self) -> AnswerText:
        """Return the answer; its text is read only here.

        Raises:
            ValueError: It has no text, like KeyError and TypeError.
        """
        if isinstance(self.source, bytes):
            choice = read_json(self.source)["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
        else:
            self.source.catch_up()
            text = self.source.text
        return AnswerText(text or "", self.finish_reason, self.ttft_s, self.duration_s)


class Mirror:
    """Mirrors a share of what is answered here.

    Attributes:
        observers: Called with what became of each mirrored request.
        settings: In force.
    """

    def __init__(self, settings: MirrorSettings) -> None:
        self.observers: list[Callable[[MirrorResult], None]] = []
        self._transport = EngineTransport()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed, self._silent_until = 0, 0.0
        self.take(settings)

    def take(self, settings: MirrorSettings) -> None:
        """Take new settings; what is in flight ends by those before."""
        self.settings, self._client = settings, MirrorClient(settings, self._transport)

    def offer(self, decision: Decision, answer: EngineAnswer, request: EngineRequest, request_id: str) -> None:
        """Mirror a complete answer's request, by chance."""
        settings = self.settings
        if not settings.url or random.random() >= settings.share:  # noqa: S311  no secret
            return
        query = decision.query
        source, asked = _source_of(answer), comparable(request, query.sequences)
        if source is None or asked is None:
            return
        kind = query.features.prompt_class
        if len(self._tasks) >= settings.max_in_flight:
            self._tell(MirrorResult(kind, answer.tier, MirrorOutcome.DROPPED))
            return
        ttft_s = answer.ttft_ms / 1000 if answer.ttft_ms is not None else None
        took_s = time.monotonic() - answer.sent_at
        served = Served(
            kind, answer.tier, asked, request_id, query.hint, source, answer.finish_reason, ttft_s, took_s
        )  # fmt: skip
        # Of the request's own context nothing is kept: neither its span nor its place in the log.
        task = asyncio.create_task(self._mirror(served, self._client), name="mirroring", context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Give up what is in flight, and close the connections."""
        await end_tasks(list(self._tasks))
        await self._transport.aclose()

    async def _mirror(self, served: Served, client: MirrorClient) -> None:
        try:
            there = await client.ask(served.request, served.request_id, served.hint)
            here, greedy = served.answer(), is_greedy(served.request)
            self._tell(compare(served.kind, served.tier, here, there, greedy=greedy))
        except MirrorError as error:
            self._fail(served, str(error))
        except Exception as error:  # noqa: BLE001  its text may quote prompt or answer
            self._fail(served, type(error).__name__)

    def _fail(self, served: Served, why: str) -> None:
        """Count a failure, and log it unless there was a line in the last minute."""
        self._tell(MirrorResult(served.kind, served.tier, MirrorOutcome.FAILED))
        self._failed += 1
        now = time.monotonic()
        if now >= self._silent_until:
            log.warning("mirroring: %s (failures since the last such line: %d)", why, self._failed)
            self._failed, self._silent_until = 0, now + SILENT_S

    def _tell(self, result: MirrorResult) -> None:
        for observe in self.observers:
            observe(result)


def _source_of(answer: EngineAnswer) -> Progress | bytes | None:
    """Return where an answer's text is found; None where it has none that can be compared, or several engines made it."""
    if isinstance(answer, BufferedAnswer):
        return answer.content
    return answer.progress if isinstance(answer, EngineStream) and not answer.failed_over else None
