"""The page of a verification: complete, self-contained, and safe whatever answers hold."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from typing import Any

import pytest

from classifier import PromptClass
from router.verification.findings import (
    AnswerComparison,
    AnswersFinding,
    SpeedComparison,
    SpeedFinding,
    Verification,
    WorseAnswer,
)
from router.verification.report import Axis, write_report
from tiers.verification.findings import (
    Difference,
    EngineIdentity,
    Gap,
    LikelihoodFinding,
    SameModelFinding,
    Verdict,
)

EVIL = "<script>alert('x')</script>"


def comparison(prompt_class: PromptClass | None, **fields: Any) -> AnswerComparison:
    values = {
        "both_right": 180,
        "worse": 16,
        "better": 3,
        "both_wrong": 20,
        "not_measured": 0,
        "low": 0.032,
        "high": 0.098,
        "verdict": Verdict.WORSE,
    }
    return AnswerComparison(prompt_class=prompt_class, **(values | fields))


def gap(part: str, nats: float, **fields: Any) -> Gap:
    values = {"writer": "reference", "tokens": 640, "changed": 0.08}
    return Gap(part=part, gap=nats, **(values | fields))


def verification(**fields: Any) -> Verification:
    likelihood = LikelihoodFinding(
        by_kind=(gap("code", 0.02), gap("prose", 0.05)),
        by_position=(gap("1 to 64", 0.03), gap("65 to 256", 0.04)),
        own=(gap("all", 0.001, writer="candidate"),),
        faults=(),
        not_measured=("the reference cannot score the candidate's texts",),
        took_s=31.0,
    )
    answers = AnswersFinding(
        tolerated=0.02,
        confidence=0.95,
        overall=comparison(None),
        by_class=(
            comparison(PromptClass.MATH, worse=9, low=0.04, high=0.3),
            comparison(
                PromptClass.LONG_CONTEXT,
                both_right=0,
                worse=0,
                better=0,
                low=-1.0,
                high=1.0,
                verdict=Verdict.CANNOT_TELL,
            ),
        ),
        worse_answers=(
            WorseAnswer(
                task="math-m-014",
                prompt_class=PromptClass.MATH,
                prompt=f"What is 12 times 13? {EVIL}",
                wanted="156",
                reference="156",
                candidate=f"146 {EVIL}",
            ),
        ),
        not_measured=("2 answers were cut while the model was thinking",),
        took_s=190.0,
    )
    values = {
        "created": datetime(2026, 3, 1, 12, 30, tzinfo=UTC),
        "reference": EngineIdentity(
            name="http://a:8000", model="m", max_model_len=8192, version="0.32.0"
        ),
        "candidate": EngineIdentity(
            name="http://b:8000", model="m", max_model_len=8192, kv_cache_dtype="fp8"
        ),
        "same_model": SameModelFinding(
            differences=(
                Difference(
                    subject="KV cache",
                    reference="auto",
                    candidate="fp8",
                    is_fault=False,
                    explanation="The candidate rounds keys and values.",
                ),
            ),
            not_checked=("neither engine has a tool parser",),
            took_s=2.5,
        ),
        "likelihood": likelihood,
        "answers": answers,
        "speed": SpeedFinding(
            loads=(
                SpeedComparison(
                    streams=1,
                    reference_ttft_ms=120,
                    candidate_ttft_ms=60,
                    reference_tpot_ms=20,
                    candidate_tpot_ms=12,
                ),
            ),
            took_s=9,
        ),
        "took_s": 233.0,
    }
    return Verification(**(values | fields))


class Page(HTMLParser):
    """Notes the text and what would be loaded."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: list[str] = []
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.loaded += [value for name, value in attrs if name in {"src", "href"}]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_says_all_that_was_found() -> None:
    text = re.sub(r"\s+", " ", Page(write_report(verification())).text)
    for words in (
        "6.5 lost (3.2 to 9.8)",
        "http://a:8000",
        "fp8",
        "The candidate rounds keys and values.",
        "Not checked: neither engine has a tool parser",
        "The candidate reads the reference's texts, by position",
        "65 to 256",
        "0.040",
        "Each engine reads its own texts",
        "no task tells anything",
        "0.50 times",
        "math-m-014",
        "2 answers were cut while the model was thinking",
    ):
        assert words in text, words


def test_the_page_loads_nothing_and_shows_answers_as_text() -> None:
    html = write_report(verification())
    page = Page(html)
    assert page.loaded == []
    assert "script" not in page.tags
    assert "@import" not in html
    assert "url(" not in html
    assert EVIL in page.text


@pytest.mark.parametrize("stage", ["likelihood", "answers", "speed"])
def test_a_stage_that_was_not_reached_is_left_out(stage: str) -> None:
    page = Page(write_report(verification(**{stage: None})))
    headings = {"likelihood": "Each engine writes", "answers": "Answers lost, of 100", "speed": "requests at once"}  # fmt: skip
    for name, words in headings.items():
        assert (words in page.text) == (name != stage), name


def test_the_axis_has_round_ticks_and_holds_its_ends() -> None:
    axis = Axis(-0.05, 0.30)
    labels = [tick.label for tick in axis.ticks(unit=0.01)]
    assert labels == ["-5", "0", "5", "10", "15", "20", "25", "30"]
    assert axis.x(-1.0) == 0.0
    assert axis.x(0.3) == axis.x(9.0) > axis.x(0.1)
