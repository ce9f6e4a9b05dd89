"""Does a text hold code? Sums the evidence of the tables in ``lineshapes`` and ``inlines`` and stops once the answer is plain.

Code is source text in a programming, query, shell, markup, schema or configuration language, a regular expression, a
spreadsheet formula, a diff, a stack trace or a compiler's error. Data (CSV, JSON, XML), mathematics, log lines and talk
about programming are not.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from classifier.inlines import AGAINST, CALL, INLINES, LITERAL_LIMIT, LITERALS
from classifier.lineshapes import LINE_SHAPES

THRESHOLD = 3.0  # log-odds
PLAIN = 10.0  # of evidence, from which on the rest of the text is not read
PLAIN_LINES = 16.0  # of evidence, from which on no more lines are read
INLINE_HEAD, INLINE_TAIL = 450, 250  # characters of a text that are searched for code within lines
LINE_CHARS = 160  # of a line that are matched
MAX_LINES = 40  # of a text that are matched: the first half, and the rest evenly
SECOND_FIND = 0.4  # of a pattern within lines, against the first
MAX_FINDS = 4  # of one line shape that count
_FENCE_WEIGHT = 5.0
_OPEN_FENCE_WEIGHT = 1.0
_ENDING_WEIGHT = 0.7  # of each line that ends like a statement
_MAX_ENDINGS = 5
_BRACE_WEIGHT = 0.5

if TYPE_CHECKING:
    from collections.abc import Iterable

_SHAPES = re.compile("|".join(f"(?P<_{number}>{shape.pattern})" for number, shape in enumerate(LINE_SHAPES)))
_MARK = re.compile(r"[{}<>=$\\|@`\[\]&^~_(:-](?:(?<=[^(:-])|(?<=\w\()|(?<=::)|(?<= -))")  # also a call, :: or an option
# Of lines without any mark of code, those that start with one of these words are matched.
_FIRST_WORDS = frozenset(
    """
    def class import from return puts end else begin package use using select SELECT insert INSERT update UPDATE
    delete DELETE create CREATE drop DROP alter ALTER WHERE FROM JOIN LEFT INNER GROUP ORDER HAVING LIMIT RUN COPY
    WORKDIR EXPOSE ENTRYPOINT CMD IF FOR WHILE ELSE END ENDIF ENDWHILE REPEAT UNTIL PROCEDURE FUNCTION ALGORITHM
    INPUT OUTPUT PRINT DISPLAY RETURN SET READ BEGIN git npm docker kubectl pip pip3 apt apt-get brew cargo go sudo
    make cd mov push pop fi done esac then do for while if set module require attr_accessor attr_reader Dim Sub
    Function Next Traceback Caused Exception goroutine panic implicit program local elif except switch case default finally try func let var val data instance
    type pragma contract unless print echo pass break continue
    """.split()  # noqa: SIM905
)
_FENCE = re.compile(r"^[ \t]{0,3}(?:```|~~~)[ \t]*([\w+#.-]*)", re.MULTILINE)
_DATA_FENCES = frozenset(
    {
        "csv",
        "json",
        "jsonl",
        "text",
        "txt",
        "plain",
        "md",
        "markdown",
        "latex",
        "tex",
        "log",
        "xml",
        "math",
        "output",
        "tsv",
    }
)
_JSON_LINE = re.compile(r"[\[{]?\s*\"[^\"\n]{1,60}\"\s*:|[\[\]{}],?$")


@dataclass(frozen=True, slots=True)
class CodeEvidence:
    """What was found of code in a text.

    Attributes:
        log_odds: That the text holds code; 0 is undecided.
        votes: Weight by language id.
        solo_votes: Of them, the weight of evidence that tells one language only.
        signals: Names of the evidence, the first found first.
        code_lines: Numbers of the lines that have the shape of code, from 0; not all of a long text.
        fence_tag: The language named at the first fence, lower case; empty where there is none.
    """

    log_odds: float
    votes: dict[str, float]
    solo_votes: dict[str, float]
    signals: tuple[str, ...]
    code_lines: frozenset[int]
    fence_tag: str

    @property
    def present(self) -> bool:
        """Tell whether the text holds code."""
        return self.log_odds >= 0


@dataclass(slots=True)
class _Tally:
    score: float = 0.0
    votes: dict[str, float] = field(default_factory=dict)
    solo_votes: dict[str, float] = field(default_factory=dict)
    signals: dict[str, None] = field(default_factory=dict)

    def add(self, name: str, weight: float, languages: str) -> None:
        self.score += weight
        if name:
            self.signals[name] = None
        several = languages.split()
        for language in several:
            self.votes[language] = self.votes.get(language, 0.0) + weight
        if len(several) == 1:
            self.solo_votes[languages] = self.solo_votes.get(languages, 0.0) + weight


_RARE = "\\^{}[]<>`$|&+!_*#=(-:/%"  # the rarest in prose first


def _by_rare_character(strings: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return strings by a rare character that each has (or none), so that most texts are not searched for most of them."""
    grouped: dict[str, list[str]] = {}
    for string in dict.fromkeys(strings):
        grouped.setdefault(next((c for c in _RARE if c in string), ""), []).append(string)
    return {c: tuple(group) for c, group in grouped.items()}


_LITERAL_VALUES = {literal: (weight, languages) for literal, weight, languages in LITERALS}
_LITERALS_BY_CHARACTER = _by_rare_character(_LITERAL_VALUES)
_AGAINST_VALUES = dict(AGAINST)
_AGAINST_BY_CHARACTER = _by_rare_character(_AGAINST_VALUES)
_MARKS_BY_CHARACTER = _by_rare_character(mark for inline in INLINES for mark in inline.marks if mark != CALL)


def _present(text: str, chars: set[str], grouped: dict[str, tuple[str, ...]]) -> list[str]:
    """Return those of the grouped strings that a text has."""
    return [string for c, group in grouped.items() if not c or c in chars for string in group if string in text]


def find_code(text: str, lines: list[str]) -> CodeEvidence:
    """Weigh a text's evidence of code.

    Args:
        text: Any text.
        lines: The same, split at line feeds.
    """
    tally = _Tally()
    tag = _weigh_fences(text, tally)
    code_lines = _weigh_lines(lines, tally)
    if tally.score < 2 * PLAIN:
        ends = _ends(text)
        calls = ends.count("(") > ends.count(" (") + ends.count("\n(") + ends.startswith("(")
        chars = {c for c in _RARE if c in ends}
        _weigh_literals(ends, chars, tally, calls=calls)
        if tally.score < PLAIN:
            _weigh_inlines(ends, chars, tally, calls=calls)
    return CodeEvidence(tally.score - THRESHOLD, tally.votes, tally.solo_votes, tuple(tally.signals), code_lines, tag)


def _ends(text: str) -> str:
    """Return a text's head and tail; a short one whole."""
    if len(text) <= INLINE_HEAD + INLINE_TAIL:
        return text
    return f"{text[:INLINE_HEAD]}\n{text[-INLINE_TAIL:]}"


def _weigh_fences(text: str, tally: _Tally) -> str:
    """Weigh fenced blocks and return the first one's tag."""
    if "```" not in text and "~~~" not in text:
        return ""
    tags = [match[1].lower() for match in _FENCE.finditer(text)]
    first = next((tag for tag in tags if tag), "")
    if first and first not in _DATA_FENCES:
        tally.add("fenced block", _FENCE_WEIGHT, "")
    elif tags and not first:
        tally.add("", _OPEN_FENCE_WEIGHT, "")
    return first


def _weigh_lines(lines: list[str], tally: _Tally) -> frozenset[int]:
    """Weigh the shapes of lines and return the numbers of those that look like code."""
    found: set[int] = set()
    counts: Counter[int] = Counter()
    endings = braces = json_lines = 0
    for number in _sample(len(lines)):
        line = lines[number].strip()[:LINE_CHARS]
        if not line:
            continue
        last = line[-1]
        endings += last == ";"
        braces += last in "{}" or line[0] == "}"
        if last in "{}[]," and _JSON_LINE.match(line):
            json_lines += 1
            continue
        if not _may_be_code(line):
            continue
        match = _SHAPES.match(line)
        if match is None:
            continue
        found.add(number)
        shape = LINE_SHAPES[int(match.lastgroup[1:])] if match.lastgroup else LINE_SHAPES[0]
        counts[match.lastindex or 0] += 1
        if counts[match.lastindex or 0] <= MAX_FINDS:
            tally.add(shape.name, shape.weight, shape.languages)
        if tally.score > PLAIN_LINES:
            break
    if endings > 1:
        tally.add("lines end in ;", _ENDING_WEIGHT * min(endings, _MAX_ENDINGS), "")
    if braces > 1 and braces > 2 * json_lines:
        tally.add("lines end in braces", _BRACE_WEIGHT * min(braces, _MAX_ENDINGS), "")
    return frozenset(found)


def _may_be_code(line: str) -> bool:
    """Tell whether a line has marks that prose has not, and is worth matching."""
    if not line[0].isalnum() or line[-1] == ";" or _MARK.search(line) is not None:
        return True
    first = line.split(None, 1)[0]
    return ":" in first or first in _FIRST_WORDS


def _sample(count: int) -> range | list[int]:
    """Return the numbers of the lines to read: all, or the first half of the allowance and the rest evenly."""
    if count <= MAX_LINES:
        return range(count)
    half = MAX_LINES // 2
    return [*range(half), *(half + (count - half) * step // half for step in range(half))]


def _weigh_literals(text: str, chars: set[str], tally: _Tally, *, calls: bool) -> None:
    """Weigh literals, those with a bracket only in a text that has calls."""
    for literal in _present(text, chars if calls else chars - {"("}, _LITERALS_BY_CHARACTER):
        weight, languages = _LITERAL_VALUES[literal]
        tally.add(literal.strip(), weight * min(text.count(literal), LITERAL_LIMIT), languages)
    tally.score += sum(map(_AGAINST_VALUES.__getitem__, _present(text, chars, _AGAINST_BY_CHARACTER)))


def _weigh_inlines(text: str, chars: set[str], tally: _Tally, *, calls: bool) -> None:
    """Weigh code within lines, until the answer is plain."""
    marks = {*_present(text, chars, _MARKS_BY_CHARACTER), *([CALL] if calls else [])}
    for inline in INLINES:
        if marks.isdisjoint(inline.marks):
            continue
        finds = sum(1 for _ in islice(inline.pattern.finditer(text), LITERAL_LIMIT))
        if finds:
            tally.add(inline.name, inline.weight * (1 + SECOND_FIND * (finds - 1)), inline.languages)
            if tally.score >= PLAIN:
                return
