# ruff: noqa: S311  the same tasks are to come out every time
"""Makes tasks whose prompts are as long as a context: facts to be found, put in order, counted, missed or copied.

Each prompt is a chronicle of its own, so no prompt shares its beginning with another one, and every token has to be
read. The same context gives the same tasks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from classifier import Complexity, PromptClass
from router.profiling.chronicle import (
    COLOURS,
    DISTRICTS,
    LOCKED_THINGS,
    LOST_THINGS,
    NAMES,
    Insertion,
    chronicle,
    notice_lines,
)
from router.profiling.tasks import Task

SHARES = (0.25, 0.5, 0.95)  # of the context, prompt and answer together
LARGEST_CONTEXT = 131_072  # tokens; a longer context is not filled
SMALLEST_PROMPT = 400  # tokens; a shorter one is no long context
TEMPLATE_TOKENS = 64  # that a chat template adds, at most
# Of these chronicles, for tokenizers with 32,000 tokens and more; our small default model has 4.1.
CHARS_PER_TOKEN = 4.0
# One keeper of a key in so many characters of a chronicle, so that the place that is asked for has to be told apart.
CHARS_PER_DECOY = 2_500
MOST_DECOYS = 120


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How tasks of one form are made.

    Attributes:
        name: Of the form.
        complexity: Of the tasks.
        max_tokens: The longest answer.
        make: Makes the facts, the question about them and its check; it may add so many facts that are not asked for.
    """

    name: str
    complexity: Complexity
    max_tokens: int
    make: Callable[[random.Random, int], _Question]


@dataclass(frozen=True, slots=True)
class _Question:
    """What stands in a chronicle, and what is asked about it.

    Attributes:
        insertions: Sentences, and where they stand.
        text: The question.
        check: What tells a right answer.
    """

    insertions: Sequence[Insertion]
    text: str
    check: dict[str, Any]


def scaled_tasks(
    context_tokens: int, chars_per_token: float = CHARS_PER_TOKEN
) -> tuple[Task, ...]:
    """Return tasks that fill a quarter, half and nearly all of a context, shorter ones first.

    Args:
        context_tokens: The context in tokens; where engines are compared, the shortest of them. A context that is too
            short for a share leaves it out, and one beyond ``LARGEST_CONTEXT`` counts as that.
        chars_per_token: Of the model's tokenizer for English prose. The tasks of another value are other tasks.
    """
    context = min(context_tokens, LARGEST_CONTEXT)
    tasks: list[Task] = []
    for share in SHARES:
        for recipe in RECIPES:
            prompt_tokens = int(context * share) - recipe.max_tokens - TEMPLATE_TOKENS
            if prompt_tokens >= SMALLEST_PROMPT:
                chars = int(prompt_tokens * chars_per_token)
                tasks.append(_make_task(recipe, chars))
    return tuple(tasks)


def _make_task(recipe: _Recipe, chars: int) -> Task:
    """Return a task whose prompt has about so many characters, and not more."""
    rng = random.Random(f"{recipe.name} {chars}")
    question = recipe.make(rng, min(chars // CHARS_PER_DECOY, MOST_DECOYS))
    opening, closing = _frame(rng, question.text)
    room = chars - len(opening) - len(closing)
    text = chronicle(rng, room, question.insertions)
    return Task.model_validate(
        {
            "id": f"scaled-{recipe.name}-{chars}",
            "class": PromptClass.LONG_CONTEXT,
            "complexity": recipe.complexity,
            "prompt": opening + text + closing,
            "max_tokens": recipe.max_tokens,
            "check": question.check,
        }
    )


def _frame(rng: random.Random, question: str) -> tuple[str, str]:
    """Return what stands before and after a chronicle."""
    frames = (
        ("Please read this chronicle of a small harbour town.\n\n", f"\n\nNow my question: {question}"),
        ("", f"\n\n---\nThat was the town's chronicle of this year. {question}"),
        ("Below is a diary that a town clerk kept. I need something from it.\n\n", f"\n\nEnd of the diary. {question}"),
    )  # fmt: skip
    return rng.choice(frames)


@dataclass(frozen=True, slots=True)
class _Key:
    """Where a key is kept, as a chronicle tells it."""

    thing: str
    district: str
    number: int

    @property
    def sentence(self) -> str:
        return (
            f"The key of the {self.thing} in {self.district} was put on hook {self.number} of the board in the "
            "town hall."
        )


def _keys(rng: random.Random, count: int) -> list[_Key]:
    """Return keys of different things, on hooks of different numbers."""
    places = [(thing, district) for thing in LOCKED_THINGS for district in DISTRICTS]
    numbers = rng.sample(range(1_000, 10_000), count)
    chosen_places = rng.sample(places, count)
    return [
        _Key(thing=thing, district=district, number=number)
        for (thing, district), number in zip(chosen_places, numbers, strict=True)
    ]


def _spread(
    rng: random.Random, sentences: Sequence[str], *, first: float, last: float
) -> list[Insertion]:
    """Return sentences in this order, at random depths between two shares of the text, evenly spread."""
    step = (last - first) / max(len(sentences), 1)
    return [
        Insertion(depth=first + step * (position + rng.random()), text=sentence)
        for position, sentence in enumerate(sentences)
    ]


def _needle(rng: random.Random, decoys: int) -> _Question:
    key, *other_keys = _keys(rng, 1 + decoys)
    sentences = [other_key.sentence for other_key in other_keys]
    insertions = _spread(rng, sentences, first=0, last=1)
    depth = rng.uniform(0.1, 0.6)
    return _Question(
        insertions=[*insertions, Insertion(depth=depth, text=key.sentence)],
        text=(
            f"On which hook hangs the key of the {key.thing} in {key.district}? Reply with the number of the hook, "
            "and nothing else."
        ),
        check={"type": "number", "value": key.number},
    )


def _needles(rng: random.Random, decoys: int) -> _Question:
    keys = _keys(rng, 4 + decoys)
    sentences = [key.sentence for key in keys]
    insertions = [
        *_spread(rng, sentences[:4], first=0.05, last=0.95),
        *_spread(rng, sentences[4:], first=0, last=1),
    ]
    wanted = rng.sample(keys[:4], 4)
    listed = "; ".join(f"the {key.thing} in {key.district}" for key in wanted)
    numbers = r"\D+".join(str(key.number) for key in wanted)
    return _Question(
        insertions=insertions,
        text=(
            f"On which hooks hang the keys of these four: {listed}? Give the four numbers in this order, separated "
            "by commas, without any other words."
        ),
        check={"type": "regex", "pattern": rf"(?<!\d){numbers}(?!\d)"},
    )


def _order(rng: random.Random, _decoys: int) -> _Question:
    names = rng.sample(NAMES, 12)
    ringers = names[:7]
    tellers = (
        "On that day the great bell was rung by {}, as the custom wants it.",
        "The great bell was rung; this time the rope was in the hands of {}.",
        "It was the turn of {} to ring the great bell.",
    )
    sentences = [rng.choice(tellers).format(name) for name in ringers]
    others = [
        f"The small bell was rung by {name} for the children." for name in names[7:]
    ]
    return _Question(
        insertions=[
            *_spread(rng, sentences, first=0.04, last=0.96),
            *_spread(rng, others, first=0.1, last=0.9),
        ],
        text=(
            f"{len(ringers)} people rang the great bell in the course of the year (not the small one). List their "
            "names in the order in which they rang it, one name a line, and nothing else."
        ),
        check={
            "type": "items",
            "count": len(ringers),
            "pattern": r"(\w+)\.?",
            "keys": ringers,
        },
    )


def _count(rng: random.Random, _decoys: int) -> _Question:
    count = rng.randrange(6, 12)
    tellers = (
        "Because of the fog the ferry stayed at its mooring all day.",
        "The ferry did not sail, for its engine had to be looked at.",
        "In the gale nobody wanted to cross, and the ferry remained where it was from morning till night.",
        "The ferry's crew had a holiday, so there was no crossing that day.",
    )
    sailing = (
        "The ferry sailed on time in spite of the swell.",
        "The ferry was late by an hour, but it crossed.",
        "There was talk of keeping the ferry in port, yet it left as always.",
    )
    stopped = [rng.choice(tellers) for _ in range(count)]
    others = [rng.choice(sailing) for _ in range(count)]
    return _Question(
        insertions=[
            *_spread(rng, stopped, first=0.02, last=0.98),
            *_spread(rng, others, first=0.05, last=0.95),
        ],
        text=(
            "On how many days of this chronicle did the ferry not cross at all? Days on which it was late, or "
            "almost stayed in port, do not count. Answer with the number only."
        ),
        check={"type": "number", "value": count},
    )


def _not_mentioned(rng: random.Random, _decoys: int) -> _Question:
    things = [f"{rng.choice(COLOURS)} {thing}" for thing in rng.sample(LOST_THINGS, 12)]
    options = things[:5]
    absent = options[0]
    finders = rng.sample(NAMES, 11)
    sentences = [
        f"{finder} brought a {thing} to the lost property office."
        for finder, thing in zip(finders, things[1:], strict=True)
    ]
    rng.shuffle(sentences)
    rng.shuffle(options)
    return _Question(
        insertions=_spread(rng, sentences, first=0.02, last=0.98),
        text=(
            f"Which of these was NOT brought to the lost property office: {', '.join(options)}? Name only that one "
            "thing, in the words given here."
        ),
        check={"type": "choice", "value": absent, "options": options},
    )


def _copy(rng: random.Random, _decoys: int) -> _Question:
    notices = [notice_lines(rng) for _ in range(3)]
    titles = rng.sample(
        ("harbour office", "school", "bakery", "chapel", "post office"), 3
    )
    insertions = [
        Insertion(
            depth=depth,
            text=f"A notice was put up at the {title}; it said:\n" + "\n".join(lines),
            is_paragraph=True,
        )
        for depth, title, lines in zip((0.2, 0.55, 0.85), titles, notices, strict=True)
    ]
    wanted = rng.randrange(3)
    return _Question(
        insertions=insertions,
        text=(
            f"Copy the notice that was put up at the {titles[wanted]}, word for word and line by line. Do not add "
            "anything before or after it."
        ),
        check={"type": "lines", "lines": list(notices[wanted])},
    )


RECIPES = (
    _Recipe("needle", Complexity.TRIVIAL, 16, _needle),
    _Recipe("not-mentioned", Complexity.MODERATE, 24, _not_mentioned),
    _Recipe("needles", Complexity.MODERATE, 48, _needles),
    _Recipe("order", Complexity.COMPLEX, 64, _order),
    _Recipe("count", Complexity.COMPLEX, 16, _count),
    _Recipe("copy", Complexity.COMPLEX, 320, _copy),
)
