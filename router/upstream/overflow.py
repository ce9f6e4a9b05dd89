"""Requests to the overflow: a server of OpenAI's API outside of the fleet, with its own model, tokenizer and key.

Nothing of the caller's headers goes there, no trace context and no id. Of the server's errors only the codes are passed on:
its words may quote the prompt.

It is asked the members of a request that mean the same at any server of OpenAI's API; what is the router's own or names the
caller is left out. A request with any other member, unless its value changes nothing, cannot be asked elsewhere.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import httpx
import msgspec
from msgspec import Meta, Struct
from pydantic_core import to_json

from router.telemetry.record import Hop
from router.telemetry.tracing import Telemetry
from router.upstream.engine_request import EngineRequest
from router.upstream.engine_stream import (
    Attempt,
    BufferedAnswer,
    EngineAnswer,
    EngineStream,
    OverflowHold,
    OverflowServer,
)
from router.upstream.errors import (
    EngineBrokeError,
    EngineRefusedError,
    NoSlotError,
    UpstreamError,
    without_trace,
)
from router.upstream.json_object import JsonObject, read_json
from router.upstream.settings import OverflowSettings, UpstreamSettings
from router.upstream.sse import COMPLETION_FORMAT, WholeAnswer, decoded
from router.upstream.transport import (
    Body,
    EngineTransport,
    Message,
    Origin,
    body_of,
    json_post,
)
from router.upstream.upstream import MAX_ERROR_BYTES, give_up, status_error
from tiers.breaker import Breaker
from tiers.spec import OVERFLOW, TierName, TierSpec

_SHARED = {
    "frequency_penalty",
    "logprobs",
    "max_tokens",
    "model",
    "n",
    "presence_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
}
_CHAT = _SHARED | {
    "function_call",
    "functions",
    "max_completion_tokens",
    "messages",
    "parallel_tool_calls",
    "reasoning_effort",
    "response_format",
    "tool_choice",
    "tools",
    "top_logprobs",
    "verbosity",
}
# A chat's limit of output tokens, by its present name, which OpenAI's newer models insist on, and by its older one.
LIMIT = "max_completion_tokens"
OLDER_LIMIT = "max_tokens"
_COMPLETION = _SHARED | {"best_of", "echo", "prompt", "suffix"}
# Members without effect on the answer; some tell who asks, make the server keep the answer, or change what it costs.
_LEFT_OUT = {
    "cache_salt",
    "metadata",
    "priority",
    "prompt_cache_key",
    "provider",
    "qarr",
    "request_id",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
# Values of vLLM's parameters that change nothing (vLLM 0.32, SamplingParams and its OpenAI protocol).
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "continue_final_message": (False,),
    "echo": (False,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "return_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_token_ids": ([],),
    "stream_options": ({},),
    "top_k": (0, -1),
    "use_beam_search": (False,),
}


def body_for(
    request: EngineRequest, model: str, limit_name: str = LIMIT
) -> bytes | None:
    """Return the body of a request to a foreign server; None where it cannot be asked there.

    ``model`` is the server's name for its model, ``limit_name`` its name for a chat's limit of output tokens.
    """
    if request.adapter is not None:
        return None
    if isinstance(request.document, JsonObject):
        return _edited_body(
            request, request.document, model=model, limit_name=limit_name
        )
    return _own_body(request, request.document, model=model, limit_name=limit_name)


def _own_body(
    request: EngineRequest, document: Mapping[str, Any], *, model: str, limit_name: str
) -> bytes | None:
    """Return the body for a request that the router has made; None where it cannot be asked there."""
    requested = {
        name: value for name, value in document.items() if name not in request.implied
    }
    portable = _portable(requested, _CHAT)
    if portable is None:
        return None
    if OLDER_LIMIT in portable:
        portable[limit_name] = portable.pop(OLDER_LIMIT)
    return to_json(
        {
            "model": model,
            **portable,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def _edited_body(
    request: EngineRequest, document: JsonObject, *, model: str, limit_name: str
) -> bytes | None:
    """Return the caller's body with what the server needs changed; None where it cannot be asked there."""
    if not request.counts:
        return None  # few servers have these APIs
    values = document.values
    is_chat = request.operation == "chat"
    known_names = _CHAT if is_chat else _COMPLETION
    portable = _portable(values, known_names)
    if portable is None:
        return None
    if not _is_text(values.get("prompt")) or not _has_plain_options(
        values.get("stream_options")
    ):
        return None
    changes: dict[str, Any] = {name: None for name in values if name not in portable}
    changes["model"] = model
    changes["stream_options"] = {"include_usage": True} if request.is_streamed else None
    if is_chat:
        changes |= _limit_changes(portable, limit_name)
    return document.edited(changes)


def _limit_changes(chat: Mapping[str, Any], limit_name: str) -> dict[str, Any]:
    """Return the changes to a chat's members that give its limit of output tokens the name that the server knows."""
    other_name = OLDER_LIMIT if limit_name == LIMIT else LIMIT
    if other_name not in chat:
        return {}
    changes = {other_name: None}
    if limit_name not in chat:
        changes[limit_name] = chat[other_name]
    elif (
        limit_name == OLDER_LIMIT
    ):  # where both are given, the newer name counts, as in vLLM
        changes[limit_name] = chat[LIMIT]
    return changes


def _portable(
    values: Mapping[str, Any], known_names: set[str]
) -> dict[str, Any] | None:
    """Return the members that any server knows; None where another one changes the answer."""
    portable: dict[str, Any] = {}
    for name, value in values.items():
        if value is None or name in _LEFT_OUT:
            continue
        if name in known_names:
            portable[name] = value
        elif value not in _NEUTRAL.get(name, ()):
            return None
    return portable


def _is_text(prompt: Any) -> bool:
    """Tell whether a completion's prompt, where there is one, is text: token ids are of the fleet's tokenizer."""
    prompts = prompt if isinstance(prompt, list) else [prompt]
    return all(text is None or isinstance(text, str) for text in prompts)


def _has_plain_options(options: Any) -> bool:
    """Tell whether a request's options of its stream turn on nothing but token counts."""
    if options is None:
        return True
    if not isinstance(options, dict):
        return False
    return not any(is_on for name, is_on in options.items() if name != "include_usage")


CHARACTERS_PER_TOKEN = 4  # about as many as in English; for servers that tell no counts


class UnsupportedError(UpstreamError):
    """The request has a parameter that means nothing outside of the fleet, or something else there."""


class RefusedThereError(EngineRefusedError):
    """The overflow says that the request is wrong. ``detail`` has its codes, without its words."""


class PausedError(UpstreamError):
    """The overflow has failed lately, and gets no requests for a while."""


class _OverflowMessage(Struct):
    content: str | None = None


class _OverflowChoice(Struct):
    finish_reason: str | None = None
    message: _OverflowMessage | None = None
    text: str | None = None

    @property
    def answer_text(self) -> str:
        if self.message is not None and self.message.content:
            return self.message.content
        return self.text or ""


class _OverflowCompletion(Struct):
    choices: Annotated[list[_OverflowChoice], Meta(min_length=1)]
    usage: dict[str, Any] | None = None


_COMPLETION_DECODER = msgspec.json.Decoder(_OverflowCompletion)


def read_whole(content: bytes) -> WholeAnswer | None:
    """Read an answer that is not streamed; None where it is no completion. Without token counts its usage is empty."""
    try:
        completion = decoded(_COMPLETION_DECODER, content)
    except EngineBrokeError:
        return None
    usage = completion.usage or {}
    for name in ("prompt_tokens", "completion_tokens"):
        count = usage.get(name, 0)
        if not isinstance(count, int) or count < 0:
            return None
    if any(
        choice.message is None and choice.text is None for choice in completion.choices
    ):
        return None
    return completion.choices[0].finish_reason, usage


_FORMAT = replace(COMPLETION_FORMAT, read_whole=read_whole)


class _BufferedOverflowAnswer(BufferedAnswer):
    """A whole answer, perhaps without token counts: its tokens are then estimated by its length."""

    def _note_usage(self, usage: Mapping[str, Any]) -> None:
        if usage:
            super()._note_usage(usage)
            return
        texts = [
            choice.answer_text
            for choice in _COMPLETION_DECODER.decode(self.content).choices
        ]
        self.output_tokens = sum(
            math.ceil(len(text) / CHARACTERS_PER_TOKEN) for text in texts
        )


class OverflowClient:
    """Opens answers of the overflow. After failures it gets no requests for a while, as a replica of the fleet."""

    def __init__(
        self,
        options: OverflowSettings,
        times: UpstreamSettings,
        telemetry: Telemetry,
        transport: EngineTransport,
    ) -> None:
        self._transport = transport
        self._telemetry = telemetry
        self.in_flight = 0
        self.use(options, times)

    def use(self, options: OverflowSettings, times: UpstreamSettings) -> None:
        """Take over settings, for requests from now on."""
        self._options = options
        self._times = times
        self.name = options.shown_name
        self._breaker = Breaker(times.breaker)
        self._limit_name = LIMIT
        tier = TierSpec(
            TierName(OVERFLOW), 0, 0, max_in_flight=options.max_in_flight, replicas=0
        )
        self._replica = OverflowServer(self.name, tier)

    async def open(
        self, request: EngineRequest, sequences: int, sent_at: float
    ) -> EngineAnswer:
        """Return an answer that has begun; ``sent_at``: when it was first sent, by the monotonic clock.

        Raises:
            UnsupportedError: It cannot be asked elsewhere.
            NoSlotError: The overflow has as many requests as it may have.
            PausedError: It has failed lately.
            UpstreamError: It did not begin an answer.
        """
        options = self._options
        breaker = self._breaker
        now = time.monotonic()
        content = body_for(request, options.model, self._limit_name)
        if content is None:
            raise UnsupportedError(
                "a parameter that only the fleet's engines understand"
            )
        if self.in_flight >= options.max_in_flight:
            raise NoSlotError(f"it has {self.in_flight} requests")
        if not breaker.admits(now):
            raise PausedError(
                f"it has failed; it gets requests again in {breaker.admits_in_s(now):.1f} s"
            )
        probe = breaker.begin(now)
        try:
            answer = await self._begin_with_either_limit(
                request, content, sequences=sequences, sent_at=sent_at
            )
        except EngineRefusedError:
            breaker.given_up(probe=probe)
            raise
        except UpstreamError:
            breaker.failed(time.monotonic(), probe=probe)
            raise
        except BaseException:
            breaker.given_up(probe=probe)
            raise
        breaker.succeeded(probe=probe)
        return answer

    async def _begin_with_either_limit(
        self, request: EngineRequest, content: bytes, *, sequences: int, sent_at: float
    ) -> EngineAnswer:
        """Send a request; if its limit's name is refused, send it again with the other name, and keep that if it works."""
        options = self._options
        # Another request, or other settings, may change it meanwhile.
        sent_name = self._limit_name
        other_name = OLDER_LIMIT if sent_name == LIMIT else LIMIT
        try:
            return await self._begin(
                request, content, sequences=sequences, sent_at=sent_at
            )
        except RefusedThereError as refused:
            other_content = body_for(request, options.model, other_name)
            if (
                other_content is None
                or other_content == content
                or sent_name.encode() not in refused.body
            ):
                raise
            first_refusal = without_trace(refused)
        try:
            answer = await self._begin(
                request, other_content, sequences=sequences, sent_at=sent_at
            )
        except RefusedThereError:
            # something else than the limit's name is wrong
            raise first_refusal from None
        finally:
            # break the reference cycle between the exception and this frame
            del first_refusal
        if self._options is options:
            self._limit_name = other_name
        return answer

    async def _begin(
        self, request: EngineRequest, content: bytes, *, sequences: int, sent_at: float
    ) -> EngineAnswer:
        """Send a request; its place, its connection and its span end with it unless an answer is returned."""
        options = self._options
        times = self._times
        self.in_flight += 1
        hold = OverflowHold(self._replica, sequences, self._give_place_back)
        hop = Hop(
            operation=request.operation,
            model=options.model,
            url=options.url,
            began=time.monotonic(),
            overflow=self.name,
            streamed=request.is_streamed,
        )
        self._telemetry.start(hop, request.parameters)
        limit_s = (
            options.first_token_timeout_s
            if request.is_streamed
            else times.answer_timeout_s
        )
        limits = {
            "connect": times.connect_timeout_s,
            "pool": times.connect_timeout_s,
            "read": limit_s,
        }
        body: Body | None = None
        try:
            body = await self._transport.send(*self._post(request, content), limits)
            if body.status != httpx.codes.OK:
                raise _error_in(body, await body_of(body, MAX_ERROR_BYTES))  # noqa: TRY301  one place ends the attempt
            attempt = Attempt(
                tier=TierName(OVERFLOW),
                lease=hold,
                body=body,
                hop=hop,
                token_timeout_s=times.token_timeout_s,
                silence_timeout_s=times.answer_timeout_s,
                sent_at=sent_at,
            )
            answer = (
                _stream(attempt, request)
                if request.is_streamed
                else _BufferedOverflowAnswer(attempt, _FORMAT)
            )
            answer.overflow = self.name
            await answer.begin()
            return answer  # noqa: TRY300  an else block would be far from here
        except BaseException as error:
            await give_up(
                error,
                hold,
                hop,
                body=body,
                limit_s=limit_s,
                streamed=request.is_streamed,
            )
            raise

    def _give_place_back(self) -> None:
        self.in_flight -= 1

    def _post(self, request: EngineRequest, content: bytes) -> tuple[Origin, Message]:
        media_type = (
            b"text/event-stream" if request.is_streamed else b"application/json"
        )
        headers = [
            (b"accept", media_type),
            (b"accept-encoding", b"identity"),
            (b"user-agent", b"qarr"),
        ]
        key = self._options.api_key.get_secret_value()
        if key:
            headers.append((b"authorization", b"Bearer " + key.encode("ascii")))
        return json_post(
            self._options.url + request.path.removeprefix("/v1"), headers, content
        )

    async def aclose(self) -> None:
        await self._transport.aclose()


_CODE = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}").fullmatch


def _error_in(answer: Body, content: bytes) -> UpstreamError:
    """Return the error for an answer that is not 200; it has none of the server's words."""
    error = status_error(answer.status, None, answer.header(b"retry-after"))
    if isinstance(error, EngineRefusedError):
        return RefusedThereError(
            _codes_of(answer.status, content), answer.status, content
        )
    return error


def _codes_of(status: int, content: bytes) -> str:
    """Return the codes of a server's error, without its words: the status, the error's code, and the member it blames."""
    try:
        error = read_json(content)["error"]
        named = [error.get("code"), error.get("param")]
    except (ValueError, KeyError, TypeError, AttributeError):
        named = []
    codes = [code for code in named if isinstance(code, str) and _CODE(code)]
    if not codes:
        return f"HTTP {status}"
    return f"HTTP {status} ({', '.join(codes)})"


def _stream(attempt: Attempt, request: EngineRequest) -> EngineStream:
    answer = EngineStream(attempt, request)
    answer.may_be_continued = False
    return answer
