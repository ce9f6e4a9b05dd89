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
# The document does not describe these paths.
UNKNOWN_PATHS = {"/none"}


@pytest.fixture(scope="module")
async def answers(
    tmp_path_factory: pytest.TempPathFactory, hub: Path
) -> dict[str, Form]:
    with pytest.MonkeyPatch.context() as patch:
        clean_environment(patch, tmp_path_factory, hub)
        return await forms(tmp_path_factory.mktemp("contract"))


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """Let the module's fixture get the answers once."""
    return "asyncio"


async def test_the_answers_are_those_of_the_golden_file(
    answers: dict[str, Form],
) -> None:
    """Statuses, headers, fields, types, events and codes are the golden file's.

    ``python -m tests.contract.write`` writes the file anew.
    """
    golden = json.loads(GOLDEN.read_text("utf-8"))
    assert {name: answer.form for name, answer in answers.items()} == golden


async def test_the_document_has_what_is_answered(answers: dict[str, Form]) -> None:
    """The document describes every status, every header of ours and every field of every answer."""
    missing = []
    for name, (request, form) in answers.items():
        if request.path in UNKNOWN_PATHS or form["status"] == 405:
            continue
        operation = DOCUMENT["paths"][request.path][request.method.lower()]
        response = resolved(operation["responses"].get(str(form["status"]), {}))
        if not response:
            missing.append(f"{name}: status {form['status']}")
            continue
        if form["status"] == 200:
            described = set(response.get("headers", {})) | {
                "content-type",
                "x-request-id",
                "x-qarr-trace-id",
            }
            ours = {
                header for header in form["headers"] if header.startswith("x-qarr-")
            }
            missing += [
                f"{name}: header {header}" for header in sorted(ours - described)
            ]
        if form["media"] not in response.get("content", {form["media"]: {}}):
            missing.append(f"{name}: {form['media']}")
        elif "body" in form:
            schema = response["content"][form["media"]].get("schema", {})
            missing += [
                f"{name}: {path}" for path in undescribed(form["body"], schema, "")
            ]
    assert missing == []


async def test_every_operation_of_the_document_is_asked(
    answers: dict[str, Form],
) -> None:
    """Every operation is asked, except those that have no end, change the fleet, or do not answer with JSON."""
    requests = [answer.request for answer in answers.values()]
    asked_for = {(request.path, request.method.lower()) for request in requests}
    described = set()
    for path, methods in DOCUMENT["paths"].items():
        described |= {(path, method) for method in methods}
    left_out = {path for path, _ in described - asked_for}
    assert left_out <= set(NOT_ASKED), left_out - set(NOT_ASKED)
    assert set(NOT_ASKED) <= left_out


NOT_ASKED = {
    "/": "a page",
    "/live": "it has no end",
    "/metrics": "text, held by tests of its own",
    "/openapi.json": "the document itself",
    "/admin/replicas": "it adds a replica",
    "/admin/operations": "what runs is chance",
    "/admin/operations/{id}": "what runs is chance",
    "/admin/adapters": "the engines have none",
    "/admin/adapters/{name}": "the engines have none",
    "/admin/replicas/{id}/restart": "it stops engines that were started here",
    "/admin/replicas/{id}/recycle": "it stops engines that were started here",
    "/admin/replicas/{id}/remove": "it stops engines that were started here",
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
    """Yield the paths of fields that a schema does not have. A schema without properties has every field."""
    choices = [resolved(choice) for choice in alternatives(schema)]
    if isinstance(form, list):
        items = {"anyOf": [choice.get("items", {}) for choice in choices]}
        for member in form:
            yield from undescribed(member, items, f"{path}[]")
    elif isinstance(form, dict) and all("properties" in choice for choice in choices):
        properties = [choice["properties"] for choice in choices]
        for name, value in form.items():
            having = [fields[name] for fields in properties if name in fields]
            if having:
                yield from undescribed(value, {"anyOf": having}, f"{path}.{name}")
            else:
                yield f"{path}.{name}"


def alternatives(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    schema = resolved(schema)
    several = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if not several and schema.get("type") != "null":
        yield schema
    for choice in several:
        yield from alternatives(choice)
