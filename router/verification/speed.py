"""Compares how fast two engines are: time to the first token and time of each further one, at several loads.

At each load both engines get the same prompts, in turns: what else runs on the machines then disturbs both alike. Each turn
sends one request from each of so many streams at once. No prompt is sent twice, so no prefix cache helps.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from router.verification.findings import SpeedComparison, SpeedFinding
from tiers.errors import ProbeError
from tiers.probe import COMPLETIONS
from tiers.verification.findings import Role

if TYPE_CHECKING:
    from tiers.probe import Generation
    from tiers.verification.engine import ComparedEngine

LOADS = (1, 4, 16)  # streams
ROUNDS = 3  # turns of each engine at each load
OUTPUT_TOKENS = 64
PROMPT_TOKENS = 256
SHORTEST_PROMPT_TOKENS = 8
REQUEST_TIMEOUT_S = 600.0
BUDGET_S = 180.0
# A load of four times as many streams takes about so many times as long.
LOAD_GROWTH = 2.0
# Ids of tokens that are ordinary in every large tokenizer. Prompts are random, so that no prefix is cached.
FIRST_ID = 1000
LAST_ID = 20_000


@dataclass(frozen=True, slots=True)
class SpeedPlan:
    """What is sent.

    Attributes:
        loads: Numbers of streams at once, each 1 or more.
        rounds: Turns of each engine at each load.
        output_tokens: Tokens of each answer, 2 or more.
        budget_s: Time after which no further load is begun; the first one is measured in any case.
        timeout_s: Longest time of one answer, in seconds.
    """

    loads: tuple[int, ...] = LOADS
    rounds: int = ROUNDS
    output_tokens: int = OUTPUT_TOKENS
    budget_s: float = BUDGET_S
    timeout_s: float = REQUEST_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class SpeedProgress:
    """How far the measurement is.

    Attributes:
        streams: The load that is measured now.
        turns_done: Turns that are done, of both engines and all loads.
        turns_total: All turns.
        remaining_s: About how many seconds are left; None: nothing is known yet.
    """

    streams: int
    turns_done: int
    turns_total: int
    remaining_s: float | None


def ignore_progress(_progress: SpeedProgress) -> None:
    """Take no notice of the progress."""


async def compare_speed(
    reference: ComparedEngine,
    candidate: ComparedEngine,
    plan: SpeedPlan | None = None,
    report_progress: Callable[[SpeedProgress], None] = ignore_progress,
) -> SpeedFinding:
    """Measure both engines at each load.

    Args:
        reference: One engine.
        candidate: The other one.
        plan: What to send; None: the usual plan.
        report_progress: Called before each turn.

    Raises:
        ProbeError: An engine does not answer, or sends all of an answer at once.
    """
    plan = plan or SpeedPlan()
    engines: dict[Role, ComparedEngine] = {
        "reference": reference,
        "candidate": candidate,
    }
    measurement = _SpeedMeasurement(engines, plan, report_progress)
    return await measurement.run()


class _SpeedMeasurement:
    """One measurement of both engines."""

    def __init__(
        self,
        engines: Mapping[Role, ComparedEngine],
        plan: SpeedPlan,
        report_progress: Callable[[SpeedProgress], None],
    ) -> None:
        self._engines = engines
        self._plan = plan
        self._report_progress = report_progress
        self._prompt_tokens = _prompt_tokens(engines, plan.output_tokens)
        self._random = random.Random()  # noqa: S311  prompts are no secret
        self._turns_done = 0
        self._began = time.monotonic()

    async def run(self) -> SpeedFinding:
        """Measure one load after the other, as far as the time allows."""
        comparisons: list[SpeedComparison] = []
        not_measured: list[str] = []
        load_s = 0.0
        for streams in self._plan.loads:
            is_too_long = self._took_s() + LOAD_GROWTH * load_s > self._plan.budget_s
            if comparisons and is_too_long:
                not_measured.append(
                    f"Speed with {streams} streams: measuring it would take too long at the speed seen with fewer."
                )
                continue
            began = time.monotonic()
            comparisons.append(await self._compare(streams))
            load_s = time.monotonic() - began
        return SpeedFinding(
            loads=tuple(comparisons),
            took_s=self._took_s(),
            not_measured=tuple(not_measured),
        )

    async def _compare(self, streams: int) -> SpeedComparison:
        """Measure both engines in turns with so many streams, the first turn of each apart: it warms them up."""
        generations: defaultdict[Role, list[Generation]] = defaultdict(list)
        for number in range(1 + self._plan.rounds):
            prompts = [self._prompt() for _ in range(streams)]
            for role in _roles_of_round(number):
                self._show(streams)
                answers = await self._take_turn(self._engines[role], prompts)
                self._turns_done += 1
                if number > 0:
                    generations[role] += answers
        return SpeedComparison(
            streams=streams,
            reference_ttft_ms=_median_ttft_ms(generations["reference"]),
            candidate_ttft_ms=_median_ttft_ms(generations["candidate"]),
            reference_tpot_ms=self._median_tpot_ms("reference", generations),
            candidate_tpot_ms=self._median_tpot_ms("candidate", generations),
        )

    async def _take_turn(
        self, engine: ComparedEngine, prompts: Sequence[Sequence[int]]
    ) -> list[Generation]:
        """Have an engine continue all prompts at once."""
        bodies = [
            {
                "model": engine.model,
                "prompt": list(prompt),
                "max_tokens": self._plan.output_tokens,
                "ignore_eos": True,
            }
            for prompt in prompts
        ]
        requests: list[asyncio.Task[Generation]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for body in bodies:
                    generating = engine.probe.generate(
                        COMPLETIONS, body, self._plan.timeout_s
                    )
                    requests.append(group.create_task(generating))
        except* ProbeError as errors:
            raise _first_of(errors) from None
        return [request.result() for request in requests]

    def _prompt(self) -> list[int]:
        ids = range(FIRST_ID, LAST_ID)
        return self._random.choices(ids, k=self._prompt_tokens)

    def _median_tpot_ms(
        self, role: Role, generations: Mapping[Role, Sequence[Generation]]
    ) -> float:
        paces_ms = [
            generation.tpot_ms for generation in generations[role] if generation.tpot_ms
        ]
        if not paces_ms:
            raise ProbeError(
                f"the {role} sends each answer all at once, so its pace cannot be measured: leave out --speed, or ask the "
                "engine without a proxy that holds streams back"
            )
        return median(paces_ms)

    def _took_s(self) -> float:
        return time.monotonic() - self._began

    def _show(self, streams: int) -> None:
        """Report the progress; a turn of a later load counts like the mean one so far."""
        turns_total = (
            len(self._plan.loads) * (1 + self._plan.rounds) * len(self._engines)
        )
        remaining_s = None
        if self._turns_done:
            turn_s = self._took_s() / self._turns_done
            remaining_s = turn_s * (turns_total - self._turns_done)
        self._report_progress(
            SpeedProgress(
                streams=streams,
                turns_done=self._turns_done,
                turns_total=turns_total,
                remaining_s=remaining_s,
            )
        )


def _prompt_tokens(engines: Mapping[Role, ComparedEngine], output_tokens: int) -> int:
    """Return the length of prompts that fits both engines with an answer; ``ProbeError``: none does."""
    context = min(engine.identity.max_model_len for engine in engines.values())
    room = context - output_tokens
    if room < SHORTEST_PROMPT_TOKENS:
        raise ProbeError(
            f"a context of {context} tokens is too short to measure the speed: it needs {output_tokens} tokens of output "
            f"and {SHORTEST_PROMPT_TOKENS} of a prompt"
        )
    return min(PROMPT_TOKENS, room)


def _roles_of_round(number: int) -> tuple[Role, ...]:
    """Return the order of the engines; it changes from round to round."""
    if number % 2:
        return ("candidate", "reference")
    return ("reference", "candidate")


def _median_ttft_ms(generations: Sequence[Generation]) -> float:
    return median(generation.ttft_ms for generation in generations)


def _first_of(errors: BaseExceptionGroup[ProbeError]) -> ProbeError:
    """Return the first error of a group of errors and groups."""
    first = errors.exceptions[0]
    if isinstance(first, BaseExceptionGroup):
        return _first_of(first)
    return first
