"""OpenAI's ``/v1/chat/completions`` and ``/v1/completions``, routed; and how routing options are read under ``/v1``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from msgspec.structs import replace
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from classifier import TokenCounter
from router.api.bodies import (
    MAX_NAME_CHARS,
    FieldProblem,
    InvalidBodyError,
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
from router.upstream.engine_request import (
    DEFAULT_COMPLETION,
    EngineRequest,
    continuable_of,
    may_ask_token_ids,
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
    settings = service.settings
    pipeline = service.pipeline
    is_chat = path == CHAT
    document = read_document(body)
    prompt = (
        read_chat(document, pipeline.counter)
        if is_chat
        else read_completion(document, pipeline.counter)
    )
    choice = resolve(document, settings.openai, pipeline.fleet)
    fields, hint_field = routing_fields(
        document, context, choice.tier, rules=service.rules
    )
    provider = provider_of(document, service.rules)
    sequences = _sequences(
        document, prompt, settings.limits.max_sequences, is_chat=is_chat
    )
    priority = priority_to_send(document, fields, context)
    engine_request = _engine_request(
        document,
        path,
        context.request_id,
        priority=priority,
        choices=sequences,
        adapter=choice.adapter,
    )
    named_limit = token_limit(document, chat=is_chat)
    cut = None
    if fields.truncate is not None:
        cut = _cut
    return Call(
        context=context,
        prompt=prompt,
        options=with_provider(
            fields.options(priority or 0, hint_field), provider, pipeline.fleet
        ),
        engine_request=engine_request,
        max_tokens=_max_tokens(named_limit, settings.limits, is_chat=is_chat),
        is_limited=named_limit is not None,
        sequences=sequences,
        is_streamed=engine_request.is_streamed,
        wants_report=fields.report,
        undraftable=undraftable_of(document),
        session=session_of(
            context, document.get("prompt_cache_key"), document.get("user")
        ),
        cut_prompt=cut,
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
    continuable = None
    asks_token_ids = False
    if is_streamed:
        continuable = continuable_of(
            document, priority or 0, choices=choices, chat=is_chat
        )
        asks_token_ids = continuable is not None or (
            is_chat and may_ask_token_ids(document)
        )
    stream_options = document.get("stream_options")
    return EngineRequest(
        document=document,
        path=path,
        operation="chat" if is_chat else "text_completion",
        request_id=request_id,
        is_streamed=is_streamed,
        priority=priority,
        wants_usage=isinstance(stream_options, dict)
        and as_boolean(stream_options.get("include_usage")),
        chat=messages_in(document),
        asks_token_ids=asks_token_ids,
        may_be_silent=may_be_silent(document),
        continuable=continuable,
        adapter=adapter,
    )


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
    shorter = _with_prompt(
        call, cutter, "messages", prompt=kept_messages, read=read_chat
    )
    return replace(
        shorter, truncated=cutter.disclosed(shorter, len(messages) - len(kept_messages))
    )


def _cut_prompt(call: Call, cutter: Cutter) -> Call:
    prompt = cut_prompts(call.engine_request.document.get("prompt"), cutter)
    if prompt is None:
        return call
    shorter = _with_prompt(call, cutter, "prompt", prompt=prompt, read=read_completion)
    return replace(shorter, truncated=cutter.disclosed(shorter, 0))


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
    field = "n"
    choices = as_integer(document.get("n")) or 1
    if not is_chat:
        # older engines compute so many
        best_of = as_integer(document.get("best_of")) or 1
        if best_of > choices:
            field = "best_of"
            choices = best_of
    sequences = max(choices, 1) * prompt.prompts
    if sequences <= max_sequences:
        return sequences
    if prompt.prompts > max_sequences:
        allowed = f"at most {max_sequences} prompts in one request"
        raise InvalidBodyError(
            (FieldProblem("prompt", f"has {prompt.prompts} prompts", allowed),)
        )
    problem = f"asks for {str(choices)[:20]} answers"
    if prompt.prompts > 1:
        problem += f" for each of {prompt.prompts} prompts"
    allowed = f"an integer from 1 to {max_sequences // prompt.prompts}"
    raise InvalidBodyError((FieldProblem(field, problem, allowed),))


def _from_headers(context: RequestContext, rules: Rules) -> dict[str, Any]:
    """Return the options in a request's headers, each checked by itself, so that errors name the header."""
    options: dict[str, Any] = {}
    problems: list[FieldProblem] = []
    for name, path in HEADERS.items():
        if name not in context.request_headers:
            continue
        text = context.request_headers[name].decode("latin-1")
        try:
            option = _header_option(path, text, rules)
        except ValueError:  # pydantic's errors are ValueErrors too
            problems.append(
                FieldProblem(
                    name.decode(), f"is {text[:40]!r}", _allowed(rules)[".".join(path)]
                )
            )
            continue
        if "sla" in option:
            options.setdefault("sla", {}).update(option["sla"])
        else:
            options.update(option)
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
        allowed = _allowed(rules)
        problems = tuple(
            _problem_of(details, allowed) for details in first_errors(error)
        )
        raise InvalidBodyError(problems) from None
    return fields.model_dump(exclude_unset=True)


def _problem_of(error: ErrorDetails, allowed: Mapping[str, str]) -> FieldProblem:
    field = ".".join(map(str, error["loc"]))[:MAX_NAME_CHARS]
    problem = (
        "there is no such field"
        if error["type"] == "extra_forbidden"
        else message_of(error)
    )
    return FieldProblem(
        f"qarr.{field}".rstrip("."), problem, allowed.get(field, allowed[""])
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
