"""Mirroring by several workers, switched on while they serve."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.fakes.engine import Behaviour, FakeEngine, serving
from tests.unit.test_reload import configured
from tests.unit.workers.test_workers import each_worker, generate, get

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
PROMPT, SECRET = "Which town is the marmalade capital?", "sk-of-the-second-fleet"
COUNT = 20


async def test_a_reload_switches_mirroring_on_in_every_worker(tmp_path: Path) -> None:
    """Whichever worker serves or is asked, the summary is that of all; logs have neither prompt nor key."""
    there = Behaviour()
    async with serving(FakeEngine(there).app) as url:
        table = f'[mirror]\nurl = "{url}/v1"\napi_key = "{SECRET}"\nmax_in_flight = {2 * COUNT}\nshare = '
        async with configured(tmp_path, f"{table}0.0\n", QARR_SERVER__WORKERS="2") as (router, file):
            for _ in range(4):
                assert (await generate(router, prompt=PROMPT, temperature=0)).status_code == httpx.codes.OK
            file.write_text(f"{table}1.0\n")
            done = await router.qarr("reload", "--url", router.url)
            assert done.stdout == "mirror.share: 0.0 -> 1.0\nsettings reloaded: 1 changed\n"
            assert there.requests == []
            for _ in range(COUNT):
                assert (await generate(router, prompt=PROMPT, temperature=0)).status_code == httpx.codes.OK
            async with asyncio.timeout(20):
                while (await get(router, "/mirror"))["all"]["same"] < COUNT:
                    await asyncio.sleep(0.1)
            shown: list[dict[str, Any]] = await each_worker(lambda: get(router, "/mirror"))
            assert [each["all"]["same"] for each in shown] == [COUNT] * len(shown)
            printed = await router.qarr("mirror", "--url", router.url, "--json")
            assert json.loads(printed.stdout)["all"]["same_share"] == 1.0
            assert await router.stop() == 0
            logged = router.errors.read_text() + "".join(p.read_text() for p in router.log_dir.glob("*.log"))
    assert len(there.requests) == COUNT
    assert not any(secret in logged for secret in (PROMPT, SECRET))
