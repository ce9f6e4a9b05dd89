"""The router's locked packages are to be had for other Pythons and machines than this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize(
    "platform",
    ["x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin"],
)
def test_the_routers_lock_resolves(python: str, platform: str, tmp_path: Path) -> None:
    """With wheels alone, whose hashes are those of the lock. Nothing is installed."""
    command = "scripts/uv.py pip install --dry-run --no-deps --require-hashes --only-binary :all: -r requirements/router.txt"
    where = [
        "--target",
        str(tmp_path),
        "--python-version",
        python,
        "--python-platform",
        platform,
    ]
    done = subprocess.run(
        [sys.executable, *command.split(), *where],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
