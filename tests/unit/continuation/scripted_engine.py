"""Engines that play what a real one was recorded to say, and break off after any given byte."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.fakes.engine import SPEED_PROMPTS
from tests.unit.continuation.recording import (
    AS_ASKED,
    CONTINUED,
    WITH_IDS,
    Recording,
    Recordings,
)
from tests.unit.continuation.requests import (
    ADAPTER_NAME,
    CHAT,
    COMPLETIONS,
    MESSAGES,
    MODEL,
    RESPONSES,
    CellRequest,
)

TOKENS_HEADER = b"x-qarr-tokens"
RESUME_HEADER = b"x-qarr-resume"
RESUME_MEMBER = "qarr_resume"
GENERATIONS = {COMPLETIONS, CHAT, MESSAGES, RESPONSES}
DETOKENIZE = "/detokenize"
_COMMENT = re.compile(rb": qarr-tokens [^\n]*\n\n")
# Members of the caller's body that the router may set by itself.
_ROUTERS_OWN = {"model", "priority", "return_token_ids", "stream_options"}


@dataclass(slots=True)
class Asked:
    """What an engine was asked.

    Attributes:
        known: Tokens of the answer that came with the request; 0: it began the answer.
        is_resumed: Whether it was to begin the stream anew, with the known tokens.
    """

    known: int
    is_resumed: bool


@dataclass(slots=True)
class Stage:
    """What all engines of a router play now, whichever is asked.

    Attributes:
        resumes: Whether the engines announce that they resume answers, and tell their tokens.
        breaks: After how many bytes the streams break off, in the order in which they begin; further ones are whole.
        is_piecewise: Whether each event is written by itself, rather than all at once.
        faults: What was wrong with the router's requests.
        sent: The streams that were begun, without their breaks.
        first_way: How the router asked for it.
        first_tells_tokens: Whether the router asked for its tokens, and was told.
    """

    recordings: Recordings
    resumes: bool
    request: CellRequest | None = None
    breaks: Sequence[int] = ()
    is_piecewise: bool = False
    asked: list[Asked] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)
    first_way: str = AS_ASKED
    first_tells_tokens: bool = False
    _first_body: dict[str, Any] = field(default_factory=dict)

    @property
    def answer(self) -> Recording:
        assert self.request is not None
        return self.recordings.answers[self.request.name]

    def set(
        self, request: CellRequest, breaks: Sequence[int], *, is_piecewise: bool
    ) -> None:
        """Play one request's answer from now on."""
        self.request = request
        self.breaks = breaks
        self.is_piecewise = is_piecewise
        self.asked.clear()
        self.sent.clear()
        self.faults.clear()
        self._first_body = {}

    def stream_for(
        self, path: str, body: dict[str, Any], headers: dict[bytes, bytes]
    ) -> bytes | None:
        """Return the stream that follows a request; None: the request is wrong, and ``faults`` says why."""
        resume = body.pop(RESUME_MEMBER, None)
        answer = self.answer
        way = WITH_IDS if body.get("return_token_ids") else AS_ASKED
        known_ids: list[int] = []
        if resume is not None:
            self._check(RESUME_HEADER in headers, "a resume without its header")
            self._check(self.resumes, "a resume at an engine that cannot")
            self._check(self._is_same_body(body), "a resume with another body")
            known_ids = resume["token_ids"]
        elif path == COMPLETIONS and isinstance(body["prompt"], list):
            way = CONTINUED
            length = len(answer.prompt_ids)
            is_same_prompt = body["prompt"][:length] == answer.prompt_ids
            self._check(is_same_prompt, "another prompt")
            known_ids = body["prompt"][length:]
        else:
            self._first_body = body
        is_of_answer = known_ids == answer.output_ids[: len(known_ids)]
        self._check(is_of_answer, f"tokens that are not of the answer: {known_ids}")
        stream = answer.streams.get(way, {}).get(len(known_ids))
        self._check(stream is not None, f"{len(known_ids)} known tokens, {way}")
        if self.faults or stream is None:
            return None
        sent = self._as_sent(stream, body, headers)
        if not self.asked:
            self.first_way = way
            self.first_tells_tokens = self.resumes and TOKENS_HEADER in headers
        self.asked.append(Asked(len(known_ids), is_resumed=resume is not None))
        self.sent.append(sent)
        return sent

    def _as_sent(
        self, stream: str, body: dict[str, Any], headers: dict[bytes, bytes]
    ) -> bytes:
        """Return a recorded stream as the engine would send it to this request."""
        data = stream.encode()
        if TOKENS_HEADER not in headers or not self.resumes:
            data = _COMMENT.sub(b"", data)
        if body["model"] == ADAPTER_NAME:
            data = data.replace(
                b'"model":"%s"' % MODEL.encode(),
                b'"model":"%s"' % ADAPTER_NAME.encode(),
            )
        return data

    def _is_same_body(self, body: dict[str, Any]) -> bool:
        """Tell whether a body is the first one but for what the router sets."""
        members = (self._first_body.keys() | body.keys()) - _ROUTERS_OWN
        return all(self._first_body.get(name) == body.get(name) for name in members)

    def _check(self, is_wanted: bool, fault: str) -> None:  # noqa: FBT001  one call a line
        """Note a fault of the router's request unless what is wanted holds."""
        if not is_wanted:
            self.faults.append(fault)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, as /detokenize does."""
        vocabulary = self.recordings.vocabulary
        return b"".join(vocabulary[token_id] for token_id in token_ids).decode(
            "utf-8", "replace"
        )


@dataclass(frozen=True, slots=True)
class ScriptedEngine:
    """An engine's application: what is of the stage is played, everything else is left to the fake behind it."""

    fake: ASGIApp
    stage: Stage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def announce(message: Message) -> None:
            if message["type"] == "http.response.start" and self.stage.resumes:
                headers = [*message["headers"], (RESUME_HEADER, b"1")]
                message = {**message, "headers": headers}
            await send(message)

        path = scope.get("path", "")
        is_played = path in GENERATIONS or path == DETOKENIZE
        if scope["type"] != "http" or not is_played or self.stage.request is None:
            await self.fake(scope, receive, announce)
            return
        content = await _content_of(receive)
        body = json.loads(content)
        if path == DETOKENIZE:
            text = self.stage.text_of(body["tokens"])
            await _answer(announce, 200, {"prompt": text})
            return
        if not body.get("stream") or _measures_speed(body):
            await self.fake(scope, _again(content, receive), announce)
            return
        await self._play(path, body, dict(scope["headers"]), announce)

    async def _play(
        self, path: str, body: dict[str, Any], headers: dict[bytes, bytes], send: Send
    ) -> None:
        stage = self.stage
        number = len(stage.asked)
        stream = stage.stream_for(path, body, headers)
        if stream is None:
            error = {"message": stage.faults[-1], "code": 400}
            await _answer(send, 400, {"error": error})
            return
        end = None if number >= len(stage.breaks) else stage.breaks[number]
        content_type = (b"content-type", b"text/event-stream; charset=utf-8")
        await send(
            {"type": "http.response.start", "status": 200, "headers": [content_type]}
        )
        for part in _parts(stream[:end], is_piecewise=stage.is_piecewise):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0)
        if end is None:
            await send({"type": "http.response.body", "body": b""})
        # Otherwise the server closes the connection, because the application ended before its answer.


def _measures_speed(body: dict[str, Any]) -> bool:
    """Tell whether a request is a supervisor's measurement, which the fake answers."""
    return any(start in str(body.get("prompt")) for start in SPEED_PROMPTS)


def _parts(data: bytes, *, is_piecewise: bool) -> list[bytes]:
    if not is_piecewise:
        return [data]
    *events, rest = data.split(b"\n\n")
    return [*(event + b"\n\n" for event in events), rest]


async def _content_of(receive: Receive) -> bytes:
    content = b""
    while True:
        message = await receive()
        content += message.get("body", b"")
        if not message.get("more_body"):
            return content


def _again(content: bytes, receive: Receive) -> Receive:
    """Return what gives a body that was read already, and then what follows."""
    bodies = [content]

    async def receive_again() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        return await receive()

    return receive_again


async def _answer(send: Send, status: int, members: dict[str, Any]) -> None:
    content_type = (b"content-type", b"application/json")
    await send(
        {"type": "http.response.start", "status": status, "headers": [content_type]}
    )
    await send({"type": "http.response.body", "body": json.dumps(members).encode()})
