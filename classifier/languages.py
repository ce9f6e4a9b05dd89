"""Which programming language is held or asked for? Read only once a prompt is known to have to do with code."""

from __future__ import annotations

import re

from classifier.code import excerpt
from classifier.signals import Signal, signal

# Names, as people write them in a request. One find is decisive unless the code itself says otherwise.
_NAMES: tuple[tuple[str, str], ...] = (
    ("typescript", r"typescript|\bts\b|angular"),
    ("javascript", r"javascript|\bjs\b|node(?:\.?js)|\breact\b|\bvue\b|jquery|express\.js|\bjest\b"),
    ("csharp", r"c#|c-sharp|\.net\b|asp\.net|\bunity\b"),
    ("cpp", r"c\+\+|\bcpp\b"),
    ("java", r"\bjava\b|spring boot|\bjunit\b"),
    ("python", r"\bpython3?\b|\bpandas\b|\bnumpy\b|\bdjango\b|\bflask\b|\bfastapi\b|\bpytest\b|\bpytorch\b|tensorflow"),
    ("go", r"\bgolang\b|\b(?:in|using|a) Go\b"),
    ("rust", r"\b(?i:rust)\b"),
    ("ruby", r"\bruby\b|\brails\b"),
    ("php", r"\bphp\b|\blaravel\b|wordpress"),
    ("swift", r"\bswift(?:ui)?\b"),
    ("kotlin", r"\bkotlin\b"),
    ("scala", r"\bscala\b"),
    ("haskell", r"\bhaskell\b"),
    ("perl", r"\bperl\b"),
    ("lua", r"\blua\b"),
    ("matlab", r"\bmatlab\b"),
    ("r", r"\b(?:in|using) R\b|\bggplot2?\b|\bdplyr\b"),
    ("powershell", r"powershell"),
    ("dockerfile", r"\bdockerfile\b"),
    ("yaml", r"\byaml\b|kubernetes|docker-?compose|github actions?|\bansible\b|helm chart"),
    ("json-schema", r"json schema"),
    ("regex", r"\bregexp?\b|regular expression|正则|正規表現|expresión regular|expression régulière|regulären ausdruck"),
    ("sql", r"\bsql\b|postgres|mysql|sqlite"),
    ("bash", r"\bbash\b|shell (?:script|command|one-?liner)|\blinux command|\bcron|\bawk\b|\bsed\b|\bgrep\b|terminal command|command[- ]line"),
    ("spreadsheet", r"\bexcel\b|google sheets|spreadsheet|vlookup"),
    ("css", r"\bcss\b"),
    ("html", r"\bhtml5?\b|web ?page|landing page"),
    ("svg", r"\bsvg\b"),
    ("assembly", r"\bassembly\b|\bx86\b|\bmips\b|\basm\b"),
    ("pseudocode", r"pseudo-?code"),
    ("c", r"\b(?:in|using) C\b(?![+#])|\bC (?:program|function|code)\b"),
)

_SYNTAX: tuple[tuple[str, tuple[Signal, ...]], ...] = (
    ("diff", (signal("", r"^@@ -\d|^diff --git |^(?:\+\+\+|---) [ab]/", 9),)),
    ("python", (
        signal("", r"^[ \t]*(?:async )?def \w+\(.*(?::|,)[ \t]*$|\bdef \w+\([^)\n]*\):|^[ \t]*from [\w.]+ import |^[ \t]*elif |\bself\.|^[ \t]*except\b.*:|Traceback \(most|File \"[^\"\n]+\", line|__\w+__|^assert \w+\(|^import (?:re|os|sys|math|json|numpy|pandas|random|heapq|time|torch)\b|\bprint\(|\blambda \w+:|\bNone\b|>>> ", 2, 4),
    )),
    ("java", (
        signal("", r"\bpublic (?:static |final |abstract )*(?:class|void|interface|int|boolean|String)\b|System\.out\.|^import java|^package [\w.]+;|\bprivate (?:final |static )*\w+(?:<[\w<>, ]+>)? \w+|@Override|\bnew ArrayList|\bString\[\]|^[ \t]+at [\w.$]+\(\w+\.java", 2, 4),
    )),
    ("cpp", (
        signal("", r"#include <(?:iostream|vector|string|algorithm|cassert|map|memory|cmath|array|queue|stack|set|cstdint)>|\bstd::|\bcout\b|using namespace|\btemplate ?<|::\w+\(|\bvector<|\bnullptr\b", 2, 4),
    )),
    ("c", (signal("", r"#include <(?:stdio|stdlib|string|unistd|stdint|math|ctype)\.h>|\bprintf\(|\bmalloc\(|\bscanf\(|\bint main\(|\bstruct \w+ ?\*|\bchar ?\*", 1.6, 4),)),
    ("csharp", (signal("", r"^using System|Console\.\w+\(|\bpublic \w+ \w+ ?\{ ?get|\basync Task|\bstring\[\] args|\bvar \w+ = new\b|\bIEnumerable<", 2.2, 4),)),
    ("typescript", (
        signal("", r"\b(?:const|let|function|private|public|readonly) ?\w*\(?[^\n=]*: ?(?:string|number|boolean|void|any|unknown|\w+\[\]|Promise<)|^(?:export )?(?:interface|type) \w+(?:<\w+>)? ?[={]|\): (?:void|string|number|boolean|Promise|\w+\[\])|\bas const\b|TS\d{4}", 2.6, 4),
    )),
    ("javascript", (
        signal("", r"\b(?:const|let|var) [\w{\[][^\n:]*=|=== |=> ?[{(\w]|console\.\w+\(|\bfunction ?\w*\(|require\(['\"]|\bexport (?:default|const|class)|\bdocument\.|\bawait \w|module\.exports|import .* from ['\"]|^ \* @(?:param|return)", 1.5, 4),
    )),
    ("go", (signal("", r"^package \w+$|^func (?:\(\w+ \*?\w+\) )?\w+\(| := |\bfmt\.|\bgoroutine\b|\bchan \w|\berr != nil", 2, 4),)),
    ("rust", (signal("", r"\bfn \w+(?:<[^>\n]*>)?\(.*|\blet mut\b|\bimpl\b.* for |println!|&mut |&str\b|-> (?:Result|Option)<|\bpanicked at|error\[E\d{4}\]|\buse std::", 2, 4),)),
    ("ruby", (signal("", r"^[ \t]*def \w+[\w?!]*(?:\(.*\))?[ \t]*$|^[ \t]*end[ \t]*$|\bputs |\bdo \|\w+|\brequire ['\"]|\.each\b|attr_\w+", 1.8, 4),)),
    ("php", (signal("", r"<\?php|\$this->|\$\w+ ?= |\becho \$|\bfunction \w+\(\$", 1.8, 4),)),
    ("perl", (signal("", r"\bmy [\$@%]\w|\buse strict|=~ |\$_\b", 2.6, 3),)),
    ("swift", (signal("", r"\bfunc \w+\(.*\) (?:->|\{)|\bguard let|\bif let\b|\blet \w+: \w+ =|\bimport (?:UIKit|SwiftUI|Foundation)|\bvar body: some", 2, 4),)),
    ("kotlin", (signal("", r"\bfun \w+\(|\bval \w+(?:: \w+)? =|\bdata class\b|\bwhen ?\(|\?: |println\(", 2, 4),)),
    ("scala", (signal("", r"\bdef \w+(?:\[\w+\])?\(.*\): \w+.* =|\bobject \w+|\bcase class\b|\bval \w+ = ", 2, 4),)),
    ("haskell", (signal("", r"^\w+ :: |\bwhere$|^import qualified|^data \w+ = |<\$>|>>= ", 2.5, 4),)),
    ("r", (signal("", r"<- function\(|<- c\(|\blibrary\(|%>%|\bdata\.frame\(|<- \w+\(", 2.5, 4),)),
    ("lua", (signal("", r"\blocal (?:function )?\w+ ?[=(]|\bthen$|~= |\bend$|\.\. ", 1.4, 4),)),
    ("matlab", (signal("", r"^function (?:\[?[\w, ]+\]? ?= ?)?\w+\(|\bzeros\(|\bfprintf\(|^%|\.\*|\bend;?$", 1.3, 4),)),
    ("sql", (signal("", r"\b(?:SELECT|select)\b[^;]{1,200}?\b(?:FROM|from)\b|\bINSERT INTO|\bCREATE TABLE|\bcreate table|\bGROUP BY|\bJOIN\b|\bALTER TABLE|\bDELETE FROM", 2.4, 4),)),
    ("bash", (signal("", r"\A#!/bin/(?:ba)?sh|^[$#] \w|\becho [\"$]|\bfi$|\bdone$|\$\{?\w+\}?|^(?:sudo|git|docker|kubectl|curl|find|grep|chmod|apt|npm|pip) |\| ?(?:grep|awk|sed|sort|xargs)", 1.6, 4),)),
    ("powershell", (signal("", r"\b(?:Get|Set|New|Remove|Where|ForEach)-[A-Z]\w+|\$\w+ = |-eq\b", 2, 4),)),
    ("dockerfile", (signal("", r"^(?:FROM|RUN|COPY|ENTRYPOINT|WORKDIR|CMD|EXPOSE) ", 2, 4),)),
    ("yaml", (signal("", r"^(?:apiVersion|kind|services|jobs|steps|on|metadata|spec):|^[ \t]+- (?:name|uses|run|image):", 2, 4),)),
    ("css", (signal("", r"^[ \t]*(?:[.#@]?[\w-]+[ ,>:.#\w-]*) ?\{\s*$|^[ \t]*[a-z-]+: ?[^;\n]+;[ \t]*$|\b\d+px\b|@media", 1.5, 4),)),
    ("html", (signal("", r"</?(?:div|html|body|ul|li|table|form|input|button|h[1-6]|p|a|head|section)\b[^>\n]*>|<!DOCTYPE", 1.8, 4),)),
    ("svg", (signal("", r"<svg\b|<path\b|<rect\b|viewBox=", 2.5, 3),)),
    ("regex", (signal("", r"\\[dwsb][+*?{]|\(\?[:=!<]|\[\^?[a-z0-9]-[a-z0-9][^\]\n]*\][+*{]", 1.5, 3),)),
    ("spreadsheet", (signal("", r"(?:^|[\s`\"'(:])=[A-Z]{2,15}\(|\b[A-Z]{1,2}\$?\d+:\$?[A-Z]{1,2}\$?\d+", 2.5, 3),)),
    ("assembly", (signal("", r"^[ \t]*(?:mov|push|pop|jmp|cmp|lea|call|ret|ldr|str)[lq]?\b|%(?:eax|rax|rsp|rbp)|\beax\b|^section \.", 2, 4),)),
    ("pseudocode", (signal("", r"^[ \t]*(?:PROCEDURE|FUNCTION|ALGORITHM|BEGIN|IF .* THEN|WHILE .* DO|FOR .* (?:TO|DO)|END ?\w*)\b|←", 1.8, 4),)),
)
_FENCES = {
    "py": "python", "python3": "python", "js": "javascript", "jsx": "javascript", "ts": "typescript", "tsx": "typescript",
    "c++": "cpp", "cc": "cpp", "cs": "csharp", "c#": "csharp", "sh": "bash", "shell": "bash", "zsh": "bash", "console": "bash",
    "golang": "go", "rs": "rust", "rb": "ruby", "yml": "yaml", "ps1": "powershell", "kt": "kotlin", "docker": "dockerfile",
    "patch": "diff", "postgresql": "sql", "mysql": "sql",
}  # fmt: skip
_FENCE = re.compile(r"^[ \t]{0,3}```[ \t]*([A-Za-z+#0-9]{1,16})[ \t]*$", re.MULTILINE)
_NAME_PATTERNS = tuple(
    (language, re.compile(pattern if "(?i:" in pattern or " R\\b" in pattern or " Go\\b" in pattern or " C\\b" in pattern else f"(?i:{pattern})"))
    for language, pattern in _NAMES
)
# "Port this to Rust": the language of the answer.
_TARGET = re.compile(
    r"\b(?:port|translate|convert|rewrite|migrate|turn|transpile)\b[^.?!\n]{0,60}?\b(?:to|into|in|as) (?:idiomatic |plain |modern |pure )?[A-Za-z+#]{1,12}",
    re.IGNORECASE,
)
NAME_WEIGHT = 2.5
SCRIPTED = frozenset({name for name, _ in _SYNTAX})
MIN_SCORE = 1.5


def programming_language(text: str, *, contains_code: bool) -> str | None:
    """Return the language of the code held or asked for, or None where it is left open."""
    window = excerpt(text)
    fence = _FENCE.search(window)
    if fence:
        tag = fence[1].lower()
        language = _FENCES.get(tag, tag)
        if language in SCRIPTED:
            return language
    scores: dict[str, float] = {}
    prose = window if not contains_code else window[:400] + "\n" + window[-200:]
    for language, pattern in _NAME_PATTERNS:
        if pattern.search(prose):
            scores[language] = NAME_WEIGHT
    if contains_code:
        for language, signals in _SYNTAX:
            score = sum(s.score(window) for s in signals)
            if score:
                scores[language] = scores.get(language, 0.0) + score
    if "typescript" in scores and "javascript" in scores:  # a superset: what marks the one also marks the other
        scores["typescript"] += scores.pop("javascript")
    target = _TARGET.search(window)
    if target:
        for language, pattern in _NAME_PATTERNS:
            if pattern.search(target[0]):
                return language
    if not scores:
        return None
    best = max(scores, key=scores.__getitem__)
    return best if scores[best] >= MIN_SCORE else None
