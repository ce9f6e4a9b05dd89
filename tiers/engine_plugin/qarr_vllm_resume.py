"""Let vLLM go on with an answer that another engine began: the resume protocol between router and engine.

A router whose engine died in the middle of a streamed answer sends the caller's own request to another engine, with the
ids of the tokens that the answer had so far. The engine computes them together with the prompt and feeds them to its
grammar, its detokenizer, its stop strings and its parsers. Its stream begins anew from the first event, with the known
part in one piece, and goes on from there. The router drops what its client already has.

The protocol
============
1. **Capability.** Each HTTP answer has the header ``x-qarr-resume: 1``.
2. **Token ids.** A request with the header ``x-qarr-tokens: 1`` whose answer is an event stream gets comments with the ids
   of the output's tokens, each followed by an empty line, before the bytes that the tokens led to::

       : qarr-tokens 15,823,4

   They come in order, all of them, the token that ends the answer included. Tokens that lead to no event are told as
   well, so the comments also show that the engine computes. Answers of several choices are not told.
3. **Resume.** A request with the header ``x-qarr-resume: 1`` has the member ``"qarr_resume"`` in its body::

       {"token_ids": [15, 823, 4], "finish_reason": null}

   ``finish_reason`` is null, or ``"stop"`` or ``"length"`` if the ids are a finished answer whose last events were
   lost. The engine computes nothing for a finished answer. It also recognises one by itself: by a last token that ends
   answers, by a stop string, and by ``max_tokens`` ids. The request must be a stream with one choice, without
   log-probabilities, ``echo`` or beam search; others are refused with HTTP 400. ``max_tokens`` and ``min_tokens``
   count the ids as output, and ``usage`` is that of one unbroken answer. With ``x-qarr-tokens: 1`` only the tokens
   after the given ids are told. Penalties of frequency and presence, and the random numbers of a ``seed``, begin anew.

It works at ``/v1/chat/completions``, ``/v1/completions``, ``/v1/messages`` and ``/v1/responses``.

How it works
============
An ASGI middleware reads the headers and the member, and keeps them in a context variable for what follows in vLLM's
API server: ``InputProcessor.process_inputs`` appends the ids to the prompt, ``OutputProcessor.add_request`` separates
them again, and ``AsyncLLM.generate`` tells the ids of new tokens. In the process that computes,
``StructuredOutputManager`` feeds the ids to the grammar of the answer.

The plugin changes functions inside vLLM, so it works with the versions that it was tested with. In others it says so in the
engine's log and does nothing: the engine does not announce the capability.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
import logging
import sys
import time
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from vllm.config import ModelConfig
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.output_processor import RequestState

    Message = dict[str, Any]
    Send = Callable[[Message], Awaitable[None]]
    Receive = Callable[[], Awaitable[Message]]

TESTED_VERSIONS = ("0.32.",)  # beginnings of vLLM's version

RESUME_HEADER = b"x-qarr-resume"
TOKENS_HEADER = b"x-qarr-tokens"
ON = b"1"
MEMBER = "qarr_resume"
ENDPOINTS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"}
)
FINISH_REASONS = ("stop", "length")
LENGTH_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
# fields of a body that a resumed answer cannot honour, and what they must be for it
REFUSED_FIELDS = {
    "logprobs": "log-probabilities of the tokens before are not known",
    "top_logprobs": "log-probabilities of the tokens before are not known",
    "prompt_logprobs": "log-probabilities of the prompt are not told again",
    "echo": "the prompt is not told again",
    "use_beam_search": "beam search has no single sequence of tokens",
    "background": "an answer in the background is not told to who asked for it",
}
OUTPUT_LOGPROBS = "message.output_text.logprobs"

# key in SamplingParams.extra_args, which vLLM hands on to the process that computes
NOTE = "qarr_resume"

log = logging.getLogger("vllm.qarr_resume")


@dataclass(frozen=True)
class KnownOutput:
    """The part of an answer that a request brings along."""

    token_ids: list[int]
    finish_reason: str | None


class RefusedError(Exception):
    """A request that cannot be resumed. Its text names the field, what is wrong with it and what is allowed."""


# What follows is the middleware: everything that concerns HTTP.


class Exchange:
    """One HTTP request that uses the protocol, and its answer."""

    def __init__(self, send: Send, known: KnownOutput | None, *, tells: bool) -> None:
        self._send = send
        self._tells = tells
        self._is_open_stream = False
        self._untold: list[int] = []
        self._generations = 0
        self._untold_known = 0
        self.known = known
        # what the known tokens lead to, once the engine has computed
        self.known_output: RequestOutput | None = None

    def take_known(self) -> KnownOutput | None:
        """Return the known output, once: further generations of the same request have none."""
        self._generations += 1
        known = self.known
        self.known = None
        return known

    async def send(self, message: Message) -> None:
        """Send a part of the answer, behind the ids of the tokens that led to it."""
        if message["type"] == "http.response.start":
            self._is_open_stream = is_event_stream(message["headers"])
        elif self._untold and self._is_open_stream:
            message["body"] = self._comment() + message.get("body", b"")
        if not message.get("more_body", True):
            self._is_open_stream = False
        await self._send(message)

    async def follow(
        self, outputs: AsyncIterator[RequestOutput]
    ) -> AsyncIterator[RequestOutput]:
        """Pass on the outputs of one generation, the known one first, and tell the tokens that are not known."""
        if self.known is not None:
            self._untold_known = len(self.known.token_ids)
        async with aclosing(outputs):  # type: ignore[type-var]
            async for output in outputs:
                if self.known is not None:
                    raise RuntimeError("the engine computed without the known tokens")
                if self.known_output is not None:
                    known_output = self.known_output
                    self.known_output = None
                    self._note_tokens(known_output)
                    yield known_output
                self._note_tokens(output)
                yield output
                if self._untold and self._is_open_stream:
                    # the tokens have led to no event
                    await self._send(
                        {
                            "type": "http.response.body",
                            "body": self._comment(),
                            "more_body": True,
                        }
                    )

    def _note_tokens(self, output: RequestOutput) -> None:
        """Note the tokens of an output that are to be told."""
        if not self._tells or self._generations > 1 or len(output.outputs) > 1:
            return
        token_ids = output.outputs[0].token_ids
        self._untold += token_ids[self._untold_known :]
        self._untold_known = max(0, self._untold_known - len(token_ids))

    def _comment(self) -> bytes:
        ids = ",".join(map(str, self._untold))
        self._untold.clear()
        return f": qarr-tokens {ids}\n\n".encode()


EXCHANGE: ContextVar[Exchange | None] = ContextVar("qarr_exchange", default=None)


def current_exchange() -> Exchange:
    """Return the exchange that the running code serves."""
    exchange = EXCHANGE.get()
    assert exchange is not None
    return exchange


class ResumeMiddleware:
    """Announce the capability, and read what a request says of the protocol."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(
        self, scope: dict[str, Any], receive: Receive, send: Send
    ) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def announce(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (RESUME_HEADER, ON)]
            await send(message)

        has_known = tells = False
        for name, value in scope["headers"]:
            if name == RESUME_HEADER:
                has_known = value == ON
            elif name == TOKENS_HEADER:
                tells = value == ON
        if not (has_known or tells) or scope["path"] not in ENDPOINTS:
            await self.app(scope, receive, announce)
            return
        await self._serve(scope, receive, announce, has_known=has_known, tells=tells)

    async def _serve(
        self,
        scope: dict[str, Any],
        receive: Receive,
        send: Send,
        *,
        has_known: bool,
        tells: bool,
    ) -> None:
        """Serve a request that uses the protocol."""
        known = None
        if has_known:
            content = await read_body(receive)
            if content is None:
                return
            try:
                known, content = separate(content, vocabulary_size(scope))
            except RefusedError as error:
                await refuse(send, scope["path"], str(error))
                return
            scope = {**scope, "headers": with_length(scope["headers"], len(content))}
            receive = replay(content, receive)
        exchange = Exchange(send, known, tells=tells)
        token = EXCHANGE.set(exchange)
        try:
            await self.app(scope, receive, exchange.send)
        finally:
            EXCHANGE.reset(token)


def is_event_stream(headers: list[tuple[bytes, bytes]]) -> bool:
    """Tell whether an answer with these headers is an event stream."""
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in headers
    )


def vocabulary_size(scope: Mapping[str, Any]) -> int | None:
    """Return the number of the model's tokens; None before vLLM has set up its application."""
    vllm_config = getattr(scope["app"].state, "vllm_config", None)
    if vllm_config is None:
        return None
    size: int = vllm_config.model_config.get_vocab_size()
    return size


async def read_body(receive: Receive) -> bytes | None:
    """Read a request's body; None if the client left."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def replay(content: bytes, receive: Receive) -> Receive:
    """Return a function that receives this body first."""
    bodies = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive_again() -> Message:
        if bodies:
            return bodies.pop()
        return await receive()

    return receive_again


def with_length(
    headers: list[tuple[bytes, bytes]], length: int
) -> list[tuple[bytes, bytes]]:
    """Return a request's headers with another length of its body."""
    others = [
        (name, value)
        for name, value in headers
        if name not in {b"content-length", b"transfer-encoding"}
    ]
    return [*others, (b"content-length", str(length).encode())]


async def refuse(send: Send, path: str, text: str) -> None:
    """Answer with HTTP 400 in the form of the endpoint's errors."""
    error: dict[str, Any] = {"message": text, "type": "invalid_request_error"}
    body: dict[str, Any] = {"type": "error", "error": error}
    if path != "/v1/messages":
        body = {"error": {**error, "param": MEMBER, "code": 400}}
    content = json.dumps(body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
    ]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": content, "more_body": False})


def separate(content: bytes, vocabulary: int | None) -> tuple[KnownOutput, bytes]:
    """Separate the known output from a request's body.

    Raises:
        RefusedError: If the body does not say what is known, or asks for what a resumed answer cannot have.
    """
    try:
        body = json.loads(content)
    except ValueError as error:
        raise RefusedError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RefusedError("the body must be a JSON object")
    if MEMBER not in body:
        raise RefusedError(
            f"{MEMBER} is missing: a request with the header x-qarr-resume says in it which tokens are known"
        )
    known = parse_known(body.pop(MEMBER), vocabulary)
    check_body(body, len(known.token_ids))
    return known, json.dumps(body).encode()


def parse_known(member: object, vocabulary: int | None) -> KnownOutput:
    """Return what the body's member says.

    Raises:
        RefusedError: If it is malformed.
    """
    if not isinstance(member, dict):
        raise RefusedError(
            f"{MEMBER} must be an object with token_ids and finish_reason"
        )
    unknown = sorted(member.keys() - {"token_ids", "finish_reason"})
    if unknown:
        raise RefusedError(
            f"{MEMBER}.{unknown[0]} is not known: token_ids and finish_reason are allowed"
        )
    token_ids = member.get("token_ids")
    if not isinstance(token_ids, list):
        raise RefusedError(
            f"{MEMBER}.token_ids must be a list of the output's token ids so far"
        )
    for position, token_id in enumerate(token_ids):
        is_id = type(token_id) is int and token_id >= 0
        if not is_id or (vocabulary is not None and token_id >= vocabulary):
            highest = "" if vocabulary is None else f" to {vocabulary - 1}"
            raise RefusedError(
                f"{MEMBER}.token_ids[{position}] is {json.dumps(token_id)[:40]}: "
                f"the ids of this model's tokens are integers from 0{highest}"
            )
    finish_reason = member.get("finish_reason")
    if finish_reason is not None and finish_reason not in FINISH_REASONS:
        raise RefusedError(
            f"{MEMBER}.finish_reason is {json.dumps(finish_reason)[:40]}: null, "
            '"stop" and "length" are allowed'
        )
    if finish_reason is not None and not token_ids:
        raise RefusedError(
            f"{MEMBER}.token_ids is empty: an answer with a finish_reason has tokens"
        )
    return KnownOutput(token_ids=token_ids, finish_reason=finish_reason)


def check_body(body: Mapping[str, Any], known_count: int) -> None:
    """Check that an answer to this body can be resumed.

    Raises:
        RefusedError: If it cannot.
    """
    if body.get("stream") is not True:
        raise RefusedError("stream must be true: only event streams are resumed")
    if body.get("n") not in {None, 1}:
        raise RefusedError(f"n is {body['n']}: answers with one choice are resumed")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        raise RefusedError(
            "prompt has several prompts: an answer to one prompt is resumed"
        )
    for field, reason in REFUSED_FIELDS.items():
        value = body.get(field)
        is_unused = value is None or value is False
        if not is_unused and (field, value) != ("top_logprobs", 0):
            raise RefusedError(
                f"{field} cannot be resumed ({reason}): leave it out, or begin the answer anew"
            )
    if OUTPUT_LOGPROBS in (body.get("include") or ()):
        raise RefusedError(
            f"include names {OUTPUT_LOGPROBS}, which cannot be resumed: leave it out"
        )
    for field in LENGTH_FIELDS:
        limit = body.get(field)
        if isinstance(limit, int) and known_count > limit:
            raise RefusedError(
                f"{MEMBER}.token_ids has {known_count} ids, but {field} is {limit}: "
                "the ids count as output"
            )


# What follows changes vLLM's API server.


@dataclass(frozen=True)
class Note:
    """What a resumed request notes in its sampling parameters, beside what the engine is to compute.

    Attributes:
        count: How many ids at the end of its prompt are output.
        max_tokens: The limit of the whole output.
        min_tokens: The least number of tokens of the whole output.
        finish_reason: Why the output ended, if it did.
    """

    count: int
    max_tokens: int
    min_tokens: int
    finish_reason: str | None


def note_of(params: SamplingParams | None) -> Note | None:
    """Return a request's note; None if it resumes nothing."""
    if params is None or params.extra_args is None:
        return None
    fields = params.extra_args.get(NOTE)
    if fields is None:
        return None
    return Note(*fields)


def extend_prompt(
    request: EngineCoreRequest, known: KnownOutput, model_config: ModelConfig
) -> None:
    """Let the engine compute the known output with the prompt, and so many fewer tokens after it.

    Raises:
        VLLMValidationError: If the answer cannot be resumed.
    """
    from vllm.exceptions import VLLMValidationError

    params = request.sampling_params
    count = len(known.token_ids)
    if params is None or params.n != 1:
        raise VLLMValidationError("Only answers with one choice are resumed.")
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise VLLMValidationError("A prompt of embeddings cannot be resumed.")
    if not count:
        return
    assert params.max_tokens is not None
    room = min(
        params.max_tokens, model_config.max_model_len - len(request.prompt_token_ids)
    )
    if count > room:
        raise VLLMValidationError(
            f"{MEMBER}.token_ids has {count} ids, but the output has room for {room}: "
            "resume on an engine with a context as long as the first one's.",
            parameter=MEMBER,
        )
    note = (count, params.max_tokens, params.min_tokens, known.finish_reason)
    params.extra_args = {**(params.extra_args or {}), NOTE: note}
    params.max_tokens = max(params.max_tokens - count, 1)
    params.min_tokens = max(params.min_tokens - count, 0)
    request.prompt_token_ids = [*request.prompt_token_ids, *known.token_ids]


@dataclass(frozen=True)
class SplitRequest:
    """A resumed request as an unbroken one would be, and its known output."""

    request: EngineCoreRequest
    token_ids: list[int]


def split(request: EngineCoreRequest, note: Note) -> SplitRequest:
    """Separate the known output from the prompt again."""
    assert request.prompt_token_ids is not None
    assert request.sampling_params is not None
    params = copy.copy(request.sampling_params)
    params.max_tokens = note.max_tokens
    params.min_tokens = note.min_tokens
    unbroken = copy.copy(request)
    unbroken.sampling_params = params
    unbroken.prompt_token_ids = request.prompt_token_ids[: -note.count]
    return SplitRequest(unbroken, request.prompt_token_ids[-note.count :])


@dataclass(frozen=True)
class AnswerEnd:
    """How an answer ends whose output is all known.

    Attributes:
        token_ids: Its output but for what the last step of the engine adds.
        output: The last step of the engine.
    """

    token_ids: list[int]
    output: EngineCoreOutput


def end_of(
    request: EngineCoreRequest, note: Note, tokenizer: Any, max_model_len: int
) -> AnswerEnd | None:
    """Return how an answer ends that is finished already; None if there is more to compute."""
    from vllm.v1.core.sched.utils import check_stop
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.request import Request

    parts = split(request, note)
    token_ids = parts.token_ids
    output = EngineCoreOutput(
        request_id=request.request_id, new_token_ids=token_ids[-1:]
    )
    kept_count = count_to_stop_string(parts, tokenizer)
    if kept_count is not None:
        # The output processor finds the string in the last step.
        output.new_token_ids = token_ids[kept_count - 1 : kept_count]
        return AnswerEnd(token_ids[: kept_count - 1], output)
    as_computed = Request(
        request_id=request.request_id,
        prompt_token_ids=parts.request.prompt_token_ids,
        sampling_params=parts.request.sampling_params,
        pooling_params=None,
    )
    as_computed.append_output_token_ids(token_ids)
    if check_stop(as_computed, max_model_len):
        output.finish_reason = as_computed.get_finished_reason()
        output.stop_reason = as_computed.stop_reason
        return AnswerEnd(token_ids[:-1], output)
    if note.finish_reason is None:
        return None
    output.new_token_ids = []  # the last token ends nothing, so it has text
    output.finish_reason = FinishReason[note.finish_reason.upper()]
    return AnswerEnd(token_ids, output)


def count_to_stop_string(parts: SplitRequest, tokenizer: Any) -> int | None:
    """Return how many known tokens there are up to the end of a stop string; None if there is none."""
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    params = parts.request.sampling_params
    assert params is not None
    if not params.stop or not params.detokenize:
        return None
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, parts.request)
    if detokenizer.update(parts.token_ids, False) is None:
        return None
    return detokenizer.num_output_tokens()


def prepend_known(
    state: RequestState, token_ids: list[int], exchange: Exchange
) -> None:
    """Let the output of a request begin with what is known, as soon as the engine has put out more.

    Args:
        state: The request's state in the output processor, new.
        token_ids: The ids of the known output.
        exchange: The request and its answer.
    """
    if not token_ids:
        return
    assert state.detokenizer is not None
    state.detokenizer.update(token_ids, False)
    original = state.make_request_output
    known_output = original(list(token_ids), None, None, None)

    def make_request_output(*args: Any, **kwargs: Any) -> Any:
        del state.make_request_output  # the first output alone
        # the engine also counts known tokens that it found in its cache
        state.num_cached_tokens = min(state.num_cached_tokens, state.prompt_len)
        known_output.num_cached_tokens = state.num_cached_tokens
        known_output.num_cache_creation_tokens = state.num_cache_creation_tokens
        exchange.known_output = known_output
        return original(*args, **kwargs)

    state.make_request_output = make_request_output


def change_input() -> None:
    """Let requests that resume an answer be computed from the end of what is known."""
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    original = InputProcessor.process_inputs

    @functools.wraps(original)
    def process_inputs(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> EngineCoreRequest:
        extra_args = getattr(params, "extra_args", None)
        if extra_args is not None and NOTE in extra_args:
            raise VLLMValidationError(
                f"{NOTE} is not allowed among a request's extra arguments.",
                parameter=NOTE,
            )
        request = original(self, request_id, prompt, params, *args, **kwargs)
        exchange = EXCHANGE.get()
        if exchange is not None:
            known = exchange.take_known()
            if known is not None:
                extend_prompt(request, known, self.model_config)
        return request

    InputProcessor.process_inputs = process_inputs


def change_output() -> None:
    """Let the output of a resumed answer begin with what is known."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor

    original_add = OutputProcessor.add_request
    original_start = AsyncLLM._add_request
    original_generate = AsyncLLM.generate

    @functools.wraps(original_add)
    def add_request(
        self: Any, request: EngineCoreRequest, *args: Any, **kwargs: Any
    ) -> None:
        note = note_of(request.sampling_params)
        if note is None:
            original_add(self, request, *args, **kwargs)
            return
        parts = split(request, note)
        original_add(self, parts.request, *args, **kwargs)
        prepend_known(
            self.request_states[request.request_id], parts.token_ids, current_exchange()
        )

    async def start(
        engine: Any, request: EngineCoreRequest, note: Note, *args: Any
    ) -> None:
        """Add a request that resumes an answer, to the engine only if there is more to compute."""
        processor = engine.output_processor
        end = end_of(
            request, note, processor.tokenizer, engine.model_config.max_model_len
        )
        if end is None:
            await original_start(engine, request, *args)
            return
        parts = split(request, note)
        original_add(processor, parts.request, *args)
        prepend_known(
            processor.request_states[request.request_id],
            end.token_ids,
            current_exchange(),
        )
        processor.process_outputs([end.output])

    @functools.wraps(original_start)
    def add_to_engine(
        self: Any, request: EngineCoreRequest, *args: Any
    ) -> Awaitable[None]:
        note = note_of(request.sampling_params)
        if note is None:
            return original_start(self, request, *args)
        return start(self, request, note, *args)

    @functools.wraps(original_generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator[RequestOutput]:
        outputs = original_generate(self, *args, **kwargs)
        exchange = EXCHANGE.get()
        if exchange is None:
            return outputs
        return exchange.follow(outputs)

    OutputProcessor.add_request = add_request
    AsyncLLM._add_request = add_to_engine
    AsyncLLM.generate = generate


def change_http() -> None:
    """Put the middleware around each application that vLLM builds."""
    from vllm.entrypoints.serve.middleware import register

    original = register.init_entrypoints_middleware

    @functools.wraps(original)
    def init_entrypoints_middleware(args: Any, app: Any, *more: Any) -> None:
        original(args, app, *more)
        app.add_middleware(ResumeMiddleware)

    register.init_entrypoints_middleware = init_entrypoints_middleware
    importer = sys.modules.get("vllm.entrypoints.launchers.app")
    if importer is not None:
        importer.init_entrypoints_middleware = init_entrypoints_middleware


# What follows changes the process that computes.


def change_grammar() -> None:
    """Let the grammar of a resumed answer begin where what is known ends."""
    from vllm.v1.structured_output import StructuredOutputManager

    original = StructuredOutputManager._create_grammar

    @functools.wraps(original)
    def create_grammar(self: Any, request: Any) -> Any:
        grammar = original(self, request)
        note = note_of(request.sampling_params)
        if note is not None:
            advance_grammar(self, request, grammar, note)
        return grammar

    StructuredOutputManager._create_grammar = create_grammar


def advance_grammar(manager: Any, request: Any, grammar: Any, note: Note) -> None:
    """Feed the known output to a grammar, token by token as if it were computed, so that it begins where a thought ends.

    Raises:
        ValueError: If the grammar does not allow the known output.
    """
    prompt_token_ids = request.prompt_token_ids[: -note.count]
    as_computed = SimpleNamespace(
        request_id=request.request_id,
        use_structured_output=True,
        structured_output_request=replace(
            request.structured_output_request, _grammar=grammar
        ),
        prompt_token_ids=prompt_token_ids,
        all_token_ids=list(prompt_token_ids),
    )
    for token_id in request.prompt_token_ids[-note.count :]:
        as_computed.all_token_ids.append(token_id)
        if not manager.accept_tokens(as_computed, [token_id]):
            raise ValueError(
                f"the answer's grammar does not allow the tokens of {MEMBER}: "
                "they are those of an answer to another request"
            )
    structured = as_computed.structured_output_request
    request.structured_output_request.reasoning_ended = structured.reasoning_ended
    request.structured_output_request.reasoner = structured.reasoner


# what is changed, and the parameters that it must have
CHANGED = {
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs": (
        "self, request_id, prompt, params, supported_tasks, arrival_time, lora_request, tokenization_kwargs, "
        "trace_headers, priority, data_parallel_rank, resumable, session_id, kv_hints"
    ),
    "vllm.v1.engine.output_processor:OutputProcessor.add_request": (
        "self, request, prompt, parent_req, request_index, queue"
    ),
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs": (
        "self, engine_core_outputs, engine_core_timestamp, iteration_stats, weight_version"
    ),
    "vllm.v1.engine.output_processor:RequestState.make_request_output": (
        "self, new_token_ids, pooling_output, finish_reason, stop_reason, kv_transfer_params, ec_transfer_params, error"
    ),
    "vllm.v1.engine.detokenizer:IncrementalDetokenizer.update": (
        "self, new_token_ids, stop_terminated"
    ),
    "vllm.v1.engine.async_llm:AsyncLLM._add_request": (
        "self, request, prompt, parent_req, index, queue"
    ),
    "vllm.v1.engine.async_llm:AsyncLLM.generate": (
        "self, prompt, sampling_params, request_id, prompt_text, lora_request, tokenization_kwargs, trace_headers, "
        "priority, data_parallel_rank, session_id, kv_hints, reasoning_ended, reasoning_parser_kwargs"
    ),
    "vllm.entrypoints.serve.middleware.register:init_entrypoints_middleware": (
        "args, app, supported_tasks"
    ),
    "vllm.v1.core.sched.utils:check_stop": "request, max_model_len",
    "vllm.v1.structured_output:StructuredOutputManager._create_grammar": (
        "self, request"
    ),
    "vllm.v1.structured_output:StructuredOutputManager.accept_tokens": (
        "self, request, new_token_ids"
    ),
}


def find_changes() -> list[str]:
    """Return which of vLLM's functions are not those that the plugin changes and uses."""
    changes = []
    for path, expected in CHANGED.items():
        module_name, _, names = path.partition(":")
        try:
            function = importlib.import_module(module_name)
            for name in names.split("."):
                function = getattr(function, name)
            parameters = ", ".join(inspect.signature(function).parameters)
        except (ImportError, AttributeError) as error:
            changes.append(f"{path} is not there ({error})")
            continue
        if parameters != expected:
            changes.append(f"{path} takes ({parameters}), not ({expected})")
    return changes


def is_tested(version: str) -> bool:
    """Tell whether the plugin was tested with this version of vLLM."""
    return version.startswith(TESTED_VERSIONS)


def register() -> None:
    """Change vLLM so that it resumes answers. vLLM calls it once a process."""
    from vllm import __version__

    if not is_tested(__version__):
        versions = ", ".join(f"{version}x" for version in TESTED_VERSIONS)
        write_to_engine_log(
            f"this engine does not resume answers: tested with vLLM {versions}, this is {__version__}"
        )
        return
    changes = find_changes()
    if changes:
        write_to_engine_log(
            f"this engine does not resume answers: in vLLM {__version__}, {'; '.join(changes)}"
        )
        return
    change_input()
    change_output()
    change_http()
    change_grammar()


def write_to_engine_log(text: str) -> None:
    """Write a line into the engine's log.

    vLLM's API server loads plugins before it sets up its loggers, which would drop the line.
    """
    if log.hasHandlers():
        log.info(text)
    else:
        time_of_day = time.strftime("%m-%d %H:%M:%S")  # as in vLLM's own lines
        sys.stderr.write(f"INFO {time_of_day} [qarr_vllm_resume] {text}\n")
