"""The policy's present parameters: from settings, profiles that come and go, and live answers."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from classifier import PromptClass
from router.policy.decision import ExpectedLoss
from router.policy.profiles import latency_name, profile_name
from router.policy.table import PolicyStore, policy_table
from router.settings import CLASS_FLOOR, load_settings
from tests.unit.policy.made_profiles import IDENTITIES, fit, latency, loss, quality
from tests.unit.policy.test_decide import query
from tiers.fleet import Fleet
from tiers.replica import Replica
from tiers.spec import STANDARD_TIERS, ReplicaState, TierSpec

if TYPE_CHECKING:
    from pathlib import Path

    from router.policy.profiles import LatencyProfile, QualityProfile
    from router.settings import PolicySettings

FAST, BALANCED, PRECISE = STANDARD_TIERS


def settings(folder: Path | None = None, **values: Any) -> PolicySettings:
    """Return the policy's settings."""
    where = {"profiles": str(folder)} if folder else {}
    return load_settings(None, {"policy": {**where, **values}}).policy


def made_fleet() -> Fleet:
    """Return a fleet that serves the checkpoints of the made profiles."""
    return Fleet([TierSpec(tier, 2048, 16, 32, urls=("u",), digest=d) for tier, d in IDENTITIES.items()], machine="big")


def write(folder: Path, profile: QualityProfile | LatencyProfile, *, at: float = 1.0) -> Path:
    """Write a profile of what the fleet serves, changed at a given time."""
    name = profile_name(IDENTITIES) if profile.kind == "quality" else latency_name(IDENTITIES, "big")
    path = folder / name
    path.write_text(profile.model_dump_json())
    os.utime(path, (at, at))
    return path


def test_settings_change_some_classes_and_leave_the_others() -> None:
    """Floors and losses that the settings name, beside the defaults; nothing is measured."""
    table = policy_table(settings(class_floor={"chat": "precise"}, max_loss={"code": 0.5}, prices={"fast": 2.5}))
    assert table.class_floor == {**CLASS_FLOOR, PromptClass.CHAT: PRECISE}
    assert table.max_loss == {PromptClass.CODE: 0.5}
    assert table.prices[FAST] == 2.5
    assert (table.losses, table.promoted) == ({}, {})


def test_losses_come_from_the_profile_by_tier_and_class() -> None:
    """A class with too few prompts is left out, others of the same tier are not."""
    table = policy_table(
        settings(), quality(loss(FAST, 0.2), loss(FAST, 0.4, PromptClass.CODE, prompts=2), loss(BALANCED, 0.1))
    )
    assert table.losses == {
        FAST: {PromptClass.CHAT: ExpectedLoss(0.2, pytest.approx(0.18), pytest.approx(0.22))},
        BALANCED: {PromptClass.CHAT: ExpectedLoss(0.1, pytest.approx(0.09), pytest.approx(0.11))},
    }


def test_profiles_that_appear_change_and_vanish_are_followed(tmp_path: Path) -> None:
    """While the router runs: loss, speeds and what counts as measured are those of the files that are there."""
    fleet = made_fleet()
    store = PolicyStore(settings(tmp_path), fleet)
    assert (store.table.losses, fleet.speeds, store.measured, store.quality) == ({}, {}, frozenset(), None)
    written = write(tmp_path, quality(loss(FAST, 0.2)))
    speeds = write(tmp_path, latency({FAST: 10}))
    assert store.measured == frozenset()
    store.take_up()
    assert store.measured == {FAST}
    assert fleet.speeds == {FAST: fit(FAST, 10).model}
    write(tmp_path, quality(loss(FAST, 0.3), loss(BALANCED, 0.1)), at=2.0)
    store.take_up()
    assert store.table.losses[FAST][PromptClass.CHAT].mean == 0.3
    assert store.measured == {FAST, BALANCED}
    written.unlink()
    speeds.unlink()
    store.take_up()
    assert (store.table.losses, fleet.speeds, store.measured) == ({}, {}, frozenset())


def test_an_adapter_has_losses_of_its_own(tmp_path: Path) -> None:
    """From its profile, once a tier offers it; the model's own never count for it, measured or not."""
    fleet = made_fleet()
    store = PolicyStore(settings(tmp_path), fleet)
    write(tmp_path, quality(loss(FAST, 0.2)))
    profile = quality(loss(FAST, 0.5)).model_copy(update={"adapter": "support"})
    (tmp_path / profile_name(IDENTITIES, "support")).write_text(profile.model_dump_json())
    store.take_up()
    assert store.table.adapters == {}
    fleet.configure(replace(fleet.spec(FAST), adapters=("other", "support")))
    store.take_up()
    features = query().features
    means = {name: store.table.with_adapter(name).loss(FAST, features) for name in (None, "support", "other")}
    assert {name: found and found.mean for name, found in means.items()} == {None: 0.2, "support": 0.5, "other": None}
    assert store.table.with_adapter("support").loss(PRECISE, features) == ExpectedLoss(0.0, 0.0, 0.0)
    (tmp_path / profile_name(IDENTITIES, "support")).write_text("{")
    store.take_up()
    assert store.table.with_adapter("support").losses == {}
    assert store.table.losses[FAST]


def test_files_that_did_not_change_are_not_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The router looks every two seconds, and says something only when it has loaded something."""
    store = PolicyStore(settings(tmp_path), made_fleet())
    write(tmp_path, quality(loss(FAST, 0.2)))
    with caplog.at_level(logging.INFO, "qarr.router.policy"):
        store.take_up()
        table = store.table
        store.take_up()
    assert store.table is table
    assert [r.getMessage() for r in caplog.records] == [f"profiles loaded from {tmp_path}"]


@pytest.mark.parametrize("broken", ["quality", "latency"])
def test_one_broken_profile_does_not_cost_the_other(
    broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that cannot be used counts as not measured, with a warning; the other one counts."""
    paths = {"quality": write(tmp_path, quality(loss(FAST, 0.2))), "latency": write(tmp_path, latency({FAST: 10}))}
    paths[broken].write_text("{")
    fleet = made_fleet()
    store = PolicyStore(settings(tmp_path), fleet)
    assert bool(store.table.losses) is (broken == "latency")
    assert bool(fleet.speeds) is (broken == "quality")
    assert [f"is no {broken} profile" in record.getMessage() for record in caplog.records] == [True]


def test_a_profile_under_the_right_name_of_other_weights_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its content counts, whatever its name: as when a file was copied."""
    write(tmp_path, quality(loss(FAST, 0.2), identities={**IDENTITIES, FAST: "other"}))
    write(tmp_path, latency({FAST: 10}, machine="small"))
    fleet = made_fleet()
    store = PolicyStore(settings(tmp_path), fleet)
    assert (store.table.losses, fleet.speeds, store.quality) == ({}, {}, None)
    assert "another checkpoint of fast" in caplog.text
    assert "measured on small, this is big" in caplog.text


def test_new_speeds_replace_those_of_running_replicas_and_equal_ones_do_not(tmp_path: Path) -> None:
    """What a replica has learned is dropped only when its speed was measured anew."""
    write(tmp_path, latency({FAST: 10}))
    fleet = made_fleet()
    store = PolicyStore(settings(tmp_path), fleet)
    learned = fit(FAST, 11).model
    replica = fleet.add(Replica("fast-0", fleet.specs[0], "u", "", "m", speed=learned))
    write(tmp_path, latency({FAST: 10}), at=2.0)
    store.take_up()
    assert replica.speed is learned
    write(tmp_path, latency({FAST: 12}), at=3.0)
    store.take_up()
    assert replica.speed is None
    assert fleet.speeds[FAST].step_base_ms == 12


def test_promotions_outlast_new_profiles(tmp_path: Path) -> None:
    """And are replaced as a whole; tables that decisions hold do not change."""
    store = PolicyStore(settings(tmp_path), made_fleet())
    before = store.table
    store.promote({PromptClass.CHAT: BALANCED})
    write(tmp_path, quality(loss(FAST, 0.2)))
    store.take_up()
    assert store.table.promoted == {PromptClass.CHAT: BALANCED}
    assert store.table.losses
    store.promote({PromptClass.CODE: PRECISE})
    assert store.table.promoted == {PromptClass.CODE: PRECISE}
    assert before.promoted == {}


def test_successors_are_those_of_the_fleet_now() -> None:
    """Replicas that are added, and become ready, count at once; a tier does not follow itself."""
    fleet = made_fleet()
    store = PolicyStore(settings(), fleet)
    assert store.successors(FAST, query()) == ()
    fast, precise = (
        fleet.add(Replica(f"{spec.name}-0", spec, "u", "", "m", state=ReplicaState.READY))
        for spec in (fleet.specs[0], fleet.specs[2])
    )
    assert store.successors(FAST, query()) == (PRECISE,)
    precise.state = ReplicaState.FAILED
    assert store.successors(FAST, query()) == ()
    assert store.successors(BALANCED, query()) == (fast.spec.name,)
