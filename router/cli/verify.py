"""``qarr verify``: whether an engine answers as well as another one."""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from router.cli.client import UrlOption
from router.cli.common import ConfigOption, JsonOption, err, plain
from router.cli.verify_run import VerifyRequest, run_verification
from router.cli.verify_targets import RouterAddress, TargetError
from router.policy.profiles import ProfileError
from router.profiling.answering import ThinkingMode
from router.profiling.tasks import TASKS
from router.section import SettingsError
from router.verification.participants import ThinkingWish
from router.verification.saved import SavedReferenceError
from tiers.errors import TierError
from tiers.verification.findings import Verdict

# The base class of all of typer's usage errors, which it does not export.
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
NOT_RUN = 3  # the exit status of a verification that could not run
INTERRUPTED = 130  # as shells say after Ctrl-C
EXIT_STATUS = {Verdict.SAME: 0, Verdict.WORSE: 1, Verdict.CANNOT_TELL: 2}
EXPECTED_ERRORS = (
    TargetError,
    SavedReferenceError,
    ProfileError,
    SettingsError,
    TierError,
    OSError,
)

ReferenceOption = Annotated[
    str,
    typer.Option(
        help="What is known to be good: a URL (http://HOST:PORT), a tier of the running router such as precise, or a file "
        "that --save has written.",
        metavar="URL|TIER|FILE",
    ),
]
CandidateOption = Annotated[
    str | None,
    typer.Option(help="What is to be verified: a URL or a tier.", metavar="URL|TIER"),
]
ReferenceModelOption = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="The reference's model, if its URL serves several."
    ),
]
CandidateModelOption = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="The candidate's model, if its URL serves several."
    ),
]
TolerateOption = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=99.0,
        metavar="N",
        help="So many lost answers of 100 still count as the same.",
    ),
]
ConfidenceOption = Annotated[
    float,
    typer.Option(
        min=50.0,
        max=99.99,
        metavar="PERCENT",
        help="How sure a verdict about answers has to be.",
    ),
]
TasksOption = Annotated[
    Path,
    typer.Option(
        help="Tasks with checks, as JSON lines (docs/routing.md); by default a built-in suite.",
        show_default=False,
        metavar="FILE",
    ),
]
MaxTasksOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="Ask at most so many tasks; 0: compare no answers. By default all, if need be.",
    ),
]
MinutesOption = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        metavar="N",
        help="Compare or save answers for so many minutes at most, short ones first; other stages take time of their own. "
        "By default until there is a verdict, or all are saved.",
    ),
]
ParallelOption = Annotated[
    int, typer.Option(min=1, max=256, metavar="N", help="Tasks at once.")
]
RunCodeOption = Annotated[
    bool,
    typer.Option(
        "--run-code",
        help="Run code that the models write, in a sandbox, for tasks that need it.",
    ),
]
ThinkingOption = Annotated[
    ThinkingMode,
    typer.Option(
        help="Ask models that can do both to think, or not to; by default requests leave it to the model."
    ),
]
ThinkTokensOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="Tokens for the thoughts of a model that thinks; by default as many as the context leaves room for.",
    ),
]
SpeedOption = Annotated[
    bool, typer.Option("--speed", help="Measure the speed of both at three loads, too.")
]
QuickOption = Annotated[
    bool,
    typer.Option(
        "--quick",
        help="Compare likelihood by seven short texts instead of twenty; what goes wrong late in an answer is not found. "
        "Tasks are asked all the same: --max-tasks 0 leaves them out.",
    ),
]
AllOption = Annotated[
    bool,
    typer.Option(
        "--all", help="Run all stages, even after a fault that makes later ones moot."
    ),
]
ReportOption = Annotated[
    Path | None,
    typer.Option(help="Write the findings as one HTML page.", metavar="FILE.html"),
]
SaveOption = Annotated[
    Path | None,
    typer.Option(
        help="Keep the reference's answers, so that later candidates need no reference running.",
        metavar="FILE.json",
    ),
]


class VerifyCommand(TyperCommand):
    """A command whose usage errors have the exit status of "could not run": 2 is a verdict."""

    def make_context(self, *args: Any, **more: Any) -> Any:
        try:
            return super().make_context(*args, **more)
        except USAGE_ERROR as error:
            error.exit_code = NOT_RUN
            raise


COMMAND_CLASS = VerifyCommand


def verify(
    reference: ReferenceOption,
    candidate: CandidateOption = None,
    reference_model: ReferenceModelOption = "",
    candidate_model: CandidateModelOption = "",
    tolerate: TolerateOption = 2.0,
    confidence: ConfidenceOption = 95.0,
    tasks: TasksOption = TASKS,
    max_tasks: MaxTasksOption = None,
    minutes: MinutesOption = None,
    parallel: ParallelOption = 8,
    run_code: RunCodeOption = False,
    thinking: ThinkingOption = ThinkingMode.DEFAULT,
    think_tokens: ThinkTokensOption = None,
    speed: SpeedOption = False,
    quick: QuickOption = False,
    run_all: AllOption = False,
    as_json: JsonOption = False,
    report: ReportOption = None,
    save: SaveOption = None,
    url: UrlOption = "",
    config: ConfigOption = None,
) -> None:
    """Tell whether an engine answers as well as another one: quantized, upgraded or moved.

    Any two vLLM servers of one model will do; no router is needed.

    It compares what they serve, how likely each finds the other's words, and their answers to tasks.

    Keys, if servers need them: QARR_REFERENCE_KEY and QARR_CANDIDATE_KEY; QARR_KEY for tiers.

    Exits with 0: the same, 1: worse, 2: cannot tell, 3: could not run.
    """
    request = VerifyRequest(
        reference=reference,
        reference_model=reference_model,
        candidate=candidate,
        candidate_model=candidate_model,
        router=RouterAddress(url, config),
        tasks_path=tasks,
        tolerated_of_100=tolerate,
        confidence_percent=confidence,
        max_tasks=max_tasks,
        minutes=minutes,
        parallel=parallel,
        runs_code=run_code,
        thinking=ThinkingWish(thinking, think_tokens),
        goes_on_after_fault=run_all,
        measures_speed=speed,
        is_quick=quick,
        is_json=as_json,
        report_path=report,
        save_path=save,
    )
    raise typer.Exit(_exit_status(request))


def _exit_status(request: VerifyRequest) -> int:
    """Verify, and return the exit status. No error leaves as a traceback with status 1, which means "worse"."""
    try:
        verification = asyncio.run(run_verification(request))
    except KeyboardInterrupt:
        err.print("stopped: there is no verdict, and nothing was written")
        return INTERRUPTED
    except EXPECTED_ERRORS as error:
        err.print(f"[bold red]could not run:[/] {plain(str(error))}")
        return NOT_RUN
    except Exception:  # noqa: BLE001  a traceback would end with status 1
        traceback.print_exc()
        err.print(
            "[bold red]could not run:[/] this is a fault of QARR; please report it"
        )
        return NOT_RUN
    if verification is None:
        return 0
    return EXIT_STATUS[verification.verdict]
