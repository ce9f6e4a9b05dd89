"""Anthropic's ``/v1/messages`` and OpenAI's ``/v1/responses``, routed. Bodies and events pass unchanged, both ways.

Their streams are events with names. A broken stream is gone on with by another engine if both can resume answers
(``tiers/engine_plugin``); otherwise a fault after the first byte ends it with an error event. Malformed parts of a body read
as empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request

from classifier import TokenCounter, ToolUse
from router.api.bodies import FieldProblem, InvalidBodyError
from router.api.endpoint import (
    Endpoint,
    Receiver,
    Service,
    engine_body,
    report_on,
    with_member,
)
from router.api.models import read_document, resolve
from router.api.openai import priority_to_send, routing_fields, undraftable_of
from router.api.openai_prompt import (
    PART_TOKENS,
    SYSTEM_ROLES,
    last_turn,
    offers_tools,
    other_parts,
    text_of,
)
from router.api.paths import MESSAGES, RESPONSES, error_form
from router.api.problems import NotStoredError, describe
from router.api.provider import provider_of, with_provider
from router.pipeline.registry import ActiveRequest
from router.pipeline.request import (
    MAX_COUNT,
    Call,
    PromptText,
    RequestContext,
    chat_part,
    session_of,
)
from router.upstream.engine_request import (
    EngineRequest,
    may_be_resumed,
    may_be_silent,
    may_response_be_resumed,
)
from router.upstream.engine_stream import EngineStream
from router.upstream.errors import UpstreamError
from router.upstream.json_object import JsonObject, as_boolean, as_integer
from router.upstream.message_splicer import MessageSplicer
from router.upstream.named_events import MESSAGE_FORMAT, MESSAGE_OVER, RESPONSE_FORMAT
from router.upstream.response_splicer import ResponseSplicer
from router.upstream.splicing import Splicer
from router.upstream.sse import SEPARATOR, AnswerFormat, Chunk, written

# Types of Anthropic's blocks that are not counted as a part which is not text: they are read by themselves, or ignored.
_NO_OTHER_PARTS = {
    "tool_use",
    "tool_result",
    "tool_reference",
    "thinking",
    "redacted_thinking",
}


# Types of items that are calls of tools, with the member that has the arguments: custom tools take a text instead of JSON.
_CALL_ARGUMENTS = {"function_call": "arguments", "custom_tool_call": "input"}
_RESULT_ITEMS = {"function_call_output", "custom_tool_call_output"}


@dataclass(slots=True)
class Conversation:
    # messages with a role and a text, the system prompt first
    turns: list[dict[str, Any]] = field(default_factory=list)
    # further texts that are read: tools, calls of them, and what these returned
    extras: list[str] = field(default_factory=list)
    # roles and texts of all of it, in the order in which a model reads it, as prefix caches see it
    written: list[tuple[str, str]] = field(default_factory=list)
    # kinds of parts that are not text
    other_parts: list[str] = field(default_factory=list)
    # what its structure has to do with tools; None: nothing
    tool_use: ToolUse | None = None

    def add(self, role: Any, text: str) -> None:
        self.turns.append({"role": role, "content": text})
        self.written.append((str(role), text))

    def add_extra(self, role: str, text: str) -> None:
        """Add a text that is no message: of tools, of a call by the assistant, or of what a tool returned."""
        self.extras.append(text)
        self.written.append((role, text))

    @property
    def chat(self) -> Sequence[Any] | None:
        """Return the conversation as a chat; None where a chat would not hold all of it."""
        if self.extras or self.other_parts:
            return None
        return self.turns

    def prompt(self, counter: TokenCounter) -> PromptText:
        """Return what routing reads of the conversation."""
        texts = [turn["content"] for turn in self.turns]
        parts = [
            chat_part(role, text, counter.count(text)) for role, text in self.written
        ]
        prompt_tokens = sum(part.tokens for part in parts) + PART_TOKENS * len(
            self.other_parts
        )
        return PromptText(
            text=last_turn(self.turns, texts),
            prompt_tokens=prompt_tokens,
            all_tokens=prompt_tokens,
            messages=len(self.turns),
            system=bool(self.turns) and self.turns[0]["role"] in SYSTEM_ROLES,
            other_parts=tuple(dict.fromkeys(self.other_parts)),
            parts=() if self.other_parts else tuple(parts),
            tool_use=self.tool_use,
        )


def read_messages(document: JsonObject) -> Conversation:
    """Read the body of a message request."""
    conversation = _begin(document, document.get("system"))
    messages = _objects(document.get("messages"))
    for message in messages:
        _read_message(message, conversation)
    if messages and _of_type("tool_result", _objects(messages[-1].get("content"))):
        conversation.tool_use = ToolUse.RESULT
    return conversation


def _of_type(kind: str, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [block for block in blocks if block.get("type") == kind]


def _read_message(message: dict[str, Any], conversation: Conversation) -> None:
    """Add a message to a conversation. Results of tools are no turn of the user, though they have the user's role."""
    content = message.get("content")
    text = text_of(content)
    role = message.get("role")
    if isinstance(content, str):
        conversation.add(role, text)
        return
    blocks = _objects(content)
    results = _of_type("tool_result", blocks)
    if results and not text:
        role = "tool"
    for result in results:
        conversation.add_extra("tool", text_of(result.get("content")))
    conversation.add(role, text)
    for tool_call in _of_type("tool_use", blocks):
        conversation.add_extra("assistant", str(tool_call.get("input")))
    counted_blocks = [
        block for block in blocks if str(block.get("type")) not in _NO_OTHER_PARTS
    ]
    conversation.other_parts += other_parts(counted_blocks)
    for result in results:
        conversation.other_parts += other_parts(result.get("content"))


def read_input(document: JsonObject) -> Conversation:
    """Read the body of a request for a response: its input is a text, or a list of items."""
    conversation = _begin(document, document.get("instructions"))
    response_input = document.get("input")
    if isinstance(response_input, str):
        conversation.add("user", response_input)
    items = _objects(response_input)
    for item in items:
        _read_item(item, conversation)
    if items and str(items[-1].get("type")) in _RESULT_ITEMS:
        conversation.tool_use = ToolUse.RESULT
    return conversation


def _read_item(item: dict[str, Any], conversation: Conversation) -> None:
    kind = str(item.get("type"))
    if "role" in item:
        conversation.add(item["role"], text_of(item.get("content")))
        conversation.other_parts += other_parts(item.get("content"))
    elif kind in _CALL_ARGUMENTS:
        conversation.add("assistant", "")
        arguments = item.get(_CALL_ARGUMENTS[kind])
        conversation.add_extra("assistant", str(arguments))
    elif kind in _RESULT_ITEMS:
        conversation.add("tool", "")
        conversation.add_extra("tool", text_of(item.get("output")))
        conversation.other_parts += other_parts(item.get("output"))


def _begin(document: JsonObject, system_prompt: Any) -> Conversation:
    """Return a conversation with what stands before its messages: the system prompt, and tools."""
    conversation = Conversation()
    system_text = text_of(system_prompt)
    if system_text:
        conversation.add("system", system_text)
    if document.get("tools"):
        conversation.add_extra("tools", document.text_of("tools"))
    if offers_tools(document):
        conversation.tool_use = ToolUse.OFFERED
    return conversation


def _objects(items: Any) -> list[dict[str, Any]]:
    if not isinstance(items, list):
        return []
    return [item for item in items if isinstance(item, dict)]


_MESSAGE_STOP = b'event: %b\ndata: {"type":"%b"}' % ((MESSAGE_OVER.encode(),) * 2)
# Quotes in a JSON string are escaped, so this stands only where an event has such a member.
_SEQUENCE_NUMBER = b'"sequence_number":'
# Members that a body must not have: they need responses that are stored, and requests that are sent to whoever has them.
_NEEDS_STORE = {
    "previous_response_id": "null or absent; send the whole conversation as input",
    "conversation": "null or absent; send the whole conversation as input",
    "background": "false or absent; the answer comes with this request, streamed if you like",
}


def read_response_body(document: JsonObject) -> Conversation:
    """Read the body of a request for a response; ``InvalidBodyError``: it asks for what needs stored responses."""
    values = {name: document.get(name) for name in _NEEDS_STORE}
    # The engine says what is wrong with a value that is no boolean.
    values["background"] = as_boolean(values["background"]) or None
    problems = [
        FieldProblem(
            name, "needs stored responses, and none are stored here", _NEEDS_STORE[name]
        )
        for name, value in values.items()
        if value is not None
    ]
    if problems:
        raise InvalidBodyError(tuple(problems))
    return read_input(document)


def _session_names(document: JsonObject) -> tuple[Any, Any, Any]:
    """Return the members of a body that may name its conversation, in order of preference."""
    metadata = document.get("metadata")
    user_id = None
    if isinstance(metadata, dict):
        user_id = metadata.get("user_id")
    return document.get("prompt_cache_key"), document.get("user"), user_id


class _Api(NamedTuple):
    path: str
    # reads the conversation that a body holds
    read: Callable[[JsonObject], Conversation]
    limit_member: str  # the body's member that bounds the output tokens
    answers: AnswerFormat  # how engines' answers are read
    # joins resumed answers to what their callers have
    splicer: Callable[[], Splicer]
    # tells whether a body's streamed answer may be resumed
    may_be_resumed: Callable[[JsonObject], bool]


def _parse(api: _Api, body: bytes, context: RequestContext, service: Service) -> Call:
    """Read what routing needs of a body, as ``openai.parse`` does; the rest of it goes to the engine as it is."""
    fleet = service.pipeline.fleet
    document = read_document(body)
    conversation = api.read(document)
    model_choice = resolve(document, service.settings.openai, fleet)
    fields, hint_field = routing_fields(
        document, context, model_choice.tier, rules=service.rules
    )
    if fields.truncate is not None:
        raise InvalidBodyError((_cannot_truncate(api),))
    provider = provider_of(document, service.rules)
    named_limit = as_integer(document.get(api.limit_member))
    max_tokens = named_limit
    if max_tokens is None:
        max_tokens = service.settings.limits.default_max_tokens
    priority = priority_to_send(document, fields, context)
    is_streamed = as_boolean(document.get("stream"))
    splicer = None
    if is_streamed and api.may_be_resumed(document):
        splicer = api.splicer
    return Call(
        context=context,
        prompt=conversation.prompt(service.pipeline.counter),
        options=with_provider(
            fields.options(priority or 0, hint_field), provider, fleet
        ),
        engine_request=EngineRequest(
            document=document,
            path=api.path,
            request_id=context.request_id,
            answers=api.answers,
            is_streamed=is_streamed,
            priority=priority,
            counts=False,
            may_be_silent=may_be_silent(document),
            chat=conversation.chat,
            adapter=model_choice.adapter,
            splicer=splicer,
        ),
        max_tokens=min(max(max_tokens, 1), MAX_COUNT),
        is_limited=named_limit is not None,
        is_streamed=is_streamed,
        wants_report=fields.report,
        undraftable=undraftable_of(document),
        session=session_of(context, *_session_names(document)),
    )


def _cannot_truncate(api: _Api) -> FieldProblem:
    return FieldProblem(
        "truncate",
        problem=f"is not supported at {api.path}",
        allowed="at /generate, /v1/chat/completions and /v1/completions",
    )


class PassedEvents:
    """Passes a stream's events on as they are. Its last one waits until the answer is complete, and gets the report."""

    __slots__ = (
        "_answer",
        "_context",
        "_last_event",
        "_latest_sent",
        "_out",
        "_report",
    )

    def __init__(self, call: Call, active: ActiveRequest, out: Receiver) -> None:
        assert isinstance(active.answer, EngineStream)
        self._answer = active.answer
        self._context = call.context
        self._report = report_on(call, active)
        self._out = out
        # It ends the stream, and is held back. A message whose last event was lost ends like any other.
        self._last_event = _MESSAGE_STOP
        self._latest_sent = b""  # an error's number follows the one in this event

    def encode(self, chunks: Sequence[Chunk]) -> bool:
        # a chunk without an event tells only ids of tokens
        events = [
            written(chunk.raw) for chunk in chunks if chunk.raw and not chunk.last
        ]
        if chunks and chunks[-1].last:
            self._last_event = chunks[-1].raw
        for event in reversed(events):
            if not event.startswith(b":"):
                self._latest_sent = event
                break
        return self._out.write(events)

    def end(self) -> list[bytes]:
        """Return the events that end an answer. A comment, which clients skip, says which tiers have continued it."""
        events = []
        last_event = self._last_event
        report = self._report
        tiers = [part.tier for part in self._answer.parts]
        if tiers:
            events.append(written(b": continued on " + " ".join(tiers).encode()))
        if report is not None:
            if tiers:
                report = {**report, "continued_on": tiers}
            last_event = with_member(last_event, "qarr", report)
        return [*events, written(last_event)]

    def failure(self, error: UpstreamError) -> list[bytes]:
        form = error_form(self._context.route)
        return [
            describe(error).event(form, self._context.ids, self._following_number())
            + SEPARATOR
        ]

    def _following_number(self) -> int:
        """Return the sequence number after that of the event sent last; 0 if it has none."""
        after_name = self._latest_sent.rpartition(_SEQUENCE_NUMBER)[2]
        number = after_name.split(b",")[0].split(b"}")[0]
        if not number.isdigit():
            return 0
        return int(number) + 1


_APIS = (
    _Api(
        MESSAGES,
        read_messages,
        limit_member="max_tokens",
        answers=MESSAGE_FORMAT,
        splicer=MessageSplicer,
        may_be_resumed=may_be_resumed,
    ),
    _Api(
        RESPONSES,
        read_response_body,
        limit_member="max_output_tokens",
        answers=RESPONSE_FORMAT,
        splicer=ResponseSplicer,
        may_be_resumed=may_response_be_resumed,
    ),
)
NAMED_EVENT_ENDPOINTS = [
    Endpoint(
        api.path,
        parse=partial(_parse, api),
        encoder=PassedEvents,
        unstreamed=engine_body,
    )
    for api in _APIS
]


async def stored_response(request: Request) -> None:
    """Refuse to read a response by its id."""
    response_id = request.path_params["id"][:100]
    raise NotStoredError(
        f"responses are not stored here, so {response_id!r} cannot be read: keep the answer itself"
    )
