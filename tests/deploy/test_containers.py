"""Container files and the compose file: checked by hadolint and docker-compose, and against what they refer to."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.settings import load_settings
from tests.deploy.services import DEPLOY, ROOT, program

FILES = ("Containerfile.router", "Containerfile.engine", "Containerfile.prepare")
ENGINES = ("fast", "balanced", "precise")
SECRETS = {"ENGINE_KEY": "an-engine-key", "GRAFANA_PASSWORD": "a-password"}


def compose(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [
        program("docker-compose"),
        "--env-file",
        "compose.env.example",
        "-f",
        "compose.yaml",
        *arguments,
    ]
    return subprocess.run(
        argv,
        cwd=DEPLOY,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    done = compose("config", "--format", "json", **SECRETS)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["services"]
    return found


@pytest.mark.parametrize("name", FILES)
def test_container_files(name: str) -> None:
    """Hadolint finds nothing; they end as a user of their own, start without a shell; servers can be asked for their health."""
    done = subprocess.run(
        [program("hadolint"), str(DEPLOY / name)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    text = (DEPLOY / name).read_text("utf-8")
    # so that a release can pin one digest
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}"}
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
    assert re.search(r'^ENTRYPOINT \["', text, re.MULTILINE)
    asked = {
        "Containerfile.prepare": r"NONE$",
        "Containerfile.router": r".*\\\n +CMD \[.*exec qarr health\"\]$",
        # Docker gives every container its client's proxies
        "Containerfile.engine": r".*\\\n +CMD \[.*ProxyHandler\({}\)",
    }
    assert re.search(f"^HEALTHCHECK {asked[name]}", text, re.MULTILINE)
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
        for source in line.split()
    }
    assert all((ROOT / source).exists() for source in copied)
    allowed = (DEPLOY / f"{name}.dockerignore").read_text("utf-8").splitlines()
    assert all(f"!{source.split('/')[0]}" in allowed for source in copied)
    # nothing else gets into the build at all: no keys, no history
    assert "*" in allowed


def test_compose_accepts_the_file(services: dict[str, Any]) -> None:
    """It is valid, and does not start without its secrets."""
    assert compose("config", "-q", **SECRETS).returncode == 0
    for name in SECRETS:
        refused = compose(
            "config",
            "-q",
            **{other: value for other, value in SECRETS.items() if other != name},
        )
        assert refused.returncode != 0
        assert name in refused.stderr
    assert len(services) == 9


def test_services_are_hardened(services: dict[str, Any]) -> None:
    """Ports are published on loopback only; roots are read-only, rights are dropped, health is asked for."""
    for name, service in services.items():
        assert all(
            port["host_ip"] == "127.0.0.1" for port in service.get("ports", [])
        ), name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        # engines' are in their image
        assert "healthcheck" in service or name in ENGINES, name
        check = " ".join(service.get("healthcheck", {}).get("test", ()))
        assert "-Yoff" in check or "wget" not in check, name  # as there
        assert not service.get("privileged"), name
    assert not any(services[name].get("ports") for name in (*ENGINES, "redis"))


def test_services_start_in_order(services: dict[str, Any]) -> None:
    """Engines one after another on one GPU, then the router."""
    for later, earlier in (
        ("balanced", "fast"),
        ("precise", "balanced"),
        ("router", "precise"),
        ("router", "redis"),
    ):
        assert services[later]["depends_on"][earlier]["condition"] == "service_healthy"
    shares = []
    for name in ENGINES:
        (device,) = services[name]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["device_ids"], device["capabilities"]) == (
            "nvidia",
            ["0"],
            ["gpu"],
        )
        command = services[name]["command"]
        shares.append(float(command[command.index("--gpu-memory-utilization") + 1]))
    assert sum(shares) < 0.95


def test_the_router_fits_its_engines(
    services: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its variables are settings, its tiers are as long as the engines', and its stop leaves answers their time."""
    router = services["router"]
    for name, value in router["environment"].items():
        if name.startswith("QARR_"):
            monkeypatch.setenv(name, value)
    settings = load_settings()
    for name in ENGINES:
        command = services[name]["command"]
        assert (
            int(command[command.index("--max-model-len") + 1])
            == getattr(settings.tiers, name).max_model_len
        )
        assert (
            router["command"][router["command"].index(f"--{name}") + 1]
            == f"http://{name}:8000"
        )
        assert services[name]["environment"]["VLLM_API_KEY"] == settings.engine.api_key
    assert int(router["stop_grace_period"].rstrip("s")) > settings.server.drain_s + 10
    assert "{trace_id}" in (settings.telemetry.trace_url or "")


def test_whatever_is_mounted_or_named_is_there(services: dict[str, Any]) -> None:
    """Files that are mounted exist, and every address in a mounted configuration is a service's."""
    for name, service in services.items():
        for mount in service.get("volumes", []):
            if mount["type"] == "bind" and not mount["source"].startswith(
                "/srv/models"
            ):
                assert Path(mount["source"]).exists(), (name, mount["source"])
                assert mount["read_only"] is True
    targets = {path.name for path in (DEPLOY / "compose-targets").glob("*.yml")}
    assert targets == {
        path.name for path in (DEPLOY / "prometheus/targets").glob("*.yml")
    }
    hosts = {
        target.partition(":")[0]
        for path in (DEPLOY / "compose-targets").glob("*.yml")
        for group in yaml.safe_load(path.read_text("utf-8"))
        for target in group["targets"]
    }
    grafana = (DEPLOY / "grafana/provisioning/datasources/qarr.yml").read_text("utf-8")
    hosts |= set(re.findall(r"url: http://([\w-]+):", grafana))
    assert hosts == {"router", "prometheus", "alertmanager", "jaeger", *ENGINES}
    assert hosts <= set(services)
