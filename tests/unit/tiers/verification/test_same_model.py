"""What two engines tell of their models: every difference that changes answers is found, and sound pairs have none."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.fakes.engine import serving
from tests.unit.tiers.verification.small_model import SmallModel
from tests.waiting import within
from tiers.errors import ProbeError
from tiers.verification.engine import ComparedEngine
from tiers.verification.findings import Verdict
from tiers.verification.model_facts import ModelFacts, observe_facts
from tiers.verification.same_model import compare_facts

if TYPE_CHECKING:
    from tiers.verification.findings import Difference, SameModelFinding

pytestmark = pytest.mark.anyio


async def facts_of(small: SmallModel) -> ModelFacts:
    async with (
        serving(small.app) as url,
        httpx.AsyncClient(timeout=60) as client,
    ):
        return await observe_facts(await ComparedEngine.connect(client, url, ""))


async def compared(reference: SmallModel, candidate: SmallModel) -> SameModelFinding:
    return compare_facts(await facts_of(reference), await facts_of(candidate), 1.5)


async def only_difference(candidate: SmallModel) -> Difference:
    """Return the one thing in which a candidate differs from the usual model."""
    finding = await compared(SmallModel(), candidate)
    assert len(finding.differences) == 1, finding.differences
    return finding.differences[0]


@pytest.mark.parametrize("noise", [0.0, 0.5], ids=["a restart", "quantized weights"])
async def test_sound_pairs_do_not_differ(noise: float) -> None:
    finding = await compared(SmallModel(), SmallModel(noise=noise))
    assert finding.differences == ()
    assert finding.not_checked == ()
    assert finding.verdict is Verdict.SAME
    assert finding.took_s == 1.5


async def test_engines_with_the_same_sampling_defaults_do_not_differ() -> None:
    cool = SmallModel(temperature=0.6)
    finding = await compared(cool, SmallModel(temperature=0.6, noise=0.5))
    assert finding.differences == ()


async def test_another_tokenizer_is_found() -> None:
    difference = await only_difference(SmallModel(offset=1))
    assert difference.subject == "tokenizer"
    assert difference.is_fault
    assert "from number 1 on: 84 104 101" in difference.reference
    assert "from number 1 on: 85 105 102" in difference.candidate


async def test_other_special_tokens_are_found() -> None:
    difference = await only_difference(SmallModel(joins_marks=False))
    assert difference.subject == "special tokens"
    assert difference.is_fault


async def test_another_chat_template_is_found() -> None:
    difference = await only_difference(SmallModel(mark="### "))
    assert difference.subject == "chat template"
    assert difference.is_fault
    assert difference.reference.startswith('a question: "<|im_start|>user')
    assert difference.candidate.startswith('a question: "### user')
    assert "a tool's call and result" in difference.explanation


async def test_a_template_that_refuses_system_messages_is_found() -> None:
    difference = await only_difference(SmallModel(takes_system=False))
    assert difference.subject == "chat template"
    assert difference.candidate == "refuses a system message"


async def test_a_missing_chat_template_is_found() -> None:
    finding = await compared(SmallModel(), SmallModel(has_template=False))
    subjects = [difference.subject for difference in finding.differences]
    assert subjects[0] == "chat template"
    assert "has no chat template" in finding.not_checked[0]
    assert finding.verdict is Verdict.WORSE


async def test_two_models_without_chat_template_are_compared_by_the_rest() -> None:
    finding = await compared(
        SmallModel(has_template=False), SmallModel(has_template=False)
    )
    assert finding.differences == ()
    assert len(finding.not_checked) == 2


async def test_the_date_in_a_template_is_no_difference() -> None:
    """A saved reference was asked on another day."""
    saved = await facts_of(SmallModel(mark="Today Date: 26 Jul 2024\n<|im_start|>"))
    today = await facts_of(SmallModel(mark="Today Date: 01 Dec 2026\n<|im_start|>"))
    assert compare_facts(saved, today, 0).differences == ()


async def test_a_smaller_context_is_a_difference_and_no_fault() -> None:
    difference = await only_difference(SmallModel(context=2048))
    assert difference.subject == "context"
    assert difference.reference == "4,096 tokens"
    assert difference.candidate == "2,048 tokens"
    assert not difference.is_fault


@pytest.mark.parametrize("temperature", [0.6, 1.5])
async def test_other_sampling_defaults_are_found(temperature: float) -> None:
    difference = await only_difference(SmallModel(temperature=temperature))
    assert difference.subject == "sampling defaults"
    assert difference.is_fault
    assert difference.reference == "as likely tokens as at temperature 1 without cuts"
    direction = "more" if temperature < 1 else "less"
    assert direction in difference.candidate
    assert "generation_config.json" in difference.explanation


async def test_an_answer_that_does_not_end_is_found() -> None:
    difference = await only_difference(SmallModel(stops=False))
    assert difference.subject == "end of answers"
    assert difference.reference == "token 256"
    assert difference.is_fault


async def test_a_tool_parser_that_drops_an_argument_is_found() -> None:
    difference = await only_difference(SmallModel(drops="unit"))
    assert difference.subject == "tool calls"
    assert difference.is_fault
    assert '"unit": "celsius"' in difference.reference
    assert "unit" not in difference.candidate


async def test_a_tool_parser_that_finds_no_call_is_found() -> None:
    difference = await only_difference(SmallModel(finds_calls=False))
    assert difference.subject == "tool calls"
    assert difference.is_fault
    assert difference.candidate == "finds no call"


async def test_a_model_that_writes_no_call_tells_nothing_of_its_parser() -> None:
    finding = await compared(SmallModel(), SmallModel(writes_calls=False))
    assert finding.differences == ()
    assert "so its tool parser was not tried" in finding.not_checked[0]


async def test_a_candidate_with_the_better_tool_parser_is_no_fault() -> None:
    finding = await compared(SmallModel(drops="unit"), SmallModel())
    assert [difference.is_fault for difference in finding.differences] == [False]


async def test_an_engine_that_takes_no_tools_is_found() -> None:
    finding = await compared(SmallModel(), SmallModel(takes_tools=False))
    assert finding.differences[0].candidate == "takes no tools"
    assert "its tool parser was not tried" in finding.not_checked[0]


async def test_a_parser_of_reasoning_on_one_side_is_found() -> None:
    difference = await only_difference(SmallModel(thinks=True))
    assert difference.subject == "reasoning"
    assert difference.candidate == "told apart from answers"


async def test_release_and_cache_are_differences_and_no_faults() -> None:
    finding = await compared(
        SmallModel(), SmallModel(release="0.33.0", cache_dtype="fp8")
    )
    release, cache = finding.differences
    assert release.subject == "release of vLLM"
    assert release.candidate == "0.33.0"
    assert not release.is_fault
    assert cache.subject == "type of the KV cache"
    assert cache.candidate == "fp8"
    assert not cache.is_fault
    assert finding.verdict is Verdict.SAME


async def test_faults_come_first() -> None:
    finding = await compared(
        SmallModel(), SmallModel(release="0.33.0", context=2048, drops="city")
    )
    assert [difference.is_fault for difference in finding.differences] == [
        True,
        False,
        False,
    ]


async def test_facts_can_be_saved() -> None:
    facts = await facts_of(SmallModel())
    assert ModelFacts.model_validate_json(facts.model_dump_json()) == facts


@dataclass(slots=True)
class DyingEngine(httpx.AsyncBaseTransport):
    """An engine that answers nonsense to completions, once it has a chat that it never answers.

    Attributes:
        open_chats: Number of chats that somebody still waits for.
    """

    open_chats: int = 0
    _has_chat: asyncio.Event = field(default_factory=asyncio.Event)
    _sound: httpx.ASGITransport = field(
        default_factory=lambda: httpx.ASGITransport(SmallModel().app)
    )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/completions":
            await within(self._has_chat.wait(), "a chat")
            return httpx.Response(200, text="nonsense")
        if request.url.path == "/v1/chat/completions":
            await self._wait_for_ever()
        return await self._sound.handle_async_request(request)

    async def _wait_for_ever(self) -> None:
        self.open_chats += 1
        self._has_chat.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.open_chats -= 1


async def test_nothing_is_asked_any_more_once_an_engine_has_failed() -> None:
    """A request that outlives its client may leave a connection that nobody closes."""
    engine = DyingEngine()
    async with httpx.AsyncClient(transport=engine) as client:
        compared_engine = await ComparedEngine.connect(client, "http://engine", "")
        with pytest.raises(ProbeError):
            await within(observe_facts(compared_engine), "the engine to fail")
    assert engine.open_chats == 0
