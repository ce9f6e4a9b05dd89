"""Start vLLM with a fault in its attention, where ``ENGINE_FAULT`` names one; takes vLLM's arguments.

It runs in the engine's environment, in the place of ``tiers/lifecycle/engine_main.py``, which it goes on with. The process
that computes is forked, so that it has the fault as well. All faults are of the CPU's attention (vLLM 0.32):

- ``late attention``: from position 600 on, what attention returns is halved.
- ``KV cache of 3 bits``: keys and values are rounded to seven steps for each token and head before they are cached.
- ``decode``: of sequences that have one token in a step, for which compiled graphs are used, each head gets its neighbour's
  values. Prompts are read rightly.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

ENGINE_MAIN = Path(__file__).parents[3] / "tiers/lifecycle/engine_main.py"
FIRST_WRONG_POSITION = 600
LARGEST_STEP = 3  # a signed integer of 3 bits, without -4


def attend_late_wrongly(backend: Any) -> None:
    """Halve what attention returns, from a position on."""
    forward = backend.forward

    def forward_wrongly(self: Any, *args: Any, **named: Any) -> Any:
        result = forward(self, *args, **named)
        metadata = args[5] if len(args) > 5 else named["attn_metadata"]
        output = args[6] if len(args) > 6 else named["output"]
        if metadata is None:  # vLLM warms up
            return result
        starts = metadata.query_start_loc.tolist()
        lengths = metadata.seq_lens.tolist()
        for number, length in enumerate(lengths):
            start = starts[number]
            end = starts[number + 1]
            first_position = length - (end - start)
            skipped = max(FIRST_WRONG_POSITION - first_position, 0)
            if start + skipped < end:
                output[start + skipped : end] *= 0.5
        return result

    backend.forward = forward_wrongly


def decode_wrongly(backend: Any) -> None:
    """Exchange the heads' values of sequences that have one token in a step."""
    forward = backend.forward

    def forward_wrongly(self: Any, *args: Any, **named: Any) -> Any:
        result = forward(self, *args, **named)
        metadata = args[5] if len(args) > 5 else named["attn_metadata"]
        output = args[6] if len(args) > 6 else named["output"]
        if metadata is None:  # vLLM warms up
            return result
        starts = metadata.query_start_loc
        is_decoded = starts[1:] - starts[:-1] == 1
        rows = starts[:-1][is_decoded]
        output[rows] = output[rows].roll(1, dims=1)
        return result

    backend.forward = forward_wrongly


def round_cache(backend: Any) -> None:
    """Round keys and values before they are cached."""
    update = backend.do_kv_cache_update

    def update_rounded(
        self: Any, layer: Any, key: Any, value: Any, *args: Any, **named: Any
    ) -> None:
        update(self, layer, rounded(key), rounded(value), *args, **named)

    backend.do_kv_cache_update = update_rounded


def rounded(values: Any) -> Any:
    """Return values of shape tokens x heads x head size, rounded to 3 bits; each row of a head has its own scale."""
    step = values.abs().amax(-1, keepdim=True).clamp(min=1e-6) / LARGEST_STEP
    steps = (values / step).round().clamp(-LARGEST_STEP, LARGEST_STEP)
    return (steps * step).to(values.dtype)


FAULTS = {
    "late attention": attend_late_wrongly,
    "KV cache of 3 bits": round_cache,
    "decode": decode_wrongly,
}


def main() -> None:
    """Put the fault in, and run the engine."""
    from vllm.v1.attention.backends import cpu_attn  # type: ignore[import-not-found]

    FAULTS[os.environ["ENGINE_FAULT"]](cpu_attn.CPUAttentionBackendImpl)
    sys.argv[0] = str(ENGINE_MAIN)
    runpy.run_path(str(ENGINE_MAIN), run_name="__main__")


if __name__ == "__main__":
    main()
