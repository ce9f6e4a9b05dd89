"""Measures a running fleet's speed under known load: each tier alone, then all together."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Any, NamedTuple, TypeVar

from router.policy.profiles import LatencyProfile, ProfileError, SpeedSample
from router.profiling.fit_latency import MIN_VALUES, fit_tiers
from router.profiling.measuring_client import (
    FleetState,
    MeasuringClient,
    TimedAnswer,
    first_of,
)
from tiers.spec import TierName

PROMPT_LENGTHS = (16, 64, 256, 1024)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPT_TOKENS = 24
LENGTH_REPEATS = 3  # how often each prompt length is measured
OTHER_STEPS = 2  # the warm-up, and prompts that arrive while others are decoded
ALONE_SHARE = 0.8  # share of the budget for measuring each tier alone
TOGETHER_BATCHES = (1, 4)
BACKGROUND_BATCH = 4  # sequences that are decoded while further prompts arrive
# Ids of tokens that are ordinary in every large tokenizer. Prompts are random, so that no prefix is cached.
FIRST_ID = 1000
LAST_ID = 20000
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class LatencyPlan:
    """What is measured, and how long that may take.

    Attributes:
        step_s: Approximate duration of one step; bounds prompt and answer lengths on slow tiers.
        tiers: The tiers to measure; empty: all ready ones.
        budget_s: Approximate duration of all steps. Long prompts and large batches that the fit does not need are skipped
            for it.
        prompt_s: Longest time of a prompt; a request that comes meanwhile waits for it.
        attempts: How often a step is tried that others' requests disturb.
    """

    step_s: float
    tiers: tuple[TierName, ...] = ()
    budget_s: float = math.inf
    prompt_s: float = math.inf
    attempts: float = 3


async def measure_latency(
    client: MeasuringClient,
    plan: LatencyPlan,
    report_progress: Callable[[str, int, int], None],
) -> LatencyProfile:
    """Measure the tiers of the plan, and return the profile.

    Args:
        client: The client of the fleet.
        plan: What to measure.
        report_progress: Called with the next step, the number of steps done, and their approximate total.

    Raises:
        ProfileError: The router does not answer, a tier is not ready, or others' requests do not end.
    """
    fleet = await client.fleet()
    tiers = _tiers_to_measure(fleet, plan)
    measurement = _LatencyMeasurement(
        client, fleet, plan=plan, tiers=tiers, report_progress=report_progress
    )
    for tier in tiers:
        await measurement.measure_alone(tier)
    if len(tiers) > 1:
        await measurement.measure_together()
    samples = measurement.samples
    max_num_seqs = {tier: fleet.tiers[tier].max_num_seqs for tier in tiers}
    return LatencyProfile(
        created=datetime.now(UTC),
        model=fleet.model,
        machine=fleet.machine,
        checkpoints=dict(fleet.checkpoints),
        builds=dict(fleet.builds),
        fits=fit_tiers(samples, max_num_seqs),
        samples=tuple(samples),
    )


def _tiers_to_measure(fleet: FleetState, plan: LatencyPlan) -> tuple[TierName, ...]:
    """Return the tiers of the plan; ``ProfileError``: one is not ready, or has several replicas."""
    if not fleet.tiers:
        raise ProfileError("no tier is ready")
    tiers = plan.tiers or tuple(fleet.tiers)
    for tier in tiers:
        if tier not in fleet.tiers:
            raise ProfileError(f"tier {tier} is not ready")
        replicas = fleet.tiers[tier].replicas
        if replicas > 1:
            raise ProfileError(
                f"tier {tier} has {replicas} replicas that requests are spread over: measure with one each"
            )
    return tiers


class Measured(NamedTuple):
    """A timed answer, and the sample that it makes."""

    sample: SpeedSample
    answer: TimedAnswer


@dataclass(slots=True)
class _Bench:
    """One tier during one step: the requests that it has, and what was measured of them.

    Attributes:
        client: The client of the fleet.
        tier: The tier.
        sequences: Number of open requests.
        waiting_tokens: Tokens of prompts that are not computed yet.
        sent: Number of requests ever sent.
        last_answer: The answer that ended last; None: none has ended.
        all_computed: Set while no prompt waits to be computed.
        measured: What was measured, in the order in which answers ended.
    """

    client: MeasuringClient
    tier: TierName
    sequences: int = 0
    waiting_tokens: int = 0
    sent: int = 0
    last_answer: TimedAnswer | None = None
    all_computed: asyncio.Event = field(default_factory=asyncio.Event)
    measured: list[Measured] = field(default_factory=list)

    async def request(
        self, prompt_tokens: int, tokens: int, batch: int, *, neighbours: float = 0.0
    ) -> None:
        """Time one request under the present load.

        TTFT is left out if another request came before the first token: engines compute waiting prompts together, and a
        prediction knows of no later request.
        """
        sequences_before = self.sequences
        waiting_tokens_before = self.waiting_tokens
        self.sequences += 1
        self.sent += 1
        self.waiting_tokens += prompt_tokens
        self.all_computed.clear()
        number = self.sent
        is_computed = False
        is_newest_at_first_token = False

        def note_first_token() -> None:
            nonlocal is_computed, is_newest_at_first_token
            is_newest_at_first_token = self.sent == number
            if not is_computed:
                self.waiting_tokens -= prompt_tokens
                is_computed = True
            if not self.waiting_tokens:
                self.all_computed.set()

        try:
            answer = await self.client.time(
                self.tier, _random_prompt(prompt_tokens), tokens, note_first_token
            )
        finally:
            if not is_computed:
                self.waiting_tokens -= prompt_tokens
            self.sequences -= 1
        has_pace = answer.tpot_ms is not None
        sample = SpeedSample(
            tier=self.tier,
            prompt_tokens=prompt_tokens,
            sequences=sequences_before,
            waiting_tokens=waiting_tokens_before,
            batch=batch if has_pace else 0,
            neighbours=neighbours,
            ttft_ms=round(answer.ttft_ms, 2) if is_newest_at_first_token else None,
            tpot_ms=_rounded_tpot_ms(answer),
        )
        self.measured.append(Measured(sample, answer))
        self.last_answer = answer

    async def burst(self, batch: int, tokens: int) -> None:
        """Decode a batch, all sent at once.

        The pace of answers that began early is left out: the others' prompts slowed it.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(batch):
                group.create_task(self.request(PROMPT_TOKENS, tokens, batch))
        last_began_at = max(_began_at(answer) for _, answer in self.measured)
        for number, (sample, answer) in enumerate(self.measured):
            two_steps_s = 2 * (answer.tpot_ms or 0.0) / 1000
            if _began_at(answer) < last_began_at - two_steps_s:
                paceless = sample.model_copy(update={"batch": 0, "tpot_ms": None})
                self.measured[number] = Measured(paceless, answer)

    def samples_until(self, end: float) -> list[SpeedSample]:
        """Return the samples of answers that ended by a time; all samples if there is none.

        The batch of later answers was no longer full.
        """
        in_time = [sample for sample, answer in self.measured if answer.ended <= end]
        return in_time or [sample for sample, _ in self.measured]


def _random_prompt(tokens: int) -> list[int]:
    return [random.randint(FIRST_ID, LAST_ID) for _ in range(tokens)]  # noqa: S311  no secret


def _rounded_tpot_ms(answer: TimedAnswer) -> float | None:
    if answer.tpot_ms is None:
        return None
    return round(answer.tpot_ms, 3)


def _began_at(answer: TimedAnswer) -> float:
    """Return when the first token of an answer came, by the monotonic clock in seconds."""
    return answer.started + answer.ttft_ms / 1000


BenchStep = Callable[[_Bench], Coroutine[Any, Any, None]]


class _LatencyMeasurement:
    """One measurement of a fleet's speed."""

    def __init__(
        self,
        client: MeasuringClient,
        fleet: FleetState,
        plan: LatencyPlan,
        tiers: tuple[TierName, ...],
        report_progress: Callable[[str, int, int], None],
    ) -> None:
        self._client = client
        self._fleet = fleet
        self._plan = plan
        self._tiers = tiers
        self._report_progress = report_progress
        self._spent_s = 0.0  # in steps, without waiting for others
        self._steps_done = 0
        self._steps_total = sum(self._step_count(tier) for tier in tiers)
        if len(tiers) > 1:
            self._steps_total += len(TOGETHER_BATCHES)
        self.samples: list[SpeedSample] = []

    def _step_count(self, tier: TierName) -> int:
        """Return the number of a tier's steps if none is skipped."""
        limits = self._fleet.tiers[tier]
        lengths = sum(length < limits.max_model_len for length in PROMPT_LENGTHS)
        batches = sum(batch <= limits.max_num_seqs for batch in BATCHES)
        return OTHER_STEPS + LENGTH_REPEATS * lengths + batches

    async def measure_alone(self, tier: TierName) -> None:
        """Measure a tier while no other is asked: prompts, batches, prompts that arrive while others are decoded."""
        budget_s = self._plan.budget_s * ALONE_SHARE / len(self._tiers)
        end_s = self._spent_s + budget_s
        done_at_end = self._steps_done + self._step_count(tier)
        warm_up = await self._take_step(
            f"{tier}: warming", tier, partial(_Bench.burst, batch=1, tokens=4)
        )
        await self._measure_prompts(tier, end_s)
        await self._measure_batches(tier, warm_up.tpot_ms or warm_up.ttft_ms, end_s)
        await self._take_and_keep(
            f"{tier}: prompts while others are decoded", tier, self._arrival
        )
        self._steps_done = done_at_end

    async def _measure_prompts(self, tier: TierName, end_s: float) -> None:
        """Measure the TTFT of prompts of rising length, as far as there is time for them."""
        max_model_len = self._fleet.tiers[tier].max_model_len
        measured_ttfts: list[tuple[int, float]] = []
        for length in PROMPT_LENGTHS:
            if length + 1 > max_model_len:
                break
            if self._takes_too_long(length, measured_ttfts, end_s):
                break
            step_name = f"{tier}: prompt of {length} tokens"
            single = partial(_Bench.request, prompt_tokens=length, tokens=1, batch=0)
            ttfts_ms: list[float] = []
            for _ in range(LENGTH_REPEATS):
                answer = await self._take_and_keep(step_name, tier, single)
                ttfts_ms.append(answer.ttft_ms)
            measured_ttfts.append((length, min(ttfts_ms)))

    def _takes_too_long(
        self, length: int, measured_ttfts: list[tuple[int, float]], end_s: float
    ) -> bool:
        """Tell whether a prompt is expected to take too long, by the two lengths before it, which are always measured."""
        if len(measured_ttfts) < MIN_VALUES:
            return False
        shorter, shorter_ms = measured_ttfts[-2]
        longer, longer_ms = measured_ttfts[-1]
        growth_ms = (length - longer) * (longer_ms - shorter_ms) / (longer - shorter)
        expected_s = (longer_ms + growth_ms) / 1000
        if expected_s > min(self._plan.step_s, self._plan.prompt_s):
            return True
        return self._spent_s + LENGTH_REPEATS * expected_s > end_s

    async def _measure_batches(
        self, tier: TierName, step_ms: float, end_s: float
    ) -> None:
        """Measure the pace of rising batches, as far as there is time for them.

        Args:
            tier: The tier.
            step_ms: Time of its decode step, as far as known.
            end_s: Time spent in steps at which those that a fit does not need are skipped.
        """
        for number, batch in enumerate(BATCHES):
            if batch > self._fleet.tiers[tier].max_num_seqs:
                break
            is_needed = number < MIN_VALUES
            if not is_needed and self._spent_s + self._plan.step_s > end_s:
                break
            # A larger batch is slower: one of 8 is expected to need twice as long.
            expected_step_ms = step_ms * (1 + batch / 8)
            tokens = _bounded(self._plan.step_s * 1000 / expected_step_ms, 6, 64)
            burst = partial(_Bench.burst, batch=batch, tokens=tokens)
            answer = await self._take_and_keep(
                f"{tier}: {batch} at a time", tier, burst
            )
            step_ms = answer.tpot_ms or step_ms

    async def _arrival(self, bench: _Bench) -> None:
        """Measure prompts that arrive while others are decoded."""
        background = min(BACKGROUND_BATCH, self._fleet.tiers[bench.tier].max_num_seqs)
        arriving_lengths = (PROMPT_TOKENS, 4 * PROMPT_TOKENS)
        step_ms = self._single_step_ms(bench.tier)
        prefill_ms = self._ttft_ms_per_token(bench.tier) * sum(arriving_lengths)
        # The background is decoded for twice as long as the arriving prompts should take.
        tokens = _bounded(2 * prefill_ms / step_ms, 10, 200)
        async with asyncio.TaskGroup() as group:
            decoding = [
                group.create_task(bench.request(PROMPT_TOKENS, tokens, background))
                for _ in range(background)
            ]
            await asyncio.sleep(0)
            await bench.all_computed.wait()
            for length in arriving_lengths:
                if not any(task.done() for task in decoding):
                    await bench.request(length, 1, 0)
        # The prompts disturbed the background's pace, so it does not tell how batch size affects it.
        bench.measured = [
            measured for measured in bench.measured if measured.sample.batch == 0
        ]

    def _ttft_ms_per_token(self, tier: TierName) -> float:
        """Return the shortest TTFT of a tier for each token of its prompt."""
        return min(
            sample.ttft_ms / sample.prompt_tokens
            for sample in self._samples_of(tier)
            if sample.ttft_ms is not None
        )

    def _single_step_ms(self, tier: TierName) -> float:
        """Return the time of a tier's decode step of one sequence."""
        paces_ms = [
            sample.tpot_ms
            for sample in self._samples_of(tier)
            if sample.tpot_ms is not None and sample.batch == 1
        ]
        if not paces_ms:
            raise ProfileError(
                f"{tier} sent every answer all at once: the machine is too busy to measure its pace"
            )
        return median(paces_ms)

    def _samples_of(self, tier: TierName) -> list[SpeedSample]:
        return [sample for sample in self.samples if sample.tier is tier]

    async def measure_together(self) -> None:
        """Measure all tiers while all of them compute."""
        slowest_step_ms = max(self._single_step_ms(tier) for tier in self._tiers)
        shortest_s = 8 * (slowest_step_ms / 1000) * len(self._tiers)
        duration_s = max(self._plan.step_s, shortest_s)
        for batch in TOGETHER_BATCHES:
            self.samples += await self._undisturbed(
                f"all tiers together, {batch} at a time each",
                partial(self._keep_all_busy, batch, duration_s),
            )

    async def _keep_all_busy(self, batch: int, duration_s: float) -> list[SpeedSample]:
        """Keep a batch in work on every tier for a while, and return the samples."""
        benches = [_Bench(self._client, tier) for tier in self._tiers]
        end = time.monotonic() + duration_s
        answer_ms = duration_s * 1000 / len(self._tiers) / 2
        async with asyncio.TaskGroup() as group:
            for bench in benches:
                for _ in range(batch):
                    group.create_task(self._keep_busy(bench, batch, answer_ms, end=end))
        samples: list[SpeedSample] = []
        for bench in benches:
            samples += bench.samples_until(end)
        return samples

    async def _keep_busy(
        self, bench: _Bench, batch: int, answer_ms: float, end: float
    ) -> None:
        """Send a tier one request after the other, each of about ``answer_ms``, until ``end``."""
        others = len(self._tiers) - 1
        step_ms = self._single_step_ms(bench.tier) * (1 + others)
        tokens = _bounded(answer_ms / step_ms, 4, 64)
        neighbours = others / (len(self._fleet.tiers) - 1)
        while time.monotonic() < end:
            await bench.request(PROMPT_TOKENS, tokens, batch, neighbours=neighbours)

    async def _take_and_keep(
        self, step_name: str, tier: TierName, step: BenchStep
    ) -> TimedAnswer:
        """Take one step of a tier, keep its samples, and return its last answer."""
        bench = await self._run_on_new_bench(step_name, tier, step)
        self.samples += [sample for sample, _ in bench.measured]
        return _last_answer(bench)

    async def _take_step(
        self, step_name: str, tier: TierName, step: BenchStep
    ) -> TimedAnswer:
        """Take one step of a tier without keeping its samples, and return its last answer."""
        return _last_answer(await self._run_on_new_bench(step_name, tier, step))

    async def _run_on_new_bench(
        self, step_name: str, tier: TierName, step: BenchStep
    ) -> _Bench:
        async def run_step() -> _Bench:
            bench = _Bench(self._client, tier)
            await step(bench)
            return bench

        return await self._undisturbed(step_name, run_step)

    async def _undisturbed(
        self, step_name: str, step: Callable[[], Coroutine[Any, Any, Result]]
    ) -> Result:
        """Run a step while nobody else is served, again if it was disturbed; return its result."""
        results: list[Result] = []
        took_s = 0.0

        async def timed_step() -> None:
            nonlocal took_s
            began = time.monotonic()
            try:
                results.append(await step())
            except* ProfileError as errors:
                raise first_of(errors) from None
            took_s = time.monotonic() - began

        attempts = 0
        while attempts < self._plan.attempts:
            attempts += 1
            self._show(step_name)
            if await self._client.undisturbed(timed_step, self._show_waiting):
                self._steps_done += 1
                self._spent_s += took_s
                return results[-1]
        raise ProfileError(
            f"others' requests disturbed '{step_name}' {attempts} times: measure when it is quiet"
        )

    def _show(self, step_name: str) -> None:
        self._report_progress(step_name, self._steps_done, self._steps_total)

    def _show_waiting(self) -> None:
        self._show("waiting for others' requests")


def _bounded(tokens: float, smallest: int, largest: int) -> int:
    return min(max(int(tokens), smallest), largest)


def _last_answer(bench: _Bench) -> TimedAnswer:
    assert bench.last_answer is not None
    return bench.last_answer
