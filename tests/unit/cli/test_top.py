"""What operators see in a terminal: `qarr top`, in a real pseudo-terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
from rich.cells import cell_len

from router.cli.top.screen import OWN_ONLY, screen, shown_age, snapshot
from router.cli.top.state import Snapshot, ViewState
from tests.fakes.engine import Behaviour
from tests.unit.own_engines import until
from tests.unit.own_router import QARR, own_router

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio
ANSI = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()][A-Z0-9]|\r")
REPLICA: dict[str, Any] = {
    "id": "fast-0", "url": "http://127.0.0.1:1", "state": "ready", "detail": None, "in_flight": 3, "limit": 8,
    "breaker": "closed", "kv_cache_usage": 0.25, "kv_pressure": False, "tokens_per_s": 31.0, "served": 3, "failed": 0,
}  # fmt: skip
TIER: dict[str, Any] = {
    "tier": "fast", "precision": "awq-int4", "state": "ready", "checkpoint_digest": None, "max_in_flight": 32,
    "max_num_seqs": 16, "max_model_len": 2048, "replicas": [REPLICA], "tokens_per_s": 31.0, "requests": 40, "errors": 0,
    "ttft_ms": {"p50": 210.0, "p95": 1380.0}, "tpot_ms": {"p50": 40.0, "p95": 44.0}, "sla": {"asked": 10, "met": 9},
}  # fmt: skip
DOWN = {
    **REPLICA,
    "id": "precise-0",
    "state": "failed",
    "detail": "exited with status 137\nmore",
    "limit": None,
    "kv_cache_usage": None,
}
TOTALS = dict.fromkeys(("requests", "ok", "refused", "errors", "client_gone", "retries", "continuations"), 7)
FLEET: dict[str, Any] = {
    "at": 1795283000.0, "model": "a-model", "version": "0.1.0", "machine": "a CPU (2 cores)", "waiting": 2, "window_s": 60,
    "trace_url": None, "in_flight_total": 2, "totals": TOTALS,
    "tiers": [
        TIER,
        {**TIER, "tier": "balanced", "replicas": [REPLICA, {**REPLICA, "id": "balanced-1", "breaker": "open"}]},
        {**TIER, "tier": "precise", "state": "failed", "replicas": [DOWN], "ttft_ms": None, "tpot_ms": None, "sla": {"asked": 0, "met": 0}},
    ],
    "in_flight": [
        {"request_id": "r1", "trace_id": "1" * 32, "class": "chat", "tier": "fast", "replica": "fast-0", "state": "decode",
         "age_ms": 900.0, "prompt_tokens": 31, "output_tokens": 12},
        {"request_id": "r2", "trace_id": "2" * 32, "class": "code", "tier": None, "replica": None, "state": "waiting",
         "age_ms": 100.0, "prompt_tokens": 500, "output_tokens": 0},
    ],
}  # fmt: skip
VERDICT = {
    "tier": "fast", "state": "ready", "predicted_ttft_ms": 200.0, "predicted_tpot_ms": 40.0, "expected_loss": 0.1,
    "expected_loss_interval": [0.0, 0.2], "cost": 1.2, "verdict": "chosen",
}  # fmt: skip
RECORD: dict[str, Any] = {
    "at": 1795283000.0, "request_id": "r0", "trace_id": "0" * 32, "route": "/generate", "key": "", "priority": "standard",
    "class": "chat", "confidence": 0.93, "tier": "fast", "served_by": "fast", "replica": "fast-0", "precision": "awq-int4",
    "checkpoint": None, "reason": "class chat: \x1b[2Jlowest", "basis": "table", "degraded": [], "outcome": "ok", "error": None,
    "prompt_tokens": 31, "output_tokens": 12, "queue_ms": 0.0, "overhead_ms": 1.9, "ttft_ms": 210.0, "tpot_ms": None,
    "duration_ms": 700.0, "predicted_ttft_ms": None, "predicted_tpot_ms": None, "sla": {"ttft_ms": 100.0, "tpot_ms": None},
    "sla_met": False, "attempts_failed": 0, "continued_on": [], "cost": 1.2, "tiers": [VERDICT],
}  # fmt: skip


def full(records: int = 60) -> Snapshot:
    """Return a picture of everything that there can be."""
    picture = Snapshot().apply("fleet", FLEET)
    for number in range(records):
        picture = picture.apply("request", {**RECORD, "request_id": f"ended-{number}"})
    return picture


def text(picture: Snapshot, view: ViewState, width: int, height: int) -> str:
    """Return the screen as text."""
    return "\n".join(line.plain for line in screen(picture, view, width, height))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (100, 30), (60, 12), (20, 5), (200, 80)])
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("trouble", ["", "http://127.0.0.1:8080 (ConnectError)"])
def test_the_screen_fits(width: int, height: int, opened: bool, trouble: str) -> None:  # noqa: FBT001
    """It has exactly the terminal's lines, and none is wider, at every size and in every state."""
    picture = replace(full(), trouble=trouble)
    view = ViewState(selected=3, opened=RECORD if opened else None)
    for shown in (picture, Snapshot(), Snapshot(trouble=trouble)):
        lines = screen(shown, view, width, height)
        assert len(lines) == height
        assert max(line.cell_len for line in lines) <= width
        assert not any("\x1b" in line.plain for line in lines)


def test_a_standard_terminal_has_what_matters() -> None:
    """At 80x24: every tier, what fails and why, what is in flight and what has ended, and how to go on."""
    shown = text(full(), ViewState(), 80, 24)
    for part in (
        "2/3 tiers ready", "2 waiting", "fast      ready", "3/8", "25%", "210ms/1.4s", "90%", "balanced  ready 2/2",
        "breaker open", "precise   failed", "3/32", "precise-0: exited with status 137", "IN FLIGHT 2", "waiting", "ENDED",
        "ok, late", "q quit",
    ):  # fmt: skip
        assert part in shown, part
    assert "more\n" not in shown


def test_it_says_whose_requests_are_shown() -> None:
    """A key that sees its own requests only is told so, live and once; an operator's is not."""
    own = Snapshot().apply("fleet", {**FLEET, "scope": "own"})
    assert OWN_ONLY in text(own, ViewState(), 100, 30)
    assert OWN_ONLY in "\n".join(line.plain for line in snapshot(own, 160, unicode=True))
    assert OWN_ONLY not in text(full(), ViewState(), 100, 30)


def test_keys() -> None:
    """p freezes the picture, s goes through the orders, arrows select over both lists, Enter opens and closes."""
    picture, view = full(5), ViewState()
    first = {}
    for _ in range(4):
        first[view.sort] = view.in_flight(picture)[0]["request_id"]
        view = view.key("s", picture)
    assert (first, view.sort) == ({"age": "r1", "tokens": "r2", "tier": "r2", "class": "r1"}, "age")
    paused = view.key("p", picture)
    later = picture.apply("fleet", {**FLEET, "model": "another-model"})
    assert "a-model" in text(later, paused, 80, 24)
    assert "PAUSED" in text(later, paused, 80, 24)
    assert "another-model" in text(later, paused.key("p", later), 80, 24)
    assert view.key("enter", picture) == view
    for _ in range(9):
        view = view.key("down", picture)
    assert view.selected == 6
    opened = view.key("enter", picture)
    assert opened.opened == picture.records[4]
    assert "VERDICTS" in text(picture, opened, 80, 24)
    assert opened.key("enter", picture).opened is None
    assert view.key("up", picture).selected == 5
    assert view.key("escape", picture).selected is None
    assert ViewState().key("down", Snapshot()).selected is None
    flying = ViewState().key("down", picture).key("enter", picture)
    assert "in flight" in text(picture, flying, 80, 24)


def test_events_that_come_twice_count_once() -> None:
    """After a lost connection the router tells its last requests again."""
    assert len(full(3).apply("request", {**RECORD, "request_id": "ended-1"}).records) == 3


def test_without_unicode() -> None:
    """A terminal that has no blocks gets plain characters."""
    assert all(ord(c) < 128 for line in snapshot(full(2), 100, unicode=False) for c in line.plain.replace("\x1b", ""))


def test_wide_characters_keep_the_columns() -> None:
    """Characters that take two cells of a terminal do not move what stands behind them."""
    picture = Snapshot().apply("fleet", FLEET).apply("request", {**RECORD, "class": "\u6a21\u578b" * 4})
    lines = [line.plain for line in screen(picture, ViewState(), 100, 30)]
    header = next(line for line in lines if "OUTCOME" in line)
    row = next(line for line in lines if "\u6a21" in line)
    assert cell_len(row) == 100
    assert cell_len(row[: row.index("fast")]) == header.index("TIER")


def test_ages() -> None:
    """Short, whatever they are."""
    assert [shown_age(ms) for ms in (0, 59_900, 61_000, 3_700_000)] == ["0.0s", "59.9s", "1m01s", "1h01m"]


@dataclass(slots=True)
class Terminal:
    """A pseudo-terminal with a command in it."""

    process: subprocess.Popen[bytes]
    number: int
    data: bytearray = field(default_factory=bytearray)

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self.number, keys.encode())

    def seen(self, after: int = 0) -> str:
        """Return what was written, without colours and moves."""
        return ANSI.sub("", self.data[after:].decode("utf-8", "replace"))

    def read(self) -> None:
        """Take what is written."""
        try:
            self.data += os.read(self.number, 65536)
        except OSError:
            asyncio.get_running_loop().remove_reader(self.number)

    async def ended(self) -> int:
        """Wait until the command has ended; return its exit status."""
        await until(lambda: self.process.poll() is not None)
        return self.process.wait()


@contextmanager
def terminal(argv: list[str], env: dict[str, str], width: int = 80, height: int = 24) -> Iterator[Terminal]:
    """Run a command in a terminal of its own; afterwards that is as it was before."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    before = termios.tcgetattr(slave)
    process = subprocess.Popen(
        argv, stdin=slave, stdout=slave, stderr=slave, env={**env, "TERM": "xterm-256color"}, start_new_session=True
    )
    shown = Terminal(process, master)
    loop = asyncio.get_running_loop()
    loop.add_reader(master, shown.read)
    try:
        yield shown
        assert termios.tcgetattr(slave) == before
        assert shown.data.count(b"\x1b[?1049h") == shown.data.count(b"\x1b[?1049l"), "left in the other screen"
        assert shown.data.rstrip().endswith((b"\x1b[?25h", b"\x1b[?1049l")) or b"\x1b[?25h" in shown.data[-400:]
    finally:
        loop.remove_reader(master)
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)


async def test_top_in_a_terminal(tmp_path: Path) -> None:
    """Live tiers and requests; keys act; a killed router is told of and found again; quitting leaves the terminal as it was."""
    async with own_router(tmp_path, [Behaviour(delay_s=0.3) for _ in range(3)]) as router:
        with terminal([QARR, "top", "--url", router.url, "--interval", "0.2"], router.env) as shown:
            await until(lambda: "3/3 tiers ready" in shown.seen())
            asking = asyncio.create_task(router.generate())
            await until(lambda: "decode" in shown.seen())
            assert (await asking).status_code == 200
            await until(lambda: "class chat: lowest" in shown.seen())
            shown.type("s")
            await until(lambda: "sort: tokens" in shown.seen())
            shown.type("p")
            await until(lambda: "PAUSED" in shown.seen())
            shown.type("p\x1b[B\r")
            await until(lambda: "VERDICTS" in shown.seen())
            router.kill()
            await until(lambda: "trying again" in shown.seen())
            mark = len(shown.data)
            await router.start()
            await until(
                lambda: "trying again" not in shown.seen(mark)[-2000:] and "tiers ready" in shown.seen(mark)[-2000:]
            )
            assert shown.process.poll() is None
            shown.type("q")
            assert await shown.ended() == 0
        with terminal([QARR, "top", "--url", router.url], router.env, 40, 10) as shown:
            await until(lambda: "tiers ready" in shown.seen())
            shown.process.send_signal(signal.SIGTERM)
            assert await shown.ended() == 0
        await router.generate()
        once = await router.qarr("top", "--once", "--url", router.url)
        assert (once.returncode, "\x1b" in once.stdout) == (0, False)
        assert re.search(r"fast +ready", once.stdout)
        assert "chat" in once.stdout


@pytest.mark.parametrize("args", [("top", "--once"), ("top",)])
async def test_without_a_router(args: tuple[str, ...]) -> None:
    """Status 2, where it looked, and what to do."""
    argv = [QARR, *args, "--url", "http://127.0.0.1:9"]
    done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no router answers at http://127.0.0.1:9" in done.stderr
