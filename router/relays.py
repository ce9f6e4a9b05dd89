"""Answers as bytes: what OpenAI's endpoints pass to an engine, and how its answer is relayed as it is.

Two things are changed in a stream, because the router asks every engine for its token counts: the final chunk that holds
only them is left out where the caller did not ask for it, and then the engine's fingerprint, which vLLM would have put on
the last chunk of each choice, is put back there.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import httpx
from pydantic_core import from_json, to_json

from router.answers import CERTAINTY
from router.jsontext import JsonObject, NotJson
from router.upstream import Attempt, EngineBroke, EngineFailed, Exchange, body_of
from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from tiers.fleet import Replica

SEPARATOR = b"\n\n"
DONE = b"data: [DONE]"
# Quotes in a JSON string are escaped, so these stand only where a member of that name does.
_USAGE, _ERROR = b'"usage":{', b'"error":'
_LOGPROBS = b'"logprobs":{'
_FINISHED, _FINGERPRINT = b'"finish_reason":"', b'"system_fingerprint"'


@dataclass(frozen=True, slots=True)
class RelayRequest:
    """A request for one of OpenAI's endpoints, passed on with as little change as routing needs.

    Attributes:
        document: The caller's body.
        priority: For vLLM's scheduler, lower first; None leaves the caller's own field.
        report_usage: The caller asked for the final chunk with token counts.
        judged: Ask the cheaper tiers how sure they are; the caller did not ask for log-probabilities and gets none.
    """

    document: JsonObject
    path: str
    operation: str
    request_id: str
    streamed: bool
    priority: int | None
    report_usage: bool
    judged: bool = False

    @property
    def chat(self) -> Sequence[Any] | None:
        """Return its messages; None for what is no chat, or one with tools, whose answers are judged by other things."""
        messages = self.document.get("messages")
        return messages if isinstance(messages, list) and self.document.get("tools") is None else None

    @property
    def parameters(self) -> Mapping[str, float]:
        """Return what is told of the request in traces: numbers only, never text."""
        fields = ("max_tokens", "temperature", "top_p", "n", "seed", "frequency_penalty", "presence_penalty")
        names = {"n": "gen_ai.request.choice.count", **{f: f"gen_ai.request.{f}" for f in fields if f != "n"}}
        values = ((names[field], self.document.get(field)) for field in fields)
        return {name: value for name, value in values if isinstance(value, int | float) and abs(value) < 1 << 63}

    def body(self, replica: Replica) -> bytes:
        """Return the caller's body with the replica's name for the model; all other values are the caller's bytes."""
        changes: dict[str, Any] = {"model": replica.model, "qarr": None}
        if not replica.takes_priority:
            changes["priority"] = None
        elif self.priority is not None:
            changes["priority"] = self.priority
        if self.streamed and (options := self._stream_options()) is not None:
            changes["stream_options"] = options
        if self.judged and replica.spec.name is not TierName.PRECISE:
            changes |= CERTAINTY
        return self.document.edited(changes)

    def _stream_options(self) -> bytes | None:
        """Return the caller's options, asking for token counts; None leaves options that are no object to the engine."""
        text = self.document.text_of("stream_options")
        if text in {"", "null"}:
            return b'{"include_usage":true}'
        try:
            given = JsonObject.parse(text.encode())
        except NotJson:
            return None
        # Without the final counts vLLM gives none with each chunk either.
        more = (
            {}
            if self.report_usage or "continuous_usage_stats" not in given.values
            else {"continuous_usage_stats": False}
        )
        return given.edited({"include_usage": True, **more})


class WholeRelay(Exchange):
    """An answer that is not streamed, read as a whole before any of it is passed on."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        self.content = b""
        self.media_type = attempt.response.headers.get("content-type", "application/json")

    async def begin(self) -> None:
        """Read the whole answer."""
        try:
            self.content = await body_of(self._attempt.response)
            answer = from_json(self.content)
            choices = answer["choices"]
            self.finish_reason = choices[0]["finish_reason"] if choices else None
            self._note_usage(answer.get("usage") or {})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineFailed("the engine's answer is not a completion") from error
        except httpx.HTTPError as error:
            raise EngineBroke(f"the engine's answer broke off ({type(error).__name__})") from error
        self._complete = True


class EventRelay(Exchange):
    """A stream that has begun: its events up to the first token are here, the rest can be read."""

    def __init__(self, attempt: Attempt, *, report_usage: bool, judged: bool = False) -> None:
        super().__init__(attempt)
        self._judged = judged and attempt.tier is not TierName.PRECISE
        self.media_type = attempt.response.headers.get("content-type", "text/event-stream; charset=utf-8")
        self._report_usage = report_usage
        self._batches = self._read(attempt.response)
        self._held: list[bytes] = []
        self._ended = False

    async def begin(self) -> None:
        """Read up to the first event that has a token or ends the answer."""
        while not any(map(_has_token, self._held)):
            batch = await anext(self._batches, None)
            if batch is None:
                raise EngineBroke("the engine's answer was empty")
            self._held += batch
            _check(batch)
        self._began()

    async def look_ahead(self, tokens: int, deadline: float) -> float | None:
        """Read ahead; what is read comes first in ``chunks``."""
        if not self._judged:
            return None
        found = _certainties(self._held)
        with contextlib.suppress(TimeoutError):
            while len(found) < tokens and DONE not in self._held:
                batch = await self._ahead(self._batches, deadline)
                if batch is None:
                    break
                self._held += batch
                _check(batch)
                found += _certainties(batch)
        self.let_go()
        return fmean(found[:tokens]) if found else None

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the engine's events, whole ones, as they come; the last one is ``[DONE]``.

        Raises:
            EngineBroke: The engine failed, or no token came in time. What was yielded holds no end.
        """
        batch: list[bytes] | None = self._held
        while batch is not None:
            _check(batch)
            kept = [event for event in map(self._relayed, batch) if event is not None]
            if kept:
                yield SEPARATOR.join([*kept, b""])
            if self._ended:
                break
            batch = await self._next(self._batches)
        self._complete = True

    def _relayed(self, event: bytes) -> bytes | None:
        """Note what an event says, and return it as it is relayed; None: left out."""
        if event == DONE:
            self._ended = True
            return event
        if _USAGE in event:
            chunk = _parse(event)
            self._note_usage(chunk["usage"])
            if not chunk.get("choices") and not self._report_usage:
                return None
        self._produced()
        if self._judged and _LOGPROBS in event:
            event = _without_logprobs(event)
        if _FINISHED in event:
            self.finish_reason = event.split(_FINISHED, 1)[1].split(b'"', 1)[0].decode("ascii", "replace")
            fingerprint = self._attempt.lease.replica.fingerprint
            if fingerprint and not self._report_usage and _FINGERPRINT not in event and event.endswith(b"}"):
                return event[:-1] + b',"system_fingerprint":' + to_json(fingerprint) + b"}"
        return event

    async def _read(self, response: httpx.Response) -> AsyncIterator[list[bytes]]:
        """Yield whole events, those that came together in one list.

        Raises:
            EngineBroke: The stream ended before ``[DONE]``.
        """
        buffer = b""
        assert isinstance(response.stream, httpx.AsyncByteStream)
        try:
            async for chunk in response.stream:
                *events, buffer = (buffer + chunk).split(SEPARATOR)
                if events:
                    yield events
                    if events[-1] == DONE:
                        return
        except httpx.HTTPError as error:
            raise EngineBroke(f"the engine's stream broke off ({type(error).__name__})") from error
        raise EngineBroke("the engine's stream ended early")


def _certainties(events: list[bytes]) -> list[float]:
    """Return the log-probabilities of the engine's first choices in a stream's events."""
    found = []
    for event in events:
        if _LOGPROBS in event:
            for choice in _parse(event).get("choices") or ():
                places = (choice.get("logprobs") or {}).get("content") or ()
                found += [float(place["top_logprobs"][0]["logprob"]) for place in places if place.get("top_logprobs")]
    return found


def _without_logprobs(event: bytes) -> bytes:
    """Return an event as the engine would have sent it without log-probabilities."""
    chunk = _parse(event)
    for choice in chunk.get("choices") or ():
        choice["logprobs"] = None
    return b"data: " + to_json(chunk)


def _check(events: list[bytes]) -> None:
    """Raise for an error that the engine reports in its stream.

    Raises:
        EngineBroke: There is one.
    """
    for event in events:
        if _ERROR in event and "error" in _parse(event):
            raise EngineBroke("the engine reported an error in its stream")


def _has_token(event: bytes) -> bool:
    """Tell whether an event shows that the engine computes: text, a tool call, a finish reason, or the end."""
    if event == DONE:
        return True
    if not event.startswith(b"data:"):
        return False
    for choice in _parse(event).get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or choice.get("finish_reason") or any(v for k, v in delta.items() if k != "role"):
            return True
    return False


def _parse(event: bytes) -> dict[str, Any]:
    try:
        chunk = from_json(event.removeprefix(b"data:"))
    except ValueError as error:
        raise EngineBroke("the engine's stream holds something that is not a chunk") from error
    if not isinstance(chunk, dict):
        raise EngineBroke("the engine's stream holds something that is not a chunk")
    return chunk
