"""A request as the pipeline sees it: read and checked by an endpoint, which alone knows its form."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from classifier import PromptClass, extract
from router.auth.api_keys import ANONYMOUS, BeyondKey, Caller
from router.policy.decision import PRIORITIES, Query, Sla

if TYPE_CHECKING:
    from classifier import PromptFeatures, TokenCounter
    from router.policy.decision import Decision, Priority
    from router.upstream.engine_stream import EngineRequest
    from tiers.fleet import TemplateTokens
    from tiers.spec import TierName

NO_BOUNDS = Sla()
MAX_COUNT = 1 << 40  # of tokens that are counted: far above any context or quota, and safe in every counter


@dataclass(frozen=True, slots=True)
class RequestContext:
    """A request's ids and caller, from its first to its last byte.

    Attributes:
        request_id: The caller's own where it sent a usable one.
        trace_id: Of the trace that the request belongs to.
        caller: Whose key it carries.
        route: Its path.
        arrived: When all of it was there, by the monotonic clock, in seconds.
        limits: Headers about the key's quotas; filled once they are known, carried by errors as well.
    """

    request_id: str
    trace_id: str
    caller: Caller = ANONYMOUS
    route: str = ""
    arrived: float = field(default_factory=time.monotonic)
    limits: dict[str, str] = field(default_factory=dict)

    @property
    def ids(self) -> dict[str, str]:
        """Return the ids as bodies of errors and answers carry them."""
        return {"request_id": self.request_id, "trace_id": self.trace_id}

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that every answer carries."""
        return {"x-request-id": self.request_id, "x-qarr-trace-id": self.trace_id, **self.limits}


@dataclass(frozen=True, slots=True)
class PromptText:
    """What routing reads of a prompt.

    Attributes:
        text: To classify: the user's last turn.
        prompt_tokens: Of the longest prompt as the engine will see it, the chat template not counted; None: of ``text``
            and a system prompt.
        system_tokens: Of the system prompt, where it is not counted already.
        all_tokens: Of all prompts together; 0: there is one.
        messages: Of a chat; 0 for a completion.
        system: The chat has a system message.
        other_parts: Kinds of parts that are not text, such as ``image_url``.
        prompts: Answered each on its own.
    """

    text: str
    prompt_tokens: int | None = None
    system_tokens: int = 0
    all_tokens: int = 0
    messages: int = 0
    system: bool = False
    other_parts: tuple[str, ...] = ()
    prompts: int = 1

    def classify(self, counter: TokenCounter) -> PromptFeatures:
        """Classify the text. Parts that are not text make the class unknown, which routes to a higher precision."""
        features = extract(self.text, counter, self.prompt_tokens or 0)
        if not self.other_parts:
            return features
        signals = tuple(f"part that is not text: {kind}" for kind in self.other_parts)
        return replace(features, prompt_class=PromptClass.UNKNOWN, signals=signals)

    def tokens(self, features: PromptFeatures, template: TemplateTokens) -> int:
        """Return the longest prompt's tokens with what the chat template adds."""
        tokens = features.tokens + self.system_tokens if self.prompt_tokens is None else self.prompt_tokens
        return tokens + template.conversation(self.messages, system=self.system) if self.messages else tokens


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """What a caller may say about routing, on every endpoint.

    Attributes:
        hint: The tier asked for; None: any.
        hint_field: Where it was asked for, for errors.
        require: Hint and SLA are conditions, not preferences.
        priority: For vLLM's scheduler, lower first; within what the caller's key allows.
    """

    hint: TierName | None = None
    hint_field: str = ""
    require: bool = False
    sla: Sla = NO_BOUNDS
    priority: int = PRIORITIES["standard"]


class ParsedRequest(Protocol):
    """One request, read by its endpoint."""

    @property
    def context(self) -> RequestContext:
        """Return its ids and its caller."""

    @property
    def prompt(self) -> PromptText:
        """Return what routing reads of it."""

    @property
    def options(self) -> RoutingOptions:
        """Return what its caller says about routing."""

    @property
    def max_tokens(self) -> int:
        """Return the output tokens of each answer at most."""

    @property
    def sequences(self) -> int:
        """Return the answers that it asks for: prompts times choices."""

    @property
    def checkable(self) -> bool:
        """Tell whether its first tokens could be held while the engine's certainty is looked at."""

    def engine_request(self, decision: Decision, *, wants_logprobs: bool) -> EngineRequest:
        """Return what an engine is asked."""


def query_of(request: ParsedRequest, features: PromptFeatures, template: TemplateTokens) -> Query:
    """Return a request as the policy sees it."""
    options = request.options
    return Query(
        features,
        request.prompt.tokens(features, template),
        request.max_tokens,
        hint=options.hint,
        require=options.require,
        sla=options.sla,
        allowed=request.context.caller.tiers,
        sequences=request.sequences,
        all_prompt_tokens=min(request.prompt.all_tokens, MAX_COUNT),
    )


def priority_within(caller: Caller, value: int, field: str, asked: str) -> int:
    """Return a priority in vLLM's numbers (lower is sooner), lowered to what the caller's key allows.

    No number is higher than the highest class that it may have.

    Raises:
        BeyondKey: It is higher, and the key refuses what is.
    """
    highest = PRIORITIES[caller.max_priority]
    if value < highest and caller.over == "refuse":
        raise BeyondKey(field, asked, f"{caller.max_priority} or lower")
    return max(value, highest)


def class_priority(caller: Caller, asked: Priority | None, field: str) -> int:
    """Return the priority of a class; of a request that asks for none, standard, or the most that its key allows.

    Raises:
        BeyondKey: It is beyond the key, and the key refuses what is.
    """
    if asked is None:
        return max(PRIORITIES["standard"], PRIORITIES[caller.max_priority])
    return priority_within(caller, PRIORITIES[asked], field, asked)
