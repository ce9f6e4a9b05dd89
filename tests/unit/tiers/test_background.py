"""Work in the background that lasts."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from tests.unit.router_stack import router_stack
from tests.waiting import until
from tiers.background import Faults, lasting
from tiers.replica import Replica
from tiers.spec import ReplicaStatus

pytestmark = pytest.mark.anyio


class Work:
    """Work that fails as often as it is told, and then waits."""

    def __init__(self, *faults: BaseException) -> None:
        self.faults = list(faults)
        self.runs = 0

    async def run(self) -> None:
        self.runs += 1
        if self.faults:
            raise self.faults.pop(0)
        await asyncio.Event().wait()


async def test_work_starts_again_after_exceptions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is logged with what goes on, a repeated one with its trace only once; a cancellation ends it."""
    monkeypatch.setattr("tiers.background.FIRST_PAUSE_S", 0.001)
    caplog.set_level(logging.ERROR, "qarr.background")
    work = Work(ValueError("one"), ValueError("one"), KeyError("two"))
    task = asyncio.create_task(lasting(work.run, "counting"))
    await until(lambda: work.runs == 4)
    assert [
        (r.getMessage().split(" and ")[0], r.exc_info is not None)
        for r in caplog.records
    ] == [
        ("counting failed", True),
        ("counting failed", False),
        ("counting failed", True),
    ]
    assert caplog.records[0].getMessage().endswith(": ValueError: one")
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


async def test_a_cancellation_of_something_else_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the work waits for may be cancelled; that is an exception like others."""
    monkeypatch.setattr("tiers.background.FIRST_PAUSE_S", 0.001)
    work = Work(asyncio.CancelledError())
    task = asyncio.create_task(lasting(work.run, "counting"))
    await until(lambda: work.runs == 2)
    assert not task.done()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


async def test_work_that_returns_is_over() -> None:
    runs = []

    async def once() -> None:
        runs.append(1)

    await lasting(once, "once")
    assert runs == [1]


async def test_the_routers_own_loops_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The live stream goes on for those who read it when its picture could not be made for a while."""
    monkeypatch.setattr("router.monitoring.live.TICK_S", 0.02)
    monkeypatch.setattr("tiers.background.FIRST_PAUSE_S", 0.02)
    async with (
        router_stack(tmp_path) as stack,
        stack.client.stream("GET", f"{stack.url}/live") as live,
    ):
        lines = live.aiter_lines()

        async def fleets(count: int) -> None:
            while count:
                count -= (await anext(lines)) == "event: fleet"

        await fleets(3)
        broken = stack.fleet.add(
            Replica(
                "fast-9",
                stack.fleet.specs[0],
                "u",
                "",
                "m",
                status=ReplicaStatus.FAILED,
            )
        )
        whole = broken.state
        broken.state = None  # type: ignore[assignment]  # no picture can be made of it
        await until(lambda: "the live stream failed and starts again" in caplog.text)
        broken.state = whole
        stack.fleet.remove(broken)
        await fleets(20)


@pytest.mark.parametrize(
    ("repeats", "logged"), [(True, [True, False, True]), (False, [True, True])]
)
def test_faults_that_repeat_are_brief_or_silent(
    caplog: pytest.LogCaptureFixture, logged: list[bool], *, repeats: bool
) -> None:
    """Another exception, or the same one with another text, is a new fault with its trace."""
    faults = Faults(repeats=repeats)
    for error in (ValueError("a"), ValueError("a"), ValueError("b")):
        faults.log(error, "work")
    assert [record.exc_info is not None for record in caplog.records] == logged


async def test_pauses_double(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Work that fails at once is tried ever more rarely; the log says when the next attempt is."""
    monkeypatch.setattr("tiers.background.FIRST_PAUSE_S", 0.001)
    work = Work(*(ValueError(str(n)) for n in range(4)))
    task = asyncio.create_task(lasting(work.run, "counting"))
    await until(lambda: work.runs == 5)
    task.cancel()
    await asyncio.wait({task})
    pauses = [
        record.getMessage().split(" in ")[1].split(" s:")[0]
        for record in caplog.records
    ]
    assert pauses == ["0.001", "0.002", "0.004", "0.008"]
