"""Answers as text: what ``POST /generate`` asks of an engine, and how it reads what comes back."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from router.upstream.errors import EngineBroke, without_trace
from router.upstream.exchange import Attempt, Exchange, Piece, Progress, Resumption
from router.upstream.sse import EventStream, chunk_in
from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from tiers.fleet import Replica

CERTAINTY = {"logprobs": True, "top_logprobs": 1}


@dataclass(frozen=True, slots=True)
class Delta:
    """One piece of an answer. ``usage`` comes once, with the last piece.

    Attributes:
        certainties: Log-probabilities of the engine's first choices, where they were asked for.
        token_ids: Of the tokens computed for it.
        prompt_ids: Of the prompt, once, with the first piece.
        reasoning: It is a part of the model's reasoning, whose text is not sent; the tokens count.
    """

    text: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, int] | None = None
    certainties: tuple[float, ...] = ()
    token_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
    reasoning: bool = False


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat, made from a prompt and perhaps a system prompt."""

    messages: tuple[Mapping[str, str], ...]
    max_tokens: int
    temperature: float
    priority: int
    request_id: str
    judged: bool = False  # ask the cheaper tiers how sure they are
    path: str = "/v1/chat/completions"
    operation: str = "chat"
    streamed: bool = True  # always, so that a stalled engine is noticed

    @property
    def chat(self) -> Sequence[Mapping[str, str]]:
        """Return its messages."""
        return self.messages

    @property
    def resumption(self) -> Resumption:
        """Return what another engine needs to go on with a broken answer."""
        return Resumption(self.max_tokens, {"temperature": self.temperature}, self.priority)

    @property
    def parameters(self) -> Mapping[str, float]:
        """Return what is told of the request in traces."""
        return {"gen_ai.request.max_tokens": self.max_tokens, "gen_ai.request.temperature": self.temperature}

    def body(self, replica: Replica) -> bytes:
        """Return the request's body for one replica."""
        return to_json(
            {
                "model": replica.model,
                "messages": self.messages,
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "priority": self.priority if replica.takes_priority else 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
                **(CERTAINTY if self.judged and replica.spec.name is not TierName.PRECISE else {}),
            }
        )


class Answer(Exchange):
    """An answer that has begun: its first delta is here, the rest can be read."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        self.progress = Progress()
        self._source = self._stream = EventStream(attempt.response, _delta_in)
        self._held: list[Delta] = []

    async def begin(self) -> None:
        """Read up to the first delta that has text, also of the reasoning, or ends the answer."""
        while not any(delta.text or delta.reasoning or delta.finish_reason for delta in self._held):
            deltas = await self._stream.next()
            if deltas is None:
                raise EngineBroke("the engine's answer was empty")
            self._held += deltas
        self._began()

    async def look_ahead(self, tokens: int, deadline: float) -> float | None:
        """Read ahead; what is read comes first in ``batches``."""
        with contextlib.suppress(TimeoutError):
            while sum(len(d.certainties) for d in self._held) < tokens:
                deltas = await self._ahead(self._stream, deadline)
                if deltas is None:
                    break
                self._held += deltas
        self.let_go()
        found = [value for delta in self._held for value in delta.certainties][:tokens]
        return fmean(found) if found else None

    async def batches(self) -> AsyncIterator[Sequence[Delta]]:
        """Yield every delta from the first, those that came together at once, also those of engines that go on with it.

        Raises:
            EngineBroke: The engine failed, or no token came in time, and no other could go on.
        """
        broken: EngineBroke | None = None
        deltas: list[Delta] | None
        deltas, self._held = self._held, []
        while deltas is not None:
            for delta in deltas:
                self._note(delta)
            yield deltas
            try:
                deltas = await self._more()
            except EngineBroke as error:
                broken, deltas = without_trace(error), None
        if broken is not None:
            async for piece in self._resumed(broken):
                yield (Delta(piece.text, piece.finish_reason),)
            if not self.usage:
                raise broken
        self._complete = True

    async def _more(self) -> list[Delta] | None:
        """Return what the first engine computes next, or None at its end.

        Raises:
            EngineBroke: The end is none, or no token came in time.
        """
        deltas = await self._next(self._stream)
        if deltas is None and self.finish_reason is None:
            raise EngineBroke("the engine's stream ended without a finish reason")
        return deltas

    def _note(self, delta: Delta) -> None:
        assert self.progress is not None
        if delta.prompt_ids:
            self.progress.prompt_ids = list(delta.prompt_ids)
        self.progress.note(Piece(delta.text, delta.token_ids, delta.finish_reason))
        if delta.reasoning:
            self.progress.close(counted=bool(delta.token_ids))
        if delta.text or delta.reasoning or delta.token_ids:
            self._produced(len(delta.token_ids) or 1)
        self.finish_reason = delta.finish_reason or self.finish_reason
        if delta.usage:
            self._note_usage(delta.usage)


def _delta_in(event: bytes) -> Delta | None:
    """Return what an event adds to an answer; None for comments and the end.

    Raises:
        EngineBroke: It holds something else.
    """
    chunk = chunk_in(event)
    return None if chunk is None else _delta(chunk)


def _delta(chunk: Mapping[str, Any]) -> Delta:
    choice = next(iter(chunk["choices"]), None)
    if choice is None:
        return Delta(usage=chunk.get("usage"))
    said = choice.get("delta", choice)
    return Delta(
        text=said.get("content") or "",
        finish_reason=choice.get("finish_reason"),
        usage=chunk.get("usage"),
        certainties=certainties(choice),
        token_ids=tuple(choice.get("token_ids") or ()),
        prompt_ids=tuple(chunk.get("prompt_token_ids") or ()),
        reasoning=bool(said.get("reasoning") or said.get("reasoning_content")),
    )


def certainties(choice: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the log-probabilities of the engine's first choices in a chat's choice; empty where it has none.

    Raises:
        EngineBroke: They have another form.
    """
    try:
        places = (choice.get("logprobs") or {}).get("content") or ()
        return tuple(float(place["top_logprobs"][0]["logprob"]) for place in places if place.get("top_logprobs"))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise EngineBroke("the engine's stream holds something that is not a chunk") from error
