"""The router's locked packages exist for other Pythons and machines than this one."""

from __future__ import annotations

import os
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
    """There are wheels with the lock's hashes, for macOS from 14 on. Nothing is installed."""
    command = (
        "scripts/uv.py pip install --dry-run --no-deps --require-hashes "
        "--only-binary :all: -r requirements/router.txt "
        f"--python-version {python} --python-platform {platform} --target"
    )
    process = subprocess.run(
        [sys.executable, *command.split(), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        env={**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"},
        text=True,
        check=False,
        timeout=100,
    )
    assert process.returncode == 0, process.stderr
