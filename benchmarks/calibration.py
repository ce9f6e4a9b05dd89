"""How many calibration prompts AWQ needs: the loss of ``fast`` by samples and tokens, and what each choice takes.

    .venv/bin/python benchmarks/calibration.py [--only 32x256 ...] [--store DIR] [--tokens 24]

Each candidate (samples x tokens of each at most) is quantized into a store of its own, then its engine and the BF16 engine
answer and judge the default prompts as ``qarr profile quality`` does. What is finished is kept in the store: a second call
does the rest, and prints the table of all that is there. CPU seconds are those of the quantizer's process from its start to
its end; wall seconds mean something only where nothing else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import httpx
from kernels import engine
from measure import ROOT

sys.path.insert(0, str(ROOT))
from classifier import PromptClass
from router.deployment.layout import prepare_options
from router.policy.profiles import REFERENCE
from router.profiling.measure_quality import read_prompts
from router.profiling.quality import Score, judge, summarise
from router.profiling.scoring import greedy_body, read_greedy, read_scored, scoring_body
from router.settings import cache_dir, load_settings
from tiers.checkpoints.prepare import prepare
from tiers.plan import machine_name
from tiers.spec import TierName, TierSpec

if TYPE_CHECKING:
    from kernels import Engine

    from router.profiling.measure_quality import Prompt
    from tiers.checkpoints.checkpoint import Checkpoint

# Samples x tokens, the cheapest first; 160 prompts are all that the project's own file has.
CANDIDATES = ("16x256", "16x512", "32x256", "32x512", "64x256", "64x512", "160x256", "160x512")
PARALLEL = 8
PROMPTS = ROOT / "router" / "profiling" / "profile_prompts.jsonl"


def main() -> None:
    """Make, judge and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=CANDIDATES, metavar="SAMPLESxTOKENS")
    parser.add_argument("--store", type=Path, default=cache_dir() / "calibration-benchmark")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer, at most")
    args = parser.parse_args()
    prompts = read_prompts(PROMPTS, None)
    for candidate in args.only:
        fast, precise = make(candidate, args.store)
        judged = args.store / f"judged-{fast.manifest.weights_digest[:16]}-{args.tokens}.json"
        if not judged.exists():
            scores = asyncio.run(score(prompts, fast, precise, args.tokens))
            judged.write_text(json.dumps([s.model_dump(mode="json") for s in scores]))
    report(args.store, args.tokens)


def make(candidate: str, store: Path) -> tuple[Checkpoint, Checkpoint]:
    """Return the ``fast`` checkpoint of a candidate, and the ``precise`` one; note what it took."""
    samples, tokens = map(int, candidate.split("x"))
    own = {"store": store, "calibration_samples": samples, "calibration_tokens": tokens}
    options = prepare_options(load_settings(None, {"model": own}))
    began: list[tuple[float, float]] = []
    searched = False  # from the first layer on

    def progress(message: str, done: int, total: int) -> None:
        nonlocal searched
        searched = searched or ("AWQ" in message and done == 0)
        print(f"{candidate}: {message} ({done} of {total})", file=sys.stderr, flush=True)

    def made(_checkpoint: Checkpoint) -> None:
        began.append((time.monotonic(), _children_cpu()))

    fast, _, precise = prepare(options, progress, made)
    note = store / f"made-{candidate}.json"
    if not note.exists():
        (_, (wall, cpu), (ended, cpu_ended)) = began
        spent = {"wall_s": ended - wall, "cpu_s": cpu_ended - cpu} if searched else {}  # else it was interrupted
        row = {"fast": fast.manifest.weights_digest, "tokens": fast.manifest.calibration_tokens, **spent}
        note.write_text(json.dumps(row))
    return fast, precise


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def score(prompts: tuple[Prompt, ...], fast: Checkpoint, precise: Checkpoint, tokens: int) -> list[Score]:
    """Have both engines answer, and the BF16 engine judge all answers."""
    python = load_settings(None, {}).engine.python
    places = asyncio.Semaphore(PARALLEL)
    scores: list[Score] = []
    with ExitStack() as stack:
        logs = Path(stack.enter_context(TemporaryDirectory()))
        engines = {c.tier: stack.enter_context(engine(_spec(c), python, logs, plugin=True)) for c in (precise, fast)}
        async with httpx.AsyncClient(timeout=900, trust_env=False) as client, asyncio.TaskGroup() as group:

            async def ask(running: Engine, path: str, body: dict[str, Any]) -> dict[str, Any]:
                answer = await client.post(running.url + path, json={"model": "m", **body})
                answered: dict[str, Any] = answer.raise_for_status().json()
                return answered

            async def one(prompt: Prompt) -> None:
                async with places:
                    body = greedy_body([{"role": "user", "content": prompt.text}], tokens)
                    answers = {
                        tier: read_greedy(await ask(running, "/v1/chat/completions", body))
                        for tier, running in engines.items()
                    }
                    for tier, answer in answers.items():
                        scored = await ask(engines[REFERENCE], "/v1/completions", scoring_body(answer))
                        reference = read_scored(scored, answer)
                        own, theirs = answer.own, answers[REFERENCE].ids
                        scores.append(
                            judge(prompt.digest, prompt.prompt_class, tier, answer=answer.ids, own=own,
                                  reference=reference, reference_answer=theirs)
                        )  # fmt: skip
                    print(f"judged {len(scores) // 2} of {len(prompts)}", file=sys.stderr, flush=True)

            for prompt in prompts:
                group.create_task(one(prompt))
    return scores


def _spec(checkpoint: Checkpoint) -> TierSpec:
    return TierSpec(
        name=checkpoint.tier, max_model_len=2048, max_num_seqs=16, max_in_flight=16, checkpoint=checkpoint.path
    )


def report(store: Path, answer_tokens: int) -> None:
    """Print the table of what is there, the fewest tokens first."""
    print(f"{machine_name()}; AWQ of {load_settings(None, {}).model.name}; {os.cpu_count()} cores")
    print(
        f"loss of fast over all prompts of {PROMPTS.name}, {answer_tokens} tokens each; intervals: 95 %, over prompts"
    )
    print(
        f"{'samples x tokens':18}{'used':>8}{'CPU s':>8}{'wall s':>8}   {'not first choice %':23} {'KL mean, nats':25}"
    )
    rows = [(path.stem.removeprefix("made-"), json.loads(path.read_text())) for path in store.glob("made-*.json")]
    for candidate, row in sorted(rows, key=lambda found: found[1]["tokens"]):
        judged = store / f"judged-{row['fast'][:16]}-{answer_tokens}.json"
        if not judged.exists():
            continue
        scores = [Score.model_validate(score) for score in json.loads(judged.read_text())]
        as_one = [score.model_copy(update={"prompt_class": PromptClass.CHAT}) for score in scores]
        loss = next(found for found in summarise(as_one) if found.tier is TierName.FAST)
        wrong, kl = loss.top1_disagreement, loss.kl_mean
        print(
            f"{candidate:18}{row['tokens']:>8}{_seconds(row, 'cpu_s'):>8}{_seconds(row, 'wall_s'):>8}   "
            f"{f'{wrong.mean * 100:.1f} ({wrong.low * 100:.1f} to {wrong.high * 100:.1f})':23} "
            f"{f'{kl.mean:.3f} ({kl.low:.3f} to {kl.high:.3f})':25}"
        )


def _seconds(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.0f}" if name in row else "-"


if __name__ == "__main__":
    main()
