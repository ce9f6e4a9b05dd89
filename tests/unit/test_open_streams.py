"""The benchmark of open streams, run briefly: a router in front of the stub engine becomes ready, and its streams end."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_time_to_first_token_while_streams_are_open() -> None:
    """Without and with open streams there is a row of figures, and the streams have carried events."""
    argv = [sys.executable, "benchmarks/open_streams.py", "--ttft", "--streams", "3", "--pause", "5", "--probes", "5"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(\d+) open streams((?: +-?\d+\.\d\d){6}) +(\d+) events/s", done.stdout, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [0, 3], done.stdout
    assert int(rows[0][2]) == 0
    assert int(rows[1][2]) > 0
