"""Counts the answers that get worse, and scores how far their tokens are from the reference's.

Each tier answers tasks whose answers can be checked, greedily. An answer is worse if the reference's to the same task is
right and the tier's is wrong, and better in the reverse; ``router.policy.losses`` makes the expected loss of both.

Some answers are scored as well, by one prefill of the reference with vLLM's ``prompt_logprobs``. These diagnoses tell how
much changes, not whether it gets worse (arXiv 2606.19558):

- Disagreement: the share of a tier's tokens that are not the reference's first choice at that position.
- KL: divergence of the reference's next-token distribution P from the tier's Q, in nats. Only the ``TOP_K`` likeliest
  tokens of each are known, so both are coarsened to the tokens that both lists have and one rest. Coarsening never raises
  a KL divergence (data processing inequality), so the figure is a lower bound.
- Regret: the reference's log-probability of its own first choice less that of the tier's token.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING

from classifier import PromptClass
from classifier.kinds import Complexity
from router.policy.profiles import REFERENCE, AnswerCount, Diagnosis, Frozen
from tiers.spec import TierName, in_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from router.policy.losses import Kind


class Scores(Frozen):
    """Sums over one answer's tokens, for a ``Diagnosis``."""

    tokens: int
    disagreed: int
    kl: float
    regret: float


class Judged(Frozen):
    """One tier's answer to one task.

    Attributes:
        task: Digest of the task.
        scores: None: not scored.
    """

    task: str
    prompt_class: PromptClass
    complexity: Complexity
    tier: TierName
    right: bool
    scores: Scores | None = None


def score(
    answer: Sequence[int],
    own: Sequence[Mapping[int, float]],
    reference: Sequence[Mapping[int, tuple[float, int]]],
) -> Scores:
    """Score one answer.

    Args:
        answer: Token ids of the answer, length n.
        own: At each of the n positions, log-probabilities of the tier's likeliest tokens by id.
        reference: The same of the reference, with each token's rank (1: first choice); the answer's token is among them.
    """
    judged = [tokens[token] for token, tokens in zip(answer, reference, strict=True)]
    best = [max(logprob for logprob, _ in tokens.values()) for tokens in reference]
    divergence = sum(
        kl_divergence({t: lp for t, (lp, _) in theirs.items()}, mine)
        for theirs, mine in zip(reference, own, strict=True)
    )
    regret = sum(first - logprob for first, (logprob, _) in zip(best, judged, strict=True))
    return Scores(tokens=len(answer), disagreed=sum(rank > 1 for _, rank in judged), kl=divergence, regret=regret)


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


def count(answers: Iterable[Judged], tiers: Iterable[TierName]) -> tuple[AnswerCount, ...]:
    """Return the counts of every kind that the reference has answered, on each of these tiers but itself."""
    by_tier: dict[TierName, dict[str, Judged]] = {tier: {} for tier in (*tiers, REFERENCE)}
    for answer in answers:
        by_tier[answer.tier][answer.task] = answer
    reference = by_tier.pop(REFERENCE)
    asked = {(answer.prompt_class, answer.complexity) for answer in reference.values()}
    kinds = [kind for kind in product(PromptClass, Complexity) if kind in asked]
    return tuple(_count(tier, kind, by_tier[tier], reference) for tier in in_order(by_tier) for kind in kinds)


def _count(
    tier: TierName,
    kind: Kind,
    answers: Mapping[str, Judged],
    reference: Mapping[str, Judged],
) -> AnswerCount:
    asked = [a for a in reference.values() if (a.prompt_class, a.complexity) == kind]
    pairs = [(answers[theirs.task], theirs) for theirs in asked if theirs.task in answers]
    return AnswerCount(
        prompt_class=kind[0],
        complexity=kind[1],
        tier=tier,
        asked=len(asked),
        right=sum(a.right for a in asked),
        answered=len(pairs),
        worse=sum(theirs.right and not own.right for own, theirs in pairs),
        better=sum(own.right and not theirs.right for own, theirs in pairs),
        both=sum(own.right and theirs.right for own, theirs in pairs),
        diagnosis=_diagnosis([own.scores for own, _ in pairs if own.scores is not None]),
    )


def _diagnosis(scores: Sequence[Scores]) -> Diagnosis | None:
    tokens = sum(one.tokens for one in scores)
    if not tokens:
        return None
    return Diagnosis(
        tokens=tokens,
        disagreement=round(sum(one.disagreed for one in scores) / tokens, 5),
        kl=round(sum(one.kl for one in scores) / tokens, 5),
        regret=round(sum(one.regret for one in scores) / tokens, 5),
    )
