"""Weights of the class evidence: the file that comes with the package, and how one is learned."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from classifier import PromptClass, WeightsError
from classifier.classes import judge, judge_code, judge_long
from classifier.corpus import make_example, read_corpus
from classifier.evidence import EXCLUSIVE, FEATURES, MADE_FOR, SHAPES
from classifier.training import Example, TrainingSettings, fold_of, groups_of, judge_example, train
from classifier.weights import JUDGED, WEIGHTS_FILE, parse_weights, shipped_weights

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = (
    ("How many apples are left of 12 after 5 are eaten?", "math"),
    ("Solve 3x + 4 = 19 and give the sum of its roots.", "math"),
    ("What is the probability of two sixes with 2 dice?", "math"),
    ("A car drives 90 miles in 2 hours. How many miles is that in 5 hours?", "math"),
    ("Write a poem about the sea.", "writing"),
    ("Compose a short letter to an old teacher.", "writing"),
    ("Draft a speech for a wedding, in a formal tone.", "writing"),
    ("Invent a story that ends with a storm.", "writing"),
    ("Thanks, that was kind of you!", "chat"),
    ("Can you recommend a film for tonight?", "chat"),
    ("What should I cook for my parents?", "chat"),
    ("hello, how are you?", "chat"),
    ("Write a Python function that adds two numbers.", "code"),
)
LABELLED = [make_example(text, PromptClass(label), number) for number, (text, label) in enumerate(PROMPTS)]


def test_shipped_weights_fit_the_code() -> None:
    """Every piece of evidence has weights, and no other; the weights say what they were learned from."""
    shipped = shipped_weights()
    assert list(shipped.weights) == list(FEATURES)
    assert len(set(FEATURES)) == len(FEATURES)
    assert parse_weights(shipped.dump()) == shipped
    assert WEIGHTS_FILE.read_text("utf-8") == shipped.dump()
    assert len(shipped.provenance["data_sha256"]) == 64
    assert shipped.provenance["settings"] == json.loads(json.dumps(shipped.provenance["settings"]))


def test_evidence_is_described_by_its_own_names() -> None:
    """What is said of evidence elsewhere is said of evidence that there is."""
    assert MADE_FOR.keys() | EXCLUSIVE | SHAPES <= set(FEATURES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["weights"].pop("numbers"), "none for \\['numbers'\\]"),
        (lambda c: c["weights"].update({"odd": c["bias"]}), "unknown \\['odd'\\]"),
        (lambda c: c["weights"]["numbers"].pop(), "every row"),
        (lambda c: c["classes"].pop(), "are for the classes"),
        (lambda c: c["provenance"].update(format=7), "of format 7"),
        (lambda c: c["calibration"].update(temperature=0), "above 0"),
        (lambda c: c["calibration"].pop("code_slope"), "not a weights file"),
        (lambda c: c.update(bias=["x"]), "not a weights file"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, message: str) -> None:
    """A file of other evidence or classes is named as such, and not used in part."""
    content = json.loads(shipped_weights().dump())
    change(content)
    with pytest.raises(WeightsError, match=message):
        parse_weights(json.dumps(content))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "7", "{"])
def test_what_is_no_weights_file_is_refused(text: str) -> None:
    """Any text that is not a weights file raises one kind of error."""
    with pytest.raises(WeightsError, match="not a weights file"):
        parse_weights(text)


def test_training_is_deterministic_and_learns() -> None:
    """The same prompts give the same file, and the prompts are then told apart."""
    first, second = (train(LABELLED, TrainingSettings(), {"data_sha256": "-"}) for _ in range(2))
    assert first.dump() == second.dump()
    assert parse_weights(first.dump()) == first
    assert all(judge_example(example, first).prompt_class is example.label for example in LABELLED)
    assert first.provenance["prompts"] == {"chat": 4, "code": 1, "math": 4, "writing": 4}


def test_training_needs_two_classes() -> None:
    """From prompts of one class, or of one template, nothing is learned."""
    one_class = [example for example in LABELLED if example.label is PromptClass.MATH]
    one_group = [Example(e.label, e.evidence, e.code, e.long, 0) for e in LABELLED]
    for examples in ([], one_class, one_group):
        with pytest.raises(ValueError, match="at least two"):
            train(examples, TrainingSettings(), {})


def test_evidence_of_one_class_speaks_for_no_other() -> None:
    """Marks of code take from every other class alike."""
    for name in EXCLUSIVE:
        row = dict(zip(JUDGED, shipped_weights().weights[name], strict=True))
        assert {prompt_class for prompt_class, weight in row.items() if weight} <= {MADE_FOR[name]}


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(FEATURES), st.floats(0, 1)), st.floats(-1e6, 1e6))
def test_confidence_is_a_probability(evidence: dict[str, float], log_odds: float) -> None:
    """Whatever is found, the confidence is 0..1; code is never named by the weights."""
    weights = shipped_weights()
    judged = judge(evidence, weights)
    assert judged.prompt_class is not PromptClass.CODE
    assert set(judged.signals) <= evidence.keys()
    for judgement in (judged, judge_code(log_odds, (), weights), judge_long(2000, weights)):
        assert 0 <= judgement.confidence <= 1


def test_without_evidence_nothing_is_named() -> None:
    """Of no evidence, or of the mere shape of a prompt, no class is named."""
    for evidence in ({}, dict.fromkeys(SHAPES, 1.0)):
        assert judge(evidence, shipped_weights()).prompt_class is PromptClass.UNKNOWN


def test_prompts_of_one_template_are_one_group() -> None:
    """Shared beginnings, ends, lines and families join prompts, also in a chain; fold numbers are within range."""
    stem = "Describe what the following numbers of the table mean for"
    texts = (
        f"{stem} a baker",
        f"{stem} 12 sailors",
        "Count them.",
        "Name this colour:\n\nred",
        "name this colour:\n\nblue",
        "Zähle sie.",
    )
    groups = groups_of(texts, ("", "", "f", "", "", "f"))
    assert groups == [0, 0, 1, 2, 2, 1]
    assert all(0 <= fold_of(group, 5) < 5 for group in range(1000))
    assert {fold_of(group, 5) for group in range(100)} == set(range(5))


def write_data(folder: Path) -> None:
    """Write a data folder with the prompts above."""
    rows = [{"text": text, "category": label, "source": "here"} for text, label in PROMPTS]
    rows.append({"text": "A short one.", "category": "long", "source": "here"})
    other = {"has_code": False, "borderline": False, "natural_language": "en", "source": "mt_bench (81, writing)"}
    more = [
        other | {"text": "Write a fable about a crow."},
        other | {"text": "Left out.", "borderline": True},
        other | {"text": "Wie spät ist es?", "natural_language": "de"},
        other | {"text": "A prompt from elsewhere.", "source": "elsewhere"},
    ]
    for name, lines in (("calibration.jsonl", rows), ("routing.jsonl", more)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in lines), "utf-8")


def test_corpus_labels_what_is_stated(tmp_path: Path) -> None:
    """Prompts whose class nobody states are left out."""
    write_data(tmp_path)
    corpus = read_corpus(tmp_path)
    labels = [prompt.label.value for prompt in corpus.prompts]
    assert labels == [*(label for _, label in PROMPTS), "writing", "multilingual"]
    assert len(corpus.examples) == len(labels)


def test_bad_data_is_named(tmp_path: Path) -> None:
    """A line without a field is named by its file and number."""
    write_data(tmp_path)
    (tmp_path / "routing.jsonl").write_text('{"text": "x"}\n', "utf-8")
    with pytest.raises(ValueError, match=r"routing\.jsonl line 1"):
        read_corpus(tmp_path)


def test_one_command_writes_the_same_file_twice(tmp_path: Path) -> None:
    """The script trains from a folder, byte for byte the same."""
    write_data(tmp_path)
    outputs = [tmp_path / name for name in ("a.json", "b.json")]
    for output in outputs:
        command = [sys.executable, ROOT / "scripts/train_classifier.py", "--data", tmp_path, "--output", output]
        subprocess.run(command, check=True, capture_output=True)
    first, second = (output.read_bytes() for output in outputs)
    assert first == second
    assert parse_weights(first.decode()).provenance["prompts"]["multilingual"] == 1
