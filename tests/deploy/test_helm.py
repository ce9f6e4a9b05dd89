"""The chart with each of its samples: rendered and linted by Helm, validated strictly, and compared with its sources."""

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
from tests.deploy.metric_names import NAME, metrics_on
from tests.deploy.services import DEPLOY, program
from tests.unit.router_stack import router_stack
from tiers.speed import SpeedModel

if TYPE_CHECKING:
    from pathlib import Path

NAMES = [path.stem for path in SAMPLES]
# A pod may write to volumes of its own, to the checkpoints that an init container makes, and to the profiles.
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
    "tiers": {"fast": {"checkpoint": "owner/Model-NVFP4", "precision": "nvfp4"}},
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
    """There are a laptop, a node and a cluster, and each sample says how it is installed."""
    assert NAMES == ["cluster", "laptop", "one-node"]
    for path in SAMPLES:
        assert f"-f deploy/helm/values/{path.name}" in path.read_text("utf-8")


def test_manifests_are_valid(releases: dict[str, Release]) -> None:
    """The schemas of Kubernetes and of the operators allow every field of every manifest, and no misspelt one."""
    manifests: list[dict[str, Any]] = []
    for made in releases.values():
        names = [(item["kind"], item["metadata"]["name"]) for item in made.manifests]
        assert len(set(names)) == len(names)
        manifests += made.manifests
    scaled = copy.deepcopy(releases["cluster"].of_kind("ScaledObject")["qarr-fast"])
    scaled["spec"]["triggers"][0]["metricKind"] = "Value"
    owner = copy.deepcopy(releases["cluster"].of_kind("StatefulSet")["qarr-fast"])
    owner["spec"]["template"]["spec"]["containers"][0]["liveness"] = {}
    faults = tool("check", [*manifests, scaled, owner])
    assert len(faults) == 2, faults
    assert "metricKind" in faults[0] or "liveness" in faults[0], faults
    assert "metricKind" in faults[1] or "liveness" in faults[1], faults


@pytest.mark.parametrize(
    ("over", "text"),
    [
        (
            {"router": {"replica": 3}},
            "'/router': additional properties 'replica' not allowed",
        ),
        (
            {"tiers": {"fast": {"gpus": "two"}}},
            "'/tiers/fast/gpus': got string, want integer",
        ),
        ({"model": {"name": ""}}, "'/model/name'"),
        (
            {"engineKey": {"existingSecret": ""}},
            "engineKey: give value (openssl rand -hex 24), or existingSecret",
        ),
        ({"auth": {"existingSecret": ""}}, "auth: give keys or existingSecret"),
        ({"auth": {"allowKeyless": True}}, "auth: allowKeyless does not go with keys"),
        (
            {"redis": {"url": "redis://redis"}},
            "redis: give url or existingSecret, not both",
        ),
        (
            {"router": {"tokenizer": "best"}},
            "router.tokenizer: there is no enabled tier best; allowed: balanced, fast",
        ),
        ({"tiers": {"int8": {"gpus": 1}}}, "tiers.int8.path is needed"),
        (
            {"tiers": {"fast": {"minReplicas": 9}}},
            "tiers.fast: minReplicas is above maxReplicas",
        ),
        (
            {"tiers": {"fast": {"extraArgs": ["--port=1"]}}},
            "tiers.fast.extraArgs: --port=1 is the chart's own",
        ),
        ({"autoscaling": {"prometheusUrl": ""}}, "autoscaling.prometheusUrl is needed"),
        ({"lmcache": {"remoteUrl": ""}}, "lmcache.remoteUrl is needed"),
        ({"ingress": {"host": ""}}, "ingress.host is needed"),
        ({"monitoring": {"keySecret": ""}}, "monitoring.keySecret is needed"),
        (
            {"router": {"settings": {"engine": {"api_key": "k"}}}},
            "router.settings.engine.api_key: settings are in a ConfigMap",
        ),
        (
            {
                "tiers": {
                    "fast": {"enabled": False},
                    "balanced": {"enabled": False},
                    "precise": {"enabled": False},
                }
            },
            "tiers: all are disabled",
        ),
        (
            {
                "checkpoints": {"prepare": {"enabled": True}},
                "tiers": {"fast": {"path": "awq"}},
            },
            "tiers.fast.path: 'qarr model prepare' makes /models/fast",
        ),
        (
            {"tiers": {"fast": {"checkpoint": "owner/Model-NVFP4"}}},
            "tiers.fast.checkpoint: only checkpoints.prepare fetches it",
        ),
        ({"tiers": {"fast": {"checkpoint": "no id"}}}, "'/tiers/fast/checkpoint'"),
    ],
)
def test_wrong_values_are_told(over: dict[str, Any], text: str) -> None:
    """The error names the value, what is wrong, and what is allowed."""
    assert text in rendered("cluster", over)["error"]


def test_a_published_checkpoint_reaches_what_fetches_it(
    releases: dict[str, Release],
) -> None:
    """In every engine's init container: whichever is first makes and fetches all of them. Other tiers are made."""
    pods = releases["everything"].of_kind("StatefulSet")
    for name in ("qarr-fast", "qarr-precise"):
        (prepare,) = pods[name]["spec"]["template"]["spec"]["initContainers"]
        variables = {
            variable["name"]: variable.get("value")
            for variable in prepare["env"]
            if variable["name"].startswith("QARR_TIERS__")
        }
        assert variables == {"QARR_TIERS__FAST__CHECKPOINT": "owner/Model-NVFP4"}


def test_pods_are_hardened(releases: dict[str, Release]) -> None:
    """Pods have no root, no writable root file system, no capability, no token, and no variables of other Services."""
    for made in releases.values():
        for account in made.of_kind("ServiceAccount").values():
            assert not account["automountServiceAccountToken"]
        for pod in made.pods.values():
            assert pod["automountServiceAccountToken"] is False
            # A variable such as QARR_ROUTER_PORT=tcp://... is not a setting.
            assert pod["enableServiceLinks"] is False
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["runAsUser"] == 10001
            for container in (*pod["containers"], *pod.get("initContainers", ())):
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                }
                for mount in container["volumeMounts"]:
                    assert mount.get("readOnly") or mount["mountPath"] in WRITTEN


def test_pods_have_time_to_leave(releases: dict[str, Release]) -> None:
    """The grace period is longer than the preStop command and open answers; probes ask our own endpoints."""
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
                # Routers look up the DNS meanwhile.
                assert int(waits) > 2 * settings["discovery"]["interval_s"]
            assert pod["terminationGracePeriodSeconds"] >= int(waits) + drains + 10
            kinds = ("startup", "liveness", "readiness")
            for kind, path in zip(kinds, paths, strict=True):
                assert container[f"{kind}Probe"]["httpGet"]["path"] == path, kind


def test_containers_are_those_of_the_images(releases: dict[str, Release]) -> None:
    """Commands start as the images' entry points do, and volumes are mounted where the images write."""
    for path, name in (
        ("Containerfile.router", "qarr-router"),
        ("Containerfile.engine", "qarr-precise"),
    ):
        text = (DEPLOY / path).read_text("utf-8").replace("\\\n", "")
        entry = json.loads(re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)[0])
        (container,) = releases["laptop"].pods[name]["containers"]
        parts: list[str] = []
        for argument_text in (*container["command"], *container.get("args", ())):
            parts += argument_text.split("=", 1)
        assert parts[: len(entry)] == entry
        variables = image_environment(path)
        home = variables.get("QARR_CACHE_DIR") or variables["HOME"]
        assert home in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_engines_get_gpus_keys_and_caches(releases: dict[str, Release]) -> None:
    """GPUs add up, several of them are tensor parallel, and LMCache and prefix caching are as the values say."""
    node = releases["one-node"]
    gpus = 0
    for name, owner in node.of_kind("StatefulSet").items():
        limits = node.pods[name]["containers"][0]["resources"]["limits"]
        gpus += owner["spec"]["replicas"] * limits["nvidia.com/gpu"]
    assert gpus == 8
    precise = node.pods["qarr-precise"]["containers"][0]
    assert argument(precise, "--tensor-parallel-size") == "2"
    paths = {
        argument(pod["containers"][0], "--model")
        for name, pod in node.pods.items()
        if name != "qarr-router"
    }
    # LMCache tells models apart only by their paths.
    assert len(paths) == 3
    assert {
        "--enable-prefix-caching",
        "--tool-call-parser=hermes",
        "--tool-strict-level=parameter",
    } < set(precise["args"])
    without = release("one-node", {"engines": {"prefixCaching": False}})
    arguments = without.pods["qarr-precise"]["containers"][0]["args"]
    assert "--no-enable-prefix-caching" in arguments
    cluster = releases["cluster"].pods["qarr-fast"]["containers"][0]
    transfer = json.loads(argument(cluster, "--kv-transfer-config"))
    assert transfer["kv_connector"] == "LMCacheConnectorV1"
    url = {"name": "LMCACHE_REMOTE_URL", "value": "lm://lmcache-server:65432"}
    assert url in cluster["env"]
    laptop = releases["laptop"].pods["qarr-precise"]["containers"][0]
    assert "--enforce-eager" in laptop["args"]
    assert "nvidia.com/gpu" not in laptop["resources"]["limits"]


def test_secrets_are_in_secrets_alone(releases: dict[str, Release]) -> None:
    """Keys, and addresses with passwords, are in no other manifest and not in the notes."""
    made = releases["everything"]
    secrets = set()
    for secret in made.of_kind("Secret").values():
        encoded = secret["data"].values()
        secrets |= {base64.b64decode(value).decode() for value in encoded}
    assert secrets == {
        "an-engine-key",
        '{"version": 1, "keys": []}',
        "redis://:password@redis:6379/0",
    }
    others = [item for item in made.manifests if item["kind"] != "Secret"]
    text = json.dumps(others) + made.notes
    assert "an-engine-key" not in text
    assert "password@" not in text
    assert releases["cluster"].of_kind("Secret") == {}


def test_changes_roll_pods(releases: dict[str, Release]) -> None:
    """A changed setting rolls the routers, a changed engines' key all pods; a new version of the chart rolls no engine."""

    def templates(made: Release) -> dict[str, Any]:
        owners = {**made.of_kind("Deployment"), **made.of_kind("StatefulSet")}
        return {name: owner["spec"]["template"] for name, owner in owners.items()}

    before = templates(releases["everything"])
    other_setting = {"router": {"settings": {"limits": {"max_tokens": 9}}}}
    changed = templates(release("cluster", {**EVERYTHING, **other_setting}))
    rolled = {name for name in before if before[name] != changed[name]}
    assert rolled == {"qarr-router"}
    other_key = {"engineKey": {"existingSecret": "", "value": "another"}}
    changed = templates(release("cluster", {**EVERYTHING, **other_key}))
    assert {name for name in before if before[name] != changed[name]} == set(before)
    assert "helm.sh/chart" not in json.dumps(before)


@pytest.mark.parametrize("name", [*NAMES, "everything"])
def test_settings_are_settings(
    releases: dict[str, Release], name: str, tmp_path: Path
) -> None:
    """The router reads the rendered file, which agrees with the engines' arguments and leaves out disabled tiers."""
    path = tmp_path / "qarr.toml"
    path.write_text(releases[name].settings)
    settings = load_settings(path)
    enabled = {
        owner.removeprefix("qarr-"): pod
        for owner, pod in releases[name].pods.items()
        if owner != "qarr-router"
    }
    for tier in ("fast", "balanced", "precise"):
        own = getattr(settings.tiers, tier)
        if tier not in enabled:
            assert own.replicas == 0
            assert own.dns == ""
            continue
        assert own.dns == f"http://qarr-{tier}.{NAMESPACE}.svc:8000"
        service = releases[name].of_kind("Service")[f"qarr-{tier}"]["spec"]
        assert service["clusterIP"] == "None"
        assert service["ports"][0]["port"] == 8000
        container = enabled[tier]["containers"][0]
        assert own.max_model_len == int(argument(container, "--max-model-len"))
        assert own.max_num_seqs == int(argument(container, "--max-num-seqs"))
    if name == "cluster":
        assert settings.admission.max_waiting == 512


def test_engines_are_reached_by_routers_only(releases: dict[str, Release]) -> None:
    """The engines' policy selects all engines and allows routers, and Prometheus where the values name it."""
    for name, others in (("laptop", 0), ("cluster", 1)):
        made = releases[name]
        policy = made.of_kind("NetworkPolicy")["qarr-engines"]["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        selected = policy["podSelector"]["matchLabels"]
        for owner in made.of_kind("StatefulSet").values():
            labels = owner["spec"]["template"]["metadata"]["labels"]
            assert selected.items() <= labels.items()
        (routers, *prometheus) = policy["ingress"]
        router = made.of_kind("Deployment")["qarr-router"]["spec"]["template"]
        labels = router["metadata"]["labels"]
        assert routers["from"] == [{"podSelector": {"matchLabels": labels}}]
        assert len(prometheus) == others


def parse(queries: list[str], folder: Path) -> None:
    """Check by promtool that Prometheus can parse queries."""
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
            # Without a speed nothing is predicted.
            replica.update(speed=SpeedModel(1.0, 2.0, 10.0))
        page = ""
        async with asyncio.timeout(30):
            # The engines' gauges are read every few seconds.
            while not re.search(
                r'^qarr_kv_cache_usage_ratio{.*tier="fast"', page, re.MULTILINE
            ):
                page = (await stack.client.get(f"{stack.url}/metrics")).text
                await asyncio.sleep(0.05)
    queries: list[str] = []
    for tier, scaled in releases["cluster"].of_kind("ScaledObject").items():
        triggers = scaled["spec"]["triggers"]
        names = [trigger["name"] for trigger in triggers]
        assert names == ["queue", "kv-cache", "ttft"]
        owners = releases["cluster"].of_kind("StatefulSet")
        assert scaled["spec"]["scaleTargetRef"]["name"] in owners
        assert "replicas" not in owners[tier]["spec"]
        queries += [trigger["metadata"]["query"] for trigger in triggers]
    parse(queries, tmp_path)
    named_metrics = set(NAME.findall("\n".join(queries)))
    assert len(named_metrics) == 4
    assert named_metrics <= metrics_on(page)
    labelled = {
        name
        for name in named_metrics
        if re.search(rf'^{name}{{.*tier="fast"', page, re.MULTILINE)
    }
    assert labelled == named_metrics


def test_monitoring_is_that_of_the_repository(releases: dict[str, Release]) -> None:
    """Rules and dashboards are those of deploy/prometheus and deploy/grafana, except the links to runbooks."""
    for name, runbooks in (
        ("cluster", RUNBOOKS),
        ("everything", "https://git.example/qarr/docs/runbooks.md"),
    ):
        made = releases[name]
        rules = {
            f"{rule_name.removeprefix('qarr-')}.yml": manifest["spec"]
            for rule_name, manifest in made.of_kind("PrometheusRule").items()
        }
        expected = {}
        for path in (DEPLOY / "prometheus/rules").glob("*.yml"):
            text = path.read_text("utf-8").replace(RUNBOOKS, runbooks)
            expected[path.name] = yaml.safe_load(text)
        assert rules == expected
        dashboards: dict[str, str] = {}
        for map_name, manifest in made.of_kind("ConfigMap").items():
            if "-dashboard-" in map_name:
                dashboards |= manifest["data"]
        assert dashboards == {
            path.name: path.read_text("utf-8")
            for path in (DEPLOY / "grafana/dashboards").glob("*.json")
        }
    monitors = releases["cluster"].of_kind("ServiceMonitor")
    text = (DEPLOY / "prometheus/prometheus.yml").read_text("utf-8")
    scraped = yaml.safe_load(text)["scrape_configs"]
    jobs = [
        monitors[name]["spec"]["endpoints"][0]["relabelings"][0]["replacement"]
        for name in ("qarr-router", "qarr-engines")
    ]
    assert jobs == [config["job_name"] for config in scraped]


def test_callers_reach_what_nginx_lets_through(releases: dict[str, Release]) -> None:
    """The Ingress has the paths of deploy/nginx, and no other."""
    (ingress,) = releases["cluster"].of_kind("Ingress").values()
    paths = {path["path"] for path in ingress["spec"]["rules"][0]["http"]["paths"]}
    text = (DEPLOY / "nginx/qarr.conf").read_text("utf-8")
    locations = re.findall(r"location (?:= )?(/\S+) \{", text)
    assert paths == {location.rstrip("/") for location in locations}
