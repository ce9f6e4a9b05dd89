"""Does a prompt hold code, and does it ask for code?

Code is source text in a programming, query, shell, markup, schema or configuration language, a regular expression, a
spreadsheet formula, a diff, a stack trace or a compiler's error. Not code: data (CSV, JSON, XML), mathematics, log lines,
and talk about programming. A prompt asks for code when a good answer is mainly code: write, complete, fix, port, test,
refactor; explaining, reviewing and tracing are not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from classifier.signals import signal, weigh

HEAD_CHARS, TAIL_CHARS = 3000, 1000  # of a long text, what is read: instructions stand at either end

CONTAINS_BIAS = -2.0
CONTAINS = (
    signal("fenced code", r"^[ \t]{0,3}(?:```|~~~)[ \t]*(?!(?i:csv|json|text|txt|md|markdown|latex|tex|log|xml)\b)\w+", 4.0),
    signal("Python statement", r"^[ \t]{0,40}(?:async )?def \w{1,60}\([^\n]{0,200}(?::|\\|,)[ \t]*(?:#[^\n]{0,200})?$", 5.0),
    signal("class declaration", r"^[ \t]{0,40}(?:(?:public|private|abstract|final|export|data|sealed|static) ){0,3}(?:class|struct|interface|enum|trait|impl|record|module) [\w<>]{1,60}[^\n.?!]{0,80}[:{(][ \t]*$", 4.0),
    signal("import", r"^[ \t]{0,20}(?:from [\w.]{1,60} import [\w*(]|import [\w.*]{1,80}(?: as \w{1,40})?;?[ \t]*$|import [^\n]{1,80} from ['\"]|#[ \t]?include[ \t]*[<\"]|using [\w.]{1,60};|use [\w:]{1,60}(?:::|;)|require\(['\"]|require ['\"]|package [\w.]{1,60};?$|library\(\w{1,40}\)|<\?php)", 4.0),
    signal("function declaration", r"\b(?:function[ *]{0,3}\w{0,60}[ ]?\([^)\n]{0,200}\)[ \t]{0,4}\{|(?:fn|func|fun|proc) (?:\([^)\n]{0,60}\) ?)?\w{1,60}(?:<[^>\n]{0,40}>)?\([^\n]{0,200}|<- ?function\()", 4.0),
    signal("typed declaration", r"^[ \t]{0,40}(?:(?:public|private|protected|internal|static|final|const|virtual|override|unsigned|inline|extern)[ \t]{1,4}){0,4}(?:void|int|long|char|float|double|bool|boolean|string|String|auto|size_t|byte|short|var|let|const|val)[\w<>\[\],*& ]{0,40}[ \t*&]\w{1,60}[ \t]{0,4}(?:=[^=\n][^\n]{0,200}|\([^\n]{0,200}\)[^\n]{0,40}[{;]|;|\{)[ \t]*$", 3.5),
    signal("variable declaration", r"^[ \t]{0,40}(?:export )?(?:const|let|var) (?:mut )?[\w{\[][^\n=]{0,80}=[^\n]{1,200}", 3.5),
    signal("access modifier", r"^[ \t]{0,40}(?:public|private|protected|static|export(?: default)?|async|abstract) [^\n]{1,160}[({;][ \t]*$", 3.5),
    signal("print call", r"\b(?:print(?:f|ln!?)?\(|puts [\"'\w]|console\.(?:log|error)|System\.out\.print\w{0,6}|fmt\.Print\w{0,4}|Console\.Write\w{0,5}|std::c\w{2,4}|cout ?<<|echo [\"'$])", 3.0),
    signal("method call", r"(?<![/@\w.])[a-z_]\w{0,40}(?:\.|->|::)[a-z_]\w{0,40}\([^)\n]{0,200}\)?", 2.5),
    signal("call assigned", r"^[ \t]{0,40}[\w.\[\]$@]{1,60} (?::?=|<-|\+=|-=|\*=) [^\n]{0,80}[\w\])}\"';]$", 2.0),
    signal("call of a name", r"\b[a-z]{1,30}(?:_[a-z0-9]{1,30}){1,6}\(|\b[a-z]{2,30}[A-Z]\w{1,40}\(", 2.5),
    signal("assertion", r"^[ \t]{0,20}(?:assert\b[^\n]{0,80}(?:==|\(|not |in )|EXPECT_|expect\()", 3.0),
    signal("block statement", r"^[ \t]{0,40}(?:(?:if|while|elif|except|with|switch|catch|for|foreach)\b ?\([^\n]{1,160}\)[ \t]{0,4}\{?|for \w{1,30}(?:, ?\w{1,30})? in [^\n]{1,120}:|(?:if|while|elif) [^\n]{0,100}(?:[=<>!]=|[<>]| in | not |\(|\.)[^\n]{0,100}:|\} ?else|else ?[:{]|try ?[:{])[ \t]*$", 3.0),
    signal("return statement", r"^[ \t]{2,40}return\b[^\n.]{0,120}[\w\])};\"']$|\breturn [^\n]{1,80};", 2.5),
    signal("lines ending in semicolons", r"[\w)\]\"'+]; ?$", 1.0, 3),
    signal("lone braces", r"^[ \t]{0,40}[})]{1,3};?[ \t]*$", 0.7, 3),
    signal("arrow function", r"(?:\)|\b\w{1,30}) => ?[\w({\[]", 2.5),
    signal("operators", r"\w ?(?:===|!==|&&|\|\|) ?[\w!(]|\w(?:\+\+|--)[;)]|\w [!=]= [\w\"']|[\w)]::\w", 1.8),
    signal("indexing", r"\b[a-z_]\w{0,30}\[(?:\w{1,20}|[\w]{0,20}:[\w-]{0,20}|-\d)\](?!\()", 1.2),
    signal("type hint", r"\b\w{1,30}: ?(?:int|str|float|bool|[Ll]ist\[|[Dd]ict\[|Optional\[|number\b|boolean\b)|-> ?(?:int|str|bool|None|List|float)\b", 2.0),
    signal("decorator or annotation", r"^[ \t]{0,20}@[a-zA-Z][\w.]{1,40}(?:\([^\n]{0,100}\))?[ \t]*$|^#\[[a-z]", 2.0),
    signal("code comment", r"^[ \t]{0,40}(?://[ /!]|/\*|\*/|<!--|--[ ][A-Za-z])", 2.0),
    signal("docstring", r"^[ \t]{2,20}(?:\"\"\"|''')", 3.0),
    signal("shebang", r"\A#!/", 5.0),
    signal("SQL", r"(?:\bSELECT\b[^;]{1,200}?\bFROM\b [\w\"`\[]|\bselect\b [\w*,.()\" ]{1,80}\n? ?\bfrom \w{1,40}\s{0,4}(?:;|where|join|group|order|$)|\b(?:INSERT INTO|CREATE (?:TABLE|INDEX|VIEW|OR REPLACE)|ALTER TABLE|DELETE FROM|DROP TABLE)\b|\bUPDATE \w{1,40} SET\b|\b(?:create table|insert into|alter table) \w{1,40} ?\()", 4.0),
    signal("shell command", r"^[ \t]{0,8}[$>#%] (?:sudo |[a-z][\w.-]{1,20} )|^(?:sudo|apt(?:-get)?|pip3?|npm|yarn|git|docker|kubectl|curl|wget|ls|cd|grep|chmod|chown|tar|ssh|scp|rsync|systemctl|ffmpeg|find|awk|sed|make|cargo|helm|terraform|aws|gcloud|jq) (?:-{1,2}\w|[a-z]+ -{1,2}\w|[\w.-]{0,30}/|install |run |push|commit|clone |pull|rebase|checkout|apply |build |get )[^\n]{0,200}|\| ?(?:grep|awk|sed|sort|xargs|head|tail|wc|jq|uniq|cut|tee)\b|`(?:git|docker|npm|pip|kubectl|curl|chmod|grep|find|awk|sed|tar) [^`\n]{1,120}`", 3.5),
    signal("stack trace", r"Traceback \(most recent|^[ \t]{1,12}at [\w.$<>/]{2,120} ?\(|^[ \t]{0,8}File \"[^\"\n]{1,200}\", line \d|\bgoroutine \d+ \[|thread '[^'\n]{1,40}' panicked|^Caused by: [\w.]{3,}|Exception in thread", 5.0),
    signal("error message", r"\b[A-Z][A-Za-z]{2,40}(?:Error|Exception)\b(?::|\()|\b(?:fatal )?error(?:\[?\w{0,3}\d{3,5}\]?)?: [a-z'\"`]|^\S{1,80}\.\w{1,4}:\d+(?::\d+)?:|[Ss]egmentation fault|core dumped|undefined reference to|npm ERR!|\b(?:E|W|TS|CS|C|LNK)\d{4}:", 3.5),
    signal("diff", r"^@@ -\d+(?:,\d+)? \+\d+|^(?:\+\+\+|---) [ab]/|^diff --git ", 6.0),
    signal("markup", r"</?(?:div|span|html|body|ul|ol|li|table|tr|td|script|style|head|form|input|button|img|h[1-6]|section|nav|svg|path|rect|template|meta|link|label|select|option|canvas|footer|header|main|p|a|br|b|i|strong)(?: [\w-]{1,30}=[^>\n]{0,200})?[ ]?/?>|<!DOCTYPE|<\w{1,30} (?:class|id|href|src|style|onClick|v-if)=", 3.5),
    signal("style sheet", r"^[ \t]{0,8}(?:[.#@]?[\w-]{1,40}(?:[ ,>:.#][\w-]{1,40}){0,5}) ?\{\s{0,10}(?:[a-z-]{2,30}: ?[^;{}\n]{1,80};)", 4.0),
    signal("regular expression", r"\\[dwsb](?:[+*?{]|\\)|\[\^?[a-zA-Z0-9]-[a-zA-Z0-9][^\]\n]{0,20}\](?:[+*?{]|\\)|\(\?[:=!<P]|\.\*\??[)$\\]|\^[\w(\[\\][^\n ]{0,60}\$", 4.0),
    signal("spreadsheet formula", r"(?:^|[\s`\"'(:])=[A-Z]{2,15}(?:\.[A-Z]{2,6})?\([^\n]{0,120}", 4.0),
    signal("configuration", r"^(?:apiVersion|kind|services|version|image|steps|jobs|stages): ?[\w\"'./-]{0,60}[ \t]*$|^(?:FROM|RUN|COPY|ENTRYPOINT|WORKDIR|CMD|ENV|EXPOSE) [\w\[./\"-]{2,}|^resource \"|^[ \t]{0,8}(?:server|location|upstream|http)[ \w/.~]{0,40} \{|^\[(?:Unit|Service|tool\.[\w.]{1,40}|build-system|package|dependencies)\]|^[ \t]{2,8}- (?:name|run|uses|image|hosts|containerPort): |^[.A-Z_]{4,30}[ ]?[:?+]?= ?\S|^[a-z_-]{2,30}:[^\n]{0,60}\n\t\S", 3.0),
    signal("Lisp form", r"^[ \t]{0,10}\((?:defun|define|defn|defmacro|let|lambda|ns|setq|cond|loop) ?[\[(\w]", 4.5),
    signal("end of a block", r"^[ \t]{0,20}(?:end|fi|done|esac|endif|End (?:Sub|Function|If)|END(?: IF| WHILE|IF| FOR)?)\b;?[ \t]*$", 2.0),
    signal("Haskell or ML signature", r"^\w{1,40} :: [\w(\[]|^let (?:rec )?\w{1,30} [\w ]{0,30}=[^\n]{1,80}|^data \w{1,30} = ", 4.0),
    signal("dollar variable", r"(?:^|[\s(;\"])(?:my )?\$[a-zA-Z_]\w{0,30}(?: ?[-+.]?= ?\S|->|\[)|\$\{\w{1,40}[}:]|\$\(\w", 2.5),
    signal("cmdlet", r"\b(?:Get|Set|New|Remove|Invoke|Import|Export|Where|ForEach|Select)-[A-Z]\w{2,30}\b", 3.5),
    signal("assembly", r"^[ \t]{0,12}(?:mov[lq]?|push[lq]?|pop[lq]?|jmp|jne|cmp[lq]?|lea|xor|ldr|str|addi|li)[ \t]{1,8}[%$\w\[]{1,12}, ?[%$#\w\[-]", 4.5),
    signal("pseudo-code", r"^[ \t]{0,20}(?:(?:IF|WHILE|FOR|if|while|for) [^\n]{1,80} (?:THEN|DO|then|do)|(?:PROCEDURE|FUNCTION|ALGORITHM|procedure|algorithm) \w{1,40} ?\(|REPEAT|UNTIL [^\n]{1,60}|[Ss]et \w{1,20} (?:=|to|<-|←) \w{1,20}\b)[ \t]*$|^[ \t]{0,20}\w{1,20} ?(?:←|:=) ?\S", 2.5),
    signal("lambda or comprehension", r"\blambda [\w, ]{0,30}:|\[[^\]\n]{1,60} for \w{1,20} in [^\]\n]{1,60}\]|\bmap\(|\brange\(\w", 3.0),
    signal("built-in call", r"\b(?:max|min|len|sum|sorted|str|int|abs|open|range|sizeof|malloc|strlen)\(\w", 1.2),
    signal("literal list assigned", r"\b[a-z_]\w{0,30} = [\[{(\"'\d]", 1.2),
    signal("JSON lines", r"^[ \t]{0,40}\"[\w -]{1,40}\": ?[\[{\"\d]", -0.6, 3),
    signal("TeX", r"\\(?:frac|begin|sum|int|sqrt|cdot|alpha|mathbb|left|text)\b", -2.0),
)

_LANGUAGES = (
    r"python|java ?script|typescript|java|c\+\+|c#|golang|go|rust|ruby|php|perl|swift|kotlin|scala|haskell|lua|bash|sh|zsh|powershell|"
    r"sql|postgres(?:ql)?|mysql|sqlite|html5?|css|react(?:\.?js)?|vue(?:\.?js)?|angular|node(?:\.?js)?|django|flask|fastapi|pandas|numpy|"
    r"matlab|julia|vba|excel|latex|terraform|ansible|kubernetes|docker|yaml|regex|awk|sed|jq|assembly|fortran|cobol|elixir|erlang|clojure|"
    r"dart|flutter|objective-c|solidity|graphql|svg|tailwind|jquery|spring(?: boot)?|express|pytest|junit|jest|pytorch|tensorflow|prolog|ocaml|f#|zig|nim|nix|cmake|makefile|c"
)
_VERBS = (
    r"write|wrote|create|implement|generate|build|make|give(?: me)?|show(?: me)?|code|develop|provide|design|produce|craft|program|"
    r"need|want|fix|debug|refactor|rewrite|port|convert|translate|optimi[sz]e|complete|finish|add|extend|modify|update|simplify|"
    r"scaffold|sketch|draft|correct|patch|vectori[sz]e|paralleli[sz]e|migrate|set up|setup|configure|come up with|spit out|gimme|looking for|can i have"
)
_NOUNS = (
    r"functions?|scripts?|programs?|programme|code|class(?:es)? (?:that|which|for|with|called|named|to)|methods?|quer(?:y|ies)|regexp?(?:es)?|regular expressions?|"
    r"sql|one-?liners?|commands?|cli|api|endpoints?|snippets?|algorithms?|unit tests?|test (?:cases?|suite)|integration tests?|dockerfile|makefile|"
    r"docker-?compose(?: file)?|manifest|yaml|config(?:uration)? (?:files?|block|for)|nginx config\w{0,10}|cron(?:tab)?(?: (?:expression|entry|job|line))?|html|css|web ?pages?|landing page|web ?app|react component|"
    r"components?|parser|decorator|macros?|(?:excel|spreadsheet|sheets) formula|formula (?:in|for) (?:excel|sheets|google)|stored procedure|trigger function|json schema|schema|migration|(?:github|ci|ci/cd) (?:actions?|workflow|pipeline)|"
    r"hook|middleware|subroutine|lambda|stub|boilerplate|implementation|linked list|binary search tree|hash ?map|stack trace|bug|compiler|interpreter|scraper|crawler|"
    r"userscript|playbook|terraform|helm chart|svg|shader|typedef|struct|iterator|generator function|closure|mutex|thread pool|cache class|rate limiter"
)
_BOUNDED = r"[^.?!\n]{0,70}?"

ASKS_BIAS = -2.5
ASKS = (
    signal("asks to write code", rf"\b(?:{_VERBS})\b{_BOUNDED}\b(?:{_NOUNS})(?![\w-])", 3.2, flags=re.IGNORECASE),
    signal("names a language", rf"(?<![\w-])(?:in|using|with|into|to|for|as) (?:plain |pure |vanilla |modern |idiomatic |a |an )?(?:{_LANGUAGES})(?:\d{{1,2}})?(?![\w+#'-])", 1.6, flags=re.IGNORECASE),
    signal("language before a code noun", rf"(?<![\w-])(?:{_LANGUAGES})[- ](?:\d[\d.]* )?(?:functions?|scripts?|code|programs?|class|snippet|one-?liner|query|method|decorator|macro|command|component|module|library|formula|file|app|tests?|implementation|schema|config\w{{0,10}})(?![\w-])", 1.8, flags=re.IGNORECASE),
    signal("imperative first", r"\A\W{0,5}(?:please |can you |could you |kindly |hey,? |hi,? )?(?:write|create|implement|generate|build|code|develop|fix|debug|refactor|rewrite|port|convert|optimi[sz]e|complete|finish|add|extend|modify|make|translate|turn|simplify|provide|restructure)\b", 1.0, flags=re.IGNORECASE),
    signal("action on the code", r"\b(?:fix|debug|refactor|complete|finish|rewrite|port|convert|optimi[sz]e|translate|extend|modify|implement|migrate|simplify|correct|vectori[sz]e|repair|turn|add|restructure|shorten|make)\b[^.?!\n]{0,25}\b(?:this|it|the (?:following|above|below|code|function|class|bug|program|script|method|query)|below|these|my)\b", 1.2, flags=re.IGNORECASE),
    signal("code noun in another language", r"(?:escrib[ea]|crea|genera|implementa|haz|dame|necesito|corrige|écri[st]|écrire|crée[rz]?|génère|implémente|donne|corrige|j'ai besoin|schreib\w{0,3}|erstell\w{0,3}|implementier\w{0,3}|brauche|gib|korrigier\w{0,3}|escreva|crie|gere|implemente|preciso|scrivi|creami|implementa|napisz|stwórz|schrijf|maak|yaz|напиши\w{0,2}|создай|реализуй|сделай|исправь|нужн\w{1,2})\b[^.?!\n]{0,60}(?:funci[oó]n|script|programa|código|consulta|expresión regular|comando|clase|fonction|programme|requête|code|expression régulière|commande|classe|funktion|skript|programm|abfrage|befehl|regulären ausdruck|klasse|função|comando|classe|funzione|codice|programma|query|funkcj|skrypt|kod|functie|fonksiyon|betik|функци|скрипт|программ|запрос|код|регулярн|команд|класс)", 3.6, flags=re.IGNORECASE),
    signal("code noun in Chinese or Japanese", r"(?:写|编写|实现|创建|生成|修复|重构|帮我|寫)[^。？！\n]{0,30}(?:函数|函數|脚本|程序|代码|查询|语句|正则|类|算法|命令|程式)|(?:関数|スクリプト|プログラム|コード|クエリ|正規表現|コマンド|クラス)[^。？！\n]{0,30}(?:書い|作成|作っ|実装|教え|修正|ください)|(?:함수|스크립트|코드|쿼리|프로그램|정규식)[^.?!\n]{0,30}(?:작성|만들|구현|짜)", 3.8),
    signal("tests to pass", r"should pass (?:these|the following) tests|your code should|>>> \w{1,40}\(|\bTODO\b|# (?:your|write) (?:code|implementation)|\bpass[ \t]*$|// (?:your|write) code", 2.5),
    signal("asks for a command", r"\b(?:what|which) (?:\w{1,20} ){0,3}(?:command|query|regex|formula|flag)\b|\b(?:command|query|regex|one-?liner|formula|git|bash|sql|awk|sed|cron)\b[^.?!\n]{0,30} (?:to|that|for|which) ", 1.6, flags=re.IGNORECASE),
    signal("how to, in code", rf"\bhow (?:do|can|would|should|to)\b{_BOUNDED}(?<![\w-])(?:in|with|using) (?:{_LANGUAGES})(?![\w+#'-])", 1.8, flags=re.IGNORECASE),
    signal("asks to explain", r"\b(?:explain|describe|what (?:does|do|is|are|will|would|happens)|why (?:does|do|is|are|am|did)|how does|walk (?:me )?through|review|audit|critique|summari[sz]e|trace|analy[sz]e|compare|difference between|time complexity|when should|which of the following|is it (?:true|better)|pros and cons|list every|find the (?:bug|error)|spot|document|comment on|understand|tell me what|interpret|erkläre|explique|explica|объясни|解释|説明)\b", -1.9, flags=re.IGNORECASE),
    signal("asks for prose", r"\b(?:essay|poem|story|blog|article|email|e-mail|letter|speech|resume|cv|cover letter|song|lyrics|rap|haiku|limerick|job (?:description|ad)|press release|tweet|headline|slogan|summary|riddle|joke|ad|advertis\w{1,7}|brochure|proposal|itinerary|dialogue|screenplay|review of|bullet points|paragraphs?|biography|caption|newsletter|rubric|note)\b", -2.2, flags=re.IGNORECASE),
    signal("plays a machine", r"\bact (?:as|like) an? [^.\n]{0,30}(?:console|terminal|interpreter|shell|compiler)\b", -6.0, flags=re.IGNORECASE),
    signal("mathematical function", r"\b[fgh]\([a-z]\)|\bmultiple choice\b|^ ?\(?A[.):] ?\S[^\n]*\n ?\(?B[.):] ?\S", -2.5),
    signal("another kind of code or class", r"\b(?:dress|zip|postal|promo|discount|coupon|area|country|building|penal|tax|bar|qr|morse|genetic|access|door|source of|civil|criminal|napoleonic|moral|secret|honou?r|colou?r)[ -]codes?\b|\bcodes? of (?:conduct|ethics|honou?r|practice)|\bclass (?:reunion|action|trip|struggle|of \d{4}|schedule|size|teacher|of)\b|\b(?:yoga|cooking|dance|middle|working|first|spin|pottery|world|biology|history|my \w{1,12}) class\b|\bfunctions? of (?:the|a|an)\b|\blearn(?:ing)? (?:how )?to code\b|\b(?:wedding|tv|theat(?:re|er)|exercise|training|loyalty|social|radio|degree|government|phone|movie|school|festival|concert|space|tutoring|mentoring|fitness|tv|film) (?:script|program|programme)\b", -3.0, flags=re.IGNORECASE),
)


EXPLAINS = "asks to explain"
EXPLAIN_BESIDE = 1.4
ALONE, QUESTION = 3.0, 1.2
_QUOTED = re.compile(r"[ \t]*(?:```|~~~)")
_CODE_LINE = re.compile(
    r"^(?:[ \t]{2,}|\t| ?[*/#@<}{)\]]|(?:def|class|import|from|return|public|private|static|const|let|var|export|package|using|assert|>>>|\$) ?)"
    r"|[;{}]\s*$|\"\"\"|^\w+ [:+*/-]?= "
)


@dataclass(frozen=True, slots=True)
class CodeFindings:
    """What was found. Scores are log-odds; ``signals`` are names of evidence, for people."""

    contains: bool
    asks: bool
    contains_score: float
    asks_score: float
    signals: tuple[str, ...]


def find_code(text: str) -> CodeFindings:
    """Tell whether a text holds code and whether it asks for code."""
    window = excerpt(text)
    contains_score, contained = weigh(CONTAINS, window)
    contains_score += CONTAINS_BIAS
    contains = contains_score > 0
    asks_score, asked = _weigh_request(window, contains=contains)
    signals = [name for score, name in [*contained, *asked] if score > 0]
    return CodeFindings(contains, asks_score > 0, contains_score, asks_score, tuple(signals))


def _weigh_request(window: str, *, contains: bool) -> tuple[float, list[tuple[float, str]]]:
    """Weigh what is asked, reading the prose around any code: comments and docstrings ask for nothing."""
    prose = _prose(window) if contains else window
    score, asked = weigh(ASKS, prose)
    names = {name for _, name in asked}
    if EXPLAINS in names and names & {"imperative first", "action on the code"}:
        score += EXPLAIN_BESIDE  # "implement it and explain why": still mainly code
    score += ASKS_BIAS
    if contains and not names & {EXPLAINS, "asks for prose", "plays a machine", "mathematical function"}:
        score += ALONE if "?" not in prose else QUESTION  # code without a question wants to be completed or mended
    return score, asked


def _prose(window: str) -> str:
    """Return the lines that are not code: not in a fence or docstring, not indented, without a statement's marks."""
    kept, fenced = [], False
    for line in window.split("\n"):
        if _QUOTED.match(line):
            fenced = not fenced
        elif not fenced and not _CODE_LINE.search(line):
            kept.append(line)
    return "\n".join(kept)


def excerpt(text: str) -> str:
    """Return the part of a text that is read: all of it, or its head and tail."""
    if len(text) <= HEAD_CHARS + TAIL_CHARS:
        return text
    return text[:HEAD_CHARS] + "\n" + text[-TAIL_CHARS:]
