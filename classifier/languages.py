"""Which programming language does a prompt hold or ask for?"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from classifier.code import CodeEvidence

# How people name a language in a request, or a tool that implies one; lower case.
_NAMES: dict[str, str] = {
    "python": "python python3 py django flask fastapi pandas numpy pytest pytorch tensorflow",
    "javascript": "javascript js react reactjs vue vuejs nodejs jquery express jest nextjs svelte puppeteer node",
    "typescript": "typescript ts angular",
    "java": "java junit spring",
    "csharp": "c# csharp unity",
    "cpp": "c++ cpp c++11 c++14 c++17 c++20 c++23",
    "go": "golang",
    "rust": "rust",
    "ruby": "ruby rails",
    "php": "php laravel",
    "swift": "swift swiftui",
    "kotlin": "kotlin",
    "scala": "scala spark",
    "haskell": "haskell",
    "lua": "lua",
    "perl": "perl",
    "julia": "julia",
    "dart": "dart flutter",
    "elixir": "elixir",
    "clojure": "clojure",
    "fortran": "fortran",
    "cobol": "cobol",
    "ocaml": "ocaml",
    "solidity": "solidity",
    "r": "dplyr ggplot ggplot2 tidyverse",
    "matlab": "matlab",
    "vba": "vba",
    "assembly": "assembly asm x86 assembler",
    "powershell": "powershell",
    "bash": "bash zsh shell awk sed grep git kubectl ffmpeg crontab jq linux terminal cron ubuntu unix tmux curl",
    "sql": "sql postgres postgresql mysql sqlite tsql plsql oracle",
    "graphql": "graphql",
    "html": "html html5 webpage",
    "css": "css css3 scss tailwind flexbox stylesheet",
    "svg": "svg",
    "dockerfile": "dockerfile",
    "yaml": "yaml kubernetes ansible helm docker-compose",
    "terraform": "terraform",
    "makefile": "makefile",
    "nginx": "nginx",
    "regex": "regex regexp regexes 正则 正則 正規表現 정규식 正则表达式",
    "spreadsheet": "excel vlookup xlookup spreadsheet spreadsheets sheets",
    "pseudocode": "pseudocode",
}
_LANGUAGE_OF = {name: language for language, names in _NAMES.items() for name in names.split()}
# Ordinary letters and words in lower case.
_CASED = {"Go": "go", "R": "r", "C": "c", "GO": "go"}
_PHRASES = (
    ("json-schema", ("json", "schema")),
    ("regex", ("regular", "expression")),
    ("regex", ("expresión", "regular")),
    ("regex", ("expression", "régulière")),
    ("regex", ("regulären", "ausdruck")),
    ("yaml", ("github", "actions")),
    ("yaml", ("docker", "compose")),
    ("html", ("landing", "page")),
)
_FENCE_TAGS = {
    "py": "python", "python3": "python", "js": "javascript", "jsx": "javascript", "ts": "typescript", "tsx": "typescript",
    "c++": "cpp", "cc": "cpp", "h": "c", "cs": "csharp", "c#": "csharp", "sh": "bash", "shell": "bash", "zsh": "bash",
    "console": "bash", "golang": "go", "rs": "rust", "rb": "ruby", "yml": "yaml", "ps1": "powershell", "kt": "kotlin",
    "docker": "dockerfile", "patch": "diff", "postgresql": "sql", "mysql": "sql", "tf": "terraform", "hs": "haskell",
}  # fmt: skip
_NOT_LANGUAGES = frozenset({"json", "text", "txt", "output", "csv", "log", "plaintext", "code", "markdown", "md"})
# (wider, narrower): code in the narrower language also has the marks of the wider one.
_DIALECTS = (("javascript", "typescript"), ("c", "cpp"), ("html", "php"), ("html", "javascript"))
_DIALECT_VOTES = 2.0
_NAMED_BONUS = 3.0  # for a language that the prose names, beside what the code shows


def programming_language(cased: list[str], words: list[str], code: CodeEvidence) -> str | None:
    """Return the id of the language of the code held or, where none is held, asked for; None where it is left open.

    Args:
        cased: The words of the prompt's prose.
        words: The same in lower case.
        code: What was found of code.
    """
    named = _named(cased, words)
    if not code.present:
        return named[0] if named else None
    if code.fence_tag and code.fence_tag not in _NOT_LANGUAGES:
        return _FENCE_TAGS.get(code.fence_tag, code.fence_tag)
    votes = dict(code.votes)
    for wider, narrower in _DIALECTS:
        if code.solo_votes.get(narrower, 0.0) >= _DIALECT_VOTES:
            votes[narrower] = votes.get(narrower, 0.0) + votes.pop(wider, 0.0)
    for language in named:
        if language in votes or not votes:
            votes[language] = votes.get(language, 0) + _NAMED_BONUS
    return max(votes, key=votes.__getitem__) if votes else None


def _named(cased: list[str], words: list[str]) -> list[str]:
    """Return the languages that prose names, phrases first, then in their order."""
    present = set(words)
    named = [
        language
        for language, (first, second) in _PHRASES
        if first in present and second in present and (first, second) in pairwise(words)
    ]
    named += [
        language
        for token, word in zip(cased, words, strict=True)
        if (language := _CASED.get(token) or _LANGUAGE_OF.get(word))
    ]
    return named
