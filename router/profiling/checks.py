"""Tells right answers from wrong ones. No check raises or hangs, whatever an answer says."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import jsonschema_rs
import regex
from pydantic import Field, field_validator, model_validator

from router.policy.profiles import Frozen
from router.profiling.answer_text import (
    CLOSING,
    EDGES,
    bare,
    bullets,
    first_json,
    holds,
    last_number,
    normal,
    sentences,
    signs,
    whole,
    words,
)
from router.profiling.safe_code import compute

MAX_ANSWER = 20_000  # characters of an answer that are read
REGEX_S = 0.2

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)] | None


class NeedsRunError(Exception):
    """The check runs the answer, which is not done here."""


def same(found: Any, wanted: Any) -> bool:
    """Compare a value with one from JSON: tuples are lists, keys are texts, and numbers are equal but for rounding."""
    if isinstance(wanted, list):
        return (
            isinstance(found, list | tuple)
            and len(found) == len(wanted)
            and all(map(same, found, wanted))
        )
    if isinstance(wanted, dict):
        named = (
            {str(key): value for key, value in found.items()}
            if isinstance(found, dict)
            else {}
        )
        return (
            isinstance(found, dict)
            and named.keys() == wanted.keys()
            and all(same(named[k], wanted[k]) for k in named)
        )
    if isinstance(wanted, bool | str | None) or isinstance(found, bool):
        return type(found) is type(wanted) and bool(found == wanted)
    return isinstance(found, int | float) and (
        found == wanted or math.isclose(found, wanted, rel_tol=1e-9)
    )


class _Check(Frozen):
    def passes(self, answer: str) -> bool:
        answer = answer[:MAX_ANSWER].strip()
        return bool(answer) and self._passes(answer)

    def _passes(self, answer: str) -> bool:
        raise NotImplementedError


class NumberCheck(_Check):
    """The last number, or the last that is in a box."""

    type: Literal["number"]
    value: float = Field(allow_inf_nan=False)
    tolerance: float = Field(default=0, ge=0, allow_inf_nan=False)

    def _passes(self, answer: str) -> bool:
        found = last_number(answer)
        close = math.isclose(found, self.value, rel_tol=1e-9, abs_tol=1e-12)
        return close or abs(found - self.value) <= self.tolerance


class ChoiceCheck(_Check):
    """The first option that is named, unless "the answer is" names one."""

    type: Literal["choice"]
    value: Text
    options: tuple[Text, ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _is_option(self) -> ChoiceCheck:
        if self.value not in self.options:
            raise ValueError(
                f"value must be one of the options {', '.join(self.options)}"
            )
        return self

    def _passes(self, answer: str) -> bool:
        answer = regex.sub(
            r"\\(?:boxed|text|textbf|mathrm)\b|[*_`{}$\"]", "", signs(answer)
        ).strip()
        options = sorted(self.options, key=len, reverse=True)
        for option in options:
            if answer.strip(CLOSING + "()[]'").casefold() == option.casefold():
                return option == self.value
        names = "|".join(
            f"(?P<o{number}>{_option(option)})" for number, option in enumerate(options)
        )
        said = r"(?i:\banswer(?: is| would be| must be|:| =)(?: clearly| option| choice|:| the)*[ (\['\n]*)"
        named = [*regex.finditer(f"{said}(?:{names})", answer, regex.V1)]
        first = named or [*regex.finditer(names, answer, regex.V1)][:1]
        return {options[int(str(match.lastgroup)[1:])] for match in first} == {
            self.value
        }


def _option(text: str) -> str:
    """Return a pattern of an option; of a letter, where it is no article and no part of a word."""
    if len(text) > 1 or not (text.isascii() and text.isalpha()):
        return f"(?i:{whole(text)})"
    article = (
        r"(?!\s+(?!(?:because|since|as|is|and|with)\b)\p{Ll})" if text in "AIai" else ""
    )
    return rf"(?<!\w'|[\w.])(?:{text.upper()}(?!\w|'\w)|{text.lower()}(?=[.):]|\Z)){article}"


class ExactCheck(_Check):
    """The whole answer, but for case, quotes, white space, emphasis and closing punctuation."""

    type: Literal["exact"]
    values: tuple[Text, ...] = Field(min_length=1)

    def _passes(self, answer: str) -> bool:
        return bare(answer) in {bare(value) for value in self.values}


class ContainsCheck(_Check):
    """Texts that are in the answer, as whole words, and texts that are not."""

    type: Literal["contains"]
    all: tuple[Text, ...] = ()
    any: tuple[Text, ...] = ()
    none: tuple[Text, ...] = ()

    @model_validator(mode="after")
    def _says_something(self) -> ContainsCheck:
        if not self.all + self.any + self.none:
            raise ValueError("one of all, any and none must hold a text")
        return self

    def _passes(self, answer: str) -> bool:
        answer = normal(answer)
        return (
            all(holds(answer, text) for text in self.all)
            and (not self.any or any(holds(answer, text) for text in self.any))
            and not any(holds(answer, text) for text in self.none)
        )


class RegexCheck(_Check):
    """A pattern of the library ``regex`` that is found in the answer, in time."""

    type: Literal["regex"]
    pattern: Text

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            regex.compile(pattern)
        except (regex.error, OverflowError, RecursionError) as error:
            raise ValueError(f"no pattern of the library regex: {error}") from None
        return pattern

    def _passes(self, answer: str) -> bool:
        try:
            return regex.search(self.pattern, answer, timeout=REGEX_S) is not None
        except (TimeoutError, MemoryError):
            return False


class JsonCheck(_Check):
    """The first JSON value of the answer: its schema, and values by JSON pointer."""

    type: Literal["json"]
    json_schema: dict[str, Any] = Field(default={}, alias="schema")
    values: dict[str, Any] = Field(default={})

    @field_validator("json_schema")
    @classmethod
    def _is_schema(cls, schema: dict[str, Any]) -> dict[str, Any]:
        # says what is wrong in a ValueError
        jsonschema_rs.validator_for(schema, offline=True)
        return schema

    @field_validator("values")
    @classmethod
    def _are_pointers(cls, values: dict[str, Any]) -> dict[str, Any]:
        if bad := [
            pointer for pointer in values if pointer and not pointer.startswith("/")
        ]:
            raise ValueError(f"{bad[0]!r} is no JSON pointer: they begin with /")
        return values

    def _passes(self, answer: str) -> bool:
        try:
            found = first_json(answer)
            right = jsonschema_rs.validator_for(
                self.json_schema, offline=True
            ).is_valid(found)
            return right and all(
                same(_at(found, pointer), wanted)
                for pointer, wanted in self.values.items()
            )
        except (LookupError, ValueError, TypeError, RecursionError, OverflowError):
            return False


def _at(value: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        value = value[
            int(part)
            if isinstance(value, list)
            else part.replace("~1", "/").replace("~0", "~")
        ]
    return value


class ConstraintsCheck(_Check):
    type: Literal["constraints"]
    min_words: Count = None
    max_words: Count = None
    sentences: Count = None
    bullets: Count = None
    lines: Count = None
    paragraphs: Count = None
    starts_with: Text | None = None
    ends_with: Text | None = None
    include: tuple[Text, ...] = ()
    exclude: tuple[Text, ...] = ()
    lowercase: Literal[True] | None = None
    uppercase: Literal[True] | None = None
    no_commas: Literal[True] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> ConstraintsCheck:
        if not self.model_fields_set - {"type"}:
            raise ValueError("at least one constraint is needed")
        return self

    def _passes(self, answer: str) -> bool:
        found = words(answer)
        counts = (
            (self.sentences, sentences(answer)),
            (self.bullets, bullets(answer)),
            (self.lines, sum(1 for line in answer.splitlines() if line.strip())),
            (self.paragraphs, len(regex.split(r"\n\s*\n", answer))),
        )
        text = normal(answer)
        return (
            max(self.min_words or 0, 1)
            <= found
            <= (found if self.max_words is None else self.max_words)
            and all(wanted in {None, count} for wanted, count in counts)
            and self._framed(text)
            and all(holds(text, word) for word in self.include)
            and not any(holds(text, word) for word in self.exclude)
            and (not self.lowercase or answer == answer.lower())
            and (not self.uppercase or answer == answer.upper())
            and (
                not self.no_commas
                or regex.search("[,\uff0c\u3001\u060c]", answer) is None
            )
        )

    def _framed(self, text: str) -> bool:
        start, end = normal(self.starts_with or ""), normal(self.ends_with or "")
        before = "" if start[:1] in EDGES else EDGES + "#>"
        after = EDGES if end[-1:] in CLOSING else EDGES + CLOSING
        return bool(
            regex.match(whole(start), text.lstrip(before), regex.V1)
            and regex.search(whole(end) + r"\Z", text.rstrip(after), regex.V1)
        )


class CodeCheck(_Check):
    """Python that computes the expected values; it is read, and not run."""

    type: Literal["code"]
    function: Text | None = None
    cases: tuple[tuple[list[Any], Any], ...] = Field(min_length=1)

    def _passes(self, answer: str) -> bool:
        try:
            found = compute(answer, self.function, [args for args, _ in self.cases])
            return all(
                same(value, wanted)
                for value, (_, wanted) in zip(found, self.cases, strict=True)
            )
        except Exception:  # noqa: BLE001  whatever is wrong with the answer, it is wrong
            return False


class RunsCheck(_Check):
    type: Literal["runs"]
    test: Text

    def passes(self, answer: str) -> bool:
        raise NeedsRunError(answer)


Check = Annotated[
    NumberCheck
    | ChoiceCheck
    | ExactCheck
    | ContainsCheck
    | RegexCheck
    | JsonCheck
    | ConstraintsCheck
    | CodeCheck
    | RunsCheck,
    Field(discriminator="type"),
]
