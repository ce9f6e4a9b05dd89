"""The layout of a fleet on a Ray cluster: what is placed, with which resources, and a router that follows it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.deployment.on_ray import make_ray_deployment
from router.section import SettingsError
from router.settings import Settings, load_settings
from tests.unit.deployment.made_fleet import made
from tiers.cluster.job import WantedReplica
from tiers.errors import CheckpointError, EngineError, PlanError
from tiers.spec import TierName

HERE = Path(sys.executable)


def settings(
    tmp_path: Path, *, ray: dict[str, Any] | None = None, **more: Any
) -> Settings:
    server = {"runtime_dir": tmp_path / "run"}
    return load_settings(
        None, {"ray": {"python": HERE, **(ray or {})}, "server": server, **more}
    )


def placed(tmp_path: Path, **more: Any) -> tuple[WantedReplica, ...]:
    deployment = make_ray_deployment(
        settings(tmp_path, **more), tuple(made(tmp_path).values())
    )
    assert deployment.ray is not None
    return deployment.ray.job.replicas


def test_every_replica_is_placed_and_the_router_follows(tmp_path: Path) -> None:
    """Nothing starts here; the router reads the file that the placement writes, with the engines' own key."""
    tiers = {
        "fast": {"replicas": 2},
        "balanced": {"replicas": 0},
        "precise": {"urls": ["http://10.0.0.9:1"], "replicas": 1},
    }
    given = settings(tmp_path, tiers=tiers, ray={"address": "10.0.0.5:6379"})
    deployment = make_ray_deployment(given, tuple(made(tmp_path).values()))
    ray = deployment.ray
    assert ray is not None
    assert [(wanted.id, wanted.tier) for wanted in ray.job.replicas] == [
        ("ray-fast-0", "fast"), ("ray-fast-1", "fast"), ("ray-precise-0", "precise"),
    ]  # fmt: skip
    assert not deployment.local
    assert not deployment.launches
    assert deployment.counter.exact
    assert str(deployment.settings.discovery.file) == ray.job.engines_file
    assert deployment.settings.engine.api_key == ray.api_key
    assert len(ray.api_key) > 20
    assert ray.api_key not in str(ray.job)
    assert ray.job.address == "10.0.0.5:6379"
    assert ray.python == HERE
    assert {spec.name: spec.urls for spec in deployment.specs}[TierName.PRECISE] == (
        "http://10.0.0.9:1",
    )


def test_a_key_and_a_file_of_the_settings_are_used(tmp_path: Path) -> None:
    """So that other routers can follow the same engines."""
    given = settings(
        tmp_path,
        engine={"api_key": "ours"},
        discovery={"file": tmp_path / "engines.json"},
    )
    deployment = make_ray_deployment(given, tuple(made(tmp_path).values()))
    assert deployment.ray is not None
    assert deployment.ray.api_key == "ours"
    assert deployment.ray.job.engines_file == str(tmp_path / "engines.json")


def test_an_engine_gets_the_arguments_that_it_gets_here(tmp_path: Path) -> None:
    """Apart from its address, which its node has, and its key, which no file holds."""
    tiers = {
        "fast": {
            "engine_args": ["--seed", "7"],
            "env": {"A": "b"},
            "ray_resources": {"CPU": 3},
        }
    }
    fast = placed(tmp_path, tiers=tiers)[0]
    assert fast.args[:4] == (
        "--model",
        fast.checkpoint,
        "--served-model-name",
        fast.args[3],
    )
    assert fast.args[-2:] == ("--seed", "7")
    assert {"--enforce-eager", "--max-model-len"} <= set(fast.args)
    assert not {"--host", "--port"} & set(fast.args)
    assert fast.env["A"] == "b"
    assert fast.env["OMP_NUM_THREADS"] == "3"
    assert fast.env["CUDA_VISIBLE_DEVICES"] == ""
    assert "VLLM_API_KEY" not in fast.env
    assert fast.resources == {"CPU": 3}


def test_with_a_gpu_of_ray_an_engine_runs_on_it(tmp_path: Path) -> None:
    """Which one, the node says; of a part of a GPU it takes that part of the memory."""
    tiers = {
        "fast": {"ray_resources": {"GPU": 0.5, "A100": 0.001, "CPU": 0}},
        "precise": {"tensor_parallel": 2},
    }
    tiers["precise"]["ray_resources"] = {"GPU": 2}
    fast, _, precise = placed(
        tmp_path, tiers=tiers, ray={"resources": {"CPU": 1, "GPU": 1}}
    )
    assert fast.resources == {"GPU": 0.5, "A100": 0.001}
    assert fast.args[fast.args.index("--gpu-memory-utilization") + 1] == "0.450"
    assert "CUDA_VISIBLE_DEVICES" not in fast.env
    assert precise.resources == {"CPU": 1, "GPU": 2}
    assert precise.args[precise.args.index("--gpu-memory-utilization") + 1] == "0.900"
    assert "--tensor-parallel-size" in precise.args


def test_one_engine_over_several_nodes_is_vllms_own_to_place(tmp_path: Path) -> None:
    """vLLM's Ray executor reserves its GPUs; the actor takes none of them."""
    precise = {
        "tensor_parallel": 2,
        "pipeline_parallel": 2,
        "across_nodes": True,
        "ray_resources": {"GPU": 4},
    }
    wanted = placed(tmp_path, tiers={"precise": precise})[2]
    assert wanted.across_nodes
    assert wanted.resources == {"CPU": 1}
    sizes = ("--tensor-parallel-size", "2"), ("--pipeline-parallel-size", "2")
    for name, value in (*sizes, ("--distributed-executor-backend", "ray")):
        assert wanted.args[wanted.args.index(name) + 1] == value
    assert "CUDA_VISIBLE_DEVICES" not in wanted.env


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        (
            {"across_nodes": True},
            "tiers.fast.across_nodes is for an engine on several GPUs",
        ),
        (
            {"across_nodes": True, "tensor_parallel": 2},
            "vLLM's Ray executor takes no CPUs",
        ),
        ({"ray_resources": {"GPU": 1.5}}, "GPU 1.5 is no whole number"),
        (
            {"ray_resources": {"GPU": 2}},
            "gets GPU 2 of Ray, but its engine takes tensor_parallel x pipeline_parallel = 1",
        ),
        ({"ray_resources": {"GPU": 0.5}, "tensor_parallel": 2}, "gets GPU 0.5 of Ray"),
    ],
)
def test_resources_must_fit_the_engine(
    tmp_path: Path, tier: dict[str, Any], said: str
) -> None:
    """Otherwise nothing starts, and the error names the setting."""
    with pytest.raises(PlanError, match=said):
        placed(tmp_path, tiers={"fast": tier})


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """The Ray environment, a checkpoint, any replica, a tokenizer that all tiers share."""
    prepared = made(tmp_path)
    with pytest.raises(
        EngineError, match=r"run 'scripts/setup ray', or set ray\.python"
    ):
        make_ray_deployment(
            load_settings(None, {"ray": {"python": tmp_path / "none"}}),
            tuple(prepared.values()),
        )
    with pytest.raises(
        PlanError, match="tier balanced has no checkpoint: run 'qarr model prepare'"
    ):
        make_ray_deployment(settings(tmp_path), (prepared[TierName.FAST],))
    none = {str(tier): {"replicas": 0} for tier in prepared}
    with pytest.raises(PlanError, match="nothing is to be placed on Ray"):
        make_ray_deployment(settings(tmp_path, tiers=none), tuple(prepared.values()))
    fast = prepared[TierName.FAST]
    (fast.path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer"):
        make_ray_deployment(
            settings(tmp_path), (replace(fast), *list(prepared.values())[1:])
        )


@pytest.mark.parametrize("address", ["ray://10.0.0.5:10001", "10.0.0.5", "a b:1", ""])
def test_the_address_is_that_of_the_head(address: str) -> None:
    """A Ray client's, or one without a port, is refused with what is allowed."""
    with pytest.raises(SettingsError, match=r"ray\.address.*10\.0\.0\.5:6379"):
        load_settings(None, {"ray": {"address": address}})
