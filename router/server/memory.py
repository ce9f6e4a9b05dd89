"""Hands free memory back to the operating system, and keeps the collector quick.

What the start has made stays for as long as the router runs: the collector need not look through all of it again and
again, which holds every stream up for tens of milliseconds. Buffers of all sizes come and go, and glibc's allocator keeps
what is free between those in use: without this a router's resident set creeps up over hours, and stays where a flood of
large bodies has brought it (malloc_trim(3)).
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

EVERY_S = 60.0


def set_aside() -> None:
    """Keep everything that there is now out of the collector's sight, as the documentation of ``gc.freeze`` has it."""
    gc.collect()
    gc.freeze()
    gc.collect()  # of nothing: it looks at all again once a quarter is new, and counted what is set aside


def hand_back() -> None:
    """Give free memory back, where the C library knows how; it takes the longer the more there is."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


async def keep_handing_back() -> None:
    """Do so every minute, beside the event loop."""
    while _malloc_trim() is not None:
        await asyncio.sleep(EVERY_S)
        await asyncio.to_thread(hand_back)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # not glibc
        return None
    trim.argtypes = [ctypes.c_size_t]
    return trim
