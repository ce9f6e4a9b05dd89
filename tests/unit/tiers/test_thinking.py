"""Whether and how a model thinks, found out from engines that think in every known way; and texts with thoughts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.fakes.engine import Behaviour, serving
from tests.fakes.model_engine import ModelEngine, ThinkingModel
from tiers.verification.thinking import (
    CHAT,
    DETOKENIZE,
    NO_THINKING,
    QUESTION_TOKENS,
    THOUGHT_TAGS,
    TOKENIZE,
    Thinking,
    ThinkingMode,
    ThoughtForm,
    ThoughtTags,
    observe_thinking,
    split_thought,
    switch_fields,
)

OFF, ON, DEFAULT = ThinkingMode
OPENED = ThoughtForm.OPENED_BY_PROMPT


@dataclass(slots=True)
class Asking:
    """A client of one engine that notes what it asks.

    Attributes:
        refused_paths: The engine does not have these.
        asked: The paths of all requests, in order.
    """

    client: httpx.AsyncClient
    url: str
    refused_paths: frozenset[str] = frozenset()
    asked: list[str] = field(default_factory=list)

    async def __call__(
        self, path: str, body: Mapping[str, Any]
    ) -> Mapping[str, Any] | None:
        self.asked.append(path)
        if path in self.refused_paths:
            return None
        answer = await self.client.post(
            f"{self.url}{path}", json={"model": "fake", **body}
        )
        if answer.status_code != httpx.codes.OK:
            return None
        parsed: Mapping[str, Any] = answer.json()
        return parsed


@asynccontextmanager
async def asking(
    model: ThinkingModel, *refused_paths: str, behaviour: Behaviour | None = None
) -> AsyncIterator[Asking]:
    engine = ModelEngine(model, behaviour)
    async with (
        serving(engine.app) as url,
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
    ):
        yield Asking(client, url, frozenset(refused_paths))


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and what is to be found out about it."""

    model: ThinkingModel
    thinking: Thinking


CASES = {
    "none": Case(ThinkingModel(thought=""), NO_THINKING),
    "tags": Case(
        ThinkingModel(),
        Thinking(can_switch=False, thinks_by_default=True, form=ThoughtForm.TAGS),
    ),
    "rare tags": Case(
        ThinkingModel(tags=ThoughtTags("[THINK]", "[/THINK]")),
        Thinking(can_switch=False, thinks_by_default=True, form=ThoughtForm.TAGS),
    ),
    "a parser": Case(
        ThinkingModel(reasoning_field="reasoning"),
        Thinking(can_switch=False, thinks_by_default=True, form=ThoughtForm.FIELD),
    ),
    "an older parser": Case(
        ThinkingModel(reasoning_field="reasoning_content"),
        Thinking(can_switch=False, thinks_by_default=True, form=ThoughtForm.FIELD),
    ),
    "opened by the prompt": Case(
        ThinkingModel(is_opened_by_prompt=True),
        Thinking(
            can_switch=False,
            thinks_by_default=True,
            form=OPENED,
            opening_modes=tuple(ThinkingMode),
        ),
    ),
    "opened by the prompt, with a parser": Case(
        ThinkingModel(is_opened_by_prompt=True, reasoning_field="reasoning"),
        Thinking(
            can_switch=False,
            thinks_by_default=True,
            form=ThoughtForm.FIELD,
            opening_modes=tuple(ThinkingMode),
        ),
    ),
    "a switch that is on": Case(
        ThinkingModel(has_switch=True),
        Thinking(can_switch=True, thinks_by_default=True, form=ThoughtForm.TAGS),
    ),
    "a switch that is off": Case(
        ThinkingModel(has_switch=True, thinks_by_default=False),
        Thinking(can_switch=True, thinks_by_default=False, form=ThoughtForm.TAGS),
    ),
    "a switch that opens the thought": Case(
        ThinkingModel(has_switch=True, thinks_by_default=False, is_opened_by_prompt=True),
        Thinking(
            can_switch=True, thinks_by_default=False, form=OPENED, opening_modes=(ON,)
        ),
    ),
}  # fmt: skip


@pytest.mark.anyio
@pytest.mark.parametrize("name", CASES)
async def test_how_a_model_thinks_is_found_out(name: str) -> None:
    async with asking(CASES[name].model) as ask:
        assert await observe_thinking(ask) == CASES[name].thinking


@pytest.mark.anyio
async def test_the_question_is_bounded() -> None:
    """Few requests, answers of few tokens."""
    behaviour = Behaviour()
    model = ThinkingModel(thought="so " * 500, has_switch=True, thinks_by_default=False)
    async with asking(model, behaviour=behaviour) as ask:
        await observe_thinking(ask)
    assert ask.asked.count(CHAT) == 2
    assert len(ask.asked) <= 7
    limits = {request["max_tokens"] for request in behaviour.requests}
    assert limits == {QUESTION_TOKENS}


@pytest.mark.anyio
@pytest.mark.parametrize("refused", [TOKENIZE, DETOKENIZE])
async def test_without_token_ids_the_answer_tells(refused: str) -> None:
    """Engines that are not vLLM's may have neither path; a short thought then shows its end."""
    model = ThinkingModel(thought="So it is.", is_opened_by_prompt=True)
    async with asking(model, refused) as ask:
        thinking = await observe_thinking(ask)
    assert thinking.thinks_by_default
    assert thinking.form is OPENED
    assert not thinking.can_switch


def test_a_mode_that_the_model_does_not_have_changes_nothing() -> None:
    usually = Thinking(can_switch=True, thinks_by_default=True)
    on_demand = Thinking(can_switch=True, thinks_by_default=False)
    always = Thinking(can_switch=False, thinks_by_default=True)
    assert usually.thinks(DEFAULT)
    assert not usually.thinks(OFF)
    assert not on_demand.thinks(DEFAULT)
    assert on_demand.thinks(ON)
    assert always.thinks(OFF)
    assert not NO_THINKING.thinks(ON)


def test_the_two_modes_of_a_model_have_names() -> None:
    thinker = Thinking(can_switch=True, thinks_by_default=True)
    assert thinker.default_mode is ON
    assert thinker.other_mode is OFF
    assert NO_THINKING.default_mode is OFF
    assert NO_THINKING.other_mode is None


def test_what_is_found_is_said_in_words() -> None:
    switch = Thinking(can_switch=True, thinks_by_default=False, form=ThoughtForm.TAGS)
    always = Thinking(can_switch=False, thinks_by_default=True, form=ThoughtForm.FIELD)
    assert NO_THINKING.describe() == "does not think"
    assert always.describe() == "always thinks, in a field of the answer"
    assert switch.describe() == (
        "does not think unless a request says otherwise, in the text, between tags"
    )


def test_a_request_says_nothing_by_default() -> None:
    assert switch_fields(DEFAULT) == {}
    on = {"enable_thinking": True, "thinking": True}
    off = {"enable_thinking": False, "thinking": False}
    assert switch_fields(ON) == {"chat_template_kwargs": on}
    assert switch_fields(OFF) == {"chat_template_kwargs": off}


@pytest.mark.parametrize("tags", THOUGHT_TAGS, ids=lambda tags: tags.opening)
def test_thoughts_between_tags_are_taken_out(tags: ThoughtTags) -> None:
    split = split_thought(f"\n{tags.opening}\nIt is far.\n{tags.closing}\n\nParis")
    assert split.thought == "It is far."
    assert split.answer == "Paris"
    assert not split.has_open_thought
    cut = split_thought(f"{tags.opening}It is")
    assert cut.thought == "It is"
    assert cut.answer == ""
    assert cut.has_open_thought
    opened = split_thought(f"It is far.{tags.closing}Paris", begins_in_thought=True)
    assert opened.thought == "It is far."
    assert opened.answer == "Paris"


def test_a_thought_without_any_tag_is_open() -> None:
    split = split_thought("Let me see", begins_in_thought=True)
    assert split.thought == "Let me see"
    assert split.has_open_thought


@pytest.mark.parametrize(
    "text",
    [
        "The tags <think> and </think> surround a thought.",
        "Here is my response: Paris",
        "A turn ends with <|end|> there.",
        "  an answer with space before it",
    ],
)
def test_words_about_tags_are_no_thoughts(text: str) -> None:
    split = split_thought(text)
    assert split.thought == ""
    assert split.answer == text
