"""Is a prompt's prose mainly not English? By script, and by function words where the script is Latin."""

from __future__ import annotations

import re

SAMPLE_CHARS = 1500
_WORD = re.compile(r"[^\W\d_]{1,20}")
# Characters of scripts other than Latin: Greek to Ethiopic, South and East Asian, Hangul.
_OTHER_SCRIPT = re.compile(r"[\u0370-\u139f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_ACCENTED = re.compile(r"[À-ɏḀ-ỿ]")
_ENGLISH = frozenset(
    "the of and to in is that it for you was with on are this be have not or by what how your from they we can do if would "
    "there which will my me an at as i a write who when where why does should between about please give explain".split()
)
_OTHERS = frozenset(
    # Spanish, Portuguese, Italian, French
    "el la los las una del que por para con como está más pero qué cómo cuál un es en y "
    "o os as uma não para com como você mais são está dos das qual "
    "il gli una che non per con come sono più della di nel questo quale scrivi "
    "le les des une est que pour dans avec sur vous je nous qui ne pas quel comment et du au "
    # German, Dutch, Swedish, Danish, Norwegian
    "der die das und ist nicht ein eine für mit auf von zu den wie ich sie es wir kann bitte warum welche einen dem "
    "het een van niet voor met zijn op hoe ik wat kun jij deze "
    "och är att det som en på för med inte har hur jag vad av ett til er og på hvordan ikke "
    # Polish, Czech, Turkish, Vietnamese, Indonesian, Romanian, Finnish, Hungarian
    "się nie jest jak na do że czy proszę napisz co to w z "
    "je se na že jak jsou prosím ve bir ve bu için ile nasıl ne olarak da "
    "là của và có cho một không được các trong yang dan di untuk dengan ini apa saya dari tidak adalah bagaimana "
    "și este pentru cum ce nu ja on ei että miten az egy és hogy nem".split()
) - {"a", "i", "in", "is", "to", "do", "on", "as", "me", "an", "was", "die", "den", "no", "so", "at", "by", "for", "we", "of"}
FOREIGN_SCRIPT_SHARE = 0.15


def foreign_score(text: str) -> float:
    """Return log-odds that the prose is mainly in another language than English."""
    sample = text[:SAMPLE_CHARS]
    if not sample.isascii():
        letters = len(_WORD.findall(sample)) * 4 or 1
        others = len(_OTHER_SCRIPT.findall(sample))
        if others > FOREIGN_SCRIPT_SHARE * max(letters, 1) and others > 1:
            return 5.0
    words = [w.lower() for w in _WORD.findall(sample)]
    if not words:
        return -3.0
    english = sum(w in _ENGLISH for w in words)
    other = sum(w in _OTHERS for w in words)
    accents = min(len(_ACCENTED.findall(sample)), 6)
    return 1.2 * min(other, 8) - 1.4 * min(english, 8) + 0.5 * accents - 1.5
