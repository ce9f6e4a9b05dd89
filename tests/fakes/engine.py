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

if not __package__:  # started as a program, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.fakes.named_events import ERROR as NAMED_ERROR
from tests.fakes.named_events import SCRIPTS, Script
from tests.fakes.named_events import event as named_event
from tiers.simulated.surface import Surface

ANSWER = ("The", " capital", " of", " France", " is", " Paris", ".")
TEMPLATE_TOKENS = 6
LOGPROB = -0.1  # of each piece
PIECE = 1000  # id of an answer's first piece
BROKEN_CHARACTER = "\ufffd"
ERROR_CHUNK = b'data: {"error": {"message": "engine died", "code": 500}}\n\n'
FINGERPRINT = "fake-1"
# in what a supervisor measures speed with
SPEED_PROMPTS = ("Water boils at", "The lighthouse keeper wrote")


@dataclass(slots=True)
class Behaviour:
    """How the fake behaves; change it between requests.

    Attributes:
        answer: Pieces of every answer, one a token; bytes may begin or end within a character.
        special: Pieces, by number, that are special tokens: answers leave them out, /detokenize shows them.
        group: Pieces that come in one event.
        thinks: Whether its model shows its reasoning; vLLM refuses a bound on that of others.
        held_from: Piece from which on nothing is sent before the last one, as a parser holds a tool call back; None: none.
        counts: Whether /metrics has a count of generated tokens.
        late: Characters of a chat's text that come only with the next piece, as a parser in the engine may hold them.
        reasoning: Of how many pieces a chat's answer says that they are the model's reasoning.
        delay_s: Before the first piece, and between pieces.
        first_delay_s: Before the first piece, more than that.
        status: HTTP status of generations.
        scores: Whether it scores tokens, rather than answering with 500.
        error: Body of a generation that is not 200.
        break_after: Close the connection after that many pieces, without an end.
        break_at: Close the connection after that many events, of whatever kind, without an end.
        once: Do so a single time.
        stall_after: Send nothing more after that many pieces.
        error_after: Send an error chunk after that many pieces.
        error_with: Send an error chunk in the same bytes as that many pieces' last one.
        nonsense_with: Send what is no chunk in the same bytes as that many pieces' last one, and go on.
        nonsense: What every generation answers with instead, and 200.
        start_errors: What the next starts of a process say before they end, one each.
        tells_ids: Whether generations tell their tokens, and those of a prompt, to those who ask.
        told: What /detokenize answers with instead; None: the text.
        detokenizes: Whether /detokenize answers at all, rather than with 500.
        pings: Send a comment in the same bytes as each piece, before it.
        header: A further header of every stream.
        alive: Whether /health and /metrics answer 200.
        priorities: Whether requests may have a priority; vLLM without priority scheduling refuses those that do.
        rank: Of each token that the fake is asked to score: 1 agrees, above it does not.
        vocabulary: Changes every token id: another tokenizer.
        first_id: Of the answer's token ids, which changes log-probabilities too: other weights.
        exit_after_s: End the process, with status 7, so long after its start; None: stay.
        root: Folder or id of the model that it says it was started with; None: the served name.
        prompt_tokens: That it says every prompt has.
        cached_tokens: Of those, found in its prefix cache, as it says; None: it does not say.
        cache_queries: Tokens that it says it looked up in its prefix cache; ``cache_hits``: those that it found.
        kv_cache_usage: That it reports, 0 to 1.
        hung: Paths whose requests are taken and never answered.
        held: Requests that are held so now.
        instead: What it answers on some paths instead, with status 200, by path.
        heads: Of the last request to each path.
        running: Requests that are computed now; ``callers``: those for streams of callers, of the ids that these need.
        adapters: Its LoRA adapters: folders by name.
        loads: Whether it loads them while it runs.
        measurements: Requests of a supervisor that measures speed; they are not among ``requests``.
    """

    answer: tuple[str | bytes, ...] = ANSWER
    special: tuple[int, ...] = ()
    group: int = 1
    thinks: bool = False
    held_from: int | None = None
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
    """An application with the faults by path of a behaviour."""

    behaviour: Behaviour
    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        b, path = self.behaviour, scope.get("path", "")
        b.heads[path] = {
            name.decode(): value.decode() for name, value in scope.get("headers", ())
        }
        if path in b.hung:
            b.held += 1
            while (await receive())["type"] != "http.disconnect":
                pass
            b.held -= 1
        elif path in b.instead:
            await Response(b.instead[path], media_type="application/json")(
                scope, receive, send
            )
        else:
            await self.app(scope, receive, send)


class Detokenizer:
    """Makes text of tokens as they come, and looks for stop strings, as vLLM's ``v1/engine/detokenizer.py`` does.

    Args:
        body: The request, which has the stop strings.
        prompt: What was there before; where it ends within a character vLLM repeats all of it.

    Attributes:
        held_back: Characters that do not go out before the end, for they may begin a stop string.
        stopped: The stop string that ended the answer; None: none has.
    """

    def __init__(self, body: dict[str, Any], prompt: bytes = b"") -> None:
        stop = body.get("stop") or []
        self._stops: list[str] = [stop] if isinstance(stop, str) else stop
        self._include = bool(body.get("include_stop_str_in_output"))
        self._least = int(body.get("min_tokens") or 0)
        self.held_back = (
            0 if self._include else max(map(len, self._stops), default=1) - 1
        )
        self._pending = (
            prompt
            if prompt.decode("utf-8", "replace").endswith(BROKEN_CHARACTER)
            else b""
        )
        self._text, self._sent, self._tokens = "", 0, 0
        self.stopped: str | None = None

    def take(self, token: bytes) -> None:
        self._tokens += 1
        self._pending += token
        new = self._pending.decode("utf-8", "replace")
        if not new or new.endswith(BROKEN_CHARACTER):
            return
        searched = len(self._text)
        self._pending, self._text = b"", self._text + new
        if self._tokens <= self._least:
            return
        found = [
            (at + len(stop), number, at)
            for number, stop in enumerate(self._stops)
            if (at := self._text.find(stop, max(searched + 1 - len(stop), 0))) >= 0
        ]
        if found:
            end, number, start = min(found)
            self.stopped, self._text = (
                self._stops[number],
                self._text[: end if self._include else start],
            )

    def more(self, *, finished: bool) -> str:
        end = len(self._text) - (0 if finished else self.held_back)
        start, self._sent = self._sent, max(end, self._sent)
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
        return PlainTextResponse(
            f"vllm:num_requests_running{label} {float(self.behaviour.running)}\n"
            f"vllm:num_requests_waiting{label} 0.0\nvllm:kv_cache_usage_perc{label} {self.behaviour.kv_cache_usage}\n"
            f"vllm:prompt_tokens_total{label} 0.0\n{generated if self.behaviour.counts else ''}"
            f"vllm:time_to_first_token_seconds_sum{label} 0.0\nvllm:time_to_first_token_seconds_count{label} 0.0\n"
            f"vllm:prefix_cache_queries_total{label} {float(self.behaviour.cache_queries)}\n"
            f"vllm:prefix_cache_hits_total{label} {float(self.behaviour.cache_hits)}\n"
        )

    async def _models(self, _request: Request) -> Response:
        b = self.behaviour
        root = self._model if b.root is None else b.root
        card = self._card(root, b.max_model_len)
        others = [
            {
                **card,
                "id": name,
                "root": path,
                "parent": self._model,
                "max_model_len": None,
            }
            for name, path in b.adapters.items()
        ]
        return JSONResponse({"object": "list", "data": [card, *others]})

    async def _load(self, request: Request) -> Response:
        if not self.behaviour.loads:
            return JSONResponse({"detail": "Not Found"}, 404)
        body = await request.json()
        if "nowhere" in body["lora_path"]:
            return JSONResponse(
                {
                    "error": {
                        "message": f"No adapter found for {body['lora_path']}",
                        "code": 404,
                    }
                },
                404,
            )
        self.behaviour.adapters[body["lora_name"]] = body["lora_path"]
        return PlainTextResponse("Success")

    async def _unload(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        if name not in self.behaviour.adapters:
            return JSONResponse(
                {
                    "error": {
                        "message": f"The lora adapter '{name}' cannot be found.",
                        "code": 404,
                    }
                },
                404,
            )
        del self.behaviour.adapters[name]
        return PlainTextResponse("Success")

    async def _tokenize(self, request: Request) -> Response:
        try:
            body = await request.json()
            if "messages" in body:
                tokens = [
                    n for m in body["messages"] for n in self._ids(m["content"])
                ] + [1] * TEMPLATE_TOKENS
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
        b = self.behaviour
        if not b.detokenizes:
            return JSONResponse({"error": {"message": b.error, "code": 500}}, 500)
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
            {"prompt": text.removeprefix(" ")} if b.told is None else b.told
        )

    async def _embed(self, request: Request) -> Response:
        try:
            given = (await request.json())["input"]
            inputs = (
                given
                if isinstance(given, list)
                and not all(isinstance(one, int) for one in given)
                else [given]
            )
            if not all(isinstance(one, str | list) and one for one in inputs):
                return _refused("input is neither text nor token ids")
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            return _refused(str(error))
        vectors = [
            {"object": "embedding", "index": n, "embedding": [0.5]}
            for n in range(len(inputs))
        ]
        return JSONResponse(
            {
                "object": "list",
                "data": vectors,
                "usage": {"prompt_tokens": 1, "total_tokens": 1},
            }
        )

    def _shown(self, token: int) -> bytes:
        """Return a token's bytes: the answer's pieces have ids of their own, of other words only the length is known."""
        if token < PIECE:
            return b" " + b"x" * min(token, 99)
        return (
            b"<|special|>"
            if token - PIECE in self.behaviour.special
            else self._bytes(token - PIECE)
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
        b = self.behaviour
        if _measures_speed(body):
            b.measurements += 1
        else:
            b.requests.append(body)
            b.raw.append(await request.body())
            b.headers.append(dict(request.headers))
        if body.get("priority") and not b.priorities:
            return JSONResponse(
                {
                    "error": {
                        "message": "priority scheduling is not enabled",
                        "code": 400,
                    }
                },
                400,
            )
        status = b.status if b.scores or body.get("prompt_logprobs") is None else 500
        if status != 200:
            error = {
                "message": b.error,
                "type": "BadRequestError",
                "param": None,
                "code": status,
            }
            return JSONResponse({"error": error}, status)
        chat, script = (
            request.url.path.endswith("/chat/completions"),
            SCRIPTS.get(request.url.path),
        )
        if b.nonsense:
            return Response(
                b.nonsense,
                200,
                media_type="text/event-stream" if streamed else "application/json",
            )
        named = script(self._model, b.prompt_tokens) if script is not None else None
        if not streamed:
            whole = (
                self._whole_named(body, named)
                if named
                else self._whole(body, chat=chat)
            )
            return await self._unless_disconnected(request, whole)
        more = {"x-more": b.header} if b.header else {}
        events = (
            self._named_events(body, named) if named else self._events(body, chat=chat)
        )
        return StreamingResponse(
            self._stream(events), 200, more, "text/event-stream; charset=utf-8"
        )

    async def _compute(self, number: int, body: dict[str, Any]) -> None:
        """Take the time of one piece, or fail there; what fails once is a caller's."""
        b = self.behaviour
        await asyncio.sleep(b.delay_s)
        if number == b.break_after and not (b.once and _measures_speed(body)):
            if b.once:
                b.break_after = None
            raise ConnectionResetError
        if number == b.stall_after:
            await asyncio.sleep(3600)

    async def _whole(self, body: dict[str, Any], *, chat: bool) -> Response:
        b = self.behaviour
        b.running += 1
        try:
            pieces = b.answer[: self._most(body, chat=chat)]
            written = Detokenizer(body)
            for number, _ in enumerate(pieces):
                await self._compute(number, body)
                written.take(self._bytes(number))
                if written.stopped is not None:
                    pieces = pieces[: number + 1]
                    break
            text = written.more(finished=True)
            reason = (
                "length"
                if written.stopped is None
                and len(pieces) == self._most(body, chat=chat)
                else "stop"
            )
            part = (
                {"message": {"role": "assistant", "content": text}}
                if chat
                else {"text": text}
            )
            several = isinstance(body.get("prompt"), list) and isinstance(
                body["prompt"][0], str
            )
            numbers = range(len(body["prompt"]) if several else 1)
            scores = self._scores(body, len(pieces), chat=chat)
            choices = [
                {"index": n, **part, "finish_reason": reason, **scores} for n in numbers
            ]
            rest: dict[str, Any] = {
                "usage": self._usage(len(pieces)),
                "system_fingerprint": FINGERPRINT,
            }
            if body.get("return_token_ids"):
                rest["prompt_token_ids"] = [1, 2, 3]
            answer = JSONResponse(
                self._fields(
                    {"choices": choices, **rest},
                    "chat.completion" if chat else "text_completion",
                )
            )
            b.sent.append(bytes(answer.body))
            return answer
        finally:
            b.running -= 1

    async def _whole_named(self, body: dict[str, Any], script: Script) -> Response:
        b = self.behaviour
        b.running += 1
        try:
            most = int(body.get(script.limit) or b.max_model_len)
            pieces = b.answer[:most]
            for number, _ in enumerate(pieces):
                await self._compute(number, body)
            text = "".join(
                self._bytes(number).decode() for number, _ in enumerate(pieces)
            )
            answer = JSONResponse(
                script.whole(text, self._usage(len(pieces)), cut=len(pieces) == most)
            )
            b.sent.append(bytes(answer.body))
            return answer
        finally:
            b.running -= 1

    async def _named_events(
        self, body: dict[str, Any], script: Script
    ) -> AsyncGenerator[bytes, None]:
        b = self.behaviour
        b.running += 1
        try:
            most = int(body.get(script.limit) or b.max_model_len)
            pieces = b.answer[:most]
            held = ""
            for event in script.begin():
                yield event
            for number, _ in enumerate(pieces):
                await self._compute(number, body)
                if number == b.error_after:
                    yield named_event(NAMED_ERROR)
                    return
                b.tokens += 1
                held += self._bytes(number).decode()
                if (
                    b.held_from is None
                    or number < b.held_from
                    or number + 1 == len(pieces)
                ):
                    yield (b": ping\n\n" if b.pings else b"") + script.piece(held)
                    held = ""
            if b.break_after == len(pieces):
                raise ConnectionResetError
            text = "".join(
                self._bytes(number).decode() for number, _ in enumerate(pieces)
            )
            for event in script.end(
                text, self._usage(len(pieces)), cut=len(pieces) == most
            ):
                yield event
        finally:
            b.running -= 1

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
        self, answer: AsyncGenerator[bytes, None]
    ) -> AsyncIterator[bytes]:
        b = self.behaviour
        sent = 0
        async with aclosing(answer) as events:
            async for event in events:
                if sent == b.break_at:
                    if b.once:
                        b.break_at = None
                    raise ConnectionResetError
                yield event
                sent += 1

    async def _events(  # noqa: C901, PLR0915  a branch a fault
        self, body: dict[str, Any], *, chat: bool
    ) -> AsyncGenerator[bytes, None]:
        b, prompt = self.behaviour, _ids_of(body)
        b.running += 1
        computing = True
        counted = bool((body.get("stream_options") or {}).get("include_usage"))
        # on the last chunk, whichever that is
        last = {"system_fingerprint": FINGERPRINT}
        wanted = bool(body.get("return_token_ids")) and b.tells_ids
        b.callers += wanted
        try:
            if chat:
                first = {"prompt_token_ids": prompt if wanted else None}
                yield self._chunk(
                    {"role": "assistant", "content": ""}, None, chat=True, **first
                )
            done = self._done(body)
            pieces = b.answer[done : done + self._most(body, chat=chat)]
            written, ids, number = (
                Detokenizer(body, b"".join(map(self._bytes, range(done)))),
                list[int](),
                done - 1,
            )
            late = ""
            if b.first_delay_s:
                await asyncio.sleep(b.first_delay_s)
            for number in range(done, done + len(pieces)):
                await self._compute(number, body)
                if number == b.error_after:
                    yield ERROR_CHUNK
                    return
                b.tokens += 1
                written.take(self._bytes(number))
                ids.append(PIECE + number)
                last_piece = number + 1 == done + len(pieces)
                if written.stopped is not None or (last_piece and written.held_back):
                    break
                if len(ids) < b.group and not last_piece:
                    continue
                if (
                    chat
                    and b.held_from is not None
                    and number >= b.held_from
                    and not last_piece
                ):
                    if wanted:  # as vLLM: without ids there is no event at all
                        yield self._chunk({}, None, chat=chat, ids=ids)
                    ids = []
                    continue
                text = late + written.more(finished=False)
                late = text[max(len(text) - b.late, 0) :] if chat and b.late else ""
                text = text.removesuffix(late)
                delta = (
                    {"reasoning": text}
                    if chat and number < b.reasoning
                    else {"content": text}
                )
                event = self._chunk(
                    delta, None, chat=chat, logprobs=self._logprobs(body, (number,)), ids=ids if wanted else None,
                    prompt=prompt if wanted and ids[0] == PIECE + done else None,
                )  # fmt: skip
                ids = []
                if number + 1 == b.error_with:
                    yield event + ERROR_CHUNK
                    return
                nonsense = b'data: {"cut\n\n' if number + 1 == b.nonsense_with else b""
                yield (b": ping\n\n" if b.pings else b"") + event + nonsense
            if b.break_after == done + len(pieces):
                raise ConnectionResetError
            # vLLM's scheduler is done with it before its last chunk is sent.
            b.running, b.callers, computing = b.running - 1, b.callers - wanted, False
            reason = (
                "length"
                if written.stopped is None
                and number + 1 - done == self._most(body, chat=chat)
                else "stop"
            )
            yield self._chunk(
                {"content": late + written.more(finished=True)}, reason, chat=chat, ids=ids if wanted and ids else None,
                stop_reason=written.stopped, **({} if counted else last),
            )  # fmt: skip
            if counted:
                yield self._event(
                    {"choices": [], "usage": self._usage(number + 1 - done), **last},
                    chat=chat,
                )
            yield b"data: [DONE]\n\n"
        finally:
            b.running -= computing
            b.callers -= computing and wanted

    def _most(self, body: dict[str, Any], *, chat: bool) -> int:
        """Return how many tokens an answer may have: vLLM's own limit is 16 for completions, and the context for chats."""
        return int(
            body.get("max_tokens") or (self.behaviour.max_model_len if chat else 16)
        )

    def _usage(self, output: int) -> dict[str, Any]:
        prompt, cached = self.behaviour.prompt_tokens, self.behaviour.cached_tokens
        details = (
            {}
            if cached is None
            else {"prompt_tokens_details": {"cached_tokens": cached}}
        )
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
            **details,
        }

    def _scores(
        self, body: dict[str, Any], tokens: int, *, chat: bool
    ) -> dict[str, Any]:
        """Return what a choice holds for those who ask for ids, log-probabilities, or those of their prompt."""
        found: dict[str, Any] = {}
        if chat and (logprobs := self._logprobs(body, range(tokens))) is not None:
            found["logprobs"] = logprobs
        if not chat and body.get("logprobs") is not None:
            found["logprobs"] = {"token_logprobs": [self._logprob] * tokens}
        if body.get("return_token_ids") and self.behaviour.tells_ids:
            found["token_ids"] = [
                self.behaviour.first_id + number for number in range(tokens)
            ]
        if body.get("prompt_logprobs") is not None and self.behaviour.tells_ids:
            place = {"logprob": self._logprob, "rank": self.behaviour.rank}
            found["prompt_logprobs"] = [
                None,
                *({str(token): place} for token in body["prompt"][1:]),
            ]
        return found

    @property
    def _logprob(self) -> float:
        """Return the log-probability of every token: other weights give other ones."""
        return LOGPROB * (1 + self.behaviour.first_id)

    def _logprobs(
        self, body: dict[str, Any], numbers: Sequence[int]
    ) -> dict[str, Any] | None:
        """Return what a chat with log-probabilities is given for its places; None where it did not ask."""
        if not body.get("logprobs"):
            return None
        places = [
            {"token": f"token_id:{n}", "logprob": LOGPROB, "bytes": None}
            for n in numbers
        ]
        return {"content": [{**place, "top_logprobs": [place]} for place in places]}

    def _done(self, body: dict[str, Any]) -> int:
        prompt = body.get("prompt")
        return (
            sum(
                isinstance(token, int)
                and PIECE <= token < PIECE + len(self.behaviour.answer)
                for token in prompt
            )
            if isinstance(prompt, list) and body.get("stream")
            else 0
        )


def _ids_of(body: dict[str, Any]) -> list[int]:
    given = body.get("prompt")
    return given if isinstance(given, list) and isinstance(given[0], int) else [1, 2, 3]


def _measures_speed(body: dict[str, Any]) -> bool:
    """Tell a supervisor's measurement from a caller's request: it comes whenever nothing else computes for a while."""
    return any(start in str(body.get("prompt")) for start in SPEED_PROMPTS)


def _bounds_thinking(body: dict[str, Any]) -> bool:
    thinking = body.get("thinking")
    return bool(body.get("thinking_token_budget")) or (
        isinstance(thinking, dict) and thinking.get("type") == "enabled"
    )


def _check(body: dict[str, Any], *, thinks: bool) -> bool:
    """Refuse what vLLM would refuse, of the fields that the fake looks at; return whether a stream is asked for.

    Raises:
        ValueError: As do TypeError and OverflowError, for values that are no numbers.
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


def _refused(why: str) -> Response:
    error = {"message": why, "type": "BadRequestError", "param": None, "code": 400}
    return JSONResponse({"error": error}, 400)


@asynccontextmanager
async def serving(*apps: ASGIApp, **options: Any) -> AsyncIterator[str]:
    async with serving_all(*apps, **options) as urls:
        yield urls[0]


@asynccontextmanager
async def serving_all(*apps: ASGIApp, **options: Any) -> AsyncIterator[list[str]]:
    """Serve applications on loopback sockets, with uvicorn's options, started and stopped together; yield their base URLs."""
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
    """Serve a fake in a process of its own: with a port alone, or with vLLM's arguments.

    ``FAKE_BEHAVIOUR`` names a JSON file with fields of the behaviour that it starts with.
    """
    port = int(
        sys.argv[sys.argv.index("--port") + 1] if "--port" in sys.argv else sys.argv[1]
    )
    behaviour = Behaviour()
    if named := os.environ.get("FAKE_BEHAVIOUR"):
        for name, value in json.loads(Path(named).read_bytes()).items():
            setattr(behaviour, name, value)
        if errors := behaviour.start_errors:
            given = json.loads(Path(named).read_bytes())
            Path(named).write_text(json.dumps({**given, "start_errors": errors[1:]}))
            raise SystemExit(errors[0])
    if "--model" in sys.argv and behaviour.root is None:
        behaviour.root = sys.argv[sys.argv.index("--model") + 1]
    if behaviour.exit_after_s is not None:
        threading.Timer(behaviour.exit_after_s, os._exit, (7,)).start()
    uvicorn.run(FakeEngine(behaviour).app, port=port, log_config=None)


if __name__ == "__main__":
    main()
