"""Files of saved references that cannot be used, and what their errors say to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.profiling.answering import AnswerLimits, ThinkingMode
from router.profiling.model_answer import ModelAnswer
from router.verification.saved import (
    FORM,
    SavedReference,
    SavedReferenceError,
    prompts_digest,
    read_reference,
    write_reference,
)
from tests.unit.verification.made_findings import NOW, identity
from tiers.errors import NoScoresError
from tiers.verification.model_facts import ModelFacts


def saved_reference(**more: Any) -> SavedReference:
    """Return a reference that told no probabilities."""
    facts = ModelFacts.model_construct(
        identity=identity(),
        texts=(),
        chats=(),
        ends=(),
        drawn=(),
        call=None,
        thinks=False,
        not_told=(),
    )
    usual: dict[str, Any] = {
        "form": FORM,
        "created": NOW,
        "identity": identity(),
        "facts": facts,
        "prompts": prompts_digest(),
        "likelihood": None,
        "tasks": "made tasks",
        "limits": AnswerLimits(think_tokens=512),
        "answers": {"a": ModelAnswer(text="4"), "b": None},
    }
    return SavedReference(**usual | more)


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    saved = saved_reference()
    write_reference(path, saved)
    assert read_reference(path) == saved
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "is not JSON"),
        ("[]", "it has no field 'form'"),
        ('{"form": "answers 1"}', "it has no field 'form'"),
        ('{"form": "qarr reference 0"}', "has the form 'qarr reference 0'"),
        (json.dumps({"form": FORM}), "created: Field required"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "reference.json"
    path.write_text(content)
    with pytest.raises(SavedReferenceError) as refusal:
        read_reference(path)
    assert why in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_a_reference_with_other_prompts_is_refused(tmp_path: Path) -> None:
    """Its texts answer prompts that this release does not ask the candidate."""
    path = tmp_path / "reference.json"
    write_reference(path, saved_reference(prompts="of another release"))
    with pytest.raises(SavedReferenceError, match="with other prompts"):
        read_reference(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SavedReferenceError, match=r"cannot be read: No such file"):
        read_reference(tmp_path / "nothing.json")


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(SavedReferenceError, match="cannot be written"):
        write_reference(path, saved_reference())
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("mode", "think_tokens", "said"),
    [
        (ThinkingMode.ON, None, "saved with --thinking default"),
        (ThinkingMode.DEFAULT, 64, "saved with 512 tokens for thoughts"),
    ],
)
def test_a_candidate_is_not_asked_otherwise_than_the_reference_was(
    mode: ThinkingMode, think_tokens: int | None, said: str
) -> None:
    with pytest.raises(SavedReferenceError, match=said):
        saved_reference().check_thinking(mode, think_tokens)


def test_a_candidate_may_be_asked_as_the_reference_was() -> None:
    saved_reference().check_thinking(ThinkingMode.DEFAULT, None)
    saved_reference().check_thinking(ThinkingMode.DEFAULT, 512)


@pytest.mark.anyio
async def test_a_reference_without_probabilities_says_so() -> None:
    with pytest.raises(NoScoresError, match="has no probabilities"):
        await saved_reference().write(8192, lambda: None)
