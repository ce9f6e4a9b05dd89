"""Train the classifier's weights from labelled prompts and write the files that come with the package.

    .venv-classifier/bin/python scripts/train_classifier.py --data PLACE [--data PLACE ...] [--output classifier/weights.ftz]
    .venv-classifier/bin/python scripts/train_classifier.py --data PLACE [--data PLACE ...] --left-out batch|domain|language

``scripts/setup classifier`` makes that environment: fastText with training needs NumPy 1. A place is a folder or a file of
JSON lines, packed or not, with these fields: ``text``, ``contains_code``, ``asks_for_code``, ``language``, ``class``,
``source``, and where they are known ``complexity``, ``domain`` and ``nl`` (the language that it is written in). Written
prompts to which no answer can be right or wrong have ``small_talk``, which is true, and a class of ``JUDGED`` all the same.
Prompts whose source starts with ``written`` are the users' kind and count ``REPEATS`` times; of each other source there are
``CAP`` at most.

``--left-out`` writes nothing: it leaves whole batches (sources), domains or languages of written prompts out, a part at a
time, and prints how good what is trained without them is on them: mean and standard deviation over the parts. Probabilities
are calibrated on batches that were left out in the same way (Platt, 1999).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean, pstdev
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fasttext

from classifier.features import BEYOND_TRIVIAL as ENOUGH
from classifier.features import SMALL_TALK as SMALL_TALK_ENOUGH
from classifier.features import words_of
from classifier.kinds import JUDGED, Complexity, PromptClass
from classifier.model import (
    ABOUT_FILE,
    ASKS,
    BEYOND_TRIVIAL,
    CLASSES,
    COMPLEX,
    CONTAINS,
    HAS,
    LABELS,
    LANGUAGE,
    OUTPUTS,
    SMALL_TALK,
    WEIGHTS_FILE,
    Model,
    digest,
    line_of,
    model_of,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Prompt = dict[str, Any]
# prompts of a source that nobody wrote, and of one in one language other than English
CAP, FOREIGN_CAP = 150, 20
REPEATS = 5  # of a written prompt, and of one that says nothing
ALIKE_TIMES = 2  # as often again: a prompt without code that looks like one with it
# As often again: small talk, and written prompts beside it that are none. They are few, and their words are everywhere.
SMALL_TALK_TIMES = 2
SMALL_TALK_DOMAIN = "smalltalk"
NONSENSE = 1500  # made-up texts that say nothing
# prompts, on which a model in eight bits is compared with the one before
COMPARED = 2000
# of them, for which a yes or no about code may turn around: 0.2 to 0.5 % are usual
MOST_TURNED = 0.01
FOLDS = 5  # of batches, domains and languages
FAST = {
    "loss": "ova",
    "dim": 16,
    "epoch": 6,
    "lr": 0.15,
    "wordNgrams": 2,
    "minn": 3,
    "maxn": 4,
    "bucket": 300_000,
}
SMALLEST = 1e-9  # step of a fit
# of which fastText learns the 256 norms that eight bits can tell apart
CODEBOOK_ROWS = 65_536
LEAST_OF_LANGUAGE = 20  # prompts, for which a programming language is known
ALIASES = {
    "excel": "spreadsheet", "google-sheets": "spreadsheet", "hcl": "terraform", "cs": "csharp", "structured text": "plc",
    "ladder logic": "ladder", "apache": "apacheconf", "plsql": "sql", "psql": "sql", "mysql": "sql", "elisp": "lisp",
    "vue-html": "html", "spl": "splunk", "cron": "bash",
}  # fmt: skip
THRESHOLDS = {
    BEYOND_TRIVIAL: math.log(ENOUGH / (1 - ENOUGH)),
    SMALL_TALK: math.log(SMALL_TALK_ENOUGH / (1 - SMALL_TALK_ENOUGH)),
}  # log-odds from which an output holds; 0 of the others
NAMES = {number: label for label, number in LABELS.items()}


def main() -> None:
    """Read, train, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data",
        type=Path,
        action="append",
        required=True,
        help="folder or file of JSON lines",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=WEIGHTS_FILE,
        help="weights file (default: the package's)",
    )
    parser.add_argument(
        "--bucket",
        type=int,
        default=FAST["bucket"],
        help=f"rows for pairs of words and parts of words (default: {FAST['bucket']:,}); fewer are trained sooner",
    )
    parser.add_argument(
        "--left-out", choices=("batch", "domain", "language"), help="report instead"
    )
    parser.add_argument(
        "--worst",
        type=int,
        default=0,
        help="with it: print so many of the worst errors about code too",
    )
    options = parser.parse_args()
    FAST["bucket"] = options.bucket
    prompts, data = read_prompts(options.data)
    prompts = choose(prompts, random.Random(0))
    labels = label(prompts)
    left_out = options.left_out or "batch"
    groups = [group_of(prompt, left_out) for prompt in prompts]
    scores, tests = leave_out(prompts, labels, groups)
    if options.left_out:
        figures = []
        for test in tests:  # calibrated on the other parts
            known = calibrate(
                labels,
                scores,
                [row for other in tests if other is not test for row in other],
            )
            figures.append(measure(prompts, labels, calibrated(scores, *known), test))
        for name in figures[0]:
            values = [each[name] for each in figures if not math.isnan(each[name])]
            print(f"{name:38}{fmean(values):.3f} ± {pstdev(values):.3f}")
        print_worst(prompts, labels, scores, options.worst)
        return
    rows = [row for test in tests for row in test]
    slope, shift = calibrate(labels, scores, rows)
    model = fit(prompts, labels, options.output)
    about = {
        "sha256": digest(options.output),
        "outputs": OUTPUTS,
        "slope": slope,
        "shift": shift,
        "data_sha256": data,
        "prompts": dict(
            Counter("written" if written(prompt) else "other" for prompt in prompts)
        ),
        "fasttext": FAST,
        "left_out": {
            name: round(value, 3)
            for name, value in measure(
                prompts, labels, calibrated(scores, slope, shift), rows
            ).items()
        },
    }
    options.output.with_name(ABOUT_FILE).write_text(
        json.dumps(about, indent=1) + "\n", "utf-8"
    )
    print(
        json.dumps(about["left_out"], indent=1),
        f"\n{len(prompts)} prompts, {len(model.labels)} labels; {options.output}",
    )


def written(prompt: Prompt) -> bool:
    """Tell whether a prompt is of the users' kind."""
    return str(prompt["source"]).startswith("written")


def read_prompts(places: Iterable[Path]) -> tuple[list[Prompt], str]:
    """Return the prompts of files and folders, and the SHA-256 of all their content."""
    content = hashlib.sha256()
    prompts = []
    for place in places:
        files = (
            [place]
            if place.is_file()
            else sorted([*place.glob("train.jsonl*"), *place.glob("written*.jsonl")])
        )
        for file in files:
            text = (
                gzip.decompress(file.read_bytes())
                if file.suffix == ".gz"
                else file.read_bytes()
            )
            content.update(text)
            prompts += [
                json.loads(line) for line in text.decode("utf-8").split("\n") if line
            ]
    return prompts, content.hexdigest()


def choose(prompts: Iterable[Prompt], rng: random.Random) -> list[Prompt]:
    """Return the written prompts, some of each other source, and nonsense."""
    groups: dict[tuple[str, str], list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        groups[
            prompt["source"], "en" if written(prompt) else prompt.get("nl") or "en"
        ].append(prompt)
    chosen = []
    for (_, spoken), group in groups.items():
        cap = CAP if spoken == "en" else FOREIGN_CAP
        chosen += (
            group if written(group[0]) or len(group) <= cap else rng.sample(group, cap)
        )
    return chosen + [nonsense(rng) for _ in range(NONSENSE)]


def nonsense(rng: random.Random) -> Prompt:
    """Return a text that says nothing: letters, marks or hardly anything."""
    kind = rng.randrange(5)
    if kind in {0, 4}:
        text = "".join(rng.choice("??!!...,;:-_*~ ") for _ in range(rng.randrange(6)))
    elif kind == 1:
        text = rng.choice("asdfghjklqwertzuiopyxcvbnm") * rng.randrange(1, 40)
    else:
        letters = rng.choice(
            ("bcdfghjklmnpqrstvwxz", "asdfjkl", "abcdefghijklmnopqrstuvwxyz")
        )
        text = " ".join(
            "".join(rng.choice(letters) for _ in range(rng.randrange(4, 10)))
            for _ in range(rng.randrange(1, 6))
        )
    labels = {
        "contains_code": False,
        "asks_for_code": False,
        "language": None,
        "class": "unknown",
    }
    return {"text": text, **labels, "source": f"nonsense {kind}"}


def label(prompts: Sequence[Prompt]) -> list[list[str]]:
    """Return fastText's labels of each prompt; a complexity that is not known is filled in by those that are."""
    names = [
        ALIASES.get(name := (prompt["language"] or "").split("#")[0], name)
        for prompt in prompts
    ]
    often = Counter(names)
    small_talk = {
        words_of(prompt["text"]) for prompt in prompts if prompt.get("small_talk")
    } - {""}
    labels = []
    for prompt, name in zip(prompts, names, strict=True):
        contains, asks = bool(prompt["contains_code"]), bool(prompt["asks_for_code"])
        outputs = [
            output
            for output, holds in (
                (HAS, contains or asks),
                (ASKS, asks),
                (CONTAINS, contains),
            )
            if holds
        ]
        if not outputs and prompt["class"] in JUDGED:
            outputs.append(CLASSES + JUDGED.index(PromptClass(prompt["class"])))
        if is_small_talk(prompt, small_talk):
            outputs.append(SMALL_TALK)
        mine = [NAMES[output] for output in outputs]
        if outputs[:1] == [HAS] and name and often[name] >= LEAST_OF_LANGUAGE:
            mine.append(LANGUAGE + name.replace(" ", "-"))
        labels.append(
            mine + degrees(prompt.get("complexity"))
            if knows_complexity(prompt)
            else mine
        )
    known = [row for row, prompt in enumerate(prompts) if knows_complexity(prompt)]
    model = fit([prompts[row] for row in known], [labels[row] for row in known])
    for row in set(range(len(prompts))) - set(known):
        odds = uncalibrated(model).read(line_of(prompts[row]["text"]))[0]
        labels[row] += [
            NAMES[output] for output in (BEYOND_TRIVIAL, COMPLEX) if odds[output] >= 0
        ]
    return labels


def knows_complexity(prompt: Prompt) -> bool:
    """Tell whether somebody has judged a prompt's complexity."""
    return written(prompt) and bool(prompt.get("complexity"))


def is_small_talk(prompt: Prompt, small_talk: set[str]) -> bool:
    """Tell whether a prompt is small talk: a written one says so, another has the same words as one that does."""
    if written(prompt) or has_code(prompt):
        return bool(prompt.get("small_talk"))
    return words_of(prompt["text"]) in small_talk


def degrees(complexity: str | None) -> list[str]:
    """Return the labels of a complexity."""
    degree = 0 if complexity is None else list(Complexity).index(Complexity(complexity))
    return [NAMES[BEYOND_TRIVIAL]] * (degree > 0) + [NAMES[COMPLEX]] * (degree > 1)


def fit(
    prompts: Sequence[Prompt],
    labels: Sequence[Sequence[str]],
    output: Path | None = None,
) -> Any:
    """Train, on one thread so that it comes out the same each time; with a file, write it in eight bits."""
    lines = []
    for prompt, mine in zip(prompts, labels, strict=True):
        line = " ".join([*(mine or ["__label__none"]), line_of(prompt["text"])])
        lines += [line] * times_of(prompt)
    random.Random(0).shuffle(lines)
    if output is not None:
        lines.append(unlabelled_line(lines))
    with TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.txt"
        file.write_text("\n".join(lines) + "\n", "utf-8")
        model = fasttext.train_supervised(
            str(file), thread=1, seed=0, verbose=0, **FAST
        )
    if output is not None:
        compress(
            model,
            [
                line_of(prompt["text"])
                for prompt in prompts[:: len(prompts) // COMPARED + 1]
            ],
        )
        model.save_model(str(output))
    return model


def unlabelled_line(lines: Sequence[str]) -> str:
    """Return a line that fastText counts, but does not train on, with which eight bits keep the length of a line's end.

    The vector that stands for the end of a line is far longer than all others, and part of every text. If fastText does not
    learn its codebook of norms from this row too, its norm is rounded to an ordinary one, and 2 % of prompts turn around.
    Rows are ordered by how often their word occurs, and which of them are learned from is the same in every training. So the
    line repeats the words that are a little rarer than a line's end, until enough of them are more frequent.
    """
    counts = Counter(
        word
        for line in lines
        for word in line.split()
        if not word.startswith("__label__")
    )
    ends = len(lines) + 1  # with this line's own
    rows = len(counts) + 1 + FAST["bucket"]
    rank = sum(count > ends for count in counts.values())
    wanted = rank
    while place_after_shuffle(wanted, rows=rows) >= CODEBOOK_ROWS:
        wanted += 1
    rarer = [
        (word, count) for word, count in counts.most_common(wanted) if count <= ends
    ]
    return " ".join(word for word, count in rarer for _ in range(ends + 1 - count))


def place_after_shuffle(row: int, *, rows: int) -> int:
    """Return where a row stands once fastText has shuffled them to choose those that it learns a codebook from.

    That is libstdc++'s ``std::shuffle`` with ``std::minstd_rand`` and the seed 1234 (fastText's ``productquantizer.cc``).
    """
    state, span = 1234, 2_147_483_645
    place = row
    for swapped in range(1, rows):
        scale = span // (swapped + 1)
        while True:
            state = state * 48_271 % 2_147_483_647
            if state - 1 < (swapped + 1) * scale:
                break
        other = (state - 1) // scale
        if other == place:
            place = swapped
        elif swapped == place:
            place = other
    return place


def compress(model: Any, lines: Sequence[str]) -> None:
    """Store a model's vectors in eight bits.

    What was measured before says something of what is written only if the rounding turns hardly any answer around.
    """
    before = [uncalibrated(model).read(line)[0] for line in lines]
    model.quantize(qnorm=True, thread=1, verbose=0)
    after = [uncalibrated(model).read(line)[0] for line in lines]
    for output in (HAS, ASKS, CONTAINS):
        turned = fmean(
            (new[output] >= 0) is not (old[output] >= 0)
            for old, new in zip(before, after, strict=True)
        )
        if turned > MOST_TURNED:
            sys.exit(
                f"eight bits turn {OUTPUTS[output]!r} around for {turned:.1%} of prompts, more than {MOST_TURNED:.0%}: "
                "nothing was written; see unlabelled_line"
            )


def times_of(prompt: Prompt) -> int:
    """Return how often a prompt counts."""
    times = REPEATS if written(prompt) or prompt["class"] == PromptClass.UNKNOWN else 1
    if prompt.get("pair") and not has_code(prompt):
        times *= ALIKE_TIMES
    if prompt.get("small_talk") or (
        prompt.get("domain") == SMALL_TALK_DOMAIN and written(prompt)
    ):
        times *= SMALL_TALK_TIMES
    return times


def has_code(prompt: Prompt) -> bool:
    """Tell whether a prompt holds or asks for code."""
    return bool(prompt["contains_code"] or prompt["asks_for_code"])


def uncalibrated(model: Any) -> Model:
    """Return a trained model whose log-odds are its own."""
    return model_of(model, [1.0] * len(OUTPUTS), [0.0] * len(OUTPUTS), {})


def group_of(prompt: Prompt, split: str) -> str | None:
    """Return what a written prompt is left out with: its batch, domain or language; None: it is always trained on."""
    if not written(prompt):
        return None
    if split == "batch":
        return str(prompt["source"])
    if split == "domain":
        return prompt.get("domain")
    spoken = prompt.get("nl") or "en"
    return None if spoken == "en" else str(spoken).split("-")[0]


def leave_out(
    prompts: Sequence[Prompt], labels: Sequence[list[str]], groups: Sequence[str | None]
) -> tuple[dict[int, list[float]], list[list[int]]]:
    """Return log-odds of each prompt that was left out, and the rows of each part. Parts are about as large."""
    sizes = Counter(group for group in groups if group is not None)
    loads, part_of = [0] * FOLDS, {}
    for group, size in sorted(sizes.items(), key=lambda pair: (-pair[1], pair[0])):
        part_of[group] = part = loads.index(min(loads))
        loads[part] += size
    scores, tests = {}, []
    for part in range(FOLDS):
        test = [
            row
            for row, group in enumerate(groups)
            if group is not None and part_of[group] == part
        ]
        out = set(test)
        kept = [row for row in range(len(prompts)) if row not in out]
        model = uncalibrated(
            fit([prompts[row] for row in kept], [labels[row] for row in kept])
        )
        scores |= {row: model.read(line_of(prompts[row]["text"]))[0] for row in test}
        tests.append(test)
        print(
            f"part {part + 1} of {FOLDS}: {len(test)} prompts left out",
            file=sys.stderr,
            flush=True,
        )
    return scores, tests


def calibrate(
    labels: Sequence[list[str]], scores: dict[int, list[float]], rows: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Return slope and shift of each output that make its scores calibrated log-odds; classes have one slope, no shift."""
    slope, shift = [1.0] * len(OUTPUTS), [0.0] * len(OUTPUTS)
    for output in range(CLASSES):
        slope[output], shift[output] = platt(
            [(scores[row][output], NAMES[output] in labels[row]) for row in rows]
        )
    pairs = [
        (scores[row][CLASSES:], k)
        for row in rows
        for k in range(len(JUDGED))
        if NAMES[CLASSES + k] in labels[row]
    ]
    slope[CLASSES:] = [
        min(
            (0.1 * step for step in range(1, 31)),
            key=lambda factor: class_loss(pairs, factor),
        )
    ] * len(JUDGED)
    return slope, shift


def platt(pairs: Sequence[tuple[float, bool]]) -> tuple[float, float]:
    """Return slope and shift that make scores into calibrated log-odds: Newton's method, its steps halved where needed."""

    def loss(slope: float, shift: float) -> float:
        odds = [
            (slope * score + shift) * (-1 if truth else 1) for score, truth in pairs
        ]
        return fmean(max(each, 0.0) + math.log1p(math.exp(-abs(each))) for each in odds)

    slope, shift = 1.0, 0.0
    for _ in range(30):
        g0 = g1 = h00 = h01 = h11 = 0.0
        for score, truth in pairs:
            probability = 1 / (
                1 + math.exp(-max(-30.0, min(slope * score + shift, 30.0)))
            )
            error, weight = probability - truth, probability * (1 - probability)
            g0, g1 = g0 + error * score, g1 + error
            h00, h01, h11 = (
                h00 + weight * score * score,
                h01 + weight * score,
                h11 + weight,
            )
        determinant = max(h00 * h11 - h01 * h01, SMALLEST)
        step, now = (
            ((h11 * g0 - h01 * g1) / determinant, (h00 * g1 - h01 * g0) / determinant),
            loss(slope, shift),
        )
        while (
            loss(slope - step[0], shift - step[1]) > now
            and max(map(abs, step)) > SMALLEST
        ):
            step = step[0] / 2, step[1] / 2
        slope, shift = slope - step[0], shift - step[1]
    return slope, shift


def class_loss(pairs: Sequence[tuple[Sequence[float], int]], factor: float) -> float:
    """Return the mean surprise at the right class where scores are multiplied by a factor before the softmax."""
    return fmean(
        math.log(sum(math.exp(factor * (each - odds[right])) for each in odds))
        for odds, right in pairs
    )


def calibrated(
    scores: dict[int, list[float]], slope: Sequence[float], shift: Sequence[float]
) -> dict[int, list[float]]:
    """Return calibrated log-odds."""
    return {
        row: [a * x + b for x, a, b in zip(odds, slope, shift, strict=True)]
        for row, odds in scores.items()
    }


def measure(
    prompts: Sequence[Prompt],
    labels: Sequence[list[str]],
    scores: dict[int, list[float]],
    rows: Sequence[int],
) -> dict[str, float]:
    """Return how good the log-odds of some rows are."""

    def f1(
        found: Callable[[int], bool],
        right: Callable[[int], bool],
        among: Sequence[int] = rows,
    ) -> float:
        both = sum(found(row) and right(row) for row in among)
        either = sum(found(row) + right(row) for row in among)
        return 2 * both / either if either else math.nan

    def holds(output: int) -> Callable[[int], bool]:
        return lambda row: NAMES[output] in labels[row]

    def found(output: int) -> Callable[[int], bool]:
        return lambda row: scores[row][output] >= THRESHOLDS.get(output, 0.0)

    def share(output: int, wanted: bool, among: Sequence[int]) -> float:  # noqa: FBT001
        return (
            fmean(
                (scores[row][output] >= THRESHOLDS.get(output, 0.0)) is wanted
                for row in among
            )
            if among
            else math.nan
        )

    prose = [row for row in rows if not holds(HAS)(row)]
    alike = [row for row in prose if prompts[row].get("pair")]
    foreign = [row for row in rows if (prompts[row].get("nl") or "en") != "en"]
    talk = [row for row in prose if holds(SMALL_TALK)(row)]
    called_talk = [
        row for row in rows if found(SMALL_TALK)(row) and not found(HAS)(row)
    ]
    judged = [
        row for row in prose if any(holds(CLASSES + k)(row) for k in range(len(JUDGED)))
    ]
    likeliest = {
        row: CLASSES + max(range(len(JUDGED)), key=lambda k: scores[row][CLASSES + k])
        for row in judged
    }
    there = [
        output
        for output in range(CLASSES, len(OUTPUTS))
        if any(map(holds(output), judged))
    ]
    of_classes = [
        f1(lambda row, c=c: likeliest[row] == c, holds(c), judged) for c in there
    ]
    return {
        **{
            f"F1 {OUTPUTS[output]}": f1(found(output), holds(output))
            for output in (HAS, ASKS, CONTAINS)
        },
        "F1 has code, other languages": f1(found(HAS), holds(HAS), foreign),
        "prose called code": 1 - share(HAS, False, prose),
        "look-alikes called code": 1 - share(HAS, False, alike),
        "trivial prose found": share(
            BEYOND_TRIVIAL,
            False,
            [row for row in prose if not holds(BEYOND_TRIVIAL)(row)],
        ),
        "complex found": share(
            COMPLEX, True, [row for row in rows if holds(COMPLEX)(row)]
        ),
        "small talk, precision": fmean(map(holds(SMALL_TALK), called_talk))
        if called_talk
        else math.nan,
        "small talk, recall": len(set(called_talk).intersection(talk)) / len(talk)
        if talk
        else math.nan,
        "F1 of classes, mean": fmean(of_classes) if of_classes else math.nan,
        "calibration error of has code": calibration_error(
            [(scores[row][HAS], holds(HAS)(row)) for row in rows]
        ),
    }


def print_worst(
    prompts: Sequence[Prompt],
    labels: Sequence[list[str]],
    scores: dict[int, list[float]],
    most: int,
) -> None:
    """Print prompts that were falsely called code, and prompts with code that were missed, the surest first."""
    for name, there in (("false", False), ("missed", True)):
        mine = [
            row
            for row in scores
            if (NAMES[HAS] in labels[row]) is there
            and (scores[row][HAS] >= 0) is not there
        ]
        for row in sorted(mine, key=lambda row: -abs(scores[row][HAS]))[: most // 2]:
            print(f"{name:8}{' '.join(prompts[row]['text'].split())[:100]}")


def calibration_error(pairs: Sequence[tuple[float, bool]], bins: int = 15) -> float:
    """Return the expected calibration error of a yes or no, 0..1."""
    sums: dict[int, float] = defaultdict(float)
    for odds, truth in pairs:
        probability = 1 / (1 + math.exp(-max(-30.0, min(odds, 30.0))))
        sure = max(probability, 1 - probability)
        sums[min(int(sure * bins), bins - 1)] += sure - ((odds >= 0) == truth)
    return sum(map(abs, sums.values())) / len(pairs)


if __name__ == "__main__":
    main()
