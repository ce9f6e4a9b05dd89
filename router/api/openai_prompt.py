"""Reads the text to classify and its token count from an OpenAI request, which is neither changed nor checked.

Malformed parts read as empty: the engine gets the body unchanged and reports best what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from classifier import TokenCounter
from router.pipeline.request import PromptText, chat_part
from router.upstream.json_object import JsonObject
from tiers.prefix_memory import Part

SHORT_CHARS = 200  # a shorter last turn ("and now in Rust?") is read together with the user's previous turn
PART_TOKENS = 1000  # assumed for each part that is not text: no tier's tokenizer can count those
SYSTEM_ROLES = ("system", "developer")
# Known types of parts. Any other name is the caller's own text, which is not recorded.
KINDS = (
    "image_url", "input_audio", "audio_url", "video_url", "file",
    "input_image", "input_file",  # of the Responses API
    "image", "document",  # Anthropic's
)  # fmt: skip


def read_chat(document: JsonObject, counter: TokenCounter) -> PromptText:
    given = document.get("messages")
    messages, texts, calls, others = [], list[str](), list[str](), list[str]()
    for message in given if isinstance(given, list) else ():
        if isinstance(message, dict):
            content = message.get("content")
            messages.append(message)
            texts.append(content if isinstance(content, str) else text_of(content))
            others += other_parts(content) if isinstance(content, list) else ()
            calls.append("".join([str(message.get(key) or "") for key in ("tool_calls", "function_call")]))
    # Templates write these first, or after the system prompt.
    parts = [Part(text, counter.count(text)) for text in beside(document)]
    turn, counted = last_turn(messages, texts), None
    for message, text, call in zip(messages, texts, calls, strict=True):
        tokens = counter.count(text)
        if text is turn:
            counted = tokens
        parts.append(chat_part(message.get("role"), text + call, tokens + counter.count(call) if call else tokens))
    tokens = sum([part.tokens for part in parts]) + PART_TOKENS * len(others)
    return PromptText(
        text=turn,
        text_tokens=counted,
        prompt_tokens=tokens,
        all_tokens=tokens,
        messages=len(messages),
        system=bool(messages) and messages[0].get("role") in SYSTEM_ROLES,
        other_parts=tuple(dict.fromkeys(others)),
        parts=() if others else tuple(parts),
        salt=str(document.get("cache_salt", "")),
    )


def beside(document: JsonObject) -> list[str]:
    return [document.text_of(key) for key in ("tools", "functions", "documents") if document.get(key)]


def read_completion(document: JsonObject, counter: TokenCounter) -> PromptText:
    """Read the body of a completion: text, texts, token ids, or several lists of them."""
    prompt = document.get("prompt")
    several = prompt if isinstance(prompt, list) and not is_ids(prompt) else [prompt]
    texts = [item for item in several if isinstance(item, str)]
    lists = [item for item in several if is_ids(item)]
    counts = [counter.count(text) for text in texts] + [len(item) for item in lists]
    ids = () if texts or not counts else ("token ids",)
    read = texts or [" ".join(map(str, item)) for item in lists[:1]]
    return PromptText(
        "\n\n".join(texts),
        max(counts, default=0),
        all_tokens=sum(counts),
        other_parts=ids,
        prompts=max(len(counts), 1),
        parts=tuple(map(Part, read[:1], counts[:1])),
        salt=str(document.get("cache_salt", "")),
    )


def last_turn(messages: Sequence[Mapping[str, Any]], texts: list[str]) -> str:
    turns: list[list[str]] = [[]]
    for message, text in zip(messages, texts, strict=True):
        if message.get("role") == "user":
            turns[-1].append(text)
        elif message.get("role") == "assistant" and turns[-1]:
            turns.append([])
    asked = ["\n\n".join(turn) for turn in turns if turn]
    if not asked:
        return "\n\n".join(texts[-1:])
    return "\n\n".join(asked[-2:]) if len(asked[-1]) < SHORT_CHARS else asked[-1]


def text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = [p if isinstance(p, str) else p.get("text") for p in content if isinstance(p, dict | str)]
    return "\n".join(part for part in parts if isinstance(part, str))


def other_parts(content: Any) -> list[str]:
    if not isinstance(content, list):
        return []
    kinds = [p.get("type") for p in content if isinstance(p, dict) and "text" not in p]
    return [kind if kind in KINDS else "other" for kind in kinds if kind != "text"]


def is_ids(item: Any) -> bool:
    return isinstance(item, list) and bool(item) and all(isinstance(number, int) for number in item)
