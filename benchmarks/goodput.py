"""Goodput of four ways to choose a tier, on the same arrivals, in one run.

    python benchmarks/goodput.py real --profiles ~/.cache/qarr/profiles [--rate 0.6] [--seconds 100] [--rounds 2]
    python benchmarks/goodput.py simulated [--rate 4 14] [--seconds 60]

(a) everything to ``precise``; (b) round robin over the tiers; (c) the table, with nothing measured but idle speeds; (d) the
policy with measured loss and speed. Goodput is the rate of requests that met both their TTFT and their TPOT bound. Every
request has bounds on TTFT, TPOT and loss; they are sent with (c) and (d), and (a) and (b) are judged by them alike. Where no
tier keeps all bounds, (c) and (d) give up the one on loss first; the mean loss is to stay within the mean bound.

``real`` starts ``qarr up`` with real engines, takes the newest quality profile of the folder, and measures their speed.
``simulated`` starts the router in front of engines with a GPU's timing (``simulated_engine.py``, figures and sources there),
measures their speed in the same way, and assumes losses: it shows how the policy behaves, not how fast anything is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from measure import ROOT, free_port, wait_for

from classifier import PromptClass
from router.policy.profiles import Interval, Loss, QualityProfile, load_latency, load_profile, percentile, profile_name
from router.policy.replay import differing, read_recording
from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


QARR = ROOT / ".venv/bin/qarr"
POLICIES = {
    "a": "everything to precise",
    "b": "round robin",
    "c": "table, nothing measured",
    "d": "measured policy",
}


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked. Times in milliseconds.

    Attributes:
        max_loss: Share of tokens by class that may differ from the highest precision's.
        tokens: Shortest and longest answer.
    """

    prompts: tuple[tuple[str, str], ...]
    ttft_ms: float
    tpot_ms: float
    max_loss: dict[str, float]
    tokens: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at_s: float
    kind: str
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of it. Times in milliseconds; None where it was refused or broke off."""

    kind: str
    tier: TierName | None
    ttft_ms: float | None
    tpot_ms: float | None
    met: bool
    late_ms: float


def main() -> None:
    """Run as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", choices=("real", "simulated"))
    parser.add_argument("--profiles", type=Path, help="folder with the quality profile of the default model")
    parser.add_argument("--rate", type=float, nargs="+", help="arrivals a second")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--slower", type=float, default=40, help="simulated: how many times slower than the GPU")
    parser.add_argument("--ttft", type=float, help="bound in milliseconds")
    parser.add_argument("--tpot", type=float, help="bound in milliseconds")
    options = parser.parse_args()
    print(f"$ python benchmarks/goodput.py {' '.join(a for a in sys.argv[1:] if not a.startswith('/'))}")
    with tempfile.TemporaryDirectory() as folder:
        if options.engines == "real":
            run_real(options, Path(folder))
        else:
            run_simulated(options, Path(folder))


def read_prompts(kinds: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the built-in prompts of some classes."""
    rows = [json.loads(line) for line in (ROOT / "router/profile_prompts.jsonl").read_text("utf-8").splitlines()]
    return tuple((row["class"], row["text"]) for row in rows if row["class"] in kinds)


def run_real(options: argparse.Namespace, folder: Path) -> None:
    """Measure on real engines."""
    kinds = ("chat", "writing", "multilingual", "code", "math", "extraction")
    workload = Workload(
        prompts=read_prompts(kinds),
        ttft_ms=options.ttft or 4000,
        tpot_ms=options.tpot or 400,
        max_loss={kind: 0.35 if kind in kinds[:3] else 0.1 for kind in kinds},
        tokens=(8, 32),
    )
    kept = folder / "kept"
    kept.mkdir()
    measured = kept / max(options.profiles.glob("quality-*.json"), key=lambda file: file.stat().st_mtime).name
    shutil.copy(options.profiles / measured.name, measured)
    with router(folder, [str(QARR), "up"]) as url:
        measure_speed(url, folder, step_s=6)
        shutil.copytree(folder / "profiles", kept, dirs_exist_ok=True)
        compare(url, folder, kept, load_profile(measured), workload, options)


def run_simulated(options: argparse.Namespace, folder: Path) -> None:
    """Simulate."""
    kinds = ("chat", "writing", "code", "math")
    slower = options.slower
    workload = Workload(
        prompts=read_prompts(kinds),
        ttft_ms=(options.ttft or 400) * slower,
        tpot_ms=(options.tpot or 9) * slower,
        max_loss={"chat": 0.12, "writing": 0.12, "code": 0.05, "math": 0.05},
        tokens=(64, 192),
    )
    options.rate = options.rate or [2, 12]
    options.seconds = options.seconds or 60
    with contextlib.ExitStack() as engines:
        urls = {}
        for tier in TierName:
            port = free_port()
            argv = [sys.executable, "benchmarks/simulated_engine.py", str(port), tier.value, str(slower)]
            engines.enter_context(running(argv, dict(os.environ)))
            wait_for(port)
            urls[tier] = f"http://127.0.0.1:{port}"
        argv = [str(QARR), "serve", *(part for tier in TierName for part in (f"--{tier.value}", urls[tier]))]
        with router(folder, argv) as url:
            profile = assumed_losses({tier: urls[tier] for tier in TierName}, kinds)
            (folder / "profiles").mkdir(exist_ok=True)
            measure_speed(url, folder, step_s=6)
            kept = folder / "kept"
            shutil.copytree(folder / "profiles", kept)
            (kept / profile_name(profile.checkpoints)).write_text(profile.model_dump_json())
            compare(url, folder, kept, profile, workload, options)


def measure_speed(url: str, folder: Path, step_s: float) -> None:
    """Run ``qarr profile latency`` and print what it found."""
    done = subprocess.run(
        [str(QARR), "profile", "latency", "--url", url, "--config", str(folder / "qarr.toml"), "--step", str(step_s)],
        text=True,
        capture_output=True,
        check=False,
    )
    print(done.stdout.rstrip(), flush=True)
    assert done.returncode == 0, done.stderr


def assumed_losses(identities: dict[TierName, str], kinds: Sequence[str]) -> QualityProfile:
    """Return a profile with losses as one may expect of an 8B model: an assumption, like all of the simulation."""
    losses = []
    for kind in kinds:
        for tier, loss in ((TierName.FAST, 0.08), (TierName.BALANCED, 0.02), (TierName.PRECISE, 0.0)):
            share = Interval(mean=loss, low=loss * 0.8, high=loss * 1.2)
            one = Interval(mean=1, low=1, high=1)
            losses.append(
                Loss(
                    prompt_class=PromptClass(kind), tier=tier, prompts=50, tokens=1000, top1_disagreement=share,
                    kl_mean=share, kl_p95=share, perplexity_ratio=one, first_divergence=10, never_diverged=0.1,
                )
            )  # fmt: skip
    return QualityProfile(
        created=datetime.now(UTC), model="simulated", checkpoints=dict(identities), answer_tokens=32, top_k=10,
        prompts="assumed", losses=tuple(losses),
    )  # fmt: skip


@contextlib.contextmanager
def running(argv: Sequence[str], env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process until the end."""
    process = subprocess.Popen(argv, cwd=ROOT, env=env, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@contextlib.contextmanager
def router(folder: Path, argv: Sequence[str]) -> Iterator[str]:
    """Run a router with settings of its own; yield its URL once every tier is ready and its speed known."""
    port = free_port()
    (folder / "qarr.toml").write_text(
        f"""[server]
port = {port}
[policy]
profiles = "{folder}/profiles"
give_up = "quality"
[telemetry]
decision_log = "{folder}/decisions.jsonl"
decision_log_mb = 1000
[profile]
auto = false
live = false
[engine]
warmup_question = "What is the capital of France?"
[tiers.fast]
max_num_seqs = {16 if "up" in argv else 256}
max_in_flight = {32 if "up" in argv else 256}
max_model_len = 2048
[tiers.balanced]
max_num_seqs = {16 if "up" in argv else 256}
max_in_flight = {32 if "up" in argv else 256}
max_model_len = 4096
[tiers.precise]
max_num_seqs = {16 if "up" in argv else 256}
max_in_flight = {32 if "up" in argv else 256}
max_model_len = 8192
"""
    )
    env = {**os.environ, "QARR_CONFIG": str(folder / "qarr.toml")}
    with running(argv, env) as process:
        wait_for(port, "/readyz", 600, process=process)
        url = f"http://127.0.0.1:{port}"
        asyncio.run(until_measured(url))
        yield url


async def until_measured(url: str) -> None:
    """Wait until every tier is ready and its speed known."""
    async with aiohttp.ClientSession(trust_env=False) as session:
        while True:
            replicas = [r for t in (await tiers_of(session, url)) for r in t["replicas"]]
            if all(r["state"] == "ready" and r["tpot_ms"] is not None for r in replicas):
                return
            await asyncio.sleep(0.5)


async def tiers_of(session: aiohttp.ClientSession, url: str) -> list[dict[str, Any]]:
    """Return the fleet."""
    async with session.get(f"{url}/tiers") as response:
        found: list[dict[str, Any]] = (await response.json())["tiers"]
        return found


def compare(
    url: str, folder: Path, kept: Path, profile: QualityProfile, workload: Workload, options: argparse.Namespace
) -> None:
    """Run every policy on the same arrivals, round by round in turned order, and print."""
    rates, seconds = options.rate or [0.6], options.seconds or 100
    latency = load_latency(next(kept.glob("latency-*.json")))
    unit = (
        "simulated; times and rates are those of the simulation" if options.engines == "simulated" else latency.machine
    )
    print(f"# {profile.model} on {unit}")
    print(
        f"# bounds: TTFT {workload.ttft_ms:g} ms, TPOT {workload.tpot_ms:g} ms, loss by class "
        + ", ".join(f"{kind} {bound:g}" for kind, bound in workload.max_loss.items())
    )
    for rate in rates:
        answers: dict[str, list[Answer]] = {name: [] for name in POLICIES}
        for number in range(options.rounds):
            plan = arrivals(workload, rate, seconds, seed=number)
            order = list(POLICIES) if number % 2 == 0 else list(reversed(POLICIES))
            for name in order:
                set_profiles(folder, kept if name == "d" else None)
                asyncio.run(settled(url, profiled=name == "d"))
                print(f"  {rate:g}/s, round {number + 1}: {POLICIES[name]}, {len(plan)} requests", file=sys.stderr)
                answers[name] += asyncio.run(phase(url, name, number, rate, plan, workload))
        show(rate, seconds * options.rounds, answers, workload, profile)
        show_prediction(folder, f"d-{rate:g}-")
    recording = read_recording(folder / "decisions.jsonl")
    again = len(recording.decisions) - len(differing(recording))
    print(f"\n{again} of {len(recording.decisions)} logged decisions come out again from the log alone")


def arrivals(workload: Workload, rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Return Poisson arrivals of mixed prompts."""
    source = random.Random(seed)
    found, at = [], 0.0
    while (at := at + source.expovariate(rate)) < seconds:
        kind, text = source.choice(workload.prompts)
        found.append(Arrival(at, kind, f"({source.randint(100, 999)}) {text}", source.randint(*workload.tokens)))
    return found


def set_profiles(folder: Path, kept: Path | None) -> None:
    """Give the router the profiles, or take them away."""
    target = folder / "profiles"
    target.mkdir(exist_ok=True)
    for file in target.glob("*.json"):
        file.unlink()
    for file in kept.glob("*.json") if kept else ():
        shutil.copy(file, target)


async def settled(url: str, *, profiled: bool) -> None:
    """Wait until nothing is in flight and the router knows what it should, and no more."""
    async with aiohttp.ClientSession(trust_env=False) as session:
        while True:
            await asyncio.sleep(1)
            replicas = [r for t in (await tiers_of(session, url)) for r in t["replicas"]]
            async with session.post(f"{url}/route", json={"prompt": "What is tea?"}) as response:
                known = (await response.json())["tiers"][0]["expected_loss"] is not None
            speeds = all(r["speed_profiled"] is profiled for r in replicas)
            if known == profiled and speeds and not any(r["in_flight"] for r in replicas):
                return


async def phase(url: str, name: str, number: int, rate: float, plan: list[Arrival], workload: Workload) -> list[Answer]:
    """Send one policy's requests when they are due."""
    started = time.monotonic()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=900), trust_env=False
    ) as session:

        async def one(index: int, arrival: Arrival) -> Answer:
            await asyncio.sleep(started + arrival.at_s - time.monotonic())
            late_ms = (time.monotonic() - started - arrival.at_s) * 1000
            headers = {"x-request-id": f"{name}-{rate:g}-{number}-{index}".replace(".", "_")}
            body = request(name, index, arrival, workload)
            return await ask(session, url, headers, body, arrival, workload, late_ms)

        answers = await asyncio.gather(*(one(i, a) for i, a in enumerate(plan)))
        while any(r["in_flight"] for t in await tiers_of(session, url) for r in t["replicas"]):  # noqa: ASYNC110
            await asyncio.sleep(0.5)
    return answers


def request(name: str, index: int, arrival: Arrival, workload: Workload) -> dict[str, Any]:
    """Return a request's body under one policy."""
    wishes: dict[str, Any] = {}
    model = "auto"
    if name == "a":
        model, wishes = "precise", {"tier_policy": "require"}
    elif name == "b":
        model, wishes = list(TierName)[index % 3].value, {"tier_policy": "require"}
    else:
        wishes = {
            "sla": {
                "ttft_ms": workload.ttft_ms,
                "tpot_ms": workload.tpot_ms,
                "max_quality_loss": workload.max_loss[arrival.kind],
            }
        }
        if name == "c":
            del wishes["sla"][
                "max_quality_loss"
            ]  # unmeasured, only precise could keep it: the table is what is compared
    return {
        "model": model,
        "messages": [{"role": "user", "content": arrival.text}],
        "max_tokens": arrival.tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "qarr": wishes,
    }


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    headers: dict[str, str],
    body: dict[str, Any],
    arrival: Arrival,
    workload: Workload,
    late_ms: float,
) -> Answer:
    """Send one request and time its answer."""
    sent = time.monotonic()
    first = last = 0.0
    tail = b""
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        if response.status != 200:
            await response.read()
            return Answer(arrival.kind, None, None, None, met=False, late_ms=late_ms)
        tier = TierName(response.headers["x-qarr-tier"])
        async for chunk in response.content.iter_any():
            now = time.monotonic()
            first = first or now
            last = now if b"[DONE]" not in chunk or b'"content":"' in chunk else last
            tail = (tail + chunk)[-200:]
    if b"[DONE]" not in tail:
        return Answer(arrival.kind, tier, None, None, met=False, late_ms=late_ms)
    ttft_ms = (first - sent) * 1000
    tpot_ms = (last - first) * 1000 / max(arrival.tokens - 1, 1)
    met = ttft_ms <= workload.ttft_ms and tpot_ms <= workload.tpot_ms
    return Answer(arrival.kind, tier, ttft_ms, tpot_ms, met, late_ms)


def loss_of(answer: Answer, profile: QualityProfile) -> float | None:
    """Return the measured loss of an answer's class on its tier."""
    if answer.tier is None:
        return None
    if answer.tier is TierName.PRECISE:
        return 0.0
    found = profile.loss(PromptClass(answer.kind), answer.tier)
    return found.top1_disagreement.mean if found else None


def show(
    rate: float, seconds: float, answers: dict[str, list[Answer]], workload: Workload, profile: QualityProfile
) -> None:
    """Print one table."""
    goodput = {name: sum(a.met for a in found) / seconds for name, found in answers.items()}
    print(f"\n{rate:g} arrivals/s, {seconds:g} s, {len(answers['a'])} requests for each policy")
    print(
        "policy                     goodput/s  to (d)  met %  refused  TTFT p50/p95 ms    TPOT p50/p95 ms  mean loss (bound)"
        "  fast/balanced/precise %"
    )
    for name, found in answers.items():
        ttft = [a.ttft_ms for a in found if a.ttft_ms is not None]
        tpot = [a.tpot_ms for a in found if a.tpot_ms is not None]
        losses = [loss for loss in (loss_of(a, profile) for a in found) if loss is not None]
        bound = statistics.fmean(workload.max_loss[a.kind] for a in found)
        shares = "/".join(f"{sum(a.tier is tier for a in found) / len(found) * 100:.0f}" for tier in TierName)
        print(
            f"({name}) {POLICIES[name]:24} {goodput[name]:7.3f} {goodput[name] / max(goodput['d'], 1e-9):7.2f}"
            f" {sum(a.met for a in found) / len(found) * 100:6.1f} {sum(a.tier is None for a in found):8}"
            f"  {percentile(ttft, 0.5):6.0f}/{percentile(ttft, 0.95):7.0f}"
            f"  {percentile(tpot, 0.5):10.1f}/{percentile(tpot, 0.95):7.1f}"
            f"  {statistics.fmean(losses):7.3f} ({bound:.3f})      {shares}"
        )
    for name in (name for name in answers if name != "d"):
        pairs = [(mine.met, other.met) for mine, other in zip(answers["d"], answers[name], strict=True)]
        print(
            f"of the same requests (d) met {pairs.count((True, False))} that ({name}) did not, "
            f"({name}) {pairs.count((False, True))} that (d) did not"
        )
    late = [a.late_ms for found in answers.values() for a in found]
    print(f"requests were sent {percentile(late, 0.95):.0f} ms late at most in 95 % of cases")


def show_prediction(folder: Path, prefix: str) -> None:
    """Print how far the predictions of the measured policy were off."""
    recording = read_recording(folder / "decisions.jsonl")
    ttft, tpot = [], []
    for record in recording.decisions:
        outcome = recording.outcomes.get(record.request_id)
        if (
            not record.request_id.startswith(prefix.replace(".", "_"))
            or outcome is None
            or outcome.tier is not record.tier
        ):
            continue
        if record.predicted_ttft_ms is not None and outcome.ttft_ms:
            ttft.append(abs(record.predicted_ttft_ms - outcome.ttft_ms) / outcome.ttft_ms)
        if record.predicted_tpot_ms is not None and outcome.tpot_ms:
            tpot.append(abs(record.predicted_tpot_ms - outcome.tpot_ms) / outcome.tpot_ms)
    for name, errors in (("TTFT", ttft), ("TPOT", tpot)):
        print(
            f"prediction of (d), |predicted - seen| / seen {name}: median {percentile(errors, 0.5):.2f}, "
            f"p95 {percentile(errors, 0.95):.2f} of {len(errors)}"
        )


if __name__ == "__main__":
    main()
