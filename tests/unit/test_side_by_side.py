"""The pieces of benchmarks/side_by_side.py: its stub engine, its load, its table, and a short run without peers."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from router.section import PROJECT
from tests.ports import reserved_ports

pytestmark = pytest.mark.anyio
CHAT = {"model": "stub", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
SCRIPT = "benchmarks/side_by_side.py"
two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the benchmark needs two cores")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(PROJECT / "benchmarks")
    return importlib.import_module


@asynccontextmanager
async def engine() -> AsyncIterator[str]:
    (port,) = reserved_ports()
    process = await asyncio.create_subprocess_exec(sys.executable, PROJECT / "benchmarks/token_stub.py", str(port))
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient() as client, asyncio.timeout(30):
            while True:
                try:
                    await client.get(f"{url}/health")
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.05)
        yield url
    finally:
        process.terminate()
        await process.wait()


async def run(*command: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=PROJECT, env=env
    )
    output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


@pytest.mark.parametrize("pause_us", [0, 300])
async def test_the_stub_streams_tokens_as_vllm_does(pause_us: int) -> None:
    """One event a token, with its id where ids are asked for, then usage where that is, then the end."""
    async with engine() as url, httpx.AsyncClient(base_url=url) as client:
        await client.get(f"/pace/{pause_us}")
        wanted = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
        answer = await client.post("/v1/chat/completions", json=CHAT | wanted)
        plain = await client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 3, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part]
    assert done == "[DONE]"
    role, *tokens, usage = map(json.loads, events)
    assert role["choices"][0]["delta"] == {"content": "", "role": "assistant"}
    assert len(role["prompt_token_ids"]) == usage["usage"]["prompt_tokens"]
    assert [token["choices"][0]["token_ids"] for token in tokens] == [[1000], [1001], [1002], [1003], [1004]]
    assert [token["choices"][0]["finish_reason"] for token in tokens] == [None] * 4 + ["length"]
    assert usage["usage"]["completion_tokens"] == 5
    assert plain.text.count('"text"') == plain.text.count(" wave") == 3
    assert "usage" not in plain.text
    assert '"token_ids":[' not in plain.text


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


async def test_the_table_tells_ratios_targets_and_errors(benchmark: Any) -> None:
    """Ratios are those of one pass; a target that is missed is told so, and so is the first error."""
    load, module = benchmark("token_load"), benchmark("side_by_side")

    def samples(*costs: float, errors: int = 0) -> list[Any]:
        return [load.Sample(100, errors, 50.0, cost, 2.0, 3.0, 40.0, "HTTP/1.1 500" * bool(errors)) for cost in costs]

    rows = {module.BASE: samples(100, 200, 300), module.OURS: samples(150, 240, 30)}
    rows[module.OURS_GENERATE] = samples(225, 225, 225, errors=2)
    run = module.Run(["$ command"], {module.OURS: "v1"}, {"nginx": "not installed"}, {"paced": rows})
    text = run.text()
    assert f"{module.OURS}: x1.20 of {module.BASE}; target at most x1.3: met" in text
    assert f"{module.OURS_GENERATE}: x1.50 of {module.OURS}; target at most x1.2: missed" in text
    assert f"first error of {module.OURS_GENERATE}: 'HTTP/1.1 500'" in text
    assert "nginx                       skipped: not installed" in text
    record = run.record()
    assert (
        record["rows"]["paced"][module.OURS_GENERATE] | {"errors": 6, "cpu_us": 225, "added_p50": None}
        == (record["rows"]["paced"][module.OURS_GENERATE])
    )


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
