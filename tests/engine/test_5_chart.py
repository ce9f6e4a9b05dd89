"""An engine of the chart runs for real behind the chart's router."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

from router.settings import load_settings
from tests.deploy.charts import NAMESPACE, Mapped, release
from tests.deploy.services import ROOT
from tests.engine.chart_processes import PYTHON, running, until_ok
from tests.engine.conftest import CAPITAL
from tests.engine.scoring import Scorer
from tests.ports import reserved_ports

BIN = Path(sys.executable).parent
ENGINE_KEY = "an-engine-key"
QUICK = {
    "router": {"discoverySeconds": 1, "preStopSeconds": 1},
    "engines": {"cpuThreads": 1, "drainSeconds": 60},
}
STORY = {
    "prompt": "Tell me a long story about a lighthouse.",
    "max_tokens": 100,
    "min_tokens": 100,
}


def test_an_engine_of_the_chart_serves_and_leaves(
    tmp_path: Path, model_store: Path
) -> None:
    """Engine and router start and answer; at its end the engine finishes its answer and exits with 0."""
    engine_port, router_port = reserved_ports(2)
    made = release("laptop", QUICK)
    engine_pod = made.pods["qarr-precise"]
    router_pod = made.pods["qarr-router"]
    changes = (
        (
            f"http://qarr-precise.{NAMESPACE}.svc:8000",
            f"http://127.0.0.1:{engine_port}",
        ),
        ("0.0.0.0", "127.0.0.1"),
        ("--port=8000", f"--port={engine_port}"),
        ("port = 8080", f"port = {router_port}"),
        ("/opt/engine/engine_main.py", str(ROOT / "tiers/lifecycle/engine_main.py")),
        ("/models/store", str(model_store)),
    )
    mapped = Mapped(tmp_path, changes, {"api-key": ENGINE_KEY})
    mapped.mount(engine_pod)
    mapped.mount(router_pod, made.settings)
    prepare(mapped, engine_pod["initContainers"][0])
    engine = engine_pod["containers"][0]
    router = router_pod["containers"][0]
    # The init container waits for the tokenizer, which is there.
    wait_for_tokenizer = mapped.command(router_pod["initContainers"][0])
    subprocess.run(wait_for_tokenizer, check=True, timeout=30)
    init, _, _, *argv = mapped.command(engine)
    # tini passes signals on, and is not installed here.
    assert init == "tini"
    engine_environment = mapped.environment(engine, "Containerfile.engine")
    router_environment = mapped.environment(router, "Containerfile.router")
    engine_log = tmp_path / "engine.out"
    router_log = tmp_path / "router.out"
    url = f"http://127.0.0.1:{router_port}"
    qarr, *serve = mapped.command(router)
    with (
        running([str(PYTHON), *argv], engine_environment, engine_log) as engine_process,
        running(
            [str(BIN / qarr), *serve], router_environment, router_log
        ) as router_process,
    ):
        until_ok(f"http://127.0.0.1:{engine_port}/health", engine_process, engine_log)
        until_ok(f"{url}/readyz", router_process, router_log)
        answer = httpx.post(
            f"{url}/generate",
            json={**QUESTION, "stream": False},
            timeout=120,
            trust_env=False,
        )
        Scorer.of(f"http://127.0.0.1:{engine_port}", ENGINE_KEY).check_answer(
            CAPITAL, answer.json()["text"]
        )
        leaves(engine, engine_process, engine_port)


QUESTION: dict[str, Any] = {"prompt": CAPITAL, "max_tokens": 16, "temperature": 0}


def prepare(mapped: Mapped, container: dict[str, Any]) -> None:
    environment = mapped.environment(container, "Containerfile.prepare")
    environment["PATH"] = f"{BIN}:{environment['PATH']}"
    environment["QARR_QUANTIZER__PYTHON"] = str(load_settings().quantizer.python)
    subprocess.run(mapped.command(container), env=environment, check=True, timeout=120)
    for tier in ("fast", "balanced", "precise"):
        assert (mapped.folder / "models" / tier / "config.json").is_file()


def leaves(engine: dict[str, Any], process: subprocess.Popen[bytes], port: int) -> None:
    """Check that the engine serves during its preStop command, and that an answer that is open at SIGTERM is finished."""
    subprocess.run(
        engine["lifecycle"]["preStop"]["exec"]["command"], check=True, timeout=60
    )
    body = {"model": "smollm2-135m-instruct", "stream": True, **STORY}
    headers = {"authorization": f"Bearer {ENGINE_KEY}"}
    request = {"json": body, "headers": headers, "timeout": 120}
    with (
        httpx.Client(trust_env=False) as client,
        client.stream(
            "POST", f"http://127.0.0.1:{port}/v1/completions", **request
        ) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        threading.Timer(0, process.send_signal, [signal.SIGTERM]).start()
        text = "\n".join(lines)
    assert '"finish_reason":"length"' in text
    assert text.rstrip().endswith("data: [DONE]")
    assert process.wait(60) == 0
