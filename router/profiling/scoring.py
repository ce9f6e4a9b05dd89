"""Requests for greedy answers, scores of their tokens by the reference, and counts of the answers that get worse.

Each tier answers tasks whose answers can be checked, greedily. An answer is worse if the reference's to the same task is
right and the tier's is wrong, and better in the reverse; ``router.policy.losses`` makes the expected loss of both.

Some answers are scored as well, by one prefill of the reference with vLLM's ``prompt_logprobs``. These diagnoses tell how
much changes, not whether it gets worse (arXiv 2606.19558):

- Disagreement: the share of a tier's tokens that are not the reference's first choice at that position.
- KL: divergence of the reference's next-token distribution P from the tier's Q, in nats. Of the ``TOP_K`` likeliest tokens
  both are coarsened to those that both lists have and one rest, so the figure is a lower bound (data processing inequality).
- Regret: the reference's log-probability of its own first choice less that of the tier's token.
"""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING, Any

from classifier import PromptClass
from classifier.kinds import Complexity
from router.policy.profiles import REFERENCE, TOP_K, AnswerCount, Diagnosis, Frozen
from tiers.spec import TierName, in_order

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from router.policy.losses import Kind

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Scores(Frozen):
    """Sums over one answer's tokens, for a ``Diagnosis``."""

    tokens: int
    disagreed: int
    kl: float
    regret: float


class Judged(Frozen):
    """One tier's answer to one task."""

    task: str  # digest of the task
    prompt_class: PromptClass
    complexity: Complexity
    tier: TierName
    right: bool
    scores: Scores | None = None  # None: not scored


def answer_body(
    messages: Sequence[Any], tokens: int, *, scored: bool
) -> dict[str, Any]:
    """Return the body of a greedy chat completion, without model and priority; ``scored``: for ``score``."""
    body = {"messages": list(messages), "max_tokens": tokens, "temperature": 0}
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    return body | {"logprobs": True, "top_logprobs": TOP_K, **ids} if scored else body


def text_of(answer: Mapping[str, Any]) -> str:
    return answer["choices"][0]["message"].get("content") or ""


async def score(
    answer: Mapping[str, Any], ask: Callable[[dict[str, Any]], Awaitable[Any]]
) -> Scores:
    """Score an answer to ``answer_body``, a chat completion in which tokens are named ``token_id:123``.

    ``ask`` has the reference answer the body of a completion.
    """
    choice, prompt = answer["choices"][0], answer["prompt_token_ids"]
    own = [
        {
            int(top["token"].rpartition(":")[2]): top["logprob"]
            for top in position["top_logprobs"]
        }
        for position in (choice.get("logprobs") or {}).get("content") or ()
    ]
    # the end of sequence has an id, but no position of its own
    ids = choice["token_ids"][: len(own)]
    if not ids:
        return Scores(tokens=0, disagreed=0, kl=0.0, regret=0.0)
    found = await ask(
        {
            "prompt": [*prompt, *ids],
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": TOP_K,
        }
    )
    reference = [
        {
            int(token): (each["logprob"], each["rank"])
            for token, each in position.items()
        }
        for position in found["choices"][0]["prompt_logprobs"][len(prompt) :]
    ]
    return compare(ids, own, reference)


def compare(
    answer: Sequence[int],
    own: Sequence[Mapping[int, float]],
    reference: Sequence[Mapping[int, tuple[float, int]]],
) -> Scores:
    """Compare an answer's tokens with the reference's choices.

    Args:
        answer: Token ids of the answer, length n.
        own: At each of the n positions, log-probabilities of the tier's likeliest tokens by id.
        reference: The same of the reference, with each token's rank (1: first choice); the answer's token is among them.
    """
    disagreed, kl, regret = 0, 0.0, 0.0
    for token, mine, theirs in zip(answer, own, reference, strict=True):
        logprob, rank = theirs[token]
        disagreed += rank > 1
        kl += kl_divergence({each: p for each, (p, _) in theirs.items()}, mine)
        regret += max(p for p, _ in theirs.values()) - logprob
    return Scores(tokens=len(answer), disagreed=disagreed, kl=kl, regret=regret)


def kl_divergence(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """Return KL(P‖Q) in nats of two truncated distributions, coarsened to the tokens of both and one rest.

    Both are log-probabilities by token id, which sum to at most 1.
    """
    shared = p.keys() & q.keys()
    tiny = 1e-9  # what rounding leaves of a rest
    rest_p = max(1.0 - sum(math.exp(p[t]) for t in shared), tiny)
    rest_q = max(1.0 - sum(math.exp(q[t]) for t in shared), tiny)
    inner = sum(math.exp(p[t]) * (p[t] - q[t]) for t in shared)
    return max(inner + rest_p * math.log(rest_p / rest_q), 0.0)


def count(
    answers: Iterable[Judged], tiers: Iterable[TierName]
) -> tuple[AnswerCount, ...]:
    """Return the counts of every kind that the reference has answered, on each of these tiers but itself."""
    by_tier: dict[TierName, dict[str, Judged]] = {
        tier: {} for tier in (*tiers, REFERENCE)
    }
    for answer in answers:
        by_tier[answer.tier][answer.task] = answer
    reference = by_tier.pop(REFERENCE).values()
    asked = {(answer.prompt_class, answer.complexity) for answer in reference}
    kinds = [kind for kind in product(PromptClass, Complexity) if kind in asked]
    return tuple(
        _count(tier, kind, by_tier[tier], reference)
        for tier in in_order(by_tier)
        for kind in kinds
    )


def _count(
    tier: TierName,
    kind: Kind,
    answers: Mapping[str, Judged],
    reference: Iterable[Judged],
) -> AnswerCount:
    asked = [a for a in reference if (a.prompt_class, a.complexity) == kind]
    pairs = [
        (answers[theirs.task], theirs) for theirs in asked if theirs.task in answers
    ]
    scores = [own.scores for own, _ in pairs if own.scores is not None]
    tokens = sum(one.tokens for one in scores)
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
        diagnosis=Diagnosis(
            tokens=tokens,
            disagreement=round(sum(one.disagreed for one in scores) / tokens, 5),
            kl=round(sum(one.kl for one in scores) / tokens, 5),
            regret=round(sum(one.regret for one in scores) / tokens, 5),
        )
        if tokens
        else None,
    )
