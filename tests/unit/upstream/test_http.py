"""Bodies of engines' answers, over a real socket."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from router.upstream.transport import body_of
from tests.fakes.engine import Behaviour
from tests.unit.upstream_stack import upstream_stack

if TYPE_CHECKING:
    from tests.unit.upstream_stack import UpstreamStack

pytestmark = pytest.mark.anyio
PATH = "/tokenize"
LARGE = "x" * (1 << 20)


async def ask(stack: UpstreamStack) -> httpx.Response:
    replica = stack.fleet.replicas[0]
    return await stack.upstream._transport.handle_async_request(
        httpx.Request("POST", replica.url + PATH, content=b"{}")
    )


@pytest.mark.parametrize("body", ["", "x", LARGE], ids=["empty", "small", "large"])
async def test_a_body_is_read_to_its_end(body: str) -> None:
    async with upstream_stack(fast=Behaviour(instead={PATH: body})) as stack:
        response = await ask(stack)
        assert await body_of(response) == body.encode()
        await response.aclose()


async def test_no_more_of_a_body_is_read_than_is_wanted() -> None:
    async with upstream_stack(fast=Behaviour(instead={PATH: LARGE})) as stack:
        response = await ask(stack)
        found = await body_of(response, 1000)
        assert 1000 < len(found) < len(LARGE)
        await response.aclose()
