"""The model and its files: what it reads of a text, what it finds, what weighed most, and which files are refused."""

import json
import random
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classifier import WeightsError, explain
from classifier.kinds import JUDGED
from classifier.model import (
    ABOUT_FILE,
    HEAD_CHARS,
    MARKS,
    OUTPUTS,
    TAIL_CHARS,
    WEIGHTS_FILE,
    digest,
    line_of,
    load_model,
    shipped_model,
)

ROOT = Path(__file__).resolve().parents[3]
TEXT = st.text(st.characters(), max_size=300)  # unpaired surrogates too


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def getName(x1):", "def getname ( x 1 ):"),
        ("Été à Paris", "été à paris"),
        ("a == b\n", "a == b ⏎"),
        ("", "∅"),
    ],
)
def test_lines(text: str, expected: str) -> None:
    """Words are apart from marks, digits and line breaks; a text of which nothing is left has a part of its own."""
    assert line_of(text) == expected


def test_long_texts_are_read_at_both_ends() -> None:
    """Of a long text the middle is not read."""
    head = "a " * (HEAD_CHARS // 2)
    tail = "b " * (TAIL_CHARS // 2)
    assert (
        line_of(f"{head}middle{tail}")
        == line_of(f"{head}another{tail}")
        == f"{line_of(head)} ⏎ {line_of(tail)}"
    )


def test_marks_are_found_at_the_start_of_a_line() -> None:
    """Each certain mark is found where it stands, and not in the middle of a line."""
    for name, mark in MARKS.items():
        assert shipped_model().predict(f"see:{mark} x").marks == (name,)
    assert shipped_model().predict("the #!/ marker and the ```").marks == ()


@given(st.text(st.characters(max_codepoint=127), max_size=300))
def test_plain_text_is_read_alike_beside_other_scripts(text: str) -> None:
    """The faster way for ASCII finds the same parts."""
    assert line_of(f"{text} é") == f"{line_of(text)} é".removeprefix("∅ ")


@given(TEXT)
def test_whatever_is_read_what_is_found_are_probabilities(text: str) -> None:
    found = shipped_model().predict(text)
    for value in (
        found.has_code,
        found.asks_for_code,
        found.contains_code,
        found.beyond_trivial,
        found.complex,
    ):
        assert 0 <= value <= 1
    assert len(found.classes) == len(JUDGED)
    assert sum(found.classes) == pytest.approx(1)
    assert found.language is None or found.has_code >= 0.5


@pytest.mark.parametrize(
    "unit", ["a", "\u0301", "(", "\ud800", "[{", "写", " ", "\n", "0", "😀", "\0"]
)
def test_hostile_texts_are_read_in_part(unit: str) -> None:
    """Of a megabyte of one character an excerpt is read: the work is bounded."""
    text = unit * (1_000_000 // len(unit))
    assert len(line_of(text)) <= 2 * (HEAD_CHARS + TAIL_CHARS) + 1
    assert 0 <= shipped_model().predict(text).has_code <= 1


@pytest.mark.parametrize("odds", [1e3, -1e3])
def test_probabilities_of_extreme_odds(odds: float) -> None:
    found = replace(shipped_model(), unnamed_log_odds=(odds,) * len(OUTPUTS)).predict(
        "\u2603"
    )
    assert 0 < found.has_code < 1
    assert sum(found.classes) == pytest.approx(1)


def test_a_second_look_adds_to_the_log_odds() -> None:
    none = [0.0] * len(OUTPUTS)
    model = shipped_model()
    assert model.predict("fix this loop", none) == model.predict("fix this loop")
    assert model.predict("fix this loop", [9.0, *none[1:]]).has_code > 0.99


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
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert all(found[n] == alone for n in range(4))


@settings(max_examples=30)
@given(TEXT)
def test_any_text_is_explained(text: str) -> None:
    for pieces in explain(text).values():
        weights = [abs(weight) for _, weight in pieces]
        assert weights == sorted(weights, reverse=True)


def test_the_pairs_that_ask_for_code_weigh_most() -> None:
    """What is told of two words is what they say alone, beyond an empty text."""
    told = explain("please write quicksort in rust for my aunt", max_pairs=3)["asks"]
    model = shipped_model()
    assert {"write quicksort", "in rust"} & {pair for pair, _ in told}
    pair, weight = told[0]
    assert weight == pytest.approx(
        model.read(pair, 0)[0][1] - model.read("", 0)[0][1], abs=0.01
    )


def test_shipped_weights_say_where_they_come_from() -> None:
    """They name their data and settings, and how they did on batches that were left out."""
    about = shipped_model().about
    assert len(about["data_sha256"]) == 64
    assert about["prompts"]["written"] > 20_000
    assert about["fasttext"]["loss"] == "ova"
    assert about["left_out"]["F1 has code"] > 0.85


@pytest.mark.parametrize("content", [b"", b"{}", b"no weights at all"])
def test_what_is_no_weights_file_is_refused(content: bytes, tmp_path: Path) -> None:
    """Any file that is none raises one kind of error, and so does a missing one."""
    file = tmp_path / WEIGHTS_FILE.name
    with pytest.raises(WeightsError, match="cannot read"):
        load_model(file)
    file.write_bytes(content)
    about = json.loads(WEIGHTS_FILE.with_name(ABOUT_FILE).read_text("utf-8")) | {
        "sha256": digest(file)
    }
    (tmp_path / ABOUT_FILE).write_text(json.dumps(about), "utf-8")
    with pytest.raises(WeightsError, match="cannot read"):
        load_model(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"sha256": "0"}, "not written with"), ({"outputs": []}, "other outputs")],
)
def test_weights_of_other_code_are_refused(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    """A file that was not written with its calibration, or has other outputs, is not used."""
    file = Path(shutil.copy(WEIGHTS_FILE, tmp_path))
    about = json.loads(WEIGHTS_FILE.with_name(ABOUT_FILE).read_text("utf-8")) | change
    (tmp_path / ABOUT_FILE).write_text(json.dumps(about), "utf-8")
    with pytest.raises(WeightsError, match=message):
        load_model(file)


def write_prompts(file: Path) -> None:
    rng = random.Random(0)
    rows = []
    for number in range(1200):
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
                "source": f"written:{number % 5}"
                if number % 4
                else f"pool {number % 7}",
            }
        )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def test_one_command_writes_the_same_files_twice(tmp_path: Path) -> None:
    """The script trains from a file, byte for byte the same, and the model tells what it was taught."""
    write_prompts(tmp_path / "written.jsonl")
    outputs = [tmp_path / name / WEIGHTS_FILE.name for name in ("a", "b")]
    script = ROOT / "scripts/train_classifier.py"
    command = [
        ROOT / ".venv-classifier/bin/python",
        script,
        "--data",
        tmp_path,
        "--bucket",
        "20000",  # a third of the time that the package's 300,000 take
        "--output",
    ]
    for output in outputs:
        output.parent.mkdir()
        subprocess.run([*command, output], check=True, timeout=100)
    for name in (WEIGHTS_FILE.name, ABOUT_FILE):
        first, second = (output.with_name(name).read_bytes() for output in outputs)
        assert first == second
    model = load_model(outputs[0])
    asked = model.predict("write a lua function for a garden")
    told = model.predict("tell me about the page of my aunt")
    assert asked.asks_for_code > 0.5 > told.has_code
    assert asked.language == "lua"
    assert model.about["prompts"]["written"] == 900
