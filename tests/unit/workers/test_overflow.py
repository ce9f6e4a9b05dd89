"""The overflow behind several workers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from router.settings import load_settings
from router.workers.setup import divided
from tests.fakes.engine import Behaviour, FakeEngine, serving
from tests.unit.own_engines import until
from tests.unit.own_router import own_router
from tests.unit.workers.test_workers import each_worker, generate, get, total, workers

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
KEY = "sk-outside"


async def test_every_worker_has_it_after_a_reload(tmp_path: Path) -> None:
    """Named while the router runs, it answers in every worker, counts for all, and its key is shown nowhere."""
    file, outside = tmp_path / "settings.toml", Behaviour()
    file.write_text("")
    full = {f"QARR_TIERS__{name}__MAX_IN_FLIGHT": "1" for name in ("FAST", "BALANCED", "PRECISE")}
    options = {"QARR_CONFIG": str(file), "QARR_SERVER__WORKERS": "2", "QARR_ADMISSION__MAX_WAITING": "0", **full}
    async with serving(FakeEngine(outside, "foreign").app) as url, own_router(tmp_path, **options) as router:
        assert len(workers(router)) == 2
        for behaviour in router.behaviours:
            behaviour.stall_after = 1
        holding = [asyncio.create_task(generate(router)) for _ in router.behaviours]
        await until(lambda: all(behaviour.running for behaviour in router.behaviours))
        refused = await each_worker(lambda: generate(router))
        assert {answer.status_code for answer in refused} == {503}
        file.write_text(f'[overflow]\nurl = "{url}/v1"\nmodel = "foreign"\nname = "outside"\napi_key = "{KEY}"\n')
        told = await router.qarr("reload", "--url", router.url)
        assert (told.returncode, "overflow.api_key: *** -> ***" in told.stdout) == (0, True), told.stdout + told.stderr
        answers = await each_worker(lambda: generate(router))
        assert {answer.headers.get("x-qarr-overflow") for answer in answers} == {"outside"}
        metrics = await get(router, "/metrics")
        assert total(metrics, "qarr_overflow_requests_total") == len(outside.requests) == len(answers)
        assert KEY not in told.stdout + router.errors.read_text() + metrics
        for each in holding:
            each.cancel()
        await asyncio.gather(*holding, return_exceptions=True)


def test_its_bound_is_divided() -> None:
    """Each worker may send an equal part of what it may have at once."""
    given = {"url": "https://h/v1", "model": "m", "max_in_flight": 7}
    settings = load_settings(None, {"overflow": given, "server": {"workers": 2}})
    assert divided(settings, 2).overflow.max_in_flight == 3
