"""Findings of verifications, made with what a test is about."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from classifier import PromptClass
from router.verification.findings import (
    AnswerComparison,
    AnswersFinding,
    SpeedComparison,
    SpeedFinding,
    Verification,
)
from tiers.verification.findings import (
    Difference,
    EngineIdentity,
    Gap,
    LikelihoodFinding,
    SameModelFinding,
    Verdict,
)

NOW = datetime(2026, 5, 1, tzinfo=UTC)


def identity(name: str = "http://reference:8000", **more: Any) -> EngineIdentity:
    usual = {"name": name, "model": "m", "max_model_len": 8192}
    return EngineIdentity(**usual | more)


def difference(subject: str = "chat template", *, is_fault: bool = True) -> Difference:
    return Difference(
        subject=subject,
        reference="one",
        candidate="another",
        is_fault=is_fault,
        explanation=f"Serve both with the same {subject}.",
    )


def same_model(*differences: Difference) -> SameModelFinding:
    return SameModelFinding(differences=differences, not_checked=(), took_s=1.0)


def gap(**more: Any) -> Gap:
    usual: dict[str, Any] = {
        "writer": "reference",
        "part": "code",
        "tokens": 100,
        "gap": 0.03,
        "changed": 0.04,
    }
    return Gap(**usual | more)


def likelihood(*gaps: Gap, **more: Any) -> LikelihoodFinding:
    usual: dict[str, Any] = {
        "by_kind": gaps or (gap(),),
        "by_position": (),
        "own": (),
        "faults": (),
        "not_measured": (),
        "took_s": 40.0,
    }
    return LikelihoodFinding(**usual | more)


def comparison(**more: Any) -> AnswerComparison:
    usual: dict[str, Any] = {
        "prompt_class": None,
        "both_right": 180,
        "worse": 15,
        "better": 3,
        "both_wrong": 16,
        "not_measured": 0,
        "low": 0.032,
        "high": 0.098,
        "verdict": Verdict.WORSE,
        "tasks_needed": None,
    }
    return AnswerComparison(**usual | more)


def answers(overall: AnswerComparison | None = None, **more: Any) -> AnswersFinding:
    overall = overall or comparison()
    usual: dict[str, Any] = {
        "tolerated": 0.02,
        "confidence": 0.95,
        "overall": overall,
        "by_class": (overall.model_copy(update={"prompt_class": PromptClass.CHAT}),),
        "worse_answers": (),
        "not_measured": (),
        "took_s": 200.0,
    }
    return AnswersFinding(**usual | more)


def speed(**more: Any) -> SpeedFinding:
    usual: dict[str, Any] = {
        "streams": 16,
        "reference_ttft_ms": 100.0,
        "candidate_ttft_ms": 100.0,
        "reference_tpot_ms": 10.0,
        "candidate_tpot_ms": 10.0,
    }
    return SpeedFinding(loads=(SpeedComparison(**usual | more),), took_s=9.0)


def verification(**more: Any) -> Verification:
    """Return a verification; by default all stages but the speed, and the answers are worse."""
    usual: dict[str, Any] = {
        "created": NOW,
        "reference": identity(),
        "candidate": identity("http://candidate:8000"),
        "same_model": same_model(),
        "likelihood": likelihood(),
        "answers": answers(),
        "speed": None,
        "took_s": 241.0,
    }
    return Verification(**usual | more)
