"""A stream of OpenAI's API: the engine's events as they are, but for what only the router has asked the engine for.

The final chunk with token counts is left out where the caller did not ask for it; then the engine's fingerprint is put on
the last chunk of each choice, where vLLM would have put it. Token ids, which failover needs, are taken out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from router.api.endpoint import Receiver, report_on
from router.api.paths import CHAT, ErrorForm
from router.api.problems import describe
from router.pipeline.registry import ActiveRequest
from router.pipeline.request import Call
from router.upstream.engine_stream import EngineStream
from router.upstream.json_object import read_json
from router.upstream.sse import DONE, SEPARATOR, Chunk, written

# Within a longer JSON string the quotes would be escaped, so these bytes are the name of a member, or a whole string of
# just this text.
_FINGERPRINT = b'"system_fingerprint"'
# vLLM writes no space after a colon, others do.
_write_null_for_token_ids = re.compile(rb'"token_ids": ?\[[^]]*\]').sub
_write_null_for_prompt_ids = re.compile(rb'"prompt_token_ids": ?\[[^]]*\]').sub
_NO_TOKEN_IDS = b'"token_ids":null'
_NO_PROMPT_IDS = b'"prompt_token_ids":null'


class RelayedEvents:
    """Writes an answer as the engine does, then the report if its caller has asked for one, and ``[DONE]``.

    What other engines add to an answer looks as if the first engine had sent it.
    """

    __slots__ = (
        "_answer",
        "_first_event",
        "_has_sent_usage",
        "_hides_token_ids",
        "_is_chat",
        "_out",
        "_report",
        "_wants_usage",
    )

    def __init__(self, call: Call, active: ActiveRequest, out: Receiver) -> None:
        assert isinstance(active.answer, EngineStream)
        self._answer = active.answer
        self._report = report_on(call, active)
        self._out = out
        self._is_chat = call.engine_request.path == CHAT
        self._wants_usage = call.engine_request.wants_usage
        self._hides_token_ids = call.engine_request.asks_token_ids
        # What other engines add is made to look like this; it is empty, too, while token ids are not hidden.
        self._first_event = b""
        self._has_sent_usage = False

    def encode(self, chunks: Sequence[Chunk]) -> bool:
        """Send what came together, but for events that the caller would not have got from the engine.

        A token of plain text comes from the parser as it is to be sent. ``_event`` makes all other events. It also makes the
        first event of the stream, because it keeps that one as the template for what other engines add.
        """
        events = []
        for chunk in chunks:
            if chunk.without_ids and self._first_event:
                events.append(chunk.without_ids)
                continue
            unusual_event = self._event(chunk)
            if unusual_event is not None:
                events.append(written(unusual_event))
        return self._out.write(events)

    def end(self) -> list[bytes]:
        """Return the events that end an answer.

        A comment, which clients skip, says which tiers have continued it.
        """
        events = []
        answer = self._answer
        if answer.parts:
            events.append(
                b": continued on "
                + " ".join(part.tier for part in answer.parts).encode()
            )
        if (
            answer.failed_over
            and self._wants_usage
            and not self._has_sent_usage
            and answer.usage
        ):
            events.append(
                b"data: "
                + to_json({**self._template(), "choices": [], "usage": answer.usage})
            )
        if self._report is not None:
            events.append(self._report_event(self._report))
        events.append(DONE)
        return [written(event) for event in events]

    def failure(self, error: Exception) -> list[bytes]:
        return [describe(error).event(ErrorForm.OPENAI, {}) + SEPARATOR]

    def _event(self, chunk: Chunk) -> bytes | None:
        """Return the event for a chunk as its caller is to see it; None if the caller is not to see it."""
        event: bytes | None = chunk.raw
        if not event:
            if not chunk.text and chunk.finish_reason is None:
                # it holds only ids of tokens
                return None
            return self._continued_event(chunk)
        if chunk.usage and not chunk.choice:
            self._has_sent_usage = self._wants_usage
            if not self._wants_usage:
                return None
        if self._hides_token_ids:
            event = self._without_token_ids(chunk)
        if (
            event is not None
            and chunk.finish_reason is not None
            and not self._wants_usage
        ):
            return self._with_fingerprint(event)
        return event

    def _without_token_ids(self, chunk: Chunk) -> bytes | None:
        """Return an engine's event without the token ids that only the router wanted; None if nothing else is in it."""
        event = chunk.raw
        if not self._first_event and event.startswith(b"data:"):
            self._first_event = event
        if not chunk.token_ids and not chunk.prompt_ids:
            return event
        if chunk.blank and chunk.token_ids and not chunk.finish_reason:
            # only engines that are asked for token ids send a token whose text comes later
            return None
        event = _write_null_for_token_ids(_NO_TOKEN_IDS, event, 1)
        if chunk.prompt_ids:
            event = _write_null_for_prompt_ids(_NO_PROMPT_IDS, event, 1)
        return event

    def _with_fingerprint(self, event: bytes) -> bytes:
        """Return the last event of a choice with the engine's fingerprint, unless it has one or none is known."""
        fingerprint = self._answer.fingerprint
        if not fingerprint or _FINGERPRINT in event or not event.endswith(b"}"):
            return event
        return event[:-1] + b',"system_fingerprint":' + to_json(fingerprint) + b"}"

    def _report_event(self, report: Mapping[str, Any]) -> bytes:
        """Return the event with the report: a chunk without choices, as clients expect one."""
        if self._answer.parts:
            report = {
                **report,
                "continued_on": [part.tier for part in self._answer.parts],
            }
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        empty_chunk = {
            "id": "",
            "object": kind,
            "created": 0,
            "model": "",
            "choices": [],
        }
        return b"data: " + to_json({**empty_chunk, "qarr": report})

    def _template(self) -> dict[str, Any]:
        """Return the members that all chunks of the first engine share."""
        first_chunk = read_json(self._first_event[5:] or b"{}")
        return {
            name: first_chunk.get(name) for name in ("id", "object", "created", "model")
        }

    def _continued_event(self, chunk: Chunk) -> bytes:
        """Return what another engine computed, as the first engine would have sent it."""
        choice: dict[str, Any] = {"index": 0}
        if self._is_chat:
            choice["delta"] = {"content": chunk.text}
        else:
            choice["text"] = chunk.text
        choice["logprobs"] = None
        choice["finish_reason"] = chunk.finish_reason
        if chunk.finish_reason is not None:
            choice["stop_reason"] = chunk.stop_reason
        choice["token_ids"] = None
        return b"data: " + to_json({**self._template(), "choices": [choice]})
