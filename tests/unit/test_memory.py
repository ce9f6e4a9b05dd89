"""Memory that is free goes back to the operating system."""

from __future__ import annotations

import ctypes

import psutil
import pytest

from router.memory import hand_back


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc keeps it and can be told not to")
def test_what_is_free_between_blocks_in_use_is_handed_back() -> None:
    """One block in ten stays, all over the heap, so that the heap's end cannot move down."""
    process, size = psutil.Process(), 6000
    before = process.memory_info().rss
    blocks = [bytes(size) for _ in range(10_000)]
    full = process.memory_info().rss
    blocks[:] = [block for number, block in enumerate(blocks) if number % 10 == 0]
    hand_back()
    assert full - before > 0.8 * 10_000 * size
    assert process.memory_info().rss < before + 0.6 * (full - before)
