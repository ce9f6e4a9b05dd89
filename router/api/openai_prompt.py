"""Reads the text to classify and its token count from an OpenAI request, which is neither changed nor checked.

Malformed parts read as empty: the engine gets the body unchanged and says best what is wrong with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from classifier import TokenCounter, ToolUse
from router.pipeline.request import RESULT_ROLES, PromptText, chat_part
from router.upstream.json_object import JsonObject
from tiers.prefix_memory import Part

# a shorter last turn ("and now in Rust?") is read together with the user's previous turn
SHORT_CHARS = 200
LATEST_TURNS = 2
# What agents put into messages of the user, between tags of these names, with every turn: of Claude Code, Codex, Cline.
ADDED_BY_AGENTS = ("system-reminder", "environment_context", "environment_details")
_ADDED_STARTS = tuple(f"<{name}>" for name in ADDED_BY_AGENTS)
_ADDED = re.compile(rf"<({'|'.join(ADDED_BY_AGENTS)})>.*?</\1>", re.DOTALL)
# assumed for each part that is not text: no tier's tokenizer can count those
PART_TOKENS = 1000
SYSTEM_ROLES = ("system", "developer")
# Known types of parts. Any other name is the caller's own text, which is not recorded.
KINDS = (
    "image_url",
    "input_audio",
    "audio_url",
    "video_url",
    "file",
    "input_image",
    "input_file",  # the Responses API's
    "image",
    "document",  # Anthropic's
)


def read_chat(document: JsonObject, counter: TokenCounter) -> PromptText:
    """Read the body of a chat: its messages, and what templates write beside them."""
    messages = _messages_in(document)
    texts = [text_of(message.get("content")) for message in messages]
    turn = last_turn(messages, texts)
    turn_tokens = None
    # Templates write what stands beside the messages before them, or after the system prompt.
    parts = [Part(text, counter.count(text)) for text in beside(document)]
    for message, text in zip(messages, texts, strict=True):
        text_tokens = counter.count(text)
        if text is turn:
            turn_tokens = text_tokens
        parts.append(_chat_part_of(message, text, text_tokens, counter))
    other_kinds = _other_kinds(messages)
    counted_tokens = sum([part.tokens for part in parts])
    prompt_tokens = counted_tokens + PART_TOKENS * len(other_kinds)
    return PromptText(
        text=turn,
        text_tokens=turn_tokens,
        prompt_tokens=prompt_tokens,
        all_tokens=prompt_tokens,
        messages=len(messages),
        system=bool(messages) and messages[0].get("role") in SYSTEM_ROLES,
        other_parts=tuple(dict.fromkeys(other_kinds)),
        parts=() if other_kinds else tuple(parts),
        tool_use=_tool_use_of(document, messages),
        salt=str(document.get("cache_salt", "")),
    )


def _tool_use_of(
    document: JsonObject, messages: Sequence[Mapping[str, Any]]
) -> ToolUse | None:
    if messages and messages[-1].get("role") in RESULT_ROLES:
        return ToolUse.RESULT
    return ToolUse.OFFERED if offers_tools(document) else None


def offers_tools(document: JsonObject) -> bool:
    """Tell whether a request of any of the APIs has tools that its answer may call."""
    for tools, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        offered = document.get(tools)
        if isinstance(offered, list) and offered:
            return not _is_none(document.get(choice))
    return False


def _is_none(tool_choice: Any) -> bool:
    """Tell whether a choice of tools allows none; it is a word, or an object with it as in Anthropic's API."""
    if isinstance(tool_choice, dict):
        tool_choice = tool_choice.get("type")
    return bool(tool_choice == "none")


def _chat_part_of(
    message: Mapping[str, Any], text: str, text_tokens: int, counter: TokenCounter
) -> Part:
    """Return a message as a part of the prompt, together with its calls of tools."""
    tool_calls = calls_in(message)
    tokens = text_tokens
    if tool_calls:
        tokens += counter.count(tool_calls)
    return chat_part(message.get("role"), text + tool_calls, tokens)


def _messages_in(document: JsonObject) -> list[dict[str, Any]]:
    messages = document.get("messages")
    if not isinstance(messages, list):
        return []
    return [message for message in messages if isinstance(message, dict)]


def _other_kinds(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the kinds of all parts of a chat that are not text."""
    kinds: list[str] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            kinds += other_parts(content)
    return kinds


def calls_in(message: Mapping[str, Any]) -> str:
    """Return the calls of tools in a message, which a model reads as well."""
    calls = ""
    for key in ("tool_calls", "function_call"):
        if message.get(key):
            calls += str(message[key])
    return calls


def beside(document: JsonObject) -> list[str]:
    """Return what a chat's template writes beside the messages: tools, functions and documents, as JSON."""
    return [
        document.text_of(key)
        for key in ("tools", "functions", "documents")
        if document.get(key)
    ]


def read_completion(document: JsonObject, counter: TokenCounter) -> PromptText:
    """Read the body of a completion: text, texts, token ids, or several lists of them."""
    prompt = document.get("prompt")
    prompts = [prompt]
    if isinstance(prompt, list) and not is_ids(prompt):
        prompts = prompt
    texts = [item for item in prompts if isinstance(item, str)]
    id_lists = [item for item in prompts if is_ids(item)]
    token_counts = [counter.count(text) for text in texts]
    token_counts += map(len, id_lists)
    other_kinds: tuple[str, ...] = ()
    if id_lists and not texts:
        other_kinds = ("token ids",)
    return PromptText(
        text="\n\n".join(texts),
        prompt_tokens=max(token_counts, default=0),
        all_tokens=sum(token_counts),
        other_parts=other_kinds,
        prompts=max(len(token_counts), 1),
        parts=_first_prompt(texts, id_lists, token_counts),
        salt=str(document.get("cache_salt", "")),
    )


def _first_prompt(
    texts: list[str], id_lists: list[list[int]], token_counts: list[int]
) -> tuple[Part, ...]:
    """Return the first prompt of a completion as an engine reads it; nothing if there is none."""
    if texts:
        return (Part(texts[0], token_counts[0]),)
    if id_lists:
        return (Part(" ".join(map(str, id_lists[0])), token_counts[0]),)
    return ()


def last_turn(messages: Sequence[Mapping[str, Any]], texts: list[str]) -> str:
    """Return the text of the user's last turn, with that of the turn before it if it is short."""
    turns: list[list[str]] = [[]]
    for message, text in zip(messages, texts, strict=True):
        if message.get("role") == "user":
            turns[-1].append(text)
        elif message.get("role") == "assistant" and turns[-1]:
            turns.append([])
    latest: list[str] = []
    for turn in reversed(turns):
        user_words = _own_words("\n\n".join(turn))
        if user_words:
            latest.insert(0, user_words)
        if len(latest) == LATEST_TURNS or (latest and len(latest[0]) >= SHORT_CHARS):
            break
    if not latest:
        return "\n\n".join(texts[-1:])
    return "\n\n".join(latest)


def _own_words(text: str) -> str:
    """Return a user's text without what an agent has put into it for the model; the text itself where there is nothing."""
    # One character is found many times as fast as a tag, and most texts have none.
    if "<" in text and any(start in text for start in _ADDED_STARTS):
        return _ADDED.sub("", text).strip()
    return text


def text_of(content: Any) -> str:
    """Return the text of a message's content: a text, or a list of texts and of parts that may have one."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    texts = []
    for part in content:
        part_text = part
        if isinstance(part, dict):
            part_text = part.get("text")
        if isinstance(part_text, str):
            texts.append(part_text)
    return "\n".join(texts)


def other_parts(content: Any) -> list[str]:
    """Return the kinds of the parts of a message's content that are not text."""
    if not isinstance(content, list):
        return []
    kinds = [
        part.get("type")
        for part in content
        if isinstance(part, dict) and "text" not in part
    ]
    return [_known_kind(kind) for kind in kinds if kind != "text"]


def _known_kind(kind: Any) -> str:
    if kind in KINDS:
        return str(kind)
    return "other"


def is_ids(item: Any) -> bool:
    """Tell whether an item is a list of token ids."""
    return (
        isinstance(item, list)
        and bool(item)
        and all(isinstance(number, int) for number in item)
    )
