"""Compare what two engines compute, by how likely each finds the other's greedy texts.

An engine that computes wrongly either writes what a sound one finds unlikely, or finds unlikely what a sound one writes. Its
own texts are scored as well: each token is computed twice, by the kernels of decode when it is written, and by those of
prefill when it is scored. The place in the output counts: some faults begin late.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import Field, model_validator
from pydantic_core import from_json

from tiers.errors import RefusedError
from tiers.together import run_all
from tiers.verification.findings import FrozenFinding, Gap, LikelihoodFinding, Role

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from tiers.verification.engine import ComparedEngine

PROMPTS_FILE = Path(__file__).with_name("likelihood_prompts.jsonl")
REQUEST_S = 600.0  # Limit of each request, in seconds: small machines take minutes for a long context.
AT_ONCE = 8  # So many texts are written in one batch, as in use.
# A score of a prompt's token takes some 70 bytes of an answer, and a long answer is refused.
LONGEST_CONTEXT = 32_768

# Ranges of output positions: first and last, from 1.
POSITION_RANGES = ((1, 64), (65, 256), (257, 1000), (1001, None))
LONG_CONTEXT = "long context"
# Measured on two cores with the model of 135 million parameters, against its 16 bits, in nats a token: 8 bits up to .08 and
# 4 bits up to .29 for a kind of text; a KV cache of 3 bits 1.2 to 2.5, broken scales and zero points more.
NONSENSE_NATS = 0.8
# Sound quantized weights lose most where an answer begins: a later place that loses far more than the beginning is wrong.
LATE_FACTOR = 3.0
LATE_NATS = 0.3
# Absolute difference between decode and prefill of one sound engine: up to .03 for a range of positions. A KV cache of 3
# bits has .5. With signs a broken decode may have none: it chooses words that it finds as likely as prefill finds others.
DECODE_NATS = 0.15
# The quick form's long prompt is so long that a fault beyond the first hundreds of tokens shows.
QUICK_CONTEXT = 768
SAVED_REFERENCE = (
    "The reference is saved and cannot score the candidate's texts: faults that only decoding has are found by the "
    "candidate's own scores alone."
)
MARGIN = 16  # tokens of the context that long prompts leave free
RECORDS = "{records}"  # A long prompt has numbered records in its place.
SHIPS = (
    "Amber Gull",
    "North Wind",
    "Silver Tern",
    "Old Marta",
    "Blue Heron",
    "Patience",
    "Green Finch",
)
GOODS = (
    "copper",
    "salt",
    "timber",
    "wool",
    "oranges",
    "glass",
    "coffee",
    "tiles",
    "cork",
    "paper",
    "grain",
)
PORTS = (
    "Bergen",
    "Porto",
    "Riga",
    "Cork",
    "Genoa",
    "Gdansk",
    "Malmo",
    "Izmir",
    "Split",
)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Length(StrEnum):
    """What a prompt stretches."""

    SHORT = "short"
    LONG_OUTPUT = "long output"
    LONG_CONTEXT = "long context"


class LikelihoodPrompt(FrozenFinding):
    """A prompt whose greedy answer is scored.

    Attributes:
        name: For people.
        kind: Of text, such as "code".
        length: What it stretches.
        output_tokens: So many tokens are written.
        is_quick: Whether the quick form has it.
        text: A plain text to continue; empty for a chat.
        messages: The messages of a chat; empty for a plain text.
        tools: Functions that the chat offers.
    """

    name: str
    kind: str
    length: Length = Length.SHORT
    output_tokens: Annotated[int, Field(ge=1)]
    is_quick: bool = False
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


class WrittenText(FrozenFinding):
    """A prompt's greedy answer.

    Attributes:
        name: Of the prompt.
        kind: Of text.
        prompt_ids: Tokens of the prompt.
        token_ids: Tokens of the answer, each the engine's first choice.
        logprobs: Of each, as it was written, in nats.
    """

    name: str
    kind: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @model_validator(mode="after")
    def _one_score_a_token(self) -> WrittenText:
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError("logprobs: one for each of token_ids is needed")
        return self


class TextScores(FrozenFinding):
    """How likely an engine finds the answer of a written text.

    Attributes:
        name: Of the prompt.
        logprobs: Of each token of the answer, in nats.
        ranks: Their places among all tokens, from 1: a first choice.
    """

    name: str
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]


class LikelihoodRecord(FrozenFinding):
    """What an engine wrote, and how likely it finds it when it reads it.

    Attributes:
        texts: Its greedy answers.
        own_scores: Of the same texts, by prefill.
    """

    texts: tuple[WrittenText, ...]
    own_scores: tuple[TextScores, ...]


@cache
def prompts(*, quick: bool = False) -> tuple[LikelihoodPrompt, ...]:
    """Return the prompts; ``quick``: the few that a start can wait for.

    The quick ones have a long prompt and no long answer. What goes wrong beyond the first tokens of an answer shows there
    only if it hangs on the position in the context, and begins below ``QUICK_CONTEXT``.
    """
    lines = PROMPTS_FILE.read_bytes().splitlines()
    every = [LikelihoodPrompt.model_validate(from_json(line)) for line in lines]
    return tuple(prompt for prompt in every if prompt.is_quick or not quick)


async def write_texts(
    engine: ComparedEngine,
    *,
    context: int,
    quick: bool = False,
    report: Callable[[int, int], None],
) -> tuple[WrittenText, ...]:
    """Have an engine answer the prompts greedily, several at a time.

    Args:
        engine: Who writes.
        context: Tokens that both engines take, prompt and answer together.
        quick: Write only the few texts that a start can wait for.
        report: Called with the numbers of finished texts and of all after each.

    Raises:
        NoScoresError: The engine's answers have no log-probabilities.
        ProbeError: The engine does not answer.
    """
    chosen = prompts(quick=quick)
    longest = QUICK_CONTEXT if quick else LONGEST_CONTEXT
    writer = _Writer(engine, min(context, longest))
    return await _in_batches(chosen, writer.write, report)


async def score_texts(
    engine: ComparedEngine,
    texts: Sequence[WrittenText],
    report: Callable[[int, int], None],
) -> tuple[TextScores, ...]:
    """Have an engine score texts, its own or another's, by prefill. Those that its context has no room for are left out.

    Args:
        engine: Who scores.
        texts: What was written.
        report: Called with the numbers of finished texts and of all after each.

    Raises:
        NoScoresError: The engine's answers have no log-probabilities.
        ProbeError: The engine does not answer.
    """

    async def score(text: WrittenText) -> TextScores:
        token_ids = (*text.prompt_ids, *text.token_ids)
        scores = await engine.probe.token_scores(engine.model, token_ids, REQUEST_S)
        answer_scores = scores[len(scores) - len(text.token_ids) :]
        return TextScores(
            name=text.name,
            logprobs=tuple(score.logprob for score in answer_scores),
            ranks=tuple(score.rank for score in answer_scores),
        )

    context = engine.identity.max_model_len
    fitting = [
        text for text in texts if len(text.prompt_ids) + len(text.token_ids) < context
    ]
    return await _in_batches(fitting, score, report)


def compare_likelihood(
    reference: LikelihoodRecord,
    candidate: LikelihoodRecord,
    *,
    scores_by_candidate: tuple[TextScores, ...],
    scores_by_reference: tuple[TextScores, ...] | None,
    took_s: float,
) -> LikelihoodFinding:
    """Say how alike two engines compute, and what is wrong.

    Args:
        reference: The reference's texts and its own scores of them.
        candidate: The candidate's texts and its own scores of them.
        scores_by_candidate: Of the reference's texts.
        scores_by_reference: Of the candidate's texts; None: the reference is saved and does not run.
        took_s: How long the stage took, in seconds.
    """
    across = _score_tokens("reference", reference.texts, scores_by_candidate)
    not_measured: list[str] = []
    left_out = len(reference.texts) - len(scores_by_candidate)
    if left_out:
        not_measured.append(
            f"The candidate's context has no room for {left_out} of the reference's {len(reference.texts)} texts."
        )
    if scores_by_reference is None:
        not_measured.append(SAVED_REFERENCE)
    else:
        across += _score_tokens("candidate", candidate.texts, scores_by_reference)
    own = _score_tokens("reference", reference.texts, reference.own_scores)
    own += _score_tokens("candidate", candidate.texts, candidate.own_scores)
    by_kind = tuple(_gaps(across, lambda token: token.kind))
    by_position = tuple(_gaps(_by_output(across), lambda token: token.range))
    own_gaps = tuple(_gaps(own, lambda token: token.place))
    writers: tuple[Role, ...] = ("reference", "candidate")
    across_faults = [_find_fault(writer, by_position, by_kind) for writer in writers]
    faults = [fault for fault in across_faults if fault]
    faults += _decode_faults(own_gaps)
    return LikelihoodFinding(
        by_kind=by_kind,
        by_position=by_position,
        own=own_gaps,
        faults=tuple(faults),
        not_measured=tuple(not_measured),
        took_s=took_s,
    )


@dataclass(frozen=True, slots=True)
class _ScoredToken:
    """A token of an answer in the eyes of its writer and of a scorer.

    Attributes:
        writer: Who chose it.
        kind: Of its text.
        position: In the answer, from 1.
        gap: The writer's log-probability minus the scorer's, in nats.
        is_changed: Whether it is not the scorer's first choice.
    """

    writer: Role
    kind: str
    position: int
    gap: float
    is_changed: bool

    @property
    def place(self) -> str:
        """Return where it stands: after a long prompt, or in a range of output positions."""
        return LONG_CONTEXT if self.kind == LONG_CONTEXT else self.range

    @property
    def range(self) -> str:
        """Return the range of output positions that it is in."""
        for first, last in POSITION_RANGES:
            if last is None or self.position <= last:
                return _range_name(first, last)
        raise AssertionError("the last range has no end")


def _range_name(first: int, last: int | None) -> str:
    if last is None:
        return f"beyond {first - 1}"
    return f"{first} to {last}"


def _score_tokens(
    writer: Role, texts: Sequence[WrittenText], scores: Sequence[TextScores]
) -> list[_ScoredToken]:
    """Pair what was written with what was scored, token by token. Texts that were not scored are left out."""
    tokens = []
    scores_by_name = {text_scores.name: text_scores for text_scores in scores}
    for text in texts:
        text_scores = scores_by_name.get(text.name)
        if text_scores is None:
            continue
        places = zip(
            text.logprobs, text_scores.logprobs, text_scores.ranks, strict=True
        )
        for number, (written, scored, rank) in enumerate(places, 1):
            token = _ScoredToken(
                writer=writer,
                kind=text.kind,
                position=number,
                gap=written - scored,
                is_changed=rank > 1,
            )
            tokens.append(token)
    return tokens


def _by_output(tokens: Iterable[_ScoredToken]) -> list[_ScoredToken]:
    """Return the tokens whose place in the output is about their place in the context: not those after long prompts."""
    return [token for token in tokens if token.kind != LONG_CONTEXT]


def _gaps(
    tokens: Sequence[_ScoredToken], part_of: Callable[[_ScoredToken], str]
) -> Iterator[Gap]:
    """Yield a gap for each writer and part, in the order in which they occur."""
    groups: dict[tuple[Role, str], list[_ScoredToken]] = {}
    for token in tokens:
        groups.setdefault((token.writer, part_of(token)), []).append(token)
    for (writer, part), members in groups.items():
        yield Gap(
            writer=writer,
            part=part,
            tokens=len(members),
            gap=mean(token.gap for token in members),
            changed=mean(token.is_changed for token in members),
            difference=mean(abs(token.gap) for token in members),
        )


def _find_fault(
    writer: Role, by_position: Sequence[Gap], by_kind: Sequence[Gap]
) -> str | None:
    """Return what the other engine finds wrong with one writer's texts: from the beginning, late, or in one kind of text."""
    positions = [gap for gap in by_position if gap.writer == writer]
    kinds = [gap for gap in by_kind if gap.writer == writer]
    if not positions:
        return None
    beginning = positions[0]
    worst = max(kinds, key=lambda gap: gap.gap)
    late = _find_late(beginning, positions[1:] + kinds)
    scorer = "candidate" if writer == "reference" else "reference"
    finds = f"The {scorer} finds the {writer}'s texts"
    if beginning.gap > NONSENSE_NATS:
        return (
            f"{finds} unlikely from the first tokens on: {_nats(beginning)}, most in {worst.part} with {_nats(worst)}. "
            f"Sound weights of 4 bits stay below {NONSENSE_NATS:g}. The two serve other models, or weights, scales or "
            "a kernel of one are broken."
        )
    if late is not None:
        return (
            f"{finds} unlikely late: {_nats(late)} at {_place(late)}, and {_nats(beginning)} at the beginning of "
            "answers. Attention, positions (rope_scaling) or the KV cache of one break with length."
        )
    if worst.gap > NONSENSE_NATS:
        return f"{finds} unlikely in {worst.part}: {_nats(worst)}. Sound weights of 4 bits stay below {NONSENSE_NATS:g}."
    return None


def _find_late(beginning: Gap, parts: Sequence[Gap]) -> Gap | None:
    """Return the first range of positions, or the answers to long prompts, where far more is lost than at the beginning."""
    limit = max(beginning.gap * LATE_FACTOR, beginning.gap + LATE_NATS)
    is_late = {_range_name(*bounds) for bounds in POSITION_RANGES} | {LONG_CONTEXT}
    for gap in parts:
        if gap.part in is_late and gap.gap > limit:
            return gap
    return None


def _decode_faults(own: Sequence[Gap]) -> Iterator[str]:
    """Yield for each engine the first place where its decode and its prefill compute different things."""
    told: set[Role] = set()
    for gap in own:
        difference = gap.difference or 0.0
        if difference <= DECODE_NATS or gap.writer in told:
            continue
        told.add(gap.writer)
        yield (
            f"The {gap.writer} computes other things when it decodes than when it reads the same tokens as a prompt: "
            f"{difference:.2f} nats a token at {_place(gap)}. A kernel of one of the two, or its KV cache, is broken."
        )


def _place(gap: Gap) -> str:
    if gap.part == LONG_CONTEXT:
        return "answers to long prompts"
    return f"tokens {gap.part} of answers"


def _nats(gap: Gap) -> str:
    return f"{gap.gap:.2f} nats a token"


async def _in_batches(
    items: Sequence[_Item],
    work: Callable[[_Item], Awaitable[_Result]],
    report: Callable[[int, int], None],
) -> tuple[_Result, ...]:
    """Work on items, several at a time, and return the results in their order.

    Args:
        items: In the order in which work on them begins.
        work: Done for each.
        report: Called with the numbers of finished items and of all after each.
    """
    places = asyncio.Semaphore(AT_ONCE)
    finished = 0

    async def work_in_turn(item: _Item) -> _Result:
        nonlocal finished
        async with places:
            result = await work(item)
        finished += 1
        report(finished, len(items))
        return result

    return await run_all(work_in_turn(item) for item in items)


@dataclass(frozen=True, slots=True)
class _Writer:
    """An engine that answers prompts greedily.

    Attributes:
        engine: Who writes.
        context: Tokens that a prompt and its answer may have together.
    """

    engine: ComparedEngine
    context: int

    async def write(self, prompt: LikelihoodPrompt) -> WrittenText:
        """Answer a prompt, whose records are as many as fit."""
        if prompt.length is Length.LONG_CONTEXT:
            prompt_ids = await self._long_prompt(prompt)
        else:
            prompt_ids = await self._tokenize(prompt)
        count = min(prompt.output_tokens, self.context - len(prompt_ids) - 1)
        token_ids, logprobs = await self.engine.probe.continuation(
            self.engine.model, prompt_ids, count, REQUEST_S
        )
        return WrittenText(
            name=prompt.name,
            kind=prompt.kind,
            prompt_ids=prompt_ids,
            token_ids=token_ids,
            logprobs=logprobs,
        )

    async def _long_prompt(self, prompt: LikelihoodPrompt) -> tuple[int, ...]:
        """Return the tokens of a prompt with as many records as the context has room for."""
        room = self.context - prompt.output_tokens - MARGIN
        few = len(await self._tokenize(_with_records(prompt, 10)))
        more = len(await self._tokenize(_with_records(prompt, 110)))
        tokens_per_record = (more - few) / 100
        records = max(int((room - few) / tokens_per_record) + 10, 1)
        prompt_ids = await self._tokenize(_with_records(prompt, records))
        while len(prompt_ids) > room and records > 1:
            records -= max(records // 50, 1)
            prompt_ids = await self._tokenize(_with_records(prompt, records))
        return prompt_ids

    async def _tokenize(self, prompt: LikelihoodPrompt) -> tuple[int, ...]:
        """Return a prompt's tokens; a model that takes no such chat continues its last message as plain text."""
        probe = self.engine.probe
        model = self.engine.model
        text = prompt.text
        if prompt.messages:
            chat: dict[str, Any] = {"messages": list(prompt.messages)}
            if prompt.tools:
                chat["tools"] = list(prompt.tools)
            try:
                return await probe.rendered_tokens(model, chat)
            except RefusedError:
                text = prompt.messages[-1]["content"]
        return tuple(await probe.text_tokens(model, text, special=True))


def _with_records(prompt: LikelihoodPrompt, count: int) -> LikelihoodPrompt:
    """Return a prompt with numbered records, the same ones each time."""
    records = "\n".join(_record(number) for number in range(1, count + 1))
    messages = tuple(
        {**message, "content": message["content"].replace(RECORDS, records)}
        for message in prompt.messages
    )
    text = prompt.text.replace(RECORDS, records)
    return prompt.model_copy(update={"text": text, "messages": messages})


def _record(number: int) -> str:
    ship = SHIPS[number * number % len(SHIPS)]
    goods = GOODS[number * 5 % len(GOODS)]
    port = PORTS[number * number % len(PORTS)]
    return f"{number}: the {ship} brought {number * 37 % 90 + 10} crates of {goods} from {port}."
