"""The router's log, and `qarr logs`, which reads it together with the engines'."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import time
from contextvars import Context
from queue import Queue
from typing import TYPE_CHECKING, Any

import pytest

from router.auth.api_keys import add_key
from router.cli.log_reader import LEVELS, NEW_FILE, Filter, Logs, find_files
from router.telemetry.logs import JsonFormatter, TextFormatter, _File, _RequestHandler, begin_request
from tests.unit.own_engines import until
from tests.unit.own_router import QARR, own_router

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

pytestmark = pytest.mark.anyio
VLLM = """\
Triton is installed, but doesn't include CPU backend.
(APIServer pid=11) INFO 11-21 14:14:05 [api_utils.py:347] vLLM starts
(EngineCore pid=12) WARNING 11-21 14:14:06 [cpu.py:12] slow kernel
(EngineCore pid=12) ERROR 11-21 14:14:09 [core.py:99] it broke
Traceback (most recent call last):
  File "core.py", line 99, in step
ValueError: broken
(APIServer pid=11) INFO:     Application startup complete.
"""


def at(text: str) -> float:
    """Return Unix seconds of a local time."""
    return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M:%S"))


def router_line(clock: str, message: str, level: str = "info", **fields: Any) -> str:
    """Return a line as a router writes it."""
    line = {"at": at(f"2026-11-21 {clock}"), "level": level, "logger": "qarr.router", "message": message, **fields}
    return json.dumps(line) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with an engine's log of this start and the one before, and a router's."""
    write(tmp_path / "fast-0.log", VLLM, "2026-11-21 14:20:00")
    write(tmp_path / "fast-0.log.1", "INFO 12-31 23:59:58 [a.py:1] the start before\n", "2026-01-01 00:00:01")
    (tmp_path / "router-8080.log").write_text(
        router_line("14:14:05", "up")
        + router_line("14:14:08", "POST /generate ok", request_id="a" * 32, trace_id="b" * 32)
        + router_line("14:14:10", "POST /generate error", "warning", request_id="c" * 32, trace_id="d" * 32)
    )
    return tmp_path


def write(path: Path, text: str, changed: str) -> None:
    """Write a file that was last changed at a certain time."""
    path.write_text(text)
    os.utime(path, (at(changed), at(changed)))


def read(folder: Path, target: str = "", count: int | None = None, **wanted: Any) -> list[str]:
    """Return what is shown, each line with its source."""
    logs = Logs(folder, target, Filter(**wanted))
    try:
        return [f"{e.source}: {e.text}" for e in logs.last(count)]
    finally:
        logs.close()


def test_logs_are_merged_by_time(folder: Path) -> None:
    """Lines of all sources come in the order of time; those without a time stay below theirs; years are found."""
    assert read(folder) == [
        "fast-0: [a.py:1] the start before",
        "fast-0: Triton is installed, but doesn't include CPU backend.",
        "fast-0: [api_utils.py:347] vLLM starts",
        "router-8080: up",
        "fast-0: (EngineCore) [cpu.py:12] slow kernel",
        "router-8080: POST /generate ok",
        "fast-0: (EngineCore) [core.py:99] it broke",
        "fast-0: Traceback (most recent call last):",
        'fast-0:   File "core.py", line 99, in step',
        "fast-0: ValueError: broken",
        "fast-0: Application startup complete.",
        "router-8080: POST /generate error",
    ]
    logs = Logs(folder, "fast", Filter())
    first = logs.last(None)[0]
    logs.close()
    assert first.at == at("2025-12-31 23:59:58")


@pytest.mark.parametrize("count", [0, 1, 3, 7, 11, 12, 40])
def test_the_last_lines_are_the_end_of_all(folder: Path, count: int) -> None:
    """Reading from the end, over the start before, gives what reading everything gives."""
    everything = read(folder)
    assert read(folder, count=count) == everything[max(len(everything) - count, 0) :]


def test_the_end_of_a_long_file_is_read_alone(tmp_path: Path) -> None:
    """Lines are counted over blocks, long lines included."""
    lines = [f"INFO 11-21 14:14:05 [a.py:1] {number} {'x' * (number % 977)}" for number in range(3000)]
    write(tmp_path / "fast-0.log", "\n".join(lines) + "\n", "2026-11-21 14:20:00")
    assert [line.split()[2] for line in read(tmp_path, count=500)] == [str(n) for n in range(2500, 3000)]


def test_filters(folder: Path) -> None:
    """By source, level, time, trace and request; lines without a level go with the one above them."""
    assert {f.source for f in find_files(folder, "router")} == {"router-8080"}
    assert len(read(folder, "fast")) == len(read(folder, "fast-0")) == 9
    assert read(folder, "balanced") == []
    assert [line.rpartition(" ")[2] for line in read(folder, level="error")] == ["broke", "last):", "step", "broken"]
    assert read(folder, level="warning")[-1] == "router-8080: POST /generate error"
    assert read(folder, since=at("2026-11-21 14:14:09"))[0] == "fast-0: (EngineCore) [core.py:99] it broke"
    assert read(folder, trace="bbbbbb") == read(folder, request="a" * 32) == ["router-8080: POST /generate ok"]
    assert read(folder, trace="bbbbbb", request="c" * 32) == []


def test_engines_lines_of_a_trace_are_found_by_its_requests(folder: Path) -> None:
    """An engine knows the request's id, not the trace's; the router's log tells which belong together."""
    with (folder / "fast-0.log").open("a") as log:
        log.write(f"(APIServer pid=11) INFO 11-21 14:14:11 [l.py:1] Aborted request chatcmpl-{'a' * 32}-0.\n")
    found = [line.partition(": ")[0] for line in read(folder, trace="b" * 32)]
    assert found == ["router-8080", "fast-0"]
    assert len(read(folder, "fast", trace="b" * 32)) == 1


def test_following_survives_rotation_and_restart(folder: Path) -> None:
    """What is written before a file is renamed, in the new one, and in files that come later is shown, once."""
    logs = Logs(folder, "", Filter())
    logs.last(0)
    engine, router = folder / "fast-0.log", folder / "router-8080.log"
    with router.open("a") as old:
        old.write(router_line("14:15:00", "cut")[:20])
        old.flush()
        assert logs.more() == []
        old.write(router_line("14:15:00", "cut")[20:])
        router.rename(folder / "router-8080.log.1")
        old.write(router_line("14:15:01", "last of the old"))
    router.write_text(router_line("14:15:02", "first of the new"))
    engine.replace(folder / "fast-0.log.1")
    engine.write_text("INFO 11-21 14:15:03 [a.py:1] started again\n")
    (folder / "fast-1.log").write_text("INFO 11-21 14:15:04 [a.py:1] another\n")
    seen = [e.text for e in logs.more()]
    assert [text for text in seen if text != NEW_FILE] == [
        "cut",
        "last of the old",
        "first of the new",
        "[a.py:1] started again",
        "[a.py:1] another",
    ]
    assert seen.count(NEW_FILE) == 1
    engine.write_text("INFO 11-21 14:15:05 [a.py:1] cut\n")  # the same file, shorter
    assert [e.text for e in logs.more()] == [NEW_FILE, "[a.py:1] cut"]
    assert logs.more() == []
    logs.close()


def test_lines_that_are_no_logs_are_shown(tmp_path: Path) -> None:
    """Half a JSON line of a killed router, bytes that are no text, an empty file and other files do no harm."""
    (tmp_path / "router-1.log").write_bytes(router_line("14:14:05", "up").encode() + b'{"at": 17\n\xff\xfe\n[]\n')
    (tmp_path / "fast-0.log").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("no log")
    assert [line.partition(": ")[2] for line in read(tmp_path)] == ["up", '{"at": 17', "\ufffd\ufffd", "[]"]


def made(message: str, *args: object, level: int = logging.INFO, **extra: object) -> logging.LogRecord:
    """Return a line as it is handed to the thread that writes."""
    queue: Queue[Any] = Queue()
    record = logging.getLogger("qarr.router").makeRecord("qarr.router", level, "f", 1, message, args, None, extra=extra)
    return _RequestHandler(queue).prepare(record)


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

    def begun(work: Coroutine[Any, Any, logging.LogRecord]) -> asyncio.Task[logging.LogRecord]:
        """Start work as if nothing had run in this process before."""
        return asyncio.get_running_loop().create_task(work, context=Context())

    first, second, alone = await asyncio.gather(begun(request("1")), begun(request("2")), begun(other()))
    lines = [json.loads(JsonFormatter().format(record)) for record in (first, second, alone)]
    assert [(line.get("request_id"), line.get("trace_id")) for line in lines] == [
        ("request-1", "trace-1"),
        ("request-2", "trace-2"),
        (None, None),
    ]
    assert TextFormatter().format(first).endswith("INFO deep in it trace=trace-1 request=request-1")


def test_control_characters_do_not_reach_a_terminal() -> None:
    """What a client or an engine says cannot clear the screen, or pretend to be another line."""
    record = made("path %s", "\x1b[2J\r\x9b1m\x00")
    assert TextFormatter().format(record).endswith(r"path \x1b[2J\x0d\x9b1m\x00")
    assert "\x1b" not in JsonFormatter().format(record)


def test_long_lines_are_cut() -> None:
    """An engine's error may be a whole prompt's length: a line is not."""
    assert len(made("%s", "x" * 100_000).getMessage()) < 5000


def write_at_once(handler: _File, line: logging.LogRecord) -> None:
    """Write a line that comes alone."""
    handler.handle(line)
    handler.flush()


def test_files_rotate(tmp_path: Path) -> None:
    """By size, with so many old ones kept; every line is whole; a file that another router renamed is left alone."""
    handler = _File(tmp_path / "deep/router-1.log", 2000, 2)
    for number in range(100):
        write_at_once(handler, made("line %d", number))
    os.rename(tmp_path / "deep/router-1.log", tmp_path / "taken over")  # noqa: PTH104
    write_at_once(handler, made("line %d", 100))
    handler.close()
    files = sorted((tmp_path / "deep").iterdir())
    assert [f.name for f in files] == ["router-1.log", "router-1.log.1", "router-1.log.2"]
    kept = [
        json.loads(line)["message"]
        for f in (*files[2:0:-1], tmp_path / "taken over", files[0])
        for line in f.read_text().splitlines()
    ]
    assert kept == [f"line {n}" for n in range(101 - len(kept), 101)]


def test_a_file_that_cannot_be_opened_costs_no_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is renamed again and again while it lasts, and the next line goes to a new file."""
    path = tmp_path / "router-1.log"
    handler = _File(path, 2000, 2)
    while not path.with_suffix(".log.2").exists():
        write_at_once(handler, made("before"))
    while path.stat().st_size < 2000:
        write_at_once(handler, made("before"))
    old = path.read_text()
    monkeypatch.setattr("router.line_file.CALM_S", 0.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        for _ in range(6):
            write_at_once(handler, made("lost"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert path.with_suffix(".log.1").read_text() == old
    write_at_once(handler, made("after"))
    handler.close()
    assert [json.loads(line)["message"] for line in path.read_text().splitlines()] == ["after"]
    assert [r.getMessage() for r in caplog.records] == [
        f"the log {path} cannot be written (Too many open files): lines are lost until the log says how many",
        f"the log {path} is written again; 6 lines are lost",
    ]


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
    settings = {"QARR_AUTH__KEYS_FILE": str(file), "QARR_TELEMETRY__REQUEST_LINES": "both"}
    async with own_router(tmp_path, **settings) as router:
        router.client.headers["authorization"] = f"Bearer {key}"
        served = await router.generate(prompt="secret words of a prompt", stream=False)
        assert served.status_code == 200
        refused = await router.generate(tier="fast", tier_policy="require", max_tokens=4000)
        assert refused.status_code >= 400
        assert (await router.generate(prompt=7, tier="secret words")).status_code == 400
        assert (await router.client.get(f"{router.url}/no%1Bthing?token=secret-words")).status_code == 404
        unknown = {"authorization": "Bearer qarr_secret-words"}
        assert (await router.client.get(f"{router.url}/tiers", headers=unknown)).status_code == 401
        assert (await router.client.get(f"{router.url}/tiers")).status_code == 200
        assert await router.stop() == 0
        log = (router.log_dir / f"router-{router.port}.log").read_text("utf-8")
        shown = router.errors.read_text("utf-8")
        lines = [json.loads(line) for line in log.splitlines()]
        about = [line for line in lines if line["logger"] == "qarr.request"]
        assert [(e["event"], e.get("outcome"), e.get("status")) for e in about] == [
            ("request", "ok", None),
            ("request", "refused", None),
            ("http", None, 400),
            ("http", None, 404),
            ("http", None, 401),
        ]
        ok, long = about[:2]
        assert ok["request_id"] == served.headers["x-request-id"]
        assert (ok["trace_id"], ok["tier"]) == (served.headers["x-qarr-trace-id"], served.headers["x-qarr-tier"])
        assert f"class {ok['class']}" in served.headers["x-qarr-reason"]
        assert (long["level"], long["error"], long["served_by"]) == ("warning", "too_long", None)
        assert "tiers" not in ok
        assert [line["message"] for line in lines].count("fast-0 is ready") == 1
        for text in (log, shown):
            assert "secret" not in text
            assert key not in text
            assert "GET /no%1Bthing 404" in text
        assert f"trace={ok['trace_id']}" in shown
        assert f"POST /generate ok class={ok['class']} tier={ok['tier']}" in shown
        found = await router.qarr("logs", "router", "--trace", ok["trace_id"][:12])
        assert found.stdout.count("\n") == 1
        assert "POST /generate ok" in found.stdout
        assert (await router.qarr("logs", "--request", ok["request_id"])).stdout == found.stdout
        assert (await router.qarr("logs", "--level", "error")).stdout == ""


async def test_json_on_standard_error_and_a_level(tmp_path: Path) -> None:
    """With `log_format` json every line of the log is an object; `log_level` leaves the file as it is."""
    quiet = {"QARR_TELEMETRY__LOG_FORMAT": "json", "QARR_TELEMETRY__LOG_LEVEL": "warning"}
    async with own_router(tmp_path, **quiet) as router:
        await router.generate()
        await router.generate(tier="fast", tier_policy="require", max_tokens=4000)
        await router.stop()
        logged = [json.loads(line) for line in router.errors.read_text().splitlines() if line.startswith("{")]
        assert [line["outcome"] for line in logged if "outcome" in line] == ["refused"]
        kept = (router.log_dir / f"router-{router.port}.log").read_text()
        assert '"outcome":"ok"' in kept


async def test_a_stopped_terminal_holds_no_request_up(tmp_path: Path) -> None:
    """Nobody reads standard error, and what it can hold is full: requests are answered, and the router ends when told to."""
    async with own_router(tmp_path) as router:
        router.kill()
        argv = [QARR, "serve", "--port", str(router.port), "--fast", router.engines[0]]
        process = subprocess.Popen(argv, stderr=subprocess.PIPE, env=router.env)
        assert process.stderr is not None
        try:
            while await router.status() != 200:
                await asyncio.sleep(0.05)
            for _ in range(15):
                answers = await asyncio.gather(*(router.client.get(f"{router.url}/{'x' * 100}") for _ in range(50)))
                assert {a.status_code for a in answers} == {404}
            assert (await router.generate()).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 20) == 0
        finally:
            process.kill()
            process.wait()
            process.stderr.close()


async def test_the_command_follows(tmp_path: Path) -> None:
    """`qarr logs -f` shows what is added until it is interrupted, and ends without a fuss."""
    (tmp_path / "fast-0.log").write_text("INFO 11-21 14:14:05 [a.py:1] first\n")
    env = {**os.environ, "QARR_ENGINE__LOG_DIR": str(tmp_path)}
    out = tmp_path / "out"
    with out.open("wb") as output:
        process = subprocess.Popen([QARR, "logs", "fast", "-f"], stdout=output, stderr=output, env=env)
    try:
        await until(lambda: "first" in out.read_text())
        with (tmp_path / "fast-0.log").open("a") as log:
            log.write("INFO 11-21 14:14:06 [a.py:1] second\n")
        await until(lambda: "second" in out.read_text())
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 10) == 0
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in out.read_text()
    assert "Aborted" not in out.read_text()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("slow",), "there is no log of 'slow'"),
        (("--since", "yesterday"), "give an age (90s, 10m, 2h, 1d)"),
        (("--trace", "abc"), "at least the first 6 characters"),
    ],
)
async def test_the_command_says_what_is_wrong(args: tuple[str, ...], said: str, folder: Path) -> None:
    """Status 2, and what there is or what is allowed."""
    env = {**os.environ, "QARR_ENGINE__LOG_DIR": str(folder)}
    done = await asyncio.to_thread(
        subprocess.run, [QARR, "logs", *args], capture_output=True, text=True, env=env, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr.replace("\n", "")


def test_levels_are_in_order() -> None:
    """The choice on the command line is what the filter knows."""
    assert LEVELS[0] == "debug"
    assert LEVELS.index("warning") < LEVELS.index("error")
