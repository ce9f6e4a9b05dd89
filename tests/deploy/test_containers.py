"""Container files and the compose file, checked by hadolint and docker-compose, and against the files that they name."""

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
    command = [program("docker-compose"), "--env-file", "compose.env.example"]
    return subprocess.run(
        [*command, "-f", "compose.yaml", *arguments],
        cwd=DEPLOY,
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def option_of(command: list[str], name: str) -> str:
    """Return the value that follows an option."""
    return command[command.index(name) + 1]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    process = compose("config", "--format", "json", **SECRETS)
    assert process.returncode == 0, process.stderr
    by_name: dict[str, Any] = json.loads(process.stdout)["services"]
    return by_name


@pytest.mark.parametrize("name", FILES)
def test_container_files(name: str) -> None:
    """Hadolint finds no fault; images run as a user of their own, start without a shell, and servers have a health check."""
    process = subprocess.run(
        [program("hadolint"), str(DEPLOY / name)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert process.returncode == 0, process.stdout
    text = (DEPLOY / name).read_text("utf-8")
    # With one base image a release can pin one digest.
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}"}
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
    assert re.search(r'^ENTRYPOINT \["', text, re.MULTILINE)
    health_checks = {
        "Containerfile.prepare": r"NONE$",
        "Containerfile.router": r".*\\\n +CMD \[.*exec qarr health\"\]$",
        # Docker gives every container its client's proxies, which the check must not use.
        "Containerfile.engine": r".*\\\n +CMD \[.*ProxyHandler\({}\)",
    }
    assert re.search(f"^HEALTHCHECK {health_checks[name]}", text, re.MULTILINE)
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
    allowed = (DEPLOY / f"{name}.dockerignore").read_text("utf-8").splitlines()
    for source in " ".join(lines).split():
        assert (ROOT / source).exists(), source
        assert f"!{source.split('/')[0]}" in allowed, source
    # Nothing else gets into the build: no keys, no history.
    assert "*" in allowed


def test_compose_accepts_the_file(services: dict[str, Any]) -> None:
    """The file is valid, and services do not start without its secrets."""
    assert compose("config", "-q", **SECRETS).returncode == 0
    for name in SECRETS:
        others = {key: value for key, value in SECRETS.items() if key != name}
        refused = compose("config", "-q", **others)
        assert refused.returncode != 0
        assert name in refused.stderr
    assert len(services) == 9


def test_services_are_hardened(services: dict[str, Any]) -> None:
    """Ports are published on loopback only, roots are read-only, rights are dropped, and health is checked."""
    for name, service in services.items():
        for port in service.get("ports", []):
            assert port["host_ip"] == "127.0.0.1", name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        # The engines' image has their health check.
        assert "healthcheck" in service or name in ENGINES, name
        check = " ".join(service.get("healthcheck", {}).get("test", ()))
        # wget must not use the proxies either.
        assert "-Yoff" in check or "wget" not in check, name
        assert not service.get("privileged"), name
    assert not any(services[name].get("ports") for name in (*ENGINES, "redis"))


def test_services_start_in_order(services: dict[str, Any]) -> None:
    """Engines start one after another on one GPU, then the router starts."""
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
        assert device["driver"] == "nvidia"
        assert device["device_ids"] == ["0"]
        assert device["capabilities"] == ["gpu"]
        command = services[name]["command"]
        shares.append(float(option_of(command, "--gpu-memory-utilization")))
    assert sum(shares) < 0.95


def test_the_router_fits_its_engines(
    services: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its variables are settings, its tiers have the engines' lengths, and answers have time to finish when it stops."""
    router = services["router"]
    for name, value in router["environment"].items():
        if name.startswith("QARR_"):
            monkeypatch.setenv(name, value)
    settings = load_settings()
    for name in ENGINES:
        length = option_of(services[name]["command"], "--max-model-len")
        assert int(length) == getattr(settings.tiers, name).max_model_len
        assert option_of(router["command"], f"--{name}") == f"http://{name}:8000"
        assert services[name]["environment"]["VLLM_API_KEY"] == settings.engine.api_key
    assert int(router["stop_grace_period"].rstrip("s")) > settings.server.drain_s + 10
    assert "{trace_id}" in (settings.telemetry.trace_url or "")


def test_whatever_is_mounted_or_named_is_there(services: dict[str, Any]) -> None:
    """Files that are mounted exist, and every address in a mounted configuration is a service's."""
    for name, service in services.items():
        for mount in service.get("volumes", []):
            source = mount["source"]
            if mount["type"] == "bind" and not source.startswith("/srv/models"):
                assert Path(source).exists(), (name, source)
                assert mount["read_only"] is True
    files = list((DEPLOY / "compose-targets").glob("*.yml"))
    examples = (DEPLOY / "prometheus/targets").glob("*.yml")
    assert {path.name for path in files} == {path.name for path in examples}
    hosts = set()
    for path in files:
        for group in yaml.safe_load(path.read_text("utf-8")):
            hosts |= {target.partition(":")[0] for target in group["targets"]}
    grafana = (DEPLOY / "grafana/provisioning/datasources/qarr.yml").read_text("utf-8")
    hosts |= set(re.findall(r"url: http://([\w-]+):", grafana))
    assert hosts == {"router", "prometheus", "alertmanager", "jaeger", *ENGINES}
    assert hosts <= set(services)
