"""Anthropic's ``/v1/messages`` and OpenAI's ``/v1/responses``, routed. Bodies and events pass as they are, both ways.

Their streams are events with names. Half of one cannot be continued by another engine, since these endpoints of vLLM do not
tell token ids: after the first byte a fault ends a stream with an error event. Malformed parts of a body read as empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request

from classifier import TokenCounter
from router.api.bodies import FieldProblem, InvalidBodyError
from router.api.endpoint import Endpoint, Receiver, Service, as_it_came, report_on, with_member
from router.api.models import read_document, resolve
from router.api.openai import priority_to_send, routing_fields, undraftable_of
from router.api.openai_prompt import PART_TOKENS, SYSTEM_ROLES, last_turn, other_parts, text_of
from router.api.paths import MESSAGES, RESPONSES, error_form
from router.api.problems import NotStoredError, describe
from router.api.provider import provider_of, with_provider
from router.pipeline.registry import ActiveRequest
from router.pipeline.request import MAX_COUNT, Call, PromptText, RequestContext, chat_part, session_of
from router.upstream.engine_request import EngineRequest, may_be_silent
from router.upstream.errors import UpstreamError
from router.upstream.json_object import JsonObject, as_boolean, as_integer
from router.upstream.named_events import MESSAGE_FORMAT, RESPONSE_FORMAT
from router.upstream.sse import SEPARATOR, AnswerFormat, Chunk, written
from tiers.prefix_memory import Part

_ASIDE = {"tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking"}  # blocks that are no other part


@dataclass(slots=True)
class Conversation:
    # messages with a role and a text, the system prompt first
    turns: list[dict[str, Any]] = field(default_factory=list)
    # further texts that are read: tools, calls of them, and what these returned
    extras: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)  # kinds of parts that are not text

    def add(self, role: Any, text: str) -> None:
        self.turns.append({"role": role, "content": text})

    @property
    def chat(self) -> Sequence[Any] | None:
        """Return it as a chat; None where that would not say all of it."""
        return None if self.extras or self.others else self.turns

    def prompt(self, counter: TokenCounter) -> PromptText:
        texts = [turn["content"] for turn in self.turns]
        parts = [chat_part(turn["role"], turn["content"], counter.count(turn["content"])) for turn in self.turns]
        parts += [Part(text, counter.count(text)) for text in self.extras]
        tokens = sum(part.tokens for part in parts) + PART_TOKENS * len(self.others)
        return PromptText(
            text=last_turn(self.turns, texts),
            prompt_tokens=tokens,
            all_tokens=tokens,
            messages=len(self.turns),
            system=bool(self.turns) and self.turns[0]["role"] in SYSTEM_ROLES,
            other_parts=tuple(dict.fromkeys(self.others)),
            parts=() if self.others else tuple(parts),
        )


def read_messages(document: JsonObject) -> Conversation:
    """Read the body of a message request. What tools returned is no turn of the user, though it has the user's role."""
    read = _begun(document, document.get("system"))
    for message in _objects(document.get("messages")):
        content = message.get("content")
        text, blocks = text_of(content), _objects(content)
        results = [block for block in blocks if block.get("type") == "tool_result"]
        read.add("tool" if results and not text else message.get("role"), text)
        read.extras += [text_of(block.get("content")) for block in results]
        read.extras += [str(block.get("input")) for block in blocks if block.get("type") == "tool_use"]
        parts = [block for block in blocks if str(block.get("type")) not in _ASIDE]
        for some in (parts, *(block.get("content") for block in results)):
            read.others += other_parts(some)
    return read


def read_input(document: JsonObject) -> Conversation:
    read = _begun(document, document.get("instructions"))
    given = document.get("input")
    if isinstance(given, str):
        read.add("user", given)
    for item in _objects(given):
        if "role" in item:
            read.add(item["role"], text_of(item.get("content")))
            read.others += other_parts(item.get("content"))
        elif item.get("type") == "function_call":
            read.add("assistant", "")
            read.extras.append(str(item.get("arguments")))
        elif item.get("type") == "function_call_output":
            read.add("tool", "")
            read.extras.append(text_of(item.get("output")))
            read.others += other_parts(item.get("output"))
    return read


def _begun(document: JsonObject, system: Any) -> Conversation:
    read = Conversation()
    if text := text_of(system):
        read.add("system", text)
    if document.get("tools"):
        read.extras.append(document.text_of("tools"))
    return read


def _objects(items: Any) -> list[dict[str, Any]]:
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


_NUMBER = b'"sequence_number":'  # quotes in a JSON string are escaped, so it stands only where such a member does
# What a body must not ask for: a response would have to be stored, and requests sent to whoever has it.
_NEEDS_STORE = {
    "previous_response_id": "null or absent; send the whole conversation as input",
    "conversation": "null or absent; send the whole conversation as input",
    "background": "false or absent; the answer comes with this request, streamed if you like",
}


def read_response_body(document: JsonObject) -> Conversation:
    """Read the body of a request for a response; ``InvalidBodyError``: it asks for what needs stored responses."""
    given = {name: document.get(name) for name in _NEEDS_STORE}
    given["background"] = as_boolean(given["background"]) or None  # of a wrong type: the engine says what it is
    asked = [name for name, value in given.items() if value is not None]
    if asked:
        raise InvalidBodyError(
            tuple(
                FieldProblem(name, "needs stored responses, and none are stored here", _NEEDS_STORE[name])
                for name in asked
            )
        )
    return read_input(document)


def _named_sessions(document: JsonObject) -> tuple[Any, ...]:
    metadata = document.get("metadata")
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    return document.get("prompt_cache_key"), document.get("user"), user


class _Api(NamedTuple):
    path: str
    read: Callable[[JsonObject], Conversation]  # reads the conversation that a body holds
    limit: str  # the body's member that bounds the output tokens
    answers: AnswerFormat  # how engines' answers are read


def _parse(api: _Api, body: bytes, context: RequestContext, service: Service) -> Call:
    """Read what routing needs of a body, as ``openai.parse`` does; the rest of it goes to the engine as it is."""
    settings, rules, fleet = service.settings, service.rules, service.pipeline.fleet
    document = read_document(body)
    conversation = api.read(document)
    choice = resolve(document, settings.openai, fleet)
    fields, hint_field = routing_fields(document, context, choice.tier, rules)
    if fields.truncate is not None:
        wrong = f"is not supported at {api.path}", "at /generate, /v1/chat/completions and /v1/completions"
        raise InvalidBodyError((FieldProblem("truncate", *wrong),))
    provider = provider_of(document, rules)
    named = as_integer(document.get(api.limit))
    limit = settings.limits.default_max_tokens if named is None else named
    priority, streamed = priority_to_send(document, fields, context), as_boolean(document.get("stream"))
    return Call(
        context=context,
        prompt=conversation.prompt(service.pipeline.counter),
        options=with_provider(fields.options(priority or 0, hint_field), provider, fleet),
        asked=EngineRequest(
            document=document,
            path=api.path,
            request_id=context.request_id,
            answers=api.answers,
            streamed=streamed,
            priority=priority,
            counts=False,
            may_be_silent=may_be_silent(document),
            chat=conversation.chat,
            adapter=choice.adapter,
        ),
        max_tokens=min(max(limit, 1), MAX_COUNT),
        limited=named is not None,
        streamed=streamed,
        report=fields.report,
        undraftable=undraftable_of(document),
        session=session_of(context, *_named_sessions(document)),
    )


class PassedEvents:
    """Passes a stream's events on as they are. Its last one waits until the answer is complete, and gets the report."""

    __slots__ = ("_context", "_last", "_latest", "_out", "_report")

    def __init__(self, call: Call, active: ActiveRequest, out: Receiver) -> None:
        self._context, self._report, self._out = call.context, report_on(call, active), out
        self._last = self._latest = b""

    def feed(self, chunks: Sequence[Chunk]) -> bool:
        events = [written(chunk.raw) for chunk in chunks if not chunk.last]
        if chunks[-1].last:
            self._last = chunks[-1].raw
        self._latest = next((event for event in reversed(events) if not event.startswith(b":")), self._latest)
        return self._out.feed(events)

    def end(self) -> list[bytes]:
        last = self._last if self._report is None else with_member(self._last, "qarr", self._report)
        return [last + SEPARATOR]

    def failure(self, error: UpstreamError) -> list[bytes]:
        number = self._latest.rpartition(_NUMBER)[2].split(b",")[0].split(b"}")[0]
        following = int(number) + 1 if number.isdigit() else 0
        form = error_form(self._context.route)
        return [describe(error).event(form, self._context.ids, following) + SEPARATOR]


_APIS = (
    _Api(MESSAGES, read_messages, "max_tokens", MESSAGE_FORMAT),
    _Api(RESPONSES, read_response_body, "max_output_tokens", RESPONSE_FORMAT),
)
NAMED_EVENT_ENDPOINTS = [Endpoint(api.path, partial(_parse, api), PassedEvents, as_it_came) for api in _APIS]


async def stored_response(request: Request) -> None:
    name = request.path_params["id"][:100]
    raise NotStoredError(f"responses are not stored here, so {name!r} cannot be read: keep the answer itself")
