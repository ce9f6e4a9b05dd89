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
# What a person gives besides the sample; the laptop's key is on the command line that the file shows.
GIVEN: dict[str, dict[str, Any]] = {"laptop": {"engineKey": {"value": "an-engine-key"}}}
NAMESPACE = "llm"


def tool(command: str, asked: object) -> Any:
    argv = [program("python"), str(Path(__file__).with_name("helm_tool.py")), command]
    done = subprocess.run(
        argv,
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def overlaid(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: overlaid(base[key], over[key])
        for key in base.keys() & over.keys()
        if isinstance(base[key], dict)
    }
    return {**base, **over, **both}


def rendered(sample: str, over: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what ``helm_tool.py render`` says to a sample's values, with others on top."""
    values = yaml.safe_load((CHART / f"values/{sample}.yaml").read_text("utf-8"))
    values = overlaid(overlaid(values, GIVEN.get(sample, {})), over or {})
    found: dict[str, Any] = tool(
        "render", {"chart": str(CHART), "values": values, "namespace": NAMESPACE}
    )
    return found


@dataclass(frozen=True, slots=True)
class Release:
    """The rendered manifests of one set of values."""

    manifests: tuple[dict[str, Any], ...]
    notes: str

    def of_kind(self, kind: str) -> dict[str, dict[str, Any]]:
        return {m["metadata"]["name"]: m for m in self.manifests if m["kind"] == kind}

    @property
    def pods(self) -> dict[str, dict[str, Any]]:
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
    documents = (
        d
        for name, text in files.items()
        if name.endswith(".yaml")
        for d in yaml.safe_load_all(text)
    )
    notes = next(text for name, text in files.items() if name.endswith("NOTES.txt"))
    return Release(tuple(d for d in documents if d), notes)


def argument(container: dict[str, Any], name: str) -> str:
    (value,) = (
        a.partition("=")[2] for a in container["args"] if a.startswith(name + "=")
    )
    return str(value)


def image_environment(containerfile: str) -> dict[str, str]:
    text = (DEPLOY / containerfile).read_text("utf-8").replace("\\\n", " ")
    lines = re.findall(r"^ENV (.*)$", text.rpartition("FROM ")[2], re.MULTILINE)
    pairs = (pair.partition("=") for line in lines for pair in line.split())
    return {name: value for name, _, value in pairs if name != "PATH"}


@dataclass(frozen=True, slots=True)
class Mapped:
    """A container's command here: its paths below a folder, its secrets and addresses replaced.

    Attributes:
        folder: Stands for the container's root.
        changes: More texts to replace in command, settings and variables, in this order.
        secrets: Values of Secrets, by key.
    """

    folder: Path
    changes: tuple[tuple[str, str], ...]
    secrets: dict[str, str]

    def text(self, text: str) -> str:
        for old, new in self.changes:
            text = text.replace(old, new)
        # the project may lie in one of these folders
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
        """Return what a container's process gets: of the image, of the pod, and nothing else but the search path."""
        own = {
            v["name"]: v["value"]
            if "value" in v
            else self.secrets[v["valueFrom"]["secretKeyRef"]["key"]]
            for v in container["env"]
        }
        named = {**image_environment(containerfile), **own}
        return {
            "PATH": os.environ["PATH"],
            **{name: self.text(value) for name, value in named.items()},
        }

    def mount(self, pod: dict[str, Any], settings: str = "") -> None:
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            for mount in container["volumeMounts"]:
                Path(self.text(mount["mountPath"])).mkdir(parents=True, exist_ok=True)
        if settings:
            (self.folder / "etc/qarr/settings/qarr.toml").write_text(
                self.text(settings)
            )
