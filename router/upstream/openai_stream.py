"""Answers as bytes: what OpenAI's endpoints pass to an engine, and how its answer is relayed as it is.

Two things are changed in a stream, because the router asks every engine for its token counts: the final chunk that holds
only them is left out where the caller did not ask for it, and then the engine's fingerprint, which vLLM would have put on
the last chunk of each choice, is put back there.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic_core import to_json

from router.upstream.errors import NO_ANSWER, EngineBroke, EngineFailed, without_trace
from router.upstream.exchange import Attempt, Exchange, Piece, Progress, Resumption, continued_on
from router.upstream.http import body_of
from router.upstream.json_object import JsonObject, NotJson, as_integer, read_json
from router.upstream.sse import DONE, SEPARATOR, EventStream, chunk_in, is_usage
from router.upstream.text_stream import CERTAINTY, certainties
from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from tiers.fleet import Replica

DEFAULT_COMPLETION = 16  # tokens of a completion that gives no limit, as OpenAI and vLLM have it
MAX_ANSWER_BYTES = 1 << 28  # of one that is not streamed: log-probabilities of a long prompt take many
# Quotes in a JSON string are escaped, so these stand only where a member of that name does.
_LOGPROBS, _FINGERPRINT = b'"logprobs":{', b'"system_fingerprint"'
_IDS = (b'"token_ids":[', b'"prompt_token_ids":[')
# What of a request says how tokens are chosen, and holds for its continuation as well.
_SAMPLING = (
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_detection",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_k",
    "top_p",
    "vllm_xargs",
    "watermarking",
)
# What makes an answer one that cannot be taken over halfway: it has a structure of its own, or tells more than text.
_NOT_RESUMABLE = (
    "echo",
    "ec_transfer_params",
    "functions",
    "guided_choice",
    "guided_decoding_backend",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "kv_transfer_params",
    "logprob_token_ids",
    "logprobs",
    "mm_payload",
    "prompt_embeds",
    "prompt_logprobs",
    "return_prompt_text",
    "return_token_ids",
    "return_token_offsets",
    "return_tokens_as_token_ids",
    "structured_outputs",
    "suffix",
    "tools",
    "top_logprobs",
    "use_beam_search",
)


@dataclass(frozen=True, slots=True)
class RelayRequest:
    """A request for one of OpenAI's endpoints, passed on with as little change as routing needs.

    Attributes:
        document: The caller's body.
        priority: For vLLM's scheduler, lower first; None leaves the caller's own field.
        report_usage: The caller asked for the final chunk with token counts.
        resumption: What another engine needs to go on with a broken answer; None where none may.
        judged: Ask the cheaper tiers how sure they are; the caller did not ask for log-probabilities and gets none.
    """

    document: JsonObject
    path: str
    operation: str
    request_id: str
    streamed: bool
    priority: int | None
    report_usage: bool
    resumption: Resumption | None = None
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
        if self.resumption is not None:
            changes["return_token_ids"] = True
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


def resumption_of(document: JsonObject, priority: int, *, choices: int, chat: bool) -> Resumption | None:
    """Return what continuing the streamed answer of a request needs; None where it must not be continued.

    Args:
        document: The request's body.
        priority: For vLLM's scheduler.
        choices: Answers that it asks for.
        chat: Whether it is a chat, not a completion.
    """
    form = document.get("response_format")
    plain = form is None or (isinstance(form, dict) and form.get("type") == "text")
    options = document.get("stream_options")
    counting = isinstance(options, dict) and options.get("continuous_usage_stats")
    if choices != 1 or not plain or counting or any(document.get(name) for name in _NOT_RESUMABLE):
        return None
    messages = document.get("messages")
    if isinstance(messages, list) and not all(map(_is_text, messages)):
        return None
    limit = (as_integer(document.get("max_completion_tokens")) if chat else None) or as_integer(
        document.get("max_tokens", None if chat else DEFAULT_COMPLETION)
    )
    values = ((name, document.get(name)) for name in _SAMPLING)
    return Resumption(limit, {name: value for name, value in values if value is not None}, priority)


def _is_text(message: Any) -> bool:
    """Tell whether a message holds nothing but text."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)


class WholeRelay(Exchange):
    """An answer that is not streamed, read as a whole before any of it is passed on."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        self.content = b""
        self.media_type = attempt.response.headers.get("content-type", "application/json")

    async def begin(self) -> None:
        """Read the whole answer."""
        try:
            self.content = await body_of(self._attempt.response, MAX_ANSWER_BYTES)
        except NO_ANSWER as error:
            raise EngineBroke(f"the engine's answer broke off ({type(error).__name__})") from error
        try:
            answer = read_json(self.content)
        except ValueError as error:
            raise EngineFailed("the engine's answer is not a completion") from error
        if not _is_completion(answer):
            raise EngineFailed("the engine's answer is not a completion")
        self.finish_reason = answer["choices"][0].get("finish_reason")
        self._note_usage(answer["usage"])
        self._complete = True


def _is_completion(answer: Any) -> bool:
    """Tell whether a whole answer is one: with choices that hold something, and with token counts."""
    if not isinstance(answer, dict) or not isinstance(choices := answer.get("choices"), list) or not choices:
        return False
    return is_usage(answer.get("usage")) and all(
        isinstance(choice, dict)
        and isinstance(choice.get("finish_reason"), str | None)
        and (isinstance(choice.get("message"), dict) or isinstance(choice.get("text"), str))
        for choice in choices
    )


class Event(NamedTuple):
    """One of an engine's events, with the chunk that it holds; None: it is a comment, or the end."""

    raw: bytes
    chunk: dict[str, Any] | None


class EventRelay(Exchange):
    """A stream that has begun: its events up to the first token are here, the rest can be read."""

    def __init__(
        self, attempt: Attempt, *, report_usage: bool, judged: bool = False, resumption: Resumption | None = None
    ) -> None:
        super().__init__(attempt)
        self.progress = Progress(resumption.held_back) if resumption is not None else None
        self._template: dict[str, Any] = {}
        self._chat = False
        self._judged = judged and attempt.tier is not TierName.PRECISE
        self.media_type = attempt.response.headers.get("content-type", "text/event-stream; charset=utf-8")
        self._report_usage, self._usage_reported = report_usage, False
        self._source = self._batches = EventStream(attempt.response, _event_in)
        self._held: list[Event] = []
        self._ended = False

    async def begin(self) -> None:
        """Read up to the first event that has a token or ends the answer."""
        while not any(map(_has_token, self._held)):
            batch = await self._batches.next()
            if batch is None:
                raise EngineBroke("the engine's answer was empty")
            self._held += batch
            self._batches.check()  # nothing has been sent: another engine can still answer as if this one had not
        self._began()

    async def look_ahead(self, tokens: int, deadline: float) -> float | None:
        """Read ahead; what is read comes first in ``chunks``."""
        if not self._judged:
            return None
        found = _certainties(self._held)
        with contextlib.suppress(TimeoutError):
            while len(found) < tokens and self._held[-1].raw != DONE:
                batch = await self._ahead(self._batches, deadline)
                if batch is None:
                    break
                self._held += batch
                self._batches.check()
                found += _certainties(batch)
        self.let_go()
        return fmean(found[:tokens]) if found else None

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the engine's events, whole ones, as they come; the last one is ``[DONE]``.

        What other engines go on with looks as if the first one had sent it.

        Raises:
            EngineBroke: The engine failed, or no token came in time, and no other could go on. What was yielded holds no
                end.
        """
        broken: EngineBroke | None = None
        batch: list[Event] | None
        batch, self._held = self._held, []
        while batch is not None:
            kept = [raw for event in batch for raw in self._relayed(event)]
            if kept:
                yield SEPARATOR.join([*kept, b""])
            if self._ended:
                break
            try:
                batch = await self._next(self._batches)
            except EngineBroke as error:
                broken, batch = without_trace(error), None
        if broken is not None:
            async for piece in self._resumed(broken):
                yield self._as_event(piece)
            yield self._ending(broken)
        self._complete = True

    def _as_event(self, piece: Piece) -> bytes:
        """Return a piece as the first engine would have sent it."""
        choice: dict[str, Any] = {"index": 0}
        if self._chat:
            choice["delta"] = {"content": piece.text}
        else:
            choice["text"] = piece.text
        choice |= {"logprobs": None, "finish_reason": piece.finish_reason}
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        return b"data: " + to_json({**self._template, "choices": [{**choice, "token_ids": None}]}) + SEPARATOR

    def _ending(self, broken: EngineBroke) -> bytes:
        """Return the end of an answer that broke; one that was continued says so in a comment: clients skip those.

        Raises:
            EngineBroke: Its caller asked for token counts, which nobody knows.
        """
        tiers = " ".join(continued_on(self)).encode()
        comment = b": continued on " + tiers + SEPARATOR if tiers else b""
        if not self._report_usage or self._usage_reported:
            return comment + DONE + SEPARATOR
        if not self.usage:
            raise broken
        counts = to_json({**self._template, "choices": [], "usage": self.usage})
        return comment + b"data: " + counts + SEPARATOR + DONE + SEPARATOR

    def _relayed(self, event: Event) -> Sequence[bytes]:
        """Note what an event says, and return it as it is relayed, unless it is left out."""
        raw, chunk = event
        if self._ended:
            return ()
        if chunk is None:  # comments keep connections alive
            self._ended = raw == DONE
            return (raw,)
        if usage := chunk.get("usage"):
            self._note_usage(usage)
            if not chunk["choices"]:
                self._usage_reported = self._report_usage
                return (raw,) if self._report_usage else ()
        tokens = 1
        if self.progress is not None:
            tokens, kept = self._followed(self.progress, raw, chunk)
            if kept is None:
                return ()
            raw = kept
        self._produced(tokens)
        if self._judged and _LOGPROBS in raw:
            raw = _without_logprobs(raw)
        finished = next((reason for choice in chunk["choices"] if (reason := choice.get("finish_reason"))), None)
        if finished is not None:
            self.finish_reason = finished
            fingerprint = self._attempt.lease.replica.fingerprint
            if fingerprint and not self._report_usage and _FINGERPRINT not in raw and raw.endswith(b"}"):
                return (raw[:-1] + b',"system_fingerprint":' + to_json(fingerprint) + b"}",)
        return (raw,)

    def _followed(self, progress: Progress, raw: bytes, chunk: dict[str, Any]) -> tuple[int, bytes | None]:
        """Note an event's tokens; return how many they are, and the event without their ids: nobody asked for those.

        An event that has nothing but ids, for a token that is not to be seen yet, would not have come without.
        """
        choice: dict[str, Any] = next(iter(chunk["choices"]), {})
        progress.prompt_ids = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids") or progress.prompt_ids
        delta = choice.get("delta")
        self._chat = self._chat or delta is not None
        text = choice.get("text") if delta is None else delta.get("content")
        ids = choice.get("token_ids") or ()
        if delta and any(value for name, value in delta.items() if name not in {"role", "content"}):
            progress.close(counted=bool(ids))  # reasoning, or a tool call: not text that could be gone on with
        progress.note(Piece(text or "", tuple(ids), choice.get("finish_reason")))
        if not self._template:
            self._template = {name: chunk.get(name) for name in ("id", "object", "created", "model")}
        if delta == {} and ids and choice.get("finish_reason") is None:
            return len(ids), None
        return len(ids) or 1, _without_ids(raw)


def _without_ids(event: bytes) -> bytes:
    """Return an event with null for its token ids."""
    for name in _IDS:
        head, found, rest = event.partition(name)
        if found:
            event = head + name[:-1] + b"null" + rest.partition(b"]")[2]
    return event


def _certainties(events: list[Event]) -> list[float]:
    """Return the log-probabilities of the engine's first choices in a stream's events.

    Raises:
        EngineBroke: They have another form.
    """
    chunks = (event.chunk for event in events if event.chunk is not None)
    return [value for chunk in chunks for choice in chunk["choices"] for value in certainties(choice)]


def _without_logprobs(raw: bytes) -> bytes:
    """Return an event as the engine would have sent it without log-probabilities."""
    chunk = read_json(raw.removeprefix(b"data:"))
    for choice in chunk["choices"]:
        choice["logprobs"] = None
    return b"data: " + to_json(chunk)


def _event_in(raw: bytes) -> Event:
    """Return an event with its chunk.

    Raises:
        EngineBroke: It holds something else, or an error that the engine reports.
    """
    return Event(raw, chunk_in(raw))


def _has_token(event: Event) -> bool:
    """Tell whether an event shows that the engine computes: text, a tool call, a finish reason, or the end."""
    if event.chunk is None:
        return event.raw == DONE
    for choice in event.chunk["choices"]:
        delta = choice.get("delta") or {}
        if choice.get("text") or choice.get("finish_reason") or any(v for k, v in delta.items() if k != "role"):
            return True
    return False
