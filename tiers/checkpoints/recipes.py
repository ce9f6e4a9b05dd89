"""How checkpoints of each scheme are made, and which modules of a model stay in 16 bits: ``recipes.toml``, checked."""

from __future__ import annotations

import json
import tomllib
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from tiers.errors import CheckpointError
from tiers.formats import FORMATS

if TYPE_CHECKING:
    from collections.abc import Mapping

TABLE = Path(__file__).with_name("recipes.toml")
# Recipes of releases that had no table: they are not part of the digest, so that what was made with them stays usable.
DEFAULT_KEPT = ("lm_head",)


class Algorithm(StrEnum):
    """How the rounded weights are found."""

    ROUND_TO_NEAREST = "rtn"
    CALIBRATED = "calibrated"
    AWQ = "awq"
    GPTQ = "gptq"


class MadeScheme(BaseModel):
    """How llm-compressor makes checkpoints of one number format; see ``recipes.toml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    preset: str
    algorithm: Algorithm
    folder: str
    method: str
    divisor: int = Field(ge=1)
    output_divisor: int = Field(1, ge=1)
    groups: tuple[int, ...] = ()
    source: str

    @property
    def needs_calibration(self) -> bool:
        """Tell whether prompts are run through the model."""
        return self.algorithm is not Algorithm.ROUND_TO_NEAREST


class Architecture(BaseModel):
    """What stays in 16 bits in the models of some architectures; see ``recipes.toml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    names: tuple[str, ...] = ()
    keep: tuple[str, ...]
    source: str
    text_in: str = ""
    awq_mappings_of: str = ""
    smooths: bool = False
    also_in: dict[str, tuple[str, ...]] = {}
    refused: str = ""

    def kept_with(self, scheme: str) -> tuple[str, ...]:
        """Return the patterns of the modules that stay in 16 bits with a scheme."""
        return (*self.keep, *self.also_in.get(scheme, ()))


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    schemes: dict[str, MadeScheme]
    architectures: tuple[Architecture, ...]
    unknown: Architecture


class Recipe(BaseModel):
    """How a checkpoint of one scheme is made of one model. ``quantize.py`` gets it as JSON.

    Attributes:
        scheme: Its number format.
        architecture: As ``config.json`` names it.
        preset: llm-compressor's scheme.
        algorithm: How the weights are found.
        divisor: What the input widths of quantized layers must be multiples of.
        output_divisor: What their output widths must be multiples of.
        groups: How many weights may share a scale, the best first; empty: the preset says it.
        keep: Patterns of the modules that stay in 16 bits.
        text_in: The module with the language model; empty: the whole model is one.
        awq_mappings_of: The architecture whose AWQ mappings count; empty: its own.
        smooths: SmoothQuant comes first.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    scheme: str
    architecture: str
    preset: str
    algorithm: Algorithm
    divisor: int
    output_divisor: int = 1
    groups: tuple[int, ...] = ()
    keep: tuple[str, ...]
    text_in: str = ""
    awq_mappings_of: str = ""
    smooths: bool = False

    def identity(self) -> dict[str, Any]:
        """Return what the result depends on and older releases did not have, for the digest of the recipe."""
        parts: dict[str, Any] = {}
        if self.keep != DEFAULT_KEPT:
            parts["keep"] = list(self.keep)
        if self.smooths:
            parts["smooths"] = True
        if self.algorithm is Algorithm.AWQ and self.awq_mappings_of:
            parts["awq_mappings_of"] = self.awq_mappings_of
        return parts


def recipe_for(scheme: str, config: Mapping[str, Any]) -> Recipe:
    """Return how a checkpoint of a scheme is made of a model.

    Args:
        scheme: A name of ``scheme_names()``.
        config: The model's ``config.json``.

    Raises:
        CheckpointError: There is no such scheme.
    """
    made = made_scheme(scheme)
    name = architecture_of(config)
    architecture = _architecture(name)
    is_smoothed = (
        architecture.smooths
        and made.algorithm is Algorithm.GPTQ
        and FORMATS[scheme].activation_bits < FORMATS["bf16"].activation_bits
    )
    return Recipe(
        scheme=scheme,
        architecture=name,
        preset=made.preset,
        algorithm=made.algorithm,
        divisor=made.divisor,
        output_divisor=made.output_divisor,
        groups=made.groups,
        keep=architecture.kept_with(scheme),
        text_in=architecture.text_in,
        awq_mappings_of=architecture.awq_mappings_of,
        smooths=is_smoothed,
    )


def check_is_served(recipe: Recipe) -> None:
    """Check that an engine can serve what a recipe makes.

    Raises:
        CheckpointError: None can; the text says what to take instead.
    """
    refused = _architecture(recipe.architecture).refused
    if refused:
        raise CheckpointError(
            f"no {recipe.scheme} checkpoint of a {recipe.architecture} is made: {refused} (tiers.NAME.checkpoint), or leave "
            f"the tier out (tiers.NAME.replicas = 0)"
        )


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the class that a model's ``config.json`` names; empty: none."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    return ""


def read_config(folder: Path) -> dict[str, Any]:
    """Return a model's ``config.json``.

    Raises:
        CheckpointError: It cannot be read.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return config


def made_scheme(name: str) -> MadeScheme:
    """Return how a scheme is made.

    Raises:
        CheckpointError: It is not one that can be.
    """
    scheme = _table().schemes.get(name)
    if scheme is None:
        raise CheckpointError(
            f"no checkpoint of scheme {name!r} can be made: {', '.join(scheme_names())} are allowed"
        )
    return scheme


def scheme_names() -> tuple[str, ...]:
    """Return the schemes of which checkpoints can be made."""
    return tuple(_table().schemes)


def known_architectures() -> tuple[str, ...]:
    """Return the architectures that have an entry of their own."""
    return tuple(
        name for architecture in _table().architectures for name in architecture.names
    )


def _architecture(name: str) -> Architecture:
    """Return the entry of an architecture."""
    # A GGUF file has no configuration yet: what is imported from one is a Llama.
    if not name:
        name = "LlamaForCausalLM"
    for architecture in _table().architectures:
        if name in architecture.names:
            return architecture
    return _table().unknown


@cache
def _table() -> _Table:
    """Return the recipes of this release."""
    return read_table(TABLE.read_text("utf-8"))


def read_table(text: str) -> _Table:
    """Read a table of recipes.

    Raises:
        ValueError: It is no such table.
    """
    document = tomllib.loads(text)
    schemes = {
        name: MadeScheme(name=name, **row) for name, row in document["schemes"].items()
    }
    table = _Table(**{**document, "schemes": schemes})
    unknown_formats = [name for name in schemes if name not in FORMATS]
    if unknown_formats:
        raise ValueError(
            f"schemes.{unknown_formats[0]}: no number format has this name"
        )
    for architecture in table.architectures:
        for name in architecture.also_in:
            if name not in schemes:
                raise ValueError(
                    f"{architecture.names[0]}, also_in.{name}: no such scheme"
                )
    return table
