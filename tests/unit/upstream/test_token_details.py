"""What engines tell of an answer's tokens, and how many of a stream's are seen to be reasoning."""

from __future__ import annotations

from typing import Any

import pytest

from router.upstream.sse import Chunk, parse_event, read_completion
from router.upstream.token_details import (
    NO_DETAILS,
    ThoughtTokens,
    TokenDetails,
    token_details_of,
)

COUNTS = b'"prompt_tokens":10,"completion_tokens":5,"total_tokens":15'


@pytest.mark.parametrize(
    ("usage", "details"),
    [
        ({}, NO_DETAILS),
        ({"prompt_tokens_details": None}, NO_DETAILS),
        ({"prompt_tokens_details": {"cached_tokens": None}}, NO_DETAILS),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, TokenDetails(cached=0)),
        (
            {
                "prompt_tokens_details": {
                    "cached_tokens": 6,
                    "created_cache_tokens": 4,
                }
            },
            TokenDetails(cached=6, cache_written=4),
        ),
        (
            {
                "completion_tokens_details": {
                    "reasoning_tokens": 3,
                    "tool_output_tokens": 2,
                }
            },
            TokenDetails(reasoning=3, tool=2),
        ),
        ({"prompt_tokens_details": [6]}, NO_DETAILS),
        ({"prompt_tokens_details": {"cached_tokens": "6"}}, NO_DETAILS),
        ({"completion_tokens_details": {"reasoning_tokens": -1}}, NO_DETAILS),
    ],
)
def test_what_an_engine_tells_is_read(
    usage: dict[str, Any], details: TokenDetails
) -> None:
    """What is absent, or is no count, stays unknown: it is not the same as none."""
    assert token_details_of(usage) == details


def thought(*token_ids: int) -> Chunk:
    return Chunk(b"data: {}", token_ids=token_ids, other=True, reasoning=True)


def text(*token_ids: int) -> Chunk:
    return Chunk(b"data: {}", "text", token_ids=token_ids)


def call(*token_ids: int) -> Chunk:
    return Chunk(b"data: {}", token_ids=token_ids, other=True)


def blank(*token_ids: int) -> Chunk:
    return Chunk(b"data: {}", token_ids=token_ids)


def note(*token_ids: int) -> Chunk:
    """Return a chunk that tells only ids of tokens, before the event that they led to."""
    return Chunk(token_ids=token_ids)


MIXED = Chunk(b"data: {}", "text", token_ids=(4,), other=True, reasoning=True)


@pytest.mark.parametrize(
    ("chunks", "tokens"),
    [
        pytest.param([thought(1), thought(2), text(3)], 2, id="one token an event"),
        pytest.param([thought(1, 2, 3), thought(4)], 4, id="the whole of it"),
        pytest.param([thought(1, 2), thought(3), call(4)], 3, id="then a tool call"),
        pytest.param([thought(1), blank(2), thought(3)], 3, id="half a character"),
        pytest.param([thought(1), blank(9), text(3)], 1, id="the tag at its end"),
        pytest.param([thought(1), text(2), thought(3), text(4)], 2, id="two thoughts"),
        pytest.param([note(9), note(1), thought(), note(2), thought()], 2, id="notes"),
        pytest.param(
            [note(1), thought(), note(9), note(2), text()], 1, id="notes, tag"
        ),
        pytest.param([thought(), thought()], None, id="no ids"),
        pytest.param([thought(1), thought(), text(2)], None, id="ids of some"),
        pytest.param([thought(1), thought(2, 9), text(3)], None, id="tag within"),
        pytest.param([thought(1), MIXED, text(5)], None, id="thought and answer"),
    ],
)
def test_tokens_of_thoughts_are_counted(
    chunks: list[Chunk], tokens: int | None
) -> None:
    """Those without text belong to what follows; where a token may be of the answer, no number is given."""
    counted = ThoughtTokens()
    latest_tokens = 0
    for chunk in chunks:
        latest_tokens = len(chunk.token_ids) or latest_tokens
        if chunk.reasoning or counted.is_open:
            counted.receive(chunk, latest_tokens)
    assert counted.count == tokens


@pytest.mark.parametrize(
    ("delta", "other", "reasoning"),
    [
        (b'{"content":"a"}', False, False),
        (b'{"reasoning":"a"}', True, True),
        (b'{"reasoning_content":"a"}', True, True),
        (b'{"reasoning":""}', False, False),
        (b'{"content":"a","reasoning":"b"}', True, True),
        (b'{"tool_calls":[{"index":0}]}', True, False),
    ],
)
def test_a_chats_reasoning_is_told_apart(
    delta: bytes, *, other: bool, reasoning: bool
) -> None:
    chunk = parse_event(b'data: {"choices":[{"index":0,"delta":' + delta + b"}]}")
    assert (chunk.other, chunk.reasoning) == (other, reasoning)


@pytest.mark.parametrize(
    ("message", "told", "tokens"),
    [
        (b'{"content":"a","reasoning":"b"}', b'{"reasoning_tokens":3}', 3),
        (b'{"content":"a","reasoning":"b"}', b'{"reasoning_tokens":0}', None),
        (b'{"content":"a","reasoning":null}', b'{"reasoning_tokens":0}', 0),
        (b'{"content":"a","reasoning":"b"}', b"null", None),
    ],
)
def test_a_parser_that_counts_nothing_is_not_believed(
    message: bytes, told: bytes, tokens: int | None
) -> None:
    """An answer with reasoning has tokens of it, even if the engine counts none."""
    whole = read_completion(
        b'{"choices":[{"index":0,"finish_reason":"stop","message":%b}],'
        b'"usage":{%b,"completion_tokens_details":%b}}' % (message, COUNTS, told)
    )
    assert whole is not None
    assert token_details_of(whole[1]).reasoning == tokens
