"""Quality and speed measured on real engines, through the router, by the commands that people run."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from router.policy.profiles import load_latency, load_profile
from router.profiling.profile_files import JOURNAL
from router.section import PROJECT
from tests.engine.conftest import QARR
from tests.engine.in_process import real_router
from tests.waiting import until
from tiers.spec import STANDARD_TIERS

if TYPE_CHECKING:
    from pathlib import Path

    from router.policy.profiles import LatencyProfile
    from tests.engine.conftest import Up

ASKED = (
    "Say hello.",
    "Why is the sky blue?",
    "Name a fruit.",
    "What is tea?",
    "Who are you?",
)


def test_quality_is_measured_and_taken_up_again(up: Up, tmp_path: Path) -> None:
    """Every tier answers what it may get right, and is scored; a second run has nothing left to ask."""
    tasks = tmp_path / "tasks.jsonl"
    check = {"type": "regex", "pattern": "."}  # whatever it says
    rows = [
        {
            "prompt": text,
            "class": "chat",
            "complexity": "trivial",
            "max_tokens": 6,
            "check": check,
        }
        for text in ASKED
    ]
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [str(QARR), "profile", "quality", "--url", up.url, "--tasks", str(tasks)]
    env = {**os.environ, "QARR_POLICY__PROFILES": str(tmp_path)}
    first, second = (
        subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=600, check=False
        )
        for _ in range(2)
    )
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "5 of 5" in first.stderr
    assert "5 of 5: nothing left to ask" in second.stderr
    profile = load_profile(next(tmp_path.glob("quality-*.json")))
    assert {
        t["tier"]: t["checkpoint_digest"] for t in up.tiers().values()
    } == profile.checkpoints
    assert [(count.tier, tuple(count.flips)) for count in profile.counts] == [
        ("fast", (5, 0, 0)),
        ("balanced", (5, 0, 0)),
    ]
    for count in profile.counts:
        assert count.diagnosis is not None
        assert count.diagnosis.kl > 0
        assert 0 <= count.diagnosis.regret < 5


def test_errors_say_what_to_do(up: Up, tmp_path: Path) -> None:
    """No router, or tasks that are none: one sentence and status 2."""
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"prompt": "x"}\n')
    for options, says in (
        (["--url", "http://127.0.0.1:9"], "'make up' starts one"),
        (["--url", up.url, "--tasks", str(wrong)], "line 1"),
    ):
        done = subprocess.run(
            [str(QARR), "profile", "quality", *options],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        assert says in done.stderr
        assert "Traceback" not in done.stderr


def test_speed_is_measured(up: Up, tmp_path: Path) -> None:
    """Two tiers, alone and together: every term of the model is found, its error stated, and the profile is theirs."""
    env = {**os.environ, "QARR_POLICY__PROFILES": str(tmp_path)}
    documented = "\n.venv/bin/qarr profile latency\n"
    assert documented in (PROJECT / "docs/routing.md").read_text("utf-8")
    command = [
        *documented.split(),
        "--url",
        up.url,
        "--tier",
        "fast",
        "--tier",
        "precise",
        "--step",
        "0.5",
    ]
    done = subprocess.run(
        command,
        cwd=PROJECT,
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "prompt tokens" in done.stdout
    profile = load_latency(next(tmp_path.glob("latency-*.json")))
    assert {
        t["tier"]: t["identity"] for t in up.tiers().values()
    } == profile.checkpoints
    assert [fit.tier for fit in profile.fits] == ["fast", "precise"]
    for fit in profile.fits:
        assert fit.prefill_ms_per_token > 0
        # on a busy machine the batch may be lost in the noise
        assert fit.model.step_ms(16) >= fit.model.step_ms(1) > 0
        # how small it is, is the machine's affair
        assert 0 < fit.tpot_error.median <= fit.tpot_error.p95
        samples = [s for s in profile.samples if s.tier is fit.tier]
        assert {s.neighbours for s in samples} == {0.0, 0.5}
        assert {1, 2} <= {s.batch for s in samples}, (
            "one by one, and batches: what a step of them costs is to be told"
        )
        assert len({s.prompt_tokens for s in samples}) > 2
    assert up.replica("fast")["in_flight"] == 0


def speeds_in(folder: Path) -> LatencyProfile:
    return load_latency(next(folder.glob("latency-*.json")))


@pytest.mark.anyio
async def test_a_router_measures_itself_and_gives_way(
    up: Up, engine_keys: dict[str, str], tmp_path: Path
) -> None:
    """Every tier's speed, then its loss; a request has the engines for itself, and what was judged is kept."""
    quick = {"profile": {"auto": True, "idle_s": 0.5, "latency_s": 4}}
    async with (
        real_router(up, engine_keys, tmp_path, overrides=quick) as (url, fleet),
        httpx.AsyncClient(timeout=300, trust_env=False) as client,
    ):

        async def profiling() -> dict[str, Any]:
            found: dict[str, Any] = (await client.get(f"{url}/tiers")).json()[
                "profiling"
            ]
            return found

        async def measures_quality() -> dict[str, Any] | None:
            found = await profiling()
            return (
                found
                if (found["what"], found["state"]) == ("quality", "running")
                else None
            )

        async def has_a_result() -> bool:
            return bool((await profiling())["done"])

        found = await until(measures_quality, within_s=900, poll_s=0.2)
        assert found["measured"]["latency"] == list(STANDARD_TIERS)
        profile = speeds_in(tmp_path)
        assert [fit.tier for fit in profile.fits] == list(STANDARD_TIERS)
        assert all(fit.model.step_ms(1) > 0 for fit in profile.fits)
        # Long enough that it has not ended when its first bytes are read, however slow this process is.
        messages = [{"role": "user", "content": "Count from 1 to 200."}]
        counting = {
            "model": "fast",
            "messages": messages,
            "max_tokens": 256,
            "ignore_eos": True,
            "stream": True,
        }
        async with client.stream(
            "POST", f"{url}/v1/chat/completions", json=counting
        ) as answer:
            assert sum(replica.state.in_flight for replica in fleet.replicas) == 1
            assert (await profiling())["state"] == "waiting"
            async for _ in answer.aiter_raw():
                assert sum(replica.state.in_flight for replica in fleet.replicas) <= 1
        await until(has_a_result, within_s=600, poll_s=0.2)
        assert (tmp_path / JOURNAL).read_text("utf-8").count("\n") >= 1
