"""Requests for a tier's greedy answer and for its score by the reference, and their parsers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from router.policy.profiles import TOP_K

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class GreedyAnswer:
    """A tier's answer.

    Attributes:
        prompt_ids: Token ids of the prompt with its template.
        ids: Token ids of the answer, length n.
        own: At each of the n positions, log-probabilities of the tier's likeliest tokens by id.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    own: tuple[dict[int, float], ...]


def answer_body(messages: Sequence[Any], tokens: int, *, scored: bool) -> dict[str, Any]:
    """Return the body of a greedy chat completion, without model and priority; ``scored``: for ``read_greedy``."""
    body = {"messages": list(messages), "max_tokens": tokens, "temperature": 0}
    if not scored:
        return body
    return body | {
        "logprobs": True,
        "top_logprobs": TOP_K,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def text_of(answer: Mapping[str, Any]) -> str:
    return answer["choices"][0]["message"].get("content") or ""


def read_greedy(answer: Mapping[str, Any]) -> GreedyAnswer:
    """Parse the answer to ``answer_body``; tokens are named ``token_id:123`` in it."""
    choice = answer["choices"][0]
    positions = (choice.get("logprobs") or {}).get("content") or ()
    own = tuple(
        {int(top["token"].rpartition(":")[2]): top["logprob"] for top in position["top_logprobs"]}
        for position in positions
    )
    return GreedyAnswer(tuple(answer["prompt_token_ids"]), tuple(choice["token_ids"])[: len(own)], own)


def scoring_body(answer: GreedyAnswer) -> dict[str, Any]:
    """Return the body of a completion by which the reference scores an answer in one prefill."""
    return {
        "prompt": [*answer.prompt_ids, *answer.ids],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": TOP_K,
    }


def read_scored(scored: Mapping[str, Any], answer: GreedyAnswer) -> list[dict[int, tuple[float, int]]]:
    """Return the reference's log-probabilities and ranks of tokens by id, at each of the answer's positions."""
    positions = scored["choices"][0]["prompt_logprobs"][len(answer.prompt_ids) :]
    return [{int(t): (found["logprob"], found["rank"]) for t, found in position.items()} for position in positions]
