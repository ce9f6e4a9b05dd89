"""Waits of tests have bounds: no test waits without one, and those of ``tests/waiting.py`` say what did not happen."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import threading
from collections.abc import Iterator

import pytest

from router.section import PROJECT
from tests.waiting import call_within, until, until_still, wait_until, within

BOUNDS = ("asyncio.timeout(", "asyncio.wait_for(", "within(")
PROCESSES = {"subprocess.run", "subprocess.check_call", "subprocess.check_output"}
WAITING_METHODS = ("wait", "communicate", "join", "acquire")
FOR_EVER = "asyncio.Event().wait()"  # Such a wait ends with its task.
PARTS = (ast.With, ast.AsyncWith, ast.Call)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@pytest.mark.anyio
async def test_a_wait_that_is_over_says_what_was_waited_for_and_seen() -> None:
    seen = [3]
    with pytest.raises(
        AssertionError, match=r"waited 0\.05 s for four; seen last: \[\]"
    ):
        await until(
            lambda: [number for number in seen if number == 4], "four", within_s=0.05
        )
    with pytest.raises(
        AssertionError, match=r"for .*lambda: seen == \[4\].*; seen last: False"
    ):
        await until(lambda: seen == [4], within_s=0.05)

    async def never() -> None:
        await asyncio.Event().wait()

    with pytest.raises(
        AssertionError,
        match="for never; seen last: 'nothing: the first look did not end'",
    ):
        await until(never, within_s=0.05)
    with pytest.raises(AssertionError, match=r"waited 0\.05 s for the end"):
        await within(never(), "the end", within_s=0.05)
    assert await until(lambda: seen) == [3]
    assert await until_still(lambda: seen, "an end", still_s=0.001) == [3]


@pytest.mark.anyio
async def test_a_timeout_of_what_is_waited_for_is_not_taken_for_the_bound() -> None:
    async def look() -> None:
        raise TimeoutError("its own")

    for waiting in (until(look), within(look(), "the end")):
        with pytest.raises(TimeoutError, match="its own"):
            await waiting


def test_waits_without_an_event_loop_have_the_same_bounds() -> None:
    with pytest.raises(AssertionError, match=r"waited 0\.05 s for four; seen last: 0"):
        wait_until(lambda: 0, "four", within_s=0.05)
    with pytest.raises(AssertionError, match=r"waited 0\.05 s for a line"):
        call_within(lambda: threading.Event().wait(30), "a line", within_s=0.05)
    with pytest.raises(ZeroDivisionError):
        call_within(lambda: 1 // 0, "a number")


def test_no_test_waits_without_a_bound() -> None:
    """No test polls in a loop, or waits for a process, a thread, an event or an answer, without a bound."""
    command = ["git", "ls-files", "tests/*.py"]
    listed = subprocess.run(
        command, cwd=PROJECT, capture_output=True, text=True, check=True, timeout=60
    )
    waits_without = []
    for name in listed.stdout.split():
        # Fakes run in processes of their own, which tests end.
        if name.startswith("tests/fakes/"):
            continue
        tree = ast.parse((PROJECT / name).read_text("utf-8"))
        waits_without += [
            f"{name}:{node.lineno}: {ast.unparse(node)[:80]}"
            for node in unbounded(tree, is_bounded=False)
        ]
    assert waits_without == []


def unbounded(node: ast.AST, *, is_bounded: bool) -> Iterator[ast.stmt | ast.expr]:
    """Yield the waits below a node that have no bound.

    A bound around a function does not count for what is in it, because the function is called elsewhere.
    """
    if isinstance(node, FUNCTIONS):
        is_bounded = False
    elif isinstance(node, PARTS):
        is_bounded = is_bounded or is_bound(node)
    if not is_bounded and (polls(node) or waits(node)):
        assert isinstance(node, ast.stmt | ast.expr)
        yield node
    for child in ast.iter_child_nodes(node):
        yield from unbounded(child, is_bounded=is_bounded)


def is_bound(node: ast.With | ast.AsyncWith | ast.Call) -> bool:
    if isinstance(node, ast.Call):
        return ast.unparse(node).startswith(BOUNDS)
    return any(ast.unparse(item).startswith(BOUNDS) for item in node.items)


def polls(node: ast.AST) -> bool:
    """Tell whether a loop sleeps until something has happened, and does not end only with its task."""
    if not isinstance(node, ast.While):
        return False
    # A sleep of no seconds lets other tasks go on, and waits for nothing.
    text = ast.unparse(node).replace("sleep(0)", "")
    leaves = any(isinstance(part, ast.Break | ast.Return) for part in ast.walk(node))
    ends_by_itself = leaves or not isinstance(node.test, ast.Constant)
    return "sleep(" in text and ends_by_itself and "monotonic()" not in text


def waits(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    options = {option.arg: ast.unparse(option.value) for option in node.keywords}
    if options.get("timeout") == "None":
        return True
    starts_process = name in PROCESSES or (
        bool(node.args) and ast.unparse(node.args[0]) in PROCESSES
    )
    if starts_process:
        return "timeout" not in options
    is_method = (
        isinstance(node.func, ast.Attribute) and node.func.attr in WAITING_METHODS
    )
    return is_method and not node.args and not options and ast.unparse(node) != FOR_EVER
