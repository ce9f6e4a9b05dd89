"""Where the tests of JavaScript's SDKs run."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

NODE = Path(__file__).resolve().parents[1] / "clients/node"


def node_project() -> Path:
    """Return a folder in the cache where the SDK is installed, and install it first if it is missing."""
    lock = (NODE / "package-lock.json").read_bytes()
    cache = Path(os.environ.get("QARR_CACHE_DIR") or Path.home() / ".cache/qarr")
    made = cache / "envs" / f"node-clients-{hashlib.sha256(lock).hexdigest()[:16]}"
    if not (made / ".complete").exists():
        made.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(NODE / name, made)
        subprocess.run(
            [program("npm"), "ci", "--no-fund", "--no-audit"],
            cwd=made,
            check=True,
            timeout=300,
        )
        (made / ".complete").touch()
    for script in NODE.glob("*.test.mjs"):
        shutil.copy(script, made)
    return made


def program(name: str) -> str:
    path = shutil.which(name)
    assert path, (
        f"{name} is not installed: scripts/setup services, or apt-get install nodejs npm"
    )
    return path
