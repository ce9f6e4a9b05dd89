"""Bodies of engines' answers, over a real socket."""

from __future__ import annotations

import pytest

from router.upstream.transport import body_of, json_post
from tests.fakes.engine import Behaviour
from tests.unit.upstream_stack import upstream_stack

pytestmark = pytest.mark.anyio
PATH = "/tokenize"
LARGE = "x" * (1 << 20)


async def test_no_more_of_a_body_is_read_than_is_wanted() -> None:
    async with upstream_stack(fast=Behaviour(instead={PATH: LARGE})) as stack:
        answer = await stack.upstream._transport.send(
            *json_post(stack.fleet.replicas[0].url + PATH, [], b"{}"), {}
        )
        found = await body_of(answer, 1000)
        assert 1000 < len(found) < len(LARGE)
