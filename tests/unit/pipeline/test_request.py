"""A request as the pipeline sees it: its tokens, its features, and a priority within its key."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from classifier import EstimatingCounter, PromptClass, ToolUse
from router.auth.api_keys import ANONYMOUS, BeyondKeyError, Caller
from router.pipeline.request import (
    LONGEST_SESSION,
    MAX_COUNT,
    PromptText,
    RequestContext,
    RoutingOptions,
    chat_part,
    class_priority,
    priority_within,
    session_of,
)
from router.policy.decision import PRIORITIES, Sla
from tests.unit.pipeline.calls import asked_for
from tiers.spec import TemplateTokens, TierName

TEMPLATE = TemplateTokens(alone=20, with_system=30, further_pair=11)
COUNTER = EstimatingCounter()
INTERACTIVE, STANDARD, BATCH = (
    PRIORITIES[name] for name in ("interactive", "standard", "batch")
)


def test_a_prompt_without_a_count_has_the_classifiers() -> None:
    """A prompt alone is counted once, by the classifier; the chat template's tokens are added."""
    text = PromptText("why is the sky blue?", messages=1)
    features = text.classify(COUNTER)
    assert features.tokens == COUNTER.count(text.text)
    assert (
        asked_for(text).query(features, TEMPLATE).prompt_tokens == features.tokens + 20
    )


@pytest.mark.parametrize(
    ("messages", "system", "added"),
    [(0, False, 0), (1, False, 20), (2, True, 30), (3, False, 31), (4, True, 41)],
)
def test_the_template_is_counted_by_messages(
    messages: int, *, system: bool, added: int
) -> None:
    """A completion has no template; each further pair of messages adds its own tokens."""
    text = PromptText("go on", 50, messages=messages, system=system)
    assert (
        asked_for(text).query(text.classify(COUNTER), TEMPLATE).prompt_tokens
        == 50 + added
    )


def test_parts_that_are_not_text_make_the_class_unknown() -> None:
    text = PromptText(
        "what is in this picture?", 1020, messages=1, other_parts=("image_url",)
    )
    features = text.classify(COUNTER)
    assert features.prompt_class is PromptClass.UNKNOWN
    assert features.signals == ("part that is not text: image_url",)


def test_a_query_has_the_options_and_the_callers_tiers() -> None:
    caller = Caller("k1", "one", tiers=frozenset({TierName.FAST, TierName.BALANCED}))
    options = RoutingOptions(TierName.FAST, "tier", require=True, sla=Sla(ttft_ms=300))
    asked = asked_for(
        PromptText("hi", 7, all_tokens=21),
        caller,
        options=options,
        max_tokens=40,
        sequences=3,
    )
    query = asked.query(asked.prompt.classify(COUNTER), TEMPLATE)
    assert query.hint == TierName.FAST
    assert query.require is True
    assert query.sla.ttft_ms == 300
    assert query.allowed == caller.tiers
    assert query.prompt_tokens == 7
    assert query.tokens_to_read == 21
    assert query.tokens_in_all == 21 + 3 * 40


def test_a_query_has_its_prefix_where_affinity_is_on() -> None:
    """The part without a count has the classifier's, the template's tokens are added, and adapters are kept apart."""
    text = "Why is the sky blue, and the grass green? " * 20
    prompt = PromptText(text, messages=1, parts=(chat_part("user", text, -1),))
    asked = asked_for(prompt, session="one")
    features = prompt.classify(COUNTER)
    assert asked.query(features, TEMPLATE).prefix is None
    query = asked.query(features, TEMPLATE, affinity=True)
    assert query.prefix is not None
    assert query.prefix.session == "one"
    assert query.prefix.ends[-1][1] == query.prompt_tokens
    other = asked_for(prompt, adapter="mine", session="one").query(
        features, TEMPLATE, affinity=True
    )
    assert other.prefix is not None
    assert other.prefix.blocks[0] != query.prefix.blocks[0]
    assert (
        asked_for(PromptText(text)).query(features, TEMPLATE, affinity=True).prefix
        is None
    )


def test_a_session_has_the_first_name_that_it_is_given() -> None:
    """A header, a field, else the key; of any other type than text it is none, and a long one is cut."""
    caller = Caller("k1", "one")
    named = RequestContext("r", "t", caller, request_headers={b"x-session-id": b"mine"})
    plain = RequestContext("r", "t", caller)
    assert session_of(named, "other") == "mine"
    assert session_of(plain, None, ["a"], "", "other") == "other"
    assert session_of(plain) == "k1"
    assert session_of(RequestContext("r", "t")) == ""
    assert session_of(plain, "x" * 10_000) == "x" * LONGEST_SESSION


def agents_prompt(task: str, *more: tuple[str, str], **changes: Any) -> PromptText:
    """Return the prompt of an agent with tools: a system prompt, what its user asked for, and what followed."""
    said = [("system", "You are an agent. " * 40), ("user", task), *more]
    parts = tuple(chat_part(role, text, len(text) // 3) for role, text in said)
    return structs.replace(
        PromptText(
            task,
            900,
            messages=len(parts),
            system=True,
            parts=parts,
            tool_use=ToolUse.OFFERED,
        ),
        **changes,
    )


def session_in(prompt: PromptText, *, key_id: str = "k1", session: str = "") -> str:
    """Return what replicas are told apart by for a prompt."""
    asked = asked_for(prompt, Caller(key_id, "one"), session=session or key_id)
    query = asked.query(prompt.classify(COUNTER), TEMPLATE, affinity=True)
    assert query.prefix is not None
    return query.prefix.session


def test_an_agents_conversation_without_a_name_is_named_by_its_task() -> None:
    """The same at each turn, another for another task or key; a name that was given counts, and so does a key without tools."""
    first = session_in(agents_prompt("Fix the tides"))
    later = agents_prompt("Fix the tides", ("assistant", "reads"), ("tool", "a file"))
    asked_again = agents_prompt(
        "Fix the tides", ("assistant", "done"), ("user", "and the moon")
    )
    assert first
    assert session_in(later) == first
    assert session_in(asked_again) == first
    other_task = session_in(agents_prompt("Fix the moon"))
    other_key = session_in(agents_prompt("Fix the tides"), key_id="k2")
    assert len({first, other_task, other_key}) == 3
    # What stands before the task is the same for all agents in a project.
    beside_project = session_in(agents_prompt("project", ("user", "Fix the moon")))
    assert beside_project == other_task
    assert session_in(later, session="mine") == "mine"
    assert session_in(agents_prompt("Fix the tides", tool_use=None)) == "k1"


@pytest.mark.parametrize(
    ("roles", "tool_use", "is_in_loop"),
    [
        (("assistant", "tool"), ToolUse.RESULT, True),
        (("assistant", "tool", "user"), ToolUse.OFFERED, True),
        (("assistant", "function", "user"), None, True),
        (("assistant", "tool", "assistant", "user"), ToolUse.OFFERED, False),
        (("assistant", "user"), ToolUse.OFFERED, False),
        ((), ToolUse.OFFERED, False),
    ],
)
def test_a_tool_loop_is_told_by_what_is_new(
    roles: tuple[str, ...], tool_use: ToolUse | None, *, is_in_loop: bool
) -> None:
    """A result is new, also if the user has said something beside it; one that was answered is not."""
    prompt = agents_prompt(
        "Fix it", *((role, "x") for role in roles), tool_use=tool_use
    )
    asked = asked_for(prompt)
    query = asked.query(prompt.classify(COUNTER), TEMPLATE)
    assert query.in_tool_loop is is_in_loop
    pictured = structs.replace(prompt, parts=(), other_parts=("image_url",))
    assert pictured.continues_tool_loop is (tool_use is ToolUse.RESULT)


def test_a_query_tells_a_conversation_from_how_it_begins() -> None:
    """At its first turn there is none, and without affinity none is known."""
    first = agents_prompt("Fix the tides. " * 200)
    later = agents_prompt("Fix the tides. " * 200, ("assistant", "r"), ("tool", "x"))
    features = first.classify(COUNTER)
    assert (
        asked_for(first).query(features, TEMPLATE, affinity=True).conversation_tokens
        == 0
    )
    assert asked_for(later).query(features, TEMPLATE).conversation_tokens == 0
    query = asked_for(later).query(features, TEMPLATE, affinity=True)
    assert query.prefix is not None
    assert query.conversation_tokens == query.prefix.turn_tokens > 500


def test_counts_are_bounded() -> None:
    """However many tokens a caller claims, counters stay whole numbers that every store can hold."""
    asked = asked_for(PromptText("hi", 7, all_tokens=1 << 80))
    assert (
        asked.query(asked.prompt.classify(COUNTER), TEMPLATE).all_prompt_tokens
        == MAX_COUNT
    )


@pytest.mark.parametrize(
    ("most", "asked", "got"),
    [
        ("interactive", None, STANDARD),
        ("batch", None, BATCH),
        ("interactive", "interactive", INTERACTIVE),
        ("standard", "interactive", STANDARD),
        ("standard", "batch", BATCH),
    ],
)
def test_a_class_is_lowered_to_what_the_key_allows(
    most: Any, asked: Any, got: int
) -> None:
    """A request that asks for no class has the standard one, or the highest of its key where that is lower."""
    assert (
        class_priority(Caller("k", "one", max_priority=most), asked, "priority") == got
    )


def test_a_strict_key_refuses_what_is_beyond_it() -> None:
    strict = Caller("k", "one", over="refuse", max_priority="standard")
    with pytest.raises(BeyondKeyError) as refused:
        class_priority(strict, "interactive", "qarr.priority")
    assert refused.value.field == "qarr.priority"
    assert refused.value.requested == "interactive"
    assert "standard" in refused.value.allowed
    with pytest.raises(BeyondKeyError):
        priority_within(strict, -1000, "priority", requested="-1000")
    assert class_priority(strict, None, "") == STANDARD, (
        "who asks for nothing asks for nothing that is refused"
    )


def test_numbers_are_kept_within_the_highest_class() -> None:
    """OpenAI's endpoints take any of vLLM's numbers; none is higher than the class that the key may have."""
    assert (
        priority_within(ANONYMOUS, -1000, "priority", requested="-1000") == INTERACTIVE
    )
    assert priority_within(ANONYMOUS, 77, "priority", requested="77") == 77


def test_a_contexts_headers_carry_its_ids_and_limits() -> None:
    context = RequestContext(
        "r1", "t1", quota_headers={"x-ratelimit-limit-requests": "9"}
    )
    assert context.response_headers == {
        "x-request-id": "r1",
        "x-qarr-trace-id": "t1",
        "x-ratelimit-limit-requests": "9",
    }
    assert context.ids == {"request_id": "r1", "trace_id": "t1"}
