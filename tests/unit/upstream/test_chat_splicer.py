"""A resumed chat is joined to what its caller has: nothing twice, nothing halved, an error where it differs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.upstream.chat_splicer import ChatSplicer
from router.upstream.errors import SeamError
from router.upstream.splicing import Sent
from router.upstream.sse import Chunk, parse_event, read_plain_token

FIRST = {
    "id": "chatcmpl-first",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
}
RESUMED = {**FIRST, "id": "chatcmpl-resumed", "created": 2}
ROLE = {"role": "assistant", "content": ""}


def event(
    shared: dict[str, Any], delta: dict[str, Any], finish_reason: str | None = None
) -> bytes:
    choice = {
        "index": 0,
        "delta": delta,
        "logprobs": None,
        "finish_reason": finish_reason,
        "token_ids": None,
    }
    return b"data: " + json.dumps({**shared, "choices": [choice]}).encode()


def call(index: int, arguments: str, name: str | None = None) -> dict[str, Any]:
    """Return a delta with a part of a tool call: vLLM sends its id and its name with the first part."""
    function = {"arguments": arguments}
    if name is None:
        return {"tool_calls": [{"index": index, "function": function}]}
    begun = {"id": f"call-{name}", "type": "function", "index": index}
    return {"tool_calls": [{**begun, "function": {"name": name, **function}}]}


def spliced(
    sent: Iterable[dict[str, Any]],
    resumed: Iterable[dict[str, Any]],
    finish_reason: str | None = "stop",
) -> list[Chunk]:
    """Return what is passed on of a resumed stream with these deltas, after one with those that were sent."""
    first_event = event(FIRST, ROLE)
    splicer = ChatSplicer()
    text = ""
    for delta in sent:
        chunk = parse_event(event(FIRST, delta))
        splicer.note(chunk)
        text += chunk.text
    splicer.begin(Sent(first_event, text))
    events = [event(RESUMED, delta) for delta in (ROLE, *resumed)]
    if finish_reason is not None:
        events.append(event(RESUMED, {"content": ""}, finish_reason))
    passed = []
    for raw in events:
        unsent = splicer.splice(parse_event(raw))
        if unsent is not None:
            splicer.note(unsent)
            passed.append(unsent)
    return passed


def deltas(chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
    return [json.loads(chunk.raw[6:])["choices"][0]["delta"] for chunk in chunks]


def put_together(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Put an answer together from its deltas, as OpenAI's client does; a name that comes twice is doubled."""
    answer: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}}
    for delta in parts:
        answer["content"] += delta.get("content") or ""
        answer["reasoning"] += delta.get("reasoning") or ""
        for part in delta.get("tool_calls", ()):
            known = answer["calls"].setdefault(part["index"], ["", "", ""])
            known[0] += part.get("id", "")
            known[1] += part["function"].get("name", "")
            known[2] += part["function"].get("arguments", "")
    return answer


def test_a_token_of_plain_text_is_passed_on_as_it_was_changed() -> None:
    """An engine may tell token ids in its events although it was not asked for them."""
    splicer = ChatSplicer()
    splicer.begin(Sent(event(FIRST, ROLE), "Hel"))
    raw = (
        b'data: {"id":"chatcmpl-resumed","object":"chat.completion.chunk","created":2,"model":"m","choices":'
        b'[{"index":0,"delta":{"content":"Hello"},"logprobs":null,"finish_reason":null,"token_ids":[7]}]}'
    )
    plain = read_plain_token(raw)
    assert plain is not None
    unsent = splicer.splice(plain)
    assert unsent is not None
    assert unsent.text == "lo"
    assert json.loads(unsent.raw[6:])["id"] == "chatcmpl-first"
    assert unsent.without_ids == b""


WHOLE = [
    {"reasoning": "Let me"},
    {"reasoning": " see."},
    {"content": "I look "},
    {"content": "it up."},
    call(0, "", "find"),
    call(0, '{"city"'),
    call(0, ': "Paris"}'),
    call(1, '{"unit": ', "weather"),
    call(1, '"C"}'),
]


@pytest.mark.parametrize("known", range(len(WHOLE) + 1))
def test_each_output_comes_once(known: int) -> None:
    """The known part comes in one piece, with all that a client would put together from it."""
    begun = put_together(WHOLE[:known])
    known_calls = [
        call(index, arguments, name)["tool_calls"][0]
        for index, (_, name, arguments) in begun["calls"].items()
    ]
    known_part = {
        "reasoning": begun["reasoning"],
        "content": begun["content"],
        "tool_calls": known_calls,
    }
    passed = spliced(WHOLE[:known], [known_part, *WHOLE[known:]])
    assert put_together([*WHOLE[:known], *deltas(passed)]) == put_together(WHOLE)
    assert [chunk.finish_reason for chunk in passed][-1] == "stop"
    assert all(json.loads(chunk.raw[6:])["id"] == FIRST["id"] for chunk in passed)
    assert all(json.loads(chunk.raw[6:])["created"] == 1 for chunk in passed)


@given(st.data())
def test_the_pieces_of_a_text_may_be_others(data: st.DataObject) -> None:
    text = data.draw(st.text(min_size=1, max_size=12))
    sent = data.draw(st.integers(0, len(text)))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text)), max_size=4)))
    edges = [0, *cuts, len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    member = data.draw(st.sampled_from(["content", "reasoning"]))
    passed = spliced([{member: text[:sent]}], [{member: piece} for piece in pieces])
    assert put_together(deltas(passed))[member] == text[sent:]
    assert "".join(chunk.text for chunk in passed) == (
        text[sent:] if member == "content" else ""
    )


@pytest.mark.parametrize(
    ("sent", "resumed"),
    [
        ([{"content": "Paris"}], [{"content": "Rome"}]),
        ([{"content": "Paris is"}], [{"content": "Paris"}]),
        ([{"reasoning": "Hm"}], [{"content": "Hm"}]),
        ([call(0, "{", "find")], [call(0, "{", "search")]),
        ([call(0, '{"a"', "find")], [call(0, '{"b"', "find")]),
        ([call(0, '{"a": 1', "find")], [call(0, '{"a"', "find")]),
        ([call(0, "", "find")], [{"content": "Paris"}]),
        ([call(0, "{}", "find"), call(1, "", "wait")], [call(0, "{}", "find")]),
    ],
    ids=[
        "another text",
        "a shorter text",
        "reasoning that is text",
        "another tool",
        "other arguments",
        "fewer arguments",
        "no call",
        "a call less",
    ],
)
def test_what_differs_ends_with_an_error(
    sent: list[dict[str, Any]], resumed: list[dict[str, Any]]
) -> None:
    """The end of the resumed stream is never passed on: a cut answer would look whole."""
    with pytest.raises(SeamError):
        spliced(sent, resumed)


def test_a_resumed_answer_is_resumed_again() -> None:
    """What the second engine added counts as sent for the third."""
    splicer = ChatSplicer()
    sent = []
    text = ""
    for known in (2, 5, 7):
        splicer.begin(Sent(event(FIRST, ROLE), text))
        for delta in WHOLE[:known]:
            unsent = splicer.splice(parse_event(event(RESUMED, delta)))
            if unsent is not None:
                splicer.note(unsent)
                text += unsent.text
                sent += deltas([unsent])
    assert put_together(sent) == put_together(WHOLE[:7])


def test_comments_ids_and_counts_are_passed_on() -> None:
    splicer = ChatSplicer()
    splicer.begin(Sent(event(FIRST, ROLE), "Par"))
    ping = Chunk(b": ping")
    ids = Chunk(token_ids=(5, 6))
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    counts = parse_event(
        b"data: " + json.dumps({**RESUMED, "choices": [], "usage": usage}).encode()
    )
    assert splicer.splice(ping) is ping
    assert splicer.splice(ids) is ids
    passed = splicer.splice(counts)
    assert passed is not None
    assert json.loads(passed.raw[6:]) == {**FIRST, "choices": [], "usage": usage}


def test_output_of_an_unknown_kind_is_not_resumed() -> None:
    splicer = ChatSplicer()
    splicer.note(parse_event(event(FIRST, {"audio": {"data": "AAAA"}})))
    assert not splicer.can_resume


def test_a_completion_is_joined_by_its_text() -> None:
    splicer = ChatSplicer()

    def completion(text: str, finish_reason: str | None = None) -> Chunk:
        choice = {"index": 0, "text": text, "finish_reason": finish_reason}
        body = {**RESUMED, "object": "text_completion", "choices": [choice]}
        return parse_event(b"data: " + json.dumps(body).encode())

    first = json.dumps({**FIRST, "object": "text_completion", "choices": []})
    splicer.begin(Sent(b"data: " + first.encode(), '{"city": "Pa'))
    passed = splicer.splice(completion('{"city": "Paris'))
    assert passed is not None
    assert passed.text == "ris"
    data = json.loads(passed.raw[6:])
    assert data["choices"][0]["text"] == "ris"
    assert data["id"] == FIRST["id"]
    end = splicer.splice(completion('"}', "stop"))
    assert end is not None
    assert (end.text, end.finish_reason) == ('"}', "stop")


def test_an_end_that_was_sent_is_not_sent_again() -> None:
    """Where only the token counts are missing, an engine resumes the answer for them."""
    splicer = ChatSplicer()
    splicer.begin(Sent(event(FIRST, ROLE), "Paris", has_finish_reason=True))
    assert splicer.splice(parse_event(event(RESUMED, {"content": "Paris"}))) is None
    end = event(RESUMED, {"content": ""}, "stop")
    assert splicer.splice(parse_event(end)) is None


def test_a_call_whose_name_had_not_come_gets_it() -> None:
    begun = {"tool_calls": [{"index": 0, "id": "call-x", "function": {}}]}
    passed = spliced([begun], [call(0, "{", "find"), call(0, "}")])
    answer = put_together([begun, *deltas(passed)])
    assert answer["calls"] == {0: ["call-x", "find", "{}"]}
