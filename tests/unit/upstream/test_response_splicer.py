"""A resumed response is joined to what its caller has, under the ids and with the numbers of the first stream."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from router.upstream.errors import SeamError
from router.upstream.named_events import read_response_event
from router.upstream.response_splicer import ResponseSplicer
from router.upstream.splicing import Sent
from router.upstream.sse import Chunk

THOUGHT = ("Let me", " see.")
TEXT = ("I look", " it up.")
ARGUMENTS = ('{"city"', ': "Paris"}')


def stream(
    letter: str,
    thought: Iterable[str] = THOUGHT,
    text: Iterable[str] = TEXT,
    arguments: Iterable[str] = ARGUMENTS,
    tool: str = "find",
) -> list[bytes]:
    """Return a stream as vLLM writes it, with a letter in all of its ids."""
    events: list[bytes] = []

    def add(kind: str, **members: Any) -> None:
        data = {"type": f"response.{kind}", "sequence_number": len(events), **members}
        name = data["type"]
        events.append(f"event: {name}\ndata: {json.dumps(data)}".encode())

    created_at = ord(letter)
    response = {"id": f"resp_{letter}", "created_at": created_at, "output": []}
    add("created", response={**response, "status": "in_progress"})
    add("in_progress", response={**response, "status": "in_progress"})

    whole_thought = "".join(thought)
    item: dict[str, Any] = {"id": f"rs_{letter}", "type": "reasoning", "summary": []}
    part = {"output_index": 0, "item_id": item["id"], "content_index": 0}
    add("output_item.added", output_index=0, item=item)
    for piece in thought:
        add("reasoning_text.delta", **part, delta=piece)
    add("reasoning_text.done", **part, text=whole_thought)
    item = {**item, "content": [{"type": "reasoning_text", "text": whole_thought}]}
    add("output_item.done", output_index=0, item=item)
    output = [item]

    whole_text = "".join(text)
    item = {"id": f"msg_{letter}", "type": "message", "role": "assistant"}
    part = {"output_index": 1, "item_id": item["id"], "content_index": 0}
    add("output_item.added", output_index=1, item={**item, "content": []})
    add("content_part.added", **part, part={"type": "output_text", "text": ""})
    for piece in text:
        add("output_text.delta", **part, delta=piece, logprobs=[])
    add("output_text.done", **part, text=whole_text, logprobs=[])
    content = {"type": "output_text", "text": whole_text}
    add("content_part.done", **part, part=content)
    item = {**item, "content": [content]}
    add("output_item.done", output_index=1, item=item)
    output.append(item)

    whole_arguments = "".join(arguments)
    item = {
        "id": f"fc_{letter}",
        "call_id": f"call_{letter}",
        "type": "function_call",
        "name": tool,
        "arguments": "",
    }
    part = {"output_index": 2, "item_id": item["id"]}
    add("output_item.added", output_index=2, item=item)
    for piece in arguments:
        add("function_call_arguments.delta", **part, delta=piece)
    add("function_call_arguments.done", **part, arguments=whole_arguments, name=tool)
    item = {**item, "arguments": whole_arguments}
    add("output_item.done", output_index=2, item=item)
    output.append(item)

    usage = {"input_tokens": 3, "output_tokens": 9}
    ended = {**response, "status": "completed", "output": output, "usage": usage}
    add("completed", response=ended)
    return events


def spliced(sent: Iterable[bytes], later: Iterable[bytes]) -> list[Chunk]:
    splicer = ResponseSplicer()
    for raw in sent:
        splicer.note(read_response_event(raw))
    splicer.begin(Sent(b"", ""))
    passed = []
    for raw in later:
        unsent = splicer.splice(read_response_event(raw))
        if unsent is not None:
            splicer.note(unsent)
            passed.append(unsent)
    return passed


def normalized(events: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the events as a client sees them: pieces of one text together, no numbers, ids without their stream's letter."""
    seen: list[dict[str, Any]] = []
    for raw in events:
        text = raw.replace(b'_b"', b'_a"').replace(b": 98,", b": 97,")
        data = json.loads(text.partition(b"data:")[2])
        del data["sequence_number"]
        if seen and "delta" in data and seen[-1]["type"] == data["type"]:
            seen[-1]["delta"] += data["delta"]
        else:
            seen.append(data)
    return seen


@pytest.mark.parametrize("known", range(2, len(stream("a"))))
def test_each_event_comes_once(known: int) -> None:
    """Wherever it breaks; the engine tells what it knows in one piece, which ends in the middle of a text."""
    sent = stream("a")[:known]
    for pieces in (THOUGHT, ("Let me see.",), ("L", "et me se", "e.")):
        later = stream("b", thought=pieces, text=("I l", "ook it up."))
        events = [*sent, *(chunk.raw for chunk in spliced(sent, later))]
        assert normalized(events) == normalized(stream("a"))
        numbers = [
            json.loads(raw.partition(b"data:")[2])["sequence_number"] for raw in events
        ]
        assert numbers == list(range(len(events)))


def test_ids_are_those_of_the_first_stream_where_it_has_told_them() -> None:
    """An item that only the second engine has begun keeps its own ids, also in the whole response."""
    sent = stream("a")[:10]  # in the text
    *_, completed = spliced(sent, stream("b"))
    response = json.loads(completed.raw.partition(b"data:")[2])["response"]
    assert completed.last
    assert completed.finish_reason == "tool_calls"
    assert response["id"] == "resp_a"
    assert response["created_at"] == ord("a")
    assert [item["id"] for item in response["output"]] == ["rs_a", "msg_a", "fc_b"]
    assert response["output"][2]["call_id"] == "call_b"
    assert completed.raw.startswith(b"event: response.completed\ndata: ")


ALL = stream("a")


@pytest.mark.parametrize(
    ("known", "later"),
    [
        (5, stream("b", thought=["Let us"])),
        (5, stream("b", thought=["Le"])),
        (10, stream("b", text=["I know."])),
        (10, stream("b", thought=["Let me see. And so on."])),
        (16, stream("b", tool="search")),
        (16, stream("b", arguments=['{"town"'])),
        (16, [*stream("b")[:14], stream("b")[-1]]),
    ],
    ids=[
        "another thought",
        "a shorter thought",
        "another text",
        "more of a text that is done",
        "another tool",
        "other arguments",
        "no call",
    ],
)
def test_what_differs_ends_with_an_error(known: int, later: list[bytes]) -> None:
    with pytest.raises(SeamError):
        spliced(ALL[:known], later)


def test_comments_and_ids_are_passed_on() -> None:
    splicer = ResponseSplicer()
    splicer.begin(Sent(b"", ""))
    for chunk in (Chunk(b": waiting"), Chunk(token_ids=(1,))):
        assert splicer.splice(chunk) is chunk
