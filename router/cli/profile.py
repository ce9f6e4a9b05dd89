"""``qarr profile``: measure the loss and the speed of a running fleet's tiers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
import typer
from rich.table import Table

from router.cli.client import TIMEOUT_S, UrlOption, find_router, why_no_router
from router.cli.common import ConfigOption, Progress, print_table, tiers_option
from router.policy.profiles import (
    REFERENCE,
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

T = TypeVar("T")
TASKS_HELP = (
    "Tasks with checks, as JSON lines (docs/routing.md); by default a built-in suite."
)
PARALLEL_HELP = "Tasks at once; by default as many as the engines compute at once."
ADAPTER_HELP = (
    "Measure a LoRA adapter, on the tiers that offer it, instead of the model."
)
RUN_HELP = "Run code that the model writes, in a sandbox, for tasks that need it."
LM_EVAL_HELP = "Samples that lm-evaluation-harness logged, of one tier or of all (repeat for more folders)."
CLASSES_HELP = "Classes of further harness tasks by pattern, JSON or TOML."
TIER_HELP = "Only this tier (repeat for more); by default all that are ready."
profile_app = typer.Typer(
    help="Measure the loss and the speed of a running fleet's tiers.",
    no_args_is_help=True,
)


@profile_app.command("quality")
def profile_quality(
    url: UrlOption = "",
    tasks: Annotated[Path, typer.Option(help=TASKS_HELP, show_default=False)] = TASKS,
    parallel: Annotated[
        int | None, typer.Option(min=1, metavar="N", help=PARALLEL_HELP)
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(metavar="NAME", help=ADAPTER_HELP)
    ] = None,
    run_code: Annotated[bool, typer.Option("--run-code", help=RUN_HELP)] = False,
    config: ConfigOption = None,
) -> None:
    """Measure how many answers of each kind each precision gets wrong that the highest one gets right.

    It waits while there are other requests, and continues where it stopped. If the router needs a key, set QARR_KEY.
    """
    folder = load_settings(config).policy.profiles
    log = Progress()
    plan = QualityPlan(
        tasks=read_tasks(tasks),
        name=SUITE if tasks == TASKS else tasks.name,
        journal=folder / JOURNAL,
        parallel=parallel,
        adapter=adapter,
        run_code=passes if run_code else None,
    )
    if run_code:
        log(
            "code that the model writes is run in a sandbox: no network, no files, 2 s and 512 MiB each"
        )

    def progress(step: str, done: int, total: int) -> None:
        log(f"{done} of {total}: {step}")

    with only_one(folder):
        profile = _connected(
            url, config, lambda client: measure_quality(client, plan, progress)
        )
        path = keep_quality(folder, profile)
    _show(profile)
    log(str(path))


@profile_app.command("import")
def profile_import(
    lm_eval: Annotated[
        list[str], typer.Option(metavar="[TIER=]DIR", help=LM_EVAL_HELP)
    ],
    url: UrlOption = "",
    classes: Annotated[
        Path | None, typer.Option(help=CLASSES_HELP, show_default=False)
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Make the loss profile of runs of lm-evaluation-harness, one for each tier, instead of measuring it.

    docs/routing.md has the harness's commands. If the router needs a key, set QARR_KEY.
    """
    folder = load_settings(config).policy.profiles
    log = Progress()
    known = {**(read_classes(classes) if classes else {}), **read_classes(CLASSES)}
    runs = [_tier_and_folder(text) for text in lm_eval]
    with only_one(folder):
        imported = import_runs(runs, known, _connected(url, config, RouterClient.fleet))
        path = keep_quality(folder, imported.profile)
    _show(imported.profile)
    for tier, samples in imported.unpaired.items():
        if samples:
            log(
                f"{samples} samples of {tier} left out: {REFERENCE} has none of the same prompt"
            )
    log(str(path))


@profile_app.command("latency")
def profile_latency(
    url: UrlOption = "",
    step: Annotated[
        float,
        typer.Option(
            min=0.5, metavar="SECONDS", help="How long one step may take, about."
        ),
    ] = 8.0,
    tier: Annotated[list[TierName] | None, tiers_option(TIER_HELP)] = None,
    config: ConfigOption = None,
) -> None:
    """Measure how fast each tier is, alone and while the others work: TTFT by prompt length, TPOT by batch.

    It waits while there are other requests, and repeats a step during which one arrived. If the router needs a key, set
    QARR_KEY.
    """
    folder = load_settings(config).policy.profiles
    log = Progress()
    plan = LatencyPlan(step_s=step, tiers=tuple(tier or ()))
    with only_one(folder):
        found = _connected(
            url,
            config,
            lambda client: measure_latency(client, plan, lambda what, *_: log(what)),
        )
        path = keep_latency(folder, found)
    _show_latency(load_latency(path))
    log(str(path))


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


def _connected(
    url: str,
    config: Path | None,
    work: Callable[[RouterClient], Coroutine[Any, Any, T]],
) -> T:
    """Return what work with a router gives, which does not measure itself at the moment."""
    url, verify = find_router(url, config)

    async def run() -> T:
        async with RouterClient(
            url, os.environ.get("QARR_KEY", ""), verify=verify
        ) as client:
            try:
                measuring = (await client.fleet()).measuring
            except NoRouterError as error:
                with httpx.Client(
                    base_url=url, timeout=TIMEOUT_S, trust_env=False, verify=verify
                ) as engine:
                    raise NoRouterError(
                        why_no_router(url, engine.get, str(error))
                    ) from None
            if measuring is not None:
                raise ProfileError(
                    f"the router at {url} measures its {measuring} itself: wait until it is done ('qarr doctor' shows its "
                    f"progress), or start it with profile.auto = false"
                )
            return await work(client)

    return asyncio.run(run())


def _show_latency(profile: LatencyProfile) -> None:
    typer.echo(
        f"{profile.model} on {profile.machine}; {len(profile.samples)} requests. Times in milliseconds."
    )
    columns = (
        "TTFT",
        "fit off by %",
        "decode step",
        "fit off by %",
        "slower beside the others",
    )
    table = Table("tier", *columns, box=None)
    for fit in profile.fits:
        beyond = fit.step_ms_beyond_knee
        knee = f" + {beyond:.3g} x (batch - {fit.step_knee}) beyond" if beyond else ""
        table.add_row(
            fit.tier,
            f"{fit.ttft_base_ms:.1f} + {fit.prefill_ms_per_token:.3g} x prompt tokens + {fit.ttft_steps:.2g} x step",
            f"{fit.ttft_error.median * 100:.0f} (p95 {fit.ttft_error.p95 * 100:.0f})",
            f"{fit.step_base_ms:.1f} + {fit.step_ms_per_sequence:.3g} x batch{knee}",
            f"{fit.tpot_error.median * 100:.0f} (p95 {fit.tpot_error.p95 * 100:.0f})",
            f"x {1 + fit.contention:.1f}",
        )
    print_table(table)


def _show(profile: QualityProfile) -> None:
    typer.echo(
        f"{profile.model}, measured with {profile.tasks}. Of the answers that {REFERENCE} or the tier gets right: worse, "
        "better, net."
    )
    table = Table(
        "class",
        "complexity",
        "tier",
        f"{REFERENCE} right",
        "answers",
        "worse",
        "better",
        "net %",
        box=None,
    )
    for count in profile.counts:
        answers, worse, better = count.flips
        net = f"{100 * (worse - better) / answers:.1f}" if answers else "-"
        right = f"{count.right} of {count.asked}"
        kind = count.prompt_class.value, count.complexity.value
        table.add_row(
            *kind, count.tier, right, str(answers), str(worse), str(better), net
        )
    print_table(table)
    if not any(count.diagnosis for count in profile.counts):
        return
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
    for count in profile.counts:
        found = count.diagnosis
        if found is not None:
            figures = (
                f"{found.disagreement * 100:.1f}",
                f"{found.kl:.3f}",
                f"{found.regret:.3f}",
            )
            table.add_row(
                f"{count.prompt_class.value}, {count.complexity.value}",
                count.tier,
                str(found.tokens),
                *figures,
            )
    print_table(table)
