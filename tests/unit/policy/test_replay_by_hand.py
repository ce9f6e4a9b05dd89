"""Replay held to numbers worked out by hand from logs written by hand, and to a running router's own."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from router.cli.main import make_app
from router.policy.replay import Summary, differing, read_recording, seen, summarise
from router.policy.simulation import Options, simulate
from tests.unit.own_engines import until
from tests.unit.router_stack import router_stack
from tiers.spec import STANDARD_TIERS, TierName
from tiers.speed import SpeedModel

if TYPE_CHECKING:
    from pathlib import Path

FAST, BALANCED, PRECISE = TierName.FAST, TierName.BALANCED, TierName.PRECISE
CLASSES = ("chat", "writing", "extraction", "multilingual", "long_context", "code", "math", "unknown")
LOSSES = {"fast": {"chat": 0.08, "code": 0.2}, "balanced": {"chat": 0.02, "code": 0.03}}
POLICY = {
    "kind": "policy",
    "id": "by-hand",
    "table": {
        "class_floor": dict.fromkeys(CLASSES, "fast"),
        "max_loss": dict.fromkeys(CLASSES, 1.0),
        "losses": {
            tier: {kind: {"mean": mean, "low": mean, "high": mean} for kind, mean in by_class.items()}
            for tier, by_class in LOSSES.items()
        },
    },
}


def query(kind: str = "chat", prompt_tokens: int = 20, hint: str | None = None, **sla: float) -> dict[str, Any]:
    """Return a request as a log has it."""
    features = {
        "chars": 80, "words": 16, "tokens": 20, "tokens_exact": True, "contains_code": False, "asks_for_code": False,
        "language": None, "prompt_class": kind, "confidence": 0.9, "signals": [],
    }  # fmt: skip
    return {
        "features": features, "prompt_tokens": prompt_tokens, "max_tokens": 100, "hint": hint, "require": hint is not None,
        "sla": sla, "allowed": ["fast", "balanced", "precise"],
    }  # fmt: skip


def fleet(
    *ready: str, max_num_seqs: int = 16, contention: float = 0.0, slots: int = 32, slower: float = 1.0
) -> dict[str, Any]:
    """Return an idle fleet, some tiers ready: TTFT of 10 ms and 1 ms a token, steps of 10 ms and 5 a sequence.

    ``slower``: How many times as long as that a token took lately.
    """
    speed = {
        "ttft_base_ms": 10.0, "prefill_ms_per_token": 1.0, "step_base_ms": 10.0, "step_ms_per_sequence": 5.0,
        "contention": contention, "profiled": True,
    }  # fmt: skip
    tiers = []
    for name in STANDARD_TIERS:
        spec = {"name": name, "max_model_len": 8192, "max_num_seqs": max_num_seqs, "max_in_flight": slots}
        replica = {
            "id": f"{name}-0", "url": "u", "pid": None, "state": "ready" if name in ready else "starting", "detail": None,
            "in_flight": 0, "prompt_tokens_outstanding": 0, "output_tokens_outstanding": 0, "served": 0, "failed": 0,
            "speed": speed, "tpot_trend": {"mean": math.log(slower), "variance": 0.01, "at": 0.0},
        }  # fmt: skip
        tiers.append({"spec": spec, "replicas": [replica]})
    return {"tiers": tiers, "template": {}, "output_share": 1.0}


def decided(
    number: int, at: float, tier: str | None, asked: dict[str, Any], seen_fleet: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """Return a decision as a log has it."""
    return {
        "kind": "decision", "at": at, "request_id": str(number), "policy": "by-hand", "query": asked, "fleet": seen_fleet,
        "tier": tier, "refusal": None if tier else "too_long", "reason": "by hand", "predicted_ttft_ms": None,
        "predicted_tpot_ms": None, **more,
    }  # fmt: skip


def ended(number: int, tier: str, tokens: int, *times: float | None, error: str | None = None) -> dict[str, Any]:
    """Return an outcome with its TTFT and TPOT, in milliseconds, as a log has it."""
    ttft_ms, tpot_ms = times
    return {
        "kind": "outcome", "request_id": str(number), "tier": tier, "prompt_tokens": 20, "output_tokens": tokens,
        "ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "error": error,
    }  # fmt: skip


def log_of(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in (POLICY, *records)))
    return path


def test_what_was_seen(tmp_path: Path) -> None:
    """Seven requests: four served, one that failed, one refused, one that had not ended when the log did.

    There was no place when the fourth came, so nothing was decided then; it waited, and was served by precise. Two of
    four were served by fast. Met are the first and the fourth, of seven. Loss: (0.08 + 0.08 + 0.03 + 0) / 4.
    TTFT 100, 300, 500, 700: the median lies between the second and the third, the 95th percentile at 0.95 * 3 = 2.85.
    TPOT 20, 50, 70: the second, and at 0.95 * 2 = 1.9.
    """
    there = fleet("fast", "balanced", "precise")
    path = log_of(
        tmp_path / "log",
        decided(1, 1.0, "fast", query(ttft_ms=200.0), there),
        decided(2, 2.0, "fast", query(ttft_ms=200.0), there),
        ended(1, "fast", 10, 100.0, 20.0),
        decided(3, 3.0, "balanced", query("code", tpot_ms=40.0), there),
        ended(2, "fast", 1, 300.0, None),
        ended(3, "balanced", 10, 500.0, 50.0),
        decided(4, 4.0, None, query(), there),
        ended(4, "precise", 10, 700.0, 70.0),
        decided(5, 5.0, "fast", query(), there),
        ended(5, "fast", 3, 1.0, 1.0, error="EngineFailed"),
        decided(6, 6.0, None, query(), there),
        decided(7, 7.0, "fast", query(), there),
    )
    found = summarise(seen(read_recording(path)))
    assert (found.requests, found.refused, found.engine_s) == (7, 3, None)
    assert found.shares == {FAST: 0.5, BALANCED: 0.25, PRECISE: 0.25}
    assert found.met == pytest.approx(2 / 7)
    assert found.mean_loss == pytest.approx(0.0475)
    assert (found.ttft_p50, found.ttft_p95) == (pytest.approx(400.0), pytest.approx(670.0))
    assert (found.tpot_p50, found.tpot_p95) == (pytest.approx(50.0), pytest.approx(68.0))


def test_two_requests_that_overlap(tmp_path: Path) -> None:
    """The first reads its prompt until 20 ms; its first token comes at 30. Alone, it decodes a token in 15 ms.

    The second comes at 40 and reads until 60, while the first waits; its first token comes at 70. By then the first has
    4 - 10/15 - 10/15 = 8/3 tokens left. Both decode, 20 ms a token: the second's other two until 110. The first's last 2/3
    of a token take 10 ms alone, until 120. So its TPOT is (120 - 30) / 4 = 22.5, over its bound, and the second's
    (110 - 70) / 2 = 20, within it. Each has half of the 40 ms that they decoded together: 20 + 10 + 10 + 20 + 10 = 70 ms of
    engine time, and 20 + 20 = 40.
    """
    there = fleet("fast")
    path = log_of(
        tmp_path / "log",
        decided(1, 1000.000, "fast", query(tpot_ms=22.0), there),
        decided(2, 1000.040, "fast", query(tpot_ms=22.0), there),
        ended(1, "fast", 5, 1.0, 1.0),
        ended(2, "fast", 3, 1.0, 1.0),
    )
    first, second = simulate(read_recording(path))
    assert (first.ttft_ms, first.tpot_ms, first.engine_ms) == tuple(pytest.approx(x, abs=0.01) for x in (30, 22.5, 70))
    assert (second.ttft_ms, second.tpot_ms, second.engine_ms) == tuple(pytest.approx(x, abs=0.01) for x in (30, 20, 40))
    assert summarise([first, second]) == Summary(
        requests=2,
        refused=0,
        shares={FAST: 1.0, BALANCED: 0.0, PRECISE: 0.0},
        met=0.5,
        mean_loss=pytest.approx(0.08),
        ttft_p50=pytest.approx(30, abs=0.01),
        ttft_p95=pytest.approx(30, abs=0.01),
        tpot_p50=pytest.approx(21.25, abs=0.01),
        tpot_p95=pytest.approx(22.375, abs=0.01),
        engine_s=pytest.approx(0.11, abs=1e-4),
    )


def test_a_request_waits_for_a_sequence(tmp_path: Path) -> None:
    """With one sequence at a time the second waits for the first to end at 30 + 2 * 15 = 60 ms; it came at 10 ms.

    Its first token comes at 60 + 30 = 90: 80 ms after it came.
    """
    there = fleet("fast", max_num_seqs=1)
    path = log_of(
        tmp_path / "log",
        decided(1, 1000.000, "fast", query(), there),
        decided(2, 1000.010, "fast", query(), there),
        ended(1, "fast", 3, 1.0, 1.0),
        ended(2, "fast", 1, 1.0, None),
    )
    first, second = simulate(read_recording(path))
    assert (first.ttft_ms, first.tpot_ms) == (pytest.approx(30, abs=0.01), pytest.approx(15, abs=0.01))
    assert (second.ttft_ms, second.tpot_ms) == (pytest.approx(80, abs=0.01), None)


def test_replicas_that_share_a_machine(tmp_path: Path) -> None:
    """All takes twice as long while both compute: 30 ms of the one end at 60, when 20 of the other's 50 are left.

    Those go at full speed, until 80. Engine time is that of the prompts: 20 and 40 ms. Precise loses nothing.
    """
    there = fleet("fast", "precise", contention=1.0)
    path = log_of(
        tmp_path / "log",
        decided(1, 1000.0, "fast", query(hint="fast"), there),
        decided(2, 1000.0, "precise", query(prompt_tokens=40, hint="precise"), there),
        ended(1, "fast", 1, 1.0, None),
        ended(2, "precise", 1, 1.0, None),
    )
    results = simulate(read_recording(path))
    assert [r.tier for r in results] == [FAST, PRECISE]
    assert [r.ttft_ms for r in results] == [pytest.approx(60, abs=0.01), pytest.approx(80, abs=0.01)]
    assert [r.engine_ms for r in results] == [pytest.approx(20, abs=0.01), pytest.approx(40, abs=0.01)]
    assert summarise(results).shares == {FAST: 0.5, BALANCED: 0.0, PRECISE: 0.5}
    assert summarise(results).mean_loss == pytest.approx(0.04)


def test_requests_wait_in_the_routers_queue(tmp_path: Path) -> None:
    """One slot. The first ends at 30 + 4 * 15 = 90 ms; the second, which came at 10, waits until the fourth has been served.

    That came at 30 with a higher priority: it begins at 90, and its only token comes at 120, 90 ms after it came. The second
    begins then, so its first token comes at 150: after 140. The third, which came at 20, bounds its TTFT to 50 ms, and gives
    up at 70. The fifth finds two waiting, which is the most: it is refused.
    """
    there = fleet("fast", slots=1)
    path = log_of(
        tmp_path / "log",
        decided(1, 1000.000, "fast", query(), there),
        decided(2, 1000.010, None, query(), there),
        decided(3, 1000.020, None, query(ttft_ms=50.0), there),
        decided(4, 1000.030, None, query(), there, priority=-1),
        decided(5, 1000.075, None, query(), there),
        *(ended(number, "fast", 5 if number == 1 else 1, 1.0, 1.0) for number in range(1, 6)),
    )
    results = simulate(read_recording(path), options=Options(max_waiting=2))
    assert [r.tier for r in results] == [FAST, FAST, None, FAST, None]
    assert [r.ttft_ms for r in results if r.tier] == [pytest.approx(x, abs=0.01) for x in (30, 140, 90)]
    assert summarise(results).refused == 2


def test_a_request_continues_elsewhere_when_its_replica_goes(tmp_path: Path) -> None:
    """At 40 ms, 2/3 of a token after its first one, fast is gone. Balanced reads 20 prompt tokens and 5/3 of the answer.

    Its next token comes at 40 + 10 + 21.67 = 71.67; the other 7/3 take 35 ms: 106.67. So TPOT is (106.67 - 30) / 4 = 19.17.
    The third request comes when nothing is ready, and is refused.
    """
    both, one = fleet("fast", "precise"), fleet("balanced", "precise")
    path = log_of(
        tmp_path / "log",
        decided(1, 1000.000, "fast", query(), both),
        decided(2, 1000.040, "precise", query(hint="precise"), one),
        decided(3, 1000.500, None, query(), fleet()),
        ended(1, "fast", 5, 1.0, 1.0),
        ended(2, "precise", 1, 1.0, None),
    )
    results = simulate(read_recording(path))
    assert [r.tier for r in results] == [BALANCED, PRECISE, None]
    assert (results[0].ttft_ms, results[0].tpot_ms) == (pytest.approx(30, abs=0.01), pytest.approx(19.17, abs=0.01))


def test_a_replica_is_as_slow_as_it_was_seen(tmp_path: Path) -> None:
    """Tokens took twice as long lately as the speed model says: so they do in the simulation."""
    path = log_of(
        tmp_path / "log",
        decided(1, 1000.0, "fast", query(), fleet("fast", slower=2.0)),
        ended(1, "fast", 5, 1.0, 1.0),
    )
    (result,) = simulate(read_recording(path))
    assert (result.ttft_ms, result.tpot_ms) == (pytest.approx(30, abs=0.01), pytest.approx(30, abs=0.01))


def test_the_price_of_loss_moves_in_a_simulation(tmp_path: Path) -> None:
    """Under another policy it begins anew, and holds the mean loss of the simulated answers to the budget."""
    there = fleet("fast", "balanced", "precise")
    for tier, step_ms in zip(there["tiers"], (10.0, 20.0, 40.0), strict=True):
        tier["replicas"][0]["speed"] = {**tier["replicas"][0]["speed"], "step_base_ms": step_ms}
    records = [decided(n, 1000.0 + n, "fast", query("chat" if n % 2 else "code"), there) for n in range(300)]
    path = log_of(tmp_path / "log", *records, *(ended(n, "fast", 10, 1.0, 1.0) for n in range(300)))
    recording = read_recording(path)
    for budget, expected in ((0.0, 0.0), (0.05, 0.05), (0.12, 0.12)):
        table = replace(recording.tables["by-hand"], loss_budget=budget)
        results = simulate(recording, table, options=Options(half_life_s=60.0))
        found = [r.loss for r in results[100:] if r.loss is not None]
        assert statistics.fmean(found) == pytest.approx(expected, abs=0.01)


@pytest.mark.anyio
async def test_a_burst_that_was_queued_is_queued_in_the_simulation(tmp_path: Path) -> None:
    """One slot a tier and thirty requests at once: all were served, and all are in the simulation."""
    path = tmp_path / "decisions.jsonl"
    slots = {tier: {"max_in_flight": 1} for tier in STANDARD_TIERS}
    async with router_stack(tmp_path, {"telemetry": {"decision_log": str(path)}, "tiers": slots}) as stack:
        await stack.generate()  # its speed is known afterwards
        answers = await asyncio.gather(*(stack.generate(max_tokens=8) for _ in range(30)))
        assert {answer.status_code for answer in answers} == {200}
        await until(lambda: not stack.leases())
    recording = read_recording(path)
    speed = SpeedModel(10.0, 0.1, 5.0, profiled=True)
    assert sum(record.tier is None for record in recording.decisions) > 20  # there was no slot when they came
    assert summarise(simulate(recording, speeds=dict.fromkeys(STANDARD_TIERS, speed))).refused == 0


def test_the_command_prints_what_is_worked_out(tmp_path: Path) -> None:
    """Beside one another: as it was seen, as the recorded policy would do, and as one does that allows no loss."""
    there = fleet("fast", "precise")
    path = log_of(
        tmp_path / "log",
        decided(1, 1000.0, "fast", query(ttft_ms=50.0), there),
        decided(2, 2000.0, "fast", query(ttft_ms=50.0), there),
        ended(1, "fast", 2, 40.0, 16.0),
        ended(2, "fast", 2, 60.0, 18.0),
    )
    (tmp_path / "other.toml").write_text("[policy.max_loss]\nchat = 0.0\n")
    shown = CliRunner().invoke(make_app(), ["replay", str(path), "--policy", str(tmp_path / "other.toml")])
    rows = {
        name.strip(): rest.split() for name, _, rest in (line.partition("  ") for line in shown.output.splitlines())
    }
    # shares of three tiers, SLA met, refused, loss, TTFT p50 and p95, TPOT p50 and p95, engine seconds
    assert " ".join(rows["recorded, as seen"]) == "100% 0% 0% 50.0% 0 0.080 50 59 17.0 17.9"
    assert " ".join(rows["recorded, simulated"]) == "100% 0% 0% 100.0% 0 0.080 30 30 15.0 15.0 0.1"
    assert " ".join(rows["other, simulated"]) == "0% 0% 100% 100.0% 0 0.000 30 30 15.0 15.0 0.1"


@pytest.mark.anyio
async def test_a_running_routers_log_says_what_the_router_says(tmp_path: Path) -> None:
    """Share, attainment and times of its log are those of its own records, from which page and metrics are made.

    Times to a first token count from a request's arrival: one has waited in the queue.
    """
    path = tmp_path / "decisions.jsonl"
    settings = {"telemetry": {"decision_log": str(path)}, "tiers": {"balanced": {"max_in_flight": 1}}}
    async with router_stack(tmp_path, settings) as stack:
        stack.engines[BALANCED].delay_s = 0.1
        queued = {"tier": "balanced", "tier_policy": "require"}
        first = asyncio.create_task(stack.generate(**queued))
        await until(lambda: stack.engines[BALANCED].running)
        assert (await stack.generate(**queued)).status_code == (await first).status_code == 200
        for tier in ("fast", "fast", "fast", "balanced", "precise"):
            assert (await stack.generate(tier=tier)).status_code == 200
        impossible = {"ttft_ms": 0.001}
        assert (await stack.generate(tier="fast", sla=impossible)).status_code == 200
        refused = await stack.generate(tier="fast", tier_policy="require", max_tokens=4000)
        assert refused.status_code == 422
        for behaviour in stack.engines.values():
            behaviour.status = 500
        assert (await stack.generate(tier="fast", stream=False)).status_code == 503
        await until(lambda: not stack.leases())
        records = (await stack.client.get(f"{stack.url}/requests")).json()["requests"]
    recording = read_recording(path)
    assert differing(recording) == []
    found = summarise(seen(recording))
    served = [r for r in records if r["outcome"] == "ok"]
    assert (found.requests, len(served), found.refused) == (len(records), 8, 2) == (10, 8, 2)
    assert found.shares == {t: sum(r["served_by"] == t for r in served) / 8 for t in STANDARD_TIERS}
    assert found.shares[FAST] >= 0.5
    assert any(r["queue_ms"] for r in served)
    assert [r["sla_met"] for r in records].count(False) >= 1
    assert found.met == pytest.approx(sum(r["sla_met"] is not False for r in served) / 10)
    for key, p50, p95 in (
        ("ttft_ms", found.ttft_p50, found.ttft_p95),
        ("tpot_ms", found.tpot_p50, found.tpot_p95),
    ):
        percentiles = statistics.quantiles([r[key] for r in served], n=100, method="inclusive")
        assert (p50, p95) == (pytest.approx(percentiles[49], abs=0.02), pytest.approx(percentiles[94], abs=0.02))
    by_id = {r["request_id"]: r for r in records}
    assert {i: o.output_tokens for i, o in recording.outcomes.items() if o.error is None} == {
        i: r["output_tokens"] for i, r in by_id.items() if r["outcome"] == "ok"
    }
