"""Running engines have what was planned and asked for: sizes of KV caches, and their own arguments."""

from __future__ import annotations

import json
import re
import subprocess
from typing import TYPE_CHECKING

import httpx
import pytest

from router.deployment.layout import prepare_options
from router.settings import load_settings
from tests.engine.conftest import BALANCED_ARGS, QARR
from tiers.checkpoints.prepare import finished
from tiers.plan import GIB, usual_kv_cache_gib
from tiers.sizing.architecture import kv_bytes_per_token
from tiers.sizing.find_config import find_config
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from tests.engine.conftest import Up


def cache_of(up: Up, tier: TierName) -> dict[str, str]:
    metrics = httpx.get(f"{up.replica(tier)['url']}/metrics", trust_env=False).text
    info = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
    assert info is not None
    return dict(re.findall(r'(\w+)="([^"]*)"', info[1]))


@pytest.mark.usefixtures("model_store")
def test_running_engines_have_the_planned_kv_cache(up: Up) -> None:
    """Each engine has as many blocks of tokens as its planned memory holds; the command says the same."""
    settings = load_settings(None)
    checkpoints = finished(prepare_options(settings))
    process = subprocess.run(
        [QARR, "plan", "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    planned = json.loads(process.stdout)
    assert [tier["tier"] for tier in planned["engines"]] == list(STANDARD_TIERS)
    assert [made.tier for made in checkpoints] == list(STANDARD_TIERS)
    for made, tier in zip(checkpoints, planned["engines"], strict=True):
        token_bytes = kv_bytes_per_token(find_config(str(made.path)))
        own = settings.tiers.of(made.tier)
        cache_gib = usual_kv_cache_gib(token_bytes, own.max_model_len, own.max_num_seqs)
        cache_bytes = int(GIB * cache_gib)
        assert tier["kv_bytes_per_token"] == token_bytes
        sequences = cache_bytes // (planned["context"] * token_bytes)
        assert tier["max_sequences"] == sequences
        shown = cache_of(up, made.tier)
        blocks = cache_bytes // (token_bytes * int(shown["block_size"]))
        assert int(shown["num_gpu_blocks"]) == blocks


def test_a_tiers_own_arguments_reach_its_engine(up: Up) -> None:
    sizes = {tier: cache_of(up, tier)["block_size"] for tier in STANDARD_TIERS}
    assert sizes[TierName.BALANCED] == BALANCED_ARGS[1]
    assert BALANCED_ARGS[1] not in {sizes[TierName.FAST], sizes[TierName.PRECISE]}
