"""Server-sent events of an engine: split, parsed and checked once, as they come."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import httpx
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from router.upstream.errors import EngineBroke, EngineStalled, without_trace
from router.upstream.transport import Body, parts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    # The text of each plain event as it is written in JSON, and its token ids, separated by commas; empty: there are none.
    PlainTexts = list[tuple[bytes, bytes]]
    TakePlain = Callable[[bytes, PlainTexts], bool]
    WholeAnswer = tuple[str | None, Mapping[str, Any]]  # finish reason and token counts, under OpenAI's names

SEPARATOR, DONE = b"\n\n", b"data: [DONE]"
MAX_EVENT_BYTES = 1 << 24  # of one event: enough for the token ids of a prompt of two million tokens
USAGE = ("prompt_tokens", "completion_tokens", "total_tokens")
NOT_A_CHUNK = "the engine's stream holds something that is not a chunk"

# A plain event: one piece of text and nothing else, as vLLM writes it; all of it is checked, so it need not be parsed.
_PLAIN = re.compile(
    rb'(?<![^\n])data: \{"id":"[^"\\]*+","object":"[a-z._]*+","created":\d++,"model":"[^"\\]*+","choices":\[\{"index":\d++,'
    rb'"(?:delta":\{"content|text)":"((?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u00[0-9a-fA-F]{2}))*+)"\}?,'
    rb'"logprobs":null,"finish_reason":null(?:,"(?:stop_reason|prompt_logprobs|prompt_token_ids)":null)*+'
    rb'(?:,"token_ids":(?:\[([\d,]*+)\]|null))?\}\]\}\n\n'
)
_LINES = 2  # of a plain event, with the empty one after it
# The members that the router reads; all others are kept as they are. Only keys are interned: values are what people ask
# and engines answer, and the parser's cache would hold on to them (jiter's ``py_string_cache.rs``).
_READ = ConfigDict(extra="allow", strict=True, cache_strings="keys", hide_input_in_errors=True)
_Ids = list[int] | None
_Count = Annotated[int, Field(ge=0)] | None


@with_config(_READ)
class _Usage(TypedDict, total=False):
    prompt_tokens: _Count
    completion_tokens: _Count
    total_tokens: _Count


@with_config(_READ)
class _Delta(TypedDict, total=False):
    content: str | None
    text: str | None
    reasoning: str | None
    reasoning_content: str | None


@with_config(_READ)
class _Choice(TypedDict, total=False):
    delta: _Delta
    text: str | None
    finish_reason: str | None
    token_ids: _Ids
    prompt_token_ids: _Ids


@with_config(_READ)
class _Chunk(TypedDict, total=False):
    choices: list[_Choice]
    prompt_token_ids: _Ids
    usage: _Usage | None


@with_config(ConfigDict(extra="ignore", strict=True, cache_strings="keys", hide_input_in_errors=True))
class _WholeChoice(TypedDict, total=False):
    finish_reason: str | None
    message: dict[str, Any]
    text: str


@with_config(ConfigDict(extra="ignore", strict=True, cache_strings="keys", hide_input_in_errors=True))
class _WholeAnswer(TypedDict):
    choices: Annotated[list[_WholeChoice], Field(min_length=1)]
    usage: _Usage


_CHUNK: TypeAdapter[Any] = TypeAdapter(_Chunk)
# An answer that is not streamed: its choices, each of which has a message or a text as well, and its token counts.
_WHOLE_ANSWER: TypeAdapter[Any] = TypeAdapter(_WholeAnswer)


def cached_tokens_of(usage: Mapping[str, Any]) -> int | None:
    """Return the prompt tokens found in the prefix cache; None: the engine does not tell (``prompt_tokens_details``)."""
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) and cached >= 0 else None


@dataclass(slots=True)
class Chunk:
    """One event of a stream, read once. A completion's and a chat's chunks look the same here.

    Attributes:
        raw: The event as it came, without the empty line after it; empty for a chunk that failover has made.
        data: The JSON object that it holds; None for a comment.
        choice: The first choice of that object, which has one; None: it has none, such as the chunk with token counts.
        text: Of the answer.
        token_ids: Of the tokens computed for it, where they were asked for; their text may come with a later chunk.
        finish_reason: Of the choice that has ended; None: none has.
        stop_reason: What stopped it, as the engine says it: a string, a token id or None.
        other: It holds something that is not the answer's text: reasoning, or a tool call.
        usage: The token counts that it holds, under OpenAI's names; None or empty: it holds none.
        last: It ends the stream, as ``[DONE]`` does where streams end with that.
    """

    raw: bytes = b""
    data: Mapping[str, Any] | None = None
    choice: Mapping[str, Any] | None = None
    text: str = ""
    token_ids: Sequence[int] = ()
    finish_reason: str | None = None
    stop_reason: Any = None
    other: bool = False
    usage: Mapping[str, Any] | None = None
    last: bool = False

    @property
    def visible(self) -> bool:
        """Tell whether it shows that the engine computes: text, reasoning, a tool call, or an end."""
        return bool(self.text or self.other or self.finish_reason)


def parse_event(raw: bytes) -> Chunk:
    """Read one event of a stream.

    Raises:
        EngineBroke: It holds something that is no chunk of an answer, or an error that the engine reports.
    """
    if not raw.startswith(b"data:"):
        return Chunk(raw)  # comments keep connections alive
    try:
        data = _CHUNK.validate_json(raw[5:])
    except ValidationError:
        raise EngineBroke(NOT_A_CHUNK) from None  # pydantic's own text quotes the input
    if data.get("error") is not None:
        raise EngineBroke("the engine reported an error in its stream")
    choices = data.get("choices")
    if choices is None:
        raise EngineBroke(NOT_A_CHUNK)
    usage = data.get("usage")
    if not choices:
        return Chunk(raw, data, usage=usage)
    choice, finish_reason = choices[0], choices[0].get("finish_reason") or None
    if finish_reason is None and len(choices) > 1:
        finish_reason = next((reason for each in choices if (reason := each.get("finish_reason"))), None)
    delta = choice.get("delta")
    if delta is None:
        text, other = choice.get("text"), False
    else:
        text, other = delta.get("content"), False
        for name, value in delta.items():
            if value and name not in {"content", "role"}:
                other = True
    token_ids, stop_reason = choice.get("token_ids") or (), choice.get("stop_reason")
    return Chunk(raw, data, choice, text or "", token_ids, finish_reason, stop_reason, other, usage)


def read_completion(content: bytes) -> WholeAnswer | None:
    """Read an answer that is not streamed; None where it is no completion."""
    try:
        answer = _WHOLE_ANSWER.validate_json(content)
    except ValidationError:  # its own text quotes the answer
        return None
    if not all("message" in choice or "text" in choice for choice in answer["choices"]):
        return None
    return answer["choices"][0].get("finish_reason"), answer["usage"]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answers of one API are read.

    Attributes:
        read_event: Reads one event of a stream, as ``parse_event``.
        read_whole: Reads an answer that is not streamed, as ``read_completion``.
        plain: Matches a plain event: one piece of text and nothing else; its groups are the text and the token ids.
        lines: Of a plain event, with the empty one after it.
    """

    read_event: Callable[[bytes], Chunk]
    read_whole: Callable[[bytes], WholeAnswer | None]
    plain: re.Pattern[bytes]
    lines: int


COMPLETION_FORMAT = AnswerFormat(parse_event, read_completion, _PLAIN, _LINES)


class EventSource:
    """An engine's stream of events, up to its last one. Close it, unless it is read to its end.

    It is asked for more rather than being an asynchronous generator, which would take most of a kilobyte for each stream.
    """

    __slots__ = ("_buffer", "_cut", "_fault", "_format", "_limit_s", "_over", "_parts", "_take", "_whole")

    def __init__(self, response: httpx.Response, answers: AnswerFormat = COMPLETION_FORMAT) -> None:
        self._parts, self._format = parts_of(response), answers
        self._buffer = bytearray()
        self._cut = False  # the last part ended between a carriage return and its line feed
        self._whole = False  # the buffer holds a whole event
        self._take: TakePlain = _none
        self._over, self._limit_s = False, math.inf
        self._fault: EngineBroke | None = None

    def limit_reads(self, limit_s: float) -> None:
        """Let each further read wait so long at most."""
        assert isinstance(self._parts, Body)
        self._parts.limit_reads(limit_s)
        self._limit_s = limit_s

    async def next(self, *, first: bool = False) -> list[Chunk] | None:
        """Return what came together, in order and at least one; None after the last.

        Args:
            first: Return nothing after the first chunk that shows something, which is left for later.

        Raises:
            EngineBroke: The stream ended before its end, or an event was refused. What came before was returned.
        """
        found: list[Chunk] = []
        while not found and not self._over:
            try:
                if not self._whole:
                    await self._more()
                self._parse(found, first=first)
            except EngineBroke as error:
                self._failed(error)
            except httpx.ReadTimeout:
                self._failed(EngineStalled(f"the engine sent no token for {self._limit_s:g} s"))
            except httpx.HTTPError as error:
                self._failed(_broken_off(error))
        if self._over:
            await self._parts.aclose()
        if not found:
            self.check()
        return found or None

    def rest(self) -> list[Chunk]:
        """Return what has come and was left for later."""
        found: list[Chunk] = []
        try:
            self._parse(found, first=False)
        except EngineBroke as error:
            self._failed(error)
        return found

    async def _more(self) -> None:
        data = await anext(self._parts, b"")
        if not data:
            raise EngineBroke("the engine's stream ended early")
        data = self._line_feeds(data)
        self._whole = SEPARATOR in self._buffer[-1:] + data
        self._buffer += data
        if not self._whole and len(self._buffer) > MAX_EVENT_BYTES:
            raise EngineBroke(f"the engine's stream holds an event of over {MAX_EVENT_BYTES} bytes")

    def _line_feeds(self, data: bytes) -> bytes:
        """Return a part whose lines end with line feeds alone; JSON holds no carriage return."""
        if self._cut:
            data = data.removeprefix(b"\n")
        self._cut = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in data else data

    def _parse(self, found: list[Chunk], *, first: bool) -> None:
        if not self._whole:
            return
        *events, rest = bytes(self._buffer).split(SEPARATOR)
        self._buffer, self._whole = bytearray(rest), False
        for number, given in enumerate(events, 1):
            usual = given.startswith(b"data: {") and b"\n" not in given
            event = given if usual else canonical(given, named=self._format is not COMPLETION_FORMAT)
            if event == DONE and self._format is COMPLETION_FORMAT:
                self._over = True
                return
            if event:
                found.append(self._format.read_event(event))
                if found[-1].last:
                    self._over = True
                    return
                if first and found[-1].visible and number < len(events):
                    self._buffer, self._whole = bytearray(SEPARATOR.join([*events[number:], rest])), True
                    return

    async def pump(self, take: TakePlain) -> None:
        """Let ``take`` have plain events and texts, waking no task for each; return when it may, or must, be read."""
        if self._over:
            return
        assert isinstance(self._parts, Body)
        self._take = take
        try:
            if self._whole:
                held, self._whole = bytes(self._buffer), False
                self._buffer.clear()
                if not self._feed(held):
                    return
            await self._parts.pump(self._feed)
        finally:
            self._take = _none  # it leads here

    def _feed(self, data: bytes) -> bool:
        """Pass on the plain events that have come; keep the rest, and return whether there may be more of them."""
        data = self._line_feeds(data)
        if self._buffer:
            data = bytes(self._buffer) + data
            self._buffer.clear()
        if not data.endswith(SEPARATOR):
            end = data.rfind(SEPARATOR) + len(SEPARATOR)
            if end < len(SEPARATOR):
                self._buffer += data
                return len(data) <= MAX_EVENT_BYTES
            self._buffer += data[end:]
            data = data[:end]
        plain = self._format.plain
        texts = plain.findall(data)
        if self._format.lines * len(texts) != data.count(b"\n") or not _is_utf8(data):
            end = plain_end(data, plain)
            self._buffer[:0], self._whole = data[end:], True
            data = data[:end]
            texts = texts[: data.count(SEPARATOR)]
        if data and not self._take(data, texts):
            return False
        return not self._whole

    def _failed(self, fault: EngineBroke) -> None:
        """Read no more; the fault is raised after what came before it."""
        self._over, self._fault = True, without_trace(fault)

    def check(self) -> None:
        """Look for a fault that follows what was returned, where it has come already.

        Raises:
            EngineBroke: There is one. It is raised once.
        """
        fault, self._fault = self._fault, None
        try:
            if fault is not None:
                raise fault
        finally:
            del fault  # its trace leads here

    async def aclose(self) -> None:
        await self._parts.aclose()


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


def _none(_events: bytes, _texts: PlainTexts) -> bool:
    return False


def plain_end(data: bytes, plain: re.Pattern[bytes] = _PLAIN) -> int:
    """Return where the plain events at the beginning of some whole events end."""
    end = 0
    while (found := plain.match(data, end)) is not None and _is_utf8(found[0]):
        end = found.end()
    return end


def _is_utf8(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _broken_off(error: BaseException) -> EngineBroke:
    fault = EngineBroke(f"the engine's stream broke off ({type(error).__name__})")
    fault.__cause__ = without_trace(error)
    return fault
