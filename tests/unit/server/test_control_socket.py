"""The socket over which a router hands over: it is closed where it cannot be made."""

from __future__ import annotations

import gc
import socket
import warnings
from pathlib import Path

import pytest

from router.server.handover import control_path, handing_over

pytestmark = pytest.mark.anyio
TOO_LONG = "x" * 120  # more than the address of a Unix socket may have


async def begin_to_hand_over(folder: Path) -> None:
    with socket.socket() as listening:
        async with handing_over(
            control_path(folder, 1), listening, version="1", leave=lambda: None
        ):
            pytest.fail("the socket could be made")


@pytest.mark.parametrize("fault", ["a path that is too long", "a folder in its place"])
async def test_a_control_socket_that_cannot_be_made_is_closed(
    tmp_path: Path, fault: str
) -> None:
    """Nothing of it is left, neither an open descriptor nor a file."""
    folder = tmp_path
    if fault == "a path that is too long":
        folder = tmp_path / TOO_LONG
    else:
        control_path(folder, 1).mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(OSError, match=r"too long|directory"):
            await begin_to_hand_over(folder)
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
    assert [path for path in folder.iterdir() if path.is_socket()] == []
