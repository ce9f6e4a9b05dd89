"""What code within a line looks like: literals and patterns, each with a weight and the languages it tells.

Weights are log-odds, as those of ``lineshapes``. A pattern is searched only in a text that has one of its marks; repetitions
are possessive or bounded, so that no text takes more than linear time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from classifier.commands import COMMANDS as _COMMANDS


@dataclass(frozen=True, slots=True)
class Inline:
    """Code within a line.

    Attributes:
        name: For the person who reads why.
        weight: Log-odds that the text holds code.
        languages: Ids of the languages that write so, parted by spaces; empty: many.
        marks: Literals of which the text must have one, for speed; ``CALL`` stands for a bracket right after a word.
        pattern: What to search.
    """

    name: str
    weight: float
    languages: str
    marks: tuple[str, ...]
    pattern: re.Pattern[str]


CALL = "call("
# Counted by str.count, at most LITERAL_LIMIT times each.
LITERAL_LIMIT = 2
LITERALS: tuple[tuple[str, float, str], ...] = (
    ("();", 2.0, ""),
    (");\n", 1.0, ""),
    (") {", 1.5, ""),
    ("){", 1.5, ""),
    ("; }", 1.5, ""),
    (" === ", 1.5, "javascript"),
    (" !== ", 1.5, "javascript"),
    ("=> {", 2.5, "javascript"),
    (" && ", 1.2, ""),
    (" || ", 0.8, ""),
    (" == ", 0.8, ""),
    (" != ", 0.8, ""),
    (" += ", 1.0, ""),
    ("++;", 1.5, ""),
    ("++)", 1.5, ""),
    ("[i]", 1.5, ""),
    ("[0]", 0.8, ""),
    ("${", 1.0, "javascript bash"),
    ("$(", 0.8, "bash"),
    ("%>%", 3.0, "r"),
    ("<- c(", 3.0, "r"),
    ("std::", 3.0, "cpp"),
    ("cout <<", 3.0, "cpp"),
    ("cout<<", 3.0, "cpp"),
    ("nullptr", 2.0, "cpp"),
    ("#include", 3.0, "c cpp"),
    ("printf(", 2.5, "c"),
    ("malloc(", 2.5, "c"),
    ("console.log", 2.5, "javascript"),
    ("document.get", 2.5, "javascript"),
    ("document.query", 2.5, "javascript"),
    ("JSON.parse", 2.5, "javascript"),
    ("async function", 2.5, "javascript"),
    ("System.out", 3.0, "java"),
    ("public static", 2.5, "java"),
    ("NullPointerException", 2.5, "java"),
    ("ArrayList<", 2.0, "java"),
    ("Console.Write", 3.0, "csharp"),
    ("using System", 3.0, "csharp"),
    ("println!(", 3.0, "rust"),
    ("let mut ", 3.0, "rust"),
    ("&mut ", 2.5, "rust"),
    ("::new(", 2.0, "rust"),
    (".unwrap()", 2.5, "rust"),
    ("fmt.Print", 3.0, "go"),
    ("err != nil", 3.0, "go"),
    ("print(", 2.0, "python"),
    ("import numpy", 3.0, "python"),
    ("import pandas", 3.0, "python"),
    ("pd.DataFrame", 2.5, "python"),
    ("Traceback (most recent", 4.0, "python"),
    ("__init__", 2.0, "python"),
    ("<?php", 4.0, "php"),
    ("$_POST", 3.0, "php"),
    ("$_GET", 3.0, "php"),
    ("</div>", 3.0, "html"),
    ("<div", 3.0, "html"),
    ("</a>", 2.0, "html"),
    ("</script>", 3.0, "html"),
    ("<svg", 3.0, "svg"),
    ("Segmentation fault", 2.5, "c cpp"),
    ("undefined reference to", 3.0, "c cpp"),
    ("Uncaught ", 2.0, "javascript"),
    ("Cannot read propert", 2.5, "javascript"),
    ("npm ERR!", 3.5, "javascript"),
    ("syntax error", 0.8, ""),
)


def _inline(name: str, weight: float, languages: str, marks: tuple[str, ...], pattern: str) -> Inline:
    return Inline(name, weight, languages, marks, re.compile(pattern, re.MULTILINE))


_FLAGS = (" --", *(f" -{letter}" for letter in "abcdefghiklmnopqrstuvwxzACELPRSX"))
# fmt: off
INLINES: tuple[Inline, ...] = (
    _inline("def statement", 3.5, "python", ("def ",), r"\bdef \w+\([^)\n]*\)(?: ?-> ?[^:\n]+)?:|\basync def \w"),
    _inline("def method", 3, "ruby", ("def ",), r"\bdef \w+[?!]?(?:\([^)\n]*\))?[ ;].*\bend\b"),
    _inline("lambda", 2.5, "python", ("lambda",), r"\blambda [\w, ]*:"),
    _inline("comprehension", 3, "python", (" for ",),
        r"[\[({][^\[\](){}\n]{1,80} for \w+(?:, ?\w+)? in [^\]\n)}]{1,80}[\])}]"),
    _inline("function expression", 3, "javascript", ("function",), r"\bfunction ?\w*\([\w, $]*\) ?\{"),
    _inline("declaration", 2.5, "javascript", ("const ", "let ", "var "),
        r"\b(?:const|var) [\w$]+ ?= ?\S|\blet [a-z]\w+ = [\[{\"'`\w.]+[;(\[.]"),
    _inline("declaration", 3, "c cpp java csharp",
        ("int ", "char ", "float ", "double ", "bool ", "boolean ", "String ", "string ", "var ", "auto ", "void "),
        r"\b(?:int|char|float|double|bool|boolean|String|string|var|auto"
        r"|void) ?\*?[a-z_]\w*(?:\[\w*\])? ?(?:(?:= ?[^;=\n]{1,80})?;|\([^)\n]{0,120}\) ?\{)"),
    _inline("Rust or Go function", 3, "rust", ("fn ",), r"\bfn \w+(?:<[^>\n]*>)?\("),
    _inline("Go or Swift function", 3, "go swift", ("func ",), r"\bfunc (?:\(\w+ \*?\w+\) )?\w+\("),
    _inline("Kotlin function", 3, "kotlin", ("fun ",), r"\bfun \w+\([^)\n]*\)"),
    _inline("arrow function", 2.5, "javascript", ("=>",), r"(?:\)|\b\w{1,30}) ?=> ?[\w({\[`'\"]"),
    _inline("method call", 2.2, "", (CALL,),
        r"(?<![\w/.@-])[a-zA-Z_]\w++(?:\.[a-zA-Z_]\w*+){0,3}(?:\.|->|::)[a-zA-Z_]\w++\("),
    _inline("compound name", 2.2, "", (CALL, "="), r"\b[a-z]++(?:(?:_[a-z0-9]++)++|[A-Z]\w*+)(?:\(| ?= ?[^=\s])"),
    _inline("call without arguments", 1.8, "", (CALL,), r"\b[a-zA-Z_]\w++\(\)"),
    _inline("call with a literal", 1.8, "", ('("', "('"), r"\b[a-z_]\w*+\([\"']"),
    _inline("built-in call", 1.2, "python",
        ("len(", "sorted(", "range(", "str(", "int(", "float(", "isinstance(", "enumerate(", "input("),
        r"\b(?:len|sorted|range|str|int|float|isinstance|enumerate|input)\(\w"),
    _inline("indexing", 1.5, "", ("[",), r"\b[a-z_]\w*+\[(?:[\w'\"]{1,20}|-\d+|\w{0,10}:\w{0,10})\]"),
    _inline("literal assigned", 1.5, "", (" = ",),
        r"(?<=[\w\]]) = (?:[\"'\[{]|new |None\b|True\b|False\b|true\b|false\b|null\b)"),
    _inline("comparison", 1, "", ("=",), r"(?<=[\w)\] ])(?:==|!=|<=|>=) ?[\w\"']"),
    _inline("increment", 1.2, "", ("++", "--", "+=", "-="), r"(?<=\w)(?:\+\+|--)[;)\]]|[-+*/]= ?[\w\"']"),
    _inline("generic type", 3, "java csharp cpp", ("<",),
        r"\b[A-Za-z]\w+<(?:[A-Z]\w*|int|string|char|float|bool|double)(?:, ?[\w<>]+)*>"),
    _inline("type hint", 2, "python", (": ", "->"),
        r"(?<=[a-z_]): ?(?:int|str|float|bool|[Ll]ist\[\w+\]|[Dd]ict\[\w+, ?\w+\]|Optional\[\w+\])(?=[,)=]"
        r"| =)|-> ?(?:int|str|bool|None|List|float)\b"),
    _inline("type annotation", 2.2, "typescript", (": ",), r"[(,] ?\w+\??: ?(?:string|number|boolean|any)\b"),
    _inline("error message", 3.2, "", ("Error", "Exception"),
        r"\b[A-Z][A-Za-z]+(?:Error|Exception)(?:: \S|\()|\b(?:java|System|org|javax)\.[\w.]+Exception"),
    _inline("error name", 2.5, "python", ("Error",),
        r"\b(?:Key|Value|Type|Index|Attribute|Name|Import|ModuleNotFound|Syntax|Indentation|ZeroDivision"
        r"|Recursion|Unicode\w{6})Error\b"),
    _inline("compiler message", 3.2, "", ("error",),
        r"\berror(?: [A-Z]{1,4}\d{3,5}|\[E\d+\])|\w\.\w{1,4}:\d+(?::\d+)?: (?:fatal )?error"
        r"|\berror: [a-z'\"`]"),
    _inline("error code", 2.5, "", ("TS", "CS", "ORA-", "LNK"), r"\b(?:TS\d{4}|CS\d{4}|ORA-\d{5}|LNK\d{4})\b"),
    _inline("SQL", 3.5, "sql", ("select ", "SELECT ", "Select "),
        r"(?:\bSELECT\b.{1,200}?\bFROM\b\s+[\w\"`\[(]|\b[Ss]elect (?:\*|count\(|distinct "
        r"|[\w.]+(?:, ?[\w.*]+)*) from [\w\"`]+(?:;|$| where | join | left | inner | order by| group by"
        r"| limit ))"),
    _inline("SQL", 3.5, "sql",
        ("INSERT", "UPDATE", "DELETE", "CREATE", "ALTER", "DROP", "JOIN", "GROUP BY", "insert into",
         "create table"),
        r"\bINSERT INTO\s+\w|\bUPDATE \w+ SET\b|\bDELETE FROM\s+\w|\bCREATE (?:TABLE|INDEX|VIEW)\b"
        r"|\bALTER TABLE \w|\bDROP TABLE\b|\bLEFT JOIN \w|\bGROUP BY \w+[.(]?\w*|\b(?:insert into"
        r"|create table) \w+ ?\("),
    _inline("shell command", 3.2, "bash", _FLAGS,
        rf"(?:^|[`:\"'(;|$&] ?|\brun |\brunning |\bdoes |\bexecute "
        rf"|\bmean )(?:sudo )?(?:{_COMMANDS})(?: [\w./:@=*~'\"{{}}-]+){{0,3}}? --?[a-zA-Z][\w=-]*"),
    _inline("shell pipe", 3, "bash", ("|",), r"\| ?(?:grep|awk|sed|sort|xargs|head|tail|wc|jq|uniq|cut|tee|less)\b"),
    _inline("cmdlet", 2.5, "powershell",
        ("Get-", "Set-", "New-", "Remove-", "Invoke-", "Import-", "Where-", "ForEach-", "Select-", "Write-"),
        r"\b(?:Get|Set|New|Remove|Invoke|Import|Where|ForEach|Select|Write)-[A-Z][a-z]\w+"),
    _inline("quoted command", 2.5, "bash", ("`",), rf"`(?:sudo )?(?:{_COMMANDS}) [^`\n]{{2,120}}`"),
    _inline("quoted expression", 2.2, "", ("`",),
        r"`[^`\n]{0,80}(?:\w\(|[;{}]|=>|->|==|\$\w|\w\.\w+\(|::|\w\[\w+\]|\w = )[^`\n]{0,120}`"),
    _inline("regular expression", 3.5, "regex", ("\\", "["),
        r"\\[dwsDWS](?:[+*?{\\\])$.,@/-]|$)|\[\^?(?:[a-zA-Z0-9]-[a-zA-Z0-9]|\\[dws])[^\]\n]{0,30}\](?:[+*?{]"
        r"|\\|\$)|\\b[\w\[(\\][^\n ]{0,40}\\b"),
    _inline("regular expression", 3, "regex", ("(?", "^", ".*", ".+"),
        r"\(\?(?:[:=!]|<[=!]|P<\w)|(?:^|[\s`\"'/])\^[^\s^]{1,60}\$(?=[\s`\"'/.?]|$)"
        r"|[\w)\]\\/]\.[*+]\??[\\/)$\w]"),
    _inline("spreadsheet formula", 3.5, "spreadsheet", ("=",),
        r"(?<![\w=<>!:+*/)-])=(?: ?[A-Z]{2,}[A-Z.]*\(|[A-Z]{1,2}\$?\d+[-+*/&<>=])"),
    _inline("style rule", 3.5, "css", ("{",), r"\{\s*+[a-z-]{3,30}: ?[^;{}\n]{1,60};[^{}]{0,300}\}"),
    _inline("tag", 3, "html", ("</", "/>", '="'),
        r"</?(?:html|head|body|div|span|table|tr|td|ul|ol|li|img|script|style|form|input|button|nav|section"
        r"|h[1-6]|p|a|br|b|i|em|strong|iframe|label|select|option)(?: [a-zA-Z-]+=[^<>\n]{1,200})?\s?/?>"),
    _inline("template", 2, "", ("{{", "{%"),
        r"\{% ?(?:if|for|block|extends|endif|endfor)\b|\{\{ ?\w+(?:\.\w+)+|\{\{ ?\.Values"),
    _inline("preprocessor line", 3, "c cpp", ("#",), r"#\s?(?:include ?[<\"]|define \w+)"),
    _inline("cron expression", 2.5, "bash", ("* * ", "*/"),
        r"(?:^|[\s`\"'])(?:[\d*/,-]+ ){4}[\d*/,-]+(?=[\s`\"'?.]|$)(?<=\*)"),
    _inline("dollar variable", 2, "php perl bash", ("$",), r"(?<![\w\\$])\$[a-z_]\w{2,}(?: ?[-+.]?= ?\S|->|\[)|\$\{\w+"),
    _inline("pointer or reference", 1.5, "c cpp", ("->", "*"), r"(?<=\w)->[a-z_]|\*[a-z]\w*+\+\+|(?<=char) ?\*"),
    _inline("scope", 1.5, "cpp rust", ("::",), r"\b\w+::\w"),
    _inline("typed signature", 3, "haskell", (" :: ",), r"\b[a-z]\w* :: [A-Z\[(a-z].*->"),
)
# fmt: on

# Against: mathematics and data use some of the same marks.
AGAINST: tuple[tuple[str, float], ...] = (
    ("\\frac", -3.0),
    ("\\begin{", -3.0),
    ("\\sqrt", -2.0),
    ("\\sum", -2.0),
    ("\\int", -2.0),
    ("\\mathbb", -2.0),
    ("\\le", -1.0),
    ("\\alpha", -1.5),
    ("\\pi", -1.0),
    ("\\cdot", -1.5),
    ("f(x)", -1.5),
    ("g(x)", -1.5),
    ("sin(", -1.0),
)
