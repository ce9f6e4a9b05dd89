"""How far a streamed answer has come: what another engine needs to go on with it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from typing import Any, NamedTuple

from msgspec import Struct

from router.upstream.json_object import as_boolean, as_integer
from router.upstream.splicing import Splicer
from router.upstream.sse import Chunk


class Point(NamedTuple):
    """A point in an answer where its text is known: its first ``tokens`` tokens are ``characters`` characters."""

    tokens: int
    characters: int


class StopToken(NamedTuple):
    """The token that completes a stop string, as far as a stream shows which one that is.

    Attributes:
        text: The answer's text up to the end of the stop string.
        start: The last known point before that end.
        fewest: The fewest tokens that the text may take.
        most: The most tokens that it may take.
    """

    text: str
    start: Point
    fewest: int
    most: int


BEGINNING = Point(0, 0)
_no_ids = partial(array, "I")  # an empty array, of 4 bytes a token


@dataclass(slots=True)
class AnswerProgress:
    """How far an answer has come: what another engine needs to go on from there.

    As vLLM's ``v1/engine/detokenizer.py`` works, an engine keeps a fixed number of characters back while they may begin a
    stop string. So each chunk of text also tells how long the text of all tokens is by then, and once so many characters
    more have come, that text itself is known. A token that comes alone and with text has ended a character.

    Attributes:
        held_back: Characters that an engine keeps back.
        prompt_ids: The prompt as the engine read it; empty for as long as it is not known.
        output_ids: Ids of all tokens that came.
        received_characters: Characters that came.
        finish_reason: Why the answer ended; None: it is not known yet.
        is_continuable: Whether what came so far can be continued.
        counted: Whether the engine has told the tokens of all that came.
        silent: Tokens that came alone and without any text, by their number: parts of characters, and special ones.
        begun: Where the engine that computes has begun.
        searched: A known point before which no stop string ends: of text that came, engine and router see that.
        stop_token: The token that completes the stop string which ended the answer; None: the router has found none.
        splicer: Knows what was sent besides text, for an engine that resumes the answer; None: it may not be resumed.
        tokens_come_apart: Whether the engine tells the tokens of output before it, in comments, rather than with it.
    """

    held_back: int = 0
    prompt_ids: array[int] = field(default_factory=_no_ids)
    output_ids: array[int] = field(default_factory=_no_ids)
    received_characters: int = 0
    finish_reason: str | None = None
    is_continuable: bool = True
    counted: bool = True
    silent: list[int] = field(default_factory=list)
    begun: Point = BEGINNING
    searched: Point = BEGINNING
    stop_token: StopToken | None = None
    splicer: Splicer | None = None
    tokens_come_apart: bool = False
    _written: StringIO = field(default_factory=StringIO)
    # Tokens and characters as in ``Point``, from the last known point on: plain tuples, for one is made for each token.
    _points: list[tuple[int, int]] = field(default_factory=partial(list, (BEGINNING,)))
    _has_text: bool = False  # whether the engine that computes has sent text

    @property
    def text(self) -> str:
        return self._written.getvalue()

    @property
    def point(self) -> Point:
        """Return the last point whose text is known."""
        return Point(
            *next(
                point
                for point in reversed(self._points)
                if point[1] <= self.received_characters
            )
        )

    @property
    def settled(self) -> bool:
        """Tell whether all that came is the text up to the last known point, and nothing is kept back there."""
        keeps_text_back = self.held_back > 0 and self._has_text
        return self.point.characters == self.received_characters and not keeps_text_back

    def note(self, chunks: Iterable[Chunk]) -> None:
        """Note what came, in order.

        It costs for each token, so a chunk that holds text and nothing else is noted here without further calls.
        """
        points = self._points
        output_ids = self.output_ids
        write = self._written.write
        held_back = self.held_back
        characters = self.received_characters
        for chunk in chunks:
            if chunk.prompt_ids or chunk.finish_reason is not None or chunk.other:
                self._note_besides_text(chunk)
            token_ids = chunk.token_ids
            output_ids.extend(token_ids)
            is_single_token = len(token_ids) == 1
            text = chunk.text
            if text:
                while len(points) > 1 and points[1][1] <= characters:
                    del points[0]
                write(text)
                characters += len(text)
                self._has_text = True
                if is_single_token:
                    points.append((len(output_ids), characters + held_back))
                elif not token_ids:
                    self.close(counted=self.tokens_come_apart)
            elif is_single_token:
                self._note_token_without_text()
        self.received_characters = characters

    def _note_besides_text(self, chunk: Chunk) -> None:
        """Note the prompt and the end of the answer, and output that could not be continued as text can."""
        # the prompt of a continuation holds the answer so far
        if chunk.prompt_ids and not self.prompt_ids:
            self.prompt_ids = array("I", chunk.prompt_ids)
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
        if chunk.other:
            self.close(counted=bool(chunk.token_ids) or self.tokens_come_apart)
            if self.splicer is not None:
                self.splicer.note(chunk)

    @property
    def can_be_resumed(self) -> bool:
        """Tell whether an engine that resumes answers could go on from here: it needs the ids of all tokens."""
        if self.splicer is None or not self.splicer.can_resume:
            return False
        return self.counted and len(self.output_ids) > 0

    def _note_token_without_text(self) -> None:
        """Note that the last token has no text, unless that may be text which is kept back."""
        if self._has_text or not self.held_back:
            self.silent.append(len(self.output_ids) - 1)

    def close(self, *, counted: bool) -> None:
        """Note that the answer can no longer be continued: it holds other output than text, or text of unknown tokens.

        ``counted``: the engine has told the tokens of that output.
        """
        self.is_continuable = False
        self.counted = self.counted and counted

    def rest_at(self, tokens: int, text: str) -> None:
        """Go back, or on, to where the text of so many tokens is known; another engine begins there."""
        if self._has_text:
            self.searched = self.point
        del self.output_ids[tokens:]
        self._written = StringIO()
        self.received_characters = self._written.write(text)
        self.begun = Point(tokens, len(text))
        self._points = [self.begun]
        self.silent = []
        self._has_text = False

    def stop_at(self, text: str) -> None:
        """End the answer with a stop string, up to whose end its text is ``text``; tokens after it are not counted.

        Until ``end_with`` says which token completes the stop string, as many tokens count as it may have taken.
        """
        start = self.searched
        fewest = start.tokens + 1
        most = len(self.output_ids)
        if self.begun.characters < len(text):
            start = self.begun
        for tokens, characters in self._points:
            if characters >= len(text):
                most = tokens
                break
            fewest = tokens + 1
        self.stop_token = StopToken(text, start, min(fewest, most), most)
        self.end_with(most)
        self.finish_reason = "stop"

    def end_with(self, tokens: int) -> None:
        """Drop the tokens after the first ``tokens``: they were computed for nothing."""
        del self.output_ids[tokens:]

    @property
    def usage(self) -> dict[str, int]:
        """Return the token counts, as an engine gives them; empty where the engine did not tell all of its tokens."""
        prompt_tokens = len(self.prompt_ids)
        if not prompt_tokens or not self.counted:
            return {}
        output_tokens = len(self.output_ids)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
        }


@dataclass(slots=True)
class EventProgress(AnswerProgress):
    """How far an answer has come whose API has other events than chunks: only an engine that resumes it can go on.

    Its splicer notes all events, and its tokens are told in comments.
    """

    is_continuable: bool = False
    tokens_come_apart: bool = True

    def note(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            self.output_ids.extend(chunk.token_ids)
            if chunk.finish_reason is not None:
                self.finish_reason = chunk.finish_reason
            if self.splicer is not None:
                self.splicer.note(chunk)


class ContinuationTerms(Struct, frozen=True):
    """What a request says of its answer's continuation.

    Attributes:
        max_tokens: Output tokens in all; None: as many as the context leaves.
        sampling: Members of a completion's body that say how tokens are chosen.
        priority: For vLLM's scheduler, lower first.
    """

    max_tokens: int | None
    sampling: Mapping[str, Any]
    priority: int

    @property
    def stops(self) -> tuple[str, ...]:
        stop = self.sampling.get("stop") or ()
        if isinstance(stop, str):
            return (stop,)
        return tuple(string for string in stop if isinstance(string, str) and string)

    @property
    def includes_stop(self) -> bool:
        return as_boolean(self.sampling.get("include_stop_str_in_output"))

    @property
    def held_back(self) -> int:
        """Return the characters that an engine keeps back, as they may begin a stop string."""
        if not self.sampling.get("stop") or self.includes_stop:
            return 0
        longest_stop = max(map(len, self.stops), default=1)
        return longest_stop - 1

    @property
    def min_tokens(self) -> int:
        return as_integer(self.sampling.get("min_tokens")) or 0
