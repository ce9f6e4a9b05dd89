"""Server-sent events of an engine: split, decoded and checked once, as they come."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from router.upstream.errors import EngineBrokeError, without_trace

# Finish reason and token counts of an answer that is not streamed; the counts have OpenAI's names.
WholeAnswer = tuple[str | None, Mapping[str, Any]]

SEPARATOR = b"\n\n"
DONE = b"data: [DONE]"
# no empty line: some clients take one for the end of an event, even after a comment
COMMENT_END = b"\n"
# A comment with the ids of the tokens that led to the next bytes, separated by commas. An engine sends it where asked to.
TOKEN_NOTE = b": qarr-tokens "
MAX_EVENT_BYTES = 1 << 24  # enough for the token ids of a prompt of two million tokens
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")
NOT_A_CHUNK = "the engine's stream holds something that is not a chunk"

Count = Annotated[int, Meta(ge=0)]
_Ids = list[Annotated[int, Meta(ge=0, lt=1 << 32)]]


class _Usage(Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    total_tokens: Count | None = None
    prompt_tokens_details: Any = None
    completion_tokens_details: Any = None


class _Choice(Struct):
    delta: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    token_ids: _Ids | None = None
    prompt_token_ids: _Ids | None = None


class _ChunkEvent(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    prompt_token_ids: _Ids | None = None
    error: Any = None


class _WholeChoice(Struct):
    finish_reason: str | None = None
    message: dict[str, Any] | None = None
    text: str | None = None


class _Completion(Struct):
    choices: Annotated[list[_WholeChoice], Meta(min_length=1)]
    usage: _Usage


_INVALID = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_MEMBERS_WITH_TEXT = {"content", "reasoning", "reasoning_content"}
# a delta with these alone holds nothing but the answer's text
_MEMBERS_OF_PLAIN_TEXT = {"role", "content"}
_MEMBERS_WITH_REASONING = ("reasoning", "reasoning_content")
_EVENT = msgspec.json.Decoder(_ChunkEvent)
_COMPLETION = msgspec.json.Decoder(_Completion)
_IDS = msgspec.json.Decoder(_Ids)
# An event that holds one token of plain text, as vLLM writes it where the ids of tokens are asked for. It does not match a
# text with escapes or non-ASCII characters, because that would have to be decoded.
_PLAIN_TOKEN = re.compile(
    rb'(data: \{"id":"[!#-[\]-~]++","object":"[a-z._]++","created":(?:0|[1-9][0-9]*+),"model":"[ !#-[\]-~]++",'
    rb'"choices":\[\{"index":0,(?:"delta":(\{)"content"|"text"):"([ !#-[\]-~]++)"(?(2)\}),'
    rb'"logprobs":null,"finish_reason":null,(?:"stop_reason":null,)?(?:"prompt_token_ids":null,)?'
    rb'"token_ids":)\[(0|[1-9][0-9]{0,8})\]\}\]\}'
)


class Chunk(Struct, frozen=True):
    """One event of a stream, read once. A completion's and a chat's chunks look the same here.

    Attributes:
        raw: The event as it came, without the empty line after it; empty for a chunk that failover has made.
        text: Text of the answer.
        token_ids: Ids of the tokens that were computed for the event, where they were asked for. Their text may come with a
            later event.
        prompt_ids: Ids of the prompt's tokens, where the engine sends them with this event.
        finish_reason: Why a choice has ended; None: none has.
        stop_reason: What stopped it, in the engine's words: a string, a token id or None.
        other: Whether the event holds output that is not the answer's text: reasoning, or a tool call.
        reasoning: Whether the event holds reasoning.
        usage: The event's token counts, under the names of vLLM's chat completions; None: it has none.
        choice: Whether the event has a choice; the one with the final token counts has none.
        blank: Whether its choice has an empty delta.
        last: Whether it ends the stream, as ``[DONE]`` does where streams end with that.
        detail: The part of the event that a ``Splicer`` reads, decoded: a chat's delta with other output than text, or the
            whole of an event that has a name; None: there is none.
        without_ids: The event, written with null for its token's id and with the empty line after it, if the event holds one
            token of plain text and nothing else; empty: it is another one, or ``raw`` was changed.
    """

    raw: bytes = b""
    text: str = ""
    token_ids: Sequence[int] = ()
    prompt_ids: Sequence[int] = ()
    finish_reason: str | None = None
    stop_reason: Any = None
    other: bool = False
    reasoning: bool = False
    usage: Mapping[str, Any] | None = None
    choice: bool = False
    blank: bool = False
    last: bool = False
    detail: Any = None
    without_ids: bytes = b""


def read_plain_token(raw: bytes) -> Chunk | None:
    """Read an event that holds one token of plain text and nothing else; None: it is left to ``parse_event``.

    Most events of most streams are such, and ``parse_event`` takes twice the time.
    """
    match = _PLAIN_TOKEN.fullmatch(raw)
    if match is None:
        return None
    before_id, _, text, token_id = match.groups()
    return Chunk(
        raw=raw,
        text=text.decode(),
        token_ids=(int(token_id),),
        choice=True,
        without_ids=b"%bnull}]}\n\n" % before_id,
    )


def parse_event(raw: bytes) -> Chunk:
    """Read one event of a stream; ``EngineBrokeError``: it is no chunk of an answer, or tells of an error."""
    if not raw.startswith(b"data:"):
        return Chunk(raw)  # a comment, which keeps connections alive
    try:
        if not raw.isascii():
            raw.decode()
        event = _EVENT.decode(raw[5:])
    except _INVALID:
        # the decoder's message quotes the event
        raise EngineBrokeError(NOT_A_CHUNK) from None
    choices = event.choices
    if event.error is not None or not choices:
        return _parse_event_without_choice(raw, event)
    choice = choices[0]
    finish_reason = choice.finish_reason or None
    if len(choices) > 1:
        finish_reason = _first_finish_reason(choices)
    usage = None
    if event.usage is not None:
        usage = msgspec.structs.asdict(event.usage)
    text = choice.text
    has_other_output = False
    has_reasoning = False
    is_blank = False
    delta = choice.delta
    if delta is not None:
        is_blank = not delta
        text = delta.get("content")
        if type(text) is not str or len(delta) > 1:
            text, has_other_output = _read_delta(delta)
            has_reasoning = has_other_output and _has_reasoning(delta)
    chunk = Chunk(
        raw=raw,
        text=text or "",
        token_ids=choice.token_ids or (),
        prompt_ids=event.prompt_token_ids or choice.prompt_token_ids or (),
        finish_reason=finish_reason,
        stop_reason=choice.stop_reason,
        other=has_other_output,
        reasoning=has_reasoning,
        usage=usage,
        choice=True,
        blank=is_blank,
    )
    if has_other_output:
        return msgspec.structs.replace(chunk, detail=delta)
    return chunk


def _read_event_or_token_note(
    read_event: Callable[[bytes], Chunk], raw: bytes
) -> Chunk:
    """Read an event of a stream in which comments tell tokens."""
    if raw.startswith(TOKEN_NOTE):
        return parse_token_note(raw)
    return read_event(raw)


@cache  # there are as many as ``AnswerFormat``s
def _or_token_note(usual: re.Pattern[bytes]) -> re.Pattern[bytes]:
    return re.compile(usual.pattern + b"|" + TOKEN_NOTE + rb"[0-9,]*+")


def parse_token_note(comment: bytes) -> Chunk:
    """Read the token ids that a comment tells; ``EngineBrokeError``: it does not hold ids. Nothing of it is passed on."""
    try:
        token_ids = _IDS.decode(b"[%b]" % comment.removeprefix(TOKEN_NOTE))
    except _INVALID:
        raise EngineBrokeError(NOT_A_CHUNK) from None
    return Chunk(token_ids=token_ids)


def _parse_event_without_choice(raw: bytes, event: _ChunkEvent) -> Chunk:
    """Read an event that has token counts at most; ``EngineBrokeError``: it tells of an error, or is no chunk."""
    if event.error is not None:
        raise EngineBrokeError("the engine reported an error in its stream")
    if event.choices is None:
        raise EngineBrokeError(NOT_A_CHUNK)
    usage = None
    if event.usage is not None:
        usage = msgspec.structs.asdict(event.usage)
    return Chunk(raw, usage=usage, prompt_ids=event.prompt_token_ids or ())


def _first_finish_reason(choices: Sequence[_Choice]) -> str | None:
    for choice in choices:
        if choice.finish_reason:
            return choice.finish_reason
    return None


def _read_delta(delta: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the text of the answer that a delta holds, and whether it holds other output as well."""
    has_other_output = False
    for name, value in delta.items():
        if name in _MEMBERS_WITH_TEXT and not isinstance(value, str | None):
            raise EngineBrokeError(NOT_A_CHUNK)
        if value and name not in _MEMBERS_OF_PLAIN_TEXT:
            has_other_output = True
    return delta.get("content") or "", has_other_output


def _has_reasoning(members: Mapping[str, Any]) -> bool:
    return any(map(members.get, _MEMBERS_WITH_REASONING))


def decoded(decoder: msgspec.json.Decoder[Any], text: bytes) -> Any:
    """Decode what an engine says; ``EngineBrokeError``: it is not what the decoder reads."""
    try:
        if not text.isascii():
            text.decode()  # strings that the decoder skips are passed on as well
        return decoder.decode(text)
    except _INVALID:
        raise EngineBrokeError(NOT_A_CHUNK) from None


def read_completion(content: bytes) -> WholeAnswer | None:
    """Read a completion, or a chat's, that is not streamed; None: it is none."""
    try:
        completion = decoded(_COMPLETION, content)
    except EngineBrokeError:
        return None
    if any(
        choice.message is None and choice.text is None for choice in completion.choices
    ):
        return None
    usage = msgspec.structs.asdict(completion.usage)
    if any(_has_reasoning(choice.message or {}) for choice in completion.choices):
        usage["completion_tokens_details"] = without_false_zero(
            usage["completion_tokens_details"]
        )
    return completion.choices[0].finish_reason, usage


def without_false_zero(output_details: Any) -> Any:
    """Return the details of an answer with reasoning; without a count of 0, which says that a parser counts none.

    Many of vLLM's reasoning parsers do not count (``count_reasoning_tokens`` of its ``ReasoningParser`` returns 0), and
    others count none where the tag that begins a thought is part of the prompt (``BaseThinkingReasoningParser``).
    """
    if isinstance(output_details, dict) and not output_details.get("reasoning_tokens"):
        return {**output_details, "reasoning_tokens": None}
    return output_details


def _leave_to_read_event(_raw: bytes) -> None:
    """Take no event for a plain token: ``AnswerFormat.read_event`` reads all of them."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answers of one API are read.

    Attributes:
        read_event: Reads one event of a stream, as ``parse_event``.
        read_whole: Reads an answer that is not streamed, as ``read_completion``.
        usual: Matches an event as vLLM writes it (``fullmatch``); others are written anew.
        done: An event that ends a stream and is no chunk; empty: there is none.
        read_plain_token: Reads the most frequent event, as ``read_event`` would; None: it is another one.
    """

    read_event: Callable[[bytes], Chunk]
    read_whole: Callable[[bytes], WholeAnswer | None]
    usual: re.Pattern[bytes]
    done: bytes = b""
    read_plain_token: Callable[[bytes], Chunk | None] = _leave_to_read_event


COMPLETION_FORMAT = AnswerFormat(
    read_event=parse_event,
    read_whole=read_completion,
    usual=re.compile(rb"data: \{[^\n]*+"),
    done=DONE,
    read_plain_token=read_plain_token,
)


def written(event: bytes) -> bytes:
    """Return an event, or a comment, with what ends it on the wire."""
    if event.startswith(b":"):
        return event + COMMENT_END
    return event + SEPARATOR


class EventParser:
    """Takes an engine's stream in parts, cut anywhere, and gives its events up to the last one.

    Args:
        answers: How its events are read.
        takes_token_notes: The engine was asked to tell its tokens in comments; otherwise they are comments as others.

    Attributes:
        over: Whether the last event has come.
        ended: Whether no further part is read, because of the last event or of a fault.
    """

    __slots__ = (
        "_buffer",
        "_done",
        "_ends_in_cr",
        "_fault",
        "_is_usual",
        "_read_event",
        "_read_plain_token",
        "ended",
        "over",
    )

    def __init__(
        self,
        answers: AnswerFormat = COMPLETION_FORMAT,
        *,
        takes_token_notes: bool = False,
    ) -> None:
        self._is_usual = answers.usual.fullmatch
        self._read_event = answers.read_event
        self._read_plain_token = answers.read_plain_token
        if takes_token_notes:
            self._is_usual = _or_token_note(answers.usual).fullmatch
            self._read_event = partial(_read_event_or_token_note, answers.read_event)
        self._done = answers.done or None
        self._buffer = bytearray()  # the beginning of an event whose end has not come
        # whether the last part ended in a carriage return, whose line feed may follow
        self._ends_in_cr = False
        self._fault: EngineBrokeError | None = None
        self.over = False
        self.ended = False

    def parse(self, data: bytes) -> list[Chunk]:
        """Return the events that a part of the stream completes, in order; a fault after them is raised by ``check``."""
        chunks: list[Chunk] = []
        if self.ended:
            return chunks
        try:
            if self._ends_in_cr or b"\r" in data:
                data = self._with_line_feeds(data)
            if self._buffer or not data.endswith(SEPARATOR):
                data = self._take_whole_events(data)
            for event in data.split(SEPARATOR):
                if not event:
                    continue
                chunk = self._read_plain_token(event) or self._read(event)
                if chunk is not None:
                    chunks.append(chunk)
                if self.ended:
                    break
        except EngineBrokeError as error:
            self.ended = True
            self._fault = without_trace(error)
        return chunks

    def _read(self, event: bytes) -> Chunk | None:
        """Read an event, however it is written; None: nothing in it is passed on. The last one sets ``ended``."""
        is_done = event == self._done
        if not is_done and not self._is_usual(event):
            event = canonical(event, named=self._done is None)
            is_done = event == self._done
        if not event:
            return None
        chunk = None if is_done else self._read_event(event)
        if chunk is None or chunk.last:
            self.over = True
            self.ended = True
        return chunk

    def _take_whole_events(self, data: bytes) -> bytes:
        """Return the events that end in a part, with the buffered beginning of the first one; buffer what follows them."""
        buffer = self._buffer
        has_end = SEPARATOR in buffer[-1:] + data
        buffer += data
        if not has_end:
            if len(buffer) > MAX_EVENT_BYTES:
                raise EngineBrokeError(
                    f"the engine's stream holds an event of over {MAX_EVENT_BYTES} bytes"
                )
            return b""
        whole_events, _, unfinished_event = bytes(buffer).rpartition(SEPARATOR)
        self._buffer = bytearray(unfinished_event)
        return whole_events

    def _with_line_feeds(self, data: bytes) -> bytes:
        """Return a part whose lines end with line feeds alone; JSON holds no carriage return."""
        if self._ends_in_cr:
            data = data.removeprefix(b"\n")
        self._ends_in_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def check(self) -> None:
        """Raise the fault that follows the events that were returned, once."""
        fault = self._fault
        self._fault = None
        try:
            if fault is not None:
                raise fault
        finally:
            del fault  # break the reference cycle between the exception and this frame


def canonical(event: bytes, *, named: bool) -> bytes:
    """Return an event as vLLM writes it: its name where events have names, its data in one line; empty without data.

    Events may have comments, ids and several lines of data, with or without a space after the colon (WHATWG HTML, section
    9.2.6). A line break within JSON is white space. Comments alone are kept, for they keep connections alive.
    """
    name = b""
    data_lines: list[bytes] = []
    comments: list[bytes] = []
    for line in event.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data_lines.append(value.strip())
        elif field == b"event":
            name = value
        elif not field and value:
            comments.append(b": " + value)
    if not any(data_lines):
        return b"\n".join(comments)
    data = b"data: " + b" ".join(data_lines)
    if named and name:
        return b"event: " + name + b"\n" + data
    return data
