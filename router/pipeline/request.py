"""A request as the pipeline sees it: parsed and checked by its endpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from classifier import Complexity, PromptClass, PromptFeatures, TokenCounter, extract
from router.auth.api_keys import ANONYMOUS, BeyondKeyError, Caller
from router.policy.decision import PRIORITIES, Priority, Query, Sla, Sort
from router.telemetry.record import Journey
from router.upstream.engine_request import EngineRequest
from tiers.prefix_memory import Part, Prefix
from tiers.spec import TemplateTokens, TierName

NO_BOUNDS = Sla()
Truncate = Literal["oldest", "middle"]
SESSION_HEADER = b"x-session-id"
LONGEST_SESSION = 256  # characters; what follows is ignored
MAX_COUNT = 1 << 40  # bound of token counts: far above any context or quota, and safe in every counter


class RequestContext(Struct):
    request_id: str  # the caller's own if it sent a usable one
    trace_id: str
    caller: Caller = ANONYMOUS
    route: str = ""  # the path
    # the request's headers, with names in lower case; of those that share a name, the first
    sent: Mapping[bytes, bytes] = field(default_factory=dict)
    # when the whole request was there, by the monotonic clock, in seconds
    arrived: float = field(default_factory=time.monotonic)
    recorded: bool = False  # whether there is a record of it, from which the log has a line
    journey: Journey | None = None  # what it goes through; None: it is not to be served, or not decided on yet
    # headers about the key's quotas, filled once they are known; errors carry them as well
    limits: dict[str, str] = field(default_factory=dict)

    def header(self, name: bytes) -> str | None:
        value = self.sent.get(name)
        return None if value is None else value.decode("latin-1")

    @property
    def ids(self) -> dict[str, str]:
        return {"request_id": self.request_id, "trace_id": self.trace_id}

    @property
    def headers(self) -> dict[str, str]:
        anthropic = {"request-id": self.request_id} if self.route.startswith("/v1/messages") else {}
        return {"x-request-id": self.request_id, "x-qarr-trace-id": self.trace_id, **anthropic, **self.limits}


class PromptText(Struct, frozen=True):
    text: str  # the user's last turn, which is classified
    # of the longest prompt, without the chat template; None: those of ``text`` and ``system_tokens``
    prompt_tokens: int | None = None
    text_tokens: int | None = None  # of ``text``; None: not counted yet
    system_tokens: int = 0  # of the system prompt; ignored if ``prompt_tokens`` is given
    all_tokens: int = 0  # of all prompts together; 0: there is one
    messages: int = 0  # of a chat; 0 for a completion
    system: bool = False  # whether the chat has a system message
    other_parts: tuple[str, ...] = ()  # kinds of parts that are not text, such as ``image_url``
    prompts: int = 1  # how many, each answered on its own
    # all that the model reads, in order; empty: not known, as with parts that are not text. A part of -1 tokens is
    # ``text``
    parts: tuple[Part, ...] = ()
    salt: str = ""  # the caller's own, which keeps its prefix from being shared with others; empty: none

    def classify(self, counter: TokenCounter, second: Sequence[float] = ()) -> PromptFeatures:
        """Return the text's features. What cannot be read, as images and token ids, counts as complex."""
        features = extract(self.text, counter, self.prompt_tokens or 0, second, self.text_tokens)
        if not self.other_parts and (self.text or not self.prompt_tokens):
            return features
        signals = tuple(f"part that is not text: {kind}" for kind in self.other_parts)
        return replace(features, prompt_class=PromptClass.UNKNOWN, complexity=Complexity.COMPLEX, signals=signals)


class RoutingOptions(Struct, frozen=True):
    hint: TierName | None = None  # the tier asked for; None: any
    hint_field: str = ""  # the field that names it, for errors
    require: bool = False  # hint and SLA are conditions, not preferences
    sla: Sla = NO_BOUNDS
    priority: int = PRIORITIES["standard"]  # in vLLM's numbers, lower first; within what the caller's key allows
    precisions: frozenset[str] | None = None  # that may serve it, by OpenRouter's names; None: any
    only: frozenset[TierName] | None = None  # the tiers that may serve it; None: all
    sort: Sort | None = None  # what the choice is to be made by; None: by the policy
    truncate: Truncate | None = None  # what is to be cut of a prompt that fits no context; None: nothing
    overflow: bool = True  # a server outside of the fleet may answer if every tier is full


class Call(Struct, frozen=True, kw_only=True):
    context: RequestContext
    prompt: PromptText
    options: RoutingOptions
    asked: EngineRequest  # what an engine is asked for it
    max_tokens: int  # the most output tokens of each answer
    limited: bool = True  # whether its caller named them; otherwise an answer may be shorter, where the context ends
    sequences: int = 1  # answers: prompts times choices
    undraftable: str = ""  # its parameters that engines with a draft refuse; empty: none
    truncated: str = ""  # what was cut of its prompt, for people; empty: nothing
    session: str = ""  # what its caller names its conversation by; empty: nothing
    streamed: bool = True  # whether the answer is to be a stream
    report: bool = False  # whether the answer is to say who served it
    resumable: bool = False  # whether its stream is kept for a while, so that a client can read on
    # cuts its prompt by a ``Cutter``, where it fits no context; None: its caller has not asked for it
    cut: Callable[[Call, Any], Call] | None = None

    def query(self, features: PromptFeatures, template: TemplateTokens, *, affinity: bool = False) -> Query:
        prompt, options, adapter, prefix = self.prompt, self.options, self.asked.adapter, None
        added = template.conversation(prompt.messages, system=prompt.system) if prompt.messages else 0
        tokens = features.tokens + prompt.system_tokens if prompt.prompt_tokens is None else prompt.prompt_tokens
        if affinity and prompt.parts and prompt.prompts == 1:  # too short, or several: nothing to look for
            last, parts = prompt.parts[-1], prompt.parts
            if last.tokens < 0:
                parts = (*parts[:-1], Part(last.text, features.tokens))
            prefix = Prefix.of(parts, added=added, salt=f"{adapter or ''}\x1f{prompt.salt}", session=self.session)
        return Query(
            features,
            tokens + added,
            self.max_tokens,
            hint=options.hint,
            require=options.require,
            sla=options.sla,
            allowed=self.context.caller.tiers,
            sequences=self.sequences,
            all_prompt_tokens=min(prompt.all_tokens, MAX_COUNT),
            undraftable=self.undraftable,
            adapter=adapter,
            precisions=options.precisions,
            only=options.only,
            sort=options.sort,
            truncated=self.truncated,
            prefix=prefix,
        )


def chat_part(role: object, text: str, tokens: int) -> Part:
    """Return a message as a part of a prompt: role and text apart from all others."""
    return Part(f"\x1e{role}\x1f{text}", tokens)


def session_of(context: RequestContext, *named: Any) -> str:
    """Return what a caller names a conversation by: a header, else the first of some values that is a text, else its key."""
    found = context.sent.get(SESSION_HEADER, b"").decode("latin-1")
    for name in named:
        found = found or (name if isinstance(name, str) else "")
    return (found or context.caller.key_id)[:LONGEST_SESSION]


def priority_within(caller: Caller, value: int, field: str, asked: str) -> int:
    """Return a priority in vLLM's numbers (lower is sooner), limited to the highest class of the caller's key.

    ``BeyondKeyError``: it is beyond that class, and the key refuses such requests.
    """
    highest = PRIORITIES[caller.max_priority]
    if value < highest and caller.over == "refuse":
        raise BeyondKeyError(field, asked, f"{caller.max_priority} or lower")
    return max(value, highest)


def class_priority(caller: Caller, asked: Priority | None, field: str) -> int:
    """Return the number of a priority class; None asks for standard, or the key's highest class if that is lower."""
    if asked is None:
        return max(PRIORITIES["standard"], PRIORITIES[caller.max_priority])
    return priority_within(caller, PRIORITIES[asked], field, asked)


def class_of(priority: int) -> Priority:
    """Return the class of a priority in vLLM's numbers, which callers of OpenAI's endpoints may choose freely."""
    for name, highest in PRIORITIES.items():
        if priority <= highest:
            return name
    return "batch"
