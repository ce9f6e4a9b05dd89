"""The model and its weights file: what it reads of a text, how a file is learned, and what is refused."""

import dataclasses
import json
import math
import random
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classifier import WeightsError, explain
from classifier.kinds import JUDGED
from classifier.model import (
    ASKS,
    CONTAINS,
    EDGE_WORDS,
    FIRST,
    LANGUAGE_ROWS,
    LANGUAGE_RUNS,
    LAST,
    MARKS,
    OUTPUTS,
    ROWS,
    RUNS,
    SHAPE_WIDTH,
    WEIGHTS_FILE,
    language_rows,
    load_model,
    read,
    shipped_model,
)

ROOT = Path(__file__).resolve().parents[3]
TEXT = st.text(st.characters(), max_size=300)  # unpaired surrogates too


def words(text: str) -> list[str]:
    found = read(text)
    starts, line = found.starts.tolist(), found.line[1:]
    return [line[a:b].rstrip(" \n") for a, b in zip(starts, [*starts, len(line)][1:], strict=True)]


def word_rows(text: str) -> list[int]:
    found = read(text)
    return found.rows[found.words : found.ends].tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def getUserName(x1):", ["def", "get", "User", "Name", "(", "x", "1", ")", ":", ""]),
        ("Été à Paris", ["Été", "à", "Paris", ""]),
        ("用Python实现", ["用", "Python", "实", "现", ""]),
        ("नमस्ते दुनिया", ["नमस्ते", "दुनिया", ""]),
        ("a == b\n", ["a", "==", "b", ""]),
        ("", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    """Words end at spaces, marks, digits and capitals; characters of scripts without spaces stand alone."""
    assert words(text) == expected


@settings(deadline=None)
@given(TEXT)
def test_rows_are_within_the_tables(text: str) -> None:
    """Every row that a text gives is one of its table's, and their numbers follow from the words."""
    found = read(text)
    count = len(found.starts)
    edge = min(count, EDGE_WORDS)
    assert (found.words, found.ends) == (max(count - 1, 0), max(2 * count - 1, 0))
    assert found.runs == found.ends + 2 * edge
    pairs_and_words, runs = found.rows[: found.ends], found.rows[found.runs :]
    assert np.all((pairs_and_words >= 0) & (pairs_and_words < FIRST))
    of_words = found.rows[found.words : found.ends]
    assert np.array_equal(found.rows[found.ends : found.ends + edge], of_words[:edge] + FIRST)
    assert np.array_equal(found.rows[found.ends + edge : found.runs], of_words[count - edge :] + LAST)
    assert np.all((runs >= RUNS) & (runs < ROWS))
    of_words, of_runs = language_rows(found)
    assert of_words.max(initial=0) < LANGUAGE_RUNS
    assert np.all((of_runs >= LANGUAGE_RUNS) & (of_runs < LANGUAGE_ROWS))
    assert found.shape.shape == (SHAPE_WIDTH,)
    assert np.all(np.isfinite(found.shape))


@settings(deadline=None)
@given(st.lists(st.sampled_from(["make", "Tea", "été", "7", "==", "写", "x_y", "привет"]), min_size=1, max_size=12))
def test_a_word_has_one_row_wherever_it_stands(parts: list[str]) -> None:
    """The hash of a word does not depend on its place, its case, the length of the text or other scripts in it."""
    alone = {part: word_rows(part.upper())[0] for part in ("make", "été", "привет")}
    rows = word_rows(" ".join(parts))
    numbers = dict(zip(words(" ".join(parts)), rows, strict=False))
    for part, row in alone.items():
        if part in numbers:
            assert numbers[part] == row


def test_long_texts_are_read_at_both_ends() -> None:
    """Of a long text the middle is not read."""
    head, tail = "a" * 4000, "b" * 2000
    assert read(f"{head}middle{tail}").line == f"\n{head}\n{tail}\n"
    first, second = (read(f"{head}{middle}{tail}") for middle in ("one", "two"))
    assert np.array_equal(first.rows, second.rows)


@pytest.mark.parametrize("unit", ["a", "\u0301", "(", "\ud800", "[{", "写", " ", "\n", "0", "😀"])
def test_hostile_texts_are_read_in_part(unit: str) -> None:
    """A megabyte of one character gives no more rows than an excerpt's characters do: the work is bounded."""
    found = read(unit * (1_000_000 // len(unit)))
    assert len(found.rows) <= 2 * 6002 + 2 * EDGE_WORDS + 1500
    assert np.all(np.isfinite(found.shape))


def test_marks_are_found_at_the_start_of_a_line() -> None:
    """Each certain mark is found where it stands, and not in the middle of a line."""
    for name, mark in MARKS.items():
        assert read(f"see:{mark} x").marks == (name,)
    assert read("the #!/ marker and the ```").marks == ()


@settings(deadline=None)
@given(TEXT)
def test_probabilities(text: str) -> None:
    """Whatever is read, what is found are probabilities; threads find the same."""
    found = shipped_model().predict(text)
    for value in (found.has_code, found.asks_for_code, found.contains_code, found.beyond_trivial, found.complex):
        assert 0 <= value <= 1
    assert len(found.classes) == len(JUDGED)
    assert sum(found.classes) == pytest.approx(1)
    assert (found.language is None) or found.has_code >= 0.5


@pytest.mark.parametrize("odds", [1e30, -1e30])
def test_probabilities_of_extreme_odds(odds: float) -> None:
    found = dataclasses.replace(shipped_model(), bias=shipped_model().bias + np.float32(odds)).predict("hi")
    assert 0 < found.has_code < 1
    assert sum(found.classes) == pytest.approx(1)


def test_threads_share_a_model() -> None:
    """Threads that read at the same time find what one finds alone."""
    texts = [f"write number {n} in rust, été {n}" for n in range(40)]
    alone = [shipped_model().predict(text) for text in texts]
    found: dict[int, list[object]] = {}

    def work(number: int) -> None:
        found[number] = [shipped_model().predict(text) for text in texts]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[n] == alone for n in range(4))


@settings(deadline=None)
@given(TEXT)
def test_any_text_is_explained(text: str) -> None:
    for pieces in explain(text).values():
        weights = [abs(weight) for _, weight in pieces]
        assert weights == sorted(weights, reverse=True)


def test_an_explanation_adds_up() -> None:
    """All that is told, with what every text has, is the model's own sum."""
    text = "please write quicksort in rust"
    model = shipped_model()
    told = explain(text, most=1000)
    for name, output in (("asks", ASKS), ("contains", CONTAINS)):
        reading = read(text)
        counting = model.hidden(reading) > 0
        base = float(model.bias[output] + reading.shape @ model.shape[:, output])
        base += float(model.hidden_bias[counting] @ model.hidden_outputs[counting, output])
        expected = getattr(model.predict(text), f"{name}_for_code" if name == "asks" else f"{name}_code")
        total = base + sum(weight for _, weight in told[name])
        # What is below the least told is missing.
        assert 1 / (1 + math.exp(-total)) == pytest.approx(expected, abs=0.05)


def test_the_line_break_that_ends_each_prompt_is_not_the_prompts_own() -> None:
    """It is called the prompt's end; line breaks within a prompt are called that."""
    for text, own in (("What is the capital of France?", False), ("What is\nthe capital?\n", True)):
        pieces = {piece for pieces in explain(text, most=1000).values() for piece, _ in pieces}
        assert any("line break" in piece for piece in pieces) is own
        assert "end of the prompt" in pieces


def test_shipped_weights_say_where_they_come_from() -> None:
    """The file names its data, its code, its settings and how it did on what was left out."""
    about = shipped_model().about
    assert len(about["data_sha256"]) == len(about["code_sha256"]) == 64
    assert about["prompts"]["written"] > 1000
    assert set(about["settings"]) >= {"seed", "cap", "folds"}
    assert about["left_out"]["F1 has code, written"] > 0.5


@pytest.mark.parametrize("content", [b"", b"{}", b"PK\x03\x04 broken"])
def test_what_is_no_weights_file_is_refused(content: bytes, tmp_path: Path) -> None:
    """Any file that is none raises one kind of error, and so does a missing one."""
    file = tmp_path / "weights.npz"
    with pytest.raises(WeightsError, match="cannot read"):
        load_model(file)
    file.write_bytes(content)
    with pytest.raises(WeightsError, match="cannot read"):
        load_model(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 1}, "does not fit"),
        ({"features": -1}, "does not fit"),
        ({"outputs": ["has code"]}, "does not fit"),
        ({"languages": ["python"]}, "other sizes"),
    ],
)
def test_weights_of_other_code_are_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    """A file for other features, outputs or languages is not used in part."""
    with np.load(WEIGHTS_FILE) as content:
        arrays = {name: content[name] for name in content.files}
    about = json.loads(arrays["about"].tobytes()) | change
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    file = tmp_path / "weights.npz"
    np.savez(file, **arrays)
    with pytest.raises(WeightsError, match=message):
        load_model(file)


def write_prompts(file: Path) -> None:
    rng = random.Random(0)
    rows = []
    for number in range(240):
        thing = rng.choice(("list", "table", "page", "garden", "letter", "number"))
        language = rng.choice(("rust", "lua"))
        code = number % 2 == 0
        rows.append(
            {
                "text": f"write a {language} function for a {thing}"
                if code
                else f"tell me about the {thing} of my aunt",
                "contains_code": False,
                "asks_for_code": code,
                "language": language if code else None,
                "class": "code" if code else rng.choice(("chat", "writing")),
                "complexity": "moderate" if number % 3 else "trivial",
                "source": f"written:{number % 5}" if number % 4 else f"pool {number % 7}",
            }
        )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def test_one_command_writes_the_same_file_twice(tmp_path: Path) -> None:
    """The script trains from a file, byte for byte the same, and the model tells what it was taught."""
    write_prompts(tmp_path / "written.jsonl")
    outputs = [tmp_path / name for name in ("a.npz", "b.npz")]
    for output in outputs:
        command = [
            sys.executable,
            ROOT / "scripts/train_classifier.py",
            "--data",
            tmp_path,
            "--output",
            output,
            "--steps",
            "4",
        ]
        subprocess.run(command, check=True, capture_output=True)
    assert outputs[0].read_bytes() == outputs[1].read_bytes()
    model = load_model(outputs[0])
    assert model.table.shape == (ROWS, len(OUTPUTS))
    asked, told = model.predict("write a lua function for a garden"), model.predict("tell me about the page of my aunt")
    assert asked.asks_for_code > 0.5 > told.has_code
    assert asked.language == "lua"
    assert model.about["prompts"]["written"] == 180
