"""Real vLLM before it starts: it computes the planned sizes of KV caches, and checks arguments."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

from router.deployment.settings import EngineSettings
from tests.deploy.charts import release
from tests.engine.conftest import QARR
from tests.unit.tiers.sizing.published_models import PUBLISHED, read_config
from tiers.checkpoints.parsers import HERMES, REASONING, TOOLS
from tiers.lifecycle.engine_args import ARGS_MAIN

if TYPE_CHECKING:
    from pathlib import Path

PYTHON = EngineSettings().python
COMPUTE = """
import json, sys
from vllm.config import ModelConfig, ParallelConfig
parallel, found = ParallelConfig(), []
for folder in sys.argv[1:]:
    model = ModelConfig(model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16")
    vectors = 1 if model.use_mla else 2  # a latent one, or keys and values
    layers, heads = model.get_num_layers(parallel), model.get_num_kv_heads(parallel)
    found.append(2 * vectors * layers * heads * model.get_head_size())
print(json.dumps(found))
"""


def test_vllm_computes_the_same_kv_cache(tmp_path: Path) -> None:
    """vLLM's own code computes the same BF16 cache from each published configuration, or from its text part."""
    folders = []
    for name in PUBLISHED:
        config = read_config(name)
        config = {**config.get("text_config", config)}
        if config["model_type"] == "gemma3_text":
            config["architectures"] = ["Gemma3ForCausalLM"]
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        (folders[-1] / "config.json").write_text(json.dumps(config))
    command = [PYTHON, "-c", COMPUTE, *folders]
    process = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=600
    )
    assert process.returncode == 0, process.stderr
    computed = json.loads(process.stdout.splitlines()[-1])
    assert computed == [token_bytes for _, token_bytes in PUBLISHED.values()]


def test_vllm_takes_the_arguments_of_every_sample() -> None:
    """vLLM's own parser and checks accept the arguments of each tier of each sample, and refuse a wrong one."""
    argument_lists = []
    for sample in ("laptop", "one-node", "cluster"):
        for name, pod in release(sample).pods.items():
            if name != "qarr-router":
                argument_lists.append(pod["containers"][0]["args"])
    process = subprocess.run(
        [PYTHON, ARGS_MAIN],
        input=json.dumps([*argument_lists, ["--no-such"]]),
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    *answers, wrong = json.loads(process.stdout.splitlines()[-1])
    assert answers == [None] * 7
    assert wrong


def test_qarr_up_refuses_wrong_arguments() -> None:
    """The error names the tier and the argument, and no engine is started."""
    env = {
        **os.environ,
        "QARR_TIERS__FAST__ENGINE_ARGS": '["--no-such-thing"]',
        "QARR_SERVER__PORT": "0",
    }
    process = subprocess.run(
        [QARR, "up"], env=env, capture_output=True, text=True, check=False, timeout=600
    )
    assert process.returncode == 2
    assert (
        "tier fast, --no-such-thing: unrecognized arguments: --no-such-thing"
        in process.stderr
    )
    assert "starting" not in process.stderr


def test_vllm_has_every_parser_that_engines_may_get() -> None:
    code = (
        "import json; from vllm.reasoning import ReasoningParserManager; from vllm.tool_parsers import ToolParserManager; "
        "print(json.dumps([ToolParserManager.list_registered(), ReasoningParserManager.list_registered()]))"
    )
    process = subprocess.run(
        [PYTHON, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    tools, reasoning = json.loads(process.stdout.splitlines()[-1])
    assert {parser for parser, _ in TOOLS} | {HERMES} <= set(tools)
    assert {parser for parser, _ in REASONING} <= set(reasoning)
