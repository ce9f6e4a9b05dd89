"""The body of ``POST /generate`` and ``POST /route``, and its prompt as routing reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from router.api.bodies import (
    STANDARD_RULES,
    ProviderBody,
    RoutingFields,
    Rules,
    parsed,
    provider_allowed,
    routing_allowed,
)
from router.api.openai_prompt import last_turn
from router.pipeline.request import PromptText, chat_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic import ValidationInfo

    from classifier import TokenCounter

    Messages = Sequence[dict[str, str]]

MAX_MESSAGES = 1000
MAX_STOPS, MAX_STOP_CHARS = 16, 200  # the engine holds as many characters back as the longest has
MAX_SEED = (1 << 63) - 1  # vLLM's bound


class MessageBody(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, cache_strings="keys")

    role: Literal["system", "user", "assistant"]
    content: str

    @field_validator("content")
    @classmethod
    def _within_text_limits(cls, text: str, info: ValidationInfo) -> str:
        return check_text(text, info)


def check_text(text: str, info: ValidationInfo) -> str:
    """Return a text that is within the limits; ``Rules`` are the validation context."""
    limits = (info.context or STANDARD_RULES).limits
    if len(text) > limits.max_prompt_chars:
        raise ValueError(f"has {len(text)} characters")
    # A word needs a separator: a text of at most twice the limit in characters has no more words than that.
    if len(text) > 2 * limits.max_prompt_words and (words := len(text.split())) > limits.max_prompt_words:
        raise ValueError(f"has {words} words")
    return text


def _as_list(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class GenerateBody(RoutingFields):
    """The body of ``POST /generate`` and ``POST /route``. ``Rules`` are the validation context."""

    messages: list[MessageBody] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    prompt: str | None = Field(None, min_length=1, validate_default=True)
    adapter: str | None = Field(None, min_length=1)
    system_prompt: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, le=2, allow_inf_nan=False)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    stop: (
        Annotated[list[StopString], BeforeValidator(_as_list, json_schema_input_type=StopString | list[StopString])]
        | None
    ) = Field(None, max_length=MAX_STOPS)
    stream: bool = True
    resumable: bool = False
    provider: ProviderBody | None = None

    @field_validator("resumable")
    @classmethod
    def _needs_a_stream(cls, resumable: bool, info: ValidationInfo) -> bool:  # noqa: FBT001  pydantic's interface
        if resumable and info.data.get("stream") is False:
            raise ValueError("is true, and stream is false")
        return resumable

    @field_validator("messages")
    @classmethod
    def _in_turns(cls, messages: list[MessageBody] | None) -> list[MessageBody] | None:
        if messages is None:
            return None
        if any(message.role == "system" for message in messages[1:]):
            raise ValueError("has a system message that is not the first")
        if messages[-1].role != "user" or not messages[-1].content:
            raise ValueError("does not end with a message of the user that has a text")
        return messages

    @field_validator("prompt")
    @classmethod
    def _one_of_both(cls, prompt: str | None, info: ValidationInfo) -> str | None:
        if "messages" not in info.data:  # they are wrong by themselves
            return prompt
        if (prompt is None) == (info.data["messages"] is None):
            raise ValueError("is missing, and so is messages" if prompt is None else "is given, and so is messages")
        return prompt

    @field_validator("prompt", "system_prompt")
    @classmethod
    def _within_text_limits(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is not None and info.field_name == "system_prompt" and info.data.get("messages") is not None:
            raise ValueError("is given, and so is messages, whose first may be the system's")
        return None if text is None else check_text(text, info)

    @field_validator("max_tokens")
    @classmethod
    def _within_token_limit(cls, tokens: int | None, info: ValidationInfo) -> int | None:
        limits = (info.context or STANDARD_RULES).limits
        if tokens is not None and tokens > limits.max_tokens:
            raise ValueError(f"is {tokens}")
        return tokens


def parse_generate(body: bytes, rules: Rules) -> GenerateBody:
    """Parse a body.

    Raises:
        InvalidBody: It is not UTF-8, not JSON, or a field is wrong; lists every problem.
    """
    return parsed(GenerateBody, body, allowed_values, rules)


def allowed_values(rules: Rules) -> dict[str, str]:
    limits = rules.limits
    text = f"{limits.max_prompt_chars} characters and at most {limits.max_prompt_words} words"
    return {
        "prompt": f"a string of 1 to {text}; exactly one of prompt and messages",
        "messages": f"null or a list of 1 to {MAX_MESSAGES} objects with role and content, the user's last; exactly one "
        "of prompt and messages",
        "messages.role": "system (the first only), user or assistant",
        "messages.content": f"a string of at most {text}",
        "system_prompt": f"null or a string of at most {text}",
        "max_tokens": f"an integer from 1 to {limits.max_tokens}",
        "temperature": "a number from 0 to 2",
        "top_p": "null or a number above 0, at most 1",
        "repetition_penalty": "null or a number above 0, at most 2",
        "seed": f"null or an integer from 0 to {MAX_SEED}",
        "stop": f"null, a string of 1 to {MAX_STOP_CHARS} characters, or a list of at most {MAX_STOPS} such strings",
        "adapter": "null or the name of a LoRA adapter that some tier offers; GET /v1/models lists them",
        "stream": "true or false",
        "resumable": "true or false; true with stream only",
        **provider_allowed(rules.tiers),
        **routing_allowed(rules),
    }


def messages_of(body: GenerateBody) -> Messages:
    """Return what the engine is asked: goes through the model's own chat template there."""
    if body.messages is not None:
        return [{"role": message.role, "content": message.content} for message in body.messages]
    assert body.prompt is not None
    system = [] if body.system_prompt is None else [{"role": "system", "content": body.system_prompt}]
    return [*system, {"role": "user", "content": body.prompt}]


def read_messages(messages: Messages, counter: TokenCounter) -> PromptText:
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
