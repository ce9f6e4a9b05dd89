"""The contract: what the router answers is what the golden file has, and what docs/openapi.yaml describes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from router.api.openapi import document
from tests.conftest import clean_environment
from tests.contract.answers import Form, forms
from tests.contract.write import GOLDEN

pytestmark = pytest.mark.anyio
DOCUMENT: dict[str, Any] = json.loads(document("0"))
# Not described by name: what engines answer, what another endpoint's error looks like, what has no body of its own.
UNKNOWN_PATHS = {"/none"}


@pytest.fixture(scope="module")
async def found(tmp_path_factory: pytest.TempPathFactory, hub: Path) -> dict[str, Form]:
    with pytest.MonkeyPatch.context() as patch:
        clean_environment(patch, tmp_path_factory, hub)
        return await forms(tmp_path_factory.mktemp("contract"))


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """Let the answers be asked for once in the module."""
    return "asyncio"


async def test_the_answers_are_those_of_the_golden_file(found: dict[str, Form]) -> None:
    """Statuses, headers, fields and their types, events, codes. ``python -m tests.contract.write`` takes a change over."""
    golden = json.loads(GOLDEN.read_text("utf-8"))
    assert {name: each.form for name, each in found.items()} == golden


async def test_the_document_has_what_is_answered(found: dict[str, Form]) -> None:
    """Each status of each endpoint, each of our headers, each field of each body."""
    missing = []
    for name, (asked, form) in found.items():
        if asked.path in UNKNOWN_PATHS or form["status"] == 405:
            continue
        operation = DOCUMENT["paths"][asked.path][asked.method.lower()]
        response = resolved(operation["responses"].get(str(form["status"]), {}))
        if not response:
            missing.append(f"{name}: status {form['status']}")
            continue
        if form["status"] == 200:
            told = set(response.get("headers", {})) | {
                "content-type",
                "x-request-id",
                "x-qarr-trace-id",
            }
            ours = {
                header for header in form["headers"] if header.startswith("x-qarr-")
            }
            missing += [f"{name}: header {header}" for header in sorted(ours - told)]
        if form["media"] not in response.get("content", {form["media"]: {}}):
            missing.append(f"{name}: {form['media']}")
        elif "body" in form:
            schema = response["content"][form["media"]].get("schema", {})
            missing += [
                f"{name}: {path}" for path in undescribed(form["body"], schema, "")
            ]
    assert missing == []


async def test_every_operation_of_the_document_is_asked(found: dict[str, Form]) -> None:
    """Apart from those that have no end, change the fleet, or answer other than with JSON."""
    asked = {(each.asked.path, each.asked.method.lower()) for each in found.values()}
    described = {
        (path, method)
        for path, methods in DOCUMENT["paths"].items()
        for method in methods
    }
    left_out = {path for path, _ in described - asked}
    assert left_out <= set(NOT_ASKED), left_out - set(NOT_ASKED)
    assert set(NOT_ASKED) <= left_out


NOT_ASKED = {
    "/": "a page",
    "/live": "it has no end",
    "/metrics": "text, held by tests of its own",
    "/openapi.json": "the document itself",
    "/admin/replicas": "it adds a replica",
    "/admin/operations": "what runs is chance",
    "/admin/operations/{id}": "likewise",
    "/admin/adapters": "the engines have none",
    "/admin/adapters/{name}": "likewise",
    "/admin/replicas/{id}/restart": "it stops engines that were started here",
    "/admin/replicas/{id}/recycle": "likewise",
    "/admin/replicas/{id}/remove": "likewise",
    "/v1/responses/{id}/cancel": "as for GET",
    "/v1/responses/{id}": "DELETE, as for GET",
}


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        target: Any = DOCUMENT
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        schema = target
    return schema


def undescribed(form: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    """Yield the paths of fields that a schema does not have. What may have any field has all."""
    choices = [resolved(each) for each in alternatives(schema)]
    if isinstance(form, list):
        for each in form:
            yield from undescribed(
                each, {"anyOf": [c.get("items", {}) for c in choices]}, f"{path}[]"
            )
    elif isinstance(form, dict) and all("properties" in c for c in choices):
        for name, value in form.items():
            having = [c["properties"][name] for c in choices if name in c["properties"]]
            if having:
                yield from undescribed(value, {"anyOf": having}, f"{path}.{name}")
            else:
                yield f"{path}.{name}"


def alternatives(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    schema = resolved(schema)
    several = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if not several and schema.get("type") != "null":
        yield schema
    for each in several:
        yield from alternatives(each)
