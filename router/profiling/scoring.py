"""Scores of answers' tokens by the reference, and counts of the answers that get worse.

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
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from classifier import PromptClass
from classifier.kinds import Complexity
from router.policy.profiles import REFERENCE, TOP_K, AnswerCount, Diagnosis, Frozen
from tiers.spec import TierName, in_order

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from router.policy.losses import Kind

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# The probability of the other tokens is at least this: rounding may make it 0 or less.
SMALLEST_REST = 1e-9


class Scores(Frozen):
    """Sums over one answer's tokens, for a ``Diagnosis``."""

    tokens: int
    disagreed: int
    kl: float
    regret: float


class JudgedAnswer(Frozen):
    """One tier's answer to one task."""

    task: str  # digest of the task
    prompt_class: PromptClass
    complexity: Complexity
    tier: TierName
    right: bool
    scores: Scores | None = None  # None: not scored
    # The limit of tokens within which the thought had no end; None: the answer was not cut while thinking.
    cut_at: int | None = None

    @property
    def is_cut(self) -> bool:
        """Tell whether it was cut while thinking: then it is neither right nor wrong."""
        return self.cut_at is not None

    @property
    def kind(self) -> Kind:
        return self.prompt_class, self.complexity


class RankedToken(NamedTuple):
    """A token at one position, as the reference sees it."""

    logprob: float
    rank: int  # 1: the first choice


def scoring_fields() -> dict[str, Any]:
    """Return the fields of a chat's body whose answer ``score`` can read."""
    return {
        "logprobs": True,
        "top_logprobs": TOP_K,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


async def score(
    answer: Mapping[str, Any], ask: Callable[[dict[str, Any]], Awaitable[Any]]
) -> Scores:
    """Score an answer to a chat with ``scoring_fields``, whose tokens are named ``token_id:123``.

    ``ask`` has the reference answer the body of a completion.
    """
    choice = answer["choices"][0]
    prompt_ids = answer["prompt_token_ids"]
    own = _own_logprobs(choice)
    # The end of sequence has an id, but no position of its own.
    answer_ids = choice["token_ids"][: len(own)]
    if not answer_ids:
        return Scores(tokens=0, disagreed=0, kl=0.0, regret=0.0)
    body = {
        "prompt": [*prompt_ids, *answer_ids],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": TOP_K,
    }
    reference = await ask(body)
    positions = reference["choices"][0]["prompt_logprobs"][len(prompt_ids) :]
    return compare(answer_ids, own, [_ranked_tokens(tokens) for tokens in positions])


def _own_logprobs(choice: Mapping[str, Any]) -> list[dict[int, float]]:
    """Return, at each position of an answer, the log-probabilities of the tier's likeliest tokens by id."""
    logprobs = choice.get("logprobs") or {}
    positions = logprobs.get("content") or ()
    return [_likeliest_tokens(position) for position in positions]


def _likeliest_tokens(position: Mapping[str, Any]) -> dict[int, float]:
    logprobs: dict[int, float] = {}
    for token in position["top_logprobs"]:
        token_id = int(token["token"].rpartition(":")[2])
        logprobs[token_id] = token["logprob"]
    return logprobs


def _ranked_tokens(tokens: Mapping[str, Any]) -> dict[int, RankedToken]:
    return {
        int(token_id): RankedToken(token["logprob"], token["rank"])
        for token_id, token in tokens.items()
    }


def compare(
    answer: Sequence[int],
    own: Sequence[Mapping[int, float]],
    reference: Sequence[Mapping[int, RankedToken]],
) -> Scores:
    """Compare an answer's tokens with the reference's choices.

    Args:
        answer: Token ids of the answer, length n.
        own: At each of the n positions, log-probabilities of the tier's likeliest tokens by id.
        reference: At each of them, the reference's likeliest tokens by id; the answer's token is among them.
    """
    disagreed = 0
    kl = 0.0
    regret = 0.0
    for token_id, own_logprobs, ranked in zip(answer, own, reference, strict=True):
        reference_logprobs = {
            ranked_id: logprob for ranked_id, (logprob, _) in ranked.items()
        }
        logprob, rank = ranked[token_id]
        if rank > 1:
            disagreed += 1
        kl += kl_divergence(reference_logprobs, own_logprobs)
        regret += max(reference_logprobs.values()) - logprob
    return Scores(tokens=len(answer), disagreed=disagreed, kl=kl, regret=regret)


def kl_divergence(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """Return KL(P‖Q) in nats of two truncated distributions, coarsened to the tokens of both and one rest.

    Both are log-probabilities by token id, which sum to at most 1.
    """
    shared_ids = p.keys() & q.keys()
    rest_of_p = _rest(p, shared_ids)
    rest_of_q = _rest(q, shared_ids)
    shared_kl = sum(
        math.exp(p[token_id]) * (p[token_id] - q[token_id]) for token_id in shared_ids
    )
    return max(shared_kl + rest_of_p * math.log(rest_of_p / rest_of_q), 0.0)


def _rest(logprobs: Mapping[int, float], shared_ids: Iterable[int]) -> float:
    """Return the probability of all tokens that are not shared."""
    shared = sum(math.exp(logprobs[token_id]) for token_id in shared_ids)
    return max(1.0 - shared, SMALLEST_REST)


def count_answers(
    answers: Iterable[JudgedAnswer], tiers: Iterable[TierName]
) -> tuple[AnswerCount, ...]:
    """Return the counts of every kind that the reference has answered, on each of these tiers but itself."""
    by_tier: dict[TierName, dict[str, JudgedAnswer]] = {tier: {} for tier in tiers}
    by_tier[REFERENCE] = {}
    for answer in answers:
        by_tier[answer.tier][answer.task] = answer
    reference = by_tier.pop(REFERENCE).values()
    asked_kinds = {answer.kind for answer in reference}
    kinds = [kind for kind in product(PromptClass, Complexity) if kind in asked_kinds]
    counts: list[AnswerCount] = []
    for tier in in_order(by_tier):
        for kind in kinds:
            of_kind = [answer for answer in reference if answer.kind == kind]
            counts.append(_count_kind(tier, kind, by_tier[tier], reference=of_kind))
    return tuple(counts)


def _count_kind(
    tier: TierName,
    kind: Kind,
    answers: Mapping[str, JudgedAnswer],
    reference: Sequence[JudgedAnswer],
) -> AnswerCount:
    """Count a tier's answers of one kind.

    Args:
        tier: The tier.
        kind: The kind.
        answers: The tier's answers by task.
        reference: The reference's answers of this kind.
    """
    pairs = _AnswerPairs.of(answers, reference)
    own_answers = [pair.own for pair in pairs.measured]
    measured_reference = [answer for answer in reference if not answer.is_cut]
    prompt_class, complexity = kind
    return AnswerCount(
        prompt_class=prompt_class,
        complexity=complexity,
        tier=tier,
        asked=len(measured_reference),
        right=sum(answer.right for answer in measured_reference),
        answered=len(pairs.measured),
        worse=sum(
            pair.reference.right and not pair.own.right for pair in pairs.measured
        ),
        better=sum(
            pair.own.right and not pair.reference.right for pair in pairs.measured
        ),
        both=sum(pair.own.right and pair.reference.right for pair in pairs.measured),
        diagnosis=_diagnose(own_answers),
        cut=pairs.cut,
    )


class _AnswerPair(NamedTuple):
    """A tier's and the reference's answer to one task."""

    own: JudgedAnswer
    reference: JudgedAnswer


class _AnswerPairs(NamedTuple):
    """A tier's and the reference's answers to the same tasks.

    Attributes:
        measured: Those of which neither was cut while thinking.
        cut: The number of tasks with a cut answer; the reference's alone is enough.
    """

    measured: list[_AnswerPair]
    cut: int

    @classmethod
    def of(
        cls, answers: Mapping[str, JudgedAnswer], reference: Sequence[JudgedAnswer]
    ) -> Self:
        measured: list[_AnswerPair] = []
        cut = 0
        for reference_answer in reference:
            own_answer = answers.get(reference_answer.task)
            if reference_answer.is_cut or (
                own_answer is not None and own_answer.is_cut
            ):
                cut += 1
            elif own_answer is not None:
                measured.append(_AnswerPair(own_answer, reference_answer))
        return cls(measured, cut)


def _diagnose(answers: Sequence[JudgedAnswer]) -> Diagnosis | None:
    """Return the means over all scored tokens of the answers; None: there are none."""
    scores = [answer.scores for answer in answers if answer.scores is not None]
    tokens = sum(answer_scores.tokens for answer_scores in scores)
    if not tokens:
        return None
    disagreed = sum(answer_scores.disagreed for answer_scores in scores)
    kl = sum(answer_scores.kl for answer_scores in scores)
    regret = sum(answer_scores.regret for answer_scores in scores)
    return Diagnosis(
        tokens=tokens,
        disagreement=round(disagreed / tokens, 5),
        kl=round(kl / tokens, 5),
        regret=round(regret / tokens, 5),
    )
