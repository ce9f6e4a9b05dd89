"""Run vLLM's OpenAI server from a main module that costs nothing to import.

vLLM's processes are spawned, and a spawned process imports its parent's main module again. Started with ``python -m``, that
is the whole API server, once more in each of an engine's processes: a tenth of an engine's start-up CPU time.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=False)
