"""Embeddings come from the engine that the settings name for them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from router.deployment.layout import prepare_options
from router.settings import load_settings
from tests.deploy.services import ROOT
from tests.engine.test_5_chart import PYTHON, running, until_ok
from tests.ports import reserved_ports
from tests.unit.own_router import own_router
from tiers.checkpoints.prepare import finished

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.anyio
@pytest.mark.usefixtures("model_store")
async def test_embeddings_come_from_the_engine_named_for_them(tmp_path: Path) -> None:
    """A vLLM that serves embeddings, started by hand, answers through a router that is told of it."""
    (port,) = reserved_ports()
    argv = [
        str(PYTHON), str(ROOT / "tiers/lifecycle/engine_main.py"), "--model", str(finished(prepare_options(load_settings()))[-1].path),
        "--served-model-name", "embedder", "--runner", "pooling", "--convert", "embed", "--enforce-eager",
        "--port", str(port), "--max-model-len", "512", "--max-num-seqs", "2",
    ]  # fmt: skip
    own = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    url, log = f"http://127.0.0.1:{port}", tmp_path / "engine.out"
    with running(argv, {**os.environ, **own}, log) as engine:
        until_ok(f"{url}/health", engine, log)
        async with own_router(
            tmp_path, QARR_OPENAI__EMBEDDINGS_URLS=json.dumps([url])
        ) as router:
            body = {"model": "embedder", "input": ["one", "two"]}
            answers = [
                await router.client.post(
                    f"{asked}/v1/embeddings", json=body, timeout=60
                )
                for asked in (url, router.url)
            ]
    direct, routed = (
        [item["embedding"] for item in a.raise_for_status().json()["data"]]
        for a in answers
    )
    assert len(routed) == 2
    # Which inputs an engine computes together is chance, and with it the rounding.
    assert routed == [
        pytest.approx(embedding, rel=0.02, abs=0.002) for embedding in direct
    ]
    assert routed[0] != pytest.approx(routed[1], rel=0.02, abs=0.002)
