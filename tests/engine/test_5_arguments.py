"""Real vLLM on what is planned and asked before it starts: sizes of KV caches, and arguments."""

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
    """From each published configuration, as its own code has it, in BF16; of a multimodal model, from its text part."""
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
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [
        kept for _, kept in PUBLISHED.values()
    ]


def test_vllm_takes_the_arguments_of_every_sample() -> None:
    """Its own parser and checks, for each tier of each sample; a wrong argument is refused."""
    asked = [
        pod["containers"][0]["args"]
        for sample in ("laptop", "one-node", "cluster")
        for name, pod in release(sample).pods.items()
        if name != "qarr-router"
    ]
    done = subprocess.run(
        [PYTHON, ARGS_MAIN],
        input=json.dumps([*asked, ["--no-such"]]),
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    *answers, wrong = json.loads(done.stdout.splitlines()[-1])
    assert answers == [None] * 7
    assert wrong


def test_qarr_up_refuses_wrong_arguments() -> None:
    """With status 2, the tier and the argument, and no engine started."""
    env = {
        **os.environ,
        "QARR_TIERS__FAST__ENGINE_ARGS": '["--no-such-thing"]',
        "QARR_SERVER__PORT": "0",
    }
    done = subprocess.run(
        [QARR, "up"], env=env, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 2
    assert (
        "tier fast, --no-such-thing: unrecognized arguments: --no-such-thing"
        in done.stderr
    )
    assert "starting" not in done.stderr


def test_vllm_has_every_parser_that_engines_may_get() -> None:
    code = (
        "import json; from vllm.reasoning import ReasoningParserManager; from vllm.tool_parsers import ToolParserManager; "
        "print(json.dumps([ToolParserManager.list_registered(), ReasoningParserManager.list_registered()]))"
    )
    done = subprocess.run(
        [PYTHON, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    tools, reasoning = json.loads(done.stdout.splitlines()[-1])
    assert {parser for parser, _ in TOOLS} | {HERMES} <= set(tools)
    assert {parser for parser, _ in REASONING} <= set(reasoning)
