"""Ask a model that may think, and read its answer: its text, its thoughts and its tool calls.

An engine tells thoughts apart if it has a parser of reasoning (vLLM's field ``reasoning``, older ``reasoning_content``).
Without one they stand in the text, in the tags of the model's family. Some chat templates open the thought in the prompt:
then the text has only the closing tag, or none if the limit of tokens came first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from router.profiling.model_answer import ModelAnswer, ToolCall

if TYPE_CHECKING:
    from router.profiling.tasks import Task

CUT = "length"  # the finish reason of an answer that reached its limit of tokens


class ThinkingMode(StrEnum):
    """Whether a request asks the model to think."""

    OFF = "off"
    ON = "on"
    # the request says nothing, as most callers' do
    DEFAULT = "default"


class ThoughtTags(NamedTuple):
    """The marks around a thought in a text."""

    opening: str
    closing: str


# Those of the families that vLLM 0.32 has parsers of reasoning for (``vllm/reasoning``).
THOUGHT_TAGS = (
    ThoughtTags("<think>", "</think>"),
    ThoughtTags("<thinking>", "</thinking>"),
    ThoughtTags("<thought>", "</thought>"),
    ThoughtTags("<reasoning>", "</reasoning>"),
    ThoughtTags("<seed:think>", "</seed:think>"),
    ThoughtTags("[THINK]", "[/THINK]"),
    ThoughtTags("<|START_THINKING|>", "<|END_THINKING|>"),
    ThoughtTags("<|begin_of_thought|>", "<|end_of_thought|>"),
    ThoughtTags("◁think▷", "◁/think▷"),
    ThoughtTags("<|channel|>analysis<|message|>", "<|end|>"),
    ThoughtTags("<|channel>thought", "<channel|>"),
    ThoughtTags("Here is my thought process:", "Here is my response:"),
)
# How templates name the switch: Qwen3, GLM, SmolLM3 and others the first way, DeepSeek-V3.1, Granite and Kimi the second.
# A template ignores names that it does not know.
SWITCH_NAMES = ("enable_thinking", "thinking")


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """How an answer is asked for, beyond its task.

    Attributes:
        think_tokens: Tokens for thoughts, on top of the task's own limit. 0: the model does not think.
        mode: Whether the model is asked to think.
        begins_in_thought: The chat template opens the thought in the prompt and the engine does not tell reasoning apart,
            so that an answer's text begins within a thought.
        bounds_thoughts: The engine ends thoughts after ``think_tokens`` itself (vLLM's ``thinking_token_budget``).
            Engines whose model shows no reasoning refuse this.
    """

    think_tokens: int = 0
    mode: ThinkingMode = ThinkingMode.DEFAULT
    begins_in_thought: bool = False
    bounds_thoughts: bool = False


NO_THINKING = AnswerLimits()


class _SplitText(NamedTuple):
    """A text, taken apart at the tags of its thoughts."""

    thought: str
    answer: str
    has_open_thought: bool  # the thought has no end


def answer_body(task: Task, limits: AnswerLimits = NO_THINKING) -> dict[str, Any]:
    """Return the body of a chat completion that answers a task greedily, without model and priority."""
    body: dict[str, Any] = {
        "messages": list(task.messages),
        "max_tokens": task.max_tokens + _think_tokens(limits),
        "temperature": 0,
    }
    tools = getattr(task, "tools", ())
    if tools:
        body["tools"] = list(tools)
    body |= switch_fields(limits.mode)
    if limits.bounds_thoughts and _think_tokens(limits):
        body["thinking_token_budget"] = limits.think_tokens
    return body


def _think_tokens(limits: AnswerLimits) -> int:
    return 0 if limits.mode is ThinkingMode.OFF else limits.think_tokens


def switch_fields(mode: ThinkingMode) -> dict[str, Any]:
    """Return the fields of a chat's body that ask its model to think or not to; none by default."""
    if mode is ThinkingMode.DEFAULT:
        return {}
    is_on = mode is ThinkingMode.ON
    return {"chat_template_kwargs": dict.fromkeys(SWITCH_NAMES, is_on)}


def read_answer(
    response: Mapping[str, Any], limits: AnswerLimits = NO_THINKING
) -> ModelAnswer:
    """Read the first choice of a chat completion.

    Args:
        response: The engine's complete answer.
        limits: What ``answer_body`` was called with.
    """
    choice = response["choices"][0]
    message = choice["message"]
    content = message.get("content") or ""
    told_reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    begins_in_thought = (
        limits.begins_in_thought
        and limits.mode is not ThinkingMode.OFF
        and not told_reasoning
    )
    split = split_thought(content, begins_in_thought=begins_in_thought)
    reasoning = "\n".join(filter(None, (told_reasoning, split.thought)))
    finish_reason = choice.get("finish_reason")
    calls = _tool_calls(message.get("tool_calls") or ())
    is_cut_while_thinking = finish_reason == CUT and (
        split.has_open_thought
        or (bool(reasoning) and not split.answer and not calls)
        or _has_overlong_thought(response, reasoning, split.answer, limits)
    )
    # A model that stops within a thought that only the template has opened has answered: that is what the caller reads.
    is_unended_answer = (
        split.has_open_thought and begins_in_thought and finish_reason != CUT
    )
    return ModelAnswer(
        text=split.thought if is_unended_answer else split.answer,
        reasoning="" if is_unended_answer else reasoning,
        tool_calls=calls,
        finish_reason=finish_reason,
        is_cut_while_thinking=is_cut_while_thinking,
    )


def split_thought(text: str, *, begins_in_thought: bool = False) -> _SplitText:
    """Take a text apart at the tags of its thoughts.

    Args:
        text: The text of an answer.
        begins_in_thought: The prompt has opened a thought, so that the text begins within it.
    """
    start = text.lstrip()
    for tags in THOUGHT_TAGS:
        if start.startswith(tags.opening):
            return _split_at_end(start.removeprefix(tags.opening), tags)
    for tags in THOUGHT_TAGS:
        before, closing, after = text.partition(tags.closing)
        # A closing tag alone ends a thought that the prompt has opened. Words such as "Here is my response:" prove nothing.
        if closing and (begins_in_thought or _is_tag(tags)):
            has_opening = tags.opening in before
            if not has_opening:
                return _SplitText(before.strip(), after.strip(), has_open_thought=False)
    if begins_in_thought:
        return _SplitText(text.strip(), "", has_open_thought=True)
    return _SplitText("", text, has_open_thought=False)


def _split_at_end(text: str, tags: ThoughtTags) -> _SplitText:
    """Take apart a text that begins just behind an opening tag."""
    thought, closing, answer = text.partition(tags.closing)
    return _SplitText(
        thought.strip(), answer.strip(), has_open_thought=not bool(closing)
    )


def _is_tag(tags: ThoughtTags) -> bool:
    """Tell whether the closing mark is told apart from words by its signs."""
    return tags.closing[0] in "<[◁" and tags.closing != "<|end|>"


def _has_overlong_thought(
    response: Mapping[str, Any], reasoning: str, answer: str, limits: AnswerLimits
) -> bool:
    """Tell whether a thought took tokens from the answer's own limit.

    Engines that do not count the tokens of reasoning have them estimated by the shares of characters.
    """
    usage = response.get("usage") or {}
    tokens = usage.get("completion_tokens")
    if not reasoning or not limits.think_tokens or not isinstance(tokens, int):
        return False
    details = usage.get("completion_tokens_details") or {}
    thought_tokens = details.get("reasoning_tokens")
    if not thought_tokens:
        thought_tokens = tokens * len(reasoning) / (len(reasoning) + len(answer))
    return bool(thought_tokens > limits.think_tokens)


def _tool_calls(calls: Sequence[Mapping[str, Any]]) -> tuple[ToolCall, ...]:
    """Read the calls of functions; other calls are left out."""
    return tuple(
        ToolCall(
            name=str(call["function"].get("name") or ""),
            arguments=_arguments(call["function"].get("arguments")),
        )
        for call in calls
        if isinstance(call.get("function"), Mapping)
    )


def _arguments(arguments: Any) -> str:
    """Return a call's arguments as text; some engines give an object."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments or {}, ensure_ascii=False)
