"""Has a running engine answer tasks."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.profiling.answering import (
    NO_THINKING,
    AnswerLimits,
    answer_body,
    read_answer,
)
from tiers.errors import ProbeError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.profiling.model_answer import ModelAnswer
    from router.profiling.tasks import Task
    from tiers.verification.engine import Engine

ANSWER_TIMEOUT_S = 900.0
# Pauses before a request is sent again: engines restart, and routers are full now and then.
RETRY_PAUSES_S = (1.0, 5.0)


@dataclass(frozen=True, slots=True)
class LiveAnswerer:
    """Asks an engine, greedily.

    Attributes:
        engine: The engine, and the model's name.
        limits: How the model is asked to think.
        timeout_s: Longest time of one answer, in seconds.
        retry_pauses_s: Pauses before a request that failed is sent again; it fails for good after the last one.
    """

    engine: Engine
    limits: AnswerLimits = NO_THINKING
    timeout_s: float = ANSWER_TIMEOUT_S
    retry_pauses_s: Sequence[float] = RETRY_PAUSES_S

    async def answer(self, task: Task) -> ModelAnswer:
        """Have the engine answer a task.

        Raises:
            RefusedError: The engine does not take this task.
            ProbeError: It fails again and again, or takes too long.
        """
        for pause_s in self.retry_pauses_s:
            began = time.monotonic()
            try:
                return await self._ask(task)
            except RefusedError:
                raise
            except ProbeError:
                # Another answer would take as long.
                if time.monotonic() - began >= self.timeout_s:
                    raise
            await asyncio.sleep(pause_s)
        return await self._ask(task)

    async def _ask(self, task: Task) -> ModelAnswer:
        body = answer_body(task, self.limits)
        body["model"] = self.engine.model
        response = await self.engine.probe.chat_completion(body, self.timeout_s)
        try:
            return read_answer(response, self.limits)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise ProbeError(
                f"{self.engine.identity.name} does not answer a chat as vLLM does: {type(error).__name__} {error}"
            ) from error
