"""Which replica of a tier takes a request: the least loaded, or one whose prefix cache saves more than its load costs.

Where replicas hold different shares of the prompt, the one with the least cost takes it. Where all speeds are known under
load, the cost is the predicted time of the whole answer, with only the uncached tokens to prefill: what a cache saves and
what load costs are both milliseconds. Else it is tokens: those that the replica has to compute already, and the uncached
ones of the prompt. So a cache outweighs at most as much more load as it saves, by either measure.
"""

from __future__ import annotations

from math import ceil, exp, inf, sqrt
from typing import TYPE_CHECKING

from msgspec import Struct

from tiers.spec import ReplicaStatus
from tiers.speed import IDLE, PredictedTimes, ReplicaLoad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiers.snapshot import FleetLoad, ReplicaState, TierSnapshot, Trends
    from tiers.speed import SpeedModel

# A session's own replica is supposed to hold this share of what no cache is known to hold of the prompt.
HOME_SHARE = 0.5
READY = ReplicaStatus.READY


class Demand(Struct, frozen=True):
    """What a request needs of a replica.

    Attributes:
        prompt_tokens: Tokens of all its prompts, with the chat template.
        output_tokens: Expected output of all its sequences.
        sequences: Answers computed at the same time: prompts times choices. Choices share their prompt.
        is_long: The prompts are too long for a replica whose KV cache is nearly full.
        output_share: Recent output tokens over those that requests allowed, 0..1.
    """

    prompt_tokens: int
    output_tokens: float
    sequences: int = 1
    is_long: bool = False
    output_share: float = 1.0

    @property
    def kv_tokens(self) -> int:
        """Return the tokens that its prompts and its expected output take of a KV cache."""
        return self.prompt_tokens + ceil(self.output_tokens)


class CorrectedTimes(Struct, frozen=True):
    """Predicted times of one answer in milliseconds, and the standard deviations of log(seen / predicted).

    ``drift`` is the recent seen TPOT over the speed model's, by which ``tpot_ms`` is corrected.
    """

    ttft_ms: float
    tpot_ms: float
    ttft_spread: float
    tpot_spread: float
    drift: float = 1.0


class Candidate(Struct, frozen=True):
    """The replica of a tier that would serve a request; if none takes it now, the first ready one.

    Attributes:
        is_free: It takes the request now.
        replica: Its state; None: no replica is ready.
        times: Predicted times, corrected by recent errors; None: its speed is not known.
        cached_tokens: Tokens of the prompt in its prefix cache; None: not known.
        uncached_tokens: Tokens of the prompt that it would have to compute.
        position: Its position in the tier; None: no replica is ready.
        snapshot_at: Monotonic time of the snapshot; None: not known.
        load: The replica's load, without the demand.
        uncorrected_times: The times that the speed model alone predicts; None: its speed is not known.
    """

    is_free: bool
    replica: ReplicaState | None
    times: CorrectedTimes | None
    cached_tokens: int | None
    uncached_tokens: int = 0
    position: int | None = None
    snapshot_at: float | None = None
    load: ReplicaLoad = IDLE
    uncorrected_times: PredictedTimes | None = None


NONE_READY = Candidate(is_free=False, replica=None, times=None, cached_tokens=None)


def expected_demand(
    prompt_tokens: int,
    max_tokens: int,
    sequences: int,
    *,
    output_share: float,
    long_prompt_tokens: int,
    answer_tokens: float | None = None,
) -> Demand:
    """Return what a request needs, with the output that recent requests let one expect.

    Args:
        prompt_tokens: Tokens of all its prompts, with the chat template.
        max_tokens: Most output tokens of each sequence.
        sequences: Answers computed at the same time.
        output_share: Recent output tokens over those that requests allowed, 0..1.
        long_prompt_tokens: Prompts of more tokens are too long for a replica whose KV cache is nearly full.
        answer_tokens: Mean output tokens of recent answers; None: not known. Agents allow thousands of tokens and use few,
            so that a share of what they allow would be far too many.
    """
    output_tokens = output_share * max_tokens
    if answer_tokens is not None:
        output_tokens = min(output_tokens, answer_tokens)
    return Demand(
        prompt_tokens,
        output_tokens * sequences,
        sequences=sequences,
        is_long=prompt_tokens > long_prompt_tokens,
        output_share=output_share,
    )


def best_candidate(
    tier: TierSnapshot, demand: Demand, fleet: FleetLoad | None
) -> Candidate:
    """Return what a tier has for a demand."""
    chosen_position = choose_replica(tier, demand, fleet)
    if chosen_position is not None:
        return candidate_at(tier, chosen_position, demand, fleet=fleet)
    for position, replica in enumerate(tier.replicas):
        if replica.status is READY:
            return candidate_at(tier, position, demand, fleet=fleet, is_free=False)
    return NONE_READY


def candidate_at(
    tier: TierSnapshot,
    position: int,
    demand: Demand,
    fleet: FleetLoad | None,
    *,
    is_free: bool = True,
) -> Candidate:
    """Return one replica as a candidate; where its speed is known, its times are corrected by recent errors."""
    replica = tier.replicas[position]
    speed = replica.speed
    cached_tokens = None if tier.cached is None else tier.cached[position]
    uncached_tokens = max(demand.prompt_tokens - (cached_tokens or 0), 0)
    load = tier.load_at(position, fleet)
    corrected: CorrectedTimes | None = None
    uncorrected: PredictedTimes | None = None
    if speed is not None:
        uncorrected = speed.times(
            uncached_tokens,
            load,
            tier.spec.max_num_seqs,
            output_share=demand.output_share,
            sequences=demand.sequences,
            output_tokens=demand.output_tokens / demand.sequences,
        )
        corrected = _correct(uncorrected, speed, replica.trends, now=_time_of(fleet))
    return Candidate(
        is_free,
        replica,
        times=corrected,
        cached_tokens=cached_tokens,
        uncached_tokens=uncached_tokens,
        position=position,
        snapshot_at=None if fleet is None else fleet.now,
        load=load,
        uncorrected_times=uncorrected,
    )


def _time_of(fleet: FleetLoad | None) -> float:
    """Return the monotonic time of a snapshot. In a decision log it is 0, before all trends, so that none of them fades."""
    return 0.0 if fleet is None else fleet.now


def _correct(
    times: PredictedTimes, speed: SpeedModel, trends: Trends, now: float
) -> CorrectedTimes:
    """Correct predicted times by the recent errors of such predictions."""
    ttft_mean, ttft_variance = trends.ttft.at_time(now, speed.ttft_spread)
    tpot_mean, tpot_variance = trends.tpot.at_time(now, speed.tpot_spread)
    drift = exp(tpot_mean)
    return CorrectedTimes(
        times.ttft_ms * exp(ttft_mean),
        times.tpot_ms * drift,
        ttft_spread=sqrt(ttft_variance),
        tpot_spread=sqrt(tpot_variance),
        drift=drift,
    )


def takes(replica: ReplicaState, demand: Demand, max_in_flight: int) -> bool:
    """Tell whether a replica takes a request now.

    A request with more sequences than there are slots needs all of them free. A lone request always fits the KV cache.

    Args:
        replica: Its state.
        demand: What the request needs.
        max_in_flight: Most slots that a replica of its tier counts as having.
    """
    if replica.status is not READY or not replica.breaker.admits:
        return False
    free_slots = min(replica.limit, max_in_flight) - replica.slots
    if free_slots <= 0 or (free_slots < demand.sequences and replica.slots):
        return False
    kv = replica.kv
    if (
        kv.size
        and kv.held
        and kv.held + demand.prompt_tokens + demand.output_tokens > kv.size
    ):
        return False
    return not (demand.is_long and kv.pressure)


def choose_replica(
    tier: TierSnapshot, demand: Demand, fleet: FleetLoad | None
) -> int | None:
    """Return the position of the replica that takes a request; None: none takes it.

    Without a prefix that tells them apart it is the one with the fewest tokens to compute; of equals, with the fewest
    sequences.
    """
    least_loaded = _least_loaded(tier, demand)
    if least_loaded is None or tier.cached is None:
        return least_loaded
    is_session_known = tier.home >= 0
    if not is_session_known and not tell_apart(tier.cached):
        return least_loaded
    max_in_flight = tier.spec.max_in_flight
    able = [
        position
        for position, replica in enumerate(tier.replicas)
        if takes(replica, demand, max_in_flight)
    ]
    return _cheapest(tier, able, demand, fleet=fleet)


def _least_loaded(tier: TierSnapshot, demand: Demand) -> int | None:
    """Return the position of the least loaded replica that takes a request; None: none takes it.

    This runs for every replica on every demand, so it looks at a replica's state only if it may be less loaded than the
    best so far.
    """
    max_in_flight = tier.spec.max_in_flight
    best_position: int | None = None
    fewest_tokens = inf
    fewest_sequences = 0
    for position, tokens in enumerate(tier.outstanding_tokens):
        if tokens > fewest_tokens:
            continue
        replica = tier.replicas[position]
        sequences = replica.load.sequences
        if tokens == fewest_tokens and sequences >= fewest_sequences:
            continue
        if takes(replica, demand, max_in_flight):
            best_position = position
            fewest_tokens = tokens
            fewest_sequences = sequences
    return best_position


def tell_apart(cached: Sequence[int]) -> bool:
    """Tell whether some replicas hold more of a prompt than others."""
    return len(set(cached)) > 1


def _cheapest(
    tier: TierSnapshot, able: Sequence[int], demand: Demand, fleet: FleetLoad | None
) -> int:
    """Return the position of the replica that takes a request at the least cost; of equals, the least loaded.

    Args:
        tier: The tier, with what its replicas hold of the prompt.
        able: Positions of the replicas that take the demand.
        demand: What the request needs.
        fleet: How busy the fleet is at the same time.
    """
    cached = _supposed_cached(tier, able, demand)
    are_speeds_known = all(
        _is_known_under_load(tier.replicas[position].speed) for position in able
    )
    held_tokens = _held_tokens(tier, able)
    ranked = []
    for position in able:
        replica = tier.replicas[position]
        tokens = tier.outstanding_tokens[position]
        uncached_tokens = demand.prompt_tokens - cached[position]
        lost_tokens = max(held_tokens - cached[position], 0)
        if are_speeds_known:
            cost = _answer_ms(
                tier, position, max(uncached_tokens, 0), demand=demand, fleet=fleet
            )
            if lost_tokens and replica.speed is not None:
                cost += replica.speed.prefill_ms_per_token * lost_tokens
        else:
            cost = tokens + uncached_tokens + lost_tokens
        ranked.append((cost, tokens, replica.load.sequences, position))
    return min(ranked)[-1]


def _held_tokens(tier: TierSnapshot, able: Sequence[int]) -> int:
    """Return the most tokens that an able replica holds of the prompt's conversation; 0: none holds the conversation.

    To compute them again elsewhere delays the requests there as well as this one, and so counts twice.
    """
    if not tier.conversation_tokens or tier.cached is None:
        return 0
    most_tokens = max([tier.cached[position] for position in able])
    return most_tokens if most_tokens >= tier.conversation_tokens else 0


def _supposed_cached(
    tier: TierSnapshot, able: Sequence[int], demand: Demand
) -> list[int]:
    """Return the cached tokens that count for each replica: those known, and for a session's own one a share of the rest."""
    cached = list(tier.cached or ())
    home = tier.home
    if home in able:
        cached[home] += int(HOME_SHARE * (demand.prompt_tokens - cached[home]))
    return cached


def _is_known_under_load(speed: SpeedModel | None) -> bool:
    return speed is not None and speed.under_load


def _answer_ms(
    tier: TierSnapshot,
    position: int,
    uncached_tokens: int,
    demand: Demand,
    fleet: FleetLoad | None,
) -> float:
    """Predict the time of the whole answer on one replica, corrected by recent errors."""
    replica = tier.replicas[position]
    speed = replica.speed
    assert speed is not None
    load = tier.load_at(position, fleet)
    output_tokens_each = demand.output_tokens / demand.sequences
    times = speed.times(
        uncached_tokens,
        load,
        tier.spec.max_num_seqs,
        output_share=demand.output_share,
        sequences=demand.sequences,
        output_tokens=output_tokens_each,
    )
    ttft_trend, tpot_trend = replica.trends.means(_time_of(fleet), speed)
    ttft_ms = times.ttft_ms * exp(ttft_trend)
    return ttft_ms + output_tokens_each * times.tpot_ms * exp(tpot_trend)
