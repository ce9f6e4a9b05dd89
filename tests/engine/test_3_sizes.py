"""Real vLLM on what is planned and asked before it starts: sizes of KV caches, and its own arguments."""

from __future__ import annotations

import json
import os
import re
import subprocess
from typing import TYPE_CHECKING

import httpx

from router.deployment.layout import prepare_options
from router.settings import load_settings
from tests.engine.conftest import BALANCED_ARGS, QARR
from tests.unit.tiers.sizing.test_architecture import PUBLISHED, read
from tiers.checkpoints.prepare import finished
from tiers.plan import GIB
from tiers.sizing.architecture import kv_bytes_per_token
from tiers.sizing.find_config import find_config
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.conftest import Up

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
        config = read(name)
        config = {**config.get("text_config", config)}
        if config["model_type"] == "gemma3_text":
            config["architectures"] = ["Gemma3ForCausalLM"]
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        (folders[-1] / "config.json").write_text(json.dumps(config))
    python = load_settings(None).engine.python
    done = subprocess.run([python, "-c", COMPUTE, *folders], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [kept for _, kept in PUBLISHED.values()]


def cache_of(up: Up, tier: TierName) -> dict[str, str]:
    """Return what a running engine says of its KV cache."""
    metrics = httpx.get(f"{up.replica(tier)['url']}/metrics", trust_env=False).text
    found = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
    assert found is not None
    return dict(re.findall(r'(\w+)="([^"]*)"', found[1]))


def test_running_engines_have_the_planned_kv_cache(up: Up) -> None:
    """Each has as many whole blocks of tokens as its memory holds by the plan; the command says the same."""
    checkpoints = finished(prepare_options(load_settings(None)))
    planned = json.loads(subprocess.run([QARR, "plan", "--json"], capture_output=True, text=True, check=True).stdout)
    assert [tier["tier"] for tier in planned["tiers"]] == [made.tier for made in checkpoints] == list(STANDARD_TIERS)
    for made, tier in zip(checkpoints, planned["tiers"], strict=True):
        each = kv_bytes_per_token(find_config(str(made.path)))
        assert tier["kv_bytes_per_token"] == each
        assert tier["max_sequences"] == GIB // (planned["context"] * each)
        told = cache_of(up, made.tier)
        assert int(told["num_gpu_blocks"]) == GIB // (each * int(told["block_size"]))


def test_a_tiers_own_arguments_reach_its_engine(up: Up) -> None:
    """And no other tier's."""
    sizes = {tier: cache_of(up, tier)["block_size"] for tier in STANDARD_TIERS}
    assert sizes[TierName.BALANCED] == BALANCED_ARGS[1]
    assert BALANCED_ARGS[1] not in {sizes[TierName.FAST], sizes[TierName.PRECISE]}


def test_qarr_up_refuses_wrong_arguments() -> None:
    """With status 2, the tier and the argument, and no engine started."""
    env = {**os.environ, "QARR_TIERS__FAST__ENGINE_ARGS": '["--no-such-thing"]', "QARR_SERVER__PORT": "0"}
    done = subprocess.run([QARR, "up"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "tier fast, --no-such-thing: unrecognized arguments: --no-such-thing" in done.stderr
    assert "starting" not in done.stderr
