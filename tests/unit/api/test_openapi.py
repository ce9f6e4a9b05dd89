"""The OpenAPI document: complete, and true of what is served, by schemathesis' word."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route
from starlette.types import ASGIApp

from router.api.openapi import document
from router.api.settings import LimitSettings
from router.section import PROJECT
from router.server.responder import OUT
from tests.unit.router_stack import router_stack
from tests.unit.sent_responder import SentResponder
from tests.waiting import within

pytestmark = pytest.mark.anyio
SCHEMATHESIS = Path(sys.executable).with_name("schemathesis")


async def test_every_route_is_in_the_document(tmp_path: Path) -> None:
    """Each path and method that is served is described, and nothing else is."""
    async with router_stack(tmp_path) as stack:
        described = (await stack.client.get(f"{stack.url}/openapi.json")).json()
        for path, methods in described["paths"].items():
            for method in ("get", "post", "delete"):
                url = stack.url + path.replace("{id}", "auto")
                # one of them has no end
                async with stack.client.stream(method, url) as answer:
                    pass
                assert (answer.status_code != 405) is (method in methods), (
                    f"{method} {path}"
                )
        assert described["components"]["schemas"]["GenerateBody"]["properties"][
            "prompt"
        ]["anyOf"][0]["maxLength"] == (LimitSettings().max_prompt_chars)


async def sent_whole() -> Any:
    return {"type": "http.request", "body": b"", "more_body": False}


async def routes(app: ASGIApp) -> list[Route]:
    """Return the routes of an application, which it leaves in the scope of a request."""
    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": "/healthz",
        "headers": [],
        "query_string": b"",
        "client": None,
    }
    scope[OUT] = out = SentResponder()
    await app(scope, sent_whole, out.send)
    assert out.status == 200
    found: list[Route] = scope["app"].routes
    return found


async def test_the_document_lacks_no_route(tmp_path: Path) -> None:
    """Each route of the application is in the document, with its methods; HEAD comes with GET."""
    async with router_stack(tmp_path) as stack:
        paths = (await stack.client.get(f"{stack.url}/openapi.json")).json()["paths"]
        described = {
            (path, method.upper())
            for path, methods in paths.items()
            for method in methods
        }
        served = {
            (r.path_format, method)
            for r in await routes(stack.app)
            for method in r.methods or ()
        }
        assert served - {(path, "HEAD") for path, _ in served} == described


def test_every_component_is_there_and_used() -> None:
    """Each reference has its component, and each component is referred to from what is served."""
    described = json.loads(document("0"))
    there = {
        (kind, name): part
        for kind, parts in described["components"].items()
        for name, part in parts.items()
    }
    used = set()
    left = [described["paths"]]
    while left:
        names = (
            set(re.findall(r'"#/components/(\w+)/([\w-]+)"', json.dumps(left.pop())))
            - used
        )
        used |= names
        left.extend(there[name] for name in names)
    # named, not referred to
    assert used == {part for part in there if part[0] != "securitySchemes"}


@pytest.mark.timeout(600)
async def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    """Generated requests of all kinds, valid and not: no 5xx, no answer that the document does not have."""
    async with router_stack(tmp_path) as stack:
        process = await asyncio.create_subprocess_exec(
            str(SCHEMATHESIS), "run", f"{stack.url}/openapi.json", "--max-examples", "40", "--seed", "20",
            "--generation-database", "none", "--no-color", "--suppress-health-check", "all", "--max-failures", "5",
            "--phases", "examples,coverage,fuzzing",
            "--exclude-path", "/live",  # has no end
            "--exclude-path", "/admin/replicas",  # adds whatever address it makes up
            "--exclude-path", "/admin/replicas/{id}/remove",  # takes the engines away
            # What a valid body may hold is the engine's to say, and JSON Schema takes 1.0 for an integer.
            # for the latter: not_a_fault
            "--exclude-checks", "positive_data_acceptance,not_a_server_error",
            env={**os.environ, "SCHEMATHESIS_HOOKS": "tests.unit.api.schemathesis_checks", "PYTHONPATH": str(PROJECT)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=tmp_path,
        )  # fmt: skip
        output, _ = await within(
            process.communicate(), "the process to end", within_s=500
        )
        assert process.returncode == 0, output.decode()
        assert stack.leases() == 0
