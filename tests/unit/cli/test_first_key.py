"""An operator's session on a running router without keys: the first key, a revocation, a deleted file, and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.own_router import OwnRouter, connection, own_router

pytestmark = pytest.mark.anyio


async def statuses(own: OwnRouter, key: str) -> tuple[int, int]:
    """Return the statuses of a request without a key, and of one with a key."""
    without = await own.generate(stream=False)
    async with connection(authorization=f"Bearer {key}") as client:
        given = await client.post(
            f"{own.url}/generate", json={"prompt": "hi", "stream": False}
        )
    return without.status_code, given.status_code


async def test_the_first_key_and_back(tmp_path: Path) -> None:
    """Nothing is locked unasked; each change is in force when its command ends; and each dead end has a way back."""
    async with own_router(
        tmp_path, QARR_AUTH__KEYS_FILE=str(tmp_path / "keys.json")
    ) as own:
        unasked = await own.qarr("keys", "add", "ops", "--admin")
        assert unasked.returncode == 2
        assert f"{own.url} serves everyone without a key" in unasked.stderr
        assert await statuses(own, "none") == (200, 200)

        made = await own.qarr("keys", "add", "ops", "--admin", "--yes")
        key = made.stdout.strip()
        assert f"the router at {own.url} has taken it over" in made.stderr
        assert await statuses(own, key) == (401, 200)

        revoked = await own.qarr("keys", "revoke", "ops")
        assert "no key is in force, so nobody is served" in revoked.stderr
        assert await statuses(own, key) == (401, 401)

        off = await own.qarr("keys", "off")
        assert off.returncode == 0, off.stderr
        assert await statuses(own, key) == (200, 200)

        second = (await own.qarr("keys", "add", "ann")).stdout.strip()
        assert await statuses(own, second) == (200, 200)
        await own.qarr("keys", "on")
        assert await statuses(own, second) == (401, 200)

        (tmp_path / "keys.json").unlink()
        assert await statuses(own, second) == (401, 200)
        back = await own.qarr("keys", "off")
        assert "has taken it over" in back.stderr
        assert await statuses(own, second) == (200, 200)


async def test_a_router_on_another_port_is_found(tmp_path: Path) -> None:
    """By the socket over which it can be taken over, where the settings do not name its port."""
    async with own_router(
        tmp_path, QARR_AUTH__KEYS_FILE=str(tmp_path / "keys.json")
    ) as own:
        own.env["QARR_SERVER__PORT"] = "0"
        unasked = await own.qarr("keys", "add", "ops")
        assert unasked.returncode == 2
        assert own.url in unasked.stderr
