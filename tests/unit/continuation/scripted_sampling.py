"""A logits processor for vLLM that lets a model say what its request holds. It runs in engines while they are recorded.

A request's ``vllm_xargs`` have ``script``, the token ids of the answer, and ``known``, how many of them came with the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.interface import MoveDirectionality

if TYPE_CHECKING:
    import torch
    from vllm.v1.sample.logits_processor import BatchUpdate


class ScriptedSampling(LogitsProcessor):
    """Leaves each request only the token that its script has next."""

    def __init__(self, *_: Any) -> None:
        # by the row of the batch: the tokens that are left, and the output so far
        self._rows: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _prompt, output_ids in batch_update.added:
            extra = params.extra_args or {}
            script = [int(token_id) for token_id in extra.get("script", ())]
            self._rows[row] = (script[int(extra.get("known", 0)) :], output_ids)
        for row, target, direction in batch_update.moved:
            moved = self._rows.pop(row, None)
            replaced = self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if replaced is not None and direction is MoveDirectionality.SWAP:
                self._rows[row] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (script, output_ids) in self._rows.items():
            if len(output_ids) < len(script):
                token_id = script[len(output_ids)]
                logits[row] = float("-inf")
                logits[row, token_id] = 0.0
        return logits
