"""benchmarks/side_by_side.py: its load, and a short run without peers."""

from __future__ import annotations

import asyncio
import contextlib
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
from tests.waiting import within

pytestmark = pytest.mark.anyio
CHAT = {
    "model": "stub",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 5,
}
SCRIPT = "benchmarks/side_by_side.py"
two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="the benchmark needs two cores"
)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(PROJECT / "benchmarks")
    return importlib.import_module


async def run(*command: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=PROJECT,
        env=env,
    )
    output, errors = await within(
        process.communicate(), "the process to end", within_s=200
    )
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


GOOD = (
    b"".join(b'data: {"text":" wave%c"}\n\n' % letter for letter in b"abc")
    + b"data: [DONE]\n\n"
)
WRONG = {
    "not 200": b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy",
    "too few tokens": b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD) - 24, GOOD[24:]),
    "no end": b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD) - 14, GOOD[:-14]),
    "cut": b"%x\r\n%s" % (len(GOOD), GOOD[:40]),
}
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def body_length(head: bytes) -> int:
    """Return the length of a request's body, as its head has it."""
    return int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])


async def _sample(benchmark: Any, answers: list[list[bytes]]) -> Any:
    """Load a server that answers each request with the next list of writes, and later ones with the last list."""
    remaining = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            await reader.readexactly(body_length(head))
            writes = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            for part in writes:
                writer.write(part)
                await asyncio.sleep(0)
            if not part:
                break
        writer.close()

    module = benchmark("token_load")
    question = module.Question(
        "/v1/chat/completions", CHAT, tokens=3, ending=b"data: [DONE]"
    )
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        return await module.load(
            port, question, psutil.Process(), connections=2, seconds=0.5
        )


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_answer_is_an_error(benchmark: Any, wrong: str) -> None:
    """One wrong answer among good ones is counted, its beginning is kept, and the good ones still count."""
    good = HEAD + b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD)
    bad = WRONG[wrong] if wrong == "not 200" else HEAD + WRONG[wrong]
    # An empty write lets the server close the connection.
    writes = [bad, b""] if wrong == "cut" else [bad]
    sample = await _sample(benchmark, [writes, [good]])
    assert sample.errors == 1
    assert "HTTP/1.1" in sample.error
    assert sample.answers > 1


async def test_first_answers_of_new_connections_are_timed(benchmark: Any) -> None:
    """Each connection of a burst asks once; a wrong answer among them is an error."""
    module = benchmark("token_load")
    good = HEAD + b"%x\r\n%s\r\n0\r\n\r\n" % (len(GOOD), GOOD)
    answers = {"good": good, "bad": HEAD + WRONG["too few tokens"]}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(body_length(head))
                writer.write(answers["good"])
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        question = module.Question(
            "/v1/chat/completions", CHAT, tokens=3, ending=b"data: [DONE]"
        )
        sample = await module.burst(port, question, connections=8, busy=2, seconds=0.0)
        assert sample.answers == 8
        assert sample.errors == 0
        assert 0 < sample.p50 <= sample.p99 <= sample.most
        answers["good"] = answers["bad"]
        sample = await module.burst(port, question, connections=8, busy=1, seconds=0.0)
        assert sample.answers == 0
        assert sample.errors > 8


def test_added_time_is_the_median_of_the_differences_in_each_pass(
    benchmark: Any,
) -> None:
    """The added time is the time through the proxy less the direct time, by percentile, as the median of all passes."""
    sample = benchmark("token_load").Sample
    summary = benchmark("side_by_side").summary

    def samples(*times: tuple[float, float]) -> list[Any]:
        return [
            sample(
                answers=100,
                errors=0,
                per_second=50.0,
                cpu_us=10.0,
                first_p50=p50,
                first_p99=p99,
                rss_mb=30.0,
            )
            for p50, p99 in times
        ]

    direct = samples((1.0, 2.0), (5.0, 9.0), (1.0, 3.0))
    row = summary(samples((3.0, 6.0), (6.0, 10.0), (4.0, 9.0)), None, direct)
    # The differences are 2, 1, 3 at p50, and 4, 1, 6 at p99.
    assert row.added_p50 == 2.0
    assert row.added_p99 == 4.0
    assert row.p50 == 4.0
    assert row.p99 == 9.0
    assert summary(direct, None, direct).added_p50 is None


def test_a_gateway_is_told_its_engines_in_headers(benchmark: Any) -> None:
    """Portkey takes its engines from the request's headers, which leave the request valid."""
    engines = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    portkey = benchmark("proxies").PROXIES["Portkey"]
    question = portkey.question(streamed=False, engines=engines)
    head, _, body = question.raw.decode().partition("\r\n\r\n")
    headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:])
    targets = json.loads(headers["x-portkey-config"])["targets"]
    assert [target["custom_host"] for target in targets] == [
        f"{url}/v1" for url in engines
    ]
    assert int(headers["content-length"]) == len(body)
    assert json.loads(body)["model"] == "stub"


@two_cores
@pytest.mark.timeout(240)
async def test_a_short_run_without_peers(tmp_path: Path) -> None:
    """QARR answers every load without an error; for a missing peer the benchmark says how to install it."""
    for program in ("taskset", "git"):
        (tmp_path / program).symlink_to(shutil.which(program) or program)
    rows = ["direct", "nginx", "QARR /v1/chat/completions", "QARR /generate"]
    argv = [sys.executable, SCRIPT, "--seconds", "0.2", "--passes", "1"]
    argv += ["--only", ",".join(rows)]
    env = {**os.environ, "PATH": str(tmp_path)}
    status, shown, progress = await run(
        *argv, "--json", str(tmp_path / "figures.json"), env=env
    )
    assert status == 0, progress
    assert (
        "nginx                       skipped: nginx is not installed: apt-get install nginx-light"
        in shown
    )
    assert "pass 1 of 1, paced, QARR /generate" in progress
    record = json.loads((tmp_path / "figures.json").read_text())
    assert record["reads"]["QARR /generate"] == "JSON, tokens, class, text as a prefix"
    assert shown.count("JSON, tokens, class, text as a prefix") == 2
    assert "Bursts of new connections while 64 others keep the proxy busy" in shown
    assert list(record["bursts"]) == ["64", "500"]
    for bursts in record["bursts"].values():
        assert list(bursts) == [name for name in rows if name != "nginx"]
        # A slow machine refuses some of the 500 requests, which would wait too long.
        for row in bursts.values():
            assert row["answers"] > 0, shown
            assert row["p50"] <= row["p99"] <= row["most"]
    by_load = record["rows"]
    assert list(by_load) == list(record["loads"])
    for load in list(by_load)[:3]:
        assert by_load[load]["QARR /generate"]["added_p99"] > 0, load
    for figures in by_load.values():
        assert list(figures) == [name for name in rows if name != "nginx"], shown
        for row in figures.values():
            assert row["errors"] == 0, shown
            assert row["answers"] > 0, shown
