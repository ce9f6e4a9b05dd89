"""What the plan's roofline says, against speeds of vLLM on GPUs: published ones, and those that gpu_speed.py measured.

    python benchmarks/roofline.py

Nothing is run here: figures are computed, and compared with what others measured. Each way to measure is computed as it was
done: ``all at once`` is so many requests sent together, whose answers end one after the other, from the shortest to the
longest, evenly; ``one stream`` is the time between tokens of a request alone; ``open`` is the time between tokens while
requests arrive at a rate; ``offline`` is an engine that always has more to do; ``batch of`` is the time between tokens of so
many requests, ``prompt of`` the time to the first token of a request alone.

AccelMark has the mean prompt and answer from its totals (requests 100; 256 and 345 tokens, of 8B models; at most 512).
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tiers.formats import FORMATS  # noqa: E402
from tiers.sizing.architecture import Architecture, architecture  # noqa: E402
from tiers.sizing.capacity import ServingDemand, engines_on_gpus  # noqa: E402
from tiers.sizing.find_config import find_config  # noqa: E402
from tiers.sizing.hardware import known_gpus  # noqa: E402
from tiers.sizing.roofline import Roofline  # noqa: E402
from tiers.spec import PRECISIONS, Precision  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIGS = ROOT / "tests/unit/tiers/sizing/configs"
ACCELMARK = (
    "github.com/FreedomIntelligence/AccelMark, results/verified, read 2026-11-27"
)
# The source says L40, which Nebius does not rent.
NEBIUS = "github.com/Nebius-Academy/LLM-Engineering-Essentials, topic5/5.4_quantization.ipynb, read 2026-11-27"
MLPERF = "MLPerf Inference 5.1, closed, offline, llama3.1-8b, Red Hat"
OURS = "gpu_speed.py: results/gpu_speed.jsonl"
# more of both: the client was the slower one; shorter: mostly HTTP
BATCHES, LONG = (1, 8, 32, 64), (2048, 3968)
BF16, FP8, INT4 = Precision.BF16, Precision.FP8, Precision.AWQ_INT4


@dataclass(frozen=True, slots=True)
class Published:
    """One figure. ``way`` tells its unit: tokens of output a second, or milliseconds between tokens."""

    model: str
    gpu: str
    gpus: int
    precision: Precision
    way: str
    figure: float
    vllm: str
    source: str
    prompt: int = 256
    output: int = 345


def measured() -> Iterator[tuple[str, Precision, float]]:
    """Return what was measured of each precision alone: the way, the precision, and milliseconds."""
    for line in (
        (ROOT / "benchmarks/results/gpu_speed.jsonl")
        .read_text("utf-8")
        .splitlines()[1:]
    ):
        row = json.loads(line)
        precision = {"awq": INT4, "fp8": FP8, "bf16": BF16}[row["engine"]]
        if row.get("prompt") in LONG:
            yield f"prompt of {row['prompt']}", precision, row["ttft_ms"]
        elif row.get("alone") and row["concurrency"] in BATCHES:
            yield f"batch of {row['concurrency']}", precision, row["tpot_ms"]


LLAMA, BIG, QWEN = "llama-3.1-8b", "llama-3.3-70b", "qwen3-8b"
FIGURES = (
    Published(LLAMA, "A100", 1, BF16, "one stream", 10.77, "0.20", ACCELMARK),
    Published(LLAMA, "L4", 1, BF16, "one stream", 61.2, "0.7", ACCELMARK),
    Published(LLAMA, "H100", 1, BF16, "one stream", 7.74, "0.7", ACCELMARK),
    Published(BIG, "A100-40GB", 8, BF16, "one stream", 20.93, "0.7", ACCELMARK),
    Published(BIG, "H200", 8, BF16, "one stream", 12.29, "0.7", ACCELMARK),
    Published(LLAMA, "A100", 1, BF16, "all at once", 3889, "0.20", ACCELMARK),
    Published(LLAMA, "A100", 1, FP8, "all at once", 4142, "0.20", ACCELMARK),
    Published(LLAMA, "RTX-5090", 1, BF16, "all at once", 3520, "0.19", ACCELMARK),
    Published(LLAMA, "A100", 1, BF16, "all at once", 2667, "0.7", ACCELMARK),
    Published(LLAMA, "H100", 1, BF16, "all at once", 5052, "0.7", ACCELMARK),
    Published(LLAMA, "H100", 1, FP8, "all at once", 6315, "0.7", ACCELMARK),
    Published(BIG, "A100-40GB", 8, BF16, "all at once", 1705, "0.7", ACCELMARK),
    Published(QWEN, "L40S", 1, BF16, "open, 10/s", 50.84, "0.9", NEBIUS, 512, 128),
    Published(QWEN, "L40S", 1, FP8, "open, 10/s", 33.47, "0.9", NEBIUS, 512, 128),
    Published(QWEN, "L40S", 1, INT4, "open, 10/s", 24.91, "0.9", NEBIUS, 512, 128),
    Published(LLAMA, "H100", 1, FP8, "offline", 5777, "0.10", MLPERF, 800, 128),
    Published(LLAMA, "L40S", 1, FP8, "offline", 1642, "0.10", MLPERF, 800, 128),
    *(
        Published(LLAMA, "H200", 1, precision, way, figure, "0.32", OURS, 256, 128)
        for way, precision, figure in measured()
    ),
)
LONGEST = 512
REQUESTS = 100


def computed(each: Published) -> float:
    """Return what the roofline says, in the unit of the figure."""
    model = architecture(find_config(str(CONFIGS / f"{each.model}.json")))
    gpu = next(kind for kind in known_gpus() if kind.is_called(each.gpu))
    pace = Roofline(
        model, gpu, FORMATS[each.precision], each.gpus, each.prompt + each.output // 2
    )
    if each.way == "one stream":
        return pace.step_ms(1)
    if each.way.startswith("batch of"):
        return pace.step_ms(int(each.way.split()[-1]))
    if each.way.startswith("prompt of"):
        return pace.mixed_ms(tokens := int(each.way.split()[-1]), 1, tokens)
    if each.way.startswith("open"):
        return between_tokens(
            pace, each, float(each.way.removesuffix("/s").split()[-1])
        )
    if each.way == "offline":
        return offline(model, each)
    return all_at_once(pace, each)


def all_at_once(pace: Roofline, each: Published) -> float:
    """Return tokens a second of requests that are sent together. Answers are as long as they are between here and there."""
    shortest = 2 * each.output - LONGEST
    took = REQUESTS * each.prompt * pace.prefill_ms_per_token
    for step in range(LONGEST):
        left = min(1.0, (LONGEST - step) / (LONGEST - shortest))
        took += pace.step_ms(max(round(REQUESTS * left), 1))
    return REQUESTS * each.output / took * 1000


def between_tokens(pace: Roofline, each: Published, rate: float) -> float:
    """Return the time between tokens at which as many answers end as begin. Prompts of others take their part of it."""
    prompt, between = each.prompt * pace.prefill_ms_per_token, pace.step_ms(1)
    for _ in range(100):
        batch = rate / 1000 * (prompt + each.output * between)
        between = pace.step_ms(max(round(batch), 1)) / (1 - rate / 1000 * prompt)
    return between


def offline(model: Architecture, each: Published) -> float:
    """Return tokens a second of an engine that is never idle, as the plan computes it."""
    gpu = next(kind for kind in known_gpus() if kind.is_called(each.gpu))
    demand = ServingDemand(
        each.prompt, each.output, each.prompt + each.output, max_num_seqs=1024
    )
    plans, _ = engines_on_gpus(model, gpu, each.gpus, demand)
    plan = next(
        p
        for p in plans
        if PRECISIONS[p.tier] is each.precision and p.gpus_per_replica == each.gpus
    )
    assert plan.tokens_per_s is not None
    return plan.tokens_per_s


def main() -> None:
    """Print the table."""
    print("$ python benchmarks/roofline.py")
    print(
        "model         on            precision measured        vLLM     unit published computed  ratio"
    )
    recent, older = [], []
    for each in FIGURES:
        ours, slow = computed(each), each.way in {"offline", "all at once"}
        ratio = ours / each.figure if slow else each.figure / ours
        (older if each.vllm == "0.7" else recent).append(ratio)
        on, unit = f"{each.gpus} x {each.gpu}", "tokens/s" if slow else "ms"
        figures = (
            f"{each.figure:9,.0f} {ours:8,.0f}"
            if slow
            else f"{each.figure:9.1f} {ours:8.1f}"
        )
        print(
            f"{each.model:13} {on:13} {each.precision:9} {each.way:14} {each.vllm:>5} {unit:>8} {figures} {ratio:6.2f}"
        )
    print("\nratio: how much faster the computed engine is. Geometric means:", end=" ")
    print(
        f"{statistics.geometric_mean(recent):.2f} of vLLM 0.9 to 0.32, {statistics.geometric_mean(older):.2f} of 0.7."
    )
    for source in dict.fromkeys(each.source for each in FIGURES):
        print(f"- {source}")


if __name__ == "__main__":
    main()
