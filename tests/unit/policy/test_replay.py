"""Decisions are reproducible from their log alone, and recorded arrivals can be run through another policy."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from router.cli.main import make_app
from router.policy.decide import decide
from router.policy.decision import PolicyParameters, Sla
from router.policy.decision_log import DecisionLog, DecisionRecord, OutcomeRecord, digest_of, read_log
from router.policy.profiles import ProfileError
from router.policy.replay import Recording, differing, read_recording, seen, summarise
from router.policy.simulation import simulate
from tests.fakes.engine import Behaviour
from tests.unit.policy.test_decide import FAST, MEASURED, PRECISE, PROFILED, fleet, query
from tests.unit.router_stack import router_stack
from tiers.spec import STANDARD_TIERS
from tiers.speed import Load

if TYPE_CHECKING:
    from pathlib import Path

REQUESTS = 1000
PROMPTS = (
    "Hello, how are you?",
    "Write a Python function that reverses a list.",
    "What is 17 * 23? Think step by step.",
    "Schreib mir bitte eine Liste von Städten in Deutschland.",
    "zxcv qwer",
)


@pytest.mark.anyio
async def test_a_thousand_decisions_come_out_again(tmp_path: Path) -> None:
    """Requests of all kinds through a router under changing load: made again from the file, every tier is the same."""
    path = tmp_path / "decisions.jsonl"
    source = random.Random(4)
    overrides = {
        "telemetry": {"decision_log": str(path)},
        "policy": {"max_slowdown": 1.01},
        "tiers": {name: {"max_in_flight": 3} for name in STANDARD_TIERS},
    }
    slow = {name: Behaviour(delay_s=0.002 * (3 - STANDARD_TIERS.index(name))) for name in STANDARD_TIERS}
    async with router_stack(tmp_path, overrides, **slow) as stack:
        limit = asyncio.Semaphore(12)

        async def one() -> int:
            body = {
                "prompt": source.choice(PROMPTS) * source.choice((1, 1, 40)),
                "tier": source.choice(("auto", "auto", "fast", "balanced", "precise")),
                "tier_policy": source.choice(("prefer", "prefer", "require")),
                "max_tokens": source.choice((5, 50, 1500)),
                "sla": source.choice(({}, {}, {"ttft_ms": 10}, {"tpot_ms": 3}, {"max_quality_loss": 0.01})),
                "stream": source.random() < 0.5,
            }
            async with limit:
                return (await stack.client.post(f"{stack.url}/generate", json=body)).status_code

        statuses = await asyncio.gather(*(one() for _ in range(REQUESTS)))
    assert set(statuses) <= {200, 422, 503}
    recording = read_recording(path)
    assert len(recording.decisions) == REQUESTS
    assert {r.tier for r in recording.decisions} == {*STANDARD_TIERS, None}
    assert differing(recording) == []
    assert len(recording.outcomes) == statuses.count(200)
    assert not any(prompt[:12] in path.read_text("utf-8") for prompt in PROMPTS)
    shown = CliRunner().invoke(make_app(), ["replay", str(path)])
    assert shown.exit_code == 0
    assert f"{REQUESTS} of {REQUESTS} decisions come out as recorded" in shown.output


def test_a_decision_that_was_tampered_with_is_found(tmp_path: Path) -> None:
    """A record whose tier does not follow from it is named, and the command fails."""
    path = tmp_path / "log.jsonl"
    write(path, 3)
    lines = path.read_text().splitlines()
    record = json.loads(lines[3])  # policy, decision, outcome, decision
    record["tier"] = "balanced"
    path.write_text("\n".join([*lines[:3], json.dumps(record), *lines[4:]]) + "\n")
    assert [r.request_id for r in differing(read_recording(path))] == ["1"]
    shown = CliRunner().invoke(make_app(), ["replay", str(path)])
    assert shown.exit_code == 1
    assert "otherwise: 1, recorded balanced" in shown.output


def write(path: Path, count: int, gap_s: float = 0.0, table: PolicyParameters = PROFILED) -> None:
    """Write a log of so many equal chats, each decided on an idle fleet."""
    log = DecisionLog(path, 1 << 30)
    snapshot = fleet(speeds=MEASURED)
    asked = query(sla=Sla(ttft_ms=20_000, tpot_ms=200))
    for number in range(count):
        log.decided(str(number), decide(asked, snapshot, table), snapshot, table)
        log.ended(OutcomeRecord(str(number), FAST, 20, 40, 45.0, 26.0))
    log.close()
    shifted = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "decision":
            record["at"] = 1000 + int(record["request_id"]) * gap_s
        shifted.append(json.dumps(record))
    path.write_text("\n".join(shifted) + "\n")


def test_one_request_at_a_time_takes_what_the_model_says(tmp_path: Path) -> None:
    """Without load the simulation is the speed model itself."""
    write(tmp_path / "log", 5, gap_s=10)
    results = simulate(read_recording(tmp_path / "log"))
    assert [r.tier for r in results] == [FAST] * 5
    assert all(r.ttft_ms == pytest.approx(40) and r.tpot_ms == pytest.approx(25) for r in results)
    assert all(r.engine_ms == pytest.approx(20 + 39 * 25) for r in results)  # of the prompt, and of each further token
    assert summarise(results).mean_loss == pytest.approx(0.08)


def test_load_slows_the_simulation_and_another_policy_moves_it(tmp_path: Path) -> None:
    """Many at once: batches grow and bounds are missed; a policy that may lose nothing sends all to precise."""
    write(tmp_path / "log", 40, gap_s=0.1)
    recording = read_recording(tmp_path / "log")
    before = summarise(simulate(recording))
    strict = replace(PROFILED, max_loss=dict.fromkeys(PROFILED.max_loss, 0.0))
    after = summarise(simulate(recording, strict))
    assert before.shares[FAST] > 0.4
    assert after.shares[PRECISE] > 0.7  # as many as it has places
    assert after.mean_loss is not None
    assert before.mean_loss is not None
    assert after.mean_loss < before.mean_loss
    assert before.tpot_p95 is not None
    assert before.tpot_p95 > 25
    assert summarise(seen(recording)).tpot_p50 == 26


def test_work_is_conserved(tmp_path: Path) -> None:
    """Whatever comes together, every simulated request ends with its tokens, and none is faster than alone."""
    write(tmp_path / "log", 60, gap_s=0.02)
    results = simulate(read_recording(tmp_path / "log"))
    assert len(results) == 60
    assert {r.tier for r in results} == {FAST, PRECISE}
    alone = {
        FAST: (40, 25),
        PRECISE: (100, 62),
    }  # by the speed model: milliseconds to the first token, and to each further
    for result in results:
        assert result.tier is not None
        ttft_ms, tpot_ms = alone[result.tier]
        assert (result.ttft_ms or 0) >= ttft_ms - 1e-6
        assert (result.tpot_ms or 0) >= tpot_ms - 1e-6
    assert max(r.ttft_ms or 0 for r in results) > 1000  # some waited for a place


def test_the_command_compares(tmp_path: Path) -> None:
    """With another policy three rows are printed: what was seen, and both policies simulated."""
    write(tmp_path / "log", 20, gap_s=0.2)
    (tmp_path / "other.toml").write_text("[policy.max_loss]\nchat = 0.0\n")
    shown = CliRunner().invoke(make_app(), ["replay", str(tmp_path / "log"), "--policy", str(tmp_path / "other.toml")])
    assert shown.exit_code == 0, shown.output
    rows = {line.split("  ")[0].strip(): line for line in shown.output.splitlines()}
    assert "100%" in rows["recorded, as seen"]
    assert rows["other, simulated"] != rows["recorded, simulated"]


def test_files_are_rotated_with_their_policy(tmp_path: Path) -> None:
    """Every file of a rotated log can be read by itself; only so many are kept."""
    log = DecisionLog(tmp_path / "log", 20_000)
    snapshot = fleet(speeds=MEASURED, loads={FAST: Load(1)})
    for number in range(40):
        log.decided(str(number), decide(query(), snapshot, PROFILED), snapshot, PROFILED)
    log.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 4
    for file in files:
        first = next(iter(read_log(file)))
        assert getattr(first, "id", None) == digest_of(PROFILED)
        assert differing(read_recording(file)) == []


def test_what_is_no_log_is_an_error(tmp_path: Path) -> None:
    """The error names the line; a last line that was cut off by a crash is no error."""
    path = tmp_path / "log"
    write(path, 2)
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[1][:40])
    assert len(read_recording(path).decisions) == 2
    path.write_text('{"kind": "decision"}\n' + whole)
    with pytest.raises(ProfileError, match="line 1 is no record of decisions"):
        read_recording(path)
    with pytest.raises(ProfileError, match="cannot be read"):
        read_recording(tmp_path / "none")
    decisions = tuple(r for r in read_log_of(whole, tmp_path) if isinstance(r, DecisionRecord))
    with pytest.raises(ProfileError, match="is not in the log"):
        differing(Recording({}, decisions, {}))


def read_log_of(text: str, folder: Path) -> list[object]:
    """Return the records of a log's text."""
    path = folder / "text"
    path.write_text(text)
    return list(read_log(path))


def test_logs_without_several_answers_are_read(tmp_path: Path) -> None:
    """A log of a router that did not count answers: each request is one, and takes one place."""
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(path)
    snapshot = fleet(speeds=MEASURED, busy=31)
    log.decided("r-1", decide(query(), snapshot, PROFILED), snapshot, PROFILED)
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "decision":
            assert (line["query"].pop("sequences"), line["query"].pop("all_prompt_tokens")) == (1, 0)
            for tier in line["fleet"]["tiers"]:
                for replica in tier["replicas"]:
                    replica.pop("places")
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    recording = read_recording(path)
    assert recording.decisions[0].query.sequences == 1
    assert recording.decisions[0].fleet.sequences == 93
    assert not differing(recording)


def test_several_answers_are_simulated_as_several() -> None:
    """Four answers of a request take an engine about as long as four requests, and more than one."""
    record = DecisionRecord(
        at=0.0, request_id="r", policy="p", query=query(), fleet=fleet(speeds=MEASURED), tier=FAST, refusal=None,
        reason="", predicted_ttft_ms=None, predicted_tpot_ms=None, price=0.0,
    )  # fmt: skip

    def engine_ms(*records: DecisionRecord) -> float:
        results = simulate(Recording({"p": PROFILED}, records, {}))
        assert all(result.tpot_ms is not None for result in results)
        return sum(result.engine_ms or 0 for result in results)

    several = engine_ms(replace(record, query=query(sequences=4, all_prompt_tokens=80)))
    assert engine_ms(record) < several
    assert several == pytest.approx(engine_ms(*(replace(record, request_id=str(n)) for n in range(4))), rel=0.3)
