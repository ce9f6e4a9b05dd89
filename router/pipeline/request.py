"""A request as the pipeline sees it: parsed and checked by its endpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from classifier import (
    Complexity,
    PromptClass,
    PromptFeatures,
    TokenCounter,
    ToolUse,
    extract,
)
from router.auth.api_keys import ANONYMOUS, BeyondKeyError, Caller
from router.policy.decision import PRIORITIES, Priority, RoutingQuery, Sla, Sort
from router.telemetry.record import Journey
from router.upstream.engine_request import EngineRequest
from tiers.prefix_memory import Part, Prefix
from tiers.spec import TemplateTokens, TierName

NO_BOUNDS = Sla()
Truncate = Literal["oldest", "middle"]
SESSION_HEADER = b"x-session-id"
LONGEST_SESSION = 256  # characters; what follows is ignored
# A conversation without a name is named by the last characters of its user's first words, where agents put the task.
NAMING_CHARS = 4096
NAME_BYTES = 8
RESULT_ROLES = (
    "tool",
    "function",
)  # the role of a tool's result; the second is the older name
# bound of token counts: far above any context or quota, and safe in every counter
MAX_COUNT = 1 << 40


class RequestContext(Struct):
    """Who sends a request, and how it is known. It is there before the body is read, and for requests that are no calls."""

    request_id: str  # the caller's own if it sent a usable one
    trace_id: str
    caller: Caller = ANONYMOUS
    route: str = ""  # the path
    # The request's headers, with names in lower case. Of headers that share a name, the first one is here.
    request_headers: Mapping[bytes, bytes] = field(default_factory=dict)
    # When the last byte of the request had come, by the monotonic clock, in seconds.
    arrived_at: float = field(default_factory=time.monotonic)
    # whether there is a record of it, from which the log has a line
    is_recorded: bool = False
    # what it goes through; None: it is not to be served, or not decided on yet
    journey: Journey | None = None
    # Headers about the key's quotas, filled once they are known. Errors carry them as well.
    quota_headers: dict[str, str] = field(default_factory=dict)

    def header(self, name: bytes) -> str | None:
        value = self.request_headers.get(name)
        if value is None:
            return None
        return value.decode("latin-1")

    @property
    def ids(self) -> dict[str, str]:
        return {"request_id": self.request_id, "trace_id": self.trace_id}

    @property
    def response_headers(self) -> dict[str, str]:
        headers = {"x-request-id": self.request_id, "x-qarr-trace-id": self.trace_id}
        if self.route.startswith("/v1/messages"):
            headers["request-id"] = self.request_id  # Anthropic's name of it
        headers.update(self.quota_headers)
        return headers


class PromptText(Struct, frozen=True):
    text: str  # the user's last turn, which is classified
    # Tokens of the longest prompt, without the chat template. None: those of ``text`` and ``system_tokens``.
    prompt_tokens: int | None = None
    text_tokens: int | None = None  # tokens of ``text``; None: not counted yet
    # tokens of the system prompt; ignored if ``prompt_tokens`` is given
    system_tokens: int = 0
    all_tokens: int = 0  # tokens of all prompts together; 0: there is one prompt
    messages: int = 0  # messages of a chat; 0 for a completion
    system: bool = False  # whether the chat has a system message
    # kinds of parts that are not text, such as ``image_url``
    other_parts: tuple[str, ...] = ()
    prompts: int = 1  # how many there are; each is answered on its own
    # All that the model reads, in order. Empty: not known, as with parts that are not text. A part of -1 tokens is
    # ``text``, whose tokens may not be counted yet.
    parts: tuple[Part, ...] = ()
    # what its structure has to do with tools, which tells its class; None: nothing
    tool_use: ToolUse | None = None
    # a value of the caller's that keeps its prefix from being shared with others; empty: none
    salt: str = ""

    @property
    def continues_tool_loop(self) -> bool:
        """Tell whether a tool's result is among what is new in this turn, so that the model goes on with what it began."""
        if self.tool_use is ToolUse.RESULT:
            return True
        for part in reversed(self.parts):
            if part.role in RESULT_ROLES:
                return True
            if part.role == "assistant":
                return False
        return False

    def classify(
        self, counter: TokenCounter, second: Sequence[float] = ()
    ) -> PromptFeatures:
        """Return the prompt's features. What cannot be read, as images and token ids, counts as complex."""
        features = extract(
            self.text,
            counter,
            context_tokens=self.prompt_tokens or 0,
            second=second,
            tokens=self.text_tokens,
            tool_use=self.tool_use,
        )
        if not self.other_parts and (self.text or not self.prompt_tokens):
            return features
        signals = tuple(f"part that is not text: {kind}" for kind in self.other_parts)
        prompt_class = PromptClass.UNKNOWN
        if self.tool_use is not None:
            prompt_class = PromptClass.TOOLS
            signals += (self.tool_use.value,)
        return replace(
            features,
            prompt_class=prompt_class,
            complexity=Complexity.COMPLEX,
            signals=signals,
        )


class RoutingOptions(Struct, frozen=True):
    hint: TierName | None = None  # the tier asked for; None: any
    hint_field: str = ""  # the field that names it, for errors
    require: bool = False  # hint and SLA are conditions, not preferences
    sla: Sla = NO_BOUNDS
    # in vLLM's numbers, lower first; within what the caller's key allows
    priority: int = PRIORITIES["standard"]
    # the precisions that may serve it, by OpenRouter's names; None: any
    precisions: frozenset[str] | None = None
    only: frozenset[TierName] | None = None  # the tiers that may serve it; None: all
    # the figure that the choice is to be made by; None: by the policy
    sort: Sort | None = None
    # the part to cut of a prompt that fits no context; None: nothing is cut
    truncate: Truncate | None = None
    # a server outside of the fleet may answer if every tier is full
    overflow: bool = True


class Call(Struct, frozen=True, kw_only=True):
    """What a caller asks for: a request whose body is parsed and checked."""

    context: RequestContext
    prompt: PromptText
    options: RoutingOptions
    engine_request: EngineRequest
    max_tokens: int  # the most output tokens of each answer
    # whether its caller named them; otherwise an answer may be shorter, where the context ends
    is_limited: bool = True
    sequences: int = 1  # answers: prompts times choices
    # its parameters that engines with a draft refuse; empty: none
    undraftable: str = ""
    truncated: str = ""  # says what was cut of its prompt, for people; empty: nothing
    session: str = ""  # its caller's name of the conversation; empty: none
    is_streamed: bool = True  # whether the answer is to be a stream
    wants_report: bool = False  # whether the answer is to say who served it
    # whether its stream is kept for a while, so that a client can read on
    is_resumable: bool = False
    # Cuts its prompt by a ``Cutter``, where it fits no context. None: its caller has not asked for it.
    cut_prompt: Callable[[Call, Any], Call] | None = None

    def query(
        self,
        features: PromptFeatures,
        template: TemplateTokens,
        *,
        affinity: bool = False,
    ) -> RoutingQuery:
        prompt = self.prompt
        options = self.options
        template_tokens = 0
        if prompt.messages:
            template_tokens = template.conversation(
                prompt.messages, system=prompt.system
            )
        prompt_tokens = prompt.prompt_tokens
        if prompt_tokens is None:
            prompt_tokens = features.tokens + prompt.system_tokens
        prefix = None
        conversation_tokens = 0
        if affinity:
            prefix = self._prefix(features.tokens, template_tokens)
        if prefix is not None:
            conversation_tokens = prefix.turn_tokens
        return RoutingQuery(
            features,
            prompt_tokens=prompt_tokens + template_tokens,
            max_tokens=self.max_tokens,
            hint=options.hint,
            require=options.require,
            sla=options.sla,
            allowed=self.context.caller.tiers,
            sequences=self.sequences,
            all_prompt_tokens=min(prompt.all_tokens, MAX_COUNT),
            undraftable=self.undraftable,
            adapter=self.engine_request.adapter,
            precisions=options.precisions,
            only=options.only,
            sort=options.sort,
            truncated=self.truncated,
            prefix=prefix,
            conversation_tokens=conversation_tokens,
            in_tool_loop=prompt.continues_tool_loop,
        )

    def _prefix(self, text_tokens: int, template_tokens: int) -> Prefix | None:
        """Return the prompt as prefix caches see it; None: there are several prompts, or it is not known or too short."""
        prompt = self.prompt
        if not prompt.parts or prompt.prompts != 1:
            return None
        parts = prompt.parts
        last = parts[-1]
        if last.tokens < 0:
            parts = (*parts[:-1], Part(last.text, text_tokens))
        salt = f"{self.engine_request.adapter or ''}\x1f{prompt.salt}"
        return Prefix.of(
            parts, added=template_tokens, salt=salt, session=self._conversation_name()
        )

    def _conversation_name(self) -> str:
        """Return what replicas are told apart by for a conversation; empty: nothing.

        Agents seldom name their conversations, and many have one key. So with tools, a conversation that has no name but its
        key is named by what its user asked for first. That stays the same from turn to turn, and each agent has its own.
        """
        key_id = self.context.caller.key_id
        if self.session not in {"", key_id} or self.prompt.tool_use is None:
            return self.session
        task = ""
        for part in self.prompt.parts:
            if part.role == "assistant":
                break
            if part.role == "user":
                task = part.text
        words = task[-NAMING_CHARS:].encode("utf-8", "surrogatepass")
        digest = blake2b(words, digest_size=NAME_BYTES).hexdigest()
        return f"{key_id}\x1f{digest}"


def chat_part(role: object, text: str, tokens: int) -> Part:
    """Return a message as a part of a prompt: role and text apart from all others."""
    return Part(f"\x1e{role}\x1f{text}", tokens, role=str(role))


def session_of(context: RequestContext, *named: Any) -> str:
    """Return the name of a conversation: from a header, else the first of some values that is a text, else the key's id."""
    name = context.request_headers.get(SESSION_HEADER, b"").decode("latin-1")
    for value in named:
        if not name and isinstance(value, str):
            name = value
    return (name or context.caller.key_id)[:LONGEST_SESSION]


def priority_within(caller: Caller, value: int, field: str, requested: str) -> int:
    """Return a priority in vLLM's numbers (lower is sooner), limited to the highest class of the caller's key.

    ``BeyondKeyError``: it is beyond that class, and the key refuses such requests.
    """
    highest = PRIORITIES[caller.max_priority]
    if value < highest and caller.over == "refuse":
        raise BeyondKeyError(field, requested, f"{caller.max_priority} or lower")
    return max(value, highest)


def class_priority(caller: Caller, priority: Priority | None, field: str) -> int:
    """Return the number of a priority class; None asks for standard, or the key's highest class if that is lower."""
    if priority is None:
        return max(PRIORITIES["standard"], PRIORITIES[caller.max_priority])
    return priority_within(caller, PRIORITIES[priority], field, priority)


def class_of(priority: int) -> Priority:
    """Return the class of a priority in vLLM's numbers, which callers of OpenAI's endpoints may choose freely."""
    for name, highest in PRIORITIES.items():
        if priority <= highest:
            return name
    return "batch"
