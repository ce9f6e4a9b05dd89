"""Render and check the chart with tools of .venv-deploy, whose interpreter runs this: ``helm_tool.py render|check``.

Standard input and output are JSON. ``render`` takes {chart, values, namespace} and answers {lint, manifests} or {error};
``check`` takes a list of manifests and answers with what is wrong, each with the name of its manifest.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import helm_python
import kubernetes_validate
from pydantic import BaseModel, ValidationError


def render(chart: str, values: dict[str, Any], namespace: str) -> dict[str, Any]:
    """Return the chart's manifests by file, and what Helm's linter says above the level of information."""
    try:
        with helm_python.Chart.load(chart) as loaded:
            manifests = loaded.render(values, name="qarr", namespace=namespace)
    except helm_python.HelmError as error:
        return {"error": str(error)}
    report = helm_python.lint(chart, values, strict=True, namespace=namespace)
    lint = report["errors"] + [
        m["error"] for m in report["messages"] if m["severity"] > 1
    ]
    return {"lint": lint, "manifests": manifests}


def operators_models() -> dict[str, type[BaseModel]]:
    from cloudcoil.models.keda.v1alpha1 import ScaledObject
    from cloudcoil.models.prometheus_operator.v1 import PrometheusRule, ServiceMonitor

    return {
        "ScaledObject": ScaledObject,
        "PrometheusRule": PrometheusRule,
        "ServiceMonitor": ServiceMonitor,
    }


def check(manifest: dict[str, Any], model: type[BaseModel] | None) -> list[str]:
    """Return what is wrong with a manifest of Kubernetes' own kinds or of a model, unknown fields included."""
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


def unknown(given: Any, known: Any, path: str = "") -> list[str]:
    if isinstance(given, dict):
        lost = [
            f"{path}{name}: there is no such field"
            for name in given
            if name not in known
        ]
        return lost + [
            f
            for n in given
            if n in known
            for f in unknown(given[n], known[n], f"{path}{n}.")
        ]
    if isinstance(given, list):
        pairs = enumerate(zip(given, known, strict=True))
        return [
            found
            for number, (own, theirs) in pairs
            for found in unknown(own, theirs, f"{path}{number}.")
        ]
    return []


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    if sys.argv[1] == "render":
        answer: Any = render(**asked)
    else:
        models = operators_models()
        answer = [
            f"{m['kind']} {m['metadata']['name']}: {w}"
            for m in asked
            for w in check(m, models.get(m["kind"]))
        ]
    json.dump(answer, sys.stdout)
