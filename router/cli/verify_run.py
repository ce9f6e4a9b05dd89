"""What ``qarr verify`` does: connect to the engines, verify, and write what was found where it was asked for."""

from __future__ import annotations

import json
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from router.cli.common import err
from router.cli.verify_targets import (
    RouterAddress,
    Target,
    TargetError,
    TargetKind,
    client_for,
    connect,
    parse_target,
)
from router.cli.verify_view import (
    ProgressView,
    as_json,
    engine_line,
    findings_console,
    last_line,
    progress_for,
    report,
    stage_line,
)
from router.profiling.run_code import passes
from router.profiling.scaled_context import scaled_tasks
from router.profiling.tasks import SUITE, TASKS, Task, read_tasks
from router.verification.answers import AnswersOptions
from router.verification.findings import Verification
from router.verification.participants import LiveEngine, Reference, ThinkingWish
from router.verification.recording import record
from router.verification.report import write_report
from router.verification.saved import (
    SavedReference,
    read_reference,
    write_reference,
)
from router.verification.task_order import order_by_cost, order_by_digest
from router.verification.verification import (
    SAME_ENGINE_NOTE,
    VerificationPlan,
    Verifier,
    is_same_engine,
)
from router.verification.wording import Stage, StageFinding, count_words

MINUTE_S = 60.0
REFERENCE_KEY = "QARR_REFERENCE_KEY"
CANDIDATE_KEY = "QARR_CANDIDATE_KEY"
# What each stage does, said when it begins.
STAGE_WORK = {
    Stage.SAME_MODEL: "asking both engines what they serve",
    Stage.LIKELIHOOD: "each engine writes texts and scores the other's",
    Stage.ANSWERS: "both engines answer tasks",
    Stage.SPEED: "timing both engines",
    Stage.RECORDING: "recording the reference",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRequest:
    """What the command line asks for.

    Attributes:
        reference: What the candidate is compared with, as it was typed.
        candidate: What is verified; None: the reference is only saved.
        reference_model: The reference's model for requests; empty: its only one.
        candidate_model: The candidate's model for requests; empty: its only one.
        router: Where tiers are asked for.
        tasks_path: File or folder of the tasks.
        tolerated_of_100: So many lost answers still count as the same.
        confidence_percent: How sure a verdict about answers has to be.
        max_tasks: Ask at most so many tasks; 0: compare no answers; None: ask all, if need be.
        minutes: Compare answers for so long at most, and save some for so long at most; None: until there is a verdict, or
            all are saved.
        parallel: Tasks at once.
        runs_code: Run programs that a model writes, in a sandbox, for tasks that need it.
        thinking: Whether and how long models are asked to think.
        goes_on_after_fault: Run all stages.
        measures_speed: Compare speeds, too.
        is_quick: Compare likelihood by few texts.
        is_json: Print findings as JSON on standard output.
        report_path: Where the page is written; None: nowhere.
        save_path: Where the reference is saved; None: nowhere.
    """

    reference: str
    candidate: str | None
    reference_model: str
    candidate_model: str
    router: RouterAddress
    tasks_path: Path
    tolerated_of_100: float
    confidence_percent: float
    max_tasks: int | None
    minutes: float | None
    parallel: int
    runs_code: bool
    thinking: ThinkingWish
    goes_on_after_fault: bool
    measures_speed: bool
    is_quick: bool
    is_json: bool
    report_path: Path | None
    save_path: Path | None


async def run_verification(request: VerifyRequest) -> Verification | None:
    """Verify a candidate, or only save the reference; None: there was no candidate.

    Raises:
        TargetError: An option names nothing that can be verified, or does not go with another.
        SavedReferenceError: The saved reference cannot be used, or none can be written.
        TierError: An engine does not answer as vLLM does; nothing answers at all.
        ProfileError: The tasks cannot be read.
        SettingsError: The settings, which say where the router is, are not valid.
    """
    reference_target = parse_target(
        "--reference", request.reference, request.reference_model, REFERENCE_KEY
    )
    candidate_target = _candidate_target(request)
    _check_options(request, reference_target)
    tasks = _read_tasks(request)
    console = findings_console(as_json=request.is_json)
    progress = progress_for(err)
    listener = _Narrator(progress, console)
    async with AsyncExitStack() as cleanup:
        cleanup.callback(progress.end)
        reference = await _find_reference(reference_target, request, cleanup)
        console.print(engine_line("reference", reference.identity))
        verification = None
        if candidate_target is not None:
            candidate = await _find_engine(candidate_target, request, cleanup)
            console.print(engine_line("candidate", candidate.identity))
            if is_same_engine(reference, candidate):
                err.print(f"note: {SAME_ENGINE_NOTE}", style="yellow")
            console.print()
            tasks += _long_tasks(request, reference, candidate)
            plan = _plan(request, reference, tasks)
            verification = await Verifier(reference, candidate, plan, listener).run()
            _show(verification, request, console)
        else:
            tasks += _long_tasks(request, reference)
        if request.save_path is not None:
            assert isinstance(reference, LiveEngine)
            await _save(reference, tasks, request, listener)
    return verification


def _candidate_target(request: VerifyRequest) -> Target | None:
    """Return what is verified; None: nothing is.

    Raises:
        TargetError: It is no engine.
    """
    if request.candidate is None:
        return None
    target = parse_target(
        "--candidate", request.candidate, request.candidate_model, CANDIDATE_KEY
    )
    if target.kind is TargetKind.FILE:
        raise TargetError(
            f"--candidate {target.text} is a file: only a reference can be saved; give a URL or a tier"
        )
    return target


def _check_options(request: VerifyRequest, reference: Target) -> None:
    """Raise ``TargetError`` if options do not go together, before any work is done."""
    is_saved = reference.kind is TargetKind.FILE
    if request.candidate is None and request.save_path is None:
        raise TargetError(
            "there is nothing to compare: name the engine to verify with --candidate, or keep the reference for later with "
            "--save FILE.json"
        )
    if request.save_path is not None and is_saved:
        raise TargetError(
            "--save needs a reference that runs, and --reference is a file already: leave --save out"
        )
    if request.measures_speed and is_saved:
        raise TargetError(
            "--speed needs a reference that runs, and --reference is a file: leave --speed out"
        )
    _check_folder("--report", request.report_path)
    _check_folder("--save", request.save_path)


def _check_folder(option: str, path: Path | None) -> None:
    """Raise ``TargetError`` if a file cannot be written, before minutes are spent on its contents."""
    if path is None:
        return
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise TargetError(
            f"{option} {path} cannot be written: give a file in a folder that exists and that you may write to"
        )


def _read_tasks(request: VerifyRequest) -> tuple[Task, ...]:
    """Return the tasks; none if answers are not compared."""
    if request.max_tasks == 0:
        return ()
    return read_tasks(request.tasks_path)


def _long_tasks(request: VerifyRequest, *engines: Reference) -> tuple[Task, ...]:
    """Return tasks as long as the context of all engines, which belong to the built-in suite."""
    if request.max_tasks == 0 or request.tasks_path != TASKS:
        return ()
    return scaled_tasks(min(engine.identity.max_model_len for engine in engines))


async def _find_reference(
    target: Target, request: VerifyRequest, cleanup: AsyncExitStack
) -> Reference:
    if target.kind is TargetKind.FILE:
        saved = read_reference(Path(target.text))
        return saved.in_form(is_quick=request.is_quick)
    return await _find_engine(target, request, cleanup)


async def _find_engine(
    target: Target, request: VerifyRequest, cleanup: AsyncExitStack
) -> LiveEngine:
    """Connect to an engine, or to a tier through the running router."""
    client = await cleanup.enter_async_context(client_for(target, request.router))
    return LiveEngine(await connect(target, client), is_quick=request.is_quick)


def _plan(
    request: VerifyRequest, reference: Reference, tasks: tuple[Task, ...]
) -> VerificationPlan:
    known_tasks = tasks
    if isinstance(reference, SavedReference):
        reference.check_thinking(*request.thinking)
        known_tasks = reference.knows(tasks)
    return VerificationPlan(
        tasks=known_tasks,
        unsaved_tasks=len(tasks) - len(known_tasks),
        answers=_answers_options(request),
        thinking=request.thinking,
        goes_on_after_fault=request.goes_on_after_fault,
        measures_speed=request.measures_speed,
        is_quick=request.is_quick,
    )


def _answers_options(request: VerifyRequest) -> AnswersOptions:
    return AnswersOptions(
        tolerated=request.tolerated_of_100 / 100,
        confidence=request.confidence_percent / 100,
        parallel=request.parallel,
        max_tasks=request.max_tasks or None,
        time_limit_s=_time_limit_s(request),
        run_code=passes if request.runs_code else None,
    )


def _time_limit_s(request: VerifyRequest) -> float | None:
    """Return how long answers are compared or saved at most, in seconds; None: there is no limit."""
    if request.minutes is None:
        return None
    return request.minutes * MINUTE_S


class _Narrator:
    """Shows the progress of each stage, and its finding once it is known."""

    def __init__(self, progress: ProgressView, console: Console) -> None:
        self._progress = progress
        self._console = console

    def begin(self, stage: Stage) -> None:
        self._progress.begin(stage, STAGE_WORK[stage])

    def advance(
        self,
        done: int,
        total: int | None,
        detail: str,
        remaining_s: float | None = None,
    ) -> None:
        self._progress.advance(done, total, detail, remaining_s)

    def finish(self, stage: Stage, finding: StageFinding | None) -> None:
        self._progress.end()
        if finding is not None:
            self._console.print(stage_line(stage, finding))


def _show(verification: Verification, request: VerifyRequest, console: Console) -> None:
    """Print the findings, and write the page if it was asked for."""
    for part in report(verification):
        console.print(part)
    console.print()
    # one line for whoever searches a file
    console.print(last_line(verification), soft_wrap=not console.is_terminal)
    if request.is_json:
        typer.echo(json.dumps(as_json(verification), ensure_ascii=False, indent=2))
    if request.report_path is not None:
        request.report_path.write_text(write_report(verification), "utf-8")
        err.print(f"page: {request.report_path}", markup=False)


async def _save(
    reference: LiveEngine,
    tasks: tuple[Task, ...],
    request: VerifyRequest,
    listener: _Narrator,
) -> None:
    """Record what the verification has not asked the reference, and write all of it."""
    assert request.save_path is not None
    # Verifications ask these.
    chosen = order_by_digest(tasks)[: request.max_tasks]
    if request.minutes is not None:
        chosen = order_by_cost(chosen)
    await record(
        reference,
        chosen,
        request.thinking,
        listener,
        parallel=request.parallel,
        time_limit_s=_time_limit_s(request),
    )
    tasks_name = SUITE if request.tasks_path == TASKS else request.tasks_path.name
    saved = reference.as_saved(tasks_name)
    write_reference(request.save_path, saved)
    answers = count_words(len(saved.answers), "answer")
    err.print(f"saved: {request.save_path} ({answers})", markup=False)
    missing = sum(task.digest not in saved.answers for task in chosen)
    if missing:
        err.print(
            f"The time was used up: {count_words(missing, 'task')} of {len(chosen):,} have no answer in it. "
            "Later verifications leave them out. Raise --minutes, or leave it out, to save all.",
            markup=False,
        )
