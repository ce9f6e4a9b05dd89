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
    found = re.search(r"^vllm:cache_config_info\{(.*)\}", metrics, re.MULTILINE)
    assert found is not None
    return dict(re.findall(r'(\w+)="([^"]*)"', found[1]))


@pytest.mark.usefixtures("model_store")
def test_running_engines_have_the_planned_kv_cache(up: Up) -> None:
    """Each has as many whole blocks of tokens as its memory holds by the plan; the command says the same."""
    checkpoints = finished(prepare_options(settings := load_settings(None)))
    done = subprocess.run(
        [QARR, "plan", "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    planned = json.loads(done.stdout)
    assert (
        [tier["tier"] for tier in planned["engines"]]
        == [made.tier for made in checkpoints]
        == list(STANDARD_TIERS)
    )
    for made, tier in zip(checkpoints, planned["engines"], strict=True):
        each, own = (
            kv_bytes_per_token(find_config(str(made.path))),
            settings.tiers.of(made.tier),
        )
        cache = int(GIB * usual_kv_cache_gib(each, own.max_model_len, own.max_num_seqs))
        assert (tier["kv_bytes_per_token"], tier["max_sequences"]) == (
            each,
            cache // (planned["context"] * each),
        )
        told = cache_of(up, made.tier)
        assert int(told["num_gpu_blocks"]) == cache // (each * int(told["block_size"]))


def test_a_tiers_own_arguments_reach_its_engine(up: Up) -> None:
    sizes = {tier: cache_of(up, tier)["block_size"] for tier in STANDARD_TIERS}
    assert sizes[TierName.BALANCED] == BALANCED_ARGS[1]
    assert BALANCED_ARGS[1] not in {sizes[TierName.FAST], sizes[TierName.PRECISE]}
