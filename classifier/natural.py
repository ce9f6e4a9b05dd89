"""Is a prompt's prose mainly not English? By script, and by function words where the script is Latin."""

from __future__ import annotations

import re

SAMPLE_CHARS = 1500
_OTHER_SCRIPT = re.compile(r"[\u0370-\u1cff\u2c80-\u2ddf\u3040-\u30ff\u3400-\u9fff\ua640-\ua69f\uac00-\ud7af]")
_LATIN_ACCENT = re.compile(r"[\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff¿¡]")
_OTHER_SHARE = 0.15  # of a sample's characters: a word of such a script has fewer characters than an English one
_ACCENT_WEIGHT = 0.4
_MAX_ACCENTS = 6

_ENGLISH = frozenset(
    """
    the of and to in is that it for you was with on are this be have not or by what how your from they we can if would there
    which will my me at as i write who when where why does should between about please give explain an a he she his her
    """.split()  # noqa: SIM905
)
# Function words that are not English words as well, of Spanish, Portuguese, Italian, French, Catalan, Romanian; German, Dutch,
# Swedish, Danish, Norwegian; Polish, Czech, Turkish, Finnish, Hungarian; Vietnamese, Indonesian, Swahili.
_OTHERS = frozenset(
    """
    el la los las una del que por para con está más pero qué cómo cuál un es en y cuáles cuánto su se lo tiene mi sobre
    como posso os uma não com você mais são está dos das qual em seu ao pelo pela
    il gli che di della nel questo quale sono più è perché cosa mi
    le les des une est pour dans avec sur vous je nous qui ne pas quel quelle et du au sont cette
    și este pentru cu ce nu els amb
    der das und ist nicht ein eine für mit auf von zu wie ich sie wir kann bitte warum welche einen dem wird zwischen
    het een van niet voor met zijn op ik wat kun jij deze
    och är att det som på med inte har hur jag vad av ett til er og på hvordan ikke
    się jest jak na że czy proszę co w z dla są je jsou pro bir ve bu için ile nasıl nedir
    ja että miten az egy és hogy nem
    là của và có cho một không được các trong yang dan untuk dengan ini apa saya dari tidak adalah bagaimana kwa
    """.split()  # noqa: SIM905
)


def foreign_log_odds(text: str, words: list[str]) -> float:
    """Return the log-odds that prose is mainly in another language than English.

    Args:
        text: The prompt or its beginning.
        words: Its words in lower case.
    """
    sample = text[:SAMPLE_CHARS]
    accents = 0
    if not sample.isascii():
        if len(_OTHER_SCRIPT.findall(sample)) > _OTHER_SHARE * len(sample):
            return 5.0
        accents = min(len(_LATIN_ACCENT.findall(sample)), _MAX_ACCENTS)
    different = set(words)  # a repeated x, y or z is no language
    english = len(different & _ENGLISH)
    others = len(different & _OTHERS)
    return 1.3 * min(others, 8) - 1.3 * min(english, 8) + _ACCENT_WEIGHT * accents - 1.5
