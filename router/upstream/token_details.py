"""What an answer's token counts are made of: of the prompt what was cached, of the output what is the model's thought."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from router.upstream.sse import Chunk


class TokenDetails(NamedTuple):
    """What an engine tells of an answer's tokens besides their number; None: it does not tell.

    Attributes:
        cached: Tokens of the prompt that its prefix cache held.
        cache_written: Tokens of the prompt that it wrote to its prefix cache.
        reasoning: Tokens of the output that are the model's reasoning.
        tool: Tokens that the engine's own tools returned to the model.
    """

    cached: int | None = None
    cache_written: int | None = None
    reasoning: int | None = None
    tool: int | None = None


NO_DETAILS = TokenDetails()


def token_details_of(usage: Mapping[str, Any]) -> TokenDetails:
    """Read the details of token counts, which have the names of vLLM's chat completions here."""
    of_prompt = usage.get("prompt_tokens_details")
    of_output = usage.get("completion_tokens_details")
    if of_prompt is None and of_output is None:
        return NO_DETAILS
    return TokenDetails(
        cached=_count_in(of_prompt, "cached_tokens"),
        cache_written=_count_in(of_prompt, "created_cache_tokens"),
        reasoning=_count_in(of_output, "reasoning_tokens"),
        tool=_count_in(of_output, "tool_output_tokens"),
    )


def _count_in(details: Any, name: str) -> int | None:
    """Return a count among details; None: there is none, or what stands there is no count."""
    if not isinstance(details, dict):
        return None
    count = details.get(name)
    if isinstance(count, int) and count >= 0:
        return count
    return None


class ThoughtTokens:
    """Counts the tokens of the model's reasoning in a stream whose engine tells each token's id.

    Tokens belong to the next event with output, because a part of a character has no text of its own. The tag that ends a
    thought has none either: it comes before the answer's first text, and is not counted. The number is unknown if an event
    of reasoning came without its tokens, or if that tag may have come together with the thought's last text.

    Attributes:
        is_open: Whether the thought goes on, as far as is known.
    """

    __slots__ = (
        "_is_known",
        "_last_event_tokens",
        "_tokens",
        "_waiting_tokens",
        "is_open",
    )

    def __init__(self) -> None:
        self._tokens = 0
        self._waiting_tokens = 0  # told, and not yet known to be reasoning
        self._last_event_tokens = 0
        self._is_known = True
        self.is_open = False

    @property
    def count(self) -> int | None:
        """Return the number of tokens so far; None: it is not known."""
        return self._tokens if self._is_known else None

    def receive(self, chunk: Chunk, latest_tokens: int) -> None:
        """Count an event's tokens if they are reasoning. Other output ends the thought, and reasoning begins it again.

        ``latest_tokens`` were told with this event, or just before it.
        """
        waiting_tokens = latest_tokens
        if self.is_open:
            waiting_tokens = self._waiting_tokens + len(chunk.token_ids)
        if chunk.reasoning:
            self._tokens += waiting_tokens
            self._last_event_tokens = waiting_tokens
            self._waiting_tokens = 0
            self.is_open = not chunk.text
            if not waiting_tokens or chunk.text:
                self._is_known = False
            return
        self._waiting_tokens = waiting_tokens
        if chunk.text or chunk.other:
            self.is_open = False
            if self._last_event_tokens > 1:
                self._is_known = False
