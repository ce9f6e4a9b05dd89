"""Run vLLM's OpenAI server from a main module that costs nothing to import.

vLLM's processes are spawned, and a spawned process imports its parent's main module again. Started with ``python -m``, that
is the whole API server, once more in each of an engine's processes: a tenth of an engine's start-up CPU time.

Where ``VLLM_WORKER_MULTIPROC_METHOD`` is fork, the process that computes is forked instead, and shares with the API server
what both have imported. vLLM's CPU platform sets the variable to spawn: it starts OpenMP after the fork, in the child alone.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.context import ForkContext


def fork_context() -> ForkContext:
    """Return what vLLM starts its process with; pages of objects that the collector does not visit stay shared."""
    gc.collect()
    gc.freeze()
    return multiprocessing.get_context("fork")


if __name__ == "__main__":
    if os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == "fork":
        from vllm.v1.engine import utils  # type: ignore[import-not-found]

        utils.get_mp_context = fork_context
        # the parent's event loop reads it
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    runpy.run_module(
        "vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False
    )
