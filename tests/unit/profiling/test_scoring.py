"""Requests for greedy answers and their scores, and what is read of vLLM's answers to them."""

from __future__ import annotations

from typing import Any

import pytest

from router.policy.profiles import TOP_K
from router.profiling.scoring import GreedyAnswer, answer_body, read_greedy, read_scored, scoring_body


def answered(*tops: dict[int, float], ids: list[int]) -> dict[str, Any]:
    content = [{"top_logprobs": [{"token": f"token_id:{t}", "logprob": p} for t, p in top.items()]} for top in tops]
    choice = {"token_ids": ids, "logprobs": {"content": content}}
    return {"prompt_token_ids": [1, 2], "choices": [choice]}


def test_a_greedy_answer_is_read_by_token_ids() -> None:
    read = read_greedy(answered({7: -0.1, 8: -2.5}, {9: -0.3}, ids=[7, 9]))
    assert read == GreedyAnswer((1, 2), (7, 9), ({7: -0.1, 8: -2.5}, {9: -0.3}))


def test_tokens_without_log_probabilities_are_left_out() -> None:
    """The end of sequence has an id, and no position of its own."""
    assert read_greedy(answered({7: -0.1}, ids=[7, 2])).ids == (7,)


@pytest.mark.parametrize("logprobs", [None, {}, {"content": None}, {"content": []}])
def test_an_empty_answer_is_read_as_such(logprobs: Any) -> None:
    choice = {"token_ids": [2], "logprobs": logprobs}
    assert read_greedy({"prompt_token_ids": [1], "choices": [choice]}) == GreedyAnswer((1,), (), ())


def test_the_reference_scores_the_answer_after_its_prompt() -> None:
    """Prompt and answer go in as token ids; the scores of the prompt, the first of which vLLM leaves out, are skipped."""
    answer = GreedyAnswer((1, 2), (7, 9), ({}, {}))
    body = scoring_body(answer)
    assert (body["prompt"], body["max_tokens"], body["prompt_logprobs"]) == ([1, 2, 7, 9], 1, TOP_K)
    tokens = [
        None,
        {"2": {"logprob": -9.0, "rank": 4}},
        {"7": {"logprob": -0.2, "rank": 1}},
        {"9": {"logprob": -3.0, "rank": 2}, "5": {"logprob": -0.1, "rank": 1}},
    ]
    scored = read_scored({"choices": [{"prompt_logprobs": tokens}]}, answer)
    assert scored == [{7: (-0.2, 1)}, {9: (-3.0, 2), 5: (-0.1, 1)}]


def test_answers_are_greedy_and_bounded() -> None:
    body = answer_body([{"role": "user", "content": "hi"}], 24, scored=True)
    assert (body["temperature"], body["max_tokens"], body["top_logprobs"]) == (0, 24, TOP_K)
    assert body["return_token_ids"] is body["return_tokens_as_token_ids"] is body["logprobs"] is True
    plain = answer_body([{"role": "user", "content": "hi"}], 24, scored=False)
    assert plain.keys() == {"messages", "temperature", "max_tokens"}
