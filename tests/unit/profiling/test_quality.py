"""The arithmetic of measured loss, against values worked out by hand, and its intervals."""

from __future__ import annotations

import asyncio
import math
import random
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classifier import PromptClass
from router.policy.profiles import TOP_K, Loss, ProfileError, QualityProfile, load_profile, profile_name
from router.policy.table import policy_table
from router.profiling.quality import Score, judge, kl_divergence, summarise
from router.profiling.quality_report import render
from router.settings import PolicySettings
from tests.unit.router_stack import router_stack
from tiers.spec import TierName

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.router_stack import Stack

FAST, PRECISE = TierName.FAST, TierName.PRECISE


def logs(*shares: float) -> dict[int, float]:
    """Return log-probabilities of tokens 0, 1, 2, ..."""
    return {token: math.log(share) for token, share in enumerate(shares)}


def test_kl_by_hand() -> None:
    """Two full distributions give the textbook figure; what is cut off is compared as one rest."""
    assert kl_divergence(logs(0.5, 0.5), logs(0.5, 0.5)) == pytest.approx(0, abs=1e-6)
    by_hand = 0.75 * math.log(0.75 / 0.25) + 0.25 * math.log(0.25 / 0.75)
    assert kl_divergence(logs(0.75, 0.25), logs(0.25, 0.75)) == pytest.approx(by_hand, abs=1e-6)
    truncated = 0.6 * math.log(0.6 / 0.3) + 0.4 * math.log(0.4 / 0.7)
    assert kl_divergence({7: math.log(0.6)}, {7: math.log(0.3), 8: math.log(0.2)}) == pytest.approx(truncated)
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
    full_p, full_q = logs(*(x / sum(p) for x in p)), logs(*(x / sum(q) for x in q))
    top = [dict(sorted(d.items(), key=lambda item: -item[1])[:kept]) for d in (full_p, full_q)]
    exact = sum(math.exp(full_p[t]) * (full_p[t] - full_q[t]) for t in full_p)
    assert 0 <= kl_divergence(*top) <= exact + 1e-6


def test_judging_by_hand() -> None:
    """Disagreement by rank, likelihood of the tokens given, and where the answers part."""
    reference = [
        {10: (math.log(0.9), 1)},
        {11: (math.log(0.2), 2), 99: (math.log(0.7), 1)},
        {12: (math.log(0.5), 1)},
    ]
    score = judge(
        "p", PromptClass.CHAT, FAST, answer=[10, 11, 12], own=[{10: 0.0}, {11: 0.0}, {12: 0.0}],
        reference=reference, reference_answer=[10, 99, 98],
    )  # fmt: skip
    assert (score.tokens, score.disagreed, score.diverged_at) == (3, 1, 1)
    assert score.nll == pytest.approx(-math.log(0.9 * 0.2 * 0.5))
    same = judge(
        "p", PromptClass.CHAT, PRECISE, answer=[10], own=[{10: 0.0}], reference=reference[:1], reference_answer=[10]
    )
    assert same.diverged_at is None


def scores(tier: TierName, disagreement: float, prompts: int, source: random.Random) -> list[Score]:
    """Return made-up scores with a known rate."""
    return [
        Score(
            prompt=f"p{n}", prompt_class=PromptClass.CODE, tier=tier, tokens=40,
            disagreed=sum(source.random() < disagreement for _ in range(40)), nll=40 * (0.5 + disagreement),
            kl=tuple(disagreement * source.random() for _ in range(40)), diverged_at=None if disagreement == 0 else 3,
        )
        for n in range(prompts)
    ]  # fmt: skip


def test_intervals_hold_the_truth() -> None:
    """Of many made-up measurements with a known rate, nearly all 95 % intervals hold it."""
    held = 0
    for seed in range(40):
        source = random.Random(seed)
        losses = summarise([*scores(FAST, 0.2, 30, source), *scores(PRECISE, 0.0, 30, source)])
        found = next(x for x in losses if x.tier is FAST)
        held += found.top1_disagreement.low <= 0.2 <= found.top1_disagreement.high
    assert held >= 34


def test_the_ratio_of_perplexities_is_to_the_reference() -> None:
    """The reference's own ratio is 1; a tier's is the exponent of the difference of its mean likelihood."""
    source = random.Random(1)
    losses = summarise([*scores(FAST, 0.2, 10, source), *scores(PRECISE, 0.0, 10, source)])
    fast, precise = losses
    assert precise.perplexity_ratio.mean == 1
    assert fast.perplexity_ratio.mean == pytest.approx(math.exp(0.2), rel=1e-4)
    assert (fast.first_divergence, precise.never_diverged) == (3, 1)
    assert (fast.prompts, fast.tokens) == (10, 400)


def test_a_profile_of_other_checkpoints_is_refused(tmp_path: Path) -> None:
    """It names the tier and both digests, and says what to do."""
    profile = QualityProfile(
        created=datetime.now(UTC), model="m", checkpoints={FAST: "a" * 64, PRECISE: "b" * 64}, answer_tokens=32,
        top_k=TOP_K, prompts="c", losses=(),
    )  # fmt: skip
    path = tmp_path / "profile.json"
    path.write_text(profile.model_dump_json())
    assert load_profile(path) == profile
    profile.check({FAST: "a" * 64, PRECISE: "b" * 64}, path)
    with pytest.raises(ProfileError, match="another checkpoint of fast: aaaaaaaaaaaaaaaa, here is dddddddddddddddd"):
        profile.check({FAST: "d" * 64, PRECISE: "b" * 64}, path)
    path.write_text('{"version": 9}')
    with pytest.raises(ProfileError, match="version"):
        load_profile(path)
    with pytest.raises(ProfileError, match="cannot be read"):
        load_profile(tmp_path / "none.json")


def profile_of(losses: tuple[Loss, ...], checkpoints: dict[TierName, str | None]) -> QualityProfile:
    """Return a profile of these losses."""
    return QualityProfile(
        created=datetime.now(UTC), model="m", checkpoints=checkpoints, answer_tokens=32, top_k=TOP_K, prompts="c",
        losses=losses,
    )  # fmt: skip


def test_too_few_prompts_are_not_used() -> None:
    """A class with a handful of prompts is shown, said to be uncertain, and left out of decisions."""
    source = random.Random(1)
    few, many = (
        profile_of(summarise([*scores(FAST, 0.2, n, source), *scores(PRECISE, 0, n, source)]), {}) for n in (4, 5)
    )
    assert policy_table(PolicySettings(), few).losses == {}
    assert policy_table(PolicySettings(), many).losses[FAST][PromptClass.CODE].mean == pytest.approx(0.2, abs=0.1)
    assert "few prompts" in render(few)
    assert "few prompts" not in render(many)


async def _route(stack: Stack, prompt: str, **wishes: Any) -> dict[str, Any]:
    answer: dict[str, Any] = (await stack.client.post(f"{stack.url}/route", json={"prompt": prompt, **wishes})).json()
    return answer


@pytest.mark.anyio
async def test_the_router_decides_by_what_was_measured(tmp_path: Path) -> None:
    """A bound on loss is held against the profile's upper end, and every verdict tells the expected loss."""
    source = random.Random(1)
    every = [
        score for tier, rate in ((FAST, 0.2), (TierName.BALANCED, 0.02)) for score in scores(tier, rate, 40, source)
    ]
    async with router_stack(tmp_path, {"policy": {"profiles": str(tmp_path), "max_slowdown": 1e9}}) as stack:
        checkpoints = {spec.name: spec.identity for spec in stack.fleet.specs}
        profile = profile_of(summarise([*every, *scores(PRECISE, 0.0, 40, source)]), checkpoints)
        (tmp_path / profile_name(checkpoints)).write_text(profile.model_dump_json())  # taken up while the router runs
        prompt = "Write a Python function that reverses a list"
        while (await _route(stack, prompt))["tiers"][0]["expected_loss"] is None:
            await asyncio.sleep(0.1)
        tiers = {}
        for bound in (0.5, 0.1, 0.001):
            decision = await _route(stack, prompt, sla={"max_quality_loss": bound})
            tiers[bound] = decision["tier"]
            losses = {t["tier"]: t["expected_loss"] for t in decision["tiers"]}
            assert losses["fast"] == pytest.approx(0.2, abs=0.03)
            assert losses["precise"] == 0
        assert tiers == {0.5: "fast", 0.1: "balanced", 0.001: "precise"}  # what is asked for goes over what code bears
        refused = next(t["verdict"] for t in decision["tiers"] if t["tier"] == "fast")
        assert "its loss may be" in refused
