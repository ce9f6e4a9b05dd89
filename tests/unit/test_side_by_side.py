"""benchmarks/side_by_side.py: its load, and a short run without peers."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from router.section import PROJECT

pytestmark = pytest.mark.anyio
CHAT = {"model": "stub", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
SCRIPT = "benchmarks/side_by_side.py"
two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the benchmark needs two cores")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(PROJECT / "benchmarks")
    return importlib.import_module


async def run(*command: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=PROJECT, env=env
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


GOOD = b"".join(b'data: {"text":" wave%c"}\n\n' % (97 + n) for n in range(3)) + b"data: [DONE]\n\n"
WRONG = {
    "not 200": b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy",
    "too few tokens": b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD) - 24, GOOD[24:]),
    "no end": b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD) - 14, GOOD[:-14]),
    "cut": b"%x\r\n%s" % (len(GOOD), GOOD[:40]),
}
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def _sample(benchmark: Any, answers: list[list[bytes]]) -> Any:
    """Ask a server that answers so, each request in turn with the next list of writes, and with the last one then."""
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            for part in left.pop(0) if len(left) > 1 else left[0]:
                writer.write(part)
                await asyncio.sleep(0)
            if not part:
                break
        writer.close()

    module = benchmark("token_load")
    question = module.Question("/v1/chat/completions", CHAT, 3, b"data: [DONE]")
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await module.load(port, question, psutil.Process(), connections=2, seconds=0.5)


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_answer_is_an_error(benchmark: Any, wrong: str) -> None:
    """One among good ones is counted, its beginning is kept, and the good ones still count."""
    good = HEAD + b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD)
    bad = WRONG[wrong] if wrong == "not 200" else HEAD + WRONG[wrong]
    sample = await _sample(benchmark, [[bad, b""] if wrong == "cut" else [bad], [good]])
    assert sample.errors == 1
    assert "HTTP/1.1" in sample.error
    assert sample.answers > 1


@two_cores
@pytest.mark.timeout(240)
async def test_a_short_run_without_peers(tmp_path: Path) -> None:
    """QARR answers every load without an error; a peer that is not there is told with how to get it."""
    for program in ("taskset", "git"):
        (tmp_path / program).symlink_to(shutil.which(program) or program)
    rows = ["direct", "nginx", "QARR /v1/chat/completions", "QARR /generate"]
    argv = [sys.executable, SCRIPT, "--seconds", "0.2", "--passes", "1", "--only", ",".join(rows)]
    env = {**os.environ, "PATH": str(tmp_path)}
    status, shown, progress = await run(*argv, "--json", str(tmp_path / "figures.json"), env=env)
    assert status == 0, progress
    assert "nginx                       skipped: nginx is not installed: apt-get install nginx-light" in shown
    assert "pass 1 of 1, paced, QARR /generate" in progress
    found = json.loads((tmp_path / "figures.json").read_text())["rows"]
    for figures in (found["non-streaming"], found["saturated"], found["paced"]):
        assert [(name, row["errors"], row["answers"] > 0) for name, row in figures.items()] == [
            (name, 0, True) for name in rows if name != "nginx"
        ], shown
