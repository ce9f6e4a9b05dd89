"""Which replica of a tier takes a request: the least loaded, or one whose prefix cache saves more than its load costs.

Where replicas hold different shares of the prompt, the one with the least cost takes it. Where all speeds are known under
load, the cost is the predicted time of the whole answer, with only the uncached tokens to prefill: what a cache saves and
what load costs are both milliseconds. Else it is tokens: those that the replica has to compute already, and the uncached
ones of the prompt. So a cache outweighs at most as much more load as it saves, by either measure.
"""

from __future__ import annotations

from math import exp, inf, sqrt
from typing import TYPE_CHECKING, NamedTuple

from tiers.snapshot import FleetLoad, ReplicaState, TierSnapshot, load_of
from tiers.spec import ReplicaStatus
from tiers.speed import IDLE, Load, Times

if TYPE_CHECKING:
    from collections.abc import Sequence


HOME_SHARE = 0.5  # of what no replica is known to hold: supposed to be cached on the session's own replica
READY = ReplicaStatus.READY


class Request(NamedTuple):
    """What a request needs of a replica.

    Attributes:
        prompt_tokens: Of its prompts.
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


class Expectation(NamedTuple):
    """Predicted times of one answer in milliseconds, and the standard deviations of log(seen / predicted).

    ``drift`` is the recent seen TPOT over the speed model's, by which ``tpot_ms`` is corrected.
    """

    ttft_ms: float
    tpot_ms: float
    ttft_spread: float
    tpot_spread: float
    drift: float = 1.0


class Candidate(NamedTuple):
    """The replica of a tier that would serve a request; if none takes it now, the first ready one.

    Attributes:
        free: It takes the request now.
        replica: None: no replica is ready.
        times: As predicted; None: its speed is not known.
        cached: Tokens of the prompt in its prefix cache; None: not known.
        position: Of the replica in its tier; -1: there is none.
        at: Monotonic time of the snapshot; 0: not known.
        load: Of the replica, without the request.
        uncorrected: The times without recent errors; None as ``times``.
    """

    free: bool
    replica: ReplicaState | None
    times: Expectation | None
    cached: int | None
    position: int = -1
    at: float = 0.0
    load: Load = IDLE
    uncorrected: Times | None = None


NONE_READY = Candidate(free=False, replica=None, times=None, cached=None)


def candidate(tier: TierSnapshot, request: Request, fleet: FleetLoad | None) -> Candidate:
    """Return what a tier has for a request."""
    position = choose(tier, request, fleet)
    free = position >= 0
    if not free:
        position = next((n for n, replica in enumerate(tier.replicas) if replica.status is READY), -1)
        if position < 0:
            return NONE_READY
    return expected(tier, position, request, fleet, free=free)


def expected(
    tier: TierSnapshot, position: int, request: Request, fleet: FleetLoad | None, *, free: bool = True
) -> Candidate:
    """Return one replica as a candidate; of known speed, its times are corrected by recent errors."""
    replica, cached = tier.replicas[position], None if tier.cached is None else tier.cached[position]
    load, speed, trends = load_of(replica, tier.output_tokens[position], fleet), replica.speed, replica.trends
    now = 0.0 if fleet is None else fleet.now
    if speed is None:
        return Candidate(free, replica, None, cached, position, now, load)
    prompt_tokens, output_tokens, sequences, _, share = request
    each = output_tokens / sequences
    to_read = prompt_tokens if cached is None else max(prompt_tokens - cached, 0)
    times = speed.times(to_read, load, tier.spec.max_num_seqs, share, sequences, output_tokens=each)
    ttft_mean, ttft_variance = trends.ttft.at_time(now, speed.ttft_spread)
    tpot_mean, tpot_variance = trends.tpot.at_time(now, speed.tpot_spread)
    drift = exp(tpot_mean)
    corrected = Expectation(
        times.ttft_ms * exp(ttft_mean), times.tpot_ms * drift, sqrt(ttft_variance), sqrt(tpot_variance), drift
    )
    return Candidate(free, replica, corrected, cached, position, now, load, times)


def takes(replica: ReplicaState, request: Request, most: int) -> bool:
    """Tell whether a replica takes a request now.

    A request with more sequences than there are slots needs all of them free. A lone request always fits the KV cache.

    Args:
        replica: Its state.
        request: The request.
        most: No replica counts as having more slots.
    """
    if replica.status is not READY or not replica.breaker.admits:
        return False
    limit, sequences, kv = replica.limit, request.sequences, replica.kv
    limit = min(limit, most)
    if limit <= 0 or replica.slots + (min(sequences, limit)) > limit:
        return False
    if kv.size and kv.held and kv.held + request.prompt_tokens + request.output_tokens > kv.size:
        return False
    return not (request.long and kv.pressure)


def choose(tier: TierSnapshot, request: Request, fleet: FleetLoad | None) -> int:
    """Return the position of the replica that takes a request; -1: none takes it.

    Without a prefix that tells them apart it is the one with the fewest tokens to compute; of equals, with the fewest
    sequences.
    """
    found, least, fewest, most = -1, inf, 0, tier.spec.max_in_flight
    for position, (replica, output_tokens) in enumerate(zip(tier.replicas, tier.output_tokens, strict=True)):
        load = replica.prompt_tokens + output_tokens
        if load > least or (load == least and replica.load.sequences >= fewest):
            continue
        if takes(replica, request, most):
            found, least, fewest = position, load, replica.load.sequences
    if tier.cached is None or found < 0 or (tier.home < 0 and not tell_apart(tier.cached)):
        return found
    return _cheapest(tier, [n for n, r in enumerate(tier.replicas) if takes(r, request, most)], request, fleet)


def tell_apart(cached: Sequence[int]) -> bool:
    """Tell whether some replicas hold more of a prompt than others."""
    return any(tokens != cached[0] for tokens in cached)


def _cheapest(tier: TierSnapshot, able: Sequence[int], request: Request, fleet: FleetLoad | None) -> int:
    """Return the position of the replica that takes a request at the least cost; of equals, the least loaded.

    Args:
        tier: With what its replicas hold of the prompt.
        able: Positions of those that take the request.
        request: The request.
        fleet: At the same time.
    """
    cached = list(tier.cached or ())
    if tier.home in able and not tell_apart([cached[n] for n in able]):
        cached[tier.home] += int(HOME_SHARE * (request.prompt_tokens - cached[tier.home]))
    replicas = [tier.replicas[n] for n in able]
    tokens = [tier.replicas[n].prompt_tokens + tier.output_tokens[n] for n in able]
    left = [max(request.prompt_tokens - cached[n], 0) for n in able]
    if all(r.speed is not None and r.speed.under_load for r in replicas):
        costs = [_answer_ms(tier, n, to_read, request, fleet) for n, to_read in zip(able, left, strict=True)]
    else:
        costs = [there + request.prompt_tokens - cached[n] for there, n in zip(tokens, able, strict=True)]
    sequences = [replica.load.sequences for replica in replicas]
    return min(zip(costs, tokens, sequences, able, strict=True))[3]


def _answer_ms(tier: TierSnapshot, position: int, to_read: int, request: Request, fleet: FleetLoad | None) -> float:
    """Return the predicted time of the whole answer, corrected by recent errors, with as many prompt tokens to prefill."""
    replica, each, now = tier.replicas[position], request.output_tokens / request.sequences, fleet.now if fleet else 0.0
    speed, load = replica.speed, load_of(replica, tier.output_tokens[position], fleet)
    assert speed is not None
    ttft_ms, tpot_ms = speed.times(
        to_read, load, tier.spec.max_num_seqs, request.output_share, request.sequences, output_tokens=each
    )
    ttft_trend, tpot_trend = replica.trends.means(now, speed)
    return ttft_ms * exp(ttft_trend) + each * tpot_ms * exp(tpot_trend)
