"""``POST /generate`` and ``POST /route``: their body, and the answer as text events.

Every event of a stream has an id. One that was asked for as resumable is made by a task of its own and kept for a while, so
that its caller may lose the connection and go on with the header ``Last-Event-ID``.
"""

from __future__ import annotations

from asyncio import sleep
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, cast

from msgspec.structs import replace
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
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
from router.pipeline.request import Call, PromptText, RequestContext, chat_part, class_priority, session_of
from router.policy.render import render_decision
from router.upstream.engine_request import EngineRequest
from router.upstream.engine_stream import EngineStream
from router.upstream.progress import Continuable
from router.upstream.sse import SEPARATOR, Chunk

MAX_MESSAGES = 1000
MAX_STOPS, MAX_STOP_CHARS = 16, 200  # the engine holds as many characters back as the longest has
MAX_SEED = (1 << 63) - 1  # vLLM's bound


def _check_text(text: str, info: ValidationInfo) -> str:
    """Return a text that is within the limits; ``Rules`` are the validation context."""
    limits = (info.context or STANDARD_RULES).limits
    if len(text) > limits.max_prompt_chars:
        raise ValueError(f"has {len(text)} characters")
    # A word needs a separator: a text of at most twice the limit in characters has no more words than that.
    if len(text) > 2 * limits.max_prompt_words and (words := len(text.split())) > limits.max_prompt_words:
        raise ValueError(f"has {words} words")
    return text


Text = AfterValidator(_check_text)


class MessageBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, cache_strings="keys")

    role: Literal["system", "user", "assistant"]
    content: Annotated[str, Text]


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[list[StopString], BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)]


class GenerateBody(RoutingFields):
    """The body of ``POST /generate`` and ``POST /route``. ``Rules`` are the validation context."""

    messages: list[MessageBody] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    prompt: Annotated[str, Field(min_length=1), Text] | None = Field(None, validate_default=True)
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
        if (prompt is None) == (info.data["messages"] is None):
            raise ValueError("is missing, and so is messages" if prompt is None else "is given, and so is messages")
        return prompt

    @field_validator("system_prompt")
    @classmethod
    def _without_messages(cls, text: str | None, info: ValidationInfo) -> str | None:
        if text is not None and info.data.get("messages") is not None:
            raise ValueError("is given, and so is messages, whose first may be the system's")
        return text

    @field_validator("max_tokens")
    @classmethod
    def _within_token_limit(cls, tokens: int | None, info: ValidationInfo) -> int | None:
        limits = (info.context or STANDARD_RULES).limits
        if tokens is not None and tokens > limits.max_tokens:
            raise ValueError(f"is {tokens}")
        return tokens


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


def parse(content: bytes, context: RequestContext, service: Service) -> Call:
    """Return what a body asks for: the prompt goes through the model's own chat template, at the engine.

    Raises:
        BeyondKeyError: The priority is beyond the caller's key.
        InvalidBodyError: It is not UTF-8 or JSON, a field is wrong, or no tier offers its adapter or a precision it allows.
    """
    rules, fleet, limits = service.rules, service.pipeline.fleet, service.rules.limits
    body = parsed(GenerateBody, content, allowed_values, rules)
    if body.adapter is not None and body.adapter not in (offered := adapter_names(fleet)):
        known = f"one of {', '.join(offered)}" if offered else "none: no tier offers an adapter"
        raise InvalidBodyError((FieldProblem("adapter", f"{body.adapter[:100]!r} is offered by no tier", known),))
    if body.messages is not None:
        messages = [{"role": message.role, "content": message.content} for message in body.messages]
    else:
        system = [] if body.system_prompt is None else [{"role": "system", "content": body.system_prompt}]
        messages = [*system, {"role": "user", "content": body.prompt or ""}]
    asked_class = body.priority if "priority" in body.model_fields_set else None
    priority = class_priority(context.caller, asked_class, "priority")
    options, max_tokens = body.options(priority, "tier"), body.max_tokens or limits.default_max_tokens
    sampling: dict[str, Any] = {"temperature": limits.default_temperature}
    for name in ("temperature", "top_p", "repetition_penalty", "seed", "stop"):
        if (value := getattr(body, name)) is not None:
            sampling[name] = value
    return Call(
        context=context,
        prompt=read_messages(messages, service.pipeline.counter),
        options=options if body.provider is None else with_provider(options, body.provider, fleet),
        asked=EngineRequest(
            document={"messages": messages, "max_tokens": max_tokens, **sampling},
            request_id=context.request_id,
            priority=priority,
            wants_usage=True,
            chat=messages,
            asks_token_ids=True,
            implied=("temperature",) if body.temperature is None else (),
            continuable=Continuable(max_tokens, sampling, priority),
            adapter=body.adapter,
        ),  # streamed, so that an engine that stalls is noticed
        max_tokens=max_tokens,
        limited=body.max_tokens is not None,
        session=session_of(context),
        streamed=body.stream,
        resumable=body.resumable,
        cut=None if body.truncate is None else partial(_cut, chat=body.messages is not None),
    )


def _cut(call: Call, cutter: Cutter, *, chat: bool) -> Call:
    messages, document = call.asked.chat or (), cast("Mapping[str, Any]", call.asked.document)
    made = cutter.chat([dict(message) for message in messages], 0) if chat else cutter.prompt(messages)
    if made is None:
        return call
    asked = replace(call.asked, chat=made, document={**document, "messages": made})
    shorter = replace(call, asked=asked, prompt=read_messages(made, cutter.counter))
    return replace(shorter, truncated=cutter.disclosed(shorter, len(messages) - len(made)))


def read_messages(messages: Sequence[Mapping[str, str]], counter: TokenCounter) -> PromptText:
    first, last = messages[0], messages[-1]
    if len(messages) == 1 or (len(messages) == 2 and first["role"] == "system"):  # noqa: PLR2004
        # A prompt, which is counted when it is classified.
        tokens, parts = 0, [chat_part("user", last["content"], -1)]
        if last is not first:
            tokens = counter.count(first["content"])
            parts.insert(0, chat_part("system", first["content"], tokens))
        return PromptText(
            last["content"], system_tokens=tokens, messages=len(messages), system=last is not first, parts=tuple(parts)
        )
    texts = [message["content"] for message in messages]
    counted = [chat_part(m["role"], text, counter.count(text)) for m, text in zip(messages, texts, strict=True)]
    total = sum(part.tokens for part in counted)
    return PromptText(
        last_turn(messages, texts),
        prompt_tokens=total,
        all_tokens=total,
        messages=len(messages),
        system=messages[0]["role"] == "system",
        parts=tuple(counted),
    )


class TextEvents:
    """Writes an answer as text events, then one ``done`` or one ``error`` event."""

    __slots__ = ("_answer", "_context", "_number", "_out")

    def __init__(self, call: Call, active: ActiveRequest, out: Receiver) -> None:
        assert isinstance(active.answer, EngineStream)
        self._answer, self._context, self._out = active.answer, call.context, out
        self._number = None if call.resumable else 0  # of the event's id, unless that names the stream as well

    def feed(self, chunks: Sequence[Chunk]) -> bool:
        events, number = [], self._number
        for chunk in chunks:
            if chunk.text:
                event = b"data: " + to_json({"text": chunk.text}) + b"\n\n"
                if number is not None:
                    number += 1
                    event = b"id: %d\n" % number + event
                events.append(event)
        self._number = number
        return self._out.feed(events)

    def end(self) -> list[bytes]:
        return [self._id() + b"event: done\ndata: " + to_json(closing(self._answer)) + SEPARATOR]

    def failure(self, error: Exception) -> list[bytes]:
        return [self._id() + describe(error).event(ErrorForm.PROBLEM, self._context.ids) + SEPARATOR]

    def _id(self) -> bytes:
        return b"" if self._number is None else b"id: %d\n" % (self._number + 1)


async def _whole(call: Call, active: ActiveRequest) -> tuple[bytes, str]:
    answer, parts = active.answer, list[str]()
    assert isinstance(answer, EngineStream)

    def feed(chunks: Sequence[Chunk]) -> bool:
        parts.extend(chunk.text for chunk in chunks)
        return True

    await answer.relay(feed, partial(sleep, 0))
    return to_json({"text": "".join(parts), **closing(answer), **call.context.ids}), "application/json"


def closing(answer: EngineStream) -> dict[str, Any]:
    tpot_ms, outside = answer.tpot_ms, answer.overflow is not None
    return {
        "usage": None if outside and not answer.usage else answer.usage,
        "finish_reason": answer.finish_reason,
        "tier": None if outside else answer.tier,
        **({"overflow": answer.overflow} if outside else {}),
        "continued_on": [part.tier for part in answer.parts],
        "ttft_ms": round(answer.ttft_ms or 0.0, 1),
        "tpot_ms": round(tpot_ms, 2) if tpot_ms is not None else None,
    }


GENERATE = Endpoint("/generate", parse, TextEvents, _whole, resumes=True)


async def decision_alone(service: Service, request: Request) -> Response:
    """Answer ``POST /route``: the decision, without generating, as a request of no tokens; of a refusal ``tier`` is null."""
    context, pipeline = context_of(request.scope), service.pipeline
    body = await read_body(request.scope, request.receive, service.settings.server.max_body_bytes)
    call = await GENERATE.read(body, context, service)
    grant = await pipeline.quotas.enter(context.caller, 0, context.limits)
    counted: int | None = None
    try:
        rendered = render_decision(await pipeline.decide(call, serve=False))
        counted = 0
    finally:
        if grant is not None:
            await grant.settle(counted)
    return json_response(rendered, headers=context.headers)
