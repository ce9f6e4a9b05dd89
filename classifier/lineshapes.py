"""What lines of code look like: a table of shapes, each with a weight and the languages it tells.

Weights are log-odds: a text holds code when they sum to ``code.THRESHOLD`` or more. A pattern is tried once a line, on a
bounded part of it, and repetitions are possessive or simple, so that no text takes more than linear time.
"""

from __future__ import annotations

from dataclasses import dataclass

from classifier.commands import COMMANDS as _COMMANDS


@dataclass(frozen=True, slots=True)
class LineShape:
    """A line that begins like code.

    Attributes:
        name: For the person who reads why.
        weight: Log-odds that the text holds code.
        languages: Ids of the languages that write so, parted by spaces; empty: many.
        pattern: Matched at the first character of a line that is not white space.
    """

    name: str
    weight: float
    languages: str
    pattern: str


_TYPES = (
    "void|int|long|short|char|float|double|bool|boolean|byte|unsigned|size_t|u?int\\d+_t|string|String|String\\[\\]|auto|decimal|"
    "std::\\w+|(?:List|Map|Set|Vec|vector|Array|ArrayList|Dictionary|IEnumerable|Optional|HashMap)<[^\\n;]{1,60}>"
)

# The first shape that fits a line counts. Order: the surest first, the most general last.
# fmt: off
LINE_SHAPES: tuple[LineShape, ...] = (
    LineShape("diff", 4, "diff",
        r"@@ -\d+(?:,\d+)? \+\d|diff --git |(?:\+\+\+|---) (?:[ab]/|\S+\.\w{1,4}\b)|Index: \S+$"),
    LineShape("stack trace", 4, "python", r"Traceback \(most recent call last\)|File \"[^\"\n]+\", line \d"),
    LineShape("stack trace", 4, "java",
        r"at [\w.$<>]{3,120}\([\w$]{1,60}\.(?:java|kt|scala):\d+\)|Exception in thread |Caused by: [\w.]+"),
    LineShape("stack trace", 4, "javascript",
        r"at (?:[\w.<>]{1,80} )?\(?(?:file://|node:|/|\w:\\|https?://)[^\s()]{1,200}:\d+:\d+\)?$"),
    LineShape("stack trace", 4, "csharp", r"at [\w.<>]{3,120}\([^)\n]{0,120}\)(?: in \S+:line \d+)?$"),
    LineShape("stack trace", 4, "go", r"goroutine \d+ \[|panic: "),
    LineShape("stack trace", 4, "rust", r"thread '[^'\n]{1,60}' panicked|error\[E\d{4}\]"),
    LineShape("stack trace", 4, "ruby", r"(?:from )?[\w./-]{1,120}\.rb:\d+:in "),
    LineShape("compiler message", 4, "", r"\S{1,120}\.\w{1,4}[:(]\d+[:,]?\d*\)?:? (?:fatal )?(?:error|warning|note)\b"),
    LineShape("def statement", 4, "python",
        r"(?:async )?def \w+\(.*(?::|,|\\|\()$|(?:async )?def \w+\([^)\n]*\)(?: ?->[^:\n]*)?:"),
    LineShape("import statement", 4, "python",
        r"from [\w.]+ import [\w*(]|import [a-z_][\w.]*+(?: as \w+|, ?[a-z_][\w.]*+)*$"),
    LineShape("class statement", 3.5, "python", r"class \w+(?:\([^)\n]*\))?:$"),
    LineShape("Python statement", 3, "python",
        r"(?:elif\b.+|else|try|finally|except\b.*|with .+ as \w+):$|if __name__"
        r"|self\.\w+ ?[=(.\[]|print\(|raise \w+\("
        r"|assert \w+[(.\[]|>>> |@(?:property|staticmethod|classmethod|dataclass|pytest|app)\b"
        r"|async with |yield |nonlocal |pass$|\"\"\"|'''"),
    LineShape("block statement", 2.5, "python",
        r"for \w+(?:, ?\w+)* in .+:$|while [^.]+:$|if .*(?:[=<>!]=|[<>\[(]|\bin\b|\bnot\b|\bis\b|\w_\w).*:$"),
    LineShape("shebang", 4, "", r"#!/"),
    LineShape("PHP", 4, "php",
        r"<\?php|\$this->|(?:public |private |protected )?(?:static )?function \w+\([^)\n]*\$|echo \$"
        r"|namespace [\w\\]+\\\w+;|use [\w\\]+\\\w+;"),
    LineShape("Perl", 4, "perl",
        r"use (?:strict|warnings)|my [$@%(]|sub \w+ ?\{|foreach my \$|print \"[^\"\n]*\\n\";$|chomp\b"),
    LineShape("PowerShell", 3.5, "powershell",
        r"(?:Get|Set|New|Remove|Invoke|Import|Export|Where|ForEach|Write|Add|Start|Stop|Test)-[A-Z]\w+"
        r"|\$\w+ = (?:Get|New|Import|Invoke)-|param ?\($|\[CmdletBinding|\$env:"),
    LineShape("dollar variable", 2.5, "php perl powershell", r"\$\w+(?:->|\[|::)?.*=.*;?$"),
    LineShape("Ruby", 3.5, "ruby",
        r"def (?:self\.)?\w+[?!]?(?: ?\([^)\n]*\))?$|(?:puts|attr_\w+|require_relative|require) [:'\"\w#]+"
        r"|\w[\w.:()]*+ do \|[\w, ()]+\|$|(?:describe|it|context|loop|task|namespace) ?.* do$"
        r"|module [A-Z]\w+$|class [A-Z]\w*(?: < [A-Z][\w:]*)?$|unless .+|elsif |\w+\.each\b|p \w+\."
        r"|belongs_to :|has_many :|rescue\b"),
    LineShape("#include", 4, "cpp c", r"#\s?include ?[<\"]"),
    LineShape("preprocessor line", 3.5, "c cpp", r"#(?:define|ifdef|ifndef|endif|pragma once|undef)\b"),
    LineShape("C++", 4, "cpp",
        r"using namespace \w+;|template ?<|std::|(?:public|private|protected):$|cout ?<<|namespace \w+ ?\{"
        r"|class \w+ ?(?:: ?public \w+ ?)?\{?$(?<=\{)"),
    LineShape("C struct", 3.5, "c cpp",
        r"(?:typedef )?(?:struct|enum|union)(?: \w+)? ?\{|struct \w+ ?\*|(?:static |const "
        r"|unsigned )*(?:char|int|void|FILE|double|float|node|Node) ?\*+ ?\w+"),
    LineShape("C#", 4, "csharp",
        r"using (?:System|Microsoft|UnityEngine)[\w.]*;|namespace [\w.]+(?: ?\{|;)?$|Console\.\w+\("
        r"|\[(?:Http\w+|Test|Fact|Serializ\w+|ApiController|Route)\b|public (?:async )?(?:Task|IActionResult"
        r"|string|IEnumerable)\b|(?:public|private) \w+ \w+ ?\{ ?get"),
    LineShape("package or import", 4, "java",
        r"package [a-z][\w.]*+;|import (?:static )?[a-z]\w*+(?:\.\w+)+(?:\.\*)?;|@Override|@(?:Test"
        r"|Autowired|Entity|Service|GetMapping|PostMapping)\b|System\.out\."),
    LineShape("access modifier", 4, "java csharp",
        r"(?:public|private|protected)(?: (?:static|final|abstract|override|virtual|readonly|sealed"
        r"|synchronized))* (?:class|interface|enum|record|void|[\w<>\[\], ?]+ \w+ ?[(=;])[^.?]*"),
    LineShape("TypeScript", 4, "typescript",
        r"(?:export )?(?:declare )?(?:interface \w+(?:<[^>\n]+>)?(?: extends [\w, <>]+)? ?\{"
        r"|type \w+(?:<[^=\n]+>)? = |enum \w+ ?\{|namespace \w+ \{)|(?:export |async |private |public "
        r"|static |readonly )*(?:const|let|var|function)\b[^=\n]*: ?(?:string|number|boolean|void|any"
        r"|unknown|never|Promise<|Array<|Record<|\w+\[\])|(?:private|public|protected|readonly) \w+\??: \w+"
        r"|\w+\([^)\n]*\w: ?(?:string|number|boolean)[^)\n]*\)|import type "
        r"|(?:export )?const \w+ = (?:async )?(?:<[^>\n]+>)?\([^)\n]*\w\??: ?\w"),
    LineShape("function declaration", 4, "javascript",
        r"(?:export )?(?:default )?(?:async )?function ?\*? ?\w*\([^\n]*\) ?\{?"),
    LineShape("JavaScript", 4, "javascript",
        r"import .+ from ['\"]|import ['\"]|export (?:default|const|function|class|async|\{|\*)"
        r"|module\.exports|const \w+ = require\(|console\.\w+\(|document\.\w|window\.\w|\$\(['\"]|(?:describe"
        r"|it|test)\(['\"]|\}\)?, \[[\w, ]*\]\);|'use strict'|\"use strict\"|await \w|app\.(?:get|post|use"
        r"|listen)\("),
    LineShape("const or let", 3, "javascript typescript",
        r"(?:const|let|var) [\w$]+ ?= ?[^ ].*(?:[;{(\[`'\",)}\]]|=>.*)$|(?:const|let"
        r"|var) [{\[][^}\]\n]*[}\]] ?="),
    LineShape("Go", 4, "go",
        r"func (?:\(\w+ \*?\w+\) )?\w+\([^)\n]*\)[^\n]*\{$|package \w+$|\w+(?:, ?\w+)* := "
        r"|type \w+ (?:struct|interface) ?\{|fmt\.\w+\(|if err != nil|go func\(|defer \w|import \($"
        r"|var \w+ (?:\[\]|map\[|\*)?\w+(?: = |$)"),
    LineShape("Rust", 4, "rust",
        r"(?:pub(?:\(crate\))? )?(?:async )?(?:unsafe )?fn \w+|let mut |(?:pub )?(?:struct|enum|trait"
        r"|mod) \w+(?:<[^>\n]*>)? ?[{;(]|impl(?:<[^>\n]*>)? \w|use (?:std|crate|super|\w+)::|println!|#\[\w+"
        r"|match \w.* \{$|macro_rules!|let \w+: (?:Vec|Option|Result|&|[iu]\d\d)"),
    LineShape("Kotlin", 4, "kotlin",
        r"(?:(?:private|public|override|suspend|inline|internal) )*fun (?:<[^>\n]*> )?(?:\w+\.)?\w+\("
        r"|(?:data|sealed) class \w|val \w+ by |when ?\(\w.*\) ?\{|companion object"),
    LineShape("Swift", 4, "swift",
        r"import (?:UIKit|SwiftUI|Foundation|Combine)$|(?:(?:private|public|static|override|mutating"
        r"|@objc) )*func \w+(?:<[^>\n]*>)?\(.*\{$|guard (?:let )?\w+|if let \w+ =|@(?:State|IBOutlet"
        r"|Published|main|Binding)\b|struct \w+: \w+|extension \w+|var \w+: (?:some |\[|String|Int|Double"
        r"|Bool)"),
    LineShape("Scala", 4, "scala",
        r"(?:case )?(?:class|object) \w+.*(?: extends \w+|\{)$(?<![a-z] \{)|object \w+"
        r"|def \w+(?:\[[^\]\n]+\])?(?:\([^)\n]*\))*: ?[\w\[\], ]+ = |case class |case \w+.* => "
        r"|sealed trait |import scala\.|implicit val "),
    LineShape("val or var", 2.5, "kotlin scala swift", r"(?:val|var|let) \w+(?:: ?[A-Z][\w<>\[\]?, ]*)? = "),
    LineShape("Haskell or ML", 4, "haskell",
        r"\w+'? :: .+|data \w+(?: \w+)* = |import qualified |module [\w.]+ (?:\([^)\n]*\) )?where|newtype "
        r"|instance \w+ .+ where|main = do|import (?:Data|Control|System)\.[A-Z]|\w+ \(\w+:\w+\) = "
        r"|deriving "),
    LineShape("OCaml or F#", 3, "ocaml",
        r"let rec \w+ .*=|let \w+ \w+(?: \w+)* =$|\| \[?\w.* -> |match \w+ with$|module \w+ = struct"),
    LineShape("R", 4, "r", r"[\w.]+ <- |library\(\w+\)|ggplot\(|install\.packages\(|set\.seed\("),
    LineShape("Lua", 3.5, "lua",
        r"local (?:function )?\w+(?:, ?\w+)*(?: ?=|\(|$)|function \w+[.:]?\w*\([^)\n]*\)$"
        r"|for \w+(?:, ?\w+)* (?:= .+|in i?pairs\(.+) do$|if .+ then$|elseif .+ then$"),
    LineShape("MATLAB", 3.5, "matlab",
        r"function (?:\[?[\w, ]+\]? ?= ?)\w+|(?:clear all|close all|clc);?|figure;|\w+ = (?:zeros|ones"
        r"|linspace|rand|eye)\(|disp\(|fprintf\('|for \w+ ?= ?\w+:\w+|plot\("),
    LineShape("Julia", 3, "julia",
        r"using [A-Z]\w+(?:, ?[A-Z]\w+)*$|function \w+\(.*\)(?: where .*|::\w+)?$|println\(\"|@time "),
    LineShape("Elixir", 4, "elixir", r"defmodule |defp? \w+.* do$|\|> |IO\.puts"),
    LineShape("Lisp form", 4, "clojure", r"\((?:defn-?|ns|def|defmacro) [\w\[-]"),
    LineShape("Lisp form", 4, "lisp",
        r"\((?:defun|define|defvar|setq|setf|let|lambda|cond|loop|display|format) [\[(\w*'\"]"),
    LineShape("Visual Basic", 4, "vba",
        r"(?:Public |Private )?(?:Sub|Function) \w+\(|Dim \w+|End (?:Sub|Function|If|With)$|Set \w+ = "
        r"|Next \w+$|For (?:Each )?\w+ (?:=|In) |MsgBox |Range\("),
    LineShape("Dart", 3.5, "dart",
        r"import 'package:|Widget build\(|@override$|void main\(\) (?:async )?(?:\{|=>)|final \w+ \w+;"
        r"|late \w+"),
    LineShape("Solidity", 4, "solidity",
        r"pragma solidity|contract \w+ ?(?:is \w+ ?)?\{|mapping\(|function \w+\(.*\) (?:public|external"
        r"|internal|private)|require\(msg\."),
    LineShape("Fortran or COBOL", 3.5, "fortran",
        r"(?i:program \w+$|implicit none|subroutine \w+|end (?:do|program|subroutine)|integer ?(?:,.*)?::"
        r"|real ?(?:\(\w+\))? ?(?:,.*)?::|identification division|procedure division)"),
    LineShape("assembly", 4, "assembly",
        r"(?i:mov[lqbwz]?|push[lq]?|pop[lq]?|lea[lq]?|jn?[eazlg]e?|jmp|cmp[lq]?|xor[lq]?|add[iu]*|sub[lq]?"
        r"|ldr|str|li|la|lw|sw|beq|bne)\s+[%$\[]?\w+\]?(?:\(%?\w+\))?, ?[-%$#\[\w]|section \.\w+|global _\w+"
        r"|\.(?:globl|text|data|section)\b|(?:int 0x80|syscall|ret)$"),
    LineShape("typed declaration", 3.5, "c cpp java csharp",
        rf"(?:(?:static|const|final|inline|constexpr|extern|virtual|unsigned"
        rf"|volatile) )*(?:{_TYPES})(?:\[\])?[ *&]+\w+(?:\[\w*\])*(?: ?=[^=].*[;{{,(]$| ?;"
        rf"| ?\([^;\n]*\)(?: ?const)?(?: ?override)? ?[{{;]?$|, ?\w+.*;$| ?\([^)\n]*\) ?\{{)"),
    LineShape("class declaration", 3.5, "java javascript csharp cpp php",
        r"(?:(?:abstract|final|export|default|data|sealed|static) )*(?:class|interface|struct|enum"
        r"|trait) \w+(?:<[^>\n]*>)?(?: (?:extends|implements) [\w, <>.]+)*(?: ?: ?(?:public )?\w+)? ?\{"),
    LineShape("block statement", 3, "",
        r"\}? ?(?:else )?(?:if|while|for|switch|catch|foreach|until) ?\(.+\) ?\{?$|\} ?else|else ?\{|do ?\{"
        r"|try ?\{|finally ?\{|for ?\([^)\n]*;[^)\n]*;|case [\w'\".]+:|default:$|(?:if"
        r"|while) ?\([^)\n]+\) .*;$|for \w+ in .+ \{$|if [^.\n]+ \{$|while [^.\n]+ \{$|(?:continue|break);"),
    LineShape("return statement", 2.5, "",
        r"return\b[^\n]*;$|return (?:[\w.]+\(.*\)|\w+ [-+*/=<>!&|%]+ .+|\[.*\]|\w+\[.*|None|True|False|true"
        r"|false|null|nil|self\.\w+|-?\d+|\w+_\w+)$|return;?$|throw new "),
    LineShape("arrow function", 3, "javascript typescript", r"[^=\n]{0,80}+=> ?(?:\{|\(|\w+[.(]|`)"),
    LineShape("annotation", 2, "", r"@[a-zA-Z][\w.]*(?:\(.*\))?$"),
    LineShape("comment", 1.5, "", r"//[ /!]? ?\S|/\*|\*/$|\* @\w+|--\[\[|;; "),
    LineShape("shell prompt", 3.5, "bash",
        r"(?:\$|%|\w+@[\w.-]+[:~ ][^$#\n]{0,40}[$#]) (?:sudo |\./)?[a-z][\w.-]*(?: |$)(?!\d)"),
    LineShape("shell command", 3, "bash",
        rf"(?:sudo )?(?:{_COMMANDS}) (?:\S+ ){{0,4}}?(?:--?[A-Za-z][\w-]*|[~./]\S*/\S*|https?://\S+)(?= |$|=)"),
    LineShape("shell command", 3, "bash",
        r"(?:sudo (?:apt|yum|systemctl)|git (?:add|commit|push|pull|checkout|rebase|clone|merge|reset|stash"
        r"|init)|npm (?:install|run|i|start|test)|pip3? install|docker (?:run|build|ps|exec|compose|pull"
        r"|push)|kubectl (?:get|apply|delete|describe|logs)|apt(?:-get)? install|brew install|cargo (?:build"
        r"|run|test)|go (?:run|build|mod|test))\b(?! (?:is|was|are|to|and|for)\b)[^?]*$"),
    LineShape("shell script", 3, "bash",
        r"if \[\[? .+ \]\]?;? ?(?:then)?$|for \w+ in .+; do|while (?:read|true|\[).*(?:do)?$|(?:fi|done"
        r"|esac)(?: <.*)?$|then$|do$|[A-Za-z_]+=(?:\"?\$|\$\()|export [A-Z_]+=|echo [\"'$]|set -[a-z]+"
        r"|\w+\(\) ?\{$|local \w+="),
    LineShape("batch file", 3.5, "batch", r"@echo off|(?i:set /p|goto :|rem )|:\w+$(?<=:eof)"),
    LineShape("SQL", 4, "sql",
        r"(?i:select\b.+\bfrom\s+[\w\"`\[#(]|select(?: distinct)?(?: \w+\.\w+.*|\s*\*.*)?,?$|insert into \w"
        r"|update \w+ set\b|delete from \w+(?:;| where|$)"
        r"|create (?:or replace )?(?:unique )?(?:temp(?:orary)? )?(?:table|index|view|function|procedure"
        r"|trigger|database) (?!of\b)\w|alter table \w|drop (?:table|index|view) \w|with \w+ as \($"
        r"|truncate table \w|grant \w+ on |merge into )"),
    LineShape("SQL clause", 2.5, "sql",
        r"(?:FROM [\w\"`\[]+(?: (?:AS )?\w+)?,?$|WHERE .*[=<>]|(?:INNER |LEFT |RIGHT |OUTER |FULL )*JOIN \w"
        r"|GROUP BY |ORDER BY |HAVING |LIMIT \d|UNION\b|VALUES ?\()|(?:left |inner )?join \w+ (?:\w+ )?on "
        r"|group by \w+|order by \w+(?:\.\w+)?(?: desc| asc)?;?$|where \w+(?:\.\w+)? ?(?:=|<|>|in|like|is)"
        r"|(?:PRIMARY|FOREIGN) KEY|\w+ (?:INT|INTEGER|VARCHAR|TEXT|SERIAL|TIMESTAMP|DECIMAL|BOOLEAN)\b.*,?$"),
    LineShape("HTML", 4, "html",
        r"<!DOCTYPE|</?(?:html|head|body|div|span|table|tr|td|th|ul|ol|li|a|img|script|style|form|input"
        r"|button|nav|section|header|footer|main|h[1-6]|p|br|hr|link|meta|label|select|option|textarea"
        r"|template|iframe|canvas|article|center|strong|em|b|i)(?: [^<>\n]*)?/?>"),
    LineShape("SVG", 4, "svg",
        r"</?(?:svg|path|rect|circle|polygon|polyline|ellipse|linearGradient|defs|g|text"
        r"|line)(?: [\w:-]+=[^<>\n]*|)/?>(?<!<text>)(?<!<line>)(?<!</text>)(?<!</line>)"),
    LineShape("XML configuration", 3.5, "xml",
        r"<(?:project|dependenc(?:y|ies)|groupId|artifactId|plugin|configuration|beans?|web-app|xs:\w+"
        r"|xsl:\w+|appSettings|PropertyGroup|PackageReference|manifest|LinearLayout|TextView"
        r"|property name=)\b|</?(?:[A-Z]\w+\.)?(?:Grid|StackPanel|Window|UserControl)\b"),
    LineShape("component markup", 3.5, "javascript typescript",
        r"</?[A-Z]\w+(?: [\w:-]+=\{[^\n]*|(?: \w+)* ?/?)>(?<![A-Z]>)|<\w+ [^<>\n]*(?:className|onClick"
        r"|onChange|v-if|v-for|\*ngIf)="),
    LineShape("CSS", 3.5, "css",
        r"@(?:media|keyframes|import url|font-face|tailwind|apply)\b|(?:[.#&:*][\w-]+|body|html|div|span|a|p"
        r"|ul|li|h[1-6]|button|input|table|img|nav)(?:[ ,>:.#~+\[][^{}\n;]*)? ?\{|(?:color"
        r"|background(?:-color)?|margin(?:-\w+)?|padding(?:-\w+)?|display|position|width|height"
        r"|font(?:-\w+)?|border(?:-\w+)?|flex(?:-\w+)?|grid(?:-\w+)*|justify-content|align-items|z-index|top"
        r"|left|overflow|transform|transition|opacity|max-width|text-align): ?[^;\n]+;"),
    LineShape("Dockerfile", 3.5, "dockerfile",
        r"FROM [a-z][\w./-]*(?::[\w.-]+)(?: AS \w+)?$|RUN (?:apt|pip|npm|yarn|go|mkdir|apk|curl|yum|useradd"
        r"|chmod|cd|set|--mount)|COPY (?:--from=\S+ )?\S+ \S+$|ENTRYPOINT \[|CMD \[|WORKDIR /|EXPOSE \d"
        r"|FROM (?:alpine|ubuntu|debian|scratch|python|node|golang)\b"),
    LineShape("YAML configuration", 3, "yaml",
        r"apiVersion: ?\w|kind: [A-Z]\w+$|(?:services|jobs|steps|containers|spec|metadata|volumes|stages"
        r"|tasks|handlers|environment|ports|scrape_configs|inputs|pipelines?|on|env|hosts):$"
        r"|(?:- )?(?:uses: \w+/|runs-on: |run: \w|image: [\w./-]+(?::[\w.-]+)?$|replicas: \d"
        r"|containerPort: \d|restart: \w|become: |hosts: \w|ansible\.|apt:$)|version: ['\"]\d"),
    LineShape("configuration block", 3, "nginx",
        r"(?:server|upstream \w+|location [~=^ ]*\S+|http|events) ?\{$|(?:listen \d+.*|proxy_pass .+"
        r"|server_name .+|root /.+|proxy_set_header .+|worker_\w+ .+);"),
    LineShape("Terraform", 4, "terraform",
        r"(?:resource|data) \"\w+\" \"\w+\" ?\{|(?:provider|variable|module|output) \"[\w-]+\" ?\{"),
    LineShape("INI or TOML section", 2.5, "",
        r"\[(?:Unit|Service|Install|tool\.[\w.-]+|build-system|project|package|dependencies|mysqld|default"
        r"|global|\w+\.\w+)\]$|(?:ExecStart|WantedBy|After|Restart)="),
    LineShape("environment variable", 1.5, "", r"[A-Z][A-Z0-9_]{3,}=\S+$"),
    LineShape("JSON configuration", 3, "json",
        r"\"(?:\$schema|compilerOptions|devDependencies|dependencies|scripts|additionalProperties"
        r"|eslintConfig)\": ?[\[{\"]"),
    LineShape("Makefile", 3.5, "makefile",
        r"\.PHONY:|[\w.-]++:(?: [\w./$()-]++)++$(?<=\.o)|\$\((?:CC|CXX|MAKE)\)|(?:CC|CFLAGS|LDFLAGS"
        r"|CXX) ?[:?+]?="),
    LineShape("GraphQL or protobuf", 3.5, "graphql",
        r"(?:query|mutation|subscription) \w*(?:\([^)\n]*\))? ?\{|message \w+ \{|syntax = \"proto"
        r"|service \w+ \{|rpc \w+\(|type (?:Query|Mutation) \{"),
    LineShape("pseudo-code", 2.5, "pseudocode",
        r"(?:ELSE )?IF .+ THEN\b|(?:WHILE|FOR(?: EACH)?) .+(?: DO\b| TO \S+)|FOR EACH \w+ IN |(?:END ?(?:IF"
        r"|FOR|WHILE|FUNCTION|PROCEDURE)?|REPEAT|ENDIF|ENDWHILE|BEGIN)$|(?:PROCEDURE|FUNCTION|ALGORITHM"
        r"|procedure|algorithm) \w+ ?\(|REPEAT .+ TIMES|IF ?\(.+\)|DISPLAY ?\(|(?:INPUT|OUTPUT|PRINT|DISPLAY"
        r"|RETURN|SET|READ) (?:\w+|\".*)$|\w+(?:\[\w+\])? ?← ?\S|(?i:for each \w+ in \w+)(?: do|:)?$|(?:while"
        r"|for|if) [^.?]+ (?:do|then):?$|set \w+ (?:to|=) \S+$"),
    LineShape("spreadsheet formula", 4, "spreadsheet", r"=[A-Z]{2,}[A-Z.]*\("),
    LineShape("end of block", 1.5, "ruby lua", r"(?:end|\}\)?;?|\]\);?|\);)$"),
    LineShape("call", 2, "", r"[a-z_][\w.]*+(?:\[[^\]\n]*\])?(?:->|\.|::)\w+\(.*\)?[;,{:]?$|[a-z_]\w*+\([^)\n]*\);$"),
    LineShape("assignment", 1.5, "",
        r"[a-z_$@][\w.$]*+(?:\[[^\]\n]*\])? (?::?=|\+=|-=|\*=|\|=) .*[\w)\]}\"'`;]$(?<![a-z]\.)"),
)
# fmt: on
