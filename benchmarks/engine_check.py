"""How far sound and broken engines are from what their checkpoint should compute: what the check before traffic stands on.

    .venv/bin/python benchmarks/engine_check.py [--only TEXT] [--after N] [--compiled] > benchmarks/results/engine_check.txt

Each variant is a real vLLM engine that scores the fixed texts as at every start (tiers/lifecycle/likelihood.py). ``gap`` is
the mean absolute difference, in nats a token, from the log-probabilities that transformers computed in FP32 when the
checkpoint was made; ``decode`` is the one between decode and prefill of the engine's own tokens; ``allowed`` is the bound on
both. Each is told for an engine that is asked alone, and if it is sound for the worst of eight at once. Sound: started
twice, twins (scripts/make_twin.py), vLLM's own 4-bit kernel, and oneDNN's for older processors. Broken: see
broken_checkpoints.py. Engines run one after another.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, run
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import httpx
from broken_checkpoints import KINDS, break_checkpoint
from measure import ROOT, free_port, note, wait_for

sys.path.insert(0, str(ROOT))
from router.deployment.layout import prepare_options
from router.settings import load_settings
from tiers.checkpoints.prepare import find
from tiers.checkpoints.reference import allowed_gap, gap
from tiers.errors import CanaryRefusedError, ProbeError
from tiers.lifecycle.canary import Canary, EngineKey
from tiers.lifecycle.command import engine_argv, engine_environment
from tiers.lifecycle.likelihood import EngineScores, score_engine
from tiers.lifecycle.process import selected_kernels
from tiers.probe import EngineProbe
from tiers.spec import EngineLaunch, EnginePlacement, TierName, TierSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tiers.checkpoints.checkpoint import Checkpoint

TWINS = (1, 2, 3)
BATCH = 8
START_S = 900.0
VLLM_KERNELS = {"VLLM_PLUGINS": "none"}
# BF16 products without the processor's BF16 instructions
OLDER_INSTRUCTIONS = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}


@dataclass(frozen=True, slots=True)
class Variant:
    """One engine to score.

    Attributes:
        tier: Whose reference and bounds count.
        folder: What is served.
        is_sound: Whether it must pass.
        is_faint: Whether it is broken so little that it may pass.
        environment: Variables besides the usual ones.
        arguments: More arguments of vLLM.
    """

    name: str
    tier: TierName
    folder: Path
    is_sound: bool = True
    is_faint: bool = False
    environment: Mapping[str, str] | None = None
    arguments: tuple[str, ...] = ()


def sound_variants(checkpoints: Sequence[Checkpoint], work: Path) -> Iterator[Variant]:
    """Make and yield engines that must pass."""
    for made in checkpoints:
        yield Variant("as made", made.tier, made.path)
        yield Variant("started again", made.tier, made.path)
        yield Variant(
            "oneDNN for older CPUs",
            made.tier,
            made.path,
            environment=OLDER_INSTRUCTIONS,
        )
        # of FP8 on a CPU without AMX, vLLM's kernel takes a second for a token
        if made.tier == TierName.FAST:
            yield Variant(
                "vLLM's kernels", made.tier, made.path, environment=VLLM_KERNELS
            )
        for seed in TWINS:
            twin = work / f"{made.tier}-twin-{seed}"
            command = [
                sys.executable,
                ROOT / "scripts/make_twin.py",
                made.path,
                twin,
                "--keep-manifest",
            ]
            run([*command, "--seed", str(seed)], check=True, stdout=DEVNULL)
            yield Variant(f"twin {seed}", made.tier, twin)


def broken_variants(
    checkpoints: Sequence[Checkpoint], work: Path, quantizer: Path
) -> Iterator[Variant]:
    """Make and yield engines that must not pass."""
    by_tier = {made.tier: made for made in checkpoints}
    for kind in KINDS:
        for tier in kind.tiers:
            target = work / f"{tier}-{kind.name.replace(' ', '-')}"
            break_checkpoint(kind, by_tier[tier].path, target, quantizer)
            yield Variant(
                kind.name, tier, target, is_sound=False, is_faint=kind.is_faint
            )
    yield Variant(
        "FP8 in its place",
        TierName.PRECISE,
        by_tier[TierName.BALANCED].path,
        is_sound=False,
    )
    yield Variant(
        "4 bits in its place",
        TierName.BALANCED,
        by_tier[TierName.FAST].path,
        is_sound=False,
    )


@contextmanager
def engine(variant: Variant, python: Path, log: Path) -> Iterator[str]:
    """Run an engine until it is healthy; yield its URL."""
    port = free_port()
    spec = TierSpec(variant.tier, 2048, 16, 32, checkpoint=variant.folder)
    launch = EngineLaunch(
        tier=spec,
        placement=EnginePlacement(threads=1, kv_cache_gib=1),
        python=python,
        served_model="m",
        host="127.0.0.1",
        port=port,
        api_key="",
        extra_args=variant.arguments,
    )
    argv = engine_argv(launch)
    environment = {
        **engine_environment(launch, os.environ),
        **(variant.environment or {}),
    }
    with log.open("w") as output:
        process = Popen(
            argv,
            env=environment,
            stdin=DEVNULL,
            stdout=output,
            stderr=STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(port, "/health", START_S, process=process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


async def scores_of(url: str, batch: int) -> tuple[EngineScores, list[EngineScores]]:
    """Have an engine score the texts: alone, and as one of several at once."""
    async with httpx.AsyncClient(timeout=600, trust_env=False) as client:
        probe = EngineProbe(client, url, "")
        alone = await score_engine(probe, "m", START_S)
        return alone, await asyncio.gather(
            *(score_engine(probe, "m", START_S) for _ in range(batch))
        )


async def refusal(scores: EngineScores, spec: TierSpec, work: Path) -> str:
    """Return why the check before traffic would refuse an engine; empty: it would not."""
    key = EngineKey(weights=spec.identity or "", engine="")
    try:
        await Canary(work / "canary.json").check_scores(scores, spec, key)
    except CanaryRefusedError as error:
        return str(error)
    return ""


def last_error(log: Path) -> str:
    """Return the last line of an engine's log that names an exception."""
    lines = [
        line
        for line in log.read_text("utf-8", "replace").splitlines()
        if re.search(r"\b\w*Error\b: ", line)
    ]
    return lines[-1].rpartition("] ")[2][:120] if lines else "its log names no error"


def measure(variant: Variant, made: Checkpoint, python: Path, work: Path) -> str:
    """Return a variant's row."""
    reference = made.manifest.reference
    assert reference is not None
    log = work / "engine.log"
    try:
        with engine(variant, python, log) as url:
            alone, batch = asyncio.run(scores_of(url, BATCH if variant.is_sound else 1))
    except ChildProcessError:
        return f"{made.tier:9} {'':6} {variant.name:24} does not start"
    except (ProbeError, httpx.HTTPError) as error:
        note(f"{made.tier} {variant.name}: {error}\n{last_error(log)}")
        return f"{made.tier:9} {'':6} {variant.name:24} fails while it scores: {last_error(log)}"
    # What is served in the place of another checkpoint is judged by that one's reference.
    judged_by = made.path if variant.name.endswith("in its place") else variant.folder
    spec = TierSpec(
        made.tier,
        2048,
        16,
        32,
        checkpoint=judged_by,
        digest="d",
        precision=made.manifest.precision.value,
    )
    why = asyncio.run(refusal(alone, spec, work))
    verdict = "refused" if why else "passes"
    if bool(why) == variant.is_sound and not variant.is_faint:
        verdict += ", WRONGLY"
    note(f"{made.tier} {variant.name}: {verdict} {why[:300]}")
    figures = (
        gap(reference.texts, alone.texts),
        max(gap(reference.texts, scores.texts) for scores in batch),
        alone.decode_gap,
        max(scores.decode_gap for scores in batch),
    )
    row = (
        f"{made.tier:9} {'sound' if variant.is_sound else 'broken':6} {variant.name:24}"
    )
    row += "".join(f"{figure:8.3f}" for figure in figures)
    kernels = ", ".join(selected_kernels(log)) or "oneDNN"
    return f"{row} {allowed_gap(made.manifest.precision.value):7.2f}  {verdict:8}  {kernels}"


def main() -> None:
    """Score all variants and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument(
        "--after",
        type=int,
        default=0,
        help="leave out so many of the first variants: to go on",
    )
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="compiled graphs too: three minutes each",
    )
    args = parser.parse_args()
    settings = load_settings(None, {})
    checkpoints = find(prepare_options(settings))
    if checkpoints is None:
        raise SystemExit("the checkpoints are not made yet: run 'make checkpoints'")
    by_tier = {made.tier: made for made in checkpoints}
    print(
        "$ .venv/bin/python benchmarks/engine_check.py"
        + (" --compiled" if args.compiled else "")
    )
    processor = next(
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    print(
        f"{datetime.now(UTC):%Y-%m-%d}, {processor.partition(': ')[2]}, {platform.machine()}\n"
    )
    print(f"{'':41}{'gap':>8}{'of 8':>8}{'decode':>8}{'of 8':>8}")
    print(
        f"{'tier':9} {'engine':31}{'alone':>8}{'at once':>8}{'alone':>8}{'at once':>8} allowed  verdict   kernels",
        flush=True,
    )
    with TemporaryDirectory(dir=settings.model.store) as folder:
        work = Path(folder)
        sound = sound_variants(checkpoints, work)
        broken = broken_variants(checkpoints, work, settings.quantizer.python)
        compiled = [
            Variant("compiled", m.tier, m.path, arguments=("--no-enforce-eager",))
            for m in checkpoints
        ]
        for number, variant in enumerate(
            chain(sound, broken, compiled if args.compiled else ())
        ):
            if number >= args.after and args.only in f"{variant.tier} {variant.name}":
                print(
                    measure(
                        variant, by_tier[variant.tier], settings.engine.python, work
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
