"""Embeddings come from the engine that the settings name for them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from router.deployment.layout import prepare_options
from router.settings import load_settings
from tests.deploy.services import ROOT
from tests.engine.chart_processes import PYTHON, running, until_ok
from tests.ports import reserved_ports
from tests.unit.own_router import own_router
from tiers.checkpoints.prepare import finished

if TYPE_CHECKING:
    from pathlib import Path

    import httpx


def embeddings_in(answer: httpx.Response) -> list[list[float]]:
    data = answer.raise_for_status().json()["data"]
    return [item["embedding"] for item in data]


@pytest.mark.anyio
@pytest.mark.usefixtures("model_store")
async def test_embeddings_come_from_the_engine_named_for_them(tmp_path: Path) -> None:
    """A vLLM that serves embeddings, started by hand, answers through a router whose settings name it."""
    (port,) = reserved_ports()
    checkpoint = finished(prepare_options(load_settings()))[-1].path
    argv = [str(PYTHON), str(ROOT / "tiers/lifecycle/engine_main.py")]
    argv += ["--model", str(checkpoint), "--served-model-name", "embedder"]
    argv += ["--runner", "pooling", "--convert", "embed", "--enforce-eager"]
    argv += ["--port", str(port), "--max-model-len", "512", "--max-num-seqs", "2"]
    own = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    url = f"http://127.0.0.1:{port}"
    log = tmp_path / "engine.out"
    with running(argv, {**os.environ, **own}, log) as engine:
        until_ok(f"{url}/health", engine, log)
        async with own_router(
            tmp_path, QARR_OPENAI__EMBEDDINGS_URLS=json.dumps([url])
        ) as router:
            body = {"model": "embedder", "input": ["one", "two"]}
            answers = [
                await router.client.post(
                    f"{server}/v1/embeddings", json=body, timeout=60
                )
                for server in (url, router.url)
            ]
    direct, routed = map(embeddings_in, answers)
    assert len(routed) == 2
    # It is chance which inputs an engine computes together, and the rounding depends on it.
    assert routed == [
        pytest.approx(embedding, rel=0.02, abs=0.002) for embedding in direct
    ]
    assert routed[0] != pytest.approx(routed[1], rel=0.02, abs=0.002)
