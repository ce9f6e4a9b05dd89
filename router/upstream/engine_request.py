"""What engines are asked: a body of our own, or the caller's with as little change as routing needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from pydantic_core import to_json

from router.upstream.json_object import JsonObject, NotJsonError, as_integer
from router.upstream.progress import Continuable
from router.upstream.sse import COMPLETION_FORMAT, AnswerFormat
from tiers.replica import Replica

MESSAGES = "/v1/messages"
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
_SAMPLING = {
    "allowed_token_ids", "bad_words", "cache_salt", "frequency_penalty", "ignore_eos", "include_stop_str_in_output",
    "logit_bias", "min_p", "min_tokens", "presence_penalty", "repetition_detection", "repetition_penalty", "seed",
    "skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_token_ids", "temperature", "top_k",
    "top_p", "vllm_xargs", "watermarking",
}  # fmt: skip
# What makes an answer one that cannot be taken over halfway: it has a structure of its own, or tells more than text.
_NOT_RESUMABLE = {
    "echo", "ec_transfer_params", "functions", "guided_choice", "guided_decoding_backend", "guided_grammar",
    "guided_json", "guided_regex", "kv_transfer_params", "logprob_token_ids", "logprobs", "mm_payload",
    "prompt_embeds", "prompt_logprobs", "return_prompt_text", "return_token_ids", "return_token_offsets",
    "return_tokens_as_token_ids", "structured_outputs", "suffix", "tools", "top_logprobs", "use_beam_search",
}  # fmt: skip


class EngineRequest(Struct, frozen=True, kw_only=True):
    """What an engine is asked, without what depends on the replica."""

    # the caller's body, passed on with as little change as routing needs; or the members of one of our own
    document: JsonObject | Mapping[str, Any]
    path: str = "/v1/chat/completions"  # at the engine
    operation: str = "chat"  # in the GenAI conventions' words
    request_id: str  # the caller's; an engine is given it with the attempt's number
    answers: AnswerFormat = COMPLETION_FORMAT
    streamed: bool = True  # whether the answer comes as events
    priority: int | None = None  # for vLLM's scheduler, lower first; None leaves the body's own
    wants_usage: bool = False  # whether an answer without token counts is not complete
    counts: bool = True  # whether to ask for token counts at the end of a stream
    chat: Sequence[Any] | None = None  # its messages, where the same could be asked of another tier; None where not
    # whether to ask for the ids of a stream's tokens: they show that an engine computes while it sends no text
    asks_token_ids: bool = False
    may_be_silent: bool = False  # whether an engine may compute for minutes without a word, as for a tool call
    implied: tuple[str, ...] = ()  # members of a document of our own that its caller has not asked for
    # what another engine needs to go on with a broken answer; None where none may
    continuable: Continuable | None = None
    adapter: str | None = None  # the LoRA adapter that answers; None: the model itself
    continued_tokens: int = 0  # of the answer so far, where this goes on with one

    def parameters(self) -> Mapping[str, float]:
        values = ((name, self.document.get(field)) for field, name in _NUMBERS.items())
        found = {name: value for name, value in values if isinstance(value, int | float) and abs(value) < 1 << 63}
        return {**found, "qarr.continued_tokens": self.continued_tokens} if self.continued_tokens else found

    def at_most(self, max_tokens: int) -> EngineRequest:
        """Return a request of our own for so many output tokens; a caller's body says itself what it wants."""
        if isinstance(self.document, JsonObject) or self.document["max_tokens"] == max_tokens:
            return self
        continuable = None if self.continuable is None else replace(self.continuable, max_tokens=max_tokens)
        return replace(self, document={**self.document, "max_tokens": max_tokens}, continuable=continuable)

    def body(self, replica: Replica) -> bytes:
        """Return the body for one replica; in a caller's, all values that are not changed are the caller's bytes."""
        document, model = self.document, self.adapter or replica.model
        if not isinstance(document, JsonObject):
            asked = {"model": model, **document}
            if replica.takes_priority and self.priority is not None:
                asked["priority"] = self.priority
            streams = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
            return to_json({**asked, **streams} if self.streamed else asked)
        changes: dict[str, Any] = {"model": model, "qarr": None, "provider": None}
        if not replica.takes_priority:
            changes["priority"] = None
        elif self.priority is not None:
            changes["priority"] = self.priority
        if self.streamed and self.counts and (options := self._stream_options(document)) is not None:
            changes["stream_options"] = options
        if self.asks_token_ids:
            changes["return_token_ids"] = True
        changes |= dict.fromkeys(self.ignored_by(replica))
        return document.edited(changes)

    def ignored_by(self, replica: Replica) -> tuple[str, ...]:
        """Return the members of a caller's body that a replica is not asked: its model cannot do this, and answers without.

        Clients of Anthropic's API ask every model for thinking; vLLM refuses it where the model shows no reasoning.
        """
        if self.path != MESSAGES or replica.takes_thinking:
            return ()
        thinking = self.document.get("thinking")
        is_wanted = isinstance(thinking, dict) and thinking.get("type") == "enabled"
        return ("thinking",) if is_wanted else ()

    def _stream_options(self, document: JsonObject) -> bytes | None:
        options = document.get("stream_options")
        if options is None or options == {"include_usage": True}:
            return b'{"include_usage":true}'
        try:
            given = JsonObject.parse(document.text_of("stream_options").encode("utf-8", "surrogatepass"))
        except NotJsonError:
            return None
        # Without the final counts vLLM gives none with each chunk either.
        silent = not self.wants_usage and "continuous_usage_stats" in given.values
        return given.edited({"include_usage": True, **({"continuous_usage_stats": False} if silent else {})})


# What a stream holds besides its text for those who ask. With it, token ids could not be taken out again, or are not needed:
# each of an engine's events has its log-probabilities.
_BESIDES_TEXT = {"echo", "logprobs", "return_token_ids"}


def may_ask_token_ids(document: JsonObject) -> bool:
    """Tell whether the ids of a streamed chat's tokens can be asked for, and be taken out of what its caller gets."""
    return not any(map(document.get, _BESIDES_TEXT))


def may_be_silent(document: JsonObject) -> bool:
    """Tell whether an engine may hold an answer back while it computes: a tool call, or reasoning that is not shown.

    vLLM's parsers of tool calls may send nothing before a call's arguments are complete, and these may be a whole file.
    """
    has_tools = bool(document.get("tools") or document.get("functions"))
    return has_tools or document.get("include_reasoning") is False


def messages_in(document: JsonObject) -> Sequence[Any] | None:
    """Return a chat's messages; None for what is no chat, or one with tools, whose answers are checked by other means."""
    messages = document.get("messages")
    return messages if isinstance(messages, list) and document.get("tools") is None else None


def continuable_of(document: JsonObject, priority: int, *, choices: int, chat: bool) -> Continuable | None:
    """Return what continuing the streamed answer of a request needs; None where it must not be continued."""
    form = document.get("response_format")
    plain = form is None or (isinstance(form, dict) and form.get("type") == "text")
    options = document.get("stream_options")
    counting = isinstance(options, dict) and options.get("continuous_usage_stats")
    if choices != 1 or not plain or counting or any(map(document.get, document.values.keys() & _NOT_RESUMABLE)):
        return None
    messages = document.get("messages")
    if isinstance(messages, list) and not all(map(_is_text, messages)):
        return None
    limit = token_limit(document, chat=chat)
    if limit is None and not chat and "max_tokens" not in document.values:
        limit = DEFAULT_COMPLETION
    sampling = {name: value for name, value in document.values.items() if name in _SAMPLING and value is not None}
    return Continuable(limit, sampling, priority)


def token_limit(document: JsonObject, *, chat: bool) -> int | None:
    """Return the output tokens that a body allows; None: it names no limit that the engine would take."""
    named = as_integer(document.get("max_completion_tokens")) if chat else None
    return as_integer(document.get("max_tokens")) if named is None else named


def _is_text(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)
