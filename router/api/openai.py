"""OpenAI's ``/v1/chat/completions`` and ``/v1/completions``, routed; and how routing options are read under ``/v1``."""

from __future__ import annotations

import json
from functools import cache, partial
from typing import Any

from msgspec.structs import replace
from pydantic import ValidationError

from router.api.bodies import (
    MOST_NAME_CHARS,
    FieldProblem,
    InvalidBodyError,
    RoutingFields,
    Rules,
    first_errors,
    message_of,
    routing_allowed,
)
from router.api.endpoint import Endpoint, Service, as_it_came
from router.api.models import read_document, resolve
from router.api.openai_events import RelayedEvents
from router.api.openai_prompt import beside, read_chat, read_completion
from router.api.paths import CHAT, COMPLETIONS
from router.api.provider import provider_of, with_provider
from router.api.settings import TierPolicy
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

# Header → member of the ``qarr`` object; numbers are written as such.
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
UNDRAFTABLE = ("min_p", "logit_bias")  # vLLM 0.32, SamplingParams


class OpenAIFields(RoutingFields):
    """The ``qarr`` object of a body (``extra_body`` in the SDKs)."""

    report: bool = False


@cache  # of known names only
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
        InvalidBodyError: It is no JSON object, or its options are not valid.
        UnknownModelError: Its model is none of ours.
        BeyondKeyError: The priority is beyond the caller's key.
    """
    settings, rules, pipeline = service.settings, service.rules, service.pipeline
    document, chat = read_document(body), path == CHAT
    prompt = (read_chat if chat else read_completion)(document, pipeline.counter)
    choice = resolve(document, settings.openai, pipeline.fleet)
    fields, hint_field = routing_fields(document, context, choice.tier, rules)
    provider = provider_of(document, rules)
    limit = named = token_limit(document, chat=chat)
    if limit is None:
        limit = settings.limits.default_max_tokens if chat else DEFAULT_COMPLETION
    sequences = _sequences(document, prompt, settings.limits.max_sequences, chat=chat)
    priority, streamed = priority_to_send(document, fields, context), as_boolean(document.get("stream"))
    continuable, stream_options = None, document.get("stream_options")
    if streamed:
        continuable = continuable_of(document, priority or 0, choices=sequences, chat=chat)
    return Call(
        context=context,
        prompt=prompt,
        options=with_provider(fields.options(priority or 0, hint_field), provider, pipeline.fleet),
        asked=EngineRequest(
            document=document,
            path=path,
            operation="chat" if chat else "text_completion",
            request_id=context.request_id,
            streamed=streamed,
            priority=priority,
            wants_usage=isinstance(stream_options, dict) and as_boolean(stream_options.get("include_usage")),
            chat=messages_in(document),
            asks_token_ids=continuable is not None or (streamed and chat and may_ask_token_ids(document)),
            may_be_silent=may_be_silent(document),
            continuable=continuable,
            adapter=choice.adapter,
        ),
        max_tokens=min(max(limit, 1), MAX_COUNT),
        limited=named is not None,
        sequences=sequences,
        streamed=streamed,
        report=fields.report,
        undraftable=undraftable_of(document),
        session=session_of(context, document.get("prompt_cache_key"), document.get("user")),
        cut=None if fields.truncate is None else _cut,
    )


def _cut(call: Call, cutter: Cutter) -> Call:
    document, counter, made, dropped = call.asked.document, cutter.counter, None, 0
    assert isinstance(document, JsonObject)
    name, read = ("messages", read_chat) if call.prompt.messages else ("prompt", read_completion)
    given = document.get(name)
    if name == "prompt":
        made = cut_prompts(given, cutter)
    elif all(isinstance(message, dict) for message in given):  # else the engine says best what is wrong with it
        made = cutter.chat(given, sum(counter.count(text) for text in beside(document)))
        dropped = len(given) - len(made or ())
    if made is None:
        return call
    document = JsonObject.parse(document.edited({name: json.dumps(made).encode()}))
    asked = replace(call.asked, document=document, chat=messages_in(document))
    shorter = replace(call, asked=asked, prompt=read(document, counter))
    return replace(shorter, truncated=cutter.disclosed(shorter, dropped))


COMPLETION_ENDPOINTS = [Endpoint(path, partial(parse, path), RelayedEvents, as_it_came) for path in (CHAT, COMPLETIONS)]


def undraftable_of(document: JsonObject) -> str:
    return " and ".join(name for name in UNDRAFTABLE if document.get(name))


def routing_fields(document: JsonObject, context: RequestContext, model: str, rules: Rules) -> tuple[OpenAIFields, str]:
    """Return a request's routing options, and the field that names its tier; ``InvalidBodyError``: one is not valid."""
    by_header, by_body = _from_headers(context, rules), _from_body(document, rules)
    policy: TierPolicy = "prefer" if model == "auto" else rules.tier_policy
    if not by_header and not by_body:
        return _plain_fields(model, policy), "model"
    given = {**by_header, **by_body}
    if "sla" in given:
        given["sla"] = {**by_header.get("sla", {}), **by_body.get("sla", {})}
    field = "qarr.tier" if "tier" in (document.get("qarr") or {}) else "x-qarr-tier" if "tier" in given else "model"
    named = {"tier": model, "tier_policy": policy} if field == "model" else {}
    return OpenAIFields.model_validate({**named, **given}, context=rules), field


def _sequences(document: JsonObject, prompt: PromptText, most: int, *, chat: bool) -> int:
    """Return the answers that a request asks for: its prompts times the choices for each."""
    field, each = "n", as_integer(document.get("n")) or 1
    if not chat and (best_of := as_integer(document.get("best_of")) or 1) > each:  # what older engines compute
        field, each = "best_of", best_of
    choices = max(each, 1) * prompt.prompts
    if choices <= most:
        return choices
    if prompt.prompts > most:
        problem = FieldProblem("prompt", f"has {prompt.prompts} prompts", f"at most {most} prompts in one request")
    else:
        prompts = f" for each of {prompt.prompts} prompts" if prompt.prompts > 1 else ""
        asked = f"asks for {str(each)[:20]} answers{prompts}"
        problem = FieldProblem(field, asked, f"an integer from 1 to {most // prompt.prompts}")
    raise InvalidBodyError((problem,))


def _from_headers(context: RequestContext, rules: Rules) -> dict[str, Any]:
    """Return the options in a request's headers, each checked by itself, so that errors name the header."""
    given: dict[str, Any] = {}
    problems = []
    for name in [name for name in HEADERS if name in context.sent]:
        text, path = context.sent[name].decode("latin-1"), HEADERS[name]
        try:
            value: Any = float(text) if path[0] == "sla" else text
            one = {path[-1]: value} if len(path) == 1 else {path[0]: {path[1]: value}}
            OpenAIFields.model_validate(one, context=rules)
        except ValueError:  # pydantic's is one as well
            problems.append(FieldProblem(name.decode(), f"is {text[:40]!r}", _allowed(rules)[".".join(path)]))
            continue
        if len(path) == 1:
            given[path[0]] = value
        else:
            given.setdefault("sla", {})[path[1]] = value
    if problems:
        raise InvalidBodyError(tuple(problems))
    return given


def _from_body(document: JsonObject, rules: Rules) -> dict[str, Any]:
    given = document.get("qarr")
    if given is None:
        return {}
    try:
        fields = OpenAIFields.model_validate(given, context=rules)
    except ValidationError as error:
        problems, allowed = [], _allowed(rules)
        for e in first_errors(error):
            field = ".".join(map(str, e["loc"]))[:MOST_NAME_CHARS]
            text = "there is no such field" if e["type"] == "extra_forbidden" else message_of(e)
            problems.append(FieldProblem(f"qarr.{field}".rstrip("."), text, allowed.get(field, allowed[""])))
        raise InvalidBodyError(tuple(problems)) from None
    return fields.model_dump(exclude_unset=True)


def priority_to_send(document: JsonObject, fields: OpenAIFields, context: RequestContext) -> int | None:
    """Return the priority to send; None leaves the body's own. See ``priority_within``."""
    if "priority" in fields.model_fields_set:
        return class_priority(context.caller, fields.priority, "qarr.priority")
    own = document.get("priority")
    if own is None:
        return class_priority(context.caller, None, "") or None
    value = as_integer(own)
    return None if value is None else priority_within(context.caller, value, "priority", str(value))
