"""Say in plain sentences what a verification has found: on a terminal, on a page and in a log line alike."""

from __future__ import annotations

from enum import StrEnum

from router.verification.findings import (
    AnswerComparison,
    AnswersFinding,
    SpeedComparison,
    SpeedFinding,
    Verification,
)
from tiers.verification.findings import (
    Gap,
    LikelihoodFinding,
    SameModelFinding,
    Verdict,
)

SHORT_S = 10.0  # shorter durations are said with a tenth of a second
MINUTE_S = 60.0
HOUR_MIN = 60
# Below this many nats a token two sound engines differ by rounding alone.
NOTABLE_GAP = 0.005
# Two speeds that differ by less than this share count as equal.
NOTABLE_SLOWDOWN = 0.05


class Stage(StrEnum):
    """The parts of a verification, in their order."""

    SAME_MODEL = "same model"
    LIKELIHOOD = "likelihood"
    ANSWERS = "answers"
    SPEED = "speed"
    # of a reference, for later verifications
    RECORDING = "recording"


StageFinding = SameModelFinding | LikelihoodFinding | AnswersFinding | SpeedFinding


def of_100(share: float) -> str:
    """Return a share as a number of 100, without its sign: 0.061 is "6.1"."""
    return f"{100 * abs(share):.1f}"


def duration_words(seconds: float) -> str:
    """Return a duration as people say it: "4.2 s", "48 s", "3 min 20 s", "2 h 5 min"."""
    if seconds < SHORT_S:
        return f"{seconds:.1f} s"
    whole_s = round(seconds)
    if whole_s < MINUTE_S:
        return f"{whole_s} s"
    minutes, rest_s = divmod(whole_s, int(MINUTE_S))
    if minutes >= HOUR_MIN:
        hours, minutes = divmod(round(whole_s / MINUTE_S), HOUR_MIN)
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest_s} s"


def count_words(count: int, noun: str) -> str:
    """Return a count with its noun: "1 task", "2,140 tasks"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"


def tasks_compared(comparison: AnswerComparison) -> int:
    """Return how many tasks both engines have answered."""
    return comparison.decisive + comparison.both_wrong


def interval_words(low: float, high: float) -> str:
    """Return the ends of a loss's interval, of 100 answers.

    An end below 0 is a gain, and is called so: "3.2 to 9.8", "1.1 gained to 1.8 lost", "3.0 to 1.2 gained".
    """
    if low >= 0:
        return f"{of_100(low)} to {of_100(high)}"
    if high <= 0:
        return f"{of_100(low)} to {of_100(high)} gained"
    return f"{of_100(low)} gained to {of_100(high)} lost"


def loss_words(comparison: AnswerComparison) -> str:
    """Return the loss of 100 answers: "6.1 lost", "0.4 gained", "none lost", or "-" where no task tells anything."""
    loss = comparison.loss
    if loss is None:
        return "-"
    if comparison.worse == comparison.better:
        return "none lost"
    if loss < 0:
        return f"{of_100(loss)} gained"
    return f"{of_100(loss)} lost"


def verdict_sentence(verification: Verification) -> str:
    """Return the verdict and its reason with numbers, such as "worse: 6.1 of 100 answers lost (3.2 to 9.8), 214 tasks"."""
    return f"{verification.verdict.value}: {_reason(verification)}"


def _reason(verification: Verification) -> str:
    """Return why the verdict is what it is: the first stage that says "worse", else what the answers say."""
    if verification.same_model.verdict is Verdict.WORSE:
        return f"not the same model: {same_model_sentence(verification.same_model)}"
    likelihood = verification.likelihood
    if likelihood is not None and likelihood.verdict is Verdict.WORSE:
        return likelihood.faults[0].rstrip(".")
    reason = "no answers were compared; nothing that was checked is at fault"
    if verification.answers is not None:
        reason = answers_sentence(verification.answers)
    speed = verification.speed
    if speed is not None and _slowdown(speed) > NOTABLE_SLOWDOWN:
        reason += f"; {speed_sentence(speed)}"
    return reason


def next_step(verification: Verification) -> str:
    """Return what to do next, in one sentence or two."""
    if verification.same_model.verdict is Verdict.WORSE:
        fault = next(
            difference
            for difference in verification.same_model.differences
            if difference.is_fault
        )
        return fault.explanation
    likelihood = verification.likelihood
    if likelihood is not None and likelihood.verdict is Verdict.WORSE:
        return (
            "Send it no requests. Start the candidate with one thing changed at a time (--enforce-eager, another attention "
            "backend, --kv-cache-dtype auto, another release of vLLM, another checkpoint) until this finding goes away."
        )
    if verification.answers is None:
        return "Run it again without --max-tasks 0 to compare answers."
    return _next_step_after_answers(verification.answers)


def _next_step_after_answers(finding: AnswersFinding) -> str:
    if finding.verdict is Verdict.SAME:
        return "The candidate can take the reference's place."
    if finding.verdict is Verdict.WORSE:
        return (
            f"Read the answers that got worse (--report FILE.html shows them side by side)"
            f"{_worst_classes(finding)}; if such a loss is acceptable, name it with --tolerate."
        )
    overall = finding.overall
    unasked = ""
    if finding.unasked:
        unasked = f" Not asked: {count_words(finding.unasked, 'task')}; raise --minutes or --max-tasks."
    if not overall.decisive:
        return f"Give easier tasks, best your own, with --tasks FILE.{unasked}"
    if overall.both_wrong > overall.decisive:
        return (
            f"No fault was found, but neither engine solved {count_words(overall.both_wrong, 'task')}, which therefore tell "
            f"nothing: give easier ones, best your own, with --tasks FILE, or tolerate more with --tolerate.{unasked}"
        )
    if unasked:
        return f"No fault was found.{unasked}"
    return "No fault was found. To know more, give more tasks with --tasks FILE, or tolerate more with --tolerate."


def _worst_classes(finding: AnswersFinding) -> str:
    """Name the classes that are known to be worse, for a sentence; nothing if none is."""
    names = [
        comparison.prompt_class.value
        for comparison in finding.by_class
        if comparison.verdict is Verdict.WORSE and comparison.prompt_class is not None
    ]
    if not names:
        return ""
    return f", above all {' and '.join(names)}"


def stage_sentence(finding: StageFinding) -> str:
    """Return what a stage has found, in one sentence without the verdict."""
    match finding:
        case SameModelFinding():
            return same_model_sentence(finding)
        case LikelihoodFinding():
            return likelihood_sentence(finding)
        case AnswersFinding():
            return answers_sentence(finding)
        case SpeedFinding():
            return speed_sentence(finding)


def same_model_sentence(finding: SameModelFinding) -> str:
    """Return what differs, such as "chat template and sampling defaults differ"."""
    faults = [
        difference.subject for difference in finding.differences if difference.is_fault
    ]
    subjects = faults or [difference.subject for difference in finding.differences]
    if not subjects:
        return "nothing differs"
    # a single subject may be a plural, such as "tool calls"
    is_plural = len(subjects) > 1 or subjects[0].endswith("s")
    verb = "differ" if is_plural else "differs"
    sentence = f"{enumeration(subjects)} {verb}"
    if faults:
        return sentence
    return f"{sentence}, which is no fault"


def enumeration(words: list[str]) -> str:
    """Join words as in a sentence: "a", "a and b", "a, b and c"."""
    if len(words) == 1:
        return words[0]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def likelihood_sentence(finding: LikelihoodFinding) -> str:
    """Return the first fault, or how alike both engines compute."""
    if finding.faults:
        return finding.faults[0]
    gaps = [gap for gap in finding.by_kind if gap.writer == "reference"]
    if not gaps:
        gaps = list(finding.by_kind)
    if not gaps:
        return "nothing could be scored"
    total = mean_gap(gaps)
    changed = f"{of_100(total.changed)} of 100 first choices differ"
    if abs(total.gap) < NOTABLE_GAP:
        return f"both find the same words equally likely; {changed}"
    scorer = "the candidate"
    writer = "the reference"
    if total.writer == "candidate":
        scorer, writer = writer, scorer
    comparative = "less" if total.gap > 0 else "more"
    return (
        f"{scorer} finds {writer}'s words {abs(total.gap):.2f} nats a token {comparative} likely; "
        f"{changed}"
    )


def mean_gap(gaps: list[Gap]) -> Gap:
    """Return the mean of gaps of one writer, weighted by their tokens; at least one gap is given."""
    tokens = sum(gap.tokens for gap in gaps)
    weight = max(tokens, 1)
    return Gap(
        writer=gaps[0].writer,
        part="all",
        tokens=tokens,
        gap=sum(gap.gap * gap.tokens for gap in gaps) / weight,
        changed=sum(gap.changed * gap.tokens for gap in gaps) / weight,
    )


def answers_sentence(finding: AnswersFinding) -> str:
    """Return how many answers are lost, with the interval and the number of tasks."""
    overall = finding.overall
    tasks = count_words(tasks_compared(overall), "task")
    if not overall.decisive:
        return f"no task tells anything: neither engine solved any of {tasks}"
    interval = interval_words(overall.low, overall.high)
    if overall.verdict is Verdict.WORSE:
        return f"{_signed_loss(overall)} of 100 answers lost ({interval}), {tasks}"
    tolerated = f"{100 * finding.tolerated:g} tolerated"
    if overall.verdict is Verdict.SAME:
        if overall.high <= 0:
            return f"no answers lost (of 100: {interval}), {tasks}"
        return (
            f"at most {of_100(overall.high)} of 100 answers lost ({tolerated}), {tasks}"
        )
    sentence = f"{_open_interval(overall)} ({tolerated}), {tasks}"
    if overall.tasks_needed is None:
        return sentence
    return f"{sentence}; would need about {about(overall.tasks_needed):,} more"


def about(count: int) -> int:
    """Round a count to two digits, because it is an estimate: 1,269 is about 1,300."""
    digits = len(str(count))
    return round(count, min(2 - digits, 0))


def _signed_loss(comparison: AnswerComparison) -> str:
    """Return the loss of 100 answers; a candidate that is known to be worse has lost some."""
    loss = comparison.loss
    assert loss is not None
    return of_100(loss)


def _open_interval(comparison: AnswerComparison) -> str:
    """Return an interval that does not decide: "between 0.3 and 5.1 of 100 answers lost"."""
    low = of_100(comparison.low)
    high = of_100(comparison.high)
    if comparison.low >= 0:
        return f"between {low} and {high} of 100 answers lost"
    if comparison.high <= 0:
        return f"between {high} and {low} of 100 answers gained"
    return f"between {low} gained and {high} lost of 100 answers"


def speed_sentence(finding: SpeedFinding) -> str:
    """Return how fast the candidate is at the highest load, beside the reference."""
    if not finding.loads:
        return "no load could be measured"
    highest = finding.loads[-1]
    streams = count_words(highest.streams, "stream")
    first = _ratio_words(highest.reference_ttft_ms, highest.candidate_ttft_ms)
    further = _ratio_words(highest.reference_tpot_ms, highest.candidate_tpot_ms)
    if first == further:
        return f"the candidate's tokens come {first} ({streams})"
    return (
        f"the candidate's first token comes {first}, further ones {further} ({streams})"
    )


def _ratio_words(reference_ms: float, candidate_ms: float) -> str:
    """Say how a time of the candidate compares with the reference's."""
    if reference_ms <= 0 or candidate_ms <= 0:
        return "at a speed that could not be measured"
    ratio = candidate_ms / reference_ms
    if abs(ratio - 1) <= NOTABLE_SLOWDOWN:
        return "as fast"
    if ratio > 1:
        return f"{100 * (ratio - 1):.0f} % later"
    return f"{100 * (1 - ratio):.0f} % sooner"


def _slowdown(finding: SpeedFinding) -> float:
    """Return by which share the candidate's further tokens take longer at the highest load; below 0: it is faster."""
    if not finding.loads:
        return 0.0
    return tpot_slowdown(finding.loads[-1])


def tpot_slowdown(load: SpeedComparison) -> float:
    """Return by which share each further token of the candidate takes longer; 0 where that was not measured."""
    if load.reference_tpot_ms <= 0:
        return 0.0
    return load.candidate_tpot_ms / load.reference_tpot_ms - 1
