"""Cuts a prompt that fits no context, where its caller has asked for it: oldest messages, or the middle of a text.

Counts are the model's own, as those that routing decides from. A prompt that cannot be cut far enough stays as it is, and
is refused as too long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from classifier import TokenCounter
from router.api.asgi import apart
from router.api.openai_prompt import (
    PART_TOKENS,
    SYSTEM_ROLES,
    calls_in,
    is_ids,
    other_parts,
    text_of,
)
from router.pipeline.pipeline import Pipeline
from router.pipeline.request import Call, Truncate
from router.policy.decide import longest_context_for
from tiers.spec import TemplateTokens

# tokens that a cut text may be shorter than it could be: to come nearer takes many more counts
CLOSE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Cutter:
    how: Truncate
    original_tokens: int  # what the longest prompt had as it came
    room: int  # tokens that the prompt may have
    counter: TokenCounter
    template: TemplateTokens

    def text(self, whole_text: str, max_tokens: int) -> str:
        """Return the end of a text, or its beginning and end, with at most so many tokens."""

        def part_of_text(chars: int) -> str:
            if self.how == "oldest":
                return whole_text[len(whole_text) - chars :]
            end_chars = chars // 2
            return (
                whole_text[: chars - end_chars]
                + whole_text[len(whole_text) - end_chars :]
            )

        def count(chars: int) -> int:
            return self.counter.count(part_of_text(chars))

        return part_of_text(
            _most_chars(
                count,
                len(whole_text),
                max_tokens,
                all_tokens=self.counter.count(whole_text),
            )
        )

    def ids(self, token_ids: list[int]) -> list[int]:
        """Return the last token ids that fit, or the first and last ones."""
        if len(token_ids) <= self.room:
            return token_ids
        end_tokens = self.room if self.how == "oldest" else self.room // 2
        return (
            token_ids[: self.room - end_tokens]
            + token_ids[len(token_ids) - end_tokens :]
        )

    def chat(
        self, messages: Sequence[dict[str, Any]], tool_tokens: int
    ) -> list[dict[str, Any]] | None:
        """Return a chat that fits together with its tools; None: it cannot be cut so far."""
        sizes = [self._size(message) for message in messages]
        if self.how == "oldest":
            return self._without_oldest(messages, sizes, tool_tokens)
        return self._with_shorter_text(messages, sizes, tool_tokens)

    def prompt(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]] | None:
        """Return one prompt, and perhaps a system prompt before it, that fit; None: it cannot be cut so far."""
        *system_messages, user_message = map(dict, messages)
        system_tokens = sum(
            self.counter.count(message["content"]) for message in system_messages
        )
        template_tokens = self._template_tokens(messages[0], len(messages))
        text = self.text(
            user_message["content"], self.room - system_tokens - template_tokens
        )
        if not text:
            return None
        return [*system_messages, {**user_message, "content": text}]

    def _without_oldest(
        self, messages: Sequence[dict[str, Any]], sizes: Sequence[int], tool_tokens: int
    ) -> list[dict[str, Any]] | None:
        """Drop the oldest messages, a unit at a time, until the others fit."""
        dropped_numbers: set[int] = set()
        tokens = sum(sizes) + tool_tokens
        first_kept = 0
        for unit in (range(0), *_droppable(messages)):  # nothing is dropped at first
            for message_number in unit:
                if messages[message_number].get("role") not in SYSTEM_ROLES:
                    dropped_numbers.add(message_number)
                    tokens -= sizes[message_number]
            while first_kept in dropped_numbers:
                first_kept += 1
            template_tokens = self._template_tokens(
                messages[first_kept], len(messages) - len(dropped_numbers)
            )
            if tokens + template_tokens <= self.room:
                return [
                    message
                    for message_number, message in enumerate(messages)
                    if message_number not in dropped_numbers
                ]
        return None

    def _with_shorter_text(
        self, messages: Sequence[dict[str, Any]], sizes: Sequence[int], tool_tokens: int
    ) -> list[dict[str, Any]] | None:
        """Cut the middle out of the message with the longest text; the last of them if several are as long."""
        longest_number: int | None = None
        longest_tokens = 0
        for message_number, message in enumerate(messages):
            is_system_message = message.get("role") in SYSTEM_ROLES
            if is_system_message or not isinstance(message.get("content"), str):
                continue
            text_tokens = self.counter.count(message["content"])
            if longest_number is None or text_tokens >= longest_tokens:
                longest_number = message_number
                longest_tokens = text_tokens
        if longest_number is None:
            return None
        all_tokens = (
            sum(sizes) + tool_tokens + self._template_tokens(messages[0], len(messages))
        )
        excess_tokens = all_tokens - self.room
        if excess_tokens >= longest_tokens:
            return None
        shorter_text = self.text(
            messages[longest_number]["content"], longest_tokens - max(excess_tokens, 0)
        )
        kept_messages = list(messages)
        kept_messages[longest_number] = {
            **messages[longest_number],
            "content": shorter_text,
        }
        return kept_messages

    def _template_tokens(self, first: Mapping[str, Any], message_count: int) -> int:
        """Return the tokens that the chat template adds to a chat, by its first message."""
        return self.template.conversation(
            message_count, system=first.get("role") in SYSTEM_ROLES
        )

    def _size(self, message: dict[str, Any]) -> int:
        """Return the tokens of a message without the chat template."""
        content = message.get("content")
        text_tokens = self.counter.count(text_of(content))
        call_tokens = self.counter.count(calls_in(message))
        return text_tokens + call_tokens + PART_TOKENS * len(other_parts(content))

    def disclosed(self, shorter_call: Call, dropped_messages: int) -> str:
        """Return what was cut, for people: ``shorter_call`` is the call after the cut."""
        kept_tokens = shorter_call.query(
            shorter_call.prompt.classify(self.counter), self.template
        ).prompt_tokens
        dropped_tokens = self.original_tokens - kept_tokens
        return f"{self.how}; dropped_tokens={dropped_tokens}; dropped_messages={dropped_messages}"


async def cutter_for(call: Call, pipeline: Pipeline, size: int) -> Cutter | None:
    """Return what cuts a call, whose body has so many bytes; None: it fits a tier that may serve it, or none may."""
    truncate = call.options.truncate
    template = pipeline.fleet.template
    features = await apart(size, call.prompt.classify, pipeline.counter)
    query = call.query(features, template)
    room = longest_context_for(query, pipeline.fleet.snapshot()) - query.max_tokens
    if truncate is None or room <= 0 or query.prompt_tokens <= room:
        return None
    return Cutter(
        truncate, query.prompt_tokens, room, counter=pipeline.counter, template=template
    )


def cut_prompts(prompt: Any, cutter: Cutter) -> Any:
    """Cut what a completion's prompt may be: a text, token ids, or several of them, of which each is cut by itself."""
    if isinstance(prompt, str):
        if cutter.counter.count(prompt) <= cutter.room:
            return prompt
        return cutter.text(prompt, cutter.room)
    if is_ids(prompt):
        return cutter.ids(prompt)
    if isinstance(prompt, list):
        return [cut_prompts(item, cutter) for item in prompt]
    return prompt


def _most_chars(
    count_tokens: Callable[[int], int], chars: int, max_tokens: int, *, all_tokens: int
) -> int:
    """Return how many of a text's characters have at most ``max_tokens``, and at most ``CLOSE_TOKENS`` fewer if possible.

    ``count_tokens`` returns the tokens of so many characters. The search halves what is left, and begins where the tokens
    would end if they were all as long as the text's on average.
    """
    if max_tokens <= 0:
        return 0
    fitting_chars = 0  # so many characters fit
    most_chars = chars  # no more than these fit
    probed_chars = chars * max_tokens // max(all_tokens, 1)
    while most_chars > fitting_chars:
        probed_chars = min(max(probed_chars, fitting_chars + 1), most_chars)
        tokens = count_tokens(probed_chars)
        if tokens <= max_tokens:
            fitting_chars = probed_chars
            if max_tokens - tokens <= CLOSE_TOKENS:
                break
        else:
            most_chars = probed_chars - 1
        probed_chars = (fitting_chars + most_chars + 1) // 2
    return fitting_chars


def _droppable(messages: Sequence[dict[str, Any]]) -> list[range]:
    """Return the messages that may be dropped, oldest first, in units of which none is dropped in part.

    Before the last message of the user these are turns: a message of the user with all that answers it, so that the chat
    still begins with the user. After it they are calls of tools with their results; the last of those stays. Messages of
    the system and of developers among them stay too.
    """
    roles = [message.get("role") for message in messages]
    first_of_chat = _first_of_chat(roles)
    last_of_user = max(
        (message_number for message_number, role in enumerate(roles) if role == "user"),
        default=first_of_chat - 1,
    )
    turn_starts = [
        message_number
        for message_number in range(first_of_chat, last_of_user)
        if message_number == first_of_chat or roles[message_number] == "user"
    ]
    first_call = last_of_user + 1
    call_starts = [
        message_number
        for message_number in range(first_call, len(roles))
        if message_number == first_call
        or roles[message_number] not in {"tool", "function"}
    ]
    return [*_ranges([*turn_starts, last_of_user]), *_ranges(call_starts)]


def _first_of_chat(roles: Sequence[Any]) -> int:
    """Return the number of the first message that is neither the system's nor a developer's."""
    for number, role in enumerate(roles):
        if role not in SYSTEM_ROLES:
            return number
    return len(roles)


def _ranges(starts: Sequence[int]) -> list[range]:
    """Return the ranges between starts; what begins at the last one is none of them."""
    return [range(start, end) for start, end in pairwise(starts)]
