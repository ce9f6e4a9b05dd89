"""Load checkpoints one after another in this process, and ask each. Run by an interpreter that has vLLM.

Usage: python load_formats.py [METHOD=]FOLDER ..., where METHOD is what vLLM's --quantization takes. Writes a line of JSON for
each: its log-probabilities of a text and the tokens that follow, or the error that kept it from loading.
"""

from __future__ import annotations

import gc
import json
import os
import sys

os.environ.update(
    {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
)  # before vLLM reads them
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
TEXT = "The quick brown fox jumps over the lazy dog, and 42 wolves watch it from the hill while the sun goes down."
CONTEXT = 256


def ask(folder: str, method: str) -> dict[str, object]:
    engine = LLM(
        folder,
        quantization=method or None,
        enforce_eager=True,
        max_model_len=CONTEXT,
        max_num_seqs=4,
        max_num_batched_tokens=CONTEXT,
        kv_cache_memory_bytes=64 << 20,
        distributed_executor_backend=IN_PROCESS,
    )
    sampling = SamplingParams(
        max_tokens=4, temperature=0, prompt_logprobs=0, ignore_eos=True
    )
    (answer,) = engine.generate(TEXT, sampling, use_tqdm=False)
    logprobs = [
        next(iter(place.values())).logprob for place in answer.prompt_logprobs[1:]
    ]
    return {"logprobs": logprobs, "tokens": list(answer.outputs[0].token_ids)}


for argument in sys.argv[1:]:
    method, _, folder = argument.rpartition("=")
    try:
        result = ask(folder, method)
    except Exception as error:  # noqa: BLE001  whatever vLLM refuses with is the result
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"argument": argument, **result}), flush=True)  # noqa: T201
    cleanup_dist_env_and_memory()
    gc.collect()
