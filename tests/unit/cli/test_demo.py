"""``qarr demo`` as a person runs it: started, looked at, stopped."""

import os
import signal
from pathlib import Path
from subprocess import PIPE, Popen, run

import httpx
import psutil
import pytest

from tests.ports import reserved_ports
from tests.unit.own_router import QARR


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_the_demo_says_that_it_is_simulated_and_leaves_nothing_running(tmp_path: Path, ending: signal.Signals) -> None:
    """In the terminal, at /tiers and in the answer. A second one on its port, or with a load that is none, has an error."""
    (port,) = reserved_ports()
    env = {**os.environ, "QARR_CACHE_DIR": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    argv = [QARR, "demo", "--port", str(port), "--load"]
    with Popen([*argv, "0"], stderr=PIPE, env=env, text=True) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline().startswith("simulated: no model runs.")
            assert any("all tiers ready" in line for line in process.stderr)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
                assert "simulated" in client.get("/tiers").json()["model"]
                answer = client.post("/generate", json={"prompt": "hi", "stream": False})
            assert answer.json()["text"].startswith("This is simulated text")
            for wrong, why in (("0", f"cannot listen on 127.0.0.1:{port}"), ("2/m", "0 to 100 requests a second")):
                assert why in run([*argv, wrong], capture_output=True, text=True, check=False, env=env).stderr
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(ending)
            assert process.wait(30) == (0 if ending is signal.SIGINT else -ending)
            assert (len(children), psutil.wait_procs(children, timeout=10)[1]) == (1, [])
        finally:
            process.kill()
    assert ending is signal.SIGKILL or [*tmp_path.glob("qarr-demo-*")] == []
