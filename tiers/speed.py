"""How fast a replica is under its load: a small model, and the recent errors of its predictions.

An engine with continuous batching computes in steps. One step decodes one token of every running sequence and prefills part
of the waiting prompts (Orca, OSDI 2022; chunked prefill: Sarathi-Serve, arXiv 2403.02310). So, in milliseconds,

    step(n) = step_base + step_per_sequence * n + beyond * max(n - knee, 0)   n sequences decoding
    TPOT    = step(n) / (1 - share of time spent on prompts that arrive meanwhile)
    TTFT    = ttft_base + prefill_per_token * (own + waiting prompt tokens) + steps * step(n)  + wait for a slot

A GPU's step is bound by memory for small batches and by computing for large ones, hence the knee; a CPU often has none. All
times are multiplied by ``1 + contention * neighbours``, where that share of the other replicas, on the same machine, is
expected to compute meanwhile: those that compute now until they have finished, and later as many as usually do.
``qarr profile latency`` measures the parameters, or the router by itself. Until then they are learned from live requests
(``tiers.live_speed``), or only the speed of the idle engine is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from msgspec import Struct

MEMORY = 0.8  # weight of the past in a trend: about the last five answers
# a trend fades by half in this time: a tier that gets no requests returns to its measured speed
HALF_LIFE_S = 60.0
PREFILL_MEMORY_MS = 20_000.0  # time constant of the rate of prompt tokens
BUSY_MEMORY_S = 60.0  # time constant of the mean number of busy replicas
# replicas on one machine; in a larger fleet, the time that each has left is not predicted
MAX_BESIDE = 8
# highest share of time spent on prompts; beyond it the engine cannot keep up anyway
MAX_PREFILL = 0.8
ALWAYS_MS = 1e12
# spread of log(seen / predicted) before any answer: about a third either way
UNMEASURED_SPREAD = 0.3


class ReplicaLoad(Struct, frozen=True):
    """A replica's load, before one more request.

    Attributes:
        sequences: Sequences being computed: one for each answer of each request.
        prompt_tokens: Tokens of prompts that are not computed yet, as far as known.
        output_tokens: Upper bound of the output tokens still to come.
        neighbours: Share of the fleet's other replicas that have requests, 0..1.
        prefill_rate: Prompt tokens per millisecond, recently.
        neighbours_left_ms: Mean time that those neighbours are expected to go on computing.
        neighbours_usually: Share of the time that a replica has had requests lately, 0..1.
    """

    sequences: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    neighbours: float = 0.0
    prefill_rate: float = 0.0
    neighbours_left_ms: float = ALWAYS_MS
    neighbours_usually: float = 0.0

    def neighbours_within(self, ms: float) -> float:
        """Return the mean share of the neighbours that compute within a time from now, 0..1."""
        busy = self.neighbours
        if ms > self.neighbours_left_ms:
            busy *= self.neighbours_left_ms / ms
        return busy + (1 - busy) * self.neighbours_usually


IDLE = ReplicaLoad()


class PredictedTimes(Struct, frozen=True):
    """Times of one answer, in milliseconds."""

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """One replica's speed. Times in milliseconds.

    Attributes:
        ttft_base_ms: TTFT of an empty prompt on an idle replica.
        prefill_ms_per_token: For each prompt token to compute.
        step_base_ms: Time of a decode step, whatever its batch.
        step_ms_per_sequence: Added by each sequence in the batch.
        step_knee: Batch above which each sequence adds more.
        step_ms_beyond_knee: How much more.
        ttft_steps: Decode steps that a new prompt waits for while others are being decoded.
        contention: Added share of time, from 0, when all other replicas of the fleet compute as well.
        ttft_spread: Standard deviation of log(seen / predicted) of TTFT that the fit left.
        tpot_spread: Standard deviation of log(seen / predicted) of TPOT that the fit left.
        profiled: Whether it was measured under load.
        learned: Whether it was fitted to live requests.
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
        """Return the origin of the parameters."""
        if self.profiled:
            return "profile"
        return "live" if self.learned else "idle"

    @property
    def under_load(self) -> bool:
        """Tell whether the model holds for a replica with several requests."""
        return self.profiled or self.learned

    def fastest(self, other: SpeedModel) -> SpeedModel:
        """Return the shorter of each time of two measurements of an idle replica."""
        return replace(
            self,
            ttft_base_ms=min(self.ttft_base_ms, other.ttft_base_ms),
            prefill_ms_per_token=min(
                self.prefill_ms_per_token, other.prefill_ms_per_token
            ),
            step_base_ms=min(self.step_base_ms, other.step_base_ms),
        )

    def step_ms(self, sequences: int) -> float:
        """Return the time of one decode step of a batch, without contention."""
        beyond_knee_ms = 0.0
        if sequences > self.step_knee:
            beyond_knee_ms = self.step_ms_beyond_knee * (sequences - self.step_knee)
        return (
            self.step_base_ms + self.step_ms_per_sequence * sequences + beyond_knee_ms
        )

    def prompt_ms(self, tokens: int, _sequences: int, /) -> float:
        """Return by how much a prompt delays the batch that is being decoded, which does not depend on the batch."""
        return self.prefill_ms_per_token * tokens

    def times(
        self,
        prompt_tokens: int,
        load: ReplicaLoad,
        max_num_seqs: int,
        output_share: float,
        sequences: int = 1,
        *,
        output_tokens: float = 0.0,
    ) -> PredictedTimes:
        """Predict the times of one more request.

        Args:
            prompt_tokens: Tokens of its prompts.
            load: The replica's load without the request.
            max_num_seqs: Sequences that the replica decodes at once; more wait.
            output_share: Expected output tokens over those allowed, 0..1.
            sequences: Answers of the request.
            output_tokens: Expected output tokens of each of those answers.
        """
        running = load.sequences
        step_ms = self.step_ms(min(max_num_seqs, running + sequences))
        ttft_ms = self.ttft_base_ms + self.prefill_ms_per_token * (
            prompt_tokens + load.prompt_tokens
        )
        if running > 0:
            ttft_ms += self.ttft_steps * self.step_ms(min(max_num_seqs, running))
            ahead = running + 1 - max_num_seqs
            if ahead > 0:
                ttft_ms += (
                    ahead
                    * step_ms
                    * 2
                    * remaining_tokens(load, output_share)
                    / (max_num_seqs + 1)
                )
        slowdown = 1.0
        if self.contention:
            slowed_ttft_ms = ttft_ms * (1 + self.contention * load.neighbours)
            ttft_ms *= 1 + self.contention * load.neighbours_within(slowed_ttft_ms)
            slowdown += self.contention * load.neighbours_within(
                ttft_ms + output_tokens * step_ms
            )
        prefill_share = self.prefill_ms_per_token * load.prefill_rate * slowdown
        return PredictedTimes(
            ttft_ms, step_ms * slowdown / (1 - min(MAX_PREFILL, prefill_share))
        )

    def engine_ms(self, prompt_tokens: int, output_tokens: float, batch: int) -> float:
        """Return the engine time of a request: its prefill, and its share of the steps that decode it.

        Args:
            prompt_tokens: Tokens of its prompts.
            output_tokens: Expected output of all its sequences.
            batch: Sequences decoded together, its own included.
        """
        return (
            self.prefill_ms_per_token * prompt_tokens
            + output_tokens * self.step_ms(batch) / batch
        )

    def left_ms(
        self, load: ReplicaLoad, max_num_seqs: int, output_share: float
    ) -> float:
        """Predict the time until the replica's requests have ended, without contention."""
        prefill_ms = self.prefill_ms_per_token * load.prompt_tokens
        decode_ms = remaining_tokens(load, output_share) * self.step_ms(
            min(load.sequences, max_num_seqs)
        )
        return prefill_ms + decode_ms

    def relief_ms(
        self, load: ReplicaLoad, max_num_seqs: int, output_share: float
    ) -> float:
        """Predict the time until a request ends: of n, evenly spread over their progress, the next has 2 / (n + 1) left."""
        if load.sequences == 0:
            return 0.0
        next_end_tokens = (
            remaining_tokens(load, output_share) * 2 / (load.sequences + 1)
        )
        prefill_ms = self.prefill_ms_per_token * load.prompt_tokens
        decode_ms = next_end_tokens * self.step_ms(min(load.sequences, max_num_seqs))
        slowdown = 1 + self.contention * load.neighbours
        return (prefill_ms + decode_ms) * slowdown


def remaining_tokens(load: ReplicaLoad, output_share: float) -> float:
    """Return the output tokens that each sequence is expected to have left."""
    return output_share * load.output_tokens / (load.sequences or 1)


class Trend(Struct, frozen=True):
    """Recent errors of predictions: mean and variance of log(seen / predicted), exponentially weighted.

    Attributes:
        mean: The mean; 0 before any answer.
        variance: The variance about the mean.
        at: When it was last changed, in monotonic seconds.
    """

    mean: float
    variance: float
    at: float

    def at_time(self, now: float, spread: float) -> tuple[float, float]:
        """Return mean and variance at ``now``: they decay to 0 and the given spread by half each ``HALF_LIFE_S``."""
        if now <= self.at:
            return self.mean, self.variance
        remaining_share = 0.5 ** ((now - self.at) / HALF_LIFE_S)
        steady_variance = spread * spread
        return self.mean * remaining_share, steady_variance + (
            self.variance - steady_variance
        ) * remaining_share

    def faded(self, now: float, spread: float) -> Trend:
        """Return the trend at ``now``; see ``at_time``."""
        mean, variance = self.at_time(now, spread)
        return Trend(mean, variance, now)

    def after(
        self, predicted_ms: float, seen_ms: float, now: float, spread: float
    ) -> Trend:
        """Return the trend after one more answer.

        Args:
            predicted_ms: The time predicted by the model alone, without this trend.
            seen_ms: The time that the answer took.
            now: Monotonic seconds.
            spread: The spread that the model's fit left.
        """
        mean, variance = self.at_time(now, spread)
        deviation = math.log(max(seen_ms, 0.1) / max(predicted_ms, 0.1)) - mean
        return Trend(
            mean=mean + (1 - MEMORY) * deviation,
            variance=MEMORY * (variance + (1 - MEMORY) * deviation * deviation),
            at=now,
        )


STEADY = Trend(mean=0.0, variance=UNMEASURED_SPREAD**2, at=0.0)


class AnswerSample(NamedTuple):
    """One answer, and its replica's load. Times in milliseconds.

    Attributes:
        prompt_tokens: Tokens of its prompt.
        sequences: Sequences on the replica when it was sent.
        waiting_tokens: Tokens of their prompts that were not computed yet.
        neighbours: Share of the other replicas that had requests, 0..1.
        ttft_ms: Time to its first token.
        batch: Mean number of sequences while it was decoded, its own included.
        prefilled: Prompt tokens that arrived meanwhile, per output token.
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
