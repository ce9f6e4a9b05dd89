"""``POST /generate`` and ``POST /route``: their body, and the answer as text events.

Every event of a stream has an id. A resumable stream is made by a task of its own and kept for a while, so that its caller
may lose the connection and read on with the header ``Last-Event-ID``.
"""

from __future__ import annotations

from asyncio import sleep
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, cast

from msgspec.structs import replace
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from classifier import TokenCounter
from router.api.asgi import context_of, read_body
from router.api.bodies import (
    STANDARD_RULES,
    FieldProblem,
    InvalidBodyError,
    ProviderBody,
    RoutingFields,
    Rules,
    json_response,
    parsed,
    provider_allowed,
    routing_allowed,
)
from router.api.endpoint import Endpoint, Receiver, Service
from router.api.models import adapter_names
from router.api.openai_prompt import last_turn
from router.api.paths import ErrorForm
from router.api.problems import describe
from router.api.provider import with_provider
from router.api.truncation import Cutter
from router.pipeline.registry import ActiveRequest
from router.pipeline.request import (
    Call,
    PromptText,
    RequestContext,
    chat_part,
    class_priority,
    session_of,
)
from router.policy.render import render_decision
from router.upstream.chat_splicer import ChatSplicer
from router.upstream.engine_request import EngineRequest
from router.upstream.engine_stream import EngineStream
from router.upstream.progress import ContinuationTerms
from router.upstream.sse import SEPARATOR, Chunk
from tiers.fleet import Fleet

MAX_MESSAGES = 1000
MAX_STOPS = 16
MAX_STOP_CHARS = 200  # the engine holds as many characters back as the longest has
MAX_SEED = (1 << 63) - 1  # vLLM's bound


def _check_text(text: str, info: ValidationInfo) -> str:
    """Return a text that is within the limits; ``Rules`` are the validation context."""
    limits = (info.context or STANDARD_RULES).limits
    if len(text) > limits.max_prompt_chars:
        raise ValueError(f"has {len(text)} characters")
    # A word needs a separator, so a text of at most twice as many characters as words are allowed has no more of them.
    if len(text) > 2 * limits.max_prompt_words:
        word_count = len(text.split())
        if word_count > limits.max_prompt_words:
            raise ValueError(f"has {word_count} words")
    return text


Text = AfterValidator(_check_text)


class MessageBody(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, cache_strings="keys"
    )

    role: Literal["system", "user", "assistant"]
    content: Annotated[str, Text]


def _listed_stops(stop: Any) -> Any:
    """Return a single stop string as a list of one, and anything else as it is."""
    if isinstance(stop, str):
        return [stop]
    return stop


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], BeforeValidator(_listed_stops)]


class GenerateBody(RoutingFields):
    """The body of ``POST /generate`` and ``POST /route``. ``Rules`` are the validation context."""

    messages: list[MessageBody] | None = Field(
        None, min_length=1, max_length=MAX_MESSAGES
    )
    prompt: Annotated[str, Field(min_length=1), Text] | None = Field(
        None, validate_default=True
    )
    adapter: str | None = Field(None, min_length=1)
    system_prompt: Annotated[str, Text] | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, gt=0, le=2, allow_inf_nan=False)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    stop: StopStrings | None = Field(None, max_length=MAX_STOPS)
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
        has_messages = info.data["messages"] is not None
        if prompt is None and not has_messages:
            raise ValueError("is missing, and so is messages")
        if prompt is not None and has_messages:
            raise ValueError("is given, and so is messages")
        return prompt

    @field_validator("system_prompt")
    @classmethod
    def _without_messages(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is not None and info.data.get("messages") is not None:
            raise ValueError(
                "is given, and so is messages, whose first may be the system's"
            )
        return text

    @field_validator("max_tokens")
    @classmethod
    def _within_token_limit(
        cls, tokens: int | None, info: ValidationInfo
    ) -> int | None:
        limits = (info.context or STANDARD_RULES).limits
        if tokens is not None and tokens > limits.max_tokens:
            raise ValueError(f"is {tokens}")
        return tokens


def allowed_values(rules: Rules) -> dict[str, str]:
    limits = rules.limits
    text_limits = f"{limits.max_prompt_chars} characters and at most {limits.max_prompt_words} words"
    return {
        "prompt": f"a string of 1 to {text_limits}; exactly one of prompt and messages",
        "messages": f"null or a list of 1 to {MAX_MESSAGES} objects with role and content, the user's last; exactly one "
        "of prompt and messages",
        "messages.role": "system (the first only), user or assistant",
        "messages.content": f"a string of at most {text_limits}",
        "system_prompt": f"null or a string of at most {text_limits}",
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


def parse(content: bytes, context: RequestContext, service: Service) -> Call:
    """Return what a body asks for: the prompt goes through the model's own chat template, at the engine.

    Raises:
        BeyondKeyError: The priority is beyond the caller's key.
        InvalidBodyError: The body is not UTF-8 or JSON, a field is wrong, or no tier offers its adapter or a precision that
            it allows.
    """
    rules = service.rules
    fleet = service.pipeline.fleet
    body = parsed(GenerateBody, content, allowed_values, rules=rules)
    _check_adapter(body.adapter, fleet)
    messages = _messages_of(body)
    priority = _priority_of(body, context)
    max_tokens = body.max_tokens or rules.limits.default_max_tokens
    sampling = _sampling_of(body, default_temperature=rules.limits.default_temperature)
    cut_prompt = None
    if body.truncate is not None:
        cut_prompt = partial(_cut, is_chat=body.messages is not None)
    return Call(
        context=context,
        prompt=read_messages(messages, service.pipeline.counter),
        options=with_provider(body.options(priority, "tier"), body.provider, fleet),
        engine_request=EngineRequest(
            document={"messages": messages, "max_tokens": max_tokens, **sampling},
            request_id=context.request_id,
            priority=priority,
            wants_usage=True,
            chat=messages,
            asks_token_ids=True,
            implied=_implied_by(body),
            continuation_terms=ContinuationTerms(max_tokens, sampling, priority),
            adapter=body.adapter,
            splicer=ChatSplicer,
        ),  # always streamed from the engine, so that an engine that stalls is noticed
        max_tokens=max_tokens,
        is_limited=body.max_tokens is not None,
        session=session_of(context),
        is_streamed=body.stream,
        is_resumable=body.resumable,
        cut_prompt=cut_prompt,
    )


def _check_adapter(adapter: str | None, fleet: Fleet) -> None:
    """Raise ``InvalidBodyError`` if a request names an adapter that no tier offers."""
    if adapter is None:
        return
    offered_names = adapter_names(fleet)
    if adapter in offered_names:
        return
    allowed_text = "none: no tier offers an adapter"
    if offered_names:
        allowed_text = f"one of {', '.join(offered_names)}"
    raise InvalidBodyError(
        (
            FieldProblem(
                "adapter", f"{adapter[:100]!r} is offered by no tier", allowed_text
            ),
        )
    )


def _messages_of(body: GenerateBody) -> list[dict[str, str]]:
    """Return the chat that a body holds, or the one that its prompts make."""
    if body.messages is not None:
        return [
            {"role": message.role, "content": message.content}
            for message in body.messages
        ]
    user_message = {"role": "user", "content": body.prompt or ""}
    if body.system_prompt is None:
        return [user_message]
    return [{"role": "system", "content": body.system_prompt}, user_message]


def _priority_of(body: GenerateBody, context: RequestContext) -> int:
    """Return the request's priority in vLLM's numbers; ``BeyondKeyError``: the caller's key does not allow it."""
    if "priority" in body.model_fields_set:
        return class_priority(context.caller, body.priority, "priority")
    return class_priority(context.caller, None, "priority")


def _sampling_of(body: GenerateBody, *, default_temperature: float) -> dict[str, Any]:
    """Return the sampling parameters that an engine is sent: a temperature always, others if the body has them."""
    sampling: dict[str, Any] = {"temperature": default_temperature}
    for parameter_name in (
        "temperature",
        "top_p",
        "repetition_penalty",
        "seed",
        "stop",
    ):
        value = getattr(body, parameter_name)
        if value is not None:
            sampling[parameter_name] = value
    return sampling


def _implied_by(body: GenerateBody) -> tuple[str, ...]:
    """Return the members of the engine's body that the caller has not named."""
    if body.temperature is None:
        return ("temperature",)
    return ()


def _cut(call: Call, cutter: Cutter, *, is_chat: bool) -> Call:
    """Return a call with a shorter prompt; the same call if no cut makes the prompt fit."""
    messages = call.engine_request.chat or ()
    shorter_messages = _cut_messages(messages, cutter, is_chat=is_chat)
    if shorter_messages is None:
        return call
    document = {
        **cast("Mapping[str, Any]", call.engine_request.document),
        "messages": shorter_messages,
    }
    engine_request = replace(
        call.engine_request, chat=shorter_messages, document=document
    )
    shorter_call = replace(
        call,
        engine_request=engine_request,
        prompt=read_messages(shorter_messages, cutter.counter),
    )
    return replace(
        shorter_call,
        truncated=cutter.disclosed(shorter_call, len(messages) - len(shorter_messages)),
    )


def _cut_messages(
    messages: Sequence[Mapping[str, Any]], cutter: Cutter, *, is_chat: bool
) -> list[dict[str, Any]] | None:
    if is_chat:
        return cutter.chat([dict(message) for message in messages], 0)
    return cutter.prompt(messages)


def read_messages(
    messages: Sequence[Mapping[str, str]], counter: TokenCounter
) -> PromptText:
    """Return what routing reads of messages: of one prompt, perhaps after a system prompt, or of a longer chat."""
    if len(messages) == 1:
        return _read_prompt(None, messages[0]["content"], counter)
    if len(messages) == 2 and messages[0]["role"] == "system":  # noqa: PLR2004
        return _read_prompt(messages[0]["content"], messages[1]["content"], counter)
    texts = [message["content"] for message in messages]
    parts = [
        chat_part(message["role"], text, counter.count(text))
        for message, text in zip(messages, texts, strict=True)
    ]
    prompt_tokens = sum(part.tokens for part in parts)
    return PromptText(
        text=last_turn(messages, texts),
        prompt_tokens=prompt_tokens,
        all_tokens=prompt_tokens,
        messages=len(messages),
        system=messages[0]["role"] == "system",
        parts=tuple(parts),
    )


def _read_prompt(
    system_prompt: str | None, prompt: str, counter: TokenCounter
) -> PromptText:
    """Return what routing reads of one prompt, whose tokens are counted later, when it is classified."""
    prompt_part = chat_part("user", prompt, -1)
    if system_prompt is None:
        return PromptText(text=prompt, messages=1, parts=(prompt_part,))
    system_tokens = counter.count(system_prompt)
    return PromptText(
        text=prompt,
        system_tokens=system_tokens,
        messages=2,
        system=True,
        parts=(chat_part("system", system_prompt, system_tokens), prompt_part),
    )


class TextEvents:
    """Writes an answer as text events, then one ``done`` or one ``error`` event."""

    __slots__ = ("_answer", "_context", "_last_number", "_out")

    def __init__(self, call: Call, active: ActiveRequest, out: Receiver) -> None:
        assert isinstance(active.answer, EngineStream)
        self._answer = active.answer
        self._context = call.context
        self._out = out
        # Number of the last event, which is its id. A resumable stream numbers its events itself.
        self._last_number: int | None = 0
        if call.is_resumable:
            self._last_number = None

    def encode(self, chunks: Sequence[Chunk]) -> bool:
        events = []
        number = self._last_number
        for chunk in chunks:
            if not chunk.text:
                continue
            event = b"data: " + to_json({"text": chunk.text}) + b"\n\n"
            if number is not None:
                number += 1
                event = b"id: %d\n" % number + event
            events.append(event)
        self._last_number = number
        return self._out.write(events)

    def end(self) -> list[bytes]:
        return [
            self._final_id()
            + b"event: done\ndata: "
            + to_json(closing(self._answer))
            + SEPARATOR
        ]

    def failure(self, error: Exception) -> list[bytes]:
        event = describe(error).event(ErrorForm.PROBLEM, self._context.ids)
        return [self._final_id() + event + SEPARATOR]

    def _final_id(self) -> bytes:
        """Return the line with the id of the event that ends the stream; nothing if the stream numbers its events."""
        if self._last_number is None:
            return b""
        return b"id: %d\n" % (self._last_number + 1)


async def _unstreamed(call: Call, active: ActiveRequest) -> tuple[bytes, str]:
    """Return the body of an answer that is not streamed, and its media type."""
    answer = active.answer
    assert isinstance(answer, EngineStream)
    texts: list[str] = []

    def receive(chunks: Sequence[Chunk]) -> bool:
        texts.extend(chunk.text for chunk in chunks)
        return True

    await answer.relay(receive, partial(sleep, 0))
    body = {"text": "".join(texts), **closing(answer), **call.context.ids}
    return to_json(body), "application/json"


def closing(answer: EngineStream) -> dict[str, Any]:
    """Return what is said of an answer at its end: its token counts, who served it, and its times."""
    members: dict[str, Any] = {
        "usage": answer.usage,
        "finish_reason": answer.finish_reason,
        "tier": answer.tier,
    }
    if answer.overflow is not None:
        members["usage"] = answer.usage or None  # a foreign server may count nothing
        members["tier"] = None
        members["overflow"] = answer.overflow
    members["continued_on"] = [part.tier for part in answer.parts]
    members["ttft_ms"] = round(answer.ttft_ms or 0.0, 1)
    tpot_ms = answer.tpot_ms
    if tpot_ms is not None:
        tpot_ms = round(tpot_ms, 2)
    members["tpot_ms"] = tpot_ms
    return members


GENERATE = Endpoint(
    "/generate", parse=parse, encoder=TextEvents, unstreamed=_unstreamed, resumes=True
)


async def decision_alone(service: Service, request: Request) -> Response:
    """Answer ``POST /route``: decide without generating, and count a request of no tokens.

    The ``tier`` of a refusal is null.
    """
    context = context_of(request.scope)
    pipeline = service.pipeline
    body = await read_body(
        request.scope, request.receive, service.settings.server.max_body_bytes
    )
    call = await GENERATE.read(body, context, service)
    grant = await pipeline.quotas.enter(context.caller, 0, context.quota_headers)
    # nothing counts against the quota if no decision is made
    used_tokens: int | None = None
    try:
        rendered = render_decision(await pipeline.decide(call, serve=False))
        used_tokens = 0
    finally:
        if grant is not None:
            await grant.settle(used_tokens)
    return json_response(rendered, headers=context.response_headers)
