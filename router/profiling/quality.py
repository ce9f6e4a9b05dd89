"""Computes each tier's quality loss: the tier's answers, judged by the highest precision.

Method. Each tier answers each prompt greedily. The reference tier (``precise``) then scores the answer's tokens in one
prefill, by vLLM's ``prompt_logprobs``. The reference's own answers are scored in the same way; its figures are the noise
floor: tokens generated one at a time beside other requests differ from those scored in one prefill by rounding alone.

- Top-1 disagreement: the share of a tier's tokens that are not the reference's first choice at that position.
- KL: divergence of the reference's next-token distribution P from the tier's Q at a position, in nats. Only the ``TOP_K``
  likeliest tokens of each are known, so both are coarsened to the tokens that both lists have and one rest. Coarsening
  never raises a KL divergence (data processing inequality), so the figure is a lower bound.
- Perplexity ratio: of the tier's answers to that of the reference's own, both under the reference.
- First divergence: the tokens before a tier's answer leaves the reference's own answer to the same prompt.

Intervals are percentile bootstrap intervals (Efron and Tibshirani, An Introduction to the Bootstrap, 1993) over prompts,
since tokens of one answer are not independent. For what to expect of full-size models see arXiv 2411.02355.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from itertools import takewhile
from statistics import fmean, median
from typing import TYPE_CHECKING

from pydantic import ConfigDict

from classifier import PromptClass
from router.policy.profiles import REFERENCE, Frozen, Interval, Loss, percentile
from tiers.spec import TierName, in_order

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

RESAMPLES = 1000
CONFIDENCE = 0.95
SEED = 20


class Score(Frozen):
    """One tier's answer to one prompt, judged. Fields that only earlier releases wrote to journals are ignored.

    Attributes:
        prompt: Digest of the prompt.
        tokens: Of the answer.
        disagreed: Tokens that are not the reference's first choice.
        nll: Summed negative log-likelihood of the answer under the reference, in nats.
        kl: At each token, in nats.
        diverged_at: Tokens before the answer leaves the reference's own; None where it never does.
    """

    model_config = ConfigDict(extra="ignore")

    prompt: str
    prompt_class: PromptClass
    tier: TierName
    tokens: int
    disagreed: int
    nll: float
    kl: tuple[float, ...]
    diverged_at: int | None


def judge(
    prompt: str,
    prompt_class: PromptClass,
    tier: TierName,
    *,
    answer: Sequence[int],
    own: Sequence[Mapping[int, float]],
    reference: Sequence[Mapping[int, tuple[float, int]]],
    reference_answer: Sequence[int],
) -> Score:
    """Judge one answer.

    Args:
        prompt: Digest of the prompt.
        prompt_class: Its class.
        tier: That answered.
        answer: Token ids of the answer, length n.
        own: At each of the n positions, log-probabilities of the tier's likeliest tokens by id.
        reference: The same of the reference, with each token's rank (1: first choice); the answer's token is among them.
        reference_answer: Token ids of the reference's own answer.
    """
    judged = [tokens[token] for token, tokens in zip(answer, reference, strict=True)]
    pairs = zip(answer, reference_answer, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    whole = same == len(answer) == len(reference_answer)
    return Score(
        prompt=prompt,
        prompt_class=prompt_class,
        tier=tier,
        tokens=len(answer),
        disagreed=sum(rank > 1 for _, rank in judged),
        nll=-sum(logprob for logprob, _ in judged),
        kl=tuple(
            kl_divergence({t: lp for t, (lp, _) in theirs.items()}, mine)
            for theirs, mine in zip(reference, own, strict=True)
        ),
        diverged_at=None if whole else same,
    )


def kl_divergence(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """Return KL(P‖Q) in nats of two truncated distributions, coarsened to the tokens of both and one rest.

    Args:
        p: Log-probabilities by token id; they sum to at most 1.
        q: The same.
    """
    shared = p.keys() & q.keys()
    tiny = 1e-9  # what rounding leaves of a rest
    rest_p = max(1.0 - sum(math.exp(p[t]) for t in shared), tiny)
    rest_q = max(1.0 - sum(math.exp(q[t]) for t in shared), tiny)
    inner = sum(math.exp(p[t]) * (p[t] - q[t]) for t in shared)
    return max(inner + rest_p * math.log(rest_p / rest_q), 0.0)


def summarise(scores: Sequence[Score]) -> tuple[Loss, ...]:
    """Return the losses of every class and tier, with intervals.

    Args:
        scores: Of all prompts and tiers; prompts that the reference has not answered do not count.
    """
    by_class: dict[PromptClass, dict[TierName, dict[str, Score]]] = defaultdict(lambda: defaultdict(dict))
    for score in scores:
        by_class[score.prompt_class][score.tier][score.prompt] = score
    return tuple(
        _loss(prompt_class, tier, by_class[prompt_class])
        for prompt_class in PromptClass
        if prompt_class in by_class
        for tier in in_order(by_class[prompt_class])
    )


def _loss(prompt_class: PromptClass, tier: TierName, tiers: Mapping[TierName, Mapping[str, Score]]) -> Loss:
    own, reference = tiers[tier], tiers[REFERENCE]
    pairs = [(own[prompt], reference[prompt]) for prompt in sorted(own) if prompt in reference]
    scores = [mine for mine, _ in pairs]
    depths = [s.tokens if s.diverged_at is None else s.diverged_at for s in scores]
    return Loss(
        prompt_class=prompt_class,
        tier=tier,
        prompts=len(pairs),
        tokens=sum(s.tokens for s in scores),
        top1_disagreement=_interval(pairs, lambda x: sum(m.disagreed for m, _ in x) / _tokens(x)),
        kl_mean=_interval(pairs, lambda x: sum(sum(m.kl) for m, _ in x) / _tokens(x)),
        kl_p95=_interval(pairs, lambda x: percentile([k for m, _ in x for k in m.kl], 0.95)),
        perplexity_ratio=_interval(pairs, _perplexity_ratio),
        first_divergence=median(depths) if depths else 0.0,
        never_diverged=fmean(s.diverged_at is None for s in scores) if scores else 0.0,
    )


Pairs = list[tuple[Score, Score]]


def _tokens(pairs: Pairs) -> int:
    return max(sum(mine.tokens for mine, _ in pairs), 1)


def _perplexity_ratio(pairs: Pairs) -> float:
    theirs = sum(r.nll for _, r in pairs) / max(sum(r.tokens for _, r in pairs), 1)
    return math.exp(sum(mine.nll for mine, _ in pairs) / _tokens(pairs) - theirs)


def _interval(pairs: Pairs, statistic: Callable[[Pairs], float]) -> Interval:
    source = random.Random(SEED)  # noqa: S311  no secret
    resampled = sorted(statistic(source.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    tail = (1 - CONFIDENCE) / 2
    return Interval(
        mean=round(statistic(pairs), 5),
        low=round(percentile(resampled, tail), 5),
        high=round(percentile(resampled, 1 - tail), 5),
    )
