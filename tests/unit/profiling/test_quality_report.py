"""The report of a quality profile: every figure with its interval."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest

from classifier import PromptClass
from router.policy.profiles import TOP_K, Interval, Loss, QualityProfile
from router.profiling.quality_report import render
from tiers.spec import TierName


def interval(mean: float) -> Interval:
    return Interval(mean=mean, low=mean / 2, high=mean * 2)


def loss(share: float, prompts: int = 40) -> Loss:
    """Return a loss of the fast tier on code."""
    return Loss(
        prompt_class=PromptClass.CODE, tier=TierName.FAST, prompts=prompts, tokens=800, top1_disagreement=interval(share),
        kl_mean=interval(0.1), kl_p95=interval(0.4), perplexity_ratio=interval(1.2), first_divergence=3.0,
        never_diverged=0.25,
    )  # fmt: skip


def report(*losses: Loss) -> str:
    """Return a profile's report."""
    return render(
        QualityProfile(
            created=datetime(2026, 1, 2, 3, 4, tzinfo=UTC), model="m", checkpoints={TierName.FAST: "f" * 64},
            answer_tokens=32, top_k=TOP_K, prompts="c", losses=losses,
        )
    )  # fmt: skip


def test_each_figure_has_its_interval() -> None:
    text = report(loss(0.1))
    assert "<td>10.0 <small>5.0 to 20.0</small></td>" in text
    assert "<td>0.100 <small>0.050 to 0.200</small></td>" in text
    assert "<td>3 tokens</td><td>25%</td>" in text
    assert "2026-01-02 03:04 UTC on checkpoints fast ffffffffffff." in text


def test_few_prompts_have_no_interval() -> None:
    assert "<td>10.0 <small>few prompts</small></td>" in report(loss(0.1, prompts=4))


@pytest.mark.parametrize(("share", "top"), [(0.0, "100%"), (0.02, "5%"), (0.026, "10%"), (0.3, "100%")])
def test_the_scale_holds_the_largest_interval(share: float, top: str) -> None:
    """Its upper end is twice the share here; without any loss the scale is whole."""
    marks = re.findall(r'text-anchor="middle">(\d+%)<', report(loss(share)))
    assert (marks[0], marks[-1], len(marks)) == ("0%", top, 6)


def test_an_empty_profile_is_a_report_too() -> None:
    text = report()
    assert "<tbody></tbody>" in text


def test_a_class_is_named_once_whichever_tiers_there_are() -> None:
    """Above its first tier, also where that is not fast; a tier that the settings add is shown like the others."""
    added = loss(0.2).model_copy(update={"tier": TierName("int8")})
    balanced = loss(0.1).model_copy(update={"tier": TierName.BALANCED})
    plot = re.findall(r'<text x="0" y="\d+">(.*?)</text>', report(balanced, added))
    assert plot == ["code", ""]
    assert ">int8 " in report(added)
