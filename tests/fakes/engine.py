"""A fake vLLM server, for faults and timings that a real engine cannot be told to produce.

It speaks the part of vLLM's API that QARR uses. ``tests/engine/test_3_contract.py`` runs one script against this fake and
against a real engine, and compares what comes back.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.responses import (
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

if not __package__:  # The module was started as a program, from any folder.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.fakes.named_events import ERROR as NAMED_ERROR
from tests.fakes.named_events import SCRIPTS, Script
from tests.fakes.named_events import event as named_event
from tiers.simulated.surface import Surface

ANSWER = ("The", " capital", " of", " France", " is", " Paris", ".")
TEMPLATE_TOKENS = 6
LOGPROB = -0.1  # Each piece has this log-probability.
PIECE = 1000  # An answer's first piece has this token id.
BROKEN_CHARACTER = "\ufffd"
ERROR_CHUNK = b'data: {"error": {"message": "engine died", "code": 500}}\n\n'
FINGERPRINT = "fake-1"
# A supervisor measures speed with prompts that contain one of these.
SPEED_PROMPTS = ("Water boils at", "The lighthouse keeper wrote")


@dataclass(slots=True)
class Behaviour:
    """How the fake behaves; change it between requests.

    Attributes:
        answer: The pieces of every answer, one a token; bytes may begin or end within a character.
        special: Numbers of pieces that are special tokens: answers leave them out, /detokenize shows them.
        group: How many pieces come in one event.
        thinks: Whether its model shows its reasoning; vLLM refuses a bound on that of others.
        held_from: From this piece on nothing is sent before the last one, as a parser holds a tool call back.
        version: The release of vLLM that it says it is.
        kv_cache_dtype: The type of its KV cache; with None it tells none.
        counts: Whether /metrics has a count of generated tokens.
        late: So many characters of a chat's text come only with the next piece, as a parser may hold them back.
        reasoning: So many pieces of a chat's answer are the model's reasoning.
        delay_s: The delay before each piece.
        first_delay_s: A further delay before the first piece.
        status: The HTTP status of generations.
        scores: Whether it scores tokens, rather than answering with 500.
        error: The error's message of a generation that is not 200.
        break_after: Close the connection after that many pieces, without an end.
        break_at: Close the connection after that many events, of whatever kind, without an end.
        once: Break only a single time.
        stall_after: Send nothing more after that many pieces.
        error_after: Send an error chunk after that many pieces.
        error_with: Send an error chunk in the same bytes as the last of that many pieces.
        nonsense_with: Send garbage in the same bytes as the last of that many pieces, and go on.
        nonsense: The body that every generation answers with instead, with status 200.
        start_errors: The errors that the next starts of a process end with, one each.
        resumes: Whether it resumes answers that others began, and tells tokens in comments, as QARR's plugin for vLLM does.
        tells_ids: Whether generations tell their token ids, and a prompt's, to requests that ask for them.
        told: The body that /detokenize answers with instead of the text.
        detokenizes: Whether /detokenize answers at all, rather than with 500.
        pings: Send a comment in the same bytes as each piece, before it.
        header: The value of a further header of every stream.
        alive: Whether /health and /metrics answer 200.
        priorities: Whether requests may have a priority; vLLM without priority scheduling refuses those that do.
        rank: The rank of each token that it is asked to score: with 1 it agrees.
        vocabulary: An offset of every token id, as of another tokenizer.
        first_id: The first of the answer's token ids; it changes log-probabilities too, as other weights would.
        exit_after_s: End the process with status 7 so long after its start.
        root: The folder or id of the model that it says it was started with; by default the served name.
        prompt_tokens: The number of tokens that it reports for every prompt.
        cached_tokens: How many of these it reports to be in its prefix cache; with None it reports nothing.
        cache_queries: The tokens that it reports to have looked up in its prefix cache.
        cache_hits: The tokens that it reports to have found there.
        kv_cache_usage: The usage that it reports, from 0 to 1.
        hung: The paths whose requests are taken and never answered.
        held: How many requests hang now.
        instead: The bodies that some paths answer with instead, with status 200.
        heads: The headers of the last request to each path.
        running: How many requests are computed now, apart from measurements of its speed.
        measuring: How many measurements of its speed are computed now.
        callers: How many of these are streams of callers that asked for token ids.
        adapters: The folders of its LoRA adapters, by name.
        loads: Whether it loads adapters while it runs.
        measurements: How many requests measured its speed; they are not among ``requests``.
    """

    answer: tuple[str | bytes, ...] = ANSWER
    special: tuple[int, ...] = ()
    group: int = 1
    thinks: bool = False
    held_from: int | None = None
    version: str = "0.32.0"
    kv_cache_dtype: str | None = "auto"
    counts: bool = True
    late: int = 0
    reasoning: int = 0
    delay_s: float = 0.0
    first_delay_s: float = 0.0
    status: int = 200
    scores: bool = True
    error: str = "broken"
    break_after: int | None = None
    break_at: int | None = None
    once: bool = False
    stall_after: int | None = None
    error_after: int | None = None
    error_with: int | None = None
    nonsense_with: int | None = None
    nonsense: bytes = b""
    start_errors: Sequence[str] = ()
    resumes: bool = False
    tells_ids: bool = True
    told: Any = None
    detokenizes: bool = True
    pings: bool = False
    header: str = ""
    alive: bool = True
    rank: int = 1
    vocabulary: int = 0
    first_id: int = 0
    exit_after_s: float | None = None
    max_model_len: int = 8192
    root: str | None = None
    prompt_tokens: int = 10
    cached_tokens: int | None = None
    cache_queries: int = 0
    cache_hits: int = 0
    kv_cache_usage: float = 0.25
    priorities: bool = True
    adapters: dict[str, str] = field(default_factory=dict)
    loads: bool = True
    instead: dict[str, str] = field(default_factory=dict)
    running: int = 0
    measuring: int = 0
    callers: int = 0
    tokens: int = 0
    measurements: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    hung: Collection[str] = ()
    held: int = 0
    raw: list[bytes] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)
    heads: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Faulty:
    """An application in front of which a behaviour's faults by path stand."""

    behaviour: Behaviour
    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        behaviour = self.behaviour
        if behaviour.resumes:
            send = _announcing(send)
        path = scope.get("path", "")
        behaviour.heads[path] = {
            name.decode(): value.decode() for name, value in scope.get("headers", ())
        }
        if path in behaviour.hung:
            behaviour.held += 1
            while (await receive())["type"] != "http.disconnect":
                pass
            behaviour.held -= 1
        elif path in behaviour.instead:
            response = Response(behaviour.instead[path], media_type="application/json")
            await response(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def _announcing(send: Send) -> Send:
    """Return what sends an answer with the header of an engine that resumes answers."""

    async def announce(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"x-qarr-resume", b"1")]
            message = {**message, "headers": headers}
        await send(message)

    return announce


@dataclass(slots=True)
class Exchange:
    """What a request uses of the protocol by which answers are resumed.

    Attributes:
        known: Tokens of the answer that came with the request.
        is_finished: Whether they are all of it.
        tells: Whether comments tell the tokens that are computed.
    """

    known: int = 0
    is_finished: bool = False
    tells: bool = False
    _untold: list[int] = field(default_factory=list)

    def computed(self, token: int) -> None:
        if self.tells:
            self._untold.append(token)

    def take_comment(self) -> bytes:
        """Return the comment with the tokens that were not told; empty: there are none."""
        if not self._untold:
            return b""
        ids = ",".join(map(str, self._untold))
        self._untold.clear()
        return f": qarr-tokens {ids}\n\n".encode()


class Detokenizer:
    """Makes text of tokens as they come, and looks for stop strings, as vLLM's ``v1/engine/detokenizer.py`` does.

    Args:
        body: The request, which has the stop strings.
        prompt: The bytes before the answer; if they end within a character, vLLM repeats all of them.

    Attributes:
        held_back: So many characters do not go out before the end, because they may begin a stop string.
        stopped: The stop string that ended the answer.
    """

    def __init__(self, body: dict[str, Any], prompt: bytes = b"") -> None:
        stop = body.get("stop") or []
        self._stops: list[str] = [stop] if isinstance(stop, str) else stop
        self._include = bool(body.get("include_stop_str_in_output"))
        self._min_tokens = int(body.get("min_tokens") or 0)
        longest = max(map(len, self._stops), default=1)
        self.held_back = 0 if self._include else longest - 1
        ends_within = prompt.decode("utf-8", "replace").endswith(BROKEN_CHARACTER)
        self._pending = prompt if ends_within else b""
        self._text = ""
        self._sent = 0
        self._tokens = 0
        self.stopped: str | None = None

    def take(self, token: bytes) -> None:
        """Append a token, and look for stop strings in the text that it completes."""
        self._tokens += 1
        self._pending += token
        new = self._pending.decode("utf-8", "replace")
        if not new or new.endswith(BROKEN_CHARACTER):
            return
        searched = len(self._text)
        self._pending = b""
        self._text = self._text + new
        if self._tokens <= self._min_tokens:
            return
        matches = []
        for number, stop in enumerate(self._stops):
            start = self._text.find(stop, max(searched + 1 - len(stop), 0))
            if start >= 0:
                matches.append((start + len(stop), number, start))
        if matches:
            # The stop string that ends first counts, and among those the first in the list.
            end, number, start = min(matches)
            self.stopped = self._stops[number]
            self._text = self._text[: end if self._include else start]

    def more(self, *, finished: bool) -> str:
        """Return the text that may go out now and has not yet."""
        end = len(self._text) - (0 if finished else self.held_back)
        start = self._sent
        self._sent = max(end, self._sent)
        return self._text[start : self._sent]


class FakeEngine(Surface):
    """The fake's application; ``behaviour`` is shared with the test."""

    def __init__(self, behaviour: Behaviour | None = None, model: str = "fake") -> None:
        super().__init__(model)
        self.behaviour = behaviour or Behaviour()
        self.app: ASGIApp = _Faulty(self.behaviour, self._routes())

    def _routes(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/version", self._version),
                Route("/v1/models", self._models),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/detokenize", self._detokenize, methods=["POST"]),
                Route("/v1/embeddings", self._embed, methods=["POST"]),
                Route("/v1/completions", self._generate, methods=["POST"]),
                Route("/v1/chat/completions", self._generate, methods=["POST"]),
                *(Route(path, self._generate, methods=["POST"]) for path in SCRIPTS),
                Route(
                    "/v1/messages/count_tokens", self._count_tokens, methods=["POST"]
                ),
                Route("/v1/load_lora_adapter", self._load, methods=["POST"]),
                Route("/v1/unload_lora_adapter", self._unload, methods=["POST"]),
                Route("/fake", self._behave, methods=["POST"]),
            ]
        )

    async def _behave(self, request: Request) -> Response:
        for name, value in (await request.json()).items():
            setattr(self.behaviour, name, value)
        return Response()

    async def _health(self, _request: Request) -> Response:
        return Response(status_code=200 if self.behaviour.alive else 503)

    async def _metrics(self, _request: Request) -> Response:
        label = f'{{engine="0",model_name="{self._model}"}}'
        generated = (
            f"vllm:generation_tokens_total{label} {float(self.behaviour.tokens)}\n"
        )
        cache_config = ""
        if self.behaviour.kv_cache_dtype is not None:
            cache_config = (
                f'vllm:cache_config_info{{cache_dtype="{self.behaviour.kv_cache_dtype}",'
                f'engine="0",kv_cache_dtype_skip_layers="[]"}} 1.0\n'
            )
        return PlainTextResponse(
            f"{cache_config}vllm:num_requests_running{label} {float(self.behaviour.running + self.behaviour.measuring)}\n"
            f"vllm:num_requests_waiting{label} 0.0\nvllm:kv_cache_usage_perc{label} {self.behaviour.kv_cache_usage}\n"
            f"vllm:prompt_tokens_total{label} 0.0\n{generated if self.behaviour.counts else ''}"
            f"vllm:time_to_first_token_seconds_sum{label} 0.0\nvllm:time_to_first_token_seconds_count{label} 0.0\n"
            f"vllm:prefix_cache_queries_total{label} {float(self.behaviour.cache_queries)}\n"
            f"vllm:prefix_cache_hits_total{label} {float(self.behaviour.cache_hits)}\n"
        )

    async def _version(self, _request: Request) -> Response:
        return JSONResponse({"version": self.behaviour.version})

    async def _models(self, _request: Request) -> Response:
        behaviour = self.behaviour
        root = self._model if behaviour.root is None else behaviour.root
        card = self._card(root, behaviour.max_model_len)
        others = [
            {
                **card,
                "id": name,
                "root": path,
                "parent": self._model,
                "max_model_len": None,
            }
            for name, path in behaviour.adapters.items()
        ]
        return JSONResponse({"object": "list", "data": [card, *others]})

    async def _load(self, request: Request) -> Response:
        if not self.behaviour.loads:
            return JSONResponse({"detail": "Not Found"}, 404)
        body = await request.json()
        if "nowhere" in body["lora_path"]:
            return _error(f"No adapter found for {body['lora_path']}", 404)
        self.behaviour.adapters[body["lora_name"]] = body["lora_path"]
        return PlainTextResponse("Success")

    async def _unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if name not in self.behaviour.adapters:
            return _error(f"The lora adapter '{name}' cannot be found.", 404)
        del self.behaviour.adapters[name]
        return PlainTextResponse("Success")

    async def _tokenize(self, request: Request) -> Response:
        try:
            body = await request.json()
            if "messages" in body:
                tokens = []
                for message in body["messages"]:
                    tokens += self._ids(message["content"])
                tokens += [1] * TEMPLATE_TOKENS
            else:
                tokens = self._ids(body["prompt"])
        except (
            KeyError,
            TypeError,
            AttributeError,
            ValueError,
            RecursionError,
        ) as error:
            return _refused(str(error))
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": 8192,
                "tokens": tokens,
                "token_strs": None,
            }
        )

    async def _detokenize(self, request: Request) -> Response:
        behaviour = self.behaviour
        if not behaviour.detokenizes:
            return _error(behaviour.error, 500)
        try:
            body = await request.json()
            text = b"".join(map(self._shown, body["tokens"])).decode("utf-8", "replace")
        except (
            LookupError,
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
        ) as error:
            return _refused(str(error))
        return JSONResponse(
            {"prompt": text.removeprefix(" ")}
            if behaviour.told is None
            else behaviour.told
        )

    async def _embed(self, request: Request) -> Response:
        try:
            inputs = (await request.json())["input"]
            if not isinstance(inputs, list) or all(
                isinstance(token, int) for token in inputs
            ):
                inputs = [inputs]
            if not all(isinstance(text, str | list) and text for text in inputs):
                return _refused("input is neither text nor token ids")
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            return _refused(str(error))
        vectors = [
            {"object": "embedding", "index": index, "embedding": [0.5]}
            for index in range(len(inputs))
        ]
        return JSONResponse(
            {
                "object": "list",
                "data": vectors,
                "usage": {"prompt_tokens": 1, "total_tokens": 1},
            }
        )

    def _shown(self, token: int) -> bytes:
        """Return a token's bytes. The answer's pieces have ids of their own; of other words only the length is known."""
        if token < PIECE:
            return b" " + b"x" * min(token, 99)
        number = token - PIECE
        return (
            b"<|special|>" if number in self.behaviour.special else self._bytes(number)
        )

    def _bytes(self, number: int) -> bytes:
        piece = self.behaviour.answer[number]
        if number in self.behaviour.special:
            return b""
        return piece if isinstance(piece, bytes) else piece.encode()

    def _ids(self, text: str) -> list[int]:
        return [self.behaviour.vocabulary + len(word) for word in text.split()]

    async def _generate(self, request: Request) -> Response:
        try:
            body = await request.json()
            streamed = _check(body, thinks=self.behaviour.thinks)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            return _refused(str(error))
        behaviour = self.behaviour
        if _measures_speed(body):
            behaviour.measurements += 1
        else:
            behaviour.requests.append(body)
            behaviour.raw.append(await request.body())
            behaviour.headers.append(dict(request.headers))
        if body.get("priority") and not behaviour.priorities:
            return _error("priority scheduling is not enabled", 400)
        status = (
            behaviour.status
            if behaviour.scores or body.get("prompt_logprobs") is None
            else 500
        )
        if status != 200:
            error = {
                "message": behaviour.error,
                "type": "BadRequestError",
                "param": None,
                "code": status,
            }
            return JSONResponse({"error": error}, status)
        if behaviour.nonsense:
            media_type = "text/event-stream" if streamed else "application/json"
            return Response(behaviour.nonsense, 200, media_type=media_type)
        if not streamed:
            return await self._unless_disconnected(request, self._answer(request, body))
        return self._streamed_answer(request, body)

    async def _answer(self, request: Request, body: dict[str, Any]) -> Response:
        """Return an answer that is not streamed, in the form of the request's endpoint."""
        path = request.url.path
        if path in SCRIPTS:
            script = SCRIPTS[path](self._model, self.behaviour.prompt_tokens)
            return await self._whole_named(body, script)
        return await self._whole(body, chat=path.endswith("/chat/completions"))

    def _streamed_answer(self, request: Request, body: dict[str, Any]) -> Response:
        """Return a streamed answer, in the form of the request's endpoint."""
        behaviour = self.behaviour
        path = request.url.path
        exchange = self._exchange(request, body)
        if path in SCRIPTS:
            script = SCRIPTS[path](self._model, behaviour.prompt_tokens)
            events = self._named_events(body, script, exchange)
        else:
            events = self._events(
                body, exchange, chat=path.endswith("/chat/completions")
            )
        return StreamingResponse(
            self._stream(events, exchange),
            headers={"x-more": behaviour.header} if behaviour.header else {},
            media_type="text/event-stream; charset=utf-8",
        )

    def _exchange(self, request: Request, body: dict[str, Any]) -> Exchange:
        if not self.behaviour.resumes:
            return Exchange()
        known: dict[str, Any] = {"token_ids": [], "finish_reason": None}
        if request.headers.get("x-qarr-resume") == "1":
            known = body["qarr_resume"]
        return Exchange(
            known=len(known["token_ids"]),
            is_finished=known["finish_reason"] is not None,
            tells=request.headers.get("x-qarr-tokens") == "1",
        )

    async def _compute(self, number: int, body: dict[str, Any]) -> None:
        """Take the time of one piece, or fail there; a single failure hits a caller, not a measurement."""
        behaviour = self.behaviour
        await asyncio.sleep(behaviour.delay_s)
        if number == behaviour.break_after and not (
            behaviour.once and _measures_speed(body)
        ):
            if behaviour.once:
                behaviour.break_after = None
            raise ConnectionResetError
        if number == behaviour.stall_after:
            await asyncio.sleep(3600)

    async def _whole(self, body: dict[str, Any], *, chat: bool) -> Response:
        behaviour = self.behaviour
        behaviour.running += 1
        try:
            pieces = behaviour.answer[: self._most(body, chat=chat)]
            written = Detokenizer(body)
            for number, _ in enumerate(pieces):
                await self._compute(number, body)
                written.take(self._bytes(number))
                if written.stopped is not None:
                    pieces = pieces[: number + 1]
                    break
            text = written.more(finished=True)
            is_cut = len(pieces) == self._most(body, chat=chat)
            reason = "length" if written.stopped is None and is_cut else "stop"
            part: dict[str, Any] = {"text": text}
            if chat:
                part = {"message": {"role": "assistant", "content": text}}
            scores = self._scores(body, len(pieces), chat=chat)
            choices = [
                {"index": index, **part, "finish_reason": reason, **scores}
                for index in range(_prompts_in(body))
            ]
            members: dict[str, Any] = {
                "choices": choices,
                "usage": self._usage(len(pieces)),
                "system_fingerprint": FINGERPRINT,
            }
            if body.get("return_token_ids"):
                members["prompt_token_ids"] = [1, 2, 3]
            kind = "chat.completion" if chat else "text_completion"
            answer = JSONResponse(self._fields(members, kind))
            behaviour.sent.append(bytes(answer.body))
            return answer
        finally:
            behaviour.running -= 1

    async def _whole_named(self, body: dict[str, Any], script: Script) -> Response:
        behaviour = self.behaviour
        behaviour.running += 1
        try:
            limit = int(body.get(script.limit) or behaviour.max_model_len)
            pieces = behaviour.answer[:limit]
            for number, _ in enumerate(pieces):
                await self._compute(number, body)
            text = "".join(
                self._bytes(number).decode() for number, _ in enumerate(pieces)
            )
            answer = JSONResponse(
                script.whole(text, self._usage(len(pieces)), cut=len(pieces) == limit)
            )
            behaviour.sent.append(bytes(answer.body))
            return answer
        finally:
            behaviour.running -= 1

    async def _named_events(
        self, body: dict[str, Any], script: Script, exchange: Exchange
    ) -> AsyncGenerator[bytes, None]:
        behaviour = self.behaviour
        behaviour.running += 1
        try:
            limit = int(body.get(script.limit) or behaviour.max_model_len)
            pieces = behaviour.answer[:limit]
            held = ""
            for event in script.begin():
                yield event
            for number, _ in enumerate(pieces):
                held += self._bytes(number).decode()
                if number < exchange.known:
                    continue
                await self._compute(number, body)
                if number == behaviour.error_after:
                    yield named_event(NAMED_ERROR)
                    return
                behaviour.tokens += 1
                exchange.computed(PIECE + number)
                if (
                    behaviour.held_from is None
                    or number < behaviour.held_from
                    or number + 1 == len(pieces)
                ):
                    ping = b": ping\n\n" if behaviour.pings else b""
                    yield ping + script.piece(held)
                    held = ""
                else:
                    yield b""
            if held:
                yield script.piece(held)
            if behaviour.break_after == len(pieces):
                raise ConnectionResetError
            text = "".join(
                self._bytes(number).decode() for number, _ in enumerate(pieces)
            )
            for event in script.end(
                text, self._usage(len(pieces)), cut=len(pieces) == limit
            ):
                yield event
        finally:
            behaviour.running -= 1

    async def _count_tokens(self, request: Request) -> Response:
        try:
            messages = (await request.json())["messages"]
            count = TEMPLATE_TOKENS + sum(
                len(self._ids(message["content"])) for message in messages
            )
        except (
            KeyError,
            TypeError,
            AttributeError,
            ValueError,
            RecursionError,
        ) as error:
            return _refused(str(error))
        return JSONResponse(
            {
                "input_tokens": count,
                "context_management": {"original_input_tokens": count},
            }
        )

    async def _stream(
        self, answer: AsyncGenerator[bytes, None], exchange: Exchange
    ) -> AsyncIterator[bytes]:
        behaviour = self.behaviour
        sent = 0
        async with aclosing(answer) as events:
            async for event in events:
                comment = exchange.take_comment()
                if comment:
                    yield comment
                if not event:
                    # it only tells tokens
                    continue
                if sent == behaviour.break_at:
                    if behaviour.once:
                        behaviour.break_at = None
                    raise ConnectionResetError
                yield event
                sent += 1

    async def _events(  # noqa: C901, PLR0912, PLR0915  Each fault has a branch.
        self, body: dict[str, Any], exchange: Exchange, *, chat: bool
    ) -> AsyncGenerator[bytes, None]:
        behaviour = self.behaviour
        prompt = _ids_of(body)
        is_measurement = _measures_speed(body)
        behaviour.running += not is_measurement
        behaviour.measuring += is_measurement
        computing = True
        counted = bool((body.get("stream_options") or {}).get("include_usage"))
        # The last chunk has this member, whichever chunk that is.
        last = {"system_fingerprint": FINGERPRINT}
        wants_ids = bool(body.get("return_token_ids")) and behaviour.tells_ids
        behaviour.callers += wants_ids
        try:
            if chat:
                first = {"prompt_token_ids": prompt if wants_ids else None}
                yield self._chunk(
                    {"role": "assistant", "content": ""}, None, chat=True, **first
                )
            done = self._done(body)
            pieces = behaviour.answer[done : done + self._most(body, chat=chat)]
            written = Detokenizer(body, b"".join(map(self._bytes, range(done))))
            ids = list[int]()
            number = done - 1
            late = ""
            if behaviour.first_delay_s:
                await asyncio.sleep(behaviour.first_delay_s)
            for number in range(done, done + len(pieces)):
                if number < exchange.known:
                    written.take(self._bytes(number))
                    continue
                await self._compute(number, body)
                if number == behaviour.error_after:
                    yield ERROR_CHUNK
                    return
                behaviour.tokens += 1
                written.take(self._bytes(number))
                ids.append(PIECE + number)
                exchange.computed(PIECE + number)
                last_piece = number + 1 == done + len(pieces)
                if written.stopped is not None or (last_piece and written.held_back):
                    break
                if len(ids) < behaviour.group and not last_piece:
                    continue
                if (
                    chat
                    and behaviour.held_from is not None
                    and number >= behaviour.held_from
                    and not last_piece
                ):
                    # Like vLLM, it sends no event at all if no ids are asked for.
                    if wants_ids:
                        yield self._chunk({}, None, chat=chat, ids=ids)
                    elif exchange.tells:
                        yield b""
                    ids = []
                    continue
                text = late + written.more(finished=False)
                late = (
                    text[max(len(text) - behaviour.late, 0) :]
                    if chat and behaviour.late
                    else ""
                )
                text = text.removesuffix(late)
                delta = self._delta(text, number, exchange, chat=chat)
                is_first = ids[0] == PIECE + done
                event = self._chunk(
                    delta,
                    None,
                    chat=chat,
                    logprobs=self._logprobs(body, (number,)),
                    ids=ids if wants_ids else None,
                    prompt=prompt if wants_ids and is_first else None,
                )
                ids = []
                if number + 1 == behaviour.error_with:
                    yield event + ERROR_CHUNK
                    return
                nonsense = (
                    b'data: {"cut\n\n' if number + 1 == behaviour.nonsense_with else b""
                )
                ping = b": ping\n\n" if behaviour.pings else b""
                yield ping + event + nonsense
            if behaviour.break_after == done + len(pieces):
                raise ConnectionResetError
            # vLLM's scheduler is done with a request before its last chunk is sent.
            behaviour.running -= not is_measurement
            behaviour.measuring -= is_measurement
            behaviour.callers -= wants_ids
            computing = False
            is_cut = number + 1 - done == self._most(body, chat=chat)
            reason = "length" if written.stopped is None and is_cut else "stop"
            more = {} if counted else last
            yield self._chunk(
                {"content": late + written.more(finished=True)},
                reason,
                chat=chat,
                ids=ids if wants_ids and ids else None,
                stop_reason=written.stopped,
                **more,
            )
            if counted:
                yield self._event(
                    {"choices": [], "usage": self._usage(number + 1 - done), **last},
                    chat=chat,
                )
            yield b"data: [DONE]\n\n"
        finally:
            behaviour.running -= computing and not is_measurement
            behaviour.measuring -= computing and is_measurement
            behaviour.callers -= computing and wants_ids

    def _delta(
        self, text: str, number: int, exchange: Exchange, *, chat: bool
    ) -> dict[str, str]:
        """Return what an event says of the text up to a piece: the first one of a resumed answer has all known text."""
        behaviour = self.behaviour
        if not chat or not behaviour.reasoning:
            return {"content": text}
        if number < behaviour.reasoning:
            return {"reasoning": text}
        if number > exchange.known or not exchange.known:
            return {"content": text}
        known_reasoning = b"".join(
            map(self._bytes, range(min(behaviour.reasoning, number)))
        ).decode()
        content = text.removeprefix(known_reasoning)
        return {"reasoning": known_reasoning, "content": content}

    def _most(self, body: dict[str, Any], *, chat: bool) -> int:
        """Return how many tokens an answer may have: vLLM's own limit is 16 for completions, and the context for chats."""
        own_limit = self.behaviour.max_model_len if chat else 16
        return int(body.get("max_tokens") or own_limit)

    def _usage(self, output: int) -> dict[str, Any]:
        prompt = self.behaviour.prompt_tokens
        cached = self.behaviour.cached_tokens
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
        }
        if cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

    def _scores(
        self, body: dict[str, Any], tokens: int, *, chat: bool
    ) -> dict[str, Any]:
        """Return a choice's ids, log-probabilities and log-probabilities of the prompt, as far as they are asked for."""
        scores: dict[str, Any] = {}
        if chat and (logprobs := self._logprobs(body, range(tokens))) is not None:
            scores["logprobs"] = logprobs
        if not chat and body.get("logprobs") is not None:
            scores["logprobs"] = {"token_logprobs": [self._logprob] * tokens}
        if body.get("return_token_ids") and self.behaviour.tells_ids:
            scores["token_ids"] = [
                self.behaviour.first_id + number for number in range(tokens)
            ]
        if body.get("prompt_logprobs") is not None and self.behaviour.tells_ids:
            place = {"logprob": self._logprob, "rank": self.behaviour.rank}
            scores["prompt_logprobs"] = [
                None,
                *({str(token): place} for token in body["prompt"][1:]),
            ]
        return scores

    @property
    def _logprob(self) -> float:
        """Return the log-probability of every token: other weights give another one."""
        return LOGPROB * (1 + self.behaviour.first_id)

    def _logprobs(
        self, body: dict[str, Any], numbers: Sequence[int]
    ) -> dict[str, Any] | None:
        """Return a chat's log-probabilities of some pieces, or None if it did not ask for them."""
        if not body.get("logprobs"):
            return None
        places = [
            {"token": f"token_id:{number}", "logprob": LOGPROB, "bytes": None}
            for number in numbers
        ]
        return {"content": [{**place, "top_logprobs": [place]} for place in places]}

    def _done(self, body: dict[str, Any]) -> int:
        """Return how many pieces of the answer a stream's prompt has already, because it continues the answer."""
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or not body.get("stream"):
            return 0
        pieces = range(PIECE, PIECE + len(self.behaviour.answer))
        return sum(isinstance(token, int) and token in pieces for token in prompt)


def _prompts_in(body: dict[str, Any]) -> int:
    """Return how many prompts a request has: a list of texts is several."""
    prompt = body.get("prompt")
    return len(prompt) if isinstance(prompt, list) and isinstance(prompt[0], str) else 1


def _ids_of(body: dict[str, Any]) -> list[int]:
    """Return the token ids of a request's prompt; for a text they are made up."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and isinstance(prompt[0], int):
        return prompt
    return [1, 2, 3]


def _measures_speed(body: dict[str, Any]) -> bool:
    """Tell whether a request is a supervisor's measurement, which comes when nothing else was computed for a while."""
    return any(start in str(body.get("prompt")) for start in SPEED_PROMPTS)


def _bounds_thinking(body: dict[str, Any]) -> bool:
    thinking = body.get("thinking")
    return bool(body.get("thinking_token_budget")) or (
        isinstance(thinking, dict) and thinking.get("type") == "enabled"
    )


def _check(body: dict[str, Any], *, thinks: bool) -> bool:
    """Refuse what vLLM would refuse in the fields that the fake reads, and tell whether a stream is asked for.

    Raises:
        ValueError: A value is not allowed.
        TypeError: A value is of another type.
        OverflowError: A number is infinite.
    """
    streamed = TypeAdapter(bool | None).validate_python(body.get("stream"))
    if not isinstance(body.get("stream_options"), dict | None):
        raise TypeError("stream_options is not an object")
    if any(
        int(body.get(name) or 16) < 1 for name in ("max_tokens", "max_output_tokens")
    ):
        raise ValueError("max_tokens is below 1")
    if _bounds_thinking(body) and not thinks:
        raise ValueError(
            "thinking_token_budget is set but reasoning_config is not configured."
        )
    if body.get("prompt_logprobs") is not None and not isinstance(
        body.get("prompt"), list
    ):
        raise ValueError("prompt_logprobs of what is no list of tokens")
    return bool(streamed)


def _error(message: str, status: int) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status)


def _refused(why: str) -> Response:
    error = {"message": why, "type": "BadRequestError", "param": None, "code": 400}
    return JSONResponse({"error": error}, 400)


@asynccontextmanager
async def serving(*apps: ASGIApp, **options: Any) -> AsyncIterator[str]:
    """Serve applications, and yield the base URL of the first."""
    async with serving_all(*apps, **options) as urls:
        yield urls[0]


@asynccontextmanager
async def serving_all(*apps: ASGIApp, **options: Any) -> AsyncIterator[list[str]]:
    """Serve applications on loopback sockets, with options of uvicorn, and yield their base URLs."""
    scheme = "https" if "ssl_certfile" in options else "http"
    options = {
        "port": 0,
        "log_config": None,
        "ws": "none",
        "timeout_graceful_shutdown": 1,
        **options,
    }
    configs = [uvicorn.Config(app, **options) for app in apps]
    servers = [uvicorn.Server(config) for config in configs]
    tasks = [asyncio.create_task(server.serve()) for server in servers]
    async with asyncio.timeout(60):
        while not all(server.started for server in servers):
            await asyncio.sleep(0.005)
            for task in tasks:
                if task.done():
                    task.result()
    try:
        yield [
            f"{scheme}://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            for server in servers
        ]
    finally:
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks)


def main() -> None:
    """Serve a fake in a process of its own, whose arguments are vLLM's or only a port.

    ``FAKE_BEHAVIOUR`` names a JSON file with fields of its behaviour.
    """
    port = sys.argv[1]
    if "--port" in sys.argv:
        port = sys.argv[sys.argv.index("--port") + 1]
    behaviour = Behaviour()
    if path := os.environ.get("FAKE_BEHAVIOUR"):
        fields = json.loads(Path(path).read_bytes())
        for name, value in fields.items():
            setattr(behaviour, name, value)
        if errors := behaviour.start_errors:
            Path(path).write_text(json.dumps({**fields, "start_errors": errors[1:]}))
            raise SystemExit(errors[0])
    if "--model" in sys.argv and behaviour.root is None:
        behaviour.root = sys.argv[sys.argv.index("--model") + 1]
    if behaviour.exit_after_s is not None:
        threading.Timer(behaviour.exit_after_s, os._exit, (7,)).start()
    uvicorn.run(FakeEngine(behaviour).app, port=int(port), log_config=None)


if __name__ == "__main__":
    main()
