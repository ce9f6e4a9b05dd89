"""Which replica of a tier takes a request: the least loaded, or one whose prefix cache saves more than its load costs.

Where replicas hold different shares of the prompt, the one with the least cost takes it. Where all speeds are known under
load, the cost is the predicted time of the whole answer, with only the uncached tokens to prefill: what a cache saves and
what load costs are both milliseconds. Else it is tokens: those that the replica has to compute already, and the uncached
ones of the prompt. So a cache outweighs at most as much more load as it saves, by either measure.
"""

from __future__ import annotations

from math import exp, inf, sqrt
from typing import TYPE_CHECKING

from msgspec import Struct

from tiers.snapshot import FleetLoad, ReplicaState, TierSnapshot, load_of
from tiers.spec import ReplicaStatus
from tiers.speed import IDLE, Load, Times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiers.snapshot import Trends
    from tiers.speed import SpeedModel

# A session's own replica is supposed to hold this share of what no cache is known to hold of the prompt.
HOME_SHARE = 0.5
READY = ReplicaStatus.READY


class Request(Struct, frozen=True):
    """What a request needs of a replica.

    Attributes:
        prompt_tokens: Tokens of its prompts.
        output_tokens: Expected output of all its sequences.
        sequences: Answers computed at the same time.
        long: The prompts are too long for a replica whose KV cache is nearly full.
        output_share: Recent output tokens over those that requests allowed, 0..1.
    """

    prompt_tokens: int
    output_tokens: float
    sequences: int = 1
    long: bool = False
    output_share: float = 1.0


class Expectation(Struct, frozen=True):
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
        free: It takes the request now.
        replica: Its state; None: no replica is ready.
        times: Predicted times, corrected by recent errors; None: its speed is not known.
        cached: Tokens of the prompt in its prefix cache; None: not known.
        position: Its position in the tier; None: no replica is ready.
        snapshot_at: Monotonic time of the snapshot; None: not known.
        load: The replica's load, without the request.
        uncorrected: The times that the speed model alone predicts; None: its speed is not known.
    """

    free: bool
    replica: ReplicaState | None
    times: Expectation | None
    cached: int | None
    position: int | None = None
    snapshot_at: float | None = None
    load: Load = IDLE
    uncorrected: Times | None = None


NONE_READY = Candidate(free=False, replica=None, times=None, cached=None)


def candidate(
    tier: TierSnapshot, request: Request, fleet: FleetLoad | None
) -> Candidate:
    """Return what a tier has for a request."""
    chosen = choose(tier, request, fleet)
    if chosen >= 0:
        return expected(tier, chosen, request, fleet=fleet)
    for position, replica in enumerate(tier.replicas):
        if replica.status is READY:
            return expected(tier, position, request, fleet=fleet, free=False)
    return NONE_READY


def expected(
    tier: TierSnapshot,
    position: int,
    request: Request,
    fleet: FleetLoad | None,
    *,
    free: bool = True,
) -> Candidate:
    """Return one replica as a candidate; where its speed is known, its times are corrected by recent errors."""
    replica = tier.replicas[position]
    cached = None if tier.cached is None else tier.cached[position]
    load = load_of(replica, tier.output_tokens[position], fleet)
    corrected: Expectation | None = None
    uncorrected: Times | None = None
    if replica.speed is not None:
        uncached_tokens = max(request.prompt_tokens - (cached or 0), 0)
        uncorrected = _predict_times(
            replica.speed,
            load,
            request,
            uncached_tokens=uncached_tokens,
            max_num_seqs=tier.spec.max_num_seqs,
        )
        corrected = _correct(
            uncorrected, replica.speed, replica.trends, now=_time_of(fleet)
        )
    return Candidate(
        free=free,
        replica=replica,
        times=corrected,
        cached=cached,
        position=position,
        snapshot_at=None if fleet is None else fleet.now,
        load=load,
        uncorrected=uncorrected,
    )


def _time_of(fleet: FleetLoad | None) -> float:
    """Return the monotonic time of a snapshot. In a decision log it is 0, before all trends, so that none of them fades."""
    return 0.0 if fleet is None else fleet.now


def _predict_times(
    speed: SpeedModel,
    load: Load,
    request: Request,
    *,
    uncached_tokens: int,
    max_num_seqs: int,
) -> Times:
    """Predict a request's times by the speed model alone."""
    return speed.times(
        uncached_tokens,
        load,
        max_num_seqs,
        output_share=request.output_share,
        sequences=request.sequences,
        output_tokens=request.output_tokens / request.sequences,
    )


def _correct(
    times: Times, speed: SpeedModel, trends: Trends, now: float
) -> Expectation:
    """Correct predicted times by the recent errors of such predictions."""
    ttft_mean, ttft_variance = trends.ttft.at_time(now, speed.ttft_spread)
    tpot_mean, tpot_variance = trends.tpot.at_time(now, speed.tpot_spread)
    drift = exp(tpot_mean)
    return Expectation(
        ttft_ms=times.ttft_ms * exp(ttft_mean),
        tpot_ms=times.tpot_ms * drift,
        ttft_spread=sqrt(ttft_variance),
        tpot_spread=sqrt(tpot_variance),
        drift=drift,
    )


def takes(replica: ReplicaState, request: Request, max_in_flight: int) -> bool:
    """Tell whether a replica takes a request now.

    A request with more sequences than there are slots needs all of them free. A lone request always fits the KV cache.

    Args:
        replica: Its state.
        request: The request.
        max_in_flight: Most slots that a replica of its tier counts as having.
    """
    if replica.status is not READY or not replica.breaker.admits:
        return False
    limit = min(replica.limit, max_in_flight)
    if limit <= 0 or replica.slots + min(request.sequences, limit) > limit:
        return False
    kv = replica.kv
    if (
        kv.size
        and kv.held
        and kv.held + request.prompt_tokens + request.output_tokens > kv.size
    ):
        return False
    return not (request.long and kv.pressure)


def choose(tier: TierSnapshot, request: Request, fleet: FleetLoad | None) -> int:
    """Return the position of the replica that takes a request; -1: none takes it.

    Without a prefix that tells them apart it is the one with the fewest tokens to compute; of equals, with the fewest
    sequences.
    """
    least_loaded = _least_loaded(tier, request)
    if least_loaded < 0 or not _caches_matter(tier):
        return least_loaded
    max_in_flight = tier.spec.max_in_flight
    able = [
        position
        for position, replica in enumerate(tier.replicas)
        if takes(replica, request, max_in_flight)
    ]
    return _cheapest(tier, able, request, fleet=fleet)


def _least_loaded(tier: TierSnapshot, request: Request) -> int:
    """Return the position of the least loaded replica that takes a request; -1: none takes it.

    This runs for every replica on every request, so it makes no tuples to compare loads by, and finds out whether a replica
    takes the request only if it is less loaded than the best so far.
    """
    max_in_flight = tier.spec.max_in_flight
    best_position = -1
    fewest_tokens = inf
    fewest_sequences = 0
    for position, (replica, output_tokens) in enumerate(
        zip(tier.replicas, tier.output_tokens, strict=True)
    ):
        tokens = replica.prompt_tokens + output_tokens
        if tokens > fewest_tokens or (
            tokens == fewest_tokens and replica.load.sequences >= fewest_sequences
        ):
            continue
        if takes(replica, request, max_in_flight):
            best_position = position
            fewest_tokens = tokens
            fewest_sequences = replica.load.sequences
    return best_position


def _caches_matter(tier: TierSnapshot) -> bool:
    """Tell whether prefix caches may set a tier's replicas apart, or one of them is the session's own."""
    if tier.cached is None:
        return False
    return tier.home >= 0 or tell_apart(tier.cached)


def tell_apart(cached: Sequence[int]) -> bool:
    """Tell whether some replicas hold more of a prompt than others."""
    return any(tokens != cached[0] for tokens in cached)


def _cheapest(
    tier: TierSnapshot, able: Sequence[int], request: Request, fleet: FleetLoad | None
) -> int:
    """Return the position of the replica that takes a request at the least cost; of equals, the least loaded.

    Args:
        tier: The tier, with what its replicas hold of the prompt.
        able: Positions of the replicas that take the request.
        request: The request.
        fleet: How busy the fleet is at the same time.
    """
    cached = _supposed_cached(tier, able, request)
    are_speeds_known = all(
        _is_known_under_load(tier.replicas[position].speed) for position in able
    )
    ranked = []
    for position in able:
        replica = tier.replicas[position]
        tokens = replica.prompt_tokens + tier.output_tokens[position]
        uncached_tokens = request.prompt_tokens - cached[position]
        if are_speeds_known:
            cost = _answer_ms(
                tier, position, max(uncached_tokens, 0), request=request, fleet=fleet
            )
        else:
            cost = tokens + uncached_tokens
        ranked.append((cost, tokens, replica.load.sequences, position))
    return min(ranked)[-1]


def _supposed_cached(
    tier: TierSnapshot, able: Sequence[int], request: Request
) -> list[int]:
    """Return the cached tokens to count for each replica: those known, and on a session's own replica a share of the others.

    The session counts only where what is known does not tell the able replicas apart.
    """
    cached = list(tier.cached or ())
    home = tier.home
    if home in able and not tell_apart([cached[position] for position in able]):
        cached[home] += int(HOME_SHARE * (request.prompt_tokens - cached[home]))
    return cached


def _is_known_under_load(speed: SpeedModel | None) -> bool:
    return speed is not None and speed.under_load


def _answer_ms(
    tier: TierSnapshot,
    position: int,
    uncached_tokens: int,
    request: Request,
    fleet: FleetLoad | None,
) -> float:
    """Predict the time of the whole answer on one replica, corrected by recent errors."""
    replica = tier.replicas[position]
    speed = replica.speed
    assert speed is not None
    load = load_of(replica, tier.output_tokens[position], fleet)
    ttft_ms, tpot_ms = _predict_times(
        speed,
        load,
        request,
        uncached_tokens=uncached_tokens,
        max_num_seqs=tier.spec.max_num_seqs,
    )
    ttft_trend, tpot_trend = replica.trends.means(_time_of(fleet), speed)
    output_tokens_each = request.output_tokens / request.sequences
    return ttft_ms * exp(ttft_trend) + output_tokens_each * tpot_ms * exp(tpot_trend)
