"""Engines' events as they come: cut anywhere, written in any way, with faults after good events."""

from __future__ import annotations

import json

import msgspec
import pytest

from router.upstream.errors import EngineBrokeError
from router.upstream.named_events import MESSAGE_FORMAT
from router.upstream.sse import (
    DONE,
    MAX_EVENT_BYTES,
    Chunk,
    EventParser,
    parse_event,
    read_plain_token,
)


def event(number: int) -> bytes:
    return b'data: {"choices":[],"n":%d}\n\n' % number


def chunk(number: int) -> Chunk:
    return Chunk(event(number).strip())


def test_what_came_together_is_returned_together() -> None:
    parser = EventParser()
    assert parser.parse(event(1) + event(2) + event(3)[:2]) == [chunk(1), chunk(2)]
    assert parser.parse(event(3)[2:-1]) == []
    assert parser.parse(b"\n: ping\n\n") == [chunk(3), Chunk(b": ping")]
    assert not parser.ended
    assert parser.parse(DONE + b"\n\n") == [], "the end is no chunk"
    assert parser.over is True
    assert parser.ended is True


WRITINGS = {
    "no space": b'data:{"choices":[],"n":1}\n\ndata:{"choices":[],"n":2}\n\ndata:[DONE]\n\n',
    "names and ids": b'event: message\nid: 7\ndata: {"choices":[],"n":1}\n\nretry: 5\n'
    b'data: {"choices":[],"n":2}\nevent: x\n\ndata: [DONE]\n\n',
    "comments": b': a\ndata: {"choices":[],"n":1}\n:\n\n:\n\ndata: {"choices":[],"n":2}\n: b\n\ndata: [DONE]\n\n',
    "CRLF": b'data: {"choices":[],"n":1}\r\n\r\n\r\ndata: {"choices":[],"n":2}\r\n\r\ndata: [DONE]\r\n\r\n',
    "CR": b'data: {"choices":[],"n":1}\r\rdata: {"choices":[],"n":2}\r\rdata: [DONE]\r\r',
    "blank lines": b'\n\ndata: {"choices":[],"n":1}\n\n\n\n\ndata: {"choices":[],"n":2}\n\n\ndata: [DONE] \n\n\n',
    "lines of data": b'\xef\xbb\xbfdata: {"choices":\ndata: [],\ndata:"n":1}\n\n'
    b'data: {"choices":[],\ndata:   "n":2}\nunknown\n\ndata\n\ndata:  [DONE]  \n\n',
}


@pytest.mark.parametrize("writing", WRITINGS)
def test_every_writing_of_events_is_read(writing: str) -> None:
    """As the standard has it, wherever the stream is cut."""
    stream = WRITINGS[writing]
    for cut in range(1, len(stream)):
        parser = EventParser()
        found = [
            each
            for part in (stream[:cut], stream[cut : cut + 1], stream[cut + 1 :])
            for each in parser.parse(part)
        ]
        read = [
            json.loads(each.raw[5:])
            for each in found
            if each.raw.startswith(b"data: {")
        ]
        assert read == [{"choices": [], "n": number} for number in (1, 2)], cut
        assert parser.over
        assert all(b"\n" not in each.raw for each in found)


def test_nothing_after_the_end_is_read() -> None:
    parser = EventParser()
    assert parser.parse(event(1) + DONE + b"\n\ndata: {nonsense\n\n") == [chunk(1)]
    assert parser.parse(event(2)) == []
    parser.check()


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (b'data: {"error":{}}\n\n', "reported an error"),
        (b'data: {"cut\n\n', "not a chunk"),
        (b'data: {"choices":[],"note":"\xff"}\n\n', "not a chunk"),
        (b'data: {"x":' + b"[" * 9999 + b"\n\n", "not a chunk"),
        (b"x" * (MAX_EVENT_BYTES + 1), "an event of over"),
    ],
)
def test_what_came_before_a_fault_is_returned_before_it(bad: bytes, fault: str) -> None:
    """A fault is raised once, and nothing after it is read."""
    parser = EventParser()
    assert [
        *parser.parse(event(1) + bad[:9]),
        *parser.parse(bad[9:]),
        *parser.parse(event(2)),
    ] == [chunk(1)]
    assert parser.ended is True
    assert parser.over is False
    with pytest.raises(EngineBrokeError, match=fault):
        parser.check()
    parser.check()


def test_an_event_that_comes_in_many_parts_is_whole() -> None:
    parser = EventParser()
    whole = event(1) + event(2) + DONE + b"\n\n"
    assert [
        each for at in range(len(whole)) for each in parser.parse(whole[at : at + 1])
    ] == [chunk(1), chunk(2)]
    assert parser.over


@pytest.mark.parametrize(
    "order",
    [
        b'data: {"choices":[{"token_ids":[7],"finish_reason":null,"delta":{"content":"a"},"new":{"x":[1]}}],"usage":null}',
        b'data:{"new":true,"usage":null,"choices":[{"delta":{"content":"a"},"token_ids":[7]}]}',
    ],
)
def test_members_in_any_order_and_unknown_ones_make_the_same_chunk(
    order: bytes,
) -> None:
    read = parse_event(order)
    assert read.text == "a"
    assert read.token_ids == [7]
    assert read.finish_reason is None
    assert read.other is False
    assert read.choice is True


def test_a_fault_does_not_quote_the_engine() -> None:
    """Errors end up in spans and logs, and what an engine sends may hold a prompt."""
    with pytest.raises(EngineBrokeError) as caught:
        parse_event(
            b'data: {"choices": [{"delta": {"content": 7}}], "secret": "prompt"}'
        )
    assert caught.value.__cause__ is None
    assert "prompt" not in str(caught.value.__context__)


@pytest.mark.parametrize("given", [b'""', b"null"])
def test_an_empty_finish_reason_is_none(given: bytes) -> None:
    """Some engines send an empty string until the answer ends: taken for an end, half an answer would look complete."""
    read = parse_event(
        b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": %s}]}' % given
    )
    assert read.finish_reason is None
    assert read.text == "a"


@pytest.mark.parametrize(
    ("choice", "text", "other"),
    [
        ('{"delta": {"role": "assistant", "content": ""}}', "", False),
        ('{"delta": {"content": "a", "tool_calls": []}}', "a", False),
        ('{"delta": {"reasoning": "so"}}', "", True),
        ('{"delta": {"tool_calls": [{"index": 0}]}}', "", True),
        ('{"text": "a"}', "a", False),
    ],
)
def test_text_is_told_from_all_else(choice: str, text: str, other: bool) -> None:  # noqa: FBT001
    read = parse_event(b'data: {"choices": [%s]}' % choice.encode())
    assert read.text == text
    assert read.other == other


CHAT_TOKEN = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,'
    b'"delta":{"content":" a"},"logprobs":null,"finish_reason":null,"token_ids":[7]}]}'
)
COMPLETION_TOKEN = (
    b'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" a",'
    b'"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":[7]}]}'
)


@pytest.mark.parametrize("token", [CHAT_TOKEN, COMPLETION_TOKEN])
def test_a_plain_token_is_read_as_other_events_are(token: bytes) -> None:
    plain = read_plain_token(token)
    assert plain is not None
    assert plain.without_ids == token.replace(b"[7]", b"null") + b"\n\n"
    assert as_other_events_are(plain) == comparable(parse_event(token))


@pytest.mark.parametrize("token", [CHAT_TOKEN, COMPLETION_TOKEN])
def test_nothing_but_a_plain_token_is_taken_for_one(token: bytes) -> None:
    """Each byte is left out, doubled, replaced, and preceded by a 0, with which no number of JSON begins."""
    for position in range(len(token)):
        before, after = token[:position], token[position + 1 :]
        byte = token[position : position + 1]
        replacements = [
            b"",
            byte * 2,
            b"0" + byte,
            *(b"%c" % other for other in b'x9 "\\{}[]:,\n\0\xc3\xff'),
        ]
        for replacement in replacements:
            event = before + replacement + after
            plain = read_plain_token(event)
            if plain is not None:
                assert as_other_events_are(plain) == comparable(parse_event(event)), (
                    event
                )


@pytest.mark.parametrize(
    ("part", "other"),
    [
        (b'{"content":" a"}', b'{"role":"assistant","content":" a"}'),
        (b'{"content":" a"}', b'{"reasoning":" a"}'),
        (b'{"content":" a"}', b'{"content":" a","tool_calls":[{}]}'),
        (b'"finish_reason":null', b'"finish_reason":"stop"'),
        (b"[7]", b"[7,8]"),
        (b"[7]", b"null"),
        (b"}]}", b'}],"usage":{"completion_tokens":1}}'),
        (b"}]}", b"},{}]}"),
        (b'" a"', b'""'),
    ],
)  # fmt: skip
def test_an_event_with_more_or_less_is_no_plain_token(
    part: bytes, other: bytes
) -> None:
    assert part in CHAT_TOKEN
    assert read_plain_token(CHAT_TOKEN.replace(part, other)) is None


def comparable(chunk: Chunk) -> Chunk:
    return msgspec.structs.replace(chunk, token_ids=list(chunk.token_ids))


def as_other_events_are(plain: Chunk) -> Chunk:
    return comparable(msgspec.structs.replace(plain, without_ids=b""))


NOTED = b": qarr-tokens 15,823\n\n" + event(1) + b": ping\n\n: qarr-tokens 4\n\n"


def test_comments_tell_tokens_where_they_were_asked_for() -> None:
    """Nothing of them is passed on; other comments are."""
    parser = EventParser(takes_token_notes=True)
    ids = Chunk(token_ids=[15, 823])
    last_id = Chunk(token_ids=[4])
    assert parser.parse(NOTED) == [ids, chunk(1), Chunk(b": ping"), last_id]
    assert parser.parse(b": qarr-tok") == []
    assert parser.parse(b"ens 7\n\n") == [Chunk(token_ids=[7])]


def test_comments_that_nobody_asked_for_are_comments() -> None:
    assert EventParser().parse(NOTED[:24]) == [Chunk(b": qarr-tokens 15,823")]


def test_events_with_names_are_read_between_comments_with_tokens() -> None:
    parser = EventParser(MESSAGE_FORMAT, takes_token_notes=True)
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    ids, last = parser.parse(b": qarr-tokens 4\n\n" + stop)
    assert ids == Chunk(token_ids=[4])
    assert last.last
    assert parser.over


@pytest.mark.parametrize("ids", [b"x", b"-1", b"1,,2", b"1.5", b"99999999999"])
def test_a_comment_without_ids_is_the_engines_fault(ids: bytes) -> None:
    parser = EventParser(takes_token_notes=True)
    assert parser.parse(b": qarr-tokens " + ids + b"\n\n") == []
    with pytest.raises(EngineBrokeError):
        parser.check()
