"""What ``qarr doctor`` finds of the overflow."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from router.cli.doctor.findings import CheckContext, Health
from router.cli.doctor.overflow import overflow
from router.settings import load_settings
from tests.fakes.engine import Behaviour, FakeEngine, serving

if TYPE_CHECKING:
    from starlette.types import Receive, Send

    from router.cli.doctor.findings import Finding

KEY = "sk-outside"


def found(url: str, model: str = "fake") -> Finding:
    """Return the finding of an overflow."""
    settings = load_settings(None, {"overflow": {"url": url, "model": model, "api_key": KEY, "name": "outside"}})
    (finding,) = overflow(CheckContext(settings, deep=False, url="", key=""))
    assert KEY not in finding.found + finding.then
    return finding


@pytest.mark.anyio
async def test_one_that_answers() -> None:
    """Its models are listed with the key; one that is not among them is worth a warning, as is another answer."""
    behaviour = Behaviour()
    async with serving(FakeEngine(behaviour).app) as url:
        good = await asyncio.to_thread(found, f"{url}/v1")
        assert (good.health, good.found) == (Health.OK, "outside answers, takes the key and has fake")
        other = await asyncio.to_thread(found, f"{url}/v1", "gpt")
        assert (other.health, other.found) == (Health.WARNING, "outside lists no model gpt")
        nowhere = await asyncio.to_thread(found, f"{url}/v2")
        assert (nowhere.health, nowhere.found) == (Health.WARNING, "outside answers GET /models with HTTP 404")
        behaviour.instead["/v1/models"] = '{"data": 7}'
        odd = await asyncio.to_thread(found, f"{url}/v1")
        assert (odd.health, odd.found) == (Health.WARNING, "outside answers GET /models with no list of models")


@pytest.mark.anyio
@pytest.mark.parametrize("status", [401, 403])
async def test_one_that_refuses_the_key(status: int) -> None:
    """A key that is not taken is a problem, and is named as the setting to correct."""

    async def refuse(_scope: object, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": KEY.encode()})

    async with serving(refuse) as url:
        finding = await asyncio.to_thread(found, f"{url}/v1")
        told = finding.health, finding.found, finding.then
        assert told == (Health.PROBLEM, f"outside refuses the key (HTTP {status})", "correct overflow.api_key")


def test_one_that_does_not_answer() -> None:
    """An address that nobody has is a problem; without an overflow nothing is asked."""
    assert found("http://127.0.0.1:9/v1").found == "outside does not answer (ConnectError)"
    (none,) = overflow(CheckContext(load_settings(), deep=False, url="", key=""))
    assert none.health is Health.OK
