"""A model's complete answer to a chat, as checks read it."""

from __future__ import annotations

from router.policy.profiles import Frozen


class ToolCall(Frozen):
    """A call of a function that an answer asks for; ``arguments`` is the model's text, which may be no JSON."""

    name: str
    arguments: str


class ModelAnswer(Frozen):
    """An answer.

    Attributes:
        text: What the caller reads, without reasoning.
        reasoning: The thoughts before it, whether the engine tells them apart or leaves them in tags.
        tool_calls: In the answer's order.
        finish_reason: As OpenAI names it; None: it is not told.
        is_cut_while_thinking: Whether the limit of tokens came before the thoughts had ended. Such an answer is
            neither right nor wrong: it is not measured.
    """

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str | None = None
    is_cut_while_thinking: bool = False
