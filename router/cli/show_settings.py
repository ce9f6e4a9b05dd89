"""``qarr settings``: every setting, after a check of the file and the environment; and ``qarr reload``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from router.cli.client import RouterApiClient
from router.cli.common import ConfigOption, with_options
from router.deployment.settings import DEFAULT_LENGTHS
from router.section import PROJECT, cache_dir, config_dir, runtime_dir, state_dir
from router.settings import Settings, leaves, load_settings


def show_settings(
    as_schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema, for editors.")] = False,
    config: ConfigOption = None,
) -> None:
    """List every setting with its default and meaning, after checking the file and the environment."""
    load_settings(config)
    typer.echo(json.dumps(Settings.model_json_schema(), indent=2) if as_schema else table())


@with_options
def reload(router: RouterApiClient) -> None:
    """Apply changed settings to the running router, without a restart: all of them, or none.

    It reads the file and variables that it was started with. SIGHUP does the same.
    """
    changed = router.ask("/admin/reload", "POST")["changed"]
    for change in changed:
        typer.echo(f"{change['setting']}: {change['before']} -> {change['after']}")
    typer.echo(f"settings reloaded: {len(changed)} changed")


def table() -> str:
    shown = ["| setting | default | reloads | meaning |", "| --- | --- | --- | --- |"]
    for key, field, reloads in leaves(Settings):
        name = ".".join(key)
        shown.append(f"| `{name}` | {_default(name, field)} | {'yes' if reloads else 'no'} | {field.description} |")
    return "\n".join(shown)


def _default(name: str, field: FieldInfo) -> str:
    if name == "tiers.*.max_model_len":
        return ", ".join(f"{tier} `{own['max_model_len']}`" for tier, own in DEFAULT_LENGTHS.items())
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
