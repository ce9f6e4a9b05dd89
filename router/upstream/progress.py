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
from router.upstream.sse import Chunk


class Point(NamedTuple):
    """A point in an answer where its text is known: so many tokens have so many characters, and end no character halfway."""

    tokens: int
    characters: int


BEGINNING = Point(0, 0)
_no_ids = partial(array, "I")  # 4 bytes a token


@dataclass(slots=True)
class Progress:
    """How far an answer has come: what another engine needs to go on from there.

    As vLLM's ``v1/engine/detokenizer.py`` works, an engine keeps a fixed number of characters back while they may begin a
    stop string. So each chunk of text also tells how long the text of all tokens is by then, and once so many characters
    more have come, that text itself is known. A token that comes alone and with text has ended a character.
    """

    held_back: int = 0  # characters that an engine keeps back
    # the prompt as the engine read it; empty for as long as it is not known
    prompt_ids: array[int] = field(default_factory=_no_ids)
    output_ids: array[int] = field(default_factory=_no_ids)  # of all tokens that came
    told: int = 0  # characters that came
    finish_reason: str | None = None  # once it is known
    continuable: bool = True  # whether what came so far can be continued
    counted: bool = True  # whether the engine has told the tokens of all that came
    # tokens that came alone and without any text, by their number: parts of characters, and special ones
    silent: list[int] = field(default_factory=list)
    begun: Point = BEGINNING  # where the engine that computes has begun
    _written: StringIO = field(default_factory=StringIO)
    _points: list[tuple[int, int]] = field(default_factory=partial(list, (BEGINNING,)))  # as ``Point``
    _spoken: bool = False  # the engine that computes has sent text

    @property
    def text(self) -> str:
        return self._written.getvalue()

    @property
    def point(self) -> Point:
        return Point(*next(point for point in reversed(self._points) if point[1] <= self.told))

    @property
    def settled(self) -> bool:
        """Tell whether nothing is kept back at the last such point, and all that came was the text up to there."""
        return self.point.characters == self.told and not (self.held_back and self._spoken)

    def note(self, chunks: Iterable[Chunk]) -> None:
        points, output_ids = self._points, self.output_ids
        for chunk in chunks:
            if chunk.prompt_ids and not self.prompt_ids:  # what another engine continues from is no prompt
                self.prompt_ids = array("I", chunk.prompt_ids)
            if chunk.finish_reason is not None:
                self.finish_reason = chunk.finish_reason
            text, token_ids = chunk.text, chunk.token_ids
            if chunk.other:  # not text that could be continued
                self.close(counted=bool(token_ids))
            alone = len(token_ids) == 1
            output_ids.extend(token_ids)
            if text:
                while len(points) > 1 and points[1][1] <= self.told:
                    del points[0]
                self._written.write(text)
                self.told += len(text)
                self._spoken = True
                if alone:
                    points.append((len(output_ids), self.told + self.held_back))
                elif not token_ids:
                    self.close(counted=False)
            elif alone and (self._spoken or not self.held_back):
                self.silent.append(len(output_ids) - 1)

    def close(self, *, counted: bool) -> None:
        """Note that what came cannot be continued: no text, or of unknown tokens; ``counted``: these were told."""
        self.continuable, self.counted = False, self.counted and counted

    def rest_at(self, tokens: int, text: str) -> None:
        """Go back, or on, to where the text of so many tokens is known; another engine begins there."""
        del self.output_ids[tokens:]
        self._written = StringIO()
        self.told = self._written.write(text)
        self.begun = Point(tokens, len(text))
        self._points, self.silent, self._spoken = [self.begun], [], False

    def stop_at(self, characters: int) -> None:
        """End the answer with the token that completed a stop string; those after it were computed for nothing."""
        last = next((tokens for tokens, told in self._points if told >= characters), len(self.output_ids))
        del self.output_ids[last:]
        self.finish_reason = "stop"

    @property
    def usage(self) -> dict[str, int]:
        """Return the token counts, as an engine gives them; empty where the engine did not tell all of its tokens."""
        prompt, output = len(self.prompt_ids), len(self.output_ids)
        counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        return counts if prompt and self.counted else {}


class Continuable(Struct, frozen=True):
    max_tokens: int | None  # output tokens in all; None: as many as the context leaves
    sampling: Mapping[str, Any]  # members of a completion's body that say how tokens are chosen
    priority: int  # for vLLM's scheduler, lower first

    @property
    def stops(self) -> tuple[str, ...]:
        given = self.sampling.get("stop") or ()
        return (given,) if isinstance(given, str) else tuple(s for s in given if isinstance(s, str) and s)

    @property
    def includes_stop(self) -> bool:
        return as_boolean(self.sampling.get("include_stop_str_in_output"))

    @property
    def held_back(self) -> int:
        """Return the characters that an engine keeps back, as they may begin a stop string."""
        if not self.sampling.get("stop") or self.includes_stop:
            return 0
        return max(map(len, self.stops), default=1) - 1

    @property
    def min_tokens(self) -> int:
        return as_integer(self.sampling.get("min_tokens")) or 0
