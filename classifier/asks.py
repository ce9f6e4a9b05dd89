"""Does a prompt ask for code: is a good answer mainly code, a command, a query, a regex or configuration?

Writing, completing, fixing, porting, testing and refactoring are; explaining, reviewing and tracing are not. Patterns read
the roles of the words (``vocabulary``) of the prose around any code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from classifier.vocabulary import STOP

if TYPE_CHECKING:
    from classifier.code import CodeEvidence

THRESHOLD = 3.0  # log-odds


@dataclass(frozen=True, slots=True)
class RolePattern:
    """Evidence in the order of the roles of words.

    Attributes:
        name: For the person who reads why.
        needs: Roles of which it needs at least one, for speed.
        pattern: Searched in the string of roles.
    """

    name: str
    needs: frozenset[str]
    pattern: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class WeightedPattern(RolePattern):
    """Evidence with a weight set by hand.

    Attributes:
        weight: Log-odds.
    """

    weight: float


AnyPattern = TypeVar("AnyPattern", bound=RolePattern)


def role_pattern(name: str, needs: str, pattern: str) -> RolePattern:
    """Return a pattern; in it ``_`` stands for any one word within a sentence."""
    return RolePattern(name, frozenset(needs), _compiled(pattern))


def _weighted(name: str, weight: float, needs: str, pattern: str) -> WeightedPattern:
    return WeightedPattern(name, frozenset(needs), _compiled(pattern), weight)


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("_", "[^|]"))


def found_in(roles: str, table: tuple[AnyPattern, ...]) -> list[AnyPattern]:
    """Return the patterns of a table that match the roles of a prompt's words."""
    present = set(roles)
    return [p for p in table if not p.needs.isdisjoint(present) and p.pattern.search(roles)]


_ASKS = (
    _weighted("asks: code noun and its purpose", 3.2, "Nn", r"^_?N[tP]|^L_?n[tP]"),
    _weighted(
        "asks: build verb, code noun",
        3.4,
        "nN",
        r"B[^|af]{0,3}[nN]|[nN]_{0,6}B(?:$|\|)|L_?nB|B[^|anNf]{0,5}[Ll][^|af]{0,2}[nN]",
    ),
    _weighted("asks: build verb before a code noun", 1.6, "B", r"B[^|af]{0,12}[nN]"),
    _weighted("asks: nothing but code", 2.2, "N", r"[BMi]_{0,10}N"),
    _weighted("asks: in a language", 2.6, "Ll", r"[BMi][^|a]{0,25}[Pt]_?L|[BMvmi][^|a]{0,14}P_?[Ll](?:_|\||$)"),
    _weighted("asks: build verb, language", 2.2, "L", r"B[^|a]{0,4}L"),
    _weighted("asks: language, code noun", 1.8, "nN", r"[Ll]_{0,2}[nN]"),
    _weighted("asks: starts with code noun", 2.2, "nN", r"^[.P]?[Ll]_?[nN]|^_{0,2}N"),
    _weighted("asks: named and needed", 2.0, "nN", r"u_?BN|uB_?N|^_{0,2}n_{0,6}g?$"),
    _weighted("asks: implement", 3.6, "i", r"(?:^|\|)_{0,5}i_{0,8}[cnNLl]|[cnNLl]_{0,8}i(?:$|\|)|L_{0,2}i"),
    _weighted("asks: code noun in a language", 2.4, "Ll", r"[nN]_{0,6}[Pt]_?L|[nN]P_?[Ll]"),
    _weighted(
        "asks: how to, in a language",
        3.0,
        "Ll",
        r"H_{0,3}[vMBcmi]_{0,14}P_?[Ll]|H_{0,3}[vMBc]_{0,3}L|^[Ll][^|]{0,2}[:v|]{1,2}",
    ),
    _weighted("asks: imperative, in a language", 1.5, "Ll", r"^.?[vMBcmi]_{0,14}P_?[Ll]"),
    _weighted("asks: which command", 2.8, "nN", r"W_{0,4}[nN][Pt]v|W_{0,4}[Ll]n|[nN]t[vcMB]"),
    _weighted("things that programs work on", 1.0, "c", r"[nNL]_{0,20}c"),
    _weighted("more things that programs work on", 0.8, "c", r"[nNL]_{0,20}c_{0,12}c"),
    _weighted("names a language", 0.8, "L", r"L"),
    _weighted("starts with a build verb", 0.6, "BM", r"^[^|]{0,4}[BM]"),
    _weighted("writes prose", -3.2, "a", r"[BO][^|nN]{0,9}a(?!_?[LlnN])"),
    _weighted("another kind of program", -2.8, "n", r"z_{0,6}n|n_{0,8}z|na"),
    _weighted("asks to explain", -2.2, "XW", r"(?:^|\|)_{0,3}X|(?:^|\|)W_{0,6}X|(?:^|\|)W"),
    _weighted("role-play", -4.0, "R", r"^_{0,5}R"),
    _weighted("mathematics", -1.5, "m", r"m_{0,8}m_{0,8}m"),
)
_ON_CODE = (
    _weighted("asks: change the code", 3.6, "M", r"M"),
    _weighted("asks: how to change it", 2.5, "H", r"H_{0,5}[MB]"),
    _weighted("asks: and change it", 2.2, "M", r"_M_{0,2}(?:\||$)"),
    _weighted("asks: build from the code", 3.2, "B", r"(?:^|\|)_{0,5}B"),
    _weighted("asks to explain", -2.4, "XE", r"(?:^|\|)_{0,4}X|(?:^|\|)_{0,2}E"),
    _weighted("question about the code", -2.0, "W", r"(?:^|\|)_{0,1}W"),
    _weighted("role-play", -6.0, "R", r"^_{0,5}R"),
)
_NO_CODE = (
    "no code",
    "without code",
    "without any code",
    "without using any code",
    "not write code",
    "not write any code",
    "not include code",
)
_STUB = re.compile(r"(?:\"\"\"|'''|[:{]|# .*|// .*|\bpass|\.\.\.|TODO.*)\s*$")
_UNFINISHED = (
    "TODO",
    ">>> ",
    "your code here",
    "Your code here",
    "our code should",
    "should pass these tests",
    "implement me",
)
_MENTIONS = frozenset("nNLli")  # without code, only what is named can be asked for
_PROSE_WORDS = 3  # fewer before or after code are no instruction
_STUB_WEIGHT = 4.0
_NO_CODE_WEIGHT = -6.0


def weigh_request(text: str, roles: str, code: CodeEvidence) -> tuple[float, tuple[str, ...]]:
    """Return the log-odds that a prompt asks for code (0 is undecided) and the names of the evidence.

    Args:
        text: The whole prompt.
        roles: Of the words of its prose.
        code: What was found of code in the prompt.
    """
    if not code.present and _MENTIONS.isdisjoint(roles):
        return -THRESHOLD, ()
    found = found_in(roles, _ASKS)
    score = sum(p.weight for p in found)
    names = [p.name for p in found if p.weight > 1]
    if code.present:
        on_code = found_in(roles, _ON_CODE)
        about = sum(p.weight for p in on_code)
        names += [p.name for p in on_code if p.weight > 1]
        score = max(score, 0.0) + about if about > 0 else min(score, THRESHOLD) + about
        stub = len(roles.replace(STOP, "")) < _PROSE_WORDS and _STUB.search(text[-200:])
        if stub or any(mark in text for mark in _UNFINISHED):
            score += _STUB_WEIGHT
            names.append("asks: unfinished code")
    instruction = f"{text[:500]} {text[-300:]}".lower()
    if any(phrase in instruction for phrase in _NO_CODE):
        score += _NO_CODE_WEIGHT
    return score - THRESHOLD, tuple(dict.fromkeys(names))
