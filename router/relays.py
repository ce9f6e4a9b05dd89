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

from pydantic_core import to_json

from router.answers import CERTAINTY
from router.continuation import Piece, Progress, Resumption, continued_on
from router.event_stream import DONE, SEPARATOR, EventStream, chunk_of, parse_event
from router.jsontext import JsonObject, NotJson, as_integer, read_json
from router.upstream import NO_ANSWER, Attempt, EngineBroke, EngineFailed, Exchange, body_of, without_trace
from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from tiers.fleet import Replica

DEFAULT_COMPLETION = 16  # tokens of a completion that gives no limit, as OpenAI and vLLM have it
# Quotes in a JSON string are escaped, so these stand only where a member of that name does.
_USAGE, _ERROR = b'"usage":{', b'"error":'
_LOGPROBS = b'"logprobs":{'
_FINISHED, _FINGERPRINT = b'"finish_reason":"', b'"system_fingerprint"'
_IDS = (b'"token_ids":[', b'"prompt_token_ids":[')
# What of a request says how tokens are chosen, and holds for its continuation as well.
_SAMPLING = (
    "allowed_token_ids",
    "bad_words",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_k",
    "top_p",
)
# What makes an answer one that cannot be taken over halfway: it has a structure of its own, or tells more than text.
_NOT_RESUMABLE = (
    "echo",
    "functions",
    "guided_choice",
    "guided_decoding_backend",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "kv_transfer_params",
    "logprobs",
    "prompt_embeds",
    "prompt_logprobs",
    "return_prompt_text",
    "return_token_ids",
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
            self.content = await body_of(self._attempt.response)
            answer = read_json(self.content)
            choices = answer["choices"]
            self.finish_reason = choices[0]["finish_reason"] if choices else None
            self._note_usage(answer.get("usage") or {})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineFailed("the engine's answer is not a completion") from error
        except NO_ANSWER as error:
            raise EngineBroke(f"the engine's answer broke off ({type(error).__name__})") from error
        self._complete = True


class EventRelay(Exchange):
    """A stream that has begun: its events up to the first token are here, the rest can be read."""

    def __init__(self, attempt: Attempt, *, report_usage: bool, judged: bool = False, resumable: bool = False) -> None:
        super().__init__(attempt)
        self.progress = Progress() if resumable else None
        self._template: dict[str, Any] = {}
        self._chat = False
        self._judged = judged and attempt.tier is not TierName.PRECISE
        self.media_type = attempt.response.headers.get("content-type", "text/event-stream; charset=utf-8")
        self._report_usage = report_usage
        self._source = self._batches = EventStream(attempt.response, _checked)
        self._held: list[bytes] = []
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
            while len(found) < tokens and DONE not in self._held:
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
        batch: list[bytes] | None
        batch, self._held = self._held, []
        while batch is not None:
            kept: list[bytes] = []
            try:
                for event in batch:
                    kept += self._relayed(event)
            except EngineBroke as error:  # what came before has been noted as sent
                broken = without_trace(error)
            if kept:
                yield SEPARATOR.join([*kept, b""])
            if broken is not None or self._ended:
                break
            try:
                batch = await self._next(self._batches)
            except EngineBroke as error:
                broken, batch = without_trace(error), None
        if broken is not None:
            async for piece in self._resumed(broken):
                yield self._as_event(piece)
            yield self._ending()
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

    def _ending(self) -> bytes:
        """Return the end of an answer that broke; one that was continued says so in a comment: clients skip those."""
        tiers = " ".join(continued_on(self)).encode()
        comment = b": continued on " + tiers + SEPARATOR if tiers else b""
        if not self._report_usage:
            return comment + DONE + SEPARATOR
        counts = to_json({**self._template, "choices": [], "usage": self.usage})
        return comment + b"data: " + counts + SEPARATOR + DONE + SEPARATOR

    def _relayed(self, event: bytes) -> Sequence[bytes]:
        """Note what an event says, and return it as it is relayed, unless it is left out."""
        if self._ended or not event.startswith(b"data:"):  # comments keep connections alive
            return () if self._ended else (event,)
        if event == DONE:
            self._ended = True
            return (event,)
        if _USAGE in event:
            chunk = parse_event(event)
            self._note_usage(chunk["usage"])
            if not chunk.get("choices") and not self._report_usage:
                return ()
        tokens = 1
        if self.progress is not None:
            tokens, kept = self._followed(self.progress, event)
            if kept is None:
                return ()
            event = kept
        self._produced(tokens)
        if self._judged and _LOGPROBS in event:
            event = _without_logprobs(event)
        if _FINISHED in event:
            self.finish_reason = event.split(_FINISHED, 1)[1].split(b'"', 1)[0].decode("ascii", "replace")
            fingerprint = self._attempt.lease.replica.fingerprint
            if fingerprint and not self._report_usage and _FINGERPRINT not in event and event.endswith(b"}"):
                return (event[:-1] + b',"system_fingerprint":' + to_json(fingerprint) + b"}",)
        return (event,)

    def _followed(self, progress: Progress, event: bytes) -> tuple[int, bytes | None]:
        """Note an event's tokens; return how many they are, and the event without their ids: nobody asked for those.

        An event that has nothing but ids, for a token that is not to be seen yet, would not have come without.
        """
        chunk = parse_event(event)
        choice: dict[str, Any] = next(iter(chunk.get("choices") or ()), {})
        progress.prompt_ids = chunk.get("prompt_token_ids") or choice.get("prompt_token_ids") or progress.prompt_ids
        delta = choice.get("delta")
        self._chat = self._chat or delta is not None
        text = choice.get("text") if delta is None else delta.get("content")
        if delta and not delta.keys() <= {"role", "content"}:
            progress.resumable = False  # reasoning, or a tool call: not text that could be gone on with
        ids = choice.get("token_ids") or ()
        progress.note(Piece(text or "", tuple(ids), choice.get("finish_reason")))
        if not self._template:
            self._template = {name: chunk.get(name) for name in ("id", "object", "created", "model")}
        if delta == {} and ids and choice.get("finish_reason") is None:
            return len(ids), None
        return len(ids) or 1, _without_ids(event)


def _without_ids(event: bytes) -> bytes:
    """Return an event with null for its token ids."""
    for name in _IDS:
        head, found, rest = event.partition(name)
        if found:
            event = head + name[:-1] + b"null" + rest.partition(b"]")[2]
    return event


def _certainties(events: list[bytes]) -> list[float]:
    """Return the log-probabilities of the engine's first choices in a stream's events."""
    found = []
    for event in events:
        if _LOGPROBS in event:
            for choice in parse_event(event).get("choices") or ():
                places = (choice.get("logprobs") or {}).get("content") or ()
                found += [float(place["top_logprobs"][0]["logprob"]) for place in places if place.get("top_logprobs")]
    return found


def _without_logprobs(event: bytes) -> bytes:
    """Return an event as the engine would have sent it without log-probabilities."""
    chunk = parse_event(event)
    for choice in chunk.get("choices") or ():
        choice["logprobs"] = None
    return b"data: " + to_json(chunk)


def _checked(event: bytes) -> bytes:
    """Return an event as it is; only one with the word is parsed to see whether it is an error.

    Raises:
        EngineBroke: It is an error that the engine reports in its stream, or nonsense.
    """
    if _ERROR in event and event.startswith(b"data:"):
        chunk_of(event)
    return event


def _has_token(event: bytes) -> bool:
    """Tell whether an event shows that the engine computes: text, a tool call, a finish reason, or the end."""
    if event == DONE:
        return True
    if not event.startswith(b"data:"):
        return False
    for choice in parse_event(event).get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or choice.get("finish_reason") or any(v for k, v in delta.items() if k != "role"):
            return True
    return False
