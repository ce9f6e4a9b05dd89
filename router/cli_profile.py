"""``qarr profile``: measure what the tiers of a running fleet are worth."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from router.profiling import Plan, measure, read_prompts
from router.quality import profile_name
from router.quality_report import render
from router.settings import load_settings

if TYPE_CHECKING:
    from router.quality import Interval, Loss, QualityProfile

profile_app = typer.Typer(help="Measure what the tiers of a running fleet are worth.", no_args_is_help=True)
PROMPTS = Path(__file__).with_name("profile_prompts.jsonl")
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="TOML settings file.", envvar="QARR_CONFIG", metavar="FILE")
]


@profile_app.command("quality")
def profile_quality(
    url: Annotated[str, typer.Option(help="The running router.")] = "http://127.0.0.1:8080",
    prompts: Annotated[
        Path,
        typer.Option(help='JSON lines with "text" and perhaps "class"; without, a built-in set.', show_default=False),
    ] = PROMPTS,
    per_class: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Prompts of each class; all without it.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Longest answer.")] = 32,
    parallel: Annotated[int, typer.Option(min=1, metavar="N", help="Prompts at a time.")] = 4,
    config: ConfigOption = None,
) -> None:
    """Measure the loss of each precision on each kind of prompt, against the highest one.

    Other requests go first: it waits while there are any. Interrupted, it goes on where it stopped. QARR_KEY holds the key
    where the router needs one.
    """
    folder = load_settings(config).policy.profiles
    folder.mkdir(parents=True, exist_ok=True)
    out = Console(stderr=True, highlight=False, soft_wrap=True)
    started, last = time.monotonic(), ""

    def progress(step: str, done: int, total: int) -> None:
        nonlocal last
        line = f"{done} of {total}: {step}"
        if line != last:
            out.print(f"{time.monotonic() - started:6.1f} s {line}")
            last = line

    plan = Plan(
        url=url.rstrip("/"),
        key=os.environ.get("QARR_KEY", ""),
        prompts=read_prompts(prompts, per_class),
        answer_tokens=tokens,
        parallel=parallel,
        journal=folder / "quality.journal.jsonl",
    )
    profile = asyncio.run(measure(plan, progress))
    path = folder / profile_name(profile.checkpoints)
    path.write_text(profile.model_dump_json(indent=2) + "\n")
    path.with_suffix(".html").write_text(render(profile), "utf-8")
    _show(profile)
    out.print(f"{time.monotonic() - started:6.1f} s {path}\n         {path.with_suffix('.html')}")


def _show(profile: QualityProfile) -> None:
    table = Table("class", "tier", "tokens", "not first choice %", "KL mean", "KL p95", "perplexity ratio", box=None)
    for loss in profile.losses:
        table.add_row(
            loss.prompt_class.value,
            loss.tier.value,
            str(loss.tokens),
            _shown(loss, loss.top1_disagreement, 100, 1),
            _shown(loss, loss.kl_mean),
            _shown(loss, loss.kl_p95),
            _shown(loss, loss.perplexity_ratio),
        )
    Console(highlight=False, width=None if Console().is_terminal else 140).print(table)


def _shown(loss: Loss, value: Interval, factor: float = 1, digits: int = 3) -> str:
    low, mean, high = (f"{x * factor:.{digits}f}" for x in (value.low, value.mean, value.high))
    return f"{mean} ({low} to {high})" if loss.certain else f"{mean} (too few prompts)"
