"""How far an answer has come: which tokens have which text, whatever an engine keeps back."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from router.upstream.progress import (
    BEGINNING,
    AnswerProgress,
    ContinuationTerms,
    Point,
    StopToken,
)
from router.upstream.sse import Chunk


def spoken(
    progress: AnswerProgress, *chunks: tuple[str, tuple[int, ...]]
) -> AnswerProgress:
    for text, ids in chunks:
        progress.note((Chunk(text=text, token_ids=ids),))
    return progress


def test_each_token_that_comes_alone_ends_a_character() -> None:
    progress = spoken(AnswerProgress(), ("The", (1,)), (" capital", (2,)))
    assert progress.point == Point(2, 11)
    assert progress.text == "The capital"
    assert progress.settled is True


def test_tokens_that_come_together_have_no_point_between_them() -> None:
    """Nobody knows which of them has which text; after the next one that comes alone, all of it is known again."""
    progress = spoken(AnswerProgress(), ("The", (1,)), (" capital of", (2, 3)))
    assert progress.point == Point(1, 3)
    assert not progress.settled
    assert spoken(progress, (" Fr", (4,))).point == Point(4, 17)


def test_what_an_engine_keeps_back_is_not_settled() -> None:
    """It keeps three characters: two tokens have the four that came and three more, which come with the next."""
    progress = spoken(AnswerProgress(held_back=3), ("ab", (1,)), ("cd", (2,)))
    assert progress.point == Point(0, 0)
    assert not progress.settled
    spoken(progress, ("efg", (3,)))
    assert progress.point == Point(2, 7)


def test_text_without_tokens_cannot_be_continued() -> None:
    progress = spoken(AnswerProgress(), ("The", (1,)), (" end", ()))
    assert not progress.is_continuable
    progress.prompt_ids = array("I", [7])
    assert progress.usage == {}, "the engine did not tell all of its tokens"


def test_reasoning_cannot_be_continued_but_is_counted() -> None:
    progress = AnswerProgress(prompt_ids=array("I", [7, 8]))
    progress.note((Chunk(token_ids=(1,), other=True),))
    assert not progress.is_continuable
    assert progress.usage == {
        "prompt_tokens": 2,
        "completion_tokens": 1,
        "total_tokens": 3,
    }


def test_tokens_without_text_are_remembered() -> None:
    """They are parts of characters, or special tokens that answers leave out."""
    progress = spoken(
        AnswerProgress(), ("a", (1,)), ("", (2,)), ("\N{EURO SIGN}", (3,))
    )
    assert progress.silent == [1]


def test_going_back_forgets_what_came_after() -> None:
    progress = spoken(AnswerProgress(), ("a", (1,)), ("b", (2,)), ("c", (3,)))
    progress.rest_at(2, "ab")
    assert list(progress.output_ids) == [1, 2]
    assert progress.text == "ab"
    assert progress.begun == Point(2, 2)
    assert spoken(progress, ("d", (9,))).point == Point(3, 3)


def test_a_stop_string_ends_with_the_token_that_completes_it() -> None:
    progress = spoken(AnswerProgress(), ("ab", (1,)), ("cd", (2,)))
    progress.stop_at("abc")
    assert list(progress.output_ids) == [1, 2]
    assert progress.finish_reason == "stop"
    assert progress.stop_token == StopToken("abc", BEGINNING, fewest=2, most=2)


def test_a_stop_string_may_end_with_any_token_whose_text_is_held_back() -> None:
    """Between the point where an engine begins and its first text, nobody knows which token has which text."""
    progress = spoken(AnswerProgress(held_back=3), ("abcd", (1,)), ("efg", (2,)))
    progress.rest_at(2, "abcdefghij")
    spoken(progress, ("", (3,)), ("", (4,)), ("k", (5,)), ("l", (6,)))
    progress.stop_at("abcdefghijk")
    begun = Point(2, 10)
    assert progress.stop_token == StopToken("abcdefghijk", begun, fewest=3, most=5)
    assert list(progress.output_ids) == [1, 2, 3, 4, 5]


def test_a_stop_string_may_end_before_the_engine_began_that_computes() -> None:
    """The engine before it was only asked about that text, and broke before it had told it."""
    progress = spoken(AnswerProgress(held_back=3), ("abcd", (1,)), ("efg", (2,)))
    progress.rest_at(2, "abcdefghij")
    spoken(progress, ("", (3,)), ("", (4,)))
    progress.rest_at(4, "abcdefghijkl")
    spoken(progress, ("", (5,)))
    progress.stop_at("abcdefghi")
    known = Point(1, 7)
    assert progress.searched == known
    assert progress.stop_token == StopToken("abcdefghi", known, fewest=2, most=4)


@given(
    st.lists(st.tuples(st.text(max_size=4), st.integers(0, 9)), max_size=30),
    st.integers(0, 6),
)
def test_a_point_never_promises_text_that_has_not_come(
    tokens: list[tuple[str, int]], held_back: int
) -> None:
    progress = AnswerProgress(held_back)
    for text, number in tokens:
        progress.note((Chunk(text=text, token_ids=(number,)),))
        assert (
            progress.point.characters
            <= progress.received_characters
            == len(progress.text)
        )
        assert progress.point.tokens <= len(progress.output_ids)


def test_what_an_engine_keeps_back_follows_from_the_stop_strings() -> None:
    """The longest stop string but one character; nothing where the string belongs to the answer."""
    assert ContinuationTerms(None, {"stop": ["END", "", 7, "\n"]}, 0).held_back == 2
    assert ContinuationTerms(None, {"stop": "END"}, 0).stops == ("END",)
    assert (
        ContinuationTerms(
            None, {"stop": ["END"], "include_stop_str_in_output": True}, 0
        ).held_back
        == 0
    )
    assert ContinuationTerms(None, {}, 0).held_back == 0
    assert ContinuationTerms(None, {"min_tokens": "5"}, 0).min_tokens == 5
