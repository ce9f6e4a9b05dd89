"""The prompt of ``/generate``, as routing reads it and as the engine is asked it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.api.openai_prompt import last_turn
from router.pipeline.request import PromptText, chat_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from classifier import TokenCounter
    from router.api.generate_body import GenerateBody

    Messages = Sequence[dict[str, str]]


def messages_of(body: GenerateBody) -> Messages:
    """Return what the engine is asked: goes through the model's own chat template there."""
    if body.messages is not None:
        return [{"role": message.role, "content": message.content} for message in body.messages]
    assert body.prompt is not None
    system = [] if body.system_prompt is None else [{"role": "system", "content": body.system_prompt}]
    return [*system, {"role": "user", "content": body.prompt}]


def read_messages(messages: Messages, counter: TokenCounter) -> PromptText:
    """Return what routing reads of a chat."""
    *before, last = messages
    if all(message["role"] == "system" for message in before):  # a prompt, which is counted when it is classified
        tokens = sum(counter.count(message["content"]) for message in before)
        parts = [chat_part("system", message["content"], tokens) for message in before]
        return PromptText(
            last["content"],
            system_tokens=tokens,
            messages=len(messages),
            system=bool(before),
            parts=(*parts, chat_part("user", last["content"], -1)),
        )
    texts = [message["content"] for message in messages]
    counted = [chat_part(m["role"], text, counter.count(text)) for m, text in zip(messages, texts, strict=True)]
    total = sum(part.tokens for part in counted)
    return PromptText(
        last_turn(list(messages), texts),
        prompt_tokens=total,
        all_tokens=total,
        messages=len(messages),
        system=messages[0]["role"] == "system",
        parts=tuple(counted),
    )
