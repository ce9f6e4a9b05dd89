"""What engines are asked: a prompt as a chat, or the caller's own body with as little change as routing needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pydantic_core import to_json

from router.upstream.json_object import JsonObject, NotJson, as_integer
from router.upstream.progress import Resumption
from router.upstream.sse import COMPLETION_FORMAT, AnswerFormat

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tiers.replica import Replica

DEFAULT_COMPLETION = 16  # tokens of a completion that gives no limit, as OpenAI and vLLM have it
_NUMBERS = {
    "n": "gen_ai.request.choice.count",
    "max_output_tokens": "gen_ai.request.max_tokens",
    **{
        name: f"gen_ai.request.{name}"
        for name in ("max_tokens", "temperature", "top_p", "seed", "frequency_penalty", "presence_penalty")
    },
}
# What of a request says how tokens are chosen, and holds for its continuation as well.
_SAMPLING = (
    "allowed_token_ids",
    "bad_words",
    "cache_salt",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "min_tokens",
    "presence_penalty",
    "repetition_detection",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_k",
    "top_p",
    "vllm_xargs",
    "watermarking",
)
# What makes an answer one that cannot be taken over halfway: it has a structure of its own, or tells more than text.
_NOT_RESUMABLE = (
    "echo",
    "ec_transfer_params",
    "functions",
    "guided_choice",
    "guided_decoding_backend",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "kv_transfer_params",
    "logprob_token_ids",
    "logprobs",
    "mm_payload",
    "prompt_embeds",
    "prompt_logprobs",
    "return_prompt_text",
    "return_token_ids",
    "return_token_offsets",
    "return_tokens_as_token_ids",
    "structured_outputs",
    "suffix",
    "tools",
    "top_logprobs",
    "use_beam_search",
)


class EngineRequest(Protocol):
    """The request to an engine, without its replica-specific parts."""

    @property
    def operation(self) -> str:
        """Return GenAI's name of the operation."""

    @property
    def adapter(self) -> str | None:
        """Return the LoRA adapter that answers; None: the model itself."""

    @property
    def parameters(self) -> Mapping[str, float]:
        """Return attributes of the span."""

    @property
    def path(self) -> str:
        """Return the path at the engine."""

    @property
    def request_id(self) -> str:
        """Return an id that no two requests share; the engine is given it with the attempt's number."""

    @property
    def streamed(self) -> bool:
        """Tell whether the answer comes as events."""

    @property
    def wants_usage(self) -> bool:
        """Tell whether an answer without token counts is not complete."""

    @property
    def priority(self) -> int | None:
        """Return its priority for vLLM's scheduler, lower first; None where it has none of its own."""

    @property
    def chat(self) -> Sequence[Any] | None:
        """Return its messages, where the same could be asked of another tier; None where not."""

    @property
    def resumption(self) -> Resumption | None:
        """Return what another engine needs to go on with a broken answer; None where none may."""

    @property
    def answers(self) -> AnswerFormat:
        """Return how its answers are read."""

    def body(self, replica: Replica) -> bytes:
        """Return the request's body for one replica."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat, made from a prompt and perhaps a system prompt, or from messages.

    Attributes:
        sampling: How tokens are chosen, in the engine's fields; holds for a continuation as well.
    """

    messages: tuple[Mapping[str, str], ...]
    max_tokens: int
    sampling: Mapping[str, Any]
    priority: int
    request_id: str
    path: str = "/v1/chat/completions"
    operation: str = "chat"
    adapter: str | None = None
    streamed: bool = True  # always, so that a stalled engine is noticed
    wants_usage: bool = True
    answers: AnswerFormat = COMPLETION_FORMAT

    @property
    def chat(self) -> Sequence[Mapping[str, str]]:
        return self.messages

    @property
    def resumption(self) -> Resumption:
        """Return what another engine needs to go on with a broken answer."""
        return Resumption(self.max_tokens, self.sampling, self.priority)

    @property
    def parameters(self) -> Mapping[str, float]:
        """Return what is told of the request in traces."""
        return _numbers_of({"max_tokens": self.max_tokens, **self.sampling})

    def body(self, replica: Replica) -> bytes:
        return to_json(
            {
                "model": self.adapter or replica.model,
                "messages": self.messages,
                "max_tokens": self.max_tokens,
                **self.sampling,
                "priority": self.priority if replica.takes_priority else 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
        )


@dataclass(frozen=True, slots=True)
class RelayRequest:
    """A request for one of OpenAI's endpoints, passed on with as little change as routing needs.

    Attributes:
        document: The caller's body.
        priority: For vLLM's scheduler, lower first; None leaves the caller's own field.
        wants_usage: The caller asked for the final chunk with token counts.
        resumption: What another engine needs to go on with a broken answer; None where none may.
        adapter: The LoRA adapter that answers; None: the model itself.
    """

    document: JsonObject
    path: str
    operation: str
    request_id: str
    streamed: bool
    priority: int | None
    wants_usage: bool
    resumption: Resumption | None = None
    adapter: str | None = None
    answers: AnswerFormat = COMPLETION_FORMAT

    @property
    def chat(self) -> Sequence[Any] | None:
        """Return its messages; None for what is no chat, or one with tools, whose answers are checked by other means."""
        messages = self.document.get("messages")
        return messages if isinstance(messages, list) and self.document.get("tools") is None else None

    @property
    def parameters(self) -> Mapping[str, float]:
        """Return what is told of the request in traces: numbers only, never text."""
        return _numbers_of(self.document)

    def body(self, replica: Replica) -> bytes:
        """Return the caller's body with the replica's name for the model; all other values are the caller's bytes."""
        changes = _relayed(self, replica)
        if self.streamed and (options := self._stream_options()) is not None:
            changes["stream_options"] = options
        if self.resumption is not None:
            changes["return_token_ids"] = True
        return self.document.edited(changes)

    def _stream_options(self) -> bytes | None:
        options = self.document.get("stream_options")
        if options is None or options == {"include_usage": True}:
            return b'{"include_usage":true}'
        try:
            given = JsonObject.parse(self.document.text_of("stream_options").encode("utf-8", "surrogatepass"))
        except NotJson:
            return None
        # Without the final counts vLLM gives none with each chunk either.
        more = (
            {}
            if self.wants_usage or "continuous_usage_stats" not in given.values
            else {"continuous_usage_stats": False}
        )
        return given.edited({"include_usage": True, **more})


@dataclass(frozen=True, slots=True)
class PassedRequest:
    """A request for an API whose events are passed on as they are; half of such an answer cannot be continued.

    Attributes:
        document: The caller's body.
        answers: How the API's answers are read.
        chat: Its messages, where the same could be asked as a chat; None where not.
    """

    document: JsonObject
    path: str
    request_id: str
    answers: AnswerFormat
    streamed: bool
    priority: int | None
    chat: Sequence[Any] | None
    adapter: str | None = None
    operation: str = "chat"
    wants_usage: bool = False
    resumption: None = None

    @property
    def parameters(self) -> Mapping[str, float]:
        """Return what is told of the request in traces: numbers only, never text."""
        return _numbers_of(self.document)

    def body(self, replica: Replica) -> bytes:
        """Return the caller's body with the replica's name for the model; all other values are the caller's bytes."""
        return self.document.edited(_relayed(self, replica))


@dataclass(frozen=True, slots=True)
class ContinuedRequest:
    """The request to the next engine: complete token ids."""

    origin: EngineRequest
    asked: Resumption
    ids: Sequence[int]  # of the prompt and of the output so far
    done: int  # output tokens so far
    left: int  # output tokens to come at most
    number: int  # of the continuation, from 1
    path: str = "/v1/completions"
    operation: str = "text_completion"
    answers: AnswerFormat = COMPLETION_FORMAT
    streamed: bool = True
    wants_usage: bool = False
    chat: None = None
    resumption: None = None

    @property
    def adapter(self) -> str | None:
        return self.origin.adapter

    @property
    def priority(self) -> int:
        """Return a priority just above new requests of its class: its caller waits in the middle of an answer."""
        return self.asked.priority - 1

    @property
    def request_id(self) -> str:
        return f"{self.origin.request_id}-c{self.number}"

    @property
    def parameters(self) -> Mapping[str, float]:
        return {**self.origin.parameters, "qarr.continued_tokens": self.done}

    def body(self, replica: Replica) -> bytes:
        sampling = dict(self.asked.sampling)
        if "min_tokens" in sampling:
            sampling["min_tokens"] = max(self.asked.min_tokens - self.done, 0)
        priority = {"priority": self.priority} if replica.takes_priority else {}
        return to_json(
            {
                **sampling,
                **priority,
                "model": self.origin.adapter or replica.model,
                "prompt": self.ids,
                "max_tokens": self.left,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
        )


def _relayed(request: RelayRequest | PassedRequest, replica: Replica) -> dict[str, Any]:
    changes: dict[str, Any] = {"model": request.adapter or replica.model, "qarr": None, "provider": None}
    if not replica.takes_priority:
        changes["priority"] = None
    elif request.priority is not None:
        changes["priority"] = request.priority
    return changes


def _numbers_of(document: JsonObject | Mapping[str, Any]) -> dict[str, float]:
    values = ((name, document.get(field)) for field, name in _NUMBERS.items())
    return {name: value for name, value in values if isinstance(value, int | float) and abs(value) < 1 << 63}


def resumption_of(document: JsonObject, priority: int, *, choices: int, chat: bool) -> Resumption | None:
    """Return what continuing the streamed answer of a request needs; None where it must not be continued."""
    form = document.get("response_format")
    plain = form is None or (isinstance(form, dict) and form.get("type") == "text")
    options = document.get("stream_options")
    counting = isinstance(options, dict) and options.get("continuous_usage_stats")
    if choices != 1 or not plain or counting or any(document.get(name) for name in _NOT_RESUMABLE):
        return None
    messages = document.get("messages")
    if isinstance(messages, list) and not all(map(_is_text, messages)):
        return None
    limit = (as_integer(document.get("max_completion_tokens")) if chat else None) or as_integer(
        document.get("max_tokens", None if chat else DEFAULT_COMPLETION)
    )
    values = ((name, document.get(name)) for name in _SAMPLING)
    return Resumption(limit, {name: value for name, value in values if value is not None}, priority)


def _is_text(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)
