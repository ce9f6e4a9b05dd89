"""Engines and supervisor killed, hung, replaced. Runs last: the stack does not survive it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import httpx
import psutil

from tests.engine.conftest import CAPITAL, HANG_S, QARR
from tiers.lifecycle.canary import read_canary
from tiers.spec import TierName

if TYPE_CHECKING:
    from tests.engine.conftest import Up

TEXT = "The capital of France is Paris. It lies on the Seine, in the north of the country, and has two million inhabitants."
# In nats a token, two engines of one checkpoint differ by less, and two precisions by more.
SAME_ENGINE = 0.05


def test_a_killed_engine_and_a_hung_one_come_back(up: Up) -> None:
    """After kill -9 of an idle engine its tier is starting with the reason, requests succeed, and it is ready again.

    Another one, whose core computes no more while its HTTP server is healthy, is killed; its request ends elsewhere. It
    hangs while the first one starts, as both take their time.
    """
    pid = up.replica("balanced")["pid"]
    below = psutil.Process(pid).children(recursive=True)
    os.kill(pid, signal.SIGKILL)
    _until(lambda: up.tiers()["balanced"]["state"] == "starting")
    assert up.replica("balanced")["detail"].startswith(
        "restart 1 after: exited with status 137"
    )
    assert not _running(below)
    answer = up.generate(tier="balanced")
    assert answer.status_code == 200
    assert answer.headers["x-qarr-tier"] == "precise"
    assert "hint balanced not taken: is starting" in answer.headers["x-qarr-reason"]
    assert up.generate(prompt="hi").headers["x-qarr-tier"] == "fast"
    fast = psutil.Process(up.replica("fast")["pid"])
    core = next(
        child
        for child in fast.children(recursive=True)
        if "EngineCore" in " ".join(child.cmdline())
    )
    core.send_signal(signal.SIGSTOP)
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(up.generate(tier="fast", stream=False))
    )
    asking.start()
    _until(lambda: up.tiers()["fast"]["state"] == "starting", 120)
    assert f"hung: 1 requests, no token for {HANG_S} s" in up.replica("fast")["detail"]
    asking.join(60)
    (answer,) = answers
    assert answer.headers["x-qarr-tier"] != "fast"
    _shown_everywhere(up, answer)
    for tier in ("balanced", "fast"):
        _until(lambda tier=tier: up.tiers()[tier]["state"] == "ready", 900)
        assert up.generate(tier=tier).headers["x-qarr-tier"] == tier
    assert up.replica("balanced")["pid"] != pid


def _shown_everywhere(up: Up, answer: httpx.Response) -> None:
    """Check that record, trace, metrics and live picture show the attempt that failed and the engine's state."""
    records = httpx.get(f"{up.url}/requests", trust_env=False).json()["requests"]
    request_id = answer.headers["x-request-id"]
    record = next(row for row in records if row["request_id"] == request_id)
    assert record["tier"] == "fast"
    assert record["served_by"] == answer.headers["x-qarr-tier"]
    assert record["outcome"] == "ok"
    assert record["attempts_failed"] == 1
    trace = httpx.get(f"{up.url}/traces/{record['trace_id']}", trust_env=False).json()
    events = [event["name"] for event in trace["spans"][0]["events"]]
    assert "qarr.attempt_failed" in events
    attempts = [span for span in trace["spans"] if span["kind"] == "client"]
    failed, served = attempts
    assert failed["attributes"]["qarr.tier"] == "fast"
    assert failed["error"]
    assert served["attributes"]["qarr.tier"] == record["served_by"]
    assert not served["error"]
    page = httpx.get(f"{up.url}/metrics", trust_env=False).text
    assert 'qarr_engine_restarts_total{tier="fast"} 1.0' in page
    assert 'qarr_tier_ready_replicas{tier="fast"} 0.0' in page
    assert f'qarr_retries_total{{tier="{record["served_by"]}"}} 0.0' not in page
    with httpx.stream("GET", f"{up.url}/live", trust_env=False) as live:
        lines = live.iter_lines()
        next(line for line in lines if line == "event: fleet")
        picture = json.loads(next(lines).removeprefix("data: "))
    assert picture["tiers"][0]["replicas"][0]["state"] == "starting"
    assert "hung" in picture["tiers"][0]["replicas"][0]["detail"]


def test_an_engine_is_recycled_under_load(up: Up) -> None:
    """``qarr tiers recycle`` replaces an engine by one that answers alike; requests for its tier alone are all served.

    The new engine finds a text as likely as the old one did; another precision does not.
    """
    before = _likelihoods(up, "fast")
    of_another_precision = _likelihoods(up, "precise")
    statuses: list[int] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            answer = up.generate(tier="fast", tier_policy="require", max_tokens=4)
            statuses.append(answer.status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        recorded = up.operate("record", "fast")
        recycled = up.operate("recycle", "fast")
    finally:
        done.set()
        asking.join(60)
    assert recorded.returncode == 0
    assert recycled.returncode == 0, recycled.stderr
    assert recycled.stdout.startswith("fast-0: recycle done, fast-")
    assert set(statuses) == {200}
    (serving,) = up.tiers()["fast"]["replicas"]
    assert serving["id"] != "fast-0"
    records = read_canary(up.profiles / "canary.json").records
    (record,) = [record for record in records if record.tier == TierName.FAST]
    assert record.is_accepted is True
    differences = [
        abs(new - old)
        for new, old in zip(_likelihoods(up, "fast"), before, strict=True)
    ]
    between_precisions = [
        abs(precise - fast)
        for precise, fast in zip(of_another_precision, before, strict=True)
    ]
    assert mean(differences) < SAME_ENGINE
    assert mean(between_precisions) > SAME_ENGINE


def _likelihoods(up: Up, tier: str) -> list[float]:
    """Return the log-probability of each token of a text, as a tier's engine finds it."""
    scorer = up.scorer(tier)
    return scorer.log_probabilities(scorer.prompt_ids(CAPITAL), scorer.text_ids(TEXT))


def test_drain_and_resume(up: Up) -> None:
    """A drained tier is passed over and said to be draining; resumed, it serves."""
    assert up.operate("drain", "precise").returncode == 0
    answer = up.generate(tier="precise")
    assert "hint precise not taken: is draining" in answer.headers["x-qarr-reason"]
    resumed = up.operate("resume", "precise")
    assert resumed.stdout == "precise-0: resume done, is ready\n"
    assert up.generate(tier="precise").headers["x-qarr-tier"] == "precise"


def pids_by_tier(up: Up) -> dict[str, int]:
    return {name: tier["replicas"][0]["pid"] for name, tier in up.tiers().items()}


def test_settings_reload_while_engines_go_on(up: Up) -> None:
    """``qarr reload`` and SIGHUP take a changed file over, as a whole or not at all; every engine goes on."""

    def tokens() -> int:
        """Return how many tokens an answer has that may be as long as the settings allow."""
        body = {
            "prompt": "Tell me a long story about a lighthouse.",
            "temperature": 0,
            "stream": False,
            "tier": "fast",
        }
        answer = httpx.post(
            f"{up.url}/generate", json=body, timeout=300, trust_env=False
        ).raise_for_status()
        count: int = answer.json()["usage"]["completion_tokens"]
        return count

    def reload() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [QARR, "reload", "--url", up.url],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    pids = pids_by_tier(up)
    up.settings.write_text("[limits]\ndefault_max_tokens = 5\n")
    assert reload().stdout.splitlines(keepends=True) == [
        "limits.default_max_tokens: 256 -> 5\n",
        "settings reloaded: 1 changed\n",
    ]
    assert tokens() == 5
    up.settings.write_text(
        "[limits]\ndefault_max_tokens = 6\n[tiers.fast]\nmax_num_seqs = 3\n"
    )
    refused = reload()
    assert refused.returncode == 2
    assert "tiers.fast.max_num_seqs" in refused.stderr
    assert tokens() == 5
    up.settings.write_text("[limits]\ndefault_max_tokens = 7\n")
    up.process.send_signal(signal.SIGHUP)
    _until(lambda: tokens() == 7)
    assert pids_by_tier(up) == pids


def test_killed_supervisor_leaves_no_engine(up: Up) -> None:
    """After kill -9 of ``qarr up`` every process that it started, at any depth, is gone within seconds."""
    everything = psutil.Process(up.process.pid if up.process else None).children(
        recursive=True
    )
    # There are guards and engines, and below them the engines' own processes.
    assert len(everything) >= 6
    logs = {Path(process.cwd()) for process in everything if process.is_running()}
    assert logs
    up.process.kill()
    up.process.wait(60)
    _until(lambda: not _running(everything))


def _running(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [
        process
        for process in processes
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


def _until(condition: object, limit_s: float = 20) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
