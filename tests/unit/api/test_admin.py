"""Who may operate on replicas, and what operations show."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.auth.api_keys import add_key
from tests.fakes.engine import FakeEngine, serving_all
from tests.unit.router_stack import Stack, router_stack
from tests.waiting import until
from tiers.lifecycle.operations import KINDS
from tiers.spec import ReplicaStatus

pytestmark = pytest.mark.anyio
OPERATIONS = "/admin/operations"


@asynccontextmanager
async def with_keys(
    tmp_path: Path,
) -> AsyncIterator[tuple[Stack, dict[str, dict[str, str]]]]:
    path = tmp_path / "keys.json"
    made = {"ci": add_key(path, "ci")[0], "boss": add_key(path, "boss", admin=True)[0]}
    async with router_stack(tmp_path, {"auth": {"keys_file": str(path)}}) as stack:
        yield (
            stack,
            {name: {"authorization": f"Bearer {key}"} for name, key in made.items()},
        )


async def begin(
    stack: Stack, kind: str, replica: str, **headers: str
) -> httpx.Response:
    return await stack.client.post(
        f"{stack.url}/admin/replicas/{replica}/{kind}", headers=headers
    )


async def test_an_operation_is_begun_and_can_be_followed(tmp_path: Path) -> None:
    """202 with its record at once; the record then tells how it ended, in the list as well, the latest last."""
    async with router_stack(tmp_path) as stack:
        replica = stack.fleet.replicas[0]
        begun = await begin(stack, "drain", replica.id)
        assert begun.status_code == 202
        record = begun.json()
        assert record.keys() == {
            "id",
            "operation",
            "replica",
            "state",
            "detail",
            "successor",
            "began",
            "ended",
        }
        assert record["operation"] == "drain"
        assert record["replica"] == replica.id
        assert replica.state.status is ReplicaStatus.DRAINING
        async with stack.client.stream(
            "GET", f"{stack.url}{OPERATIONS}/{record['id']}"
        ) as answer:
            assert answer.status_code == 200
        resumed = (await begin(stack, "resume", replica.id)).json()
        await until(lambda: replica.state.status is ReplicaStatus.READY)
        listed = (await stack.client.get(stack.url + OPERATIONS)).json()["operations"]
        assert [each["id"] for each in listed] == [record["id"], resumed["id"]]
        one = (await stack.client.get(f"{stack.url}{OPERATIONS}/{record['id']}")).json()
        assert one == listed[0]
        assert one["state"] in {"done", "failed"}
        assert one["ended"] >= one["began"]


async def test_a_replica_that_is_not_there_is_404(tmp_path: Path) -> None:
    async with router_stack(tmp_path) as stack:
        for kind in KINDS:
            answer = await begin(stack, kind, "fast-99")
            assert answer.status_code == 404
            assert answer.json()["type"] == "urn:qarr:problem:replica-not-found"


async def test_an_engine_that_was_not_started_here_is_not_restarted(
    tmp_path: Path,
) -> None:
    """409 says why, and nothing changes; an operation that is not there is a 404."""
    async with router_stack(tmp_path) as stack:
        for kind in ("restart", "recycle"):
            answer = await begin(stack, kind, stack.fleet.replicas[0].id)
            assert answer.status_code == 409
            assert answer.json()["type"] == "urn:qarr:problem:not-possible"
        assert stack.fleet.replicas[0].state.status is ReplicaStatus.READY
        assert (await stack.client.get(f"{stack.url}{OPERATIONS}")).json()[
            "restartable"
        ] == []
        lost = await stack.client.get(f"{stack.url}{OPERATIONS}/7")
        assert lost.status_code == 404
        assert lost.json()["type"] == "urn:qarr:problem:replica-not-found"


async def test_only_operators_keys_operate(tmp_path: Path) -> None:
    """Every endpoint, reading included; a key is enough from anywhere."""
    async with with_keys(tmp_path) as (stack, keys):
        replica = stack.fleet.replicas[0].id
        for path, method in (
            (OPERATIONS, "GET"),
            (f"{OPERATIONS}/1", "GET"),
            (f"/admin/replicas/{replica}/drain", "POST"),
            (f"/admin/replicas/{replica}/remove", "POST"),
            ("/admin/replicas", "POST"),
        ):
            refused = await stack.client.request(
                method, stack.url + path, headers=keys["ci"]
            )
            assert (refused.status_code, refused.json()["type"]) == (
                403,
                "urn:qarr:problem:not-admin",
            ), path
            assert "qarr keys add NAME --admin" in refused.json()["detail"]
        assert stack.fleet.replicas[0].state.status is ReplicaStatus.READY
        assert (await begin(stack, "drain", replica)).status_code == 401
        behind = {"x-forwarded-for": "203.0.113.7", **keys["boss"]}
        assert (await begin(stack, "drain", replica, **behind)).status_code == 202


async def test_without_keys_nobody_operates_from_elsewhere(tmp_path: Path) -> None:
    """Who comes by a proxy or a page is not known to be on this machine."""
    async with router_stack(tmp_path) as stack:
        for header in ("origin", "forwarded", "x-forwarded-for", "x-real-ip", "via"):
            headers = {
                header: stack.url if header == "origin" else "127.0.0.1",
                "sec-fetch-site": "same-origin",
            }
            refused = await begin(stack, "drain", stack.fleet.replicas[0].id, **headers)
            assert refused.status_code == 403
            assert refused.json()["type"] == "urn:qarr:problem:not-admin"
            assert header in refused.json()["detail"]
            assert "qarr keys add" in refused.json()["detail"]
        assert stack.fleet.replicas[0].state.status is ReplicaStatus.READY


async def test_a_replica_is_added_and_removed(tmp_path: Path) -> None:
    """201 with what it is; who names it is shown to everybody; its removal is an operation like the others."""
    async with serving_all(FakeEngine().app) as (url,), router_stack(tmp_path) as stack:
        added = await stack.client.post(
            f"{stack.url}/admin/replicas", json={"tier": "fast", "url": url}
        )
        assert added.status_code == 201
        assert added.json() == {
            "id": "fast-1",
            "tier": "fast",
            "url": url,
            "source": "command",
            "state": "starting",
        }
        await until(
            lambda: stack.fleet.replicas[-1].state.status is ReplicaStatus.READY
        )
        tiers = (await stack.client.get(f"{stack.url}/tiers")).json()["tiers"]
        assert [replica["source"] for replica in tiers[0]["replicas"]] == [
            "settings",
            "command",
        ]
        again = await stack.client.post(
            f"{stack.url}/admin/replicas", json={"tier": "precise", "url": url}
        )
        assert again.status_code == 409
        assert again.json()["type"] == "urn:qarr:problem:not-possible"
        begun = await stack.client.post(
            f"{stack.url}/admin/replicas/fast-1/remove", json={"now": True}
        )
        assert begun.status_code == 202
        assert begun.json()["operation"] == "remove"
        await until(lambda: len(stack.fleet.replicas) == 3)
        done = await stack.client.get(f"{stack.url}{OPERATIONS}/{begun.json()['id']}")
        assert done.json()["state"] == "done"
        assert done.json()["detail"] == "removed"


WRONG_BODIES: list[tuple[str, dict[str, Any], list[tuple[str, str]]]] = [
    ("", {"tier": "slow", "url": "http://e"}, [("tier", "fast, balanced, precise")]),
    ("", {"tier": "fast", "url": "http://e/v1"}, [("url", "an address like http://10.0.0.5:8000")]),
    ("", {"url": 1, "a": 2}, [("tier", "a tier of this router"), ("url", "an address like http://10.0.0.5:8000"), ("a", "tier, url")]),
    ("/fast-0/remove", {"now": "yes"}, [("now", "true or false; true: open requests are not waited for")]),
]  # fmt: skip


async def test_a_wrong_body_names_its_fields(tmp_path: Path) -> None:
    """400 with each field and what it may be; nothing is added or removed."""
    async with router_stack(tmp_path) as stack:
        for path, body, wrong in WRONG_BODIES:
            answer = await stack.client.post(
                f"{stack.url}/admin/replicas{path}", json=body
            )
            assert answer.status_code == 400, body
            assert [
                (each["field"], each["allowed"]) for each in answer.json()["errors"]
            ] == wrong
        assert [replica.state.status for replica in stack.fleet.replicas] == [
            ReplicaStatus.READY
        ] * 3
