"""Tells right answers from wrong ones. No check raises or hangs, whatever an answer says."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import jsonschema_rs
import regex
from pydantic import Field, field_validator, model_validator

from router.profiling.answer_text import (
    CLOSING,
    EDGES,
    bare,
    count_bullets,
    count_sentences,
    count_words,
    first_json,
    has_words,
    last_number,
    normal,
    plain_signs,
    word_pattern,
)
from router.profiling.calls import BAD_VALUE_ERRORS, ExpectedCall, are_right
from router.profiling.check_base import REGEX_S, AnswerCheck, Text
from router.profiling.equality import is_same
from router.profiling.long_checks import (
    ItemsCheck,
    LinesCheck,
    ProgramCheck,
    StepsCheck,
    TableCheck,
)
from router.profiling.model_answer import ModelAnswer
from router.profiling.safe_code import compute

SAYS_ANSWER = (
    r"(?i:\banswer(?: is| would be| must be|:| =)"
    r"(?: clearly| option| choice|:| the)*[ (\['\n]*)"
)
COMMA = "[,\uff0c\u3001\u060c]"
MARKUP = r"\\(?:boxed|text|textbf|mathrm)\b|[*_`{}$\"]"

Count = Annotated[int, Field(ge=0)] | None


class NeedsRunError(Exception):
    """The check runs the answer, which is not done here."""


class NumberCheck(AnswerCheck):
    """The last number, or the last that is in a box."""

    type: Literal["number"]
    value: float = Field(allow_inf_nan=False)
    tolerance: float = Field(default=0, ge=0, allow_inf_nan=False)

    def _passes(self, answer: str) -> bool:
        number = last_number(answer)
        is_equal = math.isclose(number, self.value, rel_tol=1e-9, abs_tol=1e-12)
        return is_equal or abs(number - self.value) <= self.tolerance


class ChoiceCheck(AnswerCheck):
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
        text = regex.sub(MARKUP, "", plain_signs(answer)).strip()
        # A longer option may have a shorter one in it.
        options = sorted(self.options, key=len, reverse=True)
        bare_answer = text.strip(CLOSING + "()[]'").casefold()
        for option in options:
            if bare_answer == option.casefold():
                return option == self.value
        return _named_options(text, options) == {self.value}


def _named_options(text: str, options: list[str]) -> set[str]:
    """Return the options that are said to be the answer; where none is, the first that is named."""
    any_option = "|".join(
        f"(?P<o{number}>{_option_pattern(option)})"
        for number, option in enumerate(options)
    )
    matches = list(regex.finditer(f"{SAYS_ANSWER}(?:{any_option})", text, regex.V1))
    if not matches:
        matches = list(regex.finditer(any_option, text, regex.V1))[:1]
    numbers = [int(str(match.lastgroup)[1:]) for match in matches]
    return {options[number] for number in numbers}


def _option_pattern(option: str) -> str:
    """Return a pattern of an option; of a letter, where it is no article and no part of a word."""
    is_letter = len(option) == 1 and option.isascii() and option.isalpha()
    if not is_letter:
        return f"(?i:{word_pattern(option)})"
    no_article = ""
    if option in "AIai":
        no_article = r"(?!\s+(?!(?:because|since|as|is|and|with)\b)\p{Ll})"
    upper = rf"{option.upper()}(?!\w|'\w)"
    lower = rf"{option.lower()}(?=[.):]|\Z)"
    return rf"(?<!\w'|[\w.])(?:{upper}|{lower}){no_article}"


class ExactCheck(AnswerCheck):
    """The complete answer, but for case, quotes, white space, emphasis and closing punctuation."""

    type: Literal["exact"]
    values: tuple[Text, ...] = Field(min_length=1)

    def _passes(self, answer: str) -> bool:
        return bare(answer) in {bare(value) for value in self.values}


class ContainsCheck(AnswerCheck):
    """Texts that are in the answer, as complete words, and texts that are not."""

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
        normal_answer = normal(answer)
        if not all(has_words(normal_answer, text) for text in self.all):
            return False
        if self.any and not any(has_words(normal_answer, text) for text in self.any):
            return False
        return not any(has_words(normal_answer, text) for text in self.none)


class RegexCheck(AnswerCheck):
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


class JsonCheck(AnswerCheck):
    """The first JSON value of the answer: its schema, and values by JSON pointer."""

    type: Literal["json"]
    json_schema: dict[str, Any] = Field(default={}, alias="schema")
    values: dict[str, Any] = Field(default={})

    @field_validator("json_schema")
    @classmethod
    def _is_schema(cls, schema: dict[str, Any]) -> dict[str, Any]:
        # A schema that is none raises a ValueError that says what is wrong.
        jsonschema_rs.validator_for(schema, offline=True)
        return schema

    @field_validator("values")
    @classmethod
    def _are_pointers(cls, values: dict[str, Any]) -> dict[str, Any]:
        for pointer in values:
            if pointer and not pointer.startswith("/"):
                raise ValueError(f"{pointer!r} is no JSON pointer: they begin with /")
        return values

    def _passes(self, answer: str) -> bool:
        try:
            value = first_json(answer)
            validator = jsonschema_rs.validator_for(self.json_schema, offline=True)
            return validator.is_valid(value) and self._has_values(value)
        except BAD_VALUE_ERRORS:
            return False

    def _has_values(self, value: Any) -> bool:
        return all(
            is_same(_value_at(value, pointer), wanted_value)
            for pointer, wanted_value in self.values.items()
        )


def _value_at(value: Any, pointer: str) -> Any:
    """Return the value that a JSON pointer leads to; ``LookupError``, ``ValueError``, ``TypeError``: it leads nowhere."""
    for part in pointer.split("/")[1:]:
        is_index = isinstance(value, list)
        key = int(part) if is_index else part.replace("~1", "/").replace("~0", "~")
        value = value[key]
    return value


class ConstraintsCheck(AnswerCheck):
    """Counts, beginning, end, words and case of the answer."""

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
        text = normal(answer)
        return (
            self._has_length(answer)
            and self._has_counts(answer)
            and self._is_framed(text)
            and all(has_words(text, word) for word in self.include)
            and not any(has_words(text, word) for word in self.exclude)
            and self._has_style(answer)
        )

    def _has_length(self, answer: str) -> bool:
        words = count_words(answer)
        if words < max(self.min_words or 0, 1):
            return False
        return self.max_words is None or words <= self.max_words

    def _has_counts(self, answer: str) -> bool:
        lines = [line for line in answer.splitlines() if line.strip()]
        paragraphs = regex.split(r"\n\s*\n", answer)
        wanted_and_counted = (
            (self.sentences, count_sentences(answer)),
            (self.bullets, count_bullets(answer)),
            (self.lines, len(lines)),
            (self.paragraphs, len(paragraphs)),
        )
        return all(
            wanted_value in {None, counted}
            for wanted_value, counted in wanted_and_counted
        )

    def _is_framed(self, text: str) -> bool:
        """Tell whether a text in normal form begins and ends as wanted, but for quotes, emphasis and punctuation."""
        start = normal(self.starts_with or "")
        end = normal(self.ends_with or "")
        ignored_before = "" if start[:1] in EDGES else EDGES + "#>"
        ignored_after = EDGES if end[-1:] in CLOSING else EDGES + CLOSING
        has_start = regex.match(
            word_pattern(start), text.lstrip(ignored_before), regex.V1
        )
        has_end = regex.search(
            word_pattern(end) + r"\Z", text.rstrip(ignored_after), regex.V1
        )
        return has_start is not None and has_end is not None

    def _has_style(self, answer: str) -> bool:
        if self.lowercase and answer != answer.lower():
            return False
        if self.uppercase and answer != answer.upper():
            return False
        return not self.no_commas or regex.search(COMMA, answer) is None


class CodeCheck(AnswerCheck):
    """Python that computes the expected values; it is read, and not run."""

    type: Literal["code"]
    function: Text | None = None
    cases: tuple[tuple[list[Any], Any], ...] = Field(min_length=1)

    def _passes(self, answer: str) -> bool:
        arguments = [call_arguments for call_arguments, _ in self.cases]
        wanted_values = [wanted_value for _, wanted_value in self.cases]
        try:
            values = compute(answer, self.function, arguments)
            pairs = zip(values, wanted_values, strict=True)
            return all(is_same(value, wanted_value) for value, wanted_value in pairs)
        except Exception:  # noqa: BLE001  whatever is wrong with the answer, it is wrong
            return False


class RunsCheck(AnswerCheck):
    """Python that comes to the end of a test, which is run elsewhere."""

    type: Literal["runs"]
    test: Text

    def passes(self, answer: ModelAnswer) -> bool:
        raise NeedsRunError(answer.text)


TextCheck = (
    NumberCheck
    | ChoiceCheck
    | ExactCheck
    | ContainsCheck
    | RegexCheck
    | JsonCheck
    | ConstraintsCheck
    | CodeCheck
    | TableCheck
    | StepsCheck
    | LinesCheck
    | ItemsCheck
    | ProgramCheck
)


class CallsCheck(AnswerCheck):
    """The functions that an answer calls and their arguments; where none is to be called, its text.

    Attributes:
        type: ``calls``.
        calls: The right calls, in any order; empty: none is right, and the answer must have text.
        text: What the text must be; only where no call is right. None: any text.
    """

    type: Literal["calls"]
    calls: tuple[ExpectedCall, ...]
    text: Annotated[TextCheck, Field(discriminator="type")] | None = None

    @model_validator(mode="after")
    def _has_one_kind_of_answer(self) -> CallsCheck:
        if self.calls and self.text is not None:
            raise ValueError("text is checked only where calls is empty")
        return self

    def passes(self, answer: ModelAnswer) -> bool:
        """Tell whether an answer makes the right calls, or has the right text where none is to be made.

        Text beside calls does not count: models may say what they are about to do.
        """
        if not are_right(answer.tool_calls, self.calls):
            return False
        if self.calls:
            return True
        if self.text is None:
            return bool(answer.text.strip())
        return self.text.passes(answer)


Check = Annotated[
    TextCheck | CallsCheck | RunsCheck,
    Field(discriminator="type"),
]
