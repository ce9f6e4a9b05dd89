"""``qarr profile``: measure the loss and the speed of a running fleet's tiers."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import asynccontextmanager
from pathlib import Path  # noqa: TC003  typer reads it
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from router.cli.client import URL, UrlOption, trusted
from router.cli.common import ConfigOption, clock, err, plain, print_table
from router.policy.profiles import ProfileError, load_latency
from router.profiling.client import connect
from router.profiling.measure_latency import LatencyPlan, measure_latency
from router.profiling.measure_quality import Plan, measure, read_prompts
from router.profiling.profile_files import ANSWER_TOKENS, JOURNAL, PROMPTS, keep_latency, keep_quality, only_one
from router.settings import load_settings
from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from router.policy.profiles import Fit, Interval, LatencyProfile, Loss, QualityProfile
    from router.profiling.client import RouterClient

profile_app = typer.Typer(help="Measure the loss and the speed of a running fleet's tiers.", no_args_is_help=True)


@profile_app.command("quality")
def profile_quality(
    url: UrlOption = URL,
    prompts: Annotated[
        Path,
        typer.Option(
            help='JSON lines with "text" and optionally "class"; by default a built-in set.', show_default=False
        ),
    ] = PROMPTS,
    per_class: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Prompts of each class; by default all.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Longest answer.")] = ANSWER_TOKENS,
    parallel: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Prompts at a time; by default as many as the engines compute at once."),
    ] = None,
    adapter: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Measure a LoRA adapter, on the tiers that offer it, instead of the model."),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Measure the loss of each precision on each kind of prompt, against the highest one.

    It waits while there are other requests, and continues where it stopped. If the router needs a key, set QARR_KEY.
    """
    folder = load_settings(config).policy.profiles
    log = _Log()
    plan = Plan(
        prompts=read_prompts(prompts, per_class),
        answer_tokens=tokens,
        parallel=parallel,
        journal=folder / JOURNAL,
        adapter=adapter,
    )

    async def measured() -> QualityProfile:
        async with _connected(url) as client:
            return await measure(client, plan, lambda step, done, total: log(f"{done} of {total}: {step}"))

    with only_one(folder):
        profile = asyncio.run(measured())
        path = keep_quality(folder, profile)
    _show(profile)
    log(f"{path}\n         {path.with_suffix('.html')}")


@profile_app.command("latency")
def profile_latency(
    url: UrlOption = URL,
    step: Annotated[float, typer.Option(min=0.5, metavar="SECONDS", help="About how long one step may take.")] = 8.0,
    tier: Annotated[
        list[TierName] | None,
        typer.Option(
            help="Only this tier (repeat for more); by default all that are ready.", parser=TierName, metavar="TIER"
        ),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Measure how fast each tier is, alone and while the others work: TTFT by prompt length, TPOT by batch.

    It waits while there are other requests, and repeats a step during which one arrived. If the router needs a key, set
    QARR_KEY.
    """
    folder = load_settings(config).policy.profiles
    log = _Log()
    plan = LatencyPlan(step_s=step, tiers=tuple(tier or ()))

    async def measured() -> LatencyProfile:
        async with _connected(url) as client:
            return await measure_latency(client, plan, lambda what, _done, _total: log(what))

    with only_one(folder):
        profile = asyncio.run(measured())
        path = keep_latency(folder, profile)
    _show_latency(load_latency(path))
    log(str(path))


class _Log:
    """Progress on standard error, with the seconds since the start; repeated lines are left out."""

    def __init__(self) -> None:
        self._started, self._last = time.monotonic(), ""

    def __call__(self, line: str) -> None:
        if line != self._last:
            err.print(f"{clock(self._started)} {plain(line)}")
            self._last = line


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[RouterClient]:
    """Open a client of a router that does not measure itself at the moment.

    Raises:
        ProfileError: The router measures itself.
    """
    async with connect(url.rstrip("/"), os.environ.get("QARR_KEY", ""), verify=trusted(url)) as client:
        measuring = (await client.fleet()).measuring
        if measuring is not None:
            raise ProfileError(
                f"the router at {url} measures its {measuring} itself: wait until it is done ('qarr doctor' shows its "
                f"progress), or start it with profile.auto = false"
            )
        yield client


def _show_latency(profile: LatencyProfile) -> None:
    typer.echo(f"{profile.model} on {profile.machine}; {len(profile.samples)} requests. Times in milliseconds.")
    columns = ("TTFT", "fit off by %", "decode step", "fit off by %", "slower beside the others")
    table = Table("tier", *columns, box=None)
    for fit in profile.fits:
        table.add_row(
            fit.tier,
            f"{fit.ttft_base_ms:.1f} + {fit.prefill_ms_per_token:.3g} x prompt tokens + {fit.ttft_steps:.2g} x step",
            f"{fit.ttft_error.median * 100:.0f} (p95 {fit.ttft_error.p95 * 100:.0f})",
            f"{fit.step_base_ms:.1f} + {fit.step_ms_per_sequence:.3g} x batch" + _knee(fit),
            f"{fit.tpot_error.median * 100:.0f} (p95 {fit.tpot_error.p95 * 100:.0f})",
            f"x {1 + fit.contention:.1f}",
        )
    print_table(table)


def _knee(fit: Fit) -> str:
    if not fit.step_ms_beyond_knee:
        return ""
    return f" + {fit.step_ms_beyond_knee:.3g} x (batch - {fit.step_knee}) beyond"


def _show(profile: QualityProfile) -> None:
    table = Table("class", "tier", "tokens", "not first choice %", "KL mean", "KL p95", "perplexity ratio", box=None)
    for loss in profile.losses:
        table.add_row(
            loss.prompt_class.value,
            loss.tier,
            str(loss.tokens),
            _shown(loss, loss.top1_disagreement, 100, 1),
            _shown(loss, loss.kl_mean),
            _shown(loss, loss.kl_p95),
            _shown(loss, loss.perplexity_ratio),
        )
    print_table(table)


def _shown(loss: Loss, value: Interval, factor: float = 1, digits: int = 3) -> str:
    low, mean, high = (f"{x * factor:.{digits}f}" for x in (value.low, value.mean, value.high))
    return f"{mean} ({low} to {high})" if loss.certain else f"{mean} (too few prompts)"
