"""The arithmetic of counted answers and of diagnoses, against values worked out by hand, and vLLM's answers to both."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classifier import PromptClass
from classifier.kinds import Complexity
from router.policy.profiles import TOP_K, Diagnosis, profile_name
from router.profiling.scoring import (
    JudgedAnswer,
    RankedToken,
    Scores,
    compare,
    count_answers,
    kl_divergence,
    score,
    scoring_fields,
)
from tests.unit.policy.made_profiles import counted, quality
from tests.unit.router_stack import Stack, router_stack
from tests.waiting import until
from tiers.spec import TierName

FAST = TierName.FAST
PRECISE = TierName.PRECISE


def logs(*shares: float) -> dict[int, float]:
    return {token: math.log(share) for token, share in enumerate(shares)}


def test_kl_by_hand() -> None:
    """Two full distributions give the textbook figure; what is cut off is compared as one rest."""
    assert kl_divergence(logs(0.5, 0.5), logs(0.5, 0.5)) == pytest.approx(0, abs=1e-6)
    by_hand = 0.75 * math.log(0.75 / 0.25) + 0.25 * math.log(0.25 / 0.75)
    assert kl_divergence(logs(0.75, 0.25), logs(0.25, 0.75)) == pytest.approx(
        by_hand, abs=1e-6
    )
    truncated = 0.6 * math.log(0.6 / 0.3) + 0.4 * math.log(0.4 / 0.7)
    assert kl_divergence(
        {7: math.log(0.6)}, {7: math.log(0.3), 8: math.log(0.2)}
    ) == pytest.approx(truncated)
    assert kl_divergence({1: math.log(0.9)}, {2: math.log(0.9)}) == pytest.approx(
        0, abs=1e-6
    )  # nothing shared: unknown


@given(
    st.lists(st.floats(0.01, 1), min_size=6, max_size=6),
    st.lists(st.floats(0.01, 1), min_size=6, max_size=6),
    st.integers(1, 6),
)
def test_truncation_never_raises_kl(p: list[float], q: list[float], kept: int) -> None:
    """With fewer tokens known the figure is a lower bound of the true one, and never negative."""
    full_p = logs(*(x / sum(p) for x in p))
    full_q = logs(*(x / sum(q) for x in q))
    top = [
        dict(sorted(d.items(), key=lambda item: -item[1])[:kept])
        for d in (full_p, full_q)
    ]
    exact = sum(math.exp(full_p[t]) * (full_p[t] - full_q[t]) for t in full_p)
    assert 0 <= kl_divergence(*top) <= exact + 1e-6


def test_scores_by_hand() -> None:
    """Disagreement by rank, and regret against the reference's own first choice."""
    reference = [
        {10: RankedToken(math.log(0.9), 1)},
        {11: RankedToken(math.log(0.2), 2), 99: RankedToken(math.log(0.7), 1)},
        {12: RankedToken(math.log(0.5), 1)},
    ]
    scores = compare(
        [10, 11, 12], [{10: math.log(0.9)}, {11: 0.0}, {12: math.log(0.5)}], reference
    )
    assert scores.tokens == 3
    assert scores.disagreed == 1
    assert scores.regret == pytest.approx(math.log(0.7 / 0.2))
    assert scores.kl > 0


def named_tokens(top: dict[int, float]) -> list[dict[str, Any]]:
    return [
        {"token": f"token_id:{token_id}", "logprob": logprob}
        for token_id, logprob in top.items()
    ]


def answered(*tops: dict[int, float], ids: list[int]) -> dict[str, Any]:
    content = [{"top_logprobs": named_tokens(top)} for top in tops]
    return {
        "prompt_token_ids": [1, 2],
        "choices": [{"token_ids": ids, "logprobs": {"content": content or None}}],
    }


@pytest.mark.anyio
async def test_the_reference_scores_the_answer_after_its_prompt() -> None:
    """Prompt and answer go in as token ids, without an end of sequence, which has no position; an empty one is not sent."""
    bodies: list[dict[str, Any]] = []

    async def ask(body: dict[str, Any]) -> dict[str, Any]:
        bodies.append(body)
        prompt = [None, {"2": {"logprob": -9.0, "rank": 4}}]
        own = (
            {"7": {"logprob": -0.2, "rank": 1}},
            {"9": {"logprob": -3.0, "rank": 2}, "5": {"logprob": -0.1, "rank": 1}},
        )
        return {"choices": [{"prompt_logprobs": [*prompt, *own]}]}

    scores = await score(answered({7: -0.1, 8: -2.5}, {9: -0.3}, ids=[7, 9, 0]), ask)
    assert scores.tokens == 2
    assert scores.disagreed == 1
    assert round(scores.regret, 6) == 2.9
    assert bodies == [
        {
            "prompt": [1, 2, 7, 9],
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": TOP_K,
        }
    ]
    assert (await score(answered(ids=[2]), ask)).tokens == 0
    assert len(bodies) == 1


def test_scored_answers_name_their_tokens() -> None:
    fields = scoring_fields()
    assert fields["top_logprobs"] == TOP_K
    assert fields["logprobs"] is True
    assert fields["return_token_ids"] is True
    assert fields["return_tokens_as_token_ids"] is True


def judged(
    task: str,
    tier: TierName,
    *,
    right: bool = False,
    scores: Scores | None = None,
    cut_at: int | None = None,
) -> JudgedAnswer:
    return JudgedAnswer(
        task=task,
        prompt_class=PromptClass.MATH,
        complexity=Complexity.TRIVIAL,
        tier=tier,
        right=right,
        scores=scores,
        cut_at=cut_at,
    )


def test_answers_are_paired_by_task() -> None:
    """What only one of both has answered is no pair; diagnoses are weighted by tokens."""
    answers = [judged(name, PRECISE, right=name in "abcx") for name in "abcdex"]
    scores = (
        Scores(tokens=10, disagreed=5, kl=1.0, regret=2.0),
        Scores(tokens=30, disagreed=0, kl=0.0, regret=0.0),
    )
    answers += [
        judged("a", FAST, right=True, scores=scores[0]),
        judged("b", FAST, right=False, scores=scores[1]),
    ]
    answers += [
        judged("c", FAST, right=False),
        judged("d", FAST, right=True),
        judged("e", FAST, right=False),
    ]
    answers.append(judged("y", FAST, right=True))
    (count,) = count_answers(answers, [FAST])
    assert count.tier is FAST
    assert count.prompt_class is PromptClass.MATH
    assert count.complexity is Complexity.TRIVIAL
    assert count.asked == 6
    assert count.right == 4
    assert count.answered == 5
    assert count.worse == 2
    assert count.better == 1
    assert count.both == 1
    assert count.flips == (4, 2, 1)
    assert count.diagnosis == Diagnosis(
        tokens=40, disagreement=0.125, kl=0.025, regret=0.05
    )


def test_cut_answers_are_neither_right_nor_wrong() -> None:
    """One that either side did not finish is cut; one that only the reference has cut has no pair that counts."""
    answers = [judged(name, PRECISE, right=True) for name in "abc"]
    answers += [judged(name, PRECISE, cut_at=100) for name in "xyz"]
    answers += [
        judged("a", FAST, right=True),
        judged("b", FAST, cut_at=100),
        judged("x", FAST, right=True),
        judged("y", FAST, cut_at=100),
    ]
    (count,) = count_answers(answers, [FAST])
    assert count.cut == 4
    assert count.asked == 3
    assert count.right == 3
    assert count.answered == 1
    assert count.flips == (1, 0, 0)
    assert not count.is_unmeasured


def test_a_kind_of_which_all_is_cut_is_not_measured() -> None:
    answers = [
        judged(name, tier, cut_at=9) for name in "ab" for tier in (PRECISE, FAST)
    ]
    (count,) = count_answers(answers, [FAST])
    assert count.is_unmeasured
    assert count.cut == 2
    assert count.flips == (0, 0, 0)


async def _route(stack: Stack, prompt: str, **wishes: Any) -> dict[str, Any]:
    answer: dict[str, Any] = (
        await stack.client.post(f"{stack.url}/route", json={"prompt": prompt, **wishes})
    ).json()
    return answer


@pytest.mark.anyio
async def test_the_router_decides_by_what_was_measured(tmp_path: Path) -> None:
    """A bound on loss is held against the upper end, and every verdict tells the expected loss and what it rests on."""
    async with router_stack(tmp_path, {"policy": {"profiles": str(tmp_path)}}) as stack:
        prompt = "Write a Python function that reverses a list"
        before = await _route(stack, prompt)
        assert [tier["loss_answers"] for tier in before["tiers"]] == [0, 0, 0]
        checkpoints = {spec.name: spec.identity for spec in stack.fleet.specs}
        counts = [
            counted(
                tier, worse, 0, kind=PromptClass.CODE, complexity=complexity, of=400
            )
            for tier, worse in ((FAST, 80), (TierName.BALANCED, 8))
            for complexity in Complexity
        ]
        path = tmp_path / profile_name(checkpoints)
        # taken up while the router runs
        path.write_text(quality(*counts, identities=checkpoints).model_dump_json())

        async def answers() -> int:
            number: int = (await _route(stack, prompt))["tiers"][0]["loss_answers"]
            return number

        await until(answers, "the router to read the profile")
        tiers = {}
        for bound in (0.5, 0.1, 0.001):
            decision = await _route(stack, prompt, sla={"max_quality_loss": bound})
            tiers[bound] = [
                tier["tier"]
                for tier in decision["tiers"]
                if "allowed" not in tier["verdict"]
            ]
            losses = {tier["tier"]: tier["expected_loss"] for tier in decision["tiers"]}
            assert losses["fast"] == pytest.approx(0.2, abs=0.03)
            assert losses["precise"] == 0
        assert tiers == {
            0.5: ["fast", "balanced", "precise"],
            0.1: ["balanced", "precise"],
            0.001: ["precise"],
        }
        decision = await _route(stack, prompt)
        assert [tier["loss_source"] for tier in decision["tiers"]] == [
            "measured",
            "measured",
            "published",
        ]
        assert (
            "fast may get up to 23 of 100 answers wrong that precise gets right (measured on 400 answers)"
            in decision["reason"]
        )
