"""Joins resumed streams of OpenAI's Responses API to what their callers have.

An answer is a row of items, numbered in every stream of it, of which most have parts. Each stream gives its items other ids
and numbers its events from 0: what is passed on of a resumed stream gets the ids and the numbers of the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from router.upstream.named_events import (
    RESPONSE_OVER,
    ResponseEvent,
    ResponseItem,
    read_response_event,
)
from router.upstream.splicing import Sent, SentText, data_of, differs
from router.upstream.sse import Chunk

_ITEM_ADDED = "response.output_item.added"
_ITEM_DONE = "response.output_item.done"
_DELTA = ".delta"
_DONE = ".done"
_RESPONSE_BEGUN = ("response.created", "response.in_progress")
# Members of an event that ends a text, of which one has all of it.
_WHOLE_TEXTS = ("text", "arguments", "input")


class _Place(NamedTuple):
    """What an event is about: it comes once in a stream, or is a piece of one text."""

    kind: str
    output_index: int | None
    content_index: int | None
    summary_index: int | None


class ResponseSplicer:
    """Joins resumed streams to a response's stream."""

    def __init__(self) -> None:
        self.can_resume = True
        self._response_id: str | None = None
        self._created_at: Any = None
        self._following_number = 0
        self._sent_events = set[_Place]()  # those that are no deltas
        self._texts: dict[_Place, SentText] = {}
        self._items: dict[int | None, ResponseItem] = {}
        # The known items that the resumed stream has not repeated yet.
        self._awaited_items = set[int | None]()
        # ids of the resumed stream, and what they are in the first one
        self._first_ids: dict[str, str] = {}

    def note(self, chunk: Chunk) -> None:
        event: ResponseEvent | None = chunk.detail
        if event is None:
            return
        if event.sequence_number is not None:
            self._following_number = event.sequence_number + 1
        place = _place_of(event)
        if event.type.endswith(_DELTA):
            self._note_delta(place, event.delta)
            return
        self._sent_events.add(place)
        if event.response is not None and event.type in _RESPONSE_BEGUN:
            self._response_id = event.response.id
            self._created_at = event.response.created_at
        if event.item is not None and event.type == _ITEM_ADDED:
            self._items[event.output_index] = event.item

    def _note_delta(self, place: _Place, delta: Any) -> None:
        if not isinstance(delta, str):
            self.can_resume = False
            return
        text = self._texts.get(place)
        if text is None:
            text = SentText()
            self._texts[place] = text
        text.append(delta)

    def begin(self, sent: Sent) -> None:
        del sent  # the events that were sent have told all of it
        for sent_text in self._texts.values():
            sent_text.begin()
        self._awaited_items = set(self._items)
        self._first_ids = {}

    def splice(self, chunk: Chunk) -> Chunk | None:
        event: ResponseEvent | None = chunk.detail
        if event is None:
            return chunk
        if event.type in RESPONSE_OVER:
            self._check_all_is_repeated()
        self._learn_ids(event)
        place = _place_of(event)
        if event.type.endswith(_DELTA):
            return self._splice_delta(chunk, event, place)
        if event.type.endswith(_DONE):
            self._check_whole_text(chunk, place)
        if place in self._sent_events:
            return None
        return self._as_of_first_stream(chunk, {})

    def _learn_ids(self, event: ResponseEvent) -> None:
        """Learn which id of the first stream an id of the resumed one stands for; ``SeamError``: an item is another."""
        response = event.response
        if response is not None and response.id and self._response_id:
            self._first_ids[response.id] = self._response_id
        item = event.item
        first_item = self._items.get(event.output_index)
        if item is None or first_item is None or event.type != _ITEM_ADDED:
            return
        if event.output_index not in self._awaited_items:
            differs()
        if (item.type, item.name) != (first_item.type, first_item.name):
            differs()
        self._awaited_items.discard(event.output_index)
        for resumed_id, first_id in (
            (item.id, first_item.id),
            (item.call_id, first_item.call_id),
        ):
            if resumed_id and first_id:
                self._first_ids[resumed_id] = first_id

    def _splice_delta(
        self, chunk: Chunk, event: ResponseEvent, place: _Place
    ) -> Chunk | None:
        """Return what the caller lacks of a piece of text."""
        text = self._texts.get(place)
        if text is None or not isinstance(event.delta, str):
            return self._as_of_first_stream(chunk, {})
        rest = text.rest_of(event.delta)
        if not rest:
            return None
        if place._replace(kind=_done_kind(place.kind)) in self._sent_events:
            differs()
        return self._as_of_first_stream(chunk, {"delta": rest})

    def _check_whole_text(self, chunk: Chunk, place: _Place) -> None:
        """Raise ``SeamError`` if an event ends a text of which the caller has something else."""
        text = self._texts.get(
            place._replace(kind=place.kind.removesuffix(_DONE) + _DELTA)
        )
        if text is None:
            return
        event = data_of(chunk.raw)
        whole_text = next(
            (event[member] for member in _WHOLE_TEXTS if member in event), None
        )
        if whole_text is not None and whole_text != str(text):
            differs()

    def _check_all_is_repeated(self) -> None:
        """Raise ``SeamError`` if a resumed answer ends before all that was sent, or leaves an item open."""
        if self._awaited_items:
            differs()
        if not all(text.is_repeated for text in self._texts.values()):
            differs()
        for output_index in self._items:
            if _Place(_ITEM_DONE, output_index, None, None) not in self._sent_events:
                differs()

    def _as_of_first_stream(self, chunk: Chunk, changes: Mapping[str, Any]) -> Chunk:
        """Return an event with ids and number as if the first stream went on, and with further changes."""
        event = data_of(chunk.raw)
        event.update(changes)
        if "sequence_number" in event:
            event["sequence_number"] = self._following_number
        self._rename(event, "item_id")
        if isinstance(event.get("item"), dict):
            self._rename_item(event["item"])
        if isinstance(event.get("response"), dict):
            self._rename_response(event["response"])
        head = chunk.raw.partition(b"data:")[0]
        return read_response_event(head + b"data: " + msgspec.json.encode(event))

    def _rename_response(self, response: dict[str, Any]) -> None:
        self._rename(response, "id")
        if self._created_at is not None and "created_at" in response:
            response["created_at"] = self._created_at
        for item in response.get("output") or ():
            if isinstance(item, dict):
                self._rename_item(item)

    def _rename_item(self, item: dict[str, Any]) -> None:
        self._rename(item, "id")
        self._rename(item, "call_id")

    def _rename(self, members: dict[str, Any], name: str) -> None:
        value = members.get(name)
        if isinstance(value, str):
            members[name] = self._first_ids.get(value, value)


def _place_of(event: ResponseEvent) -> _Place:
    return _Place(
        event.type, event.output_index, event.content_index, event.summary_index
    )


def _done_kind(delta_kind: str) -> str:
    """Return the type of the event that ends a text, by the type of the events with its pieces."""
    return delta_kind.removesuffix(_DELTA) + _DONE
