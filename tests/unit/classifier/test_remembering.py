"""A conversation's tokens are counted once, and the counts are those of counting everything again."""

import gc
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from classifier import ModelTokenCounter, RememberingCounter
from classifier.features import PIECE_CHARS
from classifier.tokens import MAX_CHARS
from router.api.named_events import read_input, read_messages
from router.api.openai_prompt import read_chat, read_completion
from router.upstream.json_object import JsonObject
from tests.unit.classifier.made_tokenizers import BYTE_LEVEL, byte_level
from tests.unit.classifier.test_tokens import FAST

DEFINITION = byte_level(BYTE_LEVEL).to_str()
FULL = ModelTokenCounter(DEFINITION)
ROLES = ("system", "user", "assistant", "tool")
TEXTS = st.one_of(
    st.text(max_size=60),
    st.text(st.characters(categories=["Cs", "Ll", "Zs"]), max_size=30),
    st.sampled_from(
        [
            "The quick brown fox jumps over the lazy dog.",
            "The quick brown fox jumps over the lazy dog!",
            "The quick brown fox " * 40,
            "def add(first, second):\n    return first + second",
            "\u00e9" * 17,
            "e\u0301" * 17,
            "<|end|>" * 5,
        ]
    ),
)


class CountedTexts(ModelTokenCounter):
    """A model's counter that notes which texts it has counted."""

    __slots__ = ("texts",)

    def __init__(self) -> None:
        super().__init__(DEFINITION)
        self.texts: list[str] = []

    def count(self, text: str) -> int:
        self.texts.append(text)
        return super().count(text)


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    role = draw(st.sampled_from(ROLES))
    text = draw(TEXTS)
    message: dict[str, Any] = {"role": role, "content": text}
    if draw(st.booleans()):
        message["content"] = [{"type": "text", "text": text}]
    if role == "assistant" and draw(st.booleans()):
        function = {"name": "read", "arguments": json.dumps({"path": draw(TEXTS)})}
        message["tool_calls"] = [{"id": "1", "function": function}]
    return message


@st.composite
def turns(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """Return a conversation as it is at each turn: it grows, and anything in it may be edited, dropped or moved."""
    conversation: list[dict[str, Any]] = []
    shown = []
    for _ in range(draw(st.integers(1, 6))):
        conversation = [*conversation, *draw(st.lists(messages(), max_size=4))]
        change = draw(st.sampled_from(["none", "edit", "drop", "swap"]))
        if conversation and change != "none":
            place = draw(st.integers(0, len(conversation) - 1))
            if change == "edit":
                conversation[place] = draw(messages())
            elif change == "drop":
                del conversation[place]
            else:
                conversation.insert(0, conversation.pop(place))
        shown.append(list(conversation))
    return shown


def body_of(members: dict[str, Any]) -> JsonObject:
    return JsonObject.parse(json.dumps(members).encode())


@given(turns(), st.sampled_from([1, 3, 100]), TEXTS)
def test_counts_are_those_of_a_full_count(
    conversation: list[list[dict[str, Any]]], capacity: int, tool: str
) -> None:
    """All that is read of a conversation is the same, also where it is edited and where the memory is too small for it."""
    counter = RememberingCounter(ModelTokenCounter(DEFINITION), capacity)
    tools = [{"type": "function", "function": {"name": "read", "description": tool}}]
    for turn in conversation:
        chat = body_of({"messages": turn, "tools": tools})
        assert read_chat(chat, counter) == read_chat(chat, FULL)
        message = body_of({"messages": turn, "system": tool, "tools": tools})
        read = read_messages(message)
        assert read.prompt(counter) == read.prompt(FULL)
        response = body_of({"input": turn, "instructions": tool})
        read = read_input(response)
        assert read.prompt(counter) == read.prompt(FULL)
        assert counter.remembered <= 2 * capacity


@given(st.lists(TEXTS, max_size=30), st.sampled_from(sorted(FAST)))
def test_any_texts_have_the_counters_own_counts(texts: list[str], name: str) -> None:
    own = ModelTokenCounter(FAST[name].to_str())
    counter = RememberingCounter(own, capacity=8)
    for text in [*texts, *reversed(texts)]:
        assert counter.count(text) == own.count(text)
    assert counter.exact


@pytest.mark.parametrize("unit", ["The quick brown fox. ", "quick\ud800", "狐 "])
def test_long_texts_have_the_counters_own_counts(unit: str) -> None:
    """A text at, within and beyond the bounds of pieces and of estimates; also one that grows."""
    counter = RememberingCounter(ModelTokenCounter(DEFINITION))
    whole = unit * (MAX_CHARS // len(unit) + 2)
    for bound in (PIECE_CHARS, 2 * PIECE_CHARS, MAX_CHARS):
        for chars in (bound - 1, bound, bound + 1):
            text = whole[:chars]
            assert counter.count(text) == FULL.count(text) == counter.count(text)


def test_only_what_is_new_is_counted() -> None:
    """Of a conversation that comes again with more, only that is counted; of one with an edit, only the edited text."""
    own = CountedTexts()
    counter = RememberingCounter(own)
    earlier = [
        {"role": ROLES[number % 4], "content": f"This is the text of message {number}."}
        for number in range(12)
    ]
    read_chat(body_of({"messages": earlier}), counter)
    own.texts.clear()
    new = {"role": "user", "content": "And this one was not here before."}
    read_chat(body_of({"messages": [*earlier, new]}), counter)
    assert own.texts == [new["content"]]
    own.texts.clear()
    edited = [*earlier[:5], new | {"content": "This one is another."}, *earlier[6:]]
    read_chat(body_of({"messages": edited}), counter)
    assert own.texts == ["This one is another."]


def test_a_long_text_that_grows_is_counted_from_its_last_piece() -> None:
    own = CountedTexts()
    counter = RememberingCounter(own)
    text = "The quick brown fox. " * 6000
    read_completion(body_of({"prompt": text}), counter)
    own.texts.clear()
    read_completion(body_of({"prompt": text + "More of it."}), counter)
    assert [len(piece) for piece in own.texts] == [len(text) % PIECE_CHARS + 11]


def test_the_least_recently_used_are_forgotten() -> None:
    own = CountedTexts()
    counter = RememberingCounter(own, capacity=4)
    kept = "This text is asked for again and again."
    for number in range(50):
        counter.count(kept)
        counter.count(f"This text is asked for once: {number}.")
        assert counter.remembered <= 8
    assert own.texts.count(kept) == 1
    counter.count("This text is asked for once: 0.")
    assert own.texts.count("This text is asked for once: 0.") == 2


def test_no_text_is_kept() -> None:
    """Nothing that the counter refers to has a text, or its beginning, in it."""
    counter = RememberingCounter(ModelTokenCounter(DEFINITION))
    secret = "The password of the vault is swordfish."
    counter.count(secret)
    assert counter.remembered == 1
    for memory in (counter._younger, counter._older):
        for kept in gc.get_referents(memory):
            assert isinstance(kept, bytes | int)
            assert b"swordfish" not in str(kept).encode()
    # Keys differ, so that a hash seen in one process says nothing in another.
    other = RememberingCounter(ModelTokenCounter(DEFINITION))
    other.count(secret)
    assert counter._younger.keys() != other._younger.keys()
