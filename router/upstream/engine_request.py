"""What engines are asked: a body of our own, or the caller's with as little change as routing needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace
from pydantic_core import to_json

from router.upstream.json_object import JsonObject, NotJsonError, as_integer
from router.upstream.progress import (
    AnswerProgress,
    ContinuationTerms,
    EventProgress,
)
from router.upstream.splicing import Splicer
from router.upstream.sse import COMPLETION_FORMAT, AnswerFormat
from tiers.replica import Replica

MESSAGES = "/v1/messages"
# tokens of a completion without a limit, as in OpenAI's API and vLLM
DEFAULT_COMPLETION = 16
# Members of a body that are numbers, and the span attributes that show them.
_NUMBERS = {
    "n": "gen_ai.request.choice.count",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
# Members of a request that say how tokens are chosen: they hold for its continuation as well.
_SAMPLING = {
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
}
# Members with which an answer cannot be continued: they give it a structure, or it tells more than text.
_NOT_CONTINUABLE = {
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
    "mm_payload",
    "prompt_embeds",
    "return_prompt_text",
    "return_token_ids",
    "return_token_offsets",
    "return_tokens_as_token_ids",
    "structured_outputs",
    "suffix",
    "tools",
    "top_logprobs",
    "use_beam_search",
}


# Members with which an answer cannot be resumed: its events hold what is not put together from pieces.
_NOT_RESUMABLE = {
    "echo",
    "ec_transfer_params",
    "functions",
    "kv_transfer_params",
    "logprob_token_ids",
    "return_prompt_text",
    "return_token_ids",
    "return_token_offsets",
    "return_tokens_as_token_ids",
    "top_logprobs",
    "use_beam_search",
}
# Types of tools that vLLM runs itself, in several turns of one response. Others are the caller's, or are never called.
_ENGINES_TOOLS = {"web_search_preview", "code_interpreter", "mcp"}
_OUTPUT_LOGPROBS = "message.output_text.logprobs"


class Answering(Protocol):
    """Who answers: a replica, or a server outside of the fleet."""

    @property
    def resumes(self) -> bool:
        """Tell whether it resumes answers that others have begun, and tells its tokens in comments."""


class ResumePoint(Struct, frozen=True):
    """Where an engine is to resume an answer.

    Attributes:
        token_ids: The output so far.
        finish_reason: Why the answer ended, if only its last events are missing; None: it has not ended.
    """

    token_ids: Sequence[int]
    finish_reason: str | None = None


class EngineRequest(Struct, frozen=True, kw_only=True):
    """What an engine is asked, without what depends on the replica.

    Attributes:
        document: The caller's body, passed on with as little change as routing needs; or the members of one of our own.
        path: Path of the endpoint at the engine.
        operation: What is asked, in the GenAI conventions' words.
        request_id: The caller's; an engine is given it with the attempt's number.
        is_streamed: Whether the answer comes as events.
        priority: For vLLM's scheduler, lower first; None leaves the body's own.
        wants_usage: Whether an answer without token counts is not complete.
        counts: Whether to ask for token counts at the end of a stream.
        chat: Its messages, if the same could be asked of another tier; None: it could not.
        asks_token_ids: Whether to ask for the ids of a stream's tokens: they show that an engine computes while it sends no
            text.
        may_be_silent: Whether an engine may compute for minutes without a word, as for a tool call.
        implied: Members of a document of our own that its caller has not asked for.
        continuation_terms: What another engine needs to go on with a broken answer; None: none may.
        adapter: The LoRA adapter that answers; None: the model itself.
        continued_tokens: Tokens of the answer so far, if this goes on with one.
        splicer: Makes what joins the stream of an engine that resumes the answer to what its caller has; None: it may not be
            resumed.
        resume_point: Where to resume an answer, whose stream the engine begins anew; None: this is no request to resume one.
    """

    document: JsonObject | Mapping[str, Any]
    path: str = "/v1/chat/completions"
    operation: str = "chat"
    request_id: str
    answers: AnswerFormat = COMPLETION_FORMAT
    is_streamed: bool = True
    priority: int | None = None
    wants_usage: bool = False
    counts: bool = True
    chat: Sequence[Any] | None = None
    asks_token_ids: bool = False
    may_be_silent: bool = False
    implied: tuple[str, ...] = ()
    continuation_terms: ContinuationTerms | None = None
    adapter: str | None = None
    continued_tokens: int = 0
    splicer: Callable[[], Splicer] | None = None
    resume_point: ResumePoint | None = None

    def parameters(self) -> Mapping[str, float]:
        """Return the span attributes that show the request's parameters."""
        parameters: dict[str, float] = {}
        for field, attribute in _NUMBERS.items():
            value = self.document.get(field)
            if isinstance(value, int | float) and abs(value) < 1 << 63:
                parameters[attribute] = value
        if self.continued_tokens:
            parameters["qarr.continued_tokens"] = self.continued_tokens
        return parameters

    def at_most(self, max_tokens: int) -> EngineRequest:
        """Return the request with this limit of output tokens; a caller's body keeps its own."""
        if (
            isinstance(self.document, JsonObject)
            or self.document["max_tokens"] == max_tokens
        ):
            return self
        continuation_terms = (
            None
            if self.continuation_terms is None
            else replace(self.continuation_terms, max_tokens=max_tokens)
        )
        return replace(
            self,
            document={**self.document, "max_tokens": max_tokens},
            continuation_terms=continuation_terms,
        )

    def wants_token_notes(self, engine: Answering) -> bool:
        """Tell whether an engine is asked to tell the tokens of a stream in comments.

        A chat's events have them otherwise, unless it hides its reasoning.
        """
        if not (self.is_streamed and engine.resumes):
            return False
        if self.resume_point is not None:
            return True
        are_in_events = (
            self.asks_token_ids and self.document.get("include_reasoning") is not False
        )
        return self.splicer is not None and not are_in_events

    def progress_on(self, engine: Answering) -> AnswerProgress:
        """Return what notes how far an engine's answer has come: nothing yet."""
        splicer = None
        if self.splicer is not None and engine.resumes:
            splicer = self.splicer()
        if splicer is not None and self.answers is not COMPLETION_FORMAT:
            return EventProgress(splicer=splicer)
        held_back = 0
        if self.continuation_terms is not None:
            held_back = self.continuation_terms.held_back
        return AnswerProgress(
            held_back,
            splicer=splicer,
            tokens_come_apart=self.wants_token_notes(engine),
        )

    @property
    def output_limit(self) -> int | None:
        """Return the output tokens that the body allows; None: it names no limit."""
        for member in ("max_completion_tokens", "max_output_tokens", "max_tokens"):
            limit = as_integer(self.document.get(member))
            if limit is not None:
                return limit
        return None

    def resumed_at(self, point: ResumePoint, number: int) -> EngineRequest:
        """Return the request to resume the answer at a point; ``number``: of the continuation, from 1."""
        return replace(
            self,
            request_id=f"{self.request_id}-c{number}",
            # above new requests of its class: its caller is in the middle of an answer
            priority=(self.priority or 0) - 1,
            asks_token_ids=False,
            continuation_terms=None,
            continued_tokens=len(point.token_ids),
            splicer=None,
            resume_point=point,
        )

    def body(self, replica: Replica) -> bytes:
        """Return the body for one replica; in a caller's, all values that are not changed are the caller's bytes."""
        if isinstance(self.document, JsonObject):
            return self.document.edited(self._changes_for(replica, self.document))
        return self._own_body(replica, self.document)

    def _own_body(self, replica: Replica, document: Mapping[str, Any]) -> bytes:
        members: dict[str, Any] = {"model": self.adapter or replica.model, **document}
        if replica.takes_priority and self.priority is not None:
            members["priority"] = self.priority
        if self.is_streamed:
            members["stream"] = True
            members["stream_options"] = {"include_usage": True}
            members["return_token_ids"] = not self.wants_token_notes(replica)
        if self.resume_point is not None:
            members["qarr_resume"] = _members_of(self.resume_point)
        return to_json(members)

    def _changes_for(self, replica: Replica, document: JsonObject) -> dict[str, Any]:
        """Return the members of a caller's body that are set for a replica, or by None left out."""
        changes: dict[str, Any] = {
            "model": self.adapter or replica.model,
            "qarr": None,
            "provider": None,
        }
        if not replica.takes_priority:
            changes["priority"] = None
        elif self.priority is not None:
            changes["priority"] = self.priority
        if self.is_streamed and self.counts:
            stream_options = self._stream_options(document)
            if stream_options is not None:
                changes["stream_options"] = stream_options
        if self.asks_token_ids and not self.wants_token_notes(replica):
            changes["return_token_ids"] = True
        if self.resume_point is not None:
            changes["qarr_resume"] = _members_of(self.resume_point)
        changes |= dict.fromkeys(self.ignored_by(replica))
        if self.path == MESSAGES and has_unreachable_budget(document):
            changes.setdefault("thinking", _UNBOUNDED_THINKING)
        return changes

    def ignored_by(self, replica: Replica) -> tuple[str, ...]:
        """Return the members of a caller's body that a replica is not sent: its model cannot do this, and answers without.

        Clients of Anthropic's API ask every model for thinking; vLLM refuses it where the model shows no reasoning.
        """
        if self.path != MESSAGES or replica.takes_thinking:
            return ()
        thinking = self.document.get("thinking")
        is_wanted = isinstance(thinking, dict) and thinking.get("type") == "enabled"
        return ("thinking",) if is_wanted else ()

    def _stream_options(self, document: JsonObject) -> bytes | None:
        """Return the options that ask for token counts at the end; None: the body's own are invalid, and stay."""
        options = document.get("stream_options")
        if options is None or options == {"include_usage": True}:
            return b'{"include_usage":true}'
        try:
            callers_options = JsonObject.parse(
                document.text_of("stream_options").encode("utf-8", "surrogatepass")
            )
        except NotJsonError:
            return None
        changes: dict[str, Any] = {"include_usage": True}
        # Only a caller that asks for the final counts gets counts with each chunk: vLLM gives it none either otherwise.
        if not self.wants_usage and "continuous_usage_stats" in callers_options.values:
            changes["continuous_usage_stats"] = False
        return callers_options.edited(changes)


def _members_of(point: ResumePoint) -> dict[str, Any]:
    return {"token_ids": list(point.token_ids), "finish_reason": point.finish_reason}


# vLLM's name for thoughts without a budget of their own.
_UNBOUNDED_THINKING = {"type": "adaptive"}


def has_unreachable_budget(document: JsonObject) -> bool:
    """Tell whether a message may think for as long as it may be, or longer.

    Anthropic's API allows that with interleaved thinking, where the budget is that of several answers. vLLM refuses it.
    """
    thinking = document.get("thinking")
    if not isinstance(thinking, dict) or thinking.get("type") != "enabled":
        return False
    budget = as_integer(thinking.get("budget_tokens"))
    max_tokens = as_integer(document.get("max_tokens"))
    return budget is not None and max_tokens is not None and budget >= max_tokens > 0


# Members for which a stream holds more than its text. With them, token ids could not be taken out again, or are not needed:
# each of an engine's events has its log-probabilities.
_BESIDES_TEXT = {"echo", "logprobs", "return_token_ids"}


def may_ask_token_ids(document: JsonObject) -> bool:
    """Tell whether the ids of a streamed chat's tokens can be asked for, and be taken out of what its caller gets."""
    return not document.has_any(_BESIDES_TEXT)


def may_be_silent(document: JsonObject) -> bool:
    """Tell whether an engine may hold an answer back while it computes: a tool call, or reasoning that is not shown.

    vLLM's parsers of tool calls may send nothing before a call's arguments are complete, and these may be a whole file.
    """
    has_tools = bool(document.get("tools") or document.get("functions"))
    return has_tools or document.get("include_reasoning") is False


def messages_in(document: JsonObject) -> Sequence[Any] | None:
    """Return a chat's messages; None for what is no chat, or one with tools, whose answers are checked by other means."""
    messages = document.get("messages")
    if isinstance(messages, list) and document.get("tools") is None:
        return messages
    return None


def continuation_terms_of(
    document: JsonObject, priority: int, *, choices: int, chat: bool
) -> ContinuationTerms | None:
    """Return what continuing the streamed answer of a request needs; None where it must not be continued."""
    if choices != 1 or not _has_plain_answer(document):
        return None
    messages = document.get("messages")
    if isinstance(messages, list) and not all(map(_is_text, messages)):
        return None
    max_tokens = token_limit(document, chat=chat)
    if max_tokens is None and not chat and "max_tokens" not in document.values:
        max_tokens = DEFAULT_COMPLETION
    sampling = {
        name: value
        for name, value in document.values.items()
        if name in _SAMPLING and value is not None
    }
    return ContinuationTerms(max_tokens, sampling, priority)


def may_be_resumed(document: JsonObject, *, choices: int = 1) -> bool:
    """Tell whether the streamed answer of a request can be resumed by an engine that knows how to."""
    return (
        choices == 1
        and not document.has_any(_NOT_RESUMABLE)
        and not _has_log_probabilities(document)
    )


def may_response_be_resumed(document: JsonObject) -> bool:
    """Tell whether the stream of a response can be resumed: of one turn of the model, without log-probabilities."""
    included = document.get("include")
    if isinstance(included, list) and _OUTPUT_LOGPROBS in included:
        return False
    tools = document.get("tools")
    return not isinstance(tools, list) or not any(map(_is_engines_tool, tools))


def _is_engines_tool(tool: Any) -> bool:
    if not isinstance(tool, dict):
        return False
    kind = tool.get("type")
    return isinstance(kind, str) and kind in _ENGINES_TOOLS


def _has_log_probabilities(document: JsonObject) -> bool:
    """Tell whether a streamed answer has log-probabilities. In a completion, 0 asks for those of its own tokens alone."""
    for member in ("logprobs", "prompt_logprobs"):
        value = document.get(member)
        if value is not None and value is not False:
            return True
    return False


def _has_plain_answer(document: JsonObject) -> bool:
    """Tell whether a streamed answer is text alone, without counts in each chunk."""
    if not _is_plain_format(document.get("response_format")):
        return False
    options = document.get("stream_options")
    if isinstance(options, dict) and options.get("continuous_usage_stats"):
        return False
    return not document.has_any(_NOT_CONTINUABLE) and not _has_log_probabilities(
        document
    )


def _is_plain_format(response_format: Any) -> bool:
    if response_format is None:
        return True
    return isinstance(response_format, dict) and response_format.get("type") == "text"


def token_limit(document: JsonObject, *, chat: bool) -> int | None:
    """Return the output tokens that a body allows; None: it names no limit that the engine would take."""
    if chat:
        limit = as_integer(document.get("max_completion_tokens"))
        if limit is not None:
            return limit
    return as_integer(document.get("max_tokens"))


def _is_text(message: Any) -> bool:
    """Tell whether a chat's message holds nothing but text."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        return all(
            isinstance(part, dict) and part.get("type") == "text" for part in content
        )
    return content is None or isinstance(content, str)
