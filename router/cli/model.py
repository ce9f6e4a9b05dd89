"""``qarr model``: make and inspect the checkpoints."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

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
from router.deployment.published import settle_tiers
from router.settings import load_settings
from tiers.checkpoints.checkpoint import Checkpoint
from tiers.checkpoints.prepare import (
    USUAL_SCHEMES,
    PrepareOptions,
    check_schemes,
    find,
    finished,
    prepare,
)
from tiers.checkpoints.recipes import scheme_names
from tiers.errors import CheckpointError
from tiers.spec import STANDARD_TIERS, TierName

if TYPE_CHECKING:
    from collections.abc import Sequence

SHOWN_DIGITS = 16  # a digest is cut to these
model_app = typer.Typer(
    help="Make and inspect the model's three checkpoints.", no_args_is_help=True
)
CalibrationSamplesOption = Annotated[
    int | None,
    typer.Option(
        help="Calibration prompts used, at even distances; 0 uses all.", metavar="N"
    ),
]
SchemeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--scheme",
        help="What is made for a tier, as in fast=nvfp4: "
        f"{', '.join(scheme_names())}. Unset: "
        f"{', '.join(f'{tier}={scheme}' for tier, scheme in USUAL_SCHEMES.items())}, or what the settings say. May be "
        "repeated.",
        metavar="TIER=SCHEME",
    ),
]


@model_app.command("prepare")
def model_prepare(
    config: ConfigOption = None,
    model: ModelOption = None,
    calibration: CalibrationOption = None,
    calibration_samples: CalibrationSamplesOption = None,
    scheme: SchemeOption = None,
) -> None:
    """Make the checkpoints of a model: BF16, and one of each tier's scheme; finished ones are kept.

    Published ones that the settings name (tiers.NAME.checkpoint) are compared and fetched instead.
    """
    started_at = time.monotonic()
    overrides = {
        "name": model,
        "calibration": calibration,
        "calibration_samples": calibration_samples,
    }
    settings = load_settings(config, {"model": overrides})
    options = _with_schemes(prepare_options(settings), scheme or ())
    steps = Steps(lambda line: err.print(f"{clock(started_at)} {plain(line)}"))
    settled = settle_tiers(settings, steps)
    for note in settled.notes:
        err.print(plain(note))
    for tier, folder in settled.folders.items():
        typer.echo(f"{tier:9} {folder}")
    wanted = set(STANDARD_TIERS) - settled.folders.keys()
    if settled.is_base_quantized or not wanted:
        return
    for checkpoint in find(options) or prepare(options, steps, wanted=wanted):
        if checkpoint.tier in wanted:
            typer.echo(f"{checkpoint.tier:9} {checkpoint.path}")


def _with_schemes(options: PrepareOptions, arguments: Sequence[str]) -> PrepareOptions:
    """Return options with the schemes of a command line over those of the settings."""
    return replace(options, schemes={**options.schemes, **_schemes_of(arguments)})


def _schemes_of(arguments: Sequence[str]) -> dict[TierName, str]:
    """Return the schemes that a command line names.

    Raises:
        typer.BadParameter: A tier has none, or there is no such scheme.
    """
    schemes = {}
    for argument in arguments:
        tier, separator, scheme = argument.partition("=")
        if not separator or tier not in USUAL_SCHEMES:
            raise typer.BadParameter(
                f"--scheme {argument}: TIER=SCHEME is expected, such as fast=nvfp4; "
                f"{' and '.join(sorted(USUAL_SCHEMES))} have a scheme"
            )
        schemes[TierName(tier)] = scheme
    try:
        check_schemes(schemes)
    except CheckpointError as error:
        raise typer.BadParameter(f"--scheme: {error}") from error
    return schemes


@model_app.command("list")
def model_list(
    config: ConfigOption = None,
    model: ModelOption = None,
    scheme: SchemeOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print them as JSON, with their manifests.")
    ] = False,
) -> None:
    """Show the finished checkpoints of the model, and their folders."""
    options = _with_schemes(
        prepare_options(load_settings(config, {"model": {"name": model}})), scheme or ()
    )
    checkpoints = finished(options)
    if as_json:
        rows = [_as_json(checkpoint) for checkpoint in checkpoints]
        typer.echo(json.dumps(rows, indent=2))
        return
    if not checkpoints:
        err.print(
            f"no checkpoint of {plain(options.model)} is finished: 'qarr model prepare' makes them, 'qarr up' as well"
        )
        return
    # No table: folders are copied from these lines, so they must not be wrapped.
    for checkpoint in checkpoints:
        manifest = checkpoint.manifest
        digest = manifest.weights_digest[:SHOWN_DIGITS]
        typer.echo(
            f"{checkpoint.tier:9} {manifest.precision:11} {digest} {checkpoint.path}"
        )


def _as_json(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "tier": checkpoint.tier,
        "path": str(checkpoint.path),
        **checkpoint.manifest.model_dump(mode="json"),
    }
