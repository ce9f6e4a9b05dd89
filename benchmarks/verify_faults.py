"""Whether `qarr verify` finds faults in real engines, and raises no false alarm over sound ones.

usage: .venv/bin/python benchmarks/verify_faults.py [--minutes N] [--faults | --sound] [--only TEXT] [--quick]

Each case starts a candidate, compares it with a reference that runs at the same time, by the first two stages of
`qarr verify` (same model, likelihood), and stops it. The reference's own texts and facts are recorded once, by an earlier
start of it, and used again by later cases. Engines serve the small default model on the CPU, two at a time, with one thread
each.

Cases are in results/verify_faults.json, each written as it ends: a later run does only what is missing, and writes the table
results/verify_faults.txt of all. Remove the JSON file to begin anew.

Likelihood is compared by all texts of `qarr verify`, or with --quick by the few that the check before traffic has.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import platform
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from measure import ROOT, note
from pydantic import BaseModel, TypeAdapter

sys.path.insert(0, str(ROOT))
from router.deployment.layout import prepare_options
from router.settings import load_settings
from router.verification.answers import AnswersOptions
from router.verification.participants import LiveEngine, Report, ThinkingWish
from router.verification.verification import VerificationPlan, Verifier
from router.verification.wording import stage_sentence
from tests.engine.faults.checkpoints import (
    Change,
    changed_checkpoint,
    move_zero_points,
    raise_temperature,
    replace_template,
    scale_layer,
    swap_layers,
)
from tests.engine.faults.serving import DROPPING_PARSER, MODEL, EngineRecipe, serving
from tiers.checkpoints.prepare import find
from tiers.errors import ProbeError
from tiers.spec import TierName
from tiers.verification import model_facts
from tiers.verification.engine import ComparedEngine
from tiers.verification.findings import LikelihoodFinding, SameModelFinding, Verdict
from tiers.verification.likelihood import PROMPTS_FILE, LikelihoodRecord, write_texts
from tiers.verification.model_facts import ModelFacts  # noqa: TC001  pydantic reads it

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from router.verification.findings import Verification
    from router.verification.wording import Stage, StageFinding
    from tiers.checkpoints.checkpoint import Checkpoint

RESULTS = ROOT / "benchmarks/results"
JSON_FILE = RESULTS / "verify_faults.json"
TABLE_FILE = RESULTS / "verify_faults.txt"
TWINS = (1, 2, 3)
CALLS_BESIDE = 4  # chats that run at once beside a verification under load
CALL_TOKENS = 48
VLLM_KERNELS = {"VLLM_PLUGINS": "none"}
COMPILED_START_S = 400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A candidate and what it is compared with.

    Attributes:
        name: For people; the candidate's tier comes first.
        tier: Of the candidate.
        reference: The tier that it is compared with, as made.
        is_sound: Whether it must raise no alarm.
        fault: Of the engine's attention.
        changes: Of its checkpoint.
        twin: The seed of the twin that it serves; 0: the checkpoint itself.
        arguments: More arguments of vLLM.
        environment: Variables besides the usual ones.
        is_under_load: Whether others ask the candidate at the same time.
        start_limit_s: So long it may take to start.
    """

    name: str
    tier: TierName
    reference: TierName = TierName.PRECISE
    is_sound: bool = False
    fault: str = ""
    changes: tuple[Change, ...] = ()
    twin: int = 0
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    is_under_load: bool = False
    start_limit_s: float = 200.0

    @property
    def title(self) -> str:
        """Return what is compared with what."""
        return f"{self.tier} against {self.reference}: {self.name}"


class CaseResult(BaseModel):
    """What came of a case.

    Attributes:
        case: Its title.
        is_sound: Whether it must raise no alarm.
        is_quick: Whether the texts of the check before traffic were scored, not all.
        stage: Which stage found a fault; empty: none did.
        sentence: What was found, in words.
        seconds: Time of the stages, without the engines' start.
        largest_gap: Of any kind or range, in nats a token; None: likelihood was not reached.
        same_model: What the first stage found.
        likelihood: What the second stage found; None: it was not reached.
    """

    case: str
    is_sound: bool
    is_quick: bool
    stage: str
    sentence: str
    seconds: float
    largest_gap: float | None
    same_model: SameModelFinding
    likelihood: LikelihoodFinding | None

    @property
    def texts(self) -> str:
        """Return which texts were scored, for people."""
        if self.likelihood is None:
            return "none"
        return "quick" if self.is_quick else "all"

    @property
    def is_wrong(self) -> bool:
        """Tell whether a fault was missed, or a sound engine was called faulty."""
        return bool(self.stage) == self.is_sound


class Recording(BaseModel):
    """What a reference told at an earlier start of it."""

    facts: ModelFacts
    record: LikelihoodRecord


def fault_cases() -> Iterator[Case]:
    """Yield the candidates with faults, those that the first stage finds first."""
    fast = TierName.FAST
    precise = TierName.PRECISE
    yield Case(name="wrong chat template", tier=precise, changes=(replace_template,))
    yield Case(
        name="temperature 1.5 by default", tier=fast, changes=(raise_temperature,)
    )
    yield Case(
        name="tool parser drops an argument", tier=precise, arguments=DROPPING_PARSER
    )
    yield Case(
        name="KV cache rounded to 3 bits", tier=precise, fault="KV cache of 3 bits"
    )
    yield Case(name="attention wrong beyond 600", tier=precise, fault="late attention")
    yield Case(name="a layer's scales times 1.5", tier=fast, changes=(scale_layer,))
    yield Case(name="zero points off by one", tier=fast, changes=(move_zero_points,))
    yield Case(name="another model, same name", tier=precise, changes=(swap_layers,))
    yield Case(name="decode computes nonsense", tier=precise, fault="decode")
    yield Case(name="attention wrong beyond 600", tier=fast, fault="late attention")
    yield Case(name="KV cache rounded to 3 bits", tier=fast, fault="KV cache of 3 bits")


def sound_cases() -> Iterator[Case]:
    """Yield 30 sound pairs: each of 15 candidates alone, and again while others ask it."""
    for candidate in sound_candidates():
        yield candidate
        yield replace(
            candidate, name=f"{candidate.name}, others ask it", is_under_load=True
        )


def sound_candidates() -> Iterator[Case]:
    """Yield the candidates that must raise no alarm."""
    tiers = (TierName.FAST, TierName.BALANCED, TierName.PRECISE)
    for tier in tiers:
        yield Case(name="started again", tier=tier, is_sound=True)
    for seed in TWINS:
        for tier in tiers:
            yield Case(name=f"twin {seed}", tier=tier, is_sound=True, twin=seed)
    yield Case(
        name="vLLM's kernels",
        tier=TierName.FAST,
        is_sound=True,
        environment=VLLM_KERNELS,
    )
    # Where vLLM's compiled graphs compute nonsense, this is an alarm, and a right one.
    yield Case(
        name="graphs compiled by vLLM",
        tier=TierName.PRECISE,
        is_sound=True,
        arguments=("--no-enforce-eager",),
        start_limit_s=COMPILED_START_S,
    )
    yield Case(
        name="started again",
        tier=TierName.FAST,
        reference=TierName.FAST,
        is_sound=True,
    )


class RecordedEngine(LiveEngine):
    """An engine whose facts and texts are kept in a file, and which scores other texts as it runs.

    Args:
        engine: The engine.
        is_quick: Write only the few texts that a start can wait for.
        path: The file; None: nothing is kept.
    """

    def __init__(
        self, engine: ComparedEngine, path: Path | None, *, is_quick: bool
    ) -> None:
        super().__init__(engine, is_quick=is_quick)
        self._path = path
        if path is not None and path.exists():
            recording = Recording.model_validate_json(path.read_bytes())
            self._facts = recording.facts
            self._record = recording.record

    async def write(self, context: int, report: Report) -> LikelihoodRecord:
        """Return what the engine wrote at an earlier start, or have it write."""
        if self._record is None:
            texts = await write_texts(
                self.engine,
                context=context,
                quick=self.is_quick,
                report=lambda _done, _total: report(),
            )
            own_scores = await self.score(texts, report)
            self._record = LikelihoodRecord(texts=texts, own_scores=own_scores)
            if self._path is not None:
                recording = Recording(
                    facts=await self.tell_facts(), record=self._record
                )
                self._path.write_text(recording.model_dump_json(), "utf-8")
        return self._record


class Silent:
    """Takes no note of progress."""

    def begin(self, stage: Stage) -> None:
        """Ignore that a stage begins."""

    def advance(
        self,
        done: int,
        total: int | None,
        detail: str,
        remaining_s: float | None = None,
    ) -> None:
        """Ignore how much is done."""

    def finish(self, stage: Stage, finding: StageFinding | None) -> None:
        """Ignore that a stage is over."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Runs cases.

    Attributes:
        checkpoints: As made, by tier.
        python: Of the engine's environment.
        is_quick: Score only the texts of the check before traffic.
    """

    checkpoints: Mapping[TierName, Checkpoint]
    python: Path
    is_quick: bool

    @property
    def folder(self) -> Path:
        """Return the folder of recordings, twins and logs."""
        folder = next(iter(self.checkpoints.values())).path.parents[1] / "faults"
        folder.mkdir(exist_ok=True)
        return folder

    def recording_path(self, tier: TierName) -> Path:
        """Return the file of what a tier has told; other questions make another file."""
        form = "quick" if self.is_quick else "whole"
        asked = PROMPTS_FILE.read_bytes() + Path(model_facts.__file__).read_bytes()
        digest = hashlib.sha256(asked).hexdigest()[:8]
        return self.folder / f"{self.checkpoints[tier].path.name}-{form}-{digest}.json"

    def reference_recipe(self, tier: TierName) -> EngineRecipe:
        """Return how a reference is started."""
        return EngineRecipe(tier=tier, folder=self.checkpoints[tier].path)

    def candidate_recipe(self, case: Case) -> EngineRecipe:
        """Make what a candidate serves, and return how it is started."""
        folder = self.checkpoints[case.tier].path
        if case.twin:
            folder = self._twin(folder, case.twin)
        if case.changes:
            changes = "-".join(change.__name__ for change in case.changes)
            folder = changed_checkpoint(folder, changes, case.changes)
        return EngineRecipe(
            tier=case.tier,
            folder=folder,
            fault=case.fault,
            arguments=case.arguments,
            environment=case.environment,
        )

    def _twin(self, folder: Path, seed: int) -> Path:
        twin = self.folder / f"{folder.name}-twin-{seed}"
        if not twin.exists():
            script = ROOT / "scripts/make_twin.py"
            options = ["--keep-manifest", "--seed", str(seed)]
            subprocess.run(
                [sys.executable, script, folder, twin, *options],
                check=True,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        return twin

    def run(
        self, cases: Sequence[Case], reference_url: str, end: float
    ) -> Iterator[CaseResult]:
        """Start the candidate that cases share, compare it with the reference for each of them, and stop it.

        Args:
            cases: They differ in what happens beside the verification alone.
            reference_url: Of the engine that the candidate is compared with.
            end: No case begins after this monotonic time.

        Raises:
            ChildProcessError: The candidate does not start.
            TimeoutError: It does not start in time.
            ProbeError: It stops answering.
        """
        recipe = self.candidate_recipe(cases[0])
        log = self.folder / "candidate.log"
        limit_s = cases[0].start_limit_s
        with serving(recipe, self.python, log, limit_s=limit_s) as url:
            for case in cases:
                if time.monotonic() < end:
                    verification = asyncio.run(self._verify(case, reference_url, url))
                    yield self._result(case, verification)

    async def _verify(
        self, case: Case, reference_url: str, candidate_url: str
    ) -> Verification:
        async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
            reference = RecordedEngine(
                await ComparedEngine.connect(
                    client, reference_url, "", name=case.reference
                ),
                self.recording_path(case.reference),
                is_quick=self.is_quick,
            )
            candidate = RecordedEngine(
                await ComparedEngine.connect(
                    client, candidate_url, "", name="candidate"
                ),
                None,
                is_quick=self.is_quick,
            )
            plan = VerificationPlan(
                tasks=(), answers=AnswersOptions(), thinking=ThinkingWish()
            )
            async with load_on(client, candidate_url, active=case.is_under_load):
                return await Verifier(reference, candidate, plan, Silent()).run()

    def _result(self, case: Case, verification: Verification) -> CaseResult:
        stages: dict[str, SameModelFinding | LikelihoodFinding | None] = {
            "same model": verification.same_model,
            "likelihood": verification.likelihood,
        }
        stage = ""
        sentence = ""
        for name, finding in stages.items():
            if finding is None:
                continue
            if finding.verdict is Verdict.WORSE and not stage:
                stage = name
            if stage in {"", name}:
                sentence = stage_sentence(finding)
        return CaseResult(
            case=case.title,
            is_sound=case.is_sound,
            is_quick=self.is_quick,
            stage=stage,
            sentence=sentence,
            seconds=round(verification.took_s, 1),
            largest_gap=largest_gap(verification.likelihood),
            same_model=verification.same_model,
            likelihood=verification.likelihood,
        )


@asynccontextmanager
async def load_on(
    client: httpx.AsyncClient, url: str, *, active: bool
) -> AsyncIterator[None]:
    """Ask an engine for chats, several at once, until the block ends."""

    async def ask(number: int) -> None:
        while True:
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": f"Tell me story {number}."}],
                "max_tokens": CALL_TOKENS,
            }
            answer = await client.post(f"{url}/v1/chat/completions", json=body)
            answer.raise_for_status()
            number += CALLS_BESIDE

    if not active:
        yield
        return
    asking = [asyncio.create_task(ask(number)) for number in range(CALLS_BESIDE)]
    try:
        yield
    finally:
        for task in asking:
            task.cancel()
        for task in asking:
            with suppress(asyncio.CancelledError):
                await task


def largest_gap(finding: LikelihoodFinding | None) -> float | None:
    """Return the largest gap of any kind of text or range of positions."""
    if finding is None:
        return None
    gaps = [gap.gap for gap in (*finding.by_kind, *finding.by_position)]
    return round(max(gaps), 3) if gaps else None


RESULT_LIST = TypeAdapter(list[CaseResult])


def read_results() -> list[CaseResult]:
    """Return what earlier runs have found."""
    if not JSON_FILE.exists():
        return []
    return RESULT_LIST.validate_json(JSON_FILE.read_bytes())


def write_results(results: list[CaseResult]) -> None:
    """Write all results, and their table."""
    JSON_FILE.write_bytes(RESULT_LIST.dump_json(results, indent=1) + b"\n")
    TABLE_FILE.write_text("".join(table(results)), "utf-8")


def table(results: list[CaseResult]) -> Iterator[str]:
    """Yield the lines of the table."""
    processor = next(
        line.partition(": ")[2]
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        if line.startswith("model name")
    )
    yield "$ .venv/bin/python benchmarks/verify_faults.py   # several runs, some with --quick\n"
    yield f"{datetime.now(UTC):%Y-%m-%d}, {processor}, {platform.machine()}; other work on the same two cores\n"
    yield "Seconds are of the stages, without the engines' start and the reference's own texts.\n"
    faulty = [result for result in results if not result.is_sound]
    sound = [result for result in results if result.is_sound]
    found = sum(not result.is_wrong for result in faulty)
    yield f"\nFaults: {found} of {len(faulty)} found\n"
    yield f"{'candidate':66}{'texts':8}{'found in':12}{'seconds':>8}  what was said\n"
    for result in faulty:
        stage = result.stage or "NOT FOUND"
        yield f"{result.case:66}{result.texts:8}{stage:12}{result.seconds:8.0f}"
        yield f"  {result.sentence}\n"
    alarms = sum(result.is_wrong for result in sound)
    yield f"\nSound pairs: {alarms} false alarms in {len(sound)} runs\n"
    yield f"{'candidate':66}{'texts':8}{'alarm':12}{'seconds':>8}{'largest gap':>13}\n"
    for result in sound:
        yield f"{result.case:66}{result.texts:8}{result.stage or 'none':12}{result.seconds:8.0f}"
        yield f"{result.largest_gap or 0:13.3f}  {result.sentence if result.stage else ''}".rstrip()
        yield "\n"


def missing(
    cases: list[Case], results: list[CaseResult], *, is_quick: bool
) -> list[Case]:
    """Return the cases that have no result yet: none of this form, and none of the first stage alone."""
    done = {
        result.case
        for result in results
        if result.is_quick == is_quick or result.likelihood is None
    }
    return [case for case in cases if case.title not in done]


def run_cases(bench: Bench, cases: list[Case], end: float) -> None:
    """Run cases one after another until none is left or the time is over; a reference runs as long as it is needed."""
    for reference, of_reference in groupby(cases, lambda case: case.reference):
        log = bench.folder / "reference.log"
        recipe = bench.reference_recipe(reference)
        with serving(recipe, bench.python, log) as url:
            for _, sharing in groupby(of_reference, bench.candidate_recipe):
                if time.monotonic() > end:
                    return
                run_candidate(bench, list(sharing), url, end)


def run_candidate(
    bench: Bench, cases: list[Case], reference_url: str, end: float
) -> None:
    """Run the cases of one candidate, and write each result as it comes."""
    try:
        for result in bench.run(cases, reference_url, end):
            write_results([*read_results(), result])
            verdict = "WRONG" if result.is_wrong else "right"
            found = result.stage or "no alarm"
            note(
                f"{result.case}: {verdict}, {found}, {result.seconds:.0f} s, {result.sentence}"
            )
    except (ChildProcessError, TimeoutError, ProbeError) as error:
        note(f"{cases[0].title}: {error}")


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, default=600.0, help="begin no case after so many"
    )
    parser.add_argument("--only", default="", help="cases whose title contains this")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--faults", action="store_true", help="faults alone")
    group.add_argument("--sound", action="store_true", help="sound pairs alone")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="compare by the texts of the check before traffic",
    )
    args = parser.parse_args()
    end = time.monotonic() + args.minutes * 60
    settings = load_settings(None, {})
    checkpoints = find(prepare_options(settings))
    if checkpoints is None:
        raise SystemExit("the checkpoints are not made yet: run 'make checkpoints'")
    by_tier = {checkpoint.tier: checkpoint for checkpoint in checkpoints}
    bench = Bench(by_tier, settings.engine.python, is_quick=args.quick)
    cases = [] if args.sound else [*fault_cases()]
    if not args.faults:
        cases += sound_cases()
    chosen = [case for case in cases if args.only in case.title]
    left = missing(chosen, read_results(), is_quick=args.quick)
    if not left:
        note("nothing is left to run")
    run_cases(bench, left, end)


if __name__ == "__main__":
    main()
