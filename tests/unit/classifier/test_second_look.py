"""The second look, with the model that comes with the package."""

import math
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classifier import (
    EstimatingCounter,
    PromptFeatures,
    SecondLook,
    WeightsError,
    extract,
    load_second_look,
)
from classifier.model import CLASSES, OUTPUTS, SMALL_TALK, shipped_model
from classifier.second_look import MODEL, TOKENIZER
from tests.unit.classifier.cases import ASKS, CONTAINS, NEITHER

TEXT = st.text(st.characters(), max_size=1200)  # unpaired surrogates too


@pytest.fixture(scope="module")
def second() -> SecondLook:
    found = load_second_look()
    assert found is not None
    return found


def read(text: str, *found: float) -> PromptFeatures:
    return extract(text, EstimatingCounter(), second=found)


@settings(max_examples=30)
@given(text=TEXT)
def test_any_text_is_read(second: SecondLook, text: str) -> None:
    found = second.read(text)
    assert len(found) == len(OUTPUTS)
    assert all(map(math.isfinite, found))


def test_it_says_nothing_of_small_talk(second: SecondLook) -> None:
    """It does not know it: what small talk is does not hang on it, and every other output has its own value."""
    text = "thanks! is this loop right?"
    found = second.read(text)
    first = shipped_model().predict(text)
    both = shipped_model().predict(text, found)
    assert found[SMALL_TALK] == 0
    assert both.small_talk == first.small_talk
    assert all(found[:SMALL_TALK])
    assert any(found[CLASSES:])


def test_it_is_right_where_the_first_look_is_in_doubt(second: SecondLook) -> None:
    """It settles most of what is in doubt, says so, and is not asked twice."""
    right = {prompt: True for _, prompt in (*ASKS, *CONTAINS)} | {
        prompt: False for _, prompt in NEITHER
    }
    doubtful = [prompt for prompt in right if read(prompt).doubtful]
    found = {prompt: read(prompt, *second.read(prompt)) for prompt in doubtful}
    assert doubtful
    assert all(
        "second look" in each.signals and not each.doubtful for each in found.values()
    )
    settled = sum(found[prompt].has_code is right[prompt] for prompt in doubtful)
    assert settled >= sum(read(prompt).has_code is right[prompt] for prompt in doubtful)


def test_without_onnxruntime_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert load_second_look.__wrapped__() is None


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=MODEL):
        load_second_look.__wrapped__(tmp_path)
    (tmp_path / MODEL).write_bytes(b"no model")
    (tmp_path / TOKENIZER).write_text("{}")
    with pytest.raises(WeightsError, match="second look"):
        load_second_look.__wrapped__(tmp_path)
