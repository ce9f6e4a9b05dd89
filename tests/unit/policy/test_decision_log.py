"""The decision log as a file: what goes in comes out, and what is no record is said to be none."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from router.policy.decide import decide
from router.policy.decision import Refusal, Sla
from router.policy.decision_log import (
    DecisionLog,
    DecisionRecord,
    OutcomeRecord,
    PolicyRecord,
    Record,
    digest_of,
    read_log,
)
from router.policy.profiles import ProfileError
from tests.unit.policy.fleets import MEASURED, PROFILED, TABLE, fleet, query, warmed
from tiers.prefix_memory import Part, Prefix
from tiers.spec import STANDARD_TIERS, ReplicaStatus
from tiers.speed import ReplicaLoad

if TYPE_CHECKING:
    from pathlib import Path

FAST, BALANCED, PRECISE = STANDARD_TIERS
ENDED = OutcomeRecord(
    "r1",
    BALANCED,
    prompt_tokens=20,
    output_tokens=7,
    ttft_ms=12.5,
    tpot_ms=None,
    cached_tokens=16,
    reasoning_tokens=5,
    ttfa_ms=250.5,
    error="EngineFailed",
)


def written(path: Path) -> list[Record]:
    log = DecisionLog(path)
    busy = fleet(speeds=MEASURED, loads={FAST: ReplicaLoad(3, 40, 50)})
    asked = query(
        hint=FAST,
        sla=Sla(ttft_ms=500, confidence=0.8),
        allowed=frozenset({FAST, PRECISE}),
        sequences=2,
    )
    log.decided("r1", decide(asked, busy, PROFILED), busy, PROFILED)
    log.ended(ENDED)
    failed = fleet(dict.fromkeys(STANDARD_TIERS, ReplicaStatus.FAILED))
    log.decided("r2", decide(query(), failed, PROFILED), failed, PROFILED)
    log.close()
    return list(read_log(path))


def test_a_decision_can_be_made_again_from_its_record(tmp_path: Path) -> None:
    """Parameters, request and fleet come out of the file as they went in."""
    policy, first, outcome, second = written(tmp_path / "log")
    assert policy == PolicyRecord(digest_of(PROFILED), PROFILED)
    assert outcome == ENDED
    assert isinstance(first, DecisionRecord)
    assert isinstance(second, DecisionRecord)
    for record in (first, second):
        again = decide(record.query, record.fleet, PROFILED)
        assert again.tier == record.tier
        assert again.refusal == record.refusal
        assert again.reason == record.reason
    assert first.predicted_ttft_ms is not None
    assert second.tier is None
    assert second.refusal == Refusal.NOT_READY
    assert second.predicted_ttft_ms is None


def test_what_replicas_hold_is_logged_and_the_prompt_is_not(tmp_path: Path) -> None:
    """A decision for a warm tier is made again from the snapshot alone; there are no hashes of prompts in the file."""
    prefix = Prefix.of([Part("a secret " * 100, 1600)], session="whose")
    asked = query(prompt_tokens=1600, prefix=prefix)
    there = warmed(fleet(speeds=MEASURED), {PRECISE: 1500})
    log = DecisionLog(tmp_path / "log")
    log.decided("r1", decide(asked, there, PROFILED), there, PROFILED)
    log.close()
    _, record = read_log(tmp_path / "log")
    assert isinstance(record, DecisionRecord)
    again = decide(record.query, record.fleet, PROFILED)
    assert again.tier == PRECISE
    assert again.reason == record.reason
    assert prefix is not None
    text = (tmp_path / "log").read_text()
    assert not any(
        word in text for word in ("secret", "whose", "prefix", str(prefix.blocks[0]))
    )


def test_parameters_are_written_once_until_they_change(tmp_path: Path) -> None:
    """Each decision is below the parameters that it was made by, and names them."""
    path = tmp_path / "log"
    log = DecisionLog(path)
    other = replace(TABLE, negligible_loss=0.01)
    for table in (TABLE, TABLE, other, TABLE):
        log.decided("r", decide(query(), fleet(), table), fleet(), table)
    log.close()
    kinds = [
        (r.kind, r.id if isinstance(r, PolicyRecord) else getattr(r, "policy", ""))
        for r in read_log(path)
    ]
    first = digest_of(TABLE)
    second = digest_of(other)
    assert kinds == [
        ("policy", first), ("decision", first), ("decision", first), ("policy", second), ("decision", second),
        ("policy", first), ("decision", first),
    ]  # fmt: skip


def test_the_digest_is_of_every_parameter() -> None:
    """Equal parameters have one name; a changed one has another."""
    others = [
        replace(TABLE, negligible_loss=0.5), replace(TABLE, give_up="quality"), replace(TABLE, prices={FAST: 2.0}),
        replace(TABLE, losses=PROFILED.losses),
    ]  # fmt: skip
    assert digest_of(replace(TABLE)) == digest_of(TABLE)
    assert len({digest_of(table) for table in (TABLE, *others)}) == len(others) + 1


def test_a_line_that_was_cut_off_costs_no_other(tmp_path: Path) -> None:
    """As a killed router leaves it, at the end or before what the next router writes; empty lines count for nothing."""
    path = tmp_path / "log"
    records = written(path)
    lines = path.read_bytes().splitlines()
    path.write_bytes(
        b"\n".join([lines[0], lines[1][:50], b"", *lines[2:], lines[1][:-1]])
    )
    assert list(read_log(path)) == [records[0], *records[2:]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "other"}, "line 2 is no record of decisions: Input tag 'other'"),
        (
            {"tier": "Slow"},
            "line 2 is no record of decisions: decision.tier: 1 to 32 lower-case letters",
        ),
        (
            {"at": "yesterday"},
            "line 2 is no record of decisions: decision.at: Input should be a valid number",
        ),
    ],
)
def test_a_whole_line_that_is_no_record_is_an_error(
    change: dict[str, str], says: str, tmp_path: Path
) -> None:
    """It names the line and the field: a log of another release is not half read in silence."""
    path = tmp_path / "log"
    written(path)
    lines = path.read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), **change})
    path.write_text("\n".join(lines))
    with pytest.raises(ProfileError) as caught:
        list(read_log(path))
    assert says in str(caught.value)


def test_a_log_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ProfileError,
        match=r"the decision log .*/none cannot be read: No such file or directory",
    ):
        list(read_log(tmp_path / "none"))
