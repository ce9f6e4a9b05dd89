"""The policy's present parameters: from settings, and profiles that come and go."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from classifier import PromptClass
from classifier.kinds import Complexity
from router.policy.decide import decide
from router.policy.profiles import latency_name, profile_name
from router.policy.published import published_estimate
from router.policy.render import render_budget
from router.policy.table import WHERE_IT_PAYS, PolicyStore, policy_table
from router.settings import load_settings
from tests.unit.policy.fleets import MEASURED, TABLE, fleet, query
from tests.unit.policy.made_profiles import (
    IDENTITIES,
    counted,
    cut_counted,
    fit,
    latency,
    quality,
)
from tiers.fleet import Fleet
from tiers.replica import Replica
from tiers.spec import (
    STANDARD_TIERS,
    EngineBuild,
    ReplicaStatus,
    TierName,
    TierSpec,
)

if TYPE_CHECKING:
    from pathlib import Path

    from router.policy.profiles import LatencyProfile, QualityProfile
    from router.policy.settings import PolicySettings

FAST, BALANCED, PRECISE = STANDARD_TIERS


def settings(folder: Path | None = None, **values: Any) -> PolicySettings:
    where = {"profiles": str(folder)} if folder else {}
    return load_settings(None, {"policy": {**where, **values}}).policy


def made_fleet() -> Fleet:
    return Fleet(
        [
            TierSpec(
                tier, 2048, max_num_seqs=16, max_in_flight=32, urls=("u",), digest=d
            )
            for tier, d in IDENTITIES.items()
        ],
        machine="big",
    )


def write(
    folder: Path, profile: QualityProfile | LatencyProfile, *, at: float = 1.0
) -> Path:
    """Write a profile of what the fleet serves, changed at a given time."""
    name = (
        profile_name(IDENTITIES)
        if profile.kind == "quality"
        else latency_name(IDENTITIES, "big")
    )
    path = folder / name
    path.write_text(profile.model_dump_json())
    os.utime(path, (at, at))
    return path


KIND = PromptClass.CHAT, Complexity.MODERATE
MODEL = "made-8B"


def mean(store: PolicyStore, tier: TierName = FAST) -> float:
    return store.table.losses[tier][PromptClass.CHAT][Complexity.MODERATE].mean


def test_before_anything_is_measured_published_losses_count() -> None:
    """By the precision that a tier serves, and before that is known by what its name says."""
    specs = made_fleet().specs
    table = policy_table(
        settings(max_loss={"code": 0.5}, prices={"fast": 2.5}), specs, 8e9
    )
    assert table.max_loss == {PromptClass.CODE: 0.5}
    assert table.prices == {FAST: 2.5}
    lost = {
        tier: each[PromptClass.MATH][Complexity.COMPLEX]
        for tier, each in table.losses.items()
    }
    kind = (PromptClass.MATH, Complexity.COMPLEX)
    published = {
        tier: published_estimate(precision, kind, 8e9)
        for tier, precision in ((FAST, "awq-int4"), (BALANCED, "fp8"))
    }
    assert {tier: (one.mean, one.basis) for tier, one in lost.items()} == {
        tier: (one.mean, one.said) for tier, one in published.items()
    }
    known = [
        replace(spec, precision="bf16") if spec.name is FAST else spec for spec in specs
    ]
    assert (
        policy_table(settings(), known, 8e9)
        .losses[FAST][PromptClass.MATH][Complexity.COMPLEX]
        .mean
        == 0
    )


def test_a_checkpoint_that_is_still_made_counts_by_the_format_it_will_have() -> None:
    """So that requests of the first minutes are decided as later ones."""
    specs = made_fleet().specs
    expected = [replace(spec, expected_precision="int8-w8a8") for spec in specs]
    served = [replace(spec, precision="int8-w8a8") for spec in specs]
    usual = policy_table(settings(), specs, 8e9).losses
    assert policy_table(settings(), expected, 8e9).losses != usual
    assert (
        policy_table(settings(), expected, 8e9).losses
        == policy_table(settings(), served, 8e9).losses
    )


def test_profiles_that_appear_change_and_vanish_are_followed(tmp_path: Path) -> None:
    """While the router runs: loss, speeds and what counts as measured are those of the files that are there."""
    fleet = made_fleet()
    store = PolicyStore(settings(tmp_path), fleet, MODEL)
    published = mean(store)
    assert fleet.speeds == {}
    assert store.measured == frozenset()
    assert store.quality is None
    written = write(tmp_path, quality(counted(FAST, 20), whole=False))
    speeds = write(tmp_path, latency({FAST: 10}))
    store.reload()
    assert store.measured == frozenset()  # there is more to measure
    assert 0.4 < (half := mean(store)) < 0.5
    assert fleet.speeds == {FAST: fit(FAST, 10).model}
    write(tmp_path, quality(counted(FAST, 30), counted(BALANCED, 1)), at=2.0)
    store.reload()
    assert mean(store) > half
    assert store.measured == {FAST, BALANCED, PRECISE}
    written.unlink()
    speeds.unlink()
    store.reload()
    assert mean(store) == published
    assert fleet.speeds == {}
    assert store.measured == frozenset()


def test_what_was_measured_of_another_engine_does_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once an engine says that its KV cache is quantized now: losses and speed are unknown again, and the log says why."""
    fleet = made_fleet()
    replica = fleet.add(
        Replica("fast-0", fleet.spec(FAST), "http://u", api_key="", model="m")
    )
    store = PolicyStore(settings(tmp_path), fleet, MODEL)
    published = mean(store)
    write(tmp_path, quality(counted(FAST, 30), counted(BALANCED, 1)))
    write(tmp_path, latency({FAST: 10, PRECISE: 20}))
    store.reload()
    assert mean(store) > published
    replica.update(build=EngineBuild(version="0.32.0", kv_cache_dtype="fp8"))
    store.reload()
    assert mean(store) == published
    assert store.measured == frozenset()
    assert set(fleet.speeds) == {PRECISE}
    assert "says of tier fast no longer counts" in caplog.text
    assert "vLLM 0.32.0, KV cache fp8" in caplog.text
    replica.update(build=EngineBuild(version="0.32.0", kv_cache_dtype="auto"))
    store.reload()
    assert mean(store) > published
    assert set(fleet.speeds) == {FAST, PRECISE}


def test_an_adapter_has_losses_of_its_own(tmp_path: Path) -> None:
    """From its profile, once a tier offers it; else the published ones, whatever the model itself loses."""
    fleet = made_fleet()
    store = PolicyStore(settings(tmp_path), fleet, MODEL)
    published = mean(store)
    write(tmp_path, quality(counted(FAST, 8)))
    profile = quality(counted(FAST, 30)).model_copy(update={"adapter": "support"})
    (tmp_path / profile_name(IDENTITIES, "support")).write_text(
        profile.model_dump_json()
    )
    fleet.configure(replace(fleet.spec(FAST), adapters=("other", "support")))
    store.reload()
    features = query().features
    model, own, other, late = (
        store.table.with_adapter(name).loss(FAST, features).mean
        for name in (None, "support", "other", "late")
    )
    assert published == other == late < model < own
    (tmp_path / profile_name(IDENTITIES, "support")).write_text("{")
    store.reload()
    assert store.table.with_adapter("support").loss(FAST, features).mean == published


def test_what_is_measured_next_is_what_decisions_depend_on(tmp_path: Path) -> None:
    """A kind of which little is known, or whose interval holds a bound; more so the more it is asked for."""
    store = PolicyStore(settings(tmp_path), made_fleet(), MODEL)
    code = PromptClass.CODE, Complexity.COMPLEX
    assert store.worth(FAST, KIND) == store.worth(FAST, code) > 0
    for _ in range(9):
        store.served(decide(query(), fleet(), TABLE), FAST)
    assert store.worth(FAST, KIND) > 5 * store.worth(FAST, code)
    write(
        tmp_path,
        quality(counted(FAST, 38), counted(FAST, 1, 0, *code), counted(BALANCED, 0)),
    )
    store.reload()
    assert store.worth(FAST, KIND) == 0, "it loses far more than any bound"
    assert store.worth(FAST, code) > 0, "it may lose more than balanced or less"


def test_a_kind_whose_answers_are_cut_is_measured_no_further(tmp_path: Path) -> None:
    """It is told why; a few cut answers are no reason to stop."""
    store = PolicyStore(settings(tmp_path), made_fleet(), MODEL)
    few = cut_counted(FAST, 3, PromptClass.CODE)
    write(tmp_path, quality(cut_counted(FAST, 10, *KIND), few, think_tokens=100))
    store.reload()
    assert store.worth(FAST, KIND) == 0
    assert store.worth(FAST, (PromptClass.CODE, Complexity.MODERATE)) > 0
    assert store.not_measured[FAST].cut == 13
    assert mean(store) == mean(PolicyStore(settings(), made_fleet(), MODEL))


def test_answers_count_against_the_budget_unless_the_caller_chose() -> None:
    """By what they are expected to lose on the tier that served them."""
    store = PolicyStore(settings(loss_budget=0.02), made_fleet(), MODEL)
    store.served(decide(query(), fleet(), TABLE), FAST)
    store.served(decide(query(hint=FAST), fleet(), TABLE), FAST)
    store.served(decide(query(), fleet(), TABLE), None)
    assert store.tally.answers == 1
    assert store.tally.lost == mean(store)
    assert store.tally.allowed == 0.02
    decision = decide(query(), fleet(speeds=MEASURED), TABLE)
    spent, highest = (decision.estimate(tier).cost or 0.0 for tier in (FAST, PRECISE))
    store.served(decision, FAST)
    assert render_budget(store)["saved"] == round(1 - spent / highest, 4)


def test_a_slower_tier_that_loses_more_may_not_pay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is named with what a GPU would change, in the log too, as nothing to worry about; a faster one is not, nor one that loses less."""
    caplog.set_level(logging.INFO, "qarr.router.policy")
    write(tmp_path, latency({FAST: 10, BALANCED: 90, PRECISE: 50}))
    said = (
        "balanced may not pay with this model on this machine: a token takes 94 ms there and 54 ms on precise, which also "
        f"loses fewer answers. {WHERE_IT_PAYS} To leave balanced out: tiers.balanced.replicas = 0."
    )
    assert PolicyStore(settings(tmp_path), made_fleet(), MODEL).pointless == {
        BALANCED: said
    }
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.INFO, said)
    ]
    assert ("on a GPU" in said) is True
    assert ("works all the same" in said) is True


def test_old_numbers_that_counted_tokens_are_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A twentieth of answers is more than anybody means."""
    policy_table(
        settings(loss_budget=0.2, max_loss={"chat": 0.3, "code": 0.01}),
        made_fleet().specs,
        8e9,
    )
    assert [r.getMessage() for r in caplog.records] == [
        f"{name} = {value} lets {n} of 100 answers get worse: it counts answers, not tokens"
        for name, value, n in (
            ("policy.loss_budget", 0.2, 20),
            ("policy.max_loss.chat", 0.3, 30),
        )
    ]


def test_files_that_did_not_change_are_not_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The router looks every two seconds, and says something only when it has loaded something."""
    store = PolicyStore(settings(tmp_path), made_fleet(), MODEL)
    write(tmp_path, quality(counted(FAST, 1)))
    with caplog.at_level(logging.INFO, "qarr.router.policy"):
        store.reload()
        table = store.table
        store.reload()
    assert store.table is table
    assert [r.getMessage() for r in caplog.records] == [
        f"profiles loaded from {tmp_path}"
    ]


@pytest.mark.parametrize("broken", ["quality", "latency"])
def test_one_broken_profile_does_not_cost_the_other(
    broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that cannot be used counts as not measured, with a warning; the other one counts."""
    paths = {
        "quality": write(tmp_path, quality(counted(FAST, 1))),
        "latency": write(tmp_path, latency({FAST: 10})),
    }
    paths[broken].write_text("{")
    fleet = made_fleet()
    store = PolicyStore(settings(tmp_path), fleet, MODEL)
    assert (store.quality is not None) is (broken == "latency")
    assert bool(fleet.speeds) is (broken == "quality")
    assert [
        f"is no {broken} profile" in record.getMessage() for record in caplog.records
    ] == [True]


def test_a_profile_under_the_right_name_of_other_weights_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its content counts, whatever its name: as when a file was copied."""
    write(tmp_path, quality(counted(FAST, 8), identities={**IDENTITIES, FAST: "other"}))
    write(tmp_path, latency({FAST: 10}, machine="small"))
    fleet = made_fleet()
    store = PolicyStore(settings(tmp_path), fleet, MODEL)
    assert fleet.speeds == {}
    assert store.quality is None
    assert "another checkpoint of fast" in caplog.text
    assert "measured on small, this is big" in caplog.text


def test_new_speeds_replace_those_of_running_replicas_and_equal_ones_do_not(
    tmp_path: Path,
) -> None:
    """What a replica has learned is dropped only when its speed was measured anew."""
    write(tmp_path, latency({FAST: 10}))
    fleet = made_fleet()
    store = PolicyStore(settings(tmp_path), fleet, MODEL)
    learned = fit(FAST, 11).model
    replica = fleet.add(Replica("fast-0", fleet.specs[0], "u", "", "m"))
    replica.update(speed=learned)
    write(tmp_path, latency({FAST: 10}), at=2.0)
    store.reload()
    assert replica.state.speed is learned
    write(tmp_path, latency({FAST: 12}), at=3.0)
    store.reload()
    assert replica.state.speed is None
    assert fleet.speeds[FAST].step_base_ms == 12


def test_successors_are_those_of_the_fleet_now() -> None:
    """Replicas that are added, and become ready, count at once; a tier does not follow itself."""
    fleet = made_fleet()
    store = PolicyStore(settings(), fleet, MODEL)
    assert store.successors(FAST, query()) == ()
    fast, precise = (
        fleet.add(
            Replica(f"{spec.name}-0", spec, "u", "", "m", status=ReplicaStatus.READY)
        )
        for spec in (fleet.specs[0], fleet.specs[2])
    )
    assert store.successors(FAST, query()) == (PRECISE,)
    precise.mark(ReplicaStatus.FAILED)
    assert store.successors(FAST, query()) == ()
    assert store.successors(BALANCED, query()) == (fast.spec.name,)
