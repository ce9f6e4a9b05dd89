"""What several commands share: options, error output, and how times, tables and texts are shown."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from tiers.spec import TierName

if TYPE_CHECKING:
    from rich.table import Table

    from router.settings import Settings

err = Console(stderr=True, highlight=False, soft_wrap=True)
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", help="TOML settings file.", envvar="QARR_CONFIG", metavar="FILE"
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Hugging Face id, model folder, or the built-in default.",
        metavar="MODEL",
    ),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        help='Your own prompts to calibrate on: JSON lines with a "text" field.',
        metavar="FILE",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SHORTEST_ID = 6  # the fewest characters by which a trace or request id is found


def tiers_option(help_text: str) -> Any:
    return typer.Option("--tier", help=help_text, parser=TierName, metavar="TIER")


def fail(text: str) -> NoReturn:
    """Print an error and end the command with status 2."""
    err.print(f"[bold red]error:[/] {plain(text)}")
    raise SystemExit(2)


def is_confirmed(question: str) -> bool:
    """Ask a question on the terminal. Return False also if nobody answers.

    Typer's own question is not used: it writes a space to standard output, which scripts read.
    """
    err.print(plain(f"{question} [y/N]: "), end="")
    answer = sys.stdin.readline()
    if not answer:
        err.print()
    return answer.strip().lower() in {"y", "yes"}


def check_tier(tier: TierName, settings: Settings) -> None:
    """Raise ``typer.BadParameter`` unless the settings have the tier."""
    if tier not in settings.tiers.names:
        raise typer.BadParameter(
            f"there is no tier {tier}: the settings have {', '.join(settings.tiers.names)}"
        )


def tier_settings(settings: Settings) -> list[Any]:
    """Return the settings of each tier, by rising precision."""
    return [settings.tiers.of(name) for name in settings.tiers.names]


def clock(started_at: float) -> str:
    """Return for people how long ago a moment of the monotonic clock is."""
    return f"{time.monotonic() - started_at:6.1f} s"


class Progress:
    """Prints lines on standard error, with the seconds since its start. A repeated line is left out."""

    def __init__(self) -> None:
        self._started_at = time.monotonic()
        self._last_line = ""

    def __call__(self, line: str) -> None:
        if line != self._last_line:
            err.print(f"{clock(self._started_at)} {plain(line)}")
            self._last_line = line


def plain(text: str) -> str:
    """Escape a text so that Rich prints its brackets instead of taking them for markup."""
    return text.replace("[", "\\[")


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 1 problem, 2 problems."""
    if count == 1:
        return f"{count} {noun}"
    return f"{count} {noun}s"


def printable(text: str) -> str:
    """Replace each control character by a space."""
    return "".join(map(_printable_character, text))


def _printable_character(character: str) -> str:
    if character.isprintable():
        return character
    return " "


def output(piped_width: int) -> Console:
    """Return a console for standard output, which has a width of its own where that is no terminal."""
    width = None if sys.stdout.isatty() else piped_width
    return Console(highlight=False, markup=False, width=width)


def print_table(table: Table, piped_width: int = 140) -> None:
    output(piped_width).print(table)


def http_url(host: str, port: int, scheme: str = "http") -> str:
    """Return the URL of a host and a port; an IPv6 address is put in brackets."""
    if ":" in host:
        return f"{scheme}://[{host}]:{port}"
    return f"{scheme}://{host}:{port}"
