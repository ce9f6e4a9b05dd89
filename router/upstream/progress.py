"""How far a streamed answer has come: what another engine needs to go on with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from router.upstream.json_object import as_boolean, as_integer, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.upstream.sse import Chunk, PlainTexts


class Point(NamedTuple):
    """A point in an answer where its text is known: so many tokens have so many characters, and end no character halfway."""

    tokens: int
    characters: int


BEGINNING = Point(0, 0)


@dataclass(slots=True)
class Progress:
    """How far an answer has come: what another engine needs to go on from there.

    As vLLM's ``v1/engine/detokenizer.py`` works, an engine keeps a fixed number of characters back while they may begin a
    stop string. So each chunk of text also tells how long the text of all tokens is by then, and once so many characters
    more have come, that text itself is known. A token that comes alone and with text has ended a character.

    Attributes:
        held_back: Characters that an engine keeps back.
        prompt_ids: The prompt as the engine read it; empty for as long as it is not known.
        output_ids: Of all tokens that came.
        told: Characters that came.
        finish_reason: Once it is known.
        resumable: Whether what came so far can be continued.
        counted: Whether the engine has told the tokens of all that came.
        begun: Where the engine that computes has begun.
        silent: Tokens that came alone and without any text, by their number: parts of characters, and special ones.
    """

    held_back: int = 0
    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    told: int = 0
    finish_reason: str | None = None
    resumable: bool = True
    counted: bool = True
    silent: list[int] = field(default_factory=list)
    begun: Point = BEGINNING
    _parts: list[str] = field(default_factory=list)
    _points: list[Point] = field(default_factory=lambda: [BEGINNING])
    _spoken: bool = False  # the engine that computes has sent text
    _kept: bytearray = field(default_factory=bytearray)  # texts and ids of plain events that are not looked at yet
    _after: list[Chunk] = field(default_factory=list)  # chunks that came after those

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def point(self) -> Point:
        """Return the last point of which all text has come."""
        return next(point for point in reversed(self._points) if point.characters <= self.told)

    @property
    def settled(self) -> bool:
        """Tell whether nothing is kept back at the last such point, and all that came was the text up to there."""
        return self.point.characters == self.told and not (self.held_back and self._spoken)

    def keep(self, texts: PlainTexts) -> None:
        """Note plain events; what they hold is looked at by ``catch_up``."""
        if self._after:
            self.catch_up()
        for text, ids in texts:
            self._kept += b"%b\t%b\n" % (text, ids)

    def catch_up(self) -> None:
        """Look at what was noted, so that everything here holds for all that came."""
        kept, after = bytes(self._kept), self._after
        self._kept, self._after = bytearray(), []
        for line in kept.splitlines():
            text, _, ids = line.partition(b"\t")
            try:
                self._add(read_json(b'"%b"' % text), read_json(b"[%b]" % ids))
            except ValueError:  # the ids are none
                self._add(read_json(b'"%b"' % text), ())
        for chunk in after:
            self.note(chunk)

    def note(self, chunk: Chunk) -> None:
        if self._kept:
            self._after.append(chunk)
            return
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
        if chunk.other:  # not text that could be gone on with
            self.close(counted=bool(chunk.token_ids))
        self._add(chunk.text, chunk.token_ids)

    def _add(self, text: str, token_ids: Sequence[int]) -> None:
        alone = len(token_ids) == 1
        self.output_ids += token_ids
        if text:
            while len(self._points) > 1 and self._points[1].characters <= self.told:
                del self._points[0]
            self._parts.append(text)
            self.told += len(text)
            self._spoken = True
            if alone:
                self._points.append(Point(len(self.output_ids), self.told + self.held_back))
            elif not token_ids:
                self.close(counted=False)
        elif alone and (self._spoken or not self.held_back):
            self.silent.append(len(self.output_ids) - 1)

    def close(self, *, counted: bool) -> None:
        """Note that what came cannot be continued: no text, or of unknown tokens; ``counted``: these were told."""
        self.resumable, self.counted = False, self.counted and counted

    def rest_at(self, tokens: int, text: str) -> None:
        """Go back, or on, to where the text of so many tokens is known; another engine begins there."""
        del self.output_ids[tokens:]
        self._parts, self.told = [text], len(text)
        self.begun = Point(tokens, len(text))
        self._points, self.silent, self._spoken = [self.begun], [], False

    def stop_at(self, characters: int) -> None:
        """End the answer with the token that completed a stop string; those after it were computed for nothing."""
        last = next((point.tokens for point in self._points if point.characters >= characters), len(self.output_ids))
        del self.output_ids[last:]
        self.finish_reason = "stop"

    @property
    def usage(self) -> dict[str, int]:
        """Return the token counts, as an engine gives them; empty where the engine did not tell all of its tokens."""
        prompt, output = len(self.prompt_ids), len(self.output_ids)
        counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        return counts if prompt and self.counted else {}


@dataclass(frozen=True, slots=True)
class Resumption:
    """What continuing a request's answer needs of the request.

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
        given = self.sampling.get("stop") or ()
        return (given,) if isinstance(given, str) else tuple(s for s in given if isinstance(s, str) and s)

    @property
    def includes_stop(self) -> bool:
        """Tell whether the string that ends the answer belongs to it."""
        return as_boolean(self.sampling.get("include_stop_str_in_output"))

    @property
    def held_back(self) -> int:
        """Return the characters that an engine keeps back, as they may begin a stop string."""
        return 0 if self.includes_stop else max(map(len, self.stops), default=1) - 1

    @property
    def min_tokens(self) -> int:
        """Return the tokens before which no stop string counts."""
        return as_integer(self.sampling.get("min_tokens")) or 0
