"""Greedy texts and their scores, from requests to the verdict: sound pairs pass, and each kind of fault shows where it is."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.fakes.engine import serving
from tests.unit.tiers.verification.small_model import SmallModel
from tiers.errors import NoScoresError
from tiers.verification.engine import ComparedEngine
from tiers.verification.findings import Verdict
from tiers.verification.likelihood import (
    Length,
    LikelihoodRecord,
    TextScores,
    WrittenText,
    compare_likelihood,
    prompts,
    score_texts,
    write_texts,
)

if TYPE_CHECKING:
    from tiers.verification.findings import Gap, LikelihoodFinding

pytestmark = pytest.mark.anyio
CONTEXT = 1600


def ignore(_finished: int, _total: int) -> None:
    """Take a report of progress."""


async def connected(stack: AsyncExitStack, small: SmallModel) -> ComparedEngine:
    url = await stack.enter_async_context(serving(small.app))
    client = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
    return await ComparedEngine.connect(client, url, "")


async def record_of(engine: ComparedEngine, *, quick: bool) -> LikelihoodRecord:
    context = min(CONTEXT, engine.identity.max_model_len)
    texts = await write_texts(engine, context=context, quick=quick, report=ignore)
    return LikelihoodRecord(
        texts=texts, own_scores=await score_texts(engine, texts, ignore)
    )


@dataclass(frozen=True, slots=True)
class Pair:
    reference: SmallModel
    candidate: SmallModel

    async def compare(
        self, *, quick: bool = False, is_saved: bool = False
    ) -> LikelihoodFinding:
        """Have both write, and score each other's texts; a saved reference scores nothing."""
        async with AsyncExitStack() as stack:
            reference = await connected(stack, self.reference)
            candidate = await connected(stack, self.candidate)
            written = await record_of(reference, quick=quick)
            other = await record_of(candidate, quick=quick)
            by_reference = None
            if not is_saved:
                by_reference = await score_texts(reference, other.texts, ignore)
            return compare_likelihood(
                written,
                other,
                scores_by_candidate=await score_texts(candidate, written.texts, ignore),
                scores_by_reference=by_reference,
                took_s=2.5,
            )


def gap_of(gaps: tuple[Gap, ...], writer: str, part: str) -> Gap:
    return next(gap for gap in gaps if gap.writer == writer and gap.part == part)


def test_prompts_are_of_all_kinds_and_lengths() -> None:
    every = prompts()
    assert len(every) == 20
    assert len({prompt.name for prompt in every}) == 20
    assert {prompt.kind for prompt in every} >= {
        "prose",
        "code",
        "math",
        "chat",
        "JSON and tool calls",
    }
    lengths = [prompt.length for prompt in every]
    assert lengths.count(Length.LONG_OUTPUT) == 2
    assert lengths.count(Length.LONG_CONTEXT) == 2
    quick = prompts(quick=True)
    assert 0 < len(quick) < 10
    assert all(prompt.is_quick for prompt in quick)


@pytest.mark.parametrize("noise", [0.0, 0.3], ids=["a restart", "quantized weights"])
async def test_a_sound_pair_is_the_same(noise: float) -> None:
    finding = await Pair(SmallModel(), SmallModel(noise=noise)).compare()
    assert finding.faults == ()
    assert finding.verdict is Verdict.SAME
    assert finding.took_s == 2.5
    parts = {gap.part for gap in finding.by_position}
    assert parts == {"1 to 64", "65 to 256", "257 to 1000", "beyond 1000"}
    if not noise:
        assert all(abs(gap.gap) < 1e-9 for gap in finding.by_kind)
        assert all(gap.changed == 0 for gap in finding.by_kind)


async def test_another_model_is_found_in_both_directions() -> None:
    finding = await Pair(SmallModel(), SmallModel(weights=2)).compare(quick=True)
    assert finding.verdict is Verdict.WORSE
    assert gap_of(finding.by_kind, "reference", "code").gap > 1
    assert gap_of(finding.by_kind, "candidate", "code").gap > 1
    assert len(finding.faults) == 2
    assert "unlikely from the first tokens on" in finding.faults[0]


async def test_a_fault_beyond_a_position_is_found_as_late() -> None:
    finding = await Pair(SmallModel(), SmallModel(late_from=900)).compare()
    first = gap_of(finding.by_position, "reference", "1 to 64")
    late = gap_of(finding.by_position, "reference", "beyond 1000")
    assert abs(first.gap) < 1e-9
    assert late.gap > 1
    assert "unlikely late" in finding.faults[0]
    assert finding.verdict is Verdict.WORSE


async def test_the_quick_form_sees_a_fault_beyond_some_hundred_positions() -> None:
    finding = await Pair(SmallModel(), SmallModel(late_from=650)).compare(quick=True)
    assert "unlikely late" in finding.faults[0]
    assert "answers to long prompts" in finding.faults[0]


async def test_a_fault_of_decode_alone_is_found_by_the_candidates_own_scores() -> None:
    finding = await Pair(SmallModel(), SmallModel(decode_noise=1.5)).compare(
        quick=True, is_saved=True
    )
    assert gap_of(finding.own, "candidate", "1 to 64").gap > 0.25
    assert abs(gap_of(finding.own, "reference", "1 to 64").gap) < 1e-9
    assert len(finding.faults) == 1
    assert "The candidate computes other things when it decodes" in finding.faults[0]


def test_a_fault_of_decode_whose_signs_cancel_out_is_found() -> None:
    written = WrittenText(
        name="a tale",
        kind="prose",
        prompt_ids=(1,),
        token_ids=(2,) * 40,
        logprobs=(-1.0,) * 40,
    )
    sound = TextScores(name="a tale", logprobs=(-1.0,) * 40, ranks=(1,) * 40)
    broken = TextScores(name="a tale", logprobs=(-0.5, -1.5) * 20, ranks=(1,) * 40)
    finding = compare_likelihood(
        LikelihoodRecord(texts=(written,), own_scores=(sound,)),
        LikelihoodRecord(texts=(written,), own_scores=(broken,)),
        scores_by_candidate=(sound,),
        scores_by_reference=(sound,),
        took_s=1.0,
    )
    assert gap_of(finding.own, "candidate", "1 to 64").gap == 0
    assert gap_of(finding.own, "candidate", "1 to 64").difference == 0.5
    assert len(finding.faults) == 1
    assert "0.50 nats a token at tokens 1 to 64" in finding.faults[0]


async def test_a_saved_reference_scores_nothing_and_the_finding_says_so() -> None:
    finding = await Pair(SmallModel(), SmallModel(weights=2)).compare(
        quick=True, is_saved=True
    )
    assert {gap.writer for gap in finding.by_kind} == {"reference"}
    assert finding.verdict is Verdict.WORSE
    assert "saved" in finding.not_measured[0]


async def test_texts_that_are_longer_than_the_candidates_context_are_left_out() -> None:
    """A saved reference may have written for a longer context."""
    finding = await Pair(SmallModel(), SmallModel(context=1500)).compare(is_saved=True)
    assert finding.faults == ()
    assert finding.not_measured[0].startswith("The candidate's context has no room for")
    kinds = {gap.part for gap in finding.by_kind}
    assert "code" in kinds
    assert "long context" not in kinds


async def test_progress_is_reported() -> None:
    reports: list[int] = []

    def note(finished: int, total: int) -> None:
        assert total == len(prompts(quick=True))
        reports.append(finished)

    async with AsyncExitStack() as stack:
        engine = await connected(stack, SmallModel())
        await write_texts(engine, context=CONTEXT, quick=True, report=note)
    assert reports == list(range(1, len(prompts(quick=True)) + 1))


@pytest.mark.parametrize("context", [1500, 3000])
async def test_long_prompts_fill_the_context_that_both_take(context: int) -> None:
    async with AsyncExitStack() as stack:
        engine = await connected(stack, SmallModel(context=4096))
        texts = await write_texts(engine, context=context, report=ignore)
    kinds = {prompt.name: prompt.length for prompt in prompts()}
    for text in texts:
        tokens = len(text.prompt_ids) + len(text.token_ids)
        assert tokens < context
        if kinds[text.name] is Length.LONG_CONTEXT:
            assert tokens > context * 0.9


async def test_answers_are_greedy_whatever_the_defaults_are() -> None:
    warm = SmallModel(temperature=1.5)
    async with AsyncExitStack() as stack:
        engine = await connected(stack, warm)
        texts = await write_texts(engine, context=CONTEXT, quick=True, report=ignore)
        scores = await score_texts(engine, texts, ignore)
    assert all(rank == 1 for score in scores for rank in score.ranks)


async def test_a_model_without_chat_template_continues_the_question() -> None:
    async with AsyncExitStack() as stack:
        engine = await connected(stack, SmallModel(has_template=False))
        texts = await write_texts(engine, context=CONTEXT, quick=True, report=ignore)
    chat = next(text for text in texts if text.kind == "chat")
    assert bytes(chat.prompt_ids).decode().startswith("My neighbour plays the drums")


async def test_an_engine_without_scores_is_an_error_that_says_so() -> None:
    async with AsyncExitStack() as stack:
        engine = await connected(stack, SmallModel(scores=False))
        with pytest.raises(NoScoresError, match="gives no log-probabilities"):
            await write_texts(engine, context=CONTEXT, quick=True, report=ignore)


async def test_a_record_can_be_saved() -> None:
    async with AsyncExitStack() as stack:
        engine = await connected(stack, SmallModel())
        record = await record_of(engine, quick=True)
    assert LikelihoodRecord.model_validate_json(record.model_dump_json()) == record
