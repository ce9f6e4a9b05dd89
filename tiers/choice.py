"""Which replica of a tier takes a request: the least loaded, or one whose prefix cache saves more than its load costs.

Where replicas hold different shares of the prompt, the one with the least cost takes it. Where all speeds are known under
load, the cost is the predicted time of the whole answer, with only the uncached tokens to prefill: what a cache saves and
what load costs are both milliseconds. Else it is tokens: those that the replica has to compute already, and the uncached
ones of the prompt. So a cache outweighs at most as much more load as it saves, by either measure.
"""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiers.speed import Load, SpeedModel

HOME_SHARE = 0.5  # of what no replica is known to hold: supposed to be cached on the session's own replica


class Ask(NamedTuple):
    """What a request needs of a replica.

    Attributes:
        prompt_tokens: Of its prompts.
        output_tokens: Expected output of all its sequences.
        sequences: Answers computed at the same time.
        long: The prompts are too long for a replica whose KV cache is nearly full.
        most: No replica counts as having more slots.
        max_num_seqs: Sequences that a replica decodes at once.
        output_share: Recent output tokens over those that requests allowed, 0..1.
    """

    prompt_tokens: int
    output_tokens: float
    sequences: int
    long: bool
    most: int = 1 << 30
    max_num_seqs: int = 1
    output_share: float = 1.0


class Warmth(NamedTuple):
    """What a tier's replicas are likely to hold of a prompt.

    Attributes:
        cached: Tokens, for each replica.
        home: Position of the session's own replica, where ``cached`` is the same on all; -1: there is none.
    """

    cached: Sequence[int]
    home: int = -1


class Candidate(NamedTuple):
    """A replica that could take a request now.

    Attributes:
        position: Among the tier's replicas.
        tokens: That it has to compute: of prompts, and of answers at their longest.
        sequences: On it.
        cached: Prompt tokens that it is likely to hold.
        home: It is the session's own.
        trends: Means of log(seen / predicted) lately, of TTFT and of TPOT.
    """

    position: int
    tokens: int
    sequences: int
    cached: int
    home: bool
    speed: SpeedModel | None
    load: Load
    trends: tuple[float, float]


def uncached(prompt_tokens: int, cached: int | None) -> int:
    """Return the tokens that are left to compute of a prompt; None: nothing is known to be cached."""
    return max(prompt_tokens - cached, 0) if cached else prompt_tokens


def tell_apart(cached: Sequence[int]) -> bool:
    """Tell whether some replicas hold more of a prompt than others."""
    return any(tokens != cached[0] for tokens in cached)


def preferred(candidates: Sequence[Candidate], ask: Ask) -> int:
    """Return the position of the replica that takes a request at the least cost; of equals, the least loaded.

    Args:
        candidates: At least one.
        ask: The request.
    """
    if not tell_apart([one.cached for one in candidates]):
        candidates = [_at_home(one, ask) if one.home else one for one in candidates]
    costs = _answer_ms(candidates, ask) or [one.tokens + ask.prompt_tokens - one.cached for one in candidates]
    ranked = zip(costs, candidates, strict=True)
    return min((cost, one.tokens, one.sequences, one.position) for cost, one in ranked)[3]


def _at_home(one: Candidate, ask: Ask) -> Candidate:
    return one._replace(cached=one.cached + int(HOME_SHARE * (ask.prompt_tokens - one.cached)))


def _answer_ms(candidates: Sequence[Candidate], ask: Ask) -> list[float]:
    """Return the predicted times of the whole answer, corrected by recent errors; empty: a speed under load is not known."""
    each, found = ask.output_tokens / ask.sequences, []
    for one in candidates:
        if one.speed is None or not one.speed.under_load:
            return []
        to_read, most, share = uncached(ask.prompt_tokens, one.cached), ask.max_num_seqs, ask.output_share
        ttft_ms, tpot_ms = one.speed.times(to_read, one.load, most, share, ask.sequences, output_tokens=each)
        ttft_trend, tpot_trend = one.trends
        found.append(ttft_ms * exp(ttft_trend) + each * tpot_ms * exp(tpot_trend))
    return found
