"""Fit speed models to what gpu_speed.py measured on a GPU, so that ``qarr plan --profile`` computes with them.

    python benchmarks/gpu_profile.py

It reads results/gpu_speed.jsonl and writes results/latency_llama-3.1-8b_h200.json. Only engines that ran alone count, and
only rows that the client did not limit: below 10,000 tokens a second, and at most 128 answers at a time (see gpu_speed.py).
How many decode steps a new prompt waits for was not measured: it is taken as 1.5, as for the roofline.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from measure import ROOT

from router.policy.profiles import LatencyProfile, SpeedSample
from router.profiling.fit_latency import fit_tier
from tiers.spec import STANDARD_TIERS, TierName

MEASURED = ROOT / "benchmarks/results/gpu_speed.jsonl"
PROFILE = ROOT / "benchmarks/results/latency_llama-3.1-8b_h200.json"
MODEL = "llama-3.1-8b"
TIERS = {"awq": TierName.FAST, "fp8": TierName.BALANCED, "bf16": TierName.PRECISE}
CLIENT_TOKENS_S = 10_000  # the client is the slower one from here on
MAX_AT_ONCE = 128
TTFT_STEPS = 1.5


def read_sample(row: dict[str, Any]) -> SpeedSample | None:
    """Return one line's measurement as a sample; None: the client limited it, or other engines ran too."""
    tier = TIERS[row["engine"]]
    if "prompt" in row:
        return SpeedSample(
            tier=tier,
            prompt_tokens=row["prompt"],
            sequences=0,
            waiting_tokens=0,
            batch=0,
            neighbours=0.0,
            ttft_ms=row["ttft_ms"],
            tpot_ms=None,
        )
    if (
        not row["alone"]
        or row["concurrency"] > MAX_AT_ONCE
        or row["tokens_s"] >= CLIENT_TOKENS_S
    ):
        return None
    return SpeedSample(
        tier=tier,
        prompt_tokens=256,
        sequences=0,
        waiting_tokens=0,
        batch=row["concurrency"],
        neighbours=0.0,
        ttft_ms=None,  # the prompts came all at once
        tpot_ms=row["tpot_ms"],
    )


def gpu_profile() -> LatencyProfile:
    """Return the profile of the measured GPU."""
    head, *rows = [
        json.loads(line) for line in MEASURED.read_text("utf-8").splitlines()
    ]
    samples = [sample for row in rows if (sample := read_sample(row)) is not None]
    fits = [
        fit_tier(tier, samples, MAX_AT_ONCE, contention=0.0) for tier in STANDARD_TIERS
    ]
    return LatencyProfile(
        created=datetime.fromisoformat(head["date"]).replace(tzinfo=UTC),
        model=MODEL,
        checkpoints=dict.fromkeys(STANDARD_TIERS),
        machine=head["machine"],
        fits=tuple(each.model_copy(update={"ttft_steps": TTFT_STEPS}) for each in fits),
        samples=tuple(samples),
    )


if __name__ == "__main__":
    PROFILE.write_text(gpu_profile().model_dump_json(indent=1) + "\n", "utf-8")
    print(PROFILE.relative_to(ROOT))
