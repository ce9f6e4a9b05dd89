"""A stream of OpenAI's API: the engine's events as they are, but for what only the router had asked for.

The final chunk with token counts is left out where the caller did not ask for it; then the engine's fingerprint is put on
the last chunk of each choice, where vLLM would have put it. Token ids, which failover needs, are taken out.
"""

from __future__ import annotations

from collections.abc import Sequence
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

# Quotes in a JSON string are escaped, so these stand only where a member of that name does.
_FINGERPRINT = b'"system_fingerprint"'


class RelayedEvents:
    """Writes an answer as the engine does, then the report that was asked for, and ``[DONE]``.

    What other engines go on with looks as if the first one had sent it.
    """

    __slots__ = ("_answer", "_chat", "_opened", "_out", "_report", "_takes_ids_out", "_usage_sent", "_wants_usage")

    def __init__(self, call: Call, active: ActiveRequest, out: Receiver) -> None:
        assert isinstance(active.answer, EngineStream)
        self._answer, self._report, self._out = active.answer, report_on(call, active), out
        self._chat, self._wants_usage = call.asked.path == CHAT, call.asked.wants_usage
        self._takes_ids_out = call.asked.asks_token_ids
        self._opened = b""  # the first engine's first event
        self._usage_sent = False

    def feed(self, chunks: Sequence[Chunk]) -> bool:
        """Send what came together, but for events that the caller would not have got from the engine."""
        return self._out.feed([written(event) for chunk in chunks if (event := self._event(chunk)) is not None])

    def end(self) -> list[bytes]:
        """Return the end; of an answer that was continued, with a comment that says so, which clients skip."""
        events = []
        continued = [part.tier for part in self._answer.parts]
        if continued:
            events.append(b": continued on " + " ".join(continued).encode())
        if self._answer.failed_over and self._wants_usage and not self._usage_sent and self._answer.usage:
            events.append(b"data: " + to_json({**self._template(), "choices": [], "usage": self._answer.usage}))
        if self._report is not None:
            kind = "chat.completion.chunk" if self._chat else "text_completion"
            report = {
                **self._report,
                **({"continued_on": [part.tier for part in self._answer.parts]} if self._answer.parts else {}),
            }
            empty = {"id": "", "object": kind, "created": 0, "model": "", "choices": []}
            events.append(b"data: " + to_json({**empty, "qarr": report}))
        return [written(event) for event in [*events, DONE]]

    def failure(self, error: Exception) -> list[bytes]:
        return [describe(error).event(ErrorForm.OPENAI, {}) + SEPARATOR]

    def _event(self, chunk: Chunk) -> bytes | None:
        raw = chunk.raw
        if not raw:
            return self._made(chunk)
        if chunk.usage and not chunk.choice:
            self._usage_sent = self._wants_usage
            if not self._wants_usage:
                return None
        if self._takes_ids_out:
            if not self._opened and raw.startswith(b"data:"):
                self._opened = raw
            if chunk.token_ids or chunk.prompt_ids:
                # Only with ids does an engine tell of a token that is not to be seen yet.
                if chunk.blank and chunk.token_ids and not chunk.finish_reason:
                    return None
                raw = _without(raw, b'"token_ids"', b'"prompt_token_ids"' if chunk.prompt_ids else b"")
        if chunk.finish_reason is not None and not self._wants_usage and _FINGERPRINT not in raw and raw.endswith(b"}"):
            fingerprint = self._answer.fingerprint
            if fingerprint:
                raw = raw[:-1] + b',"system_fingerprint":' + to_json(fingerprint) + b"}"
        return raw

    def _template(self) -> dict[str, Any]:
        opened = read_json(self._opened[5:] or b"{}")
        return {name: opened.get(name) for name in ("id", "object", "created", "model")}

    def _made(self, chunk: Chunk) -> bytes:
        """Return what another engine computed, as the first engine would have sent it."""
        choice: dict[str, Any] = {"index": 0}
        if self._chat:
            choice["delta"] = {"content": chunk.text}
        else:
            choice["text"] = chunk.text
        choice |= {"logprobs": None, "finish_reason": chunk.finish_reason}
        if chunk.finish_reason is not None:
            choice["stop_reason"] = chunk.stop_reason
        return b"data: " + to_json({**self._template(), "choices": [{**choice, "token_ids": None}]})


def _without(event: bytes, *names: bytes) -> bytes:
    """Write null for lists of ids, by the names of their members; vLLM writes no space after a colon, others do."""
    for name in filter(None, names):
        head, member, rest = event.partition(name + b":[")
        if not member:
            head, member, rest = event.partition(name + b": [")
        if member:
            event = head + member[:-1] + b"null" + rest.partition(b"]")[2]
    return event
