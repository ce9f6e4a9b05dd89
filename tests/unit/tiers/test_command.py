"""Command line and environment of an engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tiers.lifecycle.command import (
    IN_PROCESS,
    engine_argv,
    engine_environment,
    without_ours,
)
from tiers.spec import (
    Draft,
    EngineLaunch,
    EnginePlacement,
    OtlpTarget,
    TierName,
    TierSpec,
)

SPEC = TierSpec(
    TierName.FAST,
    max_model_len=2048,
    max_num_seqs=16,
    max_in_flight=32,
    checkpoint=Path("/models/x"),
)


def launch(**changes: object) -> EngineLaunch:
    values: dict[str, object] = {
        "tier": SPEC, "placement": EnginePlacement(), "python": Path("/engine/python"), "served_model": "m", "host": "127.0.0.1",
        "port": 9101, "api_key": "secret",
    }  # fmt: skip
    return EngineLaunch(**{**values, **changes})  # type: ignore[arg-type]


def test_cpu_engine_is_eager_and_unbound() -> None:
    """A CPU engine runs eagerly, with its own threads; its key is not on the command line."""
    argv = engine_argv(launch(placement=EnginePlacement(threads=3, kv_cache_gib=2)))
    env = engine_environment(
        launch(placement=EnginePlacement(threads=3, kv_cache_gib=2)),
        {"VLLM_CPU_KVCACHE_SPACE": "9"},
    )
    assert "VLLM_CPU_KVCACHE_SPACE" not in env  # the plan's counts
    assert "--enforce-eager" in argv
    assert argv[argv.index("--distributed-executor-backend") + 1] == IN_PROCESS
    assert argv[argv.index("--max-model-len") + 1] == "2048"
    assert "secret" not in " ".join(argv)
    assert env["VLLM_API_KEY"] == "secret"
    assert argv[argv.index("--kv-cache-memory-bytes") + 1] == str(2 << 30)
    assert env["OMP_NUM_THREADS"] == "3"
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    traced = engine_environment(launch(otlp=OtlpTarget("http://c:4317", "grpc")), {})
    assert env["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
    assert traced["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_gpu_engine_gets_its_share() -> None:
    """A GPU engine gets its device and its share of memory, and compiles."""
    placed = launch(placement=EnginePlacement(gpus=(1,), gpu_memory_fraction=0.31234))
    assert "--enforce-eager" not in engine_argv(placed)
    assert engine_argv(placed)[-2:] == ["--gpu-memory-utilization", "0.312"]
    assert engine_environment(placed, {})["CUDA_VISIBLE_DEVICES"] == "1"


def test_several_gpus_and_a_draft() -> None:
    """Each is an argument of vLLM's only where it is asked for."""
    fields = {"tensor_parallel": 2, "pipeline_parallel": 3}
    argv = engine_argv(
        launch(tier=replace(SPEC, **fields, draft=Draft("fast", 3, Path("/models/d"))))
    )
    assert IN_PROCESS not in argv
    assert argv[argv.index("--tensor-parallel-size") + 1] == "2"
    assert argv[argv.index("--pipeline-parallel-size") + 1] == "3"
    assert json.loads(argv[argv.index("--speculative-config") + 1]) == {
        "method": "draft_model", "model": "/models/d", "num_speculative_tokens": 3,
    }  # fmt: skip
    ngram = engine_argv(launch(tier=replace(SPEC, draft=Draft("ngram", 5))))
    assert json.loads(ngram[ngram.index("--speculative-config") + 1]) == {
        "method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4,
    }  # fmt: skip
    plain = engine_argv(launch())
    assert not {
        "--tensor-parallel-size",
        "--pipeline-parallel-size",
        "--speculative-config",
    } & set(plain)
    assert (
        engine_environment(launch(placement=EnginePlacement(gpus=(2, 5))), {})[
            "CUDA_VISIBLE_DEVICES"
        ]
        == "2,5"
    )


def test_parents_environment_is_cleaned() -> None:
    """What the parent set for itself does not reach an engine; the engine's own trace exporter does."""
    parent = {
        "OTEL_SERVICE_NAME": "qarr",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x",
        "PYTHONPATH": "/x",
        "HOME": "/root",
    }
    env = engine_environment(
        launch(otlp=OtlpTarget("http://c:4318/v1/traces", "http/protobuf")), parent
    )
    assert env["OTEL_SERVICE_NAME"] == "vllm-fast"
    assert env["HOME"] == "/root"
    assert not {"OTEL_EXPORTER_OTLP_ENDPOINT", "PYTHONPATH"} & set(env)
    assert env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"


def test_the_routers_secrets_do_not_reach_an_engine() -> None:
    """No variable of QARR's own, no token of the hub; keys of the traces' destination only for spans sent there."""
    parent = {
        "QARR_STATE__REDIS_URL": "redis://:secret@r",
        "QARR_KEY": "secret",
        "QARR_ENGINE__API_KEY": "secret",
        "HF_TOKEN": "secret",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret",
        "LD_LIBRARY_PATH": "/cuda",
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "VLLM_PORT": "tcp://10.0.3.7:8000",
    }
    env = engine_environment(launch(api_key="own"), parent)
    assert "secret" not in "".join(env.values())
    assert env["LD_LIBRARY_PATH"] == "/cuda"
    assert env["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert "VLLM_PORT" not in env  # a Service's address, not a port
    traced = engine_environment(
        launch(api_key="own", otlp=OtlpTarget("http://c:4317", "grpc")), parent
    )
    assert [name for name, value in traced.items() if "secret" in value] == [
        "OTEL_EXPORTER_OTLP_HEADERS"
    ]


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_the_command_line_follows_the_launch() -> None:
    """Model, name, address and limits are the tier's; further arguments come last, so that they win."""
    argv = engine_argv(launch(extra_args=("--dtype", "half"), host="::1", port=9))
    assert argv[0] == "/engine/python"
    assert Path(argv[1]).name == "engine_main.py"
    assert [option(argv, name) for name in ("--model", "--served-model-name", "--host", "--port", "--max-num-seqs")] == [
        "/models/x", "m", "::1", "9", "16",
    ]  # fmt: skip
    assert argv[-2:] == ["--dtype", "half"]
    assert "--otlp-traces-endpoint" not in argv


@pytest.mark.parametrize(
    ("endpoint", "insecure"),
    [("http://collector:4317", "true"), ("https://collector:4317", "false")],
)
def test_spans_go_where_the_launch_says(endpoint: str, insecure: str) -> None:
    """Only a collector without TLS is reached without it."""
    placed = launch(otlp=OtlpTarget(endpoint, "grpc"))
    assert option(engine_argv(placed), "--otlp-traces-endpoint") == endpoint
    assert (
        engine_environment(placed, {})["OTEL_EXPORTER_OTLP_TRACES_INSECURE"] == insecure
    )


def test_a_cpu_engine_sees_no_gpu() -> None:
    assert (
        engine_environment(launch(), {"CUDA_VISIBLE_DEVICES": "0,1"})[
            "CUDA_VISIBLE_DEVICES"
        ]
        == ""
    )


def test_the_parents_key_is_not_the_engines() -> None:
    """A variable of the parent does not override what the launch says."""
    env = engine_environment(
        launch(api_key="own"), {"VLLM_API_KEY": "other", "HF_HUB_OFFLINE": "0"}
    )
    assert env["VLLM_API_KEY"] == "own"
    assert env["HF_HUB_OFFLINE"] == "1"


def test_other_programs_get_all_but_our_own_variables() -> None:
    parent = {"QARR_KEY": "secret", "HF_TOKEN": "needed to download", "MY_QARR_X": "1"}
    assert without_ours(parent) == {"HF_TOKEN": "needed to download", "MY_QARR_X": "1"}
