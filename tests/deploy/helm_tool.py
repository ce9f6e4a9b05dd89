"""Render and check the chart with tools of .venv-deploy, whose interpreter runs this: ``helm_tool.py render|check``.

Standard input and output are JSON. ``render`` takes {chart, values, namespace} and answers {lint, manifests} or {error};
``check`` takes a list of manifests and answers with a list of faults, each with the name of its manifest.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import helm_python
import kubernetes_validate
from pydantic import BaseModel, ValidationError


def render(chart: str, values: dict[str, Any], namespace: str) -> dict[str, Any]:
    """Return the chart's manifests by file, and the warnings and errors of Helm's linter."""
    try:
        with helm_python.Chart.load(chart) as loaded:
            manifests = loaded.render(values, name="qarr", namespace=namespace)
    except helm_python.HelmError as error:
        return {"error": str(error)}
    report = helm_python.lint(chart, values, strict=True, namespace=namespace)
    warnings = [
        message["error"] for message in report["messages"] if message["severity"] > 1
    ]
    return {"lint": report["errors"] + warnings, "manifests": manifests}


def operators_models() -> dict[str, type[BaseModel]]:
    from cloudcoil.models.keda.v1alpha1 import ScaledObject
    from cloudcoil.models.prometheus_operator.v1 import PrometheusRule, ServiceMonitor

    return {
        "ScaledObject": ScaledObject,
        "PrometheusRule": PrometheusRule,
        "ServiceMonitor": ServiceMonitor,
    }


def check(manifest: dict[str, Any], model: type[BaseModel] | None) -> list[str]:
    """Return the faults of a manifest of one of Kubernetes' own kinds or of a model; unknown fields are faults."""
    try:
        if model is None:
            kubernetes_validate.validate(manifest, "1.34", strict=True)
            return []
        known = model.model_validate(manifest).model_dump(
            mode="json", by_alias=True, exclude_unset=True
        )
        return unknown(manifest, known)
    except (kubernetes_validate.ValidationError, ValidationError) as error:
        return [str(error)]


def unknown(manifest: Any, known: Any, path: str = "") -> list[str]:
    """Return the fields of a manifest, at any depth, that are not among the known ones."""
    faults: list[str] = []
    if isinstance(manifest, dict):
        for name, value in manifest.items():
            if name in known:
                faults += unknown(value, known[name], f"{path}{name}.")
            else:
                faults.append(f"{path}{name}: there is no such field")
    elif isinstance(manifest, list):
        for number, (value, known_value) in enumerate(
            zip(manifest, known, strict=True)
        ):
            faults += unknown(value, known_value, f"{path}{number}.")
    return faults


if __name__ == "__main__":
    request = json.load(sys.stdin)
    answer: Any
    if sys.argv[1] == "render":
        answer = render(**request)
    else:
        models = operators_models()
        answer = []
        for manifest in request:
            kind = manifest["kind"]
            name = manifest["metadata"]["name"]
            faults = check(manifest, models.get(kind))
            answer += [f"{kind} {name}: {fault}" for fault in faults]
    json.dump(answer, sys.stdout)
