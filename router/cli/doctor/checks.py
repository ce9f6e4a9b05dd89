"""The order of the checks of ``qarr doctor``.

A check says what it found, and in one line what to do next. No check changes anything or shows a secret.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from router.cli.doctor import files, machine, network
from router.cli.doctor.findings import Check, CheckContext, Finding, ok, problem, warning
from router.settings import Settings, SettingsError, load_settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


def examine(config: Path | None, *, deep: bool, url: str | None, key: str) -> Iterator[Finding]:
    """Yield the findings of every check, one after another.

    Args:
        config: The settings file.
        deep: Also read every weight file.
        url: URL of a running router; None: the address in the settings.
        key: Key for that router.
    """
    checks: tuple[Check, ...] = (*machine.CHECKS, *files.CHECKS, *network.CHECKS)
    try:
        settings = load_settings(config)
        about = ok(f"valid{f', from {config}' if config else ''}", "settings")
    except SettingsError as error:
        settings, checks = Settings.model_construct(), machine.WITHOUT_SETTINGS
        # The first line without the value, which may be a secret.
        text = str(error).splitlines()[0].partition(" (got ")[0]
        about = problem(text, "'qarr settings' lists every setting; most checks need them", "settings")
    yield replace(about, group="settings")
    url = (url or network.own_url(settings)).rstrip("/")
    yield from _run(checks, CheckContext(settings, deep=deep, url=url, key=key))


def _run(checks: Iterable[Check], context: CheckContext) -> Iterator[Finding]:
    for group, name, check in checks:
        try:
            for finding in check(context):
                yield replace(finding, group=group, check=finding.check or name)
        except Exception as error:  # noqa: BLE001  the outermost edge: the other checks still tell something
            text = str(error).splitlines()[0] if str(error) else ""
            failed = warning(f"could not be checked: {type(error).__name__} {text}", "check it by hand")
            yield replace(failed, group=group, check=name)
