"""A key sees figures of others, not their requests. An operator sees all, as does everybody where no key is needed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from router.auth.api_keys import add_key, revoke_key
from tests.unit.router_stack import Stack, router_stack
from tests.waiting import until
from tiers.spec import TierName

pytestmark = pytest.mark.anyio
SECRET = "the merger of the two"


@dataclass(frozen=True, slots=True)
class Tenants:
    """A router with three keys, and one request of alice's."""

    stack: Stack
    keys: Path
    names: dict[str, dict[str, str]]
    asked: httpx.Response

    async def get(self, name: str, path: str) -> httpx.Response:
        return await self.stack.client.get(
            self.stack.url + path, headers=self.names[name]
        )

    async def ask(self, name: str, prompt: str, **headers: str) -> httpx.Response:
        asked = {"prompt": prompt, "tier": "fast"}
        return await self.stack.client.post(
            f"{self.stack.url}/generate",
            json=asked,
            headers={**self.names[name], **headers},
        )

    async def traced(self, name: str, count: int) -> list[dict[str, Any]]:
        """Return the traces that a key sees, once there are as many; a span ends after its answer."""
        traces: list[dict[str, Any]] = []

        async def are_seen() -> bool:
            traces[:] = (await self.get(name, "/traces")).json()["traces"]
            return len(traces) >= count

        await until(are_seen, f"{count} traces that {name} sees")
        return traces


@asynccontextmanager
async def tenants(tmp_path: Path) -> AsyncIterator[Tenants]:
    keys = tmp_path / "keys.json"
    rights: dict[str, dict[str, Any]] = {
        "alice": {},
        "mallory": {},
        "boss": {"admin": True},
    }
    names = {
        name: {"authorization": f"Bearer {add_key(keys, name, **more)[0]}"}
        for name, more in rights.items()
    }
    overrides = {
        "auth": {"keys_file": str(keys)},
        "telemetry": {"record_prompts": True},
    }
    async with router_stack(tmp_path, overrides) as stack:
        asked = {"prompt": f"Tell me of {SECRET}", "tier": "fast"}
        answer = await stack.client.post(
            f"{stack.url}/generate", json=asked, headers=names["alice"]
        )
        assert answer.status_code == 200
        yield Tenants(stack, keys, names=names, asked=answer)


def ids_of(requests: list[dict[str, Any]]) -> list[str]:
    return [request["request_id"] for request in requests]


async def test_a_key_sees_its_own_requests(tmp_path: Path) -> None:
    """Records are listed to their key and to operators; the bound on their number counts what is seen."""
    async with tenants(tmp_path) as world:
        mine = await world.ask("mallory", "hi")
        await world.ask("alice", "hi")
        seen = {
            name: (await world.get(name, "/requests")).json() for name in world.names
        }
        my_id = mine.headers["x-request-id"]
        assert ids_of(seen["mallory"]["requests"]) == [my_id]
        assert len(seen["alice"]["requests"]) == 2
        assert len({request["key"] for request in seen["alice"]["requests"]}) == 1
        assert len(seen["boss"]["requests"]) == 3
        assert seen["alice"]["scope"] == "own"
        assert seen["mallory"]["scope"] == "own"
        assert seen["boss"]["scope"] == "all"
        last = (await world.get("mallory", "/requests?limit=1")).json()["requests"]
        assert ids_of(last) == [my_id]


async def test_a_key_sees_no_metrics_of_keys(tmp_path: Path) -> None:
    async with tenants(tmp_path) as world:

        async def is_counted() -> bool:
            return 'key="alice"' in (await world.get("boss", "/metrics")).text

        await until(
            is_counted,
            "metrics of the key alice: it is counted once its usage is written",
        )
        for accept in ("", "application/openmetrics-text"):
            pages = {}
            # The operator's page comes first, so that a series that begins meanwhile is on the others' pages alone.
            for name in ("boss", "mallory", "alice"):
                headers = {**world.names[name], "accept": accept}
                page = await world.stack.client.get(
                    f"{world.stack.url}/metrics", headers=headers
                )
                pages[name] = {
                    line.split("{")[0] for line in page.text.splitlines() if "{" in line
                }
                assert ('key="alice"' in page.text) is (name == "boss")
            of_keys = {
                name
                for name in pages["boss"]
                if name.startswith(("qarr_key_", "qarr_budget_used"))
            }
            assert of_keys
            assert pages["boss"] - pages["mallory"] == of_keys


async def test_a_key_sees_its_own_traces(tmp_path: Path) -> None:
    """Another key's trace is as if it did not exist, for whoever does not operate here; no prompt is on it."""
    async with tenants(tmp_path) as world:
        trace_id = world.asked.headers["x-qarr-trace-id"]
        for name, count in (("alice", 1), ("boss", 1), ("mallory", 0)):
            traces = await world.traced(name, count)
            assert [trace["trace_id"] for trace in traces] == [trace_id] * count
        theirs = await world.get("mallory", f"/traces/{trace_id}")
        never = await world.get("mallory", f"/traces/{'0' * 31}1")
        assert theirs.status_code == 404
        assert without_ids(theirs.json()) == without_ids(never.json())
        assert SECRET not in theirs.text
        whole = (await world.get("boss", f"/traces/{trace_id}")).json()
        own = (await world.get("alice", f"/traces/{trace_id}")).json()
        assert SECRET not in str(whole)
        assert len(own["spans"]) == len(whole["spans"]) > 3
        port = int(world.stack.fleet.replicas[0].url.rsplit(":", 1)[1])
        assert port in ports_of(whole["spans"])
        assert port not in ports_of(own["spans"])


def without_ids(problem: dict[str, Any]) -> dict[str, Any]:
    ids = {"request_id", "trace_id"}
    return {name: value for name, value in problem.items() if name not in ids}


def ports_of(spans: list[dict[str, Any]]) -> list[int | None]:
    return [span["attributes"].get("server.port") for span in spans]


def keys_of(spans: list[dict[str, Any]]) -> set[str]:
    """Return the ids of the keys that are named on spans."""
    return {span["attributes"].get("qarr.key.id") for span in spans} - {None}


async def test_a_shared_trace_shows_each_key_its_part(tmp_path: Path) -> None:
    """Callers choose trace ids: who takes another's sees the spans of its own request only."""
    async with tenants(tmp_path) as world:
        trace_id = world.asked.headers["x-qarr-trace-id"]
        await world.ask("mallory", "hi", traceparent=f"00-{trace_id}-{'2' * 16}-01")
        await world.traced("boss", 2)
        seen = {
            name: (await world.get(name, f"/traces/{trace_id}")).json()["spans"]
            for name in world.names
        }
        keys = {name: keys_of(spans) for name, spans in seen.items()}
        assert keys["alice"].isdisjoint(keys["mallory"])
        assert keys["boss"] == keys["alice"] | keys["mallory"]
        assert len(seen["boss"]) == len(seen["alice"]) + len(seen["mallory"]) == 8


async def test_a_key_does_not_see_where_engines_are(tmp_path: Path) -> None:
    """The fleet's shape, states and numbers are for every key; addresses, processes and what quotes them for operators."""
    async with tenants(tmp_path) as world:
        world.stack.fleet.replicas[0].update(
            detail=f"no answer from {world.stack.fleet.replicas[0].url}"
        )
        plain = (await world.get("alice", "/tiers")).json()
        whole = (await world.get("boss", "/tiers")).json()
        assert "127.0.0.1" not in json.dumps(plain)
        assert json.dumps(whole).count("127.0.0.1") >= 6
        assert plain["scope"] == "own"
        assert whole["scope"] == "all"
        for ours, theirs in zip(plain["tiers"], whole["tiers"], strict=True):
            assert ours.keys() == theirs.keys()
            different = {name for name in ours if ours[name] != theirs[name]}
            assert different - {"replicas"} == {"identity"}
            for ours_replica, theirs_replica in zip(
                ours["replicas"], theirs["replicas"], strict=True
            ):
                assert ours_replica.keys() == theirs_replica.keys()
                assert ours_replica["state"] == theirs_replica["state"]
                assert ours_replica["url"] is None
                assert ours_replica["pid"] is None
                assert ours_replica["detail"] == ""
        for path in (
            "/live",
            "/metrics",
            "/policy",
            "/readyz",
            "/health",
            "/healthz",
            "/openapi.json",
            "/v1/models",
        ):
            headers = world.names["mallory"]
            async with world.stack.client.stream(
                "GET", world.stack.url + path, headers=headers
            ) as answer:
                assert answer.status_code == 200
                part = await anext(answer.aiter_text())
            for replica in world.stack.fleet.replicas:
                assert replica.url not in part, path
            assert world.asked.headers["x-request-id"] not in part


class Picture(NamedTuple):
    """What the live stream has told: the last fleet, and the ended requests."""

    fleet: dict[str, Any] | None
    records: list[dict[str, Any]]


async def followed(world: Tenants, name: str, until: str) -> Picture:
    """Follow /live with a key, and return the picture once a text has come."""
    fleet = None
    records: list[dict[str, Any]] = []
    event = ""
    async with (
        asyncio.timeout(20),
        world.stack.client.stream(
            "GET", f"{world.stack.url}/live", headers=world.names[name]
        ) as live,
    ):
        async for line in live.aiter_lines():
            kind, _, value = line.partition(": ")
            if kind == "event":
                event = value
            elif kind == "data" and event == "fleet":
                fleet = json.loads(value)
            elif kind == "data":
                records.insert(0, json.loads(value))
            if kind == "data" and until in line and fleet is not None:
                break
    return Picture(fleet, records)


async def test_who_watches_is_told_of_its_own(tmp_path: Path) -> None:
    """The live stream has the key's own requests, those in flight and those that end, and figures of all."""
    async with tenants(tmp_path) as world:
        engine = world.stack.engines[TierName.FAST]
        engine.delay_s = 0.3
        open_ = asyncio.create_task(
            world.ask("alice", "hi", **{"x-request-id": "alice-open"})
        )
        await until(lambda: engine.running, poll_s=0.01)
        pictures = {
            name: await followed(world, name, "in_flight") for name in world.names
        }
        await open_
        engine.delay_s = 0.0
        in_flight = {
            "alice": ["alice-open"],
            "mallory": [],
            "boss": ["alice-open"],
        }
        ended = {"alice": 1, "mallory": 0, "boss": 1}
        assert pictures.keys() == in_flight.keys()
        for name, picture in pictures.items():
            assert picture.fleet is not None
            assert ids_of(picture.fleet["in_flight"]) == in_flight[name]
            assert picture.fleet["in_flight_total"] == 1
            assert len(picture.records) == ended[name]
        watching = asyncio.create_task(followed(world, "mallory", "mallory-ended"))
        async with asyncio.timeout(20):
            while not watching.done():
                await world.ask("alice", "hi")
                await world.ask("mallory", "hi", **{"x-request-id": "mallory-ended"})
        records = (await watching).records
        assert set(ids_of(records)) == {"mallory-ended"}


async def test_who_watches_is_sent_away_with_its_key(tmp_path: Path) -> None:
    """A live stream ends once its key is revoked, as it would not begin."""
    async with tenants(tmp_path) as world:
        url = f"{world.stack.url}/live"
        headers = world.names["boss"]
        async with (
            asyncio.timeout(20),
            world.stack.client.stream("GET", url, headers=headers) as live,
        ):
            lines = live.aiter_lines()
            await anext(lines)
            revoke_key(world.keys, "boss")
            async for _ in lines:
                pass
        assert (await world.get("boss", "/requests")).status_code == 401


async def test_without_keys_everything_is_shown(tmp_path: Path) -> None:
    """A router on this machine that needs no keys shows all to everybody, as to an operator; until keys are made."""
    async with router_stack(
        tmp_path, {"auth": {"keys_file": str(tmp_path / "keys.json")}}
    ) as stack:
        await stack.generate()
        requests = (await stack.client.get(f"{stack.url}/requests")).json()
        assert requests["scope"] == "all"
        assert len(requests["requests"]) == 1
        fleet = (await stack.client.get(f"{stack.url}/tiers")).json()
        assert fleet["tiers"][0]["replicas"][0]["url"].startswith("http://127.0.0.1:")
        async with (
            asyncio.timeout(20),
            stack.client.stream("GET", f"{stack.url}/live") as live,
        ):
            lines = live.aiter_lines()
            await anext(lines)
            secret = add_key(tmp_path / "keys.json", "one")[0]
            async for _ in lines:
                pass  # it ends: who watches has shown no key
        keyed = {"authorization": f"Bearer {secret}"}
        seen = await stack.client.get(f"{stack.url}/requests", headers=keyed)
        assert seen.json()["requests"] == []
