"""Cuts a prompt that fits no context, where its caller has asked for it: oldest messages, or the middle of a text.

Counts are the model's own, as those that routing decides from. What cannot be cut enough stays whole, and is refused as
too long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from classifier import TokenCounter
from router.api.asgi import apart
from router.api.openai_prompt import PART_TOKENS, SYSTEM_ROLES, is_ids, other_parts, text_of
from router.pipeline.pipeline import Pipeline
from router.pipeline.request import Call, Truncate
from router.policy.decide import longest_context
from tiers.spec import TemplateTokens

CLOSE = 4  # tokens that a cut text may be shorter than it could be: nearer takes many more counts


@dataclass(frozen=True, slots=True)
class Cutter:
    how: Truncate
    before: int  # tokens of its longest prompt as it came
    room: int  # tokens that its prompt may have
    counter: TokenCounter
    template: TemplateTokens

    def text(self, text: str, most: int) -> str:

        def piece(chars: int) -> str:
            if self.how == "oldest":
                return text[len(text) - chars :]
            return text[: chars - chars // 2] + text[len(text) - chars // 2 :]

        return piece(
            _largest(lambda chars: self.counter.count(piece(chars)), len(text), most, self.counter.count(text))
        )

    def chat(self, messages: Sequence[dict[str, Any]], others: int) -> list[dict[str, Any]] | None:
        """Return a chat that fits beside ``others``, the tokens of tools; None: it cannot be cut so far."""
        sizes = [self._size(message) for message in messages]
        cut = self._without_oldest if self.how == "oldest" else self._shorter
        return cut(messages, sizes, others)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
        """Return one prompt, and perhaps a system prompt before it, that fit; None: it cannot be cut so far."""
        *before, last = map(dict, messages)
        beside = sum(self.counter.count(message["content"]) for message in before)
        text = self.text(last["content"], self.room - beside - self._added((*before, last)[0], len(before) + 1))
        return [*before, {**last, "content": text}] if text else None

    def _without_oldest(
        self, messages: Sequence[dict[str, Any]], sizes: Sequence[int], others: int
    ) -> list[dict[str, Any]] | None:
        dropped: set[int] = set()
        tokens, first = sum(sizes) + others, 0
        for unit in ((), *_droppable(messages)):
            for number in unit:
                if messages[number].get("role") not in SYSTEM_ROLES:
                    dropped.add(number)
                    tokens -= sizes[number]
            while first in dropped:
                first += 1
            if tokens + self._added(messages[first], len(messages) - len(dropped)) <= self.room:
                return [message for number, message in enumerate(messages) if number not in dropped]
        return None

    def _shorter(
        self, messages: Sequence[dict[str, Any]], sizes: Sequence[int], others: int
    ) -> list[dict[str, Any]] | None:
        texts = [
            (self.counter.count(m["content"]), n)
            for n, m in enumerate(messages)
            if isinstance(m.get("content"), str) and m.get("role") not in SYSTEM_ROLES
        ]
        if not texts:
            return None
        tokens, number = max(texts)
        excess = sum(sizes) + others + self._added(messages[0], len(messages)) - self.room
        if excess >= tokens:
            return None
        made = list(messages)
        made[number] = {**made[number], "content": self.text(made[number]["content"], tokens - max(excess, 0))}
        return made

    def _added(self, first: Mapping[str, Any], messages: int) -> int:
        return self.template.conversation(messages, system=first.get("role") in SYSTEM_ROLES)

    def _size(self, message: dict[str, Any]) -> int:
        calls = "".join([str(message[key]) for key in ("tool_calls", "function_call") if message.get(key)])
        content = message.get("content")
        return (
            self.counter.count(text_of(content)) + self.counter.count(calls) + PART_TOKENS * len(other_parts(content))
        )

    def disclosed(self, call: Call, messages: int) -> str:
        left = call.query(call.prompt.classify(self.counter), self.template).prompt_tokens
        return f"{self.how}; dropped_tokens={self.before - left}; dropped_messages={messages}"


async def cutter_for(call: Call, pipeline: Pipeline, size: int) -> Cutter | None:
    """Return what cuts a call, whose body has so many bytes; None: a tier that may serve it holds it."""
    how, template = call.options.truncate, pipeline.fleet.template
    query = call.query(await apart(size, call.prompt.classify, pipeline.counter), template)
    room = longest_context(query, pipeline.fleet.snapshot()) - query.max_tokens
    if how is None or room <= 0 or query.prompt_tokens <= room:
        return None
    return Cutter(how, query.prompt_tokens, room, pipeline.counter, template)


def cut_prompts(given: Any, cutter: Cutter) -> Any:
    if isinstance(given, str):
        return cutter.text(given, cutter.room) if cutter.counter.count(given) > cutter.room else given
    if is_ids(given):
        if len(given) <= cutter.room:
            return given
        end = cutter.room if cutter.how == "oldest" else cutter.room // 2
        return [*given[: cutter.room - end], *(given[-end:] if end else ())]
    return [cut_prompts(one, cutter) for one in given] if isinstance(given, list) else given


def _largest(tokens: Callable[[int], int], chars: int, most: int, all_tokens: int) -> int:
    low, high = 0, chars
    probe = chars * max(most, 0) // max(all_tokens, 1)
    while most > 0 and high > low:
        probe = min(max(probe, low + 1), high)
        found = tokens(probe)
        if found <= most:
            low = probe
            if most - found <= CLOSE:
                break
        else:
            high = probe - 1
        probe = (low + high + 1) // 2
    return low


def _droppable(messages: Sequence[dict[str, Any]]) -> list[range]:
    """Return the messages that may be dropped, oldest first, in units that are dropped whole.

    Before the last message of the user these are turns: a message of the user with all that answers it, so that the chat
    still begins with the user. After it they are calls of tools with their results; the last of those stays. Messages of
    the system and of developers among them stay too.
    """
    roles = [message.get("role") for message in messages]
    head = next((n for n, role in enumerate(roles) if role not in SYSTEM_ROLES), len(roles))
    last = max((n for n, role in enumerate(roles) if role == "user"), default=head - 1)
    turns = [n for n in range(head, last) if n == head or roles[n] == "user"]
    steps = [n for n in range(last + 1, len(roles)) if n == last + 1 or roles[n] not in {"tool", "function"}]
    return [range(start, end) for bounds in ([*turns, last], steps) for start, end in pairwise(bounds)]
