"""INT8 W8A8 on a CPU beside FP8, 4 bits and BF16: speed, processor time, and how likely each finds BF16's answers.

    .venv-quantizer/bin/python tests/engine/make_formats.py BF16 MADE int8-w8a8
    .venv-engine/bin/python -P benchmarks/int8_cpu.py bf16=BF16 fp8=FP8 awq-int4=AWQ int8-w8a8=MADE/int8-w8a8

Each name stands before the folder of a checkpoint. vLLM loads them all in this one process, on one thread, with the engine
plugin's kernels, and the engines take turns in rounds. Decode: milliseconds of a step with 1 and 8 sequences, from the
difference between long and short answers. Prefill: milliseconds for 1,000 prompt tokens. Both also in processor time, which
other programs on the machine disturb less. Ratios are those of medians over rounds.

Likelihood: ``bf16`` answers prompts greedily, and every engine scores these answers. The gap is by how many nats a token an
engine finds them less likely than ``bf16`` does; the interval is a bootstrap over answers. The absolute difference of the
log-probabilities is beside it. Both measure rounding, not answers: BF16's own gap is 0.

With ``--without-amx`` vLLM and the plugin believe that the processor has none; ``ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16`` in
the environment makes oneDNN do without it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

os.environ.update(
    {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
)  # before vLLM reads them
import torch
from vllm import LLM, SamplingParams
from vllm import __version__ as vllm_version

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent
BASE = "bf16"
BATCHES = (1, 8)
SHORT = 4  # tokens of an answer; the time between both lengths is that of decoding
LONG = 20
PREFILL = 1000
ANSWER = 48
WORDS = 40_000  # prompts are drawn from so many token ids: no two share a prefix
RESAMPLES = 2000
IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


class Times(NamedTuple):
    """How long something took, in milliseconds: by the clock, and of this process's threads."""

    wall: float
    cpu: float


class Engine:
    """One checkpoint, loaded."""

    def __init__(self, name: str, folder: str) -> None:
        self.name = name
        began_at = time.monotonic()
        self._llm = LLM(
            folder,
            enforce_eager=True,
            max_model_len=2048,
            max_num_seqs=16,
            max_num_batched_tokens=512,
            kv_cache_memory_bytes=256 << 20,
            enable_prefix_caching=False,
            distributed_executor_backend=IN_PROCESS,
            seed=0,
        )
        self.start_s = time.monotonic() - began_at

    def time_batch(self, prompts: int, prompt_tokens: int, output: int) -> Times:
        """Return how long one batch takes."""
        batch = [{"prompt_token_ids": _words(prompt_tokens)} for _ in range(prompts)]
        sampling = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
        wall = time.perf_counter()
        cpu = time.process_time()
        self._llm.generate(batch, sampling, use_tqdm=False)
        return Times(
            wall=(time.perf_counter() - wall) * 1000,
            cpu=(time.process_time() - cpu) * 1000,
        )

    def answer(self, prompt: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a prompt, as a chat, and of the greedy answer to it."""
        sampling = SamplingParams(max_tokens=ANSWER, temperature=0)
        message: Any = [{"role": "user", "content": prompt}]
        (result,) = self._llm.chat(message, sampling, use_tqdm=False)
        return list(result.prompt_token_ids or ()), list(result.outputs[0].token_ids)

    def score(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """Return the log-probability of each of an answer's tokens after a prompt."""
        sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
        tokens: Any = {"prompt_token_ids": [*prompt, *answer]}
        (result,) = self._llm.generate(tokens, sampling, use_tqdm=False)
        places = zip(answer, result.prompt_logprobs[-len(answer) :], strict=True)
        return [place[token].logprob for token, place in places]


def _words(count: int) -> list[int]:
    return [random.randrange(100, WORDS) for _ in range(count)]


def measure_speed(
    engines: Sequence[Engine], rounds: int
) -> dict[str, dict[str, list[Times]]]:
    """Return the times of each engine and kind of work, one a round; the engines take turns in each."""
    times: dict[str, dict[str, list[Times]]] = {engine.name: {} for engine in engines}
    for engine in engines:  # The first batch of each shape compiles.
        for batch in BATCHES:
            engine.time_batch(batch, 16, SHORT)
        engine.time_batch(1, PREFILL, 1)
    for _ in range(rounds):
        for engine in random.sample(engines, len(engines)):
            mine = times[engine.name]
            for batch in BATCHES:
                decoded = _decode_times(engine, batch)
                mine.setdefault(f"decode {batch}", []).append(decoded)
            prefilled = engine.time_batch(1, PREFILL, 1)
            mine.setdefault(f"prefill {PREFILL}", []).append(prefilled)
    return times


def _decode_times(engine: Engine, batch: int) -> Times:
    """Return the milliseconds of one decode step of a batch."""
    short = engine.time_batch(batch, 16, SHORT)
    long = engine.time_batch(batch, 16, LONG)
    steps = LONG - SHORT
    return Times((long.wall - short.wall) / steps, (long.cpu - short.cpu) / steps)


class Gap(NamedTuple):
    """How much less likely an engine finds BF16's answers, in nats a token."""

    mean: float
    low: float
    high: float
    absolute: float
    tokens: int


def measure_gaps(engines: Sequence[Engine], prompts: Sequence[str]) -> dict[str, Gap]:
    """Return the gap of each engine but ``bf16``, over its answers."""
    base = next(engine for engine in engines if engine.name == BASE)
    answers = [base.answer(prompt) for prompt in prompts]
    by_base = [base.score(*pair) for pair in answers]
    gaps = {}
    for engine in engines:
        differences = []
        for pair, expected in zip(answers, by_base, strict=True):
            scored = engine.score(*pair)
            differences.append([a - b for a, b in zip(expected, scored, strict=True)])
        gaps[engine.name] = _gap(differences)
    return gaps


def _gap(differences: Sequence[Sequence[float]]) -> Gap:
    """Return the mean difference with its bootstrap interval of 95 %, drawn by answers."""

    def mean_of(sample: Sequence[Sequence[float]]) -> float:
        return sum(map(sum, sample)) / sum(map(len, sample))

    chance = random.Random(0)
    means = sorted(
        mean_of(chance.choices(differences, k=len(differences)))
        for _ in range(RESAMPLES)
    )
    flat = [abs(value) for row in differences for value in row]
    return Gap(
        mean=mean_of(differences),
        low=means[RESAMPLES // 40],
        high=means[-RESAMPLES // 40],
        absolute=sum(flat) / len(flat),
        tokens=len(flat),
    )


def _prompts(count: int) -> list[str]:
    """Return questions of all kinds, at even distances."""
    lines = (ROOT / "benchmarks/simple_questions.jsonl").read_text("utf-8").splitlines()
    lines += (
        (ROOT / "benchmarks/greetings_and_hard_prompts.jsonl")
        .read_text("utf-8")
        .splitlines()
    )
    texts = []
    for line in lines:
        entry = json.loads(line)
        texts.append(entry.get("text") or entry.get("prompt") or entry["question"])
    step = max(len(texts) // count, 1)
    return texts[::step][:count]


def _print_speeds(times: dict[str, dict[str, list[Times]]]) -> None:
    works = list(times[BASE])
    print("ms: by the clock, of the processor; in parentheses the ratio to bf16's")
    print(f"{'':18}" + "".join(f"{work:>40}" for work in works))
    for name, mine in times.items():
        cells = []
        for work in works:
            wall, cpu = _medians(mine[work])
            base_wall, base_cpu = _medians(times[BASE][work])
            cells.append(
                f"{wall:9.1f} ({wall / base_wall:5.2f}){cpu:11.1f} ({cpu / base_cpu:5.2f})"
            )
        print(f"{name:18}" + "".join(f"{cell:>40}" for cell in cells))


def _medians(times: Sequence[Times]) -> Times:
    return Times(
        statistics.median(each.wall for each in times),
        statistics.median(each.cpu for each in times),
    )


def _print_gaps(gaps: dict[str, Gap]) -> None:
    print(f"\n{'':18}nats a token less likely than by bf16   absolute    tokens")
    for name, gap in gaps.items():
        interval = f"{gap.mean:8.4f} ({gap.low:.4f} to {gap.high:.4f})"
        print(f"{name:18}{interval:>37}{gap.absolute:11.4f}{gap.tokens:10}")


def _processor() -> str:
    lscpu = subprocess.check_output(["lscpu"], text=True)
    fields = dict(line.split(":", 1) for line in lscpu.splitlines() if ":" in line)
    flags = fields["Flags"].split()
    shown = [
        flag
        for flag in (
            "avx2",
            "avx512f",
            "avx512_vnni",
            "avx512_bf16",
            "amx_int8",
            "amx_bf16",
        )
        if flag in flags
    ]
    where = f"{fields['Model name'].strip()}, family {fields['CPU family'].strip()} model {fields['Model'].strip()}"
    return f"{where}, {fields['CPU(s)'].strip()} cores, {' '.join(shown)}"


def _has_no_amx() -> bool:
    return False


def _pretend_without_amx() -> None:
    """Let vLLM and the plugin believe that the processor has no AMX."""
    torch.cpu._is_amx_tile_supported = _has_no_amx  # noqa: SLF001  vLLM asks torch so


def main() -> None:
    """Load, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--speed-only", action="store_true")
    parser.add_argument("--without-amx", action="store_true")
    args = parser.parse_args()
    folders = dict(entry.split("=", 1) for entry in args.engines)
    if BASE not in folders:
        parser.error("bf16=FOLDER is needed: ratios and gaps are to it")
    if args.without_amx:
        _pretend_without_amx()
    random.seed(0)
    load = os.getloadavg()
    engines = [Engine(name, folder) for name, folder in folders.items()]
    times = measure_speed(engines, args.rounds)
    named = " ".join(f"{name}={Path(folder).name}" for name, folder in folders.items())
    options = " ".join(option for option in sys.argv[1:] if "=" not in option)
    print(f"$ .venv-engine/bin/python -P benchmarks/int8_cpu.py {named} {options}")
    print(
        f"{_processor()}; vLLM {vllm_version}; one thread; {args.rounds} rounds; load average {load[0]:.1f} at the start, "
        f"{os.getloadavg()[0]:.1f} at the end"
    )
    _print_speeds(times)
    starts = ", ".join(f"{engine.name} {engine.start_s:.0f}" for engine in engines)
    print(f"seconds to load: {starts}")
    if not args.speed_only:
        _print_gaps(measure_gaps(engines, _prompts(args.prompts)))


if __name__ == "__main__":
    main()
