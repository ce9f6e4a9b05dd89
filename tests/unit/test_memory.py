"""Memory that is free goes back to the operating system."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from router.settings import PROJECT

# One block in ten stays, all over the heap, so that the heap's end cannot move down.
SCRIPT = """
import psutil
from router.memory import hand_back
process = psutil.Process()
before = process.memory_info().rss
blocks = [bytes(6000) for _ in range(10_000)]
full = process.memory_info().rss
blocks[:] = [block for number, block in enumerate(blocks) if number % 10 == 0]
hand_back()
print(full - before, process.memory_info().rss - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc keeps it and can be told not to")
def test_what_is_free_between_blocks_in_use_is_handed_back() -> None:
    """In a process of its own, which has no memory to spare from before."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=PROJECT, capture_output=True, text=True, check=True)
    grown, left = map(int, done.stdout.split())
    assert grown > 0.8 * 10_000 * 6000
    assert left < 0.6 * grown
