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
from typing import Any, TypeVar

from router.policy.profiles import LatencyProfile, ProfileError, SpeedSample
from router.profiling.client import Client, FleetState, Timed, first_of
from router.profiling.latency import fit_all
from tiers.spec import TierName

LENGTHS = (16, 64, 256, 1024)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPT_TOKENS = 24
TIMES = 3  # that each prompt length is measured
LEAST = 2  # lengths and batches that a fit needs
ALONE_SHARE = 0.8  # of the budget, for measuring each tier alone
TOGETHER_BATCHES = (1, 4)
# ordinary tokens in every large tokenizer; random, so that no prefix is cached
FIRST_ID, LAST_ID = 1000, 20000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LatencyPlan:
    # approximate duration of one step in seconds; bounds prompt and answer lengths on slow tiers
    step_s: float
    tiers: tuple[TierName, ...] = ()  # the tiers to measure; empty: all ready ones
    # approximate duration of all steps in seconds; long prompts and large batches that the fit does not need are
    # skipped for it
    budget_s: float = math.inf
    # longest time of a prompt; a request that comes meanwhile waits for it
    prompt_s: float = math.inf
    attempts: float = 3  # at a step that others' requests disturb


async def measure_latency(
    client: Client, plan: LatencyPlan, progress: Callable[[str, int, int], None]
) -> LatencyProfile:
    """Measure the tiers of the plan, and return the profile.

    ``progress`` is called with the next step, the number of steps done, and their approximate total. ``ProfileError``: the
    router does not answer, a tier is not ready, or others' requests do not end.
    """
    fleet = await client.fleet()
    if not fleet.tiers:
        raise ProfileError("no tier is ready")
    tiers = plan.tiers or tuple(fleet.tiers)
    for tier in tiers:
        if tier not in fleet.tiers:
            raise ProfileError(f"tier {tier} is not ready")
        if (replicas := fleet.tiers[tier].replicas) > 1:
            raise ProfileError(
                f"tier {tier} has {replicas} replicas that requests are spread over: measure with one each"
            )
    run = _Run(client, fleet, plan, tiers, progress)
    for tier in tiers:
        await run.alone(tier)
    if len(tiers) > 1:
        await run.together()
    return LatencyProfile(
        created=datetime.now(UTC),
        model=fleet.model,
        machine=fleet.machine,
        checkpoints=dict(fleet.checkpoints),
        fits=fit_all(
            run.samples, {tier: fleet.tiers[tier].max_num_seqs for tier in tiers}
        ),
        samples=tuple(run.samples),
    )


@dataclass(slots=True)
class _Bench:
    client: Client
    tier: TierName
    sequences: int = 0
    waiting: int = 0
    asked: int = 0
    last: Timed | None = None
    computed: asyncio.Event = field(default_factory=asyncio.Event)
    found: list[tuple[SpeedSample, Timed]] = field(default_factory=list)

    async def request(
        self, prompt_tokens: int, tokens: int, batch: int, *, neighbours: float = 0.0
    ) -> None:
        """Time one request under the present load.

        TTFT is left out if another request came before the first token: engines compute waiting prompts together, and a
        prediction knows of no later request.
        """
        sequences, waiting, left, alone = (
            self.sequences,
            self.waiting,
            prompt_tokens,
            False,
        )
        self.sequences += 1
        self.asked += 1
        number = self.asked
        self.waiting += prompt_tokens
        self.computed.clear()
        prompt = [random.randint(FIRST_ID, LAST_ID) for _ in range(prompt_tokens)]  # noqa: S311  no secret

        def begun() -> None:
            nonlocal left, alone
            alone = self.asked == number
            self.waiting -= left
            left = 0
            if not self.waiting:
                self.computed.set()

        try:
            timed = await self.client.time(self.tier, prompt, tokens, begun)
        finally:
            self.waiting -= left
            self.sequences -= 1
        sample = SpeedSample(
            tier=self.tier,
            prompt_tokens=prompt_tokens,
            sequences=sequences,
            waiting_tokens=waiting,
            batch=batch if timed.tpot_ms is not None else 0,
            neighbours=neighbours,
            ttft_ms=round(timed.ttft_ms, 2) if alone else None,
            tpot_ms=round(timed.tpot_ms, 3) if timed.tpot_ms is not None else None,
        )
        self.found.append((sample, timed))
        self.last = timed

    async def burst(self, batch: int, tokens: int) -> None:
        """Decode a batch, all sent at once.

        The pace of answers that began early is left out: the others' prompts slowed it.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(batch):
                group.create_task(self.request(PROMPT_TOKENS, tokens, batch))
        begun = [timed.started + timed.ttft_ms / 1000 for _, timed in self.found]
        for number, (sample, timed) in enumerate(self.found):
            slack_s = 2 * (timed.tpot_ms or 0.0) / 1000
            if begun[number] < max(begun) - slack_s:
                self.found[number] = (
                    sample.model_copy(update={"batch": 0, "tpot_ms": None}),
                    timed,
                )


Step = Callable[[_Bench], Coroutine[Any, Any, None]]


class _Run:
    def __init__(
        self,
        client: Client,
        fleet: FleetState,
        plan: LatencyPlan,
        tiers: tuple[TierName, ...],
        progress: Callable[[str, int, int], None],
    ) -> None:
        self._client, self._fleet, self._plan, self._tiers, self._progress = (
            client,
            fleet,
            plan,
            tiers,
            progress,
        )
        self._spent_s = 0.0  # in steps, without waiting for others
        self._done = 0
        self._total = sum(map(self._steps, tiers)) + (
            len(TOGETHER_BATCHES) if len(tiers) > 1 else 0
        )
        self.samples: list[SpeedSample] = []

    def _steps(self, tier: TierName) -> int:
        """Return the number of a tier's steps if none is skipped: warm-up, prompts, batches, arrivals."""
        limits = self._fleet.tiers[tier]
        lengths = sum(length < limits.max_model_len for length in LENGTHS)
        return (
            2 + TIMES * lengths + sum(batch <= limits.max_num_seqs for batch in BATCHES)
        )

    async def alone(self, tier: TierName) -> None:
        until_s = self._spent_s + self._plan.budget_s * ALONE_SHARE / len(self._tiers)
        through, limits = self._done + self._steps(tier), self._fleet.tiers[tier]
        warm = await self._step(
            f"{tier}: warming", tier, lambda bench: bench.burst(1, 4), keep=False
        )
        step_ms = warm.tpot_ms or warm.ttft_ms
        seen: list[tuple[int, float]] = []
        for length in LENGTHS:
            if length + 1 > limits.max_model_len or self._too_long(
                length, seen, until_s
            ):
                break
            what = f"{tier}: prompt of {length} tokens"
            single = partial(_Bench.request, prompt_tokens=length, tokens=1, batch=0)
            seen.append(
                (
                    length,
                    min(
                        [
                            (await self._step(what, tier, single)).ttft_ms
                            for _ in range(TIMES)
                        ]
                    ),
                )
            )
        for number, batch in enumerate(BATCHES):
            over = number >= LEAST and self._spent_s + self._plan.step_s > until_s
            if batch > limits.max_num_seqs or over:
                break
            tokens = min(
                max(int(self._plan.step_s * 1000 / (step_ms * (1 + batch / 8))), 6), 64
            )
            burst = partial(_Bench.burst, batch=batch, tokens=tokens)
            step_ms = (
                await self._step(f"{tier}: {batch} at a time", tier, burst)
            ).tpot_ms or step_ms
        await self._step(
            f"{tier}: prompts while others are decoded", tier, self._arrival
        )
        self._done = through

    def _too_long(
        self, length: int, seen: list[tuple[int, float]], until_s: float
    ) -> bool:
        if len(seen) < LEAST:
            return False
        (short, quick), (long, slow) = seen[-2:]
        expected_s = (slow + (length - long) * (slow - quick) / (long - short)) / 1000
        return (
            expected_s > min(self._plan.step_s, self._plan.prompt_s)
            or self._spent_s + TIMES * expected_s > until_s
        )

    async def together(self) -> None:
        slowest_s = max(map(self._single_step, self._tiers)) / 1000
        length_s = max(self._plan.step_s, 8 * slowest_s * len(self._tiers))
        for batch in TOGETHER_BATCHES:
            step = partial(self._all_busy, batch, length_s)
            self.samples += await self._undisturbed(
                f"all tiers together, {batch} at a time each", step
            )

    async def _all_busy(self, batch: int, length_s: float) -> list[SpeedSample]:
        benches = [_Bench(self._client, tier) for tier in self._tiers]
        until, others = time.monotonic() + length_s, len(self._tiers) - 1
        async with asyncio.TaskGroup() as group:
            for bench in benches:
                for _ in range(batch):
                    group.create_task(
                        self._keep_busy(
                            bench,
                            batch,
                            until,
                            length_s * 1000 / len(self._tiers) / 2,
                            others,
                        )
                    )
        # The last samples, whose batch was no longer full, are dropped, unless a tier has no others.
        return [
            s
            for b in benches
            for s in (
                [s for s, t in b.found if t.ended <= until] or [s for s, _ in b.found]
            )
        ]

    async def _keep_busy(
        self, bench: _Bench, batch: int, until: float, answer_ms: float, others: int
    ) -> None:
        step_ms = self._single_step(bench.tier) * (1 + others)
        tokens = min(max(int(answer_ms / step_ms), 4), 64)
        share = others / (len(self._fleet.tiers) - 1)
        while time.monotonic() < until:
            await bench.request(PROMPT_TOKENS, tokens, batch, neighbours=share)

    def _single_step(self, tier: TierName) -> float:
        alone = [
            s.tpot_ms for s in self._own(tier) if s.tpot_ms is not None and s.batch == 1
        ]
        if not alone:
            raise ProfileError(
                f"{tier} sent every answer all at once: the machine is too busy to measure its pace"
            )
        return median(alone)

    def _own(self, tier: TierName) -> list[SpeedSample]:
        return [s for s in self.samples if s.tier is tier]

    async def _arrival(self, bench: _Bench) -> None:
        background = min(4, self._fleet.tiers[bench.tier].max_num_seqs)
        lengths = (PROMPT_TOKENS, 4 * PROMPT_TOKENS)
        single = self._single_step(bench.tier)
        first = min(
            s.ttft_ms / s.prompt_tokens
            for s in self._own(bench.tier)
            if s.ttft_ms is not None
        )
        tokens = min(max(int(2 * first * sum(lengths) / single), 10), 200)
        async with asyncio.TaskGroup() as group:
            decoding = [
                group.create_task(bench.request(PROMPT_TOKENS, tokens, background))
                for _ in range(background)
            ]
            await asyncio.sleep(0)
            await bench.computed.wait()
            for length in lengths:
                if not any(task.done() for task in decoding):
                    await bench.request(length, 1, 0)
        # The prompts disturbed the background's pace, so it does not tell how batch size affects it.
        bench.found = [(s, t) for s, t in bench.found if s.batch == 0]

    async def _step(
        self, what: str, tier: TierName, step: Step, *, keep: bool = True
    ) -> Timed:
        """Run one step of a tier while nobody else is served; return its last answer."""

        async def fresh() -> _Bench:
            bench = _Bench(self._client, tier)
            await step(bench)
            return bench

        bench = await self._undisturbed(what, fresh)
        if keep:
            self.samples += [sample for sample, _ in bench.found]
        assert bench.last is not None
        return bench.last

    async def _undisturbed(
        self, what: str, step: Callable[[], Coroutine[Any, Any, T]]
    ) -> T:
        """Run a step while nobody else is served, again if it was disturbed; return its result."""
        results: list[T] = []
        took_s = 0.0

        async def timed() -> None:
            nonlocal took_s
            began = time.monotonic()
            try:
                results.append(await step())
            except* ProfileError as several:
                raise first_of(several) from None
            took_s = time.monotonic() - began

        def waiting() -> None:
            self._progress("waiting for others' requests", self._done, self._total)

        attempts = 0
        while attempts < self._plan.attempts:
            attempts += 1
            self._progress(what, self._done, self._total)
            if await self._client.undisturbed(timed, waiting):
                self._done += 1
                self._spent_s += took_s
                return results[-1]
        raise ProfileError(
            f"others' requests disturbed '{what}' {attempts} times: measure when it is quiet"
        )
