"""Measure a running fleet's speed, through its router: each tier alone, then all together, under loads that are known."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING

from router.latency import LatencyProfile, Sample, fit
from router.router_client import MAX_WAIT_S, ProfileError, connect

if TYPE_CHECKING:
    from router.router_client import FleetState, RouterClient, Timed
    from tiers.spec import TierName

LENGTHS = (16, 64, 256, 1024)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPT_TOKENS = 24
ATTEMPTS = 3  # of a step that others' requests disturbed
FIRST_ID, LAST_ID = 1000, 20000  # ordinary tokens in every tokenizer of some size; random, so that no prefix is cached


@dataclass(frozen=True, slots=True)
class LatencyPlan:
    """What to measure.

    Attributes:
        url: The router's.
        key: For the router; empty where it needs none.
        tiers: Those to measure; empty: every one that is ready.
        step_s: About how long one step may take, in seconds; it bounds prompt and answer lengths on slow tiers.
    """

    url: str
    key: str
    step_s: float
    tiers: tuple[TierName, ...] = ()


async def measure_latency(plan: LatencyPlan, progress: Callable[[str], None]) -> LatencyProfile:
    """Measure every tier that is ready, and return the profile.

    Raises:
        ProfileError: The router does not answer, no tier is ready, or others' requests do not end.
    """
    async with connect(plan.url, plan.key) as client:
        fleet = await client.fleet()
        if not fleet.identities:
            raise ProfileError("no tier is ready")
        tiers = plan.tiers or tuple(fleet.identities)
        for tier in tiers:
            if tier not in fleet.identities:
                raise ProfileError(f"tier {tier} is not ready")
            if fleet.replicas[tier] > 1:
                raise ProfileError(
                    f"tier {tier} has {fleet.replicas[tier]} replicas that requests are spread over: measure with one each"
                )
        run = _Run(client, fleet, plan, progress)
        for tier in tiers:
            await run.alone(tier)
        if len(tiers) > 1:
            await run.together(tiers)
    return LatencyProfile(
        created=datetime.now(UTC),
        model=fleet.model,
        machine=fleet.machine,
        checkpoints=dict(fleet.checkpoints),
        fits=tuple(fit(tier, run.samples, fleet.max_num_seqs[tier]) for tier in tiers),
        samples=tuple(run.samples),
    )


@dataclass(slots=True)
class _Bench:
    """What one tier has to do, as its only client knows it."""

    client: RouterClient
    tier: TierName
    source: random.Random
    sequences: int = 0
    waiting: int = 0
    asked: int = 0
    last: Timed | None = None
    computed: asyncio.Event = field(default_factory=asyncio.Event)
    found: list[tuple[Sample, Timed]] = field(default_factory=list)

    async def request(self, prompt_tokens: int, tokens: int, batch: int, *, neighbours: float = 0.0) -> Timed:
        """Time one request under the load that there is.

        TTFT is left out where another request came before the first token: engines compute waiting prompts together, and
        what comes later cannot be known in advance.
        """
        sequences, waiting = self.sequences, self.waiting
        alone = False
        self.sequences += 1
        self.asked += 1
        number = self.asked
        self.waiting += prompt_tokens
        self.computed.clear()
        prompt = [self.source.randint(FIRST_ID, LAST_ID) for _ in range(prompt_tokens)]
        left = prompt_tokens

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
        sample = Sample(
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
        return timed


Step = Callable[[_Bench], Coroutine[None, None, None]]


class _Run:
    """One measurement."""

    def __init__(
        self, client: RouterClient, fleet: FleetState, plan: LatencyPlan, progress: Callable[[str], None]
    ) -> None:
        self._client, self._fleet, self._plan, self._progress = client, fleet, plan, progress
        self._source = random.Random()  # noqa: S311  no secret
        self.samples: list[Sample] = []

    async def alone(self, tier: TierName) -> None:
        """Measure one tier while the others are idle."""
        warm = await self._undisturbed(f"{tier}: warming", tier, _burst(1, 4), keep=False)
        step_ms = warm.tpot_ms or warm.ttft_ms
        seen: list[tuple[int, float]] = []
        for length in LENGTHS:
            if length + 1 > self._fleet.max_model_len[tier] or self._too_long(length, seen):
                break
            times = [
                (await self._undisturbed(f"{tier}: prompt of {length} tokens", tier, _single(length))).ttft_ms
                for _ in range(3)
            ]
            seen.append((length, min(times)))
        for batch in BATCHES:
            if batch > self._fleet.max_num_seqs[tier]:
                break
            step = _burst(batch, self._tokens(step_ms * (1 + batch / 8)))
            step_ms = (await self._undisturbed(f"{tier}: {batch} at a time", tier, step)).tpot_ms or step_ms
        await self._undisturbed(f"{tier}: prompts while others are decoded", tier, self._arrival)

    def _too_long(self, length: int, seen: list[tuple[int, float]]) -> bool:
        """Tell whether a prompt would take longer than a step may, by what the last two lengths took."""
        if len(seen) < 2:  # noqa: PLR2004
            return False
        (short, quick), (long, slow) = seen[-2:]
        return slow + (length - long) * (slow - quick) / (long - short) > self._plan.step_s * 1000

    async def together(self, tiers: tuple[TierName, ...]) -> None:
        """Measure tiers while each has requests all the time."""
        for batch in (1, 4):
            self._progress(f"all tiers together, {batch} at a time each")
            benches = [_Bench(self._client, tier, self._source) for tier in tiers]
            slowest = max(self._single_step(tier) for tier in tiers)
            length_s = max(self._plan.step_s, 8 * slowest * len(tiers) / 1000)
            until = time.monotonic() + length_s
            workers = [
                self._keep_busy(bench, batch, until, length_s * 1000 / len(tiers) / 2, len(tiers) - 1)
                for bench in benches
                for _ in range(batch)
            ]
            await asyncio.gather(*workers)
            for bench in benches:
                whole = [(s, t) for s, t in bench.found if t.ended <= until]
                # TTFT counts where the request came while the batch was full; the first ones came to an empty tier.
                self.samples += [s for s, _ in whole or bench.found]

    async def _keep_busy(self, bench: _Bench, batch: int, until: float, answer_ms: float, others: int) -> None:
        step_ms = self._single_step(bench.tier) * (1 + others)
        tokens = min(max(int(answer_ms / step_ms), 4), 64)
        share = others / (len(self._fleet.identities) - 1)
        while time.monotonic() < until:
            await bench.request(PROMPT_TOKENS, tokens, batch, neighbours=share)

    def _single_step(self, tier: TierName) -> float:
        """Return the time of a decode step of one sequence, in milliseconds.

        Raises:
            ProfileError: It was not measured.
        """
        alone = [s.tpot_ms for s in self._own(tier) if s.tpot_ms is not None and s.batch == 1]
        if not alone:
            raise ProfileError(
                f"{tier} sent every answer all at once: its pace cannot be measured on so busy a machine"
            )
        return median(alone)

    def _own(self, tier: TierName) -> list[Sample]:
        return [s for s in self.samples if s.tier is tier]

    async def _arrival(self, bench: _Bench) -> None:
        """Time prompts that come while four others are being decoded."""
        background = min(4, self._fleet.max_num_seqs[bench.tier])
        lengths = (PROMPT_TOKENS, 4 * PROMPT_TOKENS)
        single = self._single_step(bench.tier)
        first = min(s.ttft_ms / s.prompt_tokens for s in self._own(bench.tier) if s.ttft_ms is not None)
        tokens = min(max(int(2 * first * sum(lengths) / single), 10), 200)
        decoding = [asyncio.create_task(bench.request(PROMPT_TOKENS, tokens, background)) for _ in range(background)]
        await asyncio.sleep(0)
        await bench.computed.wait()
        for length in lengths:
            if not any(task.done() for task in decoding):
                await bench.request(length, 1, 0)
        await asyncio.gather(*decoding)
        # The background's own pace was disturbed by the prompts, which is not what batch sizes are about.
        bench.found = [(s, t) for s, t in bench.found if s.batch == 0]

    def _tokens(self, step_ms: float) -> int:
        """Return how many tokens an answer may have to take about a step of the measurement."""
        return min(max(int(self._plan.step_s * 1000 / step_ms), 6), 64)

    async def _undisturbed(self, what: str, tier: TierName, step: Step, *, keep: bool = True) -> Timed:
        """Take one step while nobody else is served; take it again if somebody was.

        Raises:
            ProfileError: Somebody always was.
        """
        self._progress(what)
        for _ in range(ATTEMPTS):
            await self._client.until_quiet(
                lambda: self._progress("waiting for others' requests"), time.monotonic() + MAX_WAIT_S
            )
            before = (await self._client.fleet()).served
            bench = _Bench(self._client, tier, self._source)
            await step(bench)
            after = await self._client.fleet()
            # Leases are given back a moment after the last byte.
            if after.served - before <= bench.asked and after.in_flight <= bench.asked:
                if keep:
                    self.samples += [sample for sample, _ in bench.found]
                assert bench.last is not None
                return bench.last
        raise ProfileError(f"others' requests disturbed '{what}' {ATTEMPTS} times: measure when it is quiet")


def _single(prompt_tokens: int) -> Step:
    """Return the step that computes one prompt."""

    async def step(bench: _Bench) -> None:
        await bench.request(prompt_tokens, 1, 0)

    return step


def _burst(batch: int, tokens: int) -> Step:
    """Return the step that decodes a batch, all sent at once.

    The pace of those that began early is left out: it was held up by the others' prompts.
    """

    async def step(bench: _Bench) -> None:
        await asyncio.gather(*(bench.request(PROMPT_TOKENS, tokens, batch) for _ in range(batch)))
        begun = [timed.started + timed.ttft_ms / 1000 for _, timed in bench.found]
        for number, (sample, timed) in enumerate(bench.found):
            slack_s = 2 * (timed.tpot_ms or 0.0) / 1000
            if begun[number] < max(begun) - slack_s:
                bench.found[number] = (sample.model_copy(update={"batch": 0, "tpot_ms": None}), timed)

    return step
