"""Rebuild a byte-level BPE tokenizer as a ``tiktoken.Encoding``: the same ids, several times faster.

Whatever this module does not know for certain gives None, and the caller leaves the work to ``tokenizers`` itself.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import tiktoken

NormalForm: TypeAlias = Literal["NFC", "NFD", "NFKC", "NFKD"]

# The split of GPT-2, which a ByteLevel stage with use_regex applies.
# The group without look-ahead is one step for tiktoken's regex engine.
_BYTE_LEVEL = (
    r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+)|\s+(?!\S)|\s+"
)
# A Digits stage splits numbers off first: no space joins them, and white space before a number is a piece of its own.
_DIGITS_BYTE_LEVEL = r"(?:'(?:[sdmt]|ll|ve|re)| ?\p{L}+|NUMBER| ?[^\s\p{L}\p{N}]+)|\s+(?=\p{N})|\s+(?!\S)|\s+"
_NORMAL_FORMS: dict[str, NormalForm] = {
    "NFC": "NFC",
    "NFD": "NFD",
    "NFKC": "NFKC",
    "NFKD": "NFKD",
}


@dataclass(frozen=True, slots=True)
class ByteLevelBpe:
    """Encodes as the original tokenizer does, or not at all.

    Attributes:
        encoding: The rebuilt tokenizer.
        normal_form: The Unicode normal form that the original applies first, or None.
        missing_bytes: Bytes that the vocabulary lacks.
        added_starts: The first characters of the added tokens.
    """

    encoding: tiktoken.Encoding
    normal_form: NormalForm | None
    missing_bytes: bytes
    added_starts: frozenset[str]

    def encode(self, text: str) -> list[int] | None:
        """Return the ids of a text, added tokens matched; None: the vocabulary lacks a byte, or it needs normalizing.

        Added tokens are matched before normalizing, so a text that normalizing would change is not encoded here.

        Raises:
            UnicodeEncodeError: The text has a lone surrogate.
        """
        data = text.encode()
        if len(data.translate(None, self.missing_bytes)) != len(data):
            return None
        if self.normal_form is not None and not unicodedata.is_normalized(
            self.normal_form, text
        ):
            return None
        for start in self.added_starts:
            if start in text:
                return self.encoding.encode(text, allowed_special="all")
        return self.encoding.encode_ordinary(text)


def rebuild(definition: dict[str, Any]) -> ByteLevelBpe | None:
    """Return a tokenizer definition as byte-level BPE, or None where it is not or has unknown stages.

    Args:
        definition: The decoded ``tokenizer.json``.
    """
    model = definition["model"]
    pattern = _split_pattern(definition.get("pre_tokenizer"))
    normal_form, is_normalizer_known = _normal_form(definition.get("normalizer"))
    added = _added_tokens(definition.get("added_tokens") or [])
    if (
        model.get("type") != "BPE"
        or pattern is None
        or not is_normalizer_known
        or added is None
    ):
        return None
    if any(
        model.get(key)
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    ):
        return None
    ranks = _ranks(model, added)
    if ranks is None:
        return None
    encoding = tiktoken.Encoding(
        "model", pat_str=pattern, mergeable_ranks=ranks, special_tokens=added
    )
    return ByteLevelBpe(
        encoding=encoding,
        normal_form=normal_form,
        missing_bytes=bytes(b for b in range(256) if bytes([b]) not in ranks),
        added_starts=frozenset(token[0] for token in added),
    )


def _split_pattern(stage: dict[str, Any] | None) -> str | None:
    """Return the split pattern of a pre-tokenizer, or None for one that is not known here."""
    match stage:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _BYTE_LEVEL
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": bool(individual)},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            ],
        }:
            return _DIGITS_BYTE_LEVEL.replace(
                "NUMBER", r"\p{N}" if individual else r"\p{N}+"
            )
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": str(pattern)},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
        case _:
            return None


def _normal_form(stage: dict[str, Any] | None) -> tuple[NormalForm | None, bool]:
    """Return the Unicode normal form of a normalizer, and whether the normalizer is known here."""
    match stage:
        case None | {"type": "Sequence", "normalizers": []}:
            return None, True
        case {"type": "Sequence", "normalizers": [only]}:
            return _normal_form(only)
        case {"type": str(name)}:
            return _NORMAL_FORMS.get(name), name in _NORMAL_FORMS
        case _:
            return None, False


def _added_tokens(added: list[dict[str, Any]]) -> dict[str, int] | None:
    """Return added tokens and their ids, or None where they are matched in ways that tiktoken has not.

    tiktoken takes any of two tokens that start at one place, ``tokenizers`` the longer one.
    """
    if any(
        token["lstrip"] or token["rstrip"] or token["single_word"] for token in added
    ):
        return None
    contents = sorted(token["content"] for token in added)
    if any(later.startswith(earlier) for earlier, later in pairwise(contents)):
        return None
    return {token["content"]: token["id"] for token in added}


def _ranks(model: dict[str, Any], added: dict[str, int]) -> dict[bytes, int] | None:
    """Return tiktoken's ranks, or None where ids and merge order do not agree.

    tiktoken merges the pair whose joint token has the lowest id, ``tokenizers`` the pair that comes first in the list of
    merges: the same as long as ids rise in the order of merges.
    """
    vocabulary: dict[str, int] = model["vocab"]
    last = -1
    merged = set()
    for merge in model["merges"]:
        token = "".join(merge.split(" ", 1) if isinstance(merge, str) else merge)
        number = vocabulary.get(token, -1)
        if number < last:
            return None
        last = number
        merged.add(token)
    alphabet = _byte_alphabet()
    ranks = {}
    for token, number in vocabulary.items():
        if token in added:
            continue
        if len(token) > 1 and token not in merged and not model.get("ignore_merges"):
            return None  # No merge leads to this token, but tiktoken would find it.
        try:
            ranks[bytes(alphabet[c] for c in token)] = number
        except KeyError:
            return None
    return ranks


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's mapping from printable characters to the bytes that they stand for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {
        chr(256 + n): b for n, b in enumerate(others)
    }
