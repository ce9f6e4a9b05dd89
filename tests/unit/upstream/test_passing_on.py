"""Small requests without a lease: an error that is raised for one keeps nothing alive."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest

from router.upstream.errors import EngineFailedError
from tests.fakes.engine import Behaviour
from tests.unit.upstream_stack import upstream_stack
from tiers.spec import TierName

pytestmark = pytest.mark.anyio


async def test_the_error_of_a_small_request_is_freed_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It would otherwise hold the engine's answer until the garbage collector runs."""
    # pytest keeps all records of logs, and with them the errors that they name
    caplog.set_level(logging.ERROR, logger="qarr.router.upstream.upstream")
    async with upstream_stack(fast=Behaviour(detokenizes=False)) as stack:
        url = stack.replica(TierName.FAST).url
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(EngineFailedError) as raised:
                await stack.upstream.pass_on(url, "", "/detokenize", b'{"tokens":[]}')
            error = weakref.ref(raised.value)
            del raised
            assert error() is None
        finally:
            gc.enable()
