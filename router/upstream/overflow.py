"""Requests to the overflow: a server of OpenAI's API outside of the fleet, with its own model, tokenizer and key.

Nothing of the caller's headers goes there, no trace context and no id. Of what the server says of an error only its codes
are told: its words may quote the prompt.

It is asked the members of a request that mean the same at any server of OpenAI's API; what is the router's own or names the
caller is left out. A request with any other member, unless its value changes nothing, cannot be asked elsewhere.
"""

from __future__ import annotations

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
from router.upstream.client import MAX_ERROR_BYTES, give_up, status_error
from router.upstream.engine_request import EngineRequest
from router.upstream.engine_stream import (
    Attempt,
    BufferedAnswer,
    EngineAnswer,
    EngineStream,
    OverflowHold,
    OverflowServer,
)
from router.upstream.errors import EngineBrokeError, EngineRefusedError, NoSlotError, UpstreamError, without_trace
from router.upstream.json_object import JsonObject, read_json
from router.upstream.settings import OverflowSettings, UpstreamSettings
from router.upstream.sse import COMPLETION_FORMAT, WholeAnswer, decoded
from router.upstream.transport import Body, EngineTransport, Origin, body_of, json_post
from tiers.breaker import Breaker
from tiers.spec import OVERFLOW, TierName, TierSpec

_SHARED = {
    "frequency_penalty", "logprobs", "max_tokens", "model", "n", "presence_penalty", "seed", "stop", "stream",
    "stream_options", "temperature", "top_p",
}  # fmt: skip
_CHAT = _SHARED | {
    "function_call", "functions", "max_completion_tokens", "messages", "parallel_tool_calls", "reasoning_effort",
    "response_format", "tool_choice", "tools", "top_logprobs", "verbosity",
}  # fmt: skip
# A chat's limit of output tokens, by its present name, which OpenAI's newer models insist on, and by its older one.
LIMIT, OLDER_LIMIT = "max_completion_tokens", "max_tokens"
_COMPLETION = _SHARED | {"best_of", "echo", "prompt", "suffix"}
# Of no effect on the answer; some tell who asks, make the server keep it, or change what it costs.
_LEFT_OUT = {
    "cache_salt", "metadata", "priority", "prompt_cache_key", "provider", "qarr", "request_id", "safety_identifier",
    "service_tier", "store", "user",
}  # fmt: skip
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


def body_for(request: EngineRequest, model: str, limit_name: str = LIMIT) -> bytes | None:
    """Return the body of a request to a foreign server; None where it cannot be asked there.

    ``model`` is the server's name for its model, ``limit_name`` its name for a chat's limit of output tokens.
    """
    if request.adapter is not None:
        return None
    document = request.document
    if not isinstance(document, JsonObject):
        asked = {name: value for name, value in document.items() if name not in request.implied}
        if (kept := _portable(asked, _CHAT)) is None:
            return None
        if OLDER_LIMIT in kept:
            kept[limit_name] = kept.pop(OLDER_LIMIT)
        return to_json({"model": model, **kept, "stream": True, "stream_options": {"include_usage": True}})
    if not request.counts:  # of an API that few servers have
        return None
    values, known = document.values, _CHAT if request.operation == "chat" else _COMPLETION
    kept = _portable(values, known)
    if kept is None or not _is_text(values.get("prompt")) or not _plain_options(values.get("stream_options")):
        return None
    changes: dict[str, Any] = {name: None for name in values if name not in kept}
    changes |= {"model": model, "stream_options": {"include_usage": True} if request.streamed else None}
    other_name = OLDER_LIMIT if limit_name == LIMIT else LIMIT
    if request.operation == "chat" and other_name in kept:
        changes[other_name] = None
        if limit_name not in kept:  # vLLM too takes the newer name where both are given
            changes[limit_name] = kept[other_name]
        elif limit_name == OLDER_LIMIT:
            changes[limit_name] = kept[LIMIT]
    return document.edited(changes)


def _portable(values: Mapping[str, Any], known: set[str]) -> dict[str, Any] | None:
    """Return the members that any server knows; None where another one changes the answer."""
    given = {name: value for name, value in values.items() if value is not None and name not in _LEFT_OUT}
    if any(name not in known and value not in _NEUTRAL.get(name, ()) for name, value in given.items()):
        return None
    return {name: value for name, value in given.items() if name in known}


def _is_text(prompt: Any) -> bool:
    """Tell whether a completion's prompt, where there is one, is text: token ids are of the fleet's tokenizer."""
    prompts = prompt if isinstance(prompt, list) else [prompt]
    return all(one is None or isinstance(one, str) for one in prompts)


def _plain_options(options: Any) -> bool:
    return options is None or (
        isinstance(options, dict) and all(name == "include_usage" or not on for name, on in options.items())
    )


CHARACTERS_PER_TOKEN = 4  # of English, about; for servers that tell no counts


class UnsupportedError(UpstreamError):
    """The request has a parameter that means nothing outside of the fleet, or something else there."""


class RefusedThereError(EngineRefusedError):
    """The overflow says that the request is wrong. ``detail`` has its codes, without its words."""


class PausedError(UpstreamError):
    """The overflow has failed lately, and gets no requests for a while."""


class _Message(Struct):
    content: str | None = None


class _Choice(Struct):
    finish_reason: str | None = None
    message: _Message | None = None
    text: str | None = None


class _Whole(Struct):
    choices: Annotated[list[_Choice], Meta(min_length=1)]
    usage: dict[str, Any] | None = None


_WHOLE = msgspec.json.Decoder(_Whole)


def read_whole(content: bytes) -> WholeAnswer | None:
    """Read an answer that is not streamed, with or without token counts; None where it is no completion."""
    try:
        answer = decoded(_WHOLE, content)
    except EngineBrokeError:
        return None
    usage = answer.usage or {}
    counted = all(isinstance(usage.get(name, 0), int) for name in ("prompt_tokens", "completion_tokens"))
    if not counted or any(choice.message is None and choice.text is None for choice in answer.choices):
        return None
    return answer.choices[0].finish_reason, usage


_FORMAT = replace(COMPLETION_FORMAT, read_whole=read_whole)


class _WholeAnswer(BufferedAnswer):
    """A whole answer, perhaps without token counts: its tokens are then estimated by its length."""

    def _note_usage(self, usage: Mapping[str, Any]) -> None:
        if usage:
            super()._note_usage(usage)
            return
        choices = _WHOLE.decode(self.content).choices
        texts = ((choice.message and choice.message.content) or choice.text or "" for choice in choices)
        self.output_tokens = sum(-(-len(text) // CHARACTERS_PER_TOKEN) for text in texts)


class OverflowClient:
    """Opens answers of the overflow. After failures it gets no requests for a while, as a replica of the fleet."""

    def __init__(
        self, options: OverflowSettings, times: UpstreamSettings, telemetry: Telemetry, transport: EngineTransport
    ) -> None:
        self._transport, self._telemetry = transport, telemetry
        self.in_flight = 0
        self.use(options, times)

    def use(self, options: OverflowSettings, times: UpstreamSettings) -> None:
        self._options, self._times, self.name = options, times, options.shown_name
        self._breaker = Breaker(times.breaker)
        self._limit_name = LIMIT
        self._replica = OverflowServer(self.name, TierSpec(TierName(OVERFLOW), 0, 0, options.max_in_flight, replicas=0))

    async def open(self, request: EngineRequest, sequences: int, sent_at: float) -> EngineAnswer:
        """Return an answer that has begun; ``sent_at``: when it was first sent, by the monotonic clock.

        Raises:
            UnsupportedError: It cannot be asked elsewhere.
            NoSlotError: The overflow has as many requests as it may have.
            PausedError: It has failed lately.
            UpstreamError: It did not begin an answer.
        """
        options, breaker, now = self._options, self._breaker, time.monotonic()
        content = body_for(request, options.model, self._limit_name)
        if content is None:
            raise UnsupportedError("a parameter that only the fleet's engines understand")
        if self.in_flight >= options.max_in_flight:
            raise NoSlotError(f"it has {self.in_flight} requests")
        if not breaker.admits(now):
            raise PausedError(f"it has failed; it gets requests again in {breaker.admits_in_s(now):.1f} s")
        probe = breaker.begin(now)
        try:
            answer = await self._begun_with_either_limit(request, content, sequences, sent_at)
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

    async def _begun_with_either_limit(
        self, request: EngineRequest, content: bytes, sequences: int, sent_at: float
    ) -> EngineAnswer:
        """Send a request; once more with the limit's other name if that is refused. The name that is taken is kept."""
        other_name = OLDER_LIMIT if self._limit_name == LIMIT else LIMIT
        try:
            return await self._begun(request, content, sequences, sent_at)
        except RefusedThereError as refused:
            other = body_for(request, self._options.model, other_name)
            if other is None or other == content or self._limit_name.encode() not in refused.body:
                raise
            first = without_trace(refused)
        try:
            answer = await self._begun(request, other, sequences, sent_at)
        except RefusedThereError:
            raise first from None  # the name was not what is wrong
        finally:
            del first  # its trace leads here
        self._limit_name = other_name
        return answer

    async def _begun(self, request: EngineRequest, content: bytes, sequences: int, sent_at: float) -> EngineAnswer:
        """Send a request; its place, its connection and its span end with it unless an answer is returned."""
        options, times = self._options, self._times
        self.in_flight += 1
        hold = OverflowHold(self._replica, sequences, self._freed)
        hop = Hop(
            request.operation, options.model, options.url, time.monotonic(),
            overflow=self.name, streamed=request.streamed,
        )  # fmt: skip
        self._telemetry.start(hop, request.parameters)
        limit_s = options.first_token_timeout_s if request.streamed else times.answer_timeout_s
        body: Body | None = None
        limits = {"connect": times.connect_timeout_s, "pool": times.connect_timeout_s, "read": limit_s}
        try:
            body = await self._transport.send(*self._post(request, content), limits)
            if body.status != httpx.codes.OK:
                said, later = await body_of(body, MAX_ERROR_BYTES), body.header(b"retry-after")
                error = status_error(body.status, None, later)
                if isinstance(error, EngineRefusedError):
                    error = RefusedThereError(_codes_of(body.status, said), body.status, said)
                raise error  # noqa: TRY301  one place ends the attempt
            begun = Attempt(
                tier=TierName(OVERFLOW), lease=hold, body=body, hop=hop, sent_at=sent_at,
                token_timeout_s=times.token_timeout_s, silence_timeout_s=times.answer_timeout_s,
            )  # fmt: skip
            answer: EngineAnswer = _stream(begun, request) if request.streamed else _WholeAnswer(begun, _FORMAT)
            answer.overflow = self.name
            await answer.begin()
            return answer  # noqa: TRY300  an else block would be far from here
        except BaseException as error:
            await give_up(error, hold, hop, body, limit_s, streamed=request.streamed)
            raise

    def _freed(self) -> None:
        self.in_flight -= 1

    def _post(self, request: EngineRequest, content: bytes) -> tuple[Origin, bytes]:
        headers = [
            (b"accept", b"text/event-stream" if request.streamed else b"application/json"),
            (b"accept-encoding", b"identity"),
            (b"user-agent", b"qarr"),
        ]
        if key := self._options.api_key.get_secret_value():
            headers.append((b"authorization", b"Bearer " + key.encode("ascii")))
        return json_post(self._options.url + request.path.removeprefix("/v1"), headers, content)

    async def aclose(self) -> None:
        await self._transport.aclose()


_CODE = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}").fullmatch


def _codes_of(status: int, said: bytes) -> str:
    """Return what a server says of an error without its words: the status, the error's code, and the member it blames."""
    try:
        error = read_json(said)["error"]
        named = [error.get("code"), error.get("param")]
    except (ValueError, KeyError, TypeError, AttributeError):
        named = []
    codes = [code for code in named if isinstance(code, str) and _CODE(code)]
    return f"HTTP {status} ({', '.join(codes)})" if codes else f"HTTP {status}"


def _stream(begun: Attempt, request: EngineRequest) -> EngineStream:
    answer = EngineStream(begun, request)
    answer.continuable = False
    return answer
