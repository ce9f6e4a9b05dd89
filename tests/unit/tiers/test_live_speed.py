"""Speed learned from live requests: against engines of known speed, under loads that never leave them idle."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from statistics import median

import httpx
import pytest
from msgspec.structs import astuple

from tests.fakes.engine import Behaviour
from tests.unit.measuring_router import measuring_router
from tests.waiting import until
from tiers.fleet import Fleet
from tiers.live_speed import MIN_ANSWERS, LiveSpeed, learn
from tiers.replica import Replica
from tiers.spec import STANDARD_TIERS, ReplicaStatus, TierName, TierSpec
from tiers.speed import AnswerSample, ReplicaLoad, SpeedModel

TRUE = SpeedModel(
    40, 1.5, step_base_ms=20, step_ms_per_sequence=4, ttft_steps=1.5, contention=0.5
)
SEQS = 16


def answers(
    count: int,
    noise: float = 0.0,
    outliers: float = 0.0,
    seed: int = 3,
    batch: int | None = None,
) -> list[AnswerSample]:
    """Return what an engine of the true speed shows under changing loads, none of them idle."""
    source = random.Random(seed)
    found = []
    for _ in range(count):
        sequences = batch or source.randint(1, SEQS - 1)
        waiting = source.choice((0, 0, 80, 300))
        prompt = source.randint(20, 600)
        neighbours = source.choice((0.0, 0.5, 1.0))
        times = TRUE.times(
            prompt,
            ReplicaLoad(sequences - 1, waiting, output_tokens=0, neighbours=neighbours),
            SEQS,
            1.0,
        )
        prefilled = source.choice((0.0, 0.0, 5.0))
        slowed = 1 + TRUE.contention * neighbours

        def seen(value: float) -> float:
            far = source.uniform(2, 6) if source.random() < outliers else 1
            return value * far * (1 + source.uniform(-noise, noise))

        tpot_ms = (
            TRUE.step_ms(sequences) + TRUE.prefill_ms_per_token * prefilled
        ) * slowed
        found.append(
            AnswerSample(
                prompt,
                sequences - 1,
                waiting_tokens=waiting,
                neighbours=neighbours,
                ttft_ms=seen(times.ttft_ms),
                batch=sequences,
                prefilled=prefilled,
                tpot_ms=seen(tpot_ms),
            )
        )
    return found


def furthest_off(model: SpeedModel) -> float:
    """Return the largest factor that a model's predictions are off by, over loads of all kinds."""
    worst = 1.0
    for sequences in (0, 1, 3, 7, 14):
        for prompt in (30, 200, 600):
            for neighbours in (0.0, 1.0):
                load = ReplicaLoad(sequences, 0, output_tokens=0, neighbours=neighbours)
                pairs = zip(
                    astuple(model.times(prompt, load, SEQS, 1.0)),
                    astuple(TRUE.times(prompt, load, SEQS, 1.0)),
                    strict=True,
                )
                worst = max(worst, *(max(a / b, b / a) for a, b in pairs))
    return worst


def test_exact_answers_give_the_speed_back() -> None:
    """Without noise the model is the truth, and says where it comes from."""
    model = learn(answers(60), SEQS)
    assert model is not None
    assert furthest_off(model) < 1.02
    assert model.contention == TRUE.contention
    assert model.source == "live"
    assert model.profiled is False
    assert model.under_load is True


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_outliers_do_little(seed: int) -> None:
    """A fifth of noise, and one answer in ten that took several times as long: predictions stay near."""
    model = learn(answers(200, noise=0.2, outliers=0.1, seed=seed), SEQS)
    assert model is not None
    assert furthest_off(model) < 1.75


def test_an_even_load_needs_what_was_measured_idle() -> None:
    """Where the batch is always the same, the idle measurement tells what of a step is its own."""
    idle = replace(
        TRUE, step_base_ms=TRUE.step_ms(1), step_ms_per_sequence=0.0, contention=0.0
    )
    model = learn(answers(100, batch=8), SEQS, idle)
    assert model is not None
    for sequences in (1, 4, 8):
        assert model.step_ms(sequences) == pytest.approx(
            TRUE.step_ms(sequences), rel=0.2
        )


def test_answers_that_took_no_time_teach_nothing() -> None:
    """An engine may answer what it was asked before from a cache of its own, in less time than the clock shows."""
    instant = [answer._replace(ttft_ms=0.0, tpot_ms=0.0) for answer in answers(40)]
    assert learn(instant, SEQS) is None
    assert (
        learn(
            answers(60),
            SEQS,
            idle=SpeedModel(0, 0, step_base_ms=0, step_ms_per_sequence=0),
        )
        is not None
    )
    model = learn(instant + answers(60), SEQS)
    assert model is not None
    assert furthest_off(model) < 1.02


def test_few_answers_teach_nothing() -> None:
    """Below a number of answers there is no model."""
    assert learn(answers(MIN_ANSWERS - 1), SEQS) is None


@pytest.mark.anyio
async def test_a_profile_ends_it_and_a_restart_begins_it_anew() -> None:
    """What is profiled is left alone; what an engine showed before it was started again counts no more."""
    spec = TierSpec(TierName.FAST, 2048, max_num_seqs=SEQS, max_in_flight=32)
    fleet = Fleet((spec,))
    replica = fleet.add(Replica("fast-0", spec, "", "", "m"))
    replica.mark(ReplicaStatus.READY)
    live = LiveSpeed(fleet)
    for seen in answers(100):
        replica.answers.last.append(seen)
        replica.answers.noted += 1
    await live.look(replica)
    assert replica.state.speed is not None
    assert replica.state.speed.learned
    replica.measured(profiled := replace(TRUE, profiled=True))
    for seen in answers(100, noise=0.5):
        replica.answers.last.append(seen)
        replica.answers.noted += 1
    await live.look(replica)
    assert replica.state.speed is profiled
    replica.mark(ReplicaStatus.STARTING)
    replica.mark(ReplicaStatus.READY)
    await live.look(replica)
    assert replica.state.speed is None
    assert not replica.answers.last


@pytest.mark.anyio
async def test_replicas_that_were_removed_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They come and go for as long as the router runs."""
    monkeypatch.setattr("tiers.live_speed.LEARN_POLL_S", 0.01)
    spec = TierSpec(TierName.FAST, 2048, max_num_seqs=SEQS, max_in_flight=32)
    fleet = Fleet((spec,))
    live = LiveSpeed(fleet)
    learning = asyncio.create_task(live.run())
    for number in range(3):
        replica = fleet.add(Replica(f"fast-{number}", spec, "", "", "m"))
        replica.mark(ReplicaStatus.READY)
        for seen in answers(MIN_ANSWERS):
            replica.answers.last.append(seen)
            replica.answers.noted += 1
        await until(lambda r=replica: r.state.speed is not None)
        assert replica.id in live._answers
        fleet.remove(replica)
    await until(lambda: not live._answers)
    learning.cancel()


async def ask(
    client: httpx.AsyncClient, url: str, until: asyncio.Event, source: random.Random
) -> None:
    while not until.is_set():
        body = {
            "prompt": "word " * source.randint(1, 40),
            "tier": "fast",
            "tier_policy": "require",
            "max_tokens": 64,
        }
        assert (await client.post(f"{url}/generate", json=body)).status_code == 200


@pytest.mark.anyio
async def test_a_router_that_is_never_idle_learns(tmp_path: Path) -> None:
    """From its first request on an engine is busy; its speed becomes known, told as learned, and near the truth."""
    engines = [
        Behaviour(
            answer=tuple(" x" for _ in range(16)), delay_s=0.02, first_delay_s=0.1
        )
        for _ in STANDARD_TIERS
    ]
    async with measuring_router(tmp_path, engines, profile={"auto": False}) as own:
        enough = asyncio.Event()
        source = random.Random(1)
        learning = asyncio.create_task(LiveSpeed(own.fleet).run())
        asking = [
            asyncio.create_task(ask(own.client, own.url, enough, source=source))
            for _ in range(4)
        ]
        try:
            async with asyncio.timeout(40):
                while (
                    fast := (await own.client.get(f"{own.url}/tiers")).json()["tiers"][
                        0
                    ]["replicas"][0]
                )["speed_source"] is None:
                    await asyncio.sleep(0.1)
            assert fast["speed_source"] == "live"
            assert not fast["speed_profiled"]
            body = {
                "prompt": "hi",
                "tier": "fast",
                "tier_policy": "require",
                "max_tokens": 16,
            }
            verdict = (await own.client.post(f"{own.url}/route", json=body)).json()[
                "tiers"
            ][0]
        finally:
            enough.set()
            await asyncio.gather(*asking)
            learning.cancel()
        # The truth is what answers took: on a busy machine a fake engine's pauses are longer than it was told.
        seen = own.fleet.replicas[0].answers.last
        tpot_ms = median(s.tpot_ms for s in seen if s.tpot_ms)
        ttft_ms = median(s.ttft_ms for s in seen)
        assert tpot_ms / 1.5 < verdict["predicted_tpot_ms"] < tpot_ms * 1.5
        assert ttft_ms / 1.5 < verdict["predicted_ttft_ms"] < ttft_ms * 1.5
