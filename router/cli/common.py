"""What several commands share: options, how errors are told, and how times and texts are shown."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from tiers.spec import TierName

if TYPE_CHECKING:
    from router.settings import Settings

err = Console(stderr=True, highlight=False, soft_wrap=True)
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="TOML settings file.", envvar="QARR_CONFIG", metavar="FILE")
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="Hugging Face id, model folder, or the built-in default.", metavar="MODEL"),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option("--calibration", help='Your own prompts for AWQ: JSON lines with a "text" field.', metavar="FILE"),
]


def fail(text: str) -> NoReturn:
    """End the command with an error text."""
    err.print(f"[bold red]error:[/] {plain(text)}")
    raise SystemExit(2)


def tier_settings(settings: Settings) -> list[Any]:
    """Return the tiers' settings, by rising precision."""
    return [getattr(settings.tiers, name.value) for name in TierName]


def clock(started: float) -> str:
    """Return the time since a command began, for the head of a line."""
    return f"{time.monotonic() - started:6.1f} s"


def plain(text: str) -> str:
    """Keep rich from reading brackets as markup."""
    return text.replace("[", "\\[")
