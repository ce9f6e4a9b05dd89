"""How fast vLLM is at each precision on this GPU: TTFT by prompt, TPOT by batch, each engine alone and all three at once.

    .venv/bin/python benchmarks/gpu_speed.py --tokenizer FOLDER [--model CONFIG] [--kv-gib 23] [VLLM'S ARGUMENTS ...]

Three engines on one GPU have random weights of the model's shape (``--load-format dummy``), so their answers say nothing.
``--tokenizer`` is a folder with any tokenizer. One client asks the engines directly, with prompts of random tokens: medians
of four prompts, and of all answers of 128 tokens to prompts of 256. From about 10,000 tokens a second on the client is the
slower one: the rows of 256 at a time, and some of 128, say more about it than about the GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import httpx
from measure import ROOT, free_port, process, wait_for

sys.path.insert(0, str(ROOT))

from tiers.plan import machine_name

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPTS = (128, 512, 1024, 2048, 3968)
ALONE, TOGETHER = (1, 8, 32, 64, 128, 256), (1, 8, 32, 128)
PROMPT, ANSWER = 256, 128
KEPT = {
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
WEIGHTS = {"dynamic": False, "observer": "minmax"}
INT4 = {
    **WEIGHTS,
    "num_bits": 4,
    "type": "int",
    "symmetric": False,
    "strategy": "group",
    "group_size": 128,
}
FP8 = {
    **WEIGHTS,
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "channel",
}
ACTIVATIONS = {
    "dynamic": True,
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "token",
}
QUANTIZED = {
    "awq": ("pack-quantized", INT4, None),
    "fp8": ("float-quantized", FP8, ACTIVATIONS),
    "bf16": None,
}


def folder_of(engine: str, model: Path, tokenizer: Path, parent: Path) -> Path:
    """Write a model folder without weights: the shape, at one precision, and a tokenizer."""
    config = json.loads(model.read_text("utf-8"))
    if (quantized := QUANTIZED[engine]) is not None:
        form, weights, activations = quantized
        if "group_size" in weights and config["hidden_size"] % weights["group_size"]:
            weights = {**weights, "group_size": 64}
        group = {
            "targets": ["Linear"],
            "format": form,
            "weights": weights,
            "input_activations": activations,
        }
        groups = {"ignore": ["lm_head"], "config_groups": {"group_0": group}}
        config["quantization_config"] = {**KEPT, **groups, "format": form}
    folder = parent / engine
    shutil.copytree(
        tokenizer, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


async def one(
    client: httpx.AsyncClient, url: str, prompt: int, tokens: int
) -> tuple[float, float]:
    """Return an answer's TTFT and the time between its tokens, in milliseconds."""
    asked = {
        "prompt": [random.randint(1000, 20000) for _ in range(prompt)],
        "max_tokens": tokens,
        "stream": True,
    }
    first, start = 0.0, time.perf_counter()
    async with client.stream(
        "POST",
        f"{url}/v1/completions",
        json={**asked, "model": "m", "ignore_eos": True},
    ) as answer:
        answer.raise_for_status()
        async for _ in answer.aiter_raw():
            first = first or time.perf_counter()
    return 1000 * (first - start), 1000 * (time.perf_counter() - first) / (tokens - 1)


async def load(
    client: httpx.AsyncClient, url: str, batch: int, rounds: int
) -> dict[str, Any]:
    """Keep so many answers going; return their medians and the tokens a second."""
    found: list[tuple[float, float]] = []

    async def asking() -> None:
        for _ in range(rounds):
            found.append(await one(client, url, PROMPT, ANSWER))  # noqa: PERF401  the others wait meanwhile

    start = time.perf_counter()
    await asyncio.gather(*(asking() for _ in range(batch)))
    per_s = len(found) * ANSWER / (time.perf_counter() - start)
    times = {
        "ttft_ms": median(t for t, _ in found),
        "tpot_ms": median(t for _, t in found),
        "tokens_s": per_s,
    }
    return {
        "concurrency": batch,
        **{name: round(value, 2) for name, value in times.items()},
    }


async def measure(urls: dict[str, str]) -> None:
    """Measure each engine alone, then all at once; print a line of JSON for each figure."""
    async with httpx.AsyncClient(
        timeout=300, limits=httpx.Limits(max_connections=None), trust_env=False
    ) as client:
        for engine, url in urls.items():
            await load(client, url, 4, 1)
            for prompt in PROMPTS:
                ttft = median(
                    [(await one(client, url, prompt, 2))[0] for _ in range(4)]
                )
                print(
                    json.dumps(
                        {"engine": engine, "prompt": prompt, "ttft_ms": round(ttft, 1)}
                    ),
                    flush=True,
                )
            for batch in ALONE:
                row = await load(client, url, batch, 1 if batch > 32 else 2)
                print(json.dumps({"engine": engine, "alone": True, **row}), flush=True)
        for batch in TOGETHER:
            rows = await asyncio.gather(
                *(load(client, url, batch, 2) for url in urls.values())
            )
            for engine, row in zip(urls, rows, strict=True):
                print(json.dumps({"engine": engine, "alone": False, **row}), flush=True)


def main(given: Sequence[str] | None = None) -> None:
    """Start the engines, measure, and stop them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=ROOT / "tests/unit/tiers/sizing/configs/llama-3.1-8b.json",
    )
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--python", default=str(ROOT / ".venv-engine/bin/python"))
    parser.add_argument(
        "--kv-gib", type=float, default=23.0, help="KV cache of each engine"
    )
    parser.add_argument(
        "--start",
        type=float,
        default=900,
        help="seconds that an engine may take to start",
    )
    options, more = parser.parse_known_args(given)
    command = " ".join(["python benchmarks/gpu_speed.py", *sys.argv[1:]])
    print(json.dumps({"command": command, "machine": machine_name()}), flush=True)
    with TemporaryDirectory() as name, ExitStack() as stack:
        urls = {}
        for engine in QUANTIZED:
            port, folder = (
                free_port(),
                folder_of(engine, options.model, options.tokenizer, Path(name)),
            )
            served = f"--host 127.0.0.1 --port {port} --served-model-name m --load-format dummy --max-model-len 4096"
            shared = f"--gpu-memory-utilization 0.3 --kv-cache-memory-bytes {int(options.kv_gib * 2**30)}"
            argv = [
                options.python,
                "-m",
                "vllm.entrypoints.openai.api_server",
                "--model",
                str(folder),
            ]
            argv += [*served.split(), *shared.split(), "--max-num-seqs", "256", *more]
            environment = {
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
            }
            stack.enter_context(
                process(argv, None, env=environment, log=Path(name) / f"{engine}.log")
            )
            urls[engine] = f"http://127.0.0.1:{port}"
        for engine, url in urls.items():
            try:
                wait_for(int(url.rpartition(":")[2]), "/health", options.start)
            except Exception:
                print(
                    (Path(name) / f"{engine}.log").read_text("utf-8")[-3000:],
                    file=sys.stderr,
                )
                raise
        asyncio.run(measure(urls))


if __name__ == "__main__":
    main()
