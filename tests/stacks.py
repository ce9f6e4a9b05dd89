"""Reports on tests whose time is over: the stacks of all threads and of all asyncio tasks.

The process ends then (``timeout_method`` in pyproject.toml), and pytest-xdist would only say that a worker has crashed. So
the stacks go to a file, which the controller prints at the end of the run. ``tests/conftest.py`` registers these hooks.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import pytest
from pytest_timeout import is_debugging, timeout_timer

# Under this name the controller tells each worker the folder of the stacks' files.
FOLDER = "stacks_folder"
_FOLDER = pytest.StashKey[TemporaryDirectory[str]]()
_TIMER = pytest.StashKey[threading.Timer]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist where its stacks belong."""
    stash = node.config.stash
    if _FOLDER not in stash:
        stash[_FOLDER] = TemporaryDirectory(prefix="test-stacks-")
    node.workerinput[FOLDER] = stash[_FOLDER].name


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if _FOLDER in config.stash:
        for file in sorted(Path(config.stash[_FOLDER].name).iterdir()):
            terminalreporter.section(f"where worker {file.stem} stood")
            terminalreporter.write_line(file.read_text("utf-8"))


def pytest_unconfigure(config: pytest.Config) -> None:
    if _FOLDER in config.stash:
        config.stash[_FOLDER].cleanup()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Start a test's timer. Unlike pytest-timeout's own, it writes the stacks before it ends the process."""
    if settings.method != "thread":
        return None
    timer = threading.Timer(settings.timeout, _end, (item, settings))
    timer.name = f"timeout of {item.nodeid}"
    item.stash[_TIMER] = timer
    timer.start()
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> None:
    timer = item.stash.get(_TIMER, None)
    if timer is not None:
        timer.cancel()
        timer.join(60)


def _end(item: pytest.Item, settings: Any) -> None:
    if not settings.disable_debugger_detection and is_debugging():
        return
    report = f"{item.nodeid} did not end within {settings.timeout:g} s.\n{stacks()}"
    try:
        _write(item, report)
    finally:
        # This ends the process.
        timeout_timer(item, settings)


def _write(item: pytest.Item, report: str) -> None:
    worker = getattr(item.config, "workerinput", None)
    if worker is not None:
        (Path(worker[FOLDER]) / f"{worker['workerid']}.txt").write_text(report, "utf-8")
        return
    capture = item.config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    sys.stderr.write(report)
    sys.stderr.flush()


def stacks() -> str:
    """Return the stacks of all tasks that have not ended and of all other threads, with the innermost call last."""
    parts = []
    for task in _tasks():
        lines: list[str] = []
        for frame in _awaited_frames(task.get_coro()):
            if frame is not None:
                lines += traceback.format_stack(frame, limit=1)
        parts.append(f"--- task {task.get_name()}\n{''.join(lines)}")
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            lines = traceback.format_stack(frame)
            name = threads.get(ident, ident)
            parts.append(f"--- thread {name}\n{''.join(lines)}")
    return "\n".join(parts)


def _tasks() -> list[asyncio.Task[Any]]:
    """Return the tasks of all event loops: ``asyncio.all_tasks`` knows those of one."""
    tasks = [item for item in gc.get_objects() if isinstance(item, asyncio.Task)]
    return sorted(
        (task for task in tasks if not task.done()), key=lambda task: task.get_name()
    )


def _awaited_frames(awaited: Any) -> Iterator[FrameType | None]:
    """Yield the frames of a coroutine and of what it waits for, the innermost last."""
    while awaited is not None:
        if inspect.iscoroutine(awaited):
            yield awaited.cr_frame
            awaited = awaited.cr_await
        elif inspect.isgenerator(awaited):
            yield awaited.gi_frame
            awaited = awaited.gi_yieldfrom
        elif inspect.isasyncgen(awaited):
            yield awaited.ag_frame
            awaited = awaited.ag_await
        else:
            # A step of an asynchronous generator refers to the generator; a future refers to none, and is the end.
            awaited = next(filter(inspect.isasyncgen, gc.get_referents(awaited)), None)
