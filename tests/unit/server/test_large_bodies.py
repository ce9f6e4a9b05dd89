"""Large bodies, as of images: they pass, and take no more memory together than they may."""

import asyncio
import base64
import gzip
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.server.errors import TooManyBodiesError
from router.server.large_bodies import LARGE_BODY_BYTES, HeldBody, LargeBodies
from tests.unit.router_stack import Stack, router_stack
from tests.waiting import until

pytestmark = pytest.mark.anyio
IMAGE_BYTES = 150_000
BOUNDS = {"server": {"max_bodies_bytes": 2 * IMAGE_BYTES}}


def with_image(size: int = IMAGE_BYTES) -> dict[str, Any]:
    image = base64.b64encode(random.Random(1).randbytes(size * 3 // 4)).decode()
    url = {"url": f"data:image/png;base64,{image}"}
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": url}]
    return {"model": "auto", "messages": [{"role": "user", "content": parts}]}


async def ask(stack: Stack, **more: Any) -> httpx.Response:
    body = with_image() | more
    return await stack.client.post(f"{stack.url}/v1/chat/completions", json=body)


async def test_a_large_image_passes_by_default(tmp_path: Path) -> None:
    """Five megabytes reach the engine as they came, under the default of the settings."""
    async with router_stack(tmp_path) as stack:
        body = with_image(5_000_000)
        answer = await stack.client.post(f"{stack.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200
        (engine,) = [engine for engine in stack.engines.values() if engine.requests]
        assert engine.requests[-1]["messages"] == body["messages"]


async def test_bodies_beyond_the_bound_are_told_to_come_again(tmp_path: Path) -> None:
    """While one large body is being answered, there is no room for another; small ones pass, and so does the next."""
    async with router_stack(tmp_path, BOUNDS) as stack:
        for engine in stack.engines.values():
            engine.delay_s = 30
        first = asyncio.create_task(ask(stack))
        await until(lambda: stack.leases() > 0)
        for engine in stack.engines.values():
            engine.delay_s = 0
        refused = await ask(stack)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_bodies"
        assert refused.headers["retry-after"] == "1"
        assert (await stack.generate()).status_code == 200
        first.cancel()
        await until(lambda: stack.leases() == 0)
        for _ in range(3):
            assert (await ask(stack)).status_code == 200


async def test_a_decoded_body_counts_with_its_own_size(tmp_path: Path) -> None:
    """What a small body unpacks to counts as well."""
    async with router_stack(tmp_path, BOUNDS) as stack:
        for engine in stack.engines.values():
            engine.delay_s = 30
        first = asyncio.create_task(ask(stack))
        await until(lambda: stack.leases() > 0)
        packed = (
            b'{"model":"auto","messages":[],"user":"' + b"x" * 2 * IMAGE_BYTES + b'"}'
        )
        answer = await stack.client.post(
            f"{stack.url}/v1/chat/completions",
            content=gzip.compress(packed),
            headers={"content-encoding": "gzip"},
        )
        assert answer.status_code == 503
        first.cancel()


async def test_text_is_bounded_apart_from_images(tmp_path: Path) -> None:
    """A body of much text is refused with the bound; one of an image of the same size passes."""
    bounds = {"server": {"max_text_bytes": IMAGE_BYTES // 2}}
    async with router_stack(tmp_path, bounds) as stack:
        assert (await ask(stack)).status_code == 200
        refused = await ask(stack, user=" {}" * IMAGE_BYTES)
        assert refused.status_code == 413
        assert "besides images" in refused.json()["error"]["message"]
        assert str(IMAGE_BYTES // 2) in refused.json()["error"]["message"]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 400_000), st.booleans()),
        max_size=40,
    )
)
def test_what_is_held_is_what_open_requests_hold(
    steps: list[tuple[int, int, bool]],
) -> None:
    """However requests grow, are refused and end, the sum is theirs, and beyond the bound only of one alone."""
    bodies = LargeBodies()
    bodies.max_bytes = 500_000
    open_requests = {number: HeldBody(bodies) for number in range(4)}
    sizes = dict.fromkeys(open_requests, 0)
    for number, size, ends in steps:
        try:
            open_requests[number].grow_to(size)
            if size > LARGE_BODY_BYTES:
                sizes[number] = max(sizes[number], size)
        except TooManyBodiesError:
            ends = True  # noqa: PLW2901  a refused request is over
        if ends:
            open_requests[number].release()
            sizes[number] = 0
        assert bodies.held_bytes == sum(sizes.values())
        several = len([size for size in sizes.values() if size]) > 1
        assert not several or bodies.held_bytes <= bodies.max_bytes
    for request in open_requests.values():
        request.release()
    assert bodies.held_bytes == 0
