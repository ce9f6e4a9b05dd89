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

from classifier.inlines import AGAINST, CALL, INLINES, LITERAL_LIMIT, LITERALS
from classifier.lineshapes import LINE_SHAPES

THRESHOLD = 3.0  # log-odds
PLAIN = 10.0  # of evidence, from which on the rest of the text is not read
PLAIN_LINES = 30.0  # of evidence, from which on no more lines are read
INLINE_HEAD, INLINE_TAIL = 600, 300  # characters of a text that are searched for code within lines
LINE_CHARS = 160  # of a line that are matched
MAX_LINES = 40  # of a text that are matched: the first half, and the rest evenly
SECOND_FIND = 0.4  # of a pattern within lines, against the first
MAX_FINDS = 4  # of one line shape that count
_FENCE_WEIGHT = 5.0
_OPEN_FENCE_WEIGHT = 1.0
_ENDING_WEIGHT = 0.7  # of each line that ends like a statement
_MAX_ENDINGS = 5
_BRACE_WEIGHT = 0.5

_SHAPES = re.compile("|".join(f"(?P<_{number}>{shape.pattern})" for number, shape in enumerate(LINE_SHAPES)))
_MARK = re.compile(r"[{}<>=$\\|@`\[\]&^~]")
_CALL = re.compile(r"(?<=\w)\(")
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
_LITERAL_MARKS = "(=<[{&|:$+!_"
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


def _by_mark() -> dict[str, list[tuple[str, float, str]]]:
    """Return the literals by a mark that each has, so that a text without the mark is not searched for them."""
    grouped: dict[str, list[tuple[str, float, str]]] = {}
    for entry in LITERALS:
        mark = next((mark for mark in _LITERAL_MARKS if mark in entry[0]), "")
        grouped.setdefault(mark, []).append(entry)
    return grouped


_LITERALS_BY_MARK = _by_mark()


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
        calls = text.count("(") > text.count(" (") + text.count("\n(") + text.startswith("(")
        chars = set(text)
        _weigh_literals(text, chars, tally, calls=calls)
        if tally.score < PLAIN:
            _weigh_inlines(_ends(text), chars, tally, calls=calls)
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
    first = line.split(None, 1)[0]
    return (
        first.rstrip(":") in _FIRST_WORDS
        or ":" in first
        or not line[0].isalnum()
        or line[-1] == ";"
        or "_" in line
        or "::" in line
        or " -" in line
        or _MARK.search(line) is not None
        or ("(" in line and _CALL.search(line) is not None)
    )


def _sample(count: int) -> range | list[int]:
    """Return the numbers of the lines to read: all, or the first half of the allowance and the rest evenly."""
    if count <= MAX_LINES:
        return range(count)
    half = MAX_LINES // 2
    return [*range(half), *(half + (count - half) * step // half for step in range(half))]


def _weigh_literals(text: str, chars: set[str], tally: _Tally, *, calls: bool) -> None:
    """Weigh literals, those with a bracket only in a text that has calls."""
    for mark, literals in _LITERALS_BY_MARK.items():
        if calls if mark == "(" else not mark or mark in chars:
            for literal, weight, languages in literals:
                if chars.issuperset(literal) and literal in text:
                    tally.add(literal.strip(), weight * min(text.count(literal), LITERAL_LIMIT), languages)
    for literal, weight in AGAINST:
        if chars.issuperset(literal) and literal in text:
            tally.score += weight


def _weigh_inlines(text: str, chars: set[str], tally: _Tally, *, calls: bool) -> None:
    """Weigh code within lines, until the answer is plain."""
    marks = {CALL: calls}
    for inline in INLINES:
        for mark in inline.marks:
            if mark not in marks:
                # Most texts lack some character of most marks, which is quicker to see.
                marks[mark] = chars.issuperset(mark) and mark in text
            if marks[mark]:
                break
        else:
            continue
        finds = sum(1 for _ in islice(inline.pattern.finditer(text), LITERAL_LIMIT))
        if finds:
            tally.add(inline.name, inline.weight * (1 + SECOND_FIND * (finds - 1)), inline.languages)
            if tally.score >= PLAIN:
                return
