"""The fake engine's answers on /v1/messages and /v1/responses: vLLM's events, in its order and with its members."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Protocol

ERROR = {"type": "error", "error": {"type": "internal_error", "message": "engine died"}}


class Script(Protocol):
    """The events of one answer, and the same answer as a whole."""

    limit: str  # This member of the request's body bounds the output tokens.

    def begin(self) -> list[bytes]:
        """Return the events before the first text."""

    def piece(self, text: str) -> bytes:
        """Return the event for a piece of text."""

    def end(self, text: str, usage: dict[str, int], *, cut: bool) -> list[bytes]:
        """Return the events after the last text."""

    def whole(self, text: str, usage: dict[str, int], *, cut: bool) -> dict[str, Any]:
        """Return the answer that is not streamed."""


def event(data: dict[str, Any]) -> bytes:
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return f"event: {data['type']}\ndata: {text}\n\n".encode()


class MessageScript:
    """Anthropic's Messages API."""

    limit = "max_tokens"

    def __init__(self, model: str, prompt_tokens: int) -> None:
        self._model = model
        self._prompt_tokens = prompt_tokens

    def begin(self) -> list[bytes]:
        message = {
            "id": "x",
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._model,
        }
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        ended = {"stop_reason": None, "stop_sequence": None}
        return [
            event(
                {
                    "type": "message_start",
                    "message": {**message, **ended, "usage": usage},
                }
            ),
            event(
                {
                    "type": "content_block_start",
                    "content_block": {"type": "text", "text": ""},
                    "index": 0,
                }
            ),
        ]

    def piece(self, text: str) -> bytes:
        return event(
            {
                "type": "content_block_delta",
                "delta": {"type": "text_delta", "text": text},
                "index": 0,
            }
        )

    def end(self, text: str, usage: dict[str, int], *, cut: bool) -> list[bytes]:
        del text
        delta = {
            "stop_reason": "max_tokens" if cut else "end_turn",
            "stop_sequence": None,
        }
        return [
            event({"type": "content_block_stop", "index": 0}),
            event(
                {"type": "message_delta", "delta": delta, "usage": self._counts(usage)}
            ),
            event({"type": "message_stop"}),
        ]

    def whole(self, text: str, usage: dict[str, int], *, cut: bool) -> dict[str, Any]:
        return {
            "id": "x",
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": text}],
            "model": self._model,
            "stop_reason": "max_tokens" if cut else "end_turn",
            "usage": self._counts(usage),
        }

    @staticmethod
    def _counts(usage: dict[str, int]) -> dict[str, int]:
        """Return token counts; engines that QARR starts tell how much of the prompt their cache held."""
        cached = {"cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
        return {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            **cached,
        }


class ResponseScript:
    """OpenAI's Responses API."""

    limit = "max_output_tokens"
    _position: ClassVar = {"item_id": "msg_x", "output_index": 0}

    def __init__(self, model: str, prompt_tokens: int) -> None:
        del prompt_tokens
        self._model = model
        self._number = -1

    def begin(self) -> list[bytes]:
        item = {
            "id": "msg_x",
            "content": [],
            "role": "assistant",
            "status": "in_progress",
            "type": "message",
            "phase": None,
        }
        part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        return [
            self._event(
                "response.created", response=self._response("in_progress", [], None)
            ),
            self._event(
                "response.in_progress", response=self._response("in_progress", [], None)
            ),
            self._event("response.output_item.added", item=item, output_index=0),
            self._event(
                "response.content_part.added",
                content_index=0,
                **self._position,
                part=part,
            ),
        ]

    def piece(self, text: str) -> bytes:
        more = {"item_id": "msg_x", "logprobs": [], "output_index": 0}
        return self._event(
            "response.output_text.delta", content_index=0, delta=text, **more
        )

    def end(self, text: str, usage: dict[str, int], *, cut: bool) -> list[bytes]:
        whole = self.whole(text, usage, cut=cut)
        (item,) = whole["output"]
        (part,) = item["content"]
        return [
            self._event(
                "response.output_text.done",
                content_index=0,
                **self._position,
                logprobs=[],
                text=text,
            ),
            self._event(
                "response.content_part.done",
                content_index=0,
                **self._position,
                part=part,
            ),
            self._event("response.output_item.done", item=item, output_index=0),
            # vLLM gives the event this name also if the answer was cut off.
            self._event("response.completed", response=whole),
        ]

    def whole(self, text: str, usage: dict[str, int], *, cut: bool) -> dict[str, Any]:
        part = {
            "annotations": [],
            "text": text,
            "type": "output_text",
            "logprobs": None,
        }
        item = {
            "id": "msg_x",
            "content": [part],
            "role": "assistant",
            "status": "completed",
            "type": "message",
            "phase": None,
        }
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return self._response("incomplete" if cut else "completed", [item], counts)

    def _event(self, kind: str, **members: Any) -> bytes:
        self._number += 1
        return event({**members, "sequence_number": self._number, "type": kind})

    def _response(
        self, status: str, output: list[Any], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": "resp_x",
            "created_at": 1,
            "incomplete_details": cut,
            "instructions": None,
            "metadata": None,
            "model": self._model,
            "object": "response",
            "output": output,
            "parallel_tool_calls": True,
            "temperature": 0.0,
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0,
            "background": False,
            "max_output_tokens": 16,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": status,
            "text": None,
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": usage,
            "user": None,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }


SCRIPTS: dict[str, type[MessageScript | ResponseScript]] = {
    "/v1/messages": MessageScript,
    "/v1/responses": ResponseScript,
}
