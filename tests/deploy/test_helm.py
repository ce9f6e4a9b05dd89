"""The chart with each of its samples: rendered and linted by Helm, validated strictly, and compared with what it is made from."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import re
import subprocess
import tomllib
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from router.settings import load_settings
from tests.deploy.charts import (
    NAMESPACE,
    SAMPLES,
    Release,
    argument,
    image_environment,
    release,
    rendered,
    tool,
)
from tests.deploy.services import DEPLOY, program
from tests.deploy.test_prometheus import NAME, known
from tests.unit.router_stack import router_stack
from tiers.speed import SpeedModel

if TYPE_CHECKING:
    from pathlib import Path

NAMES = [path.stem for path in SAMPLES]
# Where a pod may write: volumes of its own, the checkpoints that an init container makes, the routers' profiles.
WRITTEN = {
    "/tmp",  # noqa: S108
    "/dev/shm",  # noqa: S108
    "/models",
    "/var/cache/qarr",
    "/var/cache/engine",
    "/var/lib/qarr/profiles",
}
RUNBOOKS = '{{ or $externalLabels.runbooks (printf "%s/consoles/runbooks.html" $externalURL) }}'
EVERYTHING = {
    "engineKey": {"existingSecret": "", "value": "an-engine-key"},
    "auth": {"existingSecret": "", "keys": '{"version": 1, "keys": []}'},
    "redis": {"existingSecret": "", "url": "redis://:password@redis:6379/0"},
    "checkpoints": {
        "claim": "",
        "prepare": {
            "enabled": True,
            "model": "owner/model",
            "args": ["--group-size", "64"],
        },
    },
    "engines": {
        "env": {"A": "b"},
        "extraArgs": ["--max-logprobs=5"],
        "priorityClassName": "high",
        "runtimeClassName": "nvidia",
    },
    "networkPolicy": {"clients": [{"podSelector": {}}]},
    "monitoring": {"rules": {"runbooks": "https://git.example/qarr/docs/runbooks.md"}},
}


@pytest.fixture(scope="module")
def releases() -> dict[str, Release]:
    return {
        **{name: release(name) for name in NAMES},
        "everything": release("cluster", EVERYTHING),
    }


def test_every_sample_is_there() -> None:
    """A laptop, a node, a cluster; each says how it is installed."""
    assert NAMES == ["cluster", "laptop", "one-node"]
    for path in SAMPLES:
        assert f"-f deploy/helm/values/{path.name}" in path.read_text("utf-8")


def test_manifests_are_valid(releases: dict[str, Release]) -> None:
    """Kubernetes' own schemas and the operators' take every field of every manifest; a misspelt one would be found."""
    for made in releases.values():
        names = [(m["kind"], m["metadata"]["name"]) for m in made.manifests]
        assert len(set(names)) == len(names)
    scaled = copy.deepcopy(releases["cluster"].of_kind("ScaledObject")["qarr-fast"])
    scaled["spec"]["triggers"][0]["metricKind"] = "Value"
    owner = copy.deepcopy(releases["cluster"].of_kind("StatefulSet")["qarr-fast"])
    owner["spec"]["template"]["spec"]["containers"][0]["liveness"] = {}
    found = tool(
        "check",
        [*(m for made in releases.values() for m in made.manifests), scaled, owner],
    )
    assert ["metricKind" in text or "liveness" in text for text in found] == [
        True,
        True,
    ], found


@pytest.mark.parametrize(
    ("over", "text"),
    [
        ({"router": {"replica": 3}}, "'/router': additional properties 'replica' not allowed"),
        ({"tiers": {"fast": {"gpus": "two"}}}, "'/tiers/fast/gpus': got string, want integer"),
        ({"model": {"name": ""}}, "'/model/name'"),
        ({"engineKey": {"existingSecret": ""}}, "engineKey: give value (openssl rand -hex 24), or existingSecret"),
        ({"auth": {"existingSecret": ""}}, "auth: give keys or existingSecret"),
        ({"auth": {"allowKeyless": True}}, "auth: allowKeyless does not go with keys"),
        ({"redis": {"url": "redis://redis"}}, "redis: give url or existingSecret, not both"),
        ({"router": {"tokenizer": "best"}}, "router.tokenizer: there is no enabled tier best; allowed: balanced, fast"),
        ({"tiers": {"int8": {"gpus": 1}}}, "tiers.int8.path is needed"),
        ({"tiers": {"fast": {"minReplicas": 9}}}, "tiers.fast: minReplicas is above maxReplicas"),
        ({"tiers": {"fast": {"extraArgs": ["--port=1"]}}}, "tiers.fast.extraArgs: --port=1 is the chart's own"),
        ({"autoscaling": {"prometheusUrl": ""}}, "autoscaling.prometheusUrl is needed"),
        ({"lmcache": {"remoteUrl": ""}}, "lmcache.remoteUrl is needed"),
        ({"ingress": {"host": ""}}, "ingress.host is needed"),
        ({"monitoring": {"keySecret": ""}}, "monitoring.keySecret is needed"),
        ({"router": {"settings": {"engine": {"api_key": "k"}}}}, "router.settings.engine.api_key: settings are in a ConfigMap"),
        ({"tiers": {t: {"enabled": False} for t in ("fast", "balanced", "precise")}}, "tiers: all are disabled"),
        (
            {"checkpoints": {"prepare": {"enabled": True}}, "tiers": {"fast": {"path": "awq"}}},
            "tiers.fast.path: 'qarr model prepare' makes /models/fast",
        ),
    ],
)  # fmt: skip
def test_wrong_values_are_told(over: dict[str, Any], text: str) -> None:
    """The error names the value, what is wrong, and what is allowed; no secret is in it."""
    assert text in rendered("cluster", over)["error"]


def test_pods_are_hardened(releases: dict[str, Release]) -> None:
    """No root, no writable root file system, no capability, no token, no variables of other Services."""
    for made in releases.values():
        assert not any(
            a["automountServiceAccountToken"]
            for a in made.of_kind("ServiceAccount").values()
        )
        for pod in made.pods.values():
            assert pod["automountServiceAccountToken"] is False
            # QARR_ROUTER_PORT=tcp://... is no setting
            assert pod["enableServiceLinks"] is False
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["runAsUser"] == 10001
            for container in (*pod["containers"], *pod.get("initContainers", ())):
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                }
                written = {
                    m["mountPath"]
                    for m in container["volumeMounts"]
                    if not m.get("readOnly")
                }
                assert written <= WRITTEN


def test_pods_have_time_to_leave(releases: dict[str, Release]) -> None:
    """The grace period holds the preStop command, open answers, and a rest; probes ask our own endpoints."""
    for made in releases.values():
        settings = tomllib.loads(made.settings)
        for name, pod in made.pods.items():
            (container,) = pod["containers"]
            _, waits = container["lifecycle"]["preStop"]["exec"]["command"]
            if name == "qarr-router":
                drains = settings["server"]["drain_s"]
                paths = ["/healthz", "/healthz", "/readyz"]
            else:
                drains = int(argument(container, "--shutdown-timeout"))
                paths = ["/health"] * 3
                # routers look at the DNS meanwhile
                assert int(waits) > 2 * settings["discovery"]["interval_s"]
            assert pod["terminationGracePeriodSeconds"] >= int(waits) + drains + 10
            probes = (
                container[f"{kind}Probe"]["httpGet"]["path"]
                for kind in ("startup", "liveness", "readiness")
            )
            assert list(probes) == paths


def test_containers_are_those_of_the_images(releases: dict[str, Release]) -> None:
    """Commands start as the images' entry points do; what is mounted for writing is where the images write."""
    for path, name in (
        ("Containerfile.router", "qarr-router"),
        ("Containerfile.engine", "qarr-precise"),
    ):
        text = (DEPLOY / path).read_text("utf-8").replace("\\\n", "")
        entry = json.loads(re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)[0])
        (container,) = releases["laptop"].pods[name]["containers"]
        own = [
            part
            for a in (*container["command"], *container.get("args", ()))
            for part in a.split("=", 1)
        ]
        assert own[: len(entry)] == entry
        home = (
            image_environment(path).get("QARR_CACHE_DIR")
            or image_environment(path)["HOME"]
        )
        assert home in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_engines_get_gpus_keys_and_caches(releases: dict[str, Release]) -> None:
    """GPUs are counted once for all, several are tensor parallel, LMCache and prefix caching are as the values say."""
    node = releases["one-node"]
    gpus = sum(
        s["spec"]["replicas"]
        * s["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"][
            "nvidia.com/gpu"
        ]
        for s in node.of_kind("StatefulSet").values()
    )
    assert gpus == 8
    precise = node.pods["qarr-precise"]["containers"][0]
    assert argument(precise, "--tensor-parallel-size") == "2"
    paths = {
        argument(pod["containers"][0], "--model")
        for n, pod in node.pods.items()
        if n != "qarr-router"
    }
    assert len(paths) == 3  # LMCache tells models apart by their path alone
    assert {
        "--enable-prefix-caching",
        "--tool-call-parser=hermes",
        "--tool-strict-level=parameter",
    } < set(precise["args"])
    off = release("one-node", {"engines": {"prefixCaching": False}}).pods[
        "qarr-precise"
    ]["containers"][0]
    assert "--no-enable-prefix-caching" in off["args"]
    cluster = releases["cluster"].pods["qarr-fast"]["containers"][0]
    assert (
        json.loads(argument(cluster, "--kv-transfer-config"))["kv_connector"]
        == "LMCacheConnectorV1"
    )
    assert {
        "name": "LMCACHE_REMOTE_URL",
        "value": "lm://lmcache-server:65432",
    } in cluster["env"]
    laptop = releases["laptop"].pods["qarr-precise"]["containers"][0]
    assert "--enforce-eager" in laptop["args"]
    assert "nvidia.com/gpu" not in laptop["resources"]["limits"]


def test_secrets_are_in_secrets_alone(releases: dict[str, Release]) -> None:
    """Keys and addresses with passwords are in no other manifest and not in the notes."""
    made = releases["everything"]
    secrets = {
        base64.b64decode(v).decode()
        for s in made.of_kind("Secret").values()
        for v in s["data"].values()
    }
    assert secrets == {
        "an-engine-key",
        '{"version": 1, "keys": []}',
        "redis://:password@redis:6379/0",
    }
    others = (
        json.dumps([m for m in made.manifests if m["kind"] != "Secret"]) + made.notes
    )
    assert not any(word in others for word in ("an-engine-key", "password@"))
    assert releases["cluster"].of_kind("Secret") == {}


def test_changes_roll_pods(releases: dict[str, Release]) -> None:
    """A changed setting rolls the routers, a changed engines' key all pods; a new version of the chart rolls no engine."""

    def templates(made: Release) -> dict[str, Any]:
        owners = {**made.of_kind("Deployment"), **made.of_kind("StatefulSet")}
        return {name: owner["spec"]["template"] for name, owner in owners.items()}

    before = templates(releases["everything"])
    setting = templates(
        release(
            "cluster",
            {**EVERYTHING, "router": {"settings": {"limits": {"max_tokens": 9}}}},
        )
    )
    assert {name for name in before if before[name] != setting[name]} == {"qarr-router"}
    key = templates(
        release(
            "cluster",
            {**EVERYTHING, "engineKey": {"existingSecret": "", "value": "another"}},
        )
    )
    assert all(before[name] != key[name] for name in before)
    assert "helm.sh/chart" not in json.dumps(before)


@pytest.mark.parametrize("name", [*NAMES, "everything"])
def test_settings_are_settings(
    releases: dict[str, Release], name: str, tmp_path: Path
) -> None:
    """The router reads the rendered file; it agrees with the engines' arguments, and leaves out disabled tiers."""
    path = tmp_path / "qarr.toml"
    path.write_text(releases[name].settings)
    settings = load_settings(path)
    enabled = {
        n.removeprefix("qarr-"): pod
        for n, pod in releases[name].pods.items()
        if n != "qarr-router"
    }
    for tier in ("fast", "balanced", "precise"):
        own = getattr(settings.tiers, tier)
        if tier not in enabled:
            assert (own.replicas, own.dns) == (0, "")
            continue
        assert own.dns == f"http://qarr-{tier}.{NAMESPACE}.svc:8000"
        service = releases[name].of_kind("Service")[f"qarr-{tier}"]["spec"]
        assert (service["clusterIP"], service["ports"][0]["port"]) == ("None", 8000)
        container = enabled[tier]["containers"][0]
        assert own.max_model_len == int(argument(container, "--max-model-len"))
        assert own.max_num_seqs == int(argument(container, "--max-num-seqs"))
    if name == "cluster":
        assert settings.admission.max_waiting == 512


def test_engines_are_reached_by_routers_only(releases: dict[str, Release]) -> None:
    """Their policy selects all engines and names routers, and Prometheus where the values do."""
    for name, others in (("laptop", 0), ("cluster", 1)):
        made = releases[name]
        policy = made.of_kind("NetworkPolicy")["qarr-engines"]["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        labels = [
            s["spec"]["template"]["metadata"]["labels"]
            for s in made.of_kind("StatefulSet").values()
        ]
        assert all(
            policy["podSelector"]["matchLabels"].items() <= own.items()
            for own in labels
        )
        (routers, *prometheus) = policy["ingress"]
        router = made.of_kind("Deployment")["qarr-router"]["spec"]["template"][
            "metadata"
        ]["labels"]
        assert routers["from"] == [{"podSelector": {"matchLabels": router}}]
        assert len(prometheus) == others


def parse(queries: list[str], folder: Path) -> None:
    rules = folder / "rules.yml"
    made = [
        {"record": f"q{number}", "expr": query} for number, query in enumerate(queries)
    ]
    rules.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": made}]}))
    subprocess.run(
        [program("promtool"), "check", "rules", str(rules)],
        check=True,
        capture_output=True,
        timeout=100,
    )


@pytest.mark.anyio
async def test_autoscalers_ask_for_metrics_that_exist(
    releases: dict[str, Release], tmp_path: Path
) -> None:
    """Prometheus parses every query; its metrics and labels are on a router's page."""
    async with router_stack(tmp_path) as stack:
        for replica in stack.fleet.replicas:
            # without one nothing is predicted
            replica.update(speed=SpeedModel(1.0, 2.0, 10.0))
        page = ""
        async with asyncio.timeout(30):
            while not re.search(
                r'^qarr_kv_cache_usage_ratio{.*tier="fast"', page, re.MULTILINE
            ):  # engines' gauges are read every few seconds
                page = (await stack.client.get(f"{stack.url}/metrics")).text
                await asyncio.sleep(0.05)
    queries: list[str] = []
    for tier, scaled in releases["cluster"].of_kind("ScaledObject").items():
        triggers = scaled["spec"]["triggers"]
        assert [t["name"] for t in triggers] == ["queue", "kv-cache", "ttft"]
        assert scaled["spec"]["scaleTargetRef"]["name"] in releases["cluster"].of_kind(
            "StatefulSet"
        )
        assert (
            "replicas" not in releases["cluster"].of_kind("StatefulSet")[tier]["spec"]
        )
        queries += [t["metadata"]["query"] for t in triggers]
    parse(queries, tmp_path)
    asked = {name for query in queries for name in NAME.findall(query)}
    assert len(asked) == 4
    assert asked <= known(page)
    labelled = {
        name
        for name in asked
        if re.search(rf'^{name}{{.*tier="fast"', page, re.MULTILINE)
    }
    assert labelled == asked


def test_monitoring_is_that_of_the_repository(releases: dict[str, Release]) -> None:
    """Rules and dashboards are those of deploy/prometheus and deploy/grafana, but for the links to runbooks."""
    for name, runbooks in (
        ("cluster", RUNBOOKS),
        ("everything", "https://git.example/qarr/docs/runbooks.md"),
    ):
        made = releases[name]
        found = {
            f"{n.removeprefix('qarr-')}.yml": m["spec"]
            for n, m in made.of_kind("PrometheusRule").items()
        }
        files = {
            path.name: path.read_text("utf-8")
            for path in (DEPLOY / "prometheus/rules").glob("*.yml")
        }
        expected = {
            n: yaml.safe_load(t.replace(RUNBOOKS, runbooks)) for n, t in files.items()
        }
        assert found == expected
        dashboards = {
            k: v
            for n, m in made.of_kind("ConfigMap").items()
            if "-dashboard-" in n
            for k, v in m["data"].items()
        }
        assert dashboards == {
            path.name: path.read_text("utf-8")
            for path in (DEPLOY / "grafana/dashboards").glob("*.json")
        }
    routers, engines = (
        releases["cluster"].of_kind("ServiceMonitor")[f"qarr-{n}"]
        for n in ("router", "engines")
    )
    scraped = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text("utf-8"))[
        "scrape_configs"
    ]
    jobs = [
        m["spec"]["endpoints"][0]["relabelings"][0]["replacement"]
        for m in (routers, engines)
    ]
    assert jobs == [config["job_name"] for config in scraped]


def test_callers_reach_what_nginx_lets_through(releases: dict[str, Release]) -> None:
    """The Ingress has the paths of deploy/nginx, and no other."""
    (ingress,) = releases["cluster"].of_kind("Ingress").values()
    paths = {path["path"] for path in ingress["spec"]["rules"][0]["http"]["paths"]}
    text = (DEPLOY / "nginx/qarr.conf").read_text("utf-8")
    assert paths == {
        found.rstrip("/") for found in re.findall(r"location (?:= )?(/\S+) \{", text)
    }
