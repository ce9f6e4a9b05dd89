"""What the choice of a tier is worth: ways to choose, on the same requests and simulated GPUs, in simulated time.

    .venv/bin/python benchmarks/choices.py [--gpus H100 L40S] [--loads 0.5 0.8 1 1.2] [--requests 10000]

Each tier is one engine: vLLM's scheduler with the step times of a roofline (``tiers/simulated/gpu.py``), Llama 3.1 8B. The
router's decisions are the product's own (``router/policy/decide.py``), made with a speed model that was fitted to the same
roofline; requests that find every tier full wait in order. A load of 1 is what all tiers complete of this mix if they are
always full. Prompts are labelled by people (``held_out_prompts.py``). The router sees what the classifier found, which was
trained without them; the loss of an answer is what is published for the tier at the class and complexity that people gave.

Goodput is the rate of requests with a first token within ``TTFT_MS`` and ``TPOT_MS`` a token. ``engine`` is the time of the
GPUs a request, in milliseconds. Intervals are 95 %, from a bootstrap over blocks of requests.

Rows: each tier alone; all tiers in turn (round robin); the tier with the fewest sequences (least loaded); QARR; QARR as it
was until November 2026, with the least engine time of the tiers whose loss is allowed; QARR with larger loss budgets; a
random mix with the same shares of tiers as QARR; and QARR with the classes that people gave instead of the classifier's.
The default loss budget limits how much of the load lower tiers may take: near saturation, ways that may lose more have more
room.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import math
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from measure import note
from open_loop import ANSWER_TOKENS, SIGMA
from plans import as_model

from classifier import PromptClass, PromptFeatures
from classifier.kinds import Complexity
from router.policy.decide import decide
from router.policy.decision import (
    Basis,
    Decision,
    PolicyParameters,
    RoutingQuery,
    TierEstimate,
)
from router.policy.losses import losses
from router.policy.profiles import percentile
from tiers.simulated.gpu import (
    LLAMA_8B,
    GpuStep,
    Hardware,
    Job,
    Scheduler,
    hardware,
    offline,
)
from tiers.sizing.architecture import architecture
from tiers.sizing.named_gpus import parse_gpus
from tiers.snapshot import FleetSnapshot, ReplicaState, TierSnapshot
from tiers.spec import (
    PRECISIONS,
    STANDARD_TIERS,
    ReplicaStatus,
    TemplateTokens,
    TierName,
    TierSpec,
)
from tiers.speed import ReplicaLoad

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiers.speed import SpeedModel

PROMPTS = Path(__file__).with_name("held_out_prompts.jsonl.gz")
PARAMETERS = 8e9
MAX_NUM_SEQS = 128
SLOTS = 256
TTFT_MS = 500.0
TPOT_MS = 40.0
ALLOWED_TOKENS = 4  # times the mean answer: what callers allow with max_tokens
PROMPT_TOKENS = 40  # added by chat template and system prompt
BLOCKS = 100
RESAMPLES = 1000
LOSSES = {tier: losses(PRECISIONS[tier], (), PARAMETERS) for tier in STANDARD_TIERS[:2]}
TABLE = PolicyParameters(LOSSES)
# shares of answers that may be lost, beside the default of about .003
BUDGETS = (0.01, 0.02)
MIN_ENGINE_TIME_BASES = {Basis.BUDGET, Basis.NEGLIGIBLE, Basis.MIN_LOSS}


class Prompt(NamedTuple):
    """One labelled prompt.

    Attributes:
        prompt_class: As people labelled it; likewise ``complexity``.
        found: What the classifier found in it.
    """

    prompt_class: PromptClass
    complexity: Complexity
    found: PromptFeatures


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request; ``tokens`` is the length of its answer."""

    at_ms: float
    prompt: Prompt
    query: RoutingQuery
    tokens: int


@dataclass(slots=True, eq=False)
class Request:
    """A request that was given to an engine. Times in milliseconds."""

    arrival: Arrival
    tier: TierName
    job: Job
    first_ms: float | None = None
    last_ms: float | None = None

    @property
    def ttft_ms(self) -> float:
        """Return the time to the first token."""
        assert self.first_ms is not None
        return self.first_ms - self.arrival.at_ms

    @property
    def tpot_ms(self) -> float:
        """Return the mean time of each further token."""
        assert self.first_ms is not None
        assert self.last_ms is not None
        return (self.last_ms - self.first_ms) / max(self.arrival.tokens - 1, 1)

    @property
    def loss(self) -> float:
        """Return the probability that its answer is worse than the highest precision's."""
        if self.tier is TierName.PRECISE:
            return 0.0
        return LOSSES[self.tier][self.arrival.prompt.prompt_class][
            self.arrival.prompt.complexity
        ].mean

    @property
    def is_good(self) -> bool:
        """Return whether it met both bounds on time."""
        return self.ttft_ms <= TTFT_MS and self.tpot_ms <= TPOT_MS


@dataclass(slots=True, eq=False)
class Engine:
    """One tier's engine in simulated time."""

    tier: TierName
    scheduler: Scheduler
    speed: SpeedModel
    requests: list[Request] = field(default_factory=list)
    step: GpuStep | None = None
    busy_ms: float = 0.0

    @property
    def spec(self) -> TierSpec:
        """Return the tier as configured."""
        return TierSpec(
            self.tier, 1 << 17, MAX_NUM_SEQS, SLOTS, precision=PRECISIONS[self.tier]
        )

    def begin_step(self) -> float | None:
        """Begin the next step and return its duration in milliseconds; None: there is nothing to compute."""
        self.step = self.scheduler.next_step()
        if self.step is None:
            return None
        self.busy_ms += self.step.duration_s * 1000
        return self.step.duration_s * 1000

    def end_step(self, now_ms: float) -> None:
        """Note the tokens of the step that ends; answers that are complete leave."""
        assert self.step is not None
        self.scheduler.finish(self.step)
        self.step = None
        for request in self.requests:
            if request.first_ms is None and request.job.produced > 0:
                request.first_ms = now_ms
            if request.job.produced >= request.job.tokens:
                request.last_ms = now_ms
        self.requests = [
            request for request in self.requests if request.last_ms is None
        ]

    def state(self) -> ReplicaState:
        """Return the engine as the router sees it."""
        to_read, to_come = 0, 0
        for request in self.requests:
            if request.first_ms is None:
                to_read += request.job.prompt_tokens - request.job.computed
            to_come += request.arrival.query.max_tokens - request.job.produced
        load = ReplicaLoad(len(self.requests), to_read, to_come)
        return ReplicaState(
            id=self.tier,
            url="",
            precision=PRECISIONS[self.tier],
            status=ReplicaStatus.READY,
            in_flight=len(self.requests),
            slots=len(self.requests),
            limit=SLOTS,
            prompt_tokens=to_read,
            load=load,
            speed=self.speed,
        )


class Fleet:
    """Three engines and the queue in front of them."""

    def __init__(
        self,
        gpu: dict[TierName, Hardware],
        choose: Callable[[Arrival, FleetSnapshot], TierName | None],
    ) -> None:
        self._choose = choose
        self.engines = {
            tier: Engine(tier, Scheduler(kind, MAX_NUM_SEQS), as_model(kind.speed))
            for tier, kind in gpu.items()
        }
        self._step_ends: list[tuple[float, int, TierName]] = []
        self._steps = 0
        self._queue: list[Arrival] = []
        self.served: list[Request] = []

    def run(self, arrivals: Sequence[Arrival]) -> None:
        """Serve all requests."""
        for arrival in arrivals:
            self._run_until(arrival.at_ms)
            self._queue.append(arrival)
            self._dispatch(arrival.at_ms)
        self._run_until(math.inf)

    def _run_until(self, end_ms: float) -> None:
        while self._step_ends and self._step_ends[0][0] <= end_ms:
            now_ms, _, tier = heapq.heappop(self._step_ends)
            engine = self.engines[tier]
            before = len(engine.requests)
            engine.end_step(now_ms)
            if self._queue and len(engine.requests) < before:
                self._dispatch(now_ms)
            if engine.step is None:
                self._begin(engine, now_ms)

    def _begin(self, engine: Engine, now_ms: float) -> None:
        duration_ms = engine.begin_step()
        if duration_ms is not None:
            self._steps += 1
            heapq.heappush(
                self._step_ends, (now_ms + duration_ms, self._steps, engine.tier)
            )

    def _dispatch(self, now_ms: float) -> None:
        while self._queue:
            tier = self._choose(self._queue[0], self.snapshot())
            if tier is None or len(self.engines[tier].requests) >= SLOTS:
                return
            self._give(self._queue.pop(0), self.engines[tier], now_ms)

    def _give(self, arrival: Arrival, engine: Engine, now_ms: float) -> None:
        request = Request(
            arrival, engine.tier, Job(arrival.query.prompt_tokens, arrival.tokens)
        )
        engine.requests.append(request)
        engine.scheduler.waiting.append(request.job)
        self.served.append(request)
        if engine.step is None:
            self._begin(engine, now_ms)

    def snapshot(self) -> FleetSnapshot:
        """Return the fleet as the router sees it."""
        tiers = []
        for engine in self.engines.values():
            state = engine.state()
            tiers.append(
                TierSnapshot(
                    engine.spec,
                    (state,),
                    (state.prompt_tokens + state.load.output_tokens,),
                )
            )
        return FleetSnapshot(
            tuple(tiers), TemplateTokens(), output_share=1 / ALLOWED_TOKENS
        )


def by_policy(arrival: Arrival, fleet: FleetSnapshot) -> TierName | None:
    """Choose as QARR does."""
    return decide(arrival.query, fleet, TABLE).tier


def by_policy_within(
    budget: float,
) -> Callable[[Arrival, FleetSnapshot], TierName | None]:
    """Choose as QARR does with ``policy.loss_budget`` set to a share of answers, 0..1."""
    table = PolicyParameters(LOSSES, loss_budget=budget)
    return lambda arrival, fleet: decide(arrival.query, fleet, table).tier


def by_policy_told_classes(arrival: Arrival, fleet: FleetSnapshot) -> TierName | None:
    """Choose as QARR would if the classifier never erred."""
    prompt = arrival.prompt
    told = PromptFeatures(
        0,
        0,
        0,
        True,
        False,
        False,
        None,
        prompt.prompt_class,
        1.0,
        (),
        prompt.complexity,
    )
    query = RoutingQuery(told, arrival.query.prompt_tokens, arrival.query.max_tokens)
    return decide(query, fleet, TABLE).tier


def by_engine_time(arrival: Arrival, fleet: FleetSnapshot) -> TierName | None:
    """Choose as QARR did before: of the tiers whose loss is allowed, the one with the least engine time."""
    decision = decide(arrival.query, fleet, TABLE)
    if decision.basis not in MIN_ENGINE_TIME_BASES:
        return decision.tier
    return min(_allowed(decision), key=lambda estimate: estimate.order()).tier


def _allowed(decision: Decision) -> list[TierEstimate]:
    meeting = [
        each
        for each in decision.comparison.estimates
        if each.meets_bounds and not each.is_unfit
    ]
    allowed = [each for each in meeting if each.quality.is_allowed]
    return allowed or [each for each in meeting if each.tier is decision.tier]


def always(tier: TierName) -> Callable[[Arrival, FleetSnapshot], TierName | None]:
    """Choose one tier."""
    return lambda _arrival, _fleet: tier


def in_turn() -> Callable[[Arrival, FleetSnapshot], TierName | None]:
    """Choose each tier in turn."""
    number = 0

    def choose(_arrival: Arrival, _fleet: FleetSnapshot) -> TierName:
        nonlocal number
        number += 1
        return STANDARD_TIERS[number % len(STANDARD_TIERS)]

    return choose


def least_loaded(_arrival: Arrival, fleet: FleetSnapshot) -> TierName | None:
    """Choose the tier with the fewest sequences."""
    return min(fleet.tiers, key=lambda tier: tier.replicas[0].load.sequences).spec.name


def at_random(
    shares: dict[TierName, float], seed: int = 1
) -> Callable[[Arrival, FleetSnapshot], TierName | None]:
    """Choose each tier with a fixed probability, the same for a request however often it is asked."""
    tiers, weights = list(shares), list(shares.values())

    def choose(arrival: Arrival, _fleet: FleetSnapshot) -> TierName:
        return random.Random(f"{seed} {arrival.at_ms}").choices(tiers, weights)[0]

    return choose


def read_prompts() -> list[Prompt]:
    """Read the labelled prompts."""
    found = []
    with gzip.open(PROMPTS, "rt", encoding="utf-8") as lines:
        for line in lines:
            fields = json.loads(line)
            features = PromptFeatures(
                chars=0,
                words=0,
                tokens=fields["tokens"],
                tokens_exact=False,
                contains_code=fields["has_code"],
                asks_for_code=False,
                language=None,
                prompt_class=PromptClass(fields["found_class"]),
                confidence=fields["confidence"],
                signals=(),
                complexity=Complexity(fields["found_complexity"]),
            )
            found.append(
                Prompt(
                    PromptClass(fields["class"]),
                    Complexity(fields["complexity"]),
                    features,
                )
            )
    return found


def make_arrivals(
    prompts: Sequence[Prompt], rate: float, seed: int = 1
) -> list[Arrival]:
    """Return Poisson arrivals of each prompt once, in random order."""
    source = random.Random(seed)
    order = list(prompts)
    source.shuffle(order)
    arrivals, at_ms = [], 0.0
    for prompt in order:
        at_ms += source.expovariate(rate) * 1000
        mean = ANSWER_TOKENS.get(prompt.prompt_class.value, 30)
        tokens = max(
            2, round(source.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA))
        )
        query = RoutingQuery(
            prompt.found,
            prompt.found.tokens + PROMPT_TOKENS,
            max_tokens=max(ALLOWED_TOKENS * mean, tokens),
        )
        arrivals.append(Arrival(at_ms, prompt, query, tokens))
    return arrivals


def saturation(gpu: dict[TierName, Hardware], arrivals: Sequence[Arrival]) -> float:
    """Return the requests a second that all tiers complete together if they are always full."""
    tokens = round(fmean(arrival.tokens for arrival in arrivals))
    prompt_tokens = round(fmean(arrival.query.prompt_tokens for arrival in arrivals))
    return sum(
        offline(kind, prompt_tokens, tokens, 10 * MAX_NUM_SEQS, MAX_NUM_SEQS) / tokens
        for kind in gpu.values()
    )


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of values, by a bootstrap over blocks of neighbours."""
    size = max(len(values) // BLOCKS, 1)
    means = [
        fmean(values[start : start + size])
        for start in range(0, len(values) - size + 1, size)
    ]
    source = random.Random(0)
    resampled = sorted(
        fmean(source.choices(means, k=len(means))) for _ in range(RESAMPLES)
    )
    return resampled[RESAMPLES // 40], resampled[-RESAMPLES // 40]


def shares_of(served: Sequence[Request]) -> dict[TierName, float]:
    """Return the share of requests that each tier served."""
    return {
        tier: sum(request.tier is tier for request in served) / len(served)
        for tier in STANDARD_TIERS
    }


def row(name: str, fleet: Fleet) -> str:
    """Return what one way of choosing came to."""
    served = fleet.served
    lost = [100 * request.loss for request in served]
    low, high = interval(lost)
    ttfts = [request.ttft_ms for request in served]
    tpots = [request.tpot_ms for request in served]
    seconds = (served[-1].arrival.at_ms - served[0].arrival.at_ms) / 1000
    good = sum(request.is_good for request in served) / seconds
    busy_ms = sum(engine.busy_ms for engine in fleet.engines.values()) / len(served)
    shares = "/".join(f"{100 * share:.0f}" for share in shares_of(served).values())
    return (
        f"{name:34}{fmean(lost):6.2f} ({low:4.2f} to {high:4.2f}){good:10.1f}{percentile(ttfts, 0.5):9.0f}"
        f"{percentile(ttfts, 0.95):9.0f}{percentile(tpots, 0.5):10.1f}{percentile(tpots, 0.95):8.1f}{busy_ms:9.1f}"
        f"{shares:>12}"
    )


def compare(gpu_name: str, load: float, prompts: Sequence[Prompt]) -> None:
    """Run all ways of choosing at one load, and print them."""
    model = architecture(LLAMA_8B)
    gpu = {
        tier: hardware(tier, model, parse_gpus(gpu_name)[0]) for tier in STANDARD_TIERS
    }
    rate = load * saturation(gpu, make_arrivals(prompts, 1.0))
    arrivals = make_arrivals(prompts, rate)
    print(
        f"\n{gpu_name}, one for each tier, {load:g} of saturation ({rate:.1f} requests/s)"
    )
    print(
        f"{'':34}{'lost of 100':>22}{'good/s':>10}{'TTFT p50':>9}{'p95':>9}{'TPOT p50':>10}{'p95':>8}{'engine':>9}"
        f"{'f/b/p %':>12}"
    )
    ways: dict[str, Callable[[Arrival, FleetSnapshot], TierName | None]] = {
        f"all {tier}": always(tier) for tier in STANDARD_TIERS
    }
    ways |= {
        "round robin": in_turn(),
        "least loaded": least_loaded,
        "QARR before: least engine time": by_engine_time,
        "QARR": by_policy,
    }
    ways |= {
        f"QARR, loss budget {100 * budget:g} of 100": by_policy_within(budget)
        for budget in BUDGETS
    }
    fleets = {}
    for name, choose in ways.items():
        fleets[name] = Fleet(gpu, choose)
        fleets[name].run(arrivals)
        print(row(name, fleets[name]), flush=True)
    mixed = Fleet(gpu, at_random(shares_of(fleets["QARR"].served)))
    mixed.run(arrivals)
    print(row("random mix, QARR's shares", mixed))
    told = Fleet(gpu, by_policy_told_classes)
    told.run(arrivals)
    print(row("QARR, told the true classes", told))
    print(f"# {difference(fleets['QARR'], mixed)}", flush=True)


def difference(ours: Fleet, mixed: Fleet) -> str:
    """Return what the choice saves against a random mix, paired by request."""
    by_time = {request.arrival.at_ms: request.loss for request in mixed.served}
    saved = [
        100 * (by_time[request.arrival.at_ms] - request.loss) for request in ours.served
    ]
    low, high = interval(saved)
    engine_ms = [
        sum(engine.busy_ms for engine in fleet.engines.values()) / len(fleet.served)
        for fleet in (ours, mixed)
    ]
    return (
        f"QARR loses {fmean(saved):.2f} ({low:.2f} to {high:.2f}) answers of 100 fewer than a random mix with its shares, "
        f"with {engine_ms[0] / engine_ms[1]:.2f} times its engine time"
    )


def main() -> None:
    """Run as the arguments say."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", nargs="+", default=["H100", "L40S"])
    parser.add_argument(
        "--loads",
        type=float,
        nargs="+",
        default=[0.5, 0.8, 1.0, 1.2],
        help="shares of saturation",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=10_000,
        help="at most as many as there are prompts",
    )
    options = parser.parse_args()
    prompts = read_prompts()[: options.requests]
    print(f"$ python benchmarks/choices.py {' '.join(sys.argv[1:])}".rstrip())
    print(
        f"# Llama 3.1 8B; {len(prompts)} prompts; goodput: TTFT within {TTFT_MS:g} ms, {TPOT_MS:g} ms a token"
    )
    for gpu_name in options.gpus:
        for load in options.loads:
            note(f"{gpu_name} at {load:g}")
            compare(gpu_name, load, prompts)


if __name__ == "__main__":
    main()
