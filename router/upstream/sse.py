"""Server-sent events of an engine: split, decoded and checked once, as they come."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from router.upstream.errors import EngineBrokeError, without_trace

WholeAnswer = tuple[str | None, Mapping[str, Any]]  # finish reason and token counts, under OpenAI's names

SEPARATOR, DONE = b"\n\n", b"data: [DONE]"
COMMENT_END = b"\n"  # no empty line: some clients take one for the end of an event, even after a comment
MAX_EVENT_BYTES = 1 << 24  # of one event: enough for the token ids of a prompt of two million tokens
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")
NOT_A_CHUNK = "the engine's stream holds something that is not a chunk"

Count = Annotated[int, Meta(ge=0)]
_Ids = list[Annotated[int, Meta(ge=0, lt=1 << 32)]]


class _Usage(Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    total_tokens: Count | None = None
    prompt_tokens_details: Any = None


class _Choice(Struct):
    delta: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    token_ids: _Ids | None = None
    prompt_token_ids: _Ids | None = None


class _Event(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    prompt_token_ids: _Ids | None = None
    error: Any = None


class _WholeChoice(Struct):
    finish_reason: str | None = None
    message: dict[str, Any] | None = None
    text: str | None = None


class _WholeAnswer(Struct):
    choices: Annotated[list[_WholeChoice], Meta(min_length=1)]
    usage: _Usage


_INVALID = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_PLAIN = {"role", "content"}  # members of a delta with nothing but the answer's text
_TEXTS = {"content", "reasoning", "reasoning_content"}  # members of a delta that are texts
_EVENT, _WHOLE_ANSWER = msgspec.json.Decoder(_Event), msgspec.json.Decoder(_WholeAnswer)


def cached_tokens_of(usage: Mapping[str, Any]) -> int | None:
    """Return the prompt tokens found in the prefix cache; None: the engine does not tell (``prompt_tokens_details``)."""
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) and cached >= 0 else None


class Chunk(Struct, frozen=True):
    """One event of a stream, read once. A completion's and a chat's chunks look the same here."""

    raw: bytes = b""  # the event as it came, without the empty line after it; empty for a chunk that failover has made
    text: str = ""  # of the answer
    # of the tokens computed for it, where they were asked for; their text may come with a later chunk
    token_ids: Sequence[int] = ()
    prompt_ids: Sequence[int] = ()  # of the prompt, where the engine tells them with it
    finish_reason: str | None = None  # of the choice that has ended; None: none has
    stop_reason: Any = None  # what stopped it, as the engine says it: a string, a token id or None
    other: bool = False  # it holds something that is not the answer's text: reasoning, or a tool call
    usage: Mapping[str, Any] | None = None  # the token counts that it holds, under OpenAI's names; None: it holds none
    choice: bool = False  # it has a choice; the chunk with token counts has none
    blank: bool = False  # its choice says nothing at all
    last: bool = False  # it ends the stream, as ``[DONE]`` does where streams end with that


def parse_event(raw: bytes) -> Chunk:
    """Read one event of a stream; ``EngineBrokeError``: it is no chunk of an answer, or tells of an error."""
    if not raw.startswith(b"data:"):
        return Chunk(raw)  # comments keep connections alive
    try:
        if not raw.isascii():
            raw.decode()
        event = _EVENT.decode(raw[5:])
    except _INVALID:
        raise EngineBrokeError(NOT_A_CHUNK) from None  # its own words quote the engine's
    if event.error is not None:
        raise EngineBrokeError("the engine reported an error in its stream")
    choices, usage = event.choices, None if event.usage is None else msgspec.structs.asdict(event.usage)
    if choices is None:
        raise EngineBrokeError(NOT_A_CHUNK)
    if not choices:
        return Chunk(raw, usage=usage, prompt_ids=event.prompt_token_ids or ())
    choice, finish_reason = choices[0], choices[0].finish_reason or None
    if finish_reason is None and len(choices) > 1:
        finish_reason = next((each.finish_reason for each in choices if each.finish_reason), None)
    text, other, delta = choice.text, False, choice.delta
    if delta is not None:
        text = delta.get("content")
        if type(text) is not str or (len(delta) > 1 and not delta.keys() <= _PLAIN):
            text, other = _read_delta(delta)
    prompt_ids = event.prompt_token_ids or choice.prompt_token_ids or ()
    return Chunk(
        raw, text or "", choice.token_ids or (), prompt_ids, finish_reason, choice.stop_reason, other, usage,
        True, delta == {},
    )  # fmt: skip


def _read_delta(delta: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the text of the answer that a delta holds, and whether it holds more."""
    other = False
    for name, value in delta.items():
        if name in _TEXTS and not isinstance(value, str | None):
            raise EngineBrokeError(NOT_A_CHUNK)
        other = other or bool(value and name not in {"content", "role"})
    return delta.get("content") or "", other


def decoded(decoder: msgspec.json.Decoder[Any], text: bytes) -> Any:
    """Decode what an engine says; ``EngineBrokeError``: it is not what the decoder reads."""
    try:
        if not text.isascii():
            text.decode()  # strings that nobody reads are passed on as well
        return decoder.decode(text)
    except _INVALID:
        raise EngineBrokeError(NOT_A_CHUNK) from None


def read_completion(content: bytes) -> WholeAnswer | None:
    try:
        answer = decoded(_WHOLE_ANSWER, content)
    except EngineBrokeError:
        return None
    if any(choice.message is None and choice.text is None for choice in answer.choices):
        return None
    return answer.choices[0].finish_reason, msgspec.structs.asdict(answer.usage)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    read_event: Callable[[bytes], Chunk]  # reads one event of a stream, as ``parse_event``
    read_whole: Callable[[bytes], WholeAnswer | None]  # reads an answer that is not streamed, as ``read_completion``
    usual: Callable[[bytes], object]  # matches an event as vLLM writes it; others are written anew
    done: bytes = b""  # an event that ends a stream and is no chunk; empty: there is none


COMPLETION_FORMAT = AnswerFormat(parse_event, read_completion, re.compile(rb"data: \{[^\n]*+").fullmatch, DONE)


def written(event: bytes) -> bytes:
    """Return an event, or a comment, with what ends it on the wire."""
    return event + (COMMENT_END if event.startswith(b":") else SEPARATOR)


class EventParser:
    """Takes an engine's stream in parts, cut anywhere, and gives its events up to the last one."""

    __slots__ = ("_buffer", "_cut", "_done", "_fault", "_read", "_usual", "ended", "over")

    def __init__(self, answers: AnswerFormat = COMPLETION_FORMAT) -> None:
        self._usual, self._read, self._done = answers.usual, answers.read_event, answers.done
        self._buffer = bytearray()
        self._cut = False  # the last part ended between a carriage return and its line feed
        self.over = False  # whether the last event has come
        self.ended = False  # whether no further part is read: the last event has come, or a fault
        self._fault: EngineBrokeError | None = None

    def feed(self, data: bytes) -> list[Chunk]:
        """Return the events that have come to their end, in order; a fault after them is raised by ``check``."""
        found: list[Chunk] = []
        if self.ended:
            return found
        usual, read, done = self._usual, self._read, self._done
        try:
            if self._cut or b"\r" in data:
                data = self._line_feeds(data)
            if self._buffer or not data.endswith(SEPARATOR):
                data = self._whole_events(data)
            for given in data.split(SEPARATOR):
                if not given:
                    continue
                event = given if given == done or usual(given) else canonical(given, named=not done)
                if not event:
                    continue
                self.over = event == done
                if not self.over:
                    chunk = read(event)
                    found.append(chunk)
                    self.over = chunk.last
                if self.over:
                    self.ended = True
                    break
        except EngineBrokeError as error:
            self.ended, self._fault = True, without_trace(error)
        return found

    def _whole_events(self, data: bytes) -> bytes:
        """Return the events that end in a part, with what came of the first one before; keep the rest."""
        buffer = self._buffer
        whole = SEPARATOR in buffer[-1:] + data
        buffer += data
        if not whole:
            if len(buffer) > MAX_EVENT_BYTES:
                raise EngineBrokeError(f"the engine's stream holds an event of over {MAX_EVENT_BYTES} bytes")
            return b""
        whole_events, _, rest = bytes(buffer).rpartition(SEPARATOR)
        self._buffer = bytearray(rest)
        return whole_events

    def _line_feeds(self, data: bytes) -> bytes:
        """Return a part whose lines end with line feeds alone; JSON holds no carriage return."""
        if self._cut:
            data = data.removeprefix(b"\n")
        self._cut = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def check(self) -> None:
        """Raise the fault that follows what was returned, once."""
        fault, self._fault = self._fault, None
        try:
            if fault is not None:
                raise fault
        finally:
            del fault  # its trace leads here


def canonical(event: bytes, *, named: bool) -> bytes:
    """Return an event as vLLM writes it: its name where events have names, its data in one line; empty without data.

    Events may have comments, ids and several lines of data, with or without a space after the colon (WHATWG HTML, section
    9.2.6). A line break within JSON is white space. Comments alone are kept, for they keep connections alive.
    """
    name, data, comments = b"", [], []
    for line in event.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value.strip())
        elif field == b"event":
            name = value
        elif not field and value:
            comments.append(b": " + value)
    if not any(data):
        return b"\n".join(comments)
    return (b"event: " + name + b"\n" if named and name else b"") + b"data: " + b" ".join(data)
