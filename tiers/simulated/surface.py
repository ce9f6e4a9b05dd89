"""What vLLM's answers look like, for engines that are none."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from starlette.requests import Request


POLL_S = 0.02
CLIENT_CLOSED_REQUEST = 499


class Surface:
    """Makes events and bodies with their members in vLLM's order."""

    def __init__(self, model: str) -> None:
        self._model = model

    async def _unless_disconnected(
        self, request: Request, work: Coroutine[Any, Any, Response]
    ) -> Response:
        """Abort, as vLLM does, when the client goes away before the whole answer is there."""
        task = asyncio.create_task(work)
        while not task.done():
            if await request.is_disconnected():
                task.cancel()
            await asyncio.wait({task}, timeout=POLL_S)
        if task.cancelled():
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return task.result()

    def _card(self, root: str, max_model_len: int) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "root": root,
            "parent": None,
            "max_model_len": max_model_len,
        }

    def _chunk(
        self,
        delta: dict[str, str],
        reason: str | None,
        *,
        chat: bool,
        logprobs: dict[str, Any] | None = None,
        ids: list[int] | None = None,
        prompt: list[int] | None = None,
        stop_reason: str | None = None,
        **more: Any,
    ) -> bytes:
        """Return a chunk, with members that vLLM writes even where they are null."""
        choice: dict[str, Any] = {"index": 0}
        if chat:
            choice |= {"delta": delta, "logprobs": logprobs, "finish_reason": reason}
            is_opening = "role" in delta
            if reason and not is_opening:
                choice["stop_reason"] = stop_reason
            if not is_opening:
                choice["token_ids"] = ids
        else:
            choice |= {
                "text": delta["content"],
                "logprobs": None,
                "finish_reason": reason,
                "stop_reason": stop_reason,
                "prompt_token_ids": prompt,
                "token_ids": ids,
            }
        return self._event({"choices": [choice], **more}, chat=chat)

    def _fields(self, fields: dict[str, Any], kind: str) -> dict[str, Any]:
        return {
            "id": "x",
            "object": kind,
            "created": int(time.time()),
            "model": self._model,
            **fields,
        }

    def _event(self, fields: dict[str, Any], *, chat: bool) -> bytes:
        kind = "chat.completion.chunk" if chat else "text_completion"
        text = json.dumps(
            self._fields(fields, kind), separators=(",", ":"), ensure_ascii=False
        )
        return b"data: " + text.encode("utf-8", "surrogatepass") + b"\n\n"
