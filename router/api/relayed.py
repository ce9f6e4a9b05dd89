"""What the endpoints do alike whose bodies and answers pass through as they are, both ways: OpenAI's and Anthropic's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from router.api.asgi import apart, cancel_on_disconnect, context_of, read_body, start_message, tracker_of
from router.api.models import read_document
from router.api.openai_events import report_on, with_member
from router.api.serving import EVENT_STREAM, STREAM_HEADERS, answer_headers, await_first, send_whole, serve_stream
from router.pipeline.request import ParsedRequest
from router.upstream.engine_stream import BufferedAnswer, EngineStream

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from router.api.bodies import Rules
    from router.api.serving import Encoder, Sink
    from router.lifecycle import ResponseTracker
    from router.pipeline.pipeline import Pipeline
    from router.pipeline.registry import ActiveRequest
    from router.pipeline.request import PromptText, RequestContext
    from router.settings import Settings
    from router.upstream.json_object import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayedCall(ParsedRequest):
    """One request, parsed by such an endpoint.

    Attributes:
        path: Of its endpoint.
        priority: To send to engines; None leaves the body's own.
        report: The answer is to say who served it.
    """

    path: str
    document: JsonObject
    streamed: bool
    priority: int | None
    report: bool


Call = TypeVar("Call", bound=RelayedCall)


@dataclass(frozen=True, slots=True)
class RelayEndpoint(ABC, Generic[Call]):
    """An endpoint, as an ASGI application. Endpoints differ in what reads a body, and in what writes a stream's events.

    Attributes:
        path: Of the endpoint, here and at engines.
        rules: What routing options are checked against.
    """

    pipeline: Pipeline
    settings: Settings
    path: str
    rules: Rules

    @abstractmethod
    def prompt(self, document: JsonObject) -> PromptText:
        """Read a request's prompt, and count its tokens."""

    async def fitted(self, request: Call) -> Call:
        """Return a request that fits the longest context, cut where its caller has asked for it and it can be cut so far."""
        return request

    @abstractmethod
    def read(self, document: JsonObject, context: RequestContext, prompt: PromptText) -> Call:
        """Read what else routing needs of a request.

        Raises:
            InvalidBody: It has an option that is not valid.
            UnknownModel: Its model is none of ours.
            BeyondKey: The priority is beyond the caller's key.
        """

    @abstractmethod
    def encoder(self, request: Call, answer: EngineStream, report: dict[str, Any] | None) -> Encoder:
        """Return what writes the events of a stream; ``report``: who serves it and why, if its caller asked."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Work stops when the client goes away."""
        pipeline = self.pipeline
        body = await read_body(scope, receive, self.settings.server.max_body_bytes)
        cancel_on_disconnect(scope)
        document = await apart(len(body), read_document, body)
        prompt = await apart(len(body), self.prompt, document)
        request = await self.fitted(self.read(document, context_of(scope), prompt))
        decision = pipeline.decide(request)
        if request.streamed:
            await_first(request.context, tracker_of(scope), self.settings.server.silence_s)
            await serve_stream(pipeline, request, decision, partial(self._begin, request, send, tracker_of(scope)))
        else:
            await pipeline.serve(request, decision, partial(self._send_whole, request, send))

    async def _begin(
        self, request: Call, send: Send, tracker: ResponseTracker, active: ActiveRequest, answer: EngineStream
    ) -> tuple[Encoder, Sink]:
        headers = answer_headers(active, self.settings.telemetry)
        await send(start_message(headers, answer.media_type or EVENT_STREAM, STREAM_HEADERS, hold=True))
        return self.encoder(request, answer, _report(request, active)), tracker

    async def _send_whole(self, request: Call, send: Send, active: ActiveRequest) -> None:
        headers, answer = answer_headers(active, self.settings.telemetry), active.answer
        assert isinstance(answer, BufferedAnswer)
        report = _report(request, active)
        content = with_member(answer.content, "qarr", report) if report else answer.content
        await send_whole(content, answer.media_type or "application/json", headers, send)


def _report(request: RelayedCall, active: ActiveRequest) -> dict[str, Any] | None:
    answer = active.answer
    if not request.report or answer is None:
        return None
    return report_on(active.decision, answer)
