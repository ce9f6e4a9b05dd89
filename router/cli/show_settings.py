"""``qarr settings``: every setting, after a check of the file and the environment; and ``qarr reload``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from rich.table import Table

from router.cli.client import KeyOption, RouterApiClient, UrlOption
from router.cli.common import ConfigOption, print_table
from router.deployment.settings import DEFAULT_LENGTHS
from router.section import PROJECT, cache_dir, config_dir, runtime_dir, state_dir
from router.settings import Settings, changes, leaves, load_settings
from tiers.errors import OperationError


def show_settings(
    name: Annotated[
        str, typer.Argument(help="Only this setting or section.", show_default=False)
    ] = "",
    as_schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema, for editors.")
    ] = False,
    config: ConfigOption = None,
) -> None:
    """List settings with defaults and meanings, then what file and environment set; checks both."""
    settings = load_settings(config)
    if as_schema:
        typer.echo(json.dumps(Settings.model_json_schema(), indent=2))
        return
    shown_rows = [row for row in rows() if _is_meant(name, row.setting)]
    if not shown_rows:
        raise typer.BadParameter(
            f"there is no setting {name}: 'qarr settings' lists them"
        )
    table = Table("setting", "default", "reloads", "meaning", box=None)
    for row in shown_rows:
        table.add_row(*(cell.replace("`", "") for cell in row))
    print_table(table, 200)
    for change in changes(Settings(), settings):
        if fnmatchcase(change.key, f"{name}*"):
            typer.echo(f"here: {change.key} = {change.after}")


def _is_meant(name: str, setting: str) -> bool:
    """Tell whether a setting is the one that was named, or is of a section that was; no name means all."""
    if not name:
        return True
    return fnmatchcase(name, setting) or setting.startswith(f"{name}.")


def reload(
    url: UrlOption = "", key: KeyOption = "", config: ConfigOption = None
) -> None:
    """Apply changed settings to the running router, without a restart: all of them, or none.

    It reads the file and variables that it was started with. SIGHUP does the same.
    """
    router = RouterApiClient(url, key, config)
    answer = router.ask("/admin/reload", "POST")
    changed = answer.get("changed")
    if changed is None:
        raise OperationError(
            f"{router.url}/admin/reload answered without 'changed': is this a router of this release?"
        )
    for change in changed:
        typer.echo(f"{change['setting']}: {change['before']} -> {change['after']}")
    typer.echo(f"settings reloaded: {len(changed)} changed")


class SettingRow(NamedTuple):
    """A setting as it is listed; code in the default and in the meaning is in backticks."""

    setting: str
    default: str
    reloads: str
    meaning: str


def rows() -> Iterator[SettingRow]:
    """Yield a row for each setting."""
    for key, field, reloads in leaves(Settings):
        name = ".".join(key)
        reloads_word = "yes" if reloads else "no"
        yield SettingRow(
            name,
            _default(name, field),
            reloads=reloads_word,
            meaning=field.description or "",
        )


def _default(name: str, field: FieldInfo) -> str:
    """Return a setting's default for people; paths are relative to the folders that differ between users."""
    if name == "tiers.*.max_model_len":
        default_lengths = [
            f"{tier} `{defaults['max_model_len']}`"
            for tier, defaults in DEFAULT_LENGTHS.items()
        ]
        return ", ".join(default_lengths)
    default_value = field.get_default(call_default_factory=True, validated_data={})
    if default_value == runtime_dir():
        return "`<runtime>`"
    if isinstance(default_value, Path):
        return f"`{_portable_path(default_value)}`"
    if isinstance(default_value, SecretStr):
        default_value = default_value.get_secret_value()
    if default_value in ({}, (), "", None):
        return "none"
    if isinstance(default_value, dict):
        return ", ".join(f"{key}: {item}" for key, item in default_value.items())
    return f"`{default_value}`"


def _portable_path(path: Path) -> str:
    # The first one counts where two of them are the same folder.
    known_folders = (
        ("<cache>", cache_dir()),
        ("<config>", config_dir()),
        ("<state>", state_dir()),
        ("<project>", PROJECT),
    )
    for placeholder, folder in known_folders:
        if path.is_relative_to(folder):
            return f"{placeholder}/{path.relative_to(folder)}"
    return str(path)
