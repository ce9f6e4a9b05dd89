"""Sampled prompts: how many, for whose eyes, and in which form."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from classifier import PromptClass, PromptFeatures
from router.profiling.prompt_samples import MAX_PROMPTS, PromptSamples

FEATURES = PromptFeatures(2, 1, 1, True, False, False, None, PromptClass.CODE, 0.9, ())


def lines_after(path: Path, share: float, *texts: str) -> list[str]:
    samples = PromptSamples(path, share)
    for text in texts:
        samples.offer(text, FEATURES)
    samples.close()
    return path.read_text("utf-8").splitlines() if path.exists() else []


def test_samples_are_prompts_with_their_class(tmp_path: Path) -> None:
    """With the class that they were routed by; only the file's owner may read it."""
    path = tmp_path / "made" / "prompts.jsonl"
    texts = ["two\nlines", "ünïcode \u2028", 'a "quote"']
    lines_after(path, 1.0, *texts)
    rows = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
    assert [(row["text"], row["class"]) for row in rows] == [
        (text, "code") for text in texts
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_half_a_character_is_no_fault(tmp_path: Path) -> None:
    """JSON may hold lone surrogates, which no file in UTF-8 can."""
    (line,) = lines_after(tmp_path / "prompts.jsonl", 1.0, "a\ud800b")
    assert json.loads(line)["text"] == "a?b"


def test_nothing_is_kept_of_no_share(tmp_path: Path) -> None:
    assert lines_after(tmp_path / "prompts.jsonl", 0.0, "a", "b", "c") == []


@pytest.mark.parametrize(
    ("before", "kept"), [(MAX_PROMPTS - 1, 1), (MAX_PROMPTS, 0), (MAX_PROMPTS + 5, 0)]
)
def test_a_full_file_takes_no_more(tmp_path: Path, before: int, kept: int) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("{}\n" * before)
    assert len(lines_after(path, 1.0, "a", "b")) == before + kept
