"""``qarr profile``: measure the loss and the speed of a running fleet's tiers."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
import typer
from rich.table import Table

from router.cli.client import TIMEOUT_S, UrlOption, find_router, why_no_router
from router.cli.common import ConfigOption, Progress, print_table, tiers_option
from router.policy.not_measured import cut_sentence, limit_words
from router.policy.profiles import (
    REFERENCE,
    AnswerCount,
    Fit,
    FitError,
    LatencyProfile,
    ProfileError,
    QualityProfile,
    load_latency,
)
from router.profiling.lm_eval import CLASSES, HarnessRun, import_runs, read_classes
from router.profiling.measure_latency import LatencyPlan, measure_latency
from router.profiling.measure_quality import QualityPlan, measure_quality
from router.profiling.profile_files import JOURNAL, keep_latency, keep_quality, only_one
from router.profiling.router_client import NoRouterError, RouterClient
from router.profiling.run_code import passes
from router.profiling.tasks import SUITE, TASKS, read_tasks
from router.settings import load_settings
from tiers.spec import TierName
from tiers.verification.thinking import ThinkingMode

T = TypeVar("T")
profile_app = typer.Typer(
    help="Measure the loss and the speed of a running fleet's tiers.",
    no_args_is_help=True,
)
TasksOption = Annotated[
    Path,
    typer.Option(
        help="Tasks with checks, as JSON lines (docs/routing.md); by default a built-in suite.",
        show_default=False,
    ),
]
ParallelOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Tasks at once; by default as many as the engines compute at once.",
    ),
]
AdapterOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Measure a LoRA adapter, on the tiers that offer it, instead of the model.",
    ),
]
RunCodeOption = Annotated[
    bool,
    typer.Option(
        "--run-code",
        help="Run code that the model writes, in a sandbox, for tasks that need it.",
    ),
]
ThinkTokensOption = Annotated[
    int | None,
    typer.Option(
        "--think-tokens",
        min=0,
        metavar="N",
        help="Tokens for thoughts on top of each task's own limit; by default, for a model that thinks, half of the "
        "shortest context, and at most 8,192.",
        show_default=False,
    ),
]
OneModeOption = Annotated[
    bool,
    typer.Option(
        "--default-mode-only",
        help="Where requests can switch thinking on and off, measure only what the model does by default.",
    ),
]
LmEvalOption = Annotated[
    list[str],
    typer.Option(
        metavar="[TIER=]DIR",
        help="Samples that lm-evaluation-harness logged, of one tier or of all (repeat for more folders).",
    ),
]
ClassesOption = Annotated[
    Path | None,
    typer.Option(
        help="Classes of further harness tasks by pattern, JSON or TOML.",
        show_default=False,
    ),
]
StepOption = Annotated[
    float,
    typer.Option(min=0.5, metavar="SECONDS", help="How long one step may take, about."),
]
MeasuredTiersOption = Annotated[
    list[TierName] | None,
    tiers_option("Only this tier (repeat for more); by default all that are ready."),
]


@profile_app.command("quality")
def profile_quality(
    url: UrlOption = "",
    tasks: TasksOption = TASKS,
    parallel: ParallelOption = None,
    adapter: AdapterOption = None,
    run_code: RunCodeOption = False,
    think_tokens: ThinkTokensOption = None,
    default_mode_only: OneModeOption = False,
    config: ConfigOption = None,
) -> None:
    """Measure how many answers of each kind each precision gets wrong that the highest one gets right.

    Thinking on and off are measured apart where requests can switch it.

    An answer that is cut while the model thinks is not measured; a higher --think-tokens asks for it again.

    It waits while there are other requests, and continues where it stopped. If the router needs a key, set QARR_KEY.
    """
    profile_folder = load_settings(config).policy.profiles
    show_progress = Progress()
    suite_name = SUITE if tasks == TASKS else tasks.name
    run_tests = passes if run_code else None
    measurement_plan = QualityPlan(
        tasks=read_tasks(tasks),
        name=suite_name,
        journal=profile_folder / JOURNAL,
        parallel=parallel,
        adapter=adapter,
        run_code=run_tests,
        think_tokens=_think_tokens(think_tokens, config),
        has_both_modes=not default_mode_only,
        fills_context=tasks == TASKS,
    )
    if run_code:
        show_progress(
            "code that the model writes is run in a sandbox: no network, no files, 2 s and 512 MiB each"
        )

    def show_step(step: str, done: int, total: int) -> None:
        show_progress(f"{done} of {total}: {step}")

    with only_one(profile_folder):
        quality_profile = _with_router(
            url,
            config,
            lambda client: measure_quality(client, measurement_plan, show_step),
        )
        profile_path = keep_quality(profile_folder, quality_profile)
    _print_quality(quality_profile)
    show_progress(str(profile_path))


@profile_app.command("import")
def profile_import(
    lm_eval: LmEvalOption,
    url: UrlOption = "",
    classes: ClassesOption = None,
    config: ConfigOption = None,
) -> None:
    """Make the loss profile of runs of lm-evaluation-harness, one for each tier, instead of measuring it.

    docs/routing.md has the harness's commands. If the router needs a key, set QARR_KEY.
    """
    profile_folder = load_settings(config).policy.profiles
    show_progress = Progress()
    own_classes = read_classes(classes) if classes else {}
    # The built-in classes take precedence.
    known_classes = {**own_classes, **read_classes(CLASSES)}
    harness_runs = [_tier_and_folder(text) for text in lm_eval]
    with only_one(profile_folder):
        running_fleet = _with_router(url, config, RouterClient.fleet)
        imported = import_runs(harness_runs, known_classes, running_fleet)
        profile_path = keep_quality(profile_folder, imported.profile)
    _print_quality(imported.profile)
    for tier, samples in imported.unpaired.items():
        if samples:
            show_progress(
                f"{samples} samples of {tier} left out: {REFERENCE} has none of the same prompt"
            )
    show_progress(str(profile_path))


@profile_app.command("latency")
def profile_latency(
    url: UrlOption = "",
    step: StepOption = 8.0,
    tier: MeasuredTiersOption = None,
    config: ConfigOption = None,
) -> None:
    """Measure how fast each tier is, alone and while the others work: TTFT by prompt length, TPOT by batch.

    It waits while there are other requests, and repeats a step during which one arrived. If the router needs a key, set
    QARR_KEY.
    """
    profile_folder = load_settings(config).policy.profiles
    show_progress = Progress()
    measurement_plan = LatencyPlan(step_s=step, tiers=tuple(tier or ()))
    with only_one(profile_folder):
        latency_profile = _with_router(
            url,
            config,
            lambda client: measure_latency(
                client, measurement_plan, lambda step, *_: show_progress(step)
            ),
        )
        profile_path = keep_latency(profile_folder, latency_profile)
    _print_latency(load_latency(profile_path))
    show_progress(str(profile_path))


def _think_tokens(think_tokens: int | None, config: Path | None) -> int | None:
    """Return the limit of thoughts that was asked for, else that of the settings; None: by the context."""
    if think_tokens is not None:
        return think_tokens
    return load_settings(config).profile.think_tokens


def _tier_and_folder(text: str) -> HarnessRun:
    """Read ``[TIER=]DIR``; a folder's own name may hold an equals sign after a slash."""
    tier, equals, path = text.partition("=")
    if not equals or "/" in tier:
        return HarnessRun(None, Path(text))
    try:
        return HarnessRun(TierName(tier), Path(path))
    except ValueError:
        raise typer.BadParameter(
            f"{tier!r} is no tier's name", param_hint="--lm-eval"
        ) from None


def _with_router(
    url: str,
    config_path: Path | None,
    work: Callable[[RouterClient], Coroutine[Any, Any, T]],
) -> T:
    """Do work with a running router, and return its result.

    Raises:
        ProfileError: The router measures something itself at the moment.
    """
    router_url, verify = find_router(url, config_path)

    async def run() -> T:
        key = os.environ.get("QARR_KEY", "")
        async with RouterClient(router_url, key, verify=verify) as client:
            measuring = await _what_it_measures(client, router_url, verify=verify)
            if measuring is not None:
                raise ProfileError(
                    f"the router at {router_url} measures its {measuring} itself: wait until it is done ('qarr doctor' "
                    f"shows its progress), or start it with profile.auto = false"
                )
            return await work(client)

    return asyncio.run(run())


async def _what_it_measures(
    client: RouterClient, url: str, *, verify: ssl.SSLContext | bool
) -> str | None:
    """Return what a router measures itself at the moment; None: nothing."""
    try:
        fleet = await client.fleet()
    except NoRouterError as error:
        with httpx.Client(
            base_url=url, timeout=TIMEOUT_S, trust_env=False, verify=verify
        ) as engine:
            why = why_no_router(url, engine.get, unless_engine=str(error))
        raise NoRouterError(why) from None
    return fleet.measuring


def _print_latency(profile: LatencyProfile) -> None:
    typer.echo(
        f"{profile.model} on {profile.machine}; {len(profile.samples)} requests. Times in milliseconds."
    )
    table = Table(
        "tier",
        "TTFT",
        "fit off by %",
        "decode step",
        "fit off by %",
        "slower beside the others",
        box=None,
    )
    for fit in profile.fits:
        table.add_row(
            fit.tier,
            f"{fit.ttft_base_ms:.1f} + {fit.prefill_ms_per_token:.3g} x prompt tokens + {fit.ttft_steps:.2g} x step",
            _error_words(fit.ttft_error),
            _step_formula(fit),
            _error_words(fit.tpot_error),
            f"x {1 + fit.contention:.1f}",
        )
    print_table(table)


def _error_words(error: FitError) -> str:
    return f"{error.median * 100:.0f} (p95 {error.p95 * 100:.0f})"


def _step_formula(fit: Fit) -> str:
    """Return how long a decode step takes by the batch; beyond a knee each further sequence takes longer."""
    formula = f"{fit.step_base_ms:.1f} + {fit.step_ms_per_sequence:.3g} x batch"
    if not fit.step_ms_beyond_knee:
        return formula
    return (
        f"{formula} + {fit.step_ms_beyond_knee:.3g} x (batch - {fit.step_knee}) beyond"
    )


def _print_quality(profile: QualityProfile) -> None:
    typer.echo(
        f"{profile.model}, measured with {profile.tasks}. Of the answers that {REFERENCE} or the tier gets right: worse, "
        "better, net."
    )
    if profile.mode is not None:
        limit = limit_words(profile.think_tokens)
        suffix = f", with {limit}" if profile.mode is ThinkingMode.ON else ""
        typer.echo(f"Thinking {profile.mode}, as this model does by default{suffix}:")
    _print_counts(profile.counts)
    _print_cuts(profile.counts, profile.think_tokens)
    other = profile.other_mode
    if other is not None:
        typer.echo(
            f"\nThinking {other.mode}, if a request asks for that; decisions go by the table above:"
        )
        _print_counts(other.counts)
        _print_cuts(other.counts, other.think_tokens)
    diagnosed = [count for count in profile.counts if count.diagnosis]
    if diagnosed:
        _print_diagnoses(diagnosed)


def _print_cuts(counts: Sequence[AnswerCount], think_tokens: int) -> None:
    """Print how many answers were cut while thinking, and what to raise."""
    sentence = cut_sentence(counts, think_tokens)
    if sentence is not None:
        typer.echo(sentence)


def _print_counts(counts: Sequence[AnswerCount]) -> None:
    has_cuts = any(count.cut for count in counts)
    cut_columns = ("cut",) if has_cuts else ()
    table = Table(
        "class",
        "complexity",
        "tier",
        f"{REFERENCE} right",
        "answers",
        *cut_columns,
        "worse",
        "better",
        "net %",
        box=None,
    )
    for count in counts:
        cut_cells = (str(count.cut),) if has_cuts else ()
        answers, worse, better = count.flips
        table.add_row(
            count.prompt_class.value,
            count.complexity.value,
            count.tier,
            f"{count.right} of {count.asked}",
            str(answers),
            *cut_cells,
            str(worse),
            str(better),
            _net_percent(count),
        )
    print_table(table)


def _net_percent(count: AnswerCount) -> str:
    answers, worse, better = count.flips
    if answers:
        return f"{100 * (worse - better) / answers:.1f}"
    return "not measured" if count.is_unmeasured else "-"


def _print_diagnoses(counts: Sequence[AnswerCount]) -> None:
    """Print how much the tokens of tiers differ from the reference's."""
    typer.echo(
        "\nHow much tokens differ from the reference's (not whether answers get worse):"
    )
    table = Table(
        "class",
        "tier",
        "tokens",
        "not first choice %",
        "KL nats",
        "regret nats",
        box=None,
    )
    for count in counts:
        diagnosis = count.diagnosis
        assert diagnosis is not None
        table.add_row(
            f"{count.prompt_class.value}, {count.complexity.value}",
            count.tier,
            str(diagnosis.tokens),
            f"{diagnosis.disagreement * 100:.1f}",
            f"{diagnosis.kl:.3f}",
            f"{diagnosis.regret:.3f}",
        )
    print_table(table)
