"""Token counts: the same ids as the reference library's."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from classifier import EstimatingCounter, ModelTokenCounter, TokenizerError
from tests.unit.classifier.made_tokenizers import BYTE_LEVEL, TRAINING, byte_level

TEXTS = [
    "",
    " ",
    "hello world",
    "  two  spaces \n\n and\tlines \r\n",
    "IT'S we'LL don't 'tis",
    "12345 6.78 \u00bd \u0663\u0664",
    "def f(x):\n\treturn x ** 2\n",
    "\u4f60\u597d \u4e16\u754c \U0001f600\U0001f469\u200d\U0001f4bb",
    "e\u0301 vs \u00e9, \ufb01ne \uff21\uff22",
    "<|end|> in <|end|><|end|> text <|en",
    "\x00\x04\x1d control \x7f\x80",
    "a" * 3000,
    " " * 3000,
    "\U000f0000 private \U00050000 use",
]
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def fewer_bytes() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<|end|>"))
    tokenizer.pre_tokenizer = BYTE_LEVEL
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]"], show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    return tokenizer


def greedy_added_token() -> Tokenizer:
    tokenizer = byte_level(BYTE_LEVEL)
    tokenizer.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True)])
    return tokenizer


def digits(*, individual: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=individual), BYTE_LEVEL]
    )


def llama() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(LLAMA), "isolated")
    return pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


FAST = {
    "byte_level": byte_level(BYTE_LEVEL),
    "single_digits": byte_level(digits(individual=True)),
    "digit_runs": byte_level(digits(individual=False)),
    "llama_split": byte_level(llama()),
    "nfc": byte_level(BYTE_LEVEL, normalizers.NFC()),
    "nfkc": byte_level(BYTE_LEVEL, normalizers.NFKC()),
    "fewer_bytes": fewer_bytes(),
}
SLOW = {
    "unigram": unigram(),
    "word_piece": word_piece(),
    "greedy_added_token": greedy_added_token(),
}
PAIRS = {name: (t, ModelTokenCounter(t.to_str())) for name, t in (FAST | SLOW).items()}


def reference(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_the_reference_ids(name: str, text: str) -> None:
    """Ids and counts are those of the reference, whichever library does the work."""
    tokenizer, counter = PAIRS[name]
    assert counter.encode(text) == reference(tokenizer, text)
    assert counter.count(text) == len(reference(tokenizer, text))


@pytest.mark.parametrize("name", PAIRS)
def test_backend(name: str) -> None:
    """Byte-level BPE is rebuilt for speed; everything else is left to the reference library."""
    counter = PAIRS[name][1]
    assert counter.backend == ("tiktoken" if name in FAST else "tokenizers")
    assert counter.exact


@given(
    st.sampled_from(sorted(PAIRS)),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=80),
)
def test_any_text_has_the_reference_ids(name: str, text: str) -> None:
    """No text that Unicode allows has other ids than the reference gives."""
    tokenizer, counter = PAIRS[name]
    assert counter.encode(text) == reference(tokenizer, text)


@given(
    st.sampled_from(sorted(PAIRS)),
    st.text(
        "aes'tTlLvV 019\n\r\t.,!<|end>\u00e9\u0301\u0663\u00bd\u3000\u00a0\u017f",
        max_size=80,
    ),
)
def test_any_mixture_of_boundaries_has_the_reference_ids(name: str, text: str) -> None:
    """No mixture of contractions, digits, white space and special tokens is split otherwise."""
    tokenizer, counter = PAIRS[name]
    assert counter.encode(text) == reference(tokenizer, text)


@pytest.mark.parametrize("name", PAIRS)
def test_long_text_is_counted_in_pieces(name: str) -> None:
    _, counter = PAIRS[name]
    for text in ("The capital of France is Paris. " * 4000, " " * 120_000):
        assert (
            abs(counter.count(text) - len(counter.encode(text)))
            <= 2 * len(text) // 50_000
        )
    assert counter.count(" " * 2_000_000) == 2_000_000 // 3


def test_lone_surrogates_count_as_replacement_characters() -> None:
    """A lone surrogate, which has no UTF-8, counts as U+FFFD."""
    for _, counter in PAIRS.values():
        assert counter.encode("a\ud800b") == counter.encode("a\ufffdb")


def test_from_file(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    FAST["byte_level"].save(str(path))
    assert ModelTokenCounter.from_file(path).count("hello world") == len(
        reference(FAST["byte_level"], "hello world")
    )


@pytest.mark.parametrize(
    "content", [None, b"", b"{}", b"[1]", b"\xff\xfe", b'{"model": 1}']
)
def test_bad_files_are_named(tmp_path: Path, content: bytes | None) -> None:
    """A file that is missing or is no tokenizer raises an error of our own."""
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TokenizerError):
        ModelTokenCounter.from_file(path)


def test_estimates() -> None:
    """Estimates say that they are, grow with the text and are never zero for a text."""
    counter = EstimatingCounter()
    assert not counter.exact
    assert counter.count("") == 0
    assert counter.count("a") == 1
    assert counter.count("\u4f60\u597d") == 2
    assert counter.count("word " * 300) == 500


@given(st.text(), st.text())
def test_estimates_never_shrink(text: str, more: str) -> None:
    counter = EstimatingCounter()
    assert counter.count(text + more) >= counter.count(text)
