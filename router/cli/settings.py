"""``qarr settings``: every setting, after a check of the file and the environment."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from router.cli.common import ConfigOption  # noqa: TC001  typer reads it
from router.settings import load_settings, schema, table


def show_settings(
    as_schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema, for editors.")] = False,
    config: ConfigOption = None,
) -> None:
    """List every setting with its default and meaning, after checking the file and the environment."""
    load_settings(config)
    typer.echo(json.dumps(schema(), indent=2) if as_schema else table())
