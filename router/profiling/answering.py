"""Ask a model that may think, and read its answer: its text, its thoughts and its tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from router.profiling.model_answer import ModelAnswer, ToolCall
from tiers.verification.thinking import (
    SplitText,
    Thinking,
    ThinkingMode,
    reasoning_of,
    split_thought,
    switch_fields,
)

if TYPE_CHECKING:
    from router.profiling.tasks import Task

__all__ = ["AnswerLimits", "ThinkingMode", "answer_body", "read_answer"]

CUT = "length"  # the finish reason of an answer that reached its limit of tokens
# The default limit of thoughts: this share of the context, and no more than so many tokens.
THINK_SHARE = 0.5
MOST_THINK_TOKENS = 8192
# An estimate of a prompt's tokens that is not exceeded: bytes of its JSON a token, and what a template adds.
FEWEST_BYTES_PER_TOKEN = 2.0
TEMPLATE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class AnswerLimits:
    """How an answer is asked for, beyond its task.

    Attributes:
        think_tokens: Tokens for thoughts, on top of the task's own limit. 0: the model does not think.
        mode: Whether the request asks the model to think.
        begins_in_thought: The chat template opens the thought in the prompt and the engine does not tell reasoning apart,
            so that an answer's text begins within a thought.
    """

    think_tokens: int = 0
    mode: ThinkingMode = ThinkingMode.DEFAULT
    begins_in_thought: bool = False


PLAIN_ANSWER = AnswerLimits()


def default_think_tokens(context: int) -> int:
    """Return how many tokens thoughts may have: half of the context, and at most ``MOST_THINK_TOKENS``."""
    return min(int(context * THINK_SHARE), MOST_THINK_TOKENS)


def limits_for(
    thinking: Thinking, mode: ThinkingMode, context: int, think_tokens: int | None
) -> AnswerLimits:
    """Return the limits for the answers of a model.

    Args:
        thinking: How the model thinks.
        mode: Whether requests ask it to think.
        context: The context in tokens, the shortest of the engines that are compared.
        think_tokens: Tokens for thoughts; None: by the context.
    """
    # A model without a switch may think about some questions only, and was not seen to.
    may_think = thinking.thinks(mode) or not thinking.can_switch
    limit = 0
    if think_tokens is not None and may_think:
        limit = think_tokens
    elif thinking.thinks(mode):
        limit = default_think_tokens(context)
    return AnswerLimits(
        think_tokens=limit,
        mode=mode,
        begins_in_thought=thinking.begins_in_thought(mode),
    )


def fitting_think_tokens(
    task: Task, limits: AnswerLimits, context: int, prompt_tokens: int
) -> int:
    """Return how many tokens thoughts about a task may have, so that prompt, thoughts and answer fit the context."""
    room = context - prompt_tokens - task.max_tokens
    return max(min(limits.think_tokens, room), 0)


def most_prompt_tokens(task: Task) -> int:
    """Return more tokens than a task's prompt has, by a rough estimate."""
    prompt = [task.messages, task.tools]
    size = len(json.dumps(prompt, ensure_ascii=False).encode())
    return int(size / FEWEST_BYTES_PER_TOKEN) + TEMPLATE_TOKENS


def answer_body(task: Task, limits: AnswerLimits = PLAIN_ANSWER) -> dict[str, Any]:
    """Return the body of a chat completion that answers a task greedily, without model and priority."""
    body: dict[str, Any] = {
        "messages": list(task.messages),
        "max_tokens": task.max_tokens + limits.think_tokens,
        "temperature": 0,
    }
    if task.tools:
        body["tools"] = list(task.tools)
    return body | switch_fields(limits.mode)


def read_answer(
    response: Mapping[str, Any], limits: AnswerLimits = PLAIN_ANSWER
) -> ModelAnswer:
    """Read the first choice of a chat completion.

    Args:
        response: The engine's complete answer.
        limits: What ``answer_body`` was called with.
    """
    choice = response["choices"][0]
    message = choice["message"]
    reasoning = reasoning_of(message)
    split = split_thought(
        message.get("content") or "",
        begins_in_thought=limits.begins_in_thought and not reasoning,
    )
    is_cut = choice.get("finish_reason") == CUT
    if split.has_open_thought and limits.begins_in_thought and not is_cut:
        # A model that stops within a thought that only the template has opened has answered: callers read that text.
        split = SplitText("", split.thought, has_open_thought=False)
    reasoning = "\n".join(filter(None, (reasoning, split.thought)))
    answer = ModelAnswer(
        text=split.answer,
        reasoning=reasoning,
        tool_calls=_tool_calls(message.get("tool_calls") or ()),
        finish_reason=choice.get("finish_reason"),
    )
    is_cut_while_thinking = is_cut and (
        split.has_open_thought
        or _has_only_thoughts(answer)
        or _thought_tokens(response, answer) > limits.think_tokens
    )
    return answer.model_copy(update={"is_cut_while_thinking": is_cut_while_thinking})


def _has_only_thoughts(answer: ModelAnswer) -> bool:
    return bool(answer.reasoning) and not answer.text and not answer.tool_calls


def _thought_tokens(response: Mapping[str, Any], answer: ModelAnswer) -> float:
    """Return about how many tokens an answer's thoughts have.

    Beyond their limit they have taken tokens from the answer's own. Engines that do not count the tokens of reasoning have
    them estimated by the shares of characters.
    """
    usage = response.get("usage") or {}
    details = usage.get("completion_tokens_details") or {}
    counted = details.get("reasoning_tokens")
    if counted:
        return float(counted)
    chars = len(answer.reasoning) + len(answer.text)
    if not chars:
        return 0.0
    return float(usage.get("completion_tokens") or 0) * len(answer.reasoning) / chars


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
