"""Record everything about a reference that later verifications need, so that it need not run then."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from router.verification.progress import ProgressListener, StepCounter
from router.verification.wording import Stage
from tiers.errors import NoScoresError, RefusedError
from tiers.together import first_error
from tiers.verification.likelihood import prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from router.profiling.tasks import Task
    from router.verification.participants import LiveEngine, ThinkingWish


async def record(
    reference: LiveEngine,
    tasks: Sequence[Task],
    wish: ThinkingWish,
    listener: ProgressListener,
    *,
    parallel: int,
    time_limit_s: float | None = None,
) -> None:
    """Have an engine tell its facts, write its texts and answer all tasks, as far as it has not done so yet.

    Args:
        reference: The engine. Its ``as_saved`` returns what it has told.
        tasks: They are answered in this order, unless the time is used up first.
        wish: Whether and how long its model is asked to think.
        listener: Is told of progress.
        parallel: Number of tasks that are asked at a time.
        time_limit_s: How long tasks are answered at most, in seconds; None: until all are answered.

    Raises:
        ProbeError: The engine stops answering.
    """
    listener.begin(Stage.RECORDING)
    # each text is written and scored
    texts = 2 * len(prompts(quick=reference.is_quick))
    progress = StepCounter(listener, texts + len(tasks), "texts and answers recorded")
    await reference.tell_facts()
    # answers can be compared without probabilities as well
    with suppress(NoScoresError):
        await reference.write(reference.identity.max_model_len, progress.count_one)
    if reference.settled_limits is None:
        context = reference.identity.max_model_len
        reference.settled_limits = await reference.find_limits(wish, context)
    with suppress(TimeoutError):
        async with asyncio.timeout(time_limit_s):
            await _answer_all(reference, tasks, progress, parallel=parallel)
    listener.finish(Stage.RECORDING, None)


async def _answer_all(
    reference: LiveEngine,
    tasks: Sequence[Task],
    progress: StepCounter,
    *,
    parallel: int,
) -> None:
    places = asyncio.Semaphore(parallel)

    async def answer(task: Task) -> None:
        async with places:
            if not reference.has_answered(task):
                # what an engine refuses is recorded as refused
                with suppress(RefusedError):
                    await reference.answer(task)
        progress.count_one()

    try:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(answer(task))
    except ExceptionGroup as errors:
        raise first_error(errors) from errors
