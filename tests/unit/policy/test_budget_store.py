"""The budget's state outlives a restart, and is one for all that share it: by a file, and by Redis."""

from __future__ import annotations

import asyncio
import multiprocessing
from typing import TYPE_CHECKING

import pytest
from redis.asyncio import Redis

from router.policy.budget import Answer, BudgetState
from router.policy.budget_store import FileState, LossBudget, RedisState
from router.policy.decision import Priced
from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from router.policy.budget_store import SharedState
    from tests.conftest import RedisServer

pytestmark = pytest.mark.anyio
PRICED = (Priced(TierName.FAST, 1.0, 0.3), Priced(TierName.BALANCED, 2.0, 0.1), Priced(TierName.PRECISE, 4.0, 0.0))
HALF_LIFE_S = 300.0


@pytest.fixture(params=["file", "redis"])
async def shared(
    request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer
) -> AsyncIterator[SharedState]:
    if request.param == "file":
        yield FileState(tmp_path / "profiles/budget.json")
        return
    async with Redis.from_url(redis_server.url, decode_responses=True) as redis:
        await redis.delete("budget")
        yield RedisState(redis, "budget")


async def test_it_outlives_a_restart(shared: SharedState) -> None:
    """The next router goes on with price and mean."""
    first = LossBudget(HALF_LIFE_S)
    for _ in range(20):
        first.add(Answer(100, 0.3, 0.1, PRICED))
    await first.exchange(shared)
    second = LossBudget(HALF_LIFE_S)
    assert second.price is None
    await second.exchange(shared)
    assert second.price == pytest.approx(first.price)
    assert second.current().mean == pytest.approx(0.3)
    assert second.tokens == 0  # a counter counts its own


async def test_several_share_one_price(shared: SharedState) -> None:
    """Each adds and exchanges in its own time; in the end all have the sum of all, and one price."""
    budgets = [LossBudget(HALF_LIFE_S) for _ in range(4)]

    async def serve(number: int, budget: LossBudget) -> None:
        for count in range(30):
            budget.add(Answer(100, 0.3 if number % 2 else 0.0, 0.1, PRICED))
            if count % (number + 2) == 0:
                await budget.exchange(shared)

    await asyncio.gather(*(serve(number, budget) for number, budget in enumerate(budgets)))
    for _ in range(2):
        for budget in budgets:
            await budget.exchange(shared)
    assert len({round(budget.price or 0, 9) for budget in budgets}) == 1
    state = budgets[0].current()
    assert state.tokens == pytest.approx(4 * 30 * 100, rel=0.02)  # halved a little in the seconds of the test
    assert state.mean == pytest.approx(0.15, rel=0.02)


def _serve(path: Path, answers: int) -> None:
    async def run() -> None:
        budget, shared = LossBudget(HALF_LIFE_S), FileState(path)
        for _ in range(answers):
            budget.add(Answer(1, 0.3, 0.1, PRICED))
            await budget.exchange(shared)

    asyncio.run(run())


async def test_no_process_overwrites_anothers(tmp_path: Path) -> None:
    """Processes that write the file at the same time lose no answer."""
    path, context = tmp_path / "budget.json", multiprocessing.get_context("spawn")
    processes = [context.Process(target=_serve, args=(path, 100)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        await asyncio.to_thread(process.join)
    last = LossBudget(HALF_LIFE_S)
    await last.exchange(FileState(path))
    assert last.state.tokens == pytest.approx(300, rel=0.1)
    assert path.stat().st_mode & 0o777 == 0o600


async def test_idle_processes_write_nothing(tmp_path: Path) -> None:
    """Once a second for days would wear a disk out."""
    shared, budget = FileState(tmp_path / "budget.json"), LossBudget(HALF_LIFE_S)
    budget.add(Answer(1, 0.3, 0.1, PRICED))
    await budget.exchange(shared)
    before = (tmp_path / "budget.json").stat().st_mtime_ns
    for _ in range(3):
        await budget.exchange(shared)
    assert (tmp_path / "budget.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("content", ["", "nonsense", '{"tokens": "many"}', "[]"])
async def test_a_broken_file_is_begun_anew(tmp_path: Path, content: str) -> None:
    """What is there cannot be used; what is added is kept."""
    path = tmp_path / "budget.json"
    path.write_text(content)
    budget = LossBudget(HALF_LIFE_S)
    budget.add(Answer(7, 0.3, 0.1, PRICED))
    await budget.exchange(FileState(path))
    assert budget.state.tokens == pytest.approx(7)


class _Away:
    async def update(self, _change: object) -> BudgetState:
        raise OSError("read-only file system")


async def test_a_router_goes_on_where_nothing_can_be_shared(caplog: pytest.LogCaptureFixture) -> None:
    """It keeps its own state, says so once, and shares what it has as soon as it can."""
    budget = LossBudget(HALF_LIFE_S)
    budget.add(Answer(7, 0.3, 0.1, PRICED))
    task = asyncio.create_task(budget.keep(_Away))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert budget.state.tokens == pytest.approx(7)
    assert [record.getMessage() for record in caplog.records] == [
        "the loss budget's state is neither shared nor kept: OSError: read-only file system"
    ]
