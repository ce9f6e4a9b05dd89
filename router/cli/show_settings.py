"""``qarr settings``: every setting, after a check of the file and the environment; and ``qarr reload``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from rich.table import Table

from router.cli.client import RouterApiClient
from router.cli.common import ConfigOption, print_table, with_options
from router.deployment.settings import DEFAULT_LENGTHS
from router.section import PROJECT, cache_dir, config_dir, runtime_dir, state_dir
from router.settings import Settings, changes, leaves, load_settings


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
    found = [
        row
        for row in rows()
        if not name or fnmatchcase(name, row[0]) or row[0].startswith(f"{name}.")
    ]
    if not found:
        raise typer.BadParameter(
            f"there is no setting {name}: 'qarr settings' lists them"
        )
    table = Table("setting", "default", "reloads", "meaning", box=None)
    for row in found:
        table.add_row(*(cell.replace("`", "") for cell in row))
    print_table(table, 200)
    for change in changes(Settings(), settings):
        if fnmatchcase(change.key, f"{name}*"):
            typer.echo(f"here: {change.key} = {change.after}")


@with_options
def reload(router: RouterApiClient) -> None:
    """Apply changed settings to the running router, without a restart: all of them, or none.

    It reads the file and variables that it was started with. SIGHUP does the same.
    """
    changed = router.ask("/admin/reload", "POST")["changed"]
    for change in changed:
        typer.echo(f"{change['setting']}: {change['before']} -> {change['after']}")
    typer.echo(f"settings reloaded: {len(changed)} changed")


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield each setting's name, default, whether it reloads, and meaning; code in the last ones is in backticks."""
    for key, field, reloads in leaves(Settings):
        name = ".".join(key)
        yield (
            name,
            _default(name, field),
            "yes" if reloads else "no",
            field.description or "",
        )


def _default(name: str, field: FieldInfo) -> str:
    if name == "tiers.*.max_model_len":
        return ", ".join(
            f"{tier} `{own['max_model_len']}`" for tier, own in DEFAULT_LENGTHS.items()
        )
    value = field.get_default(call_default_factory=True, validated_data={})
    if value == runtime_dir():
        return "`<runtime>`"
    if isinstance(value, Path):
        for folder, shown in (
            (cache_dir(), "<cache>"), (config_dir(), "<config>"), (state_dir(), "<state>"), (PROJECT, "<project>"),
        ):  # fmt: skip
            if value.is_relative_to(folder):
                return f"`{shown}/{value.relative_to(folder)}`"
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if value in ({}, (), "", None):
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{k}: {v}" for k, v in value.items())
    return f"`{value}`"
