"""What the router knows about a prompt: one result, and the one function that makes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from classifier.asks import weigh_request
from classifier.classes import LONG_TOKENS, judge, judge_code, judge_long
from classifier.code import CodeEvidence, find_code
from classifier.evidence import find_evidence
from classifier.kinds import PromptClass  # noqa: TC001  read at run time by those who write features down
from classifier.languages import programming_language
from classifier.natural import foreign_log_odds
from classifier.vocabulary import roles_of, tokenize
from classifier.weights import shipped_weights

if TYPE_CHECKING:
    from classifier.tokens import TokenCounter

HEAD_CHARS = 350  # of the prose, that are read for what is asked: instructions stand at either end
TAIL_CHARS = 200
MAX_SIGNALS = 6
MIXED_LINES = 2


@dataclass(frozen=True, slots=True)
class PromptFeatures:
    """A prompt's features.

    Attributes:
        chars: Length in code points.
        words: Parts between white space.
        tokens: Of the prompt alone, without chat template.
        tokens_exact: Whether ``tokens`` is the model's own count rather than an estimate.
        contains_code: The prompt holds source text, a command, a query, a diff, a stack trace or the like.
        asks_for_code: A good answer is mainly code.
        language: Programming language held or asked for, lower case; None where there is none or it is left open.
        prompt_class: The kind of work.
        confidence: Probability that ``prompt_class`` is right, 0..1; of ``unknown``, that the likeliest class would have
            been wrong.
        signals: Names of the evidence, for people.
    """

    chars: int
    words: int
    tokens: int
    tokens_exact: bool
    contains_code: bool
    asks_for_code: bool
    language: str | None
    prompt_class: PromptClass
    confidence: float
    signals: tuple[str, ...]

    @property
    def has_code(self) -> bool:
        """Tell whether the prompt holds or asks for code."""
        return self.contains_code or self.asks_for_code


def extract(text: str, counter: TokenCounter, context_tokens: int = 0) -> PromptFeatures:
    """Read a prompt. Pure; the time grows with the length of the text at most.

    Args:
        text: The prompt, any string.
        counter: Counts tokens as the model does.
        context_tokens: Of all that the model reads, where the text is only its last part.
    """
    tokens = counter.count(text)
    read = read_prompt(text)
    weights = shipped_weights()
    length = max(tokens, context_tokens)
    if read.has_code:
        signals = (*read.code.signals[:4], *(read.asked if read.asks >= 0 else ()))
        judgement = judge_code(read.code_log_odds, signals, weights)
    elif length > LONG_TOKENS:
        judgement = judge_long(length, weights)
    else:
        judgement = judge(read.evidence(), weights)
    return PromptFeatures(
        chars=len(text),
        words=len(text.split()),
        tokens=tokens,
        tokens_exact=counter.exact,
        contains_code=read.code.present,
        asks_for_code=read.asks >= 0,
        language=programming_language(read.cased, read.words, read.code) if read.has_code else None,
        prompt_class=judgement.prompt_class,
        confidence=judgement.confidence,
        signals=judgement.signals[:MAX_SIGNALS],
    )


@dataclass(frozen=True, slots=True)
class PromptReading:
    """What the words and marks of a prompt say, before any class is judged.

    Attributes:
        excerpt: Head and tail of the prose, which are read for what is asked.
        cased: Its words.
        words: The same in lower case.
        roles: One letter for each.
        code: What was found of code in the prompt.
        asks: Log-odds that the prompt asks for code.
        asked: Names of the evidence for that.
    """

    excerpt: str
    cased: list[str]
    words: list[str]
    roles: str
    code: CodeEvidence
    asks: float
    asked: tuple[str, ...]

    @property
    def has_code(self) -> bool:
        """Tell whether the prompt holds or asks for code."""
        return self.code_log_odds >= 0

    @property
    def code_log_odds(self) -> float:
        """Return the log-odds that the prompt holds or asks for code."""
        return max(self.code.log_odds, self.asks)

    def evidence(self) -> dict[str, float]:
        """Return the evidence of the prompt's class by name, 0..1 each."""
        foreign = foreign_log_odds(self.excerpt, self.words)
        return find_evidence(self.excerpt, self.roles, foreign=foreign, code=self.code_log_odds)


def read_prompt(text: str) -> PromptReading:
    """Read a prompt's words and marks. Pure."""
    lines = text.split("\n")
    code = find_code(text, lines)
    prose = _prose(lines, code) if code.present else text
    excerpt = prose if len(prose) <= HEAD_CHARS + TAIL_CHARS else f"{prose[:HEAD_CHARS]}\n{prose[-TAIL_CHARS:]}"
    cased = tokenize(excerpt)
    words = list(map(str.lower, cased))
    roles = roles_of(words)
    asks, asked = weigh_request(text, roles, code)
    return PromptReading(excerpt, cased, words, roles, code, asks, asked)


def _prose(lines: list[str], code: CodeEvidence) -> str:
    """Return the lines around code: not in a fence or comment, not indented, without the shape or the marks of code."""
    if len(lines) <= MIXED_LINES:  # code and request share a line
        return "\n".join(lines)
    kept: list[str] = []
    fenced = False
    for number, line in enumerate(lines):
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        elif (
            not fenced
            and number not in code.code_lines
            and not line.startswith((" ", "\t", "/*", "//", "#", "*", "<", "}"))
        ):
            kept.append("" if line.endswith(("{", "}", ";")) else line)
    return "\n".join(kept)
