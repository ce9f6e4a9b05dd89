"""Have a tier answer greedily, and its tokens scored by the reference: the requests, and how their answers are read."""

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
        prompt_ids: Of the prompt with its template.
        ids: Of the answer, length n.
        own: At each of the n places, log-probabilities of the tier's likeliest tokens by id.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    own: tuple[dict[int, float], ...]


def greedy_body(messages: Sequence[Any], tokens: int) -> dict[str, Any]:
    """Return a chat completion that tells what ``read_greedy`` reads; ``model`` and priority are left to add."""
    return {
        "messages": list(messages),
        "max_tokens": tokens,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": TOP_K,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def read_greedy(answer: Mapping[str, Any]) -> GreedyAnswer:
    """Read the answer to ``greedy_body``."""
    choice = answer["choices"][0]
    places = (choice.get("logprobs") or {}).get("content") or ()
    own = tuple({_token_id(top["token"]): top["logprob"] for top in place["top_logprobs"]} for place in places)
    return GreedyAnswer(tuple(answer["prompt_token_ids"]), tuple(choice["token_ids"])[: len(own)], own)


def scoring_body(answer: GreedyAnswer) -> dict[str, Any]:
    """Return a completion that has the reference judge an answer in one prefill."""
    return {
        "prompt": [*answer.prompt_ids, *answer.ids],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": TOP_K,
    }


def read_scored(scored: Mapping[str, Any], answer: GreedyAnswer) -> list[dict[int, tuple[float, int]]]:
    """Return, at each of the answer's places, the reference's log-probability and rank of each token that it names."""
    places = scored["choices"][0]["prompt_logprobs"][len(answer.prompt_ids) :]
    return [{int(t): (found["logprob"], found["rank"]) for t, found in place.items()} for place in places]


def _token_id(text: str) -> int:
    """Return the id in ``token_id:123``."""
    return int(text.rpartition(":")[2])
