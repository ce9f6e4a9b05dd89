"""The judge of the matrix sees what a client would suffer from: a judge that sees nothing would pass everything."""

from __future__ import annotations

import pytest

from tests.unit.continuation.answers import read_answer
from tests.unit.continuation.recording import AS_ASKED, load
from tests.unit.continuation.requests import (
    AGENT,
    CHAT,
    MESSAGES,
    PLAIN,
    RESPONSES,
    TOOL_CHOSEN,
)


def _events(endpoint: str, kind: str) -> list[str]:
    """Return the events of a recorded stream."""
    stream = load().answers[f"{endpoint} {kind}"].streams[AS_ASKED][0]
    events = [event for event in stream.split("\n\n") if event]
    return [event for event in events if not event.startswith(":")]


def _faults(endpoint: str, events: list[str]) -> list[str]:
    return read_answer(endpoint, "".join(f"{event}\n\n" for event in events)).faults


def _number(events: list[str], text: str) -> int:
    """Return the number of the first event that holds a text."""
    return next(number for number, event in enumerate(events) if text in event)


@pytest.mark.parametrize("kind", [PLAIN, TOOL_CHOSEN, AGENT])
@pytest.mark.parametrize("endpoint", [CHAT, MESSAGES, RESPONSES])
def test_a_sound_stream_has_no_fault(endpoint: str, kind: str) -> None:
    """What real engines send is what the judge takes for sound."""
    assert _faults(endpoint, _events(endpoint, kind)) == []


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        (CHAT, '"role"'),
        (CHAT, '"id":"chatcmpl-tool'),
        (CHAT, '"usage"'),
        (MESSAGES, "message_start"),
        (MESSAGES, "content_block_start"),
        (MESSAGES, "content_block_stop"),
        (MESSAGES, "signature_delta"),
        (MESSAGES, "message_delta"),
        (RESPONSES, "response.created"),
        (RESPONSES, "output_item.added"),
        (RESPONSES, "output_text.delta"),
        (RESPONSES, "function_call_arguments.done"),
    ],
)
def test_an_event_that_comes_twice_is_seen(endpoint: str, text: str) -> None:
    """A start, an end or a count that is repeated breaks the API's rules; so does one that is missing."""
    events = _events(endpoint, AGENT)
    number = _number(events, text)
    twice = [*events[: number + 1], *events[number:]]
    without = events[:number] + events[number + 1 :]
    assert _faults(endpoint, twice)
    assert _faults(endpoint, without)


def test_half_a_call_is_seen() -> None:
    """Arguments that lack their end are no JSON."""
    events = _events(CHAT, TOOL_CHOSEN)
    number = max(
        number
        for number, event in enumerate(events)
        if '"index":0,"function":{"arguments"' in event
    )
    del events[number]
    assert any("no JSON" in fault for fault in _faults(CHAT, events))


@pytest.mark.parametrize("endpoint", [CHAT, MESSAGES, RESPONSES])
def test_an_end_that_is_missing_is_seen(endpoint: str) -> None:
    """A stream that ends without its last event was cut."""
    answer = read_answer(
        endpoint, "".join(f"{event}\n\n" for event in _events(endpoint, PLAIN)[:-1])
    )
    assert not answer.is_ended
