"""How fast a replica is while it does what it is doing: a small model, and how far it has been off lately.

An engine with continuous batching computes in steps. One step decodes one token of every running sequence and prefills part
of the waiting prompts (Orca, OSDI 2022; chunked prefill: Sarathi-Serve, arXiv 2403.02310). So, in milliseconds,

    step(n) = step_base + step_per_sequence * n + beyond * max(n - knee, 0)   n sequences decoding
    TPOT    = step(n) / (1 - share of time that goes into prompts that come meanwhile)
    TTFT    = ttft_base + prefill_per_token * (own + waiting prompt tokens) + steps * step(n)  + wait for a place

A GPU's step is bound by memory for small batches and by computing for large ones, hence the knee; a CPU often has none. All
is times ``1 + contention * neighbours`` where replicas share a machine and that share of the others computes as well.
The parameters are measured by ``qarr profile latency``, which a router may do by itself; until then they are learned from
live requests (``tiers.live_speed``), or an idle engine's speed is all that is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

MEMORY = 0.8  # weight of the past in what is learned from answers: about the last five
HALF_LIFE_S = 60.0  # of what was learned: a tier that is passed over gets its measured speed back
PREFILL_MEMORY_MS = 20_000.0  # time constant of the rate at which prompts come
MOST_PREFILL = 0.8  # share of time in prompts beyond which the engine does not keep up anyway
UNMEASURED_SPREAD = 0.3  # of log(seen / predicted), before anything was seen: about a third either way


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica has to do, before one more request.

    Attributes:
        sequences: It has: one for each request, several for one that asks for several answers.
        prompt_tokens: Of prompts that are not computed yet.
        output_tokens: Most that may still come.
        neighbours: Share of the other replicas of the fleet that have requests, 0..1.
        prefill_rate: Prompt tokens a millisecond that have come lately.
    """

    sequences: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    neighbours: float = 0.0
    prefill_rate: float = 0.0


IDLE = Load()


class Times(NamedTuple):
    """Times of one answer, in milliseconds."""

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """One replica's speed.

    Attributes:
        ttft_base_ms: TTFT of an empty prompt on an idle replica.
        prefill_ms_per_token: For each prompt token to compute.
        step_base_ms: Time of a decode step, whatever its batch.
        step_ms_per_sequence: What each sequence in the batch adds.
        step_knee: Batch above which each sequence adds more.
        step_ms_beyond_knee: How much more.
        ttft_steps: Decode steps that a new prompt waits for where others are being decoded.
        contention: Further share of time, 0 and up, when all other replicas of the fleet compute as well.
        ttft_spread: Standard deviation of log(seen / predicted) that the fit left.
        tpot_spread: The same.
        profiled: Whether it was measured under load, not only idle.
        learned: Whether it was fitted to live requests, under whatever load there was.
    """

    ttft_base_ms: float
    prefill_ms_per_token: float
    step_base_ms: float
    step_ms_per_sequence: float = 0.0
    ttft_steps: float = 0.0
    contention: float = 0.0
    ttft_spread: float = UNMEASURED_SPREAD
    tpot_spread: float = UNMEASURED_SPREAD
    profiled: bool = False
    step_knee: int = 0
    step_ms_beyond_knee: float = 0.0
    learned: bool = False

    @property
    def source(self) -> Literal["profile", "live", "idle"]:
        """Return where it comes from."""
        return "profile" if self.profiled else "live" if self.learned else "idle"

    @property
    def under_load(self) -> bool:
        """Tell whether it says anything of a replica that has several requests."""
        return self.profiled or self.learned

    def fastest(self, other: SpeedModel) -> SpeedModel:
        """Return the least of each time of two measurements of an idle replica."""
        return replace(
            self,
            ttft_base_ms=min(self.ttft_base_ms, other.ttft_base_ms),
            prefill_ms_per_token=min(self.prefill_ms_per_token, other.prefill_ms_per_token),
            step_base_ms=min(self.step_base_ms, other.step_base_ms),
        )

    def step_ms(self, sequences: int) -> float:
        """Return the time of one decode step of a batch, without contention."""
        beyond = self.step_ms_beyond_knee * (sequences - self.step_knee) if sequences > self.step_knee else 0.0
        return self.step_base_ms + self.step_ms_per_sequence * sequences + beyond

    def times(
        self, prompt_tokens: int, load: Load, max_num_seqs: int, output_share: float, sequences: int = 1
    ) -> Times:
        """Predict the times of one more request.

        Args:
            prompt_tokens: Of its prompts.
            load: What is there already.
            max_num_seqs: Sequences that the replica decodes at once; more wait.
            output_share: Of the output tokens asked for, how many come, 0..1.
            sequences: That the request is computed as.
        """
        batch = min(load.sequences + sequences, max_num_seqs)
        step = self.step_ms(batch)
        ttft = self.ttft_base_ms + self.prefill_ms_per_token * (prompt_tokens + load.prompt_tokens)
        if load.sequences > 0:
            ttft += self.ttft_steps * self.step_ms(min(load.sequences, max_num_seqs))
            ahead = load.sequences + 1 - max_num_seqs
            if ahead > 0:
                ttft += ahead * step * 2 * remaining_tokens(load, output_share) / (max_num_seqs + 1)
        slowed = 1 + self.contention * load.neighbours
        prefilling = min(self.prefill_ms_per_token * load.prefill_rate * slowed, MOST_PREFILL)
        return Times(ttft * slowed, step * slowed / (1 - prefilling))

    def engine_ms(self, prompt_tokens: int, output_tokens: float, batch: int) -> float:
        """Return the engine time that a request takes: its prefill, and its share of the steps that decode it.

        Args:
            prompt_tokens: Of its prompts.
            output_tokens: That are expected, of all its sequences.
            batch: Sequences decoded together, its own included.
        """
        return self.prefill_ms_per_token * prompt_tokens + output_tokens * self.step_ms(batch) / batch

    def relief_ms(self, load: Load, max_num_seqs: int, output_share: float) -> float:
        """Predict the time until a request ends: with n left, evenly spread over their ways, the next has 2 / (n + 1)."""
        if load.sequences == 0:
            return 0.0
        left = remaining_tokens(load, output_share) * 2 / (load.sequences + 1)
        backlog = self.prefill_ms_per_token * load.prompt_tokens
        slowed = 1 + self.contention * load.neighbours
        return (backlog + left * self.step_ms(min(load.sequences, max_num_seqs))) * slowed


def remaining_tokens(load: Load, output_share: float) -> float:
    """Return the output tokens that each of the present requests is expected to have left."""
    return output_share * load.output_tokens / max(load.sequences, 1)


@dataclass(frozen=True, slots=True)
class Trend:
    """How far predictions have been off lately: mean and variance of log(seen / predicted), exponentially weighted.

    Attributes:
        mean: 0 where nothing was seen.
        variance: About the mean.
        at: When it was last changed, in seconds by the monotonic clock.
    """

    mean: float
    variance: float
    at: float

    def faded(self, now: float, spread: float) -> Trend:
        """Return what is left of it: it goes back to no deviation and the given spread by half each ``HALF_LIFE_S``."""
        left = 0.5 ** (max(now - self.at, 0.0) / HALF_LIFE_S)
        return Trend(self.mean * left, spread**2 + (self.variance - spread**2) * left, now)

    def after(self, predicted_ms: float, seen_ms: float, now: float, spread: float) -> Trend:
        """Return it after one more answer.

        Args:
            predicted_ms: By the model alone, without this trend.
            seen_ms: What it was.
            now: By the monotonic clock.
            spread: Of the model.
        """
        past = self.faded(now, spread)
        off = math.log(max(seen_ms, 0.1) / max(predicted_ms, 0.1)) - past.mean
        mean = past.mean + (1 - MEMORY) * off
        return Trend(mean, MEMORY * (past.variance + (1 - MEMORY) * off * off), now)


STEADY = Trend(0.0, UNMEASURED_SPREAD**2, 0.0)


class Seen(NamedTuple):
    """One answer, and what its replica had to do. Times in milliseconds.

    Attributes:
        prompt_tokens: Of its prompt.
        sequences: That the replica had when it was sent.
        waiting_tokens: Prompt tokens of those that were not computed yet.
        neighbours: Share of the other replicas that had requests, 0..1.
        ttft_ms: To its first token.
        batch: Mean of the sequences while it was decoded, its own included.
        prefilled: Prompt tokens that came meanwhile, for each of its tokens.
        tpot_ms: Mean time between its tokens; None for fewer than two.
    """

    prompt_tokens: int
    sequences: int
    waiting_tokens: int
    neighbours: float
    ttft_ms: float
    batch: float = 0.0
    prefilled: float = 0.0
    tpot_ms: float | None = None
