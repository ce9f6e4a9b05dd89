"""What the plan's roofline says, against speeds of engines on GPUs: published ones, and those that gpu_speed.py measured.

    python benchmarks/roofline.py

Nothing is run here: figures are computed, and compared with what others measured (published_speeds.toml). Each way to
measure is computed as it was done: ``all at once`` is so many requests sent together, whose answers end one after the other,
from the shortest to the longest, evenly; ``one stream`` is the time between tokens of a request alone; ``open`` is the time
between tokens while requests arrive at a rate; ``offline`` is an engine that always has more to do; ``batch of`` is the time
between tokens of so many requests, ``prompt of`` the time to the first token of a request alone.

AccelMark has the mean prompt and answer from its totals (requests 100; 256 and 345 tokens, of 8B models; at most 512).
"""

from __future__ import annotations

import json
import statistics
import sys
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tiers.formats import lowest_format  # noqa: E402
from tiers.sizing.architecture import Architecture, architecture  # noqa: E402
from tiers.sizing.capacity import ServingDemand, engines_on_gpus  # noqa: E402
from tiers.sizing.find_config import find_config  # noqa: E402
from tiers.sizing.named_gpus import parse_gpus  # noqa: E402
from tiers.sizing.roofline import Roofline  # noqa: E402
from tiers.sizing.tier_format import TierFormat, parse_format  # noqa: E402
from tiers.spec import TierName  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiers.sizing.hardware import GpuKind

CONFIGS = ROOT / "tests/unit/tiers/sizing/configs"
PUBLISHED = ROOT / "benchmarks/published_speeds.toml"
MEASURED = ROOT / "benchmarks/results/gpu_speed.jsonl"
OURS = "gpu_speed.py: results/gpu_speed.jsonl"
BATCHES = (1, 8, 32, 64)  # with more requests, the client was the slower one
LONG_PROMPTS = (2048, 3968)  # with shorter ones, it was mostly HTTP
LONGEST_ANSWER = 512
REQUESTS_AT_ONCE = 100
OFFLINE_SEQUENCES = 2048  # that an engine decodes at most
OLD_ENGINE = "vLLM 0.7"


@dataclass(frozen=True, slots=True)
class Speed:
    """One figure. ``way`` tells its unit: tokens of output a second, or milliseconds between tokens."""

    way: str
    model_name: str
    gpus: int
    gpu_name: str
    precision: str
    prompt_tokens: int
    output_tokens: int
    figure: float
    engine: str
    source: str

    @property
    def is_throughput(self) -> bool:
        """Tell whether the figure is tokens a second."""
        return self.way in {"offline", "all at once"}

    @property
    def number(self) -> float:
        """Return the number in the name of the way, as of ``batch of 8``."""
        return float(self.way.removesuffix("/s").split()[-1])

    @property
    def model(self) -> Architecture:
        """Return the model."""
        return architecture(find_config(str(CONFIGS / f"{self.model_name}.json")))

    @property
    def gpu(self) -> GpuKind:
        """Return the kind of GPU."""
        kind, _ = parse_gpus(self.gpu_name)
        return kind

    @property
    def tier_format(self) -> TierFormat:
        """Return the number formats."""
        return parse_format(self.precision, where=self.source)

    @property
    def pace(self) -> Roofline:
        """Return the roofline of the engine."""
        tier_format = self.tier_format
        return Roofline(
            model=self.model,
            gpu=self.gpu,
            number_format=tier_format.number_format,
            gpus=self.gpus,
            context_tokens=self.prompt_tokens + self.output_tokens // 2,
            kv_bytes_per_value=tier_format.kv_bytes_per_value,
            dense_format=tier_format.dense_format,
        )


def published_speeds() -> Iterator[Speed]:
    """Return what others measured."""
    for group in tomllib.loads(PUBLISHED.read_text("utf-8"))["groups"]:
        for row in group["rows"]:
            yield Speed(*row, engine=group["engine"], source=group["source"])


def measured_speeds() -> Iterator[Speed]:
    """Return what gpu_speed.py measured of each precision alone."""
    for line in MEASURED.read_text("utf-8").splitlines()[1:]:
        row = json.loads(line)
        precision = {"awq": "awq-int4"}.get(row["engine"], row["engine"])
        if row.get("prompt") in LONG_PROMPTS:
            yield _measured(f"prompt of {row['prompt']}", precision, row["ttft_ms"])
        elif row.get("alone") and row["concurrency"] in BATCHES:
            yield _measured(f"batch of {row['concurrency']}", precision, row["tpot_ms"])


def _measured(way: str, precision: str, figure_ms: float) -> Speed:
    return Speed(
        way=way,
        model_name="llama-3.1-8b",
        gpus=1,
        gpu_name="H200",
        precision=precision,
        prompt_tokens=256,
        output_tokens=128,
        figure=figure_ms,
        engine="vLLM 0.32",
        source=OURS,
    )


def computed(speed: Speed) -> float:
    """Return what the roofline says, in the unit of the figure."""
    if speed.way == "one stream":
        return speed.pace.step_ms(1)
    if speed.way.startswith("batch of"):
        return speed.pace.step_ms(int(speed.number))
    if speed.way.startswith("prompt of"):
        tokens = int(speed.number)
        return speed.pace.mixed_ms(tokens, 1, tokens)
    if speed.way.startswith("open"):
        return between_tokens_ms(speed)
    if speed.way == "offline":
        return offline_per_s(speed)
    return all_at_once_per_s(speed)


def all_at_once_per_s(speed: Speed) -> float:
    """Return tokens a second of requests that are sent together. Answers are as long as they are between here and there."""
    pace = speed.pace
    shortest = 2 * speed.output_tokens - LONGEST_ANSWER
    prompts_ms = speed.prompt_tokens * pace.prefill_ms_per_token
    took_ms = REQUESTS_AT_ONCE * prompts_ms
    for step in range(LONGEST_ANSWER):
        share_left = min(1.0, (LONGEST_ANSWER - step) / (LONGEST_ANSWER - shortest))
        took_ms += pace.step_ms(max(round(REQUESTS_AT_ONCE * share_left), 1))
    return REQUESTS_AT_ONCE * speed.output_tokens / took_ms * 1000


def between_tokens_ms(speed: Speed) -> float:
    """Return the time between tokens at which as many answers end as begin. Prompts of others take their part of it."""
    pace = speed.pace
    per_ms = speed.number / 1000
    prompt_ms = speed.prompt_tokens * pace.prefill_ms_per_token
    between_ms = pace.step_ms(1)
    for _ in range(100):
        batch = per_ms * (prompt_ms + speed.output_tokens * between_ms)
        between_ms = pace.step_ms(max(round(batch), 1)) / (1 - per_ms * prompt_ms)
    return between_ms


def offline_per_s(speed: Speed) -> float:
    """Return tokens a second of an engine that is never idle, as the plan computes it."""
    demand = ServingDemand(
        prompt_tokens=speed.prompt_tokens,
        output_tokens=speed.output_tokens,
        context=speed.prompt_tokens + speed.output_tokens,
        max_num_seqs=OFFLINE_SEQUENCES,
    )
    plans, obstacles = engines_on_gpus(
        speed.model,
        speed.gpu,
        speed.gpus,
        demand,
        formats={TierName.FAST: speed.tier_format},
    )
    for plan in plans:
        if plan.gpus_per_replica == speed.gpus and plan.tokens_per_s is not None:
            return plan.tokens_per_s
    raise SystemExit(f"{speed}: {obstacles}")


def family_of(speed: Speed) -> str:
    """Return the family of figures that one belongs to, whose mean is shown: its engine, format and kind of model."""
    engine = speed.engine
    if engine.startswith("vLLM") and engine != OLD_ENGINE:
        engine = "vLLM 0.9 to 0.32"
    lowest = lowest_format(speed.precision)
    assert lowest is not None
    kind = "with experts" if speed.model.has_experts else "dense"
    return f"{engine}: {lowest.quantization.upper()}, {kind}"


def main() -> None:
    """Print the table."""
    print("$ python benchmarks/roofline.py")
    print(
        f"{'model':13} {'on':23} {'precision':22} {'measured':14} {'engine':17} {'unit':>8} published computed  ratio"
    )
    speeds = [*published_speeds(), *measured_speeds()]
    ratios = defaultdict[str, list[float]](list)
    for speed in speeds:
        value = computed(speed)
        ratio = value / speed.figure if speed.is_throughput else speed.figure / value
        ratios[family_of(speed)].append(ratio)
        print(_line(speed, value, ratio))
    print("\nratio: how much faster the computed engine is. Geometric means:")
    for family, of_family in sorted(ratios.items()):
        spread = f"{min(of_family):.2f} to {max(of_family):.2f}"
        mean = statistics.geometric_mean(of_family)
        print(f"- {family}: {mean:.2f} ({spread}; figures: {len(of_family)})")
    print("\nSources:")
    for source in dict.fromkeys(speed.source for speed in speeds):
        print(f"- {source}")


def _line(speed: Speed, value: float, ratio: float) -> str:
    place = f"{speed.gpus} x {speed.gpu_name}"
    unit = "tokens/s" if speed.is_throughput else "ms"
    figures = f"{speed.figure:9.1f} {value:8.1f}"
    if speed.is_throughput:
        figures = f"{speed.figure:9,.0f} {value:8,.0f}"
    return (
        f"{speed.model_name:13} {place:23} {speed.precision:22} {speed.way:14} {speed.engine:17} {unit:>8} {figures} "
        f"{ratio:6.2f}"
    )


if __name__ == "__main__":
    main()
