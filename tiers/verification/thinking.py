"""Find out whether and how a model thinks, and take texts apart at the tags of their thoughts.

A chat template may have a switch for thinking: prompts rendered with the switch on and off then differ. It may also open
the thought in the prompt, so that the model's text begins within it. Whether the engine tells thoughts apart (vLLM's field
``reasoning``, ``reasoning_content`` in older releases) or leaves them in the text is seen in a short answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from tiers.verification.findings import FrozenFinding

CHAT = "/v1/chat/completions"
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
# A calculation, because some models think about hard questions only.
QUESTION = (
    "A train leaves at 9:40 and arrives at 13:05. It stands still for 25 minutes on the way. "
    "For how many minutes does it move?"
)
# A thought shows itself by its first tokens; the answer is not needed.
QUESTION_TOKENS = 24
# Tokens at the end of a prompt in which an opening tag is looked for, with the white space behind it.
END_TOKENS = 24

# Sends a body without model to a path of the engine, and returns its answer. None: the engine refuses the request.
Ask = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any] | None]]


class ThinkingMode(StrEnum):
    """Whether a request asks the model to think."""

    OFF = "off"
    ON = "on"
    # the request says nothing, as most callers' do
    DEFAULT = "default"


class ThoughtForm(StrEnum):
    """Where an answer's thoughts stand."""

    FIELD = "in a field of the answer"
    TAGS = "in the text, between tags"
    # the text has only the closing tag
    OPENED_BY_PROMPT = "in the text, which begins within the thought"


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
# A closing mark of another kind may be said in an answer without any thought.
_SURE_CLOSING_TAGS = tuple(
    tags.closing
    for tags in THOUGHT_TAGS
    if "think" in tags.closing.lower() or "thought" in tags.closing.lower()
)
# How templates name the switch: Qwen3, GLM, SmolLM3 and others the first way, DeepSeek-V3.1, Granite and Kimi the second.
# A template ignores names that it does not know.
SWITCH_NAMES = ("enable_thinking", "thinking")


class Thinking(FrozenFinding):
    """How a model thinks.

    Attributes:
        can_switch: The chat template has a switch for thinking that a request can set.
        thinks_by_default: The model thinks where a request says nothing of it.
        form: Where the thoughts stand in answers; None: no thought was seen.
        opening_modes: The modes in which the prompt ends with an opened thought.
    """

    can_switch: bool
    thinks_by_default: bool
    form: ThoughtForm | None = None
    opening_modes: tuple[ThinkingMode, ...] = ()

    def thinks(self, mode: ThinkingMode) -> bool:
        """Tell whether the model thinks in a mode."""
        if mode is ThinkingMode.DEFAULT or not self.can_switch:
            return self.thinks_by_default
        return mode is ThinkingMode.ON

    def begins_in_thought(self, mode: ThinkingMode) -> bool:
        """Tell whether an answer's text begins within a thought, without an opening tag."""
        return self.form is not ThoughtForm.FIELD and mode in self.opening_modes

    @property
    def default_mode(self) -> ThinkingMode:
        """Return the mode that a request without a wish has, by its own name."""
        return ThinkingMode.ON if self.thinks_by_default else ThinkingMode.OFF

    @property
    def other_mode(self) -> ThinkingMode | None:
        """Return the mode that callers have to ask for; None: the model has only one."""
        if not self.can_switch:
            return None
        return ThinkingMode.OFF if self.thinks_by_default else ThinkingMode.ON

    def describe(self) -> str:
        """Return a clause about it for people."""
        if not self.thinks_by_default and not self.can_switch:
            return "does not think"
        where = "" if self.form is None else f", {self.form.value}"
        if not self.can_switch:
            return f"always thinks{where}"
        default = "thinks" if self.thinks_by_default else "does not think"
        return f"{default} unless a request says otherwise{where}"


NO_THINKING = Thinking(can_switch=False, thinks_by_default=False)


class SplitText(NamedTuple):
    """A text, taken apart at the tags of its thoughts."""

    thought: str
    answer: str
    has_open_thought: bool  # the thought has no end


class _RenderedPrompts(NamedTuple):
    """The token ids of one chat as the template renders it in each mode; None: the engine does not tell them."""

    default: tuple[int, ...] | None
    on: tuple[int, ...] | None
    off: tuple[int, ...] | None


def switch_fields(mode: ThinkingMode) -> dict[str, Any]:
    """Return the fields of a chat's body that ask its model to think or not to; none by default."""
    if mode is ThinkingMode.DEFAULT:
        return {}
    is_on = mode is ThinkingMode.ON
    return {"chat_template_kwargs": dict.fromkeys(SWITCH_NAMES, is_on)}


def split_thought(text: str, *, begins_in_thought: bool = False) -> SplitText:
    """Take a text apart at the tags of its thoughts.

    Args:
        text: The text of an answer.
        begins_in_thought: The prompt has opened a thought, so that the text begins within it.
    """
    start = text.lstrip()
    for tags in THOUGHT_TAGS:
        if start.startswith(tags.opening):
            return _split_at_end(start.removeprefix(tags.opening), tags.closing)
    for tags in THOUGHT_TAGS:
        is_end = begins_in_thought or tags.closing in _SURE_CLOSING_TAGS
        # A closing tag alone ends a thought that the prompt has opened. One behind its opening tag is quoted.
        if is_end and _is_lone_closing_tag(text, tags):
            return _split_at_end(text, tags.closing)
    if begins_in_thought:
        return SplitText(text.strip(), "", has_open_thought=True)
    return SplitText("", text, has_open_thought=False)


def _split_at_end(text: str, closing_tag: str) -> SplitText:
    """Take apart a text that begins within a thought."""
    thought, closing, answer = text.partition(closing_tag)
    return SplitText(thought.strip(), answer.strip(), has_open_thought=not closing)


def _is_lone_closing_tag(text: str, tags: ThoughtTags) -> bool:
    before, closing, _ = text.partition(tags.closing)
    return bool(closing) and tags.opening not in before


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the thoughts that an engine tells apart from a message's text."""
    return str(message.get("reasoning") or message.get("reasoning_content") or "")


async def observe_thinking(ask: Ask) -> Thinking:
    """Find out how the model of an engine thinks, with up to five small requests and two answers of a few tokens.

    Args:
        ask: Sends a request to the engine.
    """
    prompts = _RenderedPrompts(
        default=await _render(ask, ThinkingMode.DEFAULT),
        on=await _render(ask, ThinkingMode.ON),
        off=await _render(ask, ThinkingMode.OFF),
    )
    can_switch = prompts.on is not None and prompts.on != prompts.off
    opening_modes = await _opening_modes(ask, prompts, can_switch=can_switch)
    form = await _seen_form(ask, ThinkingMode.DEFAULT, opening_modes)
    thinks_by_default = form is not None or ThinkingMode.DEFAULT in opening_modes
    if can_switch and prompts.default in (prompts.on, prompts.off):
        thinks_by_default = prompts.default == prompts.on
    if can_switch and form is None:
        form = await _seen_form(ask, ThinkingMode.ON, opening_modes)
    return Thinking(
        can_switch=can_switch,
        thinks_by_default=thinks_by_default,
        form=form,
        opening_modes=opening_modes,
    )


def _chat(mode: ThinkingMode) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTION}]
    return {"messages": messages, **switch_fields(mode)}


async def _render(ask: Ask, mode: ThinkingMode) -> tuple[int, ...] | None:
    """Return the token ids of the question in a mode; None: the engine does not tell them."""
    answer = await ask(TOKENIZE, _chat(mode))
    return None if answer is None else tuple(answer["tokens"])


async def _opening_modes(
    ask: Ask, prompts: _RenderedPrompts, *, can_switch: bool
) -> tuple[ThinkingMode, ...]:
    """Return the modes in which the prompt ends with an opened thought."""
    is_opened_by_default = await _ends_in_opening_tag(ask, prompts.default)
    modes = [ThinkingMode.DEFAULT] if is_opened_by_default else []
    if not can_switch:
        # A template without the switch renders all modes alike.
        return tuple(ThinkingMode) if is_opened_by_default else ()
    if await _ends_in_opening_tag(ask, prompts.on):
        modes.append(ThinkingMode.ON)
    return tuple(modes)


async def _ends_in_opening_tag(ask: Ask, prompt: tuple[int, ...] | None) -> bool:
    if not prompt:
        return False
    answer = await ask(DETOKENIZE, {"tokens": list(prompt[-END_TOKENS:])})
    if answer is None:
        return False
    end = str(answer["prompt"]).rstrip()
    return any(end.endswith(tags.opening) for tags in THOUGHT_TAGS)


async def _seen_form(
    ask: Ask, mode: ThinkingMode, opening_modes: tuple[ThinkingMode, ...]
) -> ThoughtForm | None:
    """Return where the thoughts of a short answer stand; None: it shows none."""
    body = {**_chat(mode), "max_tokens": QUESTION_TOKENS, "temperature": 0}
    answer = await ask(CHAT, body)
    if answer is None:
        return None
    message = answer["choices"][0]["message"]
    if reasoning_of(message):
        return ThoughtForm.FIELD
    text = message.get("content") or ""
    if mode in opening_modes:
        has_parser = _counts_reasoning(answer)
        return ThoughtForm.FIELD if has_parser else ThoughtForm.OPENED_BY_PROMPT
    split = split_thought(text)
    if text.lstrip().startswith(tuple(tags.opening for tags in THOUGHT_TAGS)):
        return ThoughtForm.TAGS
    return ThoughtForm.OPENED_BY_PROMPT if split.thought else None


def _counts_reasoning(answer: Mapping[str, Any]) -> bool:
    """Tell whether an engine counts the tokens of reasoning: vLLM does if it has a parser, even where a thought is empty."""
    details = (answer.get("usage") or {}).get("completion_tokens_details") or {}
    return details.get("reasoning_tokens") is not None
