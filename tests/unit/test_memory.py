"""Memory that is free goes back to the operating system; what stays is not looked at again and again."""

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

ASIDE = """
import gc
from router.memory import set_aside
import router.serve
before = len(gc.get_objects())
set_aside()
print(before, gc.get_freeze_count(), len(gc.get_objects()))
"""


def run(script: str) -> list[int]:
    """Return the numbers that a script prints, in a process of its own, which has no memory to spare from before."""
    done = subprocess.run([sys.executable, "-c", script], cwd=PROJECT, capture_output=True, text=True, check=True)
    return [int(number) for number in done.stdout.split()]


def test_the_collector_does_not_look_at_what_the_start_has_made() -> None:
    before, frozen, left = run(ASIDE)
    assert frozen > 0.9 * before
    assert left < 0.01 * before


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc keeps it and can be told not to")
def test_what_is_free_between_blocks_in_use_is_handed_back() -> None:
    grown, left = run(SCRIPT)
    assert grown > 0.8 * 10_000 * 6000
    assert left < 0.6 * grown
