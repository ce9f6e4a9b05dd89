"""Bodies of engines' answers, over a real socket."""

from __future__ import annotations

import httpx
import pytest

from router.upstream.transport import body_of
from tests.fakes.engine import Behaviour
from tests.unit.upstream_stack import upstream_stack

pytestmark = pytest.mark.anyio
PATH = "/tokenize"
LARGE = "x" * (1 << 20)


async def test_no_more_of_a_body_is_read_than_is_wanted() -> None:
    async with upstream_stack(fast=Behaviour(instead={PATH: LARGE})) as stack:
        request = httpx.Request("POST", stack.fleet.replicas[0].url + PATH, content=b"{}")
        response = await stack.upstream._transport.handle_async_request(request)
        found = await body_of(response, 1000)
        assert 1000 < len(found) < len(LARGE)
        await response.aclose()
