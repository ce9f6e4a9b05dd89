"""The command line and environment of an engine: pure functions of its launch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tiers.lifecycle.less_memory import GIB, KV_SPACE
from tiers.spec import NGRAM

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tiers.spec import Adapters, Draft, EngineLaunch

ENGINE_MAIN = Path(__file__).with_name("engine_main.py")
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
LOAD_AT_RUN_TIME = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
# Tokens of a step on a CPU. Scores of a prompt's tokens take it times the vocabulary several times in memory; with vLLM's
# 2048, 1 GiB more at the peak, and no more speed.
CPU_BATCH = 512
NGRAM_LENGTH = 4  # tokens that must have occurred before
# settings and secrets: Redis URLs with passwords, keys of callers and of other engines
OURS = "QARR_"
# Harmful in an engine: without bytecode caching its start takes twice the CPU time, and it has a virtual environment and a
# trace exporter of its own. Tokens of the Hugging Face hub: engines read local files only.
DROPPED = frozenset(
    {
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "OTEL_SERVICE_NAME",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        "OTEL_TRACES_EXPORTER",
        "OTEL_EXPORTER_OTLP_PROTOCOL",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        KV_SPACE,  # it would stand against the plan's
    }
)
# By its class: vLLM runs the model of a CPU engine in a process of its own, to bind it to cores, which engines here are not,
# and turns the plain name "uni" into that. In the engine's process the start takes two thirds of the time, a token half,
# and an engine has a process of 0.7 GB less (measured on two cores; docs/decisions/0044-model-in-the-engines-process.md).
IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
# These variables may hold the credentials of the trace collector; only engines that send spans to it inherit them.
EXPORTER_KEYS = frozenset(
    {"OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"}
)


def engine_argv(launch: EngineLaunch) -> list[str]:
    """Return the argument list that starts vLLM's OpenAI server.

    It does not use the ``vllm`` script: the CPU wheel's looks up the wrong distribution name and exits. The checkpoint's
    own configuration names the quantization method.
    """
    listening = ["--host", launch.host, "--port", str(launch.port)]
    return [str(launch.python), str(ENGINE_MAIN), *listening, *engine_options(launch)]


def engine_options(launch: EngineLaunch) -> list[str]:
    """Return an engine's arguments apart from the address that it listens on."""
    tier = launch.tier
    placement = launch.placement
    argv = ["--model", str(tier.checkpoint), "--served-model-name", launch.served_model]
    argv += [
        "--max-model-len",
        str(tier.max_model_len),
        "--max-num-seqs",
        str(tier.max_num_seqs),
    ]
    if tier.tensor_parallel > 1:
        argv += ["--tensor-parallel-size", str(tier.tensor_parallel)]
    if tier.pipeline_parallel > 1:
        argv += ["--pipeline-parallel-size", str(tier.pipeline_parallel)]
    if tier.draft is not None:
        argv += ["--speculative-config", json.dumps(_speculative(tier.draft))]
    argv += _lora(launch.adapters)
    argv += [
        "--scheduling-policy",
        "priority",
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
    ]
    if not placement.gpus:
        # Compiled graphs gave wrong answers on CPU (vLLM 0.32); eager mode is correct and starts faster.
        argv += ["--enforce-eager"]
        if tier.tensor_parallel == tier.pipeline_parallel == 1:
            argv += ["--distributed-executor-backend", IN_PROCESS]
        argv += ["--kv-cache-memory-bytes", str(int(placement.kv_cache_gib * GIB))]
        argv += ["--max-num-batched-tokens", str(max(CPU_BATCH, tier.max_num_seqs))]
    else:
        argv += ["--gpu-memory-utilization", f"{placement.gpu_memory_fraction:.3f}"]
    if launch.otlp:
        argv += ["--otlp-traces-endpoint", launch.otlp.endpoint]
    return [*argv, *launch.extra_args]


def _lora(adapters: Adapters) -> list[str]:
    """Return vLLM's arguments for adapters; as many may be computed in one batch as are loaded at the start."""
    if not adapters.enabled:
        return []
    argv = ["--enable-lora", "--max-lora-rank", str(adapters.max_rank)]
    argv += ["--max-loras", str(max(len(adapters.loaded), 1))]
    if adapters.loaded:
        argv.append("--lora-modules")
        argv += [
            json.dumps({"name": adapter.name, "path": adapter.path})
            for adapter in adapters.loaded
        ]
    return argv


def _speculative(draft: Draft) -> dict[str, object]:
    if draft.source == NGRAM:
        return {
            "method": NGRAM,
            "num_speculative_tokens": draft.tokens,
            "prompt_lookup_max": NGRAM_LENGTH,
        }
    return {
        "method": "draft_model",
        "model": str(draft.checkpoint),
        "num_speculative_tokens": draft.tokens,
    }


def without_ours(parent: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without QARR's variables, for a process that is not QARR's."""
    return {name: value for name, value in parent.items() if not name.startswith(OURS)}


def engine_environment(
    launch: EngineLaunch, parent: Mapping[str, str]
) -> dict[str, str]:
    """Return an engine's environment: what it inherits, and what vLLM needs."""
    return inherited(parent, traced=launch.otlp is not None) | engine_variables(launch)


def inherited(parent: Mapping[str, str], *, traced: bool) -> dict[str, str]:
    """Return what an engine inherits of an environment: not QARR's variables and secrets."""
    dropped = DROPPED if traced else DROPPED | EXPORTER_KEYS
    # Kubernetes sets it for a Service that is named vllm; vLLM ends with it
    if "://" in parent.get("VLLM_PORT", ""):
        dropped |= {"VLLM_PORT"}
    return {
        name: value
        for name, value in without_ours(parent).items()
        if name not in dropped
    }


def engine_variables(launch: EngineLaunch) -> dict[str, str]:
    """Return the variables that an engine gets besides those that it inherits."""
    placement = launch.placement
    env = {
        # not on the command line, which every user can list
        "VLLM_API_KEY": launch.api_key,
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Forked, an engine is ready in half the time and takes a tenth less memory (engine_main.py), but gRPC, which sends
        # spans, and CUDA do not survive it.
        METHOD: "spawn" if placement.gpus or launch.otlp else "fork",
    }
    if launch.adapters.at_run_time:
        env[LOAD_AT_RUN_TIME] = "1"
    if launch.otlp:
        env |= {
            "OTEL_SERVICE_NAME": f"vllm-{launch.tier.name}",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": launch.otlp.protocol,
            "OTEL_EXPORTER_OTLP_TRACES_INSECURE": str(
                launch.otlp.endpoint.startswith("http://")
            ).lower(),
        }
    env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, placement.gpus))
    if not placement.gpus:
        env |= {
            # vLLM's own binding pins every engine of a machine to the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(placement.threads),
        }
    return env | dict(launch.env)
