"""A resumed message is joined to what its caller has: blocks go on where they were, and none comes twice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from router.upstream.errors import SeamError
from router.upstream.message_splicer import MessageSplicer
from router.upstream.named_events import read_message_event
from router.upstream.splicing import Sent
from router.upstream.sse import Chunk


def event(kind: str, **members: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **members})}".encode()


def start(message_id: str) -> bytes:
    message = {"id": message_id, "type": "message", "role": "assistant", "content": []}
    return event("message_start", message=message)


def begin(index: int, kind: str, **members: Any) -> bytes:
    return event(
        "content_block_start", index=index, content_block={"type": kind, **members}
    )


def delta(index: int, kind: str, **members: Any) -> bytes:
    return event("content_block_delta", index=index, delta={"type": kind, **members})


def stop(index: int) -> bytes:
    return event("content_block_stop", index=index)


def thought(text: str) -> bytes:
    return delta(0, "thinking_delta", thinking=text)


def words(text: str) -> bytes:
    return delta(1, "text_delta", text=text)


def arguments(text: str) -> bytes:
    return delta(2, "input_json_delta", partial_json=text)


def stream(ids: str) -> list[bytes]:
    """Return a stream as vLLM writes it: it gives each stream its own ids and signatures."""
    return [
        start(f"msg-{ids}"),
        begin(0, "thinking", thinking=""),
        thought("Let me"),
        thought(" see."),
        delta(0, "signature_delta", signature=f"signed-{ids}"),
        stop(0),
        begin(1, "text", text=""),
        words("I look"),
        words(" it up."),
        stop(1),
        begin(2, "tool_use", id=f"call-{ids}", name="find", input={}),
        arguments('{"city"'),
        arguments(': "Paris"}'),
        stop(2),
        event(
            "message_delta",
            delta={"stop_reason": "tool_use", "stop_sequence": None},
            usage={"input_tokens": 3, "output_tokens": 9},
        ),
        event("message_stop"),
    ]


def resumed(known: int) -> list[bytes]:
    """Return the stream of an engine that is sent the output up to an event: it tells that in one piece each."""
    events = stream("b")
    merged: list[bytes] = []
    for raw in events[:known]:
        data = json.loads(raw.partition(b"data:")[2])
        last = json.loads(merged[-1].partition(b"data:")[2]) if merged else {}
        pair = (data, last)
        if all(part.get("delta", {}).get("type", "")[:4] for part in pair) and (
            data["delta"]["type"] == last["delta"]["type"]
        ):
            for name, value in data["delta"].items():
                if name != "type":
                    last["delta"][name] += value
            merged[-1] = event(last.pop("type"), **last)
        else:
            merged.append(raw)
    return [*merged, *events[known:]]


def spliced(sent: Iterable[bytes], later: Iterable[bytes]) -> list[Chunk]:
    splicer = MessageSplicer()
    for raw in sent:
        splicer.note(read_message_event(raw))
    splicer.begin(Sent(b"", ""))
    passed = []
    for raw in later:
        unsent = splicer.splice(read_message_event(raw))
        if unsent is not None:
            splicer.note(unsent)
            passed.append(unsent)
    return passed


def normalized(events: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the events as a client sees them: pieces of one text together, ids without their stream's letter."""
    seen: list[dict[str, Any]] = []
    for raw in events:
        text = raw.decode().replace("-b", "-a")
        data = json.loads(text.partition("data:")[2])
        if seen and seen[-1].get("delta", {}).get("type") == data.get("delta", {}).get(
            "type", ""
        ):
            for name, value in data["delta"].items():
                if name != "type":
                    seen[-1]["delta"][name] += value
        else:
            seen.append(data)
    return seen


@pytest.mark.parametrize("known", range(1, len(stream("a"))))
@pytest.mark.parametrize("ahead", [0, 1])
def test_each_event_comes_once(known: int, ahead: int) -> None:
    """Wherever it breaks, and also if the engine had computed more than the caller was sent."""
    sent = stream("a")[:known]
    passed = spliced(sent, resumed(known + ahead))
    events = [*sent, *(chunk.raw for chunk in passed)]
    assert normalized(events) == normalized(stream("a"))
    assert passed[-1].last
    assert b"msg-b" not in b"".join(events)


def test_a_piece_that_is_cut_is_an_event_of_its_kind() -> None:
    passed = spliced([*stream("a")[:11], arguments('{"ci')], resumed(12))
    first = passed[0]
    assert first.raw.startswith(b"event: content_block_delta\ndata: ")
    assert json.loads(first.raw.partition(b"data:")[2])["delta"] == {
        "type": "input_json_delta",
        "partial_json": 'ty"',
    }
    assert first.other


@pytest.mark.parametrize(
    ("sent", "later"),
    [
        ([begin(0, "text", text="")], [begin(0, "thinking", thinking="")]),
        (
            [begin(0, "tool_use", id="x", name="find", input={})],
            [begin(0, "tool_use", id="y", name="search", input={})],
        ),
        (
            [begin(0, "text"), delta(0, "text_delta", text="Paris")],
            [begin(0, "text"), delta(0, "text_delta", text="Rome")],
        ),
        (
            [begin(0, "text"), delta(0, "text_delta", text="Paris")],
            [begin(0, "text"), delta(0, "text_delta", text="Par"), stop(0)],
        ),
        (
            [begin(0, "text"), delta(0, "text_delta", text="Paris"), stop(0)],
            [begin(0, "text"), delta(0, "text_delta", text="Paris is")],
        ),
        (
            [begin(0, "tool_use", id="x", name="find", input={})],
            [stream("b")[-2], stream("b")[-1]],
        ),
    ],
    ids=[
        "another kind",
        "another tool",
        "another text",
        "a shorter text",
        "a text that was closed",
        "no block",
    ],
)
def test_what_differs_ends_with_an_error(sent: list[bytes], later: list[bytes]) -> None:
    with pytest.raises(SeamError):
        spliced([start("a"), *sent], [start("b"), *later])


def test_comments_and_pings_are_passed_on() -> None:
    splicer = MessageSplicer()
    splicer.begin(Sent(b"", ""))
    ping = read_message_event(event("ping"))
    for chunk in (Chunk(b": waiting"), Chunk(token_ids=(1,)), ping):
        assert splicer.splice(chunk) is chunk


def test_events_of_a_block_that_was_never_begun_are_not_resumed() -> None:
    splicer = MessageSplicer()
    splicer.note(read_message_event(words("I look")))
    assert not splicer.can_resume
