"""The router's log, and `qarr logs`, which reads it together with the engines'."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import signal
import subprocess
from collections.abc import Coroutine
from contextvars import Context
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from router.auth.api_keys import add_key
from router.line_file import PrivateFile
from router.telemetry.log_format import JsonFormatter, TextFormatter
from router.telemetry.logs import PreparingHandler, begin_request
from tests.unit.own_router import QARR, own_router
from tests.waiting import until

pytestmark = pytest.mark.anyio


def made(
    message: str, *args: object, level: int = logging.INFO, **extra: object
) -> logging.LogRecord:
    queue: Queue[Any] = Queue()
    record = logging.getLogger("qarr.router").makeRecord(
        "qarr.router",
        level,
        fn="f",
        lno=1,
        msg=message,
        args=args,
        exc_info=None,
        extra=extra,
    )
    return PreparingHandler(queue).prepare(record)


async def test_lines_of_a_request_carry_its_ids() -> None:
    """Also those of tasks that the request began; those of others do not."""

    async def deeper() -> logging.LogRecord:
        return made("deep in %s", "it")

    async def request(name: str) -> logging.LogRecord:
        begin_request(f"request-{name}", f"trace-{name}")
        await asyncio.sleep(0)
        return await asyncio.create_task(deeper())

    async def other() -> logging.LogRecord:
        return made("alone")

    def begun(
        work: Coroutine[Any, Any, logging.LogRecord],
    ) -> asyncio.Task[logging.LogRecord]:
        return asyncio.get_running_loop().create_task(work, context=Context())

    first, second, alone = await asyncio.gather(
        begun(request("1")), begun(request("2")), begun(other())
    )
    lines = [
        json.loads(JsonFormatter().format(record)) for record in (first, second, alone)
    ]
    request_ids = [line.get("request_id") for line in lines]
    trace_ids = [line.get("trace_id") for line in lines]
    assert request_ids == ["request-1", "request-2", None]
    assert trace_ids == ["trace-1", "trace-2", None]
    assert (
        TextFormatter()
        .format(first)
        .endswith("INFO deep in it trace=trace-1 request=request-1")
    )


def test_control_characters_do_not_reach_a_terminal() -> None:
    """What a client or an engine says cannot clear the screen, or pretend to be another line."""
    record = made("path %s", "\x1b[2J\r\x9b1m\x00")
    assert TextFormatter().format(record).endswith(r"path \x1b[2J\x0d\x9b1m\x00")
    assert "\x1b" not in JsonFormatter().format(record)


def test_text_that_no_encoding_has_stays_a_line_of_json() -> None:
    """A lone surrogate, as a client may send it, costs no line."""
    assert (
        json.loads(JsonFormatter().format(made("path %s", "\ud800")))["message"]
        == "path \ud800"
    )


def test_long_lines_are_cut() -> None:
    """An engine's error may be a whole prompt's length: a line is not."""
    assert len(made("%s", "x" * 100_000).getMessage()) < 5000


def test_files_rotate(tmp_path: Path) -> None:
    """By size, with so many old ones kept; every line is whole."""
    path = tmp_path / "deep/router-1.log"
    file = PrivateFile(path, max_bytes=2000, kept=2, what="the log")
    file.setFormatter(JsonFormatter())
    for number in range(100):
        file.handle(made("line %d", number))
    file.close()
    oldest_first = sorted((tmp_path / "deep").iterdir(), reverse=True)
    assert [log_file.name for log_file in oldest_first] == [
        "router-1.log.2",
        "router-1.log.1",
        "router-1.log",
    ]
    kept_lines = []
    for log_file in oldest_first:
        assert log_file.stat().st_size <= 2000
        kept_lines += log_file.read_text().splitlines()
    messages = [json.loads(line)["message"] for line in kept_lines]
    first_kept = 100 - len(messages)
    assert messages == [f"line {number}" for number in range(first_kept, 100)]


async def test_a_folder_that_is_taken_away_comes_again(tmp_path: Path) -> None:
    """The thread goes on: with standard error at once, with the file in a folder made anew."""
    async with own_router(tmp_path, QARR_TELEMETRY__REQUEST_LINES="both") as router:
        file = router.log_dir / f"router-{router.port}.log"
        await router.generate()
        await until(lambda: '"outcome":"ok"' in file.read_text())
        shutil.rmtree(router.log_dir)
        for _ in range(3):
            await router.generate()
        await router.stop()
        assert file.read_text().count('"outcome":"ok"') == 3
        assert router.errors.read_text().count("POST /generate ok") == 4


async def test_what_the_router_logs(tmp_path: Path) -> None:
    """A line a request on standard error and in the file, failures of others; no prompt, no key, no query."""
    file = tmp_path / "keys.json"
    key, _ = add_key(file, "someone")
    settings = {
        "QARR_AUTH__KEYS_FILE": str(file),
        "QARR_TELEMETRY__REQUEST_LINES": "both",
    }
    async with own_router(tmp_path, **settings) as router:
        router.client.headers["authorization"] = f"Bearer {key}"
        served = await router.generate(prompt="secret words of a prompt", stream=False)
        assert served.status_code == 200
        refused = await router.generate(
            tier="fast", tier_policy="require", max_tokens=4000
        )
        assert refused.status_code >= 400
        assert (await router.generate(prompt=7, tier="secret words")).status_code == 400
        assert (
            await router.client.get(f"{router.url}/no%1Bthing?token=secret-words")
        ).status_code == 404
        unknown = {"authorization": "Bearer qarr_secret-words"}
        assert (
            await router.client.get(f"{router.url}/tiers", headers=unknown)
        ).status_code == 401
        assert (await router.client.get(f"{router.url}/tiers")).status_code == 200
        log_file = router.log_dir / f"router-{router.port}.log"
        # it serves as soon as one tier is ready
        await until(lambda: "fast-0 is ready" in log_file.read_text("utf-8"))
        assert await router.stop() == 0
        log = log_file.read_text("utf-8")
        shown = router.errors.read_text("utf-8")
        lines = [json.loads(line) for line in log.splitlines()]
        ok, too_long, *failures = [
            line for line in lines if line["logger"] == "qarr.request"
        ]
        assert ok["event"] == "request"
        assert ok["outcome"] == "ok"
        assert too_long["event"] == "request"
        assert too_long["outcome"] == "refused"
        assert [failure["event"] for failure in failures] == ["http"] * 3
        assert [failure["status"] for failure in failures] == [400, 404, 401]
        for line in (ok, too_long):
            assert "status" not in line
        for failure in failures:
            assert "outcome" not in failure
        assert ok["request_id"] == served.headers["x-request-id"]
        assert ok["trace_id"] == served.headers["x-qarr-trace-id"]
        assert ok["tier"] == served.headers["x-qarr-tier"]
        assert (
            served.headers["x-qarr-reason"]
            .removeprefix("probably ")
            .startswith(f"{ok['class']}, ")
        )
        assert too_long["level"] == "warning"
        assert too_long["error"] == "too_long"
        assert too_long["served_by"] is None
        assert "tiers" not in ok
        assert [line["message"] for line in lines].count("fast-0 is ready") == 1
        for text in (log, shown):
            assert "secret" not in text
            assert key not in text
            assert "GET /no%1Bthing 404" in text
        assert f"trace={ok['trace_id']}" in shown
        assert f"POST /generate ok class={ok['class']} tier={ok['tier']}" in shown
        by_trace = await router.qarr("logs", "router", "--trace", ok["trace_id"][:12])
        assert by_trace.stdout.count("\n") == 1
        assert "POST /generate ok" in by_trace.stdout
        by_request = await router.qarr("logs", "--request", ok["request_id"])
        assert by_request.stdout == by_trace.stdout
        assert (await router.qarr("logs", "--level", "error")).stdout == ""


async def test_a_stopped_terminal_holds_no_request_up(tmp_path: Path) -> None:
    """Nobody reads standard error, and what it can hold is full: requests are answered, and the router ends when told to."""
    async with own_router(tmp_path) as router:
        router.kill()
        argv = [QARR, "serve", "--port", str(router.port), "--fast", router.engines[0]]
        process = subprocess.Popen(argv, stderr=subprocess.PIPE, env=router.env)
        assert process.stderr is not None
        try:
            router.process = process
            await router.until_ready()
            for _ in range(15):
                answers = await asyncio.gather(
                    *(router.client.get(f"{router.url}/{'x' * 100}") for _ in range(50))
                )
                assert {answer.status_code for answer in answers} == {404}
            assert (await router.generate()).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 20) == 0
        finally:
            process.kill()
            process.wait(60)
            process.stderr.close()
