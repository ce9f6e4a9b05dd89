"""The recorded session of an agent: what the router reads of its turns, and that it is the same everywhere."""

from __future__ import annotations

import importlib
import json
from itertools import pairwise
from typing import Any

import pytest

from classifier import EstimatingCounter, PromptClass
from router.api.openai_prompt import read_chat
from router.pipeline.request import PromptText
from router.policy.decision import RoutingQuery
from router.section import PROJECT
from router.upstream.json_object import JsonObject
from tests.unit.pipeline.calls import asked_for
from tiers.prefix_memory import PrefixMemory
from tiers.spec import TemplateTokens

COUNTER = EstimatingCounter()
TEMPLATE = TemplateTokens(alone=20, with_system=30, further_pair=11)
# Turns that begin with new words of the user, one of them beside a tool's result.
QUESTIONS = {1, 9, 15, 21, 30}
BESIDE_A_RESULT = 15


def read(checkout: int) -> list[PromptText]:
    """Return what the router reads of each turn of an agent."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(PROJECT / "benchmarks")
        texts: Any = importlib.import_module("agent_texts")
    bodies = texts.AgentSession.read().bodies(checkout)
    return [
        read_chat(JsonObject.parse(json.dumps(body).encode()), COUNTER)
        for body in bodies
    ]


@pytest.fixture(scope="module")
def prompts() -> list[PromptText]:
    return read(0)


def query_of(prompt: PromptText) -> RoutingQuery:
    features = prompt.classify(COUNTER)
    return asked_for(prompt).query(features, TEMPLATE, affinity=True)


def test_it_grows_from_hundreds_of_tokens_to_sixty_thousand(
    prompts: list[PromptText],
) -> None:
    tokens = [prompt.prompt_tokens or 0 for prompt in prompts]
    assert len(tokens) == 30
    assert 200 <= tokens[0] <= 400
    assert 58_000 <= tokens[-1] <= 64_000
    assert all(before < after for before, after in pairwise(tokens))


def test_all_turns_are_of_the_class_tools_and_as_hard_as_what_was_asked_for(
    prompts: list[PromptText],
) -> None:
    """However long the results are; the complexity changes only with new words of the user."""
    complexities = []
    for number, prompt in enumerate(prompts, 1):
        features = prompt.classify(COUNTER)
        assert features.prompt_class is PromptClass.TOOLS
        is_question = number in QUESTIONS
        assert query_of(prompt).in_tool_loop is (
            not is_question or number == BESIDE_A_RESULT
        )
        if not is_question:
            assert features.complexity is complexities[-1]
        complexities.append(features.complexity)
    assert len(set(complexities)) > 1


def test_a_replica_with_the_turn_before_holds_the_conversation_and_no_other(
    prompts: list[PromptText],
) -> None:
    """From the third turn on: the first two are too short to tell."""
    own, others = PrefixMemory(), PrefixMemory()
    last_of_another = query_of(read(1)[-1]).prefix
    assert last_of_another is not None
    others.note(last_of_another, 1 << 20)
    for number, prompt in enumerate(prompts, 1):
        query = query_of(prompt)
        prefix = query.prefix
        assert prefix is not None
        if number > 3:
            assert prefix.tokens(own.matching(prefix)) >= query.conversation_tokens > 0
            assert prefix.tokens(others.matching(prefix)) < query.conversation_tokens
        own.note(prefix, 1 << 20)
