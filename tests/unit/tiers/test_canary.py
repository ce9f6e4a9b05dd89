"""An engine is compared with what its checkpoint answered before: it must be the same one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.own_engines import own_engines, until
from tiers.errors import CanaryRefusedError, CheckpointError, ProbeError
from tiers.lifecycle.canary import TOKENS, Canary, agreement, read_golden, write_golden
from tiers.plan import machine_name
from tiers.probe import EngineProbe
from tiers.spec import ReplicaStatus, TierName, TierSpec
from tiers.speed import SpeedModel

QARR = Path(sys.executable).with_name("qarr")
SPEC = TierSpec(TierName.FAST, 2048, 16, 32, digest="d")


@pytest.mark.parametrize(
    ("golden", "given", "share"),
    [
        ([[1, 2, 3, 4]], [[1, 2, 3, 4]], 1.0),
        ([[1, 2, 3, 4]], [[1, 2, 9, 4]], 0.5),
        ([[1, 2, 3, 4]], [[9, 2, 3, 4]], 0.0),
        ([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [5, 6, 7, 0]], 0.875),
        ([[1, 2, 3, 4]], [[1, 2]], 0.5),
    ],
)
def test_agreement_ends_at_the_first_divergence(
    golden: Sequence[Sequence[int]], given: Sequence[Sequence[int]], share: float
) -> None:
    """What comes after a token that differs does not count; each prompt weighs the same."""
    assert agreement(golden, given) == share


def test_a_much_slower_engine_is_refused(tmp_path: Path) -> None:
    """Idle, against the profile; without a profile, or within the bounds, it passes."""
    canary = Canary(tmp_path / "c.json", "m", max_slowdown=3)
    canary.check_speed(SpeedModel(1, 1, 29), SpeedModel(1, 1, 10), SPEC)
    canary.check_speed(SpeedModel(1, 1, 1000), None, SPEC)
    with pytest.raises(
        CanaryRefusedError, match=r"50\.0 ms for a token while idle, 5\.0 times .* qarr profile latency"
    ):
        canary.check_speed(SpeedModel(1, 1, 50), SpeedModel(1, 1, 10), SPEC)


def test_a_broken_file_says_what_to_do(tmp_path: Path) -> None:
    """It names the file and how to get a new one."""
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(CheckpointError, match="remove the file"):
        read_golden(tmp_path / "c.json")


@pytest.mark.anyio
async def test_the_first_start_records_and_the_next_one_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal answers and those with a late divergence are ready; other ones are refused, with what to do."""
    canary = Canary(tmp_path / "canary.json", "machine")
    async with own_engines(tmp_path, monkeypatch, canary=canary):
        (record,) = read_golden(canary.path)
        assert (record.tier, record.identity, record.machine) == (TierName.FAST, "digest of fast", "machine")
        assert [len(tokens) <= TOKENS for tokens in record.tokens] == [True] * 4
    async with own_engines(tmp_path, monkeypatch, canary=canary):
        assert read_golden(canary.path) == (record,)
    async with own_engines(tmp_path, monkeypatch, ready=False, behaviour={"first_id": 5}, canary=canary) as own:
        detail = own.first.state.detail or ""
        assert "0% of the tokens agree up to the first divergence, 50% must" in detail
        assert "qarr tiers record fast" in detail
        assert ReplicaStatus.READY not in {state for _, state, _ in own.seen}
    elsewhere = Canary(canary.path, "another machine")
    async with own_engines(tmp_path, monkeypatch, behaviour={"first_id": 5}, canary=elsewhere):
        assert [r.machine for r in read_golden(canary.path)] == ["machine", "another machine"]


@pytest.mark.anyio
async def test_a_refused_engine_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong checkpoint does not become right by starting it again, even where the engine was ready before."""
    async with own_engines(tmp_path, monkeypatch, canary=Canary(tmp_path / "canary.json", "machine")) as own:
        own.next_starts(first_id=5)
        assert own.first.state.pid is not None
        os.kill(own.first.state.pid, signal.SIGKILL)
        await until(lambda: own.first.state.status is ReplicaStatus.FAILED)
        assert "its greedy answers are not those of" in (own.first.state.detail or "")
        assert len([detail for detail in own.details(ReplicaStatus.STARTING) if "; in " in detail]) == 1


@pytest.mark.anyio
async def test_a_refused_engine_never_replaces_a_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recycling onto an engine with other answers fails, and the old one serves on."""
    canary = Canary(tmp_path / "canary.json", "machine")
    async with own_engines(tmp_path, monkeypatch, canary=canary) as own:
        own.next_starts(first_id=5)
        operation = own.supervisor.operations.begin("recycle", "fast-0")
        await until(lambda: operation.state != "running")
        assert operation.state == "failed"
        assert "its greedy answers are not those of" in operation.detail
        assert [(r.id, r.state.status) for r in own.fleet.replicas] == [("fast-0", ReplicaStatus.READY)]


@pytest.mark.anyio
async def test_answers_are_recorded_anew_by_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`qarr tiers record` forgets; the next start passes and is the new measure."""
    monkeypatch.setenv("QARR_POLICY__PROFILES", str(tmp_path))
    canary = Canary(tmp_path / "canary.json", machine_name())
    async with own_engines(tmp_path, monkeypatch, canary=canary):
        pass
    done = subprocess.run([QARR, "tiers", "record", "fast"], capture_output=True, text=True, check=True)  # noqa: ASYNC221
    assert done.stdout.startswith("1 records of fast deleted")
    async with own_engines(tmp_path, monkeypatch, behaviour={"first_id": 5}, canary=canary):
        (record,) = read_golden(canary.path)
        assert record.tokens[0][0] == 5


ANSWERS = ((1, 2), (3, 4), (5, 6), (7, 8))


class Asked(EngineProbe):
    """An engine that is asked for greedy tokens, as often as it may be."""

    answers: Sequence[tuple[int, ...]] | None = ANSWERS

    async def greedy_tokens(self, *_args: Any) -> tuple[tuple[int, ...], ...]:
        assert self.answers is not None, "nothing was to be asked"
        return tuple(self.answers)


async def check(canary: Canary, answers: Sequence[tuple[int, ...]] | None = ANSWERS, spec: TierSpec = SPEC) -> None:
    engine = type("Engine", (Asked,), {"answers": answers, "__slots__": ()})
    async with httpx.AsyncClient() as client:
        await canary.check_answers(engine(client, "http://127.0.0.1:1", ""), "m", spec, 1.0)


@pytest.mark.anyio
async def test_an_engine_elsewhere_that_fails_to_answer_is_not_trusted(tmp_path: Path) -> None:
    """Only one that gives no token ids at all goes without a comparison."""

    class Failing(EngineProbe):
        said = "/v1/completions: HTTP 500: broken"

        async def greedy_tokens(self, *_args: Any) -> tuple[tuple[int, ...], ...]:
            raise ProbeError(self.said)

    canary, spec = Canary(tmp_path / "c.json", "m"), replace(SPEC, urls=("http://u",))
    async with httpx.AsyncClient() as client:
        with pytest.raises(ProbeError, match="HTTP 500"):
            await canary.check_answers(Failing(client, "http://u", ""), "m", spec, 1.0)


@pytest.mark.anyio
async def test_only_a_tiers_records_on_this_machine_are_forgotten(tmp_path: Path) -> None:
    """All of its checkpoints, and nobody else's; where there are none, the file stays as it is."""
    here, there = Canary(tmp_path / "c.json", "here"), Canary(tmp_path / "c.json", "there")
    for canary, spec in (
        (here, SPEC),
        (here, replace(SPEC, digest="e")),
        (there, SPEC),
        (here, replace(SPEC, name=TierName.PRECISE)),
    ):
        await check(canary, spec=spec)
    await check(here, spec=replace(SPEC, urls=("http://u",)))  # which counts as this machine's, wherever it runs
    assert here.forget(TierName.FAST) == 3
    assert [(r.tier, r.machine) for r in read_golden(here.path)] == [
        (TierName.FAST, "there"),
        (TierName.PRECISE, "here"),
    ]
    before = here.path.stat().st_mtime_ns
    assert here.forget(TierName.FAST) == 0
    assert here.path.stat().st_mtime_ns == before


@pytest.mark.anyio
async def test_half_of_the_tokens_must_agree(tmp_path: Path) -> None:
    """Exactly half passes; one token less does not, and changes no record."""
    canary = Canary(tmp_path / "c.json", "m")
    await check(canary)
    await check(canary, ((1, 2), (3, 4), (0, 6), (0, 8)))
    with pytest.raises(CanaryRefusedError, match="38% of the tokens agree"):
        await check(canary, ((1, 2), (3, 0), (0, 6), (0, 8)))
    assert [r.tokens for r in read_golden(canary.path)] == [ANSWERS]


@pytest.mark.anyio
async def test_records_of_other_prompts_are_replaced(tmp_path: Path) -> None:
    """After a change of the prompts the old answers tell nothing; other checkpoints' records stay."""
    canary = Canary(tmp_path / "c.json", "m")
    await check(canary)
    await check(canary, spec=replace(SPEC, digest="other"))
    old, other = read_golden(canary.path)
    write_golden(canary.path, [old.model_copy(update={"prompts": ("a", "b", "c", "d")}), other])
    await check(canary, ((9, 9),) * 4)
    assert [(r.identity, r.tokens) for r in read_golden(canary.path)] == [("other", ANSWERS), ("d", ((9, 9),) * 4)]


@pytest.mark.parametrize(
    "content", ["[]", '{"version": 2, "records": []}', '{"records": [{"tier": "fast"}]}', '{"other": 1}', "\x00"]
)
def test_files_of_another_form_are_refused(tmp_path: Path, content: str) -> None:
    """Those of a later version too: nothing is guessed, and nothing is overwritten."""
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(CheckpointError, match="cannot be used"):
        Canary(tmp_path / "c.json", "m").forget(TierName.FAST)
    assert (tmp_path / "c.json").read_text() == content


@pytest.mark.anyio
async def test_a_record_needs_an_answer_to_each_prompt(tmp_path: Path) -> None:
    """A record with fewer answers than prompts could not be compared."""
    canary = Canary(tmp_path / "c.json", "m")
    await check(canary)
    document = json.loads(canary.path.read_text())
    document["records"][0]["tokens"].pop()
    canary.path.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="cannot be used"):
        read_golden(canary.path)


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    """The file that was there stays, and no part of the new one."""
    (tmp_path / "c.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_golden(tmp_path / "c.json", [])
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]
