"""The module that engines are started from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tiers.lifecycle.command import ENGINE_MAIN


def test_only_the_main_process_runs_the_server(tmp_path: Path) -> None:
    """Run, it runs vLLM's server with the arguments given; imported again by a spawned process, it costs nothing."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text("import sys; print(__name__, sys.argv[1:])")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*argv: str) -> str:
        return subprocess.run(
            [sys.executable, *argv],
            env=env,
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout

    assert run(str(ENGINE_MAIN), "--model", "x") == "__main__ ['--model', 'x']\n"
    again = f"import runpy, sys; runpy.run_path({str(ENGINE_MAIN)!r}, run_name='__mp_main__'); print(sys.modules.keys())"
    assert "vllm" not in run("-c", again)
