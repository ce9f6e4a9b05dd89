"""A fake vLLM server whose model follows a script with thoughts and calls of tools, on the three APIs that agents use.

Its events are those that vLLM 0.32 sends: its converters in ``entrypoints/anthropic/serving.py`` and
``entrypoints/openai/responses/streaming_events.py`` are followed member by member.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, ClassVar, NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.agents.errand import CALL_PREFIX, TITLE, Turn
from tests.fakes.engine import FINGERPRINT, Behaviour, Exchange, FakeEngine
from tests.fakes.named_events import ResponseScript, event

WORD = re.compile(r"\s*\S+\s*")
ARGUMENT_CHARS = 12
PROMPT_CHARS_PER_TOKEN = 4
# The id of an answer's first token; the next ones follow.
FIRST_TOKEN = 1000
ENGINE_NUMBERS = count()

Answer = Callable[[str, Mapping[str, Any]], Turn]


class Piece(NamedTuple):
    """A token: a part of a thought, a text or a call's arguments, or a call's name."""

    kind: str
    text: str


def pieces_of(turn: Turn) -> list[Piece]:
    """Return the tokens of a turn."""
    pieces = [Piece("thought", word) for word in WORD.findall(turn.thought)]
    pieces += [Piece("text", word) for word in WORD.findall(turn.text)]
    if turn.call is not None:
        pieces.append(Piece("name", turn.call.name))
        arguments = turn.call.arguments
        starts = range(0, len(arguments), ARGUMENT_CHARS)
        pieces += [
            Piece("arguments", arguments[start : start + ARGUMENT_CHARS])
            for start in starts
        ]
    return pieces


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Return tokens that follow each other and are of one kind as one, as an engine tells what it was given."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].kind == piece.kind:
            joined[-1] = Piece(piece.kind, joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


class Writer(Protocol):
    """Writes a turn in one API's events."""

    def begin(self) -> list[bytes]:
        """Return the events before the first token."""

    def write(self, piece: Piece, token_ids: list[int]) -> list[bytes]:
        """Return the events of a token, with its id if there is a place for it."""

    def end(self, usage: dict[str, int]) -> list[bytes]:
        """Return the events after the last token."""

    def whole(self, usage: dict[str, int]) -> dict[str, Any]:
        """Return the answer that is not streamed."""


class AgentEngine(FakeEngine):
    """The fake's application.

    Attributes:
        answer: The script.
        kill_next_in: Of all engines, the next one to send tokens of this kind dies, but not while it writes a title.
        tokens_until_kill: So many tokens of this kind it sends before; of a name there is one.
    """

    kill_next_in: ClassVar[str | None] = None
    tokens_until_kill: ClassVar[int] = 2

    def __init__(self, answer: Answer, behaviour: Behaviour | None = None) -> None:
        super().__init__(behaviour)
        # vLLM bounds thoughts where a parser of reasoning knows them.
        self.behaviour.thinks = True
        self.answer = answer
        self._number = next(ENGINE_NUMBERS)

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        path = request.url.path
        if path.endswith("/v1/completions"):
            return await super()._generate(request)
        thinking = body.get("thinking") or {}
        if thinking.get("budget_tokens", 0) >= body.get("max_tokens", math.inf):
            why = "thinking.budget_tokens must be less than max_tokens"
            return JSONResponse({"error": {"message": why, "code": 400}}, 400)
        self.behaviour.requests.append(body)
        self.behaviour.raw.append(await request.body())
        self.behaviour.headers.append(dict(request.headers))
        turn = self.answer(path, body)
        writer = self._writer(path, body, turn)
        if body.get("stream"):
            exchange = self._exchange(request, body)
            return StreamingResponse(
                self._turn_events(body, turn, writer, exchange),
                media_type="text/event-stream; charset=utf-8",
            )
        return JSONResponse(writer.whole(self._turn_usage(body, turn)))

    def _writer(self, path: str, body: Mapping[str, Any], turn: Turn) -> Writer:
        call_id = f"{CALL_PREFIX}{self._number}_{len(self.behaviour.requests)}"
        if path.endswith("/messages"):
            return MessageWriter(self._model, turn, call_id)
        if path.endswith("/responses"):
            return ResponseWriter(self._model, turn, call_id)
        return ChatWriter(self, body, turn, call_id)

    def _turn_usage(self, body: Mapping[str, Any], turn: Turn) -> dict[str, int]:
        prompt = len(json.dumps(body)) // PROMPT_CHARS_PER_TOKEN
        output = len(pieces_of(turn))
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + output,
            "completion_tokens": output,
        }

    async def _turn_events(
        self, body: Mapping[str, Any], turn: Turn, writer: Writer, exchange: Exchange
    ) -> AsyncGenerator[bytes, None]:
        self.behaviour.running += 1
        pieces = pieces_of(turn)
        try:
            for written in writer.begin():
                yield written
            for piece in _joined(pieces[: exchange.known]):
                for written in writer.write(piece, []):
                    yield written
            for number, piece in enumerate(pieces):
                if number < exchange.known:
                    continue
                await self._compute(number, dict(body))
                exchange.computed(FIRST_TOKEN + number)
                if exchange.tells:
                    yield exchange.take_comment()
                for written in writer.write(piece, [FIRST_TOKEN + number]):
                    yield written
                if turn.text != TITLE:
                    self._die_after(piece)
            for written in writer.end(self._turn_usage(body, turn)):
                yield written
        finally:
            self.behaviour.running -= 1

    @staticmethod
    def _die_after(piece: Piece) -> None:
        """Break the connection if this is the token after which an engine is to die."""
        if piece.kind != AgentEngine.kill_next_in:
            return
        AgentEngine.tokens_until_kill -= 1
        if piece.kind == "name" or AgentEngine.tokens_until_kill <= 0:
            AgentEngine.kill_next_in = None
            raise ConnectionResetError

    async def _count_tokens(self, request: Request) -> Response:
        body = await request.json()
        tokens = len(json.dumps(body)) // PROMPT_CHARS_PER_TOKEN
        return JSONResponse(
            {
                "input_tokens": tokens,
                "context_management": {"original_input_tokens": tokens},
            }
        )


class ChatWriter:
    """Chat completions."""

    def __init__(
        self, engine: AgentEngine, body: Mapping[str, Any], turn: Turn, call_id: str
    ) -> None:
        self._engine = engine
        self._turn = turn
        self._call_id = call_id
        options = body.get("stream_options") or {}
        self._counted = bool(options.get("include_usage"))
        self._wants_ids = bool(body.get("return_token_ids"))

    def _chunk(
        self,
        delta: dict[str, Any],
        reason: str | None = None,
        ids: list[int] | None = None,
        **more: Any,
    ) -> bytes:
        more["id"] = self._call_id
        return self._engine._chunk(delta, reason, chat=True, ids=ids, **more)

    def begin(self) -> list[bytes]:
        prompt_ids = [1, 2, 3] if self._wants_ids else None
        opening = {"role": "assistant", "content": ""}
        return [self._chunk(opening, prompt_token_ids=prompt_ids)]

    def write(self, piece: Piece, token_ids: list[int]) -> list[bytes]:
        ids = token_ids if self._wants_ids else None
        if piece.kind == "thought":
            return [self._chunk({"reasoning": piece.text}, ids=ids)]
        if piece.kind == "text":
            return [self._chunk({"content": piece.text}, ids=ids)]
        call: dict[str, Any] = {
            "index": 0,
            "function": {"arguments": piece.text},
        }
        if piece.kind == "name":
            call = {
                "id": self._call_id,
                "type": "function",
                "index": 0,
                "function": {"name": piece.text},
            }
        return [self._chunk({"tool_calls": [call]}, ids=ids)]

    def end(self, usage: dict[str, int]) -> list[bytes]:
        events = [self._chunk({"content": ""}, self._reason)]
        if self._counted:
            members = {"id": self._call_id, "choices": [], "usage": usage}
            events.append(self._engine._event(members, chat=True))
        return [*events, b"data: [DONE]\n\n"]

    @property
    def _reason(self) -> str:
        return "stop" if self._turn.call is None else "tool_calls"

    def whole(self, usage: dict[str, int]) -> dict[str, Any]:
        turn = self._turn
        message: dict[str, Any] = {
            "role": "assistant",
            "content": turn.text or None,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "tool_calls": [],
            "reasoning": turn.thought or None,
        }
        if turn.call is not None:
            function = {"name": turn.call.name, "arguments": turn.call.arguments}
            message["tool_calls"] = [
                {"id": self._call_id, "type": "function", "function": function}
            ]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": self._reason,
            "stop_reason": None,
            "token_ids": None,
        }
        members = {
            "choices": [choice],
            "usage": usage,
            "system_fingerprint": FINGERPRINT,
        }
        return self._engine._fields(members, "chat.completion")


class MessageWriter:
    """Anthropic's messages: a block for each kind, which begins with its first token."""

    def __init__(self, model: str, turn: Turn, call_id: str) -> None:
        self._model = model
        self._turn = turn
        self._call_id = call_id
        self._index = -1
        self._open: str | None = None

    def begin(self) -> list[bytes]:
        message = self._message([], {"input_tokens": 0, "output_tokens": 0})
        return [event({"type": "message_start", "message": message})]

    def write(self, piece: Piece, token_ids: list[int]) -> list[bytes]:
        del token_ids  # there is no place for them
        if piece.kind == "name":
            block = {
                "type": "tool_use",
                "id": self._call_id,
                "name": piece.text,
                "input": {},
            }
            return [*self._close(), self._start("arguments", block)]
        blocks: dict[str, dict[str, Any]] = {
            "thought": {"type": "thinking", "thinking": ""},
            "text": {"type": "text", "text": ""},
        }
        deltas = {
            "thought": {"type": "thinking_delta", "thinking": piece.text},
            "text": {"type": "text_delta", "text": piece.text},
            "arguments": {"type": "input_json_delta", "partial_json": piece.text},
        }
        events = []
        if self._open != piece.kind:
            events = [*self._close(), self._start(piece.kind, blocks[piece.kind])]
        return [*events, self._delta(deltas[piece.kind])]

    def _start(self, kind: str, block: dict[str, Any]) -> bytes:
        self._index += 1
        self._open = kind
        members = {"content_block": block, "index": self._index}
        return event({"type": "content_block_start", **members})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        members = {"delta": delta, "index": self._index}
        return event({"type": "content_block_delta", **members})

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        stop = event({"type": "content_block_stop", "index": self._index})
        if self._open == "thought":
            signature = {"type": "signature_delta", "signature": "5ca1ab1e"}
            return [self._delta(signature), stop]
        return [stop]

    def end(self, usage: dict[str, int]) -> list[bytes]:
        delta = {"stop_reason": self._reason, "stop_sequence": None}
        counts = self._counts(usage)
        return [
            *self._close(),
            event({"type": "message_delta", "delta": delta, "usage": counts}),
            event({"type": "message_stop"}),
        ]

    @property
    def _reason(self) -> str:
        return "end_turn" if self._turn.call is None else "tool_use"

    @staticmethod
    def _counts(usage: dict[str, int]) -> dict[str, int]:
        return {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        }

    def _message(self, content: Sequence[Any], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self._call_id}",
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def whole(self, usage: dict[str, int]) -> dict[str, Any]:
        turn = self._turn
        blocks: list[dict[str, Any]] = []
        if turn.thought:
            signed = {"thinking": turn.thought, "signature": "5ca1ab1e"}
            blocks.append({"type": "thinking", **signed})
        if turn.text:
            blocks.append({"type": "text", "text": turn.text})
        if turn.call is not None:
            named = {"id": self._call_id, "name": turn.call.name}
            arguments = json.loads(turn.call.arguments)
            blocks.append({"type": "tool_use", **named, "input": arguments})
        message = self._message(blocks, self._counts(usage))
        return {**message, "stop_reason": self._reason}


class ResponseWriter(ResponseScript):
    """OpenAI's responses: an item for each kind, which begins with its first token."""

    def __init__(self, model: str, turn: Turn, call_id: str) -> None:
        super().__init__(model, 0)
        self._turn = turn
        self._call_id = call_id
        self._items = list(self._finished_items(turn, call_id))
        self._output_index = -1
        self._open: str | None = None

    @staticmethod
    def _finished_items(turn: Turn, call_id: str) -> Iterator[dict[str, Any]]:
        if turn.thought:
            content = [{"text": turn.thought, "type": "reasoning_text"}]
            reasoning = {"id": "rs_x", "summary": [], "type": "reasoning"}
            encrypted = {"encrypted_content": None, "status": "completed"}
            yield {**reasoning, "content": content, **encrypted}
        if turn.text:
            text = {"type": "output_text", "text": turn.text, "annotations": []}
            content = [{**text, "logprobs": None}]
            message = {"id": "msg_x", "role": "assistant", "type": "message"}
            yield {**message, "content": content, "status": "completed", "phase": None}
        if turn.call is not None and turn.call.is_custom:
            named = {"call_id": call_id, "name": turn.call.name}
            custom = {"input": turn.call.arguments, "type": "custom_tool_call"}
            yield {"id": "ctc_x", **named, **custom, "namespace": None}
        elif turn.call is not None:
            named = {"call_id": call_id, "name": turn.call.name, "namespace": None}
            function = {"arguments": turn.call.arguments, "type": "function_call"}
            yield {"id": "fc_x", **named, **function, "status": "completed"}

    def _response(
        self, status: str, output: list[Any], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        response = super()._response(status, output, usage)
        return {**response, "id": f"resp_{self._call_id}"}

    def begin(self) -> list[bytes]:
        return [
            self._event(kind, response=self._response("in_progress", [], None))
            for kind in ("response.created", "response.in_progress")
        ]

    @property
    def _item(self) -> dict[str, Any]:
        return self._items[self._output_index]

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": self._output_index}

    def write(self, piece: Piece, token_ids: list[int]) -> list[bytes]:
        del token_ids  # there is no place for them
        events = []
        kind = piece.kind
        if kind == "name":
            return [*self._close(), *self._start("arguments")]
        if self._open != kind:
            events = [*self._close(), *self._start(kind)]
        delta = {**self._place, "delta": piece.text}
        if kind == "thought":
            name = "response.reasoning_text.delta"
            written = self._event(name, content_index=0, **delta)
        elif kind == "text":
            name = "response.output_text.delta"
            written = self._event(name, content_index=0, logprobs=[], **delta)
        elif self._item["type"] == "custom_tool_call":
            written = self._event("response.custom_tool_call_input.delta", **delta)
        else:
            written = self._event("response.function_call_arguments.delta", **delta)
        return [*events, written]

    def _start(self, kind: str) -> list[bytes]:
        self._open = kind
        self._output_index += 1
        item = self._item
        empty = {"content": []} if kind in {"thought", "text"} else {"arguments": ""}
        if item["type"] == "custom_tool_call":
            empty = {"input": ""}
        begun = {**item, **empty}
        if "status" in item:
            begun["status"] = "in_progress"
        index = self._output_index
        events = [
            self._event("response.output_item.added", item=begun, output_index=index)
        ]
        if kind in {"thought", "text"}:
            part = {**item["content"][0], "text": ""}
            name = "response.content_part.added"
            events.append(self._event(name, content_index=0, **self._place, part=part))
        return events

    def _close(self) -> list[bytes]:
        if self._open is None:
            return []
        item = self._item
        place = self._place
        events = []
        if self._open in {"thought", "text"}:
            part = item["content"][0]
            name = f"response.{part['type']}.done"
            logprobs = {"logprobs": []} if self._open == "text" else {}
            done = {**place, "content_index": 0, "text": part["text"], **logprobs}
            events.append(self._event(name, **done))
            part_done = {**place, "content_index": 0, "part": part}
            events.append(self._event("response.content_part.done", **part_done))
        elif item["type"] == "custom_tool_call":
            name = "response.custom_tool_call_input.done"
            events.append(self._event(name, **place, input=item["input"]))
        else:
            name = "response.function_call_arguments.done"
            done = {"arguments": item["arguments"], "name": item["name"]}
            events.append(self._event(name, **place, **done))
        index = self._output_index
        events.append(
            self._event("response.output_item.done", item=item, output_index=index)
        )
        return events

    def end(self, usage: dict[str, int]) -> list[bytes]:  # type: ignore[override]
        closing = self._close()
        completed = self._event("response.completed", response=self.whole(usage))
        return [*closing, completed]

    def whole(self, usage: dict[str, int]) -> dict[str, Any]:  # type: ignore[override]
        thought_tokens = len(WORD.findall(self._turn.thought))
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thought_tokens},
            "total_tokens": usage["total_tokens"],
        }
        return self._response("completed", self._items, counts)
