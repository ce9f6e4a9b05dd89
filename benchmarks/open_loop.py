"""An open loop: seeded Poisson arrivals of mixed prompts, sent when they are due; what became of each, with intervals."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp

from router.policy.profiles import percentile
from router.profiling.tasks import TASKS, read_tasks
from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from router.policy.profiles import LatencyProfile

RESAMPLES = 1000
_COMPLETION = re.compile(rb'"completion_tokens": ?(\d+)')
_PROMPT = re.compile(rb'"prompt_tokens": ?(\d+)')

# Mean answer in tokens, by class of prompt: an assumption. Lengths are log-normal about it.
ANSWER_TOKENS = {
    "chat": 150, "writing": 400, "code": 350, "math": 250, "extraction": 80, "multilingual": 150, "long_context": 200,
    "small_talk": 30,
}  # fmt: skip
SIGMA = 0.6  # of the logarithm of an answer's length


class Interval(NamedTuple):
    """An estimate and its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked.

    Attributes:
        prompts: Class and text, all equally likely.
        tokens: Returns an answer's length, of a class.
    """

    prompts: tuple[tuple[str, str], ...]
    tokens: Callable[[random.Random, str], int]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request; ``tokens`` is the exact length of its answer."""

    at_s: float
    kind: str
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request. Times in milliseconds, or in seconds since the start of the load.

    Attributes:
        error: ``refused``, ``cut``, or ``late`` if the client's time limit passed; None: it is complete.
        late_ms: By which it was sent too late.
        engine_s: Estimated engine time, see ``with_engine_time``.
    """

    index: int
    kind: str
    at_s: float
    ended_s: float
    tier: TierName | None
    ttft_ms: float | None
    tpot_ms: float | None
    prompt_tokens: int
    tokens: int
    error: str | None
    late_ms: float
    loss: float | None = None
    engine_s: float = 0.0

    def meets(self, ttft_ms: float, tpot_ms: float) -> bool:
        """Tell whether it is complete and within bounds."""
        return (
            self.error is None
            and self.ttft_ms is not None
            and self.ttft_ms <= ttft_ms
            and (self.tpot_ms is None or self.tpot_ms <= tpot_ms)
        )


def read_prompts(kinds: Sequence[str] | None = None) -> tuple[tuple[str, str], ...]:
    """Return the prompts of the built-in tasks of some classes, without those that offer tools; None: of all."""
    return tuple(
        (t.prompt_class.value, t.prompt)
        for t in read_tasks(TASKS)
        if not t.tools and (kinds is None or t.prompt_class in kinds)
    )


def by_class(
    scale: float = 1.0, most: int = 4096
) -> Callable[[random.Random, str], int]:
    """Return log-normal lengths whose mean is ``ANSWER_TOKENS`` times a scale, between 8 and ``most`` tokens."""

    def tokens(source: random.Random, kind: str) -> int:
        mean = ANSWER_TOKENS[kind] * scale
        return max(
            8,
            min(
                most, round(source.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA))
            ),
        )

    return tokens


def uniform(least: int, most: int) -> Callable[[random.Random, str], int]:
    """Return lengths that are the same for every class."""
    return lambda source, _kind: source.randint(least, most)


def arrivals(
    workload: Workload, rate: float, seconds: float, seed: int
) -> list[Arrival]:
    """Return Poisson arrivals of mixed prompts. The same arguments return the same arrivals."""
    source = random.Random(seed)
    found, at = [], 0.0
    while (at := at + source.expovariate(rate)) < seconds:
        kind, text = source.choice(workload.prompts)
        found.append(
            Arrival(
                at,
                kind,
                f"({source.randint(100, 999)}) {text}",
                workload.tokens(source, kind),
            )
        )
    return found


async def send(
    url: str,
    plan: Sequence[Arrival],
    body: Callable[[int, Arrival], dict[str, Any]],
    name: str,
    limit_s: float = 900.0,
    progress: Callable[[float, int, int], None] | None = None,
) -> list[Answer]:
    """Send requests when they are due, whatever became of earlier ones.

    Args:
        url: Of the router.
        plan: The requests.
        body: Makes the members of a request's body besides prompt and length.
        name: Beginning of the requests' ids.
        limit_s: The client's time limit; it leaves when it has passed.
        progress: Called each 5 s with the seconds since the start, and the requests sent and ended.
    """
    started, ended = time.monotonic() + 0.2, 0
    timeout = aiohttp.ClientTimeout(total=limit_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, trust_env=False
    ) as session:

        async def one(index: int, arrival: Arrival) -> Answer:
            nonlocal ended
            await asyncio.sleep(started + arrival.at_s - time.monotonic())
            headers = {"x-request-id": f"{name}-{index}"}
            answer = await _ask(
                session,
                url,
                headers,
                _body(arrival, body(index, arrival)),
                index,
                arrival,
                started,
            )
            ended += 1
            return answer

        async def report() -> None:
            while True:
                await asyncio.sleep(5)
                now = time.monotonic() - started
                if progress is not None:
                    progress(now, sum(a.at_s <= now for a in plan), ended)

        reporting = asyncio.create_task(report())
        try:
            return list(await asyncio.gather(*(one(i, a) for i, a in enumerate(plan))))
        finally:
            reporting.cancel()


async def closed_loop(
    url: str,
    workload: Workload,
    bodies: Sequence[dict[str, Any]],
    workers: int,
    *,
    seconds: float,
    warm_s: float,
) -> float:
    """Return the requests completed a second while so many workers ask without a pause for each kind of body.

    Args:
        url: Of the router.
        workload: What is asked; each worker draws from it.
        bodies: Members of requests besides prompt and length.
        workers: For each of the bodies.
        seconds: How long.
        warm_s: At the beginning, not counted.
    """
    started, done = time.monotonic(), 0
    source = random.Random(0)
    timeout, connector = aiohttp.ClientTimeout(total=900), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, trust_env=False
    ) as session:

        async def worker(number: int, body: dict[str, Any]) -> None:
            nonlocal done
            while True:
                kind, text = source.choice(workload.prompts)
                arrival = Arrival(
                    time.monotonic() - started,
                    kind,
                    text,
                    workload.tokens(source, kind),
                )
                headers = {"x-request-id": f"full-{number}"}
                answer = await _ask(
                    session, url, headers, _body(arrival, body), 0, arrival, started
                )
                done += answer.error is None and answer.ended_s > warm_s
                await asyncio.sleep(0.1 if answer.error else 0)

        tasks = [
            asyncio.create_task(worker(n, body))
            for body in bodies
            for n in range(workers)
        ]
        await asyncio.sleep(seconds)
        found = done / (seconds - warm_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


def _body(arrival: Arrival, more: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": arrival.text}],
        "max_tokens": arrival.tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


async def _ask(
    session: aiohttp.ClientSession,
    url: str,
    headers: dict[str, str],
    body: dict[str, Any],
    index: int,
    arrival: Arrival,
    started: float,
) -> Answer:
    sent = time.monotonic()
    first = last = 0.0
    tail, tier, error = b"", None, "cut"
    try:
        async with session.post(
            f"{url}/v1/chat/completions", json=body, headers=headers
        ) as response:
            if response.status == 200:
                tier = TierName(response.headers["x-qarr-tier"])
                async for chunk in response.content.iter_any():
                    last = time.monotonic()
                    first = first or last
                    tail = (tail + chunk)[-700:]
            else:
                await response.read()
                error = "refused"
    except TimeoutError:
        error = "late"
    except aiohttp.ClientError:
        error = "cut"
    counted, prompt = _COMPLETION.search(tail), _PROMPT.search(tail)
    tokens = int(counted[1]) if counted else 0
    complete = b"[DONE]" in tail and tokens == arrival.tokens
    return Answer(
        index=index,
        kind=arrival.kind,
        at_s=arrival.at_s,
        ended_s=time.monotonic() - started,
        tier=tier,
        ttft_ms=(first - sent) * 1000 if first else None,
        tpot_ms=(last - first) * 1000 / (tokens - 1)
        if complete and tokens > 1
        else None,
        prompt_tokens=int(prompt[1]) if prompt else 0,
        tokens=tokens,
        error=None if complete else error,
        late_ms=(sent - started - arrival.at_s) * 1000,
    )


def with_engine_time(
    answers: Sequence[Answer], speeds: LatencyProfile, batch: int
) -> list[Answer]:
    """Return answers with the engine time that the policy counts (``SpeedModel.engine_ms``): prefill, and a share of steps.

    Args:
        answers: Those that are not complete get none.
        speeds: The tiers' fitted speeds.
        batch: Sequences decoded together. Rows that are compared need the same, or an engine that is crowded looks cheap.
    """
    models = {fit.tier: fit.model for fit in speeds.fits}

    def engine_s(answer: Answer) -> float:
        if answer.tier is None or answer.error is not None:
            return 0.0
        return (
            models[answer.tier].engine_ms(answer.prompt_tokens, answer.tokens, batch)
            / 1000
        )

    return [replace(answer, engine_s=engine_s(answer)) for answer in answers]


def mean_open(rounds: Sequence[Sequence[Answer]], seconds: float) -> float:
    """Return the mean number of open requests of some loads, each so many seconds long (Little's law)."""
    return sum(a.ended_s - a.at_s for answers in rounds for a in answers) / (
        seconds * max(len(rounds), 1)
    )


@dataclass(frozen=True, slots=True)
class Blocks:
    """Sums over blocks of time, the same for all rows of a table, from which ratios get paired intervals.

    Attributes:
        top, bottom: Numerator and denominator of a ratio, for each block.
    """

    top: tuple[float, ...]
    bottom: tuple[float, ...]

    def ratio(self, chosen: Sequence[int] | None = None) -> float:
        """Return the ratio over some blocks (one may come several times), or over all."""
        chosen = range(len(self.top)) if chosen is None else chosen
        bottom = sum(self.bottom[n] for n in chosen)
        return sum(self.top[n] for n in chosen) / bottom if bottom else 0.0


def blocks_of(
    rounds: Sequence[Sequence[Answer]],
    block_s: float,
    seconds: float,
    top: Callable[[Answer], float | None],
    bottom: Callable[[Answer], float] | None = None,
) -> Blocks:
    """Return sums over blocks of arrival time, each round by itself.

    Args:
        rounds: The answers of each round.
        block_s: Length of a block.
        seconds: Length of a round.
        top: What is summed; answers for which it is None count neither above nor below.
        bottom: The same below; None: the block's length in seconds.
    """
    count = max(1, round(seconds / block_s))
    tops, bottoms = [0.0] * (count * len(rounds)), [0.0] * (count * len(rounds))
    if bottom is None:
        bottoms = [seconds / count] * len(tops)
    for number, answers in enumerate(rounds):
        for answer in answers:
            block = number * count + min(count - 1, int(answer.at_s / seconds * count))
            value = top(answer)
            if value is not None:
                tops[block] += value
                bottoms[block] += bottom(answer) if bottom is not None else 0.0
    return Blocks(tuple(tops), tuple(bottoms))


def resampled(blocks: int, seed: int = 0, times: int = RESAMPLES) -> list[list[int]]:
    """Return numbers of blocks, drawn with replacement: a bootstrap's samples, shared by all rows to pair them."""
    source = random.Random(seed)
    return [source.choices(range(blocks), k=blocks) for _ in range(times)]


def interval(
    row: Blocks, samples: Sequence[Sequence[int]], other: Blocks | None = None
) -> Interval:
    """Return a ratio, or its difference to another row's in the same blocks, with its 95 % bootstrap interval."""

    def value(chosen: Sequence[int] | None) -> float:
        return row.ratio(chosen) - (other.ratio(chosen) if other is not None else 0.0)

    drawn = [value(sample) for sample in samples]
    return Interval(
        mean=value(None), low=percentile(drawn, 0.025), high=percentile(drawn, 0.975)
    )


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append JSON lines."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def as_row(answer: Answer) -> dict[str, Any]:
    """Return an answer as the values of a JSON object."""
    return {
        name: round(value, 4) if isinstance(value, float) else value
        for name, value in asdict(answer).items()
    }
