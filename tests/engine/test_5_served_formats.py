"""Number formats in real vLLM: those that the table of schemes says this machine serves load and compute, others do not.

The checkpoints are of a model with two layers and random weights, made by llm-compressor once and then kept in the cache,
since what counts is what vLLM computes with them: it is compared with what it computes in BF16.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from router.deployment.layout import prepare_options
from router.section import cache_dir
from router.settings import load_settings
from tests.engine import twins
from tests.ports import reserved_range
from tests.waiting import until
from tiers.checkpoints.prepare import finished
from tiers.checkpoints.schemes import scheme_table
from tiers.fleet import Fleet
from tiers.lifecycle.options import SupervisorOptions
from tiers.lifecycle.supervisor import Supervisor
from tiers.spec import EngineLaunch, EnginePlacement, ReplicaStatus, TierName, TierSpec
from tiers.this_hardware import read_hardware

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
ENGINE_PYTHON = PROJECT / ".venv-engine/bin/python"
QUANTIZER_PYTHON = PROJECT / ".venv-quantizer/bin/python"
MAKER = HERE / "make_formats.py"
LOADER = HERE / "load_formats.py"
MADE = (
    "int8-w8a8",
    "fp8",
    "fp8-block",
    "gptq-int4",
    "nvfp4-w4a16",
    "mxfp4",
)
# One that CPUs take, and one that they do not. Loading is what takes the time.
ONLINE = {
    f"{scheme.vllm_quantization}={{base}}": scheme.number_format
    for scheme in scheme_table().schemes.values()
    if scheme.name in {"online-fp8", "online-mxfp8"}
}
# In nats a token, where BF16's log-probabilities of neighbouring tokens are 1.4 apart: 8 bits were at most 0.15 and 4 bits at
# most 0.52 from BF16.
EIGHT_BITS_GAP = 0.3
FOUR_BITS_GAP = 0.8


def _digest() -> str:
    """Digest all that the checkpoints depend on."""
    versions = sorted(
        path.name
        for name in ("llmcompressor", "compressed_tensors", "transformers")
        for path in QUANTIZER_PYTHON.parent.parent.glob(
            f"lib/python*/site-packages/{name}-*.dist-info"
        )
    )
    content = [MAKER.read_text("utf-8"), *MADE, *versions]
    return hashlib.sha256("\0".join(content).encode()).hexdigest()[:16]


@cache
def made_folder() -> Path:
    """Return the folder of all checkpoints, which are made if the cache has none."""
    folder = cache_dir() / f"test-formats-{_digest()}"
    if folder.is_dir():
        return folder
    options = prepare_options(
        load_settings(None, {"model": {"store": str(twins.OWN_STORE)}})
    )
    tokenizer = finished(options)[-1].path
    work = folder.with_suffix(f".{os.getpid()}")
    try:
        subprocess.run(
            [QUANTIZER_PYTHON, MAKER, "tiny", tokenizer, work, *MADE],
            check=True,
            capture_output=True,
            timeout=900,
        )
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    """Return what vLLM made of each checkpoint, by format, and of the BF16 one by each online method."""
    folder = made_folder()
    base = folder / "bf16"
    arguments = {str(folder / name): name for name in ("bf16", *MADE)}
    for argument in ONLINE:
        filled = argument.format(base=base)
        arguments[filled] = f"online {filled.partition('=')[0]}"
    done = subprocess.run(
        [ENGINE_PYTHON, LOADER, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(arguments), done.stderr[-3000:]
    results = [json.loads(line) for line in lines]
    return {arguments[result["argument"]]: result for result in results}


def _gap(answers: dict[str, dict[str, Any]], name: str) -> float:
    """Return how far the log-probabilities of one are from BF16's, in nats a token."""
    expected = answers["bf16"]["logprobs"]
    actual = answers[name]["logprobs"]
    return mean(abs(a - b) for a, b in zip(expected, actual, strict=True))


def test_formats_of_the_table_load_and_compute(
    answers: dict[str, dict[str, Any]],
) -> None:
    """Of each made checkpoint and each online method: it is served exactly where the table says so."""
    row = scheme_table().class_of(read_hardware())
    assert row is not None
    formats = {name: name for name in MADE}
    for argument, number_format in ONLINE.items():
        formats[f"online {argument.partition('=')[0]}"] = number_format
    for name, number_format in formats.items():
        result = answers[name]
        if not row.can_serve(number_format):
            assert "error" in result, f"{name} is served, but the table has it not"
            continue
        assert "error" not in result, f"{name}: {result['error']}"
        allowed = FOUR_BITS_GAP if "int4" in number_format else EIGHT_BITS_GAP
        assert 0 < _gap(answers, name) < allowed, name
        assert len(result["tokens"]) == 4, name


def test_neighbouring_tokens_differ_by_more_than_any_format(
    answers: dict[str, dict[str, Any]],
) -> None:
    """So the limits above tell a wrong product from a rounded one."""
    expected = answers["bf16"]["logprobs"]
    shifted = [*expected[1:], expected[0]]
    apart = mean(abs(a - b) for a, b in zip(expected, shifted, strict=True))
    assert apart > 1.2


@pytest.mark.anyio
async def test_an_engine_of_a_format_that_this_machine_lacks_says_what_it_can_compute(
    tmp_path: Path,
) -> None:
    """One sentence, then vLLM's own words and the end of its log."""
    row = scheme_table().class_of(read_hardware())
    assert row is not None
    lacking = next((name for name in MADE if not row.can_serve(name)), None)
    if lacking is None:
        pytest.skip("this machine serves every format that is made here")
    spec = TierSpec(
        TierName.FAST,
        256,
        max_num_seqs=4,
        max_in_flight=4,
        checkpoint=made_folder() / lacking,
        precision=lacking,
    )
    launch = EngineLaunch(
        spec,
        placement=EnginePlacement(kv_cache_gib=0.25),
        python=ENGINE_PYTHON,
        served_model="tiny",
        host="127.0.0.1",
        port=reserved_range(1),
        api_key="key",
    )
    fleet = Fleet((spec,))
    supervisor = Supervisor(fleet, SupervisorOptions(tmp_path / "logs", stop_grace_s=2))
    supervisor.start([launch])
    try:
        await until(
            lambda: fleet.replicas[0].state.status is ReplicaStatus.FAILED,
            "the engine has failed",
            within_s=240,
        )
        detail = fleet.replicas[0].state.detail or ""
    finally:
        await supervisor.stop()
    sentence = detail.splitlines()[0]
    assert sentence.startswith(
        f"{read_hardware()} cannot compute {lacking}, the format of fast's checkpoint; vLLM serves there int8-w8a8"
    )
    assert "tiers.fast.scheme" in sentence
    assert "exited with status" in sentence
    assert "kernel" in sentence, "vLLM's own words are missing"
