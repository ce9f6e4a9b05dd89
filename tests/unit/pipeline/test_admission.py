"""The queue over a real fleet, without HTTP: who gets which place, step by step."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from classifier import PromptClass, PromptFeatures
from router.pipeline.admission import Admission, Grant
from router.policy.decide import decide
from router.policy.decision import PRIORITIES, RequestRefusedError, RoutingQuery
from router.policy.table import PolicyStore
from router.settings import load_settings
from tiers.fleet import Fleet
from tiers.replica import Replica
from tiers.snapshot import Gauges
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierName, TierSpec

pytestmark = pytest.mark.anyio
FAST, BALANCED, PRECISE = STANDARD_TIERS
LONG_WAITS = {"interactive": 600, "standard": 600, "batch": 600}
QUERY = RoutingQuery(
    PromptFeatures(
        2,
        1,
        tokens=1,
        tokens_exact=True,
        contains_code=False,
        asks_for_code=False,
        language=None,
        prompt_class=PromptClass.CHAT,
        confidence=0.9,
        signals=(),
    ),
    20,
    100,
)


@dataclass
class Entrance:
    """An admission and its fleet: requests come by ``ask`` and end by ``end``."""

    admission: Admission
    fleet: Fleet
    policy: PolicyStore

    def ask(
        self, *, key: str = "key", priority: int = PRIORITIES["standard"], **query: Any
    ) -> asyncio.Task[Grant]:
        asked = replace(QUERY, **query)
        decision = decide(asked, self.fleet.snapshot(), self.policy.table)
        return asyncio.create_task(self.admission.enter(decision, key, priority))

    async def hold(self, tier: TierName, **query: Any) -> Grant:
        return await self.ask(hint=tier, require=True, **query)

    async def end(self, admitted: Grant, key: str = "key") -> None:
        """Let a request end, and the queue see it."""
        admitted.lease.release()
        self.admission.leave(key, admitted)
        await self.seen()

    async def seen(self) -> None:
        """Let all that is ready to run do so."""
        for _ in range(10):
            await asyncio.sleep(0)


def door(
    tmp_path: Path, places: dict[TierName, int], *, replicas: int = 1, **options: Any
) -> Entrance:
    """Return the queue before tiers with so many places; requests fit none of the others."""
    settings = load_settings(
        None,
        {
            "policy": {"profiles": str(tmp_path)},
            "admission": {"max_wait_s": LONG_WAITS, **options},
        },
    )
    specs = tuple(
        TierSpec(tier, 4096, max_num_seqs=16, max_in_flight=places[tier])
        for tier in places
    )
    fleet = Fleet(specs)
    for spec in specs:
        for number in range(replicas):
            fleet.add(
                Replica(
                    f"{spec.name}-{number}",
                    spec,
                    "u",
                    "",
                    "m",
                    status=ReplicaStatus.READY,
                )
            )
    policy = PolicyStore(settings.policy, fleet, "made-8B")
    return Entrance(Admission(fleet, policy, settings.admission), fleet, policy)


async def test_those_who_wait_for_a_full_tier_hide_nobody(tmp_path: Path) -> None:
    """However many wait for ``fast`` and come before: what waits for ``precise`` gets its place, and before newcomers."""
    at = door(tmp_path, {FAST: 1, PRECISE: 1})
    fast = await at.hold(FAST)
    precise = await at.hold(PRECISE)
    urgent = PRIORITIES["interactive"]
    crowd = [at.ask(hint=FAST, require=True, priority=urgent) for _ in range(40)]
    await at.seen()
    victim = at.ask(hint=PRECISE, require=True)
    await at.seen()
    assert at.admission.waiting == 41
    assert at.admission.waiting_for(FAST) == 40
    assert at.admission.waiting_for(PRECISE) == 1
    newcomer = at.ask(hint=PRECISE, require=True)
    await at.end(precise)
    assert victim.done() is True
    assert newcomer.done() is False
    await at.end(victim.result())
    assert newcomer.done()
    await at.end(newcomer.result())
    await at.end(fast)
    assert sum(task.done() for task in crowd) == 1
    for task in crowd:
        task.cancel()
    await at.seen()
    assert at.admission.waiting == 0


async def test_a_newcomer_does_not_take_the_place_that_another_waits_for(
    tmp_path: Path,
) -> None:
    """A place that has come free goes to who waits, though the newcomer asks before the queue was looked at."""
    at = door(tmp_path, {FAST: 1})
    held = await at.hold(FAST)
    waiting = at.ask()
    await at.seen()
    held.lease.release()
    newcomer = at.ask()
    await at.seen()
    assert waiting.done() is True
    assert newcomer.done() is False
    newcomer.cancel()


async def test_several_answers_take_as_many_places(tmp_path: Path) -> None:
    """All at once on one replica; what is free meanwhile is kept, or those with one answer would take it for ever."""
    at = door(tmp_path, {FAST: 4})
    held = [await at.hold(FAST) for _ in range(3)]
    several = at.ask(sequences=3)
    await at.seen()
    newcomer = at.ask()
    await at.seen()
    assert several.done() is False
    assert newcomer.done() is False
    assert at.fleet.replicas[0].state.slots == 3
    await at.end(held[0])
    assert several.done() is False
    assert newcomer.done() is False
    await at.end(held[1])
    assert several.done() is True
    assert newcomer.done() is False
    assert at.fleet.replicas[0].state.slots == 4
    await at.end(held[2])
    assert newcomer.done()
    await at.end(several.result())
    await at.end(newcomer.result())
    assert at.fleet.replicas[0].state.slots == 0
    assert at.fleet.replicas[0].state.in_flight == 0


async def test_only_one_replica_is_kept_for_several_answers(tmp_path: Path) -> None:
    """The one that lacks least; the places of the others go on being given."""
    at = door(tmp_path, {FAST: 4}, replicas=2)
    held = [await at.hold(FAST, prompt_tokens=tokens) for tokens in (2000, 20, 20, 20)]
    assert [r.state.slots for r in at.fleet.replicas] == [1, 3]
    several = at.ask(sequences=4)
    await at.seen()
    newcomers = [at.ask() for _ in range(2)]
    await at.seen()
    assert several.done() is False
    assert newcomers[0].done() is True
    assert newcomers[1].done() is False
    assert newcomers[0].result().lease.replica.id == "fast-1"
    await at.end(next(each for each in held if each.lease.replica.id == "fast-0"))
    assert several.result().lease.replica.id == "fast-0"
    newcomers[1].cancel()


async def test_more_answers_than_a_replica_has_places_get_one_that_is_idle(
    tmp_path: Path,
) -> None:
    """They are computed in turns there, and nothing else beside them."""
    at = door(tmp_path, {FAST: 4})
    held = await at.hold(FAST)
    many = at.ask(sequences=64)
    await at.seen()
    assert not many.done()
    await at.end(held)
    replica = at.fleet.replicas[0]
    assert many.done() is True
    assert replica.state.slots == 64
    assert replica.state.in_flight == 1
    other = at.ask()
    await at.seen()
    assert not other.done()
    await at.end(many.result())
    assert other.done() is True
    assert replica.state.slots == 1


async def test_long_prompts_that_wait_for_a_cache_do_not_stop_short_ones(
    tmp_path: Path,
) -> None:
    """A replica whose cache is nearly full has places for short prompts alone, whoever came first."""
    at = door(tmp_path, {FAST: 4})
    at.fleet.replicas[0].note_gauges(Gauges(1, 0, 0.95))
    long = at.ask(prompt_tokens=3000, priority=PRIORITIES["interactive"])
    await at.seen()
    short = at.ask()
    await at.seen()
    assert long.done() is False
    assert short.done() is True
    long.cancel()


async def test_who_has_waited_longest_gets_every_nth_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of the lowest class is served though more urgent ones never stop coming."""
    monkeypatch.setattr("router.pipeline.admission.OLDEST_EVERY", 4)
    at = door(tmp_path, {FAST: 1})
    held = await at.hold(FAST)
    patient = at.ask(priority=PRIORITIES["batch"])
    await at.seen()
    urgent = [at.ask(priority=PRIORITIES["interactive"]) for _ in range(12)]
    await at.seen()
    served = 0
    while not patient.done():
        await at.end(held)
        done = [task for task in (patient, *urgent) if task.done()]
        held = next(task.result() for task in done)
        urgent = [task for task in urgent if not task.done()]
        served += 1
    assert served <= 4
    for task in urgent:
        task.cancel()


async def test_the_oldest_keeps_its_turn_until_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two replicas, the places that others get meanwhile do not take its turn away."""
    monkeypatch.setattr("router.pipeline.admission.OLDEST_EVERY", 2)
    at = door(tmp_path, {FAST: 2}, replicas=2)
    held = [await at.hold(FAST) for _ in range(4)]
    patient = at.ask(sequences=2, priority=PRIORITIES["batch"])
    await at.seen()
    urgent = [at.ask(priority=PRIORITIES["interactive"]) for _ in range(20)]
    await at.seen()
    steps = 0
    while not patient.done():
        await at.end(held.pop(0))
        held += [task.result() for task in urgent if task.done()]
        urgent = [task for task in urgent if not task.done()]
        steps += 1
        assert steps < 10
    for task in urgent:
        task.cancel()


async def test_who_leaves_just_as_it_is_let_in_leaves_nothing(tmp_path: Path) -> None:
    """Its place is free again, and its key is not taken to have it still."""
    at = door(tmp_path, {FAST: 1})
    held = await at.hold(FAST, key="other")
    for _ in range(5):
        gone = at.ask(key="key")
        await at.seen()
        held.lease.release()
        # the queue is looked at: it has its place, and does not know yet
        await asyncio.sleep(0)
        assert at.fleet.replicas[0].state.slots == 1
        gone.cancel()
        await at.seen()
        assert gone.cancelled()
        assert at.fleet.replicas[0].state.slots == 0
        at.admission.leave("other", held)
        held = await at.hold(FAST, key="other")
    # the same class; were places still counted, it would come after the next one
    first = at.ask(key="key")
    await at.seen()
    second = at.ask(key="third")
    await at.seen()
    await at.end(held, "other")
    assert first.done() is True
    assert second.done() is False
    second.cancel()


async def test_who_is_refused_or_gives_up_leaves_nothing(tmp_path: Path) -> None:
    """Shed, too late, or its tier gone: no entry stays, and no key has a place."""
    at = door(tmp_path, {FAST: 1}, max_waiting=1)
    held = await at.hold(FAST)
    batch = at.ask(priority=PRIORITIES["batch"])
    await at.seen()
    urgent = at.ask(priority=PRIORITIES["interactive"])
    await at.seen()
    with pytest.raises(RequestRefusedError, match="are waiting already"):
        batch.result()
    at.fleet.replicas[0].mark(ReplicaStatus.FAILED)
    await at.end(held)
    with pytest.raises(RequestRefusedError):
        urgent.result()
    assert at.admission.waiting == 0


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_comes_and_goes_all_of_it_comes_back(
    tmp_path: Path, seed: int
) -> None:
    """Requests of all kinds come, end and leave at any moment: limits hold, nobody is left waiting, nothing is left held."""
    source = random.Random(seed)
    at = door(tmp_path, {FAST: 3, BALANCED: 2, PRECISE: 4}, replicas=2, max_waiting=30)
    running: list[tuple[str, asyncio.Task[Grant]]] = []
    for _ in range(600):
        if source.random() < 0.55:
            key = source.choice("abc")
            only = {
                "hint": source.choice((FAST, BALANCED, PRECISE)),
                "require": source.random() < 0.5,
            }
            sequences = source.choice((1, 1, 1, 2, 3, 9))
            priority = source.choice(list(PRIORITIES.values()))
            running.append(
                (key, at.ask(key=key, priority=priority, sequences=sequences, **only))
            )
        elif running:
            key, task = running.pop(source.randrange(len(running)))
            for _ in range(source.randrange(4)):
                await asyncio.sleep(0)
            if not task.done():
                task.cancel()
            elif task.exception() is None:
                await at.end(task.result(), key)
        for replica in at.fleet.replicas:
            assert (
                replica.state.slots <= replica.state.limit
                or replica.state.in_flight == 1
            )
    while running:
        await at.seen()
        # none would mean that somebody waits for nothing
        key, task = next(each for each in running if each[1].done())
        running.remove((key, task))
        if not task.cancelled() and task.exception() is None:
            await at.end(task.result(), key)
    assert at.admission.waiting == 0
    assert not any(
        r.state.in_flight or r.state.slots or r.state.prompt_tokens or r.output_tokens
        for r in at.fleet.replicas
    )
