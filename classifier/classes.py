"""What kind of work is a prompt? One table of evidence for each class, and an honest "don't know"."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING

from classifier.code import excerpt
from classifier.natural import foreign_score
from classifier.signals import Signal, probability, signal, weigh

if TYPE_CHECKING:
    from classifier.code import CodeFindings


class PromptClass(StrEnum):
    """The classes that quality is measured and promised for."""

    CHAT = "chat"
    CODE = "code"
    MATH = "math"
    EXTRACTION = "extraction"
    WRITING = "writing"
    MULTILINGUAL = "multilingual"
    LONG_CONTEXT = "long_context"
    UNKNOWN = "unknown"


LONG_TOKENS = 1500
_I = re.IGNORECASE | re.MULTILINE

_MATH = (
    signal("asks how many", r"\bhow (?:many|much|long|far|old|fast|tall)\b|\bwhat (?:is|was|are|percent\w*|fraction|will be) (?:the )?(?:total|sum|product|probability|value|average|mean|area|volume|difference|remainder|ratio|perimeter|derivative|integral|number of)", 1.6, flags=_I),
    signal("numbers", r"(?<![\w.])[$€£]?\d[\d,.]*%?(?![\w.]*\w{6})", 0.35, 5),
    signal("arithmetic", r"\d ?[-+*/×÷^=<>] ?\d|\d ?%|\b\w ?= ?-?\d|\bx\^?\d|\b[fgh]\([a-z]\)|\\(?:frac|sqrt|sum|int|pi)\b|[∑∫√≤≥±∞θπ]", 1.2, 2),
    signal("mathematical words", r"\b(?:calculate|compute|solve|prove|proof|equations?|integral|derivative|probability|matri(?:x|ces)|polynomials?|theorem|triangle|rectangle|radius|angle|prime|integers?|divisible|modulo|factorial|logarithm|sum of|average|percent(?:age)?|ratio|square root|hypotenuse|vectors?|isomorphi\w+|invertible|permutations?|remainder|interest rate|velocity)\b", 1.1, 3, flags=_I),
    signal("quantities that change", r"\b(?:twice|thrice|half|times as|more than|less than|fewer|each|per (?:hour|day|week|month|year|person|minute)|total|altogether|remaining|left over|left)\b", 0.45, 4, flags=_I),
    signal("reasoning", r"\b(?:step[- ]by[- ]step|logic(?:al)?|puzzle|riddle|deduce|infer|syllogism|if .{3,80} then|therefore|premises?|contradiction|counterexample|who is (?:taller|older|the)|true or false|valid argument|fallac(?:y|ies))\b", 1.2, 2, flags=_I),
    signal("multiple choice", r"^ ?\(?[A-E][.):] ?\S[^\n]*\n ?\(?[B-E][.):] ?\S|\bI\. [^\n]+\bII\. ", 2.2),
    signal("which statement", r"\bwhich (?:of the following|one of these|statement|option)\b", 1.2, flags=_I),
)
_EXTRACTION = (
    signal("asks to extract", r"\b(?:extract|identify (?:the|all|any|each)|list (?:all|every|each)|pull out|find all|classify|categori[sz]e|label|tag each|rate (?:the|each|these)|evaluate the following|sentiment|summari[sz]e|tl;?dr|paraphrase|parse|annotate|redact|count the|key (?:points|takeaways|facts)|action items|named entit\w+|main (?:idea|point|argument))\b", 1.8, flags=_I),
    signal("refers to a given text", r"\b(?:(?:from|in|to|of|on|about|given) (?:the|this|these|each) (?:\w+ )?(?:text|passage|paragraph|article|document|email|review|table|data|sentence|transcript|conversation|contract|clause|log|list|notes|page|report|statement|excerpt|dialogue|abstract)s?|following (?:text|passage|paragraph|article|document|email|reviews?|table|data|sentences?|transcript|conversation|contract|clause|dialogue|statements?|movies?|list)|based on (?:the|this)|according to (?:the|this)|text below|passage below|below is|here (?:is|are) (?:the|a|an|my|some|two|three))\b", 1.5, 2, flags=_I),
    signal("asks for structured output", r"\b(?:as|in|into|to|return|output|produce|provide|with) (?:a |an |valid |strict )?(?:json|csv|xml|markdown table|table|bullet(?:ed)? (?:list|points))\b|\bjson (?:object|array|format|dictionary)\b", 1.5, flags=_I),
    signal("holds data", r"^[ \t]*[{\[]?\s*\"[\w -]{1,30}\" ?: ?|^(?:[^,\n]{1,30},){2,}[^,\n]{1,30}$|^\|.*\|[ \t]*$|^\d{4}-\d\d-\d\d[ T]\d\d:|^(?:From|To|Subject|Date): ", 1.2, 2),
    signal("passage and question", r"^(?:Q|Question|Passage|Text|Context|Article|Document|Review|Input|Answer)\s?\d{0,2}: ?", 1.3, 2, flags=_I),
    signal("answer from the text", r"\b(?:does|do|is|are) the (?:clause|passage|text|contract|author|policy|statement)\b|\banswer (?:the|these|this|only|with|yes)\b", 1.2, flags=_I),
)
_WRITING = (
    signal("asks to compose", r"\b(?:write|compose|draft|create|craft|generate|make|give me|come up with|help me (?:write|draft|construct)|rewrite|edit|proofread|continue|develop|produce|design|construct|need)\b[^.?!\n]{0,80}\b(?:essay|poem|story|stories|novel|chapter|scene|blog|article|e-?mail|letter|speech|toast|song|lyrics|rap|verse|haiku|limerick|sonnet|ballad|resume|cv|cover letter|job description|press release|tweets?|posts?|headlines?|slogans?|taglines?|captions?|bio(?:graphy)?|review|dialogue|screenplay|monologue|script for|play|description|ad(?:vert\w*)?|brochure|pamphlet|proposal|itinerary|report|summary of|paragraphs?|sentences?|riddles?|jokes?|puns?|names? for|newsletter|announcement|invitation|obituary|memo|text message|rubric|list of|quiz|lesson|outline|template|note|argument|quotes?|fairy ?tale|fable|parody|thank you)\b", 2.8, flags=_I),
    signal("role-play", r"\b(?:act as|pretend (?:to be|you)|role-?play|imagine (?:you|yourself|that you)|you are (?:now )?(?:a|an|the)\b|i want you to (?:act|be|play|respond|pretend)|in the (?:style|voice|persona) of|from the perspective of|embrace the role|picture yourself|take on the role|assume the role|play the (?:part|role))", 2.4, flags=_I),
    signal("style constraint", r"\b(?:in (?:a|an) [\w-]+ (?:tone|style|manner)|(?:less|more|fewer|at least|exactly|under|about) (?:than )?\d+ (?:words|sentences|paragraphs|lines|bullet)|all (?:lower|upper)case|do not (?:use|include) any (?:commas|the)|tone|rhym\w+|stanzas?|markdown|title wrapped|wrap (?:your|the) (?:entire )?(?:response|output)|highlight at least|keywords?|entire (?:reply|response))\b", 1.0, 2, flags=_I),
    signal("rephrase", r"\b(?:rewrite|rephrase|reword|edit|proofread|polish|improve|shorten|make (?:it|this) (?:sound|more|less|shorter|funnier))\b", 1.4, flags=_I),
)
_CHAT = (
    signal("greeting or thanks", r"\A\W{0,3}(?:hi+|hello|hey+|yo|sup|good (?:morning|evening|afternoon|night)|thanks?|thank you|thx|ok(?:ay)?|bye|cool|great|nice|lol|yes|no|sure|howdy|greetings|welcome|please|sorry|never ?mind)\b", 3.0, flags=_I),
    signal("question", r"^\W{0,3}(?:so |and |but |ok,? |hey,? |hi,? )?(?:what(?:'s|s)?|who(?:'s|se|m)?|when|where|why|how|which|can|could|is|are|am|do|does|did|will|would|should|has|have|was|were|may|might)\b", 2.2, flags=_I),
    signal("question mark", r"\?[\s\"')]*$", 1.0),
    signal("asks to explain", r"\b(?:explain|describe|tell me|teach me|define|compare|discuss|outline|elaborate|clarify|difference between|meaning of|what (?:is|are|was|were|do|does|would|should|kind|causes?)|how (?:do|does|did|can|could|would|is|are|should|to)|why (?:is|are|do|does|did)|pros and cons|advantages)\b", 1.8, flags=_I),
    signal("asks for advice", r"\b(?:suggest|recommend|advice|advise|ideas?|tips|help me|should i|best way|plan|planning|what can i|how can i|i need|i want|i'm|i am|i've|i feel|my (?:boss|friend|wife|husband|partner|son|daughter|kid|dog|cat|mom|dad|job|car|phone|account|bank|flight|order|doctor))\b", 1.4, flags=_I),
    signal("assistant command", r"\b(?:remind me|set (?:a|an|the|my)|turn (?:on|off|up|down)|play (?:some|the|my)|call (?:my|the|me)|book (?:a|me)|order (?:a|me|some)|schedule|translate|spell|show me|check (?:my|the|if|on)|cancel|transfer|pay|find me|look up|open|change (?:my|the)|add .{1,30} to my|tell|name (?:a|an|the|three|some|five|two|one)|give me|list)\b", 1.5, flags=_I),
    signal("short", r"\A[^\n]{3,90}\Z", 0.8, flags=0),
    signal("words of conversation", r"\b(?:you|your|i|me|my|we|us|please|let's|don't|can't|it's)\b", 0.3, 3, flags=_I),
)
_TABLES: tuple[tuple[PromptClass, float, tuple[Signal, ...]], ...] = (
    (PromptClass.MATH, -3.2, _MATH),
    (PromptClass.EXTRACTION, -2.6, _EXTRACTION),
    (PromptClass.WRITING, -2.2, _WRITING),
    (PromptClass.CHAT, -2.0, _CHAT),
)
_PROGRAMMING_TOPIC = re.compile(
    r"\b(?:programming|software|developers?|compil\w+|algorithms?|data ?base|database|recursion|API|kubernetes|docker|git|linux|server|big-?o|thread|mutex|"
    r"pointers?|garbage collect\w+|object[- ]oriented|framework|python|java(?:script)?|typescript|c\+\+|rust|sql|regex|html|css|machine learning|neural network|"
    r"operating system|tcp|http|encryption|binary (?:tree|search)|hash(?:ing| table| map)?|microservices?|deploy\w*|debugg\w+|codebase|repository)\b",
    re.IGNORECASE,
)
# A class needs more evidence than its bias to be named at all.
NAMED = 0.0
MARGIN_WEIGHT = 0.45  # of the lead over the second class, in the confidence
LONGEST_WORD_CHARS = 2


def classify(text: str, tokens: int, code: CodeFindings) -> tuple[PromptClass, float, tuple[str, ...]]:
    """Return the class, the confidence in it (0..1) and the names of the evidence.

    The confidence is the logistic of the class's score, less where another class is close behind. ``unknown`` says how
    sure it is that nothing was recognised.
    """
    if code.contains or code.asks:
        return PromptClass.CODE, probability(max(code.contains_score, code.asks_score) + 0.4), ()
    window = excerpt(text)
    scores: dict[PromptClass, float] = {PromptClass.MULTILINGUAL: foreign_score(window)}
    evidence: dict[PromptClass, tuple[str, ...]] = {PromptClass.MULTILINGUAL: ("prose is not English",)}
    for kind, bias, table in _TABLES:
        score, found = weigh(table, window)
        scores[kind] = score + bias
        evidence[kind] = tuple(name for _, name in found)
    if tokens > LONG_TOKENS:
        scores[PromptClass.LONG_CONTEXT] = 2.0 + (tokens - LONG_TOKENS) / 1000
        evidence[PromptClass.LONG_CONTEXT] = (f"{tokens} tokens",)
    best, second = sorted(scores, key=scores.__getitem__, reverse=True)[:2]
    near_code = -min(code.contains_score, code.asks_score, key=abs)
    if scores[best] <= NAMED or not _has_words(window):
        return PromptClass.UNKNOWN, probability(1.0 - scores[best]), ()
    lead = scores[best] - max(scores[second], NAMED)
    log_odds = 0.5 + 0.5 * scores[best] + MARGIN_WEIGHT * min(lead, 2.0)
    if near_code < 1.0:  # almost taken for code: doubt the class, so that the prompt goes up in precision
        log_odds -= 1.5
    return best, probability(log_odds), evidence[best]


def about_programming(text: str) -> bool:
    """Tell whether a prompt talks about software, whether or not it holds or asks for code."""
    return _PROGRAMMING_TOPIC.search(excerpt(text)) is not None


def _has_words(text: str) -> bool:
    return re.search(rf"[^\W\d_]{{{LONGEST_WORD_CHARS},}}", text) is not None
