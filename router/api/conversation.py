"""Reads conversations of Anthropic's Messages API and OpenAI's Responses API, which are neither changed nor checked.

Malformed parts read as empty, as in ``openai_prompt``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from router.api.openai_prompt import PART_TOKENS, SYSTEM_ROLES, count, last_turn, other_parts, text_of
from router.pipeline.request import PromptText, chat_part
from tiers.prefix_memory import Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from classifier import TokenCounter
    from router.upstream.json_object import JsonObject

_ASIDE = {"tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking"}  # blocks that are no other part


@dataclass(slots=True)
class Conversation:
    """A conversation as a chat of texts.

    Attributes:
        turns: Messages with a role and a text, the system prompt first.
        extras: Further texts that are read: tools, calls of them, and what these returned.
        others: Kinds of parts that are not text.
    """

    turns: list[dict[str, Any]] = field(default_factory=list)
    extras: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def add(self, role: Any, text: str) -> None:
        """Add a message."""
        self.turns.append({"role": role, "content": text})

    @property
    def chat(self) -> Sequence[Any] | None:
        """Return it as a chat; None where that would not say all of it."""
        return None if self.extras or self.others else self.turns

    def prompt(self, counter: TokenCounter) -> PromptText:
        """Return what routing reads of it."""
        texts = [turn["content"] for turn in self.turns]
        parts = [chat_part(turn["role"], turn["content"], count(counter, turn["content"])) for turn in self.turns]
        parts += [Part(text, count(counter, text)) for text in self.extras]
        tokens = sum(part.tokens for part in parts) + PART_TOKENS * len(self.others)
        return PromptText(
            text=last_turn(self.turns, texts),
            prompt_tokens=tokens,
            all_tokens=tokens,
            messages=len(self.turns),
            system=bool(self.turns) and self.turns[0]["role"] in SYSTEM_ROLES,
            other_parts=tuple(dict.fromkeys(self.others)),
            parts=() if self.others else tuple(parts),
        )


def read_messages(document: JsonObject) -> Conversation:
    """Read the body of a message request. What tools returned is no turn of the user, though it has the user's role."""
    read = _begun(document, document.get("system"))
    for message in _objects(document.get("messages")):
        content = message.get("content")
        text, blocks = text_of(content), _objects(content)
        results = [block for block in blocks if block.get("type") == "tool_result"]
        read.add("tool" if results and not text else message.get("role"), text)
        read.extras += [text_of(block.get("content")) for block in results]
        read.extras += [str(block.get("input")) for block in blocks if block.get("type") == "tool_use"]
        parts = [block for block in blocks if str(block.get("type")) not in _ASIDE]
        for some in (parts, *(block.get("content") for block in results)):
            read.others += other_parts(some)
    return read


def read_input(document: JsonObject) -> Conversation:
    """Read the body of a request for a response."""
    read = _begun(document, document.get("instructions"))
    given = document.get("input")
    if isinstance(given, str):
        read.add("user", given)
    for item in _objects(given):
        if "role" in item:
            read.add(item["role"], text_of(item.get("content")))
            read.others += other_parts(item.get("content"))
        elif item.get("type") == "function_call":
            read.add("assistant", "")
            read.extras.append(str(item.get("arguments")))
        elif item.get("type") == "function_call_output":
            read.add("tool", "")
            read.extras.append(text_of(item.get("output")))
            read.others += other_parts(item.get("output"))
    return read


def _begun(document: JsonObject, system: Any) -> Conversation:
    read = Conversation()
    if text := text_of(system):
        read.add("system", text)
    if document.get("tools"):
        read.extras.append(document.text_of("tools"))
    return read


def _objects(items: Any) -> list[dict[str, Any]]:
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
