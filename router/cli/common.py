"""What several commands share: options, error output, and how times, tables and texts are shown."""

from __future__ import annotations

import sys
import time
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from tiers.spec import TierName

if TYPE_CHECKING:
    from collections.abc import Callable

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
        help='Your own prompts for AWQ: JSON lines with a "text" field.',
        metavar="FILE",
    ),
]
SHORTEST_ID = 6  # characters of a trace or request id that find it


def tiers_option(text: str) -> Any:
    return typer.Option("--tier", help=text, parser=TierName, metavar="TIER")


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with an option for each argument of its parameters ``options`` and ``router``, which it makes."""
    shown: list[Parameter] = []
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for each in signature(command, eval_str=True).parameters.values():
        if each.name in {"options", "router"}:
            parts = signature(each.annotation, eval_str=True).parameters
            groups[each.name] = each.annotation, list(parts)
            shown += parts.values()
        else:
            shown.append(each)

    @wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: make(**{part: given.pop(part) for part in parts})
            for name, (make, parts) in groups.items()
        }
        command(**made, **given)

    expanded = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in shown]
    run.__signature__ = Signature(expanded)  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {}
    return run


def fail(text: str) -> NoReturn:
    err.print(f"[bold red]error:[/] {plain(text)}")
    raise SystemExit(2)


def is_confirmed(question: str) -> bool:
    """Ask on the terminal; False: the answer is no, or nobody answers.

    Standard output is for what scripts read: typer's own question writes a space there.
    """
    err.print(plain(f"{question} [y/N]: "), end="")
    answer = sys.stdin.readline()
    if not answer:
        err.print()
    return answer.strip().lower() in {"y", "yes"}


def check_tier(tier: TierName, settings: Settings) -> None:
    if tier not in settings.tiers.names:
        raise typer.BadParameter(
            f"there is no tier {tier}: the settings have {', '.join(settings.tiers.names)}"
        )


def tier_settings(settings: Settings) -> list[Any]:
    return [settings.tiers.of(name) for name in settings.tiers.names]


def clock(started: float) -> str:
    return f"{time.monotonic() - started:6.1f} s"


class Progress:
    """Says lines on standard error, with the seconds since its start; a repeated line is left out."""

    def __init__(self) -> None:
        self._started, self._last = time.monotonic(), ""

    def __call__(self, line: str) -> None:
        if line != self._last:
            err.print(f"{clock(self._started)} {plain(line)}")
            self._last = line


def plain(text: str) -> str:
    return text.replace("[", "\\[")


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: 1 problem, 2 problems."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def output(piped_width: int) -> Console:
    return Console(
        highlight=False,
        markup=False,
        width=None if sys.stdout.isatty() else piped_width,
    )


def print_table(table: Table, piped_width: int = 140) -> None:
    output(piped_width).print(table)


def http_url(host: str, port: int, scheme: str = "http") -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
