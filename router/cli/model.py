"""``qarr model``: make and inspect the checkpoints."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from router.cli.common import (
    CalibrationOption,
    ConfigOption,
    ModelOption,
    clock,
    err,
    plain,
)
from router.deployment.first_start import Steps
from router.deployment.layout import prepare_options
from router.settings import load_settings
from tiers.checkpoints.prepare import find, finished, prepare

DIGITS = 16  # of a digest, shown
model_app = typer.Typer(
    help="Make and inspect the model's three checkpoints.", no_args_is_help=True
)


@model_app.command("prepare")
def model_prepare(
    config: ConfigOption = None,
    model: ModelOption = None,
    calibration: CalibrationOption = None,
    calibration_samples: Annotated[
        int | None,
        typer.Option(
            help="Calibration prompts used, at even distances; 0 uses all.", metavar="N"
        ),
    ] = None,
) -> None:
    """Make the BF16, FP8 and AWQ int4 checkpoints of a model; finished ones are kept."""
    started = time.monotonic()
    asked = {
        "name": model,
        "calibration": calibration,
        "calibration_samples": calibration_samples,
    }
    options = prepare_options(load_settings(config, {"model": asked}))
    steps = Steps(lambda line: err.print(f"{clock(started)} {plain(line)}"))
    for checkpoint in find(options) or prepare(options, steps):
        typer.echo(f"{checkpoint.tier:9} {checkpoint.path}")


@model_app.command("list")
def model_list(
    config: ConfigOption = None,
    model: ModelOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print them as JSON, with their manifests.")
    ] = False,
) -> None:
    """Show the finished checkpoints of the model, and their folders."""
    options = prepare_options(load_settings(config, {"model": {"name": model}}))
    found = finished(options)
    if as_json:
        rows = [
            {"tier": c.tier, "path": str(c.path), **c.manifest.model_dump(mode="json")}
            for c in found
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    if not found:
        err.print(
            f"no checkpoint of {plain(options.model)} is finished: 'qarr model prepare' makes them, 'qarr up' as well"
        )
        return
    for checkpoint in found:  # a line each, never wrapped: folders are copied from here
        made = checkpoint.manifest
        typer.echo(
            f"{checkpoint.tier:9} {made.precision:10} {made.weights_digest[:DIGITS]} {checkpoint.path}"
        )
