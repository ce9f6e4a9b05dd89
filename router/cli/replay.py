"""``qarr replay``: recorded decisions made again, or simulated under another policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path  # noqa: TC003  typer reads it
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from router.cli.common import print_table
from router.policy.decision import PRIORITIES
from router.policy.loss_regression import in_use, regressions
from router.policy.profiles import load_latency, load_profile
from router.policy.replay import differing, read_recording, seen, summarise
from router.policy.simulation import Options, simulate
from router.policy.table import policy_table
from router.settings import load_settings
from tiers.spec import in_order

if TYPE_CHECKING:
    from router.policy.replay import Recording, Summary


def replay(
    log: Annotated[Path, typer.Argument(help="A decision log (telemetry.decision_log).", metavar="LOG.jsonl")],
    policy: Annotated[
        Path | None, typer.Option(help="TOML settings file with another policy section.", metavar="FILE")
    ] = None,
    quality: Annotated[Path | None, typer.Option(help="Another quality profile.", metavar="FILE")] = None,
    latency: Annotated[Path | None, typer.Option(help="Another latency profile.", metavar="FILE")] = None,
) -> None:
    """Make recorded decisions again, and run the recorded arrivals through another policy or profile.

    First every decision is made again from the log alone; one that differs is an error. With a policy or a profile, the
    recorded arrivals are simulated under it, and under the recorded policy for comparison.
    """
    recording = read_recording(log)
    others = differing(recording)
    total = len(recording.decisions)
    typer.echo(f"{total - len(others)} of {total} decisions come out as recorded")
    for record in others[:10]:
        typer.echo(f"  otherwise: {record.request_id}, recorded {record.tier or record.refusal}")
    if policy or quality or latency:
        _compare(recording, policy, quality, latency)
    if others:
        raise typer.Exit(1)


def _compare(recording: Recording, policy: Path | None, quality: Path | None, latency: Path | None) -> None:
    recorded = recording.tables[recording.decisions[-1].policy]
    table = recorded
    if policy is not None:
        table = replace(policy_table(load_settings(policy).policy), losses=recorded.losses, promoted=recorded.promoted)
        table = replace(table, prompt_losses=recorded.prompt_losses)
    if quality is not None:
        profile = load_profile(quality)
        losses = policy_table(load_settings(policy).policy, profile).losses
        table = replace(table, losses=losses, prompt_losses=in_use(regressions(profile)))
    settings = load_settings(policy)
    longest = {number: float(getattr(settings.admission.max_wait_s, name)) for name, number in PRIORITIES.items()}
    options = Options(settings.policy.budget_half_life_s, settings.admission.max_waiting, longest)
    speeds = {fit.tier: fit.model for fit in load_latency(latency).fits} if latency is not None else None
    _show(
        {
            "recorded, as seen": summarise(seen(recording)),
            "recorded, simulated": summarise(simulate(recording, options=options)),
            "other, simulated": summarise(simulate(recording, table, speeds, options)),
        }
    )


def _show(rows: dict[str, Summary]) -> None:
    columns = ("SLA met", "refused", "loss", "TTFT p50", "p95 ms", "TPOT p50", "p95 ms", "engine s")
    tiers = in_order(tier for summary in rows.values() for tier in summary.shares)
    table = Table("", *tiers, *columns, box=None)
    for name, summary in rows.items():
        table.add_row(
            name,
            *(f"{summary.shares.get(tier, 0):.0%}" for tier in tiers),
            f"{summary.met:.1%}",
            str(summary.refused),
            _number(summary.mean_loss, 3),
            _number(summary.ttft_p50),
            _number(summary.ttft_p95),
            _number(summary.tpot_p50, 1),
            _number(summary.tpot_p95, 1),
            _number(summary.engine_s, 1),
        )
    print_table(table)


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:.{digits}f}"
