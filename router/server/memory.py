"""Returns free memory to the operating system, freezes startup objects (``gc.freeze``) and collects garbage seldom.

A collection that traverses startup objects, or those of many open streams, delays every stream by tens of milliseconds.
Requests leave no cycles behind (``tests/unit/server/test_memory.py``). glibc's allocator keeps free memory between blocks in
use: without ``malloc_trim(3)`` a router's resident set grows over hours, and does not shrink after many large bodies.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from functools import cache

HAND_BACK_EVERY_S = 60.0
# A collection begins at this many objects more than at the last one, about 10 MB of them. The other two numbers say how many
# collections of younger objects there are before one of older ones.
COLLECTED_AT = (100_000, 5, 5)


def set_aside() -> None:
    """Freeze all present objects, as the documentation of ``gc.freeze`` says, and collect seldom from now on."""
    gc.collect()
    gc.freeze()
    # A full collection waits until new objects are a quarter of those counted at the last one: frozen ones must not count.
    gc.collect()
    gc.set_threshold(*COLLECTED_AT)


async def keep_handing_back() -> None:
    while (trim := malloc_trim()) is not None:
        await asyncio.sleep(HAND_BACK_EVERY_S)
        await asyncio.to_thread(trim, 0)  # It takes longer the more there is.


@cache
def malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # The C library is not glibc.
        return None
    trim.argtypes = [ctypes.c_size_t]
    return trim
