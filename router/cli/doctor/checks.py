"""What ``qarr doctor`` finds: one value a check, and the order of the checks.

A check says what it found, and in one line what to do next. None of them changes anything, and none tells a secret.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from router.cli.doctor import files, machine, network
from router.cli.doctor.findings import Check, Finding, Question, ok, problem, warning
from router.settings import Settings, SettingsError, load_settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


def examine(config: Path | None, *, deep: bool, url: str | None, key: str) -> Iterator[Finding]:
    """Yield what every check finds, one after another.

    Args:
        config: The settings file.
        deep: Also read every weight file.
        url: Of a running router; None: where the settings say that one would be.
        key: For that router.
    """
    try:
        settings = load_settings(config)
    except SettingsError as error:
        yield problem(
            "settings",
            "settings",
            _without_value(error),
            "'qarr settings' lists every setting; most checks need them",
        )
        settings = Settings.model_construct()
        yield from _run(machine.WITHOUT_SETTINGS, Question(settings, deep=deep, url="", key=key))
        return
    yield ok("settings", "settings", f"valid{f', from {config}' if config else ''}")
    host = "127.0.0.1" if settings.server.host in {"0.0.0.0", "::"} else settings.server.host
    shown = f"[{host}]" if ":" in host else host
    question = Question(settings, deep=deep, url=(url or f"http://{shown}:{settings.server.port}").rstrip("/"), key=key)
    yield from _run((*machine.CHECKS, *files.CHECKS, *network.CHECKS), question)


def _without_value(error: SettingsError) -> str:
    """Return which setting is wrong and why, but not what it is: it may be a secret."""
    return str(error).splitlines()[0].partition(" (got ")[0]


def _run(checks: Iterable[Check], question: Question) -> Iterator[Finding]:
    for group, name, check in checks:
        try:
            yield from check(question)
        except Exception as error:  # noqa: BLE001  the outermost edge: the other checks still tell something
            text = str(error).splitlines()[0] if str(error) else ""
            yield warning(group, name, f"could not be checked: {type(error).__name__} {text}", "look at it by hand")
