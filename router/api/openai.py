"""OpenAI's ``/v1/chat/completions`` and ``/v1/completions``, routed; and how routing options are read under ``/v1``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from classifier import TokenCounter
from router.api.bodies import (
    MAX_NAME_CHARS,
    FieldProblem,
    InvalidBodyError,
    ProviderBody,
    RoutingFields,
    Rules,
    first_errors,
    message_of,
    routing_allowed,
)
from router.api.endpoint import Endpoint, Service, engine_body
from router.api.models import UNDRAFTABLE, read_document, resolve
from router.api.openai_events import RelayedEvents
from router.api.openai_prompt import beside, read_chat, read_completion
from router.api.paths import CHAT, COMPLETIONS
from router.api.provider import provider_of, with_provider
from router.api.settings import LimitSettings, TierPolicy
from router.api.truncation import Cutter, cut_prompts
from router.pipeline.request import (
    MAX_COUNT,
    Call,
    PromptText,
    RequestContext,
    class_priority,
    priority_within,
    session_of,
)
from router.upstream.chat_splicer import ChatSplicer
from router.upstream.engine_request import (
    DEFAULT_COMPLETION,
    EngineRequest,
    continuation_terms_of,
    may_ask_token_ids,
    may_be_resumed,
    may_be_silent,
    messages_in,
    token_limit,
)
from router.upstream.json_object import JsonObject, as_boolean, as_integer

# Headers, and where the ``qarr`` object has what they say. Those of the SLA are numbers.
HEADERS: dict[bytes, tuple[str, ...]] = {
    b"x-qarr-tier": ("tier",),
    b"x-qarr-tier-policy": ("tier_policy",),
    b"x-qarr-priority": ("priority",),
    b"x-qarr-sla-ttft-ms": ("sla", "ttft_ms"),
    b"x-qarr-sla-tpot-ms": ("sla", "tpot_ms"),
    b"x-qarr-sla-max-quality-loss": ("sla", "max_quality_loss"),
    b"x-qarr-sla-confidence": ("sla", "confidence"),
    b"x-qarr-truncate": ("truncate",),
    b"x-qarr-overflow": ("overflow",),
}


class OpenAIFields(RoutingFields):
    """The ``qarr`` object of a body (``extra_body`` in the SDKs)."""

    report: bool = False


@cache  # cannot grow: only known names come here
def _plain_fields(tier: str, policy: TierPolicy) -> OpenAIFields:
    return OpenAIFields.model_construct(tier=tier, tier_policy=policy)


def _allowed(rules: Rules) -> dict[str, str]:
    return {
        **routing_allowed(rules),
        "report": "true or false",
        "": "an object with any of tier, tier_policy, sla, priority, truncate, overflow, report",
    }


def parse(path: str, body: bytes, context: RequestContext, service: Service) -> Call:
    """Read what routing needs of a request for a completion; the rest of its body goes to the engine as it is.

    Raises:
        InvalidBodyError: The body is not a JSON object, or its options are not valid.
        UnknownModelError: The body names a model that is not served here.
        BeyondKeyError: The priority is beyond the caller's key.
    """
    is_chat = path == CHAT
    limits = service.settings.limits
    document = read_document(body)
    prompt = _read_prompt(document, service.pipeline.counter, is_chat=is_chat)
    routing = _routing_of(document, context, service)
    sequences = _sequences(document, prompt, limits.max_sequences, is_chat=is_chat)
    priority = priority_to_send(document, routing.fields, context)
    engine_request = _engine_request(
        document,
        path,
        context.request_id,
        priority=priority,
        choices=sequences,
        adapter=routing.adapter,
    )
    named_limit = token_limit(document, chat=is_chat)
    cut_prompt = None
    if routing.fields.truncate is not None:
        cut_prompt = _cut
    return Call(
        context=context,
        prompt=prompt,
        options=with_provider(
            routing.fields.options(priority or 0, routing.hint_field),
            routing.provider,
            service.pipeline.fleet,
        ),
        engine_request=engine_request,
        max_tokens=_max_tokens(named_limit, limits, is_chat=is_chat),
        is_limited=named_limit is not None,
        sequences=sequences,
        is_streamed=engine_request.is_streamed,
        wants_report=routing.fields.report,
        undraftable=undraftable_of(document),
        session=session_of(
            context, document.get("prompt_cache_key"), document.get("user")
        ),
        cut_prompt=cut_prompt,
    )


def _read_prompt(
    document: JsonObject, counter: TokenCounter, *, is_chat: bool
) -> PromptText:
    if is_chat:
        return read_chat(document, counter)
    return read_completion(document, counter)


class _Routing(Struct, frozen=True):
    """What a request says of who is to serve it."""

    fields: OpenAIFields
    hint_field: str  # the field that names its tier, for errors
    adapter: str | None
    provider: ProviderBody | None


def _routing_of(
    document: JsonObject, context: RequestContext, service: Service
) -> _Routing:
    """Read the model, the routing options and OpenRouter's preferences; each may be an error."""
    model_choice = resolve(document, service.settings.openai, service.pipeline.fleet)
    fields, hint_field = routing_fields(
        document, context, model_choice.tier, rules=service.rules
    )
    return _Routing(
        fields,
        hint_field,
        adapter=model_choice.adapter,
        provider=provider_of(document, service.rules),
    )


def _max_tokens(
    named_limit: int | None, limits: LimitSettings, *, is_chat: bool
) -> int:
    """Return the output tokens that each answer is expected to have at most, also if its caller names no limit."""
    max_tokens = named_limit
    if max_tokens is None:
        max_tokens = limits.default_max_tokens if is_chat else DEFAULT_COMPLETION
    return min(max(max_tokens, 1), MAX_COUNT)


def _engine_request(
    document: JsonObject,
    path: str,
    request_id: str,
    *,
    priority: int | None,
    choices: int,
    adapter: str | None,
) -> EngineRequest:
    """Return what an engine is sent: the caller's body, and what of it the router needs to know."""
    is_chat = path == CHAT
    is_streamed = as_boolean(document.get("stream"))
    continuation_terms = None
    asks_token_ids = False
    splicer = None
    if is_streamed:
        continuation_terms = continuation_terms_of(
            document, priority or 0, choices=choices, chat=is_chat
        )
        asks_token_ids = continuation_terms is not None or (
            is_chat and may_ask_token_ids(document)
        )
        if may_be_resumed(document, choices=choices):
            splicer = ChatSplicer
    return EngineRequest(
        document=document,
        path=path,
        operation="chat" if is_chat else "text_completion",
        request_id=request_id,
        is_streamed=is_streamed,
        priority=priority,
        wants_usage=_wants_usage(document),
        chat=messages_in(document),
        asks_token_ids=asks_token_ids,
        may_be_silent=may_be_silent(document),
        continuation_terms=continuation_terms,
        adapter=adapter,
        splicer=splicer,
    )


def _wants_usage(document: JsonObject) -> bool:
    """Tell whether a body asks for token counts at the end of a stream."""
    stream_options = document.get("stream_options")
    if not isinstance(stream_options, dict):
        return False
    return as_boolean(stream_options.get("include_usage"))


def _cut(call: Call, cutter: Cutter) -> Call:
    """Return a call with a shorter prompt; the same call if no cut makes the prompt fit."""
    if call.prompt.messages:
        return _cut_chat(call, cutter)
    return _cut_prompt(call, cutter)


def _cut_chat(call: Call, cutter: Cutter) -> Call:
    document = call.engine_request.document
    assert isinstance(document, JsonObject)
    messages = document.get("messages")
    # the engine says best what is wrong with it
    if not all(isinstance(message, dict) for message in messages):
        return call
    tool_tokens = sum(cutter.counter.count(text) for text in beside(document))
    kept_messages = cutter.chat(messages, tool_tokens)
    if kept_messages is None:
        return call
    shorter_call = _with_prompt(
        call, cutter, "messages", prompt=kept_messages, read=read_chat
    )
    return replace(
        shorter_call,
        truncated=cutter.disclosed(shorter_call, len(messages) - len(kept_messages)),
    )


def _cut_prompt(call: Call, cutter: Cutter) -> Call:
    shorter_prompt = cut_prompts(call.engine_request.document.get("prompt"), cutter)
    if shorter_prompt is None:
        return call
    shorter_call = _with_prompt(
        call, cutter, "prompt", prompt=shorter_prompt, read=read_completion
    )
    return replace(shorter_call, truncated=cutter.disclosed(shorter_call, 0))


def _with_prompt(
    call: Call,
    cutter: Cutter,
    member: str,
    *,
    prompt: Any,
    read: Callable[[JsonObject, TokenCounter], PromptText],
) -> Call:
    """Return a call whose body has another prompt in one of its members, which ``read`` reads."""
    document = call.engine_request.document
    assert isinstance(document, JsonObject)
    shorter_document = JsonObject.parse(
        document.edited({member: json.dumps(prompt).encode()})
    )
    engine_request = replace(
        call.engine_request,
        document=shorter_document,
        chat=messages_in(shorter_document),
    )
    return replace(
        call,
        engine_request=engine_request,
        prompt=read(shorter_document, cutter.counter),
    )


COMPLETION_ENDPOINTS = [
    Endpoint(
        path, parse=partial(parse, path), encoder=RelayedEvents, unstreamed=engine_body
    )
    for path in (CHAT, COMPLETIONS)
]


def undraftable_of(document: JsonObject) -> str:
    return " and ".join(name for name in UNDRAFTABLE if document.get(name))


def routing_fields(
    document: JsonObject, context: RequestContext, model: str, rules: Rules
) -> tuple[OpenAIFields, str]:
    """Return a request's routing options, and the field that names its tier; ``InvalidBodyError``: one is not valid."""
    header_options = _from_headers(context, rules)
    body_options = _from_body(document, rules)
    policy: TierPolicy = "prefer" if model == "auto" else rules.tier_policy
    if not header_options and not body_options:
        return _plain_fields(model, policy), "model"
    options = {**header_options, **body_options}
    if "sla" in options:
        options["sla"] = {
            **header_options.get("sla", {}),
            **body_options.get("sla", {}),
        }
    if "tier" in body_options:
        hint_field = "qarr.tier"
    elif "tier" in header_options:
        hint_field = "x-qarr-tier"
    else:
        hint_field = "model"
        options = {"tier": model, "tier_policy": policy, **options}
    return OpenAIFields.model_validate(options, context=rules), hint_field


def _sequences(
    document: JsonObject, prompt: PromptText, max_sequences: int, *, is_chat: bool
) -> int:
    """Return the answers that a request asks for: its prompts times the choices for each.

    ``InvalidBodyError``: they are more than ``max_sequences``.
    """
    field_name = "n"
    choices = as_integer(document.get("n")) or 1
    if not is_chat:
        # older engines compute so many
        best_of = as_integer(document.get("best_of")) or 1
        if best_of > choices:
            field_name = "best_of"
            choices = best_of
    sequences = max(choices, 1) * prompt.prompts
    if sequences <= max_sequences:
        return sequences
    if prompt.prompts > max_sequences:
        allowed_text = f"at most {max_sequences} prompts in one request"
        raise InvalidBodyError(
            (FieldProblem("prompt", f"has {prompt.prompts} prompts", allowed_text),)
        )
    problem_text = f"asks for {str(choices)[:20]} answers"
    if prompt.prompts > 1:
        problem_text += f" for each of {prompt.prompts} prompts"
    allowed_text = f"an integer from 1 to {max_sequences // prompt.prompts}"
    raise InvalidBodyError((FieldProblem(field_name, problem_text, allowed_text),))


def _from_headers(context: RequestContext, rules: Rules) -> dict[str, Any]:
    """Return the options in a request's headers, each checked by itself, so that errors name the header."""
    options: dict[str, Any] = {}
    problems: list[FieldProblem] = []
    for header_name, option_path in HEADERS.items():
        if header_name not in context.request_headers:
            continue
        header_text = context.request_headers[header_name].decode("latin-1")
        try:
            header_option = _header_option(option_path, header_text, rules)
        except ValueError:  # pydantic's errors are ValueErrors too
            allowed_text = _allowed(rules)[".".join(option_path)]
            problems.append(
                FieldProblem(
                    header_name.decode(), f"is {header_text[:40]!r}", allowed_text
                )
            )
            continue
        if "sla" in header_option:
            options.setdefault("sla", {}).update(header_option["sla"])
        else:
            options.update(header_option)
    if problems:
        raise InvalidBodyError(tuple(problems))
    return options


def _header_option(path: tuple[str, ...], text: str, rules: Rules) -> dict[str, Any]:
    """Return one header's option as the ``qarr`` object has it; ``ValueError``: it is not valid."""
    if path[0] == "sla":
        option: dict[str, Any] = {"sla": {path[1]: float(text)}}
    else:
        option = {path[0]: text}
    OpenAIFields.model_validate(option, context=rules)
    return option


def _from_body(document: JsonObject, rules: Rules) -> dict[str, Any]:
    """Return the options that a body's ``qarr`` object names; ``InvalidBodyError``: one is not valid."""
    options = document.get("qarr")
    if options is None:
        return {}
    try:
        fields = OpenAIFields.model_validate(options, context=rules)
    except ValidationError as error:
        allowed_values = _allowed(rules)
        problems = tuple(
            _problem_of(error_details, allowed_values)
            for error_details in first_errors(error)
        )
        raise InvalidBodyError(problems) from None
    return fields.model_dump(exclude_unset=True)


def _problem_of(
    error_details: ErrorDetails, allowed_values: Mapping[str, str]
) -> FieldProblem:
    field_name = ".".join(map(str, error_details["loc"]))[:MAX_NAME_CHARS]
    problem_text = message_of(error_details)
    if error_details["type"] == "extra_forbidden":
        problem_text = "there is no such field"
    return FieldProblem(
        f"qarr.{field_name}".rstrip("."),
        problem_text,
        allowed_values.get(field_name, allowed_values[""]),
    )


def priority_to_send(
    document: JsonObject, fields: OpenAIFields, context: RequestContext
) -> int | None:
    """Return the priority to send to the engine, within what the caller's key allows; None leaves the body's own."""
    if "priority" in fields.model_fields_set:
        return class_priority(context.caller, fields.priority, "qarr.priority")
    body_priority = document.get("priority")
    if body_priority is None:
        return class_priority(context.caller, None, "") or None
    priority = as_integer(body_priority)
    if priority is None:  # the engine says best what is wrong with it
        return None
    return priority_within(context.caller, priority, "priority", str(priority))
