"""The chart, rendered by Helm, and its containers' commands as processes of this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.services import DEPLOY, program

CHART = DEPLOY / "helm"
SAMPLES = sorted((CHART / "values").glob("*.yaml"))
# Values besides a sample's: the laptop's key is on the command line that the sample shows.
MORE_VALUES: dict[str, dict[str, Any]] = {
    "laptop": {"engineKey": {"value": "an-engine-key"}}
}
NAMESPACE = "llm"


def tool(command: str, request: object) -> Any:
    """Run ``helm_tool.py`` in its environment, and return its answer."""
    argv = [program("python"), str(Path(__file__).with_name("helm_tool.py")), command]
    process = subprocess.run(
        argv,
        input=json.dumps(request),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def overlaid(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return values with others on top, at any depth."""
    both = {
        key: overlaid(base[key], over[key])
        for key in base.keys() & over.keys()
        if isinstance(base[key], dict)
    }
    return {**base, **over, **both}


def rendered(sample: str, over: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the answer of ``helm_tool.py render`` to a sample's values, with others on top."""
    values = yaml.safe_load((CHART / f"values/{sample}.yaml").read_text("utf-8"))
    values = overlaid(overlaid(values, MORE_VALUES.get(sample, {})), over or {})
    answer: dict[str, Any] = tool(
        "render", {"chart": str(CHART), "values": values, "namespace": NAMESPACE}
    )
    return answer


@dataclass(frozen=True, slots=True)
class Release:
    """The rendered manifests of one set of values."""

    manifests: tuple[dict[str, Any], ...]
    notes: str

    def of_kind(self, kind: str) -> dict[str, dict[str, Any]]:
        """Return the manifests of a kind, by name."""
        return {
            manifest["metadata"]["name"]: manifest
            for manifest in self.manifests
            if manifest["kind"] == kind
        }

    @property
    def pods(self) -> dict[str, dict[str, Any]]:
        """Return the pods' specifications, by the name of the manifest that owns them."""
        owners = {**self.of_kind("Deployment"), **self.of_kind("StatefulSet")}
        return {
            name: owner["spec"]["template"]["spec"] for name, owner in owners.items()
        }

    @property
    def settings(self) -> str:
        text: str = self.of_kind("ConfigMap")["qarr-settings"]["data"]["qarr.toml"]
        return text


def release(sample: str, over: dict[str, Any] | None = None) -> Release:
    answer = rendered(sample, over)
    assert "error" not in answer, answer["error"]
    assert answer["lint"] == []
    files: dict[str, str] = answer["manifests"]
    manifests: list[dict[str, Any]] = []
    for name, text in files.items():
        if name.endswith(".yaml"):
            manifests += filter(None, yaml.safe_load_all(text))
    (notes,) = [text for name, text in files.items() if name.endswith("NOTES.txt")]
    return Release(tuple(manifests), notes)


def argument(container: dict[str, Any], name: str) -> str:
    """Return the value of an argument, which the container must have once."""
    (given,) = [text for text in container["args"] if text.startswith(name + "=")]
    return str(given).partition("=")[2]


def image_environment(containerfile: str) -> dict[str, str]:
    """Return the variables that an image sets, but for the search path."""
    text = (DEPLOY / containerfile).read_text("utf-8").replace("\\\n", " ")
    lines = re.findall(r"^ENV (.*)$", text.rpartition("FROM ")[2], re.MULTILINE)
    variables = {}
    for pair in " ".join(lines).split():
        name, _, value = pair.partition("=")
        variables[name] = value
    variables.pop("PATH", None)
    return variables


@dataclass(frozen=True, slots=True)
class Mapped:
    """A mapping of a container's paths, addresses and secrets to those of this machine.

    Attributes:
        folder: The folder that stands for the container's root.
        changes: Further texts to replace in command, settings and variables, in this order.
        secrets: The values of Secrets, by key.
    """

    folder: Path
    changes: tuple[tuple[str, str], ...]
    secrets: dict[str, str]

    def text(self, text: str) -> str:
        for old, new in self.changes:
            text = text.replace(old, new)
        # The project itself may lie in one of these folders.
        outside = rf"(?<![\w./-])(?!{re.escape(str(DEPLOY.parent))}/)"
        return re.sub(
            rf"{outside}/(etc|var|models|tmp)(?=/|$|\b)", rf"{self.folder}/\1", text
        )

    def command(self, container: dict[str, Any]) -> list[str]:
        return [
            self.text(part)
            for part in (*container["command"], *container.get("args", ()))
        ]

    def environment(
        self, container: dict[str, Any], containerfile: str
    ) -> dict[str, str]:
        """Return the variables of a container's process: the image's, the pod's, and this machine's search path."""
        variables = image_environment(containerfile)
        for variable in container["env"]:
            variables[variable["name"]] = self._value_of(variable)
        mapped = {name: self.text(value) for name, value in variables.items()}
        return {"PATH": os.environ["PATH"], **mapped}

    def _value_of(self, variable: dict[str, Any]) -> str:
        if "value" in variable:
            return str(variable["value"])
        return self.secrets[variable["valueFrom"]["secretKeyRef"]["key"]]

    def mount(self, pod: dict[str, Any], settings: str = "") -> None:
        """Make the folders that a pod mounts, and write its settings."""
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            for mount in container["volumeMounts"]:
                Path(self.text(mount["mountPath"])).mkdir(parents=True, exist_ok=True)
        if settings:
            (self.folder / "etc/qarr/settings/qarr.toml").write_text(
                self.text(settings)
            )
